# SPDX-License-Identifier: Apache-2.0
"""nib's classes under the names of TransformerEngine and Megatron, where those are not installed.

    nib.torch.install_aliases()
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

A finder at the end of sys.meta_path makes the modules of MODULES when somebody imports them. Whatever else can be found
under such a name is found before it, so a real package is never shadowed.
"""
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

from . import unsupported

_TENSORS = {
    "nvfp4_tensor": ("NVFP4Quantizer", "NVFP4Tensor", "get_hadamard_matrix", "get_rht_matrix", "get_wgrad_sign_vector",
                     "get_no_random_sign_vector", "get_sign_from_vector", "get_random_sign_mask_for_rht",
                     "_make_nvfp4_tensor_in_reduce_ex"),
    "float8_tensor": ("Float8Quantizer", "Float8CurrentScalingQuantizer", "Float8Tensor"),
    "mxfp8_tensor": ("MXFP8Quantizer", "MXFP8Tensor"),
    "float8_blockwise_tensor": ("Float8BlockQuantizer", "Float8BlockwiseQTensor"),
    "grouped_tensor": ("GroupedTensor",),
    "identity_tensor": ("IdentityQuantizer", "IdentityTensor", "_make_identity_tensor_in_reduce_ex"),
    "hybrid_tensor": ("HybridQuantizer", "HybridQuantizedTensor", "_make_hybrid_quantized_tensor_in_reduce_ex"),
}
_STORAGES = {
    "nvfp4_tensor": ("NVFP4TensorStorage", "_FromNVFP4Func", "_fp4_e2m1_vals"),
    "float8_tensor": ("Float8TensorStorage",),
    "mxfp8_tensor": ("MXFP8TensorStorage",),
    "float8_blockwise_tensor": ("Float8BlockwiseQTensorStorage",),
    "grouped_tensor": ("GroupedTensorStorage",),
    "identity_tensor": ("IdentityTensorStorage",),
    "hybrid_tensor": ("HybridQuantizedTensorStorage",),
}
_BASES = {"quantized_tensor": ("QuantizedTensor", "QuantizedTensorStorage", "Quantizer", "prepare_for_saving",
                               "restore_from_saved", "restore_from_func_ctx")}
_AVAILABLE = ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available",
              "is_bf16_available")
_AUTOCAST = ("autocast", "fp8_autocast", "quantized_model_init", "fp8_model_init", "get_default_recipe",
             "is_fp8_enabled")
_ROLES = ("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest")
_LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "LayerNorm", "RMSNorm", "Fp8Padding",
           "Fp8Unpadding")
_MASTER = ("quantize_master_weights", "cast_master_weights_to_fp8", "post_all_gather_processing", "replace_raw_data",
           "clear_columnwise_cache")
_GLU = ("interleave_glu_tensor", "deinterleave_glu_tensor")
_DEVICE = ("get_device_compute_capability", "get_cudnn_version")
_FACTORIES = ("high_precision_factory", "delayed_scaling_factory", "current_scaling_factory",
              "float8_block_scaling_factory", "mxfp8_factory", "nvfp4_factory")
_ZOO = ("high_precision_fwd_mxfp8_bwd_factory", "mxfp8_fwd_nvfp4_bwd_factory", "nvfp4_1d_weight_factory",
        "mxfp8_fwd_high_precision_bwd_factory", "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
        "nvfp4_row_scaled_fwd_high_precision_bwd_factory", "nvfp4_linear_fp8_dpa_factory")
_EXTRA_STATE = ("CheckpointExtraStatePolicy", "UNSAFE_PICKLE_EXTRA_STATE_ENV", "_RECIPE_POLICIES",
                "extra_state_pickle_advisory", "is_stateless_recipe", "recipe_extra_state_policy",
                "should_load_extra_state_pickle", "unsafe_pickle_extra_state_enabled")
_SHAPES = ("ensure_divisibility", "divide", "ceil_div", "requires_grad", "cast_if_needed", "clear_tensor_data",
           "needs_quantized_gemm", "check_dim_for_fp8_exec", "assert_dim_for_fp8_exec", "canonicalize_device",
           "canonicalize_dtype", "canonicalize_process_group", "devices_match", "torch_get_autocast_gpu_dtype",
           "scaled_init_method_normal", "is_bf16_compatible", "gpu_autocast_ctx", "split_tensor_along_dim",
           "SplitAlongDim", "get_nvtx_range_context", "nvtx_range_push", "nvtx_range_pop", "torch_version")
_GROUPS = ("get_distributed_world_size", "get_distributed_rank", "set_tensor_model_parallel_attributes", "allreduce",
           "reduce_scatter_along_first_dim", "split_tensor_into_1d_equal_chunks", "gather_split_1d_tensor",
           "activation_recompute_forward", "get_activation_recompute_contexts", "use_reentrant_activation_recompute",
           "graph_safe_rng_available", "is_graph_safe_rng_state", "get_all_rng_states", "set_all_rng_states",
           "get_te_classes", "has_te_modules")
_OFFLOAD = ("get_cpu_offload_context", "is_cpu_offload_enabled", "mark_not_offload", "mark_activation_offload",
            "start_offload")
_MULTI = ("multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_scale_tensor")
_APPLY = ("MultiTensorApply", "multi_tensor_applier")
_GEMM = ("general_gemm", "general_grouped_gemm", "general_grouped_gemm_for_grouped_tensor", "validate_gemm_scale")
_EVERYTHING = object()  # all public names of the module

_MEGATRON = {"fp4_utils": ("HAVE_TE", "HAVE_TE_FP4_TENSOR_CLASS", "FP4_TENSOR_CLASS", "is_nvfp4tensor",
                           "is_grouped_nvfp4tensor", "get_nvfp4_rowwise_packed_shape", "modify_nvfp4_rowwise_storage",
                           "modify_grouped_nvfp4_rowwise_storage", "quantize_nvfp4_param_shard", "get_fp4_align_size",
                           "dequantize_fp4_tensor"),
             "megatron": ("get_fp4_recipe", "get_fp4_context")}

# alias: {module of nib.torch: names}
_TE = "transformer_engine.pytorch"
MODULES = {
    "transformer_engine": {"helpers": ("__version__",)},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {"recipe": _EVERYTHING},
    _TE: {**_BASES, "constants": ("DType",), "module": _LAYERS, "quantization": (*_AUTOCAST, *_AVAILABLE, *_ROLES),
          "attention": ("DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding"),
          "transformer": ("TransformerLayer",), "recompute": ("checkpoint", "CudaRNGStatesTracker"),
          "utils": (*_GLU, *_DEVICE), "helpers": ("torch_version", "get_cpu_offload_context", "mark_not_offload"),
          **{name: _TENSORS[name] + _STORAGES[name] for name in _TENSORS}},
    f"{_TE}.quantized_tensor": _BASES,
    f"{_TE}.constants": {"constants": _EVERYTHING},
    f"{_TE}.torch_version": {"helpers": ("torch_version",)},
    f"{_TE}.utils": {"helpers": _SHAPES,
                     "utils": ("round_up_to_nearest_multiple", "is_non_tn_fp8_gemm_supported", *_GLU, *_DEVICE),
                     "module.base": ("init_method_normal", "init_method_constant", "get_default_init_method"),
                     "quantization": ("is_bf16_available",)},
    f"{_TE}.cpu_offload": {"helpers": _OFFLOAD},
    f"{_TE}.cpu_offload_v1": {"helpers": _OFFLOAD[:4]},
    f"{_TE}.distributed": {"helpers": _GROUPS, "utils": ("gather_along_first_dim",),
                           "recompute": ("checkpoint", "CudaRNGStatesTracker"),
                           "quantization": ("is_fp8_activation_recompute_enabled",
                                            "in_fp8_activation_recompute_phase")},
    f"{_TE}.quantization": {"quantization": (_EVERYTHING, "_amax_and_scale_update", "_default_sf_compute",
                                             "_has_delayed_scaling_state")},
    f"{_TE}.fp8": {"quantization": _EVERYTHING},
    f"{_TE}.float8_tensor": {"float8_tensor": ("Float8Tensor",)},
    f"{_TE}._extra_state": {"extra_state": (*_EXTRA_STATE,)},
    f"{_TE}.module": {"module": _LAYERS},
    f"{_TE}.module.base": {"module.base": ("TransformerEngineBaseModule", "get_dummy_wgrad")},
    f"{_TE}.module.linear": {"module": ("Linear",)},
    f"{_TE}.module.layernorm_linear": {"module": ("LayerNormLinear",)},
    f"{_TE}.module.layernorm_mlp": {"module": ("LayerNormMLP",)},
    f"{_TE}.module.grouped_linear": {"module": ("GroupedLinear",)},
    f"{_TE}.module.layernorm": {"module": ("LayerNorm",)},
    f"{_TE}.module.rmsnorm": {"module": ("RMSNorm",)},
    f"{_TE}.module.fp8_padding": {"module": ("Fp8Padding",)},
    f"{_TE}.module.fp8_unpadding": {"module": ("Fp8Unpadding",)},
    f"{_TE}.module._common": {"utils": ("set_quantizer_amax_reduction_group",), "module.base": ("WeightGradStore",)},
    f"{_TE}.attention": {"attention": ("DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding"),
                         "helpers": ("_SplitAlongDim",)},
    f"{_TE}.attention.dot_product_attention": {"attention": ("DotProductAttention",)},
    f"{_TE}.attention.dot_product_attention.dot_product_attention": {"attention": ("DotProductAttention",)},
    f"{_TE}.attention.dot_product_attention.utils": {"attention": ("check_set_window_size", "get_alibi")},
    f"{_TE}.attention.multi_head_attention": {"attention": ("MultiheadAttention",)},
    f"{_TE}.attention.rope": {"attention": ("RotaryPositionEmbedding", "apply_rotary_pos_emb")},
    f"{_TE}.transformer": {"transformer": ("TransformerLayer", "DropPath")},
    f"{_TE}.optimizers": {"optimizers": ("FusedAdam",), "helpers": (*_MULTI, *_APPLY)},
    f"{_TE}.optimizers.fused_adam": {"optimizers": ("FusedAdam",)},
    f"{_TE}.optimizers.multi_tensor_apply": {"helpers": _APPLY},
    f"{_TE}.cpp_extensions": {"cpp_extensions": _GEMM},
    f"{_TE}.cpp_extensions.gemm": {"cpp_extensions": _GEMM},
    f"{_TE}.custom_recipes": {},
    f"{_TE}.custom_recipes.gemm": {"cpp_extensions": ("custom_gemm", "GEMMType", "MMParams")},
    f"{_TE}.custom_recipes.quantizer_factories": {"custom_recipes": _FACTORIES},
    f"{_TE}.custom_recipes.quantizer_factory_zoo": {"custom_recipes": _ZOO},
    f"{_TE}.tensor": {**_BASES, **_TENSORS, **{name: _TENSORS[name] + _STORAGES[name] for name in _TENSORS},
                      "utils": _MASTER, "helpers": ("get_all_tensor_types",)},
    f"{_TE}.tensor.utils": {"utils": _MASTER, "products": ("is_custom",)},
    f"{_TE}.tensor._quantization_helpers": {"quantized_tensor": ("_QuantizeFunc", "_IdentityFunc",
                                                                 "_stride_from_shape")},
    **{f"{_TE}.tensor.{name}": {name: _TENSORS[name] + _STORAGES[name]} for name in _TENSORS},
    f"{_TE}.tensor.storage": _STORAGES,
    **{f"{_TE}.tensor.storage.{name}_storage": {name: names} for name, names in _STORAGES.items()},
    "transformer_engine_torch": {"constants": ("DType",), "tex": _EVERYTHING, "helpers": _MULTI},
    "megatron": {},
    "megatron.core": {},
    "megatron.core.enums": {"megatron": ("Fp4Recipe",)},
    "megatron.core.fp4_utils": _MEGATRON,
    "core": {},
    "core.fp4_utils": _MEGATRON,
}
for _module, _raising in unsupported.NAMES.items():
    MODULES.setdefault(f"{_TE}.{_module}".rstrip("."), {})["unsupported"] = _raising


def _names(module, names):
    found = [] if names is _EVERYTHING else [name for name in names if name is not _EVERYTHING]
    if names is _EVERYTHING or _EVERYTHING in names:
        found += [name for name, value in vars(module).items()
                  if not name.startswith("_") and not isinstance(value, types.ModuleType)]
    return found


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__nib_alias__ = True
        prefix = module.__name__ + "."
        for name in MODULES:  # `import transformer_engine.pytorch as te; te.tensor.utils` works there
            if name.startswith(prefix) and "." not in name[len(prefix):]:
                importlib.import_module(name)
        for source, names in MODULES[module.__name__].items():  # a name counts before a module of that name
            found = importlib.import_module(f"nib.torch.{source}")
            for name in _names(found, names):
                setattr(module, name, getattr(found, name))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in MODULES:
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and not getattr(parent, "__nib_alias__", False) and getattr(parent, "__file__", None):
            return None  # a part that a real package lacks is none of ours
        # Every alias is a package: others may put modules beside those that are here.
        return importlib.machinery.ModuleSpec(fullname, _Loader(), origin="nib.torch", is_package=True)


_finder = _Finder()


def install_aliases():
    """Make the modules of TransformerEngine and Megatron importable, each only where the real one is absent. Returns
    the names of the packages that nib gives. A directory that is appended to the `__path__` of one is searched for
    modules that nib does not have."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
        importlib.invalidate_caches()
    return [name for name in MODULES if "." not in name and _is_alias(name)]


def _is_alias(name):
    if name in sys.modules:
        return getattr(sys.modules[name], "__nib_alias__", False)
    spec = importlib.util.find_spec(name)
    return spec is not None and isinstance(spec.loader, _Loader)

# SPDX-License-Identifier: Apache-2.0
"""Public names of TransformerEngine that nib does not serve: they import, and say so when they are used."""


def _message(name):
    return f"nib does not have TransformerEngine's {name}: it has no equal here (docs/python.md, table of names)"


def _unsupported(name):
    """A class by this name that raises when it is made; as a function it raises when it is called."""
    def __new__(cls, *args, **kwargs):
        raise NotImplementedError(_message(name))
    return type(name, (), {"__new__": __new__, "__doc__": _message(name), "__module__": __name__})


# module of transformer_engine.pytorch: names
NAMES = {
    "": ("FusedMLAQUpProjRopeQuant", "InferenceParams", "moe_permute", "moe_permute_with_probs",
         "moe_permute_and_pad_with_probs", "moe_unpermute", "moe_sort_chunks_by_index",
         "moe_sort_chunks_by_index_with_probs", "make_graphed_callables", "get_cpu_offload_context", "mark_not_offload",
         "ManualOffloadSynchronizer", "onnx_export", "parallel_cross_entropy", "CusolverMpCtx", "newton_schulz",
         "initialize_ub", "destroy_ub", "UserBufferQuantizationMode"),
    "ops": ("AddExtraInput", "AllGather", "AllReduce", "BasicLinear", "BasicOperation", "Bias", "ClampedSwiGLU",
            "ConstantScale", "Dropout", "FusedOperation", "FusibleOperation", "GEGLU", "GELU", "GLU", "GroupedLinear",
            "Identity", "L2Normalization", "LayerNorm", "Linear", "MakeExtraOutput", "QGEGLU", "QGELU", "Quantize",
            "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Reshape", "SReGLU", "SReLU", "ScaledClampedQGeGLU",
            "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU", "Sequential", "SiLU", "SiTUGLU", "SwiGLU",
            "register_backward_fusion", "register_forward_backward_fusion", "register_forward_fusion"),
    "optimizers": ("FusedSGD", "MultiTensorApply", "multi_tensor_applier"),
}


def __getattr__(name):
    if not any(name in names for names in NAMES.values()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _unsupported(name)
    return globals()[name]

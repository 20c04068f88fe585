# SPDX-License-Identifier: Apache-2.0
"""What all layers have in common: parameters and how they come to be, quantizers and what these remember."""
import enum
import io
import pickle
import types
import warnings
from collections import namedtuple
from contextlib import contextmanager, nullcontext

import torch

from .. import quantization, recipe as recipes
from ..quantization import FP8GlobalStateManager, QuantizerRole, RecipeState, has_delayed_scaling_state, recompute
from ..quantized_tensor import QuantizedTensor, QuantizedTensorStorage, is_dtensor

# How a parameter is initialized, and the slot of its quantizer (None: it stays plain).
_ParameterInitMeta = namedtuple("_ParameterInitMeta", "init_fn get_rng_state_tracker fp8_meta_index",
                                defaults=(None, None, None))

# Arguments of TransformerEngine's layers that concern parallel or fused work, and what they are where there is none.
_ALONE = {"sequence_parallel": False, "tp_group": None, "tp_size": 1, "parallel_mode": None, "ub_overlap_ag": False,
          "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False, "ub_bulk_dgrad": False, "ub_bulk_wgrad": False,
          "ub_name": None, "symmetric_ar_type": None, "save_original_input": False, "fp8_output": False,
          "fp8_grad": False, "set_parallel_mode": False, "seq_length": None, "micro_batch_size": None,
          "cp_group": None, "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "p2p"}
# These change no result in one process.
_WORDLESS = ("ub_name", "save_original_input", "parallel_mode", "sequence_parallel", "set_parallel_mode", "seq_length",
             "micro_batch_size", "cp_global_ranks", "cp_stream", "cp_comm_type")


def check_alone(where, options):
    """Reject what only a group of processes or a fused kernel can do."""
    for name, value in options.items():
        if name not in _ALONE:
            raise TypeError(f"{where} has no argument {name!r}")
        if name in ("tp_group", "cp_group") and value is not None:
            import torch.distributed as dist
            if dist.is_available() and dist.is_initialized() and dist.get_world_size(value) == 1:
                continue
        if value != _ALONE[name] and name not in _WORDLESS:
            raise NotImplementedError(f"{where} of nib works alone and fuses nothing: {name}={value!r} is not possible")


def init_method_normal(sigma):
    """An initialization with N(0, sigma)."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def init_method_constant(value):
    return lambda tensor: torch.nn.init.constant_(tensor, value)


def get_default_init_method():
    return init_method_normal(0.023)


def shard_group(parameter):
    """The processes that have the shards of a DTensor."""
    return parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)


def activation_dtype(inp, parameter):
    """The dtype of a layer's activations: that of torch.autocast where it is on, otherwise the parameters'."""
    kind = inp.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else parameter.dtype


def without_autocast(inp):
    """A context in which torch.autocast does not touch dtypes that a layer has chosen."""
    kind = inp.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


# ---- Values from before quantization ---------------------------------------------------------------------


def _get_high_precision_init_val(self):
    """What the weight was quantized from; None after clear_high_precision_init_val."""
    return getattr(self, "_high_precision_init_val", None)


def _clear_high_precision_init_val(self):
    if hasattr(self, "_high_precision_init_val"):
        del self._high_precision_init_val


def attach_high_precision_init_val(parameter, values):
    parameter._high_precision_init_val = values
    parameter.get_high_precision_init_val = types.MethodType(_get_high_precision_init_val, parameter)
    parameter.clear_high_precision_init_val = types.MethodType(_clear_high_precision_init_val, parameter)


# ---- Delayed weight gradients ----------------------------------------------------------------------------


class WeightGradStore:
    """Weight gradients that backward leaves for backward_dw()."""

    def __init__(self, delay_wgrad_compute=False):
        self.enabled, self.waiting = bool(delay_wgrad_compute), []

    def delay_wgrad_compute(self):
        return self.enabled

    def put(self, compute):
        self.waiting.append(compute)

    def pop(self):
        if not self.waiting:
            raise RuntimeError("backward_dw() has nothing to do: no backward pass has left weight gradients")
        return self.waiting.pop(0)()


def get_dummy_wgrad(shape, dtype, zero=False):
    """A gradient for autograd where the real one went into main_grad."""
    return (torch.zeros if zero else torch.empty)(tuple(shape), dtype=dtype)


# ---- Extra state -----------------------------------------------------------------------------------------


def _member(kind, name):
    """getattr, of enums only: newer Pythons pickle their members so."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError("an extra state holds tensors and recipes")
    return kind[name]


_SAFE = {("builtins", "getattr"): _member,
         ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
         ("collections", "OrderedDict"): dict,
         ("torch.storage", "_load_from_bytes"): lambda data: torch.load(io.BytesIO(data), weights_only=True)}


class _Unpickler(pickle.Unpickler):
    """Tensors and recipes, and nothing that could run code."""

    def find_class(self, module, name):
        if (module, name) in _SAFE:
            return _SAFE[module, name]
        if module in ("transformer_engine.common.recipe", "nib.torch.recipe") and hasattr(recipes, name) \
                and isinstance(getattr(recipes, name), type):
            return getattr(recipes, name)
        raise pickle.UnpicklingError(f"an extra state holds tensors and recipes, not {module}.{name}")


class TransformerEngineBaseModule(torch.nn.Module):
    """A layer with parameters that can be quantized and quantizers for its products.

    quantizers["scaling_fwd"] has three per product (input, weight, output), ["scaling_bwd"] two (grad_output,
    grad_input). They are made with the first forward pass in a recipe, and again where the recipe is another one.
    """

    _num_gemms = 1
    _count = 0

    def __init__(self, name=None):
        super().__init__()
        TransformerEngineBaseModule._count += 1
        self.name = f"Layer_{TransformerEngineBaseModule._count}" if name is None else name
        self.fp8_initialized = self.fp8 = self.fp8_calibration = self.fp8_meta_tensors_initialized = False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        self.tp_group, self.tp_size, self.sequence_parallel = None, 1, False
        self.param_init_meta = {}
        self.primary_weights_in_fp8 = FP8GlobalStateManager.with_fp8_parameters()
        self.preserve_high_precision_init_val = FP8GlobalStateManager.with_high_precision_init_val()
        self._fp8_workspaces = {}  # quantized weights between microbatches
        self.activation_dtype = None
        self.wgrad_accumulation_and_reduce_hooks = []
        self.wgrad_store = WeightGradStore()
        self.fuse_wgrad_accumulation = False
        self.use_bias = False
        self.weight_names, self.bias_names = [], []
        self._output_quantizer_role = self._grad_input_quantizer_role = None

    # -- parameters --

    def register_parameter(self, name, param, **init):
        super().register_parameter(name, param)
        if name not in self.__dict__.get("param_init_meta", {name: None}):
            self.param_init_meta[name] = _ParameterInitMeta(**init)

    def new_parameter(self, name, shape, dtype, device, **init):
        """A parameter without values; reset_parameters gives them."""
        self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device)), **init)

    def initialize(self, device):
        """The end of a constructor: values for the parameters, now or, on the meta device, with reset_parameters."""
        if self.primary_weights_in_fp8:
            self.init_fp8_metadata(self._num_gemms)
        self.reset_parameters(defer_init=device is not None and torch.device(device).type == "meta")

    def reset_parameters(self, defer_init=False):
        """Initial values for all parameters of this layer. Those on the meta device come to be in host memory; weights
        of a layer made within quantized_model_init are quantized."""
        if defer_init:
            return
        for name, parameter in list(self.named_parameters(recurse=False)):
            meta = self.param_init_meta[name]
            shard = parameter._local_tensor if is_dtensor(parameter) else parameter
            values = shard.detach()
            if isinstance(values, QuantizedTensor) or values.device.type == "meta":
                device = None if values.device.type == "meta" else values.device
                values = torch.empty(values.shape, dtype=values.dtype, device=device)
            with torch.no_grad(), self._rng(meta):
                (meta.init_fn or get_default_init_method())(values)
            kept = None
            if self.primary_weights_in_fp8 and meta.fp8_meta_index is not None:
                kept = values.cpu() if self.preserve_high_precision_init_val else None
                values = self._quantized(values, meta.fp8_meta_index, parameter)
            if shard is not parameter:
                values = type(parameter).from_local(values, parameter.device_mesh, parameter.placements,
                                                    run_check=False, shape=parameter.shape, stride=parameter.stride())
            fresh = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
            for attribute, value in vars(parameter).items():
                if shard is parameter and not isinstance(parameter, QuantizedTensor) \
                        and not isinstance(value, types.MethodType):
                    setattr(fresh, attribute, value)
            here = fresh if shard is parameter else fresh._local_tensor
            if isinstance(here, QuantizedTensor):
                here.layer = f"{type(self).__name__} {self.name}, {name}"  # for messages
                here._is_shard = shard is not parameter
            if kept is not None:
                attach_high_precision_init_val(here, kept)
            setattr(self, name, fresh)

    def _quantized(self, values, index, parameter):
        """The weight of these values; as a shard (of a DTensor) it has the amax of all of them."""
        quantizer = self.quantizers["scaling_fwd"][index]
        quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
        quantizer.internal = False
        if is_dtensor(parameter) and hasattr(quantizer, "with_amax_reduction"):
            quantizer = quantizer.copy()
            quantizer.with_amax_reduction = True
            quantizer.amax_reduction_group = shard_group(parameter)
        with torch.no_grad():
            return quantizer(values)

    @contextmanager
    def _rng(self, meta):
        tracker = meta.get_rng_state_tracker and meta.get_rng_state_tracker()
        if tracker is None:
            yield
        else:
            name = getattr(self, "rng_tracker_name", None)
            with tracker.fork(*([name] if name else [])):
                yield

    def _apply(self, *args, **kwargs):
        """What others have attached to quantized parameters stays with them on the way to another device or dtype."""
        before = {name: (parameter, dict(vars(parameter))) for name, parameter in self._parameters.items()
                  if isinstance(parameter, QuantizedTensorStorage)}
        result = super()._apply(*args, **kwargs)
        for name, (old, attributes) in before.items():
            new = self._parameters[name]
            for attribute, value in attributes.items():
                if attribute not in vars(new):
                    bound = isinstance(value, types.MethodType) and value.__self__ is old
                    setattr(new, attribute, types.MethodType(value.__func__, new) if bound else value)
        return result

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                              error_msgs):
        for parameter in self._parameters.values():
            if is_dtensor(parameter) and getattr(parameter._local_tensor, "_is_shard", False):
                parameter._local_tensor.amax_reduction_group = shard_group(parameter)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                                      error_msgs)
        extra = prefix + torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
        if extra in missing_keys:  # checkpoints of torch.nn's layers have none
            missing_keys.remove(extra)
        self._fp8_workspaces.clear()

    # -- roles and quantizers --

    @property
    def output_quantizer_role(self):
        return self._output_quantizer_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role):
        if role != self._output_quantizer_role:
            self._output_quantizer_role, self.fp8_meta_tensors_initialized = role, False

    @property
    def grad_input_quantizer_role(self):
        return self._grad_input_quantizer_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role):
        if role != self._grad_input_quantizer_role:
            self._grad_input_quantizer_role, self.fp8_meta_tensors_initialized = role, False

    def get_quantizer_roles(self, *, fwd, num_quantizers):
        """The role of each slot."""
        return None

    def linear_roles(self, names, fwd, num_quantizers, module_type="linear"):
        """The roles of products in a row, one name each: outputs and input gradients in between have the role of what
        takes them."""
        roles = []
        for i, name in enumerate(names):
            if fwd:
                after = self._output_quantizer_role if i == len(names) - 1 else \
                    QuantizerRole(module_type, "input", names[i + 1])
                roles += [QuantizerRole(module_type, "input", name), QuantizerRole(module_type, "weight", name), after]
            else:
                before = self._grad_input_quantizer_role if i == 0 else \
                    QuantizerRole(module_type, "grad_output", names[i - 1])
                roles += [QuantizerRole(module_type, "grad_output", name), before]
        return [roles[i % len(roles)] for i in range(num_quantizers)]

    def set_meta_tensor(self, fwd, recipe):
        """Quantizers of one pass for a recipe."""
        key = FP8GlobalStateManager.get_meta_tensor_key(fwd)
        old = self.fp8_meta.get(key)
        if self.fp8_meta_tensors_initialized and old is not None:
            if recipe.delayed() and isinstance(old, quantization.DelayedScalingRecipeState):
                self.adjust_amax_history_length(recipe.amax_history_len, fwd)
                return
            if old.serves(recipe):
                return
        count = self.fp8_meta["num_gemms"] * (3 if fwd else 2)
        state = RecipeState.create(recipe, mode="forward" if fwd else "backward", num_quantizers=count,
                                   roles=self.get_quantizer_roles(fwd=fwd, num_quantizers=count))
        if old is not None:
            state.inherit_state_from(old)
        self.fp8_meta[key] = state
        self.quantizers[key] = state.make_quantizers()

    def init_fp8_meta_tensors(self, recipe):
        for fwd in (True, False):
            self.set_meta_tensor(fwd, recipe)
        self.fp8_meta_tensors_initialized = True

    def adjust_amax_history_length(self, length, fwd=None):
        """Another length for the histories of delayed scaling."""
        for forward in ((True, False) if fwd is None else (fwd,)):
            key = FP8GlobalStateManager.get_meta_tensor_key(forward)
            state = self.fp8_meta.get(key)
            if state is None or state.amax_history.shape[0] == length:
                continue
            history = state.amax_history
            state.amax_history = history[:length].clone() if length < history.shape[0] else \
                torch.nn.functional.pad(history, (0, 0, 0, length - history.shape[0]))
            self.quantizers[key] = state.make_quantizers()
            self._update_weight_quantizers()
            FP8GlobalStateManager.replace_history(self.fp8_meta, forward, state)

    def _get_weight_tensors(self):
        return [getattr(self, name) for name in self.weight_names]

    def _get_weight_quantizers(self):
        """One per weight: the second of each product's three."""
        return [self.quantizers["scaling_fwd"][3 * i + 1] for i in range(self._num_gemms)]

    def _update_weight_quantizers(self):
        for weight, quantizer in zip(self._get_weight_tensors(), self._get_weight_quantizers()):
            if isinstance(weight, QuantizedTensorStorage):
                weight.update_quantizer(quantizer)

    def init_fp8_metadata(self, num_gemms=1):
        """Be ready for what is on: quantizers for the recipe of the autocast, or of quantized_model_init."""
        on, meta = quantization.current(), self.fp8_meta
        self.fp8, self.fp8_calibration = on.fp8_enabled, on.fp8_calibration
        meta["fp8_checkpoint"] = self.fp8 or self.fp8_calibration
        if not (meta["fp8_checkpoint"] or on.fp8_parameters):
            self.fp8_initialized = False
            return
        before, recipe = meta.get("recipe"), FP8GlobalStateManager.get_fp8_recipe()
        meta["recipe"], meta["num_gemms"] = recipe, num_gemms
        if meta["fp8_checkpoint"]:
            meta["fp8_group"] = on.fp8_distributed_group
            meta["fp8_max_fwd"], meta["fp8_max_bwd"] = recipe.fp8_format.value
            self.fp8_initialized = True
        self.init_fp8_meta_tensors(recipe)
        if before is not None and not isinstance(recipe, type(before)) and not isinstance(before, type(recipe)):
            warnings.warn(f"Recipe type changed from {type(before).__name__} to {type(recipe).__name__}. "
                          "This may affect model behavior.")
            self._fp8_workspaces.clear()

    def _check_weight_tensor_recipe_correspondence(self):
        """Quantized weights are multiplied in the recipe that they were made for."""
        if not self.fp8:
            return
        for name, weight in zip(self.weight_names, self._get_weight_tensors()):
            if isinstance(weight, QuantizedTensorStorage):
                kind = weight._get_quantizer()._get_compatible_recipe()
                if kind is not None and not isinstance(self.fp8_meta["recipe"], (kind, recipes.CustomRecipe)):
                    raise RuntimeError(f"Recipe mismatch for '{name}': tensor supports recipe {kind.__name__}, but got "
                                       f"{type(self.fp8_meta['recipe']).__name__}. Please check the recipes assigned "
                                       "during quantized_model_init() and autocast() calls.")

    # -- forward --

    @contextmanager
    def prepare_forward(self, inp, num_gemms=1):
        """Around the forward pass of a layer."""
        self.init_fp8_metadata(num_gemms)
        self._check_weight_tensor_recipe_correspondence()
        delayed = self.fp8 and has_delayed_scaling_state(self.fp8_meta)
        repeated = delayed and recompute.phase
        if repeated:
            FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute(self.fp8_meta)
        elif delayed:
            FP8GlobalStateManager.reduce_if_due()
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
            if recompute.enabled:
                FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute(self.fp8_meta)
        try:
            yield inp
        finally:
            if repeated:
                FP8GlobalStateManager.restore_fp8_meta_tensors(self.fp8_meta)

    def _get_fp8_params(self):
        """Quantized weights that want a gradient; None without any."""
        found = [p for p in self.parameters(recurse=False) if isinstance(p, QuantizedTensor) and p.requires_grad]
        return found or None

    def set_tensor_parallel_group(self, tp_group):
        check_alone(type(self).__name__, {"tp_group": tp_group})

    # -- delayed weight gradients --

    def need_backward_dw(self):
        """Whether backward leaves weight gradients for backward_dw()."""
        return self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self):
        """The weight gradients that backward has left."""
        if self.need_backward_dw():
            self.wgrad_store.pop()
            for hook in self.wgrad_accumulation_and_reduce_hooks:
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook):
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    # -- state --

    def get_extra_state(self):
        """Scales and histories of delayed scaling as bytes; empty for all else."""
        meta = self.fp8_meta
        if not meta["fp8_checkpoint"] or "recipe" not in meta or not has_delayed_scaling_state(meta):
            return torch.empty(0, dtype=torch.uint8)
        state = {"extra_fp8_variables": {name: value for name, value in meta.items()
                                         if isinstance(value, (bool, int, float, str))}}
        if type(meta["recipe"]) is recipes.DelayedScaling and not callable(meta["recipe"].amax_compute_algo) \
                and meta["recipe"].scaling_factor_compute_algo is None:
            state["recipe"] = meta["recipe"]
        for suffix in ("fwd", "bwd"):
            kept = meta[f"scaling_{suffix}"]
            if kept.scale is not None:
                state[f"scale_{suffix}"] = kept.scale.detach().cpu().clone()
                state[f"amax_history_{suffix}"] = kept.amax_history.detach().cpu().clone()
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8).clone()

    def set_extra_state(self, state):
        """Take over what get_extra_state gave, or what TransformerEngine's layers saved. Reading it runs no code."""
        if state is None:
            return
        if isinstance(state, io.BytesIO):
            state = torch.frombuffer(bytearray(state.getvalue()), dtype=torch.uint8)
        if not isinstance(state, torch.Tensor):
            raise RuntimeError("Unsupported checkpoint format: an extra state is a tensor of bytes")
        if not state.numel():
            return
        loaded = _Unpickler(io.BytesIO(state.detach().cpu().numpy().tobytes())).load()
        if not isinstance(loaded, dict) or "scale_fwd" not in loaded:
            return  # of a recipe that remembers nothing
        self._check_loaded(loaded, state.numel())
        meta = self.fp8_meta
        meta.update(loaded.get("extra_fp8_variables", {}))
        meta["num_gemms"] = self._num_gemms
        history = loaded["amax_history_fwd"]
        if "recipe" not in meta or not has_delayed_scaling_state(meta):
            meta["recipe"] = loaded.get("recipe") or recipes.DelayedScaling(amax_history_len=history.shape[0])
        self.init_fp8_meta_tensors(meta["recipe"])
        with torch.no_grad():
            for suffix in ("fwd", "bwd"):
                if f"scale_{suffix}" in loaded:
                    kept = meta[f"scaling_{suffix}"]
                    kept.scale.copy_(loaded[f"scale_{suffix}"])
                    kept.amax_history.copy_(loaded[f"amax_history_{suffix}"])

    def _check_loaded(self, loaded, size):
        """What is made for an extra state is no larger than its bytes: views of one value can have any shape."""
        for name, dims in (("scale_fwd", 1), ("amax_history_fwd", 2), ("scale_bwd", 1), ("amax_history_bwd", 2)):
            value = loaded.get(name)
            if name not in loaded and name.endswith("bwd"):
                continue
            if not isinstance(value, torch.Tensor) or value.dim() != dims or \
                    value.numel() * value.element_size() > size:
                raise RuntimeError(f"an extra state of {size} bytes: its {name} is no tensor of {dims} dims within it")
        recipe, more = loaded.get("recipe"), loaded.get("extra_fp8_variables", {})
        if recipe is not None and (type(recipe) is not recipes.DelayedScaling or
                                   recipe.amax_history_len != len(loaded["amax_history_fwd"])):
            raise RuntimeError("an extra state whose recipe is not that of its histories")
        if not isinstance(more, dict) or {"recipe", "scaling_fwd", "scaling_bwd"} & set(more):
            raise RuntimeError("an extra state whose extra_fp8_variables are more than that")

    def get_fp8_meta_tensors(self):
        """Copies of scales and histories; None without any."""
        if "scaling_fwd" not in self.fp8_meta:
            return None
        return {key: [self.fp8_meta[key].scale.clone(), self.fp8_meta[key].amax_history.clone()]
                for key in ("scaling_fwd", "scaling_bwd")}

    def reset_fp8_meta_tensors(self, fp8_meta_tensors=None):
        """Scales of 1 and empty histories, or those of get_fp8_meta_tensors."""
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in self.fp8_meta:
                kept = self.fp8_meta[key]
                scale, history = (1.0, 0.0) if fp8_meta_tensors is None else fp8_meta_tensors[key]
                kept.scale.copy_(torch.as_tensor(scale))
                kept.amax_history.copy_(torch.as_tensor(history))


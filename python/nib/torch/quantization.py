# SPDX-License-Identifier: Apache-2.0
"""autocast, and what turns a recipe into the quantizers of a layer.

    autocast, quantized_model_init     in which recipe layers compute, and are made
    QuantizerRole                      which tensor of which layer a quantizer is for
    RecipeState                        the quantizers of one pass of a layer, and what they remember
    FP8GlobalStateManager              TransformerEngine's name for what is on, and for the histories of delayed scaling

Only delayed scaling remembers anything: a scale and a history of amaxes per tensor. Quantizers raise the newest row of
the history; at the end of the outermost autocast (forward pass) or of the backward pass all histories are reduced over
the group, the scales follow from them, and the history moves on by a row.
"""
import abc
import contextlib
import dataclasses
import threading
import warnings
from collections import deque
from typing import Callable, Optional, Union

import torch

from . import recipe as recipes
from .constants import DType

# ---- Roles and requests ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """Which tensor a quantizer is for. module_type: "linear", "grouped_linear", "dpa"; tensor_type: "input", "weight",
    "output", "grad_output", "grad_input"; name: the layer's. Empty: not known."""
    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self):
        known = [f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)
                 if getattr(self, field.name)]
        return "|".join(known) or "QuantizerRole()"


@dataclasses.dataclass(frozen=True)
class QuantizerRequest:
    """What a CustomRecipe's function returns where the layer has to keep something for the quantizer."""


@dataclasses.dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """A Float8Quantizer whose scale and history the layer keeps. All requests of one pass of a layer say the same."""
    fp8_format: recipes.Format = recipes.Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Union[str, Callable] = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True


# ---- Which recipes there are -----------------------------------------------------------------------------

# Everything is done in software: no device is asked.


def is_fp8_available(return_reason=False):
    return (True, "") if return_reason else True


def check_fp8_support():
    return is_fp8_available(return_reason=True)


is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_bf16_available = is_fp8_available
check_mxfp8_support = check_fp8_block_scaling_support = check_nvfp4_support = check_fp8_support


_default = recipes.NVFP4BlockScaling()


def get_default_recipe():
    """NVFP4BlockScaling(): a new one, but that a graph cannot make."""
    return _default if torch.compiler.is_compiling() else recipes.NVFP4BlockScaling()


get_default_fp8_recipe = get_default_recipe


def check_recipe_support(recipe):
    """Every recipe is supported."""


def get_align_size_for_quantization(recipe):
    """Of what the rows of a group's members are to be a multiple."""
    if recipe.custom():
        return recipe.quantization_alignment
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def get_fp8_te_dtype(fp8_recipe, fprop_tensor=True):
    backward = fp8_recipe.fp8_format is recipes.Format.HYBRID and not fprop_tensor
    return DType.kFloat8E5M2 if backward or fp8_recipe.fp8_format is recipes.Format.E5M2 else DType.kFloat8E4M3


def get_fp8_torch_dtype(fp8_recipe, fprop_tensor=True):
    return torch.float8_e5m2 if get_fp8_te_dtype(fp8_recipe, fprop_tensor) == DType.kFloat8E5M2 else torch.float8_e4m3fn


def get_fp4_te_dtype(fp4_recipe):
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe, fprop_tensor=True):
    return 57344.0 if get_fp8_te_dtype(fp8_recipe, fprop_tensor) == DType.kFloat8E5M2 else 448.0


# ---- What is on ------------------------------------------------------------------------------------------


class FP8GlobalState(threading.local):
    """What is on in this thread. Histories belong to the process: a backward pass may run in threads of its own."""

    def __init__(self):
        # Not of the class: PyTorch 2.11 compiles what a class has, and does not see what a thread has instead.
        self.fp8_enabled = False
        self.fp8_calibration = False
        self.fp8_recipe = None  # of the innermost autocast or quantized_model_init
        self.fp8_distributed_group = None
        self.fp8_parameters = False  # within quantized_model_init
        self.high_precision_init_val = False
        self.is_first_fp8_module = False
        self.fp8_graph_capturing = False
        self.autocast_depth = 0
        self.skip_fp8_weight_update_tensor = None


_AUTOCAST = ("fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group", "is_first_fp8_module",
             "fp8_graph_capturing")


class FP8GlobalStateManager:
    """What is on, by TransformerEngine's names. The buffers hold one entry per layer and pass, by recipe and group."""

    quantization_state = FP8GlobalState()
    global_amax_buffer, global_amax_history_buffer, global_scale_buffer = {}, {}, {}
    autocast_arguments = {}
    left_to_do = {}  # "reduce": a compiled autocast has ended since the histories were reduced

    @classmethod
    def reset(cls):
        cls.quantization_state = FP8GlobalState()
        cls.left_to_do.clear()
        cls.global_amax_buffer, cls.global_amax_history_buffer, cls.global_scale_buffer = {}, {}, {}
        cls.autocast_arguments = {}

    @classmethod
    def is_fp8_enabled(cls):
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls):
        return cls.quantization_state.fp8_calibration

    @classmethod
    def with_fp8_parameters(cls):
        return cls.quantization_state.fp8_parameters

    @classmethod
    def with_high_precision_init_val(cls):
        return cls.quantization_state.high_precision_init_val

    @classmethod
    def fp8_graph_capturing(cls):
        return cls.quantization_state.fp8_graph_capturing

    @classmethod
    def is_first_fp8_module(cls):
        """True for the first call within an outermost autocast."""
        first, cls.quantization_state.is_first_fp8_module = cls.quantization_state.is_first_fp8_module, False
        return first

    @classmethod
    def get_fp8_recipe(cls):
        return cls.quantization_state.fp8_recipe or get_default_recipe()

    @classmethod
    def get_fp8_group(cls):
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip):
        """1 where layers are to keep the quantized weights that they have, whatever is_first_microbatch says."""
        cls.quantization_state.skip_fp8_weight_update_tensor = torch.full((1,), float(skip))

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls):
        return cls.quantization_state.skip_fp8_weight_update_tensor

    is_fp8_available = staticmethod(lambda: is_fp8_available(True))
    is_mxfp8_available = staticmethod(lambda: is_mxfp8_available(True))
    is_fp8_block_scaling_available = staticmethod(lambda: is_fp8_block_scaling_available(True))
    is_nvfp4_available = staticmethod(lambda: is_nvfp4_available(True))

    @staticmethod
    def get_meta_tensor_key(forward=True):
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward=True):
        return "forward" if forward else "backward"

    @staticmethod
    def get_buffer_info():
        return "buffer_index_and_autocast_key"

    @staticmethod
    def get_unique_autocast_key(recipe=None, group=None):
        return f"recipe={recipe},group={None if group is None else id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward, fp8_recipe, fp8_group):
        return f"{cls.get_fwd_bwd_key(forward)}_{cls.get_unique_autocast_key(fp8_recipe, fp8_group)}"

    @classmethod
    def get_autocast_state(cls):
        return tuple(getattr(cls.quantization_state, name) for name in _AUTOCAST)

    @classmethod
    def set_autocast_state(cls, state):
        for name, value in zip(_AUTOCAST, state):
            setattr(cls.quantization_state, name, value)

    # -- delayed scaling --

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta):
        """Enter a layer's histories, once: they are reduced with everybody's at the end of a pass."""
        if not has_delayed_scaling_state(fp8_meta) or cls.get_buffer_info() in fp8_meta:
            return
        places = fp8_meta[cls.get_buffer_info()] = []
        for forward in (True, False):
            state = fp8_meta.get(cls.get_meta_tensor_key(forward))
            if state is None or state.amax_history is None:
                continue
            recipe = getattr(state, "_inner_delayed_scaling_recipe", None) or fp8_meta["recipe"]
            group = fp8_meta["fp8_group"]
            cls.autocast_arguments[cls.get_unique_autocast_key(recipe, group)] = (recipe, group)
            key = cls.get_key_in_buffer(forward, recipe, group)
            for buffer, tensor in ((cls.global_amax_buffer, state.amax_history[0]),
                                   (cls.global_amax_history_buffer, state.amax_history),
                                   (cls.global_scale_buffer, state.scale)):
                buffer.setdefault(key, []).append(tensor)
            places += [len(cls.global_amax_buffer[key]) - 1, key]

    @classmethod
    def replace_history(cls, fp8_meta, forward, state):
        """A layer's history has other memory now."""
        places = fp8_meta.get(cls.get_buffer_info(), [])
        for place, key in zip(places[::2], places[1::2]):
            if key.startswith(cls.get_fwd_bwd_key(forward)) and key in cls.global_amax_buffer:
                cls.global_amax_history_buffer[key][place] = state.amax_history
                cls.global_amax_buffer[key][place] = state.amax_history[0]

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward=True):
        """Reduce the newest amaxes of all layers over their groups, and make scales of the histories."""
        import torch.distributed as dist
        for key, amaxes in cls.global_amax_buffer.items():
            direction, autocast_key = key.split("_", 1)
            if direction != cls.get_fwd_bwd_key(forward) or not amaxes:
                continue
            recipe, group = cls.autocast_arguments[autocast_key]
            with torch.no_grad():
                together = torch.cat(amaxes)
                if recipe.reduce_amax and dist.is_available() and dist.is_initialized() \
                        and dist.get_world_size(group=group) > 1:
                    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
                histories, scales = cls.global_amax_history_buffer[key], cls.global_scale_buffer[key]
                if not callable(recipe.amax_compute_algo) and recipe.scaling_factor_compute_algo is None:
                    fused_amax_and_scale_update_after_reduction(together, histories, scales, recipe.amax_compute_algo,
                                                                get_fp8_te_dtype(recipe, forward), recipe.margin)
                    continue
                torch._foreach_copy_(amaxes, list(together.split([amax.numel() for amax in amaxes])))
                for history, scale in zip(histories, scales):
                    _amax_and_scale_update(history, scale, get_fp8_max(recipe, forward), recipe)

    @classmethod
    def reduce_if_due(cls):
        """Before scales are used: what a compiled autocast has left to do."""
        if cls.left_to_do.pop("reduce", False):
            cls.reduce_and_update_fp8_tensors(forward=True)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta):
        """Before a forward pass that will be repeated: keep the scales that it had."""
        if has_delayed_scaling_state(fp8_meta):
            state = fp8_meta["scaling_fwd"]
            kept = (state.amax_history.clone(), state.scale.clone())
            fp8_meta.setdefault("recompute_stash", deque()).append(kept)

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta):
        """Before the repetition: the scales of the first time, so that it gives the same."""
        if has_delayed_scaling_state(fp8_meta):
            state = fp8_meta["scaling_fwd"]
            fp8_meta["updated_fwd"] = (state.amax_history.clone(), state.scale.clone())
            history, scale = fp8_meta["recompute_stash"].popleft()
            state.amax_history.copy_(history)
            state.scale.copy_(scale)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta):
        """After the repetition: the scales as they were before it."""
        if has_delayed_scaling_state(fp8_meta):
            history, scale = fp8_meta.pop("updated_fwd")
            fp8_meta["scaling_fwd"].amax_history.copy_(history)
            fp8_meta["scaling_fwd"].scale.copy_(scale)


def current():
    """What is on in this thread."""
    return FP8GlobalStateManager.quantization_state


def get_recipe():
    """The recipe of the autocast around this line; None without one."""
    state = current()
    return state.fp8_recipe if state.fp8_enabled else None


def is_fp8_enabled():
    """Whether an autocast is on."""
    return current().fp8_enabled


def _checked(recipe):
    if recipe is None:
        return get_default_recipe()
    if not isinstance(recipe, recipes.Recipe):
        raise TypeError(f"a recipe is an instance of {recipes.Recipe.__module__}.Recipe, not {recipe!r}")
    return recipe


def _part_of_graphs(function):
    """A function that is compiled as a part of others only: by itself it would lose what it writes, since PyTorch (2.11
    and 2.13) compiles attributes of a threading.local to those of no thread."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # another PyTorch
        return function
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return function


class autocast:
    """Within `with autocast(recipe=...)` layers compute in that recipe (NVFP4BlockScaling unless given); within
    autocast(enabled=False) in high precision. calibrating: layers compute in high precision, but quantizers that keep
    amaxes take note of them. amax_reduction_group: over which delayed scaling reduces them."""

    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
        self._arguments = (bool(enabled), bool(calibrating), _checked(recipe), amax_reduction_group)
        self._graph = _graph
        self._before = None

    @_part_of_graphs
    def __enter__(self):
        if self._before is not None:
            raise RuntimeError("this autocast is entered already: make another one to nest it")
        if self._arguments[0] and self._arguments[2].delayed() and torch.compiler.is_compiling():
            raise RuntimeError("DelayedScaling keeps histories outside: it cannot be part of a compiled graph")
        state = current()
        if state.autocast_depth == 0 and not torch.compiler.is_compiling():
            FP8GlobalStateManager.reduce_if_due()
        self._before = FP8GlobalStateManager.get_autocast_state()
        state.fp8_enabled, state.fp8_calibration, state.fp8_recipe, state.fp8_distributed_group = self._arguments
        state.fp8_graph_capturing = self._graph
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1
        return self

    @_part_of_graphs
    def __exit__(self, kind, error, trace):
        state = current()
        FP8GlobalStateManager.set_autocast_state(self._before)
        self._before = None
        state.autocast_depth -= 1
        if self._arguments[0] and state.autocast_depth == 0 and not self._graph and torch.is_grad_enabled() \
                and FP8GlobalStateManager.global_amax_buffer:
            if torch.compiler.is_compiling():  # histories are no part of a graph
                FP8GlobalStateManager.left_to_do["reduce"] = True
            else:
                FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    """The older name of autocast."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextlib.contextmanager
def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    """Within it, layers are made with weights that are quantized tensors, and no others. With
    preserve_high_precision_init_val each keeps what it was quantized from in host memory, for master weights:
    weight.get_high_precision_init_val() gives it, weight.clear_high_precision_init_val() lets go of it."""
    state = current()
    before = state.fp8_parameters, state.fp8_recipe, state.high_precision_init_val
    state.fp8_parameters, state.fp8_recipe = bool(enabled), _checked(recipe)
    state.high_precision_init_val = bool(preserve_high_precision_init_val)
    try:
        yield
    finally:
        state.fp8_parameters, state.fp8_recipe, state.high_precision_init_val = before


fp8_model_init = quantized_model_init

# ---- Scales from histories -------------------------------------------------------------------------------


def _default_sf_compute(amax, scale, fp8_max, margin):
    """The scale that brings an amax to the largest value of a format, less a margin of powers of two; as it was where
    there is nothing to go by. Written to `scale`, which is returned."""
    new = (fp8_max / amax) / (2 ** margin)
    new = torch.where((amax > 0.0) & torch.isfinite(amax), new, scale)
    return scale.copy_(torch.where(torch.isinf(new), torch.full_like(new, torch.finfo(torch.float32).max), new))


def _amax_and_scale_update(amax_history, scale, fp8_max, recipe):
    """The scale that follows from a history [rows, tensors], which moves on by a row."""
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(amax_history)
    elif recipe.amax_compute_algo == "max":
        amax = amax_history.max(dim=0).values
    else:
        amax = amax_history[0].clone()
    if amax_history.shape[0] > 1:
        amax_history.copy_(torch.roll(amax_history, -1, 0))
    amax_history[0].fill_(0.0)
    if recipe.scaling_factor_compute_algo is not None:
        scale.copy_(recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe))
    else:
        _default_sf_compute(amax, scale, fp8_max, recipe.margin)


def fused_amax_and_scale_update_after_reduction(amax_reduction_buffer, amax_histories, scales, amax_compute_algo,
                                                fp8_dtype, margin):
    """The same for all layers, from amaxes that were reduced (0: the history's own). A tensor that had no amax keeps
    its history and its scale; NaN counts as none among others."""
    largest = (57344.0 if DType.cast(fp8_dtype) == DType.kFloat8E5M2 else 448.0) * 2.0 ** -margin
    newest = amax_reduction_buffer.split([scale.numel() for scale in scales])
    for history, scale, reduced in zip(amax_histories, scales, newest):
        last = torch.where(reduced != 0, reduced, history[0])
        moved = torch.roll(history, -1, 0)
        moved[-1] = last
        amax = last if amax_compute_algo == "most_recent" else moved.nan_to_num(nan=0.0, posinf=torch.inf).amax(0)
        moved[0] = 0.0
        seen = last != 0
        history.copy_(torch.where(seen, moved, history))
        usable = seen & torch.isfinite(amax) & (amax > 0)
        new = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)  # one rounding
        scale.copy_(torch.where(usable, new, scale))


# ---- States ----------------------------------------------------------------------------------------------


class RecipeState(abc.ABC):
    """The quantizers of a layer for one pass ("forward" or "backward"), by slots: input, weight, output of each product
    forward, grad_output and grad_input backward."""

    _persistent_state_buffers = ()  # tensors that survive where a state is made anew
    _KNOWN_TENSOR_TYPES = ("input", "weight", "output", "grad_output", "grad_input")
    _DEFAULT_TENSOR_TYPES = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}

    def __init__(self, recipe, *, mode, num_quantizers=1, device=None, roles=None):
        if mode not in self._DEFAULT_TENSOR_TYPES:
            raise RuntimeError(f"Unexpected recipe mode ({mode}): forward or backward")
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(f"RecipeState requires roles to match num_quantizers: {len(roles)} roles for "
                             f"{num_quantizers} quantizers")
        self.recipe, self.mode, self.num_quantizers, self.roles = recipe, mode, num_quantizers, roles
        self.device = torch.device("cpu") if device is None else torch.device(device)
        self.snapshot = dict(vars(recipe))  # recipes can be changed afterwards
        self.dtype = self._element()

    def _element(self):
        return get_fp8_te_dtype(self.recipe, self.mode == "forward")

    @staticmethod
    def create(recipe, *, mode, num_quantizers=1, device=None, roles=None):
        """The state of a recipe."""
        for kind, cls in _STATES:
            if isinstance(recipe, kind):
                return cls(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)
        raise ValueError(f"{type(recipe).__name__} is not supported")

    def serves(self, recipe):
        """Whether the quantizers of this state are those of a recipe."""
        return type(self.recipe) is type(recipe) and self.snapshot == vars(recipe)

    def _slot_role(self, idx):
        """The role of a slot; one that says nothing where there is none."""
        role = self.roles[idx] if self.roles is not None else None
        return QuantizerRole() if role is None else role

    def _slot_tensor_type(self, idx):
        """The type of a slot's tensor: by its role, else by its place."""
        role = self._slot_role(idx)
        if role.tensor_type in self._KNOWN_TENSOR_TYPES:
            return role.tensor_type
        usual = self._DEFAULT_TENSOR_TYPES[self.mode]
        return usual[idx % len(usual)]

    def make_quantizers(self):
        """One quantizer per slot."""
        return [self.recipe.make_quantizer(self._slot_tensor_type(idx), **self._for_slot(idx))
                for idx in range(self.num_quantizers)]

    def _for_slot(self, idx):
        return {}

    def inherit_state_from(self, other):
        """Take over the tensors of a state that this one replaces: the same objects, since others refer to them.
        Whether there was anything to take over."""
        names = self._persistent_state_buffers
        if type(self) is not type(other) or not names:
            return False
        if any(getattr(self, name).shape != getattr(other, name).shape for name in names):
            return False
        for name in names:
            setattr(self, name, getattr(other, name))
        return True


class DelayedScalingRecipeState(RecipeState):
    """scale [slots] and amax_history [rows, slots], which the quantizers share."""

    _persistent_state_buffers = ("scale", "amax_history")

    def __init__(self, recipe, **keywords):
        super().__init__(recipe, **keywords)
        self.scale = torch.ones(self.num_quantizers, dtype=torch.float32, device=self.device)
        self.amax_history = torch.zeros(recipe.amax_history_len, self.num_quantizers, dtype=torch.float32,
                                        device=self.device)

    def make_quantizers(self):
        from .float8_tensor import Float8Quantizer
        return [Float8Quantizer(self.scale[i:i + 1], self.amax_history[0][i:i + 1], self.dtype)
                for i in range(self.num_quantizers)]


class Float8CurrentScalingRecipeState(RecipeState):
    """Nothing is kept."""


class MXFP8BlockScalingRecipeState(RecipeState):
    """Nothing is kept. Blocks of 32x32 for the weights of linear layers, where the recipe wants them."""

    def _for_slot(self, idx):
        role = self._slot_role(idx)
        wanted = self.mode == "forward" and self.recipe.enable_2d_quantization and role.tensor_type == "weight" \
            and role.module_type in ("linear", "grouped_linear")
        return {"with_2d_quantization": wanted}


class Float8BlockScalingRecipeState(RecipeState):
    """Nothing is kept."""

    def __init__(self, recipe, **keywords):
        super().__init__(recipe, **keywords)
        self.qx_dtype = self.qw_dtype = get_fp8_te_dtype(recipe, True)
        self.qgrad_dtype = get_fp8_te_dtype(recipe, False)


class NVFP4BlockScalingRecipeState(RecipeState):
    """Nothing is kept."""

    def _element(self):
        return get_fp4_te_dtype(self.recipe)


class CustomRecipeState(RecipeState):
    """Quantizers from the recipe's function, which is asked once per slot. Where it returns DelayedScalingRequests,
    these share a DelayedScalingRecipeState."""

    def __init__(self, recipe, **keywords):
        super().__init__(recipe, **keywords)
        if getattr(recipe, "qfactory", None) is None:
            raise ValueError("CustomRecipe requires `qfactory`.")
        self._ds_state = self._ds_state_to_inherit = None

    def serves(self, recipe):
        return self.recipe is recipe and self.snapshot == vars(recipe)

    def make_quantizers(self):
        roles = self.roles
        if roles is None:
            warnings.warn("CustomRecipeState: no QuantizerRole list provided by the module: the function gets roles "
                          "that say nothing", stacklevel=2)
            roles = [QuantizerRole()] * self.num_quantizers
        made = [self.recipe.qfactory(role) for role in roles]
        for slot, quantizer in enumerate(made):
            if quantizer is None:
                raise ValueError(f"CustomRecipe qfactory returned None for slot {slot} (role={roles[slot]}). Every "
                                 "slot has a quantizer or a QuantizerRequest; an IdentityQuantizer changes no value")
        self._ds_state = self._delayed(made)
        self._ds_state_to_inherit = None
        return made

    def _delayed(self, made):
        """Replace requests for delayed scaling by quantizers; the state that they share, or None."""
        slots = [slot for slot, quantizer in enumerate(made) if isinstance(quantizer, DelayedScalingRequest)]
        if not slots:
            return None
        first = made[slots[0]]
        for slot in slots[1:]:
            for field in dataclasses.fields(first):
                here, there = getattr(first, field.name), getattr(made[slot], field.name)
                if here != there:
                    raise ValueError("All DelayedScalingRequests in one CustomRecipeState must match. Slot "
                                     f"{slots[0]} has {field.name}={here!r}, slot {slot} has {there!r}.")
        recipe = recipes.DelayedScaling(**{field.name: getattr(first, field.name)
                                           for field in dataclasses.fields(first)})
        state, old = None, self._ds_state_to_inherit
        if old is not None and old.amax_history.shape == (first.amax_history_len, len(slots)) \
                and old.dtype == get_fp8_te_dtype(recipe, self.mode == "forward"):
            state = old
        if state is None:
            state = DelayedScalingRecipeState(recipe, mode=self.mode, num_quantizers=len(slots), device=self.device)
        for slot, quantizer in zip(slots, state.make_quantizers()):
            made[slot] = quantizer
        return state

    def inherit_state_from(self, other):
        if not isinstance(other, CustomRecipeState) or other._ds_state is None:
            return False
        self._ds_state_to_inherit = other._ds_state
        return True

    _has_delayed_scaling = property(lambda self: self._ds_state is not None)
    _inner_delayed_scaling_recipe = property(lambda self: self._ds_state and self._ds_state.recipe)
    scale = property(lambda self: self._ds_state and self._ds_state.scale)

    @property
    def amax_history(self):
        return self._ds_state and self._ds_state.amax_history


_STATES = ((recipes.DelayedScaling, DelayedScalingRecipeState),
           (recipes.MXFP8BlockScaling, MXFP8BlockScalingRecipeState),
           (recipes.Float8CurrentScaling, Float8CurrentScalingRecipeState),
           (recipes.Float8BlockScaling, Float8BlockScalingRecipeState),
           (recipes.NVFP4BlockScaling, NVFP4BlockScalingRecipeState), (recipes.CustomRecipe, CustomRecipeState))


def has_delayed_scaling_state(fp8_meta):
    """Whether a layer keeps histories."""
    if fp8_meta["recipe"].delayed():
        return True
    states = (fp8_meta.get(key) for key in ("scaling_fwd", "scaling_bwd"))
    return any(isinstance(state, CustomRecipeState) and state._has_delayed_scaling for state in states)


_has_delayed_scaling_state = has_delayed_scaling_state

# ---- Repeated forward passes -----------------------------------------------------------------------------


class _Recompute(threading.local):
    enabled = False  # the forward pass under way will be repeated
    phase = False  # this is the repetition


recompute = _Recompute()


def is_fp8_activation_recompute_enabled():
    return recompute.enabled


def in_fp8_activation_recompute_phase():
    return recompute.phase


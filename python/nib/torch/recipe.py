# SPDX-License-Identifier: Apache-2.0
"""Recipes: which tensor of a layer is quantized how. The names are those of transformer_engine.common.recipe.

Environment variables are read when this module is imported, as they are there.
"""
import enum
import os
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Optional, Union


class _FormatHelper(NamedTuple):
    """The largest value of a format in the forward and in the backward pass."""
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Element formats of the two passes."""
    E2M1 = _FormatHelper(6.0, 6.0)
    E4M3 = _FormatHelper(448.0, 448.0)
    E5M2 = _FormatHelper(57344.0, 57344.0)
    HYBRID = _FormatHelper(448.0, 57344.0)  # E4M3 forward, E5M2 backward


@dataclass(frozen=True)
class MMParams:
    """How products are accumulated."""
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How one tensor of a layer is quantized."""
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """The base of all recipes; what kind one is, it says by a method of that name."""

    def in_graph(self):
        """Whether a graph of torch.compile can carry this recipe: nothing is kept, nobody asked, and gradients are
        quantized as all else is."""
        return not self.delayed() and not self.custom() and self.backward_override is None

    def said(self):
        """All that a recipe says about quantizers. A graph is good as long as it says the same."""
        return tuple(getattr(self, name) for name in self.__dataclass_fields__ if not name.startswith("fp8_gemm"))

    def frozen(self, said=None):
        """The quantizers of a layer as text, for such a graph. It is made while the graph is; to pass what the recipe
        says makes that a condition of the graph."""
        if not vars(self):  # an object of the graph, which does not exist yet
            raise RuntimeError("make recipes outside of what is compiled, and pass them to autocast there")
        from .module.compiled import freeze
        return freeze(self)

    frozen._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result does, without importing torch

    @classmethod
    def nvfp4(cls):
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls):
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls):
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls):
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls):
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls):
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls):
        return issubclass(cls, CustomRecipe)


def _switched_on(name):
    return os.environ.get(name, "0") == "1"


_DISABLE_RHT = _switched_on("NVTE_NVFP4_DISABLE_RHT")
_DISABLE_STOCHASTIC_ROUNDING = _switched_on("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
_DISABLE_2D_QUANTIZATION = _switched_on("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
_ROW_SCALED_ACTIVATION = _switched_on("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
_4OVER6 = os.environ.get("NVTE_NVFP4_4OVER6", "none")
_4OVER6_USE_256 = os.environ.get("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all")
_4OVER6_ERR_MODE = os.environ.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE")
_BACKWARD_OVERRIDE = os.environ.get("NVTE_BACKWARD_OVERRIDE") or None

_SCOPES = ("none", "weights", "activations", "all")
_BACKWARDS = (None, "high_precision", "dequantized")


class RecipeError(ValueError, AssertionError):
    """Fields that no recipe has, or that do not go together. TransformerEngine asserts, where nib said ValueError."""


def _one_of(name, value, allowed):
    if value not in allowed:
        raise RecipeError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")


def _check_backward(recipe):
    _one_of("backward_override", recipe.backward_override, _BACKWARDS)


@dataclass
class NVFP4BlockScaling(Recipe):
    """Training in NVFP4.

    Inputs and gradients have blocks of 1x16, weights of 16x16; the usages that meet in the gradient of the weight go
    through the random Hadamard transform; gradients are rounded stochastically. Each can be switched off. In
    four-over-six a block chooses between two scales: for "weights", "activations" or "all"; activations only without
    the transform. backward_override: gradients are not quantized, and meet the original operands ("high_precision") or
    the values that the forward pass used ("dequantized").
    """

    disable_rht: bool = _DISABLE_RHT
    disable_stochastic_rounding: bool = _DISABLE_STOCHASTIC_ROUNDING
    disable_2d_quantization: bool = _DISABLE_2D_QUANTIZATION
    row_scaled_activation: bool = _ROW_SCALED_ACTIVATION
    nvfp4_4over6: str = _4OVER6
    nvfp4_4over6_e4m3_use_256: str = _4OVER6_USE_256
    nvfp4_4over6_err_mode: str = _4OVER6_ERR_MODE
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _BACKWARD_OVERRIDE

    def __post_init__(self):
        _one_of("fp4_format", self.fp4_format, (Format.E2M1,))
        _one_of("fp8_format", self.fp8_format, (Format.E4M3,))
        _one_of("nvfp4_4over6", self.nvfp4_4over6, _SCOPES)
        _one_of("nvfp4_4over6_e4m3_use_256", self.nvfp4_4over6_e4m3_use_256, _SCOPES)
        self.nvfp4_4over6_err_mode = self.nvfp4_4over6_err_mode.upper()
        _one_of("nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode, ("MAE", "MSE"))
        _check_backward(self)
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise RecipeError(f"nvfp4_4over6={self.nvfp4_4over6!r} needs disable_rht=True: four-over-six does not go "
                              "with the random Hadamard transform of activations")
        rht, rounding = not self.disable_rht, not self.disable_stochastic_rounding
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(random_hadamard_transform=rht, stochastic_rounding=rounding)

    def make_quantizer(self, role, **usage):
        """The quantizer of a tensor of a layer: "input", "weight" or "grad_output". Any other role of the forward pass
        is an input."""
        from .nvfp4_tensor import NVFP4Quantizer
        grad, weight = role.startswith("grad"), role == "weight"
        params = self.fp4_quant_bwd_grad if grad else self.fp4_quant_fwd_weight if weight else self.fp4_quant_fwd_inp
        scopes = () if grad else ("weights" if weight else "activations", "all")
        four_over_six = self.nvfp4_4over6 in scopes
        return NVFP4Quantizer(
            with_rht=params.random_hadamard_transform, with_post_rht_amax=params.random_hadamard_transform,
            with_2d_quantization=params.fp4_2d_quantization, stochastic_rounding=params.stochastic_rounding,
            row_scaled_nvfp4=self.row_scaled_activation and not grad and not weight, nvfp4_use_4over6=four_over_six,
            nvfp4_e4m3_max=256 if four_over_six and self.nvfp4_4over6_e4m3_use_256 in scopes else 448,
            nvfp4_4over6_err_mode=self.nvfp4_4over6_err_mode, **usage)


@dataclass
class MXFP8BlockScaling(Recipe):
    """MXFP8: one power of two for 32 elements."""
    fp8_format: Format = Format.E4M3
    margin: int = 0
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _BACKWARD_OVERRIDE
    enable_2d_quantization: bool = False  # blocks of 32x32 for weights of linear layers

    def __post_init__(self):
        _one_of("fp8_format", self.fp8_format, (Format.E4M3, Format.HYBRID))
        _check_backward(self)

    def make_quantizer(self, role, with_2d_quantization=None, **usage):
        from .mxfp8_tensor import MXFP8Quantizer
        if with_2d_quantization is None:
            with_2d_quantization = self.enable_2d_quantization and role == "weight"
        return MXFP8Quantizer(_fp8_dtype(self.fp8_format, role), with_2d_quantization=with_2d_quantization, **usage)


@dataclass
class Float8CurrentScaling(Recipe):
    """Float8 with the scale of the tensor at hand."""
    use_power_2_scales: bool = _switched_on("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _BACKWARD_OVERRIDE

    def __post_init__(self):
        _one_of("fp8_format", self.fp8_format, (Format.E4M3, Format.HYBRID))
        _check_backward(self)
        params = QParams(power_2_scale=self.use_power_2_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = params

    def make_quantizer(self, role, **usage):
        from .float8_tensor import Float8CurrentScalingQuantizer
        params = _params(self, role)
        return Float8CurrentScalingQuantizer(_fp8_dtype(self.fp8_format, role), amax_epsilon=params.amax_epsilon,
                                             force_pow_2_scales=params.power_2_scale, **usage)


@dataclass
class Float8BlockScaling(Recipe):
    """Float8 with one scale for 128 elements, of weights for 128x128."""
    use_f32_scales: bool = _switched_on("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _BACKWARD_OVERRIDE

    def __post_init__(self):
        _one_of("fp8_format", self.fp8_format, (Format.E4M3, Format.HYBRID))
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            _one_of(name, getattr(self, name), (1, 2))
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if dims.count(2) > 1:
            raise RecipeError("2D by 2D block gemm not supported: of input, weight and gradient one at most has blocks "
                              "of 128x128")
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise RecipeError(f"{name}: products of blockwise Float8 need the split accumulator")
        if self.fp8_dpa or self.fp8_mha:
            raise RecipeError("FP8 attention is not supported for Float8BlockScaling")
        _check_backward(self)
        params = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = params

    def make_quantizer(self, role, rowwise=True, columnwise=True):
        from .float8_blockwise_tensor import Float8BlockQuantizer
        dim = self.grad_block_scaling_dim if role.startswith("grad") else \
            self.w_block_scaling_dim if role == "weight" else self.x_block_scaling_dim
        params = _params(self, role)
        return Float8BlockQuantizer(_fp8_dtype(self.fp8_format, role), rowwise=rowwise, columnwise=columnwise,
                                    amax_epsilon=params.amax_epsilon, force_pow_2_scales=params.power_2_scale,
                                    block_scaling_dim=dim)


@dataclass
class DelayedScaling(Recipe):
    """Float8 with the scale of earlier tensors: layers keep a history of amaxes for each (nib.torch.quantization)."""
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Union[str, Callable] = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _BACKWARD_OVERRIDE

    def __post_init__(self):
        _one_of("fp8_format", self.fp8_format, (Format.E4M3, Format.HYBRID))
        if not callable(self.amax_compute_algo):
            _one_of("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        if self.backward_override is not None:
            raise RecipeError("Delayed scaling only supports backward_override=None")

    def make_quantizer(self, role, **usage):
        """A quantizer with a scale of 1 and an amax of its own; those of layers share the layer's state."""
        import torch
        from .float8_tensor import Float8Quantizer
        return Float8Quantizer(torch.ones(1), torch.zeros(1), _fp8_dtype(self.fp8_format, role), **usage)


@dataclass
class CustomRecipe(Recipe):
    """A recipe that asks a function for quantizers, once per tensor of a layer and pass: qfactory(role) with a
    QuantizerRole, or None for an output or input gradient whose consumer is not known. It returns a quantizer or a
    QuantizerRequest. quantization_alignment: of what the rows of a group's members are a multiple."""
    qfactory: Callable[..., Any] = field(default=None)
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _BACKWARD_OVERRIDE
    quantization_alignment: int = 128

    def __post_init__(self):
        if not callable(self.qfactory):
            raise ValueError("a CustomRecipe needs a function that makes quantizers: qfactory")
        _check_backward(self)
        if self.quantization_alignment <= 0:
            raise ValueError("CustomRecipe quantization_alignment must be positive")

    def make_quantizer(self, role, **usage):
        """The quantizer of a tensor of a linear layer, or of any QuantizerRole."""
        if isinstance(role, str):
            from .quantization import QuantizerRole
            role = QuantizerRole(module_type="linear", tensor_type=role)
        quantizer = self.qfactory(role)
        quantizer.set_usage(**usage)
        return quantizer


def _params(recipe, role):
    """The QParams of a tensor of a layer."""
    return recipe.fp8_quant_bwd_grad if role.startswith("grad") else \
        recipe.fp8_quant_fwd_weight if role == "weight" else recipe.fp8_quant_fwd_inp


def _fp8_dtype(fp8_format, role):
    from .constants import DType
    backward = role.startswith("grad") and fp8_format is Format.HYBRID
    return DType.kFloat8E5M2 if backward or fp8_format is Format.E5M2 else DType.kFloat8E4M3

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


def _one_of(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")


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
            raise ValueError(f"nvfp4_4over6={self.nvfp4_4over6!r} needs disable_rht=True: four-over-six does not go "
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

    def __post_init__(self):
        _one_of("fp8_format", self.fp8_format, (Format.E4M3, Format.HYBRID))
        _check_backward(self)

    def make_quantizer(self, role, **usage):
        from .mxfp8_tensor import MXFP8Quantizer
        return MXFP8Quantizer(_fp8_dtype(self.fp8_format, role), **usage)


@dataclass
class Float8CurrentScaling(Recipe):
    """Float8 with the scale of the tensor at hand."""
    use_power_2_scales: bool = _switched_on("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
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
        return Float8CurrentScalingQuantizer(_fp8_dtype(self.fp8_format, role),
                                             force_pow_2_scales=self.use_power_2_scales, **usage)


@dataclass
class Float8BlockScaling(Recipe):
    """Float8 with one scale for 128 elements, of weights for 128x128."""
    use_f32_scales: bool = _switched_on("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _BACKWARD_OVERRIDE

    def __post_init__(self):
        _one_of("fp8_format", self.fp8_format, (Format.E4M3, Format.HYBRID))
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            _one_of(name, getattr(self, name), (1, 2))
        _check_backward(self)
        params = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = params

    def make_quantizer(self, role, rowwise=True, columnwise=True):
        from .float8_blockwise_tensor import Float8BlockQuantizer
        dim = self.grad_block_scaling_dim if role.startswith("grad") else \
            self.w_block_scaling_dim if role == "weight" else self.x_block_scaling_dim
        return Float8BlockQuantizer(_fp8_dtype(self.fp8_format, role), rowwise=rowwise, columnwise=columnwise,
                                    force_pow_2_scales=not self.use_f32_scales, block_scaling_dim=dim)


@dataclass
class DelayedScaling(Recipe):
    """Float8 with the scale of earlier tensors. Layers of nib.torch do not keep the history that it needs; quantizers
    can be made by hand (Float8Quantizer)."""
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
        _check_backward(self)

    def make_quantizer(self, role, **usage):
        raise NotImplementedError("layers of nib.torch keep no history of amaxes: take another recipe")


@dataclass
class CustomRecipe(Recipe):
    """A recipe that asks a function for quantizers: qfactory("linear_input"), "linear_weight", "linear_grad_output"."""
    qfactory: Callable[..., Any] = field(default=None)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = _BACKWARD_OVERRIDE

    def __post_init__(self):
        if not callable(self.qfactory):
            raise ValueError("a CustomRecipe needs a function that makes quantizers: qfactory")
        _check_backward(self)

    def make_quantizer(self, role, **usage):
        quantizer = self.qfactory(f"linear_{role}")
        quantizer.set_usage(**usage)
        return quantizer


def _fp8_dtype(fp8_format, role):
    from .constants import DType
    backward = role.startswith("grad") and fp8_format is Format.HYBRID
    return DType.kFloat8E5M2 if backward or fp8_format is Format.E5M2 else DType.kFloat8E4M3

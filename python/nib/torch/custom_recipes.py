# SPDX-License-Identifier: Apache-2.0
"""Functions for CustomRecipe, by TransformerEngine's names: those that do what a recipe does, and mixtures."""
from . import recipe as recipes
from .hybrid_tensor import HybridQuantizer
from .identity_tensor import IdentityQuantizer
from .nvfp4_tensor import NVFP4Quantizer
from .quantization import DelayedScalingRequest

_LINEAR = ("linear", "grouped_linear")


def _type(role):
    """The tensor_type of a linear layer's role; "input" for all that is not known."""
    return role.tensor_type if role is not None and role.module_type in _LINEAR and role.tensor_type else "input"


def high_precision_factory(role):
    """Nothing is quantized."""
    return IdentityQuantizer()


def delayed_scaling_factory(role):
    """As DelayedScaling()."""
    return DelayedScalingRequest()


def current_scaling_factory(role):
    """As Float8CurrentScaling(), with scales that are no powers of two."""
    backward = role is not None and role.tensor_type == "grad_output"
    return recipes.Float8CurrentScaling(use_power_2_scales=False).make_quantizer("grad_output" if backward else "input")


def float8_block_scaling_factory(role):
    """As Float8BlockScaling(), with scales that are powers of two."""
    return recipes.Float8BlockScaling(use_f32_scales=False).make_quantizer(_type(role))


def mxfp8_factory(role):
    """As MXFP8BlockScaling()."""
    return recipes.MXFP8BlockScaling().make_quantizer("input")


_NVFP4 = dict(disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False,
              row_scaled_activation=False, nvfp4_4over6="none", backward_override=None)


def nvfp4_factory(role):
    """As NVFP4BlockScaling()."""
    kind = _type(role)
    return recipes.NVFP4BlockScaling(**_NVFP4).make_quantizer(kind if kind in ("weight", "grad_output") else "input")


# ---- Mixtures --------------------------------------------------------------------------------------------


def _plain_nvfp4(row_scaled=False):
    return NVFP4Quantizer(row_scaled_nvfp4=row_scaled)


def _mixed(row, col, source="original"):
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, columnwise_source=source)


def high_precision_fwd_mxfp8_bwd_factory(role):
    """Forward in high precision, gradients in MXFP8."""
    if _type(role) == "grad_output":
        return mxfp8_factory(role)
    return _mixed(IdentityQuantizer(), mxfp8_factory(role))


def mxfp8_fwd_nvfp4_bwd_factory(role):
    """Forward in MXFP8, gradients in NVFP4 with 1x16 blocks; the weight's from its MXFP8 values."""
    kind = _type(role)
    if kind == "grad_output":
        return nvfp4_factory(role)
    if kind == "weight":
        return _mixed(mxfp8_factory(role), _plain_nvfp4(), "rowwise_dequantized")
    if kind == "input" and role is not None and role.module_type in _LINEAR:
        return _mixed(mxfp8_factory(role), nvfp4_factory(role))
    return mxfp8_factory(role)


def nvfp4_1d_weight_factory(role):
    """As NVFP4BlockScaling(), but weights have 1x16 blocks, the columnwise ones from the rowwise values."""
    if _type(role) == "weight":
        return _mixed(_plain_nvfp4(), _plain_nvfp4(), "rowwise_dequantized")
    return nvfp4_factory(role)


def _forward_only(role, row, rest):
    """Forward by a quantizer, gradients in high precision from the values that forward had."""
    kind = _type(role)
    if role is None or role.module_type not in _LINEAR or kind not in ("input", "weight", "grad_output"):
        return rest
    return IdentityQuantizer() if kind == "grad_output" else _mixed(row, IdentityQuantizer(), "rowwise_dequantized")


def mxfp8_fwd_high_precision_bwd_factory(role):
    """MXFP8BlockScaling(backward_override="dequantized")."""
    return _forward_only(role, mxfp8_factory(role), mxfp8_factory(role))


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role):
    """NVFP4BlockScaling(row_scaled_activation=True, backward_override="dequantized") with 1x16 blocks."""
    return _forward_only(role, _plain_nvfp4(row_scaled=_type(role) == "input"), _plain_nvfp4())


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role):
    """Grouped layers: forward in row-scaled NVFP4, gradients in MXFP8 of its values. All else in MXFP8."""
    kind = _type(role)
    if role is None or role.module_type != "grouped_linear" or kind not in ("input", "weight"):
        return mxfp8_factory(role)
    return _mixed(_plain_nvfp4(row_scaled=kind == "input"), mxfp8_factory(role), "rowwise_dequantized")


def nvfp4_linear_fp8_dpa_factory(role):
    """Linear layers in NVFP4; for attention the quantizers that it would have in FP8, which nib's does not take."""
    if role is not None and role.module_type == "dpa" and role.tensor_type in ("s", "dp"):
        return DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    boundary = role is not None and not role.module_type and "dpa_" in role.name
    if boundary or role is not None and role.module_type == "dpa":
        backward = "grad_input" in role.name if boundary else role.tensor_type in ("do", "dp", "dqkv")
        recipe = recipes.Float8CurrentScaling(use_power_2_scales=False)
        return recipe.make_quantizer("grad_output" if backward else "input")
    return nvfp4_factory(role)

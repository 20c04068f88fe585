# SPDX-License-Identifier: Apache-2.0
"""Layers, by TransformerEngine's names.

    base.py              parameters and how they come to be, quantizers and what these remember
    linear.py            Linear, and the function behind all layers that multiply by a weight
    compiled.py          their products within torch.compile
    norms.py             LayerNorm, RMSNorm, activations
    layernorm_linear.py  LayerNormLinear
    layernorm_mlp.py     LayerNormMLP
    grouped_linear.py    GroupedLinear, Fp8Padding, Fp8Unpadding
"""
from ..products import values_of  # noqa: F401
from ..quantization import (autocast, fp8_autocast, fp8_model_init, get_default_recipe, get_recipe,  # noqa: F401
                            is_bf16_available, is_fp8_available, is_fp8_block_scaling_available, is_fp8_enabled,
                            is_mxfp8_available, is_nvfp4_available, quantized_model_init)
from .base import TransformerEngineBaseModule  # noqa: F401
from .grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear  # noqa: F401
from .layernorm_linear import LayerNormLinear  # noqa: F401
from .layernorm_mlp import LayerNormMLP  # noqa: F401
from .linear import Linear  # noqa: F401
from .norms import LayerNorm, RMSNorm  # noqa: F401

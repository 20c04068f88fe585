# SPDX-License-Identifier: Apache-2.0
"""Layers, by TransformerEngine's names.

    base.py            parameters and how they come to be, quantizers and what these remember
    linear.py          Linear, and the function behind all layers that multiply by a weight
"""
from ..products import values_of  # noqa: F401
from ..quantization import (autocast, fp8_autocast, fp8_model_init, get_default_recipe, get_recipe,  # noqa: F401
                            is_bf16_available, is_fp8_available, is_fp8_block_scaling_available, is_fp8_enabled,
                            is_mxfp8_available, is_nvfp4_available, quantized_model_init)
from .base import TransformerEngineBaseModule  # noqa: F401
from .linear import Linear  # noqa: F401

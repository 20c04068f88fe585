# SPDX-License-Identifier: Apache-2.0
"""What Megatron's configuration asks for, as recipes and contexts."""
import contextlib
import enum

from .quantization import autocast, quantized_model_init
from .recipe import CustomRecipe, NVFP4BlockScaling


class Fp4Recipe(str, enum.Enum):
    """The recipes of megatron.core.enums."""
    nvfp4 = "nvfp4"
    custom = "custom"


def get_fp4_recipe(config):
    """The recipe of a configuration: of its fields fp4_recipe, fp8_dot_product_attention and fp4_quantizer_factory."""
    attention = bool(getattr(config, "fp8_dot_product_attention", False))
    if config.fp4_recipe == Fp4Recipe.nvfp4:
        return NVFP4BlockScaling(fp8_dpa=attention)
    if config.fp4_recipe == Fp4Recipe.custom:
        return CustomRecipe(qfactory=getattr(config, "fp4_quantizer_factory", None), fp8_dpa=attention)
    raise ValueError(f"{config.fp4_recipe!r} is no FP4 recipe: {', '.join(recipe.value for recipe in Fp4Recipe)}")


def _stays_in_bf16(config, layer_no):
    if layer_no < 0 or not getattr(config, "first_last_layers_bf16", False):
        return False
    return layer_no < config.num_layers_at_start_in_bf16 or \
        layer_no >= config.num_layers - config.num_layers_at_end_in_bf16


def get_fp4_context(config, layer_no=-1, is_init=False):
    """The context in which a layer is run or (is_init) made."""
    if not config.fp4 or (is_init and not getattr(config, "fp4_param", False)) or _stays_in_bf16(config, layer_no):
        return contextlib.nullcontext()
    recipe = get_fp4_recipe(config)
    return quantized_model_init(recipe=recipe) if is_init else autocast(recipe=recipe)

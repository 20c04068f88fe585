# SPDX-License-Identifier: Apache-2.0
"""What Megatron's configuration asks for, as recipes and contexts; whether its parameter buffers can be gathered."""
import contextlib
import enum

import torch

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
    """The context in which a layer is run or (is_init) made. Where layers are made to be trained, their NVFP4 weights
    keep what they were quantized from, for the masters."""
    if not config.fp4 or (is_init and not getattr(config, "fp4_param", False)) or _stays_in_bf16(config, layer_no):
        return contextlib.nullcontext()
    recipe = get_fp4_recipe(config)
    if is_init:
        return quantized_model_init(recipe=recipe, preserve_high_precision_init_val=torch.is_grad_enabled())
    return autocast(recipe=recipe)


# ---- Parameter buffers -----------------------------------------------------------------------------------

# A bucket of Megatron's has an element layout, by whose shares ranks own gradients and masters and cast them, and for
# NVFP4 a packed one, by whose shares bytes are gathered. Both are padded on their own, so that a rank may gather bytes
# that another one has cast.


def check_buffers(buffers):
    """Raise ValueError where a gather of Megatron's parameter buffers would lose bytes that ranks have cast: where a
    bucket's packed share is not the half of its element share. buffers: a DistributedDataParallel of Megatron's, or its
    buffers. To be called after the model is wrapped, before the first step."""
    if not isinstance(buffers, (list, tuple)):
        buffers = [*buffers.buffers, *getattr(buffers, "expert_parallel_buffers", ())]
    for number, buffer in enumerate(buffers):
        config = getattr(buffer, "ddp_config", None)
        if not getattr(buffer, "has_nvfp4_params", False) or not getattr(config, "use_distributed_optimizer", True):
            continue  # nothing packed, or nothing gathered
        size = buffer.data_parallel_world_size
        for bucket, (elements, packed) in enumerate(zip(buffer.bucket_indices, buffer.nvfp4_packed_bucket_indices)):
            lost = sum(_lost_bytes(buffer, bucket, elements, packed, rank) for rank in range(size))
            if lost:
                raise ValueError(
                    f"buffer {number}, bucket {bucket}: {elements[1] - elements[0]} elements but "
                    f"{packed[1] - packed[0]} packed bytes over {size} ranks: {lost} bytes that a rank casts are "
                    "gathered from another one. Another bucket_size or number of ranks is needed, or no fp4 "
                    "parameters")


def _lost_bytes(buffer, bucket, elements, packed, rank):
    """How many bytes a rank casts, in whole or in part, that it does not send."""
    def share(whole):
        step = (whole[1] - whole[0]) // buffer.data_parallel_world_size
        return whole[0] + rank * step, whole[0] + (rank + 1) * step

    mine, sent = share(elements), share(packed)
    lost = 0
    for parameter, (start, end, where) in buffer.param_index_map.items():
        first, last = max(start, mine[0]), min(end, mine[1])
        if where != bucket or first >= last:
            continue
        target, target_end, _bucket = buffer.nvfp4_packed_param_index_map[parameter]
        per_byte = (end - start) // (target_end - target)  # 2, or 1 for a parameter that is not NVFP4
        begin, stop = target + (first - start) // per_byte, target + -(-(last - start) // per_byte)
        lost += (stop - begin) - max(0, min(stop, sent[1]) - max(begin, sent[0]))
    return lost

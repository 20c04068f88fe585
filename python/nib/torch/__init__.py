# SPDX-License-Identifier: Apache-2.0
"""nib for PyTorch: the quantizers, tensors and helpers of TransformerEngine by their own names, on CPU tensors.

    quantized_tensor.py          the base classes
    format_tensor.py             all that formats have in common
    nvfp4_tensor.py              NVFP4
    float8_tensor.py             Float8, one scale per tensor: delayed and current scaling
    mxfp8_tensor.py              MXFP8
    float8_blockwise_tensor.py   blockwise Float8
    grouped_tensor.py            groups of matrices in shared buffers
    utils.py                     sharded master weights, gathers, raw buffers
    fp4_utils.py                 Megatron's helpers for FP4 parameters
    identity_tensor.py           a quantizer that leaves values as they are
    hybrid_tensor.py             two quantizers in one, one for each usage
    recipe.py                    recipes: which tensor of a layer is quantized how
    quantization.py              autocast, and what turns a recipe into the quantizers of a layer
    products.py                  products of quantized and plain matrices
    pretrained.py, packed.py     models of transformers over quantized checkpoints
    module/                      layers
    attention.py, transformer.py attention and whole layers of a transformer
    recompute.py                 checkpoint
    optimizers.py                FusedAdam
    custom_recipes.py            functions for CustomRecipe
    cpp_extensions.py            products by TransformerEngine's names
    extra_state.py               what a pickled extra state may be
    unsupported.py               names that raise
    tex.py                       functions of transformer_engine_torch
    megatron.py                  Megatron's configuration as recipes, and its parameter buffers
    aliases.py                   all of this under the names of those packages
    gist.py                      the names and results of a widely copied PyTorch gist
    constants.py                 DType and block sizes
    _bridge.py                   torch tensors to the library and back
"""
try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError("nib.torch needs PyTorch: pip install torch") from _error

from . import fp4_utils, gist, megatron, tex
from .aliases import install_aliases
from .attention import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding
from .constants import (DType, MXFP8_BLOCK_SCALING_SIZE, NVFP4_BLOCK_SCALING_SIZE, TE_DType)
from .float8_blockwise_tensor import Float8BlockQuantizer, Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
from .float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, Float8TensorStorage
from .fp4_utils import (HAVE_TE, HAVE_TE_FP4_TENSOR_CLASS, dequantize_fp4_tensor, get_fp4_align_size,
                        get_nvfp4_rowwise_packed_shape, is_grouped_nvfp4tensor, is_nvfp4tensor,
                        modify_grouped_nvfp4_rowwise_storage, modify_nvfp4_rowwise_storage, quantize_nvfp4_param_shard)
from .grouped_tensor import (GroupedTensor, GroupedTensorStorage, group_dequantize, group_quantize, split_quantize)
from .mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from .hybrid_tensor import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer
from .identity_tensor import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from .module import (Fp8Padding, Fp8Unpadding, GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear,
                     RMSNorm)
from .nvfp4_tensor import (NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage, _fp4_e2m1_vals, _FromNVFP4Func,
                           get_hadamard_matrix, get_no_random_sign_vector, get_random_sign_mask_for_rht, get_rht_matrix,
                           get_sign_from_vector, get_wgrad_sign_vector)
from .optimizers import FusedAdam
from .quantization import (DelayedScalingRequest, QuantizerRequest, QuantizerRole, autocast, fp8_autocast,
                           fp8_model_init, get_default_recipe, is_bf16_available, is_fp8_available,
                           is_fp8_block_scaling_available, is_mxfp8_available, is_nvfp4_available, quantized_model_init)
from .quantized_tensor import (QuantizedTensor, QuantizedTensorStorage, Quantizer, prepare_for_saving,
                               restore_from_func_ctx, restore_from_saved)
from .pretrained import from_pretrained
from .recompute import CudaRNGStatesTracker, checkpoint
from .transformer import TransformerLayer
from .utils import (cast_master_weights_to_fp8, clear_columnwise_cache, gather_along_first_dim,
                    post_all_gather_processing, quantize_master_weights, replace_raw_data,
                    set_quantizer_amax_reduction_group)

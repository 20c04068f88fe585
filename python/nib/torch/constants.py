# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's names for dtypes and block sizes."""
import enum
from types import SimpleNamespace

import torch


class DType(enum.IntEnum):
    """TransformerEngine's dtypes; the values are nib_dtype's too."""
    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, value):
        """A DType from itself, its value, or a torch.dtype."""
        if isinstance(value, torch.dtype):
            if value not in TE_DType:
                raise TypeError(f"{value} has no DType")
            return TE_DType[value]
        return cls(int(value))


TE_DType = {
    torch.uint8: DType.kByte,
    torch.int16: DType.kInt16,
    torch.int32: DType.kInt32,
    torch.int64: DType.kInt64,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
TE_DType_To_Torch = {code: dtype for dtype, code in TE_DType.items()}

NVFP4_BLOCK_SCALING_SIZE = 16
MXFP8_BLOCK_SCALING_SIZE = 32
FLOAT8_BLOCK_SCALING_SIZE = 128

# Slots of quantizers: three per product forward, two backward.
FP8FwdTensorIdx = SimpleNamespace(GEMM1_INPUT=0, GEMM1_WEIGHT=1, GEMM1_OUTPUT=2, GEMM2_INPUT=3, GEMM2_WEIGHT=4,
                                  GEMM2_OUTPUT=5, GEMM3_INPUT=6, GEMM3_WEIGHT=7, GEMM3_OUTPUT=8)
FP8BwdTensorIdx = SimpleNamespace(GRAD_OUTPUT1=0, GRAD_INPUT1=1, GRAD_OUTPUT2=2, GRAD_INPUT2=3, GRAD_OUTPUT3=4,
                                  GRAD_INPUT3=5)
AttnMaskTypes = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
                 "padding_causal_bottom_right", "arbitrary")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
QKVLayouts = ("sbhd_sbhd_sbhd", "bshd_bshd_bshd")
dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else None
AttnTypes = ("self", "cross")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)

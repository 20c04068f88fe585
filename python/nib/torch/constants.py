# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's names for dtypes and block sizes."""
import enum

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

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make docs/formats.md: sh bench/formats.sh. BUILD (default build) has libnib.so.
set -eu
cd "$(dirname "$0")/.."
build=$(cd "${BUILD:-build}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${CC:-cc}" -std=gnu11 -O2 -Wall -Wextra -Iinclude bench/formats.c -o "$work/formats" -L"$build" -lnib -lm \
    -Wl,-rpath,"$build"
"$work/formats" >"$work/table"

cat >"$work/formats.md" <<'END'
# Formats

NVFP4 has relatives that share its idea, small floats under shared scales, and go through the same calls of `nib.h`.
This page says what each is for, what it costs, and how its bytes are computed.

| format | `nib_format` | what it is for |
|---|---|---|
| NVFP4 | `NIB_NVFP4` | weights and GEMMs in 4 bits on Blackwell; docs/format.md draws it |
| Float8 | `NIB_FLOAT8` | one scale per tensor: training on Hopper, KV caches, the plainest checkpoints |
| MXFP8 | `NIB_MXFP8` | the OCP's 8-bit blocks: training on Blackwell without any statistics per tensor |
| blockwise Float8 | `NIB_FLOAT8_BLOCK` | weights in 128x128 and activations in 1x128, as DeepSeek-V3 has them |
| MXFP4 | `NIB_MXFP4` | the OCP's 4-bit blocks: gpt-oss and its kin |

## Bits and accuracy

Signal over quantization noise in dB (more is better; 6.02 dB is one bit) of a 1024 x 1024 matrix of FP32 values, the
rowwise usage. `sh bench/formats.sh` makes this page; seed and generator are in bench/formats.c.

END
cat "$work/table" >>"$work/formats.md"
cat >>"$work/formats.md" <<'END'

How to read it:
- A scale that is a power of two moves values without rounding them, so that 8-bit rows with such scales agree however large
  their blocks are, as long as nothing falls below the smallest code. Block size matters once data spans more binades
  than the element has, and in 4 bits it matters always.
- An FP32 scale puts the largest element of a block on the largest code, where it is not rounded at all. With heavy
  tails that one element is much of the signal.
- E5M2 has one bit of precision less than E4M3 for 2^15 times the range. Under a scale per block that range is rarely
  needed; it is there for gradients under one scale per tensor.
- MX's floor rule clips what lies between the largest code and the next power of two (448 to 512, 6 to 8). In E2M1 that
  costs about what it gains; in E4M3 it costs.
- Square blocks store one scale per row and block in NVFP4 and MXFP8, as their GEMMs want it, and one per block in
  blockwise Float8.

## Parts

M is the product of all dims but the last, K the last; up(n, m) rounds n up to a multiple of m. Padding of scales is
zero. `nib_part_shape` gives these shapes, `nib_part_valid_shape` gives them without the padding.

| format | ROW_DATA | COL_DATA | ROW_SCALE | COL_SCALE | tensor scales |
|---|---|---|---|---|---|
| NVFP4 | [..., ceil(K/2)] | [K, ceil(M/2)] | E4M3 [up(M, 128), up(ceil(K/16), 4)] | E4M3 [up(K, 128), up(ceil(M/16), 4)] | FP32 [1] each, or [M] and [K] |
| Float8 | [..., K] | [K, M] | | | FP32 [1], for both usages |
| MXFP8 | [..., K] | [..., K], not transposed | E8M0 [up(M, 128), up(ceil(K/32), 4)] | E8M0 [up(ceil(M/32), 4), up(K, 128)] | |
| blockwise, 1x128 | [..., K] | [K, M] | FP32 [ceil(K/128), up(M, 4)] | FP32 [ceil(M/128), up(K, 4)] | |
| blockwise, 128x128 | [..., K] | [K, M] | FP32 [ceil(M/128), up(ceil(K/128), 4)] | FP32 [ceil(K/128), up(ceil(M/128), 4)] | |
| MXFP4 | [..., ceil(K/2)] | [K, ceil(M/2)] | E8M0 [up(M, 128), up(ceil(K/32), 4)] | E8M0 [up(K, 128), up(ceil(M/32), 4)] | |

All blocks run along the lines of the usage: along K rowwise, along M columnwise. Scales of blockwise Float8 with 1x128
blocks lie block by block, that is, transposed, and so do those of the columnwise usage of MXFP8. The last block of a
line may be short.

| | elements | columnwise usage built from the rowwise one | swizzled scales | a view may change K | least rank | buffers saved |
|---|---|---|---|---|---|---|
| NVFP4 | E2M1 | 16x16 | yes | 1x16, multiples of 16 | 1 | 6 |
| Float8 | E4M3, E5M2 | yes | no | yes | 0 | 3 |
| MXFP8 | E4M3, E5M2 | 32x32 | yes | 1x32, multiples of 32 | 1 | 4 |
| blockwise Float8 | E4M3, E5M2 | 128x128 | no | no | 1 | 4 |
| MXFP4 | E2M1 | no | yes | multiples of 32 | 1 | 4 |

## Scales

Every operation is FP32 and rounds once. rn is the rounding of a float to the nearest code, ties to even, magnitudes
beyond the largest value q (E4M3 448, E5M2 57344, E2M1 6) becoming q. NaNs do not count in an amax; a NaN is the code
0x7F, and in E2M1, which has none, 6.

**Float8 and blockwise Float8.** For the tensor, or for each block:

    a = amax_epsilon if amax < amax_epsilon, otherwise amax
    s = 1                    if a is zero or infinite
        limit                if q / a overflows
        q / a                otherwise
    s = 2^floor(log2 s)      with pow2_scales (the default of blockwise Float8, not of Float8)
    code = rn(x * s),  scale_inv = 1 / s,  value = code * scale_inv

The limit is FLT_MAX for Float8 and the largest finite value of the input's dtype for blockwise Float8.

*Delayed scaling* (Float8) takes s from the caller (`nib_overrides.scale`) and raises `nib_overrides.amax_seen` to the
amax of the data. After the step `nib_delayed_scaling_update` computes the next scale from the window of amaxes:

    amax = the largest of the window, or the most recent
    s    = q * 2^-margin / amax    if amax is positive and finite (FLT_MAX where that overflows), otherwise as before

and rolls the window. Data that is too large for an old scale is clipped.

**MXFP8 and MXFP4.** The scale is a power of two 2^e, stored as the byte e + 127:

    ceil    e = the smallest with 2^e >= amax * (1 / q)
    floor   e = floor(log2 amax) - m       m = 8 (E4M3), 15 (E5M2), 2 (E2M1): the exponent of q
    code = rn(x * 2^-e),  value = code * 2^e

e stays within -127 and 127; it is -127 for a block of zeros, and 127 for one with an infinity by the ceil rule. With
ceil nothing finite is clipped. The byte 255 is a NaN; quantizing never writes it.

**NVFP4.** docs/numerics.md.

## MXFP4 as NVFP4

`nib_mxfp4_to_nvfp4` keeps every value: E8M0 scales become E4M3 scales under a power-of-two tensor scale 2^(k - 8), at
least 2^-126, where 2^k is the largest scale of a block that is not all zeros. E4M3 has the powers from 2^-9 to 2^8, so
that blocks down to 2^(k - 17) are exact; farther down, those whose codes can be halved often enough. All others are
counted and named in a report, and rejected where no report is asked for.
END
mkdir -p docs
mv "$work/formats.md" docs/formats.md

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reference.c - what is behind the format, for people who check their own implementation: matrices, values, codecs.
 */
#include "nib_reference.h"
#include "base/base.h"
#include "format/codec.h"
#include "base/os.h"
#include "format/philox.h"

void nib_hadamard_matrix(float out[256])
{
    if (!out)
        return;
    for (unsigned i = 0; i < 16; i++)
        for (unsigned j = 0; j < 16; j++)
            out[16 * i + j] = __builtin_popcount(i & j) % 2 ? -0.25f : 0.25f;
}

void nib_rht_matrix(uint16_t sign_mask, uint16_t out[256])
{
    if (!out)
        return;
    float hadamard[256];
    nib_hadamard_matrix(hadamard);
    for (int i = 0; i < 256; i++)
        out[i] = (uint16_t)(nib_bf16_from_f32(hadamard[i]) ^ (sign_mask >> i / 16 & 1) << 15);
}

void nib_e2m1_values(float out[16])
{
    for (int i = 0; out && i < 16; i++)
        out[i] = nib_f32_from_e2m1((uint8_t)i);
}

void nib_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    if (counter && key && out)
        nib_philox_block(counter, key, out);
}

/* ---- Codecs by dtype ---- */

#define DEFINE_CODEC(dtype, type, encode, decode)                       \
    static void encode_##dtype(const float *x, size_t n, void *out)     \
    {                                                                   \
        for (size_t i = 0; i < n; i++)                                  \
            ((type *)out)[i] = encode(x[i]);                            \
    }                                                                   \
    static void decode_##dtype(const void *codes, size_t n, float *out) \
    {                                                                   \
        for (size_t i = 0; i < n; i++)                                  \
            out[i] = decode(((const type *)codes)[i]);                  \
    }

DEFINE_CODEC(e4m3, uint8_t, nib_e4m3_from_f32, nib_f32_from_e4m3)
DEFINE_CODEC(e5m2, uint8_t, nib_e5m2_from_f32, nib_f32_from_e5m2)
DEFINE_CODEC(e8m0, uint8_t, nib_e8m0_from_f32, nib_f32_from_e8m0)
DEFINE_CODEC(bf16, uint16_t, nib_bf16_from_f32, nib_f32_from_bf16)
DEFINE_CODEC(f16, uint16_t, nib_f16_from_f32, nib_f32_from_f16)

static void encode_f32(const float *x, size_t n, void *out)
{
    if (n)
        memmove(out, x, n * sizeof *x);
}
static void decode_f32(const void *codes, size_t n, float *out)
{
    if (n)
        memmove(out, codes, n * sizeof *out);
}

static void encode_e2m1(const float *x, size_t n, void *out)
{
    uint8_t *bytes = out;
    for (size_t i = 0; i < n; i += 2)
        bytes[i / 2] = (uint8_t)(nib_e2m1_from_f32(x[i]) | (i + 1 < n ? nib_e2m1_from_f32(x[i + 1]) << 4 : 0));
}

static void decode_e2m1(const void *codes, size_t n, float *out)
{
    const uint8_t *bytes = codes;
    for (size_t i = 0; i < n; i++)
        out[i] = nib_f32_from_e2m1(bytes[i / 2] >> 4 * (i % 2) & 15);
}

static const struct {
    void (*encode)(const float *x, size_t n, void *out);
    void (*decode)(const void *codes, size_t n, float *out);
} codecs[NIB_DTYPE_COUNT] = {
    [NIB_F32] = { encode_f32, decode_f32 },    [NIB_F16] = { encode_f16, decode_f16 },
    [NIB_BF16] = { encode_bf16, decode_bf16 }, [NIB_E4M3] = { encode_e4m3, decode_e4m3 },
    [NIB_E5M2] = { encode_e5m2, decode_e5m2 }, [NIB_E8M0] = { encode_e8m0, decode_e8m0 },
    [NIB_E2M1] = { encode_e2m1, decode_e2m1 },
};

static nib_status check_codec(nib_dtype dtype, const void *in, const void *out, size_t n)
{
    if (!nib_dtype_valid(dtype) || !codecs[dtype].encode)
        return nib_fail(NIB_ERR_DTYPE, "%s is not a dtype that is computed with",
                        nib_dtype_valid(dtype) ? nib_dtypes[dtype].name : "this");
    if (n && (!in || !out))
        return nib_fail(NIB_ERR_ARG, "a pointer to %zu values is NULL", n);
    return NIB_OK;
}

nib_status nib_encode(nib_dtype dtype, const float *x, size_t n, void *out)
{
    TRY(check_codec(dtype, x, out, n));
    const nib_fpenv saved = nib_fpenv_enter();
    codecs[dtype].encode(x, n, out);
    nib_fpenv_leave(saved);
    return NIB_OK;
}

nib_status nib_decode(nib_dtype dtype, const void *codes, size_t n, float *out)
{
    TRY(check_codec(dtype, codes, out, n));
    const nib_fpenv saved = nib_fpenv_enter();
    codecs[dtype].decode(codes, n, out);
    nib_fpenv_leave(saved);
    return NIB_OK;
}

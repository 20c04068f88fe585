/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cublaslt.c - the part of cuBLASLt that libnib_cuda uses, for a GPU that is the host: column-major products of a
 * transposed A by B, sums in double. It rejects what the documentation does not allow, and reads nothing at once.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"
#include "format/codec.h"

enum { OK = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15, F32 = 0, F16 = 2, BF16 = 14, E2M1 = 33 };
long shim_cublaslt_products, shim_cublaslt_codes; /* so many were asked for */
int shim_cublaslt_rejects_codes;
int shim_cublaslt_calls, shim_cublaslt_fails_at = -1; /* which call fails */
int shim_cublaslt_objects;                            /* so many are there */

struct description {
    uint64_t attribute[64];
    size_t set;
};
struct layout {
    int type;
    uint64_t rows, columns;
    int64_t leading;
};
struct result {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};
struct job {
    struct description how;
    struct layout a, b, y;
    const void *alpha, *beta, *at_a, *at_b;
    void *at_y;
};

int cublasLtCreate(void **out);
const char *cublasLtGetStatusName(int status);
int cublasLtMatmulDescCreate(struct description **out, int compute, int scale);
int cublasLtMatmulDescDestroy(struct description *d);
int cublasLtMatmulDescSetAttribute(struct description *d, int attribute, const void *value, size_t bytes);
int cublasLtMatrixLayoutCreate(struct layout **out, int type, uint64_t rows, uint64_t columns, int64_t leading);
int cublasLtMatrixLayoutDestroy(struct layout *l);
int cublasLtMatmulPreferenceCreate(struct description **out);
int cublasLtMatmulPreferenceDestroy(struct description *d);
int cublasLtMatmulPreferenceSetAttribute(struct description *d, int attribute, const void *value, size_t bytes);
int cublasLtMatmulAlgoGetHeuristic(void *handle, struct description *how, struct layout *a, struct layout *b,
                                   struct layout *c, struct layout *d, struct description *preference, int wanted,
                                   struct result *out, int *found);
int cublasLtMatmul(void *handle, struct description *how, const void *alpha, const void *a, struct layout *a_layout,
                   const void *b, struct layout *b_layout, const void *beta, const void *c, struct layout *c_layout,
                   void *d, struct layout *d_layout, const uint64_t *algorithm, void *workspace, size_t bytes,
                   cudaStream_t stream);

int cublasLtCreate(void **out)
{
    *out = malloc(1);
    return *out ? OK : 3;
}
const char *cublasLtGetStatusName(int status)
{
    return status == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS_UNKNOWN";
}

static int fails(void) { return shim_cublaslt_calls++ == shim_cublaslt_fails_at; }

static int create(struct description **out)
{
    if (fails())
        return EXECUTION_FAILED;
    *out = calloc(1, sizeof **out);
    shim_cublaslt_objects += *out != NULL;
    return *out ? OK : 3;
}
int cublasLtMatmulDescCreate(struct description **out, int compute, int scale)
{
    return compute == 68 && scale == F32 ? create(out) : INVALID_VALUE;
}
int cublasLtMatmulDescDestroy(struct description *d)
{
    shim_cublaslt_objects--;
    free(d);
    return OK;
}
static int set(struct description *d, int attribute, const void *value, size_t bytes)
{
    if (fails())
        return EXECUTION_FAILED;
    memset(&d->attribute[attribute], 0, 8);
    memcpy(&d->attribute[attribute], value, bytes);
    d->set |= (size_t)1 << attribute;
    return OK;
}
int cublasLtMatmulDescSetAttribute(struct description *d, int attribute, const void *value, size_t bytes)
{
    const int pointer = attribute == 8 || attribute == 17 || attribute == 18;
    return bytes == (pointer ? 8 : 4) ? set(d, attribute, value, bytes) : INVALID_VALUE;
}
int cublasLtMatrixLayoutCreate(struct layout **out, int type, uint64_t rows, uint64_t columns, int64_t leading)
{
    if (fails())
        return EXECUTION_FAILED;
    *out = malloc(sizeof **out);
    if (!*out)
        return 3;
    shim_cublaslt_objects++;
    **out = (struct layout){ type, rows, columns, leading };
    return OK;
}
int cublasLtMatrixLayoutDestroy(struct layout *l)
{
    shim_cublaslt_objects--;
    free(l);
    return OK;
}
int cublasLtMatmulPreferenceCreate(struct description **out) { return create(out); }
int cublasLtMatmulPreferenceDestroy(struct description *d) { return cublasLtMatmulDescDestroy(d); }
int cublasLtMatmulPreferenceSetAttribute(struct description *d, int attribute, const void *value, size_t bytes)
{
    return bytes == (attribute == 1 ? 8 : 4) ? set(d, attribute, value, bytes) : INVALID_VALUE;
}

static int check(const struct description *how, const struct layout *a, const struct layout *b, const struct layout *y)
{
    const int codes = a->type == E2M1;
    if (a->type != b->type || a->rows != b->rows || y->rows != a->columns || y->columns != b->columns ||
        how->attribute[2] != 1 || how->attribute[3] != 1)
        return INVALID_VALUE;
    if (a->leading < (int64_t)a->rows || b->leading < (int64_t)b->rows || y->leading < (int64_t)y->rows)
        return INVALID_VALUE;
    if (codes && (how->attribute[31] != 1 || how->attribute[32] != 1 || !how->attribute[17] || !how->attribute[18]))
        return INVALID_VALUE;
    if (codes ? shim_cublaslt_rejects_codes || a->rows % 32 : y->type != F32 && y->type != a->type)
        return NOT_SUPPORTED;
    return OK;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, struct description *how, struct layout *a, struct layout *b,
                                   struct layout *c, struct layout *d, struct description *preference, int wanted,
                                   struct result *out, int *found)
{
    (void)handle, (void)c, (void)wanted;
    if (fails())
        return EXECUTION_FAILED;
    const int status = check(how, a, b, d);
    if (!status && preference->attribute[3] != 2)
        return INVALID_VALUE;
    *found = !status;
    out->status = status;
    return status;
}

/* ---- The product ---- */

static float value(const void *data, int type, int64_t i)
{
    if (type == F32)
        return ((const float *)data)[i];
    const uint16_t half = ((const uint16_t *)data)[i];
    return type == F16 ? nib_f32_from_f16(half) : nib_f32_from_bf16(half);
}

static float element(const void *data, const struct layout *l, uint64_t scales, int64_t k, int64_t column)
{
    const int64_t i = column * l->leading + k;
    if (l->type != E2M1)
        return value(data, l->type, i);
    const int64_t block = k / 16, tiles = ((int64_t)l->rows / 16 + 3) / 4;
    const uint8_t *const tile = (const uint8_t *)(uintptr_t)scales + (column / 128 * tiles + block / 4) * 512;
    const uint8_t scale = tile[column % 32 * 16 + column % 128 / 32 * 4 + block % 4],
                  code = ((const uint8_t *)data)[i / 2] >> 4 * (i % 2) & 15;
    return nib_f32_from_e2m1(code) * nib_f32_from_e4m3(scale);
}

static void run(const void *context)
{
    const struct job *const j = context;
    const void *const bias = (const void *)(uintptr_t)j->how.attribute[8];
    const float alpha = *(const float *)j->alpha, beta = *(const float *)j->beta;
    for (int64_t column = 0; column < (int64_t)j->y.columns; column++)
        for (int64_t row = 0; row < (int64_t)j->y.rows; row++) {
            const int64_t at = column * j->y.leading + row;
            double sum = 0;
            for (int64_t k = 0; k < (int64_t)j->a.rows; k++)
                sum += (double)element(j->at_a, &j->a, j->how.attribute[17], k, row) *
                       element(j->at_b, &j->b, j->how.attribute[18], k, column);
            float y = alpha * (float)sum + (beta != 0 ? beta * value(j->at_y, j->y.type, at) : 0);
            if (j->how.attribute[7] == 4)
                y += value(bias, j->y.type, row);
            if (j->y.type == F32)
                ((float *)j->at_y)[at] = y;
            else
                ((uint16_t *)j->at_y)[at] = j->y.type == F16 ? nib_f16_from_f32(y) : nib_bf16_from_f32(y);
        }
}

int cublasLtMatmul(void *handle, struct description *how, const void *alpha, const void *a, struct layout *a_layout,
                   const void *b, struct layout *b_layout, const void *beta, const void *c, struct layout *c_layout,
                   void *d, struct layout *d_layout, const uint64_t *algorithm, void *workspace, size_t bytes,
                   cudaStream_t stream)
{
    (void)handle, (void)algorithm, (void)c_layout;
    if (fails())
        return EXECUTION_FAILED;
    if (c != d || !workspace || check(how, a_layout, b_layout, d_layout))
        return INVALID_VALUE;
    memset(workspace, 0xA5, bytes < 4096 ? bytes : 4096); /* it is the product's own */
    shim_cublaslt_products++;
    shim_cublaslt_codes += a_layout->type == E2M1;
    const struct job job = { *how, *a_layout, *b_layout, *d_layout, alpha, beta, a, b, d };
    return shim_enqueue(stream, run, &job, sizeof job) ? 14 : OK;
}

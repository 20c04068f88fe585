/* SPDX-License-Identifier: Apache-2.0 */
/*
 * read.h - weights of every checkpoint format read alike (read.c).
 */
#ifndef NIB_READ_H
#define NIB_READ_H

#include "model/weights.h"

/* Rows of a weight as values; out is [count, cols], contiguous. Threads may call it at once. Memory: see below. */
nib_status nib_ck_read_rows(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                            nib_dtype dtype, void *out);
/* Bytes that read_rows needs besides its output for `count` rows. */
size_t nib_ck_read_overhead(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t count, nib_dtype dtype);
/* The dtype in which read_rows loses nothing: its own for plain weights, F32 otherwise. */
nib_dtype nib_ck_exact_dtype(const struct nib_ck_weight *w);
nib_status nib_ck_read_codes(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales);
/* The value per tensor, and that of activations (*has_input 0 without): finite or not, as the file has them. */
nib_status nib_ck_read_tensor_scale(const nib_checkpoint *c, const struct nib_ck_weight *w, nib_tensor_scale *kind,
                                    float *tensor_scale);
nib_status nib_ck_read_input(const nib_checkpoint *c, const struct nib_ck_weight *w, int *has_input, float *scale);
/* Codes and scales, as read_codes gives them, to values. */
nib_status nib_ck_decode(const struct nib_ck_weight *w, float tensor_scale, const uint8_t *codes, const uint8_t *scales,
                         int64_t rows, nib_dtype dtype, void *out);
/* MXFP4: codes [count, K/2] in the same order, and E8M0 scales [count, K/32]. */
nib_status nib_ck_read_mxfp4(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                             uint8_t *codes, uint8_t *scales);
/* Rows whose data and scratch fit in `bytes`, at least 1, at most w->rows; a multiple of 16 where more than 16. */
int64_t nib_ck_rows_for(const nib_checkpoint *c, const struct nib_ck_weight *w, nib_dtype dtype, uint64_t bytes);

/* For the table of formats: codes [N, K/2] beside their scales, GGUF blocks; values of each kind. */
nib_ck_codes_fn nib_ck_linear_codes, nib_ck_gguf_codes;
nib_ck_rows_fn nib_ck_plain_rows, nib_ck_nvfp4_rows, nib_ck_mxfp4_rows, nib_ck_fp8_rows, nib_ck_ggml_rows;

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.h - the weights of an opened checkpoint: which tensors hold each, and where in them (find.c).
 */
#ifndef NIB_WEIGHTS_H
#define NIB_WEIGHTS_H

#include "io/checkpoint.h"
#include "model/formats.h"

struct nib_ck_weight {
    const char *name;
    nib_checkpoint_format format;
    const struct nib_ck_layout *layout; /* of the format: how its tensors are laid out */
    nib_dtype dtype;                    /* as nib_weight.dtype */
    int64_t rows, cols;
    uint32_t tensor[NIB_ROLE_COUNT]; /* NIB_NONE for absent ones */
    /* Where the matrix lies in its tensors. Row r is row (row_first + r * row_step) of matrix `index`; in a transposed
     * tensor rows run down the columns: [E, K, N] instead of [E, N, K], and codes are then packed along K too. */
    int64_t index; /* in a stack of experts; -1: the tensor is the matrix */
    int64_t row_first, row_step;
    bool transposed;
    /* Where not 0, rows are asked for in another order than they lie: of so many the first half and the second alternate,
     * which is how llama.cpp wants the heads of some families. */
    int64_t head_rows;
    /* Where not NULL, values are read as f32(f32(x / divisors[row]) * columns[column]): see model/folds.h. */
    const float *columns, *divisors;
    nib_tensor_scale tensor_scale; /* NVFP4: what the value per tensor means */
    int32_t e4m3_max;              /* NIB_TENSOR_SCALE_AMAX: what belongs to it; 0 for 448 */
};

/* Values of the whole model, as nib_checkpoint_facts has them. */
uint64_t nib_ck_elements(const nib_checkpoint *c);
/* The row that lies where row r of a weight is read from, if its heads are taken as they lie. */
static inline int64_t nib_ck_source_row(const struct nib_ck_weight *w, int64_t r)
{
    const int64_t in_head = w->head_rows ? r % w->head_rows : 0;
    return w->head_rows ? r - in_head + in_head % 2 * (w->head_rows / 2) + in_head / 2 : r;
}

/* The dtype that values have where a weight's own format does not say: by config.json, BF16 where it says nothing; and
 * before that by provenance, which notes what a quantized source had otherwise. */
nib_dtype nib_ck_config_dtype(const nib_checkpoint *c);
nib_dtype nib_ck_nominal_dtype(const nib_checkpoint *c);

/* Rows of the matrix in its tensor that a weight is part of: all of one expert's, in a stack. */
int64_t nib_ck_matrix_rows(const nib_checkpoint *c, const struct nib_ck_weight *w);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_variants.h - NVFP4 tensors of every kind there is, and what must hold for each.
 */
#ifndef NIB_TEST_VARIANTS_H
#define NIB_TEST_VARIANTS_H

#include "test_tensors.h"

static inline nib_quantizer quantizer_of(const nib_tensor *t) { return *metadata_of(t).quantizer; }

static inline nib_quantizer square(int rowwise, int columnwise)
{
    nib_quantizer q = usages(rowwise, columnwise);
    q.block_dims[0] = 16;
    return q;
}

/* All values as [M, K], from one usage. */
static inline float *values_of(const nib_tensor *t, nib_usage from)
{
    const nib_metadata m = metadata_of(t);
    float *y = malloc((size_t)(m.rows * m.cols + 1) * sizeof *y);
    const nib_array out = array_of(y, NIB_F32, DIMS(m.rows, m.cols));
    CHECK_OK(nib_dequantize_rows(t, from, 0, m.rows, &out));
    return y;
}

/* Every scale that stands for no block is 0. */
static inline void check_padding(const nib_tensor *t)
{
    const nib_metadata m = metadata_of(t);
    for (int usage = 0; usage < 2; usage++) {
        const uint8_t *scales = bytes_of(t, usage ? NIB_COL_SCALE : NIB_ROW_SCALE);
        if (!(usage ? m.columnwise : m.rowwise))
            continue;
        const int64_t lines = usage ? m.cols : m.rows, blocks = ((usage ? m.rows : m.cols) + 15) / 16;
        const int64_t stride = round_up(blocks, 4);
        for (int64_t line = 0; line < round_up(lines, 128); line++)
            for (int64_t block = line < lines ? blocks : 0; block < stride; block++)
                if (scales[scale_place(line, block, stride, m.quantizer->swizzled)]) {
                    CHECK_THAT(false, "copy %d: padding at (%d, %d) is not 0", usage, (int)line, (int)block);
                    return;
                }
    }
}

/* The kinds of tensors that there are. Those with an RHT need whole blocks. */
enum { VARIANTS = 21 };

static inline const char *variant(int i, nib_quantizer *q)
{
    static const char *const names[VARIANTS] = {
        "both",         "rowwise",    "columnwise", "16x16",       "16x16 rowwise", "16x16 columnwise", "swizzled",
        "16x16 tiled",  "row-scaled", "rs rowwise", "rs swizzled", "rht",           "rht both",         "exact",
        "power of two", "4over6",     "gist",       "torchao",     "compressed-t.", "stochastic",       "16x16 unbiased"
    };
    const bool rowwise = i != 2 && i != 5, columnwise = i != 1 && i != 4 && i != 9;
    *q = usages(rowwise, columnwise);
    q->block_dims[0] = i == 3 || i == 4 || i == 5 || i == 7 || i == 20 ? 16 : 1;
    q->swizzled = i == 6 || i == 7 || i == 10;
    q->row_scaled = i == 8 || i == 9 || i == 10;
    q->rht = i == 11 || i == 12;
    q->rht_rowwise = i == 12;
    q->tensor_scale_rule = i == 13   ? NIB_TENSOR_SCALE_RULE_EXACT
                           : i == 14 ? NIB_TENSOR_SCALE_RULE_POW2
                                     : NIB_TENSOR_SCALE_RULE_DIALECT;
    if (i == 15)
        q->scale_rule = NIB_SCALE_4OVER6, q->e4m3_max = 256;
    q->dialect = i == 16   ? NIB_DIALECT_GIST
                 : i == 17 ? NIB_DIALECT_TORCHAO
                 : i == 18 ? NIB_DIALECT_COMPRESSED_TENSORS
                           : NIB_DIALECT_TE;
    q->rounding = i == 19 ? NIB_ROUND_STOCHASTIC_24 : i == 20 ? NIB_ROUND_STOCHASTIC_UNBIASED : NIB_ROUND_NEAREST;
    q->seed = 77;
    return names[i];
}

static inline bool whole_blocks_only(const nib_quantizer *q) { return q->rht || q->rht_rowwise; }

#endif

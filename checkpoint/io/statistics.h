/* SPDX-License-Identifier: Apache-2.0 */
/*
 * statistics.h - mean squares of the inputs of weights, from files of three forms, told apart by how they begin:
 *
 *     imatrix, GGUF    for each weight T: T.in_sum2 F32 [E, K], sums of x^2, and T.counts F32 [E, 1], tokens
 *     imatrix, legacy  i32 n; n times { i32 bytes; name; i32 calls; i32 values; F32[values] }; then what nobody needs.
 *                      Values are means times `calls`; E experts lie one behind the other, and one without tokens is
 *                      all ones
 *     nib-stats-1      safetensors; for each input P: P.sum2 F32 [E, K], P.count I64 [E], and P.amaxk F32 [E, K] if
 *                      known; `inputs` of the metadata, JSON, maps modules to P
 *
 * A file is read and checked whole when it is opened (no value may be NaN, infinite or negative), in memory that grows
 * with the number of names; values are read again when they are asked for.
 */
#ifndef NIB_STATISTICS_H
#define NIB_STATISTICS_H

#include "base/base.h"

struct nib_statistics;

/* DATA for a file that breaks its form, with its name, the tensor and the fact. */
nib_status nib_statistics_open(const char *path, struct nib_statistics **out);
void nib_statistics_close(struct nib_statistics *s);
const char *nib_statistics_path(const struct nib_statistics *s);
/* XXH3-128 of the file, as provenance has it. */
const char *nib_statistics_hash(const struct nib_statistics *s);
/* Whether names are llama.cpp's ("blk.0.attn_q"); otherwise they are the checkpoint's modules. */
bool nib_statistics_of_gguf(const struct nib_statistics *s);
/* Whether it says how many tokens a slice was taken over; a legacy file has a number of calls that all share. */
bool nib_statistics_counts_tokens(const struct nib_statistics *s);

/* The statistics of one input. A legacy file does not say how many experts there are: `values` is E * K. */
struct nib_statistic {
    const char *name; /* without ".weight" */
    int64_t values;   /* of all slices */
    int64_t slices;   /* experts; 0: not known */
};
size_t nib_statistics_count(const struct nib_statistics *s);
struct nib_statistic nib_statistics_at(const struct nib_statistics *s, size_t index); /* in the order of names */
/* The first entry with the same values: modules with one input, or all experts, may have an entry each. */
size_t nib_statistics_same(const struct nib_statistics *s, size_t index);
/* nib's own form: what an entry's input is called in the file; NULL otherwise. */
const char *nib_statistics_input(const struct nib_statistics *s, size_t index);
bool nib_statistics_find(const struct nib_statistics *s, const char *name, size_t *index);

/* The mean squares of slice `slice` of `slices`, of `cols` channels each, which multiply to `values`. *tokens is what
 * they were taken over (a legacy file: calls); 0: there is no data, and out is not written. */
nib_status nib_statistics_read(const struct nib_statistics *s, size_t index, int64_t slices, int64_t slice,
                               int64_t cols, float *out, double *tokens);
/* The largest magnitude of each channel, likewise; *found is false where the file has none. */
nib_status nib_statistics_read_amaxes(const struct nib_statistics *s, size_t index, int64_t slices, int64_t slice,
                                      int64_t cols, float *out, bool *found);

#endif

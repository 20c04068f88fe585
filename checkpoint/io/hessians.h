/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hessians.h - means of x x^T of the inputs of weights, as nib.calibrate writes them: in a file of statistics
 * (nib-stats-1), or in a directory with a file for each layer, stats-of-layer-NNNNN.safetensors. For each input P:
 *
 *     P.hessian        F32 [K (K + 1) / 2]: the rows of the upper triangle
 *     P.hessian_count  I64 [1]: the tokens, if known
 *
 * Headers are read when they are opened, and every value once, for a hash and to see that it is finite; then one Hessian
 * at a time.
 */
#ifndef NIB_HESSIANS_H
#define NIB_HESSIANS_H

#include "base/base.h"

struct nib_hessians;

/* `directory` may be NULL, and `statistics` be of another form, which has none. DATA for a file that breaks its form, for
 * an input that is there twice, and for files that say that they are of other tokens than the statistics. */
nib_status nib_hessians_open(const char *statistics, const char *directory, struct nib_hessians **out);
void nib_hessians_close(struct nib_hessians *h);
const char *nib_hessians_hash(const struct nib_hessians *h); /* XXH3-128 of names, counts and values */

struct nib_hessian {
    const char *name, *path; /* of the input; of the file */
    int64_t cols;
    int64_t tokens; /* below 0: not known */
};
size_t nib_hessians_count(const struct nib_hessians *h);
struct nib_hessian nib_hessians_at(const struct nib_hessians *h, size_t index); /* in the order of names */
bool nib_hessians_find(const struct nib_hessians *h, const char *name, size_t *index);

/* All values: K (K + 1) / 2. */
nib_status nib_hessians_read(const struct nib_hessians *h, size_t index, float *out);

#endif

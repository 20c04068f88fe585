/* SPDX-License-Identifier: Apache-2.0 */
/*
 * folds.h - scales of channels that move from a weight's columns into what makes its input: which norm feeds which
 * weights, by family, and the scales that a folded checkpoint keeps beside its tensors (folds.c).
 *
 *     y = W x = (W diag(s)) (diag(1/s) x)
 */
#ifndef NIB_FOLDS_H
#define NIB_FOLDS_H

#include "model/weights.h"

/* The file of a directory that has them. No loader looks at it: it is not called a file of tensors. */
#define NIB_FOLD_FILE "nib-fold.scales"

/* ---- Who reads what ---- */

struct nib_fold_family {
    const char *model_type;
    const char *norms[2]; /* of a layer, before attention and before the feed-forward part; the same: one for both */
    bool plus_one;        /* they multiply with 1 + weight */
    bool no_up;           /* what up gives is clamped or shifted before it goes to down */
};
const struct nib_fold_family *nib_ck_fold_family(const nib_checkpoint *c); /* NULL: not known */

enum nib_fold_input {
    NIB_READS_ATTENTION_NORM = 0, /* index in norms */
    NIB_READS_FEED_FORWARD_NORM,
    NIB_READS_OTHER,  /* what its own part of the layer makes */
    NIB_READS_UNKNOWN /* it may read anything */
};
/* What a module of a layer reads; *layer_bytes is the length of "model.layers.3" in its name, 0 outside of layers. */
enum nib_fold_input nib_ck_fold_reads(const nib_checkpoint *c, const char *module, size_t *layer_bytes);

/* The module whose rows are the columns of `down`: "mlp.up_proj", or "mlp.gate_up_proj" and *half, where they are its second
 * half. false: not known, or no gate stands beside it. */
bool nib_ck_fold_producer(const nib_checkpoint *c, const char *down, size_t *weight, bool *half);

/* ---- What was folded ---- */

struct nib_ck_fold {
    const float *columns, *rows; /* NULL: not folded */
    const float *inverse_columns, *inverse_rows;
};
/* The scales of a folded directory, read and checked into c->folds. */
nib_status nib_ck_read_folds(nib_checkpoint *c);
/* So that two weights can be compared, the first is read as the second was folded. Both are copies. */
void nib_ck_fold_alike(const nib_checkpoint *a, struct nib_ck_weight *wa, const nib_checkpoint *b,
                       const struct nib_ck_weight *wb);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor.h - what a nib_tensor is inside.
 */
#ifndef NIB_TENSOR_H
#define NIB_TENSOR_H

#include "tensor/quantize.h"

struct nib_tensor {
    nib_quantizer q; /* says what the bytes mean; its amax_comm is NULL */
    nib_dtype dtype; /* nominal */
    int rank;
    int64_t shape[NIB_MAX_RANK];
    struct nib_geometry geometry;
    nib_device *device;                /* of its buffers, also while it has none; NULL: the default host */
    nib_buffer *parts[NIB_PART_COUNT]; /* those of a usage are there together, or none */
    bool columnwise_stale;             /* the rowwise bytes were changed from outside */
};

enum { NIB_PART_KINDS = 3 }; /* data, scales, tensor scales: nib_part_of */

bool nib_tensor_has(const nib_tensor *t, nib_usage usage);
nib_buffer *nib_tensor_kind(const nib_tensor *t, nib_usage usage, int kind);

/* "rowwise" and "columnwise", for messages. */
const char *nib_usage_name(nib_usage usage);

/* Resolves NIB_EITHER; USAGE when the usage is not there. */
nib_status nib_tensor_pick(const nib_tensor *t, nib_usage wanted, nib_usage *out);

struct nib_usage_memory nib_tensor_memory(const nib_tensor *t, nib_usage usage);
size_t nib_part_bytes(const struct nib_geometry *geometry, nib_part part);

/* What a tensor scale of this tensor means, and the other constants of decoding. */
struct nib_rules nib_tensor_rules(const nib_tensor *t);

/* Whether bytes written under one quantizer decode the same under the other. */
bool nib_same_meaning(const nib_quantizer *a, const nib_quantizer *b);

/* A tensor without buffers; q is loaded. */
nib_status nib_tensor_new(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape, nib_device *device,
                          nib_tensor **out);

/* New zeroed buffers for the usages that are wanted and not there. On failure those it made are released again. */
nib_status nib_tensor_allocate(nib_tensor *t, bool rowwise, bool columnwise);
void nib_tensor_drop(nib_tensor *t, nib_usage usage);

/* Parts of usages that a view shares while other parts are about to be replaced: an update in place would leave the view
 * with half of it. unshare copies them into `own`, but for those that have something there already; on failure it
 * releases all of `own`, and the tensor is as before. place puts `own` into the tensor, which cannot fail. */
nib_status nib_tensor_unshare(const nib_tensor *t, bool rowwise, bool columnwise, nib_buffer *own[NIB_PART_COUNT]);
void nib_tensor_place(nib_tensor *t, nib_buffer *const own[NIB_PART_COUNT]);

/* The rule of nib_mxfp4_to_nvfp4 for a weight that is converted in parts (convert.c): the tensor scale, a multiplier,
 * for the largest scale of a block that is not all zeros (0: there is none), and blocks of 32 under it. No NaNs. */
NIB_PRIVATE float nib_mxfp4_decode_scale(float largest);
NIB_PRIVATE void nib_mxfp4_to_nvfp4_blocks(const uint8_t *codes, const uint8_t *scales, int64_t blocks, float g,
                                           uint8_t *out_codes, uint8_t *out_scales);

#endif

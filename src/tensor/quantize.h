/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.h - from plain arrays to codes and back: what a quantizer accepts (quantizer.c), and how the host does it:
 * amaxes and tensor scales (amax.c), then codes (encode.c), and values again (decode.c).
 */
#ifndef NIB_QUANTIZE_H
#define NIB_QUANTIZE_H

#include "base/threads.h"
#include "format/format.h"
#include "kernels/kernels.h"

/* ---- The quantizer ---- */

/* The first version that is still served: 0.2. */
#define NIB_QUANTIZER_OLDEST NIB_UP_TO(nib_quantizer, amax_epsilon)

/* Reads a caller's options of any version, checks them alone (nib_quantizer_check with x NULL) and normalizes flags. */
nib_status nib_quantizer_load(const nib_quantizer *in, nib_quantizer *out);

/* Whether an input of this dtype and shape is accepted; q is loaded. Gives its geometry. */
nib_status nib_check_input(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                           struct nib_geometry *out);

/* The communicator of options that were not checked; NULL where it cannot be used. */
const nib_comm *nib_amax_comm_of(const nib_quantizer *q);

static inline bool nib_wants(const nib_quantizer *q, int usage)
{
    return usage == NIB_ROWWISE ? q->rowwise : q->columnwise;
}

static inline bool nib_usage_has_rht(const nib_quantizer *q, nib_usage usage)
{
    return usage == NIB_ROWWISE ? q->rht_rowwise : q->rht;
}

/* ---- On the host ---- */

/* Amaxes, tensor scales, then codes and scales of the usages that q wants. x, q and overrides (or NULL) are checked,
 * memory[] is allocated. When this fails (a communicator, or memory for vectors of amaxes) nothing was written. */
nib_status nib_quantize_usages(const nib_device *host, const nib_quantizer *q, const nib_array *x,
                               const nib_overrides *overrides, const struct nib_geometry *geometry,
                               const struct nib_usage_memory memory[2]);

/* The rowwise usage alone, as files keep it: lines of scales without padding. x is an array of the host, overrides are
 * checked, and the tensor scale, or those of the rows, come with codes and scales. */
NIB_PRIVATE nib_status nib_quantize_lines(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                                          const struct nib_usage_memory *memory);

/* The options and the geometry of that. */
nib_status nib_lines_geometry(const nib_quantizer *q, const nib_array *x, nib_quantizer *lines,
                              struct nib_geometry *geometry);

/* Rows first..first+count-1 of the matrix from one usage to `out`, whose leading dims have `count` rows in all. */
void nib_dequantize_usage(const nib_device *host, const nib_quantizer *q, const struct nib_geometry *geometry,
                          nib_usage from, const struct nib_usage_memory *memory, int64_t first, int64_t count,
                          const nib_array *out);

/* How a usage is coded, for an input of this dtype. */
NIB_PRIVATE struct nib_coding nib_coding_of(const nib_quantizer *q, nib_usage usage, nib_dtype input);

/* The tensor scale that follows from an amax; *scale is the multiplier whose inverse it is, where the dialect has one. */
NIB_PRIVATE float nib_tensor_scale_from_amax(const nib_quantizer *q, const struct nib_coding *coding, float amax,
                                             float *scale);

/* The first pass of nib_quantize_usages: the tensor scales, and the multiplier for the whole where there is one. */
struct matrix;
nib_status nib_compute_tensor_scales(const nib_device *host, const nib_quantizer *q, const struct matrix *m,
                                     const nib_overrides *overrides, const struct nib_geometry *geometry,
                                     const struct nib_coding coding[2], const struct nib_usage_memory memory[2],
                                     float *scale);

/* The amaxes of the usages that q wants, not reduced, side by side: one value each, or one per line. The format has
 * tensor scales. */
void nib_find_amaxes(const nib_device *host, const nib_quantizer *q, const nib_array *x,
                     const struct nib_geometry *geometry, float *amax);

/* Raise a maximum that several threads share: the bits of floats that are not negative are in the order of the floats. */
void nib_raise_to(_Atomic uint32_t *whole, float value);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.h - from plain arrays to codes and back: options, amaxes, tensor scales, panels, threads.
 */
#ifndef NIB_QUANTIZE_H
#define NIB_QUANTIZE_H

#include "format/format.h"
#include "kernels/kernels.h"

/* Where one usage of a tensor lies. codes NULL: the copy is absent. */
struct nib_usage_memory {
    uint8_t *codes;
    void *scales;
    float *tensor_scales;
};

/* Takes a caller's options of any version, checks them alone (nib_quantizer_check with x NULL) and normalizes flags. */
nib_status nib_quantizer_load(const nib_quantizer *in, nib_quantizer *out);

/* Whether an input of this dtype and shape is taken; q is loaded. Gives its geometry. */
nib_status nib_check_input(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                           struct nib_geometry *out);

/* Amaxes, tensor scales, then codes and scales of the usages that q wants. x and q are checked, memory[] is in place. When
 * this fails (a communicator, or memory for vectors of amaxes that the caller did not bring) nothing was written. */
nib_status nib_quantize_usages(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                               const struct nib_geometry *geometry, const struct nib_usage_memory memory[2]);

/* How a copy is coded, for an input of this dtype. */
struct nib_coding nib_coding_of(const nib_quantizer *q, nib_usage usage, nib_dtype input);

/* The tensor scale that an amax comes to; *encode is the multiplier whose inverse it is, where the dialect has one. */
float nib_tensor_scale_from_amax(const nib_quantizer *q, const struct nib_coding *coding, float amax, float *encode);

/* The amaxes of the usages that q wants, not reduced, side by side: one number each, or one per line. The format has
 * tensor scales. */
void nib_find_amaxes(const nib_quantizer *q, const nib_array *x, const struct nib_geometry *geometry, float *amax);

/* Scales that stand for no block are 0, whatever the buffer held. Swizzled: all of them. */
void nib_zero_scale_padding(const struct nib_usage_geometry *g, void *scales);

/* The communicator of options that may be anything; NULL where it cannot be used. */
const nib_comm *nib_amax_comm_of(const nib_quantizer *q);

/* Raise a maximum that several threads share: the bits of a float that is not negative order as the floats do. */
void nib_raise_to(_Atomic uint32_t *whole, float value);

/* Rows first..first+count-1 of the matrix from one usage to `out`, whose leading dims have `count` rows in all. */
void nib_dequantize_usage(const nib_quantizer *q, const struct nib_geometry *geometry, nib_usage from,
                          const struct nib_usage_memory *memory, int64_t first, int64_t count, const nib_array *out);

/* Whether a copy of this quantizer is transformed. */
static inline bool nib_usage_has_rht(const nib_quantizer *q, nib_usage usage)
{
    return usage == NIB_ROWWISE ? q->rht_rowwise : q->rht;
}

/* Call body(context, i) for i in 0..n-1 on so many threads, each in the arithmetic that the specification wants. Items
 * must not write the same bytes, so that neither order nor count matters. */
NIB_PRIVATE void nib_parallel(int64_t n, int threads, void (*body)(void *context, int64_t i), void *context);

/* Fewer elements than this are not worth a thread of their own. Measured by bench/threads.sh (Zen 4, libgomp): a team
 * of workers that still wait for work costs 2 us, and one that has gone to sleep 20 to 30 us. An element takes 0.06 ns
 * (decoding) to 0.2 ns (rows to nearest) in the cache, so that 2^16 of them are 4 to 13 us. At two threads of so many
 * each, decoding is 1.5 and quantizing 1.6 times as fast as one thread if the workers are awake, as they are where one
 * call follows another. Sleepers pay from 2^18 elements (quantizing) and 2^19 (decoding) each on. */
#ifndef NIB_ELEMENTS_PER_THREAD
#define NIB_ELEMENTS_PER_THREAD (1 << 16)
#endif

/* How many threads pay for so many elements. */
int nib_thread_count(const nib_quantizer *q, int64_t elements);

#endif

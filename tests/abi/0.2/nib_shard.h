/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_shard.h - tensors over ranks: communicators, sharded casts of master weights, gathers, groups of experts, and the
 * helpers by Megatron's names.
 *
 * Casts and their steps, the nib_all_gather_ calls and groups run on the host only (UNSUPPORTED elsewhere).
 */
#ifndef NIB_SHARD_API_H
#define NIB_SHARD_API_H

#include "nib.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Communicators ------------------------------------------------------------------------------------ */

/* What ranks that share a tensor must be able to do together. Every rank makes the same calls in the same order. A
 * function returns NIB_OK or a status, the same on every rank. A reduction of amaxes alone (nib_quantizer.amax_comm)
 * needs only the first function, and calls `agree` before it where there is one: without it a rank that fails before
 * the reduction leaves the others waiting. */
struct nib_comm {
    size_t bytes;
    void *context;
    int rank, size;
    /* In place, elementwise, the same n on all ranks; values may be negative, but there are no NaNs. */
    nib_status (*allreduce_max_f32)(void *context, float *values, size_t n);
    /* The largest of all ranks' statuses; NIB_ERR_MISMATCH if all are NIB_OK and the keys are not equal. */
    nib_status (*agree)(void *context, nib_status status, uint64_t key);
    /* counts[r] bytes of every rank r, side by side into `all`, which does not overlap `mine`. counts is the same on all
     * ranks. */
    nib_status (*allgather)(void *context, const void *mine, void *all, const size_t *counts);
    /* Returns when all ranks have called it. */
    nib_status (*barrier)(void *context);
};

/* One rank alone. */
NIB_API const nib_comm *nib_comm_serial(void);

/* Ranks that are threads of this process: out[0..size-1] become their communicators, and thread r uses only out[r].
 * Calls that do not match (another function, another length) are NIB_ERR_COMM on every rank. A rank that never calls is
 * waited for for ever. destroy, when no thread is in a call, takes any one of them, and all are gone. */
NIB_API nib_status nib_comm_threads_create(int size, nib_comm **out);
NIB_API void nib_comm_threads_destroy(nib_comm *comm);

/* ---- Sharding ------------------------------------------------------------------------------------------ */

/* Training keeps master weights in FP32, cut into shards that ranks own, and casts every shard into its place in the
 * quantized parameter. A shard is a range of elements of the flattened parameter. The result of all ranks together has
 * the bytes of a quantization of the whole, wherever it is cut: scales come from amaxes that were reduced over the ranks,
 * codes are written one by one beside those of neighbors, and random numbers depend on an element's place in the whole.
 *
 * A cast supports NVFP4 with 16x16 or 1x16 blocks and every other format, and rejects (MODE, USAGE): a rowwise RHT, under
 * which the amax of a block takes all of the block; swizzled scales; and a columnwise usage with 1xB blocks, which cannot
 * be built from rowwise codes (MXFP8 casts both usages). A master is F32 or BF16, of rank 1, and is rounded to the
 * parameter's nominal dtype first, so that the result is that of the parameter in its dtype. With four-over-six and 16x16
 * blocks the columnwise usage, built from rowwise codes, is their transpose; one that was quantized by itself may have
 * chosen otherwise where two errors nearly tie. */

/* What not every sharded cast needs. Each list is NULL or has one entry per parameter, which may be NULL. */
typedef struct nib_master_options {
    size_t bytes;
    /* Keep columnwise buffers where they are, marked invalid, instead of dropping them. */
    uint8_t manual_post_all_gather;
    /* FSDP: where the codes go instead of into the parameter. U8, contiguous, of exactly the bytes that
     * nib_tensor_byte_range gives for the shard. Scales and tensor scales still go to the parameter. Columnwise only for
     * formats that cast both usages. */
    const nib_array *const *row_shards, *const *col_shards;
    const float *const *scales; /* Float8, delayed scaling: multiplies the data; an entry NULL: current scaling */
    float *const *amax_seen;    /* raised to the parameter's reduced amax */
} nib_master_options;

/* Cast shards of master weights into parameters. params[i] gets masters[i] from element starts[i] on; a rank that
 * owns nothing of it passes NULL and -1. Every rank passes all parameters in the same order (MISMATCH otherwise), each
 * once. There are two collectives, however many parameters: agreement, and one reduction of every parameter's block
 * amaxes, 4 bytes per block. Every rank then has all scales and tensor scales, and the codes of its shards; columnwise
 * usages are dropped or (manual) invalid until nib_post_all_gather_processing. Everything is checked on all ranks
 * before anything changes: if one fails, all return the largest status and none has changed.
 *
 * Four-over-six and sweep choose a scale from all values of a block. With such parameters in the list there are three
 * more collectives: a gather of where the shards lie, agreement, and one gather of a byte per block and of the values, in
 * the nominal dtype, of blocks that a cut divides: 16 elements per cut with 1x16 blocks, 16 rows with 16x16. (It becomes
 * several where it would move more than 16 MiB at once.)
 *
 * Shards must cover each parameter once. A block of which no rank has an element is SHAPE: its codes would stay as they
 * were. With four-over-six and sweep every gap and every overlap is SHAPE; with other rules, finding smaller gaps and
 * overlaps would take another collective, and nib_all_gather_param finds them. */
NIB_API nib_status nib_quantize_master_weights(nib_tensor *const *params, size_t n_params,
                                               const nib_array *const *masters, size_t n_masters, const int64_t *starts,
                                               size_t n_starts, const nib_comm *comm,
                                               const nib_master_options *options);

/* The same by Megatron's name, for NVFP4 only (MODE otherwise), always manual. row_shards may be NULL. */
NIB_API nib_status nib_quantize_nvfp4_param_shard(nib_tensor *const *params, size_t n_params,
                                                  const nib_array *const *masters, size_t n_masters,
                                                  const int64_t *starts, size_t n_starts, const nib_comm *comm,
                                                  const nib_array *const *row_shards);

/* After the codes were gathered: build every columnwise usage that is wanted or invalid from the rowwise one, on the
 * device of each. Nothing happens to formats that cast both usages. All are checked first; if memory runs out, the
 * parameters before are done. */
NIB_API nib_status nib_post_all_gather_processing(nib_tensor *const *params, size_t n);

/* The steps of a cast, for callers with a reduction of their own. The grid has one amax per scale: [ceil(M/16),
 * ceil(K/16)] with 16x16 blocks, [M, ceil(K/16)] with 1x16 (columnwise: M and K exchanged), [1, 1] for Float8. */
NIB_API nib_status nib_amax_grid(const nib_tensor *t, nib_usage usage, int64_t *rows, int64_t *cols);
/* The grid of a shard; blocks of which it has nothing are 0. The maximum over all shards is the grid of the whole. */
NIB_API nib_status nib_partial_amax(const nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start,
                                    float *amaxes);
/* Tensor scale and scales of a usage from the grid of the whole: written to all rows that share them, padding zero. MODE
 * for four-over-six and sweep, whose scales do not follow from amaxes alone. */
NIB_API nib_status nib_block_scales(nib_tensor *t, nib_usage usage, const float *amaxes);
/* The smallest range around elements start..start+length-1 that consists of whole blocks: blocks of 16 in a row with
 * 1x16, whole bands of 16 rows with 16x16. */
NIB_API nib_status nib_whole_blocks(const nib_tensor *t, nib_usage usage, int64_t start, int64_t length, int64_t *first,
                                    int64_t *count);
/* Four-over-six and sweep: the scale codes of the whole blocks (as nib_whole_blocks has them) of a shard, 0 for the
 * others; as a grid like the amaxes, which are those of the whole. So that every block is whole in some shard, the caller
 * brings the elements of divided blocks together first: a shard may hold elements of neighbors. The maximum over all
 * shards is the grid of the whole. */
NIB_API nib_status nib_partial_scales(const nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start,
                                      const float *amaxes, uint8_t *scales);
/* nib_block_scales with scales that were chosen so. */
NIB_API nib_status nib_chosen_scales(nib_tensor *t, nib_usage usage, const float *amaxes, const uint8_t *scales);
/* The codes of a shard, after nib_block_scales (or nib_chosen_scales) with the same grid; into `shard` (as in
 * nib_master_options) or, where that is NULL, the tensor. */
NIB_API nib_status nib_partial_cast(nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start,
                                    const float *amaxes, const nib_array *shard);
/* The bytes of a usage's codes that hold elements start..start+length-1. A shared byte also holds an element outside of
 * them. */
typedef struct nib_byte_range {
    int64_t first, count;
    int first_shared, last_shared; /* with an element before start; with one after the last */
} nib_byte_range;
NIB_API nib_status nib_tensor_byte_range(const nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                         nib_byte_range *out);

/* A buffer of parameters that exists twice: as `elements` values for gradients, and as `packed_bytes` bytes of codes.
 * Each rank owns an equal share of either. MISMATCH where the shares are not the same elements: 2 * packed_bytes !=
 * elements, or shares that are not whole bytes; gathering such shares would mix them up. */
NIB_API nib_status nib_param_buffer_range(int64_t elements, int64_t packed_bytes, int rank, int size,
                                          int64_t *first_element, int64_t *element_count, int64_t *first_byte,
                                          int64_t *byte_count);

/* ---- Gathers ---- */

/* Gather the codes of a parameter: this rank has elements start..start+length-1, in `shard` (as in
 * nib_master_options) or, where that is NULL, in the tensor; afterwards the tensor has all. Shards may lie in any order
 * and be empty, but must cover every element once (SHAPE). A byte that two ranks share is put together from both.
 * COLUMNWISE only for formats that cast both usages. */
NIB_API nib_status nib_all_gather_param(nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                        const nib_array *shard, const nib_comm *comm);
/* The same by whole bytes: SHAPE where ranks share a byte, which a gather of bytes would spoil. */
NIB_API nib_status nib_all_gather_param_bytes(nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                              const nib_array *shard, const nib_comm *comm);

/* Put the ranks' tensors one below the other: shapes may differ in the first dim only, which may be 0, and all have the
 * same usages. The result equals a quantization of the whole by the same amax. MISMATCH where tensor scales differ:
 * reduce the amax (nib_quantizer.amax_comm; row-scaled: only that of columns, by nib_overrides). SHAPE where a border
 * between ranks is not one between blocks (columnwise usages and square blocks). */
NIB_API nib_status nib_all_gather_tensor(const nib_tensor *t, const nib_comm *comm, nib_tensor **out);

/* FSDP: what a framework gathers by itself, on any device. extract gives views of the rowwise codes, and of the scales
 * without padding rows; tensor scales are not gathered, they must already be equal on all ranks. assign: `data` and
 * `scales` now hold the shards of all ranks, one below the other; `rows` is the sum of their rows, and `shard` the tensor
 * of this rank, whose options and shape apply. *out NULL: a new tensor; otherwise one of that shape, written in place.
 * The columnwise usage is built where the quantizer wants one. USAGE, SHAPE or UNSUPPORTED for what cannot be gathered
 * so: swizzled scales, one amax per row, scales that do not lie row by row, a columnwise usage of 1xB blocks, shards that
 * do not end with a block. extract waits for the device, to give the tensor scale. */
typedef struct nib_fsdp_parts {
    size_t bytes;
    nib_array data;   /* U8 [rows, bytes of a row] */
    nib_array scales; /* [rows, padded blocks of a row]; data NULL for Float8 */
    float tensor_scale;
} nib_fsdp_parts;
NIB_API nib_status nib_fsdp_extract(const nib_tensor *t, nib_fsdp_parts *out);
NIB_API nib_status nib_fsdp_assign(const nib_tensor *shard, const nib_fsdp_parts *parts, int64_t rows,
                                   nib_tensor **out);

/* ---- Groups (mixture of experts) ---- */

/* Quantize rows of a [sum of counts, K] array as n tensors of counts[i] rows, which may be 0. Each is what quantizing its
 * rows alone gives; in the random stream each starts at (0, 0). With amax_comm all amaxes are reduced at once, those of
 * member i with those of member i on the other ranks; where rows have amaxes of their own, all ranks have the same counts
 * (MISMATCH otherwise). */
NIB_API nib_status nib_split_quantize(const nib_quantizer *q, const nib_array *x, const int64_t *counts, size_t n,
                                      nib_tensor **out);

/* The amax of each of them, not reduced: amax[usage] has n values, or is NULL. Of transformed values where the usage has
 * an RHT. MODE where a tensor does not have one amax per usage. */
NIB_API nib_status nib_group_amax(const nib_quantizer *q, const nib_array *x, const int64_t *counts, size_t n,
                                  float *const amax[2]);

/* n tensors [rows[i], cols] of one kind in shared buffers. Each begins at a multiple of NIB_FP4_ALIGN_GRAPH rows, so
 * that no member's scales share padding with another's and grouped kernels can step from member to member. */
typedef struct nib_group nib_group;
NIB_API nib_status nib_group_create(const nib_quantizer *q, nib_dtype dtype, const int64_t *rows, size_t n,
                                    int64_t cols, nib_group **out);
NIB_API void nib_group_destroy(nib_group *group); /* members that were handed out stay valid */
NIB_API size_t nib_group_count(const nib_group *group);
/* Member i as a tensor that shares its place in the group; the caller destroys it. */
NIB_API nib_status nib_group_member(const nib_group *group, size_t i, nib_tensor **out);
/* A shared buffer, not retained (NULL when absent), and where member i begins in it, in bytes. Tensor scales lie side by
 * side. */
NIB_API nib_buffer *nib_group_buffer(const nib_group *group, nib_part part);
NIB_API nib_status nib_group_offset(const nib_group *group, nib_part part, size_t i, int64_t *offset);
/* nib_split_quantize into the members: x has as many rows as all of them, without gaps. amax_comm may be NULL. All
 * members are written or, where anything fails, none. */
NIB_API nib_status nib_group_quantize(nib_group *group, const nib_array *x, const nib_comm *amax_comm);

/* ---- FP4 helpers by Megatron's names ---- */

enum {
    NIB_FP4_ALIGN_TMA = 32,     /* elements: the 16 bytes that a tensor memory access moves at least */
    NIB_FP4_ALIGN_GROUPED = 64, /* rows that grouped RHT kernels work on at a time */
    NIB_FP4_ALIGN_GRAPH = 128   /* rows: no scale padding, so that group sizes may change within a CUDA graph */
};
NIB_API int nib_get_fp4_align_size(void); /* what to pad tokens of an expert to: the last, which serves all three */
NIB_API int nib_is_nvfp4tensor(const nib_tensor *t); /* 0 for NULL */
/* The last dim halved; rank 0 stays. SHAPE where it is odd: rows of odd length are padded one by one
 * (nib_part_shape). */
NIB_API nib_status nib_get_nvfp4_rowwise_packed_shape(int rank, const int64_t *shape, int64_t *out);
/* nib_tensor_rebind_rowwise for NVFP4 (MODE otherwise): copies the bytes, then uses the new buffer. */
NIB_API nib_status nib_modify_nvfp4_rowwise_storage(nib_tensor *t, nib_buffer *buffer);
/* nib_dequantize from either usage, for NVFP4 (MODE otherwise). */
NIB_API nib_status nib_dequantize_fp4_tensor(const nib_tensor *t, const nib_array *out);

#ifdef __cplusplus
}
#endif

#endif /* NIB_SHARD_API_H */

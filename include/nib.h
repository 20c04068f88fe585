/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib.h - NVFP4 tensors: quantize, keep, exchange, dequantize.
 *
 * An NVFP4 tensor holds 4-bit E2M1 codes, one E4M3 scale per block of 16 and one FP32 number per tensor
 * (or per row). docs/format.md draws the bits, docs/numerics.md says how every byte comes about. The other formats of
 * the same family (Float8, MXFP8, blockwise Float8, MXFP4) go through the same calls; docs/formats.md compares them.
 *
 * Five rules hold for everything below, so they are stated only here.
 *   Errors   A call that can fail returns nib_status. On failure its outputs are untouched and
 *            nib_last_error() has a message that names the fact. The library never prints, exits or aborts.
 *   Memory   create, quantize, clone, view, slice, open and their like give the caller an object; destroy,
 *            release and close take it back and accept NULL. Every other pointer is borrowed for the call.
 *   Threads  Different objects may be used at the same time; one object may be read by many threads, but
 *            not while a call changes it. Calls that change an object take it without const. A thread
 *            needs 256 KiB of stack (of an optimized library).
 *   Results  Bytes depend on neither the CPU, the thread count, the rounding mode, FTZ/DAZ nor the locale.
 *   Structs  A struct that begins with `bytes` grows in later versions: set it to sizeof, or use its _init.
 */
#ifndef NIB_H
#define NIB_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define NIB_API __attribute__((visibility("default")))
#else
#define NIB_API
#endif

/* ---- Version ------------------------------------------------------------------------------------------ */

#define NIB_VERSION_MAJOR 0
#define NIB_VERSION_MINOR 1
#define NIB_VERSION_PATCH 0
#define NIB_VERSION "0.1.0"

/* The version of the library that is running, as NIB_VERSION is of the header. */
NIB_API const char *nib_version(void);

/* The instruction set whose kernels run: "scalar", or a faster one. */
NIB_API const char *nib_isa(void);

/* ---- Errors ------------------------------------------------------------------------------------------- */

typedef enum nib_status {
    NIB_OK = 0,
    NIB_ERR_ARG,         /* a null pointer, or a value outside its documented range */
    NIB_ERR_SHAPE,       /* rank, dims, strides, or a cut that is not at a block border */
    NIB_ERR_DTYPE,       /* a dtype that the call does not take */
    NIB_ERR_MODE,        /* options that do not go together */
    NIB_ERR_USAGE,       /* the copy (rowwise, columnwise) that is needed is not there */
    NIB_ERR_MISMATCH,    /* two objects that must agree do not */
    NIB_ERR_MEMORY,      /* out of memory */
    NIB_ERR_COMM,        /* a communicator's function failed */
    NIB_ERR_IO,          /* the operating system rejected to read or write */
    NIB_ERR_DATA,        /* a file that breaks its format */
    NIB_ERR_UNSUPPORTED, /* well formed, but not something this build does */
    NIB_ERR_CANCELLED,   /* the caller's own function asked to stop */
    NIB_STATUS_COUNT
} nib_status;

typedef struct nib_error {
    nib_status status;
    char text[512];
} nib_error;

/* "NIB_ERR_SHAPE" and so on; never NULL. */
NIB_API const char *nib_status_name(nib_status status);

/* The message of this thread's last failed call; "" before any. Valid until the thread's next failure. */
NIB_API const char *nib_last_error(void);

/* The same with its status, copied to the caller. */
NIB_API void nib_get_error(nib_error *out);

/* For what is built around the library, communicators among it: set this thread's message, and return the status. It is
 * copied, and cut to what nib_error holds. Nothing happens for NIB_OK. */
NIB_API nib_status nib_set_error(nib_status status, const char *text);

/* ---- Plain data: dtypes and borrowed arrays ------------------------------------------------------------ */

/* The first eleven have TransformerEngine's numbers. */
typedef enum nib_dtype {
    NIB_U8 = 0,
    NIB_I16,
    NIB_I32,
    NIB_I64,
    NIB_F32,
    NIB_F16,
    NIB_BF16,
    NIB_E4M3, /* float8 e4m3fn: no infinity, 0x7F is NaN */
    NIB_E5M2,
    NIB_E8M0, /* a power of two: 2^(code - 127), 255 is NaN */
    NIB_E2M1, /* two per byte, the even element in the low nibble */
    NIB_BOOL, /* from here on: carried in files, never computed with */
    NIB_I8,
    NIB_U16,
    NIB_U32,
    NIB_U64,
    NIB_F64,
    NIB_C64,
    NIB_E2M3,
    NIB_E3M2,
    NIB_E4M3FNUZ,
    NIB_E5M2FNUZ,
    NIB_DTYPE_COUNT
} nib_dtype;

/* The name that safetensors files use ("BF16", "F8_E4M3"); NULL for a value outside the enum. */
NIB_API const char *nib_dtype_name(nib_dtype dtype);

/* Bits per element; 0 for a value outside the enum. */
NIB_API int nib_dtype_bits(nib_dtype dtype);

#define NIB_MAX_RANK 8

/* A view of plain data that somebody else owns. Strides may be negative or zero. */
typedef struct nib_array {
    void *data;    /* start of the memory */
    size_t bytes;  /* its size: every element must lie within it, and calls check that */
    size_t offset; /* where element [0, ..., 0] is, in bytes from data; not 0 when a stride is negative */
    nib_dtype dtype;
    int32_t rank;
    int64_t shape[NIB_MAX_RANK];
    int64_t strides[NIB_MAX_RANK]; /* in elements */
} nib_array;

/* Fill `out` with a C-contiguous view of `data`, whose size follows from the shape.
 * ARG, DTYPE (only whole-byte dtypes), SHAPE (rank, negative dims, overflow). */
NIB_API nib_status nib_array_init(nib_array *out, void *data, nib_dtype dtype, int rank, const int64_t *shape);

/* Encode n floats as dtype (E2M1, E4M3, E5M2, E8M0, BF16, F16, F32), or decode them. Rounding is to nearest even
 * and saturates to the largest finite value (BF16, F16: to infinity, as IEEE has it); E8M0 takes the power of
 * two at or above |x|. E2M1 is packed: (n + 1) / 2 bytes, a missing last nibble is 0. */
NIB_API nib_status nib_encode(nib_dtype dtype, const float *x, size_t n, void *out);
NIB_API nib_status nib_decode(nib_dtype dtype, const void *codes, size_t n, float *out);

/* ---- Buffers ------------------------------------------------------------------------------------------ */

/* Reference-counted bytes. Counting is thread-safe. */
typedef struct nib_buffer nib_buffer;

/* New memory, zeroed, aligned to 64 bytes. */
NIB_API nib_status nib_buffer_create(size_t bytes, nib_buffer **out);

/* Somebody else's memory; `release(context)` is called once when the last reference goes (it may be NULL). */
NIB_API nib_status nib_buffer_borrow(void *data, size_t bytes, void (*release)(void *context), void *context,
                                     nib_buffer **out);
NIB_API nib_buffer *nib_buffer_retain(nib_buffer *buffer); /* returns its argument */
NIB_API void nib_buffer_release(nib_buffer *buffer);
NIB_API void *nib_buffer_data(const nib_buffer *buffer);
NIB_API size_t nib_buffer_bytes(const nib_buffer *buffer);

/* ---- DLPack ------------------------------------------------------------------------------------------- */

struct DLManagedTensor;          /* DLPack before 1.0 */
struct DLManagedTensorVersioned; /* DLPack 1.x */

/* View a DLPack tensor in host memory without a copy and without taking it over: it must outlive `out`. A view does not
 * remember that a tensor is read-only: such a one must not be written to. */
NIB_API nib_status nib_array_from_dlpack(const struct DLManagedTensor *managed, nib_array *out);
NIB_API nib_status nib_array_from_dlpack_versioned(const struct DLManagedTensorVersioned *managed, nib_array *out);

/* Take over a C-contiguous DLPack tensor in host memory: its deleter runs when the buffer goes. */
NIB_API nib_status nib_buffer_from_dlpack(struct DLManagedTensor *managed, nib_buffer **out);
NIB_API nib_status nib_buffer_from_dlpack_versioned(struct DLManagedTensorVersioned *managed, nib_buffer **out);

/* Give a plain array away as a DLPack tensor. `owner` is retained until the deleter runs; NULL if the memory is sure to
 * outlive the tensor. */
NIB_API nib_status nib_array_to_dlpack(const nib_array *array, nib_buffer *owner, struct DLManagedTensor **out);
NIB_API nib_status nib_array_to_dlpack_versioned(const nib_array *array, nib_buffer *owner,
                                                 struct DLManagedTensorVersioned **out);

/* ---- Communicators ------------------------------------------------------------------------------------ */

/* What ranks that share a tensor must be able to do together. Every rank makes the same calls in the same order. A
 * function returns NIB_OK or a status, the same on every rank. A reduction of amaxes alone (nib_quantizer.amax_comm)
 * needs only the first function, and calls `agree` before it where there is one: without it a rank that fails before
 * the reduction leaves the others waiting. */
typedef struct nib_comm {
    size_t bytes;
    void *context;
    int rank, size;
    /* In place, elementwise, the same n everywhere; numbers may be negative, but there are no NaNs. */
    nib_status (*allreduce_max_f32)(void *context, float *values, size_t n);
    /* The largest of all ranks' statuses; NIB_ERR_MISMATCH if all are NIB_OK and the keys are not equal. */
    nib_status (*agree)(void *context, nib_status status, uint64_t key);
    /* counts[size] bytes of every rank, the same everywhere, side by side into `all`, which does not overlap `mine`. */
    nib_status (*allgather)(void *context, const void *mine, void *all, const size_t *counts);
    /* Returns when all ranks are there. */
    nib_status (*barrier)(void *context);
} nib_comm;

/* One rank alone. */
NIB_API const nib_comm *nib_comm_serial(void);

/* Ranks that are threads of this process: *out becomes an array of `size` communicators, and thread r uses only
 * &(*out)[r]. Calls that do not match (another function, another length) are NIB_ERR_COMM on every rank. A rank that
 * never comes is waited for. destroy when no thread is in a call; it takes what create gave. */
NIB_API nib_status nib_comm_threads_create(int size, nib_comm **out);
NIB_API void nib_comm_threads_destroy(nib_comm *comms);

/* ---- Options ------------------------------------------------------------------------------------------ */

typedef enum nib_format {
    NIB_NVFP4 = 0,    /* E2M1, an E4M3 scale per 16 (1x16 or 16x16), an FP32 tensor scale */
    NIB_FLOAT8,       /* E4M3 or E5M2, one FP32 scale per tensor: current or delayed scaling */
    NIB_MXFP8,        /* E4M3 or E5M2, an E8M0 scale per 32 (1x32 or 32x32) */
    NIB_FLOAT8_BLOCK, /* E4M3 or E5M2, an FP32 scale per 128 (1x128 or 128x128) */
    NIB_MXFP4,        /* E2M1, an E8M0 scale per 32 */
    NIB_FORMAT_COUNT
} nib_format;

/* Whose arithmetic: each fixes the tensor scale, the block scale, zero blocks and the element rule. */
typedef enum nib_dialect {
    NIB_DIALECT_TE = 0,             /* TransformerEngine; the only one with the options below marked (te) */
    NIB_DIALECT_GIST,               /* a global encode scale, by reciprocal and product */
    NIB_DIALECT_TORCHAO,            /* block scales from 2^-6 */
    NIB_DIALECT_MODELOPT,           /* block scales from 2^-9, 1.0 for a block of zeros */
    NIB_DIALECT_COMPRESSED_TENSORS, /* scales in the input's dtype, 0.125 for a block of zeros */
    NIB_DIALECT_COUNT
} nib_dialect;

typedef enum nib_scale_rule {
    NIB_SCALE_RTN = 0, /* largest magnitude to 6, scale rounded to nearest */
    NIB_SCALE_4OVER6,  /* (te) largest magnitude to 6 or to 4, whichever errs less */
    NIB_SCALE_SWEEP,   /* (te) the scale code of least squared error among offsets -3..+7 from the rtn code */
    NIB_SCALE_RULE_COUNT
} nib_scale_rule;

typedef enum nib_error_mode { NIB_ERROR_MAE = 0, NIB_ERROR_MSE, NIB_ERROR_MODE_COUNT } nib_error_mode;

typedef enum nib_rounding {
    NIB_ROUND_NEAREST = 0,
    NIB_ROUND_STOCHASTIC_8,        /* (te) 8 random bits per element, biased toward zero by up to 1/256 step */
    NIB_ROUND_STOCHASTIC_24,       /* (te) 24 random bits per element */
    NIB_ROUND_STOCHASTIC_UNBIASED, /* (te) 24 bits, and scales large enough that no element is clipped */
    NIB_ROUNDING_COUNT
} nib_rounding;

/* What the per-tensor number of a tensor means. f is the factor of a block with scale s. */
typedef enum nib_tensor_scale {
    NIB_TENSOR_SCALE_AMAX = 0,   /* largest magnitude: f = (s * amax) * (1 / (6 * e4m3_max)) */
    NIB_TENSOR_SCALE_MULTIPLIER, /* multiplier g:      f = s * g */
    NIB_TENSOR_SCALE_DIVISOR,    /* divisor:           f = s / encode */
    NIB_TENSOR_SCALE_NONE,       /* there is none:     f = s */
    NIB_TENSOR_SCALE_COUNT
} nib_tensor_scale;

typedef enum nib_tensor_scale_rule {
    NIB_TENSOR_SCALE_RULE_DIALECT = 0, /* what the dialect keeps; te: amax */
    NIB_TENSOR_SCALE_RULE_EXACT,       /* (te) the decode scale g = amax / (6 * e4m3_max), as checkpoints have it */
    NIB_TENSOR_SCALE_RULE_POW2,        /* (te) g rounded up to a power of two */
    NIB_TENSOR_SCALE_RULE_COUNT
} nib_tensor_scale_rule;

/* How an E8M0 scale covers a block's amax. */
typedef enum nib_mx_rule {
    NIB_MX_CEIL = 0, /* the power of two at or above amax / largest element: nothing is clipped */
    NIB_MX_FLOOR,    /* the exponent of amax less that of the largest element, as OCP's paper has it */
    NIB_MX_RULE_COUNT
} nib_mx_rule;

#define NIB_RHT_SIGN_MASK 0xD7E8u /* TransformerEngine's: bit i set when input i changes its sign */

/* Every choice that decides bytes, and the thread count, which does not. Plain data: copy it by assignment. */
typedef struct nib_quantizer {
    size_t bytes;
    nib_format format;
    nib_dialect dialect;
    nib_dtype element;           /* what a code is, where the format leaves a choice; 0 for its first */
    uint8_t rowwise, columnwise; /* which usages to make */
    uint8_t swizzled;            /* scales in the 128x4 tiles of the GEMM instead of row-major */
    uint8_t row_scaled;          /* (te) one amax per row (columnwise: per column), 1x16 only */
    uint8_t rht;                 /* (te) 16-point random Hadamard transform on the columnwise usage */
    uint8_t rht_rowwise;         /* (te) the same on the rowwise usage */
    uint16_t rht_sign_mask;      /* 0 for no random signs */
    int32_t block_dims[2]; /* {1, 16} or, dialect te, {16, 16}; other formats: their 1xB or BxB, {0, 0} for none */
    nib_scale_rule scale_rule;
    nib_error_mode error_mode; /* four-over-six: how to measure the error */
    uint8_t fast_error;        /* four-over-six: measure it on scaled values, as TE's fast mode does */
    uint8_t no_tensor_scale;   /* dialect torchao: no tensor scale */
    int32_t e4m3_max;          /* 448, or 256 with four-over-six: what the largest block scale becomes */
    nib_tensor_scale_rule tensor_scale_rule;
    float min_block_scale; /* (te) block scales are at least this; an E4M3 value, 0 for none */
    nib_rounding rounding;
    uint64_t seed, offset;     /* of the random stream; advance offset by 4 or more from call to call */
    int64_t origin[2];         /* row and column of the input's first element in the whole, for the random stream */
    const nib_comm *amax_comm; /* amaxes become the maximum over its ranks; never kept in a tensor */
    int32_t threads;           /* 0: as many as OpenMP would take */
    uint8_t pow2_scales;       /* float8 formats: scales rounded down to powers of two */
    nib_mx_rule mx_rule;       /* MX formats */
    float amax_epsilon;        /* float8 formats: smaller amaxes count as this */
} nib_quantizer;

/* TransformerEngine's defaults: both usages, 1x16, nearest, amax, the sign mask above; RHT off. */
NIB_API void nib_quantizer_init(nib_quantizer *q);

/* The defaults of any format: both usages; MXFP8 1x32, blockwise Float8 128x128 with power-of-two scales. */
NIB_API nib_status nib_quantizer_init_format(nib_quantizer *q, nib_format format);

/* 1 on, 0 off, -1 as it is. */
NIB_API nib_status nib_quantizer_set_usage(nib_quantizer *q, int rowwise, int columnwise);

/* Says which combination is rejected, and why: ARG for a value outside its range, MODE for options that do not go
 * together, DTYPE for an element that the format does not have. With `x` (its data pointer is not looked at) also
 * whether such an input is taken. */
NIB_API nib_status nib_quantizer_check(const nib_quantizer *q, const nib_array *x);

/* Same bytes for the same input: every field but threads and amax_comm. The hash agrees with it. */
NIB_API int nib_quantizer_equal(const nib_quantizer *a, const nib_quantizer *b);
NIB_API uint64_t nib_quantizer_hash(const nib_quantizer *q);

/* Whether a tensor of this shape can be gathered in quantized form: rank 2 or more, whole blocks on both axes,
 * one amax. Formats without blocks always. */
NIB_API int nib_is_quantizable(const nib_quantizer *q, int rank, const int64_t *shape);

/* Whether quantizing what was dequantized is safe to repeat: not with stochastic rounding. */
NIB_API int nib_is_requantization_safe(const nib_quantizer *q);

/* Formats are numbered 0..count-1: those of nib_format, and any that the library was built with besides. */
NIB_API int nib_format_count(void);

/* "nvfp4", "te", "compressed-tensors", ...; NULL for a value outside the enum. The _from_name calls give
 * NIB_ERR_ARG for an unknown name. */
NIB_API const char *nib_format_name(nib_format format);
NIB_API const char *nib_dialect_name(nib_dialect dialect);
NIB_API nib_status nib_format_from_name(const char *name, nib_format *out);
NIB_API nib_status nib_dialect_from_name(const char *name, nib_dialect *out);

/* ---- Tensors ------------------------------------------------------------------------------------------ */

/* A quantized tensor: shape, nominal dtype, up to six buffers and a copy of its quantizer.
 * M is the product of all dims but the last, K the last. Padding of scales is zero. */
typedef struct nib_tensor nib_tensor;

typedef enum nib_usage { NIB_ROWWISE = 0, NIB_COLUMNWISE = 1, NIB_EITHER = 2 /* rowwise if it is there */ } nib_usage;

/* The buffers of a tensor, in the order in which they are saved. Shapes are NVFP4's; nib_part_shape knows all. MXFP8
 * has no tensor scales, keeps COL_DATA in the logical shape and COL_SCALE as [roundup(M/32, 4), roundup(K, 128)]; blockwise
 * Float8 has no tensor scales; Float8 has no scales, and one tensor scale, ROW_TENSOR_SCALE, for both usages. */
typedef enum nib_part {
    NIB_ROW_DATA = 0,     /* U8 [..., ceil(K/2)]: two codes per byte, even column low */
    NIB_COL_DATA,         /* U8 [K, ceil(M/2)]: transposed */
    NIB_ROW_SCALE,        /* E4M3 [roundup(M, 128), roundup(ceil(K/16), 4)] */
    NIB_COL_SCALE,        /* E4M3 [roundup(K, 128), roundup(ceil(M/16), 4)] */
    NIB_ROW_TENSOR_SCALE, /* F32 [1], or [M] when row-scaled: amax, or what nib_tensor_scale says */
    NIB_COL_TENSOR_SCALE, /* F32 [1], or [K] when row-scaled */
    NIB_PART_COUNT
} nib_part;

/* Numbers that a caller brings to a quantization instead of having them computed; each may be NULL.
 * One float, or one per row (columnwise: per column) when row-scaled. Index with nib_usage.
 * Without RHT and row-scaling one usage's number serves both. */
typedef struct nib_overrides {
    size_t bytes;
    const float *amax[2];         /* still reduced over amax_comm */
    const float *tensor_scale[2]; /* the finished per-tensor number itself, in the tensor's nib_tensor_scale */
    const float *scale; /* Float8, delayed scaling: multiply the data with this one; the tensor scale is its inverse */
    float *
        amax_seen; /* formats with tensor scales: raised to the data's amax, after any reduction; nib_delayed_scaling_update takes it */
} nib_overrides;

/* Quantize `x` (F32, BF16, F16; any rank from 1, Float8 from 0; any strides) into a new tensor. given may be NULL. */
NIB_API nib_status nib_quantize(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                                nib_tensor **out);

/* Quantize into a tensor that exists. q NULL: by the tensor's own quantizer. The shape must be the tensor's. Copies
 * that q does not want are dropped, missing ones allocated, the others written in place, so that views see them -
 * unless q gives bytes another meaning than the tensor's had: then all buffers are new, and views keep the old (for
 * Float8 also where a copy is dropped, since both share a tensor scale). noop: if not NULL and *noop == 1.0f exactly,
 * nothing at all happens (ranks of amax_comm must agree). */
NIB_API nib_status nib_quantize_into(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                                     const float *noop, nib_tensor *t);

/* Write the tensor's values to `out` (F32, BF16, F16; any strides; the tensor's shape), from one usage.
 * A transformed usage is transformed back. */
NIB_API nib_status nib_dequantize(const nib_tensor *t, nib_usage from, const nib_array *out);

/* The same for rows first..first+count-1 of the [M, K] matrix; `out` is [count, K]. Any cut, at a block border or
 * not. */
NIB_API nib_status nib_dequantize_rows(const nib_tensor *t, nib_usage from, int64_t first, int64_t count,
                                       const nib_array *out);

/* A tensor of zeros. dtype is the nominal one. */
NIB_API nib_status nib_tensor_create(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                                     nib_tensor **out);

/* A tensor over buffers the caller has; parts[NIB_PART_COUNT], NULL for absent ones. Each is retained. A copy is
 * data, scale and tensor scale together: USAGE if one is missing, SHAPE if a size is not what nib_part says. */
NIB_API nib_status nib_tensor_from_buffers(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                                           nib_buffer *const *parts, nib_tensor **out);
NIB_API void nib_tensor_destroy(nib_tensor *t);

/* All that is not bytes of buffers. */
typedef struct nib_metadata {
    size_t bytes;
    nib_format format;
    nib_dtype dtype;   /* nominal */
    nib_dtype element; /* what a code is */
    int32_t rank;
    int64_t shape[NIB_MAX_RANK];
    int64_t rows, cols;            /* M, K */
    nib_tensor_scale tensor_scale; /* what the per-tensor numbers mean */
    uint8_t rowwise, columnwise;   /* which usages are there */
    uint8_t columnwise_valid;      /* 0 after nib_tensor_invalidate_columnwise */
    nib_quantizer quantizer;       /* block_dims, swizzled, row_scaled, scale rule, e4m3_max, RHT, ... */
} nib_metadata;
NIB_API nib_status nib_tensor_get_metadata(const nib_tensor *t, nib_metadata *out);

/* A buffer, not retained (NULL when absent), or a view of it with its true shape and dtype. */
NIB_API nib_buffer *nib_tensor_buffer(const nib_tensor *t, nib_part part);
NIB_API nib_status nib_tensor_part(const nib_tensor *t, nib_part part, nib_array *out);

/* A part as a DLPack tensor that keeps the buffer alive until its deleter runs. Packed codes and scales leave as
 * uint8. */
NIB_API nib_status nib_tensor_to_dlpack(const nib_tensor *t, nib_part part, struct DLManagedTensor **out);
NIB_API nib_status nib_tensor_to_dlpack_versioned(const nib_tensor *t, nib_part part,
                                                  struct DLManagedTensorVersioned **out);

/* Which copies hold data. */
NIB_API nib_status nib_tensor_get_usages(const nib_tensor *t, int *rowwise, int *columnwise);

/* 1 keep or build, 0 drop, -1 as it is. Only a columnwise usage of square blocks (or of none) can be built, or built
 * again when it is not valid, from the rowwise one, and only from compact scales: USAGE otherwise. The quantizer's
 * usages follow. Both 0 leaves a tensor without data. */
NIB_API nib_status nib_tensor_update_usage(nib_tensor *t, int rowwise, int columnwise);

/* Say that the rowwise bytes were changed from outside: the columnwise usage is rejected until update_usage or a
 * quantization has made it anew. Nothing happens where it is the only copy, or absent. */
NIB_API nib_status nib_tensor_invalidate_columnwise(nib_tensor *t);

/* Give the tensor another quantizer for later updates; it must not change what the bytes mean (MISMATCH). */
NIB_API nib_status nib_tensor_set_quantizer(nib_tensor *t, const nib_quantizer *q);

/* Save for later. prepare moves the buffers out, *n references (NIB_PART_COUNT at most: NVFP4 6, MXFP8, MXFP4 and
 * blockwise Float8 4, Float8 3) in the order of nib_part, NULL for absent ones; the tensor keeps all else. restore
 * moves them back in from the front of a list of n and says in *used how many it took; the tensor must be without data
 * (USAGE). */
NIB_API nib_status nib_tensor_prepare_for_saving(nib_tensor *t, nib_buffer **out, size_t *n);
NIB_API nib_status nib_tensor_restore_from_saved(nib_tensor *t, nib_buffer *const *saved, size_t n, size_t *used);

/* The same for a mixed list of tensors and plain arrays: tensor NULL means the array is the item. A tensor may be in it
 * once. */
typedef struct nib_item {
    nib_tensor *tensor;
    nib_array array;
} nib_item;

typedef struct nib_saved {
    nib_buffer *buffer; /* a tensor's part, or NULL */
    nib_array array;    /* a plain array; data NULL when this entry is a part */
} nib_saved;

/* How many entries the items take. */
NIB_API nib_status nib_saved_count(const nib_item *items, size_t n, size_t *count);
NIB_API nib_status nib_prepare_for_saving(nib_item *items, size_t n, nib_saved *saved, size_t capacity, size_t *count);
/* `items` as prepare left them; plain arrays are filled in again. */
NIB_API nib_status nib_restore_from_saved(nib_item *items, size_t n, const nib_saved *saved, size_t count,
                                          size_t *used);

/* Drop all buffers; shape, dtype and quantizer stay. */
NIB_API void nib_tensor_clear(nib_tensor *t);

/* A deep copy of every buffer. */
NIB_API nib_status nib_tensor_clone(const nib_tensor *t, nib_tensor **out);

/* Copy bytes between tensors of the same shape and meaning (MISMATCH otherwise). Every copy that dst has must be in
 * src (USAGE). In place, so that views of dst see it. */
NIB_API nib_status nib_tensor_copy(nib_tensor *dst, const nib_tensor *src);

/* All values 0: codes 0, scales 0, tensor scales 0 (amax) or 1. In place. */
NIB_API nib_status nib_tensor_zero(nib_tensor *t);

/* Another shape over the same buffers, which both tensors then share. One dim may be -1. A view that changes the last
 * dim needs whole blocks (K a multiple of 16 before and after), 1x16 blocks, one tensor scale, compact scales and only the
 * rowwise usage, and scale paddings that coincide; SHAPE or USAGE otherwise. */
NIB_API nib_status nib_tensor_view(const nib_tensor *t, int rank, const int64_t *shape, nib_tensor **out);

/* As view, but where only the scale paddings differ the result is a copy that shares nothing. */
NIB_API nib_status nib_tensor_reshape(const nib_tensor *t, int rank, const int64_t *shape, nib_tensor **out);

/* Rows first..first+count-1 of the [M, K] matrix as a tensor of its own, [count, K]. Bytes are copied: scale padding
 * and the columnwise usage cannot be shared. Rows must be cut at block borders: multiples of 16 (or the end) where there
 * is a columnwise usage or 16x16 blocks, anywhere otherwise. SHAPE elsewhere: nib_dequantize_rows takes any cut. */
NIB_API nib_status nib_tensor_slice(const nib_tensor *t, int64_t first, int64_t count, nib_tensor **out);

/* n slices of the given row counts, which must add up to M. */
NIB_API nib_status nib_tensor_split(const nib_tensor *t, const int64_t *counts, size_t n, nib_tensor **out);

/* Same shape, dtype, meaning, copies and bytes; padding of scales is not looked at. */
NIB_API nib_status nib_tensor_equal(const nib_tensor *a, const nib_tensor *b, int *equal);

/* Scales to the GEMM's 128x4 tiles, or back to row-major, padding zero. Afterwards the tensor shares no buffer with
 * views of it, which stay as they were. Nothing happens where the scales are so already. UNSUPPORTED for formats that
 * no GEMM takes so. */
NIB_API nib_status nib_tensor_swizzle(nib_tensor *t);
NIB_API nib_status nib_tensor_unswizzle(nib_tensor *t);

/* Copy the rowwise codes into `buffer`, then let the tensor use that one; views of it stay as they were. SHAPE unless
 * it has exactly their size. */
NIB_API nib_status nib_tensor_rebind_rowwise(nib_tensor *t, nib_buffer *buffer);

/* ---- Shapes ------------------------------------------------------------------------------------------- */

/* Shape of a part for a logical shape, with its rank (up to NIB_MAX_RANK); what nib_tensor_create allocates.
 * USAGE for a part that the format does not have. */
NIB_API nib_status nib_part_shape(const nib_quantizer *q, nib_part part, int rank, const int64_t *shape, int *out_rank,
                                  int64_t *out_shape);
/* The same without the padding: the corner of it that means something, in row-major scales. USAGE for a part that the
 * format does not have. */
NIB_API nib_status nib_part_valid_shape(const nib_quantizer *q, nib_part part, int rank, const int64_t *shape,
                                        int *out_rank, int64_t *out_shape);

/* ---- Sharding ------------------------------------------------------------------------------------------ */

/* Training keeps master weights in FP32, cut into pieces that ranks own, and casts every piece into its place in the
 * quantized parameter. Elements are numbered along the flattened parameter. The result of all ranks together has the
 * bytes of a quantization of the whole, whatever the cut: scales come from amaxes that were reduced over the ranks,
 * codes are written one by one beside those of neighbors, and random numbers go by place.
 *
 * A cast takes NVFP4 with 16x16 or 1x16 blocks and every other format, and rejects (MODE, USAGE): a rowwise RHT, which
 * changes amaxes that ranks with a part of a block cannot know; swizzled scales; and a columnwise usage with 1xB blocks,
 * which cannot be built from rowwise codes (MXFP8 casts both usages). A master is F32 or BF16, of rank 1, and is rounded
 * to the parameter's nominal dtype first, so that the result is that of the parameter in its dtype. With four-over-six
 * and 16x16 blocks the columnwise usage, built from rowwise codes, is their transpose; one that was quantized by itself
 * may have chosen otherwise where two errors nearly tie. */

/* Lists of a sharded cast that not everybody needs. Each is NULL or has one entry per parameter, which may be NULL. */
typedef struct nib_master_options {
    size_t bytes;
    /* Keep columnwise buffers where they are, marked invalid, instead of dropping them. */
    uint8_t manual_post_all_gather;
    /* FSDP: where the codes go instead of into the parameter. U8, contiguous, of exactly the bytes that
     * nib_tensor_byte_range gives for the piece. Scales and tensor scales still go to the parameter. Columnwise only for
     * formats that cast both usages. */
    const nib_array *const *row_shards, *const *col_shards;
    const float *const *scales; /* Float8, delayed scaling: the multiplier; entries NULL: current scaling */
    float *const *amax_seen;    /* raised to the parameter's reduced amax */
} nib_master_options;

/* Cast pieces of master weights into parameters. params[i] gets masters[i] from element starts[i] on; a rank that
 * owns nothing of it passes NULL and -1. Every rank passes all parameters in the same order (MISMATCH otherwise), each
 * once. Two collectives, whatever the number of parameters: agreement, and one reduction of every parameter's block
 * amaxes, 4 bytes per block. Every rank then has all scales and tensor scales, and the codes of its pieces; columnwise
 * copies are dropped or (manual) invalid until nib_post_all_gather_processing. Everything is checked on all ranks
 * before anything changes: if one fails, all return the largest status and none has changed.
 *
 * Four-over-six and sweep choose a scale from all numbers of a block. With such parameters in the list there are three
 * collectives more: a gather of where the pieces lie, agreement, and one gather of a byte per block and of the numbers,
 * in the nominal dtype, of blocks that a cut divides: of 16 elements per cut with 1x16 blocks, of 16 rows with 16x16. (It
 * becomes several where it would move more than 16 MiB at once.)
 *
 * Pieces must cover each parameter once. A block of which no rank has an element is SHAPE: its codes would be those of
 * before. With four-over-six and sweep that is SHAPE for every gap and overlap; elsewhere smaller gaps, and overlaps,
 * would take another collective to see, and are found by nib_all_gather_param. */
NIB_API nib_status nib_quantize_master_weights(nib_tensor *const *params, size_t n_params,
                                               const nib_array *const *masters, size_t n_masters, const int64_t *starts,
                                               size_t n_starts, const nib_comm *comm,
                                               const nib_master_options *options);

/* The same by Megatron's name, for NVFP4 only (MODE otherwise), always manual. row_shards may be NULL. */
NIB_API nib_status nib_quantize_nvfp4_param_shard(nib_tensor *const *params, size_t n_params,
                                                  const nib_array *const *masters, size_t n_masters,
                                                  const int64_t *starts, size_t n_starts, const nib_comm *comm,
                                                  const nib_array *const *row_shards);

/* After the codes were gathered: build every columnwise usage that is wanted or invalid from the rowwise one. Nothing
 * happens to formats that cast both usages. All are checked first; if memory runs out, those before are done. */
NIB_API nib_status nib_post_all_gather_processing(nib_tensor *const *params, size_t n);

/* The steps of a cast, for callers with a reduction of their own. The grid has one amax per scale: [ceil(M/16),
 * ceil(K/16)] with 16x16 blocks, [M, ceil(K/16)] with 1x16 (columnwise: M and K exchanged), [1, 1] for Float8. */
NIB_API nib_status nib_amax_grid(const nib_tensor *t, nib_usage usage, int64_t *rows, int64_t *cols);
/* The grid of a piece; blocks of which it has nothing are 0. The maximum over all pieces is the grid of the whole. */
NIB_API nib_status nib_partial_amax(const nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start,
                                    float *amaxes);
/* Level and scales of a copy from the grid of the whole: written to all rows that share them, padding zero. MODE for
 * four-over-six and sweep, whose scales take more than amaxes. */
NIB_API nib_status nib_block_scales(nib_tensor *t, nib_usage usage, const float *amaxes);
/* The fewest elements around start..start+length-1 that are whole blocks side by side: blocks of 16 in a row with 1x16,
 * whole bands of 16 rows with 16x16. */
NIB_API nib_status nib_whole_blocks(const nib_tensor *t, nib_usage usage, int64_t start, int64_t length, int64_t *first,
                                    int64_t *count);
/* Four-over-six and sweep: the codes of the scales of the whole blocks (in the sense of nib_whole_blocks) that a piece
 * has, 0 for the others; as a grid like the amaxes, which are those of the whole. So that every block is in some
 * piece, the caller brings the elements of divided blocks together first: a piece may hold elements of neighbors. The
 * maximum over all pieces is the grid of the whole. */
NIB_API nib_status nib_partial_scales(const nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start,
                                      const float *amaxes, uint8_t *scales);
/* nib_block_scales for them. */
NIB_API nib_status nib_chosen_scales(nib_tensor *t, nib_usage usage, const float *amaxes, const uint8_t *scales);
/* The codes of a piece, after nib_block_scales (or nib_chosen_scales) with the same grid; into `shard` (as in nib_master_options) or, NULL,
 * the tensor. */
NIB_API nib_status nib_partial_cast(nib_tensor *t, nib_usage usage, const nib_array *master, int64_t start,
                                    const float *amaxes, const nib_array *shard);
/* Packed codes of a [rows, cols] matrix, [rows, ceil(cols/2)] bytes, to [cols, ceil(rows/2)]; missing nibbles are 0. */
NIB_API nib_status nib_transpose_packed(const uint8_t *codes, int64_t rows, int64_t cols, uint8_t *out);
/* Scales of 16x16 blocks of a [rows, cols] matrix: from `rows` lines, in_stride bytes apart, to `cols` lines of
 * ceil(rows/16) scales, out_stride bytes apart, each filled up with zeros. */
NIB_API nib_status nib_transpose_scales(const uint8_t *scales, int64_t rows, int64_t cols, int64_t in_stride,
                                        uint8_t *out, int64_t out_stride);

/* Bytes of a copy's codes that hold elements start..start+length-1. A shared byte holds an element outside of them
 * as well. */
typedef struct nib_byte_range {
    int64_t first, count;
    int first_shared, last_shared; /* with an element before start; with one after the last */
} nib_byte_range;
NIB_API nib_status nib_tensor_byte_range(const nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                         nib_byte_range *out);

/* A buffer of parameters that exists twice: `elements` numbers for gradients, `packed_bytes` bytes of codes. Rank r
 * of size owns an equal share of either. MISMATCH where these are not the same elements: 2 * packed_bytes !=
 * elements, or shares that are not whole bytes; gathering such shares would mix them up. */
NIB_API nib_status nib_param_buffer_range(int64_t elements, int64_t packed_bytes, int rank, int size,
                                          int64_t *first_element, int64_t *element_count, int64_t *first_byte,
                                          int64_t *byte_count);

/* ---- Gathers ---- */

/* Gather the codes of a parameter: this rank has elements start..start+length-1, in `shard` (as in
 * nib_master_options) or, NULL, in the tensor; afterwards the tensor has all. Pieces may lie in any order and be
 * empty, but must cover every element once (SHAPE). A byte that two ranks share is put together from both.
 * COLUMNWISE only for formats that cast both usages. */
NIB_API nib_status nib_all_gather_param(nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                        const nib_array *shard, const nib_comm *comm);
/* The same by whole bytes: SHAPE where ranks share a byte, which a gather of bytes would spoil. */
NIB_API nib_status nib_all_gather_param_bytes(nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                              const nib_array *shard, const nib_comm *comm);

/* Put the ranks' tensors one below the other: shapes may differ in the first dim only, which may be 0, and all have the
 * same copies. The result equals a quantization of the whole by the same amax. MISMATCH where tensor scales differ: reduce the
 * amax (nib_quantizer.amax_comm; row-scaled: only that of columns, by nib_overrides). SHAPE where a border between ranks is
 * not one between blocks (columnwise usages and square blocks). */
NIB_API nib_status nib_all_gather_tensor(const nib_tensor *t, const nib_comm *comm, nib_tensor **out);

/* FSDP: what a framework gathers by itself. extract: views of the rowwise codes, and of the scales without padding
 * rows; tensor scales are not gathered, they must be equal on all ranks already. assign: `data` and `scales` now hold the
 * pieces of all ranks, one below the other; rows is their sum. *out NULL: a new tensor; otherwise one of that shape,
 * written in place. The columnwise usage is built where the quantizer wants one. USAGE or UNSUPPORTED for what cannot
 * be gathered so: swizzled scales, scales that do not lie row by row, a columnwise usage of 1xB blocks, pieces that
 * do not end with a block. */
typedef struct nib_fsdp_parts {
    size_t bytes;
    nib_array data;   /* U8 [rows, bytes of a row] */
    nib_array scales; /* [rows, padded blocks of a row]; data NULL for Float8 */
    float tensor_scale;
    nib_metadata metadata; /* of the piece */
} nib_fsdp_parts;
NIB_API nib_status nib_fsdp_extract(const nib_tensor *t, nib_fsdp_parts *out);
NIB_API nib_status nib_fsdp_assign(const nib_fsdp_parts *parts, int64_t rows, nib_tensor **out);

/* ---- Groups (mixture of experts) ---- */

/* Quantize rows of a [sum of counts, K] array as n tensors of counts[i] rows, which may be 0: each is what
 * quantizing its rows alone gives; for the random stream each starts at (0, 0). With amax_comm all amaxes are
 * reduced at once, those of member i with those of member i on the other ranks; where rows have amaxes of their own,
 * all ranks have the same counts (MISMATCH otherwise). */
NIB_API nib_status nib_split_quantize(const nib_quantizer *q, const nib_array *x, const int64_t *counts, size_t n,
                                      nib_tensor **out);

/* The amax of each of them, not reduced: amax[copy] has n numbers, or is NULL. Transformed where the copy is. MODE
 * where a tensor has not one amax per copy. */
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
/* A shared buffer, not retained (NULL when absent), and where member i begins in it, in bytes. Levels lie side by
 * side. */
NIB_API nib_buffer *nib_group_buffer(const nib_group *group, nib_part part);
NIB_API nib_status nib_group_offset(const nib_group *group, nib_part part, size_t i, int64_t *offset);
/* nib_split_quantize into the members: x has as many rows as all of them, without gaps. amax_comm may be NULL. All
 * members are written or, where anything fails, none. */
NIB_API nib_status nib_group_quantize(nib_group *group, const nib_array *x, const nib_comm *amax_comm);

/* ---- FP4 helpers by Megatron's names ---- */

enum {
    NIB_FP4_ALIGN_TMA = 32,     /* elements: the 16 bytes that a tensor memory access moves at least */
    NIB_FP4_ALIGN_GROUPED = 64, /* rows that grouped RHT kernels take at a time */
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

/* ---- Delayed scaling (Float8) -------------------------------------------------------------------------- */

typedef enum nib_amax_choice { NIB_AMAX_MAX = 0, NIB_AMAX_MOST_RECENT, NIB_AMAX_CHOICE_COUNT } nib_amax_choice;

/* After a step: history[0] is the amax that the step's quantizations saw, history[1..n-1] are those before, the oldest
 * first (TransformerEngine's order). Choose the window's largest or the most recent; *scale becomes largest / 2^margin
 * / amax (FLT_MAX where that overflows) if that amax is positive and finite, and stays otherwise; then the window
 * rolls: the oldest is gone, history[0] has become the last and is 0. element: E4M3 or E5M2. */
NIB_API nib_status nib_delayed_scaling_update(nib_dtype element, nib_amax_choice choice, int margin, float *history,
                                              size_t n, float *scale);

/* ---- From MXFP4 to NVFP4 ------------------------------------------------------------------------------- */

/* The first blocks of 32 that have no exact counterpart; `inexact` counts all of them. */
typedef struct nib_conversion_report {
    size_t bytes;
    int64_t blocks, inexact;
    struct {
        int64_t line, block;
    } first[16];
} nib_conversion_report;

/* The rowwise usage of an MXFP4 tensor as NVFP4 with a power-of-two decode scale: every value is the same where the
 * block's scale lies within 2^17 of the largest, or its codes allow another one. Elsewhere the nearest codes are taken
 * and the block reported; the report may be NULL, and inexact blocks are then NIB_ERR_MISMATCH. */
NIB_API nib_status nib_mxfp4_to_nvfp4(const nib_tensor *mxfp4, nib_conversion_report *report, nib_tensor **out);

/* ---- Reference numbers -------------------------------------------------------------------------------- */

/* H[i][j] = (-1)^popcount(i & j) / 4 */
NIB_API void nib_hadamard_matrix(float out[256]);
/* R[i][j] = sign(i) H[i][j] in BF16 (exact): y = x R */
NIB_API void nib_rht_matrix(uint16_t sign_mask, uint16_t out[256]);
/* The value of each code: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives */
NIB_API void nib_e2m1_values(float out[16]);
/* One block of Philox4x32-10, the generator behind stochastic rounding */
NIB_API void nib_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Scales of a [rows, cols] matrix between row-major (stride bytes a row) and 128x4 tiles of
 * roundup(rows, 128) * roundup(cols, 4) bytes. Padding is written as zero. */
NIB_API nib_status nib_swizzle_scales(const uint8_t *scales, int64_t rows, int64_t cols, int64_t stride, uint8_t *out);
NIB_API nib_status nib_unswizzle_scales(const uint8_t *tiles, int64_t rows, int64_t cols, int64_t stride, uint8_t *out);

/* y = alpha * A B^T, or y += it. An operand's rowwise usage is its [M, K] matrix; its columnwise usage is the
 * transpose [K, M]; their inner sizes must agree, and both or none must be transformed (by the same mask). y is F32
 * [rows of A, rows of B]. One FP32 accumulator per output, blocks in the order of k: the bits of TE's reference. */
NIB_API nib_status nib_gemm_reference(const nib_tensor *a, nib_usage a_usage, const nib_tensor *b, nib_usage b_usage,
                                      float alpha, int accumulate, const nib_array *y);

/* ---- safetensors files --------------------------------------------------------------------------------- */

/* A file opened for reading: its header is checked whole, its data is read on demand. */
typedef struct nib_file nib_file;

typedef struct nib_entry {
    const char *name; /* UTF-8, valid until the file is closed */
    nib_dtype dtype;
    int64_t rank; /* files may have any rank */
    const int64_t *shape;
    uint64_t begin, end; /* bytes, from the start of the data */
} nib_entry;

/* IO, DATA (the message has the path and the fact), MEMORY. */
NIB_API nib_status nib_file_open(const char *path, nib_file **out);
NIB_API void nib_file_close(nib_file *file);
NIB_API size_t nib_file_count(const nib_file *file);

/* Entries are numbered in the order of their names. */
NIB_API nib_status nib_file_entry(const nib_file *file, size_t index, nib_entry *out);
/* ARG with the name in the message if there is none. */
NIB_API nib_status nib_file_find(const nib_file *file, const char *name, size_t *index);
/* A value of __metadata__, or NULL; or the pairs one by one, in the order of their keys. */
NIB_API const char *nib_file_metadata(const nib_file *file, const char *key);
NIB_API size_t nib_file_metadata_count(const nib_file *file);
NIB_API nib_status nib_file_metadata_entry(const nib_file *file, size_t index, const char **key, const char **value);
/* Read `bytes` of an entry from `offset` within it. IO if the file has shrunk since. */
NIB_API nib_status nib_file_read(const nib_file *file, size_t index, uint64_t offset, void *out, size_t bytes);

/* A file being written. Declare everything, then write data in any order, then commit. Until then the data is under
 * a temporary name in the same directory; commit checks that every byte was written, syncs and renames. */
typedef struct nib_writer nib_writer;

NIB_API nib_status nib_writer_create(const char *path, nib_writer **out);
/* ARG: empty name, not UTF-8, repeated, or "__metadata__". */
NIB_API nib_status nib_writer_metadata(nib_writer *writer, const char *key, const char *value);
NIB_API nib_status nib_writer_declare(nib_writer *writer, const char *name, nib_dtype dtype, int64_t rank,
                                      const int64_t *shape);
/* Write part of a declared tensor. The first write ends the declarations. */
NIB_API nib_status nib_writer_write(nib_writer *writer, const char *name, uint64_t offset, const void *data,
                                    size_t bytes);
NIB_API nib_status nib_writer_commit(nib_writer *writer); /* afterwards only destroy */
NIB_API void nib_writer_destroy(nib_writer *writer);      /* an uncommitted file is removed */

/* A whole tensor under `name`: its parts as NAME.row_data, NAME.col_scale, ..., scales as they lie in memory, and all
 * of its metadata. declare before any write; after a failed declaration the writer is only fit to be destroyed. read
 * gives back a tensor equal to the one written. */
NIB_API nib_status nib_writer_declare_tensor(nib_writer *writer, const char *name, const nib_tensor *t);
NIB_API nib_status nib_writer_write_tensor(nib_writer *writer, const char *name, const nib_tensor *t);
NIB_API nib_status nib_file_read_tensor(const nib_file *file, const char *name, nib_tensor **out);

#ifdef __cplusplus
}
#endif

#endif /* NIB_H */

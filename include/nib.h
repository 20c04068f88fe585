/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib.h - NVFP4 tensors: quantize, keep, exchange, dequantize.
 *
 * An NVFP4 tensor holds 4-bit E2M1 codes, one E4M3 scale per block of 16 and one FP32 tensor scale (or one per row).
 * docs/format.md draws the bits, docs/numerics.md says how every byte is computed. The other formats of the same family
 * (Float8, MXFP8, blockwise Float8, MXFP4) go through the same calls; docs/formats.md compares them.
 *
 * Other headers: nib_shard.h (ranks, sharded casts, groups), nib_file.h (safetensors), nib_dlpack.h (exchange),
 * nib_reference.h (codecs, matrices, the reference GEMM), nib_checkpoint.h (whole models).
 *
 * Six rules hold for all of them, so they are stated only here.
 *   Errors   A call that can fail returns nib_status. On failure its outputs are untouched and
 *            nib_last_error() has a message that names the fact. The library never prints, exits or aborts.
 *   Memory   create, quantize, clone, view, slice, open and their like give the caller an object; destroy,
 *            release and close take it back and accept NULL. Every other pointer is borrowed for the call.
 *   Threads  Different objects may be used at the same time; one object may be read by many threads, but
 *            not while a call changes it. Calls that change an object take it without const. A thread
 *            needs 256 KiB of stack (of an optimized library).
 *   Results  Bytes depend on neither the device, the CPU, the thread count, the rounding mode, FTZ/DAZ nor
 *            the locale.
 *   Devices  A call runs where its data lives. Everything in one call lies on one device (NIB_ERR_DEVICE
 *            otherwise), and what a device cannot do is NIB_ERR_UNSUPPORTED; both touch nothing. Raw pointers
 *            to values in such a call (overrides, a no-op flag) are pointers of that device. On a device other
 *            than the host a call may return before its work is done: what it reads must stay as it is until
 *            the device has passed it, and a failure on the device is the status of a later call. Calls that
 *            wait for the device say so, and so do those that run on the host only. A device that fails
 *            (NIB_ERR_DEVICE too) while a call writes in place leaves those bytes undefined, and all else as
 *            it was.
 *   Structs  A struct that begins with `bytes` grows in later versions: set it to sizeof, or use its _init (which
 *            is inline, so that it knows the caller's sizeof; bindings call the _init_sized behind it). A smaller
 *            one, of an older caller, works; a larger one works if the fields that this library does not know
 *            are 0. No more than `bytes` is ever written to one. Do not embed such a struct in one of yours that
 *            others compile against. All other structs are final.
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
#define NIB_VERSION_MINOR 2
#define NIB_VERSION_PATCH 0
#define NIB_VERSION "0.2.0"

/* The version of the library that is running, as NIB_VERSION is of the header. */
NIB_API const char *nib_version(void);

/* The instruction set whose kernels run: "scalar", or a faster one. */
NIB_API const char *nib_isa(void);

/* ---- Errors ------------------------------------------------------------------------------------------- */

typedef enum nib_status {
    NIB_OK = 0,
    NIB_ERR_ARG,         /* a null pointer, or a value outside its documented range */
    NIB_ERR_SHAPE,       /* rank, dims, strides, or a cut that is not at a block border */
    NIB_ERR_DTYPE,       /* a dtype that the call does not support */
    NIB_ERR_MODE,        /* options that do not go together */
    NIB_ERR_USAGE,       /* the usage (rowwise, columnwise) that is needed is not there */
    NIB_ERR_MISMATCH,    /* two objects that must agree do not */
    NIB_ERR_MEMORY,      /* out of memory */
    NIB_ERR_COMM,        /* a communicator's function failed */
    NIB_ERR_IO,          /* the operating system could not read or write */
    NIB_ERR_DATA,        /* a file that breaks its format */
    NIB_ERR_UNSUPPORTED, /* well formed, but not something this build does */
    NIB_ERR_CANCELLED,   /* the caller's own function asked to stop */
    NIB_ERR_DEVICE,      /* objects of two devices in one call, or a device that failed */
    NIB_STATUS_COUNT
} nib_status;

typedef struct nib_error {
    nib_status status;
    char text[512];
} nib_error;

/* "NIB_ERR_SHAPE" and so on; never NULL. */
NIB_API const char *nib_status_name(nib_status status);

/* The message of this thread's last failed call; "" before any. Valid until the thread's next failure. One that is longer
 * than nib_error holds lacks its middle. */
NIB_API const char *nib_last_error(void);

/* The same with its status, copied to the caller. */
NIB_API void nib_get_error(nib_error *out);

/* For code around the library, such as a communicator: set this thread's message, and return the status. The text is
 * copied, and shortened to what nib_error holds. Nothing happens for NIB_OK. */
NIB_API nib_status nib_set_error(nib_status status, const char *text);

/* ---- Devices ------------------------------------------------------------------------------------------- */

/* Where memory lies and calls run. NULL, wherever a device is expected, is the host with OpenMP's default number of
 * threads. Buffers and tensors retain theirs; arrays do not. Counting references is thread-safe. */
typedef struct nib_device nib_device;

/* The host with so many threads; 0 for OpenMP's default. Fewer are used where the work is small. All hosts are one
 * device: arrays and tensors of different ones go together, and a call uses the threads of its array argument or,
 * without one, of its tensor. ARG for a negative number. */
NIB_API nib_status nib_host_create(int threads, nib_device **out);
NIB_API const char *nib_device_name(const nib_device *device); /* "host", "cuda:0"; valid as long as the device */
NIB_API nib_device *nib_device_retain(nib_device *device);     /* returns its argument */
NIB_API void nib_device_release(nib_device *device);

/* ---- Plain data: dtypes and borrowed arrays ------------------------------------------------------------ */

/* The first eleven have the values of TransformerEngine's enum. */
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

/* A view of plain data that it does not own. Strides may be negative or zero. This struct is final. */
typedef struct nib_array {
    void *data;    /* start of the memory */
    size_t bytes;  /* its size: every element must lie within it, and calls check that */
    size_t offset; /* where element [0, ..., 0] is, in bytes from data; not 0 when a stride is negative */
    nib_dtype dtype;
    int32_t rank;
    int64_t shape[NIB_MAX_RANK];
    int64_t strides[NIB_MAX_RANK]; /* in elements */
    nib_device *device;            /* where the memory is; NULL: the host */
} nib_array;

/* Fill `out` with a C-contiguous view of `data`, whose size follows from the shape.
 * ARG, DTYPE (only whole-byte dtypes), SHAPE (rank, negative dims, overflow). */
NIB_API nib_status nib_array_init(nib_array *out, void *data, nib_dtype dtype, int rank, const int64_t *shape);

/* Copy the elements of one array to another of the same dtype and shape (MISMATCH), on the same device or not. On the
 * host both may have any strides; where another device is involved both must be C-contiguous (UNSUPPORTED). Between two
 * devices this waits for the one that is read. The arrays must not overlap. */
NIB_API nib_status nib_array_copy(const nib_array *from, const nib_array *to);

/* ---- Buffers ------------------------------------------------------------------------------------------ */

/* Reference-counted bytes. Counting is thread-safe. */
typedef struct nib_buffer nib_buffer;

/* New memory of a device, zeroed, aligned to 64 bytes. */
NIB_API nib_status nib_buffer_create(size_t bytes, nib_device *device, nib_buffer **out);

/* Memory of the caller's, on that device; `release(context)` is called once when the last reference goes (it may be
 * NULL). */
NIB_API nib_status nib_buffer_borrow(void *data, size_t bytes, nib_device *device, void (*release)(void *context),
                                     void *context, nib_buffer **out);
NIB_API nib_buffer *nib_buffer_retain(nib_buffer *buffer); /* returns its argument */
NIB_API void nib_buffer_release(nib_buffer *buffer);
NIB_API void *nib_buffer_data(const nib_buffer *buffer);
NIB_API size_t nib_buffer_bytes(const nib_buffer *buffer);
NIB_API nib_device *nib_buffer_device(const nib_buffer *buffer); /* not retained */

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
    NIB_DIALECT_GIST,               /* a divisor per tensor, applied by reciprocal and product */
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
    NIB_ROUND_STOCHASTIC_8,        /* (te) 8 random bits per element, biased toward zero by up to 1/256 of a step */
    NIB_ROUND_STOCHASTIC_24,       /* (te) 24 random bits per element */
    NIB_ROUND_STOCHASTIC_UNBIASED, /* (te) 24 bits, and scales large enough that no element is clipped */
    NIB_ROUNDING_COUNT
} nib_rounding;

/* What a tensor keeps as its tensor scale. A code stands for its value times f, the factor of a block with scale s. */
typedef enum nib_tensor_scale {
    NIB_TENSOR_SCALE_AMAX = 0,   /* largest magnitude: f = (s * amax) * (1 / (6 * e4m3_max)) */
    NIB_TENSOR_SCALE_MULTIPLIER, /* multiplier g:      f = s * g */
    NIB_TENSOR_SCALE_DIVISOR,    /* divisor d:         f = s / d */
    NIB_TENSOR_SCALE_NONE,       /* there is none:     f = s */
    NIB_TENSOR_SCALE_COUNT
} nib_tensor_scale;

typedef enum nib_tensor_scale_rule {
    NIB_TENSOR_SCALE_RULE_DIALECT = 0, /* what the dialect keeps; te: amax */
    NIB_TENSOR_SCALE_RULE_EXACT,       /* (te) the multiplier g = amax / (6 * e4m3_max), as checkpoints have it */
    NIB_TENSOR_SCALE_RULE_POW2,        /* (te) g rounded up to a power of two */
    NIB_TENSOR_SCALE_RULE_COUNT
} nib_tensor_scale_rule;

/* How an E8M0 scale covers a block's amax. */
typedef enum nib_mx_rule {
    NIB_MX_CEIL = 0, /* the power of two at or above amax / largest element: nothing is clipped */
    NIB_MX_FLOOR,    /* the exponent of amax less that of the largest element, as in OCP's specification */
    NIB_MX_RULE_COUNT
} nib_mx_rule;

#define NIB_RHT_SIGN_MASK 0xD7E8u /* TransformerEngine's: bit i is set where input i changes its sign */

typedef struct nib_comm nib_comm; /* nib_shard.h: ranks that share a tensor */

/* Every choice that decides bytes. Plain data: copy it by assignment. */
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
    int32_t e4m3_max;          /* 448, or 256 with four-over-six: the scale of the block that holds the amax */
    nib_tensor_scale_rule tensor_scale_rule;
    float min_block_scale; /* (te) block scales are at least this; an E4M3 value, 0 for none */
    nib_rounding rounding;
    uint64_t seed, offset;     /* of the random stream; advance offset by 4 or more from call to call */
    int64_t origin[2];         /* row and column of the input's first element in the whole, for the random stream */
    const nib_comm *amax_comm; /* amaxes become the maximum over its ranks; never kept in a tensor */
    uint8_t pow2_scales;       /* float8 formats: scales rounded down to powers of two */
    nib_mx_rule mx_rule;       /* MX formats */
    float amax_epsilon;        /* float8 formats: smaller amaxes count as this */
} nib_quantizer;

/* The defaults of any format: both usages; MXFP8 1x32, blockwise Float8 128x128 with power-of-two scales. `bytes` is the
 * caller's sizeof. ARG for a format or a size that this version does not know. */
NIB_API nib_status nib_quantizer_init_sized(nib_quantizer *q, size_t bytes, nib_format format);
static inline nib_status nib_quantizer_init_format(nib_quantizer *q, nib_format format)
{
    return nib_quantizer_init_sized(q, sizeof *q, format);
}

/* TransformerEngine's defaults: both usages, 1x16, nearest, amax, the sign mask above; RHT off. */
static inline void nib_quantizer_init(nib_quantizer *q) { (void)nib_quantizer_init_sized(q, sizeof *q, NIB_NVFP4); }

/* 1 on, 0 off, -1 as it is. */
NIB_API nib_status nib_quantizer_set_usage(nib_quantizer *q, int rowwise, int columnwise);

/* Says which combination is rejected, and why: ARG for a value outside its range, MODE for options that do not go
 * together, DTYPE for an element that the format does not have. With `x` (its data is not read) also whether the dtype
 * and shape of such an input are accepted. */
NIB_API nib_status nib_quantizer_check(const nib_quantizer *q, const nib_array *x);

/* Whether both give the same bytes for the same input: every field but amax_comm is compared. Equal quantizers have equal
 * hashes. A struct that is rejected (by its `bytes`, or for fields that this version does not have) equals none, itself
 * included. */
NIB_API int nib_quantizer_equal(const nib_quantizer *a, const nib_quantizer *b);
NIB_API uint64_t nib_quantizer_hash(const nib_quantizer *q);

/* Whether a tensor of this shape can be gathered in quantized form: rank 2 or more, whole blocks on both axes, one amax.
 * Always true of formats without blocks. */
NIB_API int nib_is_quantizable(const nib_quantizer *q, int rank, const int64_t *shape);

/* Whether a tensor may be dequantized and quantized again: not with stochastic rounding, which would round anew, nor with
 * a quantizer that is rejected. */
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

/* The buffers of a tensor, in the order in which they are saved. The shapes below are NVFP4's; nib_part_shape gives those
 * of every format. MXFP8 has no tensor scales, and keeps COL_DATA in the logical shape and COL_SCALE as [roundup(M/32,
 * 4), roundup(K, 128)]; blockwise Float8 has no tensor scales; Float8 has no block scales, and one tensor scale,
 * ROW_TENSOR_SCALE, for both usages. */
typedef enum nib_part {
    NIB_ROW_DATA = 0,     /* U8 [..., ceil(K/2)]: two codes per byte, even column low */
    NIB_COL_DATA,         /* U8 [K, ceil(M/2)]: transposed */
    NIB_ROW_SCALE,        /* E4M3 [roundup(M, 128), roundup(ceil(K/16), 4)] */
    NIB_COL_SCALE,        /* E4M3 [roundup(K, 128), roundup(ceil(M/16), 4)] */
    NIB_ROW_TENSOR_SCALE, /* F32 [1], or [M] when row-scaled: amax, or what nib_tensor_scale says */
    NIB_COL_TENSOR_SCALE, /* F32 [1], or [K] when row-scaled */
    NIB_PART_COUNT
} nib_part;

/* Values that replace computed ones in a quantization; each may be NULL. They lie on the device of the call. One float,
 * or one per row (columnwise: per column) when row-scaled. Index with nib_usage. Without RHT and row scaling one usage's
 * value serves both. On the host a negative one is ARG; another device is not waited for, and what a negative one gives
 * there is not defined. */
typedef struct nib_overrides {
    size_t bytes;
    const float *amax[2];         /* still reduced over amax_comm */
    const float *tensor_scale[2]; /* the tensor scale itself, as the tensor keeps it (nib_tensor_scale) */
    const float *scale;           /* Float8, delayed scaling: multiplies the data; the tensor scale is its inverse */
    /* Formats with tensor scales: raised to the data's amax, after any reduction, for nib_delayed_scaling_update. */
    float *amax_seen;
    const uint64_t *offset; /* stochastic rounding: instead of the quantizer's, and not kept in the tensor */
    /* A sweep that makes the rowwise usage alone, without RHT: one factor per column of x, importance_count of them, by
     * which the squared errors of that column count; made by nib_importance_normalize. All ones give the plain sweep. */
    const float *importance;
    int64_t importance_count;
} nib_overrides;

/* The importance of a weight's n input channels from their mean squares E[x^2] (of a calibration, or of an imatrix):
 * each divided by the mean of all (in FP64, rounded once), then at least 1e-6; 1 in a block of 16 columns, or the last
 * few, whose mean squares are all 0. Both are memory of the host, and may be the same. ARG for a NaN, an infinity or a
 * negative value, SHAPE for n below 1. */
NIB_API nib_status nib_importance_normalize(const float *mean_squares, int64_t n, float *importance);

/* Quantize `x` (F32, BF16, F16; rank 1 or more, Float8 also 0; any strides) into a new tensor on the device of `x`.
 * overrides may be NULL. */
NIB_API nib_status nib_quantize(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                                nib_tensor **out);

/* Quantize into a tensor that exists. q NULL: by the tensor's own quantizer. The shape must be the tensor's. Usages that
 * q does not want are dropped, missing ones allocated, and the others written in place, so that views see them, unless q
 * gives the bytes another meaning: then all buffers are new, and views keep the old ones (for Float8 also where a usage
 * is dropped, since both share a tensor scale). noop: if it is not NULL and *noop == 1.0f exactly, nothing at all happens
 * (on all ranks of amax_comm or on none). This waits for the flag of another device where more than bytes changes: buffers,
 * options, or that a columnwise usage is valid. */
NIB_API nib_status nib_quantize_into(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                                     const float *noop, nib_tensor *t);

/* Write the tensor's values to `out` (F32, BF16, F16; any strides; the tensor's shape), from one usage. A usage with RHT
 * is transformed back. */
NIB_API nib_status nib_dequantize(const nib_tensor *t, nib_usage from, const nib_array *out);

/* The same for rows first..first+count-1 of the [M, K] matrix; `out` is [count, K]. Any cut, at a block border or
 * not. */
NIB_API nib_status nib_dequantize_rows(const nib_tensor *t, nib_usage from, int64_t first, int64_t count,
                                       const nib_array *out);

/* The amaxes that quantizing `x` looks for, not reduced, for callers who reduce them and bring them as overrides:
 * amax[usage] gets one value, or one per row (columnwise: per column) when row-scaled, of transformed values where the
 * usage has an RHT. They lie on the device of `x`. NULL, or a usage that q does not want: not looked for. MODE for
 * formats without tensor scales. */
NIB_API nib_status nib_amax(const nib_quantizer *q, const nib_array *x, float *const amax[2]);

/* What quantizing `x` and dequantizing that usage gives, bit for bit, without a tensor: for training in other precisions
 * and for measuring errors. `out` has the dtype and shape of `x` (MISMATCH) and may be `x` itself; it must not overlap it
 * otherwise. Which usages q wants does not matter, and NIB_EITHER is ARG. overrides may be NULL. */
NIB_API nib_status nib_fake_quantize(const nib_quantizer *q, const nib_array *x, const nib_overrides *overrides,
                                     nib_usage usage, const nib_array *out);

/* A tensor of zeros. dtype is the nominal one. */
NIB_API nib_status nib_tensor_create(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                                     nib_device *device, nib_tensor **out);

/* A tensor over buffers of the caller's: parts[NIB_PART_COUNT], absent ones NULL; n_parts is that count. Each is
 * retained, and all are on one device. A usage is data, scale and tensor scale together: USAGE if one is missing, SHAPE
 * if a size is not that of nib_part_shape. Parts that the format does not have are ignored. */
NIB_API nib_status nib_tensor_from_buffers(const nib_quantizer *q, nib_dtype dtype, int rank, const int64_t *shape,
                                           nib_buffer *const *parts, size_t n_parts, nib_tensor **out);
NIB_API void nib_tensor_destroy(nib_tensor *t);

/* Where its buffers are; not retained. */
NIB_API nib_device *nib_tensor_device(const nib_tensor *t);

/* The same tensor with copies of its buffers on another device, or on the same. From one device to another this waits
 * for the one that is read. */
NIB_API nib_status nib_tensor_to(const nib_tensor *t, nib_device *device, nib_tensor **out);

/* Everything but the bytes of the buffers. */
typedef struct nib_metadata {
    size_t bytes;
    nib_format format;
    nib_dtype dtype;   /* nominal */
    nib_dtype element; /* what a code is */
    int32_t rank;
    int64_t shape[NIB_MAX_RANK];
    int64_t rows, cols;             /* M, K */
    nib_tensor_scale tensor_scale;  /* what is kept as tensor scale */
    uint8_t rowwise, columnwise;    /* which usages are there */
    uint8_t columnwise_valid;       /* 0 after nib_tensor_invalidate_columnwise */
    const nib_quantizer *quantizer; /* the tensor's own, valid until it is changed or destroyed */
} nib_metadata;
NIB_API nib_status nib_tensor_get_metadata(const nib_tensor *t, nib_metadata *out);

/* A buffer, not retained (NULL when absent), or a view of it with its true shape and dtype. */
NIB_API nib_buffer *nib_tensor_buffer(const nib_tensor *t, nib_part part);
NIB_API nib_status nib_tensor_part(const nib_tensor *t, nib_part part, nib_array *out);

/* Which usages hold data. */
NIB_API nib_status nib_tensor_get_usages(const nib_tensor *t, int *rowwise, int *columnwise);

/* 1 keep or build, 0 drop, -1 as it is. Only a columnwise usage of square blocks (or without blocks) can be built, or
 * built again where it is not valid, from the rowwise one, and only with row-major scales: USAGE otherwise. The
 * quantizer's usages follow. Both 0 leaves a tensor without data. */
NIB_API nib_status nib_tensor_update_usage(nib_tensor *t, int rowwise, int columnwise);

/* Tell the tensor that its rowwise bytes were changed from outside: the columnwise usage is rejected (USAGE) until
 * update_usage or a quantization has made it again. Nothing happens where it is the only usage, or absent. */
NIB_API nib_status nib_tensor_invalidate_columnwise(nib_tensor *t);

/* Give the tensor another quantizer for later updates; it must not change what the bytes mean (MISMATCH). */
NIB_API nib_status nib_tensor_set_quantizer(nib_tensor *t, const nib_quantizer *q);

/* Save for later. prepare moves the buffers out: *n references (NVFP4 6, MXFP8, MXFP4 and blockwise Float8 4, Float8 3;
 * ARG where the list has no space for them) in the order of nib_part, NULL for absent ones; the tensor keeps everything
 * else. restore moves them back in from the front of a list of n, and *used becomes how many; the tensor must be without
 * data (USAGE). */
NIB_API nib_status nib_tensor_prepare_for_saving(nib_tensor *t, nib_buffer **out, size_t capacity, size_t *n);
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

/* The same tensor with copies of its buffers. */
NIB_API nib_status nib_tensor_clone(const nib_tensor *t, nib_tensor **out);

/* Copy bytes between tensors of the same shape and meaning (MISMATCH otherwise), on one device. src must have every usage
 * that dst has (USAGE). In place, so that views of dst see it. */
NIB_API nib_status nib_tensor_copy(nib_tensor *dst, const nib_tensor *src);

/* All values 0: codes 0, scales 0, tensor scales 0 (amax) or 1. In place. */
NIB_API nib_status nib_tensor_zero(nib_tensor *t);

/* Another shape over the same buffers, which both tensors then share. One dim may be -1. A view that changes the last
 * dim needs whole blocks (K a multiple of 16 before and after), 1x16 blocks, one tensor scale, row-major scales, the
 * rowwise usage alone, and scales whose padding is the same in both shapes; SHAPE or USAGE otherwise. */
NIB_API nib_status nib_tensor_view(const nib_tensor *t, int rank, const int64_t *shape, nib_tensor **out);

/* As view, but where only the padding of scales differs the result has buffers of its own. */
NIB_API nib_status nib_tensor_reshape(const nib_tensor *t, int rank, const int64_t *shape, nib_tensor **out);

/* Rows first..first+count-1 of the [M, K] matrix as a tensor of its own, [count, K]. Bytes are copied: scale padding
 * and the columnwise usage cannot be shared. Rows, if any, must be cut at block borders: multiples of 16 (or the end) if
 * there is a columnwise usage or 16x16 blocks, else anywhere. SHAPE elsewhere: nib_dequantize_rows takes any cut. */
NIB_API nib_status nib_tensor_slice(const nib_tensor *t, int64_t first, int64_t count, nib_tensor **out);

/* n slices of the given row counts, which must add up to M. */
NIB_API nib_status nib_tensor_split(const nib_tensor *t, const int64_t *counts, size_t n, nib_tensor **out);

/* Whether two tensors have the same shape, dtype, meaning, usages and bytes; padding of scales is ignored. Waits for the
 * device. */
NIB_API nib_status nib_tensor_equal(const nib_tensor *a, const nib_tensor *b, int *equal);

/* Scales to the GEMM's 128x4 tiles, or back to row-major, padding zero. Afterwards the tensor shares no buffer with
 * views of it, which stay as they were. Nothing happens where the scales already lie so. UNSUPPORTED for formats whose
 * scales no GEMM takes in tiles. */
NIB_API nib_status nib_tensor_swizzle(nib_tensor *t);
NIB_API nib_status nib_tensor_unswizzle(nib_tensor *t);

/* Copy the rowwise codes into `buffer`, which then replaces the tensor's own; views of it stay as they were. SHAPE unless
 * the buffer has exactly their size. */
NIB_API nib_status nib_tensor_rebind_rowwise(nib_tensor *t, nib_buffer *buffer);

/* ---- Shapes ------------------------------------------------------------------------------------------- */

/* Shape of a part for a logical shape, with its rank (up to NIB_MAX_RANK); what nib_tensor_create allocates.
 * USAGE for a part that the format does not have. */
NIB_API nib_status nib_part_shape(const nib_quantizer *q, nib_part part, int rank, const int64_t *shape, int *out_rank,
                                  int64_t *out_shape);
/* The same without the padding: the corner that holds scales of blocks where they are row-major. USAGE for a part that
 * the format does not have. */
NIB_API nib_status nib_part_valid_shape(const nib_quantizer *q, nib_part part, int rank, const int64_t *shape,
                                        int *out_rank, int64_t *out_shape);

/* ---- Products ------------------------------------------------------------------------------------------ */

/* One side of a product: the lines of a tensor's usage (rowwise: its [M, K] matrix; columnwise: the transpose [K, M]), or
 * the rows of a plain array, [lines, K] of F32, BF16 or F16, any strides. One of the two pointers is NULL. This struct is
 * final. */
typedef struct nib_operand {
    const nib_tensor *tensor;
    const nib_array *array;
    nib_usage usage; /* of the tensor */
} nib_operand;

typedef struct nib_gemm_options {
    size_t bytes;
    float alpha, beta;
    const nib_array *bias; /* [lines of B]; F32, BF16 or F16; NULL for none */
} nib_gemm_options;

/* alpha 1, beta 0, no bias. ARG for a size that this version does not know. */
NIB_API nib_status nib_gemm_options_init_sized(nib_gemm_options *options, size_t bytes);
static inline void nib_gemm_options_init(nib_gemm_options *options)
{
    (void)nib_gemm_options_init_sized(options, sizeof *options);
}

/* y = alpha * A B^T + bias + beta * y, for lines of A by lines of B. options NULL: the defaults. y is F32, BF16 or F16,
 * [lines of A, lines of B], any strides, rounded once at the end; it is not read where beta is 0, and must not overlap
 * what is read. Forward is X rowwise by W rowwise; the gradient of X is dY rowwise by W columnwise; that of W is dY
 * columnwise by X columnwise.
 *
 * Two NVFP4 or two MXFP4 operands: blocks are multiplied exactly and added in the order of k. Both are transformed (RHT)
 * with the same mask, or neither is. An NVFP4 operand, not transformed, and a plain one, on either side: the plain values
 * are rounded to block fixed point, 15 bits per value and one exponent per 16, and then likewise. Any other pair with a
 * tensor in it: the decoded values (as nib_dequantize gives them in F32) by FMAs in the order of k. On the host all of it
 * has the bits of nib_gemm_reference (docs/numerics.md 14 has the formulas and the bounds), whatever the instruction set,
 * the threads and the sizes. On another device its header says what is taken; bounds are there, too.
 *
 * MISMATCH: inner sizes, or transforms. UNSUPPORTED: two plain operands, or a plain one with a transformed tensor. The
 * scratch memory belongs to the host device and grows to what its largest product needs. */
NIB_API nib_status nib_gemm(const nib_operand *a, const nib_operand *b, const nib_gemm_options *options,
                            const nib_array *y);

/* n products: the i-th is nib_gemm of a[i], b[i], options[i] and y[i]. options may be NULL, and so may any of them. All
 * are on one device and are checked before the first begins; outputs must not overlap. */
NIB_API nib_status nib_gemm_grouped(const nib_operand *a, const nib_operand *b, const nib_gemm_options *const *options,
                                    const nib_array *y, size_t n);

/* ---- GPTQ ---------------------------------------------------------------------------------------------- */

/* The order in which nib_gptq rounds the columns of a weight, and the matrix by which later ones make up for the errors of
 * earlier ones, from the Hessian of the weight's input: the mean of x x^T over tokens. `hessian` has the rows of its upper
 * triangle one behind the other, n (n + 1) / 2 values, as files of statistics have it (docs/calibration.md).
 *
 * order[n]: columns by falling mean square (the diagonal), equal ones by their index. u[n][n]: upper triangular, zeros
 * below, u^T u the inverse of the Hessian in that order with damp times the mean of its diagonal added to the diagonal;
 * computed in FP64 and rounded once. Channels without input (a diagonal of 0) come last and count with the mean square of
 * the others; without any input all have 1. Where the sum is not positive definite, the damping is multiplied by 10, up
 * to three times; *damped (may be NULL) becomes the one that was used. 0.1 is a good damping.
 *
 * ARG for a damping that is negative or not finite, for a NaN, an infinity or a negative diagonal; SHAPE for n below 1 or
 * above 2^31 - 1; DATA where it is not positive definite in the end. On the host only (the device says how many threads),
 * with about 4 n^2 bytes of memory besides. */
NIB_API nib_status nib_gptq_factorize(const float *hessian, int64_t n, double damp, nib_device *device, int32_t *order,
                                      float *u, double *damped);

/* Choose the codes of a tensor anew, so that errors of x[i] cancel in products with the weight's input: t is x quantized,
 * its scales stay, and its codes change in place. Scales of a sweep with importance are those to begin with; from scales
 * of NIB_SCALE_RTN little is gained. order and u are those of nib_gptq_factorize, n is K. Rows are independent: panels of
 * a weight give the bytes of the whole.
 *
 * Columns are rounded in their order, each as nib_quantize rounds it; then its error, divided by u[j][j] and multiplied by
 * u[j][k], is taken from every column k behind it, in FP32 (docs/numerics.md 18). A row with a value that is not finite
 * keeps its codes, a zero its sign; in a block whose scale is 0 codes become 0. With a u that is diagonal codes stay what
 * they were but for such blocks.
 *
 * x is F32, BF16 or F16 of the tensor's shape (MISMATCH), any strides. The tensor is NVFP4 of the dialect te in 1x16
 * blocks, to nearest, without an RHT (MODE), and has the rowwise usage alone (USAGE). ARG for an order in which a column
 * is missing and for a diagonal that is not positive; what else a u of the caller's own has in it is the caller's matter.
 * On the host only. */
NIB_API nib_status nib_gptq(const nib_array *x, const int32_t *order, const float *u, int64_t n, nib_tensor *t);

/* ---- Delayed scaling (Float8) -------------------------------------------------------------------------- */

typedef enum nib_amax_choice { NIB_AMAX_MAX = 0, NIB_AMAX_MOST_RECENT, NIB_AMAX_CHOICE_COUNT } nib_amax_choice;

/* After a step: history[0] is the amax that the step's quantizations saw, history[1..n-1] are those before, the oldest
 * first (TransformerEngine's order). Choose the window's largest amax or the most recent; *scale becomes largest /
 * 2^margin / amax, where largest is the element's largest value (FLT_MAX where that overflows), if that amax is positive
 * and finite, and stays as it is otherwise. Then the window rolls: the oldest is gone, the current one becomes the last,
 * and history[0] is 0. element: E4M3 or E5M2. On the host only: both pointers are host memory. */
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

/* The rowwise usage of an MXFP4 tensor as NVFP4 whose tensor scale is a power of two: every value is the same where the
 * block's scale lies within 2^17 of the largest, or its codes allow another scale. Elsewhere the nearest codes are taken
 * and the block is reported; the report may be NULL, and inexact blocks are then NIB_ERR_MISMATCH. On the host only. */
NIB_API nib_status nib_mxfp4_to_nvfp4(const nib_tensor *mxfp4, nib_conversion_report *report, nib_tensor **out);

#ifdef __cplusplus
}
#endif

#endif /* NIB_H */

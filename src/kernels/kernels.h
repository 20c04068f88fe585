/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - the slots that an instruction set may fill, and what fills them now.
 *
 * Kernels know rectangles of values, lines of codes and scales. They know nothing of tensors, never allocate,
 * and trust their arguments. Each runs within nib_fpenv_enter.
 */
#ifndef NIB_KERNELS_H
#define NIB_KERNELS_H

#include "format/format.h"
#include "kernels/product.h"

/* A rectangle of input whose rows are contiguous. */
struct nib_panel {
    const void *x;
    nib_dtype dtype;    /* F32, BF16 or F16 */
    int64_t stride;     /* elements from row to row */
    int64_t row, col;   /* where it lies in the whole [M, K] matrix; multiples of the block */
    int64_t rows, cols; /* its size; the matrix ends where they are not whole blocks */
};

/* How one usage is coded. */
struct nib_coding {
    nib_usage usage;
    int block;       /* elements along a line that share a scale; 0: all of them */
    int tile_lines;  /* lines that share it: 1, or as many as the block is long */
    int scale_bytes; /* of one scale */
    bool rht;        /* RHT before anything else */
    uint16_t sign_mask;
    const struct nib_dialect_facts *dialect;
    struct nib_rules rules;
    nib_scale_rule scale_rule;
    nib_error_mode error_mode;
    bool fast_error;
    uint8_t floor_code; /* smallest block scale, as a code */
    nib_rounding rounding;
    uint64_t seed, offset;
    int64_t origin_line, origin_block; /* of the usage in the whole, for the random stream */
    const float *importance;           /* the rowwise sweep: a factor of each column's errors, or NULL */
};

/* Where one usage goes. Line 0 is the matrix's first. */
struct nib_target {
    uint8_t *codes;
    void *scales;
    const struct nib_usage_geometry *geometry;
    const float *tensor_scales; /* one, or one per line; NULL where the format has none */
    bool tensor_scale_per_line;
    float scale; /* the multiplier of the data, for dialects that keep its inverse as the tensor scale */
};

/* Largest magnitude of n values; NaNs do not count. */
typedef float nib_absmax_fn(const void *x, int64_t n);

/* The same for each line of a panel after its RHT: out[i] = max(out[i], ...) for line i of the panel. */
typedef void nib_absmax_lines_fn(const struct nib_panel *panel, const struct nib_coding *coding, float *out);

/* Scales and codes of every whole or last block of a panel. */
typedef void nib_quantize_fn(const struct nib_panel *panel, const struct nib_coding *coding,
                             const struct nib_target *target);

/* The same for both usages, whose coding and target are [NIB_ROWWISE] and [NIB_COLUMNWISE]. Only where reading a panel
 * once pays; elsewhere the slot is empty, and the usages are made one after the other. */
typedef void nib_quantize_both_fn(const struct nib_panel *panel, const struct nib_coding coding[2],
                                  const struct nib_target target[2]);

/* n elements from codes and scales that lie side by side, as F32, BF16 or F16; the first begins a block. `stream`: the
 * output is too large to be wanted in the cache. */
typedef void nib_decode_fn(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                           float tensor_scale, const struct nib_coding *coding, bool stream);

/* Blocks of 16 back through the RHT, to the slot's dtype; n is a multiple of 16. */
typedef void nib_inverse_rht_fn(void *y, const float *x, int64_t n, uint16_t sign_mask);

/* The transpose of a matrix of rows x cols elements, by the width of its elements (slots E2M1: packed, U8, BF16 and
 * F32). Strides are bytes from line to line. A nibble that is nobody's is 0; nothing else outside the lines of `out` is
 * written. */
typedef void nib_transpose_fn(const uint8_t *in, int64_t in_stride, int64_t rows, int64_t cols, uint8_t *out,
                              int64_t out_stride);

/* c[i][j] = c[i][j] - a[p][i] * b[p][j] for p = 0 .. k-1, one after the other, each product and each difference rounded:
 * the one step of GPTQ and of the factorization before it. Slots F32 and F64; strides are elements from row to row; m is
 * any number, n a multiple of NIB_SUBTRACT_STEP. c may be the rows of b that follow those that are read. */
enum { NIB_SUBTRACT_STEP = 64 };
typedef void nib_subtract_fn(void *c, int64_t c_stride, const void *a, int64_t a_stride, const void *b,
                             int64_t b_stride, int64_t m, int64_t n, int64_t k);

/* GPTQ: round n values (a multiple of 16) of one column, each of another row with the factor and the decode factor of
 * its block; w becomes (w - q) / pivot. codes has one a byte; NIB_CODE_OF_ZERO is added where w is 0, whose sign says
 * nothing. */
enum { NIB_CODE_OF_ZERO = 16 };
typedef void nib_round_column_fn(float *w, const float *factors, const float *decode_factors, float pivot, int64_t n,
                                 uint8_t *codes);

/* Every slot: the operation, and what it is indexed by. A format without kernels of its own has those of slot
 * NIB_GENERIC_FORMAT. */
enum { NIB_GENERIC_FORMAT = NIB_FORMAT_COUNT, NIB_FORMAT_SLOTS };

#define NIB_KERNELS(X)                 \
    X(absmax, NIB_DTYPE_COUNT)         \
    X(absmax_lines, NIB_FORMAT_SLOTS)  \
    X(quantize, NIB_FORMAT_SLOTS)      \
    X(quantize_both, NIB_FORMAT_SLOTS) \
    X(decode, NIB_FORMAT_SLOTS)        \
    X(inverse_rht, NIB_DTYPE_COUNT)    \
    X(transpose, NIB_DTYPE_COUNT)

/* Those of products, which go together (product.h). */
#define NIB_PRODUCT_KERNELS(X)      \
    X(pack_rows, NIB_PRODUCT_SLOTS) \
    X(multiply, NIB_PRODUCT_SLOTS)

/* Those of GPTQ. */
#define NIB_GPTQ_KERNELS(X)      \
    X(subtract, NIB_DTYPE_COUNT) \
    X(round_column, NIB_FORMAT_SLOTS)

struct nib_kernels {
#define X(operation, count) nib_##operation##_fn *operation[count];
    NIB_KERNELS(X)
    NIB_PRODUCT_KERNELS(X)
    NIB_GPTQ_KERNELS(X)
#undef X
};

/* An instruction set, or what some processors that have it can do besides, in a line of the same name. The list goes from
 * weakest to strongest; an empty slot keeps the kernel of the line above. */
struct nib_isa {
    const char *name;
    bool (*present)(void);
    const struct nib_kernels *kernels;
};
extern const struct nib_isa nib_isas[]; /* ends with a NULL name */

extern const struct nib_kernels nib_kernels_scalar, nib_kernels_avx2, nib_kernels_avx512, nib_kernels_neon;
extern const struct nib_kernels nib_products_avx2, nib_products_avx512, nib_products_amx, nib_products_neon,
    nib_products_sdot;
extern const struct nib_kernels nib_gptq_scalar, nib_gptq_avx2, nib_gptq_avx512, nib_gptq_neon;

nib_multiply_fn nib_multiply_scalar; /* of every kind: the reference */

/* The merged table: chosen once, at the first call. NIB_MAX_ISA in the environment names the strongest set to use. */
const struct nib_kernels *nib_kernels_best(void);

/* The kernel of a format: its own, or the one for all. */
#define NIB_KERNEL(operation, format)                                          \
    ((int)(format) < NIB_FORMAT_COUNT && nib_kernels_best()->operation[format] \
         ? nib_kernels_best()->operation[format]                               \
         : nib_kernels_best()->operation[NIB_GENERIC_FORMAT])

/* What the scalar kernels do to one block, for blocks that are not in one place: amax and elements come from elsewhere.
 * The scale is that of NIB_SCALE_RTN, which needs no more than the amax; codes follow from any. No instruction set has
 * its own. */
struct nib_block_kernels {
    /* The block's scale. */
    nib_scale_bits (*scale)(float block_amax, const struct nib_scaler *scaler, const struct nib_coding *coding);
    /* The codes, one a byte, of n of its elements in line `line` of the matrix, from element `first` of the block
     * on. */
    void (*encode)(const float *x, int64_t n, float factor, const struct nib_coding *coding, int64_t line,
                   int64_t block, int64_t first, uint8_t *codes);
};
extern const struct nib_block_kernels nib_block_kernels_nvfp4, nib_block_kernels_generic;

static inline const struct nib_block_kernels *nib_block_kernels_of(const nib_quantizer *q)
{
    return nib_format_of(q)->nvfp4_options ? &nib_block_kernels_nvfp4 : &nib_block_kernels_generic;
}

#endif

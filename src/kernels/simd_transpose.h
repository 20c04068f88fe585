/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd_transpose.h - transposing matrices of nibbles, bytes, halves and words for any vector width. Included once by the
 * file of each instruction set, after simd.h.
 *
 * Sixteen bytes of each of 16 / width rows are a square. Interleaving the first half of its rows with the second, as
 * often as the count of rows has bits, transposes it; a wide vector does several squares side by side.
 *
 * The including file defines
 *     VB, VB_PIECES              a vector of so many pieces of 16 bytes
 *     vb_load(p), vb_store_pieces(p, apart, v)    piece k goes to p + k * apart
 *     vb_and, vb_or, vb_set1(byte), vb_nibble_up, vb_nibble_down     the last two shift bytes by four bits
 *     vb_zip_low_8(a, b), vb_zip_high_8, and _16, _32: a0 b0 a1 b1 ... of the lower and the upper half of each piece
 */

enum { VB_BYTES = 16 * VB_PIECES };

#define INTERLEAVE(width, rows)                                          \
    SIMD void interleave_##width(VB v[rows])                             \
    {                                                                    \
        VB t[rows];                                                      \
        UNROLL                                                           \
        for (int i = 0; i < (rows) / 2; i++) {                           \
            t[2 * i] = vb_zip_low_##width(v[i], v[i + (rows) / 2]);      \
            t[2 * i + 1] = vb_zip_high_##width(v[i], v[i + (rows) / 2]); \
        }                                                                \
        UNROLL                                                           \
        for (int i = 0; i < (rows); i++)                                 \
            v[i] = t[i];                                                 \
    }
INTERLEAVE(8, 16)
INTERLEAVE(16, 8)
INTERLEAVE(32, 4)
#undef INTERLEAVE

/* `bits` of a byte, two or four each: rows x rows squares side by side. */
#define TRANSPOSE_SQUARES(width, rows, rounds)                                                        \
    SIMD void squares_##width(const uint8_t *in, int64_t in_stride, uint8_t *out, int64_t out_stride) \
    {                                                                                                 \
        VB v[rows];                                                                                   \
        UNROLL                                                                                        \
        for (int i = 0; i < (rows); i++)                                                              \
            v[i] = vb_load(in + i * in_stride);                                                       \
        UNROLL                                                                                        \
        for (int i = 0; i < (rounds); i++)                                                            \
            interleave_##width(v);                                                                    \
        UNROLL                                                                                        \
        for (int i = 0; i < (rows); i++)                                                              \
            vb_store_pieces(out + i * out_stride, (rows)*out_stride, v[i]);                           \
    }
TRANSPOSE_SQUARES(8, 16, 4)
TRANSPOSE_SQUARES(16, 8, 3)
TRANSPOSE_SQUARES(32, 4, 2)
#undef TRANSPOSE_SQUARES

/* 32 rows: the nibbles of two rows side by side, first those of even columns, then the others; then as bytes. */
SIMD void squares_4(const uint8_t *in, int64_t in_stride, uint8_t *out, int64_t out_stride)
{
    const VB low = vb_set1(0x0F), high = vb_set1((char)0xF0);
    for (int odd = 0; odd < 2; odd++) {
        VB v[16];
        UNROLL
        for (int i = 0; i < 16; i++) {
            const VB a = vb_load(in + 2 * i * in_stride), b = vb_load(in + (2 * i + 1) * in_stride);
            v[i] = odd ? vb_or(vb_nibble_down(a), vb_and(b, high)) : vb_or(vb_and(a, low), vb_nibble_up(b));
        }
        UNROLL
        for (int i = 0; i < 4; i++)
            interleave_8(v);
        UNROLL
        for (int i = 0; i < 16; i++)
            vb_store_pieces(out + (2 * i + odd) * out_stride, 32 * out_stride, v[i]);
    }
}

/* A matrix of rows x cols elements of `width` bits. What does not fill squares goes through memory that does. */
#define DEFINE_TRANSPOSE(name, width, square_rows)                                                                     \
    SLOT void name(const uint8_t *in, int64_t in_stride, int64_t rows, int64_t cols, uint8_t *out, int64_t out_stride) \
    {                                                                                                                  \
        enum { ROWS = (square_rows), COLS = VB_BYTES * 8 / (width) };                                                  \
        uint8_t from[ROWS * VB_BYTES], to[COLS * 16];                                                                  \
        for (int64_t c = 0; c < cols; c += COLS)                                                                       \
            for (int64_t r = 0; r < rows; r += ROWS) {                                                                 \
                const uint8_t *const x = in + r * in_stride + c * (width) / 8;                                         \
                uint8_t *const y = out + c * out_stride + r * (width) / 8;                                             \
                if (r + ROWS <= rows && c + COLS <= cols) {                                                            \
                    squares_##width(x, in_stride, y, out_stride);                                                      \
                    continue;                                                                                          \
                }                                                                                                      \
                const int64_t height = nib_min(ROWS, rows - r), length = nib_min(COLS, cols - c);                      \
                memset(from, 0, sizeof from);                                                                          \
                for (int64_t i = 0; i < height; i++)                                                                   \
                    memcpy(from + i * VB_BYTES, x + i * in_stride, (size_t)nib_ceil_div(length * (width), 8));         \
                squares_##width(from, VB_BYTES, to, 16);                                                               \
                for (int64_t i = 0; i < length; i++)                                                                   \
                    memcpy(y + i * out_stride, to + i * 16, (size_t)nib_ceil_div(height * (width), 8));                \
            }                                                                                                          \
    }
DEFINE_TRANSPOSE(transpose_4, 4, 32)
DEFINE_TRANSPOSE(transpose_8, 8, 16)
DEFINE_TRANSPOSE(transpose_16, 16, 8)
DEFINE_TRANSPOSE(transpose_32, 32, 4)
#undef DEFINE_TRANSPOSE

#define NIB_TRANSPOSE_ALL \
    [NIB_E2M1] = transpose_4, [NIB_U8] = transpose_8, [NIB_BF16] = transpose_16, [NIB_F32] = transpose_32

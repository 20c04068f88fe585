/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quantize_layouts.c - strides, ranks, tails and guarded memory change no byte, and every layout comes back.
 */
#define _GNU_SOURCE
#include "tensor/quantize.h"
#include "test_modes.h"

/* ---- Layouts ---- */

static void check_layout(const char *name, const nib_array *view)
{
    const nib_array plain = contiguous_copy(view);
    const int64_t cols = view->shape[view->rank - 1], rows = cols ? elements_in(view->rank, view->shape) / cols : 0;
    for (int mode = 0; mode < MODES; mode++) {
        const nib_quantizer q = mode_of(mode);
        if (!supports(&q, rows, cols))
            continue;
        snprintf(where, sizeof where, "%s %s", name, mode_names[mode]);
        nib_tensor *a = quantize(&q, view, NULL), *b = quantize(&q, &plain, NULL);
        CHECK_SAME(a, b);
        nib_tensor_destroy(a);
        nib_tensor_destroy(b);
    }
    free(plain.data);
}

/* Rows alone are cut otherwise than columns, columns of FP32 that are many otherwise than few, and all otherwise where
 * they must be copied: here from every second element of a row, and back into such. */
TEST(rows_wider_than_a_panel_leave_no_trace_of_it)
{
    static const int64_t wide_shapes[][2] = { { 3, 66013 }, { 40, 4144 }, { 1, 140000 }, { 17, 8192 }, { 48, 33120 } };
    for (size_t s = 0; s < sizeof wide_shapes / sizeof *wide_shapes; s++)
        for (int both = 0; both < 2; both++)
            for (int mode = 0; mode < MODES; mode++) {
                const int64_t rows = wide_shapes[s][0], cols = wide_shapes[s][1];
                nib_quantizer q = mode_of(mode);
                q.columnwise = (uint8_t)both;
                if (nib_quantizer_check(&q, NULL) || !supports(&q, rows, cols))
                    continue;
                snprintf(where, sizeof where, "%s, %lld rows of %lld%s", mode_names[mode], (long long)rows,
                         (long long)cols, both ? ", both" : "");
                const nib_array wide = random_matrix(HEAVY, both ? NIB_F32 : dtypes[mode % 3], rows, 2 * cols);
                nib_array view = wide;
                view.shape[1] = cols;
                view.strides[1] = 2;
                const nib_array plain = contiguous_copy(&view);
                nib_tensor *a = quantize(&q, &view, NULL), *b = quantize(&q, &plain, NULL);
                CHECK_SAME(a, b);
                CHECK_OK(nib_dequantize(a, NIB_ROWWISE, &view));
                CHECK_OK(nib_dequantize(a, NIB_ROWWISE, &plain));
                const nib_array back = contiguous_copy(&view);
                CHECK_THAT(memcmp(back.data, plain.data, plain.bytes) == 0, "%s: decoded otherwise", where);
                nib_tensor_destroy(a);
                nib_tensor_destroy(b);
                free(back.data);
                free(plain.data);
                free(wide.data);
            }
}

/* A view of [5, 4, 6, 320] elements: every stride has a factor and an offset of its own. */
static nib_array sliced(nib_array base, int64_t rows, int64_t cols)
{
    const int64_t shape[4] = { 2, 2, rows / 4, cols }, start[4] = { 1, 0, 1, 3 }, step[4] = { 2, 3, 1, 2 };
    for (int i = 0; i < 4; i++) {
        base.offset += (size_t)(start[i] * base.strides[i] * element_bytes(base.dtype));
        base.shape[i] = shape[i];
        base.strides[i] *= step[i];
    }
    return base;
}

static void check_layouts(nib_dtype dtype)
{
    nib_array x = random_matrix(HEAVY, dtype, 48, 320);
    const nib_array base = x;
    x = transposed_view(&base);
    check_layout("transposed", &x);

    x = base;
    x.offset = (size_t)(elements_in(x.rank, x.shape) - 1) * (size_t)element_bytes(dtype);
    x.strides[0] = -x.strides[0], x.strides[1] = -1;
    check_layout("backwards", &x);
    x.offset = (size_t)(319 * element_bytes(dtype)), x.strides[0] = -x.strides[0];
    check_layout("columns backwards", &x);

    x = base;
    x.strides[0] = 0;
    check_layout("one row", &x);
    x = base;
    x.strides[1] = 0;
    check_layout("one column", &x);
    x.strides[0] = 0;
    check_layout("one number", &x);

    x = base;
    x.shape[1] = 33, x.strides[1] = 9, x.offset = (size_t)(7 * element_bytes(dtype));
    check_layout("every ninth", &x);
    x = base;
    x.shape[1] = 100, x.offset = (size_t)(21 * element_bytes(dtype));
    check_layout("columns 21 to 120", &x);

    nib_array four = base;
    four.rank = 4;
    memcpy(four.shape, (const int64_t[]){ 4, 4, 3, 320 }, 4 * sizeof(int64_t));
    memcpy(four.strides, (const int64_t[]){ 3840, 960, 320, 1 }, 4 * sizeof(int64_t));
    check_layout("rank 4", &four);
    x = sliced(four, 8, 150);
    check_layout("slice of rank 4", &x);
    x.strides[0] = -x.strides[0], x.offset += (size_t)(-x.strides[0] * element_bytes(dtype));
    check_layout("slice of rank 4, first dim backwards", &x);
    x = four;
    x.strides[1] = 0;
    check_layout("rank 4, second dim repeated", &x);
    x = four;
    x.shape[0] = 1, x.strides[0] = 12345, x.shape[2] = 1,
    x.strides[2] = -99; /* strides of single entries mean nothing */
    check_layout("rank 4 with single entries", &x);
    free(base.data);
}

TEST(strides_do_not_matter)
{
    for (int d = 0; d < COUNT(dtypes); d++)
        check_layouts(dtypes[d]);
}

TEST(rank_one_is_a_row)
{
    const nib_array row = random_matrix(NORMAL, NIB_BF16, 1, 100);
    nib_array flat = row;
    flat.rank = 1, flat.shape[0] = 100, flat.strides[0] = 1;
    const nib_quantizer q = mode_of(RTN);
    nib_tensor *a = quantize(&q, &row, NULL), *b = quantize(&q, &flat, NULL);
    snprintf(where, sizeof where, "rank 1");
    CHECK_SAME(a, b);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    free(row.data);
}

/* An array in memory that ends where it ends (or begins where it begins), which may be read but not written. */
static nib_array guarded_copy(const nib_array *x, bool at_end)
{
    nib_array usage = *x;
    usage.data = test_guarded(x->bytes, at_end);
    memcpy(usage.data, x->data, x->bytes);
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)usage.data / page * page;
    CHECK(mprotect((void *)first, ((uintptr_t)usage.data + x->bytes - first + page - 1) / page * page, PROT_READ) == 0);
    return usage;
}

TEST(nothing_beside_the_input_is_read_and_nothing_in_it_written)
{
    const int64_t sizes[][2] = { { 1, 1 }, { 3, 5 }, { 17, 33 }, { 16, 256 }, { 15, 257 }, { 48, 16 }, { 32, 544 } };
    for (int s = 0; s < COUNT(sizes); s++)
        for (int d = 0; d < COUNT(dtypes); d++) {
            const nib_array x = random_matrix(HEAVY, dtypes[d], sizes[s][0], sizes[s][1]);
            for (int end = 0; end < 2; end++) {
                const nib_array guarded = guarded_copy(&x, end);
                check_layout("guarded", &guarded);
                const nib_array view = transposed_view(&guarded);
                check_layout("guarded, transposed", &view);
            }
            free(x.data);
        }
}

/* Lines as files keep them: the same bytes, no scale between two lines and none behind the last, which a guard ends. */
TEST(lines_without_padding)
{
    static const int64_t sizes[][2] = { { 1, 16 }, { 5, 48 },    { 17, 80 }, { 130, 144 },
                                        { 3, 33 }, { 16, 1040 }, { 7, 4112 } };
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int mode = 0; mode < MODES; mode++) {
            const int64_t rows = sizes[s][0], cols = sizes[s][1], blocks = (cols + 15) / 16, line = (cols + 1) / 2;
            const nib_quantizer q = mode_of(mode);
            if (!supports(&q, rows, cols) || !q.rowwise)
                continue;
            snprintf(where, sizeof where, "%s, %lld rows of %lld", mode_names[mode], (long long)rows, (long long)cols);
            const nib_array x = random_matrix(HEAVY, dtypes[(mode + s) % 3], rows, cols);
            nib_quantizer plain = q;
            plain.swizzled = 0;
            nib_tensor *t = quantize(&plain, &x, NULL);
            struct nib_usage_memory memory = { test_guarded((size_t)(rows * line), true),
                                               test_guarded((size_t)(rows * blocks), true),
                                               calloc((size_t)rows, sizeof(float)) };
            CHECK_OK(nib_quantize_lines(&q, &x, NULL, &memory));
            const uint8_t *scales = bytes_of(t, NIB_ROW_SCALE);
            const int64_t stride = round_up(blocks, 4);
            bool same =
                memcmp(memory.codes, bytes_of(t, NIB_ROW_DATA), (size_t)(rows * line)) == 0 &&
                memcmp(memory.tensor_scales, bytes_of(t, NIB_ROW_TENSOR_SCALE), size_of(t, NIB_ROW_TENSOR_SCALE)) == 0;
            for (int64_t r = 0; r < rows; r++)
                same = same && memcmp((uint8_t *)memory.scales + r * blocks, scales + r * stride, (size_t)blocks) == 0;
            CHECK_THAT(same, "%s: other bytes", where);
            free(memory.tensor_scales);
            nib_tensor_destroy(t);
            free(x.data);
        }
}

/* A tensor over memory full of junk that ends at a guard page. */
static nib_tensor *junk_tensor(const nib_quantizer *q, nib_dtype dtype, int64_t rows, int64_t cols)
{
    const int64_t shape[2] = { rows, cols };
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_tensor *t = NULL;
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        int rank;
        int64_t part_shape[NIB_MAX_RANK];
        CHECK_OK(nib_part_shape(q, (nib_part)part, 2, shape, &rank, part_shape));
        size_t bytes = part >= NIB_ROW_TENSOR_SCALE ? sizeof(float) : 1;
        for (int i = 0; i < rank; i++)
            bytes *= (size_t)part_shape[i];
        void *memory = test_guarded(bytes, true);
        memset(memory, 0xAA, bytes);
        CHECK_OK(nib_buffer_borrow(memory, bytes, NULL, NULL, NULL, &parts[part]));
    }
    CHECK_OK(nib_tensor_from_buffers(q, dtype, 2, shape, parts, NIB_PART_COUNT, &t));
    for (int part = 0; part < NIB_PART_COUNT; part++)
        nib_buffer_release(parts[part]);
    return t;
}

/* Every byte is written: tails, the nibble after an odd end, padding of scales. */
static void into_junk(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    if (elements_in(x->rank, x->shape) > 1500)
        return;
    nib_tensor *fresh = quantize(q, x, NULL), *junk = junk_tensor(q, x->dtype, x->shape[0], x->shape[1]);
    CHECK_OK(nib_quantize_into(NULL, x, NULL, NULL, junk));
    CHECK_SAME(fresh, junk);
    nib_tensor_destroy(fresh);
    nib_tensor_destroy(junk);
}

TEST(junk_in_the_buffers_does_not_shine_through) { for_all(into_junk); }

/* What lies past the last element is 0, in codes and in scales. */
static void check_padding(const nib_tensor *t, nib_usage which)
{
    const struct usage c = usage_of(t, which);
    int wrong = 0;
    for (int64_t line = 0; line < c.lines; line++)
        wrong += c.length % 2 && c.codes[line * c.code_stride + c.code_stride - 1] >> 4;
    for (int64_t line = 0; line < (c.lines + 127) / 128 * 128; line++)
        for (int64_t block = line < c.lines ? (c.length + 15) / 16 : 0; block < c.scale_stride; block++)
            wrong += scale_at(&c, line, block) != 0;
    CHECK_THAT(wrong == 0, "%s: %d places of padding are not 0", where, wrong);
}

/* The other fifteen elements of a block must not hear of the missing ones: a tail block equals one filled up with
 * zeros. */
static void tails(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    const int64_t rows = x->shape[0], cols = x->shape[1], wide = (cols + 15) / 16 * 16, high = (rows + 15) / 16 * 16;
    if (q->rounding != NIB_ROUND_NEAREST || q->swizzled || rows * cols > 5000)
        return;
    float *values = floats_of(x), *padded = calloc((size_t)(wide * high), sizeof *padded);
    for (int64_t i = 0; i < rows * cols; i++)
        padded[i / cols * wide + i % cols] = values[i];
    const nib_array large = matrix_from(padded, x->dtype, high, wide);
    nib_tensor *t = quantize(q, x, NULL), *p = quantize(q, &large, NULL);
    int wrong = 0;
    for (int which = 0; which < 2; which++) {
        const struct usage a = usage_of(t, (nib_usage)which), b = usage_of(p, (nib_usage)which);
        check_padding(t, (nib_usage)which);
        for (int64_t line = 0; line < a.lines; line++)
            for (int64_t i = 0; i < a.length; i++)
                wrong += code_at(&a, line, i) != code_at(&b, line, i) ||
                         scale_at(&a, line, i / 16) != scale_at(&b, line, i / 16);
    }
    CHECK_THAT(wrong == 0, "%s: %d elements differ from those of whole blocks", where, wrong);
    nib_tensor_destroy(t);
    nib_tensor_destroy(p);
    free(large.data);
    free(values);
    free(padded);
}

TEST(a_tail_is_a_block_filled_up_with_zeros) { for_all(tails); }

static void swizzle_of_compact(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    nib_quantizer tiled = *q, compact = *q;
    tiled.swizzled = 1, compact.swizzled = 0;
    nib_tensor *a = quantize(&tiled, x, NULL), *b = quantize(&compact, x, NULL);
    for (int which = 0; which < 2; which++) {
        const struct usage c = usage_of(b, (nib_usage)which);
        const nib_part part = which == NIB_ROWWISE ? NIB_ROW_SCALE : NIB_COL_SCALE;
        const size_t bytes = nib_buffer_bytes(nib_tensor_buffer(b, part));
        uint8_t *tiles = malloc(bytes);
        memset(tiles, 0xAA, bytes);
        CHECK_OK(nib_swizzle_scales(c.scales, c.lines, (c.length + 15) / 16, c.scale_stride, tiles));
        CHECK_THAT(memcmp(tiles, bytes_of(a, part), bytes) == 0, "%s: swizzled copy %d", where, which);
        free(tiles);
    }
    CHECK(same_part(a, NIB_ROW_DATA, b, NIB_ROW_DATA) && same_part(a, NIB_COL_DATA, b, NIB_COL_DATA));
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

TEST(swizzled_scales_are_the_compact_ones_swizzled) { for_all(swizzle_of_compact); }

/* ---- Back ---- */

/* To a BF16 or F16 array is to F32, then rounded; and any layout gets the same values and nothing beside them. */
static void back(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    const int64_t rows = x->shape[0], cols = x->shape[1], n = rows * cols;
    nib_tensor *t = quantize(q, x, NULL);
    float *y = malloc((size_t)n * sizeof *y);
    uint16_t *halves = malloc((size_t)n * sizeof *halves), *wanted = malloc((size_t)n * sizeof *wanted);
    float *wide = malloc((size_t)(4 * n) * sizeof *wide);
    nib_array out = { 0 }, half = { 0 };
    CHECK_OK(nib_array_init(&out, y, NIB_F32, 2, x->shape));
    for (int which = 0; which < 2; which++) {
        CHECK_OK(nib_dequantize(t, (nib_usage)which, &out));
        for (int d = 1; d < COUNT(dtypes); d++) {
            CHECK_OK(nib_array_init(&half, halves, dtypes[d], 2, x->shape));
            CHECK_OK(nib_dequantize(t, (nib_usage)which, &half));
            CHECK_OK(nib_encode(dtypes[d], y, (size_t)n, wanted));
            CHECK_THAT(memcmp(wanted, halves, (size_t)n * 2) == 0, "%s: copy %d to %s", where, which,
                       nib_dtype_name(dtypes[d]));
        }
        /* Transposed, backwards, every other element of twice as many rows. */
        nib_array view = { .data = wide,
                           .bytes = (size_t)(4 * n) * sizeof *wide,
                           .dtype = NIB_F32,
                           .rank = 2,
                           .shape = { rows, cols },
                           .strides = { -2, -4 * rows } };
        view.offset = (size_t)((4 * rows * (cols - 1) + 2 * (rows - 1))) * sizeof *wide;
        for (int64_t i = 0; i < 4 * n; i++)
            wide[i] = 12345;
        CHECK_OK(nib_dequantize(t, (nib_usage)which, &view));
        int64_t wrong = 0, untouched = 0;
        for (int64_t i = 0; i < n; i++)
            wrong += memcmp(element_at(&view, i), &y[i], sizeof *y) != 0;
        for (int64_t i = 0; i < 4 * n; i++)
            untouched += wide[i] == 12345;
        CHECK_THAT(wrong == 0 && untouched == 3 * n, "%s: copy %d, %lld wrong in a view, %lld untouched", where, which,
                   (long long)wrong, (long long)untouched);
    }
    nib_tensor_destroy(t);
    free(y);
    free(halves);
    free(wanted);
    free(wide);
}

TEST(dequantize_to_any_layout_and_dtype) { for_all(back); }

/* f = (s * amax) * (1 / 2688), value = code * f: each step rounds once. */
static void decoded_values(const nib_quantizer *q, const nib_array *x, enum kind kind)
{
    (void)kind;
    if (q->tensor_scale_rule != NIB_TENSOR_SCALE_RULE_DIALECT || q->swizzled || q->rht)
        return;
    nib_tensor *t = quantize(q, x, NULL);
    float *y = malloc((size_t)elements_in(x->rank, x->shape) * sizeof *y);
    nib_array out = { 0 };
    CHECK_OK(nib_array_init(&out, y, NIB_F32, 2, x->shape));
    for (int which = 0; which < 2; which++) {
        const struct usage c = usage_of(t, (nib_usage)which);
        CHECK_OK(nib_dequantize(t, (nib_usage)which, &out));
        int wrong = 0;
        for (int64_t line = 0; line < c.lines; line++)
            for (int64_t i = 0; i < c.length; i++) {
                const float product = e4m3[scale_at(&c, line, i / 16)] * tensor_scale_at(&c, line);
                const float inverse_rht = 1.0f / (6.0f * (float)q->e4m3_max), f = product * inverse_rht;
                const float wanted = e2m1[code_at(&c, line, i)] * f;
                const float is = y[which == NIB_ROWWISE ? line * x->shape[1] + i : i * x->shape[1] + line];
                wrong += is != wanted && !(isnan(is) && isnan(wanted));
            }
        CHECK_THAT(wrong == 0, "%s: copy %d, %d values", where, which, wrong);
    }
    nib_tensor_destroy(t);
    free(y);
}

TEST(decoded_values_are_code_times_factor) { for_all(decoded_values); }

/* y[j] = sum of sign(i) x[i] H[i][j] / 4 in double, or back (H is symmetric and orthogonal). */
static void rht(const double x[16], double y[16], unsigned mask, bool inverse_rht)
{
    for (unsigned j = 0; j < 16; j++) {
        y[j] = 0;
        for (unsigned i = 0; i < 16; i++)
            y[j] += (__builtin_popcount(i & j) % 2 ? -0.25 : 0.25) * (!inverse_rht && mask >> i & 1 ? -x[i] : x[i]);
        if (inverse_rht && mask >> j & 1)
            y[j] = -y[j];
    }
}

/*
 * z = R x and its decoded form z' differ by at most half a step of z in each element (and by one rounding to BF16,
 * 2^-9 |z|, where the input is BF16; the butterflies themselves are 5 roundings of sums of at most 16 |x|). x' = R^T
 * z' then errs by at most a quarter of the sum of those, plus 5 roundings of the sum of 16 |z'| on the way back.
 */
static double inverse_bound(const double z[16], double f, double sum, nib_dtype dtype)
{
    double bound = 0;
    for (int j = 0; j < 16; j++)
        bound += f * (half_step(z[j] / f) + 64 * U) + (dtype == NIB_BF16 ? 0x1p-9 * fabs(z[j]) : 0);
    return bound / 4 + 10 * U * sum;
}

TEST(the_transform_comes_back)
{
    fill_tables();
    const int64_t rows = 64, cols = 48;
    for (int d = 0; d < COUNT(dtypes); d++)
        for (int masked = 0; masked < 2; masked++) {
            nib_quantizer q = mode_of(RHT);
            q.rht_sign_mask = masked ? NIB_RHT_SIGN_MASK : 0;
            const nib_array array = random_matrix(NORMAL, dtypes[d], rows, cols);
            float *x = floats_of(&array), *y = malloc((size_t)(rows * cols) * sizeof *y);
            nib_array out = { 0 };
            CHECK_OK(nib_array_init(&out, y, NIB_F32, 2, array.shape));
            nib_tensor *t = quantize(&q, &array, NULL);
            for (int which = 0; which < 2; which++) {
                CHECK_OK(nib_dequantize(t, (nib_usage)which, &out));
                const struct usage c = usage_of(t, (nib_usage)which);
                const int64_t along = which == NIB_ROWWISE ? 1 : cols, across = which == NIB_ROWWISE ? cols : 1;
                for (int64_t line = 0; line < c.lines; line++)
                    for (int64_t block = 0; block < c.length / 16; block++) {
                        double in[16], z[16], sum = 0;
                        for (int i = 0; i < 16; i++) {
                            in[i] = x[line * across + (16 * block + i) * along];
                            sum += fabs(in[i]) + 8 * factor_at(&c, &q, line, block);
                        }
                        rht(in, z, q.rht_sign_mask, false);
                        const double bound = inverse_bound(z, factor_at(&c, &q, line, block), sum, dtypes[d]);
                        for (int i = 0; i < 16; i++)
                            CHECK_THAT(fabs(y[line * across + (16 * block + i) * along] - in[i]) <= bound,
                                       "%s usage %d: %a became %a, bound %a", nib_dtype_name(dtypes[d]), which, in[i],
                                       y[line * across + (16 * block + i) * along], bound);
                    }
            }
            nib_tensor_destroy(t);
            free(x);
            free(y);
            free(array.data);
        }
}

/* One number of 24 * 2^m in a block becomes sixteen of +-6 * 2^m. With a power of two for g every step is exact, so
 * that exactly the data comes back. */
TEST(the_transform_of_small_integers_is_exact)
{
    const int64_t rows = 64, cols = 80;
    for (int d = 0; d < COUNT(dtypes); d++) {
        nib_quantizer q = mode_of(RHT);
        q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
        float *x = calloc((size_t)(rows * cols), sizeof *x);
        for (int64_t block = 0; block < rows / 16; block++)
            for (int64_t c = 0; c < cols; c++)
                x[(16 * block + test_below(16)) * cols + c] = ldexpf(test_below(2) ? 24 : -24, (int)test_below(4));
        q.rowwise = 0;
        const nib_array array = matrix_from(x, dtypes[d], rows, cols), out = contiguous_copy(&array);
        memset(out.data, 0xAA, out.bytes);
        nib_tensor *t = quantize(&q, &array, NULL);
        CHECK_OK(nib_dequantize(t, NIB_COLUMNWISE, &out));
        float *y = floats_of(&out);
        int wrong = 0;
        for (int64_t i = 0; i < rows * cols; i++)
            wrong += x[i] != y[i];
        CHECK_THAT(wrong == 0, "%s: %d of %lld", nib_dtype_name(dtypes[d]), wrong, (long long)(rows * cols));
        nib_tensor_destroy(t);
        free(x);
        free(y);
        free(array.data);
        free(out.data);
    }
}

TEST_MAIN

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_stochastic.c - stochastic rounding: which random number goes to which element, shards, and what is left of
 * bias.
 *
 * The contract, restated: Philox4x32-10 with key = seed (low, high) and counter = (offset low, offset high, line,
 * block) of the copy being written, the top bit of the last set for the columnwise usage; with 16x16 blocks the
 * columnwise usage takes the rowwise numbers. 8-bit: element i takes byte i%4 of word i/4. 24-bit: element i takes the
 * top 24 bits of word i%4 at offset + i/4. With frac the place of |y| between its neighbors, the upper one is taken
 * iff floor(2^b frac) + r >= 2^b. |y| >= 6 gives 6.
 */
#include "test_codes.h"

#include <float.h>
#include <math.h>

static const nib_rounding roundings[] = { NIB_ROUND_STOCHASTIC_8, NIB_ROUND_STOCHASTIC_24,
                                          NIB_ROUND_STOCHASTIC_UNBIASED };
static const char *const rounding_names[] = { "8-bit", "24-bit", "unbiased" };
static char where[200];

/* ---- Tensors ---- */

static nib_quantizer quantizer_of(nib_rounding rounding, uint64_t seed, uint64_t offset)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.rounding = rounding;
    q.seed = seed, q.offset = offset;
    return q;
}

/* The element of the matrix that is element i of a line. */
static float value_at(const struct usage *c, const float *x, int64_t line, int64_t i)
{
    return c->which == NIB_ROWWISE ? x[line * c->length + i] : x[i * c->lines + line];
}

/* ---- The contract ---- */

static int bits_of(nib_rounding rounding) { return rounding == NIB_ROUND_STOCHASTIC_8 ? 8 : 24; }

/* The random number of an element of a copy. */
static uint32_t random_number(const nib_quantizer *q, nib_usage which, int64_t line, int64_t i)
{
    const bool square = q->block_dims[0] == 16;
    uint64_t row = (uint64_t)line, along = (uint64_t)i;
    uint32_t top = 0;
    if (which == NIB_COLUMNWISE && square)
        row = (uint64_t)i, along = (uint64_t)line; /* the rowwise number of the same element */
    if (which == NIB_COLUMNWISE && !square) {
        row += (uint64_t)q->origin[1], along += (uint64_t)q->origin[0];
        top = 0x80000000u;
    } else {
        row += (uint64_t)q->origin[0], along += (uint64_t)q->origin[1];
    }
    const bool bytes = q->rounding == NIB_ROUND_STOCHASTIC_8;
    const uint64_t offset = q->offset + (bytes ? 0 : along % 16 / 4);
    const uint32_t counter[4] = { (uint32_t)offset, (uint32_t)(offset >> 32), (uint32_t)row,
                                  (uint32_t)(along / 16) | top };
    const uint32_t key[2] = { (uint32_t)q->seed, (uint32_t)(q->seed >> 32) };
    uint32_t words[4];
    nib_philox4x32(counter, key, words);
    return bytes ? words[along % 16 / 4] >> 8 * (along % 4) & 255 : words[along % 4] >> 8;
}

/* Where |y| lies: the lower neighbor's code, the distance to the upper one, and y's share of it. */
struct place {
    int lower;
    double step, frac;
};

static struct place place_of(double y)
{
    struct place place = { 7, 2, 0 };
    for (place.lower = 7; e2m1[place.lower] > fabs(y);)
        place.lower--;
    if (place.lower < 7) {
        place.step = e2m1[place.lower + 1] - e2m1[place.lower];
        place.frac = (fabs(y) - e2m1[place.lower]) / place.step;
    }
    return place;
}

static int rounded(float y, uint32_t r, int bits)
{
    const struct place place = place_of(y);
    const bool up = floor(ldexp(place.frac, bits)) + r >= ldexp(1, bits);
    return (place.lower + up) | (signbit(y) ? 8 : 0);
}

/* te's multiplier of the elements of a block, each step one rounding. */
static float multiplier(const struct usage *c, int64_t line, int64_t block)
{
    const float tensor_scale = tensor_scale_at(c, line),
                encode = tensor_scale == 0 ? 1 : fminf(2688.0f / tensor_scale, FLT_MAX);
    const float product = e4m3[scale_at(c, line, block)] * (1.0f / encode);
    return fminf(1.0f / product, FLT_MAX);
}

static void check_codes(const nib_quantizer *q, const nib_tensor *t, nib_usage which, const float *x)
{
    const struct usage c = usage_of(t, which);
    for (int64_t line = 0; line < c.lines; line++)
        for (int64_t i = 0; i < c.length; i++) {
            const float y = value_at(&c, x, line, i) * multiplier(&c, line, i / 16);
            const int wanted = rounded(y, random_number(q, which, line, i), bits_of(q->rounding));
            if (code_at(&c, line, i) != wanted) {
                CHECK_THAT(false, "%s: copy %d line %lld element %lld: %d, not %d (y = %a)", where, (int)which,
                           (long long)line, (long long)i, code_at(&c, line, i), wanted, y);
                return;
            }
        }
}

/* Plain: rounded to nearest. Unbiased: 17/16 of it, and up below the normals. */
static uint8_t wanted_scale(float amax, float tensor_scale, nib_rounding rounding)
{
    const float encode = tensor_scale == 0 ? 1 : fminf(2688.0f / tensor_scale, FLT_MAX);
    const float pre = fminf(amax * (encode * (1.0f / 6.0f)), FLT_MAX);
    if (rounding != NIB_ROUND_STOCHASTIC_UNBIASED)
        return e4m3_code(pre);
    const float larger = pre * 1.0625f;
    return larger < 0x1p-6f ? (uint8_t)ceilf(larger * 512) : e4m3_code(larger);
}

static void check_scales(const nib_quantizer *q, const nib_tensor *t, nib_usage which, const float *x)
{
    const struct usage c = usage_of(t, which);
    const int64_t height = q->block_dims[0];
    for (int64_t line = 0; line < c.lines; line++)
        for (int64_t block = 0; block * 16 < c.length; block++) {
            float amax = 0;
            for (int64_t l = line / height * height; l < line / height * height + height && l < c.lines; l++)
                for (int64_t i = 16 * block; i < 16 * block + 16 && i < c.length; i++)
                    amax = fmaxf(amax, fabsf(value_at(&c, x, l, i)));
            const uint8_t wanted = wanted_scale(amax, tensor_scale_at(&c, line), q->rounding);
            CHECK_THAT(scale_at(&c, line, block) == wanted, "%s: copy %d line %lld block %lld: scale %02x, not %02x",
                       where, (int)which, (long long)line, (long long)block, scale_at(&c, line, block), wanted);
        }
}

static void check_tensor_scales(const nib_quantizer *q, const nib_tensor *t, nib_usage which, const float *x)
{
    const struct usage c = usage_of(t, which);
    float whole = 0;
    for (int64_t line = 0; line < c.lines; line++) {
        float amax = 0;
        for (int64_t i = 0; i < c.length; i++)
            amax = fmaxf(amax, fabsf(value_at(&c, x, line, i)));
        whole = fmaxf(whole, amax);
        const float wanted = q->rounding == NIB_ROUND_STOCHASTIC_UNBIASED ? fminf(amax * 1.0625f, FLT_MAX) : amax;
        CHECK(!c.per_line || c.tensor_scales[line] == wanted);
    }
    const float wanted = q->rounding == NIB_ROUND_STOCHASTIC_UNBIASED ? fminf(whole * 1.0625f, FLT_MAX) : whole;
    CHECK_THAT(c.per_line || c.tensor_scales[0] == wanted, "%s: tensor scale %a, not %a", where, c.tensor_scales[0],
               wanted);
}

static void check_against_contract(const nib_quantizer *q, float *x, int64_t rows, int64_t cols)
{
    const nib_array array = array_of(x, NIB_F32, DIMS(rows, cols));
    nib_tensor *t = quantize(q, &array, NULL);
    for (int which = 0; which < 2; which++) {
        check_tensor_scales(q, t, (nib_usage)which, x);
        check_scales(q, t, (nib_usage)which, x);
        check_codes(q, t, (nib_usage)which, x);
    }
    nib_tensor_destroy(t);
}

/* Some numbers lie on the grid, some far below it. */
static float *random_values(int64_t n)
{
    float *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = test_below(10) == 0 ? copysignf((float)test_below(3), test_normal())
                                   : ldexpf(test_normal(), -(int)test_below(9));
    return x;
}

TEST(every_code_by_the_contract)
{
    fill_tables();
    const int64_t shapes[][2] = { { 1, 1 },    { 3, 5 },    { 16, 16 }, { 17, 33 },
                                  { 40, 100 }, { 64, 272 }, { 1, 300 }, { 300, 1 } };
    const uint64_t seeds[] = { 0, 1, 0x123456789ABCDEFu, UINT64_MAX };
    const uint64_t offsets[] = { 0, 5, UINT32_MAX - 1, UINT64_C(1) << 32, UINT64_MAX - 1, UINT64_MAX };
    for (int s = 0; s < COUNT(shapes); s++)
        for (int r = 0; r < COUNT(roundings); r++)
            for (int form = 0; form < 3; form++)
                for (int o = 0; o < COUNT(offsets); o++) {
                    nib_quantizer q = quantizer_of(roundings[r], seeds[test_below(COUNT(seeds))], offsets[o]);
                    q.block_dims[0] = form == 1 ? 16 : 1;
                    q.row_scaled = form == 2;
                    if (test_below(2))
                        q.origin[0] = 16 * test_below(1000), q.origin[1] = 16 * test_below(1000);
                    snprintf(where, sizeof where, "%lldx%lld %s form %d offset %llx", (long long)shapes[s][0],
                             (long long)shapes[s][1], rounding_names[r], form, (unsigned long long)offsets[o]);
                    float *x = random_values(shapes[s][0] * shapes[s][1]);
                    check_against_contract(&q, x, shapes[s][0], shapes[s][1]);
                    free(x);
                }
}

/* The known answer of the generator, from its authors' test vectors. */
TEST(philox_known_answers)
{
    const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        { { 0 }, { 0 }, { 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8 } },
        { { ~0u, ~0u, ~0u, ~0u }, { ~0u, ~0u }, { 0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD } },
        { { 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344 },
          { 0xA4093822, 0x299F31D0 },
          { 0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1 } },
    };
    for (int i = 0; i < COUNT(known); i++) {
        uint32_t out[4];
        nib_philox4x32(known[i].counter, known[i].key, out);
        CHECK_BYTES(out, known[i].out, sizeof out);
    }
}

/* Integers whose transform is exact, so that the elements that are rounded are known without its arithmetic. */
TEST(transformed_data_is_rounded_by_the_same_numbers)
{
    fill_tables();
    const int64_t rows = 32, cols = 64;
    for (int r = 0; r < COUNT(roundings); r++) {
        nib_quantizer q = quantizer_of(roundings[r], 99, 12);
        q.rht = 1, q.rowwise = 0;
        float *x = malloc((size_t)(rows * cols) * sizeof *x), *z = malloc((size_t)(rows * cols) * sizeof *z);
        for (int64_t i = 0; i < rows * cols; i++)
            x[i] = (float)(4 * (test_below(101) - 50));
        for (int64_t i = 0; i < rows * cols; i++) {
            double sum = 0;
            for (unsigned k = 0; k < 16; k++)
                sum += (__builtin_popcount(k & (unsigned)(i / cols % 16)) % 2 ? -0.25 : 0.25) *
                       (NIB_RHT_SIGN_MASK >> k & 1 ? -1 : 1) * x[(i / cols / 16 * 16 + k) * cols + i % cols];
            z[i] = (float)sum;
        }
        const nib_array array = array_of(x, NIB_F32, DIMS(rows, cols));
        nib_tensor *t = quantize(&q, &array, NULL);
        snprintf(where, sizeof where, "rht %s", rounding_names[r]);
        check_tensor_scales(&q, t, NIB_COLUMNWISE, z);
        check_scales(&q, t, NIB_COLUMNWISE, z);
        check_codes(&q, t, NIB_COLUMNWISE, z);
        nib_tensor_destroy(t);
        free(x);
        free(z);
    }
}

TEST(nan_and_zeros)
{
    for (int r = 0; r < COUNT(roundings); r++) {
        const nib_quantizer q = quantizer_of(roundings[r], 3, 0);
        float x[32] = { NAN, -NAN, -0.0f, 0.0f, 6, -6 };
        const nib_array array = array_of(x, NIB_F32, DIMS(2, 16));
        nib_tensor *t = quantize(&q, &array, NULL);
        const struct usage c = usage_of(t, NIB_ROWWISE);
        CHECK(code_at(&c, 0, 0) == 7 && code_at(&c, 0, 1) == 7 && code_at(&c, 0, 2) == 8 && code_at(&c, 0, 3) == 0);
        CHECK(code_at(&c, 0, 4) % 8 >= 6 && code_at(&c, 0, 5) >= 14);
        CHECK(scale_at(&c, 1, 0) == 0 && code_at(&c, 1, 0) == 0);
        nib_tensor_destroy(t);
    }
}

TEST(the_stream_depends_on_seed_and_offset)
{
    const int64_t n = 64;
    float *x = random_values(n * n);
    const nib_array array = array_of(x, NIB_F32, DIMS(n, n));
    for (int r = 0; r < COUNT(roundings); r++) {
        const nib_quantizer streams[] = { quantizer_of(roundings[r], 1, 0), quantizer_of(roundings[r], 2, 0),
                                          quantizer_of(roundings[r], 1, 4),
                                          quantizer_of(roundings[r], 1 | UINT64_C(1) << 40, 0),
                                          quantizer_of(roundings[r], 1, UINT64_C(1) << 40) };
        nib_tensor *t[COUNT(streams)];
        for (int i = 0; i < COUNT(streams); i++) {
            t[i] = quantize(&streams[i], &array, NULL);
            for (int j = 0; j < i; j++) {
                const struct usage a = usage_of(t[i], NIB_ROWWISE), b = usage_of(t[j], NIB_ROWWISE);
                CHECK_THAT(memcmp(a.codes, b.codes, (size_t)(n * n / 2)) != 0, "streams %d and %d are the same", i, j);
            }
        }
        for (int i = 0; i < COUNT(streams); i++)
            nib_tensor_destroy(t[i]);
    }
    free(x);
}

/* ---- Shards ---- */

/* Lines and elements of a part within the whole. */
static void check_within(const struct usage *whole, const struct usage *part, int64_t row, int64_t col)
{
    const int64_t line0 = whole->which == NIB_ROWWISE ? row : col, first = whole->which == NIB_ROWWISE ? col : row;
    int wrong = 0;
    for (int64_t line = 0; line < part->lines; line++)
        for (int64_t i = 0; i < part->length; i++)
            wrong += code_at(part, line, i) != code_at(whole, line0 + line, first + i) ||
                     scale_at(part, line, i / 16) != scale_at(whole, line0 + line, (first + i) / 16) ||
                     tensor_scale_at(part, line) != tensor_scale_at(whole, line0 + line);
    CHECK_THAT(wrong == 0, "%s: the part at (%lld, %lld) differs in %d elements of copy %d", where, (long long)row,
               (long long)col, wrong, (int)whole->which);
}

struct whole {
    nib_quantizer q;
    nib_array x;
    nib_tensor *t;
    const float *amax[2]; /* before unbiased rounding enlarges them */
};

static void check_shard(const struct whole *whole, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    nib_quantizer q = whole->q;
    q.origin[0] += row, q.origin[1] += col;
    nib_array x = whole->x;
    x.offset = (size_t)(row * x.strides[0] + col) * sizeof(float);
    x.shape[0] = rows, x.shape[1] = cols;
    const nib_overrides overrides = { .bytes = sizeof overrides,
                                      .amax = { whole->amax[0] + (q.row_scaled ? row : 0),
                                                whole->amax[1] + (q.row_scaled ? col : 0) } };
    nib_tensor *t = quantize(&q, &x, &overrides);
    for (int which = 0; which < 2; which++)
        if (which == NIB_ROWWISE ? q.rowwise : q.columnwise) {
            const struct usage a = usage_of(whole->t, (nib_usage)which), b = usage_of(t, (nib_usage)which);
            check_within(&a, &b, row, col);
        }
    nib_tensor_destroy(t);
}

enum form { LINES, SQUARE, ROW_SCALED, TRANSFORMED, ROWWISE_ONLY, FORMS };

static void check_shards(nib_rounding rounding, enum form form, uint64_t offset, int64_t row0, int64_t col0)
{
    enum { ROWS = 80, COLS = 144 };
    float *x = random_values(ROWS * COLS);
    struct whole whole = { .q = quantizer_of(rounding, 0xFEEDFACE12345u, offset),
                           .x = array_of(x, NIB_F32, DIMS(ROWS, COLS)) };
    whole.q.block_dims[0] = form == SQUARE ? 16 : 1;
    whole.q.row_scaled = form == ROW_SCALED;
    whole.q.rht = form == TRANSFORMED;
    whole.q.columnwise = form != ROWWISE_ONLY;
    whole.q.origin[0] = row0, whole.q.origin[1] = col0;
    nib_quantizer nearest = whole.q;
    nearest.rounding = NIB_ROUND_NEAREST, nearest.columnwise = 1; /* its tensor scales are plain amaxes */
    nib_tensor *amaxes = quantize(&nearest, &whole.x, NULL);
    whole.t = quantize(&whole.q, &whole.x, NULL);
    for (int which = 0; which < 2; which++)
        whole.amax[which] = usage_of(amaxes, (nib_usage)which).tensor_scales;

    for (int64_t row = 0; row < ROWS; row += 32) /* by rows; the last one is shorter */
        check_shard(&whole, row, 0, row + 32 < ROWS ? 32 : ROWS - row, COLS);
    for (int64_t col = 0; col < COLS; col += 48) /* by columns */
        check_shard(&whole, 0, col, ROWS, 48);
    for (int i = 0; i < 6; i++) { /* by tiles */
        const int64_t row = 16 * test_below(5), col = 16 * test_below(9);
        check_shard(&whole, row, col, ROWS - row, COLS - col);
    }
    if (form == ROWWISE_ONLY) /* any row may begin a part when no block spans rows */
        for (int64_t row = 1; row < ROWS; row += 13)
            check_shard(&whole, row, 32, 7 < ROWS - row ? 7 : ROWS - row, 32);
    nib_tensor_destroy(amaxes);
    nib_tensor_destroy(whole.t);
    free(x);
}

TEST(shards_equal_the_whole)
{
    const uint64_t offsets[] = { 0, UINT32_MAX - 2, UINT64_MAX };
    for (int r = 0; r < COUNT(roundings); r++)
        for (int form = 0; form < FORMS; form++)
            for (int o = 0; o < COUNT(offsets); o++) {
                snprintf(where, sizeof where, "%s form %d offset %llx", rounding_names[r], form,
                         (unsigned long long)offsets[o]);
                check_shards(roundings[r], (enum form)form, offsets[o], 0, 0);
                check_shards(roundings[r], (enum form)form, offsets[o], 1600, 320);
                /* The last lines and blocks that the counter can number. */
                check_shards(roundings[r], (enum form)form, offsets[o], (INT64_C(1) << 32) - 80,
                             (INT64_C(1) << 32) - 144);
            }
    for (int r = 0; r < COUNT(roundings); r++)
        check_shards(roundings[r], ROWWISE_ONLY, 1, 0, (INT64_C(1) << 35) - 144);
}

/* ---- What the stream cannot number ---- */

/* A zero-stride input of any size: its data is never looked at. */
static nib_array vast(int64_t rows, int64_t cols)
{
    static float number;
    return (nib_array){ .data = &number, .bytes = sizeof number, .dtype = NIB_F32, .rank = 2, .shape = { rows, cols } };
}

TEST(ranges_of_the_stream)
{
    const int64_t lines = INT64_C(1) << 32, elements = INT64_C(1) << 35; /* 2^31 blocks */
    const struct {
        int rowwise, columnwise;
        int64_t row, col, rows, cols;
        bool good;
    } cases[] = {
        { 1, 0, 0, 0, lines, 16, true },
        { 1, 0, 0, 0, lines + 1, 16, false },
        { 1, 0, lines - 16, 0, 16, 16, true },
        { 1, 0, lines - 16, 0, 17, 16, false },
        { 1, 0, lines, 0, 1, 16, false },
        { 1, 0, 0, 0, 16, elements, true },
        { 1, 0, 0, 0, 16, elements + 1, false },
        { 1, 0, 0, elements - 16, 16, 16, true },
        { 1, 0, 0, elements - 16, 16, 17, false },
        { 1, 0, 0, elements, 1, 1, false },
        { 0, 1, 0, 0, 16, lines, true },
        { 0, 1, 0, 0, 16, lines + 1, false },
        { 0, 1, 0, 0, elements, 16, true },
        { 0, 1, 0, 0, elements + 1, 16, false },
        { 0, 1, elements - 16, lines - 16, 16, 16, true },
        { 0, 1, elements - 16, lines - 16, 17, 16, false },
        { 0, 1, elements - 16, lines - 16, 16, 17, false },
        { 1, 1, 0, 0, lines, lines / 256, true }, /* both usages: the narrower of the limits */
        { 1, 1, 0, 0, lines + 1, 16, false },
        { 1, 1, 0, 0, 16, lines + 1, false },
        { 1, 0, INT64_MAX - 15, 0, 16, 16, false },
        { 1, 0, 0, INT64_MAX - 15, 16, 16, false },
        { 0, 1, INT64_MAX - 15, 0, 16, 16, false },
    };
    for (int r = 0; r < COUNT(roundings); r++)
        for (int i = 0; i < COUNT(cases); i++) {
            nib_quantizer q = quantizer_of(roundings[r], 0, 0);
            CHECK_OK(nib_quantizer_set_usage(&q, cases[i].rowwise, cases[i].columnwise));
            q.origin[0] = cases[i].row, q.origin[1] = cases[i].col;
            const nib_array x = vast(cases[i].rows, cases[i].cols);
            const nib_status status = nib_quantizer_check(&q, &x);
            CHECK_THAT(status == (cases[i].good ? NIB_OK : NIB_ERR_SHAPE), "case %d: %s", i, nib_status_name(status));
            if (!cases[i].good)
                CHECK_FAILS(nib_quantizer_check(&q, &x), NIB_ERR_SHAPE, "stochastic rounding numbers 2^32");
            q.rounding = NIB_ROUND_NEAREST; /* which has no stream */
            CHECK_OK(nib_quantizer_check(&q, &x));
        }
}

/* With 16x16 blocks both usages take the rowwise numbers, so that only those have limits. */
TEST(ranges_of_the_stream_with_square_blocks)
{
    const int64_t lines = INT64_C(1) << 32, elements = INT64_C(1) << 35;
    for (int which = 0; which < 2; which++) {
        nib_quantizer q = quantizer_of(NIB_ROUND_STOCHASTIC_24, 0, 0);
        CHECK_OK(nib_quantizer_set_usage(&q, which == NIB_ROWWISE, which == NIB_COLUMNWISE));
        q.block_dims[0] = 16;
        const nib_array wide = vast(16, elements), wider = vast(16, elements + 1), high = vast(lines, 16),
                        higher = vast(lines + 1, 16);
        CHECK_OK(nib_quantizer_check(&q, &wide));
        CHECK_OK(nib_quantizer_check(&q, &high));
        CHECK_FAILS(nib_quantizer_check(&q, &wider), NIB_ERR_SHAPE, "2^31 blocks");
        CHECK_FAILS(nib_quantizer_check(&q, &higher), NIB_ERR_SHAPE, "2^32 rows");
    }
}

TEST(origins_off_a_block_border)
{
    float x[256] = { 0 };
    const nib_array array = array_of(x, NIB_F32, DIMS(16, 16));
    const struct {
        int rowwise, columnwise, square;
        int64_t row, col;
        bool good;
    } cases[] = { { 1, 0, 0, 5, 0, true },   { 1, 0, 0, 0, 5, false }, { 0, 1, 0, 0, 5, true },
                  { 0, 1, 0, 5, 0, false },  { 1, 1, 0, 5, 0, false }, { 1, 1, 0, 0, 5, false },
                  { 1, 1, 0, 32, 48, true }, { 1, 0, 1, 5, 0, false }, { 1, 0, 1, 0, 5, false },
                  { 0, 1, 1, 5, 0, false },  { 0, 1, 1, 0, 5, false }, { 1, 1, 1, 32, 48, true } };
    for (int i = 0; i < COUNT(cases); i++) {
        nib_quantizer q = quantizer_of(NIB_ROUND_STOCHASTIC_8, 0, 0);
        CHECK_OK(nib_quantizer_set_usage(&q, cases[i].rowwise, cases[i].columnwise));
        q.block_dims[0] = cases[i].square ? 16 : 1;
        q.origin[0] = cases[i].row, q.origin[1] = cases[i].col;
        nib_tensor *t = NULL;
        const nib_status status = nib_quantize(&q, &array, NULL, &t);
        CHECK_THAT(status == (cases[i].good ? NIB_OK : NIB_ERR_SHAPE), "case %d: %s", i, nib_status_name(status));
        if (!cases[i].good)
            CHECK_FAILS(nib_quantizer_check(&q, &array), NIB_ERR_SHAPE, "not at a block border");
        nib_tensor_destroy(t);
    }
}

/* ---- Bias ---- */

/*
 * For an element of scaled magnitude y = |x| * multiplier with frac between its neighbors, the random number is
 * uniform on 2^b values, so that P(up) = floor(2^b frac) / 2^b =: p is known exactly. In units of the step its error
 * (taken as positive away from zero) has the expectation p - frac, between -2^-b and 0, and the variance p (1 - p). An
 * element past 6 is clipped: its error is (6 - y) / 2, without any variance. The random numbers of different elements
 * are independent. So over any set of elements
 *     mean error = mean(p - frac), sigma = sqrt(sum p (1 - p)) / n,
 * and a correct stream stays within 5 sigma (one failure in 1.7 million, and seeds are fixed). Decoding rounds, too:
 * it yields code * F (1 +- 4 U) while y is x / F (1 +- 5 U), together at most (4 + 5) * 6.4 U in y, or 128 U in units
 * of the smallest step, 0.5.
 *
 * The second measure weighs every error by its size in the data: sum of errors / sum of |x|, likewise with step * F in
 * place of 1.
 */
#define DECODING (128 * U)

struct tally {
    double n, error, expected, variance;           /* in steps */
    double weighed, weighed_expected, weighed_var; /* in the data's units */
    double magnitude;                              /* sum of |x| */
    double clipped;
};

static void count_element(struct tally *tally, double x, double decoded, double y, double factor, int bits)
{
    const struct place place = place_of(y);
    const bool past = fabs(y) > 6;
    const double p = floor(ldexp(place.frac, bits)) * ldexp(1, -bits);
    const double expected = past ? (6 - fabs(y)) / place.step : p - place.frac;
    const double unit = place.step * factor, error = (fabs(decoded) - fabs(x)) / unit;
    tally->n++;
    tally->error += error;
    tally->expected += expected;
    tally->variance += p * (1 - p);
    tally->weighed += error * unit;
    tally->weighed_expected += expected * unit;
    tally->weighed_var += p * (1 - p) * unit * unit;
    tally->magnitude += fabs(x);
    tally->clipped += past;
}

static void add_tally(struct tally *sum, const struct tally *more)
{
    double *to = (double *)sum;
    const double *from = (const double *)more;
    for (size_t i = 0; i < sizeof *sum / sizeof *to; i++)
        to[i] += from[i];
}

static double sigma_of(const struct tally *t) { return sqrt(t->variance) / t->n; }

static void check_expectation(const struct tally *t, const char *what)
{
    const double mean = t->error / t->n, expected = t->expected / t->n;
    CHECK_THAT(fabs(mean - expected) <= 5 * sigma_of(t) + DECODING,
               "%s, %s: mean error %.3g steps, expected %.3g, sigma %.3g", where, what, mean, expected, sigma_of(t));
    const double relative = t->weighed / t->magnitude, wanted = t->weighed_expected / t->magnitude;
    const double sigma = sqrt(t->weighed_var) / t->magnitude;
    CHECK_THAT(fabs(relative - wanted) <= 5 * sigma + DECODING, "%s, %s: relative bias %.3g, expected %.3g, sigma %.3g",
               where, what, relative, wanted, sigma);
}

/* All elements and the block maxima of one usage. */
struct measured {
    struct tally all, maxima;
    double blocks, subnormal, lost;
};

static void measure_block(const struct usage *c, const float *x, const float *decoded, int bits, int64_t line,
                          int64_t block, struct measured *out)
{
    const uint8_t scale = scale_at(c, line, block);
    const double factor = e4m3[scale] * (double)tensor_scale_at(c, line) / 2688;
    const float by = multiplier(c, line, block);
    int64_t largest = 16 * block;
    out->blocks++;
    out->subnormal += scale > 0 && scale < 8;
    out->lost += scale == 0;
    if (scale == 0) /* decodes to 0: there are no steps to measure in */
        return;
    for (int64_t i = 16 * block; i < 16 * block + 16; i++)
        if (fabsf(value_at(c, x, line, i)) > fabsf(value_at(c, x, line, largest)))
            largest = i;
    for (int64_t i = 16 * block; i < 16 * block + 16; i++) {
        const float value = value_at(c, x, line, i);
        count_element(&out->all, value, value_at(c, decoded, line, i), value * by, factor, bits);
        if (i == largest)
            count_element(&out->maxima, value, value_at(c, decoded, line, i), value * by, factor, bits);
    }
}

static struct measured measure(const nib_quantizer *q, float *x, int64_t rows, int64_t cols, nib_usage which)
{
    struct measured out = { 0 };
    float *decoded = malloc((size_t)(rows * cols) * sizeof *decoded);
    const nib_array array = array_of(x, NIB_F32, DIMS(rows, cols)), back = array_of(decoded, NIB_F32, DIMS(rows, cols));
    nib_quantizer one = *q;
    CHECK_OK(nib_quantizer_set_usage(&one, which == NIB_ROWWISE, which == NIB_COLUMNWISE));
    nib_tensor *t = quantize(&one, &array, NULL);
    CHECK_OK(nib_dequantize(t, which, &back));
    const struct usage c = usage_of(t, which);
    for (int64_t line = 0; line < c.lines; line++)
        for (int64_t block = 0; block * 16 < c.length; block++)
            measure_block(&c, x, decoded, bits_of(q->rounding), line, block, &out);
    nib_tensor_destroy(t);
    free(decoded);
    return out;
}

enum { BIAS_ROWS = 256, BIAS_COLS = 512 };

/*
 * Gaussian: every block is of about the same size. Heavy: the largest element is 4, and 16x16 tiles have sizes between
 * 2^-15 and 1 for one half and between 2^-16.5 and 2^-15 for the other, where the scale, 112 * size * (the block's
 * maximum, about 2), is below 2^-6, that is a subnormal of E4M3. A few blocks (1e-3) fall under half of its smallest,
 * 2^-10, and are lost where nothing rounds them up.
 */
static float *bias_data(bool heavy)
{
    float *x = malloc(BIAS_ROWS * BIAS_COLS * sizeof *x);
    for (int64_t row = 0; row < BIAS_ROWS; row += 16)
        for (int64_t col = 0; col < BIAS_COLS; col += 16) {
            const double size = exp2(test_below(2) ? -15 - 1.5 * test_uniform() : -15 * test_uniform());
            for (int64_t i = 0; i < 256; i++)
                x[(row + i / 16) * BIAS_COLS + col + i % 16] = (float)((heavy ? size : 1) * test_normal());
        }
    if (heavy)
        x[0] = 4;
    return x;
}

/* Sums over seeds, offsets (one whose 24-bit words cross 2^32) and both usages; each by itself is within its bounds,
 * too. */
static struct measured measure_streams(nib_rounding rounding, float *x)
{
    const uint64_t seeds[] = { 1, 0x9E3779B97F4A7C15u, 42 };
    const uint64_t offsets[] = { 0, UINT32_MAX - 1, UINT64_C(1) << 63 };
    struct measured sum = { 0 };
    char name[sizeof where];
    memcpy(name, where, sizeof name);
    const int count = (getenv("NIB_CAMPAIGN") ? 50 : 1) * COUNT(seeds);
    for (int s = 0; s < count; s++)
        for (int o = 0; o < COUNT(offsets); o++) {
            const uint64_t seed = seeds[s % COUNT(seeds)] + (uint64_t)(s / COUNT(seeds));
            const nib_quantizer q = quantizer_of(rounding, seed, offsets[o]);
            const struct measured one =
                measure(&q, x, BIAS_ROWS, BIAS_COLS, (s + o) % 2 ? NIB_COLUMNWISE : NIB_ROWWISE);
            snprintf(where, sizeof where, "%.100s seed %d offset %d", name, s, o);
            check_expectation(&one.all, "all");
            check_expectation(&one.maxima, "maxima");
            add_tally(&sum.all, &one.all);
            add_tally(&sum.maxima, &one.maxima);
            sum.blocks += one.blocks;
            sum.subnormal += one.subnormal;
            sum.lost += one.lost;
        }
    memcpy(where, name, sizeof where);
    check_expectation(&sum.all, "all");
    check_expectation(&sum.maxima, "maxima");
    return sum;
}

/* Elements that are not past 6 lose at most 2^-b of a step; what clipping takes away comes on top. */
static void check_small_bias(const struct tally *t, int bits, const char *what)
{
    CHECK_THAT(t->clipped == 0, "%s, %s: %.0f clipped", where, what, t->clipped);
    CHECK_THAT(t->expected <= 0 && -t->expected / t->n <= ldexp(1, -bits), "%s, %s: expected %g", where, what,
               t->expected / t->n);
    CHECK_THAT(fabs(t->error / t->n) <= 5 * sigma_of(t) + ldexp(1, -bits) + DECODING,
               "%s, %s: bias %.3g steps, sigma %.3g", where, what, t->error / t->n, sigma_of(t));
}

/* Eight bits lose 1/512 of a step on average, which is seen at this sample size. */
static void check_eight_bits(const struct tally *t)
{
    const double mean = t->error / t->n, expected = t->expected / t->n;
    CHECK_THAT(expected < -1 / 640.0 || t->clipped, "%s: expected bias %g", where, expected);
    CHECK_THAT(mean < -5 * sigma_of(t), "%s: bias %g, sigma %g: not seen", where, mean, sigma_of(t));
}

static void check_bias(nib_rounding rounding, bool heavy, const char *name)
{
    float *x = bias_data(heavy);
    snprintf(where, sizeof where, "%s, %s data", name, heavy ? "heavy" : "Gaussian");
    const struct measured m = measure_streams(rounding, x);
    const struct tally *all = &m.all, *maxima = &m.maxima;
    if (getenv("NIB_VERBOSE"))
        printf("%-24s bias in steps: all %+.2e (expected %+.2e, sigma %.0e), maxima %+.2e (%+.2e, %.0e); clipped "
               "%.2f%% of maxima, "
               "subnormal scales %.0f%%\n",
               where, all->error / all->n, all->expected / all->n, sigma_of(all), maxima->error / maxima->n,
               maxima->expected / maxima->n, sigma_of(maxima), 100 * maxima->clipped / maxima->n,
               100 * m.subnormal / m.blocks);
    CHECK_THAT(m.lost <= (heavy && rounding != NIB_ROUND_STOCHASTIC_UNBIASED ? 0.01 * m.blocks : 0),
               "%s: %.0f blocks lost", where, m.lost);
    if (heavy)
        CHECK_THAT(m.subnormal / m.blocks > 0.3, "%s: %.0f%% subnormal scales", where, 100 * m.subnormal / m.blocks);
    if (rounding == NIB_ROUND_STOCHASTIC_8)
        check_eight_bits(all);
    if (rounding == NIB_ROUND_STOCHASTIC_UNBIASED) {
        check_small_bias(all, 24, "all");
        check_small_bias(maxima, 24, "maxima");
    } else {
        /* Scales rounded down leave maxima past 6; that is a bias, and it is seen. Subnormal scales make it large. */
        CHECK_THAT(maxima->clipped > 0.1 * maxima->n, "%s: %.0f of %.0f maxima clipped", where, maxima->clipped,
                   maxima->n);
        CHECK_THAT(maxima->error / maxima->n < -20 * sigma_of(maxima), "%s: maxima are off by %g, sigma %g", where,
                   maxima->error / maxima->n, sigma_of(maxima));
        CHECK_THAT(!heavy || maxima->error / maxima->n < -0.02, "%s: maxima are off by %g", where,
                   maxima->error / maxima->n);
    }
    free(x);
}

TEST(bias_is_what_the_probabilities_say)
{
    fill_tables();
    for (int r = 0; r < COUNT(roundings); r++) {
        check_bias(roundings[r], false, rounding_names[r]);
        check_bias(roundings[r], true, rounding_names[r]);
    }
}

/* Without the clipped elements, 24 bits have no bias that could be seen, on maxima neither. */
TEST(unclipped_elements_of_24_bits_are_unbiased)
{
    fill_tables();
    float *x = bias_data(true);
    struct tally inside = { 0 };
    for (uint64_t seed = 0; seed < 4; seed++) {
        const nib_quantizer q = quantizer_of(NIB_ROUND_STOCHASTIC_24, seed, UINT32_MAX);
        const nib_array array = array_of(x, NIB_F32, DIMS(BIAS_ROWS, BIAS_COLS));
        nib_tensor *t = quantize(&q, &array, NULL);
        const struct usage c = usage_of(t, NIB_ROWWISE);
        for (int64_t i = 0; i < BIAS_ROWS * BIAS_COLS; i++) {
            const int64_t line = i / BIAS_COLS, at = i % BIAS_COLS;
            const float y = x[i] * multiplier(&c, line, at / 16);
            const double factor = e4m3[scale_at(&c, line, at / 16)] * (double)tensor_scale_at(&c, line) / 2688;
            if (fabsf(y) <= 6)
                count_element(&inside, x[i], e2m1[code_at(&c, line, at)] * factor, y, factor, 24);
        }
        nib_tensor_destroy(t);
    }
    snprintf(where, sizeof where, "24-bit inside the range");
    check_expectation(&inside, "all");
    check_small_bias(&inside, 24, "all");
    free(x);
}

/*
 * Unbiased rounding never clips: a block's maximum m has pre-scale m / amax' * 448 (amax' = 17/16 amax), and 17/16 of
 * it is rounded to E4M3. Rounding to 3 bits of mantissa takes at most 1/17 away, so that s >= pre and y = 6 pre / s <=
 * 6; below 2^-6 it is rounded up. Only the roundings of FP32 remain: pre is 4 of them (2688/amax', times 1/6 which is
 * rounded itself, times m), times 17/16 one, the multiplier 3 more and y one: 9 U at the most. A pre-scale that FP32
 * cannot hold (a block 2^-150 of the tensor) is 0, and so is the block.
 */
static void check_never_past_six(const nib_quantizer *q, float *x, int64_t rows, int64_t cols)
{
    const nib_array array = array_of(x, NIB_F32, DIMS(rows, cols));
    nib_tensor *t = quantize(q, &array, NULL);
    for (int which = 0; which < 2; which++) {
        const struct usage c = usage_of(t, (nib_usage)which);
        double worst = 0;
        for (int64_t line = 0; line < c.lines; line++)
            for (int64_t i = 0; i < c.length; i++) {
                const float value = value_at(&c, x, line, i);
                const bool vanished = value * (2688.0f / tensor_scale_at(&c, line) * (1.0f / 6.0f)) == 0;
                const double y = vanished ? 0 : fabs((double)(value * multiplier(&c, line, i / 16)));
                worst = y > worst ? y : worst;
            }
        CHECK_THAT(worst <= 6 * (1 + 9 * U), "%s: copy %d has |y| = %.9g", where, which, worst);
    }
    nib_tensor_destroy(t);
}

TEST(unbiased_rounding_never_clips)
{
    fill_tables();
    const int64_t rows = 64, cols = 256;
    float *x = malloc((size_t)(rows * cols) * sizeof *x);
    for (int round = 0; round < 60; round++) {
        nib_quantizer q = quantizer_of(NIB_ROUND_STOCHASTIC_UNBIASED, (uint64_t)round, 0);
        q.block_dims[0] = round % 3 == 1 ? 16 : 1;
        q.row_scaled = round % 3 == 2;
        const int exponent = (int[]){ 0, 120, -120, -145, 40 }[round % 5], spread = (int[]){ 1, 6, 20, 24 }[round % 4];
        for (int64_t i = 0; i < rows * cols; i++) {
            const int block = (int)(i / 16);
            x[i] = ldexpf(test_normal(), exponent - (int)((unsigned)block * 2654435761u >> 20) % spread);
        }
        if (round % 7 == 0)
            x[5] = round % 2 ? FLT_MAX : 0.97f * FLT_MAX; /* 17/16 of it is no number */
        snprintf(where, sizeof where, "round %d", round);
        check_never_past_six(&q, x, rows, cols);
    }
    free(x);
}

TEST_MAIN

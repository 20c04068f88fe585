/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_check.c - measuring, comparing, checking and planning repairs by the API: numbers against plain definitions, what
 * threads and memory must not change, and every error. What each damage of a checkpoint is called is in
 * tests/cli/damaged.py.
 *
 * NIB_TEST_WRAP_ALLOC
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "check/check.h"
#include "io/gguf.h"
#include "io/names.h"
#include "plan/plan.h"
#include "test_alloc.h"
#include "test_weights.h"

#include <math.h>
#include <sys/stat.h>

/* ---- Pairs of a plain weight and a packed one ---- */

struct pair {
    int64_t rows, cols;
    float *a;
    uint8_t *codes, *scales;
    float tensor_scale; /* a divisor */
};

static float e4m3(uint8_t code)
{
    static float values[256];
    if (values[1] == 0)
        for (int i = 0; i < 256; i++)
            CHECK_OK(nib_decode(NIB_E4M3, &(uint8_t){ (uint8_t)i }, 1, &values[i]));
    return values[code];
}

/* Numbers to nearest with scales that are about right: some blocks clip, some underflow. */
static struct pair make_pair(int64_t rows, int64_t cols)
{
    struct pair p = { rows,
                      cols,
                      malloc((size_t)(rows * cols) * sizeof(float)),
                      malloc((size_t)(rows * cols / 2)),
                      malloc((size_t)(rows * cols / 16)),
                      4096 };
    for (int64_t b = 0; b < rows * cols / 16; b++) {
        const float size = 0.02f * expf(2 * test_normal());
        float amax = 0, scaled[16];
        for (int i = 0; i < 16; i++) {
            p.a[16 * b + i] = test_below(50) && b % 64 != 37 ? size * test_normal() : 0; /* some blocks of nothing */
            amax = fmaxf(amax, fabsf(p.a[16 * b + i]));
        }
        const float wanted = amax / 6 * p.tensor_scale * (0.8f + 0.4f * (float)test_uniform());
        CHECK_OK(nib_encode(NIB_E4M3, &wanted, 1, &p.scales[b]));
        const float factor = e4m3(p.scales[b]) / p.tensor_scale;
        for (int i = 0; i < 16; i++)
            scaled[i] = factor > 0 ? p.a[16 * b + i] / factor : 0;
        CHECK_OK(nib_encode(NIB_E2M1, scaled, 16, p.codes + 8 * b));
    }
    return p;
}

static void free_pair(struct pair *p)
{
    free(p->a);
    free(p->codes);
    free(p->scales);
}

static void put_pair(const struct pair *p)
{
    const struct item plain[] = { { "m.weight", NIB_F32, 2, { p->rows, p->cols }, p->a } };
    const struct item packed[] = {
        { "m.weight_packed", NIB_U8, 2, { p->rows, p->cols / 2 }, p->codes },
        { "m.weight_scale", NIB_E4M3, 2, { p->rows, p->cols / 16 }, p->scales },
        { "m.weight_global_scale", NIB_F32, 1, { 1 }, &p->tensor_scale },
    };
    put_tensors(at("a.safetensors"), plain, 1);
    put_tensors(at("b.safetensors"), packed, 3);
}

/* The same by the definitions, in double. */
static nib_weight_stats by_definition(const struct pair *p)
{
    nib_weight_stats s = { .bytes = sizeof s, .elements = p->rows * p->cols, .blocks = p->rows * p->cols / 16 };
    float values[16];
    nib_e2m1_values(values);
    for (int64_t i = 0; i < s.elements; i++) {
        const uint8_t scale = p->scales[i / 16], code = p->codes[i / 2] >> 4 * (i % 2) & 15;
        const float factor = e4m3(scale) / p->tensor_scale, y = values[code] * factor;
        const double x = p->a[i];
        s.codes[code]++;
        s.scales[scale] += i % 16 == 0;
        const double error = isnan(y) || !isfinite(x) ? INFINITY : fabs((double)y - x);
        s.error_squares += error * error;
        if (isfinite(x)) {
            s.sum_squares += x * x;
            s.amax = fmax(s.amax, fabs(x));
            s.zeroed += y == 0 && x != 0;
            s.clipped += fabs(x) > 6 * fabsf(factor);
        } else {
            s.nonfinite++;
        }
        if (error > s.max_error) {
            s.max_error = error;
            s.max_error_row = i / p->cols;
            s.max_error_col = i % p->cols;
        }
    }
    for (int64_t b = 0; b < s.blocks; b++) {
        bool something = false;
        for (int i = 0; i < 16; i++)
            something |= isfinite(p->a[16 * b + i]) && p->a[16 * b + i] != 0;
        s.underflowed += something && (p->scales[b] & 0x7F) < 8;
    }
    return s;
}

static bool about(double a, double b) { return a == b || fabs(a - b) <= 2e-6 * fabs(b); }

/* Whether a list has the largest of these errors. Sums of a block are in float: of two that are all but equal either may
 * come first. */
static void check_worst(const nib_worst *list, const double *squares, const double *errors, int64_t rows, int64_t cols)
{
    for (int k = 0; k < NIB_WORST; k++) {
        const int64_t at = list[k].row * cols + list[k].col / 16;
        int64_t larger = 0, at_least = 0;
        CHECK(list[k].row >= 0 && list[k].row < rows && list[k].col >= 0 && list[k].col < 16 * cols);
        if (list[k].error_squares == 0) {
            for (int64_t i = 0; i < rows * cols; i++)
                at_least += errors[i] > 0;
            CHECK(at_least <= k && list[k].row == 0 && list[k].col == 0 && list[k].sum_squares == 0);
            continue;
        }
        CHECK(about(list[k].error_squares, errors[at]) && about(list[k].sum_squares, squares[at]));
        for (int64_t i = 0; i < rows * cols; i++) {
            larger += errors[i] > errors[at] * (1 + 1e-5);
            at_least += errors[i] >= errors[at] * (1 - 1e-5);
        }
        CHECK_THAT(larger <= k && k < at_least, "place %d is number %lld", k, (long long)larger);
        for (int other = 0; other < k; other++)
            CHECK(list[other].row != list[k].row || list[other].col != list[k].col);
    }
}

static void check_places(const nib_weight_stats *got, const struct pair *p)
{
    const int64_t blocks = p->cols / 16;
    double *sums = calloc((size_t)(2 * p->rows * (blocks + 1)), sizeof *sums), *errors = sums + p->rows * blocks;
    double *row_sums = errors + p->rows * blocks, *row_errors = row_sums + p->rows;
    float values[16];
    nib_e2m1_values(values);
    for (int64_t i = 0; i < p->rows * p->cols; i++) {
        const float y = values[p->codes[i / 2] >> 4 * (i % 2) & 15] * (e4m3(p->scales[i / 16]) / p->tensor_scale);
        const double x = p->a[i], error = (double)y - x;
        sums[i / 16] += x * x;
        errors[i / 16] += error * error;
        row_sums[i / p->cols] += x * x;
        row_errors[i / p->cols] += error * error;
    }
    check_worst(got->worst_blocks, sums, errors, p->rows, blocks);
    check_worst(got->worst_rows, row_sums, row_errors, p->rows, 1);
    free(sums);
}

static void check_stats(const nib_weight_stats *got, const nib_weight_stats *want)
{
    CHECK(got->elements == want->elements && got->blocks == want->blocks && got->nonfinite == want->nonfinite);
    CHECK_THAT(about(got->sum_squares, want->sum_squares), "%g, not %g", got->sum_squares, want->sum_squares);
    CHECK_THAT(about(got->error_squares, want->error_squares), "%g, not %g", got->error_squares, want->error_squares);
    CHECK(got->amax == want->amax && about(got->max_error, want->max_error));
    CHECK_THAT(got->max_error_row == want->max_error_row && got->max_error_col == want->max_error_col,
               "the worst is at [%lld, %lld], not [%lld, %lld]", (long long)got->max_error_row,
               (long long)got->max_error_col, (long long)want->max_error_row, (long long)want->max_error_col);
    CHECK_THAT(got->zeroed == want->zeroed, "%lld zeroed, not %lld", (long long)got->zeroed, (long long)want->zeroed);
    CHECK_THAT(got->clipped == want->clipped, "%lld clipped, not %lld", (long long)got->clipped,
               (long long)want->clipped);
    CHECK_THAT(got->underflowed == want->underflowed, "%lld underflowed, not %lld", (long long)got->underflowed,
               (long long)want->underflowed);
    CHECK(memcmp(got->codes, want->codes, sizeof got->codes) == 0);
    CHECK(memcmp(got->scales, want->scales, sizeof got->scales) == 0);
}

static nib_weight_stats measured(int32_t threads, uint64_t memory)
{
    nib_checkpoint *a = open_good(at("a.safetensors")), *b = open_good(at("b.safetensors"));
    nib_weight_stats stats = { .bytes = sizeof stats };
    nib_job job;
    nib_job_init(&job);
    job.threads = threads;
    job.max_memory = memory;
    CHECK_OK(nib_checkpoint_measure(a, 0, b, 0, &job, &stats));
    nib_checkpoint_close(a);
    nib_checkpoint_close(b);
    return stats;
}

TEST(measures_by_definition)
{
    static const int64_t shapes[][2] = { { 1, 16 }, { 3, 32 }, { 40, 336 }, { 700, 1024 }, { 270000, 16 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct pair p = make_pair(shapes[i][0], shapes[i][1]);
        put_pair(&p);
        const nib_weight_stats want = by_definition(&p), got = measured(1, 0);
        check_stats(&got, &want);
        check_places(&got, &p);
        CHECK(about(nib_stats_sqnr(&got), 10 * log10(want.sum_squares / want.error_squares)));
        /* Neither threads nor memory change a bit. */
        for (int threads = 2; threads <= 5; threads += 3)
            for (uint64_t memory = shapes[i][0] < 1000 ? 1 : 8 << 20; memory <= 64 << 20; memory *= 8 << 20) {
                const nib_weight_stats again = measured(threads, memory);
                CHECK_BYTES(&got, &again, sizeof got);
            }
        free_pair(&p);
    }
}

TEST(measures_what_is_not_finite)
{
    struct pair p = make_pair(9, 64);
    p.a[5] = INFINITY;
    p.a[80] = NAN;
    p.a[81] = -INFINITY;
    p.a[200] = 3e30f; /* its square is beyond FP32 */
    put_pair(&p);
    nib_weight_stats want = by_definition(&p), got = measured(2, 0);
    CHECK(got.nonfinite == 3);
    check_stats(&got, &want);
    CHECK(isinf(got.error_squares) && got.max_error_row == 0 && got.max_error_col == 5);
    p.a[5] = p.a[80] = p.a[81] = p.a[200] = 0;
    p.scales[7] = 0x7F;
    put_pair(&p);
    got = measured(1, 0);
    CHECK(isinf(got.error_squares) && isinf(got.max_error) && got.scales[0x7F] == 1);
    CHECK(isinf(got.worst_blocks[0].error_squares) && got.worst_blocks[0].row == 7 / 4 &&
          got.worst_blocks[0].col == 48);
    CHECK(isinf(got.worst_rows[0].error_squares) && got.worst_rows[0].row == 7 / 4 && got.worst_rows[1].row != 7 / 4);
    CHECK(nib_stats_sqnr(&got) == -INFINITY);
    free_pair(&p);
}

/* The same NaN or infinity is no error, any other value is one; the rest of a is measured. */
TEST(measures_against_what_is_not_finite)
{
    static const float others[] = { 1, 0, NAN, INFINITY, -INFINITY };
    for (int64_t cols = 16; cols <= 24; cols += 8)
        for (size_t i = 2; i < 5; i++)
            for (size_t j = 0; j < 5; j++) {
                float a[24], b[24];
                for (int k = 0; k < 24; k++)
                    a[k] = b[k] = (float)(k + 1);
                a[cols - 3] = others[i];
                b[cols - 3] = others[j];
                put_tensors(at("a.safetensors"), (struct item[]){ { "m.weight", NIB_F32, 2, { 1, cols }, a } }, 1);
                put_tensors(at("b.safetensors"), (struct item[]){ { "m.weight", NIB_F32, 2, { 1, cols }, b } }, 1);
                const nib_weight_stats got = measured(1, 0);
                const double wanted = i == j ? 0 : INFINITY;
                CHECK(got.nonfinite == 1 && got.amax == (double)cols && got.zeroed == 0 && got.clipped == 0);
                CHECK(got.error_squares == wanted && got.max_error == wanted);
                CHECK(isfinite(got.sum_squares) && got.worst_rows[0].error_squares == wanted);
            }
}

TEST(measures_a_weight_with_itself)
{
    struct pair p = make_pair(24, 48);
    put_pair(&p);
    nib_checkpoint *b = open_good(at("b.safetensors"));
    nib_weight_stats stats = { .bytes = sizeof stats };
    const nib_weight_stats want = by_definition(&p);
    CHECK_OK(nib_checkpoint_measure(b, 0, b, 0, NULL, &stats));
    CHECK(stats.worst_rows[0].error_squares == 0 && stats.worst_blocks[0].error_squares == 0);
    CHECK(stats.error_squares == 0 && stats.max_error == 0 && stats.zeroed == 0 && stats.clipped == 0);
    CHECK(isinf(nib_stats_sqnr(&stats)) && isnan(nib_stats_sqnr(NULL)));
    CHECK(memcmp(stats.codes, want.codes, sizeof want.codes) == 0);
    nib_checkpoint_close(b);
    free_pair(&p);
}

/* An amax goes with the largest scale of a block: 448, or 256 of four-over-six. */
TEST(measures_saved_tensors)
{
    const float amax = 8;
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &amax, NULL } };
    struct pair p = make_pair(24, 64);
    for (int i = 0; i < 2; i++) {
        nib_quantizer q;
        nib_array x, codes, scales;
        nib_tensor *t = NULL;
        nib_writer *writer = NULL;
        nib_quantizer_init(&q);
        q.columnwise = 0;
        if (i)
            q.scale_rule = NIB_SCALE_4OVER6, q.e4m3_max = 256;
        CHECK_OK(nib_array_init(&x, p.a, NIB_F32, 2, (const int64_t[2]){ p.rows, p.cols }));
        CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
        CHECK_OK(nib_tensor_part(t, NIB_ROW_DATA, &codes));
        CHECK_OK(nib_tensor_part(t, NIB_ROW_SCALE, &scales));
        CHECK(scales.shape[1] == p.cols / 16);
        memcpy(p.codes, codes.data, (size_t)(p.rows * p.cols / 2));
        memcpy(p.scales, scales.data, (size_t)(p.rows * p.cols / 16));
        p.tensor_scale = 6 * (float)q.e4m3_max / amax;
        put_pair(&p);
        CHECK_OK(nib_writer_create(at("b.safetensors"), &writer));
        CHECK_OK(nib_writer_declare_tensor(writer, "m", t));
        CHECK_OK(nib_writer_write_tensor(writer, "m", t));
        CHECK_OK(nib_writer_commit(writer));
        nib_writer_destroy(writer);
        nib_tensor_destroy(t);
        const nib_weight_stats want = by_definition(&p), got = measured(1, 0);
        CHECK(want.clipped > 10);
        check_stats(&got, &want);
    }
    free_pair(&p);
}

static int stop(void *context, const nib_progress *progress)
{
    CHECK(progress->bytes >= sizeof *progress && progress->phase);
    ++*(int *)context;
    return 1;
}

TEST(refuses_wrong_measurements)
{
    struct pair p = make_pair(4, 32);
    put_pair(&p);
    const struct item other[] = { { "m.weight", NIB_F32, 2, { 2, 64 }, p.a },
                                  { "n.weight", NIB_F32, 2, { 1, 16 }, p.a } };
    put_tensors(at("c.safetensors"), other, 2);
    nib_checkpoint *a = open_good(at("a.safetensors")), *b = open_good(at("b.safetensors")),
                   *c = open_good(at("c.safetensors"));
    nib_weight_stats stats = { .bytes = sizeof stats };
    nib_job job;
    int calls = 0;
    nib_job_init(&job);
    CHECK_FAILS(nib_checkpoint_measure(NULL, 0, b, 0, NULL, &stats), NIB_ERR_ARG, "a is NULL");
    CHECK_FAILS(nib_checkpoint_measure(a, 0, NULL, 0, NULL, &stats), NIB_ERR_ARG, "b is NULL");
    CHECK_FAILS(nib_checkpoint_measure(a, 0, b, 0, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_checkpoint_measure(a, 1, b, 0, NULL, &stats), NIB_ERR_ARG, "there are 1 and 1");
    CHECK_FAILS(nib_checkpoint_measure(c, 0, b, 0, NULL, &stats), NIB_ERR_MISMATCH, "m is [2, 64] in");
    stats.bytes = 3;
    CHECK_FAILS(nib_checkpoint_measure(a, 0, b, 0, NULL, &stats), NIB_ERR_ARG, "out");
    stats.bytes = sizeof stats;
    job.threads = -1;
    CHECK_FAILS(nib_checkpoint_measure(a, 0, b, 0, &job, &stats), NIB_ERR_ARG, "-1 threads");
    job.threads = 2;
    job.progress = stop;
    job.context = &calls;
    CHECK_FAILS(nib_checkpoint_measure(a, 0, b, 0, &job, &stats), NIB_ERR_CANCELLED, "stopped");
    CHECK(calls == 1);
    nib_checkpoint_close(a);
    nib_checkpoint_close(b);
    nib_checkpoint_close(c);
    free_pair(&p);
}

static int count_compared(void *context, const nib_compared *compared)
{
    CHECK(compared->bytes >= sizeof *compared && compared->stats->elements == compared->rows * compared->cols);
    return --*(int *)context == 0;
}

TEST(compares_what_both_have)
{
    static const float x[128] = { 1, 2, 3 };
    const struct item left[] = { { "a.weight", NIB_F32, 2, { 2, 16 }, x },
                                 { "b.weight", NIB_F32, 2, { 4, 16 }, x },
                                 { "c.weight", NIB_F32, 2, { 1, 16 }, x },
                                 { "d.weight", NIB_F32, 2, { 1, 16 }, x } };
    const struct item right[] = { { "a.weight", NIB_F32, 2, { 2, 16 }, x },
                                  { "b.weight", NIB_F32, 2, { 2, 32 }, x },
                                  { "c.weight", NIB_F32, 2, { 1, 16 }, x },
                                  { "e.weight", NIB_F32, 2, { 1, 16 }, x } };
    put_tensors(at("a.safetensors"), left, 4);
    put_tensors(at("b.safetensors"), right, 4);
    nib_checkpoint *a = open_good(at("a.safetensors")), *b = open_good(at("b.safetensors"));
    size_t only_a = 99, only_b = 99;
    int left_to_see = 100;
    CHECK_OK(nib_checkpoint_compare(a, b, NULL, count_compared, &left_to_see, &only_a, &only_b));
    CHECK(left_to_see == 98 && only_a == 2 && only_b == 2);
    CHECK_OK(nib_checkpoint_compare(a, b, NULL, count_compared, &left_to_see, NULL, NULL));
    left_to_see = 1;
    CHECK_FAILS(nib_checkpoint_compare(a, b, NULL, count_compared, &left_to_see, &only_a, &only_b), NIB_ERR_CANCELLED,
                "stopped");
    CHECK_FAILS(nib_checkpoint_compare(NULL, b, NULL, count_compared, NULL, NULL, NULL), NIB_ERR_ARG, "a is NULL");
    CHECK_FAILS(nib_checkpoint_compare(a, NULL, NULL, count_compared, NULL, NULL, NULL), NIB_ERR_ARG, "b is NULL");
    CHECK_FAILS(nib_checkpoint_compare(a, b, NULL, NULL, NULL, NULL, NULL), NIB_ERR_ARG, "each is NULL");
    nib_job job;
    nib_job_init(&job);
    job.threads = -1;
    CHECK_FAILS(nib_checkpoint_compare(a, b, &job, count_compared, &left_to_see, NULL, NULL), NIB_ERR_ARG,
                "-1 threads");
    nib_checkpoint_close(a);
    nib_checkpoint_close(b);
}

/* ---- Checks ---- */

struct found {
    int n;
    char ids[512], fact[256]; /* the last one's */
    int stop_at, repairable;
};

static int note(void *context, const nib_finding *finding)
{
    struct found *found = context;
    CHECK(finding->bytes >= sizeof *finding && *finding->tensor && *finding->fact && *finding->consequence &&
          *finding->remedy);
    CHECK(nib_severity_name(finding->severity) != NULL);
    const size_t used = strlen(found->ids);
    snprintf(found->ids + used, sizeof found->ids - used, "%s ", finding->id);
    snprintf(found->fact, sizeof found->fact, "%s", finding->fact);
    found->repairable += finding->repairable;
    return ++found->n == found->stop_at;
}

static struct found check_file(const char *path)
{
    struct found found = { 0 };
    nib_checkpoint *c = open_good(path);
    CHECK_OK(nib_checkpoint_check(c, NULL, NULL, note, &found));
    nib_checkpoint_close(c);
    return found;
}

static uint8_t codes[4 * 64 * 64], scales[4 * 64 * 16];
static void put_group(const float *tensor_scales, const char *prefix, bool divisors);

static void fill(uint8_t scale)
{
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (uint8_t)test_random();
    memset(scales, scale, sizeof scales);
}

/* From 32 on the largest scale is large enough. */
TEST(checks_the_range_of_scales)
{
    for (uint8_t scale = 0x5F; scale <= 0x60; scale++) {
        fill(scale);
        put_group((float[]){ 4096, 4096, 4096 }, "m.", true);
        const struct found found = check_file(at("g.safetensors"));
        CHECK_THAT(strcmp(found.ids, scale < 0x60 ? "scale-range " : "") == 0, "%02x: found %s", scale, found.ids);
    }
}

/* A key that does not fit is none. */
TEST(keys_of_fused_weights)
{
    char key[32];
    CHECK(nib_ck_fused_key("a.up_proj", key, sizeof "a.{gate_proj}") && !strcmp(key, "a.{gate_proj}"));
    CHECK(!nib_ck_fused_key("a.up_proj", key, sizeof "a.{gate_proj}" - 1));
    CHECK(!nib_ck_fused_key("a.o_proj", key, sizeof key));
}

TEST(names_severities)
{
    CHECK(strcmp(nib_severity_name(NIB_SEVERITY_ERROR), "error") == 0);
    CHECK(strcmp(nib_severity_name(NIB_SEVERITY_HINT), "hint") == 0);
    CHECK(nib_severity_name(NIB_SEVERITY_COUNT) == NULL && nib_severity_name((nib_severity)-1) == NULL);
}

static int look_up(void *context, const nib_finding *finding)
{
    char row[128];
    snprintf(row, sizeof row, "\n| `%s`%s | %s |", finding->id, finding->repairable ? " *" : "",
             nib_severity_name(finding->severity));
    CHECK_THAT(strstr(context, row), "docs/check.md lacks %s", row + 1);
    return 0;
}

/* docs/check.md has every finding, its severity, and a star where it can be repaired. */
TEST(findings_are_documented)
{
    size_t bytes = 0;
    char path[4096];
    CHECK(realpath("docs/check.md", path));
    char *file = get_file(path, &bytes), *text = calloc(bytes + 1, 1);
    CHECK(file && text);
    memcpy(text, file ? file : path, file ? bytes : 0);
    struct nib_checking k = { .each = look_up, .context = text, .uniform = true };
    for (int fault = 0; fault < NIB_FAULTS; fault++)
        CHECK_OK(nib_check_found(&k, (enum nib_fault)fault, "t", "f"));
    free(file);
    free(text);
}

TEST(refuses_wrong_checks)
{
    fill(0x70);
    const struct item items[] = { { "m.weight_packed", NIB_U8, 2, { 4, 32 }, codes } };
    put_tensors(at("a.safetensors"), items, 1);
    nib_checkpoint *c = open_good(at("a.safetensors"));
    struct found found = { .stop_at = 1 };
    nib_job job;
    int calls = 0;
    CHECK_FAILS(nib_checkpoint_check(NULL, NULL, NULL, note, &found), NIB_ERR_ARG, "checkpoint is NULL");
    CHECK_FAILS(nib_checkpoint_check(c, NULL, NULL, NULL, NULL), NIB_ERR_ARG, "each is NULL");
    CHECK_FAILS(nib_checkpoint_check(c, NULL, NULL, note, &found), NIB_ERR_CANCELLED, "stopped");
    CHECK(strcmp(found.ids, "scale-missing ") == 0);
    CHECK_THAT(strstr(found.fact, " in weight_scale, and"), "%s", found.fact); /* a suffix without its dot */
    nib_job_init(&job);
    job.threads = -3;
    CHECK_FAILS(nib_checkpoint_check(c, NULL, &job, note, &found), NIB_ERR_ARG, "-3 threads");
    nib_checkpoint_close(c);

    const struct item good[] = { { "m.weight_packed", NIB_U8, 2, { 4, 32 }, codes },
                                 { "m.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                 { "m.weight_global_scale", NIB_F32, 1, { 1 }, (float[]){ 4096 } } };
    put_tensors(at("a.safetensors"), good, 3);
    c = open_good(at("a.safetensors"));
    job.threads = 1;
    job.progress = stop;
    job.context = &calls;
    CHECK_FAILS(nib_checkpoint_check(c, NULL, &job, note, &found), NIB_ERR_CANCELLED, "stopped");
    nib_checkpoint_close(c);
}

/* Whatever the finding, and whoever has it: after the call that stops there is no other. */
TEST(stops_at_any_finding)
{
    fill(0x70);
    CHECK(mkdir(at("d"), 0777) == 0);
    put_text(
        at("d/config.json"),
        "{\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\", \"ignore\": [\"x\"]}}");
    const float multiplier = 0x1p-12f, zero = 0;
    const uint8_t odd_scales[4 * 4] = { 0x7F, 0xF0, 0, 1 };
    const struct item items[] = {
        { "lm_head.weight", NIB_U8, 2, { 4, 32 }, codes },
        { "lm_head.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
        { "lm_head.weight_scale_2", NIB_F32, 0, { 0 }, &multiplier },
        { "lm_head.input_global_scale", NIB_F32, 0, { 0 }, &multiplier }, /* another format's name */
        { "m.gate.weight", NIB_U8, 2, { 4, 32 }, codes },
        { "m.gate.weight_scale", NIB_E4M3, 2, { 4, 4 }, odd_scales },
        { "m.gate.weight_scale_2", NIB_F32, 0, { 0 }, &zero },
        { "m.gate.pre_quant_scale", NIB_F32, 0, { 0 }, &multiplier },
        { "m.up.weight", NIB_F32, 2, { 4, 16 }, codes },
        { ".weight", NIB_F32, 2, { 4, 16 }, codes }, /* of no module */
        { "n.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
    };
    put_tensors(at("d/model.safetensors"), items, sizeof items / sizeof *items);
    struct found all = check_file(at("d"));
    CHECK_THAT(strcmp(all.ids,
                      "companion-misnamed pre-quant-scale codes-missing tensor-scale-not-positive scale-nan "
                      "scale-negative scale-zero scale-subnormal input-scale-missing "
                      "head-quantized router-quantized hf-config-missing config-not-ignored ") == 0,
               "found %s", all.ids);
    nib_checkpoint *c = open_good(at("d"));
    for (int i = 1; i <= all.n; i++) {
        struct found found = { .stop_at = i };
        CHECK_FAILS(nib_checkpoint_check(c, NULL, NULL, note, &found), NIB_ERR_CANCELLED, "stopped");
        CHECK_THAT(found.n == i, "%d findings behind the one that stops", found.n - i);
    }
    nib_checkpoint_close(c);
}

/* Codes that are all zero fit an original of zeros, and none that has a value, however small. */
TEST(compares_weights_of_zeros)
{
    static float plain[4 * 64];
    static const uint8_t none[4 * 32];
    fill(0x70);
    const struct item packed[] = { { "m.weight_packed", NIB_U8, 2, { 4, 32 }, none },
                                   { "m.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                   { "m.weight_global_scale", NIB_F32, 1, { 1 }, (float[]){ 4096 } } };
    const struct item original[] = { { "m.weight", NIB_F32, 2, { 4, 64 }, plain } };
    put_tensors(at("b.safetensors"), packed, 3);
    for (int i = 0; i < 2; i++) {
        plain[5] = i ? 1e-3f : 0;
        put_tensors(at("a.safetensors"), original, 1);
        nib_checkpoint *a = open_good(at("a.safetensors")), *b = open_good(at("b.safetensors"));
        struct found found = { 0 };
        CHECK_OK(nib_checkpoint_check(b, a, NULL, note, &found));
        CHECK_THAT(strcmp(found.ids, i ? "differs-from-original " : "") == 0, "found %s", found.ids);
        nib_checkpoint_close(a);
        nib_checkpoint_close(b);
    }
}

/* Block scales that clip make a weight smaller; while its codes are the nearest ones, its tensor scale is right. */
TEST(compares_weights_that_are_clipped)
{
    float plain[4 * 64];
    uint8_t packed_codes[4 * 32];
    for (size_t i = 0; i < sizeof packed_codes; i++) {
        packed_codes[i] = i % 8 ? 0x55 : 0x57;       /* 3, and one 6 in each block of 16 */
        plain[2 * i] = (i % 8 ? 3 : 9) * (1 / 32.f); /* with the scales 128 / 4096 */
        plain[2 * i + 1] = 3 / 32.f;
    }
    fill(0x70);
    const struct item packed[] = { { "m.weight_packed", NIB_U8, 2, { 4, 32 }, packed_codes },
                                   { "m.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                   { "m.weight_global_scale", NIB_F32, 1, { 1 }, (float[]){ 4096 } } };
    put_tensors(at("a.safetensors"), (struct item[]){ { "m.weight", NIB_F32, 2, { 4, 64 }, plain } }, 1);
    put_tensors(at("b.safetensors"), packed, 3);
    nib_checkpoint *a = open_good(at("a.safetensors")), *b = open_good(at("b.safetensors"));
    struct found found = { 0 };
    CHECK_OK(nib_checkpoint_check(b, a, NULL, note, &found));
    CHECK_THAT(found.n == 0, "found %s: %s", found.ids, found.fact);
    nib_checkpoint_close(a);
    nib_checkpoint_close(b);
}

/* Of groups that are none of NVFP4 the first is named, with what is wrong with it. */
TEST(names_the_first_wrong_group)
{
    fill(0x70);
    CHECK(mkdir(at("groups"), 0777) == 0);
    put_text("groups/config.json",
             "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", "
             "\"format\": \"nvfp4-pack-quantized\", \"quantization_status\": \"compressed\", \"config_groups\": {"
             "\"one\": {\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 8}}, "
             "\"two\": {\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 4, \"group_size\": 32}}}}}");
    const struct item items[] = { { "m.weight_packed", NIB_U8, 2, { 4, 32 }, codes },
                                  { "m.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                  { "m.weight_global_scale", NIB_F32, 1, { 1 }, (float[]){ 4096 } } };
    put_tensors("groups/model.safetensors", items, 3);
    const struct found found = check_file(at("groups"));
    CHECK_THAT(strcmp(found.ids, "config-scheme ") == 0, "found %s", found.ids);
    CHECK_THAT(strcmp(found.fact, "config_groups.one: weights.num_bits is 8 instead of 4") == 0, "%s", found.fact);
}

static int note_wide(void *context, const nib_finding *finding)
{
    char *facts = context;
    const size_t used = strlen(facts);
    if (!strcmp(finding->id, "config-too-wide"))
        snprintf(facts + used, 512 - used, "%s\n", finding->fact);
    return 0;
}

static int note_listed(void *context, const nib_finding *finding)
{
    char *names = context;
    const size_t used = strlen(names);
    if (!strcmp(finding->id, "config-listed"))
        snprintf(names + used, 64 - used, "%s ", finding->tensor);
    return 0;
}

/* Of each entry the first module in whose name, or that of the layer that it becomes part of, it stands without meaning it. */
TEST(entries_that_are_part_of_other_names)
{
    static const char *const names[] = { "a.down_proj", "a.up_proj", "z.last" };
    static const float multiplier = 0x1p-12f;
    static char items_names[9][32];
    struct item items[9];
    char facts[512] = "";
    fill(0x70);
    for (size_t i = 0; i < 9; i++) {
        static const char *const parts[] = { "weight", "weight_scale", "weight_scale_2" };
        const struct item of_module[] = { { "", NIB_U8, 2, { 4, 32 }, codes },
                                            { "", NIB_E4M3, 2, { 4, 4 }, scales },
                                            { "", NIB_F32, 0, { 0 }, &multiplier } };
        snprintf(items_names[i], sizeof items_names[i], "%s.%s", names[i / 3], parts[i % 3]);
        items[i] = of_module[i % 3];
        items[i].name = items_names[i];
    }
    CHECK(mkdir(at("wide"), 0777) == 0);
    put_text("wide/config.json",
             "{\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\", "
             "\"ignore\": [\"last\", \"_proj\", \"gate_up\", \"up_proj\", \"a.down\", \"nothing\", "
             "\"a.up_proj\"]}}");
    put_tensors("wide/model.safetensors", items, 9);
    nib_checkpoint *c = open_good(at("wide"));
    CHECK_OK(nib_checkpoint_check(c, NULL, NULL, note_wide, facts));
    CHECK_THAT(strcmp(facts, "the excluded \"last\" is also part of z.last\n"
                             "the excluded \"_proj\" is also part of a.down_proj\n"
                             "the excluded \"gate_up\" is also part of a.gate_up_proj\n"
                             "the excluded \"up_proj\" is also part of a.gate_up_proj\n"
                             "the excluded \"a.down\" is also part of a.down_proj\n") == 0,
               "%s", facts);
    nib_checkpoint_close(c);
}

/* What lists a parent means the modules below it, also where the name of a sibling is sorted between them. */
TEST(parents_that_are_listed)
{
    static const float multiplier = 0x1p-12f;
    fill(0x70);
    CHECK(mkdir(at("parents"), 0777) == 0);
    put_text("parents/config.json",
             "{\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"MIXED_PRECISION\", "
             "\"quantized_layers\": {\"m\": {\"quant_algo\": \"NVFP4\"}, \"m-2\": {\"quant_algo\": \"NVFP4\"}, "
             "\"m.up\": {\"quant_algo\": \"NVFP4\"}, \"m-\": {\"quant_algo\": \"NVFP4\"}, "
             "\"m.u\": {\"quant_algo\": \"NVFP4\"}, \"z\": {\"quant_algo\": \"NVFP4\"}}}}");
    const struct item items[] = { { "m-2.weight", NIB_U8, 2, { 4, 32 }, codes },
                                  { "m-2.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                  { "m-2.weight_scale_2", NIB_F32, 0, { 0 }, &multiplier },
                                  { "m.up.weight", NIB_U8, 2, { 4, 32 }, codes },
                                  { "m.up.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                  { "m.up.weight_scale_2", NIB_F32, 0, { 0 }, &multiplier } };
    char names[64] = "";
    put_tensors("parents/model.safetensors", items, 6);
    nib_checkpoint *c = open_good(at("parents"));
    CHECK_OK(nib_checkpoint_check(c, NULL, NULL, note_listed, names));
    CHECK_THAT(strcmp(names, "m- m.u z ") == 0, "listed and not quantized: %s", names);
    nib_checkpoint_close(c);
}

static int note_unlisted(void *context, const nib_finding *finding)
{
    char *names = context;
    const size_t used = strlen(names);
    if (!strcmp(finding->id, "config-unlisted"))
        snprintf(names + used, 1400 - used, "%s ", finding->tensor);
    return 0;
}

/* Each allocation that fails is told, and not taken for an answer. */
static void check_without_memory(const nib_checkpoint *c)
{
    bool failed = true;
    const nib_job job = { .bytes = sizeof job, .threads = 1 };
    for (long left = 0; failed && !test_failures; left++) {
        char nothing[1400] = "";
        allocations_left = left;
        const nib_status status = nib_checkpoint_check(c, NULL, &job, note_unlisted, nothing);
        failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(status == (failed ? NIB_ERR_MEMORY : NIB_OK) && (failed || left > 10), "allocation %ld: %s", left,
                   nib_status_name(status));
    }
}

static int note_mixture(void *context, const nib_finding *finding)
{
    char *facts = context;
    const size_t used = strlen(facts);
    if (!strcmp(finding->id, "config-mixture"))
        snprintf(facts + used, 512 - used, "%s: %s\n", finding->tensor, finding->fact);
    return 0;
}

/* A target that nobody understands, or that is no text, takes nothing from those behind it. Of classes the first one
 * counts, also for a name that a target takes too long on. */
TEST(groups_that_name_modules_and_classes)
{
    static const char *const names[] = { "a.up", "c.up", "d.up", "eeeeeeeeeeeeeeeeeeeeeeeeeeeeee.up" };
    static const float multiplier = 4096, scale = 1;
    static char items_names[12][64];
    struct item items[14] = { [12] = { "b.up.weight", NIB_E4M3, 2, { 4, 64 }, codes },
                              [13] = { "b.up.weight_scale", NIB_F32, 2, { 1, 1 }, &scale } };
    char facts[512] = "";
    fill(0x70);
    for (size_t i = 0; i < 12; i++) {
        static const char *const parts[] = { "weight_packed", "weight_scale", "weight_global_scale" };
        const struct item of_module[] = { { "", NIB_U8, 2, { 4, 32 }, codes },
                                          { "", NIB_E4M3, 2, { 4, 4 }, scales },
                                          { "", NIB_F32, 1, { 1 }, &multiplier } };
        snprintf(items_names[i], sizeof items_names[i], "%s.%s", names[i / 3], parts[i % 3]);
        items[i] = of_module[i % 3];
        items[i].name = items_names[i];
    }
    CHECK(mkdir(at("classes"), 0777) == 0);
    put_text("classes/config.json",
             "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"format\": \"mixed-precision\", "
             "\"quantization_status\": \"compressed\", \"config_groups\": {"
             "\"one\": {\"targets\": [\"re:(\", 5, \"Linear\"], \"format\": \"float-quantized\", "
             "\"weights\": {\"num_bits\": 8, \"strategy\": \"tensor\"}}, "
             "\"two\": {\"targets\": [\"re:a[.].*\", \"re:(e+)+[XY]\"], \"format\": \"nvfp4-pack-quantized\", "
             "\"weights\": {\"num_bits\": 4, \"group_size\": 16}}, "
             "\"three\": {\"targets\": [\"Linear\", \"d.up\"], \"format\": \"nvfp4-pack-quantized\", "
             "\"weights\": {\"num_bits\": 4, \"group_size\": 16}}}}}");
    put_tensors("classes/model.safetensors", items, 14);
    nib_checkpoint *c = open_good(at("classes"));
    CHECK_OK(nib_checkpoint_check(c, NULL, NULL, note_mixture, facts));
    check_without_memory(c);
    CHECK_THAT(strcmp(facts, "c.up: it is NVFP4, and its group says 8 bits\n"
                             "eeeeeeeeeeeeeeeeeeeeeeeeeeeeee.up: it is NVFP4, and its group says 8 bits\n") == 0,
               "%s", facts);
    nib_checkpoint_close(c);
}

/* A stack is listed by its module, or by anything below this: not by what stands beside it, nor one with a name that is
 * longer than any. */
TEST(stacks_that_are_listed)
{
    enum { STACKS = 7 };
    static char long_name[1100], items_names[STACKS * 3][1200];
    static const char *const modules[STACKS] = { "a.experts", "b.experts", "c.experts", "d.experts",
                                                 "e.experts", "f.experts", long_name };
    static const char *const ends[] = { "", "_weight_scale", "_weight_scale_2" };
    static const float tensor_scale = 1.0f / 4096;
    struct item items[STACKS * 3];
    char names[1400] = "";
    fill(0x70);
    snprintf(long_name, sizeof long_name, "%01080d.experts", 0);
    for (size_t i = 0; i < STACKS * 3; i++) {
        const struct item of_stack[] = { { "", NIB_U8, 3, { 2, 32, 32 }, codes },
                                         { "", NIB_E4M3, 3, { 2, 4, 32 }, scales },
                                         { "", NIB_F32, 0, { 0 }, &tensor_scale } };
        snprintf(items_names[i], sizeof items_names[i], "%s.gate_up_proj%s", modules[i / 3], ends[i % 3]);
        items[i] = of_stack[i % 3];
        items[i].name = items_names[i];
    }
    CHECK(mkdir(at("stacks"), 0777) == 0);
    put_text("stacks/config.json",
             "{\"model_type\": \"llama4\", \"hidden_size\": 64, \"intermediate_size\": 16, "
             "\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"MIXED_PRECISION\", "
             "\"quantized_layers\": {\"a.experts\": {\"quant_algo\": \"NVFP4\"}, "
             "\"b.experts.1.up_proj\": {\"quant_algo\": \"NVFP4\"}, "
             "\"c.shared.up_proj\": {\"quant_algo\": \"NVFP4\"}, "
             "\"d.experts-2.up_proj\": {\"quant_algo\": \"NVFP4\"}, "
             "\"f.experts\": {\"quant_algo\": \"NVFP4\"}, \"f.experts.gate_up_proj\": {\"quant_algo\": \"FP8\"}, "
             "\"e.experts.1.up_proj\": {\"quant_algo\": \"FP8\"}}}}");
    put_tensors("stacks/model.safetensors", items, STACKS * 3);
    nib_checkpoint *c = open_good(at("stacks"));
    CHECK_OK(nib_checkpoint_check(c, NULL, NULL, note_unlisted, names));
    check_without_memory(c);
    CHECK_THAT(strncmp(names, "000", 3) == 0 && strcmp(strchr(names, ' '), " c.experts.gate_up_proj d.experts.gate_up_proj "
                                                                           "e.experts.gate_up_proj ") == 0,
               "quantized and not listed: %s", names);
    nib_checkpoint_close(c);
}

/* Where nothing says so, activations are quantized if any module has a scale of them. */
TEST(scales_of_activations_without_a_configuration)
{
    static const float multiplier = 4096;
    fill(0x70);
    const struct item items[] = { { "a.weight_packed", NIB_U8, 2, { 4, 32 }, codes },
                                  { "a.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                  { "a.weight_global_scale", NIB_F32, 1, { 1 }, &multiplier },
                                  { "b.weight_packed", NIB_U8, 2, { 4, 32 }, codes },
                                  { "b.weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                  { "b.weight_global_scale", NIB_F32, 1, { 1 }, &multiplier },
                                  { "b.input_global_scale", NIB_F32, 1, { 1 }, &multiplier } };
    for (size_t n = 6; n <= 7; n++) {
        put_tensors(at("i.safetensors"), items, n);
        const struct found found = check_file(at("i.safetensors"));
        CHECK_THAT(strcmp(found.ids, n == 6 ? "" : "input-scale-missing ") == 0, "found %s", found.ids);
    }
}

/* Where llama.cpp multiplies without a tensor scale, one that is 1 is not missed. */
TEST(checks_scales_that_llama_cpp_ignores)
{
    enum { R = 4, K = 64 };
    for (int i = 0; i < 2; i++) {
        const float tensor_scale = i ? 0x1p-12f : 1;
        uint8_t blocks[R * 36];
        nib_gguf_plan *plan = NULL;
        nib_gguf_writer *writer = NULL;
        fill(0x60);
        CHECK(nib_gguf_nvfp4_join(codes, scales, R, blocks) == 0);
        CHECK_OK(nib_gguf_plan_create(at("m.gguf"), &plan));
        CHECK_OK(nib_gguf_put_string(plan, "general.architecture", "qwen2moe"));
        CHECK_OK(nib_gguf_declare(plan, "blk.0.ffn_up.weight", NIB_GGUF_NVFP4, 2, (int64_t[]){ R, K }));
        CHECK_OK(nib_gguf_declare(plan, "blk.0.ffn_up.scale", NIB_GGUF_F32, 1, (int64_t[]){ 1 }));
        CHECK_OK(nib_gguf_writer_create(plan, &writer));
        CHECK_OK(nib_gguf_write(writer, 0, 0, blocks, sizeof blocks));
        CHECK_OK(nib_gguf_write(writer, 1, 0, &tensor_scale, sizeof tensor_scale));
        CHECK_OK(nib_gguf_commit(writer));
        nib_gguf_writer_destroy(writer);
        nib_gguf_plan_destroy(plan);
        const struct found found = check_file(at("m.gguf"));
        CHECK_THAT(strcmp(found.ids, i ? "gguf-scale-ignored " : "") == 0, "%g: found %s", (double)tensor_scale,
                   found.ids);
    }
}

/* A stack of experts as ModelOpt writes it for some families. */
TEST(checks_stacks)
{
    static const float tensor_scale = 1.0f / 4096;
    fill(0x70);
    FILE *config = fopen(at("config.json"), "w");
    fputs("{\"model_type\": \"llama4\", \"hidden_size\": 64, \"intermediate_size\": 16, "
          "\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"W4A16_NVFP4\"}}",
          config);
    fclose(config);
    struct item items[] = {
        { "l.feed_forward.experts.gate_up_proj", NIB_U8, 3, { 2, 32, 32 }, codes },
        { "l.feed_forward.experts.gate_up_proj_weight_scale", NIB_E4M3, 3, { 2, 4, 32 }, scales },
        { "l.feed_forward.experts.gate_up_proj_weight_scale_2", NIB_F32, 0, { 0 }, &tensor_scale },
    };
    put_tensors(at("s.safetensors"), items, 3);
    struct found found = check_file(at("s.safetensors"));
    CHECK_THAT(found.n == 0, "found %s", found.ids);
    items[1].shape[1] = 5;
    put_tensors(at("s.safetensors"), items, 3);
    found = check_file(at("s.safetensors"));
    CHECK_THAT(strcmp(found.ids, "scale-shape ") == 0, "found %s", found.ids);
    items[1].shape[1] = 4;
    scales[3] = 0xF0;
    put_tensors(at("s.safetensors"), items, 3);
    found = check_file(at("s.safetensors"));
    CHECK_THAT(strcmp(found.ids, "scale-negative ") == 0, "found %s", found.ids);
    items[2].rank = 1;
    items[2].shape[0] = 2; /* a number for each expert is as good */
    items[2].data = (float[]){ tensor_scale, tensor_scale };
    scales[3] = 0x70;
    put_tensors(at("s.safetensors"), items, 3);
    found = check_file(at("s.safetensors"));
    CHECK_THAT(found.n == 0, "found %s", found.ids);
    remove(at("config.json"));
}

/* Codes without a dim are no stack; those read beyond, of the tensor behind it, would be 1000 experts. */
TEST(checks_stacks_of_no_rank)
{
    static const float tensor_scales[1000];
    fill(0x70);
    const struct item items[] = { { "a.experts.down_proj", NIB_U8, 0, { 0 }, codes },
                                  { "a.experts.down_proj_weight_scale", NIB_E4M3, 2, { 1000, 1 }, scales },
                                  { "a.experts.down_proj_weight_scale_2", NIB_F32, 1, { 1000 }, tensor_scales },
                                  { "b", NIB_U8, 1, { 1000 }, codes } };
    put_tensors(at("r.safetensors"), items, 4);
    const struct found found = check_file(at("r.safetensors"));
    CHECK_THAT(strcmp(found.ids, "codes-shape tensor-scale-shape ") == 0, "found %s", found.ids);
}

/* Three layers of two weights that multiply the same input, whose large columns are the same; in the last one's second
 * weight they are where their neighbors should be. */
static void put_pairs(const char *first, const char *second)
{
    enum { LAYERS = 3, ROWS = 32, COLS = 512 };
    static uint8_t pairs[2][ROWS * COLS / 2];
    static char names[LAYERS * 2 * 3][64];
    static const float multiplier = 4096;
    struct item items[LAYERS * 2 * 3];
    for (size_t i = 0; i < sizeof pairs[0]; i++) {
        const uint8_t large_first = (i % (COLS / 2)) * 2654435761u >> 16 & 1;
        pairs[0][i] = large_first ? 0x17 : 0x71;
        pairs[1][i] = (uint8_t)(pairs[0][i] << 4 | pairs[0][i] >> 4);
    }
    for (size_t i = 0; i < LAYERS * 2; i++) {
        const struct item of_weight[] = {
            { "weight_packed", NIB_U8, 2, { ROWS, COLS / 2 }, pairs[i == LAYERS * 2 - 1] },
            { "weight_scale", NIB_E4M3, 2, { ROWS, COLS / 16 }, scales },
            { "weight_global_scale", NIB_F32, 1, { 1 }, &multiplier },
        };
        for (size_t j = 0; j < 3; j++) {
            snprintf(names[3 * i + j], sizeof names[0], "m.layers.%zu.%s.%s", i / 2, i % 2 ? second : first,
                     of_weight[j].name);
            items[3 * i + j] = of_weight[j];
            items[3 * i + j].name = names[3 * i + j];
        }
    }
    put_tensors(at("p.safetensors"), items, LAYERS * 2 * 3);
}

TEST(guesses_the_order_of_nibbles)
{
    fill(0x70);
    put_pairs("mlp.gate_proj", "mlp.up_proj");
    struct found found = check_file(at("p.safetensors"));
    CHECK_THAT(strcmp(found.ids, "maybe-swapped ") == 0, "found %s", found.ids);
    nib_checkpoint *c = open_good(at("p.safetensors"));
    found = (struct found){ .stop_at = 1 };
    CHECK_FAILS(nib_checkpoint_check(c, NULL, NULL, note, &found), NIB_ERR_CANCELLED, "stopped");
    nib_checkpoint_close(c);
    put_pairs("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"); /* these need not agree */
    found = check_file(at("p.safetensors"));
    CHECK_THAT(found.n == 0, "found %s", found.ids);
}

/* Weights whose numbers say nothing: no elements, and dims that no file can fill. */
TEST(checks_empty_tensors)
{
    const struct item items[] = { { "a.weight_packed", NIB_U8, 2, { 0, 8 }, codes },
                                  { "a.weight_scale", NIB_E4M3, 2, { 0, 1 }, scales },
                                  { "a.weight_global_scale", NIB_F32, 1, { 1 }, (float[]){ 1 } },
                                  { "b.weight_packed", NIB_U8, 2, { (int64_t)1 << 62, 0 }, codes },
                                  { "b.weight_scale", NIB_E4M3, 2, { 0, (int64_t)1 << 62 }, scales },
                                  { "b.weight_global_scale", NIB_F32, 1, { 0 }, (float[]){ 1 } } };
    put_tensors(at("e.safetensors"), items, 6);
    const struct found found = check_file(at("e.safetensors"));
    CHECK_THAT(strcmp(found.ids, "codes-shape tensor-scale-shape ") == 0, "found %s", found.ids);
}

/* No file bounds the other dims of a tensor without elements: memory, time and products must not follow them. */
TEST(checks_dims_that_nothing_fills)
{
    const int64_t large = (int64_t)1 << 47;
    const struct {
        int64_t codes[2], scales[2];
        nib_dtype dtype;
        const char *ids;
    } cases[] = {
        { { 0, large }, { 0, large / 8 }, NIB_E4M3, "" },              /* no row, however long */
        { { large, 0 }, { large, 0 }, NIB_E4M3, "" },                  /* rows of nothing */
        { { large - 1, 0 }, { large, 0 }, NIB_E4M3, "scale-padded " }, /* padding of nothing */
        { { 0, 0 },
          { 0, (int64_t)1 << 60 },
          NIB_U8,
          "scale-dtype tensor-scale-missing " }, /* 16 times as many are 0 in 64 bits */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct item items[] = {
            { "a.weight_packed", NIB_U8, 2, { cases[i].codes[0], cases[i].codes[1] }, codes },
            { "a.weight_scale", cases[i].dtype, 2, { cases[i].scales[0], cases[i].scales[1] }, scales },
            { "a.weight_global_scale", NIB_F32, 1, { 1 }, (float[]){ 1 } }
        };
        /* Without a global scale U8 scales may be MXFP4's. */
        put_tensors(at("d.safetensors"), items, cases[i].dtype == NIB_U8 ? 2 : 3);
        const struct found found = check_file(at("d.safetensors"));
        CHECK_THAT(strcmp(found.ids, cases[i].ids) == 0, "case %zu: found %s", i, found.ids);
    }
}

/* ---- Repairs ---- */

/* q, k and v with tensor scales of their own. */
static void put_group(const float *tensor_scales, const char *prefix, bool divisors)
{
    static char names[16][64];
    struct item items[9];
    size_t n = 0;
    for (int i = 0; i < 3; i++) {
        const char *last = (const char *[]){ "q_proj", "k_proj", "v_proj" }[i];
        snprintf(names[n], 64, "%s%s.%s", prefix, last, divisors ? "weight_packed" : "weight");
        items[n] = (struct item){ names[n], NIB_U8, 2, { 4, 32 }, codes };
        n++;
        snprintf(names[n], 64, "%s%s.weight_scale", prefix, last);
        items[n] = (struct item){ names[n], NIB_E4M3, 2, { 4, 4 }, scales };
        n++;
        snprintf(names[n], 64, "%s%s.%s", prefix, last, divisors ? "weight_global_scale" : "weight_scale_2");
        items[n] = (struct item){ names[n], NIB_F32, divisors ? 1 : 0, { 1 }, &tensor_scales[i] };
        n++;
    }
    put_tensors(at("g.safetensors"), items, n);
}

static int watch(void *context, const nib_progress *progress)
{
    uint64_t *last = context;
    CHECK_THAT(progress->total > 0 && progress->total < 1 << 20 && progress->done <= progress->total, "%llu of %llu",
               (unsigned long long)progress->done, (unsigned long long)progress->total);
    last[0] = progress->done;
    last[1] = progress->total;
    return 0;
}

TEST(checks_tell_how_far_they_are)
{
    fill(0x70);
    put_group((float[]){ 4096, 4096, 4096 }, "m.", true);
    nib_checkpoint *c = open_good(at("g.safetensors"));
    struct found found = { 0 };
    uint64_t last[2] = { 0, 1 };
    nib_job job;
    nib_job_init(&job);
    job.progress = watch;
    job.context = last;
    CHECK_OK(nib_checkpoint_check(c, NULL, &job, note, &found));
    CHECK_THAT(3 * last[0] == 2 * last[1], "%llu of %llu before the last of three weights", (unsigned long long)last[0],
               (unsigned long long)last[1]);
    nib_checkpoint_close(c);
}

/* A caller that stops at what differs from the original, whatever it is. */
TEST(checks_against_an_original_can_be_stopped)
{
    float x[4 * 64];
    for (int i = 0; i < 4 * 64; i++)
        x[i] = test_normal();
    fill(0x70);
    put_group((float[]){ 4096, 4096, 4096 }, "m.", true);
    const struct item items[] = { { "m.q_proj.weight", NIB_F32, 2, { 4, 64 }, x },
                                  { "m.k_proj.weight", NIB_F32, 2, { 4, 64 }, x },
                                  { "m.v_proj.weight", NIB_F32, 2, { 2, 64 }, x } };
    put_tensors(at("o.safetensors"), items, 3);
    nib_checkpoint *c = open_good(at("g.safetensors")), *original = open_good(at("o.safetensors"));
    struct found all = { 0 };
    CHECK_OK(nib_checkpoint_check(c, original, NULL, note, &all));
    CHECK_THAT(all.n == 3 && strstr(all.ids, "weight-shape"), "%s", all.ids);
    for (int i = 1; i <= all.n; i++) {
        struct found found = { .stop_at = i };
        CHECK_FAILS(nib_checkpoint_check(c, original, NULL, note, &found), NIB_ERR_CANCELLED, "stopped");
        CHECK(found.n == i);
    }
    nib_checkpoint_close(c);
    nib_checkpoint_close(original);
}

/* Block scales up to 32 of 448 and no more: the tensor scale could be smaller. */
TEST(scales_in_too_small_a_range)
{
    for (uint8_t scale = 0x5E; scale < 0x62; scale++) {
        fill(scale);
        put_group((float[]){ 4096, 4096, 4096 }, "m.", true);
        const struct found found = check_file(at("g.safetensors"));
        CHECK_THAT(!strstr(found.ids, "scale-range") == (scale >= 0x60), "%02X: %s", (unsigned)scale, found.ids);
    }
}

/* Carry a repair out, and compare: codes as they were, one tensor scale, and scales that are nearest to what they were. */
static void check_repair(bool divisors, const float *tensor_scales, float shared)
{
    put_group(tensor_scales, "m.", divisors);
    nib_checkpoint *in = open_good(at("g.safetensors"));
    nib_plan *plan = NULL;
    nib_plan_facts facts = { .bytes = sizeof facts };
    const nib_run_options run = { .bytes = sizeof run, .force = 1 };
    CHECK_OK(nib_plan_repair(in, &plan));
    if (!plan) {
        nib_checkpoint_close(in);
        return;
    }
    CHECK_OK(nib_plan_get_facts(plan, &facts));
    size_t differing = 0;
    for (int i = 0; i < 3; i++)
        differing += tensor_scales[i] != shared;
    CHECK_THAT(facts.weights == 3 && facts.changed == differing, "%zu of %zu change, not %zu", facts.changed,
               facts.weights, differing);
    CHECK_OK(nib_plan_run(plan, at("h.safetensors"), &run, NULL));
    nib_checkpoint *out = open_good(at("h.safetensors"));
    for (size_t i = 0; i < 3 && out; i++) {
        uint8_t was[2][4 * 36], is[2][4 * 36];
        nib_weight a = { .bytes = sizeof a }, b = { .bytes = sizeof b };
        CHECK_OK(nib_checkpoint_get_weight(in, i, &a));
        CHECK_OK(nib_checkpoint_get_weight(out, i, &b));
        CHECK_OK(nib_checkpoint_read_codes(in, i, 0, 4, was[0], was[1]));
        CHECK_OK(nib_checkpoint_read_codes(out, i, 0, 4, is[0], is[1]));
        CHECK_BYTES(was[0], is[0], 4 * 32);
        CHECK_THAT(b.tensor_scale == shared, "%s has tensor scale %g, not %g", b.name, (double)b.tensor_scale,
                   (double)shared);
        const float ratio = divisors ? shared / a.tensor_scale : a.tensor_scale / shared;
        for (int s = 0; s < 16; s++) {
            const float wanted = e4m3(was[1][s]) * ratio;
            uint8_t nearest;
            CHECK_OK(nib_encode(NIB_E4M3, &wanted, 1, &nearest));
            if (!(nearest & 0x7F) && (was[1][s] & 0x7F))
                nearest = 1;
            CHECK_THAT(is[1][s] == nearest, "scale 0x%02x times %g is 0x%02x, not 0x%02x", was[1][s], (double)ratio,
                       is[1][s], nearest);
        }
    }
    nib_checkpoint_close(out);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    const struct found found = check_file(at("h.safetensors"));
    CHECK_THAT(strstr(found.ids, "fused") == NULL, "found %s", found.ids);
    remove(at("h.safetensors"));
}

TEST(repairs_shared_scales)
{
    fill(0);
    for (int i = 0; i < 16; i++)
        scales[i] = (uint8_t)(i < 14 ? 8 * i + 6 : i == 14 ? 0x7E : 1);
    check_repair(true, (float[]){ 4096, 8192, 4096 }, 4096);
    check_repair(true, (float[]){ 12343, 5334, 8001 }, 5334);
    check_repair(false, (float[]){ 0x1p-12f, 0x1p-14f, 0x1p-13f }, 0x1p-12f);
    check_repair(false, (float[]){ 1e-4f, 3e-4f, 2.14e-4f }, 3e-4f);
}

/* Numbers of a stack are put right beside its codes. */
TEST(repairs_stacks)
{
    static const float inverted = 4096, good = 0x1p-12f, zero = 0;
    const struct item items[] = {
        { "l.feed_forward.experts.gate_up_proj", NIB_U8, 3, { 2, 32, 32 }, codes },
        { "l.feed_forward.experts.gate_up_proj_weight_scale", NIB_E4M3, 3, { 2, 4, 32 }, scales },
        { "l.feed_forward.experts.gate_up_proj_weight_scale_2", NIB_F32, 0, { 0 }, &inverted },
        { "l.feed_forward.experts.down_proj", NIB_U8, 3, { 2, 8, 64 }, codes },
        { "l.feed_forward.experts.down_proj_weight_scale", NIB_E4M3, 3, { 2, 1, 64 }, scales },
        { "l.feed_forward.experts.down_proj_weight_scale_2", NIB_F32, 0, { 0 }, (float[]){ 0x1p-13f } },
        { "l.feed_forward.experts.down_proj_input_scale", NIB_F32, 0, { 0 }, &zero },
    };
    fill(0x70);
    FILE *config = fopen(at("config.json"), "w");
    fputs("{\"model_type\": \"llama4\", \"hidden_size\": 64, \"intermediate_size\": 16, "
          "\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\"}}",
          config);
    fclose(config);
    put_tensors(at("s.safetensors"), items, 7);
    struct found found = check_file(at("s.safetensors"));
    CHECK_THAT(strstr(found.ids, "tensor-scale-inverted") && strstr(found.ids, "input-scale-missing") &&
                   strstr(found.ids, "input-scale-not-positive"),
               "found %s", found.ids);
    nib_checkpoint *in = open_good(at("s.safetensors"));
    nib_plan *plan = NULL;
    const nib_run_options run = { .bytes = sizeof run, .force = 1 };
    nib_plan_facts facts = { .bytes = sizeof facts };
    CHECK_OK(nib_plan_repair(in, &plan));
    CHECK_OK(nib_plan_get_facts(plan, &facts));
    CHECK_THAT(facts.changed == 6 && facts.kept == 0, "%zu of %zu change", facts.changed, facts.weights);
    CHECK_OK(nib_plan_run(plan, at("h.safetensors"), &run, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    found = check_file(at("h.safetensors"));
    CHECK_THAT(found.n == 0, "found %s", found.ids);
    nib_checkpoint *out = open_good(at("h.safetensors"));
    for (size_t i = 0; i < 6; i++) {
        nib_weight w = { .bytes = sizeof w };
        CHECK_OK(nib_checkpoint_get_weight(out, i, &w));
        CHECK(w.tensor_scale == (strstr(w.name, "down") ? 0x1p-13f : 0x1p-12f) && w.has_input_scale &&
              w.input_scale == 1);
    }
    nib_checkpoint_close(out);
    remove(at("h.safetensors"));
    /* Beside a tensor scale that is nothing, which no repair guesses, activations are still put right. */
    struct item broken[7];
    memcpy(broken, items, sizeof items);
    broken[2].data = &good;
    broken[5].data = &zero;
    put_tensors(at("s.safetensors"), broken, 7);
    found = check_file(at("s.safetensors"));
    CHECK_THAT(strstr(found.ids, "tensor-scale-not-positive input-scale-not-positive ") == found.ids && found.n == 5 &&
                   found.repairable == 3,
               "found %s, %d repairable", found.ids, found.repairable);
    remove(at("config.json"));
}

TEST(refuses_wrong_repairs)
{
    nib_plan *plan = NULL;
    fill(0x70);
    put_group((float[]){ 4096, 4096, 4096 }, "m.", true);
    nib_checkpoint *c = open_good(at("g.safetensors"));
    CHECK_FAILS(nib_plan_repair(NULL, &plan), NIB_ERR_ARG, "in is NULL");
    CHECK_FAILS(nib_plan_repair(c, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_plan_repair(c, &plan), NIB_ERR_MODE, "nothing that can be repaired");
    nib_checkpoint_close(c);
    const struct item items[] = { { "m._weight_qdata", NIB_U8, 2, { 4, 32 }, codes },
                                  { "m._weight_scale", NIB_E4M3, 2, { 4, 4 }, scales },
                                  { "m._weight_per_tensor_scale", NIB_F32, 0, { 0 }, (float[]){ 4096 } } };
    put_tensors(at("g.safetensors"), items, 3);
    c = open_good(at("g.safetensors"));
    CHECK_FAILS(nib_plan_repair(c, &plan), NIB_ERR_UNSUPPORTED, "it is torchao");
    CHECK(plan == NULL);
    nib_checkpoint_close(c);
}

/* ---- Without memory ---- */

static nib_status check_once(const nib_checkpoint *c, const nib_job *job)
{
    struct found found = { 0 };
    return nib_checkpoint_check(c, c, job, note, &found);
}

TEST(lives_without_memory)
{
    enum { MOST = 4000 };
    fill(0x70);
    put_group((float[]){ 4096, 8192, 4096 }, "m.", true);
    nib_checkpoint *c = open_good(at("g.safetensors"));
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    long i;
    for (i = 0; i < MOST; i++) {
        allocations_left = i;
        const nib_status status = check_once(c, &job);
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(!failed || status == NIB_ERR_MEMORY || status == NIB_OK, "allocation %ld: %s", i,
                   nib_status_name(status));
        if (!failed)
            break;
    }
    CHECK(i > 10 && i < MOST);
    /* Codes of 4 rows, and scales of 128: whether what lies around them is zero takes memory to find out. */
    const struct item padded[] = { { "m.weight_packed", NIB_U8, 2, { 4, 32 }, codes },
                                   { "m.weight_scale", NIB_E4M3, 2, { 128, 4 }, scales },
                                   { "m.weight_global_scale", NIB_F32, 1, { 1 }, (float[]){ 4096 } } };
    put_tensors(at("p.safetensors"), padded, 3);
    nib_checkpoint *p = open_good(at("p.safetensors"));
    for (i = 0; i < MOST; i++) {
        struct found found = { 0 };
        allocations_left = i;
        const nib_status status = nib_checkpoint_check(p, NULL, &job, note, &found);
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(status ? status == NIB_ERR_MEMORY : strcmp(found.ids, "scale-padding ") == 0,
                   "allocation %ld: %s, found %s", i, nib_status_name(status), found.ids);
        if (!failed)
            break;
    }
    CHECK(i > 3 && i < MOST);
    nib_checkpoint_close(p);
    nib_plan *whole = NULL;
    CHECK_OK(nib_plan_repair(c, &whole));
    for (i = 0; i < MOST; i++) {
        nib_plan *plan = NULL;
        allocations_left = i;
        const nib_status status = nib_plan_repair(c, &plan);
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(status == NIB_OK || status == NIB_ERR_MEMORY, "allocation %ld: %s", i, nib_status_name(status));
        CHECK(!status == (plan != NULL));
        CHECK_THAT(!plan || (plan->n_tensors == whole->n_tensors && plan->n_weights == whole->n_weights &&
                             !plan->config == !whole->config && !plan->hf_quant == !whole->hf_quant),
                   "allocation %ld: half a plan", i);
        nib_plan_destroy(plan);
        if (!failed)
            break;
    }
    CHECK(i > 10 && i < MOST);
    nib_plan_destroy(whole);
    nib_weight_stats stats = { .bytes = sizeof stats };
    for (i = 0; i < MOST; i++) {
        allocations_left = i;
        const nib_status status = nib_checkpoint_measure(c, 0, c, 1, &job, &stats);
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(failed ? status == NIB_ERR_MEMORY : status == NIB_OK, "allocation %ld: %s", i,
                   nib_status_name(status));
        if (!failed)
            break;
    }
    CHECK(i > 3 && i < MOST);
    nib_checkpoint_close(c);
}

TEST_MAIN

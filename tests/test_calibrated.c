/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_calibrated.c - quantizations by statistics of inputs, folded ones, and by GPTQ: codes against the library's own
 * with the importance and the Hessian set by hand, what plans say, and every allocation of them failing.
 */
#define _GNU_SOURCE
/* NIB_TEST_WRAP_ALLOC */
#include "io/checkpoint.h"
#include "base/os.h"
#include "plan/plan.h"
#include "test_alloc.h"
#include "test_weights.h"

#include <errno.h>
#include <math.h>
#include <sys/stat.h>

enum { H = 32, I = 48, E = 3 };
#define LAYER "model.layers.0."
#define EXPERT LAYER "mlp.experts."

/* ---- A model and its statistics ---- */

struct matrix {
    const char *name;
    int64_t rows, cols;
    const char *input; /* of the statistics; NULL: it stays */
} matrices[] = {
    { LAYER "self_attn.q_proj", H, H, LAYER "self_attn.q_proj" },
    { LAYER "self_attn.k_proj", 16, H, LAYER "self_attn.q_proj" },
    { LAYER "self_attn.v_proj", 16, H, LAYER "self_attn.q_proj" },
    { LAYER "self_attn.o_proj", H, H, NULL }, /* quantized without statistics */
    { LAYER "mlp.gate", E, H, NULL },
    { EXPERT "0.gate_proj", I, H, EXPERT "gate_proj" },
    { EXPERT "0.up_proj", I, H, EXPERT "gate_proj" },
    { EXPERT "0.down_proj", H, I, EXPERT "down_proj" },
    { EXPERT "1.gate_proj", I, H, EXPERT "gate_proj" },
    { EXPERT "1.up_proj", I, H, EXPERT "gate_proj" },
    { EXPERT "1.down_proj", H, I, EXPERT "down_proj" },
    { EXPERT "2.gate_proj", I, H, EXPERT "gate_proj" },
    { EXPERT "2.up_proj", I, H, EXPERT "gate_proj" },
    { EXPERT "2.down_proj", H, I, EXPERT "down_proj" },
};
enum { MATRICES = sizeof matrices / sizeof *matrices };

static const float zeros[H * H];
static float values[MATRICES][I * H], norms[2][H];
static float attention[H], gate[E][H], down[E][I]; /* sums of squares */
static const int64_t counts[E] = { 300, 0, 7 };
static int silent = -1; /* the expert whose down reads nothing but zeros */

static void make_model_with(const struct item *more)
{
    struct item items[MATRICES + 3];
    static char names[MATRICES + 2][128];
    static const char *const norm_names[2] = { LAYER "input_layernorm.weight",
                                               LAYER "post_attention_layernorm.weight" };
    if (entries(at("model")) < 0)
        CHECK(mkdir(at("model"), 0777) == 0);
    for (size_t i = 0; i < MATRICES; i++) {
        snprintf(names[i], sizeof names[i], "%s.weight", matrices[i].name);
        for (int64_t j = 0; j < matrices[i].rows * matrices[i].cols; j++)
            values[i][j] = test_normal();
        items[i] = (struct item){ names[i], NIB_F32, 2, { matrices[i].rows, matrices[i].cols }, values[i] };
    }
    for (size_t i = 0; i < 2; i++) {
        for (int k = 0; k < H; k++)
            norms[i][k] = k == 5 ? 0 : 1 + 0.1f * test_normal(); /* a zero cannot be divided by */
        items[MATRICES + i] = (struct item){ norm_names[i], NIB_F32, 1, { H }, norms[i] };
    }
    if (more)
        items[MATRICES + 2] = *more;
    put_tensors("model/model.safetensors", items, more ? MATRICES + 3 : MATRICES + 2);
    put_text("model/config.json", "{\"model_type\": \"qwen3_moe\", \"hidden_size\": 32, \"num_experts\": 3}");
}

static void make_model(void) { make_model_with(NULL); }

static float square(void)
{
    const float x = test_normal();
    return x * x + 0.01f;
}

static void make_statistics(const char *path)
{
    static const int64_t one = 12;
    char inputs[4096] = "{";
    nib_writer *writer = NULL;
    for (int k = 0; k < H; k++)
        attention[k] = 12 * square();
    for (int e = 0; e < E; e++) {
        for (int k = 0; k < H; k++)
            gate[e][k] = (float)counts[e] * square();
        for (int k = 0; k < I; k++)
            down[e][k] = e == silent ? 0 : (float)counts[e] * square();
    }
    const struct item items[] = {
        { LAYER "self_attn.q_proj.sum2", NIB_F32, 2, { 1, H }, attention },
        { LAYER "self_attn.q_proj.count", NIB_I64, 1, { 1 }, &one },
        { EXPERT "gate_proj.sum2", NIB_F32, 2, { E, H }, gate },
        { EXPERT "gate_proj.count", NIB_I64, 1, { E }, counts },
        { EXPERT "gate_proj.amaxk", NIB_F32, 2, { E, H }, gate },
        { EXPERT "down_proj.sum2", NIB_F32, 2, { E, I }, down },
        { EXPERT "down_proj.count", NIB_I64, 1, { E }, counts },
    };
    for (size_t i = 0; i < MATRICES; i++)
        if (matrices[i].input)
            snprintf(inputs + strlen(inputs), sizeof inputs - strlen(inputs), "%s\"%s\": \"%s\"",
                     strlen(inputs) > 1 ? ", " : "", matrices[i].name, matrices[i].input);
    strcat(inputs, "}");
    CHECK_OK(nib_writer_create(at(path), &writer));
    CHECK_OK(nib_writer_metadata(writer, "format", "nib-stats-1"));
    CHECK_OK(nib_writer_metadata(writer, "inputs", inputs));
    CHECK_OK(nib_writer_metadata(writer, "tokens_sha256", "a"));
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        CHECK_OK(nib_writer_declare(writer, items[i].name, items[i].dtype, items[i].rank, items[i].shape));
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        CHECK_OK(nib_writer_write(writer, items[i].name, 0, items[i].data,
                                  (size_t)elements_in(items[i].rank, items[i].shape) *
                                      (size_t)nib_dtype_bits(items[i].dtype) / 8));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
}

/* ---- What must come out ---- */

/* Mean squares of an expert's input, mixed with those of all; of down each counts by its mean, and zeros do not. */
static void mixed_squares(const float *sums, int64_t cols, int expert, bool of_down, float *out)
{
    double pooled[I] = { 0 }, weight = 0;
    float means[E][I];
    double averages[E] = { 0 };
    for (int e = 0; e < E; e++) {
        if (!counts[e])
            continue;
        for (int64_t k = 0; k < cols; k++) {
            means[e][k] = (float)((double)sums[e * cols + k] / (double)counts[e]);
            averages[e] += (double)means[e][k];
        }
        averages[e] /= (double)cols;
        if (of_down && e == silent)
            continue;
        const double share = of_down ? 1 / averages[e] : (double)counts[e];
        for (int64_t k = 0; k < cols; k++)
            pooled[k] += (double)means[e][k] * share;
        weight += of_down ? 1 : share;
    }
    const double n = (double)counts[expert], scale = of_down ? averages[expert] : 1;
    for (int64_t k = 0; k < cols; k++) {
        const double all = (double)(float)(pooled[k] / weight);
        out[k] = n > 0 ? (float)((n * (double)means[expert][k] + 256 * scale * all) / (n + 256)) : (float)all;
    }
}

static bool squares_of(size_t i, float *out)
{
    const struct matrix *m = &matrices[i];
    const char *number = strstr(m->name, "experts.");
    if (!m->input)
        return false;
    if (!number) {
        for (int k = 0; k < H; k++)
            out[k] = (float)((double)attention[k] / 12);
        return true;
    }
    const bool of_down = strstr(m->name, "down_proj");
    mixed_squares(of_down ? down[0] : gate[0], m->cols, number[8] - '0', of_down, out);
    return true;
}

static float amax_of(const float *x, int64_t n)
{
    float amax = 0;
    for (int64_t i = 0; i < n; i++)
        amax = fmaxf(amax, fabsf(x[i]));
    return amax;
}

/* The codes that a weight must have, of values (folded or not) that its group has the amax of. */
static void check_codes(const nib_checkpoint *out, size_t i, const float *x, float amax, const float *squares)
{
    const struct matrix *m = &matrices[i];
    const int64_t shape[2] = { m->rows, m->cols };
    static uint8_t codes[I * H / 2], scales[I * H / 16];
    float importance[I];
    size_t index;
    nib_quantizer q;
    nib_array array, decoded;
    nib_quantizer_init(&q);
    q.columnwise = 0;
    q.scale_rule = NIB_SCALE_SWEEP;
    q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
    q.min_block_scale = 0x1p-6f;
    nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &amax, NULL } };
    if (squares) {
        CHECK_OK(nib_importance_normalize(squares, m->cols, importance));
        overrides.importance = importance;
        overrides.importance_count = m->cols;
    }
    static float fake[I * H], stored[I * H];
    CHECK_OK(nib_array_init(&array, (void *)(uintptr_t)x, NIB_F32, 2, shape));
    CHECK_OK(nib_array_init(&decoded, fake, NIB_F32, 2, shape));
    CHECK_OK(nib_fake_quantize(&q, &array, &overrides, NIB_ROWWISE, &decoded));
    CHECK_OK(nib_checkpoint_find_weight(out, m->name, &index));
    CHECK_OK(nib_checkpoint_read_codes(out, index, 0, m->rows, codes, scales));
    CHECK_OK(nib_array_init(&decoded, stored, NIB_F32, 2, shape));
    CHECK_OK(nib_checkpoint_read_rows(out, index, 0, m->rows, &decoded));
    CHECK_THAT(!memcmp(stored, fake, (size_t)(m->rows * m->cols) * sizeof *fake), "%s differs", m->name);
}

/* Of weights that share a tensor scale, the others' indices follow the first. */
static float group_amax(size_t i, float (*x)[I * H])
{
    const struct matrix *m = &matrices[i];
    float amax = 0;
    for (size_t j = 0; j < MATRICES; j++) {
        const size_t parent = (size_t)(strrchr(m->name, '.') - m->name);
        const bool same = !strncmp(matrices[j].name, m->name, parent + 1) &&
                          !strstr(matrices[j].name, "o_proj") == !strstr(m->name, "o_proj") &&
                          !strstr(matrices[j].name, "down_proj") == !strstr(m->name, "down_proj") &&
                          !strcmp(matrices[j].name, LAYER "mlp.gate") == !strcmp(m->name, LAYER "mlp.gate");
        if (same)
            amax = fmaxf(amax, amax_of(x[j], matrices[j].rows * matrices[j].cols));
    }
    return amax;
}

static nib_quantize_options options_of(void)
{
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.statistics = at("stats");
    return options;
}

static nib_plan_row row_of(const nib_plan *plan, const char *name)
{
    nib_plan_row row = { .bytes = sizeof row };
    for (size_t i = 0; !nib_plan_get_row(plan, i, &row); i++)
        if (!strcmp(row.name, name))
            return row;
    CHECK_THAT(false, "there is no row %s", name);
    return row;
}

static nib_checkpoint *run_plan(const nib_checkpoint *in, const nib_quantize_options *options, const char *path)
{
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_quantize(in, options, &plan));
    CHECK_OK(nib_plan_run(plan, at(path), &force, NULL));
    nib_plan_destroy(plan);
    return open_good(at(path));
}

TEST(a_weighted_sweep)
{
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    nib_quantize_options options = options_of();
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    CHECK(!strcmp(row_of(plan, LAYER "self_attn.q_proj").statistics, "12 tokens"));
    CHECK(row_of(plan, LAYER "self_attn.v_proj").tokens == 12);
    CHECK(!strcmp(row_of(plan, LAYER "self_attn.o_proj").statistics, "none: it is not in the file"));
    CHECK(!strcmp(row_of(plan, EXPERT "1.up_proj").statistics, "0 tokens: those of all experts instead"));
    CHECK(row_of(plan, EXPERT "2.down_proj").tokens == 7 && !*row_of(plan, LAYER "mlp.gate").statistics);
    nib_plan_destroy(plan);
    nib_checkpoint *out = run_plan(in, &options, "out");
    for (size_t i = 0; i < MATRICES; i++) {
        float squares[I];
        const bool weighed = squares_of(i, squares);
        if (strcmp(matrices[i].name, LAYER "mlp.gate") != 0)
            check_codes(out, i, values[i], group_amax(i, values), weighed ? squares : NULL);
    }
    nib_checkpoint_close(out);
    options.statistics_strict = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_DATA, "o_proj");
    options.statistics_strict = 0;
    options.scale_rule = NIB_SCALE_RTN;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "sweep");
    options = options_of();
    options.statistics = "tests/fuzz/corpus/statistics/own";
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_DATA,
                "none of the 13 weights to quantize: it has \"m.experts.1.up\"");
    nib_checkpoint_close(in);
}

/* An expert whose down reads zeros says nothing about what the others read. */
TEST(an_expert_that_reads_zeros)
{
    silent = 2;
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    nib_quantize_options options = options_of();
    nib_checkpoint *out = run_plan(in, &options, "out");
    for (size_t i = 0; i < MATRICES; i++) {
        float squares[I];
        if (strcmp(matrices[i].name, EXPERT "0.down_proj") && strcmp(matrices[i].name, EXPERT "1.down_proj"))
            continue;
        CHECK(squares_of(i, squares));
        check_codes(out, i, values[i], group_amax(i, values), squares);
    }
    nib_checkpoint_close(out);
    nib_checkpoint_close(in);
    silent = -1;
}

/* Measured amaxes count twice where tokens are few, the others are guessed, and what has none gets 1. */
TEST(scales_of_activations)
{
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    nib_quantize_options options = options_of();
    options.scheme = NIB_SCHEME_NVFP4;
    options.activation = NIB_ACTIVATION_STATISTICS;
    nib_checkpoint *out = run_plan(in, &options, "out");
    const float wanted[] = { 2688 / (32 * sqrtf((float)((double)amax_of(attention, H) / 12))),
                             2688 / (2 * amax_of(gate[0], E * H)) };
    for (size_t i = 0; i < MATRICES; i++) {
        nib_weight w = { .bytes = sizeof w };
        size_t index;
        if (!strcmp(matrices[i].name, LAYER "mlp.gate") || strstr(matrices[i].name, "down_proj"))
            continue;
        CHECK_OK(nib_checkpoint_find_weight(out, matrices[i].name, &index));
        CHECK_OK(nib_checkpoint_get_weight(out, index, &w));
        const float expected = !matrices[i].input ? 1 : wanted[strstr(matrices[i].name, "experts") != NULL];
        CHECK_THAT(w.has_input_scale && w.input_scale == expected, "%s: %a, not %a", w.name, (double)w.input_scale,
                   (double)expected);
    }
    nib_checkpoint_close(out);
    nib_checkpoint_close(in);
}

/* ---- Folding ---- */

static void read_scales(const nib_file *file, const char *name, float *out, int64_t n)
{
    size_t index;
    CHECK_OK(nib_file_find(file, name, &index));
    CHECK_OK(nib_file_read(file, index, 0, out, (size_t)n * sizeof *out));
}

static void read_vector(const char *path, const char *name, float *out, int64_t n)
{
    nib_file *file = NULL;
    CHECK_OK(nib_file_open(path, &file));
    read_scales(file, name, out, n);
    nib_file_close(file);
}

/* What the scales make of the model's weights, and what columns were multiplied by. */
static void fold_values(const nib_file *file, float (*folded)[I * H], float (*columns)[I])
{
    float attention_scales[H], forward_scales[H];
    read_scales(file, LAYER "input_layernorm", attention_scales, H);
    read_scales(file, LAYER "post_attention_layernorm", forward_scales, H);
    for (size_t i = 0; i < MATRICES; i++) {
        const struct matrix *m = &matrices[i];
        const bool of_down = strstr(m->name, "down_proj"), of_up = strstr(m->name, "up_proj");
        float rows[I];
        char other[128];
        snprintf(other, sizeof other, "%.*s.down_proj", (int)(strrchr(m->name, '.') - m->name), m->name);
        if (of_down || of_up)
            read_scales(file, other, rows, I);
        for (int64_t k = 0; k < m->cols; k++)
            columns[i][k] = of_down                        ? rows[k]
                            : strstr(m->name, "o_proj")    ? 1
                            : strstr(m->name, "self_attn") ? attention_scales[k]
                                                           : forward_scales[k];
        for (int64_t j = 0; j < m->rows * m->cols; j++)
            folded[i][j] = values[i][j] / (of_up ? rows[j / m->cols] : 1) * columns[i][j % m->cols];
    }
}

static void check_norm(const char *name, const float *before, const float *columns)
{
    float after[H];
    char full[128];
    snprintf(full, sizeof full, "%s.weight", name);
    read_vector(at("out/model.safetensors"), full, after, H);
    for (int k = 0; k < H; k++)
        CHECK(before[k] ? fabsf(after[k] * columns[k] / before[k] - 1) < 1e-6f && columns[k] > 0
                        : !after[k] && columns[k] == 1);
}

TEST(folded_weights)
{
    static float folded[MATRICES][I * H], columns[MATRICES][I];
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    nib_quantize_options options = options_of();
    options.fold = NIB_FOLD_FIXED;
    options.fold_exponent = 0.5f;
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    CHECK(!strcmp(row_of(plan, LAYER "self_attn.k_proj").fold, LAYER "input_layernorm"));
    CHECK(!strcmp(row_of(plan, LAYER "mlp.gate").fold, LAYER "post_attention_layernorm"));
    CHECK(!strcmp(row_of(plan, EXPERT "1.down_proj").fold, EXPERT "1.up_proj"));
    CHECK(!*row_of(plan, LAYER "self_attn.o_proj").fold);
    nib_plan_destroy(plan);
    nib_checkpoint *out = run_plan(in, &options, "out");
    nib_file *file = NULL;
    CHECK_OK(nib_file_open(at("out/nib-fold.scales"), &file));
    fold_values(file, folded, columns);
    nib_file_close(file);
    for (size_t i = 0; i < MATRICES; i++) {
        float squares[I], router[E * H];
        const bool weighed = squares_of(i, squares);
        if (!strcmp(matrices[i].name, LAYER "mlp.gate")) {
            read_vector(at("out/model.safetensors"), LAYER "mlp.gate.weight", router, (int64_t)E * H);
            CHECK_BYTES(router, folded[i], sizeof router);
            continue;
        }
        for (int64_t k = 0; k < matrices[i].cols && weighed; k++)
            squares[k] = (float)((double)squares[k] / ((double)columns[i][k] * (double)columns[i][k]));
        check_codes(out, i, folded[i], group_amax(i, folded), weighed ? squares : NULL);
    }
    check_norm(LAYER "input_layernorm", norms[0], columns[0]);
    check_norm(LAYER "post_attention_layernorm", norms[1], columns[4]);
    size_t mine, theirs;
    nib_weight_stats stats = { .bytes = sizeof stats };
    CHECK_OK(nib_checkpoint_find_weight(in, EXPERT "0.up_proj", &mine));
    CHECK_OK(nib_checkpoint_find_weight(out, EXPERT "0.up_proj", &theirs));
    CHECK_OK(nib_checkpoint_measure(in, mine, out, theirs, NULL, &stats));
    CHECK_THAT(nib_stats_sqnr(&stats) > 15, "%g dB", nib_stats_sqnr(&stats));
    CHECK_OK(nib_checkpoint_measure(out, theirs, in, mine, NULL, &stats)); /* the folded one is unfolded for it */
    CHECK_THAT(nib_stats_sqnr(&stats) > 15, "%g dB", nib_stats_sqnr(&stats));
    CHECK_FAILS(nib_plan_quantize(out, &options, &plan), NIB_ERR_UNSUPPORTED, "NVFP4 already");
    nib_checkpoint_close(out);
    nib_checkpoint_close(in);
}

/* The search takes no exponent that loses more than none: its errors, weighed, are not above those of no fold. */
TEST(searched_exponents)
{
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    nib_quantize_options options = options_of();
    double loss[2] = { 0, 0 };
    for (int search = 0; search < 2; search++) {
        static float columns[MATRICES][I], folded[MATRICES][I * H];
        options.fold = search ? NIB_FOLD_SEARCH : NIB_FOLD_FIXED;
        options.fold_exponent = search ? -1 : 0; /* by 0: scales of 1 */
        nib_checkpoint *out = run_plan(in, &options, "out");
        nib_file *file = NULL;
        CHECK_OK(nib_file_open(at("out/nib-fold.scales"), &file));
        fold_values(file, folded, columns);
        nib_file_close(file);
        for (size_t i = 0; i < MATRICES; i++) {
            static float stored[I * H];
            float squares[I];
            size_t index;
            nib_array x;
            if (!squares_of(i, squares) || !strstr(matrices[i].name, "down_proj"))
                continue;
            const int64_t shape[2] = { matrices[i].rows, matrices[i].cols };
            CHECK_OK(nib_array_init(&x, stored, NIB_F32, 2, shape));
            CHECK_OK(nib_checkpoint_find_weight(out, matrices[i].name, &index));
            CHECK_OK(nib_checkpoint_read_rows(out, index, 0, matrices[i].rows, &x));
            for (int64_t j = 0; j < shape[0] * shape[1]; j++) {
                const int64_t k = j % shape[1];
                const double d = (double)stored[j] / (double)columns[i][k] - (double)values[i][j];
                loss[search] += (double)squares[k] * d * d;
                CHECK(search || columns[i][k] == 1);
            }
        }
        nib_checkpoint_close(out);
    }
    CHECK_THAT(loss[1] < loss[0], "%g with the search, %g without a fold", loss[1], loss[0]);
    nib_checkpoint_close(in);
}

/* A module of a layer that is not known may read its norms; norms of several heads, which are matrices too, do not. */
TEST(what_else_may_read_a_norm)
{
    static const struct {
        const char *name;
        int64_t rows;
        bool reads;
    } cases[] = { { LAYER "self_attn.q_norm.weight", 2, false },
                  { LAYER "mlp.adapter.weight", H, true },
                  { LAYER "mlp.adapter.table", H, true },
                  { "model.adapter.weight", H, false } };
    make_statistics("stats");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct item more = { cases[i].name, NIB_F32, 2, { cases[i].rows, H }, zeros };
        make_model_with(&more);
        nib_checkpoint *in = open_good(at("model"));
        nib_quantize_options options = options_of();
        options.fold = NIB_FOLD_FIXED;
        options.fold_exponent = 0.5f;
        nib_plan *plan = NULL;
        CHECK_OK(nib_plan_quantize(in, &options, &plan));
        const char *fold = row_of(plan, LAYER "self_attn.k_proj").fold;
        CHECK_THAT(cases[i].reads ? strstr(fold, "mlp.adapter") && strstr(fold, "may read it too")
                                  : !strcmp(fold, LAYER "input_layernorm"),
                   "%s: %s", cases[i].name, fold);
        nib_plan_destroy(plan);
        nib_checkpoint_close(in);
    }
}

/* ---- What speaks against a fold ---- */

enum { Q, GATE, UP, DOWN, NORM, FORWARD_NORM, MORE, DENSE };
#define MLP LAYER "mlp."
static const struct item dense[DENSE] = {
    [Q] = { LAYER "self_attn.q_proj.weight", NIB_F32, 2, { 16, 16 }, zeros },
    [GATE] = { MLP "gate_proj.weight", NIB_F32, 2, { 32, 16 }, zeros },
    [UP] = { MLP "up_proj.weight", NIB_F32, 2, { 32, 16 }, zeros },
    [DOWN] = { MLP "down_proj.weight", NIB_F32, 2, { 16, 32 }, zeros },
    [NORM] = { LAYER "input_layernorm.weight", NIB_F32, 1, { 16 }, zeros },
    [FORWARD_NORM] = { LAYER "post_attention_layernorm.weight", NIB_F32, 1, { 16 }, zeros },
};

static void put_dense_statistics(void)
{
    static const int64_t count = 4;
    float squares[32];
    for (int k = 0; k < 32; k++)
        squares[k] = ldexpf(1, k);
    nib_writer *writer = NULL;
    const struct item items[] = {
        { "a.sum2", NIB_F32, 2, { 1, 16 }, squares },
        { "a.count", NIB_I64, 1, { 1 }, &count },
        { "b.sum2", NIB_F32, 2, { 1, 32 }, squares },
        { "b.count", NIB_I64, 1, { 1 }, &count },
    };
    CHECK_OK(nib_writer_create(at("dense.stats"), &writer));
    CHECK_OK(nib_writer_metadata(writer, "format", "nib-stats-1"));
    CHECK_OK(nib_writer_metadata(writer, "inputs",
                                 "{\"" LAYER "self_attn.q_proj\": \"a\", \"" MLP "gate_proj\": \"a\", \"" MLP
                                 "up_proj\": \"a\", \"" MLP "gate_up_proj\": \"a\", \"" MLP "down_proj\": \"b\"}"));
    for (size_t i = 0; i < 4; i++)
        CHECK_OK(nib_writer_declare(writer, items[i].name, items[i].dtype, items[i].rank, items[i].shape));
    for (size_t i = 0; i < 4; i++)
        CHECK_OK(nib_writer_write(writer, items[i].name, 0, items[i].data,
                                  (size_t)elements_in(items[i].rank, items[i].shape) *
                                      (size_t)nib_dtype_bits(items[i].dtype) / 8));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
}

static nib_quantize_options dense_options(void)
{
    nib_quantize_options options = options_of();
    options.statistics = at("dense.stats");
    options.fold = NIB_FOLD_FIXED;
    options.fold_exponent = 0.5f;
    return options;
}

static void put_dense(const struct item *items, size_t n)
{
    if (entries(at("dense")) < 0)
        CHECK(mkdir(at("dense"), 0777) == 0);
    put_tensors("dense/model.safetensors", items, n);
    put_text("dense/config.json", "{\"model_type\": \"llama\"}");
}

TEST(folds_that_cannot_be)
{
    static const struct {
        const char *config;
        int place; /* of the tensor that is another one */
        struct item item;
        const char *ignored, *weight, *fold;
    } cases[] = {
        { "llama",
          MORE,
          { "model.norm.weight", NIB_F32, 1, { 16 }, zeros },
          NULL,
          "self_attn.q_proj",
          LAYER "input_layernorm" },
        { "llama", MORE, { "model.norm.weight", NIB_F32, 1, { 16 }, zeros }, NULL, "mlp.down_proj", MLP "up_proj" },
        { "llama",
          NORM,
          { LAYER "other.weight", NIB_F32, 1, { 16 }, zeros },
          NULL,
          "self_attn.q_proj",
          "none: its norm is not there" },
        { "llama",
          NORM,
          { LAYER "input_layernorm.weight", NIB_F32, 1, { 8 }, zeros },
          NULL,
          "self_attn.q_proj",
          "none: its norm is not there" },
        { "llama",
          NORM,
          { LAYER "input_layernorm.weight", NIB_I32, 1, { 16 }, zeros },
          NULL,
          "self_attn.q_proj",
          "none: its norm is not there" },
        { "llama",
          MORE,
          { LAYER "input_layernorm.bias", NIB_F32, 1, { 8 }, zeros },
          NULL,
          "self_attn.q_proj",
          "none: its norm is not there" },
        { "llama",
          MORE,
          { LAYER "self_attn.v_proj.weight", NIB_F32, 2, { 16, 8 }, zeros },
          NULL,
          "self_attn.q_proj",
          "none: weights that read the norm do not fit it" },
        { "llama",
          MORE,
          { "model.norm.weight", NIB_F32, 1, { 16 }, zeros },
          "*q_proj",
          "self_attn.q_proj",
          "none: nothing that reads the norm is quantized" },
        { "gemma",
          NORM,
          { LAYER "input_layernorm.weight", NIB_BF16, 1, { 16 }, zeros },
          NULL,
          "self_attn.q_proj",
          LAYER "input_layernorm" },
        { "llama",
          Q,
          { LAYER "self_attn.o_proj.weight", NIB_F32, 2, { 16, 16 }, zeros },
          NULL,
          "self_attn.o_proj",
          "" },
        { "llama",
          Q,
          { LAYER "self_attn.k_proj.weight", NIB_F32, 2, { 16, 16 }, zeros },
          NULL,
          "self_attn.k_proj",
          "none: there are no statistics of its input" },
        { "llama",
          MORE,
          { "model.norm.weight", NIB_F32, 1, { 16 }, zeros },
          "*up_proj",
          "mlp.down_proj",
          "none: what makes its input stays as it is" },
        { "llama",
          UP,
          { MLP "up_proj.weight", NIB_F32, 2, { 48, 16 }, zeros },
          NULL,
          "mlp.down_proj",
          "none: what makes its input stays as it is" },
        { "llama",
          MORE,
          { MLP "up_proj.bias", NIB_F32, 1, { 16 }, zeros },
          NULL,
          "mlp.down_proj",
          "none: a bias that does not fit" },
        { "llama", MORE, { MLP "up_proj.bias", NIB_F32, 1, { 32 }, zeros }, NULL, "mlp.down_proj", MLP "up_proj" },
        { "llama\", \"swiglu_limit\": 7, \"x\": \"",
          MORE,
          { "model.norm.weight", NIB_F32, 1, { 16 }, zeros },
          NULL,
          "mlp.down_proj",
          "" },
        { "gpt_oss", MORE, { "model.norm.weight", NIB_F32, 1, { 16 }, zeros }, NULL, "mlp.down_proj", "" },
        { "cohere",
          FORWARD_NORM,
          { LAYER "self_attn.q_norm.weight", NIB_F32, 1, { 16 }, zeros },
          NULL,
          "mlp.up_proj",
          LAYER "input_layernorm" },
        { "llama", GATE, { MLP "other_proj.bias", NIB_F32, 1, { 32 }, zeros }, NULL, "mlp.down_proj", "" },
    };
    put_dense_statistics();
    CHECK(entries(at("dense")) >= 0 || mkdir(at("dense"), 0777) == 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct item items[DENSE];
        char config[128], name[128];
        memcpy(items, dense, sizeof items);
        items[cases[i].place] = cases[i].item;
        put_tensors("dense/model.safetensors", items, items[MORE].name ? DENSE : MORE);
        snprintf(config, sizeof config, "{\"model_type\": \"%s\"}", cases[i].config);
        put_text("dense/config.json", config);
        nib_checkpoint *in = open_good(at("dense"));
        nib_quantize_options options = dense_options();
        options.ignore = &cases[i].ignored;
        options.n_ignore = cases[i].ignored != NULL;
        nib_plan *plan = NULL;
        CHECK_OK(nib_plan_quantize(in, &options, &plan));
        snprintf(name, sizeof name, LAYER "%s", cases[i].weight);
        CHECK_THAT(plan && !strcmp(row_of(plan, name).fold, cases[i].fold), "case %zu: %s", i,
                   plan ? row_of(plan, name).fold : "no plan");
        nib_plan_destroy(plan);
        nib_checkpoint_close(in);
    }
}

/* Biases of a norm and of up are divided as their weights are; in BF16 by powers of two, so that they stay exact. Where
 * gate and up are one matrix, its first half keeps its rows. */
TEST(folded_biases_and_halves)
{
    float bias[32];
    uint16_t narrow[32];
    for (int k = 0; k < 32; k++)
        bias[k] = (float)(k + 1) / 8;
    CHECK_OK(nib_encode(NIB_BF16, bias, 32, narrow));
    put_dense_statistics();
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct item items[DENSE + 1];
        const nib_dtype dtype = bf16 ? NIB_BF16 : NIB_F32;
        const void *data = bf16 ? (const void *)narrow : bias;
        float after[32], scales[32];
        memcpy(items, dense, sizeof dense);
        items[NORM].data = items[FORWARD_NORM].data = bias;
        items[MORE] = (struct item){ LAYER "input_layernorm.bias", dtype, 1, { 16 }, data };
        items[DENSE] = (struct item){ MLP "up_proj.bias", dtype, 1, { 32 }, data };
        put_dense(items, DENSE + 1);
        nib_checkpoint *in = open_good(at("dense"));
        const nib_quantize_options options = dense_options();
        nib_checkpoint_close(run_plan(in, &options, "out"));
        nib_checkpoint_close(in);
        for (int up = 0; up < 2; up++) {
            uint16_t raw[32];
            const char *name = up ? MLP "up_proj.bias" : LAYER "input_layernorm.bias";
            const int n = up ? 32 : 16;
            read_vector(at("out/nib-fold.scales"), up ? MLP "down_proj" : LAYER "input_layernorm", scales, n);
            if (bf16) {
                nib_file *file = NULL;
                size_t index;
                CHECK_OK(nib_file_open(at("out/model.safetensors"), &file));
                CHECK_OK(nib_file_find(file, name, &index));
                CHECK_OK(nib_file_read(file, index, 0, raw, (size_t)n * 2));
                CHECK_OK(nib_decode(NIB_BF16, raw, (size_t)n, after));
                nib_file_close(file);
            } else {
                read_vector(at("out/model.safetensors"), name, after, n);
            }
            int exponent, others = 0;
            for (int k = 0; k < n; k++) {
                CHECK_THAT(after[k] == bias[k] / scales[k], "%s, %d: %g, not %g / %g", name, k, (double)after[k],
                           (double)bias[k], (double)scales[k]);
                CHECK(!bf16 || frexpf(scales[k], &exponent) == 0.5f);
                others += scales[k] != 1;
            }
            CHECK_THAT(others > 0, "%s: %s has scales of 1", bf16 ? "BF16" : "F32", name);
        }
    }
    struct item items[] = { dense[Q], { MLP "gate_up_proj.weight", NIB_F32, 2, { 64, 16 }, zeros }, dense[DOWN] };
    float rows[64], columns[32];
    put_dense(items, 3);
    nib_checkpoint *in = open_good(at("dense"));
    const nib_quantize_options options = dense_options();
    nib_checkpoint_close(run_plan(in, &options, "out"));
    nib_checkpoint_close(in);
    read_vector(at("out/nib-fold.scales"), MLP "gate_up_proj", rows, 64);
    read_vector(at("out/nib-fold.scales"), MLP "down_proj", columns, 32);
    for (int r = 0; r < 32; r++)
        CHECK(rows[r] == 1 && rows[32 + r] == columns[r]);
}

/* nib-fold.scales of an output that is opened again. */
TEST(files_of_scales)
{
    static const struct {
        const char *format, *columns, *rows;
        nib_dtype dtype;
        int64_t n;
        float value;
        const char *why;
    } cases[] = {
        { "nib-fold-1", "{\"" LAYER "self_attn.q_proj\": \"a\"}", "{}", NIB_F32, 16, 2, NULL },
        { "nib-fold-1", "{\"no.such.weight\": \"z\"}", "{}", NIB_F32, 16, 2, NULL },
        { "nib-fold-1", "{}", "{\"" MLP "up_proj\": \"a\"}", NIB_F32, 32, 0x1p-126f, NULL },
        { "nib-fold-1", "{}", "{}", NIB_F32, 16, 0x1p126f, NULL },
        { "nib-fold-2", "{}", "{}", NIB_F32, 16, 2, "it is not \"nib-fold-1\"" },
        { NULL, "{}", "{}", NIB_F32, 16, 2, "it is not \"nib-fold-1\"" },
        { "nib-fold-1", NULL, "{}", NIB_F32, 16, 2, "\"columns\": its metadata lack it" },
        { "nib-fold-1", "{}", NULL, NIB_F32, 16, 2, "\"rows\": its metadata lack it" },
        { "nib-fold-1", "{}", "[]", NIB_F32, 16, 2, "\"rows\": it is no JSON object" },
        { "nib-fold-1", "{", "{}", NIB_F32, 16, 2, "nib-fold.scales" },
        { "nib-fold-1", "{}", "{}", NIB_BF16, 16, 2, "scales are F32 of one dim" },
        { "nib-fold-1", "{}", "{}", NIB_F32, 16, 0, "a scale is not positive" },
        { "nib-fold-1", "{}", "{}", NIB_F32, 16, -1, "a scale is not positive" },
        { "nib-fold-1", "{}", "{}", NIB_F32, 16, INFINITY, "not finite" },
        { "nib-fold-1", "{}", "{}", NIB_F32, 16, NAN, "not finite" },
        { "nib-fold-1", "{}", "{}", NIB_F32, 16, 0x1p-127f, "a scale is not positive" },
        { "nib-fold-1", "{}", "{}", NIB_F32, 16, 0x1.000002p126f, "not finite" },
        { "nib-fold-1", "{\"" LAYER "self_attn.q_proj\": \"b\"}", "{}", NIB_F32, 16, 2,
          "q_proj\": its scales are missing" },
        { "nib-fold-1", "{\"" LAYER "self_attn.q_proj\": 1}", "{}", NIB_F32, 16, 2,
          "q_proj\": its scales are missing" },
        { "nib-fold-1", "{\"" LAYER "self_attn.q_proj\": \"a\"}", "{}", NIB_F32, 17, 2,
          "q_proj\": its scales are missing" },
        { "nib-fold-1", "{}", "{\"" MLP "up_proj\": \"a\"}", NIB_F32, 16, 2, "up_proj\": its scales are missing" },
    };
    put_dense(dense, MORE);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float scales[32];
        nib_writer *writer = NULL;
        for (int k = 0; k < 32; k++)
            scales[k] = cases[i].value;
        CHECK_OK(nib_writer_create(at("dense/nib-fold.scales"), &writer));
        const char *const pairs[][2] = { { "format", cases[i].format },
                                         { "columns", cases[i].columns },
                                         { "rows", cases[i].rows } };
        for (int j = 0; j < 3; j++)
            if (pairs[j][1])
                CHECK_OK(nib_writer_metadata(writer, pairs[j][0], pairs[j][1]));
        CHECK_OK(nib_writer_declare(writer, "a", cases[i].dtype, 1, &cases[i].n));
        CHECK_OK(nib_writer_write(writer, "a", 0, scales, (size_t)(cases[i].n * nib_dtype_bits(cases[i].dtype) / 8)));
        CHECK_OK(nib_writer_commit(writer));
        nib_writer_destroy(writer);
        nib_checkpoint *c = NULL;
        const nib_status status = nib_checkpoint_open(at("dense"), &c);
        CHECK_THAT(cases[i].why ? status == NIB_ERR_DATA && strstr(nib_last_error(), cases[i].why) : !status,
                   "case %zu: %s: %s", i, nib_status_name(status), status ? nib_last_error() : "");
        if (i == 0 && c) {
            nib_plan *plan = NULL;
            put_dense_statistics();
            const nib_quantize_options options = dense_options();
            CHECK_FAILS(nib_plan_quantize(c, &options, &plan), NIB_ERR_MODE, "folded already");
        }
        nib_checkpoint_close(c);
    }
    CHECK(unlink(at("dense/nib-fold.scales")) == 0);
}

TEST(folds_that_are_rejected)
{
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    nib_plan *plan = NULL;
    nib_quantize_options options = options_of();
    options.fold = NIB_FOLD_FIXED;
    options.fold_exponent = 1.5f;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "from 0 to 1");
    options.fold_exponent = -1;
    options.fold = NIB_FOLD_COUNT;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "exponent");
    options.fold = NIB_FOLD_FIXED;
    options.format = NIB_CHECKPOINT_FORMAT_GGUF;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "GGUF");
    options.format = NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS;
    options.statistics = NULL;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "statistics");
    nib_checkpoint_close(in);
    put_text("model/config.json", "{\"model_type\": \"mamba\"}");
    in = open_good(at("model"));
    options.statistics = at("stats");
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_UNSUPPORTED, "mamba");
    nib_checkpoint_close(in);
}

/* ---- GPTQ ---- */

static float hessians[3][I * (I + 1) / 2]; /* of attention, of what experts read, and of down */
static struct {
    const char *name;
    int64_t cols, tokens; /* below 0: not said */
} hessian_of[3] = { { LAYER "self_attn.q_proj", H, 6 * H },
                    { EXPERT "gate_proj", H, -1 }, /* 307 */
                    { EXPERT "down_proj", I, 1000000 } };

static void put_hessian(nib_writer *writer, size_t i, bool declare)
{
    char name[128], count[160];
    const int64_t one = 1, n = hessian_of[i].cols * (hessian_of[i].cols + 1) / 2;
    snprintf(name, sizeof name, "%s.hessian", hessian_of[i].name);
    snprintf(count, sizeof count, "%s_count", name);
    if (declare) {
        CHECK_OK(nib_writer_declare(writer, name, NIB_F32, 1, &n));
        if (hessian_of[i].tokens >= 0)
            CHECK_OK(nib_writer_declare(writer, count, NIB_I64, 1, &one));
        return;
    }
    CHECK_OK(nib_writer_write(writer, name, 0, hessians[i], (size_t)n * sizeof(float)));
    if (hessian_of[i].tokens >= 0)
        CHECK_OK(nib_writer_write(writer, count, 0, &hessian_of[i].tokens, sizeof(int64_t)));
}

/* One file for the first, another for the rest. */
static void write_hessians(const char *where)
{
    for (size_t file = 0; file < 2; file++) {
        char path[128];
        nib_writer *writer = NULL;
        snprintf(path, sizeof path, "%s/stats-of-layer-0000%zu.safetensors", where, file);
        CHECK_OK(nib_writer_create(at(path), &writer));
        CHECK_OK(nib_writer_metadata(writer, "format", "nib-stats-1"));
        for (int declare = 1; declare >= 0; declare--)
            for (size_t i = file; i < (file ? 3 : 1); i++)
                put_hessian(writer, i, declare);
        CHECK_OK(nib_writer_commit(writer));
        nib_writer_destroy(writer);
    }
}

static void make_hessians(const char *where)
{
    if (entries(at(where)) < 0)
        CHECK(mkdir(at(where), 0777) == 0);
    for (size_t i = 0; i < 3; i++) {
        const int64_t n = hessian_of[i].cols;
        static float x[4 * I][I];
        for (int64_t t = 0; t < 2 * n; t++)
            for (int64_t k = 0; k < n; k++)
                x[t][k] = test_normal() + (k ? x[t][k - 1] : 0);
        float *to = hessians[i];
        for (int64_t j = 0; j < n; j++)
            for (int64_t k = j; k < n; k++) {
                double sum = 0;
                for (int64_t t = 0; t < 2 * n; t++)
                    sum += (double)x[t][j] * (double)x[t][k];
                *to++ = (float)(sum / (double)(2 * n));
            }
    }
    write_hessians(where);
}

/* The values that a weight must have, of x by the Hessian of its input, which was divided by the columns' scales. */
static void check_gptq(const nib_checkpoint *out, size_t i, const float *x, float amax, const float *squares, size_t h,
                       const float *columns)
{
    const struct matrix *m = &matrices[i];
    const int64_t shape[2] = { m->rows, m->cols }, n = m->cols;
    static float folded[I * (I + 1) / 2], u[I * I], wanted[I * H], stored[I * H];
    int32_t order[I];
    float importance[I];
    size_t index;
    nib_quantizer q;
    nib_array array, decoded;
    nib_tensor *t = NULL;
    float *to = folded;
    for (int64_t j = 0; j < n; j++)
        for (int64_t k = j; k < n; k++, to++)
            *to = (float)((double)hessians[h][to - folded] / ((double)columns[j] * (double)columns[k]));
    nib_quantizer_init(&q);
    q.columnwise = 0;
    q.scale_rule = NIB_SCALE_SWEEP;
    q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
    q.min_block_scale = 0x1p-6f;
    CHECK_OK(nib_importance_normalize(squares, n, importance));
    const nib_overrides overrides = {
        .bytes = sizeof overrides, .amax = { &amax, NULL }, .importance = importance, .importance_count = n
    };
    CHECK_OK(nib_array_init(&array, (void *)(uintptr_t)x, NIB_F32, 2, shape));
    CHECK_OK(nib_quantize(&q, &array, &overrides, &t));
    CHECK_OK(nib_gptq_factorize(folded, n, 0.1, NULL, order, u, NULL));
    CHECK_OK(nib_gptq(&array, order, u, n, t));
    CHECK_OK(nib_array_init(&decoded, wanted, NIB_F32, 2, shape));
    CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &decoded));
    nib_tensor_destroy(t);
    CHECK_OK(nib_checkpoint_find_weight(out, m->name, &index));
    CHECK_OK(nib_array_init(&decoded, stored, NIB_F32, 2, shape));
    CHECK_OK(nib_checkpoint_read_rows(out, index, 0, m->rows, &decoded));
    CHECK_THAT(!memcmp(stored, wanted, (size_t)(m->rows * n) * sizeof *wanted), "%s differs", m->name);
}

/* All of a model: by GPTQ what has tokens enough, by the sweep what has not. */
static void check_model(const nib_checkpoint *out, float (*x)[I * H], float (*columns)[I])
{
    for (size_t i = 0; i < MATRICES; i++) {
        const char *name = matrices[i].name;
        float squares[I];
        const bool weighed = squares_of(i, squares);
        if (!strcmp(name, LAYER "mlp.gate"))
            continue;
        for (int64_t k = 0; k < matrices[i].cols && weighed; k++)
            squares[k] = (float)((double)squares[k] / ((double)columns[i][k] * (double)columns[i][k]));
        const bool of_down = strstr(name, "down_proj");
        if (!weighed || (of_down && !strstr(name, "experts.0.")))
            check_codes(out, i, x[i], group_amax(i, x), weighed ? squares : NULL);
        else
            check_gptq(out, i, x[i], group_amax(i, x), squares,
                       of_down                   ? 2
                       : strstr(name, "experts") ? 1
                                                 : 0,
                       columns[i]);
    }
}

TEST(codes_by_gptq)
{
    static float folded[MATRICES][I * H], columns[MATRICES][I];
    make_model();
    make_statistics("stats");
    make_hessians("stats.hessians");
    nib_checkpoint *in = open_good(at("model"));
    nib_quantize_options options = options_of();
    nib_plan *plan = NULL;
    options.gptq = 1;
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    CHECK(!strcmp(row_of(plan, LAYER "self_attn.v_proj").gptq, "192 tokens"));
    CHECK(!strcmp(row_of(plan, EXPERT "1.up_proj").gptq, "307 tokens"));
    CHECK(!strcmp(row_of(plan, EXPERT "0.down_proj").gptq, "300 tokens"));
    CHECK(!strcmp(row_of(plan, EXPERT "2.down_proj").gptq, "none: 7 tokens, and 48 columns need 288"));
    CHECK(!strcmp(row_of(plan, LAYER "self_attn.o_proj").gptq, "none: there are no statistics of its input"));
    CHECK(!*row_of(plan, LAYER "mlp.gate").gptq);
    const char *damp = json_string_value(json_object_get(plan->options, "gptq_damp"));
    CHECK_THAT(damp && !strcmp(damp, "0.1"), "provenance has the damping %s", damp ? damp : "of nothing");
    nib_plan_destroy(plan);
    for (size_t i = 0; i < MATRICES; i++)
        for (int k = 0; k < I; k++)
            columns[i][k] = 1;
    nib_checkpoint *out = run_plan(in, &options, "out");
    check_model(out, values, columns);
    nib_checkpoint_close(out);
    options.fold = NIB_FOLD_FIXED;
    out = run_plan(in, &options, "out");
    nib_file *file = NULL;
    CHECK_OK(nib_file_open(at("out/nib-fold.scales"), &file));
    fold_values(file, folded, columns);
    nib_file_close(file);
    check_model(out, folded, columns);
    nib_checkpoint_close(out);
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    for (int threads = 1; threads <= 7; threads += 3) {
        const nib_run_options force = { .bytes = sizeof force, .force = 1 };
        const nib_job job = { .bytes = sizeof job, .threads = threads, .max_memory = threads == 1 ? 1 : 0 };
        CHECK_OK(nib_plan_run(plan, at("other"), &force, &job));
        size_t wanted_bytes = 0, bytes = 0;
        void *wanted = get_file("out/model.safetensors", &wanted_bytes);
        void *got = get_file("other/model.safetensors", &bytes);
        CHECK_THAT(bytes == wanted_bytes && !memcmp(wanted, got, bytes), "%d threads: other bytes", threads);
        free(wanted), free(got);
    }
    nib_plan_destroy(plan);
    hessian_of[0].tokens = 0; /* which is too few, and no mistake */
    write_hessians("stats.hessians");
    hessian_of[0].tokens = 6 * H;
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    CHECK(!strcmp(row_of(plan, LAYER "self_attn.v_proj").gptq, "none: 0 tokens, and 32 columns need 192"));
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

static int note_warning(void *context, const nib_progress *progress)
{
    if (progress->warning)
        snprintf(context, 256, "%s", progress->warning);
    return 0;
}

/* An output that clears away what was there must not do so with what it reads. */
TEST(statistics_are_not_replaced)
{
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    static const char *const places[] = { "out/stats.safetensors", "out/layers" };
    make_model();
    make_statistics("stats");
    make_hessians("stats.hessians");
    for (int gptq = 0; gptq < 2; gptq++) {
        nib_checkpoint *in = open_good(at("model"));
        nib_quantize_options options = options_of();
        nib_plan *plan = NULL;
        CHECK(mkdir(at("out"), 0777) == 0 || errno == EEXIST);
        CHECK(rename(at(gptq ? "stats.hessians" : "stats"), at(places[gptq])) == 0);
        options.statistics = at(gptq ? "stats" : places[0]);
        options.gptq = (uint8_t)gptq;
        options.hessians = gptq ? at("out/layers") : NULL;
        CHECK_OK(nib_plan_quantize(in, &options, &plan));
        CHECK_FAILS(nib_plan_run(plan, at(gptq ? "out/layers" : "out"), &force, NULL), NIB_ERR_MODE,
                    "safetensors, which is read: choose another place");
        CHECK(strstr(nib_last_error(), "would be around"));
        if (gptq) /* a directory in the output's stays */
            CHECK_OK(nib_plan_run(plan, at("out"), &force, NULL));
        nib_plan_destroy(plan);
        nib_checkpoint_close(in);
        CHECK(rename(at(places[gptq]), at(gptq ? "stats.hessians" : "stats")) == 0);
    }
}

/* What is not positive definite leaves the codes of the sweep, and says so. */
TEST(a_hessian_that_is_not_positive_definite)
{
    make_model();
    make_statistics("stats");
    make_hessians("stats.hessians");
    for (int64_t k = 1; k < H; k++)
        hessians[0][k] = 1e6f;
    write_hessians("stats.hessians");
    nib_checkpoint *in = open_good(at("model"));
    nib_quantize_options options = options_of();
    nib_plan *plan = NULL;
    char warning[256] = "";
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    const nib_job job = { .bytes = sizeof job, .progress = note_warning, .context = warning };
    options.gptq = 1;
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    CHECK_OK(nib_plan_run(plan, at("out"), &force, &job));
    CHECK_THAT(strstr(warning, "stats-of-layer-00000.safetensors: the Hessian of \"" LAYER "self_attn.q_proj\" is not"),
               "%s", warning);
    nib_plan_destroy(plan);
    nib_checkpoint *out = open_good(at("out"));
    for (size_t i = 0; i < 3; i++) {
        float squares[I];
        CHECK(squares_of(i, squares));
        check_codes(out, i, values[i], group_amax(i, values), squares);
    }
    nib_checkpoint_close(out);
    nib_checkpoint_close(in);
}

/* What a Hessian says of its tokens counts, whatever the statistics were made of. */
TEST(a_hessian_of_no_tokens)
{
    make_model();
    make_statistics("stats");
    hessian_of[1].tokens = 0;
    make_hessians("stats.hessians");
    hessian_of[1].tokens = -1;
    nib_checkpoint *in = open_good(at("model"));
    nib_quantize_options options = options_of();
    nib_plan *plan = NULL;
    options.gptq = 1;
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    const nib_plan_row row = row_of(plan, EXPERT "1.up_proj");
    CHECK_THAT(!strcmp(row.gptq, "none: 0 tokens, and 32 columns need 192"), "%s", row.gptq);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

TEST(hessians_that_are_rejected)
{
    empty_directory();
    make_model();
    make_statistics("stats");
    make_hessians("good");
    if (entries(at("bad")) < 0)
        CHECK(mkdir(at("bad"), 0777) == 0);
    nib_checkpoint *in = open_good(at("model"));
    nib_plan *plan = NULL;
    nib_quantize_options options = options_of();
    options.gptq = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_DATA, "stats.hessians");
    options.hessians = at("bad");
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_DATA, "there are no Hessians in it");
    const int64_t triangle = H * (H + 1) / 2, other = 10, off = 11, one = 1, negative = -1;
    float values_of_it[H * (H + 1) / 2] = { 1 };
    static const char name[] = LAYER "self_attn.q_proj.hessian", count[] = LAYER "self_attn.q_proj.hessian_count";
    const struct {
        nib_dtype dtype;
        int64_t n;
        float value;
        const char *format, *tokens, *words;
    } cases[] = {
        { NIB_F32, other, 1, "nib-stats-1", NULL, "has 4 columns" },
        { NIB_F32, off, 1, "nib-stats-1", NULL, "K (K + 1) / 2" },
        { NIB_I32, triangle, 1, "nib-stats-1", NULL, "must be F32" },
        { NIB_F32, triangle, NAN, "nib-stats-1", NULL, "value 9 of \"" LAYER "self_attn.q_proj\".hessian is a NaN" },
        { NIB_F32, triangle, INFINITY, "nib-stats-1", NULL, "infinite" },
        { NIB_F32, triangle, 1, "pt", NULL, "nib-stats-1" },
        { NIB_F32, triangle, 1, "nib-stats-1", "b", "other tokens" },
        { NIB_F32, triangle, 1, "nib-stats-1", "negative", "hessian_count\" is negative" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_writer *writer = NULL;
        const bool counted = cases[i].tokens && *cases[i].tokens == 'n';
        values_of_it[9] = cases[i].value;
        CHECK_OK(nib_writer_create(at("bad/stats-of-layer-00000.safetensors"), &writer));
        CHECK_OK(nib_writer_metadata(writer, "format", cases[i].format));
        if (cases[i].tokens)
            CHECK_OK(nib_writer_metadata(writer, "tokens_sha256", counted ? "a" : cases[i].tokens));
        CHECK_OK(nib_writer_declare(writer, name, cases[i].dtype, 1, &cases[i].n));
        if (counted)
            CHECK_OK(nib_writer_declare(writer, count, NIB_I64, 1, &one));
        CHECK_OK(nib_writer_write(writer, name, 0, values_of_it, (size_t)cases[i].n * 4));
        if (counted)
            CHECK_OK(nib_writer_write(writer, count, 0, &negative, sizeof negative));
        CHECK_OK(nib_writer_commit(writer));
        nib_writer_destroy(writer);
        CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_DATA, cases[i].words);
        CHECK_THAT(strstr(nib_last_error(), "stats-of-layer-00000.safetensors"), "%s", nib_last_error());
    }
    make_hessians("twice");
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(at("twice/stats-of-layer-00007.safetensors"), &writer));
    CHECK_OK(nib_writer_metadata(writer, "format", "nib-stats-1"));
    for (int declare = 1; declare >= 0; declare--)
        put_hessian(writer, 0, declare);
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    options.hessians = at("twice");
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_DATA, "too");
    options.hessians = at("absent");
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_IO, "absent");
    options.hessians = at("good");
    options.damp = -0.5f;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "damping");
    options.damp = NIB_UNSET;
    options.scale_rule = NIB_SCALE_RTN;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "sweep");
    options.scale_rule = NIB_UNSET;
    options.statistics = NULL;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "statistics");
    make_hessians("good");
    static const float damps[][2] = { { NIB_UNSET, 0.1f }, { 0, 0 }, { 0.5f, 0.5f }, { 2, 2 } };
    for (size_t i = 0; i < sizeof damps / sizeof *damps; i++) {
        options = options_of();
        options.gptq = 1;
        options.hessians = at("good");
        options.damp = damps[i][0];
        CHECK_OK(nib_plan_quantize(in, &options, &plan));
        CHECK_THAT(plan && fabs(plan->damp - (double)damps[i][1]) < 1e-7, "%g: %g", (double)damps[i][0],
                   plan ? plan->damp : 0);
        nib_plan_destroy(plan);
        plan = NULL;
    }
    options = options_of();
    options.damp = 0.1f;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "--gptq");
    CHECK(!plan);
    nib_checkpoint_close(in);
}

/* ---- Tensor scales of weighed weights ---- */

static int find_wrong(void *context, const nib_finding *finding)
{
    *(int *)context += !strcmp(finding->id, "tensor-scale-wrong") && strstr(finding->tensor, "self_attn.q_proj");
    return 0;
}

/* Multiply the tensor scale of q, which is one F32, in the file. */
static void scale_q(const char *directory_name, float factor)
{
    char path[512];
    nib_file *file = NULL;
    nib_entry entry;
    size_t index;
    float value;
    snprintf(path, sizeof path, "%s/model.safetensors", at(directory_name));
    CHECK_OK(nib_file_open(path, &file));
    CHECK_OK(nib_file_find(file, LAYER "self_attn.q_proj.weight_global_scale", &index));
    CHECK_OK(nib_file_entry(file, index, &entry));
    CHECK_OK(nib_file_read(file, index, 0, &value, sizeof value));
    const long begin = (long)(nib_file_data_begin(file) + entry.begin);
    nib_file_close(file);
    FILE *raw = fopen(path, "r+b");
    value *= factor;
    CHECK(raw && !fseek(raw, begin, SEEK_SET) && fwrite(&value, sizeof value, 1, raw) == 1 && !fclose(raw));
}

TEST(a_tensor_scale_is_told_by_the_nearest_codes)
{
    static const struct {
        float factor;
        int wrong;
    } cases[] = { { 1, 0 }, { 1.1f, 1 }, { 1 / 1.1f, 1 }, { 0.93f, 1 }, { 2, 1 } };
    make_model();
    make_statistics("stats");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_checkpoint *in = open_good(at("model"));
        nib_quantize_options options = options_of();
        nib_plan *plan = NULL;
        nib_job job;
        int wrong = 0;
        nib_job_init(&job);
        CHECK_OK(nib_os_remove_directory(at("weighed")));
        CHECK_OK(nib_plan_quantize(in, &options, &plan));
        CHECK_OK(nib_plan_run(plan, at("weighed"), NULL, NULL));
        nib_plan_destroy(plan);
        scale_q("weighed", cases[i].factor);
        nib_checkpoint *out = open_good(at("weighed"));
        CHECK_OK(nib_checkpoint_check(out, in, &job, find_wrong, &wrong));
        CHECK_THAT(wrong == cases[i].wrong, "%g: %d findings", (double)cases[i].factor, wrong);
        nib_checkpoint_close(out);
        nib_checkpoint_close(in);
    }
}

/* ---- More than 4 bits ---- */

static int count_rows(const nib_plan *plan, nib_action action, const char *part)
{
    nib_plan_row row = { .bytes = sizeof row };
    int n = 0;
    for (size_t i = 0; !nib_plan_get_row(plan, i, &row); i++)
        n += row.action == action && strstr(row.name, part) && !strstr(row.name, "norm") &&
             !strstr(row.name, "mlp.gate");
    return n;
}

static void plan_counts(const nib_checkpoint *in, const nib_quantize_options *options, int attention_fp8,
                        int attention_kept, int experts_fp8, int experts_kept)
{
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_quantize(in, options, &plan));
    const int found[] = { count_rows(plan, NIB_ACTION_FP8, "self_attn"), count_rows(plan, NIB_ACTION_KEEP, "self_attn"),
                          count_rows(plan, NIB_ACTION_FP8, "experts"), count_rows(plan, NIB_ACTION_KEEP, "experts") };
    CHECK_THAT(found[0] == attention_fp8 && found[1] == attention_kept && found[2] == experts_fp8 &&
                   found[3] == experts_kept,
               "%d %d %d %d", found[0], found[1], found[2], found[3]);
    nib_plan_destroy(plan);
}

TEST(weights_that_have_more_bits_together)
{
    static const char *const k[] = { "*k_proj" }, *const expert[] = { EXPERT "1.up_proj" }, *const none[] = { "zz" };
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    nib_plan *plan = NULL;
    for (int fold = 0; fold < 2; fold++) {
        nib_quantize_options options = options_of();
        options.fold = fold ? NIB_FOLD_FIXED : NIB_FOLD_NONE;
        options.fp8 = k;
        options.n_fp8 = 1;
        plan_counts(in, &options, 3, 0, 0, 0); /* q and v are fused with it */
        options.plain = expert;
        options.n_plain = 1;
        plan_counts(in, &options, 3, 0, 0, 9);
        options.plain = k;
        options.fp8 = expert;
        plan_counts(in, &options, 0, 3, 9, 0);
        options.fp8 = options.plain = expert; /* as it is: more of them */
        plan_counts(in, &options, 0, 0, 0, 9);
        options.fp8 = none;
        CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "fp8");
        options.fp8 = k;
        options.plain = none;
        CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "plain");
        options.plain = NULL;
        CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "NULL");
        options.n_plain = 0;
        options.budget = 5;
        CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "one of the two");
    }
    nib_checkpoint_close(in);
    CHECK(!plan);
}

/* Bits of a weight that a plan takes; *raised: of how many weights it makes more. */
static double bits_of(const nib_checkpoint *in, float budget, bool plain, int *raised)
{
    nib_quantize_options options = options_of();
    nib_plan *plan = NULL;
    nib_plan_row row = { .bytes = sizeof row };
    double bytes = 0, elements = 0;
    options.budget = budget;
    options.budget_plain = plain;
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    for (size_t i = 0; !nib_plan_get_row(plan, i, &row); i++)
        if (row.rows * row.cols > E * H && row.rows > 1) {
            bytes += (double)row.bytes_out;
            elements += (double)(row.rows * row.cols);
        }
    *raised = count_rows(plan, plain ? NIB_ACTION_KEEP : NIB_ACTION_FP8, "");
    nib_plan_destroy(plan);
    return 8 * bytes / elements;
}

TEST(a_budget_is_kept)
{
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    for (int plain = 0; plain < 2; plain++) {
        int before = 0, raised;
        for (int step = 0; step <= 23; step++) {
            const float budget = 4.5f + 0.5f * (float)step;
            const double bits = bits_of(in, budget, plain, &raised);
            /* a tensor scale of each weight is not counted in the budget */
            CHECK_THAT(bits <= (double)budget + 0.1, "%g bits of %g", bits, (double)budget);
            CHECK_THAT(raised >= before || plain, "%d weights, then %d", before, raised);
            before = raised;
        }
        CHECK_THAT(plain ? before > 0 : before == 13, "%d weights", before); /* values of F32 take 32 bits */
    }
    nib_checkpoint_close(in);
}

TEST(rows_of_fp8)
{
    enum { ROWS = 5, COLS = 32 };
    static float x[ROWS][COLS], read[ROWS][COLS];
    const int64_t shape[2] = { ROWS, COLS };
    static const char *const all[] = { "*" };
    nib_array array;
    if (entries(at("small")) < 0)
        CHECK(mkdir(at("small"), 0777) == 0);
    put_text("small/config.json", "{\"model_type\": \"llama\"}");
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++)
            x[r][c] = r == 1 ? 0 : test_normal() * (r == 2 ? 0x1p-140f : r == 3 ? 0x1p120f : 1);
    for (int bad = 0; bad < 3; bad++) {
        const float kept = x[4][7];
        x[4][7] = bad == 1 ? NAN : bad == 2 ? -INFINITY : kept;
        put_tensors("small/model.safetensors",
                    (struct item[]){ { LAYER "mlp.down_proj.weight", NIB_F32, 2, { ROWS, COLS }, x } }, 1);
        nib_checkpoint *in = open_good(at("small"));
        nib_plan *plan = NULL;
        nib_quantize_options options;
        nib_quantize_options_init(&options);
        options.fp8 = all;
        options.n_fp8 = 1;
        CHECK_OK(nib_plan_quantize(in, &options, &plan));
        if (bad) {
            CHECK_FAILS(nib_plan_run(plan, at("fp8"), NULL, NULL), NIB_ERR_DATA, "down_proj\" is not finite at [4, 7]");
            CHECK(!nib_os_exists(at("fp8/config.json")));
        } else {
            CHECK_OK(nib_plan_run(plan, at("fp8"), NULL, NULL));
            nib_checkpoint *out = open_good(at("fp8"));
            CHECK_OK(nib_array_init(&array, read, NIB_F32, 2, shape));
            CHECK_OK(nib_checkpoint_read_rows(out, 0, 0, ROWS, &array));
            nib_checkpoint_close(out);
        }
        CHECK_OK(nib_os_remove_directory(at("fp8")));
        nib_plan_destroy(plan);
        nib_checkpoint_close(in);
        x[4][7] = kept;
    }
    for (int r = 0; r < ROWS; r++) {
        float amax = 0;
        for (int c = 0; c < COLS; c++)
            amax = fmaxf(amax, fabsf(x[r][c]));
        for (int c = 0; c < COLS; c++) { /* half a step of 3 bits, or of the smallest code; scales are BF16 */
            const float step = fmaxf(fabsf(x[r][c]) / 16, fmaxf(amax / 448, 0x1p-126f) * 0x1p-9f) * 1.01f;
            CHECK_THAT(fabsf(read[r][c] - x[r][c]) <= step, "[%d, %d]: %a for %a", r, c, (double)read[r][c],
                       (double)x[r][c]);
        }
    }
}

/* Codes of another checkpoint, FP8 and, without GPTQ, what stays: what plans of a mixture are made of. */
static void mix(nib_quantize_options *options)
{
    static const char *const fp8[] = { "*q_proj" }, *const experts[] = { "*.experts.0.up_proj" };
    options->fp8 = options->gptq ? fp8 : experts;
    options->n_fp8 = 1;
    options->plain = fp8;
    options->n_plain = !options->gptq;
    options->codes = at("codes");
}

static void make_codes(const nib_checkpoint *in)
{
    static const char *const only[] = { "*o_proj" };
    nib_quantize_options options;
    nib_plan *plan = NULL;
    nib_quantize_options_init(&options);
    CHECK_OK(nib_os_remove_directory(at("codes")));
    options.only = only;
    options.n_only = 1;
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    CHECK_OK(nib_plan_run(plan, at("codes"), NULL, NULL));
    nib_plan_destroy(plan);
}

static bool same_plans(const nib_plan *a, const nib_plan *b)
{
    bool same = a->n_tensors == b->n_tensors && a->n_weights == b->n_weights && (!a->fold || a->fold->n == b->fold->n);
    for (size_t i = 0; same && i < a->in->n_weights; i++) {
        const nib_plan_row x = row_of(a, a->in->weights[i].name), y = row_of(b, b->in->weights[i].name);
        same = !strcmp(x.fold, y.fold) && !strcmp(x.statistics, y.statistics) && !strcmp(x.gptq, y.gptq) &&
               x.tokens == y.tokens && x.action == y.action;
    }
    for (size_t i = 0; same && i < a->n_groups; i++)
        same = a->groups[i].input_amax == b->groups[i].input_amax;
    return same;
}

/* The same plan, or none. */
TEST(without_memory)
{
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    make_hessians("stats.hessians");
    make_codes(in);
    for (int way = 0; way < 6; way++) {
        nib_quantize_options options = options_of();
        nib_plan *whole = NULL;
        options.scheme = NIB_SCHEME_NVFP4;
        options.activation = NIB_ACTIVATION_STATISTICS;
        options.gptq = way < 2;
        options.fold = way == 3 ? NIB_FOLD_SEARCH : way < 3 ? NIB_FOLD_FIXED : NIB_FOLD_NONE;
        if (way == 1 || way == 2)
            mix(&options);
        options.budget = way > 3 ? 6 : 0;
        options.budget_plain = way == 5;
        CHECK_OK(nib_plan_quantize(in, &options, &whole));
        for (long n = 0, failed = 1; failed && n < 100000; n++) {
            nib_plan *plan = NULL;
            allocations_left = n;
            const nib_status status = nib_plan_quantize(in, &options, &plan);
            failed = allocations_left < 0;
            allocations_left = -1;
            CHECK_THAT(status ? status == NIB_ERR_MEMORY && !plan : same_plans(plan, whole),
                       "way %d, allocation %ld: %s: %s", way, n, nib_status_name(status), nib_last_error());
            CHECK(failed || n > 100);
            nib_plan_destroy(plan);
        }
        nib_plan_destroy(whole);
    }
    nib_checkpoint_close(in);
}

static int count_finding(void *context, const nib_finding *finding)
{
    (void)finding;
    ++*(long *)context;
    return 0;
}

static void run_without_memory(const nib_plan *plan)
{
    nib_status status = NIB_ERR_MEMORY;
    nib_job job;
    nib_job_init(&job);
    job.threads = 1; /* the test's own, of which allocations fail */
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    for (long n = 0; status == NIB_ERR_MEMORY && n < 100000; n += 1 + n / 16) {
        allocations_left = n;
        status = nib_plan_run(plan, at("mixed"), NULL, &job);
        allocations_left = -1;
        CHECK_THAT(!status || status == NIB_ERR_MEMORY, "allocation %ld: %s: %s", n, nib_status_name(status),
                   nib_last_error());
        if (status && nib_os_exists(at("mixed/config.json"))) /* all was there, and was about to get its names */
            CHECK_OK(nib_plan_run(plan, at("mixed"), &resume, &job));
        if (status)
            CHECK_OK(nib_os_remove_directory(at("mixed")));
    }
    CHECK(!status);
    nib_checkpoint *out = open_good(at("mixed"));
    long findings = 0, failed = 1;
    for (long n = 0; failed && n < 100000; n++) {
        allocations_left = n;
        status = nib_checkpoint_check(out, NULL, &job, count_finding, &findings);
        failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(!status || (failed && status == NIB_ERR_MEMORY), "allocation %ld of a check: %s: %s", n,
                   nib_status_name(status), nib_last_error());
    }
    CHECK_THAT(!status && !findings, "%ld findings", findings);
    nib_checkpoint_close(out);
    CHECK_OK(nib_os_remove_directory(at("mixed")));
}

TEST(a_run_without_memory)
{
    make_model();
    make_statistics("stats");
    nib_checkpoint *in = open_good(at("model"));
    make_hessians("stats.hessians");
    make_codes(in);
    for (int gptq = 0; gptq < 2; gptq++) {
        nib_quantize_options options = options_of();
        nib_plan *plan = NULL;
        options.fold = NIB_FOLD_FIXED;
        options.gptq = (uint8_t)gptq;
        mix(&options);
        CHECK_OK(nib_plan_quantize(in, &options, &plan));
        run_without_memory(plan);
        nib_plan_destroy(plan);
    }
    nib_checkpoint_close(in);
}

TEST_MAIN

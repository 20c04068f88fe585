/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_run.c - plans and their runs: every byte of the output against the library's own quantization of the whole
 * matrix; the same bytes for any threads, memory and ranks; and what is left after everything that can go wrong.
 */
#define _GNU_SOURCE
/* NIB_TEST_WRAP_ALLOC */
#include "io/checkpoint.h"
#include "plan/plan.h"
#include "model/read.h"
#include "base/os.h"
#include "team.h"
#include "test_alloc.h"
#include "test_weights.h"

#include <errno.h>
#include <math.h>
#include <sys/stat.h>

/* ---- Directories ---- */

static bool file_has(const char *path, const char *words)
{
    size_t bytes;
    char *text = get_file(path, &bytes);
    const bool has = text && memmem(text, bytes, words, strlen(words));
    free(text);
    return has;
}

static bool same_file(const char *a, const char *b)
{
    size_t n, m;
    char *x = get_file(a, &n), *y = get_file(b, &m);
    const bool same = x && y && n == m && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

static void check_same_directory(const char *a, const char *b)
{
    char x[512], y[512];
    DIR *listing = opendir(a);
    CHECK_THAT(listing && entries(a) == entries(b), "%s has %d entries, %s has %d", a, entries(a), b, entries(b));
    if (!listing)
        return;
    for (struct dirent *item; (item = readdir(listing));) {
        if (item->d_name[0] == '.' && strcmp(item->d_name, ".nib-partial") != 0)
            continue;
        snprintf(x, sizeof x, "%s/%s", a, item->d_name);
        snprintf(y, sizeof y, "%s/%s", b, item->d_name);
        CHECK_THAT(same_file(x, y), "%s and %s differ", x, y);
    }
    closedir(listing);
}

static const char *fresh(const char *name)
{
    const char *path = at(name);
    CHECK_OK(nib_os_remove_directory(path));
    return path;
}

/* ---- A model ---- */

struct random_item {
    const char *name;
    nib_dtype dtype;
    int rank;
    int64_t shape[4];
    float sigma; /* 0: ones */
};

static void put_random(const char *path, const struct random_item *items, size_t n)
{
    struct item filled[16];
    CHECK(n <= 16);
    for (size_t i = 0; i < n; i++) {
        filled[i] = (struct item){ .name = items[i].name, .dtype = items[i].dtype, .rank = items[i].rank };
        memcpy(filled[i].shape, items[i].shape, sizeof filled[i].shape);
        const size_t count = (size_t)elements_in(items[i].rank, items[i].shape);
        float *x = malloc((count + 1) * sizeof *x);
        void *data = calloc(count + 1, 8);
        for (size_t j = 0; j < count; j++)
            x[j] = items[i].sigma > 0 ? items[i].sigma * test_normal() : 1;
        if (items[i].dtype == NIB_I64)
            memset(data, 0xA5, 8 * count);
        else
            CHECK_OK(nib_encode(items[i].dtype, x, count, data));
        filled[i].data = data;
        free(x);
    }
    put_tensors(path, filled, n);
    for (size_t i = 0; i < n; i++)
        free((void *)(uintptr_t)filled[i].data);
}
#define PUT(path, ...)                                      \
    put_random(path, (struct random_item[]){ __VA_ARGS__ }, \
               sizeof((struct random_item[]){ __VA_ARGS__ }) / sizeof(struct random_item))

enum { H = 64, I = 144, V = 40, E = 3, INNER = 32 };
#define LAYER "model.layers.0."

/* q and k in different files, and a weight that is much larger than its sisters. */
static void make_model(const char *path)
{
    char name[256];
    CHECK_OK(nib_os_remove_directory(path));
    CHECK(mkdir(path, 0777) == 0);
    snprintf(name, sizeof name, "%s/model-00001-of-00002.safetensors", path);
    PUT(name, { "model.embed_tokens.weight", NIB_BF16, 2, { V, H }, 1 },
        { LAYER "self_attn.q_proj.weight", NIB_BF16, 2, { H, H }, 0.02f },
        { LAYER "self_attn.v_proj.weight", NIB_BF16, 2, { 48, H }, 0.01f },
        { LAYER "mlp.gate_proj.weight", NIB_BF16, 2, { I, H }, 0.02f },
        { LAYER "mlp.odd.weight", NIB_BF16, 2, { 8, 24 }, 0.02f },
        { LAYER "input_layernorm.weight", NIB_BF16, 1, { H }, 0 });
    snprintf(name, sizeof name, "%s/model-00002-of-00002.safetensors", path);
    PUT(name, { "lm_head.weight", NIB_BF16, 2, { V, H }, 0.05f },
        { LAYER "self_attn.k_proj.weight", NIB_BF16, 2, { 48, H }, 0.2f },
        { LAYER "self_attn.k_proj.bias", NIB_BF16, 1, { 48 }, 0.2f },
        { LAYER "mlp.up_proj.weight", NIB_BF16, 2, { I, H }, 0.3f },
        { LAYER "mlp.down_proj.weight", NIB_F32, 2, { H, I }, 0.02f }, { "counter", NIB_I64, 1, { 8 }, 0 });
    snprintf(name, sizeof name, "%s/config.json", path);
    put_text(name, "{\"model_type\": \"llama\", \"hidden_size\": 64, \"rms_norm_eps\": 1e-05, \"rope_theta\": 10000.0, "
                   "\"torch_dtype\": \"bfloat16\"}");
    snprintf(name, sizeof name, "%s/tokenizer.json", path);
    put_text(name, "{}");
    snprintf(name, sizeof name, "%s/pytorch_model.bin", path);
    put_text(name, "pickled");
}

/* One that llama.cpp has an architecture for. */
static void make_llama(const char *path)
{
    char name[256];
    CHECK_OK(nib_os_remove_directory(path));
    CHECK(mkdir(path, 0777) == 0);
    snprintf(name, sizeof name, "%s/model.safetensors", path);
    PUT(name, { "model.embed_tokens.weight", NIB_BF16, 2, { V, H }, 1 },
        { LAYER "self_attn.q_proj.weight", NIB_BF16, 2, { H, H }, 0.02f },
        { LAYER "self_attn.k_proj.weight", NIB_BF16, 2, { 32, H }, 0.2f },
        { LAYER "self_attn.k_proj.bias", NIB_BF16, 1, { 32 }, 0.2f },
        { LAYER "self_attn.v_proj.weight", NIB_BF16, 2, { 32, H }, 0.01f },
        { LAYER "self_attn.o_proj.weight", NIB_BF16, 2, { H, H }, 0.01f },
        { LAYER "mlp.gate_proj.weight", NIB_BF16, 2, { I, H }, 0.02f },
        { LAYER "mlp.up_proj.weight", NIB_BF16, 2, { I, H }, 0.3f },
        { LAYER "input_layernorm.weight", NIB_BF16, 1, { H }, 0 });
    snprintf(name, sizeof name, "%s/config.json", path);
    put_text(
        name,
        "{\"model_type\": \"llama\", \"hidden_size\": 64, \"intermediate_size\": 144, \"num_hidden_layers\": 1, "
        "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"vocab_size\": 40, \"torch_dtype\": \"bfloat16\"}");
    snprintf(name, sizeof name, "%s/tokenizer.json", path);
    put_text(name, TINY_TOKENIZER);
}

static nib_plan *plan_quantize(const nib_checkpoint *in, const nib_quantize_options *options)
{
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_quantize(in, options, &plan));
    return plan;
}

/* From directory to directory, all defaults but these. */
static nib_status quantize(const char *in, const char *out, const nib_quantize_options *options,
                           const nib_run_options *run, const nib_job *job)
{
    nib_checkpoint *c = NULL;
    nib_plan *plan = NULL;
    nib_status status = nib_checkpoint_open(in, &c);
    if (!status)
        status = nib_plan_quantize(c, options, &plan);
    if (!status)
        status = nib_plan_run(plan, out, run, job);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    return status;
}

static nib_quantize_options with(nib_checkpoint_format format)
{
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.format = format;
    return options;
}

/* ---- Against the library itself ---- */

static void *read_tensor(const nib_checkpoint *c, const char *name, const struct nib_ck_tensor **t)
{
    const uint32_t id = nib_ck_find_tensor(c, name);
    CHECK_THAT(id != NIB_NONE, "there is no tensor %s", name);
    if (id == NIB_NONE)
        return NULL;
    *t = &c->tensors[id];
    void *bytes = malloc((*t)->bytes + 1);
    CHECK_OK(nib_ck_read(c, id, 0, bytes, (*t)->bytes));
    return bytes;
}

/* The codes and scales of a weight in `out` are those of the whole matrix quantized with the group's amax. */
static void check_quantized(const nib_checkpoint *in, const nib_checkpoint *out, const char *name,
                            const nib_quantizer *q, float amax)
{
    size_t a, b;
    nib_weight facts = { .bytes = sizeof facts }, made = { .bytes = sizeof made };
    CHECK_OK(nib_checkpoint_find_weight(in, name, &a));
    CHECK_OK(nib_checkpoint_find_weight(out, name, &b));
    CHECK_OK(nib_checkpoint_get_weight(in, a, &facts));
    CHECK_OK(nib_checkpoint_get_weight(out, b, &made));
    CHECK(facts.rows == made.rows && facts.cols == made.cols);
    const int64_t rows = facts.rows, cols = facts.cols, blocks = cols / 16, shape[2] = { rows, cols };
    void *x = malloc((size_t)(rows * cols) * 4);
    uint8_t *codes = malloc((size_t)(rows * cols / 2)), *scales = malloc((size_t)(rows * blocks));
    nib_array view, part;
    nib_tensor *t = NULL;
    CHECK_OK(nib_array_init(&view, x, facts.dtype, 2, shape));
    CHECK_OK(nib_checkpoint_read_rows(in, a, 0, rows, &view));
    CHECK_OK(nib_checkpoint_read_codes(out, b, 0, rows, codes, scales));
    CHECK_OK(nib_quantize(q, &view, &(nib_overrides){ .bytes = sizeof(nib_overrides), .amax = { &amax, NULL } }, &t));
    CHECK_OK(nib_tensor_part(t, NIB_ROW_DATA, &part));
    CHECK_BYTES(codes, part.data, rows * cols / 2);
    CHECK_OK(nib_tensor_part(t, NIB_ROW_SCALE, &part));
    for (int64_t r = 0; r < rows; r++)
        CHECK_BYTES(scales + r * blocks, (uint8_t *)part.data + r * part.shape[1], blocks);
    CHECK_OK(nib_tensor_part(t, NIB_ROW_TENSOR_SCALE, &part));
    const float tensor_scale = *(float *)part.data,
                g = made.tensor_scale_kind == NIB_TENSOR_SCALE_DIVISOR ? 1 / made.tensor_scale : made.tensor_scale;
    CHECK_THAT(g == tensor_scale, "%s: tensor scale %g, not %g", name, (double)g, (double)tensor_scale);
    nib_tensor_destroy(t);
    free(x);
    free(codes);
    free(scales);
}

static float amax_of(const nib_checkpoint *in, const char *name)
{
    size_t index;
    nib_weight facts = { .bytes = sizeof facts };
    CHECK_OK(nib_checkpoint_find_weight(in, name, &index));
    CHECK_OK(nib_checkpoint_get_weight(in, index, &facts));
    const int64_t shape[2] = { facts.rows, facts.cols };
    const size_t n = (size_t)(facts.rows * facts.cols);
    float *x = malloc(n * sizeof *x), amax = 0;
    nib_array view;
    CHECK_OK(nib_array_init(&view, x, NIB_F32, 2, shape));
    CHECK_OK(nib_checkpoint_read_rows(in, index, 0, facts.rows, &view));
    for (size_t i = 0; i < n; i++)
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    free(x);
    return amax;
}

static void default_quantizer(nib_quantizer *q)
{
    nib_quantizer_init(q);
    q->columnwise = 0;
    q->scale_rule = NIB_SCALE_SWEEP;
    q->tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
    q->min_block_scale = 0x1p-6f;
}

TEST(codes_are_those_of_the_whole_matrix_under_the_amax_of_its_set)
{
    nib_quantizer q;
    default_quantizer(&q);
    make_model(at("in"));
    static const nib_checkpoint_format formats[] = { NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS,
                                                     NIB_CHECKPOINT_FORMAT_MODELOPT };
    for (int i = 0; i < 2; i++) {
        const nib_quantize_options options = with(formats[i]);
        CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
        nib_checkpoint *in = open_good(at("in")), *out = open_good(at("out"));
        const float k = amax_of(in, LAYER "self_attn.k_proj"), up = amax_of(in, LAYER "mlp.up_proj");
        CHECK(out->format == formats[i]);
        check_quantized(in, out, LAYER "self_attn.q_proj", &q, k);
        check_quantized(in, out, LAYER "self_attn.k_proj", &q, k);
        check_quantized(in, out, LAYER "self_attn.v_proj", &q, k);
        check_quantized(in, out, LAYER "mlp.gate_proj", &q, up);
        check_quantized(in, out, LAYER "mlp.up_proj", &q, up);
        check_quantized(in, out, LAYER "mlp.down_proj", &q, amax_of(in, LAYER "mlp.down_proj"));
        nib_checkpoint_close(in);
        nib_checkpoint_close(out);
    }
}

/* ModelOpt makes 0 / 0 of a tensor of zeros. Its dialect has that in its own form alone; anything else is zeros. */
TEST(zeros_are_zeros_unless_modelopt_is_asked_for)
{
    PUT(at("zeros.safetensors"), { "a.weight", NIB_BF16, 2, { 16, 32 }, 1e-44f }); /* BF16 has nothing so small */
    static const struct {
        int32_t dialect;
        nib_checkpoint_format format;
        float tensor_scale; /* as stored */
    } cases[] = {
        { NIB_UNSET, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, 1 },
        { NIB_DIALECT_MODELOPT, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, 1 },
        { NIB_DIALECT_COMPRESSED_TENSORS, NIB_CHECKPOINT_FORMAT_MODELOPT, 1 },
        { NIB_DIALECT_MODELOPT, NIB_CHECKPOINT_FORMAT_MODELOPT, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_quantize_options options = with(cases[i].format);
        options.dialect = cases[i].dialect;
        CHECK_OK(quantize(at("zeros.safetensors"), fresh("zeros-out"), &options, NULL, NULL));
        nib_checkpoint *c = open_good(at("zeros-out"));
        nib_weight w = { .bytes = sizeof w };
        float values[16 * 32];
        nib_array out;
        CHECK_OK(nib_checkpoint_get_weight(c, 0, &w));
        CHECK_OK(nib_array_init(&out, values, NIB_F32, 2, (int64_t[]){ 16, 32 }));
        CHECK_OK(nib_checkpoint_read_rows(c, 0, 0, 16, &out));
        CHECK_THAT(w.tensor_scale == cases[i].tensor_scale, "case %zu: tensor scale %g", i, (double)w.tensor_scale);
        for (int k = 0; k < 16 * 32; k++)
            CHECK(cases[i].tensor_scale == 0 ? isnan(values[k]) : values[k] == 0);
        nib_checkpoint_close(c);
    }
}

TEST(what_is_not_quantized_is_copied_byte_for_byte)
{
    make_model(at("in"));
    CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, NULL));
    nib_checkpoint *in = open_good(at("in")), *out = open_good(at("out"));
    size_t copied = 0;
    for (size_t i = 0; in && out && i < in->n_tensors; i++) {
        const struct nib_ck_tensor *t = &in->tensors[i], *u;
        if (nib_ck_find_tensor(out, t->name) == NIB_NONE)
            continue;
        void *x = read_tensor(in, t->name, &t), *y = read_tensor(out, t->name, &u);
        CHECK(t->dtype == u->dtype && t->bytes == u->bytes);
        CHECK_BYTES(x, y, t->bytes);
        free(x);
        free(y);
        copied++;
    }
    CHECK_THAT(copied == 6, "%zu tensors were copied", copied); /* embedding, head, odd, norm, bias, counter */
    nib_checkpoint_close(in);
    nib_checkpoint_close(out);
    CHECK(same_file(at("in/tokenizer.json"), at("out/tokenizer.json")));
    CHECK(!nib_os_exists(at("out/pytorch_model.bin")));
    CHECK(!nib_os_exists(at("out/.nib-partial")));
    CHECK(file_has(at("out/config.json"), "\"rope_theta\": 10000.0"));
    CHECK(file_has(at("out/config.json"), "\"rms_norm_eps\": 1e-05"));
    CHECK(file_has(at("out/config.json"), "\"lm_head\""));
    CHECK(file_has(at("out/config.json"), LAYER "mlp.odd"));
}

TEST(a_plan_says_beforehand_what_comes_of_it)
{
    make_model(at("in"));
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = plan_quantize(in, NULL);
    nib_plan_facts facts = { .bytes = sizeof facts };
    nib_plan_row row = { .bytes = sizeof row };
    struct stat made;
    CHECK_OK(nib_plan_get_facts(plan, &facts));
    CHECK(facts.weights == 9 && facts.changed == 6 && facts.kept == 3 && facts.groups == 2);
    CHECK(facts.files_in == 2 && facts.files_out == 1);
    CHECK(facts.changed_elements == H * H + 2 * 48 * H + 3 * H * I);
    nib_checkpoint_facts source = { .bytes = sizeof source };
    CHECK_OK(nib_checkpoint_get_facts(in, &source));
    CHECK(facts.elements == source.elements);
    CHECK(source.elements == 2 * V * H + facts.changed_elements + 8 * 24 + H + 48 + 8); /* norm, bias, counter too */
    CHECK_OK(nib_plan_run(plan, fresh("out"), NULL, NULL));
    CHECK(stat(at("out/model.safetensors"), &made) == 0 && (uint64_t)made.st_size == facts.bytes_out);
    nib_checkpoint *out = open_good(at("out"));
    nib_checkpoint_facts result = { .bytes = sizeof result };
    CHECK_OK(nib_checkpoint_get_facts(out, &result));
    CHECK(result.tensor_bytes == facts.tensor_bytes_out && result.elements == facts.elements);
    nib_checkpoint_close(out);
    size_t index;
    CHECK_OK(nib_checkpoint_find_weight(in, LAYER "mlp.odd", &index));
    CHECK_OK(nib_plan_get_row(plan, index, &row));
    CHECK(row.action == NIB_ACTION_KEEP && strstr(row.reason, "24 columns"));
    CHECK_OK(nib_checkpoint_find_weight(in, LAYER "self_attn.v_proj", &index));
    CHECK_OK(nib_plan_get_row(plan, index, &row));
    CHECK(row.action == NIB_ACTION_QUANTIZE && strcmp(row.group, LAYER "self_attn.k_proj") == 0);
    CHECK(row.bytes_in == 48 * H * 2 && row.bytes_out == 48 * H / 2 + 48 * H / 16 + 4);
    CHECK_FAILS(nib_plan_get_row(plan, 9, &row), NIB_ERR_ARG, "there is no row 9");
    facts.bytes = 3;
    CHECK_FAILS(nib_plan_get_facts(plan, &facts), NIB_ERR_ARG, "nib_plan_facts");
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

/* ---- The same bytes ---- */

static int run_on_rank(const nib_comm *comm, void *context)
{
    nib_job job;
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    nib_job_init(&job);
    job.comm = comm;
    job.threads = 2;
    options.shard_bytes = 9000;
    return quantize(at("in"), context, &options, NULL, &job) != NIB_OK;
}

TEST(threads_memory_and_ranks_do_not_show)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.shard_bytes = 9000;
    CHECK_OK(quantize(at("in"), fresh("one"), &options, NULL, NULL));
    CHECK(entries(at("one")) > 6);
    static const int32_t threads[] = { 1, 2, 7 };
    static const uint64_t memory[] = { 1, 40000, 0 };
    for (int i = 0; i < 3; i++) {
        nib_job job;
        nib_job_init(&job);
        job.threads = threads[i];
        job.max_memory = memory[i];
        CHECK_OK(quantize(at("in"), fresh("two"), &options, NULL, &job));
        check_same_directory(at("one"), at("two"));
    }
    for (int ranks = 1; ranks <= 3; ranks++) {
        char out[200];
        snprintf(out, sizeof out, "%s", fresh("two"));
        CHECK(team_run(ranks, run_on_rank, out) == 0);
        check_same_directory(at("one"), at("two"));
    }
}

static int stop_in_second_chunk(void *context, const nib_progress *progress)
{
    (void)context;
    return progress->done > 1 << 20;
}

/* Chunks of 1 MB, the last of which decides the scale: any number of threads has its amax and the same hash. One that
 * stops leaves none of the others waiting for its chunk. Strips of rows, 1 MB too, give the codes of the whole. */
TEST(threads_share_the_scan_of_a_file)
{
    enum { ROWS = 280, COLS = 16384 }; /* strips of 32 rows, the last of 24 */
    uint16_t *values = malloc((size_t)ROWS * COLS * sizeof *values);
    for (size_t i = 0; i < (size_t)ROWS * COLS; i++)
        values[i] = (uint16_t)(0x3C00 + i % 251); /* 2^-7 and a little more */
    values[(size_t)ROWS * COLS - 1] = 0x4000;     /* 2 */
    CHECK_OK(nib_os_remove_directory(at("in")));
    CHECK(mkdir(at("in"), 0777) == 0);
    put_tensors(at("in/model.safetensors"),
                &(struct item){ LAYER "mlp.down_proj.weight", NIB_BF16, 2, { ROWS, COLS }, values }, 1);
    free(values);
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    CHECK_OK(quantize(at("in"), fresh("one"), NULL, NULL, &job));
    nib_checkpoint *one = open_good(at("one"));
    CHECK(fabsf(amax_of(one, LAYER "mlp.down_proj") - 2) < 0.2f);
    nib_checkpoint *in = open_good(at("in"));
    nib_quantizer q;
    default_quantizer(&q);
    check_quantized(in, one, LAYER "mlp.down_proj", &q, 2);
    nib_checkpoint_close(in);
    nib_checkpoint_close(one);
    for (int32_t threads = 2; threads <= 5; threads++) {
        job.threads = threads;
        job.progress = NULL;
        CHECK_OK(quantize(at("in"), fresh("two"), NULL, NULL, &job));
        check_same_directory(at("one"), at("two"));
        job.progress = stop_in_second_chunk;
        CHECK_FAILS(quantize(at("in"), fresh("two"), NULL, NULL, &job), NIB_ERR_CANCELLED, "stopped");
    }
    CHECK_OK(nib_os_remove_directory(at("in")));
}

/* Letters of what is written, in its order: c for the copy of a tensor, q for rows of a weight. */
static int note_kind(void *context, const nib_progress *progress)
{
    char *kinds = context;
    const size_t n = strlen(kinds);
    CHECK(n < 60);
    if (!strcmp(progress->phase, "quantizing"))
        kinds[n] = progress->tensor && strstr(progress->tensor, "embed") ? 'c' : 'q';
    return 0;
}

/* 4 MB that are copied and 8 MB that are quantized: evenly all the way, so that threads do not all write. */
TEST(copies_are_spread_among_what_takes_time)
{
    char kinds[64] = "";
    CHECK_OK(nib_os_remove_directory(at("in")));
    CHECK(mkdir(at("in"), 0777) == 0);
    PUT(at("in/model.safetensors"), { "model.embed_tokens.weight", NIB_BF16, 2, { 2048, 1024 }, 0 },
        { LAYER "mlp.down_proj.weight", NIB_BF16, 2, { 4096, 1024 }, 0.02f });
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    job.max_memory = 2 << 20;
    job.progress = note_kind;
    job.context = kinds;
    CHECK_OK(quantize(at("in"), fresh("one"), NULL, NULL, &job));
    CHECK_THAT(!strcmp(kinds, "qcqqcqqcqqcqq"), "%s", kinds);
    CHECK_OK(nib_os_remove_directory(at("in")));
}

TEST(files_are_cut_by_size_or_as_the_input_is)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    nib_plan_facts facts = { .bytes = sizeof facts };
    options.keep_split = 1;
    CHECK_OK(quantize(at("in"), fresh("split"), &options, NULL, NULL));
    CHECK(nib_os_exists(at("split/model-00001-of-00002.safetensors")));
    CHECK(file_has(at("split/model-00002-of-00002.safetensors"), LAYER "self_attn.k_proj.weight_packed"));
    options.keep_split = 0;
    options.shard_bytes = 6000;
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = plan_quantize(in, &options);
    CHECK_OK(nib_plan_get_facts(plan, &facts));
    CHECK(facts.files_out > 3);
    CHECK_OK(nib_plan_run(plan, fresh("cut"), NULL, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    /* The index is sound: opening checks every name. */
    static const char *const made[] = { "split", "cut" };
    for (int i = 0; i < 2; i++) {
        nib_checkpoint *out = open_good(at(made[i]));
        CHECK(out && out->has_index && out->n_diagnostics == 0 && out->n_weights == 9);
        CHECK(out && out->provenance && strstr(out->provenance, "\"xxh3\""));
        nib_checkpoint_close(out);
    }
    CHECK(file_has(at("cut/model.safetensors.index.json"), "\"total_size\""));
}

/* A tensor larger than a shard ends it, also where an empty one had opened it. */
TEST(files_are_cut_behind_empty_tensors)
{
    CHECK_OK(nib_os_remove_directory(at("in")));
    CHECK(mkdir(at("in"), 0777) == 0);
    PUT(at("in/model.safetensors"), { "a", NIB_BF16, 1, { 0 }, 1 }, { "b.weight", NIB_BF16, 2, { H, H }, 1 },
        { "c.weight", NIB_BF16, 2, { H, H }, 1 }, { "d.weight", NIB_BF16, 2, { H, H }, 1 });
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    nib_plan_facts facts = { .bytes = sizeof facts };
    options.shard_bytes = 1000;
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = plan_quantize(in, &options);
    CHECK_OK(nib_plan_get_facts(plan, &facts));
    CHECK_THAT(facts.files_out == 3, "%zu files", facts.files_out);
    /* Two weights that fill a shard to the last byte, each counted with both of its scales, share it. */
    options.shard_bytes = 2 * (H * H / 16 * 9 + 8);
    nib_plan_destroy(plan);
    plan = plan_quantize(in, &options);
    CHECK_OK(nib_plan_get_facts(plan, &facts));
    CHECK_THAT(facts.files_out == 2, "%zu files", facts.files_out);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

/* More names than a plan's first block of memory holds. */
TEST(plans_of_many_weights)
{
    enum { MANY = 3000 };
    static char names[MANY][96];
    static struct item items[MANY];
    static const uint16_t zeros[16 * 16];
    CHECK_OK(nib_os_remove_directory(at("many")));
    CHECK(mkdir(at("many"), 0777) == 0);
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "model.layers.%04d.self_attention_of_a_long_name.q_proj.weight", i);
        items[i] = (struct item){ names[i], NIB_BF16, 2, { 16, 16 }, zeros };
    }
    put_tensors("many/model.safetensors", items, MANY);
    nib_checkpoint *in = open_good(at("many"));
    nib_plan *plan = plan_quantize(in, NULL);
    for (int i = 0; i < MANY; i++) {
        nib_plan_row row = { .bytes = sizeof row };
        CHECK_OK(nib_plan_get_row(plan, (size_t)i, &row));
        CHECK_THAT(strlen(row.name) + 7 == strlen(names[i]) && strncmp(row.name, names[i], strlen(row.name)) == 0,
                   "row %d is %s", i, row.name);
    }
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

/* ---- Formats ---- */

static nib_status convert(const char *in, const char *out, nib_checkpoint_format format)
{
    nib_checkpoint *c = NULL;
    nib_plan *plan = NULL;
    nib_status status = nib_checkpoint_open(in, &c);
    if (!status)
        status = nib_plan_convert(c, format, &plan);
    if (!status)
        status = nib_plan_run(plan, out, NULL, NULL);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    return status;
}

static nib_status dequantize(const char *in, const char *out, nib_dtype dtype)
{
    nib_checkpoint *c = NULL;
    nib_plan *plan = NULL;
    nib_status status = nib_checkpoint_open(in, &c);
    if (!status)
        status = nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_PLAIN, dtype, &plan);
    if (!status)
        status = nib_plan_run(plan, out, NULL, NULL);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    return status;
}

/* Codes, scales and tensor scales of all NVFP4 weights. */
static void check_same_weights(const char *path_a, const char *path_b)
{
    nib_checkpoint *a = open_good(path_a), *b = open_good(path_b);
    size_t compared = 0;
    for (size_t i = 0; a && b && i < a->n_weights; i++) {
        const struct nib_ck_weight *w = &a->weights[i];
        size_t j;
        if (!nib_ck_is_nvfp4(w->format))
            continue;
        compared++;
        CHECK_OK(nib_checkpoint_find_weight(b, w->name, &j));
        const size_t codes = (size_t)(w->rows * w->cols / 2), scales = (size_t)(w->rows * w->cols / 16);
        uint8_t *x = malloc(2 * (codes + scales)), *y = x + codes + scales;
        CHECK_OK(nib_checkpoint_read_codes(a, i, 0, w->rows, x, x + codes));
        CHECK_OK(nib_checkpoint_read_codes(b, j, 0, w->rows, y, y + codes));
        CHECK_BYTES(x, y, codes + scales);
        nib_weight u = { .bytes = sizeof u }, v = { .bytes = sizeof v };
        CHECK_OK(nib_checkpoint_get_weight(a, i, &u));
        CHECK_OK(nib_checkpoint_get_weight(b, j, &v));
        const bool turned =
            (u.tensor_scale_kind == NIB_TENSOR_SCALE_DIVISOR) != (v.tensor_scale_kind == NIB_TENSOR_SCALE_DIVISOR);
        CHECK(v.tensor_scale == (turned ? 1 / u.tensor_scale : u.tensor_scale)); /* powers of two */
        CHECK(u.has_input_scale == v.has_input_scale);
        CHECK(!u.has_input_scale || v.input_scale == (turned ? 1 / u.input_scale : u.input_scale));
        free(x);
    }
    CHECK_THAT(compared == 6, "%zu weights", compared);
    nib_checkpoint_close(a);
    nib_checkpoint_close(b);
}

TEST(conversions_keep_codes_and_scales)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.scheme = NIB_SCHEME_NVFP4;
    CHECK_OK(quantize(at("in"), fresh("ct"), &options, NULL, NULL));
    CHECK_OK(convert(at("ct"), fresh("mo"), NIB_CHECKPOINT_FORMAT_MODELOPT));
    CHECK_OK(convert(at("mo"), fresh("ao"), NIB_CHECKPOINT_FORMAT_TORCHAO));
    CHECK_OK(convert(at("ao"), fresh("back"), NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS));
    check_same_weights(at("ct"), at("mo"));
    check_same_weights(at("ct"), at("ao"));
    check_same_weights(at("ct"), at("back"));
    CHECK(file_has(at("mo/config.json"), "\"quant_algo\": \"NVFP4\""));
    CHECK(file_has(at("mo/hf_quant_config.json"), "\"exclude_modules\""));
    CHECK(file_has(at("back/config.json"), "\"dynamic\": \"local\""));
    CHECK_FAILS(convert(at("ct"), at("x.gguf"), NIB_CHECKPOINT_FORMAT_GGUF), NIB_ERR_UNSUPPORTED,
                "has no place in a GGUF");
}

/* Each of the weights and other tensors, and the names of all. */
TEST(torchao_is_told_what_a_file_has)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    CHECK_OK(quantize(at("in"), fresh("mo"), &options, NULL, NULL));
    CHECK(file_has(at("mo/hf_quant_config.json"), "\"quant_algo\": \"MIXED_PRECISION\""));
    CHECK(file_has(at("mo/hf_quant_config.json"), "\"group_size\": 16,\n    \"exclude_modules\""));
    CHECK_OK(convert(at("mo"), fresh("ao"), NIB_CHECKPOINT_FORMAT_TORCHAO));
    nib_checkpoint *c = open_good(at("ao"));
    size_t weights = 0;
    for (size_t i = 0; i < c->n_files; i++) {
        const nib_file *file = c->files[i].safetensors;
        const char *names = nib_file_metadata(file, "tensor_names"), *key, *value;
        CHECK_THAT(names != NULL, "%s has no names", c->files[i].path);
        for (size_t j = 0; names && j < nib_file_metadata_count(file); j++) {
            CHECK_OK(nib_file_metadata_entry(file, j, &key, &value));
            if (!strstr(value, "\"_type\": "))
                continue;
            const bool quantized = strstr(value, "NVFP4Tensor") != NULL;
            char quoted[256], stored[256];
            size_t index;
            snprintf(quoted, sizeof quoted, "\"%s\"", key);
            snprintf(stored, sizeof stored, "%.*s%s", (int)(strlen(key) - (quantized ? strlen("weight") : 0)), key,
                     quantized ? "_weight_qdata" : "");
            CHECK_THAT(strstr(names, quoted) != NULL, "%s is not among the names", key);
            CHECK_THAT(!nib_file_find(file, stored, &index), "%s is not in its file", stored);
            weights += quantized;
        }
    }
    CHECK_THAT(weights == 6, "%zu weights", weights);
    nib_checkpoint_close(c);
}

static int is_same(void *context, const nib_compared *compared)
{
    size_t *coded = context;
    CHECK_THAT(compared->stats->error_squares == 0, "%s differs", compared->name);
    *coded += nib_ck_is_nvfp4(compared->format_a) && nib_ck_is_nvfp4(compared->format_b);
    return 0;
}

/* To GGUF, where tensors have other names and rows of q and k another order, and from there to ModelOpt. */
TEST(conversions_to_gguf_keep_values)
{
    make_llama(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.scheme = NIB_SCHEME_NVFP4;
    CHECK_OK(quantize(at("in"), fresh("ct"), &options, NULL, NULL));
    CHECK_OK(convert(at("ct"), at("model.gguf"), NIB_CHECKPOINT_FORMAT_GGUF));
    CHECK_OK(convert(at("model.gguf"), fresh("back"), NIB_CHECKPOINT_FORMAT_MODELOPT));
    check_same_weights(at("model.gguf"), at("back"));
    nib_checkpoint *ct = open_good(at("ct")), *gguf = open_good(at("model.gguf"));
    size_t coded = 0, only_ct, only_gguf;
    CHECK_OK(nib_checkpoint_compare(ct, gguf, NULL, is_same, &coded, &only_ct, &only_gguf));
    CHECK_THAT(coded == 6 && only_ct == 0 && only_gguf == 0, "%zu, %zu, %zu", coded, only_ct, only_gguf);
    coded = 0;
    CHECK_OK(nib_checkpoint_compare(gguf, ct, NULL, is_same, &coded, &only_gguf, &only_ct));
    CHECK(coded == 6 && only_ct == 0 && only_gguf == 0);
    nib_checkpoint_close(ct);
    nib_checkpoint_close(gguf);
    unlink(at("model.gguf"));
}

TEST(dequantized_numbers_are_those_of_the_codes)
{
    make_model(at("in"));
    CHECK_OK(quantize(at("in"), fresh("ct"), NULL, NULL, NULL));
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    for (int d = 0; d < 3; d++) {
        CHECK_OK(dequantize(at("ct"), fresh("plain"), dtypes[d]));
        nib_checkpoint *ct = open_good(at("ct")), *plain = open_good(at("plain"));
        CHECK(plain && plain->format == NIB_CHECKPOINT_FORMAT_PLAIN && plain->quantization == NULL);
        for (size_t i = 0; ct && plain && i < ct->n_weights; i++) {
            const struct nib_ck_weight *w = &ct->weights[i];
            if (w->format == NIB_CHECKPOINT_FORMAT_PLAIN)
                continue;
            char name[256];
            const struct nib_ck_tensor *t;
            snprintf(name, sizeof name, "%s.weight", w->name);
            void *x = read_tensor(plain, name, &t), *y = malloc(t->bytes);
            CHECK(t->dtype == dtypes[d]);
            CHECK_OK(nib_ck_read_rows(ct, w, 0, w->rows, dtypes[d], y));
            CHECK_BYTES(x, y, t->bytes);
            free(x);
            free(y);
        }
        nib_checkpoint_close(ct);
        nib_checkpoint_close(plain);
    }
    /* Without a configuration there is none to write. */
    CHECK(remove(at("ct/config.json")) == 0);
    CHECK_OK(dequantize(at("ct"), fresh("plain"), NIB_BF16));
    CHECK(exists(at("plain/model.safetensors")) && !exists(at("plain/config.json")));
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = NULL;
    CHECK_FAILS(nib_plan_dequantize(in, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_U8, &plan), NIB_ERR_DTYPE, "F32, BF16 or F16");
    CHECK_FAILS(nib_plan_convert(in, NIB_CHECKPOINT_FORMAT_MODELOPT, &plan), NIB_ERR_UNSUPPORTED, "no NVFP4 weight");
    CHECK_FAILS(nib_plan_convert(in, NIB_CHECKPOINT_FORMAT_MXFP4, &plan), NIB_ERR_ARG, "conversions are to");
    nib_checkpoint_close(in);
    in = open_good(at("ct"));
    CHECK_FAILS(nib_plan_convert(in, NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, &plan), NIB_ERR_MODE, "already");
    CHECK_FAILS(nib_plan_quantize(in, NULL, &plan), NIB_ERR_UNSUPPORTED, "nib convert");
    CHECK(plan == NULL);
    nib_checkpoint_close(in);
}

/* ---- Tensors that the library saved ---- */

static void convert_saved(nib_scale_rule rule, float most)
{
    float x[32 * 64];
    nib_array view;
    nib_quantizer q;
    nib_tensor *t = NULL;
    nib_writer *writer = NULL;
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        x[i] = test_normal();
    nib_quantizer_init(&q); /* both usages, an amax */
    q.scale_rule = rule;
    q.e4m3_max = most == 256 ? 256 : q.e4m3_max;
    CHECK_OK(nib_array_init(&view, x, NIB_F32, 2, (int64_t[]){ 32, 64 }));
    CHECK_OK(nib_quantize(&q, &view, NULL, &t));
    CHECK_OK(nib_writer_create(at("saved.safetensors"), &writer));
    CHECK_OK(nib_writer_declare_tensor(writer, "layer.w", t));
    CHECK_OK(nib_writer_write_tensor(writer, "layer.w", t));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    CHECK_OK(convert(at("saved.safetensors"), at("converted.safetensors"), NIB_CHECKPOINT_FORMAT_MODELOPT));
    nib_checkpoint *c = open_good(at("converted.safetensors"));
    const struct nib_ck_tensor *u;
    nib_array part;
    uint8_t *codes = read_tensor(c, "layer.w.weight", &u), *scales = read_tensor(c, "layer.w.weight_scale", &u);
    float *tensor_scale = read_tensor(c, "layer.w.weight_scale_2", &u);
    CHECK(c && c->n_tensors == 3);
    CHECK_OK(nib_tensor_part(t, NIB_ROW_DATA, &part));
    CHECK_BYTES(codes, part.data, 32 * 32);
    CHECK_OK(nib_tensor_part(t, NIB_ROW_SCALE, &part));
    for (int r = 0; r < 32; r++)
        CHECK_BYTES(scales + 4 * r, (uint8_t *)part.data + r * part.shape[1], 4);
    CHECK_OK(nib_tensor_part(t, NIB_ROW_TENSOR_SCALE, &part));
    CHECK(*tensor_scale == *(float *)part.data / (6 * most));
    free(codes);
    free(scales);
    free(tensor_scale);
    nib_checkpoint_close(c);
    nib_tensor_destroy(t);
    unlink(at("saved.safetensors"));
    unlink(at("converted.safetensors"));
}

TEST(saved_tensors_convert_without_their_other_copy)
{
    convert_saved(NIB_SCALE_RTN, 448);
    convert_saved(NIB_SCALE_4OVER6, 256);
}

/* ---- Sources that are quantized already ---- */

/* The largest part of a weight that is written at once, in bytes of the source. */
struct steps {
    uint64_t done, largest;
};

static int note_step(void *context, const nib_progress *progress)
{
    struct steps *steps = context;
    if (strcmp(progress->phase, "dequantizing") == 0 && progress->tensor) {
        const uint64_t step = progress->done - steps->done;
        steps->largest = step > steps->largest ? step : steps->largest;
        steps->done = progress->done;
    }
    return 0;
}

/* Rows that need several panels, the last a short one. */
TEST(fp8_sources_are_read_in_panels)
{
    enum { ROWS = 150, COLS = 128 };
    static uint8_t codes[ROWS][COLS];
    const float factors[2] = { 0.5f, 7 };
    nib_quantizer q;
    default_quantizer(&q);
    for (int i = 0; i < ROWS * COLS; i++)
        codes[i / COLS][i % COLS] = (uint8_t)(test_below(0x7F) | (test_random() & 0x80));
    const struct item items[] = { { "a.weight", NIB_E4M3, 2, { ROWS, COLS }, codes },
                                  { "a.weight_scale_inv", NIB_F32, 2, { 2, 1 }, factors } };
    put_tensors(at("fp8.safetensors"), items, 2);
    CHECK_FAILS(convert(at("fp8.safetensors"), fresh("out"), NIB_CHECKPOINT_FORMAT_MODELOPT), NIB_ERR_UNSUPPORTED,
                "cannot carry over");
    /* Half of the memory is for a panel, of which reading FP8 takes 4 MiB. */
    static const uint64_t values[] = { 0, 20000, 1 << 16, 1 << 20 };
    for (int i = 0; i < 4; i++) {
        nib_job job;
        nib_job_init(&job);
        job.threads = 1;
        job.max_memory = 2 * ((4 << 20) + values[i]);
        CHECK_OK(quantize(at("fp8.safetensors"), fresh("out"), NULL, NULL, &job));
        nib_checkpoint *in = open_good(at("fp8.safetensors")), *out = open_good(at("out"));
        check_quantized(in, out, "a", &q, amax_of(in, "a"));
        nib_checkpoint_close(in);
        nib_checkpoint_close(out);
    }
    /* Plain again: values of four bytes. */
    nib_checkpoint *in = open_good(at("fp8.safetensors"));
    nib_plan *plan = NULL;
    nib_job job;
    struct steps steps = { 0 };
    nib_job_init(&job);
    job.threads = 1;
    job.max_memory = 2 * ((4 << 20) + values[2]);
    job.progress = note_step;
    job.context = &steps;
    CHECK_OK(nib_plan_dequantize(in, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_F32, &plan));
    CHECK_OK(nib_plan_run(plan, fresh("out"), NULL, &job));
    CHECK_THAT(steps.largest > COLS && 4 * steps.largest <= values[2], "%zu values at once", (size_t)steps.largest);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    unlink(at("fp8.safetensors"));
}

/* Values that are in the range of one tensor scale are the same in NVFP4. */
TEST(mxfp4_sources_keep_their_values)
{
    enum { ROWS = 40, K = 64 };
    static uint8_t blocks[E][ROWS][K / 32][16], scales[E][ROWS][K / 32];
    for (size_t i = 0; i < sizeof blocks; i++)
        (&blocks[0][0][0][0])[i] = (uint8_t)test_random();
    for (size_t i = 0; i < sizeof scales; i++)
        (&scales[0][0][0])[i] = (uint8_t)(120 + test_below(12));
    const struct item items[] = {
        { "m.experts.gate_up_proj_blocks", NIB_U8, 4, { E, ROWS, K / 32, 16 }, blocks },
        { "m.experts.gate_up_proj_scales", NIB_U8, 3, { E, ROWS, K / 32 }, scales },
    };
    CHECK_OK(nib_os_remove_directory(at("mx")));
    CHECK(mkdir(at("mx"), 0777) == 0);
    put_tensors("mx/model.safetensors", items, 2);
    put_text(at("mx/config.json"), "{\"model_type\": \"gpt_oss\", \"hidden_size\": 64, \"intermediate_size\": 20}");
    for (uint64_t memory = 1; memory < 100000; memory = 5 * memory + 1000) {
        nib_job job;
        nib_job_init(&job);
        job.threads = 1;
        job.max_memory = memory;
        CHECK_OK(quantize(at("mx"), fresh("out"), NULL, NULL, &job));
        nib_checkpoint *in = open_good(at("mx")), *out = open_good(at("out"));
        CHECK(in->n_weights == 2 * E && out->n_weights == 2 * E);
        for (size_t i = 0; i < in->n_weights; i++) {
            float want[ROWS / 2 * K], got[ROWS / 2 * K];
            size_t j;
            CHECK_OK(nib_checkpoint_find_weight(out, in->weights[i].name, &j));
            CHECK(nib_ck_is_nvfp4(out->weights[j].format));
            CHECK_OK(nib_ck_read_rows(in, &in->weights[i], 0, ROWS / 2, NIB_F32, want));
            CHECK_OK(nib_ck_read_rows(out, &out->weights[j], 0, ROWS / 2, NIB_F32, got));
            CHECK_BYTES(got, want, sizeof want);
        }
        nib_checkpoint_close(in);
        nib_checkpoint_close(out);
    }
}

/* A cache of keys and values in FP8 is told by three configurations, and kept in what is written. */
TEST(a_cache_in_fp8_stays)
{
    static const struct {
        const char *config, *hf;
        bool fp8;
    } cases[] = {
        { "{\"quantization_config\": {\"quant_method\": \"modelopt\", \"kv_cache_quant_algo\": \"FP8\"}}", "{}", true },
        { "{\"quantization_config\": {\"quant_method\": \"modelopt\", \"kv_cache_quant_algo\": \"NVFP4\"}}", "{}",
          false },
        { "{}", "{\"quantization\": {\"kv_cache_quant_algo\": \"FP8\"}}", true },
        { "{}", "{\"quantization\": {\"kv_cache_quant_algo\": null}}", false },
        { "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"kv_cache_scheme\": {\"num_bits\": "
          "8}}}",
          "{}", true },
        { "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"kv_cache_scheme\": {\"num_bits\": "
          "4}}}",
          "{}", false },
    };
    CHECK_OK(nib_os_remove_directory(at("kv")));
    CHECK(mkdir(at("kv"), 0777) == 0);
    PUT(at("kv/model.safetensors"), { "a.weight", NIB_BF16, 2, { 16, 32 }, 1 });
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_text(at("kv/config.json"), cases[i].config);
        put_text(at("kv/hf_quant_config.json"), cases[i].hf);
        nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
        CHECK_OK(quantize(at("kv"), fresh("out"), &options, NULL, NULL));
        CHECK_THAT(file_has(at("out/hf_quant_config.json"), "\"kv_cache_quant_algo\": \"FP8\"") == cases[i].fp8,
                   "case %zu", i);
        options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
        CHECK_OK(quantize(at("kv"), fresh("out"), &options, NULL, NULL));
        CHECK_THAT(!file_has(at("out/config.json"), "\"kv_cache_scheme\": null") == cases[i].fp8, "case %zu", i);
    }
}

/* ---- Stacks of experts ---- */

static void make_stacks(const char *path, const char *model_type)
{
    char name[256];
    CHECK_OK(nib_os_remove_directory(path));
    CHECK(mkdir(path, 0777) == 0);
    snprintf(name, sizeof name, "%s/model.safetensors", path);
    PUT(name, { LAYER "mlp.experts.gate_up_proj", NIB_BF16, 3, { E, H, 2 * INNER }, 0.02f },
        { LAYER "mlp.experts.gate_up_proj_bias", NIB_BF16, 2, { E, 2 * INNER }, 0.5f },
        { LAYER "mlp.experts.down_proj", NIB_BF16, 3, { E, INNER, H }, 0.02f },
        { LAYER "mlp.experts.down_proj_bias", NIB_BF16, 2, { E, H }, 0.5f });
    char text[256];
    snprintf(text, sizeof text, "{\"model_type\": \"%s\", \"hidden_size\": %d, \"intermediate_size\": %d}", model_type,
             H, INNER);
    snprintf(name, sizeof name, "%s/config.json", path);
    put_text(name, text);
}

TEST(experts_are_cut_for_compressed_tensors_with_their_biases)
{
    nib_quantizer q;
    default_quantizer(&q);
    static const char *const families[] = { "llama4", "gpt_oss" };
    for (int f = 0; f < 2; f++) {
        make_stacks(at("in"), families[f]);
        CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, NULL));
        nib_checkpoint *in = open_good(at("in")), *out = open_good(at("out"));
        const struct nib_ck_tensor *whole, *piece;
        uint16_t *bias = read_tensor(in, LAYER "mlp.experts.gate_up_proj_bias", &whole);
        for (int e = 0; e < E; e++) {
            char gate[96], up[96], name[128];
            snprintf(gate, sizeof gate, LAYER "mlp.experts.%d.gate_proj", e);
            snprintf(up, sizeof up, LAYER "mlp.experts.%d.up_proj", e);
            const float amax = fmaxf(amax_of(in, gate), amax_of(in, up));
            check_quantized(in, out, gate, &q, amax);
            check_quantized(in, out, up, &q, amax);
            snprintf(name, sizeof name, "%s.bias", up);
            uint16_t *cut = read_tensor(out, name, &piece);
            CHECK(piece->rank == 1 && piece->shape[0] == INNER);
            for (int i = 0; i < INNER; i++)
                CHECK(cut[i] == bias[e * 2 * INNER + (f ? 2 * i + 1 : INNER + i)]);
            free(cut);
        }
        free(bias);
        nib_checkpoint_close(in);
        nib_checkpoint_close(out);
    }
}

TEST(experts_stay_a_stack_for_modelopt)
{
    make_stacks(at("in"), "gpt_oss");
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.scheme = NIB_SCHEME_NVFP4;
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
    nib_checkpoint *in = open_good(at("in")), *out = open_good(at("out"));
    const struct nib_ck_tensor *codes, *scales, *tensor_scale;
    free(read_tensor(out, LAYER "mlp.experts.gate_up_proj", &codes));
    free(read_tensor(out, LAYER "mlp.experts.gate_up_proj_weight_scale", &scales));
    free(read_tensor(out, LAYER "mlp.experts.gate_up_proj_weight_scale_2", &tensor_scale));
    free(read_tensor(out, LAYER "mlp.experts.gate_up_proj_input_scale", &tensor_scale));
    CHECK(codes->rank == 3 && codes->shape[0] == E && codes->shape[1] == H / 2 && codes->shape[2] == 2 * INNER);
    CHECK(scales->shape[1] == H / 16 && scales->shape[2] == 2 * INNER && tensor_scale->rank == 0);
    CHECK(nib_ck_find_tensor(out, LAYER "mlp.experts.gate_up_proj_bias") != NIB_NONE);
    nib_quantizer q;
    default_quantizer(&q);
    float amax = 0;
    char name[96];
    for (int e = 0; e < E; e++) {
        snprintf(name, sizeof name, LAYER "mlp.experts.%d.gate_proj", e);
        amax = fmaxf(amax, amax_of(in, name));
        snprintf(name, sizeof name, LAYER "mlp.experts.%d.up_proj", e);
        amax = fmaxf(amax, amax_of(in, name));
    }
    for (int e = 0; e < E; e++) {
        snprintf(name, sizeof name, LAYER "mlp.experts.%d.gate_proj", e);
        check_quantized(in, out, name, &q, amax);
        snprintf(name, sizeof name, LAYER "mlp.experts.%d.up_proj", e);
        check_quantized(in, out, name, &q, amax);
    }
    nib_checkpoint_close(out);
    /* Tiny panels write columns of it piece by piece. */
    nib_job job;
    nib_job_init(&job);
    job.max_memory = 1;
    job.threads = 3;
    CHECK_OK(quantize(at("in"), fresh("two"), &options, NULL, &job));
    check_same_directory(at("out"), at("two"));
    nib_checkpoint_close(in);
    /* And back to what the source was, but for the rounding. */
    CHECK_OK(dequantize(at("out"), fresh("plain"), NIB_BF16));
    nib_checkpoint *plain = open_good(at("plain"));
    free(read_tensor(plain, LAYER "mlp.experts.gate_up_proj", &codes));
    CHECK(codes->rank == 3 && codes->shape[1] == H && codes->shape[2] == 2 * INNER);
    CHECK(plain->n_tensors == 4);
    nib_checkpoint_close(plain);
}

/* ---- Choices ---- */

static const char *reason_of(const nib_checkpoint *in, const nib_plan *plan, const char *name)
{
    size_t index;
    nib_plan_row row = { .bytes = sizeof row };
    CHECK_OK(nib_checkpoint_find_weight(in, name, &index));
    CHECK_OK(nib_plan_get_row(plan, index, &row));
    return row.reason;
}

TEST(patterns_choose_and_sets_stay_together)
{
    make_model(at("in"));
    nib_checkpoint *in = open_good(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    static const char *const ignore[] = { "*.v_proj" }, *const only[] = { "re:.*self_attn", "lm_head" };
    options.ignore = ignore;
    options.n_ignore = 1;
    nib_plan *plan = plan_quantize(in, &options);
    CHECK(strstr(reason_of(in, plan, LAYER "self_attn.v_proj"), "ignored by *.v_proj"));
    CHECK(strstr(reason_of(in, plan, LAYER "self_attn.q_proj"), "servers fuse it with"));
    CHECK(strcmp(reason_of(in, plan, LAYER "mlp.up_proj"), "") == 0);
    nib_plan_destroy(plan);
    options.n_ignore = 0;
    options.only = only;
    options.n_only = 2;
    plan = plan_quantize(in, &options);
    CHECK(strcmp(reason_of(in, plan, "lm_head"), "") == 0); /* named in full: it is meant */
    CHECK(strcmp(reason_of(in, plan, LAYER "self_attn.q_proj"), "") == 0);
    CHECK(strstr(reason_of(in, plan, LAYER "mlp.up_proj"), "not among"));
    nib_plan_destroy(plan);
    static const char *const nobody[] = { "nobody" };
    options.only = nobody;
    options.n_only = 1;
    plan = NULL;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "only (--only): \"nobody\" matches no weight");
    static const char *const head[] = { "lm_head", "re:lm_" };
    options.only = options.ignore = head;
    options.n_ignore = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "none of its 9 weights is left");
    options.n_only = 0;
    options.n_ignore = 2; /* the second matches too, although the first has taken all of its modules */
    plan = plan_quantize(in, &options);
    nib_plan_destroy(plan);
    options.n_ignore = 0;
    options.preset = NIB_PRESET_MLP_ONLY;
    plan = plan_quantize(in, &options);
    CHECK(strstr(reason_of(in, plan, LAYER "self_attn.q_proj"), "mlp-only"));
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

/* A name with a slip in it would be quantized, or left out, without a word. */
TEST(patterns_that_match_nothing)
{
    static const struct {
        const char *pattern, *said;
    } cases[] = {
        { LAYER "self_attn.q_porj", "near it are \"" LAYER "self_attn.q_proj\", \"" },
        { "q_proj", "near it are \"" LAYER "self_attn.q_proj\"" },
        { "*.up_porj*", "near it are \"" LAYER "mlp.up_proj\"" },
        { "re:.*mlp\\.dwn_proj$", "near it are \"" LAYER "mlp.down_proj\"" },
        { LAYER "mlp.up_proj.weight", "near it are \"" LAYER "mlp.up_proj\"" },
        { "model.layers.0", "a name is matched whole, and " },
        { "zzzz", "there are, for example, \"" },
    };
    make_model(at("in"));
    nib_checkpoint *in = open_good(at("in"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int list = 0; list < 2; list++) {
            nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
            const char *const patterns[] = { "*", cases[i].pattern };
            nib_plan *plan = NULL;
            *(list ? &options.ignore : &options.only) = patterns;
            *(list ? &options.n_ignore : &options.n_only) = 2;
            CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, list ? "(--ignore)" : "(--only)");
            CHECK_THAT(strstr(nib_last_error(), cases[i].said), "%s: %s", cases[i].pattern, nib_last_error());
        }
    /* Norms are no weights: to ignore them is to say what happens anyway, to ask for them alone is a mistake. */
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    static const char *const norms[] = { "*norm*" };
    nib_plan *plan = NULL;
    options.ignore = options.only = norms;
    options.n_ignore = 1;
    plan = plan_quantize(in, &options);
    nib_plan_destroy(plan);
    options.n_only = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "matches no weight");
    static const char *const endless[] = { "re:(.+)+[!?]" }; /* not the same as no match */
    options.only = endless;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "limit");
    nib_checkpoint_close(in);
}

static float input_of(const char *path, const char *name)
{
    nib_checkpoint *c = open_good(path);
    size_t index;
    nib_weight w = { .bytes = sizeof w };
    CHECK_OK(nib_checkpoint_find_weight(c, name, &index));
    CHECK_OK(nib_checkpoint_get_weight(c, index, &w));
    CHECK(w.has_input_scale);
    nib_checkpoint_close(c);
    return w.input_scale;
}

TEST(activations_have_scales_of_three_kinds)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.scheme = NIB_SCHEME_NVFP4;
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
    CHECK(input_of(at("out"), LAYER "self_attn.q_proj") == 1);
    options.activation = NIB_ACTIVATION_NORM; /* gamma is 1 and H is 64 */
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
    CHECK(input_of(at("out"), LAYER "self_attn.q_proj") == 8.0f / 2688.0f);
    CHECK(input_of(at("out"), LAYER "mlp.down_proj") == 1);
    options.activation = NIB_ACTIVATION_FILE;
    char file[200];
    snprintf(file, sizeof file, "%s", at("amax.json"));
    options.activation_file = file;
    put_text(file, "{\"" LAYER "self_attn.q_proj\": 5, \"" LAYER "self_attn.k_proj\": 7.5, \"" LAYER
                   "mlp.up_proj\": 2, \"" LAYER "mlp.down_proj\": 2688}");
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
    CHECK(input_of(at("out"), LAYER "self_attn.v_proj") == 7.5f / 2688.0f); /* the largest of its set */
    CHECK(input_of(at("out"), LAYER "mlp.down_proj") == 1);
    options.format = NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS;
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
    CHECK(input_of(at("out"), LAYER "self_attn.v_proj") == 2688.0f / 7.5f);
    put_text(file, "{\"" LAYER "self_attn.q_proj\": 5}");
    CHECK_FAILS(quantize(at("in"), at("out"), &options, NULL, NULL), NIB_ERR_ARG, "has no amax for");
    put_text(file, "{\"" LAYER "self_attn.q_proj\": -5}");
    CHECK_FAILS(quantize(at("in"), at("out"), &options, NULL, NULL), NIB_ERR_ARG, "not a positive number");
    put_text(file, "[]");
    CHECK_FAILS(quantize(at("in"), at("out"), &options, NULL, NULL), NIB_ERR_DATA, "not a JSON object");
    unlink(file);
    CHECK_FAILS(quantize(at("in"), at("out"), &options, NULL, NULL), NIB_ERR_IO, "cannot open");
}

TEST(contradicting_options_are_refused)
{
    make_model(at("in"));
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = NULL;
    nib_quantize_options o = with(NIB_CHECKPOINT_FORMAT_PLAIN);
    CHECK_FAILS(nib_plan_quantize(in, &o, &plan), NIB_ERR_ARG, "compressed-tensors, modelopt or gguf");
#define REJECTED(change, status, words)                               \
    do {                                                              \
        o = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);           \
        change;                                                       \
        CHECK_FAILS(nib_plan_quantize(in, &o, &plan), status, words); \
    } while (0)
    static const char *const bad[] = { "re:(" };
    REJECTED(o.scheme = NIB_SCHEME_COUNT, NIB_ERR_ARG, "scheme");
    REJECTED(o.scale_rule = 9, NIB_ERR_ARG, "scale rule");
    REJECTED(o.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_DIALECT, NIB_ERR_ARG, "tensor scale");
    REJECTED(o.activation = NIB_ACTIVATION_NORM, NIB_ERR_MODE, "nvfp4a16 leaves activations alone");
    REJECTED((o.scheme = NIB_SCHEME_NVFP4, o.activation = NIB_ACTIVATION_FILE), NIB_ERR_MODE, "activations file");
    REJECTED((o.dialect = NIB_DIALECT_MODELOPT, o.scale_rule = NIB_SCALE_SWEEP), NIB_ERR_MODE, "--scale");
    REJECTED((o.dialect = NIB_DIALECT_TE, o.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2), NIB_ERR_MODE,
             "--tensor-scale");
    REJECTED((o.dialect = NIB_DIALECT_GIST, o.min_block_scale = 1), NIB_ERR_MODE, "--min-block-scale");
    REJECTED((o.n_ignore = 1), NIB_ERR_ARG, "NULL");
    REJECTED((o.ignore = bad, o.n_ignore = 1), NIB_ERR_ARG, "re:(");
    REJECTED(o.min_block_scale = 0.3f, NIB_ERR_ARG, "");
    REJECTED(o.bytes = 8, NIB_ERR_ARG, "nib_quantize_options");
    CHECK(plan == NULL);
    o = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    o.dialect = NIB_DIALECT_MODELOPT;
    o.scale_rule = NIB_SCALE_RTN; /* what it fixes may be said */
    CHECK_OK(nib_plan_quantize(in, &o, &plan));
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

/* ---- What goes wrong ---- */

TEST(the_place_of_the_output_is_checked)
{
    make_model(at("in"));
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    CHECK_FAILS(quantize(at("in"), at("in"), NULL, &force, NULL), NIB_ERR_MODE, "in the place of");
    CHECK_FAILS(quantize(at("in"), at("in/out"), NULL, &force, NULL), NIB_ERR_MODE, "within the input");
    CHECK_FAILS(quantize(at("in"), directory, NULL, &force, NULL), NIB_ERR_MODE, "around the input");
    CHECK(symlink(at("in"), at("link")) == 0);
    CHECK_FAILS(quantize(at("in"), at("link/x"), NULL, &force, NULL), NIB_ERR_MODE, "within the input");
    unlink(at("link"));
    CHECK_FAILS(quantize(at("in"), at("no/such/directory"), NULL, NULL, NULL), NIB_ERR_IO, "no such place");
    CHECK_FAILS(quantize(at("in"), "", NULL, NULL, NULL), NIB_ERR_ARG, "no name");
    CHECK_OK(nib_os_remove_directory(at("out")));
    put_text(at("out"), "a file");
    CHECK_FAILS(quantize(at("in"), at("out"), NULL, &force, NULL), NIB_ERR_MODE, "not a directory");
    unlink(at("out"));
    CHECK(mkdir(at("out"), 0777) == 0);
    put_text(at("out/mine.txt"), "mine");
    put_text(at("out/model-00007-of-00009.safetensors"), "stale");
    put_text(at("out/model.safetensors.index.json"), "stale");
    CHECK_FAILS(quantize(at("in"), at("out"), NULL, NULL, NULL), NIB_ERR_MODE, "--force");
    CHECK(entries(at("out")) == 3);
    CHECK_OK(quantize(at("in"), at("out"), NULL, &force, NULL));
    CHECK(!nib_os_exists(at("out/model-00007-of-00009.safetensors")));
    CHECK(!nib_os_exists(at("out/model.safetensors.index.json")));
    CHECK(same_file(at("out/mine.txt"), at("out/mine.txt")));
    const nib_quantize_options gguf = with(NIB_CHECKPOINT_FORMAT_GGUF);
    CHECK_FAILS(quantize(at("in"), at("x.gguf"), NULL, NULL, NULL), NIB_ERR_ARG, "choose the format gguf");
    make_llama(at("in"));
    CHECK_FAILS(quantize(at("in"), at("x"), &gguf, NULL, NULL), NIB_ERR_ARG, ".gguf");
    CHECK(mkdir(at("d.gguf"), 0777) == 0);
    CHECK_FAILS(quantize(at("in"), at("d.gguf"), &gguf, &force, NULL), NIB_ERR_MODE, "it is a directory");
    rmdir(at("d.gguf"));
}

static void damage(const char *path, size_t from_end, const void *bytes, size_t count)
{
    FILE *file = fopen(path, "r+b");
    CHECK(file && fseek(file, -(long)from_end, SEEK_END) == 0 && fwrite(bytes, 1, count, file) == count);
    if (file)
        fclose(file);
}

TEST(numbers_that_are_none_are_named_with_their_place)
{
    CHECK_OK(nib_os_remove_directory(at("bad")));
    CHECK(mkdir(at("bad"), 0777) == 0);
    PUT(at("bad/model.safetensors"), { LAYER "self_attn.q_proj.weight", NIB_BF16, 2, { H, H }, 0.02f });
    damage(at("bad/model.safetensors"), 2 * (2 * H + 5), (uint8_t[]){ 0xC0, 0xFF }, 2); /* row 61, column 59: NaN */
    CHECK_FAILS(quantize(at("bad"), fresh("out"), NULL, NULL, NULL), NIB_ERR_DATA, "element [61, 59] is a NaN");
    CHECK(entries(at("out")) == 1); /* the directory of the run alone */
    PUT(at("bad/model.safetensors"), { LAYER "mlp.experts.gate_up_proj", NIB_F32, 3, { E, H, 2 * INNER }, 0.02f });
    put_text(at("bad/config.json"), "{\"model_type\": \"llama4\", \"hidden_size\": 64, \"intermediate_size\": 32}");
    /* The last element of the last expert: row 31 of "up", column 63. */
    damage(at("bad/model.safetensors"), 4, (uint8_t[]){ 0, 0, 0x80, 0x7F }, 4);
    CHECK_FAILS(quantize(at("bad"), fresh("out"), NULL, NULL, NULL), NIB_ERR_DATA,
                "experts.2.up_proj\": element [31, 63] is an infinity");
    CHECK(!strstr(nib_last_error(), "more weights"));
    damage(at("bad/model.safetensors"), 8, (uint8_t[]){ 0, 0, 0x80, 0x7F }, 4); /* another row of it */
    damage(at("bad/model.safetensors"), 4 * (2 * INNER * H + 1), (uint8_t[]){ 0, 0, 0x80, 0x7F },
           4); /* and expert 1's */
    CHECK_FAILS(quantize(at("bad"), fresh("out"), NULL, NULL, NULL), NIB_ERR_DATA, "; 1 more weights have some");
}

/* A callback that stops, or does something, at its n-th call. */
struct stopper {
    int calls, at;
    void (*then)(void);
    int answer;
};

static int count_call(void *context, const nib_progress *progress)
{
    struct stopper *s = context;
    CHECK(progress->done <= progress->total && progress->phase);
    if (s->calls++ != s->at)
        return 0;
    if (s->then)
        s->then();
    return s->answer;
}

static nib_job stop_at(struct stopper *s)
{
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    job.max_memory = 4096;
    job.progress = count_call;
    job.context = s;
    return job;
}

TEST(cancelling_leaves_nothing_or_what_resume_needs)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.shard_bytes = 9000;
    CHECK_OK(quantize(at("in"), fresh("whole"), &options, NULL, NULL));
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    struct stopper never = { .at = -1 };
    nib_job job = stop_at(&never);
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, &job));
    CHECK(never.calls > 10);
    for (int i = 0; i < never.calls; i++) {
        struct stopper s = { .at = i, .answer = 1 };
        job = stop_at(&s);
        const char *out = fresh("out");
        CHECK_FAILS(quantize(at("in"), out, &options, NULL, &job), NIB_ERR_CANCELLED, "stopped");
        CHECK_THAT(!nib_os_exists(at("out")), "%d: the directory is still there", i);
        s.calls = 0;
        CHECK_FAILS(quantize(at("in"), out, &options, &resume, &job), NIB_ERR_CANCELLED, "stopped");
        CHECK(entries(at("out")) == 1);
        CHECK_FAILS(quantize(at("in"), out, &options, NULL, NULL), NIB_ERR_MODE, "--resume");
        s = (struct stopper){ .at = -1 };
        job = stop_at(&s);
        CHECK_OK(quantize(at("in"), out, &options, &resume, &job));
        CHECK_THAT(s.calls <= never.calls, "%d: everything was done again", i);
        check_same_directory(at("whole"), at("out"));
    }
}

TEST(resuming_is_for_the_same_plan_and_input)
{
    make_model(at("in"));
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 },
                          force = { .bytes = sizeof force, .force = 1 };
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    CHECK_OK(quantize(at("in"), fresh("whole"), &options, NULL, NULL));
    struct stopper s = { .at = 8, .answer = 1 };
    nib_job job = stop_at(&s);
    const char *out = fresh("out");
    CHECK_FAILS(quantize(at("in"), out, &options, &resume, &job), NIB_ERR_CANCELLED, "stopped");
    options.scale_rule = NIB_SCALE_RTN;
    CHECK_FAILS(quantize(at("in"), out, &options, &resume, NULL), NIB_ERR_MODE, "other options");
    options.scale_rule = NIB_UNSET;
    damage(at("in/model-00002-of-00002.safetensors"), 1, "\x01", 1);
    CHECK_FAILS(quantize(at("in"), out, &options, &resume, NULL), NIB_ERR_MODE, "it has changed since");
    CHECK_OK(quantize(at("in"), out, &options, &force, NULL));
    /* One that is complete needs nothing more; one that is not this plan's is in the way. */
    CHECK_OK(quantize(at("in"), out, &options, &resume, NULL));
    options.scale_rule = NIB_SCALE_RTN;
    CHECK_FAILS(quantize(at("in"), out, &options, &resume, NULL), NIB_ERR_MODE, "--force");
    /* With nothing to go on from, resume starts. */
    CHECK_OK(quantize(at("in"), fresh("out"), &options, &resume, NULL));
}

static void run_another(void)
{
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    CHECK_FAILS(quantize(at("in"), at("out"), NULL, &force, NULL), NIB_ERR_MODE, "another run is writing here");
}

/* What a stopped run noted of a file, with its first maximum changed to something else. */
static void change_note(const char *path, const char *to)
{
    size_t count;
    char *text = get_file(path, &count), *list = text ? strstr(text, "\"largest\":[") : NULL;
    CHECK(list != NULL);
    if (list) {
        char *changed = malloc(count + 64);
        const char *rest = list + strlen("\"largest\":[");
        snprintf(changed, count + 64, "%.*s%s%s", (int)(rest - text), text, to, rest + strcspn(rest, ",]"));
        put_text(path, changed);
        free(changed);
    }
    free(text);
}

TEST(notes_that_cannot_be_are_not_believed)
{
    static const char *const values[] = { "\"1\"", "1.5", "-1", "2147483648", "null" };
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    make_model(at("in"));
    CHECK_OK(quantize(at("in"), fresh("whole"), NULL, NULL, NULL));
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        struct stopper s = { .at = 12, .answer = 1 };
        nib_job job = stop_at(&s);
        CHECK_FAILS(quantize(at("in"), fresh("out"), NULL, &resume, &job), NIB_ERR_CANCELLED, "stopped");
        change_note(at("out/.nib-partial/scan-00000.json"), values[i]);
        CHECK_OK(quantize(at("in"), at("out"), NULL, &resume, NULL));
        check_same_directory(at("whole"), at("out"));
    }
}

static void change_input(void) { damage(at("in/model-00001-of-00002.safetensors"), 1, "\x02", 1); }

static void shorten_input(void) { CHECK(truncate(at("in/model-00002-of-00002.safetensors"), 3000) == 0); }

TEST(others_at_work_are_noticed)
{
    make_model(at("in"));
    struct stopper s = { .at = 2, .then = run_another };
    nib_job job = stop_at(&s);
    CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, &job));
    s = (struct stopper){ .at = 12, .then = change_input };
    CHECK_FAILS(quantize(at("in"), fresh("out"), NULL, NULL, &job), NIB_ERR_IO, "it was changed while");
    CHECK(entries(at("out")) == 1);
    make_model(at("in"));
    s = (struct stopper){ .at = 3, .then = shorten_input };
    CHECK_FAILS(quantize(at("in"), fresh("out"), NULL, NULL, &job), NIB_ERR_IO, "longer when opened");
    CHECK(entries(at("out")) == 1);
}

/* Descriptor 0 is one as any other, where nothing is on standard input. */
TEST(standard_input_may_be_closed)
{
    make_model(at("in"));
    const int before = dup(0);
    close(0);
    CHECK_OK(quantize(at("in"), fresh("out"), NULL, NULL, NULL));
    CHECK(close(0) == -1); /* nobody has it any more */
    CHECK(before < 0 || dup2(before, 0) == 0);
    close(before);
}

TEST(a_folder_that_cannot_be_written_is_an_error)
{
    CHECK_FAILS(nib_os_sync_parent(at("nothing/here")), NIB_ERR_IO, "cannot open");
    make_model(at("in"));
    const char *out = fresh("locked");
    CHECK(mkdir(out, 0555) == 0);
    if (geteuid() == 0)
        SKIP("root may write anywhere");
    CHECK_FAILS(quantize(at("in"), out, NULL, NULL, NULL), NIB_ERR_IO, "cannot");
    CHECK(entries(out) == 0);
}

TEST(a_file_becomes_a_file)
{
    make_model(at("in"));
    const char *in = at("in/model-00001-of-00002.safetensors");
    CHECK_OK(quantize(in, at("one.safetensors"), NULL, NULL, NULL));
    CHECK(!nib_os_exists(at("one.safetensors.nib-partial")));
    nib_checkpoint *c = open_good(at("one.safetensors"));
    CHECK(c && c->format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS && c->n_files == 1);
    nib_checkpoint_close(c);
    CHECK_FAILS(quantize(in, at("one.safetensors"), NULL, NULL, NULL), NIB_ERR_MODE, "--force");
    CHECK_FAILS(quantize(in, in, NULL, NULL, NULL), NIB_ERR_MODE, "in the place of");
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    CHECK_OK(quantize(in, at("one.safetensors"), NULL, &resume, NULL)); /* it is complete */
    unlink(at("one.safetensors"));
}

/* A plan is the same, or there is none. */
TEST(no_allocation_that_fails_leaves_half_a_plan)
{
    make_stacks(at("in"), "gpt_oss");
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.shard_bytes = 3000;
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *whole = plan_quantize(in, &options);
    for (long left = 0, failed = 1; failed; left++) {
        nib_plan *plan = NULL;
        allocations_left = left;
        const nib_status status = nib_plan_quantize(in, &options, &plan);
        failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(status ? status == NIB_ERR_MEMORY && !plan
                          : plan->n_files == whole->n_files && plan->n_tensors == whole->n_tensors &&
                                plan->n_weights == whole->n_weights,
                   "allocation %ld: %s: %s", left, nib_status_name(status), nib_last_error());
        for (size_t i = 0; plan && i < plan->n_files && i < whole->n_files; i++)
            CHECK(plan->files[i].first == whole->files[i].first && plan->files[i].tensors == whole->files[i].tensors);
        CHECK(failed || left > 20);
        nib_plan_destroy(plan);
    }
    nib_plan_destroy(whole);
    nib_checkpoint_close(in);
}

TEST(no_allocation_that_fails_does_harm)
{
    make_model(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.shard_bytes = 9000;
    options.scheme = NIB_SCHEME_NVFP4;
    nib_job job;
    nib_job_init(&job);
    job.threads = 1; /* the failing allocator is of this thread */
    const nib_run_options resume = { .bytes = sizeof resume, .resume = 1 };
    CHECK_OK(quantize(at("in"), fresh("whole"), &options, NULL, &job));
    long tried = 0;
    for (long left = 0;; left += 1 + left / 30) {
        CHECK_OK(nib_os_remove_directory(at("out")));
        allocations_left = left;
        const nib_status status = quantize(at("in"), at("out"), &options, NULL, &job);
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        if (!failed) {
            CHECK_OK(status);
            break;
        }
        tried++;
        CHECK_THAT(status == NIB_OK || status == NIB_ERR_MEMORY, "allocation %ld: %s: %s", left,
                   nib_status_name(status), nib_last_error());
        /* Nothing has its name before all is complete; what fails after the end finds all of it there, see below. */
        if (status && nib_os_exists(at("out/.nib-partial")) && !nib_os_exists(at("out/.nib-partial/complete")))
            CHECK(entries(at("out")) <= 1);
        if (status && nib_os_exists(at("out")))
            CHECK_OK(quantize(at("in"), at("out"), &options, &resume, &job));
        if (nib_os_exists(at("out")))
            check_same_directory(at("whole"), at("out"));
    }
    CHECK_THAT(tried > 60, "%ld", tried);
    check_same_directory(at("whole"), at("out"));
}

TEST(arguments_are_checked)
{
    make_model(at("in"));
    nib_checkpoint *in = open_good(at("in"));
    nib_plan *plan = plan_quantize(in, NULL), *none = NULL;
    nib_job job;
    nib_run_options options = { .bytes = 1 };
    CHECK_FAILS(nib_plan_run(NULL, "x", NULL, NULL), NIB_ERR_ARG, "plan is NULL");
    CHECK_FAILS(nib_plan_run(plan, NULL, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_plan_run(plan, "x", &options, NULL), NIB_ERR_ARG, "nib_run_options");
    nib_job_init(&job);
    job.threads = -1;
    CHECK_FAILS(nib_plan_run(plan, "x", NULL, &job), NIB_ERR_ARG, "-1 threads");
    CHECK_FAILS(nib_plan_quantize(NULL, NULL, &none), NIB_ERR_ARG, "in is NULL");
    CHECK_FAILS(nib_plan_quantize(in, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    nib_plan_destroy(plan);
    nib_plan_destroy(NULL);
    nib_job_init(NULL);
    nib_quantize_options_init(NULL);
    nib_checkpoint_close(in);
}

TEST_MAIN

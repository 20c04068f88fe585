/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_run.h - small models, runs of plans on them, and outputs compared. Wants _GNU_SOURCE.
 */
#ifndef NIB_TEST_RUN_H
#define NIB_TEST_RUN_H

#include "io/checkpoint.h"
#include "plan/plan.h"
#include "model/read.h"
#include "base/os.h"
#include "test_weights.h"

#include <math.h>
#include <sys/stat.h>

/* ---- Directories ---- */

static inline bool file_has(const char *path, const char *words)
{
    size_t bytes;
    char *text = get_file(path, &bytes);
    const bool has = text && memmem(text, bytes, words, strlen(words));
    free(text);
    return has;
}

static inline bool same_file(const char *a, const char *b)
{
    size_t n, m;
    char *x = get_file(a, &n), *y = get_file(b, &m);
    const bool same = x && y && n == m && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

static inline void check_same_directory(const char *a, const char *b)
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

static inline const char *fresh(const char *name)
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

static inline void put_random(const char *path, const struct random_item *items, size_t n)
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
static inline void make_model(const char *path)
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
                   "\"most\": 1e+20, \"torch_dtype\": \"bfloat16\"}");
    snprintf(name, sizeof name, "%s/tokenizer.json", path);
    put_text(name, "{}");
    snprintf(name, sizeof name, "%s/pytorch_model.bin", path);
    put_text(name, "pickled");
}

/* One that llama.cpp has an architecture for. */
static inline void make_llama(const char *path)
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

static inline nib_plan *plan_quantize(const nib_checkpoint *in, const nib_quantize_options *options)
{
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_quantize(in, options, &plan));
    return plan;
}

/* From directory to directory, all defaults but these. */
static inline nib_status quantize(const char *in, const char *out, const nib_quantize_options *options,
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

static inline nib_quantize_options with(nib_checkpoint_format format)
{
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.format = format;
    return options;
}

/* ---- Against the library itself ---- */

static inline void *read_tensor(const nib_checkpoint *c, const char *name, const struct nib_ck_tensor **t)
{
    const uint32_t id = nib_ck_find_tensor(c, name);
    CHECK_THAT(id != NIB_NONE, "there is no tensor %s", name);
    *t = &c->tensors[id == NIB_NONE ? 0 : id];
    if (id == NIB_NONE)
        return NULL;
    void *bytes = malloc((*t)->bytes + 1);
    CHECK_OK(nib_ck_read(c, id, 0, bytes, (*t)->bytes));
    return bytes;
}

/* The codes and scales of a weight in `out` are those of the whole matrix quantized with the group's amax. */
static inline void check_quantized(const nib_checkpoint *in, const nib_checkpoint *out, const char *name,
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

static inline float amax_of(const nib_checkpoint *in, const char *name)
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

static inline void default_quantizer(nib_quantizer *q)
{
    nib_quantizer_init(q);
    q->columnwise = 0;
    q->scale_rule = NIB_SCALE_SWEEP;
    q->tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
    q->min_block_scale = 0x1p-6f;
}

static inline void make_stacks(const char *path, const char *model_type)
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

static inline void damage(const char *path, size_t from_end, const void *bytes, size_t count)
{
    FILE *file = fopen(path, "r+b");
    CHECK(file && fseek(file, -(long)from_end, SEEK_END) == 0 && fwrite(bytes, 1, count, file) == count);
    if (file)
        fclose(file);
}

#endif

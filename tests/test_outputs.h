/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_outputs.h - every kind of output that the library writes, small, from inputs that it makes once. Wants _GNU_SOURCE.
 */
#ifndef NIB_TEST_OUTPUTS_H
#define NIB_TEST_OUTPUTS_H

#include <sys/stat.h>

#include "test_weights.h"

#include "base/os.h"
#include "io/checkpoint.h"
#include "io/gguf.h"

#define INDEX "model.safetensors.index.json"

static int output_threads = 2; /* 1 where a call is to fail, so that it is the same each time */

enum { ROWS = 32, COLS = 64 };

static nib_status write_plain(const char *path, const char *const *names, int n)
{
    static uint16_t data[ROWS * COLS];
    nib_writer *writer = NULL;
    nib_status status = nib_writer_create(path, &writer);
    for (int i = 0; i < ROWS * COLS; i++)
        data[i] = (uint16_t)(0x3F00 | ((uint32_t)i * 2654435761u >> 8 & 0x80FF));
    for (int i = 0; i < n && !status; i++)
        status = nib_writer_declare(writer, names[i], NIB_BF16, 2, (int64_t[]){ ROWS, COLS });
    for (int i = 0; i < n && !status; i++)
        status = nib_writer_write(writer, names[i], 0, data, sizeof data);
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    return status;
}

static nib_status write_tensor(const char *path)
{
    static const float zeros[ROWS * COLS];
    nib_quantizer q;
    nib_array x;
    nib_tensor *t = NULL;
    nib_writer *writer = NULL;
    nib_quantizer_init(&q);
    nib_status status = nib_array_init(&x, (void *)(uintptr_t)zeros, NIB_F32, 2, (int64_t[]){ ROWS, COLS });
    if (!status)
        status = nib_quantize(&q, &x, NULL, &t);
    if (!status)
        status = nib_writer_create(path, &writer);
    if (!status)
        status = nib_writer_declare_tensor(writer, "w", t);
    if (!status)
        status = nib_writer_write_tensor(writer, "w", t);
    if (!status)
        status = nib_writer_commit(writer);
    nib_writer_destroy(writer);
    nib_tensor_destroy(t);
    return status;
}

static nib_status write_gguf(const char *path)
{
    nib_gguf_plan *plan = NULL;
    nib_gguf_writer *writer = NULL;
    nib_status status = nib_gguf_plan_create(path, &plan);
    if (!status)
        status = nib_gguf_declare(plan, "w", NIB_GGUF_F32, 1, (int64_t[]){ 3 });
    if (!status)
        status = nib_gguf_writer_create(plan, &writer);
    if (!status)
        status = nib_gguf_write(writer, 0, 0, (float[]){ 1, 2, 3 }, 12);
    if (!status)
        status = nib_gguf_commit(writer);
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
    return status;
}

static void make_inputs(void)
{
    static const char *const names[] = { "model.layers.0.self_attn.q_proj.weight",
                                         "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight" };
    if (directory[0])
        return;
    CHECK(mkdir(at("in"), 0777) == 0);
    CHECK_OK(write_plain(at("in/model.safetensors"), names, 3));
    put_text(at("in/config.json"), "{\"model_type\": \"llama\", \"hidden_size\": 64, \"num_hidden_layers\": 1, "
                                   "\"num_attention_heads\": 2, \"vocab_size\": 32, \"intermediate_size\": 64}");
    put_text(at("in/tokenizer.json"), TINY_TOKENIZER);
}

enum kind {
    WRITER,
    TENSOR,
    GGUF_WRITER,
    FILE_TO_FILE,
    ONE_FILE,
    SHARDS,
    GGUF,
    CONVERT,
    REPAIR,
    DEQUANTIZE,
    MIXED,
    KINDS
};

static const struct output {
    const char *what, *in, *out;
} outputs[KINDS] = {
    [WRITER] = { "a writer", NULL, "w.safetensors" },
    [TENSOR] = { "a tensor", NULL, "t.safetensors" },
    [GGUF_WRITER] = { "a GGUF writer", NULL, "w.gguf" },
    [FILE_TO_FILE] = { "quantize a file", "in/model.safetensors", "q.safetensors" },
    [ONE_FILE] = { "quantize to one file", "in", "one" },
    [SHARDS] = { "quantize to shards", "in", "shards" },
    [GGUF] = { "quantize to GGUF", "in", "q.gguf" },
    [CONVERT] = { "convert", "source", "converted" },
    [REPAIR] = { "repair", "broken", "repaired" },
    [DEQUANTIZE] = { "dequantize", "source", "plain" },
    [MIXED] = { "quantize by GPTQ beside FP8 and codes", "more", "mixed" },
};

static nib_status make_plan(enum kind kind, bool other, const nib_checkpoint *in, nib_plan **plan)
{
    static const char *const fp8[] = { "*down_proj" };
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.format = kind == GGUF ? NIB_CHECKPOINT_FORMAT_GGUF : NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS;
    options.shard_bytes = kind == SHARDS || (kind == ONE_FILE && other) ? 2000 : 0;
    options.scale_rule = other && kind != MIXED ? NIB_SCALE_RTN : NIB_UNSET;
    if (kind == MIXED) {
        options.statistics = at("stats");
        options.gptq = !other;
        options.fp8 = fp8;
        options.n_fp8 = 1;
        options.codes = at("codes");
    }
    switch (kind) {
    case CONVERT:
        return nib_plan_convert(in, NIB_CHECKPOINT_FORMAT_MODELOPT, plan);
    case REPAIR:
        return nib_plan_repair(in, plan);
    case DEQUANTIZE:
        return nib_plan_dequantize(in, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_F32, plan);
    default:
        return nib_plan_quantize(in, &options, plan);
    }
}

/* The output, or another in its place. */
static nib_status make(enum kind kind, bool other, const char *out, const nib_run_options *run)
{
    nib_checkpoint *in = NULL;
    nib_plan *plan = NULL;
    nib_job job;
    nib_job_init(&job);
    job.threads = output_threads;
    switch (kind) {
    case WRITER:
        return write_plain(at(out), (const char *const[]){ "w" }, 1);
    case TENSOR:
        return write_tensor(at(out));
    case GGUF_WRITER:
        return write_gguf(at(out));
    default:
        break;
    }
    nib_status status = nib_checkpoint_open(at(outputs[kind].in), &in);
    if (!status)
        status = make_plan(kind, other, in, &plan);
    if (!status)
        status = nib_plan_run(plan, at(out), run, &job);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    return status;
}

static void clear(const char *out)
{
    char partial[64];
    snprintf(partial, sizeof partial, "%s.nib-partial", out);
    CHECK_OK(nib_os_remove_directory(at(partial)));
    if (nib_os_is_directory(at(out)))
        CHECK_OK(nib_os_remove_directory(at(out)));
    else
        nib_os_remove(at(out));
}

/* Whether two files are the same, or two directories with all that is in them. */
static inline bool same(const char *a, const char *b)
{
    size_t n, m;
    if (nib_os_is_directory(a) != nib_os_is_directory(b))
        return false;
    if (!nib_os_is_directory(a)) {
        char *const one = get_file(a, &n), *const other = get_file(b, &m);
        const bool equal = one && other && n == m && !memcmp(one, other, n);
        free(one);
        free(other);
        return equal;
    }
    bool equal = entries(a) == entries(b);
    DIR *listing = opendir(a);
    for (struct dirent *item; equal && (item = readdir(listing));) {
        char inner[2][512];
        snprintf(inner[0], sizeof inner[0], "%s/%s", a, item->d_name);
        snprintf(inner[1], sizeof inner[1], "%s/%s", b, item->d_name);
        equal = !strcmp(item->d_name, ".") || !strcmp(item->d_name, "..") || same(inner[0], inner[1]);
    }
    closedir(listing);
    return equal;
}

/* An index of one file, which a repair keeps. */
static void put_index(const char *path)
{
    nib_checkpoint *c = NULL;
    char text[4096];
    CHECK_OK(nib_checkpoint_open(path, &c));
    size_t used = (size_t)snprintf(text, sizeof text, "{\"weight_map\": {");
    for (size_t i = 0; c && i < c->n_tensors; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s\"%s\": \"model.safetensors\"", i ? ", " : "",
                                 c->tensors[i].name);
    snprintf(text + used, sizeof text - used, "}}");
    nib_checkpoint_close(c);
    put_text(at("broken/" INDEX), text);
}

/* Statistics of an input and a Hessian of it, the unit matrix; weights, and codes for one of them. */
static void make_more(void)
{
    static const char *const names[] = { "model.layers.0.self_attn.o_proj.weight",
                                         "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.weight" };
    static float squares[COLS], triangle[COLS * (COLS + 1) / 2];
    const int64_t count = 6 * COLS, one = 1, rest = COLS * (COLS + 1) / 2;
    nib_writer *writer = NULL;
    CHECK(mkdir(at("more"), 0777) == 0 && mkdir(at("codes"), 0777) == 0);
    CHECK_OK(write_plain(at("more/model.safetensors"), names, 3));
    put_text(at("more/config.json"), "{\"model_type\": \"llama\"}");
    for (int k = 0, i = 0; k < COLS; i += COLS - k++) {
        squares[k] = (float)count;
        triangle[i] = 1;
    }
    CHECK_OK(nib_writer_create(at("stats"), &writer));
    CHECK_OK(nib_writer_metadata(writer, "format", "nib-stats-1"));
    CHECK_OK(nib_writer_metadata(writer, "inputs", "{\"model.layers.0.self_attn.o_proj\": \"x\"}"));
    CHECK_OK(nib_writer_declare(writer, "x.count", NIB_I64, 1, &one));
    CHECK_OK(nib_writer_declare(writer, "x.sum2", NIB_F32, 2, (int64_t[]){ 1, COLS }));
    CHECK_OK(nib_writer_declare(writer, "x.hessian", NIB_F32, 1, &rest));
    CHECK_OK(nib_writer_write(writer, "x.count", 0, &count, sizeof count));
    CHECK_OK(nib_writer_write(writer, "x.sum2", 0, squares, sizeof squares));
    CHECK_OK(nib_writer_write(writer, "x.hessian", 0, triangle, sizeof triangle));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    nib_checkpoint *in = NULL;
    nib_plan *plan = NULL;
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.only = (const char *const[]){ "*gate_proj" };
    options.n_only = 1;
    CHECK_OK(nib_checkpoint_open(at("more"), &in));
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    CHECK_OK(nib_plan_run(plan, at("codes"), NULL, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

/* What the later ones start from. */
static void make_sources(void)
{
    make_inputs();
    if (nib_os_exists(at("broken")))
        return;
    make_more();
    CHECK_OK(make(SHARDS, false, "source", NULL));
    CHECK_OK(make(ONE_FILE, false, "broken", NULL));
    put_index(at("broken"));
    put_text(at("broken/config.json"), "{\"model_type\": \"llama\"}");
}

#endif

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

enum kind { WRITER, TENSOR, GGUF_WRITER, FILE_TO_FILE, ONE_FILE, SHARDS, GGUF, CONVERT, REPAIR, DEQUANTIZE, KINDS };

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
};

static nib_status make_plan(enum kind kind, bool other, const nib_checkpoint *in, nib_plan **plan)
{
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.format = kind == GGUF ? NIB_CHECKPOINT_FORMAT_GGUF : NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS;
    options.shard_bytes = kind == SHARDS || (kind == ONE_FILE && other) ? 2000 : 0;
    options.scale_rule = other ? NIB_SCALE_RTN : NIB_UNSET;
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

/* What the later ones start from. */
static void make_sources(void)
{
    make_inputs();
    if (nib_os_exists(at("broken")))
        return;
    CHECK_OK(make(SHARDS, false, "source", NULL));
    CHECK_OK(make(ONE_FILE, false, "broken", NULL));
    put_index(at("broken"));
    put_text(at("broken/config.json"), "{\"model_type\": \"llama\"}");
}

#endif

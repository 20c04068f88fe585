/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_calibrated.c - any bytes as statistics of inputs (imatrix, old and new, or nib's own, Hessians in it) or as a file
 * of Hessians beside good statistics, by the first byte: rejected with a message, or every Hessian can be read and is
 * finite, and a small model is planned and quantized with them: weighted, folded, by GPTQ, with scales of activations.
 * NIB_TEST_WRAP_MEMORY
 */
#define _GNU_SOURCE
#include <stdbool.h>

#include "io/hessians.h"
#include "nib_checkpoint.h"
#include "fuzz_directory.h"

enum { K = 16 };
#define LAYER "model.layers.0."
static const struct put_tensor model[] = {
    { "model.embed_tokens.weight", NIB_BF16, 2, { 8, K }, 0x3c },
    { "model.norm.weight", NIB_F32, 1, { K }, 0x3f },
    { LAYER "input_layernorm.weight", NIB_F32, 1, { K }, 0x3f },
    { LAYER "post_attention_layernorm.weight", NIB_F32, 1, { K }, 0x3f },
    { LAYER "self_attn.q_proj.weight", NIB_BF16, 2, { K, K }, 0x3c },
    { LAYER "self_attn.k_proj.weight", NIB_BF16, 2, { K, K }, 0x3b },
    { LAYER "self_attn.v_proj.weight", NIB_BF16, 2, { K, K }, 0x3d },
    { LAYER "self_attn.o_proj.weight", NIB_F32, 2, { K, K }, 0x3c },
    { LAYER "mlp.gate_proj.weight", NIB_BF16, 2, { K, K }, 0x3c },
    { LAYER "mlp.up_proj.weight", NIB_BF16, 2, { K, K }, 0x3b },
    { LAYER "mlp.down_proj.weight", NIB_BF16, 2, { K, K }, 0x3c },
};
static const char config[] =
    "{\"model_type\": \"llama\", \"hidden_size\": 16, \"intermediate_size\": 16, \"num_hidden_layers\": 1, "
    "\"num_attention_heads\": 1, \"num_key_value_heads\": 1, \"vocab_size\": 8}";

/* ---- Hessians ---- */

static void walk_hessians(const char *statistics, const char *directory)
{
    struct nib_hessians *h = NULL;
    const nib_status status = nib_hessians_open(statistics, directory, &h);
    require(known(status) || status == NIB_ERR_IO, "the status of Hessians");
    require(!status == (h != NULL) && (h || *nib_last_error()), "Hessians or none");
    for (size_t i = 0; h && i < nib_hessians_count(h); i++) {
        const struct nib_hessian entry = nib_hessians_at(h, i);
        size_t found;
        require(nib_hessians_find(h, entry.name, &found) && found == i, "finding a Hessian");
        require(entry.cols > 0 && entry.cols < 1 << 12, "its size, which the file bounds");
        const size_t n = (size_t)(entry.cols * (entry.cols + 1) / 2);
        float *values = malloc(n * sizeof *values);
        require(values && !nib_hessians_read(h, i, values), "reading it");
        for (size_t k = 0; k < n; k++)
            require(values[k] - values[k] == 0, "a finite value");
        free(values);
    }
    nib_hessians_close(h);
}

/* ---- Plans and runs ---- */

static void quantize(const nib_checkpoint *c, const char *statistics, const char *hessians, int way, const char *out)
{
    nib_quantize_options options;
    nib_plan *plan = NULL;
    nib_quantize_options_init(&options);
    options.statistics = statistics;
    if (way == 1) {
        options.fold = NIB_FOLD_SEARCH;
    } else if (way == 2) {
        options.gptq = 1;
        options.hessians = hessians;
    } else if (way == 3) {
        options.scheme = NIB_SCHEME_NVFP4;
        options.activation = NIB_ACTIVATION_STATISTICS;
        options.fold = NIB_FOLD_FIXED;
    }
    const nib_status status = nib_plan_quantize(c, &options, &plan);
    require(known(status) || status == NIB_ERR_ARG || status == NIB_ERR_IO, "the status of a plan");
    require(!status == (plan != NULL), "a plan or none");
    if (plan) {
        const nib_run_options run = { .bytes = sizeof run, .force = 1 };
        nib_job job;
        nib_job_init(&job);
        job.threads = 1;
        require(known(nib_plan_run(plan, out, &run, &job)), "the status of a run");
    }
    nib_plan_destroy(plan);
}

/* Statistics of every module: 4 K tokens, all mean squares 1; and no Hessian. */
static void put_statistics(const char *directory)
{
    static const char *const inputs[] = { LAYER "self_attn.q_proj", LAYER "self_attn.o_proj", LAYER "mlp.gate_proj",
                                          LAYER "mlp.down_proj" };
    static const char map[] =
        "{\"" LAYER "self_attn.q_proj\": \"" LAYER "self_attn.q_proj\", \"" LAYER "self_attn.k_proj\": \"" LAYER
        "self_attn.q_proj\", \"" LAYER "self_attn.v_proj\": \"" LAYER "self_attn.q_proj\", \"" LAYER
        "self_attn.o_proj\": \"" LAYER "self_attn.o_proj\", \"" LAYER "mlp.gate_proj\": \"" LAYER
        "mlp.gate_proj\", \"" LAYER "mlp.up_proj\": \"" LAYER "mlp.gate_proj\", \"" LAYER "mlp.down_proj\": \"" LAYER
        "mlp.down_proj\"}";
    float sums[K];
    const int64_t count = 4 * K;
    char path[256], name[96];
    nib_writer *writer = NULL;
    for (int i = 0; i < K; i++)
        sums[i] = (float)count;
    snprintf(path, sizeof path, "%s/stats", directory);
    require(!nib_writer_create(path, &writer) && !nib_writer_metadata(writer, "format", "nib-stats-1") &&
                !nib_writer_metadata(writer, "inputs", map),
            "statistics");
    for (size_t i = 0; i < 2 * sizeof inputs / sizeof *inputs; i++) {
        snprintf(name, sizeof name, "%s.%s", inputs[i / 2], i % 2 ? "count" : "sum2");
        require(!nib_writer_declare(writer, name, i % 2 ? NIB_I64 : NIB_F32, i % 2 ? 1 : 2, (const int64_t[2]){ 1, K }),
                "an input");
    }
    for (size_t i = 0; i < 2 * sizeof inputs / sizeof *inputs; i++) {
        snprintf(name, sizeof name, "%s.%s", inputs[i / 2], i % 2 ? "count" : "sum2");
        require(
            !nib_writer_write(writer, name, 0, i % 2 ? (const void *)&count : sums, i % 2 ? sizeof count : sizeof sums),
            "its values");
    }
    require(!nib_writer_commit(writer), "the end of statistics");
    nib_writer_destroy(writer);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const char *out, *drawn, *good;
    static nib_checkpoint *plain;
    char statistics[256];
    if (!plain) {
        const char *place = make_directory();
        out = make_directory();
        drawn = make_directory();
        good = make_directory();
        put_tensors(place, "model.safetensors", model, sizeof model / sizeof *model);
        put_file(place, "config.json", config, strlen(config));
        require(!nib_checkpoint_open(place, &plain), "a good model");
        put_statistics(good);
    }
    if (count == 0)
        return 0;
    const bool as_statistics = bytes[0] % 2;
    put_file(drawn, as_statistics ? "stats" : "stats-of-layer-00000.safetensors", bytes + 1, count - 1);
    snprintf(statistics, sizeof statistics, "%s/stats", as_statistics ? drawn : good);
    walk_hessians(statistics, as_statistics ? NULL : drawn);
    quantize(plain, statistics, as_statistics ? NULL : drawn, as_statistics ? bytes[0] / 2 % 4 : 2, out);
    return 0;
}

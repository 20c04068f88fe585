/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gguf_model.c - GGUF files made from directories: names, shapes, order of rows, keys and tokenizers of every family,
 * each value by hand; and what has no place in such a file. tests/campaign/gguf_models.py compares with llama.cpp.
 */
#define _GNU_SOURCE
/* NIB_TEST_WRAP_ALLOC */
#include "test_alloc.h"
#include "test_weights.h"

#include <math.h>
#include <sys/stat.h>

#include "base/os.h"
#include "io/gguf.h"
#include "model/weights.h"

/* ---- Making ---- */

enum { H = 64, V = 12, HEADS = 4, KV = 2 };
#define LAYER "model.layers.0."
#define SIZES                                                                                                 \
    "\"hidden_size\": 64, \"intermediate_size\": 128, \"num_hidden_layers\": 1, \"num_attention_heads\": 4, " \
    "\"num_key_value_heads\": 2, \"vocab_size\": 12, \"max_position_embeddings\": 512"

static float numbers[1 << 16];

static void fill_numbers(void)
{
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        numbers[i] = (float)(i % 4093) / 64 - 32; /* exact in F32, not in BF16 */
}

static void start(const char *name, const char *config, const char *tokenizer)
{
    char path[128];
    empty_directory();
    fill_numbers();
    CHECK(mkdir(at(name), 0777) == 0);
    snprintf(path, sizeof path, "%s/config.json", name);
    put_text(path, config);
    snprintf(path, sizeof path, "%s/tokenizer.json", name);
    if (tokenizer)
        put_text(path, tokenizer);
}

#define F32(name, ...)                                                                  \
    {                                                                                   \
        name, NIB_F32, sizeof((int64_t[]){ __VA_ARGS__ }) / 8, { __VA_ARGS__ }, numbers \
    }
#define ATTENTION                                                                                       \
    F32("model.embed_tokens.weight", V, H), F32(LAYER "self_attn.q_proj.weight", H, H),                 \
        F32(LAYER "self_attn.k_proj.weight", H / 2, H), F32(LAYER "self_attn.v_proj.weight", H / 2, H), \
        F32(LAYER "self_attn.o_proj.weight", H, H), F32(LAYER "input_layernorm.weight", H)

static void put(const char *name, const struct item *items, size_t n)
{
    char path[128];
    snprintf(path, sizeof path, "%s/model.safetensors", name);
    put_tensors(path, items, n);
}
#define PUT(name, ...) \
    put(name, (struct item[]){ __VA_ARGS__ }, sizeof((struct item[]){ __VA_ARGS__ }) / sizeof(struct item))

/* As plain values, so that every one can be looked at. */
static nib_status make(const char *name, nib_dtype dtype)
{
    nib_checkpoint *c = NULL;
    nib_plan *plan = NULL;
    nib_job job;
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    nib_status status = nib_checkpoint_open(at(name), &c);
    nib_job_init(&job);
    job.threads = 1; /* the failing allocator is of this thread */
    if (!status)
        status = nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_GGUF, dtype, &plan);
    if (!status)
        status = nib_plan_run(plan, at("out.gguf"), &force, &job);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    return status;
}

static nib_plan_row row_of(const nib_plan *plan, const char *weight)
{
    nib_plan_row row = { .bytes = sizeof row, .name = "" };
    for (size_t i = 0; strcmp(row.name, weight) && nib_plan_get_row(plan, i, &row) == NIB_OK; i++)
        ;
    CHECK_THAT(!strcmp(row.name, weight), "there is no row %s", weight);
    return row;
}

/* A weight that is not in the file takes nothing of it, and is not quantized for it. */
static void check_left_out(const char *name, const char *weight, uint64_t bytes)
{
    nib_checkpoint *c = NULL;
    nib_plan *plan = NULL;
    nib_quantize_options options;
    CHECK_OK(nib_checkpoint_open(at(name), &c));
    CHECK_OK(nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_GGUF, NIB_F32, &plan));
    nib_plan_row row = row_of(plan, weight);
    CHECK_THAT(row.bytes_in == bytes && row.bytes_out == 0, "%s: %llu of %llu bytes", row.name,
               (unsigned long long)row.bytes_out, (unsigned long long)row.bytes_in);
    nib_plan_destroy(plan);
    nib_quantize_options_init(&options);
    options.format = NIB_CHECKPOINT_FORMAT_GGUF;
    CHECK_OK(nib_plan_quantize(c, &options, &plan));
    row = row_of(plan, weight);
    CHECK_THAT(row.action == NIB_ACTION_KEEP && !strcmp(row.reason, "llama.cpp has it in a file of its own"), "%s",
               row.reason);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
}

static nib_gguf *made(const char *name)
{
    nib_gguf *file = NULL;
    CHECK_OK(make(name, NIB_F32));
    CHECK_OK(nib_gguf_open(at("out.gguf"), &file));
    return file;
}

/* ---- Looking ---- */

static float *values_of(int line, const nib_gguf *file, const char *name, int rank, const int64_t *shape)
{
    struct nib_gguf_entry entry;
    size_t index;
    if (!nib_gguf_find(file, name, &index)) {
        test_fail(__FILE__, line, "there is no %s", name);
        return calloc(1 << 16, sizeof(float));
    }
    CHECK_OK(nib_gguf_entry(file, index, &entry));
    bool same = entry.rank == rank && entry.type == NIB_GGUF_F32;
    for (int i = 0; i < rank; i++)
        same &= entry.shape[i] == shape[i];
    if (!same)
        test_fail(__FILE__, line, "%s has another shape or type", name);
    float *values = calloc(1 << 16, sizeof *values);
    CHECK_OK(nib_gguf_read(file, index, 0, values, (size_t)entry.bytes));
    return values;
}
#define VALUES(file, name, ...) \
    values_of(__LINE__, file, name, sizeof((int64_t[]){ __VA_ARGS__ }) / 8, (int64_t[]){ __VA_ARGS__ })

static void check_integer(int line, const nib_gguf *file, const char *key, int64_t wanted)
{
    int64_t value = -1;
    bool found = false, truth = false;
    if (nib_gguf_get_integer(file, key, &value, &found) && !nib_gguf_get_bool(file, key, &truth, &found))
        value = truth;
    if (!found || value != wanted)
        test_fail(__FILE__, line, "%s is %lld, not %lld", key, (long long)value, (long long)wanted);
}
#define INTEGER(key, wanted) check_integer(__LINE__, file, key, wanted)

static void check_text(int line, const nib_gguf *file, const char *key, const char *wanted)
{
    char *value = NULL;
    bool found = false;
    CHECK_OK(nib_gguf_get_string(file, key, &value, &found));
    if (found != (wanted != NULL) || (wanted && strcmp(value, wanted) != 0))
        test_fail(__FILE__, line, "%s is %s, not %s", key, value ? value : "not there", wanted ? wanted : "absent");
    nib_free(value);
}
#define STRING(key, wanted) check_text(__LINE__, file, key, wanted)

static void check_number(int line, const nib_gguf *file, const char *key, double wanted)
{
    double value = NAN;
    bool found = false;
    CHECK_OK(nib_gguf_get_number(file, key, &value, &found));
    if (found ? value != wanted : !isnan(wanted))
        test_fail(__FILE__, line, "%s is %g, not %g", key, value, wanted);
}
#define NUMBER(key, wanted) check_number(__LINE__, file, key, wanted) /* NAN: not there */

/* The strings of a key with a bar between them; the caller frees it. */
static char *strings_of(const nib_gguf *file, const char *key)
{
    struct nib_gguf_strings strings = { 0 };
    bool found = false;
    char *all = calloc(1, 1024);
    CHECK_OK(nib_gguf_get_strings(file, key, &strings, &found));
    for (size_t i = 0; i < strings.count; i++)
        snprintf(all + strlen(all), 1024 - strlen(all), "%s%s", i ? "|" : "", strings.text + strings.starts[i]);
    nib_gguf_strings_free(&strings);
    return all;
}

static void check_words(int line, const nib_gguf *file, const char *key, const char *wanted)
{
    char *all = strings_of(file, key);
    if (strcmp(all, wanted) != 0)
        test_fail(__FILE__, line, "%s is %s, not %s", key, all, wanted);
    free(all);
}
#define WORDS(key, wanted) check_words(__LINE__, file, key, wanted)

/* Row r of heads of n rows, as llama.cpp wants them: the first half and the second alternate. */
static int64_t source_row(int64_t r, int64_t n) { return r / n * n + r % 2 * (n / 2) + r % n / 2; }

/* ---- Families ---- */

TEST(llama_has_heads_in_another_order)
{
    start("Tiny-Llama-2-7B-chat",
          "{\"model_type\": \"llama\", " SIZES ", \"rope_theta\": 5000.0, \"rms_norm_eps\": 1e-5}", TINY_TOKENIZER);
    PUT("Tiny-Llama-2-7B-chat", ATTENTION, F32(LAYER "self_attn.q_proj.bias", H),
        F32(LAYER "mlp.up_proj.weight", 128, H), F32("model.norm.weight", H), F32("lm_head.weight", V, H),
        F32(LAYER "self_attn.rotary_emb.inv_freq", 8));
    nib_gguf *file = made("Tiny-Llama-2-7B-chat");
    float *q = VALUES(file, "blk.0.attn_q.weight", H, H), *k = VALUES(file, "blk.0.attn_k.weight", H / 2, H);
    float *bias = VALUES(file, "blk.0.attn_q.bias", H), *v = VALUES(file, "blk.0.attn_v.weight", H / 2, H);
    for (int64_t r = 0; r < H; r++) {
        CHECK(bias[r] == numbers[source_row(r, H / HEADS)]);
        CHECK_BYTES(q + r * H, numbers + source_row(r, H / HEADS) * H, H * sizeof(float));
    }
    for (int64_t r = 0; r < H / 2; r++)
        CHECK_BYTES(k + r * H, numbers + source_row(r, H / 2 / KV) * H, H * sizeof(float));
    CHECK_BYTES(v, numbers, H / 2 * H * sizeof(float));
    free(q), free(k), free(bias), free(v);
    free(VALUES(file, "token_embd.weight", V, H));
    free(VALUES(file, "output.weight", V, H));
    free(VALUES(file, "output_norm.weight", H));
    free(VALUES(file, "blk.0.attn_norm.weight", H));
    CHECK_THAT(nib_gguf_count(file) == 10, "%zu tensors", nib_gguf_count(file));
    STRING("general.architecture", "llama");
    STRING("general.type", "model");
    STRING("general.name", "Tiny Llama 2 7B Chat");
    STRING("general.basename", "Tiny-Llama-2");
    STRING("general.finetune", "7b-chat"); /* no size that such a model can have */
    STRING("general.size_label", "22K");
    INTEGER("llama.block_count", 1);
    INTEGER("llama.context_length", 512);
    INTEGER("llama.attention.head_count", HEADS);
    INTEGER("llama.attention.head_count_kv", KV);
    INTEGER("llama.attention.key_length", H / HEADS);
    INTEGER("llama.rope.dimension_count", H / HEADS);
    INTEGER("llama.vocab_size", V);
    NUMBER("llama.rope.freq_base", 5000);
    nib_gguf_close(file);
}

/* gemma3 and gpt_oss are looked at below. */
TEST(only_llama_and_mistral_have_heads_in_another_order)
{
    static const struct {
        const char *model_type, *architecture;
        bool permuted;
    } families[] = { { "llama", "llama", true },
                     { "mistral", "llama", true },
                     { "qwen2", "qwen2", false },
                     { "qwen3", "qwen3", false },
                     { "qwen3_moe", "qwen3moe", false } };
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        char config[512];
        snprintf(config, sizeof config, "{\"model_type\": \"%s\", " SIZES ", \"num_experts\": 3}",
                 families[i].model_type);
        start("m", config, TINY_TOKENIZER);
        PUT("m", ATTENTION);
        nib_gguf *file = made("m");
        STRING("general.architecture", families[i].architecture);
        float *q = VALUES(file, "blk.0.attn_q.weight", H, H), *k = VALUES(file, "blk.0.attn_k.weight", H / 2, H);
        for (int64_t r = 0; r < H; r++)
            CHECK_BYTES(q + r * H, numbers + (families[i].permuted ? source_row(r, H / HEADS) : r) * H, H * sizeof *q);
        for (int64_t r = 0; r < H / 2; r++)
            CHECK_BYTES(k + r * H, numbers + (families[i].permuted ? source_row(r, H / 2 / KV) : r) * H, H * sizeof *k);
        free(q), free(k);
        nib_gguf_close(file);
    }
}

TEST(gemma_adds_one_to_norms_and_leaves_out_its_eyes)
{
    static const uint8_t model[] = { 10, 9,  10, 5, '<', 'u', 'n', 'k', '>', 24,  2,       /* unknown */
                                     10, 8,  10, 1, 'a', 21,  0,   0,   128, 191,          /* score -1 */
                                     10, 10, 10, 6, '<', '0', 'x', '4', '1', '>', 24, 6 }; /* a byte */
    start("gemma",
          "{\"model_type\": \"gemma3\", \"text_config\": {" SIZES ", \"head_dim\": 16, \"sliding_window\": 32, "
          "\"final_logit_softcapping\": 30.0}}",
          NULL);
    put_file("gemma/tokenizer.model", model, sizeof model);
    put_text("gemma/added_tokens.json", "{\"none\": -1, \"nor this\": \"7\", \"beyond\": 12, \"word\": 7}");
    put_text("gemma/tokenizer_config.json",
             "{\"added_tokens_decoder\": {\"5\": {\"content\": \"x\xE2\x96\x81y\"}, \"6\": "
             "{\"content\": \"<|z|>\"}}, \"model_max_length\": 1000000000000000019884624838656}");
    PUT("gemma", F32("language_model.model.embed_tokens.weight", V, H), F32("vision_tower.encoder.fc.weight", H, H),
        F32("language_model." LAYER "self_attn.q_norm.weight", 16), F32("multi_modal_projector.norm.weight", H),
        F32("language_model." LAYER "post_attention_layernorm.weight", H),
        F32("language_model." LAYER "pre_feedforward_layernorm.weight", H),
        F32("language_model." LAYER "self_attn.q_proj.weight", H, H));
    check_left_out("gemma", "vision_tower.encoder.fc", H * H * sizeof(float));
    nib_gguf *file = made("gemma");
    float *norm = VALUES(file, "blk.0.post_attention_norm.weight", H), *q = VALUES(file, "blk.0.attn_q.weight", H, H);
    for (int i = 0; i < H; i++)
        CHECK(norm[i] == numbers[i] + 1);
    CHECK_BYTES(q, numbers, H * H * sizeof(float));
    free(norm), free(q);
    free(VALUES(file, "blk.0.ffn_norm.weight", H));
    free(VALUES(file, "blk.0.attn_q_norm.weight", 16));
    CHECK_THAT(nib_gguf_count(file) == 5, "%zu tensors", nib_gguf_count(file));
    INTEGER("gemma3.attention.sliding_window", 32);
    NUMBER("gemma3.final_logit_softcapping", 30);
    INTEGER("tokenizer.ggml.add_space_prefix", 0);
    STRING("tokenizer.ggml.model", "llama");
    struct nib_gguf_strings tokens;
    bool found;
    int32_t types[V];
    float scores[V];
    size_t index;
    CHECK_OK(nib_gguf_get_strings(file, "tokenizer.ggml.tokens", &tokens, &found));
    CHECK(tokens.count == V && !strcmp(tokens.text + tokens.starts[1], "a"));
    CHECK(!strcmp(tokens.text + tokens.starts[5], "x y") && !strcmp(tokens.text + tokens.starts[11], "[PAD11]"));
    CHECK(!strcmp(tokens.text + tokens.starts[7], "word"));
    CHECK(nib_gguf_find_key(file, "tokenizer.ggml.token_type", &index));
    CHECK_OK(nib_gguf_read_value(file, index, 0, types, sizeof types));
    CHECK(types[0] == 2 && types[1] == 1 && types[2] == 6 && types[5] == 4 && types[6] == 3 && types[7] == 4 &&
          types[11] == 5);
    CHECK(nib_gguf_find_key(file, "tokenizer.ggml.scores", &index));
    CHECK_OK(nib_gguf_read_value(file, index, 0, scores, sizeof scores));
    CHECK(scores[1] == -1 && scores[5] == -1000 && scores[11] == -10000);
    nib_gguf_strings_free(&tokens);
    nib_gguf_close(file);
    PUT("gemma", F32("model.language_model.embed_tokens.weight", V, H), /* as transformers names them today */
        F32("model.language_model.layers.0.self_attn.q_proj.weight", H, H));
    file = made("gemma");
    free(VALUES(file, "blk.0.attn_q.weight", H, H));
    free(VALUES(file, "token_embd.weight", V, H));
    nib_gguf_close(file);
    /* Every cut of the model is an error, or a model with fewer tokens. */
    for (size_t n = 0; n < sizeof model; n++) {
        put_file("gemma/tokenizer.model", model, n);
        const nib_status status = make("gemma", NIB_BF16);
        CHECK_THAT(n == 11 || n == 21 ? !status : status == NIB_ERR_DATA, "%zu bytes: %s", n, nib_status_name(status));
    }
    unlink(at("gemma/tokenizer.model"));
    CHECK_FAILS(make("gemma", NIB_F32), NIB_ERR_UNSUPPORTED, "no tokenizer.model");
}

#define EXPERT(e)                                                                                                   \
    F32(LAYER "mlp.experts." e ".gate_proj.weight", 128, H), F32(LAYER "mlp.experts." e ".up_proj.weight", 128, H), \
        F32(LAYER "mlp.experts." e ".down_proj.weight", H, 128)

TEST(experts_are_stacked_in_the_order_of_their_numbers)
{
    start("moe", "{\"model_type\": \"qwen3_moe\", " SIZES ", \"num_experts\": 3, \"moe_intermediate_size\": 128}",
          TINY_TOKENIZER);
    struct item items[] = { ATTENTION, F32(LAYER "mlp.gate.weight", 3, H), EXPERT("1"), EXPERT("0"), EXPERT("2") };
    const size_t n = sizeof items / sizeof *items;
    items[7].data = numbers + 100; /* gate of expert 1 */
    put("moe", items, n);
    nib_gguf *file = made("moe");
    float *gate = VALUES(file, "blk.0.ffn_gate_exps.weight", 3, 128, H);
    CHECK_BYTES(gate, numbers, 128 * H * sizeof(float));
    CHECK_BYTES(gate + 128 * H, numbers + 100, 128 * H * sizeof(float));
    free(gate);
    free(VALUES(file, "blk.0.ffn_down_exps.weight", 3, H, 128));
    free(VALUES(file, "blk.0.ffn_gate_inp.weight", 3, H));
    INTEGER("qwen3moe.expert_count", 3);
    INTEGER("qwen3moe.expert_used_count", 8);
    INTEGER("qwen3moe.expert_feed_forward_length", 128);
    STRING("general.size_label", "3x38K");
    nib_gguf_close(file);
    items[n - 1].name = LAYER "mlp.experts.4.down_proj.weight";
    put("moe", items, n);
    CHECK_FAILS(make("moe", NIB_F32), NIB_ERR_DATA, "expert 2 is missing");
    items[n - 1].name = LAYER "mlp.experts.2.down_proj.weight";
    items[n - 1].shape[1] = 64;
    put("moe", items, n);
    CHECK_FAILS(make("moe", NIB_F32), NIB_ERR_DATA, "another shape");
}

/* The experts of a tensor have one type: where one of them stays, the others do, and those of other tensors do not. */
TEST(experts_of_a_gguf_stay_together)
{
    static const char *const ignored[] = { "blk.0.ffn_down_exps.1" };
    nib_quantize_options options;
    nib_plan *plan = NULL;
    start("moe", "{\"model_type\": \"qwen3_moe\", " SIZES ", \"num_experts\": 2, \"moe_intermediate_size\": 128}",
          TINY_TOKENIZER);
    PUT("moe", F32("model.embed_tokens.weight", V, H), EXPERT("0"), EXPERT("1"));
    CHECK_OK(make("moe", NIB_F32));
    nib_checkpoint *c = open_good(at("out.gguf"));
    nib_quantize_options_init(&options);
    options.format = NIB_CHECKPOINT_FORMAT_GGUF;
    options.ignore = ignored;
    options.n_ignore = 1;
    CHECK_OK(nib_plan_quantize(c, &options, &plan));
    const nib_plan_row kept = row_of(plan, "blk.0.ffn_down_exps.0"), changed = row_of(plan, "blk.0.ffn_up_exps.0");
    CHECK_THAT(!strcmp(kept.reason, "it is in one tensor with blk.0.ffn_down_exps.1, which stays"), "%s", kept.reason);
    CHECK(kept.action == NIB_ACTION_KEEP && changed.action == NIB_ACTION_QUANTIZE);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
}

/* Codes 0..31 of a block and its scale must be found again, in ggml's order. */
TEST(gpt_oss_keeps_mxfp4)
{
    enum { E = 2, N = 64, B = H / 32 };
    static uint8_t blocks[E][2 * N][B][16], scales[E][2 * N][B];
    static float biases[E][2 * N];
    start("oss",
          "{\"model_type\": \"gpt_oss\", " SIZES
          ", \"num_local_experts\": 2, \"quantization_config\": {\"quant_method\": "
          "\"mxfp4\"}}",
          TINY_TOKENIZER);
    for (size_t i = 0; i < sizeof blocks; i++)
        (&blocks[0][0][0][0])[i] = (uint8_t)test_random();
    for (size_t i = 0; i < sizeof scales; i++)
        (&scales[0][0][0])[i] = (uint8_t)(100 + test_below(30));
    for (size_t i = 0; i < E * 2 * N; i++)
        (&biases[0][0])[i] = (float)i;
    PUT("oss", ATTENTION, F32(LAYER "mlp.router.bias", E), F32(LAYER "self_attn.sinks", HEADS),
        { LAYER "mlp.experts.gate_up_proj_blocks", NIB_U8, 4, { E, 2 * N, B, 16 }, blocks },
        { LAYER "mlp.experts.gate_up_proj_scales", NIB_U8, 3, { E, 2 * N, B }, scales },
        { LAYER "mlp.experts.gate_up_proj_bias", NIB_F32, 2, { E, 2 * N }, biases });
    nib_checkpoint *c = open_good(at("oss"));
    nib_plan *plan = NULL;
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.format = NIB_CHECKPOINT_FORMAT_GGUF;
    CHECK_OK(nib_plan_quantize(c, &options, &plan));
    CHECK_OK(nib_plan_run(plan, at("out.gguf"), NULL, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    nib_gguf *file = NULL;
    struct nib_gguf_entry entry;
    size_t index = 0;
    CHECK_OK(nib_gguf_open(at("out.gguf"), &file));
    CHECK(nib_gguf_find(file, "blk.0.ffn_up_exps.weight", &index));
    CHECK_OK(nib_gguf_entry(file, index, &entry));
    CHECK(entry.type == NIB_GGUF_MXFP4 && entry.rank == 3 && entry.shape[0] == E && entry.shape[1] == N);
    static uint8_t found[E][N][B][17];
    CHECK(entry.bytes == sizeof found);
    CHECK_OK(nib_gguf_read(file, index, 0, found, sizeof found));
    for (int e = 0; e < E; e++)
        for (int r = 0; r < N; r++)
            for (int b = 0; b < B; b++) {
                const uint8_t *from = blocks[e][2 * r + 1][b], *to = found[e][r][b];
                CHECK(to[0] == scales[e][2 * r + 1][b]);
                for (int j = 0; j < 32; j++)
                    CHECK((to[1 + j % 16] >> (j / 16 * 4) & 15) == (from[j / 2] >> (j % 2 * 4) & 15));
            }
    float *bias = VALUES(file, "blk.0.ffn_up_exps.bias", E, N);
    for (int i = 0; i < E * N; i++)
        CHECK(bias[i] == (float)(2 * i + 1));
    free(bias);
    free(VALUES(file, "blk.0.attn_sinks.weight", HEADS));
    CHECK(nib_gguf_find(file, "blk.0.attn_q.weight", &index));
    CHECK_OK(nib_gguf_entry(file, index, &entry));
    CHECK(entry.type == NIB_GGUF_NVFP4);
    STRING("general.architecture", "gpt-oss");
    nib_gguf_close(file);
}

/* ---- Tokenizers ---- */

static const char *tokenizer_with(const char *pre, const char *rest)
{
    static char text[4096];
    snprintf(text, sizeof text,
             "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [[\"a\", \"b\"], "
             "[\"a \", "
             "\"b\"]]}, \"pre_tokenizer\": %s%s}",
             pre, rest);
    return text;
}

TEST(tokenizers_are_named_by_how_they_cut)
{
#define SPLIT(regex)                                                                                       \
    "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": \"" regex \
    "\"}}, {\"type\": "                                                                                    \
    "\"ByteLevel\", \"use_regex\": false}]}"
#define QWEN(digits)                                                               \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|" digits \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|"                                   \
    "\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
    static const struct {
        const char *pre, *name;
    } cases[] = {
        { SPLIT(QWEN("\\\\p{N}")), "qwen2" },
        { SPLIT(QWEN("\\\\p{N}{1,3}")), "llama-bpe" },
        { "{\"type\": \"ByteLevel\"}", "gpt-2" },
        { "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Digits\", \"individual_digits\": true}, "
          "{\"type\": "
          "\"ByteLevel\", \"use_regex\": true}]}",
          "smollm" },
        { SPLIT("x+"), NULL },
        { "{\"type\": \"Whitespace\"}", NULL },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        start("q", "{\"model_type\": \"qwen2\", " SIZES "}", tokenizer_with(cases[i].pre, ""));
        PUT("q", ATTENTION);
        if (!cases[i].name) {
            CHECK_FAILS(make("q", NIB_F32), NIB_ERR_UNSUPPORTED, "pre-tokenizer");
            continue;
        }
        nib_gguf *file = made("q");
        STRING("tokenizer.ggml.pre", cases[i].name);
        struct nib_gguf_strings merges;
        bool found;
        CHECK_OK(nib_gguf_get_strings(file, "tokenizer.ggml.merges", &merges, &found));
        CHECK(merges.count == 2 && !strcmp(merges.text + merges.starts[1], "a\xC4\xA0 b"));
        nib_gguf_strings_free(&merges);
        nib_gguf_close(file);
    }
}

TEST(special_tokens_and_templates)
{
    start("q", "{\"model_type\": \"qwen2\", " SIZES ", \"pad_token_id\": 9, \"eos_token_id\": [1, 2]}",
          tokenizer_with(
              "{\"type\": \"ByteLevel\"}",
              ", \"added_tokens\": [{\"id\": 4, \"content\": \"<s>\", \"special\": true}, {\"id\": 5, \"content\": "
              "\"</s>\", \"special\": true}, {\"id\": 6, \"content\": \"word\"}], \"post_processor\": {\"type\": "
              "\"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"<s>\"}}, {\"Sequence\": {\"id\": "
              "\"A\"}}], \"pair\": [{\"SpecialToken\": {\"id\": \"<s>\"}}, {\"Sequence\": {\"id\": \"A\"}}, "
              "{\"SpecialToken\": {\"id\": \"</s>\"}}, {\"Sequence\": {\"id\": \"B\"}}]}"));
    put_text("q/tokenizer_config.json",
             "{\"bos_token\": \"<s>\", \"eos_token\": {\"content\": \"</s>\"}, \"add_eos_token\": false}");
    put_text("q/chat_template.jinja", "{{ messages }}");
    put_text("q/generation_config.json", "{\"top_k\": 20, \"temperature\": 0.5, \"top_p\": null, "
                                         "\"penalty_repeat\": 1.5, \"repetition_penalty\": 2}");
    PUT("q", ATTENTION);
    nib_gguf *file = made("q");
    INTEGER("tokenizer.ggml.bos_token_id", 4);
    INTEGER("tokenizer.ggml.eos_token_id", 5);
    INTEGER("tokenizer.ggml.padding_token_id", 9);
    INTEGER("tokenizer.ggml.add_bos_token", 1);
    INTEGER("tokenizer.ggml.add_eos_token", 0);
    INTEGER("tokenizer.ggml.add_sep_token", 1);
    INTEGER("general.sampling.top_k", 20);
    NUMBER("general.sampling.penalty_repeat", 1.5);
    NUMBER("general.sampling.temp", 0.5);
    STRING("tokenizer.chat_template", "{{ messages }}");
    size_t index;
    int32_t types[V];
    CHECK(nib_gguf_find_key(file, "tokenizer.ggml.token_type", &index));
    CHECK_OK(nib_gguf_read_value(file, index, 0, types, sizeof types));
    CHECK(types[0] == 1 && types[3] == 5 && types[4] == 3 && types[6] == 4);
    CHECK(!nib_gguf_find_key(file, "general.sampling.top_p", &index));
    nib_gguf_close(file);
}

#define SPECIAL(word) "{\"SpecialToken\": {\"id\": \"" word "\"}}"
#define SEQUENCE(letter) "{\"Sequence\": {\"id\": \"" letter "\"}}"

/* What ends every text separates none; what stands before it does. */
TEST(separators_of_texts_that_have_an_end)
{
    static const struct {
        const char *middle;
        int separated;
    } cases[] = { { SPECIAL("</s>"), 0 }, { SPECIAL("</s>") ", " SPECIAL("</s>"), 1 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char rest[1024];
        snprintf(rest, sizeof rest,
                 ", \"added_tokens\": [{\"id\": 5, \"content\": \"</s>\", \"special\": true}], \"post_processor\": "
                 "{\"type\": \"TemplateProcessing\", \"single\": [" SEQUENCE("A") ", " SPECIAL("</s>") "], "
                 "\"pair\": [" SEQUENCE("A") ", %s, " SEQUENCE("B") ", " SPECIAL("</s>") "]}",
                 cases[i].middle);
        start("q", "{\"model_type\": \"qwen2\", " SIZES "}", tokenizer_with("{\"type\": \"ByteLevel\"}", rest));
        put_text("q/tokenizer_config.json", "{\"eos_token\": \"</s>\"}");
        PUT("q", ATTENTION);
        nib_gguf *file = made("q");
        INTEGER("tokenizer.ggml.eos_token_id", 5);
        INTEGER("tokenizer.ggml.add_eos_token", 1);
        INTEGER("tokenizer.ggml.add_sep_token", cases[i].separated);
        nib_gguf_close(file);
    }
}

/* Without its scores; which tokens are special, tokenizer_config.json says. */
TEST(sentencepiece_that_has_become_a_tokenizer_json)
{
    start("m", "{\"model_type\": \"llama\", " SIZES "}",
          "{\"model\": {\"type\": \"BPE\", \"byte_fallback\": true, \"vocab\": {\"<s>\": 0, \"</s>\": 1, \"a\": 2, "
          "\"<0x41>\": 3, \"<x>\": 4}}, \"decoder\": {\"type\": \"Sequence\"}, \"added_tokens\": [{\"id\": 0, "
          "\"content\": \"<s>\"}, {\"id\": 5, \"content\": \"word\"}]}");
    put_text("m/tokenizer_config.json", "{\"bos_token\": \"<s>\", \"eos_token\": {\"content\": \"</s>\"}, "
                                        "\"additional_special_tokens\": [\"<x>\"]}");
    PUT("m", ATTENTION);
    nib_gguf *file = made("m");
    static const int32_t wanted[] = { 3, 3, 1, 6, 3, 4 };
    int32_t types[6];
    float scores[6];
    size_t index;
    STRING("tokenizer.ggml.model", "llama");
    WORDS("tokenizer.ggml.tokens", "<s>|</s>|a|<0x41>|<x>|word");
    CHECK(nib_gguf_find_key(file, "tokenizer.ggml.token_type", &index));
    CHECK_OK(nib_gguf_read_value(file, index, 0, types, sizeof types));
    CHECK_BYTES(types, wanted, sizeof types);
    CHECK(nib_gguf_find_key(file, "tokenizer.ggml.scores", &index));
    CHECK_OK(nib_gguf_read_value(file, index, 0, scores, sizeof scores));
    for (int i = 0; i < 6; i++)
        CHECK(scores[i] == -1000);
    nib_gguf_close(file);
}

TEST(words_of_two_tokens_and_what_is_given_twice)
{
    start("zoo-z", "{\"model_type\": \"qwen2\", " SIZES ", \"eos_token_id\": 7, \"final_logit_softcapping\": 0}",
          tokenizer_with("{\"type\": \"ByteLevel\"}",
                         ", \"added_tokens\": [{\"id\": 4, \"content\": \"<s>\"}, {\"id\": 5, \"content\": \"<s>\"}, "
                         "{\"id\": 6, \"content\": \"</s>\"}]"));
    put_text("zoo-z/tokenizer_config.json", "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}");
    put_text("zoo-z/generation_config.json", "{\"repetition_penalty\": 2}");
    PUT("zoo-z", ATTENTION);
    nib_gguf *file = made("zoo-z");
    INTEGER("tokenizer.ggml.bos_token_id", 4);
    INTEGER("tokenizer.ggml.eos_token_id", 6);
    STRING("general.name", "Zoo Z");
    NUMBER("qwen2.final_logit_softcapping", NAN);
    NUMBER("general.sampling.penalty_repeat", 2);
    nib_gguf_close(file);
}

TEST(templates_with_names)
{
    start("q", "{\"model_type\": \"qwen2\", " SIZES "}", TINY_TOKENIZER);
    put_text("q/tokenizer_config.json",
             "{\"chat_template\": [{\"name\": \"default\", \"template\": \"one\"}, {\"name\": \"A-Z/0.9_az:@[`{\", "
             "\"template\": \"two\"}, {\"name\": \"\", \"template\": \"three\"}, {\"name\": \"x\"}, 4, "
             "{\"name\": \"rag\", \"template\": \"five\"}]}");
    PUT("q", ATTENTION);
    nib_gguf *file = made("q");
    STRING("tokenizer.chat_template", "one");
    STRING("tokenizer.chat_template.A_Z_0_9_az_____", "two");
    STRING("tokenizer.chat_template.rag", "five");
    WORDS("tokenizer.chat_templates", "A_Z_0_9_az_____|rag");
    nib_gguf_close(file);
}

TEST(a_model_card_has_its_say)
{
    start("x-1b", "{\"model_type\": \"llama\", " SIZES "}", TINY_TOKENIZER);
    PUT("x-1b", ATTENTION);
    put_text("x-1b/README.md",
             "---\n# comment: no\nlicense: apache-2.0 # of the weights\nlicense_name: \"a \\\"b\\\"\"\n"
             "tags:\n- one\n\n-  'it''s'\n- no\npipeline_tag: text-generation\n"
             "language: [en, \"de\",\n  fr ]\nversion: 1.5\nname: yes\nmodel_name: Its own name\n"
             "description: |\n  tags: [x]\nmodel-index:\n- name: z\n  license: mit\n"
             "base_model:\n- org-a/some-base-v1.1\n- https://huggingface.co/b/c-2\n- ssh://d/e/f\n"
             "datasets:\nauthor: first\nauthor: last\n---\nlicense: mit\n");
    nib_gguf *file = made("x-1b");
    STRING("general.license", "apache-2.0");
    STRING("general.license.name", "a \"b\"");
    STRING("general.name", "Its own name"); /* "yes" is a boolean */
    STRING("general.version", NULL);
    STRING("general.description", NULL);
    STRING("general.author", "last");
    WORDS("general.tags", "one|it's|no|text-generation");
    WORDS("general.languages", "en|de|fr");
    INTEGER("general.base_model.count", 3);
    STRING("general.base_model.0.name", "Some Base v1.1");
    STRING("general.base_model.0.version", "v1.1");
    STRING("general.base_model.0.organization", "Org A");
    STRING("general.base_model.0.repo_url", "https://huggingface.co/org-a/some-base-v1.1");
    STRING("general.base_model.1.name", "C 2");
    STRING("general.base_model.1.repo_url", "https://huggingface.co/b/c-2");
    STRING("general.base_model.2.name", NULL);
    INTEGER("general.dataset.count", 0);
    nib_gguf_close(file);
    static const char *const bad[] = { "",
                                       "---",
                                       "--x\nlicense: mit\n---\n",
                                       "---\nlicense: mit\n",
                                       "--- \nlicense: mit\n---\n",
                                       "text\n---\nlicense: mit\n---\n",
                                       "---\nlicense: [mit\n---\n",
                                       "---\nlicense: [mit, {a: b}]\n---\n",
                                       "---\nlicense: \"mit\n---\n",
                                       "---\nlicense: \"\\u0041\"\n---\n",
                                       "---\nlicense: &a mit\n---\n",
                                       "---\nlicense:mit\n---\n", /* no key without a space */
                                       "---\nlicense:\n  a: mit\n---\n",
                                       "---\nlicense: mit\n  and more\n---\n",
                                       "---\nlicense: mit\n--y\n---\n", /* two dashes end nothing */
                                       "---\nlicense: 2024-01-01\n---\n",
                                       "---\nlicense: \xff\xfe\n---\n" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_text("x-1b/README.md", bad[i]);
        file = made("x-1b");
        STRING("general.license", NULL);
        STRING("general.name", "X 1b");
        nib_gguf_close(file);
    }
}

/* What stays has 16 bits where the model has them. */
TEST(dtypes_of_what_stays)
{
    static const nib_dtype dtypes[] = { NIB_BF16, NIB_F16 };
    for (int i = 0; i < 2; i++) {
        start("m", "{\"model_type\": \"qwen3\", " SIZES "}", TINY_TOKENIZER);
        struct item items[] = { ATTENTION };
        static uint16_t zeros[H * H];
        for (size_t j = 0; j < sizeof items / sizeof *items; j++) {
            items[j].data = zeros;
            items[j].dtype = dtypes[i];
        }
        put("m", items, sizeof items / sizeof *items);
        CHECK_OK(make("m", NIB_DTYPE_COUNT));
        nib_gguf *file = NULL;
        struct nib_gguf_entry entry;
        size_t index = 0;
        CHECK_OK(nib_gguf_open(at("out.gguf"), &file));
        CHECK(nib_gguf_find(file, "token_embd.weight", &index));
        CHECK_OK(nib_gguf_entry(file, index, &entry));
        CHECK_THAT(entry.type == (i ? NIB_GGUF_F16 : NIB_GGUF_BF16), "type %u", (unsigned)entry.type);
        nib_gguf_close(file);
    }
}

/* Names of directories: what is a size, a version, a type, and what only looks like one. */
TEST(names_say_sizes)
{
    static const struct {
        const char *name, *base, *size, *tune;
    } cases[] = { { "tiny-13k-instruct", "tiny", "13K", "instruct" }, { "tiny-13k1-chat", "tiny", "13.1K", "chat" },
                  { "tiny-0_013m", "tiny", "0.013M", NULL },          { "tiny-large-13k", "tiny-large", "13K", NULL },
                  { "tiny-large-fast", "tiny", "large", "fast" },     { "tiny-13k-1m", "tiny", "13K", "1m" },
                  { "tiny-13k-13k-14k", "tiny", "13K-14K", NULL },    { "tiny-13k-q8_0", "tiny", "13K", NULL } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        start(cases[i].name, "{\"model_type\": \"llama\", " SIZES "}", TINY_TOKENIZER);
        PUT(cases[i].name, ATTENTION);
        nib_gguf *file = made(cases[i].name);
        STRING("general.basename", cases[i].base);
        STRING("general.size_label", cases[i].size);
        STRING("general.finetune", cases[i].tune);
        nib_gguf_close(file);
    }
}

/* Without a number of heads for keys there are as many as for queries. */
TEST(heads_of_keys)
{
    start("m",
          "{\"model_type\": \"llama\", \"hidden_size\": 64, \"intermediate_size\": 128, \"num_hidden_layers\": 1, "
          "\"num_attention_heads\": 4, \"vocab_size\": 12}",
          TINY_TOKENIZER);
    PUT("m", F32("model.embed_tokens.weight", V, H), F32(LAYER "self_attn.k_proj.weight", H, H));
    nib_gguf *file = made("m");
    INTEGER("llama.attention.head_count_kv", 4);
    nib_gguf_close(file);
    start("m",
          "{\"model_type\": \"llama\", \"hidden_size\": 64, \"intermediate_size\": 128, \"num_hidden_layers\": 1, "
          "\"num_attention_heads\": 0, \"vocab_size\": 12}",
          TINY_TOKENIZER);
    PUT("m", F32("model.embed_tokens.weight", V, H));
    CHECK_FAILS(make("m", NIB_F32), NIB_ERR_DATA, "a head of 0 is none"); /* and no number is missing */
}

TEST(licenses_in_a_list)
{
    static const struct {
        const char *card, *license;
    } cases[] = { { "[mit, apache-2.0]", "mit,apache-2.0" }, { "[mit]", "mit" }, { "[]", NULL } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char card[128];
        start("m", "{\"model_type\": \"llama\", " SIZES "}", TINY_TOKENIZER);
        PUT("m", ATTENTION);
        snprintf(card, sizeof card, "---\nlicense: %s\n---\n", cases[i].card);
        put_text("m/README.md", card);
        nib_gguf *file = made("m");
        STRING("general.license", cases[i].license);
        nib_gguf_close(file);
    }
}

/* By yarn with all that it knows, by yarn with what is in the configuration besides, and evenly. */
TEST(positions_that_are_stretched)
{
#define ROPE(text) "{\"model_type\": \"qwen3\", " SIZES ", \"rope_scaling\": {" text "}}"
    start("m",
          ROPE("\"rope_type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 77, "
               "\"extrapolation_factor\": 1.5, \"attention_factor\": 2, \"beta_fast\": 32, \"beta_slow\": 3"),
          TINY_TOKENIZER);
    PUT("m", ATTENTION);
    nib_gguf *file = made("m");
    STRING("qwen3.rope.scaling.type", "yarn");
    NUMBER("qwen3.rope.scaling.factor", 4);
    INTEGER("qwen3.rope.scaling.original_context_length", 77);
    NUMBER("qwen3.rope.scaling.yarn_ext_factor", 1.5);
    NUMBER("qwen3.rope.scaling.yarn_attn_factor", 2);
    NUMBER("qwen3.rope.scaling.yarn_beta_fast", 32);
    NUMBER("qwen3.rope.scaling.yarn_beta_slow", 3);
    nib_gguf_close(file);
    start("m", ROPE("\"type\": \"yarn\", \"factor\": 2.5"), TINY_TOKENIZER);
    PUT("m", ATTENTION);
    file = made("m");
    STRING("qwen3.rope.scaling.type", "yarn");
    INTEGER("qwen3.rope.scaling.original_context_length", 512);
    nib_gguf_close(file);
    start("m", ROPE("\"type\": \"linear\", \"factor\": 2, \"original_max_position_embeddings\": 77"), TINY_TOKENIZER);
    PUT("m", ATTENTION);
    file = made("m");
    size_t index;
    STRING("qwen3.rope.scaling.type", "linear");
    NUMBER("qwen3.rope.scaling.factor", 2);
    CHECK(!nib_gguf_find_key(file, "qwen3.rope.scaling.original_context_length", &index));
    nib_gguf_close(file);
    static const char *const nothing[] = { ROPE("\"type\": \"yarn\""), ROPE("\"type\": \"other\", \"factor\": 2"),
                                           ROPE("\"factor\": 2") };
    for (size_t i = 0; i < 3; i++) {
        start("m", nothing[i], TINY_TOKENIZER);
        PUT("m", ATTENTION);
        file = made("m");
        STRING("qwen3.rope.scaling.type", NULL);
        nib_gguf_close(file);
    }
    start("m", "{\"model_type\": \"qwen3\", " SIZES ", \"head_dim\": 5000000000}", TINY_TOKENIZER);
    PUT("m", ATTENTION);
    CHECK_FAILS(make("m", NIB_F32), NIB_ERR_DATA, "a head of 5000000000 is none");
}

/* Waves of up to 2048 positions, a quarter of the context, are as they were, and those beyond it are stretched by 8. In
 * between is the one of 6283: 1 / (0.898734 / 8 + 0.101266), by how far it is from both ends. */
TEST(frequencies_are_stretched_as_llama_3_has_them)
{
    static const float wanted[] = { 1, 1, 1, 1, 1, 1, 4.681483f, 8 };
    start("m", "{\"model_type\": \"llama\", " SIZES ", \"rope_scaling\": {\"rope_type\": \"llama3\"}}", TINY_TOKENIZER);
    PUT("m", ATTENTION);
    nib_gguf *file = made("m");
    float *factors = VALUES(file, "rope_freqs.weight", 8);
    for (int i = 0; i < 8; i++)
        CHECK_THAT(fabsf(factors[i] - wanted[i]) < 1e-5f, "factor %d is %.7g", i, (double)factors[i]);
    free(factors);
    nib_gguf_close(file);
}

TEST(stretched_frequencies_have_a_bound)
{
    static const int64_t dims[] = { 1, 2, 65536, 65537 };
    for (int i = 0; i < 4; i++) {
        char config[512];
        snprintf(config, sizeof config,
                 "{\"model_type\": \"llama\", " SIZES
                 ", \"head_dim\": %lld, \"rope_scaling\": {\"rope_type\": \"llama3\"}}",
                 (long long)dims[i]);
        start("m", config, TINY_TOKENIZER);
        PUT("m", ATTENTION);
        const nib_status status = make("m", NIB_F32);
        CHECK_THAT(i == 1 || i == 2 ? !status : status == NIB_ERR_DATA, "%lld: %s", (long long)dims[i],
                   nib_last_error());
    }
}

TEST(bad_tokenizers_and_configurations_are_rejected)
{
    static const struct {
        const char *config, *tokenizer, *words;
    } cases[] = {
        { SIZES, NULL, "neither tokenizer.json nor" },
        { SIZES, "{\"model\": {\"type\": \"WordLevel\"}}", "no BPE" },
        { SIZES, "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 12}}}", "beyond" },
        { SIZES, "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": -1}}}", "beyond" },
        { SIZES, "{\"model\": {\"type\": \"BPE\"}, \"added_tokens\": [{\"id\": 12, \"content\": \"x\"}]}", "beyond" },
        { SIZES, "{\"model\": {\"type\": \"BPE\"}, \"added_tokens\": [{\"id\": 1, \"content\": \"\\u0000\"}]}",
          "a NUL" },
        { SIZES, "{\"model\": {\"type\": \"BPE\", \"merges\": [1]}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}",
          "a merge" },
        { SIZES, "{\"model\": {\"type\": \"BPE\"}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}", "no merges" },
        { "\"vocab_size\": 13, \"num_attention_heads\": 4, \"num_hidden_layers\": 1, \"hidden_size\": 64, "
          "\"intermediate_size\": 1",
          TINY_TOKENIZER, "vocab_size is not" },
        { "\"vocab_size\": 12, \"hidden_size\": 64", TINY_TOKENIZER, "num_hidden_layers" },
        { "\"vocab_size\": 12, \"num_attention_heads\": -4, \"num_hidden_layers\": 1, \"hidden_size\": 64, "
          "\"intermediate_size\": 1",
          TINY_TOKENIZER, "is no count" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[1024];
        snprintf(config, sizeof config, "{\"model_type\": \"qwen2\", %s}", cases[i].config);
        start("q", config, cases[i].tokenizer);
        PUT("q", ATTENTION);
        const nib_status status = make("q", NIB_BF16);
        CHECK_THAT((status == NIB_ERR_DATA || status == NIB_ERR_UNSUPPORTED) &&
                       strstr(nib_last_error(), cases[i].words),
                   "%zu: %s: %s", i, nib_status_name(status), nib_last_error());
    }
}

TEST(what_has_no_place_is_rejected_with_the_remedy)
{
    static const struct {
        const char *model_type, *tensor;
        int64_t rows;
        const char *words;
    } cases[] = {
        { "mixtral", LAYER "mlp.up_proj.weight", 128,
          "of llama, mistral, qwen2, qwen3, qwen3_moe, gemma3 and gpt_oss" },
        { "llama", LAYER "mlp.wide.weight", 128, "has no place" },
        { "llama", LAYER "self_attn.k_norm.weight", 128, "has no place" },
        { "llama", "model.layers.x.mlp.up_proj.weight", 128, "has no place" },
        { "llama", "score.weight", 2, "has no place" },
        { "qwen3_moe", LAYER "mlp.shared_expert.up_proj.weight", 128, "has no place" },
        { "qwen3_moe", LAYER "mlp.experts.0.up_proj.bias", 128, "has no place" }, /* one of many in a stack */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[512];
        snprintf(config, sizeof config, "{\"model_type\": \"%s\", " SIZES "}", cases[i].model_type);
        start("m", config, TINY_TOKENIZER);
        PUT("m", F32("model.embed_tokens.weight", V, H), F32(cases[i].tensor, cases[i].rows, H));
        CHECK_FAILS(make("m", NIB_F32), NIB_ERR_UNSUPPORTED, cases[i].words);
        CHECK(strstr(nib_last_error(), "convert_hf_to_gguf.py"));
    }
    start("m", "{\"model_type\": \"llama\", " SIZES "}", TINY_TOKENIZER);
    PUT("m", F32("model.embed_tokens.weight", V, H), F32(LAYER "self_attn.q_proj.weight", 30, H));
    CHECK_FAILS(make("m", NIB_F32), NIB_ERR_UNSUPPORTED, "with its 30 rows"); /* no four heads */
}

/* llama.cpp has no place for the tensor scale of these: they stay, also from GGUF to GGUF. */
/* As NVFP4, from the directory or from a BF16 GGUF of it; how many weights change. */
static size_t quantize_to(const char *from, const char *out)
{
    nib_checkpoint *c = open_good(from);
    nib_plan *plan = NULL;
    nib_plan_facts facts = { .bytes = sizeof facts };
    nib_quantize_options options;
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    nib_quantize_options_init(&options);
    options.format = NIB_CHECKPOINT_FORMAT_GGUF;
    CHECK_OK(nib_plan_quantize(c, &options, &plan));
    CHECK_OK(nib_plan_get_facts(plan, &facts));
    CHECK_OK(nib_plan_run(plan, out, &force, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    return facts.changed;
}

/* The tensor scale of blk.0.ffn_up, and the largest error of a value, by 32. */
static void look_at_up(const char *path, float *scale, double *error)
{
    nib_gguf *file = NULL;
    size_t index;
    CHECK_OK(nib_gguf_open(path, &file));
    CHECK(nib_gguf_find(file, "blk.0.ffn_up.scale", &index));
    CHECK_OK(nib_gguf_read(file, index, 0, scale, sizeof *scale));
    nib_gguf_close(file);
    nib_checkpoint *c = open_good(path);
    nib_array view;
    float *x = malloc(128 * H * sizeof *x);
    CHECK_OK(nib_checkpoint_find_weight(c, "blk.0.ffn_up", &index));
    CHECK_OK(nib_array_init(&view, x, NIB_F32, 2, (const int64_t[2]){ 128, H }));
    CHECK_OK(nib_checkpoint_read_rows(c, index, 0, 128, &view));
    *error = 0;
    for (size_t i = 0; i < 128 * H; i++)
        *error = fmax(*error, fabs((double)x[i] - (double)numbers[i]) / 32);
    free(x);
    nib_checkpoint_close(c);
}

/* Where llama.cpp takes no tensor scale it is 1, and the scales of blocks have all of it; values that are too small for
 * them stay. */
TEST(feed_forward_weights_do_without_a_scale_that_is_ignored)
{
    static const struct {
        const char *model_type;
        bool unit;
    } cases[] = { { "qwen2", true }, { "qwen3", false }, { "llama", false } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int small = 0; small < 2; small++) {
            char config[512];
            const size_t changed = small && cases[i].unit ? 4 : 5;
            snprintf(config, sizeof config, "{\"model_type\": \"%s\", " SIZES "}", cases[i].model_type);
            start("m", config, TINY_TOKENIZER);
            for (size_t k = 0; small && k < sizeof numbers / sizeof *numbers; k++)
                numbers[k] *= 0x1p-12f;
            PUT("m", ATTENTION, F32(LAYER "mlp.up_proj.weight", 128, H));
            CHECK_OK(make("m", NIB_BF16));
            CHECK_THAT(quantize_to(at("m"), at("a.gguf")) == changed, "%s", cases[i].model_type);
            CHECK_THAT(quantize_to(at("out.gguf"), at("b.gguf")) == changed, "%s again", cases[i].model_type);
            for (int again = 0; again < 2 && !small; again++) {
                float scale = 0;
                double error;
                look_at_up(at(again ? "b.gguf" : "a.gguf"), &scale, &error);
                CHECK_THAT((scale == 1) == cases[i].unit, "%s: %g", cases[i].model_type, (double)scale);
                CHECK_THAT(error < 0.2, "%s: %g", cases[i].model_type, error);
            }
        }
}

/* The whole file, or none and a reason. */
static void fail_each_allocation(const char *name, long fewest)
{
    CHECK_OK(make(name, NIB_F32));
    size_t bytes, count;
    void *whole = get_file("out.gguf", &bytes);
    for (long left = 0, failed = 1; failed; left++) {
        unlink(at("out.gguf"));
        allocations_left = left;
        const nib_status status = make(name, NIB_F32);
        failed = allocations_left < 0;
        allocations_left = -1;
        void *file = get_file("out.gguf", &count);
        CHECK_THAT((!status || status == NIB_ERR_MEMORY) &&
                       (file ? count == bytes && !memcmp(file, whole, bytes) : status),
                   "allocation %ld: %s: %s", left, nib_status_name(status), nib_last_error());
        free(file);
        CHECK(failed || left > fewest);
    }
    free(whole);
}

TEST(no_allocation_that_fails_does_harm)
{
    start("moe", "{\"model_type\": \"qwen3_moe\", " SIZES ", \"num_experts\": 2, \"moe_intermediate_size\": 128}",
          TINY_TOKENIZER);
    PUT("moe", ATTENTION, F32(LAYER "mlp.gate.weight", 2, H), EXPERT("0"), EXPERT("1"));
    put_text("moe/README.md", "---\nlicense: mit\nbase_model: a/b\nurl: c\n---\n");
    fail_each_allocation("moe", 60);
    CHECK(quantize_to(at("moe"), at("quantized.gguf")) > 0);
    fail_each_allocation("quantized.gguf", 20);
}

TEST_MAIN

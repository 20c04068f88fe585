/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mixed.c - quantizations in which not every weight is NVFP4 of its own: FP8 by rows or plain, named in a list or
 * chosen by a budget of bits, codes that are taken over from another checkpoint; and statistics under other names, or of
 * other models.
 */
#define _GNU_SOURCE
#include "io/checkpoint.h"
#include "test_run.h"

#include <float.h>

enum { LAYERS = 4, ITEMS = 3 * LAYERS + 1 };

/* Four layers of 1536 elements that servers fuse and 1536 that stand alone, and 256 outside of layers. */
static void make_layers(void)
{
    struct random_item items[ITEMS];
    static char names[ITEMS][64];
    for (int layer = 0, i = 0; layer < LAYERS; layer++) {
        static const struct random_item of_layer[] = { { "self_attn.q_proj", NIB_F32, 2, { 32, 32 }, 0.02f },
                                                       { "self_attn.k_proj", NIB_F32, 2, { 16, 32 }, 0.1f },
                                                       { "mlp.down_proj", NIB_F32, 2, { 32, 48 }, 0.5f } };
        for (int j = 0; j < 3; j++, i++) {
            snprintf(names[i], sizeof names[i], "model.layers.%d.%s.weight", layer, of_layer[j].name);
            items[i] = of_layer[j];
            items[i].name = names[i];
        }
    }
    items[ITEMS - 1] = (struct random_item){ "head2.1x.proj.weight", NIB_F32, 2, { 16, 16 }, 1 };
    fresh("in");
    CHECK(mkdir(at("in"), 0777) == 0);
    put_random(at("in/model.safetensors"), items, ITEMS);
    put_text(at("in/config.json"), "{\"model_type\": \"llama\"}");
}

/* Actions of weights, by a letter each: K(ept), Q(uantized), 8; head2, then down, k and q of each layer. */
static void check_actions(const nib_plan *plan, const char *wanted)
{
    char letters[ITEMS + LAYERS + 1] = "";
    for (size_t i = 0, at = 0; i < ITEMS; i++) {
        nib_plan_row row = { .bytes = sizeof row };
        CHECK_OK(nib_plan_get_row(plan, i, &row));
        letters[at++] = row.action == NIB_ACTION_QUANTIZE ? 'Q' : row.action == NIB_ACTION_FP8 ? '8' : 'K';
        if (i % 3 == 0 && i + 1 < ITEMS)
            letters[at++] = ' ';
    }
    CHECK_THAT(!strcmp(letters, wanted), "%s, not %s", letters, wanted);
}

static int no_finding(void *context, const nib_finding *finding)
{
    (void)context;
    CHECK_THAT(finding->severity == NIB_SEVERITY_HINT, "%s: %s: %s", finding->id, finding->tensor, finding->fact);
    return 0;
}

/* ---- FP8 ---- */

/* A row's largest magnitude is 448, under a scale that BF16 rounds up; codes by the library's own rounding. */
static void check_fp8(const nib_checkpoint *in, const nib_checkpoint *out, const char *name, nib_dtype of_scales)
{
    char full[128];
    const struct nib_ck_tensor *x, *codes, *scales;
    snprintf(full, sizeof full, "%s.weight", name);
    float *values = read_tensor(in, full, &x);
    uint8_t *found = read_tensor(out, full, &codes);
    snprintf(full, sizeof full, "%s.weight_scale", name);
    void *raw = read_tensor(out, full, &scales);
    const int64_t rows = x->shape[0], cols = x->shape[1];
    float *factors = malloc((size_t)rows * sizeof *factors);
    CHECK(codes->dtype == NIB_E4M3 && codes->rank == 2 && codes->shape[0] == rows && codes->shape[1] == cols);
    CHECK(scales->dtype == of_scales && scales->shape[0] == rows && scales->rank == (of_scales == NIB_BF16 ? 2 : 1));
    CHECK_OK(nib_decode(of_scales, raw, (size_t)rows, factors));
    for (int64_t r = 0; r < rows; r++) {
        float amax = 0, scaled[64];
        uint8_t wanted[64];
        for (int64_t k = 0; k < cols; k++)
            amax = fmaxf(amax, fabsf(values[r * cols + k]));
        const float scale = amax > 0 ? fmaxf(amax / 448.0f, FLT_MIN) : 1;
        CHECK_THAT(of_scales == NIB_F32 ? factors[r] == scale
                                        : factors[r] >= scale && factors[r] < scale * (1 + 0x1p-7f),
                   "%s: row %lld has %a, not %a", name, (long long)r, (double)factors[r], (double)scale);
        for (int64_t k = 0; k < cols; k++)
            scaled[k] = values[r * cols + k] / factors[r];
        CHECK_OK(nib_encode(NIB_E4M3, scaled, (size_t)cols, wanted));
        CHECK_BYTES(found + r * cols, wanted, (size_t)cols);
    }
    free(values);
    free(found);
    free(raw);
    free(factors);
}

/* Some rows are zeros, some tiny, one has a single value: the scale of each is its own. */
static void change_rows(void)
{
    nib_file *file = NULL;
    nib_entry e;
    size_t index;
    float rows[3][32] = { { 0 }, { 0x1p-140f, -0x1p-139f }, { 0, 0, 3e38f } };
    CHECK_OK(nib_file_open(at("in/model.safetensors"), &file));
    CHECK_OK(nib_file_find(file, "model.layers.1.self_attn.q_proj.weight", &index));
    CHECK_OK(nib_file_entry(file, index, &e));
    const uint64_t begin = nib_file_data_begin(file) + e.begin;
    nib_file_close(file);
    FILE *raw = fopen(at("in/model.safetensors"), "r+b");
    CHECK(raw && fseek(raw, (long)begin, SEEK_SET) == 0 && fwrite(rows, sizeof rows, 1, raw) == 1);
    if (raw)
        fclose(raw);
}

TEST(fp8_by_rows)
{
    static const char *const list[] = { "*layers.1.self_attn.q_proj", "re:.*layers\\.2\\.mlp.*" };
    static const struct {
        nib_checkpoint_format format;
        nib_scheme scheme;
        nib_dtype scales;
        const char *config[3];
    } cases[] = {
        { NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS,
          NIB_SCHEME_NVFP4A16,
          NIB_BF16,
          { "\"group_1\"", "\"mixed-precision\"", "\"input_activations\": null" } },
        { NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS,
          NIB_SCHEME_NVFP4,
          NIB_BF16,
          { "\"group_1\"", "\"float-quantized\"", "\"token\"" } },
        { NIB_CHECKPOINT_FORMAT_MODELOPT, NIB_SCHEME_NVFP4, NIB_F32, { "\"group_1\"", "MIXED_PRECISION", "FP8" } },
    };
    make_layers();
    change_rows();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_checkpoint *in = open_good(at("in"));
        nib_quantize_options options = with(cases[i].format);
        options.scheme = cases[i].scheme;
        options.fp8 = list;
        options.n_fp8 = 2;
        nib_plan *plan = plan_quantize(in, &options);
        check_actions(plan, "Q QQQ Q88 8QQ QQQ");
        CHECK_OK(nib_plan_run(plan, fresh("out"), NULL, NULL));
        nib_plan_destroy(plan);
        nib_checkpoint *out = open_good(at("out"));
        check_fp8(in, out, "model.layers.1.self_attn.q_proj", cases[i].scales);
        check_fp8(in, out, "model.layers.1.self_attn.k_proj", cases[i].scales); /* servers fuse the two */
        check_fp8(in, out, "model.layers.2.mlp.down_proj", cases[i].scales);
        for (int j = 0; j < 3; j++)
            CHECK_THAT(file_has(at("out/config.json"), cases[i].config[j]), "case %zu: %s", i, cases[i].config[j]);
        CHECK_OK(nib_checkpoint_check(out, NULL, NULL, no_finding, NULL));
        nib_checkpoint_close(out);
        nib_checkpoint_close(in);
    }
}
TEST(fp8_of_what_is_not_finite)
{
    static const char *const list[] = { "*q_proj" };
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    for (size_t i = 0; i < 3; i++) {
        float x[16 * 16] = { 1 };
        x[37] = bad[i];
        const struct item item = { "m.layers.0.self_attn.q_proj.weight", NIB_F32, 2, { 16, 16 }, x };
        put_tensors("bad.safetensors", &item, 1);
        nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
        options.fp8 = list;
        options.n_fp8 = 1;
        CHECK_FAILS(quantize(at("bad.safetensors"), fresh("out"), &options, NULL, NULL), NIB_ERR_DATA,
                    "q_proj\" is not finite at [2, 5]");
    }
}

/* ---- Lists and budgets ---- */

TEST(weights_that_stay)
{
    static const char *const list[] = { "*layers.3.self_attn.k_proj" };
    static const char stays[] = "\"model.layers.3.self_attn.k_proj\"";
    make_layers();
    nib_checkpoint *in = open_good(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.plain = list;
    options.n_plain = 1;
    nib_plan *plan = plan_quantize(in, &options);
    check_actions(plan, "Q QQQ QQQ QQQ QKK");
    nib_plan_row k = { .bytes = sizeof k }, q = { .bytes = sizeof q };
    CHECK_OK(nib_plan_get_row(plan, 11, &k));
    CHECK_OK(nib_plan_get_row(plan, 12, &q));
    CHECK_THAT(!strcmp(k.reason, "it is to stay (--plain)"), "%s", k.reason);
    CHECK_THAT(!strcmp(q.reason, "servers fuse it with model.layers.3.self_attn.k_proj, which stays"), "%s", q.reason);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    /* Beside weights of FP8 ModelOpt names those of each kind: what stays is in no list but that of what is left out. */
    static const char *const fp8[] = { "*layers.2.mlp.down_proj" };
    options.fp8 = fp8;
    options.n_fp8 = 1;
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
    size_t bytes = 0, times = 0;
    char *text = get_file(at("out/config.json"), &bytes);
    for (size_t i = 0; text && i + strlen(stays) <= bytes; i++)
        times += memcmp(text + i, stays, strlen(stays)) == 0;
    CHECK_THAT(times == 1, "config.json has %s %zu times", stays, times);
    free(text);
}

/* What cannot be read as a weight is no reason to write all the others. */
TEST(weights_that_cannot_be_read)
{
    static const uint8_t zeros[2 * 4 * 2 * 16];
    static const float values[32 * 32];
    const struct item items[] = { { "a.experts.down_proj_blocks", NIB_U8, 4, { 2, 4, 2, 15 }, zeros },
                                  { "a.experts.down_proj_scales", NIB_U8, 3, { 2, 4, 2 }, zeros },
                                  { "a.o_proj.weight", NIB_F32, 2, { 32, 32 }, values } };
    put_tensors(at("b.safetensors"), items, 3);
    CHECK_FAILS(quantize(at("b.safetensors"), fresh("out"), NULL, NULL, NULL), NIB_ERR_DATA,
                "down_proj_blocks\": its last dim is not the 16 bytes of a block");
}

/* All experts of a layer go together, those of the next do not. */
TEST(experts_are_fused)
{
    static const char *const list[] = { "m.layers.0.mlp.experts.1.up_proj" };
#define UP(layer, expert) { "m.layers." #layer ".mlp.experts." #expert ".up_proj.weight", NIB_F32, 2, { 16, 16 }, 1 }
    PUT(at("experts.safetensors"), UP(0, 0), UP(0, 1), UP(0, 2), UP(1, 0), UP(1, 1));
    nib_checkpoint *in = open_good(at("experts.safetensors"));
    for (int plain = 0; plain < 2; plain++) {
        nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
        options.fp8 = options.plain = list;
        options.n_fp8 = !plain;
        options.n_plain = (size_t)plain;
        nib_plan *plan = plan_quantize(in, &options);
        for (size_t i = 0; i < 5; i++) {
            nib_plan_row row = { .bytes = sizeof row };
            CHECK_OK(nib_plan_get_row(plan, i, &row));
            CHECK(row.action == (i >= 3 ? NIB_ACTION_QUANTIZE : plain ? NIB_ACTION_KEEP : NIB_ACTION_FP8));
            CHECK_THAT(!strcmp(row.reason, !plain || i >= 3 ? ""
                                           : i == 1         ? "it is to stay (--plain)"
                                                            : "servers fuse it with what stays"),
                       "%zu: %s", i, row.reason);
        }
        nib_plan_destroy(plan);
    }
    nib_checkpoint_close(in);
}

/* ModelOpt lists the experts of a layer as one module where all are quantized; otherwise those that are. */
TEST(experts_are_listed_together)
{
    static const char *const fp8[] = { "*layers.2.*" }, *const ignore[] = { "*1.mlp.experts.0.*" };
    PUT(at("experts.safetensors"), UP(0, 0), UP(0, 1), UP(1, 0), UP(1, 1), UP(2, 0), UP(2, 1), UP(3, 0));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.fp8 = fp8;
    options.ignore = ignore;
    options.n_fp8 = options.n_ignore = 1;
    CHECK_OK(quantize(at("experts.safetensors"), fresh("out"), &options, NULL, NULL));
    json_t *config = json_load_file(at("out/config.json"), 0, NULL);
    json_t *said = json_object_get(config, "quantization_config"), *groups = json_object_get(said, "config_groups");
    json_t *lists[] = { json_object_get(json_object_get(groups, "group_0"), "targets"),
                        json_object_get(json_object_get(groups, "group_1"), "targets"),
                        json_object_get(said, "quantized_layers") };
    static const char *const wanted[] = {
        "[\"m.layers.0.mlp.experts\",\"m.layers.1.mlp.experts.1.up_proj\",\"m.layers.3.mlp.experts\"]",
        "[\"m.layers.2.mlp.experts\"]",
        "{\"m.layers.0.mlp.experts\":{\"group_size\":16,\"quant_algo\":\"W4A16_NVFP4\"},"
        "\"m.layers.1.mlp.experts.1.up_proj\":{\"group_size\":16,\"quant_algo\":\"W4A16_NVFP4\"},"
        "\"m.layers.2.mlp.experts\":{\"quant_algo\":\"FP8_PER_CHANNEL_PER_TOKEN\"},"
        "\"m.layers.3.mlp.experts\":{\"group_size\":16,\"quant_algo\":\"W4A16_NVFP4\"}}"
    };
    for (int i = 0; i < 3; i++) {
        char *text = json_dumps(lists[i], JSON_COMPACT | JSON_SORT_KEYS);
        CHECK_THAT(text && !strcmp(text, wanted[i]), "%s", text ? text : "nothing");
        free(text);
    }
    json_decref(config);
}

TEST(a_budget_goes_from_the_ends_to_the_middle)
{
    static const struct {
        float bits;
        bool plain;
        const char *actions;
    } cases[] = {
        { 4.5f, false, "Q QQQ QQQ QQQ QQQ" }, { 5.1f, false, "Q QQQ QQQ QQQ 8QQ" },
        { 5.6f, false, "Q QQQ QQQ QQQ 888" }, { 6.2f, false, "Q 8QQ QQQ QQQ 888" },
        { 6.7f, false, "Q 888 QQQ QQQ 888" }, { 7.2f, false, "Q 888 QQQ 8QQ 888" },
        { 9, false, "Q 888 888 888 888" },    { 16, true, "Q KQQ QQQ QQQ KKK" },
        { 8, true, "Q QQQ QQQ QQQ KQQ" },
    };
    make_layers();
    nib_checkpoint *in = open_good(at("in"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
        options.budget = cases[i].bits;
        options.budget_plain = cases[i].plain;
        nib_plan *plan = plan_quantize(in, &options);
        check_actions(plan, cases[i].actions);
        CHECK(strstr(plan->note, "is a guess"));
        nib_plan_row row = { .bytes = sizeof row };
        CHECK_OK(nib_plan_get_row(plan, 10, &row));
        CHECK(!strcmp(row.reason, cases[i].plain ? "the budget has bits for it" : ""));
        nib_plan_destroy(plan);
    }
    nib_checkpoint_close(in);
}

/* FP8 takes 5.5 bits more than NVFP4 here, with its scales of rows: 2.75 for each of two weights are enough for one. */
TEST(a_budget_is_spent_to_the_last_bit)
{
    PUT(at("even.safetensors"), { "m.layers.0.mlp.down_proj.weight", NIB_F32, 2, { 16, 16 }, 1 },
        { "m.layers.1.mlp.down_proj.weight", NIB_F32, 2, { 16, 16 }, 1 });
    nib_checkpoint *in = open_good(at("even.safetensors"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.budget = 4.5f + 2.75f;
    nib_plan *plan = plan_quantize(in, &options);
    nib_plan_row first = { .bytes = sizeof first }, last = { .bytes = sizeof last };
    CHECK_OK(nib_plan_get_row(plan, 0, &first));
    CHECK_OK(nib_plan_get_row(plan, 1, &last));
    CHECK(first.action == NIB_ACTION_QUANTIZE && last.action == NIB_ACTION_FP8);
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

TEST(lists_and_budgets_that_are_rejected)
{
    static const char *const list[] = { "*q_proj" }, *const nobody[] = { "*qq_proj" };
    static const char *const endless[] = { "re:head2.*|(.+)+[!?]" };
    make_layers();
    make_llama(at("llama"));
    nib_plan *plan = NULL;
    static const struct {
        float budget;
        bool plain, fp8, gguf;
        nib_status status;
        const char *words;
    } cases[] = { { 4.4f, false, false, false, NIB_ERR_ARG, "from 4.5 bits" },
                  { 16.5f, false, false, false, NIB_ERR_ARG, "to 16, not 16.5" },
                  { NAN, false, false, false, NIB_ERR_ARG, "4.5" },
                  { 5, false, true, false, NIB_ERR_MODE, "one of the two" },
                  { 5, true, false, false, NIB_ERR_MODE, "one of the two" },
                  { 5, false, false, true, NIB_ERR_MODE, "--budget-plain" },
                  { 0, false, true, true, NIB_ERR_MODE, "GGUF has no FP8" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_quantize_options options =
            with(cases[i].gguf ? NIB_CHECKPOINT_FORMAT_GGUF : NIB_CHECKPOINT_FORMAT_MODELOPT);
        options.budget = cases[i].budget;
        options.plain = options.fp8 = list;
        options.n_plain = cases[i].plain;
        options.n_fp8 = cases[i].fp8;
        nib_checkpoint *in = open_good(at(cases[i].gguf ? "llama" : "in"));
        CHECK_FAILS(nib_plan_quantize(in, &options, &plan), cases[i].status, cases[i].words);
        nib_checkpoint_close(in);
    }
    nib_checkpoint *in = open_good(at("in"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.budget_plain = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "a budget"); /* there is none */
    options.budget_plain = 0;
    options.fp8 = nobody;
    options.n_fp8 = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "*qq_proj");
    CHECK_THAT(strstr(nib_last_error(), "near it are \"model.layers.0.self_attn.q_proj\", \"model.layers.0.mlp.down"),
               "%s", nib_last_error()); /* of four layers one */
    options.fp8 = endless; /* that it matches one weight does not make it end for the others */
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "limit");
    nib_checkpoint_close(in);
    make_stacks(at("stacks"), "gpt_oss");
    in = open_good(at("stacks"));
    const char *const experts[] = { in->weights[0].name };
    CHECK(in->weights[0].index == 0);
    options.fp8 = options.plain = experts;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "cannot be FP8 (--fp8)");
    options.n_fp8 = 0;
    options.n_plain = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "left out of it (--plain)");
    nib_checkpoint_close(in);
}

/* ---- Codes of another checkpoint ---- */

static void check_same_codes(const nib_checkpoint *a, const nib_checkpoint *b, const char *name)
{
    size_t i, j;
    nib_weight x = { .bytes = sizeof x }, y = { .bytes = sizeof y };
    uint8_t codes[2][32 * 48], scales[2][32 * 3];
    CHECK_OK(nib_checkpoint_find_weight(a, name, &i));
    CHECK_OK(nib_checkpoint_find_weight(b, name, &j));
    CHECK_OK(nib_checkpoint_get_weight(a, i, &x));
    CHECK_OK(nib_checkpoint_get_weight(b, j, &y));
    CHECK_OK(nib_checkpoint_read_codes(a, i, 0, x.rows, codes[0], scales[0]));
    CHECK_OK(nib_checkpoint_read_codes(b, j, 0, y.rows, codes[1], scales[1]));
    CHECK_BYTES(codes[0], codes[1], (size_t)(x.rows * x.cols / 2));
    CHECK_BYTES(scales[0], scales[1], (size_t)(x.rows * x.cols / 16));
    CHECK(x.tensor_scale_kind == y.tensor_scale_kind ? x.tensor_scale == y.tensor_scale
                                                     : x.tensor_scale == 1 / y.tensor_scale);
}

/* The tensor scale of a weight of out, in compressed-tensors' file "codes". */
static void put_scale(const char *name, float value)
{
    nib_file *file = NULL;
    nib_entry e;
    size_t index;
    CHECK_OK(nib_file_open(at("codes/model.safetensors"), &file));
    CHECK_OK(nib_file_find(file, name, &index));
    CHECK_OK(nib_file_entry(file, index, &e));
    const uint64_t begin = nib_file_data_begin(file) + e.begin;
    nib_file_close(file);
    FILE *raw = fopen(at("codes/model.safetensors"), "r+b");
    CHECK(raw && fseek(raw, (long)begin, SEEK_SET) == 0 && fwrite(&value, sizeof value, 1, raw) == 1);
    if (raw)
        fclose(raw);
}

TEST(codes_are_taken_over)
{
    static const char *const first[] = { "re:.*layers\\.[01]\\..*" };
    make_layers();
    nib_quantize_options rtn = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    rtn.scale_rule = NIB_SCALE_RTN;
    rtn.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_EXACT;
    rtn.only = first;
    rtn.n_only = 1;
    CHECK_OK(quantize(at("in"), fresh("codes"), &rtn, NULL, NULL));
    CHECK_OK(quantize(at("in"), fresh("swept"), NULL, NULL, NULL));
    nib_checkpoint *codes = open_good(at("codes")), *swept = open_good(at("swept"));
    for (int i = 0; i < 2; i++) {
        nib_quantize_options options =
            with(i ? NIB_CHECKPOINT_FORMAT_MODELOPT : NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
        options.codes = at("codes");
        CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
        nib_checkpoint *out = open_good(at("out"));
        const char *hash = strstr(out->provenance, "\"codes_xxh3\":");
        CHECK(hash && strspn(hash + strlen("\"codes_xxh3\":") + strspn(hash + strlen("\"codes_xxh3\":"), " \""),
                             "0123456789abcdef") == 32);
        check_same_codes(out, codes, "model.layers.0.self_attn.q_proj");
        check_same_codes(out, codes, "model.layers.1.mlp.down_proj");
        check_same_codes(out, swept, "model.layers.2.self_attn.q_proj");
        check_same_codes(out, swept, "model.layers.3.mlp.down_proj");
        nib_checkpoint_close(out);
    }
    nib_checkpoint_close(codes);
    nib_checkpoint_close(swept);
}

TEST(codes_that_do_not_fit)
{
    make_layers();
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    CHECK_OK(quantize(at("in"), fresh("codes"), NULL, NULL, NULL));
    options.codes = at("codes");
    CHECK_OK(quantize(at("in"), fresh("out"), &options, NULL, NULL));
    put_scale("model.layers.1.self_attn.k_proj.weight_global_scale", 3);
    CHECK_FAILS(quantize(at("in"), fresh("out"), &options, NULL, NULL), NIB_ERR_DATA, "which servers fuse, have the");
    put_scale("model.layers.1.self_attn.k_proj.weight_global_scale", 0);
    CHECK_FAILS(quantize(at("in"), fresh("out"), &options, NULL, NULL), NIB_ERR_DATA, "k_proj\" is 0");
    static const uint8_t zeros[32 * 16];
    const struct item incomplete[] = {
        { "model.layers.0.self_attn.q_proj.weight_packed", NIB_U8, 2, { 32, 16 }, zeros },
        { "model.layers.0.self_attn.q_proj.weight_scale", NIB_E4M3, 2, { 32, 2 }, zeros }
    };
    put_tensors(at("incomplete.safetensors"), incomplete, 2);
    options.codes = at("incomplete.safetensors");
    CHECK_FAILS(quantize(at("in"), fresh("out"), &options, NULL, NULL), NIB_ERR_DATA, "its tensor scale is missing");
    options.codes = at("codes");
    put_scale("model.layers.1.self_attn.k_proj.weight_global_scale", INFINITY);
    CHECK_FAILS(quantize(at("in"), fresh("out"), &options, NULL, NULL), NIB_ERR_DATA, "k_proj\" is inf");
    static const struct {
        const char *name;
        int64_t rows;
        const char *words;
    } cases[] = {
        { "model.layers.0.self_attn.q_proj.weight", 32, "q_proj\", but not \"model.layers.0.self_attn.k_proj" },
        { "model.layers.0.self_attn.k_proj.weight", 16, "k_proj\", but not \"model.layers.0.self_attn.q_proj" },
        { "model.layers.0.self_attn.q_proj.weight", 16, "is [16, 32] there, and [32, 32] in" },
        { "model.layers.9.self_attn.q_proj.weight", 16, "no NVFP4 weight of those" }
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_random(at("one.safetensors"), &(struct random_item){ cases[i].name, NIB_F32, 2, { cases[i].rows, 32 }, 1 },
                   1);
        CHECK_OK(quantize(at("one.safetensors"), fresh("codes"), NULL, NULL, NULL));
        CHECK_FAILS(quantize(at("in"), fresh("out"), &options, NULL, NULL), NIB_ERR_DATA, cases[i].words);
    }
    options.codes = at("in");
    CHECK_FAILS(quantize(at("in"), fresh("out"), &options, NULL, NULL), NIB_ERR_DATA, "no NVFP4 weight of those");
    options.codes = at("nothing");
    CHECK_FAILS(quantize(at("in"), fresh("out"), &options, NULL, NULL), NIB_ERR_IO, "nothing");
    options.format = NIB_CHECKPOINT_FORMAT_GGUF;
    make_llama(at("llama"));
    CHECK_FAILS(quantize(at("llama"), at("out.gguf"), &options, NULL, NULL), NIB_ERR_MODE, "taken over into matrices");
    options.codes = NULL;
    CHECK_OK(quantize(at("llama"), at("out.gguf"), &options, NULL, NULL));
    options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.codes = at("out.gguf");
    CHECK_FAILS(quantize(at("in"), fresh("out"), &options, NULL, NULL), NIB_ERR_UNSUPPORTED, "from safetensors files");
    make_stacks(at("stacks"), "gpt_oss");
    options.format = NIB_CHECKPOINT_FORMAT_MODELOPT;
    CHECK_FAILS(quantize(at("stacks"), fresh("out"), &options, NULL, NULL), NIB_ERR_MODE, "taken over into matrices");
}

/* ---- Names of statistics ---- */

struct statistic {
    const char *module;
    int64_t cols;
    float factor;
};

/* Sums over four tokens, of squares that grow with the channel. */
static void put_statistics(const struct statistic *all, size_t n)
{
    static const int64_t count = 4, one = 1;
    char inputs[1024] = "{", names[16][128];
    nib_writer *writer = NULL;
    CHECK(n <= 8);
    CHECK_OK(nib_writer_create(at("stats"), &writer));
    for (size_t i = 0; i < n; i++) {
        snprintf(names[2 * i], sizeof *names, "%s.sum2", all[i].module);
        snprintf(names[2 * i + 1], sizeof *names, "%s.count", all[i].module);
        snprintf(inputs + strlen(inputs), sizeof inputs - strlen(inputs), "%s\"%s\": \"%s\"", i ? ", " : "",
                 all[i].module, all[i].module);
        CHECK_OK(nib_writer_declare(writer, names[2 * i], NIB_F32, 2, (const int64_t[]){ 1, all[i].cols }));
        CHECK_OK(nib_writer_declare(writer, names[2 * i + 1], NIB_I64, 1, &one));
    }
    strcat(inputs, "}");
    CHECK_OK(nib_writer_metadata(writer, "format", "nib-stats-1"));
    CHECK_OK(nib_writer_metadata(writer, "inputs", inputs));
    for (size_t i = 0; i < n; i++) {
        float sums[256];
        for (int64_t k = 0; k < all[i].cols; k++)
            sums[k] = all[i].factor * (float)(k + 1);
        CHECK_OK(nib_writer_write(writer, names[2 * i], 0, sums, (size_t)all[i].cols * sizeof *sums));
        CHECK_OK(nib_writer_write(writer, names[2 * i + 1], 0, &count, sizeof count));
    }
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
}

static void check_statistics(const nib_plan *plan, const char *name, const char *wanted)
{
    nib_plan_row row = { .bytes = sizeof row };
    for (size_t i = 0; !nib_plan_get_row(plan, i, &row); i++)
        if (!strcmp(row.name, name)) {
            CHECK_THAT(!strcmp(row.statistics, wanted), "%s: %s, not %s", name, row.statistics, wanted);
            return;
        }
    CHECK_THAT(false, "there is no %s", name);
}

/* nib's own names for a GGUF file, which has llama.cpp's. */
TEST(statistics_of_a_gguf_by_other_names)
{
    static const struct statistic all[] = { { LAYER "self_attn.q_proj", H, 1 },
                                            { LAYER "self_attn.k_proj", H, 1.0005f },
                                            { "visual.blocks.0.proj", H, 1 },
                                            { LAYER "mlp.gate_proj", H, 1 },
                                            { LAYER "mlp.up_proj", H, 1 } };
    make_llama(at("llama"));
    put_statistics(all, 5);
    nib_checkpoint *in = open_good(at("llama"));
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_dequantize(in, NIB_CHECKPOINT_FORMAT_GGUF, NIB_BF16, &plan));
    CHECK_OK(nib_plan_run(plan, at("plain.gguf"), NULL, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
    in = open_good(at("plain.gguf"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_GGUF);
    options.statistics = at("stats");
    plan = plan_quantize(in, &options);
    check_statistics(plan, "blk.0.attn_q", "4 tokens");
    check_statistics(plan, "blk.0.attn_k", "4 tokens");
    check_statistics(plan, "blk.0.attn_v", "none: it is not in the file");
    check_statistics(plan, "blk.0.ffn_up", "4 tokens");
    nib_plan_destroy(plan);
    nib_checkpoint_close(in);
}

/* Weights with one input whose statistics differ, and statistics of other shapes. */
TEST(statistics_of_another_model)
{
    struct statistic all[] = { { LAYER "self_attn.q_proj", H, 1 },
                               { LAYER "self_attn.k_proj", H, 1.0005f },
                               { LAYER "self_attn.v_proj", H, 1 } };
    make_llama(at("llama"));
    nib_checkpoint *in = open_good(at("llama"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_MODELOPT);
    options.statistics = at("stats");
    for (int i = 0; i < 2; i++) {
        put_statistics(all, 3);
        nib_plan *plan = plan_quantize(in, &options);
        const char *note = strstr(plan->note, "statistics of ");
        CHECK_THAT(!note == !i && (!i || (strstr(note, "of 2 weights differ") && strstr(note, "q_proj among them"))),
                   "%s", plan->note);
        nib_plan_destroy(plan);
        all[1].factor = 1.002f; /* k, by whose name the set is called */
    }
    nib_plan *plan = NULL;
    all[0].cols = 2 * H;
    put_statistics(all, 3);
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_DATA, "128 values in 1 slices");
    all[0].cols = H + 1;
    put_statistics(all, 3);
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_DATA, "statistics of another model");
    options.statistics = NULL;
    options.statistics_strict = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "no file of statistics that could lack some");
    options.statistics_strict = 0;
    options.scheme = NIB_SCHEME_NVFP4;
    options.activation = NIB_ACTIVATION_STATISTICS;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_MODE, "need a file of them");
    nib_checkpoint_close(in);
}

TEST_MAIN

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_run.c - what comes of plans: every byte of the output against the library's own quantization of the whole
 * matrix, in every format, from every kind of source.
 */
#define _GNU_SOURCE
#include "nib_checkpoint.h"
#include "test_run.h"

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
    CHECK(file_has(at("out/config.json"), "\"most\": 1e+20"));
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

/* ---- Files ---- */

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

/* Of many small tensors, or long names, a header is full before the file is: the three tensors of a weight have 40 MB of
 * names in the input, and more than a header may have in the output. */
TEST(files_are_cut_where_a_header_is_full)
{
    enum { WEIGHTS = 200, LENGTH = 200000 };
    if (SANITIZED)
        SKIP("it takes time");
    static const uint16_t zeros[16 * 16];
    struct item items[WEIGHTS];
    nib_plan_facts facts = { .bytes = sizeof facts };
    char *const names = malloc(WEIGHTS * (size_t)LENGTH);
    CHECK_OK(nib_os_remove_directory(at("long")));
    CHECK(names && mkdir(at("long"), 0777) == 0);
    for (int i = 0; i < WEIGHTS; i++) {
        char *const name = names + (size_t)i * LENGTH;
        memset(name, 'x', LENGTH);
        memcpy(name, "model.layers.", 13);
        memcpy(name + 13 + snprintf(name + 13, 32, "%d", i), ".", 1);
        snprintf(name + LENGTH - 8, 8, ".weight");
        items[i] = (struct item){ name, NIB_BF16, 2, { 16, 16 }, zeros };
    }
    put_tensors("long/model.safetensors", items, WEIGHTS);
    nib_checkpoint *in = open_good(at("long"));
    nib_plan *plan = NULL;
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    CHECK_OK(nib_plan_quantize(in, &options, &plan));
    CHECK(plan && !nib_plan_get_facts(plan, &facts) && facts.files_out == 2 && facts.changed == WEIGHTS);
    nib_plan_destroy(plan);
    options.keep_split = 1; /* one file for one file, come what may */
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_UNSUPPORTED, "its header would be longer");
    nib_checkpoint_close(in);
    free(names);
    CHECK_OK(nib_os_remove_directory(at("long")));
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

/* Of a plan that is cut into two files anywhere, each header has the weights whose codes are in its own. */
TEST(torchao_is_told_of_no_other_file)
{
    make_model(at("in"));
    CHECK_OK(quantize(at("in"), fresh("ct"), NULL, NULL, NULL));
    nib_checkpoint *c = open_good(at("ct"));
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_convert(c, NIB_CHECKPOINT_FORMAT_TORCHAO, &plan));
    CHECK(plan->n_files == 1);
    for (uint32_t cut = 0; cut <= plan->files[0].tensors; cut++) {
        struct nib_out_file parts[2] = { plan->files[0], plan->files[0] };
        size_t weights = 0;
        parts[0].tensors = parts[1].first = cut;
        parts[1].tensors -= cut;
        for (int i = 0; i < 2; i++) {
            struct nib_text text;
            CHECK_OK(nib_plan_header(plan, &parts[i], "{}", &text));
            const char *at_it = text.bytes, *const end = text.bytes + text.used;
            while ((at_it = memmem(at_it, (size_t)(end - at_it), "NVFP4Tensor", 11))) {
                at_it += 11;
                weights++;
            }
            nib_free(text.bytes);
        }
        CHECK_THAT(weights == 6, "cut at %u: %zu weights", cut, weights);
    }
    nib_plan_destroy(plan);
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

/* Of names that differ in their numbers one is named; what has no elements is no weight, and stays. */
TEST(names_of_layers_and_weights_of_nothing)
{
    static const float values[16 * 16] = { 1 };
    const struct item items[] = { { "a.9.q_proj.weight", NIB_F32, 2, { 16, 16 }, values },
                                  { "a.8.q_proj.weight", NIB_F32, 2, { 16, 16 }, values },
                                  { "a.10.q_proj.weight", NIB_F32, 2, { 16, 16 }, values },
                                  { "b.q_proj.weight", NIB_F32, 2, { 0, 16 }, values },
                                  { "c.q_proj.weight", NIB_F32, 2, { 16, 0 }, values } };
    put_tensors(at("n.safetensors"), items, 5);
    nib_checkpoint *in = open_good(at("n.safetensors"));
    nib_quantize_options options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    static const char *const slip[] = { "a.9.q_porj" };
    nib_plan *plan = NULL;
    options.only = slip;
    options.n_only = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "near it are \"a.");
    CHECK_THAT(!strstr(nib_last_error(), " and "), "%s", nib_last_error());
    options.n_only = 0;
    plan = plan_quantize(in, &options);
    CHECK(strcmp(reason_of(in, plan, "a.9.q_proj"), "") == 0);
    for (size_t i = 3; i < 5; i++) {
        nib_plan_row row = { .bytes = sizeof row };
        CHECK_OK(nib_plan_get_row(plan, i, &row));
        CHECK_THAT(row.action == NIB_ACTION_KEEP && strcmp(row.reason, "it has no elements") == 0, "%s: %s", row.name,
                   row.reason);
    }
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
    /* A name of more than a KB is nothing that anybody would mean. */
    static const char *const long_ones[] = { "x*" };
    char name[1200];
    memset(name, 'x', sizeof name);
    memcpy(name + sizeof name - 6, ".bias", 6);
    PUT(at("long.safetensors"), { "a.weight", NIB_BF16, 2, { 16, 16 }, 1 }, { name, NIB_BF16, 1, { 16 }, 1 });
    in = open_good(at("long.safetensors"));
    options = with(NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    options.ignore = long_ones;
    options.n_ignore = 1;
    CHECK_FAILS(nib_plan_quantize(in, &options, &plan), NIB_ERR_ARG, "\"x*\" matches no module");
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
    PUT(at("fused.safetensors"), { LAYER "input_layernorm.weight", NIB_F32, 1, { H }, 0 },
        { LAYER "self_attn.qkv_proj.weight", NIB_F32, 2, { 16, H }, 1 });
    CHECK_OK(quantize(at("fused.safetensors"), fresh("out"), &options, NULL, NULL));
    CHECK(input_of(at("out"), LAYER "self_attn.qkv_proj") == 8.0f / 2688.0f);
    static const struct {
        float gamma, scale;
    } norms[] = { { 0, 1 }, { INFINITY, 1 }, { 0x1p100f, 1 }, { -0x1p98f, 0x1p100f / 2688 } };
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) {
        float gamma[16], x[16 * 16] = { 1 };
        for (int k = 0; k < 16; k++)
            gamma[k] = k == 3 ? norms[i].gamma : 0;
        const struct item items[] = { { LAYER "input_layernorm.weight", NIB_F32, 1, { 16 }, gamma },
                                      { LAYER "self_attn.q_proj.weight", NIB_F32, 2, { 16, 16 }, x } };
        put_tensors("norm.safetensors", items, 2);
        CHECK_OK(quantize(at("norm.safetensors"), fresh("out"), &options, NULL, NULL));
        CHECK_THAT(input_of(at("out"), LAYER "self_attn.q_proj") == norms[i].scale, "a norm of %g",
                   (double)norms[i].gamma);
    }
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

TEST_MAIN

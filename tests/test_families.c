/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_families.c - what families of models call and store otherwise: roles of modules, names of readers, stacks and
 * transposed matrices that come back, and tensors that are no weights. Checkpoints are made up, with the families' names.
 * tests/check_families.py has the real ones.
 */
#define _GNU_SOURCE
/* NIB_TEST_WRAP_ALLOC */
#include "model/roles.h"
#include "base/os.h"
#include "io/checkpoint.h"
#include "plan/plan.h"
#include "nib_file.h"
#include "test_alloc.h"
#include "test_weights.h"

#include <sys/stat.h>

enum { MOST = 24, H = 64, E = 3, INNER = 32 };

/* ---- Models ---- */

struct tensor {
    const char *name;
    int rank;
    int64_t shape[4];
};

/* Values that NVFP4 holds exactly, whichever axis its blocks lie along. */
static void make(const char *path, const char *config, nib_dtype dtype, const struct tensor *tensors, size_t n)
{
    static const float grid[] = { 6, -6, 6, -3 };
    struct item items[MOST];
    char name[256];
    CHECK(n <= MOST);
    CHECK_OK(nib_os_remove_directory(path));
    CHECK(mkdir(path, 0777) == 0);
    for (size_t i = 0; i < n; i++) {
        const size_t count = (size_t)elements_in(tensors[i].rank, tensors[i].shape);
        float *x = malloc((count + 1) * sizeof *x);
        void *data = calloc(count + 1, 4);
        for (size_t j = 0; j < count; j++)
            x[j] = grid[test_random() & 3] / 256;
        CHECK_OK(nib_encode(dtype, x, count, data));
        items[i] = (struct item){ .name = tensors[i].name, .dtype = dtype, .rank = tensors[i].rank, .data = data };
        memcpy(items[i].shape, tensors[i].shape, sizeof items[i].shape);
        free(x);
    }
    snprintf(name, sizeof name, "%s/model.safetensors", path);
    put_tensors(name, items, n);
    for (size_t i = 0; i < n; i++)
        free((void *)(uintptr_t)items[i].data);
    snprintf(name, sizeof name, "%s/config.json", path);
    put_text(name, config);
}
#define MAKE(path, config, dtype, ...)                          \
    make(path, config, dtype, (struct tensor[]){ __VA_ARGS__ }, \
         sizeof((struct tensor[]){ __VA_ARGS__ }) / sizeof(struct tensor))

static const char *fresh(const char *name)
{
    CHECK_OK(nib_os_remove_directory(at(name)));
    return at(name);
}

static nib_status quantize(const char *in, const char *out, nib_reader reader, const char *ignore)
{
    nib_checkpoint *c = open_good(in);
    nib_plan *plan = NULL;
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    options.reader = reader;
    options.ignore = &ignore;
    options.n_ignore = ignore != NULL;
    nib_status status = nib_plan_quantize(c, &options, &plan);
    if (!status)
        status = nib_plan_run(plan, out, NULL, NULL);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    return status;
}

static nib_status dequantize_on(int threads, const char *in, const char *out, uint64_t memory)
{
    nib_checkpoint *c = NULL;
    nib_plan *plan = NULL;
    nib_job job;
    nib_job_init(&job);
    job.max_memory = memory;
    job.threads = threads;
    nib_status status = nib_checkpoint_open(in, &c);
    if (!status)
        status = nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_DTYPE_COUNT, &plan);
    if (!status)
        status = nib_plan_run(plan, out, NULL, &job);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    return status;
}

static nib_status dequantize(const char *in, const char *out, uint64_t memory)
{
    return dequantize_on(3, in, out, memory);
}

/* Every tensor with its name, dtype, shape and bytes, and no other. */
static void check_same(const char *a, const char *b)
{
    nib_checkpoint *x = open_good(a), *y = open_good(b);
    CHECK_THAT(x->n_tensors == y->n_tensors, "%zu tensors became %zu", x->n_tensors, y->n_tensors);
    for (size_t i = 0; i < x->n_tensors && i < y->n_tensors; i++) {
        const struct nib_ck_tensor *s = &x->tensors[i], *t = &y->tensors[i];
        CHECK_THAT(!strcmp(s->name, t->name), "%s became %s", s->name, t->name);
        CHECK_THAT(s->dtype == t->dtype && s->rank == t->rank && s->bytes == t->bytes, "%s has another form", s->name);
        for (int64_t d = 0; d < s->rank && d < t->rank; d++)
            CHECK_THAT(s->shape[d] == t->shape[d], "%s has another shape", s->name);
        void *p = malloc(s->bytes + 1), *q = malloc(t->bytes + 1);
        CHECK_OK(nib_ck_read(x, (uint32_t)i, 0, p, s->bytes));
        CHECK_OK(nib_ck_read(y, (uint32_t)i, 0, q, t->bytes));
        CHECK_THAT(s->bytes == t->bytes && !memcmp(p, q, s->bytes), "%s has other values", s->name);
        free(p);
        free(q);
    }
    nib_checkpoint_close(x);
    nib_checkpoint_close(y);
}

#define SIZES "\"hidden_size\": 64, \"intermediate_size\": 32, \"num_hidden_layers\": 2"
#define LAYER "model.layers.0."

static void make_gpt_oss(const char *path, const char *dtype, nib_dtype stored)
{
    char config[200];
    snprintf(config, sizeof config, "{\"model_type\": \"gpt_oss\", \"dtype\": \"%s\", " SIZES "}", dtype);
    MAKE(path, config, stored, { LAYER "mlp.experts.gate_up_proj", 3, { E, H, 2 * INNER } },
         { LAYER "mlp.experts.gate_up_proj_bias", 2, { E, 2 * INNER } },
         { LAYER "mlp.experts.down_proj", 3, { E, INNER, H } }, { LAYER "mlp.experts.down_proj_bias", 2, { E, H } },
         { LAYER "self_attn.q_proj.weight", 2, { H, H } }, { LAYER "mlp.router.weight", 2, { E, H } },
         { "model.norm.weight", 1, { H } });
}

/* ---- What comes back ---- */

TEST(stacks_come_back_as_they_were)
{
    static const struct {
        const char *config;
        struct tensor tensors[3];
    } families[] = {
        { "{\"model_type\": \"llama4\", " SIZES "}",
          { { LAYER "feed_forward.experts.gate_up_proj", 3, { E, H, 2 * INNER } },
            { LAYER "feed_forward.experts.down_proj", 3, { E, INNER, H } },
            { LAYER "self_attn.q_proj.weight", 2, { H, H } } } },
        { "{\"model_type\": \"granitemoehybrid\", " SIZES "}",
          { { LAYER "block_sparse_moe.input_linear.weight", 3, { E, 2 * INNER, H } },
            { LAYER "block_sparse_moe.output_linear.weight", 3, { E, H, INNER } },
            { LAYER "block_sparse_moe.router.layer.weight", 2, { E, H } } } },
        { "{\"model_type\": \"qwen3_vl_moe\", \"text_config\": {" SIZES "}}",
          { { "model.language_model.layers.0.mlp.experts.gate_up_proj", 3, { E, H, 2 * INNER } },
            { "model.language_model.layers.0.mlp.experts.down_proj", 3, { E, INNER, H } },
            { "model.language_model.layers.1.mlp.experts.down_proj", 3, { E, INNER, H } } } },
    };
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        make(at("in"), families[i].config, NIB_BF16, families[i].tensors, 3);
        CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
        for (int small = 0; small < 2; small++) { /* tiny panels bring rows and columns one by one */
            CHECK_OK(dequantize(at("out"), fresh("back"), small ? 1 : 0));
            check_same(at("in"), at("back"));
        }
    }
    make_gpt_oss(at("in"), "bfloat16", NIB_BF16);
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    CHECK_OK(dequantize(at("out"), fresh("back"), 1));
    check_same(at("in"), at("back"));
}

TEST(dtypes_come_back_as_config_json_has_them)
{
    make_gpt_oss(at("in"), "float32", NIB_F32);
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    CHECK_OK(dequantize(at("out"), fresh("back"), 0));
    check_same(at("in"), at("back"));
    make_gpt_oss(at("in"), "float16", NIB_F16);
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    CHECK_OK(dequantize(at("out"), fresh("back"), 0));
    check_same(at("in"), at("back"));
}

/* Older models have none there, or one that is not true. */
TEST(dtypes_come_back_though_config_json_has_others)
{
    static const char *const said[] = { "bfloat16", "float32", "?" };
    static const nib_dtype stored[] = { NIB_F32, NIB_F16, NIB_F32 };
    for (int i = 0; i < 3; i++) {
        make_gpt_oss(at("in"), said[i], stored[i]);
        CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
        CHECK_OK(dequantize(at("out"), fresh("back"), 0));
        check_same(at("in"), at("back"));
    }
    nib_checkpoint *out = open_good(at("out"));
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_convert(out, NIB_CHECKPOINT_FORMAT_MODELOPT, &plan));
    CHECK_OK(nib_plan_run(plan, fresh("other"), NULL, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(out);
    CHECK_OK(dequantize(at("other"), fresh("back"), 0));
    check_same(at("in"), at("back"));
}

TEST(stacks_come_back_of_parts_that_stayed_and_by_way_of_another_format)
{
    make_gpt_oss(at("in"), "bfloat16", NIB_BF16);
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, LAYER "mlp.experts.1.*"));
    nib_checkpoint *out = open_good(at("out"));
    CHECK(nib_ck_find_tensor(out, LAYER "mlp.experts.1.up_proj.weight") != NIB_NONE &&
          nib_ck_find_tensor(out, LAYER "mlp.experts.2.up_proj.weight_packed") != NIB_NONE);
    CHECK_OK(dequantize(at("out"), fresh("back"), 0));
    check_same(at("in"), at("back"));
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_convert(out, NIB_CHECKPOINT_FORMAT_TORCHAO, &plan));
    CHECK_OK(nib_plan_run(plan, fresh("other"), NULL, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(out);
    CHECK_OK(dequantize(at("other"), fresh("back"), 0));
    check_same(at("in"), at("back"));
}

/* A file whose metadata have this under "nib", and what is left when its codes are values again. */
static void write_told(const char *provenance, const struct item *items, size_t n)
{
    nib_writer *writer = NULL;
    CHECK_OK(nib_writer_create(at("told.safetensors"), &writer));
    CHECK_OK(nib_writer_metadata(writer, "nib", provenance));
    for (size_t i = 0; i < n; i++)
        CHECK_OK(nib_writer_declare(writer, items[i].name, items[i].dtype, items[i].rank, items[i].shape));
    for (size_t i = 0; i < n; i++)
        CHECK_OK(nib_writer_write(writer, items[i].name, 0, items[i].data,
                                  (size_t)elements_in(items[i].rank, items[i].shape) *
                                      (size_t)nib_dtype_bits(items[i].dtype) / 8));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
}

static nib_checkpoint *dequantize_told(const char *provenance, const struct item *items, size_t n)
{
    write_told(provenance, items, n);
    CHECK_OK(dequantize(at("told.safetensors"), at("plain.safetensors"), 0));
    CHECK(unlink(at("told.safetensors")) == 0);
    nib_checkpoint *c = open_good(at("plain.safetensors"));
    CHECK(unlink(at("plain.safetensors")) == 0);
    return c;
}

TEST(what_provenance_says_is_believed_only_where_it_fits)
{
    static const char *const texts[] = {
        "nothing",
        " 1.0",
        "\"0.2\"",
        "null",
        "{\"restore\": [",
        "{\"restore\": [{\"matrix\": \"up\\u0000x\"}], \"dtype\": \"F32\\u0000\"}",
        "{\"restore\": 5}",
        "{\"restore\": [5, {}, {\"tensor\": \"\", \"experts\": \".experts\", \"parts\": [\"up\"]}]}",
        "{\"restore\": [{\"tensor\": \".x\", \"experts\": \".experts\", \"parts\": [\"up\", \"down\"]}]}",
        "{\"restore\": [{\"tensor\": \".x\", \"experts\": \".experts\", \"parts\": [\"up\", 7]}]}",
        "{\"restore\": [{\"tensor\": \".x\", \"experts\": \".others\", \"parts\": [\"up\"]}]}",
        "{\"restore\": [{\"tensor\": \".x\", \"experts\": \".experts\", \"parts\": [\"last\"]}]}",
        "{\"restore\": [{\"tensor\": \".x\", \"experts\": \".experts\", \"parts\": [\"odd\"]}]}",
        "{\"restore\": [{\"matrix\": 5}, {\"matrix\": \"q_proj\"}]}",
    };
    static const uint8_t codes[16 * 8], scales[32];
    static const float one = 1;
    const struct item items[] = {
        { "m.experts.0.up.weight_packed", NIB_U8, 2, { 16, 8 }, codes },
        { "m.experts.0.up.weight_scale", NIB_E4M3, 2, { 16, 1 }, scales },
        { "m.experts.0.up.weight_global_scale", NIB_F32, 1, { 1 }, &one },
        { "m.experts.1.last.weight_packed", NIB_U8, 2, { 16, 8 }, codes }, /* of which there is no 0 */
        { "m.experts.1.last.weight_scale", NIB_E4M3, 2, { 16, 1 }, scales },
        { "m.experts.1.last.weight_global_scale", NIB_F32, 1, { 1 }, &one },
        { "m.experts.0.odd.weight_packed", NIB_U8, 2, { 16, 8 }, codes },
        { "m.experts.0.odd.weight_scale", NIB_E4M3, 2, { 16, 1 }, scales },
        { "m.experts.0.odd.weight_global_scale", NIB_F32, 1, { 1 }, &one },
        { "m.experts.1.odd.weight_packed", NIB_U8, 2, { 8, 8 }, codes }, /* of another shape */
        { "m.experts.1.odd.weight_scale", NIB_E4M3, 2, { 8, 1 }, scales },
        { "m.experts.1.odd.weight_global_scale", NIB_F32, 1, { 1 }, &one },
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        nib_checkpoint *c = dequantize_told(texts[i], items, sizeof items / sizeof *items);
        CHECK_THAT(c->n_tensors == 4 && nib_ck_find_tensor(c, "m.experts.1.odd.weight") != NIB_NONE, "%s", texts[i]);
        nib_checkpoint_close(c);
    }
}

/* Whatever else stands there was not left by a run of nib, and says nothing of two that would have it. */
TEST(provenance_is_an_object)
{
    static const float values[16];
    static const char *const texts[] = { "{\"a\": 1}", "nothing", "", "5", "[]", "null", "{", "{\"a\": \"\\u0000\"}" };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        nib_checkpoint_facts facts = { .bytes = sizeof facts };
        write_told(texts[i], (struct item[]){ { "m.weight", NIB_F32, 2, { 1, 16 }, values } }, 1);
        nib_checkpoint *c = open_good(at("told.safetensors"));
        CHECK_OK(nib_checkpoint_get_facts(c, &facts));
        CHECK_THAT(i ? !facts.provenance : facts.provenance && !strcmp(facts.provenance, texts[0]), "%s: %s", texts[i],
                   facts.provenance ? facts.provenance : "none");
        nib_checkpoint_close(c);
    }
    CHECK(unlink(at("told.safetensors")) == 0);
}

TEST(what_provenance_says_goes_on_as_far_as_it_is_understood)
{
    static const uint8_t codes[16 * 8], scales[16];
    static const float one = 1;
    const struct item items[] = {
        { "m.up.weight_packed", NIB_U8, 2, { 16, 8 }, codes },
        { "m.up.weight_scale", NIB_E4M3, 2, { 16, 1 }, scales },
        { "m.up.weight_global_scale", NIB_F32, 1, { 1 }, &one },
    };
    write_told("{\"restore\": [{\"matrix\": \"q\", \"x\": [[[5]]]}, {\"else\": 1}, [], {\"tensor\": \".x\", \"x\": {}, "
               "\"experts\": \".experts\", \"parts\": [\"a\", \"b\"], \"transposed\": true}]}",
               items, 3);
    nib_checkpoint *c = open_good(at("told.safetensors"));
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_convert(c, NIB_CHECKPOINT_FORMAT_MODELOPT, &plan));
    char *text = plan ? json_dumps(plan->restore, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    CHECK_THAT(text && !strcmp(text, "[{\"matrix\":\"q\"},{\"experts\":\".experts\",\"interleaved\":false,"
                                     "\"parts\":[\"a\",\"b\"],\"tensor\":\".x\",\"transposed\":true}]"),
               "%s", text ? text : "");
    free(text);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    CHECK(unlink(at("told.safetensors")) == 0);
}

/* Each would be looked for in every name. */
TEST(of_notes_in_provenance_sixteen_go_on)
{
    static const uint8_t codes[16 * 8], scales[16];
    static const float one = 1;
    const struct item items[] = {
        { "m.up.weight_packed", NIB_U8, 2, { 16, 8 }, codes },
        { "m.up.weight_scale", NIB_E4M3, 2, { 16, 1 }, scales },
        { "m.up.weight_global_scale", NIB_F32, 1, { 1 }, &one },
    };
    char text[1024] = "{\"restore\": [";
    for (int i = 0; i < 17; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s{\"matrix\": \"q%d\"}", i ? ", " : "", i);
    snprintf(text + strlen(text), sizeof text - strlen(text), "]}");
    write_told(text, items, 3);
    nib_checkpoint *c = open_good(at("told.safetensors"));
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_convert(c, NIB_CHECKPOINT_FORMAT_MODELOPT, &plan));
    CHECK(plan && json_array_size(plan->restore) == 16);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    CHECK(unlink(at("told.safetensors")) == 0);
}

/* Only what computes can have been the bias of a stack: integers of that name stay beside it, as they are. */
TEST(biases_that_are_no_floats_are_in_no_stack)
{
    static const uint8_t codes[16 * 8], scales[16];
    static const float one = 1;
    static const int32_t numbers[16];
    for (int floats = 0; floats < 2; floats++) {
        const struct item items[] = {
            { "m.experts.0.up.weight_packed", NIB_U8, 2, { 16, 8 }, codes },
            { "m.experts.0.up.weight_scale", NIB_E4M3, 2, { 16, 1 }, scales },
            { "m.experts.0.up.weight_global_scale", NIB_F32, 1, { 1 }, &one },
            { "m.experts.0.up.bias", floats ? NIB_F32 : NIB_I32, 1, { 16 }, numbers },
        };
        nib_checkpoint *c = dequantize_told(
            "{\"restore\": [{\"tensor\": \".x\", \"experts\": \".experts\", \"parts\": [\"up\"]}]}", items, 4);
        const bool joined = nib_ck_find_tensor(c, "m.x_bias") != NIB_NONE;
        const bool beside = nib_ck_find_tensor(c, "m.experts.0.up.bias") != NIB_NONE;
        CHECK(c->n_tensors == 2 && nib_ck_find_tensor(c, "m.x") != NIB_NONE);
        CHECK_THAT(joined == floats && beside == !floats, "%d: %d %d %s", floats, joined, beside, c->tensors[0].name);
        nib_checkpoint_close(c);
    }
}

static long json_left = -1; /* the allocation of JSON that finds 0 here fails */

static void *allocate_json(size_t bytes) { return json_left >= 0 && json_left-- == 0 ? NULL : malloc(bytes); }

/* What is noted of both stacks goes along, or there is no plan. */
TEST(no_allocation_of_json_that_fails_leaves_half_of_the_notes)
{
    make_gpt_oss(at("in"), "bfloat16", NIB_BF16);
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    nib_checkpoint *c = open_good(at("out"));
    json_set_alloc_funcs(allocate_json, free);
    for (long left = 0, failed = 1; failed; left++) {
        nib_plan *plan = NULL;
        json_left = left;
        const nib_status status = nib_plan_convert(c, NIB_CHECKPOINT_FORMAT_MODELOPT, &plan);
        failed = json_left < 0;
        json_left = -1;
        const size_t notes = plan ? json_array_size(plan->restore) : 0;
        CHECK_THAT(status ? status == NIB_ERR_MEMORY && !plan : notes == 2, "allocation %ld: %s: %s: %zu notes", left,
                   nib_status_name(status), nib_last_error(), notes);
        nib_plan_destroy(plan);
    }
    json_set_alloc_funcs(malloc, free);
    nib_checkpoint_close(c);
}

static bool json_failed;

/* From that one on all fail: where the next succeeds, jansson's reader goes on without a character. */
static void *allocate_json_no_more(size_t bytes)
{
    json_failed |= json_left == 0;
    json_left -= json_left > 0;
    return json_failed ? NULL : malloc(bytes);
}

/* Without them its weights would have another dtype, and stacks would stay apart: no memory to understand the notes of a
 * checkpoint, or its configuration, is no reason to do without, nor a fault of theirs. */
TEST(no_allocation_of_json_that_fails_opens_a_checkpoint_otherwise)
{
    make_gpt_oss(at("in"), "float32", NIB_F16);
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    nib_checkpoint *whole = open_good(at("out"));
    CHECK(json_array_size(json_object_get(whole->notes, "restore")) == 2 && nib_ck_nominal_dtype(whole) == NIB_F16);
    json_set_alloc_funcs(allocate_json_no_more, free);
    for (long left = 0, failed = 1; failed; left++) {
        nib_checkpoint *c = NULL;
        json_failed = false;
        json_left = left;
        const nib_status status = nib_checkpoint_open(at("out"), &c);
        failed = json_failed;
        CHECK_THAT(status ? status == NIB_ERR_MEMORY && !c && strstr(nib_last_error(), "no memory")
                          : json_equal(c->notes, whole->notes) && json_equal(c->config, whole->config),
                   "allocation %ld: %s: %s", left, nib_status_name(status), nib_last_error());
        CHECK(failed == (status != NIB_OK) && (failed || left > 100));
        nib_checkpoint_close(c);
    }
    json_set_alloc_funcs(malloc, free);
    json_left = -1;
    nib_checkpoint_close(whole);
}

TEST(no_allocation_that_fails_leaves_half_a_stack)
{
    make_gpt_oss(at("in"), "bfloat16", NIB_BF16);
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    nib_checkpoint *c = open_good(at("out"));
    nib_plan *whole = NULL;
    CHECK_OK(nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_DTYPE_COUNT, &whole));
    for (long left = 0, failed = 1; failed; left++) {
        nib_plan *plan = NULL;
        allocations_left = left;
        const nib_status status = nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_DTYPE_COUNT, &plan);
        failed = allocations_left < 0;
        allocations_left = -1;
        CHECK_THAT(status ? status == NIB_ERR_MEMORY && !plan : plan->n_tensors == whole->n_tensors,
                   "allocation %ld: %s: %s", left, nib_status_name(status), nib_last_error());
        nib_plan_destroy(plan);
    }
    nib_plan_destroy(whole);
    nib_checkpoint_close(c);
}

TEST(no_allocation_that_fails_while_stacks_come_back_does_harm)
{
    make_gpt_oss(at("in"), "bfloat16", NIB_BF16);
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    long tried = 0;
    for (long left = 0;; left += 1 + left / 30) {
        fresh("back");
        allocations_left = left;
        const nib_status status =
            dequantize_on(1, at("out"), at("back"), 0); /* the failing allocator is of this thread */
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        if (!failed) {
            CHECK_OK(status);
            break;
        }
        tried++;
        CHECK_THAT(status == NIB_OK || status == NIB_ERR_MEMORY, "allocation %ld: %s: %s", left,
                   nib_status_name(status), nib_last_error());
        if (!status) /* it could do without */
            check_same(at("in"), at("back"));
    }
    CHECK_THAT(tried > 40, "%ld", tried);
    check_same(at("in"), at("back"));
}

/* ---- Conv1D ---- */

static void make_gpt2(const char *path, const char *type)
{
    char config[80];
    snprintf(config, sizeof config, "{\"model_type\": \"%s\"}", type);
    MAKE(path, config, NIB_BF16, { "h.0.attn.c_attn.weight", 2, { H, 3 * H } },
         { "h.0.attn.c_attn.bias", 1, { 3 * H } }, { "h.0.mlp.c_fc.weight", 2, { H, 40 } },
         { "h.0.mlp.c_proj.weight", 2, { 40, H } }, { "wte.weight", 2, { 50, H } },
         { "h.0.attn.bias", 4, { 1, 1, 8, 8 } });
}

TEST(conv1d_is_quantized_along_its_inputs_for_those_who_take_it)
{
    make_gpt2(at("in"), "gpt2");
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_VLLM, NULL));
    nib_checkpoint *out = open_good(at("out"));
    const uint32_t id = nib_ck_find_tensor(out, "h.0.attn.c_attn.weight_packed");
    CHECK(id != NIB_NONE && out->tensors[id].shape[0] == 3 * H && out->tensors[id].shape[1] == H / 2);
    CHECK(nib_ck_find_tensor(out, "h.0.mlp.c_proj.weight") != NIB_NONE); /* 40 inputs */
    nib_checkpoint_close(out);
    CHECK_OK(dequantize(at("out"), fresh("back"), 1));
    check_same(at("in"), at("back"));
    CHECK_FAILS(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL), NIB_ERR_MODE, "[inputs, outputs]");
    CHECK_FAILS(quantize(at("in"), fresh("out"), NIB_READER_TRANSFORMERS, NULL), NIB_ERR_MODE, "[inputs, outputs]");
    make_gpt2(at("in"), "openai-gpt");
    CHECK_FAILS(quantize(at("in"), fresh("out"), NIB_READER_VLLM, NULL), NIB_ERR_MODE, "[inputs, outputs]");
    make_gpt2(at("in"), "gpt_bigcode"); /* has the names, and layers as others have them */
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
}

/* ---- Roles ---- */

TEST(roles_of_modules)
{
    static const struct {
        const char *family, *module;
        enum nib_ck_role_of_module role;
    } cases[] = {
        { "t5", "shared", NIB_MODULE_EMBEDDING },
        { "bart", "model.shared", NIB_MODULE_EMBEDDING },
        { "x", "model.layers.0.mlp.shared", NIB_MODULE_ORDINARY },
        { "t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias", NIB_MODULE_EMBEDDING },
        { "granite_speech", "encoder.layers.0.attn.rel_pos_emb", NIB_MODULE_AUDIO },
        { "whisper", "encoder.layers.0.fc1", NIB_MODULE_ORDINARY },
        { "rwkv", "head", NIB_MODULE_HEAD },
        { "deepseek_v4", "head", NIB_MODULE_HEAD },
        { "x", "model.layers.0.head", NIB_MODULE_ORDINARY },
        { "rwkv", "rwkv.blocks.0.attention.output", NIB_MODULE_ORDINARY },
        { "x", "output", NIB_MODULE_HEAD },
        { "bert", "bert.encoder.layer.0.attention.output.dense", NIB_MODULE_ORDINARY },
        { "whisper", "proj_out", NIB_MODULE_HEAD },
        { "roberta", "lm_head.decoder", NIB_MODULE_HEAD },
        { "bert", "cls.predictions.decoder", NIB_MODULE_HEAD },
        { "gemma3n_text", "model.layers.0.altup.modality_router", NIB_MODULE_ROUTER },
        { "gemma3n_text", "model.layers.0.per_layer_input_gate", NIB_MODULE_ORDINARY },
        { "minimax", "model.layers.1.self_attn.output_gate", NIB_MODULE_ORDINARY },
        { "deepseek_v4", "model.layers.0.attn.compressor.wgate", NIB_MODULE_ORDINARY },
        { "hunyuan_v1_moe", "model.layers.0.mlp.gate.wg", NIB_MODULE_ROUTER },
        { "x", "model.layers.0.mlp.gate_proj", NIB_MODULE_ORDINARY },
        { "jetmoe", "model.layers.0.mlp.router.layer", NIB_MODULE_ROUTER },
        { "video_llava", "image_tower.encoder.layers.0.mlp.fc1", NIB_MODULE_VISION },
        { "idefics3", "model.connector.modality_projection.proj", NIB_MODULE_PROJECTOR },
        { "distilbert", "vocab_projector", NIB_MODULE_HEAD },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const nib_checkpoint c = { .path = (char *)(uintptr_t) "made up", .model_type = cases[i].family };
        CHECK_THAT(nib_ck_module_role(&c, cases[i].module) == cases[i].role, "%s of %s", cases[i].module,
                   cases[i].family);
    }
}

static int count_finding(void *context, const nib_finding *finding)
{
    printf("%s: %s: %s\n", finding->id, finding->tensor, finding->fact);
    ++*(size_t *)context;
    return 0;
}

/* What a plan keeps by its role, a check wants kept, and the other way round. */
TEST(plans_and_checks_agree_about_roles)
{
    MAKE(at("in"), "{\"model_type\": \"gemma3n_text\"}", NIB_BF16,
         { "model.layers.0.altup.modality_router.weight", 2, { 4, H } },
         { "model.layers.0.per_layer_input_gate.weight", 2, { 16, H } }, { "model.shared.weight", 2, { 16, H } },
         { "head.weight", 2, { 16, H } }, { "model.layers.0.attention.output.weight", 2, { H, H } });
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    nib_checkpoint *in = open_good(at("in")), *out = open_good(at("out"));
    for (size_t i = 0; i < in->n_weights; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s.weight_packed", in->weights[i].name);
        CHECK_THAT((nib_ck_find_tensor(out, name) == NIB_NONE) ==
                       (nib_ck_default_keep(in, in->weights[i].name) != NULL),
                   "%s", name);
    }
    size_t findings = 0;
    CHECK_OK(nib_checkpoint_check(out, in, NULL, count_finding, &findings));
    CHECK_THAT(findings == 0, "%zu findings", findings);
    nib_checkpoint_close(in);
    nib_checkpoint_close(out);
}

/* ---- Guesses ---- */

/* What real models have: heads of 32 rows that differ, and values whose columns are large where those of queries and keys are
 * not. Neither is a fault. */
TEST(heads_and_values_of_real_models_raise_no_alarm)
{
    enum { ROWS = 128, COLS = 1024 };
    static const char *const names[] = { "m.0.self_attn.q_proj.weight", "m.0.self_attn.k_proj.weight",
                                         "m.0.self_attn.v_proj.weight" };
    static float x[3][ROWS * COLS];
    struct item items[3];
    for (int w = 0; w < 3; w++) {
        for (int i = 0; i < ROWS * COLS; i++) {
            const int head = i / COLS / 32, odd = i % 2, even_is_large = (i % COLS / 2) % 3 == 0;
            const float column = odd == (even_is_large ^ (w == 2)) ? 1 : 3;
            x[w][i] = 0.01f * (float)(1 << head) * column * (float)test_normal();
        }
        items[w] = (struct item){ names[w], NIB_F32, 2, { ROWS, COLS }, x[w] };
    }
    CHECK_OK(nib_os_remove_directory(at("in")));
    CHECK(mkdir(at("in"), 0777) == 0);
    put_tensors("in/model.safetensors", items, 3);
    put_text("in/config.json", "{\"model_type\": \"llama\"}");
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    nib_checkpoint *out = open_good(at("out"));
    size_t findings = 0;
    CHECK_OK(nib_checkpoint_check(out, NULL, NULL, count_finding, &findings));
    CHECK_THAT(findings == 0, "%zu findings", findings);
    nib_checkpoint_close(out);
}

/* ---- Names of readers ---- */

static bool ignores(const char *directory_name, const char *entry)
{
    nib_checkpoint *c = open_good(at(directory_name));
    size_t i;
    json_t *item;
    bool found = false;
    json_array_foreach(json_object_get(c->quantization, "ignore"), i, item)
    {
        found |= !strcmp(json_string_value(item), entry);
    }
    nib_checkpoint_close(c);
    return found;
}

TEST(modules_are_ignored_by_the_names_that_readers_give_them)
{
    MAKE(at("in"), "{\"model_type\": \"qwen2_5_vl\", \"vision_config\": {}}", NIB_BF16,
         { "visual.blocks.0.attn.qkv.weight", 2, { H, H } }, { "model.layers.0.self_attn.q_proj.weight", 2, { H, H } },
         { "model.layers.0.odd.weight", 2, { H, 24 } }, { "odd.weight", 2, { H, 24 } });
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    CHECK(ignores("out", "visual.blocks.0.attn.qkv") && ignores("out", "re:(.*\\.)?visual\\..*"));
    CHECK(!ignores("out", "model.visual.blocks.0.attn.qkv")); /* the pattern says it */
    CHECK(ignores("out", "odd") && ignores("out", "model.odd") && ignores("out", "model.layers.0.odd"));
    CHECK(ignores("out", "lm_head") && !ignores("out", "model.lm_head") && !ignores("out", "model.model.layers.0.odd"));

    MAKE(at("in"), "{\"model_type\": \"llava\", \"text_config\": {}}", NIB_BF16,
         { "language_model.model.layers.0.mlp.gate.weight", 2, { 4, H } },
         { "language_model.lm_head.weight", 2, { 8, H } },
         { "language_model.model.layers.0.mlp.up_proj.weight", 2, { H, H } });
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    CHECK(ignores("out", "language_model.lm_head") && ignores("out", "lm_head"));
    CHECK(ignores("out", "model.language_model.layers.0.mlp.gate"));

    MAKE(at("in"), "{\"model_type\": \"phimoe\"}", NIB_BF16,
         { "model.layers.0.block_sparse_moe.gate.weight", 2, { 4, H } }, { "a.weight", 2, { H, H } });
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
    CHECK(ignores("out", "model.layers.0.mlp.router") && !ignores("out", "model.a"));
}

TEST(tied_heads_are_ignored_under_any_name)
{
    static const char *const heads[][2] = { { "whisper", "proj_out" },
                                            { "xlm-roberta", "lm_head.decoder" },
                                            { "deberta-v2", "cls.predictions.decoder" },
                                            { "modernbert", "decoder" },
                                            { "qwen3", "lm_head" } };
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        char config[100];
        snprintf(config, sizeof config, "{\"model_type\": \"%s\", \"tie_word_embeddings\": true}", heads[i][0]);
        MAKE(at("in"), config, NIB_BF16, { "m.embed_tokens.weight", 2, { 8, H } }, { "m.fc1.weight", 2, { H, H } });
        CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_ANY, NULL));
        CHECK_THAT(ignores("out", heads[i][1]) && ignores("out", "lm_head"), "%s", heads[i][0]);
        nib_checkpoint *out = open_good(at("out"));
        size_t findings = 0;
        CHECK_OK(nib_checkpoint_check(out, NULL, NULL, count_finding, &findings));
        CHECK_THAT(findings == 0, "%s: %zu findings", heads[i][0], findings);
        nib_checkpoint_close(out);
    }
}

/* A tower of which something is quantized has no pattern. */
TEST(a_pattern_never_means_what_is_quantized)
{
    MAKE(at("in"), "{\"model_type\": \"llava\", \"text_config\": {}}", NIB_BF16,
         { "vision_tower.a.weight", 2, { H, H } }, { "vision_tower.b.weight", 2, { H, H } });
    nib_checkpoint *c = open_good(at("in"));
    nib_plan *plan = NULL;
    nib_quantize_options options;
    nib_quantize_options_init(&options);
    static const char *const only[] = { "vision_tower.a" };
    options.only = only;
    options.n_only = 1;
    CHECK_OK(nib_plan_quantize(c, &options, &plan));
    CHECK_OK(nib_plan_run(plan, fresh("out"), NULL, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    CHECK(ignores("out", "vision_tower.b") && ignores("out", "model.vision_tower.b"));
    CHECK(!ignores("out", "re:(.*\\.)?vision_tower\\..*"));
}

/* ---- Readers ---- */

static void facts_of(const char *in, nib_reader reader, nib_plan_facts *facts, char *reason, size_t bytes)
{
    nib_checkpoint *c = open_good(in);
    nib_plan *plan = NULL;
    nib_quantize_options options;
    nib_plan_row row = { .bytes = sizeof row };
    nib_quantize_options_init(&options);
    options.reader = reader;
    CHECK_OK(nib_plan_quantize(c, &options, &plan));
    CHECK_OK(nib_plan_get_facts(plan, facts));
    CHECK_OK(nib_plan_get_row(plan, 0, &row));
    snprintf(reason, bytes, "%s", row.reason);
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
}

TEST(what_transformers_cannot_do_is_said_or_rejected)
{
    nib_plan_facts facts = { .bytes = sizeof facts };
    char reason[200];
    make_gpt_oss(at("in"), "bfloat16", NIB_BF16);
    facts_of(at("in"), NIB_READER_ANY, &facts, reason, sizeof reason);
    CHECK_THAT(strstr(facts.note, "--for transformers") && !*reason, "%s", facts.note);
    facts_of(at("in"), NIB_READER_VLLM, &facts, reason, sizeof reason);
    CHECK(!*facts.note && !*reason);
    facts_of(at("in"), NIB_READER_TRANSFORMERS, &facts, reason, sizeof reason);
    CHECK(!*facts.note && strstr(reason, "tensor scale") && facts.changed == 1);

    MAKE(at("in"), "{\"model_type\": \"qwen3_moe\"}", NIB_BF16, { "m.mlp.experts.0.up_proj.weight", 2, { H, H } },
         { "m.q_proj.weight", 2, { H, H } });
    facts_of(at("in"), NIB_READER_ANY, &facts, reason, sizeof reason);
    CHECK(strstr(facts.note, "garbage"));
    CHECK_FAILS(quantize(at("in"), fresh("out"), NIB_READER_TRANSFORMERS, NULL), NIB_ERR_UNSUPPORTED, "one by one");
    MAKE(at("in"), "{\"model_type\": \"qwen3_moe\"}", NIB_BF16, { "m.mlp.experts.9.up_proj.weight", 2, { H, H } });
    CHECK_FAILS(quantize(at("in"), fresh("out"), NIB_READER_TRANSFORMERS, NULL), NIB_ERR_UNSUPPORTED, "one by one");
    MAKE(at("in"), "{\"model_type\": \"llama4_text\"}", NIB_BF16,
         { "m.feed_forward.experts.0.up_proj.weight", 2, { H, H } });
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_TRANSFORMERS, NULL));
    MAKE(at("in"), "{\"model_type\": \"llama\"}", NIB_BF16, { "m.layers.0.mlp.up_proj.weight", 2, { H, H } });
    CHECK_OK(quantize(at("in"), fresh("out"), NIB_READER_TRANSFORMERS, NULL));
}

/* ---- What is no weight ---- */

TEST(every_tensor_of_two_dims_is_in_the_plan)
{
    MAKE(at("in"), "{\"model_type\": \"jetmoe\"}", NIB_BF16,
         { "model.layers.0.mlp.input_linear.weight", 3, { E, 2 * INNER, H } },
         { "model.layers.0.mixer.conv1d.weight", 3, { H, 1, 4 } }, { "model.layers.0.mixer.A_log", 2, { H, 16 } },
         { "model.layers.0.q_proj.weight", 2, { H, H } }, { "model.layers.0.mlp.bias", 1, { H } });
    nib_checkpoint *c = open_good(at("in"));
    nib_plan *plan = NULL;
    nib_plan_facts facts = { .bytes = sizeof facts };
    nib_plan_row row = { .bytes = sizeof row };
    CHECK_OK(nib_plan_quantize(c, NULL, &plan));
    CHECK_OK(nib_plan_get_facts(plan, &facts));
    CHECK_THAT(facts.weights == 1 && facts.rows == 4 && facts.kept == 0, "%zu of %zu", facts.weights, facts.rows);
    static const struct {
        const char *name, *reason;
        int64_t rows, cols;
    } wanted[] = { { "model.layers.0.mixer.A_log", "not called a module's weight", H, 16 },
                   { "model.layers.0.mixer.conv1d.weight", "a convolution", H, 4 },
                   { "model.layers.0.mlp.input_linear.weight", "no stack of experts", E * 2 * INNER, H } };
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(nib_plan_get_row(plan, 1 + i, &row));
        CHECK_THAT(!strcmp(row.name, wanted[i].name) && strstr(row.reason, wanted[i].reason), "%s: %s", row.name,
                   row.reason);
        CHECK(row.action == NIB_ACTION_KEEP && row.rows == wanted[i].rows && row.cols == wanted[i].cols);
        CHECK(row.bytes_in == row.bytes_out && row.bytes_in == (uint64_t)(2 * row.rows * row.cols));
    }
    CHECK_FAILS(nib_plan_get_row(plan, 4, &row), NIB_ERR_ARG, "the plan has 4");
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
}

TEST_MAIN

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_repair.c - a small NVFP4 checkpoint, damaged as the input says (tensors dropped, renamed, reshaped, filled, scales
 * of any bits, a configuration of parts or of any bytes), then nib repair of what was read: rejected with a message, or an
 * output with the same codes and nothing repairable left, which can be converted or dequantized. NIB_TEST_WRAP_MEMORY
 */
#define _GNU_SOURCE
#include <stdbool.h>

#include "nib_checkpoint.h"
#include "fuzz_directory.h"

/* ---- The checkpoint ---- */

enum { ROWS = 16, COLS = 32, TENSORS = 20 };
static const char *const modules[] = { "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
                                       "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj" };
enum { MODULES = sizeof modules / sizeof *modules, ROLES = 4 };
static const char *const roles[2][ROLES] = { { "weight_packed", "weight_scale", "weight_global_scale",
                                               "input_global_scale" },
                                             { "weight", "weight_scale", "weight_scale_2", "input_scale" } };

struct tensor {
    char name[96];
    nib_dtype dtype;
    int rank;
    int64_t shape[3];
    uint8_t data[ROWS * COLS * 2];
    size_t bytes;
};
static struct tensor tensors[TENSORS];
static size_t n_tensors;

static struct tensor *add(const char *module, const char *role, nib_dtype dtype, int rank, int64_t rows, int64_t cols)
{
    struct tensor *t = &tensors[n_tensors++];
    require(n_tensors <= TENSORS, "space for a tensor");
    *t = (struct tensor){ .dtype = dtype, .rank = rank, .shape = { rows, cols } };
    snprintf(t->name, sizeof t->name, "%s.%s", module, role);
    t->bytes = (size_t)nib_dtype_bits(dtype) / 8 * (size_t)(rank > 0 ? rows : 1) * (size_t)(rank > 1 ? cols : 1);
    return t;
}

static void put_float(struct tensor *t, float value) { memcpy(t->data, &value, sizeof value); }

/* compressed-tensors (divisors) or ModelOpt (multipliers), with scales of activations or without. */
static void make_tensors(int form, bool activations)
{
    n_tensors = 0;
    for (int m = 0; m < MODULES; m++) {
        struct tensor *codes = add(modules[m], roles[form][0], NIB_U8, 2, ROWS, COLS / 2);
        struct tensor *scales = add(modules[m], roles[form][1], NIB_E4M3, 2, ROWS, COLS / 16);
        for (size_t i = 0; i < codes->bytes; i++)
            codes->data[i] = (uint8_t)(i * 37 + (size_t)m * 11);
        memset(scales->data, 0x70, scales->bytes);
        put_float(add(modules[m], roles[form][2], NIB_F32, form ? 0 : 1, 1, 1), form ? 0x1p-13f : 0x1p13f);
        if (activations)
            put_float(add(modules[m], roles[form][3], NIB_F32, form ? 0 : 1, 1, 1), form ? 0x1p-8f : 0x1p8f);
    }
    struct tensor *norm = add("model.norm", "weight", NIB_BF16, 1, COLS, 1);
    memset(norm->data, 0x3f, norm->bytes);
}

/* ---- Damage ---- */

static void remove_tensor(size_t i) { memmove(&tensors[i], &tensors[i + 1], (--n_tensors - i) * sizeof *tensors); }

static bool is_named(const char *name)
{
    for (size_t i = 0; i < n_tensors; i++)
        if (!strcmp(tensors[i].name, name))
            return true;
    return false;
}

static void rename_tensor(struct draws *d, struct tensor *t)
{
    char name[96];
    const char *wrapper = draw(d, 8) ? "" : "module.", *module = modules[draw(d, MODULES)], *role = "pre_quant_scale";
    if (draw(d, 16)) {
        const int form = draw(d, 2);
        role = roles[form][draw(d, ROLES)];
    }
    snprintf(name, sizeof name, "%s%s.%s", wrapper, module, role);
    if (!is_named(name))
        memcpy(t->name, name, sizeof name);
}

static void damage(struct draws *d)
{
    static const nib_dtype bytes[] = { NIB_U8, NIB_E4M3, NIB_E5M2, NIB_I8 };
    const size_t i = (size_t)draw(d, (int)n_tensors);
    struct tensor *t = &tensors[i];
    switch (draw(d, 8)) {
    case 0:
        remove_tensor(i);
        break;
    case 1:
        rename_tensor(d, t);
        break;
    case 2:
        memset(t->data, (int)draw_bytes(d, 1), t->bytes);
        break;
    case 3: /* flat, or the dims exchanged */
        if (t->rank == 2 && draw(d, 2)) {
            t->rank = 1;
            t->shape[0] *= t->shape[1];
        } else if (t->rank == 2) {
            const int64_t rows = t->shape[0];
            t->shape[0] = t->shape[1];
            t->shape[1] = rows;
        } else {
            t->rank = t->rank == 1 && t->shape[0] == 1 ? 0 : 1;
            t->shape[0] = t->bytes == (size_t)nib_dtype_bits(t->dtype) / 8 ? 1 : t->shape[0];
        }
        break;
    case 4: /* fewer rows */
        if (t->rank > 0 && t->shape[0] > 1) {
            t->shape[0] /= 2;
            t->bytes /= 2;
        }
        break;
    case 5:
        if (nib_dtype_bits(t->dtype) == 8)
            t->dtype = bytes[draw(d, 4)];
        break;
    default: /* any bits somewhere: most often a scale */
        if (t->bytes >= 4) {
            const uint64_t at = (uint64_t)draw(d, 256) % (t->bytes / 4), bits = draw_bytes(d, 4);
            memcpy(t->data + 4 * at, &bits, 4);
        }
        break;
    }
}

static void write_tensors(const char *directory)
{
    char path[256];
    nib_writer *writer = NULL;
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    require(!nib_writer_create(path, &writer), "a file of tensors");
    for (size_t i = 0; i < n_tensors; i++)
        require(!nib_writer_declare(writer, tensors[i].name, tensors[i].dtype, tensors[i].rank, tensors[i].shape),
                "a tensor");
    for (size_t i = 0; i < n_tensors; i++)
        require(!nib_writer_write(writer, tensors[i].name, 0, tensors[i].data, tensors[i].bytes), "its data");
    require(!nib_writer_commit(writer), "the end of a file");
    nib_writer_destroy(writer);
}

/* A configuration from parts, some of them wrong, or the rest of the input. */
static void write_config(struct draws *d, const char *directory, int form, bool activations)
{
    static const char *const methods[] = { "compressed-tensors", "modelopt", "torchao", "" };
    static const char *const kinds[] = { "nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized" };
    static const char *const ignored[] = { "[]", "[\"lm_head\"]", "[\"re:.*q_proj\"]", "[\"*o_proj*\"]", "[\"re:(\"]",
                                           "{}" };
    static const char *const targets[] = { "Linear", "re:.*proj", "model.layers.0.mlp.down_proj", "Conv2d" };
    static const char *const algos[] = { "NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION" };
    char text[2048];
    const int kind = draw(d, 8);
    if (kind == 7) {
        put_file(directory, "config.json", d->bytes, d->left);
        return;
    }
    const int size = draw(d, 8) ? 16 : 32, bits = draw(d, 8) ? 4 : 8;
    const int method = draw(d, 4) ? form : draw(d, 4);
    char inputs[256] = "null";
    if (activations != !draw(d, 8))
        snprintf(inputs, sizeof inputs,
                 "{\"num_bits\": 4, \"type\": \"float\", \"strategy\": \"tensor_group\", "
                 "\"group_size\": 16, \"dynamic\": \"local\", \"symmetric\": true}");
    const char *kept = kinds[draw(d, 4) ? 0 : draw(d, 3)], *algo = algos[draw(d, 4) ? !activations : draw(d, 4)];
    const char *compressed = draw(d, 8) ? "compressed" : "frozen", *list = ignored[draw(d, 6)];
    snprintf(
        text, sizeof text,
        "{\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"quantization_config\": {\"quant_method\": \"%s\", "
        "\"format\": \"%s\", \"quant_algo\": \"%s\", \"quantization_status\": \"%s\", \"ignore\": %s, "
        "\"config_groups\": {\"group_0\": {\"targets\": [\"%s\"], \"input_activations\": %s, \"weights\": "
        "{\"num_bits\": %d, \"type\": \"float\", \"strategy\": \"tensor_group\", \"group_size\": %d, "
        "\"symmetric\": true, \"dynamic\": false}}}}}",
        methods[method], kept, algo, compressed, list, targets[draw(d, 2) ? 0 : draw(d, 4)], inputs, bits, size);
    if (kind == 6) /* no quantization_config at all */
        snprintf(text, sizeof text, "{\"model_type\": \"llama\", \"num_hidden_layers\": 1}");
    put_file(directory, "config.json", text, strlen(text));
}

/* ---- Repair ---- */

/* A module has something repairable, and something that is not. */
struct faults {
    bool repairable[MODULES], other[MODULES];
    bool elsewhere; /* repairable */
};

static int note_fault(void *context, const nib_finding *finding)
{
    struct faults *faults = context;
    bool found = false;
    look_at_finding(NULL, finding);
    for (int m = 0; m < MODULES; m++)
        if (strstr(finding->tensor, modules[m])) {
            faults->repairable[m] |= finding->repairable != 0;
            faults->other[m] |= !finding->repairable;
            found = true;
        }
    faults->elsewhere |= !found && finding->repairable;
    return 0;
}

static nib_status faults_of(const nib_checkpoint *c, struct faults *out)
{
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    *out = (struct faults){ 0 };
    return nib_checkpoint_check(c, NULL, &job, note_fault, out);
}

static bool any_repairable(const struct faults *f)
{
    bool any = f->elsewhere;
    for (int m = 0; m < MODULES; m++)
        any |= f->repairable[m];
    return any;
}

/* Codes are never changed. */
static void compare_codes(const nib_checkpoint *a, const nib_checkpoint *b)
{
    static uint8_t before[ROWS * COLS], after[ROWS * COLS];
    nib_checkpoint_facts facts = { .bytes = sizeof facts };
    require(!nib_checkpoint_get_facts(a, &facts), "facts");
    for (size_t i = 0; i < facts.weights; i++) {
        nib_weight w = { .bytes = sizeof w };
        size_t other;
        if (nib_checkpoint_get_weight(a, i, &w) || nib_checkpoint_find_weight(b, w.name, &other))
            continue;
        if (w.rows * w.cols <= ROWS * COLS && !nib_checkpoint_read_codes(a, i, 0, w.rows, before, NULL) &&
            !nib_checkpoint_read_codes(b, other, 0, w.rows, after, NULL))
            require(!memcmp(before, after, (size_t)(w.rows * ((w.cols + 1) / 2))), "codes after a repair");
    }
}

static void run_plan(nib_status status, nib_plan *plan, const char *out)
{
    const nib_run_options options = { .bytes = sizeof options, .force = 1 };
    nib_job job;
    nib_job_init(&job);
    job.threads = 1;
    require(known(status), "the status of a plan");
    if (!status)
        require(known(nib_plan_run(plan, out, &options, &job)), "the status of a run");
    nib_plan_destroy(plan);
}

/* What is made of an output, now and then. */
enum { DEQUANTIZE = 1, CONVERT = 4 };

/* What was written is a checkpoint as good as any. */
static void use_output(const nib_checkpoint *in, const char *out, const char *other, int use)
{
    nib_checkpoint *c = NULL;
    nib_plan *plan = NULL;
    struct faults left;
    require(!nib_checkpoint_open(out, &c), "opening what was repaired");
    compare_codes(in, c);
    require(!faults_of(c, &left), "a check of what was repaired");
    /* A module that is broken otherwise is left alone, and so is a configuration that cannot describe it. */
    bool broken = false;
    for (int m = 0; m < MODULES; m++) {
        require(!left.repairable[m] || left.other[m], modules[m]);
        broken |= left.other[m];
    }
    require(broken || !left.elsewhere, "repairable after a repair");
    nib_checkpoint_facts facts = { .bytes = sizeof facts };
    require(!nib_checkpoint_get_facts(c, &facts), "facts");
    const nib_checkpoint_format into = facts.format == NIB_CHECKPOINT_FORMAT_MODELOPT
                                           ? NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS
                                           : NIB_CHECKPOINT_FORMAT_MODELOPT;
    if (use == CONVERT || use == DEQUANTIZE) {
        const nib_status status = use == DEQUANTIZE
                                      ? nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_PLAIN, NIB_BF16, &plan)
                                      : nib_plan_convert(c, into, &plan);
        run_plan(status, plan, other);
    }
    nib_checkpoint_close(c);
}

static void repair(const char *in, const char *out, const char *other, int use)
{
    nib_checkpoint *c = NULL;
    nib_plan *plan = NULL;
    const nib_status opened = nib_checkpoint_open(in, &c);
    require(known(opened) && !opened == (c != NULL), "the status");
    if (!c)
        return;
    struct faults faults;
    const nib_status checked = faults_of(c, &faults);
    require(known(checked), "the status of a check");
    const nib_status status = nib_plan_repair(c, &plan);
    require(known(status) && !status == (plan != NULL), "a plan or none");
    require(status != NIB_ERR_MODE || !any_repairable(&faults), "something repairable that is not repaired");
    if (!status) {
        const nib_run_options options = { .bytes = sizeof options, .force = 1 };
        nib_job job;
        nib_job_init(&job);
        job.threads = 1;
        const nib_status ran = nib_plan_run(plan, out, &options, &job);
        require(known(ran), "the status of a repair");
        if (!ran)
            use_output(c, out, other, use);
    }
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static const char *in, *out, *other;
    struct draws d = { bytes, count };
    if (!in) {
        in = make_directory();
        out = make_directory();
        other = make_directory();
    }
    const int form = draw(&d, 2);
    const bool activations = draw(&d, 2);
    make_tensors(form, activations);
    for (int n = draw(&d, 6); n > 0 && n_tensors > 1; n--)
        damage(&d);
    write_tensors(in);
    write_config(&d, in, form, activations);
    repair(in, out, other, draw(&d, 8));
    return 0;
}

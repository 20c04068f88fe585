/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - what is wrong with an NVFP4 checkpoint: findings about tensors, numbers, fused groups and files.
 *
 * Tensors are looked at by their names, since a broken module makes no weight; numbers by weights, whatever checkpoint format
 * they are in. A fault that explains another keeps the other quiet: a tensor scale that is infinite is not also unequal.
 */
#include "check/check.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "format/codec.h"
#include "file/json.h"
#include "base/os.h"
#include "tensor/quantize.h"
#include "nib_file.h"
#include "nib_reference.h"

enum { BLOCK = 16, MARLIN_LEAST = 8 /* E4M3 code of 2^-6 */, LEAST_LARGEST = 0x60 /* 32 */ };

const char *nib_check_tensor(const nib_checkpoint *c, const struct nib_ck_weight *w, enum nib_ck_role role)
{
    return w->tensor[role] == NIB_NONE ? w->name : c->tensors[w->tensor[role]].name;
}

/* ---- Modules: NVFP4 tensors gathered by their names ---- */

static const struct nib_check_layout layouts[] = {
    { NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS,
      NIB_TENSOR_SCALE_DIVISOR,
      false,
      { ".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale" } },
    { NIB_CHECKPOINT_FORMAT_MODELOPT,
      NIB_TENSOR_SCALE_MULTIPLIER,
      false,
      { ".weight", ".weight_scale", ".weight_scale_2", ".input_scale" } },
    { NIB_CHECKPOINT_FORMAT_TORCHAO,
      NIB_TENSOR_SCALE_MULTIPLIER,
      false,
      { "._weight_qdata", "._weight_scale", "._weight_per_tensor_scale", "._weight_act_per_tensor_scale" } },
    { NIB_CHECKPOINT_FORMAT_MODELOPT,
      NIB_TENSOR_SCALE_MULTIPLIER,
      true,
      { "", "_weight_scale", "_weight_scale_2", "_input_scale" } },
};
enum { CT, MO, AO, STACK, LAYOUTS };

/* Companions of modules: tensors that say by their name whose they are. Where one name ends like another, the longer
 * comes first. */
enum {
    GLOBAL,
    INPUT_GLOBAL,
    PACKED,
    PER_TENSOR,
    ACT_PER_TENSOR,
    QDATA,
    AO_SCALE,
    SCALE_2,
    SCALE,
    INPUT,
    PRE_QUANT,
    STACK_SCALE_2,
    STACK_SCALE,
    STACK_INPUT,
    SUFFIXES
};
static const char *const suffixes[SUFFIXES] = {
    [GLOBAL] = ".weight_global_scale",
    [INPUT_GLOBAL] = ".input_global_scale",
    [PACKED] = ".weight_packed",
    [PER_TENSOR] = "._weight_per_tensor_scale",
    [ACT_PER_TENSOR] = "._weight_act_per_tensor_scale",
    [QDATA] = "._weight_qdata",
    [AO_SCALE] = "._weight_scale",
    [SCALE_2] = ".weight_scale_2",
    [SCALE] = ".weight_scale",
    [INPUT] = ".input_scale",
    [PRE_QUANT] = ".pre_quant_scale",
    [STACK_SCALE_2] = "_weight_scale_2",
    [STACK_SCALE] = "_weight_scale",
    [STACK_INPUT] = "_input_scale",
};

struct companion {
    const char *name; /* of the tensor */
    size_t length;    /* of the module's */
    uint32_t tensor;
    int suffix;
};

static int compare_companions(const void *a, const void *b)
{
    const struct companion *x = a, *y = b;
    const size_t length = x->length < y->length ? x->length : y->length;
    const int order = memcmp(x->name, y->name, length);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

static bool ends_in(const char *name, size_t length, const char *suffix, size_t *stem)
{
    const size_t bytes = strlen(suffix);
    if (length <= bytes || memcmp(name + length - bytes, suffix, bytes) != 0)
        return false;
    *stem = length - bytes;
    return true;
}

/* A tensor as a companion; ModelOpt's codes are one by their dtype. */
static bool is_companion(const struct nib_ck_tensor *t, struct companion *out)
{
    const size_t length = strlen(t->name);
    for (int i = 0; i < SUFFIXES; i++)
        if (ends_in(t->name, length, suffixes[i], &out->length)) {
            out->suffix = i;
            return true;
        }
    out->suffix = SUFFIXES;
    return t->dtype == NIB_U8 && ends_in(t->name, length, ".weight", &out->length);
}

/* A tensor of the module by what it is called; NIB_NONE without. */
static uint32_t find_named(const nib_checkpoint *c, const char *module, const char *suffix)
{
    char name[1024];
    const int length = snprintf(name, sizeof name, "%s%s", module, suffix);
    return length > 0 && (size_t)length < sizeof name ? nib_ck_find_tensor(c, name) : NIB_NONE;
}

static bool is_e4m3(const nib_checkpoint *c, uint32_t tensor)
{
    return tensor != NIB_NONE && c->tensors[tensor].dtype == NIB_E4M3;
}

/* Which layout the companions of a module speak of; LAYOUTS: they are not of NVFP4, or belong to nothing. */
static int layout_of(const nib_checkpoint *c, const char *module, const uint32_t *have)
{
    if (have[PACKED] != NIB_NONE) {
        const struct nib_ck_tensor *codes = &c->tensors[have[PACKED]];
        const struct nib_ck_tensor *scale = have[SCALE] == NIB_NONE ? NULL : &c->tensors[have[SCALE]];
        const bool mxfp4 = scale && have[GLOBAL] == NIB_NONE && (scale->dtype == NIB_U8 || scale->dtype == NIB_E8M0) &&
                           scale->rank == 2 && codes->rank == 2 && codes->shape[1] % 16 == 0 &&
                           scale->shape[1] == codes->shape[1] / 16;
        return mxfp4 || codes->dtype == NIB_I32 ? LAYOUTS : CT;
    }
    if (have[QDATA] != NIB_NONE)
        return AO;
    if (have[STACK_SCALE] != NIB_NONE || have[STACK_SCALE_2] != NIB_NONE) {
        const uint32_t codes = nib_ck_find_tensor(c, module);
        return codes != NIB_NONE && c->tensors[codes].dtype == NIB_U8 ? STACK : LAYOUTS;
    }
    const uint32_t weight = find_named(c, module, ".weight");
    if (weight != NIB_NONE)
        return c->tensors[weight].dtype == NIB_U8 ? MO : LAYOUTS;
    if (have[GLOBAL] != NIB_NONE || have[INPUT_GLOBAL] != NIB_NONE)
        return CT;
    if (have[SCALE_2] != NIB_NONE)
        return MO;
    if (is_e4m3(c, have[SCALE]))
        return c->format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS ? CT : MO;
    return LAYOUTS;
}

/* Tensors that speak another format's language. */
static nib_status check_names(struct nib_checking *k, const struct nib_check_module *m, const uint32_t *have)
{
    static const struct {
        int layout, suffix, instead;
        enum nib_ck_role role;
    } foreign[] = {
        { CT, SCALE_2, GLOBAL, NIB_ROLE_TENSOR_SCALE },
        { CT, INPUT, INPUT_GLOBAL, NIB_ROLE_INPUT },
        { MO, GLOBAL, SCALE_2, NIB_ROLE_TENSOR_SCALE },
        { MO, INPUT_GLOBAL, INPUT, NIB_ROLE_INPUT },
    };
    const nib_checkpoint *c = k->c;
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (m->layout == &layouts[foreign[i].layout] && have[foreign[i].suffix] != NIB_NONE &&
            have[foreign[i].instead] == NIB_NONE)
            TRY(nib_check_found(k, NIB_FAULT_MISNAMED, c->tensors[have[foreign[i].suffix]].name, "%s looks for %s",
                                nib_checkpoint_format_name(m->layout->format), suffixes[foreign[i].instead] + 1));
    if (have[PRE_QUANT] != NIB_NONE)
        TRY(nib_check_found(k, NIB_FAULT_PRE_QUANT_SCALE, c->tensors[have[PRE_QUANT]].name,
                            "activations are scaled before they are quantized"));
    return NIB_OK;
}

/* Whether a tensor scale or an input scale is there under a foreign name. */
static bool is_misnamed(const struct nib_check_module *m, const uint32_t *have, enum nib_ck_role role)
{
    if (m->layout == &layouts[CT])
        return have[role == NIB_ROLE_TENSOR_SCALE ? SCALE_2 : INPUT] != NIB_NONE;
    if (m->layout == &layouts[MO])
        return have[role == NIB_ROLE_TENSOR_SCALE ? GLOBAL : INPUT_GLOBAL] != NIB_NONE;
    return false;
}

/* ---- Tensors of a module ---- */

static const char *shape_text(const struct nib_ck_tensor *t, char *room, size_t bytes)
{
    size_t used = (size_t)snprintf(room, bytes, "[");
    for (int64_t i = 0; i < t->rank && used < bytes; i++)
        used += (size_t)snprintf(room + used, bytes - used, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    if (used < bytes)
        snprintf(room + used, bytes - used, "]");
    return room;
}

/* Whether what lies around a [rows, cols] matrix in a larger one is not zero, laid out in rows and in tiles alike. */
static nib_status is_padding_dirty(const nib_checkpoint *c, uint32_t tensor, int64_t rows, int64_t cols, bool *dirty)
{
    const struct nib_ck_tensor *t = &c->tensors[tensor];
    const int64_t all_rows = t->shape[0], all_cols = t->shape[1];
    *dirty = false;
    if (t->bytes == 0 || t->bytes > 64 << 20)
        return NIB_OK; /* nothing there, in any number of rows; or not worth the memory: padded it is, anyway */
    uint8_t *bytes = nib_alloc((size_t)t->bytes), *plain = nib_alloc((size_t)t->bytes);
    nib_status status = bytes && plain ? nib_ck_read(c, tensor, 0, bytes, (size_t)t->bytes)
                                       : nib_fail(NIB_ERR_MEMORY, "no memory for %s", t->name);
    if (!status && all_rows % 128 == 0 && all_cols % 4 == 0)
        status = nib_unswizzle_scales(bytes, all_rows, all_cols, all_cols, plain);
    else if (!status)
        memcpy(plain, bytes, (size_t)t->bytes);
    bool in_rows = false, in_tiles = false;
    for (int64_t r = 0; !status && r < all_rows; r++)
        for (int64_t i = 0; i < all_cols; i++)
            if (r >= rows || i >= cols) {
                in_rows |= bytes[r * all_cols + i] != 0;
                in_tiles |= plain[r * all_cols + i] != 0;
            }
    *dirty = in_rows && in_tiles;
    nib_free(bytes);
    nib_free(plain);
    return status;
}

static nib_status check_scale_shape(struct nib_checking *k, const struct nib_check_module *m)
{
    const nib_checkpoint *c = k->c;
    const struct nib_ck_tensor *t = &c->tensors[m->tensor[NIB_ROLE_SCALE]];
    const int64_t rows = m->rows, blocks = m->cols / BLOCK;
    char shape[256];
    shape_text(t, shape, sizeof shape);
    if (t->dtype != NIB_E4M3)
        return nib_check_found(k, NIB_FAULT_SCALE_DTYPE, t->name, "scales are %s",
                               t->dtype < NIB_DTYPE_COUNT ? nib_dtype_name(t->dtype) : "of a GGUF type");
    if (m->layout->stack) {
        const struct nib_ck_tensor *codes = &c->tensors[m->tensor[NIB_ROLE_DATA]];
        if (t->rank == 3 && t->shape[0] == codes->shape[0] &&
            ((t->shape[1] == blocks && t->shape[2] == rows) || (t->shape[1] == rows && t->shape[2] == blocks)))
            return NIB_OK;
        return nib_check_found(k, NIB_FAULT_SCALE_SHAPE, t->name, "scales are %s; codes ask for [%lld, %lld, %lld]",
                               shape, (long long)codes->shape[0], (long long)blocks, (long long)rows);
    }
    if (t->rank == 2 && t->shape[0] == rows && t->shape[1] == blocks)
        return NIB_OK;
    if (t->rank == 1)
        return nib_check_found(k, NIB_FAULT_SCALE_FLAT, t->name, "scales are %s; codes ask for [%lld, %lld]", shape,
                               (long long)rows, (long long)blocks);
    if (t->rank == 2 && t->shape[0] == nib_round_up(rows, 128) &&
        (t->shape[1] == nib_round_up(blocks, 4) || t->shape[1] == blocks)) {
        bool dirty;
        TRY(is_padding_dirty(c, m->tensor[NIB_ROLE_SCALE], rows, blocks, &dirty));
        return nib_check_found(k, dirty ? NIB_FAULT_SCALE_PADDING : NIB_FAULT_SCALE_PADDED, t->name,
                               "scales are %s instead of [%lld, %lld]%s", shape, (long long)rows, (long long)blocks,
                               dirty ? ", and what pads them is not zero" : "");
    }
    if (t->rank == 2 && t->shape[0] == rows && t->shape[1] > 0 && m->cols % t->shape[1] == 0)
        return nib_check_found(k, NIB_FAULT_GROUP_SIZE, t->name, "scales are %s: one for %lld values", shape,
                               (long long)(m->cols / t->shape[1]));
    return nib_check_found(k, NIB_FAULT_SCALE_SHAPE, t->name, "scales are %s; codes ask for [%lld, %lld]", shape,
                           (long long)rows, (long long)blocks);
}

static nib_status check_number_shape(struct nib_checking *k, const struct nib_check_module *m, enum nib_ck_role role)
{
    const struct nib_ck_tensor *t = &k->c->tensors[m->tensor[role]];
    int64_t values = 1;
    for (int64_t i = 0; i < t->rank; i++)
        if (!nib_mul(values, t->shape[i], &values))
            return NIB_OK; /* no such tensor can be opened */
    const struct nib_ck_tensor *codes = &k->c->tensors[m->tensor[NIB_ROLE_DATA]];
    const int64_t experts = m->layout->stack && codes->rank > 0 ? codes->shape[0] : 1;
    char shape[256];
    if (t->dtype != NIB_F32 && t->dtype != NIB_BF16 && t->dtype != NIB_F16)
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_SHAPE, t->name, "it is %s instead of F32",
                               nib_dtype_name(t->dtype));
    if (values != 1 && values != experts)
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_SHAPE, t->name, "it has shape %s instead of one number",
                               shape_text(t, shape, sizeof shape));
    return NIB_OK;
}

/* Codes and their scales: shapes that fit one another. */
static nib_status check_payload(struct nib_checking *k, struct nib_check_module *m)
{
    const struct nib_ck_tensor *codes = &k->c->tensors[m->tensor[NIB_ROLE_DATA]];
    const int64_t wanted_rank = m->layout->stack ? 3 : 2;
    bool fits = codes->dtype == NIB_U8 && codes->rank == wanted_rank;
    char shape[256];
    for (int64_t i = 0; i < codes->rank; i++)
        fits &= codes->shape[i] < (int64_t)1 << 48; /* larger ones are of tensors without elements */
    if (!fits)
        return nib_check_found(k, NIB_FAULT_CODES_SHAPE, codes->name, "codes are %s %s", nib_dtype_name(codes->dtype),
                               shape_text(codes, shape, sizeof shape));
    if (m->layout->stack) {
        /* Packed along dim 1 or along dim 2: the scales say which. */
        const uint32_t id = m->tensor[NIB_ROLE_SCALE];
        const struct nib_ck_tensor *scale = id == NIB_NONE ? NULL : &k->c->tensors[id];
        const bool last = scale && scale->rank == 3 && scale->shape[1] == codes->shape[1];
        m->rows = codes->shape[last ? 1 : 2];
        m->cols = codes->shape[last ? 2 : 1] * 2;
    } else {
        m->rows = codes->shape[0];
        m->cols = codes->shape[1] * 2;
    }
    if (m->cols % BLOCK)
        return nib_check_found(k, NIB_FAULT_CODES_COLUMNS, codes->name, "rows have %lld values, not a multiple of 16",
                               (long long)m->cols);
    if (m->tensor[NIB_ROLE_SCALE] == NIB_NONE)
        return nib_check_found(k, NIB_FAULT_SCALE_MISSING, m->name, "%s keeps block scales in %s, and it is not there",
                               nib_checkpoint_format_name(m->layout->format),
                               m->layout->roles[NIB_ROLE_SCALE] + !m->layout->stack);
    return check_scale_shape(k, m);
}

static nib_status check_tensors(struct nib_checking *k, struct nib_check_module *m, const uint32_t *have)
{
    TRY(check_names(k, m, have));
    if (m->tensor[NIB_ROLE_DATA] == NIB_NONE)
        return nib_check_found(k, NIB_FAULT_CODES_MISSING, m->name, "it has scales and no %s",
                               m->layout->roles[NIB_ROLE_DATA] + 1);
    const size_t before = k->found;
    TRY(check_payload(k, m));
    k->broken[m->tensor[NIB_ROLE_DATA]] = k->found != before;
    for (int role = NIB_ROLE_TENSOR_SCALE; role <= NIB_ROLE_INPUT; role++)
        if (m->tensor[role] != NIB_NONE) {
            const size_t so_far = k->found;
            TRY(check_number_shape(k, m, (enum nib_ck_role)role));
            k->broken[m->tensor[role]] = k->found != so_far;
        }
    if (m->tensor[NIB_ROLE_TENSOR_SCALE] == NIB_NONE && m->layout->format != NIB_CHECKPOINT_FORMAT_TORCHAO &&
        !is_misnamed(m, have, NIB_ROLE_TENSOR_SCALE))
        TRY(nib_check_found(k, NIB_FAULT_TENSOR_SCALE_MISSING, m->name,
                            "%s keeps the number per tensor in %s, and it is not there",
                            nib_checkpoint_format_name(m->layout->format),
                            m->layout->roles[NIB_ROLE_TENSOR_SCALE] + !m->layout->stack));
    return NIB_OK;
}

/* Input scales can only be missed once it is known whether there should be any. */
static nib_status check_inputs(struct nib_checking *k)
{
    for (size_t i = 0; i < k->n_modules; i++) {
        const struct nib_check_module *m = &k->modules[i];
        if (m->tensor[NIB_ROLE_DATA] == NIB_NONE || m->tensor[NIB_ROLE_INPUT] != NIB_NONE ||
            m->layout->format == NIB_CHECKPOINT_FORMAT_TORCHAO || !nib_check_wants_input(k, m->name))
            continue;
        const char *foreign = m->layout == &layouts[CT] ? suffixes[INPUT] : suffixes[INPUT_GLOBAL];
        if (find_named(k->c, m->name, foreign) == NIB_NONE)
            TRY(nib_check_found(k, NIB_FAULT_INPUT_MISSING, m->name, "activations are quantized, and %s is not there",
                                m->layout->roles[NIB_ROLE_INPUT] + !m->layout->stack));
    }
    return NIB_OK;
}

/* One module: companions first..last-1 of the sorted list. */
static nib_status take_module(struct nib_checking *k, const struct companion *first, const struct companion *last,
                              char *name)
{
    const nib_checkpoint *c = k->c;
    uint32_t have[SUFFIXES + 1];
    for (int i = 0; i <= SUFFIXES; i++)
        have[i] = NIB_NONE;
    for (const struct companion *p = first; p < last; p++)
        have[p->suffix] = p->tensor;
    memcpy(name, first->name, first->length);
    name[first->length] = 0;
    const int layout = layout_of(c, name, have);
    if (layout == LAYOUTS) {
        /* Scales of FP8 and the like are F32; E4M3 ones belong to packed codes. */
        const uint32_t stray = is_e4m3(c, have[SCALE])    ? have[SCALE]
                               : have[GLOBAL] != NIB_NONE ? have[GLOBAL]
                                                          : have[SCALE_2];
        const uint32_t weight = find_named(c, name, ".weight");
        if (stray != NIB_NONE && weight != NIB_NONE && have[PACKED] == NIB_NONE && c->tensors[weight].dtype != NIB_E4M3)
            TRY(nib_check_found(k, NIB_FAULT_STRAY, c->tensors[stray].name, "the module's weight is %s",
                                nib_dtype_name(c->tensors[weight].dtype)));
        return NIB_OK;
    }
    struct nib_check_module *m = &k->modules[k->n_modules++];
    m->name = name;
    m->layout = &layouts[layout];
    for (int role = 0; role < NIB_ROLE_COUNT; role++)
        m->tensor[role] = find_named(c, name, m->layout->roles[role]);
    k->has_inputs |= m->tensor[NIB_ROLE_INPUT] != NIB_NONE;
    return check_tensors(k, m, have);
}

static nib_status check_modules(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    struct companion *list = nib_alloc((c->n_tensors + 1) * sizeof *list);
    if (!list)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its modules", c->path);
    size_t n = 0, names = 1;
    for (size_t i = 0; i < c->n_tensors; i++) {
        struct companion *p = &list[n];
        if (c->tensors[i].ggml_type >= 0 || !is_companion(&c->tensors[i], p))
            continue;
        p->name = c->tensors[i].name;
        p->tensor = (uint32_t)i;
        names += p->length + 1;
        n++;
    }
    qsort(list, n, sizeof *list, compare_companions);
    k->modules = nib_alloc((n + 1) * sizeof *k->modules);
    k->names = nib_alloc(names);
    nib_status status =
        k->modules && k->names ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "%s: no memory for its modules", c->path);
    char *name = k->names;
    for (size_t i = 0, next; !status && i < n; i = next) {
        for (next = i + 1; next < n && compare_companions(&list[i], &list[next]) == 0;)
            next++;
        status = take_module(k, &list[i], &list[next], name);
        name += list[i].length + 1;
    }
    nib_free(list);
    return status;
}

static nib_status check_wrapped_names(struct nib_checking *k)
{
    static const char *const wrappers[] = { "_orig_mod.", "module.", "_fsdp_wrapped_module." };
    for (size_t i = 0; i < k->c->n_tensors; i++)
        for (size_t j = 0; j < sizeof wrappers / sizeof *wrappers; j++) {
            const char *name = k->c->tensors[i].name, *at = strstr(name, wrappers[j]);
            const bool starts = at && (at == name || (j != 1 && at[-1] == '.'));
            if (starts)
                TRY(nib_check_found(k, NIB_FAULT_WRAPPED_NAME, name, "its name has the wrapper %s of training",
                                    wrappers[j]));
        }
    return NIB_OK;
}

/* ---- Numbers of a weight ---- */

/* What its bytes say, gathered on threads. */
struct scan {
    int64_t blocks, nan, negative;
    int64_t zero, subnormal; /* blocks with such a scale that have something in them */
    uint8_t largest;
    bool nonzero;
    bool unreadable; /* DATA, and not because of something that was said already */
};

struct scanning {
    struct nib_checking *k;
    struct scan *scans;
    atomic_size_t next;
    atomic_int stop;
    atomic_flag busy;
    atomic_ullong done;
    nib_error *errors;
};

static bool is_block_empty(const uint8_t *codes, int64_t bytes)
{
    uint64_t all = 0;
    if (bytes == 8)
        memcpy(&all, codes, 8);
    else
        for (int64_t i = 0; i < bytes; i++)
            all |= codes[i];
    return (all & 0x7777777777777777u) == 0; /* the sign of a zero does not count */
}

static void scan_row(const uint8_t *codes, const uint8_t *scales, int64_t cols, struct scan *scan)
{
    const int64_t blocks = nib_ceil_div(cols, BLOCK), bytes = nib_ceil_div(cols, 2);
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t s = scales[b] & 0x7F;
        const bool empty = is_block_empty(codes + 8 * b, nib_min(8, bytes - 8 * b));
        scan->nonzero |= !empty;
        scan->nan += s == 0x7F;
        scan->negative += scales[b] >= 0x80 && s != 0x7F;
        scan->zero += !empty && s == 0;
        scan->subnormal += !empty && s > 0 && s < MARLIN_LEAST;
        if (s != 0x7F && s > scan->largest)
            scan->largest = s;
    }
    scan->blocks += blocks;
}

static nib_status scan_weight(const nib_checkpoint *c, const struct nib_ck_weight *w, uint64_t memory, struct scan *out)
{
    const int64_t blocks = nib_ceil_div(w->cols, BLOCK), bytes = nib_ceil_div(w->cols, 2);
    const uint64_t usual = 4 << 20, room = w->transposed ? memory / 4 : memory < usual ? memory : usual;
    const int64_t panel = nib_max(1, nib_min(w->rows, (int64_t)(room / (uint64_t)nib_max(1, blocks + bytes))));
    uint8_t *codes = nib_alloc((size_t)(panel * bytes)), *scales = nib_alloc((size_t)(panel * blocks));
    nib_status status = codes && scales ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "no memory for rows of %s", w->name);
    struct scan scan = { 0 };
    for (int64_t first = 0; !status && first < w->rows; first += panel) {
        const int64_t count = nib_min(panel, w->rows - first);
        status = nib_ck_read_codes(c, w, first, count, codes, scales);
        for (int64_t r = 0; !status && r < count; r++)
            scan_row(codes + r * bytes, scales + r * blocks, w->cols, &scan);
    }
    nib_free(codes);
    nib_free(scales);
    if (!status)
        *out = scan;
    return status;
}

static uint64_t scanned_bytes(const struct nib_ck_weight *w)
{
    return nib_ck_is_nvfp4(w->format) ? (uint64_t)w->rows * (uint64_t)w->cols / 16 * 9 : 0;
}

static void scan_some(void *context, int64_t worker)
{
    struct scanning *s = context;
    const nib_checkpoint *c = s->k->c;
    while (!atomic_load(&s->stop)) {
        const size_t i = atomic_fetch_add(&s->next, 1);
        if (i >= c->n_weights)
            return;
        const struct nib_ck_weight *w = &c->weights[i];
        nib_status status = NIB_OK;
        if (nib_ck_is_nvfp4(w->format) && !s->k->broken[w->tensor[NIB_ROLE_DATA]])
            status = scan_weight(c, w, s->k->job.max_memory / (uint64_t)s->k->job.threads, &s->scans[i]);
        if (status == NIB_ERR_DATA) {
            s->scans[i].unreadable = true;
            status = NIB_OK;
        }
        const uint64_t done = atomic_fetch_add(&s->done, scanned_bytes(w));
        if (!status && s->k->job.progress && !atomic_flag_test_and_set(&s->busy)) {
            status = nib_ck_report(&s->k->job, "checking", w->name, done, s->k->total);
            atomic_flag_clear(&s->busy);
        }
        if (status) {
            nib_get_error(&s->errors[worker]);
            atomic_store(&s->stop, 1);
            return;
        }
    }
}

static nib_status scan_all(struct nib_checking *k, struct scan *scans)
{
    nib_error *errors = nib_alloc_zeroed((size_t)k->job.threads * sizeof *errors);
    if (!errors)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for a check", k->c->path);
    struct scanning s = { .k = k, .scans = scans, .errors = errors };
    atomic_flag_clear(&s.busy);
    nib_parallel(k->job.threads, k->job.threads, scan_some, &s);
    nib_status status = NIB_OK;
    for (int i = 0; !status && i < k->job.threads; i++)
        if (errors[i].status)
            status = nib_fail(errors[i].status, "%s", errors[i].text);
    nib_free(errors);
    return status;
}

/* The largest magnitude that a weight can have with this multiplier. */
static double amax_of(const struct nib_check_weight *w, double multiplier)
{
    return (double)nib_f32_from_e4m3(w->largest) * 6 * multiplier;
}

static double multiplier_of(const struct nib_check_weight *w)
{
    return w->kind == NIB_TENSOR_SCALE_DIVISOR ? 1 / (double)w->tensor_scale : (double)w->tensor_scale;
}

/* Weights of models are smaller than a thousand, and their inverses are not. */
static bool is_inverted(const struct nib_check_weight *w)
{
    enum { LARGEST = 1000 };
    const double stored = multiplier_of(w);
    return amax_of(w, stored) > LARGEST && amax_of(w, 1 / stored) < LARGEST && amax_of(w, 1 / stored) > 1e-5;
}

/* An activation beyond 10^5 has no place in FP16 and no model has it. */
static bool is_input_inverted(const struct nib_check_weight *w)
{
    const double stored = w->kind == NIB_TENSOR_SCALE_DIVISOR ? 1 / (double)w->input : (double)w->input;
    return stored * 2688 > 1e5 && 2688 / stored < 1e5;
}

static nib_status check_tensor_scale(struct nib_checking *k, const struct nib_ck_weight *w, const struct scan *scan,
                                     struct nib_check_weight *out)
{
    const char *tensor = nib_check_tensor(k->c, w, NIB_ROLE_TENSOR_SCALE);
    if (w->tensor[NIB_ROLE_TENSOR_SCALE] == NIB_NONE) {
        out->tensor_scale_good =
            w->format == NIB_CHECKPOINT_FORMAT_GGUF || w->format == NIB_CHECKPOINT_FORMAT_TORCHAO; /* it is 1 then */
        return NIB_OK;
    }
    if (k->broken[w->tensor[NIB_ROLE_TENSOR_SCALE]])
        return NIB_OK;
    TRY(nib_ck_read_tensor_scale(k->c, w, &out->kind, &out->tensor_scale));
    if (!isfinite(out->tensor_scale))
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_NOT_FINITE, tensor, "it is %g", (double)out->tensor_scale);
    if (out->tensor_scale < 0 || (out->tensor_scale == 0 && out->kind != NIB_TENSOR_SCALE_AMAX))
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_NOT_POSITIVE, tensor, "it is %g", (double)out->tensor_scale);
    if (scan->nonzero && out->kind != NIB_TENSOR_SCALE_AMAX && is_inverted(out)) {
        out->tensor_scale_inverted = true;
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_INVERTED, tensor,
                               "%g as a %s makes weights of up to %.3g, its inverse %.3g", (double)out->tensor_scale,
                               out->kind == NIB_TENSOR_SCALE_DIVISOR ? "divisor" : "multiplier",
                               amax_of(out, multiplier_of(out)), amax_of(out, 1 / multiplier_of(out)));
    }
    out->tensor_scale_good = true;
    return NIB_OK;
}

static nib_status check_input(struct nib_checking *k, const struct nib_ck_weight *w, struct nib_check_weight *out)
{
    const char *tensor = nib_check_tensor(k->c, w, NIB_ROLE_INPUT);
    int has_input;
    if (w->tensor[NIB_ROLE_INPUT] == NIB_NONE || k->broken[w->tensor[NIB_ROLE_INPUT]])
        return NIB_OK;
    TRY(nib_ck_read_input(k->c, w, &has_input, &out->input));
    if (!isfinite(out->input))
        return nib_check_found(k, NIB_FAULT_INPUT_NOT_FINITE, tensor, "it is %g", (double)out->input);
    if (out->input <= 0)
        return nib_check_found(k, NIB_FAULT_INPUT_NOT_POSITIVE, tensor, "it is %g", (double)out->input);
    out->input_inverted = is_input_inverted(out);
    if (out->input_inverted)
        return nib_check_found(
            k, NIB_FAULT_INPUT_INVERTED, tensor, "%g as a %s expects activations of up to %.3g", (double)out->input,
            out->kind == NIB_TENSOR_SCALE_DIVISOR ? "divisor" : "multiplier",
            2688 * (out->kind == NIB_TENSOR_SCALE_DIVISOR ? 1 / (double)out->input : (double)out->input));
    out->input_good = true;
    return NIB_OK;
}

static nib_status check_scales(struct nib_checking *k, const struct nib_ck_weight *w, const struct scan *scan)
{
    const char *tensor =
        nib_check_tensor(k->c, w, w->tensor[NIB_ROLE_SCALE] == NIB_NONE ? NIB_ROLE_DATA : NIB_ROLE_SCALE);
    const long long blocks = scan->blocks;
    if (scan->nan)
        TRY(nib_check_found(k, NIB_FAULT_SCALE_NAN, tensor, "%lld of %lld scales are NaN", (long long)scan->nan,
                            blocks));
    if (scan->negative)
        TRY(nib_check_found(k, NIB_FAULT_SCALE_NEGATIVE, tensor, "%lld of %lld scales have their sign bit set",
                            (long long)scan->negative, blocks));
    if (scan->zero)
        TRY(nib_check_found(k, NIB_FAULT_SCALE_ZERO, tensor, "%lld of %lld blocks have scale 0 and codes that are not",
                            (long long)scan->zero, blocks));
    if (scan->subnormal)
        TRY(nib_check_found(
            k, scan->subnormal * 100 >= scan->blocks ? NIB_FAULT_SCALE_SUBNORMAL : NIB_FAULT_SCALE_SUBNORMAL_FEW,
            tensor, "%lld of %lld blocks have a scale below 2^-6", (long long)scan->subnormal, blocks));
    return NIB_OK;
}

static nib_status check_weight(struct nib_checking *k, size_t i, const struct scan *scan)
{
    const struct nib_ck_weight *w = &k->c->weights[i];
    struct nib_check_weight *out = &k->weights[i];
    uint8_t none;
    out->nvfp4 = true;
    out->nonzero = scan->nonzero;
    out->largest = scan->largest;
    out->kind = w->tensor_scale;
    out->tensor_scale = 1;
    if (scan->unreadable && nib_ck_read_codes(k->c, w, 0, 0, &none, &none))
        return nib_check_found(k, NIB_FAULT_UNREADABLE, w->name, "%s", nib_last_error());
    out->all_nan = scan->blocks && scan->nan == scan->blocks && !scan->nonzero;
    if (out->all_nan) {
        TRY(nib_check_found(k, NIB_FAULT_SCALE_ALL_NAN, nib_check_tensor(k->c, w, NIB_ROLE_SCALE),
                            "all %lld scales are NaN and all codes 0", (long long)scan->blocks));
    } else {
        TRY(check_tensor_scale(k, w, scan, out));
        TRY(check_scales(k, w, scan));
    }
    return check_input(k, w, out);
}

static nib_status check_weights(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    struct scan *scans = nib_alloc_zeroed((c->n_weights + 1) * sizeof *scans);
    if (!scans)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for a check", c->path);
    nib_status status = scan_all(k, scans);
    for (size_t i = 0; !status && i < c->n_weights; i++)
        if (nib_ck_is_nvfp4(c->weights[i].format))
            status = check_weight(k, i, &scans[i]);
    nib_free(scans);
    return status;
}

/* ---- Fused groups ---- */

static int compare_members(const void *a, const void *b)
{
    const struct nib_check_member *x = a, *y = b;
    const int order = strcmp(x->key, y->key);
    return order ? order : (x->weight > y->weight) - (x->weight < y->weight);
}

nib_status nib_check_members(const nib_checkpoint *c, struct nib_check_groups *out)
{
    struct nib_check_groups groups = { 0 };
    struct nib_text text = { 0 };
    char key[1024];
    groups.members = nib_alloc((c->n_weights + 1) * sizeof *groups.members);
    bool good = groups.members != NULL;
    for (size_t i = 0; good && i < c->n_weights; i++) {
        if (!nib_ck_fused_key(c->weights[i].name, key, sizeof key))
            continue;
        groups.members[groups.n++] = (struct nib_check_member){ NULL, text.used, (uint32_t)i };
        good = nib_text_put(&text, key, strlen(key) + 1);
    }
    if (!good) {
        nib_free(groups.members);
        nib_free(text.bytes);
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its groups", c->path);
    }
    for (size_t i = 0; i < groups.n; i++)
        groups.members[i].key = text.bytes + groups.members[i].offset;
    qsort(groups.members, groups.n, sizeof *groups.members, compare_members);
    groups.text = text.bytes;
    *out = groups;
    return NIB_OK;
}

void nib_check_free_members(struct nib_check_groups *groups)
{
    nib_free(groups->members);
    nib_free(groups->text);
}

size_t nib_check_group_end(const struct nib_check_groups *groups, size_t first)
{
    size_t end = first + 1;
    while (end < groups->n && strcmp(groups->members[end].key, groups->members[first].key) == 0)
        end++;
    return end;
}

bool nib_check_is_fused(nib_checkpoint_format format)
{
    return format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS || format == NIB_CHECKPOINT_FORMAT_MODELOPT;
}

static nib_status check_group(struct nib_checking *k, const struct nib_check_member *first, size_t n)
{
    const nib_checkpoint *c = k->c;
    const struct nib_check_weight *tensor_scale = NULL, *input = NULL;
    const char *tensor_scale_of = NULL, *input_of = NULL;
    const struct nib_ck_weight *plain = NULL, *packed = NULL;
    bool tensor_scales_told = false, inputs_told = false;
    for (size_t i = 0; i < n; i++) {
        const struct nib_ck_weight *w = &c->weights[first[i].weight];
        const struct nib_check_weight *x = &k->weights[first[i].weight];
        if (!x->nvfp4 || !nib_check_is_fused(w->format)) {
            plain = x->nvfp4 ? plain : w;
            continue;
        }
        packed = w;
        if (tensor_scale && x->tensor_scale_good && x->tensor_scale != tensor_scale->tensor_scale &&
            !tensor_scales_told) {
            TRY(nib_check_found(k, NIB_FAULT_FUSED_TENSOR_SCALES, nib_check_tensor(c, w, NIB_ROLE_TENSOR_SCALE),
                                "it is %.9g, that of %s is %.9g", (double)x->tensor_scale, tensor_scale_of,
                                (double)tensor_scale->tensor_scale));
            tensor_scales_told = true;
        }
        if (input && x->input_good && x->input != input->input && !inputs_told) {
            TRY(nib_check_found(k, NIB_FAULT_FUSED_INPUTS, nib_check_tensor(c, w, NIB_ROLE_INPUT),
                                "it is %.9g, that of %s is %.9g", (double)x->input, input_of, (double)input->input));
            inputs_told = true;
        }
        if (!tensor_scale && x->tensor_scale_good)
            tensor_scale = x, tensor_scale_of = w->name;
        if (!input && x->input_good)
            input = x, input_of = w->name;
    }
    if (plain && packed)
        return nib_check_found(k, NIB_FAULT_FUSED_PARTLY, packed->name, "it is quantized, and %s is not", plain->name);
    return NIB_OK;
}

/* The largest scale of those who share a tensor scale is near the end of E4M3, or the tensor scale is too large. */
static nib_status check_range(struct nib_checking *k, const struct nib_check_member *first, size_t n)
{
    uint8_t largest = 0;
    bool known = true, nonzero = false;
    for (size_t i = 0; i < n; i++) {
        const struct nib_check_weight *x = &k->weights[first[i].weight];
        known &= x->nvfp4 && x->tensor_scale_good && x->kind != NIB_TENSOR_SCALE_AMAX;
        nonzero |= x->nonzero;
        largest = x->largest > largest ? x->largest : largest;
    }
    if (!known || !nonzero || largest >= LEAST_LARGEST)
        return NIB_OK;
    const struct nib_ck_weight *w = &k->c->weights[first->weight];
    return nib_check_found(k, NIB_FAULT_SCALE_RANGE, nib_check_tensor(k->c, w, NIB_ROLE_TENSOR_SCALE),
                           "the largest block scale is %g of 448", (double)nib_f32_from_e4m3(largest));
}

static nib_status check_groups(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    struct nib_check_groups groups;
    TRY(nib_check_members(c, &groups));
    bool *grouped = nib_alloc_zeroed(c->n_weights + 1);
    nib_status status = grouped ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "%s: no memory for its groups", c->path);
    for (size_t i = 0, end; !status && i < groups.n; i = end) {
        end = nib_check_group_end(&groups, i);
        status = check_group(k, &groups.members[i], end - i);
        const bool shares = nib_check_is_fused(c->weights[groups.members[i].weight].format);
        for (size_t j = i; j < end && shares; j++)
            grouped[groups.members[j].weight] = true;
        if (!status && shares)
            status = check_range(k, &groups.members[i], end - i);
    }
    for (size_t i = 0; !status && i < c->n_weights; i++)
        if (!grouped[i] && k->weights[i].nvfp4)
            status = check_range(k, &(struct nib_check_member){ .weight = (uint32_t)i }, 1);
    nib_free(grouped);
    nib_check_free_members(&groups);
    return status;
}

/* ---- Files ---- */

static nib_status check_files(struct nib_checking *k)
{
    /* What opening remarked by these words is a finding under the same. */
    static const enum nib_fault diagnostics[] = { NIB_FAULT_STALE_SHARD, NIB_FAULT_UNINDEXED, NIB_FAULT_REPEATED,
                                                  NIB_FAULT_ORIENTATION };
    const nib_checkpoint *c = k->c;
    for (size_t i = 0; i < c->n_diagnostics; i++)
        for (size_t j = 0; j < sizeof diagnostics / sizeof *diagnostics; j++)
            if (strcmp(nib_check_id(diagnostics[j]), c->diagnostics[i].id) == 0)
                TRY(nib_check_found(k, diagnostics[j], c->diagnostics[i].subject, "%s", c->diagnostics[i].fact));
    for (size_t i = 0; i < c->n_files; i++) {
        const struct nib_ck_file *file = &c->files[i];
        const char *format = file->safetensors ? nib_file_metadata(file->safetensors, "format") : "pt";
        if (!format)
            TRY(nib_check_found(k, NIB_FAULT_METADATA, file->name, "its metadata has no \"format\""));
        else if (strcmp(format, "pt") != 0)
            TRY(nib_check_found(k, NIB_FAULT_METADATA, file->name, "its metadata says format %s",
                                nib_quote(format).text));
    }
    return NIB_OK;
}

/* ---- All of it ---- */

static nib_status run_checks(struct nib_checking *k)
{
    static nib_status (*const checks[])(struct nib_checking * k) = {
        check_files,  check_modules,    check_wrapped_names, check_weights,   check_inputs,
        check_groups, nib_check_config, nib_check_original,  nib_check_guess,
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        TRY(checks[i](k));
    return NIB_OK;
}

nib_status nib_check_run(struct nib_checking *k, const char *what, const nib_job *job)
{
    const nib_checkpoint *c = k->c;
    TRY(nib_ck_job(what, job, &k->job));
    for (size_t i = 0; i < c->n_weights; i++)
        k->total += scanned_bytes(&c->weights[i]);
    k->weights = nib_alloc_zeroed((c->n_weights + 1) * sizeof *k->weights);
    k->broken = nib_alloc_zeroed(c->n_tensors + 1);
    const nib_fpenv saved = nib_fpenv_enter();
    const nib_status status =
        k->weights && k->broken ? run_checks(k) : nib_fail(NIB_ERR_MEMORY, "%s: no memory for a check", c->path);
    nib_fpenv_leave(saved);
    return status;
}

void nib_check_end(struct nib_checking *k)
{
    nib_free(k->weights);
    nib_free(k->broken);
    nib_free(k->modules);
    nib_free(k->names);
}

nib_status nib_checkpoint_check(const nib_checkpoint *checkpoint, const nib_checkpoint *against, const nib_job *job,
                                int (*each)(void *context, const nib_finding *finding), void *context)
{
    NIB_REQUIRE(checkpoint);
    NIB_REQUIRE(each);
    struct nib_checking k = { .c = checkpoint, .original = against, .each = each, .context = context };
    const nib_status status = nib_check_run(&k, "nib_checkpoint_check: job", job);
    nib_check_end(&k);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_tensors.c - tensors by their names: which modules there are, what each lacks, and shapes and dtypes that do not
 * fit. A broken module makes no weight, so that only names can tell what it should be.
 */
#include "check/check.h"
#include "nib_reference.h"

#include <stdio.h>
#include <stdlib.h>

enum { BLOCK = 16 };

/* ---- Companions: tensors that say by their name whose they are ---- */

enum { MOST_SUFFIXES = NIB_CHECKPOINT_FORMAT_COUNT * NIB_CK_LAYOUTS * NIB_ROLE_COUNT + 1 };

/* Suffixes of the formats whose modules can be told by their names. */
struct suffixes {
    const char *each[MOST_SUFFIXES]; /* where one ends like another, the longer comes first */
    int n;
};

/* The tensors of a module, by the suffix. */
struct companions {
    const struct suffixes *suffixes;
    uint32_t have[MOST_SUFFIXES];
};

struct companion {
    const char *name; /* of the tensor */
    size_t length;    /* of the module's */
    uint32_t tensor;
    int suffix; /* -1: it is data, by its dtype */
};

/* Layouts that a check knows, one after the other; NULL behind the last. */
static const struct nib_ck_layout *next_layout(int *at, nib_checkpoint_format *format)
{
    while (*at < NIB_CHECKPOINT_FORMAT_COUNT * NIB_CK_LAYOUTS) {
        const int i = (*at)++;
        const struct nib_ck_layout *layout = &nib_ck_formats[i / NIB_CK_LAYOUTS].layouts[i % NIB_CK_LAYOUTS];
        *format = (nib_checkpoint_format)(i / NIB_CK_LAYOUTS);
        if (layout->own)
            return layout;
    }
    return NULL;
}

static void add_suffix(struct suffixes *s, const char *suffix)
{
    int at = 0;
    for (int i = 0; i < s->n; i++)
        if (strcmp(s->each[i], suffix) == 0)
            return;
    while (at < s->n && strlen(s->each[at]) >= strlen(suffix))
        at++;
    memmove(s->each + at + 1, s->each + at, (size_t)(s->n - at) * sizeof *s->each);
    s->each[at] = suffix;
    s->n++;
}

/* Data that shares its suffix with plain weights is no companion by its name. */
static void list_suffixes(struct suffixes *s)
{
    const struct nib_ck_layout *layout;
    nib_checkpoint_format format;
    s->n = 0;
    for (int at = 0; (layout = next_layout(&at, &format));)
        for (int role = 0; role < NIB_ROLE_COUNT; role++)
            if (role != NIB_ROLE_DATA || (layout->own & NIB_ROLE_BIT(NIB_ROLE_DATA)))
                add_suffix(s, layout->suffixes[role]);
    add_suffix(s, NIB_PRE_QUANT_SCALE);
}

static uint32_t find_suffix(const struct companions *c, const char *suffix)
{
    for (int i = 0; i < c->suffixes->n; i++)
        if (strcmp(c->suffixes->each[i], suffix) == 0)
            return c->have[i];
    return NIB_NONE;
}

static uint32_t find_role(const struct companions *c, const struct nib_ck_layout *layout, enum nib_ck_role role)
{
    return find_suffix(c, layout->suffixes[role]);
}

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

/* A tensor as a companion; codes whose suffix plain weights have too are one by their dtype. */
static bool is_companion(const struct suffixes *s, const struct nib_ck_tensor *t, struct companion *out)
{
    const size_t length = strlen(t->name);
    const struct nib_ck_layout *layout;
    nib_checkpoint_format format;
    for (int i = 0; i < s->n; i++)
        if (ends_in(t->name, length, s->each[i], &out->length)) {
            out->suffix = i;
            return true;
        }
    out->suffix = -1;
    for (int at = 0; (layout = next_layout(&at, &format));)
        if (*layout->suffixes[NIB_ROLE_DATA] && (layout->data & NIB_DTYPE_BIT(t->dtype)) &&
            ends_in(t->name, length, layout->suffixes[NIB_ROLE_DATA], &out->length))
            return true;
    return false;
}

/* A tensor of the module by what it is called; NIB_NONE without. */
static uint32_t find_named(const nib_checkpoint *c, const char *module, const char *suffix)
{
    char name[1024];
    const int length = snprintf(name, sizeof name, "%s%s", module, suffix);
    return length > 0 && (size_t)length < sizeof name ? nib_ck_find_tensor(c, name) : NIB_NONE;
}

static bool has_dtype(const nib_checkpoint *c, uint32_t tensor, uint32_t dtypes)
{
    return tensor != NIB_NONE && (dtypes & NIB_DTYPE_BIT(c->tensors[tensor].dtype));
}

/* ---- Modules ---- */

/* compressed-tensors' mxfp4-pack-quantized and its integer formats use the same names. */
static bool is_other_format(const nib_checkpoint *c, const struct companions *have, const struct nib_ck_layout *layout)
{
    const uint32_t id = find_role(have, layout, NIB_ROLE_SCALE);
    const struct nib_ck_tensor *codes = &c->tensors[find_role(have, layout, NIB_ROLE_DATA)];
    const struct nib_ck_tensor *scale = id == NIB_NONE ? NULL : &c->tensors[id];
    const bool mxfp4 = scale && find_role(have, layout, NIB_ROLE_TENSOR_SCALE) == NIB_NONE &&
                       (scale->dtype == NIB_U8 || scale->dtype == NIB_E8M0) && scale->rank == 2 && codes->rank == 2 &&
                       codes->shape[1] % 16 == 0 && scale->shape[1] == codes->shape[1] / 16;
    return mxfp4 || codes->dtype == NIB_I32;
}

/* Whether a companion tells the layout: a tensor scale that no one else calls so, or any such scale of a stack. */
static bool is_told(const struct companions *have, const struct nib_ck_layout *layout)
{
    for (int role = NIB_ROLE_SCALE; role < NIB_ROLE_COUNT; role++)
        if ((layout->own & NIB_ROLE_BIT(role)) && find_role(have, layout, (enum nib_ck_role)role) != NIB_NONE)
            return true;
    return false;
}

/* Which layout the companions of a module speak of; NULL: they are not of NVFP4, or belong to nothing. Codes tell it
 * best, then scales whose name one format alone has. */
static const struct nib_ck_layout *layout_of(const nib_checkpoint *c, const char *module, const struct companions *have,
                                             nib_checkpoint_format *format)
{
    const struct nib_ck_layout *layout, *by_scale = NULL;
    nib_checkpoint_format found = NIB_CHECKPOINT_FORMAT_PLAIN;
    for (int at = 0; (layout = next_layout(&at, format));)
        if ((layout->own & NIB_ROLE_BIT(NIB_ROLE_DATA)) && find_role(have, layout, NIB_ROLE_DATA) != NIB_NONE)
            return is_other_format(c, have, layout) ? NULL : layout;
    for (int at = 0; (layout = next_layout(&at, format));)
        if (layout->stacking == NIB_STACK_EXPERTS && is_told(have, layout))
            return has_dtype(c, nib_ck_find_tensor(c, module), layout->data) ? layout : NULL;
    for (int at = 0; (layout = next_layout(&at, format));) {
        const bool own = layout->own & NIB_ROLE_BIT(NIB_ROLE_DATA);
        const uint32_t data = own || layout->stacking == NIB_STACK_EXPERTS
                                  ? NIB_NONE
                                  : find_named(c, module, layout->suffixes[NIB_ROLE_DATA]);
        if (data != NIB_NONE)
            return has_dtype(c, data, layout->data) ? layout : NULL;
    }
    for (int at = 0; (layout = next_layout(&at, format));)
        if (is_told(have, layout))
            return layout;
    for (int at = 0; (layout = next_layout(&at, format));) /* a suffix of several: the checkpoint's own, or the last */
        if (layout->stacking == NIB_STACK_NONE &&
            has_dtype(c, find_role(have, layout, NIB_ROLE_SCALE), layout->scale) && (!by_scale || found != c->format)) {
            by_scale = layout;
            found = *format;
        }
    *format = found;
    return by_scale;
}

/* The tensor of a role under the name that another format has for it; NIB_NONE without. */
static uint32_t find_misnamed(const nib_checkpoint *c, const struct nib_check_module *m, enum nib_ck_role role)
{
    const struct nib_ck_layout *other;
    nib_checkpoint_format format;
    for (int at = 0; m->tensor[role] == NIB_NONE && (other = next_layout(&at, &format));) {
        const uint32_t tensor = other != m->layout && other->stacking == m->layout->stacking
                                    ? find_named(c, m->name, other->suffixes[role])
                                    : NIB_NONE;
        if (tensor != NIB_NONE)
            return tensor;
    }
    return NIB_NONE;
}

/* Tensors that speak another format's language. */
static nib_status check_names(struct nib_checking *k, const struct nib_check_module *m, const struct companions *have)
{
    const nib_checkpoint *c = k->c;
    for (int role = NIB_ROLE_TENSOR_SCALE; role <= NIB_ROLE_INPUT; role++) {
        const uint32_t tensor = find_misnamed(c, m, (enum nib_ck_role)role);
        if (tensor != NIB_NONE)
            TRY(nib_check_found(k, NIB_FAULT_MISNAMED, c->tensors[tensor].name, "%s looks for %s",
                                nib_checkpoint_format_name(m->format),
                                nib_ck_suffix_name(m->layout, (enum nib_ck_role)role)));
    }
    const uint32_t pre_quant = find_suffix(have, NIB_PRE_QUANT_SCALE);
    if (pre_quant != NIB_NONE)
        TRY(nib_check_found(k, NIB_FAULT_PRE_QUANT_SCALE, c->tensors[pre_quant].name,
                            "activations are scaled before they are quantized"));
    return NIB_OK;
}

/* ---- Tensors of a module ---- */

static const char *shape_text(const struct nib_ck_tensor *t, char *text, size_t bytes)
{
    size_t used = (size_t)snprintf(text, bytes, "[");
    for (int64_t i = 0; i < t->rank && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    if (used < bytes)
        snprintf(text + used, bytes - used, "]");
    return text;
}

/* Whether what lies around a [rows, cols] matrix in a larger one is not zero, laid out in rows and in tiles alike. */
static nib_status is_padding_dirty(const nib_checkpoint *c, uint32_t tensor, int64_t rows, int64_t cols, bool *dirty)
{
    const struct nib_ck_tensor *t = &c->tensors[tensor];
    const int64_t all_rows = t->shape[0], all_cols = t->shape[1];
    *dirty = false;
    if (t->bytes == 0 || t->bytes > 64 << 20)
        return NIB_OK; /* nothing there, in any number of rows; or not worth the memory: it is padded, anyway */
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
    if (nib_check_is_stack(m)) {
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

static nib_status check_tensor_scale_shape(struct nib_checking *k, const struct nib_check_module *m,
                                           enum nib_ck_role role)
{
    const struct nib_ck_tensor *t = &k->c->tensors[m->tensor[role]];
    int64_t values = 1;
    for (int64_t i = 0; i < t->rank; i++)
        if (!nib_mul(values, t->shape[i], &values))
            return NIB_OK; /* no such tensor can be opened */
    const struct nib_ck_tensor *codes = &k->c->tensors[m->tensor[NIB_ROLE_DATA]];
    const int64_t experts = nib_check_is_stack(m) && codes->rank > 0 ? codes->shape[0] : 1;
    char shape[256];
    if (!(NIB_FLOAT_BITS & NIB_DTYPE_BIT(t->dtype)))
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_SHAPE, t->name, "it is %s instead of F32",
                               nib_dtype_name(t->dtype));
    if (values != 1 && values != experts)
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_SHAPE, t->name, "it has shape %s instead of one value",
                               shape_text(t, shape, sizeof shape));
    return NIB_OK;
}

/* Codes and their scales: shapes that fit one another. */
static nib_status check_payload(struct nib_checking *k, struct nib_check_module *m)
{
    const struct nib_ck_tensor *codes = &k->c->tensors[m->tensor[NIB_ROLE_DATA]];
    const int64_t wanted_rank = nib_check_is_stack(m) ? 3 : 2;
    bool fits = codes->dtype == NIB_U8 && codes->rank == wanted_rank;
    char shape[256];
    for (int64_t i = 0; i < codes->rank; i++)
        fits &= codes->shape[i] < (int64_t)1 << 48; /* larger ones are of tensors without elements */
    if (!fits)
        return nib_check_found(k, NIB_FAULT_CODES_SHAPE, codes->name, "codes are %s %s", nib_dtype_name(codes->dtype),
                               shape_text(codes, shape, sizeof shape));
    if (nib_check_is_stack(m)) {
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
                               nib_checkpoint_format_name(m->format), nib_ck_suffix_name(m->layout, NIB_ROLE_SCALE));
    return check_scale_shape(k, m);
}

static nib_status check_module(struct nib_checking *k, struct nib_check_module *m, const struct companions *have)
{
    TRY(check_names(k, m, have));
    if (m->tensor[NIB_ROLE_DATA] == NIB_NONE)
        return nib_check_found(k, NIB_FAULT_CODES_MISSING, m->name, "it has scales and no %s",
                               nib_ck_suffix_name(m->layout, NIB_ROLE_DATA));
    const size_t before = k->found;
    TRY(check_payload(k, m));
    k->broken[m->tensor[NIB_ROLE_DATA]] = k->found != before;
    for (int role = NIB_ROLE_TENSOR_SCALE; role <= NIB_ROLE_INPUT; role++)
        if (m->tensor[role] != NIB_NONE) {
            const size_t so_far = k->found;
            TRY(check_tensor_scale_shape(k, m, (enum nib_ck_role)role));
            k->broken[m->tensor[role]] = k->found != so_far;
        }
    if (m->tensor[NIB_ROLE_TENSOR_SCALE] == NIB_NONE && !nib_ck_formats[m->format].tensor_scale_optional &&
        find_misnamed(k->c, m, NIB_ROLE_TENSOR_SCALE) == NIB_NONE)
        TRY(nib_check_found(
            k, NIB_FAULT_TENSOR_SCALE_MISSING, m->name, "%s keeps the tensor scale in %s, and it is not there",
            nib_checkpoint_format_name(m->format), nib_ck_suffix_name(m->layout, NIB_ROLE_TENSOR_SCALE)));
    return NIB_OK;
}

/* Input scales can only be missed once it is known whether there should be any. */
nib_status nib_check_inputs(struct nib_checking *k)
{
    for (size_t i = 0; i < k->n_modules; i++) {
        const struct nib_check_module *m = &k->modules[i];
        if (m->tensor[NIB_ROLE_DATA] == NIB_NONE || m->tensor[NIB_ROLE_INPUT] != NIB_NONE ||
            nib_ck_formats[m->format].tensor_scale_optional || !nib_check_wants_input(k, m->name))
            continue;
        if (find_misnamed(k->c, m, NIB_ROLE_INPUT) == NIB_NONE)
            TRY(nib_check_found_in(k, m->tensor[NIB_ROLE_DATA], NIB_FAULT_INPUT_MISSING, m->name,
                                   "activations are quantized, and %s is not there",
                                   nib_ck_suffix_name(m->layout, NIB_ROLE_INPUT)));
    }
    return NIB_OK;
}

/* Scales beside a weight that is not packed. Those of FP8 and the like are F32; E4M3 ones belong to packed codes. */
static nib_status check_stray(struct nib_checking *k, const char *module, const struct companions *have)
{
    const nib_checkpoint *c = k->c;
    const uint32_t weight =
        find_named(c, module, nib_ck_formats[NIB_CHECKPOINT_FORMAT_PLAIN].layouts[0].suffixes[NIB_ROLE_DATA]);
    const struct nib_ck_layout *layout;
    nib_checkpoint_format format;
    uint32_t stray = NIB_NONE;
    if (weight == NIB_NONE || c->tensors[weight].dtype == NIB_E4M3)
        return NIB_OK;
    for (int at = 0; (layout = next_layout(&at, &format));) {
        if (layout->stacking != NIB_STACK_NONE)
            continue;
        if ((layout->own & NIB_ROLE_BIT(NIB_ROLE_DATA)) && find_role(have, layout, NIB_ROLE_DATA) != NIB_NONE)
            return NIB_OK;
        const uint32_t scale = find_role(have, layout, NIB_ROLE_SCALE);
        if (has_dtype(c, scale, layout->scale))
            stray = scale;
        else if (stray == NIB_NONE)
            stray = find_role(have, layout, NIB_ROLE_TENSOR_SCALE);
    }
    return stray == NIB_NONE ? NIB_OK
                             : nib_check_found(k, NIB_FAULT_STRAY, c->tensors[stray].name, "the module's weight is %s",
                                               nib_dtype_name(c->tensors[weight].dtype));
}

/* One module: companions first..last-1 of the sorted list. */
static nib_status take_module(struct nib_checking *k, const struct suffixes *suffixes, const struct companion *first,
                              const struct companion *last, char *name)
{
    const nib_checkpoint *c = k->c;
    struct companions have = { .suffixes = suffixes };
    for (int i = 0; i < suffixes->n; i++)
        have.have[i] = NIB_NONE;
    for (const struct companion *p = first; p < last; p++)
        if (p->suffix >= 0)
            have.have[p->suffix] = p->tensor;
    memcpy(name, first->name, first->length);
    name[first->length] = 0;
    nib_checkpoint_format format;
    const struct nib_ck_layout *layout = layout_of(c, name, &have, &format);
    if (!layout)
        return check_stray(k, name, &have);
    struct nib_check_module *m = &k->modules[k->n_modules++];
    m->name = name;
    m->format = format;
    m->layout = layout;
    if (k->n_modules == 1 || format == c->format)
        k->format = format;
    for (int role = 0; role < NIB_ROLE_COUNT; role++)
        m->tensor[role] = find_named(c, name, layout->suffixes[role]);
    k->has_inputs |= m->tensor[NIB_ROLE_INPUT] != NIB_NONE;
    return check_module(k, m, &have);
}

nib_status nib_check_modules(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    struct companion *list = nib_alloc((c->n_tensors + 1) * sizeof *list);
    if (!list)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for its modules", c->path);
    struct suffixes suffixes;
    list_suffixes(&suffixes);
    size_t n = 0, names = 1;
    for (size_t i = 0; i < c->n_tensors; i++) {
        struct companion *p = &list[n];
        if (c->tensors[i].ggml_type >= 0 || !is_companion(&suffixes, &c->tensors[i], p))
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
        status = take_module(k, &suffixes, &list[i], &list[next], name);
        name += list[i].length + 1;
    }
    nib_free(list);
    return status;
}

nib_status nib_check_wrapped_names(struct nib_checking *k)
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

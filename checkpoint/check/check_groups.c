/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_groups.c - weights that servers fuse into one matrix, and must therefore share their tensor scales.
 */
#include "check/check.h"

#include <stdlib.h>

#include "format/codec.h"
#include "file/json.h"

enum { LEAST_LARGEST = 0x60 /* E4M3 code of 32 */ };

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
        if (!x->nvfp4 || !nib_ck_formats[w->format].fused) {
            plain = x->nvfp4 ? plain : w;
            continue;
        }
        packed = w;
        if (!nib_check_is_writable(k, first[i].weight))
            continue;
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

/* The largest block scale of weights that share a tensor scale is near the end of E4M3, or the tensor scale is too
 * large. */
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

nib_status nib_check_shared(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    struct nib_check_groups groups;
    TRY(nib_check_members(c, &groups));
    bool *grouped = nib_alloc_zeroed(c->n_weights + 1);
    nib_status status = grouped ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "%s: no memory for its groups", c->path);
    for (size_t i = 0, end; !status && i < groups.n; i = end) {
        end = nib_check_group_end(&groups, i);
        status = check_group(k, &groups.members[i], end - i);
        const bool shares = nib_ck_formats[c->weights[groups.members[i].weight].format].fused;
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

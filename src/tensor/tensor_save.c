/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor_save.c - buffers moved out of tensors, to be saved for later, and back in.
 */
#include "tensor/tensor.h"

nib_status nib_tensor_prepare_for_saving(nib_tensor *t, nib_buffer **out, size_t capacity, size_t *n)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(out);
    NIB_REQUIRE(n);
    const struct nib_format_facts *facts = nib_format_of(&t->q);
    if (capacity < (size_t)facts->saved_count)
        return nib_fail(NIB_ERR_ARG, "a %s tensor gives %d buffers, and the list has space for %zu", facts->name,
                        facts->saved_count, capacity);
    for (int i = 0; i < facts->saved_count; i++) {
        out[i] = t->parts[facts->saved[i]];
        t->parts[facts->saved[i]] = NULL;
    }
    *n = (size_t)facts->saved_count;
    return NIB_OK;
}

/* Whether what was saved can go back in, checked as from_buffers checks it. */
static nib_status check_saved(const nib_tensor *t, nib_buffer *const *saved)
{
    const struct nib_format_facts *facts = nib_format_of(&t->q);
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_tensor *trial;
    if (nib_tensor_has(t, NIB_ROWWISE) || nib_tensor_has(t, NIB_COLUMNWISE))
        return nib_fail(NIB_ERR_USAGE,
                        "the tensor still has data: only one that was prepared for saving or cleared is restored");
    for (int i = 0; i < facts->saved_count; i++)
        parts[facts->saved[i]] = saved[i];
    TRY(nib_tensor_from_buffers(&t->q, t->dtype, t->rank, t->shape, parts, NIB_PART_COUNT, &trial));
    const bool has_data = nib_tensor_has(trial, NIB_ROWWISE) || nib_tensor_has(trial, NIB_COLUMNWISE);
    const nib_status status =
        has_data ? nib_check_same_device("what was saved", trial->device, "the tensor", t->device) : NIB_OK;
    nib_tensor_destroy(trial);
    return status;
}

static void place_saved(nib_tensor *t, nib_buffer *const *saved)
{
    const struct nib_format_facts *facts = nib_format_of(&t->q);
    for (int i = 0; i < facts->saved_count; i++)
        t->parts[facts->saved[i]] = saved[i];
}

nib_status nib_tensor_restore_from_saved(nib_tensor *t, nib_buffer *const *saved, size_t n, size_t *used)
{
    NIB_REQUIRE(t);
    NIB_REQUIRE(saved);
    const size_t wanted = (size_t)nib_format_of(&t->q)->saved_count;
    if (n < wanted)
        return nib_fail(NIB_ERR_ARG, "a tensor is restored from %zu buffers, and %zu are left", wanted, n);
    TRY(check_saved(t, saved));
    place_saved(t, saved);
    if (used)
        *used = wanted;
    return NIB_OK;
}

/* How many entries one item takes. */
static size_t item_entries(const nib_item *item)
{
    return item->tensor ? (size_t)nib_format_of(&item->tensor->q)->saved_count : 1;
}

nib_status nib_saved_count(const nib_item *items, size_t n, size_t *count)
{
    NIB_REQUIRE(items);
    NIB_REQUIRE(count);
    size_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += item_entries(&items[i]);
    *count = sum;
    return NIB_OK;
}

/* A tensor gives its buffers away once. */
static nib_status check_distinct(const nib_item *items, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            if (items[i].tensor && items[i].tensor == items[j].tensor)
                return nib_fail(NIB_ERR_ARG, "items %zu and %zu are the same tensor", j, i);
    return NIB_OK;
}

nib_status nib_prepare_for_saving(nib_item *items, size_t n, nib_saved *saved, size_t capacity, size_t *count)
{
    NIB_REQUIRE(saved);
    NIB_REQUIRE(count);
    size_t needed = 0;
    TRY(nib_saved_count(items, n, &needed));
    if (needed > capacity)
        return nib_fail(NIB_ERR_ARG, "the items take %zu entries and there is space for %zu", needed, capacity);
    TRY(check_distinct(items, n));
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (!items[i].tensor) {
            saved[at++] = (nib_saved){ .array = items[i].array };
            items[i].array = (nib_array){ 0 };
            continue;
        }
        nib_buffer *parts[NIB_PART_COUNT];
        size_t taken = 0;
        TRY(nib_tensor_prepare_for_saving(items[i].tensor, parts, NIB_PART_COUNT, &taken));
        for (size_t part = 0; part < taken; part++)
            saved[at++] = (nib_saved){ .buffer = parts[part] };
    }
    *count = at;
    return NIB_OK;
}

nib_status nib_restore_from_saved(nib_item *items, size_t n, const nib_saved *saved, size_t count, size_t *used)
{
    NIB_REQUIRE(saved);
    size_t needed = 0;
    TRY(nib_saved_count(items, n, &needed));
    TRY(check_distinct(items, n));
    if (needed > count)
        return nib_fail(NIB_ERR_ARG, "the items take %zu entries and %zu were saved", needed, count);
    /* All is checked before anything moves: first pass looks, second pass acts. */
    for (int pass = 0; pass < 2; pass++) {
        size_t at = 0;
        for (size_t i = 0; i < n; at += item_entries(&items[i++])) {
            for (size_t k = 0; k < item_entries(&items[i]); k++)
                if (items[i].tensor ? saved[at + k].array.data != NULL : saved[at + k].buffer != NULL)
                    return nib_fail(NIB_ERR_ARG, "saved entry %zu is %s, and item %zu is not", at + k,
                                    items[i].tensor ? "a plain array" : "a part of a tensor", i);
            if (!items[i].tensor) {
                if (pass)
                    items[i].array = saved[at].array;
                continue;
            }
            nib_buffer *buffers[NIB_PART_COUNT] = { NULL };
            for (size_t k = 0; k < item_entries(&items[i]); k++)
                buffers[k] = saved[at + k].buffer;
            if (pass)
                place_saved(items[i].tensor, buffers);
            else
                TRY(check_saved(items[i].tensor, buffers));
        }
    }
    if (used)
        *used = needed;
    return NIB_OK;
}

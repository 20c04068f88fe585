/* SPDX-License-Identifier: Apache-2.0 */
/*
 * interval_set.c - a sorted list of what is written.
 */
#include "file/interval_set.h"

bool nib_interval_set_reserve(struct nib_interval_set *set)
{
    struct nib_interval *list = nib_grow(set->list, &set->capacity, set->n + 1, sizeof *list);
    if (!list)
        return false;
    set->list = list;
    return true;
}

/* One interval replaces all that it touches. */
void nib_interval_set_add(struct nib_interval_set *set, uint64_t begin, uint64_t end)
{
    struct nib_interval *list = set->list;
    size_t first = 0, last = set->n;
    while (first < last) { /* the first interval that does not end before `begin` */
        const size_t middle = first + (last - first) / 2;
        if (list[middle].end < begin)
            first = middle + 1;
        else
            last = middle;
    }
    for (last = first; last < set->n && list[last].begin <= end; last++) {
        if (list[last].begin < begin)
            begin = list[last].begin;
        if (list[last].end > end)
            end = list[last].end;
    }
    memmove(list + first + 1, list + last, (set->n - last) * sizeof *list);
    list[first] = (struct nib_interval){ begin, end };
    set->n = set->n - (last - first) + 1;
}

bool nib_interval_set_gap(const struct nib_interval_set *set, uint64_t bytes, struct nib_interval *gap)
{
    const bool started = set->n && set->list[0].begin == 0;
    const uint64_t begin = started ? set->list[0].end : 0;
    const size_t next = started;
    if (begin >= bytes)
        return false;
    *gap = (struct nib_interval){ begin, next < set->n ? set->list[next].begin : bytes };
    return true;
}

void nib_interval_set_free(struct nib_interval_set *set) { nib_free(set->list); }

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spans.c - a sorted list of what is written.
 */
#include "file/interval_set.h"

bool nib_interval_set_reserve(struct nib_interval_set *spans)
{
    struct nib_interval *list = nib_grow(spans->list, &spans->capacity, spans->n + 1, sizeof *list);
    if (!list)
        return false;
    spans->list = list;
    return true;
}

/* One span takes the place of all that it touches. */
void nib_interval_set_add(struct nib_interval_set *spans, uint64_t begin, uint64_t end)
{
    struct nib_interval *list = spans->list;
    size_t first = 0, last = spans->n;
    while (first < last) { /* the first span that does not end before `begin` */
        const size_t middle = first + (last - first) / 2;
        if (list[middle].end < begin)
            first = middle + 1;
        else
            last = middle;
    }
    for (last = first; last < spans->n && list[last].begin <= end; last++) {
        if (list[last].begin < begin)
            begin = list[last].begin;
        if (list[last].end > end)
            end = list[last].end;
    }
    memmove(list + first + 1, list + last, (spans->n - last) * sizeof *list);
    list[first] = (struct nib_interval){ begin, end };
    spans->n = spans->n - (last - first) + 1;
}

bool nib_interval_set_gap(const struct nib_interval_set *spans, uint64_t bytes, struct nib_interval *gap)
{
    const bool started = spans->n && spans->list[0].begin == 0;
    const uint64_t begin = started ? spans->list[0].end : 0;
    const size_t next = started;
    if (begin >= bytes)
        return false;
    *gap = (struct nib_interval){ begin, next < spans->n ? spans->list[next].begin : bytes };
    return true;
}

void nib_interval_set_free(struct nib_interval_set *spans) { nib_free(spans->list); }

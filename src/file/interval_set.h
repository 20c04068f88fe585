/* SPDX-License-Identifier: Apache-2.0 */
/*
 * interval_set.h - which bytes of a range have been written, so that a file is finished only when all are.
 */
#ifndef NIB_INTERVAL_SET_H
#define NIB_INTERVAL_SET_H

#include "base/base.h"

struct nib_interval {
    uint64_t begin, end;
};

/* Sorted, and neither overlapping nor touching: one interval when all is written, in whatever order. Zeroed is empty. */
struct nib_interval_set {
    struct nib_interval *list;
    size_t n, capacity;
};

/* Space for one more; false without memory. */
NIB_PRIVATE bool nib_interval_set_reserve(struct nib_interval_set *set);
/* Add begin..end-1, begin < end, after reserve. */
NIB_PRIVATE void nib_interval_set_add(struct nib_interval_set *set, uint64_t begin, uint64_t end);
/* Whether something of 0..bytes-1 is missing, and the first such interval. */
NIB_PRIVATE bool nib_interval_set_gap(const struct nib_interval_set *set, uint64_t bytes, struct nib_interval *gap);
NIB_PRIVATE void nib_interval_set_free(struct nib_interval_set *set);

#endif

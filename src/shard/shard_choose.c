/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard_choose.c - scales that are chosen from all values of a block (four-over-six, the sweep), of parameters that are
 * sharded over ranks.
 *
 * A rank chooses the scales of the whole block ranges (shard.h) that it has, and tells the others by one byte per scale.
 * Of the block ranges that a cut divides, at most two per shard, all ranks send their values in the nominal dtype, and
 * all choose alike from the same values, by the kernels that quantize whole matrices.
 */
#include <stdlib.h>

#include "nib_reference.h"
#include "shard/shard.h"

/* A gather moves at most so many bytes at a time, or one parameter if that has more. */
enum { ROUND_BYTES = 16 << 20, CHUNK = 256 };

/* ---- Which rank has what ---- */

static int compare_owners(const void *a, const void *b)
{
    const struct nib_owner *x = a, *y = b;
    if (x->range.start != y->range.start)
        return x->range.start < y->range.start ? -1 : 1;
    if (x->range.length != y->range.length) /* empty ones before the one that begins at the same place */
        return x->range.length < y->range.length ? -1 : 1;
    return x->rank - y->rank;
}

nib_status nib_order_owners(const nib_tensor *t, const struct nib_range *ranges, size_t stride, int size,
                            struct nib_owner *owners)
{
    const int64_t elements = t->geometry.rows * t->geometry.cols;
    for (int r = 0; r < size; r++)
        owners[r] = (struct nib_owner){ ranges[(size_t)r * stride], r };
    qsort(owners, (size_t)size, sizeof *owners, compare_owners);
    int64_t at = 0;
    int before = -1;
    for (int i = 0; i < size; i++) {
        const struct nib_owner *owner = &owners[i];
        if (owner->range.length == 0)
            continue;
        if (owner->range.start > at)
            return nib_fail(NIB_ERR_SHAPE, "no rank has elements %lld to %lld", (long long)at,
                            (long long)owner->range.start - 1);
        if (owner->range.start < at)
            return nib_fail(NIB_ERR_SHAPE, "ranks %d and %d overlap: both have element %lld", before, owner->rank,
                            (long long)owner->range.start);
        at += owner->range.length;
        before = owner->rank;
    }
    if (at < elements)
        return nib_fail(NIB_ERR_SHAPE, "no rank has elements %lld to %lld", (long long)at, (long long)elements - 1);
    return NIB_OK;
}

/* ---- Memory ---- */

nib_status nib_choices_create(size_t n, int size, struct nib_choices *out)
{
    const size_t ranks = (size_t)size;
    *out = (struct nib_choices){ .n = n };
    if (n == 0)
        return NIB_OK;
    int64_t bytes;
    if (!nib_mul((int64_t)n, (int64_t)(ranks * sizeof *out->ranges), &bytes))
        return nib_fail(NIB_ERR_MEMORY, "no memory for the shards of %zu parameters", n);
    out->list = nib_alloc_zeroed(n * sizeof *out->list);
    out->own = nib_alloc(n * sizeof *out->own);
    out->ranges = nib_alloc((size_t)bytes);
    out->owners = nib_alloc(ranks * sizeof *out->owners);
    out->counts = nib_alloc(ranks * sizeof *out->counts);
    out->at = nib_alloc(ranks * sizeof *out->at);
    if (out->list && out->own && out->ranges && out->owners && out->counts && out->at)
        return NIB_OK;
    return nib_fail(NIB_ERR_MEMORY, "no memory for the shards of %zu parameters on %d ranks", n, size);
}

void nib_choices_free(struct nib_choices *choices)
{
    nib_free(choices->list);
    nib_free(choices->own);
    nib_free(choices->ranges);
    nib_free(choices->owners);
    nib_free(choices->counts);
    nib_free(choices->at);
    nib_free(choices->mine);
    nib_free(choices->all);
    nib_free(choices->values);
}

/* ---- Messages ---- */

/* What a rank sends of a parameter: its values in the block range that it shares at its start, the scales of whole block
 * ranges, its values in the block range that it shares at its end. */
struct message {
    int64_t start, end;
    struct nib_cut cut;
    int64_t cell, cells;
    size_t value_bytes;
};

static struct message message_of(const struct nib_choice *choice, struct nib_range range)
{
    const nib_tensor *t = choice->shard->t;
    const struct nib_cut cut = nib_cut_of(t, &choice->grid, range);
    struct message message = { .start = range.start,
                               .end = range.start + range.length,
                               .cut = cut,
                               .value_bytes = (size_t)nib_dtypes[t->dtype].bits / 8 };
    if (cut.whole_end > cut.whole) {
        message.cell = nib_grid_cell(t, &choice->grid, cut.whole);
        message.cells = nib_grid_cell(t, &choice->grid, cut.whole_end - 1) - message.cell + 1;
    }
    return message;
}

static size_t message_bytes(const struct message *m)
{
    return (size_t)((m->cut.whole - m->start) + (m->end - m->cut.whole_end)) * m->value_bytes + (size_t)m->cells;
}

static struct nib_range range_of(const struct nib_choices *choices, size_t i, int rank)
{
    return choices->ranges[(size_t)rank * choices->n + i];
}

/* Returns the end of the round that begins with parameter `first`; its bytes by rank are in counts then. */
static size_t plan_round(const struct nib_choices *choices, size_t first, int size)
{
    size_t end = first, total = 0;
    for (int r = 0; r < size; r++)
        choices->counts[r] = 0;
    for (; end < choices->n; end++) {
        size_t bytes = 0;
        for (int r = 0; r < size; r++) {
            const struct message m = message_of(&choices->list[end], range_of(choices, end, r));
            bytes += message_bytes(&m);
        }
        if (end > first && total + bytes > ROUND_BYTES)
            break;
        total += bytes;
        for (int r = 0; r < size; r++) {
            const struct message m = message_of(&choices->list[end], range_of(choices, end, r));
            choices->counts[r] += message_bytes(&m);
        }
    }
    return end;
}

/* ---- Before anything is computed ---- */

/* Whether the shards make up the parameters, and memory for the largest round. */
static nib_status plan_rounds(const nib_comm *comm, struct nib_choices *choices)
{
    size_t mine = 0, all = 0, longest = 0;
    for (size_t i = 0; i < choices->n; i++) {
        const nib_tensor *t = choices->list[i].shard->t;
        TRY(nib_blame(nib_order_owners(t, choices->ranges + i, choices->n, comm->size, choices->owners),
                      choices->list[i].index));
        if (t->geometry.rows > 0 && t->geometry.cols > 0) {
            const size_t length = (size_t)nib_block_range(t, &choices->list[i].grid, 0).length;
            longest = length > longest ? length : longest;
        }
    }
    for (size_t i = 0; i < choices->n;) {
        i = plan_round(choices, i, comm->size);
        size_t total = 0;
        for (int r = 0; r < comm->size; r++)
            total += choices->counts[r];
        mine = choices->counts[comm->rank] > mine ? choices->counts[comm->rank] : mine;
        all = total > all ? total : all;
    }
    choices->mine = nib_alloc(mine);
    choices->all = nib_alloc(all);
    choices->values = nib_alloc(longest * sizeof *choices->values);
    if (choices->mine && choices->all && choices->values)
        return NIB_OK;
    return nib_fail(NIB_ERR_MEMORY, "no memory to exchange %zu bytes of divided blocks and scales", all);
}

nib_status nib_choices_meet(const nib_comm *comm, struct nib_choices *choices)
{
    if (choices->n == 0)
        return NIB_OK;
    for (int r = 0; r < comm->size; r++)
        choices->counts[r] = choices->n * sizeof *choices->ranges;
    for (size_t i = 0; i < choices->n; i++)
        choices->own[i] = (struct nib_range){ choices->list[i].shard->start, choices->list[i].shard->length };
    TRY(nib_gather(comm, "the gather of shards", choices->own, choices->ranges, choices->counts));
    return nib_agree(comm, plan_rounds(comm, choices), 0);
}

/* ---- The exchange ---- */

/* Values lie anywhere in a message, so they are coded in a place that is aligned for them. Coding is exact, and
 * nib_encode supports the dtypes. */
static uint8_t *pack_values(const struct nib_shard *shard, int64_t from, int64_t to, size_t value_bytes, uint8_t *out)
{
    float x[CHUNK];
    _Alignas(float) uint8_t codes[CHUNK * sizeof *x];
    for (int64_t n; from < to; from += n, out += (size_t)n * value_bytes) {
        n = nib_min(CHUNK, to - from);
        nib_shard_load(shard, from, n, x);
        (void)nib_encode(shard->t->dtype, x, (size_t)n, codes);
        memcpy(out, codes, (size_t)n * value_bytes);
    }
    return out;
}

static void unpack_values(nib_dtype dtype, const uint8_t *in, int64_t count, size_t value_bytes, float *x)
{
    _Alignas(float) uint8_t codes[CHUNK * sizeof *x];
    for (int64_t n, at = 0; at < count; at += n) {
        n = nib_min(CHUNK, count - at);
        memcpy(codes, in + (size_t)at * value_bytes, (size_t)n * value_bytes);
        (void)nib_decode(dtype, codes, (size_t)n, x + at);
    }
}

static uint8_t *pack(const struct nib_choice *choice, uint8_t *out)
{
    const struct nib_shard *shard = choice->shard;
    const struct message m = message_of(choice, (struct nib_range){ shard->start, shard->length });
    out = pack_values(shard, m.start, m.cut.whole, m.value_bytes, out);
    if (m.cells)
        memcpy(out, choice->scales + m.cell, (size_t)m.cells);
    return pack_values(shard, m.cut.whole_end, m.end, m.value_bytes, out + m.cells);
}

/* The values of a divided block range come in the order of their elements, from one rank after the other; when the last
 * is there, its scales are chosen. */
static const uint8_t *take_values(const struct nib_choice *choice, int64_t from, int64_t to, size_t value_bytes,
                                  float *values, const uint8_t *in)
{
    if (from == to)
        return in;
    const nib_tensor *t = choice->shard->t;
    const struct nib_range around = nib_block_range(t, &choice->grid, from);
    unpack_values(t->dtype, in, to - from, value_bytes, values + (from - around.start));
    if (to == around.start + around.length) {
        nib_array x;
        (void)nib_array_init(&x, values, NIB_F32, 1, &around.length);
        const struct nib_shard whole = { t, &x, around.start, around.length };
        nib_shard_choose(&whole, &choice->grid, choice->tensor_scales, choice->scales);
    }
    return in + (size_t)(to - from) * value_bytes;
}

/* What all ranks sent of a parameter. */
static nib_status unpack(const struct nib_choices *choices, size_t i, int size)
{
    const struct nib_choice *choice = &choices->list[i];
    TRY(nib_order_owners(choice->shard->t, choices->ranges + i, choices->n, size,
                         choices->owners)); /* cannot fail: plan_rounds has seen it */
    for (int k = 0; k < size; k++) {
        const struct nib_owner *owner = &choices->owners[k];
        const struct message m = message_of(choice, owner->range);
        const uint8_t *in = choices->all + choices->at[owner->rank];
        in = take_values(choice, m.start, m.cut.whole, m.value_bytes, choices->values, in);
        if (m.cells)
            memcpy(choice->scales + m.cell, in, (size_t)m.cells);
        (void)take_values(choice, m.cut.whole_end, m.end, m.value_bytes, choices->values, in + m.cells);
        choices->at[owner->rank] += message_bytes(&m);
    }
    return NIB_OK;
}

nib_status nib_choices_make(const nib_comm *comm, struct nib_choices *choices)
{
    for (size_t first = 0; first < choices->n;) {
        const size_t end = plan_round(choices, first, comm->size);
        uint8_t *out = choices->mine;
        for (size_t i = first; i < end; i++) {
            const struct nib_choice *choice = &choices->list[i];
            nib_grid_tensor_scales(choice->shard->t, &choice->grid, choice->amaxes, choice->tensor_scales);
            nib_shard_choose(choice->shard, &choice->grid, choice->tensor_scales, choice->scales);
            out = pack(choice, out);
        }
        TRY(nib_gather(comm, "the gather of scales", choices->mine, choices->all, choices->counts));
        size_t at = 0;
        for (int r = 0; r < comm->size; at += choices->counts[r++])
            choices->at[r] = at;
        for (size_t i = first; i < end; i++)
            TRY(unpack(choices, i, comm->size));
        first = end;
    }
    return NIB_OK;
}

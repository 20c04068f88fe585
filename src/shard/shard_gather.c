/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard_gather.c - putting together what ranks have: the codes of one parameter by ranges of elements, or whole tensors
 * by rows.
 *
 * Each gather takes the same steps: check one's own arguments, agree, exchange sizes, get memory, agree, exchange bytes,
 * write. Until the last step nothing has changed.
 */
#include "shard/shard.h"

#include "format/codec.h"

/* ---- The codes of one parameter ---- */

struct gather {
    struct nib_range *ranges; /* by rank */
    struct nib_owner *owners; /* by element */
    size_t *counts;           /* bytes, by rank */
    uint8_t *all;             /* side by side */
};

static void free_gather(struct gather *gather)
{
    nib_free(gather->ranges);
    nib_free(gather->owners);
    nib_free(gather->counts);
    nib_free(gather->all);
}

/* A gather to which each rank sends as many bytes. */
static nib_status exchange(const nib_comm *comm, const void *mine, size_t bytes, void *all, size_t *counts)
{
    for (int r = 0; r < comm->size; r++)
        counts[r] = bytes;
    return nib_gather(comm, "a gather of sizes", mine, all, counts);
}

static nib_status check_own(const char *call, const nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                            const nib_array *shard, const nib_comm *comm, struct gather *gather,
                            struct nib_code_place *place)
{
    if (!t)
        return nib_fail(NIB_ERR_ARG, "the tensor to gather is NULL");
    TRY(nib_check_host(call, t->device));
    nib_byte_range bytes;
    TRY(nib_tensor_byte_range(t, usage, start, length, &bytes));
    if (!nib_tensor_has(t, usage))
        return nib_fail(NIB_ERR_USAGE, "the tensor has no %s usage", nib_usage_name(usage));
    TRY(nib_check_code_place("the shard", t, usage, start, length, shard, place));
    gather->ranges = nib_alloc((size_t)comm->size * sizeof *gather->ranges);
    gather->owners = nib_alloc((size_t)comm->size * sizeof *gather->owners);
    gather->counts = nib_alloc((size_t)comm->size * sizeof *gather->counts);
    return gather->ranges && gather->owners && gather->counts
               ? NIB_OK
               : nib_fail(NIB_ERR_MEMORY, "no memory for %d ranges", comm->size);
}

/* Every rank sees all ranges, so that all come to the same result. */
static nib_status plan_bytes(const nib_tensor *t, nib_usage usage, bool merge, int size, struct gather *gather)
{
    TRY(nib_order_owners(t, gather->ranges, 1, size, gather->owners));
    size_t total = 0;
    for (int r = 0; r < size; r++) {
        const nib_byte_range range =
            nib_bytes_of(&t->geometry, usage, gather->ranges[r].start, gather->ranges[r].length);
        if (!merge && (range.first_shared || range.last_shared))
            return nib_fail(NIB_ERR_SHAPE,
                            "the elements of rank %d do not begin and end with a byte: a gather of bytes would spoil a "
                            "neighbor's, nib_all_gather_param puts them together",
                            r);
        gather->counts[r] = (size_t)range.count;
        total += (size_t)range.count;
    }
    gather->all = nib_alloc(total);
    return gather->all ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "no memory to gather %zu bytes", total);
}

/* A byte at a border that two ranks share gets the nibble of each. */
static void place_bytes(const nib_byte_range *range, const uint8_t *from, uint8_t *codes)
{
    uint8_t *to = codes + range->first;
    const int64_t last = range->count - 1;
    const int64_t first = range->first_shared ? 1 : 0, end = last + (range->last_shared ? 0 : 1);
    if (range->first_shared)
        to[0] = (uint8_t)((to[0] & 0x0F) | (from[0] & 0xF0));
    if (end > first)
        memcpy(to + first, from + first, (size_t)(end - first));
    if (range->last_shared)
        to[last] = (uint8_t)((to[last] & 0xF0) | (from[last] & 0x0F));
}

static nib_status exchange_codes(nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                 struct nib_code_place place, const nib_comm *comm, struct gather *gather)
{
    const nib_byte_range own = nib_bytes_of(&t->geometry, usage, start, length);
    const uint8_t *mine = length ? place.codes + (own.first - place.first) : NULL;
    TRY(nib_gather(comm, "a gather of codes", mine, gather->all, gather->counts));
    const uint8_t *from = gather->all;
    uint8_t *codes = nib_tensor_memory(t, usage).codes;
    for (int r = 0; r < comm->size; from += gather->counts[r++]) {
        const nib_byte_range range =
            nib_bytes_of(&t->geometry, usage, gather->ranges[r].start, gather->ranges[r].length);
        if (range.count)
            place_bytes(&range, from, codes);
    }
    if (usage == NIB_ROWWISE && nib_tensor_has(t, NIB_COLUMNWISE) && !nib_usage_is_cast(t, NIB_COLUMNWISE))
        t->columnwise_stale = true;
    return NIB_OK;
}

static nib_status gather_param(nib_tensor *t, nib_usage usage, int64_t start, int64_t length, const nib_array *shard,
                               const nib_comm *comm, bool merge)
{
    TRY(nib_check_comm("comm", comm, true));
    struct gather gather = { 0 };
    struct nib_code_place place = { 0 };
    nib_status status = check_own(merge ? "nib_all_gather_param" : "nib_all_gather_param_bytes", t, usage, start,
                                  length, shard, comm, &gather, &place);
    uint64_t key = nib_mix(nib_mix(0, merge), (uint64_t)usage);
    if (!status)
        key = nib_mix(nib_mix(nib_mix(key, (uint64_t)t->geometry.rows), (uint64_t)t->geometry.cols),
                      (uint64_t)t->q.format);
    status = nib_agree(comm, status, key);
    if (!status)
        status = exchange(comm, &(struct nib_range){ start, length }, sizeof(struct nib_range), gather.ranges,
                          gather.counts);
    if (!status)
        status = nib_agree(comm, plan_bytes(t, usage, merge, comm->size, &gather), 0);
    if (!status)
        status = exchange_codes(t, usage, start, length, place, comm, &gather);
    free_gather(&gather);
    return status;
}

nib_status nib_all_gather_param(nib_tensor *t, nib_usage usage, int64_t start, int64_t length, const nib_array *shard,
                                const nib_comm *comm)
{
    return gather_param(t, usage, start, length, shard, comm, true);
}

nib_status nib_all_gather_param_bytes(nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                      const nib_array *shard, const nib_comm *comm)
{
    return gather_param(t, usage, start, length, shard, comm, false);
}

/* ---- Tensors by rows ---- */

/* How many lines of scales a usage has in memory, without padding. */
static int64_t scale_lines(const struct nib_usage_geometry *g)
{
    return g->blocks ? nib_ceil_div(g->lines, g->lines_per_scale) : 0;
}

/* What one usage of a tensor is sent as: codes, then scales without padding, then tensor scales where each row has its own. */
static bool sends_tensor_scales(const nib_quantizer *q, nib_usage usage)
{
    return q->row_scaled && usage == NIB_ROWWISE;
}

static int64_t packed_tensor_scales(const nib_quantizer *q, nib_usage usage, const struct nib_usage_geometry *g)
{
    return sends_tensor_scales(q, usage) ? g->tensor_scales_bytes : 0;
}

static int64_t packed_bytes(const nib_quantizer *q, nib_usage usage, const struct nib_usage_geometry *g)
{
    return g->data_bytes + scale_lines(g) * g->blocks * g->scale_bytes + packed_tensor_scales(q, usage, g);
}

static uint8_t *put(uint8_t *to, const void *from, int64_t bytes)
{
    if (bytes)
        memcpy(to, from, (size_t)bytes);
    return to + bytes;
}

static uint8_t *pack_usage(const nib_tensor *t, nib_usage usage, uint8_t *to)
{
    const struct nib_usage_geometry *g = &t->geometry.usage[usage];
    const struct nib_usage_memory memory = nib_tensor_memory(t, usage);
    to = put(to, memory.codes, g->data_bytes);
    for (int64_t line = 0; line < scale_lines(g); line++)
        for (int64_t block = 0; block < g->blocks; block++) {
            const nib_scale_bits bits = nib_scale_load(g, memory.scales, line * g->lines_per_scale, block);
            to = put(to, &bits, g->scale_bytes);
        }
    return put(to, memory.tensor_scales, packed_tensor_scales(&t->q, usage, g));
}

/* A shard whose first row is row `first` of `whole`, into its place there. Rowwise that is some lines; columnwise, a
 * part of each. */
static const uint8_t *unpack_usage(nib_tensor *whole, nib_usage usage, const struct nib_usage_geometry *shard,
                                   int64_t first, const uint8_t *from)
{
    const struct nib_usage_geometry *g = &whole->geometry.usage[usage];
    const struct nib_usage_memory memory = nib_tensor_memory(whole, usage);
    const bool rowwise = usage == NIB_ROWWISE;
    if (g->by_element) {
        if (shard->data_bytes)
            memcpy(memory.codes + first * (rowwise ? g->line_stride : g->element_stride), from,
                   (size_t)shard->data_bytes);
    } else {
        for (int64_t line = 0; line < g->lines && shard->line_stride; line++)
            memcpy(memory.codes + line * g->line_stride + (g->element_stride ? first : first / 2),
                   from + line * shard->line_stride, (size_t)shard->line_stride);
    }
    from += shard->data_bytes;
    const int64_t block = nib_max(nib_format_of(&whole->q)->block, 1);
    for (int64_t line = 0; line < scale_lines(shard); line++)
        for (int64_t b = 0; b < shard->blocks; b++, from += shard->scale_bytes) {
            nib_scale_bits bits = 0;
            memcpy(&bits, from, (size_t)shard->scale_bytes);
            nib_scale_store(g, memory.scales, (rowwise ? first : 0) + line * shard->lines_per_scale,
                            b + (rowwise ? 0 : first / block), bits);
        }
    const int64_t tensor_scales = packed_tensor_scales(&whole->q, usage, shard);
    if (tensor_scales)
        memcpy(memory.tensor_scales + first, from, (size_t)tensor_scales);
    return from + tensor_scales;
}

struct row_gather {
    int64_t *dims;  /* the first dim of each rank's tensor */
    size_t *counts; /* bytes of its message */
    uint8_t *mine, *all;
    nib_tensor *whole;
};

static void free_row_gather(struct row_gather *gather)
{
    nib_free(gather->dims);
    nib_free(gather->counts);
    nib_free(gather->mine);
    nib_free(gather->all);
    nib_tensor_destroy(gather->whole);
}

/* What must be equal on all ranks; tensor scales among it, since codes and scales were made with them. */
static uint64_t row_key(const nib_tensor *t)
{
    nib_quantizer q = t->q;
    q.rowwise = nib_tensor_has(t, NIB_ROWWISE);
    q.columnwise = nib_tensor_has(t, NIB_COLUMNWISE);
    q.seed = q.offset = 0;
    q.origin[0] = q.origin[1] = 0;
    uint64_t key = nib_mix(nib_mix(nib_quantizer_hash(&q), (uint64_t)t->dtype), (uint64_t)t->rank);
    for (int i = 1; i < t->rank; i++)
        key = nib_mix(key, (uint64_t)t->shape[i]);
    for (int usage = 0; usage < 2; usage++) {
        const float *tensor_scales = nib_tensor_memory(t, (nib_usage)usage).tensor_scales;
        const struct nib_usage_geometry *g = &t->geometry.usage[usage];
        for (int64_t i = 0; tensor_scales && !sends_tensor_scales(&q, (nib_usage)usage) && i < g->tensor_scales; i++)
            key = nib_mix(key, nib_bits(tensor_scales[i]));
    }
    return key;
}

static nib_status check_own_rows(const nib_tensor *t, const nib_comm *comm, struct row_gather *gather)
{
    if (!t)
        return nib_fail(NIB_ERR_ARG, "the tensor to gather is NULL");
    TRY(nib_check_host("nib_all_gather_tensor", t->device));
    nib_usage usage;
    TRY(nib_tensor_pick(t, NIB_EITHER, &usage));
    if (nib_tensor_has(t, NIB_COLUMNWISE))
        TRY(nib_tensor_pick(t, NIB_COLUMNWISE, &usage));
    if (t->rank < 2)
        return nib_fail(NIB_ERR_SHAPE, "a tensor of rank %d has no rows to gather", t->rank);
    gather->dims = nib_alloc((size_t)comm->size * sizeof *gather->dims);
    gather->counts = nib_alloc((size_t)comm->size * sizeof *gather->counts);
    return gather->dims && gather->counts ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "no memory for %d sizes", comm->size);
}

static nib_status shard_geometry(const nib_tensor *t, int64_t dim, struct nib_geometry *out)
{
    int64_t shape[NIB_MAX_RANK];
    memcpy(shape, t->shape, sizeof shape);
    shape[0] = dim;
    return nib_geometry_of(&t->q, t->rank, shape, out);
}

/* Sizes of the messages, and whether borders between ranks are borders between blocks. */
static nib_status plan_rows(const nib_tensor *t, const nib_comm *comm, struct row_gather *gather, int64_t *sum)
{
    const int64_t block = nib_max(nib_format_of(&t->q)->block, 1);
    const bool bordered = t->q.block_dims[0] > 1 || nib_tensor_has(t, NIB_COLUMNWISE);
    int64_t rows = 0, total = 0;
    *sum = 0;
    for (int r = 0; r < comm->size; r++) {
        struct nib_geometry shard;
        TRY(shard_geometry(t, gather->dims[r], &shard));
        if (bordered && rows % block && shard.rows)
            return nib_fail(NIB_ERR_SHAPE, "the rows of rank %d would begin at row %lld, within a block of %lld", r,
                            (long long)rows, (long long)block);
        int64_t bytes = 0;
        for (int usage = 0; usage < 2; usage++)
            if (nib_tensor_has(t, (nib_usage)usage))
                bytes += packed_bytes(&t->q, (nib_usage)usage, &shard.usage[usage]);
        gather->counts[r] = (size_t)bytes;
        if (!nib_add(rows, shard.rows, &rows) || !nib_add(*sum, gather->dims[r], sum) || !nib_add(total, bytes, &total))
            return nib_fail(NIB_ERR_SHAPE, "the ranks have too many rows");
    }
    gather->mine = nib_alloc(gather->counts[comm->rank]);
    gather->all = nib_alloc((size_t)total);
    return gather->mine && gather->all ? NIB_OK
                                       : nib_fail(NIB_ERR_MEMORY, "no memory to gather %lld bytes", (long long)total);
}

static nib_status make_whole(const nib_tensor *t, int64_t dim, nib_tensor **out)
{
    nib_quantizer q = t->q;
    q.rowwise = nib_tensor_has(t, NIB_ROWWISE);
    q.columnwise = nib_tensor_has(t, NIB_COLUMNWISE);
    q.origin[0] = q.origin[1] = 0; /* that of the whole is for the caller to know */
    int64_t shape[NIB_MAX_RANK];
    memcpy(shape, t->shape, sizeof shape);
    shape[0] = dim;
    TRY(nib_tensor_new(&q, t->dtype, t->rank, shape, t->device, out));
    return nib_tensor_allocate(*out, q.rowwise, q.columnwise);
}

static nib_status exchange_rows(const nib_tensor *t, const nib_comm *comm, struct row_gather *gather)
{
    uint8_t *to = gather->mine;
    for (int usage = 0; usage < 2; usage++)
        if (nib_tensor_has(t, (nib_usage)usage))
            to = pack_usage(t, (nib_usage)usage, to);
    TRY(nib_gather(comm, "a gather of rows", gather->mine, gather->all, gather->counts));
    const uint8_t *from = gather->all;
    int64_t first = 0;
    for (int r = 0; r < comm->size; r++) {
        struct nib_geometry shard;
        TRY(shard_geometry(t, gather->dims[r], &shard)); /* it went well in plan_rows */
        for (int usage = 0; usage < 2; usage++)
            if (nib_tensor_has(t, (nib_usage)usage))
                from = unpack_usage(gather->whole, (nib_usage)usage, &shard.usage[usage], first, from);
        first += shard.rows;
    }
    /* Tensor scales that were not sent are the same on all ranks. */
    for (int usage = 0; usage < 2; usage++) {
        const struct nib_usage_memory memory = nib_tensor_memory(gather->whole, (nib_usage)usage);
        const struct nib_usage_geometry *g = &gather->whole->geometry.usage[usage];
        if (memory.codes && memory.tensor_scales && !sends_tensor_scales(&t->q, (nib_usage)usage))
            memcpy(memory.tensor_scales, nib_tensor_memory(t, (nib_usage)usage).tensor_scales,
                   (size_t)g->tensor_scales_bytes);
    }
    return NIB_OK;
}

nib_status nib_all_gather_tensor(const nib_tensor *t, const nib_comm *comm, nib_tensor **out)
{
    TRY(nib_check_comm("comm", comm, true));
    struct row_gather gather = { 0 };
    int64_t dim = 0;
    nib_status status = check_own_rows(t, comm, &gather);
    if (!status && !out)
        status = nib_fail(NIB_ERR_ARG, "nib_all_gather_tensor: out is NULL");
    status = nib_agree(comm, status, status ? 0 : row_key(t));
    if (status == NIB_ERR_MISMATCH)
        (void)nib_fail(status,
                       "the ranks' tensors differ in shape, options, usages or tensor scales: was the amax reduced?");
    if (!status)
        status = exchange(comm, &t->shape[0], sizeof *gather.dims, gather.dims, gather.counts);
    if (!status) {
        status = plan_rows(t, comm, &gather, &dim);
        if (!status)
            status = make_whole(t, dim, &gather.whole);
        status = nib_agree(comm, status, 0);
    }
    if (!status)
        status = exchange_rows(t, comm, &gather);
    if (!status) {
        *out = gather.whole;
        gather.whole = NULL;
    }
    free_row_gather(&gather);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard_group.c - groups: the rows of one array as many tensors, each with scales of its own (experts of a mixture).
 */
#include "shard/shard.h"

/* ---- Rows of an array ---- */

static nib_status check_group(const char *call, const nib_quantizer *q, const nib_array *x, const int64_t *counts,
                              size_t n, nib_quantizer *loaded)
{
    TRY(nib_quantizer_load(q, loaded));
    TRY(nib_check_array("x", x));
    TRY(nib_check_host(call, x->device));
    if (n && !counts)
        return nib_fail(NIB_ERR_ARG, "counts is NULL");
    if (x->rank != 2)
        return nib_fail(NIB_ERR_SHAPE, "x has rank 2, not %d", (int)x->rank);
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        if (counts[i] < 0 || !nib_add(sum, counts[i], &sum))
            return nib_fail(NIB_ERR_SHAPE, "the row count of member %zu is %lld", i, (long long)counts[i]);
    if (sum != x->shape[0])
        return nib_fail(NIB_ERR_SHAPE, "the members have %lld rows and x has %lld", (long long)sum,
                        (long long)x->shape[0]);
    loaded->origin[0] = loaded->origin[1] = 0; /* each is a whole of its own */
    return NIB_OK;
}

static nib_array rows_of(const nib_array *x, int64_t first, int64_t count)
{
    nib_array rows = *x;
    rows.shape[0] = count;
    if (count) /* beyond the last row there may be no memory */
        rows.offset = (size_t)((int64_t)x->offset + first * x->strides[0] * (nib_dtypes[x->dtype].bits / 8));
    return rows;
}

/* ---- Amaxes ---- */

/* The amaxes of one member: where each usage's begin, and how many there are. */
struct amax_layout {
    int64_t at[2], count;
};

static struct amax_layout layout_of(const nib_quantizer *q, const struct nib_geometry *geometry)
{
    const bool wanted[2] = { q->rowwise, q->columnwise };
    struct amax_layout layout = { { -1, -1 }, 0 };
    for (int usage = 0; usage < 2 && nib_format_of(q)->tensor_scales; usage++)
        if (wanted[usage]) {
            layout.at[usage] = layout.count;
            layout.count += geometry->usage[usage].tensor_scales;
        }
    return layout;
}

static nib_status member_geometry(const nib_quantizer *q, const nib_array *x, int64_t rows, struct nib_geometry *out)
{
    return nib_check_input(q, x->dtype, 2, (const int64_t[2]){ rows, x->shape[1] }, out);
}

nib_status nib_group_amax(const nib_quantizer *q, const nib_array *x, const int64_t *counts, size_t n,
                          float *const amax[2])
{
    NIB_REQUIRE(amax);
    nib_quantizer loaded;
    struct nib_geometry geometry;
    TRY(check_group(__func__, q, x, counts, n, &loaded));
    if (!nib_format_of(&loaded)->tensor_scales || loaded.row_scaled)
        return nib_fail(NIB_ERR_MODE, "there is not one amax per tensor and usage");
    for (size_t i = 0; i < n; i++) /* whatever can fail does so here, before anything is written */
        TRY(member_geometry(&loaded, x, counts[i], &geometry));
    loaded.amax_comm = NULL;
    int64_t first = 0;
    for (size_t i = 0; i < n; first += counts[i++]) {
        const nib_array rows = rows_of(x, first, counts[i]);
        float pair[2];
        if (n > 1) /* of one it is known already */
            TRY(member_geometry(&loaded, x, counts[i], &geometry));
        const struct amax_layout layout = layout_of(&loaded, &geometry);
        nib_find_amaxes(x->device, &loaded, &rows, &geometry, pair);
        for (int usage = 0; usage < 2; usage++)
            if (amax[usage])
                amax[usage][i] = layout.at[usage] < 0 ? 0 : pair[layout.at[usage]];
    }
    return NIB_OK;
}

/* The amaxes of all members, one after the other. */
static nib_status find_all(const nib_quantizer *q, const nib_array *x, const int64_t *counts, size_t n, float **out,
                           size_t *total)
{
    struct nib_geometry geometry;
    int64_t sum = 0, first = 0;
    for (size_t i = 0; i < n; i++) {
        TRY(member_geometry(q, x, counts[i], &geometry));
        if (!nib_add(sum, layout_of(q, &geometry).count, &sum))
            return nib_fail(NIB_ERR_SHAPE, "the members have too many rows");
    }
    *out = nib_alloc((size_t)sum * sizeof **out);
    if (!*out)
        return nib_fail(NIB_ERR_MEMORY, "no memory for %lld amaxes of %zu tensors", (long long)sum, n);
    float *to = *out;
    for (size_t i = 0; i < n; first += counts[i++]) {
        const nib_array rows = rows_of(x, first, counts[i]);
        TRY(member_geometry(q, x, counts[i], &geometry));
        nib_find_amaxes(x->device, q, &rows, &geometry, to);
        to += layout_of(q, &geometry).count;
    }
    *total = (size_t)sum;
    return NIB_OK;
}

/* Amaxes of all members and usages, reduced at once where there is a communicator. *out stays NULL where each member's
 * amaxes may be found when the member is quantized: there is nothing to reduce, and they take no memory. Collective. */
static nib_status group_amaxes(const nib_quantizer *q, const nib_comm *comm, const nib_array *x, const int64_t *counts,
                               size_t n, nib_status status, float **out)
{
    *out = NULL;
    if (!comm && (status || !q->row_scaled))
        return status;
    size_t total = 0;
    if (!status && !nib_format_of(q)->tensor_scales)
        status = nib_fail(NIB_ERR_MODE, "there is no amax per tensor to reduce: every block has its own");
    if (!status)
        status = find_all(q, x, counts, n, out, &total);
    uint64_t key = nib_mix(nib_mix(0, n), total); /* with amaxes per row, each must meet its like */
    for (size_t i = 0; i < n && !status && q->row_scaled; i++)
        key = nib_mix(key, (uint64_t)counts[i]);
    status = nib_agree(comm, status, key);
    if (!status && comm)
        status = nib_reduce(comm, "the reduction of amaxes", *out, total);
    if (status) {
        nib_free(*out);
        *out = NULL;
    }
    return status;
}

/* The overrides of a member's quantization; *amaxes moves on to the next member. */
static nib_overrides overrides_of(const nib_quantizer *q, const struct nib_geometry *geometry, const float **amaxes)
{
    nib_overrides overrides = { .bytes = sizeof overrides };
    if (!*amaxes)
        return overrides;
    const struct amax_layout layout = layout_of(q, geometry);
    for (int usage = 0; usage < 2; usage++)
        if (layout.at[usage] >= 0)
            overrides.amax[usage] = *amaxes + layout.at[usage];
    *amaxes += layout.count;
    return overrides;
}

/* ---- Split and quantize ---- */

/* New tensors from the rows of x, one after the other. */
static nib_status quantize_rows(const nib_quantizer *q, const nib_array *x, const int64_t *counts, size_t n,
                                const float *amaxes, nib_tensor **made)
{
    int64_t first = 0;
    for (size_t i = 0; i < n; first += counts[i++]) {
        const nib_array rows = rows_of(x, first, counts[i]);
        struct nib_geometry geometry;
        TRY(member_geometry(q, x, counts[i], &geometry));
        const nib_overrides overrides = overrides_of(q, &geometry, &amaxes);
        TRY(nib_quantize(q, &rows, &overrides, &made[i]));
    }
    return NIB_OK;
}

nib_status nib_split_quantize(const nib_quantizer *q, const nib_array *x, const int64_t *counts, size_t n,
                              nib_tensor **out)
{
    nib_quantizer loaded;
    float *amaxes;
    const nib_comm *comm = nib_amax_comm_of(q);
    nib_status status = check_group(__func__, q, x, counts, n, &loaded);
    if (!status && !out)
        status = nib_fail(NIB_ERR_ARG, "nib_split_quantize: out is NULL");
    loaded.amax_comm = NULL; /* amaxes are reduced here */
    nib_tensor **made = status ? NULL : nib_alloc_zeroed(n * sizeof *made);
    if (!status && !made)
        status = nib_fail(NIB_ERR_MEMORY, "no memory for %zu tensors", n);
    status = group_amaxes(&loaded, comm, x, counts, n, status, &amaxes);
    if (!status) {
        status = quantize_rows(&loaded, x, counts, n, amaxes, made);
        status = nib_agree(comm, status, 0); /* a rank that lacked memory for a member tells the others */
    }
    for (size_t i = 0; i < n && made; i++) {
        if (status)
            nib_tensor_destroy(made[i]);
        else
            out[i] = made[i];
    }
    nib_free(made);
    nib_free(amaxes);
    return status;
}

/* ---- Tensors in shared buffers ---- */

struct nib_group {
    nib_quantizer q;
    nib_dtype dtype;
    size_t n;
    int64_t cols;
    int64_t *rows;
    int64_t (*offsets)[NIB_PART_COUNT]; /* of each member in each buffer */
    nib_buffer *parts[NIB_PART_COUNT];
};

/* A part that the quantizer wants. */
static bool has_part(const nib_quantizer *q, nib_part part)
{
    const struct nib_format_facts *facts = nib_format_of(q);
    const bool wanted[2] = { q->rowwise, q->columnwise };
    for (int side = 0; side < 2; side++)
        if (wanted[side] && nib_part_of(facts, (nib_usage)side, (int)part / 2) == part)
            return true;
    return false;
}

static nib_status geometry_of_rows(const nib_group *group, int64_t rows, struct nib_geometry *out)
{
    return nib_check_input(&group->q, group->dtype, 2, (const int64_t[2]){ rows, group->cols }, out);
}

/* Where the members lie, and how large the buffers are. Each has the space of its rows rounded up to 128; tensor scales,
 * which have no padding, lie side by side. */
static nib_status lay_out(nib_group *group, int64_t total[NIB_PART_COUNT])
{
    for (size_t i = 0; i < group->n; i++) {
        struct nib_geometry own, padded;
        if (group->rows[i] < 0 || group->rows[i] > INT64_MAX / 2)
            return nib_fail(NIB_ERR_SHAPE, "member %zu has %lld rows", i, (long long)group->rows[i]);
        TRY(geometry_of_rows(group, group->rows[i], &own));
        TRY(geometry_of_rows(group, nib_round_up(group->rows[i], NIB_FP4_ALIGN_GRAPH), &padded));
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            const struct nib_geometry *space = part >= NIB_ROW_TENSOR_SCALE ? &own : &padded;
            group->offsets[i][part] = total[part];
            if (!nib_add(total[part], (int64_t)nib_part_bytes(space, (nib_part)part), &total[part]))
                return nib_fail(NIB_ERR_SHAPE, "the group takes too many bytes");
        }
    }
    return NIB_OK;
}

static nib_status build_group(nib_group *group)
{
    int64_t total[NIB_PART_COUNT] = { 0 };
    TRY(lay_out(group, total));
    for (int part = 0; part < NIB_PART_COUNT; part++)
        if (has_part(&group->q, (nib_part)part))
            TRY(nib_buffer_create((size_t)total[part], NULL, &group->parts[part]));
    for (size_t i = 0; i < group->n; i++) {
        nib_tensor *member;
        TRY(nib_group_member(group, i, &member));
        const nib_status status = nib_tensor_zero(member);
        nib_tensor_destroy(member);
        TRY(status);
    }
    return NIB_OK;
}

nib_status nib_group_create(const nib_quantizer *q, nib_dtype dtype, const int64_t *rows, size_t n, int64_t cols,
                            nib_group **out)
{
    NIB_REQUIRE(out);
    nib_quantizer loaded;
    TRY(nib_quantizer_load(q, &loaded));
    if (n && !rows)
        return nib_fail(NIB_ERR_ARG, "rows is NULL");
    nib_group *group = nib_alloc_zeroed(sizeof *group);
    if (!group)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a group");
    group->q = loaded;
    group->q.amax_comm = NULL; /* it may be gone long before the group */
    group->q.origin[0] = group->q.origin[1] = 0;
    group->dtype = dtype;
    group->n = n;
    group->cols = cols;
    group->rows = nib_alloc(n * sizeof *group->rows);
    group->offsets = nib_alloc_zeroed(n * sizeof *group->offsets);
    nib_status status = NIB_OK;
    if (!group->rows || !group->offsets)
        status = nib_fail(NIB_ERR_MEMORY, "no memory for a group of %zu", n);
    if (!status && n)
        memcpy(group->rows, rows, n * sizeof *rows);
    if (!status)
        status = build_group(group);
    if (status)
        nib_group_destroy(group);
    else
        *out = group;
    return status;
}

void nib_group_destroy(nib_group *group)
{
    if (!group)
        return;
    for (int part = 0; part < NIB_PART_COUNT; part++)
        nib_buffer_release(group->parts[part]);
    nib_free(group->rows);
    nib_free(group->offsets);
    nib_free(group);
}

size_t nib_group_count(const nib_group *group) { return group ? group->n : 0; }

nib_buffer *nib_group_buffer(const nib_group *group, nib_part part)
{
    return group && (unsigned)part < NIB_PART_COUNT ? group->parts[part] : NULL;
}

nib_status nib_group_offset(const nib_group *group, nib_part part, size_t i, int64_t *offset)
{
    NIB_REQUIRE(group);
    NIB_REQUIRE(offset);
    if ((unsigned)part >= NIB_PART_COUNT || i >= group->n)
        return nib_fail(NIB_ERR_ARG, "part %d of member %zu of %zu", (int)part, i, group->n);
    if (!group->parts[part])
        return nib_fail(NIB_ERR_USAGE, "the group has no such part");
    *offset = group->offsets[i][part];
    return NIB_OK;
}

static void release_parent(void *buffer) { nib_buffer_release(buffer); }

/* A place in a shared buffer, which it keeps alive. */
static nib_status borrow_part(nib_buffer *parent, int64_t offset, size_t bytes, nib_buffer **out)
{
    TRY(nib_buffer_borrow((char *)nib_buffer_data(parent) + offset, bytes, nib_buffer_device(parent), release_parent,
                          parent, out));
    nib_buffer_retain(parent);
    return NIB_OK;
}

nib_status nib_group_member(const nib_group *group, size_t i, nib_tensor **out)
{
    NIB_REQUIRE(group);
    NIB_REQUIRE(out);
    if (i >= group->n)
        return nib_fail(NIB_ERR_ARG, "member %zu of %zu", i, group->n);
    struct nib_geometry geometry;
    TRY(geometry_of_rows(group, group->rows[i], &geometry));
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_status status = NIB_OK;
    for (int part = 0; part < NIB_PART_COUNT && !status; part++)
        if (group->parts[part])
            status = borrow_part(group->parts[part], group->offsets[i][part], nib_part_bytes(&geometry, (nib_part)part),
                                 &parts[part]);
    if (!status)
        status = nib_tensor_from_buffers(&group->q, group->dtype, 2, (const int64_t[2]){ group->rows[i], group->cols },
                                         parts, NIB_PART_COUNT, out);
    for (int part = 0; part < NIB_PART_COUNT; part++)
        nib_buffer_release(parts[part]); /* the tensor has its own reference */
    return status;
}

nib_status nib_group_quantize(nib_group *group, const nib_array *x, const nib_comm *amax_comm)
{
    if (amax_comm)
        TRY(nib_check_comm("amax_comm", amax_comm, false));
    if (!group) /* the other ranks are waiting to hear of it */
        return nib_agree(amax_comm, nib_fail(NIB_ERR_ARG, "nib_group_quantize: group is NULL"), 0);
    nib_quantizer loaded;
    float *amaxes;
    nib_status status = check_group(__func__, &group->q, x, group->rows, group->n, &loaded);
    if (!status && (x->dtype != group->dtype || x->shape[1] != group->cols))
        status = nib_fail(NIB_ERR_MISMATCH, "x must be %s [..., %lld]", nib_dtypes[group->dtype].name,
                          (long long)group->cols);
    nib_tensor **members = status ? NULL : nib_alloc_zeroed(group->n * sizeof *members);
    if (!status && !members)
        status = nib_fail(NIB_ERR_MEMORY, "no memory for %zu tensors", group->n);
    for (size_t i = 0; i < group->n && !status; i++)
        status = nib_group_member(group, i, &members[i]);
    status = group_amaxes(&loaded, amax_comm, x, group->rows, group->n, status, &amaxes);
    /* From here on there is memory for all of it, and nothing left to fail. */
    const float *next = amaxes;
    int64_t first = 0;
    for (size_t i = 0; i < group->n && !status; first += group->rows[i++]) {
        const nib_array rows = rows_of(x, first, group->rows[i]);
        const nib_overrides overrides = overrides_of(&loaded, &members[i]->geometry, &next);
        const struct nib_usage_memory memory[2] = { nib_tensor_memory(members[i], NIB_ROWWISE),
                                                    nib_tensor_memory(members[i], NIB_COLUMNWISE) };
        status = nib_quantize_usages(x->device, &loaded, &rows, &overrides, &members[i]->geometry, memory);
    }
    for (size_t i = 0; i < group->n && members; i++)
        nib_tensor_destroy(members[i]);
    nib_free(members);
    nib_free(amaxes);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard.c - master weights: many parameters, many ranks, one reduction.
 *
 * First everything is checked and all memory is allocated; then the ranks agree that this went well everywhere; then
 * amaxes are reduced, and scales that do not follow from them are exchanged; and only then is anything written. From
 * there on nothing can fail.
 */
#include "shard/shard.h"

#include <stdlib.h>

#include "format/codec.h"
#include "base/os.h"

/* ---- What is to be done ---- */

struct parameter {
    nib_tensor *t;
    struct nib_shard shard;
    struct nib_code_place place[2];
    const float *scale; /* delayed scaling */
    float *amax_seen;
    int64_t amaxes[2]; /* where the amaxes of each usage begin among all; -1: it is not cast */
    int64_t scales;    /* where its chosen scales begin among all; -1: they follow from the amaxes */
};

struct plan {
    struct parameter *parameters;
    size_t n;
    float *amaxes;
    int64_t amax_count;
    struct nib_choices choices;
    size_t choice_count;
    uint8_t *scales; /* those that are chosen, and the tensor scales under which they are */
    float *tensor_scales;
    int64_t scale_count, tensor_scale_count;
    bool manual;
    uint64_t key; /* equal on ranks that want the same */
};

/* The lists as the caller has them, and its options as this version has them. */
struct lists {
    nib_tensor *const *params;
    const nib_array *const *masters;
    const int64_t *starts;
    size_t n_params, n_masters, n_starts;
    nib_master_options options;
};

static const nib_array *entry(const nib_array *const *list, size_t i) { return list ? list[i] : NULL; }

nib_status nib_blame(nib_status status, size_t i)
{
    if (!status)
        return NIB_OK;
    nib_error error;
    nib_get_error(&error);
    return nib_fail(status, "parameter %zu: %s", i, error.text);
}

static nib_status check_delayed(const nib_tensor *t, const float *scale, const float *amax_seen)
{
    if (!scale && !amax_seen)
        return NIB_OK;
    if (!nib_dialect_of(&t->q)->scale_of)
        return nib_fail(NIB_ERR_MODE, "%s has no delayed scaling", nib_format_of(&t->q)->name);
    if (scale && !(*scale > 0))
        return nib_fail(NIB_ERR_ARG, "its scale is not positive");
    return NIB_OK;
}

static nib_status plan_parameter(const struct lists *lists, size_t i, struct plan *plan)
{
    struct parameter *p = &plan->parameters[i];
    nib_tensor *t = lists->params[i];
    if (!t)
        return nib_fail(NIB_ERR_ARG, "it is NULL");
    const nib_master_options *o = &lists->options;
    *p = (struct parameter){ .t = t,
                             .scale = o->scales ? o->scales[i] : NULL,
                             .amax_seen = o->amax_seen ? o->amax_seen[i] : NULL,
                             .scales = -1 };
    TRY(nib_check_castable(t));
    TRY(nib_shard_init("its master", t, lists->masters[i], lists->starts[i], &p->shard));
    TRY(check_delayed(t, p->scale, p->amax_seen));
    const nib_array *const *shards[2] = { o->row_shards, o->col_shards };
    for (int usage = 0; usage < 2; usage++) {
        const nib_array *shard = entry(shards[usage], i);
        p->amaxes[usage] = -1;
        if (!nib_usage_is_cast(t, (nib_usage)usage)) {
            if (shard)
                return nib_fail(NIB_ERR_USAGE, "its %s usage is not cast and takes no shard",
                                nib_usage_name((nib_usage)usage));
            continue;
        }
        TRY(nib_check_code_place(usage ? "its columnwise shard" : "its rowwise shard", t, (nib_usage)usage,
                                 p->shard.start, p->shard.length, shard, &p->place[usage]));
        const struct nib_grid grid = nib_grid_of(t, (nib_usage)usage);
        p->amaxes[usage] = plan->amax_count;
        plan->amax_count += grid.rows * grid.cols; /* at most as many as bytes of scales, which were seen to fit */
        if (nib_scales_are_chosen(t)) {
            p->scales = plan->scale_count;
            plan->scale_count += grid.rows * grid.cols;
            plan->tensor_scale_count += grid.geometry->tensor_scales;
            plan->choice_count++;
        }
    }
    const uint64_t words[] = { (uint64_t)t->geometry.rows, (uint64_t)t->geometry.cols,
                               (uint64_t)t->dtype,         nib_quantizer_hash(&t->q),
                               p->scale != NULL,           p->scale ? nib_bits(*p->scale) : 0,
                               p->amaxes[1] >= 0 };
    for (size_t w = 0; w < sizeof words / sizeof *words; w++)
        plan->key = nib_mix(plan->key, words[w]);
    return NIB_OK;
}

/* Which buffer a parameter's rowwise codes lie in. */
struct place {
    const nib_buffer *codes;
    size_t index;
};

static int compare_places(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    if (x->codes != y->codes)
        return (uintptr_t)x->codes < (uintptr_t)y->codes ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* Whether each parameter is there once: two with one buffer are the same, or views of it. Sorted, since a model may have
 * very many. */
static nib_status check_once(const struct plan *plan)
{
    struct place *places = nib_alloc(plan->n * sizeof *places);
    if (!places)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a plan of %zu parameters", plan->n);
    for (size_t i = 0; i < plan->n; i++)
        places[i] = (struct place){ nib_tensor_kind(plan->parameters[i].t, NIB_ROWWISE, 0), i };
    qsort(places, plan->n, sizeof *places, compare_places);
    size_t first = 0, second = plan->n; /* the first parameter that was there before */
    for (size_t i = 1; i < plan->n; i++)
        if (places[i].codes == places[i - 1].codes && places[i].index < second) {
            first = places[i - 1].index;
            second = places[i].index;
        }
    nib_free(places);
    return second < plan->n ? nib_blame(nib_fail(NIB_ERR_ARG, "it is parameter %zu as well", first), second) : NIB_OK;
}

static nib_status check_lists(const struct lists *lists)
{
    if (lists->n_params != lists->n_masters || lists->n_params != lists->n_starts)
        return nib_fail(NIB_ERR_ARG, "there are %zu parameters, %zu masters and %zu starts", lists->n_params,
                        lists->n_masters, lists->n_starts);
    if (lists->n_params && (!lists->params || !lists->masters || !lists->starts))
        return nib_fail(NIB_ERR_ARG, "the list of %s is NULL",
                        !lists->params    ? "parameters"
                        : !lists->masters ? "masters"
                                          : "starts");
    return NIB_OK;
}

static void free_plan(struct plan *plan)
{
    nib_choices_free(&plan->choices);
    nib_free(plan->parameters);
    nib_free(plan->amaxes);
    nib_free(plan->scales);
    nib_free(plan->tensor_scales);
}

/* Memory for scales that are chosen, and which parameters they belong to. */
static nib_status plan_choices(struct plan *plan, int size)
{
    TRY(nib_choices_create(plan->choice_count, size, &plan->choices));
    plan->scales = nib_alloc((size_t)plan->scale_count);
    plan->tensor_scales = nib_alloc((size_t)plan->tensor_scale_count * sizeof *plan->tensor_scales);
    if (!plan->scales || !plan->tensor_scales)
        return nib_fail(NIB_ERR_MEMORY, "no memory for %lld scales", (long long)plan->scale_count);
    float *tensor_scales = plan->tensor_scales;
    for (size_t i = 0, k = 0; i < plan->n; i++) {
        const struct parameter *p = &plan->parameters[i];
        if (p->scales < 0)
            continue;
        plan->choices.list[k++] = (struct nib_choice){ .shard = &p->shard,
                                                       .grid = nib_grid_of(p->t, NIB_ROWWISE),
                                                       .index = i,
                                                       .amaxes = plan->amaxes + p->amaxes[NIB_ROWWISE],
                                                       .tensor_scales = tensor_scales,
                                                       .scales = plan->scales + p->scales };
        tensor_scales += p->t->geometry.usage[NIB_ROWWISE].tensor_scales;
    }
    return NIB_OK;
}

/* All that can fail on one rank alone. */
static nib_status make_plan(const struct lists *lists, int size, struct plan *plan)
{
    TRY(check_lists(lists));
    plan->n = lists->n_params;
    plan->manual = lists->options.manual_post_all_gather;
    plan->key = nib_mix(0, plan->n);
    plan->parameters = nib_alloc(plan->n * sizeof *plan->parameters);
    if (!plan->parameters)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a plan of %zu parameters", plan->n);
    for (size_t i = 0; i < plan->n; i++)
        TRY(nib_blame(plan_parameter(lists, i, plan), i));
    TRY(check_once(plan));
    plan->amaxes = nib_alloc((size_t)plan->amax_count * sizeof *plan->amaxes);
    if (!plan->amaxes)
        return nib_fail(NIB_ERR_MEMORY, "no memory for %lld amaxes", (long long)plan->amax_count);
    return plan->choice_count ? plan_choices(plan, size) : NIB_OK;
}

/* ---- Carrying it out ---- */

/* An amax that only a block without elements keeps: where the reduction leaves it, no rank has any of the block. */
static const float nobodys = -1;

static bool is_empty(const nib_tensor *t) { return t->geometry.rows == 0 || t->geometry.cols == 0; }

static void find_amaxes(const struct plan *plan)
{
    for (size_t i = 0; i < plan->n; i++)
        for (int usage = 0; usage < 2; usage++)
            if (plan->parameters[i].amaxes[usage] >= 0) {
                const struct parameter *p = &plan->parameters[i];
                const struct nib_grid grid = nib_grid_of(p->t, (nib_usage)usage);
                nib_shard_amax(&p->shard, &grid, is_empty(p->t) ? 0 : nobodys, plan->amaxes + p->amaxes[usage]);
            }
}

/* The same on all ranks, since the amaxes are. */
static nib_status check_owned(const struct plan *plan)
{
    for (size_t i = 0; i < plan->n; i++)
        for (int usage = 0; usage < 2; usage++) {
            const struct parameter *p = &plan->parameters[i];
            if (p->amaxes[usage] < 0)
                continue;
            const struct nib_grid grid = nib_grid_of(p->t, (nib_usage)usage);
            const float *amaxes = plan->amaxes + p->amaxes[usage];
            for (int64_t cell = 0; cell < grid.rows * grid.cols; cell++)
                if (amaxes[cell] < 0)
                    return nib_fail(NIB_ERR_SHAPE,
                                    "parameter %zu: no rank has an element of its %s block (%lld, %lld), and its codes "
                                    "would stay as they were",
                                    i, nib_usage_name((nib_usage)usage), (long long)(cell / grid.cols),
                                    (long long)(cell % grid.cols));
        }
    return NIB_OK;
}

static void cast_parameter(const struct plan *plan, const struct parameter *p)
{
    nib_tensor *t = p->t;
    for (int usage = 0; usage < 2; usage++) {
        if (p->amaxes[usage] < 0)
            continue;
        const struct nib_grid grid = nib_grid_of(t, (nib_usage)usage);
        const float *amaxes = plan->amaxes + p->amaxes[usage];
        nib_write_scales(t, &grid, amaxes, p->scale, p->scales < 0 ? NULL : plan->scales + p->scales);
        nib_shard_cast(&p->shard, &grid, amaxes, p->scale, p->place[usage]);
        if (p->amax_seen && usage == NIB_ROWWISE)
            *p->amax_seen = nib_fmax(*p->amax_seen, *amaxes); /* one per tensor, as check_delayed saw */
    }
    if (p->amaxes[NIB_COLUMNWISE] >= 0 || !nib_tensor_has(t, NIB_COLUMNWISE))
        return;
    /* It no longer goes with the rowwise codes. What the quantizer wants stays, so that post-processing knows. */
    if (plan->manual)
        t->columnwise_stale = true;
    else
        nib_tensor_drop(t, NIB_COLUMNWISE);
}

static nib_status run_plan(struct plan *plan, const nib_comm *comm)
{
    TRY(nib_choices_meet(comm, &plan->choices));
    find_amaxes(plan);
    TRY(nib_reduce(comm, "the reduction of amaxes", plan->amaxes, (size_t)plan->amax_count));
    TRY(check_owned(plan));
    TRY(nib_choices_make(comm, &plan->choices));
    for (size_t i = 0; i < plan->n; i++)
        cast_parameter(plan, &plan->parameters[i]);
    return NIB_OK;
}

static nib_status quantize_lists(struct lists *lists, const nib_master_options *options, const nib_comm *comm,
                                 nib_status status)
{
    TRY(nib_check_comm("comm", comm, true)); /* an unusable communicator cannot tell the others */
    lists->options = (nib_master_options){ .bytes = sizeof lists->options };
    if (!status && options)
        status = nib_struct_read("options", options, &lists->options, sizeof lists->options,
                                 NIB_UP_TO(nib_master_options, amax_seen));
    struct plan plan = { 0 };
    const nib_fpenv saved = nib_fpenv_enter();
    if (!status)
        status = make_plan(lists, comm->size, &plan);
    status = nib_agree(comm, status, plan.key);
    if (!status)
        status = run_plan(&plan, comm);
    nib_fpenv_leave(saved);
    free_plan(&plan);
    return status;
}

nib_status nib_quantize_master_weights(nib_tensor *const *params, size_t n_params, const nib_array *const *masters,
                                       size_t n_masters, const int64_t *starts, size_t n_starts, const nib_comm *comm,
                                       const nib_master_options *options)
{
    struct lists lists = { params, masters, starts, n_params, n_masters, n_starts, { 0 } };
    return quantize_lists(&lists, options, comm, NIB_OK);
}

nib_status nib_quantize_nvfp4_param_shard(nib_tensor *const *params, size_t n_params, const nib_array *const *masters,
                                          size_t n_masters, const int64_t *starts, size_t n_starts,
                                          const nib_comm *comm, const nib_array *const *row_shards)
{
    const nib_master_options options = { .bytes = sizeof options,
                                         .manual_post_all_gather = 1,
                                         .row_shards = row_shards };
    nib_status status = NIB_OK;
    for (size_t i = 0; params && i < n_params && !status; i++)
        if (params[i] && !nib_is_nvfp4tensor(params[i]))
            status = nib_fail(NIB_ERR_MODE, "parameter %zu is %s, not nvfp4", i, nib_format_of(&params[i]->q)->name);
    struct lists lists = { params, masters, starts, n_params, n_masters, n_starts, { 0 } };
    return quantize_lists(&lists, &options, comm, status);
}

/* ---- After the gather ---- */

static bool needs_columnwise(const nib_tensor *t)
{
    const bool there = nib_tensor_has(t, NIB_COLUMNWISE);
    return !(there && nib_usage_is_cast(t, NIB_COLUMNWISE)) && (there ? t->columnwise_stale : t->q.columnwise);
}

nib_status nib_post_all_gather_processing(nib_tensor *const *params, size_t n)
{
    if (n)
        NIB_REQUIRE(params);
    for (size_t i = 0; i < n; i++) {
        const nib_tensor *t = params[i];
        if (!t)
            return nib_fail(NIB_ERR_ARG, "parameter %zu is NULL", i);
        if (needs_columnwise(t) && (!nib_tensor_has(t, NIB_ROWWISE) || t->q.block_dims[0] == 1 || t->q.swizzled))
            return nib_fail(
                NIB_ERR_USAGE,
                "parameter %zu: a columnwise usage is built from rowwise codes of square blocks with compact "
                "scales",
                i);
        if (needs_columnwise(t))
            TRY(nib_blame(NIB_DEVICE_HAS(nib_device_of(t->device), build_columnwise), i));
    }
    for (size_t i = 0; i < n; i++)
        if (needs_columnwise(params[i]))
            TRY(nib_blame(nib_tensor_update_usage(params[i], -1, 1), i));
    return NIB_OK;
}

/* ---- FP4 helpers ---- */

int nib_get_fp4_align_size(void) { return NIB_FP4_ALIGN_GRAPH; }

int nib_is_nvfp4tensor(const nib_tensor *t) { return t && t->q.format == NIB_NVFP4; }

static nib_status require_nvfp4(const nib_tensor *t)
{
    NIB_REQUIRE(t);
    if (!nib_is_nvfp4tensor(t))
        return nib_fail(NIB_ERR_MODE, "the tensor is %s, not nvfp4", nib_format_of(&t->q)->name);
    return NIB_OK;
}

nib_status nib_get_nvfp4_rowwise_packed_shape(int rank, const int64_t *shape, int64_t *out)
{
    TRY(nib_check_shape("shape", rank, shape, NULL));
    if (rank == 0)
        return NIB_OK;
    NIB_REQUIRE(out);
    if (shape[rank - 1] % 2)
        return nib_fail(NIB_ERR_SHAPE, "the last dim is %lld: two codes share a byte", (long long)shape[rank - 1]);
    memmove(out, shape, (size_t)rank * sizeof *shape);
    out[rank - 1] /= 2;
    return NIB_OK;
}

nib_status nib_modify_nvfp4_rowwise_storage(nib_tensor *t, nib_buffer *buffer)
{
    TRY(require_nvfp4(t));
    return nib_tensor_rebind_rowwise(t, buffer);
}

nib_status nib_dequantize_fp4_tensor(const nib_tensor *t, const nib_array *out)
{
    TRY(require_nvfp4(t));
    return nib_dequantize(t, NIB_EITHER, out);
}

nib_status nib_param_buffer_range(int64_t elements, int64_t packed_bytes, int rank, int size, int64_t *first_element,
                                  int64_t *element_count, int64_t *first_byte, int64_t *byte_count)
{
    NIB_REQUIRE(first_element);
    NIB_REQUIRE(element_count);
    NIB_REQUIRE(first_byte);
    NIB_REQUIRE(byte_count);
    if (elements < 0 || packed_bytes < 0 || size < 1 || rank < 0 || rank >= size)
        return nib_fail(NIB_ERR_ARG, "rank %d of %d, of %lld elements and %lld bytes", rank, size, (long long)elements,
                        (long long)packed_bytes);
    if (elements % 2 || elements / 2 != packed_bytes)
        return nib_fail(
            NIB_ERR_MISMATCH,
            "%lld elements take %lld bytes, but the packed buffer has %lld: padded apart, shares of one are "
            "not shares of the other",
            (long long)elements, (long long)nib_ceil_div(elements, 2), (long long)packed_bytes);
    if (packed_bytes % size)
        return nib_fail(NIB_ERR_MISMATCH, "%lld bytes cannot be shared equally by %d ranks", (long long)packed_bytes,
                        size);
    const int64_t share = packed_bytes / size;
    *first_byte = rank * share;
    *byte_count = share;
    *first_element = 2 * *first_byte;
    *element_count = 2 * share;
    return NIB_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard_cases.h - one random sharded cast, seen from one rank: for threads of a test program and for processes under
 * MPI.
 *
 * Everything follows from the seed, so that all ranks have the same case in mind. A case returns the number of its
 * faults.
 */
#ifndef NIB_SHARD_CASES_H
#define NIB_SHARD_CASES_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nib_reference.h"
#include "nib_shard.h"

#define SHAPE(...) \
    (const int64_t[]) { __VA_ARGS__ }

static inline uint64_t case_random(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static inline int64_t case_below(uint64_t *state, int64_t n) { return (int64_t)(case_random(state) % (uint64_t)n); }

#define CASE_CHECK(condition, ...)                                                                             \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            fprintf(stderr, "  case %llu, rank %d of %d: ", (unsigned long long)seed, comm->rank, comm->size); \
            fprintf(stderr, __VA_ARGS__);                                                                      \
            fprintf(stderr, "\n");                                                                             \
            faults++;                                                                                          \
        }                                                                                                      \
    } while (0)

#define CASE_OK(call)                                                                                  \
    do {                                                                                               \
        nib_status case_status = (call);                                                               \
        CASE_CHECK(!case_status, "%s: %s: %s", #call, nib_status_name(case_status), nib_last_error()); \
    } while (0)

enum { CASE_PARAMS = 3, CASE_RANKS = 16 };

struct case_param {
    nib_quantizer q;
    nib_dtype dtype, master_dtype;
    int64_t shape[2], elements;
    float *master;      /* of the whole, F32 */
    uint16_t *master16; /* the same in BF16, where the master is that */
    void *rounded;      /* in the nominal dtype */
    nib_tensor *whole;  /* quantized in one piece */
    int64_t start[CASE_RANKS], length[CASE_RANKS];
    bool both; /* copies are cast */
};

/* Scales that take all of a block: the rule, how errors are measured, and what bounds the scales. */
static inline void case_scale_rule(uint64_t *state, nib_quantizer *q)
{
    const bool square = q->block_dims[0] == 16;
    q->rounding = NIB_ROUND_NEAREST;
    q->scale_rule = !square && case_below(state, 2) ? NIB_SCALE_SWEEP : NIB_SCALE_4OVER6;
    if (q->scale_rule == NIB_SCALE_4OVER6) {
        q->error_mode = (nib_error_mode)case_below(state, NIB_ERROR_MODE_COUNT);
        q->fast_error = (uint8_t)case_below(state, 2);
        q->e4m3_max = case_below(state, 2) ? 256 : 448;
    }
    if (case_below(state, 4) == 0)
        q->min_block_scale = 0x1p-6f;
}

static inline void case_options(uint64_t *state, struct case_param *p)
{
    static const int64_t widths[] = { 16, 48, 80, 272, 64, 128, 17, 33, 5, 1 };
    static const nib_rounding roundings[] = { NIB_ROUND_NEAREST, NIB_ROUND_NEAREST, NIB_ROUND_STOCHASTIC_8,
                                              NIB_ROUND_STOCHASTIC_24, NIB_ROUND_STOCHASTIC_UNBIASED };
    static const nib_dtype dtypes[] = { NIB_BF16, NIB_BF16, NIB_F32, NIB_F16 };
    const int64_t kind = case_below(state, 16), rule = case_below(state, 5);
    nib_quantizer *q = &p->q;
    nib_quantizer_init(q);
    if (kind < 7) { /* NVFP4, 16x16 */
        q->block_dims[0] = 16;
        q->rounding = roundings[case_below(state, 5)];
        if (rule < 2)
            case_scale_rule(state, q);
    } else if (kind < 10) { /* 1x16 */
        q->columnwise = 0;
        q->rounding = roundings[case_below(state, 5)];
        q->tensor_scale_rule = (nib_tensor_scale_rule)case_below(state, 3);
        q->row_scaled = case_below(state, 3) == 0;
        if (rule < 2)
            case_scale_rule(state, q);
    } else if (kind == 10) {
        q->columnwise = 0;
        q->dialect = (nib_dialect)case_below(state, NIB_DIALECT_COUNT);
    } else {
        static const nib_format formats[] = { NIB_FLOAT8, NIB_MXFP8, NIB_FLOAT8_BLOCK, NIB_MXFP8, NIB_MXFP4 };
        (void)nib_quantizer_init_format(q, formats[kind - 11]);
        if (kind == 14)
            q->block_dims[0] = 32;
        if (kind == 15)
            q->columnwise = 0;
        p->both = kind == 12;
    }
    q->seed = case_random(state);
    q->offset = case_random(state) >> 1;
    p->dtype = dtypes[case_below(state, 4)];
    p->master_dtype = case_below(state, 4) ? NIB_F32 : NIB_BF16;
    p->shape[0] = 1 + case_below(state, case_below(state, 4) ? 40 : 150);
    p->shape[1] = widths[case_below(state, sizeof widths / sizeof *widths)];
    p->elements = p->shape[0] * p->shape[1];
}

/* Numbers of all sizes, some zeros, now and then what is none; and what the quantization of the whole makes of them.
 * With four-over-six a columnwise usage of its own may choose otherwise where errors nearly tie: after a gather it is
 * built from the rowwise one, and so it is here. */
static inline nib_status case_data(uint64_t *state, struct case_param *p)
{
    const size_t n = (size_t)p->elements;
    static const float sizes[] = { 1, 1, 1, 1, 0x1p-16f, 0x1p-130f }; /* F16 and others are subnormal then */
    const bool odd_values = case_below(state, 12) == 0;
    const float size = sizes[case_below(state, sizeof sizes / sizeof *sizes)];
    nib_array x;
    p->master = malloc(n * sizeof(float));
    p->master16 = malloc(n * 2);
    p->rounded = malloc(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        const float u = (float)((double)(case_random(state) >> 11) * 0x1p-53 * 2 - 1);
        p->master[i] = case_below(state, 20) == 0 ? 0 : u * u * u * (case_below(state, 30) ? 1.0f : 8.0f) * size;
        if (odd_values && case_below(state, 50) == 0)
            p->master[i] = case_below(state, 20) ? (case_below(state, 2) ? nanf("") : -nanf("")) : INFINITY;
    }
    if (p->master_dtype == NIB_BF16) {
        (void)nib_encode(NIB_BF16, p->master, n, p->master16);
        (void)nib_decode(NIB_BF16, p->master16, n, p->master);
    }
    (void)nib_encode(p->dtype, p->master, n, p->rounded);
    nib_quantizer q = p->q;
    const bool rebuilt = q.columnwise && q.scale_rule == NIB_SCALE_4OVER6;
    q.columnwise = q.columnwise && !rebuilt;
    nib_status status = nib_array_init(&x, p->rounded, p->dtype, 2, p->shape);
    if (!status)
        status = nib_quantize(&q, &x, NULL, &p->whole);
    return status || !rebuilt ? status : nib_tensor_update_usage(p->whole, -1, 1);
}

/* Cuts anywhere, pieces dealt to ranks in any order, some ranks with nothing. */
static inline void case_cut(uint64_t *state, struct case_param *p, int size)
{
    int64_t cuts[CASE_RANKS + 1] = { 0 };
    int owner[CASE_RANKS];
    for (int i = 1; i < size; i++)
        cuts[i] = case_below(state, 4) ? case_below(state, p->elements + 1) : cuts[i - 1];
    cuts[size] = p->elements;
    for (int i = 1; i < size; i++)
        for (int j = i; j > 0 && cuts[j] < cuts[j - 1]; j--) {
            const int64_t swap = cuts[j];
            cuts[j] = cuts[j - 1];
            cuts[j - 1] = swap;
        }
    for (int i = 0; i < size; i++)
        owner[i] = i;
    for (int i = size - 1; i > 0; i--) {
        const int j = (int)case_below(state, i + 1), swap = owner[i];
        owner[i] = owner[j];
        owner[j] = swap;
    }
    for (int i = 0; i < size; i++) {
        p->start[owner[i]] = cuts[i];
        p->length[owner[i]] = cuts[i + 1] - cuts[i];
    }
}

static inline void *case_part(const nib_tensor *t, nib_part part)
{
    return nib_buffer_data(nib_tensor_buffer(t, part));
}

static inline int case_same_part(const nib_tensor *a, const nib_tensor *b, nib_part part)
{
    const size_t n = nib_buffer_bytes(nib_tensor_buffer(a, part));
    return n == nib_buffer_bytes(nib_tensor_buffer(b, part)) &&
           (n == 0 || memcmp(case_part(a, part), case_part(b, part), n) == 0);
}

/* One element's code, whatever the format. */
static inline uint8_t case_code(const struct case_param *p, const uint8_t *codes, int64_t i)
{
    if (p->q.format != NIB_NVFP4 && p->q.format != NIB_MXFP4)
        return codes[i];
    const int64_t row = i / p->shape[1], col = i % p->shape[1];
    return codes[row * ((p->shape[1] + 1) / 2) + col / 2] >> 4 * (col % 2) & 15;
}

static inline int case_check_cast(const nib_comm *comm, uint64_t seed, const struct case_param *p, const nib_tensor *t,
                                  bool fsdp)
{
    int faults = 0;
    const nib_part parts[] = { NIB_ROW_SCALE, NIB_ROW_TENSOR_SCALE, NIB_COL_SCALE };
    for (int i = 0; i < (p->both ? 3 : 2); i++)
        CASE_CHECK(case_same_part(t, p->whole, parts[i]), "scales or tensor scale differ (part %d, format %d)",
                   (int)parts[i], (int)p->q.format);
    const uint8_t *codes = case_part(t, NIB_ROW_DATA), *whole = case_part(p->whole, NIB_ROW_DATA);
    const uint8_t before = p->q.format == NIB_NVFP4 || p->q.format == NIB_MXFP4 ? 5 : 0x55;
    for (int64_t i = 0; i < p->elements && !faults; i++) {
        const bool own = !fsdp && i >= p->start[comm->rank] && i < p->start[comm->rank] + p->length[comm->rank];
        const uint8_t is = case_code(p, codes, i), wanted = own ? case_code(p, whole, i) : before;
        CASE_CHECK(is == wanted, "element %lld is %x, not %x (%s)", (long long)i, is, wanted,
                   own ? "own" : "another's");
    }
    return faults;
}

static inline int case_gather(const nib_comm *comm, uint64_t seed, const struct case_param *p, nib_tensor *t,
                              const nib_array *row_shard, const nib_array *col_shard)
{
    int faults = 0;
    const int64_t start = p->start[comm->rank], length = p->length[comm->rank];
    CASE_OK(nib_all_gather_param(t, NIB_ROWWISE, start, length, row_shard, comm));
    if (p->both)
        CASE_OK(nib_all_gather_param(t, NIB_COLUMNWISE, start, length, col_shard, comm));
    return faults;
}

/* What to do to the thread around a cast, if anything. */
static void (*case_before)(void), (*case_after)(void);

static inline int case_run(const nib_comm *comm, uint64_t seed)
{
    uint64_t state = seed;
    int faults = 0;
    const size_t n = 1 + (size_t)case_below(&state, CASE_PARAMS);
    const bool manual = case_below(&state, 2), fsdp = case_below(&state, 3) == 0;
    struct case_param params[CASE_PARAMS];
    memset(params, 0, sizeof params);
    nib_tensor *tensors[CASE_PARAMS] = { NULL };
    nib_array masters[CASE_PARAMS], shards[2][CASE_PARAMS];
    const nib_array *master_list[CASE_PARAMS] = { NULL }, *shard_list[2][CASE_PARAMS] = { { NULL } };
    int64_t starts[CASE_PARAMS];
    void *shard_bytes[2][CASE_PARAMS] = { { NULL } };
    bool nvfp4 = true;
    for (size_t i = 0; i < n; i++) {
        struct case_param *p = &params[i];
        case_options(&state, p);
        CASE_OK(case_data(&state, p));
        case_cut(&state, p, comm->size);
        nvfp4 = nvfp4 && p->q.format == NIB_NVFP4;
        CASE_OK(nib_tensor_create(&p->q, p->dtype, 2, p->shape, NULL, &tensors[i]));
        for (int part = 0; part < NIB_PART_COUNT; part++) { /* whatever was there before must not matter */
            nib_buffer *buffer = nib_tensor_buffer(tensors[i], (nib_part)part);
            if (nib_buffer_bytes(buffer))
                memset(nib_buffer_data(buffer), 0x55, nib_buffer_bytes(buffer));
        }
        const int64_t length = p->length[comm->rank];
        starts[i] = -1;
        if (case_random(&state) % 2 && length == 0) /* nothing, or an empty array; all ranks draw the number */
            continue;
        starts[i] = p->start[comm->rank];
        void *from = p->master_dtype == NIB_F32 ? (void *)(p->master + starts[i]) : (void *)(p->master16 + starts[i]);
        CASE_OK(nib_array_init(&masters[i], from, p->master_dtype, 1, &length));
        master_list[i] = &masters[i];
        for (int usage = 0; usage < (fsdp ? 1 + p->both : 0); usage++) {
            nib_byte_range range;
            CASE_OK(nib_tensor_byte_range(tensors[i], (nib_usage)usage, starts[i], length, &range));
            shard_bytes[usage][i] = malloc((size_t)range.count + 1);
            memset(shard_bytes[usage][i], 0x55, (size_t)range.count + 1);
            CASE_OK(nib_array_init(&shards[usage][i], shard_bytes[usage][i], NIB_U8, 1, &range.count));
            shard_list[usage][i] = &shards[usage][i];
        }
    }
    const nib_master_options options = { .bytes = sizeof options,
                                         .manual_post_all_gather = manual,
                                         .row_shards = fsdp ? shard_list[0] : NULL,
                                         .col_shards = fsdp ? shard_list[1] : NULL };
    if (case_before)
        case_before();
    if (nvfp4 && manual)
        CASE_OK(nib_quantize_nvfp4_param_shard(tensors, n, master_list, n, starts, n, comm, options.row_shards));
    else
        CASE_OK(nib_quantize_master_weights(tensors, n, master_list, n, starts, n, comm, &options));
    if (case_after)
        case_after();
    for (size_t i = 0; i < n && !faults; i++) {
        faults += case_check_cast(comm, seed, &params[i], tensors[i], fsdp);
        int columnwise = 0;
        CASE_OK(nib_tensor_get_usages(tensors[i], NULL, &columnwise));
        CASE_CHECK(columnwise == (params[i].both || (manual && params[i].q.columnwise)), "columnwise: %d", columnwise);
    }
    /* A rank with a fault gathers all the same: the others wait for it. */
    for (size_t i = 0; i < n; i++)
        faults += case_gather(comm, seed, &params[i], tensors[i], shard_list[0][i], shard_list[1][i]);
    CASE_OK(nib_post_all_gather_processing(tensors, n));
    for (size_t i = 0; i < n; i++) {
        int equal = 0;
        CASE_OK(nib_tensor_equal(tensors[i], params[i].whole, &equal));
        CASE_CHECK(equal, "parameter %zu (format %d, block %d, %lld x %lld) differs from the whole", i,
                   (int)params[i].q.format, (int)params[i].q.block_dims[0], (long long)params[i].shape[0],
                   (long long)params[i].shape[1]);
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CASE_CHECK(case_same_part(tensors[i], params[i].whole, (nib_part)part), "part %d of %zu differs", part, i);
        nib_tensor_destroy(tensors[i]);
        nib_tensor_destroy(params[i].whole);
        free(params[i].master), free(params[i].master16), free(params[i].rounded);
        free(shard_bytes[0][i]), free(shard_bytes[1][i]);
    }
    return faults;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_shard.c - sharded casts of master weights: the bytes of a quantization of the whole, for any cut, any number of
 * ranks; and what becomes of it when one rank fails.
 *
 * Built with NIB_TEST_WRAP_ALLOC, so that every allocation of one rank can be made to fail.
 */
#define _GNU_SOURCE
#include <fenv.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "team.h"

#include "shard_cases.h"
#include "test_alloc.h"
#include "test_tensors.h"

static nib_quantizer square_options(void)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.block_dims[0] = 16;
    return q;
}

/* ---- Any cut gives the bytes of the whole ---- */

static int one_case(const nib_comm *comm, void *context) { return case_run(comm, *(const uint64_t *)context); }

TEST(any_cut_any_ranks_equals_the_whole)
{
    const int cases = getenv("NIB_CAMPAIGN") ? 20000 : 500;
    for (int i = 0; i < cases && test_failures == 0; i++) {
        uint64_t seed = test_random();
        const int size = 1 + i % 9;
        const int faults = team_run(size, one_case, &seed);
        CHECK_THAT(faults == 0, "case %llu on %d ranks: %d faults", (unsigned long long)seed, size, faults);
    }
}

/* The caller's rounding mode, and what it does to subnormals, do not show in the bytes. */
#if defined(__x86_64__)
static void flush_subnormals(void) { _mm_setcsr(_mm_getcsr() | 0x8040); }
static void keep_subnormals(void) { _mm_setcsr(_mm_getcsr() & ~0x8040u); }
#else
static void flush_subnormals(void) {}
static void keep_subnormals(void) {}
#endif

static void disturb(void)
{
    fesetround(FE_UPWARD);
    flush_subnormals();
}

static void calm(void)
{
    fesetround(FE_TONEAREST);
    keep_subnormals();
}

TEST(the_callers_arithmetic_does_not_show)
{
    case_before = disturb, case_after = calm;
    for (int i = 0; i < 200 && test_failures == 0; i++) {
        uint64_t seed = test_random();
        CHECK_THAT(team_run(1 + i % 5, one_case, &seed) == 0, "case %llu", (unsigned long long)seed);
    }
    case_before = case_after = NULL;
}

TEST(one_rank_alone)
{
    for (int i = 0; i < 50; i++)
        CHECK(case_run(nib_comm_serial(), test_random()) == 0);
}

/* ---- What is rejected, before anything changes ---- */

/* Options that no cast takes: the parameter stays as it was. */
static void rejected_options(const nib_quantizer *q, nib_status status, const char *words)
{
    nib_tensor *t = NULL, *before = NULL;
    float inputs[64] = { 1 };
    const nib_array master = array_of(inputs, NIB_F32, 1, SHAPE(64)), *list = &master;
    const int64_t start = 0;
    int equal = 0;
    CHECK_OK(nib_tensor_create(q, NIB_BF16, 2, SHAPE(32, 32), NULL, &t));
    CHECK_OK(nib_tensor_clone(t, &before));
    CHECK_FAILS(nib_quantize_master_weights(&t, 1, &list, 1, &start, 1, nib_comm_serial(), NULL), status, words);
    CHECK(strstr(nib_last_error(), "parameter 0") != NULL);
    CHECK_OK(nib_tensor_equal(t, before, &equal));
    CHECK(equal);
    int64_t rows, cols;
    CHECK_FAILS(nib_amax_grid(t, NIB_ROWWISE, &rows, &cols), status, words);
    nib_tensor_destroy(t);
    nib_tensor_destroy(before);
}

TEST(options_that_a_part_of_a_block_cannot_know)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.columnwise = 0;
    nib_quantizer rht = q, swizzled = q, columnwise = q, only = square_options();
    rht.rht_rowwise = 1;
    rejected_options(&rht, NIB_ERR_MODE, "RHT");
    swizzled.swizzled = 1;
    rejected_options(&swizzled, NIB_ERR_MODE, "swizzled");
    columnwise.columnwise = 1;
    rejected_options(&columnwise, NIB_ERR_USAGE, "cannot be built");
    only.rowwise = 0;
    rejected_options(&only, NIB_ERR_USAGE, "no rowwise usage");
}

TEST(lists_and_masters_that_do_not_fit)
{
    const nib_quantizer q = square_options();
    float inputs[600] = { 1 };
    uint8_t bytes[256];
    nib_tensor *t[2] = { NULL }, *before = NULL, *twice[2], *gap[2];
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, 32), NULL, &t[0]));
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, 32), NULL, &t[1]));
    CHECK_OK(nib_tensor_clone(t[0], &before));
    twice[0] = twice[1] = gap[0] = t[0], gap[1] = NULL;
    const nib_comm *comm = nib_comm_serial();
    const nib_array good = array_of(inputs, NIB_F32, 1, SHAPE(64)), *masters[2] = { &good, NULL };
    const int64_t starts[2] = { 3, -1 };
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 1, starts, 2, comm, NULL), NIB_ERR_ARG, "1 masters");
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 1, comm, NULL), NIB_ERR_ARG, "1 starts");
    CHECK_FAILS(nib_quantize_master_weights(NULL, 2, masters, 2, starts, 2, comm, NULL), NIB_ERR_ARG,
                "parameters is NULL");
    CHECK_FAILS(nib_quantize_master_weights(t, 2, NULL, 2, starts, 2, comm, NULL), NIB_ERR_ARG, "masters is NULL");
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, NULL, 2, comm, NULL), NIB_ERR_ARG, "starts is NULL");
    CHECK_FAILS(nib_quantize_master_weights(gap, 2, masters, 2, starts, 2, comm, NULL), NIB_ERR_ARG,
                "parameter 1: it is NULL");
    CHECK_FAILS(nib_quantize_master_weights(twice, 2, masters, 2, starts, 2, comm, NULL), NIB_ERR_ARG,
                "parameter 0 as well");
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, NULL, NULL), NIB_ERR_ARG, "comm is NULL");
    nib_tensor *view = NULL;
    CHECK_OK(nib_tensor_view(t[0], 2, SHAPE(16, 32), &view));
    CHECK_FAILS(nib_quantize_master_weights((nib_tensor *[2]){ t[0], view }, 2, masters, 2, starts, 2, comm, NULL),
                NIB_ERR_ARG, "parameter 0 as well");
    nib_tensor_destroy(view);
    nib_comm lacking = *comm;
    lacking.agree = NULL;
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, &lacking, NULL), NIB_ERR_ARG, "no agree");
    nib_master_options options = { .bytes = 1 };
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, comm, &options), NIB_ERR_ARG, "options");
    const struct {
        nib_array master;
        int64_t start;
        nib_status status;
        const char *words;
    } cases[] = {
        { good, -1, NIB_ERR_ARG, "begins at -1" },
        { good, -2, NIB_ERR_ARG, "begins at -2" },
        { good, 449, NIB_ERR_SHAPE, "64 elements from 449 on, of a parameter of 512" },
        { good, INT64_MAX, NIB_ERR_SHAPE, "of a parameter of 512" },
        { array_of(inputs, NIB_F16, 1, SHAPE(64)), 0, NIB_ERR_DTYPE, "F32 or BF16, not F16" },
        { array_of(inputs, NIB_F32, 2, SHAPE(8, 8)), 0, NIB_ERR_SHAPE, "rank 1" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const nib_array *list[2] = { &cases[i].master, NULL };
        const int64_t at[2] = { cases[i].start, -1 };
        CHECK_FAILS(nib_quantize_master_weights(t, 2, list, 2, at, 2, comm, NULL), cases[i].status, cases[i].words);
    }
    const nib_array *none[2] = { NULL, NULL };
    CHECK_FAILS(nib_quantize_master_weights(t, 2, none, 2, starts, 2, comm, NULL), NIB_ERR_ARG,
                "begins at element 3 but is NULL");

    /* Shards: 64 elements from 3 on take bytes 1 to 33. */
    nib_array shard = array_of(bytes, NIB_U8, 1, SHAPE(32));
    const nib_array *shards[2] = { &shard, NULL };
    options = (nib_master_options){ .bytes = sizeof options, .row_shards = shards };
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, comm, &options), NIB_ERR_SHAPE, "take 33");
    shard = array_of(bytes, NIB_I8, 1, SHAPE(33));
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, comm, &options), NIB_ERR_DTYPE, "U8");
    options = (nib_master_options){ .bytes = sizeof options, .col_shards = shards };
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, comm, &options), NIB_ERR_USAGE,
                "takes no shard");
    const float scale = 2, *scales[2] = { &scale, NULL };
    options = (nib_master_options){ .bytes = sizeof options, .scales = scales };
    CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, comm, &options), NIB_ERR_MODE, "delayed");
    int equal = 0;
    CHECK_OK(nib_tensor_equal(t[0], before, &equal));
    CHECK(equal);

    nib_quantizer float8;
    nib_tensor *other = NULL;
    CHECK_OK(nib_quantizer_init_format(&float8, NIB_FLOAT8));
    CHECK_OK(nib_tensor_create(&float8, NIB_BF16, 2, SHAPE(16, 32), NULL, &other));
    CHECK_FAILS(nib_quantize_nvfp4_param_shard(&other, 1, masters, 1, starts, 1, comm, NULL), NIB_ERR_MODE,
                "not nvfp4");
    CHECK_OK(nib_quantize_nvfp4_param_shard(NULL, 0, NULL, 0, NULL, 0, comm, NULL));
    CHECK_OK(nib_quantize_master_weights(NULL, 0, NULL, 0, NULL, 0, comm, NULL));
    nib_tensor_destroy(other), nib_tensor_destroy(t[0]), nib_tensor_destroy(t[1]), nib_tensor_destroy(before);
}

/* The first parameter that was there before is named, and where. */
TEST(a_parameter_that_is_there_twice)
{
    const nib_quantizer q = square_options();
    nib_tensor *t[5] = { NULL };
    const nib_array *none[5] = { NULL };
    const int64_t starts[5] = { -1, -1, -1, -1, -1 };
    for (int i = 0; i < 5; i++)
        CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, 16), NULL, &t[i]));
    nib_tensor *const lists[][5] = { { t[0], t[1], t[2], t[1], t[0] }, { t[4], t[3], t[4], t[2], t[4] } };
    const char *const words[] = { "parameter 3: it is parameter 1 as well", "parameter 2: it is parameter 0 as well" };
    for (int i = 0; i < 2; i++)
        CHECK_FAILS(nib_quantize_master_weights(lists[i], 5, none, 5, starts, 5, nib_comm_serial(), NULL), NIB_ERR_ARG,
                    words[i]);
    for (int i = 0; i < 5; i++)
        nib_tensor_destroy(t[i]);
}

/* ---- One rank fails ---- */

struct failing {
    int rank, kind; /* which rank fails, and how */
    nib_status wanted;
};

static int fail_on_one(const nib_comm *comm, void *context)
{
    const struct failing *failing = context;
    const uint64_t seed = (uint64_t)failing->kind;
    int faults = 0, equal = 0;
    const bool here = comm->rank == failing->rank;
    nib_quantizer q = square_options();
    nib_tensor *t[2] = { NULL }, *before[2] = { NULL };
    float inputs[64];
    for (int i = 0; i < 64; i++)
        inputs[i] = (float)(comm->rank + i);
    for (int i = 0; i < 2; i++) {
        if (here && failing->kind == 0)
            q.swizzled = 1;
        CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(32, here && failing->kind == 1 ? 16 : 48), NULL, &t[i]));
        CASE_OK(nib_tensor_clone(t[i], &before[i]));
    }
    nib_array master = { 0 };
    CASE_OK(nib_array_init(&master, inputs, here && failing->kind == 2 ? NIB_F16 : NIB_F32, 1, SHAPE(63)));
    const nib_array *masters[2] = { &master, NULL };
    const int64_t starts[2] = { here && failing->kind == 3 ? 32 * 48 - 5 : 64 * comm->rank + 1, -1 };
    const size_t n = here && failing->kind == 4 ? 1 : 2;
    const nib_status status = nib_quantize_master_weights(t, n, masters, n, starts, n, comm, NULL);
    CASE_CHECK(status == failing->wanted, "kind %d: %s: %s", failing->kind, nib_status_name(status), nib_last_error());
    CASE_CHECK(nib_last_error()[0] != 0, "no message");
    for (int i = 0; i < 2; i++) {
        CASE_OK(nib_tensor_equal(t[i], before[i], &equal));
        CASE_CHECK(equal, "parameter %d has changed", i);
        nib_tensor_destroy(t[i]), nib_tensor_destroy(before[i]);
    }
    return faults;
}

TEST(one_rank_with_a_bad_argument_makes_all_fail)
{
    static const nib_status wanted[] = { NIB_ERR_MODE, NIB_ERR_MISMATCH, NIB_ERR_DTYPE, NIB_ERR_SHAPE,
                                         NIB_ERR_MISMATCH };
    for (int size = 2; size <= 5; size++)
        for (int rank = 0; rank < size; rank++)
            for (int kind = 0; kind < 5; kind++)
                CHECK(team_run(size, fail_on_one, &(struct failing){ rank, kind, wanted[kind] }) == 0);
}

#ifdef NIB_TEST_WRAP_ALLOC
enum call { CALL_CAST, CALL_CHOOSE, CALL_GATHER, CALL_ROWS, CALL_QUANTIZE, CALL_ROW_SCALED, CALL_SPLIT, CALL_COUNT };

struct starving {
    enum call call;
    int rank;
    long left; /* allocations that the rank has */
    int went_through;
};

/* Each call with one rank's n-th allocation failing. */
static int starve_one(const nib_comm *comm, void *context)
{
    struct starving *starving = context;
    const uint64_t seed = (uint64_t)starving->call;
    int faults = 0, equal = 0;
    nib_quantizer q = square_options();
    if (starving->call == CALL_CHOOSE)
        q.scale_rule = NIB_SCALE_4OVER6;
    nib_tensor *t = NULL, *before = NULL, *whole = NULL, *split[2] = { NULL };
    float inputs[32 * 48];
    nib_array x = { 0 }, master = { 0 };
    for (int i = 0; i < 32 * 48; i++)
        inputs[i] = (float)((i * 7 + comm->rank) % 13);
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(32, 48), NULL, &t));
    CASE_OK(nib_tensor_clone(t, &before));
    CASE_OK(nib_array_init(&master, inputs, NIB_F32, 1, SHAPE(512)));
    CASE_OK(nib_array_init(&x, inputs, NIB_F32, 2, SHAPE(32, 48)));
    const nib_array *list = &master;
    const int64_t start = 512 * comm->rank;
    q.amax_comm = comm;
    if (starving->call == CALL_ROW_SCALED)
        q.row_scaled = 1, q.block_dims[0] = 1;
    if (comm->rank == starving->rank)
        allocations_left = starving->left;
    nib_status status = NIB_OK;
    if (starving->call == CALL_CAST || starving->call == CALL_CHOOSE)
        status = nib_quantize_master_weights(&t, 1, &list, 1, &start, 1, comm, NULL);
    else if (starving->call == CALL_GATHER)
        status = nib_all_gather_param(t, NIB_ROWWISE, start, 512, NULL, comm);
    else if (starving->call == CALL_ROWS)
        status = nib_all_gather_tensor(t, comm, &whole);
    else if (starving->call == CALL_SPLIT)
        status = nib_split_quantize(&q, &x, SHAPE(16, 16), 2, split);
    else
        status = nib_quantize(&q, &x, NULL, &whole);
    const bool spent = allocations_left < 0; /* the failing one was reached */
    allocations_left = -1;
    if (comm->rank == starving->rank)
        starving->went_through = !spent;
    (void)comm->barrier(comm->context); /* all see what that rank wrote */
    CASE_CHECK(status == (starving->went_through ? NIB_OK : NIB_ERR_MEMORY), "call %d, allocation %ld: %s: %s",
               (int)starving->call, starving->left, nib_status_name(status), nib_last_error());
    if (status) {
        CASE_OK(nib_tensor_equal(t, before, &equal));
        CASE_CHECK(equal && !whole && !split[0], "something has changed");
    }
    nib_tensor_destroy(t), nib_tensor_destroy(before), nib_tensor_destroy(whole);
    nib_tensor_destroy(split[0]), nib_tensor_destroy(split[1]);
    return faults;
}

TEST(one_rank_without_memory_makes_all_fail)
{
    for (int call = 0; call < CALL_COUNT; call++)
        for (int rank = 0; rank < 3; rank++) {
            struct starving starving = { (enum call)call, rank, 0, 0 };
            for (; !starving.went_through && starving.left < 100 && !test_failures; starving.left++)
                CHECK(team_run(3, starve_one, &starving) == 0);
            CHECK_THAT(starving.left > 2 && starving.left < 100, "call %d: %ld allocations", call, starving.left);
        }
}
#endif

/* ---- What is moved ---- */

struct counting {
    int reductions, agreements, gathers;
    size_t inputs, bytes;
    nib_status answer;
    int failing_gather; /* which one fails, from 1 on */
};

static nib_status count_reduction(void *context, float *values, size_t n)
{
    struct counting *counting = context;
    (void)values;
    counting->reductions++;
    counting->inputs += n;
    return nib_set_error(counting->answer, "the cable is out");
}

static nib_status count_agreement(void *context, nib_status status, uint64_t key)
{
    (void)key;
    ((struct counting *)context)->agreements++;
    return status;
}

/* What the other rank sends is nothing, and in the exchange of pieces that it has nothing. */
static nib_status count_gather(void *context, const void *mine, void *all, const size_t *counts)
{
    struct counting *counting = context;
    counting->gathers++;
    counting->bytes += counts[0];
    if (counts[0])
        memcpy(all, mine, counts[0]);
    if (counts[1])
        memset((char *)all + counts[0], 0, counts[1]);
    return counting->gathers == counting->failing_gather ? NIB_ERR_IO : NIB_OK;
}

static nib_comm counting_comm(struct counting *counting)
{
    nib_comm comm = *nib_comm_serial();
    comm.context = counting;
    comm.size = 2; /* the other has nothing */
    comm.allreduce_max_f32 = count_reduction;
    comm.agree = count_agreement;
    comm.allgather = count_gather;
    return comm;
}

TEST(one_reduction_of_four_bytes_per_block)
{
    nib_tensor *t[3] = { NULL }, *before = NULL;
    nib_quantizer q[3] = { square_options(), square_options(), square_options() };
    float *inputs = normals(256 * 256);
    const nib_array all = array_of(inputs, NIB_F32, 1, SHAPE(256 * 256)),
                    some = array_of(inputs, NIB_F32, 1, SHAPE(561)), few = array_of(inputs, NIB_F32, 1, SHAPE(200)),
                    *masters[3] = { &all, &some, &few };
    const int64_t starts[3] = { 0, 0, 0 };
    q[2].block_dims[0] = 1, q[2].columnwise = 0;
    CHECK_OK(nib_tensor_create(&q[0], NIB_BF16, 2, SHAPE(256, 256), NULL, &t[0]));
    CHECK_OK(nib_tensor_create(&q[1], NIB_BF16, 2, SHAPE(17, 33), NULL, &t[1]));
    CHECK_OK(nib_tensor_create(&q[2], NIB_BF16, 3, SHAPE(2, 5, 20), NULL, &t[2]));
    CHECK_OK(nib_tensor_clone(t[0], &before));
    struct counting counting = { .answer = NIB_ERR_IO };
    const nib_comm comm = counting_comm(&counting);
    CHECK_FAILS(nib_quantize_master_weights(t, 3, masters, 3, starts, 3, &comm, NULL), NIB_ERR_COMM,
                "the reduction of amaxes over 2 ranks failed: NIB_ERR_IO: the cable is out");
    int equal = 0;
    CHECK_OK(nib_tensor_equal(t[0], before, &equal));
    CHECK(equal);
    counting = (struct counting){ .answer = NIB_OK };
    CHECK_OK(nib_quantize_master_weights(t, 3, masters, 3, starts, 3, &comm, NULL));
    CHECK(counting.reductions == 1 && counting.agreements == 1 && counting.gathers == 0);
    CHECK_THAT(counting.inputs == 256 + 2 * 3 + 10 * 2, "%zu", counting.inputs);
    for (int i = 0; i < 3; i++)
        nib_tensor_destroy(t[i]);
    nib_tensor_destroy(before);
    free(inputs);
}

/* Four-over-six: the same reduction, the pieces of each rank, and one byte per block. Whichever collective fails,
 * nothing has changed. */
TEST(one_gather_for_scales_that_are_chosen)
{
    nib_tensor *t[2] = { NULL }, *before = NULL;
    nib_quantizer q[2] = { square_options(), square_options() };
    float *inputs = normals(256 * 256);
    const nib_array all = array_of(inputs, NIB_F32, 1, SHAPE(256 * 256)),
                    few = array_of(inputs, NIB_F32, 1, SHAPE(200)), *masters[2] = { &all, &few };
    const int64_t starts[2] = { 0, 0 };
    int equal = 0;
    q[0].scale_rule = NIB_SCALE_4OVER6;
    q[1].block_dims[0] = 1, q[1].columnwise = 0, q[1].scale_rule = NIB_SCALE_SWEEP;
    CHECK_OK(nib_tensor_create(&q[0], NIB_BF16, 2, SHAPE(256, 256), NULL, &t[0]));
    CHECK_OK(nib_tensor_create(&q[1], NIB_BF16, 3, SHAPE(2, 5, 20), NULL, &t[1]));
    CHECK_OK(nib_tensor_clone(t[0], &before));
    struct counting counting;
    const nib_comm comm = counting_comm(&counting);
    for (int gather = 1; gather <= 2; gather++) {
        counting = (struct counting){ .failing_gather = gather };
        CHECK_FAILS(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, &comm, NULL), NIB_ERR_COMM, "NIB_ERR_IO");
        CHECK_OK(nib_tensor_equal(t[0], before, &equal));
        CHECK(equal);
    }
    counting = (struct counting){ 0 };
    CHECK_OK(nib_quantize_master_weights(t, 2, masters, 2, starts, 2, &comm, NULL));
    CHECK(counting.reductions == 1 && counting.agreements == 2 && counting.gathers == 2);
    CHECK_THAT(counting.inputs == 256 + 10 * 2, "%zu", counting.inputs);
    CHECK_THAT(counting.bytes == 2 * 16 + 256 + 10 * 2, "%zu", counting.bytes);
    nib_tensor_destroy(t[0]), nib_tensor_destroy(t[1]), nib_tensor_destroy(before);
    free(inputs);
}

/* Two parameters whose bands are all divided, and that have more numbers than one gather takes. */
enum { ROUND_ROWS = 64, ROUND_COLS = 40000 };

static int many_rounds(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    int faults = 0;
    float *x = context;
    const int64_t n = ROUND_ROWS * ROUND_COLS, share = n / comm->size, start = share * comm->rank;
    nib_quantizer q = square_options();
    q.scale_rule = NIB_SCALE_4OVER6, q.columnwise = 0;
    nib_tensor *t[2] = { NULL }, *whole = NULL;
    nib_array master, all;
    CASE_OK(nib_array_init(&master, x + start, NIB_F32, 1, &share));
    CASE_OK(nib_array_init(&all, x, NIB_F32, 2, SHAPE(ROUND_ROWS, ROUND_COLS)));
    for (int i = 0; i < 2; i++)
        CASE_OK(nib_tensor_create(&q, NIB_F32, 2, SHAPE(ROUND_ROWS, ROUND_COLS), NULL, &t[i]));
    CASE_OK(nib_quantize_master_weights(t, 2, (const nib_array *const[2]){ &master, &master }, 2,
                                        (const int64_t[2]){ start, start }, 2, comm, NULL));
    CASE_OK(nib_quantize(&q, &all, NULL, &whole));
    for (int i = 0; i < 2; i++) {
        int equal = 0;
        CASE_OK(nib_all_gather_param(t[i], NIB_ROWWISE, start, share, NULL, comm));
        CASE_OK(nib_tensor_equal(t[i], whole, &equal));
        CASE_CHECK(equal, "parameter %d differs from the whole", i);
        nib_tensor_destroy(t[i]);
    }
    nib_tensor_destroy(whole);
    return faults;
}

TEST(more_numbers_than_one_gather_takes)
{
    float *x = normals(ROUND_ROWS * ROUND_COLS);
    CHECK(team_run(5, many_rounds, x) == 0);
    free(x);
}

/* ---- Pieces that do not make up the parameter ---- */

struct uncovered {
    nib_scale_rule rule;
    int64_t start[3], length[3];
    const char *words;
};

static int leave_gap(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    const struct uncovered *c = context;
    int faults = 0, equal = 0;
    float inputs[512] = { 1 };
    nib_quantizer q = square_options();
    nib_tensor *t[2] = { NULL }, *before = NULL;
    nib_array master, whole;
    q.scale_rule = c->rule;
    for (int i = 0; i < 2; i++)
        CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(32, 16), NULL, &t[i]));
    CASE_OK(nib_tensor_clone(t[0], &before));
    CASE_OK(nib_array_init(&master, inputs, NIB_F32, 1, &c->length[comm->rank]));
    CASE_OK(nib_array_init(&whole, inputs, NIB_F32, 1, SHAPE(512)));
    const nib_array *masters[2] = { comm->rank ? NULL : &whole, &master };
    const int64_t starts[2] = { comm->rank ? -1 : 0, c->start[comm->rank] };
    const nib_status status = nib_quantize_master_weights(t, 2, masters, 2, starts, 2, comm, NULL);
    CASE_CHECK(status == NIB_ERR_SHAPE && strstr(nib_last_error(), c->words) && strstr(nib_last_error(), "parameter 1"),
               "%s: %s, not '%s'", nib_status_name(status), nib_last_error(), c->words);
    for (int i = 0; i < 2; i++) {
        CASE_OK(nib_tensor_equal(t[i], before, &equal));
        CASE_CHECK(equal, "parameter %d has changed", i);
        nib_tensor_destroy(t[i]);
    }
    nib_tensor_destroy(before);
    return faults;
}

TEST(pieces_that_leave_gaps_are_refused)
{
    struct uncovered cases[] = {
        { NIB_SCALE_RTN, { 0, 100, 200 }, { 100, 100, 56 }, "no rank has an element of its rowwise block (1, 0)" },
        { NIB_SCALE_RTN, { 0, 0, 0 }, { 0, 0, 0 }, "no rank has an element of its rowwise block (0, 0)" },
        { NIB_SCALE_4OVER6, { 0, 100, 200 }, { 100, 100, 56 }, "no rank has elements 256 to 511" },
        { NIB_SCALE_4OVER6, { 200, 100, 0 }, { 312, 99, 100 }, "no rank has elements 199 to 199" },
        { NIB_SCALE_4OVER6, { 0, 100, 200 }, { 101, 100, 312 }, "ranks 0 and 1 overlap: both have element 100" },
        { NIB_SCALE_4OVER6, { 1, 100, 200 }, { 99, 100, 312 }, "no rank has elements 0 to 0" },
        { NIB_SCALE_4OVER6, { 0, 0, 0 }, { 512, 512, 0 }, "overlap" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK(team_run(3, leave_gap, &cases[i]) == 0);
}

/* A parameter without elements has nothing to own. */
TEST(parameters_without_elements)
{
    static const nib_format formats[] = { NIB_NVFP4, NIB_FLOAT8, NIB_MXFP8 };
    for (size_t i = 0; i < 2 * sizeof formats / sizeof *formats; i++) {
        nib_quantizer q;
        nib_tensor *t = NULL;
        const nib_array *none = NULL;
        CHECK_OK(nib_quantizer_init_format(&q, formats[i / 2]));
        q.columnwise = 0;
        if (i < 2)
            q.scale_rule = i ? NIB_SCALE_4OVER6 : NIB_SCALE_RTN;
        CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, i % 2 ? SHAPE(0, 16) : SHAPE(16, 0), NULL, &t));
        CHECK_OK(nib_quantize_master_weights(&t, 1, &none, 1, SHAPE(-1), 1, nib_comm_serial(), NULL));
        nib_tensor_destroy(t);
    }
}

/* ---- The steps by themselves ---- */

TEST(steps_compose)
{
    for (int round = 0; round < 40; round++) {
        const int64_t rows = 1 + test_below(50), cols = 1 + test_below(90), n = rows * cols;
        nib_quantizer q = square_options();
        q.rounding = (nib_rounding)test_below(NIB_ROUNDING_COUNT);
        q.seed = test_random();
        float *x = normals(n);
        const nib_array all = array_of(x, NIB_F32, 2, SHAPE(rows, cols));
        nib_tensor *whole = NULL, *t = NULL;
        CHECK_OK(nib_quantize(&q, &all, NULL, &whole));
        CHECK_OK(nib_tensor_create(&q, NIB_F32, 2, SHAPE(rows, cols), NULL, &t));
        memset(case_part(t, NIB_ROW_DATA), 0xFF, nib_buffer_bytes(nib_tensor_buffer(t, NIB_ROW_DATA)));
        int64_t grid_rows = 0, grid_cols = 0;
        CHECK_OK(nib_amax_grid(t, NIB_ROWWISE, &grid_rows, &grid_cols));
        CHECK(grid_rows == (rows + 15) / 16 && grid_cols == (cols + 15) / 16);
        const size_t cells = (size_t)(grid_rows * grid_cols);
        float *most = calloc(cells, sizeof *most), *part = malloc(cells * sizeof *part);
        const int64_t cut[4] = { 0, test_below(n + 1), n, n };
        for (int i = 0; i < 3; i++) {
            const nib_array piece = array_of(x + cut[i], NIB_F32, 1, SHAPE(cut[i + 1] - cut[i]));
            CHECK_OK(nib_partial_amax(t, NIB_ROWWISE, &piece, cut[i], part));
            for (size_t k = 0; k < cells; k++)
                most[k] = part[k] > most[k] ? part[k] : most[k];
        }
        CHECK_OK(nib_block_scales(t, NIB_ROWWISE, most));
        for (int i = 2; i >= 0; i--) {
            const nib_array piece = array_of(x + cut[i], NIB_F32, 1, SHAPE(cut[i + 1] - cut[i]));
            CHECK_OK(nib_partial_cast(t, NIB_ROWWISE, &piece, cut[i], most, NULL));
        }
        for (int part_of = 0; part_of <= NIB_ROW_TENSOR_SCALE; part_of += 2)
            CHECK(case_same_part(t, whole, (nib_part)part_of));

        /* The transposes are what the columnwise usage has. */
        nib_array data, scales;
        CHECK_OK(nib_tensor_part(whole, NIB_COL_DATA, &data));
        CHECK_OK(nib_tensor_part(whole, NIB_COL_SCALE, &scales));
        uint8_t *codes = malloc(data.bytes + 1), *turned = malloc(scales.bytes + 1), *back = malloc((size_t)n + 1);
        CHECK_OK(nib_transpose_packed(case_part(t, NIB_ROW_DATA), rows, cols, codes));
        CHECK_BYTES(codes, data.data, data.bytes);
        CHECK_OK(nib_transpose_packed(codes, cols, rows, back));
        CHECK_BYTES(back, case_part(t, NIB_ROW_DATA), rows * ((cols + 1) / 2));
        nib_array row_scales;
        CHECK_OK(nib_tensor_part(t, NIB_ROW_SCALE, &row_scales));
        CHECK_OK(nib_transpose_scales(row_scales.data, rows, cols, row_scales.shape[1], turned, scales.shape[1]));
        CHECK_BYTES(turned, scales.data, cols * scales.shape[1]);
        free(codes), free(turned), free(back), free(most), free(part), free(x);
        nib_tensor_destroy(t), nib_tensor_destroy(whole);
    }
}

/* Each piece takes in what is missing of the blocks at its ends, and decides on blocks for all. */
TEST(steps_compose_where_scales_are_chosen)
{
    for (int round = 0; round < 60; round++) {
        const int64_t rows = 1 + test_below(50), cols = 1 + test_below(90), n = rows * cols;
        nib_quantizer q = square_options();
        q.columnwise = 0;
        q.scale_rule = NIB_SCALE_4OVER6;
        if (round % 3) {
            q.block_dims[0] = 1;
            q.scale_rule = round % 3 == 1 ? NIB_SCALE_SWEEP : NIB_SCALE_4OVER6;
            q.row_scaled = test_below(2) == 0;
        }
        float *x = normals(n);
        const nib_array all = array_of(x, NIB_F32, 2, SHAPE(rows, cols));
        nib_tensor *whole = NULL, *t = NULL;
        CHECK_OK(nib_quantize(&q, &all, NULL, &whole));
        CHECK_OK(nib_tensor_create(&q, NIB_F32, 2, SHAPE(rows, cols), NULL, &t));
        int64_t grid_rows = 0, grid_cols = 0;
        CHECK_OK(nib_amax_grid(t, NIB_ROWWISE, &grid_rows, &grid_cols));
        const size_t cells = (size_t)(grid_rows * grid_cols);
        float *most = calloc(cells, sizeof *most), *part = malloc(cells * sizeof *part);
        uint8_t *chosen = calloc(cells, 1), *some = malloc(cells);
        const int64_t cut[4] = { 0, test_below(n + 1), n, n };
        for (int i = 0; i < 3; i++) {
            const nib_array piece = array_of(x + cut[i], NIB_F32, 1, SHAPE(cut[i + 1] - cut[i]));
            CHECK_OK(nib_partial_amax(t, NIB_ROWWISE, &piece, cut[i], part));
            for (size_t k = 0; k < cells; k++)
                most[k] = part[k] > most[k] ? part[k] : most[k];
        }
        CHECK_FAILS(nib_block_scales(t, NIB_ROWWISE, most), NIB_ERR_MODE, "nib_partial_scales");
        for (int i = 0; i < 3; i++) {
            int64_t first = -1, count = -1;
            CHECK_OK(nib_whole_blocks(t, NIB_ROWWISE, cut[i], cut[i + 1] - cut[i], &first, &count));
            CHECK(first <= cut[i] && first + count >= cut[i + 1] && (count > 0) == (cut[i + 1] > cut[i]));
            if (q.block_dims[0] == 1) /* no more than it takes */
                CHECK(cut[i] - first < 16 && first + count - cut[i + 1] < 16);
            const nib_array piece = array_of(x + first, NIB_F32, 1, &count);
            CHECK_OK(nib_partial_scales(t, NIB_ROWWISE, &piece, first, most, some));
            for (size_t k = 0; k < cells; k++)
                chosen[k] = some[k] > chosen[k] ? some[k] : chosen[k];
        }
        CHECK_OK(nib_chosen_scales(t, NIB_ROWWISE, most, chosen));
        for (int i = 2; i >= 0; i--) {
            const nib_array piece = array_of(x + cut[i], NIB_F32, 1, SHAPE(cut[i + 1] - cut[i]));
            CHECK_OK(nib_partial_cast(t, NIB_ROWWISE, &piece, cut[i], most, NULL));
        }
        for (int part_of = 0; part_of <= NIB_ROW_TENSOR_SCALE; part_of += 2)
            CHECK_THAT(case_same_part(t, whole, (nib_part)part_of), "part %d of round %d", part_of, round);
        chosen[0] = 0x7F;
        CHECK_FAILS(nib_chosen_scales(t, NIB_ROWWISE, most, chosen), NIB_ERR_ARG, "scale 0 is 7F");
        free(most), free(part), free(chosen), free(some), free(x);
        nib_tensor_destroy(t), nib_tensor_destroy(whole);
    }
}

TEST(steps_refuse)
{
    const nib_quantizer q = square_options();
    nib_tensor *t = NULL;
    float amaxes[2] = { 1, -1 };
    uint8_t bytes[64] = { 0 };
    nib_byte_range range;
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, 32), NULL, &t));
    int64_t first = 0, count = 0;
    CHECK_FAILS(nib_partial_scales(t, NIB_ROWWISE, NULL, -1, amaxes, bytes), NIB_ERR_MODE, "nib_block_scales");
    CHECK_FAILS(nib_chosen_scales(t, NIB_ROWWISE, amaxes, bytes), NIB_ERR_MODE, "nib_block_scales");
    CHECK_FAILS(nib_whole_blocks(t, NIB_ROWWISE, 500, 13, &first, &count), NIB_ERR_SHAPE, "13 elements from 500 on");
    CHECK_OK(nib_whole_blocks(t, NIB_ROWWISE, 500, 0, &first, &count));
    CHECK(first == 500 && count == 0);
    CHECK_FAILS(nib_block_scales(t, NIB_ROWWISE, amaxes), NIB_ERR_ARG, "amax 1 is negative");
    CHECK_FAILS(nib_block_scales(t, NIB_COLUMNWISE, amaxes), NIB_ERR_USAGE, "cast rowwise");
    CHECK_FAILS(nib_block_scales(t, NIB_EITHER, amaxes), NIB_ERR_ARG, "not a usage");
    CHECK_FAILS(nib_partial_cast(t, NIB_ROWWISE, NULL, -1, amaxes, NULL), NIB_ERR_ARG, "amax 1");
    CHECK_FAILS(nib_partial_amax(t, NIB_ROWWISE, NULL, 0, amaxes), NIB_ERR_ARG, "is NULL");
    CHECK_FAILS(nib_partial_amax(NULL, NIB_ROWWISE, NULL, -1, amaxes), NIB_ERR_ARG, "t is NULL");
    CHECK_FAILS(nib_transpose_packed(bytes, -1, 2, bytes), NIB_ERR_SHAPE, "dim 0 is -1");
    CHECK_FAILS(nib_transpose_scales(bytes, 16, 17, 1, bytes, 1), NIB_ERR_SHAPE, "strides");
    CHECK_FAILS(nib_tensor_byte_range(t, NIB_COLUMNWISE, 0, 1, &range), NIB_ERR_USAGE, "in the order of the elements");
    CHECK_FAILS(nib_tensor_byte_range(t, NIB_ROWWISE, 500, 13, &range), NIB_ERR_SHAPE,
                "13 elements from 500 on, of 512");
    CHECK_OK(nib_tensor_byte_range(t, NIB_ROWWISE, 3, 4, &range));
    CHECK(range.first == 1 && range.count == 3 && range.first_shared && range.last_shared);
    CHECK_OK(nib_tensor_byte_range(t, NIB_ROWWISE, 30, 2, &range));
    CHECK(range.first == 15 && range.count == 1 && !range.first_shared && !range.last_shared);
    nib_tensor_destroy(t);
    /* Rows of odd length end in a byte that nobody shares. */
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(4, 5), NULL, &t));
    CHECK_OK(nib_tensor_byte_range(t, NIB_ROWWISE, 4, 2, &range));
    CHECK(range.first == 2 && range.count == 2 && !range.first_shared && range.last_shared);
    nib_tensor_destroy(t);
}

TEST(post_processing)
{
    nib_quantizer q = square_options();
    nib_tensor *t = NULL, *null = NULL;
    nib_metadata m = { .bytes = sizeof m };
    float *x = normals(32 * 48);
    const nib_array all = array_of(x, NIB_BF16, 2, SHAPE(32, 48));
    const nib_array master = array_of(x, NIB_F32, 1, SHAPE(32 * 48)), *list = &master;
    const int64_t start = 0;
    CHECK_OK(nib_quantize(&q, &all, NULL, &t));
    const uint8_t *place = case_part(t, NIB_COL_DATA);
    /* Manual: the buffers stay, and are rejected until they are made anew. */
    CHECK_OK(nib_quantize_nvfp4_param_shard(&t, 1, &list, 1, &start, 1, nib_comm_serial(), NULL));
    CHECK_OK(nib_tensor_get_metadata(t, &m));
    CHECK(m.columnwise && !m.columnwise_valid && case_part(t, NIB_COL_DATA) == place);
    CHECK_FAILS(nib_dequantize(t, NIB_COLUMNWISE,
                               &(nib_array){ .data = x,
                                             .bytes = 4 * 32 * 48,
                                             .dtype = NIB_F32,
                                             .rank = 2,
                                             .shape = { 32, 48 },
                                             .strides = { 48, 1 } }),
                NIB_ERR_USAGE, "not valid any more");
    CHECK_OK(nib_post_all_gather_processing(&t, 1));
    CHECK_OK(nib_tensor_get_metadata(t, &m));
    CHECK(m.columnwise && m.columnwise_valid && case_part(t, NIB_COL_DATA) == place);
    /* Otherwise they are dropped. */
    CHECK_OK(nib_quantize_master_weights(&t, 1, &list, 1, &start, 1, nib_comm_serial(), NULL));
    CHECK_OK(nib_tensor_get_metadata(t, &m));
    CHECK(!m.columnwise);
    CHECK_OK(nib_post_all_gather_processing(&t, 1));
    CHECK_OK(nib_tensor_get_metadata(t, &m));
    CHECK(m.columnwise && m.columnwise_valid);
    CHECK_FAILS(nib_post_all_gather_processing(&null, 1), NIB_ERR_ARG, "parameter 0 is NULL");
    CHECK_FAILS(nib_post_all_gather_processing(NULL, 1), NIB_ERR_ARG, "params is NULL");
    CHECK_OK(nib_post_all_gather_processing(NULL, 0));
    nib_tensor_destroy(t);
    nib_quantizer_init(&q);
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, 16), NULL, &t));
    CHECK_OK(nib_tensor_invalidate_columnwise(t));
    CHECK_FAILS(nib_post_all_gather_processing(&t, 1), NIB_ERR_USAGE, "square blocks");
    nib_tensor_destroy(t);
    free(x);
}

/* ---- Delayed scaling ---- */

static int delayed(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    int faults = 0, equal = 0;
    const float *x = context;
    nib_quantizer q;
    nib_tensor *t = NULL, *whole = NULL;
    CASE_OK(nib_quantizer_init_format(&q, NIB_FLOAT8));
    q.columnwise = 0;
    nib_array all, master;
    CASE_OK(nib_array_init(&all, (void *)(uintptr_t)x, NIB_F32, 2, SHAPE(20, 30)));
    const float scale = 37.5f, *scales = &scale;
    float seen = 0, seen_whole = 0, *seen_list = &seen;
    const nib_overrides overrides = { .bytes = sizeof overrides, .scale = &scale, .amax_seen = &seen_whole };
    CASE_OK(nib_quantize(&q, &all, &overrides, &whole));
    CASE_OK(nib_tensor_create(&q, NIB_F32, 2, SHAPE(20, 30), NULL, &t));
    const int64_t share = 600 / comm->size, start = share * comm->rank;
    CASE_OK(nib_array_init(&master, (void *)(uintptr_t)(x + start), NIB_F32, 1, &share));
    const nib_array *list = &master;
    const nib_master_options options = { .bytes = sizeof options, .scales = &scales, .amax_seen = &seen_list };
    CASE_OK(nib_quantize_master_weights(&t, 1, &list, 1, &start, 1, comm, &options));
    CASE_OK(nib_all_gather_param(t, NIB_ROWWISE, start, share, NULL, comm));
    CASE_OK(nib_tensor_equal(t, whole, &equal));
    CASE_CHECK(equal && seen == seen_whole, "delayed scaling differs from the whole");
    nib_tensor_destroy(t), nib_tensor_destroy(whole);
    return faults;
}

TEST(delayed_scaling)
{
    float *x = normals(600);
    for (int size = 1; size <= 5; size++)
        CHECK(team_run(size, delayed, x) == 0);
    free(x);
}

/* ---- Ranks that both claim all of it ---- */

enum { BOTH_ROWS = 40, BOTH_COLS = 300 };

/* Scales are those of the reduction, whatever a rank's own numbers would have. */
static int claim_all(const nib_comm *comm, void *context)
{
    const uint64_t seed = 0;
    int faults = 0;
    float *x = context;
    const int64_t n = BOTH_ROWS * BOTH_COLS;
    nib_quantizer q = square_options();
    q.columnwise = 0;
    nib_tensor *t = NULL, *steps = NULL;
    nib_array master;
    CASE_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(BOTH_ROWS, BOTH_COLS), NULL, &t));
    CASE_OK(nib_tensor_clone(t, &steps));
    CASE_OK(nib_array_init(&master, x + comm->rank * n, NIB_F32, 1, &n));
    const nib_array *list = &master;
    const int64_t start = 0;
    CASE_OK(nib_quantize_master_weights(&t, 1, &list, 1, &start, 1, comm, NULL));
    float amaxes[2][3 * 19];
    for (int r = 0; r < 2; r++) {
        CASE_OK(nib_array_init(&master, x + r * n, NIB_F32, 1, &n));
        CASE_OK(nib_partial_amax(steps, NIB_ROWWISE, &master, 0, amaxes[r]));
    }
    for (int i = 0; i < 3 * 19; i++)
        amaxes[0][i] = amaxes[0][i] > amaxes[1][i] ? amaxes[0][i] : amaxes[1][i];
    CASE_OK(nib_block_scales(steps, NIB_ROWWISE, amaxes[0]));
    for (int64_t at = 0; at < n; at += 299) { /* never a whole block of rows */
        const int64_t length = n - at < 299 ? n - at : 299;
        CASE_OK(nib_array_init(&master, x + comm->rank * n + at, NIB_F32, 1, &length));
        CASE_OK(nib_partial_cast(steps, NIB_ROWWISE, &master, at, amaxes[0], NULL));
    }
    for (int part = 0; part < NIB_PART_COUNT; part++)
        CASE_CHECK(case_same_part(t, steps, (nib_part)part), "part %d differs", part);
    nib_tensor_destroy(t), nib_tensor_destroy(steps);
    return faults;
}

TEST(pieces_that_overlap)
{
    float *x = normals(2 * BOTH_ROWS * BOTH_COLS);
    CHECK(team_run(2, claim_all, x) == 0);
    free(x);
}

/* ---- FP4 helpers ---- */

TEST(helpers)
{
    const nib_quantizer q = square_options();
    nib_quantizer other;
    nib_tensor *t = NULL, *float8 = NULL;
    nib_buffer *buffer = NULL, *small = NULL;
    float y[256];
    int64_t shape[3];
    CHECK(nib_get_fp4_align_size() == 128 && NIB_FP4_ALIGN_TMA == 32 && NIB_FP4_ALIGN_GROUPED == 64);
    CHECK_OK(nib_get_nvfp4_rowwise_packed_shape(3, SHAPE(2, 3, 16), shape));
    CHECK(shape[0] == 2 && shape[1] == 3 && shape[2] == 8);
    CHECK_OK(nib_get_nvfp4_rowwise_packed_shape(0, NULL, NULL));
    CHECK_FAILS(nib_get_nvfp4_rowwise_packed_shape(2, SHAPE(2, 3), shape), NIB_ERR_SHAPE, "last dim is 3");
    CHECK_OK(nib_tensor_create(&q, NIB_BF16, 2, SHAPE(16, 16), NULL, &t));
    CHECK_OK(nib_quantizer_init_format(&other, NIB_FLOAT8));
    CHECK_OK(nib_tensor_create(&other, NIB_BF16, 2, SHAPE(16, 16), NULL, &float8));
    CHECK(nib_is_nvfp4tensor(t) && !nib_is_nvfp4tensor(float8) && !nib_is_nvfp4tensor(NULL));
    CHECK_OK(nib_buffer_create(128, NULL, &buffer));
    CHECK_OK(nib_buffer_create(127, NULL, &small));
    memset(case_part(t, NIB_ROW_DATA), 0x21, 128);
    CHECK_FAILS(nib_modify_nvfp4_rowwise_storage(t, small), NIB_ERR_SHAPE, "127 bytes");
    CHECK_FAILS(nib_modify_nvfp4_rowwise_storage(float8, buffer), NIB_ERR_MODE, "not nvfp4");
    CHECK_FAILS(nib_modify_nvfp4_rowwise_storage(NULL, buffer), NIB_ERR_ARG, "NULL");
    CHECK_OK(nib_modify_nvfp4_rowwise_storage(t, buffer));
    CHECK(nib_tensor_buffer(t, NIB_ROW_DATA) == buffer && ((uint8_t *)nib_buffer_data(buffer))[127] == 0x21);
    const nib_array out = array_of(y, NIB_F32, 2, SHAPE(16, 16));
    CHECK_OK(nib_dequantize_fp4_tensor(t, &out));
    CHECK_FAILS(nib_dequantize_fp4_tensor(float8, &out), NIB_ERR_MODE, "not nvfp4");
    nib_buffer_release(buffer), nib_buffer_release(small);
    nib_tensor_destroy(t), nib_tensor_destroy(float8);
}

/* 12. of the specification's invariants: packed ranges from element ranges satisfy 2 * bytes == elements, or are
 * rejected. */
TEST(packed_and_unpacked_buffers)
{
    int64_t e = 0, n = 0, b = 0, m = 0;
    CHECK_OK(nib_param_buffer_range(1024, 512, 3, 4, &e, &n, &b, &m));
    CHECK(e == 768 && n == 256 && b == 384 && m == 128);
    CHECK_FAILS(nib_param_buffer_range(1024, 640, 0, 4, &e, &n, &b, &m), NIB_ERR_MISMATCH, "padded apart");
    CHECK_FAILS(nib_param_buffer_range(1025, 512, 0, 1, &e, &n, &b, &m), NIB_ERR_MISMATCH, "513");
    CHECK_FAILS(nib_param_buffer_range(1024, 512, 0, 3, &e, &n, &b, &m), NIB_ERR_MISMATCH, "shared equally by 3");
    CHECK_FAILS(nib_param_buffer_range(1024, 512, 4, 4, &e, &n, &b, &m), NIB_ERR_ARG, "rank 4 of 4");
    /* Megatron pads both buffers by itself to lcm(ranks, 128): the shares agree for 96 ranks in some cases only. */
    int agree = 0, differ = 0;
    for (int64_t numel = 256; numel < 256 * 200; numel += 256) {
        const int64_t pad = 384, full = (numel + pad - 1) / pad * pad, packed = (numel / 2 + pad - 1) / pad * pad;
        const nib_status status = nib_param_buffer_range(full, packed, 5, 96, &e, &n, &b, &m);
        if (status)
            differ++;
        else
            agree += e == 2 * b && n == 2 * m;
        CHECK((status == NIB_OK) == (full == 2 * packed));
    }
    CHECK(agree > 20 && differ > 20 && agree + differ == 199);
}

TEST_MAIN

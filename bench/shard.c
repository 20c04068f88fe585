/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard.c - casting master weights over ranks that are threads: shard [MILLIONS OF ELEMENTS]. 16 by default.
 *
 * The parameters are 4096 columns wide, F32 masters, BF16 parameters. A communicator around the real one counts what is
 * reduced and gathered, and how long ranks spend in collectives, waiting for each other included.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>

#include "measure.h"
#include "nib_shard.h"

enum { COLUMNS = 4096, PARAMETERS = 4, MOST_RANKS = 4 };

static const struct kind {
    const char *name;
    int block_rows;
    nib_scale_rule rule;
} kinds[] = {
    { "16x16", 16, NIB_SCALE_RTN },
    { "1x16", 1, NIB_SCALE_RTN },
    { "16x16, 4/6", 16, NIB_SCALE_4OVER6 },
};

/* ---- A communicator that looks on ---- */

struct watch {
    const nib_comm *inner;
    double seconds;
    size_t reduced, gathered;
};

static nib_status watched_reduce(void *context, float *values, size_t n)
{
    struct watch *watch = context;
    const double start = now();
    const nib_status status = watch->inner->allreduce_max_f32(watch->inner->context, values, n);
    watch->seconds += now() - start;
    watch->reduced += n * sizeof *values;
    return status;
}

static nib_status watched_agree(void *context, nib_status status, uint64_t key)
{
    struct watch *watch = context;
    const double start = now();
    const nib_status agreed = watch->inner->agree(watch->inner->context, status, key);
    watch->seconds += now() - start;
    return agreed;
}

static nib_status watched_gather(void *context, const void *mine, void *all, const size_t *counts)
{
    struct watch *watch = context;
    const double start = now();
    const nib_status status = watch->inner->allgather(watch->inner->context, mine, all, counts);
    watch->seconds += now() - start;
    for (int r = 0; r < watch->inner->size; r++)
        watch->gathered += counts[r];
    return status;
}

/* ---- One rank ---- */

struct rank {
    const nib_comm *comm;
    int64_t rows; /* of a parameter */
    const struct kind *kind;
    const float *master; /* of all parameters */
    double cast, cast_collectives, gather;
    size_t reduced, gathered;
    int failed;
};

static void *run_rank(void *context)
{
    struct rank *rank = context;
    struct watch watch = { .inner = rank->comm };
    const nib_comm comm = { .bytes = sizeof comm,
                            .context = &watch,
                            .rank = rank->comm->rank,
                            .size = rank->comm->size,
                            .allreduce_max_f32 = watched_reduce,
                            .agree = watched_agree,
                            .allgather = watched_gather,
                            .barrier = rank->comm->barrier };
    const int64_t elements = rank->rows * COLUMNS, shape[2] = { rank->rows, COLUMNS };
    int64_t starts[PARAMETERS], length = 0;
    nib_tensor *params[PARAMETERS] = { NULL };
    nib_array masters[PARAMETERS];
    const nib_array *list[PARAMETERS];
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.block_dims[0] = rank->kind->block_rows;
    q.scale_rule = rank->kind->rule;
    q.columnwise = 0;
    nib_device *host = NULL; /* a rank is a thread already */
    if (nib_host_create(1, &host))
        rank->failed = 1;
    for (int i = 0; i < PARAMETERS; i++) {
        starts[i] = elements / comm.size * comm.rank;
        length = comm.rank == comm.size - 1 ? elements - starts[i] : elements / comm.size;
        if (nib_tensor_create(&q, NIB_BF16, 2, shape, host, &params[i]) ||
            nib_array_init(&masters[i], (float *)(uintptr_t)(rank->master + i * elements + starts[i]), NIB_F32, 1,
                           &length))
            rank->failed = 1;
        list[i] = &masters[i];
    }
    rank->comm->barrier(rank->comm->context);
    double start = now();
    if (nib_quantize_master_weights(params, PARAMETERS, list, PARAMETERS, starts, PARAMETERS, &comm, NULL))
        rank->failed = 1;
    rank->cast_collectives = watch.seconds;
    rank->cast = now() - start - watch.seconds;
    rank->reduced = watch.reduced;
    rank->gathered = watch.gathered;
    start = now();
    for (int i = 0; i < PARAMETERS; i++)
        if (nib_all_gather_param(params[i], NIB_ROWWISE, starts[i], length, NULL, &comm))
            rank->failed = 1;
    rank->gather = now() - start;
    for (int i = 0; i < PARAMETERS; i++)
        nib_tensor_destroy(params[i]);
    nib_device_release(host);
    return NULL;
}

static int run(int size, const struct kind *kind, int64_t rows, const float *master)
{
    struct rank ranks[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    nib_comm *comms[MOST_RANKS];
    if (nib_comm_threads_create(size, comms))
        return 1;
    for (int r = 0; r < size; r++) {
        ranks[r] = (struct rank){ .comm = comms[r], .rows = rows, .kind = kind, .master = master };
        if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]))
            return 1;
    }
    struct rank most = { .rows = rows };
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
        most.cast = ranks[r].cast > most.cast ? ranks[r].cast : most.cast;
        most.gather = ranks[r].gather > most.gather ? ranks[r].gather : most.gather;
        if (ranks[r].cast_collectives > most.cast_collectives)
            most.cast_collectives = ranks[r].cast_collectives;
        most.reduced = ranks[r].reduced;
        most.gathered = ranks[r].gathered;
        most.failed |= ranks[r].failed;
    }
    nib_comm_threads_destroy(comms[0]);
    const double elements = (double)(rows * COLUMNS) * PARAMETERS;
    printf("%-10s %5d %14zu %14.4f %14zu %10.1f %12.1f %10.1f %10.1f\n", kind->name, size, most.reduced / PARAMETERS,
           (double)most.reduced * 256 / elements, most.gathered / PARAMETERS, 1e3 * most.cast,
           1e3 * most.cast_collectives, 1e3 * most.gather, elements / most.cast / 1e6);
    return most.failed;
}

int main(int argc, char **argv)
{
    const int64_t millions = argc > 1 ? strtoll(argv[1], NULL, 10) : 16;
    const int64_t rows = millions * 1000000 / COLUMNS / PARAMETERS / 16 * 16; /* whole blocks */
    if (rows < 1)
        return fprintf(stderr, "shard [MILLIONS OF ELEMENTS]\n"), 2;
    const size_t elements = (size_t)rows * COLUMNS * PARAMETERS;
    float *master = malloc(elements * sizeof *master);
    if (!master)
        return fprintf(stderr, "no memory for %zu numbers\n", elements), 1;
    uint32_t state = 1;
    for (size_t i = 0; i < elements; i++) {
        state = state * 1664525u + 1013904223u;
        master[i] = (float)(int32_t)state * 0x1p-31f;
    }
    printf("%zu elements in %d parameters of %d columns; one thread per rank; times are the slowest rank's\n", elements,
           PARAMETERS, COLUMNS);
    printf("%-10s %5s %14s %14s %14s %10s %12s %10s %10s\n", "blocks", "ranks", "reduced/param", "bytes per 256",
           "gathered/param", "cast ms", "collect. ms", "gather ms", "M/s");
    int failed = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (int size = 1; size <= MOST_RANKS; size *= 2)
            failed |= run(size, &kinds[i], rows, master);
    free(master);
    return failed;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.c - communicators: one rank alone, and ranks that are threads of one process.
 */
#include "base/base.h"

#include <pthread.h>

#include "base/os.h"

/* ---- What every user of a communicator does ---- */

nib_status nib_check_comm(const char *what, const nib_comm *comm, bool whole)
{
    if (!comm)
        return nib_fail(NIB_ERR_ARG, "%s is NULL", what);
    TRY(nib_struct_check(what, comm, sizeof *comm, NIB_UP_TO(nib_comm, barrier)));
    if (comm->size < 1 || comm->rank < 0 || comm->rank >= comm->size)
        return nib_fail(NIB_ERR_ARG, "%s: rank %d of %d", what, comm->rank, comm->size);
    const struct {
        bool missing;
        const char *name;
    } functions[] = {
        { !comm->allreduce_max_f32, "allreduce_max_f32" },
        { whole && !comm->agree, "agree" },
        { whole && !comm->allgather, "allgather" },
        { whole && !comm->barrier, "barrier" },
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (functions[i].missing)
            return nib_fail(NIB_ERR_ARG, "%s has no %s", what, functions[i].name);
    return NIB_OK;
}

/* Whether a communicator has set a message of its own since; gives it. */
static bool spoke(const nib_error *before, nib_error *said)
{
    nib_get_error(said);
    return said->status != before->status || strcmp(said->text, before->text) != 0;
}

nib_status nib_agree(const nib_comm *comm, nib_status status, uint64_t key)
{
    if (!comm || comm->size == 1 || !comm->agree)
        return status;
    nib_error before, said;
    nib_get_error(&before);
    const nib_status agreed = comm->agree(comm->context, status, key);
    if (agreed && spoke(&before, &said)) /* it knows more than the status says */
        return nib_fail(agreed, "%s%sthe agreement of %d ranks: %s", status ? before.text : "", status ? "; " : "",
                        comm->size, said.text);
    if (agreed == status)
        return status;
    if (status) /* both failed, with different words */
        return nib_fail(agreed, "another rank failed with %s, and this one too: %s", nib_status_name(agreed),
                        nib_last_error());
    if (agreed == NIB_ERR_MISMATCH)
        return nib_fail(agreed, "another rank failed, or the %d ranks were called with different things", comm->size);
    return nib_fail(agreed, "another of the %d ranks failed with %s", comm->size, nib_status_name(agreed));
}

static nib_status comm_failed(const nib_comm *comm, const char *what, nib_status status, const nib_error *before)
{
    nib_error said;
    const bool more = spoke(before, &said);
    return nib_fail(NIB_ERR_COMM, "%s over %d ranks failed: %s%s%s", what, comm->size, nib_status_name(status),
                    more ? ": " : "", more ? said.text : "");
}

nib_status nib_reduce(const nib_comm *comm, const char *what, float *values, size_t n)
{
    nib_error before;
    nib_get_error(&before);
    const nib_fpenv saved = nib_fpenv_enter(); /* amaxes may be subnormal: to compare them they must not be zeros */
    const nib_status status = n ? comm->allreduce_max_f32(comm->context, values, n) : NIB_OK;
    nib_fpenv_leave(saved);
    return status ? comm_failed(comm, what, status, &before) : NIB_OK;
}

nib_status nib_gather(const nib_comm *comm, const char *what, const void *mine, void *all, const size_t *counts)
{
    nib_error before;
    nib_get_error(&before);
    const nib_status status = comm->allgather(comm->context, mine, all, counts);
    return status ? comm_failed(comm, what, status, &before) : NIB_OK;
}

/* ---- One rank alone ---- */

static nib_status serial_allreduce_max_f32(void *context, float *values, size_t n)
{
    (void)context, (void)values, (void)n;
    return NIB_OK;
}

static nib_status serial_agree(void *context, nib_status status, uint64_t key)
{
    (void)context, (void)key;
    return status;
}

static nib_status serial_allgather(void *context, const void *mine, void *all, const size_t *counts)
{
    (void)context;
    if (counts[0])
        memcpy(all, mine, counts[0]);
    return NIB_OK;
}

static nib_status serial_barrier(void *context)
{
    (void)context;
    return NIB_OK;
}

const nib_comm *nib_comm_serial(void)
{
    static const nib_comm serial = {
        .bytes = sizeof serial,
        .size = 1,
        .allreduce_max_f32 = serial_allreduce_max_f32,
        .agree = serial_agree,
        .allgather = serial_allgather,
        .barrier = serial_barrier,
    };
    return &serial;
}

/* ---- Threads of one process ---- */

enum call { CALL_ALLREDUCE, CALL_AGREE, CALL_ALLGATHER, CALL_BARRIER };

/* What a rank brings to a call, for all others to read between the two meetings that enclose it. */
struct slot {
    enum call call;
    size_t n; /* what must be equal on all ranks: values to reduce, or bytes in all */
    float *values;
    const void *mine;
    nib_status status;
    uint64_t key;
};

struct team {
    int size;
    pthread_mutex_t mutex;
    pthread_cond_t all_here;
    int arrived;
    unsigned meetings; /* that are over; wrapping around is harmless */
    struct slot *slots;
};

struct member {
    struct team *team;
    int rank;
};

/* All ranks wait for the last; what was written before is seen by all after. */
static void meet(struct team *team)
{
    pthread_mutex_lock(&team->mutex);
    const unsigned meeting = team->meetings;
    if (++team->arrived == team->size) {
        team->arrived = 0;
        team->meetings++;
        pthread_cond_broadcast(&team->all_here);
    }
    while (meeting == team->meetings)
        pthread_cond_wait(&team->all_here, &team->mutex);
    pthread_mutex_unlock(&team->mutex);
}

/* Whether all ranks made the same call; every rank finds the same answer. */
static nib_status check_calls(const struct team *team)
{
    for (int r = 1; r < team->size; r++)
        if (team->slots[r].call != team->slots[0].call || team->slots[r].n != team->slots[0].n)
            return nib_fail(NIB_ERR_COMM, "ranks 0 and %d called different functions, or with sizes %zu and %zu", r,
                            team->slots[0].n, team->slots[r].n);
    return NIB_OK;
}

static nib_status enter(const struct member *member, const struct slot *slot)
{
    member->team->slots[member->rank] = *slot;
    meet(member->team);
    return check_calls(member->team);
}

/* Each rank reduces a share of the values, and writes the results to all. */
static nib_status threads_allreduce_max_f32(void *context, float *values, size_t n)
{
    const struct member *member = context;
    const struct team *team = member->team;
    const nib_status status = enter(member, &(struct slot){ .call = CALL_ALLREDUCE, .n = n, .values = values });
    const size_t size = (size_t)team->size, rank = (size_t)member->rank;
    const size_t first = n / size * rank + (rank < n % size ? rank : n % size);
    const size_t end = first + n / size + (rank < n % size);
    for (size_t i = first; i < end && !status; i++) {
        float most = team->slots[0].values[i];
        for (int r = 1; r < team->size; r++)
            most = team->slots[r].values[i] > most ? team->slots[r].values[i] : most;
        for (int r = 0; r < team->size; r++)
            team->slots[r].values[i] = most;
    }
    meet(member->team);
    return status;
}

static nib_status threads_agree(void *context, nib_status status, uint64_t key)
{
    const struct member *member = context;
    const struct team *team = member->team;
    const nib_status entered = enter(member, &(struct slot){ .call = CALL_AGREE, .status = status, .key = key });
    nib_status agreed = entered;
    bool equal = true;
    for (int r = 0; r < team->size && !entered; r++) {
        agreed = team->slots[r].status > agreed ? team->slots[r].status : agreed;
        equal = equal && team->slots[r].key == team->slots[0].key;
    }
    meet(member->team);
    return agreed ? agreed : equal ? NIB_OK : NIB_ERR_MISMATCH;
}

static nib_status threads_allgather(void *context, const void *mine, void *all, const size_t *counts)
{
    const struct member *member = context;
    const struct team *team = member->team;
    size_t total = 0;
    for (int r = 0; r < team->size; r++)
        total += counts[r];
    const nib_status status = enter(member, &(struct slot){ .call = CALL_ALLGATHER, .n = total, .mine = mine });
    char *to = all;
    for (int r = 0; r < team->size && !status; r++) {
        if (counts[r])
            memcpy(to, team->slots[r].mine, counts[r]);
        to += counts[r];
    }
    meet(member->team);
    return status;
}

static nib_status threads_barrier(void *context)
{
    const struct member *member = context;
    const nib_status status = enter(member, &(struct slot){ .call = CALL_BARRIER });
    meet(member->team);
    return status;
}

/* All that a team needs, in one allocation. */
struct threads {
    struct team team;
    nib_comm *comms;
    struct member *members;
};

static nib_status start_team(int size, struct threads *threads)
{
    threads->team.size = size;
    if (pthread_mutex_init(&threads->team.mutex, NULL))
        return nib_fail(NIB_ERR_MEMORY, "no mutex for a communicator of %d threads", size);
    if (pthread_cond_init(&threads->team.all_here, NULL)) {
        pthread_mutex_destroy(&threads->team.mutex);
        return nib_fail(NIB_ERR_MEMORY, "no condition variable for a communicator of %d threads", size);
    }
    for (int r = 0; r < size; r++) {
        threads->members[r] = (struct member){ &threads->team, r };
        threads->comms[r] = (nib_comm){ .bytes = sizeof(nib_comm),
                                        .context = &threads->members[r],
                                        .rank = r,
                                        .size = size,
                                        .allreduce_max_f32 = threads_allreduce_max_f32,
                                        .agree = threads_agree,
                                        .allgather = threads_allgather,
                                        .barrier = threads_barrier };
    }
    return NIB_OK;
}

static void free_threads(struct threads *threads)
{
    nib_free(threads->comms);
    nib_free(threads->members);
    nib_free(threads->team.slots);
    nib_free(threads);
}

nib_status nib_comm_threads_create(int size, nib_comm **out)
{
    NIB_REQUIRE(out);
    if (size < 1)
        return nib_fail(NIB_ERR_ARG, "a communicator has at least one rank, not %d", size);
    struct threads *threads = nib_alloc_zeroed(sizeof *threads);
    if (!threads)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a communicator");
    threads->comms = nib_alloc_zeroed((size_t)size * sizeof *threads->comms);
    threads->members = nib_alloc_zeroed((size_t)size * sizeof *threads->members);
    threads->team.slots = nib_alloc_zeroed((size_t)size * sizeof *threads->team.slots);
    nib_status status = threads->comms && threads->members && threads->team.slots
                            ? start_team(size, threads)
                            : nib_fail(NIB_ERR_MEMORY, "no memory for a communicator of %d threads", size);
    if (status)
        free_threads(threads);
    for (int r = 0; r < size && !status; r++)
        out[r] = &threads->comms[r];
    return status;
}

void nib_comm_threads_destroy(nib_comm *comm)
{
    if (!comm)
        return;
    /* The team is the first member of the whole. */
    struct threads *threads = (struct threads *)((struct member *)comm->context)->team;
    pthread_mutex_destroy(&threads->team.mutex);
    pthread_cond_destroy(&threads->team.all_here);
    free_threads(threads);
}

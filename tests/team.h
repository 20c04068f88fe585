/* SPDX-License-Identifier: Apache-2.0 */
/*
 * team.h - run a function on as many threads as there are ranks, with a deadline: whoever waits for a rank that never
 * comes would wait for ever.
 */
#ifndef NIB_TEAM_H
#define NIB_TEAM_H

#include <pthread.h>

#include "test.h"

struct team_member {
    const nib_comm *comm;
    int (*run)(const nib_comm *comm, void *context);
    void *context;
    int faults;
};

static void *team_thread(void *context)
{
    struct team_member *member = context;
    member->faults = member->run(member->comm, member->context);
    return NULL;
}

/* The faults of all ranks. */
static inline int team_run(int size, int (*run)(const nib_comm *comm, void *context), void *context)
{
    enum { MOST = 64, DEADLINE = 120 };
    struct team_member members[MOST];
    pthread_t threads[MOST];
    nib_comm *comms[MOST];
    int faults = 0;
    if (size > MOST || nib_comm_threads_create(size, comms))
        return 1;
    alarm(DEADLINE); /* kills the program */
    for (int r = 0; r < size; r++) {
        members[r] = (struct team_member){ comms[r], run, context, 0 };
        if (pthread_create(&threads[r], NULL, team_thread, &members[r])) {
            fprintf(stderr, "no thread\n");
            exit(2);
        }
    }
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
        faults += members[r].faults;
    }
    alarm(0);
    nib_comm_threads_destroy(comms[0]);
    return faults;
}

#endif

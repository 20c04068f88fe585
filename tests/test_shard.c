/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_shard.c - sharded casts of master weights: the bytes of a quantisation of the whole, for any cut, any number of ranks.
 */
#define _GNU_SOURCE
#include "team.h"

#include "shard_cases.h"

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

TEST(one_rank_alone)
{
    for (int i = 0; i < 50; i++)
        CHECK(case_run(nib_comm_serial(), test_random()) == 0);
}

TEST_MAIN

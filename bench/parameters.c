/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parameters.c - sharded casts of many small parameters, whose instructions bench/parameters.py counts: parameters N...
 *
 * Each N parameters of one block are cast once within counted_call(), by each rule of scales: "call RULE N".
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "nib.h"
#include "nib_shard.h"

enum { ELEMENTS = 16 };

struct cast {
    nib_tensor **params;
    const nib_array **masters;
    int64_t *starts;
    size_t n;
};

static const struct rule {
    const char *name;
    nib_scale_rule rule;
} rules[] = { { "rtn", NIB_SCALE_RTN }, { "4over6", NIB_SCALE_4OVER6 } };

/* What is counted. valgrind finds it by its name: neither inlined nor renamed, for it is called from elsewhere too. */
nib_status counted_call(const struct cast *cast);
__attribute__((noinline)) nib_status counted_call(const struct cast *cast)
{
    const nib_status status = nib_quantize_master_weights(cast->params, cast->n, cast->masters, cast->n, cast->starts,
                                                          cast->n, nib_comm_serial(), NULL);
    __asm__ volatile("" ::: "memory"); /* no jump in place of the call */
    return status;
}

static nib_status cast_many(const struct rule *rule, struct cast *cast)
{
    static float values[ELEMENTS];
    const int64_t shape[2] = { 1, ELEMENTS };
    nib_quantizer q;
    nib_array master;
    nib_quantizer_init(&q);
    q.scale_rule = rule->rule;
    q.columnwise = 0;
    for (int i = 0; i < ELEMENTS; i++)
        values[i] = (float)(i - 5);
    nib_status status = nib_array_init(&master, values, NIB_F32, 1, &shape[1]);
    for (size_t i = 0; i < cast->n && !status; i++) {
        cast->masters[i] = &master;
        status = nib_tensor_create(&q, NIB_BF16, 2, shape, NULL, &cast->params[i]);
    }
    if (!status)
        status = counted_call(cast);
    for (size_t i = 0; i < cast->n; i++)
        nib_tensor_destroy(cast->params[i]);
    return status;
}

static nib_status run(const struct rule *rule, size_t n)
{
    struct cast cast = { .params = calloc(n, sizeof *cast.params),
                         .masters = calloc(n, sizeof *cast.masters),
                         .starts = calloc(n, sizeof *cast.starts),
                         .n = n };
    const bool good = cast.params && cast.masters && cast.starts;
    const nib_status status = good ? cast_many(rule, &cast) : nib_set_error(NIB_ERR_MEMORY, "no memory");
    free(cast.params), free(cast.masters), free(cast.starts);
    return status;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
            const unsigned long n = strtoul(argv[i], NULL, 10);
            if (n < 1 || n > 1000000)
                return fprintf(stderr, "parameters N...: from 1 to 1000000\n"), 2;
            if (run(&rules[r], n))
                return fprintf(stderr, "parameters: %s\n", nib_last_error()), 1;
            printf("call %s %lu\n", rules[r].name, n);
        }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * count.c - the calls whose instructions bench/instructions.py counts: count [--steps] ROWSxCOLS... -- OPERATION...
 *
 * Each operation is called on each shape once to make its memory and once, within counted_call(), to be counted: by
 * valgrind, or with --steps by the processor, which then stops after every instruction. That also counts what valgrind
 * does not know, such as AVX-512. The stops are printed by address, for objdump to say what is there:
 *
 *     call OPERATION ROWS COLS
 *     ADDRESS TIMES               (hexadecimal, as in the file of the program)
 */
#define _GNU_SOURCE /* registers of a signal's context, program headers */
#include <inttypes.h>
#include <link.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

static void require(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "count: %s: %s\n", what, nib_last_error());
    exit(1);
}

/* ---- One call ---- */

/* What is counted. valgrind finds it by its name: neither inlined nor renamed, for it is called from elsewhere too. */
bool counted_call(struct bench_call *call);
__attribute__((noinline)) bool counted_call(struct bench_call *call)
{
    const bool good = bench_call_run(call) == NIB_OK;
    __asm__ volatile("" ::: "memory"); /* no jump in place of the call */
    return good;
}

/* ---- Single steps ---- */

#if defined(__x86_64__) && defined(__linux__)
enum { TRAP_FLAG = 0x100 };
static uintptr_t base, text_begin, text_end, last;
static uint32_t *stops; /* by address, from text_begin on */
static uint64_t elsewhere;

/* A string instruction stops after each of its rounds: only the first one counts. What is not the program's own, such as
 * memcpy, is counted together. */
static void on_stop(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info;
    const uintptr_t at = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    if (at == last)
        return;
    last = at;
    if (at >= text_begin && at < text_end)
        stops[at - text_begin]++;
    else
        elsewhere++;
}

static int find_text(struct dl_phdr_info *info, size_t bytes, void *context)
{
    (void)bytes, (void)context;
    base = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_X) {
            text_begin = base + info->dlpi_phdr[i].p_vaddr;
            text_end = text_begin + info->dlpi_phdr[i].p_memsz;
        }
    return 1; /* the program comes first */
}

static void prepare_steps(void)
{
    struct sigaction action = { .sa_sigaction = on_stop, .sa_flags = SA_SIGINFO };
    dl_iterate_phdr(find_text, NULL);
    stops = calloc(text_end - text_begin, sizeof *stops);
    require(stops && sigaction(SIGTRAP, &action, NULL) == 0, "memory");
}

/* The flags are on the stack for a moment, below what the compiler may have put there without moving the pointer. */
static void set_trap_flag(bool on)
{
    if (on)
        __asm__ volatile("sub $128, %%rsp; pushfq; orq %0, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::"i"(TRAP_FLAG)
                         : "memory", "cc");
    else
        __asm__ volatile("sub $128, %%rsp; pushfq; andq %0, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::"i"(~TRAP_FLAG)
                         : "memory", "cc");
}

static bool call_by_steps(struct bench_call *call)
{
    memset(stops, 0, (text_end - text_begin) * sizeof *stops);
    elsewhere = last = 0;
    set_trap_flag(true);
    const bool good = counted_call(call);
    set_trap_flag(false);
    for (uintptr_t at = text_begin; at < text_end; at++)
        if (stops[at - text_begin])
            printf("%" PRIxPTR " %" PRIu32 "\n", at - base, stops[at - text_begin]);
    printf("0 %" PRIu64 "\n", elsewhere);
    return good;
}
#else
static void prepare_steps(void) { require(false, "steps are not known for this processor"); }
static bool call_by_steps(struct bench_call *call) { return counted_call(call); }
#endif

/* ---- The program ---- */

static bool is_named(const struct bench_operation *operation, char **names)
{
    bool named = !*names;
    for (; *names; names++)
        named |= strcmp(operation->name, *names) == 0;
    return named;
}

static void count(const struct bench_operation *operation, char **shapes, bool steps)
{
    for (; *shapes && strcmp(*shapes, "--") != 0; shapes++) {
        struct bench_call call = { .operation = operation };
        char *end;
        const int64_t rows = strtol(*shapes, &end, 10), cols = *end ? strtol(end + 1, NULL, 10) : 0;
        require(bench_call_open(&call, rows, cols, 1, NULL) == NIB_OK, operation->name);
        printf("call %s %" PRId64 " %" PRId64 "\n", operation->name, rows, cols);
        require(steps ? call_by_steps(&call) : counted_call(&call), operation->name);
        bench_call_close(&call);
    }
}

int main(int argc, char **argv)
{
    const bool steps = argc > 1 && strcmp(argv[1], "--steps") == 0;
    char **const shapes = argv + 1 + steps;
    char **names = shapes;
    while (*names && strcmp(*names, "--") != 0)
        names++;
    if (names == shapes) {
        fprintf(stderr, "count [--steps] ROWSxCOLS... [-- OPERATION...]\n");
        return 2;
    }
    if (steps)
        prepare_steps();
    printf("isa %s\n", nib_isa());
#if defined(__clang__)
    printf("compiler %s\n", __VERSION__);
#else
    printf("compiler gcc %s\n", __VERSION__);
#endif
    for (int i = 0; i < bench_operation_count; i++)
        if (is_named(&bench_operations[i], *names ? names + 1 : names))
            count(&bench_operations[i], shapes, steps);
    return 0;
}

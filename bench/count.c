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

#include "nib.h"

struct operation {
    const char *name;
    nib_dtype dtype;
    enum { QUANTIZE, WHOLE, DEQUANTIZE, AMAX } what;
    uint8_t rowwise, columnwise, rht;
    nib_rounding rounding;
    nib_scale_rule rule;
};

/* As in nib bench, and so are the numbers. */
static const struct operation operations[] = {
    { .name = "quantize.f32", .dtype = NIB_F32, .rowwise = 1 },
    { .name = "quantize.bf16", .dtype = NIB_BF16, .rowwise = 1 },
    { .name = "amax.f32", .dtype = NIB_F32, .what = AMAX, .rowwise = 1 },
    { .name = "amax.bf16", .dtype = NIB_BF16, .what = AMAX, .rowwise = 1 },
    { .name = "whole.f32", .dtype = NIB_F32, .what = WHOLE, .rowwise = 1 },
    { .name = "columnwise.f32", .dtype = NIB_F32, .columnwise = 1 },
    { .name = "rht-columnwise.f32", .dtype = NIB_F32, .columnwise = 1, .rht = 1 },
    { .name = "both-rht.f32", .dtype = NIB_F32, .rowwise = 1, .columnwise = 1, .rht = 1 },
    { .name = "stochastic8.f32", .dtype = NIB_F32, .rowwise = 1, .rounding = NIB_ROUND_STOCHASTIC_8 },
    { .name = "stochastic24.f32", .dtype = NIB_F32, .rowwise = 1, .rounding = NIB_ROUND_STOCHASTIC_24 },
    { .name = "4over6.f32", .dtype = NIB_F32, .rowwise = 1, .rule = NIB_SCALE_4OVER6 },
    { .name = "sweep.f32", .dtype = NIB_F32, .rowwise = 1, .rule = NIB_SCALE_SWEEP },
    { .name = "dequantize.f32", .dtype = NIB_F32, .what = DEQUANTIZE, .rowwise = 1 },
    { .name = "dequantize.bf16", .dtype = NIB_BF16, .what = DEQUANTIZE, .rowwise = 1 },
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static void require(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "count: %s: %s\n", what, nib_last_error());
    exit(1);
}

/* ---- One call ---- */

struct job {
    const struct operation *operation;
    nib_quantizer q;
    nib_array plain;
    nib_tensor *tensor;
    nib_given given;
    float amax[2];
};

static bool call(struct job *job)
{
    const struct operation *const operation = job->operation;
    if (operation->what == AMAX)
        return nib_group_amax(&job->q, &job->plain, &job->plain.shape[0], 1, (float *[2]){ job->amax, NULL }) == NIB_OK;
    if (operation->what == DEQUANTIZE)
        return nib_dequantize(job->tensor, NIB_ROWWISE, &job->plain) == NIB_OK;
    return nib_quantize_into(NULL, &job->plain, operation->what == WHOLE ? NULL : &job->given, NULL, job->tensor) ==
           NIB_OK;
}

/* What is counted. valgrind finds it by its name: neither inlined nor renamed, for it is called from elsewhere too. */
bool counted_call(struct job *job);
__attribute__((noinline)) bool counted_call(struct job *job)
{
    const bool good = call(job);
    __asm__ volatile("" ::: "memory"); /* no jump in place of the call */
    return good;
}

static void open_job(struct job *job, int64_t rows, int64_t cols)
{
    const struct operation *const operation = job->operation;
    const int64_t shape[2] = { rows, cols };
    const size_t n = (size_t)(rows * cols);
    float *const numbers = malloc(n * sizeof *numbers);
    void *const x = aligned_alloc(4096, (n * sizeof *numbers + 4095) / 4096 * 4096);
    require(numbers && x, "memory");
    uint64_t state = 20261115;
    for (size_t i = 0; i < n; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        int sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (int)(state >> 16 * k & 0xFFFF);
        numbers[i] = (float)(sum - 2 * 65536) * 0x1p-15f;
    }
    require(nib_encode(operation->dtype, numbers, n, x) == NIB_OK, "numbers");
    free(numbers);
    require(nib_array_init(&job->plain, x, operation->dtype, 2, shape) == NIB_OK, "array");
    nib_quantizer_init(&job->q);
    job->q.rowwise = operation->rowwise;
    job->q.columnwise = operation->columnwise;
    job->q.rht = operation->rht;
    job->q.rounding = operation->rounding;
    job->q.scale_rule = operation->rule;
    job->q.threads = 1;
    job->amax[0] = 4;
    job->amax[1] = 8;
    job->given = (nib_given){ .bytes = sizeof job->given, .amax = { &job->amax[0], &job->amax[operation->rht] } };
    require(nib_quantize(&job->q, &job->plain, NULL, &job->tensor) == NIB_OK && call(job), operation->name);
}

static void close_job(struct job *job)
{
    nib_tensor_destroy(job->tensor);
    free(job->plain.data);
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

static bool call_by_steps(struct job *job)
{
    memset(stops, 0, (text_end - text_begin) * sizeof *stops);
    elsewhere = last = 0;
    set_trap_flag(true);
    const bool good = counted_call(job);
    set_trap_flag(false);
    for (uintptr_t at = text_begin; at < text_end; at++)
        if (stops[at - text_begin])
            printf("%" PRIxPTR " %" PRIu32 "\n", at - base, stops[at - text_begin]);
    printf("0 %" PRIu64 "\n", elsewhere);
    return good;
}
#else
static void prepare_steps(void) { require(false, "steps are not known for this processor"); }
static bool call_by_steps(struct job *job) { return counted_call(job); }
#endif

/* ---- The program ---- */

static bool is_named(const struct operation *operation, char **names)
{
    bool named = !*names;
    for (; *names; names++)
        named |= strcmp(operation->name, *names) == 0;
    return named;
}

static void count(const struct operation *operation, char **shapes, bool steps)
{
    for (; *shapes && strcmp(*shapes, "--") != 0; shapes++) {
        struct job job = { .operation = operation };
        char *end;
        const int64_t rows = strtol(*shapes, &end, 10), cols = *end ? strtol(end + 1, NULL, 10) : 0;
        open_job(&job, rows, cols);
        printf("call %s %" PRId64 " %" PRId64 "\n", operation->name, rows, cols);
        require(steps ? call_by_steps(&job) : counted_call(&job), operation->name);
        close_job(&job);
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
    for (int i = 0; i < OPERATIONS; i++)
        if (is_named(&operations[i], *names ? names + 1 : names))
            count(&operations[i], shapes, steps);
    return 0;
}

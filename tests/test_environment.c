/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_environment.c - the same bytes whatever the process around the library does: rounding modes, flushed
 * subnormals, forks, threads, small stacks, locales. Everything that computes runs once plainly, on one thread, and
 * then again in each of these surroundings.
 */
#define _GNU_SOURCE
#include "test_tensors.h"

#include "kernels/kernels.h"
#include "tensor/quantize.h"

#include <fenv.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#if defined(__x86_64__)
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <xmmintrin.h>
#endif

#define CHILD_SECONDS 60 /* a child that hangs is killed by its alarm */

/* ---- The floating-point control of this thread ---- */

#if defined(__x86_64__)
static unsigned long long control(void) { return _mm_getcsr() & 0xFFC0; } /* without the six sticky flags */
static void flush_subnormals(void) { _mm_setcsr(_mm_getcsr() | 0x8040); } /* FTZ and DAZ */
#elif defined(__aarch64__)
static unsigned long long control(void)
{
    unsigned long long fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return fpcr;
}
static void flush_subnormals(void) { __asm__ volatile("msr fpcr, %0" : : "r"(control() | 1ull << 24)); }
#endif

static const struct {
    const char *name;
    int rounding;
    bool flush;
} surroundings[] = { { "plain", FE_TONEAREST, false },        { "flushed", FE_TONEAREST, true },
                     { "upward", FE_UPWARD, false },          { "downward", FE_DOWNWARD, false },
                     { "toward zero", FE_TOWARDZERO, false }, { "upward, flushed", FE_UPWARD, true } };

static void surround(int i)
{
    fesetround(surroundings[i].rounding);
    if (surroundings[i].flush)
        flush_subnormals();
}

/* ---- Everything that computes ---- */

enum {
    COLS = 256,
    ROWS = 2 * NIB_ELEMENTS_PER_THREAD / COLS,
    NVFP4_CASES = 16,
    CASES = NVFP4_CASES + NIB_FORMAT_COUNT - 1, /* and one of each other format */
    LINES = 32                                  /* of a product */
};

/* Inputs with subnormals, ties and a wide range; made before any surroundings are. */
struct inputs {
    float x[ROWS * COLS];
    uint16_t bf16[ROWS * COLS], f16[ROWS * COLS];
};

/* No library call in here: a test below must be the first to make one. */
static void make_inputs(struct inputs *in, uint64_t salt)
{
    test_state = test_seed ^ salt * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < ROWS * COLS; i++) {
        const float normal = test_normal();
        const int block = i / 16 % 5;
        in->x[i] = block == 0   ? ldexpf(normal, -135)
                   : block == 1 ? (float)test_below(13) / 2
                                : ldexpf(normal, -(int)test_below(12));
        in->bf16[i] = (uint16_t)(test_random() & 0xBFFF); /* finite, some subnormal; at most 2 */
        in->f16[i] = (uint16_t)(test_random() & 0xBFFF);
    }
}

/* Hashes of all that came out; two of these are equal iff (but for chance) all bytes are. */
struct outcome {
    uint64_t tensor[CASES][NIB_PART_COUNT], values[CASES][3], gemm, casts[2 * NIB_DTYPE_COUNT];
    int failures;  /* calls that failed */
    int disturbed; /* calls after which the floating-point control was another */
};

static uint64_t hash_of(const void *data, size_t bytes)
{
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001B3u;
    return hash;
}

struct run {
    struct outcome *out;
    unsigned long long control; /* as it was set */
    int rounding, threads;
};

/* After every call of the library: did it work, and is the control as before? */
static void note(struct run *run, nib_status status)
{
    run->out->failures += status != NIB_OK;
    run->out->disturbed += control() != run->control || fegetround() != run->rounding;
}

static nib_quantizer case_of(int i)
{
    nib_quantizer q;
    nib_quantizer_init_format(&q, i < NVFP4_CASES ? NIB_NVFP4 : (nib_format)(i - NVFP4_CASES + 1));
    if (i >= NVFP4_CASES)
        return q;
    q.seed = 5, q.offset = UINT32_MAX;
    q.scale_rule = i == 1 || i == 2 ? NIB_SCALE_4OVER6 : i == 3 ? NIB_SCALE_SWEEP : NIB_SCALE_RTN;
    q.error_mode = i == 2 ? NIB_ERROR_MSE : NIB_ERROR_MAE;
    q.e4m3_max = i == 2 ? 256 : 448;
    q.rounding = i >= 4 && i <= 6 ? (nib_rounding)(i - 3) : NIB_ROUND_NEAREST;
    q.rht = q.rht_rowwise = i == 7;
    q.row_scaled = i == 8;
    q.block_dims[0] = i == 9 ? 16 : 1;
    q.swizzled = i == 10;
    q.tensor_scale_rule = i == 11 ? NIB_TENSOR_SCALE_RULE_POW2 : NIB_TENSOR_SCALE_RULE_DIALECT;
    q.min_block_scale = i == 11 ? 0x1p-9f : 0;
    q.dialect = i >= 12 ? (nib_dialect)(i - 11) : NIB_DIALECT_TE;
    return q;
}

/* The same numbers row by row or column by column: two matrices. Panels of the second are copied first. */
static nib_array input_of(const struct inputs *in, int i, bool by_columns, int threads)
{
    const void *data = i % 3 == 1 ? (const void *)in->bf16 : i % 3 == 2 ? (const void *)in->f16 : (const void *)in->x;
    const nib_dtype dtype = i % 3 == 1 ? NIB_BF16 : i % 3 == 2 ? NIB_F16 : NIB_F32;
    return (nib_array){ .data = (void *)(uintptr_t)data,
                        .bytes = ROWS * COLS * (i % 3 ? 2 : 4),
                        .dtype = dtype,
                        .rank = 2,
                        .shape = { ROWS, COLS },
                        .strides = { by_columns ? 1 : COLS, by_columns ? ROWS : 1 },
                        .device = host_of(threads) };
}

static void run_tensor(struct run *run, const struct inputs *in, int i, float *y)
{
    const nib_quantizer q = case_of(i);
    const bool by_columns = i % 5 == 4, twice = i % 4 == 0;
    const nib_array x = input_of(in, i, by_columns, run->threads), other = input_of(in, i, !by_columns, run->threads);
    nib_tensor *t = NULL;
    note(run, nib_quantize(&q, twice ? &other : &x, NULL, &t));
    if (twice)
        note(run, nib_quantize_into(&q, &x, NULL, NULL, t));
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        const nib_buffer *buffer = nib_tensor_buffer(t, (nib_part)part);
        run->out->tensor[i][part] = hash_of(nib_buffer_data(buffer), nib_buffer_bytes(buffer));
    }
    const nib_dtype dtypes[3] = { NIB_F32, NIB_BF16, NIB_F16 };
    for (int d = 0; d < 3; d++) {
        nib_array out = { .data = y,
                          .bytes = sizeof in->x,
                          .dtype = dtypes[d],
                          .rank = 2,
                          .shape = { ROWS, COLS },
                          .strides = { COLS, 1 },
                          .device = x.device };
        note(run, nib_dequantize(t, d == 1 ? NIB_COLUMNWISE : NIB_ROWWISE, &out));
        run->out->values[i][d] = hash_of(y, (size_t)(ROWS * COLS * (d ? 2 : 4)));
    }
    nib_tensor_destroy(t);
}

static void run_gemm(struct run *run, const struct inputs *in, float *y)
{
    const nib_quantizer q = case_of(0);
    nib_array x = input_of(in, 0, false, run->threads);
    x.shape[0] = LINES;
    const nib_array out = { .data = y,
                            .bytes = LINES * LINES * sizeof *y,
                            .dtype = NIB_F32,
                            .rank = 2,
                            .shape = { LINES, LINES },
                            .strides = { LINES, 1 },
                            .device = x.device };
    nib_tensor *t = NULL;
    note(run, nib_quantize(&q, &x, NULL, &t));
    note(run, reference_product(t, NIB_ROWWISE, t, NIB_ROWWISE, 0.3f, 0, &out));
    note(run, reference_product(t, NIB_ROWWISE, t, NIB_ROWWISE, 1e-30f, 1, &out));
    const nib_operand codes = { t, NULL, NIB_ROWWISE }, values = { NULL, &x, NIB_ROWWISE };
    nib_gemm_options options;
    nib_gemm_options_init(&options);
    options.beta = 1;
    note(run, nib_gemm(&codes, &codes, &options, &out));
    options.alpha = 1e-30f;
    note(run, nib_gemm(&values, &codes, &options, &out));
    run->out->gemm = hash_of(y, LINES * LINES * sizeof *y);
    nib_tensor_destroy(t);
}

static void run_casts(struct run *run, const struct inputs *in, float *y)
{
    const nib_dtype dtypes[] = { NIB_F32, NIB_F16, NIB_BF16, NIB_E4M3, NIB_E5M2, NIB_E8M0, NIB_E2M1 };
    uint8_t *codes = malloc(sizeof in->x);
    for (int d = 0; d < COUNT(dtypes); d++) {
        const size_t bytes = (size_t)(ROWS * COLS * nib_dtype_bits(dtypes[d]) / 8);
        note(run, nib_encode(dtypes[d], in->x, ROWS * COLS, codes));
        run->out->casts[2 * d] = hash_of(codes, bytes);
        note(run, nib_decode(dtypes[d], codes, ROWS * COLS, y));
        run->out->casts[2 * d + 1] = hash_of(y, sizeof in->x);
    }
    free(codes);
}

static struct outcome compute(const struct inputs *in, int threads)
{
    struct outcome out = { 0 };
    struct run run = { &out, control(), fegetround(), threads };
    float *y = calloc(ROWS * COLS, sizeof *y);
    for (int i = 0; i < CASES; i++)
        run_tensor(&run, in, i, y);
    run_gemm(&run, in, y);
    run_casts(&run, in, y);
    free(y);
    return out;
}

static void check_outcome(const struct outcome *a, const struct outcome *plain, const char *what)
{
    CHECK_THAT(a->failures == 0, "%s: %d calls failed", what, a->failures);
    CHECK_THAT(a->disturbed == 0, "%s: the floating-point control was not restored by %d calls", what, a->disturbed);
    for (int i = 0; i < CASES; i++) {
        for (int part = 0; part < NIB_PART_COUNT; part++)
            CHECK_THAT(a->tensor[i][part] == plain->tensor[i][part], "%s: part %d of case %d", what, part, i);
        for (int d = 0; d < 3; d++)
            CHECK_THAT(a->values[i][d] == plain->values[i][d], "%s: values %d of case %d", what, d, i);
    }
    CHECK_THAT(a->gemm == plain->gemm, "%s: product", what);
    CHECK_THAT(memcmp(a->casts, plain->casts, sizeof a->casts) == 0, "%s: casts", what);
}

static struct inputs inputs;

static struct outcome plain_outcome(void)
{
    fesetenv(FE_DFL_ENV);
    make_inputs(&inputs, 0);
    return compute(&inputs, 1);
}

/* ---- Forks ---- */

/* Memory that a child writes and its parent reads. */
static struct outcome *shared_outcome(void)
{
    void *memory = mmap(NULL, sizeof(struct outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void wait_for(pid_t child, const char *what)
{
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_THAT(WIFEXITED(status), "%s: signal %d", what, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    CHECK_THAT(!WIFEXITED(status) || WEXITSTATUS(status) == 0, "%s: exit %d", what, WEXITSTATUS(status));
}

/* A child that computes; 3: NIB_MAX_ISA was not heeded. */
static pid_t start_child(struct outcome *out, const char *isa)
{
    const pid_t child = fork();
    if (child)
        return child;
    alarm(CHILD_SECONDS);
    if (isa)
        setenv("NIB_MAX_ISA", isa, 1);
    *out = compute(&inputs, 4);
    _exit(isa && strcmp(nib_isa(), isa) != 0 ? 3 : 0);
}

#if defined(__x86_64__)
enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };

/* The system gives no permission for AMX's tiles from here on, as an older kernel or a sandbox does. */
static bool forbid_tiles(void)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH_REQ_XCOMP_PERM, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = { COUNT(program), program };
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0 &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == -1 && errno == EPERM;
}

/* A child that computes where the permission is refused; 3: AMX was taken all the same, 4: there are no filters. */
static pid_t start_without_tiles(struct outcome *out)
{
    const pid_t child = fork();
    if (child)
        return child;
    alarm(CHILD_SECONDS);
    if (!forbid_tiles())
        _exit(4);
    *out = compute(&inputs, 4);
    _exit(strcmp(nib_isa(), "amx") == 0 ? 3 : 0);
}
#endif

/* Whether NIB_MAX_ISA=name takes all that there is up to the last line of that name, and nothing behind it. */
static bool is_strongest(const char *name)
{
    struct nib_kernels wanted = { 0 };
    const struct nib_isa *last = nib_isas;
    setenv("NIB_MAX_ISA", name, 1);
    for (const struct nib_isa *isa = nib_isas; isa->name; isa++)
        last = strcmp(isa->name, name) == 0 ? isa : last;
    for (const struct nib_isa *isa = nib_isas; isa <= last; isa++) {
        if (!isa->present())
            continue;
#define X(operation, count)             \
    for (int i = 0; i < (count); i++)   \
        if (isa->kernels->operation[i]) \
            wanted.operation[i] = isa->kernels->operation[i];
        NIB_KERNELS(X)
        NIB_PRODUCT_KERNELS(X)
        NIB_GPTQ_KERNELS(X)
#undef X
    }
    return memcmp(&wanted, nib_kernels_best(), sizeof wanted) == 0;
}

/* The first tests, because the process must not have used the library: its kernels are chosen, and any threads started,
 * in a child. */
TEST(the_strongest_set_can_be_named)
{
    for (const struct nib_isa *isa = nib_isas; isa->name; isa++) {
        const pid_t child = fork();
        if (!child)
            _exit(!is_strongest(isa->name));
        wait_for(child, isa->name);
    }
}

TEST(first_used_in_a_child)
{
    make_inputs(&inputs, 0);
    struct outcome *any = shared_outcome(), *scalar = shared_outcome();
    wait_for(start_child(any, NULL), "the first use");
    wait_for(start_child(scalar, "scalar"), "the first use, NIB_MAX_ISA=scalar");
#if defined(__x86_64__)
    struct outcome *refused = shared_outcome();
    wait_for(start_without_tiles(refused), "the first use, no permission for tiles");
#endif
    const struct outcome plain = plain_outcome();
    check_outcome(any, &plain, "first used in a child");
    check_outcome(scalar, &plain, "first used in a child, scalar");
#if defined(__x86_64__)
    check_outcome(refused, &plain, "first used in a child, no permission for tiles");
    munmap(refused, sizeof *refused);
#endif
    munmap(any, sizeof *any);
    munmap(scalar, sizeof *scalar);
}

/* The next, because worker threads inherit the control of whoever starts them: here they are started with everything
 * set. */
TEST(workers_started_in_odd_surroundings)
{
    const struct outcome plain = plain_outcome();
    surround(COUNT(surroundings) - 1);
    const struct outcome odd = compute(&inputs, 4);
    fesetenv(FE_DFL_ENV);
    check_outcome(&odd, &plain, "workers started in odd surroundings");
    const struct outcome again = compute(&inputs, 4);
    check_outcome(&again, &plain, "afterwards");
}

TEST(every_rounding_mode_and_flushing)
{
    const struct outcome plain = plain_outcome();
    for (int i = 0; i < COUNT(surroundings); i++)
        for (int threads = 1; threads <= 3; threads += 2) {
            surround(i);
            const struct outcome out = compute(&inputs, threads);
            fesetenv(FE_DFL_ENV);
            check_outcome(&out, &plain, surroundings[i].name);
        }
}

/* Options are judged in surroundings, too: a floor that E4M3 does not have is rejected although flushing makes it 0. */
TEST(options_are_checked_alike_everywhere)
{
    const float floors[] = { 0, 0x1p-9f, 3 * 0x1p-9f, 448, 0.3f, 1e-40f, -1e-40f, 0x1.000002p-9f, 447 };
    const bool good[] = { true, true, true, true, false, false, false, false, false };
    for (int i = 0; i < COUNT(surroundings); i++)
        for (int f = 0; f < COUNT(floors); f++) {
            nib_quantizer q;
            nib_quantizer_init(&q);
            q.min_block_scale = floors[f];
            surround(i);
            const nib_status status = nib_quantizer_check(&q, NULL);
            fesetenv(FE_DFL_ENV);
            CHECK_THAT((status == NIB_OK) == good[f], "%s: floor %a: %s", surroundings[i].name, floors[f],
                       nib_status_name(status));
        }
}

/* So are the squares of a Hessian, which may be subnormal: they are put in order, and a negative one is rejected. */
TEST(hessians_are_judged_alike_everywhere)
{
    const float good[] = { 1e-40f, 0, 0, 3e-40f, 0, 2e-40f }, bad[] = { 1, 0, 0, -1e-40f, 0, 1 };
    for (int i = 0; i < COUNT(surroundings); i++) {
        int32_t order[3] = { 0 }, none[3];
        float u[9];
        surround(i);
        const nib_status status = nib_gptq_factorize(good, 3, 0, NULL, order, u, NULL);
        const nib_status rejected = nib_gptq_factorize(bad, 3, 0, NULL, none, u, NULL);
        fesetenv(FE_DFL_ENV);
        CHECK_THAT(status == NIB_OK && order[0] == 1 && order[1] == 2 && order[2] == 0, "%s: %s, order %d %d %d",
                   surroundings[i].name, nib_status_name(status), (int)order[0], (int)order[1], (int)order[2]);
        CHECK_THAT(rejected == NIB_ERR_ARG, "%s: %s", surroundings[i].name, nib_status_name(rejected));
    }
}

TEST(a_child_of_a_process_that_used_threads)
{
    const struct outcome plain = plain_outcome(), threaded = compute(&inputs, 4);
    check_outcome(&threaded, &plain, "before the fork");
    struct outcome *out = shared_outcome();
    for (int i = 0; i < 3; i++) {
        memset(out, 0, sizeof *out);
        wait_for(start_child(out, NULL), "a child");
        check_outcome(out, &plain, "in a child");
    }
    const struct outcome after = compute(&inputs, 4); /* and the parent still has its threads */
    check_outcome(&after, &plain, "after the fork");
    munmap(out, sizeof *out);
}

/* ---- Threads ---- */

struct worker {
    pthread_t thread;
    int index;
    const struct inputs *own, *common;
    struct outcome own_outcome, common_outcome;
    bool message;
};

static void *work(void *context)
{
    struct worker *worker = context;
    if (worker->index % 2)
        surround(worker->index % COUNT(surroundings)); /* a thread's control is its own */
    worker->own_outcome = compute(worker->own, worker->index % 4);
    worker->common_outcome = compute(worker->common, worker->index % 4);
    /* So is its last error. */
    nib_device *host = NULL;
    char words[64];
    snprintf(words, sizeof words, "not %d", -1 - worker->index);
    worker->message = nib_host_create(-1 - worker->index, &host) == NIB_ERR_ARG;
    sched_yield();
    worker->message = worker->message && strstr(nib_last_error(), words);
    return NULL;
}

TEST(eight_threads_at_once)
{
    enum { WORKERS = 8 };
    const struct outcome plain = plain_outcome();
    static struct inputs own[WORKERS];
    static struct outcome expected[WORKERS];
    static struct worker workers[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        make_inputs(&own[i], (uint64_t)i + 1);
        expected[i] = compute(&own[i], 1);
        workers[i] = (struct worker){ .index = i, .own = &own[i], .common = &inputs };
    }
    for (int i = 0; i < WORKERS; i++)
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    for (int i = 0; i < WORKERS; i++) {
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
        check_outcome(&workers[i].own_outcome, &expected[i], "a thread with data of its own");
        check_outcome(&workers[i].common_outcome, &plain, "a thread with common data");
        CHECK_THAT(workers[i].message, "thread %d has another's error", i);
    }
}

/* ---- Stacks ---- */

/* With the thread's own variables; a call that takes more ends in the page below. There is more where the need is not the
 * library's: AddressSanitizer surrounds variables, and without optimization each step of a kernel has its own. */
#if defined(__OPTIMIZE__) && !SANITIZED
enum { STACK_BYTES = 256 * 1024 };
#else
enum { STACK_BYTES = 8 * 1024 * 1024 };
#endif

static void *compute_plainly(void *outcome)
{
    *(struct outcome *)outcome = compute(&inputs, 1);
    return NULL;
}

TEST(a_thread_with_a_small_stack)
{
    const struct outcome plain = plain_outcome();
    struct outcome outcome = { 0 };
    pthread_attr_t small;
    pthread_t thread;
    CHECK(pthread_attr_init(&small) == 0);
    CHECK(pthread_attr_setstacksize(&small, STACK_BYTES) == 0);
    CHECK(pthread_create(&thread, &small, compute_plainly, &outcome) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    check_outcome(&outcome, &plain, "a thread with a small stack");
    pthread_attr_destroy(&small);
}

/* ---- Locale ---- */

/* What the library writes in words: messages, and a file with its header. */
static void write_words(char *out, size_t room, const char *path)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    size_t used = 0;
    const struct {
        int32_t block, e4m3_max;
        float floor;
    } wrong[] = { { 3, 448, 0 }, { 1, -12345678, 0 }, { 1, 448, 0.3f } };
    for (int i = 0; i < COUNT(wrong); i++) {
        nib_quantizer bad = q;
        bad.block_dims[0] = wrong[i].block, bad.e4m3_max = wrong[i].e4m3_max, bad.min_block_scale = wrong[i].floor;
        CHECK(nib_quantizer_check(&bad, NULL) != NIB_OK);
        used += (size_t)snprintf(out + used, room - used, "%s\n", nib_last_error());
    }
    q.min_block_scale = 0.875f, q.seed = 1234567890123456789u;
    const nib_array x = input_of(&inputs, 0, false, 0);
    nib_tensor *t = NULL, *back = NULL;
    nib_writer *writer = NULL;
    nib_file *file = NULL;
    int equal = 0;
    CHECK_OK(nib_quantize(&q, &x, NULL, &t));
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(nib_writer_metadata(writer, "a", "1.5"));
    CHECK_OK(nib_writer_declare_tensor(writer, "t", t));
    CHECK_OK(nib_writer_write_tensor(writer, "t", t));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    CHECK_OK(nib_file_open(path, &file));
    CHECK_OK(nib_file_read_tensor(file, "t", NULL, &back));
    CHECK_OK(nib_tensor_equal(t, back, &equal));
    CHECK(equal);
    nib_metadata facts = { .bytes = sizeof facts };
    CHECK_OK(nib_tensor_get_metadata(back, &facts));
    CHECK(nib_quantizer_equal(facts.quantizer, &q));
    nib_file_close(file);
    nib_tensor_destroy(t);
    nib_tensor_destroy(back);
}

static uint64_t hash_of_file(const char *path)
{
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(path, "rb");
    CHECK(file);
    const size_t n = file ? fread(bytes, 1, sizeof bytes, file) : 0;
    CHECK(n > 1000 && n < sizeof bytes);
    if (file)
        fclose(file);
    return hash_of(bytes, n);
}

/* A locale with decimal commas: one that is there, or one compiled into `directory` where that is possible. */
static const char *comma_locale(const char *directory)
{
    const char *const names[] = { "de_DE.UTF-8", "de_DE.utf8",  "de_DE",       "fr_FR.UTF-8", "fr_FR.utf8",
                                  "es_ES.UTF-8", "it_IT.UTF-8", "ru_RU.UTF-8", "pt_BR.UTF-8", "nl_NL.UTF-8" };
    const char *found = NULL;
    for (int i = 0; i < COUNT(names) && !found; i++)
        found = setlocale(LC_ALL, names[i]);
    if (found)
        return found;
    char command[256];
    snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 %s/de_DE.UTF-8 >%s/log 2>&1", directory, directory);
    if (system(command) != 0)
        return NULL;
    setenv("LOCPATH", directory, 1);
    found = setlocale(LC_ALL, "de_DE.UTF-8");
    unsetenv("LOCPATH");
    return found;
}

static void remove_directory(const char *directory)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", directory);
    CHECK(system(command) == 0);
}

TEST(decimal_commas)
{
    const struct outcome plain = plain_outcome();
    char directory[64], path[96], before[1024], after[1024];
    const char *tmp = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%.40s/nib-locale-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    CHECK(mkdtemp(directory));
    const char *found = comma_locale(directory);
    if (!found) {
        remove_directory(directory);
        SKIP("no locale with a decimal comma is installed");
    }
    CHECK_THAT(strcmp(localeconv()->decimal_point, ",") == 0, "%s has no decimal comma", found);
    const struct outcome comma = compute(&inputs, 2);
    check_outcome(&comma, &plain, found);
    snprintf(path, sizeof path, "%s/t.safetensors", directory);
    write_words(after, sizeof after, path);
    const uint64_t comma_file = hash_of_file(path);
    setlocale(LC_ALL, "C");
    write_words(before, sizeof before, path);
    CHECK_THAT(strcmp(before, after) == 0, "messages differ:\n%s%s", before, after);
    CHECK(hash_of_file(path) == comma_file);
    remove_directory(directory);
}

/* ---- Small things ---- */

extern int omp_get_max_threads(void) __attribute__((weak)); /* there where the library has OpenMP */

TEST(threads_that_pay)
{
    const int64_t each = NIB_ELEMENTS_PER_THREAD;
    const int four = omp_get_max_threads ? 4 : 1, three = omp_get_max_threads ? 3 : 1;
    CHECK(nib_thread_count(host_of(4), 100 * each) == four);
    CHECK(nib_thread_count(host_of(4), 3 * each) == three);
    CHECK(nib_thread_count(host_of(4), 0) == 1 && nib_thread_count(host_of(1), 100 * each) == 1);
    const pid_t child = fork(); /* which has none of its parent's threads */
    if (!child)
        _exit(nib_thread_count(host_of(4), 100 * each) != 1);
    wait_for(child, "threads in a child");
}

TEST(the_instruction_set_has_a_name)
{
    CHECK(nib_isa() && nib_isa()[0] && nib_isa() == nib_isa());
    const char *cap = getenv("NIB_MAX_ISA");
    CHECK_THAT(!cap || strcmp(cap, "scalar") != 0 || strcmp(nib_isa(), "scalar") == 0, "NIB_MAX_ISA=scalar, but %s",
               nib_isa());
}

#if defined(__x86_64__) && defined(__linux__)
/* Whether the flags of the first processor in /proc/cpuinfo have all of these words. */
static bool has_flags(const char *words)
{
    char line[8192], word[32];
    FILE *file = fopen("/proc/cpuinfo", "r");
    bool all = false;
    while (file && !all && fgets(line, sizeof line, file)) {
        all = strncmp(line, "flags", 5) == 0;
        line[strcspn(line, "\n")] = ' ';
        for (const char *at = words; all && *at; at += strcspn(at, " "), at += *at == ' ') {
            snprintf(word, sizeof word, " %.*s ", (int)strcspn(at, " "), at);
            all = strstr(line, word) != NULL;
        }
        if (strncmp(line, "flags", 5) == 0)
            break;
    }
    if (file)
        fclose(file);
    return all;
}

/* By the system's own list of what the processor has; AMX needs the system's permission as well. */
TEST(the_instruction_set_is_the_best_there_is)
{
    static const char *const avx2 = "avx2 fma f16c", *const avx512 = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq";
    if (getenv("NIB_MAX_ISA")) {
        SKIP("NIB_MAX_ISA is set");
        return;
    }
    const bool tiles = has_flags(avx512) && has_flags("avx512_vnni avx512vbmi avx512_fp16 amx_bf16 amx_tile") &&
                       syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    const char *best = tiles ? "amx" : has_flags(avx512) ? "avx512" : has_flags(avx2) ? "avx2" : "scalar";
    CHECK_THAT(strcmp(nib_isa(), best) == 0, "%s, and the processor has %s", nib_isa(), best);
}
#endif

TEST_MAIN

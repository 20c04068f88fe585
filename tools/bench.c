/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.c - nib bench: how fast the library is, and how fast this machine would let it be.
 *
 * Every operation is timed in turn with a loop that only reads and writes the same bytes, so that what other programs
 * do to the memory meets both. The share of the floor is that loop's time over the operation's.
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "bench_cuda.h"
#include "cli.h"
#include "commands.h"
#include "nib.h"
#include "output.h"
#include "text.h"

/* ---- What is measured ---- */

/* Bytes of one usage for each BENCH_CHUNK elements: codes and scales. */
static const int copy_bytes[NIB_FORMAT_COUNT] = {
    [NIB_NVFP4] = 144, [NIB_FLOAT8] = 256, [NIB_MXFP8] = 264, [NIB_MXFP4] = 136
};

struct shape {
    const char *model;
    int64_t rows, cols;
};

/* Weights that people quantize. */
static const struct shape shapes[] = {
    { "Llama-3-8B q, o", 4096, 4096 },    { "Llama-3-8B k, v", 1024, 4096 },  { "Llama-3-8B gate, up", 14336, 4096 },
    { "Llama-3-8B down", 4096, 14336 },   { "Llama-3-70B q, o", 8192, 8192 }, { "Qwen3-30B-A3B expert", 1536, 2048 },
    { "DeepSeek-V3 expert", 2048, 7168 },
};
static const struct shape quick_shape = { "small", 256, 1024 };

/* What must hold, in one run on one core: an operation's speed as a share of that of its plain loop, or as a multiple of
 * other operations'. */
struct rule {
    const char *operation, *against[2]; /* against one, or two done in turn; none: the plain loop */
    double target;
    bool cached; /* on data that stays in the cache; elsewhere it is far larger */
    int threads; /* 2: against the same on one thread, unless memory allows less */
};

static const struct rule rules[] = {
    { .operation = "amax.f32", .target = 0.9 },
    { .operation = "amax.bf16", .target = 0.9 },
    { .operation = "quantize.f32", .target = 0.65 },
    { .operation = "quantize.bf16", .target = 0.4 },
    { .operation = "whole.f32", .against = { "amax.f32", "quantize.f32" }, .target = 0.8 },
    { .operation = "whole.bf16", .against = { "amax.bf16", "quantize.bf16" }, .target = 0.8 },
    { .operation = "dequantize.f32", .target = 0.9 },
    { .operation = "dequantize.bf16", .target = 0.85 },
    { .operation = "both-rht.f32", .against = { "quantize.f32" }, .target = 0.25 },
    { .operation = "stochastic8.f32", .against = { "quantize.f32" }, .target = 0.45 },
    { .operation = "sweep.f32", .against = { "quantize.f32" }, .target = 1.0 / 15, .cached = true },
    { .operation = "quantize.f32", .target = 1.7, .threads = 2 },
    { .operation = "whole.f32", .target = 1.7, .threads = 2 },
    { .operation = "both-rht.f32", .target = 1.7, .threads = 2 },
};
enum { RULES = sizeof rules / sizeof *rules };

/* Against the AVX2 kernels, where there are better ones, in the cache; unless the plain loop allows less. */
static const char *const wider_operations[] = { "quantize.f32",   "quantize.bf16",   "amax.f32",
                                                "amax.bf16",      "columnwise.f32",  "rht-columnwise.f32",
                                                "both-rht.f32",   "stochastic8.f32", "stochastic24.f32",
                                                "4over6.f32",     "sweep.f32",       "dequantize.f32",
                                                "dequantize.bf16" };
enum { WIDER = sizeof wider_operations / sizeof *wider_operations };
static const double wider_target = 1.5, wider_loop_target = 0.9; /* of AVX2, and of that loop */

/* 512 KiB of values: with what is made of them they fit into a second-level cache of 1 MiB, which twice as many do not.
 * Half of them would too, but then a call's own cost, 0.3 us for an amax and 1 us for a quantization, is up to a fifth of
 * a call and hides as much of the difference between kernels; here it is a tenth at most, 4 % for rows. Few rows make
 * columns too short: columns of 128 are written in pieces of one cache line and cost half as much again as those of
 * 256. */
static const struct shape cached_rows = { "in the cache", 128, 1024 }, cached_halves = { "in the cache", 256, 1024 },
                          cached_columns = { "in the cache", 256, 512 };

struct verdict {
    char what[96];
    double value, target;
};

enum { ONE_THREAD = 1, DEFAULT_LIMIT = 1 << 30 };

struct options {
    bool json, quick, no_scalar, list, only_floors, gemm;
    int32_t threads, size_limit; /* ONE_THREAD and DEFAULT_LIMIT if not given */
    const char *svg, *shape, *device;
    char **filters; /* NULL at the end; none: everything */
};

struct report {
    const struct options *options;
    double streams[BENCH_STREAMS]; /* bytes per second */
    struct bench_result *results;
    size_t n, capacity;
    struct verdict verdicts[RULES + WIDER];
    int verdict_count;
};

static const struct shape *cached_shape(const struct bench_operation *operation)
{
    return operation->columnwise ? &cached_columns : operation->dtype == NIB_F32 ? &cached_rows : &cached_halves;
}

static bool begins_with(const char *name, const char *filter) { return strncmp(name, filter, strlen(filter)) == 0; }

static bool is_wanted(const struct options *options, const struct bench_operation *operation)
{
    bool wanted = !*options->filters;
    for (char **filter = options->filters; *filter; filter++)
        wanted |= begins_with(operation->name, *filter);
    return wanted;
}

/* The first NAME with which no operation begins, or NULL. */
static const char *name_of_none(const struct options *options)
{
    for (char **filter = options->filters; *filter; filter++) {
        int i = 0;
        while (i < bench_operation_count && !begins_with(bench_operations[i].name, *filter))
            i++;
        if (i == bench_operation_count)
            return *filter;
    }
    return NULL;
}

/* ---- Errors ---- */

static enum cli_exit out_of_memory(void)
{
    cli_error("bench: out of memory");
    return CLI_FAILED;
}

static enum cli_exit library_failed(const struct bench_operation *operation)
{
    cli_error("bench: %s: %s", operation->name, nib_last_error());
    return CLI_FAILED;
}

/* ---- One measurement ---- */

struct job {
    struct bench_call call;
    struct bench_traffic traffic;
    void *coded; /* what the plain loop has for codes and scales; its values are the call's */
    int64_t chunks;
    int threads;
};

static void close_job(struct job *job)
{
    bench_call_close(&job->call);
    free(job->coded);
}

/* Of a chunk. */
static int plain_bytes(const struct bench_operation *operation)
{
    return nib_dtype_bits(operation->dtype) / 8 * BENCH_CHUNK;
}

static int coded_bytes(const struct bench_operation *operation)
{
    return copy_bytes[operation->format] * (operation->rowwise + operation->columnwise);
}

static struct bench_traffic traffic_of(const struct bench_operation *operation, int64_t elements)
{
    enum { STREAM_BYTES = 8 << 20 }; /* from here on the cache cannot be meant to hold an output */
    const int plain = plain_bytes(operation), coded = coded_bytes(operation);
    if (operation->what == BENCH_AMAX)
        return (struct bench_traffic){ 0, plain, 0, false };
    if (operation->what == BENCH_DEQUANTIZE)
        return (struct bench_traffic){ 0, coded, plain, elements / BENCH_CHUNK * plain >= STREAM_BYTES };
    return (struct bench_traffic){ operation->what == BENCH_WHOLE, plain, coded, false };
}

/* Beside another one (or NULL) over the same values. */
static enum cli_exit open_job(struct job *job, int64_t rows, int64_t cols, const struct job *beside)
{
    const nib_status status = bench_call_open(&job->call, rows, cols, job->threads, beside ? &beside->call : NULL);
    if (status)
        return status == NIB_ERR_MEMORY ? out_of_memory() : library_failed(job->call.operation);
    job->traffic = traffic_of(job->call.operation, rows * cols);
    job->chunks = rows * cols / BENCH_CHUNK;
    const int64_t coded = job->chunks * coded_bytes(job->call.operation);
    job->coded = bench_allocate(coded);
    if (!job->coded)
        return out_of_memory();
    memset(job->coded, 0x5A, (size_t)coded);
    return CLI_FINE;
}

enum { MAX_RUNS = 25 };

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *values, int n, double *spread)
{
    qsort(values, (size_t)n, sizeof *values, by_value);
    const double median = values[n / 2];
    *spread = (values[3 * n / 4] - values[n / 4]) / median;
    return median;
}

static double time_operation(struct job *job, int times)
{
    if (times > 1)
        (void)bench_call_run(&job->call); /* the other one's data is in the cache */
    const double start = bench_now();
    for (int i = 0; i < times; i++)
        (void)bench_call_run(&job->call); /* it has run once: it cannot fail now */
    return (bench_now() - start) / times;
}

/* Over the same values in the same place. */
static void run_floor(const struct job *job)
{
    const bool decodes = job->call.operation->what == BENCH_DEQUANTIZE;
    void *const plain = job->call.plain.data;
    bench_floor(&job->traffic, decodes ? job->coded : plain, decodes ? plain : job->coded, job->chunks, job->threads);
}

static double time_floor(const struct job *job, int times)
{
    if (times > 1)
        run_floor(job);
    const double start = bench_now();
    for (int i = 0; i < times; i++)
        run_floor(job);
    return (bench_now() - start) / times;
}

/* In turn, until there are MAX_RUNS or the time is up. Short calls are repeated: a turn outlasts what interrupts it and the
 * change of the clock that wide vectors bring about. Where a call takes long there are fewer. */
static void measure(struct job *job, bool quick, struct bench_result *result)
{
    const double least = 200e-6, budget = quick ? 0.01 : 0.6, long_call = 0.15;
    double operation[MAX_RUNS], floor[MAX_RUNS], ignored;
    const double once = time_operation(job, 1), floor_once = time_floor(job, 1), begin = bench_now();
    const int times = once < least ? (int)(least / once) + 1 : 1,
              floor_times = floor_once < least ? (int)(least / floor_once) + 1 : 1,
              least_runs = quick || once + floor_once > long_call ? 3 : 7;
    int n = 0;
    while (n < least_runs || (n < MAX_RUNS && bench_now() - begin < budget)) {
        floor[n] = time_floor(job, floor_times);
        operation[n++] = time_operation(job, times);
    }
    result->median = median_of(operation, n, &result->spread);
    result->floor = median_of(floor, n, &ignored);
}

/* ---- Other kernels, in a child: the library chooses its kernels once ---- */

static json_t *read_results(FILE *stream)
{
    json_t *const document = json_loadf(stream, 0, NULL), *const results = json_object();
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(document, "results"), i, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "operation"));
        if (name && results)
            json_object_set(results, name, entry);
    }
    json_decref(document);
    return results;
}

/* A child's results by name; empty where the child could not be had. */
static json_t *results_of(const char *isa, const char *shape, char *const *filters)
{
    enum { FIXED = 7, MAX_FILTERS = 64 };
    char *words[FIXED + MAX_FILTERS + 1] = { "nib",         "bench",   "--json",     "--quick",
                                             "--no-scalar", "--shape", (char *)shape };
    for (int i = 0; i < MAX_FILTERS && filters[i]; i++)
        words[FIXED + i] = filters[i];
    int ends[2];
    if (pipe(ends))
        return json_object();
    (void)fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        (void)dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        if (setenv("NIB_MAX_ISA", isa, 1) == 0)
            execv("/proc/self/exe", words);
        _exit(2);
    }
    close(ends[1]);
    FILE *stream = fdopen(ends[0], "r");
    json_t *results = stream && child > 0 ? read_results(stream) : json_object();
    if (stream)
        fclose(stream);
    if (child > 0)
        (void)waitpid(child, NULL, 0);
    return results;
}

/* 0 where it is not known. */
static double figure_of(const json_t *results, const char *operation, const char *figure)
{
    return json_number_value(json_object_get(json_object_get(results, operation), figure));
}

/* ---- The report ---- */

static double gigabytes(const struct bench_result *r) { return r->bytes / r->median * 1e-9; }

static void print_result(const struct bench_result *r)
{
    char shape[48], scalar[16] = "-";
    snprintf(shape, sizeof shape, "%" PRId64 "x%" PRId64, r->rows, r->cols);
    if (r->scalar > 0)
        snprintf(scalar, sizeof scalar, "%.1f", r->scalar);
    cli_print("%-27s %-12s %2d %9.3f %8.2f %7.2f %8s %6.1f %%", r->operation, shape, r->threads, bench_rate(r),
              gigabytes(r), r->floor / r->median, scalar, 100 * r->spread);
    (void)fflush(stdout);
}

static bool keep_result(struct report *report, const struct bench_result *result)
{
    if (report->n == report->capacity) {
        const size_t capacity = report->capacity ? 2 * report->capacity : 64;
        struct bench_result *more = realloc(report->results, capacity * sizeof *more);
        if (!more)
            return false;
        report->results = more;
        report->capacity = capacity;
    }
    report->results[report->n++] = *result;
    return true;
}

/* What the scalar kernels did at a smaller size is in `scalar`, by name. */
static enum cli_exit bench_one(struct report *report, const struct bench_operation *operation,
                               const struct shape *shape, const char *part, int threads, const json_t *scalar)
{
    struct job job = { .call = { .operation = operation }, .threads = threads };
    struct bench_result result = { .operation = operation->name,
                                   .part = part,
                                   .model = shape->model,
                                   .rows = shape->rows,
                                   .cols = shape->cols,
                                   .threads = threads };
    bench_bind(threads);
    enum cli_exit status = open_job(&job, shape->rows, shape->cols, NULL);
    if (status == CLI_FINE) {
        measure(&job, report->options->quick, &result);
        result.bytes =
            (double)job.chunks * ((job.traffic.passes_before + 1.0) * job.traffic.in + (double)job.traffic.out);
        const double rate = figure_of(scalar, operation->name, "gelem_s");
        result.scalar = rate > 0 ? bench_rate(&result) / rate : 0;
        if (!keep_result(report, &result))
            status = out_of_memory();
        else if (!report->options->json)
            print_result(&result);
    }
    close_job(&job);
    return status;
}

static bool fits(const struct options *options, const struct shape *shape)
{
    return shape->rows * shape->cols * 4 <= options->size_limit;
}

/* ---- Parts of the report ---- */

static void measure_streams(struct report *report)
{
    enum { BYTES = 128 << 20, QUICK_BYTES = 4 << 20 }; /* beyond the caches, or to see that it works */
    const int64_t half = report->options->size_limit / 2;
    const int64_t bytes = report->options->quick ? QUICK_BYTES : half < BYTES ? half : BYTES;
    bench_bind(report->options->threads);
    void *in = bench_allocate(bytes), *out = bench_allocate(bytes);
    for (int s = 0; in && out && s < BENCH_STREAMS; s++) {
        memset(in, 0x5A, (size_t)bytes);
        memset(out, 0xA5, (size_t)bytes);
        double seconds[MAX_RUNS], ignored;
        const int runs = report->options->quick ? 3 : 9;
        for (int i = 0; i < runs; i++) {
            const double start = bench_now();
            bench_run_stream((enum bench_stream)s, in, out, bytes, report->options->threads);
            seconds[i] = bench_now() - start;
        }
        report->streams[s] = (s == BENCH_COPY ? 2 : 1) * (double)bytes / median_of(seconds, runs, &ignored);
    }
    free(in);
    free(out);
}

/* Every operation on the first shape that fits, the main ones on all of them. */
static enum cli_exit bench_shapes(struct report *report, const json_t *scalar, const struct shape *only)
{
    enum cli_exit status = CLI_FINE;
    for (int i = 0; i < bench_operation_count; i++) {
        bool all = false;
        for (size_t s = 0; s < (only ? 1 : sizeof shapes / sizeof *shapes) && status == CLI_FINE; s++) {
            const struct shape *shape = only ? only : &shapes[s];
            if (!is_wanted(report->options, &bench_operations[i]) || !fits(report->options, shape) ||
                (all && !bench_operations[i].main))
                continue;
            status = bench_one(report, &bench_operations[i], shape, "shape", report->options->threads, scalar);
            all = true;
        }
    }
    return status;
}

/* By what open_job allocates: values, codes, and codes again for the plain loop. */
static bool has_memory(const struct bench_operation *operation, const struct shape *shape)
{
    const int64_t needed =
        shape->rows * shape->cols / BENCH_CHUNK * (plain_bytes(operation) + 2 * coded_bytes(operation));
    const int64_t left = bench_free_memory();
    if (needed <= left - left / 4)
        return true;
    cli_error("bench: %s of %" PRId64 "x%" PRId64 " is left out: it takes %" PRId64 " MB of memory, and %" PRId64
              " MB are free",
              operation->name, shape->rows, shape->cols, needed / 1000000, left / 1000000);
    return false;
}

static enum cli_exit bench_sizes(struct report *report, const json_t *scalar)
{
    enum cli_exit status = CLI_FINE;
    const int64_t limit = report->options->quick ? 1 << 16 : report->options->size_limit;
    for (int i = 0; i < bench_operation_count; i++)
        for (int64_t bytes = 1024; bytes <= limit && status == CLI_FINE; bytes *= 4) {
            const int64_t cols = bytes / 4 / 16 < 4096 ? bytes / 4 / 16 : 4096; /* 16 rows, for the sake of columns */
            const struct shape shape = { "by size", bytes / 4 / cols, cols };
            if (bench_operations[i].main && is_wanted(report->options, &bench_operations[i]) &&
                has_memory(&bench_operations[i], &shape))
                status = bench_one(report, &bench_operations[i], &shape, "size", report->options->threads, scalar);
        }
    return status;
}

static enum cli_exit bench_threads(struct report *report, const json_t *scalar)
{
    enum cli_exit status = CLI_FINE;
    const int online = bench_processors();
    const struct shape *shape =
        report->options->quick || !fits(report->options, &shapes[0]) ? &quick_shape : &shapes[0];
    for (int i = 0; i < bench_operation_count; i++)
        for (int threads = 1; threads <= online && threads <= 64 && status == CLI_FINE; threads *= 2)
            if (bench_operations[i].main && is_wanted(report->options, &bench_operations[i]))
                status = bench_one(report, &bench_operations[i], shape, "threads", threads, scalar);
    return status;
}

/* ---- What must hold ---- */

static const struct bench_operation *find_operation(const char *name)
{
    for (int i = 0; i < bench_operation_count; i++)
        if (strcmp(bench_operations[i].name, name) == 0)
            return &bench_operations[i];
    return NULL;
}

static void add_verdict(struct report *report, const char *what, double value, double target)
{
    struct verdict *const verdict = &report->verdicts[report->verdict_count++];
    snprintf(verdict->what, sizeof verdict->what, "%s", what);
    verdict->value = value;
    verdict->target = target;
    if (report->options->json)
        return;
    cli_print("%-52s %8.3f %8.3f  %s", what, value, target, value >= target ? "holds" : "does not hold");
    (void)fflush(stdout);
}

static void describe_rule(const struct rule *rule, char *text, size_t bytes)
{
    if (rule->threads)
        snprintf(text, bytes, "%s, %d threads: against one", rule->operation, rule->threads);
    else if (rule->against[1])
        snprintf(text, bytes, "%s: of %s and %s", rule->operation, rule->against[0], rule->against[1]);
    else
        snprintf(text, bytes, "%s: of %s%s", rule->operation, rule->against[0] ? rule->against[0] : "its plain loop",
                 rule->cached ? ", in the cache" : "");
}

/* The median of what the others take (none: the plain loop) by what the operation takes, both in turn; and, where it has more
 * threads, what the plain loop of the other takes by what its own does. */
static double compare_jobs(struct job *job, struct job *others, int n, bool quick, double *loops)
{
    enum { ROUNDS = 15 };
    double ratio[ROUNDS], loop_ratio[ROUNDS], ignored;
    const int rounds = quick ? 3 : ROUNDS, times = time_operation(job, 1) < 1e-3 ? 5 : 1;
    for (int i = 0; i < rounds; i++) {
        const double floor = time_floor(job, times);
        double other = 0;
        for (int k = 0; k < n; k++)
            other += time_operation(&others[k], times);
        ratio[i] = (n ? other : floor) / time_operation(job, times);
        loop_ratio[i] = job->threads > 1 ? time_floor(&others[0], times) / floor : 1;
    }
    *loops = median_of(loop_ratio, rounds, &ignored);
    return median_of(ratio, rounds, &ignored);
}

static enum cli_exit judge_rule(struct report *report, const struct rule *rule, const struct shape *shape)
{
    struct job job = { .call = { .operation = find_operation(rule->operation) },
                       .threads = rule->threads ? rule->threads : 1 };
    struct job others[2] = { 0 };
    char what[sizeof report->verdicts->what];
    double loops;
    int n = 0;
    bench_bind(job.threads);
    enum cli_exit status = open_job(&job, shape->rows, shape->cols, NULL);
    for (; n < 2 && status == CLI_FINE && rule->against[n]; n++) {
        others[n] = (struct job){ .call = { .operation = find_operation(rule->against[n]) }, .threads = 1 };
        status = open_job(&others[n], shape->rows, shape->cols, &job);
    }
    struct job alone = job; /* with the same memory */
    nib_device *one_thread = NULL;
    alone.threads = 1;
    if (status == CLI_FINE && nib_host_create(1, &one_thread))
        status = CLI_FAILED;
    alone.call.plain.device = one_thread;
    if (status == CLI_FINE) {
        const double value = rule->threads ? compare_jobs(&job, &alone, 1, report->options->quick, &loops)
                                           : compare_jobs(&job, others, n, report->options->quick, &loops);
        describe_rule(rule, what, sizeof what);
        add_verdict(report, what, value, rule->threads && loops < rule->target ? loops : rule->target);
    }
    close_job(&job);
    close_job(&others[0]);
    close_job(&others[1]);
    nib_device_release(one_thread);
    return status;
}

/* The largest shape that fits. */
static const struct shape *large_shape(const struct options *options)
{
    const struct shape *large = &quick_shape;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes && !options->quick; s++)
        if (fits(options, &shapes[s]) && shapes[s].rows * shapes[s].cols > large->rows * large->cols)
            large = &shapes[s];
    return large;
}

static enum cli_exit judge_rules(struct report *report)
{
    const struct options *const options = report->options;
    enum cli_exit status = CLI_FINE;
    if (!options->json)
        cli_print("%-52s %8s %8s", "what must hold, on one core", "is", "at least");
    for (int i = 0; i < RULES && status == CLI_FINE; i++)
        if (is_wanted(options, find_operation(rules[i].operation)) && rules[i].threads <= bench_processors())
            status = judge_rule(report, &rules[i], rules[i].cached ? &cached_rows : large_shape(options));
    return status;
}

/* One turn of each kind of kernels, each in a process of its own: the rate of AVX-512 by that of AVX2, and the same of the
 * plain loop in place of AVX-512. False where a child could not be had. */
static bool compare_kernels(const char *operation, const char *shape, bool wider_first, double *ratio, double *allowed)
{
    double rate[2] = { 0, 0 }, share = 0;
    for (int turn = 0; turn < 2; turn++) {
        const int wider = turn == !wider_first;
        json_t *const results = results_of(wider ? "avx512" : "avx2", shape, (char *[]){ (char *)operation, NULL });
        rate[wider] = figure_of(results, operation, "gelem_s");
        share = wider ? figure_of(results, operation, "floor_share") : share;
        json_decref(results);
    }
    if (rate[0] <= 0 || rate[1] <= 0 || share <= 0)
        return false;
    *ratio = rate[1] / rate[0];
    *allowed = *ratio / share;
    return true;
}

/* Medians of many short turns: clocks wander from one second to the next, and where a process's pages lie in the cache
 * differs from one process to the next. */
static bool judge_wider_operation(struct report *report, const struct bench_operation *operation)
{
    enum { PAIRS = 31, QUICK_PAIRS = 3 };
    char text[32], what[sizeof report->verdicts->what];
    double ratio[PAIRS], allowed[PAIRS], ignored;
    const struct shape *const shape = cached_shape(operation);
    const int pairs = report->options->quick ? QUICK_PAIRS : PAIRS;
    snprintf(text, sizeof text, "%dx%d", (int)shape->rows, (int)shape->cols);
    for (int i = 0; i < pairs; i++)
        if (!compare_kernels(operation->name, text, i % 2, &ratio[i], &allowed[i]))
            return false;
    const double most = wider_loop_target * median_of(allowed, pairs, &ignored);
    snprintf(what, sizeof what, "%s: of AVX2, in the cache", operation->name);
    add_verdict(report, what, median_of(ratio, pairs, &ignored), most < wider_target ? most : wider_target);
    return true;
}

static void judge_wider(struct report *report)
{
    if (strcmp(nib_isa(), "avx512") != 0 && strcmp(nib_isa(), "amx") != 0)
        return;
    bench_bind(1);
    for (int i = 0; i < WIDER; i++) {
        const struct bench_operation *const operation = find_operation(wider_operations[i]);
        if (is_wanted(report->options, operation) && !judge_wider_operation(report, operation))
            cli_error("bench: %s is not compared with AVX2: no second process could be started", operation->name);
    }
}

/* ---- JSON ---- */

static const char *compiler_name(void)
{
#if defined(__clang__)
    return __VERSION__;
#else
    return "gcc " __VERSION__;
#endif
}

static json_t *json_of_result(const struct bench_result *r)
{
    return json_pack("{s:s, s:s, s:s, s:I, s:I, s:i, s:f, s:f, s:f, s:f, s:f, s:f}", "operation", r->operation, "part",
                     r->part, "model", r->model, "rows", (json_int_t)r->rows, "cols", (json_int_t)r->cols, "threads",
                     r->threads, "gelem_s", bench_rate(r), "gb_s", gigabytes(r), "floor_share", r->floor / r->median,
                     "scalar_ratio", r->scalar, "seconds", r->median, "spread", r->spread);
}

static enum cli_exit print_json(const struct report *report)
{
    char machine[256];
    bench_machine_name(machine, sizeof machine);
    json_t *const streams = json_object(), *const results = json_array(), *const floors = json_array();
    for (int s = 0; streams && s < BENCH_STREAMS; s++)
        json_object_set_new(streams, bench_stream_names[s], json_real(report->streams[s] * 1e-9));
    for (size_t i = 0; results && i < report->n; i++)
        json_array_append_new(results, json_of_result(&report->results[i]));
    for (int i = 0; floors && i < report->verdict_count; i++) {
        const struct verdict *const v = &report->verdicts[i];
        json_array_append_new(floors, json_pack("{s:s, s:f, s:f, s:b}", "what", v->what, "value", v->value, "target",
                                                v->target, "holds", v->value >= v->target));
    }
    json_t *const all =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:o, s:o, s:o}", "version", nib_version(), "machine", machine,
                  "compiler", compiler_name(), "isa", nib_isa(), "cpus", bench_processors(), "threads",
                  (int)report->options->threads, "memory_gb_s", streams, "floors", floors, "results", results);
    if (!all)
        return out_of_memory();
    const bool written = text_dump(stdout, all, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
    json_decref(all);
    return written || ferror(stdout) ? CLI_FINE : out_of_memory(); /* main sees what could not be written */
}

/* ---- Products ---- */

static json_t *json_of_gemm(const struct bench_gemm_report *report, const struct bench_gemm_bar *bars, int n)
{
    char machine[256];
    bench_machine_name(machine, sizeof machine);
    json_t *const results = json_array(), *const floors = json_array();
    for (int i = 0; results && i < report->n; i++) {
        const struct bench_gemm_result *r = &report->results[i];
        json_array_append_new(results,
                              json_pack("{s:s, s:I, s:i, s:f, s:f, s:f}", "product", r->plain ? "W4A16" : "W4A4", "m",
                                        (json_int_t)r->rows, "threads", r->threads, "seconds", r->seconds, "gflop_s",
                                        r->flops / r->seconds * 1e-9, "weights_gb_s", r->bytes / r->seconds * 1e-9));
    }
    for (int i = 0; floors && i < n; i++)
        json_array_append_new(floors, json_pack("{s:s, s:f, s:f, s:f, s:b}", "what", bars[i].what, "value",
                                                bars[i].value, "target", bars[i].floor, "goal", bars[i].goal, "holds",
                                                bars[i].value >= bars[i].floor));
    return json_pack("{s:s, s:s, s:s, s:s, s:i, s:f, s:f, s:f, s:o, s:o}", "version", nib_version(), "machine", machine,
                     "compiler", compiler_name(), "isa", nib_isa(), "cpus", bench_processors(), "fma_gflop_s",
                     report->fma * 1e-9, "read_gb_s", report->read[0] * 1e-9, "read_all_gb_s", report->read[1] * 1e-9,
                     "floors", floors, "gemm", results);
}

static void print_gemm(const struct bench_gemm_report *report, const struct bench_gemm_bar *bars, int n)
{
    cli_print("FP32 FMA of one thread %8.1f GFLOP/s", report->fma * 1e-9);
    cli_print("memory read            %8.2f GB/s, all threads %.2f", report->read[0] * 1e-9, report->read[1] * 1e-9);
    cli_print("%-8s %5s %3s %10s %9s %16s", "product", "M", "th", "ms", "GFLOP/s", "GB/s of weights");
    for (int i = 0; i < report->n; i++) {
        const struct bench_gemm_result *r = &report->results[i];
        cli_print("%-8s %5" PRId64 " %3d %10.4f %9.1f %16.2f", r->plain ? "W4A16" : "W4A4", r->rows, r->threads,
                  r->seconds * 1e3, r->flops / r->seconds * 1e-9, r->bytes / r->seconds * 1e-9);
    }
    for (int i = 0; i < n; i++)
        cli_print("%-48s %5.2f, at least %.2f (goal %.2f) %s", bars[i].what, bars[i].value, bars[i].floor, bars[i].goal,
                  bars[i].value >= bars[i].floor ? "holds" : "DOES NOT HOLD");
}

static enum cli_exit run_gemm(const struct options *options, const struct shape *shape)
{
    const struct bench_gemm_options o = { shape->rows, shape->cols, options->threads, options->quick };
    struct bench_gemm_report report;
    struct bench_gemm_bar bars[BENCH_GEMM_BARS];
    char machine[256];
    if (bench_gemm(&o, &report) != NIB_OK) {
        cli_error("bench: %s", nib_last_error());
        return CLI_FAILED;
    }
    bench_machine_name(machine, sizeof machine);
    const int n = bench_gemm_bars(&report, strstr(machine, "Intel") != NULL, bars);
    if (!options->json) {
        print_gemm(&report, bars, n);
        return CLI_FINE;
    }
    json_t *const all = json_of_gemm(&report, bars, n);
    if (!all)
        return out_of_memory();
    const bool written = text_dump(stdout, all, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
    json_decref(all);
    return written || ferror(stdout) ? CLI_FINE : out_of_memory();
}

/* ---- The command ---- */

static bool parse_shape(const char *text, struct shape *out)
{
    char *end;
    out->model = "given";
    out->rows = strtol(text, &end, 10);
    if (*end != 'x')
        return false;
    out->cols = strtol(end + 1, &end, 10);
    return !*end && out->rows > 0 && out->cols > 0 && out->rows <= 1 << 20 && out->cols <= 1 << 20 &&
           out->rows % 16 == 0 && out->cols % 16 == 0;
}

/* What would be without effect in a run of products, or on a GPU; NULL: nothing. */
static const char *out_of_place(const struct options *o, bool gpu)
{
    const struct {
        const char *name;
        bool given, of_products;
    } all[] = {
        { "--svg", o->svg, false },
        { "--floors", o->only_floors, false },
        { "--no-scalar", o->no_scalar, false },
        { "--list", o->list, false },
        { "a NAME", *o->filters && !gpu, false },
        { "--gemm", o->gemm, true },
        { "--threads", o->threads != ONE_THREAD, true },
        { "--size-limit", o->size_limit != DEFAULT_LIMIT, true },
        { "--shape", o->shape, true },
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].given && (gpu || !all[i].of_products))
            return all[i].name;
    return NULL;
}

static void print_heading(const struct options *options)
{
    if (!options->json)
        cli_print("%-27s %-12s %2s %9s %8s %7s %8s %8s", "operation", "shape", "th", "Gelem/s", "GB/s", "floor",
                  "scalar", "spread");
}

static enum cli_exit bench_all(struct report *report, const struct shape *only)
{
    const struct options *options = report->options;
    measure_streams(report);
    if (!options->json) {
        for (int s = 0; s < BENCH_STREAMS; s++)
            cli_print("memory %-20s %8.2f GB/s", bench_stream_names[s], report->streams[s] * 1e-9);
    }
    enum cli_exit status = only ? CLI_FINE : judge_rules(report);
    if (status == CLI_FINE && !only)
        judge_wider(report);
    if (status != CLI_FINE || options->only_floors)
        return status;
    print_heading(options);
    json_t *const scalar = options->no_scalar ? json_object() : results_of("scalar", "128x1024", options->filters);
    status = bench_shapes(report, scalar, only ? only : options->quick ? &quick_shape : NULL);
    if (status == CLI_FINE && !only)
        status = bench_sizes(report, scalar);
    if (status == CLI_FINE && !only)
        status = bench_threads(report, scalar);
    json_decref(scalar);
    return status;
}

static bool can_plot(const struct options *options, int code)
{
    if (code)
        cli_error("bench: cannot write '%s': %s", options->svg, output_reason(code));
    return !code;
}

static enum cli_exit bench(const struct options *options)
{
    struct report report = { .options = options };
    struct shape overrides;
    if (options->shape && !parse_shape(options->shape, &overrides)) {
        cli_error("bench: --shape takes ROWSxCOLS, two multiples of 16 up to 1048576, not '%s'", options->shape);
        return CLI_FAILED;
    }
    if (options->shape && !fits(options, &overrides)) {
        cli_error("bench: a shape of %s is beyond --size-limit %d", options->shape, (int)options->size_limit);
        return CLI_FAILED;
    }
    if (options->gemm)
        return run_gemm(options, options->shape ? &overrides : options->quick ? &quick_shape : &shapes[0]);
    if (options->svg && !can_plot(options, output_try(options->svg)))
        return CLI_FAILED;
    enum cli_exit status = bench_all(&report, options->shape ? &overrides : NULL);
    if (status == CLI_FINE && options->json)
        status = print_json(&report);
    if (status == CLI_FINE && options->svg &&
        !can_plot(options, bench_write_svg(options->svg, report.results, report.n)))
        status = CLI_FAILED;
    free(report.results);
    return status;
}

static enum cli_exit run(const struct cli_command *self, int argc, char **argv)
{
    struct options options = { .threads = ONE_THREAD, .size_limit = DEFAULT_LIMIT };
    const struct cli_option table[] = {
        { 0, "json", CLI_FLAG, &options.json, NULL, "report in JSON", 0, 0 },
        { 0, "quick", CLI_FLAG, &options.quick, NULL, "small sizes and few repetitions, to see that it works", 0, 0 },
        { 0, "floors", CLI_FLAG, &options.only_floors, NULL, "only what must hold", 0, 0 },
        { 0, "gemm", CLI_FLAG, &options.gemm, NULL, "products instead, beside FMA peak and read bandwidth", 0, 0 },
        { 0, "list", CLI_FLAG, &options.list, NULL, "only print the names of the operations", 0, 0 },
        { 't', "threads", CLI_NUMBER, &options.threads, "N", "use N threads; by default one", 1, 256 },
        { 0, "size-limit", CLI_NUMBER, &options.size_limit, "BYTES", "largest FP32 input; by default 1 GiB", 1 << 16,
          INT32_MAX },
        { 0, "shape", CLI_TEXT, &options.shape, "ROWSxCOLS", "only this shape", 0, 0 },
        { 0, "no-scalar", CLI_FLAG, &options.no_scalar, NULL, "do not compare with the scalar kernels", 0, 0 },
        { 0, "device", CLI_TEXT, &options.device, "NAME",
          "measure on host (the default), cuda or cuda:N; of the options only --json and --quick go with a GPU", 0, 0 },
        { 0, "svg", CLI_TEXT, &options.svg, "FILE", "plot throughput against size and threads", 0, 0 },
        { 0 }
    };
    int first;
    const enum cli_parsed parsed = cli_parse(self, table, argc, argv, &first);
    if (parsed != CLI_GO)
        return parsed == CLI_HELPED ? CLI_FINE : CLI_FAILED;
    options.filters = argv + first;
    const bool gpu = options.device && strcmp(options.device, "host") != 0;
    const char *const wrong = gpu || options.gemm ? out_of_place(&options, gpu) : NULL;
    if (wrong) {
        cli_error("bench: %s does not go with %s%s", wrong, gpu ? "--device " : "--gemm", gpu ? options.device : "");
        return CLI_FAILED;
    }
    if (gpu)
        return bench_cuda(&(struct bench_cuda_options){ options.device, options.json, options.quick, options.filters });
    const char *const none = name_of_none(&options);
    if (none) {
        cli_error("bench: no operation begins with '%s'; see nib bench --list", none);
        return CLI_FAILED;
    }
    for (int i = 0; i < bench_operation_count && options.list; i++)
        if (is_wanted(&options, &bench_operations[i]))
            cli_print("%s", bench_operations[i].name);
    return options.list ? CLI_FINE : bench(&options);
}

const struct cli_command cli_bench = {
    "bench", "[NAME]...", "measure how fast the library is on this machine",
    "Measure the operations of the library, or those whose name begins with a NAME, on shapes from real models,\n"
    "by size and by threads. In the same run: how fast memory is, and for each operation a loop that reads\n"
    "and writes the same bytes and does nothing else. First comes what must hold: shares of that loop's speed,\n"
    "or of other operations', from memory on one core, each with the least that it should be. Two threads should\n"
    "come to 1.7 times one, or to what two of those loops gain if that is less; AVX-512, in the cache, to 1.5 times\n"
    "AVX2, or to 0.9 of what that loop reaches if that is less. One thread is bound to one processor; several take\n"
    "all that the process was given.\n\n"
    "Columns: threads, 10^9 elements per second, 10^9 bytes read and written per second, the share of that loop's\n"
    "speed, how often faster than the scalar kernels, and the distance between the quartiles of the repetitions.\n\n"
    "With --gemm: NVFP4 weights by NVFP4 (W4A4) and by plain activations (W4A16), 1 to 512 rows of them, beside what "
    "one\n"
    "thread multiplies and reads; then what must hold, and the goal. One thread is timed by its processor time. No\n"
    "NAME, --floors, --no-scalar, --list or --svg goes with it.\n\n"
    "With --device cuda calls on a GPU are measured instead, as replayed graphs: microseconds, 10^9 elements and "
    "bytes\n"
    "per second, and the share of what a copy on the device, measured in the same run, allows for these bytes.\n\n"
    "Exit status: 0 measured, 2 it could not be done.\n",
    run
};

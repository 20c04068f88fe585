/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_load.c - 64 threads on small tensors, with other options at every call: the bytes of one thread, and memory that
 * stays what it was. NIB_LOAD_SECONDS says how long; tests/campaign/load.sh takes ten minutes.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "test_modes.h"

enum { THREADS = 64, JOBS = 384, DEVICE_LIFE = 64 };

/* An input, options, and what one thread makes of both. */
struct job {
    nib_quantizer q;
    nib_array x;
    nib_tensor *expected;
    float *values; /* of `expected`, dequantized */
    nib_usage from;
};

static struct job jobs[JOBS];
static atomic_bool stop;
static atomic_ullong calls, wrong;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Bytes of this process in memory. */
static int64_t resident(void)
{
    long pages = 0, all = 0;
    FILE *const file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &all, &pages) != 2)
        pages = 0;
    if (file)
        fclose(file);
    return (int64_t)pages * sysconf(_SC_PAGESIZE);
}

static bool make_job(struct job *job, nib_device *device)
{
    const int64_t rows = 1 + test_below(64), cols = 16 * (1 + test_below(16));
    job->q = mode_of((int)test_below(MODES));
    job->q.rowwise = test_below(4) != 0;
    job->q.columnwise = !job->q.rowwise || test_below(2);
    job->q.seed = test_random();
    job->from = job->q.rowwise ? NIB_ROWWISE : NIB_COLUMNWISE;
    const enum kind kind = (enum kind)test_below(KINDS); /* one after the other: compilers differ in arguments' order */
    const nib_dtype dtype = dtypes[test_below(3)];
    job->x = random_matrix(kind, dtype, rows, cols);
    job->x.device = device;
    job->values = malloc((size_t)(rows * cols) * sizeof *job->values);
    nib_array out;
    /* RHT wants whole blocks of rows, 16x16 no sweep, and so on: what is rejected is drawn again. */
    const bool good = job->values && !nib_quantize(&job->q, &job->x, NULL, &job->expected) &&
                      !nib_array_init(&out, job->values, NIB_F32, 2, (const int64_t[]){ rows, cols }) &&
                      !nib_dequantize(job->expected, job->from, &out);
    job->x.device = NULL;
    if (!good) {
        nib_tensor_destroy(job->expected);
        free(job->values);
        free(job->x.data);
        *job = (struct job){ 0 };
    }
    return good;
}

static bool same_values(const struct job *job, const nib_tensor *t, float *scratch)
{
    const size_t n = (size_t)elements_in(2, job->x.shape);
    nib_array out;
    return !nib_array_init(&out, scratch, NIB_F32, 2, job->x.shape) && !nib_dequantize(t, job->from, &out) &&
           memcmp(scratch, job->values, n * sizeof *scratch) == 0;
}

/* Whether everything that may be done with a job gives what one thread got. */
static bool try_job(const struct job *job, const struct job *before, nib_device *device, unsigned way, float *scratch)
{
    nib_tensor *t = NULL, *other = NULL;
    nib_array x = job->x, y = before->x;
    x.device = y.device = device;
    bool good = false;
    switch (way % 4) {
    case 0: /* a new tensor */
        good = !nib_quantize(&job->q, &x, NULL, &t) && same_tensor(t, job->expected);
        break;
    case 1: /* its values, and a copy */
        good = !nib_quantize(&job->q, &x, NULL, &t) && same_values(job, t, scratch) && !nib_tensor_clone(t, &other) &&
               same_tensor(other, job->expected);
        break;
    case 2: /* written over another one's data, if that can have the shape: an RHT wants whole blocks */
        good = nib_tensor_create(&before->q, NIB_F32, 2, job->x.shape, device, &t) == NIB_ERR_SHAPE ||
               (t && !nib_quantize_into(&job->q, &x, NULL, NULL, t) && same_tensor(t, job->expected));
        break;
    default: /* rejected: a message of this thread alone, and no tensor */
        x.shape[1] = -1 - x.shape[1];
        good = nib_quantize(&job->q, &x, NULL, &t) != NIB_OK && !t && *nib_last_error();
    }
    nib_tensor_destroy(other);
    nib_tensor_destroy(t);
    return good;
}

static void *work(void *context)
{
    uint64_t state = (uint64_t)(uintptr_t)context * 0x9E3779B97F4A7C15u + test_seed;
    float *const scratch = malloc(64 * 256 * sizeof *scratch);
    nib_device *device = NULL;
    size_t before = 0;
    for (unsigned i = 0; scratch && !atomic_load(&stop); i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const size_t at = (size_t)(state >> 33) % JOBS;
        if (i % DEVICE_LIFE == 0) { /* of one thread, of two, or the default */
            nib_device_release(device);
            device = NULL;
            if (i / DEVICE_LIFE % 3)
                atomic_fetch_add(&wrong, nib_host_create((int)(i / DEVICE_LIFE % 3), &device) != NIB_OK);
        }
        if (!try_job(&jobs[at], &jobs[before], device, (unsigned)(state >> 60), scratch))
            atomic_fetch_add(&wrong, 1);
        atomic_fetch_add(&calls, 1);
        before = at;
    }
    nib_device_release(device);
    free(scratch);
    return NULL;
}

static void wait_until(double time)
{
    while (now() < time)
        nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);
}

TEST(many_threads)
{
    const char *const wanted = getenv("NIB_LOAD_SECONDS");
    const double seconds = wanted ? atof(wanted) : SANITIZED ? 2 : 4, began = now();
    const bool brief = seconds < 300; /* then not all peaks have been seen by a fifth of it, nor by a half */
    const int64_t allowed = (brief ? 24 : 2) << 20;
    pthread_t threads[THREADS];
    nib_device *one = NULL;
    int started = 0;
    CHECK_OK(nib_host_create(1, &one));
    for (int i = 0; i < JOBS;)
        i += make_job(&jobs[i], one);
    nib_device_release(one);
    while (started < THREADS && pthread_create(&threads[started], NULL, work, (void *)(uintptr_t)(started + 1)) == 0)
        started++;
    CHECK(started == THREADS);
    wait_until(began + seconds / (brief ? 2 : 5));
    const int64_t early = resident();
    wait_until(began + seconds);
    const int64_t late = resident();
    atomic_store(&stop, true);
    for (int i = 0; i < started; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_THAT(wrong == 0 && calls > THREADS, "%llu of %llu calls gave other bytes", wrong, calls);
    if (!SANITIZED)
        CHECK_THAT(late - early <= allowed, "resident memory grew from %.1f to %.1f MB", (double)early * 1e-6,
                   (double)late * 1e-6);
    if (wanted)
        printf("%d threads, %.0f s, %llu calls; resident %.2f MB after %s, %.2f MB at the end\n", THREADS, seconds,
               calls, (double)early * 1e-6, brief ? "a half" : "a fifth", (double)late * 1e-6);
    for (int i = 0; i < JOBS; i++) {
        nib_tensor_destroy(jobs[i].expected);
        free(jobs[i].values);
        free(jobs[i].x.data);
    }
}

TEST_MAIN

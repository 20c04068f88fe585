/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gptq.c - GPTQ of one weight: gptq [COLUMNS [ROWS [THREADS]]], 4096 columns and rows unless said otherwise.
 *
 * Prints the time of the factorization of its Hessian and of its columns, operations per second beside what fused
 * multiply-adds come to in the same run on as many threads (which these steps, whose products are rounded, cannot use: half
 * of it is the limit where multiplications and additions share their units), and the peak of memory.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "measure.h"

static double peak_memory(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss * 1024 / 1e9;
}

/* ---- Fused multiply-adds ---- */

enum { ROUNDS = 1 << 22, CHAINS = 12 };

/* Chains enough that none waits for itself. Gives something that depends on all of them. */
#if defined(__x86_64__)
#define DEFINE_PEAK(name, target_name, vector, set1, fma)                                     \
    __attribute__((target(target_name))) static double name(void)                             \
    {                                                                                         \
        vector x[CHAINS], y = set1(0.999f), z = set1(0.001f);                                 \
        double sum = 0, part[8];                                                              \
        for (int i = 0; i < CHAINS; i++)                                                      \
            x[i] = set1((float)i);                                                            \
        for (int n = 0; n < ROUNDS; n++)                                                      \
            _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) x[i] = fma(x[i], y, z); \
        for (int i = 0; i < CHAINS; i++) {                                                    \
            memcpy(part, &x[i], sizeof(vector) < sizeof part ? sizeof(vector) : sizeof part); \
            sum += part[0];                                                                   \
        }                                                                                     \
        return sum;                                                                           \
    }
DEFINE_PEAK(f64_avx512, "avx512f", __m512d, _mm512_set1_pd, _mm512_fmadd_pd)
DEFINE_PEAK(f32_avx512, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps)
DEFINE_PEAK(f64_avx2, "avx2,fma", __m256d, _mm256_set1_pd, _mm256_fmadd_pd)
DEFINE_PEAK(f32_avx2, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps)
#endif

enum { MOST_THREADS = 1024 };

struct thread {
    pthread_t id;
    double (*work)(void);
    double sum; /* must not be thrown away */
};

static void *run_thread(void *context)
{
    struct thread *thread = context;
    thread->sum = thread->work();
    return NULL;
}

/* Operations per second of all threads together, in billions; 0: not known for this instruction set. */
static double peak(int threads, int bits)
{
    static struct thread all[MOST_THREADS];
    double (*work)(void) = NULL;
    double lanes = 0, best = 0;
#if defined(__x86_64__)
    if (strcmp(nib_isa(), "avx2") == 0) {
        work = bits == 64 ? f64_avx2 : f32_avx2;
        lanes = 256.0 / bits;
    } else if (strcmp(nib_isa(), "scalar") != 0) {
        work = bits == 64 ? f64_avx512 : f32_avx512;
        lanes = 512.0 / bits;
    }
#endif
    for (int run = 0; run < 3 && work; run++) {
        const double begin = now();
        int started = 0;
        for (; started < threads; started++) {
            all[started].work = work;
            if (pthread_create(&all[started].id, NULL, run_thread, &all[started]))
                break;
        }
        for (int i = 0; i < started; i++)
            pthread_join(all[i].id, NULL);
        const double rate = 2 * lanes * CHAINS * ROUNDS * started / (now() - begin) / 1e9;
        best = rate > best ? rate : best;
    }
    return best;
}

/* ---- The weight ---- */

static uint64_t state = 88172645463325252u;

/* About normal, of variance 1. */
static float number(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        sum += (float)(state >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

/* Of tokens in which a channel has half of what its neighbor has, all have a tenth in common, and some are large. Without
 * the tenth, as in no text, U would fall below what is normal in FP32 and FP64, and Intel's processors with it. */
static float *hessian_of(int64_t n)
{
    float *h = malloc((size_t)n * (size_t)(n + 1) / 2 * sizeof *h), *to = h;
    for (int64_t i = 0; i < n && h; i++) {
        float covariance = 1;
        for (int64_t j = i; j < n; j++, covariance *= 0.5f)
            *to++ = (covariance + 0.1f) * (i % 61 ? 1 : 8) * (j % 61 ? 1 : 8);
    }
    return h;
}

static void report(const char *what, double seconds, double operations, double peak_rate)
{
    const double rate = operations / seconds / 1e9;
    printf("%-14s %9.3f s  %8.1f GFLOP/s", what, seconds, rate);
    if (peak_rate > 0)
        printf("  %.2f of %.1f", rate / peak_rate, peak_rate);
    printf("\n");
}

int main(int argc, char **argv)
{
    const int64_t n = argc > 1 ? atoll(argv[1]) : 4096, rows = argc > 2 ? atoll(argv[2]) : 4096, shape[2] = { rows, n };
    int threads = argc > 3 ? atoi(argv[3]) : 0;
    nib_device *host = NULL;
    nib_tensor *t = NULL;
    nib_quantizer q;
    nib_array x;
    if (n < 1 || rows < 1 || threads < 0 || threads > MOST_THREADS || n > 1 << 20 || rows > 1 << 30) {
        fprintf(stderr, "gptq [COLUMNS [ROWS [THREADS]]]\n");
        return 2;
    }
    threads = threads ? threads : (int)sysconf(_SC_NPROCESSORS_ONLN);
    const double peak64 = peak(threads, 64), peak32 = peak(threads, 32);
    printf("%lld columns, %lld rows, %d threads, %s\n", (long long)n, (long long)rows, threads, nib_isa());
    require(nib_host_create(threads, &host));
    float *h = hessian_of(n), *u = malloc((size_t)n * (size_t)n * sizeof *u);
    float *w = malloc((size_t)rows * (size_t)n * sizeof *w);
    int32_t *order = malloc((size_t)n * sizeof *order);
    if (!h || !u || !w || !order) {
        fprintf(stderr, "gptq: no memory\n");
        return 1;
    }
    memset(u, 0, (size_t)n * (size_t)n * sizeof *u); /* pages that are there already are not part of the time */
    for (int64_t i = 0; i < rows * n; i++)
        w[i] = number();
    const double size = (double)n;
    double begin = now();
    require(nib_gptq_factorize(h, n, 0.1, host, order, u, NULL));
    report("factorization", now() - begin, size * size * size * 2 / 3, peak64);
    free(h);
    nib_quantizer_init(&q);
    q.columnwise = 0;
    q.scale_rule = NIB_SCALE_SWEEP;
    require(nib_array_init(&x, w, NIB_F32, 2, shape));
    x.device = host;
    begin = now();
    require(nib_quantize(&q, &x, NULL, &t));
    printf("%-14s %9.3f s\n", "sweep", now() - begin);
    begin = now();
    require(nib_gptq(&x, order, u, n, t));
    report("columns", now() - begin, (double)rows * size * size, peak32);
    printf("peak of memory %9.2f GB, of which weight, Hessian and U are %.2f\n", peak_memory(),
           (double)(rows * n + n * n + n * (n + 1) / 2) * 4 / 1e9);
    nib_tensor_destroy(t);
    nib_device_release(host);
    free(u), free(w), free(order);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_products.c - products on a GPU within their bound (docs/numerics.md 14) of the same sums in double: random
 * operands of all kinds, outputs of all layouts; then what is not finite, graphs, failures.
 *
 * Built for a GPU and over cuda/shim, where the host runs the kernels, and a cuBLASLt of its own the rest.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>

#include "test_gpu.h"

/* ---- Operands ---- */

/* A side of a product on both devices, and what it stands for, line by line. */
struct side {
    nib_tensor *host, *device;
    nib_array array;
    struct memory memory;
    nib_operand operand;
    int64_t lines, length;
    double *values;
};

static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
static char where[400];

static float random_value(void) { return test_below(40) ? test_normal() : ldexpf(test_normal(), (int)test_below(6)); }

static void random_values(void *out, nib_dtype dtype, int64_t n)
{
    float *x = malloc((size_t)(n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = random_value();
    CHECK_OK(nib_encode(dtype, x, (size_t)n, out));
    free(x);
}

static bool tidy; /* rows side by side where memory begins, and scales of 1x16 */

/* A matrix whose rows or columns are side by side, with gaps or without. */
static nib_array random_matrix(nib_dtype dtype, int64_t rows, int64_t cols, struct memory *m)
{
    const int64_t bytes = nib_dtype_bits(dtype) / 8, gap = tidy || test_below(3) ? 0
                                                           : test_below(2)       ? 16
                                                                                 : 1 + test_below(7);
    const bool transposed = !tidy && test_below(4) == 0, spread = !tidy && test_below(8) == 0;
    nib_array a = { .dtype = dtype, .rank = 2, .shape = { rows, cols } };
    a.strides[transposed ? 0 : 1] = spread ? 2 : 1;
    a.strides[transposed ? 1 : 0] = (transposed ? rows : cols) * (spread ? 2 : 1) + gap;
    const int64_t n = rows * a.strides[0] + cols * a.strides[1] + 1;
    void *const data = malloc((size_t)(n * bytes));
    random_values(data, dtype, n);
    *m = memory_of(data, (size_t)(n * bytes), tidy || test_below(4) ? 0 : (size_t)(bytes * test_below(8)));
    a.data = m->data;
    a.bytes = m->bytes;
    a.device = gpu;
    free(data);
    return a;
}

static double value_at(const void *data, nib_dtype dtype, int64_t i)
{
    float x;
    CHECK_OK(nib_decode(dtype, (const char *)data + i * (nib_dtype_bits(dtype) / 8), 1, &x));
    return x;
}

static void *copy_of(const struct memory *m)
{
    void *const data = malloc(m->bytes + 1);
    download(data, m->data, m->bytes);
    return data;
}

static struct side plain_side(nib_dtype dtype, int64_t lines, int64_t length)
{
    struct side s = { .lines = lines, .length = length };
    s.array = random_matrix(dtype, lines, length, &s.memory);
    s.values = malloc((size_t)(lines * length + 1) * sizeof *s.values);
    void *const data = copy_of(&s.memory);
    for (int64_t i = 0; i < lines * length; i++)
        s.values[i] = value_at(data, dtype, i / length * s.array.strides[0] + i % length * s.array.strides[1]);
    free(data);
    return s;
}

static struct side tensor_of_amax(const nib_quantizer *q, int64_t lines, int64_t length, const float *amax)
{
    const bool columns = q->columnwise;
    const int64_t rows = columns ? length : lines, cols = columns ? lines : length;
    struct side s = { .lines = lines, .length = length };
    nib_array x;
    float *values = malloc((size_t)(rows * cols + 1) * sizeof *values);
    random_values(values, NIB_F32, rows * cols);
    CHECK_OK(nib_array_init(&x, values, NIB_F32, 2, (const int64_t[]){ rows, cols }));
    CHECK_OK(nib_quantize(q, &x, &(nib_overrides){ .bytes = sizeof(nib_overrides), .amax = { amax } }, &s.host));
    CHECK_OK(nib_tensor_to(s.host, gpu, &s.device));
    CHECK_OK(nib_dequantize(s.host, columns ? NIB_COLUMNWISE : NIB_ROWWISE, &x));
    s.values = malloc((size_t)(lines * length + 1) * sizeof *s.values);
    for (int64_t i = 0; i < lines * length; i++)
        s.values[i] = columns ? values[i % length * lines + i / length] : values[i];
    s.operand = (nib_operand){ .tensor = s.device, .usage = columns ? NIB_COLUMNWISE : NIB_ROWWISE };
    free(values);
    return s;
}

static struct side tensor_side(const nib_quantizer *q, int64_t lines, int64_t length)
{
    return tensor_of_amax(q, lines, length, NULL);
}

static void close_side(struct side *s)
{
    nib_tensor_destroy(s->host);
    nib_tensor_destroy(s->device);
    if (s->memory.buffer)
        release(&s->memory);
    free(s->values);
}

static nib_quantizer random_quantizer(bool rht)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.columnwise = test_below(2) == 0;
    q.rowwise = !q.columnwise;
    q.swizzled = test_below(4) == 0;
    q.row_scaled = !rht && test_below(6) == 0;
    q.block_dims[0] = !tidy && !rht && !q.row_scaled && test_below(4) == 0 ? 16 : 1;
    q.rht = rht && q.columnwise;
    q.rht_rowwise = rht && q.rowwise;
    CHECK_OK(nib_quantizer_check(&q, NULL));
    return q;
}

/* ---- Random products ---- */

struct call {
    struct side a, b;
    nib_gemm_options options;
    nib_array y, bias;
    struct memory y_memory, bias_memory;
};

struct size {
    int64_t m, n, k;
};

static struct size random_size(void)
{
    static const int64_t rows[] = { 1, 2, 3, 5, 8, 9, 13, 16, 17, 40, 64, 65, 70, 100 };
    return (struct size){ rows[test_below(14)], test_below(4) ? 1 + test_below(70) : 128,
                          test_below(2) ? 32 * (1 + test_below(20)) : 1 + test_below(300) };
}

static void open_call(struct call *c, struct size size)
{
    const bool quantized = test_below(2), rht = quantized && test_below(4) == 0, swapped = !tidy && test_below(4) == 0;
    const int64_t m = size.m, n = size.n, k = rht ? (size.k + 15) / 16 * 16 : size.k;
    *c = (struct call){ 0 };
    const nib_dtype dtype = dtypes[test_below(3)], y_dtype = dtypes[test_below(3)];
    const nib_quantizer qa = random_quantizer(rht), qb = random_quantizer(rht);
    c->a = quantized ? tensor_side(&qa, m, k) : plain_side(dtype, m, k);
    c->b = tensor_side(&qb, n, k);
    if (!quantized)
        c->a.operand.array = &c->a.array;
    if (swapped) {
        const struct side a = c->a;
        c->a = c->b;
        c->b = a;
        if (!quantized)
            c->b.operand.array = &c->b.array;
    }
    c->y = random_matrix(y_dtype, c->a.lines, c->b.lines, &c->y_memory);
    nib_gemm_options_init(&c->options);
    c->options.alpha = test_below(2) ? 1 : -0.75f;
    c->options.beta = test_below(2) ? 0 : 0.5f;
    if (test_below(2)) {
        c->bias = random_matrix(test_below(2) ? y_dtype : dtypes[test_below(3)], 1, c->b.lines, &c->bias_memory);
        c->bias.rank = 1;
        c->bias.shape[0] = c->b.lines;
        c->bias.strides[0] = c->bias.strides[1];
        c->options.bias = &c->bias;
    }
    snprintf(where, sizeof where,
             "%lldx%lldx%lld %s by %s to %s strides %lld,%lld bias %d beta %g usages %d%d rht %d row-scaled %d%d "
             "swizzled %d%d block %d%d",
             (long long)c->a.lines, (long long)c->b.lines, (long long)k,
             c->a.device ? "nvfp4" : nib_dtype_name(c->a.array.dtype),
             c->b.device ? "nvfp4" : nib_dtype_name(c->b.array.dtype), nib_dtype_name(y_dtype),
             (long long)c->y.strides[0], (long long)c->y.strides[1], !!c->options.bias, (double)c->options.beta,
             qa.columnwise, qb.columnwise, rht, qa.row_scaled, qb.row_scaled, qa.swizzled, qb.swizzled,
             qa.block_dims[0], qb.block_dims[0]);
}

static void close_call(struct call *c)
{
    close_side(&c->a);
    close_side(&c->b);
    release(&c->y_memory);
    if (c->options.bias)
        release(&c->bias_memory);
}

/* 2^-22 (K + 64) |alpha| |a| |b|, which holds what dequantizing rounds; and what the last roundings do: where there is
 * something to add to it, cuBLASLt may have rounded the product. */
static double bound_of(const struct call *c, const double *a, const double *b, double rest, double y, nib_dtype dtype)
{
    const bool twice = dtype != NIB_F32 && (c->options.bias || c->options.beta != 0);
    double aa = 0, bb = 0;
    for (int64_t k = 0; k < c->a.length; k++) {
        aa += a[k] * a[k];
        bb += b[k] * b[k];
    }
    const double last = dtype == NIB_F32 ? 0x1p-24 : dtype == NIB_F16 ? 0x1p-11 : 0x1p-8;
    return 0x1p-22 * (double)(c->a.length + 64) * fabs((double)c->options.alpha) * sqrt(aa * bb) + 0x1p-22 * rest +
           last * (fabs(y) + (twice ? fabs(y) + rest : 0)) + (dtype == NIB_F16 ? 0x1p-23 : 0);
}

/* Against y as it was; whatever lies between its elements stays. */
static void compare(const struct call *c, const void *before, const void *bias)
{
    void *const after = copy_of(&c->y_memory);
    const nib_dtype dtype = c->y.dtype;
    const size_t bytes = (size_t)nib_dtype_bits(dtype) / 8;
    char *const untouched = malloc(c->y_memory.bytes);
    memcpy(untouched, after, c->y_memory.bytes);
    for (int64_t i = 0; i < c->a.lines; i++)
        for (int64_t j = 0; j < c->b.lines; j++) {
            const int64_t at = i * c->y.strides[0] + j * c->y.strides[1];
            const double *const a = c->a.values + i * c->a.length, *const b = c->b.values + j * c->b.length;
            double sum = 0;
            for (int64_t k = 0; k < c->a.length; k++)
                sum += a[k] * b[k];
            const double one = c->options.bias ? value_at(bias, c->bias.dtype, j * c->bias.strides[0]) : 0,
                         other = (double)c->options.beta * value_at(before, dtype, at);
            const double wanted = (double)c->options.alpha * sum + one + other, got = value_at(after, dtype, at),
                         bound = bound_of(c, a, b, fabs(one) + fabs(other), wanted, dtype);
            const bool beyond = dtype == NIB_F16 && fabs(wanted) + bound > 65504;
            CHECK_THAT(fabs(got - wanted) <= bound || beyond, "%s: (%lld, %lld) is %.9g, not %.9g within %.3g", where,
                       (long long)i, (long long)j, got, wanted, bound);
            memcpy(untouched + (size_t)at * bytes, (const char *)before + (size_t)at * bytes, bytes);
        }
    CHECK_THAT(!memcmp(untouched, before, c->y_memory.bytes), "%s: something beside y was written", where);
    free(untouched);
    free(after);
}

static void run_call(nib_device *device, struct size size)
{
    struct call c;
    open_call(&c, size);
    void *const before = copy_of(&c.y_memory), *const bias = c.options.bias ? copy_of(&c.bias_memory) : NULL;
    nib_array y = c.y;
    y.device = device;
    CHECK_THAT(nib_gemm(&c.a.operand, &c.b.operand, &c.options, &y) == NIB_OK, "%s: %s", where, nib_last_error());
    compare(&c, before, bias);
    free(before);
    free(bias);
    close_call(&c);
}

#if NIB_CUDA_SHIM
extern long shim_cublaslt_products, shim_cublaslt_codes;
extern int shim_cublaslt_rejects_codes, shim_cublaslt_calls, shim_cublaslt_fails_at, shim_cublaslt_objects;

/* Few rows of codes, on the GPU that has FP4 tensor cores. */
static bool multiplies_few_rows(void)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    CHECK_OK(nib_cuda_create_stream(1, &gpu));
    struct side a = tensor_side(&q, 16, 64), b = tensor_side(&q, 32, 64);
    struct memory m;
    const nib_array y = random_matrix(NIB_F32, 16, 32, &m);
    return nib_gemm(&a.operand, &b.operand, NULL, &y) == NIB_OK && !strstr(nib_last_error(), "cuBLASLt");
}

/* Before anything has loaded the library. */
TEST(a_library_that_is_not_there_is_named)
{
    const pid_t child = fork();
    if (child == 0) {
        setenv("NIB_CUBLASLT_LIBRARY", "/nowhere/libcublasLt.so", 1);
        if (!multiplies_few_rows())
            _exit(2);
        CHECK_OK(nib_cuda_create_stream(0, &gpu));
        nib_quantizer q;
        nib_quantizer_init(&q);
        struct side a = plain_side(NIB_BF16, 70, 32), b = tensor_side(&q, 16, 32);
        struct memory m;
        const nib_array y = random_matrix(NIB_F32, 70, 16, &m);
        a.operand.array = &a.array;
        const nib_status status = nib_gemm(&a.operand, &b.operand, NULL, &y);
        _exit(status == NIB_ERR_UNSUPPORTED && strstr(nib_last_error(), "cuda:0 needs cuBLASLt") &&
                      strstr(nib_last_error(), "/nowhere/libcublasLt.so")
                  ? 0
                  : 1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    setenv("NIB_CUBLASLT_LIBRARY", "", 1); /* this program's */
}
#endif

TEST(random_products_are_within_their_bound)
{
    NEEDS_GPU;
    const char *const wanted = getenv("NIB_CUDA_PRODUCTS");
    const long n = wanted ? strtol(wanted, NULL, 10) : NIB_CUDA_SHIM ? (SANITIZED ? 30 : 120) : 3000;
    for (long i = 0; i < n && !test_failures; i++)
        run_call(gpu, random_size());
}

/* Few lines and as many as leave no processor idle, not in whole tiles and in whole ones: three strips and more of each
 * warp, the last one not whole. */
TEST(every_kernel_of_few_rows_is_within_its_bound)
{
    NEEDS_GPU;
    static const int64_t rows[] = { 1, 5, 6, 13, 29 };
    const int64_t many = NIB_CUDA_SHIM ? 133 : 12805;
    tidy = true;
    for (int i = 0; i < 5 && !test_failures; i++) {
        for (int whole = 0; whole < 2 && !test_failures; whole++) {
            run_call(gpu, (struct size){ rows[i], 40 + 8 * whole, 6240 });
            run_call(gpu, (struct size){ rows[i], many + 27 * whole, 1632 });
        }
    }
    tidy = false;
}

#if NIB_CUDA_SHIM
/* The second GPU of the shim has FP4 tensor cores. */
TEST(fp4_tensor_cores_take_codes_as_they_are)
{
    nib_device *const first = gpu;
    nib_quantizer q;
    nib_quantizer_init(&q);
    for (int i = 0; i < 4; i++) {
        const int second = i / 2, rows = i % 2 ? 16 : 80; /* few go to the library on the second GPU alone */
        struct memory m;
        shim_cublaslt_products = shim_cublaslt_codes = 0;
        if (i == 2)
            CHECK_OK(nib_cuda_create_stream(1, &gpu));
        const nib_array y = random_matrix(NIB_F32, rows, 96, &m);
        struct side a = tensor_side(&q, rows, 64), b = tensor_side(&q, 96, 64);
        CHECK_OK(nib_gemm(&a.operand, &b.operand, NULL, &y));
        CHECK_THAT(shim_cublaslt_products == (second || rows == 80) && shim_cublaslt_codes == second,
                   "GPU %d, %d rows: %ld products, %ld of codes", second, rows, shim_cublaslt_products,
                   shim_cublaslt_codes);
        close_side(&a);
        close_side(&b);
        release(&m);
    }
    shim_cublaslt_products = shim_cublaslt_codes = 0;
    const int few = SANITIZED ? 3 : 10; /* of both kinds: which come is drawn */
    for (int i = 0;
         i < 400 && !test_failures && (shim_cublaslt_codes < few || shim_cublaslt_products - shim_cublaslt_codes < few);
         i++)
        run_call(gpu, random_size());
    CHECK(shim_cublaslt_codes >= few && shim_cublaslt_products - shim_cublaslt_codes >= few);
    shim_cublaslt_rejects_codes = 1; /* then by what they stand for */
    shim_cublaslt_codes = 0;
    for (int i = 0; i < 20 && !test_failures; i++)
        run_call(gpu, random_size());
    CHECK(shim_cublaslt_codes == 0);
    shim_cublaslt_rejects_codes = 0;
    nib_device_release(gpu);
    gpu = first;
}
#endif

#if NIB_CUDA_SHIM
/* Another product on the same device begins before a launch of the first, with which it shares the device's memory. It
 * may wait for the first, which therefore does not wait for ever. */
struct product {
    struct side a, b;
    nib_array y;
    struct memory memory;
    nib_status status;
};
static struct product at_once[2];
static pthread_t second_thread;
static atomic_int second_is_done;

static void *multiply(void *context)
{
    struct product *const c = context;
    c->status = nib_gemm(&c->a.operand, &c->b.operand, NULL, &c->y);
    atomic_store(&second_is_done, c == &at_once[1]);
    return NULL;
}

static void begin_second_call(void)
{
    CHECK(pthread_create(&second_thread, NULL, multiply, &at_once[1]) == 0);
    for (int i = 0; i < 100 && !atomic_load(&second_is_done); i++)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
}

TEST(two_threads_multiply_on_one_stream)
{
    void *alone[2];
    nib_quantizer q;
    nib_quantizer_init(&q);
    tidy = true;
    for (int i = 0; i < 2; i++) {
        at_once[i].a = tensor_side(&q, 80, 64);
        at_once[i].b = tensor_side(&q, 96, 64);
        at_once[i].y = random_matrix(NIB_F32, 80, 96, &at_once[i].memory);
        multiply(&at_once[i]);
        CHECK_OK(at_once[i].status);
        alone[i] = copy_of(&at_once[i].memory);
    }
    tidy = false;
    for (long after = 1; after < 4; after++) {
        atomic_store(&second_is_done, 0);
        shim_meanwhile = begin_second_call;
        shim_meanwhile_after = after;
        multiply(&at_once[0]);
        CHECK(!shim_meanwhile);
        pthread_join(second_thread, NULL);
        for (int i = 0; i < 2; i++) {
            void *const now = copy_of(&at_once[i].memory);
            CHECK_OK(at_once[i].status);
            CHECK_THAT(memcmp(now, alone[i], at_once[i].memory.bytes) == 0, "after %ld: product %d is another", after,
                       i);
            free(now);
        }
    }
    for (int i = 0; i < 2; i++) {
        free(alone[i]);
        close_side(&at_once[i].a);
        close_side(&at_once[i].b);
        release(&at_once[i].memory);
    }
}

/* Each call of the library fails once: codes with a bias, and values, on the GPU that takes both. */
TEST(a_library_that_fails_is_heard_of)
{
    nib_device *const first = gpu;
    CHECK_OK(nib_cuda_create_stream(1, &gpu));
    nib_quantizer q;
    nib_quantizer_init(&q);
    struct side a = plain_side(NIB_BF16, 80, 64), b = tensor_side(&q, 80, 64), c = tensor_side(&q, 96, 64),
                bias = plain_side(NIB_F32, 1, 96);
    a.operand.array = &a.array;
    bias.array.rank = 1;
    bias.array.shape[0] = 96;
    bias.array.strides[0] = bias.array.strides[1];
    nib_gemm_options options;
    nib_gemm_options_init(&options);
    options.bias = &bias.array;
    struct memory m;
    const nib_array y = random_matrix(NIB_F32, 80, 96, &m);
    CHECK_OK(nib_gemm(&b.operand, &c.operand, &options, &y)); /* what is loaded once is loaded */
    for (int codes = 0; codes < 2; codes++) {
        nib_status status = NIB_ERR_DEVICE;
        int n = -1;
        shim_cublaslt_codes = shim_cublaslt_products = 0;
        while (status && !test_failures) {
            shim_cublaslt_calls = 0;
            shim_cublaslt_fails_at = ++n;
            status = nib_gemm(codes ? &b.operand : &a.operand, &c.operand, &options, &y);
            CHECK_THAT(status ? strstr(nib_last_error(), "cuBLASLt") != NULL : n == shim_cublaslt_calls,
                       "call %d of %d: %s: %s", n, shim_cublaslt_calls, nib_status_name(status), nib_last_error());
            CHECK_THAT(shim_cublaslt_objects == 0, "call %d: %d objects stay", n, shim_cublaslt_objects);
        }
        CHECK_THAT(n > 12 && shim_cublaslt_products == 1 && shim_cublaslt_codes == codes, "%d calls", n);
        shim_cublaslt_fails_at = -1;
    }
    release(&m);
    close_side(&a), close_side(&b), close_side(&c), close_side(&bias);
    nib_device_release(gpu);
    gpu = first;
}
#endif

/* ---- Where codes are ---- */

/* A caller's may begin where no sixteen bytes can be read at once. */
TEST(codes_begin_anywhere)
{
    NEEDS_GPU;
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.columnwise = 0;
    tidy = true; /* but for codes */
    for (size_t skew = 1; skew <= 8; skew *= 2) {
        struct call c = { .a = plain_side(NIB_BF16, 3, 64), .b = tensor_side(&q, 16, 64) };
        nib_buffer *parts[NIB_PART_COUNT], *codes = NULL;
        for (int part = 0; part < NIB_PART_COUNT; part++)
            parts[part] = nib_tensor_buffer(c.b.device, (nib_part)part);
        const nib_buffer *const from = nib_tensor_buffer(c.b.host, NIB_ROW_DATA);
        c.b.memory = memory_of(nib_buffer_data(from), nib_buffer_bytes(from), skew);
        CHECK_OK(nib_buffer_borrow(c.b.memory.data, c.b.memory.bytes, gpu, NULL, NULL, &codes));
        parts[NIB_ROW_DATA] = codes;
        nib_tensor *moved = NULL;
        CHECK_OK(nib_tensor_from_buffers(&q, NIB_F32, 2, (const int64_t[]){ 16, 64 }, parts, NIB_PART_COUNT, &moved));
        nib_buffer_release(codes);
        c.y = random_matrix(NIB_F32, 3, 16, &c.y_memory);
        nib_gemm_options_init(&c.options);
        snprintf(where, sizeof where, "codes %zu bytes behind an aligned address", skew);
        void *const before = copy_of(&c.y_memory);
        CHECK_OK(nib_gemm(&(nib_operand){ .array = &c.a.array }, &(nib_operand){ .tensor = moved }, NULL, &c.y));
        compare(&c, before, NULL);
        free(before);
        nib_tensor_destroy(moved);
        close_call(&c);
    }
    tidy = false;
}

/* ---- What is not finite ---- */

static float result_at(const struct memory *m, int64_t i)
{
    float y;
    download(&y, m->data + i * 4, 4);
    return y;
}

TEST(what_is_not_finite_stays_in_its_row)
{
    NEEDS_GPU;
    static const float odd[] = { NAN, INFINITY, -INFINITY };
    nib_quantizer q;
    nib_quantizer_init(&q);
    for (int dtype = 0; dtype < 3; dtype++)
        for (int64_t rows = 4; rows <= 68; rows += 64)
            for (int i = 0; i < 3; i++) {
                struct side a = plain_side(dtypes[dtype], rows, 64), b = tensor_side(&q, 16, 64);
                struct memory m;
                nib_array y = random_matrix(NIB_F32, rows, 16, &m);
                y.strides[0] = 16, y.strides[1] = 1;
                uint8_t code[4];
                CHECK_OK(nib_encode(dtypes[dtype], &odd[i], 1, code));
                const int64_t bytes = nib_dtype_bits(dtypes[dtype]) / 8;
                upload(a.memory.data + (2 * a.array.strides[0] + 5 * a.array.strides[1]) * bytes, code, (size_t)bytes);
                a.operand.array = &a.array;
                CHECK_OK(nib_gemm(&a.operand, &b.operand, NULL, &y));
                for (int64_t k = 0; k < rows * 16; k++)
                    CHECK_THAT(k / 16 == 2 || isfinite(result_at(&m, k)), "element %lld", (long long)k);
                for (int64_t k = 0; k < 16; k++) /* a weight of 0 makes a NaN of an infinity */
                    CHECK_THAT(!isfinite(result_at(&m, 2 * 16 + k)), "column %lld", (long long)k);
                close_side(&a), close_side(&b), release(&m);
            }
}

/* The largest values of F32 are not beyond what they are multiplied as, where codes and scales are small; and one value
 * alone has all its 24 bits, which a sum's bound would not show. */
TEST(huge_values_keep_their_bits)
{
    NEEDS_GPU;
    nib_quantizer q;
    nib_quantizer_init(&q);
    const float amax = 1e6f;
    struct side a = plain_side(NIB_F32, 1, 64), b = tensor_of_amax(&q, 16, 64, &amax);
    struct memory m;
    nib_array y = random_matrix(NIB_F32, 1, 16, &m);
    y.strides[0] = 16, y.strides[1] = 1;
    float x[64] = { 3.4000001e38f };
    upload(a.memory.data, x, sizeof x);
    a.array.strides[0] = 64, a.array.strides[1] = 1;
    a.operand.array = &a.array;
    nib_gemm_options options;
    nib_gemm_options_init(&options);
    options.alpha = 0x1p-20f;
    CHECK_OK(nib_gemm(&a.operand, &b.operand, &options, &y));
    for (int64_t j = 0; j < 16; j++)
        CHECK(fabs((double)result_at(&m, j) - 0x1p-20 * (double)x[0] * b.values[j * 64]) <=
              0x1p-20 * 3.4e38 * fabs(b.values[j * 64]) * 0x1p-20);
    close_side(&a), close_side(&b), release(&m);
}

/* ---- Groups, graphs, failures ---- */

TEST(groups_and_products_of_nothing)
{
    NEEDS_GPU;
    nib_quantizer q;
    nib_quantizer_init(&q);
    struct side a[2] = { plain_side(NIB_BF16, 3, 48), plain_side(NIB_BF16, 70, 48) },
                b[2] = { tensor_side(&q, 20, 48), tensor_side(&q, 33, 48) };
    struct memory m[2];
    nib_array y[2];
    nib_operand as[2], bs[2];
    for (int i = 0; i < 2; i++) {
        y[i] = random_matrix(NIB_F32, a[i].lines, b[i].lines, &m[i]);
        as[i] = (nib_operand){ .array = &a[i].array };
        bs[i] = b[i].operand;
    }
    CHECK_OK(nib_gemm_grouped(as, bs, NULL, y, 2));
    struct call c = { .a = a[1], .b = b[1], .y = y[1], .y_memory = m[1] };
    nib_gemm_options_init(&c.options);
    void *const before = copy_of(&m[1]);
    compare(&c, before, NULL); /* beta is 0: what was there has no part in it */
    free(before);
    nib_array nothing = y[0];
    nothing.shape[0] = 0;
    a[0].array.shape[0] = 0;
    CHECK_OK(nib_gemm(&as[0], &bs[0], NULL, &nothing));
    for (int i = 0; i < 2; i++)
        close_side(&a[i]), close_side(&b[i]), release(&m[i]);
}

struct captured {
    nib_operand a, b;
    nib_array y;
};

static nib_status run_captured(void *context)
{
    const struct captured *const c = context;
    return nib_gemm(&c->a, &c->b, NULL, &c->y);
}

TEST(a_graph_reads_what_is_there_at_its_replay)
{
    NEEDS_GPU;
    nib_quantizer q;
    nib_quantizer_init(&q);
    for (int64_t rows = 8; rows <= 72; rows += 64) {
        struct side a = plain_side(NIB_BF16, rows, 64), b = tensor_side(&q, 48, 64);
        struct call c = { .a = a, .b = b };
        double seconds;
        c.y = random_matrix(NIB_F32, rows, 48, &c.y_memory);
        nib_gemm_options_init(&c.options);
        struct captured captured = { { .array = &a.array }, b.operand, c.y };
        CHECK_OK(nib_cuda_measure(gpu, run_captured, &captured, 3, &seconds));
        void *const before = copy_of(&c.y_memory);
        compare(&c, before, NULL);
        free(before);
        close_call(&c);
    }
}

/* ---- Memory ---- */

struct lent {
    void *memory;
    size_t bytes;
    int taken, returned, most; /* most: so many are lent */
};

static void *lend(void *context, size_t bytes, void *stream)
{
    struct lent *const l = context;
    void *of_device = NULL;
    CHECK_OK(nib_cuda_stream(gpu, &of_device));
    CHECK(stream == of_device && l->taken == l->returned);
    if (bytes > l->bytes || l->taken >= l->most)
        return NULL;
    l->taken++;
    return l->memory;
}

static void take_back(void *context, void *memory, void *stream)
{
    struct lent *const l = context;
    (void)stream;
    CHECK(memory == l->memory);
    l->returned++;
}

TEST(memory_comes_from_an_allocator)
{
    NEEDS_GPU;
    struct memory all = memory_of(NULL, (size_t)64 << 20, 0);
    struct lent lent = { all.data, all.bytes, 0, 0, 1000 };
    nib_cuda_allocator allocator = { sizeof allocator, &lent, lend, NULL };
    nib_quantizer q;
    nib_quantizer_init(&q);
    CHECK_FAILS(nib_cuda_set_allocator(gpu, &allocator), NIB_ERR_ARG, "one of its functions is NULL");
    allocator.release = take_back;
    CHECK_OK(nib_cuda_set_allocator(gpu, &allocator));
    for (int i = 0; i < 30 && !test_failures; i++)
        run_call(gpu, random_size());
    CHECK(lent.taken > 5 && lent.taken == lent.returned);
    struct side a = tensor_side(&q, 20, 64), b = tensor_side(&q, 16, 64);
    struct memory m;
    const nib_array y = random_matrix(NIB_F32, 20, 16, &m);
    lent.most = lent.taken;
    CHECK_FAILS(nib_gemm(&a.operand, &b.operand, NULL, &y), NIB_ERR_MEMORY, "a product that needs");
    CHECK_OK(nib_cuda_set_allocator(gpu, NULL));
    CHECK_OK(nib_gemm(&a.operand, &b.operand, NULL, &y));
    CHECK(lent.taken == lent.most && lent.taken == lent.returned);
    CHECK_OK(nib_cuda_synchronize(gpu));
    close_side(&a), close_side(&b), release(&m), release(&all);
}

TEST(what_products_do_not_take)
{
    NEEDS_GPU;
    nib_quantizer q, other;
    nib_quantizer_init(&q);
    CHECK_OK(nib_quantizer_init_format(&other, NIB_MXFP8));
    struct side a = plain_side(NIB_BF16, 70, 64), b = tensor_side(&q, 16, 64);
    struct memory m;
    const nib_array y = random_matrix(NIB_F32, 70, 16, &m);
    void *const before = copy_of(&m);
    a.operand.array = &a.array;
    struct side c = tensor_side(&other, 16, 64);
    CHECK_FAILS(nib_gemm(&a.operand, &c.operand, NULL, &y), NIB_ERR_UNSUPPORTED, "multiplies nvfp4, not mxfp8");
    CHECK_FAILS(nib_gemm(&a.operand, &(nib_operand){ .tensor = b.host }, NULL, &y), NIB_ERR_DEVICE, "cuda:0");
#if NIB_CUDA_SHIM
    nib_device *fresh = NULL;
    CHECK_OK(nib_cuda_create_stream(0, &fresh));
    nib_array there = y;
    there.device = fresh;
    shim_fail_allocation = 1;
    CHECK_FAILS(nib_gemm(&a.operand, &b.operand, NULL, &there), NIB_ERR_MEMORY, "a product that needs");
    shim_fail_allocation = 0;
    void *const after = copy_of(&m);
    CHECK(!memcmp(before, after, m.bytes));
    free(after);
    nib_device_release(fresh);
#endif
    free(before);
    close_side(&a), close_side(&b), close_side(&c), release(&m);
}

TEST_MAIN

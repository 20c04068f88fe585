/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda.c - libnib_cuda against the host, byte for byte: random calls over all options, dtypes, kinds of data, shapes,
 * strides and overrides into memory that held something else; then what tensors do, graphs, threads and failures.
 *
 * It is built twice: for a GPU (skipped without one), and over cuda/shim, where the host runs the same kernels.
 * NIB_CUDA_BUFFERS=n compares so many buffers; NIB_CAMPAIGN has a tensor of more than 2^31 elements.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "test_gpu.h"

/* ---- Random calls ---- */

enum kind { NORMAL, HEAVY, BITS, TIES, TINY, ZEROS, NANS, INFINITE, OUTLIER, LARGE, KINDS };
static const char *const kind_names[] = { "normal", "heavy", "bits",     "ties",    "tiny",
                                          "zeros",  "nans",  "infinite", "outlier", "large" };
static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
static char where[512];

static float value_of(enum kind kind)
{
    static const float ties[] = { 0, .25f, .5f, .75f, 1, 1.25f, 1.5f, 1.75f, 2, 2.5f, 3, 3.5f, 4, 5, 6, 6 };
    const float normal = test_normal();
    const int64_t one_in_32 = test_below(32);
    switch (kind) {
    case HEAVY:
        return ldexpf(normal, (int)test_below(20) - 12);
    case TIES:
        return copysignf(ties[test_below(16)], normal);
    case TINY:
        return ldexpf(normal, -(int)(test_below(2) ? 18 : 130));
    case ZEROS:
        return test_below(8) ? copysignf(0, normal) : normal;
    case NANS:
        return one_in_32 ? normal : copysignf(NAN, normal);
    case INFINITE:
        return one_in_32 == 1 ? copysignf(NAN, normal) : one_in_32 ? normal : copysignf(INFINITY, normal);
    case OUTLIER:
        return one_in_32 ? normal : normal * 3000;
    case LARGE:
        return normal * 0x1p125f;
    default:
        return normal;
    }
}

/* n values of a dtype. */
static void fill_values(void *out, nib_dtype dtype, enum kind kind, int64_t n)
{
    float *x = malloc((size_t)(n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = value_of(kind);
    CHECK_OK(nib_encode(dtype, x, (size_t)n, out));
    free(x);
    for (int64_t i = 0; kind == BITS && i < n * nib_dtype_bits(dtype) / 8; i++)
        ((uint8_t *)out)[i] = (uint8_t)test_random();
}

/* A random layout of an array of this shape; the memory it needs is `bytes`. Its elements do not overlap. */
static nib_array random_layout(nib_dtype dtype, int rank, const int64_t *shape)
{
    const int64_t size = nib_dtype_bits(dtype) / 8;
    nib_array a = { .dtype = dtype, .rank = rank };
    int order[NIB_MAX_RANK];
    for (int i = 0; i < rank; i++) {
        a.shape[i] = shape[i];
        order[i] = i;
    }
    const int64_t which = test_below(16); /* from 8 on without gaps */
    if (which == 0 && rank > 1) {         /* transposed */
        order[rank - 1] = rank - 2;
        order[rank - 2] = rank - 1;
    }
    int64_t stride = which == 1 ? 2 : 1, first = test_below(3) ? 0 : test_below(9);
    for (int k = rank - 1; k >= 0; k--) {
        const int i = order[k];
        a.strides[i] = stride;
        stride *= shape[i] ? shape[i] : 1;
        if (k == rank - 1 && which >= 4 && which < 8) /* rows apart */
            stride += which == 4 ? 16 : test_below(5);
        if (k == 0 && which == 2 && rank > 2)
            stride += 3;
    }
    if (which == 3 && rank > 1 && shape[0]) { /* from the last row up */
        first += (shape[0] - 1) * a.strides[0];
        a.strides[0] = -a.strides[0];
    }
    a.offset = (size_t)(first * size);
    a.bytes = (size_t)((stride + first + shape[0] * llabs(a.strides[0]) + 64) * size);
    return a;
}

/* Options that go together, and now and then all of them. */
static nib_quantizer random_quantizer(void)
{
    nib_quantizer q;
    do {
        nib_quantizer_init(&q);
        const int64_t usages = 1 + test_below(3);
        q.rowwise = usages & 1, q.columnwise = usages >> 1 & 1;
        q.swizzled = test_below(4) == 0;
        q.row_scaled = test_below(5) == 0;
        q.rht = test_below(3) == 0;
        q.rht_rowwise = test_below(6) == 0;
        q.rht_sign_mask = test_below(2) ? NIB_RHT_SIGN_MASK : (uint16_t)test_random();
        q.block_dims[0] = test_below(4) ? 1 : 16;
        q.scale_rule = test_below(4) ? NIB_SCALE_RTN : (nib_scale_rule)test_below(NIB_SCALE_RULE_COUNT);
        q.error_mode = (nib_error_mode)test_below(NIB_ERROR_MODE_COUNT);
        q.fast_error = (uint8_t)test_below(2);
        q.e4m3_max = test_below(4) ? 448 : 256;
        q.tensor_scale_rule = test_below(5) ? NIB_TENSOR_SCALE_RULE_DIALECT
                                            : (nib_tensor_scale_rule)test_below(NIB_TENSOR_SCALE_RULE_COUNT);
        q.min_block_scale = test_below(6) ? 0 : 0.0625f;
        q.rounding = test_below(2) ? NIB_ROUND_NEAREST : (nib_rounding)test_below(NIB_ROUNDING_COUNT);
        q.seed = test_random();
        q.offset = test_below(2) ? test_random() : UINT64_MAX - 1;
        q.origin[0] = 16 * test_below(1000), q.origin[1] = 16 * test_below(1000);
    } while (nib_quantizer_check(&q, NULL));
    return q;
}

/* Shapes from nothing to a few tiles; whole blocks where the RHT wants them. */
static int random_shape(const nib_quantizer *q, int64_t shape[NIB_MAX_RANK])
{
    static const int64_t usual[] = { 1, 2, 15, 16, 17, 31, 33, 48, 64, 100, 127, 128, 129, 160, 256, 272, 300 };
    int64_t rows = usual[test_below(17)], cols = usual[test_below(17)];
    if (q->rht || test_below(3) == 0)
        rows = (rows + 15) / 16 * 16;
    if (q->rht_rowwise || test_below(3) == 0)
        cols = (cols + 15) / 16 * 16;
    if (test_below(3) == 0) { /* whole tiles: kernels without tails */
        rows = 128 * (1 + test_below(3));
        cols = 64 * (1 + test_below(6));
    }
    if (test_below(40) == 0)
        rows = 0;
    if (test_below(40) == 0)
        cols = 0;
    const int64_t inner = rows % 3 == 0 ? 3 : rows % 2 == 0 ? 2 : 1;
    const int rank = (int)test_below(3) == 0 ? 3 : 2;
    shape[0] = rank == 3 ? rows / inner : rows;
    shape[rank - 2] = rank == 3 ? inner : rows;
    shape[rank - 1] = cols;
    return rank;
}

/* What one random call is about, on both sides. */
struct trial {
    nib_quantizer q;
    nib_array host, device; /* the input */
    struct memory x;
    int64_t lines[2];
    nib_overrides of_host, of_device;
    struct memory numbers, weights; /* what overrides point to */
    float *values, *importance;
    enum kind kind;
};

/* Amaxes, tensor scales, offset, what was seen: of which each may be there. */
static void make_overrides(struct trial *t)
{
    const int64_t most = t->lines[0] > t->lines[1] ? t->lines[0] : t->lines[1], n = 4 * most + 4;
    t->values = malloc((size_t)n * sizeof *t->values);
    for (int64_t i = 0; i < n; i++)
        t->values[i] = test_below(8)   ? fabsf(test_normal()) * 4
                       : test_below(2) ? 0
                                       : ldexpf(1, (int)test_below(250) - 125);
    memcpy(&t->values[n - 2], &(uint64_t){ test_random() }, 8);
    t->numbers = memory_of(t->values, (size_t)n * sizeof *t->values, 0);
    t->of_host = t->of_device = (nib_overrides){ .bytes = sizeof t->of_host };
    for (int usage = 0; usage < 2; usage++) {
        if (test_below(3) == 0) {
            t->of_host.amax[usage] = t->values + usage * most;
            t->of_device.amax[usage] = (float *)t->numbers.data + usage * most;
        }
        if (test_below(6) == 0) {
            t->of_host.tensor_scale[usage] = t->values + (2 + usage) * most;
            t->of_device.tensor_scale[usage] = (float *)t->numbers.data + (2 + usage) * most;
        }
    }
    if (test_below(4) == 0) {
        t->of_host.amax_seen = &t->values[4 * most];
        t->of_device.amax_seen = (float *)t->numbers.data + 4 * most;
    }
    if (test_below(4) == 0) {
        t->of_host.offset = (const uint64_t *)(t->values + n - 2);
        t->of_device.offset = (const uint64_t *)((float *)t->numbers.data + n - 2);
    }
}

/* The importance of columns, where it can be. */
static void make_importance(struct trial *t, int64_t cols)
{
    const nib_quantizer *const q = &t->q;
    if (q->scale_rule != NIB_SCALE_SWEEP || q->columnwise || q->rht_rowwise || test_below(3) == 0)
        return;
    t->importance = malloc((size_t)(cols + 1) * sizeof *t->importance);
    for (int64_t i = 0; i < cols; i++)
        t->importance[i] = ldexpf(1 + fabsf(test_normal()), (int)test_below(24) - 12);
    t->weights = memory_of(t->importance, (size_t)cols * sizeof *t->importance, 0);
    t->of_host.importance = t->importance;
    t->of_device.importance = (const float *)t->weights.data;
    t->of_host.importance_count = t->of_device.importance_count = cols;
}

static void open_trial(struct trial *t)
{
    int64_t shape[NIB_MAX_RANK] = { 0 };
    *t = (struct trial){ .q = random_quantizer(), .kind = (enum kind)test_below(KINDS) };
    const nib_dtype dtype = dtypes[test_below(3)];
    const int rank = random_shape(&t->q, shape);
    t->host = random_layout(dtype, rank, shape);
    t->host.data = malloc(t->host.bytes);
    fill_values(t->host.data, dtype, t->kind, (int64_t)t->host.bytes / (nib_dtype_bits(dtype) / 8));
    t->x =
        memory_of(t->host.data, t->host.bytes, test_below(4) ? 0 : (size_t)(nib_dtype_bits(dtype) / 8 * test_below(8)));
    t->device = t->host;
    t->device.data = t->x.data;
    t->device.device = gpu;
    t->host.device = host_of(1);
    t->lines[0] = t->lines[1] = 1;
    if (t->q.row_scaled) {
        t->lines[0] = elements_in(rank - 1, shape);
        t->lines[1] = shape[rank - 1];
    }
    make_overrides(t);
    make_importance(t, shape[rank - 1]);
    snprintf(where, sizeof where,
             "%s %s %lldx%lldx%lld usages %d%d swizzled %d row-scaled %d rht %d%d "
             "mask %04x block %d rule %d,%d,%d,%d "
             "scales %d floor %g rounding %d strides %lld,%lld overrides %d%d%d%d%d%d%d",
             nib_dtype_name(dtype), kind_names[t->kind], (long long)shape[0], (long long)shape[1], (long long)shape[2],
             t->q.rowwise, t->q.columnwise, t->q.swizzled, t->q.row_scaled, t->q.rht_rowwise, t->q.rht,
             t->q.rht_sign_mask, t->q.block_dims[0], (int)t->q.scale_rule, (int)t->q.error_mode, t->q.fast_error,
             t->q.e4m3_max, (int)t->q.tensor_scale_rule, (double)t->q.min_block_scale, (int)t->q.rounding,
             (long long)t->host.strides[rank - 2], (long long)t->host.strides[rank - 1], !!t->of_host.amax[0],
             !!t->of_host.amax[1], !!t->of_host.tensor_scale[0], !!t->of_host.tensor_scale[1], !!t->of_host.amax_seen,
             !!t->of_host.offset, !!t->of_host.importance);
}

static void close_trial(struct trial *t)
{
    release(&t->x);
    release(&t->numbers);
    release(&t->weights);
    free(t->host.data);
    free(t->values);
    free(t->importance);
}

/* ---- Comparing ---- */

static long compared;

static bool same_bytes(const char *what, const void *host, const void *device, size_t bytes)
{
    uint8_t *got = malloc(bytes + 1);
    download(got, device, bytes);
    compared++;
    size_t i = 0;
    while (i < bytes && got[i] == ((const uint8_t *)host)[i])
        i++;
    CHECK_THAT(i == bytes, "%s: %s differs at byte %zu of %zu: %02x, not %02x", where, what, i, bytes, got[i],
               ((const uint8_t *)host)[i]);
    free(got);
    return i == bytes;
}

static bool same_tensors(const nib_tensor *host, const nib_tensor *device)
{
    static const char *const names[] = { "row data",   "col data",          "row scales",
                                         "col scales", "row tensor scales", "col tensor scales" };
    bool same = host && device;
    for (int part = 0; same && part < NIB_PART_COUNT; part++) {
        const nib_buffer *a = nib_tensor_buffer(host, (nib_part)part), *b = nib_tensor_buffer(device, (nib_part)part);
        CHECK_THAT(!a == !b, "%s: %s: only one is there", where, names[part]);
        if (a && b)
            same &= same_bytes(names[part], nib_buffer_data(a), nib_buffer_data(b), nib_buffer_bytes(a));
    }
    return same;
}

/* A tensor on the GPU over memory that held something else. */
static nib_tensor *poisoned_tensor(const nib_quantizer *q, const nib_array *x, struct memory memory[NIB_PART_COUNT])
{
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_tensor *t = NULL;
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        int64_t shape[NIB_MAX_RANK];
        int rank;
        if (!(part % 2 ? q->columnwise : q->rowwise))
            continue;
        CHECK_OK(nib_part_shape(q, (nib_part)part, x->rank, x->shape, &rank, shape));
        const size_t bytes = (size_t)elements_in(rank, shape) * (part / 2 == 2 ? 4 : 1);
        memory[part] = memory_of(NULL, bytes, part / 2 < 2 && test_below(6) == 0 ? (size_t)test_below(9) : 0);
        CHECK_OK(nib_buffer_borrow(memory[part].data, bytes, gpu, NULL, NULL, &parts[part]));
    }
    CHECK_OK(nib_tensor_from_buffers(q, x->dtype, x->rank, x->shape, parts, NIB_PART_COUNT, &t));
    for (int part = 0; part < NIB_PART_COUNT; part++)
        nib_buffer_release(parts[part]);
    return t;
}

/* Values of a tensor, or of a fake quantization, in a random dtype and layout. */
static void compare_values(const struct trial *t, const nib_tensor *host, const nib_tensor *device, nib_usage usage)
{
    const bool fake = !host;
    const nib_dtype dtype = fake ? t->host.dtype : dtypes[test_below(3)];
    nib_array y = random_layout(dtype, t->host.rank, t->host.shape), z;
    y.data = malloc(y.bytes);
    memset(y.data, 0xA5, y.bytes);
    struct memory m = memory_of(y.data, y.bytes, test_below(4) ? 0 : (size_t)(nib_dtype_bits(dtype) / 8));
    z = y;
    z.data = m.data;
    z.device = gpu;
    y.device = host_of(1);
    if (fake) {
        nib_overrides of_host = t->of_host, of_device = t->of_device;
        of_host.amax_seen = NULL, of_device.amax_seen = NULL;
        CHECK_OK(nib_fake_quantize(&t->q, &t->host, &of_host, usage, &y));
        CHECK_OK(nib_fake_quantize(&t->q, &t->device, &of_device, usage, &z));
    } else {
        CHECK_OK(nib_dequantize(host, usage, &y));
        CHECK_OK(nib_dequantize(device, usage, &z));
    }
    same_bytes(fake ? "fake values" : "values", y.data, m.data, y.bytes);
    free(y.data);
    release(&m);
}

static void run_trial(void)
{
    struct trial t;
    nib_tensor *host = NULL;
    struct memory memory[NIB_PART_COUNT] = { 0 };
    open_trial(&t);
    const int64_t n = 4 * (t.lines[0] > t.lines[1] ? t.lines[0] : t.lines[1]);
    CHECK_OK(nib_quantize(&t.q, &t.host, &t.of_host, &host));
    nib_tensor *device = poisoned_tensor(&t.q, &t.device, memory);
    float flag = test_below(8) ? 0.0f : 1.0f;
    struct memory noop = memory_of(&flag, sizeof flag, 0);
    if (flag == 1.0f) { /* nothing happens, and then everything */
        CHECK_OK(nib_quantize_into(&t.q, &t.device, &t.of_device, (const float *)noop.data, device));
        for (int part = 0; part < NIB_PART_COUNT; part++) {
            uint8_t *filler = malloc(memory[part].bytes + 1);
            memset(filler, 0xA5, memory[part].bytes + 1);
            if (memory[part].buffer)
                same_bytes("what a no-op left", filler, memory[part].data, memory[part].bytes);
            free(filler);
        }
    }
    CHECK_OK(nib_quantize_into(&t.q, &t.device, &t.of_device, flag == 1.0f ? NULL : (const float *)noop.data, device));
    if (same_tensors(host, device) && t.of_host.amax_seen)
        same_bytes("the amax seen", &t.values[n], (float *)t.numbers.data + n, sizeof(float));
    nib_metadata meta = { .bytes = sizeof meta };
    CHECK_OK(nib_tensor_get_metadata(host, &meta));
    for (int usage = 0; usage < 2; usage++)
        if (usage ? t.q.columnwise : t.q.rowwise) {
            compare_values(&t, host, device, (nib_usage)usage);
            compare_values(&t, NULL, NULL, (nib_usage)usage);
        }
    nib_tensor_destroy(host);
    nib_tensor_destroy(device);
    for (int part = 0; part < NIB_PART_COUNT; part++)
        release(&memory[part]);
    release(&noop);
    close_trial(&t);
}

TEST(random_calls_give_the_bytes_of_the_host)
{
    NEEDS_GPU;
    const char *const wanted = getenv("NIB_CUDA_BUFFERS");
    const long buffers = wanted ? strtol(wanted, NULL, 10) : NIB_CUDA_SHIM ? 2500 : 20000;
    while (compared < buffers && !test_failures)
        run_trial();
    if (wanted)
        fprintf(stderr, "%ld buffers compared, %d checks failed\n", compared, test_failures);
}

/* ---- Tensors ---- */

/* A matrix of values on both sides. */
struct pair {
    nib_array host, device;
    struct memory memory;
};

static struct pair pair_of(nib_dtype dtype, enum kind kind, int64_t rows, int64_t cols)
{
    struct pair p = { 0 };
    const int64_t shape[2] = { rows, cols };
    void *data = malloc((size_t)(rows * cols * nib_dtype_bits(dtype) / 8 + 1));
    fill_values(data, dtype, kind, rows * cols);
    CHECK_OK(nib_array_init(&p.host, data, dtype, 2, shape));
    p.memory = memory_of(data, p.host.bytes, 0);
    p.device = p.host;
    p.device.data = p.memory.data;
    p.device.device = gpu;
    snprintf(where, sizeof where, "%lldx%lld", (long long)rows, (long long)cols);
    return p;
}

static void free_pair(struct pair *p)
{
    free(p->host.data);
    release(&p->memory);
}

/* A tensor of the GPU that has become one of the host again. */
static void compare_back(const nib_tensor *host, const nib_tensor *device)
{
    nib_tensor *back = NULL;
    int equal = 0;
    CHECK_OK(nib_tensor_to(device, NULL, &back));
    CHECK_OK(nib_tensor_equal(host, back, &equal));
    CHECK_THAT(equal, "%s: the tensors differ", where);
    (void)same_tensors(host, device);
    nib_tensor_destroy(back);
}

typedef nib_status operation(nib_tensor *t, nib_tensor **out);
static nib_status op_clone(nib_tensor *t, nib_tensor **out) { return nib_tensor_clone(t, out); }
static nib_status op_slice(nib_tensor *t, nib_tensor **out) { return nib_tensor_slice(t, 16, 32, out); }
static nib_status op_view(nib_tensor *t, nib_tensor **out)
{
    return nib_tensor_view(t, 3, (const int64_t[]){ 4, -1, 64 }, out);
}
static nib_status op_swizzle(nib_tensor *t, nib_tensor **out)
{
    const nib_status status = nib_tensor_swizzle(t);
    return status ? status : nib_tensor_clone(t, out);
}
static nib_status op_unswizzle(nib_tensor *t, nib_tensor **out)
{
    nib_status status = nib_tensor_swizzle(t);
    status = status ? status : nib_tensor_unswizzle(t);
    return status ? status : nib_tensor_clone(t, out);
}
static nib_status op_zero(nib_tensor *t, nib_tensor **out)
{
    const nib_status status = nib_tensor_clone(t, out);
    return status ? status : nib_tensor_zero(*out);
}
static nib_status op_columns(nib_tensor *t, nib_tensor **out)
{
    const nib_status status = nib_tensor_update_usage(t, -1, 1);
    return status ? status : nib_tensor_clone(t, out);
}
static nib_status op_copy(nib_tensor *t, nib_tensor **out)
{
    nib_status status = nib_tensor_clone(t, out);
    status = status ? status : nib_tensor_zero(*out);
    return status ? status : nib_tensor_copy(*out, t);
}

TEST(tensors_do_what_those_of_the_host_do)
{
    NEEDS_GPU;
    static operation *const operations[] = { op_clone,     op_slice, op_view,    op_swizzle,
                                             op_unswizzle, op_zero,  op_columns, op_copy };
    struct pair x = pair_of(NIB_BF16, NORMAL, 80, 64);
    for (int square = 0; square < 2; square++)
        for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
            nib_quantizer q;
            nib_quantizer_init(&q);
            q.block_dims[0] = square ? 16 : 1;
            q.columnwise = operations[i] != op_columns && operations[i] != op_view;
            q.row_scaled = !square && operations[i] == op_slice;
            nib_tensor *host = NULL, *device = NULL, *of_host = NULL, *of_device = NULL;
            CHECK_OK(nib_quantize(&q, &x.host, NULL, &host));
            CHECK_OK(nib_quantize(&q, &x.device, NULL, &device));
            const nib_status a = operations[i](host, &of_host), b = operations[i](device, &of_device);
            CHECK_THAT(a == b, "operation %zu: %s, and on the host %s", i, nib_status_name(b), nib_status_name(a));
            if (!a && !b)
                compare_back(of_host, of_device);
            nib_tensor_destroy(of_host);
            nib_tensor_destroy(of_device);
            nib_tensor_destroy(host);
            nib_tensor_destroy(device);
        }
    free_pair(&x);
}

TEST(equality_sees_every_part)
{
    NEEDS_GPU;
    struct pair x = pair_of(NIB_F32, NORMAL, 33, 45);
    nib_quantizer q;
    nib_quantizer_init(&q);
    nib_tensor *a = NULL, *b = NULL;
    int equal = 0;
    CHECK_OK(nib_quantize(&q, &x.device, NULL, &a));
    CHECK_OK(nib_tensor_clone(a, &b));
    CHECK_OK(nib_tensor_equal(a, b, &equal));
    CHECK(equal);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        char *const data = nib_buffer_data(nib_tensor_buffer(b, (nib_part)part));
        uint8_t byte, other;
        download(&byte, data, 1);
        other = byte ^ 0x11;
        upload(data, &other, 1);
        CHECK_OK(nib_tensor_equal(a, b, &equal));
        CHECK_THAT(!equal, "part %d may differ", part);
        upload(data, &byte, 1);
    }
    CHECK_OK(nib_tensor_equal(a, b, &equal));
    CHECK(equal);
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
    free_pair(&x);
}

TEST(files_hold_tensors_of_a_gpu)
{
    NEEDS_GPU;
    char path[64];
    const char *const tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%.40s/nib-cuda-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    const int descriptor = mkstemp(path);
    struct pair x = pair_of(NIB_F16, HEAVY, 48, 80);
    nib_quantizer q;
    nib_quantizer_init(&q);
    nib_tensor *host = NULL, *device = NULL, *there = NULL;
    nib_writer *writer = NULL;
    nib_file *file = NULL;
    CHECK_OK(nib_quantize(&q, &x.host, NULL, &host));
    CHECK_OK(nib_quantize(&q, &x.device, NULL, &device));
    CHECK_OK(nib_writer_create(path, &writer));
    CHECK_OK(nib_writer_declare_tensor(writer, "x", device));
    CHECK_OK(nib_writer_write_tensor(writer, "x", device));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    CHECK_OK(nib_file_open(path, &file));
    CHECK_OK(nib_file_read_tensor(file, "x", gpu, &there));
    compare_back(host, there);
    nib_file_close(file);
    nib_tensor_destroy(host);
    nib_tensor_destroy(device);
    nib_tensor_destroy(there);
    free_pair(&x);
    close(descriptor);
    unlink(path);
}

/* ---- A tensor scale under which factors are 0 ---- */

/* Quantized into a tensor and fake, with the tensor scale 2^122, under which the largest block scale is no float. */
static void compare_under_zero(const nib_quantizer *q, struct pair *x, struct memory *scale, struct memory *out)
{
    const float tensor_scale = 0x1p122f;
    nib_overrides of_host = { .bytes = sizeof of_host, .tensor_scale = { &tensor_scale, &tensor_scale } };
    nib_overrides of_device = { .bytes = sizeof of_device };
    of_device.tensor_scale[0] = of_device.tensor_scale[1] = (const float *)scale->data;
    nib_tensor *host = NULL, *device = NULL;
    CHECK_OK(nib_quantize(q, &x->host, &of_host, &host));
    CHECK_OK(nib_quantize(q, &x->device, &of_device, &device));
    same_tensors(host, device);
    nib_array y = x->host, z = x->device;
    y.data = malloc(y.bytes);
    z.data = out->data;
    CHECK_OK(nib_fake_quantize(q, &x->host, &of_host, NIB_ROWWISE, &y));
    CHECK_OK(nib_fake_quantize(q, &x->device, &of_device, NIB_ROWWISE, &z));
    same_bytes("fake values", y.data, z.data, y.bytes);
    free(y.data);
    nib_tensor_destroy(host);
    nib_tensor_destroy(device);
}

TEST(infinities_lose_their_sign_where_the_factor_is_zero)
{
    NEEDS_GPU;
    struct memory scale = memory_of(&(float){ 0x1p122f }, sizeof(float), 0);
    for (int i = 0; i < 3 * 4 * 3; i++) {
        struct pair x = pair_of(dtypes[i % 3], INFINITE, 128, 128);
        struct memory out = memory_of(NULL, x.host.bytes, 0);
        nib_quantizer q;
        nib_quantizer_init(&q);
        q.tensor_scale_rule = NIB_TENSOR_SCALE_RULE_POW2;
        q.rht = i / 3 % 4 == 1, q.block_dims[0] = i / 3 % 4 == 2 ? 16 : 1;
        q.scale_rule = i / 3 % 4 == 3 ? NIB_SCALE_SWEEP : NIB_SCALE_RTN;
        q.rounding = q.scale_rule ? NIB_ROUND_NEAREST : (nib_rounding)(i / 12);
        snprintf(where, sizeof where, "%s, mode %d, rounding %d", nib_dtype_name(dtypes[i % 3]), i / 3 % 4, i / 12);
        compare_under_zero(&q, &x, &scale, &out);
        release(&out);
        free_pair(&x);
    }
    release(&scale);
}

/* ---- Amaxes ---- */

TEST(amaxes_are_those_of_the_host)
{
    NEEDS_GPU;
    struct pair x = pair_of(NIB_BF16, OUTLIER, 144, 100);
    struct memory to = memory_of(NULL, 400 * sizeof(float), 0);
    for (int mode = 0; mode < 4; mode++) {
        nib_quantizer q;
        nib_quantizer_init(&q);
        q.row_scaled = mode == 1, q.rht = mode == 2, q.rounding = mode == 3 ? NIB_ROUND_STOCHASTIC_UNBIASED : 0;
        float host[2][200] = { { 0 } };
        CHECK_OK(nib_amax(&q, &x.host, (float *const[2]){ host[0], host[1] }));
        CHECK_OK(nib_amax(&q, &x.device, (float *const[2]){ (float *)to.data, (float *)to.data + 200 }));
        same_bytes("row amaxes", host[0], to.data, (q.row_scaled ? 144 : 1) * sizeof(float));
        same_bytes("column amaxes", host[1], to.data + 200 * sizeof(float), (q.row_scaled ? 100 : 1) * sizeof(float));
    }
    release(&to);
    free_pair(&x);
}

/* ---- What is rejected ---- */

TEST(what_a_gpu_does_not_do_it_says)
{
    NEEDS_GPU;
    struct pair x = pair_of(NIB_BF16, NORMAL, 32, 32);
    nib_tensor *t = NULL, *there = NULL;
    nib_device *none = NULL;
    nib_quantizer q;
    void *stream;
    for (int format = 1; format < NIB_FORMAT_COUNT; format++) {
        CHECK_OK(nib_quantizer_init_format(&q, (nib_format)format));
        CHECK_FAILS(nib_quantize(&q, &x.device, NULL, &t), NIB_ERR_UNSUPPORTED, "quantizes nvfp4, not");
        CHECK_FAILS(nib_fake_quantize(&q, &x.device, NULL, NIB_ROWWISE, &x.device), NIB_ERR_UNSUPPORTED, "nvfp4, not");
    }
    nib_quantizer_init(&q);
    q.dialect = NIB_DIALECT_MODELOPT;
    CHECK_FAILS(nib_quantize(&q, &x.device, NULL, &t), NIB_ERR_UNSUPPORTED, "dialect te, not by modelopt");
    nib_quantizer_init(&q);
    q.amax_comm = nib_comm_serial();
    CHECK_FAILS(nib_quantize(&q, &x.device, NULL, &t), NIB_ERR_UNSUPPORTED, "no communicator");
    nib_quantizer_init(&q);
    for (int axis = 0; axis < 2; axis++) { /* too many, even of nothing */
        nib_array many = x.device;
        many.shape[axis] = INT64_C(1) << 34;
        many.shape[!axis] = 0;
        CHECK_FAILS(nib_quantize(&q, &many, NULL, &t), NIB_ERR_UNSUPPORTED, "fewer than 2^34 rows and columns");
        many.shape[axis]--;
        CHECK_OK(nib_quantize(&q, &many, NULL, &t));
        nib_tensor_destroy(t);
        t = NULL;
    }
    CHECK(!t);
    CHECK_OK(nib_quantizer_init_format(&q, NIB_MXFP8));
    CHECK_OK(nib_quantize(&q, &x.host, NULL, &t)); /* it can live there, but not be decoded */
    CHECK_OK(nib_tensor_to(t, gpu, &there));
    CHECK_FAILS(nib_dequantize(there, NIB_ROWWISE, &x.device), NIB_ERR_UNSUPPORTED, "dequantizes nvfp4, not mxfp8");
    compare_back(t, there);
    CHECK_FAILS(nib_dequantize(there, NIB_ROWWISE, &x.host), NIB_ERR_DEVICE, "cuda:0");
    CHECK_FAILS(nib_cuda_create(-1, NULL, &none), NIB_ERR_DEVICE, "there is no cuda:-1");
    CHECK_FAILS(nib_cuda_create(1000, NULL, &none), NIB_ERR_DEVICE, "there is no cuda:1000");
    CHECK_FAILS(nib_cuda_create(0, NULL, NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_cuda_stream(host_of(1), &stream), NIB_ERR_ARG, "is not a device of libnib_cuda");
    CHECK_FAILS(nib_cuda_synchronize(NULL), NIB_ERR_ARG, "is not a device of libnib_cuda");
    CHECK(!none);
    nib_tensor_destroy(t);
    nib_tensor_destroy(there);
    free_pair(&x);
}

TEST(memory_that_is_not_there_is_a_status)
{
    NEEDS_GPU;
    nib_buffer *buffer = NULL;
    CHECK_FAILS(nib_buffer_create((size_t)1 << 50, gpu, &buffer), NIB_ERR_MEMORY, "cuda:0 has no memory for a buffer");
    CHECK(!buffer);
    CHECK_OK(nib_cuda_synchronize(gpu));
#if NIB_CUDA_SHIM
    struct pair x = pair_of(NIB_F32, NORMAL, 32, 48);
    nib_quantizer q;
    nib_quantizer_init(&q);
    const long before = shim_allocated;
    nib_status status = NIB_ERR_MEMORY;
    for (long n = 1; status && n < 20; n++) { /* each of a new tensor's in turn */
        nib_tensor *t = NULL;
        shim_fail_allocation = n;
        status = nib_quantize(&q, &x.device, NULL, &t);
        shim_fail_allocation = 0;
        CHECK(status == NIB_OK || (status == NIB_ERR_MEMORY && !t));
        nib_tensor_destroy(t);
        CHECK_THAT(shim_allocated == before, "%ld allocations are left", shim_allocated - before);
    }
    CHECK_OK(status);
    free_pair(&x);
#endif
}

/* ---- Never wait ---- */

/* Calls that a training step makes, over tensors that are there. */
struct step {
    nib_quantizer q;
    struct pair x;
    nib_tensor *tensor;
    nib_array out;
    struct memory values, offset;
    nib_overrides overrides;
};

static nib_status run_step(void *context)
{
    struct step *const s = context;
    nib_status status = nib_quantize_into(&s->q, &s->x.device, &s->overrides, NULL, s->tensor);
    status = status ? status : nib_dequantize(s->tensor, NIB_COLUMNWISE, &s->out);
    status = status ? status : nib_fake_quantize(&s->q, &s->x.device, &s->overrides, NIB_ROWWISE, &s->out);
    return status;
}

static void open_step(struct step *s, int mode)
{
    *s = (struct step){ .x = pair_of(NIB_BF16, NORMAL, 256, 144) };
    nib_quantizer_init(&s->q);
    s->q.rht = mode == 1, s->q.block_dims[0] = mode == 2 ? 16 : 1, s->q.row_scaled = mode == 3;
    s->q.rounding = mode == 4 ? NIB_ROUND_STOCHASTIC_UNBIASED : NIB_ROUND_STOCHASTIC_8;
    s->values = memory_of(NULL, s->x.host.bytes, 0);
    s->offset = memory_of(&(uint64_t){ 5 }, sizeof(uint64_t), 0);
    s->overrides = (nib_overrides){ .bytes = sizeof s->overrides, .offset = (const uint64_t *)s->offset.data };
    s->out = s->x.device;
    s->out.data = s->values.data;
    CHECK_OK(nib_quantize(&s->q, &s->x.device, NULL, &s->tensor));
}

static void close_step(struct step *s)
{
    nib_tensor_destroy(s->tensor);
    release(&s->values);
    release(&s->offset);
    free_pair(&s->x);
}

/* The tensor and the values are the host's under this offset. */
static void check_step(const struct step *s, uint64_t offset)
{
    nib_quantizer q = s->q;
    nib_tensor *host = NULL;
    nib_array y = s->x.host;
    y.data = malloc(y.bytes);
    q.offset = offset;
    CHECK_OK(nib_quantize(&q, &s->x.host, NULL, &host));
    CHECK_OK(nib_fake_quantize(&q, &s->x.host, NULL, NIB_ROWWISE, &y));
    same_tensors(host, s->tensor);
    same_bytes("fake values", y.data, s->values.data, y.bytes);
    nib_tensor_destroy(host);
    free(y.data);
}

TEST(graphs_are_replayed_anywhere_with_other_offsets)
{
    NEEDS_GPU;
    void *stream = NULL, *elsewhere = NULL;
    nib_device *other = NULL;
    CHECK_OK(nib_cuda_create_stream(0, &other));
    CHECK_OK(nib_cuda_stream(gpu, &stream));
    CHECK_OK(nib_cuda_stream(other, &elsewhere));
    for (int mode = 0; mode < 5; mode++) {
        struct step s;
        cudaGraph_t graph = NULL;
        cudaGraphExec_t ready = NULL;
        open_step(&s, mode);
        CHECK_OK(run_step(&s)); /* kernels are loaded */
        CHECK_OK(nib_cuda_synchronize(gpu));
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
        CHECK_OK(run_step(&s));
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
        CHECK(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
        for (uint64_t offset = 100; offset < 112; offset += 4) {
            upload(s.offset.data, &offset, sizeof offset);
            CHECK(cudaGraphLaunch(ready, elsewhere) == cudaSuccess);
            nib_tensor *beside = NULL; /* the same device's own calls go on at the same time */
            CHECK_OK(nib_quantize(&s.q, &s.x.device, NULL, &beside));
            CHECK_OK(nib_cuda_synchronize(other));
            CHECK_OK(nib_cuda_synchronize(gpu));
            snprintf(where, sizeof where, "mode %d, offset %d", mode, (int)offset);
            check_step(&s, offset);
            nib_tensor_destroy(beside);
        }
        (void)cudaGraphExecDestroy(ready);
        (void)cudaGraphDestroy(graph);
        close_step(&s);
    }
    nib_device_release(other);
}

/* A tensor of another stream, which is busy: what the update asks of that comes late. */
TEST(an_update_is_in_the_stream_of_its_values)
{
    NEEDS_GPU;
    struct pair x = pair_of(NIB_BF16, NORMAL, 48, 80);
    nib_quantizer q;
    nib_device *other = NULL;
    nib_tensor *host = NULL, *first = NULL, *device = NULL;
    void *stream = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t ready = NULL;
    nib_quantizer_init(&q);
    CHECK_OK(nib_cuda_create_stream(0, &other));
    CHECK_OK(nib_cuda_stream(other, &stream));
    CHECK_OK(nib_quantize(&q, &x.host, NULL, &host));
    q.columnwise = 0;
    CHECK_OK(nib_quantize(&q, &x.host, NULL, &first));
    CHECK_OK(nib_tensor_to(first, other, &device));
    CHECK_OK(nib_cuda_synchronize(other));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    q.columnwise = 1;
    CHECK_OK(nib_quantize_into(&q, &x.device, NULL, NULL, device));
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
    CHECK_OK(nib_cuda_synchronize(gpu));
    CHECK(cudaGraphLaunch(ready, stream) == cudaSuccess);
    CHECK_OK(nib_cuda_synchronize(other));
    snprintf(where, sizeof where, "an update");
    same_tensors(host, device);
    CHECK(nib_tensor_device(device) == other);
    (void)cudaGraphExecDestroy(ready);
    (void)cudaGraphDestroy(graph);
    nib_tensor_destroy(host);
    nib_tensor_destroy(first);
    nib_tensor_destroy(device);
    nib_device_release(other);
    free_pair(&x);
}

TEST(captured_calls_have_no_limit)
{
    NEEDS_GPU;
    struct pair x = pair_of(NIB_BF16, NORMAL, 16, 32);
    nib_quantizer q;
    nib_quantizer_init(&q);
    nib_tensor *host = NULL, *device = NULL;
    nib_device *late = NULL;
    void *stream = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t ready = NULL;
    CHECK_OK(nib_quantize(&q, &x.host, NULL, &host));
    CHECK_OK(nib_quantize(&q, &x.device, NULL, &device));
    CHECK_OK(nib_cuda_synchronize(gpu));
    CHECK_OK(nib_cuda_stream(gpu, &stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    for (int i = 0; i < 4200; i++)
        CHECK_OK(nib_quantize_into(&q, &x.device, NULL, NULL, device));
    CHECK_OK(nib_cuda_create_stream(0, &late)); /* a device can be made meanwhile */
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
    CHECK_OK(nib_tensor_zero(device));
    CHECK(cudaGraphLaunch(ready, stream) == cudaSuccess);
    CHECK_OK(nib_cuda_synchronize(gpu));
    snprintf(where, sizeof where, "4200 calls");
    same_tensors(host, device);
    (void)cudaGraphExecDestroy(ready);
    (void)cudaGraphDestroy(graph);
    nib_device_release(late);
    nib_tensor_destroy(host);
    nib_tensor_destroy(device);
    free_pair(&x);
}

/* What a thread that captures nothing does meanwhile. */
struct meanwhile {
    nib_tensor *tensor;
    nib_device *device;
    nib_array *x;
    int failures;
};

static void *come_and_go(void *context)
{
    struct meanwhile *const m = context;
    nib_buffer *buffer = NULL;
    nib_device *fresh = NULL;
    nib_tensor_destroy(m->tensor);
    nib_device_release(m->device);
    m->failures = nib_cuda_create_stream(0, &fresh) || nib_buffer_create((size_t)1 << 20, fresh, &buffer);
    nib_buffer_release(buffer);
    nib_device_release(fresh);
    return NULL;
}

static size_t free_bytes(void)
{
    size_t bytes = 0, total;
#if NIB_CUDA_SHIM
    bytes = total = (size_t)(1000000 - shim_allocated); /* of an allocation each */
#else
    CHECK(cudaMemGetInfo(&bytes, &total) == cudaSuccess);
#endif
    return bytes;
}

/* What allocates while a stream is captured says so to the runtime, and takes it back. */
static void check_mode_is_as_before(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess && mode == cudaStreamCaptureModeGlobal);
}

/* In whichever mode: what is new is zero at once and not at each replay, what goes is freed, and the capture goes on. */
TEST(tensors_come_and_go_while_a_stream_is_captured)
{
    NEEDS_GPU;
    static const enum cudaStreamCaptureMode modes[] = { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                        cudaStreamCaptureModeRelaxed };
    enum { LARGE_BYTES = 64 << 20 };
    struct pair x = pair_of(NIB_BF16, NORMAL, 48, 80);
    nib_quantizer q;
    nib_tensor *host = NULL;
    void *stream = NULL;
    nib_quantizer_init(&q);
    CHECK_OK(nib_quantize(&q, &x.host, NULL, &host));
    CHECK_OK(nib_cuda_stream(gpu, &stream));
    for (int i = 0; i < 6; i++) {
        const bool threaded = i % 2;
        struct meanwhile m = { 0 };
        nib_tensor *inside = NULL, *zeroed = NULL;
        nib_buffer *large = NULL;
        cudaGraph_t graph = NULL;
        cudaGraphExec_t ready = NULL;
        pthread_t thread;
        snprintf(where, sizeof where, "mode %d%s", i / 2, threaded ? ", another thread" : "");
        CHECK_OK(nib_cuda_create_stream(0, &m.device));
        CHECK_OK(nib_quantize(&q, &x.device, NULL, &m.tensor));
        CHECK_OK(nib_quantize(&q, &x.device, NULL, &zeroed));
        CHECK_OK(nib_tensor_zero(zeroed));
        CHECK_OK(nib_buffer_create(LARGE_BYTES, gpu, &large));
        CHECK_OK(nib_cuda_synchronize(gpu));
        CHECK(cudaStreamBeginCapture(stream, modes[i / 2]) == cudaSuccess);
#if NIB_CUDA_SHIM
        const long waits = shim_waits; /* its streams are never late: whoever zeroes aside must still wait */
#endif
        CHECK_OK(nib_quantize(&q, &x.device, NULL, &inside));
#if NIB_CUDA_SHIM
        CHECK_THAT(shim_waits >= waits + 2, "%s: %ld waits for two usages", where, shim_waits - waits);
#endif
        const size_t before = free_bytes();
        nib_buffer_release(large);
        CHECK_THAT(free_bytes() > before, "%s: freed nothing", where);
        if (threaded) {
            CHECK(pthread_create(&thread, NULL, come_and_go, &m) == 0);
            pthread_join(thread, NULL);
        } else {
            come_and_go(&m);
        }
        CHECK_THAT(!m.failures, "%s: making something failed", where);
        CHECK_THAT(cudaStreamEndCapture(stream, &graph) == cudaSuccess && graph, "%s: the capture has ended", where);
        (void)cudaGetLastError();
        int equal = 0;
        CHECK_OK(nib_tensor_equal(zeroed, inside, &equal));
        CHECK_THAT(equal, "%s: a new tensor holds something before the first replay", where);
        if (graph && cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess) {
            CHECK(cudaGraphLaunch(ready, stream) == cudaSuccess);
            CHECK_OK(nib_cuda_synchronize(gpu));
            same_tensors(host, inside);
            (void)cudaGraphExecDestroy(ready);
        }
        if (graph)
            (void)cudaGraphDestroy(graph);
        nib_tensor_destroy(inside);
        nib_tensor_destroy(zeroed);
        check_mode_is_as_before();
    }
    nib_tensor_destroy(host);
    free_pair(&x);
}

TEST(measuring_is_a_graph_too)
{
    NEEDS_GPU;
    struct step s;
    double seconds = -1;
    open_step(&s, 1);
    CHECK_OK(nib_cuda_measure(gpu, run_step, &s, 5, &seconds));
    CHECK(seconds >= 0 && seconds < 10);
    check_step(&s, 5);
    close_step(&s);
}

static nib_status wait_for_the_second(void *context)
{
    int *const calls = context;
    return (*calls)++ ? nib_cuda_synchronize(gpu) : NIB_OK; /* which a capture does not allow */
}

TEST(what_cannot_be_measured_leaves_nothing_behind)
{
    NEEDS_GPU;
    struct step s;
    nib_tensor *slice = NULL;
    double seconds = -1;
    int calls = 0;
    open_step(&s, 0);
    CHECK_FAILS(nib_cuda_measure(gpu, wait_for_the_second, &calls, 5, &seconds), NIB_ERR_DEVICE, "waiting");
    CHECK(calls == 2 && seconds == -1);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK_OK(nib_tensor_slice(s.tensor, 0, 16, &slice));
    CHECK_OK(nib_cuda_measure(gpu, run_step, &s, 5, &seconds));
    nib_tensor_destroy(slice);
    close_step(&s);
}

#if NIB_CUDA_SHIM
TEST(an_update_neither_waits_nor_allocates)
{
    for (int mode = 0; mode < 5; mode++) {
        struct step s;
        open_step(&s, mode);
        const long waits = shim_waits, allocations = shim_allocations;
        CHECK_OK(run_step(&s));
        CHECK_THAT(shim_waits == waits, "mode %d waits", mode);
        CHECK_THAT(shim_allocations == allocations + (mode == 3), "mode %d allocates", mode); /* an amax per line */
        close_step(&s);
    }
}
#endif

/* ---- Threads ---- */

struct worker {
    pthread_t thread;
    nib_device *device;
    struct pair *x;
    nib_quantizer q;
    nib_tensor *tensor;
    int failures;
};

static void *work(void *context)
{
    struct worker *const w = context;
    nib_array x = w->x->device;
    x.device = w->device;
    for (int i = 0; i < 50; i++)
        w->failures += nib_quantize_into(&w->q, &x, NULL, NULL, w->tensor) != NIB_OK;
    w->failures += nib_cuda_synchronize(w->device) != NIB_OK;
    return NULL;
}

TEST(two_threads_with_a_stream_each)
{
    NEEDS_GPU;
    if (NIB_CUDA_SHIM)
        SKIP("the shim's allocations are counted by one thread");
    struct pair x = pair_of(NIB_BF16, NORMAL, 512, 1024);
    struct worker workers[2] = { 0 };
    nib_tensor *host = NULL;
    for (int i = 0; i < 2; i++) {
        struct worker *const w = &workers[i];
        w->x = &x;
        nib_quantizer_init(&w->q);
        w->q.rht = 1;
        CHECK_OK(nib_cuda_create_stream(0, &w->device));
        CHECK_OK(nib_quantize(&w->q, &x.device, NULL, &w->tensor));
    }
    CHECK_OK(nib_cuda_synchronize(gpu));
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    CHECK_OK(nib_quantize(&workers[0].q, &x.host, NULL, &host));
    for (int i = 0; i < 2; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK(workers[i].failures == 0);
        same_tensors(host, workers[i].tensor);
        nib_tensor_destroy(workers[i].tensor);
        nib_device_release(workers[i].device);
    }
    nib_tensor_destroy(host);
    free_pair(&x);
}

#if NIB_CUDA_SHIM
/* Two calls on one device: the second one begins before a launch of the first. It may wait for the first, which therefore
 * does not wait for ever. */
struct call {
    nib_tensor *a, *b;
    int equal;
    nib_quantizer q;
    struct pair x;
    nib_array y;
    nib_status status;
};
static struct call *second;
static pthread_t second_thread;
static atomic_int second_is_done;

static void make_call(struct call *c)
{
    c->status = c->a ? nib_tensor_equal(c->a, c->b, &c->equal)
                     : nib_fake_quantize(&c->q, &c->x.device, NULL, NIB_ROWWISE, &c->y);
}

static void *make_second_call(void *context)
{
    make_call(second);
    atomic_store(&second_is_done, 1);
    return context;
}

static void begin_second_call(void)
{
    CHECK(pthread_create(&second_thread, NULL, make_second_call, NULL) == 0);
    for (int i = 0; i < 100 && !atomic_load(&second_is_done); i++)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
}

static void make_both_calls(struct call calls[2], long after)
{
    second = &calls[1];
    atomic_store(&second_is_done, 0);
    shim_meanwhile = begin_second_call;
    shim_meanwhile_after = after;
    make_call(&calls[0]);
    CHECK(!shim_meanwhile);
    pthread_join(second_thread, NULL);
    CHECK_OK(calls[0].status);
    CHECK_OK(calls[1].status);
}

TEST(two_threads_compare_on_one_stream)
{
    struct pair x[2] = { pair_of(NIB_F32, NORMAL, 32, 48), pair_of(NIB_F32, NORMAL, 32, 48) };
    nib_quantizer q;
    nib_tensor *t[2] = { NULL };
    nib_quantizer_init(&q);
    q.columnwise = 0; /* the other usage would tell them apart */
    for (int i = 0; i < 2; i++)
        CHECK_OK(nib_quantize(&q, &x[i].device, NULL, &t[i]));
    for (long after = 1; after < 5; after++) { /* the last one is before the flag is read */
        struct call calls[2] = { { .a = t[0], .b = t[1], .equal = -1 }, { .a = t[0], .b = t[0], .equal = -1 } };
        make_both_calls(calls, after);
        CHECK_THAT(calls[0].equal == 0 && calls[1].equal == 1, "after %ld: %d and %d", after, calls[0].equal,
                   calls[1].equal);
    }
    for (int i = 0; i < 2; i++) {
        nib_tensor_destroy(t[i]);
        free_pair(&x[i]);
    }
}

TEST(two_threads_round_on_one_stream)
{
    struct call calls[2] = { { .x = pair_of(NIB_F32, NORMAL, 32, 48) }, { .x = pair_of(NIB_F32, LARGE, 32, 48) } };
    struct memory y[2];
    for (int i = 0; i < 2; i++) {
        nib_quantizer_init(&calls[i].q);
        y[i] = memory_of(NULL, calls[i].x.host.bytes, 0);
        calls[i].y = calls[i].x.device;
        calls[i].y.data = y[i].data;
    }
    make_both_calls(calls, 1);
    for (int i = 0; i < 2; i++) {
        nib_array wanted = calls[i].x.host;
        wanted.data = malloc(wanted.bytes);
        CHECK_OK(nib_fake_quantize(&calls[i].q, &calls[i].x.host, NULL, NIB_ROWWISE, &wanted));
        snprintf(where, sizeof where, "call %d", i);
        same_bytes("fake values", wanted.data, y[i].data, wanted.bytes);
        free(wanted.data);
        release(&y[i]);
        free_pair(&calls[i].x);
    }
}
#endif

/* ---- Large ---- */

TEST(more_than_two_billion_elements)
{
    NEEDS_GPU;
    if (NIB_CUDA_SHIM || !getenv("NIB_CAMPAIGN"))
        SKIP("NIB_CAMPAIGN on a GPU");
    const int64_t rows = 65552, cols = 32784; /* 2149056768 elements, with tails of tiles */
    struct pair x = { 0 };
    uint16_t *data = malloc((size_t)(rows * cols) * 2);
    fill_values(data, NIB_BF16, NORMAL, 1 << 20);
    for (int64_t i = 1 << 20; i < rows * cols; i++) /* no period of rows */
        data[i] = data[(i * 40503 + (i >> 20)) & ((1 << 20) - 1)];
    CHECK_OK(nib_array_init(&x.host, data, NIB_BF16, 2, (const int64_t[]){ rows, cols }));
    x.memory = memory_of(data, x.host.bytes, 0);
    x.device = x.host;
    x.device.data = x.memory.data;
    x.device.device = gpu;
    snprintf(where, sizeof where, "large");
    for (int mode = 0; mode < 3; mode++) {
        nib_quantizer q;
        nib_quantizer_init(&q);
        q.columnwise = mode > 0, q.rht = mode == 1, q.block_dims[0] = mode == 2 ? 16 : 1;
        nib_tensor *host = NULL, *device = NULL;
        CHECK_OK(nib_quantize(&q, &x.host, NULL, &host));
        CHECK_OK(nib_quantize(&q, &x.device, NULL, &device));
        same_tensors(host, device);
        nib_tensor_destroy(host);
        nib_tensor_destroy(device);
    }
    free_pair(&x);
}

TEST_MAIN

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - a GPU and a stream as a device: its memory, and the layout operations behind the seam of base/device.h.
 */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- Errors and the current device ---- */

nib_status nib_cuda_status(const struct nib_cuda_device *d, const char *what, cudaError_t error)
{
    if (!error)
        return NIB_OK;
    (void)cudaGetLastError(); /* or the next call would report it again */
    if (error == cudaErrorMemoryAllocation)
        return nib_fail(NIB_ERR_MEMORY, "%s has no memory for %s", d->base.name, what);
    return nib_fail(NIB_ERR_DEVICE, "%s: %s: %s", d->base.name, what, cudaGetErrorString(error));
}

/* The runtime has a current device for each thread, and it is the caller's. */
cudaError_t nib_cuda_enter(int ordinal, int *before)
{
    *before = -1;
    int current = 0;
    cudaError_t error = cudaGetDevice(&current);
    if (!error && current != ordinal) {
        error = cudaSetDevice(ordinal);
        if (!error)
            *before = current;
    }
    return error;
}

void nib_cuda_leave(int before)
{
    if (before >= 0)
        (void)cudaSetDevice(before);
}

/* Runs a call of the runtime on the device, and makes a status of what it returns. */
#define ON_DEVICE(device, what, call)                                   \
    do {                                                                \
        struct nib_cuda_device *const d = nib_cuda_device_of(device);   \
        int before;                                                     \
        cudaError_t error = nib_cuda_enter(d->queue.ordinal, &before);  \
        if (!error)                                                     \
            error = (call);                                             \
        const nib_status on_device = nib_cuda_status(d, (what), error); \
        nib_cuda_leave(before);                                         \
        return on_device;                                               \
    } while (0)

/* ---- Captures ---- */

/* While a stream is captured, by this thread or by another, the runtime allocates and frees only for a thread that says
 * that it knows; any other gets an error, and has ended the capture. restrain() takes what relax() returned. */
static enum cudaStreamCaptureMode relax(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

static void restrain(enum cudaStreamCaptureMode mode) { (void)cudaThreadExchangeStreamCaptureMode(&mode); }

/* An error stands for the default stream beside a captured one that waits for it. */
static bool takes_no_work_now(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &capture);
    if (error)
        (void)cudaGetLastError();
    return error || capture != cudaStreamCaptureStatusNone;
}

/* Zeroed now, and at no replay: on a stream of its own, since whichever is captured has no part in it. */
static cudaError_t zero_aside(void *memory, size_t bytes)
{
    cudaStream_t aside = NULL;
    cudaError_t error = cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking);
    if (!error)
        error = cudaMemsetAsync(memory, 0, bytes, aside);
    if (!error)
        error = cudaStreamSynchronize(aside);
    if (aside)
        (void)cudaStreamDestroy(aside);
    return error;
}

/* ---- Memory ---- */

static cudaError_t allocate_zeroed(const struct nib_cuda_device *d, size_t bytes, void **out)
{
    void *memory = NULL;
    const enum cudaStreamCaptureMode mode = relax();
    cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1);
    if (!error && bytes)
        error = takes_no_work_now(d->queue.stream) ? zero_aside(memory, bytes)
                                                   : cudaMemsetAsync(memory, 0, bytes, d->queue.stream);
    if (error && memory)
        (void)cudaFree(memory);
    restrain(mode);
    if (!error)
        *out = memory;
    return error;
}

static nib_status allocate(nib_device *device, size_t bytes, void **out)
{
    char what[64];
    snprintf(what, sizeof what, "a buffer of %zu bytes", bytes);
    ON_DEVICE(device, what, allocate_zeroed(d, bytes, out));
}

/* cudaFree waits for the whole GPU: whichever stream still uses the memory is done with it. */
static void free_memory(nib_device *device, void *memory)
{
    int before;
    const enum cudaStreamCaptureMode mode = relax();
    if (!nib_cuda_enter(nib_cuda_device_of(device)->queue.ordinal, &before))
        (void)cudaFree(memory);
    (void)cudaGetLastError();
    nib_cuda_leave(before);
    restrain(mode);
}

cudaError_t nib_cuda_borrow(const struct nib_cuda_device *d, size_t bytes, void **out)
{
    const nib_cuda_allocator *const a = &d->allocator;
    if (!a->allocate)
        return cudaMallocAsync(out, bytes, d->queue.stream);
    *out = a->allocate(a->context, bytes, d->queue.stream);
    return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t nib_cuda_give_back(const struct nib_cuda_device *d, void *memory)
{
    const nib_cuda_allocator *const a = &d->allocator;
    if (!a->allocate)
        return cudaFreeAsync(memory, d->queue.stream);
    a->release(a->context, memory, d->queue.stream);
    return cudaSuccess;
}

static cudaError_t copy_and_wait(const struct nib_cuda_device *d, void *to, const void *from, size_t bytes,
                                 enum cudaMemcpyKind kind)
{
    if (!bytes)
        return cudaSuccess;
    const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, d->queue.stream);
    return error ? error : cudaStreamSynchronize(d->queue.stream);
}

static nib_status write(nib_device *device, void *to, const void *host, size_t bytes)
{
    ON_DEVICE(device, "a copy from the host", copy_and_wait(d, to, host, bytes, cudaMemcpyHostToDevice));
}

static nib_status read(nib_device *device, void *host, const void *from, size_t bytes)
{
    ON_DEVICE(device, "a copy to the host", copy_and_wait(d, host, from, bytes, cudaMemcpyDeviceToHost));
}

/* A copy to where it overlaps itself goes through memory of its own. */
static cudaError_t copy_within(const struct nib_cuda_device *d, char *to, const char *from, size_t bytes)
{
    const cudaStream_t stream = d->queue.stream;
    if (!bytes || to == from)
        return cudaSuccess;
    const bool apart = to + bytes <= from || from + bytes <= to;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(stream, &capture);
    if (error)
        return error;
    if (apart && capture != cudaStreamCaptureStatusNone && ((uintptr_t)to | (uintptr_t)from | bytes) % 16 == 0) {
        /* In a graph the runtime leaves a copy to an engine that is a third slower than the processors. */
        const struct nib_cuda_copy job = { to, from, (int64_t)(bytes / 16) };
        return nib_cuda_launch_copy(&d->queue, &job);
    }
    if (apart)
        return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    void *between = NULL;
    error = nib_cuda_borrow(d, bytes, &between);
    if (error)
        return error;
    error = cudaMemcpyAsync(between, from, bytes, cudaMemcpyDeviceToDevice, stream);
    if (!error)
        error = cudaMemcpyAsync(to, between, bytes, cudaMemcpyDeviceToDevice, stream);
    const cudaError_t freed = nib_cuda_give_back(d, between);
    return error ? error : freed;
}

static nib_status copy(nib_device *device, void *to, const void *from, size_t bytes)
{
    ON_DEVICE(device, "a copy", copy_within(d, to, from, bytes));
}

static nib_status zero(nib_device *device, void *memory, size_t bytes)
{
    ON_DEVICE(device, "zeroing memory", bytes ? cudaMemsetAsync(memory, 0, bytes, d->queue.stream) : cudaSuccess);
}

/* ---- Codes and scales from place to place ---- */

static nib_status fill(nib_device *device, float *values, int64_t n, float value)
{
    const struct nib_cuda_fill job = { values, value };
    ON_DEVICE(device, "filling values", nib_cuda_launch_fill(&d->queue, &job, n));
}

static int64_t bytes_of_codes(const struct nib_usage_geometry *g)
{
    return g->lines * (g->element_stride ? g->length : nib_ceil_div(g->length, 2));
}

static cudaError_t launch_columnwise(const struct nib_cuda_device *d, bool transposed,
                                     const struct nib_cuda_layout *job)
{
    const struct nib_usage_geometry *const to = &job->to;
    const cudaStream_t stream = d->queue.stream;
    cudaError_t error = cudaSuccess;
    if (transposed)
        error = nib_cuda_launch_layout(&d->queue, NIB_CUDA_TRANSPOSED_CODES, job, bytes_of_codes(to));
    else if (job->from.data_bytes)
        error = cudaMemcpyAsync(job->target.codes, job->source.codes, (size_t)job->from.data_bytes,
                                cudaMemcpyDeviceToDevice, stream);
    if (!error && to->scales_bytes && job->target.scales) { /* a buffer that was there before may have held anything */
        error = cudaMemsetAsync(job->target.scales, 0, (size_t)to->scales_bytes, stream);
        if (!error)
            error = nib_cuda_launch_layout(&d->queue, NIB_CUDA_TRANSPOSED_SCALES, job, to->lines * to->blocks);
    }
    if (!error && to->tensor_scales_bytes && job->target.tensor_scales != job->source.tensor_scales)
        error = cudaMemcpyAsync(job->target.tensor_scales, job->source.tensor_scales, (size_t)to->tensor_scales_bytes,
                                cudaMemcpyDeviceToDevice, stream);
    return error;
}

static nib_status build_columnwise(nib_device *device, const nib_quantizer *q, const struct nib_geometry *geometry,
                                   const struct nib_usage_memory *rowwise, const struct nib_usage_memory *columnwise)
{
    const struct nib_usage_geometry *const to = &geometry->usage[NIB_COLUMNWISE];
    const struct nib_cuda_layout job = { .from = geometry->usage[NIB_ROWWISE],
                                         .to = *to,
                                         .source = *rowwise,
                                         .target = *columnwise,
                                         .block = q->block_dims[1] };
    ON_DEVICE(device, "building columns", launch_columnwise(d, !to->by_element, &job));
}

static cudaError_t launch_rectangle(const struct nib_cuda_device *d, bool per_line, const struct nib_cuda_layout *job)
{
    cudaError_t error = nib_cuda_launch_layout(&d->queue, NIB_CUDA_RECTANGLE_CODES, job, bytes_of_codes(&job->to));
    if (!error)
        error = nib_cuda_launch_layout(&d->queue, NIB_CUDA_RECTANGLE_SCALES, job, job->to.lines * job->to.blocks);
    if (!error && job->to.tensor_scales_bytes)
        error = cudaMemcpyAsync(job->target.tensor_scales, job->source.tensor_scales + (per_line ? job->line : 0),
                                (size_t)job->to.tensor_scales_bytes, cudaMemcpyDeviceToDevice, d->queue.stream);
    return error;
}

static nib_status copy_rectangle(nib_device *device, const nib_quantizer *q, const struct nib_usage_geometry *from,
                                 const struct nib_usage_memory *source, int64_t line, int64_t first,
                                 const struct nib_usage_geometry *to, const struct nib_usage_memory *target)
{
    const struct nib_cuda_layout job = { .from = *from,
                                         .to = *to,
                                         .source = *source,
                                         .target = *target,
                                         .line = line,
                                         .first = first,
                                         .block = nib_max(q->block_dims[1], 1) };
    ON_DEVICE(device, "cutting a slice", launch_rectangle(d, q->row_scaled, &job));
}

/* Scales of one layout to another. */
static nib_status move_scales(nib_device *device, enum nib_cuda_item item, const char *what,
                              const struct nib_usage_geometry *from, const void *source,
                              const struct nib_usage_geometry *to, void *target, int64_t n)
{
    struct nib_cuda_layout job = { .from = *from, .to = *to, .target = { .scales = target } };
    job.source.scales = (void *)(uintptr_t)source;
    ON_DEVICE(device, what, nib_cuda_launch_layout(&d->queue, item, &job, n));
}

static nib_status repack_scales(nib_device *device, const struct nib_usage_geometry *from, const void *source,
                                const struct nib_usage_geometry *to, void *target)
{
    return move_scales(device, NIB_CUDA_REPACK, "repacking scales", from, source, to, target,
                       from->lines * from->blocks);
}

static nib_status swizzle(nib_device *device, const struct nib_usage_geometry *plain, const void *from, void *tiles)
{
    return move_scales(device, NIB_CUDA_SWIZZLE, "swizzling scales", plain, from, plain, tiles,
                       nib_round_up(plain->lines, 128) * nib_round_up(plain->blocks, 4));
}

static nib_status unswizzle(nib_device *device, const struct nib_usage_geometry *plain, const void *tiles, void *to)
{
    return move_scales(device, NIB_CUDA_UNSWIZZLE, "unswizzling scales", plain, tiles, plain, to,
                       plain->lines * plain->blocks);
}

static cudaError_t launch_equal(struct nib_cuda_device *d, const struct nib_usage_geometry *g,
                                const struct nib_usage_memory *a, const struct nib_usage_memory *b, bool *out)
{
    uint32_t differs = 0, *const flag = d->place->flag;
    const struct nib_cuda_bytes codes = { a->codes, b->codes, flag },
                                scales = { (const uint8_t *)a->tensor_scales, (const uint8_t *)b->tensor_scales, flag };
    const struct nib_cuda_layout job = { .to = *g, .source = *a, .target = *b, .differs = flag };
    cudaError_t error = cudaMemsetAsync(flag, 0, sizeof *flag, d->queue.stream);
    if (!error)
        error = nib_cuda_launch_equal(&d->queue, &codes, g->data_bytes);
    if (!error)
        error = nib_cuda_launch_equal(&d->queue, &scales, g->tensor_scales_bytes);
    if (!error && g->blocks)
        error = nib_cuda_launch_layout(&d->queue, NIB_CUDA_EQUAL_SCALES, &job,
                                       nib_ceil_div(g->lines, g->lines_per_scale) * g->blocks);
    if (!error)
        error = copy_and_wait(d, &differs, flag, sizeof differs, cudaMemcpyDeviceToHost);
    if (!error)
        *out = !differs;
    return error;
}

/* The flag is one for all threads that have this device. */
static cudaError_t compare(struct nib_cuda_device *d, const struct nib_usage_geometry *g,
                           const struct nib_usage_memory *a, const struct nib_usage_memory *b, bool *out)
{
    pthread_mutex_lock(&d->turn);
    const cudaError_t error = launch_equal(d, g, a, b, out);
    pthread_mutex_unlock(&d->turn);
    return error;
}

static nib_status equal(nib_device *device, const struct nib_usage_geometry *geometry, const struct nib_usage_memory *a,
                        const struct nib_usage_memory *b, bool *out)
{
    ON_DEVICE(device, "comparing tensors", compare(d, geometry, a, b, out));
}

static cudaError_t read_flag(const struct nib_cuda_device *d, const float *flag, bool *set)
{
    float value = 0;
    const cudaError_t error = copy_and_wait(d, &value, flag, sizeof value, cudaMemcpyDeviceToHost);
    if (!error)
        *set = value == 1.0f;
    return error;
}

static nib_status is_set(nib_device *device, const float *flag, bool *set)
{
    ON_DEVICE(device, "reading a no-op flag", read_flag(d, flag, set));
}

/* ---- Places ---- */

static cudaError_t make_places(struct nib_cuda_place **out)
{
    const size_t bytes = NIB_CUDA_PLACES * sizeof **out;
    void *places = NULL;
    const enum cudaStreamCaptureMode mode = relax();
    cudaError_t error = cudaMalloc(&places, bytes);
    if (!error)
        error = zero_aside(places, bytes);
    if (error && places)
        (void)cudaFree(places);
    restrain(mode);
    if (!error)
        *out = places;
    return error;
}

static cudaError_t add_chunk(struct nib_cuda_device *d)
{
    struct nib_cuda_chunk *const chunk = nib_alloc_zeroed(sizeof *chunk);
    if (!chunk)
        return cudaErrorMemoryAllocation;
    const cudaError_t error = make_places(&chunk->places);
    if (error) {
        nib_free(chunk);
        return error;
    }
    chunk->before = d->chunks;
    d->chunks = chunk;
    return cudaSuccess;
}

cudaError_t nib_cuda_take_place(struct nib_cuda_device *d, struct nib_cuda_place **out)
{
    pthread_mutex_lock(&d->lock);
    const bool full = !d->chunks || d->chunks->taken == NIB_CUDA_PLACES;
    const cudaError_t error = full ? add_chunk(d) : cudaSuccess;
    if (!error)
        *out = &d->chunks->places[d->chunks->taken++];
    pthread_mutex_unlock(&d->lock);
    return error;
}

/* ---- Life ---- */

/* What a device has on the GPU. */
static void close_device(struct nib_cuda_device *d)
{
    const enum cudaStreamCaptureMode mode = relax();
    nib_cuda_product_close(d);
    while (d->chunks) {
        struct nib_cuda_chunk *const chunk = d->chunks;
        d->chunks = chunk->before;
        (void)cudaFree(chunk->places);
        nib_free(chunk);
    }
    if (d->own_stream && d->queue.stream)
        (void)cudaStreamDestroy(d->queue.stream);
    (void)cudaGetLastError();
    restrain(mode);
}

static void destroy(nib_device *device)
{
    struct nib_cuda_device *const d = nib_cuda_device_of(device);
    int before;
    (void)nib_cuda_enter(d->queue.ordinal, &before);
    close_device(d);
    nib_cuda_leave(before);
    pthread_mutex_destroy(&d->lock);
    pthread_mutex_destroy(&d->turn);
    nib_free(d);
}

static const struct nib_device_ops cuda_ops = {
    .kind = "cuda",
    .dlpack_type = 2, /* kDLCUDA */
    .destroy = destroy,
    .allocate = allocate,
    .free = free_memory,
    .write = write,
    .read = read,
    .copy = copy,
    .zero = zero,
    .check_quantization = nib_cuda_check_quantization,
    .quantize = nib_cuda_quantize,
    .weighs = true,
    .find_amaxes = nib_cuda_find_amaxes,
    .fake_quantize = nib_cuda_fake_quantize,
    .dequantize = nib_cuda_dequantize,
    .is_set = is_set,
    .product = nib_cuda_product,
    .fill = fill,
    .build_columnwise = build_columnwise,
    .copy_rectangle = copy_rectangle,
    .repack_scales = repack_scales,
    .swizzle = swizzle,
    .unswizzle = unswizzle,
    .equal = equal,
};

static cudaError_t open_device(struct nib_cuda_device *d)
{
    cudaError_t error = cudaDeviceGetAttribute(&d->queue.processors, cudaDevAttrMultiProcessorCount, d->queue.ordinal);
    if (!error)
        error = cudaDeviceGetAttribute(&d->major, cudaDevAttrComputeCapabilityMajor, d->queue.ordinal);
    if (!error && d->own_stream)
        error = cudaStreamCreateWithFlags(&d->queue.stream, cudaStreamNonBlocking);
    if (!error)
        error = nib_cuda_take_place(d, &d->place);
    if (error)
        close_device(d);
    return error;
}

static nib_status create(int ordinal, void *stream, bool own_stream, nib_device **out)
{
    NIB_REQUIRE(out);
    int count = 0, before;
    TRY(nib_cuda_count(&count));
    if (count == 0)
        return nib_fail(NIB_ERR_DEVICE, "there is no NVIDIA GPU, or no driver for it");
    if (ordinal < 0 || ordinal >= count)
        return nib_fail(NIB_ERR_DEVICE, "there is no cuda:%d: the GPUs are cuda:0 to cuda:%d", ordinal, count - 1);
    struct nib_cuda_device *const d = nib_alloc_zeroed(sizeof *d);
    if (!d)
        return nib_fail(NIB_ERR_MEMORY, "no memory for a device");
    nib_device_init(&d->base, &cuda_ops, ordinal);
    d->queue.stream = stream;
    d->queue.ordinal = ordinal;
    d->own_stream = own_stream;
    pthread_mutex_init(&d->lock, NULL);
    pthread_mutex_init(&d->turn, NULL);
    cudaError_t error = nib_cuda_enter(ordinal, &before);
    if (!error)
        error = open_device(d);
    const nib_status status = nib_cuda_status(d, "making a device", error);
    nib_cuda_leave(before);
    if (!status) {
        *out = &d->base;
        return NIB_OK;
    }
    pthread_mutex_destroy(&d->lock);
    pthread_mutex_destroy(&d->turn);
    nib_free(d);
    return status;
}

nib_status nib_cuda_create(int ordinal, void *stream, nib_device **out) { return create(ordinal, stream, false, out); }

nib_status nib_cuda_create_stream(int ordinal, nib_device **out) { return create(ordinal, NULL, true, out); }

/* ---- About GPUs and streams ---- */

nib_status nib_cuda_count(int *count)
{
    NIB_REQUIRE(count);
    int found = 0;
    if (cudaGetDeviceCount(&found)) {
        (void)cudaGetLastError();
        found = 0;
    }
    *count = found;
    return NIB_OK;
}

nib_status nib_cuda_describe(int ordinal, char *text, size_t bytes)
{
    NIB_REQUIRE(text);
    struct cudaDeviceProp facts;
    const cudaError_t error = cudaGetDeviceProperties(&facts, ordinal);
    if (error) {
        (void)cudaGetLastError();
        return nib_fail(NIB_ERR_DEVICE, "cuda:%d: %s", ordinal, cudaGetErrorString(error));
    }
    snprintf(text, bytes, "%s, sm_%d%d, %zu GiB", facts.name, facts.major, facts.minor,
             (size_t)facts.totalGlobalMem >> 30);
    return NIB_OK;
}

static nib_status check_cuda(const nib_device *device)
{
    if (device && device->ops == &cuda_ops)
        return NIB_OK;
    return nib_fail(NIB_ERR_ARG, "%s is not a device of libnib_cuda", nib_device_name(device));
}

nib_status nib_cuda_stream(nib_device *device, void **stream)
{
    NIB_REQUIRE(stream);
    TRY(check_cuda(device));
    *stream = nib_cuda_device_of(device)->queue.stream;
    return NIB_OK;
}

nib_status nib_cuda_set_allocator(nib_device *device, const nib_cuda_allocator *allocator)
{
    nib_cuda_allocator known = { 0 };
    TRY(check_cuda(device));
    if (allocator)
        TRY(nib_struct_read("nib_cuda_allocator", allocator, &known, sizeof known, sizeof known));
    if (!known.allocate != !known.release || (allocator && !known.allocate))
        return nib_fail(NIB_ERR_ARG, "an allocator allocates and releases: one of its functions is NULL");
    nib_cuda_device_of(device)->allocator = known;
    return NIB_OK;
}

nib_status nib_cuda_synchronize(nib_device *device)
{
    TRY(check_cuda(device));
    ON_DEVICE(device, "waiting", cudaStreamSynchronize(d->queue.stream));
}

/* ---- Measuring ---- */

static int by_value(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static cudaError_t replay(cudaGraphExec_t graph, cudaStream_t stream, float *milliseconds, int n)
{
    cudaEvent_t begin = NULL, end = NULL;
    cudaError_t error = cudaEventCreate(&begin);
    if (!error)
        error = cudaEventCreate(&end);
    for (int i = -2; i < n && !error; i++) { /* the first ones warm up */
        error = cudaEventRecord(begin, stream);
        if (!error)
            error = cudaGraphLaunch(graph, stream);
        if (!error)
            error = cudaEventRecord(end, stream);
        if (!error)
            error = cudaEventSynchronize(end);
        if (!error && i >= 0)
            error = cudaEventElapsedTime(&milliseconds[i], begin, end);
    }
    (void)cudaEventDestroy(begin);
    (void)cudaEventDestroy(end);
    return error;
}

/* The calls as a graph; a status of theirs is in *status. */
static cudaError_t capture(cudaStream_t stream, nib_status (*enqueue)(void *context), void *context,
                           cudaGraphExec_t *out, nib_status *status)
{
    cudaGraph_t graph = NULL;
    cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (error)
        return error;
    *status = enqueue(context);
    error = cudaStreamEndCapture(stream, &graph);
    if (!error && !*status)
        error = cudaGraphInstantiate(out, graph, 0);
    if (graph)
        (void)cudaGraphDestroy(graph);
    if (*status) /* what failed in the call has also ended the capture */
        (void)cudaGetLastError();
    return *status ? cudaSuccess : error;
}

static cudaError_t measure(const struct nib_cuda_device *d, nib_status (*enqueue)(void *context), void *context,
                           int repetitions, float *milliseconds, nib_status *status)
{
    cudaGraphExec_t graph = NULL;
    *status = enqueue(context); /* once as they are: whatever is loaded at a first call is loaded then */
    cudaError_t error = *status ? cudaSuccess : cudaStreamSynchronize(d->queue.stream);
    if (!error && !*status)
        error = capture(d->queue.stream, enqueue, context, &graph, status);
    if (!error && !*status)
        error = replay(graph, d->queue.stream, milliseconds, repetitions);
    if (graph)
        (void)cudaGraphExecDestroy(graph);
    return error;
}

nib_status nib_cuda_measure(nib_device *device, nib_status (*enqueue)(void *context), void *context, int repetitions,
                            double *seconds)
{
    TRY(check_cuda(device));
    NIB_REQUIRE(enqueue);
    NIB_REQUIRE(seconds);
    if (repetitions < 1)
        return nib_fail(NIB_ERR_ARG, "there is at least one repetition, not %d", repetitions);
    struct nib_cuda_device *const d = nib_cuda_device_of(device);
    float *const milliseconds = nib_alloc((size_t)repetitions * sizeof *milliseconds);
    if (!milliseconds)
        return nib_fail(NIB_ERR_MEMORY, "no memory for %d measurements", repetitions);
    int before;
    nib_status status = NIB_OK;
    cudaError_t error = nib_cuda_enter(d->queue.ordinal, &before);
    if (!error)
        error = measure(d, enqueue, context, repetitions, milliseconds, &status);
    if (error)
        status = nib_cuda_status(d, "measuring", error);
    nib_cuda_leave(before);
    if (!status) {
        qsort(milliseconds, (size_t)repetitions, sizeof *milliseconds, by_value);
        *seconds = milliseconds[repetitions / 2] * 1e-3;
    }
    nib_free(milliseconds);
    return status;
}

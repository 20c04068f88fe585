/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runtime.c - CUDA's runtime for a GPU that is the host. Memory is filled with something before it is handed out, and
 * what a stream may not do while it is captured fails, as on a GPU.
 */
#include "cuda_runtime_api.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__SANITIZE_ADDRESS__)
#define POISONS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define POISONS 1
#endif
#endif
#ifdef POISONS
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, bytes) ((void)(memory), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, bytes) ((void)(memory), (void)(bytes))
#endif

long shim_fail_allocation, shim_allocated, shim_waits, shim_allocations;
void (*shim_meanwhile)(void);
long shim_meanwhile_after;

enum { GPUS = 2, FILLER = 0xA5 };
static _Thread_local int current;
static _Thread_local cudaError_t last;
static _Thread_local enum cudaStreamCaptureMode thread_mode;

/* What a graph does at a replay. */
struct work {
    void (*run)(const void *job);
    void *job;
};
struct shim_graph {
    struct work *work;
    size_t n;
    int references, invalid;
    enum cudaStreamCaptureMode mode; /* of its capture, and the thread that began it */
    pthread_t thread;
    struct shim_graph *next;
};
static struct shim_graph *captures; /* under way */
static pthread_mutex_t capturing = PTHREAD_MUTEX_INITIALIZER;
struct shim_stream {
    struct shim_graph *captured;
};
struct shim_event {
    struct timespec at;
};

static cudaError_t fail(cudaError_t error)
{
    if (error)
        last = error;
    return error;
}

/* ---- Devices ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = GPUS;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device)
{
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= GPUS)
        return fail(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    if (device < 0 || device >= GPUS)
        return fail(cudaErrorInvalidDevice);
    *out = (struct cudaDeviceProp){ .totalGlobalMem = (size_t)1 << 30 };
    snprintf(out->name, sizeof out->name, "the host");
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device)
{
    const int major = device == 0 ? 9 : 10; /* the second one has FP4 tensor cores */
    *out = attribute == cudaDevAttrComputeCapabilityMajor ? major : 2;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    }
    return "unknown error";
}

/* ---- Order ---- */

static int is_captured(cudaStream_t stream) { return stream && stream->captured; }

/* The graph frees the job. */
static cudaError_t add_work(struct shim_graph *graph, void (*run)(const void *job), void *job)
{
    struct work *const work = realloc(graph->work, (graph->n + 1) * sizeof *work);
    if (!work)
        abort();
    graph->work = work;
    work[graph->n++] = (struct work){ run, job };
    return cudaSuccess;
}

cudaError_t shim_enqueue(cudaStream_t stream, void (*run)(const void *job), const void *job, size_t bytes)
{
    if (shim_meanwhile && shim_meanwhile_after-- == 0) {
        void (*const call)(void) = shim_meanwhile;
        shim_meanwhile = NULL;
        call();
    }
    if (!is_captured(stream)) {
        run(job);
        return cudaSuccess;
    }
    void *const copy = malloc(bytes);
    if (!copy)
        abort();
    memcpy(copy, job, bytes);
    return add_work(stream->captured, run, copy);
}

/* What a thread may not call while it captures, or another does for all threads, but where it says that it knows: it fails
 * and ends these captures. */
static cudaError_t unsafe(void)
{
    int forbidden = 0;
    pthread_mutex_lock(&capturing);
    for (struct shim_graph *graph = captures; graph && thread_mode != cudaStreamCaptureModeRelaxed; graph = graph->next)
        if (graph->mode == cudaStreamCaptureModeGlobal ||
            (graph->mode == cudaStreamCaptureModeThreadLocal && pthread_equal(graph->thread, pthread_self())))
            forbidden = graph->invalid = 1;
    pthread_mutex_unlock(&capturing);
    return forbidden ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

/* ---- Memory ---- */

struct memory {
    void *to;
    const void *from;
    size_t bytes;
    int value;
};

static void run_copy(const void *job)
{
    const struct memory *const m = job;
    memmove(m->to, m->from, m->bytes);
}
static void run_set(const void *job)
{
    const struct memory *const m = job;
    memset(m->to, m->value, m->bytes);
}

/* Large memory that was freed is kept for who wants as much: from the system it would be fresh pages at each device. */
enum { LARGE = 1 << 16, KEPT = 4, WORKSPACE = 32 << 20, FILLED = 1 << 16 };
static struct block {
    size_t bytes;
    void *memory;
    int taken;
} kept[KEPT];
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;

static void *take(size_t bytes)
{
    void *memory = NULL;
    pthread_mutex_lock(&keeping);
    for (int i = 0; i < KEPT && bytes >= LARGE && !memory; i++)
        if (kept[i].memory && !kept[i].taken && kept[i].bytes == bytes) {
            kept[i].taken = 1;
            memory = kept[i].memory;
            ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
        }
    if (!memory)
        memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    for (int i = 0, known = 0; i < KEPT && bytes >= LARGE && memory && !known; i++) {
        known = kept[i].memory == memory;
        if (!kept[i].memory) {
            kept[i] = (struct block){ bytes, memory, 1 };
            known = 1;
        }
    }
    pthread_mutex_unlock(&keeping);
    return memory;
}

static void give(void *memory)
{
    int i = 0;
    pthread_mutex_lock(&keeping);
    while (memory && i < KEPT && kept[i].memory != memory)
        i++;
    if (!memory || i == KEPT)
        free(memory);
    else if (!kept[i].taken)
        abort();
    else {
        kept[i].taken = 0;
        ASAN_POISON_MEMORY_REGION(memory, kept[i].bytes);
    }
    pthread_mutex_unlock(&keeping);
}

static cudaError_t allocate(void **out, size_t bytes)
{
    shim_allocations++;
    if (shim_fail_allocation && --shim_fail_allocation == 0)
        return fail(cudaErrorMemoryAllocation);
    void *const memory = bytes < (size_t)1 << 40 ? take(bytes) : NULL;
    if (!memory)
        return fail(cudaErrorMemoryAllocation);
    memset(memory, FILLER, bytes < WORKSPACE ? bytes : FILLED);
    shim_allocated++;
    *out = memory;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **out, size_t bytes)
{
    const cudaError_t error = unsafe();
    return error ? error : allocate(out, bytes);
}
cudaError_t cudaFree(void *memory)
{
    const cudaError_t error = memory ? unsafe() : cudaSuccess;
    if (error)
        return error;
    shim_allocated -= memory != NULL;
    give(memory);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    return allocate(out, bytes);
}
static void run_nothing(const void *job) { (void)job; }
/* A graph's memory would be allocated at each replay: here it is kept until the graph goes, as the job of one that does
 * nothing. */
cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream)
{
    shim_allocated--;
    if (is_captured(stream))
        return add_work(stream->captured, run_nothing, memory);
    give(memory);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    const struct memory m = { memory, NULL, bytes, value };
    return shim_enqueue(stream, run_set, &m, sizeof m);
}
cudaError_t cudaMemset(void *memory, int value, size_t bytes) { return cudaMemsetAsync(memory, value, bytes, NULL); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    const struct memory m = { to, from, bytes, 0 };
    const char *const a = to, *const b = from;
    if (kind == cudaMemcpyDeviceToDevice && a < b + bytes && b < a + bytes)
        return fail(cudaErrorInvalidValue); /* a GPU would not say so, and copy anything */
    return shim_enqueue(stream, run_copy, &m, sizeof m);
}

/* ---- Streams and graphs ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    (void)flags;
    *out = calloc(1, sizeof **out);
    return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    shim_waits++;
    if (!is_captured(stream))
        return cudaSuccess;
    stream->captured->invalid = 1;
    return fail(cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out)
{
    *out = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    const enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    if (!stream || stream->captured)
        return fail(cudaErrorStreamCaptureUnsupported);
    stream->captured = calloc(1, sizeof *stream->captured);
    if (!stream->captured)
        return fail(cudaErrorMemoryAllocation);
    stream->captured->references = 1;
    stream->captured->mode = mode;
    stream->captured->thread = pthread_self();
    pthread_mutex_lock(&capturing);
    stream->captured->next = captures;
    captures = stream->captured;
    pthread_mutex_unlock(&capturing);
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    *out = stream->captured;
    stream->captured = NULL;
    pthread_mutex_lock(&capturing);
    struct shim_graph **at = &captures;
    while (*at != *out)
        at = &(*at)->next;
    *at = (*out)->next;
    pthread_mutex_unlock(&capturing);
    if (!(*out)->invalid)
        return cudaSuccess;
    (void)cudaGraphDestroy(*out);
    *out = NULL;
    return fail(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    graph->references++;
    *out = graph;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    (void)stream;
    for (size_t i = 0; i < graph->n; i++)
        graph->work[i].run(graph->work[i].job);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    if (--graph->references)
        return cudaSuccess;
    for (size_t i = 0; i < graph->n; i++)
        give(graph->work[i].job); /* or memory of the device */
    free(graph->work);
    free(graph);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy(graph); }

/* ---- Events ---- */

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    *out = calloc(1, sizeof **out);
    return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)stream;
    timespec_get(&event->at, TIME_UTC);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    *milliseconds =
        (float)(end->at.tv_sec - begin->at.tv_sec) * 1e3f + (float)(end->at.tv_nsec - begin->at.tv_nsec) * 1e-6f;
    return cudaSuccess;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.cpp - the kernels run by the host: launch.cu without a GPU. All threads of a thread block go through a phase,
 * then through the next; thread blocks follow one another.
 */
#include "launch.h"

#include <memory>
#include <vector>

#include "choose.cuh"
#include "layout.cuh"
#include "product.cuh"

thread_local uint64_t shim_launches;

/* Shared memory has whatever was there before. */
template <class K> struct thread_block {
    typename K::shared shared;
    std::vector<typename K::state> states;
    thread_block() : states(K::SIZE)
    {
        memset((void *)&shared, 0xA5, sizeof shared);
        memset((void *)states.data(), 0xA5, states.size() * sizeof(typename K::state));
    }
};

template <class K, int P>
static void run_phases(const typename K::job &job, thread_block<K> &b, uint32_t tile, uint32_t tiles)
{
    for (int t = 0; t < K::SIZE; t++)
        K::template phase<P>(job, b.shared, b.states[(size_t)t], tile, tiles, t);
    if constexpr (P + 1 < K::PHASES)
        run_phases<K, P + 1>(job, b, tile, tiles);
}

template <class K> static void run_kernel(const typename K::job &job, uint32_t tiles, uint32_t grid)
{
    if (is_stopped(job))
        return;
    shim_launches++;
    for (uint32_t block = 0; block < grid; block++) {
        const std::unique_ptr<thread_block<K>> b(new thread_block<K>);
        for (int t = 0; t < K::SIZE && K::PERSISTENT; t++)
            K::begin(job, b->shared, b->states[(size_t)t], t, block == 0);
        for (uint32_t tile = block; tile < tiles; tile += grid)
            run_phases<K, 0>(job, *b, tile, tiles);
        if constexpr (K::ENDS) {
            for (int t = 0; t < K::SIZE; t++)
                K::gather(job, b->shared, b->states[(size_t)t], t);
            for (int t = 0; t < K::SIZE; t++)
                K::finish(job, b->shared, t, grid);
        }
    }
}

struct host_launcher {
    template <class K> void operator()(const typename K::job &job)
    {
        enum { RESIDENT = 3 }; /* so that thread blocks have several tiles each */
        const uint32_t tiles = K::tiles(job);
        if (tiles || K::ENDS)
            run_kernel<K>(job, tiles, tiles < 1 ? 1 : tiles < RESIDENT || !K::PERSISTENT ? tiles : (uint32_t)RESIDENT);
    }
};

template <class Job> static void run_job(const void *job)
{
    host_launcher run;
    const Job &j = *(const Job *)job;
    if (j.dtype == NIB_BF16)
        choose<NIB_BF16>(j, run);
    else if (j.dtype == NIB_F16)
        choose<NIB_F16>(j, run);
    else
        choose<NIB_F32>(j, run);
}

template <class Job> static cudaError_t launch(const nib_cuda_queue *queue, const Job *job)
{
    return shim_enqueue(queue->stream, run_job<Job>, job, sizeof *job);
}

cudaError_t nib_cuda_launch_quantize(const nib_cuda_queue *queue, const nib_cuda_quantization *job)
{
    return launch(queue, job);
}
cudaError_t nib_cuda_launch_dequantize(const nib_cuda_queue *queue, const nib_cuda_dequantization *job)
{
    return launch(queue, job);
}
cudaError_t nib_cuda_launch_amax(const nib_cuda_queue *queue, const nib_cuda_amax *job) { return launch(queue, job); }
cudaError_t nib_cuda_launch_few_rows(const nib_cuda_queue *queue, const nib_cuda_few_rows *job)
{
    return launch(queue, job);
}

static void run_copy(const void *job)
{
    host_launcher run;
    run.operator()<copy_quads>(*(const nib_cuda_copy *)job);
}

cudaError_t nib_cuda_launch_copy(const nib_cuda_queue *queue, const nib_cuda_copy *job)
{
    return shim_enqueue(queue->stream, run_copy, job, sizeof *job);
}

template <class Item> struct items {
    typename Item::job job;
    int64_t n;
};

template <class Item> static void run_items(const void *job)
{
    const items<Item> &all = *(const items<Item> *)job;
    for (int64_t i = all.n - 1; i >= 0; i--) /* in whatever order */
        Item::at(all.job, i);
}

template <class Item>
static cudaError_t launch_items(const nib_cuda_queue *queue, const typename Item::job *job, int64_t n)
{
    const items<Item> all = { *job, n };
    return n <= 0 ? cudaSuccess : shim_enqueue(queue->stream, run_items<Item>, &all, sizeof all);
}

#include "items.inc"

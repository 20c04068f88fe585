/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.cuh - kernels.cuh as kernels of a device. launch_DTYPE.cu make those of a dtype, so that they are compiled side
 * by side; launch.cu asks for them.
 */
#ifndef NIB_CUDA_LAUNCH_CUH
#define NIB_CUDA_LAUNCH_CUH

#include "choose.cuh"
#include "launch.h"
#include "product.cuh"

template <class K, int P>
static __device__ __forceinline__ void run_phases(const typename K::job &job, typename K::shared &shared,
                                                  typename K::state &state, uint32_t tile, uint32_t tiles)
{
    K::template phase<P>(job, shared, state, tile, tiles, (int)threadIdx.x);
    if constexpr (P + 1 < K::PHASES) {
        if constexpr (P == 0 && (int)K::BARRIER_AFTER_FIRST == (int)WARP_BARRIER)
            __syncwarp();
        else
            __syncthreads();
        run_phases<K, P + 1>(job, shared, state, tile, tiles);
    }
}

/* Thread blocks for which a kernel's registers must do: some processors have 1536 threads instead of 2048. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define NIB_CUDA_RESIDENT(blocks) ((blocks) < 6 ? (blocks) : 6)
#else
#define NIB_CUDA_RESIDENT(blocks) (blocks)
#endif

template <class K>
__global__ void __launch_bounds__(K::SIZE, NIB_CUDA_RESIDENT(K::BLOCKS))
    run_kernel(const __grid_constant__ typename K::job job, uint32_t tiles)
{
    __shared__ typename K::shared shared;
    typename K::state state;
    static_assert(K::PERSISTENT || !K::ENDS, "nothing comes after the tile of a kernel that has one");
    if (is_stopped(job))
        return;
    if constexpr (K::PERSISTENT) {
        K::begin(job, shared, state, (int)threadIdx.x, blockIdx.x == 0);
        __syncthreads();
        for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
            run_phases<K, 0>(job, shared, state, tile, tiles);
    } else { /* a loop of one turn takes registers: few_rows spilled */
        run_phases<K, 0>(job, shared, state, blockIdx.x, tiles);
    }
    if constexpr (K::ENDS) {
        K::gather(job, shared, state, (int)threadIdx.x);
        __syncthreads();
        K::finish(job, shared, (int)threadIdx.x, gridDim.x);
    }
}

/* Thread blocks that a processor holds at once: more would fill their tables for nothing, fewer leave it idle. */
template <class K> static cudaError_t resident_blocks(int ordinal, int *out)
{
    enum { DEVICES = 64 };
    static int known[DEVICES]; /* by ordinal; every thread finds the same */
    int blocks = ordinal < DEVICES ? __atomic_load_n(&known[ordinal], __ATOMIC_RELAXED) : 0;
    if (!blocks) {
        const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, run_kernel<K>, K::SIZE, 0);
        if (error)
            return error;
        if (ordinal < DEVICES)
            __atomic_store_n(&known[ordinal], blocks, __ATOMIC_RELAXED);
    }
    *out = blocks ? blocks : 1;
    return cudaSuccess;
}

struct launcher {
    const nib_cuda_queue *queue;
    cudaError_t error;

    template <class K> void operator()(const typename K::job &job)
    {
        const uint32_t tiles = K::tiles(job);
        int blocks = 0;
        if (!error && (tiles || K::ENDS))
            error = resident_blocks<K>(queue->ordinal, &blocks);
        if (error || !blocks)
            return;
        const int64_t resident = (int64_t)blocks * queue->processors;
        const uint32_t grid = tiles < 1 ? 1 : tiles < resident || !K::PERSISTENT ? tiles : (uint32_t)resident;
        void *arguments[] = { (void *)&job, (void *)&tiles };
        error = cudaLaunchKernel((const void *)run_kernel<K>, dim3(grid), dim3(K::SIZE), arguments, 0, queue->stream);
    }
};

/* A job whose values have this dtype. */
template <nib_dtype D, class Job> cudaError_t launch_as(const nib_cuda_queue *queue, const Job *job)
{
    launcher run = { queue, cudaSuccess };
    choose<D>(*job, run);
    return run.error;
}

#define LAUNCHES_OF(linkage, dtype)                                                                         \
    linkage template cudaError_t launch_as<dtype>(const nib_cuda_queue *, const nib_cuda_quantization *);   \
    linkage template cudaError_t launch_as<dtype>(const nib_cuda_queue *, const nib_cuda_dequantization *); \
    linkage template cudaError_t launch_as<dtype>(const nib_cuda_queue *, const nib_cuda_amax *);           \
    linkage template cudaError_t launch_as<dtype>(const nib_cuda_queue *, const nib_cuda_few_rows *);

#endif

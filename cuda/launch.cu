/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.cu - the calls of launch.h: kernels by dtype, and layout.cuh an item a thread.
 */
#include "launch.cuh"
#include "layout.cuh"

LAUNCHES_OF(extern, NIB_F32)
LAUNCHES_OF(extern, NIB_BF16)
LAUNCHES_OF(extern, NIB_F16)

template <class Job> static cudaError_t launch(const nib_cuda_queue *queue, const Job *job)
{
    return job->dtype == NIB_BF16  ? launch_as<NIB_BF16>(queue, job)
           : job->dtype == NIB_F16 ? launch_as<NIB_F16>(queue, job)
                                   : launch_as<NIB_F32>(queue, job);
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

cudaError_t nib_cuda_launch_copy(const nib_cuda_queue *queue, const nib_cuda_copy *job)
{
    launcher run = { queue, cudaSuccess };
    run.operator()<copy_quads>(*job);
    return run.error;
}

/* ---- Items ---- */

template <class Item>
__global__ void __launch_bounds__(THREADS) run_items(const __grid_constant__ typename Item::job job, int64_t n)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * THREADS)
        Item::at(job, i);
}

template <class Item>
static cudaError_t launch_items(const nib_cuda_queue *queue, const typename Item::job *job, int64_t n)
{
    if (n <= 0)
        return cudaSuccess;
    const int64_t blocks = (n + THREADS - 1) / THREADS, most = (int64_t)queue->processors * 16;
    void *arguments[] = { (void *)job, (void *)&n };
    return cudaLaunchKernel((const void *)run_items<Item>, dim3((unsigned)(blocks < most ? blocks : most)),
                            dim3(THREADS), arguments, 0, queue->stream);
}

#include "items.inc"

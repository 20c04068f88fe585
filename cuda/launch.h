/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.h - kernels behind plain calls: they choose one, launch it on a stream of the current CUDA device and return a
 * cudaError_t. None waits or allocates.
 */
#ifndef NIB_CUDA_LAUNCH_H
#define NIB_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "job.h"

#ifdef __cplusplus
extern "C" {
#endif

struct nib_cuda_queue {
    cudaStream_t stream;
    int ordinal, processors;
};

cudaError_t nib_cuda_launch_quantize(const struct nib_cuda_queue *queue, const struct nib_cuda_quantization *job);
cudaError_t nib_cuda_launch_dequantize(const struct nib_cuda_queue *queue, const struct nib_cuda_dequantization *job);
cudaError_t nib_cuda_launch_copy(const struct nib_cuda_queue *queue, const struct nib_cuda_copy *job);
cudaError_t nib_cuda_launch_amax(const struct nib_cuda_queue *queue, const struct nib_cuda_amax *job);

cudaError_t nib_cuda_launch_few_rows(const struct nib_cuda_queue *queue, const struct nib_cuda_few_rows *job);

/* An item a thread, n of them. */
enum nib_cuda_item {
    NIB_CUDA_RECTANGLE_CODES,
    NIB_CUDA_RECTANGLE_SCALES,
    NIB_CUDA_REPACK,
    NIB_CUDA_SWIZZLE,
    NIB_CUDA_UNSWIZZLE,
    NIB_CUDA_TRANSPOSED_CODES,
    NIB_CUDA_TRANSPOSED_SCALES,
    NIB_CUDA_EQUAL_SCALES
};
cudaError_t nib_cuda_launch_layout(const struct nib_cuda_queue *queue, enum nib_cuda_item item,
                                   const struct nib_cuda_layout *job, int64_t n);
cudaError_t nib_cuda_launch_equal(const struct nib_cuda_queue *queue, const struct nib_cuda_bytes *job, int64_t n);
cudaError_t nib_cuda_launch_fill(const struct nib_cuda_queue *queue, const struct nib_cuda_fill *job, int64_t n);
cudaError_t nib_cuda_launch_finish(const struct nib_cuda_queue *queue, const struct nib_cuda_finish *job);
cudaError_t nib_cuda_launch_clear(const struct nib_cuda_queue *queue, const struct nib_cuda_finish *job);
cudaError_t nib_cuda_launch_gather(const struct nib_cuda_queue *queue, const struct nib_cuda_gather *job, int64_t n);

cudaError_t nib_cuda_launch_product_output(const struct nib_cuda_queue *queue,
                                           const struct nib_cuda_product_output *job, int64_t n);
cudaError_t nib_cuda_launch_product_factors(const struct nib_cuda_queue *queue,
                                            const struct nib_cuda_product_factors *job);

#ifdef __cplusplus
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_cuda.h - NVIDIA GPUs as devices of nib: libnib_cuda. The rules of nib.h hold; this header needs no CUDA.
 *
 * A device is a GPU and a stream. Arrays, buffers and tensors on it have device pointers, and the calls of nib.h on them
 * put their work on that stream and return. All devices of one GPU are one device to nib: a call uses the stream of its
 * array or, without one, of its tensor, and to order streams is up to the caller, as always with CUDA.
 *
 * Supported are tensors of NVFP4 of the dialect te with all options but amax_comm: nib_quantize, nib_quantize_into,
 * nib_fake_quantize; dequantizing NVFP4 of every dialect, and products of it; and for tensors of all formats what moves
 * bytes: nib_tensor_to, clone, copy, zero, view, slice, split, equal, swizzle, unswizzle, update_usage, saving. Everything
 * else is NIB_ERR_UNSUPPORTED.
 *
 * Calls that quantize into a tensor that has its buffers, dequantize, or do both (nib_fake_quantize) neither wait for the
 * GPU nor allocate, and can be captured in a CUDA graph, which then may be replayed on any stream. Two cases allocate on
 * the stream, and can be captured too: arrays whose rows do not lie side by side or not at equal distances, and
 * nib_fake_quantize with an amax per line. A captured call that looks for an amax, nib_fake_quantize always, has 32 bytes
 * of the GPU that the device keeps (one such call in 4096 allocates), so that the device must outlive the graph.
 * Devices, buffers and tensors can be made and released while streams are captured, by whichever thread: their memory is
 * allocated, zeroed and freed at once, not by the graph. What overrides point to is on the GPU, and its values are not
 * looked at.
 *
 * nib_gemm and nib_gemm_grouped multiply two NVFP4 operands, or one and plain values, which are not rounded. Tensor cores
 * add up, in an order that depends on the sizes and the GPU, within the bound of docs/numerics.md 14. Up to 64 rows read
 * packed weights; more need cuBLASLt, which is loaded then (libcublasLt.so.13 or .12, or what NIB_CUBLASLT_LIBRARY names),
 * and memory of the device, which grows to what its largest product needs and stays: 2 bytes for an element of a quantized
 * operand (4 where activations are F32), 32 MiB, and 4 bytes for an output that cuBLASLt cannot write itself. A captured
 * product has its memory from the graph, and a device with an allocator (below) from that. GPUs with FP4 tensor cores
 * (sm_100 and later) multiply two NVFP4 operands as they are, by unsigned scales: the sign of a scale is not looked at.
 */
#ifndef NIB_CUDA_H
#define NIB_CUDA_H

#include "nib.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How many GPUs there are; 0 where there is no driver, or none that works. */
NIB_API nib_status nib_cuda_count(int *count);

/* What a GPU is: "NVIDIA H200, sm_90, 139 GiB"; ends in 0, cut to `bytes`. */
NIB_API nib_status nib_cuda_describe(int ordinal, char *text, size_t bytes);

/* GPU `ordinal` and a cudaStream_t of the caller's, which must outlive the device and everything on it; NULL is the
 * default stream. The runtime's current device stays as it is. DEVICE where there is no such GPU, or it does not work. */
NIB_API nib_status nib_cuda_create(int ordinal, void *stream, nib_device **out);

/* The same with a stream of its own, which does not wait for the default stream. */
NIB_API nib_status nib_cuda_create_stream(int ordinal, nib_device **out);

/* Its cudaStream_t; ARG for a device that is not libnib_cuda's. */
NIB_API nib_status nib_cuda_stream(nib_device *device, void **stream);

/* Wait until the stream has done everything. DEVICE where something on the GPU has failed since. */
NIB_API nib_status nib_cuda_synchronize(nib_device *device);

/* Where calls get the memory that they need besides their arguments. allocate: `bytes` of the GPU's memory for work on
 * the stream, aligned to 256, or NULL. release: the call has enqueued all of its work there, which need not be done. Both
 * are called by the thread of the call, in captures too, and call nothing of nib. */
typedef struct nib_cuda_allocator {
    size_t bytes; /* of this struct */
    void *context;
    void *(*allocate)(void *context, size_t bytes, void *stream);
    void (*release)(void *context, void *memory, void *stream);
} nib_cuda_allocator;

/* From now on that; NULL: CUDA's memory pool, which devices begin with. Products then keep no memory of their own. Not
 * beside other calls on this device. */
NIB_API nib_status nib_cuda_set_allocator(nib_device *device, const nib_cuda_allocator *allocator);

/* How long the GPU takes for the calls that `enqueue(context)` makes on this device: they are made once, captured as a
 * graph, and the graph is replayed `repetitions` times; *seconds is the median of its replays. Waits. The device has a
 * stream other than the default one. A status of enqueue's is passed on. */
NIB_API nib_status nib_cuda_measure(nib_device *device, nib_status (*enqueue)(void *context), void *context,
                                    int repetitions, double *seconds);

#ifdef __cplusplus
}
#endif

#endif /* NIB_CUDA_H */

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_dlpack.h - exchange of plain arrays and of a tensor's parts by DLPack, without a copy.
 */
#ifndef NIB_DLPACK_H
#define NIB_DLPACK_H

#include "nib.h"

#ifdef __cplusplus
extern "C" {
#endif

struct DLManagedTensor;          /* DLPack before 1.0 */
struct DLManagedTensorVersioned; /* DLPack 1.x */

/* View a DLPack tensor without a copy and without taking it over: it must outlive `out`. `device` becomes that of the
 * array; DEVICE where the tensor does not lie there (on the host: memory of the CPU, pinned memory included). A view does
 * not remember that a tensor is read-only: do not write to such a view. */
NIB_API nib_status nib_array_from_dlpack(const struct DLManagedTensor *managed, nib_device *device, nib_array *out);
NIB_API nib_status nib_array_from_dlpack_versioned(const struct DLManagedTensorVersioned *managed, nib_device *device,
                                                   nib_array *out);

/* Take over a C-contiguous DLPack tensor of that device: its deleter runs when the last reference to the buffer goes. ARG
 * for one that is read-only. */
NIB_API nib_status nib_buffer_from_dlpack(struct DLManagedTensor *managed, nib_device *device, nib_buffer **out);
NIB_API nib_status nib_buffer_from_dlpack_versioned(struct DLManagedTensorVersioned *managed, nib_device *device,
                                                    nib_buffer **out);

/* A plain array as a DLPack tensor for somebody else. `owner` is retained until its deleter runs; NULL if the memory
 * outlives the tensor anyway. */
NIB_API nib_status nib_array_to_dlpack(const nib_array *array, nib_buffer *owner, struct DLManagedTensor **out);
NIB_API nib_status nib_array_to_dlpack_versioned(const nib_array *array, nib_buffer *owner,
                                                 struct DLManagedTensorVersioned **out);

/* A part as a DLPack tensor that keeps the buffer alive until its deleter runs. Packed codes and scales leave as
 * uint8. */
NIB_API nib_status nib_tensor_to_dlpack(const nib_tensor *t, nib_part part, struct DLManagedTensor **out);
NIB_API nib_status nib_tensor_to_dlpack_versioned(const nib_tensor *t, nib_part part,
                                                  struct DLManagedTensorVersioned **out);

#ifdef __cplusplus
}
#endif

#endif /* NIB_DLPACK_H */

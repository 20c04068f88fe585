/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_cuda.c - fuzz_api.c with a GPU as the other device, whose kernels the host runs (cuda/shim): what it takes has the
 * bytes of the same model; it may say that it does not take something, and products keep to their bound.
 */
#define NIB_FUZZ_CUDA
#include "fuzz_api.c" /* NIB_TEST_WRAP_ALLOC */

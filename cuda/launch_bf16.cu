/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch_bf16.cu - the kernels for values of BF16.
 */
#include "launch.cuh"

LAUNCHES_OF(, NIB_BF16)

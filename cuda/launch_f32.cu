/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch_f32.cu - the kernels for values of F32.
 */
#include "launch.cuh"

LAUNCHES_OF(, NIB_F32)

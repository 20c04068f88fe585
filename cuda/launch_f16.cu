/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch_f16.cu - the kernels for values of F16.
 */
#include "launch.cuh"

LAUNCHES_OF(, NIB_F16)

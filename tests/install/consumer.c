/* SPDX-License-Identifier: Apache-2.0 */
/* A user of the installed library: exit 0 when it is the version of the header, encodes and quantizes. */
#include <nib.h>
#include <nib_reference.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    if (strcmp(nib_version(), NIB_VERSION))
        return fprintf(stderr, "library %s, header %s\n", nib_version(), NIB_VERSION), 1;

    const float pair[2] = { 0.5f, -6.0f };
    unsigned char byte = 0;
    if (nib_encode(NIB_E2M1, pair, 2, &byte) || byte != 0xF1)
        return fprintf(stderr, "nib_encode: %02x %s\n", byte, nib_last_error()), 1;

    /* A block whose largest magnitude is 6 times a power of two is kept exactly. */
    float x[16] = { 6, -4, 3, 2, 1.5f, 1, -0.5f, 0, 6, 0, 0, 1, 2, -3, 4, -6 }, y[16];
    const int64_t shape[2] = { 1, 16 };
    nib_quantizer q;
    nib_array in, out;
    nib_tensor *t = NULL;
    nib_quantizer_init(&q);
    if (nib_quantizer_set_usage(&q, 1, 0) || nib_array_init(&in, x, NIB_F32, 2, shape) ||
        nib_array_init(&out, y, NIB_F32, 2, shape) || nib_quantize(&q, &in, NULL, &t) ||
        nib_dequantize(t, NIB_ROWWISE, &out))
        return fprintf(stderr, "%s\n", nib_last_error()), 1;
    nib_tensor_destroy(t);
    for (int i = 0; i < 16; i++)
        if (x[i] != y[i])
            return fprintf(stderr, "element %d: %g came back as %g\n", i, (double)x[i], (double)y[i]), 1;
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.c - one block before and after, the transform on an outlier, three scale rules compared.
 * It checks what it says: exit status 1 if a number is not what it should be.
 */
#include <math.h>
#include <nib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nib_reference.h"
enum { BLOCK = 16, ROWS = 256, COLS = 1024 };

static void check(int holds, const char *claim)
{
    if (!holds) {
        printf("WRONG: %s\n", claim);
        exit(1);
    }
}

/* A demo may give up at the first error; a program would pass the message on. */
static void need(nib_status status) { check(!status, nib_last_error()); }

static nib_quantizer rowwise_only(void)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    need(nib_quantizer_set_usage(&q, 1, 0));
    return q;
}

/* Quantize x and write to y what came of it; the caller destroys the tensor. */
static nib_tensor *there_and_back(nib_quantizer q, float *x, float *y, int64_t rows, int64_t cols,
                                  const nib_overrides *overrides)
{
    nib_array in, out;
    nib_tensor *t = NULL;
    need(nib_array_init(&in, x, NIB_F32, 2, (const int64_t[2]){ rows, cols }));
    need(nib_array_init(&out, y, NIB_F32, 2, (const int64_t[2]){ rows, cols }));
    need(nib_quantize(&q, &in, overrides, &t));
    need(nib_dequantize(t, NIB_ROWWISE, &out));
    return t;
}

static const void *part(const nib_tensor *t, nib_part which) { return nib_buffer_data(nib_tensor_buffer(t, which)); }

static int code_of(const nib_tensor *t, int i)
{
    return ((const uint8_t *)part(t, NIB_ROW_DATA))[i / 2] >> 4 * (i % 2) & 15;
}

static double decibels(const float *x, const float *y, int n)
{
    double signal = 0, error = 0;
    for (int i = 0; i < n; i++) {
        signal += pow(x[i], 2);
        error += pow((double)x[i] - y[i], 2);
    }
    return 10 * log10(signal / error);
}

/* The block that docs/format.md works out by hand. */
static void one_block(void)
{
    float x[BLOCK] = { 0, -0.0f, .1f, -.2f, .3f, -.4f, .5f, -.6f, .7f, -.8f, .9f, -1, 1.25f, -1.5f, 1.75f, -2 };
    float y[BLOCK], s, values[16];
    uint16_t bf16[BLOCK];
    need(nib_encode(NIB_BF16, x, BLOCK, bf16)); /* the values of a BF16 tensor */
    need(nib_decode(NIB_BF16, bf16, BLOCK, x));
    const float amax = 3;
    const nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &amax, NULL } };
    nib_tensor *t = there_and_back(rowwise_only(), x, y, 1, BLOCK, &overrides);
    const uint8_t scale = *(const uint8_t *)part(t, NIB_ROW_SCALE);
    need(nib_decode(NIB_E4M3, &scale, 1, &s));
    nib_e2m1_values(values);
    const float factor = s * amax * (1.0f / 2688);
    printf("One block of 16, in a tensor whose largest magnitude is %g: scale byte 0x%02X = %g, factor %.7g\n\n", amax,
           scale, s, factor);
    printf("       x         code  value     value * factor    error\n");
    for (int i = 0; i < BLOCK; i++) {
        const int code = code_of(t, i);
        printf("  %10.6f     %X   %5.1f     %12.6f   %+9.6f\n", x[i], (unsigned)code, values[code], y[i], y[i] - x[i]);
        check(y[i] == values[code] * factor, "a decoded value is its code's value times the factor");
    }
    check(scale == 0x79 && !memcmp(part(t, NIB_ROW_DATA), "\x80\x91\xA2\xC3\xC4\xD5\xE6\xF7", 8),
          "the bytes of docs/format.md");
    printf("\n  64 bits of codes and 8 of scale: 4.5 bits per element, and 32 more per tensor\n");
    nib_tensor_destroy(t);
}

/* One large element takes the whole range of its block; the transform shares it out among 16. */
static void outlier(void)
{
    float x[BLOCK], y[BLOCK];
    int zeros[2] = { 0, 0 };
    for (int i = 0; i < BLOCK; i++)
        x[i] = i == 5 ? 12.0f : (float)(i * 7 % 16 - 7.5) / 8; /* the others lie between -1 and 1 */
    printf("\nThe random Hadamard transform on a block with an outlier of 12 among numbers below 1\n\n");
    printf("                  amax   codes of the block                  zeros       SNR\n");
    for (int rht = 0; rht < 2; rht++) {
        nib_quantizer q = rowwise_only();
        q.rht_rowwise = (uint8_t)rht;
        nib_tensor *t = there_and_back(q, x, y, 1, BLOCK, NULL);
        printf("  %s  %7.3f  ", rht ? "transformed" : "as it is   ", *(const float *)part(t, NIB_ROW_TENSOR_SCALE));
        for (int i = 0; i < BLOCK; i++) {
            printf(" %X", (unsigned)code_of(t, i));
            zeros[rht] += code_of(t, i) % 8 == 0;
        }
        printf("      %2d   %5.2f dB\n", zeros[rht], decibels(x, y, BLOCK));
        nib_tensor_destroy(t);
    }
    check(zeros[0] > 0 && zeros[1] == 0, "elements are lost without the transform, and none with it");
    printf("\n  The range is shared out, so that no element is lost. The error is spread, not always smaller.\n");
}

static void scale_rules(void)
{
    static const char *const names[] = { "rtn: largest magnitude to 6", "4over6: to 6 or to 4", "sweep: best of 11" };
    static float x[ROWS * COLS], y[ROWS * COLS];
    double snr[3];
    for (uint32_t i = 0; i < ROWS * COLS; i++) { /* sums of eight uniform numbers are nearly normal */
        uint32_t words[8];
        nib_philox4x32((const uint32_t[4]){ i, 0, 0, 0 }, (const uint32_t[2]){ 1, 0 }, words);
        nib_philox4x32((const uint32_t[4]){ i, 1, 0, 0 }, (const uint32_t[2]){ 1, 0 }, words + 4);
        for (int j = 0; j < 8; j++)
            x[i] += (float)(words[j] >> 8) / 0x1p24f - 0.5f;
    }
    printf("\nScale rules on %d x %d normally distributed numbers\n\n", ROWS, COLS);
    for (int rule = NIB_SCALE_RTN; rule <= NIB_SCALE_SWEEP; rule++) {
        nib_quantizer q = rowwise_only();
        q.scale_rule = (nib_scale_rule)rule;
        q.error_mode = NIB_ERROR_MSE;
        q.e4m3_max = rule == NIB_SCALE_4OVER6 ? 256 : 448;
        nib_tensor_destroy(there_and_back(q, x, y, ROWS, COLS, NULL));
        snr[rule] = decibels(x, y, ROWS * COLS);
        printf("  %-30s %6.2f dB\n", names[rule], snr[rule]);
    }
    check(snr[1] > snr[0] && snr[2] > snr[1], "4over6 errs less than rtn, and sweep less than 4over6");
}

int main(void)
{
    printf("nib %s, kernels: %s\n\n", nib_version(), nib_isa());
    one_block();
    outlier();
    scale_rules();
    printf("\nAll of this was checked.\n");
}

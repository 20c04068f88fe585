/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.c - the shortest useful program: a BF16 weight to NVFP4 and back; with FILE, by way of a file.
 *
 *     quantize [FILE]
 */
#include <nib.h>
#include <stdio.h>

#include "nib_file.h"
#include "nib_reference.h"
enum { ROWS = 48, COLS = 80 };

/* Write a tensor to a file and read it again. The file is there under its name once it is complete. */
static nib_status through_file(const char *path, const nib_tensor *t, nib_tensor **out)
{
    nib_writer *writer = NULL;
    nib_file *file = NULL;
    nib_status status = nib_writer_create(path, &writer);
    if (!status)
        status = nib_writer_declare_tensor(writer, "weight", t);
    if (!status)
        status = nib_writer_write_tensor(writer, "weight", t);
    if (!status)
        status = nib_writer_commit(writer);
    if (!status)
        status = nib_file_open(path, &file);
    if (!status)
        status = nib_file_read_tensor(file, "weight", NULL, out);
    nib_writer_destroy(writer); /* destroy and close take NULL */
    nib_file_close(file);
    return status;
}

/* The core. The first call that fails ends it. */
static nib_status there_and_back(const nib_array *weight, const char *path, const nib_array *out, int *equal)
{
    nib_quantizer q;
    nib_quantizer_init(&q); /* TransformerEngine's arithmetic, a rowwise and a columnwise usage */
    nib_tensor *t = NULL, *read = NULL;
    nib_status status = nib_quantize(&q, weight, NULL, &t);
    if (!status)
        status = path ? through_file(path, t, &read) : nib_tensor_clone(t, &read);
    if (!status)
        status = nib_tensor_equal(t, read, equal);
    if (!status)
        status = nib_dequantize(read, NIB_ROWWISE, out);
    nib_tensor_destroy(t);
    nib_tensor_destroy(read);
    return status;
}

int main(int argc, char **argv)
{
    static float values[ROWS * COLS], back[ROWS * COLS];
    static uint16_t weight[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++)
        values[i] = (float)(i * 37 % 101 - 50) / 64; /* BF16 has all of these; the largest is 50/64 */

    nib_array in, out;
    const int64_t shape[2] = { ROWS, COLS };
    int equal = 0;
    nib_status status = nib_encode(NIB_BF16, values, ROWS * COLS, weight);
    if (!status)
        status = nib_array_init(&in, weight, NIB_BF16, 2, shape);
    if (!status)
        status = nib_array_init(&out, back, NIB_F32, 2, shape);
    if (!status)
        status = there_and_back(&in, argc > 1 ? argv[1] : NULL, &out, &equal);
    if (status) {
        fprintf(stderr, "quantize: %s: %s\n", nib_status_name(status), nib_last_error());
        return 1;
    }

    /* Half the widest step, 4 to 6, is a sixth of a block's largest magnitude; rounding its scale adds 1/16 of that. */
    float worst = 0;
    for (int i = 0; i < ROWS * COLS; i++) {
        const float error = values[i] > back[i] ? values[i] - back[i] : back[i] - values[i];
        worst = error > worst ? error : worst;
    }
    printf("%d x %d: %s, largest error %.4f\n", ROWS, COLS, equal ? "equal when read back" : "DIFFERENT",
           (double)worst);
    return !equal || worst > 50.0f / 64 / 6 * 17 / 16;
}

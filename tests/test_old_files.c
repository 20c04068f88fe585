/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_old_files.c - tensors that version 0.1 saved: tests/files/saved_0.1.safetensors, written by its library, reads
 * back as what quantizing the same values gives today.
 */
#include "test.h"

enum { ROWS = 40, COLS = 48 };

static float values[ROWS * COLS];

/* The values that were quantized: exact in F32, so that every compiler makes the same. */
static nib_array make_values(void)
{
    uint32_t state = 12345;
    for (int i = 0; i < ROWS * COLS; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)((int)(state >> 16) - 32768) / 4096.0f;
    }
    nib_array x = { 0 };
    CHECK_OK(nib_array_init(&x, values, NIB_F32, 2, (const int64_t[]){ ROWS, COLS }));
    return x;
}

static const struct {
    const char *name;
    nib_format format;
    bool square, row_scaled, no_tensor_scale, rowwise_only;
} saved[] = {
    { .name = "nvfp4" },
    { .name = "square", .square = true },
    { .name = "row_scaled", .row_scaled = true }, /* its quantizer had 3 threads, a word that is read and forgotten */
    { .name = "torchao_single", .no_tensor_scale = true, .rowwise_only = true },
    { .name = "float8", .format = NIB_FLOAT8 },
    { .name = "mxfp8", .format = NIB_MXFP8 },
    { .name = "float8_block", .format = NIB_FLOAT8_BLOCK },
    { .name = "mxfp4", .format = NIB_MXFP4, .rowwise_only = true },
};

TEST(tensors_of_0_1_read_back)
{
    const nib_array x = make_values();
    nib_file *file = NULL;
    CHECK_OK(nib_file_open("tests/files/saved_0.1.safetensors", &file));
    for (size_t i = 0; i < sizeof saved / sizeof *saved; i++) {
        nib_quantizer q;
        CHECK_OK(nib_quantizer_init_format(&q, saved[i].format));
        if (saved[i].square)
            q.block_dims[0] = 16;
        q.row_scaled = saved[i].row_scaled;
        q.no_tensor_scale = saved[i].no_tensor_scale;
        if (saved[i].no_tensor_scale)
            q.dialect = NIB_DIALECT_TORCHAO;
        q.columnwise = !saved[i].rowwise_only;
        nib_tensor *old = NULL, *now = NULL;
        nib_metadata facts = { .bytes = sizeof facts };
        int equal = 0;
        CHECK_OK(nib_file_read_tensor(file, saved[i].name, NULL, &old));
        CHECK_OK(nib_quantize(&q, &x, NULL, &now));
        CHECK_OK(nib_tensor_equal(old, now, &equal));
        CHECK_THAT(equal, "%s: the tensor has other bytes", saved[i].name);
        CHECK_OK(nib_tensor_get_metadata(old, &facts));
        CHECK_THAT(nib_quantizer_equal(facts.quantizer, &q), "%s: another quantizer", saved[i].name);
        nib_tensor_destroy(old);
        nib_tensor_destroy(now);
    }
    nib_file_close(file);
}

TEST_MAIN

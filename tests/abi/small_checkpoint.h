/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint of one file with two weights, plain and quantized, in a directory of its own that goes with the program. */
#ifndef NIB_TEST_SMALL_CHECKPOINT_H
#define NIB_TEST_SMALL_CHECKPOINT_H

#include "nib_checkpoint.h"
#include "test.h"

enum { ROWS = 32, COLS = 64 };

static char directory[] = "/tmp/nib-abi-XXXXXX", plain_path[64], quantized_path[64];
static nib_checkpoint *plain, *quantized;

static void remove_checkpoints(void)
{
    nib_checkpoint_close(plain);
    nib_checkpoint_close(quantized);
    unlink(plain_path);
    unlink(quantized_path);
    rmdir(directory);
}

/* The plain one. Calls leave nothing else in the directory. */
static void make_checkpoint(void)
{
    static const char *const names[] = { "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight" };
    static float values[ROWS * COLS];
    nib_writer *writer = NULL;
    if (plain)
        return;
    CHECK(mkdtemp(directory));
    snprintf(plain_path, sizeof plain_path, "%s/plain.safetensors", directory);
    snprintf(quantized_path, sizeof quantized_path, "%s/quantized.safetensors", directory);
    for (int i = 0; i < ROWS * COLS; i++)
        values[i] = test_normal();
    CHECK_OK(nib_writer_create(plain_path, &writer));
    for (int i = 0; i < 2; i++)
        CHECK_OK(nib_writer_declare(writer, names[i], NIB_F32, 2, (const int64_t[]){ ROWS, COLS }));
    for (int i = 0; i < 2; i++)
        CHECK_OK(nib_writer_write(writer, names[i], 0, values, sizeof values));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    CHECK_OK(nib_checkpoint_open(plain_path, &plain));
    atexit(remove_checkpoints);
}

/* Writes the quantized one. */
static nib_status run_plan(const nib_quantize_options *options, const nib_run_options *run_options, const nib_job *job)
{
    nib_plan *plan = NULL;
    nib_status status = nib_plan_quantize(plain, options, &plan);
    if (!status)
        status = nib_plan_run(plan, quantized_path, run_options, job);
    nib_plan_destroy(plan);
    return status;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* caller.c for the structs of nib_checkpoint.h: each ends where its page ends. */
#include "small_checkpoint.h"

#define GUARDED(type) ((type *)test_guarded(sizeof(type), true))

struct seen {
    int progress, compared, findings;
};

static int see_progress(void *context, const nib_progress *progress)
{
    CHECK(progress->bytes >= sizeof *progress && progress->phase && progress->done <= progress->total);
    ((struct seen *)context)->progress++;
    return 0;
}

static int see_compared(void *context, const nib_compared *compared)
{
    CHECK(compared->bytes >= sizeof *compared && compared->name && compared->rows == ROWS && compared->cols == COLS);
    CHECK(compared->format_a == NIB_CHECKPOINT_FORMAT_PLAIN);
    CHECK(compared->stats->bytes >= sizeof *compared->stats && compared->stats->elements == ROWS * COLS);
    ((struct seen *)context)->compared++;
    return 0;
}

static int see_finding(void *context, const nib_finding *finding)
{
    CHECK(finding->bytes >= sizeof *finding && finding->id && finding->fact);
    ((struct seen *)context)->findings++;
    return 0;
}

static nib_job *new_job(struct seen *seen)
{
    nib_job *job = GUARDED(nib_job);
    nib_job_init(job);
    CHECK(job->bytes == sizeof *job && !job->comm);
    job->threads = 1;
    job->progress = see_progress;
    job->context = seen;
    return job;
}

TEST(looking)
{
    make_checkpoint();
    nib_checkpoint_facts *facts = GUARDED(nib_checkpoint_facts);
    facts->bytes = sizeof *facts;
    CHECK_OK(nib_checkpoint_get_facts(plain, facts));
    CHECK(facts->bytes == sizeof *facts && facts->files == 1 && facts->tensors == 2 && facts->weights == 2);
    CHECK(facts->tensor_bytes == 2 * sizeof(float) * ROWS * COLS && facts->weight_elements == 2 * ROWS * COLS);
    CHECK(strcmp(facts->path, plain_path) == 0 && !facts->config && !facts->provenance);

    nib_checkpoint_tensor *tensor = GUARDED(nib_checkpoint_tensor);
    tensor->bytes = sizeof *tensor;
    CHECK_OK(nib_checkpoint_get_tensor(plain, 1, tensor));
    CHECK(strcmp(tensor->name, "model.layers.0.mlp.up_proj.weight") == 0 && strcmp(tensor->dtype, "F32") == 0);
    CHECK(tensor->rank == 2 && tensor->shape[1] == COLS && tensor->stored_bytes == sizeof(float) * ROWS * COLS);

    nib_weight *weight = GUARDED(nib_weight);
    weight->bytes = sizeof *weight;
    CHECK_OK(nib_checkpoint_get_weight(plain, 0, weight));
    CHECK(strcmp(weight->name, "model.layers.0.mlp.down_proj") == 0 && weight->dtype == NIB_F32);
    CHECK(weight->rows == ROWS && weight->cols == COLS && !weight->has_input_scale && weight->input_scale == 1);
}

TEST(planning)
{
    make_checkpoint();
    static const char *const down[] = { "*down_proj" };
    nib_quantize_options *options = GUARDED(nib_quantize_options);
    nib_quantize_options_init(options);
    CHECK(options->bytes == sizeof *options && options->dialect == NIB_UNSET && !options->keep_split);
    options->ignore = down;
    options->n_ignore = 1;
    options->keep_split = 1;
    nib_plan *plan = NULL;
    CHECK_OK(nib_plan_quantize(plain, options, &plan));

    nib_plan_facts *facts = GUARDED(nib_plan_facts);
    facts->bytes = sizeof *facts;
    CHECK_OK(nib_plan_get_facts(plan, facts));
    CHECK(facts->weights == 2 && facts->changed == 1 && facts->kept == 1 && facts->files_out == 1);
    CHECK(facts->changed_elements == ROWS * COLS && facts->changed_bytes_out > ROWS * COLS / 2);

    nib_plan_row *row = GUARDED(nib_plan_row);
    row->bytes = sizeof *row;
    CHECK_OK(nib_plan_get_row(plan, 0, row));
    CHECK(row->action == NIB_ACTION_KEEP && *row->reason && !*row->group);
    CHECK_OK(nib_plan_get_row(plan, 1, row));
    CHECK(row->action == NIB_ACTION_QUANTIZE && row->rows == ROWS && row->bytes_out < row->bytes_in);
    nib_plan_destroy(plan);
}

TEST(running)
{
    make_checkpoint();
    struct seen seen = { 0, 0, 0 };
    nib_job *job = new_job(&seen);
    nib_run_options *options = GUARDED(nib_run_options);
    options->bytes = sizeof *options;
    CHECK_OK(run_plan(NULL, options, job));
    CHECK(seen.progress > 0);
    CHECK_FAILS(run_plan(NULL, options, job), NIB_ERR_MODE, quantized_path); /* it is there */
    options->force = 1;
    CHECK_OK(run_plan(NULL, options, job));

    CHECK_OK(nib_checkpoint_open(quantized_path, &quantized));
    nib_weight_stats *stats = GUARDED(nib_weight_stats);
    stats->bytes = sizeof *stats;
    CHECK_OK(nib_checkpoint_measure(plain, 0, quantized, 0, job, stats));
    CHECK(stats->bytes == sizeof *stats && stats->elements == ROWS * COLS && stats->blocks == ROWS * COLS / 16);
    CHECK(nib_stats_sqnr(stats) > 15 && nib_stats_sqnr(stats) < 30);
    size_t only_a = 1, only_b = 1;
    CHECK_OK(nib_checkpoint_compare(plain, quantized, job, see_compared, &seen, &only_a, &only_b));
    CHECK(seen.compared == 2 && !only_a && !only_b);

    CHECK_OK(nib_checkpoint_check(plain, NULL, job, see_finding, &seen));
    CHECK(seen.findings > 0); /* it is not quantized */
}

TEST_MAIN

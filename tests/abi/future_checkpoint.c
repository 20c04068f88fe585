/* SPDX-License-Identifier: Apache-2.0 */
/* A caller of a later version: its structs are larger than those of libnib_checkpoint. */
#include <math.h>

#include "abi.h"
#include "small_checkpoint.h"

/* ---- Structs that are read ---- */

static const nib_run_options again = { .bytes = sizeof again, .force = 1 };

static void fill_options(void *options) { nib_quantize_options_init(options); }

static nib_status plan_by(void *options)
{
    nib_plan *plan = NULL;
    const nib_status status = nib_plan_quantize(plain, options, &plan);
    nib_plan_destroy(plan);
    return status;
}

static void fill_run_options(void *options) { ((nib_run_options *)options)->force = 1; }

static nib_status run_by(void *options) { return run_plan(NULL, options, NULL); }

static void fill_job(void *job)
{
    nib_job_init(job);
    ((nib_job *)job)->threads = 1;
}

static nib_status run_with(void *job) { return run_plan(NULL, &again, job); }

static nib_status measure_with(void *job)
{
    nib_weight_stats stats = { .bytes = sizeof stats };
    return nib_checkpoint_measure(plain, 0, plain, 0, job, &stats);
}

static int see_compared(void *context, const nib_compared *compared)
{
    (void)context;
    return compared->rows != ROWS;
}

static nib_status compare_with(void *job)
{
    return nib_checkpoint_compare(plain, plain, job, see_compared, NULL, NULL, NULL);
}

static int see_finding(void *context, const nib_finding *finding)
{
    (void)context, (void)finding;
    return 0;
}

static nib_status check_with(void *job) { return nib_checkpoint_check(quantized, NULL, job, see_finding, NULL); }

TEST(structs_that_are_read)
{
    static const struct subject subjects[] = {
        { "nib_quantize_options", sizeof(nib_quantize_options), fill_options, plan_by, NULL },
        { "nib_run_options", sizeof(nib_run_options), fill_run_options, run_by, NULL },
        { "nib_job, run", sizeof(nib_job), fill_job, run_with, NULL },
        { "nib_job, measure", sizeof(nib_job), fill_job, measure_with, NULL },
        { "nib_job, compare", sizeof(nib_job), fill_job, compare_with, NULL },
        { "nib_job, check", sizeof(nib_job), fill_job, check_with, NULL },
    };
    make_checkpoint();
    CHECK_OK(run_plan(NULL, &again, NULL));
    CHECK_OK(nib_checkpoint_open(quantized_path, &quantized));
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
        check_input(&subjects[i]);
}

TEST(statistics_that_are_only_asked)
{
    static const struct subject subject = { "nib_weight_stats", sizeof(nib_weight_stats), NULL, NULL, NULL };
    const size_t wrong[] = { 0, 8, sizeof(nib_weight_stats) - 1, MOST + 1, SIZE_MAX, (size_t)0xA5A5A5A5A5A5A5A5u };
    char *larger = subject_struct(&subject, ADDED);
    CHECK(isinf(nib_stats_sqnr((const nib_weight_stats *)larger)));
    larger[sizeof(nib_weight_stats)] = 1;
    CHECK(isnan(nib_stats_sqnr((const nib_weight_stats *)larger)));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        void *alone = test_guarded(sizeof(size_t), true);
        set_bytes(alone, wrong[i]);
        CHECK(isnan(nib_stats_sqnr(alone)));
    }
}

/* ---- Structs that are written ---- */

static nib_plan *plan;

static nib_status get_facts(void *out) { return nib_checkpoint_get_facts(plain, out); }

static int has_facts(const void *out)
{
    const nib_checkpoint_facts *facts = out;
    return facts->files == 1 && facts->tensors == 2 && facts->weight_elements == 2 * ROWS * COLS && !facts->provenance;
}

static nib_status get_tensor(void *out) { return nib_checkpoint_get_tensor(plain, 1, out); }

static int has_tensor(const void *out)
{
    const nib_checkpoint_tensor *t = out;
    return t->rank == 2 && t->shape[1] == COLS && t->stored_bytes == ROWS * COLS * sizeof(float);
}

static nib_status get_weight(void *out) { return nib_checkpoint_get_weight(plain, 1, out); }

static int has_weight(const void *out)
{
    const nib_weight *w = out;
    return strcmp(w->name, "model.layers.0.mlp.up_proj") == 0 && w->rows == ROWS && w->input_scale == 1;
}

static nib_status measure(void *out) { return nib_checkpoint_measure(plain, 0, plain, 1, NULL, out); }

static int has_stats(const void *out)
{
    const nib_weight_stats *stats = out;
    return stats->elements == ROWS * COLS && stats->sum_squares > 0 && stats->error_squares == 0 &&
           stats->scales[255] == 0;
}

static nib_status get_plan_facts(void *out) { return nib_plan_get_facts(plan, out); }

static int has_plan_facts(const void *out)
{
    const nib_plan_facts *facts = out;
    return facts->weights == 2 && facts->changed == 2 && facts->changed_bytes_out > 0;
}

static nib_status get_row(void *out) { return nib_plan_get_row(plan, 0, out); }

static int has_row(const void *out)
{
    const nib_plan_row *row = out;
    return row->action == NIB_ACTION_QUANTIZE && row->cols == COLS && row->group && !*row->group;
}

TEST(structs_that_are_written)
{
    static const struct subject subjects[] = {
        { "nib_checkpoint_facts", sizeof(nib_checkpoint_facts), NULL, get_facts, has_facts },
        { "nib_checkpoint_tensor", sizeof(nib_checkpoint_tensor), NULL, get_tensor, has_tensor },
        { "nib_weight", sizeof(nib_weight), NULL, get_weight, has_weight },
        { "nib_weight_stats", sizeof(nib_weight_stats), NULL, measure, has_stats },
        { "nib_plan_facts", sizeof(nib_plan_facts), NULL, get_plan_facts, has_plan_facts },
        { "nib_plan_row", sizeof(nib_plan_row), NULL, get_row, has_row },
    };
    make_checkpoint();
    CHECK_OK(nib_plan_quantize(plain, NULL, &plan));
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
        check_output(&subjects[i]);
    nib_plan_destroy(plan);
}

/* What an inline _init of a later header calls. */
TEST(defaults_of_larger_options)
{
    nib_quantize_options *larger = test_guarded(sizeof *larger + ADDED, true);
    memset(larger, 0xEE, sizeof *larger + ADDED);
    CHECK_OK(nib_quantize_options_init_sized(larger, sizeof *larger + ADDED));
    CHECK(larger->bytes == sizeof *larger + ADDED && larger->dialect == NIB_UNSET && larger->keep_split == 0);
    for (size_t i = 0; i < ADDED; i++)
        CHECK(((const uint8_t *)larger)[sizeof *larger + i] == 0);
    CHECK_FAILS(nib_quantize_options_init_sized(test_guarded(0, true), 8), NIB_ERR_ARG, "bytes is");
}

TEST_MAIN

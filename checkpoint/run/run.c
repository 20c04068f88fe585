/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - a plan carried out: threads, tensor scales, what stands beside the tensors, and the order of all steps.
 */
#include "run/run.h"

#include <stdio.h>

#include "model/folds.h"
#include "model/measure.h"
#include "tensor/quantize.h"
#include "tensor/tensor.h"
#include "nib_shard.h"

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for a run of the plan"); }

/* ---- Threads ---- */

struct team {
    struct nib_run *run;
    atomic_size_t next;
    size_t n;
    nib_status (*body)(void *context, size_t item);
    void *context;
};

static void note_failure(struct nib_run *run, nib_status status)
{
    pthread_mutex_lock(&run->mutex);
    if (!run->status) {
        run->status = status;
        snprintf(run->message, sizeof run->message, "%s", nib_last_error());
    }
    pthread_mutex_unlock(&run->mutex);
    atomic_store(&run->stop, true);
}

static void *work(void *argument)
{
    struct team *team = argument;
    const nib_fpenv saved = nib_fpenv_enter();
    while (!atomic_load(&team->run->stop)) {
        const size_t item = atomic_fetch_add(&team->next, 1);
        if (item >= team->n)
            break;
        const nib_status status = team->body(team->context, item);
        if (status)
            note_failure(team->run, status);
    }
    nib_fpenv_leave(saved);
    return NULL;
}

nib_status nib_run_parallel(struct nib_run *run, size_t n, nib_status (*body)(void *context, size_t item),
                            void *context)
{
    struct team team = { .run = run, .n = n, .body = body, .context = context };
    size_t threads = (size_t)run->threads < n ? (size_t)run->threads : n;
    pthread_t *others = threads > 1 ? nib_alloc(threads * sizeof *others) : NULL;
    size_t started = 0;
    while (others && started + 1 < threads && !pthread_create(&others[started], NULL, work, &team))
        started++;
    work(&team); /* with fewer threads than wanted it is only slower */
    for (size_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    nib_free(others);
    pthread_mutex_lock(&run->mutex); /* other teams may still be at work, and fail */
    const nib_status status = run->status ? nib_fail(run->status, "%s", run->message) : NIB_OK;
    pthread_mutex_unlock(&run->mutex);
    return status;
}

void nib_run_begin_phase(struct nib_run *run, const char *phase, uint64_t total)
{
    run->phase = phase;
    run->done = 0;
    run->total = total;
}

static nib_status tell(struct nib_run *run, uint64_t bytes, const char *tensor, const char *warning)
{
    int stop = 0;
    pthread_mutex_lock(&run->mutex);
    run->done += bytes;
    if (run->job.progress && !run->status)
        stop = run->job.progress(run->job.context, &(nib_progress){ .bytes = sizeof(nib_progress),
                                                                    .phase = run->phase,
                                                                    .tensor = tensor,
                                                                    .done = run->done,
                                                                    .total = run->total,
                                                                    .warning = warning });
    pthread_mutex_unlock(&run->mutex);
    return stop ? nib_fail(NIB_ERR_CANCELLED, "the run was stopped before its end") : NIB_OK;
}

nib_status nib_run_progress(struct nib_run *run, const char *tensor, uint64_t bytes)
{
    return tell(run, bytes, tensor, NULL);
}

nib_status nib_run_warn(struct nib_run *run, const char *warning) { return tell(run, 0, NULL, warning); }

/* ---- Tensor scales ---- */

float nib_run_translate(float tensor_scale, nib_tensor_scale from, nib_tensor_scale to, int32_t e4m3_max)
{
    if (from == NIB_TENSOR_SCALE_AMAX)
        tensor_scale = tensor_scale / (6.0f * (float)(e4m3_max ? e4m3_max : 448));
    if (from == NIB_TENSOR_SCALE_NONE)
        tensor_scale = 1;
    const bool divisor = from == NIB_TENSOR_SCALE_DIVISOR;
    return divisor == (to == NIB_TENSOR_SCALE_DIVISOR) ? tensor_scale : 1.0f / tensor_scale;
}

/* Of nothing but zeros some dialects would make infinities. Only who asks for ModelOpt's bytes in ModelOpt's form gets
 * what ModelOpt writes: a tensor scale of 0 and scales that are NaN. */
bool nib_run_is_unit(const nib_plan *plan, const struct nib_out_group *group, float amax)
{
    if (group->unit)
        return true;
    return amax == 0 && !(plan->q.dialect == NIB_DIALECT_MODELOPT && plan->format == NIB_CHECKPOINT_FORMAT_MODELOPT);
}

void nib_run_find_tensor_scale(struct nib_run *run, size_t group)
{
    const nib_plan *plan = run->plan;
    const struct nib_out_group *g = &plan->groups[group];
    nib_tensor_scale kind = NIB_TENSOR_SCALE_MULTIPLIER;
    float *amax = &run->amaxes[group], tensor_scale, encode;
    if (!g->mxfp4 && nib_run_is_unit(plan, g, *amax))
        tensor_scale = 1;
    else if (g->mxfp4)
        tensor_scale = *amax = nib_mxfp4_decode_scale(*amax);
    else {
        const struct nib_coding coding = nib_coding_of(&plan->q, NIB_ROWWISE, g->dtype);
        kind = coding.rules.tensor_scale;
        tensor_scale = nib_tensor_scale_from_amax(&plan->q, &coding, *amax, &encode);
    }
    run->tensor_scales[group] = nib_run_translate(tensor_scale, kind, nib_ck_formats[plan->format].tensor_scale, 0);
}

/* ---- Files beside the tensors ---- */

static nib_status write_text(const struct nib_run *run, const char *name, struct nib_text *text)
{
    char *path = nib_staging_path(run->fresh, name);
    const nib_status status = path ? nib_staging_write(path, text->bytes, text->used) : no_memory();
    nib_free(path);
    nib_free(text->bytes);
    *text = (struct nib_text){ 0 };
    return status;
}

static nib_status write_json(const struct nib_run *run, const char *name, const json_t *value)
{
    struct nib_text text = { 0 };
    if (!nib_put_json(&text, value, 0) || !nib_text_put(&text, "\n", 1)) {
        nib_free(text.bytes);
        return no_memory();
    }
    return write_text(run, name, &text);
}

#define INDEX "model.safetensors.index.json"

const char *const nib_run_beside[NIB_RUN_BESIDE] = { INDEX, "hf_quant_config.json", NIB_FOLD_FILE, "config.json" };

bool nib_run_writes(const nib_plan *plan, const char *name)
{
    if (!strcmp(name, INDEX))
        return plan->n_files > 1 || (plan->keep_split && plan->in->has_index);
    if (!strcmp(name, "hf_quant_config.json"))
        return plan->hf_quant;
    if (!strcmp(name, NIB_FOLD_FILE)) /* or copied, since the codes stay what they were */
        return plan->fold || (plan->in->folds && plan->in->is_directory);
    return !strcmp(name, "config.json") && plan->config && (plan->in->config || json_object_size(plan->config) > 0);
}

static nib_status write_configuration(struct nib_run *run, const char *provenance)
{
    const nib_plan *plan = run->plan;
    if (run->as_file)
        return NIB_OK;
    if (nib_run_writes(plan, INDEX)) {
        struct nib_text text;
        TRY(nib_plan_index(plan, &text));
        TRY(write_text(run, INDEX, &text));
    }
    if (plan->fold) {
        char *path = nib_staging_path(run->fresh, NIB_FOLD_FILE);
        const nib_status status = path ? nib_plan_write_fold(plan, path) : no_memory();
        nib_free(path);
        TRY(status);
    }
    if (plan->hf_quant)
        TRY(write_json(run, "hf_quant_config.json", plan->hf_quant));
    if (!nib_run_writes(plan, "config.json"))
        return NIB_OK;
    json_t *config = json_copy(plan->config);
    const bool whole = config && json_object_size(config) == json_object_size(plan->config);
    nib_status status =
        whole && !json_object_set_new(config, "nib", json_loads(provenance, 0, NULL)) ? NIB_OK : no_memory();
    if (!status)
        status = write_json(run, "config.json", config);
    json_decref(config);
    return status;
}

/* ---- The run ---- */

/* Better now than after hours. Of an earlier run nothing but finished files is there. */
static nib_status check_room(const struct nib_run *run)
{
    const nib_plan *plan = run->plan;
    const uint64_t there = nib_os_free_bytes(run->fresh);
    uint64_t needed = 0;
    for (size_t i = 0; i < plan->n_files; i++) {
        char *path = nib_staging_path(run->fresh, plan->files[i].name);
        if (!path)
            return no_memory();
        needed += nib_os_exists(path) ? 0 : plan->files[i].bytes;
        nib_free(path);
    }
    return needed <= there ? NIB_OK
                           : nib_fail(NIB_ERR_IO,
                                      "%s: the output needs %.1f MB more and %.1f MB are free: make room, or choose "
                                      "another place",
                                      run->out, (double)needed / 1e6, (double)there / 1e6);
}

/* First all amaxes, then all codes. */
static nib_status write_in_two_passes(struct nib_run *run, struct nib_text *provenance)
{
    TRY(nib_run_scan(run));
    for (size_t i = 0; i < run->plan->n_groups; i++)
        nib_run_find_tensor_scale(run, i);
    TRY(nib_agree(run->job.comm, nib_plan_provenance(run->plan, run->hashes, provenance), 0));
    return nib_run_write(run, NULL, provenance);
}

static nib_status write_in_one_pass(struct nib_run *run, struct nib_text *provenance)
{
    struct nib_scan *scan;
    nib_status status = nib_scan_open(run, &scan);
    if (!status)
        status = nib_run_write(run, scan, provenance);
    nib_scan_close(scan);
    return status;
}

/* The other files first: one that cannot be copied must not be found after hours. */
static nib_status begin_writing(struct nib_run *run)
{
    TRY(check_room(run));
    return run->plan->in->is_directory ? nib_staging_copy_others(run) : NIB_OK;
}

static nib_status write_all(struct nib_run *run)
{
    const bool first = !run->job.comm || run->job.comm->rank == 0;
    struct nib_text provenance = { 0 };
    TRY(nib_agree(run->job.comm, first ? begin_writing(run) : NIB_OK, 3));
    nib_status status =
        nib_scan_goes_along(run) ? write_in_one_pass(run, &provenance) : write_in_two_passes(run, &provenance);
    if (!status && first)
        status = write_configuration(run, provenance.bytes);
    if (!status)
        status = nib_run_check_sources(run);
    nib_free(provenance.bytes);
    return nib_agree(run->job.comm, status, 1);
}

static int by_name(const void *a, const void *b)
{
    const struct nib_out_file *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

const struct nib_out_file *nib_run_file(const struct nib_run *run, const char *name)
{
    const struct nib_out_file key = { .name = (char *)name }, *const wanted = &key;
    const struct nib_out_file *const *const found =
        bsearch(&wanted, run->by_name, run->plan->n_files, sizeof wanted, by_name);
    return found ? *found : NULL;
}

static nib_status start(struct nib_run *run)
{
    enum { DEFAULT_MEMORY = 512 << 20, LEAST = 64 << 10 };
    const nib_checkpoint *in = run->plan->in;
    run->threads = run->job.threads > 0 ? run->job.threads : nib_os_processors();
    const uint64_t memory = run->job.max_memory ? run->job.max_memory : DEFAULT_MEMORY;
    run->memory = memory / (uint64_t)run->threads > LEAST ? memory / (uint64_t)run->threads : LEAST;
    run->identities = nib_alloc_zeroed((in->n_files + 1) * sizeof *run->identities);
    run->hashes = nib_alloc_zeroed((in->n_files + 1) * sizeof *run->hashes);
    run->amaxes = nib_alloc_zeroed((run->plan->n_groups + 1) * sizeof *run->amaxes);
    run->tensor_scales = nib_alloc_zeroed((run->plan->n_groups + 1) * sizeof *run->tensor_scales);
    run->by_name = nib_alloc((run->plan->n_files + 1) * sizeof *run->by_name);
    if (!run->by_name || !run->identities || !run->hashes || !run->amaxes || !run->tensor_scales)
        return no_memory();
    for (size_t f = 0; f < run->plan->n_files; f++)
        run->by_name[f] = &run->plan->files[f];
    qsort(run->by_name, run->plan->n_files, sizeof *run->by_name, by_name);
    for (size_t f = 0; f < in->n_files; f++)
        TRY(nib_os_identity(in->files[f].path, &run->identities[f]));
    return NIB_OK;
}

static nib_status read_choices(const nib_run_options *options, const nib_job *job, struct nib_run *run)
{
    run->options.bytes = sizeof run->options;
    nib_job_init(&run->job);
    if (options)
        TRY(nib_struct_read("nib_run_options", options, &run->options, sizeof run->options,
                            NIB_UP_TO(nib_run_options, force)));
    if (job)
        TRY(nib_struct_read("nib_job", job, &run->job, sizeof run->job, NIB_JOB_OLDEST));
    if (run->job.threads < 0)
        return nib_fail(NIB_ERR_ARG, "the job asks for %d threads", (int)run->job.threads);
    return run->job.comm ? nib_check_comm("the job's communicator", run->job.comm, true) : NIB_OK;
}

nib_status nib_plan_run(const nib_plan *plan, const char *out, const nib_run_options *options, const nib_job *job)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(out);
    struct nib_run run = { .plan = plan, .lock = -1, .phase = "" };
    TRY(read_choices(options, job, &run));
    if (pthread_mutex_init(&run.mutex, NULL))
        return no_memory();
    const nib_fpenv saved = nib_fpenv_enter();
    enum nib_staging_left left = NIB_STAGING_OPEN;
    nib_status status = nib_agree(run.job.comm, start(&run), 2);
    if (!status)
        status = nib_staging_open(&run, out, &left);
    if (!status && left == NIB_STAGING_OPEN)
        status = write_all(&run);
    if (!status && left != NIB_STAGING_DONE)
        status = nib_staging_publish(&run);
    nib_staging_close(&run, status);
    nib_fpenv_leave(saved);
    pthread_mutex_destroy(&run.mutex);
    nib_free(run.by_name);
    nib_free(run.identities);
    nib_free(run.hashes);
    nib_free(run.amaxes);
    nib_free(run.tensor_scales);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - a check of an NVFP4 checkpoint: what opening noticed, then one check after the other.
 */
#include "check/check.h"

#include "file/json.h"
#include "base/os.h"
#include "model/measure.h"
#include "nib_file.h"

const char *nib_check_tensor(const nib_checkpoint *c, const struct nib_ck_weight *w, enum nib_ck_role role)
{
    return w->tensor[role] == NIB_NONE ? w->name : c->tensors[w->tensor[role]].name;
}

/* ---- Files ---- */

static nib_status check_files(struct nib_checking *k)
{
    /* What opening noticed is a finding under the same id. */
    static const enum nib_fault diagnostics[] = { NIB_FAULT_STALE_SHARD, NIB_FAULT_UNINDEXED, NIB_FAULT_REPEATED,
                                                  NIB_FAULT_ORIENTATION };
    const nib_checkpoint *c = k->c;
    for (size_t i = 0; i < c->n_diagnostics; i++)
        for (size_t j = 0; j < sizeof diagnostics / sizeof *diagnostics; j++)
            if (strcmp(nib_check_id(diagnostics[j]), c->diagnostics[i].id) == 0)
                TRY(nib_check_found(k, diagnostics[j], c->diagnostics[i].subject, "%s", c->diagnostics[i].fact));
    for (size_t i = 0; i < c->n_files; i++) {
        const struct nib_ck_file *file = &c->files[i];
        const char *format = file->safetensors ? nib_file_metadata(file->safetensors, "format") : "pt";
        if (!format)
            TRY(nib_check_found(k, NIB_FAULT_METADATA, file->name, "its metadata has no \"format\""));
        else if (strcmp(format, "pt") != 0)
            TRY(nib_check_found(k, NIB_FAULT_METADATA, file->name, "its metadata says format %s",
                                nib_quote(format).text));
    }
    return NIB_OK;
}

/* ---- All of it ---- */

static nib_status run_checks(struct nib_checking *k)
{
    static nib_status (*const checks[])(struct nib_checking * k) = {
        check_files,       nib_check_modules,  nib_check_wrapped_names, nib_check_gguf,
        nib_check_weights, nib_check_inputs,   nib_check_shared,        nib_check_config,
        nib_check_mixture, nib_check_original, nib_check_guess,
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        TRY(checks[i](k));
    return NIB_OK;
}

nib_status nib_check_run(struct nib_checking *k, const char *what, const nib_job *job)
{
    const nib_checkpoint *c = k->c;
    TRY(nib_ck_job(what, job, &k->job));
    k->uniform = true;
    k->groups_want_inputs = nib_check_groups_want_inputs(c);
    for (size_t i = 0; i < c->n_weights; i++) {
        k->total += nib_check_scanned_bytes(&c->weights[i]);
        k->uniform &= c->weights[i].format == NIB_CHECKPOINT_FORMAT_PLAIN || c->weights[i].format == c->format;
    }
    k->weights = nib_alloc_zeroed((c->n_weights + 1) * sizeof *k->weights);
    k->broken = nib_alloc_zeroed(c->n_tensors + 1);
    const nib_fpenv saved = nib_fpenv_enter();
    const nib_status status =
        k->weights && k->broken ? run_checks(k) : nib_fail(NIB_ERR_MEMORY, "%s: no memory for a check", c->path);
    nib_fpenv_leave(saved);
    return status;
}

void nib_check_end(struct nib_checking *k)
{
    nib_free(k->weights);
    nib_free(k->broken);
    nib_free(k->modules);
    nib_free(k->names);
}

nib_status nib_checkpoint_check(const nib_checkpoint *checkpoint, const nib_checkpoint *against, const nib_job *job,
                                int (*each)(void *context, const nib_finding *finding), void *context)
{
    NIB_REQUIRE(checkpoint);
    NIB_REQUIRE(each);
    struct nib_checking k = { .c = checkpoint, .original = against, .each = each, .context = context };
    const nib_status status = nib_check_run(&k, "nib_checkpoint_check: job", job);
    nib_check_end(&k);
    return status;
}

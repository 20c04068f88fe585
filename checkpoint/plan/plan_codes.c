/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_codes.c - weights that are NVFP4 already, in another checkpoint: a quantization takes them over. Whoever chooses
 * codes by other means, a layer at a time, has the rest of the checkpoint written as any other.
 */
#include "plan/plan.h"

#include <float.h>
#include <stdio.h>
#include <xxhash.h>

#include "base/os.h"

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

/* A header has names, places and provenance, in which is the hash of all that the data was made of. */
static nib_status hash_header(XXH3_state_t *hash, const struct nib_ck_file *file)
{
    char buffer[4096];
    uint64_t at = 0, bytes;
    int fd;
    if (!file->safetensors)
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s: codes are taken over from safetensors files", file->path);
    TRY(nib_os_open_read(file->path, &fd, &bytes));
    nib_status status = NIB_OK;
    const uint64_t end = nib_file_data_begin(file->safetensors);
    while (!status && at < end) {
        const size_t n = end - at < sizeof buffer ? (size_t)(end - at) : sizeof buffer;
        status = nib_os_read_at(fd, file->path, at, buffer, n);
        if (!status)
            (void)XXH3_128bits_update(hash, buffer, n);
        at += n;
    }
    nib_os_close(fd);
    return status;
}

nib_status nib_plan_open_codes(nib_plan *plan, const char *path)
{
    if (plan->gguf || (nib_ck_stack_layout(plan->format) && nib_ck_keeps_stacks(plan->in)))
        return nib_fail(NIB_ERR_MODE, "%s: codes are taken over into matrices, and %s holds stacks of them or blocks",
                        path, nib_checkpoint_format_name(plan->format));
    TRY(nib_checkpoint_open(path, &plan->codes));
    XXH3_state_t *hash = XXH3_createState();
    nib_status status = hash && XXH3_128bits_reset(hash) == XXH_OK ? NIB_OK : no_memory();
    for (size_t i = 0; i < plan->codes->n_files && !status; i++)
        status = hash_header(hash, &plan->codes->files[i]);
    char text[33] = "";
    if (!status) {
        const XXH128_hash_t digest = XXH3_128bits_digest(hash);
        snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)digest.high64,
                 (unsigned long long)digest.low64);
    }
    XXH3_freeState(hash);
    if (!status && json_object_set_new(plan->options, "codes_xxh3", json_string(text)))
        status = no_memory();
    return status;
}

/* The weight's counterpart; NULL: it has none. */
static nib_status find_codes(const nib_plan *plan, const struct nib_ck_weight *w, const struct nib_ck_weight **out)
{
    const nib_checkpoint *codes = plan->codes;
    nib_tensor_scale kind;
    float tensor_scale;
    size_t index;
    *out = NULL;
    if (nib_checkpoint_find_weight(codes, w->name, &index) || !nib_ck_is_nvfp4(codes->weights[index].format))
        return NIB_OK;
    const struct nib_ck_weight *found = &codes->weights[index];
    if (found->rows != w->rows || found->cols != w->cols)
        return nib_fail(NIB_ERR_DATA, "%s: weight %s is [%lld, %lld] there, and [%lld, %lld] in %s", codes->path,
                        nib_quote(w->name).text, (long long)found->rows, (long long)found->cols, (long long)w->rows,
                        (long long)w->cols, plan->in->path);
    TRY(nib_ck_read_tensor_scale(codes, found, &kind, &tensor_scale));
    if (!(tensor_scale > 0 && tensor_scale <= FLT_MAX))
        return nib_fail(NIB_ERR_DATA, "%s: the tensor scale of %s is %g", codes->path, nib_quote(w->name).text,
                        (double)tensor_scale);
    *out = found;
    return NIB_OK;
}

/* Servers fuse matrices, with one tensor scale: all of a set are taken over, with the same, or none. */
static nib_status check_set(const nib_plan *plan, size_t weight)
{
    const struct nib_out_row *row = &plan->rows[weight];
    const struct nib_ck_weight *codes = row->codes, *first;
    nib_tensor_scale kind;
    float one, other;
    if (row->group_name == NIB_NONE)
        return NIB_OK;
    first = plan->rows[row->group_name].codes;
    const char *names[] = { plan->in->weights[weight].name, plan->in->weights[row->group_name].name };
    if (!codes != !first)
        return nib_fail(NIB_ERR_DATA, "%s: it has %s, but not %s, which servers fuse with it", plan->codes->path,
                        nib_quote(names[!codes]).text, nib_quote(names[!!codes]).text);
    if (codes == first)
        return NIB_OK;
    TRY(nib_ck_read_tensor_scale(plan->codes, codes, &kind, &one));
    TRY(nib_ck_read_tensor_scale(plan->codes, first, &kind, &other));
    return one == other ? NIB_OK
                        : nib_fail(NIB_ERR_DATA, "%s: %s and %s, which servers fuse, have the tensor scales %g and %g",
                                   plan->codes->path, nib_quote(names[0]).text, nib_quote(names[1]).text, (double)one,
                                   (double)other);
}

nib_status nib_plan_find_codes(nib_plan *plan)
{
    size_t found = 0;
    if (!plan->codes)
        return NIB_OK;
    for (size_t i = 0; i < plan->in->n_weights; i++) {
        if (plan->rows[i].action == NIB_ACTION_QUANTIZE)
            TRY(find_codes(plan, &plan->in->weights[i], &plan->rows[i].codes));
        found += plan->rows[i].codes != NULL;
    }
    for (size_t i = 0; i < plan->in->n_weights; i++)
        if (plan->rows[i].action == NIB_ACTION_QUANTIZE)
            TRY(check_set(plan, i));
    return found ? NIB_OK
                 : nib_fail(NIB_ERR_DATA, "%s: it has no NVFP4 weight of those that are to be quantized",
                            plan->codes->path);
}

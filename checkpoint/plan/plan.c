/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - plans put together: memory, tensors, files, groups; and the plan of an output as the caller sees it.
 */
#include "plan/plan.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/gguf.h"
#include "nib_file.h"

/* ---- Memory ---- */

/* Pieces that go together. Plans hold hundreds of thousands of names: one block each would cost more than the names. */
struct nib_arena {
    struct nib_arena *next;
    size_t used, size;
    char bytes[];
};

enum { ARENA_BYTES = 64 << 10 };

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the plan"); }

void *nib_plan_memory(nib_plan *plan, size_t bytes)
{
    const size_t wanted = (bytes + 7) & ~(size_t)7;
    struct nib_arena *arena = plan->strings;
    if (!arena || arena->size - arena->used < wanted) {
        const size_t size = wanted > ARENA_BYTES ? wanted : ARENA_BYTES;
        arena = nib_alloc(sizeof *arena + size);
        if (!arena)
            return NULL;
        *arena = (struct nib_arena){ .next = plan->strings, .size = size };
        plan->strings = arena;
    }
    void *memory = arena->bytes + arena->used;
    arena->used += wanted;
    return memory;
}

const char *nib_plan_string(nib_plan *plan, const char *format, ...)
{
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    const int length = vsnprintf(NULL, 0, format, arguments);
    char *string = length < 0 ? NULL : nib_plan_memory(plan, (size_t)length + 1);
    if (string)
        vsnprintf(string, (size_t)length + 1, format, again);
    va_end(again);
    va_end(arguments);
    return string;
}

void nib_plan_destroy(nib_plan *plan)
{
    if (!plan)
        return;
    json_decref(plan->options);
    json_decref(plan->config);
    json_decref(plan->hf_quant);
    json_decref(plan->amaxes);
    json_decref(plan->restore);
    nib_statistics_close(plan->statistics);
    nib_hessians_close(plan->hessians);
    nib_checkpoint_close(plan->codes);
    nib_free(plan->digests);
    if (plan->fold)
        nib_free(plan->fold->scales);
    nib_free(plan->others);
    nib_free(plan->restored);
    nib_gguf_plan_destroy(plan->keys);
    nib_free(plan->places);
    nib_free(plan->rows);
    nib_free(plan->tensors);
    nib_free(plan->weights);
    nib_free(plan->groups);
    nib_free(plan->files);
    for (struct nib_arena *arena = plan->strings, *next; arena; arena = next) {
        next = arena->next;
        nib_free(arena);
    }
    nib_free(plan);
}

/* ---- Steps ---- */

/* What a weight's share of its tensors is: experts of a stack have equal ones. */
static uint64_t stored_bytes(const nib_checkpoint *c, const struct nib_ck_weight *w)
{
    uint64_t bytes = 0;
    for (int role = 0; role < NIB_ROLE_COUNT; role++) {
        if (w->tensor[role] == NIB_NONE)
            continue;
        const struct nib_ck_tensor *t = &c->tensors[w->tensor[role]];
        if (w->index < 0 || t->rank < 2) {
            bytes += w->index < 0 ? t->bytes : t->bytes / (uint64_t)nib_max(t->rank ? t->shape[0] : 1, 1);
            continue;
        }
        const int64_t matrix_rows = nib_ck_matrix_rows(c, w);
        bytes += t->bytes / (uint64_t)nib_max(t->shape[0], 1) / (uint64_t)nib_max(matrix_rows / nib_max(w->rows, 1), 1);
    }
    return bytes;
}

nib_status nib_plan_start(const nib_checkpoint *in, const char *command, nib_checkpoint_format format, bool gguf,
                          nib_plan **out)
{
    nib_plan *plan = nib_alloc_zeroed(sizeof *plan);
    if (!plan)
        return no_memory();
    plan->in = in;
    plan->command = command;
    plan->format = format;
    plan->gguf = gguf;
    plan->one_file = gguf || !in->is_directory;
    plan->shard_bytes = NIB_SHARD_BYTES;
    plan->dequantized_dtype = NIB_DTYPE_COUNT;
    plan->note = "";
    plan->noted_dtype = NIB_DTYPE_COUNT;
    plan->plain_dtype = NIB_DTYPE_COUNT;
    plan->options = json_object();
    plan->rows = nib_alloc_zeroed((in->n_weights + 1) * sizeof *plan->rows);
    if (!plan->options || !plan->rows) {
        nib_plan_destroy(plan);
        return no_memory();
    }
    for (size_t i = 0; i < in->n_weights; i++) {
        const uint64_t bytes = stored_bytes(in, &in->weights[i]);
        plan->rows[i] = (struct nib_out_row){
            .action = NIB_ACTION_KEEP,
            .reason = "",
            .group_name = NIB_NONE,
            .bytes_in = bytes,
            .bytes_out = bytes,
            .input = { .entry = NIB_NONE },
            .statistics = "",
            .fold = "",
            .gptq = "",
            .hessian = NIB_NONE,
        };
    }
    *out = plan;
    return NIB_OK;
}

/* What a tensor takes of a header, at most: its name, escaped, its dims, offsets of a hundred gigabytes, and what is around
 * them. */
static uint64_t entry_bytes(const char *name, int64_t rank, const int64_t *shape)
{
    enum { AROUND = 64, OFFSETS = 2 * 11, ESCAPED = 6 };
    uint64_t bytes = AROUND + OFFSETS;
    for (int64_t i = 0; i < rank; i++)
        bytes += (uint64_t)snprintf(NULL, 0, "%lld,", (long long)shape[i]);
    for (const unsigned char *p = (const unsigned char *)name; *p; p++)
        bytes += *p < 0x20 || *p == '"' || *p == '\\' ? ESCAPED : 1;
    return bytes;
}

nib_status nib_plan_next(nib_plan *plan, uint32_t input_file, uint64_t coming_bytes)
{
    struct nib_out_file *last = plan->n_files ? &plan->files[plan->n_files - 1] : NULL;
    const bool other = plan->keep_split && last && last->input_file != input_file;
    /* What comes behind empty tensors may be larger than the whole shard. */
    const uint64_t left = last && last->data < plan->shard_bytes ? plan->shard_bytes - last->data : 0;
    /* A header has its own limit, which many small tensors reach first; the rest is for provenance and one weight more. */
    const bool long_header = last && last->entries > NIB_SAFETENSORS_MAX_HEADER - (4 << 20);
    const bool full = !plan->keep_split && last && ((last->data && coming_bytes > left) || long_header);
    if (last && (plan->one_file || (!other && !full))) {
        last->data += coming_bytes;
        return NIB_OK;
    }
    struct nib_out_file *files = nib_grow(plan->files, &plan->files_capacity, plan->n_files + 1, sizeof *plan->files);
    if (!files)
        return no_memory();
    plan->files = files;
    /* Until it is laid out, `data` counts what is in it; more than shard_bytes only for one tensor that is larger. */
    const uint64_t counted = coming_bytes < plan->shard_bytes ? coming_bytes : plan->shard_bytes;
    files[plan->n_files++] =
        (struct nib_out_file){ .first = (uint32_t)plan->n_tensors, .input_file = input_file, .data = counted };
    return NIB_OK;
}

nib_status nib_plan_add_tensor(nib_plan *plan, const char *name, nib_dtype dtype, int64_t rank, const int64_t *shape,
                               enum nib_producer producer, uint32_t source, uint32_t *index)
{
    struct nib_out_tensor *tensors =
        nib_grow(plan->tensors, &plan->tensors_capacity, plan->n_tensors + 1, sizeof *tensors);
    int64_t *dims = nib_plan_memory(plan, (size_t)nib_max(rank, 1) * sizeof *dims);
    if (tensors)
        plan->tensors = tensors;
    if (!tensors || !dims || !name)
        return no_memory();
    int64_t elements = 1, bits = 0;
    for (int64_t i = 0; i < rank; i++) {
        dims[i] = shape[i];
        if (!nib_mul(elements, shape[i], &elements))
            return nib_fail(NIB_ERR_SHAPE, "tensor %s would have more elements than can be counted",
                            nib_quote(name).text);
    }
    if (dtype < NIB_DTYPE_COUNT && !nib_mul(elements, nib_dtypes[dtype].bits, &bits))
        return nib_fail(NIB_ERR_SHAPE, "tensor %s would have more bytes than can be counted", nib_quote(name).text);
    if (plan->n_files == 0)
        TRY(nib_plan_next(plan, 0, 0));
    if (index)
        *index = (uint32_t)plan->n_tensors;
    plan->tensors[plan->n_tensors++] = (struct nib_out_tensor){ .name = name,
                                                                .dtype = dtype,
                                                                .ggml_type = -1,
                                                                .rank = rank,
                                                                .shape = dims,
                                                                .bytes = (uint64_t)bits / 8,
                                                                .producer = producer,
                                                                .source = source,
                                                                .step = 1 };
    plan->files[plan->n_files - 1].tensors++;
    plan->files[plan->n_files - 1].entries += entry_bytes(name, rank, dims);
    return NIB_OK;
}

nib_status nib_plan_add_copy(nib_plan *plan, uint32_t tensor)
{
    const struct nib_ck_tensor *t = &plan->in->tensors[tensor];
    if (t->ggml_type >= 0 && t->dtype == NIB_DTYPE_COUNT && !plan->gguf) {
        char buffer[512];
        return nib_fail(NIB_ERR_UNSUPPORTED, "%s has GGML type %d, which safetensors files cannot hold",
                        nib_ck_place(plan->in, tensor, buffer, sizeof buffer), t->ggml_type);
    }
    uint32_t index;
    TRY(nib_plan_add_tensor(plan, t->name, t->dtype, t->rank, t->shape, NIB_PRODUCE_COPY, tensor, &index));
    plan->tensors[index].bytes = t->bytes;
    if (t->dtype == NIB_DTYPE_COUNT)
        plan->tensors[index].ggml_type = t->ggml_type;
    return NIB_OK;
}

/* ---- Tensors of a weight ---- */

static nib_status add_part(nib_plan *plan, const char *name, const char *suffix, nib_dtype dtype, int64_t rank,
                           const int64_t *shape, uint32_t *index)
{
    const char *full = nib_plan_string(plan, "%s%s", name, suffix);
    return full ? nib_plan_add_tensor(plan, full, dtype, rank, shape, NIB_PRODUCE_WEIGHT, NIB_NONE, index)
                : no_memory();
}

static bool writes_values(const struct nib_out_weight *w)
{
    return w->laying != NIB_LAY_MXFP4 && (w->action == NIB_ACTION_DEQUANTIZE || w->action == NIB_ACTION_KEEP);
}

static bool has_tensor_scale(const struct nib_out_weight *w)
{
    return !writes_values(w) && w->laying != NIB_LAY_MXFP4 && w->action != NIB_ACTION_FP8;
}

/* Data and scales; the matrices of a stack that is written whole share them, and the first brings them. */
static nib_status add_data(nib_plan *plan, struct nib_out_weight *w, const char *name,
                           const struct nib_ck_layout *layout)
{
    const int64_t rows = w->source.rows, cols = w->source.cols;
    const bool columns = w->laying == NIB_LAY_STACK, stack = w->stacked;
    const char *data = layout->suffixes[NIB_ROLE_DATA];
    if (writes_values(w)) {
        const int64_t shape[] = { w->experts, columns ? cols : rows, columns ? rows : cols };
        return add_part(plan, name, data, w->dtype, stack ? 3 : 2, shape + !stack, &w->out[NIB_ROLE_DATA]);
    }
    if (w->action == NIB_ACTION_FP8) {
        /* A scale for each row: F32 [N] for ModelOpt; [N, 1] for compressed-tensors, in BF16, which transformers rounds to. */
        const bool ct = plan->format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS;
        const int64_t shape[] = { rows, cols }, scale[] = { rows, 1 };
        TRY(add_part(plan, name, data, NIB_E4M3, 2, shape, &w->out[NIB_ROLE_DATA]));
        return add_part(plan, name, layout->suffixes[NIB_ROLE_SCALE], ct ? NIB_BF16 : NIB_F32, ct ? 2 : 1, scale,
                        &w->out[NIB_ROLE_SCALE]);
    }
    if (w->laying == NIB_LAY_GGUF || w->laying == NIB_LAY_MXFP4) {
        const int64_t shape[] = { w->experts, rows, cols };
        TRY(add_part(plan, name, data, NIB_DTYPE_COUNT, stack ? 3 : 2, shape + !stack, &w->out[NIB_ROLE_DATA]));
        struct nib_out_tensor *t = &plan->tensors[w->out[NIB_ROLE_DATA]];
        t->ggml_type = w->laying == NIB_LAY_GGUF ? NIB_GGUF_NVFP4 : NIB_GGUF_MXFP4;
        return nib_gguf_bytes(NIB_ERR_SHAPE, (uint32_t)t->ggml_type, (int)t->rank, t->shape, &t->bytes);
    }
    const int64_t codes[] = { w->experts, columns ? cols / 2 : rows, columns ? rows : cols / 2 };
    const int64_t scales[] = { w->experts, columns ? cols / 16 : rows, columns ? rows : cols / 16 };
    TRY(add_part(plan, name, data, NIB_U8, stack ? 3 : 2, codes + !stack, &w->out[NIB_ROLE_DATA]));
    return add_part(plan, name, layout->suffixes[NIB_ROLE_SCALE], NIB_E4M3, stack ? 3 : 2, scales + !stack,
                    &w->out[NIB_ROLE_SCALE]);
}

static nib_status add_tensor_scales(nib_plan *plan, struct nib_out_weight *w, const char *name,
                                    const struct nib_ck_layout *layout, bool with_input)
{
    const int64_t rank = w->laying == NIB_LAY_STACK ? 0 : nib_ck_formats[plan->format].tensor_scale_rank;
    const int64_t values = w->stacked ? w->experts : 1;
    for (int role = NIB_ROLE_TENSOR_SCALE; has_tensor_scale(w) && role <= NIB_ROLE_INPUT; role++)
        if (role != NIB_ROLE_INPUT || with_input)
            TRY(add_part(plan, name, layout->suffixes[role], NIB_F32, rank, &values, &w->out[role]));
    return NIB_OK;
}

nib_status nib_plan_add_weight(nib_plan *plan, struct nib_out_weight *w, bool with_input)
{
    struct nib_out_weight *weights =
        nib_grow(plan->weights, &plan->weights_capacity, plan->n_weights + 1, sizeof *weights);
    if (!weights)
        return no_memory();
    plan->weights = weights;
    const bool stack = w->stacked && !plan->gguf; /* whose stacks are called as matrices are */
    const nib_checkpoint_format format = writes_values(w)              ? NIB_CHECKPOINT_FORMAT_PLAIN
                                         : w->action == NIB_ACTION_FP8 ? NIB_CHECKPOINT_FORMAT_FP8
                                                                       : plan->format;
    const struct nib_ck_layout *layout = stack ? nib_ck_stack_layout(format) : &nib_ck_formats[format].layouts[0];
    /* A whole stack bears the name of the tensor that it comes from. */
    const char *name = w->name ? w->name : stack ? nib_ck_stack_name(plan, w) : w->source.name;
    if (!name)
        return no_memory();
    if (w->index == 0) {
        for (int role = 0; role < NIB_ROLE_COUNT; role++)
            w->out[role] = NIB_NONE;
        TRY(add_data(plan, w, name, layout));
        TRY(add_tensor_scales(plan, w, name, layout, with_input));
    } else {
        memcpy(w->out, plan->weights[plan->n_weights - 1].out, sizeof w->out);
        if (stack) /* which has one tensor scale: the first writes it */
            w->out[NIB_ROLE_TENSOR_SCALE] = w->out[NIB_ROLE_INPUT] = NIB_NONE;
    }
    plan->weights[plan->n_weights++] = *w;
    return NIB_OK;
}

const char *nib_ck_stack_name(nib_plan *plan, const struct nib_out_weight *w)
{
    const char *name = plan->in->tensors[w->source.tensor[NIB_ROLE_DATA]].name;
    const size_t suffix = strlen(w->source.layout->suffixes[NIB_ROLE_DATA]); /* "_blocks", for one */
    return suffix ? nib_plan_string(plan, "%.*s", (int)(strlen(name) - suffix), name) : name;
}

/* ---- The end of a plan ---- */

struct placed {
    uint32_t tensor, file;
    uint64_t begin;
};

static int by_place(const void *left, const void *right)
{
    const struct placed *a = left, *b = right;
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return a->tensor < b->tensor ? -1 : a->tensor > b->tensor; /* tensors without bytes */
}

nib_status nib_ck_order_by_place(const nib_checkpoint *c, uint32_t *order)
{
    struct placed *placed = nib_alloc((c->n_tensors + 1) * sizeof *placed);
    if (!placed)
        return no_memory();
    nib_status status = NIB_OK;
    for (size_t i = 0; i < c->n_tensors && !status; i++) {
        const struct nib_ck_tensor *t = &c->tensors[i];
        placed[i] = (struct placed){ .tensor = (uint32_t)i, .file = t->file, .begin = t->entry };
        nib_entry entry;
        if (c->files[t->file].safetensors) {
            status = nib_file_entry(c->files[t->file].safetensors, t->entry, &entry);
            if (!status)
                placed[i].begin = entry.begin;
        }
    }
    qsort(placed, c->n_tensors, sizeof *placed, by_place);
    for (size_t i = 0; i < c->n_tensors; i++)
        order[i] = placed[i].tensor;
    nib_free(placed);
    return status;
}

/* Wide dtypes first, then by name: the reference's order, in which every tensor is aligned. GGUF files keep theirs. */
static int by_layout(const void *left, const void *right)
{
    const struct nib_out_tensor *a = *(const struct nib_out_tensor *const *)left,
                                *b = *(const struct nib_out_tensor *const *)right;
    const int rank_a = nib_safetensors_rank(a->dtype), rank_b = nib_safetensors_rank(b->dtype);
    return rank_a != rank_b ? rank_b - rank_a : strcmp(a->name, b->name);
}

static int by_name(const void *left, const void *right)
{
    return strcmp((*(const struct nib_out_tensor *const *)left)->name,
                  (*(const struct nib_out_tensor *const *)right)->name);
}

static nib_status check_names(const nib_plan *plan, const struct nib_out_tensor **scratch)
{
    for (size_t i = 0; i < plan->n_tensors; i++)
        scratch[i] = &plan->tensors[i];
    qsort(scratch, plan->n_tensors, sizeof *scratch, by_name);
    for (size_t i = 1; i < plan->n_tensors; i++)
        if (!strcmp(scratch[i - 1]->name, scratch[i]->name))
            return nib_fail(NIB_ERR_DATA, "%s: two tensors of the output would be called %s", plan->in->path,
                            nib_quote(scratch[i]->name).text);
    return NIB_OK;
}

/* Put the tensors of every file in the order of their bytes; weights follow them. */
static nib_status sort_tensors(nib_plan *plan, const struct nib_out_tensor **scratch)
{
    struct nib_out_tensor *sorted = nib_alloc((plan->n_tensors + 1) * sizeof *sorted);
    uint32_t *now_at = nib_alloc((plan->n_tensors + 1) * sizeof *now_at);
    if (!sorted || !now_at) {
        nib_free(sorted);
        nib_free(now_at);
        return no_memory();
    }
    for (size_t i = 0; i < plan->n_tensors; i++)
        scratch[i] = &plan->tensors[i];
    for (size_t f = 0; f < plan->n_files && !plan->gguf; f++)
        qsort(scratch + plan->files[f].first, plan->files[f].tensors, sizeof *scratch, by_layout);
    for (size_t i = 0; i < plan->n_tensors; i++) {
        sorted[i] = *scratch[i];
        now_at[scratch[i] - plan->tensors] = (uint32_t)i;
    }
    if (plan->n_tensors)
        memcpy(plan->tensors, sorted, plan->n_tensors * sizeof *sorted);
    for (size_t i = 0; i < plan->n_weights; i++)
        for (int role = 0; role < NIB_ROLE_COUNT; role++)
            if (plan->weights[i].out[role] != NIB_NONE)
                plan->weights[i].out[role] = now_at[plan->weights[i].out[role]];
    nib_free(sorted);
    nib_free(now_at);
    return NIB_OK;
}

static nib_status name_files(nib_plan *plan)
{
    for (size_t i = 0; i < plan->n_files; i++) {
        struct nib_out_file *file = &plan->files[i];
        if (plan->gguf)
            file->name = "model.gguf";
        else if (plan->keep_split && plan->in->is_directory && plan->in->files[file->input_file].safetensors)
            file->name = plan->in->files[file->input_file].name;
        else if (plan->n_files == 1)
            file->name = "model.safetensors";
        else
            file->name = nib_plan_string(plan, "model-%05zu-of-%05zu.safetensors", i + 1, plan->n_files);
        if (!file->name)
            return no_memory();
    }
    return NIB_OK;
}

nib_status nib_plan_finish(nib_plan *plan, nib_plan **out)
{
    const struct nib_out_tensor **scratch = nib_alloc((plan->n_tensors + 1) * sizeof *scratch);
    nib_status status = scratch ? NIB_OK : no_memory();
    if (!status && plan->n_files == 0)
        status = nib_plan_next(plan, 0, 0);
    if (!status)
        status = check_names(plan, scratch);
    if (!status)
        status = sort_tensors(plan, scratch);
    nib_free(scratch);
    if (!status)
        status = name_files(plan);
    if (!status)
        status = nib_plan_configure(plan);
    if (!status && plan->architecture)
        status = nib_plan_make_keys(plan);
    for (size_t i = 0; i < plan->n_files && !status; i++)
        status = nib_plan_lay_out(plan, &plan->files[i]);
    if (status) {
        nib_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return NIB_OK;
}

/* ---- A plan as the caller sees it ---- */

/* A weight with a reason to stay is kept, though its checkpoint format may not be: what was FP8 blocks or MXFP4 stays in the values
 * that it stands for. */
static bool changes(const struct nib_out_row *row) { return row->action != NIB_ACTION_KEEP && !*row->reason; }

nib_status nib_plan_get_facts(const nib_plan *plan, nib_plan_facts *out)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(out);
    TRY(nib_struct_check_output("nib_plan_facts", out, NIB_UP_TO(nib_plan_facts, note)));
    nib_plan_facts facts = { .weights = plan->in->n_weights,
                             .rows = plan->in->n_weights + plan->n_others,
                             .note = plan->note,
                             .elements = nib_ck_elements(plan->in),
                             .files_in = plan->in->n_files,
                             .files_out = plan->n_files };
    for (size_t i = 0; i < plan->in->n_weights; i++) {
        const struct nib_out_row *row = &plan->rows[i];
        const struct nib_ck_weight *w = &plan->in->weights[i];
        facts.changed += changes(row);
        facts.kept += !changes(row);
        facts.groups += row->group_name == i;
        facts.changed_elements += changes(row) ? (uint64_t)w->rows * (uint64_t)w->cols : 0;
        facts.changed_bytes_out += changes(row) ? row->bytes_out : 0;
    }
    for (size_t i = 0; i < plan->in->n_files; i++)
        facts.bytes_in += plan->in->files[i].bytes;
    for (size_t i = 0; i < plan->n_files; i++)
        facts.bytes_out += plan->files[i].bytes;
    for (size_t i = 0; i < plan->n_tensors; i++)
        facts.tensor_bytes_out += plan->tensors[i].bytes;
    nib_struct_write(out, &facts, sizeof facts);
    return NIB_OK;
}

/* Of more than two dims all but the last are its rows. */
static nib_plan_row other_row(const nib_plan *plan, const struct nib_out_other *other)
{
    const struct nib_ck_tensor *t = &plan->in->tensors[other->tensor];
    nib_plan_row row = { .name = t->name,
                         .action = NIB_ACTION_KEEP,
                         .reason = other->reason,
                         .rows = 1,
                         .cols = t->shape[t->rank - 1],
                         .bytes_in = t->bytes,
                         .bytes_out = t->bytes,
                         .group = "",
                         .statistics = "",
                         .fold = "",
                         .gptq = "" };
    for (int64_t i = 0; i + 1 < t->rank; i++)
        row.rows = t->bytes ? row.rows * t->shape[i] : 0; /* with data the file bounds the product */
    return row;
}

nib_status nib_plan_get_row(const nib_plan *plan, size_t index, nib_plan_row *out)
{
    NIB_REQUIRE(plan);
    NIB_REQUIRE(out);
    TRY(nib_struct_check_output("nib_plan_row", out, NIB_UP_TO(nib_plan_row, gptq)));
    const size_t weights = plan->in->n_weights;
    if (index >= weights + plan->n_others)
        return nib_fail(NIB_ERR_ARG, "there is no row %zu: the plan has %zu", index, weights + plan->n_others);
    if (index >= weights) {
        const nib_plan_row row = other_row(plan, &plan->others[index - weights]);
        nib_struct_write(out, &row, sizeof row);
        return NIB_OK;
    }
    const struct nib_ck_weight *w = &plan->in->weights[index];
    const struct nib_out_row *row = &plan->rows[index];
    const nib_plan_row found = { .name = w->name,
                                 .action = row->action,
                                 .reason = row->reason,
                                 .rows = w->rows,
                                 .cols = w->cols,
                                 .bytes_in = row->bytes_in,
                                 .bytes_out = row->bytes_out,
                                 .group = row->group_name == NIB_NONE ? "" : plan->in->weights[row->group_name].name,
                                 .statistics = row->statistics,
                                 .tokens = row->tokens,
                                 .fold = row->fold,
                                 .gptq = row->gptq };
    nib_struct_write(out, &found, sizeof found);
    return NIB_OK;
}

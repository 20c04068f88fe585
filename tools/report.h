/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.h - what quantization did to a model, as a page to look at or as JSON to compute with.
 */
#ifndef NIB_REPORT_H
#define NIB_REPORT_H

#include <jansson.h>
#include <stdbool.h>

#include "nib_checkpoint.h"

/* One weight that both checkpoints have. */
struct report_row {
    const char *name;
    int64_t rows, cols;
    nib_checkpoint_format format_a, format_b;
    double sqnr, relative; /* decibels, and the error's share by L2 norm */
    double max_error, amax;
    int64_t zeroed, clipped, underflowed, elements, blocks;
    size_t detail; /* in report.details; REPORT_NONE where it has none */
};

/* A weight of either, with what became of it: what the plan says, and what the comparison found. */
struct report_item {
    const char *name;
    const char *fate, *reason;    /* "kept", and why; the reason may be "" */
    bool kept;                    /* it has the values that it had */
    int64_t rows, cols;           /* 0 where it is not known */
    uint64_t before, after;       /* bytes; 0 where it is not there */
    const struct report_row *row; /* NULL where only one has it */
};

/* Weights that have the same place in a layer: all of q_proj, all of the experts' up_proj. */
struct report_kind {
    char name[64];
    size_t weights;
    uint64_t elements, before, after;
};

#define REPORT_NONE SIZE_MAX
enum { REPORT_DETAILS = 256 }; /* weights that are shown one by one: the worst */

struct report {
    const nib_checkpoint *a, *b;
    nib_checkpoint_facts facts_a, facts_b;
    struct report_row *rows; /* in the order of names; borrowed names live as long as the checkpoints */
    size_t n, capacity;
    size_t only_a, only_b;
    size_t changed;                    /* rows whose values differ */
    double sum_squares, error_squares; /* of those */
    int64_t elements, zeroed, clipped, underflowed, blocks;
    int64_t codes[16], scales[256];
    nib_weight_stats *details;       /* of the REPORT_DETAILS worst rows */
    size_t detailed[REPORT_DETAILS]; /* these */
    size_t n_details;
    bool no_memory;
};

/* Everything that a page or a file says about weights one by one, and about kinds of them; the largest kind first. */
struct report_items {
    struct report_item *items; /* the worst first, then what did not change */
    size_t n;
    struct report_kind *kinds;
    size_t n_kinds;
    struct report_kind others; /* tensors that are in no weight */
    bool planned;
    nib_plan_facts plan; /* where it is planned */
};

/* Compare every weight. CANCELLED and errors as nib_checkpoint_compare has them. */
nib_status report_collect(struct report *report, const nib_checkpoint *original, const nib_checkpoint *quantized,
                          const nib_job *job);
void report_free(struct report *report);
/* The rows that changed, worst first; freed with free. NULL without memory. */
const struct report_row **report_worst(const struct report *report);

/* Who made the plan need not be there: then what became of a weight is what can be seen. False without memory. */
bool report_list(const struct report *report, const nib_plan *plan, struct report_items *out);
void report_items_free(struct report_items *items);
/* "model.layers.3.mlp.experts.7.up_proj" is layer 3, and "experts up_proj"; -1 where there is no layer. */
int report_split_name(const char *name, char *kind, size_t bytes);

/* A row as an object; NULL without memory. */
json_t *report_row_json(const struct report_row *row);

/* FILE.html or FILE.json; whatever it is, it appears under its name when it is complete. `plan` may be NULL. False, with
 * a message on standard error. */
bool report_write(const struct report *report, const nib_plan *plan, const char *path);
/* Both at once, for a command that has just written `quantized`. */
bool report_make(const char *path, const nib_checkpoint *original, const nib_checkpoint *quantized,
                 const nib_plan *plan, const nib_job *job);
/* Before a run: whether a report can be written there, which is tried unless `name_only`. `a` and `b` are the checkpoints
 * of which nothing may be replaced; b may be a directory that the run will make. If not, a message is on standard
 * error. */
bool report_can_write(const char *path, const char *a, const char *b, bool name_only);
/* The same of a file that is read besides; NULL for none. */
bool report_spares(const char *path, const char *read);

/* What two provenances say differently: [{"option": "options.scale_rule", "a": "rtn", "b": "sweep"}, ...]; a value that
 * one lacks is null. Either may be NULL. NULL without memory. */
json_t *report_differences(const char *a, const char *b);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * panels.h - the work of a run in panels, and their order (panels.c).
 *
 * Codes by GPTQ need the factor of a Hessian, which is large: panels go by stages, one factor after the other.
 */
#ifndef NIB_PANELS_H
#define NIB_PANELS_H

#include "run/run.h"

/* A panel of work: rows of a weight, or bytes of a tensor. */
struct nib_run_panel {
    uint32_t file;
    uint32_t weight, tensor; /* one of them is NIB_NONE */
    int64_t first, count;    /* rows, or bytes */
    uint32_t stage;
    uint64_t after; /* a scan that goes along has passed to here: what it takes is known, and lately read */
};

/* What is written under one factor of GPTQ; the first is without. Stages come one after the other, so that one factor at
 * a time is in memory. Panels without one go with the stage that was begun last, so that files are done in their order. */
struct nib_run_stage {
    uint32_t hessian; /* of the plan; NIB_NONE: none */
    const float *columns;
    size_t begin, end; /* of its panels */
};

struct nib_run_panels {
    struct nib_run_panel *list;
    size_t n, capacity;
    struct nib_run_stage *stages;
    size_t n_stages, stages_capacity;
};

/* The panels of one more output file, which has these weights of the plan. */
nib_status nib_run_panels_cut(struct nib_run_panels *panels, const struct nib_run *run, uint32_t file,
                              size_t first_weight, size_t weights);
/* When all files are there: panels by their stages, in each as they were. */
nib_status nib_run_panels_sort(struct nib_run_panels *panels);
/* In the order in which a scan that goes along comes to them; there is one stage. */
nib_status nib_run_panels_follow(struct nib_run_panels *panels, const nib_plan *plan, struct nib_scan *scan);
/* Bytes of the input that a panel is made of. */
uint64_t nib_run_panel_bytes(const nib_plan *plan, const struct nib_run_panel *panel);
void nib_run_panels_free(struct nib_run_panels *panels);

#endif

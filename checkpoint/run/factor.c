/* SPDX-License-Identifier: Apache-2.0 */
/*
 * factor.c - what GPTQ needs of the Hessian of an input: read, folded, factorized by all threads, one at a time.
 */
#include "run/run.h"

#include <stdio.h>

#include "tensor/gptq.h"

/* The input was divided by these scales, and so its Hessian is, in both directions. */
static void fold(float *hessian, int64_t n, const float *columns)
{
    for (int64_t i = 0; i < n && columns; i++) {
        float *row = hessian + nib_packed_row(n, i);
        for (int64_t j = i; j < n; j++)
            row[j - i] = (float)((double)row[j - i] / ((double)columns[i] * (double)columns[j]));
    }
}

static nib_status warn(struct nib_run *run, const struct nib_hessian *h)
{
    char text[1024];
    snprintf(text, sizeof text,
             "%s: the Hessian of %s is not positive definite, however it is damped: weights that read it keep the "
             "codes of the sweep",
             h->path, nib_quote(h->name).text);
    return nib_run_warn(run, text);
}

static nib_status factorize(struct nib_run *run, const struct nib_hessian *h, const float *hessian,
                            struct nib_factor *out)
{
    nib_device *host;
    double damped;
    TRY(nib_host_create(run->threads, &host));
    const nib_status status = nib_factorize(host, NULL, hessian, h->cols, run->plan->damp, out->order, out->u, &damped);
    nib_device_release(host);
    if (status == NIB_ERR_ARG) { /* a negative diagonal: the rest was checked when the file was opened */
        char message[400];
        snprintf(message, sizeof message, "%s", nib_last_error());
        return nib_fail(NIB_ERR_DATA, "%s: %s.hessian: %s", h->path, nib_quote(h->name).text, message);
    }
    out->usable = status == NIB_OK;
    return status == NIB_ERR_DATA ? warn(run, h) : status;
}

nib_status nib_run_factorize(struct nib_run *run, uint32_t hessian, const float *columns, struct nib_factor *out)
{
    const struct nib_hessian h = nib_hessians_at(run->plan->hessians, hessian);
    const size_t n = (size_t)h.cols;
    float *packed = nib_alloc(n * (n + 1) / 2 * sizeof *packed);
    out->order = nib_alloc(n * sizeof *out->order);
    out->u = nib_alloc(n * n * sizeof *out->u);
    nib_status status = packed && out->order && out->u
                            ? nib_hessians_read(run->plan->hessians, hessian, packed)
                            : nib_fail(NIB_ERR_MEMORY, "no memory for GPTQ of %zu columns: it needs %.1f GB", n,
                                       (double)(n * n) * 10 / 1e9);
    if (!status) {
        fold(packed, h.cols, columns);
        status = factorize(run, &h, packed, out);
    }
    nib_free(packed);
    if (status)
        nib_run_free_factor(out);
    return status;
}

void nib_run_free_factor(struct nib_factor *factor)
{
    nib_free(factor->order);
    nib_free(factor->u);
    *factor = (struct nib_factor){ 0 };
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_values.c - what the bytes of each weight say: block scales, tensor scales and those of activations, whatever
 * checkpoint format they are in. A fault that explains another keeps the other quiet: a tensor scale that is infinite is
 * not also unequal.
 */
#include "check/check.h"

#include <math.h>
#include <stdatomic.h>

#include "format/codec.h"
#include "model/measure.h"
#include "tensor/quantize.h"

enum { BLOCK = 16, MARLIN_LEAST = 8 /* E4M3 code of 2^-6 */ };

/* ---- Bytes ---- */

/* What its bytes say, gathered on threads. */
struct scan {
    int64_t blocks, nan, negative;
    int64_t zero, subnormal; /* blocks with such a scale that have something in them */
    uint8_t largest;
    bool nonzero;
    bool unreadable; /* DATA, and not because of something that was said already */
};

struct scanning {
    struct nib_checking *k;
    struct scan *scans;
    atomic_size_t next;
    atomic_int stop;
    atomic_flag busy;
    atomic_ullong done;
    nib_error *errors;
};

static bool is_block_empty(const uint8_t *codes, int64_t bytes)
{
    uint64_t all = 0;
    if (bytes == 8)
        memcpy(&all, codes, 8);
    else
        for (int64_t i = 0; i < bytes; i++)
            all |= codes[i];
    return (all & 0x7777777777777777u) == 0; /* the sign of a zero does not count */
}

static void scan_row(const uint8_t *codes, const uint8_t *scales, int64_t cols, struct scan *scan)
{
    const int64_t blocks = nib_ceil_div(cols, BLOCK), bytes = nib_ceil_div(cols, 2);
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t s = scales[b] & 0x7F;
        const bool empty = is_block_empty(codes + 8 * b, nib_min(8, bytes - 8 * b));
        scan->nonzero |= !empty;
        scan->nan += s == 0x7F;
        scan->negative += scales[b] >= 0x80 && s != 0x7F;
        scan->zero += !empty && s == 0;
        scan->subnormal += !empty && s > 0 && s < MARLIN_LEAST;
        if (s != 0x7F && s > scan->largest)
            scan->largest = s;
    }
    scan->blocks += blocks;
}

static nib_status scan_weight(const nib_checkpoint *c, const struct nib_ck_weight *w, uint64_t memory, struct scan *out)
{
    const int64_t blocks = nib_ceil_div(w->cols, BLOCK), bytes = nib_ceil_div(w->cols, 2);
    const uint64_t usual = 4 << 20, share = w->transposed ? memory / 4 : memory < usual ? memory : usual;
    const int64_t panel = nib_max(1, nib_min(w->rows, (int64_t)(share / (uint64_t)nib_max(1, blocks + bytes))));
    uint8_t *codes = nib_alloc((size_t)(panel * bytes)), *scales = nib_alloc((size_t)(panel * blocks));
    nib_status status = codes && scales ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "no memory for rows of %s", w->name);
    struct scan scan = { 0 };
    for (int64_t first = 0; !status && first < w->rows; first += panel) {
        const int64_t count = nib_min(panel, w->rows - first);
        status = nib_ck_read_codes(c, w, first, count, codes, scales);
        for (int64_t r = 0; !status && r < count; r++)
            scan_row(codes + r * bytes, scales + r * blocks, w->cols, &scan);
    }
    nib_free(codes);
    nib_free(scales);
    if (!status)
        *out = scan;
    return status;
}

uint64_t nib_check_scanned_bytes(const struct nib_ck_weight *w)
{
    return nib_ck_is_nvfp4(w->format) ? (uint64_t)w->rows * (uint64_t)w->cols / BLOCK * 9 : 0;
}

static void scan_some(void *context, int64_t worker)
{
    struct scanning *s = context;
    const nib_checkpoint *c = s->k->c;
    while (!atomic_load(&s->stop)) {
        const size_t i = atomic_fetch_add(&s->next, 1);
        if (i >= c->n_weights)
            return;
        const struct nib_ck_weight *w = &c->weights[i];
        nib_status status = NIB_OK;
        if (nib_ck_is_nvfp4(w->format) && !s->k->broken[w->tensor[NIB_ROLE_DATA]])
            status = scan_weight(c, w, s->k->job.max_memory / (uint64_t)s->k->job.threads, &s->scans[i]);
        if (status == NIB_ERR_DATA) {
            s->scans[i].unreadable = true;
            status = NIB_OK;
        }
        const uint64_t done = atomic_fetch_add(&s->done, nib_check_scanned_bytes(w));
        if (!status && s->k->job.progress && !atomic_flag_test_and_set(&s->busy)) {
            status = nib_ck_report(&s->k->job, "checking", w->name, done, s->k->total);
            atomic_flag_clear(&s->busy);
        }
        if (status) {
            nib_get_error(&s->errors[worker]);
            atomic_store(&s->stop, 1);
            return;
        }
    }
}

static nib_status scan_all(struct nib_checking *k, struct scan *scans)
{
    nib_error *errors = nib_alloc_zeroed((size_t)k->job.threads * sizeof *errors);
    if (!errors)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for a check", k->c->path);
    struct scanning s = { .k = k, .scans = scans, .errors = errors };
    atomic_flag_clear(&s.busy);
    nib_parallel(k->job.threads, k->job.threads, scan_some, &s);
    nib_status status = NIB_OK;
    for (int i = 0; !status && i < k->job.threads; i++)
        if (errors[i].status)
            status = nib_fail(errors[i].status, "%s", errors[i].text);
    nib_free(errors);
    return status;
}

/* ---- Findings ---- */

/* The largest magnitude that a weight can have with this multiplier. */
static double amax_of(const struct nib_check_weight *w, double multiplier)
{
    return (double)nib_f32_from_e4m3(w->largest) * 6 * multiplier;
}

static double multiplier_of(const struct nib_check_weight *w)
{
    return w->kind == NIB_TENSOR_SCALE_DIVISOR ? 1 / (double)w->tensor_scale : (double)w->tensor_scale;
}

/* Weights of models are smaller than a thousand, and their inverses are not. */
static bool is_inverted(const struct nib_check_weight *w)
{
    enum { LARGEST = 1000 };
    const double stored = multiplier_of(w);
    return amax_of(w, stored) > LARGEST && amax_of(w, 1 / stored) < LARGEST && amax_of(w, 1 / stored) > 1e-5;
}

/* An activation beyond 10^5 has no place in FP16 and no model has it. */
static bool is_input_inverted(const struct nib_check_weight *w)
{
    const double stored = w->kind == NIB_TENSOR_SCALE_DIVISOR ? 1 / (double)w->input : (double)w->input;
    return stored * 2688 > 1e5 && 2688 / stored < 1e5;
}

static nib_status check_tensor_scale(struct nib_checking *k, const struct nib_ck_weight *w, const struct scan *scan,
                                     struct nib_check_weight *out)
{
    const char *tensor = nib_check_tensor(k->c, w, NIB_ROLE_TENSOR_SCALE);
    if (w->tensor[NIB_ROLE_TENSOR_SCALE] == NIB_NONE) {
        out->tensor_scale_good = nib_ck_formats[w->format].tensor_scale_optional; /* it is 1 then */
        return NIB_OK;
    }
    if (k->broken[w->tensor[NIB_ROLE_TENSOR_SCALE]])
        return NIB_OK;
    TRY(nib_ck_read_tensor_scale(k->c, w, &out->kind, &out->tensor_scale));
    if (!isfinite(out->tensor_scale))
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_NOT_FINITE, tensor, "it is %g", (double)out->tensor_scale);
    if (out->tensor_scale < 0 || (out->tensor_scale == 0 && out->kind != NIB_TENSOR_SCALE_AMAX))
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_NOT_POSITIVE, tensor, "it is %g", (double)out->tensor_scale);
    if (scan->nonzero && out->kind != NIB_TENSOR_SCALE_AMAX && is_inverted(out)) {
        out->tensor_scale_inverted = true;
        return nib_check_found_in(k, w->tensor[NIB_ROLE_DATA], NIB_FAULT_TENSOR_SCALE_INVERTED, tensor,
                                  "%g as a %s makes weights of up to %.3g, its inverse %.3g", (double)out->tensor_scale,
                                  out->kind == NIB_TENSOR_SCALE_DIVISOR ? "divisor" : "multiplier",
                                  amax_of(out, multiplier_of(out)), amax_of(out, 1 / multiplier_of(out)));
    }
    out->tensor_scale_good = true;
    return NIB_OK;
}

static nib_status check_input(struct nib_checking *k, const struct nib_ck_weight *w, struct nib_check_weight *out)
{
    const char *tensor = nib_check_tensor(k->c, w, NIB_ROLE_INPUT);
    int has_input;
    if (w->tensor[NIB_ROLE_INPUT] == NIB_NONE || k->broken[w->tensor[NIB_ROLE_INPUT]])
        return NIB_OK;
    TRY(nib_ck_read_input(k->c, w, &has_input, &out->input));
    if (!isfinite(out->input))
        return nib_check_found_in(k, w->tensor[NIB_ROLE_DATA], NIB_FAULT_INPUT_NOT_FINITE, tensor, "it is %g",
                                  (double)out->input);
    if (out->input <= 0)
        return nib_check_found_in(k, w->tensor[NIB_ROLE_DATA], NIB_FAULT_INPUT_NOT_POSITIVE, tensor, "it is %g",
                                  (double)out->input);
    if (is_input_inverted(out)) {
        out->input_inverted = isfinite(1 / out->input); /* the smallest values have no inverse */
        return nib_check_found_in(
            k, w->tensor[NIB_ROLE_DATA], NIB_FAULT_INPUT_INVERTED, tensor,
            "%g as a %s expects activations of up to %.3g", (double)out->input,
            out->kind == NIB_TENSOR_SCALE_DIVISOR ? "divisor" : "multiplier",
            2688 * (out->kind == NIB_TENSOR_SCALE_DIVISOR ? 1 / (double)out->input : (double)out->input));
    }
    out->input_good = true;
    return NIB_OK;
}

static nib_status check_scales(struct nib_checking *k, const struct nib_ck_weight *w, const struct scan *scan)
{
    const char *tensor =
        nib_check_tensor(k->c, w, w->tensor[NIB_ROLE_SCALE] == NIB_NONE ? NIB_ROLE_DATA : NIB_ROLE_SCALE);
    const long long blocks = scan->blocks;
    if (scan->nan)
        TRY(nib_check_found(k, NIB_FAULT_SCALE_NAN, tensor, "%lld of %lld scales are NaN", (long long)scan->nan,
                            blocks));
    if (scan->negative)
        TRY(nib_check_found(k, NIB_FAULT_SCALE_NEGATIVE, tensor, "%lld of %lld scales have their sign bit set",
                            (long long)scan->negative, blocks));
    if (scan->zero)
        TRY(nib_check_found(k, NIB_FAULT_SCALE_ZERO, tensor, "%lld of %lld blocks have scale 0 and codes that are not",
                            (long long)scan->zero, blocks));
    if (scan->subnormal)
        TRY(nib_check_found(
            k, scan->subnormal * 100 >= scan->blocks ? NIB_FAULT_SCALE_SUBNORMAL : NIB_FAULT_SCALE_SUBNORMAL_FEW,
            tensor, "%lld of %lld blocks have a scale below 2^-6", (long long)scan->subnormal, blocks));
    return NIB_OK;
}

static nib_status check_weight(struct nib_checking *k, size_t i, const struct scan *scan)
{
    const struct nib_ck_weight *w = &k->c->weights[i];
    struct nib_check_weight *out = &k->weights[i];
    uint8_t none;
    out->nvfp4 = true;
    out->nonzero = scan->nonzero;
    out->largest = scan->largest;
    out->kind = w->tensor_scale;
    out->tensor_scale = 1;
    if (scan->unreadable && nib_ck_read_codes(k->c, w, 0, 0, &none, &none))
        return nib_check_found(k, NIB_FAULT_UNREADABLE, w->name, "%s", nib_last_error());
    out->all_nan = scan->blocks && scan->nan == scan->blocks && !scan->nonzero;
    if (out->all_nan) {
        TRY(nib_check_found_in(k, w->tensor[NIB_ROLE_DATA], NIB_FAULT_SCALE_ALL_NAN,
                               nib_check_tensor(k->c, w, NIB_ROLE_SCALE), "all %lld scales are NaN and all codes 0",
                               (long long)scan->blocks));
    } else {
        TRY(check_tensor_scale(k, w, scan, out));
        TRY(check_scales(k, w, scan));
    }
    return check_input(k, w, out);
}

nib_status nib_check_weights(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    struct scan *scans = nib_alloc_zeroed((c->n_weights + 1) * sizeof *scans);
    if (!scans)
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for a check", c->path);
    nib_status status = scan_all(k, scans);
    for (size_t i = 0; !status && i < c->n_weights; i++)
        if (nib_ck_is_nvfp4(c->weights[i].format))
            status = check_weight(k, i, &scans[i]);
    nib_free(scans);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_original.c - faults that leave no certain trace in a file: nibbles in the other order, scales in tiles, a wrong
 * tensor scale. With the original they are certain: of several readings of the same bytes one fits it. Without,
 * some can be guessed.
 */
#include "check/check.h"

#include <math.h>

#include "format/codec.h"
#include "model/architectures.h"
#include "model/measure.h"
#include "nib_reference.h"

/* Rows that are looked at: a band of scale tiles. */
enum { SAMPLE_ROWS = 128, BLOCK = 16 };

/* Signal to noise: what a quantization to 4 bits has at least, and what none can have. */
static const double good_db = 12, bad_db = 8, same_db = 60;
/* Under the right tensor scale every code is the nearest, whichever block scales were chosen and why: a tensor scale that is
 * off by d moves about 2 d of normal values past a middle between codes, so that 2 % of them tell of d = 1 %. Where codes
 * are not the nearest, the size of the weight tells: rounding moves it by a percent at most, and what chooses codes by
 * other means (GPTQ, corrections) by some more. */
static const double off_nearest = 0.02, off_share = 0.04, off_share_chosen = 0.15;

static bool has_chosen_codes(const nib_checkpoint *c)
{
    return c->provenance && (strstr(c->provenance, "\"gptq_damp\"") || strstr(c->provenance, "\"codes_xxh3\""));
}

struct sample {
    const struct nib_ck_weight *w;
    int64_t rows, cols, blocks, bytes;
    float tensor_scale;
    float *original, *decoded;
    uint8_t *codes, *scales, *other_codes, *other_scales;
};

static void free_sample(struct sample *s)
{
    nib_free(s->original);
    nib_free(s->decoded);
    nib_free(s->codes);
    nib_free(s->scales);
    nib_free(s->other_codes);
    nib_free(s->other_scales);
}

/* As many rows as there is memory for; 0: not even one. */
static int64_t sample_rows(const struct nib_checking *k, const struct nib_ck_weight *w)
{
    enum { BYTES_OF_ELEMENT = 10 };
    const int64_t fit = (int64_t)(k->job.max_memory / 4 / BYTES_OF_ELEMENT) / nib_max(w->cols, 1);
    return nib_min(nib_min(w->rows, SAMPLE_ROWS), fit);
}

static nib_status make_sample(const struct nib_checking *k, const struct nib_ck_weight *w, struct sample *out)
{
    struct sample s = { .w = w, .rows = sample_rows(k, w), .cols = w->cols };
    s.blocks = nib_ceil_div(s.cols, BLOCK);
    s.bytes = nib_ceil_div(s.cols, 2);
    s.original = nib_alloc((size_t)(s.rows * s.cols) * sizeof(float));
    s.decoded = nib_alloc((size_t)(s.rows * s.cols) * sizeof(float));
    s.codes = nib_alloc((size_t)(s.rows * s.bytes));
    s.scales = nib_alloc((size_t)(s.rows * s.blocks));
    s.other_codes = nib_alloc((size_t)(s.rows * s.bytes));
    s.other_scales = nib_alloc((size_t)(s.rows * s.blocks));
    if (!s.original || !s.decoded || !s.codes || !s.scales || !s.other_codes || !s.other_scales) {
        free_sample(&s);
        return nib_fail(NIB_ERR_MEMORY, "%s: no memory for rows of %s", k->c->path, w->name);
    }
    *out = s;
    return NIB_OK;
}

/* ---- Readings of the same bytes ---- */

static void swap_nibbles(const struct sample *s)
{
    for (int64_t i = 0; i < s->rows * s->bytes; i++)
        s->other_codes[i] = (uint8_t)(s->codes[i] << 4 | s->codes[i] >> 4);
}

/* Scales in tiles of 128 rows by 4 fill as many bytes as in rows only where there is nothing to pad. */
static bool may_be_tiles(const struct sample *s)
{
    return s->rows == SAMPLE_ROWS && s->w->rows % 128 == 0 && s->blocks % 4 == 0;
}

static nib_status unswizzle(const struct sample *s)
{
    return nib_unswizzle_scales(s->scales, s->rows, s->blocks, s->blocks, s->other_scales);
}

/* How well a reading fits: its signal to noise, and with the best factor for all of it. */
struct fit {
    double db, scaled_db, factor;
};

static double db_of(double signal, double noise)
{
    return signal <= 0 ? INFINITY : noise <= 0 ? INFINITY : 10 * log10(signal / noise);
}

static nib_status try_reading(const struct sample *s, const uint8_t *codes, const uint8_t *scales, struct fit *out)
{
    TRY(nib_ck_decode(s->w, s->tensor_scale, codes, scales, s->rows, NIB_F32, s->decoded));
    double aa = 0, ab = 0, bb = 0;
    for (int64_t i = 0; i < s->rows * s->cols; i++) {
        const double a = s->original[i], b = s->decoded[i];
        aa += a * a;
        ab += a * b;
        bb += b * b;
    }
    if (!isfinite(ab) || !isfinite(bb) || bb == 0) {
        const double db = aa > 0 ? -INFINITY : INFINITY;
        *out = (struct fit){ db, db, 1 };
        return NIB_OK;
    }
    /* |a - b|^2 and, for the factor f = ab / bb, |a - f b|^2. */
    *out = (struct fit){ db_of(aa, aa - 2 * ab + bb), db_of(aa, aa - ab * ab / bb), ab / bb };
    return NIB_OK;
}

/* The share of values whose code is not the nearest. */
static nib_status share_off_nearest(const struct sample *s, double *share)
{
    static const double middles[7] = { 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 }, slack = 0x1p-8;
    int64_t off = 0, n = 0;
    memset(s->other_codes, 0x22,
           (size_t)(s->rows * s->bytes)); /* ones: they decode to what codes are multiplied with */
    TRY(nib_ck_decode(s->w, s->tensor_scale, s->other_codes, s->scales, s->rows, NIB_F32, s->decoded));
    for (int64_t i = 0; i < s->rows * s->cols; i++) {
        const int64_t row = i / s->cols, col = i % s->cols;
        const int code = s->codes[row * s->bytes + col / 2] >> 4 * (col % 2) & 7;
        const double x = fabs((double)s->original[i]) / (double)s->decoded[i];
        if (!(s->decoded[i] > 0))
            continue;
        n++;
        off +=
            !((code == 0 || x >= middles[code - 1] * (1 - slack)) && (code == 7 || x <= middles[code] * (1 + slack)));
    }
    *share = n ? (double)off / (double)n : 1;
    return NIB_OK;
}

static nib_status judge(struct nib_checking *k, const struct sample *s)
{
    const char *codes = nib_check_tensor(k->c, s->w, NIB_ROLE_DATA),
               *scales = nib_check_tensor(k->c, s->w, NIB_ROLE_SCALE);
    struct fit as_is, other;
    double share;
    TRY(share_off_nearest(s, &share));
    TRY(try_reading(s, s->codes, s->scales, &as_is));
    const double allowed = has_chosen_codes(k->c) ? off_share_chosen : off_share;
    const bool off = share > off_nearest && fabs(as_is.factor - 1) > allowed;
    if (as_is.db >= bad_db && !(off && as_is.scaled_db >= good_db))
        return NIB_OK;
    if (as_is.scaled_db >= good_db)
        return nib_check_found(k, NIB_FAULT_TENSOR_SCALE_WRONG, nib_check_tensor(k->c, s->w, NIB_ROLE_TENSOR_SCALE),
                               "values are %.4g times those of the original", 1 / as_is.factor);
    swap_nibbles(s);
    TRY(try_reading(s, s->other_codes, s->scales, &other));
    if (other.scaled_db >= good_db)
        return nib_check_found(k, NIB_FAULT_NIBBLES_SWAPPED, codes,
                               "with the two codes of every byte exchanged it is the original, at %.1f dB",
                               other.scaled_db);
    if (may_be_tiles(s)) {
        TRY(unswizzle(s));
        TRY(try_reading(s, s->codes, s->other_scales, &other));
        if (other.scaled_db >= good_db)
            return nib_check_found(k, NIB_FAULT_SCALES_SWIZZLED, scales,
                                   "with scales taken from tiles of 128x4 it is the original, at %.1f dB",
                                   other.scaled_db);
        TRY(try_reading(s, s->other_codes, s->other_scales, &other));
        if (other.scaled_db >= good_db) {
            TRY(nib_check_found(k, NIB_FAULT_NIBBLES_SWAPPED, codes,
                                "with the two codes of every byte exchanged and scales from tiles it is the original"));
            return nib_check_found(k, NIB_FAULT_SCALES_SWIZZLED, scales,
                                   "with scales taken from tiles of 128x4 and codes exchanged it is the original");
        }
    }
    return nib_check_found(k, NIB_FAULT_DIFFERS, codes, "its signal to noise is %.1f dB", as_is.db);
}

/* ---- Against the original ---- */

/* What is kept of FP8 or MXFP4 is plain afterwards, and rounded to its dtype: so is the original here. */
static nib_status compare_kept(struct nib_checking *k, const struct sample *s)
{
    enum { PIECE = 256 };
    const nib_dtype dtype = s->w->format == NIB_CHECKPOINT_FORMAT_PLAIN ? s->w->dtype : NIB_F32;
    const int64_t count = s->rows * s->cols;
    double signal = 0, noise = 0;
    TRY(nib_ck_read_rows(k->c, s->w, 0, s->rows, NIB_F32, s->decoded));
    for (int64_t first = 0; first < count; first += PIECE) {
        float rounded[PIECE], stored[PIECE];
        const size_t n = (size_t)nib_min(count - first, PIECE);
        TRY(nib_encode(dtype, s->original + first, n, stored));
        TRY(nib_decode(dtype, stored, n, rounded));
        for (size_t i = 0; i < n; i++) {
            const double a = rounded[i], d = s->decoded[first + (int64_t)i] - a;
            signal += a * a;
            noise += d * d;
        }
    }
    const double db = db_of(signal, noise);
    const double wanted = s->w->format == NIB_CHECKPOINT_FORMAT_PLAIN ? same_db : bad_db;
    if (db >= wanted)
        return NIB_OK;
    return nib_check_found(k, NIB_FAULT_KEPT_DIFFERS, nib_check_tensor(k->c, s->w, NIB_ROLE_DATA),
                           "its signal to noise is %.1f dB", db);
}

static nib_status check_one(struct nib_checking *k, const struct nib_ck_weight *original, const struct nib_ck_weight *w,
                            size_t index)
{
    const struct nib_check_weight *x = &k->weights[index];
    if (w->rows != original->rows || w->cols != original->cols)
        return nib_check_found(k, NIB_FAULT_WEIGHT_SHAPE, w->name, "it is [%lld, %lld], the original's [%lld, %lld]",
                               (long long)w->rows, (long long)w->cols, (long long)original->rows,
                               (long long)original->cols);
    if (k->broken[w->tensor[NIB_ROLE_DATA]] || (x->nvfp4 && !x->tensor_scale_good) || !w->rows || !w->cols ||
        !sample_rows(k, w))
        return NIB_OK; /* said already, or not to be had */
    struct sample s;
    TRY(make_sample(k, w, &s));
    nib_status status = nib_ck_read_rows(k->original, original, 0, s.rows, NIB_F32, s.original);
    s.tensor_scale = x->tensor_scale;
    if (!status && x->nvfp4)
        status = nib_ck_read_codes(k->c, w, 0, s.rows, s.codes, s.scales);
    if (!status)
        status = x->nvfp4 ? judge(k, &s) : compare_kept(k, &s);
    free_sample(&s);
    return status;
}

/* What llama.cpp wants in a file of its own, such as a vision tower, is not missing. */
static bool is_left_out(const struct nib_checking *k, const struct nib_ck_weight *w)
{
    const struct nib_architecture *a = k->c->architecture ? nib_ck_architecture(k->original) : NULL;
    struct nib_gguf_place place;
    return a && nib_ck_place_weight(k->original, a, w->name, w->rows, &place) && !*place.name;
}

nib_status nib_check_original(struct nib_checking *k)
{
    size_t index;
    if (!k->original)
        return NIB_OK;
    for (size_t i = 0; i < k->original->n_weights; i++) {
        const struct nib_ck_weight *w = &k->original->weights[i];
        TRY(nib_ck_report(&k->job, "comparing", w->name, i, k->original->n_weights));
        struct nib_ck_weight original, own;
        if (nib_ck_counterpart(k->original, i, k->c, &index, &original, &own))
            TRY(check_one(k, &original, &own, index));
        else if (!is_left_out(k, w))
            TRY(nib_check_found(k, NIB_FAULT_WEIGHT_ABSENT, w->name, "it is not there"));
    }
    return NIB_OK;
}

/* ---- Guesses ---- */

/* The share of the variance of a [rows, cols] matrix of scale codes that its rows' and its columns' means explain, less what
 * they would explain of codes in no order. Both together, since a wrong reading may turn rows into columns: where heads have 32
 * rows, tiles of right scales have columns that differ. */
static double structure(const uint8_t *codes, int64_t rows, int64_t cols)
{
    double share = 0, sum = 0, squares = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        sum += codes[i];
        squares += (double)codes[i] * codes[i];
    }
    const double n = (double)(rows * cols), mean = sum / n, variance = squares / n - mean * mean;
    if (!(variance > 0))
        return 0;
    for (int across = 0; across < 2; across++) {
        const int64_t lines = across ? cols : rows, length = across ? rows : cols;
        double spread = 0;
        for (int64_t line = 0; line < lines; line++) {
            double line_sum = 0;
            for (int64_t i = 0; i < length; i++)
                line_sum += codes[across ? i * cols + line : line * cols + i];
            spread += (line_sum / (double)length - mean) * (line_sum / (double)length - mean);
        }
        share += spread / (double)lines / variance - 1 / (double)length;
    }
    return fmax(share, 0);
}

/* Models have rows and columns that are larger than others. Scales that show so only when taken from tiles are in
 * tiles. Of right scales of real models (docs/check.md) tiles never explained a hundredth more than rows did; of those in
 * tiles they explain a fifth more in the median. */
static nib_status guess_tiles(struct nib_checking *k, const struct sample *s)
{
    if (!may_be_tiles(s) || s->blocks < 4)
        return NIB_OK;
    TRY(unswizzle(s));
    const double as_is = structure(s->scales, s->rows, s->blocks),
                 tiles = structure(s->other_scales, s->rows, s->blocks);
    if (tiles < 2 * as_is + 0.05)
        return NIB_OK;
    return nib_check_found(
        k, NIB_FAULT_MAYBE_SWIZZLED, nib_check_tensor(k->c, s->w, NIB_ROLE_SCALE),
        "rows and columns explain %.0f %% of its scales if they are taken from tiles, and %.0f %% if "
        "they are not",
        100 * tiles, 100 * as_is);
}

/* For every two columns that share a byte, how much larger the first is, as a logarithm. */
static nib_status column_pattern(const struct sample *s, double *out)
{
    TRY(nib_ck_decode(s->w, s->tensor_scale, s->codes, s->scales, s->rows, NIB_F32, s->decoded));
    for (int64_t pair = 0; pair < s->cols / 2; pair++) {
        double even = 1e-30, odd = 1e-30;
        for (int64_t r = 0; r < s->rows; r++) {
            const double x = s->decoded[r * s->cols + 2 * pair], y = s->decoded[r * s->cols + 2 * pair + 1];
            even += x * x;
            odd += y * y;
        }
        out[pair] = log(even / odd);
    }
    return NIB_OK;
}

/* NaN, which says nothing, of what does not vary. */
static double correlation(const double *x, const double *y, int64_t n)
{
    double xx = 0, yy = 0, xy = 0;
    for (int64_t i = 0; i < n; i++) {
        xx += x[i] * x[i];
        yy += y[i] * y[i];
        xy += x[i] * y[i];
    }
    return xy / sqrt(xx * yy);
}

/* Gate and up multiply the same input, and in models the same columns are large in both. Queries, keys and values need not
 * agree: their correlations are from -0.9 to 0.9 in models that are right. */
static bool is_gate_and_up(const nib_checkpoint *c, const struct nib_check_member *first, size_t n)
{
    const char *const key = first->key;
    return n == 2 && (nib_ck_ends_with(key, "{gate_proj}") || nib_ck_ends_with(key, "{w1}")) &&
           c->weights[first[0].weight].cols == c->weights[first[1].weight].cols;
}

/* How gate's and up's columns go together; NAN where it cannot be told. */
static nib_status correlate(struct nib_checking *k, const struct nib_check_member *first, double *out)
{
    enum { LEAST_PAIRS = 128 };
    const nib_checkpoint *c = k->c;
    const int64_t pairs = c->weights[first->weight].cols / 2;
    *out = NAN;
    if (pairs < LEAST_PAIRS)
        return NIB_OK;
    for (size_t i = 0; i < 2; i++) {
        const struct nib_ck_weight *w = &c->weights[first[i].weight];
        const struct nib_check_weight *x = &k->weights[first[i].weight];
        if (!x->tensor_scale_good || !x->nonzero || k->broken[w->tensor[NIB_ROLE_DATA]] || !sample_rows(k, w))
            return NIB_OK;
    }
    double *patterns = nib_alloc((size_t)(2 * pairs) * sizeof *patterns);
    nib_status status = patterns ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "%s: no memory for a check", c->path);
    for (size_t i = 0; !status && i < 2; i++) {
        struct sample s;
        status = make_sample(k, &c->weights[first[i].weight], &s);
        if (status)
            break;
        s.tensor_scale = k->weights[first[i].weight].tensor_scale;
        status = nib_ck_read_codes(c, s.w, 0, s.rows, s.codes, s.scales);
        if (!status)
            status = column_pattern(&s, patterns + (size_t)i * (size_t)pairs);
        free_sample(&s);
    }
    if (!status)
        *out = correlation(patterns, patterns + pairs, pairs);
    nib_free(patterns);
    return status;
}

/* One pair that goes the other way than all the others has the nibbles of one the other way round. */
static nib_status guess_order(struct nib_checking *k, const struct nib_check_groups *groups)
{
    const nib_checkpoint *c = k->c;
    double *r = nib_alloc((groups->n + 1) * sizeof *r), sum = 0;
    size_t known = 0;
    nib_status status = r ? NIB_OK : nib_fail(NIB_ERR_MEMORY, "%s: no memory for a check", c->path);
    for (size_t i = 0, end; !status && i < groups->n; i = end) {
        end = nib_check_group_end(groups, i);
        r[i] = NAN;
        if (is_gate_and_up(c, &groups->members[i], end - i))
            status = correlate(k, &groups->members[i], &r[i]);
        if (!status && !isnan(r[i])) {
            sum += r[i];
            known++;
        }
    }
    for (size_t i = 0, end; !status && i < groups->n; i = end) {
        const struct nib_check_member *pair = &groups->members[i];
        end = nib_check_group_end(groups, i);
        if (isnan(r[i]) || known < 2)
            continue;
        /* A chance correlation of n pairs is about 1 / sqrt(n). */
        const double chance = 1 / sqrt((double)c->weights[pair->weight].cols / 2);
        if (r[i] < -fmax(0.2, 4 * chance) && (sum - r[i]) / (double)(known - 1) > 0.1)
            status = nib_check_found(
                k, NIB_FAULT_MAYBE_SWAPPED, nib_check_tensor(c, &c->weights[pair[1].weight], NIB_ROLE_DATA),
                "its columns are large where their neighbors are in %s, and in other layers they are not",
                c->weights[pair[0].weight].name);
    }
    nib_free(r);
    return status;
}

nib_status nib_check_guess(struct nib_checking *k)
{
    const nib_checkpoint *c = k->c;
    if (k->original)
        return NIB_OK; /* then there is nothing to guess */
    for (size_t i = 0; i < c->n_weights; i++) {
        const struct nib_ck_weight *w = &c->weights[i];
        if (!k->weights[i].nvfp4 || !k->weights[i].tensor_scale_good || !k->weights[i].nonzero || w->index >= 0 ||
            k->broken[w->tensor[NIB_ROLE_DATA]] || w->tensor[NIB_ROLE_SCALE] == NIB_NONE || !sample_rows(k, w))
            continue;
        struct sample s;
        TRY(make_sample(k, w, &s));
        nib_status status = nib_ck_read_codes(c, w, 0, s.rows, NULL, s.scales);
        if (!status)
            status = guess_tiles(k, &s);
        free_sample(&s);
        TRY(status);
    }
    struct nib_check_groups groups;
    TRY(nib_check_members(c, &groups));
    const nib_status status = guess_order(k, &groups);
    nib_check_free_members(&groups);
    return status;
}

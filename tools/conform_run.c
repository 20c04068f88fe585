/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conform_run.c - runs a case: reads its tensors, does with the library what the case says, compares.
 *
 * Every tensor of a case is read and its shape checked even after a difference is found, so that a bad file is called
 * bad whatever the numbers are.
 */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "conform.h"
#include "nib_file.h"
#include "nib_reference.h"

bool conform_bad(struct conform_result *result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(result->message, sizeof result->message, format, arguments);
    va_end(arguments);
    result->verdict = CONFORM_BAD;
    return false;
}

enum { MAX_OWNED = 32, E2M1_CODES_PER_BYTE = 2, ULP_TOLERANCE = 2 };

struct run {
    const struct conform_case *what;
    const char *name;
    struct conform_file *file;
    struct conform_result *result;
    void *owned[MAX_OWNED]; /* memory that goes when the case is done */
    nib_buffer *moved[MAX_OWNED];
    int owned_count, moved_count;
};

/* ---- Memory and tensors of the file ------------------------------------------------------------------- */

static void *allocate(struct run *run, size_t bytes)
{
    void *const memory = run->owned_count < MAX_OWNED ? calloc(bytes ? bytes : 1, 1) : NULL;
    if (memory)
        run->owned[run->owned_count++] = memory;
    else
        conform_bad(run->result, "out of memory (%zu bytes)", bytes);
    return memory;
}

static bool library_failed(struct run *run) { return conform_bad(run->result, "%s", nib_last_error()); }

/* A call on the device: what that does not do is no fault of the file. */
static bool call_failed(struct run *run, nib_status status)
{
    (void)library_failed(run);
    if (run->what->moves && status == NIB_ERR_UNSUPPORTED)
        run->result->verdict = CONFORM_UNSUPPORTED;
    return false;
}

/* An array of the device like one of the host, with its values or not. */
static bool move_array(struct run *run, const nib_array *host, bool values, nib_array *out)
{
    *out = *host;
    if (!run->what->moves)
        return true;
    out->device = run->what->device;
    nib_buffer **const buffer = &run->moved[run->moved_count];
    if (run->moved_count == MAX_OWNED || nib_buffer_create(host->bytes, out->device, buffer) != NIB_OK)
        return library_failed(run);
    run->moved_count++;
    out->data = nib_buffer_data(*buffer);
    return !values || nib_array_copy(host, out) == NIB_OK || library_failed(run);
}

static bool allocate_array(struct run *run, nib_dtype dtype, int rank, const int64_t *shape, nib_array *out)
{
    if (nib_array_init(out, run, dtype, rank, shape) != NIB_OK) /* for its size; the pointer is set below */
        return library_failed(run);
    out->data = allocate(run, out->bytes);
    out->device = run->what->moves ? NULL : run->what->device;
    return out->data != NULL;
}

static bool find_tensor(struct run *run, const char *tensor, size_t *index)
{
    const size_t bytes = strlen(run->name) + strlen(tensor) + 2;
    char *const full = malloc(bytes);
    if (!full)
        return conform_bad(run->result, "out of memory (%zu bytes)", bytes);
    snprintf(full, bytes, "%s/%s", run->name, tensor);
    const bool found = nib_file_find(run->file->file, full, index) == NIB_OK;
    free(full);
    return found;
}

static void describe(char *text, size_t bytes, nib_dtype dtype, int rank, const int64_t *shape)
{
    snprintf(text, bytes, "%s [", nib_dtype_name(dtype));
    for (int i = 0; i < rank; i++) {
        const size_t used = strlen(text);
        snprintf(text + used, bytes - used, "%s%" PRId64, i ? ", " : "", shape[i]);
    }
    const size_t used = strlen(text);
    snprintf(text + used, bytes - used, "]");
}

/* A tensor without elements takes no byte of the file whatever its other dimensions are, and what is made of it may have
 * a number for each of its rows. */
static bool check_dimensions(struct run *run, const char *tensor, const nib_entry *entry)
{
    enum { MOST = 1 << 20 };
    int64_t lines = 1;
    bool empty = false, good = true;
    for (int i = 0; i < entry->rank; i++) {
        empty |= entry->shape[i] == 0;
        good &= entry->shape[i] <= MOST / lines;
        lines *= good && entry->shape[i] ? entry->shape[i] : 1;
    }
    char is[256];
    if (!empty || good)
        return true;
    describe(is, sizeof is, entry->dtype, (int)entry->rank, entry->shape);
    return conform_bad(run->result, "its tensor '%s' is %s: without elements, the rest of a shape is %d at most",
                       tensor, is, (int)MOST);
}

/* Read `CASE/tensor` whole, and note that a case has it. */
static bool read_tensor(struct run *run, const char *tensor, nib_array *out)
{
    size_t index;
    nib_entry entry;
    if (!find_tensor(run, tensor, &index))
        return run->result->verdict != CONFORM_BAD && conform_bad(run->result, "it has no tensor '%s'", tensor);
    run->file->claimed[index] = 1;
    if (nib_file_entry(run->file->file, index, &entry) != NIB_OK)
        return library_failed(run);
    if (entry.rank < 1 || entry.rank > NIB_MAX_RANK)
        return conform_bad(run->result, "its tensor '%s' has rank %" PRId64 ", not 1 to %d", tensor, entry.rank,
                           NIB_MAX_RANK);
    if (!check_dimensions(run, tensor, &entry) || !allocate_array(run, entry.dtype, (int)entry.rank, entry.shape, out))
        return false;
    return nib_file_read(run->file->file, index, 0, out->data, out->bytes) == NIB_OK || library_failed(run);
}

/* Whether what the file has is what the case needs. One-byte codes may come as plain bytes. */
static bool check_type(struct run *run, const char *tensor, const nib_array *have, nib_dtype dtype, int rank,
                       const int64_t *shape)
{
    bool same = have->rank == rank && (have->dtype == dtype || (have->dtype == NIB_U8 && nib_dtype_bits(dtype) == 8));
    for (int i = 0; same && i < rank; i++)
        same = have->shape[i] == shape[i];
    if (same)
        return true;
    char is[256], must[256];
    describe(is, sizeof is, have->dtype, have->rank, have->shape);
    describe(must, sizeof must, dtype, rank, shape);
    return conform_bad(run->result, "its tensor '%s' is %s, not %s", tensor, is, must);
}

/* ---- Comparing ---------------------------------------------------------------------------------------- */

typedef bool same_fn(uint32_t expected, uint32_t got);

static bool same_bits(uint32_t expected, uint32_t got) { return expected == got; }

/* torch rounds -0 to code 0, hardware to code 8. */
static bool same_e2m1(uint32_t expected, uint32_t got) { return expected == got || ((expected | got) & ~8u) == 0; }

static bool same_f32(uint32_t expected, uint32_t got)
{
    const uint32_t magnitude = 0x7FFFFFFFu, infinity = 0x7F800000u;
    return expected == got || ((expected & magnitude) > infinity && (got & magnitude) > infinity);
}

/* ModelOpt makes 0 of a code 8, the others -0. */
static bool same_value(uint32_t expected, uint32_t got)
{
    return same_f32(expected, got) || ((expected | got) & 0x7FFFFFFFu) == 0;
}

/* Of numbers that are not negative, the distance of the bit patterns counts the units in the last place. */
static bool nearly_same_f32(uint32_t expected, uint32_t got)
{
    const uint32_t distance = expected > got ? expected - got : got - expected;
    return distance <= ULP_TOLERANCE;
}

static uint32_t load(const char *at, size_t width)
{
    uint32_t value = 0;
    memcpy(&value, at, width);
    return value;
}

static void note_difference(struct run *run, const char *tensor, int rank, const int64_t *index, size_t width,
                            int codes_per_byte, uint32_t expected, uint32_t got)
{
    struct conform_result *const result = run->result;
    result->verdict = CONFORM_DIFFERENT;
    result->tensor = tensor;
    result->rank = rank;
    memcpy(result->index, index, (size_t)rank * sizeof *index);
    result->digits = (int)(2 * width);
    if (codes_per_byte == E2M1_CODES_PER_BYTE) { /* the element that differs, not its byte */
        const unsigned high = ((expected ^ got) & 15) == 0;
        result->index[rank - 1] = 2 * index[rank - 1] + high;
        expected = expected >> 4 * high & 15;
        got = got >> 4 * high & 15;
        result->digits = 1;
    }
    result->expected = expected;
    result->got = got;
}

/* Look for the first difference, unless the case has one. `expected` is contiguous and has the shape; `got` need not
 * be, and may be larger (padded scales). */
static void compare(struct run *run, const char *tensor, const nib_array *expected, const nib_array *got,
                    int codes_per_byte, same_fn *same)
{
    const int last = expected->rank - 1;
    const size_t width = (size_t)nib_dtype_bits(expected->dtype) / 8;
    const int64_t count = expected->shape[last], step = got->strides[last];
    if (run->result->verdict != CONFORM_PASSED || expected->bytes == 0)
        return;
    int64_t index[NIB_MAX_RANK] = { 0 };
    const char *want = expected->data;
    for (bool more = true; more; want += (size_t)count * width) {
        int64_t at = 0; /* of this row's first element in `got` */
        for (int i = 0; i < last; i++)
            at += index[i] * got->strides[i];
        const char *const have = (const char *)got->data + got->offset + at * (int64_t)width;
        const bool equal = step == 1 && memcmp(want, have, (size_t)count * width) == 0;
        for (int64_t i = 0; !equal && i < count; i++) {
            const uint32_t e = load(want + (size_t)i * width, width), g = load(have + i * step * (int64_t)width, width);
            if (same(e, g))
                continue;
            index[last] = i;
            note_difference(run, tensor, expected->rank, index, width, codes_per_byte, e, g);
            return;
        }
        int axis = last - 1;
        while (axis >= 0 && ++index[axis] == expected->shape[axis])
            index[axis--] = 0;
        more = axis >= 0;
    }
}

/* ---- op "quantize" ------------------------------------------------------------------------------------ */

enum {
    ANY_TENSOR_SCALE = NIB_TENSOR_SCALE_COUNT,
    NO_TENSOR_SCALE_KEPT
}; /* NO_TENSOR_SCALE_KEPT: a multiplier, whose inverse the tensor scale is */

/* What a quantized tensor is compared by. The tensor scale goes by a name that says what it means. */
static const struct expected_part {
    const char *tensor;
    nib_part part;
    nib_usage usage;
    int tensor_scale; /* only when the tensor has this one */
    bool optional;    /* without it, nothing is said about the part */
} expected_parts[] = {
    { "row_data", NIB_ROW_DATA, NIB_ROWWISE, ANY_TENSOR_SCALE, false },
    { "row_scale", NIB_ROW_SCALE, NIB_ROWWISE, ANY_TENSOR_SCALE, false },
    { "row_amax", NIB_ROW_TENSOR_SCALE, NIB_ROWWISE, NIB_TENSOR_SCALE_AMAX, false },
    { "tensor_scale", NIB_ROW_TENSOR_SCALE, NIB_ROWWISE, NIB_TENSOR_SCALE_MULTIPLIER, false },
    { "global_scale", NIB_ROW_TENSOR_SCALE, NIB_ROWWISE, NIB_TENSOR_SCALE_DIVISOR, false },
    { "col_data", NIB_COL_DATA, NIB_COLUMNWISE, ANY_TENSOR_SCALE, false },
    { "col_scale", NIB_COL_SCALE, NIB_COLUMNWISE, ANY_TENSOR_SCALE, false },
    { "col_amax", NIB_COL_TENSOR_SCALE, NIB_COLUMNWISE, NIB_TENSOR_SCALE_AMAX, false },
    { "col_tensor_scale", NIB_COL_TENSOR_SCALE, NIB_COLUMNWISE, NIB_TENSOR_SCALE_MULTIPLIER, true },
    { "col_global_scale", NIB_COL_TENSOR_SCALE, NIB_COLUMNWISE, NIB_TENSOR_SCALE_DIVISOR, true },
};

/* Numbers of the file that a case may hand to the quantizer. */
static const struct given_part {
    size_t flag; /* in struct conform_case */
    const char *key, *tensor;
    nib_part part;
    nib_usage usage;
    int tensor_scale; /* or ANY_TENSOR_SCALE: an amax, from which the tensor scale follows */
} given_parts[] = {
    { offsetof(struct conform_case, given_amax), "given_amax", "row_amax", NIB_ROW_TENSOR_SCALE, NIB_ROWWISE,
      ANY_TENSOR_SCALE },
    { offsetof(struct conform_case, given_amax), "given_amax", "col_amax", NIB_COL_TENSOR_SCALE, NIB_COLUMNWISE,
      ANY_TENSOR_SCALE },
    { offsetof(struct conform_case, given_tensor_scale), "given_tensor_scale", "tensor_scale", NIB_ROW_TENSOR_SCALE,
      NIB_ROWWISE, NIB_TENSOR_SCALE_MULTIPLIER },
    { offsetof(struct conform_case, given_global_scale), "given_global_scale", "global_scale", NIB_ROW_TENSOR_SCALE,
      NIB_ROWWISE, NIB_TENSOR_SCALE_DIVISOR },
    { offsetof(struct conform_case, given_scale), "given_scale", "scale", NIB_ROW_TENSOR_SCALE, NIB_ROWWISE,
      NO_TENSOR_SCALE_KEPT },
};

static bool wants_usage(const nib_quantizer *q, nib_usage usage)
{
    return usage == NIB_ROWWISE ? q->rowwise : q->columnwise;
}

static bool is_overridden(const struct conform_case *what, const struct given_part *part)
{
    return ((const uint8_t *)what)[part->flag] && wants_usage(&what->quantizer, part->usage);
}

/* The shapes are checked before the library sees a pointer: it reads as many values as the quantizer implies. */
static bool read_overrides(struct run *run, const nib_array *x, nib_overrides *overrides)
{
    const nib_quantizer *const q = &run->what->quantizer;
    *overrides = (nib_overrides){ .bytes = sizeof *overrides };
    for (size_t i = 0; i < sizeof given_parts / sizeof *given_parts; i++) {
        const struct given_part *const part = &given_parts[i];
        nib_array values;
        int rank;
        int64_t shape[NIB_MAX_RANK];
        if (!is_overridden(run->what, part))
            continue;
        if (!read_tensor(run, part->tensor, &values))
            return false;
        if (nib_part_shape(q, part->part, x->rank, x->shape, &rank, shape) != NIB_OK)
            return library_failed(run);
        nib_array there;
        if (!check_type(run, part->tensor, &values, NIB_F32, rank, shape) || !move_array(run, &values, true, &there))
            return false;
        *(part->tensor_scale == NO_TENSOR_SCALE_KEPT ? &overrides->scale
          : part->tensor_scale == ANY_TENSOR_SCALE   ? &overrides->amax[part->usage]
                                                     : &overrides->tensor_scale[part->usage]) = there.data;
    }
    return true;
}

static const char *const tensor_scale_names[NIB_TENSOR_SCALE_COUNT] = { "an amax", "a decode scale", "an encode scale",
                                                                        "no number" };

/* A scale given as one thing and used as another would make the case meaningless. */
static bool check_overrides(struct run *run, nib_tensor_scale tensor_scale)
{
    for (size_t i = 0; i < sizeof given_parts / sizeof *given_parts; i++) {
        const struct given_part *const part = &given_parts[i];
        if (is_overridden(run->what, part) && part->tensor_scale < ANY_TENSOR_SCALE &&
            part->tensor_scale != (int)tensor_scale)
            return conform_bad(run->result, "its \"%s\" gives %s, but such a tensor has %s", part->key,
                               tensor_scale_names[part->tensor_scale], tensor_scale_names[tensor_scale]);
    }
    return true;
}

/* A part without its padding. */
static bool view_part(struct run *run, const nib_tensor *t, const nib_metadata *meta, nib_part part, nib_array *out)
{
    int rank;
    int64_t shape[NIB_MAX_RANK];
    if (nib_tensor_part(t, part, out) != NIB_OK ||
        nib_part_valid_shape(meta->quantizer, part, meta->rank, meta->shape, &rank, shape) != NIB_OK)
        return library_failed(run);
    memcpy(out->shape, shape, (size_t)rank * sizeof *shape);
    return true;
}

static int codes_per_byte(const nib_metadata *meta, nib_part part)
{
    const nib_dtype element = meta->element;
    return (part == NIB_ROW_DATA || part == NIB_COL_DATA) && nib_dtype_bits(element) == 4 ? E2M1_CODES_PER_BYTE : 1;
}

/* Only a transform's sums depend on whose order of adding it was; a plain amax never does. */
static same_fn *rule_of(const struct conform_case *what, const struct expected_part *part)
{
    const nib_quantizer *const q = &what->quantizer;
    const bool transformed = part->usage == NIB_ROWWISE ? q->rht_rowwise : q->rht;
    return !what->exact && transformed && part->tensor_scale != ANY_TENSOR_SCALE ? nearly_same_f32 : same_bits;
}

static bool is_expected(struct run *run, const nib_tensor *t, const struct expected_part *part,
                        nib_tensor_scale tensor_scale)
{
    const struct conform_case *const what = run->what;
    const nib_quantizer *const q = &what->quantizer;
    size_t index;
    if (!wants_usage(q, part->usage) || !nib_tensor_buffer(t, part->part)) /* the copy, or a part that the format has */
        return false;
    if (part->tensor_scale != ANY_TENSOR_SCALE && (q->no_tensor_scale || part->tensor_scale != (int)tensor_scale))
        return false;
    /* Unbiased rounding keeps a larger amax than it was given, so the file's amax is an input only. */
    if (part->tensor_scale == NIB_TENSOR_SCALE_AMAX && what->given_amax && q->rounding == NIB_ROUND_STOCHASTIC_UNBIASED)
        return false;
    return !part->optional || find_tensor(run, part->tensor, &index);
}

static bool compare_tensor(struct run *run, const nib_tensor *t)
{
    nib_metadata meta = { .bytes = sizeof meta };
    if (nib_tensor_get_metadata(t, &meta) != NIB_OK)
        return library_failed(run);
    if (!check_overrides(run, meta.tensor_scale))
        return false;
    for (size_t i = 0; i < sizeof expected_parts / sizeof *expected_parts; i++) {
        const struct expected_part *const part = &expected_parts[i];
        nib_array expected, got;
        if (!is_expected(run, t, part, meta.tensor_scale))
            continue;
        if (!read_tensor(run, part->tensor, &expected) || !view_part(run, t, &meta, part->part, &got) ||
            !check_type(run, part->tensor, &expected, got.dtype, got.rank, got.shape))
            return false;
        compare(run, part->tensor, &expected, &got, codes_per_byte(&meta, part->part), rule_of(run->what, part));
    }
    return true;
}

/* What the rowwise data dequantizes to, if the file wants it compared. */
static bool compare_values(struct run *run, const nib_tensor *t, const nib_array *x)
{
    nib_array expected, got, there;
    size_t index;
    if (!run->what->quantizer.rowwise || !find_tensor(run, "y", &index))
        return run->result->verdict != CONFORM_BAD;
    if (!read_tensor(run, "y", &expected) || !check_type(run, "y", &expected, NIB_F32, x->rank, x->shape) ||
        !allocate_array(run, NIB_F32, x->rank, x->shape, &got))
        return false;
    if (!move_array(run, &got, false, &there))
        return false;
    const nib_status status = nib_dequantize(t, NIB_ROWWISE, &there);
    if (status)
        return call_failed(run, status);
    if (run->what->moves && nib_array_copy(&there, &got) != NIB_OK)
        return library_failed(run);
    compare(run, "y", &expected, &got, 1, same_value);
    return true;
}

static void run_quantize(struct run *run)
{
    nib_array file, x;
    nib_overrides overrides;
    nib_tensor *t = NULL, *back = NULL;
    if (!read_tensor(run, "x", &file) || !read_overrides(run, &file, &overrides) || !move_array(run, &file, true, &x))
        return;
    const nib_status status = nib_quantize(&run->what->quantizer, &x, &overrides, &t);
    if (status)
        (void)call_failed(run, status);
    else if (run->what->moves && nib_tensor_to(t, NULL, &back) != NIB_OK)
        (void)library_failed(run);
    else if (compare_tensor(run, back ? back : t))
        compare_values(run, t, &x);
    nib_tensor_destroy(t);
    nib_tensor_destroy(back);
}

/* ---- op "gemm" ---------------------------------------------------------------------------------------- */

static bool quantize_operand(struct run *run, const char *tensor, nib_tensor **t, int64_t *rows)
{
    nib_array x;
    nib_metadata meta = { .bytes = sizeof meta };
    if (!read_tensor(run, tensor, &x))
        return false;
    if (nib_quantize(&run->what->quantizer, &x, NULL, t) != NIB_OK || nib_tensor_get_metadata(*t, &meta) != NIB_OK)
        return library_failed(run);
    *rows = meta.rows;
    return true;
}

static void run_gemm(struct run *run)
{
    nib_tensor *a = NULL, *b = NULL;
    nib_array expected, y;
    int64_t shape[2];
    /* The file's y is checked before one is allocated: two tall operands could ask for any amount of memory. */
    if (quantize_operand(run, "a", &a, &shape[0]) && quantize_operand(run, "b", &b, &shape[1]) &&
        read_tensor(run, "y", &expected) && check_type(run, "y", &expected, NIB_F32, 2, shape) &&
        allocate_array(run, NIB_F32, 2, shape, &y)) {
        const nib_operand left = { a, NULL, NIB_ROWWISE }, right = { b, NULL, NIB_ROWWISE };
        nib_status (*const calls[])(const nib_operand *, const nib_operand *, const nib_gemm_options *,
                                    const nib_array *) = { nib_gemm_reference, nib_gemm };
        for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
            if (calls[i](&left, &right, NULL, &y) != NIB_OK)
                library_failed(run);
            else
                compare(run, "y", &expected, &y, 1, same_bits);
    }
    nib_tensor_destroy(a);
    nib_tensor_destroy(b);
}

/* ---- op "casts" --------------------------------------------------------------------------------------- */

/* A cast of floats to codes, by the bit patterns of a 16-bit type: those of the tensor `patterns`, or all in order. */
static const struct encode_cast {
    const char *tensor, *patterns;
    nib_dtype from, to;
    float limit; /* the largest value of `to`, to which the input is clamped */
    same_fn *same;
} encode_casts[] = {
    { "e4m3_of_bf16_clamped", "bf16_bits", NIB_BF16, NIB_E4M3, 448.0f, same_bits },
    { "e2m1_of_bf16_clamped", "bf16_bits", NIB_BF16, NIB_E2M1, 6.0f, same_e2m1 },
    { "e4m3_of_f16_clamped", NULL, NIB_F16, NIB_E4M3, 448.0f, same_bits },
};

/* A cast of every code of a one-byte type to a float. */
static const struct decode_cast {
    const char *tensor;
    nib_dtype from;
} decode_casts[] = {
    { "f32_of_e4m3", NIB_E4M3 },
    { "f32_of_e5m2", NIB_E5M2 },
    { "f32_of_e8m0", NIB_E8M0 },
};

enum { PATTERNS = 1 << 16, CODES = 1 << 8 };

static bool read_patterns(struct run *run, const struct encode_cast *cast, uint16_t **out, size_t *count)
{
    nib_array values = { 0 };
    *count = PATTERNS;
    if (cast->patterns) {
        if (!read_tensor(run, cast->patterns, &values) ||
            !check_type(run, cast->patterns, &values, NIB_I32, 1, values.shape))
            return false;
        *count = (size_t)values.shape[0];
    }
    if (!(*out = allocate(run, *count * sizeof **out)))
        return false;
    for (size_t i = 0; i < *count; i++) {
        const uint32_t value = values.data ? ((const uint32_t *)values.data)[i] : (uint32_t)i;
        if (value >= PATTERNS)
            return conform_bad(run->result, "its tensor '%s' has a number outside 0..65535 at %zu", cast->patterns, i);
        (*out)[i] = (uint16_t)value;
    }
    return true;
}

/* Codes, one to a byte. */
static bool encode(struct run *run, const struct encode_cast *cast, const uint16_t *patterns, size_t count,
                   uint8_t *out)
{
    float *const x = allocate(run, count * sizeof *x);
    uint8_t *const codes = allocate(run, count);
    if (!x || !codes)
        return false;
    if (nib_decode(cast->from, patterns, count, x) != NIB_OK)
        return library_failed(run);
    for (size_t i = 0; i < count; i++)
        x[i] = isfinite(x[i]) ? fminf(fmaxf(x[i], -cast->limit), cast->limit) : 0.0f;
    if (nib_encode(cast->to, x, count, codes) != NIB_OK)
        return library_failed(run);
    const bool packed = nib_dtype_bits(cast->to) == 4;
    for (size_t i = 0; i < count; i++)
        out[i] = packed ? (uint8_t)(codes[i / 2] >> (i % 2 ? 4 : 0) & 15) : codes[i];
    return true;
}

static bool run_encode_cast(struct run *run, const struct encode_cast *cast)
{
    nib_array expected, got;
    uint16_t *patterns;
    size_t count;
    if (!read_patterns(run, cast, &patterns, &count) || !read_tensor(run, cast->tensor, &expected))
        return false;
    const int64_t shape[1] = { (int64_t)count };
    if (!check_type(run, cast->tensor, &expected, NIB_U8, 1, shape) || !allocate_array(run, NIB_U8, 1, shape, &got) ||
        !encode(run, cast, patterns, count, got.data))
        return false;
    compare(run, cast->tensor, &expected, &got, 1, cast->same);
    return true;
}

static bool run_decode_cast(struct run *run, const struct decode_cast *cast)
{
    const int64_t shape[1] = { CODES };
    uint8_t codes[CODES];
    nib_array expected, got;
    for (int i = 0; i < CODES; i++)
        codes[i] = (uint8_t)i;
    if (!read_tensor(run, cast->tensor, &expected) || !check_type(run, cast->tensor, &expected, NIB_F32, 1, shape) ||
        !allocate_array(run, NIB_F32, 1, shape, &got))
        return false;
    if (nib_decode(cast->from, codes, CODES, got.data) != NIB_OK)
        return library_failed(run);
    compare(run, cast->tensor, &expected, &got, 1, same_f32);
    return true;
}

static void run_casts(struct run *run)
{
    for (size_t i = 0; i < sizeof encode_casts / sizeof *encode_casts; i++)
        if (!run_encode_cast(run, &encode_casts[i]))
            return;
    for (size_t i = 0; i < sizeof decode_casts / sizeof *decode_casts; i++)
        if (!run_decode_cast(run, &decode_casts[i]))
            return;
}

/* ---- All ---------------------------------------------------------------------------------------------- */

void conform_run(const struct conform_case *what, const char *name, struct conform_file *file,
                 struct conform_result *result)
{
    static void (*const ops[CONFORM_OPS])(
        struct run *) = { [CONFORM_QUANTIZE] = run_quantize, [CONFORM_GEMM] = run_gemm, [CONFORM_CASTS] = run_casts };
    struct run run = { .what = what, .name = name, .file = file, .result = result };
    if (what->moves && what->op != CONFORM_QUANTIZE) {
        (void)conform_bad(result, "only quantization is compared on %s", nib_device_name(what->device));
        result->verdict = CONFORM_UNSUPPORTED;
        return;
    }
    ops[what->op](&run);
    while (run.moved_count)
        nib_buffer_release(run.moved[--run.moved_count]);
    while (run.owned_count)
        free(run.owned[--run.owned_count]);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base.c - errors, structs that grow, checked arithmetic, memory, dtypes, arrays.
 */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Errors ---- */

static _Thread_local nib_error last_error;

static bool is_within_character(char c) { return ((unsigned char)c & 0xC0) == 0x80; }

/* Without its middle: a message begins with the name of a file, which may be long, and ends with the fact. */
static void shorten(const char *text, size_t length, char *out, size_t bytes)
{
    size_t head = (bytes - sizeof "...") / 2, tail = length - head;
    while (head > 0 && is_within_character(text[head]))
        head--;
    while (is_within_character(text[tail]))
        tail++;
    snprintf(out, bytes, "%.*s...%s", (int)head, text, text + tail);
}

nib_status nib_fail(nib_status status, const char *format, ...)
{
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    /* A message may quote the previous one (layers add their own context), so build it aside. */
    char text[sizeof last_error.text];
    const int length = vsnprintf(text, sizeof text, format, arguments);
    char *const whole = length >= (int)sizeof text ? nib_alloc((size_t)length + 1) : NULL;
    if (whole) { /* otherwise it lacks its end */
        vsnprintf(whole, (size_t)length + 1, format, again);
        shorten(whole, (size_t)length, text, sizeof text);
        nib_free(whole);
    }
    va_end(again);
    va_end(arguments);
    memcpy(last_error.text, text, sizeof text);
    last_error.status = status;
    return status;
}

nib_status nib_set_error(nib_status status, const char *text)
{
    return status ? nib_fail(status, "%s", text ? text : nib_status_name(status)) : NIB_OK;
}

const char *nib_last_error(void) { return last_error.text; }

void nib_get_error(nib_error *out)
{
    if (out)
        *out = last_error;
}

const char *nib_status_name(nib_status status)
{
    static const char *const names[NIB_STATUS_COUNT] = {
        [NIB_OK] = "NIB_OK",
        [NIB_ERR_ARG] = "NIB_ERR_ARG",
        [NIB_ERR_SHAPE] = "NIB_ERR_SHAPE",
        [NIB_ERR_DTYPE] = "NIB_ERR_DTYPE",
        [NIB_ERR_MODE] = "NIB_ERR_MODE",
        [NIB_ERR_USAGE] = "NIB_ERR_USAGE",
        [NIB_ERR_MISMATCH] = "NIB_ERR_MISMATCH",
        [NIB_ERR_MEMORY] = "NIB_ERR_MEMORY",
        [NIB_ERR_COMM] = "NIB_ERR_COMM",
        [NIB_ERR_IO] = "NIB_ERR_IO",
        [NIB_ERR_DATA] = "NIB_ERR_DATA",
        [NIB_ERR_UNSUPPORTED] = "NIB_ERR_UNSUPPORTED",
        [NIB_ERR_CANCELLED] = "NIB_ERR_CANCELLED",
        [NIB_ERR_DEVICE] = "NIB_ERR_DEVICE",
    };
    return (unsigned)status < NIB_STATUS_COUNT ? names[status] : "unknown status";
}

const char *nib_version(void) { return NIB_VERSION; }

/* ---- Structs that grow ---- */

enum { MOST_STRUCT_BYTES = 4096 }; /* above it `bytes` was never set: nothing behind it is read */

static size_t bytes_of(const void *structure)
{
    size_t bytes;
    memcpy(&bytes, structure, sizeof bytes);
    return bytes;
}

static nib_status check_bytes(const char *what, size_t bytes, size_t oldest)
{
    if (bytes < oldest)
        return nib_fail(NIB_ERR_ARG, "%s->bytes is %zu, and no version had less than %zu: set it to sizeof", what,
                        bytes, oldest);
    if (bytes > MOST_STRUCT_BYTES)
        return nib_fail(NIB_ERR_ARG, "%s->bytes is %zu: was it initialized? Set it to sizeof", what, bytes);
    return NIB_OK;
}

nib_status nib_struct_check(const char *what, const void *in, size_t known, size_t oldest)
{
    const size_t bytes = bytes_of(in);
    TRY(check_bytes(what, bytes, oldest));
    for (size_t i = known; i < bytes; i++)
        if (((const char *)in)[i])
            return nib_fail(NIB_ERR_UNSUPPORTED, "%s sets fields that version %s does not have", what, NIB_VERSION);
    return NIB_OK;
}

nib_status nib_struct_read(const char *what, const void *in, void *out, size_t known, size_t oldest)
{
    TRY(nib_struct_check(what, in, known, oldest));
    const size_t bytes = bytes_of(in);
    memcpy(out, in, bytes < known ? bytes : known);
    memcpy(out, &known, sizeof known);
    return NIB_OK;
}

nib_status nib_struct_check_output(const char *what, const void *out, size_t oldest)
{
    return check_bytes(what, bytes_of(out), oldest);
}

void nib_struct_write(void *out, const void *value, size_t known)
{
    const size_t bytes = bytes_of(out), header = sizeof bytes, written = bytes < known ? bytes : known;
    memcpy((char *)out + header, (const char *)value + header, written - header);
    memset((char *)out + written, 0, bytes - written);
}

nib_status nib_struct_init(const char *what, void *out, size_t bytes, const void *value, size_t known, size_t oldest)
{
    TRY(check_bytes(what, bytes, oldest));
    memcpy(out, &bytes, sizeof bytes);
    nib_struct_write(out, value, known);
    return NIB_OK;
}

/* ---- Arithmetic and memory ---- */

bool nib_mul(int64_t a, int64_t b, int64_t *out)
{
    int64_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *out = product;
    return true;
}

bool nib_add(int64_t a, int64_t b, int64_t *out)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *out = sum;
    return true;
}

enum { ALIGNMENT = 64 }; /* a cache line, and the widest vector */

void *nib_alloc(size_t bytes)
{
    if (bytes > SIZE_MAX - ALIGNMENT)
        return NULL;
    return aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
}

void *nib_alloc_zeroed(size_t bytes)
{
    void *memory = nib_alloc(bytes);
    if (memory)
        memset(memory, 0, bytes);
    return memory;
}

char *nib_alloc_text(const char *text, size_t n)
{
    char *const copy = nib_alloc(n + 1);
    if (copy) {
        memcpy(copy, text, n);
        copy[n] = 0;
    }
    return copy;
}

void *nib_realloc(void *memory, size_t bytes) { return realloc(memory, bytes ? bytes : 1); }

void nib_free(void *memory) { free(memory); }

void *nib_grow(void *memory, size_t *capacity, size_t needed, size_t size)
{
    if (needed <= *capacity && memory)
        return memory;
    size_t wanted = *capacity + *capacity / 2, bytes;
    if (wanted < needed)
        wanted = needed;
    if (wanted < 64)
        wanted = 64;
    if (__builtin_mul_overflow(wanted, size, &bytes))
        return NULL;
    void *bigger = nib_realloc(memory, bytes);
    if (bigger)
        *capacity = wanted;
    return bigger;
}

/* ---- Dtypes ---- */

const struct nib_dtype_facts nib_dtypes[NIB_DTYPE_COUNT] = {
    [NIB_U8] = { "U8", 8, false },
    [NIB_I16] = { "I16", 16, false },
    [NIB_I32] = { "I32", 32, false },
    [NIB_I64] = { "I64", 64, false },
    [NIB_F32] = { "F32", 32, true },
    [NIB_F16] = { "F16", 16, true },
    [NIB_BF16] = { "BF16", 16, true },
    [NIB_E4M3] = { "F8_E4M3", 8, true },
    [NIB_E5M2] = { "F8_E5M2", 8, true },
    [NIB_E8M0] = { "F8_E8M0", 8, true },
    [NIB_E2M1] = { "F4", 4, true },
    [NIB_BOOL] = { "BOOL", 8, false },
    [NIB_I8] = { "I8", 8, false },
    [NIB_U16] = { "U16", 16, false },
    [NIB_U32] = { "U32", 32, false },
    [NIB_U64] = { "U64", 64, false },
    [NIB_F64] = { "F64", 64, false },
    [NIB_C64] = { "C64", 64, false },
    [NIB_E2M3] = { "F6_E2M3", 6, false },
    [NIB_E3M2] = { "F6_E3M2", 6, false },
    [NIB_E4M3FNUZ] = { "F8_E4M3FNUZ", 8, false },
    [NIB_E5M2FNUZ] = { "F8_E5M2FNUZ", 8, false },
};

bool nib_dtype_valid(nib_dtype dtype) { return (unsigned)dtype < NIB_DTYPE_COUNT; }

const char *nib_dtype_name(nib_dtype dtype) { return nib_dtype_valid(dtype) ? nib_dtypes[dtype].name : NULL; }

int nib_dtype_bits(nib_dtype dtype) { return nib_dtype_valid(dtype) ? nib_dtypes[dtype].bits : 0; }

/* ---- Arrays ---- */

nib_status nib_check_shape(const char *what, int rank, const int64_t *shape, int64_t *elements)
{
    if (rank < 0 || rank > NIB_MAX_RANK)
        return nib_fail(NIB_ERR_SHAPE, "%s: rank %d is not between 0 and %d", what, rank, NIB_MAX_RANK);
    if (rank > 0 && !shape)
        return nib_fail(NIB_ERR_ARG, "%s: shape is NULL", what);
    /* A zero dim makes the product 0, but the others must still be sane: their product sizes scales and strides. */
    int64_t product = 1, nonzero = 1;
    for (int i = 0; i < rank; i++) {
        if (shape[i] < 0)
            return nib_fail(NIB_ERR_SHAPE, "%s: dim %d is %lld", what, i, (long long)shape[i]);
        if (!nib_mul(nonzero, shape[i] ? shape[i] : 1, &nonzero) || nonzero > INT64_MAX / 16)
            return nib_fail(NIB_ERR_SHAPE, "%s: the product of its dims is too large", what);
        product = shape[i] ? product * shape[i] : 0;
    }
    if (elements)
        *elements = product;
    return NIB_OK;
}

nib_status nib_check_array(const char *what, const nib_array *array)
{
    if (!array)
        return nib_fail(NIB_ERR_ARG, "%s is NULL", what);
    if (!nib_dtype_valid(array->dtype))
        return nib_fail(NIB_ERR_DTYPE, "%s: unknown dtype %d", what, (int)array->dtype);
    if (nib_dtypes[array->dtype].bits % 8)
        return nib_fail(NIB_ERR_DTYPE, "%s: %s does not fill whole bytes and cannot be viewed by strides", what,
                        nib_dtypes[array->dtype].name);
    int64_t elements;
    TRY(nib_check_shape(what, array->rank, array->shape, &elements));
    if (elements == 0)
        return NIB_OK;
    if (!array->data)
        return nib_fail(NIB_ERR_ARG, "%s: data is NULL", what);
    /* The lowest and highest element, in elements from the first. */
    int64_t low = 0, high = 0;
    for (int i = 0; i < array->rank; i++) {
        int64_t reach;
        if (!nib_mul(array->shape[i] - 1, array->strides[i], &reach) ||
            !nib_add(reach < 0 ? low : high, reach, reach < 0 ? &low : &high))
            return nib_fail(NIB_ERR_SHAPE, "%s: stride %lld of dim %d reaches too far", what,
                            (long long)array->strides[i], i);
    }
    const int64_t size = nib_dtypes[array->dtype].bits / 8;
    int64_t first, last;
    if (array->offset > (size_t)INT64_MAX || array->bytes > (size_t)INT64_MAX || !nib_mul(low, size, &first) ||
        !nib_mul(high, size, &last) || !nib_add(last, size, &last) || !nib_add(first, (int64_t)array->offset, &first) ||
        !nib_add(last, (int64_t)array->offset, &last) || first < 0 || last > (int64_t)array->bytes)
        return nib_fail(NIB_ERR_SHAPE, "%s: its shape, strides and offset leave its %zu bytes", what, array->bytes);
    if ((array->offset + (uintptr_t)array->data) % (uintptr_t)size)
        return nib_fail(NIB_ERR_ARG, "%s: its first element is not aligned to %d bytes", what, (int)size);
    return NIB_OK;
}

/* Sorted by stride, every dim must step over all that the smaller ones reach. */
nib_status nib_check_output(const char *what, const nib_array *array)
{
    TRY(nib_check_array(what, array));
    int64_t elements = 0, reach = 0, least = 0;
    TRY(nib_check_shape(what, array->rank, array->shape, &elements));
    for (int done = 0; elements > 0 && done < array->rank; done++) {
        int next = -1;
        int64_t stride = 0;
        for (int i = 0; i < array->rank; i++) {
            if (array->shape[i] <= 1)
                continue; /* never stepped: its stride can be anything, INT64_MIN too */
            const int64_t step = array->strides[i] < 0 ? -array->strides[i] : array->strides[i];
            if (step >= least && (next < 0 || step < stride)) {
                next = i;
                stride = step;
            }
        }
        if (next < 0)
            return NIB_OK;
        if (stride <= reach)
            return nib_fail(NIB_ERR_SHAPE, "%s: stride %lld of dim %d may write several values to one place", what,
                            (long long)array->strides[next], next);
        reach += (array->shape[next] - 1) * stride; /* nib_check_array has seen that this stays within the memory */
        least = stride + 1;                         /* an equal stride is not larger than what this one reaches */
        for (int i = 0; i < array->rank; i++)
            if (i != next && array->shape[i] > 1 && (array->strides[i] == stride || array->strides[i] == -stride))
                return nib_fail(NIB_ERR_SHAPE, "%s: dims %d and %d have the same stride %lld", what,
                                next < i ? next : i, next < i ? i : next, (long long)stride);
    }
    return NIB_OK;
}

nib_status nib_array_init(nib_array *out, void *data, nib_dtype dtype, int rank, const int64_t *shape)
{
    NIB_REQUIRE(out);
    nib_array array = { .data = data, .dtype = dtype, .rank = rank };
    if (!nib_dtype_valid(dtype))
        return nib_fail(NIB_ERR_DTYPE, "nib_array_init: unknown dtype %d", (int)dtype);
    int64_t elements, bytes;
    TRY(nib_check_shape("nib_array_init", rank, shape, &elements));
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; i--) {
        array.shape[i] = shape[i];
        array.strides[i] = stride;
        stride *= shape[i] ? shape[i] : 1;
    }
    if (!nib_mul(elements, nib_dtypes[dtype].bits, &bytes))
        return nib_fail(NIB_ERR_SHAPE, "nib_array_init: the shape takes too many bytes");
    array.bytes = (size_t)(bytes / 8);
    TRY(nib_check_array("nib_array_init", &array));
    *out = array;
    return NIB_OK;
}

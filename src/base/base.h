/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base.h - what every directory builds on: error messages, checked arithmetic, memory, structs that grow, communicators.
 */
#ifndef NIB_BASE_H
#define NIB_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "nib.h"
#include "nib_shard.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "nib needs a little-endian machine: packed codes and file contents are used as they lie in memory"
#endif
#if UINTPTR_MAX != UINT64_MAX
#error "nib needs a 64-bit machine: tensors of more than 2^31 elements are indexed with ptrdiff_t"
#endif

/* Exported for libnib_checkpoint of the same version only: the build lists what is marked so. */
#define NIB_PRIVATE NIB_API

/* Set this thread's message and return the status: `return nib_fail(NIB_ERR_SHAPE, "...", ...)`. */
NIB_PRIVATE nib_status nib_fail(nib_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Leave the calling function when a call fails; for places that have nothing to clean up. */
#define TRY(call)                       \
    do {                                \
        nib_status try_status = (call); \
        if (try_status)                 \
            return try_status;          \
    } while (0)

/* Products and sums of untrusted sizes: false on overflow, which leaves *out alone. */
NIB_PRIVATE bool nib_mul(int64_t a, int64_t b, int64_t *out); /* both must be >= 0 */
NIB_PRIVATE bool nib_add(int64_t a, int64_t b, int64_t *out);

static inline int64_t nib_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t nib_max(int64_t a, int64_t b) { return a > b ? a : b; }
/* For a >= 0 and b > 0, without the overflow of (a + b - 1). */
static inline int64_t nib_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static inline int64_t nib_round_up(int64_t a, int64_t b) { return nib_ceil_div(a, b) * b; }

/* All of the library's memory comes from these. NULL when there is none; nib_fail is left to the caller. */
NIB_PRIVATE void *nib_alloc(size_t bytes);                    /* not zeroed, aligned to 64 bytes, never NULL for 0 */
NIB_PRIVATE void *nib_alloc_zeroed(size_t bytes);             /* large ones come untouched from the system */
NIB_PRIVATE char *nib_alloc_text(const char *text, size_t n); /* its first n bytes, and a 0 */
NIB_PRIVATE void *nib_realloc(void *memory, size_t bytes); /* memory from nib_realloc or NULL, and freed by nib_free */
NIB_PRIVATE void nib_free(void *memory);

/* `memory` (from nib_grow, or NULL) with space for `needed` items of `size` bytes; NULL without memory, and then the old
 * one is still there. Grows by half, so that n appends cost O(n). */
NIB_PRIVATE void *nib_grow(void *memory, size_t *capacity, size_t needed, size_t size);

/* The facts of a dtype that need nothing of another directory. */
struct nib_dtype_facts {
    const char *name;
    int bits;
    bool computes; /* nib_encode and nib_decode support it */
};
NIB_PRIVATE extern const struct nib_dtype_facts nib_dtypes[NIB_DTYPE_COUNT];
NIB_PRIVATE bool nib_dtype_valid(nib_dtype dtype);

/* Product of dims with the checks that every caller needs: rank, signs, overflow of elements and of bytes. */
NIB_PRIVATE nib_status nib_check_shape(const char *what, int rank, const int64_t *shape, int64_t *elements);

/* Structs that begin with `bytes` grow. `known` is this version's size; `oldest` that of the first version that is still
 * supported (NIB_UP_TO). Below it, or above 4096 bytes, a struct is ARG and nothing of it is read; fields of a later
 * version must be 0 (UNSUPPORTED).
 *
 * read: `out` has this version's defaults, and gets what the caller's struct has. check: the same without a copy, for a
 * struct whose fields are all of the oldest version. write: into a struct of the caller's that check_output has seen,
 * never more than its bytes; what this version does not know becomes 0. init: the same into one whose `bytes` is not
 * set yet, for the inline _init of a header, which knows the caller's sizeof. */
NIB_PRIVATE nib_status nib_struct_read(const char *what, const void *in, void *out, size_t known, size_t oldest);
NIB_PRIVATE nib_status nib_struct_check(const char *what, const void *in, size_t known, size_t oldest);
NIB_PRIVATE nib_status nib_struct_check_output(const char *what, const void *out, size_t oldest);
NIB_PRIVATE void nib_struct_write(void *out, const void *value, size_t known);
NIB_PRIVATE nib_status nib_struct_init(const char *what, void *out, size_t bytes, const void *value, size_t known,
                                       size_t oldest);

/* The size of a struct whose last field was this one. The field after it begins there and not in its padding, which
 * nobody has set in an older caller's struct. */
#define NIB_UP_TO(type, field) \
    ((offsetof(type, field) + sizeof(((type *)0)->field) + sizeof(size_t) - 1) / sizeof(size_t) * sizeof(size_t))

/* Whether there is another reference. */
bool nib_buffer_is_shared(const nib_buffer *buffer);

/* Whether a communicator can be used at all; `whole`: not only to reduce amaxes. */
NIB_PRIVATE nib_status nib_check_comm(const char *what, const nib_comm *comm, bool whole);

/* The outcome of a step on this rank, made the same on all: the largest status, or MISMATCH where all succeeded but keys
 * differ. A status that is another rank's gets a message; a message that the communicator sets on this rank stays, behind
 * this rank's own where it had failed. Every rank must call this, whatever happened to it.
 * Without a communicator, or with one that cannot agree, the status is this rank's own. */
NIB_PRIVATE nib_status nib_agree(const nib_comm *comm, nib_status status, uint64_t key);

/* The two collectives that move data. `what` names them in the message of a failure, which is NIB_ERR_COMM and quotes the
 * communicator's own message. Where there is nothing to reduce, the communicator is not called. */
nib_status nib_reduce(const nib_comm *comm, const char *what, float *values, size_t n);
nib_status nib_gather(const nib_comm *comm, const char *what, const void *mine, void *all, const size_t *counts);

/* Mixes a word into a key of nib_agree, which begins with 0: two bare words that are equal would leave nothing. */
static inline uint64_t nib_mix(uint64_t key, uint64_t word)
{
    key = (key ^ word) * 0x100000001B3u;
    return key ^ key >> 32;
}

/* A null-pointer check that names the argument. */
#define NIB_REQUIRE(pointer)                                                    \
    do {                                                                        \
        if (!(pointer))                                                         \
            return nib_fail(NIB_ERR_ARG, "%s: " #pointer " is NULL", __func__); \
    } while (0)

/* The checks of every public call that takes an array: dtype, rank, dims, and that no element leaves the memory.
 * An array without elements may have a NULL pointer. */
NIB_PRIVATE nib_status nib_check_array(const char *what, const nib_array *array);

/* The same for an array that is written: no two elements may share memory, or the result would depend on the order of
 * work. */
NIB_PRIVATE nib_status nib_check_output(const char *what, const nib_array *array);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.h - a strict reader of JSON that lies in a file, and the strings it fills: UTF-8, sets of names, escaping.
 *
 * The text passes through a small window and is never in memory whole; what a caller wants to keep, it gathers in
 * compact arenas. Nothing here is quadratic or recursive, whatever the text says.
 */
#ifndef NIB_JSON_H
#define NIB_JSON_H

#include "base/base.h"

/* ---- Strings ---- */

/* Bytes that grow at the end. Zeroed is empty; freed with nib_free(bytes). */
struct nib_text {
    char *bytes;
    size_t used, capacity;
};
/* False without memory, which leaves the text as it was. */
NIB_PRIVATE bool nib_text_put(struct nib_text *text, const void *bytes, size_t count);
/* The same with JSON's quotes and escapes around a valid UTF-8 string. */
NIB_PRIVATE bool nib_text_put_json(struct nib_text *text, const char *string);

/* Length of the UTF-8 sequence at the start of `bytes`, or 0 where there is no well-formed one. */
NIB_PRIVATE size_t nib_utf8_length(const unsigned char *bytes, size_t available);
NIB_PRIVATE bool nib_utf8_valid(const char *string);

/* A name from anywhere, fit for a message: quoted, at most 80 bytes of it, nothing that a terminal would obey. */
struct nib_quoted {
    char text[88];
};
NIB_PRIVATE struct nib_quoted nib_quote(const char *name);

/* ---- Orders and names ---- */

/* The ids 0..n-1, sorted by a comparison that may look anything up by id. They are sorted runs whose lengths are the
 * binary digits of n: an append merges runs of equal length, as a counter carries, so that no input is quadratic. */
struct nib_order {
    uint32_t *ids, *spare;
    size_t n, capacity;
    bool whole; /* one sorted run: nib_order_finish was called */
};
/* Whether `a` must come after `b`. */
typedef bool nib_order_after(const void *context, uint32_t a, uint32_t b);
NIB_PRIVATE bool nib_order_reserve(struct nib_order *order); /* space for one more; false without memory */
NIB_PRIVATE void nib_order_append(struct nib_order *order, nib_order_after *after,
                                  const void *context); /* after reserve */
NIB_PRIVATE void nib_order_finish(struct nib_order *order, nib_order_after *after, const void *context);
NIB_PRIVATE void nib_order_free(struct nib_order *order);

/* Strings in the order of their bytes, each known by its id. */
struct nib_names {
    struct nib_text text;
    uint32_t *starts; /* of each string in text */
    size_t starts_capacity;
    struct nib_order order;
};
/* The string that begins at `start` of the text, which a caller has just put there, gets the next id. */
NIB_PRIVATE bool nib_names_add(struct nib_names *names, size_t start);
NIB_PRIVATE void nib_names_finish(struct nib_names *names);
NIB_PRIVATE const char *nib_names_get(const struct nib_names *names, uint32_t id);
/* The id of a name. After finish also its place in the order. */
NIB_PRIVATE bool nib_names_find(const struct nib_names *names, const char *name, uint32_t *id, size_t *place);
/* After finish: a string that is there twice, or NULL. */
NIB_PRIVATE const char *nib_names_repeated(const struct nib_names *names);
NIB_PRIVATE void nib_names_free(struct nib_names *names);

/* ---- The reader ---- */

struct nib_json {
    int fd;
    const char *path;
    uint64_t next, end; /* in the file: the first byte not yet read, and the end of the text */
    unsigned char *chunk;
    size_t at, filled; /* in the chunk */
};

/* Read the `bytes` at `begin` of a file. DATA messages from here name the byte but not the path: the caller has more
 * to say (which tensor) and puts both in front. IO and MEMORY messages are complete. */
nib_status nib_json_open(struct nib_json *json, int fd, const char *path, uint64_t begin, uint64_t bytes);
void nib_json_close(struct nib_json *json);

/* All of these skip whitespace first. */
nib_status nib_json_peek(struct nib_json *json, int *byte); /* -1 at the end of the text */
nib_status nib_json_take(struct nib_json *json, char wanted);
/* In an object or array: pass the comma, or the closing bracket and then *more is false. */
nib_status nib_json_more(struct nib_json *json, char close, bool first, bool *more);
/* Put the string and a NUL at the end of `text`; one with a NUL in it is rejected. With NULL it is only checked. */
nib_status nib_json_string(struct nib_json *json, struct nib_text *text);
nib_status nib_json_unsigned(struct nib_json *json, uint64_t *out);
nib_status nib_json_null(struct nib_json *json);
/* Pass any value. How deep it may be nested is the reference's rule: 127, with the two objects around it. */
#define NIB_JSON_MAX_DEPTH 125
nib_status nib_json_skip(struct nib_json *json);
/* Nothing but whitespace may be left. */
nib_status nib_json_end(struct nib_json *json);

/* Whether a text in memory is one value. */
NIB_PRIVATE bool nib_json_valid(const char *text, size_t bytes);

#endif

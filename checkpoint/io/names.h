/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.h - what names mean: patterns, fused groups, what stays in high precision, stacks of experts (names.c).
 */
#ifndef NIB_NAMES_H
#define NIB_NAMES_H

#include "io/checkpoint.h"

static inline bool nib_ck_ends_with(const char *name, const char *end)
{
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

/* Patterns of modules: exact, glob, re: (PCRE2, anchored at the start), with limits of time and memory. */
struct nib_patterns;
nib_status nib_patterns_create(const char *const *patterns, size_t n, struct nib_patterns **out);
/* The first that matches, or NIB_NONE. A pattern that runs into a limit is an error, and so is a list that has taken too
 * many steps for all names together. Not for several threads at once. */
nib_status nib_patterns_match(struct nib_patterns *patterns, const char *name, uint32_t *which);
void nib_patterns_destroy(struct nib_patterns *patterns);

/* The words of a list, which outlives them, that stand anywhere in a name. */
struct nib_words;
nib_status nib_words_create(const char *const *list, size_t n, struct nib_words **out);
/* A word by its first place in the list, and where it first stands in the name; false: no more are wanted. */
typedef bool nib_word_found(void *context, size_t word, size_t at);
/* In the order of places, longer ones first. Not for several threads at once. */
void nib_words_find(struct nib_words *words, const char *name, nib_word_found *found, void *context);
void nib_words_destroy(struct nib_words *words);

/* The set of weights that a server fuses into one matrix and that must share a tensor scale: equal keys, equal sets.
 * Writes "PARENT{q_proj,k_proj,v_proj}" to buffer; false where a name is in no set. */
bool nib_ck_fused_key(const char *weight, char *buffer, size_t bytes);
/* The sets' member names, for messages; row i ends with NULL. */
extern const char *const nib_ck_fused_sets[][5];
/* Whether a preset leaves a weight as it is, and why; NULL: it does not. */
const char *nib_ck_preset_keep(nib_preset preset, const char *weight);
/* Whether a weight is one of an expert. */
bool nib_ck_is_expert(const char *weight);

/* How a 3-D tensor of experts splits into matrices. Their names: the first prefix_bytes of the tensor's, prefix, the
 * expert's number, the part: "model.layers.0.mlp" ".experts" ".3" ".up_proj". */
struct nib_ck_stack {
    size_t prefix_bytes;
    const char *prefix;
    const char *parts[2]; /* "gate_proj", "up_proj"; or "down_proj", NULL */
    bool transposed;      /* [E, K, N] instead of [E, N, K] */
    bool interleaved;     /* rows of the two parts alternate (gpt-oss) */
};
/* *is false where the name is no stack of experts. DATA where config.json leaves the orientation open. */
nib_status nib_ck_stack_of(const nib_checkpoint *c, const char *tensor, int64_t rank, const int64_t *shape, bool *is,
                           struct nib_ck_stack *out);
/* Whether a family stores this module's matrix as [inputs, outputs] (the Conv1D of GPT-2). */
bool nib_ck_is_conv1d(const nib_checkpoint *c, const char *module);
/* Families whose ModelOpt readers want the stack whole, packed along dim 1 (Llama-4, gpt-oss). */
bool nib_ck_keeps_stacks(const nib_checkpoint *c);

#endif

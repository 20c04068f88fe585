/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard.h - a shard of a parameter: which elements a rank owns, and the grid of amaxes that its scales come from.
 */
#ifndef NIB_SHARD_H
#define NIB_SHARD_H

#include "tensor/tensor.h"

/* Elements start..start+length-1 of the flattened parameter, and their values. */
struct nib_shard {
    const nib_tensor *t;
    const nib_array *master; /* NULL where length is 0 */
    int64_t start, length;
};

/* One usage of a parameter as it is cast: how, and a grid with one amax per scale. */
struct nib_grid {
    struct nib_coding coding;
    const struct nib_usage_geometry *geometry;
    int64_t rows, cols; /* of the grid */
};

struct nib_grid nib_grid_of(const nib_tensor *t, nib_usage usage);

/* The index in the grid of the amax that an element of a rowwise usage belongs to. */
int64_t nib_grid_cell(const nib_tensor *t, const struct nib_grid *grid, int64_t element);

/* The tensor scale, or those of the rows, that follow from the amaxes of a whole usage. */
void nib_grid_tensor_scales(const nib_tensor *t, const struct nib_grid *grid, const float *amaxes,
                            float *tensor_scales);

/* Whether choosing the scale of a block takes all of its values, not only their amax. */
bool nib_scales_are_chosen(const nib_tensor *t);

struct nib_range {
    int64_t start, length;
};

/* The block range of an element: the smallest range around it that consists of whole blocks. That is its block in a row
 * or, where blocks are square or run down columns, as many whole rows as a block is high. */
struct nib_range nib_block_range(const nib_tensor *t, const struct nib_grid *grid, int64_t element);

/* A range of elements cut in three: before `whole` and from whole_end on, what lies in block ranges that others share;
 * between the two, whole block ranges. */
struct nib_cut {
    int64_t whole, whole_end;
};
struct nib_cut nib_cut_of(const nib_tensor *t, const struct nib_grid *grid, struct nib_range range);

/* Where the codes of a cast go: the whole usage (first 0), or a buffer that begins with byte `first` of it. */
struct nib_code_place {
    uint8_t *codes;
    int64_t first;
};

/* Whether a usage is cast from the master: the rowwise one always; the columnwise one where it has scales of its own
 * and its codes lie in the order of the elements. */
bool nib_usage_is_cast(const nib_tensor *t, nib_usage usage);

/* What a sharded cast cannot do to a parameter, and why. */
nib_status nib_check_castable(const nib_tensor *t);

/* Whether a master of this kind fits at `start`; gives the shard. `what` begins the message. */
nib_status nib_shard_init(const char *what, const nib_tensor *t, const nib_array *master, int64_t start,
                          struct nib_shard *out);

/* Whether `shard` is a buffer for the codes of elements start..start+length-1. shard NULL: the tensor's own. */
nib_status nib_check_code_place(const char *what, const nib_tensor *t, nib_usage usage, int64_t start, int64_t length,
                                const nib_array *shard, struct nib_code_place *out);

/* n values of a shard from element `first` of the parameter on, in its nominal dtype. */
void nib_shard_load(const struct nib_shard *shard, int64_t first, int64_t n, float *x);

/* The steps; arguments are checked. Blocks of which the shard has nothing get the amax `none`. A scale (delayed
 * scaling) replaces the one that follows from the amaxes, and chosen scale codes replace the scales of blocks. choose
 * writes the scales of the shard's whole block ranges, and nothing else. */
void nib_shard_amax(const struct nib_shard *shard, const struct nib_grid *grid, float none, float *amaxes);
void nib_shard_choose(const struct nib_shard *shard, const struct nib_grid *grid, const float *tensor_scales,
                      uint8_t *scales);
void nib_write_scales(nib_tensor *t, const struct nib_grid *grid, const float *amaxes, const float *scale,
                      const uint8_t *chosen);
void nib_shard_cast(const struct nib_shard *shard, const struct nib_grid *grid, const float *amaxes, const float *scale,
                    struct nib_code_place place);

/* Puts "parameter I: " before the message of what was wrong with it. */
nib_status nib_blame(nib_status status, size_t i);

/* Which rank has which elements. */
struct nib_owner {
    struct nib_range range;
    int rank;
};

/* The ranks in the order of their elements, rank r having ranges[r * stride]; SHAPE unless they make up the tensor. */
nib_status nib_order_owners(const nib_tensor *t, const struct nib_range *ranges, size_t stride, int size,
                            struct nib_owner *owners);

/* A parameter whose scales are chosen from all values of a block. Its pointers are borrowed. */
struct nib_choice {
    const struct nib_shard *shard;
    struct nib_grid grid;
    size_t index; /* among the caller's parameters */
    const float *amaxes;
    float *tensor_scales;
    uint8_t *scales; /* one per amax: the result, the same on all ranks */
};

/* All of them in a call. create gets memory, and the caller fills in the list; meet tells the ranks of each other's
 * shards, checks them, and gets the rest of the memory; make does the work once amaxes are reduced, and fails only where
 * the communicator does. meet and make are collective. */
struct nib_choices {
    struct nib_choice *list;
    size_t n;
    struct nib_range *own, *ranges; /* by rank, then by parameter */
    struct nib_owner *owners;       /* of one parameter */
    size_t *counts, *at;            /* bytes of each rank's message, and where to read on */
    uint8_t *mine, *all;
    float *values; /* of one block range that a cut divides */
};
nib_status nib_choices_create(size_t n, int size, struct nib_choices *out);
nib_status nib_choices_meet(const nib_comm *comm, struct nib_choices *choices);
nib_status nib_choices_make(const nib_comm *comm, struct nib_choices *choices);
void nib_choices_free(struct nib_choices *choices);

/* Bytes first..first+count-1 of the codes hold elements start..start+length-1 of the flattened tensor. */
nib_byte_range nib_bytes_of(const struct nib_geometry *geometry, nib_usage usage, int64_t start, int64_t length);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard.h - a piece of a parameter: which elements a rank owns, and the grid of amaxes that its scales come from.
 */
#ifndef NIB_SHARD_H
#define NIB_SHARD_H

#include "tensor.h"

/* Elements start..start+length-1 of the flattened parameter, and the numbers for them. */
struct nib_piece {
    const nib_tensor *t;
    const nib_array *master; /* NULL where length is 0 */
    int64_t start, length;
};

/* One copy of a parameter as it is cast: how, and a grid with one amax per scale. */
struct nib_grid {
    struct nib_coding coding;
    const struct nib_copy_geometry *geometry;
    int64_t rows, cols; /* of the grid */
};

struct nib_grid nib_grid_of(const nib_tensor *t, nib_copy copy);

/* Where the codes of a cast go: the whole copy (first 0), or a buffer that begins with byte `first` of it. */
struct nib_code_place {
    uint8_t *codes;
    int64_t first;
};

/* Whether a copy is cast from the master: the rowwise one always; the columnwise one where it has scales of its own
 * and its codes lie in the order of the elements. */
bool nib_copy_is_cast(const nib_tensor *t, nib_copy copy);

/* What a sharded cast cannot do to a parameter, and why. */
nib_status nib_check_castable(const nib_tensor *t);

/* Whether a master of this kind fits at `start`; gives the piece. `what` begins the sentence. */
nib_status nib_piece_init(const char *what, const nib_tensor *t, const nib_array *master, int64_t start,
                          struct nib_piece *out);

/* Whether `shard` is a buffer for the codes of elements start..start+length-1. shard NULL: the tensor's own. */
nib_status nib_check_code_place(const char *what, const nib_tensor *t, nib_copy copy, int64_t start, int64_t length,
                                const nib_array *shard, struct nib_code_place *out);

/* The three steps; arguments are checked. A scale (delayed scaling) stands in for the one that the amaxes give. */
void nib_piece_amax(const struct nib_piece *piece, const struct nib_grid *grid, float *amaxes);
void nib_write_scales(nib_tensor *t, const struct nib_grid *grid, const float *amaxes, const float *scale);
void nib_piece_cast(const struct nib_piece *piece, const struct nib_grid *grid, const float *amaxes, const float *scale,
                    struct nib_code_place place);

/* Bytes first..first+count-1 of the codes hold elements start..start+length-1 of the flattened tensor. */
nib_byte_range nib_bytes_of(const struct nib_geometry *geometry, nib_copy copy, int64_t start, int64_t length);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * architectures.h - families that nib writes as GGUF: what llama.cpp calls their tensors and where it wants them changed.
 */
#ifndef NIB_ARCHITECTURES_H
#define NIB_ARCHITECTURES_H

#include "model/weights.h"

enum nib_family {
    NIB_FAMILY_LLAMA,
    NIB_FAMILY_MISTRAL,
    NIB_FAMILY_QWEN2,
    NIB_FAMILY_QWEN3,
    NIB_FAMILY_QWEN3_MOE,
    NIB_FAMILY_GEMMA3,
    NIB_FAMILY_GPT_OSS,
    NIB_FAMILY_COUNT
};

struct nib_architecture {
    const char *model_types[2]; /* of config.json */
    const char *gguf;           /* general.architecture */
    bool permuted;              /* rows of q and k: pairs that are rotated together lie side by side */
    float norm_shift;           /* what its norms add to their weights */
    bool expert_biases;         /* llama.cpp adds them to products that it cannot scale: no NVFP4 experts */
};

extern const struct nib_architecture nib_architectures[NIB_FAMILY_COUNT];

/* The family of a checkpoint with config.json, or NULL. */
const struct nib_architecture *nib_ck_architecture(const nib_checkpoint *c);
static inline enum nib_family nib_ck_family(const struct nib_architecture *a)
{
    return (enum nib_family)(a - nib_architectures);
}
/* "llama, mistral, ..." in `text`, which is returned. */
const char *nib_ck_architecture_names(char *text, size_t bytes);

/* Whether llama.cpp has no place for the tensor scale of a weight of a GGUF file: of feed-forward weights of most
 * architectures. */
bool nib_ck_ignores_scale(const char *architecture, const char *weight);

/* What llama.cpp calls a module of any family, without ".weight": "blk.3.ffn_up_exps", with *expert 7 (-1: it is none);
 * false where names do not tell. For inputs, not for outputs: rows may be in another order there. */
bool nib_ck_llama_name(const char *module, char *name, size_t bytes, int64_t *expert);

/* Where a module or tensor goes. */
struct nib_gguf_place {
    char name[64];       /* of the module: "blk.3.attn_q"; "" where it is not written */
    const char *part;    /* what follows it: ".weight" or ".bias" */
    int64_t expert;      /* matrix of a stack; -1: it is one by itself */
    int64_t head_rows;   /* rows of a head, whose halves are interleaved; 0: none */
    bool plain;          /* F32 whatever the others are */
    float shift;         /* added to all values */
    int64_t first, step; /* of the tensor's last dim; 0, 1: all of it */
};

/* A weight of the checkpoint; false where the architecture has no place for it. `rows` are its own. */
bool nib_ck_place_weight(const nib_checkpoint *c, const struct nib_architecture *a, const char *weight, int64_t rows,
                         struct nib_gguf_place *out);
/* A tensor that is part of no weight. It may become two: the count is returned, 0 for one that is not written, -1 for
 * one without a place. */
int nib_ck_place_tensor(const nib_checkpoint *c, const struct nib_architecture *a, const char *tensor, int64_t rows,
                        struct nib_gguf_place out[2]);

/* The weight of b that is weight `index` of a: of its name, or, where one of the two is a GGUF file and the other is not,
 * of the name that it has there. false: there is none. *wa and *wb are copies whose rows are in the same order, and the
 * values of *wa are read as those of b were folded. */
bool nib_ck_counterpart(const nib_checkpoint *a, size_t index, const nib_checkpoint *b, size_t *found,
                        struct nib_ck_weight *wa, struct nib_ck_weight *wb);

#endif

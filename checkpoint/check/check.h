/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - what the files of the check share: the list of findings, the checkpoint in modules, and what was found out
 * about each weight.
 *
 *     check_table.c     the table of findings
 *     check.c           one check after the other; files
 *     check_tensors.c   names, shapes and dtypes of modules' tensors
 *     check_gguf.c      what a GGUF file lacks
 *     check_values.c    block scales, tensor scales, scales of activations
 *     check_groups.c    weights that servers fuse
 *     check_config.c    configuration against tensors
 *     check_mixture.c   FP8 beside NVFP4
 *     check_original.c  codes and scales against the original, and what can be guessed without it
 */
#ifndef NIB_CHECK_H
#define NIB_CHECK_H

#include "io/names.h"
#include "model/read.h"

/* Every finding: its name here and its row of the table. */
enum nib_fault {
    /* tensors */
    NIB_FAULT_SCALE_MISSING,
    NIB_FAULT_TENSOR_SCALE_MISSING,
    NIB_FAULT_INPUT_MISSING,
    NIB_FAULT_CODES_MISSING,
    NIB_FAULT_CODES_SHAPE,
    NIB_FAULT_CODES_COLUMNS,
    NIB_FAULT_SCALE_DTYPE,
    NIB_FAULT_SCALE_FLAT,
    NIB_FAULT_SCALE_PADDED,
    NIB_FAULT_SCALE_PADDING,
    NIB_FAULT_GROUP_SIZE,
    NIB_FAULT_SCALE_SHAPE,
    NIB_FAULT_TENSOR_SCALE_SHAPE,
    NIB_FAULT_MISNAMED,
    NIB_FAULT_STRAY,
    NIB_FAULT_PRE_QUANT_SCALE,
    NIB_FAULT_WRAPPED_NAME,
    NIB_FAULT_FP8_SCALE_MISSING,
    NIB_FAULT_FP8_SCALE_DTYPE,
    NIB_FAULT_FP8_SCALE_SHAPE,
    NIB_FAULT_GGUF_KEY,
    NIB_FAULT_GGUF_TENSOR,
    NIB_FAULT_GGUF_TOKENIZER,
    NIB_FAULT_GGUF_SCALE_IGNORED,
    /* values */
    NIB_FAULT_TENSOR_SCALE_NOT_FINITE,
    NIB_FAULT_TENSOR_SCALE_NOT_POSITIVE,
    NIB_FAULT_INPUT_NOT_FINITE,
    NIB_FAULT_INPUT_NOT_POSITIVE,
    NIB_FAULT_SCALE_NAN,
    NIB_FAULT_SCALE_ALL_NAN,
    NIB_FAULT_SCALE_NEGATIVE,
    NIB_FAULT_SCALE_ZERO,
    NIB_FAULT_SCALE_SUBNORMAL,
    NIB_FAULT_SCALE_SUBNORMAL_FEW,
    NIB_FAULT_SCALE_RANGE,
    NIB_FAULT_TENSOR_SCALE_INVERTED,
    NIB_FAULT_INPUT_INVERTED,
    NIB_FAULT_FP8_SCALE_VALUE,
    NIB_FAULT_FP8_NAN,
    /* fused groups */
    NIB_FAULT_FUSED_TENSOR_SCALES,
    NIB_FAULT_FUSED_INPUTS,
    NIB_FAULT_FUSED_PARTLY,
    /* configuration */
    NIB_FAULT_CONFIG_ABSENT,
    NIB_FAULT_CONFIG_MISSING,
    NIB_FAULT_CONFIG_METHOD,
    NIB_FAULT_CONFIG_FORMAT,
    NIB_FAULT_CONFIG_STATUS,
    NIB_FAULT_CONFIG_SCHEME,
    NIB_FAULT_CONFIG_DTYPE_KEYS,
    NIB_FAULT_CONFIG_PATTERN,
    NIB_FAULT_CONFIG_GLOB,
    NIB_FAULT_CONFIG_IGNORED,
    NIB_FAULT_CONFIG_NOT_IGNORED,
    NIB_FAULT_CONFIG_TOO_WIDE,
    NIB_FAULT_CONFIG_LISTED,
    NIB_FAULT_CONFIG_UNLISTED,
    NIB_FAULT_CONFIG_MIXTURE,
    NIB_FAULT_HF_MISSING,
    NIB_FAULT_HF_KEYS,
    NIB_FAULT_HF_DIFFERS,
    NIB_FAULT_HEAD_QUANTIZED,
    NIB_FAULT_HEAD_TIED,
    NIB_FAULT_HEAD_NOT_IGNORED,
    NIB_FAULT_ROUTER_QUANTIZED,
    NIB_FAULT_EMBEDDING_QUANTIZED,
    /* files */
    NIB_FAULT_METADATA,
    NIB_FAULT_STALE_SHARD,
    NIB_FAULT_UNINDEXED,
    NIB_FAULT_REPEATED,
    NIB_FAULT_ORIENTATION,
    NIB_FAULT_UNREADABLE,
    /* against the original, or guessed */
    NIB_FAULT_NIBBLES_SWAPPED,
    NIB_FAULT_SCALES_SWIZZLED,
    NIB_FAULT_TENSOR_SCALE_WRONG,
    NIB_FAULT_DIFFERS,
    NIB_FAULT_KEPT_DIFFERS,
    NIB_FAULT_WEIGHT_ABSENT,
    NIB_FAULT_WEIGHT_SHAPE,
    NIB_FAULT_MAYBE_SWIZZLED,
    NIB_FAULT_MAYBE_SWAPPED,
    NIB_FAULTS
};

/* A module that has NVFP4 tensors, or some of them. */
struct nib_check_module {
    const char *name;
    nib_checkpoint_format format;
    const struct nib_ck_layout *layout; /* of the format */
    uint32_t tensor[NIB_ROLE_COUNT];
    int64_t rows, cols;
};

/* What was found out about a weight of the checkpoint. */
struct nib_check_weight {
    bool nvfp4;
    bool tensor_scale_good, input_good; /* there, finite, positive, and in the right sense */
    bool tensor_scale_inverted, input_inverted;
    bool all_nan;    /* its scales, and its codes are zeros */
    bool nonzero;    /* some code is not 0 */
    uint8_t largest; /* scale code */
    float tensor_scale, input;
    nib_tensor_scale kind;
};

struct nib_checking {
    const nib_checkpoint *c, *original;
    nib_job job;
    int (*each)(void *context, const nib_finding *finding);
    void *context;
    struct nib_check_module *modules; /* in the order of names */
    size_t n_modules;
    nib_checkpoint_format format; /* of which a configuration must speak: that of whole weights, where there are any */
    bool has_inputs;              /* some module has a scale of activations */
    bool groups_want_inputs;      /* some group of compressed-tensors has quantized activations */
    bool uniform;                 /* all that is quantized is of one format, which one configuration describes */
    struct nib_check_weight *weights; /* as the checkpoint's */
    bool *broken;                     /* tensors that cannot be read as what they are, and that was said */
    size_t found;                     /* findings so far */
    uint64_t total;                   /* bytes of codes and scales */
    char *names;                      /* of modules */
};

/* Hand a finding to the caller: the tensor or file, and the fact. CANCELLED where it wants no more. */
nib_status nib_check_found(struct nib_checking *k, enum nib_fault fault, const char *tensor, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The same about the weight that has these codes: only where it can be written anew it is repairable. */
nib_status nib_check_found_in(struct nib_checking *k, uint32_t codes, enum nib_fault fault, const char *tensor,
                              const char *format, ...) __attribute__((format(printf, 5, 6)));
/* The word for a kind of finding. */
const char *nib_check_id(enum nib_fault fault);
/* The name of a weight's tensor in a role, for messages; its module where that is not there. */
const char *nib_check_tensor(const nib_checkpoint *c, const struct nib_ck_weight *w, enum nib_ck_role role);
/* Whether a repair can write a weight anew: it is of the checkpoint's own format, its codes and block scales can be read
 * as what they are, and it has a tensor scale or needs none. Others cannot be compared with their group either. */
static inline bool nib_check_is_writable(const struct nib_checking *k, size_t weight)
{
    const struct nib_ck_weight *w = &k->c->weights[weight];
    const struct nib_check_weight *x = &k->weights[weight];
    return w->format == k->c->format && !k->broken[w->tensor[NIB_ROLE_DATA]] &&
           (w->index >= 0 || (w->tensor[NIB_ROLE_SCALE] != NIB_NONE &&
                              (x->tensor_scale_good || x->tensor_scale_inverted || x->all_nan)));
}
/* Whether a group of compressed-tensors' configuration has quantized activations. */
bool nib_check_groups_want_inputs(const nib_checkpoint *c);
/* Whether the configuration wants activations of this module quantized; without one, whether any module has them. */
bool nib_check_wants_input(const struct nib_checking *k, const char *module);
/* Weights that are members of fused groups, those of one group side by side. */
struct nib_check_member {
    const char *key;
    size_t offset; /* of the key in the text, while it grows */
    uint32_t weight;
};
struct nib_check_groups {
    struct nib_check_member *members;
    size_t n;
    char *text;
};
nib_status nib_check_members(const nib_checkpoint *c, struct nib_check_groups *out);
void nib_check_free_members(struct nib_check_groups *groups);
/* The end of the group that begins at `first`. */
size_t nib_check_group_end(const struct nib_check_groups *groups, size_t first);

/* All checks, with k->c, original, each and context set, and what they found out, for a repair. */
nib_status nib_check_run(struct nib_checking *k, const char *what, const nib_job *job);
void nib_check_end(struct nib_checking *k);

/* Three dims, packed along the second; suffixes go on without a dot. */
static inline bool nib_check_is_stack(const struct nib_check_module *m)
{
    return m->layout->stacking == NIB_STACK_EXPERTS;
}

/* Bytes of codes and scales that a check reads of a weight. */
uint64_t nib_check_scanned_bytes(const struct nib_ck_weight *w);

/* The checks, each of which says what it finds. Those behind use what those before found out. */
nib_status nib_check_modules(struct nib_checking *k);
nib_status nib_check_wrapped_names(struct nib_checking *k);
nib_status nib_check_gguf(struct nib_checking *k); /* keys, tensors and tokenizer of its architecture */
nib_status nib_check_weights(struct nib_checking *k);
/* Scales of activations can only be missed once it is known whether there should be any. */
nib_status nib_check_inputs(struct nib_checking *k);
nib_status nib_check_shared(struct nib_checking *k);
nib_status nib_check_config(struct nib_checking *k);
nib_status nib_check_mixture(struct nib_checking *k);
nib_status nib_check_original(struct nib_checking *k);
nib_status nib_check_guess(struct nib_checking *k);

#endif

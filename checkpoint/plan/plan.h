/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - what a plan is: output files, the tensors of each in the order of their bytes, and where every byte of them
 * comes from. A plan is made from headers and configuration; run.c carries it out without knowing what it is for.
 *
 *     plan_ops.c     quantize, convert, dequantize: what becomes of each weight
 *     plan_patterns.c  patterns of a user that match nothing
 *     plan_build.c   from there to tensors
 *     plan_statistics.c  statistics of inputs: which belong to which weight
 *     plan_budget.c  weights that are worth more than 4 bits
 *     plan_codes.c   NVFP4 weights of another checkpoint
 *     plan_gptq.c    Hessians of inputs: likewise
 *     plan_fold.c    scales that move from weights into norms
 *     plan_restore.c stacks and transposed matrices that a plan takes apart, and another puts together again
 *     plan.c         plans put together by steps
 *     plan_layout.c  headers of output files
 *     config.c       configuration, index, provenance
 */
#ifndef NIB_PLAN_H
#define NIB_PLAN_H

#include "file/safetensors.h"
#include "io/hessians.h"
#include "io/names.h"
#include "io/statistics.h"
#include "model/architectures.h"
#include "model/read.h"
#include "model/roles.h"

#define NIB_SHARD_BYTES UINT64_C(5000000000)

/* Where the bytes of an output tensor come from. */
enum nib_producer {
    NIB_PRODUCE_COPY = 0, /* a source tensor, byte for byte */
    NIB_PRODUCE_STRIDED,  /* `count` elements of one, from element `first` on, `step` apart (small ones only) */
    NIB_PRODUCE_VALUE,    /* one F32 that is known when the plan is made */
    NIB_PRODUCE_JOINED,   /* a restored stack's biases, of one source tensor each (small ones only) */
    NIB_PRODUCE_CAST,     /* as STRIDED, but as F32, with `value` added, and of `head_rows` the halves alternating */
    NIB_PRODUCE_BYTES,    /* `data`, which is known when the plan is made */
    NIB_PRODUCE_WEIGHT,   /* weights write it: see nib_out_weight.out */
};

struct nib_out_tensor {
    const char *name;
    nib_dtype dtype;
    int ggml_type; /* GGUF files; -1 otherwise */
    int64_t rank;
    const int64_t *shape; /* outermost first */
    uint64_t bytes;
    uint64_t offset; /* in its file; set when the file is laid out */
    enum nib_producer producer;
    uint32_t source; /* COPY, STRIDED: a tensor of the input */
    int64_t first, step, count;
    float value;                         /* VALUE, CAST */
    int64_t head_rows;                   /* CAST */
    const void *data;                    /* BYTES */
    const struct nib_restored *restored; /* JOINED */
};

/* A stack of matrices that was cut when it was quantized, put together again: matrix e is the rows of its one or two
 * parts, one behind the other or in turns. */
struct nib_restored {
    const char *name; /* of the tensor */
    int64_t experts, parts;
    bool transposed, interleaved;
    const uint32_t *weights; /* [experts][parts] of the input */
    const uint32_t *biases;  /* tensors likewise; NULL: there are none */
    bool added;              /* its tensors are in the plan */
};

/* Weights that share a tensor scale, one of them at least. Every weight that is quantized is in one. */
struct nib_out_group {
    uint32_t first; /* of its out weights, in their order */
    uint32_t members;
    nib_dtype dtype;  /* in which they are quantized */
    bool mxfp4;       /* all are MXFP4: codes are taken over exactly */
    bool unit;        /* the tensor scale is 1, whatever the amax: the reader knows of none */
    float input_amax; /* of activations, where a file says it; 0 otherwise */
};

/* Where the statistics of a weight's input are. */
struct nib_plan_input {
    uint32_t entry; /* of plan->statistics; NIB_NONE: there are none */
    int64_t slices, slice;
};

/* How the codes of a weight are laid down. */
enum nib_laying {
    NIB_LAY_ROWS = 0, /* codes [rows, K/2] and scales [rows, K/16], row by row; matrix `index` of [E, rows, K] */
    NIB_LAY_STACK,    /* matrix `index` of [E, K/2, rows] and [E, K/16, rows]: packed along dim 1 */
    NIB_LAY_GGUF,     /* blocks of 64: four scales, then codes j and j+8 of each sixteen in a byte; stacks as ROWS */
    NIB_LAY_MXFP4,    /* MXFP4 that stays in GGUF: blocks of 32, a scale and then codes j and j+16 in a byte */
};

/* One weight that is worked on. Weights that stay as they are need none: their tensors are copied. */
struct nib_out_weight {
    struct nib_ck_weight source; /* a copy: experts of a stack that stays whole are joined to one matrix per expert */
    const char *name;            /* of the module that is written; NULL: that of the source */
    nib_action action;           /* QUANTIZE, FP8, CONVERT and REPAIR (codes stay), DEQUANTIZE and KEEP (values) */
    enum nib_laying laying;      /* of values: ROWS for [rows, K], STACK for [K, rows], alone or in a stack */
    bool stacked;                /* it is one matrix of a tensor of three dims */
    int64_t index;               /* in a stack that is written; 0 otherwise */
    int64_t experts;             /* matrices of that stack; 1 otherwise */
    nib_dtype dtype;             /* of values that are written */
    const struct nib_ck_weight *second; /* of the input, whose rows belong to it too; NULL: none */
    bool interleaved;                   /* they take turns */
    uint32_t group;                     /* QUANTIZE: index in groups */
    struct nib_plan_input statistics;   /* QUANTIZE: they weigh a sweep */
    uint32_t hessian;                   /* QUANTIZE: of plan->hessians, by which codes are chosen; NIB_NONE: none */
    const struct nib_ck_weight *codes;  /* QUANTIZE: of plan->codes, taken over instead; NULL: none */
    /* Codes that stay: what tensor scale is written, in the sense of the plan's checkpoint format (CT: the divisor), and
     * what every scale byte becomes (256 bytes in the plan's memory; NULL: itself). */
    float tensor_scale;
    bool as_in_source; /* instead: the source's own, and that of activations too, where it has one */
    const uint8_t *scale_map;
    /* The tensor scale of activations, in the same sense. Of `norm` it is found in the run: sqrt(K) * max |gamma|
     * of that tensor (or of gamma + 1). */
    float input;
    uint32_t norm; /* tensor of the input; NIB_NONE: `input` it is */
    bool norm_plus_one;
    uint32_t out[NIB_ROLE_COUNT]; /* the tensors that it writes; NIB_NONE for those that it does not */
};

struct nib_out_file {
    const char *name; /* within the output directory; of a GGUF file, and where one file becomes one, it is not used */
    uint32_t first, tensors; /* in plan->tensors: in the order of their bytes, once laid out */
    uint32_t input_file;     /* whose tensors it began with */
    uint64_t data, bytes;    /* where data begins; size of the file */
    uint64_t entries;        /* bytes of the header that its tensors take, at most */
};

/* What becomes of a weight of the input, for reports. */
struct nib_out_row {
    nib_action action;
    const char *reason;           /* "" or why it is kept */
    uint32_t group_name;          /* weight of the input: the first of its group; NIB_NONE where it is alone */
    uint64_t bytes_in, bytes_out; /* of all of its tensors */
    struct nib_plan_input input;
    double tokens;          /* that its statistics were taken over */
    const char *statistics; /* the same in words, or why there are none; "" where none are asked for */
    uint32_t hessian;       /* of plan->hessians; NIB_NONE: GPTQ does not choose its codes */
    const char *gptq;       /* the tokens of that Hessian, or "none: " and why; "" where it is not asked for */
    const char *fold;       /* what its columns' scales went into, or "none: " and why; "" where none are asked for */
    bool unit;              /* quantized with a tensor scale of 1 */
    bool raised;            /* it stays though it could be quantized, and is scaled where that would be */
    const struct nib_ck_weight *codes; /* of plan->codes, which it becomes; NULL: it is quantized */
};

/* What the slices of an entry come to. */
struct nib_statistics_digest {
    float *pooled;  /* of several: mean squares of all, where one has few tokens or none; NULL otherwise */
    double tokens;  /* of all */
    float *largest; /* magnitude of each channel, in all slices */
    bool measured;  /* and not guessed from mean squares */
    bool down;      /* slices are scaled to mean 1 before they are pooled */
    bool ready;
};

/* Scales of channels, of one norm or of one weight's columns. */
struct nib_plan_scales {
    const char *name;
    const float *values;
    int64_t n;
};

struct nib_plan_fold {
    float exponent;
    bool search;              /* of exponents, per norm */
    uint32_t *columns, *rows; /* of weights of the input: what multiplies and what divides; in scales, or NIB_NONE */
    const void **tensors;     /* of the input: the bytes that are written instead; NULL: as they are */
    struct nib_plan_scales *scales;
    size_t n, capacity;
};

/* A tensor of two dims or more that is no weight, and why it is not. */
struct nib_out_other {
    uint32_t tensor;
    const char *reason;
};

struct nib_plan {
    const nib_checkpoint *in;
    const char *command;                   /* "quantize" ...: provenance and messages */
    nib_checkpoint_format format;          /* of the weights that are written */
    bool gguf;                             /* into one GGUF file, instead of safetensors */
    nib_scheme scheme;                     /* of the output, where it is NVFP4 */
    nib_quantizer q;                       /* QUANTIZE */
    nib_activation activation;             /* QUANTIZE with NIB_SCHEME_NVFP4 */
    json_t *amaxes;                        /* of activations, by module */
    struct nib_statistics *statistics;     /* of inputs; NULL: none */
    struct nib_statistics_digest *digests; /* of its entries */
    bool statistics_strict;                /* every weight must have some */
    struct nib_hessians *hessians;         /* GPTQ; NULL: it is not asked for */
    double damp;
    float budget;                /* bits of a quantized weight; 0: as few as there can be */
    bool budget_plain;           /* what it is spent on stays as it is, and does not become FP8 */
    struct nib_plan_fold *fold;  /* NULL: nothing is folded */
    nib_checkpoint *codes;       /* has weights that are taken over; NULL: none */
    nib_dtype dequantized_dtype; /* DEQUANTIZE: of what is written; NIB_DTYPE_COUNT: each weight's own */
    json_t *options;             /* what provenance says of them */
    json_t *config;              /* config.json as it will be, without provenance; NULL: none is written */
    json_t *hf_quant;            /* hf_quant_config.json; NULL: none */
    bool quantized;           /* the output has quantized weights: the copied config.json needs a quantization_config */
    struct nib_out_row *rows; /* one per weight of the input */
    struct nib_out_other *others;
    size_t n_others;
    const char *note;      /* what a user of the result must know; "" otherwise */
    nib_dtype noted_dtype; /* of what was quantized, where config.json says another one; NIB_DTYPE_COUNT otherwise */
    json_t *restore;       /* what of the input was taken apart, for provenance: see plan_restore.c; NULL: nothing */
    struct nib_restored *restored; /* DEQUANTIZE */
    size_t n_restored;
    struct nib_out_tensor *tensors;
    size_t n_tensors, tensors_capacity;
    struct nib_out_weight *weights;
    size_t n_weights, weights_capacity;
    struct nib_out_group *groups;
    size_t n_groups, groups_capacity;
    struct nib_out_file *files;
    size_t n_files, files_capacity;
    uint64_t shard_bytes;
    bool keep_split;
    bool one_file; /* GGUF, or one file in: there is one file out, and no configuration where it is written as a file */
    /* GGUF from other files: the family, where weights and their rows go, and all keys but what nib says of itself. */
    const struct nib_architecture *architecture; /* NULL: tensors keep their names */
    struct nib_gguf_place *places;               /* of weights of the input */
    nib_dtype plain_dtype;                       /* of matrices that stay: BF16 or F16, or what dequantize is told */
    struct nib_gguf_plan *keys;
    struct nib_arena *strings; /* names, shapes, scale maps: all that plan pointers above point to */
};

/* ---- Steps that plans are put together by (plan.c) ---- */

/* An empty plan for a checkpoint format, as a GGUF file or not: every row KEEP with reason "". */
nib_status nib_plan_start(const nib_checkpoint *in, const char *command, nib_checkpoint_format format, bool gguf,
                          nib_plan **out);
/* Memory that lives as long as the plan; NULL without. */
void *nib_plan_memory(nib_plan *plan, size_t bytes);
const char *nib_plan_string(nib_plan *plan, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* One more tensor at the end of the current file. `shape` is copied. *index may be NULL. */
nib_status nib_plan_add_tensor(nib_plan *plan, const char *name, nib_dtype dtype, int64_t rank, const int64_t *shape,
                               enum nib_producer producer, uint32_t source, uint32_t *index);
/* A source tensor as it is. */
nib_status nib_plan_add_copy(nib_plan *plan, uint32_t tensor);
/* One more weight with its tensors, by plan->format and the weight's laying: NAME.weight_packed and so on, the tensor scale
 * among them, and that of activations where `with_input`. `*w` is copied; its out[] is filled. */
nib_status nib_plan_add_weight(nib_plan *plan, struct nib_out_weight *w, bool with_input);
/* Tensors that are added from here on belong to the output file that stands for this input file (by keep_split, or
 * by size: a new one is begun where the current one is full). Call it before each input tensor's outputs. */
nib_status nib_plan_next(nib_plan *plan, uint32_t input_file, uint64_t coming_bytes);
/* The end: names are checked, files named and laid out, configuration made. `plan` is destroyed on failure. */
nib_status nib_plan_finish(nib_plan *plan, nib_plan **out);

/* Every pattern of a list (its name is for the message) must match a weight's name or, with `tensors`, the module of any
 * tensor; ARG names what is near (plan_patterns.c). */
nib_status nib_plan_check_patterns(const nib_checkpoint *c, const char *list, const char *const *patterns, size_t n,
                                   bool tensors);

/* All of these in one, from the actions of the rows on: groups, tensors, files. `plan` is destroyed on failure. */
nib_status nib_plan_build(nib_plan *plan, nib_plan **out);
/* What keeping a weight means: KEEP, or DEQUANTIZE where its format goes. */
nib_action nib_plan_keep_action(const nib_plan *plan, const struct nib_ck_weight *w);
/* What the checkpoint format stores for activations of this amax. */
float nib_plan_input_scale(const nib_plan *plan, float amax);

/* ---- Statistics of inputs (plan_statistics.c) ---- */

nib_status nib_plan_open_statistics(nib_plan *plan, const char *path);
/* Those of every weight that is quantized. Does nothing without statistics. */
nib_status nib_plan_find_statistics(nib_plan *plan);
/* Scales of activations from them, where the plan has them so, once it is known what is folded. */
nib_status nib_plan_scale_activations(nib_plan *plan, const uint32_t *group);
/* Mean squares of a weight's input, and the tokens that they were taken over: an expert's are mixed with those of all
 * experts of its layer, which count as 256 tokens more. */
nib_status nib_plan_mean_squares(const nib_plan *plan, const struct nib_plan_input *input, int64_t cols, float *out,
                                 double *tokens);
/* That of an input that is divided by `scale`, which may come from another one: finite as it was. */
float nib_plan_folded_square(float square, float scale);
/* An amax of activations from the root of a mean square. */
#define NIB_AMAX_OF_RMS 32.0f

/* ---- More than 4 bits (plan_budget.c) ---- */

/* Of weights that are to be quantized, those that the patterns name become FP8, or with `plain` stay as they are. */
nib_status nib_plan_raise(nib_plan *plan, bool plain, const char *const *patterns, size_t n);
/* A weight stays as it is for what it is worth. */
void nib_plan_leave_plain(nib_plan *plan, size_t weight, const char *reason);
/* By plan->budget, from the ends of the model to its middle. `set` has the first weight of each weight's fused set. */
nib_status nib_plan_spend_budget(nib_plan *plan, const uint32_t *set);
/* Whether a weight is written in fewer bits. */
static inline bool nib_plan_is_quantized(const nib_plan *plan, size_t weight)
{
    return plan->rows[weight].action == NIB_ACTION_QUANTIZE || plan->rows[weight].action == NIB_ACTION_FP8;
}
/* Whether folding scales it as it likes: codes of weights beside it do not depend on who of them is worth more bits. */
static inline bool nib_plan_is_scaled(const nib_plan *plan, size_t weight)
{
    return nib_plan_is_quantized(plan, weight) || plan->rows[weight].raised;
}

/* ---- Weights of another checkpoint (plan_codes.c) ---- */

nib_status nib_plan_open_codes(nib_plan *plan, const char *path);
/* Those of every weight that is quantized, once it is known which share a tensor scale. Does nothing without. */
nib_status nib_plan_find_codes(nib_plan *plan);

/* ---- GPTQ (plan_gptq.c) ---- */

/* Tokens for each column that a Hessian must be of. */
#define NIB_GPTQ_TOKENS 6

/* Behind nib_plan_open_statistics. directory NULL: STATISTICS.hessians, if that is one; damp below 0: 0.1. */
nib_status nib_plan_open_hessians(nib_plan *plan, const char *statistics, const char *directory, float damp);
/* Those of every weight that is quantized. Does nothing without GPTQ. */
nib_status nib_plan_find_hessians(nib_plan *plan);

/* ---- Scales that move into norms (plan_fold.c) ---- */

/* Which, and what becomes of norms and biases; does nothing where none are asked for. */
nib_status nib_plan_fold(nib_plan *plan, const uint32_t *group);
const float *nib_plan_columns(const nib_plan *plan, uint32_t weight); /* of a weight of the input; NULL: none */
const float *nib_plan_divisors(const nib_plan *plan, uint32_t weight);
nib_status nib_plan_write_fold(const nib_plan *plan, const char *path);

/* ---- What was taken apart (plan_restore.c) ---- */

/* Whether config.json says of the weights what is true of them: else their dtype is noted. */
void nib_plan_note_dtype(nib_plan *plan);
/* A weight of the input is written otherwise than it lies there: noted for provenance. */
nib_status nib_plan_note_cut(nib_plan *plan, const struct nib_ck_weight *w);
/* What the input's own provenance says of that goes on to an output that keeps its codes. */
nib_status nib_plan_carry_notes(nib_plan *plan);
/* Stacks that the input's provenance tells of, and that are complete. */
nib_status nib_plan_find_restored(nib_plan *plan);
/* Whether it says that this weight was stored as [inputs, outputs]. */
bool nib_plan_was_transposed(const nib_plan *plan, const struct nib_ck_weight *w);

/* The name of the stack that a weight comes from, as a stack that is written whole bears it; NULL without memory. */
const char *nib_ck_stack_name(nib_plan *plan, const struct nib_out_weight *w);
/* Source tensors in the order in which they lie in their files: `order` holds n_tensors. */
nib_status nib_ck_order_by_place(const nib_checkpoint *c, uint32_t *order);

/* ---- GGUF from other files (plan_gguf.c, gguf_keys.c, gguf_names.c, gguf_tokenizer.c) ---- */

/* Which family it is, and where every weight goes. UNSUPPORTED, with what to do instead, for others. Does nothing where
 * the output is not GGUF, or the input is. */
nib_status nib_plan_place(nib_plan *plan);
/* Why llama.cpp needs a weight as it is; NULL: it does not. */
const char *nib_plan_gguf_keep(const nib_plan *plan, const struct nib_ck_weight *w);
/* Whether such a weight can do without a tensor scale: *unit. Some of its rows are read. */
nib_status nib_plan_gguf_unit(const nib_plan *plan, const struct nib_ck_weight *w, bool *unit);
/* A tensor that is part of no weight: all that becomes of it. */
nib_status nib_plan_add_placed(nib_plan *plan, uint32_t tensor);
/* What the output has and no tensor of the input: factors of long contexts. */
nib_status nib_plan_add_extra(nib_plan *plan);
/* All keys, once the tensors are known. */
nib_status nib_plan_make_keys(nib_plan *plan);
struct nib_gguf_plan;
nib_status nib_plan_put_names(const nib_plan *plan, struct nib_gguf_plan *out);
nib_status nib_plan_put_tokenizer(nib_plan *plan, struct nib_gguf_plan *out);

/* ---- Layout (plan_layout.c) ---- */

/* Sizes and offsets of a file; its tensors are put in the order of their bytes. */
nib_status nib_plan_lay_out(nib_plan *plan, struct nib_out_file *file);
/* The bytes before the data: `provenance` as long as the one of the layout. Freed with nib_free(text->bytes). */
nib_status nib_plan_header(const nib_plan *plan, const struct nib_out_file *file, const char *provenance,
                           struct nib_text *text);

/* ---- Configuration (config.c) ---- */

/* config and hf_quant_config of the output from those of the input and the rows: called by nib_plan_finish. A repair
 * may set plan->config and plan->hf_quant itself before that. */
nib_status nib_plan_configure(nib_plan *plan);
/* {"tool": "nib", ...} in one line, with the XXH3-128 of each input file; NULL: zeros. */
struct nib_hash {
    uint64_t high, low;
};
nib_status nib_plan_provenance(const nib_plan *plan, const struct nib_hash *hashes, struct nib_text *text);
/* model.safetensors.index.json; freed with nib_free(text->bytes). */
nib_status nib_plan_index(const nib_plan *plan, struct nib_text *text);
/* JSON as files have it: indented by 2, keys in their order, numbers as short as they can be. */
bool nib_put_json(struct nib_text *text, const json_t *value, int indent);

#endif

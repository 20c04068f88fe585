/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nib_checkpoint.h - whole models: open a checkpoint of any dialect, look at it, check it, compare it, and write
 * another one from it, quantized, converted, repaired or dequantized, in bounded memory.
 *
 * The rules of nib.h hold here too. Two words are used throughout. A tensor is what a file has a name for. A weight is
 * what a model multiplies with: the [N, K] matrix of one linear layer or of one expert, whatever tensors hold it and
 * however; a tensor without data holds none. Every call below sees weights alike, so that a matrix of a stack of
 * experts, an FP8 block format and packed FP4 codes can be compared, converted and quantized by the same calls.
 *
 * Writing takes two steps: a plan, which is made from headers and configuration alone and can be looked at, and its
 * run, which reads and writes data. Outputs appear under their names only when all of them are complete.
 */
#ifndef NIB_CHECKPOINT_H
#define NIB_CHECKPOINT_H

#include "nib.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Long calls ------------------------------------------------------------------------------------------ */

typedef struct nib_progress {
    size_t bytes;
    const char *phase;    /* "reading amaxes", "quantizing", ... */
    const char *tensor;   /* what is being worked on; may be NULL */
    uint64_t done, total; /* bytes of input of this phase */
    const char *warning;  /* what whoever uses the result must know, once; NULL otherwise */
} nib_progress;

/* How a long call does its work; NULL stands for all defaults. Results do not depend on it. */
typedef struct nib_job {
    size_t bytes;
    int32_t threads;     /* 0: one per processor */
    uint64_t max_memory; /* bytes that data may take besides headers and names; 0: 512 MiB */
    /* Called now and then, from one thread at a time: not 0 stops the call with NIB_ERR_CANCELLED. May be NULL. */
    int (*progress)(void *context, const nib_progress *progress);
    void *context;
    const nib_comm *comm; /* ranks that divide the work and see the same files; NULL: this process alone */
} nib_job;

static inline void nib_job_init(nib_job *job)
{
    const nib_job defaults = { sizeof defaults, 0, 0, NULL, NULL, NULL };
    if (job)
        *job = defaults;
}

/* ---- Opening --------------------------------------------------------------------------------------------- */

typedef struct nib_checkpoint nib_checkpoint;

/* How weights are kept. A checkpoint may mix them; it is named after the first of this list that is not PLAIN. */
typedef enum nib_checkpoint_format {
    NIB_CHECKPOINT_FORMAT_PLAIN = 0,          /* NAME.weight in F32, BF16 or F16 */
    NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS, /* weight_packed, weight_scale, weight_global_scale (a divisor) */
    NIB_CHECKPOINT_FORMAT_MODELOPT,           /* weight (U8), weight_scale, weight_scale_2 (a multiplier) */
    NIB_CHECKPOINT_FORMAT_TORCHAO,   /* _weight_qdata, _weight_scale, _weight_per_tensor_scale (a multiplier) */
    NIB_CHECKPOINT_FORMAT_GGUF,      /* blocks of 64 in a GGUF file, and .scale (a multiplier) */
    NIB_CHECKPOINT_FORMAT_NIB,       /* as nib_writer_write_tensor saves a tensor */
    NIB_CHECKPOINT_FORMAT_MXFP4,     /* _blocks and _scales (U8, E8M0); or weight_packed with U8 scales per 32 */
    NIB_CHECKPOINT_FORMAT_FP8_BLOCK, /* weight (E4M3) and weight_scale_inv per 128x128, or one of them */
    NIB_CHECKPOINT_FORMAT_FP8,       /* weight (E4M3) and weight_scale per tensor, per row or per 128x128 */
    NIB_CHECKPOINT_FORMAT_GGML,      /* GGML's own blocks in a GGUF file: Q8_0, Q4_K ... */
    NIB_CHECKPOINT_FORMAT_COUNT
} nib_checkpoint_format;

NIB_API const char *
nib_checkpoint_format_name(nib_checkpoint_format format); /* "compressed-tensors"; NULL outside the enum */
NIB_API nib_status nib_checkpoint_format_from_name(const char *name, nib_checkpoint_format *out);

/* What a plan does with a weight. */
typedef enum nib_action {
    NIB_ACTION_QUANTIZE = 0,
    NIB_ACTION_CONVERT, /* other names, same codes */
    NIB_ACTION_DEQUANTIZE,
    NIB_ACTION_REPAIR,
    NIB_ACTION_KEEP, /* a weight that stays as it is; the reason says why */
    NIB_ACTION_FP8,  /* E4M3 with a scale for each row, beside NVFP4 weights */
    NIB_ACTION_COUNT
} nib_action;
/* Whether nib_plan_quantize, _convert, _dequantize or _repair writes this format. */
NIB_API int nib_checkpoint_format_written_by(nib_checkpoint_format format, nib_action action);

/* Open a directory (with or without an index), a safetensors file or a GGUF file. Headers, index and configuration are
 * read and checked whole; data is read on demand, so that a file that changes meanwhile is an error of the call that
 * notices. IO, DATA (the message has the file, the tensor and the fact), UNSUPPORTED (pickled weights, swizzled
 * scales, ...), MEMORY. */
NIB_API nib_status nib_checkpoint_open(const char *path, nib_checkpoint **out);
NIB_API void nib_checkpoint_close(nib_checkpoint *checkpoint);

typedef struct nib_checkpoint_facts {
    size_t bytes;
    const char *path;
    nib_checkpoint_format format;
    const char *model_type; /* of config.json; "" without one */
    const char *config;     /* the text of config.json; NULL without one */
    size_t files, tensors, weights;
    uint64_t tensor_bytes;    /* of all tensors */
    uint64_t weight_elements; /* of all weights */
    const char *provenance;   /* JSON that a run of nib left in it; NULL without */
    uint64_t elements;        /* of the whole model: of all weights, and of tensors that are no part of one */
} nib_checkpoint_facts;
NIB_API nib_status nib_checkpoint_get_facts(const nib_checkpoint *checkpoint, nib_checkpoint_facts *out);

typedef struct nib_checkpoint_tensor {
    size_t bytes;
    const char *name;
    const char *file;  /* its name within the directory */
    const char *dtype; /* as the file has it: "BF16", "NVFP4", "Q8_0" */
    int64_t rank;
    const int64_t *shape; /* outermost first */
    uint64_t stored_bytes;
} nib_checkpoint_tensor;
/* Tensors in the order of their names, 0..tensors-1. */
NIB_API nib_status nib_checkpoint_get_tensor(const nib_checkpoint *checkpoint, size_t index,
                                             nib_checkpoint_tensor *out);

typedef struct nib_weight {
    size_t bytes;
    const char *name; /* the module: "model.layers.0.mlp.experts.3.up_proj" */
    nib_checkpoint_format format;
    nib_dtype dtype;                    /* PLAIN: of its values; otherwise BF16, or what the configuration names */
    int64_t rows, cols;                 /* outputs N, inputs K */
    const char *tensor;                 /* the tensor that holds its data; experts of a stack share one */
    const char *file;                   /* where that is */
    uint64_t stored_bytes;              /* of all of its tensors */
    nib_tensor_scale tensor_scale_kind; /* NVFP4 checkpoint formats: what the value per tensor means */
    float tensor_scale;
    int has_input_scale; /* NVFP4 checkpoint formats: that of activations, in the same sense as the tensor scale */
    float input_scale;
    const char *stored_dtype; /* of that tensor, as the file has it: "BF16", "U8", "Q4_K" */
} nib_weight;
/* Weights in the order of their names, numbers within names by value, 0..weights-1. tensor_scale and input_scale are
 * read from the file. */
NIB_API nib_status nib_checkpoint_get_weight(const nib_checkpoint *checkpoint, size_t index, nib_weight *out);
NIB_API nib_status nib_checkpoint_find_weight(const nib_checkpoint *checkpoint, const char *name, size_t *index);

/* Rows first..first+count-1 of a weight as values: `out` is [count, K], contiguous, F32, BF16 or F16. */
NIB_API nib_status nib_checkpoint_read_rows(const nib_checkpoint *checkpoint, size_t weight, int64_t first,
                                            int64_t count, const nib_array *out);
/* The same as stored, of NVFP4 checkpoint formats only (MODE): codes [count, ceil(K/2)], the even element low, and E4M3 scales
 * [count, ceil(K/16)]. Either may be NULL. */
NIB_API nib_status nib_checkpoint_read_codes(const nib_checkpoint *checkpoint, size_t weight, int64_t first,
                                             int64_t count, uint8_t *codes, uint8_t *scales);

/* ---- Measures of a weight ----------------------------------------------------------------------------------- */

/* Where a weight errs most: a row, or the 16 values of a row that begin at a column. */
enum { NIB_WORST = 8 };
typedef struct nib_worst {
    int64_t row, col; /* col is 0 for a row */
    double sum_squares, error_squares;
} nib_worst;

typedef struct nib_weight_stats {
    size_t bytes;
    int64_t elements, blocks;
    double sum_squares, error_squares; /* of a, of b - a */
    double amax, max_error;
    int64_t max_error_row, max_error_col;
    int64_t zeroed;      /* a not 0, b 0 */
    int64_t clipped;     /* |a| above what b's block can hold: 6 times its factor */
    int64_t underflowed; /* blocks of b with scale 0 or code 1..7 (below 2^-6), and something in a */
    int64_t nonfinite;   /* of a: an infinite error where b is not the same, and otherwise left out */
    int64_t codes[16];   /* how often each 4-bit code is in b; NVFP4 checkpoint formats only */
    int64_t scales[256]; /* how often each scale byte */
    /* Those with the largest error_squares, the largest first, of equal ones the first; where there are fewer with an
     * error, the others are 0. */
    nib_worst worst_rows[NIB_WORST], worst_blocks[NIB_WORST];
} nib_weight_stats;
/* 10 log10(sum_squares / error_squares); infinity without an error, NaN for a struct that is rejected. */
NIB_API double nib_stats_sqnr(const nib_weight_stats *stats);

/* Weight `b_index` of b against weight `a_index` of a, which must have its shape (MISMATCH). a may be b: then errors are
 * 0 and the histograms are what one gets. */
NIB_API nib_status nib_checkpoint_measure(const nib_checkpoint *a, size_t a_index, const nib_checkpoint *b,
                                          size_t b_index, const nib_job *job, nib_weight_stats *out);

typedef struct nib_compared {
    size_t bytes;
    const char *name;
    int64_t rows, cols;
    nib_checkpoint_format format_a, format_b;
    const nib_weight_stats *stats; /* valid during the call that it is given to */
} nib_compared;
/* Every weight that both have with the same shape, in the order of names, given to `each` (not 0 stops: CANCELLED);
 * *only_a and *only_b (may be NULL) count those that one alone has. */
NIB_API nib_status nib_checkpoint_compare(const nib_checkpoint *a, const nib_checkpoint *b, const nib_job *job,
                                          int (*each)(void *context, const nib_compared *compared), void *context,
                                          size_t *only_a, size_t *only_b);

/* ---- Checking ---------------------------------------------------------------------------------------------- */

typedef enum nib_severity {
    NIB_SEVERITY_ERROR = 0, /* a loader rejects it, or computes garbage */
    NIB_SEVERITY_WARNING,   /* a loader may */
    NIB_SEVERITY_HINT,      /* looks wrong, but could be meant */
    NIB_SEVERITY_COUNT
} nib_severity;
NIB_API const char *nib_severity_name(nib_severity severity);

typedef struct nib_finding {
    size_t bytes;
    nib_severity severity;
    const char *id;                          /* a stable word: "fused-scales-differ" */
    const char *tensor;                      /* or the file, where no tensor is meant */
    const char *fact, *consequence, *remedy; /* messages without a period */
    int repairable;                          /* nib_plan_repair takes care of it */
} nib_finding;
/* Everything that is wrong with an NVFP4 checkpoint, each to `each` (not 0 stops: CANCELLED). `against` is the original,
 * or NULL: some faults leave no certain trace without it. */
NIB_API nib_status nib_checkpoint_check(const nib_checkpoint *checkpoint, const nib_checkpoint *against,
                                        const nib_job *job, int (*each)(void *context, const nib_finding *finding),
                                        void *context);

/* ---- Plans ------------------------------------------------------------------------------------------------- */

typedef enum nib_scheme {
    NIB_SCHEME_NVFP4A16 = 0, /* weights only */
    NIB_SCHEME_NVFP4,        /* weights and activations */
    NIB_SCHEME_COUNT
} nib_scheme;

typedef enum nib_activation {
    NIB_ACTIVATION_ONE = 0,    /* scale 1: dynamic block scales do the rest */
    NIB_ACTIVATION_NORM,       /* sqrt(H) * max |gamma| / 2688 where the input comes from an RMSNorm, 1 elsewhere */
    NIB_ACTIVATION_FILE,       /* amax per module from a JSON object {"module": amax} */
    NIB_ACTIVATION_STATISTICS, /* amax by the statistics of the input; 1 where they have none */
    NIB_ACTIVATION_COUNT
} nib_activation;

typedef enum nib_preset {
    NIB_PRESET_DEFAULT = 0,
    NIB_PRESET_MLP_ONLY,
    NIB_PRESET_EXPERTS_ONLY,
    NIB_PRESET_COUNT
} nib_preset;

/* Who is to load the result. What a reader cannot take although the format has it stays as it is, and says why. */
typedef enum nib_reader {
    NIB_READER_ANY = 0,
    NIB_READER_VLLM,
    NIB_READER_SGLANG,
    NIB_READER_TRTLLM,
    NIB_READER_TRANSFORMERS,
    NIB_READER_LLAMA_CPP,
    NIB_READER_COUNT
} nib_reader;

/* Scales of channels that move from columns of weights into what makes their input: norms, and rows of up. The model stays
 * what it was, and loses less by quantization. */
typedef enum nib_fold {
    NIB_FOLD_NONE = 0,
    NIB_FOLD_FIXED, /* E[x^2]^(exponent/2) */
    NIB_FOLD_SEARCH, /* by the exponent of 0, 0.05, ... 1 that loses least, of each norm; reads data when it is planned */
    NIB_FOLD_COUNT
} nib_fold;

/* The words for these and for rules of nib.h, as options and provenance have them; NULL outside the enum. */
NIB_API const char *nib_scheme_name(nib_scheme scheme);                     /* "nvfp4a16" */
NIB_API const char *nib_activation_name(nib_activation activation);         /* "norm" */
NIB_API const char *nib_preset_name(nib_preset preset);                     /* "mlp-only" */
NIB_API const char *nib_reader_name(nib_reader reader);                     /* "transformers"; "any" */
NIB_API const char *nib_scale_rule_name(nib_scale_rule rule);               /* "4over6" */
NIB_API const char *nib_tensor_scale_rule_name(nib_tensor_scale_rule rule); /* "pow2" */

#define NIB_UNSET (-1) /* for an enum or value below: what the dialect fixes, or the default */

/* What a reader loads: those of *format (nib_checkpoint_format) and *scheme (nib_scheme) that are NIB_UNSET are chosen.
 * UNSUPPORTED, with the reason, where it does not load what is set. */
NIB_API nib_status nib_reader_choose(nib_reader reader, int32_t *format, int32_t *scheme);

typedef struct nib_quantize_options {
    size_t bytes;
    nib_checkpoint_format format; /* COMPRESSED_TENSORS, MODELOPT or GGUF */
    nib_scheme scheme;
    int32_t dialect;    /* nib_dialect, or UNSET: te, sweep, pow2, 2^-6. A dialect other than te fixes every numeric
                           * choice, and one that is set besides is MODE */
    int32_t scale_rule; /* nib_scale_rule, or UNSET */
    int32_t tensor_scale_rule; /* NIB_TENSOR_SCALE_RULE_EXACT or _POW2, or UNSET */
    float min_block_scale;     /* below 0: unset */
    nib_activation activation;
    const char *activation_file;
    nib_preset preset;
    /* Modules that stay as they are, and the only ones that do not: exact names, globs (with * or ?), or re:PATTERN as
     * Python's re.match takes it. `ignore` adds to the defaults; `only` is looked at before both. One that matches no
     * module (`only`: no weight) is ARG, and the message has names that are near. */
    const char *const *ignore;
    size_t n_ignore;
    const char *const *only;
    size_t n_only;
    uint64_t shard_bytes; /* of an output file, about; 0: 5 GB */
    uint8_t keep_split;   /* a file per input file, under its name */
    nib_reader reader;
    /* A file of statistics of inputs: llama.cpp's imatrix (GGUF or legacy), or nib's own (docs/checkpoints.md). A sweep then
     * weighs the errors of each column by its mean square (nib_overrides.importance); weights without statistics are swept
     * as without a file, or with `statistics_strict` are DATA. MODE with another scale rule, unless scales of activations
     * come from it. NULL: none. */
    const char *statistics;
    uint8_t statistics_strict;
    /* Needs statistics and a sweep (MODE), a model_type that nib knows (UNSUPPORTED), and a directory. The scales are in the
     * output's file nib-fold.scales, by which compare and check undo them. */
    nib_fold fold;
    float fold_exponent; /* below 0: 0.25 */
    /* A checkpoint whose NVFP4 weights are taken over as they are, codes, block scales and tensor scales, by their names; where
     * weights are folded, its codes must be of the folded ones. DATA: another shape, one of a fused set alone, or tensor
     * scales of such that differ. Not with GGUF or stacks of experts that stay whole (MODE). NULL: none. */
    const char *codes;
    /* Codes by GPTQ, under the scales of the sweep with `statistics`, which must be nib's own (MODE without, and with another
     * scale rule): by the Hessians of `hessians`, a directory that nib.calibrate wrote, or beside the statistics,
     * STATISTICS.hessians, or in them (docs/calibration.md). Weights without a Hessian of tokens enough stay as the sweep
     * has them; rows of the plan say which. */
    uint8_t gptq;
    const char *hessians;
    float damp; /* NIB_UNSET: 0.1 */
    /* Weights that become FP8 with a scale for each row (E4M3, amax / 448) where they would be NVFP4, as patterns like those
     * above: what is fused with one becomes FP8 too. Or a budget of bits for a quantized weight, scales of blocks and rows
     * included, from 4.5 on: it is spent on the last and the first layers, which is a guess, or with `budget_plain` on such
     * that stay as they are. 0: none. Not with GGUF (MODE), which has no FP8, but for budget_plain. All experts of a layer
     * are fused. */
    const char *const *fp8;
    size_t n_fp8;
    float budget;
    uint8_t budget_plain;
    /* Weights that stay as they are where they would be NVFP4, with what is fused with them. Unlike those of `ignore` they
     * are folded as the others, so that the codes of those do not depend on which these are. */
    const char *const *plain;
    size_t n_plain;
} nib_quantize_options;
/* compressed-tensors, nvfp4a16, everything else unset. `bytes` is the caller's sizeof; ARG for one that no version
 * has. */
NIB_API nib_status nib_quantize_options_init_sized(nib_quantize_options *options, size_t bytes);
static inline void nib_quantize_options_init(nib_quantize_options *options)
{
    (void)nib_quantize_options_init_sized(options, sizeof *options);
}

typedef struct nib_plan nib_plan;

/* ARG, MODE (options that contradict each other), UNSUPPORTED (what the format cannot hold), DATA. The checkpoint must
 * outlive the plan. */
NIB_API nib_status nib_plan_quantize(const nib_checkpoint *in, const nib_quantize_options *options, nib_plan **out);
/* NVFP4 weights to another checkpoint format: codes and scale bytes stay. Everything else is copied. */
NIB_API nib_status nib_plan_convert(const nib_checkpoint *in, nib_checkpoint_format format, nib_plan **out);
/* Every weight that is not plain to F32, BF16 or F16, in safetensors files (PLAIN) or in a GGUF file (GGUF).
 * NIB_DTYPE_COUNT: to what they had before, by provenance or by config.json (BF16 where nothing says it). What
 * nib_plan_quantize cut or transposed comes back as it was: every tensor has the name and the shape that it had. */
NIB_API nib_status nib_plan_dequantize(const nib_checkpoint *in, nib_checkpoint_format format, nib_dtype dtype,
                                       nib_plan **out);
/* What nib_checkpoint_check calls repairable, repaired: same checkpoint format, same files, same codes. Unlike the others it reads
 * data, since it makes such a check. MODE where there is nothing to repair, UNSUPPORTED for checkpoint formats other than
 * compressed-tensors and ModelOpt. */
NIB_API nib_status nib_plan_repair(const nib_checkpoint *in, nib_plan **out);
NIB_API void nib_plan_destroy(nib_plan *plan);

/* What becomes of one weight. */
typedef struct nib_plan_row {
    size_t bytes;
    const char *name;
    nib_action action;
    const char *reason; /* why it is kept (or dequantized, where only plain values can be kept); "" otherwise */
    int64_t rows, cols;
    uint64_t bytes_in, bytes_out;
    const char *group;      /* name of the first weight that shares its tensor scale; "" where it is alone */
    const char *statistics; /* of its input: "131072 tokens", or "none: " and why; "" where none are asked for */
    double tokens;          /* the number; 0: none */
    const char
        *fold; /* the norm or weight that the scales of its columns went into, or "none: " and why; "" where nothing
                         is to be folded, or nothing goes with it */
    const char *gptq; /* tokens of the Hessian by which its codes are chosen, or "none: " and why; "" without GPTQ */
} nib_plan_row;

typedef struct nib_plan_facts {
    size_t bytes;
    size_t weights;               /* the first rows */
    size_t changed, kept;         /* of them */
    size_t groups;                /* that share a tensor scale, of two or more */
    size_t files_in, files_out;   /* of tensors */
    uint64_t bytes_in, bytes_out; /* sizes of these files, headers included */
    uint64_t changed_elements;    /* of weights that change */
    uint64_t changed_bytes_out;   /* what they take afterwards */
    uint64_t elements;            /* of the whole model, as in nib_checkpoint_facts */
    uint64_t tensor_bytes_out;    /* of all tensors that are written, headers not included */
    size_t rows;      /* weights, and behind them, of a quantization, every other tensor of two dims or more */
    const char *note; /* what whoever uses the result must know, with the remedy; "" otherwise */
} nib_plan_facts;
NIB_API nib_status nib_plan_get_facts(const nib_plan *plan, nib_plan_facts *out);
NIB_API nib_status nib_plan_get_row(const nib_plan *plan, size_t index, nib_plan_row *out);

typedef struct nib_run_options {
    size_t bytes;
    uint8_t resume; /* go on where an earlier run of the same plan was stopped; with none to go on from, start */
    uint8_t force;  /* replace an output that exists, and what an earlier run left */
} nib_run_options;

/* Write the output: a directory, or a file for GGUF and for a single file in and out. Until all is complete everything is
 * in a directory ".nib-partial" in it (beside it, for a file), which `resume` goes on from and which goes in the end. The
 * input is never touched: an output in it or around it is rejected. options and job may be NULL. IO, MODE, DATA (a NaN
 * or an infinity in a weight: named with its place), CANCELLED; what was written stays for a resume, except after
 * CANCELLED, which removes it. */
NIB_API nib_status nib_plan_run(const nib_plan *plan, const char *out, const nib_run_options *options,
                                const nib_job *job);

#ifdef __cplusplus
}
#endif

#endif /* NIB_CHECKPOINT_H */

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * formats.h - the table of checkpoint formats: what each one calls its tensors, what is in them, and who reads them.
 *
 * Finding weights, reading, planning, checking and the configuration all go by it. A format that is only read is a row
 * and its read functions; one that is written too needs its quantization_config in plan/config.c.
 */
#ifndef NIB_FORMATS_H
#define NIB_FORMATS_H

#include "nib_checkpoint.h"

#include <stdbool.h>

struct nib_ck_weight;

/* The tensors of a weight. Not every checkpoint format has all. */
enum nib_ck_role {
    NIB_ROLE_DATA = 0,     /* values or codes */
    NIB_ROLE_SCALE,        /* of blocks */
    NIB_ROLE_TENSOR_SCALE, /* one value per tensor (or per expert of a stack) */
    NIB_ROLE_INPUT,        /* the tensor scale of activations */
    NIB_ROLE_COUNT
};

/* How tensors hold matrices [N, K]. */
enum nib_ck_stacking {
    NIB_STACK_NONE = 0, /* a tensor is a matrix: values [N, K], codes [N, K/2] */
    NIB_STACK_EXPERTS,  /* [E, N, K] or [E, K, N], packed along K: names.c and the scales tell which */
    NIB_STACK_BLOCKS,   /* [E, N, K/32, 16] */
    NIB_STACK_GGUF,     /* [N, K] or [E, N, K], in blocks that hold their scales */
    NIB_STACK_SAVED,    /* a tensor that the library saved: its metadata says what it is; scales are padded */
    NIB_STACK_OTHER     /* another usage of the weight that the layout before makes: it goes where that goes */
};

/* What makes a weight of a tensor that has the right name, dtype and rank. */
enum nib_ck_evidence {
    NIB_BY_NAME = 0,    /* nothing else: no one else uses the name */
    NIB_BY_SCALE,       /* that its block scales are there */
    NIB_BY_SCALE_DTYPE, /* that they are, in a dtype that they should have */
    NIB_BY_METHOD       /* that it has scales of either kind, or config.json the format's method */
};

#define NIB_DTYPE_BIT(dtype) (1u << (dtype))
#define NIB_FLOAT_BITS (NIB_DTYPE_BIT(NIB_F32) | NIB_DTYPE_BIT(NIB_BF16) | NIB_DTYPE_BIT(NIB_F16))
#define NIB_ROLE_BIT(role) (1u << (role))

/* One way in which a checkpoint format lays out its tensors. */
struct nib_ck_layout {
    const char *suffixes[NIB_ROLE_COUNT]; /* of tensors' names, behind the module's; NULL: it has no such tensor */
    uint32_t data, scale;                 /* dtypes that these may have, as NIB_DTYPE_BIT */
    uint64_t ggml_types;                  /* of data, as NIB_GGUF_BIT; 0: any dtype that is not GGML's alone */
    enum nib_ck_stacking stacking;
    enum nib_ck_evidence evidence;
    uint32_t own; /* NVFP4: roles whose suffix no other format uses, so that a check can tell the format by them */
};

typedef nib_status nib_ck_codes_fn(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                                   uint8_t *codes, uint8_t *scales);
typedef nib_status nib_ck_rows_fn(const nib_checkpoint *c, const struct nib_ck_weight *w, int64_t first, int64_t count,
                                  nib_dtype dtype, void *out);

enum { NIB_CK_LAYOUTS = 3 };

struct nib_ck_format {
    const char *name;
    const char *method; /* quant_method in config.json; NULL: none */
    struct nib_ck_layout layouts[NIB_CK_LAYOUTS];
    nib_tensor_scale tensor_scale; /* what the value per tensor means, that of activations too */
    int tensor_scale_rank;         /* of its tensor, where it is written: [] or [1] */
    bool tensor_scale_optional;    /* 1 where it is missing */
    bool fused;                    /* servers fuse its matrices, which must then share their tensor scales */
    int bits;                      /* of an element's data; 0: those of its dtype */
    int columns;                   /* K is a multiple of this where it is written */
    uint32_t written_by;           /* actions that write it, as 1 << nib_action */
    nib_ck_codes_fn *read_codes;   /* NVFP4 alone: codes of 4 bits, E4M3 scales per 16, one value per tensor */
    nib_ck_rows_fn *read_rows;
};

/* The suffix of what activations are multiplied with before they are quantized (AWQ), which no format here has. */
#define NIB_PRE_QUANT_SCALE ".pre_quant_scale"

extern const struct nib_ck_format nib_ck_formats[NIB_CHECKPOINT_FORMAT_COUNT];

static inline bool nib_ck_is_nvfp4(nib_checkpoint_format format) { return nib_ck_formats[format].read_codes != NULL; }

/* The layout of a format for stacks of experts that stay whole; NULL: it has none. */
const struct nib_ck_layout *nib_ck_stack_layout(nib_checkpoint_format format);
/* What a tensor of a role is called in messages: its suffix without the dot. */
const char *nib_ck_suffix_name(const struct nib_ck_layout *layout, enum nib_ck_role role);
/* "modelopt, torchao or gguf": formats that an action writes, in `text`, which is returned. */
const char *nib_ck_written_names(nib_action action, char *text, size_t bytes);

#endif

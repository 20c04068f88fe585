/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conform.h - a case of a file of vectors: what it asks for, and what came of it.
 *
 * conform.c reads files and reports, conform_case.c understands cases, conform_run.c runs them.
 */
#ifndef NIB_CONFORM_H
#define NIB_CONFORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cli.h"
#include "nib.h"
#include "nib_file.h"

enum conform_op { CONFORM_QUANTIZE, CONFORM_GEMM, CONFORM_CASTS, CONFORM_OPS };

struct conform_case {
    enum conform_op op;
    nib_quantizer quantizer;
    nib_device *device;         /* where it is run; set by the caller */
    bool moves;                 /* that is not the host: arrays go there, and results come back */
    uint8_t exact;              /* 0: the amax of a transformed usage may be two units in the last place off */
    uint8_t given_amax;         /* row_amax, col_amax are inputs too */
    uint8_t given_tensor_scale; /* tensor_scale is an input too */
    uint8_t given_global_scale; /* global_scale is an input too */
    uint8_t given_scale;        /* scale, a multiplier, is an input: delayed scaling */
    int32_t four_over_six;      /* 0 off, else 1 + nib_error_mode */
    int32_t tensor_scales;
};

enum conform_verdict {
    CONFORM_PASSED,
    CONFORM_DIFFERENT,
    CONFORM_UNSUPPORTED, /* the device does not do this; the message says what */
    CONFORM_BAD          /* it could not be checked: the file is bad */
};

struct conform_result {
    enum conform_verdict verdict;
    char message[1024]; /* CONFORM_BAD: why */
    /* CONFORM_DIFFERENT: the first difference */
    const char *tensor;
    int rank;
    int64_t index[NIB_MAX_RANK]; /* of an element of codes, of a block of scales, of a number */
    uint32_t expected, got;
    int digits; /* of hex that the two have */
};

/* An open file, and which of its tensors a case has used. */
struct conform_file {
    nib_file *file;
    uint8_t *claimed;
};

/* Make the result CONFORM_BAD with this message. Always false, so that callers can return it. */
bool conform_bad(struct conform_result *result, const char *format, ...) CLI_FORMAT(2, 3);

struct json_t; /* jansson's, for those who know it */

/* Understand a case. False with the reason in `result`. */
bool conform_parse(struct json_t *json, struct conform_case *out, struct conform_result *result);

/* Run the case `name` of the file. The result is passed as zeros. */
void conform_run(const struct conform_case *what, const char *name, struct conform_file *file,
                 struct conform_result *result);

#endif

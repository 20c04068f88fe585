/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commands.h - the commands that have a file of their own. nib.c lists them.
 */
#ifndef NIB_COMMANDS_H
#define NIB_COMMANDS_H

#include "cli.h"

extern const struct cli_command cli_bench;      /* bench.c */
extern const struct cli_command cli_check;      /* check.c */
extern const struct cli_command cli_compare;    /* compare.c */
extern const struct cli_command cli_conform;    /* conform.c */
extern const struct cli_command cli_convert;    /* convert.c */
extern const struct cli_command cli_dequantize; /* dequantize.c */
extern const struct cli_command cli_inspect;    /* inspect.c */
extern const struct cli_command cli_quantize;   /* quantize.c */
extern const struct cli_command cli_repair;     /* repair.c */

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - the tool as one process. nib-mpi has a main of its own.
 */
#include "cli.h"

int main(int argc, char **argv) { return cli_main(argc, argv); }

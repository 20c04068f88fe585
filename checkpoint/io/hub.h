/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hub.h - what somebody meant by a path that is no checkpoint (hub.c).
 */
#ifndef NIB_HUB_H
#define NIB_HUB_H

#include "io/checkpoint.h"

/* A checkpoint at `path` could not be opened, and the message says why. The status again; where the path looks like a
 * model's name on the Hugging Face hub or a directory of its cache, IO with a message that says what to do. */
nib_status nib_ck_explain(const char *path, nib_status status);
/* Whether a file that begins so is a pointer of Git LFS to the file that is meant. */
bool nib_ck_is_lfs_pointer(const char *start, size_t bytes);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.h - what other parts of the library may ask of an open file beyond nib.h: its name, for sentences.
 */
#ifndef NIB_SAFETENSORS_H
#define NIB_SAFETENSORS_H

#include "base.h"

#define NIB_SAFETENSORS_MAX_HEADER 100000000 /* bytes of JSON, by the format's own rule */

const char *nib_file_path(const nib_file *file);
const char *nib_writer_path(const nib_writer *writer);

#endif

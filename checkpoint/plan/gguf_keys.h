/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf_keys.h - what config.json says, as the keys of a GGUF file want it (gguf_keys.c).
 */
#ifndef NIB_GGUF_KEYS_H
#define NIB_GGUF_KEYS_H

#include "plan/plan.h"

/* A value of config.json, of the text model first; NULL where it is missing or null. */
const json_t *nib_plan_setting(const nib_plan *plan, const char *key);
/* A number of an object; `otherwise` where it is missing or no number. */
double nib_json_number(const json_t *object, const char *key, double otherwise);
/* The parameters of rotary positions, of whichever form; of one kind of layers where each has its own. A reference that
 * lives as long as the plan; an empty object without. */
const json_t *nib_plan_rope(const nib_plan *plan, const char *layers);
int64_t nib_plan_head_dim(const nib_plan *plan);
/* The front matter of the model card: strings, lists of strings, and null where a key has no value. Empty without a card. */
nib_status nib_plan_read_card(const nib_plan *plan, json_t **out);

#endif

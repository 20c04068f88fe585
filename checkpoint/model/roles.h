/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roles.h - what a module is to its model, and what readers make of its name (roles.c).
 *
 * Plans, configurations and checks all ask here, so that they cannot disagree.
 */
#ifndef NIB_ROLES_H
#define NIB_ROLES_H

#include "model/weights.h"

enum nib_ck_role_of_module {
    NIB_MODULE_ORDINARY = 0, /* quantized unless something else speaks against it */
    NIB_MODULE_HEAD,
    NIB_MODULE_CLASSIFIER,
    NIB_MODULE_EMBEDDING,
    NIB_MODULE_ROUTER,
    NIB_MODULE_NORM,
    NIB_MODULE_CONVOLUTION,
    NIB_MODULE_GATE,
    NIB_MODULE_INDEXER,
    NIB_MODULE_VISION,
    NIB_MODULE_PROJECTOR,
    NIB_MODULE_AUDIO,
    NIB_MODULE_PREDICTION,
    NIB_MODULE_COUNT
};

enum nib_ck_role_of_module nib_ck_module_role(const nib_checkpoint *c, const char *module);
/* Whether loaders build a layer of it that could be a packed one. */
bool nib_ck_is_linear_role(enum nib_ck_role_of_module role);
/* Why a weight stays in high precision by default ("an embedding"), or NULL. */
const char *nib_ck_default_keep(const nib_checkpoint *c, const char *weight);
/* Why a weight stays because a reader cannot take it in this format, or NULL. */
const char *nib_ck_reader_keep(const nib_checkpoint *c, nib_reader reader, nib_checkpoint_format format,
                               const struct nib_ck_weight *w);

/* What keeps a reader from loading the model beside packed weights, whatever is packed; NULL: nothing. */
const char *nib_ck_reader_rejects(const nib_checkpoint *c, nib_reader reader);

/* What the model's class calls its output head, which a checkpoint with tied ones does not hold: "lm_head". */
const char *nib_ck_head_name(const nib_checkpoint *c);
/* The name by which transformers knows a module; false where that is the checkpoint's own. */
bool nib_ck_reader_name(const nib_checkpoint *c, const char *module, char *buffer, size_t bytes);
/* The part of its name that says which tower a module of another modality belongs to, of letters, digits and '_'; false
 * where it belongs to none. */
bool nib_ck_tower_part(const nib_checkpoint *c, const char *module, char *buffer, size_t bytes);

#endif

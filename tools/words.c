/* SPDX-License-Identifier: Apache-2.0 */
#include "words.h"

#include <stdio.h>
#include <string.h>

void words_add(struct words *words, const char *name, int32_t value)
{
    for (int i = 0; i < words->n; i++)
        if (strcmp(words->names[i], name) == 0)
            return;
    if (words->n == WORDS_MOST)
        return;
    words->names[words->n] = name;
    words->values[words->n++] = value;
}

struct words words_formats(nib_action writes)
{
    struct words words = { .n = 0 };
    for (int i = 0; i < NIB_CHECKPOINT_FORMAT_COUNT; i++)
        if (nib_checkpoint_format_written_by((nib_checkpoint_format)i, writes))
            words_add(&words, nib_checkpoint_format_name((nib_checkpoint_format)i), i);
    return words;
}

struct words words_dialects(void)
{
    struct words words = { .n = 0 };
    for (int i = 0; i < NIB_DIALECT_COUNT; i++)
        words_add(&words, nib_dialect_name((nib_dialect)i), i);
    return words;
}

struct words words_schemes(void)
{
    struct words words = { .n = 0 };
    for (int i = 0; i < NIB_SCHEME_COUNT; i++)
        words_add(&words, nib_scheme_name((nib_scheme)i), i);
    return words;
}

struct words words_presets(void)
{
    struct words words = { .n = 0 };
    for (int i = 0; i < NIB_PRESET_COUNT; i++)
        words_add(&words, nib_preset_name((nib_preset)i), i);
    return words;
}

struct words words_scale_rules(void)
{
    struct words words = { .n = 0 };
    for (int i = 0; i < NIB_SCALE_RULE_COUNT; i++)
        words_add(&words, nib_scale_rule_name((nib_scale_rule)i), i);
    return words;
}

struct words words_tensor_scale_rules(void)
{
    struct words words = { .n = 0 };
    for (int i = NIB_TENSOR_SCALE_RULE_EXACT; i < NIB_TENSOR_SCALE_RULE_COUNT; i++)
        words_add(&words, nib_tensor_scale_rule_name((nib_tensor_scale_rule)i), i);
    return words;
}

struct words words_dtypes(void)
{
    return (struct words){ { "bf16", "f16", "f32" }, { NIB_BF16, NIB_F16, NIB_F32 }, 3 };
}

const char *words_list(const struct words *words, int32_t fallback, char *buffer, size_t size)
{
    size_t used = 0;
    *buffer = 0;
    for (int i = 0; i < words->n && used < size; i++)
        used += (size_t)snprintf(
            buffer + used, size - used, "%s%s%s",
            i == 0              ? ""
            : i == words->n - 1 ? " or "
                                : ", ",
            words->names[i], words->values[i] == fallback && strcmp(words->names[i], "default") ? " (default)" : "");
    return buffer;
}

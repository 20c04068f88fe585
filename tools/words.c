/* SPDX-License-Identifier: Apache-2.0 */
#include "words.h"

#include <stdbool.h>
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

/* ---- Spellings ---- */

/* What others call these things, as `plain_letters` leaves it. A row counts where an option has its word. */
static const struct spelling {
    const char *text, *word;
} spellings[] = {
    { "w4a16", "nvfp4a16" },
    { "nvfp4w4a16", "nvfp4a16" },
    { "weightonly", "nvfp4a16" },
    { "w4a4", "nvfp4" },
    { "nvfp4a4", "nvfp4" },
    { "nvfp4w4a4", "nvfp4" },
    { "fp4", "nvfp4" },
    { "ct", "compressed-tensors" },
    { "llmcompressor", "compressed-tensors" },
    { "nvfp4packquantized", "compressed-tensors" },
    { "modeloptimizer", "modelopt" },
    { "nvidiamodelopt", "modelopt" },
    { "tensorrtmodeloptimizer", "modelopt" },
    { "ao", "torchao" },
    { "ggml", "gguf" },
    { "tensorrtllm", "trtllm" },
    { "tensorrt", "trtllm" },
    { "trt", "trtllm" },
    { "hf", "transformers" },
    { "huggingface", "transformers" },
    { "hftransformers", "transformers" },
    { "llama", "llama.cpp" },
    { "ggml", "llama.cpp" },
    { "gguf", "llama.cpp" },
    { "ollama", "llama.cpp" },
    { "transformerengine", "te" },
    { "46", "4over6" },
    { "fouroversix", "4over6" },
    { "4o6", "4over6" },
    { "nearest", "rtn" },
    { "rne", "rtn" },
    { "mse", "sweep" },
    { "poweroftwo", "pow2" },
    { "powerof2", "pow2" },
    { "mlp", "mlp-only" },
    { "experts", "experts-only" },
    { "moe", "experts-only" },
    { "bfloat16", "bf16" },
    { "float16", "f16" },
    { "fp16", "f16" },
    { "half", "f16" },
    { "float32", "f32" },
    { "fp32", "f32" },
    { "float", "f32" },
    { "1", "one" },
};

/* In small letters and without what is used to join words; false where nothing is left, or too much. */
static bool plain_letters(const char *text, char *out, size_t bytes)
{
    size_t n = 0;
    for (; *text; text++) {
        const char c = *text >= 'A' && *text <= 'Z' ? (char)(*text - 'A' + 'a') : *text;
        if (strchr("-_. /", c))
            continue;
        if (n + 1 == bytes)
            return false;
        out[n++] = c;
    }
    out[n] = 0;
    return n > 0;
}

static int find_plain(const struct words *words, const char *plain)
{
    char each[64];
    for (int i = 0; i < words->n; i++)
        if (plain_letters(words->names[i], each, sizeof each) && strcmp(each, plain) == 0)
            return i;
    return -1;
}

int words_find(const struct words *words, const char *text)
{
    char plain[64], meant[64];
    for (int i = 0; i < words->n; i++)
        if (strcmp(words->names[i], text) == 0)
            return i;
    if (!plain_letters(text, plain, sizeof plain))
        return -1;
    int found = find_plain(words, plain);
    for (size_t i = 0; found < 0 && i < sizeof spellings / sizeof *spellings; i++)
        if (strcmp(spellings[i].text, plain) == 0 && plain_letters(spellings[i].word, meant, sizeof meant))
            found = find_plain(words, meant);
    return found;
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

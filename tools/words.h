/* SPDX-License-Identifier: Apache-2.0 */
/*
 * words.h - the words that an option takes, from the library's own lists wherever it has them. Parsing, --help, messages,
 * `nib help --words` and, by that, the completion all go by them; tests compare the manual page and Python's enums.
 */
#ifndef NIB_WORDS_H
#define NIB_WORDS_H

#include "nib_checkpoint.h"

enum { WORDS_MOST = 16 };

struct words {
    const char *names[WORDS_MOST];
    int32_t values[WORDS_MOST];
    int n;
};

/* One more word, unless it is there. */
void words_add(struct words *words, const char *name, int32_t value);

struct words words_formats(nib_action writes); /* checkpoint formats that a plan writes */
struct words words_dialects(void);
struct words words_schemes(void);
struct words words_presets(void);
struct words words_scale_rules(void);
struct words words_tensor_scale_rules(void); /* of checkpoints */
struct words words_dtypes(void);             /* of plain weights */

/* Which of the words somebody means, or -1: capitals, dashes, underscores and dots do not matter, and what others call the
 * same thing is understood (w4a16, tensorrt-llm, bfloat16). */
int words_find(const struct words *words, const char *text);

/* "rtn, 4over6 or sweep", in `buffer`, which is returned; the word of this value is marked as the default. */
const char *words_list(const struct words *words, int32_t fallback, char *buffer, size_t size);

#endif

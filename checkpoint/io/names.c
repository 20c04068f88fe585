/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.c - what names mean: patterns that users write, matrices that servers fuse, modules that stay in high precision,
 * stacks of experts. All of it is convention; the tables say whose.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "io/names.h"

#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>

#include "file/json.h"

/* ---- Patterns ---- */

/* A pattern that needs more is a mistake, or an attack; so is a list that needs more with all names together. */
enum {
    FIRST_LIMIT = 200,      /* steps of the matcher, ten times as many each time that these do not do */
    MATCH_LIMIT = 200000,   /* the last of them */
    HEAP_LIMIT = 8 << 10,   /* KiB: what the matcher remembers on its way back has the size of all groups */
    CODE_LIMIT = 16 << 20,  /* bytes of the compiled expressions of a list: 20 bytes of text can become 60,000 */
    STEP_OF_EXPRESSION = 8, /* steps of a glob, and once more for every 64 bytes that it may pass over */
    LONGEST_NAME = 4096     /* bytes of one that is looked at as more than a whole */
};
#define LIST_LIMIT 10000000000u /* steps of globs: some ten seconds */

struct nib_patterns {
    size_t n, code_bytes;
    uint64_t steps; /* so far */
    struct pattern {
        char *text;
        pcre2_code *expression; /* NULL: exact or glob */
        bool glob;
    } * each;
    struct nib_names exact; /* lists have thousands, and models more names */
    uint32_t *exact_at;     /* the first pattern that each of them is */
    size_t *others, n_others;
};

static bool is_glob(const char *text) { return strpbrk(text, "*?") != NULL; }

/* '*' is any number of bytes, '?' one. Backtracks to the last star only, so that nothing is exponential. */
static bool glob_matches(const char *pattern, const char *name, uint64_t *steps)
{
    const char *star = NULL, *resume = NULL;
    ++*steps;
    for (; *name; ++*steps) {
        if (*pattern == '*') {
            star = pattern++;
            resume = name;
        } else if (*pattern == '?' || *pattern == *name) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star + 1;
            name = ++resume;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return !*pattern;
}

static nib_status compile(struct nib_patterns *patterns, const char *text, struct pattern *out)
{
    const size_t bytes = strlen(text) + 1;
    size_t code_bytes = 0;
    out->text = nib_alloc(bytes);
    if (!out->text)
        return nib_fail(NIB_ERR_MEMORY, "no memory for the pattern %s", nib_quote(text).text);
    memcpy(out->text, text, bytes);
    out->glob = is_glob(text);
    if (strncmp(text, "re:", 3) != 0)
        return NIB_OK;
    int code;
    PCRE2_SIZE place;
    out->expression = pcre2_compile((PCRE2_SPTR)(text + 3), PCRE2_ZERO_TERMINATED,
                                    PCRE2_ANCHORED | PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C, &code, &place, NULL);
    if (out->expression) {
        (void)pcre2_pattern_info(out->expression, PCRE2_INFO_SIZE, &code_bytes);
        patterns->code_bytes += code_bytes;
        return patterns->code_bytes <= CODE_LIMIT
                   ? NIB_OK
                   : nib_fail(NIB_ERR_ARG, "the pattern %s and those before it take more than %d bytes of memory",
                              nib_quote(text).text, CODE_LIMIT);
    }
    unsigned char reason[128];
    pcre2_get_error_message(code, reason, sizeof reason);
    return nib_fail(NIB_ERR_ARG, "the pattern %s: at byte %zu: %s", nib_quote(text).text, (size_t)place + 3,
                    (const char *)reason);
}

/* Where a pattern is looked for. */
static bool list_pattern(struct nib_patterns *patterns, size_t i)
{
    const struct pattern *pattern = &patterns->each[i];
    struct nib_names *exact = &patterns->exact;
    const size_t start = exact->text.used;
    uint32_t id;
    size_t place;
    if (pattern->expression || pattern->glob) {
        patterns->others[patterns->n_others++] = i;
        return true;
    }
    if (nib_names_find(exact, pattern->text, &id, &place))
        return true;
    patterns->exact_at[exact->order.n] = (uint32_t)i;
    return nib_text_put(&exact->text, pattern->text, strlen(pattern->text) + 1) && nib_names_add(exact, start);
}

nib_status nib_patterns_create(const char *const *patterns, size_t n, struct nib_patterns **out)
{
    struct nib_patterns *made = nib_alloc_zeroed(sizeof *made);
    if (made) {
        made->each = nib_alloc_zeroed((n + 1) * sizeof *made->each);
        made->exact_at = nib_alloc((n + 1) * sizeof *made->exact_at);
        made->others = nib_alloc((n + 1) * sizeof *made->others);
    }
    nib_status status = made && made->each && made->exact_at && made->others
                            ? NIB_OK
                            : nib_fail(NIB_ERR_MEMORY, "no memory for %zu patterns", n);
    for (size_t i = 0; !status && i < n; i++) {
        made->n = i + 1;
        status = patterns[i] && *patterns[i] ? compile(made, patterns[i], &made->each[i])
                                             : nib_fail(NIB_ERR_ARG, "pattern %zu is empty", i + 1);
        if (!status && !list_pattern(made, i))
            status = nib_fail(NIB_ERR_MEMORY, "no memory for %zu patterns", n);
    }
    if (status) {
        nib_patterns_destroy(made);
        return status;
    }
    nib_names_finish(&made->exact);
    *out = made;
    return NIB_OK;
}

/* By ever more steps, so that what most matches need is not counted as what the worst may. */
static int match(const struct pattern *pattern, const char *name, size_t length, uint64_t *steps)
{
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    pcre2_match_context *context = data ? pcre2_match_context_create(NULL) : NULL;
    int found = context ? PCRE2_ERROR_MATCHLIMIT : PCRE2_ERROR_NOMEMORY;
    if (context)
        pcre2_set_heap_limit(context, HEAP_LIMIT);
    for (uint32_t limit = FIRST_LIMIT; limit <= MATCH_LIMIT && found == PCRE2_ERROR_MATCHLIMIT; limit *= 10) {
        pcre2_set_match_limit(context, limit);
        found = pcre2_match(pattern->expression, (PCRE2_SPTR)name, length, 0, 0, data, context);
        *steps += limit * (STEP_OF_EXPRESSION * (1 + (uint64_t)length / 64));
    }
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
    return found;
}

static nib_status expression_matches(const struct pattern *pattern, const char *name, uint64_t *steps, bool *matches)
{
    const size_t length = strlen(name);
    if (length > LONGEST_NAME)
        return nib_fail(NIB_ERR_ARG, "the pattern %s on %s: the name has %zu bytes, more than %d",
                        nib_quote(pattern->text).text, nib_quote(name).text, length, LONGEST_NAME);
    const int found = match(pattern, name, length, steps);
    *matches = found >= 0;
    if (found >= 0 || found == PCRE2_ERROR_NOMATCH)
        return NIB_OK;
    unsigned char reason[128];
    pcre2_get_error_message(found, reason, sizeof reason);
    return nib_fail(found == PCRE2_ERROR_NOMEMORY ? NIB_ERR_MEMORY : NIB_ERR_ARG, "the pattern %s on %s: %s",
                    nib_quote(pattern->text).text, nib_quote(name).text, (const char *)reason);
}

nib_status nib_patterns_match(struct nib_patterns *patterns, const char *name, uint32_t *which)
{
    uint32_t id;
    size_t place;
    *which = nib_names_find(&patterns->exact, name, &id, &place) ? patterns->exact_at[id] : NIB_NONE;
    for (size_t i = 0; i < patterns->n_others && patterns->others[i] < *which; i++) {
        const struct pattern *pattern = &patterns->each[patterns->others[i]];
        bool matches;
        if (patterns->steps > LIST_LIMIT)
            return nib_fail(NIB_ERR_ARG,
                            "the %zu patterns with a wildcard, of which one is %s, take too long on all names",
                            patterns->n_others, nib_quote(pattern->text).text);
        if (pattern->expression)
            TRY(expression_matches(pattern, name, &patterns->steps, &matches));
        else
            matches = glob_matches(pattern->text, name, &patterns->steps);
        if (matches)
            *which = (uint32_t)patterns->others[i];
    }
    return NIB_OK;
}

void nib_patterns_destroy(struct nib_patterns *patterns)
{
    if (!patterns)
        return;
    for (size_t i = 0; i < patterns->n; i++) {
        nib_free(patterns->each[i].text);
        pcre2_code_free(patterns->each[i].expression);
    }
    nib_free(patterns->each);
    nib_names_free(&patterns->exact);
    nib_free(patterns->exact_at);
    nib_free(patterns->others);
    nib_free(patterns);
}

/* ---- Words within names ---- */

/* In the order of their bytes, so that what a text begins with stands before it, and nothing else in between. */
struct nib_words {
    size_t n;
    struct word {
        const char *text;
        size_t length, place; /* in the list */
        size_t within;        /* the longest other one that this one begins with, or NO_WORD */
        size_t far, depth;    /* one that is within those within it, and how many these are: ways are short by both */
        size_t seen;          /* the last name that it was found in */
    } * each;
    size_t names; /* that were asked for */
};
#define NO_WORD SIZE_MAX

static int compare_words(const void *a, const void *b)
{
    const struct word *x = a, *y = b;
    const int order = strcmp(x->text, y->text);
    return order ? order : (x->place > y->place) - (x->place < y->place);
}

/* The longest word that `text` begins with, of one and of those that it begins with: their lengths alone decide. */
static size_t longest_of(const struct nib_words *words, size_t word, const char *text)
{
    size_t common = 0;
    while (word != NO_WORD && text[common] && words->each[word].text[common] == text[common])
        common++;
    while (word != NO_WORD && words->each[word].length > common) {
        const struct word *w = &words->each[word];
        word = w->far != NO_WORD && words->each[w->far].length > common ? w->far : w->within;
    }
    return word;
}

/* A far one is as far again as the far one of what is within, where that goes twice, as in a skew-binary number. */
static void find_far(const struct nib_words *words, struct word *word)
{
    word->far = word->within;
    if (word->within == NO_WORD)
        return;
    const struct word *within = &words->each[word->within];
    const struct word *far = within->far == NO_WORD ? NULL : &words->each[within->far];
    word->depth = within->depth + 1;
    if (far && far->far != NO_WORD && within->depth - far->depth == far->depth - words->each[far->far].depth)
        word->far = far->far;
}

nib_status nib_words_create(const char *const *list, size_t n, struct nib_words **out)
{
    struct nib_words *made = nib_alloc_zeroed(sizeof *made);
    struct word *each = made ? made->each = nib_alloc((n + 1) * sizeof *each) : NULL;
    if (!each) {
        nib_words_destroy(made);
        return nib_fail(NIB_ERR_MEMORY, "no memory for %zu words", n);
    }
    for (size_t i = 0; i < n; i++)
        each[i] = (struct word){ .text = list[i], .length = strlen(list[i]), .place = i, .within = NO_WORD };
    qsort(each, n, sizeof *each, compare_words);
    for (size_t i = 0; i < n; i++) {
        if (made->n && strcmp(each[made->n - 1].text, each[i].text) == 0)
            continue;
        each[made->n] = each[i];
        each[made->n].within = longest_of(made, made->n ? made->n - 1 : NO_WORD, each[i].text);
        find_far(made, &each[made->n]);
        made->n++;
    }
    *out = made;
    return NIB_OK;
}

/* The last word that is not behind `text`, or NO_WORD. */
static size_t last_before(const struct nib_words *words, const char *text)
{
    size_t low = 0;
    for (size_t high = words->n; low < high;) {
        const size_t middle = low + (high - low) / 2;
        if (strcmp(words->each[middle].text, text) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low ? low - 1 : NO_WORD;
}

void nib_words_find(struct nib_words *words, const char *name, nib_word_found *found, void *context)
{
    words->names++;
    if (strlen(name) > LONGEST_NAME) /* nobody's module */
        return;
    for (size_t at = 0; name[at]; at++) {
        size_t i = longest_of(words, last_before(words, name + at), name + at);
        /* What a word begins with was found with it. */
        for (; i != NO_WORD && words->each[i].seen != words->names; i = words->each[i].within) {
            words->each[i].seen = words->names;
            if (!found(context, words->each[i].place, at))
                return;
        }
    }
}

void nib_words_destroy(struct nib_words *words)
{
    if (words)
        nib_free(words->each);
    nib_free(words);
}

/* ---- Parts of a name ---- */

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* Whether some part between the dots satisfies the test. */
static bool any_part(const char *name, bool (*test)(const char *part, size_t length, const char *word),
                     const char *word)
{
    for (const char *part = name; part; part = strchr(part, '.')) {
        part += *part == '.';
        if (test(part, strcspn(part, "."), word))
            return true;
    }
    return false;
}

static bool part_is(const char *part, size_t length, const char *word)
{
    return strlen(word) == length && memcmp(part, word, length) == 0;
}

static bool part_begins(const char *part, size_t length, const char *word)
{
    return strlen(word) <= length && memcmp(part, word, strlen(word)) == 0;
}

static bool part_ends(const char *part, size_t length, const char *word)
{
    const size_t n = strlen(word);
    return n <= length && memcmp(part + length - n, word, n) == 0;
}

/* ---- Fused matrices ---- */

/* What servers join into one matrix with one tensor scale, beside each other in the same module. */
const char *const nib_ck_fused_sets[][5] = {
    { "q_proj", "k_proj", "v_proj" },
    { "gate_proj", "up_proj" },
    { "w1", "w3" },                       /* gate and up, as Mixtral calls them */
    { "q_a_proj", "kv_a_proj_with_mqa" }, /* latent attention */
    { "in_proj_qkv", "in_proj_z" },       /* gated delta nets */
    { "in_proj_b", "in_proj_a" },
    { "wq", "wk", "wv" }, /* consolidated files */
    { "wq_a", "wkv_a" },
    { "to_q", "to_k", "to_v" }, /* diffusion models */
    { "add_q_proj", "add_k_proj", "add_v_proj" },
    { "query", "key", "value" },
    { NULL },
};

bool nib_ck_fused_key(const char *weight, char *buffer, size_t bytes)
{
    const char *last = last_part(weight);
    for (size_t set = 0; nib_ck_fused_sets[set][0]; set++)
        for (size_t i = 0; nib_ck_fused_sets[set][i]; i++)
            if (strcmp(last, nib_ck_fused_sets[set][i]) == 0) {
                const int n =
                    snprintf(buffer, bytes, "%.*s{%s}", (int)(last - weight), weight, nib_ck_fused_sets[set][0]);
                return n > 0 && (size_t)n < bytes;
            }
    return false;
}

/* ---- What presets leave out ---- */

/* In GGUF files experts are stacks, "blk.0.ffn_up_exps"; what all tokens go through is "_shexp". */
bool nib_ck_is_expert(const char *weight)
{
    return any_part(weight, part_is, "experts") || any_part(weight, part_ends, "_exps");
}

static bool is_mlp(const char *weight)
{
    static const char *const words[] = { "mlp", "feed_forward",  "block_sparse_moe", "experts",
                                         "ffn", "shared_expert", "shared_experts",   "mixer" };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (any_part(weight, part_is, words[i]))
            return true;
    return any_part(weight, part_begins, "ffn_");
}

const char *nib_ck_preset_keep(nib_preset preset, const char *weight)
{
    if (preset == NIB_PRESET_MLP_ONLY)
        return is_mlp(weight) ? NULL : "the preset mlp-only leaves it out";
    if (preset == NIB_PRESET_EXPERTS_ONLY)
        return nib_ck_is_expert(weight) ? NULL : "the preset experts-only leaves it out";
    return NULL;
}

/* ---- Stacks of experts ---- */

/* Tensors that hold all experts of a layer. */
static const struct stack_name {
    const char *end;    /* of the tensor's name */
    const char *prefix; /* what stands in its place before the expert's number */
    const char *parts[2];
} stack_names[] = {
    { ".experts.gate_up_proj", ".experts", { "gate_proj", "up_proj" } },
    { ".experts.down_proj", ".experts", { "down_proj", NULL } },
    { ".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts", { "w1", "w3" } }, /* Granite */
    { ".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts", { "w2", NULL } },
};

/* Where the sizes do not tell: by the modelling code of each. */
static const struct family {
    const char *model_type; /* or the beginning of it */
    bool transposed;        /* [E, K, N] */
    bool interleaved;       /* gate and up alternate */
    bool whole_in_modelopt; /* its readers want the stack, packed along K as it lies */
} families[] = {
    { "qwen3_vl_moe", true, false, false }, { "llama4", true, false, true },       { "gpt_oss", true, true, true },
    { "qwen3_5_moe", false, false, false }, { "qwen3_next", false, false, false }, { "gemma4", false, false, false },
    { "granitemoe", false, false, false },  { "mistral4", false, false, false },
};

static const struct family *family_of(const nib_checkpoint *c)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (strncmp(c->model_type, families[i].model_type, strlen(families[i].model_type)) == 0)
            return &families[i];
    return NULL;
}

bool nib_ck_keeps_stacks(const nib_checkpoint *c)
{
    const struct family *family = family_of(c);
    return family && family->whole_in_modelopt;
}

bool nib_ck_is_conv1d(const nib_checkpoint *c, const char *module)
{
    static const char *const types[] = { "gpt2", "openai-gpt", "imagegpt", "decision_transformer" };
    static const char *const modules[] = { "c_attn", "q_attn", "c_proj", "c_fc" };
    bool family = false, named = false;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        family |= !strcmp(c->model_type, types[i]);
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++)
        named |= !strcmp(last_part(module), modules[i]);
    return family && named;
}

/* Inputs of gate_up and outputs of down are the model's hidden size; the other axis is the experts' own size, once or
 * twice. Only one reading fits, unless both axes are of the hidden size or neither is. */
static nib_status orientation(const nib_checkpoint *c, const char *tensor, const int64_t *shape, bool two_parts,
                              bool *transposed)
{
    const int64_t hidden = nib_ck_config_int(c, "hidden_size", -1);
    const struct family *family = family_of(c);
    if (hidden > 0 && (shape[1] == hidden) != (shape[2] == hidden))
        *transposed = (shape[1] == hidden) == two_parts; /* the hidden size is where K is, or where N is */
    else if (family)
        *transposed = family->transposed;
    else
        return nib_fail(
            NIB_ERR_DATA,
            "%s: tensor %s: [%lld, %lld, %lld] may be experts of [outputs, inputs] or of [inputs, outputs]: "
            "config.json must say a hidden_size that one axis has, or a model_type that nib knows",
            c->path, nib_quote(tensor).text, (long long)shape[0], (long long)shape[1], (long long)shape[2]);
    return NIB_OK;
}

nib_status nib_ck_stack_of(const nib_checkpoint *c, const char *tensor, int64_t rank, const int64_t *shape, bool *is,
                           struct nib_ck_stack *out)
{
    *is = false;
    if (rank != 3)
        return NIB_OK;
    for (size_t i = 0; i < sizeof stack_names / sizeof *stack_names; i++) {
        const struct stack_name *row = &stack_names[i];
        if (!nib_ck_ends_with(tensor, row->end))
            continue;
        *is = true;
        bool transposed = false;
        TRY(orientation(c, tensor, shape, row->parts[1] != NULL, &transposed));
        const struct family *family = family_of(c);
        *out = (struct nib_ck_stack){ .prefix_bytes = strlen(tensor) - strlen(row->end),
                                      .prefix = row->prefix,
                                      .parts = { row->parts[0], row->parts[1] },
                                      .transposed = transposed,
                                      .interleaved = family && family->interleaved && row->parts[1] };
        return NIB_OK;
    }
    return NIB_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gguf_tokenizer.c - the tokenizer of a directory as keys of a GGUF file, as llama.cpp's converter writes it.
 *
 * There are three kinds: byte-level BPE (tokenizer.json; "gpt2" to llama.cpp), SentencePiece (tokenizer.model; "llama"),
 * and SentencePiece that somebody has turned into a tokenizer.json, whose scores are lost. The files are untrusted: what
 * they number must lie within the vocabulary, and the vocabulary is as large as the embeddings are.
 */
#include "plan/gguf_keys.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/os.h"
#include "io/gguf.h"

static nib_status no_memory(void) { return nib_fail(NIB_ERR_MEMORY, "no memory for the tokenizer"); }

enum token_type { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };

/* Tokens that are looked for beside the vocabulary, by their names in tokenizer_config.json and config.json. */
enum special { BOS, EOS, UNK, SEP, PAD, CLS, MASK, EOT, EOM, SPECIALS };

static const struct {
    const char *word, *key, *add_key;
} specials[SPECIALS] = {
    [BOS] = { "bos", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token" },
    [EOS] = { "eos", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_eos_token" },
    [UNK] = { "unk", "tokenizer.ggml.unknown_token_id", NULL },
    [SEP] = { "sep", "tokenizer.ggml.seperator_token_id", "tokenizer.ggml.add_sep_token" },
    [PAD] = { "pad", "tokenizer.ggml.padding_token_id", NULL },
    [CLS] = { "cls", NULL, NULL },
    [MASK] = { "mask", "tokenizer.ggml.mask_token_id", NULL },
    [EOT] = { "eot", "tokenizer.ggml.eot_token_id", NULL },
    [EOM] = { "eom", "tokenizer.ggml.eom_token_id", NULL },
};

enum { UNDECIDED = -1 };

struct tokenizer {
    nib_plan *plan;
    nib_gguf_plan *out;
    json_t *json, *config; /* tokenizer.json and tokenizer_config.json; NULL without */
    size_t n;              /* of the vocabulary */
    const char **tokens;   /* NULL: unused */
    int32_t *types;
    float *scores;               /* NULL: BPE has none */
    const char *words[SPECIALS]; /* what tokenizer_config.json calls these, as amended by the post-processor */
    int64_t ids[SPECIALS];       /* UNDECIDED: not known */
    int adds[SPECIALS];          /* UNDECIDED, or whether it is added to texts */
    bool bounded;                /* ids beyond the vocabulary are left out */
};

static nib_status bad(const struct tokenizer *t, const char *file, const char *fact)
{
    return nib_fail(NIB_ERR_DATA, "%s/%s: %s", t->plan->in->directory, file, fact);
}

/* ---- The vocabulary ---- */

static nib_status allocate(struct tokenizer *t, size_t n, bool scores)
{
    t->n = n;
    t->tokens = nib_alloc_zeroed((n + 1) * sizeof *t->tokens);
    t->types = nib_alloc_zeroed((n + 1) * sizeof *t->types);
    t->scores = scores ? nib_alloc_zeroed((n + 1) * sizeof *t->scores) : NULL;
    return t->tokens && t->types && (t->scores || !scores) ? NIB_OK : no_memory();
}

/* As many as config.json says, which must be as many as there are embeddings. */
static nib_status vocabulary_size(const struct tokenizer *t, size_t *out)
{
    const json_t *size = nib_plan_setting(t->plan, "vocab_size");
    int64_t rows = 0;
    for (size_t i = 0; i < t->plan->in->n_weights; i++)
        if (!strcmp(t->plan->places[i].name, "token_embd"))
            rows = t->plan->in->weights[i].rows;
    if (rows == 0)
        return nib_fail(NIB_ERR_DATA, "%s: it has no embeddings, so that no GGUF can be made of it", t->plan->in->path);
    if (size && (!json_is_integer(size) || json_integer_value(size) != rows))
        return nib_fail(NIB_ERR_DATA, "%s: config.json: vocab_size is not the %lld rows of its embeddings",
                        t->plan->in->path, (long long)rows);
    *out = (size_t)rows;
    return NIB_OK;
}

static bool begins_and_ends(const char *text, const char *first, const char *last)
{
    return !strncmp(text, first, strlen(first)) && nib_ck_ends_with(text, last) &&
           strlen(text) >= strlen(first) + strlen(last);
}

/* Some models do not mark as special what is. */
static bool looks_special(const char *token)
{
    static const char *const words[] = { "<pad>", "<mask>", "<2mass>", "[@BOS@]" };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(token, words[i]))
            return true;
    return begins_and_ends(token, "<|", "|>") || begins_and_ends(token, "<\xEF\xBD\x9C", "\xEF\xBD\x9C>") ||
           begins_and_ends(token, "<unused", ">");
}

/* SentencePiece's mark of a space is a space in tokens that are looked for in the text as it is. */
static const char *with_spaces(struct tokenizer *t, const char *token)
{
    static const char mark[] = "\xE2\x96\x81";
    if (!strstr(token, mark))
        return token;
    char *copy = nib_plan_memory(t->plan, strlen(token) + 1), *to = copy;
    for (const char *from = token; copy && *from;) {
        const bool marked = !strncmp(from, mark, 3);
        *to++ = marked ? ' ' : *from;
        from += marked ? 3 : 1;
    }
    if (copy)
        *to = '\0';
    return copy;
}

/* A token that was added to the vocabulary: special, or found in texts before anything else. */
static nib_status put_added(struct tokenizer *t, int64_t id, const char *text, bool special)
{
    const bool control = special || looks_special(text);
    const char *token = control ? text : with_spaces(t, text);
    if (!token)
        return no_memory();
    t->tokens[id] = token;
    t->types[id] = control ? CONTROL : USER_DEFINED;
    if (t->scores)
        t->scores[id] = -1000;
    return NIB_OK;
}

/* {"content": ..., "special": ...} of an id. Texts are C strings here: one with a NUL is rejected. */
static nib_status read_added(struct tokenizer *t, const char *file, const json_t *entry, int64_t id, bool beyond)
{
    const json_t *content = json_object_get(entry, "content");
    const char *text = json_string_value(content);
    if (!text || strlen(text) != json_string_length(content))
        return bad(t, file, "an added token has no content, or a NUL in it");
    if (id < 0 || (id >= (int64_t)t->n && !beyond))
        return bad(t, file, "an added token has an id beyond the vocabulary");
    return id < (int64_t)t->n ? put_added(t, id, text, json_is_true(json_object_get(entry, "special"))) : NIB_OK;
}

/* Tokens that no file has, so that every id has one. */
static nib_status fill_unused(struct tokenizer *t)
{
    for (size_t i = 0; i < t->n; i++) {
        if (t->tokens[i])
            continue;
        t->tokens[i] = nib_plan_string(t->plan, "[PAD%zu]", i);
        t->types[i] = UNUSED;
        if (!t->tokens[i])
            return no_memory();
        if (t->scores)
            t->scores[i] = -10000;
    }
    return NIB_OK;
}

static nib_status put_vocabulary(const struct tokenizer *t, const char *model, const char *pre)
{
    TRY(nib_gguf_put_string(t->out, "tokenizer.ggml.model", model));
    TRY(nib_gguf_put_string(t->out, "tokenizer.ggml.pre", pre));
    TRY(nib_gguf_put_strings(t->out, "tokenizer.ggml.tokens", t->tokens, t->n));
    if (t->scores)
        TRY(nib_gguf_put_array(t->out, "tokenizer.ggml.scores", NIB_GGUF_KIND_F32, t->scores, t->n));
    return nib_gguf_put_array(t->out, "tokenizer.ggml.token_type", NIB_GGUF_KIND_I32, t->types, t->n);
}

/* ---- Byte-level BPE ---- */

#define WORDS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define CAPITALS "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define SMALLS "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define SPACES "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* How texts are cut before merges, as tokenizer.json has it: the expressions of its splits, one behind the other, and
 * whether digits and bytes are split by rules of their own. The name is llama.cpp's. */
static const struct {
    const char *signature, *token, *name; /* token: one that the vocabulary must have; NULL: any */
} pre_tokenizers[] = {
    { "split:" WORDS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACES, NULL,
      "llama-bpe" },
    { "split:" WORDS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACES,
      "<\xEF\xBD\x9C"
      "begin\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",
      "deepseek-r1-qwen" },
    { "split:" WORDS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACES, NULL, "qwen2" },
    { "split:[^\\r\\n\\p{L}\\p{N}]?" CAPITALS "*" SMALLS "+" WORDS "?|[^\\r\\n\\p{L}\\p{N}]?" CAPITALS "+" SMALLS
      "*" WORDS "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACES,
      NULL, "gpt-4o" },
    { "split:[^\\r\\n\\p{L}\\p{N}]?" CAPITALS "*" SMALLS "+|[^\\r\\n\\p{L}\\p{N}]?" CAPITALS "+" SMALLS
      "*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACES,
      NULL, "tekken" },
    { "digits;words", NULL, "smollm" },
    { "words", NULL, "gpt-2" },
};

static bool add_word(struct nib_text *signature, const char *word, const char *expression)
{
    return (!signature->used || nib_text_put(signature, ";", 1)) && nib_text_put(signature, word, strlen(word)) &&
           nib_text_put(signature, expression, strlen(expression));
}

/* One step of a pre-tokenizer; false without memory. Steps that only map bytes to letters say nothing. */
static bool add_step(struct nib_text *signature, const json_t *step)
{
    const char *type = json_string_value(json_object_get(step, "type"));
    const char *regex = json_string_value(json_object_get(json_object_get(step, "pattern"), "Regex"));
    const json_t *by_regex = json_object_get(step, "use_regex");
    if (type && !strcmp(type, "Split"))
        return add_word(signature, "split:", regex ? regex : "?");
    if (type && !strcmp(type, "Digits"))
        return add_word(signature, json_is_true(json_object_get(step, "individual_digits")) ? "digits" : "numbers", "");
    if (type && !strcmp(type, "ByteLevel"))
        return json_is_false(by_regex) || add_word(signature, "words", "");
    return add_word(signature, type ? type : "?", "");
}

static bool has_token(const struct tokenizer *t, const char *token)
{
    for (size_t i = 0; i < t->n; i++)
        if (!strcmp(t->tokens[i], token))
            return true;
    return false;
}

static nib_status find_pre_tokenizer(const struct tokenizer *t, const char **name)
{
    const json_t *pre = json_object_get(t->json, "pre_tokenizer"), *steps = json_object_get(pre, "pretokenizers");
    struct nib_text signature = { 0 };
    bool fits = true;
    for (size_t i = 0; i < json_array_size(steps) && fits; i++)
        fits = add_step(&signature, json_array_get(steps, i));
    if (!steps && pre)
        fits = add_step(&signature, pre);
    fits = fits && nib_text_put(&signature, "", 1);
    *name = NULL;
    for (size_t i = 0; i < sizeof pre_tokenizers / sizeof *pre_tokenizers && fits && !*name; i++)
        if (!strcmp(signature.bytes, pre_tokenizers[i].signature) &&
            (!pre_tokenizers[i].token || has_token(t, pre_tokenizers[i].token)))
            *name = pre_tokenizers[i].name;
    nib_status status = fits ? NIB_OK : no_memory();
    if (fits && !*name)
        status =
            nib_fail(NIB_ERR_UNSUPPORTED,
                     "%s/tokenizer.json: nib does not know what llama.cpp calls its pre-tokenizer (%s): make a GGUF "
                     "with convert_hf_to_gguf.py, and quantize that",
                     t->plan->in->directory, nib_quote(signature.bytes).text);
    nib_free(signature.bytes);
    return status;
}

/* A pair of a merge with a space between; a space within one is the letter that stands for its byte. */
static const char *join_pair(struct tokenizer *t, const json_t *pair)
{
    const char *parts[2] = { json_string_value(json_array_get(pair, 0)), json_string_value(json_array_get(pair, 1)) };
    if (json_array_size(pair) != 2 || !parts[0] || !parts[1])
        return NULL;
    char *text = nib_plan_memory(t->plan, 2 * (strlen(parts[0]) + strlen(parts[1])) + 2), *to = text;
    for (int i = 0; i < 2 && text; i++) {
        for (const char *from = parts[i]; *from; from++) {
            if (*from != ' ') {
                *to++ = *from;
                continue;
            }
            *to++ = '\xC4';
            *to++ = '\xA0';
        }
        *to++ = i == 0 ? ' ' : '\0';
    }
    return text;
}

static nib_status put_merges(struct tokenizer *t)
{
    const json_t *merges = json_object_get(json_object_get(t->json, "model"), "merges");
    const size_t n = json_array_size(merges);
    const char **texts = nib_alloc_zeroed((n + 1) * sizeof *texts);
    nib_status status = texts ? NIB_OK : no_memory();
    for (size_t i = 0; i < n && !status; i++) {
        const json_t *merge = json_array_get(merges, i);
        texts[i] = json_is_string(merge) ? json_string_value(merge) : join_pair(t, merge);
        if (!texts[i])
            status = bad(t, "tokenizer.json", "a merge is neither a text nor a pair of texts");
    }
    if (!status && n == 0)
        status = bad(t, "tokenizer.json", "its model has no merges");
    if (!status)
        status = nib_gguf_put_strings(t->out, "tokenizer.ggml.merges", texts, n);
    nib_free(texts);
    return status;
}

/* The model's own tokens. */
static nib_status read_vocabulary(struct tokenizer *t)
{
    json_t *vocabulary = json_object_get(json_object_get(t->json, "model"), "vocab"), *id;
    const char *token;
    json_object_foreach(vocabulary, token, id)
    {
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= (json_int_t)t->n)
            return bad(t, "tokenizer.json", "a token has an id beyond the vocab_size of config.json");
        t->tokens[json_integer_value(id)] = token;
        t->types[json_integer_value(id)] = NORMAL;
    }
    return NIB_OK;
}

static nib_status read_added_tokens(struct tokenizer *t, bool beyond)
{
    const json_t *added = json_object_get(t->json, "added_tokens");
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *entry = json_array_get(added, i), *id = json_object_get(entry, "id");
        TRY(read_added(t, "tokenizer.json", entry, json_is_integer(id) ? json_integer_value(id) : -1, beyond));
    }
    return NIB_OK;
}

static nib_status put_bpe(struct tokenizer *t)
{
    const char *type = json_string_value(json_object_get(json_object_get(t->json, "model"), "type")), *pre;
    size_t n;
    if (!type || strcmp(type, "BPE") != 0)
        return bad(t, "tokenizer.json", "its model is no BPE");
    TRY(vocabulary_size(t, &n));
    TRY(allocate(t, n, false));
    TRY(read_vocabulary(t));
    TRY(read_added_tokens(t, false));
    TRY(fill_unused(t));
    TRY(find_pre_tokenizer(t, &pre));
    TRY(put_vocabulary(t, "gpt2", pre));
    return put_merges(t);
}

/* ---- SentencePiece that has become a tokenizer.json ---- */

static bool is_byte(const char *token)
{
    static const char digits[] = "0123456789ABCDEFabcdef";
    return strlen(token) == 6 && !strncmp(token, "<0x", 3) && token[5] == '>' && strchr(digits, token[3]) &&
           strchr(digits, token[4]);
}

static const char *word_of(const json_t *entry)
{
    return json_is_object(entry) ? json_string_value(json_object_get(entry, "content")) : json_string_value(entry);
}

/* Whether tokenizer_config.json gives the token a part to play. */
static bool is_special(const struct tokenizer *t, const char *token)
{
    static const char *const lists[] = { "additional_special_tokens", "extra_special_tokens" };
    for (int i = 0; i < MASK + 1; i++) {
        char key[32];
        snprintf(key, sizeof key, "%s_token", specials[i].word);
        const char *word = word_of(json_object_get(t->config, key));
        if (word && !strcmp(word, token))
            return true;
    }
    for (size_t l = 0; l < sizeof lists / sizeof *lists; l++) {
        const json_t *list = json_object_get(t->config, lists[l]);
        for (size_t i = 0; i < json_array_size(list); i++) {
            const char *word = word_of(json_array_get(list, i));
            if (word && !strcmp(word, token))
                return true;
        }
    }
    return false;
}

static bool is_sentencepiece_json(const struct tokenizer *t)
{
    const json_t *model = json_object_get(t->json, "model");
    const char *type = json_string_value(json_object_get(model, "type"));
    const char *decoder = json_string_value(json_object_get(json_object_get(t->json, "decoder"), "type"));
    return type && !strcmp(type, "BPE") && json_is_true(json_object_get(model, "byte_fallback")) && decoder &&
           !strcmp(decoder, "Sequence");
}

static nib_status put_sentencepiece_json(struct tokenizer *t)
{
    const json_t *added = json_object_get(t->json, "added_tokens");
    const size_t base = json_object_size(json_object_get(json_object_get(t->json, "model"), "vocab"));
    size_t n = base;
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *id = json_object_get(json_array_get(added, i), "id");
        n += json_is_integer(id) && json_integer_value(id) >= (json_int_t)base;
    }
    TRY(allocate(t, n, true));
    TRY(read_vocabulary(t));
    TRY(read_added_tokens(t, false));
    for (size_t i = 0; i < n; i++) {
        if (!t->tokens[i])
            return bad(t, "tokenizer.json", "its ids have gaps");
        t->scores[i] = -1000;
        t->types[i] = is_special(t, t->tokens[i]) ? CONTROL : i < base ? NORMAL : USER_DEFINED;
        if (i < base && is_byte(t->tokens[i]))
            t->types[i] = BYTE;
    }
    t->bounded = true;
    return put_vocabulary(t, "llama", "default");
}

/* ---- SentencePiece ---- */

/* Protocol buffers, as far as they are needed: fields of bytes, of 4 bytes, and of variable length. */
struct field {
    uint32_t number, kind; /* kind: 0 a number, 1 eight bytes, 2 bytes, 5 four bytes */
    uint64_t value;        /* the number, or how many bytes */
    const uint8_t *bytes;
};

static bool read_varint(const uint8_t **at, const uint8_t *end, uint64_t *out)
{
    *out = 0;
    for (unsigned shift = 0; *at < end && shift < 64; shift += 7) {
        const uint8_t byte = *(*at)++;
        *out |= (uint64_t)(byte & 127) << shift;
        if (byte < 128)
            return true;
    }
    return false;
}

static bool read_field(const uint8_t **at, const uint8_t *end, struct field *out)
{
    uint64_t tag;
    if (!read_varint(at, end, &tag) || tag >> 3 > UINT32_MAX)
        return false;
    out->number = (uint32_t)(tag >> 3);
    out->kind = tag & 7;
    out->value = out->kind == 1 ? 8 : 4;
    if ((out->kind == 0 || out->kind == 2) && !read_varint(at, end, &out->value))
        return false;
    out->bytes = *at;
    if (out->kind == 0)
        return true;
    if ((out->kind != 1 && out->kind != 2 && out->kind != 5) || out->value > (uint64_t)(end - *at))
        return false;
    *at += out->value;
    return true;
}

/* { 1: text, 2: score, 3: type } */
static nib_status read_piece(struct tokenizer *t, const struct field *piece, size_t id)
{
    static const char file[] = "tokenizer.model";
    const uint8_t *at = piece->bytes, *end = at + piece->value;
    struct field field;
    const char *text = "";
    float score = 0;
    int32_t type = NORMAL;
    while (at < end) {
        if (!read_field(&at, end, &field))
            return bad(t, file, "a token is cut short");
        if (field.number == 1 && field.kind == 2)
            text = nib_plan_string(t->plan, "%.*s", (int)field.value, (const char *)field.bytes);
        if (field.number == 2 && field.kind == 5)
            memcpy(&score, field.bytes, sizeof score);
        if (field.number == 3 && field.kind == 0)
            type = (int32_t)(field.value & 7);
        if (!text)
            return no_memory();
        if (field.number == 1 && strlen(text) != field.value)
            return bad(t, file, "a token holds a NUL");
    }
    t->tokens[id] = text;
    t->scores[id] = score;
    t->types[id] = type == UNKNOWN || type == CONTROL || type == UNUSED || type == BYTE ? type : NORMAL;
    return NIB_OK;
}

static nib_status read_pieces(struct tokenizer *t, const uint8_t *bytes, size_t count)
{
    const uint8_t *at = bytes, *const end = bytes + count;
    struct field field;
    size_t id = 0;
    while (at < end) {
        if (!read_field(&at, end, &field))
            return bad(t, "tokenizer.model", "it is cut short, or no SentencePiece model");
        if (field.number == 1 && field.kind == 2 && id < t->n)
            TRY(read_piece(t, &field, id++));
    }
    return id ? NIB_OK : bad(t, "tokenizer.model", "it has no tokens");
}

/* {"<tool>": 32000} */
static nib_status read_added_file(struct tokenizer *t)
{
    json_t *added = NULL, *id;
    const char *token;
    TRY(nib_ck_read_object(t->plan->in, "added_tokens.json", &added));
    nib_status status = NIB_OK;
    json_object_foreach(added, token, id)
    {
        const int64_t number = json_is_integer(id) ? json_integer_value(id) : -1;
        if (status || number < 0 || number >= (int64_t)t->n)
            continue;
        t->tokens[number] = nib_plan_string(t->plan, "%s", token);
        t->types[number] = USER_DEFINED;
        t->scores[number] = -1000;
        status = t->tokens[number] ? NIB_OK : no_memory();
    }
    json_decref(added);
    return status;
}

static nib_status read_added_decoder(struct tokenizer *t)
{
    json_t *added = json_object_get(t->config, "added_tokens_decoder"), *entry;
    const char *id;
    json_object_foreach(added, id, entry)
    {
        char *end;
        const long long number = strtoll(id, &end, 10);
        TRY(read_added(t, "tokenizer_config.json", entry, *end ? -1 : number, true));
    }
    return NIB_OK;
}

static nib_status put_sentencepiece(struct tokenizer *t, const char *path)
{
    enum { LIMIT = 256 << 20 };
    size_t n, bytes;
    char *model;
    TRY(vocabulary_size(t, &n));
    TRY(allocate(t, n, true));
    TRY(nib_ck_read_text(path, LIMIT, &model, &bytes));
    nib_status status = read_pieces(t, (const uint8_t *)model, bytes);
    nib_free(model);
    TRY(status);
    TRY(read_added_file(t));
    TRY(read_added_decoder(t));
    TRY(fill_unused(t));
    t->bounded = true;
    return put_vocabulary(t, "llama", "default");
}

/* ---- Special tokens ---- */

static bool same(const char *a, const char *b) { return a && b && !strcmp(a, b); }

/* The token of a step of a template; NULL for a sequence. */
static const char *template_token(const json_t *step)
{
    return json_string_value(json_object_get(json_object_get(step, "SpecialToken"), "id"));
}

static const char *template_sequence(const json_t *step)
{
    return json_string_value(json_object_get(json_object_get(step, "Sequence"), "id"));
}

/* Whether a separator stands between two texts: "A [sep] [eos] B". */
static bool has_separator(const struct tokenizer *t, const json_t *pair, const char *first, const char *last)
{
    size_t begin = 0, end = json_array_size(pair);
    begin += first && end && same(template_token(json_array_get(pair, 0)), first);
    end -= last && end > begin && same(template_token(json_array_get(pair, end - 1)), last);
    if (end < begin + 3 || !same(template_sequence(json_array_get(pair, begin)), "A") ||
        !same(template_sequence(json_array_get(pair, end - 1)), "B"))
        return false;
    const char *middle = template_token(json_array_get(pair, begin + 1));
    const char *next = end == begin + 4 ? template_token(json_array_get(pair, begin + 2)) : NULL;
    return (!last && (same(middle, t->words[SEP]) || same(middle, t->words[EOS]))) || same(next, t->words[SEP]) ||
           same(next, t->words[EOS]);
}

static bool has_middle(const json_t *pair, const char *first, const char *last)
{
    size_t begin = 0, end = json_array_size(pair);
    begin += first && end && same(template_token(json_array_get(pair, 0)), first);
    end -= last && end > begin && same(template_token(json_array_get(pair, end - 1)), last);
    return end >= begin + 3 && same(template_sequence(json_array_get(pair, begin)), "A") &&
           same(template_sequence(json_array_get(pair, end - 1)), "B");
}

static void read_template(struct tokenizer *t, const json_t *processor)
{
    const json_t *single = json_object_get(processor, "single"), *pair = json_object_get(processor, "pair");
    const size_t n = json_array_size(single);
    const char *first = n > 1 ? template_token(json_array_get(single, 0)) : NULL;
    const char *last = n > 1 ? template_token(json_array_get(single, n - 1)) : NULL;
    if (first) {
        if (!same(first, t->words[BOS]) && !same(first, t->words[CLS])) {
            t->words[BOS] = t->words[BOS] ? t->words[BOS] : first;
            t->words[CLS] = t->words[CLS] ? t->words[CLS] : first;
        }
        t->adds[BOS] = same(first, t->words[BOS]) || same(first, t->words[CLS]);
    }
    if (last) {
        if (!same(last, t->words[EOS])) { /* texts end otherwise than turns do */
            t->words[t->words[EOT] ? EOM : EOT] = t->words[EOS];
            t->words[EOS] = last;
        }
        t->adds[EOS] = true;
    }
    if (has_middle(pair, first, last))
        t->adds[SEP] = has_separator(t, pair, first, last);
}

static void read_post_processor(struct tokenizer *t)
{
    const json_t *processor = json_object_get(t->json, "post_processor");
    const json_t *list = json_object_get(processor, "processors");
    const size_t n = list ? json_array_size(list) : json_is_object(processor);
    for (size_t i = 0; i < n; i++) {
        const json_t *each = list ? json_array_get(list, i) : processor;
        const char *type = json_string_value(json_object_get(each, "type"));
        if (same(type, "ByteLevel")) {
            t->adds[BOS] = t->adds[BOS] == UNDECIDED ? 0 : t->adds[BOS];
            t->adds[EOS] = t->adds[EOS] == UNDECIDED ? 0 : t->adds[EOS];
        } else if (same(type, "TemplateProcessing")) {
            read_template(t, each);
        }
    }
}

static void note_id(struct tokenizer *t, int special, const json_t *id)
{
    const int64_t number = json_is_integer(id) ? json_integer_value(id) : -1;
    if (number >= 0 && t->ids[special] == UNDECIDED && (!t->bounded || number < (int64_t)t->n))
        t->ids[special] = number;
}

static void find_specials(struct tokenizer *t)
{
    const json_t *added = json_object_get(t->json, "added_tokens");
    char key[32];
    for (int s = 0; s < SPECIALS && t->config; s++) {
        snprintf(key, sizeof key, "add_%s_token", specials[s].word);
        const json_t *add = json_object_get(t->config, key);
        if (s < EOT && json_is_boolean(add) && t->adds[s] == UNDECIDED)
            t->adds[s] = json_is_true(add);
        for (size_t i = 0; i < json_array_size(added) && t->words[s]; i++) {
            const json_t *entry = json_array_get(added, i);
            if (same(json_string_value(json_object_get(entry, "content")), t->words[s]))
                note_id(t, s, json_object_get(entry, "id")); /* of several the first */
        }
    }
    for (int s = 0; s < SPECIALS; s++) {
        snprintf(key, sizeof key, "%s_token_id", specials[s].word);
        const json_t *id = json_object_get(t->plan->in->config, key);
        if (!id || json_is_null(id))
            id = json_object_get(json_object_get(t->plan->in->config, "text_config"), key);
        if (s < EOT || t->words[s])
            note_id(t, s, id);
    }
}

static nib_status put_specials(const struct tokenizer *t)
{
    for (int s = 0; s < SPECIALS; s++) {
        if (t->ids[s] != UNDECIDED && specials[s].key)
            TRY(nib_gguf_put_integer(t->out, specials[s].key, NIB_GGUF_KIND_U32, t->ids[s]));
        if (t->adds[s] != UNDECIDED && specials[s].add_key)
            TRY(nib_gguf_put_integer(t->out, specials[s].add_key, NIB_GGUF_KIND_BOOL, t->adds[s]));
    }
    return NIB_OK;
}

/* ---- Chat templates ---- */

static nib_status put_named_templates(const struct tokenizer *t, const json_t *list)
{
    const char *names[64];
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(list) && n < sizeof names / sizeof *names; i++) {
        const char *given = json_string_value(json_object_get(json_array_get(list, i), "name"));
        const char *text = json_string_value(json_object_get(json_array_get(list, i), "template"));
        if (!given || !*given || !text)
            continue;
        char *name = nib_plan_memory(t->plan, strlen(given) + 1);
        if (!name)
            return no_memory();
        strcpy(name, given);
        for (char *c = name; *c; c++)
            if (!((*c >= '0' && *c <= '9') || (*c >= 'A' && *c <= 'Z') || (*c >= 'a' && *c <= 'z')))
                *c = '_';
        if (!strcmp(name, "default")) {
            TRY(nib_gguf_put_string(t->out, "tokenizer.chat_template", text));
            continue;
        }
        const char *key = nib_plan_string(t->plan, "tokenizer.chat_template.%s", name);
        if (!key)
            return no_memory();
        TRY(nib_gguf_put_string(t->out, key, text));
        names[n++] = name;
    }
    return n ? nib_gguf_put_strings(t->out, "tokenizer.chat_templates", names, n) : NIB_OK;
}

static nib_status put_template(const struct tokenizer *t, const json_t *template)
{
    if (json_is_string(template))
        return nib_gguf_put_string(t->out, "tokenizer.chat_template", json_string_value(template));
    return json_is_array(template) ? put_named_templates(t, template) : NIB_OK;
}

static nib_status put_chat_template(struct tokenizer *t)
{
    enum { LIMIT = 16 << 20 };
    const char *path = nib_plan_string(t->plan, "%s/chat_template.jinja", t->plan->in->directory);
    const json_t *own = json_object_get(t->config, "chat_template");
    if (!path)
        return no_memory();
    if (own || !t->config)
        return put_template(t, own);
    if (!nib_os_is_absent(path)) {
        char *text;
        size_t bytes;
        TRY(nib_ck_read_text(path, LIMIT, &text, &bytes));
        const nib_status status = strlen(text) == bytes ? nib_gguf_put_string(t->out, "tokenizer.chat_template", text)
                                                        : bad(t, "chat_template.jinja", "it holds a NUL");
        nib_free(text);
        return status;
    }
    json_t *file = NULL;
    TRY(nib_ck_read_object(t->plan->in, "chat_template.json", &file));
    const nib_status status = put_template(t, json_object_get(file, "chat_template"));
    json_decref(file);
    return status;
}

/* ---- The whole ---- */

/* Families of one kind ignore what they do not have; Llama and Mistral come with any. */
static nib_status put_by_family(struct tokenizer *t)
{
    const enum nib_family family = nib_ck_family(t->plan->architecture);
    const bool any = family == NIB_FAMILY_LLAMA || family == NIB_FAMILY_MISTRAL;
    const char *model = nib_plan_string(t->plan, "%s/tokenizer.model", t->plan->in->directory);
    const json_t *prefix = json_object_get(t->config, "add_prefix_space");
    if (!model)
        return no_memory();
    if (any && json_is_boolean(prefix))
        TRY(nib_gguf_put_integer(t->out, "tokenizer.ggml.add_space_prefix", NIB_GGUF_KIND_BOOL, json_is_true(prefix)));
    if (family != NIB_FAMILY_QWEN3_MOE && family != NIB_FAMILY_GPT_OSS && !nib_os_is_absent(model)) {
        TRY(put_sentencepiece(t, model));
        return family == NIB_FAMILY_GEMMA3
                   ? nib_gguf_put_integer(t->out, "tokenizer.ggml.add_space_prefix", NIB_GGUF_KIND_BOOL, 0)
                   : NIB_OK;
    }
    if (family == NIB_FAMILY_GEMMA3)
        return nib_fail(NIB_ERR_UNSUPPORTED,
                        "%s: there is no tokenizer.model, which a GGUF of gemma3 needs: download it",
                        t->plan->in->path);
    if (!t->json)
        return nib_fail(NIB_ERR_UNSUPPORTED,
                        "%s: there is neither tokenizer.json nor tokenizer.model, and a GGUF file needs a tokenizer: "
                        "download it",
                        t->plan->in->path);
    return any && is_sentencepiece_json(t) ? put_sentencepiece_json(t) : put_bpe(t);
}

/* What some vocabularies of Llama mean is known by their size alone. */
static void apply_sizes(struct tokenizer *t)
{
    enum { CODE_LLAMA = 32016, CODE_LLAMA_EOT = 32010, GRANITE = 49152 };
    const json_t *size = nib_plan_setting(t->plan, "vocab_size");
    const int64_t n = json_is_integer(size) ? json_integer_value(size) : 0;
    if (strcmp(t->plan->architecture->gguf, "llama") != 0)
        return;
    if (n == CODE_LLAMA)
        t->ids[EOT] = CODE_LLAMA_EOT;
    if (n == GRANITE)
        t->adds[BOS] = 0;
}

static nib_status put_tokenizer(struct tokenizer *t)
{
    TRY(nib_ck_read_object(t->plan->in, "tokenizer.json", &t->json));
    TRY(nib_ck_read_object(t->plan->in, "tokenizer_config.json", &t->config));
    for (int s = 0; s < SPECIALS; s++) {
        char key[32];
        snprintf(key, sizeof key, "%s_token", specials[s].word);
        t->words[s] = s < EOT ? word_of(json_object_get(t->config, key)) : NULL;
        t->ids[s] = t->adds[s] = UNDECIDED;
    }
    TRY(put_by_family(t));
    if (t->json)
        read_post_processor(t);
    find_specials(t);
    apply_sizes(t);
    TRY(put_specials(t));
    return put_chat_template(t);
}

nib_status nib_plan_put_tokenizer(nib_plan *plan, struct nib_gguf_plan *out)
{
    struct tokenizer t = { .plan = plan, .out = out };
    const nib_status status = put_tokenizer(&t);
    json_decref(t.json);
    json_decref(t.config);
    nib_free(t.tokens);
    nib_free(t.types);
    nib_free(t.scores);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_statistics.c - files of statistics, of which tests/fuzz/corpus/statistics has good and bad ones of every form.
 */
#include "test.h"

#include "io/statistics.h"

#define FILES "tests/fuzz/corpus/statistics/"

static struct nib_statistics *open_file(const char *path)
{
    struct nib_statistics *s = NULL;
    CHECK_OK(nib_statistics_open(path, &s));
    if (!s)
        exit(2);
    CHECK(!strcmp(nib_statistics_path(s), path) && strlen(nib_statistics_hash(s)) == 32);
    return s;
}

/* Slice `slice` of `slices` of an entry: its tokens, and four mean squares where there are any. */
static void check_slice(const struct nib_statistics *s, const char *name, int64_t slices, int64_t slice, double tokens,
                        const float wanted[4])
{
    float got[4] = { -1, -1, -1, -1 };
    size_t index;
    double found = -1;
    CHECK(nib_statistics_find(s, name, &index));
    CHECK_OK(nib_statistics_read(s, index, slices, slice, 4, got, &found));
    CHECK(found == tokens);
    if (tokens > 0)
        CHECK_BYTES(got, wanted, sizeof got);
}

TEST(imatrix_in_gguf)
{
    struct nib_statistics *s = open_file(FILES "gguf");
    size_t index;
    CHECK(nib_statistics_of_gguf(s) && nib_statistics_count(s) == 2);
    CHECK(nib_statistics_at(s, 1).slices == 3 && nib_statistics_at(s, 1).values == 12);
    check_slice(s, "blk.0.attn_q", 1, 0, 16, (const float[]){ 0, 0.5f, 1, 1.5f });
    check_slice(s, "blk.0.ffn_gate_exps", 3, 0, 2, (const float[]){ 3, 3, 3, 3 });
    check_slice(s, "blk.0.ffn_gate_exps", 3, 1, 0, NULL);
    check_slice(s, "blk.0.ffn_gate_exps", 3, 2, 3, (const float[]){ 2, 2, 2, 2 });
    CHECK(!nib_statistics_find(s, "blk.0.attn_q.weight", &index) && !nib_statistics_find(s, "", &index));
    float out[12];
    double tokens;
    CHECK_FAILS(nib_statistics_read(s, 1, 2, 0, 6, out, &tokens), NIB_ERR_DATA, "12 values, not 2 of 6");
    CHECK_FAILS(nib_statistics_read(s, 0, 1, 0, 3, out, &tokens), NIB_ERR_DATA, "blk.0.attn_q");
    nib_statistics_close(s);
    s = open_file(FILES "gguf_more"); /* a tensor of a name that is not known */
    CHECK(nib_statistics_count(s) == 1);
    check_slice(s, "blk.0.attn_q", 1, 0, 16, (const float[]){ 0, 0.5f, 1, 1.5f });
    nib_statistics_close(s);
}

/* Values are means times calls; ones are no data; a file does not say how many experts there are. */
TEST(imatrix_of_old)
{
    struct nib_statistics *s = open_file(FILES "dat");
    CHECK(nib_statistics_of_gguf(s) && nib_statistics_count(s) == 2 && nib_statistics_at(s, 0).slices == 0);
    check_slice(s, "blk.0.attn_q", 1, 0, 4, (const float[]){ 1, 2, 3, 0 });
    check_slice(s, "blk.0.ffn_gate_exps", 2, 0, 0, NULL);
    check_slice(s, "blk.0.ffn_gate_exps", 2, 1, 2, (const float[]){ 1, 2, 3, 4 });
    nib_statistics_close(s);
    s = open_file(FILES "dat_no_calls");
    float out[2];
    double tokens;
    CHECK_OK(nib_statistics_read(s, 0, 1, 0, 2, out, &tokens));
    CHECK(out[0] == 4 && out[1] == 8 && tokens == 1);
    nib_statistics_close(s);
}

TEST(statistics_of_nib)
{
    struct nib_statistics *s = open_file(FILES "own");
    CHECK(!nib_statistics_of_gguf(s) && nib_statistics_count(s) == 3);
    check_slice(s, "m.k", 1, 0, 16, (const float[]){ 0, 0.5f, 1, 1.5f });
    check_slice(s, "m.q", 1, 0, 16, (const float[]){ 0, 0.5f, 1, 1.5f });
    size_t k, q, experts;
    CHECK(nib_statistics_find(s, "m.k", &k) && nib_statistics_find(s, "m.q", &q));
    CHECK(nib_statistics_find(s, "m.experts.1.up", &experts));
    CHECK(nib_statistics_same(s, k) == k && nib_statistics_same(s, q) == k &&
          nib_statistics_same(s, experts) == experts);
    check_slice(s, "m.experts.1.up", 2, 0, 0, NULL);
    check_slice(s, "m.experts.1.up", 2, 1, 3, (const float[]){ 2, 2, 2, 2 });
    nib_statistics_close(s);
}

TEST(largest_magnitudes)
{
    struct nib_statistics *s = open_file(FILES "own_amaxk");
    float out[4] = { -1, -1, -1, -1 };
    bool found = false;
    CHECK_OK(nib_statistics_read_amaxes(s, 0, 1, 0, 4, out, &found));
    CHECK(found && out[0] == 0 && out[1] == 1 && out[2] == 2 && out[3] == 4 && nib_statistics_counts_tokens(s));
    CHECK_FAILS(nib_statistics_read_amaxes(s, 0, 1, 0, 5, out, &found), NIB_ERR_DATA, "m.q");
    nib_statistics_close(s);
    s = open_file(FILES "dat");
    CHECK_OK(nib_statistics_read_amaxes(s, 0, 1, 0, 4, out, &found));
    CHECK(!found && !nib_statistics_counts_tokens(s));
    nib_statistics_close(s);
}

TEST(files_that_are_rejected)
{
    static const struct {
        const char *file, *why;
    } cases[] = {
        { "gguf_half", "no \"blk.0.attn_q.weight.counts\"" },
        { "gguf_counts_alone", "no \"blk.0.attn_q.weight.in_sum2\"" },
        { "gguf_nan", "value 1 of \"blk.0.attn_q\" is a NaN" },
        { "gguf_negative_count", "count 0 of \"blk.0.attn_q\" is negative" },
        { "gguf_counts_differ", "[3, 1] instead of [2, 1]" },
        { "gguf_f16", "F32" },
        { "gguf_model", "no imatrix" },
        { "dat_nan", "is a NaN" },
        { "dat_negative", "value 1 of \"blk.0.attn_q\" is negative" },
        { "dat_inf", "infinite" },
        { "dat_repeated", "twice" },
        { "dat_many", "number of entries" },
        { "dat_more", "ends before" },
        { "dat_none", "no statistics" },
        { "dat_no_values", "ends before a number of values" },
        { "dat_values", "2147483647 values of \"a.b\" do not fit" },
        { "dat_name", "length of a name" },
        { "own_other", "nib-stats-1" },
        { "own_count_missing", "\"m.e.count\"" },
        { "own_negative", "count 0 of" },
        { "own_shape", "I64 [E]" },
        { "own_inputs", "JSON object" },
        { "own_amaxk_shape", "\"m.q.amaxk\" must be F32" },
        { "own_amaxk_nan", "amax 3 of \"m.q\" is a NaN" },
        { "empty", "ends before" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct nib_statistics *s = NULL;
        char path[256];
        snprintf(path, sizeof path, FILES "%s", cases[i].file);
        CHECK_FAILS(nib_statistics_open(path, &s), NIB_ERR_DATA, cases[i].why);
        CHECK_FAILS(nib_statistics_open(path, &s), NIB_ERR_DATA, path);
        CHECK(!s);
    }
    struct nib_statistics *s = NULL;
    CHECK_FAILS(nib_statistics_open(FILES "absent", &s), NIB_ERR_IO, "absent");
}

TEST_MAIN

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_checkpoint.c - opening checkpoints, good and hostile, and reading weights of every checkpoint format: each against the
 * numbers that were put in, computed here by the plain definition.
 */
#define _GNU_SOURCE
#include "test_weights.h"

#include "io/names.h"
#include "model/roles.h"
#include "model/weights.h"
#include "io/gguf.h"
#include "model/architectures.h"

#include <math.h>

/* ---- Directories of files ---- */

#define PUT(name, ...) \
    put_tensors(name, (struct item[]){ __VA_ARGS__ }, sizeof((struct item[]){ __VA_ARGS__ }) / sizeof(struct item))

static void check_rejected(nib_status status, const char *words)
{
    nib_checkpoint *c = NULL;
    CHECK_FAILS(nib_checkpoint_open(directory, &c), status, words);
    CHECK(c == NULL);
}

static void random_floats(float *x, size_t n, float sigma)
{
    for (size_t i = 0; i < n; i++)
        x[i] = sigma * test_normal();
}

/* A weight's rows, in pieces, against numbers. */
static void check_rows(const nib_checkpoint *c, const char *name, const float *want, int64_t rows, int64_t cols)
{
    size_t index = 0;
    float *got = malloc((size_t)(rows * cols + 1) * sizeof *got);
    nib_weight facts = { .bytes = sizeof facts };
    CHECK_OK(nib_checkpoint_find_weight(c, name, &index));
    CHECK_OK(nib_checkpoint_get_weight(c, index, &facts));
    CHECK_THAT(facts.rows == rows && facts.cols == cols, "%s is [%lld, %lld]", name, (long long)facts.rows,
               (long long)facts.cols);
    if (facts.rows != rows || facts.cols != cols) {
        free(got);
        return;
    }
    for (int64_t first = 0, step; first < rows; first += step) {
        step = 1 + test_below(rows);
        if (step > rows - first)
            step = rows - first;
        nib_array out;
        CHECK_OK(nib_array_init(&out, got, NIB_F32, 2, (int64_t[]){ step, cols }));
        CHECK_OK(nib_checkpoint_read_rows(c, index, first, step, &out));
        for (int64_t i = 0; i < step * cols; i++)
            if (got[i] != want[first * cols + i]) {
                test_fail(__FILE__, __LINE__, "%s: element %lld is %g, not %g", name, (long long)(first * cols + i),
                          (double)got[i], (double)want[first * cols + i]);
                break;
            }
    }
    free(got);
}

/* ---- Plain ---- */

TEST(plain_folder)
{
    empty_directory();
    float q[6 * 32], k[4 * 32], norm[32], wide[3 * 5];
    uint16_t q16[6 * 32];
    random_floats(q, 6 * 32, 1);
    random_floats(k, 4 * 32, 1);
    random_floats(norm, 32, 1);
    random_floats(wide, 15, 1);
    CHECK_OK(nib_encode(NIB_BF16, q, 6 * 32, q16));
    CHECK_OK(nib_decode(NIB_BF16, q16, 6 * 32, q));
    PUT("model-00001-of-00002.safetensors", { "model.layers.10.q_proj.weight", NIB_BF16, 2, { 6, 32 }, q16 },
        { "model.norm.weight", NIB_F32, 1, { 32 }, norm });
    PUT("model-00002-of-00002.safetensors", { "model.layers.9.k_proj.weight", NIB_F32, 2, { 4, 32 }, k },
        { "model.layers.9.odd.weight", NIB_F32, 2, { 3, 5 }, wide });
    put_text("model.safetensors.index.json", "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {"
                                             "\"model.layers.10.q_proj.weight\": \"model-00001-of-00002.safetensors\","
                                             "\"model.norm.weight\": \"model-00001-of-00002.safetensors\","
                                             "\"model.layers.9.k_proj.weight\": \"model-00002-of-00002.safetensors\","
                                             "\"model.layers.9.odd.weight\": \"model-00002-of-00002.safetensors\"}}");
    put_text("config.json", "{\"model_type\": \"llama\", \"hidden_size\": 32}");
    nib_checkpoint *c = open_good(directory);
    nib_checkpoint_facts facts = { .bytes = sizeof facts };
    CHECK_OK(nib_checkpoint_get_facts(c, &facts));
    CHECK(facts.files == 2 && facts.tensors == 4 && facts.weights == 3 && facts.format == NIB_CHECKPOINT_FORMAT_PLAIN);
    CHECK(strcmp(facts.model_type, "llama") == 0 && facts.config && !facts.provenance);
    CHECK(facts.tensor_bytes == 2 * 6 * 32 + 4 * (32 + 4 * 32 + 15));
    nib_weight weight = { .bytes = sizeof weight };
    CHECK_OK(nib_checkpoint_get_weight(c, 2, &weight)); /* 9 before 10 */
    CHECK(strcmp(weight.name, "model.layers.10.q_proj") == 0 && weight.dtype == NIB_BF16);
    CHECK(strcmp(weight.file, "model-00001-of-00002.safetensors") == 0 && weight.stored_bytes == 2 * 6 * 32);
    check_rows(c, "model.layers.10.q_proj", q, 6, 32);
    check_rows(c, "model.layers.9.k_proj", k, 4, 32);
    check_rows(c, "model.layers.9.odd", wide, 3, 5);

    size_t index = 7;
    nib_array out;
    CHECK_OK(nib_array_init(&out, q, NIB_F32, 2, (int64_t[]){ 6, 32 }));
    CHECK_FAILS(nib_checkpoint_find_weight(c, "nothing", &index), NIB_ERR_ARG, "no weight \"nothing\"");
    CHECK_FAILS(nib_checkpoint_get_weight(c, 3, &weight), NIB_ERR_ARG, "no weight 3 among its 3");
    CHECK_FAILS(nib_checkpoint_read_rows(c, 2, 1, 6, &out), NIB_ERR_ARG, "not within its 6");
    CHECK_FAILS(nib_checkpoint_read_rows(c, 2, 0, 5, &out), NIB_ERR_SHAPE, "not a contiguous [5, 32]");
    CHECK_FAILS(nib_checkpoint_read_codes(c, 2, 0, 1, NULL, NULL), NIB_ERR_MODE, "no NVFP4 codes");
    out.dtype = NIB_U8;
    CHECK_FAILS(nib_checkpoint_read_rows(c, 2, 0, 6, &out), NIB_ERR_DTYPE, "neither F32");
    nib_checkpoint_tensor tensor = { .bytes = sizeof tensor };
    CHECK_OK(nib_checkpoint_get_tensor(c, 3, &tensor));
    CHECK(strcmp(tensor.name, "model.norm.weight") == 0 && strcmp(tensor.dtype, "F32") == 0 && tensor.rank == 1);
    CHECK_FAILS(nib_checkpoint_get_tensor(c, 4, &tensor), NIB_ERR_ARG, "no tensor 4");
    nib_checkpoint_close(c);

    /* A file that shrinks is an error, not a signal. */
    c = open_good(directory);
    CHECK(truncate(at("model-00001-of-00002.safetensors"), 400) == 0);
    CHECK_OK(nib_array_init(&out, q, NIB_F32, 2, (int64_t[]){ 6, 32 }));
    CHECK_FAILS(nib_checkpoint_read_rows(c, 2, 0, 6, &out), NIB_ERR_IO, "although it was longer when opened");
    nib_checkpoint_close(c);
    nib_checkpoint_close(NULL);
}

TEST(hostile_folders)
{
    static const float x[32] = { 1 };
    static const struct {
        const char *index, *words;
        nib_status status;
    } indexes[] = {
        { "[]", "not a JSON object", NIB_ERR_DATA },
        { "{}", "no object \"weight_map\"", NIB_ERR_DATA },
        { "{\"weight_map\": []}", "no object \"weight_map\"", NIB_ERR_DATA },
        { "{\"weight_map\": {\"a.weight\": 3}}", "not a string", NIB_ERR_DATA },
        { "{\"weight_map\": {\"a.weight\": \"\"}}", "it is empty", NIB_ERR_DATA },
        { "{\"weight_map\": {\"a.weight\": \"../m.safetensors\"}}", "leaves the directory", NIB_ERR_DATA },
        { "{\"weight_map\": {\"a.weight\": \"/etc/passwd\"}}", "leaves the directory", NIB_ERR_DATA },
        { "{\"weight_map\": {\"a.weight\": \"m.bin\"}}", "not a .safetensors file", NIB_ERR_DATA },
        { "{\"weight_map\": {\"a.weight\": \"m.safetensors\\u0000\"}}", "holds a NUL", NIB_ERR_DATA },
        { "{\"weight_map\": {\"a.weight\": \"n.safetensors\"}}", "which is not there: download it", NIB_ERR_DATA },
        { "{\"weight_map\": {\"b.weight\": \"m.safetensors\"}}", "an old one", NIB_ERR_DATA },
        { "{\"weight_map\": {\"a.weight\": \"m.safetensors\", \"a.weight\": \"m.safetensors\"}}", "duplicate",
          NIB_ERR_DATA },
        { "{\"weight_map\": {} } x", "line 1", NIB_ERR_DATA },
    };
    for (size_t i = 0; i < sizeof indexes / sizeof *indexes; i++) {
        empty_directory();
        PUT("m.safetensors", { "a.weight", NIB_F32, 2, { 2, 16 }, x });
        put_text("model.safetensors.index.json", indexes[i].index);
        check_rejected(indexes[i].status, indexes[i].words);
    }
    empty_directory();
    check_rejected(NIB_ERR_DATA, "no .safetensors and no .gguf");
    put_text("pytorch_model.bin", "x");
    check_rejected(NIB_ERR_UNSUPPORTED, "pickled (\"pytorch_model.bin\")");
    PUT("m.safetensors", { "a.weight", NIB_F32, 2, { 2, 16 }, x });
    nib_checkpoint_close(open_good(directory)); /* beside safetensors nobody minds */
    PUT("n.safetensors", { "a.weight", NIB_F32, 2, { 2, 16 }, x });
    check_rejected(NIB_ERR_DATA, "is in two files");
    put_text("x.safetensors.index.json", "{}");
    put_text("y.safetensors.index.json", "{}");
    check_rejected(NIB_ERR_DATA, "it has 2 indexes");
    empty_directory();
    PUT("m.safetensors", { "a.weight", NIB_F32, 2, { 2, 16 }, x });
    put_text("config.json", "{\"a\": 1, \"a\": 2}");
    check_rejected(NIB_ERR_DATA, "duplicate");
    put_text("config.json", "[1]");
    check_rejected(NIB_ERR_DATA, "not a JSON object");
    put_text("config.json", "null");
    check_rejected(NIB_ERR_DATA, "config.json: line 1");
    put_text("config.json", "{}");
    put_text("hf_quant_config.json", "{");
    check_rejected(NIB_ERR_DATA, "hf_quant_config.json: line 1");
    empty_directory();
    put_text("m.safetensors", "not one");
    check_rejected(NIB_ERR_DATA, "at least 8");
    put_text("m.safetensors", "version https://git-lfs.github.com/"); /* no more of a pointer is needed to know it */
    check_rejected(NIB_ERR_DATA, "git lfs pull");
    nib_checkpoint *c = NULL;
    CHECK_FAILS(nib_checkpoint_open(at("nowhere"), &c), NIB_ERR_IO, "nowhere: cannot open");
    CHECK_FAILS(nib_checkpoint_open(NULL, &c), NIB_ERR_ARG, "path is NULL");
}

TEST(diagnostics)
{
    static const float x[32] = { 1 };
    empty_directory();
    PUT("m.safetensors", { "a.weight", NIB_F32, 2, { 2, 16 }, x }, { "c.weight", NIB_F32, 2, { 2, 16 }, x });
    PUT("n.safetensors", { "a.weight", NIB_F32, 2, { 2, 16 }, x }, { "b.weight", NIB_F32, 2, { 2, 16 }, x });
    PUT("old.safetensors", { "z.weight", NIB_F32, 2, { 2, 16 }, x });
    put_text("model.safetensors.index.json",
             "{\"weight_map\": {\"a.weight\": \"m.safetensors\", \"b.weight\": \"n.safetensors\"}}");
    nib_checkpoint *c = open_good(directory);
    CHECK(c->n_diagnostics == 3 && c->n_weights == 3);
    const char *const ids[] = { "stale-shard", "repeated-tensor", "unindexed-tensor" };
    const char *const subjects[] = { "old.safetensors", "a.weight", "c.weight" };
    for (size_t i = 0; i < c->n_diagnostics; i++)
        CHECK(strcmp(c->diagnostics[i].id, ids[i]) == 0 && strcmp(c->diagnostics[i].subject, subjects[i]) == 0);
    nib_checkpoint_close(c);
}

/* ---- NVFP4 ---- */

/* Codes, scales and a tensor scale of a random matrix, and what they mean by the definition. */
struct packed {
    int64_t rows, cols;
    uint8_t *codes, *scales;
    float g, *values; /* with multiplier g; with the divisor 1/g, a power of two, they are the same */
};

static struct packed pack(int64_t rows, int64_t cols)
{
    static const float grid[16] = { 0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6 };
    struct packed p = { rows,
                        cols,
                        malloc((size_t)(rows * cols / 2)),
                        malloc((size_t)(rows * cols / 16)),
                        0x1p-11f,
                        malloc((size_t)(rows * cols) * sizeof(float)) };
    for (int64_t i = 0; i < rows * cols / 2; i++)
        p.codes[i] = (uint8_t)test_random();
    for (int64_t i = 0; i < rows * cols / 16; i++)
        p.scales[i] = (uint8_t)test_below(0x7F);
    for (int64_t i = 0; i < rows * cols; i++) {
        float scale;
        CHECK_OK(nib_decode(NIB_E4M3, &p.scales[i / 16], 1, &scale));
        p.values[i] = grid[i % 2 ? p.codes[i / 2] >> 4 : p.codes[i / 2] & 15] * (scale * p.g);
    }
    return p;
}

static void unpack(struct packed *p)
{
    free(p->codes);
    free(p->scales);
    free(p->values);
}

static void check_codes(const nib_checkpoint *c, const char *name, const struct packed *p)
{
    size_t index = 0;
    uint8_t *codes = malloc((size_t)(p->rows * p->cols / 2)), *scales = malloc((size_t)(p->rows * p->cols / 16));
    CHECK_OK(nib_checkpoint_find_weight(c, name, &index));
    for (int64_t first = 0; first < p->rows; first += 3) {
        const int64_t n = p->rows - first < 3 ? p->rows - first : 3;
        CHECK_OK(
            nib_checkpoint_read_codes(c, index, first, n, codes + first * p->cols / 2, scales + first * p->cols / 16));
    }
    CHECK_BYTES(codes, p->codes, p->rows * p->cols / 2);
    CHECK_BYTES(scales, p->scales, p->rows * p->cols / 16);
    free(codes);
    free(scales);
}

TEST(nvfp4_packings)
{
    empty_directory();
    struct packed p = pack(20, 192);
    const float divisor = 1 / p.g, input = 0.5f;
    const uint16_t g16 = 0x3A00; /* 2^-11 as BF16 */
    PUT("model.safetensors", { "ct.weight_packed", NIB_U8, 2, { 20, 96 }, p.codes },
        { "ct.weight_scale", NIB_E4M3, 2, { 20, 12 }, p.scales },
        { "ct.weight_global_scale", NIB_F32, 1, { 1 }, &divisor },
        { "ct.input_global_scale", NIB_F32, 1, { 1 }, &input }, { "mo.weight", NIB_U8, 2, { 20, 96 }, p.codes },
        { "mo.weight_scale", NIB_E4M3, 2, { 20, 12 }, p.scales }, { "mo.weight_scale_2", NIB_BF16, 0, { 0 }, &g16 },
        { "ao._weight_qdata", NIB_U8, 2, { 20, 96 }, p.codes },
        { "ao._weight_scale", NIB_E4M3, 2, { 20, 12 }, p.scales },
        { "ao._weight_per_tensor_scale", NIB_F32, 0, { 0 }, &p.g });
    nib_checkpoint *c = open_good(directory);
    CHECK(c->format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS && c->n_weights == 3);
    static const char *const names[] = { "ct", "mo", "ao" };
    for (int i = 0; i < 3; i++) {
        check_codes(c, names[i], &p);
        check_rows(c, names[i], p.values, 20, 192);
    }
    nib_weight weight = { .bytes = sizeof weight };
    size_t index;
    CHECK_OK(nib_checkpoint_find_weight(c, "ct", &index));
    CHECK_OK(nib_checkpoint_get_weight(c, index, &weight));
    CHECK(weight.tensor_scale_kind == NIB_TENSOR_SCALE_DIVISOR && weight.tensor_scale == divisor);
    CHECK(weight.has_input_scale && weight.input_scale == input && weight.dtype == NIB_BF16);
    CHECK(weight.stored_bytes == 20 * 96 + 20 * 12 + 4 + 4);
    CHECK_OK(nib_checkpoint_find_weight(c, "mo", &index));
    CHECK_OK(nib_checkpoint_get_weight(c, index, &weight));
    CHECK(weight.tensor_scale_kind == NIB_TENSOR_SCALE_MULTIPLIER && weight.tensor_scale == p.g &&
          !weight.has_input_scale && weight.input_scale == 1);
    nib_checkpoint_close(c);
    unpack(&p);
}

TEST(damaged_nvfp4)
{
    struct packed p = pack(20, 192);
    const float g = 1;
    const double wrong = 1;
    const struct {
        const char *words;
        struct item scale, tensor_scale;
    } cases[] = {
        { "block scales are missing", { .name = NULL }, { "a.weight_scale_2", NIB_F32, 0, { 0 }, &g } },
        { "tensor scale is missing", { "a.weight_scale", NIB_E4M3, 2, { 20, 12 }, NULL }, { .name = NULL } },
        { "are not F8_E4M3",
          { "a.weight_scale", NIB_U8, 2, { 20, 12 }, NULL },
          { "a.weight_scale_2", NIB_F32, 0, { 0 }, &g } },
        { "may be swizzled",
          { "a.weight_scale", NIB_E4M3, 1, { 240 }, NULL },
          { "a.weight_scale_2", NIB_F32, 0, { 0 }, &g } },
        { "[20, 6], and for blocks of 16",
          { "a.weight_scale", NIB_E4M3, 2, { 20, 6 }, NULL },
          { "a.weight_scale_2", NIB_F32, 0, { 0 }, &g } },
        { "not F32, BF16 or F16",
          { "a.weight_scale", NIB_E4M3, 2, { 20, 12 }, NULL },
          { "a.weight_scale_2", NIB_F64, 0, { 0 }, &wrong } },
        { "it has 2 values",
          { "a.weight_scale", NIB_E4M3, 2, { 20, 12 }, NULL },
          { "a.weight_scale_2", NIB_F32, 1, { 2 }, p.values } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        empty_directory();
        struct item items[3] = { { "a.weight", NIB_U8, 2, { 20, 96 }, p.codes } };
        size_t n = 1;
        if (cases[i].scale.name) {
            items[n] = cases[i].scale;
            items[n++].data = p.scales;
        }
        if (cases[i].tensor_scale.name)
            items[n++] = cases[i].tensor_scale;
        put_tensors("model.safetensors", items, n);
        nib_checkpoint *c = open_good(directory);
        float row[192];
        nib_array out;
        CHECK_OK(nib_array_init(&out, row, NIB_F32, 2, (int64_t[]){ 1, 192 }));
        CHECK(c->n_weights == 1);
        CHECK_FAILS(nib_checkpoint_read_rows(c, 0, 0, 1, &out), NIB_ERR_DATA, cases[i].words);
        nib_checkpoint_close(c);
    }
    unpack(&p);
}

TEST(saved_tensors)
{
    empty_directory();
    float x[20 * 48], want[20 * 48];
    random_floats(x, 20 * 48, 1);
    static const struct {
        nib_dialect dialect;
        nib_tensor_scale_rule scale;
        nib_scale_rule rule;
        nib_tensor_scale tensor_scale;
    } kinds[] = { { NIB_DIALECT_TE, NIB_TENSOR_SCALE_RULE_DIALECT, NIB_SCALE_RTN, NIB_TENSOR_SCALE_AMAX },
                  { NIB_DIALECT_TE, NIB_TENSOR_SCALE_RULE_POW2, NIB_SCALE_SWEEP, NIB_TENSOR_SCALE_MULTIPLIER },
                  { NIB_DIALECT_TE, NIB_TENSOR_SCALE_RULE_DIALECT, NIB_SCALE_4OVER6, NIB_TENSOR_SCALE_AMAX },
                  { NIB_DIALECT_COMPRESSED_TENSORS, NIB_TENSOR_SCALE_RULE_DIALECT, NIB_SCALE_RTN,
                    NIB_TENSOR_SCALE_DIVISOR },
                  { NIB_DIALECT_MODELOPT, NIB_TENSOR_SCALE_RULE_DIALECT, NIB_SCALE_RTN, NIB_TENSOR_SCALE_MULTIPLIER } };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        nib_quantizer q;
        nib_quantizer_init(&q);
        q.dialect = kinds[i].dialect;
        q.tensor_scale_rule = kinds[i].scale;
        q.scale_rule = kinds[i].rule;
        q.columnwise = kinds[i].dialect == NIB_DIALECT_TE;
        if (q.scale_rule == NIB_SCALE_4OVER6)
            q.e4m3_max = 256;
        nib_array view, out;
        nib_tensor *t = NULL;
        nib_writer *writer = NULL;
        CHECK_OK(nib_array_init(&view, x, NIB_F32, 2, (int64_t[]){ 20, 48 }));
        CHECK_OK(nib_array_init(&out, want, NIB_F32, 2, (int64_t[]){ 20, 48 }));
        CHECK_OK(nib_quantize(&q, &view, NULL, &t));
        CHECK_OK(nib_dequantize(t, NIB_ROWWISE, &out));
        CHECK_OK(nib_writer_create(at("model.safetensors"), &writer));
        CHECK_OK(nib_writer_declare_tensor(writer, "a.b", t));
        CHECK_OK(nib_writer_write_tensor(writer, "a.b", t));
        CHECK_OK(nib_writer_commit(writer));
        nib_writer_destroy(writer);
        nib_tensor_destroy(t);
        nib_checkpoint *c = open_good(directory);
        CHECK(c->format == NIB_CHECKPOINT_FORMAT_NIB && c->n_weights == 1 &&
              c->weights[0].tensor_scale == kinds[i].tensor_scale);
        check_rows(c, "a.b", want, 20, 48);
        nib_checkpoint_close(c);
    }
}

/* Metadata of a matrix on data that is none: its tensors are there, and no weight. */
TEST(saved_data_of_other_ranks)
{
    static const uint8_t zeros[24 * 24];
    static const char words[] = "format=nvfp4 dialect=te dtype=F32 rank=2 dim=4 dim=16 swizzled=0 row_scaled=0 "
                                "rht_rowwise=0 no_tensor_scale=0 e4m3_max=448 tensor_scale_rule=0";
    for (int rank = 0; rank < 4; rank++) {
        const int64_t shape[3] = { 4, 24, 1 };
        const size_t bytes = rank == 0 ? 1 : rank == 1 ? 4 : 4 * 24;
        nib_writer *writer = NULL;
        empty_directory();
        CHECK_OK(nib_writer_create(at("model.safetensors"), &writer));
        CHECK_OK(nib_writer_metadata(writer, "nib:a", words));
        CHECK_OK(nib_writer_declare(writer, "a.row_data", NIB_U8, rank, shape));
        CHECK_OK(nib_writer_declare(writer, "b", NIB_U8, 2, (int64_t[]){ 24, 24 })); /* dims to be read by mistake */
        CHECK_OK(nib_writer_write(writer, "a.row_data", 0, zeros, bytes));
        CHECK_OK(nib_writer_write(writer, "b", 0, zeros, sizeof zeros));
        CHECK_OK(nib_writer_commit(writer));
        nib_writer_destroy(writer);
        nib_checkpoint *c = open_good(directory);
        CHECK_THAT(c->n_tensors == 2 && c->n_weights == (rank == 2), "rank %d: %zu weights", rank, c->n_weights);
        nib_checkpoint_close(c);
    }
}

/* A word that is missing is not 0: nobody knows what such a tensor is. */
TEST(saved_data_without_a_word)
{
    static const uint8_t zeros[4 * 8];
    static const char words[] = "format=nvfp4 dialect=te dtype=F32 rank=2 dim=4 dim=16 row_scaled=0 rht_rowwise=0 "
                                "no_tensor_scale=0 e4m3_max=448 tensor_scale_rule=0";
    nib_writer *writer = NULL;
    empty_directory();
    CHECK_OK(nib_writer_create(at("model.safetensors"), &writer));
    CHECK_OK(nib_writer_metadata(writer, "nib:a", words));
    CHECK_OK(nib_writer_declare(writer, "a.row_data", NIB_U8, 2, (int64_t[]){ 4, 8 }));
    CHECK_OK(nib_writer_write(writer, "a.row_data", 0, zeros, sizeof zeros));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    nib_checkpoint *c = open_good(directory);
    CHECK_THAT(c->n_tensors == 1 && c->n_weights == 0, "%zu weights", c->n_weights);
    nib_checkpoint_close(c);
}

/* Every code is counted, the last of an odd row too. */
TEST(histograms_of_odd_rows)
{
    enum { ROWS = 4, COLS = 33 };
    float x[ROWS * COLS];
    nib_quantizer q;
    nib_array view;
    nib_tensor *tensor = NULL;
    nib_writer *writer = NULL;
    random_floats(x, ROWS * COLS, 1);
    nib_quantizer_init(&q);
    q.columnwise = 0;
    empty_directory();
    CHECK_OK(nib_array_init(&view, x, NIB_F32, 2, (int64_t[]){ ROWS, COLS }));
    CHECK_OK(nib_quantize(&q, &view, NULL, &tensor));
    CHECK_OK(nib_writer_create(at("model.safetensors"), &writer));
    CHECK_OK(nib_writer_declare_tensor(writer, "a", tensor));
    CHECK_OK(nib_writer_write_tensor(writer, "a", tensor));
    CHECK_OK(nib_writer_commit(writer));
    nib_writer_destroy(writer);
    nib_tensor_destroy(tensor);
    nib_checkpoint *c = open_good(directory);
    nib_weight_stats stats = { .bytes = sizeof stats };
    CHECK_OK(nib_checkpoint_measure(c, 0, c, 0, NULL, &stats));
    int64_t codes = 0;
    for (int i = 0; i < 16; i++)
        codes += stats.codes[i];
    CHECK_THAT(codes == ROWS * COLS, "%lld codes", (long long)codes);
    nib_checkpoint_close(c);
}

TEST(several_gguf_files)
{
    nib_checkpoint *c = NULL;
    empty_directory();
    put_text("a.gguf", "GGUF");
    put_text("b.gguf", "GGUF");
    CHECK_FAILS(nib_checkpoint_open(directory, &c), NIB_ERR_UNSUPPORTED, "2 GGUF files");
    CHECK(c == NULL);
}

/* Names of files that are one of several, and names that only look like it. */
TEST(names_of_split_files)
{
    static const struct {
        const char *name;
        bool split;
    } cases[] = { { "m-00001-of-00002.gguf", true },  { "m_00001-of-00002.gguf", false },
                  { "m-0000x-of-00002.gguf", false }, { "m-00003-of-00002.gguf", false },
                  { "m-00000-of-00002.gguf", false }, { "m-00001-of-0000:.gguf", false },
                  { "m-00001_of-00002.gguf", false } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        empty_directory();
        nib_gguf_plan *plan = NULL;
        nib_gguf_writer *writer = NULL;
        nib_checkpoint *c = NULL;
        CHECK_OK(nib_gguf_plan_create(at(cases[i].name), &plan));
        CHECK_OK(nib_gguf_put_string(plan, "general.architecture", "llama"));
        CHECK_OK(nib_gguf_writer_create(plan, &writer));
        CHECK_OK(nib_gguf_commit(writer));
        nib_gguf_writer_destroy(writer);
        nib_gguf_plan_destroy(plan);
        const nib_status status = nib_checkpoint_open(at(cases[i].name), &c);
        CHECK_THAT((status != NIB_OK) == cases[i].split, "%s: %s", cases[i].name, nib_last_error());
        nib_checkpoint_close(c);
    }
}

static void put_split(const char *name, int64_t number, int64_t count, int64_t tensors)
{
    nib_gguf_plan *plan = NULL;
    nib_gguf_writer *writer = NULL;
    const float values[32] = { (float)number };
    char tensor[32];
    snprintf(tensor, sizeof tensor, "blk.%lld.attn_q.weight", (long long)number);
    CHECK_OK(nib_gguf_plan_create(at(name), &plan));
    CHECK_OK(nib_gguf_put_string(plan, "general.architecture", "llama"));
    CHECK_OK(nib_gguf_put_integer(plan, "split.no", NIB_GGUF_KIND_U16, number));
    CHECK_OK(nib_gguf_put_integer(plan, "split.count", NIB_GGUF_KIND_U16, count));
    if (tensors >= 0)
        CHECK_OK(nib_gguf_put_integer(plan, "split.tensors.count", NIB_GGUF_KIND_I32, tensors));
    CHECK_OK(nib_gguf_declare(plan, tensor, NIB_GGUF_F32, 2, (int64_t[]){ 1, 32 }));
    CHECK_OK(nib_gguf_writer_create(plan, &writer));
    CHECK_OK(nib_gguf_write(writer, 0, 0, values, sizeof values));
    CHECK_OK(nib_gguf_commit(writer));
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
}

/* A directory with one GGUF in several files is that; what else lies there, or what files say of themselves, may differ. */
TEST(one_gguf_in_several_files)
{
    static const struct {
        int64_t number, count, tensors;
        const char *more;
        nib_status status;
        const char *words;
    } cases[] = { { 1, 2, -1, NULL, NIB_OK, NULL },
                  { 1, 2, 2, NULL, NIB_OK, NULL },
                  { 0, 2, -1, NULL, NIB_ERR_DATA, "split.no" },
                  { 1, 3, -1, NULL, NIB_ERR_DATA, "split.count" },
                  { 1, 2, 5, NULL, NIB_ERR_DATA, "split.tensors.count is 5, and its 2 files have 2 tensors" },
                  { 1, 2, -1, "m-00001-of-00003.gguf", NIB_ERR_UNSUPPORTED, "3 GGUF files" },
                  { 1, 2, -1, "n-00001-of-00002.gguf", NIB_ERR_UNSUPPORTED, "3 GGUF files" },
                  { 1, 2, -1, "more-00001-of-00002.gguf", NIB_ERR_UNSUPPORTED, "3 GGUF files" },
                  { 1, 2, -1, "z.gguf", NIB_ERR_UNSUPPORTED, "3 GGUF files" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nib_checkpoint *c = NULL;
        empty_directory();
        put_split("m-00001-of-00002.gguf", 0, 2, cases[i].tensors);
        put_split("m-00002-of-00002.gguf", cases[i].number, cases[i].count, -1);
        if (cases[i].more)
            put_split(cases[i].more, 0, 2, -1);
        const nib_status status = nib_checkpoint_open(directory, &c);
        CHECK_THAT(status == cases[i].status && (!status || strstr(nib_last_error(), cases[i].words)),
                   "case %zu: %s: %s", i, nib_status_name(status), nib_last_error());
        CHECK(status || c->n_files == 2);
        for (int number = 0; number < 2 && !status; number++)
            check_rows(c, number ? "blk.1.attn_q" : "blk.0.attn_q", (float[32]){ (float)number }, 1, 32);
        nib_checkpoint_close(c);
    }
    empty_directory();
    put_split("m-00001-of-00002.gguf", 0, 2, -1);
    put_split("m-00002-of-00002.gguf", 1, 2, -1);
    nib_checkpoint *c = open_good(at("m-00001-of-00002.gguf"));
    nib_plan *plan = NULL;
    const nib_run_options force = { .bytes = sizeof force, .force = 1 };
    CHECK_OK(nib_plan_dequantize(c, NIB_CHECKPOINT_FORMAT_GGUF, NIB_BF16, &plan));
    CHECK_FAILS(nib_plan_run(plan, at("m-00002-of-00002.gguf"), &force, NULL), NIB_ERR_MODE, "in the place of");
    CHECK_OK(nib_plan_run(plan, at("m.gguf"), &force, NULL));
    nib_plan_destroy(plan);
    nib_checkpoint_close(c);
    empty_directory();
    put_split("m-00001-of-00002.gguf", 0, 2, -1);
    put_text("m-00002-of-00002.gguf", "{}      ");
    c = NULL;
    CHECK_FAILS(nib_checkpoint_open(directory, &c), NIB_ERR_DATA, "m-00002-of-00002.gguf");
}

/* Weights of a GGUF in GGML's own blocks, and in MXFP4's: a range of rows, whole and converted. */
TEST(blocks_of_ggml)
{
    enum { R = 5, K = 64 };
    static const struct {
        uint32_t type;
        int bytes; /* of 32 elements */
    } cases[] = { { NIB_GGUF_Q8_0, 34 }, { NIB_GGUF_Q4_0, 18 }, { NIB_GGUF_MXFP4, 17 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t line = (size_t)cases[i].bytes * K / 32;
        uint8_t blocks[R * 34 * K / 32];
        for (size_t j = 0; j < sizeof blocks; j++)
            blocks[j] = (uint8_t)test_below(100); /* finite scales, whether they are F16 or E8M0 */
        nib_gguf_plan *plan = NULL;
        nib_gguf_writer *writer = NULL;
        empty_directory();
        CHECK_OK(nib_gguf_plan_create(at("m.gguf"), &plan));
        CHECK_OK(nib_gguf_put_string(plan, "general.architecture", "llama"));
        CHECK_OK(nib_gguf_declare(plan, "blk.0.attn_q.weight", cases[i].type, 2, (const int64_t[]){ R, K }));
        CHECK_OK(nib_gguf_writer_create(plan, &writer));
        CHECK_OK(nib_gguf_write(writer, 0, 0, blocks, R * line));
        CHECK_OK(nib_gguf_commit(writer));
        nib_gguf_writer_destroy(writer);
        nib_gguf_plan_destroy(plan);
        nib_checkpoint *c = open_good(at("m.gguf"));
        CHECK(c->n_weights == 1 && c->weights[0].rows == R && c->weights[0].cols == K);
        float wanted[R * K], found[3 * K];
        uint16_t narrow[3 * K], rounded[3 * K];
        for (size_t r = 0; r < R; r++) {
            if (cases[i].type != NIB_GGUF_MXFP4) {
                nib_gguf_decode(cases[i].type, blocks + r * line, K / 32, wanted + r * K);
                continue;
            }
            for (size_t k = 0; k < K; k++) { /* ggml has the second half of a block in the high nibbles */
                static const float e2m1[8] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6 };
                const uint8_t *block = blocks + r * line + k / 32 * 17;
                const uint8_t byte = block[1 + k % 16], code = k % 32 < 16 ? byte & 15 : byte >> 4;
                wanted[r * K + k] = ldexpf(code & 8 ? -e2m1[code & 7] : e2m1[code & 7], block[0] - 127);
            }
        }
        nib_array view;
        CHECK_OK(nib_array_init(&view, found, NIB_F32, 2, (const int64_t[]){ 3, K }));
        CHECK_OK(nib_checkpoint_read_rows(c, 0, 1, 3, &view));
        CHECK_BYTES(found, wanted + K, sizeof found);
        CHECK_OK(nib_array_init(&view, narrow, NIB_BF16, 2, (const int64_t[]){ 3, K }));
        CHECK_OK(nib_checkpoint_read_rows(c, 0, 2, 3, &view));
        CHECK_OK(nib_encode(NIB_BF16, wanted + 2 * K, 3 * K, rounded));
        CHECK_BYTES(narrow, rounded, sizeof narrow);
        nib_checkpoint_close(c);
    }
}

/* Names that llama.cpp has for modules, up to the longest that nib looks at. */
TEST(names_of_llama_cpp)
{
    char long_name[512], name[64];
    int64_t expert = 0;
    CHECK(nib_ck_llama_name("model.layers.3.self_attn.q_proj", name, sizeof name, &expert) &&
          !strcmp(name, "blk.3.attn_q"));
    CHECK(expert == -1 && nib_ck_llama_name("lm_head", name, sizeof name, &expert) && !strcmp(name, "output"));
    CHECK(nib_ck_llama_name("m.layers.0.mlp.experts.7.up_proj", name, sizeof name, &expert));
    CHECK_THAT(expert == 7 && !strcmp(name, "blk.0.ffn_up_exps"), "%lld, %s", (long long)expert, name);
    CHECK(!nib_ck_llama_name("sublayers.3.self_attn.q_proj", name, sizeof name, &expert));
    CHECK(nib_ck_llama_name("sublayers.1.layers.3.self_attn.q_proj", name, sizeof name, &expert));
    CHECK(!strcmp(name, "blk.3.attn_q") && !nib_ck_llama_name("layers.3.self_attn.z", name, sizeof name, &expert));
    CHECK(!nib_ck_llama_name("layers.3.self_attn.q_proj", name, sizeof "blk.3.attn_q" - 1, &expert));
    CHECK(nib_ck_llama_name("layers.3.self_attn.q_proj", name, sizeof "blk.3.attn_q", &expert));
    for (int within = 253; within < 257; within++) {
        snprintf(long_name, sizeof long_name, "layers.0.%0*d.self_attn.q_proj",
                 within - (int)strlen(".self_attn.q_proj"), 0);
        CHECK_THAT(nib_ck_llama_name(long_name, name, sizeof name, &expert) == (within <= 254), "%d", within);
    }
}

/* What a message lists is cut where its room ends. */
TEST(names_of_formats)
{
    char whole[128], text[128];
    nib_ck_written_names(NIB_ACTION_QUANTIZE, whole, sizeof whole);
    CHECK_THAT(!strcmp(whole, "compressed-tensors, modelopt or gguf"), "%s", whole);
    for (size_t bytes = 1; bytes <= strlen(whole); bytes++) {
        memset(text, '#', sizeof text);
        nib_ck_written_names(NIB_ACTION_QUANTIZE, text, bytes);
        CHECK_THAT(strlen(text) == bytes - 1 && !strncmp(text, whole, bytes - 1) && text[bytes] == '#', "%zu: %s",
                   bytes, text);
    }
}

TEST(ends_of_names)
{
    CHECK(nib_ck_ends_with("scale", "scale") && nib_ck_ends_with("a.scale", "scale") && nib_ck_ends_with("x", ""));
    CHECK(!nib_ck_ends_with("cale", "scale") && !nib_ck_ends_with("scales", "scale"));
}

TEST(gguf_files)
{
    empty_directory();
    struct packed p = pack(6, 128);
    uint8_t blocks[6 * 2 * 36];
    uint16_t plain[2 * 64];
    float inputs[2 * 64];
    random_floats(inputs, 128, 1);
    CHECK_OK(nib_encode(NIB_BF16, inputs, 128, plain));
    CHECK_OK(nib_decode(NIB_BF16, plain, 128, inputs));
    nib_gguf_nvfp4_join(p.codes, p.scales, 12, blocks);
    nib_gguf_plan *plan = NULL;
    nib_gguf_writer *writer = NULL;
    CHECK_OK(nib_gguf_plan_create(at("m.gguf"), &plan));
    CHECK_OK(nib_gguf_put_string(plan, "general.architecture", "llama"));
    CHECK_OK(nib_gguf_declare(plan, "blk.0.attn_q.weight", NIB_GGUF_NVFP4, 2, (int64_t[]){ 6, 128 }));
    CHECK_OK(nib_gguf_declare(plan, "blk.0.attn_q.scale", NIB_GGUF_F32, 1, (int64_t[]){ 1 }));
    CHECK_OK(nib_gguf_declare(plan, "blk.0.ffn_up_exps.weight", NIB_GGUF_NVFP4, 3, (int64_t[]){ 2, 3, 128 }));
    CHECK_OK(nib_gguf_declare(plan, "blk.0.ffn_up_exps.scale", NIB_GGUF_F32, 1, (int64_t[]){ 2 }));
    CHECK_OK(nib_gguf_declare(plan, "token_embd.weight", NIB_GGUF_BF16, 2, (int64_t[]){ 2, 64 }));
    CHECK_OK(nib_gguf_writer_create(plan, &writer));
    const float tensor_scales[2] = { p.g, p.g };
    CHECK_OK(nib_gguf_write(writer, 0, 0, blocks, sizeof blocks));
    CHECK_OK(nib_gguf_write(writer, 1, 0, &p.g, 4));
    CHECK_OK(nib_gguf_write(writer, 2, 0, blocks, sizeof blocks));
    CHECK_OK(nib_gguf_write(writer, 3, 0, tensor_scales, 8));
    CHECK_OK(nib_gguf_write(writer, 4, 0, plain, sizeof plain));
    CHECK_OK(nib_gguf_commit(writer));
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
    for (int as_file = 0; as_file < 3; as_file++) { /* by its directory, by its name, by its contents under another */
        if (as_file == 2)
            CHECK(rename(at("m.gguf"), at("model")) == 0);
        nib_checkpoint *c = open_good(as_file == 2 ? at("model") : as_file ? at("m.gguf") : directory);
        CHECK(c->format == NIB_CHECKPOINT_FORMAT_GGUF && c->n_weights == 4);
        check_codes(c, "blk.0.attn_q", &p);
        check_rows(c, "blk.0.attn_q", p.values, 6, 128);
        check_rows(c, "blk.0.ffn_up_exps.0", p.values, 3, 128);
        check_rows(c, "blk.0.ffn_up_exps.1", p.values + 3 * 128, 3, 128);
        check_rows(c, "token_embd", inputs, 2, 64);
        nib_checkpoint_tensor tensor = { .bytes = sizeof tensor };
        CHECK_OK(nib_checkpoint_get_tensor(c, 1, &tensor));
        CHECK(strcmp(tensor.dtype, "NVFP4") == 0 && tensor.shape[0] == 6 && tensor.shape[1] == 128);
        nib_checkpoint_close(c);
    }
    unpack(&p);
}

/* A row of more bytes than are read at once. */
TEST(wide_rows_of_gguf)
{
    enum { BLOCKS = (1 << 20) / NIB_GGUF_NVFP4_BYTES + 1, ALL = 2 * BLOCKS };
    uint8_t *stored = malloc(ALL * NIB_GGUF_NVFP4_BYTES), *wanted = malloc(ALL * NIB_GGUF_NVFP4_BYTES),
            *found = malloc(ALL * NIB_GGUF_NVFP4_BYTES);
    nib_gguf_plan *plan = NULL;
    nib_gguf_writer *writer = NULL;
    for (size_t i = 0; i < ALL * NIB_GGUF_NVFP4_BYTES; i++)
        stored[i] = (uint8_t)(i % 127);
    nib_gguf_nvfp4_split(stored, ALL, wanted, wanted + ALL * NIB_GGUF_NVFP4_CODES);
    empty_directory();
    CHECK_OK(nib_gguf_plan_create(at("m.gguf"), &plan));
    CHECK_OK(nib_gguf_put_string(plan, "general.architecture", "llama"));
    CHECK_OK(nib_gguf_declare(plan, "blk.0.attn_q.weight", NIB_GGUF_NVFP4, 2,
                              (int64_t[]){ 2, BLOCKS * NIB_GGUF_NVFP4_ELEMENTS }));
    CHECK_OK(nib_gguf_writer_create(plan, &writer));
    CHECK_OK(nib_gguf_write(writer, 0, 0, stored, ALL * NIB_GGUF_NVFP4_BYTES));
    CHECK_OK(nib_gguf_commit(writer));
    nib_gguf_writer_destroy(writer);
    nib_gguf_plan_destroy(plan);
    nib_checkpoint *c = open_good(directory);
    CHECK_OK(nib_checkpoint_read_codes(c, 0, 0, 2, found, found + ALL * NIB_GGUF_NVFP4_CODES));
    CHECK_BYTES(found, wanted, ALL * NIB_GGUF_NVFP4_BYTES);
    nib_checkpoint_close(c);
    free(stored), free(wanted), free(found);
}

/* ---- Experts ---- */

enum { E = 3, H = 32, I = 48 };

/* gate[e], up[e] are [I, H], down[e] is [H, I]; tensors are made from them in every order that is on the market. */
static float gate[E][I][H], up[E][I][H], down[E][H][I];

static void make_experts(void)
{
    random_floats(&gate[0][0][0], E * I * H, 1);
    random_floats(&up[0][0][0], E * I * H, 1);
    random_floats(&down[0][0][0], E * H * I, 1);
}

static void check_experts(const nib_checkpoint *c, const char *const parts[3])
{
    for (int e = 0; e < E; e++) {
        char name[80];
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s", e, parts[0]);
        check_rows(c, name, &gate[e][0][0], I, H);
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s", e, parts[1]);
        check_rows(c, name, &up[e][0][0], I, H);
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s", e, parts[2]);
        check_rows(c, name, &down[e][0][0], H, I);
    }
}

TEST(stacks_of_experts)
{
    static const char *const parts[3] = { "gate_proj", "up_proj", "down_proj" };
    static float gate_up[E * 2 * I * H], down_stack[E * H * I];
    make_experts();
    for (int kind = 0; kind < 3; kind++) { /* [E, 2I, H]; [E, H, 2I]; the same with gate and up alternating */
        empty_directory();
        const bool turned = kind > 0;
        for (int e = 0; e < E; e++)
            for (int n = 0; n < 2 * I; n++)
                for (int k = 0; k < H; k++) {
                    const float value = kind == 2 ? (n % 2 ? up[e][n / 2][k] : gate[e][n / 2][k])
                                                  : (n < I ? gate[e][n][k] : up[e][n - I][k]);
                    gate_up[turned ? (e * H + k) * 2 * I + n : (e * 2 * I + n) * H + k] = value;
                }
        for (int e = 0; e < E; e++)
            for (int n = 0; n < H; n++)
                for (int k = 0; k < I; k++)
                    down_stack[turned ? (e * I + k) * H + n : (e * H + n) * I + k] = down[e][n][k];
        PUT("model.safetensors",
            { "model.layers.0.mlp.experts.gate_up_proj",
              NIB_F32,
              3,
              { E, turned ? H : 2 * I, turned ? 2 * I : H },
              gate_up },
            { "model.layers.0.mlp.experts.down_proj", NIB_F32, 3, { E, turned ? I : H, turned ? H : I }, down_stack });
        put_text("config.json", kind == 2
                                    ? "{\"model_type\": \"gpt_oss\", \"hidden_size\": 32, \"intermediate_size\": 48}"
                                    : "{\"text_config\": {\"hidden_size\": 32, \"moe_intermediate_size\": 48}}");
        nib_checkpoint *c = open_good(directory);
        CHECK(c->n_weights == 3 * E && c->n_diagnostics == 0 && nib_ck_keeps_stacks(c) == (kind == 2));
        check_experts(c, parts);
        nib_weight weight = { .bytes = sizeof weight };
        CHECK_OK(nib_checkpoint_get_weight(c, 1, &weight));
        CHECK(weight.stored_bytes == 4 * I * H && strstr(weight.tensor, ".experts.gate_up_proj"));
        nib_checkpoint_close(c);
    }
    /* Square ones are told apart by the model alone. */
    empty_directory();
    PUT("model.safetensors", { "m.experts.down_proj", NIB_F32, 3, { 2, H, H }, gate_up });
    nib_checkpoint *c = open_good(directory);
    CHECK(c->n_weights == 0 && c->n_diagnostics == 1 && c->diagnostics[0].blocks);
    CHECK(strstr(c->diagnostics[0].fact, "hidden_size"));
    nib_checkpoint_close(c);
    put_text("config.json", "{\"model_type\": \"qwen3_vl_moe\", \"hidden_size\": 32, \"moe_intermediate_size\": 32}");
    c = open_good(directory);
    CHECK(c->n_weights == 2 && c->weights[0].transposed);
    nib_checkpoint_close(c);
    put_text("config.json", "{\"model_type\": \"qwen3_5_moe\", \"hidden_size\": 32, \"moe_intermediate_size\": 32}");
    c = open_good(directory);
    CHECK(c->n_weights == 2 && !c->weights[0].transposed);
    nib_checkpoint_close(c);
}

/* Names may have as many bytes as 64 times the data, and a few more: one expert more is one too many. */
TEST(stacks_of_long_names)
{
    static const uint16_t values[258];
    char a[192], name[240];
    memset(a, 'a', sizeof a);
    for (int parts = 1; parts <= 2; parts++) {
        const int64_t most = 256 / parts; /* most * parts * 192 is 16 KiB + 64 * most * parts * 2 */
        for (int more = 0; more < 2; more++) {
            empty_directory();
            snprintf(name, sizeof name, "%.191s.experts.%s", a, parts == 1 ? "down_proj" : "gate_up_proj");
            PUT("model.safetensors", { name, NIB_BF16, 3, { most + more, parts, 1 }, values });
            put_text("config.json", "{\"model_type\": \"qwen3_5_moe\", \"hidden_size\": 1}");
            nib_checkpoint *c = open_good(directory);
            CHECK_THAT(c->n_weights == (more ? 0 : 256) && c->n_diagnostics == (size_t)more, "%d, %d: %zu weights",
                       parts, more, c->n_weights);
            CHECK(!c->n_diagnostics || strstr(c->diagnostics[0].fact, "too little data for names as long as this"));
            nib_checkpoint_close(c);
        }
    }
}

/* ModelOpt keeps some stacks whole: codes [E, K/2, N], scales [E, K/16, N]. */
TEST(packed_stack)
{
    enum { N = 12, K = 64, COUNT = 2 };
    empty_directory();
    struct packed p[COUNT] = { pack(N, K), pack(N, K) };
    uint8_t codes[COUNT * K / 2 * N], scales[COUNT * K / 16 * N];
    for (int e = 0; e < COUNT; e++)
        for (int n = 0; n < N; n++) {
            for (int k = 0; k < K / 2; k++)
                codes[(e * K / 2 + k) * N + n] = p[e].codes[n * K / 2 + k];
            for (int k = 0; k < K / 16; k++)
                scales[(e * K / 16 + k) * N + n] = p[e].scales[n * K / 16 + k];
        }
    PUT("model.safetensors", { "m.experts.gate_up_proj", NIB_U8, 3, { COUNT, K / 2, N }, codes },
        { "m.experts.gate_up_proj_weight_scale", NIB_E4M3, 3, { COUNT, K / 16, N }, scales },
        { "m.experts.gate_up_proj_weight_scale_2", NIB_F32, 0, { 0 }, &p[0].g });
    put_text("config.json", "{\"model_type\": \"llama4\", \"hidden_size\": 64, \"intermediate_size\": 6}");
    nib_checkpoint *c = open_good(directory);
    CHECK(c->n_weights == 4 && c->format == NIB_CHECKPOINT_FORMAT_MODELOPT);
    for (int e = 0; e < COUNT; e++) {
        char name[40];
        snprintf(name, sizeof name, "m.experts.%d.gate_proj", e);
        check_rows(c, name, p[e].values, N / 2, K);
        snprintf(name, sizeof name, "m.experts.%d.up_proj", e);
        check_rows(c, name, p[e].values + N / 2 * K, N / 2, K);
        unpack(&p[e]);
    }
    nib_checkpoint_close(c);
}

/* Without data a tensor is no weight, and no stack of as many experts as it likes. */
TEST(tensors_without_data)
{
    empty_directory();
    PUT("model.safetensors", { "a.weight", NIB_BF16, 2, { 0, 64 }, NULL },
        { "b.weight_packed", NIB_U8, 2, { (int64_t)1 << 48, 0 }, NULL },
        { "c.experts.gate_up_proj", NIB_BF16, 3, { 1000, 0, 16 }, NULL },
        { "d.experts.down_proj", NIB_BF16, 3, { 1000, 16, 0 }, NULL },
        { "e.experts.down_proj", NIB_U8, 3, { 1000, 8, 0 }, NULL },
        { "e.experts.down_proj_weight_scale", NIB_E4M3, 3, { 1000, 1, 0 }, NULL },
        { "f.experts.down_proj_blocks", NIB_U8, 4, { 1000, 0, 1, 16 }, NULL });
    put_text("config.json", "{\"model_type\": \"gpt_oss\", \"hidden_size\": 16, \"intermediate_size\": 32}");
    nib_checkpoint *c = open_good(directory);
    CHECK_THAT(c->n_tensors == 7 && c->n_weights == 0 && c->n_diagnostics == 0, "%zu weights", c->n_weights);
    nib_checkpoint_close(c);

    static const uint32_t types[] = { NIB_GGUF_NVFP4, NIB_GGUF_MXFP4, NIB_GGUF_BF16 };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        nib_gguf_plan *plan = NULL;
        nib_gguf_writer *writer = NULL;
        CHECK_OK(nib_gguf_plan_create(at("m.gguf"), &plan));
        CHECK_OK(nib_gguf_declare(plan, "blk.0.ffn_up_exps.weight", types[i], 3, (int64_t[]){ 1000, 0, 64 }));
        CHECK_OK(nib_gguf_declare(plan, "blk.0.attn_q.weight", types[i], 2, (int64_t[]){ 1000, 0 }));
        CHECK_OK(nib_gguf_writer_create(plan, &writer));
        CHECK_OK(nib_gguf_commit(writer));
        nib_gguf_writer_destroy(writer);
        nib_gguf_plan_destroy(plan);
        c = open_good(at("m.gguf"));
        CHECK_THAT(c->n_tensors == 2 && c->n_weights == 0, "%zu weights", c->n_weights);
        nib_checkpoint_close(c);
    }
}

/* ---- Other checkpoint formats ---- */

TEST(mxfp4_blocks)
{
    static const float grid[8] = { 0, .5f, 1, 1.5f, 2, 3, 4, 6 };
    enum { EXPERTS = 2, ROWS = 8, K = 64 };
    static uint8_t blocks[EXPERTS][ROWS][K / 32][16], scales[EXPERTS][ROWS][K / 32];
    static float want[EXPERTS][2][ROWS / 2][K];
    empty_directory();
    for (size_t i = 0; i < sizeof blocks; i++)
        (&blocks[0][0][0][0])[i] = (uint8_t)test_random();
    for (size_t i = 0; i < sizeof scales; i++)
        (&scales[0][0][0])[i] = (uint8_t)(120 + test_below(15));
    for (int e = 0; e < EXPERTS; e++)
        for (int n = 0; n < ROWS; n++)
            for (int k = 0; k < K; k++) {
                const uint8_t byte = blocks[e][n][k / 32][k % 32 / 2], code = k % 2 ? byte >> 4 : byte & 15;
                want[e][n % 2][n / 2][k] =
                    (code & 8 ? -1.f : 1.f) * grid[code & 7] * ldexpf(1, scales[e][n][k / 32] - 127);
            }
    PUT("model.safetensors", { "m.experts.gate_up_proj_blocks", NIB_U8, 4, { EXPERTS, ROWS, K / 32, 16 }, blocks },
        { "m.experts.gate_up_proj_scales", NIB_U8, 3, { EXPERTS, ROWS, K / 32 }, scales });
    put_text("config.json", "{\"model_type\": \"gpt_oss\", \"hidden_size\": 64, \"intermediate_size\": 4}");
    nib_checkpoint *c = open_good(directory);
    CHECK(c->format == NIB_CHECKPOINT_FORMAT_MXFP4 && c->n_weights == 4);
    check_rows(c, "m.experts.0.gate_proj", &want[0][0][0][0], ROWS / 2, K);
    check_rows(c, "m.experts.1.up_proj", &want[1][1][0][0], ROWS / 2, K);
    nib_checkpoint_close(c);
}

TEST(fp8_blocks)
{
    enum { ROWS = 200, COLS = 160 };
    static uint8_t codes[ROWS][COLS];
    static float want[ROWS][COLS];
    const float factors[2][2] = { { 0.5f, 3e-3f }, { 7, 1e-5f } };
    empty_directory();
    for (int n = 0; n < ROWS; n++)
        for (int k = 0; k < COLS; k++) {
            codes[n][k] = (uint8_t)test_below(0x7F);
            CHECK_OK(nib_decode(NIB_E4M3, &codes[n][k], 1, &want[n][k]));
            want[n][k] *= factors[n / 128][k / 128];
        }
    PUT("model.safetensors", { "a.weight", NIB_E4M3, 2, { ROWS, COLS }, codes },
        { "a.weight_scale_inv", NIB_F32, 2, { 2, 2 }, factors });
    nib_checkpoint *c = open_good(directory);
    CHECK(c->format == NIB_CHECKPOINT_FORMAT_FP8_BLOCK && c->n_weights == 1);
    check_rows(c, "a", &want[0][0], ROWS, COLS);
    nib_checkpoint_close(c);
    PUT("model.safetensors", { "a.weight", NIB_E4M3, 2, { ROWS, COLS }, codes },
        { "a.weight_scale_inv", NIB_F32, 2, { 4, 1 }, factors });
    c = open_good(directory);
    nib_array out;
    CHECK_OK(nib_array_init(&out, want, NIB_F32, 2, (int64_t[]){ ROWS, COLS }));
    CHECK_FAILS(nib_checkpoint_read_rows(c, 0, 0, ROWS, &out), NIB_ERR_DATA, "128x128");
    nib_checkpoint_close(c);
}

/* One factor per tensor, per row, and per block under compressed-tensors' name; and those that are none of these. */
TEST(fp8_of_other_shapes)
{
    enum { ROWS = 150, COLS = 40 };
    static const struct {
        const char *scale, *input;
        nib_dtype dtype;
        int rank;
        int64_t shape[2];
        int rows; /* that share a factor; 0: rejected */
        nib_checkpoint_format format;
    } cases[] = {
        { "a.weight_scale", "a.input_scale", NIB_F32, 0, { 0 }, ROWS, NIB_CHECKPOINT_FORMAT_FP8 },
        { "a.weight_scale", "b", NIB_BF16, 1, { 1 }, ROWS, NIB_CHECKPOINT_FORMAT_FP8 },
        { "a.weight_scale", "b", NIB_BF16, 2, { ROWS, 1 }, 1, NIB_CHECKPOINT_FORMAT_FP8 },
        { "a.weight_scale", "b", NIB_F32, 1, { ROWS }, 1, NIB_CHECKPOINT_FORMAT_FP8 },
        { "a.weight_scale", "b", NIB_F32, 2, { 2, 1 }, 128, NIB_CHECKPOINT_FORMAT_FP8 },
        { "a.weight_scale_inv", "a.activation_scale", NIB_F32, 0, { 0 }, ROWS, NIB_CHECKPOINT_FORMAT_FP8_BLOCK },
        { "a.weight_scale", "b", NIB_F32, 2, { 1, ROWS }, 0, NIB_CHECKPOINT_FORMAT_FP8 },
    };
    static uint8_t codes[ROWS][COLS];
    static float want[ROWS][COLS], factors[ROWS];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t raw[4 * ROWS];
        empty_directory();
        for (int n = 0; n < ROWS; n++)
            factors[n] = (float)(1 + test_below(64)) / 4096; /* exact in BF16 */
        CHECK_OK(nib_encode(cases[i].dtype, factors, ROWS, raw));
        for (int n = 0; n < ROWS; n++)
            for (int k = 0; k < COLS; k++) {
                codes[n][k] = (uint8_t)test_below(0x7F);
                CHECK_OK(nib_decode(NIB_E4M3, &codes[n][k], 1, &want[n][k]));
                want[n][k] *= cases[i].rows ? factors[n / cases[i].rows] : 1;
            }
        PUT("model.safetensors", { "a.weight", NIB_E4M3, 2, { ROWS, COLS }, codes },
            { cases[i].scale, cases[i].dtype, cases[i].rank, { cases[i].shape[0], cases[i].shape[1] }, raw },
            { cases[i].input, NIB_F32, 0, { 0 }, factors });
        nib_checkpoint *c = open_good(directory);
        CHECK(c->format == cases[i].format && c->n_weights == 1);
        CHECK(c->tensors[nib_ck_find_tensor(c, cases[i].input)].weight == (cases[i].input[1] ? 0 : NIB_NONE));
        nib_array out;
        CHECK_OK(nib_array_init(&out, codes, NIB_F32, 2, (int64_t[]){ 1, COLS }));
        if (cases[i].rows)
            check_rows(c, "a", &want[0][0], ROWS, COLS);
        else
            CHECK_FAILS(nib_checkpoint_read_rows(c, 0, 0, 1, &out), NIB_ERR_DATA, "neither one per tensor");
        nib_checkpoint_close(c);
    }
}

/* ---- Names ---- */

TEST(patterns)
{
    static const struct {
        const char *pattern, *name;
        bool matches;
    } cases[] = {
        { "lm_head", "lm_head", true },
        { "lm_head", "model.lm_head", false },
        { "*lm_head*", "model.lm_head", true },
        { "model.layers.?.mlp*", "model.layers.3.mlp.up_proj", true },
        { "model.layers.?.mlp*", "model.layers.13.mlp.up_proj", false },
        { "a*b*c", "aXbXbc", true },
        { "a*b*c", "aXbXb", false },
        { "*", "", true },
        { "re:.*gate$", "model.mlp.gate", true },
        { "re:gate$", "model.mlp.gate", false }, /* from the start, as Python's re.match */
        { "re:model", "model.mlp.gate", true },
        { "re:^model", "model.mlp.gate", true },
        { "re:.*\\.(q|k)_proj", "a.k_proj", true },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct nib_patterns *patterns = NULL;
        uint32_t which;
        CHECK_OK(nib_patterns_create(&cases[i].pattern, 1, &patterns));
        CHECK_OK(nib_patterns_match(patterns, cases[i].name, &which));
        CHECK_THAT((which == 0) == cases[i].matches, "%s on %s", cases[i].pattern, cases[i].name);
        nib_patterns_destroy(patterns);
    }
    struct nib_patterns *patterns = NULL;
    uint32_t which;
    const char *bad = "re:(", *none = "", *slow = "re:(a+)+$";
    CHECK_FAILS(nib_patterns_create(&bad, 1, &patterns), NIB_ERR_ARG, "pattern \"re:(\"");
    CHECK_FAILS(nib_patterns_create(&none, 1, &patterns), NIB_ERR_ARG, "pattern 1 is empty");
    CHECK_OK(nib_patterns_create(&slow, 1, &patterns));
    CHECK_FAILS(nib_patterns_match(patterns, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaX", &which), NIB_ERR_ARG,
                "limit");
    nib_patterns_destroy(patterns);
    nib_patterns_destroy(NULL);
}

/* What time and memory a list may take, whoever wrote it. */
TEST(limits_of_patterns)
{
    enum { LONGEST = 4096, MANY = 1000 };
    static const char *const slow = "re:a{4000}.*.*.*[XY]", *const large = "re:(((abcd){20}){20}){7}";
    const char *list[MANY];
    char name[LONGEST + 2] = "";
    struct nib_patterns *patterns = NULL;
    uint32_t which;
    memset(name, 'a', LONGEST);
    CHECK_OK(nib_patterns_create(&slow, 1, &patterns));
    int n = 0;
    while (n < MANY && nib_patterns_match(patterns, name, &which) == NIB_OK) /* each is below the limit of one */
        n++;
    CHECK_THAT(n >= 10 && n < MANY && strstr(nib_last_error(), "take too long on all names"), "%d: %s", n,
               nib_last_error());
    nib_patterns_destroy(patterns);

    CHECK_OK(nib_patterns_create((const char *[]){ "re:a*$" }, 1, &patterns));
    CHECK_OK(nib_patterns_match(patterns, name, &which));
    CHECK(which == 0);
    name[LONGEST] = 'a';
    CHECK_FAILS(nib_patterns_match(patterns, name, &which), NIB_ERR_ARG, "the name has 4097 bytes, more than 4096");
    nib_patterns_destroy(patterns);

    for (int i = 0; i < MANY; i++)
        list[i] = large;
    CHECK_OK(nib_patterns_create(list, 10, &patterns));
    nib_patterns_destroy(patterns);
    CHECK_FAILS(nib_patterns_create(list, MANY, &patterns), NIB_ERR_ARG, "take more than 16777216 bytes of memory");
}

enum { LIST = 40, SHORT = 8 };

/* Up to 7 letters of a few, so that they meet. */
static char *draw_text(char *out, const char *letters, int64_t least)
{
    const int64_t n = least + (int64_t)test_below(SHORT - 1 - (uint64_t)least);
    for (int64_t i = 0; i < n; i++)
        out[i] = letters[test_below(strlen(letters))];
    out[n] = '\0';
    return out;
}

/* Of a list the first one counts that matches by itself, wherever it is looked for. */
TEST(lists_of_patterns)
{
    for (int round = 0; round < 300; round++) {
        static char texts[LIST][SHORT];
        const char *list[LIST];
        struct nib_patterns *all = NULL, *one[LIST];
        const size_t n = test_below(LIST + 1);
        for (size_t i = 0; i < n; i++) {
            list[i] = test_below(20) ? draw_text(texts[i], test_below(2) ? "ab" : "ab*?", 1) : "re:a.*b$";
            CHECK_OK(nib_patterns_create(&list[i], 1, &one[i]));
        }
        CHECK_OK(nib_patterns_create(list, n, &all));
        for (int i = 0; i < 50; i++) {
            char name[SHORT];
            uint32_t got, want = NIB_NONE, which = NIB_NONE;
            draw_text(name, "ab", 0);
            for (uint32_t j = 0; j < n && want == NIB_NONE; j++) {
                CHECK_OK(nib_patterns_match(one[j], name, &which));
                want = which == NIB_NONE ? NIB_NONE : j;
            }
            CHECK_OK(nib_patterns_match(all, name, &got));
            CHECK_THAT(got == want, "%s: %u, not %u", name, got, want);
        }
        nib_patterns_destroy(all);
        for (size_t i = 0; i < n; i++)
            nib_patterns_destroy(one[i]);
    }
}

struct places {
    bool found[LIST][SHORT];
    int n, most;
};

static bool note_place(void *context, size_t word, size_t at)
{
    struct places *places = context;
    CHECK(word < LIST && at < SHORT && !places->found[word][at]);
    places->found[word][at] = true;
    return ++places->n < places->most;
}

TEST(words_within_names)
{
    for (int round = 0; round < 500; round++) {
        static char texts[LIST][SHORT];
        const char *list[LIST];
        struct nib_words *words = NULL;
        const size_t n = test_below(LIST + 1);
        for (size_t i = 0; i < n; i++)
            list[i] = draw_text(texts[i], test_below(4) ? "ab" : "a\xFF", 1);
        CHECK_OK(nib_words_create(list, n, &words));
        for (int i = 0; i < 20; i++) {
            char name[SHORT];
            struct places all = { .most = INT32_MAX }, want = { .n = 0 }, first = { .most = 1 };
            draw_text(name, "ab\xFF", 0);
            for (size_t j = 0; j < n; j++) {
                size_t earlier = 0; /* the same word is one */
                while (strcmp(list[earlier], list[j]))
                    earlier++;
                const char *place = earlier == j ? strstr(name, list[j]) : NULL;
                if (place)
                    want.found[j][place - name] = true;
                want.n += place != NULL;
            }
            nib_words_find(words, name, note_place, &all);
            CHECK_THAT(all.n == want.n && !memcmp(all.found, want.found, sizeof all.found), "%s: %d, not %d", name,
                       all.n, want.n);
            nib_words_find(words, name, note_place, &first);
            CHECK(first.n == (want.n > 0));
        }
        nib_words_destroy(words);
    }
    nib_words_destroy(NULL);
}

TEST(fused_and_kept)
{
    char a[200], b[200];
    CHECK(nib_ck_fused_key("m.0.q_proj", a, sizeof a) && nib_ck_fused_key("m.0.v_proj", b, sizeof b) && !strcmp(a, b));
    CHECK(nib_ck_fused_key("m.1.q_proj", b, sizeof b) && strcmp(a, b));
    CHECK(nib_ck_fused_key("m.0.gate_proj", b, sizeof b) && strcmp(a, b));
    CHECK(!nib_ck_fused_key("m.0.o_proj", a, sizeof a) && !nib_ck_fused_key("m.0.down_proj", a, sizeof a));
    CHECK(nib_ck_fused_key("x.experts.7.w1", a, sizeof a) && nib_ck_fused_key("x.experts.7.w3", b, sizeof b) &&
          !strcmp(a, b));

    static const float x[32] = { 1 };
    empty_directory();
    PUT("model.safetensors", { "a.weight", NIB_F32, 2, { 2, 16 }, x });
    put_text("config.json", "{\"num_hidden_layers\": 61}");
    nib_checkpoint *c = open_good(directory);
    static const struct {
        const char *name;
        bool kept;
    } names[] = {
        { "lm_head", true },
        { "model.embed_tokens", true },
        { "model.layers.3.mlp.gate", true },
        { "model.layers.3.mlp.gate_proj", false },
        { "model.layers.3.mlp.shared_expert_gate", true },
        { "model.layers.3.feed_forward.router", true },
        { "model.layers.3.block_sparse_moe.gate", true },
        { "model.layers.3.self_attn.q_proj", false },
        { "model.layers.3.linear_attn.in_proj_a", true },
        { "model.layers.3.linear_attn.in_proj_qkv", false },
        { "model.layers.3.self_attn.indexer.wq_b", true },
        { "visual.blocks.0.attn.qkv", true },
        { "vision_tower.layers.0.mlp.fc1", true },
        { "multi_modal_projector.linear_1", true },
        { "model.layers.60.mlp.up_proj", false },
        { "model.layers.61.mlp.up_proj", true }, /* beyond the model's own: multi-token prediction */
        { "mtp.fc", true },
        { "model.layers.3.input_layernorm", true },
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        CHECK_THAT((nib_ck_default_keep(c, names[i].name) != NULL) == names[i].kept, "%s", names[i].name);
    CHECK(nib_ck_preset_keep(NIB_PRESET_MLP_ONLY, "m.self_attn.q_proj") &&
          !nib_ck_preset_keep(NIB_PRESET_MLP_ONLY, "m.mlp.up_proj"));
    CHECK(nib_ck_preset_keep(NIB_PRESET_EXPERTS_ONLY, "m.mlp.up_proj") &&
          !nib_ck_preset_keep(NIB_PRESET_EXPERTS_ONLY, "m.mlp.experts.0.up_proj"));
    CHECK(!nib_ck_preset_keep(NIB_PRESET_DEFAULT, "m.self_attn.q_proj"));
    nib_checkpoint_format format;
    CHECK_OK(nib_checkpoint_format_from_name("modelopt", &format));
    CHECK(format == NIB_CHECKPOINT_FORMAT_MODELOPT && !nib_checkpoint_format_name(NIB_CHECKPOINT_FORMAT_COUNT));
    CHECK_FAILS(nib_checkpoint_format_from_name("modelopt", NULL), NIB_ERR_ARG, "out is NULL");
    CHECK_FAILS(nib_checkpoint_format_from_name(NULL, &format), NIB_ERR_ARG, "name is NULL");
    CHECK_FAILS(nib_checkpoint_format_from_name("x", &format), NIB_ERR_ARG, "no checkpoint format \"x\"");
    nib_checkpoint_close(c);
}

TEST(what_readers_load)
{
    int32_t format = NIB_UNSET, scheme = NIB_UNSET;
    CHECK_OK(nib_reader_choose(NIB_READER_SGLANG, &format, &scheme));
    CHECK(format == NIB_CHECKPOINT_FORMAT_MODELOPT && scheme == NIB_SCHEME_NVFP4A16);
    scheme = NIB_UNSET, format = NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS;
    CHECK_OK(nib_reader_choose(NIB_READER_SGLANG, &format, &scheme));
    CHECK(scheme == NIB_SCHEME_NVFP4);
    scheme = NIB_SCHEME_NVFP4A16;
    CHECK_FAILS(nib_reader_choose(NIB_READER_SGLANG, &format, &scheme), NIB_ERR_UNSUPPORTED, "sglang cannot load that");
    CHECK(scheme == NIB_SCHEME_NVFP4A16 && format == NIB_CHECKPOINT_FORMAT_COMPRESSED_TENSORS);
    format = NIB_CHECKPOINT_FORMAT_GGUF;
    CHECK_FAILS(nib_reader_choose(NIB_READER_VLLM, &format, &scheme), NIB_ERR_UNSUPPORTED, "vllm does not load gguf");
    CHECK_OK(nib_reader_choose(NIB_READER_LLAMA_CPP, &format, &scheme));
    CHECK_FAILS(nib_reader_choose(NIB_READER_ANY, &format, &scheme), NIB_ERR_ARG, "reader 0");
    CHECK_FAILS(nib_reader_choose(NIB_READER_COUNT, &format, &scheme), NIB_ERR_ARG, "reader 6");
    CHECK_FAILS(nib_reader_choose(NIB_READER_VLLM, NULL, &scheme), NIB_ERR_ARG, "format");
}

TEST_MAIN

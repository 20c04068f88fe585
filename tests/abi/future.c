/* SPDX-License-Identifier: Apache-2.0 */
/* A caller of a later version: its structs are larger than the library's. */
#include "abi.h"

enum { ROWS = 32, COLS = 64 };

static float values[ROWS * COLS];
static nib_array x;
static nib_tensor *tensor, *mxfp4;

static nib_status quantized(const nib_quantizer *q, const nib_overrides *overrides, nib_tensor **out)
{
    for (int i = 0; i < ROWS * COLS; i++)
        values[i] = (float)(i % 13) - 6;
    const nib_status status = nib_array_init(&x, values, NIB_F32, 2, (const int64_t[]){ ROWS, COLS });
    return status ? status : nib_quantize(q, &x, overrides, out);
}

/* What the calls below work on. */
static void make_tensors(void)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.columnwise = 0;
    if (!tensor)
        CHECK_OK(quantized(&q, NULL, &tensor));
    CHECK_OK(nib_quantizer_init_format(&q, NIB_MXFP4));
    if (!mxfp4)
        CHECK_OK(quantized(&q, NULL, &mxfp4));
}

/* ---- Structs that are read ---- */

static void fill_quantizer(void *q)
{
    nib_quantizer_init(q);
    ((nib_quantizer *)q)->columnwise = 0; /* which neither a cast nor FSDP could build */
}

static nib_status quantize_by(void *q)
{
    nib_tensor *t = NULL;
    const nib_status status = quantized(q, NULL, &t);
    nib_tensor_destroy(t);
    return status;
}

static nib_status check_quantizer(void *q) { return nib_quantizer_check(q, NULL); }

static nib_status set_usage(void *q) { return nib_quantizer_set_usage(q, 1, 0); }

static nib_status create_by(void *q)
{
    nib_tensor *t = NULL;
    const nib_status status = nib_tensor_create(q, NIB_F32, 2, x.shape, NULL, &t);
    nib_tensor_destroy(t);
    return status;
}

static nib_status shape_by(void *q)
{
    int rank;
    int64_t shape[NIB_MAX_RANK];
    return nib_part_shape(q, NIB_ROW_DATA, 2, x.shape, &rank, shape);
}

static nib_status set_quantizer(void *q) { return nib_tensor_set_quantizer(tensor, q); }

static nib_status split_by(void *q)
{
    nib_tensor *t[2] = { NULL, NULL };
    const nib_status status = nib_split_quantize(q, &x, (const int64_t[]){ 16, 16 }, 2, t);
    nib_tensor_destroy(t[0]);
    nib_tensor_destroy(t[1]);
    return status;
}

static nib_status group_by(void *q)
{
    nib_group *group = NULL;
    const nib_status status = nib_group_create(q, NIB_F32, (const int64_t[]){ 16, 16 }, 2, COLS, &group);
    nib_group_destroy(group);
    return status;
}

static nib_status override_by(void *overrides)
{
    nib_quantizer q;
    nib_tensor *t = NULL;
    nib_quantizer_init(&q);
    const nib_status status = quantized(&q, overrides, &t);
    nib_tensor_destroy(t);
    return status;
}

static void fill_overrides(void *overrides)
{
    static const float amax = 6;
    ((nib_overrides *)overrides)->amax[0] = &amax;
}

static void fill_comm(void *comm) { memcpy(comm, nib_comm_serial(), sizeof(nib_comm)); }

static nib_status gather_over(void *comm)
{
    nib_tensor *t = NULL;
    const nib_status status = nib_all_gather_tensor(tensor, comm, &t);
    nib_tensor_destroy(t);
    return status;
}

static nib_status reduce_over(void *comm)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    q.amax_comm = comm;
    return quantize_by(&q);
}

static nib_status cast_over(const nib_comm *comm, const nib_master_options *options)
{
    nib_array master = x;
    master.rank = 1, master.shape[0] = ROWS * COLS, master.strides[0] = 1;
    const nib_array *masters[] = { &master };
    return nib_quantize_master_weights(&tensor, 1, masters, 1, (const int64_t[]){ 0 }, 1, comm, options);
}

static nib_status cast_by(void *options) { return cast_over(nib_comm_serial(), options); }

static nib_status cast_with(void *comm) { return cast_over(comm, NULL); }

static void fill_parts(void *parts)
{
    set_bytes(parts, sizeof(nib_fsdp_parts));
    CHECK_OK(nib_fsdp_extract(tensor, parts));
}

static nib_status assign(void *parts)
{
    nib_tensor *t = NULL;
    const nib_status status = nib_fsdp_assign(tensor, parts, ROWS, &t);
    nib_tensor_destroy(t);
    return status;
}

static void fill_gemm_options(void *options) { nib_gemm_options_init(options); }

static nib_status multiply_by(void *options)
{
    static float product[ROWS * ROWS];
    nib_array y;
    const nib_operand operand = { tensor, NULL, NIB_ROWWISE };
    const nib_status status = nib_array_init(&y, product, NIB_F32, 2, (const int64_t[]){ ROWS, ROWS });
    return status ? status : nib_gemm(&operand, &operand, options, &y);
}

TEST(structs_that_are_read)
{
    static const struct subject subjects[] = {
        { "nib_quantizer, quantize", sizeof(nib_quantizer), fill_quantizer, quantize_by, NULL },
        { "nib_quantizer, check", sizeof(nib_quantizer), fill_quantizer, check_quantizer, NULL },
        { "nib_quantizer, set_usage", sizeof(nib_quantizer), fill_quantizer, set_usage, NULL },
        { "nib_quantizer, create", sizeof(nib_quantizer), fill_quantizer, create_by, NULL },
        { "nib_quantizer, part_shape", sizeof(nib_quantizer), fill_quantizer, shape_by, NULL },
        { "nib_quantizer, set_quantizer", sizeof(nib_quantizer), fill_quantizer, set_quantizer, NULL },
        { "nib_quantizer, split_quantize", sizeof(nib_quantizer), fill_quantizer, split_by, NULL },
        { "nib_quantizer, group_create", sizeof(nib_quantizer), fill_quantizer, group_by, NULL },
        { "nib_overrides", sizeof(nib_overrides), fill_overrides, override_by, NULL },
        { "nib_comm, gather", sizeof(nib_comm), fill_comm, gather_over, NULL },
        { "nib_comm, amax_comm", sizeof(nib_comm), fill_comm, reduce_over, NULL },
        { "nib_comm, cast", sizeof(nib_comm), fill_comm, cast_with, NULL },
        { "nib_master_options", sizeof(nib_master_options), NULL, cast_by, NULL },
        { "nib_fsdp_parts", sizeof(nib_fsdp_parts), fill_parts, assign, NULL },
        { "nib_gemm_options", sizeof(nib_gemm_options), fill_gemm_options, multiply_by, NULL },
    };
    make_tensors();
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
        check_input(&subjects[i]);
}

/* Calls without a status: what cannot be read equals nothing and promises nothing. */
TEST(quantizers_that_are_only_asked)
{
    static const struct subject larger = { "nib_quantizer", sizeof(nib_quantizer), fill_quantizer, NULL, NULL };
    nib_quantizer q;
    fill_quantizer(&q);
    char *zeros = subject_struct(&larger, ADDED), *set = subject_struct(&larger, ADDED);
    set[sizeof q] = 1;
    const nib_quantizer *known = (const nib_quantizer *)zeros, *unknown = (const nib_quantizer *)set;
    CHECK(nib_quantizer_equal(&q, known) && nib_quantizer_hash(&q) == nib_quantizer_hash(known));
    CHECK(nib_is_requantization_safe(known) && nib_is_quantizable(known, 2, (const int64_t[]){ 32, 32 }));
    CHECK(!nib_quantizer_equal(&q, unknown) && !nib_quantizer_equal(unknown, unknown));
    CHECK(!nib_is_requantization_safe(unknown) && !nib_is_quantizable(unknown, 2, (const int64_t[]){ 32, 32 }));

    const size_t wrong[] = { 0, 8, sizeof q - 1, MOST + 1, SIZE_MAX, (size_t)0xA5A5A5A5A5A5A5A5u };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        nib_quantizer *alone = test_guarded(sizeof(size_t), true);
        set_bytes(alone, wrong[i]);
        CHECK(!nib_quantizer_equal(&q, alone) && !nib_quantizer_equal(alone, &q));
        CHECK(nib_quantizer_hash(alone) == nib_quantizer_hash(NULL));
        CHECK(!nib_is_requantization_safe(alone) && !nib_is_quantizable(alone, 2, (const int64_t[]){ 32, 32 }));
    }
}

static int agreements;

static nib_status count_agreement(void *context, nib_status status, uint64_t key)
{
    (void)context, (void)key;
    agreements++;
    return status;
}

/* A rank that rejects a quantizer tells the others where it can read over which communicator; the message stays. */
TEST(ranks_hear_of_a_quantizer_that_is_rejected)
{
    static const struct subject larger = { "nib_quantizer", sizeof(nib_quantizer), fill_quantizer, NULL, NULL };
    nib_comm comm = *nib_comm_serial();
    comm.size = 2;
    comm.agree = count_agreement;
    char *set = subject_struct(&larger, ADDED);
    ((nib_quantizer *)set)->amax_comm = &comm;
    set[sizeof(nib_quantizer)] = 1;
    nib_tensor *t = NULL;
    agreements = 0;
    CHECK_FAILS(quantized((nib_quantizer *)set, NULL, &t), NIB_ERR_UNSUPPORTED, "fields that version");
    CHECK(agreements == 1);
    CHECK_FAILS(split_by(set), NIB_ERR_UNSUPPORTED, "fields that version");
    CHECK(agreements == 2);
}

/* ---- Structs that are written ---- */

static nib_status get_metadata(void *out) { return nib_tensor_get_metadata(tensor, out); }

static int has_metadata(const void *out)
{
    const nib_metadata *m = out;
    return m->format == NIB_NVFP4 && m->rows == ROWS && m->cols == COLS && m->rowwise && !m->columnwise &&
           m->quantizer && m->quantizer->bytes == sizeof(nib_quantizer);
}

static nib_status extract(void *out) { return nib_fsdp_extract(tensor, out); }

static int has_parts(const void *out)
{
    const nib_fsdp_parts *parts = out;
    return parts->data.shape[0] == ROWS && parts->scales.shape[1] == COLS / 16 && parts->tensor_scale == 6;
}

static nib_status convert(void *out)
{
    nib_tensor *t = NULL;
    const nib_status status = nib_mxfp4_to_nvfp4(mxfp4, out, &t);
    nib_tensor_destroy(t);
    return status;
}

static int has_report(const void *out)
{
    const nib_conversion_report *report = out;
    return report->blocks == ROWS * COLS / 32 && report->inexact == 0 && report->first[15].line == 0 &&
           report->first[15].block == 0;
}

TEST(structs_that_are_written)
{
    static const struct subject subjects[] = {
        { "nib_metadata", sizeof(nib_metadata), NULL, get_metadata, has_metadata },
        { "nib_fsdp_parts", sizeof(nib_fsdp_parts), NULL, extract, has_parts },
        { "nib_conversion_report", sizeof(nib_conversion_report), NULL, convert, has_report },
    };
    make_tensors();
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
        check_output(&subjects[i]);
}

/* What an inline _init of a later header calls. */
TEST(defaults_of_a_larger_quantizer)
{
    nib_quantizer q;
    nib_quantizer_init(&q);
    char *larger = test_guarded(sizeof q + ADDED + CANARY, true);
    memset(larger, 0xEE, sizeof q + ADDED + CANARY);
    CHECK_OK(nib_quantizer_init_sized((nib_quantizer *)larger, sizeof q + ADDED, NIB_NVFP4));
    CHECK(get_bytes(larger) == sizeof q + ADDED && nib_quantizer_equal((nib_quantizer *)larger, &q));
    for (size_t i = 0; i < ADDED + CANARY; i++)
        CHECK((uint8_t)larger[sizeof q + i] == (i < ADDED ? 0 : 0xEE));
    const size_t wrong[] = { 0, 8, sizeof q - 1, MOST + 1, SIZE_MAX };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_FAILS(nib_quantizer_init_sized(test_guarded(0, true), wrong[i], NIB_NVFP4), NIB_ERR_ARG, "bytes is");
    CHECK_FAILS(nib_quantizer_init_sized(&q, sizeof q, NIB_FORMAT_COUNT), NIB_ERR_ARG, "format");
}

TEST_MAIN

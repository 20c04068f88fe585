/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_devices_storage.c - tensors of a device saved and restored, in files, by DLPack and FSDP; plain arrays and buffers.
 */
#define _GNU_SOURCE
#include "device_cases.h"
#include "dlpack_structs.h"

/* ---- Save and restore, buffers ---- */

static void run_save(struct setting *s)
{
    nib_buffer *saved[NIB_PART_COUNT] = { NULL };
    size_t n = 0, used = 0;
    CHECK_OK(nib_tensor_prepare_for_saving(s->t, saved, NIB_PART_COUNT, &n));
    CHECK(nib_tensor_device(s->t) == s->device);
    CHECK_OK(nib_tensor_restore_from_saved(s->t, saved, n, &used));
    CHECK(used == n);
    check_same(s->host, s->t, s->device);
    nib_item items[2] = { { .tensor = s->t }, { .array = s->x } };
    nib_saved list[NIB_PART_COUNT + 1];
    CHECK_OK(nib_prepare_for_saving(items, 2, list, NIB_PART_COUNT + 1, &n));
    CHECK_OK(nib_restore_from_saved(items, 2, list, n, &used));
    CHECK(used == n && items[1].array.device == s->device && items[1].array.data == s->x.data);
    check_same(s->host, s->t, s->device);
    nib_buffer *parts[NIB_PART_COUNT];
    for (int part = 0; part < NIB_PART_COUNT; part++)
        parts[part] = nib_tensor_buffer(s->t, (nib_part)part);
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_from_buffers(&s->q, s->dtype, s->rank, s->shape, parts, NIB_PART_COUNT, &t));
    check_same(s->host, t, s->device);
    nib_tensor_destroy(t);
}

TEST(save) { for_settings(run_save); }

/* What a format does not have is not looked at, wherever it is. */
TEST(parts_of_other_formats)
{
    struct setting s = setting_of(MXFP8, NIB_BF16, 2, shapes[0].shape);
    open_setting(&s);
    nib_buffer *parts[NIB_PART_COUNT], *stray = NULL;
    for (int part = 0; part < NIB_PART_COUNT; part++)
        parts[part] = nib_tensor_buffer(s.t, (nib_part)part);
    CHECK_OK(nib_buffer_create(4, NULL, &stray));
    parts[NIB_ROW_TENSOR_SCALE] = stray;
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_from_buffers(&s.q, s.dtype, s.rank, s.shape, parts, NIB_PART_COUNT, &t));
    check_same(s.host, t, s.device);
    nib_tensor_destroy(t);
    nib_buffer_release(stray);
    close_setting(&s);
}

/* ---- Files ---- */

static void run_files(struct setting *s)
{
    const char *path = path_of("w.safetensors");
    nib_file *file = NULL;
    nib_tensor *t = NULL;
    CHECK_OK(write_file(path, s->t));
    CHECK_OK(nib_file_open(path, &file));
    CHECK_OK(nib_file_read_tensor(file, "w", s->device, &t));
    check_same(s->host, t, s->device);
    nib_tensor_destroy(t);
    t = NULL;
    CHECK_OK(nib_file_read_tensor(file, "w", NULL, &t));
    check_same(s->host, t, NULL);
    nib_tensor_destroy(t);
    nib_file_close(file);
}

TEST(files) { for_settings(run_files); }

TEST(large_files)
{
    struct setting s = setting_of(FLOAT8, NIB_BF16, 2, (const int64_t[2]){ 1031, 2047 });
    open_setting(&s);
    run_files(&s);
    close_setting(&s);
}

/* ---- DLPack ---- */

/* The tensor's buffers through DLPack of one generation and back, as a tensor that shares them. */
static void exchange_parts(struct setting *s, bool versioned)
{
    nib_buffer *parts[NIB_PART_COUNT] = { NULL };
    nib_device *const other = fake_create(1);
    for (int part = 0; part < NIB_PART_COUNT; part++) {
        nib_array array = { 0 }, seen = { 0 };
        nib_buffer *none = NULL;
        if (!nib_tensor_buffer(s->t, (nib_part)part))
            continue;
        CHECK_OK(nib_tensor_part(s->t, (nib_part)part, &array));
        struct DLManagedTensor *plain = NULL;
        struct DLManagedTensorVersioned *newer = NULL;
        if (versioned)
            CHECK_OK(nib_tensor_to_dlpack_versioned(s->t, (nib_part)part, &newer));
        else
            CHECK_OK(nib_tensor_to_dlpack(s->t, (nib_part)part, &plain));
        const DLTensor *const tensor = versioned ? &newer->dl_tensor : &plain->dl_tensor;
        CHECK(tensor->device.device_type == FAKE_DLPACK_TYPE && tensor->device.device_id == 0 &&
              tensor->data == array.data);
        for (int i = 0; i < 2; i++) { /* not where it is said to be */
            nib_device *const wrong = i ? other : NULL;
            if (versioned) {
                CHECK_FAILS(nib_array_from_dlpack_versioned(newer, wrong, &seen), NIB_ERR_DEVICE, "device type 12");
                CHECK_FAILS(nib_buffer_from_dlpack_versioned(newer, wrong, &none), NIB_ERR_DEVICE, "id 0");
            } else {
                CHECK_FAILS(nib_array_from_dlpack(plain, wrong, &seen), NIB_ERR_DEVICE, "device type 12");
                CHECK_FAILS(nib_buffer_from_dlpack(plain, wrong, &none), NIB_ERR_DEVICE, "id 0");
            }
        }
        CHECK_OK(versioned ? nib_array_from_dlpack_versioned(newer, s->device, &seen)
                           : nib_array_from_dlpack(plain, s->device, &seen));
        CHECK(seen.device == s->device && (seen.data == array.data || !array.bytes) && seen.bytes == array.bytes);
        CHECK_OK(versioned ? nib_buffer_from_dlpack_versioned(newer, s->device, &parts[part])
                           : nib_buffer_from_dlpack(plain, s->device, &parts[part]));
    }
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_from_buffers(&s->q, s->dtype, s->rank, s->shape, parts, NIB_PART_COUNT, &t));
    check_same(s->host, t, s->device);
    nib_tensor_destroy(t);
    for (int part = 0; part < NIB_PART_COUNT; part++)
        nib_buffer_release(parts[part]);
    nib_device_release(other);
}

static void run_dlpack(struct setting *s)
{
    exchange_parts(s, false);
    exchange_parts(s, true);
    struct DLManagedTensor *managed = NULL;
    nib_array x = { 0 };
    nib_tensor *t = NULL;
    CHECK_OK(nib_array_to_dlpack(&s->x, NULL, &managed));
    CHECK(managed->dl_tensor.device.device_type == FAKE_DLPACK_TYPE);
    CHECK_OK(nib_array_from_dlpack(managed, s->device, &x));
    CHECK_OK(nib_quantize(&s->q, &x, NULL, &t));
    check_same(s->host, t, s->device);
    nib_tensor_destroy(t);
    managed->deleter(managed);
    CHECK_OK(nib_array_to_dlpack(&s->host_x, NULL, &managed));
    CHECK_FAILS(nib_array_from_dlpack(managed, s->device, &x), NIB_ERR_DEVICE, "is not on fake:0");
    managed->deleter(managed);
}

TEST(dlpack) { for_settings(run_dlpack); }

/* ---- FSDP ---- */

static void run_fsdp(struct setting *s)
{
    nib_fsdp_parts host_parts = { .bytes = sizeof host_parts }, parts = { .bytes = sizeof parts };
    nib_tensor *host = NULL, *t = NULL;
    const nib_status status = nib_fsdp_extract(s->host, &host_parts);
    CHECK_BOTH(status, nib_fsdp_extract(s->t, &parts));
    if (status) {
        nib_quantizer rowwise = s->q;
        rowwise.columnwise = 0;
        CHECK_OK(nib_quantize_into(&rowwise, &s->host_x, NULL, NULL, s->host));
        CHECK_OK(nib_quantize_into(&rowwise, &s->x, NULL, NULL, s->t));
        CHECK_BOTH(nib_fsdp_extract(s->host, &host_parts), nib_fsdp_extract(s->t, &parts));
    }
    if (!host_parts.data.data)
        return;
    CHECK(nib_device_same(parts.data.device, s->device) && parts.tensor_scale == host_parts.tensor_scale);
    CHECK(!parts.scales.data || nib_device_same(parts.scales.device, s->device));
    const int64_t rows = s->t->geometry.rows;
    for (int i = 0; i < 2; i++) { /* new, then in place */
        CHECK_BOTH(nib_fsdp_assign(s->host, &host_parts, rows, &host), nib_fsdp_assign(s->t, &parts, rows, &t));
        check_same(host, t, s->device);
    }
    nib_tensor_destroy(host);
    nib_tensor_destroy(t);
}

TEST(fsdp) { for_settings(run_fsdp); }

/* ---- Plain arrays ---- */

TEST(array_copy)
{
    nib_device *const device = fake_create(0), *const other = fake_create(1);
    const int64_t shape[2] = { 6, 7 };
    nib_array host = make_array(NIB_F32, 2, shape, CONTIGUOUS), zeros = make_array(NIB_F32, 2, shape, CONTIGUOUS),
              gaps = make_array(NIB_F32, 2, shape, GAPS);
    fill_array(&host);
    nib_array a = fake_array(device, &zeros), b = fake_array(device, &zeros), c = fake_array(other, &zeros),
              strided = fake_array(device, &gaps);
    CHECK_OK(nib_array_copy(&host, &a));
    CHECK_OK(nib_array_copy(&a, &b));
    CHECK_OK(nib_array_copy(&b, &c));
    CHECK_OK(nib_array_copy(&c, &zeros));
    CHECK_BYTES(host.data, zeros.data, host.bytes);
    nib_array second = a, row = host; /* the second row of each */
    second.shape[0] = row.shape[0] = 1;
    second.offset = row.offset = 7 * (int64_t)sizeof(float);
    CHECK_OK(nib_array_copy(&second, &row));
    nib_array first = zeros;
    first.shape[0] = 1;
    CHECK_OK(nib_array_copy(&second, &first));
    CHECK_BYTES(zeros.data, (char *)host.data + row.offset, 7 * sizeof(float));
    const long calls = fake_calls(device);
    CHECK_FAILS(nib_array_copy(&strided, &a), NIB_ERR_UNSUPPORTED, "C-contiguous");
    CHECK_FAILS(nib_array_copy(&a, &strided), NIB_ERR_UNSUPPORTED, "fake:0");
    CHECK_FAILS(nib_array_copy(&host, &strided), NIB_ERR_UNSUPPORTED, "from host to fake:0");
    CHECK_FAILS(nib_array_copy(&strided, &gaps), NIB_ERR_UNSUPPORTED, "from fake:0 to host");
    CHECK(fake_calls(device) == calls);
    fake_free(device, a.data);
    fake_free(device, b.data);
    fake_free(other, c.data);
    fake_free(device, strided.data);
    free(host.data);
    free(zeros.data);
    free(gaps.data);
    nib_device_release(device);
    nib_device_release(other);
    CHECK(fake_live() == 0);
}

TEST(buffers)
{
    nib_device *device = fake_create(7);
    nib_buffer *buffer = NULL, *borrowed = NULL;
    CHECK_OK(nib_buffer_create(100, device, &buffer));
    CHECK(nib_buffer_device(buffer) == device && (uintptr_t)nib_buffer_data(buffer) % 64 == 0);
    CHECK_OK(nib_buffer_borrow(nib_buffer_data(buffer), 10, device, NULL, NULL, &borrowed));
    nib_device_release(device); /* the buffers keep it */
    char bytes[100], zeros[100] = { 0 };
    fake_download(device, bytes, nib_buffer_data(buffer), sizeof bytes);
    CHECK_BYTES(bytes, zeros, sizeof bytes);
    nib_buffer_release(borrowed);
    nib_buffer_release(buffer);
    CHECK_THAT(fake_live() == 0, "%ld", fake_live());
}

TEST_MAIN

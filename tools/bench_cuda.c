/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_cuda.c - nib bench --device cuda: calls on a GPU, captured as graphs and replayed, and what its memory allows.
 *
 * The limit of an operation is the time in which a copy on the device, measured in the same run, moves the bytes that the
 * operation must read and write.
 */
#include "bench_cuda.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "cli.h"
#include "device.h"
#include "text.h"

enum what { AMAX, QUANTIZE, WHOLE, DEQUANTIZE, FAKE, FAKE_WHOLE }; /* whole: the amax is looked for too */

/* Bytes that must move for an element besides its own: codes and scales of a usage are 0.5625. */
struct operation {
    const char *name;
    enum what what;
    nib_dtype dtype;
    uint8_t rowwise, columnwise, rht, square;
    nib_rounding rounding;
    nib_scale_rule rule;
    double floor, goal; /* shares of the limit; 0: only measured */
};

static const struct operation operations[] = {
    { "amax.bf16", AMAX, NIB_BF16, 1, 0, 0, 0, 0, 0, 0.94, 0.98 },
    { "amax-rht.bf16", AMAX, NIB_BF16, 1, 1, 1, 0, 0, 0, 0, 0 },
    { "rows.bf16", QUANTIZE, NIB_BF16, 1, 0, 0, 0, 0, 0, 0.90, 0.95 },
    { "rows-whole.bf16", WHOLE, NIB_BF16, 1, 0, 0, 0, 0, 0, 0.88, 0.95 },
    { "rows-sr8.bf16", QUANTIZE, NIB_BF16, 1, 0, 0, 0, NIB_ROUND_STOCHASTIC_8, 0, 0.65, 0.85 },
    { "rows-sr24.bf16", QUANTIZE, NIB_BF16, 1, 0, 0, 0, NIB_ROUND_STOCHASTIC_24, 0, 0, 0 },
    { "both.bf16", QUANTIZE, NIB_BF16, 1, 1, 0, 0, 0, 0, 0, 0 },
    { "both-rht.bf16", QUANTIZE, NIB_BF16, 1, 1, 1, 0, 0, 0, 0.50, 0.65 },
    { "both-rht-whole.bf16", WHOLE, NIB_BF16, 1, 1, 1, 0, 0, 0, 0, 0 },
    { "both-rht-sr8.bf16", QUANTIZE, NIB_BF16, 1, 1, 1, 0, NIB_ROUND_STOCHASTIC_8, 0, 0.36, 0.50 },
    { "both-square.bf16", QUANTIZE, NIB_BF16, 1, 1, 0, 1, 0, 0, 0.72, 0.85 },
    { "columns.bf16", QUANTIZE, NIB_BF16, 0, 1, 0, 0, 0, 0, 0, 0 },
    { "dequantize.bf16", DEQUANTIZE, NIB_BF16, 1, 0, 0, 0, 0, 0, 0.80, 0.83 },
    { "dequantize.f32", DEQUANTIZE, NIB_F32, 1, 0, 0, 0, 0, 0, 0, 0 },
    { "dequantize-columns.bf16", DEQUANTIZE, NIB_BF16, 0, 1, 0, 0, 0, 0, 0, 0 },
    { "fake.bf16", FAKE, NIB_BF16, 1, 0, 0, 0, 0, 0, 0.78, 0.88 },
    { "fake-whole.bf16", FAKE_WHOLE, NIB_BF16, 1, 0, 0, 0, 0, 0, 0, 0 },
    { "4over6.bf16", QUANTIZE, NIB_BF16, 1, 0, 0, 0, 0, NIB_SCALE_4OVER6, 0, 0 },
    { "sweep.bf16", QUANTIZE, NIB_BF16, 1, 0, 0, 0, 0, NIB_SCALE_SWEEP, 0, 0 },
    { "rows.f32", QUANTIZE, NIB_F32, 1, 0, 0, 0, 0, 0, 0, 0 },
    { "rows.f16", QUANTIZE, NIB_F16, 1, 0, 0, 0, 0, 0, 0, 0 },
    { "both-rht.f32", QUANTIZE, NIB_F32, 1, 1, 1, 0, 0, 0, 0, 0 },
};

struct size {
    int64_t rows, cols;
};
static const struct size sizes[] = { { 8192, 8192 }, { 4096, 14336 }, { 1024, 1024 } };
static const struct size quick_sizes[] = { { 256, 512 } };

/* What a call works with. */
struct bench {
    const struct cuda_calls *calls;
    nib_device *device;
    const struct operation *operation;
    int repeat; /* calls in a graph, so that launching it does not count */
    nib_quantizer q;
    nib_array x, y;
    nib_buffer *values, *out, *numbers;
    nib_tensor *tensor;
    nib_overrides given;
};

static double plain_bytes(const struct operation *o) { return nib_dtype_bits(o->dtype) / 8.0; }

static double bytes_per_element(const struct operation *o)
{
    const double plain = plain_bytes(o), coded = 0.5625 * (o->rowwise + o->columnwise);
    switch (o->what) {
    case AMAX:
        return plain;
    case WHOLE:
        return 2 * plain + coded;
    case FAKE:
        return 2 * plain;
    case FAKE_WHOLE:
        return 3 * plain;
    default:
        return plain + coded;
    }
}

static nib_status enqueue_once(struct bench *b)
{
    float *const numbers = nib_buffer_data(b->numbers);
    switch (b->operation->what) {
    case AMAX:
        return nib_amax(&b->q, &b->x, (float *const[2]){ numbers + 4, numbers + 8 });
    case DEQUANTIZE:
        return nib_dequantize(b->tensor, b->operation->rowwise ? NIB_ROWWISE : NIB_COLUMNWISE, &b->x);
    case FAKE:
    case FAKE_WHOLE:
        return nib_fake_quantize(&b->q, &b->x, b->operation->what == FAKE ? &b->given : NULL, NIB_ROWWISE, &b->y);
    default:
        return nib_quantize_into(&b->q, &b->x, b->operation->what == WHOLE ? NULL : &b->given, NULL, b->tensor);
    }
}

static nib_status enqueue(void *context)
{
    struct bench *const b = context;
    nib_status status = NIB_OK;
    for (int i = 0; i < b->repeat && !status; i++)
        status = enqueue_once(b);
    return status;
}

enum { COPIES = 4 };

static nib_status copy_several(void *context)
{
    struct bench *const b = context;
    nib_status status = NIB_OK;
    for (int i = 0; i < COPIES && !status; i++)
        status = nib_array_copy(&b->x, &b->y);
    return status;
}

/* The same without a graph, where the runtime may copy in another way; many, so that waiting for them does not count. */
static nib_status time_copies(struct bench *b, double *seconds)
{
    enum { TIMES = 8 };
    nib_status status = b->calls->synchronize(b->device);
    const double begin = bench_now();
    for (int i = 0; i < TIMES && !status; i++)
        status = copy_several(b);
    if (!status)
        status = b->calls->synchronize(b->device);
    *seconds = (bench_now() - begin) / TIMES;
    return status;
}

/* An array of the device over a new buffer. */
static nib_status make_array(struct bench *b, nib_dtype dtype, const struct size *size, nib_buffer **buffer,
                             nib_array *out)
{
    const int64_t shape[2] = { size->rows, size->cols };
    nib_status status =
        nib_buffer_create((size_t)(size->rows * size->cols * nib_dtype_bits(dtype) / 8), b->device, buffer);
    if (!status)
        status = nib_array_init(out, nib_buffer_data(*buffer), dtype, 2, shape);
    out->device = b->device;
    return status;
}

/* Values as the other measurements have them, and amaxes that a caller knows. */
static nib_status make_values(struct bench *b)
{
    static const float amaxes[16] = { 4, 8 };
    nib_array host = b->x, from, to;
    host.device = NULL;
    host.data = bench_values(b->x.dtype, b->x.shape[0] * b->x.shape[1]);
    if (!host.data)
        return nib_set_error(NIB_ERR_MEMORY, "no memory for values");
    nib_status status = nib_array_copy(&host, &b->x);
    free(host.data);
    if (!status)
        status = nib_buffer_create(sizeof amaxes, b->device, &b->numbers);
    if (!status)
        status = nib_array_init(&from, (void *)(uintptr_t)amaxes, NIB_F32, 1, (const int64_t[]){ 16 });
    if (status)
        return status;
    to = from;
    to.data = nib_buffer_data(b->numbers);
    to.device = b->device;
    return nib_array_copy(&from, &to);
}

static nib_status open_bench(struct bench *b, const struct size *size)
{
    const struct operation *const o = b->operation;
    nib_quantizer_init(&b->q);
    b->q.rowwise = o->rowwise;
    b->q.columnwise = o->columnwise;
    b->q.rht = o->rht;
    b->q.block_dims[0] = o->square ? 16 : 1;
    b->q.rounding = o->rounding;
    b->q.scale_rule = o->rule;
    nib_status status = make_array(b, o->dtype, size, &b->values, &b->x);
    if (!status && (o->what == FAKE || o->what == FAKE_WHOLE))
        status = make_array(b, o->dtype, size, &b->out, &b->y);
    if (!status)
        status = make_values(b);
    const float *const numbers = nib_buffer_data(b->numbers);
    b->given = (nib_overrides){ .bytes = sizeof b->given, .amax = { numbers, o->rht ? numbers + 1 : numbers } };
    return status ? status : nib_quantize(&b->q, &b->x, NULL, &b->tensor);
}

static void close_bench(struct bench *b)
{
    nib_tensor_destroy(b->tensor);
    nib_buffer_release(b->values);
    nib_buffer_release(b->out);
    nib_buffer_release(b->numbers);
    *b = (struct bench){ .calls = b->calls, .device = b->device };
}

/* Bytes per second of a copy of 1 GiB, read and written. */
static nib_status measure_copy(struct bench *b, bool quick, double *rate)
{
    const struct size size = quick ? quick_sizes[0] : (struct size){ 32768, 16384 };
    double seconds = 0;
    nib_status status = make_array(b, NIB_BF16, &size, &b->values, &b->x);
    if (!status)
        status = make_array(b, NIB_BF16, &size, &b->out, &b->y);
    if (!status) /* wakes the clocks */
        status = b->calls->measure(b->device, copy_several, b, 5, &seconds);
    for (int i = 0; i < 6 && !status; i++) { /* as a graph, or as calls that follow one another: the best counts */
        status = i % 2 ? b->calls->measure(b->device, copy_several, b, 9, &seconds) : time_copies(b, &seconds);
        const double measured = 2.0 * COPIES * (double)(size.rows * size.cols) * 2 / seconds;
        *rate = !status && measured > *rate ? measured : *rate;
    }
    close_bench(b);
    return status;
}

static bool begins_with(const char *name, const char *filter) { return strncmp(name, filter, strlen(filter)) == 0; }

static bool is_wanted(const struct operation *o, char **filters)
{
    bool wanted = !*filters;
    for (; *filters; filters++)
        wanted |= begins_with(o->name, *filters);
    return wanted;
}

/* The first NAME with which no operation begins, or NULL. */
static const char *name_of_none(char **filters)
{
    enum { OPERATIONS = sizeof operations / sizeof *operations };
    for (; *filters; filters++) {
        int i = 0;
        while (i < OPERATIONS && !begins_with(operations[i].name, *filters))
            i++;
        if (i == OPERATIONS)
            return *filters;
    }
    return NULL;
}

/* One line, or one entry of the list. */
static void report(const struct operation *o, const struct size *size, double seconds, double rate, json_t *list)
{
    const double elements = (double)(size->rows * size->cols), bytes = elements * bytes_per_element(o);
    const double share = bytes / rate / seconds;
    char shape[48], wanted[32] = "";
    snprintf(shape, sizeof shape, "%" PRId64 "x%" PRId64, size->rows, size->cols);
    if (o->floor > 0)
        snprintf(wanted, sizeof wanted, "%.2f  %.2f", o->floor, o->goal);
    if (list)
        json_array_append_new(list,
                              json_pack("{s:s, s:I, s:I, s:f, s:f, s:f, s:f}", "operation", o->name, "rows",
                                        (json_int_t)size->rows, "cols", (json_int_t)size->cols, "seconds", seconds,
                                        "bytes", bytes, "share", share, "gelem_s", elements / seconds * 1e-9));
    else
        cli_print("%-24s %-11s %9.2f %8.0f %8.0f %6.2f   %s", o->name, shape, seconds * 1e6, elements / seconds * 1e-9,
                  bytes / seconds * 1e-9, share, wanted);
    (void)fflush(stdout);
}

static nib_status run_sizes(struct bench *b, const struct bench_cuda_options *options, double rate, json_t *list)
{
    const int count = options->quick ? 1 : 3;
    nib_status status = NIB_OK;
    for (size_t i = 0; i < sizeof operations / sizeof *operations && !status; i++)
        for (int s = 0; s < count && !status; s++) {
            const struct size *const size = options->quick ? quick_sizes : &sizes[s];
            double seconds = 0;
            b->operation = &operations[i];
            b->repeat = options->quick ? 1 : 10;
            if (!is_wanted(b->operation, options->filters))
                continue;
            status = open_bench(b, size);
            if (!status)
                status = b->calls->measure(b->device, enqueue, b, options->quick ? 3 : 15, &seconds);
            if (!status)
                report(b->operation, size, seconds / b->repeat, rate, list);
            close_bench(b);
        }
    return status;
}

enum cli_exit bench_cuda(const struct bench_cuda_options *options)
{
    struct bench b = { 0 };
    char why[1024], gpu[256] = "";
    const char *const none = name_of_none(options->filters);
    if (none) {
        cli_error("bench: no operation of a GPU begins with '%s'", none);
        return CLI_FAILED;
    }
    if (!device_open("bench", options->device, 0, &b.device))
        return CLI_FAILED;
    b.calls = device_cuda(why, sizeof why);
    json_t *const list = options->json ? json_array() : NULL;
    double rate = 0;
    const char *const colon = strchr(nib_device_name(b.device), ':');
    nib_status status = b.calls->describe(colon ? (int)strtol(colon + 1, NULL, 10) : 0, gpu, sizeof gpu);
    if (!status)
        status = measure_copy(&b, options->quick, &rate);
    if (!status && !list) {
        cli_print("%s: %s; a copy of 1 GiB moves %.0f GB/s. Graphs of %d calls, medians.", nib_device_name(b.device),
                  gpu, rate * 1e-9, options->quick ? 1 : 10);
        cli_print("%-24s %-11s %9s %8s %8s %6s   %s", "operation", "shape", "us", "Gel/s", "GB/s", "share",
                  "floor goal");
    }
    if (!status)
        status = run_sizes(&b, options, rate, list);
    if (status)
        cli_error("bench: %s", nib_last_error());
    bool written = true;
    if (list && !status) {
        json_t *const document = json_pack("{s:s, s:f, s:O}", "device", gpu, "copy_bytes_s", rate, "results", list);
        written = document && text_dump(stdout, document, JSON_INDENT(2));
        json_decref(document);
    }
    json_decref(list);
    nib_device_release(b.device);
    return status || !written ? CLI_FAILED : CLI_FINE;
}

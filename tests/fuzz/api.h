/* SPDX-License-Identifier: Apache-2.0 */
/*
 * api.h - what calls on tensors are drawn from and compared with: a few slots, each a tensor and its model in plain arrays
 * (plain.h); quantizers, shapes, values and overrides; allocations that fail.
 */
#ifndef NIB_FUZZ_API_H
#define NIB_FUZZ_API_H

#include "nib_reference.h"
#include "plain.h"
#include "test_alloc.h"
#ifdef NIB_FUZZ_CUDA
#include "nib_cuda.h"
#else
#include "fake_device.h"
#endif

enum { SLOTS = 4, PART_SPACE = 1 << 17, MANY = 4096 /* elements, where they need not be whole tiles */ };

struct slot {
    nib_tensor *t; /* NULL: free */
    struct model m;
    nib_device *device; /* NULL or `remote` */
};

static struct slot slots[SLOTS];
static uint8_t wanted[PART_SPACE], downloaded[PART_SPACE];

/* ---- A device that is not the host ---- */

static nib_device *remote;

#ifdef NIB_FUZZ_CUDA
extern long shim_allocated;

enum { PARTIAL = 1 }; /* it takes a part of the options, and its products keep to a bound */
static inline nib_device *remote_create(struct draws *d)
{
    const int ordinal = draw(d, 4) == 3; /* the shim's second one has FP4 tensor cores */
    nib_device *device = NULL;
    setenv("NIB_CUBLASLT_LIBRARY", "", 1); /* the shim's own, whatever else is there */
    require(!nib_cuda_create_stream(ordinal, &device), "a GPU");
    return device;
}
static inline int64_t remote_live(void) { return shim_allocated; }
#else
enum { PARTIAL = 0 };
static inline nib_device *remote_create(struct draws *d)
{
    (void)d;
    return fake_create(0);
}
static inline int64_t remote_live(void) { return fake_live(); }
#endif

/* Where a new tensor is: most are where the target looks for faults. */
static inline nib_device *draw_device(struct draws *d)
{
    const int n = draw(d, 4);
    return (PARTIAL ? n != 1 : n == 0) ? remote : NULL;
}

static inline nib_array bytes_at(void *data, size_t bytes, nib_device *device)
{
    nib_array array;
    require(!nib_array_init(&array, data, NIB_U8, 1, (const int64_t[1]){ (int64_t)bytes }), "bytes");
    array.device = device;
    return array;
}

/* Memory of a device with these bytes in it, and what is in it now. */
static inline nib_buffer *upload(nib_device *device, void *from, size_t bytes)
{
    nib_buffer *buffer = NULL;
    require(!nib_buffer_create(bytes, device, &buffer), "memory of the device");
    const nib_array source = bytes_at(from, bytes, NULL), target = bytes_at(nib_buffer_data(buffer), bytes, device);
    require(!nib_array_copy(&source, &target), "the way to the device");
    return buffer;
}

static inline void download(const nib_buffer *buffer, void *to)
{
    const size_t bytes = nib_buffer_bytes(buffer);
    const nib_array source = bytes_at(nib_buffer_data(buffer), bytes, nib_buffer_device(buffer)),
                    target = bytes_at(to, bytes, NULL);
    allocations_left = -1;
    require(!nib_array_copy(&source, &target), "the way back");
}

/* ---- A call that may run out of memory ---- */

static bool injected;

static inline void begin(struct draws *d)
{
    const int n = draw(d, 32);
    injected = n < 8;
    allocations_left = injected ? n : -1;
}

/* Whether it did what it should; a call that failed has said why, and failed where it should. */
static inline bool done(nib_status status, bool accepted, const char *what)
{
    allocations_left = -1;
    if ((status == NIB_ERR_MEMORY && injected) || (status == NIB_ERR_UNSUPPORTED && PARTIAL))
        return false;
    if (status)
        require(!accepted && *nib_last_error(), what);
    else
        require(accepted, what);
    return !status;
}

/* ---- Every tensor is what its model is ---- */

static const nib_part parts_of[2][KINDS] = { { NIB_ROW_DATA, NIB_ROW_SCALE, NIB_ROW_TENSOR_SCALE },
                                             { NIB_COL_DATA, NIB_COL_SCALE, NIB_COL_TENSOR_SCALE } };

static inline void check_parts(const nib_tensor *t, const struct model *m, const nib_device *device)
{
    for (int usage = 0; usage < 2; usage++)
        for (int kind = 0; kind < KINDS; kind++) {
            const nib_buffer *buffer = nib_tensor_buffer(t, parts_of[usage][kind]);
            require((buffer != NULL) == (m->part[usage][kind] != NULL), "a part that is there or not");
            if (!buffer)
                continue;
            const size_t bytes = part_bytes(m, usage, kind, wanted, sizeof wanted);
            require(nib_buffer_bytes(buffer) == bytes, "the size of a part");
            require(nib_buffer_device(buffer) == device, "the device of a part");
            if (device)
                download(buffer, downloaded);
            require(!bytes || !memcmp(device ? downloaded : nib_buffer_data(buffer), wanted, bytes),
                    "the bytes of a part");
        }
}

static inline void check_slot(const struct slot *s)
{
    nib_metadata facts = { .bytes = sizeof facts };
    const struct model *m = &s->m;
    require(!nib_tensor_get_metadata(s->t, &facts), "facts");
    require(facts.format == m->q.format && facts.dtype == m->dtype && facts.rank == m->rank && facts.rows == m->rows &&
                facts.cols == m->cols && !memcmp(facts.shape, m->shape, sizeof m->shape),
            "format, dtype and shape");
    require(facts.rowwise == has(m, 0) && facts.columnwise == has(m, 1) &&
                facts.columnwise_valid == (has(m, 1) && !m->stale),
            "usages");
    require(nib_quantizer_equal(facts.quantizer, &m->q), "the quantizer");
    require(nib_tensor_device(s->t) == s->device, "the device");
    check_parts(s->t, m, s->device);
}

/* Buffers are shared where arrays are, and nowhere else. */
static inline void check_sharing(const struct slot *a, const struct slot *b)
{
    for (int usage = 0; usage < 2; usage++)
        for (int kind = 0; kind < KINDS; kind++) {
            const nib_part part = parts_of[usage][kind];
            const struct plain *p = a->m.part[usage][kind], *o = b->m.part[usage][kind];
            if (p && o)
                require((nib_tensor_buffer(a->t, part) == nib_tensor_buffer(b->t, part)) == (p == o), "sharing");
        }
}

static inline void check_all(void)
{
    for (int i = 0; i < SLOTS; i++) {
        if (!slots[i].t)
            continue;
        check_slot(&slots[i]);
        for (int j = 0; j < i; j++)
            if (slots[j].t)
                check_sharing(&slots[i], &slots[j]);
    }
}

static inline void free_slot(struct slot *s)
{
    if (!s->t)
        return;
    nib_tensor_destroy(s->t);
    drop_all(&s->m);
    *s = (struct slot){ 0 };
}

/* A result goes to a place of its own. */
static inline void keep(struct draws *d, nib_tensor *t, struct model m, nib_device *device)
{
    struct slot *s = &slots[draw(d, SLOTS)];
    free_slot(s);
    *s = (struct slot){ t, m, device };
}

/* ---- What is drawn ---- */

static inline bool now_and_then(struct draws *d) { return draw(d, 6) == 1; }

/* Most options exclude others: but for some quantizers, what would be rejected stays as it was. */
static inline void vary_quantizer(struct draws *d, nib_quantizer *q)
{
    const uint64_t which = draw_bytes(d, 3);
    const bool careful = draw(d, 4) != 0;
#define VARY(bit, field, value)                      \
    if (which >> (bit)&1) {                          \
        const nib_quantizer before = *q;             \
        q->field = value;                            \
        if (careful && nib_quantizer_check(q, NULL)) \
            *q = before;                             \
    }
    VARY(0, rowwise, (uint8_t)draw(d, 2))
    VARY(1, columnwise, (uint8_t)draw(d, 2))
    VARY(2, swizzled, (uint8_t)draw(d, 2))
    VARY(3, row_scaled, (uint8_t)draw(d, 2))
    VARY(4, rht, (uint8_t)draw(d, 2))
    VARY(5, rht_rowwise, (uint8_t)draw(d, 2))
    VARY(6, rht_sign_mask, (uint16_t)draw_bytes(d, 2))
    VARY(7, block_dims[0], draw(d, 2) ? q->block_dims[1] : 1)
    VARY(8, scale_rule, (nib_scale_rule)draw(d, NIB_SCALE_RULE_COUNT))
    VARY(9, rounding, (nib_rounding)draw(d, NIB_ROUNDING_COUNT))
    VARY(10, dialect, (nib_dialect)draw(d, NIB_DIALECT_COUNT))
    VARY(11, tensor_scale_rule, (nib_tensor_scale_rule)draw(d, NIB_TENSOR_SCALE_RULE_COUNT))
    VARY(12, min_block_scale, draw(d, 2) ? 0x1p-6f : 0)
    VARY(13, error_mode, (nib_error_mode)draw(d, NIB_ERROR_MODE_COUNT))
    VARY(14, fast_error, (uint8_t)draw(d, 2))
    VARY(15, e4m3_max, draw(d, 2) ? 256 : 448)
    VARY(16, seed, draw_bytes(d, 2))
    VARY(17, offset, draw_bytes(d, 2))
    VARY(18, origin[0], 16 * draw(d, 4))
    VARY(19, origin[1], 16 * draw(d, 4))
    VARY(20, pow2_scales, (uint8_t)draw(d, 2))
    VARY(21, mx_rule, (nib_mx_rule)draw(d, NIB_MX_RULE_COUNT))
    VARY(22, element, (nib_dtype)(draw(d, 2) ? NIB_E5M2 : NIB_E4M3))
    VARY(23, no_tensor_scale, (uint8_t)draw(d, 2))
#undef VARY
}

static inline nib_quantizer draw_quantizer(struct draws *d)
{
    static const nib_format formats[] = { NIB_NVFP4, NIB_NVFP4,        NIB_NVFP4, NIB_NVFP4,
                                          NIB_MXFP8, NIB_FLOAT8_BLOCK, NIB_MXFP4, NIB_FLOAT8 };
    nib_quantizer q;
    require(!nib_quantizer_init_format(&q, formats[draw(d, 8)]), "defaults");
    if (draw(d, 4))
        vary_quantizer(d, &q);
    return q;
}

static inline int draw_shape(struct draws *d, int64_t shape[3])
{
    static const int64_t dims[] = { 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 64, 80, 128, 130, 0 };
    const int kind = draw(d, 24), rank = 1 + kind % 3; /* most are small: time goes with elements */
    const int64_t most = kind < 18 ? MANY / 8 : MANY;
    if (PARTIAL && kind >= 22) {
        shape[0] = 128;
        shape[1] = kind == 22 ? 64 : 128;
        return 2;
    }
    int64_t elements = 1;
    for (int i = 0; i < rank; i++) {
        shape[i] = dims[draw(d, 16)];
        elements *= shape[i] ? shape[i] : 1;
        if (elements > most) {
            elements /= shape[i];
            shape[i] = 1;
        }
    }
    return rank;
}

/* Values: a contiguous copy for the model, and the array that a call gets. */
struct values {
    _Alignas(64) uint8_t plain[4 * ELEMENTS], memory[16 * ELEMENTS];
    nib_dtype dtype;
    nib_array array;
    nib_buffer *uploaded;
};
static struct values given;

BEGIN_PLAIN
static inline float draw_value(uint64_t seed, int64_t i, int kind)
{
    static const float special[] = { __builtin_nanf(""), __builtin_inff(), -__builtin_inff(), 3.4e38f, -0.0f, 1e-45f };
    uint64_t z = seed + (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z ^= z >> 27;
    const float uniform = (float)(int32_t)(z >> 32) * 0x1p-30f;
    switch (kind) {
    case 0:
        return 0;
    case 1:
        return uniform * 1e-38f;
    case 2:
        return uniform * 1e30f;
    case 3:
        return z % 16 ? uniform : special[z / 16 % 6];
    case 4:
        return (float)(int)(z % 13) - 6; /* on the grid and between */
    default:
        return uniform;
    }
}

static inline void fill_values(uint64_t seed, int kind, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = draw_value(seed, i, kind);
}

/* Strides of the array in memory: contiguous, with gaps, backwards, or the first dims last. */
static inline void draw_strides(struct draws *d, nib_array *a)
{
    const int kind = draw(d, 8), gap = kind == 1 ? 3 : 0;
    int64_t step = 1;
    for (int n = 0; n < a->rank; n++) {
        const int i = kind == 2 ? n : a->rank - 1 - n;
        a->strides[i] = step;
        step *= (a->shape[i] ? a->shape[i] : 1) + (n ? 0 : gap);
    }
    const int64_t width = nib_dtype_bits(a->dtype) / 8;
    int64_t reach = 0, first = 0;
    for (int i = 0; i < a->rank; i++) {
        const int64_t last = a->shape[i] ? a->shape[i] - 1 : 0;
        reach += last * a->strides[i];
        if (kind == 3) {
            first += last * a->strides[i];
            a->strides[i] = -a->strides[i];
        }
    }
    a->bytes = (size_t)((reach + 1) * width);
    a->offset = (size_t)(first * width);
}

static inline int64_t count_of(const nib_array *a)
{
    int64_t n = 1;
    for (int i = 0; i < a->rank; i++)
        n *= a->shape[i];
    return n;
}

/* Elements between their places in memory and a contiguous copy, one way or the other. */
static inline void move_elements(const nib_array *a, uint8_t *memory, uint8_t *plain, bool to_memory)
{
    const size_t width = (size_t)nib_dtype_bits(a->dtype) / 8;
    const int64_t n = count_of(a), inner = a->rank ? a->shape[a->rank - 1] : 1,
                  step = a->rank ? a->strides[a->rank - 1] * (int64_t)width : 0;
    for (int64_t line = 0; inner && line < n / inner; line++) {
        int64_t at = 0, rest = line;
        for (int i = a->rank - 2; i >= 0; i--) {
            at += rest % a->shape[i] * a->strides[i];
            rest /= a->shape[i];
        }
        uint8_t *place = memory + (int64_t)a->offset + at * (int64_t)width;
        for (int64_t i = 0; i < inner; i++, place += step, plain += width)
            if (width == 4)
                memcpy(to_memory ? place : plain, to_memory ? plain : place, 4);
            else
                memcpy(to_memory ? place : plain, to_memory ? plain : place, 2);
    }
}
END_PLAIN

static inline void draw_values(struct draws *d, int rank, const int64_t *shape, nib_device *device)
{
    static const nib_dtype dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
    struct values *v = &given;
    v->dtype = dtypes[draw(d, 3)];
    const uint64_t seed = draw_bytes(d, 2);
    const int kind = draw(d, 8);
    require(!nib_array_init(&v->array, v->memory, v->dtype, rank, shape), "an array");
    draw_strides(d, &v->array);
    require(v->array.bytes <= sizeof v->memory, "space for values");
    static float drawn[ELEMENTS];
    const int64_t n = count_of(&v->array);
    fill_values(seed, kind, drawn, n);
    require(!nib_encode(v->dtype, drawn, (size_t)n, v->plain), "values");
    move_elements(&v->array, v->memory, v->plain, true);
    v->uploaded = NULL;
    if (device) {
        v->uploaded = upload(device, v->memory, v->array.bytes);
        v->array.data = nib_buffer_data(v->uploaded);
        v->array.device = device;
    }
}

static inline void drop_values(void)
{
    nib_buffer_release(given.uploaded);
    given.uploaded = NULL;
}

/* Overrides on the host, which have a model; others would have to be uploaded. */
struct given_overrides {
    nib_overrides o;
    float amax, scale, importance[MOST_LINES];
    uint64_t offset;
};

static inline const nib_overrides *draw_overrides(struct draws *d, const nib_quantizer *q, int64_t cols, bool on_host,
                                                  struct given_overrides *g)
{
    g->o = (nib_overrides){ .bytes = sizeof g->o };
    const int kind = on_host ? draw(d, 8) : 0;
    const bool shares = !q->row_scaled && !q->rht && !q->rht_rowwise;
    g->amax = (float)draw(d, 100) / 8;
    g->scale = (float)(1 + draw(d, 100)) / 8;
    g->offset = draw_bytes(d, 2);
    if (kind == 1 && shares && forms[q->format].tensor_scales)
        g->o.amax[0] = g->o.amax[1] = &g->amax;
    if (kind == 2)
        g->o.offset = &g->offset;
    if (kind == 3 && q->format == NIB_FLOAT8)
        g->o.scale = &g->scale;
    if (kind == 4 && q->scale_rule == NIB_SCALE_SWEEP && q->rowwise && !q->columnwise && !q->rht_rowwise &&
        q->format == NIB_NVFP4 && cols > 0) {
        for (int64_t i = 0; i < cols; i++)
            g->importance[i] = 0.25f * (float)(1 + (i * 7 + (int)g->offset) % 9);
        require(!nib_importance_normalize(g->importance, cols, g->importance), "importance");
        g->o.importance = g->importance;
        g->o.importance_count = cols;
    }
    return &g->o;
}

#endif

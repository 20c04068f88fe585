/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernels.c - every kernel of every instruction set that this machine has, against the scalar one, bit for bit.
 *
 *     test_kernels [--list | --bench] [NAME]
 *
 * NAME picks the checks whose name holds it; a name is operation.slot.mode.set, such as quantize.nvfp4.sweep.avx2.
 * --list only prints them. --bench times those that pass: a kernel that fails is not worth a figure.
 * NIB_SEED=n replaces the seed. NIB_ROUNDS=n goes n times through all combinations; NIB_CAMPAIGN=1 200 times.
 *
 * Inputs and outputs lie against pages that nobody may touch, in front of them or behind. Outputs begin as random
 * bytes, the same for both kernels, and are compared whole, so that a byte written in the wrong place shows. Data is
 * chosen to be unkind. That all this finds a broken kernel is checked first, with kernels broken on purpose.
 */
#include "test.h"

#include <float.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "format/codec.h"
#include "kernels/kernels.h"
#include "base/os.h"
#include "tensor/quantize.h"

static const nib_dtype input_dtypes[] = { NIB_F32, NIB_BF16, NIB_F16 };
enum { DTYPES = sizeof input_dtypes / sizeof *input_dtypes };

static int64_t width_of(nib_dtype dtype) { return nib_dtype_bits(dtype) / 8; }

/* ---- What is checked ---- */

/* A way to quantize. Dialects other than te have one way only; `any` stands for formats that have few options. */
struct mode {
    const char *name;
    nib_dialect dialect;
    nib_scale_rule rule;
    nib_rounding rounding;
    bool weighted; /* by the importance of channels */
};

static const struct mode nvfp4_modes[] = {
    { "nearest", NIB_DIALECT_TE, NIB_SCALE_RTN, NIB_ROUND_NEAREST, false },
    { "stochastic8", NIB_DIALECT_TE, NIB_SCALE_RTN, NIB_ROUND_STOCHASTIC_8, false },
    { "stochastic24", NIB_DIALECT_TE, NIB_SCALE_RTN, NIB_ROUND_STOCHASTIC_24, false },
    { "unbiased", NIB_DIALECT_TE, NIB_SCALE_RTN, NIB_ROUND_STOCHASTIC_UNBIASED, false },
    { "4over6", NIB_DIALECT_TE, NIB_SCALE_4OVER6, NIB_ROUND_NEAREST, false },
    { "sweep", NIB_DIALECT_TE, NIB_SCALE_SWEEP, NIB_ROUND_NEAREST, false },
    { "weighted", NIB_DIALECT_TE, NIB_SCALE_SWEEP, NIB_ROUND_NEAREST, true },
    { "gist", NIB_DIALECT_GIST, NIB_SCALE_RTN, NIB_ROUND_NEAREST, false },
    { "torchao", NIB_DIALECT_TORCHAO, NIB_SCALE_RTN, NIB_ROUND_NEAREST, false },
    { "modelopt", NIB_DIALECT_MODELOPT, NIB_SCALE_RTN, NIB_ROUND_NEAREST, false },
    { "compressed-tensors", NIB_DIALECT_COMPRESSED_TENSORS, NIB_SCALE_RTN, NIB_ROUND_NEAREST, false },
    { NULL, NIB_DIALECT_TE, NIB_SCALE_RTN, NIB_ROUND_NEAREST, false },
};
enum { NVFP4_MODES = sizeof nvfp4_modes / sizeof *nvfp4_modes - 1 };
static const struct mode plain_modes[] = {
    { "all", NIB_DIALECT_TE, NIB_SCALE_RTN, NIB_ROUND_NEAREST, false },
    { NULL, NIB_DIALECT_TE, NIB_SCALE_RTN, NIB_ROUND_NEAREST, false },
};

struct check;
struct verdict;

struct operation {
    const char *name;
    int slots;
    size_t offset; /* of the operation's row in the table */
    void (*check)(const struct check *check, struct verdict *v);
};

/* One line of --list. */
struct check {
    char name[96];
    const struct operation *operation;
    int slot; /* index into the operation's row of the table */
    const struct mode *mode;
    const struct nib_kernels *kernels;
    bool is_scalar;
};

/* A comparison is over at the first difference; `why` says which. */
struct verdict {
    bool failed;
    char why[256];
};

__attribute__((format(printf, 2, 3))) static void differs(struct verdict *v, const char *format, ...)
{
    if (v->failed)
        return;
    v->failed = true;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(v->why, sizeof v->why, format, arguments);
    va_end(arguments);
}

static bool fills(const struct nib_kernels *kernels, const struct operation *operation, int slot)
{
    void (*function)(void);
    memcpy(&function, (const char *)kernels + operation->offset + (size_t)slot * sizeof function, sizeof function);
    return function != NULL;
}

/* How often all combinations are gone through; each time with other sizes and data. NIB_ROUNDS is for emulators. */
static int least_rounds = 1;

static int rounds(void)
{
    const char *wanted = getenv("NIB_ROUNDS");
    const int n = wanted ? atoi(wanted) : getenv("NIB_CAMPAIGN") ? 200 : SANITIZED ? 1 : 3;
    return n > least_rounds ? n : least_rounds;
}

/* The scalar kernel that a slot is compared with, and the format that it is asked to do. */
#define REFERENCE(operation, format)                                             \
    (nib_kernels_scalar.operation[format] ? nib_kernels_scalar.operation[format] \
                                          : nib_kernels_scalar.operation[NIB_GENERIC_FORMAT])

/* A slot for any format is asked for one that has none of its own. */
static nib_format some_format(const struct check *check)
{
    if (check->slot != NIB_GENERIC_FORMAT)
        return (nib_format)check->slot;
    nib_format format;
    do
        format = (nib_format)test_below(NIB_FORMAT_COUNT);
    while (fills(check->kernels, check->operation, (int)format));
    return format;
}

/* ---- Memory ---- */

enum { ARENA_BYTES = 4 << 20 };

/* Those of the rowwise usage; the columnwise one has as many after them. */
enum arena { INPUT, CODES, CODES_WANTED, SCALES, SCALES_WANTED, LEVELS };
enum { OF_A_COPY = LEVELS - INPUT, IMPORTANCE = INPUT + 2 * OF_A_COPY + 1, ARENAS };

static enum arena arena_of(enum arena arena, nib_usage usage) { return (enum arena)(arena + (int)usage * OF_A_COPY); }

/* Memory of so many bytes against a forbidden page. Each arena is used again and again, since a process may have only
 * so many mappings. */
static void *place(enum arena arena, int64_t bytes, bool at_end)
{
    static char *memory[ARENAS][2];
    if (bytes > ARENA_BYTES) {
        fprintf(stderr, "test_kernels: an arena of %d bytes is too small for %lld\n", (int)ARENA_BYTES,
                (long long)bytes);
        exit(2);
    }
    if (!memory[arena][at_end])
        memory[arena][at_end] = test_guarded(ARENA_BYTES, at_end);
    return memory[arena][at_end] + (at_end ? ARENA_BYTES - bytes : 0);
}

static void fill_random(void *memory, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++)
        ((uint8_t *)memory)[i] = (uint8_t)test_random();
}

/* Outputs come in pairs, got and wanted, that begin as the same random bytes; so do a few on the side where there is no
 * forbidden page. */
struct outputs {
    char *got, *wanted;
    char *got_all, *wanted_all;
    int64_t all;
};

static struct outputs place_outputs(enum arena arena, int64_t bytes, bool at_end)
{
    enum { MARGIN = 64 };
    struct outputs out = { .all = bytes + MARGIN };
    out.got_all = place(arena, out.all, at_end);
    out.wanted_all = place((enum arena)(arena + 1), out.all, at_end);
    out.got = out.got_all + (at_end ? MARGIN : 0);
    out.wanted = out.wanted_all + (at_end ? MARGIN : 0);
    fill_random(out.got_all, out.all);
    memcpy(out.wanted_all, out.got_all, (size_t)out.all);
    return out;
}

static void compare(struct verdict *v, const char *what, const struct outputs *out)
{
    const uint8_t *a = (const uint8_t *)out->got_all, *b = (const uint8_t *)out->wanted_all;
    const int64_t bytes = out->all;
    for (int64_t i = 0; i < bytes; i++)
        if (a[i] != b[i]) {
            differs(v, "%s: byte %lld of %lld is %02x, not %02x", what, (long long)i, (long long)bytes, a[i], b[i]);
            return;
        }
}

/* ---- Data ---- */

enum data_kind {
    NORMAL,
    ROWS_OF_SIZES,
    BITS,
    RUNS,
    TIES,
    TIES_8,
    SUBNORMAL,
    LARGE,
    TINY,
    ZEROS,
    SPRINKLED,
    GRID,
    DATA_KINDS
};

static float random_bits(void) { return nib_float((uint32_t)test_random()); }

static float special(void)
{
    static const uint32_t specials[] = {
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
        0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x33800000, 0x3F800000,
    };
    return nib_float(specials[test_below(sizeof specials / sizeof *specials)]);
}

/* Where rounding decides: midpoints and values of E2M1 and their neighbors, under powers of two. */
static float tie(void)
{
    static const float points[] = { 0, 0.25f, 0.5f, 0.75f, 1, 1.25f, 1.5f, 1.75f, 2, 2.5f, 3, 3.5f, 4, 5, 6, 7 };
    const float x = points[test_below(16)] * ldexpf(1, (int)test_below(6) - 3);
    const uint32_t neighbour = nib_bits(x) + (uint32_t)test_below(3) - 1;
    const float y = x == 0 || test_below(2) ? x : nib_float(neighbour);
    return test_below(2) ? -y : y;
}

/* The same for E4M3 and E5M2: sixteenths of a power of two, down to where the codes are subnormal. */
static float tie_8(void)
{
    const float x = ldexpf((float)(16 + test_below(17)), (int)test_below(44) - 36);
    const float y = test_below(2) ? x : nib_float(nib_bits(x) + (uint32_t)test_below(3) - 1);
    return test_below(2) ? -y : y;
}

static float draw(enum data_kind kind, float size, float last)
{
    switch (kind) {
    case NORMAL:
        return test_normal();
    case ROWS_OF_SIZES:
        return test_normal() * size;
    case BITS:
        return random_bits();
    case RUNS:
        return test_below(8) ? last : test_below(2) ? tie() : special();
    case TIES:
        return tie();
    case TIES_8:
        return tie_8();
    case SUBNORMAL:
        return nib_float((uint32_t)test_random() & 0x80FFFFFFu);
    case LARGE:
        return nib_float(((uint32_t)test_random() & 0x80FFFFFFu) | 0x7E000000u);
    case TINY: /* their squares are a few units of the smallest subnormal: errors tie */
        return test_normal() * 0x1p-73f;
    case ZEROS:
        return test_below(40) ? (test_below(2) ? -0.0f : 0.0f) : test_normal();
    default:
        return test_below(12) ? test_normal() : special();
    }
}

static void store_as(void *x, int64_t i, nib_dtype dtype, float value)
{
    const uint16_t half = dtype == NIB_BF16 ? nib_bf16_from_f32(value) : nib_f16_from_f32(value);
    memcpy((char *)x + i * width_of(dtype), dtype == NIB_F32 ? (const void *)&value : (const void *)&half,
           (size_t)width_of(dtype));
}

/* Numbers of one kind; sizes change from piece to piece, so that blocks differ. */
static void fill(void *x, int64_t n, nib_dtype dtype, enum data_kind kind)
{
    float size = 1, last = 1, step = 1;
    for (int64_t i = 0; i < n; i++) {
        if (i % 16 == 0)
            size = ldexpf(1, (int)test_below(24) - 16);
        if (i % 32 == 0)
            step = 1 + (float)test_below(64) / 64;
        /* What 4 bits of another format left: values on a grid, whose errors under two scales are often the same. */
        last = kind == GRID ? ((float)test_below(16) - 8) * step : draw(kind, size, last);
        if (kind == BITS) { /* the patterns of the dtype, its own NaNs among them */
            const uint32_t bits = (uint32_t)test_random();
            memcpy((char *)x + i * width_of(dtype), &bits, (size_t)width_of(dtype));
        } else {
            store_as(x, i, dtype, last);
        }
    }
}

static enum data_kind some_kind(void) { return (enum data_kind)test_below(DATA_KINDS); }

/* ---- absmax: one slot per dtype ---- */

static void check_absmax(const struct check *check, struct verdict *v)
{
    const nib_dtype dtype = (nib_dtype)check->slot;
    for (int i = 0; i < 400 * rounds() && !v->failed; i++) {
        const int64_t n = i < 200 ? i : test_below(i % 16 ? 3000 : 70000);
        const bool at_end = test_below(4) != 0; /* there the address is as odd as n */
        void *x = place(INPUT, n * width_of(dtype), at_end);
        fill(x, n, dtype, some_kind());
        if (test_below(4) == 0 && n) /* the largest is anywhere, also last */
            store_as(x, test_below(2) ? n - 1 : test_below(n), dtype, test_below(2) ? 60000.0f : INFINITY);
        const float wanted = nib_kernels_scalar.absmax[dtype](x, n), got = check->kernels->absmax[dtype](x, n);
        if (nib_bits(wanted) != nib_bits(got))
            differs(v, "n %lld: %a, not %a", (long long)n, (double)got, (double)wanted);
    }
}

/* ---- Panels ---- */

/* The options of a comparison, what follows from them, and where everything lies. */
struct trial {
    nib_quantizer q;
    nib_usage usage;
    nib_dtype dtype;
    struct nib_geometry geometry;
    struct nib_coding coding;
    struct nib_panel panel;
    struct nib_target target;
    char text[160];
};

/* As quantize.c makes it. */
static struct nib_coding coding_of(const nib_quantizer *q, nib_usage usage, nib_dtype input)
{
    const bool rowwise = usage == NIB_ROWWISE;
    const struct nib_format_facts *facts = nib_format_of(q);
    return (struct nib_coding){ .usage = usage,
                                .block = facts->block,
                                .tile_lines = q->block_dims[0] ? q->block_dims[0] : 1,
                                .scale_bytes = nib_dtype_bits(facts->scale) / 8,
                                .rht = nib_usage_has_rht(q, usage),
                                .sign_mask = q->rht_sign_mask,
                                .dialect = nib_dialect_of(q),
                                .rules = nib_rules_of(q, input),
                                .scale_rule = q->scale_rule,
                                .error_mode = q->error_mode,
                                .fast_error = q->fast_error,
                                .floor_code = nib_e4m3_from_f32(q->min_block_scale),
                                .rounding = q->rounding,
                                .seed = q->seed,
                                .offset = q->offset,
                                .origin_line = q->origin[rowwise ? 0 : 1],
                                .origin_block = facts->block ? q->origin[rowwise ? 1 : 0] / facts->block : 0 };
}

/* One of the digits of a mixed-radix number, so that a loop over numbers is a loop over all combinations. */
static int digit(int *number, int radix)
{
    const int d = *number % radix;
    *number /= radix;
    return d;
}

enum {
    NVFP4_VARIANTS = 2 * DTYPES * 3 * 3 * 3 * 2 * 2 * 2 * 2 * 2 * 2,
    PLAIN_VARIANTS = 2 * DTYPES * 2 * 2 * 2 * 2 * 2
};

/* Variant `number` of a mode of NVFP4; false where the options do not go together, or one of them decides nothing. */
static bool nvfp4_variant(const struct mode *mode, int number, struct trial *t)
{
    static const float floors[] = { 0, 0x1p-9f, 0.5f };
    nib_quantizer *q = &t->q;
    nib_quantizer_init(q);
    q->dialect = mode->dialect;
    q->scale_rule = mode->rule;
    q->rounding = mode->rounding;
    t->usage = (nib_usage)digit(&number, 2);
    t->dtype = input_dtypes[digit(&number, DTYPES)];
    const int shape = digit(&number, 3); /* 1x16, 1x16 transformed, 16x16 */
    q->rht = q->rht_rowwise = shape == 1;
    q->block_dims[0] = shape == 2 ? 16 : 1;
    q->tensor_scale_rule = (nib_tensor_scale_rule)digit(&number, 3);
    q->min_block_scale = floors[digit(&number, 3)];
    q->swizzled = (uint8_t)digit(&number, 2);
    q->row_scaled = (uint8_t)digit(&number, 2);
    q->error_mode = (nib_error_mode)digit(&number, 2);
    q->fast_error = (uint8_t)digit(&number, 2);
    q->e4m3_max = digit(&number, 2) ? 256 : 448;
    q->no_tensor_scale = (uint8_t)digit(&number, 2);
    if (mode->rule != NIB_SCALE_4OVER6 && (q->error_mode || q->fast_error))
        return false;
    if (mode->weighted && (t->usage == NIB_COLUMNWISE || shape != 0))
        return false;
    return !nib_quantizer_load(q, q);
}

static bool plain_variant(nib_format format, int number, struct trial *t)
{
    nib_quantizer *q = &t->q;
    (void)nib_quantizer_init_format(q, format);
    const struct nib_format_facts *facts = nib_format_of(q);
    t->usage = (nib_usage)digit(&number, 2);
    t->dtype = input_dtypes[digit(&number, DTYPES)];
    q->element = facts->elements[digit(&number, 2)];
    q->block_dims[0] = digit(&number, 2) ? facts->block : facts->block ? 1 : 0;
    q->swizzled = (uint8_t)digit(&number, 2);
    q->pow2_scales = (uint8_t)digit(&number, 2);
    q->mx_rule = digit(&number, 2) ? NIB_MX_FLOOR : NIB_MX_CEIL;
    return !nib_quantizer_load(q, q);
}

/* The random stream's numbers: small ones, and those whose sums carry. */
static void some_stream(nib_quantizer *q)
{
    q->seed = test_random();
    q->offset = test_below(2) ? (uint64_t)test_below(8) : test_random();
    for (int axis = 0; axis < 2; axis++)
        q->origin[axis] = test_below(2) ? 16 * test_below(4) : 16 * test_below(1 << 26);
    if (test_below(4) == 0)
        q->offset = UINT64_MAX - (uint64_t)test_below(4);
}

/* A part of an axis of n elements: it begins at a block, and ends at one or where the axis ends. */
static void some_part(int64_t n, int64_t block, int64_t *first, int64_t *count)
{
    const int64_t blocks = nib_ceil_div(n, block), begin = test_below(2) ? 0 : test_below(blocks);
    const int64_t end = test_below(2) ? blocks : begin + 1 + test_below(blocks - begin);
    *first = begin * block;
    *count = nib_min(end * block, n) - *first;
}

/* Now and then so long that kernels that take many blocks at a time take more than one turn. */
static int64_t some_size(int64_t block, bool whole)
{
    if (!whole && test_below(16) == 0) /* a single row or column, whose strides tell nothing */
        return 1;
    const int64_t limit = test_below(8) ? 5 * block : test_below(8) ? 20 * block : 10240;
    const int64_t n = 1 + test_below(limit);
    return whole || test_below(2) ? nib_round_up(n, block) : n;
}

/* The panel of a matrix of this shape that the kernel gets. */
static void make_panel_of(struct trial *t, const int64_t shape[2])
{
    const int64_t block = nib_max(nib_format_of(&t->q)->block, 16);
    if (nib_geometry_of(&t->q, 2, shape, &t->geometry)) {
        fprintf(stderr, "test_kernels: %s\n", nib_last_error());
        exit(2);
    }
    t->coding = coding_of(&t->q, t->usage, t->dtype);
    t->panel = (struct nib_panel){ .dtype = t->dtype };
    some_part(shape[0], block, &t->panel.row, &t->panel.rows);
    some_part(shape[1], block, &t->panel.col, &t->panel.cols);
    t->panel.stride = t->panel.cols + (test_below(2) ? 0 : test_below(70));

    const int64_t n = (t->panel.rows - 1) * t->panel.stride + t->panel.cols;
    void *x = place(INPUT, n * width_of(t->dtype), test_below(4) != 0);
    t->panel.x = x;
}

static void make_panel(struct trial *t)
{
    const int64_t block = nib_max(nib_format_of(&t->q)->block, 16);
    const bool along_rows = t->usage == NIB_ROWWISE;
    const bool transformed = nib_usage_has_rht(&t->q, t->usage);
    int64_t shape[2] = { some_size(block, transformed && !along_rows), some_size(block, transformed && along_rows) };
    if (shape[0] * shape[1] > 25600) /* one long side is enough */
        shape[along_rows ? 0 : 1] = 1 + test_below(shape[along_rows] > 2000 ? 3 : 20);
    make_panel_of(t, shape);
}

/* The amax that the tensor scales are made from: mostly the data's, now and then one that fits badly, or not at all. */
static float some_amax(float data, enum data_kind kind, const struct nib_rules *rules)
{
    const int64_t choice = test_below(16);
    if ((kind == TIES || kind == TIES_8) && choice < 12) /* then factors are powers of two, and ties stay ties */
        return rules->full_scale * ldexpf(1, (int)test_below(3) - 1);
    if (choice == 0)
        return nib_abs(special());
    return choice == 1 ? data * ldexpf(1, (int)test_below(40) - 20) : data;
}

static void make_tensor_scales(struct trial *t, float amax, enum data_kind kind)
{
    const struct nib_usage_geometry *g = &t->geometry.usage[t->usage];
    const struct nib_dialect_facts *dialect = t->coding.dialect;
    t->target.tensor_scale_per_line = t->q.row_scaled;
    t->target.scale = 1;
    t->target.tensor_scales = NULL;
    if (!g->tensor_scales)
        return;
    float *tensor_scales = place(arena_of(LEVELS, t->usage), g->tensor_scales_bytes, true);
    for (int64_t i = 0; i < g->tensor_scales; i++) {
        const float a = some_amax(amax, kind, &t->coding.rules);
        if (dialect->scale_of)
            t->target.scale = dialect->scale_of(a, &t->coding.rules);
        tensor_scales[i] = dialect->scale_of ? 1.0f / t->target.scale : dialect->tensor_scale_of(a, &t->coding.rules);
    }
    t->target.tensor_scales = tensor_scales;
}

static void describe(struct trial *t, enum data_kind kind)
{
    const struct nib_panel *p = &t->panel;
    snprintf(t->text, sizeof t->text,
             "%s %s%s%s%s%s, data %d, %lldx%lld at %lld,%lld of %lldx%lld stride %lld, tensor scale %d, error %d%s",
             t->usage == NIB_ROWWISE ? "row" : "col", nib_dtype_name(t->dtype), t->coding.rht ? " rht" : "",
             t->coding.tile_lines > 1 ? " square" : "", t->q.swizzled ? " swizzled" : "",
             t->q.row_scaled ? " per line" : "", (int)kind, (long long)p->rows, (long long)p->cols, (long long)p->row,
             (long long)p->col, (long long)t->geometry.rows, (long long)t->geometry.cols, (long long)p->stride,
             (int)t->q.tensor_scale_rule, (int)t->q.error_mode, t->q.fast_error ? " fast" : "");
}

static enum data_kind fill_panel(struct trial *t)
{
    const enum data_kind kind = some_kind();
    const int64_t n = (t->panel.rows - 1) * t->panel.stride + t->panel.cols;
    fill((void *)t->panel.x, n, t->dtype, kind);
    describe(t, kind);
    return kind;
}

/* ---- absmax_lines ---- */

static void check_absmax_lines(const struct check *check, struct verdict *v)
{
    const struct mode *nearest = &nvfp4_modes[0];
    for (int i = 0; i < 240 * rounds() && !v->failed; i++) {
        struct trial t = { .dtype = NIB_F32 };
        (void)nvfp4_variant(nearest, i % (2 * DTYPES * 2), &t); /* copies, dtypes, transformed or not */
        t.q.rht_sign_mask = test_below(2) ? NIB_RHT_SIGN_MASK : (uint16_t)test_random();
        make_panel(&t);
        (void)fill_panel(&t);
        const int64_t lines = t.usage == NIB_ROWWISE ? t.panel.rows : t.panel.cols, bytes = lines * 4;
        const struct outputs out = place_outputs(SCALES, bytes, test_below(2));
        float *got = (float *)(void *)out.got, *wanted = (float *)(void *)out.wanted;
        for (int64_t line = 0; line < lines; line++)
            got[line] = wanted[line] = test_below(2) ? 0 : nib_abs(test_normal());
        REFERENCE(absmax_lines, NIB_NVFP4)(&t.panel, &t.coding, wanted);
        check->kernels->absmax_lines[check->slot](&t.panel, &t.coding, got);
        compare(v, t.text, &out);
    }
}

/* ---- quantize ---- */

/* What becomes of a copy: by the kernel, and by the reference. */
struct coded {
    struct outputs codes, scales;
    struct nib_target got, wanted;
};

/* The amax is that of all numbers, padding included, or of the first row: then the others are clipped. */
static float panel_amax(const struct trial *t)
{
    const int64_t rows = test_below(4) ? t->panel.rows : 1;
    return nib_kernels_scalar.absmax[t->dtype](t->panel.x, (rows - 1) * t->panel.stride + t->panel.cols);
}

static struct coded place_coded(struct trial *t, float amax, enum data_kind kind)
{
    const struct nib_usage_geometry *g = &t->geometry.usage[t->usage];
    const bool at_end = test_below(4) != 0;
    make_tensor_scales(t, amax, kind);
    t->target.geometry = g;
    struct coded coded = { .codes = place_outputs(arena_of(CODES, t->usage), g->data_bytes, at_end),
                           .scales = place_outputs(arena_of(SCALES, t->usage), g->scales_bytes, at_end),
                           .got = t->target,
                           .wanted = t->target };
    coded.got.codes = (uint8_t *)coded.codes.got;
    coded.wanted.codes = (uint8_t *)coded.codes.wanted;
    coded.got.scales = coded.scales.got;
    coded.wanted.scales = coded.scales.wanted;
    return coded;
}

static void compare_coded(struct verdict *v, const struct trial *t, const struct coded *coded)
{
    char what[200];
    snprintf(what, sizeof what, "scales, %s", t->text);
    compare(v, what, &coded->scales);
    snprintf(what, sizeof what, "codes, %s", t->text);
    compare(v, what, &coded->codes);
}

/* The importance of all columns, against a forbidden page: mostly as it is made of mean squares, zeros among them; now and
 * then any values that calls accept. */
static const float *some_importance(int64_t cols)
{
    float *importance = place((enum arena)IMPORTANCE, cols * 4, test_below(4) != 0);
    const int64_t way = test_below(5);
    for (int64_t i = 0; i < cols; i++) {
        const float square = test_normal() * test_normal() * ldexpf(1, (int)test_below(20) - 10);
        const bool absent = way == 1 ? test_below(2) : way == 2 ? i != cols / 2 : way == 3 && i / 16 % 2;
        importance[i] = absent ? 0 : nib_abs(square);
        if (way == 4)
            importance[i] = nib_float(1 + (uint32_t)test_below(0x7F7FFFFF));
    }
    if (way != 4 && nib_importance_normalize(importance, cols, importance)) {
        fprintf(stderr, "test_kernels: %s\n", nib_last_error());
        exit(2);
    }
    return importance;
}

static void compare_quantize(const struct check *check, struct trial *t, struct verdict *v)
{
    make_panel(t);
    if (check->mode->weighted)
        t->coding.importance = some_importance(t->geometry.cols);
    const enum data_kind kind = fill_panel(t);
    const struct coded coded = place_coded(t, panel_amax(t), kind);
    REFERENCE(quantize, t->q.format)(&t->panel, &t->coding, &coded.wanted);
    check->kernels->quantize[check->slot](&t->panel, &t->coding, &coded.got);
    compare_coded(v, t, &coded);
}

static void check_quantize(const struct check *check, struct verdict *v)
{
    const bool nvfp4 = check->slot == NIB_NVFP4;
    const int variants = nvfp4 ? NVFP4_VARIANTS : PLAIN_VARIANTS;
    for (int i = 0; i < variants * rounds() && !v->failed; i++) {
        struct trial t = { .dtype = NIB_F32 };
        const nib_format format = some_format(check);
        if (!(nvfp4 ? nvfp4_variant(check->mode, i % variants, &t) : plain_variant(format, i % variants, &t)))
            continue;
        t.q.rht_sign_mask = test_below(2) ? NIB_RHT_SIGN_MASK : (uint16_t)test_random();
        some_stream(&t.q);
        compare_quantize(check, &t, v);
    }
}

/* ---- quantize_both ---- */

/* Mostly what has a kernel of its own, and panels so wide that it takes them in more than one go. */
static void check_quantize_both(const struct check *check, struct verdict *v)
{
    const int64_t most = SANITIZED ? 20000 : 100000;
    for (int i = 0; i < 200 * rounds() && !v->failed; i++) {
        struct trial t = { .dtype = NIB_F32 };
        const struct mode *mode = &nvfp4_modes[test_below(8) ? 0 : test_below(NVFP4_MODES)];
        while (!nvfp4_variant(mode, (int)test_below(NVFP4_VARIANTS), &t))
            ;
        t.q.rht_rowwise = t.q.rht && test_below(8) == 0;
        some_stream(&t.q);
        int64_t shape[2] = { 1 + test_below(test_below(3) ? 70 : 700), 1 + test_below(test_below(3) ? 300 : 1500) };
        for (int axis = 0; axis < 2; axis++)
            if (t.q.rht || test_below(2))
                shape[axis] = nib_round_up(shape[axis], 16);
        if (shape[0] * shape[1] > most)
            shape[0] = nib_max(16, most / shape[1] / 16 * 16);
        make_panel_of(&t, shape);
        const enum data_kind kind = fill_panel(&t);
        struct nib_coding coding[2];
        struct nib_target got[2];
        struct coded coded[2];
        for (int usage = 0; usage < 2; usage++) {
            t.usage = (nib_usage)usage;
            t.coding = coding[usage] = coding_of(&t.q, t.usage, t.dtype);
            coded[usage] = place_coded(&t, panel_amax(&t), kind);
            got[usage] = coded[usage].got;
            nib_kernels_scalar.quantize[NIB_NVFP4](&t.panel, &coding[usage], &coded[usage].wanted);
        }
        check->kernels->quantize_both[check->slot](&t.panel, coding, got);
        for (int usage = 0; usage < 2; usage++) {
            t.usage = (nib_usage)usage;
            t.coding = coding[usage];
            describe(&t, kind);
            compare_coded(v, &t, &coded[usage]);
        }
    }
}

/* ---- decode ---- */

/* All of the scales' bits, scales of most tensors, all numbers, all but zero with few that are none, and those of a
 * tensor of zeros. */
enum { SCALE_KINDS = 5 };

static void fill_scales(uint8_t *scales, int64_t bytes, int kind)
{
    static const uint8_t others[] = { 0, 0x7F, 0x80, 0xFF };
    for (int64_t i = 0; i < bytes; i++)
        scales[i] = kind == 0        ? (uint8_t)test_random()
                    : kind == 1      ? (uint8_t)(0x30 + test_below(0x20))
                    : kind == 2      ? (uint8_t)test_below(0x7F)
                    : kind == 4      ? 0
                    : test_below(64) ? (uint8_t)(1 + test_below(0x7E))
                                     : others[test_below(4)];
}

static void check_decode(const struct check *check, struct verdict *v)
{
    static const float tensor_scales[] = { 1,         0,     FLT_MIN, FLT_MAX,  INFINITY, NAN,
                                           0x1p-140f, -1.5f, 0x1p30f, 0x1p-30f, 2688.0f,  0x1.234568p-3f };
    for (int i = 0; i < 1200 * rounds() && !v->failed; i++) {
        struct trial t = { .dtype = NIB_F32 };
        const nib_format format = some_format(check);
        (void)nib_quantizer_init_format(&t.q, format);
        t.q.element = nib_format_of(&t.q)->elements[test_below(2)];
        t.coding = coding_of(&t.q, NIB_ROWWISE, NIB_F32);
        if (nib_format_of(&t.q)->nvfp4_options)
            t.coding.rules.tensor_scale = (nib_tensor_scale)(i % 3); /* amax, decode, encode */
        const nib_dtype dtype = input_dtypes[i / 3 % DTYPES];
        const bool stream = i / 9 % 2, packed = nib_dtype_bits(t.coding.rules.element) == 4, at_end = test_below(2);
        const int64_t near = test_below(3) ? 0 : test_below(3) - 1; /* whole blocks, one less or one more */
        const int64_t most = test_below(8) ? 80 : 700; /* blocks; of many, kernels may know all scales beforehand */
        const int64_t n = test_below(4) ? nib_max(16 * test_below(most) + near, 0) : test_below(16 * most),
                      bytes = n * width_of(dtype);
        const int64_t blocks = t.coding.block ? nib_ceil_div(n, t.coding.block) : 0;
        const int64_t code_bytes = packed ? nib_ceil_div(n, 2) : n, scale_bytes = blocks * t.coding.scale_bytes;
        uint8_t *codes = place(INPUT, code_bytes, test_below(4) != 0);
        uint8_t *scales = place(LEVELS, scale_bytes, test_below(4) != 0);
        fill_random(codes, code_bytes);
        fill_scales(scales, scale_bytes, (int)test_below(SCALE_KINDS));
        const struct outputs out = place_outputs(CODES, bytes, at_end);
        const int64_t choice = test_below(24);
        const float tensor_scale = choice < 12   ? tensor_scales[choice]
                                   : choice < 16 ? random_bits()
                                                 : nib_abs(test_normal());
        REFERENCE(decode, format)(out.wanted, dtype, codes, scales, n, tensor_scale, &t.coding, stream);
        check->kernels->decode[check->slot](out.got, dtype, codes, scales, n, tensor_scale, &t.coding, stream);
        snprintf(t.text, sizeof t.text, "%s n %lld, tensor scale %a, kind %d%s", nib_dtype_name(dtype), (long long)n,
                 (double)tensor_scale, (int)t.coding.rules.tensor_scale, stream ? ", stream" : "");
        compare(v, t.text, &out);
    }
}

/* ---- inverse: one slot per dtype ---- */

static void check_inverse_rht(const struct check *check, struct verdict *v)
{
    for (int i = 0; i < 300 * rounds() && !v->failed; i++) {
        const int64_t n = 16 * test_below(test_below(4) ? 40 : 100);
        float *x = place(INPUT, n * 4, test_below(4) != 0);
        fill(x, n, NIB_F32, some_kind());
        const uint16_t mask = test_below(2) ? NIB_RHT_SIGN_MASK : (uint16_t)test_random();
        const struct outputs out = place_outputs(CODES, n * width_of((nib_dtype)check->slot), test_below(2));
        nib_kernels_scalar.inverse_rht[check->slot](out.wanted, x, n, mask);
        check->kernels->inverse_rht[check->slot](out.got, x, n, mask);
        char what[64];
        snprintf(what, sizeof what, "n %lld, mask %04x", (long long)n, mask);
        compare(v, what, &out);
    }
}

/* ---- transpose ---- */

static void check_transpose(const struct check *check, struct verdict *v)
{
    const int64_t bits = nib_dtype_bits((nib_dtype)check->slot);
    for (int i = 0; i < 600 * rounds() && !v->failed; i++) {
        const int64_t rows = test_below(4) ? test_below(150) : 16 * test_below(12),
                      cols = test_below(4) ? test_below(150) : 64 * test_below(5);
        const int64_t in_bytes = nib_ceil_div(cols * bits, 8), out_bytes = nib_ceil_div(rows * bits, 8);
        const int64_t in_stride = in_bytes + (test_below(2) ? 0 : test_below(40)),
                      out_stride = out_bytes + (test_below(2) ? 0 : test_below(40));
        const int64_t in_all = rows ? (rows - 1) * in_stride + in_bytes : 0,
                      out_all = cols ? (cols - 1) * out_stride + out_bytes : 0;
        uint8_t *in = place(INPUT, in_all, test_below(4) != 0);
        fill_random(in, in_all);
        const struct outputs out = place_outputs(CODES, out_all, test_below(2));
        nib_kernels_scalar.transpose[check->slot](in, in_stride, rows, cols, (uint8_t *)out.wanted, out_stride);
        check->kernels->transpose[check->slot](in, in_stride, rows, cols, (uint8_t *)out.got, out_stride);
        char what[128];
        snprintf(what, sizeof what, "%lldx%lld, strides %lld and %lld", (long long)rows, (long long)cols,
                 (long long)in_stride, (long long)out_stride);
        compare(v, what, &out);
    }
}

/* ---- Timing ---- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { BENCH_ROWS = 128, BENCH_COLS = 1024, BENCH_N = BENCH_ROWS * BENCH_COLS, BENCH_RUNS = 21 };

/* One thing to time, so small that it stays in the second-level cache. */
struct job {
    const struct check *check;
    struct trial *t;
    const struct nib_kernels *kernels;
    int slot;
    void *out;
};

static float sink;

static void run_job(const struct job *job)
{
    const struct trial *t = job->t;
    const char *name = job->check->name;
    if (strncmp(name, "absmax.", 7) == 0)
        sink = job->kernels->absmax[job->slot](t->panel.x, BENCH_N);
    else if (strncmp(name, "absmax_lines.", 13) == 0)
        job->kernels->absmax_lines[job->slot](&t->panel, &t->coding, job->out);
    else if (strncmp(name, "quantize.", 9) == 0)
        job->kernels->quantize[job->slot](&t->panel, &t->coding, &t->target);
    else if (strncmp(name, "inverse.", 8) == 0)
        job->kernels->inverse_rht[job->slot](job->out, t->panel.x, BENCH_N, NIB_RHT_SIGN_MASK);
    else if (strncmp(name, "transpose.", 10) == 0)
        job->kernels->transpose[job->slot](t->panel.x, BENCH_COLS * nib_dtype_bits((nib_dtype)job->slot) / 8,
                                           BENCH_ROWS, BENCH_COLS, job->out,
                                           BENCH_ROWS * nib_dtype_bits((nib_dtype)job->slot) / 8);
    else
        job->kernels->decode[job->slot](job->out, t->dtype, t->target.codes, t->target.scales, BENCH_N, 1.0f,
                                        &t->coding, false);
}

/* Seconds of one call: median, and the distance between the quartiles as a share of it. */
static double time_job(const struct job *job, double *spread)
{
    double seconds[BENCH_RUNS];
    run_job(job);
    for (int i = 0; i < BENCH_RUNS; i++) {
        const double start = now();
        run_job(job);
        seconds[i] = now() - start;
    }
    qsort(seconds, BENCH_RUNS, sizeof *seconds, by_value);
    const double median = seconds[BENCH_RUNS / 2];
    *spread = (seconds[3 * BENCH_RUNS / 4] - seconds[BENCH_RUNS / 4]) / median;
    return median;
}

static void *bench_memory(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) {
        fprintf(stderr, "test_kernels: no memory\n");
        exit(2);
    }
    return memory;
}

static void bench_one(const struct check *check, struct trial *t)
{
    const int64_t shape[2] = { BENCH_ROWS, BENCH_COLS };
    (void)nib_geometry_of(&t->q, 2, shape, &t->geometry);
    const struct nib_usage_geometry *g = &t->geometry.usage[t->usage];
    static float tensor_scale = 4;
    void *x = bench_memory(BENCH_N * 4), *out = bench_memory(BENCH_N * 4);
    fill(x, BENCH_N, t->dtype, NORMAL);
    memset(out, 0, BENCH_N * 4);
    t->coding = coding_of(&t->q, t->usage, t->dtype);
    t->panel =
        (struct nib_panel){ .x = x, .dtype = t->dtype, .stride = BENCH_COLS, .rows = BENCH_ROWS, .cols = BENCH_COLS };
    t->target = (struct nib_target){ .codes = bench_memory((size_t)g->data_bytes),
                                     .scales = bench_memory((size_t)g->scales_bytes + 64),
                                     .geometry = g,
                                     .tensor_scales = &tensor_scale,
                                     .scale = 1 };
    memset(t->target.scales, 0x38, (size_t)g->scales_bytes);
    fill_random(t->target.codes, g->data_bytes);

    struct job job = { check, t, check->kernels, check->slot, out };
    double spread, scalar_spread;
    const double seconds = time_job(&job, &spread);
    job.kernels = &nib_kernels_scalar;
    if (!fills(&nib_kernels_scalar, check->operation, check->slot))
        job.slot = NIB_GENERIC_FORMAT;
    const double scalar = check->is_scalar ? seconds : time_job(&job, &scalar_spread);
    printf("%-36s %-3s %-4s%-4s %9.3f Gelem/s  +-%4.1f %%  %7.1f of scalar\n", check->name,
           t->usage == NIB_ROWWISE ? "row" : "col", nib_dtype_name(t->dtype), t->coding.rht ? " rht" : "",
           BENCH_N / seconds * 1e-9, 50 * spread, scalar / seconds);
    free(x);
    free(out);
    free(t->target.codes);
    free(t->target.scales);
}

/* Variants of a check that are worth a line: both usages, every dtype, transformed or not. Both copies at once are for
 * matrices that are larger than the cache (nib bench). */
static void bench_check(const struct check *check)
{
    if (check->operation->check == check_quantize_both)
        return;
    const bool lines = strncmp(check->name, "absmax_lines.", 13) == 0,
               quantizes = strncmp(check->name, "quant", 5) == 0,
               fixed = strncmp(check->name, "transpose.", 10) == 0 || strncmp(check->name, "inverse.", 8) == 0;
    for (int usage = 0; usage < (lines || quantizes ? 2 : 1); usage++)
        for (int d = 0; d < DTYPES; d++)
            for (int rht = 0; rht < (lines || quantizes ? 2 : 1); rht++) {
                struct trial t = { .usage = (nib_usage)usage, .dtype = input_dtypes[d] };
                nib_quantizer_init(&t.q);
                if (check->operation->slots == NIB_FORMAT_SLOTS && check->slot < NIB_FORMAT_COUNT && !lines)
                    (void)nib_quantizer_init_format(&t.q, (nib_format)check->slot);
                t.q.dialect = check->mode->dialect;
                t.q.scale_rule = check->mode->rule;
                t.q.rounding = check->mode->rounding;
                t.q.rht = t.q.rht_rowwise = (uint8_t)rht;
                if (strncmp(check->name, "absmax.", 7) == 0 && t.dtype != (nib_dtype)check->slot)
                    continue;
                if (fixed && d > 0) /* the slot says what comes out */
                    continue;
                if (nib_quantizer_load(&t.q, &t.q) == NIB_OK)
                    bench_one(check, &t);
            }
}

/* ---- The list ---- */

#define X(operation, count) { #operation, count, offsetof(struct nib_kernels, operation), check_##operation },
static const struct operation operations[] = { NIB_KERNELS(X) };
#undef X
enum { OPERATIONS = sizeof operations / sizeof *operations };

static struct check checks[512];
static int check_count;

static void add_check(const char *isa, const struct nib_kernels *kernels, const struct operation *operation, int slot,
                      const struct mode *mode, bool named)
{
    struct check *check = &checks[check_count++];
    *check = (struct check){ .operation = operation, .slot = slot, .mode = mode, .kernels = kernels };
    check->is_scalar = strcmp(isa, "scalar") == 0;
    const char *name = operation->slots == NIB_DTYPE_COUNT ? nib_dtype_name((nib_dtype)slot)
                       : slot == NIB_GENERIC_FORMAT        ? "any"
                                                           : nib_format_name((nib_format)slot);
    snprintf(check->name, sizeof check->name, "%s.%s%s%s.%s", operation->name, name, named ? "." : "",
             named ? mode->name : "", isa);
}

static void list_kernels(const char *isa, const struct nib_kernels *kernels)
{
    for (const struct operation *operation = operations; operation < operations + OPERATIONS; operation++)
        for (int slot = 0; slot < operation->slots; slot++) {
            const bool modes = operation->check == check_quantize && slot == NIB_NVFP4;
            for (const struct mode *mode = modes ? nvfp4_modes : plain_modes; mode->name; mode++)
                if (fills(kernels, operation, slot) && check_count < (int)(sizeof checks / sizeof *checks))
                    add_check(isa, kernels, operation, slot, mode, modes);
        }
}

/* A forbidden page ends the program: say at least whose fault it was. A sanitizer has more to say. */
static const struct check *running;

static void on_fault(int number)
{
    static const char words[] = " touched memory that is not its own\n";
    if (running && write(STDERR_FILENO, running->name, strlen(running->name)) > 0 &&
        write(STDERR_FILENO, words, sizeof words - 1) > 0)
        running = NULL;
    signal(number, SIG_DFL);
    (void)raise(number);
}

static struct verdict run_check(const struct check *check)
{
    struct verdict v = { 0 };
    running = check;
    test_state = test_seed;
    const nib_fpenv saved = nib_fpenv_enter();
    check->operation->check(check, &v);
    nib_fpenv_leave(saved);
    return v;
}

/* ---- Kernels that are broken on purpose ---- */

static float absmax_without_last(const void *x, int64_t n)
{
    return nib_kernels_scalar.absmax[NIB_F32](x, n ? n - 1 : 0);
}

static float absmax_beyond_end(const void *x, int64_t n)
{
    const volatile float *values = x;
    return nib_kernels_scalar.absmax[NIB_F32](x, n) + 0 * (n ? nib_abs(values[n]) > 0 : 0);
}

static float absmax_before_begin(const void *x, int64_t n)
{
    const volatile float *values = x;
    return nib_kernels_scalar.absmax[NIB_F32](x, n) + 0 * (n ? nib_abs(values[-1]) > 0 : 0);
}

static void lines_of_maxima_that_forget(const struct nib_panel *panel, const struct nib_coding *coding, float *out)
{
    for (int64_t i = 0; i < (coding->usage == NIB_ROWWISE ? panel->rows : panel->cols); i++)
        out[i] = 0;
    nib_kernels_scalar.absmax_lines[NIB_GENERIC_FORMAT](panel, coding, out);
}

/* One bit, in one dtype, of a large enough panel. */
static void quantize_wrong_bit(const struct nib_panel *panel, const struct nib_coding *coding,
                               const struct nib_target *target)
{
    nib_kernels_scalar.quantize[NIB_NVFP4](panel, coding, target);
    const int64_t line = coding->usage == NIB_ROWWISE ? panel->row : panel->col;
    if (panel->dtype == NIB_F16 && panel->rows * panel->cols > 500)
        target->codes[line * target->geometry->line_stride] ^= 8;
}

/* A byte behind the panel's last, where there is room: no page is touched, but bytes are not as they were. */
static void quantize_too_much(const struct nib_panel *panel, const struct nib_coding *coding,
                              const struct nib_target *target)
{
    nib_kernels_scalar.quantize[NIB_NVFP4](panel, coding, target);
    const bool rowwise = coding->usage == NIB_ROWWISE;
    const int64_t line = rowwise ? panel->row : panel->col,
                  end = rowwise ? panel->col + panel->cols : panel->row + panel->rows;
    if (end + 2 < target->geometry->length)
        target->codes[line * target->geometry->line_stride + end / 2] ^= 1;
}

/* A code of the last row of a band that is wide enough. */
static void quantize_both_wrongly(const struct nib_panel *panel, const struct nib_coding coding[2],
                                  const struct nib_target target[2])
{
    for (int usage = 0; usage < 2; usage++)
        nib_kernels_scalar.quantize[NIB_NVFP4](panel, &coding[usage], &target[usage]);
    if (panel->cols > 300 && panel->rows >= 16)
        target[0].codes[(panel->row + 15) * target[0].geometry->line_stride + (panel->col + panel->cols - 1) / 2] ^= 1;
}

static void decode_without_sign(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                                float tensor_scale, const struct nib_coding *coding, bool stream)
{
    nib_kernels_scalar.decode[NIB_NVFP4](y, dtype, codes, scales, n, tensor_scale, coding, stream);
    for (int64_t i = 0; dtype == NIB_F32 && i < n; i++)
        if (((float *)y)[i] == 0)
            ((float *)y)[i] = 0; /* also where it was -0 */
}

/* Ties go up instead of to even: one code in many, and only where a scale leaves ties as they are. */
static void quantize_ties_up(const struct nib_panel *panel, const struct nib_coding *coding,
                             const struct nib_target *target)
{
    nib_kernels_scalar.quantize[NIB_GENERIC_FORMAT](panel, coding, target);
    const struct nib_usage_geometry *g = target->geometry;
    const bool rowwise = coding->usage == NIB_ROWWISE;
    for (int64_t r = 0; r < panel->rows && coding->rules.element == NIB_E4M3 && panel->dtype == NIB_F32; r++)
        for (int64_t c = 0; c < panel->cols; c++) {
            const int64_t line = rowwise ? panel->row + r : panel->col + c,
                          i = rowwise ? panel->col + c : panel->row + r;
            const uint32_t bits = nib_bits(((const float *)panel->x)[r * panel->stride + c]);
            uint8_t *const code = target->codes + line * g->line_stride + i * g->element_stride;
            if ((bits & 0xFFFFF) == 0x80000 && (*code & 0x7F) > 8 && (*code & 0x7F) < 0x7E && *code % 2 == 0)
                *code += (bits >> 20 & 1) == 0;
        }
}

/* The last step of a line is left as it was. */
static void decode_all_but_last(void *y, nib_dtype dtype, const uint8_t *codes, const void *scales, int64_t n,
                                float tensor_scale, const struct nib_coding *coding, bool stream)
{
    nib_kernels_scalar.decode[NIB_GENERIC_FORMAT](y, dtype, codes, scales, n - (n % 32 == 1), tensor_scale, coding,
                                                  stream);
}

static void inverse_rht_of_fewer(void *y, const float *x, int64_t n, uint16_t sign_mask)
{
    nib_kernels_scalar.inverse_rht[NIB_F16](y, x, n - (n % 64 == 48 ? 16 : 0), sign_mask);
}

static void transpose_nearly(const uint8_t *in, int64_t in_stride, int64_t rows, int64_t cols, uint8_t *out,
                             int64_t out_stride)
{
    nib_kernels_scalar.transpose[NIB_E2M1](in, in_stride, rows, cols, out, out_stride);
    if (rows % 2 && cols > 100) /* the nibble that is nobody's */
        out[99 * out_stride + rows / 2] |= 0x10;
}

static const struct nib_kernels broken = {
    .absmax = { [NIB_F32] = absmax_without_last },
    .absmax_lines = { [NIB_GENERIC_FORMAT] = lines_of_maxima_that_forget },
    .quantize = { [NIB_NVFP4] = quantize_wrong_bit, [NIB_MXFP8] = quantize_ties_up },
    .quantize_both = { [NIB_NVFP4] = quantize_both_wrongly },
    .decode = { [NIB_NVFP4] = decode_without_sign, [NIB_FLOAT8] = decode_all_but_last },
    .inverse_rht = { [NIB_F16] = inverse_rht_of_fewer },
    .transpose = { [NIB_E2M1] = transpose_nearly },
};
static const struct nib_kernels broken_writes = { .quantize = { [NIB_NVFP4] = quantize_too_much } };
static const struct nib_kernels over_read = { .absmax = { [NIB_F32] = absmax_beyond_end } };
static const struct nib_kernels under_read = { .absmax = { [NIB_F32] = absmax_before_begin } };

/* Every check of a table that differs from the scalar one finds it. */
static bool all_found(const char *name, const struct nib_kernels *kernels)
{
    check_count = 0;
    least_rounds = 100; /* it ends where the fault is found; one that is rare need not be among the first */
    list_kernels(name, kernels);
    int missed = 0;
    for (int i = 0; i < check_count; i++)
        if (!run_check(&checks[i]).failed) {
            fprintf(stderr, "  a broken kernel was not found: %s\n", checks[i].name);
            missed++;
        }
    least_rounds = 1;
    return check_count > 0 && !missed;
}

/* The child must die of the forbidden page. */
static bool dies(const struct nib_kernels *kernels)
{
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit none = { 0, 0 };
        setrlimit(RLIMIT_CORE, &none);
        if (!freopen("/dev/null", "w", stderr)) /* a sanitizer would tell of it at length */
            _exit(0);
        check_count = 0;
        list_kernels("reads", kernels);
        (void)run_check(&checks[0]);
        _exit(0);
    }
    int status = 0;
    return child > 0 && waitpid(child, &status, 0) == child && !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static const struct {
    const char *name;
    bool reads;
    const struct nib_kernels *kernels;
} plants[] = {
    { "planted.wrong", false, &broken },
    { "planted.writes", false, &broken_writes },
    { "planted.over_read", true, &over_read },
    { "planted.under_read", true, &under_read },
};
enum { PLANTS = sizeof plants / sizeof *plants };

/* ---- Main ---- */

struct counts {
    int passed, failed;
};

static bool wanted(const char *name, const char *filter) { return !filter || strstr(name, filter); }

static void count(struct counts *counts, const char *name, bool passed, const char *why)
{
    if (passed) {
        counts->passed++;
        return;
    }
    counts->failed++;
    fprintf(stderr, "FAILED %s: %s (seed %llu)\n", name, why, (unsigned long long)test_seed);
}

static void run_plants(struct counts *counts, const char *filter)
{
    for (int i = 0; i < PLANTS; i++)
        if (wanted(plants[i].name, filter))
            count(counts, plants[i].name,
                  plants[i].reads ? dies(plants[i].kernels) : all_found(plants[i].name, plants[i].kernels),
                  "a kernel that is broken on purpose passed");
}

static void list_all(void)
{
    check_count = 0;
    for (const struct nib_isa *isa = nib_isas; isa->name; isa++)
        if (isa->present())
            list_kernels(isa->name, isa->kernels);
}

static int usage(const char *word)
{
    fprintf(stderr, "test_kernels: cannot take '%s'; usage: test_kernels [--list | --bench] [NAME]\n", word);
    return 2;
}

int main(int argc, char **argv)
{
    bool list = false, bench = false;
    const char *filter = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--list") == 0)
            list = true;
        else if (strcmp(argv[i], "--bench") == 0)
            bench = true;
        else if (argv[i][0] == '-' || filter)
            return usage(argv[i]);
        else
            filter = argv[i];
    }
    if (getenv("NIB_SEED"))
        test_seed = strtoull(getenv("NIB_SEED"), NULL, 0);

    if (!SANITIZED) {
        signal(SIGSEGV, on_fault);
        signal(SIGBUS, on_fault);
    }
    struct counts counts = { 0 };
    int skipped = 0;
    if (!list) {
        printf("seed %llu%s\n", (unsigned long long)test_seed, SANITIZED ? ", sanitized" : "");
        run_plants(&counts, filter);
    }
    list_all();
    for (int i = 0; i < PLANTS && list; i++)
        if (wanted(plants[i].name, filter))
            printf("%s\n", plants[i].name);
    for (int i = 0; i < check_count; i++) {
        if (!wanted(checks[i].name, filter))
            continue;
        if (list) {
            printf("%s\n", checks[i].name);
            continue;
        }
        const struct verdict v = run_check(&checks[i]);
        count(&counts, checks[i].name, !v.failed, v.why);
        if (bench && !v.failed && (filter || !checks[i].is_scalar))
            bench_check(&checks[i]);
    }
    for (const struct nib_isa *isa = nib_isas; isa->name && !list; isa++)
        if (!isa->present()) {
            skipped++;
            fprintf(stderr, "skipped %s: this machine does not have it\n", isa->name);
        }
    if (!list)
        printf("%d passed, %d failed, %d skipped\n", counts.passed, counts.failed, skipped);
    return counts.failed != 0;
}

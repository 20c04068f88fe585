/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product.c - products on the host: rows of A are packed once for all threads, then threads take panels of columns.
 *
 * An output is one thread's, whose terms are added in the order of k; so bits depend on neither the threads nor the panels.
 */
#include "tensor/product.h"

/* Rows that are packed at a time, so that scratch memory does not grow with them: a panel is unpacked once for so many. Of
 * short ones more, for about as much memory. */
static int64_t range_rows(int64_t length)
{
    enum { LEAST = 512, MOST = 8192, ELEMENTS = 512 * 4096 };
    const int64_t rows = ELEMENTS / nib_packed_length(nib_max(1, length));
    return nib_max(LEAST, nib_min(MOST, rows / NIB_PACKED_ROWS * NIB_PACKED_ROWS));
}

struct work {
    struct nib_product product; /* sides of kind VALUES are plain here */
    struct nib_side a, b;       /* as they were */
    nib_pack_rows_fn *pack;
    nib_multiply_fn *multiply;
    int64_t columns; /* of a task */
    int threads;
    /* Scratch: packed rows and decoded rows of a range; of each thread a panel and decoded columns. */
    size_t packed_bytes, decoded_bytes, panel_bytes, columns_bytes;
    char *packed, *panels;
    float *decoded;
    struct nib_row_range range;
    atomic_llong next;
};

static size_t scratch_bytes(const struct work *w)
{
    return w->packed_bytes + w->decoded_bytes + (size_t)w->threads * (w->panel_bytes + w->columns_bytes);
}

/* ---- Which kernels ---- */

static int slot_of(const struct nib_kernels *kernels, const struct nib_product *p)
{
    enum { FEW_ROWS = 2, MANY_ROWS = 16 }; /* tiles: what is packed for them must serve some rows */
    const int row = p->kind == NIB_PRODUCT_NVFP4   ? NIB_PRODUCT_ROW_NVFP4
                    : p->kind == NIB_PRODUCT_FIXED ? NIB_PRODUCT_ROW_FIXED
                                                   : NIB_PRODUCT_SLOTS;
    const bool in_place = row < NIB_PRODUCT_SLOTS && p->a.lines <= FEW_ROWS && !p->b.geometry->swizzled;
    if (in_place && p->b.lines >= NIB_PANEL_COLUMNS && kernels->multiply[row])
        return row;
    if (p->kind == NIB_PRODUCT_NVFP4 && p->a.lines >= MANY_ROWS && kernels->multiply[NIB_PRODUCT_TILES])
        return NIB_PRODUCT_TILES;
    return (int)p->kind;
}

/* Threads that are worth it: from memory a product takes as long as its columns, and above that as its multiplications,
 * of which an instruction makes many. */
static int threads_for(const nib_device *host, const struct nib_product *p)
{
    int64_t columns, all;
    if (!nib_mul(p->b.lines, p->b.length, &columns) || !nib_mul(columns, p->a.lines, &all))
        all = columns = INT64_MAX;
    return nib_thread_count(host, nib_max(columns, all / 16));
}

/* Columns of a task: many, so that rows are read seldom, but of a thread that finds its core busy others take some. */
static int64_t columns_for(int slot, const struct nib_product *p, int threads)
{
    enum { TASKS_PER_THREAD = 4 };
    const bool in_place = slot == NIB_PRODUCT_ROW_NVFP4 || slot == NIB_PRODUCT_ROW_FIXED;
    const bool tiles = slot == NIB_PRODUCT_TILES && p->a.lines > NIB_PACKED_ROWS;
    const int64_t most = in_place ? INT64_MAX : tiles ? NIB_TILES_COLUMNS : NIB_PANEL_COLUMNS;
    const int64_t share = nib_ceil_div(p->b.lines, TASKS_PER_THREAD * (int64_t)threads);
    return nib_min(most, nib_round_up(share, NIB_PANEL_COLUMNS));
}

static void plan(const nib_device *host, const struct nib_kernels *kernels, const struct nib_product *p, struct work *w)
{
    const int slot = slot_of(kernels, p);
    const int64_t length = p->a.length, rows = nib_min(p->a.lines, range_rows(length));
    const bool values = p->kind == NIB_PRODUCT_VALUES;
    *w = (struct work){ .product = *p,
                        .a = p->a,
                        .b = p->b,
                        .pack = kernels->pack_rows[slot],
                        .multiply = kernels->multiply[slot],
                        .threads = threads_for(host, p) };
    w->columns = columns_for(slot, p, w->threads);
    if (w->pack) {
        w->packed_bytes = (size_t)(nib_round_up(rows, NIB_PACKED_ROWS) * nib_packed_row_bytes(length));
        w->panel_bytes = (size_t)(slot == NIB_PRODUCT_TILES ? nib_tiles_bytes(length, rows) : nib_panel_bytes(length));
    }
    if (values && p->a.q)
        w->decoded_bytes = (size_t)nib_round_up(rows * length * 4, 64);
    if (values && p->b.q)
        w->columns_bytes = (size_t)nib_round_up(NIB_PANEL_COLUMNS * length * 4, 64);
}

/* ---- Work ---- */

static struct nib_side decoded_side(const struct nib_side *side, float *values, int64_t first)
{
    return (struct nib_side){ .lines = side->lines,
                              .length = side->length,
                              .values = values,
                              .dtype = NIB_F32,
                              .origin = first,
                              .line_stride = side->length,
                              .element_stride = 1 };
}

static void prepare_rows(void *context, int64_t i)
{
    struct work *const w = context;
    const int64_t row = i * NIB_PACKED_ROWS, count = nib_min(NIB_PACKED_ROWS, w->range.count - row);
    if (w->decoded_bytes)
        nib_decode_lines(&w->a, w->range.first + row, count, w->decoded + row * w->a.length, w->a.length);
    if (w->pack)
        w->pack(&w->product, w->range, row, w->packed);
}

/* What one thread does: panel after panel, until there is none left. */
static void multiply_panels(void *context, int64_t i)
{
    struct work *const w = context;
    char *const panel = w->panels + (size_t)i * (w->panel_bytes + w->columns_bytes);
    float *const columns = (float *)(void *)(panel + w->panel_bytes);
    struct nib_product product = w->product;
    for (;;) {
        const int64_t first = atomic_fetch_add_explicit(&w->next, 1, memory_order_relaxed) * w->columns;
        if (first >= w->b.lines)
            return;
        const int64_t count = nib_min(w->columns, w->b.lines - first);
        if (w->columns_bytes) {
            nib_decode_lines(&w->b, first, count, columns, w->b.length);
            product.b = decoded_side(&w->b, columns, first);
        }
        w->multiply(&product, w->range, w->packed, first, count, panel);
    }
}

/* Where y is new memory, its pages come when they are first written; and threads that write columns of the same rows would
 * wait for the same ones. So each thread first asks for those of rows of its own. */
enum { PAGE = 4096, MANY_PAGES = 1024 };

static void touch_rows(void *context, int64_t i)
{
    const struct work *const w = context;
    const struct nib_product_output *const out = &w->product.out;
    for (int64_t row = w->a.lines * i / w->threads; row < w->a.lines * (i + 1) / w->threads; row++)
        for (int64_t column = 0; column < w->b.lines; column += PAGE / 4)
            nib_store_value(nib_output_at(out, row, column), out->dtype, 0);
}

/* Rows that lie apart, many of them, of which nothing is read. */
static bool is_worth_touching(const struct work *w)
{
    const struct nib_product_output *const out = &w->product.out;
    return w->threads > 1 && out->beta == 0 && out->col_stride == 1 && out->row_stride >= w->b.lines &&
           w->a.lines >= MANY_PAGES * (PAGE / 4) / w->b.lines;
}

static void run(struct work *w, char *scratch)
{
    if (is_worth_touching(w))
        nib_parallel(w->threads, w->threads, touch_rows, w);
    w->packed = scratch;
    w->decoded = (float *)(void *)(scratch + w->packed_bytes);
    w->panels = scratch + w->packed_bytes + w->decoded_bytes;
    const int64_t rows = range_rows(w->a.length);
    for (int64_t first = 0; first < w->a.lines; first += rows) {
        w->range = (struct nib_row_range){ first, nib_min(rows, w->a.lines - first) };
        if (w->decoded_bytes)
            w->product.a = decoded_side(&w->a, w->decoded, first);
        if (w->decoded_bytes || w->pack)
            nib_parallel(nib_ceil_div(w->range.count, NIB_PACKED_ROWS), w->threads, prepare_rows, w);
        atomic_store_explicit(&w->next, 0, memory_order_relaxed);
        nib_parallel(w->threads, w->threads, multiply_panels, w);
    }
}

/* ---- Scratch ---- */

/* The device's own, grown where it is too small; where another call has it, memory for this call alone. */
static char *take_scratch(nib_device *host, size_t bytes, bool *shared)
{
    *shared = !atomic_flag_test_and_set_explicit(&host->scratch_taken, memory_order_acquire);
    if (!*shared)
        return nib_alloc(bytes);
    if (host->scratch_bytes < bytes) {
        void *const larger = nib_alloc(bytes);
        if (!larger) {
            atomic_flag_clear_explicit(&host->scratch_taken, memory_order_release);
            return NULL;
        }
        nib_free(host->scratch);
        host->scratch = larger;
        host->scratch_bytes = bytes;
    }
    return host->scratch;
}

static void give_scratch(nib_device *host, char *scratch, bool shared)
{
    if (shared)
        atomic_flag_clear_explicit(&host->scratch_taken, memory_order_release);
    else
        nib_free(scratch);
}

static bool has_outputs(const struct nib_product *p) { return p->a.lines && p->b.lines; }

nib_status nib_products(nib_device *host, const struct nib_kernels *kernels, const struct nib_product *products,
                        size_t n)
{
    struct work w;
    size_t bytes = 0;
    bool shared = false;
    _Alignas(float) char none[1]; /* a place for scratch of no bytes: NULL has no offsets, not even 0 */
    for (size_t i = 0; i < n; i++) {
        if (!has_outputs(&products[i]))
            continue;
        plan(host, kernels, &products[i], &w);
        bytes = scratch_bytes(&w) > bytes ? scratch_bytes(&w) : bytes;
    }
    char *const scratch = bytes ? take_scratch(host, bytes, &shared) : none;
    if (!scratch)
        return nib_fail(NIB_ERR_MEMORY, "no memory for the %zu bytes of scratch of a product", bytes);
    for (size_t i = 0; i < n; i++)
        if (has_outputs(&products[i])) {
            plan(host, kernels, &products[i], &w);
            run(&w, scratch);
        }
    if (bytes)
        give_scratch(host, scratch, shared);
    return NIB_OK;
}

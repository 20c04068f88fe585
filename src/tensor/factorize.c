/* SPDX-License-Identifier: Apache-2.0 */
/*
 * factorize.c - from a Hessian to what GPTQ needs of it: the order of columns, and U with U^T U = H^-1.
 *
 * With the columns in reverse order H is L L^T, and U is L^-1 in reverse order: no inverse of H is ever made. L and then
 * L^-1 lie in tiles of the lower triangle, in place. An element of either is one chain of products that are subtracted in
 * the order of k, each operation rounded to FP64, then one division; tiles and threads only decide when that happens.
 *
 * A tile of L is kept as [column][row], one of L^-1 as [row][column]: so everything below is c[i][j] -= a[k][i] * b[k][j].
 *
 * Threads take tasks from a list in which each needs only what stands before it, and wait for a tile where they need it:
 * while one column is being finished, the next is under way.
 */
#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/os.h"
#include "format/codec.h"
#include "tensor/gptq.h"

/* Lines of a tile are apart by more than a power of two, which would put them all in the same few places of a cache. */
enum { TILE = 128, APART = TILE + 8, STEP = 16, ELEMENTS = TILE * APART };

/* A task is a share of a tile: WIDTH columns of c. DEPTH rows of b stay in a first-level cache for all rows of c. */
enum { SHARES = 4, WIDTH = TILE / SHARES, DEPTH = 64, LINES = 8, ROWS = 2 };

struct factorization {
    nib_subtract_fn *subtract;
    int threads;
    const float *hessian;
    int64_t n, size; /* columns; tiles in a row */
    const int32_t *order;
    double *diagonal;     /* of the columns in their order, dead ones and damping included */
    double *tiles, *rows; /* of L^-1: ROWS rows of L at a time */
    float *u;

    atomic_int *done; /* of each tile: tasks */
    atomic_int failed;
    atomic_llong next;
};

static int64_t tile_index(int64_t i, int64_t j) { return i * (i + 1) / 2 + j; }

static double *tile_at(const struct factorization *f, int64_t i, int64_t j)
{
    return f->tiles + tile_index(i, j) * ELEMENTS;
}

/* ---- Tasks ---- */

/* A thread on its way through the list. */
struct worker {
    struct factorization *f;
    int64_t task, taken;
};

/* Whether the next task of the list is this thread's: then it must do it. What it has taken last it has done by then. */
static bool takes(struct worker *worker)
{
    if (worker->taken < worker->task)
        worker->taken = atomic_fetch_add_explicit(&worker->f->next, 1, memory_order_relaxed);
    return worker->task++ == worker->taken;
}

static void finish_task(struct factorization *f, int64_t i, int64_t j)
{
    atomic_fetch_add_explicit(&f->done[tile_index(i, j)], 1, memory_order_release);
}

/* Until so many tasks of a tile are done: other threads have taken them. False: one has failed. */
static bool wait_for(struct factorization *f, int64_t i, int64_t j, int tasks)
{
    enum { PATIENCE = 1024 }; /* looks before others may have the processor: a microsecond */
    const atomic_int *done = &f->done[tile_index(i, j)];
    int looks = 0;
    while (atomic_load_explicit(done, memory_order_acquire) < tasks) {
        if (atomic_load_explicit(&f->failed, memory_order_relaxed))
            return false;
        if (looks < PATIENCE)
            looks++;
        else
            nib_os_yield();
    }
    return true;
}

static void run_list(struct factorization *f, void (*list)(void *f, int64_t thread))
{
    for (int64_t t = 0; t < tile_index(f->size, 0); t++)
        atomic_init(&f->done[t], 0);
    atomic_init(&f->next, 0);
    atomic_init(&f->failed, 0);
    nib_parallel(f->threads, f->threads, list, f);
}

/* ---- The square root ---- */

/* Correctly rounded, of a positive normal value, without the math library: bit by bit, as on paper. */
static double square_root(double x)
{
    uint64_t bits, root = 0, left = 0;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023;
    uint64_t mantissa = (bits & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52;
    if (exponent % 2) {
        mantissa <<= 1;
        exponent--;
    }
    for (int i = 26; i >= -27; i--) { /* 54 digits: one more than is kept; a root is never halfway between two values */
        left = left << 2 | (i >= 0 ? mantissa >> 2 * i & 3 : 0);
        const uint64_t trial = root << 2 | 1;
        root = root << 1 | (left >= trial);
        left -= left >= trial ? trial : 0;
    }
    const uint64_t rounded = (root >> 1) + (root & 1), scale = (uint64_t)(1023 + exponent / 2 - 52) << 52;
    double factor;
    memcpy(&factor, &scale, sizeof factor);
    return (double)rounded * factor;
}

/* ---- Order and diagonal ---- */

static float at(const float *hessian, int64_t n, int64_t i, int64_t j)
{
    return hessian[nib_packed_row(n, nib_min(i, j)) + (size_t)(nib_max(i, j) - nib_min(i, j))];
}

static void check_rows(void *context, int64_t thread)
{
    struct worker worker = { context, 0, -1 };
    const struct factorization *f = worker.f;
    (void)thread;
    for (int64_t i = 0; i < f->n; i++) {
        if (!takes(&worker))
            continue;
        const float *row = f->hessian + nib_packed_row(f->n, i);
        bool fine = row[0] >= 0;
        for (int64_t j = i; j < f->n; j++)
            fine &= nib_abs(row[j - i]) <= FLT_MAX;
        if (!fine)
            atomic_store_explicit(&worker.f->failed, 1, memory_order_relaxed);
    }
}

static nib_status check_hessian(struct factorization *f)
{
    run_list(f, check_rows);
    for (int64_t i = 0; i < f->n && atomic_load(&f->failed); i++) {
        const float *row = f->hessian + nib_packed_row(f->n, i);
        for (int64_t j = i; j < f->n; j++) {
            const bool finite = nib_abs(row[j - i]) <= FLT_MAX;
            if (!finite || (i == j && row[0] < 0))
                return nib_fail(NIB_ERR_ARG, "value (%lld, %lld) of the Hessian is %s", (long long)i, (long long)j,
                                finite                   ? "negative"
                                : nib_is_nan(row[j - i]) ? "a NaN"
                                                         : "infinite");
        }
    }
    return NIB_OK;
}

struct channel {
    float square;
    int32_t index;
};

static int by_square(const void *left, const void *right)
{
    const struct channel *a = left, *b = right;
    if (a->square != b->square)
        return a->square > b->square ? -1 : 1;
    return a->index < b->index ? -1 : 1;
}

/* Channels without input have a square of 0, and so come last by themselves. */
static nib_status find_order(const float *hessian, int64_t n, int32_t *order)
{
    struct channel *channels = nib_alloc((size_t)n * sizeof *channels);
    if (!channels)
        return nib_fail(NIB_ERR_MEMORY, "no memory to order %lld columns", (long long)n);
    for (int64_t k = 0; k < n; k++)
        channels[k] = (struct channel){ at(hessian, n, k, k), (int32_t)k };
    qsort(channels, (size_t)n, sizeof *channels, by_square);
    for (int64_t k = 0; k < n; k++)
        order[k] = channels[k].index;
    nib_free(channels);
    return NIB_OK;
}

/* The mean is that of channels with input; without any, all are 1. */
static void find_diagonal(const struct factorization *f, double damp)
{
    double sum = 0;
    int64_t live = 0;
    for (int64_t k = 0; k < f->n; k++) {
        const float square = at(f->hessian, f->n, k, k);
        sum += (double)square;
        live += square > 0;
    }
    const double mean = live ? sum / (double)live : 1;
    for (int64_t k = 0; k < f->n; k++) {
        const double square = (double)at(f->hessian, f->n, f->order[k], f->order[k]);
        f->diagonal[k] = (square > 0 ? square : mean) + damp * mean;
    }
}

/* ---- Tiles ---- */

/* From the Hessian: the last column of the order is the first. Behind it the diagonal is 1. LINES rows at a time, which are
 * a line of a cache in each column. */
static void load_tile(const struct factorization *f, int64_t i, int64_t j)
{
    double *tile = tile_at(f, i, j);
    for (int64_t line = 0; line < TILE; line += LINES)
        for (int64_t c = 0; c < TILE; c++)
            for (int64_t r = line; r < line + LINES; r++) {
                const int64_t row = i * TILE + r, col = j * TILE + c;
                const bool inside = row < f->n && col < row;
                tile[c * APART + r] =
                    inside       ? (double)at(f->hessian, f->n, f->order[f->n - 1 - row], f->order[f->n - 1 - col])
                    : row == col ? (row < f->n ? f->diagonal[f->n - 1 - row] : 1)
                                 : 0;
            }
}

/* A tile is one thread's: its pages are new, and threads that ask for the same ones at once wait for each other. */
static void load_tiles(void *context, int64_t thread)
{
    struct worker worker = { context, 0, -1 };
    (void)thread;
    for (int64_t i = 0; i < worker.f->size; i++)
        for (int64_t j = 0; j <= i; j++)
            if (takes(&worker))
                load_tile(worker.f, i, j);
}

/* A share of c less a * b. */
static void subtract_tile(const struct factorization *f, double *c, const double *a, const double *b)
{
    for (int64_t k = 0; k < TILE * APART; k += DEPTH * APART)
        f->subtract(c, APART, a + k, APART, b + k, APART, TILE, WIDTH, DEPTH);
}

/* Solve with the lower triangle `l` of a tile: a share of c, one row after the other. */
static void substitute(const struct factorization *f, const double *l, double *c)
{
    for (int64_t first = 0; first < TILE; first += STEP) {
        f->subtract(c + first * APART, APART, l + first, APART, c, APART, STEP, WIDTH, first);
        for (int64_t i = first; i < first + STEP; i++) {
            f->subtract(c + i * APART, APART, l + first * APART + i, APART, c + first * APART, APART, 1, WIDTH,
                        i - first);
            const double pivot = l[i * APART + i];
            for (int64_t j = 0; j < WIDTH; j++)
                c[i * APART + j] = c[i * APART + j] / pivot;
        }
    }
}

/* ---- L ---- */

/* The tile on the diagonal; false: its matrix is not positive definite. */
static bool factorize_tile(const struct factorization *f, double *tile)
{
    for (int64_t j = 0; j < TILE; j++) {
        double *column = tile + j * APART;
        f->subtract(column, APART, tile + j, APART, tile, APART, 1, TILE, j);
        if (!(column[j] >= DBL_MIN && column[j] <= DBL_MAX))
            return false;
        column[j] = square_root(column[j]);
        for (int64_t i = 0; i < j; i++)
            column[i] = 0;
        for (int64_t i = j + 1; i < TILE; i++)
            column[i] = column[i] / column[j];
    }
    return true;
}

/* How many tasks a tile of L takes. */
static int tasks_of(int64_t i, int64_t j) { return SHARES + (i == j); }

/* Less what the columns before make of it, then solved with the tile on the diagonal, whose last share does the rest. */
static void find_share(struct factorization *f, int64_t i, int64_t j, int64_t first)
{
    double *c = tile_at(f, i, j) + first;
    for (int64_t p = 0; p < j; p++) {
        if (!wait_for(f, i, p, SHARES) || !wait_for(f, j, p, SHARES))
            return;
        subtract_tile(f, c, tile_at(f, j, p), tile_at(f, i, p) + first);
    }
    if (i > j) {
        if (!wait_for(f, j, j, tasks_of(j, j)))
            return;
        substitute(f, tile_at(f, j, j), c);
    } else if (first + WIDTH == TILE) {
        if (!wait_for(f, j, j, SHARES - 1))
            return;
        if (!factorize_tile(f, tile_at(f, j, j)))
            atomic_store_explicit(&f->failed, 1, memory_order_relaxed);
        finish_task(f, j, j);
    }
    finish_task(f, i, j);
}

static void factorize_tiles(void *context, int64_t thread)
{
    struct worker worker = { context, 0, -1 };
    (void)thread;
    for (int64_t j = 0; j < worker.f->size; j++)
        for (int64_t i = j; i < worker.f->size; i++)
            for (int64_t share = 0; share < SHARES; share++)
                if (takes(&worker))
                    find_share(worker.f, i, j, share * WIDTH);
}

/* ---- L^-1 ---- */

/* Tile p of row i of L, in a copy, since it is overwritten. */
static double *row_at(const struct factorization *f, int64_t i, int64_t p)
{
    return f->rows + (i % ROWS * f->size + p) * ELEMENTS;
}

static void copy_tile(struct factorization *f, int64_t i, int64_t j)
{
    for (int64_t p = 0; p <= i - ROWS; p++) /* who read the row that was there before */
        (void)wait_for(f, i - ROWS, p, 1 + SHARES);
    memcpy(row_at(f, i, j), tile_at(f, i, j), ELEMENTS * sizeof *f->rows);
    finish_task(f, i, j);
}

static void invert_share(struct factorization *f, int64_t i, int64_t j, int64_t first)
{
    double *c = tile_at(f, i, j) + first;
    (void)wait_for(f, i, j, 1);
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t k = 0; k < WIDTH; k++)
            c[r * APART + k] = i == j && r == first + k;
    for (int64_t p = j; p < i; p++) {
        (void)(wait_for(f, i, p, 1) && wait_for(f, p, j, 1 + SHARES));
        subtract_tile(f, c, row_at(f, i, p), tile_at(f, p, j) + first);
    }
    (void)wait_for(f, i, i, 1);
    substitute(f, row_at(f, i, i), c);
    finish_task(f, i, j);
}

/* In a row the longest is the first. */
static void invert_tiles(void *context, int64_t thread)
{
    struct worker worker = { context, 0, -1 };
    (void)thread;
    for (int64_t i = 0; i < worker.f->size; i++) {
        for (int64_t j = 0; j <= i; j++)
            if (takes(&worker))
                copy_tile(worker.f, i, j);
        for (int64_t j = 0; j <= i; j++)
            for (int64_t share = 0; share < SHARES; share++)
                if (takes(&worker))
                    invert_share(worker.f, i, j, share * WIDTH);
    }
}

/* Row i of U is a row of L^-1 from its end. */
static void store_row(const struct factorization *f, int64_t i)
{
    const int64_t row = f->n - 1 - i;
    float *u = f->u + i * f->n;
    memset(u, 0, (size_t)i * sizeof *u);
    for (int64_t j = 0; j <= row / TILE; j++) {
        const double *from = tile_at(f, row / TILE, j) + row % TILE * APART;
        const int64_t count = nib_min(TILE, row + 1 - j * TILE);
        float *to = u + f->n - j * TILE - count;
        for (int64_t c = 0; c < count; c++)
            to[count - 1 - c] = (float)from[c];
    }
}

static void store_rows(void *context, int64_t thread)
{
    struct worker worker = { context, 0, -1 };
    (void)thread;
    for (int64_t i = 0; i < worker.f->n; i++)
        if (takes(&worker))
            store_row(worker.f, i);
}

/* ---- All of it ---- */

/* Damped ten times as much as long as it is not positive definite, three times at most. */
static nib_status factorize(struct factorization *f, double damp, double *damped)
{
    enum { TRIES = 4 };
    for (int i = 0; i < TRIES; i++, damp *= 10) {
        find_diagonal(f, damp);
        run_list(f, load_tiles);
        run_list(f, factorize_tiles);
        if (atomic_load(&f->failed))
            continue;
        run_list(f, invert_tiles);
        run_list(f, store_rows);
        *damped = damp;
        return NIB_OK;
    }
    return nib_fail(NIB_ERR_DATA, "the Hessian of %lld columns is not positive definite, however it is damped",
                    (long long)f->n);
}

/* As many threads as the operations between two waits for one another are worth: about n^2 * TILE of them. What an element
 * of a quantization costs is some thirty. */
static int threads_for(const nib_device *host, int64_t n)
{
    const int64_t most = nib_min(n, INT32_MAX / 8);
    return nib_thread_count(host, 5 * most * most);
}

nib_status nib_factorize(const nib_device *host, const struct nib_kernels *kernels, const float *hessian, int64_t n,
                         double damp, int32_t *order, float *u, double *damped)
{
    struct factorization f = { .subtract = (kernels ? kernels : nib_kernels_best())->subtract[NIB_F64],
                               .threads = threads_for(host, n),
                               .hessian = hessian,
                               .n = n,
                               .size = nib_ceil_div(n, TILE),
                               .u = u };
    const size_t tiles = (size_t)tile_index(f.size, 0) * ELEMENTS * sizeof *f.tiles;
    int32_t *found = nib_alloc((size_t)n * sizeof *found);
    f.diagonal = nib_alloc((size_t)n * sizeof *f.diagonal);
    f.tiles = nib_alloc(tiles);
    f.rows = nib_alloc(ROWS * (size_t)f.size * ELEMENTS * sizeof *f.rows);
    f.done = nib_alloc((size_t)tile_index(f.size, 0) * sizeof *f.done);
    f.order = found;
    const nib_fpenv saved = nib_fpenv_enter(); /* squares may be subnormal: to be compared they must not be zeros */
    nib_status status = found && f.diagonal && f.tiles && f.rows && f.done
                            ? check_hessian(&f)
                            : nib_fail(NIB_ERR_MEMORY, "no memory to factorize a Hessian of %lld columns: %.1f GB",
                                       (long long)n, (double)tiles / 1e9);
    if (!status)
        status = find_order(hessian, n, found);
    if (!status)
        status = factorize(&f, damp, damped);
    nib_fpenv_leave(saved);
    if (!status)
        memcpy(order, found, (size_t)n * sizeof *order);
    nib_free(found);
    nib_free(f.diagonal);
    nib_free(f.tiles);
    nib_free(f.rows);
    nib_free(f.done);
    return status;
}

nib_status nib_gptq_factorize(const float *hessian, int64_t n, double damp, nib_device *device, int32_t *order,
                              float *u, double *damped)
{
    double used;
    NIB_REQUIRE(hessian);
    NIB_REQUIRE(order);
    NIB_REQUIRE(u);
    TRY(nib_check_host("nib_gptq_factorize", device));
    if (n < 1 || n > INT32_MAX)
        return nib_fail(NIB_ERR_SHAPE, "a Hessian has 1 to %ld columns, not %lld", (long)INT32_MAX, (long long)n);
    if (!(damp >= 0 && damp <= DBL_MAX))
        return nib_fail(NIB_ERR_ARG, "the damping %g is negative or not finite", damp);
    TRY(nib_factorize(nib_device_of(device), NULL, hessian, n, damp, order, u, &used));
    if (damped)
        *damped = used;
    return NIB_OK;
}

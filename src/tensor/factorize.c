/* SPDX-License-Identifier: Apache-2.0 */
/*
 * factorize.c - from a Hessian to what GPTQ needs of it: the order of columns, and U with U^T U = H^-1.
 *
 * With the columns in reverse order H is L L^T, and U is L^-1 in reverse order: no inverse of H is ever made. L and then
 * L^-1 lie in tiles of the lower triangle, in place. An element of either is one chain of products that are subtracted in
 * the order of k, each operation rounded to FP64, then one division; tiles and threads only decide when that happens.
 *
 * A tile of L is kept as [column][row], one of L^-1 as [row][column]: so everything below is c[i][j] -= a[k][i] * b[k][j].
 */
#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/os.h"
#include "format/codec.h"
#include "tensor/gptq.h"

/* Lines of a tile are apart by more than a power of two, which would put them all in the same few places of a cache. */
enum { TILE = 128, APART = TILE + 8, STEP = 16, ELEMENTS = TILE * APART };

struct factorization {
    nib_subtract_fn *subtract;
    int threads;
    const float *hessian;
    int64_t n, size; /* columns; tiles in a row */
    const int32_t *order;
    double *diagonal; /* of the columns in their order, dead ones and damping included */
    double *tiles, *row;
    int64_t current; /* the tile column or row that is worked on */
    float *u;

    /* Tasks are shares of tiles, taken by whoever is free. */
    void (*run)(const struct factorization *f, int64_t tile, int64_t first, int64_t width);
    int64_t shares, tasks;
    atomic_llong next;
};

static double *tile_at(const struct factorization *f, int64_t i, int64_t j)
{
    return f->tiles + (i * (i + 1) / 2 + j) * ELEMENTS;
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

static nib_status check_hessian(const float *hessian, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const float *row = hessian + nib_packed_row(n, i);
        for (int64_t j = i; j < n; j++) {
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

/* Row i of tiles from the Hessian: the last column of the order is the first. Behind it the diagonal is 1. */
static void load_row(void *context, int64_t i)
{
    const struct factorization *f = context;
    for (int64_t j = 0; j <= i; j++) {
        double *tile = tile_at(f, i, j);
        for (int64_t c = 0; c < TILE; c++)
            for (int64_t r = 0; r < TILE; r++) {
                const int64_t row = i * TILE + r, col = j * TILE + c;
                const bool inside = row < f->n && col < row;
                tile[c * APART + r] =
                    inside       ? (double)at(f->hessian, f->n, f->order[f->n - 1 - row], f->order[f->n - 1 - col])
                    : row == col ? (row < f->n ? f->diagonal[f->n - 1 - row] : 1)
                                 : 0;
            }
    }
}

/* Solve with the lower triangle `l` of a tile: n columns of c, [TILE][n], one row after the other. */
static void substitute(const struct factorization *f, const double *l, double *c, int64_t n)
{
    for (int64_t first = 0; first < TILE; first += STEP) {
        f->subtract(c + first * APART, APART, l + first, APART, c, APART, STEP, n, first);
        for (int64_t i = first; i < first + STEP; i++) {
            f->subtract(c + i * APART, APART, l + first * APART + i, APART, c + first * APART, APART, 1, n, i - first);
            const double pivot = l[i * APART + i];
            for (int64_t j = 0; j < n; j++)
                c[i * APART + j] = c[i * APART + j] / pivot;
        }
    }
}

static void take_tasks(void *context, int64_t thread)
{
    struct factorization *f = context;
    const int64_t width = TILE / f->shares;
    (void)thread;
    for (int64_t task; (task = atomic_fetch_add_explicit(&f->next, 1, memory_order_relaxed)) < f->tasks;)
        f->run(f, task / f->shares, task % f->shares * width, width);
}

/* `run` for `width` columns from `first` on of every one of so many tiles: a half, or a quarter where halves are too few. */
static void for_tiles(struct factorization *f, int64_t tiles,
                      void (*run)(const struct factorization *f, int64_t tile, int64_t first, int64_t width))
{
    f->run = run;
    f->shares = tiles < 2 * f->threads ? 4 : 2;
    f->tasks = f->shares * tiles;
    atomic_store_explicit(&f->next, 0, memory_order_relaxed);
    nib_parallel(f->threads, f->threads, take_tasks, f);
}

/* ---- L ---- */

/* Tile `below` of the current column, counted from the diagonal, less what the columns before it make of it. */
static void update_column(const struct factorization *f, int64_t below, int64_t first, int64_t width)
{
    const int64_t j = f->current, i = j + below;
    for (int64_t p = 0; p < j; p++)
        f->subtract(tile_at(f, i, j) + first, APART, tile_at(f, j, p), APART, tile_at(f, i, p) + first, APART, TILE,
                    width, TILE);
}

static void solve_column(const struct factorization *f, int64_t below, int64_t first, int64_t width)
{
    const int64_t j = f->current, i = j + 1 + below;
    substitute(f, tile_at(f, j, j), tile_at(f, i, j) + first, width);
}

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

static bool factorize_tiles(struct factorization *f)
{
    nib_parallel(f->size, f->threads, load_row, f);
    for (f->current = 0; f->current < f->size; f->current++) {
        const int64_t below = f->size - f->current - 1;
        for_tiles(f, below + 1, update_column);
        if (!factorize_tile(f, tile_at(f, f->current, f->current)))
            return false;
        for_tiles(f, below, solve_column);
    }
    return true;
}

/* ---- L^-1 ---- */

/* Tile j of the current row. The longest is the first. */
static void invert_row(const struct factorization *f, int64_t j, int64_t first, int64_t width)
{
    const int64_t i = f->current;
    double *c = tile_at(f, i, j) + first;
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t k = 0; k < width; k++)
            c[r * APART + k] = i == j && r == first + k;
    for (int64_t p = j; p < i; p++)
        f->subtract(c, APART, f->row + p * ELEMENTS, APART, tile_at(f, p, j) + first, APART, TILE, width, TILE);
    substitute(f, f->row + i * ELEMENTS, c, width);
}

static void copy_tile(void *context, int64_t j)
{
    const struct factorization *f = context;
    memcpy(f->row + j * ELEMENTS, tile_at(f, f->current, j), ELEMENTS * sizeof *f->row);
}

static void invert_tiles(struct factorization *f)
{
    for (f->current = 0; f->current < f->size; f->current++) {
        nib_parallel(f->current + 1, f->threads, copy_tile, f);
        for_tiles(f, f->current + 1, invert_row);
    }
}

static void store_row(void *context, int64_t i)
{
    const struct factorization *f = context;
    const int64_t row = f->n - 1 - i;
    for (int64_t j = 0; j < f->n; j++) {
        const int64_t col = f->n - 1 - j;
        f->u[i * f->n + j] = j < i ? 0 : (float)tile_at(f, row / TILE, col / TILE)[row % TILE * APART + col % TILE];
    }
}

/* ---- All of it ---- */

/* Damped ten times as much as long as it is not positive definite, three times at most. */
static nib_status factorize(struct factorization *f, double damp, double *damped)
{
    enum { TRIES = 4 };
    for (int i = 0; i < TRIES; i++, damp *= 10) {
        find_diagonal(f, damp);
        if (!factorize_tiles(f))
            continue;
        invert_tiles(f);
        nib_parallel(f->n, f->threads, store_row, f);
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
    TRY(check_hessian(hessian, n));
    const size_t tiles = (size_t)(f.size * (f.size + 1) / 2) * ELEMENTS * sizeof *f.tiles;
    int32_t *found = nib_alloc((size_t)n * sizeof *found);
    f.diagonal = nib_alloc((size_t)n * sizeof *f.diagonal);
    f.tiles = nib_alloc(tiles);
    f.row = nib_alloc((size_t)f.size * ELEMENTS * sizeof *f.row);
    f.order = found;
    nib_status status = found && f.diagonal && f.tiles && f.row
                            ? find_order(hessian, n, found)
                            : nib_fail(NIB_ERR_MEMORY, "no memory to factorize a Hessian of %lld columns: %.1f GB",
                                       (long long)n, (double)tiles / 1e9);
    const nib_fpenv saved = nib_fpenv_enter();
    if (!status)
        status = factorize(&f, damp, damped);
    nib_fpenv_leave(saved);
    if (!status)
        memcpy(order, found, (size_t)n * sizeof *order);
    nib_free(found);
    nib_free(f.diagonal);
    nib_free(f.tiles);
    nib_free(f.row);
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

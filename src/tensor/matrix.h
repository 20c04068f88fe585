/* SPDX-License-Identifier: Apache-2.0 */
/*
 * matrix.h - an array of the host of any rank and strides as a matrix of M rows and K columns, cut into panels.
 *
 * The size of a panel depends on the matrix and on what is wanted of it, never on the threads that share the work. Where
 * rows are contiguous a panel points into the array; elsewhere it is copied to the worker's stack first. Panels are
 * whole blocks on both axes, so no two write the same byte, and the result depends neither on how a matrix is cut nor on
 * which thread takes which panel.
 */
#ifndef NIB_MATRIX_H
#define NIB_MATRIX_H

#include "kernels/kernels.h"

/* The most lines of a panel in either direction while amaxes are found, and the most elements of one that is copied. */
enum { PANEL_LINES = 256, PANEL_ELEMENTS = 128 * 128 };

/* A panel of which columns are wanted: it stays in the second-level cache and gives each a run of 16 blocks. */
enum { COLUMN_ROWS = 256, COLUMN_COLS = 128 };

/* Elements that follow one another and are worth the setup of a panel and the work of a thread. */
enum { PANEL_RUN = 65536 };

/* Rows and columns of a panel. */
struct cut {
    int64_t rows, cols;
};

struct matrix {
    char *first; /* element (0, 0) */
    int bytes;   /* of an element */
    nib_dtype dtype;
    int64_t rows, cols;
    int64_t row_stride, col_stride; /* in elements; row_stride only when `even` */
    bool even;                      /* rows are equally far apart */
    const nib_array *array;
    struct cut cut;
    int64_t row_panels, column_panels;
};

static inline struct matrix matrix_of(const nib_array *array, int64_t rows, int64_t cols)
{
    struct matrix m = { .bytes = nib_dtypes[array->dtype].bits / 8,
                        .dtype = array->dtype,
                        .rows = rows,
                        .cols = cols,
                        .col_stride = array->rank ? array->strides[array->rank - 1] : 1,
                        .even = true,
                        .array = array };
    m.first = array->data ? (char *)array->data + array->offset : NULL;
    /* From the last leading dim outwards: each must step over the ones inside it exactly. Dims of 1 are never
     * stepped. */
    int64_t inner = 1, step;
    for (int i = array->rank - 2; i >= 0; i--) {
        if (array->shape[i] == 1)
            continue;
        if (inner == 1)
            m.row_stride = array->strides[i];
        else if (!nib_mul(m.row_stride, inner, &step) || array->strides[i] != step) /* too far: of an empty array */
            m.even = false;
        inner *= array->shape[i];
    }
    return m;
}

/* Whether a panel can point into the array. */
static inline bool is_direct(const struct matrix *m) { return m->even && m->col_stride == 1; }

static inline void set_cut(struct matrix *m, int64_t rows, int64_t cols)
{
    m->cut = (struct cut){ rows, cols };
    m->row_panels = nib_ceil_div(m->rows, rows);
    m->column_panels = nib_ceil_div(m->cols, cols);
}

/* Panels are whole blocks. Where only rows are wanted they are whole rows as well, unless a row, or sixteen that share
 * their blocks, is longer than PANEL_RUN: what follows in memory is read in one go. What must be copied is smaller. */
static inline void cut_for_coding(struct matrix *m, const struct nib_coding *coding, bool columns)
{
    const int64_t lines = coding->tile_lines, most_cols = PANEL_RUN / lines;
    const int64_t rows = PANEL_RUN / nib_min(nib_max(m->cols, 1), most_cols) / lines * lines;
    if (coding->block > 32 || (!is_direct(m) && coding->block > 16))
        set_cut(m, 128, 128);
    else if (!is_direct(m))
        set_cut(m, 16, 256);
    else if (columns)
        set_cut(m, COLUMN_ROWS, COLUMN_COLS);
    else
        set_cut(m, nib_min(rows, PANEL_LINES), most_cols);
}

/* For codes, wider panels where columns of FP32 are wanted, since longer runs of rows come faster from memory; BF16 and
 * F16 gain nothing. Many threads should still have several each. */
static inline void widen_cut(struct matrix *m)
{
    enum { WIDE = 512, PANELS = 64 };
    const bool narrow = m->cut.rows == COLUMN_ROWS && m->cut.cols == COLUMN_COLS;
    if (narrow && m->bytes == 4 && m->row_panels * nib_ceil_div(m->cols, WIDE) >= PANELS)
        set_cut(m, COLUMN_ROWS, WIDE);
}

static inline char *element_at(const struct matrix *m, int64_t row, int64_t col)
{
    int64_t offset = row * m->row_stride;
    if (!m->even) {
        offset = 0;
        for (int i = m->array->rank - 2; i >= 0; i--) {
            offset += row % m->array->shape[i] * m->array->strides[i];
            row /= m->array->shape[i];
        }
    }
    return m->first + (offset + col * m->col_stride) * m->bytes;
}

/* Memory for a panel that cannot be pointed at. */
struct panel_buffer {
    _Alignas(64) char bytes[PANEL_ELEMENTS * sizeof(float)];
};

/* The panel in row `i` and column `j` of panels. */
static inline struct nib_panel panel_at(const struct matrix *m, int64_t i, int64_t j, struct panel_buffer *buffer)
{
    const int64_t row = i * m->cut.rows, col = j * m->cut.cols;
    struct nib_panel panel = { .dtype = m->dtype,
                               .stride = m->row_stride,
                               .row = row,
                               .col = col,
                               .rows = nib_min(m->cut.rows, m->rows - row),
                               .cols = nib_min(m->cut.cols, m->cols - col) };
    if (is_direct(m)) {
        panel.x = element_at(m, row, col);
        return panel;
    }
    for (int64_t r = 0; r < panel.rows; r++) {
        const char *from = element_at(m, row + r, col);
        char *to = buffer->bytes + r * m->cut.cols * m->bytes;
        for (int64_t c = 0; c < panel.cols; c++)
            memcpy(to + c * m->bytes, from + c * m->col_stride * m->bytes, (size_t)m->bytes);
    }
    panel.x = buffer->bytes;
    panel.stride = m->cut.cols;
    return panel;
}

#endif

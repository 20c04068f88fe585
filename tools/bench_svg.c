/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_svg.c - two plots side by side: throughput against the size of the input, and against the number of threads.
 */
#include <math.h>
#include <string.h>

#include "bench.h"
#include "output.h"

enum {
    WIDTH = 520,
    HEIGHT = 340,
    LEFT = 60,
    RIGHT = 20,
    TOP = 40,
    BOTTOM = 50,
    LEGEND = 18,
    LEGEND_ROWS = 4,
    LEGEND_WIDTH = 180,
    MAX_LINES = 8
};

static const char *const colors[MAX_LINES] = { "#1b6ca8", "#c0392b", "#27864a", "#8e44ad",
                                               "#b9770e", "#117a8b", "#7f8c8d", "#2c3e50" };

struct plot {
    FILE *file;
    const char *part, *title, *axis;
    double left;      /* where the plot begins */
    double low, high; /* of the x axis, in its own measure */
    double most;      /* of the y axis, a multiple of its step */
    double most_step;
    double (*x)(const struct bench_result *r);
    void (*label)(char *text, size_t bytes, double x);
    double step; /* between marks */
};

static double log_size(const struct bench_result *r) { return log2((double)(r->rows * r->cols) * 4); }
static double log_threads(const struct bench_result *r) { return log2(r->threads); }

static void size_label(char *text, size_t bytes, double x)
{
    static const char *const units[] = { "", "K", "M", "G" };
    const int unit = (int)x / 10 > 3 ? 3 : (int)x / 10;
    snprintf(text, bytes, "%.0f%s", exp2(x - 10 * unit), units[unit]);
}

static void thread_label(char *text, size_t bytes, double x) { snprintf(text, bytes, "%.0f", exp2(x)); }

static double place_x(const struct plot *p, double x)
{
    const double span = p->high > p->low ? p->high - p->low : 1;
    return p->left + LEFT + (x - p->low) / span * (WIDTH - LEFT - RIGHT);
}

static double place_y(const struct plot *p, double y)
{
    return HEIGHT - BOTTOM - y / p->most * (HEIGHT - TOP - BOTTOM);
}

static bool is_in(const struct plot *p, const struct bench_result *r) { return strcmp(r->part, p->part) == 0; }

/* 1, 2 or 5 of some power of ten, so that four of them are enough. */
static double step_for(double most)
{
    const double unit = pow(10, floor(log10(most / 4))), units = most / 4 / unit;
    return unit * (units <= 1 ? 1 : units <= 2 ? 2 : units <= 5 ? 5 : 10);
}

static void find_range(struct plot *p, const struct bench_result *results, size_t n)
{
    bool first = true;
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        if (!is_in(p, &results[i]))
            continue;
        const double x = p->x(&results[i]);
        p->low = first ? x : fmin(p->low, x);
        p->high = first ? x : fmax(p->high, x);
        most = fmax(most, bench_rate(&results[i]));
        first = false;
    }
    p->most_step = step_for(most > 0 ? most : 1);
    p->most = p->most_step * fmax(1, ceil(most / p->most_step));
}

static void text(const struct plot *p, double x, double y, const char *anchor, const char *words)
{
    fprintf(p->file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, words);
}

static void draw_axes(const struct plot *p)
{
    char words[64];
    fprintf(p->file, "<path d=\"M%.1f %d V%d H%.1f\" fill=\"none\" stroke=\"#444\"/>\n", p->left + LEFT, TOP,
            HEIGHT - BOTTOM, p->left + WIDTH - RIGHT);
    for (double x = p->low; x <= p->high + 1e-9; x += p->step) {
        p->label(words, sizeof words, x);
        text(p, place_x(p, x), HEIGHT - BOTTOM + 18, "middle", words);
    }
    for (double y = 0; y <= p->most * (1 + 1e-9); y += p->most_step) {
        snprintf(words, sizeof words, "%.3g", y);
        text(p, p->left + LEFT - 6, place_y(p, y) + 4, "end", words);
        fprintf(p->file, "<path d=\"M%.1f %.1f H%.1f\" stroke=\"#ddd\"/>\n", p->left + LEFT, place_y(p, y),
                p->left + WIDTH - RIGHT);
    }
    text(p, p->left + WIDTH / 2.0, HEIGHT - 12, "middle", p->axis);
    text(p, p->left + WIDTH / 2.0, TOP - 18, "middle", p->title);
}

/* One line for each operation, in the order in which they come. */
static void draw_lines(const struct plot *p, const struct bench_result *results, size_t n)
{
    int line = 0;
    const char *last = NULL;
    for (size_t i = 0; i < n && line < MAX_LINES; i++) {
        const struct bench_result *r = &results[i];
        if (!is_in(p, r) || (last && strcmp(last, r->operation) == 0))
            continue;
        last = r->operation;
        fprintf(p->file, "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"%s\" points=\"", colors[line]);
        for (size_t k = i; k < n; k++)
            if (is_in(p, &results[k]) && strcmp(results[k].operation, last) == 0)
                fprintf(p->file, "%.1f,%.1f ", place_x(p, p->x(&results[k])), place_y(p, bench_rate(&results[k])));
        const double y = HEIGHT + 14 + LEGEND * (line % LEGEND_ROWS),
                     x = p->left + LEFT + LEGEND_WIDTH * (line / LEGEND_ROWS);
        fprintf(p->file, "\"/>\n<path d=\"M%.1f %.1f h18\" stroke-width=\"3\" stroke=\"%s\"/>\n", x, y - 4,
                colors[line]);
        text(p, x + 24, y, "start", last);
        line++;
    }
}

static void draw(FILE *file, const struct bench_result *results, size_t n)
{
    struct plot plots[] = {
        { .part = "size",
          .title = "Gelem/s by size, one call",
          .axis = "bytes of FP32 input",
          .x = log_size,
          .label = size_label,
          .step = 4 },
        { .part = "threads",
          .title = "Gelem/s by threads",
          .axis = "threads",
          .left = WIDTH,
          .x = log_threads,
          .label = thread_label,
          .step = 1 },
    };
    const int height = HEIGHT + LEGEND_ROWS * LEGEND + 10;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            2 * WIDTH, height);
    for (size_t i = 0; i < sizeof plots / sizeof *plots; i++) {
        plots[i].file = file;
        find_range(&plots[i], results, n);
        draw_axes(&plots[i]);
        draw_lines(&plots[i], results, n);
    }
    fprintf(file, "</svg>\n");
}

int bench_write_svg(const char *path, const struct bench_result *results, size_t n)
{
    struct output out;
    const int code = output_open(&out, path);
    if (code)
        return code;
    draw(out.file, results, n);
    return output_close(&out, true);
}

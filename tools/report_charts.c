/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_charts.c - the charts of a report, as inline SVG.
 *
 * Marks that stand for data have the class "mark", and each says in its title what it stands for. Series differ by shape
 * as well as by color, and colors are classes, so that the page's style can have them light and dark. Every second label
 * of an axis has the class "o": narrow pages leave it out.
 */
#include "report_html.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "nib_reference.h"

enum { WIDTH = 860, HEIGHT = 340, LEFT = 62, RIGHT = 16, TOP = 14, BOTTOM = 58, MOST_SERIES = 24 };
enum { SMALL_WIDTH = 400, SMALL_HEIGHT = 130, SMALL_BOTTOM = 26 };

/* A place in the plane of a chart. */
struct chart {
    FILE *f;
    double low_x, high_x, low_y, high_y;
};

static double at_x(const struct chart *c, double x)
{
    return LEFT + (x - c->low_x) / (c->high_x - c->low_x) * (WIDTH - LEFT - RIGHT);
}

static double at_y(const struct chart *c, double y)
{
    return HEIGHT - BOTTOM - (y - c->low_y) / (c->high_y - c->low_y) * (HEIGHT - TOP - BOTTOM);
}

static void begin_chart(const struct chart *c, const char *id, const char *title, const char *description)
{
    fprintf(c->f,
            "<figure>\n<svg class=\"chart\" id=\"%s\" role=\"img\" viewBox=\"0 0 %d %d\" aria-labelledby=\"%s-t %s-d\">"
            "<title id=\"%s-t\">%s</title><desc id=\"%s-d\">",
            id, WIDTH, HEIGHT, id, id, id, title, id);
    report_put(c->f, description);
    fputs("</desc>\n", c->f);
}

static void end_chart(const struct chart *c, const char *x_label, const char *y_label)
{
    fprintf(c->f, "<path class=\"axis\" d=\"M%d %d V%d H%d\"/>\n", LEFT, TOP, HEIGHT - BOTTOM, WIDTH - RIGHT);
    fprintf(c->f, "<text class=\"tick\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label);
    fprintf(c->f,
            "<text class=\"tick side\" transform=\"translate(12 %d) rotate(-90)\" "
            "text-anchor=\"middle\">%s</text>\n</svg>\n",
            (TOP + HEIGHT - BOTTOM) / 2, y_label);
}

/* A label below the axis; `spare` ones may be left out. */
__attribute__((format(printf, 4, 0))) static void x_tick(const struct chart *c, double x, bool spare,
                                                         const char *format, double value)
{
    fprintf(c->f, "<text class=\"tick%s\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">", spare ? " o" : "", at_x(c, x),
            HEIGHT - BOTTOM + 20);
    fprintf(c->f, format, value);
    fputs("</text>\n", c->f);
}

/* 1, 2 or 5 times a power of ten, so that a span has at most so many steps. */
static double nice_step(double span, int most)
{
    double step = pow(10, floor(log10(span / most)));
    while (span / step > most)
        step *= span / (2 * step) <= most ? 2 : span / (5 * step) <= most ? 5 : 10;
    return step;
}

static void y_ticks(const struct chart *c, const char *format, double factor)
{
    const double step = nice_step((c->high_y - c->low_y) * factor, 6) / factor;
    char text[32];
    for (double y = ceil(c->low_y / step - 1e-9) * step; y <= c->high_y + step * 1e-9; y += step) {
        snprintf(text, sizeof text, format, fabs(y) < step / 2 ? 0.0 : y * factor);
        fprintf(c->f, "<path class=\"grid\" d=\"M%d %.1f H%d\"/>", LEFT, at_y(c, y), WIDTH - RIGHT);
        fprintf(c->f, "<text class=\"tick\" x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", LEFT - 6,
                at_y(c, y) + 4, text);
    }
}

/* ---- Signal to noise by layer ---- */

enum { COLORS = 8, SHAPES = 4 }; /* classes c0 to c7 of the style */

static void draw_shape(FILE *f, const char *kind, int series, double x, double y, double size)
{
    const int color = series % COLORS, shape = (series + series / COLORS) % SHAPES;
    const double s = size;
    fprintf(f, "<%s class=\"%s c%d\" ", shape ? "path" : "circle", kind, color);
    if (shape == 0)
        fprintf(f, "cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\">", x, y, s);
    else if (shape == 1)
        fprintf(f, "d=\"M%.1f %.1fh%.1fv%.1fh%.1fz\">", x - s, y - s, 2 * s, 2 * s, -2 * s);
    else if (shape == 2)
        fprintf(f, "d=\"M%.1f %.1fl%.1f %.1fh%.1fz\">", x, y - 1.2 * s, 1.2 * s, 2.1 * s, -2.4 * s);
    else
        fprintf(f, "d=\"M%.1f %.1fl%.1f %.1fl%.1f %.1fl%.1f %.1fz\">", x, y - 1.3 * s, 1.3 * s, 1.3 * s, -1.3 * s,
                1.3 * s, -1.3 * s, -1.3 * s);
}

static void end_shape(FILE *f, int series) { fputs((series + series / COLORS) % SHAPES ? "</path>" : "</circle>", f); }

/* A weight as a point: the layer is the first number in its name, the series what is behind the last. */
struct point {
    int layer; /* -1 where there is none */
    int series;
    double db;
    const struct report_row *row;
};

struct series {
    char name[64];
    int n;
};

static int compare_points(const void *a, const void *b)
{
    const struct point *x = a, *y = b;
    if (x->series != y->series)
        return x->series - y->series;
    if (x->layer != y->layer)
        return x->layer - y->layer;
    return (x->db > y->db) - (x->db < y->db);
}

static size_t gather_points(const struct report *r, struct point *points, struct series *series, int *n_series)
{
    size_t n = 0;
    *n_series = 0;
    for (size_t i = 0; i < r->n; i++) {
        const struct report_row *row = &r->rows[i];
        char name[64];
        if (!isfinite(row->sqnr))
            continue;
        struct point *p = &points[n++];
        *p = (struct point){ .layer = report_split_name(row->name, name, sizeof name), .db = row->sqnr, .row = row };
        while (p->series < *n_series && strcmp(series[p->series].name, name) != 0)
            p->series++;
        if (p->series == *n_series && *n_series < MOST_SERIES) {
            strcpy(series[p->series].name, *n_series == MOST_SERIES - 1 ? "others" : name);
            series[(*n_series)++].n = 0;
        }
        p->series = p->series < MOST_SERIES ? p->series : MOST_SERIES - 1;
        series[p->series].n++;
    }
    qsort(points, n, sizeof *points, compare_points);
    return n;
}

/* One layer's points of one series: their median, and a line from the least to the largest. */
static void draw_cell(const struct chart *c, const struct point *first, size_t n, int n_series, int other)
{
    const struct point *middle = &first[(n - 1) / 2];
    const double spread = fmin(0.7, 0.12 * n_series);
    const double shift = n_series > 1 ? ((double)first->series / (n_series - 1) - 0.5) * spread : 0;
    const double x = at_x(c, (first->layer < 0 ? other : first->layer) + shift);
    if (n > 1)
        fprintf(c->f, "<path class=\"c%d\" stroke-width=\"1.5\" d=\"M%.1f %.1fV%.1f\"/>", first->series % COLORS, x,
                at_y(c, first[0].db), at_y(c, first[n - 1].db));
    const double width = at_x(c, 1) - at_x(c, 0); /* of a layer */
    draw_shape(c->f, "mark", first->series, x, at_y(c, middle->db), fmax(1.8, fmin(3.4, width / 7)));
    fputs("<title>", c->f);
    report_put(c->f, first[0].row->name);
    if (n > 1)
        fprintf(c->f, " and %zu more: %.2f to %.2f dB, median %.2f</title>", n - 1, first[0].db, first[n - 1].db,
                middle->db);
    else
        fprintf(c->f, ": %.2f dB</title>", first[0].db);
    end_shape(c->f, first->series);
    fputc('\n', c->f);
}

static void draw_layers(FILE *f, const struct point *points, size_t n, const struct series *series, int n_series)
{
    struct chart c = { f, 1e9, -1e9, INFINITY, -INFINITY };
    bool others = false;
    for (size_t i = 0; i < n; i++) {
        others |= points[i].layer < 0;
        if (points[i].layer >= 0) {
            c.low_x = fmin(c.low_x, points[i].layer);
            c.high_x = fmax(c.high_x, points[i].layer);
        }
        c.low_y = fmin(c.low_y, points[i].db);
        c.high_y = fmax(c.high_y, points[i].db);
    }
    if (c.low_x > c.high_x)
        c.low_x = c.high_x = 0;
    const int last = (int)c.high_x, first = (int)c.low_x, other = last + 1;
    c.low_x -= 0.6;
    c.high_x += others ? 1.6 : 0.6;
    const double margin = fmax(0.2, 0.12 * (c.high_y - c.low_y));
    char description[256];
    snprintf(description, sizeof description, "%zu weights in %d kinds; signal to noise from %.2f to %.2f dB.", n,
             n_series, c.low_y, c.high_y);
    c.low_y -= margin;
    c.high_y += margin;
    begin_chart(&c, "layers", "Signal to noise of every quantized weight, by layer", description);
    y_ticks(&c, "%g", 1);
    const int step = (int)fmax(1, nice_step(fmax(1, last - first), 16));
    for (int layer = first; layer <= last; layer += step)
        x_tick(&c, layer, (layer - first) / step % 2, "%.0f", layer);
    if (others)
        x_tick(&c, other, false, "other", 0);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && points[end].series == points[i].series && points[end].layer == points[i].layer;)
            end++;
        draw_cell(&c, &points[i], end - i, n_series, other);
    }
    end_chart(&c, "layer", "signal to noise, dB");
    fputs("<ul class=\"legend\">", f);
    for (int i = 0; i < n_series; i++) {
        fputs("<li><svg viewBox=\"-7 -7 14 14\" aria-hidden=\"true\">", f);
        draw_shape(f, "key", i, 0, 0, 4.5);
        end_shape(f, i);
        fputs("</svg>", f);
        report_put(f, series[i].name);
        fputs("</li>", f);
    }
    fputs(
        "</ul>\n<figcaption>Higher is better; 6 dB are one bit. A mark is the median of a layer's weights of one kind, "
        "its line goes from the worst to the best of them.</figcaption></figure>\n",
        f);
}

bool report_put_layers(FILE *f, const struct report *r)
{
    struct series series[MOST_SERIES];
    int n_series;
    struct point *points = calloc(r->n + 1, sizeof *points);
    if (!points)
        return false;
    const size_t n = gather_points(r, points, series, &n_series);
    fputs("<h2 id=\"by-layer\">Signal to noise by layer</h2>\n", f);
    if (n)
        draw_layers(f, points, n, series, n_series);
    else
        fputs("<p>No weight differs.</p>\n", f);
    free(points);
    return true;
}

/* ---- Histograms ---- */

static float scale_value(int code)
{
    const uint8_t byte = (uint8_t)code;
    float value = 0;
    (void)nib_decode(NIB_E4M3, &byte, 1, &value);
    return value;
}

static void bar(const struct chart *c, double x, double width, double share, bool bad)
{
    fprintf(c->f, "<rect class=\"mark bar%d\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>",
            bad ? 2 : 1, at_x(c, x - width / 2), at_y(c, share), at_x(c, x + width / 2) - at_x(c, x - width / 2),
            at_y(c, 0) - at_y(c, share));
}

void report_put_scales(FILE *f, const struct report *r)
{
    int64_t total = 0, most = 0, small = 0;
    for (int i = 0; i < 256; i++) {
        total += r->scales[i];
        most = r->scales[i] > most ? r->scales[i] : most;
        small += i < 8 ? r->scales[i] : 0;
    }
    fputs("<h2 id=\"block-scales\">Block scales</h2>\n", f);
    if (!total) {
        fputs("<p>There are no block scales.</p>\n", f);
        return;
    }
    struct chart c = { f, -1, 128, 0, 1.06 * (double)most / (double)total };
    char description[256];
    snprintf(description, sizeof description,
             "%" PRId64 " block scales by their E4M3 code; %" PRId64 " are below 2^-6.", total, small);
    begin_chart(&c, "scales", "How often each block scale occurs", description);
    fprintf(f, "<rect class=\"band\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n", at_x(&c, -1), TOP,
            at_x(&c, 7.5) - at_x(&c, -1), HEIGHT - TOP - BOTTOM);
    y_ticks(&c, "%g%%", 100);
    for (int code = 8; code <= 120; code += 16) {
        const double value = (double)scale_value(code);
        x_tick(&c, code, (code - 8) / 16 % 2, value < 1 ? "1/%.0f" : "%.0f", value < 1 ? 1 / value : value);
    }
    for (int i = 0; i < 256; i++) {
        if (!r->scales[i])
            continue;
        const bool bad = i >= 0x7F;
        bar(&c, bad ? 127 : i, 0.84, (double)r->scales[i] / (double)total, bad || i < 8);
        if (bad)
            fprintf(f, "byte 0x%02X: ", i);
        else
            fprintf(f, "%g: ", (double)scale_value(i));
        fprintf(f, "%" PRId64 " blocks</title></rect>\n", r->scales[i]);
    }
    end_chart(&c, "block scale (E4M3, logarithmic)", "share of blocks");
    fputs("<figcaption>Scales in the red band are below 2<sup>-6</sup>: vLLM's Marlin kernel takes their blocks for "
          "zero. "
          "Here it is ",
          f);
    report_put_share(f, small, total);
    fputs(" of all blocks.</figcaption></figure>\n", f);
}

/* Values of codes in their order, both zeros as one. */
enum { VALUES = 15 };
static const char *const labels[VALUES] = { "-6",  "-4", "-3",  "-2", "-1.5", "-1", "-0.5", "0",
                                            "0.5", "1",  "1.5", "2",  "3",    "4",  "6" };

static int64_t order_codes(const int64_t *codes, int64_t *counts, int64_t *most)
{
    int64_t total = 0;
    for (int i = 0; i < VALUES; i++) {
        counts[i] = i < 7 ? codes[15 - i] : i == 7 ? codes[0] + codes[8] : codes[i - 7];
        total += counts[i];
        *most = counts[i] > *most ? counts[i] : *most;
    }
    return total;
}

void report_put_codes(FILE *f, const struct report *r)
{
    int64_t counts[VALUES], most = 0;
    const int64_t total = order_codes(r->codes, counts, &most);
    fputs("<h2 id=\"code-values\">Codes</h2>\n", f);
    if (!total) {
        fputs("<p>There are no codes.</p>\n", f);
        return;
    }
    struct chart c = { f, -0.6, 14.6, 0, 1.06 * (double)most / (double)total };
    char description[256];
    snprintf(description, sizeof description, "%" PRId64 " codes by their value; %.1f%% are zero.", total,
             100 * (double)counts[7] / (double)total);
    begin_chart(&c, "codes", "How often each code occurs", description);
    y_ticks(&c, "%g%%", 100);
    for (int i = 0; i < VALUES; i++) {
        x_tick(&c, i, (i + 1) % 2, labels[i], 0);
        bar(&c, i, 0.8, (double)counts[i] / (double)total, false);
        fprintf(f, "%s: %" PRId64 " codes, %.2f%%</title></rect>\n", labels[i], counts[i],
                100 * (double)counts[i] / (double)total);
    }
    end_chart(&c, "value of the code (E2M1)", "share of codes");
    fputs("<figcaption>Both zeros are counted together.</figcaption></figure>\n", f);
}

/* ---- One weight ---- */

/* Bars as one path: there may be hundreds of such charts in a page. */
static void put_small(FILE *f, const char *title, const int64_t *counts, int n, int64_t most, const char *const *texts,
                      const int *places, int n_texts)
{
    const double width = (double)SMALL_WIDTH / n, full = SMALL_HEIGHT - SMALL_BOTTOM;
    fprintf(f, "<figure><svg class=\"chart small\" viewBox=\"0 0 %d %d\" role=\"img\"><title>%s</title>\n", SMALL_WIDTH,
            SMALL_HEIGHT, title);
    fputs("<path class=\"mark bar1\" d=\"", f);
    for (int i = 0; i < n; i++)
        if (counts[i])
            fprintf(f, "M%.1f %.0fv%.1fh%.1fv%.1fz", (i + 0.08) * width, full,
                    -(full - 2) * (double)counts[i] / (double)most, 0.84 * width,
                    (full - 2) * (double)counts[i] / (double)most);
    fprintf(f, "\"/><path class=\"axis\" d=\"M0 %.1fH%d\"/>", full + 0.5, SMALL_WIDTH);
    for (int i = 0; i < n_texts; i++)
        fprintf(f, "<text class=\"tick%s\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>", i % 2 ? " o" : "",
                (places[i] + 0.5) * width, SMALL_HEIGHT - 8, texts[i]);
    fprintf(f, "</svg>\n<figcaption>%s</figcaption></figure>\n", title);
}

void report_put_histograms(FILE *f, const nib_weight_stats *stats)
{
    static const int values[] = { 0, 2, 4, 6, 7, 8, 10, 12, 14 };
    static const int codes[] = { 8, 24, 40, 56, 72, 88, 104, 120 };
    static const char *const scales[] = { "1/64", "1/16", "1/4", "1", "4", "16", "64", "256" };
    enum { N_VALUES = sizeof values / sizeof *values, N_CODES = sizeof codes / sizeof *codes };
    const char *texts[N_VALUES];
    int64_t counts[VALUES], bytes[128], most = 0, most_scale = 0;
    if (order_codes(stats->codes, counts, &most) == 0)
        return; /* it is not NVFP4 */
    for (int i = 0; i < N_VALUES; i++)
        texts[i] = labels[values[i]];
    for (int i = 0; i < 128; i++) {
        bytes[i] = stats->scales[i];
        most_scale = bytes[i] > most_scale ? bytes[i] : most_scale;
    }
    fputs("<div class=\"pair\">", f);
    put_small(f, "Codes by value", counts, VALUES, most, texts, values, N_VALUES);
    if (most_scale)
        put_small(f, "Block scales", bytes, 128, most_scale, scales, codes, N_CODES);
    fputs("</div>\n", f);
}

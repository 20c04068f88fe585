/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_html.c - a report as one page: tables and inline SVG, no script, nothing from the network, fit for paper.
 *
 * Marks that stand for data have the class "mark", and each says in its title what it stands for. Series differ by shape
 * as well as by color.
 */
#include "report_html.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "nib_reference.h"
#include "text.h"

enum { WIDTH = 860, HEIGHT = 340, LEFT = 56, RIGHT = 16, TOP = 14, BOTTOM = 46, WORST = 20, MOST_SERIES = 24 };

static const char style[] =
    "body{font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif;color:#1b1f24;"
    "background:#fff;max-width:880px;margin:2.5rem auto;padding:0 1.25rem}"
    "h1{font-size:1.7rem;line-height:1.2;margin:0 0 .25rem}h2{font-size:1.2rem;margin:2.4rem 0 .6rem}"
    ".sub{color:#57606a;margin:0 0 1.5rem}"
    ".tiles{display:flex;flex-wrap:wrap;gap:.75rem;margin:1.25rem 0;padding:0;list-style:none}"
    ".tiles li{flex:1 1 7.5rem;border:1px solid #d0d7de;border-radius:6px;padding:.6rem .75rem}"
    ".tiles b{display:block;font-size:1.15rem;line-height:1.3;white-space:nowrap;font-variant-numeric:tabular-nums}"
    ".tiles span{color:#57606a;font-size:.85rem}"
    "table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}"
    "caption{text-align:left;color:#57606a;padding:0 0 .4rem}"
    "th,td{padding:.3rem .6rem;border-bottom:1px solid #d8dee4;text-align:right;vertical-align:top;white-space:nowrap}"
    "th{font-weight:600;border-bottom:2px solid #8c959f}"
    "th{white-space:normal}th.l,td.l{text-align:left;white-space:normal;overflow-wrap:break-word}td.n{width:42%}td.v{"
    "overflow-wrap:anywhere}"
    "code{font-family:ui-monospace,'DejaVu Sans Mono','Liberation Mono',monospace;font-size:.9em}"
    "figure{margin:0;break-inside:avoid}figcaption{color:#57606a;font-size:.9rem;margin:.3rem 0 0}"
    "svg{width:100%;height:auto;display:block;font:12px system-ui,'Segoe UI',Roboto,'Liberation Sans',sans-serif}"
    ".axis{stroke:#57606a;fill:none}.grid{stroke:#e3e7eb}.tick{fill:#57606a}"
    ".legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;list-style:none;margin:.3rem 0 0;padding:0;font-size:.85rem}"
    ".legend svg{display:inline-block;width:14px;height:14px;vertical-align:-2px;margin-right:.35rem}"
    "footer{color:#57606a;font-size:.85rem;margin-top:2.5rem;border-top:1px solid #d8dee4;padding-top:.8rem}"
    "@media "
    "print{body{margin:0;max-width:none;font-size:10pt;padding:0}h2{break-after:avoid;margin-top:1.4rem}tr{break-"
    "inside:avoid}"
    "table{font-size:8pt}th,td{padding:.16rem .35rem}svg{max-height:62mm}"
    "thead{display:table-header-group}}@page{margin:16mm}";

/* ---- Text ---- */

/* Names come from files that anyone may have written. */
static void put(FILE *f, const char *text)
{
    for (; *text; text++)
        switch (*text) {
        case '&':
            fputs("&amp;", f);
            break;
        case '<':
            fputs("&lt;", f);
            break;
        case '>':
            fputs("&gt;", f);
            break;
        case '"':
            fputs("&quot;", f);
            break;
        default:
            fputc((unsigned char)*text < 0x20 || *text == 0x7F ? '?' : *text, f);
        }
}

/* The name of a module, which may be broken behind its dots. */
static void put_name(FILE *f, const char *name)
{
    char part[256];
    fputs("<code>", f);
    while (*name) {
        size_t length = strcspn(name, ".") + 1;
        length = length <= strlen(name) ? length : strlen(name);
        length = length < sizeof part ? length : sizeof part - 1;
        memcpy(part, name, length);
        part[length] = 0;
        put(f, part);
        name += length;
        fputs(*name ? "<wbr>" : "", f);
    }
    fputs("</code>", f);
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static void put_share(FILE *f, int64_t part, int64_t whole)
{
    const double percent = whole ? 100 * (double)part / (double)whole : 0;
    if (part && percent < 0.005)
        fprintf(f, "&lt;0.01%%");
    else
        fprintf(f, "%.2f%%", percent);
}

__attribute__((format(printf, 3, 4))) static void tile(FILE *f, const char *label, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("<li><b>", f);
    vfprintf(f, format, arguments);
    fprintf(f, "</b><span>%s</span></li>\n", label);
    va_end(arguments);
}

/* ---- Charts ---- */

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
            "<figure>\n<svg id=\"%s\" role=\"img\" viewBox=\"0 0 %d %d\" aria-labelledby=\"%s-t %s-d\">"
            "<title id=\"%s-t\">%s</title><desc id=\"%s-d\">",
            id, WIDTH, HEIGHT, id, id, id, title, id);
    put(c->f, description);
    fputs("</desc>\n", c->f);
}

static void end_chart(const struct chart *c, const char *x_label, const char *y_label)
{
    fprintf(c->f, "<path class=\"axis\" d=\"M%d %d V%d H%d\"/>\n", LEFT, TOP, HEIGHT - BOTTOM, WIDTH - RIGHT);
    fprintf(c->f, "<text class=\"tick\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label);
    fprintf(
        c->f,
        "<text class=\"tick\" transform=\"translate(14 %d) rotate(-90)\" text-anchor=\"middle\">%s</text>\n</svg>\n",
        (TOP + HEIGHT - BOTTOM) / 2, y_label);
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

static const char *const colours[] = { "#0072b2", "#d55e00", "#007a5a", "#a6478a",
                                       "#8a6d00", "#3a86c8", "#24292f", "#b3261e" };
enum { COLOURS = sizeof colours / sizeof *colours, SHAPES = 4 };

static void draw_shape(FILE *f, const char *kind, int series, double x, double y, double size)
{
    const char *colour = colours[series % COLOURS];
    const double s = size;
    switch ((series + series / COLOURS) % SHAPES) {
    case 0:
        fprintf(f, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\" fill=\"%s\">", kind, x, y, s, colour);
        break;
    case 1:
        fprintf(f, "<path class=\"%s\" d=\"M%.1f %.1f h%.1f v%.1f h%.1f z\" fill=\"%s\">", kind, x - s, y - s, 2 * s,
                2 * s, -2 * s, colour);
        break;
    case 2:
        fprintf(f, "<path class=\"%s\" d=\"M%.1f %.1f l%.1f %.1f h%.1f z\" fill=\"%s\">", kind, x, y - 1.2 * s, 1.2 * s,
                2.1 * s, -2.4 * s, colour);
        break;
    default:
        fprintf(f, "<path class=\"%s\" d=\"M%.1f %.1f l%.1f %.1f l%.1f %.1f l%.1f %.1f z\" fill=\"%s\">", kind, x,
                y - 1.3 * s, 1.3 * s, 1.3 * s, -1.3 * s, 1.3 * s, -1.3 * s, -1.3 * s, colour);
    }
}

static void end_shape(FILE *f, int series) { fputs((series + series / COLOURS) % SHAPES ? "</path>" : "</circle>", f); }

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

/* "model.layers.3.mlp.experts.7.up_proj": layer 3, "experts up_proj". */
static int split_name(const char *name, char *series, size_t bytes)
{
    int layer = -1;
    const char *part = name, *last = name;
    for (; part; part = strchr(part, '.') ? strchr(part, '.') + 1 : NULL) {
        char *end;
        const long number = strtol(part, &end, 10);
        if (end != part && (*end == '.' || !*end) && layer < 0 && number >= 0 && number < 100000)
            layer = (int)number;
        if (end == part)
            last = part;
    }
    snprintf(series, bytes, "%s%.*s", strstr(name, "experts.") ? "experts " : "", (int)strcspn(last, "."), last);
    return layer;
}

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
        *p = (struct point){ .layer = split_name(row->name, name, sizeof name), .db = row->sqnr, .row = row };
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
        fprintf(c->f, "<path d=\"M%.1f %.1f V%.1f\" stroke=\"%s\" stroke-width=\"1.5\"/>", x, at_y(c, first[0].db),
                at_y(c, first[n - 1].db), colours[first->series % COLOURS]);
    const double width = at_x(c, 1) - at_x(c, 0); /* of a layer */
    draw_shape(c->f, "mark", first->series, x, at_y(c, middle->db), fmax(1.8, fmin(3.4, width / 7)));
    fputs("<title>", c->f);
    put(c->f, first[0].row->name);
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
    const double margin = fmax(0.5, 0.08 * (c.high_y - c.low_y));
    char description[256];
    snprintf(description, sizeof description, "%zu weights in %d kinds; signal to noise from %.2f to %.2f dB.", n,
             n_series, c.low_y, c.high_y);
    c.low_y -= margin;
    c.high_y += margin;
    begin_chart(&c, "layers", "Signal to noise of every quantized weight, by layer", description);
    y_ticks(&c, "%g", 1);
    const int step = (int)fmax(1, nice_step(fmax(1, last - first), 16));
    for (int layer = first; layer <= last; layer += step)
        fprintf(f, "<text class=\"tick\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", at_x(&c, layer),
                HEIGHT - BOTTOM + 18, layer);
    if (others)
        fprintf(f, "<text class=\"tick\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">other</text>\n", at_x(&c, other),
                HEIGHT - BOTTOM + 18);
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
        put(f, series[i].name);
        fputs("</li>", f);
    }
    fputs(
        "</ul>\n<figcaption>Higher is better; 6 dB are one bit. A mark is the median of a layer's weights of one kind, "
        "its line goes from the worst to the best of them.</figcaption></figure>\n",
        f);
}

static bool put_layers(FILE *f, const struct report *r)
{
    struct series series[MOST_SERIES];
    int n_series;
    struct point *points = calloc(r->n + 1, sizeof *points);
    if (!points)
        return false;
    const size_t n = gather_points(r, points, series, &n_series);
    fputs("<h2>Signal to noise by layer</h2>\n", f);
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

static void bar(const struct chart *c, double x, double width, double share, const char *colour)
{
    fprintf(c->f, "<rect class=\"mark\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"><title>",
            at_x(c, x - width / 2), at_y(c, share), at_x(c, x + width / 2) - at_x(c, x - width / 2),
            at_y(c, 0) - at_y(c, share), colour);
}

static void put_scales(FILE *f, const struct report *r)
{
    int64_t total = 0, most = 0, small = 0;
    for (int i = 0; i < 256; i++) {
        total += r->scales[i];
        most = r->scales[i] > most ? r->scales[i] : most;
        small += i < 8 ? r->scales[i] : 0;
    }
    fputs("<h2>Block scales</h2>\n", f);
    if (!total) {
        fputs("<p>There are no block scales.</p>\n", f);
        return;
    }
    struct chart c = { f, -1, 128, 0, 1.06 * (double)most / (double)total };
    char description[256];
    snprintf(description, sizeof description,
             "%" PRId64 " block scales by their E4M3 code; %" PRId64 " are below 2^-6.", total, small);
    begin_chart(&c, "scales", "How often each block scale occurs", description);
    fprintf(f, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"#fbeeee\"/>\n", at_x(&c, -1), TOP,
            at_x(&c, 7.5) - at_x(&c, -1), HEIGHT - TOP - BOTTOM);
    y_ticks(&c, "%g%%", 100);
    for (int code = 8; code <= 120; code += 16) {
        const double value = (double)scale_value(code);
        fprintf(f, "<text class=\"tick\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">", at_x(&c, code),
                HEIGHT - BOTTOM + 18);
        fprintf(f, value < 1 ? "1/%.0f</text>\n" : "%.0f</text>\n", value < 1 ? 1 / value : value);
    }
    for (int i = 0; i < 256; i++) {
        if (!r->scales[i])
            continue;
        const bool bad = i >= 0x7F;
        bar(&c, bad ? 127 : i, 0.84, (double)r->scales[i] / (double)total, bad || i < 8 ? "#b3261e" : "#0072b2");
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
    put_share(f, small, total);
    fputs(" of all blocks.</figcaption></figure>\n", f);
}

static void put_codes(FILE *f, const struct report *r)
{
    static const char *const labels[] = { "-6",  "-4", "-3",  "-2", "-1.5", "-1", "-0.5", "0",
                                          "0.5", "1",  "1.5", "2",  "3",    "4",  "6" };
    int64_t counts[15], total = 0, most = 0;
    for (int i = 0; i < 15; i++) {
        counts[i] = i < 7 ? r->codes[15 - i] : i == 7 ? r->codes[0] + r->codes[8] : r->codes[i - 7];
        total += counts[i];
        most = counts[i] > most ? counts[i] : most;
    }
    fputs("<h2>Codes</h2>\n", f);
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
    for (int i = 0; i < 15; i++) {
        fprintf(f, "<text class=\"tick\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", at_x(&c, i),
                HEIGHT - BOTTOM + 18, labels[i]);
        bar(&c, i, 0.8, (double)counts[i] / (double)total, "#0072b2");
        fprintf(f, "%s: %" PRId64 " codes, %.2f%%</title></rect>\n", labels[i], counts[i],
                100 * (double)counts[i] / (double)total);
    }
    end_chart(&c, "value of the code (E2M1)", "share of codes");
    fputs("<figcaption>Both zeros are counted together.</figcaption></figure>\n", f);
}

/* ---- Tables ---- */

static void put_worst(FILE *f, const struct report_row **worst)
{
    char db[32];
    fputs(
        "<h2>Worst weights</h2>\n<table>\n<thead><tr><th class=\"l\">Weight</th><th>Shape</th><th>dB</th>"
        "<th>Relative&nbsp;L2</th><th>Largest error</th><th>Zeroed</th><th>Clipped</th><th>Underflowed blocks</th></tr>"
        "</thead>\n<tbody>\n",
        f);
    for (int i = 0; i < WORST && worst[i]; i++) {
        const struct report_row *row = worst[i];
        fputs("<tr><td class=\"l n\">", f);
        put_name(f, row->name);
        fprintf(f, "</td><td>%" PRId64 "&times;%" PRId64 "</td><td>%s</td><td>%.4f</td><td>%.4g</td><td>", row->rows,
                row->cols, text_db(row->sqnr, db, sizeof db), row->relative, row->max_error);
        put_share(f, row->zeroed, row->elements);
        fputs("</td><td>", f);
        put_share(f, row->clipped, row->elements);
        fputs("</td><td>", f);
        put_share(f, row->underflowed, row->blocks);
        fputs("</td></tr>\n", f);
    }
    fputs("</tbody></table>\n", f);
}

/* Weights to which the same happened. */
struct fate {
    nib_action action;
    const char *words;
    const char *first; /* one of them */
    size_t n;
    uint64_t in, out;
};

/* What changes first, then what is kept, the most frequent first. */
static int compare_fates(const void *a, const void *b)
{
    const struct fate *x = a, *y = b;
    if (x->action != y->action)
        return x->action < y->action ? -1 : 1;
    return x->n != y->n ? (x->n > y->n ? -1 : 1) : strcmp(x->words, y->words);
}

static void put_fates(FILE *f, const struct fate *fates, size_t n)
{
    char in[16], out[16];
    fputs("<table>\n<thead><tr><th class=\"l\">What</th><th>Weights</th><th>Before</th><th>After</th>"
          "<th class=\"l\">For example</th></tr></thead>\n<tbody>\n",
          f);
    for (size_t i = 0; i < n; i++) {
        fputs("<tr><td class=\"l\">", f);
        put(f, fates[i].words);
        fprintf(f, "</td><td>%zu</td><td>%s</td><td>%s</td><td class=\"l n\">", fates[i].n,
                text_bytes(fates[i].in, in, sizeof in), text_bytes(fates[i].out, out, sizeof out));
        put_name(f, fates[i].first);
        fputs("</td></tr>\n", f);
    }
    fputs("</tbody></table>\n", f);
}

static bool put_plan(FILE *f, const nib_plan *plan)
{
    enum { MOST = 64 };
    static const char *const actions[NIB_ACTION_COUNT] = { "quantized", "converted", "dequantized", "repaired",
                                                           "kept" };
    nib_plan_facts facts = { .bytes = sizeof facts };
    if (!plan || nib_plan_get_facts(plan, &facts))
        return true;
    struct fate *fates = calloc(MOST, sizeof *fates);
    char(*words)[160] = calloc(MOST, sizeof *words);
    size_t n = 0;
    for (size_t i = 0; fates && words && i < facts.weights; i++) {
        nib_plan_row row = { .bytes = sizeof row };
        char text[160];
        if (nib_plan_get_row(plan, i, &row))
            continue;
        snprintf(text, sizeof text, "%s%s%s", actions[row.action], *row.reason ? ": " : "", row.reason);
        size_t j = 0;
        while (j < n && strcmp(words[j], text) != 0)
            j++;
        if (j == n && n == MOST)
            j = MOST - 1;
        else if (j == n) {
            strcpy(words[n], text);
            fates[n] = (struct fate){ .action = row.action, .words = words[n], .first = row.name };
            n++;
        }
        fates[j].n++;
        fates[j].in += row.bytes_in;
        fates[j].out += row.bytes_out;
    }
    const bool good = fates && words;
    if (good) {
        fprintf(f, "<h2>Plan</h2>\n<p>%zu of %zu weights change; %zu groups of two or more share a tensor scale.</p>\n",
                facts.changed, facts.weights, facts.groups);
        qsort(fates, n, sizeof *fates, compare_fates);
        put_fates(f, fates, n);
    }
    free(fates);
    free(words);
    return good;
}

static void put_leaf(FILE *f, const char *key, json_t *value)
{
    char *text = json_is_string(value) ? NULL : json_dumps(value, JSON_ENCODE_ANY);
    fputs("<tr><td class=\"l\"><code>", f);
    put(f, key);
    fputs("</code></td><td class=\"l v\">", f);
    put(f, text ? text : json_is_string(value) ? json_string_value(value) : "");
    fputs("</td></tr>\n", f);
    free(text);
}

static bool put_provenance(FILE *f, const struct report *r)
{
    if (!r->facts_b.provenance)
        return true;
    json_t *all = report_differences(NULL, r->facts_b.provenance), *entry;
    size_t i;
    if (!all)
        return false;
    fputs("<h2>How it was made</h2>\n<table>\n<thead><tr><th class=\"l\">Option</th><th class=\"l\">Value</th></tr>"
          "</thead>\n<tbody>\n",
          f);
    json_array_foreach(all, i, entry)
        put_leaf(f, json_string_value(json_object_get(entry, "option")), json_object_get(entry, "b"));
    fputs("</tbody></table>\n", f);
    json_decref(all);
    return true;
}

/* ---- The page ---- */

static void put_summary(FILE *f, const struct report *r, const struct report_row **worst)
{
    char before[16], after[16], db[32];
    size_t n = 0;
    while (worst[n])
        n++;
    fputs("<h1>", f);
    put(f, last_part(r->facts_b.path));
    fputs("</h1>\n<p class=\"sub\">", f);
    put(f, nib_checkpoint_format_name(r->facts_b.format));
    fputs(", compared with <code>", f);
    put(f, last_part(r->facts_a.path));
    fputs("</code>", f);
    if (*r->facts_b.model_type) {
        fputs(", model type ", f);
        put(f, r->facts_b.model_type);
    }
    fputs("</p>\n<ul class=\"tiles\">\n", f);
    if (n) {
        tile(f, "signal to noise of all quantized weights", "%s dB",
             text_db(10 * log10(r->sum_squares / r->error_squares), db, sizeof db));
        tile(f, "median of the weights", "%s dB", text_db(worst[n / 2]->sqnr, db, sizeof db));
        tile(f, "worst weight", "%s dB", text_db(worst[0]->sqnr, db, sizeof db));
    }
    tile(f, "tensors before and after", "%s &rarr; %s", text_bytes(r->facts_a.tensor_bytes, before, sizeof before),
         text_bytes(r->facts_b.tensor_bytes, after, sizeof after));
    tile(f, "weights quantized, of those in both", "%zu / %zu", r->changed, r->n);
    fputs("</ul>\n<table>\n<tbody>\n<tr><td class=\"l\">Values that became zero</td><td>", f);
    put_share(f, r->zeroed, r->elements);
    fputs("</td></tr>\n<tr><td class=\"l\">Values beyond what their block can hold</td><td>", f);
    put_share(f, r->clipped, r->elements);
    fputs("</td></tr>\n<tr><td class=\"l\">Blocks with values whose scale is below 2<sup>-6</sup></td><td>", f);
    put_share(f, r->underflowed, r->blocks);
    fprintf(f, "</td></tr>\n<tr><td class=\"l\">Weights that only one of the two has</td><td>%zu and %zu</td></tr>\n",
            r->only_a, r->only_b);
    fputs("</tbody></table>\n", f);
}

bool report_write_html(FILE *f, const struct report *r, const nib_plan *plan)
{
    const struct report_row **worst = report_worst(r);
    if (!worst)
        return false;
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
          f);
    put(f, last_part(r->facts_b.path));
    fprintf(f, ": quantization report</title>\n<style>%s</style>\n</head>\n<body>\n", style);
    put_summary(f, r, worst);
    bool good = put_layers(f, r);
    put_scales(f, r);
    put_codes(f, r);
    if (worst[0])
        put_worst(f, worst);
    good &= put_plan(f, plan) && put_provenance(f, r);
    fprintf(f,
            "<footer>Made by nib %s. Signal to noise is 10 log<sub>10</sub> of the sum of squares of the weights over "
            "that of their errors.</footer>\n</body>\n</html>\n",
            nib_version());
    free(worst);
    return good;
}

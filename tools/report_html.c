/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_html.c - a report as one page: text, tables and what is said of one weight. It loads nothing, is readable without
 * its script, on paper, narrow and in the dark, and no name in it can be anything but text: report_put writes them all,
 * and the page's policy allows one script and no more.
 */
#define _XOPEN_SOURCE 700 /* realpath */

#include "report_html.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

/* ---- Text ---- */

void report_put(FILE *f, const char *text)
{
    for (size_t n; *text; text += n ? n : 1) {
        n = text_character(text);
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
            fwrite(n ? text : "?", 1, n ? n : 1, f);
        }
    }
}

/* The name of a module, which may be broken behind its dots. */
static void put_name(FILE *f, const char *name)
{
    char part[256];
    fputs("<code>", f);
    while (*name) {
        size_t length = 0; /* never looks further: a name may have millions of bytes */
        while (length < sizeof part - 1 && name[length] && name[length++] != '.')
            continue;
        while (length > 1 && ((unsigned char)name[length] & 0xC0) == 0x80) /* not within a character */
            length--;
        memcpy(part, name, length);
        part[length] = 0;
        report_put(f, part);
        name += length;
        fputs(*name ? "<wbr>" : "", f);
    }
    fputs("</code>", f);
}

/* What a checkpoint is called: the last part of its path, that of "." too. */
static void put_called(FILE *f, const char *path)
{
    const char *slash = strrchr(path, '/'), *last = slash && slash[1] ? slash + 1 : path;
    char *const real = strcmp(last, ".") == 0 || strcmp(last, "..") == 0 ? realpath(path, NULL) : NULL;
    if (real)
        last = strrchr(real, '/') + 1;
    report_put(f, last);
    free(real);
}

void report_put_share(FILE *f, int64_t part, int64_t whole)
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

static void put_lines(FILE *f, const char *const *lines)
{
    for (; *lines; lines++) {
        fputs(*lines, f);
        fputc('\n', f);
    }
}

/* A size, with a dash for what is not there. */
static void put_bytes(FILE *f, const char *before, uint64_t bytes)
{
    char text[16];
    fprintf(f, "%s%s", before, bytes ? text_bytes(bytes, text, sizeof text) : "&ndash;");
}

/* ---- Size by kind ---- */

static void put_kind(FILE *f, const struct report_kind *kind, uint64_t most)
{
    enum { BAR_WIDTH = 400 };
    const double scale = most ? (double)BAR_WIDTH / (double)most : 0;
    char before[16], after[16];
    fputs("<tr><td class=\"l\">", f);
    report_put(f, kind->name);
    fputs("</td><td>", f);
    if (kind->weights)
        fprintf(f, "%zu", kind->weights);
    put_bytes(f, "</td><td>", kind->before);
    put_bytes(f, "</td><td>", kind->after);
    fprintf(
        f,
        "</td><td>%.2f</td><td class=\"graph\"><svg viewBox=\"0 0 %d 18\" preserveAspectRatio=\"none\" role=\"img\">",
        text_bits(kind->after, kind->elements), BAR_WIDTH);
    fprintf(f, "<title>%s before, %s after</title>", text_bytes(kind->before, before, sizeof before),
            text_bytes(kind->after, after, sizeof after));
    fprintf(f, "<rect class=\"mark bar0\" y=\"1\" width=\"%.1f\" height=\"7\"/>", (double)kind->before * scale);
    fprintf(f, "<rect class=\"mark bar1\" y=\"9\" width=\"%.1f\" height=\"7\"/></svg></td></tr>\n",
            (double)kind->after * scale);
}

static void put_kinds(FILE *f, const struct report_items *items)
{
    uint64_t most = items->others.before > items->others.after ? items->others.before : items->others.after;
    for (size_t i = 0; i < items->n_kinds; i++) {
        const struct report_kind *kind = &items->kinds[i];
        most = kind->before > most ? kind->before : most;
        most = kind->after > most ? kind->after : most;
    }
    fputs("<h2 id=\"by-kind\">Size by kind</h2>\n<table id=\"sizes\" class=\"cards\">\n<thead><tr><th "
          "class=\"l\">Kind</th>"
          "<th>Weights</th><th>Before</th><th>After</th><th>Bits per weight</th><th class=\"l\">Before and "
          "after</th></tr></thead>\n"
          "<tbody>\n",
          f);
    for (size_t i = 0; i < items->n_kinds; i++)
        put_kind(f, &items->kinds[i], most);
    if (items->others.before || items->others.after)
        put_kind(f, &items->others, most);
    fputs(
        "</tbody></table>\n<ul class=\"legend\"><li><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\"><rect "
        "class=\"bar0\" "
        "y=\"3\" width=\"14\" height=\"8\"/></svg>before</li><li><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\"><rect "
        "class=\"bar1\" y=\"3\" width=\"14\" height=\"8\"/></svg>after</li></ul>\n",
        f);
}

/* ---- What became of the weights ---- */

/* Weights to which the same happened, for the same reason. */
struct group {
    const struct report_item *first;
    size_t n;
    uint64_t before, after;
};

enum { MOST_GROUPS = 64 };

static bool same_fate(const struct report_item *a, const struct report_item *b)
{
    return strcmp(a->fate, b->fate) == 0 && strcmp(a->reason, b->reason) == 0;
}

/* What changed first, then what was kept, the most frequent first. */
static int compare_groups(const void *a, const void *b)
{
    const struct group *x = a, *y = b;
    if (x->first->kept != y->first->kept)
        return x->first->kept ? 1 : -1;
    return x->n != y->n ? (x->n > y->n ? -1 : 1) : strcmp(x->first->name, y->first->name);
}

static void put_fate(FILE *f, const struct report_item *item)
{
    fputs(item->fate, f);
    if (*item->reason) {
        fputs(": ", f);
        report_put(f, item->reason);
    }
}

/* What was kept is listed by name: these are the weights that one asks about. */
static void put_group(FILE *f, const struct report_items *items, const struct group *group)
{
    fputs("<tr><td class=\"l\">", f);
    put_fate(f, group->first);
    fprintf(f, "</td><td>%zu", group->n);
    put_bytes(f, "</td><td>", group->before);
    put_bytes(f, "</td><td>", group->after);
    fputs("</td><td class=\"l whole\">", f);
    if (!group->first->kept || group->n == 1) {
        put_name(f, group->first->name);
        if (group->n > 1)
            fprintf(f, " and %zu more", group->n - 1);
    } else {
        fputs("<details class=\"in\"><summary>", f);
        put_name(f, group->first->name);
        fprintf(f, " and %zu more</summary><ul class=\"names\">\n", group->n - 1);
        for (size_t i = 0; i < items->n; i++)
            if (same_fate(&items->items[i], group->first)) {
                fputs("<li>", f);
                put_name(f, items->items[i].name);
                fputs("</li>\n", f);
            }
        fputs("</ul></details>", f);
    }
    fputs("</td></tr>\n", f);
}

static void put_fates(FILE *f, const struct report_items *items)
{
    struct group groups[MOST_GROUPS];
    size_t n = 0;
    for (size_t i = 0; i < items->n; i++) {
        const struct report_item *item = &items->items[i];
        size_t k = 0;
        while (k < n && !same_fate(groups[k].first, item))
            k++;
        if (k == MOST_GROUPS)
            continue; /* the table of all weights has them */
        if (k == n)
            groups[n++] = (struct group){ .first = item };
        groups[k].n++;
        groups[k].before += item->before;
        groups[k].after += item->after;
    }
    qsort(groups, n, sizeof *groups, compare_groups);
    fputs("<h2 id=\"what-became\">What became of the weights</h2>\n", f);
    if (items->planned)
        fprintf(f, "<p>%zu of %zu weights were changed; %zu groups of two or more share a tensor scale.</p>\n",
                items->plan.changed, items->plan.weights, items->plan.groups);
    fputs("<table id=\"fates\" class=\"cards\">\n<thead><tr><th class=\"l\">What</th><th>Weights</th><th>Before</th>"
          "<th>After</th><th class=\"l\">Which</th></tr></thead>\n<tbody>\n",
          f);
    for (size_t i = 0; i < n; i++)
        put_group(f, items, &groups[i]);
    fputs("</tbody></table>\n", f);
}

/* ---- All weights ---- */

/* A share, which is sorted by its value. */
static void put_share_cell(FILE *f, int64_t part, int64_t whole)
{
    fprintf(f, "<td data-v=\"%.6g\">", whole ? (double)part / (double)whole : 0.0);
    report_put_share(f, part, whole);
    fputs("</td>", f);
}

static void put_item(FILE *f, const struct report_item *item, size_t number)
{
    const struct report_row *row = item->row;
    const bool differs = row && row->sqnr < INFINITY;
    char db[32];
    fprintf(f, "<tr data-f=\"%s\"><td class=\"l\">", item->fate);
    if (row && row->detail != REPORT_NONE)
        fprintf(f, "<a href=\"#w%zu\">", number);
    put_name(f, item->name);
    fputs(row && row->detail != REPORT_NONE ? "</a></td><td class=\"l\">" : "</td><td class=\"l\">", f);
    put_fate(f, item);
    fprintf(f, "</td><td data-v=\"%.0f\">%" PRId64 "&times;%" PRId64 "</td><td data-v=\"%" PRIu64 "\">",
            (double)item->rows * (double)item->cols, item->rows, item->cols, item->before);
    put_bytes(f, "", item->before);
    fprintf(f, "</td><td data-v=\"%" PRIu64 "\">", item->after);
    put_bytes(f, "", item->after);
    if (!differs) {
        fputs("</td><td data-v=\"1e9\">&ndash;</td><td data-v=\"0\">&ndash;</td><td data-v=\"0\">&ndash;</td>"
              "<td data-v=\"0\">&ndash;</td></tr>\n",
              f);
        return;
    }
    fprintf(f, "</td><td data-v=\"%.4f\">%s</td>", fmax(-1e9, row->sqnr), text_db(row->sqnr, db, sizeof db));
    put_share_cell(f, row->zeroed, row->elements);
    put_share_cell(f, row->clipped, row->elements);
    put_share_cell(f, row->underflowed, row->blocks);
    fputs("</tr>\n", f);
}

static void put_items(FILE *f, const struct report_items *items)
{
    fprintf(f, "<h2 id=\"weights\">All weights</h2>\n<p>%zu weights, those that changed most first.</p>\n", items->n);
    fputs("<table id=\"all\" class=\"cards\">\n<thead><tr><th class=\"l\">Weight</th><th "
          "class=\"l\">What</th><th>Shape</th>"
          "<th>Before</th><th>After</th><th>dB</th><th>Zeroed</th><th>Clipped</th><th>Underflowed</th></tr>"
          "</thead>\n<tbody>\n",
          f);
    for (size_t i = 0; i < items->n; i++)
        put_item(f, &items->items[i], i);
    fputs("</tbody></table>\n", f);
}

/* ---- One weight ---- */

__attribute__((format(printf, 3, 4))) static void fact(FILE *f, const char *label, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(f, "<div><dt>%s</dt><dd>", label);
    vfprintf(f, format, arguments);
    fputs("</dd></div>\n", f);
    va_end(arguments);
}

static void put_places(FILE *f, const char *title, const nib_worst *list, const nib_weight_stats *s, int64_t cols)
{
    const bool blocks = list == s->worst_blocks;
    char db[32];
    fprintf(
        f,
        "<div><h3>%s</h3><table><thead><tr><th class=\"l\">%s</th><th>dB</th><th>Share of the error</th></tr></thead>"
        "<tbody>\n",
        title, blocks ? "Row, columns" : "Row");
    for (int i = 0; i < NIB_WORST && list[i].error_squares > 0; i++) {
        const int64_t last = list[i].col + 15 < cols ? list[i].col + 15 : cols - 1;
        fprintf(f, "<tr><td class=\"l\">%" PRId64, list[i].row);
        if (blocks)
            fprintf(f, ", %" PRId64 "&ndash;%" PRId64, list[i].col, last);
        fprintf(f, "</td><td>%s</td><td>%.2f%%</td></tr>\n",
                text_db(10 * log10(list[i].sum_squares / list[i].error_squares), db, sizeof db),
                s->error_squares < INFINITY ? 100 * list[i].error_squares / s->error_squares : 100.0);
    }
    fputs("</tbody></table></div>\n", f);
}

static void put_weight(FILE *f, const struct report *r, const struct report_item *item, size_t number)
{
    const struct report_row *row = item->row;
    const nib_weight_stats *s = &r->details[row->detail];
    char db[32], before[16], after[16];
    fprintf(f, "<details id=\"w%zu\"><summary>", number);
    put_name(f, item->name);
    fprintf(f, "<b>%s dB</b></summary><div class=\"weight\">\n<dl class=\"facts\">\n",
            text_db(row->sqnr, db, sizeof db));
    fact(f, "Shape", "%" PRId64 " &times; %" PRId64, row->rows, row->cols);
    fact(f, "Format", "%s &rarr; %s", nib_checkpoint_format_name(row->format_a),
         nib_checkpoint_format_name(row->format_b));
    fact(f, "Size", "%s &rarr; %s", text_bytes(item->before, before, sizeof before),
         text_bytes(item->after, after, sizeof after));
    fact(f, "Error by L2 norm", "%.3f%%", 100 * row->relative);
    fact(f, "Largest error", "%.4g, at [%" PRId64 ", %" PRId64 "]", row->max_error, s->max_error_row, s->max_error_col);
    fact(f, "Largest value", "%.4g", row->amax);
    fact(f, "Became zero", "%" PRId64 " values", row->zeroed);
    fact(f, "Beyond their block", "%" PRId64 " values", row->clipped);
    if (row->blocks)
        fact(f, "Scale below 2<sup>-6</sup>", "%" PRId64 " blocks", row->underflowed);
    fputs("</dl>\n", f);
    report_put_histograms(f, s);
    fputs("<div class=\"pair\">\n", f);
    put_places(f, "Worst rows", s->worst_rows, s, row->cols);
    put_places(f, "Worst blocks", s->worst_blocks, s, row->cols);
    fputs("</div></div></details>\n", f);
}

static void put_weights(FILE *f, const struct report *r, const struct report_items *items)
{
    if (!r->n_details)
        return;
    fputs("<h2 id=\"one-by-one\">One by one</h2>\n<p>", f);
    if (r->changed > r->n_details)
        fprintf(f, "The %zu worst of the %zu weights that changed, with histograms", r->n_details, r->changed);
    else
        fputs("Every weight that changed, with histograms", f);
    fputs(" and the rows and blocks where it errs most.</p>\n", f);
    for (size_t i = 0; i < items->n; i++)
        if (items->items[i].row && items->items[i].row->detail != REPORT_NONE)
            put_weight(f, r, &items->items[i], i);
}

/* ---- How it was made ---- */

static void put_leaf(FILE *f, const char *key, json_t *value)
{
    char *text = json_is_string(value) ? NULL : json_dumps(value, JSON_ENCODE_ANY);
    fputs("<tr><td class=\"l\"><code>", f);
    report_put(f, key);
    fputs("</code></td><td class=\"l\">", f);
    report_put(f, text ? text : json_is_string(value) ? json_string_value(value) : "");
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
    fputs("<h2 id=\"how\">How it was made</h2>\n<table>\n<thead><tr><th class=\"l\">Option</th><th "
          "class=\"l\">Value</th></tr>"
          "</thead>\n<tbody>\n",
          f);
    json_array_foreach(all, i, entry)
        put_leaf(f, json_string_value(json_object_get(entry, "option")), json_object_get(entry, "b"));
    fputs("</tbody></table>\n", f);
    json_decref(all);
    return true;
}

/* ---- The page ---- */

static void put_title(FILE *f, const struct report *r)
{
    fputs("<h1>", f);
    put_called(f, r->facts_b.path);
    fputs("</h1>\n<p class=\"sub\">", f);
    report_put(f, nib_checkpoint_format_name(r->facts_b.format));
    fputs(", compared with <code>", f);
    put_called(f, r->facts_a.path);
    fputs("</code>", f);
    if (*r->facts_b.model_type) {
        fputs(", model type ", f);
        report_put(f, r->facts_b.model_type);
    }
    fputs("</p>\n", f);
}

static void put_summary(FILE *f, const struct report *r, const struct report_row **worst)
{
    char before[16], after[16], db[32];
    size_t n = 0;
    while (worst[n])
        n++;
    fputs("<ul class=\"tiles\">\n", f);
    tile(f, "tensors before and after", "%s &rarr; %s", text_bytes(r->facts_a.tensor_bytes, before, sizeof before),
         text_bytes(r->facts_b.tensor_bytes, after, sizeof after));
    tile(f, "bits per weight over the whole model", "%.2f &rarr; %.2f",
         text_bits(r->facts_a.tensor_bytes, r->facts_a.elements),
         text_bits(r->facts_b.tensor_bytes, r->facts_b.elements));
    tile(f, "weights that changed, of those in both", "%zu of %zu", r->changed, r->n);
    if (n) {
        tile(f, "signal to noise of all that changed", "%s dB",
             text_db(10 * log10(r->sum_squares / r->error_squares), db, sizeof db));
        tile(f, "median of the weights", "%s dB", text_db(worst[n / 2]->sqnr, db, sizeof db));
        tile(f, "worst weight", "%s dB", text_db(worst[0]->sqnr, db, sizeof db));
    }
    fputs("</ul>\n", f);
}

static void put_losses(FILE *f, const struct report *r)
{
    fputs("<h2 id=\"losses\">Losses</h2>\n<table class=\"short\">\n<tbody>\n<tr><td class=\"l\">Values that became "
          "zero</td><td>",
          f);
    report_put_share(f, r->zeroed, r->elements);
    fputs("</td></tr>\n<tr><td class=\"l\">Values beyond what their block can hold</td><td>", f);
    report_put_share(f, r->clipped, r->elements);
    fputs("</td></tr>\n<tr><td class=\"l\">Blocks with values whose scale is below 2<sup>-6</sup></td><td>", f);
    report_put_share(f, r->underflowed, r->blocks);
    fprintf(f, "</td></tr>\n<tr><td class=\"l\">Weights that only one of the two has</td><td>%zu and %zu</td></tr>\n",
            r->only_a, r->only_b);
    fputs("</tbody></table>\n", f);
}

static void put_head(FILE *f, const struct report *r)
{
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n",
          f);
    fprintf(f,
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
            "script-src '%s'; img-src data:; base-uri 'none'; form-action 'none'\">\n<link rel=\"icon\" "
            "href=\"data:,\">\n<title>",
            report_script_hash);
    put_called(f, r->facts_b.path);
    fputs(REPORT_TITLE "\n<style>\n", f);
    put_lines(f, report_style);
    fputs("</style>\n<script>\n", f);
    put_lines(f, report_script);
    fputs("</script>\n</head>\n<body>\n<header>\n", f);
    put_title(f, r);
}

static void put_contents(FILE *f, const struct report *r)
{
    static const struct {
        const char *id, *text;
    } parts[] = {
        { "by-kind", "Size by kind" }, { "what-became", "What became of them" }, { "by-layer", "By layer" },
        { "losses", "Losses" },        { "block-scales", "Block scales" },       { "code-values", "Codes" },
        { "weights", "All weights" },  { "one-by-one", "One by one" },           { "how", "How it was made" }
    };
    fputs("<nav aria-label=\"Contents\"><ul>", f);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if ((strcmp(parts[i].id, "how") || r->facts_b.provenance) &&
            (strcmp(parts[i].id, "one-by-one") || r->n_details))
            fprintf(f, "<li><a href=\"#%s\">%s</a></li>", parts[i].id, parts[i].text);
    fputs("</ul></nav>\n</header>\n<main>\n", f);
}

bool report_write_html(FILE *f, const struct report *r, const struct report_items *items)
{
    const struct report_row **worst = report_worst(r);
    if (!worst)
        return false;
    put_head(f, r);
    put_summary(f, r, worst);
    put_contents(f, r);
    put_kinds(f, items);
    put_fates(f, items);
    bool good = report_put_layers(f, r);
    put_losses(f, r);
    report_put_scales(f, r);
    report_put_codes(f, r);
    put_items(f, items);
    put_weights(f, r, items);
    good &= put_provenance(f, r);
    fprintf(f,
            "</main>\n<footer>Made by nib %s. Signal to noise is 10 log<sub>10</sub> of the sum of squares of the "
            "weights over that of their errors.</footer>\n</body>\n</html>\n",
            nib_version());
    free(worst);
    return good;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_html.h - the page of a report: report_html.c its text and tables, report_charts.c its charts, report_style.c how
 * it looks.
 */
#ifndef NIB_REPORT_HTML_H
#define NIB_REPORT_HTML_H

#include <stdio.h>

#include "report.h"

#define REPORT_TITLE ": quantization report</title>" /* after what is reported on */

/* One self-contained page; false without memory. */
bool report_write_html(FILE *file, const struct report *report, const struct report_items *items);

/* ---- For the files of the page ---- */

/* Lines, the last is NULL. */
extern const char *const report_style[], *const report_script[];
extern const char report_script_hash[]; /* "sha256-...", as a policy takes it */

/* Text that comes from files, escaped for HTML: in an element or in quotes. */
void report_put(FILE *f, const char *text);
/* A part of a whole in percent: "<0.01%" for what rounds to 0 and is none. */
void report_put_share(FILE *f, int64_t part, int64_t whole);

/* Charts with headings; false without memory. */
bool report_put_layers(FILE *f, const struct report *r);
void report_put_scales(FILE *f, const struct report *r);
void report_put_codes(FILE *f, const struct report *r);
/* The same two small, of one weight. */
void report_put_histograms(FILE *f, const nib_weight_stats *stats);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_html.h - the page of a report.
 */
#ifndef NIB_REPORT_HTML_H
#define NIB_REPORT_HTML_H

#include <stdio.h>

#include "report.h"

/* One self-contained page; false without memory. */
bool report_write_html(FILE *file, const struct report *report, const nib_plan *plan);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_patterns.c - patterns that match nothing. Whoever writes one means something: a name with a slip in it would
 * otherwise be quantized, or left out, without a word. The message has the names that are nearest.
 */
#include "plan/plan.h"

#include <stdio.h>

enum { NEAR = 3, MOST_LITERAL = 256, MOST_NAME = 1024 }; /* longer names are no slip of anybody */

/* A head that is tied to the embedding has no tensor, and to leave it alone is what happens: it may be ignored. */
static const char tied_head[] = "lm_head";

/* ---- What a pattern may match ---- */

/* The modules of a checkpoint one by one: weights, then, where they count, modules of other tensors. */
struct modules {
    const nib_checkpoint *c;
    bool tensors;
    size_t weight, tensor;
    char name[MOST_NAME];
};

static const char *next_module(struct modules *m)
{
    if (m->weight < m->c->n_weights)
        return m->c->weights[m->weight++].name;
    while (m->tensors && m->tensor < m->c->n_tensors) {
        const struct nib_ck_tensor *t = &m->c->tensors[m->tensor++];
        const char *end = strrchr(t->name, '.');
        if (t->weight != NIB_NONE || !end || (size_t)(end - t->name) >= sizeof m->name)
            continue;
        memcpy(m->name, t->name, (size_t)(end - t->name));
        m->name[end - t->name] = 0;
        return m->name;
    }
    return NULL;
}

static nib_status matches_any(const nib_checkpoint *c, const char *pattern, bool tensors, bool *matches)
{
    struct nib_patterns *one;
    struct modules modules = { .c = c, .tensors = tensors };
    uint32_t which = NIB_NONE;
    size_t index;
    *matches = nib_checkpoint_find_weight(c, pattern, &index) == NIB_OK;
    if (*matches)
        return NIB_OK;
    TRY(nib_patterns_create(&pattern, 1, &one));
    nib_status status = tensors ? nib_patterns_match(one, tied_head, &which) : NIB_OK;
    for (const char *name; !status && which == NIB_NONE && (name = next_module(&modules));)
        status = nib_patterns_match(one, name, &which);
    nib_patterns_destroy(one);
    *matches = which != NIB_NONE;
    return status;
}

/* ---- What it may have meant ---- */

/* What a pattern says besides its wildcards. Returns its length. */
static size_t literal_of(const char *pattern, char *out)
{
    const bool expression = strncmp(pattern, "re:", 3) == 0;
    const char *wild = expression ? ".*+?()[]{}|^$" : "*?";
    size_t n = 0;
    for (const char *p = pattern + (expression ? 3 : 0); *p && n < MOST_LITERAL; p++) {
        if (expression && *p == '\\' && p[1])
            out[n++] = *++p;
        else if (!strchr(wild, *p))
            out[n++] = *p;
    }
    return n;
}

/* The fewest letters to change, add or leave out until `text` is somewhere in `name`. */
static int distance(const char *text, size_t n, const char *name)
{
    int row[MOST_LITERAL + 1], best;
    for (size_t i = 0; i <= n; i++)
        row[i] = (int)i;
    best = row[n];
    for (const char *p = name; *p && p - name < MOST_NAME; p++) {
        int diagonal = row[0]; /* stays 0: it may begin anywhere */
        for (size_t i = 1; i <= n; i++) {
            const int changed = diagonal + (text[i - 1] != *p);
            const int other = 1 + (row[i] < row[i - 1] ? row[i] : row[i - 1]);
            diagonal = row[i];
            row[i] = changed < other ? changed : other;
        }
        best = row[n] < best ? row[n] : best; /* and end anywhere */
    }
    return best;
}

struct near {
    char name[160];
    int distance;
};

/* Whether two names differ in numbers only: of forty layers one is enough. */
static bool same_kind(const char *a, const char *b)
{
    while (*a && *b) {
        const bool number_a = *a >= '0' && *a <= '9', number_b = *b >= '0' && *b <= '9';
        if (number_a && number_b) {
            a += strspn(a, "0123456789");
            b += strspn(b, "0123456789");
        } else if (*a++ != *b++) {
            return false;
        }
    }
    return *a == *b;
}

static void note_near(struct near *list, size_t *n, const char *name, int d)
{
    size_t place = 0;
    for (size_t i = 0; i < *n; i++)
        if (same_kind(list[i].name, name)) {
            if (d >= list[i].distance)
                return;
            memmove(&list[i], &list[i + 1], (*n - i - 1) * sizeof *list); /* the better one takes its place below */
            --*n;
            break;
        }
    while (place < *n && list[place].distance <= d)
        place++;
    if (place == NEAR)
        return;
    const size_t behind = (*n < NEAR ? *n : NEAR - 1) - place;
    memmove(&list[place + 1], &list[place], behind * sizeof *list);
    snprintf(list[place].name, sizeof list[place].name, "%s", name);
    list[place].distance = d;
    *n += *n < NEAR;
}

static nib_status reject(const nib_checkpoint *c, const char *list, const char *pattern, bool tensors)
{
    char literal[MOST_LITERAL], text[256];
    const size_t length = literal_of(pattern, literal), whole = strlen(pattern);
    struct near near[NEAR + 1];
    struct modules modules = { .c = c, .tensors = tensors };
    const char *const what = tensors ? "module" : "weight";
    size_t n = 0, used = 0, below = 0;
    for (const char *name; (name = next_module(&modules));) {
        below += strncmp(name, pattern, whole) == 0 && name[whole] == '.';
        note_near(near, &n, name, distance(literal, length, name));
    }
    if (below)
        return nib_fail(
            NIB_ERR_ARG,
            "%s (--%s): %s matches no %s of %s: a name is matched whole, and %zu are below it: add .* to it", list,
            list, nib_quote(pattern).text, what, c->path, below);
    text[0] = 0;
    for (size_t i = 0; i < n && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s",
                                 i == 0       ? ""
                                 : i == n - 1 ? " and "
                                              : ", ",
                                 nib_quote(near[i].name).text);
    const bool far = n && 2 * (size_t)near[0].distance > length;
    return nib_fail(NIB_ERR_ARG, "%s (--%s): %s matches no %s of %s%s%s", list, list, nib_quote(pattern).text, what,
                    c->path,
                    far ? "; there are, for example, "
                    : n ? "; near it are "
                        : "",
                    text);
}

nib_status nib_plan_check_patterns(const nib_checkpoint *c, const char *list, const char *const *patterns, size_t n,
                                   bool tensors)
{
    for (size_t i = 0; i < n; i++) {
        bool matches;
        TRY(matches_any(c, patterns[i], tensors, &matches));
        if (!matches)
            return reject(c, list, patterns[i], tensors);
    }
    return NIB_OK;
}

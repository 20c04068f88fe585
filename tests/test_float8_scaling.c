/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_float8_scaling.c - scales that the caller brings to Float8, reductions of its amax, and delayed scaling.
 */
#include "test_kinds.h"

#include <float.h>

/* ---- Numbers that the caller brings ---- */

TEST(float8_takes_given_numbers)
{
    FOR_KINDS(k)
    {
        if (has_blocks(k))
            continue;
        const nib_quantizer q = quantizer(k);
        const nib_array x = matrix(33, 65);
        const float largest = k->element == NIB_E4M3 ? 448 : 57344;
        float amax = 0;
        for (int i = 0; i < 33 * 65; i++)
            amax = fmaxf(amax, fabsf(inputs[i]));
        nib_tensor *current = quantize(&q, &x, NULL), *t = NULL;
        CHECK_KIND(k, tensor_scale_of(current) == 1.0f / (largest / amax));

        /* An amax, in either place. */
        for (int usage = 0; usage < 2; usage++) {
            nib_overrides overrides = { .bytes = sizeof overrides };
            overrides.amax[usage] = &amax;
            CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
            CHECK_KIND(k, equal(t, current));
            nib_tensor_destroy(t);
        }
        const float twice = 2 * amax;
        nib_overrides overrides = { .bytes = sizeof overrides, .amax = { &twice, NULL } };
        CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
        CHECK_KIND(k, tensor_scale_of(t) == 1.0f / (largest / twice));
        nib_tensor_destroy(t);

        /* The tensor scale itself, and the multiplier. */
        const float tensor_scale = 0.25f, scale = 4.0f;
        overrides = (nib_overrides){ .bytes = sizeof overrides, .tensor_scale = { &tensor_scale, NULL } };
        nib_tensor *by_level = NULL;
        CHECK_OK(nib_quantize(&q, &x, &overrides, &by_level));
        float seen = 0.5f;
        overrides = (nib_overrides){ .bytes = sizeof overrides, .scale = &scale, .amax_seen = &seen };
        CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
        CHECK_KIND(k, equal(t, by_level) && tensor_scale_of(t) == tensor_scale && seen == amax);
        check_values(k, t, NIB_ROWWISE);
        check_values(k, t, NIB_COLUMNWISE);
        seen = 2 * amax; /* raised only */
        CHECK_OK(nib_quantize_into(NULL, &x, &overrides, NULL, t));
        CHECK_KIND(k, seen == 2 * amax);
        seen = 0;
        const float noop = 1;
        CHECK_OK(nib_quantize_into(NULL, &x, &overrides, &noop, t));
        CHECK_KIND(k, seen == 0);
        overrides.scale = NULL; /* current scaling tells as well */
        CHECK_OK(nib_quantize_into(NULL, &x, &overrides, NULL, t));
        CHECK_KIND(k, seen == amax && equal(t, current));
        nib_tensor_destroy(t);
        nib_tensor_destroy(by_level);
        nib_tensor_destroy(current);
    }
}

static nib_status double_all(void *context, float *values, size_t n)
{
    ++*(int *)context;
    for (size_t i = 0; i < n; i++)
        values[i] *= 2;
    return NIB_OK;
}

TEST(float8_reduces_its_amax)
{
    int calls = 0;
    const nib_comm comm = { .bytes = sizeof comm, .context = &calls, .size = 2, .allreduce_max_f32 = double_all };
    nib_quantizer q = quantizer(&kinds[0]);
    const nib_array x = matrix(33, 65);
    nib_tensor *alone = quantize(&q, &x, NULL), *t = NULL;
    q.amax_comm = &comm;
    float seen = 0;
    nib_overrides overrides = { .bytes = sizeof overrides, .amax_seen = &seen };
    CHECK_OK(nib_quantize(&q, &x, &overrides, &t));
    CHECK(calls == 1 && tensor_scale_of(t) == 2 * tensor_scale_of(alone)); /* both are exact: a power of two apart */
    float amax = 0;
    for (int i = 0; i < 33 * 65; i++)
        amax = fmaxf(amax, fabsf(inputs[i]));
    CHECK(seen == 2 * amax);
    nib_tensor_destroy(alone);
    nib_tensor_destroy(t);
}

/* A multiplier is Float8's alone. Elsewhere it would have to be obeyed or be rejected, not make up another tensor
 * scale. */
TEST(a_given_scale_is_refused_elsewhere)
{
    nib_quantizer q;
    const nib_array x = matrix(32, 32);
    const float scale = 2;
    nib_overrides overrides = { .bytes = sizeof overrides, .scale = &scale };
    nib_quantizer_init(&q);
    nib_tensor *t = NULL;
    CHECK_FAILS(nib_quantize(&q, &x, &overrides, &t), NIB_ERR_MODE, "scale");
    nib_tensor_destroy(t);
    FOR_KINDS(k)
    {
        if (!has_blocks(k))
            continue;
        q = quantizer(k);
        t = NULL;
        CHECK_FAILS(nib_quantize(&q, &x, &overrides, &t), NIB_ERR_MODE, "scale");
        nib_tensor_destroy(t);
    }
}

/* ---- Delayed scaling ---- */

/* The rule, step by step. */
static void update_by_hand(float largest, bool most_recent, int margin, float *history, int n, float *scale)
{
    float amax = most_recent ? history[0] : 0;
    for (int i = 0; i < n && !most_recent; i++)
        if (history[i] > amax)
            amax = history[i];
    if (isfinite(amax) && amax > 0) {
        const float next = largest * ldexpf(1, -margin) / amax;
        *scale = isinf(next) ? FLT_MAX : next;
    }
    const float current = history[0]; /* to the end; the oldest, which came after it, is gone */
    for (int i = 1; i < n - 1; i++)
        history[i] = history[i + 1];
    history[n - 1] = current;
    history[0] = 0;
}

TEST(delayed_scaling_updates)
{
    static const float special[] = { 0, INFINITY, NAN, FLT_MAX, 0x1p-149f, 0x1p-126f, 1e-37f, 448, 57344, -1 };
    for (int i = 0; i < 4000; i++) {
        const nib_dtype element = i % 2 ? NIB_E4M3 : NIB_E5M2;
        const bool recent = i / 2 % 2;
        const int n = 1 + (int)test_below(9), margin = i % 3 ? 0 : (int)test_below(20) - 10;
        float history[9], expected[9], scale = 1.5f, expected_scale = 1.5f;
        for (int j = 0; j < n; j++)
            history[j] = test_below(4) ? ldexpf((float)test_uniform(), (int)test_below(60) - 30)
                                       : special[test_below(sizeof special / sizeof *special)];
        memcpy(expected, history, sizeof history);
        CHECK_OK(nib_delayed_scaling_update(element, recent ? NIB_AMAX_MOST_RECENT : NIB_AMAX_MAX, margin, history,
                                            (size_t)n, &scale));
        update_by_hand(element == NIB_E4M3 ? 448 : 57344, recent, margin, expected, n, &expected_scale);
        CHECK_THAT(memcmp(&scale, &expected_scale, sizeof scale) == 0, "%d: %a, not %a", i, (double)scale,
                   (double)expected_scale);
        CHECK_BYTES(history, expected, (size_t)n * sizeof *history);
    }
    float history[2] = { 1, 2 }, scale = 3;
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E2M1, NIB_AMAX_MAX, 0, history, 2, &scale), NIB_ERR_DTYPE, "E4M3");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_CHOICE_COUNT, 0, history, 2, &scale), NIB_ERR_ARG, "");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, (nib_amax_choice)-1, 0, history, 2, &scale), NIB_ERR_ARG, "");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 200, history, 2, &scale), NIB_ERR_ARG, "margin");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 0, history, 0, &scale), NIB_ERR_ARG, "no entries");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 0, NULL, 2, &scale), NIB_ERR_ARG, "history");
    CHECK_FAILS(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 0, history, 2, NULL), NIB_ERR_ARG, "scale");
    CHECK(history[0] == 1 && history[1] == 2 && scale == 3);
}

/* A training loop in small: each step quantizes with the scale that the steps before led to. */
TEST(delayed_scaling_in_a_loop)
{
    enum { WINDOW = 4, STEPS = 12 };
    nib_quantizer q = quantizer(&kinds[0]);
    float history[WINDOW] = { 0 }, scale = 1, amaxes[STEPS];
    nib_tensor *t = NULL;
    CHECK_OK(nib_tensor_create(&q, NIB_F32, 2, (const int64_t[]){ 48, 64 }, NULL, &t));
    for (int step = 0; step < STEPS; step++) {
        const nib_array x = matrix(48, 64);
        amaxes[step] = 0;
        for (int i = 0; i < 48 * 64; i++) {
            inputs[i] *= ldexpf(1, step % 5);
            amaxes[step] = fmaxf(amaxes[step], fabsf(inputs[i]));
        }
        nib_overrides overrides = { .bytes = sizeof overrides, .scale = &scale, .amax_seen = &history[0] };
        CHECK_OK(nib_quantize_into(NULL, &x, &overrides, NULL, t));
        CHECK(history[0] == amaxes[step] && tensor_scale_of(t) == 1.0f / scale);
        check_values(&kinds[0], t, NIB_ROWWISE);
        for (int i = 0; i < 48 * 64; i++) { /* what does not fit under an old scale is cut off */
            const float limit = 448 / scale;
            const float inside = fmaxf(fminf(inputs[i], limit), -limit);
            CHECK(fabsf(decoded[i] - inside) <= 0.0626f * fabsf(inside) + 0x1p-9f / scale);
        }
        CHECK_OK(nib_delayed_scaling_update(NIB_E4M3, NIB_AMAX_MAX, 0, history, WINDOW, &scale));
        float largest = 0;
        for (int i = step; i >= 0 && i > step - WINDOW; i--)
            largest = fmaxf(largest, amaxes[i]);
        CHECK(scale == 448 / largest && history[0] == 0 && history[WINDOW - 1] == amaxes[step]);
    }
    nib_tensor_destroy(t);
}

TEST_MAIN

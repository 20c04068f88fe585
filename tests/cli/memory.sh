#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Where an allocation fails, a command says so in one line or does what it does otherwise: no report lacks anything.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
BUILD=${BUILD:?the build folder}
CC=${CC:-cc}
if [ -n "$(nm "$NIB" 2>/dev/null | grep -m1 __asan_init)" ]; then
    echo "a sanitizer has a malloc of its own" && exit 77
fi
cat >"$work/fail.c" <<'C'
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
static atomic_long n;
static long at = -1;
__attribute__((constructor)) static void begin(void)
{
    at = getenv("FAIL_AT") ? atol(getenv("FAIL_AT")) : -1;
    n = 0; /* whatever was asked for before main */
}
__attribute__((destructor)) static void end(void)
{
    char text[32];
    const char *const descriptor = getenv("FAIL_COUNT");
    if (descriptor && write(atoi(descriptor), text, (size_t)snprintf(text, sizeof text, "%ld", (long)n)) < 0)
        perror("FAIL_COUNT");
}
static int fails(void)
{
    if (n++ != at)
        return 0;
    errno = ENOMEM;
    return 1;
}
void *malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { return fails() ? NULL : __libc_calloc(count, bytes); }
C
if ! "$CC" -O1 -shared -fPIC -o "$work/fail.so" "$work/fail.c" 2>"$work/err" || ! LD_PRELOAD=$work/fail.so true; then
    echo "malloc cannot be replaced here" && exit 77
fi
"$BUILD/examples/make_checkpoint" --family demo --layers 1 --hidden 64 --intermediate 64 "$work/in" >/dev/null || exit 1
"$NIB" quantize -q "$work/in" "$work/q" || exit 1
"$NIB" quantize -q --fp8 "*.o_proj" "$work/in" "$work/m" || exit 1
sed -i 's/"model.layers.0.self_attn.o_proj"/"re:.*[.]o_proj"/' "$work/m/config.json" # a target that is matched
cp tests/golden/te_row_scaled.safetensors "$work/vectors.safetensors"
python3 tests/cli/memory.py "$(realpath "$NIB")" "$work"

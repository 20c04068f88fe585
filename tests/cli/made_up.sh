#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A format from outside: the library is built once more with tests/made_up/made_up.h, without a change in src/.
set -u
NIB=${NIB:?the path of the tool}
compiler=${CC:-cc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
shopt -s nullglob

command -v "$compiler" >/dev/null || { echo "there is no $compiler"; exit 77; }
command -v python3 >/dev/null || { echo "there is no python3"; exit 77; }
needs=$(pkg-config --cflags --libs jansson libpcre2-8 libxxhash 2>/dev/null) || needs="-ljansson -lpcre2-8 -lxxhash"

fail() {
    echo "FAILED: $1"
    [ ! -f "$work/log" ] || cat "$work/log"
    exit 1
}

flags="-O1 -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas -Werror -Iinclude -I."
# shellcheck disable=SC2086 # flags are several words
"$compiler" -std=c11 $flags -Isrc -fPIC -shared -DNIB_EXTRA_FORMATS='"tests/made_up/made_up.h"' src/*/*.c src/*/*/*.c \
    -o "$work/libnib.so" -pthread >"$work/log" 2>&1 || fail "the library does not build with another format"
# shellcheck disable=SC2086
"$compiler" -std=gnu11 $flags -Itests tests/made_up/check.c -o "$work/check" -L"$work" -lnib -lm -Wl,-rpath,"$work" \
    >"$work/log" 2>&1 || fail "check.c does not build"
# shellcheck disable=SC2086
"$compiler" -std=gnu11 $flags -O0 -Isrc -Icheckpoint tools/*.c checkpoint/*/*.c -o "$work/nib" -L"$work" -lnib $needs -lm -pthread \
    -Wl,-rpath,"$work" \
    >"$work/log" 2>&1 || fail "the tool does not build"

TMPDIR=$work "$work/check" >"$work/log" 2>&1 || fail "check"

# An independent computation agrees, and a wrong byte is seen.
python3 tests/made_up/make_vectors.py "$work/v.safetensors" >"$work/log" 2>&1 || fail "make_vectors.py"
"$work/nib" conform "$work/v.safetensors" >"$work/log" 2>&1 || fail "conform"
[ "$(tail -n 1 "$work/log")" = "24 passed, 0 failed" ] || fail "conform did not see 24 cases"
python3 tests/make_vectors.py "$work/v.safetensors" "$work/w.safetensors" flip normal.16x24/col_scale 3 1
"$work/nib" conform "$work/w.safetensors" >"$work/log" 2>&1
[ $? = 1 ] || fail "a changed scale is not found"
grep -q "normal.16x24: col_scale\[1, 1\]" "$work/log" || fail "a changed scale is not named"

# The library as it is has no such format.
"$NIB" conform "$work/v.safetensors" >"$work/log" 2>&1
[ $? = 2 ] || fail "the plain tool takes the format"
grep -q "not a format of this version" "$work/log" || fail "the plain tool does not say that it lacks the format"

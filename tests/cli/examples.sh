#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The examples: what they print and write, and how they fail. That they exit with 0, tests/run.py checks.
set -u
BUILD=${BUILD:-$(dirname "${NIB:?the path of the tool}")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
    echo "FAILED: $1" | cat -v
    sed "s/^/    /" "$work/out" | cat -v
    failures=$((failures + 1))
}

# demo checks its own claims; here, that they are there and fit a terminal.
"$BUILD/examples/demo" >"$work/out" 2>&1 || fail "demo: exit $?"
for line in "scale byte 0x79 = 288" "    -2.000000     F    -6.0        -1.928571   +0.071429" "rtn: largest magnitude to 6" \
    "4over6: to 6 or to 4" "sweep: best of 11" "All of this was checked."; do
    grep -qF -- "${line#    }" "$work/out" || fail "demo does not print: $line"
done
awk 'length > 100 { exit 1 }' "$work/out" || fail "demo prints lines of more than 100 columns"

# quantize leaves a file that others can read: a header of the stated length, and data behind it.
(cd "$work" && "$BUILD/examples/quantize" weight.safetensors >out 2>&1) || fail "quantize: exit $?"
grep -qx "48 x 80: equal when read back, largest error 0.1250" "$work/out" || fail "quantize prints something else"
ls -A "$work" >"$work/out"
[ "$(grep -cv '^out$' "$work/out")" = 1 ] || fail "quantize leaves more than its file"
header=$(od -An -t u8 -N 8 "$work/weight.safetensors" | tr -d ' ')
data=$((4 + 4 + 128 * 4 + 128 * 8 + 80 * 24 + 48 * 40)) # two amaxes; scales, then codes, columnwise and rowwise
[ "$(wc -c <"$work/weight.safetensors")" = $((8 + header + data)) ] || fail "the file's size is not 8 + $header + $data"
"$BUILD/examples/quantize" "$work/no/such/folder" >"$work/out" 2>&1 && fail "quantize cannot write and exits with 0"
grep -qF "quantize: NIB_ERR_IO: $work/no/such/folder" "$work/out" || fail "quantize does not say what it could not write"

[ $failures = 0 ]

#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The examples: what they print and write, and how they fail. That they exit with 0, tests/run.py checks.
. tests/cli/expect.bash
BUILD=${BUILD:-$(dirname "${NIB:?the path of the tool}")}

# blocks checks its own claims; here, that they are there and fit a terminal.
"$BUILD/examples/blocks" >"$work/out" 2>&1 || fail "blocks: exit $?"
for line in "scale byte 0x79 = 288" "    -2.000000     F    -6.0        -1.928571   +0.071429" "rtn: largest magnitude to 6" \
    "4over6: to 6 or to 4" "sweep: best of 11" "All of this was checked."; do
    grep -qF -- "${line#    }" "$work/out" || fail "blocks does not print: $line"
done
awk 'length > 100 { exit 1 }' "$work/out" || fail "blocks prints lines of more than 100 columns"

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

# make_checkpoint: every family it names, the same bytes twice, and what it refuses.
make=$BUILD/examples/make_checkpoint
"$make" --help >"$work/out" || fail "make_checkpoint --help: exit $?"
families=$(sed -n 's/^ \{26\}\([a-z0-9.-]*\) .*/\1/p' "$work/out")
[ "$(echo "$families" | wc -w)" = 11 ] || fail "make_checkpoint --help lists other families"
for family in $families; do
    for copy in a b; do
        "$make" --family "$family" --layers 2 --hidden 64 --intermediate 64 --vocab 64 --shards 2 "$work/$family.$copy" \
            >"$work/out" 2>&1 || fail "make_checkpoint --family $family: exit $?"
    done
    diff -r "$work/$family.a" "$work/$family.b" >"$work/out" 2>&1 || fail "two checkpoints of $family differ"
    for file in config.json model.safetensors.index.json tokenizer.json tokenizer_config.json generation_config.json; do
        python3 -m json.tool "$work/$family.a/$file" >"$work/out" 2>&1 || fail "$family: $file is no JSON"
    done
done
"$make" --seed 2 --layers 2 --hidden 64 --intermediate 64 --vocab 64 --shards 2 "$work/llama.c" >"$work/out" 2>&1
cmp -s "$work/llama.a/model-00001-of-00002.safetensors" "$work/llama.c/model-00001-of-00002.safetensors" &&
    fail "make_checkpoint: the seed does not matter"
grep -q '"model.layers.0.self_attn.q_proj.weight": "model-00001-of-00002.safetensors"' \
    "$work/llama.a/model.safetensors.index.json" || fail "q is not in the first shard"
grep -q '"model.layers.0.self_attn.k_proj.weight": "model-00002-of-00002.safetensors"' \
    "$work/llama.a/model.safetensors.index.json" || fail "k is not in the second shard"
for wrong in "--family none $work/x" "--layers 0 $work/x" "--layers" "--dtype int $work/x" "--hidden 40 $work/x" \
    "--kv-heads 3 $work/x" "--linear wide $work/x" "--none 1 $work/x" "$work/x $work/y" "$work/llama.a" "$work/no/such"; do
    # shellcheck disable=SC2086
    "$make" $wrong >"$work/out" 2>&1 && fail "make_checkpoint $wrong exits with 0"
    grep -q "^make_checkpoint: " "$work/out" || fail "make_checkpoint $wrong gives no reason"
done

# demo.sh: nothing to find in what it makes, and a report where it says.
sh examples/demo.sh "$BUILD" >"$work/out" 2>&1 || fail "demo.sh: exit $?"
grep -qF "model-NVFP4: no findings" "$work/out" || fail "demo.sh: the check finds something"
grep -q "^signal to noise 2[12]\." "$work/out" || fail "demo.sh: the signal to noise is not what it was"
report=$(sed -n 's,^  file://,,p' "$work/out")
[ -s "$report" ] || fail "demo.sh: there is no report $report"
rm -rf "$BUILD/demo"

[ $failures = 0 ]

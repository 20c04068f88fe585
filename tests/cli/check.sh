#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# nib check and nib repair: every finding by a damage of its own. Then how findings are told.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}

mkdir "$work/made"
python3 tests/cli/damaged.py "$NIB" "$work/made" || failures=$((failures + 1))
good=$work/made/ct4
original=$work/made/original

# Lines: severity, kind, tensor, fact, consequence, remedy; many of a kind are counted.
run 0 "$NIB" check "$good"
lines 1 .
matches out 'ct4: no findings$'
cp -r "$good" "$work/bad"
sed -i 's/"compressed-tensors"/"modelopt"/' "$work/bad/config.json"
run 1 "$NIB" check "$work/bad"
matches out '^error config-method: config.json: quant_method is "modelopt", and the tensors .*; .*; run nib repair$'
matches out 'bad: 1 error, 0 warnings, 0 hints; nib repair takes care of 1$'
cp "$good/config.json" "$work/bad/config.json"
sed -i 's/"model.layers.2.mlp.gate"/"re:.*proj"/' "$work/bad/config.json"
run 1 "$NIB" check "$work/bad"
lines 3 '^error config-ignored: model.layers'
matches out '^error config-ignored: and [0-9]+ more; --all lists them$'
run 1 "$NIB" check --all "$work/bad"
lines 24 '^error config-ignored: model.layers'
run 1 "$NIB" check -q "$work/bad"
lines 1 .
sed 's/"model.layers.2.mlp.gate"/"re:.*layers.0.self_attn.[qkv]_proj"/' "$good/config.json" >"$work/three.json"
cp -r "$work/bad" "$work/three"
mv "$work/three.json" "$work/three/config.json"
run 1 "$NIB" check "$work/three"
lines 3 '^error config-ignored: model.layers' # three are told, and there is no rest to count
lines 0 'more; --all'
run 1 "$NIB" check --json "$work/bad"
python3 -c 'import json,sys; r=json.load(sys.stdin); assert r["errors"] == len(r["findings"]) == 25, r["errors"]' \
    <"$work/out" || fail "JSON"

# One file, threads, an original that is not one, and what cannot be asked.
run 0 "$NIB" check "$good/model-00002-of-00002.safetensors"
run 0 "$NIB" check -t 1 --against "$original" "$good"
run 1 "$NIB" check --against "$good" "$original"
matches out '^warning kept-differs: '
run 2 "$NIB" check
run 2 "$NIB" check "$good" "$good"
run 2 "$NIB" check "$work/nothing"
matches err '^nib: check: .*nothing'
run 2 "$NIB" check "$good" --against "$work/nothing"
printf 'no header' >"$work/bad.safetensors"
run 1 "$NIB" check "$work/bad.safetensors"
matches out '^error unreadable: '

# What nib itself makes has no findings, however it is made.
i=0
while read -r options; do
    i=$((i + 1))
    own=$work/own$i
    [ "$options" != "--format gguf" ] || own=$own.gguf
    # shellcheck disable=SC2086
    run 0 "$NIB" quantize -q $options "$original" "$own"
    run 0 "$NIB" check "$own"
    lines 1 .
    run 0 "$NIB" check --against "$original" "$own"
    lines 1 .
done <<'LIST'

--scheme nvfp4
--scheme nvfp4 --activations norm
--format modelopt
--format modelopt --scheme nvfp4
--scale rtn --tensor-scale exact
--scale 4over6
--dialect compressed-tensors
--format modelopt --dialect modelopt
--preset experts-only
--ignore *o_proj --only *.self_attn.*
--format gguf
LIST

# Families whose experts lie in stacks, in every form.
for family in llama4 gpt-oss qwen3.5-moe mixtral; do
    "${BUILD:?the folder of the build}/examples/make_checkpoint" --family $family "$work/$family" >/dev/null || fail "$family"
    for options in "" "--scheme nvfp4" "--format modelopt" "--format modelopt --scheme nvfp4"; do
        # shellcheck disable=SC2086
        run 0 "$NIB" quantize -q -f $options "$work/$family" "$work/$family-4"
        run 0 "$NIB" check --against "$work/$family" "$work/$family-4"
        lines 1 'no findings$'
        run 0 "$NIB" check "$work/$family-4"
        lines 1 'no findings$'
    done
    rm -r "$work/$family" "$work/$family-4"
done

# Repairs: nothing to do, a plan alone, what is left, and that the input is as it was.
run 1 "$NIB" repair "$good" "$work/same"
matches err 'nothing that can be repaired'
[ ! -e "$work/same" ] || fail "an output without a repair"
sum=$(cat "$work/bad"/* | cksum)
run 0 "$NIB" repair --dry-run "$work/bad" "$work/fixed"
[ ! -e "$work/fixed" ] || fail "a dry run wrote"
run 0 "$NIB" repair "$work/bad" "$work/fixed"
[ "$sum" = "$(cat "$work/bad"/* | cksum)" ] || fail "repair changed its input"
run 0 "$NIB" check --against "$original" "$work/fixed"
run 2 "$NIB" repair "$work/bad" "$work/fixed"
run 0 "$NIB" repair --force "$work/bad" "$work/fixed"
run 2 "$NIB" repair "$work/bad"
python3 tests/cli/damaged.py --damage scale-nan "$work/both" || exit 1
sed -i 's/"quant_method": "compressed-tensors"/"quant_method": "modelopt"/' "$work/both/config.json"
run 1 "$NIB" repair "$work/both" "$work/rest"
has err "rest: 1 errors and 0 warnings are left, for which the original is needed; see nib check"
run 1 "$NIB" check "$work/rest"
lines 1 '^error scale-nan: '
has out "rest: 1 error, 0 warnings, 0 hints"

[ $failures = 0 ]

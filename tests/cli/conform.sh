#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# nib conform: the golden files pass, a changed byte is found and named, a bad file is called bad.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
golden=tests/golden

out_is() { printf '%s\n' "$@" | cmp -s - "$work/out" || fail "stdout should be: $*"; }

# make FILE EDIT...: $work/v.safetensors from a golden file.
make() {
    local source=$1
    shift
    python3 tests/make_vectors.py "$golden/$source.safetensors" "$work/v.safetensors" "$@" || fail "make_vectors.py $*"
}

# Checks of $work/v.safetensors, made from a file by edits.
passes() {
    make "$@"
    run 0 "$NIB" conform "$work/v.safetensors"
    empty err
}
differs() { # the line that names the difference, then FILE EDIT...
    local line=$1
    shift
    make "$@"
    run 1 "$NIB" conform "$work/v.safetensors"
    empty err
    has out "v.safetensors: $line"
    [ "$(tail -n 1 "$work/out")" != "1 passed, 0 failed" ] || fail "the last line says that all passed"
}
bad() { # the sentence, then FILE EDIT...
    local sentence=$1
    shift
    make "$@"
    run 2 "$NIB" conform "$work/v.safetensors"
    has err "nib: $work/v.safetensors: $sentence"
    has out "bad file"
}

# ---- What passes ---------------------------------------------------------------------------------------

run 0 "$NIB" conform $golden/*.safetensors
empty err
out_is "casts.safetensors: 1 cases, 0 failed" \
    "compressed_tensors.safetensors: 190 cases, 0 failed" \
    "gist.safetensors: 69 cases, 0 failed" \
    "modelopt.safetensors: 239 cases, 0 failed" \
    "te_1d.safetensors: 79 cases, 0 failed" \
    "te_2d.safetensors: 92 cases, 0 failed" \
    "te_4over6.safetensors: 40 cases, 0 failed" \
    "te_gemm.safetensors: 3 cases, 0 failed" \
    "te_rht.safetensors: 32 cases, 0 failed" \
    "te_row_scaled.safetensors: 16 cases, 0 failed" \
    "torchao.safetensors: 84 cases, 0 failed" \
    "845 passed, 0 failed"
for threads in 0 1 3; do
    run 0 "$NIB" conform -q -t $threads $golden/te_1d.safetensors $golden/te_rht.safetensors
    out_is "111 passed, 0 failed"
done
run 0 "$NIB" conform --verbose $golden/te_gemm.safetensors
out_is "te_gemm.safetensors: 16x32x64: passed" "te_gemm.safetensors: 64x48x256: passed" \
    "te_gemm.safetensors: 128x128x512: passed" "te_gemm.safetensors: 3 cases, 0 failed" "3 passed, 0 failed"
run 0 "$NIB" conform $golden/te_1d.safetensors --case 'normal.*.16x16'
out_is "te_1d.safetensors: 3 cases, 0 failed" "3 passed, 0 failed"

one=normal.f32.16x16
passes te_1d only $one set $one given_amax true
passes te_1d only $one set $one seed '"18446744073709551615"' set $one offset 4 set $one origin '[32, 16]'
passes te_1d only $one set $one rounding '"nearest"' set $one scale_rule '"rtn"' set $one tensor_scale '"dialect"'
passes te_1d only $one set $one min_block_scale 0 set $one fast_error false set $one levels 2
passes te_1d only $one set $one rowwise false drop $one/row_data drop $one/row_scale drop $one/row_amax
passes te_1d only $one set $one columnwise false drop $one/col_data drop $one/col_scale drop $one/col_amax
passes te_1d only $one type $one/row_scale F8_E4M3
passes te_1d only $one unset $one exact unset $one row_scaled unset $one four_over_six unset $one e4m3_max
passes te_row_scaled only normal.bf16.32x48 set normal.bf16.32x48 given_amax true
passes torchao only $one.two set $one.two given_tensor_scale true
passes gist only $one set $one given_global_scale true
passes te_rht only smallint.bf16.32x48 set smallint.bf16.32x48 rht_sign_mask 55272
passes te_gemm only 16x32x64 unset 16x32x64 block
passes te_1d only $one rename $one/x a/b/x rename $one/row_data a/b/row_data rename $one/row_scale a/b/row_scale \
    rename $one/row_amax a/b/row_amax drop $one/col_data drop $one/col_scale drop $one/col_amax \
    metadata cases '{"a/b": {"op": "quantize", "format": "nvfp4", "dialect": "te"}}'
# A NaN is a NaN, and in E2M1 the sign of a zero is not looked at.
passes casts flip casts/f32_of_e4m3 510 0x40 flip casts/f32_of_e4m3 508 1 flip casts/e2m1_of_bf16_clamped 32768 8

# The same in values, of which a file need not have any: here a NaN and a zero.
passes modelopt only zero.f32.2x80 flip zero.f32.2x80/y 0 1 flip zero.f32.2x80/y 7 0x80
passes modelopt only sparse.f32.2x80 flip sparse.f32.2x80/y 3 0x80
passes modelopt only sparse.f32.2x80 drop sparse.f32.2x80/y

# ---- What differs --------------------------------------------------------------------------------------

# One bit of one element, in each tensor: the coordinates are of elements, of blocks, of rows.
differs "normal.f32.32x48: row_data[3, 10]: expected 0x" te_1d flip normal.f32.32x48/row_data $((3 * 24 + 5)) 0x04
differs "normal.f32.32x48: row_data[3, 11]: expected 0x" te_1d flip normal.f32.32x48/row_data $((3 * 24 + 5)) 0x40
differs "normal.f32.32x48: col_data[47, 31]: expected 0x" te_1d flip normal.f32.32x48/col_data $((48 * 16 - 1)) 0x80
differs "normal.f32.32x48: row_scale[31, 2]: expected 0x" te_1d flip normal.f32.32x48/row_scale 95 1
differs "normal.f32.32x48: col_scale[1, 0]: expected 0x" te_1d flip normal.f32.32x48/col_scale 2 1
differs "normal.f32.32x48: row_amax[0]: expected 0x" te_1d flip normal.f32.32x48/row_amax 0 1
differs "normal.f32.32x48: col_amax[0]: expected 0x" te_1d flip normal.f32.32x48/col_amax 0 1
differs "normal.bf16.32x48: row_amax[9]: expected 0x" te_row_scaled flip normal.bf16.32x48/row_amax 36 1
differs "normal.f32.16x16: global_scale[0]: expected 0x" gist flip normal.f32.16x16/global_scale 0 1
differs "normal.f32.16x16.two: tensor_scale[0]: expected 0x" torchao flip normal.f32.16x16.two/tensor_scale 0 1
differs "16x32x64: y[2, 5]: expected 0x" te_gemm flip 16x32x64/y $((4 * (2 * 32 + 5))) 1
differs "casts: e4m3_of_bf16_clamped[16256]: expected 0x39, got 0x38" casts flip casts/e4m3_of_bf16_clamped 16256 1
differs "casts: e2m1_of_bf16_clamped[16256]: expected 0x03, got 0x02" casts flip casts/e2m1_of_bf16_clamped 16256 1
differs "casts: e4m3_of_f16_clamped[15360]: expected 0x39, got 0x38" casts flip casts/e4m3_of_f16_clamped 15360 1
differs "casts: f32_of_e4m3[56]: expected 0x3F800001, got 0x3F800000" casts flip casts/f32_of_e4m3 224 1
differs "casts: f32_of_e8m0[127]: expected 0x3F800001, got 0x3F800000" casts flip casts/f32_of_e8m0 508 1
differs "sparse.f32.2x80: y[1, 79]: expected 0x" modelopt flip sparse.f32.2x80/y $((4 * 159)) 1
# The options reach the quantizer.
differs "$one: " te_1d only $one set $one four_over_six '"mse"'
differs "$one: " te_1d only $one set $one e4m3_max 448 set $one block '"16x16"'
differs "smallint.bf16.32x48: col_" te_rht only smallint.bf16.32x48 set smallint.bf16.32x48 rht_sign_mask 0
differs "$one: " te_1d only $one set $one rounding '"stochastic8"' set $one seed 7
# All cases are gone through; the counts say so, and the exit status is 1 whichever file failed.
make te_gemm flip 16x32x64/y 0 1 flip 64x48x256/y 0 1
run 1 "$NIB" conform "$work/v.safetensors" $golden/casts.safetensors
[ "$(sed -n '3,$p' "$work/out")" = "v.safetensors: 3 cases, 2 failed
casts.safetensors: 1 cases, 0 failed
2 passed, 2 failed" ] || fail "counts of two files"
run 1 "$NIB" conform -q "$work/v.safetensors"
out_is "1 passed, 2 failed"
run 0 "$NIB" conform --case '128*' "$work/v.safetensors"

# Two units in the last place are let through in a transformed copy, whose sums depend on the order of adding: here they
# are two. Three are not, nor is anything in the other copy, nor where the case is exact.
rht=normal.f32.128x64
passes te_rht only $rht
differs "$rht: col_amax[0]: expected 0x40786676, got 0x40786674" te_rht only $rht set $rht exact true
differs "$rht: col_amax[0]: expected 0x40786677, got 0x40786674" te_rht only $rht flip $rht/col_amax 0 1
differs "$rht: row_amax[0]: expected 0x" te_rht only $rht flip $rht/row_amax 0 1

# ---- What is bad ---------------------------------------------------------------------------------------

key() { # the sentence, then KEY JSON: te_1d's first case with that key
    bad "case '$one': $1" te_1d only $one set $one "$2" "$3"
}
key 'its "op" is "quantized", not "quantize" or "gemm" or "casts"' op '"quantized"'
key 'its "op" is null, not' op null
key 'its "format" is "nvfp5", not a format of this version' format '"nvfp5"'
key 'its "dialect" is "xyz", not a dialect of this version' dialect '"xyz"'
key 'its "dialect" is 1, not a dialect of this version' dialect 1
key 'its "block" is "1y16", not rows x columns' block '"1y16"'
key 'its "block" is "1x16 ", not rows x columns' block '"1x16 "'
key 'its "columnwise" is 1, not true or false' columnwise 1
key 'its "e4m3_max" is "448", not an integer' e4m3_max '"448"'
key 'its "levels" is 3, not 1 or 2' levels 3
key 'its "four_over_six" is "on", not "off" or "mae" or "mse"' four_over_six '"on"'
key 'its "rounding" is "up", not "nearest" or' rounding '"up"'
key 'its "seed" is -1, not 0 to 2^64-1' seed -1
key 'its "seed" is "18446744073709551616", not 0 to 2^64-1' seed '"18446744073709551616"'
key 'its "origin" is [0], not [row, column]' origin '[0]'
key 'its "min_block_scale" is 0.1, not a number that a float holds exactly' min_block_scale 0.1
key 'its "rht_sign_mask" is 65536, not an integer from 0 to 65535' rht_sign_mask 65536
key 'its key "colour" is not known' colour '"red"'
key '' block '"3x5"' # what goes together is the library's to say
key '' e4m3_max 7
bad "case '$one': " te_1d only $one set $one rht true set $one block '"16x16"'
bad "case '$one': its \"four_over_six\" and its \"scale_rule\" contradict each other" \
    te_1d only $one set $one four_over_six '"mae"' set $one scale_rule '"sweep"'
bad "case '$one': its \"given_global_scale\" gives an encode scale, but such a tensor has an amax" \
    te_1d only $one set $one given_global_scale true copy $one/row_amax $one/global_scale
bad "case '$one': it has no \"op\"" te_1d only $one unset $one op
bad "case '$one': it has no \"dialect\"" te_1d only $one unset $one dialect
bad "case '$one': it is not a JSON object" te_1d only $one case $one 7
bad "case 'casts': a case of op \"casts\" has no \"dialect\"" casts set casts dialect '"te"'
bad "case '16x32x64': a case of op \"gemm\" has no \"columnwise\"" te_gemm set 16x32x64 columnwise false
for tensor in x row_data row_scale row_amax col_data col_scale col_amax; do
    bad "case '$one': it has no tensor '$tensor'" te_1d only $one drop $one/$tensor
done
bad "case 'sparse.f32.2x80': its tensor 'y' is F32 [80, 2], not F32 [2, 80]" modelopt shape sparse.f32.2x80/y '[80, 2]'
bad "case 'casts': it has no tensor 'f32_of_e5m2'" casts drop casts/f32_of_e5m2
bad "case 'casts': it has no tensor 'bf16_bits'" casts drop casts/bf16_bits
bad "case 'casts': its tensor 'bf16_bits' has a number outside 0..65535 at 0" casts flip casts/bf16_bits 3 0x80
bad "case '16x32x64': it has no tensor 'y'" te_gemm drop 16x32x64/y
bad "case '16x32x64': its tensor 'y' is F32 [32, 16], not F32 [16, 32]" te_gemm shape 16x32x64/y '[32, 16]'
bad "case '$one': its tensor 'row_data' is U8 [8, 16], not U8 [16, 8]" te_1d only $one shape $one/row_data '[8, 16]'
bad "case '$one': its tensor 'row_data' is I8 [16, 8], not U8 [16, 8]" te_1d only $one type $one/row_data I8
bad "case '$one': its tensor 'row_scale' is U8 [16], not F8_E4M3 [16, 1]" te_1d only $one shape $one/row_scale '[16]'
bad "case '$one': its tensor 'row_amax' is I32 [1], not F32 [1]" te_1d only $one type $one/row_amax I32
bad "case '$one': its tensor 'row_amax' has rank 0" te_1d only $one shape $one/row_amax '[]'
bad "case '$one': its tensor 'row_amax' is F32 [1], not F32 [16]" te_1d only $one set $one row_scaled true \
    set $one given_amax true # too few numbers are not read past their end
bad "case '$one': " te_1d only $one type $one/x I32
python3 -c 'import json, struct, sys
text = json.dumps({"__metadata__": {"cases": json.dumps({"c": {"op": "quantize", "format": "nvfp4", "dialect": "te"}})},
                   "c/x": {"dtype": "F32", "shape": [17179869184, 0], "data_offsets": [0, 0]}}).encode()
sys.stdout.buffer.write(struct.pack("<Q", len(text)) + text)' >"$work/v.safetensors"
run 2 "$NIB" conform "$work/v.safetensors"
has err "case 'c': its tensor 'x' is F32 [17179869184, 0]: without elements, the rest of a shape is 1048576 at most"
bad "no case uses its tensor '$one/extra'" te_1d only $one copy $one/x $one/extra
bad "no case uses its tensor '$one/tensor_scale'" te_1d only $one copy $one/row_amax $one/tensor_scale
bad "no case uses its tensor '$one/col_amax'" te_1d only $one set $one columnwise false
bad "no case uses its tensor 'lonely'" te_1d only $one copy $one/x lonely
bad "no case uses its tensor 'other/x'" te_1d only $one copy $one/x other/x
bad "it has no case" te_1d metadata cases '{}'
bad "it is no file of vectors: its metadata has no \"cases\"" te_1d unmetadata cases
bad "its \"cases\" are not a JSON object" te_1d metadata cases '[]'
bad "its \"cases\" are not JSON: line 2, column 1: " te_1d metadata cases $'{"a":\n}'
bad "its \"cases\" are not JSON: line 1, column 11: duplicate object key" te_1d metadata cases '{"a":{},"a":{}}'
bad "" te_1d cut 1000
bad "" te_1d cut 7
bad "" te_1d cut 0

# A bad file does not hide the others, nor a bad case the other cases of its file.
make te_gemm set 16x32x64 format '"no"' flip 64x48x256/y 0 1
run 2 "$NIB" conform "$work/v.safetensors" $golden/casts.safetensors "$work/none.safetensors"
has out "v.safetensors: 64x48x256: y[0, 0]: expected 0x"
has out "v.safetensors: 3 cases, 1 failed, bad file"
has out "casts.safetensors: 1 cases, 0 failed"
has out "none.safetensors: 0 cases, 0 failed, bad file"
has err "$work/none.safetensors"
[ "$(tail -n 1 "$work/out")" = "2 passed, 1 failed" ] || fail "the last line beside bad files"
run 0 "$NIB" conform -q "$work/v.safetensors" --case 128x128x512
run 2 "$NIB" conform "$work"
run 2 "$NIB" conform /dev/null

# ---- JSON ----------------------------------------------------------------------------------------------

run 2 "$NIB" conform --json "$work/v.safetensors" $golden/casts.safetensors "$work/none.safetensors"
python3 -m json.tool "$work/out" >"$work/pretty" 2>&1 || fail "--json is not JSON"
python3 - "$work/out" "$work" <<'END' || fail "--json does not say what it should"
import json, sys
report, work = json.load(open(sys.argv[1])), sys.argv[2]
first, second, third = report
assert first["file"] == work + "/v.safetensors"
assert (first["cases"], first["failed"], first["bad"]) == (3, 1, True)
(failure,), (error,) = first["failures"], first["errors"]
assert failure["case"] == "64x48x256" and failure["tensor"] == "y" and failure["index"] == [0, 0]
assert int(failure["expected"], 16) ^ int(failure["got"], 16) == 1 and len(failure["got"]) == 10
assert error["case"] == "16x32x64" and "format" in error["error"]
assert (second["cases"], second["failed"], second["bad"], second["failures"], second["errors"]) == (1, 0, False, [], [])
assert third["cases"] == 0 and third["bad"] is True and third["errors"][0]["case"] is None
END
cp $golden/te_gemm.safetensors "$work/"$'\xff.safetensors'
run 0 "$NIB" conform --json "$work/"$'\xff.safetensors'
python3 -m json.tool "$work/out" >"$work/pretty" 2>&1 || fail "--json of a path that is not UTF-8"

# ---- Usage ---------------------------------------------------------------------------------------------

run 2 "$NIB" conform
has err "nib: conform: no file is given; see nib conform --help"
run 2 "$NIB" conform -q -v $golden/casts.safetensors
has err "nib: conform: --verbose, --quiet and --json exclude each other"
run 2 "$NIB" conform --json --quiet $golden/casts.safetensors
for value in x -1 1025 '' 99999999999999999999 1x; do
    run 2 "$NIB" conform -t "$value" $golden/casts.safetensors
    has err "nib: conform: --threads takes a number from 0 to 1024, not '$value'"
done
run 2 "$NIB" conform $golden/casts.safetensors -t
has err "nib: conform: an argument is missing after '-t'"
run 2 "$NIB" conform --case
has err "nib: conform: an argument is missing after '--case'"
run 2 "$NIB" conform --case 'nothing*' $golden/casts.safetensors
has err "nib: conform: no case is called 'nothing*'"

# A report that did not arrive is not a success.
for option in -v --json; do
    status=0
    "$NIB" conform $option $golden/te_gemm.safetensors >/dev/full 2>"$work/err" || status=$?
    [ $status = 2 ] || fail "conform $option >/dev/full: exit $status"
    has err "nib: cannot write standard output"
done

[ $failures = 0 ]

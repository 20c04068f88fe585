#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# nib quantize, convert, dequantize: what they print and write, what they reject, and what is left after a failure.
. tests/cli/expect.bash
NIB=${NIB:?the path of the tool}
BUILD=${BUILD:?the build folder}
mounted=
trap 'if [ -n "$mounted" ]; then umount "$mounted"; fi; rm -rf "$work"' EXIT

json() { python3 -c "import json, sys; d = json.load(open('$work/out')); sys.exit(not ($1))" || fail "not in the JSON: $1"; }

"$BUILD/examples/make_checkpoint" --family demo --layers 2 --shards 2 "$work/in" || exit 1

# ---- What is printed
run 0 "$NIB" quantize "$work/in" "$work/ct"
has out "quantized"
whole=$(python3 - "$work/ct" "$work/in" <<'PYTHON'
import glob, json, math, struct, sys
def tensors(path):
    for name in glob.glob(path + "/*.safetensors"):
        with open(name, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        yield from (entry for key, entry in header.items() if key != "__metadata__")
written = sum(t["data_offsets"][1] - t["data_offsets"][0] for t in tensors(sys.argv[1]))
print("%.2f" % (8 * written / sum(math.prod(t["shape"]) for t in tensors(sys.argv[2]))))
PYTHON
)
has out ", 4.50 bits per weight ($whole over the whole model): "
has out "kept: an embedding"
has out "note: vLLM loads this; transformers would load it without an error and compute garbage"
empty err
run 0 "$NIB" quantize --for vllm --dry-run "$work/in" "$work/none"
! grep -q "note:" "$work/out" || fail "there is nothing to note for vLLM"
run 2 "$NIB" quantize --for transformers "$work/in" "$work/none"
has err "experts that are stored one by one"
absent "$work/none"

# Weights of FP8 blocks that stay are written as the numbers they stand for, and counted as kept.
"$BUILD/examples/make_checkpoint" --family deepseek-fp8 --layers 3 "$work/fp8" >/dev/null || exit 1
run 0 "$NIB" quantize --dry-run "$work/fp8" "$work/none"
has out "quantized 48 of 74 weights, 4.50 bits per weight ("
has out "21 kept: part of multi-token prediction"
run 0 "$NIB" quantize -q "$work/in" "$work/again"
empty out
empty err
same "$work/ct" "$work/again"
run 0 "$NIB" quantize -v --dry-run "$work/in" "$work/dry"
has out "would be quantized"
has out "scale of"
absent "$work/dry"
run 0 "$NIB" quantize --json --dry-run "$work/in" "$work/dry"
json "d['dry_run'] and d['bytes_out'] == sum(__import__('os').path.getsize(f) for f in __import__('glob').glob('$work/ct/*.safetensors'))"
json "len(d['rows']) == d['weights'] and d['changed'] + d['kept'] == d['weights']"
for command in quantize convert dequantize; do
    run 0 "$NIB" "$command" --help
    has out "Examples:"
    has out "--resume"
done

# ---- Servers
run 0 "$NIB" quantize -q --for sglang "$work/in" "$work/sglang"
grep -q MIXED_PRECISION "$work/sglang/config.json" || fail "no portable form for SGLang"
run 0 "$NIB" quantize -q --for trtllm "$work/in" "$work/trt"
grep -q '"NVFP4"' "$work/trt/hf_quant_config.json" || fail "not NVFP4 for TensorRT-LLM"
run 2 "$NIB" quantize --for sglang --format compressed-tensors --scheme nvfp4a16 "$work/in" "$work/x"
has err "sglang cannot load that"
run 0 "$NIB" quantize -q --for llama.cpp "$work/in" "$work/llama.gguf"
run 0 "$NIB" inspect --quick "$work/llama.gguf"
has out "blk.0.ffn_gate_exps"
run 2 "$NIB" quantize --format compressed-tensors "$work/in" "$work/x.gguf"
has err "choose the format gguf"
run 2 "$NIB" quantize --for llama.cpp --format gguf "$work/in" "$work/x"
has err "give it a name that ends in .gguf"
sed 's/"model_type": "qwen3_moe"/"model_type": "mamba"/' "$work/in/config.json" >"$work/config.json"
cp -r "$work/in" "$work/mamba"
cp "$work/config.json" "$work/mamba/config.json"
run 2 "$NIB" quantize "$work/mamba" "$work/mamba.gguf"
has err "convert_hf_to_gguf.py"
rm -r "$work/mamba"
"$BUILD/examples/make_checkpoint" --family mixtral --layers 1 --hidden 64 --intermediate 96 --experts 2 "$work/mixtral" >/dev/null || exit 1
run 2 "$NIB" quantize --for llama.cpp --format modelopt "$work/mixtral" "$work/x"
has err "does not know NVFP4 experts called w1"
run 2 "$NIB" quantize --for llama.cpp "$work/mixtral" "$work/x.gguf"
has err "and this is \"mixtral\""
"$BUILD/examples/make_checkpoint" --layers 1 --hidden 64 --intermediate 96 "$work/narrow" >/dev/null || exit 1
run 0 "$NIB" quantize --dry-run --for llama.cpp --format modelopt "$work/narrow" "$work/x"
has out "1 kept: ignored by model.layers.0.mlp.down_proj"
run 0 "$NIB" quantize --dry-run --format modelopt "$work/narrow" "$work/x"
! grep -q "ignored by" "$work/out" || fail "96 columns are for all others"
run 2 "$NIB" quantize --for transformers --format modelopt "$work/in" "$work/x"
has err "transformers does not load modelopt"
run 2 "$NIB" quantize --for transformers "$work/in" "$work/x"
has err "experts"
run 2 "$NIB" quantize --for nobody "$work/in" "$work/x"
has err "--for takes vllm"
word=$(head -c 64 /dev/zero | tr '\0' a) # one letter more than any that is compared
run 2 "$NIB" quantize --scale "$word" "$work/in" "$work/x"
has err "--scale takes rtn, 4over6 or sweep, not '$word'"

# ---- Words in any case, and as others spell them
while read -r option word spelling; do
    run 0 "$NIB" quantize -q "$option" "$word" "$work/in" "$work/word"
    run 0 "$NIB" quantize -q "$option" "$spelling" "$work/in" "$work/spelling"
    same "$work/word" "$work/spelling"
    rm -r "$work/word" "$work/spelling"
done <<'LIST'
--scheme nvfp4a16 NVFP4A16
--scheme nvfp4a16 W4A16
--scheme nvfp4 w4a4
--format compressed-tensors Compressed_Tensors
--format modelopt ModelOpt
--for vllm vLLM
--for sglang SGLang
--for trtllm TensorRT-LLM
--for llama.cpp llamacpp
--scale 4over6 four-over-six
--tensor-scale pow2 Power-of-Two
--dialect torchao TorchAO
--preset mlp-only MLP_only
LIST
# ---- A terminal sees how far it is, and in the end nothing of it; a file, a pipe and -q do not
cat >"$work/terminal.py" <<'PYTHON'
import os, pty, subprocess, sys
master, slave = pty.openpty()
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=slave).returncode
os.close(slave)
text = b""
try:
    while part := os.read(master, 65536):
        text += part
except OSError:
    pass
sys.stdout.buffer.write(text)
sys.exit(status)
PYTHON
for command in "quantize -f --report $work/terminal.html $work/in $work/terminal" "check $work/ct" "compare $work/in $work/ct" \
    "inspect $work/ct"; do
    run 0 python3 "$work/terminal.py" "$NIB" $command
    python3 - "$work/out" <<'PYTHON' || fail "$command: what the terminal saw"
import re, sys
text = open(sys.argv[1], "rb").read().decode()
drawn = text.split("\r\x1b[K")
assert drawn[0] == "" and drawn[-1] == "" and len(drawn) > 2, drawn
assert all(re.match(r"[a-z ]+ [ 0-9]{3} %", line) or not line for line in drawn), drawn
PYTHON
done
for command in "quantize -q -f $work/in $work/terminal" "check -q $work/ct" "check --json $work/ct"; do
    run 0 python3 "$work/terminal.py" "$NIB" $command
    empty out
done
rm -r "$work/terminal"
# The name of the weight that it is at, of which a terminal obeys nothing.
for name in 'layers.0.\u001b[2J\u007f\u009b2Jup~proj' 'a.layer.that.is.left.out.0123456789.layers.0.mlp.experts.7.up_proj'; do
    python3 - "$work/name.safetensors" "$name" <<'PYTHON'
import struct, sys
header = ('{"%s.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}' % sys.argv[2]).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(header)) + header + bytes(4))
PYTHON
    run 0 python3 "$work/terminal.py" "$NIB" compare "$work/name.safetensors" "$work/name.safetensors"
    cat "$work/out" >>"$work/drawn"
done
cp "$work/drawn" "$work/out"
has out "layers.0.?[2J???2Jup~proj"
has out " %  123456789.layers.0.mlp.experts.7.up_proj" # of a long one the last 40 bytes

# ---- Numbers
while read -r option value words; do
    run 2 "$NIB" quantize --dry-run "$option" "$value" "$work/in" "$work/x"
    has err "$option takes $words, not '$value'"
done <<'LIST'
--min-block-scale 449 a number from 0 to 448, such as 2^-6
--min-block-scale 1e-300 a number from 0 to 448, such as 2^-6
--min-block-scale -1 a number from 0 to 448, such as 2^-6
--min-block-scale 2^9 a number from 0 to 448, such as 2^-6
--min-block-scale 2^99999999999 a number from 0 to 448, such as 2^-6
--min-block-scale 2^ a number from 0 to 448, such as 2^-6
--min-block-scale 1x a number from 0 to 448, such as 2^-6
--fold-exponent 1.1 a number from 0 to 1
--fold-exponent -0.1 a number from 0 to 1
--fold-exponent nan a number from 0 to 1
--fold-exponent 1x a number from 0 to 1
--damp -1 a number that is not negative, such as 0.1
--damp inf a number that is not negative, such as 0.1
--damp x a number that is not negative, such as 0.1
--budget 4.4 bits of a weight, from 4.5 to 16
--budget 16.1 bits of a weight, from 4.5 to 16
--budget five bits of a weight, from 4.5 to 16
LIST
for option in --ignore --only --fp8 --plain; do
    run 2 "$NIB" quantize --dry-run "$option" lm_head "$option" '' "$work/in" "$work/x"
    has err "nib: quantize: $option takes a PATTERN, not ''"
done
run 2 "$NIB" quantize --min-block-scale '' "$work/in" "$work/x"
has err "--min-block-scale takes a number"
run 2 "$NIB" quantize --fold-search --fold-exponent 1 "$work/in" "$work/x"
has err "--fold-search looks for the exponent"
run 2 "$NIB" quantize --fold-exponent 1 "$work/in" "$work/x"
has err "needs a file of statistics"
run 0 "$NIB" quantize -q --min-block-scale 2^-6 "$work/in" "$work/word"
same "$work/ct" "$work/word"
run 0 "$NIB" quantize -q -f --min-block-scale 0.25 "$work/in" "$work/word"
run 0 "$NIB" quantize -q --min-block-scale 2^-2 "$work/in" "$work/spelling"
same "$work/word" "$work/spelling"
run 0 "$NIB" quantize -q -f --min-block-scale 2^2 "$work/in" "$work/spelling"
! diff -rq "$work/word" "$work/spelling" >/dev/null || fail "2^2 is not 2^-2"
for power in -10 -9999999999999999999; do # less than any of E4M3
    run 2 "$NIB" quantize -q --dry-run --min-block-scale "2^$power" "$work/in" "$work/x"
    has err "min_block_scale must be 0 or a positive value that E4M3 has"
done
rm -r "$work/word" "$work/spelling"
run 0 "$NIB" quantize --dry-run --json --budget 6 "$work/in" "$work/x"
json "4.5 < 8 * d['changed_bytes_out'] / d['changed_elements'] <= 6 and 'is a guess' in d['note']"

run 2 "$NIB" quantize --shard-size 99999999999999999999 "$work/in" "$work/x"
has err "--shard-size takes a size such as 512M or 5G, not '99999999999999999999'"
run 2 "$NIB" quantize --for tensorfoo "$work/in" "$work/x"
has err "--for takes vllm, sglang, trtllm, transformers or llama.cpp, not 'tensorfoo'"
run 2 "$NIB" quantize --scheme nvfp4 --activations NORM.json --dry-run "$work/in" "$work/x"
has err "NORM.json" # a file, not a word

# ---- Patterns that match nothing
run 2 "$NIB" quantize --ignore 'model.layers.0.self_attn.q_porj' "$work/in" "$work/x"
has err 'ignore (--ignore): "model.layers.0.self_attn.q_porj" matches no module of'
has err 'near it are "model.layers.0.self_attn.q_proj"'
run 2 "$NIB" quantize --only 'model.layers.0' "$work/in" "$work/x"
has err 'add .* to it'
run 0 "$NIB" quantize --dry-run --ignore lm_head --ignore '*norm*' "$work/in" "$work/x" # stays anyway, tied or not
absent "$work/x"

# ---- Names of the hub, its cache, and what Git LFS has not fetched
hub=$work/hub
mkdir -p "$hub/models--org--two/snapshots/aaa" "$hub/models--org--two/snapshots/bbb" "$hub/models--org--none" \
    "$hub/models--org--one/snapshots"
ln -s "$work/in" "$hub/models--org--one/snapshots/0123abc"
for command in "quantize" "inspect" "check" "compare" "dequantize"; do
    second=$work/x
    [ $command != inspect ] && [ $command != check ] || second=
    # shellcheck disable=SC2086
    run 2 env HF_HUB_CACHE="$work/empty" "$NIB" $command Qwen/Qwen3-8B $second
    has err "Qwen/Qwen3-8B: there is no such directory; a model of this name on the Hugging Face hub is fetched by: hf download Qwen/Qwen3-8B --local-dir Qwen3-8B"
done
run 2 env HF_HUB_CACHE="$hub" "$NIB" inspect org/one
has err "in $hub/models--org--one/snapshots/0123abc"
run 2 "$NIB" inspect https://huggingface.co/org/model
has err "hf download org/model"
run 2 "$NIB" inspect "$hub/models--org--one/"
has err "the model is in $hub/models--org--one/snapshots/0123abc"
run 0 "$NIB" inspect -q "$hub/models--org--one/snapshots/0123abc"
run 2 "$NIB" check "$hub/models--org--one" # nothing is wrong with the model
run 2 "$NIB" inspect "$hub/models--org--one/snapshots"
has err "the model is in $hub/models--org--one/snapshots/0123abc"
run 2 "$NIB" inspect "$hub/models--org--two"
has err "one of the 2 directories in $hub/models--org--two/snapshots"
mkdir "$hub/models--org--two/refs"
echo -n bbb >"$hub/models--org--two/refs/main"
run 2 "$NIB" inspect "$hub/models--org--two"
has err "the model is in $hub/models--org--two/snapshots/bbb"
run 2 "$NIB" inspect "$hub/models--org--none"
has err "hf download org/none"
run 2 "$NIB" inspect "$hub"
has err "with 3 models: name the snapshot of one of them, such as $hub/models--org--none/"
run 2 "$NIB" inspect "$work/nothing"
has err "nothing: cannot open: No such file or directory"
run 2 "$NIB" inspect "$work/$(printf 'deep/%.0s' {1..200})model" # however long the path is
has err "deep/model: cannot open: No such file or directory"
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n' >"$work/lfs.safetensors"
run 2 "$NIB" inspect "$work/lfs.safetensors"
has err "git lfs pull"

# ---- A report that cannot be written ends the run before it begins
for report in "$work/no/q.html" "$work/in/config.json/q.html" "$work/x/config.json" "$work/in/config.json" "$work/in/generation_config.json"; do
    run 2 "$NIB" quantize --report "$report" "$work/in" "$work/x"
    has err "the report $report"
    absent "$work/x"
done
mkdir "$work/q.html"
run 2 "$NIB" quantize --report "$work/q.html" "$work/in" "$work/x"
has err "Is a directory"
absent "$work/x"
run 2 "$NIB" quantize --report "$work/x.html" "$work/in" "$work//x.html/" # which would be the output
has err "nib: cannot write the report $work/x.html: Is a directory"
absent "$work/x.html"
run 0 "$NIB" quantize -q --report "$work/x//./q.html" "$work/in" "$work/x/" # in an output that is not there yet
[ -s "$work/x/q.html" ] || fail "no report in the output"
[ "$(find "$work" -name '*.tmp-*')" = "" ] || fail "something was left of a trial"
rm -r "$work/x"

# ---- Refusals; nothing is left
run 2 "$NIB" quantize "$work/in"
has err "an input and an output"
run 2 "$NIB" quantize --scale best "$work/in" "$work/x"
has err "rtn, 4over6 or sweep"
run 2 "$NIB" quantize --max-memory lots "$work/in" "$work/x"
has err "a size such as 512M"
run 2 "$NIB" quantize --dialect modelopt --scale sweep "$work/in" "$work/x"
has err "--scale"
run 2 "$NIB" quantize "$work/nothing" "$work/x"
has err "$work/nothing"
run 2 "$NIB" quantize "$work/in" "$work/in/x"
has err "within the input"
run 2 "$NIB" quantize "$work/ct" "$work/x"
has err "nib convert"
run 2 "$NIB" convert "$work/ct" "$work/x"
has err "--format"
run 2 "$NIB" dequantize --dtype int8 "$work/ct" "$work/x"
has err "bf16, f16 or f32"
absent "$work/x"
run 2 "$NIB" quantize "$work/in" "$work/ct"
has err "--force replaces it"
run 0 "$NIB" quantize -q --force "$work/in" "$work/ct"
same "$work/ct" "$work/again"

# ---- There and back
run 0 "$NIB" convert -q --format modelopt "$work/ct" "$work/mo"
run 0 "$NIB" convert -q --format compressed-tensors "$work/mo" "$work/back"
run 0 "$NIB" dequantize -q --dtype f32 "$work/ct" "$work/plain"
run 0 "$NIB" dequantize -q --dtype f32 "$work/back" "$work/plain2"
for folder in plain plain2; do # provenance has other hashes
    python3 - "$work/$folder" <<'PYTHON' >"$work/$folder.data"
import glob, json, struct, sys, hashlib
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            print(name, entry["dtype"], entry["shape"], hashlib.sha256(data[8 + size + begin:8 + size + end]).hexdigest())
PYTHON
done
same "$work/plain.data" "$work/plain2.data"

# ---- Interrupted: nothing is left, or what --resume needs
"$BUILD/examples/make_checkpoint" --hidden 1024 --intermediate 2816 --layers 6 "$work/large" || exit 1
# Scalar kernels take seconds where others would be done before anybody could disturb them on a busy machine.
interrupt() { # OUT OPTION...: SIGINT once it has begun, which background processes ignore unless told otherwise
    local out=$1
    shift
    env --default-signal=INT NIB_MAX_ISA=scalar "$NIB" quantize -t 1 "$@" "$work/large" "$out" >"$work/out" 2>"$work/err" \
        </dev/null &
    local process=$!
    for _ in $(seq 200); do
        if [ -e "$out/.nib-partial" ]; then break; fi
        sleep 0.01
    done
    kill -INT $process
    wait $process
}
interrupt "$work/int" && fail "an interrupted run says that it is done"
has err "stopped"
absent "$work/int"
interrupt "$work/int" --resume && fail "an interrupted run says that it is done"
has err "--resume continues"
[ -d "$work/int/.nib-partial" ] || fail "nothing is left for a resume"
run 2 "$NIB" quantize "$work/large" "$work/int"
has err "--resume continues it"
run 0 "$NIB" quantize -q --resume "$work/large" "$work/int"
run 0 "$NIB" quantize -q "$work/large" "$work/undisturbed"
same "$work/int" "$work/undisturbed"

# ---- A disk that is full, and one that may not be written
before=$(cd "$work/large" && cksum ./*)
mkdir "$work/disk"
if mount -t tmpfs -o size=8M tmpfs "$work/disk" 2>/dev/null; then
    mounted=$work/disk
    # Sizes beyond all units are told in the largest.
    python3 - "$work/disk/huge.safetensors" <<'PYTHON'
import json, struct, sys
size = 2 * 10**15
header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<Q", len(header)) + header)
    file.truncate(8 + len(header) + size)
PYTHON
    run 0 "$NIB" inspect "$work/disk/huge.safetensors"
    has out "1 tensors, 2000 TB"
    rm "$work/disk/huge.safetensors"
    run 2 "$NIB" quantize "$work/large" "$work/disk/out"
    has err "make room"
    [ "$(ls "$work/disk/out")" = "" ] || fail "something has a final name on the full disk"
    mount -o remount,size=64M "$work/disk"
    # Somebody else fills it once the run has begun.
    NIB_MAX_ISA=scalar "$NIB" quantize -q -t 1 --force "$work/large" "$work/disk/out" >"$work/out" 2>"$work/err" </dev/null &
    process=$!
    for _ in $(seq 200); do
        if [ -e "$work/disk/out/.nib-partial/scan-00000.json" ]; then break; fi
        sleep 0.005
    done
    head -c 60M /dev/zero >"$work/disk/filler" 2>/dev/null
    wait $process && fail "a full disk goes unnoticed"
    has err "No space left on device"
    [ "$(ls "$work/disk/out")" = "" ] || fail "something has a final name on the full disk"
    rm "$work/disk/filler"
    run 0 "$NIB" quantize -q --resume "$work/large" "$work/disk/out"
    same "$work/disk/out" "$work/undisturbed"
    rm -r "$work/disk/out"
    run 2 bash -c "ulimit -f 8192; exec '$NIB' quantize -q '$work/large' '$work/disk/out'"
    has err "File too large"
    # What the commands before removed is let go a moment after they end: until then the disk is busy.
    for _ in $(seq 100); do
        if mount -o remount,ro "$work/disk" 2>/dev/null; then break; fi
        sleep 0.1
    done
    run 2 "$NIB" quantize "$work/large" "$work/disk/other"
    has err "Read-only file system"
    umount "$work/disk" && mounted=
else
    echo "no tmpfs could be mounted: the full disk is left out"
fi
[ "$before" = "$(cd "$work/large" && cksum ./*)" ] || fail "the input was touched"

[ "$failures" = 0 ] || exit 1
echo "all fine"

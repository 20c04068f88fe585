#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""limits.py NIB DIRECTORY MEGABYTES: files of some hundred bytes that claim to be enormous, and some of megabytes, through every
command. None may end but by an exit status, take more resident memory than MEGABYTES (0: any) and four times the files' size, or
longer than a minute."""
import json
import os
import shutil
import struct
import subprocess
import sys
import threading

NIB, ROOT, LIMIT = sys.argv[1], sys.argv[2], int(sys.argv[3])
HUGE = 1 << 62
EMPTY = [[HUGE, 0], [0, HUGE], [1 << 40, 0, 64], [1 << 31, 0, 16], [1 << 40, 16, 0]]  # shapes without a byte
COMMANDS = [line.split() for line in (
    "inspect IN", "check IN", "quantize IN OUT", "quantize IN OUT.gguf", "dequantize IN OUT", "repair IN OUT",
    "convert --format modelopt IN OUT", "compare IN IN", "compare --report OUT.html IN IN")]
WEIGHT = {"model.layers.0.mlp.up_proj.weight": ("BF16", [16, 16], 512)}


def safetensors(path, tensors, metadata=None):
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"\1" * at)


def directory(name, tensors, metadata=None, **files):
    path = os.path.join(ROOT, name)
    os.makedirs(path)
    safetensors(os.path.join(path, "model.safetensors"), tensors, metadata)
    for file, text in files.items():
        with open(os.path.join(path, file + ".json"), "w", encoding="utf-8") as out:
            out.write(text if isinstance(text, str) else json.dumps(text))
    return path


def repeat(file, before, part, count, after):
    """In small steps: the memory of this process counts for its children's, until they have become the tool."""
    file.write(before)
    for _ in range(count >> 10):
        file.write(part * 1024)
    file.write(part * (count % 1024) + after)


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(name, keys, tensors):
    path = os.path.join(ROOT, name)
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys))
        for tensor, dims, kind in tensors:
            file.write(string(tensor) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0))
        file.write(bytes(64))
    return path


def checkpoints():
    """Paths, each to be opened as a checkpoint."""
    for i, shape in enumerate(EMPTY):
        for j, name in enumerate(("mlp.up_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_blocks")):
            dtype = "U8" if "blocks" in name else "BF16"
            yield directory(f"empty{i}{j}", {f"model.layers.0.{name}": (dtype, shape, 0)},
                            config={"model_type": ("llama", "qwen3_vl_moe", "gpt_oss")[j], "num_experts": 1 << 40})
        up = "model.layers.0.mlp.up_proj."
        yield directory(f"packed{i}", {up + "weight_packed": ("U8", shape, 0), up + "weight_scale": ("F8_E4M3", shape, 0),
                                       up + "weight_global_scale": ("F32", [1], 4)}, config={"model_type": "llama"})
        yield directory(f"fp8{i}", {up + "weight": ("F8_E4M3", shape, 0), up + "weight_scale_inv": ("F32", shape, 0)},
                        config={"quantization_config": {"quant_method": "fp8", "weight_block_size": [1 << 40, 1 << 40]}})
        yield gguf(f"empty{i}.gguf", [string("general.architecture") + struct.pack("<I", 8) + string("llama"),
                                      string("llama.expert_count") + struct.pack("<II", 4, 0xFFFFFFFF)],
                   [("blk.0.ffn_gate_exps.weight", list(reversed(shape)), 2 * (i % 2))])
    counts = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts", "vocab_size", "hidden_size", "head_dim",
                            "num_attention_heads"), 1 << 60)
    tokens = {"model": {"type": "BPE", "vocab": {"a": 1 << 62, "b": 2000000000}, "merges": ["a b"]},
              "added_tokens": [{"id": 2147483647, "content": "x", "special": True}]}
    yield directory("counts", WEIGHT, config={"model_type": "llama", **counts}, tokenizer=tokens)
    yield directory("vocabulary", WEIGHT, config={"model_type": "llama", "vocab_size": 2000000000, "hidden_size": 16,
                                                  "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16},
                    tokenizer={**tokens, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, added_tokens={"z": 1999999999})
    yield directory("arrays", WEIGHT, config="[" * 50000)
    yield directory("objects", WEIGHT, config='{"a":' * 50000)
    values = directory("values", WEIGHT)
    with open(os.path.join(values, "config.json"), "wb") as file:
        repeat(file, b'{"a": [', b"[],", 9 << 20, b"0]}")
    yield values
    noted = os.path.join(ROOT, "noted.safetensors")
    with open(noted, "wb") as file:
        file.write(struct.pack("<Q", 31 + 3 * (2 << 20)))
        repeat(file, b'{"__metadata__":{"nib":"[     ', b"[],", (2 << 20) - 2, b'0]"}}  ')
    yield noted
    yield directory("patterns", WEIGHT, config={"quantization_config": {
        "quant_method": "compressed-tensors", "ignore": ["re:(a+)+$", "re:(.*)*x"] * 200}})
    codes = {"a" * 120 + "." + part: facts for part, facts in (("weight_packed", ("U8", [1, 8], 8)), ("weight_scale", ("F8_E4M3", [1, 1], 1)),
                                                               ("weight_global_scale", ("F32", [1], 4)))}
    for name, ignore in (("compiled", [f"re:{i}(((abcd){{20}}){{20}}){{7}}" for i in range(2000)]),
                         ("remembered", ["re:(?:" + "(x?)" * 400 + "a)*[bc]"])):
        yield directory(name, {**WEIGHT, **codes}, config={"quantization_config": {"quant_method": "compressed-tensors", "ignore": ignore}})
    yield directory("stack", {"m." + "a" * 20000 + ".experts.gate_up_proj": ("BF16", [5000, 2, 1], 20000)},
                    config={"model_type": "qwen3_5_moe", "hidden_size": 1})
    yield directory("provenance", WEIGHT, {"nib": "[" * 2000}, config={"model_type": "llama"})
    deep = os.path.join(ROOT, "deep.safetensors")
    with open(deep, "wb") as file:
        file.write(struct.pack("<Q", 60005) + b'{"a":' + b"[" * 60000)
    yield deep
    long = os.path.join(ROOT, "long.safetensors")
    with open(long, "wb") as file:
        file.write(struct.pack("<Q", 99999999) + b'{"a":')
    yield long
    for name, part in (("dotted", "a."), ("undotted", "a")):
        yield directory(name, {"model.layers.0." + part * (2 << 20) + ".weight": ("BF16", [16, 16], 512)}, config={"model_type": "llama"})
    yield gguf("alignment.gguf", [string("general.alignment") + struct.pack("<II", 4, 1 << 31)], [("a", [32], 0)])
    yield gguf("split.gguf", [string("split.count") + struct.pack("<IH", 2, 65535)], [])
    yield gguf("array.gguf", [string("a") + struct.pack("<IIQ", 9, 0, 1 << 30)], [])


def statistics():
    """Files for --imatrix."""
    for name, data in (("values", struct.pack("<ii3sii", 1, 3, b"abc", 1, 0x7FFFFFFF)), ("entries", struct.pack("<i", 0x7FFFFFFF)),
                       ("name", struct.pack("<ii", 1, 0x7FFFFFFF))):
        path = os.path.join(ROOT, name + ".dat")
        with open(path, "wb") as file:
            file.write(data + bytes(60))
        yield path
    yield gguf("imatrix.gguf", [string("general.type") + struct.pack("<I", 8) + string("imatrix")],
               [("blk.0.ffn_up.weight.in_sum2", [0, HUGE], 0), ("blk.0.ffn_up.weight.counts", [1, 0], 0)])
    path = os.path.join(ROOT, "statistics.safetensors")
    safetensors(path, {"model.layers.0.mlp.up_proj.weight": ("F32", [0, HUGE], 0)}, {"format": "nib-statistics"})
    yield path


def vectors():
    """Files for nib conform: one amax for each row, where rows have no element."""
    for i, shape in enumerate([*EMPTY, [1 << 28, 0], [1 << 34, 0], [0, 1 << 34], [1 << 11, 0, 1 << 11]]):
        for usage in ("rowwise", "columnwise"):
            case = {"op": "quantize", "format": "nvfp4", "dialect": "te", "row_scaled": True, "rowwise": False, usage: True}
            path = os.path.join(ROOT, f"{usage}{i}.safetensors")
            safetensors(path, {"c/x": ("F32", shape, 0)}, {"cases": json.dumps({"c": case})})
            yield path


def size_of(path):
    if os.path.isdir(path):
        return sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path))
    return os.path.getsize(path) if path.startswith(ROOT) and os.path.exists(path) else 0


def run(words):
    """What is wrong with a run; None for nothing."""
    allowed = LIMIT + 4 * max((size_of(word) for word in words), default=0) / 1e6
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                               env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    alarm = threading.Timer(60, process.kill)
    alarm.start()
    _, status, usage = os.wait4(process.pid, 0)
    alarm.cancel()
    code = os.waitstatus_to_exitcode(status)
    process.returncode = code
    megabytes = usage.ru_maxrss / 1024
    if not 0 <= code <= 2:
        return f"ends with {code}"
    return f"takes {megabytes:.0f} MB" if LIMIT and megabytes > allowed else None


def main():
    out, faults, runs = os.path.join(ROOT, "out"), 0, 0
    jobs = [[NIB, *(path if word == "IN" else word.replace("OUT", out) for word in words)]
            for path in checkpoints() for words in COMMANDS]
    good = directory("good", WEIGHT, config={"model_type": "llama"})
    jobs += [[NIB, "quantize", "--imatrix", path, good, out] for path in statistics()]
    jobs += [[NIB, "conform", path] for path in vectors()]
    for job in jobs:
        fault = run(job)
        runs += 1
        shutil.rmtree(out, ignore_errors=True)
        if os.path.exists(out + ".gguf"):
            os.remove(out + ".gguf")
        if fault:
            print("FAILED:", *job, fault)
            faults += 1
    print(f"{runs - faults} passed, {faults} failed")
    sys.exit(faults != 0)


main()

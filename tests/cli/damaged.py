#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nib check and nib repair on a good checkpoint, damaged in one way at a time.

    damaged.py NIB FOLDER                    all of it
    damaged.py --make FOLDER                 only the checkpoints, for other tests
    damaged.py --damage FINDING FOLDER       one of them, damaged, in place of what is there
    damaged.py --compare ORIGINAL FOLDER     what nib compare should say of three weights, as JSON

The checkpoint is made here, by arithmetic of its own: a model of three layers, experts in the last, in every form that
the tool knows. Each damage must give exactly its finding, and the undamaged ones none.
"""
import bisect
import copy
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys

NIB, WORK = os.path.abspath(sys.argv[1]), sys.argv[2]
MODES = ("--make", "--damage", "--compare")
HIDDEN, INNER, KV, VOCAB, EXPERTS = 256, 128, 128, 64, 2
counts = {"passed": 0, "failed": 0}


def fail(what):
    counts["failed"] += 1
    print(f"FAILED {what}", flush=True)


def check(condition, what):
    if condition:
        counts["passed"] += 1
    else:
        fail(what)


# ---- Numbers ---------------------------------------------------------------------------------------------


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bytes(values):
    """To nearest even."""
    out = bytearray()
    for word in struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values)):
        out += struct.pack("<H", (word + 0x7FFF + (word >> 16 & 1)) >> 16)
    return bytes(out)


E4M3 = [(m / 8) * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6]
MIDDLES = [.25, .75, 1.25, 1.75, 2.5, 3.5, 5]


def e4m3(x):
    """The nearest code; ties do not matter here."""
    at = bisect.bisect_left(E4M3, min(x, 448.0))
    return at if at == 0 or E4M3[at] - x <= x - E4M3[at - 1] else at - 1


def quantize(rows, g):
    """Codes and scales of rows of numbers with the multiplier g."""
    codes, scales = bytearray(), bytearray()
    for row in rows:
        nibbles = []
        for at in range(0, len(row), 16):
            block = row[at:at + 16]
            s = max(8, e4m3(max(map(abs, block)) / 6 / g))
            scales.append(s)
            f = E4M3[s] * g
            nibbles += [bisect.bisect_left(MIDDLES, abs(x) / f) | (8 if x < 0 else 0) for x in block]
        codes += bytes(nibbles[i] | nibbles[i + 1] << 4 for i in range(0, len(nibbles), 2))
    return bytes(codes), bytes(scales)


# ---- Files -----------------------------------------------------------------------------------------------

BITS = {"F32": 32, "BF16": 16, "F8_E4M3": 8, "U8": 8}


def write_safetensors(path, tensors, metadata):
    header, at, body = {}, 0, []
    if metadata is not None:
        header["__metadata__"] = metadata
    for name in sorted(tensors, key=lambda n: (-BITS[tensors[n][0]], n)):
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        body.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(body))


class Model:
    """Tensors and what lies beside them. `homes` says which file a tensor is in."""

    def __init__(self, tensors, config, hf=None):
        self.tensors, self.config, self.hf = tensors, config, hf
        self.metadata = {"format": "pt"}
        self.extra = {}  # files besides: name -> tensors
        self.unindexed = set()
        self.also = {}  # tensors that are in a second indexed file too: name -> file

    def home(self, name):
        return "model-00002-of-00002.safetensors" if ".layers.2." in name or ".k_proj" in name else \
            "model-00001-of-00002.safetensors"

    def write(self, folder):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        files = {}
        for name, tensor in self.tensors.items():
            files.setdefault(self.home(name), {})[name] = tensor
        for name, file in self.also.items():
            files[file][name] = self.tensors[name]
        for file, tensors in files.items():
            write_safetensors(os.path.join(folder, file), tensors, self.metadata)
        for file, tensors in self.extra.items():
            write_safetensors(os.path.join(folder, file), tensors, {"format": "pt"})
        index = {"metadata": {"total_size": sum(len(t[2]) for t in self.tensors.values())},
                 "weight_map": {n: self.home(n) for n in sorted(self.tensors) if n not in self.unindexed}}
        tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
                     "pre_tokenizer": {"type": "ByteLevel"}}
        for name, value in (("model.safetensors.index.json", index), ("config.json", self.config),
                            ("hf_quant_config.json", self.hf), ("tokenizer.json", tokenizer)):
            if value is not None:
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    json.dump(value, file, indent=2)


# ---- The model -------------------------------------------------------------------------------------------


def shapes():
    for layer in range(3):
        base = f"model.layers.{layer}."
        yield base + "self_attn.q_proj", HIDDEN, HIDDEN
        yield base + "self_attn.k_proj", KV, HIDDEN
        yield base + "self_attn.v_proj", KV, HIDDEN
        yield base + "self_attn.o_proj", HIDDEN, HIDDEN
        for mlp in [f"mlp.experts.{e}." for e in range(EXPERTS)] if layer == 2 else ["mlp."]:
            yield base + mlp + "gate_proj", INNER, HIDDEN
            yield base + mlp + "up_proj", INNER, HIDDEN
            yield base + mlp + "down_proj", HIDDEN, INNER


GROUPS = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


def group_of(name):
    parent, last = name.rsplit(".", 1)
    return next((parent + ".".join(sorted(group)) for group in GROUPS if last in group), name)


def make_weights():
    """Rows and columns differ in size, as they do in models; weights of one input have the same large columns."""
    random.seed(20261115)
    weights, columns = {}, {}
    for name, rows, cols in shapes():
        column = columns.setdefault(group_of(name), [math.exp(random.gauss(0, .4)) for _ in range(cols)])
        weights[name] = []
        for _ in range(rows):
            size = .02 * math.exp(random.gauss(0, .5))
            weights[name].append([random.gauss(0, size) * c for c in column])
    return weights


def plain_tensors():
    """What no form quantizes."""
    random.seed(7)
    out = {}

    def add(name, *shape):
        n = math.prod(shape)
        out[name] = ("BF16", list(shape), bf16_bytes([random.gauss(1 if len(shape) == 1 else 0, .02) for _ in range(n)]))

    add("model.embed_tokens.weight", VOCAB, HIDDEN)
    add("lm_head.weight", VOCAB, HIDDEN)
    add("model.norm.weight", HIDDEN)
    for layer in range(3):
        add(f"model.layers.{layer}.input_layernorm.weight", HIDDEN)
        add(f"model.layers.{layer}.post_attention_layernorm.weight", HIDDEN)
        add(f"model.layers.{layer}.self_attn.q_norm.weight", 32)
        add(f"model.layers.{layer}.self_attn.k_norm.weight", 32)
    add("model.layers.2.mlp.gate.weight", EXPERTS, HIDDEN)
    return out


CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
          "moe_intermediate_size": INNER, "intermediate_size": INNER, "num_experts": EXPERTS, "num_hidden_layers": 3,
          "num_attention_heads": HIDDEN // 32, "num_key_value_heads": KV // 32, "head_dim": 32,
          "vocab_size": VOCAB, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
KEPT = ["lm_head", "model.embed_tokens", "model.layers.2.mlp.gate"]


def ct_config(activations):
    arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
                 "dynamic": False, "observer": "minmax"}
    inputs = {**arguments, "dynamic": "local"} if activations else None
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
            "ignore": list(KEPT), "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": arguments, "input_activations": inputs, "output_activations": None}}}


def make_models():
    """The original, and the quantized forms of it."""
    weights, plain = make_weights(), plain_tensors()
    original = dict(plain)
    # What the quantized forms are made of are the numbers that the original has: those of BF16.
    rounded = {}
    for name, rows in weights.items():
        flat = [x for row in rows for x in row]
        data = bf16_bytes(flat)
        original[name + ".weight"] = ("BF16", [len(rows), len(rows[0])], data)
        words = struct.unpack(f"<{len(flat)}H", data)
        values = struct.unpack(f"<{len(flat)}f", struct.pack(f"<{len(flat)}I", *[w << 16 for w in words]))
        rounded[name] = [values[i:i + len(rows[0])] for i in range(0, len(values), len(rows[0]))]
    amax = {}
    for name, rows in rounded.items():
        amax[group_of(name)] = max(amax.get(group_of(name), 0), max(abs(x) for row in rows for x in row))
    forms = {"ct": {}, "ct4": {}, "mo": {}, "ao": {}}
    for name, rows in rounded.items():
        g = 2.0 ** math.ceil(math.log2(amax[group_of(name)] / 2688))
        codes, scales = quantize(rows, g)
        n, k = len(rows), len(rows[0])
        packed = ("U8", [n, k // 2], codes)
        scale = ("F8_E4M3", [n, k // 16], scales)
        for form in ("ct", "ct4"):
            forms[form].update({name + ".weight_packed": packed, name + ".weight_scale": scale,
                                name + ".weight_global_scale": ("F32", [1], struct.pack("<f", 1 / g))})
        forms["ct4"][name + ".input_global_scale"] = ("F32", [1], struct.pack("<f", 168))
        forms["mo"].update({name + ".weight": packed, name + ".weight_scale": scale,
                            name + ".weight_scale_2": ("F32", [], struct.pack("<f", g)),
                            name + ".input_scale": ("F32", [], struct.pack("<f", 1 / 168))})
        forms["ao"].update({name + "._weight_qdata": packed, name + "._weight_scale": scale,
                            name + "._weight_per_tensor_scale": ("F32", [], struct.pack("<f", g))})
    models = {"original": Model(original, CONFIG)}
    for form in ("ct", "ct4"):
        models[form] = Model({**plain, **forms[form]}, {**CONFIG, "quantization_config": ct_config(form == "ct4")})
    producer = {"name": "modelopt", "version": "0.46.0"}
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    models["mo"] = Model({**plain, **forms["mo"]}, {**CONFIG, "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(KEPT), "producer": producer,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments, "input_activations": arguments}}}},
        {"producer": producer, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
                                                "exclude_modules": list(KEPT)}})
    layers = {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in rounded}
    mixed = {n: t for n, t in models["mo"].tensors.items() if not n.endswith(".input_scale")}
    models["mixed"] = Model(mixed, {**CONFIG, "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "ignore": list(KEPT),
        "quantized_layers": layers}},
        {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "exclude_modules": list(KEPT),
                          "quantized_layers": layers}})
    models.update(make_mixtures(rounded, plain, forms, producer))
    models["ao"] = Model({**plain, **forms["ao"]}, {**CONFIG, "quantization_config": {"quant_method": "torchao"}})
    return models


def make_mixtures(rounded, plain, forms, producer):
    """FP8 beside NVFP4, with a scale for each row: of compressed-tensors and of ModelOpt."""
    made = {"ct8": {}, "mo8": {}}
    for name, rows in rounded.items():
        if name not in FP8:
            for form, kind in (("ct8", "ct"), ("mo8", "mo")):
                made[form].update({n: t for n, t in forms[kind].items()
                                   if n.startswith(name + ".") and "input" not in n})
            continue
        scales = [2.0 ** math.ceil(math.log2(max(map(abs, row)) / 448)) for row in rows]
        codes = bytes(e4m3(abs(x) / s) | (0x80 if x < 0 else 0) for row, s in zip(rows, scales) for x in row)
        shape = [len(rows), len(rows[0])]
        for form, scale in (("ct8", ("BF16", [len(rows), 1], bf16_bytes(scales))),
                            ("mo8", ("F32", [len(rows)], struct.pack(f"<{len(rows)}f", *scales)))):
            made[form].update({name + ".weight": ("F8_E4M3", shape, codes), name + ".weight_scale": scale})
    config = ct_config(False)
    config["format"] = "mixed-precision"
    config["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    config["config_groups"]["group_1"] = {
        "targets": list(FP8), "format": "float-quantized", "input_activations": None, "output_activations": None,
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}}
    layers = {name: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"} if name in FP8 else
              {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in rounded}
    modelopt = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    return {"ct8": Model({**plain, **made["ct8"]}, {**CONFIG, "quantization_config": config}),
            "mo8": Model({**plain, **made["mo8"]},
                         {**CONFIG, "quantization_config": {"quant_method": "modelopt", "ignore": list(KEPT),
                                                            "producer": producer, **modelopt}},
                         {"producer": producer, "quantization": {"exclude_modules": list(KEPT), **modelopt}})}


# ---- Damage ----------------------------------------------------------------------------------------------

Q, K, V = (f"model.layers.1.self_attn.{x}_proj" for x in "qkv")
O, DOWN = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
UP = "model.layers.2.mlp.experts.1.up_proj"
FP8 = (Q, K, V, DOWN)  # in the mixtures
TOLD_ONCE = ("config-too-wide", "fused-input-scales-differ")  # of an entry, of a group
DAMAGES = []


def damage(finding, form, against=False, repaired=None):
    """A way to damage a form, and what must be found. repaired: whether nib repair is to remove it, so that it is the
    original's again; "alone": no longer the original's."""
    def note(function):
        DAMAGES.append((finding, form, against, repaired, function))
        return function
    return note


def number(model, name, value):
    dtype, shape, _ = model.tensors[name]
    model.tensors[name] = (dtype, shape, struct.pack("<f", value))


def get_number(model, name):
    return struct.unpack("<f", model.tensors[name][2])[0]


def edit(model, name, change):
    dtype, shape, data = model.tensors[name]
    model.tensors[name] = (dtype, shape, bytes(change(bytearray(data))))


def reshape(model, name, shape, data=None, dtype=None):
    old_dtype, _, old = model.tensors[name]
    model.tensors[name] = (dtype or old_dtype, shape, old if data is None else data)


@damage("scale-missing", "ct")
def _(m): del m.tensors[O + ".weight_scale"]


@damage("tensor-scale-missing", "ct")
def _(m): del m.tensors[O + ".weight_global_scale"]


@damage("tensor-scale-missing", "mo")
def _(m): del m.tensors[O + ".weight_scale_2"]


@damage("input-scale-missing", "ct4", repaired=True)
def _(m): del m.tensors[UP + ".input_global_scale"]


@damage("input-scale-missing", "mo", repaired=True)
def _(m):
    del m.tensors[O + ".input_scale"]
    del m.tensors[UP + ".input_scale"]


@damage("codes-missing", "ct")
def _(m): del m.tensors[O + ".weight_packed"]


@damage("codes-shape", "ct")
def _(m): reshape(m, O + ".weight_packed", [1, HIDDEN, HIDDEN // 2])


@damage("inner-size", "ct")
def _(m):
    reshape(m, DOWN + ".weight_packed", [HIDDEN, INNER // 2 - 4], m.tensors[DOWN + ".weight_packed"][2][:HIDDEN * (INNER // 2 - 4)])


@damage("scale-dtype", "mo")
def _(m): reshape(m, O + ".weight_scale", [HIDDEN, HIDDEN // 16], dtype="U8")


@damage("scale-flat", "ct")
def _(m): reshape(m, O + ".weight_scale", [HIDDEN * HIDDEN // 16])


def padded(model, name, fill):
    dtype, (n, b), data = model.tensors[name]
    rows = n + 128 - n % 128
    model.tensors[name] = (dtype, [rows, b], data + bytes([fill]) * ((rows - n) * b))


def narrow(model):
    """A weight whose rows are no multiple of 128."""
    for end, width in ((".weight_packed", HIDDEN // 2), (".weight_scale", HIDDEN // 16)):
        dtype, _, data = model.tensors[O + end]
        model.tensors[O + end] = (dtype, [200, width], data[:200 * width])


@damage("scale-padded", "ct")
def _(m):
    narrow(m)
    padded(m, O + ".weight_scale", 0)


@damage("scale-padding", "ct")
def _(m):
    narrow(m)
    padded(m, O + ".weight_scale", 0xCD)


@damage("group-size", "ct")
def _(m): reshape(m, O + ".weight_scale", [HIDDEN, HIDDEN // 32], m.tensors[O + ".weight_scale"][2][::2])


@damage("scale-shape", "mo")
def _(m): reshape(m, O + ".weight_scale", [HIDDEN // 2, HIDDEN // 16], m.tensors[O + ".weight_scale"][2][::2])


@damage("scale-shape", "mo")
def _(m):
    # Of a member of a fused group, whose tensor scale cannot be made that of the others either.
    reshape(m, UP + ".weight_scale", [INNER // 2, HIDDEN // 16], m.tensors[UP + ".weight_scale"][2][::2])
    number(m, UP + ".weight_scale_2", 2 * get_number(m, UP + ".weight_scale_2"))


@damage("tensor-scale-shape", "ct")
def _(m): reshape(m, O + ".weight_global_scale", [2], m.tensors[O + ".weight_global_scale"][2] * 2)


@damage("companion-misnamed", "ct")
def _(m):
    dtype, shape, data = m.tensors.pop(O + ".weight_global_scale")
    m.tensors[O + ".weight_scale_2"] = (dtype, shape, data)


@damage("companion-misnamed", "mo")
def _(m): m.tensors[O + ".input_global_scale"] = m.tensors.pop(O + ".input_scale")


@damage("companion-stray", "ct")
def _(m): m.tensors["lm_head.weight_scale"] = ("F8_E4M3", [VOCAB, HIDDEN // 16], bytes([0x38]) * (VOCAB * HIDDEN // 16))


@damage("pre-quant-scale", "mo")
def _(m): m.tensors[O + ".pre_quant_scale"] = ("BF16", [HIDDEN], bf16_bytes([1.0] * HIDDEN))


@damage("name-wrapped", "ct")
def _(m): m.tensors["_orig_mod.model.norm.weight"] = m.tensors.pop("model.norm.weight")


for value in (math.inf, math.nan):
    @damage("tensor-scale-not-finite", "ct")
    def _(m, value=value): number(m, Q + ".weight_global_scale", value)

    @damage("input-scale-not-finite", "ct4", repaired=True)
    def _(m, value=value): number(m, Q + ".input_global_scale", value)

for value in (0.0, -1.0):
    @damage("tensor-scale-not-positive", "mo")
    def _(m, value=value): number(m, Q + ".weight_scale_2", value)

    @damage("input-scale-not-positive", "mo", repaired=True)
    def _(m, value=value): number(m, O + ".input_scale", value)


@damage("scale-nan", "ct")
def _(m): edit(m, O + ".weight_scale", lambda b: b[:5] + b"\x7f" + b[6:])


@damage("scale-all-nan", "mo", repaired="alone")
def _(m):
    edit(m, V + ".weight", lambda b: bytes(len(b)))
    edit(m, V + ".weight_scale", lambda b: b"\x7f" * len(b))
    number(m, V + ".weight_scale_2", 0.0)


@damage("scale-negative", "ct")
def _(m): edit(m, O + ".weight_scale", lambda b: b[:7] + bytes([b[7] | 0x80]) + b[8:])


@damage("scale-zero", "ct")
def _(m): edit(m, O + ".weight_scale", lambda b: b[:7] + b"\0" + b[8:])


@damage("scale-subnormal", "mo")
def _(m): edit(m, O + ".weight_scale", lambda b: bytes(5 if i % 16 == 3 else c for i, c in enumerate(b)))


@damage("scale-subnormal-few", "ct")
def _(m): edit(m, O + ".weight_scale", lambda b: b"\x07" + b[1:])


@damage("scale-range", "ct")
def _(m):
    # The same numbers with a level 2^6 times as large, as far as E4M3 can hold them.
    edit(m, O + ".weight_scale", lambda b: bytes(max(8, c - 48) for c in b))
    number(m, O + ".weight_global_scale", get_number(m, O + ".weight_global_scale") / 64)


@damage("tensor-scale-inverted", "ct", repaired=True)
def _(m): number(m, O + ".weight_global_scale", 1 / get_number(m, O + ".weight_global_scale"))


@damage("tensor-scale-inverted", "mo", repaired=True)
def _(m):
    for name in (Q, K, V):
        number(m, name + ".weight_scale_2", 1 / get_number(m, name + ".weight_scale_2"))


@damage("input-scale-inverted", "ct4", repaired=True)
def _(m): number(m, O + ".input_global_scale", .01)


@damage("input-scale-inverted", "ct4", repaired=True)
def _(m): number(m, O + ".input_global_scale", 1e-43)  # which has no inverse


@damage("fused-scales-differ", "ct", repaired=True)
def _(m):
    # As a quantizer does that does not know the group: the smaller one's scales reach higher.
    edit(m, K + ".weight_scale", lambda b: bytes(min(c + 8, 0x7E) for c in b))
    number(m, K + ".weight_global_scale", 2 * get_number(m, K + ".weight_global_scale"))


@damage("fused-scales-differ", "mo", repaired=True)
def _(m):
    edit(m, UP + ".weight_scale", lambda b: bytes(e4m3(E4M3[c] / 1.25) for c in b))
    number(m, UP + ".weight_scale_2", 1.25 * get_number(m, UP + ".weight_scale_2"))


@damage("tensor-scale-wrong", "mo", against=True)
def _(m):
    for name in (UP, UP.replace("up", "gate")):
        number(m, name + ".weight_scale_2", 1.25 * get_number(m, name + ".weight_scale_2"))


@damage("fused-input-scales-differ", "ct4", repaired=True)
def _(m):
    number(m, K + ".input_global_scale", 100)
    number(m, V + ".input_global_scale", 200)


@damage("fused-partly", "ct")
def _(m):
    for end in (".weight_packed", ".weight_scale", ".weight_global_scale"):
        del m.tensors[V + end]
    m.tensors[V + ".weight"] = ("BF16", [KV, HIDDEN], bytes(2 * KV * HIDDEN))
    m.config["quantization_config"]["ignore"].append(V)


@damage("config-absent", "ct")
def _(m): m.config = None


@damage("config-missing", "ct", repaired=True)
def _(m): del m.config["quantization_config"]


@damage("config-method", "ct", repaired=True)
def _(m): m.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(KEPT)}


@damage("config-format", "ct", repaired=True)
def _(m): m.config["quantization_config"]["format"] = "pack-quantized"


@damage("config-status", "ct", repaired=True)
def _(m): m.config["quantization_config"]["quantization_status"] = "frozen"


@damage("config-scheme", "ct", repaired=True)
def _(m): m.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32


@damage("config-scheme", "mo", repaired=True)
def _(m): m.config["quantization_config"]["quant_algo"] = m.hf["quantization"]["quant_algo"] = "FP8"


@damage("config-dtype-keys", "ct4", repaired=True)
def _(m): m.config["quantization_config"]["config_groups"]["group_0"]["weights"]["scale_dtype"] = "torch.float8_e4m3fn"


@damage("config-pattern", "ct", repaired=True)
def _(m): m.config["quantization_config"]["ignore"].append("re:(")


@damage("config-pattern", "ct", repaired=True)
def _(m): m.config["quantization_config"]["ignore"].append("re:(([a-z._0-9]+)+)+[!?]")  # would take centuries


@damage("config-glob", "ct", repaired=True)
def _(m): m.config["quantization_config"]["ignore"].append("*vision*")


@damage("config-ignored", "ct", repaired=True)
def _(m): m.config["quantization_config"]["ignore"].append("re:.*layers\\.0\\.self_attn\\.o_proj")


@damage("config-ignored", "mo", repaired=True)
def _(m):
    m.config["quantization_config"]["ignore"].append("*.0.self_attn.o_proj")
    m.hf["quantization"]["exclude_modules"].append("*.0.self_attn.o_proj")


@damage("config-not-ignored", "ct", repaired=True)
def _(m): m.config["quantization_config"]["ignore"].remove("model.layers.2.mlp.gate")


@damage("config-not-ignored", "ct", repaired=True)
def _(m):
    m.config["quantization_config"]["ignore"] = ["model.layers.2.mlp.gate"]
    m.config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*proj", "re:lm_head"]


@damage("config-too-wide", "mo", repaired=True)
def _(m):
    for entries in (m.config["quantization_config"]["ignore"], m.hf["quantization"]["exclude_modules"]):
        entries[entries.index("model.layers.2.mlp.gate")] = "mlp.gate"


@damage("config-listed", "mixed", repaired=True)
def _(m):
    for layers in (m.config["quantization_config"]["quantized_layers"], m.hf["quantization"]["quantized_layers"]):
        layers["lm_head"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}


@damage("config-unlisted", "mixed", repaired=True)
def _(m):
    m.config["quantization_config"]["quantized_layers"].pop(O)
    m.hf["quantization"]["quantized_layers"].pop(O, None)


def said(m, name, algorithm):
    """What both files of ModelOpt say of a module."""
    for layers in (m.config["quantization_config"]["quantized_layers"], m.hf["quantization"]["quantized_layers"]):
        layers.pop(name, None)
        if algorithm:
            layers[name] = {"quant_algo": algorithm}


def group(m, number):
    return m.config["quantization_config"]["config_groups"][f"group_{number}"]


@damage("fp8-scale-missing", "ct8")
def _(m): del m.tensors[DOWN + ".weight_scale"]


@damage("fp8-scale-missing", "mo8")
def _(m): del m.tensors[Q + ".weight_scale"]


@damage("codes-missing", "ct8")
def _(m): del m.tensors[DOWN + ".weight"]


@damage("fp8-scale-dtype", "ct8")
def _(m): reshape(m, DOWN + ".weight_scale", [HIDDEN, 2], dtype="U8")


@damage("fp8-scale-shape", "mo8")
def _(m): reshape(m, DOWN + ".weight_scale", [HIDDEN // 2], m.tensors[DOWN + ".weight_scale"][2][:2 * HIDDEN])


@damage("fp8-scale-shape", "ct8")
def _(m): reshape(m, DOWN + ".weight_scale", [1, HIDDEN])


@damage("fp8-scale-value", "ct8")
def _(m): edit(m, DOWN + ".weight_scale", lambda b: b[:6] + b"\xc0\x7f" + b[8:])  # NaN


@damage("fp8-scale-value", "mo8")
def _(m): edit(m, DOWN + ".weight_scale", lambda b: b[:8] + bytes(4) + b[12:])


@damage("fp8-scale-value", "mo8")
def _(m): edit(m, DOWN + ".weight_scale", lambda b: b[:11] + bytes([b[11] | 0x80]) + b[12:])


@damage("fp8-nan", "ct8")
def _(m): edit(m, DOWN + ".weight", lambda b: b[:77] + b"\xff" + b[78:])


@damage("fused-partly", "ct8")
def _(m):
    del m.tensors[V + ".weight_scale"]
    reshape(m, V + ".weight", m.tensors[V + ".weight"][1], bytes(2 * len(m.tensors[V + ".weight"][2])), "BF16")
    m.config["quantization_config"]["ignore"].append(V)


@damage("config-mixture", "ct8")
def _(m): group(m, 1)["targets"].remove(DOWN)


@damage("config-mixture", "ct8")
def _(m): group(m, 1)["targets"].append("re:.*o_proj")


@damage("config-mixture", "ct8")
def _(m): group(m, 1)["weights"]["num_bits"] = 4


@damage("config-mixture", "ct8")
def _(m): group(m, 1)["weights"]["strategy"] = "tensor"


@damage("config-mixture", "ct8")
def _(m): group(m, 1)["format"] = "pack-quantized"


@damage("config-mixture", "ct8")
def _(m): m.config["quantization_config"]["ignore"].append(DOWN)


@damage("config-mixture", "mo8")
def _(m): said(m, DOWN, None)


@damage("config-mixture", "mo8")
def _(m): said(m, DOWN, "FP8_PB_WO")


@damage("config-mixture", "mo8")
def _(m): said(m, "lm_head", "FP8")


@damage("config-mixture", "mo8")
def _(m):
    m.config["quantization_config"]["ignore"].append(O)
    m.hf["quantization"]["exclude_modules"].append(O)


@damage("config-listed", "mo8")
def _(m): said(m, DOWN, "W4A16_NVFP4")


@damage("config-unlisted", "mo8")
def _(m): said(m, O, "FP8_PER_CHANNEL_PER_TOKEN")


@damage("hf-config-missing", "mo", repaired=True)
def _(m): m.hf = None


@damage("hf-config-keys", "mo", repaired=True)
def _(m): del m.hf["quantization"]["kv_cache_quant_algo"]


@damage("hf-config-differs", "mo", repaired=True)
def _(m): m.hf["quantization"]["exclude_modules"].remove("lm_head")


def quantize_module(m, name, rows):
    del m.tensors[name + ".weight"]
    m.tensors[name + ".weight_packed"] = ("U8", [rows, HIDDEN // 2], b"\x27" * (rows * HIDDEN // 2))
    m.tensors[name + ".weight_scale"] = ("F8_E4M3", [rows, HIDDEN // 16], b"\x7e" * (rows * HIDDEN // 16))
    m.tensors[name + ".weight_global_scale"] = ("F32", [1], struct.pack("<f", 4096))
    m.config["quantization_config"]["ignore"].remove(name)


@damage("head-quantized", "ct")
def _(m): quantize_module(m, "lm_head", VOCAB)


@damage("head-tied", "ct")
def _(m):
    quantize_module(m, "lm_head", VOCAB)
    m.config["tie_word_embeddings"] = True


@damage("head-not-ignored", "ct", repaired="alone")
def _(m):
    del m.tensors["lm_head.weight"]
    m.config["tie_word_embeddings"] = True
    m.config["quantization_config"]["ignore"].remove("lm_head")


@damage("router-quantized", "ct")
def _(m): quantize_module(m, "model.layers.2.mlp.gate", EXPERTS)


@damage("embedding-quantized", "ct")
def _(m): quantize_module(m, "model.embed_tokens", VOCAB)


@damage("metadata-format", "ct", repaired=True)
def _(m): m.metadata = None


@damage("stale-shard", "ct", repaired=True)
def _(m): m.extra["model-00001-of-00003.safetensors"] = {"old.weight": ("BF16", [2, 16], bytes(64))}


@damage("unindexed-tensor", "ct", repaired=True)
def _(m): m.unindexed.add("model.norm.weight")


@damage("repeated-tensor", "ct", repaired=True)
def _(m): m.also["model.norm.weight"] = "model-00002-of-00002.safetensors"


@damage("open-orientation", "ct")
def _(m): m.tensors["model.layers.1.mlp.experts.gate_up_proj"] = ("BF16", [2, 96, 80], bytes(2 * 2 * 96 * 80))


def swap(data):
    return bytes((b << 4 | b >> 4) & 255 for b in data)


def swizzle(data, rows, cols):
    out = bytearray(len(data))
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * (cols // 4) + c // 4
            out[512 * tile + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = data[r * cols + c]
    return bytes(out)


@damage("nibbles-swapped", "ct", against=True)
def _(m): edit(m, O + ".weight_packed", swap)


@damage("maybe-swapped", "ct")
def _(m): edit(m, UP + ".weight_packed", swap)


@damage("scales-swizzled", "mo", against=True)
def _(m): edit(m, O + ".weight_scale", lambda b: swizzle(b, HIDDEN, HIDDEN // 16))


@damage("maybe-swizzled", "mo")
def _(m): edit(m, O + ".weight_scale", lambda b: swizzle(b, HIDDEN, HIDDEN // 16))


@damage("tensor-scale-wrong", "ct", against=True)
def _(m): number(m, O + ".weight_global_scale", 3 * get_number(m, O + ".weight_global_scale"))


@damage("differs-from-original", "ct", against=True)
def _(m):
    for end in (".weight_packed", ".weight_scale", ".weight_global_scale"):
        m.tensors[O + end] = m.tensors["model.layers.1.self_attn.o_proj" + end]


@damage("kept-differs", "ct", against=True)
def _(m): edit(m, "lm_head.weight", lambda b: b[2:] + b[:2])


@damage("weight-absent", "ct", against=True)
def _(m): del m.tensors["lm_head.weight"]


@damage("weight-shape", "ct", against=True)
def _(m): reshape(m, "lm_head.weight", [VOCAB // 2, HIDDEN], m.tensors["lm_head.weight"][2][:VOCAB * HIDDEN])


@damage("unreadable", "ct")
def _(m): m.tensors[O + ".weight"] = ("BF16", [HIDDEN, HIDDEN], bytes(2 * HIDDEN * HIDDEN))


# ---- Running ---------------------------------------------------------------------------------------------


def run(*arguments):
    done = subprocess.run([NIB, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def findings(folder, *arguments):
    """(exit status, kinds with their severities, the findings)."""
    status, out, error = run("check", "--json", folder, *arguments)
    if status == 2:
        return status, error, []
    report = json.loads(out)
    return status, sorted({f["id"] for f in report["findings"]}), report["findings"]


def read_safetensors(folder):
    """Every tensor of a folder: name -> (dtype, shape, bytes)."""
    out = {}
    for file in sorted(os.listdir(folder)):
        if not file.endswith(".safetensors"):
            continue
        with open(os.path.join(folder, file), "rb") as handle:
            data = handle.read()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                out[name] = (entry["dtype"], entry["shape"], data[start + begin:start + end])
    return out


def compare(original, folder):
    """Statistics of three weights of a compressed-tensors checkpoint, element by element."""
    a, b = read_safetensors(original), read_safetensors(folder)
    out = {}
    for name in (O, K, UP):
        words = struct.unpack(f"<{len(a[name + '.weight'][2]) // 2}H", a[name + ".weight"][2])
        x = struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *[w << 16 for w in words]))
        codes, scales = b[name + ".weight_packed"][2], b[name + ".weight_scale"][2]
        divisor = struct.unpack("<f", b[name + ".weight_global_scale"][2])[0]
        signal = noise = zeroed = clipped = worst = 0
        for i, value in enumerate(x):
            code = codes[i // 2] >> 4 * (i % 2) & 15
            factor = E4M3[scales[i // 16]] / divisor
            y = E2M1[code & 7] * factor * (-1 if code & 8 else 1)
            signal += value * value
            noise += (y - value) ** 2
            worst = max(worst, abs(y - value))
            zeroed += y == 0 and value != 0
            clipped += abs(value) > 6 * factor
        out[name] = {"sqnr_db": 10 * math.log10(signal / noise), "relative_l2": math.sqrt(noise / signal),
                     "max_error": worst, "amax": max(map(abs, x)), "zeroed": zeroed, "clipped": clipped,
                     "underflowed_blocks": sum(s < 8 for s in scales)}
    print(json.dumps(out))


def run_mode():
    if sys.argv[1] == "--compare":
        compare(sys.argv[2], sys.argv[3])
        return
    models = make_models()
    if sys.argv[1] == "--make":
        for form, model in models.items():
            model.write(os.path.join(sys.argv[2], form))
        return
    _, form, _, _, change = next(d for d in DAMAGES if d[0] == sys.argv[2])
    change(models[form])
    models[form].write(sys.argv[3])


# Names within a GGUF file that become others of the same length.
GGUF_DAMAGES = [("gguf-key-missing", b"qwen3moe.context_length", b"qwen3moe.kontext_length"),
                ("gguf-key-missing", b"general.architecture", b"general.brchitecture"),
                ("gguf-key-missing", b"qwen3moe.expert_count", b"qwen3moe.exqert_count"),
                ("gguf-key-missing", b"qwen3moe.expert_feed_forward_length", b"qwen3moe.exqert_feed_forward_length"),
                ("gguf-tensor-missing", b"output_norm.weight", b"output_morn.weight"),
                ("gguf-tensor-missing", b"blk.1.attn_norm.weight", b"blk.1.attn_morn.weight"),
                ("gguf-tensor-missing", b"blk.1.attn_v.", b"blk.1.attn_u."),  # and there is no attn_qkv either
                ("gguf-tokenizer", b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"),
                ("gguf-tokenizer", b"tokenizer.ggml.model", b"tokenizer.ggml.nodel"),
                ("gguf-scale-ignored", b"qwen3moe", b"qwen2moe")]


def damage_gguf(original, seen):
    """What nib writes has no findings; each damage gives its own and no other."""
    good, bad = os.path.join(WORK, "good.gguf"), os.path.join(WORK, "bad.gguf")
    status, text, error = run("quantize", "-q", "-f", original, good)
    check(status == 0, f"a GGUF file: exit {status} {text} {error}")
    with open(good, "rb") as file:
        content = file.read()
    for arguments in [[], ["--against", original]]:
        status, kinds, found = findings(good, *arguments)
        check(status == 0 and kinds == [], f"GGUF undamaged {arguments}: exit {status}, {kinds} {found[:2]}")
    for finding, before, after in GGUF_DAMAGES:
        check(before in content and len(before) == len(after), f"{before} is in the file")
        with open(bad, "wb") as file:
            file.write(content.replace(before, after))
        status, kinds, found = findings(bad)
        seen.add(finding)
        check(status == 1 and kinds == [finding], f"{finding} by {after}: exit {status}, {kinds} {found[:3]}")


def main():
    if sys.argv[1] in MODES:
        return run_mode()
    models = make_models()
    original = os.path.join(WORK, "original")
    models["original"].write(original)
    for form, model in models.items():
        folder = os.path.join(WORK, form)
        model.write(folder)
        for arguments in [[], ["--against", original]]:
            status, kinds, found = findings(folder, *arguments)
            check(status == 0 and kinds == [], f"{form} undamaged {arguments}: exit {status}, {kinds} {found[:2]}")

    seen = set()
    for finding, form, against, repaired, change in DAMAGES:
        model = copy.deepcopy(models[form])
        change(model)
        folder = os.path.join(WORK, "damaged")
        model.write(folder)
        status, kinds, found = findings(folder, *(["--against", original] if against else []))
        seen.add(finding)
        hint = found and found[0]["severity"] == "hint"
        check(kinds == [finding] and status == (0 if hint else 1), f"{finding} in {form}: exit {status}, {kinds} {found[:3]}")
        check(finding not in TOLD_ONCE or len(found) == 1, f"{finding} is told {len(found)} times")
        if kinds != [finding]:
            continue
        check(found[0]["repairable"] == bool(repaired), f"{finding} in {form}: repairable is {found[0]['repairable']}")
        check(all(f[key] for f in found for key in ("tensor", "fact", "consequence", "remedy")), f"{finding}: words")
        if repaired and "--no-repair" not in sys.argv:
            out = os.path.join(WORK, "repaired")
            shutil.rmtree(out, ignore_errors=True)
            status, text, error = run("repair", folder, out)
            check(status == 0, f"repair {finding} in {form}: exit {status} {text} {error}")
            if status == 0:
                status, kinds, found = findings(out, *([] if repaired == "alone" else ["--against", original]))
                check(kinds == [], f"{finding} in {form}, repaired: {kinds} {found[:3]}")
    damage_gguf(original, seen)
    with open(os.path.join(os.path.dirname(__file__), "../../checkpoint/check/check_table.c"), encoding="utf-8") as file:
        source = file.read()
    known = {line.split('"')[1] for line in source.split("[NIB_FAULT_")[1:]}
    with open(os.path.join(os.path.dirname(__file__), "../../docs/check.md"), encoding="utf-8") as file:
        told = {line.split("`")[1] for line in file if line.startswith("| `")}
    check(known == told, f"docs/check.md and the table differ: {sorted(known ^ told)}")
    check(known == seen, f"findings without a test: {sorted(known - seen)}")
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

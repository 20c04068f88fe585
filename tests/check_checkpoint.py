#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints through the tool, judged by the packages that read and write them, and by NumPy.

    check_checkpoint.py LIBNIB NIB [PART]...     parts are the functions below; all of them without any
"""
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
import zlib

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TQDM_DISABLE"] = "1"

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check_dialects import KINDS, ONLY

warnings.filterwarnings("ignore")

SEED = 20261115
TOOL = os.path.abspath(sys.argv[2])
MAKE = os.path.join(os.path.dirname(TOOL), "examples/make_checkpoint")
E2M1 = numpy.array([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6], dtype=numpy.float32)
FUSED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
         ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")]
counts = {"passed": 0, "failed": 0, "skipped": 0}
work = None


class Failed(Exception):
    pass


def check(what, holds, detail=""):
    counts["passed" if holds else "failed"] += 1
    if not holds:
        print(f"FAILED {what}" + (f": {detail}" if detail != "" else ""), flush=True)
    return holds


def nib(*arguments, fails=False):
    """Run the tool; its output. An exit status that was not expected ends the part."""
    done = subprocess.run([TOOL, *arguments],
                          stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL)
    output = done.stdout.decode(errors="replace")
    if (done.returncode != 0) != fails or done.returncode < 0:
        raise Failed(f"nib {' '.join(arguments)}: exit {done.returncode}\n{output}")
    return output


def place(name):
    path = os.path.join(work, name)
    shutil.rmtree(path, ignore_errors=True)
    return path


def make(name, *options):
    path = place(name)
    done = subprocess.run([MAKE, *options, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Failed(f"make_checkpoint {' '.join(options)}: {done.stdout.decode()}")
    return path


def save(name, tensors, config):
    """A checkpoint of one file."""
    path = place(name)
    os.makedirs(path)
    save_file({
        n: t.contiguous()
        for n, t in tensors.items()
    }, os.path.join(path, "model.safetensors"), {"format": "pt"})
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    return path


def read_json(path, name):
    with open(os.path.join(path, name), encoding="utf-8") as file:
        return json.load(file)


def load(path):
    """All tensors of a folder or file by safetensors; an index must say what is true."""
    if os.path.isfile(path):
        names = {os.path.basename(path): path}
    else:
        names = {n: os.path.join(path, n) for n in sorted(os.listdir(path)) if n.endswith(".safetensors")}
    tensors, where = {}, {}
    for name, file in names.items():
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}).get("format") != "pt":
                raise Failed(f"{file}: no format in its metadata")
            for key in opened.keys():
                if key in tensors:
                    raise Failed(f"{path}: {key} is in two files")
                tensors[key], where[key] = opened.get_tensor(key), name
    if not tensors:
        raise Failed(f"{path}: nothing in it")
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.isdir(path) and (os.path.exists(index) or len(names) > 1):
        index = read_json(path, "model.safetensors.index.json")
        if index["weight_map"] != where:
            raise Failed(f"{path}: the index is not what the files hold")
        if index["metadata"]["total_size"] != sum(t.numel() * t.element_size() for t in tensors.values()):
            raise Failed(f"{path}: total_size is wrong")
    return tensors


def same(a, b):
    """Equal numbers, whatever the sign of a zero."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def same_bytes(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and bool(
        torch.equal(a.reshape(-1).view(torch.uint8),
                    b.reshape(-1).view(torch.uint8)))


def modules(tensors, suffix):
    return sorted(n[:-len(suffix)] for n in tensors if n.endswith(suffix))


def decode(packed, scale, decode_scale):
    """Codes and scales to numbers, by NumPy alone: code * (scale * decode_scale)."""
    packed, scale = packed.numpy(), scale.float().numpy()
    codes = numpy.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    factors = (scale * numpy.float32(decode_scale)).astype(numpy.float32)
    return torch.from_numpy(E2M1[codes] * numpy.repeat(factors, 16, axis=-1))


def noise(a, b):
    """Error of b in decibels below a."""
    a, b = a.double(), b.double()
    return 10 * torch.log10((a * a).sum() / ((a - b)**2).sum()).item()


def dequantize(path, dtype="f32"):
    out = place("dequantized")
    if path.endswith(".safetensors"):
        out += ".safetensors"
    nib("dequantize", path, out, "--dtype", dtype, "--force")
    return out


def dequantized(path, dtype="f32"):
    return load(dequantize(path, dtype))


# ---- compressed-tensors ----------------------------------------------------------------------------------

VARIANTS = {
    "default": [],
    "exact": ["--tensor-scale", "exact"],
    "rtn": ["--scale", "rtn"],
    "4over6": ["--scale", "4over6"],
    "nvfp4": ["--scheme", "nvfp4"],
    "no-floor": ["--min-block-scale", "0"]
}


def compressed_tensors():
    """What compressed-tensors makes of our output is what we make of it; it takes our configuration."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
    from compressed_tensors.utils.match import match_name

    source = make("ct-in", "--family", "demo", "--layers", "3", "--shards", "2")
    plain = load(source)
    for variant, options in VARIANTS.items():
        out = place("ct-out")
        nib("quantize", source, out, *options)
        tensors, decoded, halves = load(out), dequantized(out), dequantized(out, "bf16")
        config = read_json(out, "config.json")["quantization_config"]
        config.pop("version", None)
        parsed = QuantizationConfig.model_validate(config)
        scheme, = parsed.config_groups.values()
        check(
            f"{variant}: status and format", parsed.quantization_status == QuantizationStatus.COMPRESSED
            and parsed.format == "nvfp4-pack-quantized" and scheme.targets == ["Linear"])
        check(f"{variant}: activations", (scheme.input_activations is not None) == (variant == "nvfp4"))
        quantized = modules(tensors, ".weight_packed")
        check(f"{variant}: something is quantized", len(quantized) == 3 * 4 + 2 * 3 + 4 * 3, len(quantized))
        wrong = []
        for module in quantized:
            parts = {k: tensors[f"{module}.{k}"] for k in ("weight_packed", "weight_scale", "weight_global_scale")}
            theirs = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
            ours = decoded[f"{module}.weight"]
            if not same(theirs, ours.to(theirs.dtype)) or not same(theirs, halves[f"{module}.weight"].to(theirs.dtype)):
                wrong.append(module)
            if variant != "exact" and variant != "4over6" and not same(
                    ours, decode(parts["weight_packed"], parts["weight_scale"],
                                 1 / parts["weight_global_scale"].item())):
                wrong.append(module + " (NumPy)")
            if noise(plain[f"{module}.weight"], ours) < 18:
                wrong.append(module + " (noise)")
            if ("input_global_scale"
                    in [n.rpartition(".")[2] for n in tensors if n.startswith(module + ".")]) != (variant == "nvfp4"):
                wrong.append(module + " (input scale)")
        check(f"{variant}: {len(quantized)} weights decompressed", not wrong, wrong[:4])
        ignored = lambda module: any(match_name(module, pattern) for pattern in parsed.ignore)
        check(f"{variant}: no quantized module is ignored", not [m for m in quantized if ignored(m)])
        linears = [
            n[:-len(".weight")] for n, t in tensors.items()
            if n.endswith(".weight") and t.ndim == 2 and "embed" not in n
        ]
        check(f"{variant}: every other linear layer is", linears and all(ignored(m) for m in linears), linears)
        wrong = [
            m for m in quantized for group in FUSED for a in group[:1] for b in group[1:] if m.endswith("." + a)
            and not same_bytes(tensors[f"{m}.weight_global_scale"], tensors[f"{m[:-len(a)]}{b}.weight_global_scale"])
        ]
        check(f"{variant}: fused weights share their scale", not wrong, wrong)
        wrong = [
            n for n, t in plain.items()
            if n[:-len(".weight")] not in quantized and not same_bytes(t, tensors.get(n, torch.empty(0)))
        ]
        check(f"{variant}: the others are copied", not wrong, wrong)
        wrong = [
            n for n in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
            if open(f"{source}/{n}", "rb").read() != open(f"{out}/{n}", "rb").read()
        ]
        check(f"{variant}: and other files", not wrong, wrong)
        scales = torch.cat([tensors[f"{m}.weight_scale"].view(torch.uint8).flatten() for m in quantized])
        check(f"{variant}: scales are in range",
              bool(((scales <= 0x7E) & (scales >= (0x08 if variant != "no-floor" else 0))).all()))


def repeatable():
    """The same input gives the same bytes, whatever the threads and the memory."""
    source = make("again-in", "--family", "demo", "--shards", "3")
    first = place("again-1")
    nib("quantize", source, first, "-t", "1")
    for options in (["-t", "2"], ["-t", "3", "--max-memory", "1M"]):
        second = place("again-2")
        nib("quantize", source, second, *options)
        done = subprocess.run(["diff", "-r", first, second], stdout=subprocess.PIPE)
        check(f"the same bytes with {' '.join(options)}", done.returncode == 0, done.stdout.decode())


# ---- ModelOpt --------------------------------------------------------------------------------------------


def modelopt_decode(packed, scale, double_scale):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    shape = torch.Size([*packed.shape[:-1], packed.shape[-1] * 2])
    return NVFP4QTensor(shape, torch.float32, packed).dequantize(dtype=torch.float32,
                                                                 scale=scale,
                                                                 double_scale=double_scale,
                                                                 block_sizes={-1: 16})


def modelopt():
    """ModelOpt decodes our output to the numbers that we decode."""
    source = make("mo-in", "--family", "demo", "--layers", "3", "--shards", "2")
    for scheme in ("nvfp4a16", "nvfp4"):
        for exact in ("exact", "pow2"):
            out = place("mo-out")
            nib("quantize", source, out, "--format", "modelopt", "--scheme", scheme, "--tensor-scale", exact)
            tensors, decoded = load(out), dequantized(out)
            quantized = modules(tensors, ".weight_scale_2")
            wrong = [
                m for m in quantized if not same(
                    modelopt_decode(tensors[f"{m}.weight"], tensors[f"{m}.weight_scale"],
                                    tensors[f"{m}.weight_scale_2"]), decoded[f"{m}.weight"])
            ]
            check(f"modelopt {scheme} {exact}: {len(quantized)} weights", len(quantized) == 30 and not wrong, wrong[:4])
            config, other = read_json(out, "config.json")["quantization_config"], read_json(
                out, "hf_quant_config.json")["quantization"]
            check(
                f"modelopt {scheme}: both configurations", config["quant_method"] == "modelopt"
                and config["quant_algo"] == other["quant_algo"]
                and {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= set(other),
                (config.get("quant_algo"), other))
            check(f"modelopt {scheme}: what is left out",
                  sorted(config["ignore"]) == sorted(other["exclude_modules"]) and "lm_head" in config["ignore"])
            if scheme == "nvfp4a16":
                layers = {m: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for m in quantized}
                check(
                    "modelopt nvfp4a16: the portable form", config["quant_algo"] == "MIXED_PRECISION"
                    and "kv_cache_quant_algo" in config and config["quantized_layers"] == layers
                    and other["quantized_layers"] == layers)
            else:
                check(
                    "modelopt nvfp4: uniform", config["quant_algo"] == "NVFP4"
                    and config["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4)
                check("modelopt nvfp4: input scales", all(tensors[f"{m}.input_scale"].item() == 1 for m in quantized))


def exported():
    """Folders that ModelOpt and transformers write are in order, are what we write by their rules, and convert."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig
    source, theirs, ours = make("ex-in", "--hidden", "128", "--intermediate", "256", "--vocab", "256", "--shards",
                                "2"), place("ex-theirs"), place("ex-ours")
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(SEED))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, forward_loop=lambda m: m(tokens))
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=theirs)
    check("ModelOpt's export: no finding", "no findings" in nib("check", theirs, "--against", source))
    nib("quantize", source, ours, "--dialect", "modelopt", "--format", "modelopt", "--scheme", "nvfp4")
    a, b = load_any(theirs), load(ours)
    check("ModelOpt's export: the same names", sorted(a) == sorted(b), sorted(set(a) ^ set(b))[:4])
    wrong = [
        n for n in a if n in b and not n.endswith("input_scale") and not same_bytes(a[n], b[n].reshape(a[n].shape))
    ]
    check("ModelOpt's export: the same bytes", not wrong, wrong[:4])
    a, b = (read_json(path, "config.json")["quantization_config"] for path in (theirs, ours))
    wrong = [key for key in a if key not in ("producer", "ignore") and a[key] != b.get(key)]
    check("ModelOpt's export: the configuration", not wrong
          and set(a["ignore"]) <= set(b["ignore"]) | {"model.embed_tokens"}, (wrong, a, b))
    converted, back = place("ex-ct"), dequantized(theirs, "bf16")
    nib("convert", theirs, converted, "--format", "compressed-tensors")
    check("ModelOpt's export, converted: no finding", "no findings" in nib("check", converted, "--against", source))
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(converted,
                                                      quantization_config=CompressedTensorsConfig(dequantize=True),
                                                      dtype=torch.bfloat16)
        weights = dict(loaded.named_parameters())
        wrong = [
            n for n, t in back.items() if not torch.allclose(weights[n].data.float(), t.float(), rtol=2**-8, atol=0)
        ]
        check("ModelOpt's export, converted: transformers loads it", not wrong and len(back) == 21,
              (wrong[:4], len(back)))

    out, again = place("ex-out"), place("ex-again")
    nib("quantize", source, out)
    with torch.no_grad():
        AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).save_pretrained(again)
    a, b = load_any(again), load(out)
    wrong = [n for n in b if n not in a or not same_bytes(a[n].reshape(b[n].shape), b[n])]
    check("transformers saves what it loaded", not wrong and len(a) == len(b), (wrong[:4], sorted(set(a) ^ set(b))[:4]))
    check("what transformers saves: no finding", "no findings" in nib("check", again, "--against", source))


def load_any(path):
    """Somebody else's folder or file, without looking at its metadata."""
    tensors = {}
    folder, names = (path, sorted(os.listdir(path))) if os.path.isdir(path) else os.path.split(path)
    for name in [names] if isinstance(names, str) else names:
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(folder, name), framework="pt") as opened:
                tensors |= {key: opened.get_tensor(key) for key in opened.keys()}
    return tensors


# ---- GGUF ------------------------------------------------------------------------------------------------


def gguf_tensors(path):
    import gguf
    out = {}
    for t in gguf.GGUFReader(path).tensors:
        out[t.name] = (t.tensor_type.name,
                       torch.from_numpy(numpy.array(gguf.quants.dequantize(t.data, t.tensor_type),
                                                    dtype=numpy.float32)))
    return out


def gguf_name(name, layers):
    """What gguf-py calls a tensor of a Qwen3-MoE-shaped model; an expert keeps its number behind the name of its stack."""
    import gguf
    module, part = name.rsplit(".", 1)
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", module)
    ours = f"{expert[1]}.{expert[3]}" if expert else module
    theirs = next(filter(None, (gguf.get_tensor_name_map(arch, layers).get_name(ours)  # and of its dense layers
                                for arch in (gguf.MODEL_ARCH.QWEN3MOE, gguf.MODEL_ARCH.QWEN3))))
    return f"{theirs}.{expert[2]}.{part}" if expert else f"{theirs}.{part}"


def of_stack(name, tensors):
    """A tensor, or the expert NAME_exps.N.PART of the stack NAME_exps.PART."""
    expert = re.fullmatch(r"(.*_exps)\.(\d+)\.(\w+)", name)
    return tensors[f"{expert[1]}.{expert[3]}"][int(expert[2])] if expert and name not in tensors else tensors[name]


def gguf():
    """gguf decodes our blocks; times .scale they are what we decode; names are gguf's."""
    source = make("gg-in", "--family", "demo", "--layers", "3", "--shards", "2")
    plain = {gguf_name(name, 3): t for name, t in load(source).items()}
    for exact in ("pow2", "exact"):
        out = place("gg-out") + ".gguf"
        nib("quantize", source, out, "--format", "gguf", "--tensor-scale", exact, "--force")
        tensors, decoded = gguf_tensors(out), dequantized(out)
        values = {name: t for name, (_, t) in tensors.items()}
        quantized = sorted(n for n in plain if tensors[re.sub(r"_exps\.\d+\.", "_exps.", n)][0] == "NVFP4")
        wrong = []
        for name in quantized:
            scale = of_stack(name[:-len(".weight")] + ".scale", values)
            theirs, ours = of_stack(name, values) * scale, of_stack(name, decoded)
            close = same(theirs, ours) if exact == "pow2" else torch.allclose(theirs, ours, rtol=2e-7, atol=0)
            if not close or scale.numel() != 1 or noise(plain[name], ours) < 18:
                wrong.append(name)
        check(f"gguf {exact}: {len(quantized)} weights", len(quantized) == 30 and not wrong, wrong[:4])
        wrong = [
            n for n, t in plain.items() if n not in quantized and not same(values[n].reshape(t.shape), t.float())
        ]
        check(f"gguf {exact}: the others", not wrong, wrong)


# ---- transformers ----------------------------------------------------------------------------------------


def transformers():
    """A tiny Llama that transformers loads from our output gives the logits of one with our decoded weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import CompressedTensorsConfig
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(SEED))
    for tied in ([], ["--tied"]):
        for scheme in ("nvfp4a16", "nvfp4"):
            source, out, back = make("tf-in", "--hidden", "128", "--intermediate", "256", "--vocab", "256", "--shards",
                                     "2", *tied), place("tf-out"), place("tf-back")
            nib("quantize", source, out, "--scheme", scheme, "--for", "transformers") if scheme == "nvfp4a16" else \
                nib("quantize", source, out, "--scheme", scheme)
            nib("dequantize", out, back, "--dtype", "bf16")
            what = f"transformers, {scheme}{', tied' if tied else ''}"
            with torch.no_grad():
                theirs = AutoModelForCausalLM.from_pretrained(
                    out, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.bfloat16)
                original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
                before = original(tokens).logits
                replaced = load(back)
                missing = original.load_state_dict(replaced, strict=not tied)
                ours = original(tokens).logits
                again = AutoModelForCausalLM.from_pretrained(back, dtype=torch.bfloat16)(tokens).logits
                weights = {n: p for n, p in theirs.named_parameters() if p.dtype == torch.bfloat16}
                wrong = [n for n, t in replaced.items() if n in weights and not same(weights[n].data, t)]
                check(f"{what}: weights", not wrong and len(weights) >= 14, (wrong[:4], len(weights), missing))
                if scheme == "nvfp4a16":  # otherwise it quantizes activations too
                    check(f"{what}: logits", bool(torch.equal(theirs(tokens).logits, ours)))
                check(f"{what}: logits of the dequantized folder", bool(torch.equal(again, ours)))
                check(f"{what}: quantization changes them a little", 2 < noise(before, ours) < 40, noise(before, ours))
            check(f"{what}: the tokenizer", AutoTokenizer.from_pretrained(out)("<s>").input_ids == [1])


# ---- The same bytes as the packages ----------------------------------------------------------------------

SHAPES = {
    "q_proj": (64, 128),
    "k_proj": (32, 128),
    "v_proj": (32, 128),
    "o_proj": (128, 64),
    "gate_proj": (80, 128),
    "up_proj": (80, 128),
    "down_proj": (128, 80)
}


def parity_weights(dtype):
    """A layer for every kind of data. In the last, members of a group are of different kinds."""
    short = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    kinds = [kind for kind in KINDS if short in ONLY.get(kind, (short, ))]
    tensors = {}
    for layer, kind in enumerate([*kinds, None]):
        for i, (name, shape) in enumerate(SHAPES.items()):
            which = kind or ("zero", "weights", "outliers", "zero", "sparse", "wide", "gaussian")[i]
            random = torch.Generator().manual_seed(SEED + zlib.crc32(f"{layer}.{name}.{short}".encode()))
            part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            tensors[f"model.layers.{layer}.{part}.{name}.weight"] = KINDS[which](*shape, random).to(dtype)
    return tensors, {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": len(kinds) + 1,
        "hidden_size": 128,
        "intermediate_size": 80,
        "torch_dtype": str(dtype)[6:]
    }


def group_of(name, names):
    parent, _, last = name[:-len(".weight")].rpartition(".")
    for group in FUSED:
        if last in group:
            return [n for n in (f"{parent}.{g}.weight" for g in group) if n in names]
    return [name]


def dialects():
    """--dialect: every byte as the package writes it, tensor scales shared in groups."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])

    def by_compressed_tensors(w, group):
        amax, blocks = max(g.abs().amax() for g in group), w.unflatten(-1, (-1, 16)).abs().amax(-1)
        encode = generate_gparam(-amax, amax)
        scale, _ = calculate_qparams(-blocks, blocks, scheme.weights, encode)
        return NVFP4PackedCompressor.compress(
            {
                "weight": w,
                "weight_scale": scale,
                "weight_global_scale": encode.float().reshape(1)
            }, scheme)

    def by_modelopt(w, group):
        level = max(NVFP4QTensor.get_weights_scaling_factor_2(g) for g in group)
        tensor, scale, level = NVFP4QTensor.quantize(w.clone(), 16, None, level)
        return {"weight": tensor._quantized_data, "weight_scale": scale, "weight_scale_2": level}

    for dialect, theirs in (("compressed-tensors", by_compressed_tensors), ("modelopt", by_modelopt)):
        for dtype in (torch.bfloat16, torch.float32):
            weights, config = parity_weights(dtype)
            source, out = save("parity-in", weights, config), place("parity-out")
            nib("quantize", source, out, "--dialect", dialect, "--format", dialect)
            tensors = load(out)
            for name, w in weights.items():
                group = [weights[n] for n in group_of(name, weights)]
                module = name[:-len(".weight")]
                wrong = [
                    part for part, t in theirs(w, group).items()
                    if not same_bytes(t, tensors.get(f"{module}.{part}", torch.empty(0)))
                ]
                check(f"--dialect {dialect}, {str(dtype)[6:]}: {module}", not wrong, wrong)
    for options in (["--scale", "sweep"], ["--tensor-scale", "pow2"], ["--min-block-scale", "0.1"]):
        message = nib("quantize", source, place("parity-refused"), "--dialect", "modelopt", *options, fails=True)
        check(f"--dialect modelopt {' '.join(options)} is refused", "the dialect modelopt" in message
              and "scale" in message, message)


def zeros():
    """A tensor of zeros is zeros for every reader; only ModelOpt's dialect in its own form has the package's NaN."""
    weights = {
        f"model.layers.{layer}.{name}.weight": torch.zeros(32, 64, dtype=torch.bfloat16)
        for layer in range(2)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    source = save("zero-in", weights, {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "torch_dtype": "bfloat16"
    })
    for options in ([], ["--format", "modelopt"], ["--scale", "4over6"], ["--dialect", "compressed-tensors"],
                    ["--dialect", "modelopt"]):
        out = place("zero-out")
        nib("quantize", source, out, *options)
        tensors, decoded = load(out), dequantized(out)
        numbers = [t for n, t in tensors.items() if n.endswith(("_global_scale", "_scale_2"))]
        scales = [t.float() for n, t in tensors.items() if n.endswith("weight_scale")]
        what = f"zeros {' '.join(options)}"
        check(f"{what}: decoded", all(not t.any() for t in decoded.values()))
        check(
            f"{what}: scales",
            len(numbers) == 10 and all(bool(torch.isfinite(t).all()) and t.item() > 0 for t in numbers)
            and all(bool(torch.isfinite(t).all()) for t in scales))


# ---- Conversions -----------------------------------------------------------------------------------------


def conversions():
    """Round trips keep codes and scales, and tensor scales to the last bit where they are powers of two."""
    source = make("rt-in", "--family", "demo", "--layers", "2", "--shards", "2")
    plain = load(source)
    for exact in ("pow2", "exact"):
        first = place("rt-ct")
        nib("quantize", source, first, "--tensor-scale", exact)
        tensors = load(first)
        for middle in ("modelopt", "gguf", "torchao"):
            through, back = place("rt-middle") + (".gguf" if middle == "gguf" else ""), place("rt-back")
            nib("convert", first, through, "--format", middle, "--force")
            if middle == "gguf":
                back += ".safetensors"
            nib("convert", through, back, "--format", "compressed-tensors", "--force")
            again = load(back)
            what = f"compressed-tensors to {middle} and back, {exact}"
            if middle == "gguf":  # comes back under its own names, and what is not quantized may come back in FP32
                again = {n: again[gguf_name(n, 2)].to(tensors[n].dtype) for n in tensors if gguf_name(n, 2) in again}
            check(f"{what}: names", sorted(again) == sorted(tensors), sorted(set(again) ^ set(tensors))[:4])
            wrong = [
                n for n, t in tensors.items()
                if n in again and not n.endswith("_global_scale") and not same_bytes(t, again[n])
            ]
            check(f"{what}: bytes", not wrong, wrong[:4])
            wrong = [
                n for n, t in tensors.items() if n in again and n.endswith("_global_scale") and not (
                    same_bytes(t, again[n]) if exact == "pow2" else torch.allclose(t, again[n], rtol=2.5e-7, atol=0))
            ]
            check(f"{what}: tensor scales", not wrong, wrong[:4])
            middle_decoded, decoded = dequantized(through), dequantized(first)
            if middle == "gguf":
                middle_decoded = {n: of_stack(gguf_name(n, 2), middle_decoded) for n in decoded}
            wrong = [
                m for m in modules(tensors, ".weight_packed") for n in [m + ".weight"]
                if not (same(middle_decoded[n], decoded[n]) if exact ==
                        "pow2" else torch.allclose(middle_decoded[n], decoded[n], rtol=3e-7, atol=0))
            ]
            check(f"{what}: numbers in between", not wrong, wrong[:4])
            if middle != "gguf":
                wrong = [n for n, t in plain.items() if "embed" in n and not same_bytes(t, load(through)[n])]
                check(f"{what}: the others", not wrong, wrong)
            if middle == "torchao":
                torchao_reads(through, decoded, what)


def torchao_reads(path, decoded, what):
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    wrong, read = [], 0
    for name in sorted(n for n in os.listdir(path) if n.endswith(".safetensors")):
        with safe_open(os.path.join(path, name), framework="pt") as opened:
            metadata, tensors = opened.metadata(), {k: opened.get_tensor(k) for k in opened.keys()}
        state, left = unflatten_tensor_state_dict(tensors, metadata)
        for key, t in state.items():
            if type(t).__name__ == "NVFP4Tensor":
                read += 1
                if not torch.allclose(t.dequantize(torch.float32), decoded[key], rtol=3e-7, atol=0):
                    wrong.append(key)
        wrong += list(left)
    check(f"{what}: torchao reads {read}", read > 10 and not wrong, wrong[:4])


def torchao():
    """Files that torchao writes convert with codes and scales unchanged; swizzled scales are refused."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    random = torch.Generator().manual_seed(SEED)
    for swizzled in (False, True):
        state = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
        for name, shape in (("self_attn.o_proj", (128, 64)), ("mlp.down_proj", (256, 192))):
            w = (torch.randn(shape, generator=random) * 0.02).to(torch.bfloat16)
            state[f"model.layers.0.{name}.weight"] = NVFP4Tensor.to_nvfp4(w,
                                                                          per_tensor_scale=per_tensor_amax_to_scale(
                                                                              w.abs().amax()),
                                                                          is_swizzled_scales=swizzled)
        data, metadata = flatten_tensor_state_dict(state)
        path = place("ao-in")
        os.makedirs(path)
        save_file({
            n: t.contiguous()
            for n, t in data.items()
        }, os.path.join(path, "model.safetensors"), {
            **metadata, "format": "pt"
        })
        with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
            json.dump(
                {
                    "model_type": "llama",
                    "num_hidden_layers": 1,
                    "hidden_size": 64,
                    "quantization_config": {
                        "quant_method": "torchao"
                    }
                }, file)
        out = place("ao-out")
        if swizzled:
            message = nib("convert", path, out, "--format", "modelopt", fails=True)
            check("torchao: swizzled scales are refused by name", "swizzled" in message, message)
            continue
        nib("convert", path, out, "--format", "modelopt")
        tensors, decoded = load(out), dequantized(path)
        for key, t in state.items():
            if type(t).__name__ != "NVFP4Tensor":
                continue
            module = key[:-len(".weight")]
            check(
                f"torchao: {module}",
                same_bytes(tensors[key], t.qdata)
                and same_bytes(tensors[f"{module}.weight_scale"].view(torch.uint8).reshape(-1),
                               t.scale.view(torch.uint8).reshape(-1))
                and tensors[f"{module}.weight_scale_2"].item() == t.per_tensor_scale.item())
            check(f"torchao: numbers of {module}",
                  torch.allclose(t.dequantize(torch.float32), decoded[key], rtol=3e-7, atol=0))


def saved():
    """A tensor that the library saved, with both copies: the rowwise one converts, and nothing is left of the other."""
    path = os.path.join(work, "saved.safetensors")
    done = subprocess.run([os.path.join(os.path.dirname(MAKE), "quantize"), path], stdout=subprocess.DEVNULL)
    parts = load_any(path)
    rows = torch.tensor([(i * 37 % 101 - 50) / 64 for i in range(48 * 80)]).reshape(48, 80)  # as the example has them
    for form, names in (("compressed-tensors", ("weight_packed", "weight_scale", "weight_global_scale")),
                        ("modelopt", ("weight", "weight_scale", "weight_scale_2"))):
        out = os.path.join(work, "saved-out.safetensors")
        nib("convert", path, out, "--format", form, "--force")
        tensors = load(out)
        check(f"a saved tensor to {form}: names",
              done.returncode == 0 and sorted(tensors) == sorted(f"weight.{n}" for n in names), sorted(tensors))
        scales = tensors["weight.weight_scale"].view(torch.uint8), parts["weight.row_scale"].view(torch.uint8)[:48, :5]
        check(f"a saved tensor to {form}: codes and scales",
              same_bytes(tensors[f"weight.{names[0]}"], parts["weight.row_data"]) and torch.equal(*scales))
        decoded = load_any(dequantize(out))["weight.weight"]
        check(f"a saved tensor to {form}: numbers", noise(rows, decoded) > 18, noise(rows, decoded))


# ---- Other sources ---------------------------------------------------------------------------------------


def mxfp4():
    """gpt-oss in MXFP4: NVFP4 holds every number of it."""
    source = make("mx-in", "--family", "gpt-oss-mxfp4", "--layers", "2", "--shards", "2", "--intermediate", "256")
    plain = load(source)
    expected = {}
    for name, blocks in plain.items():
        if not name.endswith("_blocks"):
            continue
        codes, powers = blocks.numpy(), plain[name[:-len("_blocks")] + "_scales"].numpy()
        values = E2M1[numpy.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:3], 32)]
        values = torch.from_numpy(
            (values * numpy.exp2(powers.astype(numpy.float64) - 127)[..., None]).astype(numpy.float32)).flatten(2)
        parent, _, which = name[:-len("_blocks")].rpartition(".")
        for e in range(values.shape[0]):
            if which == "gate_up_proj":  # rows alternate
                expected[f"{parent}.{e}.gate_proj.weight"], expected[f"{parent}.{e}.up_proj.weight"] = values[
                    e, 0::2], values[e, 1::2]
            else:
                expected[f"{parent}.{e}.down_proj.weight"] = values[e]
    out = place("mx-out")
    nib("quantize", source, out)
    tensors, decoded = load(out), dequantized(out)
    wrong = [n for n, t in expected.items() if n not in decoded or not same(decoded[n], t)]
    check(f"mxfp4: {len(expected)} experts keep every number", len(expected) == 24 and not wrong, wrong[:4])
    check("mxfp4: nothing is left of it", not [n for n in tensors if n.endswith(("_blocks", "_scales"))])
    straight = dequantized(source)
    wrong = [n for n, t in expected.items() if n not in straight or not same(straight[n], t)]
    check("mxfp4: dequantize", not wrong or stacked_equal(straight, expected), wrong[:4])
    out = place("mx-modelopt")
    nib("quantize", source, out, "--format", "modelopt")
    tensors = load(out)
    wrong = [
        f"{parent}.{which}" for layer in range(2) for parent in [f"model.layers.{layer}.mlp.experts"]
        for which in ("gate_up_proj", "down_proj") if not stack_equal(tensors, expected, parent, which)
    ]
    check("mxfp4: ModelOpt's stacks", not wrong, wrong)


def stacked_equal(tensors, expected):
    """A dequantized stack as gpt-oss has it: [E, K, N], gate and up alternating."""
    stacks = [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    return stacks and all(same(tensors[n], whole_stack(expected, *n.rsplit(".", 1))) for n in stacks)


def whole_stack(expected, parent, which):
    matrices = []
    for e in range(4):
        if which == "gate_up_proj":
            pair = torch.stack([expected[f"{parent}.{e}.gate_proj.weight"], expected[f"{parent}.{e}.up_proj.weight"]],
                               dim=1)
            matrices.append(pair.flatten(0, 1).T)
        else:
            matrices.append(expected[f"{parent}.{e}.down_proj.weight"].T)
    return torch.stack(matrices).contiguous()


def stack_equal(tensors, expected, parent, which):
    """ModelOpt keeps these stacks whole and packs along dim 1."""
    packed, scale, level = (tensors.get(f"{parent}.{which}{suffix}")
                            for suffix in ("", "_weight_scale", "_weight_scale_2"))
    if packed is None or scale is None or level is None:
        return False
    decoded = modelopt_decode(packed.transpose(1, 2).contiguous(),
                              scale.transpose(1, 2).contiguous(), level).transpose(1, 2)
    return same(decoded.contiguous(), whole_stack(expected, parent, which))


def fp8_block():
    """FP8 in blocks of 128 x 128: dequantized and quantized as NumPy's decoding of it is."""
    source = make("f8-in", "--family", "deepseek-fp8", "--layers", "2", "--shards", "2", "--hidden", "192",
                  "--intermediate", "96")
    plain = load(source)
    expected = {}
    for name, t in plain.items():
        scale = plain.get(name + "_scale_inv")
        if scale is None:
            if not name.endswith("_scale_inv"):
                expected[name] = t
            continue
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:t.shape[0], :t.shape[1]]
        expected[name] = torch.from_numpy(t.float().numpy() * wide.numpy())
    decoded = dequantized(source)
    wrong = [n for n, t in expected.items() if n not in decoded or not same(decoded[n], t)]
    check(f"fp8-block: {len(expected)} tensors",
          len(expected) > 40 and not wrong and len(decoded) == len(expected),
          (wrong[:4], sorted(set(decoded) ^ set(expected))[:4]))
    config = read_json(source, "config.json")
    del config["quantization_config"]
    same_after_quantizing("fp8-block", source, save("f8-plain", expected, config))


def same_after_quantizing(what, source, plain, *options):
    """Quantizing either gives the same tensors; what stays may be rounded to BF16, which the configuration names."""
    out, other = place("same-1"), place("same-2")
    nib("quantize", source, out, *options)
    nib("quantize", plain, other, *options)
    ours, theirs = load(out), load(other)
    check(f"{what}: the same names", sorted(ours) == sorted(theirs), sorted(set(ours) ^ set(theirs))[:6])
    quantized = modules(ours, ".weight_packed")
    rounded = lambda n: theirs[n].to(ours[n].dtype) if theirs[n].dtype == torch.float32 and ours[
        n].dtype == torch.bfloat16 else theirs[n]
    wrong = [n for n in ours if n in theirs and not same_bytes(ours[n], rounded(n))]
    check(f"{what}: the same bytes", quantized and not wrong, wrong[:6])
    return quantized


# How gate and up lie in a stack: one after the other in [E, 2I, H], the same in [E, H, 2I] (.T), or in turns.
STACKS = {"qwen3-vl-moe": "halves.T", "qwen3.5-moe": "halves", "llama4": "halves.T", "gpt-oss": "pairs.T"}


def stacks():
    """Stacks of experts are quantized as the matrices that they hold, cut out here by hand."""
    # Of the last two sizes a matrix of a stack does not tell which way it lies: 2I = H, and I = H for down_proj.
    for (family, lie), size in itertools.product(STACKS.items(), ("96", "64", "128")):
        source = make("st-in", "--family", family, "--layers", "2", "--shards", "2", "--hidden", "128",
                      "--intermediate", size, "--experts", "3")
        plain = {}
        for name, t in load(source).items():
            if name.endswith("_proj_bias"):
                plain |= split_bias(name, t)
                continue
            if t.ndim != 3 or ".experts." not in name:
                plain[name] = t
                continue
            parent, _, which = name.rpartition(".")
            for e in range(t.shape[0]):
                matrix = t[e].T if lie.endswith(".T") else t[e]
                if which == "down_proj":
                    plain[f"{parent}.{e}.down_proj.weight"] = matrix
                    continue
                half = matrix.shape[0] // 2
                gate, up = (matrix[0::2], matrix[1::2]) if lie.startswith("pairs") else (matrix[:half], matrix[half:])
                plain[f"{parent}.{e}.gate_proj.weight"], plain[f"{parent}.{e}.up_proj.weight"] = gate, up
        what = f"{family}, I = {size}"
        quantized = same_after_quantizing(what, source, save("st-plain", plain, read_json(source, "config.json")))
        check(f"{what}: experts are quantized", sum(".experts." in m for m in quantized) == 2 * 3 * 3, quantized)


def granite():
    """Granite's stacks are tensors of linear layers: input_linear holds gate and up, output_linear down."""
    random = torch.Generator().manual_seed(SEED)
    experts, hidden, inner = 3, 128, 64
    at = "model.layers.0.block_sparse_moe"
    both = (torch.randn(experts, 2 * inner, hidden, generator=random) * 0.05).to(torch.bfloat16)
    down = (torch.randn(experts, hidden, inner, generator=random) * 0.05).to(torch.bfloat16)
    router = {f"{at}.router.layer.weight": torch.randn(experts, hidden, generator=random).to(torch.bfloat16)}
    config = {"model_type": "granitemoe", "hidden_size": hidden, "intermediate_size": inner,
              "num_local_experts": experts, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
    plain = dict(router)
    for e in range(experts):
        plain |= {f"{at}.experts.{e}.w1.weight": both[e, :inner], f"{at}.experts.{e}.w3.weight": both[e, inner:],
                  f"{at}.experts.{e}.w2.weight": down[e]}
    stack = save("gr-in", {f"{at}.input_linear.weight": both, f"{at}.output_linear.weight": down, **router}, config)
    quantized = same_after_quantizing("granite", stack, save("gr-plain", plain, config))
    check("granite: experts are quantized", len(quantized) == 9, quantized)


def split_bias(name, t):
    """gpt-oss: the biases of a stack go with its matrices."""
    parent, _, which = name[:-len("_bias")].rpartition(".")
    if which == "down_proj":
        return {f"{parent}.{e}.down_proj.bias": t[e] for e in range(t.shape[0])}
    return {
        f"{parent}.{e}.{part}.bias": t[e, i::2]
        for e in range(t.shape[0])
        for i, part in enumerate(("gate_proj", "up_proj"))
    }


# What stays as it is by default, and some that do not.
KEPT = (r"lm_head|embed_tokens|norm|\.gate$|router|shared_expert_gate|conv1d|in_proj_[ab]$|visual|vision_model"
        r"|multi_modal_projector|^mtp\.|layers\.2\.")
FAMILIES = [
    "llama", "demo", "mixtral", "qwen3-moe", "qwen3-vl-moe", "qwen3.5-moe", "llama4", "gpt-oss", "gpt-oss-mxfp4",
    "deepseek", "deepseek-fp8"
]


def families():
    """Every family: what is quantized and what is kept, in both formats, and the configuration's word on it."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name
    for family in FAMILIES:
        source = make("fam-in", "--family", family, "--layers", "2", "--shards", "2")
        out = place("fam-out")
        nib("quantize", source, out)
        tensors = load(out)
        quantized = modules(tensors, ".weight_packed")
        wrong = [m for m in quantized if re.search(KEPT, m)]
        check(f"{family}: what must stay does", quantized and not wrong, wrong[:4])
        wrong = [
            n for n, t in tensors.items()
            if t.ndim >= 2 and t.dtype != torch.uint8 and not n.endswith(("weight_scale", "_bias"))
            and not re.search(KEPT, n[:-len(".weight")]) and not re.search(r"kv_b_proj|q_a_proj|kv_a_proj", n)
        ]
        check(f"{family}: everything else is quantized", not wrong, wrong[:4])
        config = read_json(out, "config.json")["quantization_config"]
        config.pop("version", None)
        parsed = QuantizationConfig.model_validate(config)
        wrong = [m for m in quantized if any(match_name(m, pattern) for pattern in parsed.ignore)]
        check(f"{family}: nothing quantized is ignored", not wrong, wrong[:4])
        plain = load(source)
        biases = {}
        for name, t in plain.items():
            if name.endswith(("_bias", ".bias")):
                biases |= split_bias(name, t) if name.endswith("_proj_bias") else {name: t}
        wrong = [n for n, t in biases.items() if n not in tensors or not same_bytes(t.contiguous(), tensors[n])]
        check(f"{family}: biases are kept", not wrong, wrong[:4])
        nib("check", out, "--against", source)
        out = place("fam-modelopt")
        nib("quantize", source, out, "--format", "modelopt", "--scheme", "nvfp4")
        nib("check", out, "--against", source)
        check(f"{family}: in both formats without a finding", len(load(out)) > 10)


def reloaded():
    """What is dequantized, from FP8 and MXFP4 or after quantizing, is a model again: transformers misses nothing."""
    from transformers import AutoModelForCausalLM
    tokens = torch.arange(8)[None]
    for family in ("llama", "mixtral", "qwen3-moe", "demo", "deepseek", "deepseek-fp8", "gpt-oss-mxfp4"):
        source, quantized, back = make("re-in", "--family", family, "--shards", "2"), place("re-out"), place("re-back")
        if family.endswith(("fp8", "mxfp4")):
            quantized = source
        else:
            nib("quantize", source, quantized)
        nib("dequantize", quantized, back, "--dtype", "bf16")
        with torch.no_grad():
            model, facts = AutoModelForCausalLM.from_pretrained(back, dtype=torch.bfloat16, output_loading_info=True)
            logits = model(tokens).logits.float()
        unexpected = [n for n in facts["unexpected_keys"] if ".layers.2." not in n]  # what predicts more tokens
        wrong = [*facts["missing_keys"], *facts["mismatched_keys"], *unexpected]
        size = logits.std().item()
        check(f"{family}: dequantized and loaded", not wrong and 0.5 < size < 2, (wrong[:4], size))


def sources():
    """Other dtypes, tails and single files; numbers as near as they should be."""
    for options in (["--dtype", "f16"], ["--dtype", "f32", "--laplace"], ["--varied", "--tied"]):
        source, out = make("src-in", "--layers", "1", *options), place("src-out")
        nib("quantize", source, out)
        plain, decoded = load(source), dequantized(out)
        worst = min(noise(plain[m + ".weight"], decoded[m + ".weight"]) for m in modules(load(out), ".weight_packed"))
        check(f"quantize {' '.join(options)}", 19 < worst < 24, worst)
        alone, file = os.path.join(work, "alone.safetensors"), os.path.join(source, "model.safetensors")
        nib("quantize", file, alone, "--force")
        ours, theirs = load(alone), load(out)
        wrong = [n for n in theirs if n not in ours or not same_bytes(ours[n], theirs[n])]
        check(f"a single file, {' '.join(options)}", not wrong and len(ours) == len(theirs), wrong[:4])


def activations():
    """Scales of activations: 1, the bound of an RMSNorm, or from a file; equal where servers fuse."""
    hidden = 256
    source = make("act-in", "--layers", "2", "--hidden", str(hidden), "--shards", "2")
    plain = load(source)
    amaxes = {
        f"model.layers.{layer}.{name}": 10.0 + 7 * i + layer
        for layer in range(2)
        for i, name in enumerate(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                  "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    }
    path = os.path.join(work, "amaxes.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(amaxes, file)

    def bound(module):
        parent, _, last = module.rpartition(".")
        norm = {
            "q_proj": "input_layernorm",
            "k_proj": "input_layernorm",
            "v_proj": "input_layernorm",
            "gate_proj": "post_attention_layernorm",
            "up_proj": "post_attention_layernorm"
        }.get(last)
        return hidden**0.5 * plain[f"{parent.rpartition('.')[0]}.{norm}.weight"].float().abs().max().item(
        ) / 2688 if norm else 1.0

    def given(module):
        return max(amaxes[n[:-len(".weight")]]
                   for n in group_of(module + ".weight", [m + ".weight" for m in amaxes])) / 2688

    for option, expected in (("one", lambda module: 1.0), ("norm", bound), (path, given)):
        for form, name in (("modelopt", "input_scale"), ("compressed-tensors", "input_global_scale")):
            out = place("act-out")
            nib("quantize", source, out, "--format", form, "--scheme", "nvfp4", "--activations", option)
            tensors = load(out)
            wanted = {m: expected(m) if form == "modelopt" else 1 / expected(m) for m in amaxes}
            wrong = [(m, tensors[f"{m}.{name}"].item(), w) for m, w in wanted.items()
                     if abs(tensors[f"{m}.{name}"].item() - w) > 1e-6 * w]
            check(f"--activations {os.path.basename(option)}, {form}", not wrong, wrong[:2])


def python_numbers():
    """config.json as Python writes it: numbers that JSON has not come out as they went in."""
    source, out = make("py-in", "--layers", "1"), place("py-out")
    config = read_json(source, "config.json")
    odd = {"time_step_limit": [0.0, float("inf")], "low": {"x": -float("inf")}, "nan": float("nan"),
           "large": [10**30, -10**25, 2**63 - 1], "small": 1e-05, "pi": 3.141592653589793, "name": "Größe",
           "text": "NaN, \\\"Infinity\\\" 1000000000000000019884624838656 \\"}
    with open(os.path.join(source, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**config, **odd}, file)
    for command in (["quantize"], ["quantize", "--format", "modelopt"]):
        nib(*command, source, out, "--force")
        after = read_json(out, "config.json")
        wrong = [key for key in {**config, **odd} if repr(after.get(key)) != repr({**config, **odd}[key])]
        check(f"{' '.join(command)}: numbers of config.json", not wrong and "quantization_config" in after, wrong)
    for broken in ("Infinit", "-NaN", "+Infinity", "00", "1" * 30 + ".", "\"\\u0001"):
        with open(os.path.join(source, "config.json"), "w", encoding="utf-8") as file:
            file.write('{"a": ' + broken + "}")
        message = nib("quantize", source, place("py-broken"), fails=True)
        check(f"config.json with {broken} is refused", "config.json: line 1" in message, message)


FP8 = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj",
       "model.layers.1.mlp.down_proj")


def mixed_by_modelopt(mtq, name, model, tokens, out, modules=tuple(f"{name}." for name in FP8)):
    """What ModelOpt writes of a mixture."""
    import copy
    from modelopt.torch.export import export_hf_checkpoint
    config = copy.deepcopy(getattr(mtq, name))
    for entry in mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG["quant_cfg"]:
        if entry["quantizer_name"] in ("*weight_quantizer", "*input_quantizer"):
            config["quant_cfg"] += [{**entry, "quantizer_name": f"*{m}{entry['quantizer_name'][1:]}"} for m in modules]
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        mtq.quantize(model, config, forward_loop=lambda m: m(tokens))
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=out)


def same_mixture(what, theirs, ours, raised=FP8[0]):
    a, b = load_any(theirs), load(ours)
    forms = lambda tensors: {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    wrong = sorted(map(str, set(forms(a).items()) ^ set(forms(b).items())))
    check(f"{what}: names, dtypes and shapes", not wrong, wrong[:6])
    wrong = [n for n in a if n in b and not n.endswith("input_scale") and not same_bytes(a[n], b[n])]
    check(f"{what}: the same bytes", not wrong and a[raised + ".weight"].dtype == torch.float8_e4m3fn, wrong[:4])
    a, b = (read_json(path, "config.json")["quantization_config"] for path in (theirs, ours))
    by_targets = lambda groups: {tuple(g["targets"]): g for g in groups.values()}
    check(f"{what}: groups", by_targets(a["config_groups"]) == by_targets(b["config_groups"]),
          (a["config_groups"], b["config_groups"]))
    wrong = [key for key in {*a, *b} - {"producer", "ignore", "config_groups"} if a.get(key) != b.get(key)]
    check(f"{what}: every other key", not wrong and set(a["ignore"]) <= set(b["ignore"]), (wrong, a, b))
    a, b = (read_json(path, "hf_quant_config.json")["quantization"] for path in (theirs, ours))
    check(f"{what}: hf_quant_config", all(a[key] == b.get(key) for key in a), (a, b))


def mixed_experts(mtq, models):
    """All experts of a layer in FP8: one that is named brings them along."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(SEED)
    source, theirs, ours = (place(f"mix-experts-{name}") for name in ("in", "theirs", "ours"))
    config = Qwen3MoeConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
                            num_key_value_heads=2, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=64)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(SEED))
    model = models.from_pretrained(source, dtype=torch.bfloat16)
    mixed_by_modelopt(mtq, "NVFP4_DEFAULT_CFG", model, tokens, theirs, ["layers.1.mlp.experts.*"])
    one = "model.layers.1.mlp.experts.2.up_proj"
    nib("quantize", source, ours, "--dialect", "modelopt", "--format", "modelopt", "--scheme", "nvfp4", "--fp8", one)
    same_mixture("a mixture of experts for ModelOpt", theirs, ours, one)
    for path in (theirs, ours):
        check("a mixture of experts: no finding", "no findings" in nib("check", path, "--against", source))


def mixed():
    """FP8 beside NVFP4: ModelOpt's own export key by key and byte for byte, and transformers loads the other form."""
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM
    source = make("mix-in", "--hidden", "128", "--intermediate", "256", "--vocab", "256", "--layers", "2")
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(SEED))
    listed = [word for m in FP8 if "q_proj" in m or "down" in m for word in ("--fp8", m)]  # q brings k and v along
    for name, scheme in (("NVFP4_DEFAULT_CFG", "nvfp4"), ("W4A16_NVFP4_CFG", "nvfp4a16")):
        theirs, ours = place("mix-theirs"), place("mix-ours")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        mixed_by_modelopt(mtq, name, model, tokens, theirs)
        nib("quantize", source, ours, "--dialect", "modelopt", "--format", "modelopt", "--scheme", scheme, *listed)
        same_mixture(f"a mixture for ModelOpt, {scheme}", theirs, ours)
        for path in (theirs, ours):
            check(f"a mixture, {scheme}: no finding", "no findings" in nib("check", path, "--against", source))
        out = place("mix-ct")
        nib("quantize", source, out, "--scheme", scheme, *listed)
        check(f"a mixture, {scheme}: no finding", "no findings" in nib("check", out, "--against", source))
        values = dequantized(out)
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
        with torch.no_grad():
            loaded(tokens)  # its first forward pass decompresses the weights
        weights = dict(loaded.named_parameters())
        wrong = [n for n, t in values.items() if n not in weights or
                 not torch.allclose(weights[n].data.float(), t.float(), rtol=2**-8, atol=0)]
        check(f"a mixture, {scheme}: transformers loads it", not wrong and len(values) > 16, wrong[:4])
    mixed_experts(mtq, AutoModelForCausalLM)
    message = nib("quantize", source, place("mix-budget"), "--budget", "5.2")
    check("a budget without forward passes is called a guess", "is a guess" in message, message)
    for options, why in ((["--budget", "4"], "4.5"), (["--budget", "5", "--fp8", "*q_proj"], "one of the two"),
                         (["--fp8", "nothing"], "nothing"), (["--budget-plain"], "one of the two")):
        check(f"{' '.join(options)} is rejected", why in nib("quantize", source, place("mix-no"), *options, fails=True))


PARTS = [compressed_tensors, repeatable, modelopt, exported, mixed, gguf, transformers, dialects, zeros, conversions,
         torchao, saved, mxfp4, fp8_block, stacks, granite, families, reloaded, sources, activations, python_numbers]


def main():
    global work
    wanted = sys.argv[3:]
    with tempfile.TemporaryDirectory() as work:
        for part in PARTS:
            if wanted and part.__name__ not in wanted:
                continue
            before = dict(counts)
            try:
                part()
            except Failed as error:
                check(part.__name__, False, error)
            except Exception:
                check(part.__name__, False, traceback.format_exc())
            passed, failed = (counts[kind] - before[kind] for kind in ("passed", "failed"))
            print(f"{part.__name__}: {passed} passed, {failed} failed", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

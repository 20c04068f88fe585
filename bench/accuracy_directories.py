#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What directories that nib has written lose on text: the rows of GPTQ and of budgets in docs/accuracy.md, and its chart.

    accuracy_directories.py measure DIR OUT.json NAME=DIRECTORY...   KL of each against DIR/smollm2, with activations as they
                                                                     are and of 4 bits (NAME@16, NAME@4: of these alone);
                                                                     OUT.json is added to
    accuracy_directories.py table FILE.json                          the table on standard output
    accuracy_directories.py chart FILE.json OUT.svg                  KL against bits per weight

DIR is that of `accuracy.py prepare`; the directories are of DIR/smollm2, written with --scheme nvfp4, or by llm-compressor or
ModelOpt with scales of activations. Weights are taken as `nib dequantize` gives them and computed with in FP32; with 4-bit
activations what comes into a quantized layer goes through NVFP4 with the directory's own scale, and what comes into a layer of FP8
through FP8 by tokens.
"""
import argparse
import json
import os
import resource
import sys
import tempfile

import accuracy
import numpy as np

BITS = (16, 4)


def read_directory(nib, directory):
    """{tensor: FP32 values}, {module: scale of its activations, or None for FP8}, bits of a quantized weight."""
    from safetensors import safe_open
    with tempfile.TemporaryDirectory() as place:
        nib.dequantize_checkpoint(directory, os.path.join(place, "plain"), dtype="f32")
        values = {}
        for name in sorted(os.listdir(os.path.join(place, "plain"))):
            if name.endswith(".safetensors"):
                with safe_open(os.path.join(place, "plain", name), framework="np") as file:
                    values.update({key: file.get_tensor(key).astype(np.float32) for key in file.keys()})
    inputs, stored, elements = {}, 0, 0
    for name in sorted(os.listdir(directory)):
        if not name.endswith(".safetensors"):
            continue
        with safe_open(os.path.join(directory, name), framework="pt") as file:
            for key in file.keys():
                module, part = key.rpartition(".")[::2]
                piece = file.get_slice(key)
                size = int(np.prod(piece.get_shape(), dtype=np.int64))
                if part == "input_global_scale":
                    inputs[module] = 1 / float(file.get_tensor(key).flatten()[0])
                elif part == "input_scale" and f"{module}.weight_scale_2" in file.keys():
                    inputs[module] = float(file.get_tensor(key))
                elif part == "weight" and piece.get_dtype() == "F8_E4M3":
                    inputs[module] = None
                if part in ("weight_packed", "weight_scale") or (part == "weight" and piece.get_dtype() in ("F8_E4M3", "U8")):
                    stored += size * (4 if piece.get_dtype() == "F32" else 1)
                    elements += size * {"weight_packed": 2, "weight": 2 if piece.get_dtype() == "U8" else 1}.get(part, 0)
    return values, inputs, 8 * stored / elements if elements else 16.0


def fake_fp8(torch, x):
    """By tokens: the largest magnitude of each becomes 448."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def hooks_of(torch, model, inputs):
    found = []
    for name, module in model.named_modules():
        if name in inputs:
            scale = inputs[name]
            change = (lambda x: fake_fp8(torch, x)) if scale is None else \
                (lambda x, s=scale: accuracy.fake_nvfp4(torch, x, torch.tensor(np.float32(s), device=x.device)))
            found.append(module.register_forward_pre_hook(lambda _, args, change=change: (change(args[0]),)))
    return found


def measure(arguments):
    import torch
    import transformers

    import nib
    from nib import evaluate
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = os.path.join(arguments.folder, "smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    documents = {}
    for name in accuracy.DOCUMENTS:
        with open(os.path.join(arguments.folder, name + ".txt"), encoding="utf-8") as text:
            documents[name] = evaluate.windows(tokenizer, text.read(8 * arguments.windows * accuracy.LENGTH), accuracy.LENGTH,
                                               arguments.windows)

    def logits(tokens):
        return model(tokens.to(device), use_cache=False).logits

    with torch.inference_mode():
        kept = [logits(tokens[None]).half() for cut in documents.values() for tokens in cut]
    rows = []
    if os.path.exists(arguments.out):
        with open(arguments.out, encoding="utf-8") as file:
            rows = json.load(file)["directories"]
    for name, directory in (given.split("=", 1) for given in arguments.directories):
        name, _, alone = name.partition("@")
        values, inputs, bits = read_directory(nib, directory)
        with torch.no_grad():
            for key, value in before.items():
                model.get_parameter(key).copy_(torch.from_numpy(values[key]).view(value.shape) if key in values else value)
        for activations in [int(alone)] if alone else BITS:
            hooks = hooks_of(torch, model, inputs) if activations == 4 else []
            tables = iter(kept)
            scores = evaluate.evaluate(lambda _: next(tables).float(), logits, documents)
            for hook in hooks:
                hook.remove()
            row = {"method": name, "activations": activations, "bits": bits, **evaluate.summarize(scores),
                   "windows_kl": [s.kl / s.positions for s in scores],
                   "documents": {key: evaluate.summarize([s for s in scores if s.document == key]) for key in documents}}
            rows = [r for r in rows if (r["method"], r["activations"]) != (name, activations)] + [row]
            print(f"{name:20} W4A{activations:<3} {bits:.3f} bits KL {row['kl']:.4f} +- {row['kl_error']:.4f} perplexity "
                  f"{row['perplexity']:.2f} top-1 {row['top1']:.3f} " +
                  " ".join(f"{key} {found['kl']:.4f}" for key, found in row["documents"].items()), file=sys.stderr, flush=True)
            accuracy.write_figures(arguments.out, device, 1, {"directories": rows, "windows": arguments.windows})
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB", file=sys.stderr)


def rows_of(path):
    with open(path, encoding="utf-8") as file:
        figures = json.load(file)
    found = {}
    for row in figures["directories"]:
        found.setdefault(row["method"], {})[row["activations"]] = row
    return found, figures


def table(path):
    found, figures = rows_of(path)
    base = found["rtn"]
    print("| | bits | W4A16: KL | of rtn's | perplexity | top-1 | W4A4: KL | of rtn's | perplexity | top-1 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, rows in found.items():
        cells = ""
        for bits in BITS:
            row = rows.get(bits)
            cells += f" {row['kl']:.4f} +- {row['kl_error']:.4f} | {row['kl'] / base[bits]['kl']:.2f} | {row['perplexity']:.2f} | " \
                     f"{100 * row['top1']:.1f} % |" if row else " | | | |"
        print(f"| {name} | {next(iter(rows.values()))['bits']:.2f} |" + cells)
    print("\n| KL of | " + " | ".join(f"{document} W4A{bits}" for document in accuracy.DOCUMENTS for bits in BITS) + " |")
    print("|---|" + "---|" * (2 * len(accuracy.DOCUMENTS)))
    for name, rows in found.items():
        print(f"| {name} | " + " | ".join(f"{rows[bits]['documents'][document]['kl']:.4f}" if bits in rows else ""
                                          for document in accuracy.DOCUMENTS for bits in BITS) + " |")


def chart(path, out):
    """KL against bits per weight, two panels."""
    found, _ = rows_of(path)
    width, height, left, top = 460, 340, 56, 28
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {height + 40}" font-family="sans-serif" '
             'font-size="12"><style>text{fill:#333}line{stroke:#ccc}@media(prefers-color-scheme:dark){text{fill:#ddd}'
             'line{stroke:#555}}</style>']
    for panel, bits in enumerate(BITS):
        points = [(rows[bits]["bits"], rows[bits]["kl"], name) for name, rows in found.items() if bits in rows]
        low, high = min(p[0] for p in points) - 0.1, max(p[0] for p in points) + 0.25
        most = 1.08 * max(p[1] for p in points)
        x0 = panel * width + left
        at = lambda b, kl: (x0 + (b - low) / (high - low) * (width - left - 24), top + (1 - kl / most) * (height - top - 36))
        parts.append(f'<text x="{x0}" y="16" font-weight="bold">KL (nats), W4A{bits}</text>')
        for i in range(5):
            _, y = at(low, most * i / 4)
            parts.append(f'<line x1="{x0}" x2="{panel * width + width - 24}" y1="{y:.1f}" y2="{y:.1f}"/><text x="{x0 - 6}" '
                         f'y="{y + 4:.1f}" text-anchor="end">{most * i / 4:.2f}</text>')
        for tick in np.arange(np.ceil(low * 5) / 5, high, 0.2):
            x, y = at(tick, 0)
            parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick:.1f}</text>')
        parts.append(f'<text x="{x0 + (width - left) / 2:.0f}" y="{height + 14}" text-anchor="middle">bits per quantized '
                     'weight</text>')
        for b, kl, name in points:
            x, y = at(b, kl)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#3a7"/><text x="{x + 8:.1f}" y="{y + 4:.1f}">{name} '
                         f'{kl:.3f}</text>')
    with open(out, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("folder")
    one.add_argument("out")
    one.add_argument("directories", nargs="+", metavar="NAME=DIRECTORY")
    one.add_argument("--device")
    one.add_argument("--windows", type=int, default=16, help="of a document (%(default)s)")
    commands.add_parser("table").add_argument("file")
    two = commands.add_parser("chart")
    two.add_argument("file")
    two.add_argument("out")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments)
    elif arguments.command == "table":
        table(arguments.file)
    else:
        chart(arguments.file, arguments.out)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What directories that nib has written lose on text: the rows of GPTQ and of budgets in docs/accuracy.md, and its chart.

    accuracy_directories.py measure DIR OUT.json NAME=DIRECTORY...   KL of each against DIR/smollm2, with activations as they
                                                                     are and of 4 bits (NAME@16, NAME@4: of these alone);
                                                                     OUT.json is added to
    accuracy_directories.py table FILE.json...                       tables on standard output
    accuracy_directories.py chart OUT.svg FILE.json...               KL against bits per weight

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
PEERS = ("llm-compressor", "ModelOpt")
ORDER = ("rtn", "sweep", "A", "A+B", "A+B, searched", "A+C", "A+B+C", "sequential", "budget 5 %", "budget 10 %", "budget 20 %", "llm-compressor",
         "llm-compressor GPTQ", "ModelOpt", "ModelOpt AWQ")


def take_smoothing(directory, place):
    """{module: what its input is multiplied by} of a directory of AWQ, which nib rejects, and what it is without that: in `place`."""
    from safetensors import safe_open
    from safetensors.torch import save_file
    join = os.path.join
    with safe_open(join(directory, "model.safetensors"), framework="pt") as file:
        names = [name for name in file.keys() if name.endswith(".pre_quant_scale")]
        if not names:
            return {}, directory
        smoothed = {name.rpartition(".")[0]: file.get_tensor(name).float() for name in names}
        os.mkdir(place)
        save_file({name: file.get_tensor(name) for name in file.keys() if name not in names}, join(place, "model.safetensors"))
    for name in ("config.json", "hf_quant_config.json"):
        with open(join(directory, name), encoding="utf-8") as file, open(join(place, name), "w", encoding="utf-8") as to:
            to.write(file.read().replace("NVFP4_AWQ", "NVFP4"))
    return smoothed, place


def read_directory(nib, directory):
    """{tensor: FP32 values}, {module: scale of its activations, or None for FP8}, {module: what its input is multiplied by (AWQ)},
    bits of a quantized weight."""
    from safetensors import safe_open
    with tempfile.TemporaryDirectory() as place:
        smoothed, source = take_smoothing(directory, os.path.join(place, "smooth"))
        nib.dequantize_checkpoint(source, os.path.join(place, "plain"), dtype="f32")
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
    return values, inputs, smoothed, 8 * stored / elements if elements else 16.0


def fake_fp8(torch, x):
    """By tokens: the largest magnitude of each becomes 448."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def hooks_of(torch, model, inputs, smoothed):
    found = []
    for name, module in model.named_modules():
        if name in smoothed:
            found.append(module.register_forward_pre_hook(lambda _, args, by=smoothed[name]: (args[0] * by.to(args[0].device),)))
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
        values, inputs, smoothed, bits = read_directory(nib, directory)
        with torch.no_grad():
            for key, value in before.items():
                model.get_parameter(key).copy_(torch.from_numpy(values[key]).view(value.shape) if key in values else value)
        for activations in [int(alone)] if alone else BITS:
            hooks = hooks_of(torch, model, inputs if activations == 4 else {}, smoothed)
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


def rows_of(paths):
    """{method: {width of activations: row}} of files of figures, in ORDER."""
    found = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for row in json.load(file).get("directories", []):
                found.setdefault(row["method"], {})[row["activations"]] = row
    place = {name: i for i, name in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda entry: place.get(entry[0], len(place))))


def methods_table(found):
    """KL, perplexity and top-1 of each method."""
    base = found["rtn"]
    lines = ["| | bits | W4A16: KL | of rtn's | perplexity | top-1 | W4A4: KL | of rtn's | perplexity | top-1 |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for name, rows in found.items():
        cells = ""
        for bits in BITS:
            row = rows.get(bits)
            cells += f" {row['kl']:.4f} +- {row['kl_error']:.4f} | {row['kl'] / base[bits]['kl']:.2f} | {row['perplexity']:.2f} | " \
                     f"{100 * row['top1']:.1f} % |" if row else " | | | |"
        lines.append(f"| {name} | {next(iter(rows.values()))['bits']:.2f} |" + cells)
    return "\n".join(lines)


def documents_table(found):
    """KL by document, and of rtn's."""
    base = found["rtn"]
    lines = ["| KL of | " + " | ".join(f"{document} W4A{bits}" for document in accuracy.DOCUMENTS for bits in BITS) + " |",
             "|---|" + "---|" * (2 * len(accuracy.DOCUMENTS))]
    for name, rows in found.items():
        cells = []
        for document in accuracy.DOCUMENTS:
            for bits in BITS:
                kl = rows[bits]["documents"][document]["kl"] if bits in rows else None
                cells.append("" if kl is None else f"{kl:.4f} ({kl / base[bits]['documents'][document]['kl']:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(paths):
    found = rows_of(paths)
    print(methods_table(found), documents_table(found), sep="\n\n")


def spread_labels(wanted, least, low, high):
    """Heights of labels near those wanted, `least` apart, between two ends."""
    placed = []
    for y in wanted:
        placed.append(max(y, placed[-1] + least if placed else low))
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], placed[i + 1] - least if i + 1 < len(placed) else high)
    return placed


STYLE = """<style>text{fill:#333}line{stroke:#ddd}.lead{stroke:#999}.dot{fill:#2a8a63}.peer{fill:#c0632b}
@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#444}.lead{stroke:#777}}</style>"""


def mark(x, y, name, lead=""):
    return f'{lead}<circle class="{"peer" if name.startswith(PEERS) else "dot"}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def panel(points, bits, x0, width, height):
    """KL against bits per weight at one width of activations. Most methods have NVFP4's 4.5 bits: their labels are on the left, those
    of the others above and below in turns."""
    top, bottom, right = 30, height - 44, x0 + width - 16
    least, largest = min(p[0] for p in points), max(p[1] for p in points)
    low, high = least - 0.66, max(p[0] for p in points) + 0.22
    step = next(step for step in (0.02, 0.05, 0.1, 0.2) if largest < 6 * step)
    most = step * (int(largest / step) + 1)
    across = lambda b: x0 + (b - low) / (high - low) * (right - x0)
    down = lambda kl: top + (1 - kl / most) * (bottom - top)
    parts = [f'<text x="{x0}" y="16" font-weight="bold">KL to BF16 (nats), W4A{bits}</text>']
    for i in range(round(most / step) + 1):
        y = down(i * step)
        parts.append(f'<line x1="{x0}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{i * step:.2f}</text>')
    for tick in np.arange(np.ceil(least * 4) / 4, high, 0.25):
        parts.append(f'<text x="{across(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick:.2f}</text>')
    parts.append(f'<text x="{(x0 + right) / 2:.0f}" y="{bottom + 36}" text-anchor="middle">bits per quantized weight</text>')
    points = sorted(points, key=lambda point: -point[1])
    column = [point for point in points if point[0] < least + 0.05]
    for (b, kl, name), at in zip(column, spread_labels([down(kl) for _, kl, _ in column], 14, top, bottom - 4)):
        x, y = across(b), down(kl)
        parts.append(mark(x, y, name, f'<line class="lead" x1="{x:.1f}" y1="{y:.1f}" x2="{x - 18:.1f}" y2="{at:.1f}"/>'))
        parts.append(f'<text x="{x - 21:.1f}" y="{at + 4:.1f}" text-anchor="end">{name} {kl:.3f}</text>')
    for i, (b, kl, name) in enumerate(point for point in points if point not in column):
        x, y = across(b), down(kl)
        side, anchor = (6, "end") if x > right - 130 else (-6, "start")
        parts.append(mark(x, y, name) + f'<text x="{x + side:.1f}" y="{y + (-10, 20)[i % 2]:.1f}" text-anchor="{anchor}">{name} {kl:.3f}</text>')
    return parts


def chart(paths, out):
    """Two panels, W4A16 and W4A4."""
    found, width, height = rows_of(paths), 470, 420
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {height}" font-family="sans-serif" font-size="12">', STYLE]
    for i, bits in enumerate(BITS):
        points = [(rows[bits]["bits"], rows[bits]["kl"], name) for name, rows in found.items() if bits in rows]
        parts += panel(points, bits, i * width + 46, width - 46, height)
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
    commands.add_parser("table").add_argument("files", nargs="+")
    two = commands.add_parser("chart")
    two.add_argument("out")
    two.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments)
    elif arguments.command == "table":
        table(arguments.files)
    else:
        chart(arguments.files, arguments.out)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a small character model on the text beside this file, in BF16 and in NVFP4, and plot both losses.

    python examples/train_tiny.py                            three seeds in BF16 and in NVFP4, then a table and a plot
    python examples/train_tiny.py --variants all --jobs 8    with the ablations, eight runs at a time
    python examples/train_tiny.py --steps 50 --seeds 0       a glimpse
    python examples/train_tiny.py --device cuda --text /usr/lib/python3 --width 768 --heads 12 --blocks 9 --context 512 \\
        --batch 32 --rate 6e-4 --steps 2000 --seeds 0        a larger one, of 64 million parameters, on source text

The model is a transformer, by default of 4 blocks and 3.2 million parameters. Its linear layers are nib.torch.Linear:
in NVFP4 they multiply 4-bit operands in the forward and in the backward pass, here by their codes.
The last tenth of the text is held out. Results go to the directory --out: one file per run, written anew with every
evaluation, results.json, losses.svg and, where runs in BF16 are among them, gaps.svg. A run that is stopped is reported
as far as it came.
"""
import argparse
import hashlib
import json
import lzma
import math
import os
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional

import nib.torch
from nib.torch.recipe import NVFP4BlockScaling

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT = os.path.join(HERE, "text", "pentateuch.txt.xz")

# variant: (which blocks are quantized, recipe, what it is)
NONE, INNER, ALL = "none", "all but the first and the last", "all"
VARIANTS = {
    "bf16": (NONE, {}, "BF16"),
    "nvfp4": (INNER, {}, "NVFP4, first and last block in BF16"),
    "nvfp4-no-sr": (INNER, {"disable_stochastic_rounding": True}, "... without stochastic rounding"),
    "nvfp4-no-rht": (INNER, {"disable_rht": True}, "... without the Hadamard transform"),
    "nvfp4-1d": (INNER, {"disable_2d_quantization": True}, "... with 1x16 blocks of weights"),
    "nvfp4-forward": (INNER, {"backward_override": "high_precision"}, "... in the forward pass alone"),
    "whole": (ALL, {}, "NVFP4 in all blocks"),
    "whole-no-sr": (ALL, {"disable_stochastic_rounding": True}, "... without stochastic rounding"),
    "whole-no-rht": (ALL, {"disable_rht": True}, "... without the Hadamard transform"),
    "whole-1d": (ALL, {"disable_2d_quantization": True}, "... with 1x16 blocks of weights"),
    "whole-forward": (ALL, {"backward_override": "high_precision"}, "... in the forward pass alone"),
}


def quantized_blocks(which, blocks):
    return {NONE: range(0), INNER: range(1, blocks - 1), ALL: range(blocks)}[which]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nib.torch.Linear(width, 3 * width)
        self.out = nib.torch.Linear(width, width)
        self.up = nib.torch.Linear(width, 4 * width)
        self.down = nib.torch.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, symbols, width, heads, blocks, context, quantized, recipe):
        super().__init__()
        self.quantized, self.recipe = quantized, recipe
        self.symbol, self.place = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))  # what is added to the stream, block after block
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * blocks) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, symbols):
        x = self.symbol(symbols) + self.place(torch.arange(symbols.shape[1], device=symbols.device))
        for i, block in enumerate(self.blocks):
            with nib.torch.autocast(enabled=i in self.quantized, recipe=self.recipe):
                x = block(x)
        return self.head(self.norm(x))


def read_directory(directory, most=1 << 27):
    """The Python files below a directory, in an order that has nothing to do with their places, as bytes."""
    found = {}
    for place, _directories, names in os.walk(directory):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(place, name), "rb") as file:
                    content = file.read()
                found[hashlib.sha256(content).digest()] = content  # every content once
    return b"\n".join(found[key] for key in sorted(found))[:most]


def read_text(where):
    """(training part, held-out part, symbols, facts: bytes, hash, entropy of its unigrams in nats). The held-out part is
    the last tenth, at most four million characters."""
    if os.path.isdir(where):
        text = read_directory(where)
    else:
        with lzma.open(where, "rb") as file:
            text = file.read()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    counts = torch.bincount(data.int(), minlength=256)
    shares = counts[counts > 0].double() / len(data)
    symbols = counts.nonzero().flatten().tolist()
    index = torch.zeros(256, dtype=torch.uint8)
    index[symbols] = torch.arange(len(symbols), dtype=torch.uint8)
    data = index[data.int()]
    cut = max(len(data) * 9 // 10, len(data) - (1 << 22))
    return data[:cut], data[cut:], symbols, {"text_bytes": len(text), "text_sha256": hashlib.sha256(text).hexdigest(),
                                             "entropy": float(-(shares * shares.log()).sum())}


def loss_of(model, data, at, context, device):
    """The mean loss of the characters that follow those of windows."""
    windows = torch.stack([data[i:i + context + 1] for i in at]).to(device).long()
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, data, context, device, batch, most=None):
    """Over windows side by side, as many as fill batches."""
    starts = list(range(0, len(data) - context, context))
    starts = starts[:(len(starts) if most is None else min(most, len(starts))) // batch * batch]
    model.eval()
    losses = [loss_of(model, data, starts[i:i + batch], context, device).item() for i in range(0, len(starts), batch)]
    model.train()
    return sum(losses) / len(losses)


def write_json(value, path):
    """In one piece, or not at all."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(path + ".new", path)


def train(variant, seed, options):
    """One run, whose file is up to date after every evaluation."""
    which, changes, _ = VARIANTS[variant]
    quantized = quantized_blocks(which, options.blocks)
    training, held_out, symbols, facts = read_text(options.text)
    device, context, batch, steps = options.device, options.context, options.batch, options.steps
    torch.manual_seed(seed)  # of the weights; stochastic rounding draws from the same generator
    model = Model(len(symbols), options.width, options.heads, options.blocks, context, quantized,
                  NVFP4BlockScaling(**changes)).to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=options.rate, betas=(0.9, 0.95), fused=device != "cpu")
    result = {"variant": variant, "seed": seed, "steps": steps, "batch": batch, "context": context,
              "rate": options.rate, "width": options.width, "blocks": options.blocks, "device": device,
              "torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters()), **facts}

    def record(loss):
        write_json({**result, "loss": loss, "done": len(losses), "seconds": round(time.time() - start, 1),
                    "seconds_per_step": round(statistics.median(times), 4), "training": losses, "held_out": checks},
                   os.path.join(options.out, f"run-{variant}-{seed}.json"))

    draw = torch.Generator().manual_seed(1000 + seed)  # the same windows for every variant
    losses, checks, times, start = [], [], [], time.time()
    for step in range(steps):
        began = time.time()
        warm, done = min(1.0, (step + 1) / max(1, steps // 20)), step / steps
        for group in optimizer.param_groups:
            group["lr"] = options.rate * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        at = torch.randint(len(training) - context, (batch,), generator=draw).tolist()
        loss = loss_of(model, training, at, context, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(round(loss.item(), 5))
        times.append(time.time() - began)
        if (step + 1) % max(1, steps // 20) == 0 and step + 1 < steps:
            checks.append((step + 1, round(held_out_loss(model, held_out, context, device, batch, 8 * batch), 5)))
            print(f"{variant} seed {seed} step {step + 1}: training {losses[-1]:.3f}, held out {checks[-1][1]:.3f}, "
                  f"{statistics.median(times):.3f} s/step", flush=True)
            record(checks[-1][1])
    final = held_out_loss(model, held_out, context, device, batch)
    checks.append((steps, round(final, 5)))
    record(final)
    print(f"{variant} seed {seed}: {final:.4f} nats per character held out", flush=True)


# ---- Runs ------------------------------------------------------------------------------------------------


def run_all(options, work):
    """Every run in a process of its own, `jobs` at a time, the long ones first."""
    waiting = sorted(work, key=lambda w: -len(quantized_blocks(VARIANTS[w[0]][0], options.blocks)))
    running, failed = {}, []
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            variant, seed = waiting.pop(0)
            command = [sys.executable, os.path.abspath(__file__), "--one", variant, "--seeds", str(seed)]
            for name in ("steps", "batch", "context", "rate", "width", "heads", "blocks", "text", "device", "threads",
                         "out"):
                command += [f"--{name}", str(getattr(options, name))]
            running[variant, seed] = subprocess.Popen(command, env=env)
        for key, process in list(running.items()):
            if process.poll() is not None:
                del running[key]
                if process.returncode:
                    failed.append(key)
        time.sleep(0.2)
    return failed


def collect(directory):
    """The runs in a directory: {variant: {seed: result}}."""
    runs = {}
    for name in sorted(os.listdir(directory)):
        if name.startswith("run-") and name.endswith(".json"):
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                result = json.load(file)
            runs.setdefault(result["variant"], {})[result["seed"]] = result
    return runs


def table(runs):
    """The runs against BF16 with the same seed, as Markdown."""
    lines = ["| variant | held-out loss by seed | median | gap to BF16 by seed | median gap |", "|---|---|---|---|---|"]
    for variant, (_, _, what) in VARIANTS.items():
        runs_of = {seed: run for seed, run in sorted(runs.get(variant, {}).items()) if run["done"] == run["steps"]}
        if not runs_of:
            continue
        losses = {seed: run["loss"] for seed, run in runs_of.items()}
        base = {seed: run["loss"] for seed, run in runs.get("bf16", {}).items() if run["done"] == run["steps"]}
        gaps = [100 * (loss / base[seed] - 1) for seed, loss in losses.items() if seed in base]
        lines.append(f"| `{variant}`: {what} | {', '.join(f'{loss:.4f}' for loss in losses.values())} "
                     f"| {statistics.median(losses.values()):.4f} | {', '.join(f'{gap:+.2f} %' for gap in gaps)} "
                     f"| {f'{statistics.median(gaps):+.2f} %' if gaps else ''} |")
    return "\n".join(lines)


# ---- Plot ------------------------------------------------------------------------------------------------

COLORS = {"bf16": "#222222", "nvfp4": "#c23b22", "nvfp4-no-sr": "#e08a1e", "nvfp4-no-rht": "#2f8f4e",
          "nvfp4-1d": "#8a4fbf", "nvfp4-forward": "#999999", "whole": "#2266aa", "whole-no-sr": "#e0b41e",
          "whole-no-rht": "#6fbf4f", "whole-1d": "#bf4f9f", "whole-forward": "#bbbbbb"}


class Picture:
    """Curves over steps as SVG."""
    WIDE, HIGH, LEFT, TOP, RIGHT, BOTTOM = 820, 480, 60, 30, 20, 50

    def __init__(self, steps, low, high, distance, caption, legend=WIDE - 330):
        """distance: of the marks at the left; legend: where entries begin."""
        self.steps, self.low, self.high, self.entries, self.legend = steps, low, high, 0, legend
        self.out = ['<svg xmlns="http://www.w3.org/2000/svg" '
                    f'width="{self.WIDE}" height="{self.HIGH}" font-family="sans-serif" font-size="12">',
                    '<rect width="100%" height="100%" fill="white"/>']
        for i in range(math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9) + 1):
            x, y = self.place(0, i * distance).split(",")
            self.out.append(f'<path d="M{x},{y} H{self.WIDE - self.RIGHT}" stroke="#dddddd"/>'
                            f'<text x="{self.LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">'
                            f'{round(i * distance, 2):g}</text>')
        for i in range(5):
            x, y = self.place(steps * i / 4, low).split(",")
            self.out.append(f'<text x="{x}" y="{float(y) + 18:.1f}" text-anchor="middle">{round(steps * i / 4)}</text>')
        self.out.append(f'<text x="{(self.LEFT + self.WIDE - self.RIGHT) / 2}" y="{self.HIGH - 10}" '
                        f'text-anchor="middle">{caption}</text>')

    def place(self, step, value):
        x = self.LEFT + (self.WIDE - self.LEFT - self.RIGHT) * step / self.steps
        share = (self.high - min(max(value, self.low), self.high)) / (self.high - self.low)
        return f"{x:.1f},{self.TOP + (self.HIGH - self.TOP - self.BOTTOM) * share:.1f}"

    def level(self, value, text):
        y = self.place(0, value).split(",")[1]
        self.out.append(f'<path d="M{self.LEFT},{y} H{self.WIDE - self.RIGHT}" stroke="#888888" stroke-dasharray="6 4"/>'
                        f'<text x="{self.WIDE - self.RIGHT}" y="{float(y) - 5:.1f}" text-anchor="end">{text}</text>')

    def curve(self, points, color, dashed=False):
        style = ' stroke-dasharray="4 3"' if dashed else ""
        self.out.append(f'<path d="M{" L".join(self.place(*point) for point in points)}" fill="none" '
                        f'stroke="{color}"{style}/>')

    def dots(self, points, color):
        for point in points:
            x, y = self.place(*point).split(",")
            self.out.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>')

    def entry(self, text, color):
        self.entries += 1
        y = self.TOP - 2 + 18 * self.entries
        self.out.append(f'<path d="M{self.legend},{y - 4} h30" stroke="{color}" stroke-width="2"/>'
                        f'<text x="{self.legend + 40}" y="{y}">{text}</text>')

    def write(self, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join([*self.out, "</svg>"]) + "\n")


def plot_losses(runs, path):
    """Training losses (means of neighboring steps, first seed) and held-out losses (dots)."""
    chosen = {variant: next(iter(runs[variant].values())) for variant in ("bf16", "nvfp4", "whole") if variant in runs}
    if not chosen:
        return
    entropy = next(iter(chosen.values()))["entropy"]
    low = math.floor(10 * min(min(run["training"]) for run in chosen.values())) / 10
    steps = max(run["steps"] for run in chosen.values())
    picture = Picture(steps, low, max(entropy, low + 0.1), 0.2,
                      "step (lines: training loss, dots: held-out loss, in nats per character)")
    picture.level(0.6 * entropy, "60 % of the unigram entropy")
    span = max(1, steps // 100)
    for variant, run in chosen.items():
        means = [(at + span / 2, statistics.fmean(run["training"][at:at + span]))
                 for at in range(0, run["done"] - span + 1, span)]
        picture.curve(means, COLORS[variant])
        picture.dots(run["held_out"], COLORS[variant])
        picture.entry(f"{VARIANTS[variant][2]}: {run['loss']:.3f}", COLORS[variant])
    picture.write(path)


def plot_gaps(runs, path):
    """How far above BF16 with the same seed the held-out loss is, in percent; other seeds than the first are dashed."""
    gaps = {}
    for variant, by_seed in runs.items():
        for seed, run in by_seed.items():
            base = dict(map(tuple, runs.get("bf16", {}).get(seed, {}).get("held_out", [])))
            points = [(step, 100 * (loss / base[step] - 1)) for step, loss in run["held_out"] if step in base]
            if variant != "bf16" and points:
                gaps.setdefault(variant, []).append(points)
    if not gaps:
        return
    steps = max(run["steps"] for by_seed in runs.values() for run in by_seed.values())
    later = [gap for curves in gaps.values() for points in curves for step, gap in points if step > steps // 5] or [0.0]
    high = math.ceil(2 * max(later)) / 2 + 0.5
    picture = Picture(steps, min(0.0, math.floor(2 * min(later)) / 2), high, 0.25 if high < 3 else 0.5,
                      "step (held-out loss above that of BF16 with the same seed, in percent)", legend=80)
    for variant in (one for one in VARIANTS if one in gaps):
        for i, points in enumerate(gaps[variant]):
            picture.curve(points, COLORS[variant], dashed=i > 0)
        picture.entry(f"{variant}: {', '.join(f'{points[-1][1]:+.2f} %' for points in gaps[variant])}", COLORS[variant])
    picture.write(path)


def report(options):
    """Table, results.json and plot of what the directory holds."""
    runs = collect(options.out)
    first = next(iter(next(iter(runs.values())).values()))
    for variant, run in ((variant, run) for variant, by_seed in runs.items() for run in by_seed.values()):
        if run["done"] < run["steps"]:
            print(f"{variant} seed {run['seed']} stopped after step {run['done']} of {run['steps']}")
    print(f"{first['parameters']} parameters, {first['steps']} steps of {first['batch']} x {first['context']} "
          f"characters; unigram entropy {first['entropy']:.4f} nats, 60 % of it {0.6 * first['entropy']:.4f}")
    print(table(runs))
    write_json([run for by_seed in runs.values() for run in by_seed.values()], os.path.join(options.out, "results.json"))
    plot_losses(runs, os.path.join(options.out, "losses.svg"))
    plot_gaps(runs, os.path.join(options.out, "gaps.svg"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="bf16,nvfp4", help=f"of {', '.join(VARIANTS)}; all")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--context", type=int, default=128, help="characters per window")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--text", default=TEXT, help="an .xz file, or a directory: the Python files below it")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, where libnib_cuda is needed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="of each run")
    parser.add_argument("--out", default="train_tiny.out")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true", help="only table and plot of what the directory holds")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    os.makedirs(options.out, exist_ok=True)
    if options.one:
        torch.set_num_threads(options.threads)
        train(options.one, seeds[0], options)
        return 0
    if not options.report:
        variants = list(VARIANTS) if options.variants == "all" else options.variants.split(",")
        unknown = [variant for variant in variants if variant not in VARIANTS]
        if unknown:
            parser.error(f"no variant {unknown[0]}: {', '.join(VARIANTS)}")
        failed = run_all(options, [(variant, seed) for variant in variants for seed in seeds])
        for variant, seed in failed:
            print(f"{variant} seed {seed} failed", file=sys.stderr)
        if failed:
            return 1
    report(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

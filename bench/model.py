#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A language model from its packed NVFP4 weights, beside transformers' BF16: the section of docs/performance.md.

    model.py prepare DIR NIB           DIR/smollm2.gguf (of bench/accuracy.py prepare) as BF16, NVFP4 and dequantized directories
    model.py measure DIR OUT.json      memory, speed, bounds and KL, on one thread by its processor time
    model.py table FILE.json PAGE.md   put the section into a page

Needs PyTorch, transformers, gguf (accelerate, to prepare), and libnib as nib's Python package finds it. Measured are: what the packed
weights of the linear layers take; those layers at M = 1, one after the other as a token passes them, beside torch's in BF16; tokens per
second of generate(); every layer on the inputs that text gives it against the dequantized one, with the bound of docs/numerics.md;
block fixed point beside activations in BF16; KL(dequantized || packed) beside KL(BF16 || dequantized); and a training step of
nib.torch.Linear beside torch's.
"""
import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time

from performance import put

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python"))
DOCUMENTS = ("pentateuch", "jargon", "debian-reference")


def prepare(directory, tool):
    import torch
    import transformers
    path = os.path.abspath(directory)
    given = {"gguf_file": "smollm2.gguf"}
    whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **given)
    config = whole.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(whole)(config).bfloat16()
    plain.load_state_dict({name: value.bfloat16() for name, value in whole.state_dict().items()})
    plain.tie_weights()
    plain.save_pretrained(os.path.join(directory, "bf16"))
    transformers.AutoTokenizer.from_pretrained(path, **given).save_pretrained(os.path.join(directory, "bf16"))
    for command in (["quantize", "bf16", "nvfp4"], ["dequantize", "nvfp4", "dequantized"]):
        subprocess.run([tool, command[0], "-q", "-f", *(os.path.join(directory, name) for name in command[1:])], check=True)


# ---- measure ----------------------------------------------------------------------------------------------------------------


def alternate(*functions, rounds=15):
    """The median processor time of each, one after the other in every round."""
    times = [[] for _ in functions]
    for number in range(rounds + 1):
        for function, found in zip(functions, times):
            begin = time.process_time()
            function()
            if number:
                found.append(time.process_time() - begin)
    return [statistics.median(found) for found in times]


def measure_layers(torch, packed, plain, m=1):
    from nib.torch.packed import PackedLinear
    there = dict(plain.named_modules())
    rows = [(module, there[name], torch.randn(m, module.in_features).bfloat16())
            for name, module in packed.named_modules() if isinstance(module, PackedLinear)]
    mine, theirs = alternate(lambda: [mine(x) for mine, _, x in rows], lambda: [theirs(x) for _, theirs, x in rows])
    return {"layers": len(rows), "nib_ms": 1e3 * mine, "torch_ms": 1e3 * theirs, "ratio": theirs / mine}


def measure_generation(packed, plain, tokens, count=32):
    def run(model):
        model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    mine, theirs = alternate(lambda: run(packed), lambda: run(plain), rounds=3)
    return {"tokens": count, "nib_per_s": count / mine, "torch_per_s": count / theirs, "ratio": theirs / mine}


def bound_of(torch, x, matrix):
    """docs/numerics.md 14: of a product in block fixed point, the result in FP32, for each output."""
    values = matrix.dequantize().double()
    k, u = x.shape[1], 2.0 ** -24
    terms = -(-k // 16) + 4
    sums = x.double().abs() @ values.abs().t()
    amax = x.double().abs().unflatten(1, (-1, 16)).amax(-1)
    blocks = values.abs().unflatten(1, (-1, 16)).sum(-1)
    return terms * u / (1 - terms * u) * sums + 2.0 ** -14 * amax @ blocks.t()


def measure_inputs(torch, packed, tokens):
    """Every layer on its own input: the largest part of the bound that is used, and RMS errors of block fixed point and of activations
    in BF16 against exact ones, relative to the RMS of the output; of the first token alone too."""
    from nib.torch.packed import PackedLinear
    inputs, hooks = {}, []
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear):
            hooks.append(module.register_forward_pre_hook(
                lambda _, given, name=name: inputs.update({name: given[0][0].float()})))
    packed(tokens)
    for hook in hooks:
        hook.remove()
    used, sums = 0.0, {"block": [0.0, 0.0], "bf16": [0.0, 0.0], "power": [0.0, 0.0]}
    for name, x in inputs.items():
        matrix = packed.get_submodule(name).matrix
        exact = x.double() @ matrix.dequantize().double().t()
        error = matrix.product(x).double() - exact
        used = max(used, float((error.abs() / bound_of(torch, x, matrix)).max()))
        rounded = x.bfloat16().double() @ matrix.dequantize().double().t() - exact
        for i, rows in enumerate((slice(None), slice(1))):  # all tokens, and the first
            for what, values in (("block", error), ("bf16", rounded), ("power", exact)):
                sums[what][i] += float(values[rows].square().sum())
    return {"layers": len(inputs), "of_the_bound": used,
            **{f"{what}_{of}": (sums[what][i] / sums["power"][i]) ** 0.5
               for what in ("block", "bf16") for i, of in enumerate(("all", "first"))}}


def measure_kl(torch, directory, windows, length, dtype):
    import transformers

    import nib.torch
    from nib import evaluate
    tokenizer = transformers.AutoTokenizer.from_pretrained(os.path.join(directory, "bf16"))
    documents = {}
    for name in DOCUMENTS:
        with open(os.path.join(directory, name + ".txt"), encoding="utf-8") as text:
            documents[name] = evaluate.windows(tokenizer, text.read(8 * windows * length), length, windows)
    whole, values = (transformers.AutoModelForCausalLM.from_pretrained(os.path.join(directory, name), dtype=dtype)
                     for name in ("bf16", "dequantized"))
    packed = nib.torch.from_pretrained(os.path.join(directory, "nvfp4"), dtype=dtype)

    def logits(model):
        return lambda tokens: model(tokens, use_cache=False).logits
    own = evaluate.summarize(evaluate.evaluate(logits(values), logits(packed), documents))
    cost = evaluate.summarize(evaluate.evaluate(logits(whole), logits(values), documents))
    return {"positions": own["positions"], "kl_packed": own["kl"], "kl_quantized": cost["kl"], "ratio": own["kl"] / cost["kl"]}


def measure_products(torch, size=4096, rows=(1, 4, 16, 64, 512)):
    """GFLOP/s of products with one weight, the library's beside torch's."""
    import nib.torch
    from nib.torch.packed import Matrix
    weight = torch.randn(size, size)
    quantized = nib.torch.NVFP4Quantizer(columnwise=False)(weight)
    scale = float(quantized._amax_rowwise) / 2688
    matrix = Matrix.of(quantized._rowwise_data.view(torch.uint8), quantized._rowwise_scale_inv.view(torch.uint8)[:size, :size // 16],
                       torch.full((size,), scale), torch.full((size,), float("nan")), "bf16")
    half, found = weight.bfloat16(), []
    for m in rows:
        x = torch.randn(m, size)
        codes, bf16 = nib.torch.NVFP4Quantizer(columnwise=False)(x), x.bfloat16()
        times = alternate(lambda: nib.torch.products.multiply(codes, quantized), lambda: matrix(bf16),
                          lambda: torch.nn.functional.linear(bf16, half), lambda: torch.nn.functional.linear(x, weight),
                          rounds=9 if m < 512 else 3)
        found.append({"m": m, **dict(zip(("w4a4", "w4a16", "torch_bf16", "torch_f32"), (2e-9 * m * size * size / t for t in times)))})
    return found


def measure_training(torch):
    import nib.torch
    x = torch.randn(512, 4096).bfloat16().requires_grad_()
    gradient = torch.randn(512, 4096).bfloat16()
    mine = nib.torch.Linear(4096, 4096, bias=False, params_dtype=torch.bfloat16)
    theirs = torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)

    def quantized():
        with nib.torch.autocast(recipe=nib.torch.recipe.NVFP4BlockScaling()):
            y = mine(x)
        y.backward(gradient)
    here, there = alternate(quantized, lambda: theirs(x).backward(gradient), rounds=7)
    return {"nib_s": here, "torch_s": there, "ratio": here / there}


def measure(arguments):
    import torch
    import transformers

    import nib.torch
    from nib.torch.packed import packed_bytes
    torch.set_num_threads(1)
    torch.manual_seed(1)
    directory = arguments.directory
    figures = {"date": str(datetime.date.today()), "torch": torch.__version__, "transformers": transformers.__version__,
               "machine": machine(), "load": os.getloadavg()[2], "training": measure_training(torch)}
    with torch.inference_mode():
        figures["products"] = measure_products(torch)
    packed = nib.torch.from_pretrained(os.path.join(directory, "nvfp4"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(directory, "bf16"), dtype=torch.bfloat16)
    exact = nib.torch.from_pretrained(os.path.join(directory, "nvfp4"), dtype=torch.float32)  # inputs before they are rounded
    taken, weights = packed_bytes(packed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(os.path.join(directory, "bf16"))
    with open(os.path.join(directory, "jargon.txt"), encoding="utf-8") as text:
        tokens = tokenizer(text.read(4096), return_tensors="pt").input_ids[:, :256]
    with torch.inference_mode():
        figures |= {"memory": {"bytes": taken, "ratio": taken / (2 * weights)}, "layers": measure_layers(torch, packed, plain),
                    "generation": measure_generation(packed, plain, tokens[:, :16]), "inputs": measure_inputs(torch, exact, tokens),
                    "kl": {name: measure_kl(torch, directory, arguments.windows, arguments.length, getattr(torch, name))
                           for name in ("float32", "bfloat16")}}
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=1)
        file.write("\n")
    print(section(figures))


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        found = re.search(r"model name\s*: (.*)", file.read())
    return found[1] if found else platform.machine()


# ---- table ------------------------------------------------------------------------------------------------------------------


def section(f):
    """The section of docs/performance.md."""
    def verdict(holds):
        return "holds" if holds else "**does not hold**"
    inputs, kl = f["inputs"], f["kl"]
    rows = [
        ("packed weights of the linear layers, of BF16's", f"{f['memory']['ratio']:.3f}", "at most 0.35", f["memory"]["ratio"] <= 0.35),
        (f"its {f['layers']['layers']} linear layers at M = 1, times torch's BF16", f"{f['layers']['ratio']:.2f}", "at least 3",
         f["layers"]["ratio"] >= 3),
        (f"tokens per second of generate(), times BF16's ({f['generation']['torch_per_s']:.1f})", f"{f['generation']['ratio']:.2f}",
         "at least 1.4", f["generation"]["ratio"] >= 1.4),
        ("largest error of a layer, of its bound", f"{inputs['of_the_bound']:.3f}", "at most 1", inputs["of_the_bound"] <= 1),
        *((f"KL(dequantized \\|\\| packed) of KL(BF16 \\|\\| dequantized), {name}", f"{kl[name]['ratio']:.1e}", "at most 0.01",
           kl[name]["ratio"] <= 0.01) for name in kl),
        ("Linear 4096 to 4096, M = 512, forward and backward, times torch's BF16", f"{f['training']['ratio']:.2f}", "at most 1.3",
         f["training"]["ratio"] <= 1.3)]
    lines = ["## A model\n", f"SmolLM2-135M quantized by `nib quantize` and run by `nib.torch.from_pretrained`, beside transformers' BF16 on the same "
             f"thread, by its processor time (`bench/model.py`; {f['date']}, {f['machine']}, PyTorch {f['torch']}, transformers "
             f"{f['transformers']}; a load of {f['load']:.0f} on the machine).\n", "| figure | is | bar | |", "|---|---|---|---|"]
    lines += [f"| {what} | {value} | {bar} | {verdict(holds)} |" for what, value, bar, holds in rows]
    lines.append(f"\nBlock fixed point on the layers' own inputs: outputs differ from those of exact activations by {inputs['block_all']:.1e} of their "
                 f"RMS, where activations rounded to BF16 differ by {inputs['bf16_all']:.1e}; of first tokens alone {inputs['block_first']:.1e} and "
                 f"{inputs['bf16_first']:.1e}.\n")
    lines += ["Products with a weight of 4096 x 4096, GFLOP/s on the same thread; torch's weights are BF16 and F32:\n",
              "| M | W4A4 | W4A16 | torch BF16 | torch F32 | W4A4 : BF16 | W4A16 : BF16 |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {p['m']} | {p['w4a4']:.0f} | {p['w4a16']:.0f} | {p['torch_bf16']:.0f} | {p['torch_f32']:.0f} | "
              f"{p['w4a4'] / p['torch_bf16']:.2f} | {p['w4a16'] / p['torch_bf16']:.2f} |" for p in f["products"]]
    return "\n".join(lines) + "\n"


def table(path, page):
    with open(path, encoding="utf-8") as file:
        put(page, section(json.load(file)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("directory")
    one.add_argument("tool")
    one = commands.add_parser("measure")
    one.add_argument("directory")
    one.add_argument("out")
    one.add_argument("--windows", type=int, default=2, help="of a document (%(default)s)")
    one.add_argument("--length", type=int, default=512, help="tokens of a window (%(default)s)")
    one = commands.add_parser("table")
    one.add_argument("file")
    one.add_argument("page")
    given = parser.parse_args()
    if given.command == "prepare":
        prepare(given.directory, given.tool)
    elif given.command == "measure":
        measure(given)
    else:
        table(given.file, given.page)


if __name__ == "__main__":
    main()

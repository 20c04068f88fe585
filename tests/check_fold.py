#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`nib quantize --fold`: a folded model is the model that it was.

    check_fold.py LIBNIB NIB [FAMILY]...

Tiny models of transformers, stored in FP32, computed in FP64. Scales are between 1/8 and 8; what the tool wrote, norms,
routers and biases as they are in its output and weights by the scales of its nib-fold.scales, must give the same logits,
and with the scales of one reader left out it must not. Then in BF16, with scales as they are by default: the tool's own
checks, and transformers, which must load what was quantized and folded as what `nib dequantize` makes of it.
Without names the marked families run, in a campaign (NIB_CAMPAIGN=1) all.
"""
import json
import os
import re
import shutil
import sys
import tempfile
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_families as families
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# One for each way in which families differ; FEW: what `make test` has.
FAMILIES = {
    "llama": "", "mistral": "", "ministral3": "", "qwen2": "few biases of q, k, v", "qwen3": "", "phi3": "few one matrix for gate and up",
    "smollm3": "", "granite": "", "seed_oss": "", "helium": "", "ernie4_5": "", "glm": "", "glm4": "", "stablelm": "few LayerNorm with bias",
    "starcoder2": "", "gpt_neox": "few no gate", "nemotron": "few LayerNorm of 1 + w", "gemma": "few 1 + w", "gemma2": "",
    "gemma3_text": "few four norms", "gemma3": "", "cohere": "few a parallel block", "cohere2": "", "phi": "few parallel, with biases",
    "mixtral": "few w1, w2, w3", "phimoe": "", "olmoe": "", "qwen2_moe": "few a shared expert and its gate", "qwen3_moe": "few a router",
    "qwen3_next": "few 1 + w and a router", "deepseek_v2": "", "deepseek_v3": "few latent attention", "glm4_moe": "", "dots1": "",
    "gpt_oss": "few stacks with biases",
}  # yapf: disable
NOT_IN_BF16 = ("nemotron", )  # 1 + w and a bias: not exact in 16 bits
BOUND, NOTICED = 1e-5, 1e-2
IN_FP32 = {"qwen3_next": 1e-4}  # transformers computes its linear attention in FP32, whatever the model is
SCALES = "nib-fold.scales"


def make(row, dtype):
    """Every parameter matters: none is 0 or 1, and matrices keep the size of what they multiply."""
    name, _, wanted, _, special = row
    torch.manual_seed(families.SEED)
    config = families.shrunk(CONFIG_MAPPING[name], special)
    if hasattr(config, "logit_scale"):
        config.logit_scale = 1.0
    model = families.model_class(name, wanted)(config).to(dtype).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter.shape[-1]**-0.5)
            elif path.endswith("norm.weight") or "layernorm" in path and path.endswith("weight"):
                parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
            elif parameter.std() == 0:
                parameter.normal_(0, 0.1)
    return model


def logits(model):
    if any("experts" in name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # others have no FP64
    with torch.no_grad():
        return model(input_ids=torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(1))).logits.double()


def write_statistics(path, rows, spread):
    """Mean squares whose roots are between 1 / spread and spread."""
    draw, tensors, inputs = torch.Generator().manual_seed(2), {}, {}
    for row in rows:
        if row["action"] != "quantize":
            continue
        roots = spread**(2 * torch.rand(row["cols"], generator=draw) - 1)
        roots[:2] = torch.tensor([1 / spread, spread])
        tensors[row["name"] + ".sum2"] = (roots**2 * 64).reshape(1, -1)
        tensors[row["name"] + ".count"] = torch.tensor([64])
        tensors[row["name"] + ".amaxk"] = roots.reshape(1, -1) * 4
        inputs[row["name"]] = row["name"]
    save_file(tensors, path, {"format": "nib-stats-1", "inputs": json.dumps(inputs)})


def read_scales(out):
    with safe_open(os.path.join(out, SCALES), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        maps = {key: json.loads(file.metadata()[key]) for key in ("columns", "rows")}
    return {key: {weight: tensors[name] for weight, name in found.items()} for key, found in maps.items()}, maps["columns"]


def folded_tensors(source, written, scales, quantized, left_out=None):
    """The source's tensors as folding leaves them: what the output has, and weights that it quantized by their scales."""
    result = {}

    def scaled(name, tensor):
        if name in scales["rows"]:
            tensor = tensor / scales["rows"][name][:, None]
        return tensor * scales["columns"][name] if name in scales["columns"] and kind(name) != left_out else tensor

    for name, tensor in source.items():
        module = name.removesuffix(".weight")
        if module in quantized:
            result[name] = scaled(module, tensor)
        elif name in written and written[name].shape == tensor.shape:
            own = scales["columns"].get(module)
            result[name] = tensor if own is not None and kind(module) == left_out else written[name]
        elif name.endswith(".experts.gate_up_proj"):  # gpt-oss: [experts, inputs, outputs], gate and up in turns
            result[name] = tensor.clone()
            for i, part in enumerate(("gate_proj", "up_proj")):
                expert = module.replace("gate_up_proj", "0." + part)
                if kind(expert) != left_out:
                    result[name][:, :, i::2] *= scales["columns"][expert][None, :, None]
        else:
            result[name] = tensor  # biases of stacks, and its down
    return result


def kind(name):
    return re.sub(r"experts\.\d+\.", "experts.", name)


def model_of(kind_of_model, place, config, tensors):
    shutil.rmtree(place, ignore_errors=True)
    os.makedirs(place)
    shutil.copy(os.path.join(config, "config.json"), place)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, os.path.join(place, "model.safetensors"), {"format": "pt"})
    return kind_of_model.from_pretrained(place, dtype=torch.float32).double().eval()


def plan_of(source, *options):
    return json.loads(families.must("quantize", "-n", "--json", *options, source, source + "-none"))


def check_exact(row, place):
    """(logits' difference, the smallest with a reader left out, folded norms)"""
    model = make(row, torch.float32)
    source, out, stats = (os.path.join(place, part) for part in ("f32", "folded", "stats"))
    model.save_pretrained(source)
    wanted = logits(model.double())
    if not wanted.std() > 0.1:
        raise families.Failed(f"logits are too small to tell: {wanted.std()}")
    write_statistics(stats, plan_of(source)["rows"], 8)
    plan = json.loads(families.must("quantize", "--json", "--imatrix", stats, "--fold-exponent", "1", source, out))
    quantized = {r["name"] for r in plan["rows"] if r["action"] == "quantize"}
    scales, names = read_scales(out)
    before, written = families.tensors_of(source), families.tensors_of(out)
    again = model_of(type(model), os.path.join(place, "again"), source, folded_tensors(before, written, scales, quantized))
    difference = (logits(again) - wanted).abs().max().item()
    if difference > IN_FP32.get(row[0], BOUND):
        raise families.Failed(f"logits differ by {difference:.3g}")
    norms = {norm for norm in names.values() if "norm" in norm}
    readers = {kind(weight) for weight, norm in names.items() if "norm" in norm and re.search(r"layers\.0\.", weight)}
    least = float("inf")
    for reader in sorted(readers):
        broken = model_of(type(model), os.path.join(place, "again"), source, folded_tensors(before, written, scales, quantized, reader))
        least = min(least, (logits(broken) - wanted).abs().max().item())
        if least < NOTICED:
            raise families.Failed(f"without the scales of {reader} logits differ by {least:.3g} only")
    extremes = torch.cat([s for s in scales["columns"].values()])
    if not (extremes.min() < 0.2 and extremes.max() > 5):
        raise families.Failed(f"scales are from {extremes.min()} to {extremes.max()}")
    return difference, least, len(norms), len(names), plan


def check_tool(row, place):
    """In BF16, by default: checks against the original, and transformers."""
    model = make(row, torch.bfloat16)
    source, out, back, stats = (os.path.join(place, part) for part in ("bf16", "nvfp4", "back", "stats"))
    model.save_pretrained(source)
    options = []
    status, _, errors = families.nib("quantize", "-n", "--for", "transformers", source, out)
    if status == 0:
        options = ["--for", "transformers"]
    write_statistics(stats, plan_of(source, *options)["rows"], 32)
    status, _, errors = families.nib("quantize", "-q", "--imatrix", stats, "--fold", *options, source, out)
    if status and row[0] in NOT_IN_BF16 and "nothing in it that could be folded" in errors:
        return "not folded"
    if status:
        raise families.Failed(f"nib quantize: exit {status}: {errors}")
    before = families.headers(source)
    problems = families.judge_output(source, before, out, back)
    compared = json.loads(families.must("compare", "--json", source, out))
    if not compared["sqnr_db"] > 15:
        problems.append(f"compare does not undo the scales: {compared['sqnr_db']} dB")
    os.rename(os.path.join(out, SCALES), os.path.join(place, SCALES))
    status, output, _ = families.nib("check", out, "--against", source)
    if status == 0:
        problems.append("without its scales a folded checkpoint passes for the original")
    os.rename(os.path.join(place, SCALES), os.path.join(out, SCALES))
    problems += check_plain(source, out, stats)
    if problems:
        raise families.Failed("; ".join(problems))
    if not options:
        return "not for transformers"
    verdict, detail = families.load_and_compare(type(model), out, back)
    if verdict not in ("exact", "exact, dequantized"):
        raise families.Failed(f"transformers: {verdict}: {detail}")
    return verdict


def check_plain(source, out, stats):
    """Weights that stay are scaled as they would be if they were quantized."""
    names = [row["name"] for row in plan_of(source)["rows"] if row["action"] == "quantize"]
    ends = [end for end in (".down_proj", ".w2", ".q_proj") if any(name.endswith(end) for name in names)]
    if not ends:
        return []
    scales = []
    for place, chosen in ((out + "-all", []), (out + "-plain", ["--plain", "*" + ends[0]])):
        families.must("quantize", "-q", "--imatrix", stats, "--fold", *chosen, source, place)
        with open(os.path.join(place, SCALES), "rb") as file:
            scales.append(file.read())
    status, said, errors = families.nib("check", out + "-plain", "--against", source)
    return (["--plain: other scales"] if scales[0] != scales[1] else []) + ([f"--plain: {said}{errors}"] if status else [])


def main():
    families.TOOL = os.path.abspath(sys.argv[2])
    torch.set_num_threads(1)
    everything = os.environ.get("NIB_CAMPAIGN") == "1"
    wanted = sys.argv[3:] or [name for name, why in FAMILIES.items() if everything or why.startswith("few")]
    rows = {row[0]: row for row in families.FAMILIES}
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="nib-fold-") as work:
        for name in wanted:
            place = os.path.join(work, name)
            os.makedirs(place)
            for check in (check_exact, check_tool):
                try:
                    result = check(rows[name], place)
                    passed += 1
                    print(f"{name:14} {check.__name__}: {result[:4] if check is check_exact else result}", flush=True)
                except Exception as error:
                    failed += 1
                    print(f"FAILED {name}: {check.__name__}: {error if isinstance(error, families.Failed) else traceback.format_exc()}", flush=True)
            shutil.rmtree(place)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""nib.calibrate --budget: what a unit is worth is what a model of transformers says, and the best for a byte are
taken."""
import json
import os

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import nib  # noqa: E402
from nib import budget, calibrate, layerwise  # noqa: E402
from test_torch_calibrate import save_model  # noqa: E402

TOKENS = torch.randint(3, 120, (24, 24), generator=torch.Generator().manual_seed(5))


def kl(directory, reference, out):
    nib.dequantize_checkpoint(directory, out, dtype="f32", force=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        q = model(TOKENS[::8]).logits[:, :-1].log_softmax(-1)
    return float((reference.exp() * (reference - q)).sum(-1).mean())


@pytest.mark.parametrize("family, few", [("Llama", slice(0, 3)), ("Mixtral", slice(0, 1)), ("GptOss", slice(0, 1))])
def test_gains_are_what_the_model_says(tmp_path, family, few):
    more = {} if family == "Llama" else {"num_local_experts": 3, "num_experts_per_tok": 2}
    save_model(family, tmp_path / "model", initializer_range=0.15, **more)
    model, out, how = str(tmp_path / "model"), str(tmp_path / "out"), {"fold": True}
    formats = ("fp8", "bf16")
    options = calibrate.Options(batch=8, first_tokens=False, quantize=out, how=how, budget=6.0, budget_tokens=72,
                                dtype=torch.float32, budget_formats=formats)
    _, about = calibrate.calibrate(model, TOKENS, str(tmp_path / "stats"), options)
    with open(os.path.join(out, "nib-budget.json"), encoding="utf-8") as file:
        units = [budget.Unit(**unit) for unit in json.load(file)]
    assert [unit.weights for unit in units if "0.self_attn.k" in unit.name] == \
        [[f"model.layers.0.self_attn.{part}_proj" for part in "kqv"]]
    assert len(units) == (8 if family == "Llama" else 6) and {*units[0].gains} == {*formats}
    assert 0 < sum(unit.chosen != "nvfp4" for unit in units) < len(units)
    assert family == "Llama" or [len(unit.weights) for unit in units if unit.name.endswith(".experts")] == [9, 9]
    with torch.inference_mode():
        whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        reference = whole(TOKENS[::8]).logits[:, :-1].log_softmax(-1)
    plan = {"imatrix": tmp_path / "stats", "fold": True, "force": True}
    nib.quantize_checkpoint(model, tmp_path / "all", **plan)
    base = kl(tmp_path / "all", reference, tmp_path / "plain")
    for unit in units[few]:
        for format, option in (("fp8", "fp8"), ("bf16", "plain")):
            nib.quantize_checkpoint(model, tmp_path / "one", **{option: unit.weights}, **plan)
            gain = base - kl(tmp_path / "one", reference, tmp_path / "plain")
            assert gain == pytest.approx(unit.gains[format], rel=0.05, abs=2e-4), (unit.name, format)
    assert kl(out, reference, tmp_path / "plain") < base
    actions = {row["name"]: row["action"] for row in about["plan"]["rows"]}
    for unit in units:
        wanted = {"nvfp4": "quantize", "bf16": "keep", "fp8": "fp8"}[unit.chosen]
        assert {actions[name] for name in unit.weights} == {wanted}
    report = nib.quantize_checkpoint(model, tmp_path / "none", dry_run=True, imatrix=tmp_path / "stats",
                                     **{option: budget.weights_of(units, format)
                                        for format, option in (("fp8", "fp8"), ("bf16", "plain"))})
    elements = sum(unit.elements for unit in units)
    taken = sum(row["bytes_out"] for row in report["rows"] if any(row["name"] in unit.weights for unit in units))
    assert 4.6 < 8 * taken / elements <= 6.05


def test_a_fold_is_searched_by_kl(tmp_path, monkeypatch):
    monkeypatch.setattr(layerwise, "FOLDS", (0.0, 0.25, 0.5))
    save_model("Llama", tmp_path / "model", initializer_range=0.15)
    values = load_file(tmp_path / "model/model.safetensors")
    for name in values:
        if name.endswith("layernorm.weight"):
            values[name] = (values[name] * 4.0**(torch.arange(64) % 5 - 2)).bfloat16()
    save_file(values, tmp_path / "model/model.safetensors", {"format": "pt"})
    model, out = str(tmp_path / "model"), str(tmp_path / "out")
    options = calibrate.Options(batch=8, first_tokens=False, quantize=out, how={"fold": True}, fold_search=True,
                                budget_tokens=72, dtype=torch.float32)
    _, about = calibrate.calibrate(model, TOKENS, str(tmp_path / "stats"), options)
    plan = about["plan"]
    with torch.inference_mode():
        whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        reference = whole(TOKENS[::8]).logits[:, :-1].log_softmax(-1)
    for exponent, found in plan["folds"].items():
        nib.quantize_checkpoint(model, tmp_path / "one", imatrix=tmp_path / "stats", fold=exponent or False, force=True)
        assert kl(tmp_path / "one", reference, tmp_path / "plain") == pytest.approx(found, rel=0.02)
        if exponent == float(plan["fold"]):
            assert tensors_of(tmp_path / "one") == tensors_of(out)
    assert plan["fold"] == layerwise.best_fold(plan["folds"]) and plan["folds"][0.25] < plan["folds"][0.0]
    assert layerwise.best_fold({0.0: 1.0, 0.25: 0.52, 0.4: 0.51}) == 0.25  # luck
    assert layerwise.best_fold({0.0: 1.0, 0.25: 0.62, 0.4: 0.51}) == 0.4
    assert layerwise.best_fold({0.0: 0.3, 0.25: 0.62, 0.4: 0.51}) == 0.0


def tensors_of(directory):
    found = load_file(os.path.join(directory, "model.safetensors"))
    return {name: (value.dtype, bytes(value.flatten().view(torch.uint8).numpy())) for name, value in found.items()}


@pytest.mark.parametrize("family, plain, rest", [
    ("Llama", ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.k_proj"],
     [f"model.layers.1.self_attn.{part}_proj" for part in "qv"]),
    ("Mixtral", ["model.layers.0.block_sparse_moe.experts.1.w2"],
     [f"model.layers.0.block_sparse_moe.experts.{e}.w{i}" for e in range(3) for i in (1, 2, 3) if (e, i) != (1, 2)]),
    ("GptOss", ["model.layers.1.mlp.experts.2.up_proj"],
     [f"model.layers.1.mlp.experts.{e}.{part}_proj" for e in range(3) for part in ("gate", "up", "down")
      if (e, part) != (2, "up")])])
def test_what_stays_is_folded_as_the_others(tmp_path, family, plain, rest):
    more = {} if family == "Llama" else {"num_local_experts": 3, "num_experts_per_tok": 2}
    save_model(family, tmp_path / "model", initializer_range=0.15, **more)
    model, stats = str(tmp_path / "model"), tmp_path / "stats"
    values = load_file(tmp_path / "model/model.safetensors")
    for name in values:
        if name.endswith("layernorm.weight"):
            values[name] = values[name] * 2.0**(torch.arange(64) % 5 - 2)  # so that scales are not all 1
    values = {name: value.bfloat16() for name, value in values.items()}
    save_file(values, tmp_path / "model/model.safetensors", {"format": "pt"})
    calibrate.calibrate(model, TOKENS, str(stats), calibrate.Options(batch=8, first_tokens=False))
    whole = nib.quantize_checkpoint(model, tmp_path / "all", imatrix=stats, fold=True)
    report = nib.quantize_checkpoint(model, tmp_path / "some", imatrix=stats, fold=True, plain=plain)
    kept = {row["name"] for row in report["rows"] if row["action"] == "keep"}
    assert kept - {row["name"] for row in whole["rows"] if row["action"] == "keep"} == {*plain, *rest}
    raised = nib.quantize_checkpoint(model, tmp_path / "none", dry_run=True, fp8=plain)
    assert {row["name"] for row in raised["rows"] if row["action"] == "fp8"} == {*plain, *rest}
    fold = [(tmp_path / name / "nib-fold.scales").read_bytes() for name in ("all", "some")]
    assert fold[0] == fold[1]
    one, other = tensors_of(tmp_path / "all"), tensors_of(tmp_path / "some")
    same = {name for name, value in one.items() if other.get(name) == value}
    gone = {f"{name}.{part}" for name in (*plain, *rest) for part in ("weight_packed", "weight_scale",
                                                                      "weight_global_scale", "bias")} & set(one)
    assert len(gone) >= 3 * len([*plain, *rest]) and same == set(one) - gone
    nib.dequantize_checkpoint(tmp_path / "some", tmp_path / "plain")
    values, names = load_file(tmp_path / "plain/model.safetensors"), load_file(tmp_path / "model/model.safetensors")
    assert {name: (v.dtype, v.shape) for name, v in values.items()} == {n: (v.dtype, v.shape) for n, v in names.items()}
    with nib._checkpoint.Weights(tmp_path / "some") as ours, nib._checkpoint.Weights(model) as theirs:
        for name in [*plain, *rest[:2]]:
            columns, rows = folded(tmp_path / "some", name)
            wanted = (torch.from_numpy(theirs.read(name)) / rows[:, None] * columns).bfloat16().float()
            assert torch.equal(torch.from_numpy(ours.read(name)), wanted)
            assert bool((columns != 1).any())


def folded(directory, name):
    """What columns and rows of a weight were multiplied with and divided by."""
    with safe_open(directory / "nib-fold.scales", framework="pt") as file:
        found = [json.loads(file.metadata()[key]).get(name) for key in ("columns", "rows")]
        columns, rows = (torch.ones(1) if one is None else file.get_tensor(one) for one in found)
    return columns, rows


def chosen(given, bytes_left):
    units = [budget.Unit(name, [name], 1000, sizes, gains) for name, sizes, gains in given]
    budget.choose(units, 8 * bytes_left / 0.5, 5.0)
    return {unit.name: unit.chosen for unit in units if unit.chosen != "nvfp4"}


def test_what_is_chosen():
    given = [(name, {"fp8": size}, {"fp8": gain}) for name, size, gain in
             (("a", 100, 1.0), ("b", 50, 0.9), ("c", 100, -1.0), ("d", 400, 3.0), ("e", 60, 0.1))]
    assert chosen(given, 160) == {"a": "fp8", "b": "fp8"}  # b is the best for a byte, d does not fit, c harms
    assert chosen(given, 1000) == dict.fromkeys("abde", "fp8")
    both = [("a", {"fp8": 100, "bf16": 300}, {"fp8": 1.0, "bf16": 1.2}),
            ("b", {"fp8": 100, "bf16": 300}, {"fp8": 0.5, "bf16": 2.4}),  # worth nothing in between
            ("c", {"fp8": 100, "bf16": 300}, {"fp8": 0.4, "bf16": 0.3})]
    assert chosen(both, 150) == {"a": "fp8"}
    assert chosen(both, 400) == {"a": "fp8", "b": "bf16"}
    assert chosen(both, 500) == {"a": "fp8", "b": "bf16", "c": "fp8"}
    assert chosen(both, 700) == {"a": "bf16", "b": "bf16", "c": "fp8"}
    assert chosen(both, 9000) == {"a": "bf16", "b": "bf16", "c": "fp8"}


def test_stacks_that_stay_whole(tmp_path):
    save_model("GptOss", tmp_path / "model", num_local_experts=3, num_experts_per_tok=2, num_hidden_layers=1)
    model, out, how = str(tmp_path / "model"), str(tmp_path / "out"), {"format": "modelopt"}
    with pytest.raises(ValueError, match="experts in stacks"):
        calibrate.calibrate(model, TOKENS, None, calibrate.Options(quantize=out, how={**how, "gptq": True}))
    _, about = calibrate.calibrate(model, TOKENS, None, calibrate.Options(
        batch=8, quantize=str(tmp_path / "other"), how=how, budget=6.0, budget_tokens=72))
    assert len(about["plan"]["units"]) == 2 and not any("experts" in unit["name"] for unit in about["plan"]["units"])


def test_the_command_says_what_a_budget_is(tmp_path, capsys):
    save_model("Llama", tmp_path / "model", num_hidden_layers=1)
    for wrong, why in ((["--budget", "4"], "from 4.5"), (["--budget", "9"], "to 8"),
                       (["--fold-exponent", "2"], "from 0 to 1"),
                       (["--fold-search", "--fold-exponent", "0.3"], "--fold-search looks for"),
                       (["--budget", "17", "--budget-formats", "bf16"], "to 16"),
                       (["--budget", "5", "--out", "x"], "--quantize")):
        place = [] if "--out" in wrong else ["--quantize", str(tmp_path / "out")]
        with pytest.raises(SystemExit):
            calibrate.main([str(tmp_path / "model"), *place, *wrong])
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("how", ["fp8", "keep"])
def test_a_guess_takes_all_experts_of_a_layer(tmp_path, how):
    save_model("Mixtral", tmp_path / "model", num_local_experts=3, num_hidden_layers=3, num_experts_per_tok=2)
    seen = set()
    for bits in (4.6, 5.2, 6.0, 7.5, 10.0):
        plan = nib.quantize_checkpoint(tmp_path / "model", tmp_path / "none", dry_run=True, budget=bits,
                                       budget_plain=how == "keep")
        experts = [{row["action"] for row in plan["rows"] if f"layers.{n}.block_sparse_moe.experts." in row["name"]}
                   for n in range(3)]
        assert all(len(actions) == 1 for actions in experts) and "is a guess" in plan["note"]
        seen.add(tuple(actions.pop() for actions in experts))
    assert ("quantize", "quantize", how) in seen  # the last layer first

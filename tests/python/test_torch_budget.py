# SPDX-License-Identifier: Apache-2.0
"""nib.calibrate --budget: what a unit is worth is what a model of transformers says, and the best for a byte are
taken."""
import json
import os

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import nib  # noqa: E402
from nib import budget, calibrate, streaming  # noqa: E402
from test_torch_calibrate import save_model  # noqa: E402

TOKENS = torch.randint(3, 120, (24, 24), generator=torch.Generator().manual_seed(5))


def kl(directory, reference, out):
    nib.dequantize_checkpoint(directory, out, dtype="f32", force=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        q = model(TOKENS[::8]).logits[:, :-1].log_softmax(-1)
    return float((reference.exp() * (reference - q)).sum(-1).mean())


def test_gains_are_what_the_model_says(tmp_path):
    save_model("Llama", tmp_path / "model", initializer_range=0.15)
    model, out, how = str(tmp_path / "model"), str(tmp_path / "out"), {"fold": True}
    options = calibrate.Options(batch=8, first_tokens=False, quantize=out, how=how, budget=5.2, budget_tokens=72,
                                dtype=torch.float32)
    calibrate.calibrate(model, TOKENS, str(tmp_path / "stats"), options)
    with open(os.path.join(out, "nib-budget.json"), encoding="utf-8") as file:
        units = [budget.Unit(**unit) for unit in json.load(file)]
    assert [unit.weights for unit in units if "0.self_attn.k" in unit.name] == \
        [[f"model.layers.0.self_attn.{part}_proj" for part in "kqv"]]
    assert len(units) == 8 and 0 < sum(unit.chosen for unit in units) < 8
    with torch.inference_mode():
        whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        reference = whole(TOKENS[::8]).logits[:, :-1].log_softmax(-1)
    plan = {"imatrix": tmp_path / "stats", "fold": True, "force": True}
    nib.quantize_checkpoint(model, tmp_path / "all", **plan)
    base = kl(tmp_path / "all", reference, tmp_path / "plain")
    for unit in units[:3]:
        nib.quantize_checkpoint(model, tmp_path / "one", fp8=unit.weights, **plan)
        gain = base - kl(tmp_path / "one", reference, tmp_path / "plain")
        assert gain == pytest.approx(unit.gain, rel=0.05, abs=2e-4)
    assert kl(out, reference, tmp_path / "plain") < base
    report = nib.quantize_checkpoint(model, tmp_path / "none", dry_run=True, imatrix=tmp_path / "stats",
                                     fp8=[w for unit in units if unit.chosen for w in unit.weights])
    assert 4.5 < 8 * report["changed_bytes_out"] / report["changed_elements"] <= 5.25


def test_what_is_chosen():
    given = (("a", 100, 1.0), ("b", 50, 0.9), ("c", 100, -1.0), ("d", 400, 3.0), ("e", 60, 0.1))
    units = [budget.Unit(name, [name], 1000, size, gain) for name, size, gain in given]
    assert budget.choose(units, 8 * 160 / 0.5, 5.0) == ["a", "b"]  # b is the best for a byte, d does not fit, c harms
    assert budget.choose(units, 8 * 1000 / 0.5, 5.0) == ["a", "b", "d", "e"]


def test_the_command_says_what_a_budget_is(tmp_path, capsys):
    save_model("Llama", tmp_path / "model", num_hidden_layers=1)
    for wrong, why in ((["--budget", "4"], "from 4.5"), (["--budget", "5", "--out", "x"], "--quantize")):
        place = [] if "--out" in wrong else ["--quantize", str(tmp_path / "out")]
        with pytest.raises(SystemExit):
            calibrate.main([str(tmp_path / "model"), *place, *wrong])
        assert why in capsys.readouterr().err

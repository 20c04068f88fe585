# SPDX-License-Identifier: Apache-2.0
"""nib.calibrate --quantize: the bytes of `nib quantize` with the same statistics, layer by layer with GPTQ; killed runs
go on; what --sequential makes up for."""
import json
import os

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

import nib  # noqa: E402
from nib import calibrate, corrections, layerwise  # noqa: E402
from test_torch_calibrate import save_model, tokenizer_of  # noqa: E402

# 644 tokens, since the first of a sequence is not counted: GPTQ wants six for each of 96 columns
TOKENS, HELD = (torch.randint(3, 120, (28, 24), generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
HOW = {"scheme": "nvfp4", "activations": "statistics", "fold": True}
GPTQ = {**HOW, "gptq": True, "damp": 0.1}


def options(**more):
    return calibrate.Options(batch=8, first_tokens=False, **more)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model with its statistics and Hessians, quantized by them."""
    path = tmp_path_factory.mktemp("layerwise")
    save_model("Llama", path / "model", initializer_range=0.15)
    calibrate.calibrate(path / "model", TOKENS, str(path / "stats"), options(hessians=str(path / "stats.hessians")))
    nib.quantize_checkpoint(path / "model", path / "swept", imatrix=path / "stats", **HOW)
    nib.quantize_checkpoint(path / "model", path / "whole", imatrix=path / "stats", **GPTQ)
    return path


def tensors(directory):
    found = safetensors_torch.load_file(os.path.join(directory, "model.safetensors"))
    return {name: (value.dtype, value.shape, bytes(value.flatten().view(torch.uint8).numpy()))
            for name, value in found.items()}


def run(place, out, **more):
    _, about = calibrate.calibrate(place / "model", TOKENS, None, options(quantize=str(out), **more))
    return about["plan"]


def test_statistics_and_checkpoint_in_one_go(place, tmp_path):
    run(place, tmp_path / "out", how=HOW)
    assert tensors(tmp_path / "out") == tensors(place / "swept") and os.listdir(tmp_path) == ["out"]


def test_layer_by_layer_is_all_at_once(place, tmp_path):
    plan = run(place, tmp_path / "out", how=GPTQ)
    assert tensors(tmp_path / "out") == tensors(place / "whole") != tensors(place / "swept")
    assert {row["layer"]["gptq"] for row in plan["rows"] if row["action"] == "quantize"} == {"644 tokens"}
    assert os.listdir(tmp_path) == ["out"]
    run(place, tmp_path / "modelopt", how={**GPTQ, "format": "modelopt"})
    ours, theirs = tensors(tmp_path / "modelopt"), tensors(place / "whole")
    name = "model.layers.1.mlp.down_proj"
    assert ours[name + ".weight"][2] == theirs[name + ".weight_packed"][2]


def kl(place, directory, out):
    nib.dequantize_checkpoint(directory, out, dtype="f32")
    with torch.inference_mode():
        models = (transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
                  for path in (place / "model", out))
        p, q = (model(HELD).logits.log_softmax(-1) for model in models)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_sequential(place, tmp_path):
    plan = run(place, tmp_path / "out", how=GPTQ, sequential=True)
    assert {row["layer"]["gptq"] for row in plan["rows"] if row["action"] == "quantize"} == {"644 tokens"}
    ours, theirs = tensors(tmp_path / "out"), tensors(place / "whole")
    same = {name for name, value in theirs.items() if name.endswith("_packed") and ours[name] == value}
    # what comes in first is what came in, and there is nothing to make up for
    assert same == {f"model.layers.0.self_attn.{part}_proj.weight_packed" for part in "qkv"}
    found = {name: kl(place, path, tmp_path / f"{name}-plain")
             for name, path in (("swept", place / "swept"), ("whole", place / "whole"), ("out", tmp_path / "out"))}
    assert max(found["whole"], found["out"]) < 0.9 * found["swept"], found


def test_experts_go_through_in_steps(tmp_path):
    save_model("Mixtral", tmp_path / "model", num_local_experts=3, num_experts_per_tok=2, num_hidden_layers=1,
               initializer_range=0.15)
    plan = run(tmp_path, tmp_path / "out", how=GPTQ, sequential=True)
    said = {row["name"]: row["layer"] for row in plan["rows"] if row["action"] == "quantize"}
    assert len(said) == 4 + 3 * 3 and said["model.layers.0.self_attn.o_proj"]["sequential"] == "644 tokens"
    moe, seen = "model.layers.0.block_sparse_moe.experts", 0
    for expert in range(3):
        words = {part: said[f"{moe}.{expert}.{part}"]["sequential"] for part in ("w1", "w2", "w3")}
        tokens = int(words["w2"].removeprefix("none: ").split()[0])
        seen += tokens
        few = tokens < 6 * 64, tokens < 6 * 96
        assert words["w1"] == words["w3"] == ("644 tokens of the layer" if few[0] else f"{tokens} tokens"), words
        assert words["w2"] == (f"none: {tokens} tokens, and 96 columns need 576" if few[1] else f"{tokens} tokens")
        assert said[f"{moe}.{expert}.w1"]["gptq"] == "644 tokens"
    assert seen == 2 * 644 and {"none" in row["sequential"] for row in said.values()} == {True, False}
    swept = {**HOW, "gptq": False}
    run(tmp_path, tmp_path / "swept", how=swept)
    found = [kl(tmp_path, tmp_path / name, tmp_path / f"{name}-plain") for name in ("out", "swept")]
    assert found[0] < 0.9 * found[1], found


def rows_of(model, tokens, index=None):
    """What comes into the experts of a model's first layer: {expert: rows} of both stacks, the router's choice, and the
    tokens. Experts have those of `index`, if that is given."""
    module = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    seen = {}

    def hook(_, args, kwargs):
        hidden, chosen, *_ = [*args, *kwargs.values()]
        seen.update(index=chosen if index is None else index, hidden=hidden.reshape(-1, hidden.shape[-1]))
    with torch.inference_mode():
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        model(tokens)
        handle.remove()
    gate_up, down = {}, {}
    for expert in range(len(module.gate_up_proj)):
        rows = seen["hidden"][torch.where(seen["index"].t() == expert)[1]]
        gate_up[expert] = rows.double()
        turned = getattr(module, "is_transposed", False)
        both = rows @ (module.gate_up_proj[expert] if turned else module.gate_up_proj[expert].t())
        if getattr(module, "gate_up_proj_bias", None) is not None:
            both = module._apply_gate(both + module.gate_up_proj_bias[expert])
        else:
            gate, up = both.chunk(2, -1)
            both = module.act_fn(gate) * up
        down[expert] = both.double()
    return gate_up, down, seen["index"], seen["hidden"].double()


def made_up_for(weight, rows, hat):
    h, c = hat.t() @ hat / len(hat), rows.t() @ hat / len(hat)
    ridge = 0.1 * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    return weight.double() + weight.double() @ (c - h) @ torch.linalg.inv(h + ridge)


@pytest.mark.parametrize("family, stored", [("Mixtral", "{0}.w1.weight {0}.w2.weight"),
                                            ("GptOss", "gate_up_proj down_proj")])
def test_an_expert_is_corrected_by_its_tokens(tmp_path, family, stored, monkeypatch):
    monkeypatch.setattr(corrections, "MOST_BYTES", 16 * 64 * 64 * 2)  # two at a time
    save_model(family, tmp_path / "model", num_local_experts=3, num_experts_per_tok=1, num_hidden_layers=1,
               initializer_range=0.15)
    models = []
    for name, seed in (("model", None), ("hat", 9)):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32,
                                                                  experts_implementation="eager")
        if seed:
            torch.manual_seed(seed)
            for value in model.model.layers.parameters():
                value.data += 0.1 * torch.randn_like(value) * value.std()
        model.save_pretrained(tmp_path / name)
        models.append(model)
    tokens = TOKENS[:12]
    original = rows_of(models[0], tokens)
    other = rows_of(models[1], tokens, original[2])
    assert not torch.equal(rows_of(models[1], tokens)[2], original[2])  # by itself it chooses otherwise
    streamed = calibrate.streaming.Streamed(tmp_path / "model", experts="eager")
    streams = corrections.Streams(streamed, tokens.split(4), calibrate._Takers(True))
    found = safetensors_torch.load_file(tmp_path / "model/model.safetensors")
    prefix = next(name for name in found if ".experts." in name).partition(".experts.")[0] + ".experts"
    least, enough, _ = sorted(len(rows) for rows in original[0].values())
    assert least < enough
    with nib._checkpoint.Weights(tmp_path / "model") as weights:
        plan = nib.quantize_checkpoint(tmp_path / "model", tmp_path / "none", dry_run=True)
        names = {row["name"]: weights.tensor(row["name"]) for row in plan["rows"] if row["action"] == "quantize"}
    for which, tensor in enumerate(stored.split()):
        tensors = {f"{prefix}.{tensor.format(expert)}" for expert in range(3)}
        stack = streams.stack(0, [name.removesuffix(".weight") for name in tensors], names)
        replaced, notes = {}, {}
        monkeypatch.setattr(corrections, "TOKENS", enough / original[which][0].shape[1])
        sums = streams.correct_experts(0, stack, str(tmp_path / "hat"), {}, replaced, notes)
        assert sums.count == 288
        for expert in range(3):
            weight = found[f"{prefix}.{tensor.format(expert)}"]
            got = replaced.get(f"{prefix}.{tensor.format(expert)}", weight)
            weight, got = (weight[expert].t(), got[expert].t()) if weight.ndim == 3 else (weight, got)
            rows, hat = original[which][expert], other[which][expert]
            few = len(rows) == least
            if few and which == 0:
                rows, hat = original[3], other[3]
            wanted = weight.double() if few and which else made_up_for(weight, rows, hat)
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
            said = {notes[name] for name in stack.names[expert]}
            assert len(said) == 1 and ("none" in said.pop()) == bool(few and which)


def test_few_tokens_are_not_trusted(place, tmp_path):
    with open(os.path.join(os.path.dirname(__file__), "../../checkpoint/plan/plan.h"), encoding="utf-8") as file:
        assert f"#define NIB_GPTQ_TOKENS {corrections.TOKENS}\n" in file.read()
    tokens = TOKENS[:20]  # 460: enough for 64 columns, not for the 96 of down
    for sequential in (False, True):
        out = tmp_path / f"out{sequential}"
        _, about = calibrate.calibrate(place / "model", tokens, None, options(quantize=str(out), how=GPTQ,
                                                                              sequential=sequential))
        said = {row["name"]: row["layer"] for row in about["plan"]["rows"] if row["action"] == "quantize"}
        assert len(said) == 14
        for name, row in said.items():
            wanted = "none: 460 tokens, and 96 columns need 576" if name.endswith("down_proj") else "460 tokens"
            assert row["gptq"] == wanted and row.get("sequential", wanted) == wanted
    down = "model.layers.0.mlp.down_proj.weight_packed"
    calibrate.calibrate(place / "model", tokens, str(tmp_path / "stats"), options())
    nib.quantize_checkpoint(place / "model", tmp_path / "swept", imatrix=tmp_path / "stats", **HOW)
    assert tensors(tmp_path / "outTrue")[down] == tensors(tmp_path / "outFalse")[down] == \
        tensors(tmp_path / "swept")[down]


def test_what_is_made_up_for():
    draw = torch.Generator().manual_seed(1)
    x, mix = (torch.randn(rows, 16, generator=draw, dtype=torch.float64) for rows in (4000, 16))
    x = x @ mix
    hat = x + 0.3 * x.roll(1, 1)  # what went before has mixed channels
    weight = torch.randn(8, 16, generator=draw)
    sums = corrections.Inputs(16, "cpu")
    for part, other in zip(x.split(1000), hat.split(1000)):
        sums.add(part, other)
    h, c = hat.t() @ hat / 4000, x.t() @ hat / 4000
    ridge = 0.1 * h.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    wanted = weight.double() + weight.double() @ (c - h) @ torch.linalg.inv(h + ridge)
    torch.testing.assert_close(sums.corrected(weight).double(), wanted, rtol=1e-5, atol=1e-5)
    error = lambda w: float((x @ weight.double().t() - hat @ w.double().t()).square().sum())
    assert error(sums.corrected(weight)) < 0.5 * error(weight)
    upper = torch.triu_indices(16, 16)
    torch.testing.assert_close(sums.packed().double(), h[upper[0], upper[1]], rtol=1e-6, atol=1e-6)


class Killed(BaseException):
    """Nobody catches it: files stay as they are at that moment. tests/campaign/kill.py kills processes."""


@pytest.mark.parametrize("sequential", [False, True])
def test_killed_runs_go_on(place, tmp_path, sequential, monkeypatch):
    out, seen = str(tmp_path / "out"), []

    def killed(where, layer=None):
        original = getattr(layerwise.Layers, where)

        def instead(self, *given, **more):
            result = original(self, *given, **more) if layer is not None else None
            if layer is None or given[0] == layer:
                raise Killed
            return result
        monkeypatch.setattr(layerwise.Layers, where, instead)
        with pytest.raises(Killed):
            run(place, out, how=GPTQ, sequential=sequential)
        monkeypatch.undo()
        assert not os.path.exists(os.path.join(out, "config.json")) and os.path.isdir(out + ".partial")

    killed("keep", 0)  # its codes are there, and the layer is not finished
    killed("keep", 1)
    killed("finish")
    original = layerwise.Layers.keep
    monkeypatch.setattr(layerwise.Layers, "keep", lambda self, n, *rest: (seen.append(n), original(self, n, *rest)))
    run(place, out, how=GPTQ, sequential=sequential)
    assert seen == []  # all layers were done
    if sequential:
        run(place, tmp_path / "again", how=GPTQ, sequential=True)
    assert tensors(out) == tensors(tmp_path / "again" if sequential else place / "whole")
    assert not os.path.exists(out + ".partial")


def test_the_command(place, tmp_path, capsys):
    model, out = str(tmp_path / "model"), str(tmp_path / "out")
    os.symlink(place / "model", model)
    if not os.path.exists(os.path.join(model, "tokenizer.json")):
        tokenizer_of(model)
    (tmp_path / "a.txt").write_text(" ".join(f"w{i * i % 90}" for i in range(2000)))
    text = ["--text", str(tmp_path / "a.txt"), "--tokens", "768", "--sequence-length", "24", "--batch", "8", "-q"]
    assert calibrate.main([model, "--quantize", out, "--gptq", "--fold", *text]) == 0
    told = capsys.readouterr().out
    assert f"{out}: 14 weights quantized, 4.5" in told and "14 by GPTQ" in told
    assert json.load(open(os.path.join(out, "config.json"), encoding="utf-8"))["quantization_config"]
    for wrong, why in ((["--quantize", out, *text], "exists; --force"), (text, "nothing is to be written"),
                       (["--quantize", out + "x", "--out", out + "x/stats", *text], "would lie in the output"),
                       (["--out", out + "x", "--gptq", *text], "--gptq goes with --quantize"),
                       (["--quantize", out + "x", "--sequential", *text], "goes with --gptq"),
                       (["--quantize", out + "x", "--gptq"], "needs text")):
        with pytest.raises(SystemExit):
            calibrate.main([model, *wrong])
        assert why in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""nib.calibrate: statistics equal sums taken by hand, with hooks on the whole model; killed runs go on; files."""
import dataclasses
import json
import os
import re
import subprocess
import sys

import numpy
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

from nib import calibrate, imatrix  # noqa: E402

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = torch.randint(3, 120, (5, 24), generator=torch.Generator().manual_seed(5))


def save_model(name, directory, **more):
    torch.manual_seed(3)
    config = getattr(transformers, name + "Config")(**{**SIZES, **more})
    getattr(transformers, name + "ForCausalLM")(config).to(torch.bfloat16).eval().save_pretrained(directory)


def load(path):
    with safetensors.safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


class ByHand:
    """Rows of every input, kept whole: {(parameter, expert): [(rows, which of them count)]}."""

    def __init__(self, model):
        self.rows, self.hidden = {}, {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}":
                module.register_forward_pre_hook(self.dense(f"{name}.weight"))
            elif hasattr(module, "gate_up_proj") and module.gate_up_proj.ndim == 3:
                module.register_forward_pre_hook(self.experts(name))

    def add(self, key, rows, positions):
        self.rows.setdefault(key, []).append((rows.double(), positions % TOKENS.shape[1] != 0))

    def dense(self, name):
        def hook(module, args):
            rows = args[0].reshape(-1, args[0].shape[-1])
            self.add((name, 0), rows, torch.arange(len(rows)))
        return hook

    def experts(self, name):
        def hook(module, args):
            hidden, chosen, _ = args
            self.hidden.setdefault(name, []).append((hidden.double(), torch.arange(len(hidden)) % TOKENS.shape[1] != 0))
            for expert in range(len(module.gate_up_proj)):
                token = [t for k in range(chosen.shape[1]) for t in range(len(chosen)) if chosen[t, k] == expert]
                if token:
                    gate, up = torch.nn.functional.linear(hidden[token], module.gate_up_proj[expert]).chunk(2, -1)
                    self.add((f"{name}.gate_up_proj", expert), hidden[token], torch.tensor(token))
                    self.add((f"{name}.down_proj", expert), module.act_fn(gate) * up, torch.tensor(token))
        return hook


def by_hand(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto", experts_implementation="eager")
    hands = ByHand(model)
    with torch.inference_mode():
        for tokens in TOKENS.split(2):
            model(input_ids=tokens, use_cache=False)
    return hands


def check_sums(tensors, source, expert, parts):
    rows, kept = torch.cat([r for r, _ in parts]), torch.cat([k for _, k in parts])
    some = rows[kept]
    assert int(tensors[f"{source}.count"][expert]) == len(some)
    near = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(tensors[f"{source}.sum"][expert].double(), some.sum(0), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(tensors[f"{source}.sum2"][expert].double(), some.square().sum(0), **near)
    torch.testing.assert_close(tensors[f"{source}.mabs"][expert].double(), some.abs().mean(0), **near)
    assert torch.equal(tensors[f"{source}.amaxk"][expert].double(), rows.abs().amax(0))
    assert float(tensors[f"{source}.amax"][expert]) == float(rows.abs().max())


def packed(rows):
    whole = rows.t() @ rows / len(rows)
    return whole[tuple(torch.triu_indices(*whole.shape))]


OPTIONS = calibrate.Options(batch=2, first_tokens=False)


def test_dense_statistics_are_the_sums_by_hand(tmp_path):
    save_model("Llama", tmp_path / "model")
    options = calibrate.Options(batch=2, first_tokens=False, hessians=str(tmp_path / "hessians"))
    calibrate.calibrate(tmp_path / "model", TOKENS, str(tmp_path / "stats"), options, {"text": '["a.txt"]'})
    tensors, about = load(tmp_path / "stats")
    hands, inputs = by_hand(tmp_path / "model"), json.loads(about["inputs"])
    assert about["format"] == "nib-stats-1" and about["tokens"] == "120" and about["sequence_length"] == "24"
    assert len(inputs) == 14 and len(tensors) == 2 * 4 * 6
    assert inputs["model.layers.1.self_attn.v_proj"] == "model.layers.1.self_attn.q_proj"
    assert inputs["model.layers.1.mlp.up_proj"] == "model.layers.1.mlp.gate_proj"
    for (name, expert), parts in hands.rows.items():
        source = inputs[name.removesuffix(".weight")]
        check_sums(tensors, source, expert, parts)
        hessians, _ = load(tmp_path / f"hessians/stats-of-layer-0000{source.split('.')[2]}.safetensors")
        wanted = packed(torch.cat([rows[kept] for rows, kept in parts]))
        torch.testing.assert_close(hessians[f"{source}.hessian"].double(), wanted, rtol=1e-5, atol=1e-6)
    assert not os.path.exists(tmp_path / "stats.partial")


@pytest.mark.parametrize("experts", [8, 2])  # of 2 each has all tokens, in the order of its places
def test_statistics_of_experts_are_the_sums_by_hand(tmp_path, experts):
    save_model("Mixtral", tmp_path / "model", num_local_experts=experts, num_experts_per_tok=2)
    options = calibrate.Options(batch=2, first_tokens=False, hessians=str(tmp_path / "hessians"))
    tensors, about = calibrate.calibrate(tmp_path / "model", TOKENS, str(tmp_path / "stats"), options)
    hands, inputs = by_hand(tmp_path / "model"), json.loads(about["inputs"])
    moe = "model.layers.0.block_sparse_moe.experts"  # as the checkpoint names and stores them: one by one
    last, any_ = f"{moe}.{experts - 1}", f"{moe}.{experts // 4}"
    assert inputs[f"{last}.w3"] == inputs[f"{any_}.w1"] == f"{moe}.0.w1" and inputs[f"{last}.w2"] == f"{moe}.0.w2"
    assert tensors[f"{moe}.0.w1.sum2"].shape == (experts, 64) and tensors[f"{moe}.0.w2.sum2"].shape == (experts, 96)
    seen = 0
    for (name, expert), parts in hands.rows.items():
        last = {"gate_up_proj": "w1", "down_proj": "w2"}.get(name.split(".")[-1])
        layer = name.split(".")[2]
        source = moe.replace(".0.", f".{layer}.") + f".0.{last}" if last else inputs[name.removesuffix(".weight")]
        check_sums(tensors, source, expert, parts)
        seen += bool(last)
    assert seen > 2.5 * experts
    hessians, _ = load(tmp_path / "hessians/stats-of-layer-00000.safetensors")
    parts = hands.hidden["model.layers.0.mlp.experts"]  # each token once, not once for every expert
    torch.testing.assert_close(hessians[f"{moe}.0.w1.hessian"].double(), packed(torch.cat([r[k] for r, k in parts])),
                               rtol=1e-5, atol=1e-6)


def test_all_experts_see_all_tokens_and_the_output_stays(tmp_path):
    save_model("Mixtral", tmp_path / "model", num_local_experts=4, num_experts_per_tok=1)
    tensors, about = calibrate.calibrate(tmp_path / "model", TOKENS, str(tmp_path / "routed"), OPTIONS)
    everyone, _ = calibrate.calibrate(tmp_path / "model", TOKENS, str(tmp_path / "all"),
                                      calibrate.Options(batch=2, first_tokens=False, all_experts=True))
    for layer in range(2):
        source = f"model.layers.{layer}.block_sparse_moe.experts.0.w1"
        assert everyone[f"{source}.count"].tolist() == [5 * 23] * 4
        assert tensors[f"{source}.count"].sum() == 5 * 23 and tensors[f"{source}.count"].max() < 5 * 23
        # what all see is what the routed ones see together, in the second layer too: its inputs are the router's
        together = tensors[f"{source}.sum2"].sum(0)
        torch.testing.assert_close(everyone[f"{source}.sum2"][3], together, rtol=1e-5, atol=1e-6)


def test_few_tokens_count_the_first(tmp_path):
    save_model("Llama", tmp_path / "model", num_hidden_layers=1)
    for tokens, counted in ((TOKENS, 5 * 24), (TOKENS.repeat(140, 1), 700 * 23)):  # fewer and more than 16,384
        options = calibrate.Options(batch=50)
        tensors, about = calibrate.calibrate(tmp_path / "model", tokens, str(tmp_path / "stats"), options)
        assert tensors["model.layers.0.mlp.down_proj.count"].tolist() == [counted]
        assert about["first_tokens"] == ("true" if counted == 120 else "false")


KILLED = """
import sys, torch
from nib import calibrate
def stop(n, layers, b, batches):
    if (n, b) == (1, 2):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
tokens = torch.load(sys.argv[2])
calibrate.calibrate(sys.argv[1], tokens, sys.argv[3], calibrate.Options(batch=2, first_tokens=False), {}, stop)
"""


def test_a_killed_run_goes_on_and_gives_the_same_file(tmp_path):
    save_model("Llama", tmp_path / "model", num_hidden_layers=3)
    torch.save(TOKENS, tmp_path / "tokens")
    whole, again = str(tmp_path / "whole"), str(tmp_path / "again")
    calibrate.calibrate(tmp_path / "model", TOKENS, whole, OPTIONS, {})
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "model", tmp_path / "tokens", again], check=False)
    assert done.returncode == -9 and not os.path.exists(again)
    assert os.path.exists(again + ".partial/layer-00000.safetensors")
    assert not os.path.exists(again + ".partial/layer-00001.safetensors")
    with pytest.raises(ValueError, match="another run.*--restart"):
        calibrate.calibrate(tmp_path / "model", TOKENS[:4], again, OPTIONS, {})
    told = []
    calibrate.calibrate(tmp_path / "model", TOKENS, again, OPTIONS, {}, lambda *done: told.append(done))
    assert told[0] == (1, 3, 1, 3) and told[-1] == (2, 3, 3, 3)
    with open(whole, "rb") as a, open(again, "rb") as b:
        assert a.read() == b.read()


class Stopped(Exception):
    pass


@pytest.fixture
def interrupted(tmp_path):
    """(the model, the statistics) of a run that was stopped in its second layer."""
    def stop(layer, *_):
        if layer == 1:
            raise Stopped

    save_model("Llama", tmp_path / "model")
    with pytest.raises(Stopped):
        calibrate.calibrate(tmp_path / "model", TOKENS, str(tmp_path / "stats"), OPTIONS, {}, stop)
    return tmp_path / "model", tmp_path / "stats"


def test_two_runs_into_one_output_do_not_meet(tmp_path):
    """The second is told, with --restart too, and the first has what it has alone; then anyone may come."""
    save_model("Llama", tmp_path / "model")
    stats, met = tmp_path / "stats", []

    def second(*_):
        for restart in (False, True):
            options = dataclasses.replace(OPTIONS, restart=restart)
            with pytest.raises(ValueError, match="stats.partial: another run is writing here"):
                calibrate.calibrate(tmp_path / "model", (TOKENS + 1) % 120, str(stats), options, {})
            met.append(restart)

    calibrate.calibrate(tmp_path / "model", TOKENS, str(stats), OPTIONS, {}, second)
    assert met and not os.path.exists(f"{stats}.partial")
    calibrate.calibrate(tmp_path / "model", TOKENS, f"{stats}-alone", OPTIONS, {})
    assert stats.read_bytes() == (tmp_path / "stats-alone").read_bytes()


def test_another_configuration_is_another_run(interrupted):
    model, stats = interrupted
    about = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**about, "rms_norm_eps": 0.5}), encoding="utf-8")
    with pytest.raises(ValueError, match="another run.*--restart"):
        calibrate.calibrate(model, TOKENS, str(stats), OPTIONS, {})


def test_what_was_left_without_its_note_is_not_believed(interrupted):
    """A run that was killed while it removed its directory leaves some of it: here layers of other tokens."""
    model, stats = interrupted
    other = (TOKENS + 1) % 120
    os.remove(f"{stats}.partial/run.json")
    calibrate.calibrate(model, other, str(stats), OPTIONS, {})
    calibrate.calibrate(model, other, f"{stats}-whole", OPTIONS, {})
    assert stats.read_bytes() == (stats.parent / "stats-whole").read_bytes()


@pytest.mark.parametrize("file, content, message", [
    ("states-00000/1.pt", b"", "1.pt: a state that was kept cannot be read: EOFError; --restart"),
    ("states-00000/1.pt", b"PK", "1.pt: a state that was kept cannot be read"),
    ("states-00000/1.pt", [1], "state after layer 0 is none"),
    ("states-00000/1.pt", {"output": 1, "shared": {"x": {}}}, "layer 0 has 'x'"),
    ("layer-00000.safetensors", b"", "layer-00000.safetensors: "),
    ("layer-00000.safetensors", b"\2\0\0\0\0\0\0\0{}", "is no layer of a run; --restart"),
])
def test_a_damaged_rest_of_a_run(interrupted, file, content, message):
    model, stats = interrupted
    path = f"{stats}.partial/{file}"
    if isinstance(content, bytes):
        with open(path, "wb") as out:
            out.write(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        calibrate.calibrate(model, TOKENS, str(stats), OPTIONS, {})


def test_the_imatrix_is_as_llama_cpp_reads_it(tmp_path):
    gguf = pytest.importorskip("gguf")
    save_model("Qwen3Moe", tmp_path / "model", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
               decoder_sparse_step=1, mlp_only_layers=[1])
    options = calibrate.Options(batch=2, imatrix=str(tmp_path / "imatrix.gguf"))
    text = {"text": '["a.txt"]'}
    tensors, about = calibrate.calibrate(tmp_path / "model", TOKENS, str(tmp_path / "stats"), options, text)
    assert about["not_in_imatrix"] == []
    reader = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    keys = {"general.type": "imatrix", "imatrix.datasets": ["a.txt"], "imatrix.chunk_count": 5,
            "imatrix.chunk_size": 24}
    for key, value in keys.items():
        assert reader.get_field(key).contents() == value
    found = {tensor.name: tensor for tensor in reader.tensors}
    for module, source in json.loads(about["inputs"]).items():
        (name,) = imatrix.gguf_names(module)
        stack = re.sub(r"experts\.\d+", "experts", module)  # llama.cpp's converter stacks experts first
        assert name == gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2).get_name(stack)
        sums, counts = found[f"{name}.weight.in_sum2"], found[f"{name}.weight.counts"]
        assert list(sums.shape) == list(reversed(tensors[f"{source}.sum2"].shape))
        assert list(counts.shape) == [1, len(tensors[f"{source}.count"])]
        assert numpy.array_equal(sums.data, tensors[f"{source}.sum2"].numpy())
        assert numpy.array_equal(counts.data.ravel(), tensors[f"{source}.count"].numpy())
    assert len(found) == 2 * (2 * 4 + 1 + 3 + 3)


# ---- The command -----------------------------------------------------------------------------------------------------


def tokenizer_of(directory):
    """One token a word, with a chat template and a first token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(100)), "<user>"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = "{% for m in messages %}<user> {{ m.content }} {% endfor %}"
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": template}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(directory)


def test_text_becomes_windows(tmp_path):
    save_model("Llama", tmp_path, num_hidden_layers=1)
    tokenizer_of(tmp_path)
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in range(40)))
    lines = [{"messages": [{"role": "user", "content": "w7 w8"}]}, {"text": "w1 w2 w3"}, {"text": "w4 w5 w6 w7"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    got = calibrate.token_batches(tmp_path, [tmp_path / "a.txt", tmp_path / "b.jsonl"], 5, 4)
    w = lambda *numbers: [3 + n for n in numbers]
    assert got.tolist() == [[1, *w(0, 1, 2, 3)], [1, 103, *w(7, 8), 2], [1, *w(4, 5, 6, 7)], [1, *w(1, 2, 3), 2]]
    one = calibrate.token_batches(tmp_path, [tmp_path / "a.txt", tmp_path / "b.jsonl"], 10, 1)  # a share of each
    assert one.tolist() == [got[0].tolist(), got[1].tolist()]
    with pytest.raises(ValueError, match="b.jsonl: less text than one sequence"):
        calibrate.token_batches(tmp_path, [tmp_path / "b.jsonl"], 500, 4)
    for line, why in (('{"words": 1}', "it has neither"), ("[]", "it has neither"),
                      ('{"text": 5}', "its `text` is no string"), ("{", "Expecting")):
        (tmp_path / "c.jsonl").write_text(f'{{"text": "w1"}}\n{line}\n')
        with pytest.raises(ValueError, match=f"c.jsonl:2: {why}"):
            calibrate.token_batches(tmp_path, [tmp_path / "c.jsonl"], 5, 4)
    for name in ("d.txt", "d.jsonl"):  # what it says would otherwise be calibrated on is no text at all
        (tmp_path / name).write_bytes('{"text": "w1 w2 w3"}\n'.encode("utf-16"))
        with pytest.raises(ValueError, match=f"{name}: it is not text in UTF-8: invalid start byte"):
            calibrate.token_batches(tmp_path, [tmp_path / name], 5, 4)


def test_the_command(tmp_path, capsys):
    save_model("Llama", tmp_path / "model", num_hidden_layers=1)
    tokenizer_of(tmp_path / "model")
    (tmp_path / "a.txt").write_text(" ".join(f"w{i % 90}" for i in range(400)))
    model, stats = str(tmp_path / "model"), str(tmp_path / "stats")
    line = [model, "--out", stats, "--tokens", "64", "--sequence-length", "16"]
    assert calibrate.main([*line, "--text", str(tmp_path / "a.txt")]) == 0
    told = capsys.readouterr()
    assert "4 inputs, 64 tokens" in told.out and "layer 1 of 1, batch 4 of 4" in told.err and "RANDOM" not in told.err
    about = load(stats)[1]
    assert "a.txt" in json.loads(about["text_sha256"]) and "random_tokens" not in about
    assert calibrate.main([*line, "-q"]) == 0
    assert "RANDOM TOKENS" in capsys.readouterr().err and load(stats)[1]["random_tokens"] == "true"
    wrong_lines = [([*line, "--tokens", "0"], "--tokens"), (["--foo", *line], "--foo"), ([model], "--out"),
                   ([*line, "--text", str(tmp_path)], "no regular file"),
                   ([*line, "--damp", "nan"], "at least 0, not 'nan'"), ([*line, "--damp", "-1"], "--damp"),
                   ([*line, "--max-memory", "inf"], "--max-memory"),
                   ([*line, "--text", "absent"], "absent: no such file"), ([*line, "--batch", "-1"], "--batch"),
                   ([model + "x", *line[1:]], "no such directory")]
    if not torch.cuda.is_available():
        wrong_lines.append(([*line, "--device", "cuda"], "no GPU"))
    for wrong, why in wrong_lines:
        with pytest.raises(SystemExit) as stop:
            calibrate.main(wrong)
        assert stop.value.code == 2
        told = capsys.readouterr().err
        assert told.startswith("nib: calibrate: ") and why in told and told.count("\n") == 1

# SPDX-License-Identifier: Apache-2.0
"""python -m nib.generate and python -m nib.evaluate, on a tiny model with a tokenizer of its own."""
import io
import json
import os
import shutil

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from nib import calibrate, evaluate, generate  # noqa: E402
from test_torch_pretrained import write  # noqa: E402

WORDS = [f"w{i}" for i in range(120)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(directory of NVFP4, the values' own directory, two texts)."""
    place = tmp_path_factory.mktemp("commands")
    for name in ("nvfp4", "plain"):
        os.mkdir(place / name)
    write(place / "nvfp4").save_pretrained(place / "plain")
    table = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{word: i + 4 for i, word in enumerate(WORDS)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}w7"
    for name in ("nvfp4", "plain"):
        tokenizer.save_pretrained(place / name)
    draw = torch.Generator().manual_seed(1)
    for name, count in (("a", 100), ("b", 70)):
        words = [WORDS[i] for i in torch.randint(0, 120, (count,), generator=draw).tolist()]
        (place / f"{name}.txt").write_text(" ".join(words), encoding="utf-8")
    return place


def figures(capsys, place, *more):
    assert evaluate.main([str(place / "nvfp4"), "--against", str(place / "plain"), "--text", str(place / "a.txt"),
                          str(place / "b.txt"), "--length", "32", "--dtype", "float32", *more]) == 0
    return capsys.readouterr()


def test_evaluate(place, capsys):
    """Of a model and its own values: nothing but block fixed point; the same by layers, in tables and reports."""
    shown = figures(capsys, place, "--json")
    found = json.loads(shown.out)
    assert "window 5 of 5" in shown.err and found["windows"] == 5 and not found["layer_by_layer"]
    assert {name: part["windows"] for name, part in found["documents"].items()} == {"a": 3, "b": 2}
    assert abs(found["kl"]) < 1e-5 and found["top1"] > 0.95
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=1e-3)
    layers = json.loads(figures(capsys, place, "--json", "--layer-by-layer", "--batch", "2", "-q").out)
    assert layers.pop("layer_by_layer") and layers["positions"] == found["positions"]
    assert layers["perplexity"] == pytest.approx(found["perplexity"], rel=1e-5)
    four = json.loads(figures(capsys, place, "--json", "--activations", "nvfp4", "--windows", "1", "-q").out)
    assert four["kl"] > 1e-4 and four["documents"]["a"]["kl_error"] is None
    page = place / "page.html"
    page.write_text('<nav></nav><h2 id="how">How</h2>', encoding="utf-8")
    (place / "page.json").write_text("{}", encoding="utf-8")
    for _ in range(2):
        table = figures(capsys, place, "--report", str(page), "-q").out
    figures(capsys, place, "--report", str(place / "page.json"), "-q")
    assert table.splitlines()[0].split() == ["document", "windows", "KL", "+-", "perplexity", "original's", "top-1"]
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["a", "b", "all"]
    text = page.read_text(encoding="utf-8")
    assert text.count('id="evaluation"') == 1 and text.index("evaluation") < text.index('id="how"')
    assert json.loads((place / "page.json").read_text(encoding="utf-8"))["evaluation"]["windows"] == 5


def test_where_models_do_not_fit(place, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "_fits", lambda *_: False)
    shown = figures(capsys, place, "--json", "--windows", "1")
    assert json.loads(shown.out)["layer_by_layer"] and "do not fit" in shown.err
    assert evaluate._fits([place / "plain"], torch.device("cpu")) is False
    monkeypatch.undo()
    assert evaluate._fits([place / "plain"], torch.device("cpu"))


@pytest.mark.parametrize("arguments, message", [
    (["nothing", "--against", "{plain}", "--text", "{a}"], "nothing: no such directory"),
    (["{nvfp4}", "--against", "{plain}", "--text", "{no}"], "no such file"),
    (["{nvfp4}", "--against", "{plain}", "--text", "{a}", "--length", "999"], "no document has 999 tokens"),
    (["{nvfp4}", "--against", "{plain}"], "required: --text; see python -m nib.evaluate --help"),
    (["{nvfp4}", "--against", "{plain}", "--text", "{a}", "--device", "warp"], "no such device"),
    (["{nvfp4}", "--against", "{plain}", "--text", "{a}", "--windows", "0"], "takes a positive integer, not '0'"),
    (["{nvfp4}", "--against", "{plain}", "--text", "{plain}"], "plain: no regular file"),
    (["{nvfp4}", "--against", "{plain}", "--text", "{a}", "--length", "1"], "has none to predict"),
    (["{nvfp4}", "--against", "{plain}", "--text", "{a}", "--length", "32", "--report", "{a}", "-q"], "no report of"),
])
def test_evaluate_rejects(place, capsys, arguments, message):
    paths = {name: str(place / name) for name in ("nvfp4", "plain")} | {"a": str(place / "a.txt"), "no": "no.txt"}
    with pytest.raises(SystemExit) as caught:
        evaluate.main([argument.format(**paths) for argument in arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("nib: evaluate: ") and message in error


def test_gpus_are_counted(place, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        generate.main([str(place / "nvfp4"), "w1", "--device", "cuda:2"])
    assert capsys.readouterr().err == "nib: generate: --device cuda:2: the last GPU is cuda:1\n"


def test_generate(place, capsys, monkeypatch):
    directory = str(place / "nvfp4")

    def said(*arguments):
        assert generate.main([directory, *arguments]) == 0
        return capsys.readouterr()

    first = said("w1 w2 w3", "--max-new-tokens", "6", "--temperature", "0", "--stats", "--dtype", "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "plain", dtype=torch.float32)
    wanted = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)[0, 3:]
    shown = [WORDS[i - 4] for i in wanted.tolist() if i > 3]
    assert [word for word in first.out.split() if word in WORDS] == shown
    assert "prompt 3 tokens" in first.err and "tokens/s" in first.err and "of BF16" in first.err
    drawn = [said("w1", "--max-new-tokens", "8", "--temperature", "2", "--seed", seed).out for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    monkeypatch.setattr("sys.stdin", io.StringIO("w9"))
    chat = said("-", "--chat", "--system", "w4", "--max-new-tokens", "2", "--activations", "nvfp4", "--stats")
    assert "prompt 5 tokens" in chat.err  # system w4 user w9 w7
    for wrong, message in (([""], "the prompt is empty"), (["w1", "--system", "w2"], "--chat too"),
                           (["w1", "--temperature", "-1"], "takes a number of at least 0, not '-1'"),
                           (["w1", "--temperature", "inf"], "--temperature"), (["w1", "--seed", "9" * 19], "--seed"),
                           (["w1\udcff"], "not text in UTF-8"),
                           (["w1", "--chat", "--system", "\udcff"], "not text in UTF-8"),
                           (["w1", "--top-p", "1.5"], "from 0 to 1, not '1.5'"),
                           (["w1", "--tokenizer", "no"], "no tokenizer")):
        with pytest.raises(SystemExit):
            generate.main([directory, *wrong])
        assert message in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w1 \xff"), "utf-8"))
    with pytest.raises(SystemExit):
        generate.main([directory, "-"])
    assert capsys.readouterr().err == "nib: generate: the prompt is not text in UTF-8\n"
    with pytest.raises(SystemExit):
        generate.main([str(place / "plain"), "w1"])
    assert "no NVFP4 weight" in capsys.readouterr().err


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("file, content, message", [
    ("model.safetensors", "", "model.safetensors: "),
    ("config.json", "[]", "{directory}"),
    ("config.json", {"architectures": [1]}, "cannot make a model of its config.json: TypeError"),
    ("config.json", {"hidden_act": "none"}, "cannot make a model of its config.json: KeyError"),
    ("config.json", {"num_attention_heads": 0}, "{directory}: "),
    ("tokenizer.json", "{}", "{directory}: no tokenizer: "),
    ("tokenizer.json", "[" * 5000, "{directory}: no tokenizer: "),
    (INDEX, '{"weight_map": {"model.norm.weight": "\\u001b[2J.safetensors"}}', ""),
])
def test_damaged_directories(place, tmp_path, capsys, file, content, message):
    """One line that names the directory or file, whatever other packages raise, and nothing that a terminal obeys."""
    for name, command, arguments in (
            ("nvfp4", generate, ["w1", "--max-new-tokens", "1"]),
            ("nvfp4", evaluate, ["--against", str(place / "plain"), "--text", str(place / "a.txt"), "--length", "32"]),
            ("plain", calibrate, ["--text", str(place / "a.txt"), "--out", str(tmp_path / "stats"), "--tokens", "64",
                                  "--sequence-length", "32"])):
        directory = tmp_path / command.__name__
        shutil.copytree(place / name, directory)
        if command is evaluate and "tokenizer" in file:
            continue  # it has the original's
        text = content if isinstance(content, str) else json.dumps(
            {**json.loads((directory / file).read_text(encoding="utf-8")), **content})
        (directory / file).write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit) as caught:
            command.main([str(directory), *arguments])
        error = capsys.readouterr().err.splitlines()[-1]
        assert caught.value.code == 2 and message.format(directory=directory) in error and "\x1b" not in error


def test_architectures_are_models(place, tmp_path, capsys):
    """Other classes of transformers are not made with a configuration; one without a head says nothing."""
    directory = tmp_path / "model"
    shutil.copytree(place / "nvfp4", directory)
    about = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in ("GenerationConfig", "LlamaModel"):
        (directory / "config.json").write_text(json.dumps({**about, "architectures": [name]}), encoding="utf-8")
        if name == "GenerationConfig":
            assert generate.main([str(directory), "w1", "--max-new-tokens", "1"]) == 0
    for command, arguments in ((generate, ["w1"]), (evaluate, ["--against", str(place / "plain"), "--text",
                                                               str(place / "a.txt"), "--length", "32", "-q"])):
        with pytest.raises(SystemExit):
            command.main([str(directory), *arguments])
        assert "LlamaModel" in capsys.readouterr().err

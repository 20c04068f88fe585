# SPDX-License-Identifier: Apache-2.0
"""nib.quantize_checkpoint: its structs against the header, its keywords against the tool's options, and its runs."""
import ctypes
import inspect
import itertools
import json
import os
import re
import shutil
import struct
import subprocess

import numpy as np
import pytest

from conftest import ROOT
import nib
from nib import _checkpoint, _library
import test_header

try:
    _checkpoint.functions()
except nib.UnsupportedError as error:
    if os.environ.get("CI") == "true":
        raise
    pytest.skip(str(error), allow_module_level=True)

HEADER = re.sub(r"^ *#.*?$", "", test_header.read("nib_checkpoint.h"), flags=re.M)


# ---- The header ----------------------------------------------------------------------------------------------


def test_functions():
    pattern = re.compile(r"NIB_API\s+([^;()]*?)(\w+)\s*\(((?:[^()]|\([^()]*\))*)\)\s*;", re.S)
    declared = {m[2]: (m[1].strip(), test_header.split_arguments(m[3])) for m in pattern.finditer(HEADER)}
    for name, (result, arguments) in _checkpoint.FUNCTIONS.items():
        kind, parameters = declared[name]
        assert [test_header.kind_of_ctypes(t) for t in arguments] == [test_header.kind_of(p) for p in parameters], name
        assert (kind == "nib_status") == (result is _library.STATUS), name


def test_structs_and_enums(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("there is no C compiler to ask")
    lines = []
    for name, kind in _checkpoint.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{f} %zu\\n", offsetof({name}, {f}));' for f, _ in kind._fields_]
    for name, (kind, prefix) in _checkpoint.ENUMS.items():
        lines += [f'printf("{prefix}{m.name} %zu\\n", (size_t){prefix}{m.name});' for m in kind]
    source, program = tmp_path / "ask.c", tmp_path / "ask"
    source.write_text("#include <stddef.h>\n#include <stdio.h>\n#include \"nib_checkpoint.h\"\nint main(void)\n{\n" +
                      "\n".join(lines) + "\n}\n")
    subprocess.run([compiler, "-I", os.path.join(ROOT, "include"), str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    said = dict(line.split() for line in output.splitlines())
    for name, kind in _checkpoint.STRUCTS.items():
        fields = re.search(r"typedef struct " + name + r" \{(.*?)\} " + name, HEADER, re.S)[1]
        assert int(said[name]) == ctypes.sizeof(kind), name
        assert fields.count(";") <= len(kind._fields_), f"{name} has a field that Python does not know"
        for field, _ in kind._fields_:
            assert int(said[f"{name}.{field}"]) == getattr(kind, field).offset, f"{name}.{field}"
    for name, (kind, prefix) in _checkpoint.ENUMS.items():
        body = re.search(r"typedef enum " + name + r" \{(.*?)\}", HEADER, re.S)[1]
        assert body.count(prefix) == len(kind) + 1, name
        for member in kind:
            assert int(said[prefix + member.name]) == member


def test_every_option_of_the_tool_is_a_keyword():
    with open(os.path.join(ROOT, "tools/quantize.c"), encoding="utf-8") as file:
        own = re.findall(r'\{ (?:0|\'\w\'), "([a-z-]+)", CLI_', file.read())
    with open(os.path.join(ROOT, "tools/run_plan.h"), encoding="utf-8") as file:
        shared = re.findall(r'"([a-z-]+)",\s*CLI_', file.read())
    assert len(own) > 15 and len(shared) > 5
    keywords = set(inspect.signature(nib.quantize_checkpoint).parameters)
    said_otherwise = {"report", "quiet", "verbose", "json", "fold-exponent", "fold-search"}  # fold=0.5, fold="search"
    for option in set(own + shared) - said_otherwise:
        assert {"for": "for_"}.get(option, option.replace("-", "_")) in keywords, option


# ---- Runs ----------------------------------------------------------------------------------------------------


def write(path, tensors, metadata=None, kinds=None):
    header, data = {"__metadata__": metadata or {"format": "pt"}}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        dtype = (kinds or {}).get(name) or {"float32": "F32", "int64": "I64", "uint8": "U8"}[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read(path):
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + n])
    header.pop("__metadata__", None)
    kinds = {"U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32}
    found = {}
    for name, t in header.items():
        begin, end = (8 + n + offset for offset in t["data_offsets"])
        found[name] = np.frombuffer(raw[begin:end], kinds[t["dtype"]]).reshape(t["shape"])
    return found


NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(3)
    place = tmp_path / "model"
    place.mkdir()
    shapes = {"mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
              "self_attn.o_proj": (64, 64)}
    tensors = {f"model.layers.0.{name}.weight": rng.standard_normal(shape).astype(np.float32)
               for name, shape in shapes.items()}
    tensors["model.layers.0.post_attention_layernorm.weight"] = np.ones(64, np.float32)
    write(place / "model.safetensors", tensors)
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}))
    return place


def statistics_of(model, place):
    squares = {name.removesuffix(".weight"): np.random.default_rng(4).gamma(0.5, 2, w.shape[1]).astype(np.float32)
               for name, w in read(model / "model.safetensors").items() if w.ndim == 2}
    tensors = {}
    for name, values in squares.items():
        tensors[name + ".sum2"], tensors[name + ".count"] = values.reshape(1, -1), np.array([1])
    write(place, tensors, {"format": "nib-stats-1", "inputs": json.dumps({name: name for name in squares})})
    return squares


def test_a_run(model, tmp_path):
    seen = []
    squares = statistics_of(model, tmp_path / "stats")
    report = nib.quantize_checkpoint(model, tmp_path / "out", imatrix=tmp_path / "stats", ignore=["*o_proj"],
                                     progress=lambda *step: seen.append(step))
    assert report["changed"] == 3 and report["kept"] == 1 and report["elements"] == 3 * 128 * 64 + 64 * 64 + 64
    rows = {row["name"]: row for row in report["rows"]}
    assert rows[NAME]["action"] == "quantize" and rows[NAME]["statistics"] == "1 tokens" and rows[NAME]["tokens"] == 1
    assert rows["model.layers.0.self_attn.o_proj"]["reason"] == "ignored by *o_proj"
    assert {step[0] for step in seen} == {"quantizing"} and seen[-1][1] == seen[-1][2] > 0  # one file: in one pass
    q = nib.Quantizer(scale_rule="sweep", tensor_scale_rule="pow2", min_block_scale=2.0**-6, columnwise=False)
    weight = read(model / "model.safetensors")[NAME + ".weight"]
    t = nib.quantize(weight, q, overrides={"importance": nib.importance(squares[NAME])})
    written = read(tmp_path / "out" / "model.safetensors")
    assert (written[NAME + ".weight_packed"] == t.row_data.reshape(64, -1)).all()
    with pytest.raises(nib.Error, match="exists"):
        nib.quantize_checkpoint(model, tmp_path / "out")
    again = nib.quantize_checkpoint(model, tmp_path / "out", force=True, scale="rtn", threads=1, max_memory=1 << 20)
    assert again["changed"] == 4
    rounded = read(tmp_path / "out" / "model.safetensors")
    assert not (rounded[NAME + ".weight_packed"] == written[NAME + ".weight_packed"]).all()


def test_gptq(model, tmp_path):
    squares = statistics_of(model, tmp_path / "stats")
    cols = squares[NAME].size
    random = np.random.default_rng(3)
    inputs = random.normal(size=(2 * cols, cols)) @ random.normal(size=(cols, cols))
    hessian = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    packed = {NAME + ".hessian": hessian[np.triu_indices(cols)], NAME + ".hessian_count": np.array([6 * cols])}
    for directory in ("stats.hessians", "few"):
        (tmp_path / directory).mkdir()
        write(tmp_path / directory / "stats-of-layer-00000.safetensors", packed, {"format": "nib-stats-1"})
        packed[NAME + ".hessian_count"] -= 1
    few = nib.quantize_checkpoint(model, tmp_path / "few.out", imatrix=tmp_path / "stats", gptq=True,
                                  hessians=tmp_path / "few")
    said = {row["name"]: row["gptq"] for row in few["rows"]}
    assert said[NAME] == f"none: {6 * cols - 1} tokens, and {cols} columns need {6 * cols}"
    report = nib.quantize_checkpoint(model, tmp_path / "out", imatrix=tmp_path / "stats", gptq=True, damp=0.2)
    assert {row["name"]: row["gptq"] for row in report["rows"]}[NAME] == f"{6 * cols} tokens"
    q = nib.Quantizer(scale_rule="sweep", tensor_scale_rule="pow2", min_block_scale=2.0**-6, columnwise=False)
    weight = read(model / "model.safetensors")[NAME + ".weight"]
    t = nib.quantize(weight, q, overrides={"importance": nib.importance(squares[NAME])})
    assert (read(tmp_path / "few.out/model.safetensors")[NAME + ".weight_packed"] == t.row_data.reshape(64, -1)).all()
    order, u, _ = nib.gptq_factorize(hessian, damp=float(np.float32(0.2)))
    nib.gptq(weight, order, u, t)
    assert (read(tmp_path / "out/model.safetensors")[NAME + ".weight_packed"] == t.row_data.reshape(64, -1)).all()
    for options, what in (({"gptq": True, "imatrix": None}, "imatrix"), ({"damp": 0.1}, "--gptq"),
                          ({"gptq": True, "damp": -1}, "not negative"),
                          ({"gptq": True, "hessians": tmp_path}, "no Hessians")):
        with pytest.raises(nib.Error, match=what):
            nib.quantize_checkpoint(model, tmp_path / "none", **{"imatrix": tmp_path / "stats", **options})


def test_options(model, tmp_path):
    def plan(**options):
        return nib.quantize_checkpoint(model, tmp_path / "none", dry_run=True, **options)

    assert plan(only=[NAME])["changed"] == 1 and plan(preset="mlp-only")["changed"] == 3
    assert plan(for_="sglang")["changed"] == 4
    assert plan(format="modelopt", scheme="nvfp4", activations="norm")["changed"] == 4
    statistics_of(model, tmp_path / "stats")
    for fold in (True, 0.5, "search"):
        folded = {row["name"]: row["fold"] for row in plan(imatrix=tmp_path / "stats", fold=fold)["rows"]}
        assert folded[NAME] == "model.layers.0.mlp.up_proj"
    assert not (tmp_path / "none").exists()
    sglang = {"for_": "sglang", "format": "compressed-tensors", "scheme": "nvfp4a16"}
    for options, what in (({"scale": "best"}, "rtn, 4over6, sweep"), ({"format": "plain"}, "written as"),
                          ({"preset": "all"}, "preset"), (sglang, "sglang cannot load"), ({"fold": True}, "statistics"),
                          ({"fold": 2}, "exponent"), ({"ignore": "x"}, "list"), ({"only": ["nothing"]}, "nothing"),
                          ({"activations": "a.json"}, "nvfp4"), ({"dialect": "x"}, "dialect"),
                          ({"imatrix": "absent"}, "absent"), ({"min_block_scale": -1}, "448")):
        with pytest.raises(nib.Error, match=what):
            plan(**options)
    with pytest.raises(nib.Error, match="absent"):
        nib.quantize_checkpoint(tmp_path / "absent", tmp_path / "out")


def test_codes_of_another_checkpoint(model, tmp_path):
    out, other, chosen = tmp_path / "out", tmp_path / "other", tmp_path / "chosen"

    def run(codes, **options):
        nib.quantize_checkpoint(model, out, codes=codes, force=True, **options)
        return read(out / "model.safetensors")

    nib.quantize_checkpoint(model, other, format="modelopt", scale="4over6", tensor_scale="exact")
    whole = read(other / "model.safetensors")
    got = run(other)
    for name in {name.removesuffix(".weight") for name, value in whole.items() if value.dtype == np.uint8} - {NAME}:
        if not name.endswith("_scale"):
            assert (got[name + ".weight_packed"] == whole[name + ".weight"]).all()
            assert (got[name + ".weight_scale"] == whole[name + ".weight_scale"]).all()
            assert got[name + ".weight_global_scale"][0] == np.float32(1) / whole[name + ".weight_scale_2"]
    assert "codes_xxh3" in (out / "config.json").read_text()
    nib.quantize_checkpoint(model, chosen, only=[NAME])  # one is there, the others are quantized as ever
    again, plain = run(chosen, scale="rtn"), {}
    nib.quantize_checkpoint(model, out, scale="rtn", force=True)
    plain = read(out / "model.safetensors")
    taken = read(chosen / "model.safetensors")
    assert (again[NAME + ".weight_packed"] == taken[NAME + ".weight_packed"]).all()
    assert not (plain[NAME + ".weight_packed"] == taken[NAME + ".weight_packed"]).all()
    assert all((again[name] == value).all() for name, value in plain.items() if NAME not in name)


def test_codes_that_do_not_fit(model, tmp_path):
    made = itertools.count()

    def codes(**changed):
        place = tmp_path / f"codes-{next(made)}"
        nib.quantize_checkpoint(model, place, force=True)
        tensors = {**read(place / "model.safetensors"), **changed}
        for name in [name for name, value in changed.items() if value is None]:
            del tensors[name]
        kinds = {name: "F8_E4M3" for name in tensors if name.endswith("_scale") and "global" not in name}
        write(place / "model.safetensors", tensors, None, kinds)
        return place

    up, gate = ("model.layers.0.mlp.up_proj.weight_", "model.layers.0.mlp.gate_proj.weight_")
    three = {up + part: None for part in ("packed", "scale", "global_scale")}
    for place, what in ((model, "no NVFP4 weight"), (codes(**three), "gate_proj.*but not.*up_proj.*fuse"),
                        (codes(**{up + "global_scale": np.array([3], np.float32)}), "tensor scales 3 and 512"),
                        (codes(**{up + "global_scale": np.array([0], np.float32)}), "tensor scale of .*up_proj.* is 0"),
                        (codes(**{f"{NAME}.weight_packed": np.zeros((32, 64), np.uint8),
                                  f"{NAME}.weight_scale": np.zeros((32, 8), np.uint8)}), r"\[32, 128\] there"),
                        (tmp_path / "absent", "absent")):
        with pytest.raises(nib.Error, match=what):
            nib.quantize_checkpoint(model, tmp_path / "none", codes=place, dry_run=True)
    assert gate + "packed" in read(codes() / "model.safetensors")
    with pytest.raises(nib.ModeError, match="gguf"):
        nib.quantize_checkpoint(model, tmp_path / "none.gguf", codes=codes(), dry_run=True)


def test_values_come_back(model, tmp_path):
    nib.quantize_checkpoint(model, tmp_path / "out")
    report = nib.dequantize_checkpoint(tmp_path / "out", tmp_path / "plain", dtype="f32")
    before, after = read(model / "model.safetensors"), read(tmp_path / "plain" / "model.safetensors")
    assert report["changed"] == 4 and {name: value.shape for name, value in before.items()} == \
        {name: value.shape for name, value in after.items()}
    error = np.square(before[NAME + ".weight"] - after[NAME + ".weight"]).mean()
    assert 0 < error < 0.02
    with pytest.raises(nib.Error, match="f32, bf16, f16"):
        nib.dequantize_checkpoint(tmp_path / "out", tmp_path / "plain", dtype="u8")


def test_a_run_that_is_stopped(model, tmp_path):
    def interrupt(*step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nib.quantize_checkpoint(model, tmp_path / "out", progress=interrupt)
    with pytest.raises(nib.CancelledError):
        nib.quantize_checkpoint(model, tmp_path / "out", progress=lambda *step: True)
    assert not (tmp_path / "out").exists()


def test_a_library_that_is_not_there(monkeypatch):
    monkeypatch.setenv("NIB_CHECKPOINT_LIBRARY", "/nowhere/libnib_checkpoint.so")
    monkeypatch.setattr(_checkpoint, "_functions", None)
    with pytest.raises(nib.UnsupportedError, match="jansson"):
        _checkpoint.functions()

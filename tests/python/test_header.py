# SPDX-License-Identifier: Apache-2.0
"""nib._library against the headers of libnib: every function, enum and struct, as a C compiler sees them; and Python's
enums against the names that the library itself has for their members."""
import ctypes
import os
import pickle
import re
import shutil
import subprocess

import pytest

from conftest import ROOT
import nib
from nib import _library

OTHER_LIBRARIES = {"nib_checkpoint.h", "nib_cuda.h", "nib_mpi.h"}
HEADERS = sorted(set(os.listdir(os.path.join(ROOT, "include"))) - OTHER_LIBRARIES)


def read(name):
    with open(os.path.join(ROOT, "include", name), encoding="utf-8") as file:
        return re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)


HEADER = "".join(read(name) for name in HEADERS)
PLAIN = re.sub(r"^ *#.*?$", "", HEADER, flags=re.M)


def split_arguments(text):
    parts, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [] if text.strip() == "void" else [p.strip() for p in parts]


def functions():
    pattern = re.compile(r"NIB_API\s+([^;()]*?)(\w+)\s*\(((?:[^()]|\([^()]*\))*)\)\s*;", re.S)
    return {m[2]: (m[1].strip(), split_arguments(m[3])) for m in pattern.finditer(PLAIN)}


def kind_of(declaration):
    """pointer, float, double, an integer's width and sign, or void; of a C declaration."""
    declaration = declaration.strip()
    if "*" in declaration or "[" in declaration or "(" in declaration:
        return "pointer"
    word = next(w for w in re.findall(r"\w+", declaration) if w not in ("const", "struct"))
    kinds = {"float": "float", "double": "double", "int": "i4", "int32_t": "i4", "int64_t": "i8", "size_t": "u8",
             "uint64_t": "u8", "uint8_t": "u1", "uint16_t": "u2", "uint32_t": "u4", "void": "void"}
    return kinds.get(word, "i4")  # what is left are enums


def kind_of_ctypes(t):
    if t is None:
        return "void"
    if t in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(t, ctypes._Pointer):
        return "pointer"
    if t in (ctypes.c_float, ctypes.c_double):
        return "float" if t is ctypes.c_float else "double"
    return ("u" if t(-1).value > 0 else "i") + str(ctypes.sizeof(t))


def test_every_function_is_declared():
    declared = functions()
    assert len(HEADERS) >= 5 and len(declared) > 100
    assert set(declared) == set(_library.FUNCTIONS)


@pytest.mark.parametrize("name", sorted(functions()))
def test_function(name):
    result, arguments = functions()[name]
    mine, my_arguments = _library.FUNCTIONS[name]
    assert [kind_of_ctypes(t) for t in my_arguments] == [kind_of(a) for a in arguments]
    assert (result == "nib_status") == (mine is _library.STATUS)
    if mine is not _library.STATUS:
        assert kind_of_ctypes(mine) == kind_of(result)


def enums():
    return {m[1]: [re.sub(r"\s*=.*", "", item).strip() for item in m[2].split(",") if item.strip()]
            for m in re.finditer(r"typedef enum (\w+) \{(.*?)\}", PLAIN, re.S)}


def run_c(tmp_path, body):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("there is no C compiler to ask")
    source, program = tmp_path / "ask.c", tmp_path / "ask"
    includes = "".join(f"#include {name}\n" for name in ("<stddef.h>", "<stdio.h>", *(f'"{h}"' for h in HEADERS)))
    source.write_text(f"{includes}int main(void)\n{{\n{body}}}\n")
    subprocess.run([compiler, "-I", os.path.join(ROOT, "include"), str(source), "-o", str(program)], check=True)
    return dict(line.rsplit(" ", 1) for line in subprocess.run([str(program)], check=True, capture_output=True,
                                                                text=True).stdout.splitlines())


def test_enums(tmp_path):
    found = enums()
    names = [name for names in found.values() for name in names]
    values = run_c(tmp_path, "".join(f'    printf("{name} %d\\n", (int){name});\n' for name in names))
    assert set(found) == set(_library.ENUMS) | {"nib_status"}
    for name, (kind, prefix) in _library.ENUMS.items():
        expected = {n: int(values[n]) for n in found[name] if not n.endswith("_COUNT")}
        mine = {(prefix + m.name).replace("FOUR_OVER_SIX", "4OVER6"): m.value for m in kind}
        assert mine == expected, name
    statuses = [n for n in found["nib_status"] if n != "NIB_STATUS_COUNT"]
    assert len(_library._ERRORS) == len(statuses)
    assert _library.MAX_RANK == int(re.search(r"#define NIB_MAX_RANK (\d+)", HEADER)[1])
    assert _library.RHT_SIGN_MASK == int(re.search(r"#define NIB_RHT_SIGN_MASK (0x\w+)u", HEADER)[1], 16)


def names_of(function, count=None):
    """What the library calls the values 0, 1, ... of an enum, up to `count` or to the first that has no name."""
    names = []
    while count is None or len(names) < count:
        name = function(len(names))
        if name is None:
            break
        names.append(name.decode())
    return names


def test_names_of_formats_and_dialects():
    raw = _library.raw
    for kind, names in ((nib.Format, names_of(raw.nib_format_name)), (nib.Dialect, names_of(raw.nib_dialect_name))):
        assert {m.name: m.value for m in kind} == {n.upper().replace("-", "_"): i for i, n in enumerate(names)}
        assert all(nib._tensor._member(kind, name) == i for i, name in enumerate(names))
        assert all(pickle.loads(pickle.dumps(m)) is m for m in kind)
    assert len(nib.Format) == raw.nib_format_count()


def test_names_of_dtypes():
    """Those of safetensors, which have a kind before the bits of small floats."""
    names = names_of(_library.raw.nib_dtype_name)
    assert {m.name: m.value for m in nib.DType} == {n.removeprefix("F8_").removeprefix("F6_").replace("F4", "E2M1"): i
                                                    for i, n in enumerate(names)}


def test_names_of_statuses():
    classes = {"NIB_ERR_ARG": nib.ArgumentError, "NIB_ERR_MEMORY": nib.OutOfMemoryError, "NIB_ERR_IO": nib.FileError}
    count = int(re.search(r"typedef enum nib_status \{(.*?)\}", PLAIN, re.S)[1].count("NIB_")) - 1
    names = names_of(_library.raw.nib_status_name, count)
    assert names[0] == "NIB_OK" and len(names) == len(_library._ERRORS)
    for name, kind in zip(names[1:], _library._ERRORS[1:]):
        assert kind is classes.get(name, getattr(nib, name.removeprefix("NIB_ERR_").capitalize() + "Error", None)), name


def test_version():
    assert nib.__version__ == re.search(r'#define NIB_VERSION "(.*)"', HEADER)[1]


def test_structs(tmp_path):
    declared = set(re.findall(r"struct (\w+) \{", PLAIN))
    assert declared == set(_library.STRUCTS)
    body = ""
    for name, kind in _library.STRUCTS.items():
        body += f'    printf("{name} %zu\\n", sizeof({name}));\n'
        for field in kind._fields_:
            body += f'    printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));\n'
            body += f'    printf("{name}.{field[0]}! %zu\\n", sizeof((({name} *)0)->{field[0]}));\n'
    answers = run_c(tmp_path, body)
    for name, kind in _library.STRUCTS.items():
        assert ctypes.sizeof(kind) == int(answers[name]), name
        for field in kind._fields_:
            member, what = getattr(kind, field[0]), f"{name}.{field[0]}"
            assert (member.offset, member.size) == (int(answers[what]), int(answers[what + "!"])), what


def test_a_library_of_another_version_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setitem(_library.FUNCTIONS, "nib_no_such_function", (None, []))
    with pytest.raises(ImportError, match="nib_no_such_function"):
        _library._Functions(_library.path, check=False)
    with pytest.raises(ImportError, match="pip install"):
        _library._Functions(str(tmp_path / "libnib.so"), check=False)

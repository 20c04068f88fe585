# SPDX-License-Identifier: Apache-2.0
"""nib._library against include/nib.h: every function, enum and struct, as a C compiler sees them."""
import ctypes
import os
import re
import shutil
import subprocess

import pytest

from conftest import ROOT
from nib import _library

with open(os.path.join(ROOT, "include/nib.h"), encoding="utf-8") as _file:
    HEADER = re.sub(r"/\*.*?\*/", "", _file.read(), flags=re.S)
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
    """pointer, float, an integer's width and sign, or void; of a C declaration."""
    declaration = declaration.strip()
    if "*" in declaration or "[" in declaration or "(" in declaration:
        return "pointer"
    word = next(w for w in re.findall(r"\w+", declaration) if w not in ("const", "struct"))
    kinds = {"float": "float", "int": "i4", "int32_t": "i4", "int64_t": "i8", "size_t": "u8", "uint64_t": "u8",
             "uint8_t": "u1", "uint16_t": "u2", "uint32_t": "u4", "void": "void"}
    return kinds.get(word, "i4")  # what is left are enums


def kind_of_ctypes(t):
    if t is None:
        return "void"
    if t in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(t, ctypes._Pointer):
        return "pointer"
    if t is ctypes.c_float:
        return "float"
    return ("u" if t(-1).value > 0 else "i") + str(ctypes.sizeof(t))


def test_every_function_is_declared():
    declared = functions()
    assert len(declared) > 100
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
    source.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "nib.h"\nint main(void)\n{\n' + body + "}\n")
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


def test_structs(tmp_path):
    declared = set(re.findall(r"typedef struct (\w+) \{", PLAIN))
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


def test_a_library_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(_library.FUNCTIONS, "nib_no_such_function", (None, []))
    with pytest.raises(ImportError, match="nib_no_such_function"):
        _library._Functions(_library.path, check=False)
    with pytest.raises(ImportError, match="pip install"):
        _library._Functions(str(tmp_path / "libnib.so"), check=False)

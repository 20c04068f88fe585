# SPDX-License-Identifier: Apache-2.0
"""Every example of docs/python.md, as it stands there; and that no class is without one."""
import importlib.util
import os
import re
import sys
import types

import pytest

from conftest import ROOT

with open(os.path.join(ROOT, "docs/python.md"), encoding="utf-8") as file:
    SECTIONS = re.split(r"^## ", file.read(), flags=re.M)[1:]
EXAMPLES = [(section.partition("\n")[0], code) for section in SECTIONS
            for code in re.findall(r"^```python\n(.*?)^```", section, flags=re.M | re.S)]
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.parametrize("title, code", EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_example(title, code):
    if "torch" in code and not HAS_TORCH:
        pytest.skip("needs PyTorch; TORCH=1 installs it")
    if "transformers" in code:
        pytest.importorskip("transformers")
    example = sys.modules["example"] = types.ModuleType("example")  # torch.compile asks for the module of a function
    try:
        exec(compile(code, title, "exec"), vars(example))
    finally:
        del sys.modules["example"]


def test_every_section_has_an_example():
    assert len(EXAMPLES) == len(SECTIONS) >= 30


def test_every_link_has_a_section():
    with open(os.path.join(ROOT, "docs/python.md"), encoding="utf-8") as file:
        links = re.findall(r"\]\(#([^)]*)\)", file.read())
    anchors = {re.sub(r"[^\w -]", "", section.partition("\n")[0].lower()).replace(" ", "-") for section in SECTIONS}
    assert set(links) <= anchors, set(links) - anchors


def test_every_class_is_there():
    pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")
    import nib.torch
    text = "\n".join(SECTIONS)
    for name, value in vars(nib.torch).items():
        if isinstance(value, type) and not name.startswith("_"):
            assert re.search(rf"\b{name}\b", text), name

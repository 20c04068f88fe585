#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a file of vectors out of another one: a helper of the tests of `nib conform`.

    make_vectors.py SOURCE TARGET [EDIT ARGUMENT...]...

Edits, done in the order given:
    only CASE             keep this case and its tensors
    set CASE KEY JSON     give a case a key
    unset CASE KEY        take a key away
    case CASE JSON        make a case, or replace what it says
    flip TENSOR BYTE MASK change bits of one byte of a tensor
    drop TENSOR           remove a tensor
    rename TENSOR NAME    give a tensor another name
    copy TENSOR NAME      have it under another name too
    type TENSOR DTYPE     call its bytes another dtype
    shape TENSOR JSON     give it another shape (of the same number of bytes)
    metadata KEY TEXT     set a value of the file's metadata as it is
    unmetadata KEY        take it away
    cut BYTES             cut the written file to this size
"""
import json
import struct
import sys


def read(path):
    with open(path, "rb") as file:
        raw = file.read()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + size])
    metadata = header.pop("__metadata__", {})
    data = raw[8 + size:]
    tensors = {name: [t["dtype"], t["shape"], bytearray(data[slice(*t["data_offsets"])])] for name, t in header.items()}
    return metadata, tensors


def write(path, metadata, tensors, cut):
    header, at = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values())
    with open(path, "wb") as file:
        file.write(raw[:cut])


class Editor:
    def __init__(self, metadata, tensors):
        self.metadata, self.tensors, self.cut_to = metadata, tensors, None
        self.cases = json.loads(metadata.pop("cases"))

    def only(self, case):
        self.cases = {case: self.cases[case]}
        self.tensors = {name: t for name, t in self.tensors.items() if name.rpartition("/")[0] == case}

    def set(self, case, key, text):
        self.cases[case][key] = json.loads(text)

    def unset(self, case, key):
        del self.cases[case][key]

    def case(self, case, text):
        self.cases[case] = json.loads(text)

    def flip(self, tensor, byte, mask):
        self.tensors[tensor][2][int(byte)] ^= int(mask, 0)

    def drop(self, tensor):
        del self.tensors[tensor]

    def rename(self, tensor, name):
        self.tensors[name] = self.tensors.pop(tensor)

    def copy(self, tensor, name):
        self.tensors[name] = self.tensors[tensor]

    def type(self, tensor, dtype):
        self.tensors[tensor][0] = dtype

    def shape(self, tensor, text):
        self.tensors[tensor][1] = json.loads(text)

    def metadata_(self, key, text):
        self.metadata[key] = text
        if key == "cases":
            self.cases = None

    def unmetadata(self, key):
        self.metadata.pop(key, None)
        if key == "cases":
            self.cases = None

    def cut(self, size):
        self.cut_to = int(size)


def main(source, target, *words):
    editor = Editor(*read(source))
    words = list(words)
    while words:
        word = words.pop(0)
        edit = getattr(editor, "metadata_" if word == "metadata" else word)
        count = edit.__func__.__code__.co_argcount - 1
        edit(*words[:count])
        del words[:count]
    if editor.cases is not None:
        editor.metadata["cases"] = json.dumps(editor.cases)
    write(target, editor.metadata, editor.tensors, editor.cut_to)


if __name__ == "__main__":
    main(*sys.argv[1:])

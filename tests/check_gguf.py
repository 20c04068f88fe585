# SPDX-License-Identifier: Apache-2.0
# needs: gguf numpy
"""The GGUF container against the gguf package, an independent reader and writer, and against its dequantization.

    check_gguf.py LIBNIB NIB      (NIB_SEED=n for other files; CC is the compiler)

The corpus of the fuzz target and mutants of it (NIB_MUTANTS=n, and NIB_CORPUS, what a fuzzer made of it) must be accepted
by both or refused by both, with the same keys and tensors, except where the tables below say how and why they differ.
Files that nib writes must have the bytes that gguf writes, and gguf must read them. nib must read in gguf's files what
gguf reads there, and a damaged file that nib accepts must be one in which gguf sees the same. The container is no part of
the public interface, so that its sources are built here into a library that shows everything: nothing but libc is
needed for it.
"""
import ctypes
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import tempfile

try:
    import gguf
    import numpy as np
except ImportError:
    print("check_gguf: the gguf package is not installed")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(0)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCES = """src/base/base src/base/os src/file/json src/file/interval_set
             checkpoint/io/gguf checkpoint/io/gguf_write checkpoint/io/gguf_blocks checkpoint/io/gguf_decode""".split()
KINDS = list(gguf.GGUFValueType)
STRING, ARRAY, BOOL = (gguf.GGUFValueType[name] for name in ("STRING", "ARRAY", "BOOL"))
PACK = {"UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i", "FLOAT32": "f",
        "BOOL": "?", "UINT64": "Q", "INT64": "q", "FLOAT64": "d"}
TYPES = {int(t): sizes for t, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
TOOL = sys.argv[2] if len(sys.argv) > 2 else os.path.join(ROOT, "build", "nib")
NVFP4, MXFP4 = gguf.GGMLQuantizationType.NVFP4, gguf.GGMLQuantizationType.MXFP4

# What gguf is not asked: it believes counts, and reads beyond the end of a file for as long as they say.
UNBOUNDED = r"claims|more than the|ends within|array of arrays|it has \d+ bytes, and|beyond the largest"
# Where nib refuses what gguf takes: what nib's sentence says, and why.
STRICTER = [
    (r"the file is big-endian", "gguf swaps the bytes; nib says what to do first, as llama.cpp does"),
    (r"its data begins at byte \d+, but", "gaps and overlaps of tensors, which llama.cpp refuses too"),
    (r"holds a NUL", "a C string, and with it the interface, cannot hold it"),
    (r"is empty", "nothing can refer to it"),
    (r'key ".*" comes twice', "gguf keeps the second under another name"),
    (r"the kind of its items \d+ is unknown", "of an array without items gguf does not look at the kind"),
    (r"rank \d+ is more than", "GGML has four dims"),
    (r"dim \d+ is", "dims are positive"),
]
# Where nib takes what gguf refuses: what gguf says, and why.
LAXER = [
    (r"IndexError: tuple index out of range", "a tensor without dims is one value; gguf has no array for it"),
]


class Refused(Exception):
    """A call failed; the text is nib's sentence."""


class Facts(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("alignment", ctypes.c_uint32), ("data_begin", ctypes.c_uint64),
                ("trailing", ctypes.c_uint64)]


class Layout(ctypes.Structure):
    _fields_ = [("data_begin", ctypes.c_uint64), ("file_bytes", ctypes.c_uint64)]


class TypeFacts(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("elements", ctypes.c_uint32), ("bytes", ctypes.c_uint32)]


class Entry(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("type", ctypes.c_uint32), ("rank", ctypes.c_int),
                ("shape", ctypes.c_int64 * 4), ("begin", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class Value(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("kind", ctypes.c_int), ("item", ctypes.c_int), ("count", ctypes.c_uint64),
                ("bytes", ctypes.c_uint64), ("number", ctypes.c_uint64)]


class Strings(ctypes.Structure):
    _fields_ = [("text", ctypes.c_void_p), ("count", ctypes.c_size_t), ("starts", ctypes.POINTER(ctypes.c_size_t))]


class Nib:
    def __init__(self, folder):
        path = os.path.join(folder, "libgguf.so")
        sources = [os.path.join(ROOT, name + ".c") for name in SOURCES]
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O1", "-fPIC", "-shared", "-Wl,-z,defs",
                        *["-I" + os.path.join(ROOT, name) for name in ("include", "src", "checkpoint")], *sources, "-o", path],
                       check=True)
        self.lib = lib = ctypes.CDLL(path)
        lib.nib_last_error.restype = ctypes.c_char_p
        lib.nib_gguf_facts.restype = Facts
        lib.nib_gguf_plan_layout.restype = Layout
        lib.nib_gguf_type_facts.restype = ctypes.POINTER(TypeFacts)
        for name in ("count", "key_count", "nvfp4_join", "nvfp4_split"):
            getattr(lib, "nib_gguf_" + name).restype = ctypes.c_size_t

    def call(self, name, *arguments):
        if getattr(self.lib, name)(*arguments):
            raise Refused(self.lib.nib_last_error().decode("utf-8", "replace"))

    def read(self, path):
        """{name: (type, shape, bytes)}, {key: (kind, item, count, raw bytes)}, facts."""
        lib, file = self.lib, ctypes.c_void_p()
        self.call("nib_gguf_open", os.fsencode(path), ctypes.byref(file))
        try:
            tensors, keys = {}, {}
            for i in range(lib.nib_gguf_count(file)):
                entry = Entry()
                self.call("nib_gguf_entry", file, ctypes.c_size_t(i), ctypes.byref(entry))
                data = ctypes.create_string_buffer(entry.bytes + 1)
                self.call("nib_gguf_read", file, ctypes.c_size_t(i), ctypes.c_uint64(0), data,
                          ctypes.c_size_t(entry.bytes))
                tensors[entry.name.decode()] = (entry.type, list(entry.shape[:entry.rank]), data.raw[:-1])
            for i in range(lib.nib_gguf_key_count(file)):
                value = Value()
                self.call("nib_gguf_value", file, ctypes.c_size_t(i), ctypes.byref(value))
                data = ctypes.create_string_buffer(value.bytes + 1)
                self.call("nib_gguf_read_value", file, ctypes.c_size_t(i), ctypes.c_uint64(0), data,
                          ctypes.c_size_t(value.bytes))
                keys[value.key.decode()] = (value.kind, value.item, value.count, data.raw[:-1])
                self.compare_number(file, value, data.raw[:-1])
            return tensors, keys, lib.nib_gguf_facts(file)
        finally:
            lib.nib_gguf_close(file)

    def compare_number(self, file, value, raw):
        """The calls that give a value by its key must agree with its bytes."""
        kind, found = KINDS[value.kind], ctypes.c_bool()
        if kind in (STRING, ARRAY):
            if value.item == STRING:
                try:
                    self.compare_strings(file, value, raw)
                except Refused as error:  # in a damaged file
                    assert "holds a NUL" in str(error)
            return
        wanted = struct.unpack("<" + PACK[kind.name], raw)[0]
        if kind == BOOL:
            truth = ctypes.c_bool()
            self.call("nib_gguf_get_bool", file, value.key, ctypes.byref(truth), ctypes.byref(found))
            assert found and truth.value == wanted
            return
        number, integer = ctypes.c_double(), ctypes.c_int64()
        self.call("nib_gguf_get_number", file, value.key, ctypes.byref(number), ctypes.byref(found))
        assert found and (number.value == float(wanted) or math.isnan(wanted))
        if isinstance(wanted, int) and wanted < 2**63:
            self.call("nib_gguf_get_integer", file, value.key, ctypes.byref(integer), ctypes.byref(found))
            assert found and integer.value == wanted

    def compare_strings(self, file, value, raw):
        found = ctypes.c_bool()
        if value.kind == STRING:
            text = ctypes.c_void_p()
            self.call("nib_gguf_get_string", file, value.key, ctypes.byref(text), ctypes.byref(found))
            assert ctypes.string_at(text) == raw
            self.lib.nib_free(text)
            return
        strings = Strings()
        self.call("nib_gguf_get_strings", file, value.key, ctypes.byref(strings), ctypes.byref(found))
        got = [ctypes.string_at(strings.text + strings.starts[i]) for i in range(strings.count)]
        self.lib.nib_gguf_strings_free(ctypes.byref(strings))
        assert b"".join(struct.pack("<Q", len(s)) + s for s in got) == raw

    def put(self, plan, key, value):
        kind, item, content = value
        code = lambda kind: ctypes.c_int(int(kind))
        if kind == STRING:
            self.call("nib_gguf_put_string", plan, key.encode(), content.encode())
        elif kind == ARRAY and item == STRING:
            strings = (ctypes.c_char_p * len(content))(*[text.encode() for text in content])
            self.call("nib_gguf_put_strings", plan, key.encode(), strings, ctypes.c_size_t(len(content)))
        elif kind == ARRAY:
            raw = b"".join(struct.pack("<" + PACK[item.name], x) for x in content)
            self.call("nib_gguf_put_array", plan, key.encode(), code(item), raw, ctypes.c_size_t(len(content)))
        elif kind.name == "FLOAT32":
            self.call("nib_gguf_put_float", plan, key.encode(), ctypes.c_float(content))
        else:
            self.call("nib_gguf_put_integer", plan, key.encode(), code(kind), ctypes.c_int64(int(content)))

    def write(self, path, keys, tensors):
        """Keys as {key: (kind, item, value)}; the file's layout must be as it was planned."""
        lib, plan, writer = self.lib, ctypes.c_void_p(), ctypes.c_void_p()
        self.call("nib_gguf_plan_create", os.fsencode(path), ctypes.byref(plan))
        try:
            for key, value in keys.items():
                self.put(plan, key, value)
            for name, (kind, shape, _) in tensors.items():
                self.call("nib_gguf_declare", plan, name.encode(), ctypes.c_uint32(kind), len(shape),
                          (ctypes.c_int64 * len(shape))(*shape))
            layout = lib.nib_gguf_plan_layout(plan)
            self.call("nib_gguf_writer_create", plan, ctypes.byref(writer))
            for i, (_, _, data) in reversed(list(enumerate(tensors.values()))):
                half = len(data) // 2  # the second half first
                for begin, part in ((half, data[half:]), (0, data[:half])):
                    self.call("nib_gguf_write", writer, ctypes.c_size_t(i), ctypes.c_uint64(begin), part,
                              ctypes.c_size_t(len(part)))
            self.call("nib_gguf_commit", writer)
            assert os.path.getsize(path) == layout.file_bytes
        finally:
            lib.nib_gguf_writer_destroy(writer)
            lib.nib_gguf_plan_destroy(plan)


# ---- What gguf reads and writes ------------------------------------------------------------------------------


def reference_read(path):
    reader = gguf.GGUFReader(path)
    tensors, keys = {}, {}
    for t in reader.tensors:
        tensors[t.name] = (int(t.tensor_type), [int(d) for d in reversed(t.shape)], t.data.tobytes())
    for key, field in reader.fields.items():
        if key in ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"):
            continue
        kind, parts = int(field.parts[2][0]), field.parts[3:]
        item = int(parts[0][0]) if kind == ARRAY else kind
        count = int(parts[1][0]) if kind == ARRAY else 1
        skip = 2 if kind == ARRAY else 1 if kind == STRING else 0
        keys[key] = (kind, item, count, b"".join(part.tobytes() for part in parts[skip:]))
    return tensors, keys, reader


def reference_write(path, keys, tensors, alignment=None):
    writer = gguf.GGUFWriter(path, keys["general.architecture"][2])
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, (kind, item, content) in keys.items():
        if key != "general.architecture":
            writer.add_key_value(key, content, kind, sub_type=item if kind == ARRAY else None)
    for name, (kind, shape, data) in tensors.items():
        elements, size = TYPES[kind]
        given = shape[:-1] + [shape[-1] // elements * size]
        writer.add_tensor(name, np.frombuffer(data, np.uint8).reshape(given),
                          raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- Files at random -----------------------------------------------------------------------------------------


def random_text(rng, least=0):
    alphabet = "abcXYZ019._-/ \"\\\t\n\x01\x7f\u00e9\u20ac\U0001f600"
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(least, 12)))


def random_number(rng, kind):
    letter = PACK[kind.name]
    if letter == "?":
        return rng.random() < 0.5
    raw = rng.randbytes(struct.calcsize("<" + letter))
    number = struct.unpack("<" + letter, raw)[0]
    return 0.5 if number != number else number  # a NaN need not keep its bits on the way


def random_value(rng, ours):
    """(kind, item, content); ours: of those that the writer of nib offers."""
    kind = rng.choice(KINDS)
    if kind == STRING:
        return kind, None, random_text(rng)
    if kind == ARRAY:
        item = rng.choice([k for k in KINDS if k != ARRAY])
        count = rng.randint(1, 6)
        return kind, item, [random_text(rng) if item == STRING else random_number(rng, item) for _ in range(count)]
    content = random_number(rng, kind)
    if ours and (kind.name == "FLOAT64" or (kind.name == "UINT64" and content >= 2**63)):
        return gguf.GGUFValueType.UINT64, None, rng.randrange(2**63)
    return kind, None, content


def random_keys(rng, ours):
    keys = {"general.architecture": (STRING, None, random_text(rng, 1))}
    for _ in range(rng.randint(0, 8)):
        keys[random_text(rng, 1)] = random_value(rng, ours)
    return keys


def random_tensors(rng):
    tensors = {}
    for _ in range(rng.randint(0, 6)):
        kind = rng.choice(list(TYPES))
        elements, size = TYPES[kind]
        shape = [rng.choice((1, 1, 2, 3, 5)) for _ in range(rng.randint(0, 3))] + [elements * rng.randint(1, 3)]
        name = random_text(rng, 1) + rng.choice(("", "x" * 24))
        if len(name.encode()) < 64:
            tensors[name] = (kind, shape, rng.randbytes(math.prod(shape) // elements * size))
    return tensors


def compare_writing(nib, folder, rng):
    keys, tensors = random_keys(rng, True), random_tensors(rng)
    ours, theirs = os.path.join(folder, "ours.gguf"), os.path.join(folder, "theirs.gguf")
    nib.write(ours, keys, tensors)
    reference_write(theirs, keys, tensors)
    with open(ours, "rb") as first, open(theirs, "rb") as second:
        first, second = first.read(), second.read()
    if first != second:
        return "%r\n  differs from\n  %r" % (first, second)
    if reference_read(ours)[0] != tensors:
        return "gguf reads other tensors than were written"
    return None if nib.read(ours)[0] == tensors else "nib reads other tensors than were written"


def compare_reading(nib, path):
    ours, theirs = nib.read(path), reference_read(path)
    if ours[0] != theirs[0] or list(ours[0]) != list(theirs[0]):
        return "different tensors"
    if ours[1] != theirs[1] or list(ours[1]) != list(theirs[1]):
        return "different keys: %r, %r" % (ours[1], theirs[1])
    if ours[2].alignment != theirs[2].alignment or ours[2].data_begin != theirs[2].data_offset:
        return "another layout"
    return None


def read_theirs(nib, folder, rng):
    path = os.path.join(folder, "theirs.gguf")
    reference_write(path, random_keys(rng, False), random_tensors(rng), rng.choice((None, 32, 8, 64, 4096)))
    fault = compare_reading(nib, path)
    if fault:
        return fault
    # Damaged: nib may refuse more than gguf, but must not see something else than gguf does.
    with open(path, "rb") as file:
        content = file.read()
    header = nib.read(path)[2].data_begin
    damaged = os.path.join(folder, "damaged.gguf")
    for _ in range(20):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            where = rng.randrange(4, header)
            changed[where] = rng.choice((rng.randrange(256), changed[where] ^ 1 << rng.randrange(8)))
        with open(damaged, "wb") as file:
            file.write(changed)
        try:
            nib.read(damaged)
        except Refused:
            read_theirs.refused += 1
            continue
        read_theirs.accepted += 1
        fault = compare_reading(nib, damaged)
        if fault:
            return "damaged: %s\n%r" % (fault, bytes(changed[:header]))
    # Cut short: gguf does not see all of it, nib must.
    if nib.read(path)[0]:
        last = list(nib.read(path)[0].values())[-1][2]
        alignment = nib.read(path)[2].alignment
        with open(damaged, "wb") as file:
            file.write(content[: len(content) - -len(last) % alignment - rng.randint(1, len(last))])
        try:
            nib.read(damaged)
            return "a file that is cut short was accepted"
        except Refused as error:
            if "it is cut short" not in str(error):
                return "cut short, but: %s" % error
    return None


read_theirs.accepted = read_theirs.refused = 0


def corpus():
    """What fuzzers found to be different, and what they grew of it."""
    folders = [os.path.join(ROOT, "tests", "fuzz", "corpus", "gguf"), os.environ.get("NIB_CORPUS")]
    for folder in filter(None, folders):
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as file:
                yield file.read()


def mutant(rng, contents):
    """Bytes changed, taken out, repeated, or small numbers in their place."""
    out = bytearray(rng.choice(contents))
    for _ in range(rng.randint(1, 3)):
        at, n, kind = rng.randrange(len(out) + 1), rng.choice((1, 4, 8)), rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at:at + n] = rng.randrange(40).to_bytes(n, "little")
        elif kind == 2:
            del out[at:at + n]
        elif kind == 3:
            out[at:at] = out[at:at + n]
        else:
            out[at:at] = bytes(n)
    return bytes(out)


def compare_mutant(nib, folder, rng):
    """The corpus first, file by file, then mutants of it."""
    state = compare_mutant
    if not state.contents:
        state.contents = list(corpus())
    content = state.contents[state.number] if state.number < len(state.contents) else mutant(rng, state.contents)
    state.number += 1
    path = os.path.join(folder, "mutant.gguf")
    with open(path, "wb") as file:
        file.write(content)
    ours = theirs = refusal = sentence = None
    try:
        ours = nib.read(path)
    except Refused as error:
        sentence = str(error)
    if sentence and re.search(UNBOUNDED, sentence, re.S):
        return None
    try:
        theirs = reference_read(path)
    except Exception as error:  # it has no exception of its own
        refusal = "%s: %s" % (type(error).__name__, error)
    if ours and theirs:
        state.accepted += 1
        return compare_reading(nib, path)
    if theirs and not any(re.search(pattern, sentence, re.S) for pattern, _ in STRICTER):
        return "only nib refuses: %s\n%r" % (sentence, content[:300])
    if ours and not any(re.search(pattern, refusal, re.S) for pattern, _ in LAXER):
        return "only gguf refuses: %s\n%r" % (refusal, content[:300])
    return None


compare_mutant.contents, compare_mutant.number, compare_mutant.accepted = [], 0, 0


# ---- Values --------------------------------------------------------------------------------------------------

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(codes):
    """The values of E4M3, with their sign; NaN for 7F and FF."""
    codes = np.asarray(codes, np.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values = np.where((codes & 0x7F) == 0x7F, np.nan, values)
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def decode(codes, scales, group):
    """Codes in the order of safetensors, two in a byte, times the scales of their groups."""
    elements = np.stack([codes & 15, codes >> 4], -1).reshape(len(scales), group)
    return E2M1[elements] * scales[:, None]


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def values_nvfp4(nib, folder, rng):
    """Codes and scales of any kind through nib into a file; gguf decodes it to the same values."""
    rows, columns = 24, 64 * rng.randint(1, 5)
    blocks = rows * columns // 64
    codes = np.frombuffer(rng.randbytes(rows * columns // 2), np.uint8)
    scales = np.frombuffer(rng.randbytes(rows * columns // 16), np.uint8)
    joined, back, scales_back = np.zeros(blocks * 36, np.uint8), np.zeros_like(codes), np.zeros_like(scales)
    odd = nib.lib.nib_gguf_nvfp4_join(pointer(codes), pointer(scales), ctypes.c_size_t(blocks), pointer(joined))
    if odd != np.count_nonzero(scales >= 0x7F):
        return "%d odd scales" % odd
    path = os.path.join(folder, "values.gguf")
    nib.write(path, {"general.architecture": (STRING, None, "llama")},
              {"blk.0.attn_q.weight": (int(NVFP4), [rows, columns], joined.tobytes())})
    tensor = gguf.GGUFReader(path).tensors[0]
    theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1, 16)
    ours = decode(codes, np.nan_to_num(e4m3(scales), nan=0.0), 16)
    if not np.array_equal(ours, theirs):
        return "gguf decodes other values"
    # And back, from blocks with any bytes at all.
    joined.reshape(blocks, 36)[:, :4] = scales.reshape(blocks, 4)
    nib.lib.nib_gguf_nvfp4_split(pointer(joined), ctypes.c_size_t(blocks), pointer(back), pointer(scales_back))
    theirs = gguf.quants.dequantize(joined.reshape(rows, -1), NVFP4).reshape(-1, 16)
    ours = decode(back, e4m3(scales_back), 16)
    known = (scales != 0xFF)[:, None]  # readers disagree here: 480, which E4M3 does not have, or 0
    return None if np.array_equal(ours * known, theirs * known) else "nib decodes other values"


def values_mxfp4(nib, folder, rng):
    """Blocks that gguf quantizes, split by nib, have the values that gguf gives them; and joined, the same bytes."""
    generator = np.random.default_rng(rng.randrange(2**32))
    values = (generator.standard_normal((16, 96)) * 2.0 ** generator.integers(-60, 60, (16, 1))).astype(np.float32)
    theirs = gguf.quants.quantize(values, MXFP4)
    blocks = theirs.size // 17
    codes, scales, again = np.zeros(blocks * 16, np.uint8), np.zeros(blocks, np.uint8), np.zeros_like(theirs)
    nib.lib.nib_gguf_mxfp4_split(pointer(theirs), ctypes.c_size_t(blocks), pointer(codes), pointer(scales))
    ours = decode(codes, (2.0 ** (scales.astype(np.float64) - 127)).astype(np.float32), 32)
    if not np.array_equal(ours, gguf.quants.dequantize(theirs, MXFP4).reshape(-1, 32)):
        return "nib decodes other values"
    nib.lib.nib_gguf_mxfp4_join(pointer(codes), pointer(scales), ctypes.c_size_t(blocks), pointer(again))
    return None if np.array_equal(again, theirs) else "other bytes"


DECODED = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()


def random_blocks(rng, name, blocks):
    """Blocks of any bytes, but for F16 scales, which are finite and of the size that weights have."""
    kind = gguf.GGMLQuantizationType[name]
    size = TYPES[int(kind)][1]
    raw = np.frombuffer(rng.randbytes(blocks * size), np.uint8).reshape(blocks, size).copy()
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2),
              "Q5_K": (0, 2)}.get(name, (0,))
    for at in halves:
        scales = np.array([rng.uniform(-1, 1) * 2.0 ** rng.randint(-14, -4) for _ in range(blocks)], np.float16)
        raw[:, at:at + 2] = scales.view(np.uint8).reshape(blocks, 2)
    return kind, raw


def values_ggml(nib, _folder, rng):
    """Every type that nib decodes, to the bit as gguf does."""
    for name in DECODED:
        kind, raw = random_blocks(rng, name, 24)
        ours = np.zeros(24 * TYPES[int(kind)][0], np.float32)
        nib.lib.nib_gguf_decode(ctypes.c_uint32(kind), pointer(raw), ctypes.c_size_t(24), pointer(ours))
        theirs = gguf.quants.dequantize(raw, kind).reshape(-1)
        if not np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)):
            return "%s: %r, %r" % (name, ours[:8], theirs[:8])
    return None


def values_known(_nib, _folder, _rng):
    """The hashes that tests/test_gguf.c has of blocks, from gguf's own values."""
    with open(os.path.join(os.path.dirname(__file__), "test_gguf.c"), encoding="utf-8") as file:
        rows = re.findall(r"\{ NIB_GGUF_(\w+), \{ (\d+), (\d+) \}, 0x(\w{16}) \}", file.read())
    if [row[0] for row in rows] != DECODED:
        return "of %r" % [row[0] for row in rows]
    for name, *halves, wanted in rows:
        kind = gguf.GGMLQuantizationType[name]
        size = TYPES[int(kind)][1]
        at = np.arange(16 * size, dtype=np.uint64)
        raw = (at * at * np.uint64(40503) >> np.uint64(7)).astype(np.uint8).reshape(16, size).copy()
        for half in map(int, halves):
            raw[:, half:half + 2] = (0x2401 + 77 * np.arange(16) + 3 * half).astype("<u2").view(np.uint8).reshape(16, 2)
        value = 0xCBF29CE484222325
        for bits in gguf.quants.dequantize(raw, kind).view(np.uint32).ravel().tolist():
            value = (value ^ bits) * 0x100000001B3 % 2**64
        if value != int(wanted, 16):
            return "%s: 0x%016X" % (name, value)
    return None


# ---- The tool ------------------------------------------------------------------------------------------------


def tool(*arguments):
    done = subprocess.run([TOOL, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


def made_model(rng):
    """Tensors of every type that is read: matrices, a stack of experts, and a head and an embedding that stay."""
    tensors = {}

    def put(name, kind, *shape):
        if kind in ("F32", "F16", "BF16"):
            values = np.random.default_rng(rng.randrange(2**32)).standard_normal(shape).astype(np.float32)
            tensors[name] = (gguf.GGMLQuantizationType[kind], list(shape),
                             gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes())
            return
        elements = TYPES[int(gguf.GGMLQuantizationType[kind])][0]
        kind, raw = random_blocks(rng, kind, math.prod(shape) // elements)
        tensors[name] = (kind, list(shape), raw.tobytes())

    put("token_embd.weight", "Q6_K", 8, 256)
    put("output_norm.weight", "F32", 256)
    for i, kind in enumerate(DECODED + ["BF16", "F16"]):
        put("blk.%d.attn_q.weight" % i, kind, 6, 256)
    put("blk.0.ffn_up_exps.weight", "BF16", 3, 4, 256)
    put("blk.0.ffn_down_exps.weight", "Q8_0", 3, 5, 64)
    put("blk.0.ffn_gate_inp.weight", "F32", 3, 256)
    return {name: tensors[name] for name in sorted(tensors)}


def decoded(path):
    """{name: values}, and gguf's own view of the file."""
    reader = gguf.GGUFReader(path)
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}, reader


def write_model(path, tensors, keys=None):
    reference_write(path, {"general.architecture": (STRING, None, "llama"), "some.key": (STRING, None, "kept"),
                           **(keys or {})}, {name: (int(k), shape, data) for name, (k, shape, data) in tensors.items()})


def tool_dequantizes(nib, folder, rng):
    """x.gguf to y.gguf as values: gguf's own, to the bit; keys are kept."""
    source, out = os.path.join(folder, "in.gguf"), os.path.join(folder, "plain.gguf")
    write_model(source, made_model(rng))
    tool("dequantize", "-q", "-f", "--dtype", "f32", source, out)
    (theirs, _), (ours, reader) = decoded(source), decoded(out)
    for name in theirs:
        if theirs[name].shape != ours[name].shape or not np.array_equal(theirs[name], ours[name]):
            return "%s has other values" % name
    if list(ours) != list(theirs):
        return "other names"
    if {t.tensor_type.name for t in reader.tensors} - {"F32", "F16", "BF16"}:
        return "types %r" % {t.tensor_type.name for t in reader.tensors}
    return None if reader.fields["some.key"].contents() == "kept" else "a key was lost"


def tool_quantizes(nib, folder, rng):
    """x.gguf to y.gguf as NVFP4: the same bytes as from its values; what stays keeps its type and its bytes."""
    source, plain = os.path.join(folder, "in.gguf"), os.path.join(folder, "plain.gguf")
    out, other = os.path.join(folder, "out.gguf"), os.path.join(folder, "other.gguf")
    tensors = made_model(rng)
    write_model(source, tensors)
    said = tool("quantize", "-f", source, out)
    if "already quantized (" not in said or "1 Q4_K" not in said:
        return "it does not say that the source was quantized: %s" % said
    for name, wanted in (("dry.gguf", ["--dry-run"]), ("run.gguf", [])):
        report = json.loads(tool("quantize", "-f", "--json", *wanted, source, os.path.join(folder, name)))
        if "1 Q4_K" not in report["quantized_source"]:
            return "--json does not say that the source was quantized: %s" % report["quantized_source"]
    tool("dequantize", "-q", "-f", "--dtype", "f32", source, plain)
    if json.loads(tool("quantize", "-f", "--json", "-n", plain, other))["quantized_source"]:
        return "--json calls a plain source quantized"
    if "already quantized" in tool("quantize", "-f", plain, other):
        return "a plain source was called quantized"
    for preset, wanted in (("experts-only", {"ffn_up_exps", "ffn_down_exps"}), ("mlp-only", {"ffn_up_exps", "ffn_down_exps"})):
        report = json.loads(tool("quantize", "--json", "-n", "--preset", preset, source, other))
        found = {row["name"].split(".")[2] for row in report["rows"] if row["action"] == "quantize"}
        if found != wanted:
            return "--preset %s takes %r" % (preset, sorted(found))
    (ours, reader), (theirs, _) = reference_read(out)[::2], reference_read(other)[::2]
    kept = ("token_embd.weight", "blk.0.ffn_gate_inp.weight", "output_norm.weight")
    for name in tensors:
        if name in kept and (ours[name][0], ours[name][2]) != (int(tensors[name][0]), tensors[name][2]):
            return "%s did not stay" % name
        if name not in kept and (ours[name] != theirs[name] or ours[name][0] != NVFP4):
            return "%s: other bytes" % name
    if ours["blk.0.ffn_up_exps.scale"][1] != [3] or ours["blk.0.attn_q.scale"][1] != [1]:
        return "scales of shape %r" % ours["blk.0.ffn_up_exps.scale"][1]
    again, compared = os.path.join(folder, "again.gguf"), decoded(plain)[0]
    tool("dequantize", "-q", "-f", "--dtype", "f32", out, again)
    for name, values in decoded(again)[0].items():
        error = np.abs(values - compared[name]).max() / np.abs(compared[name]).max()
        if values.shape != compared[name].shape or error > 0.2:
            return "%s decodes with an error of %g" % (name, error)
    return None if reader.fields["general.file_type"].contents() == 39 else "another file type"


def tool_joins(nib, folder, rng):
    """A model in three files, by any of them or by their directory, is the model in one; a set that lacks one is not."""
    tensors = made_model(rng)
    directory = os.path.join(folder, "split")
    os.makedirs(directory, exist_ok=True)
    paths = [os.path.join(directory, "m-%05d-of-00003.gguf" % (i + 1)) for i in range(3)]
    number = lambda kind, value: (gguf.GGUFValueType[kind], None, value)
    for i, path in enumerate(paths):
        part = {name: tensors[name] for j, name in enumerate(tensors) if j * 3 // len(tensors) == i}
        write_model(path, part, {"split.no": number("UINT16", i), "split.count": number("UINT16", 3),
                                 "split.tensors.count": number("INT32", len(tensors))})
    whole, out = os.path.join(folder, "whole.gguf"), os.path.join(folder, "joined.gguf")
    write_model(whole, tensors)
    tool("quantize", "-q", "-f", whole, os.path.join(folder, "one.gguf"))
    wanted = reference_read(os.path.join(folder, "one.gguf"))
    for source in (paths[0], paths[2], directory):
        tool("quantize", "-q", "-f", source, out)
        found = reference_read(out)
        if found[0] != wanted[0] or set(found[1]) != set(wanted[1]):
            return "%s: another model" % source
    for damage, words in ((lambda: os.rename(paths[1], paths[1] + ".x"), "m-00002-of-00003.gguf"),
                          (lambda: os.link(paths[0], paths[1]), "split.no is 0"),
                          (lambda: os.rename(paths[0], os.path.join(folder, "alone.gguf")), "one of 3 files")):
        damage()
        try:
            tool("inspect", "-q", paths[0] if os.path.exists(paths[0]) else os.path.join(folder, "alone.gguf"))
            return "accepted without %s" % words
        except Refused as error:
            if words not in str(error):
                return "%s: %s" % (words, error)
    for name in os.listdir(directory):
        os.remove(os.path.join(directory, name))
    os.remove(os.path.join(folder, "alone.gguf"))
    return None


def compare_types(nib, _folder, _rng):
    """The table of types. One that a later gguf has added is a note, as nib refuses it with a sentence."""
    ours = {}
    for number in range(256):
        facts = nib.lib.nib_gguf_type_facts(ctypes.c_uint32(number))
        if facts:
            ours[number] = (facts.contents.name.decode(), facts.contents.elements, facts.contents.bytes)
    theirs = {int(t): (t.name, *TYPES[int(t)]) for t in gguf.GGMLQuantizationType}
    later = {number: facts for number, facts in theirs.items() if number > max(ours)}
    if later:
        print("note: gguf has types that nib does not know: %r" % later)
    return None if ours == {n: f for n, f in theirs.items() if n not in later} else "%r\n%r" % (ours, theirs)


def attempt(check, *arguments):
    try:
        return check(*arguments)
    except Exception as error:  # whatever happens in either package is a finding
        return "%s: %s" % (type(error).__name__, error)


def main():
    seed = int(os.environ.get("NIB_SEED", "20261115"), 0)
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        nib = Nib(folder)
        mutants = int(os.environ.get("NIB_MUTANTS", "300"))
        for check, rounds in ((compare_types, 1), (compare_mutant, mutants), (compare_writing, 200), (read_theirs, 200), (values_nvfp4, 20),
                              (values_mxfp4, 20), (values_ggml, 10), (values_known, 1), (tool_dequantizes, 2),
                              (tool_quantizes, 2), (tool_joins, 1)):
            for i in range(rounds):
                rng = random.Random("%d %s %d" % (seed, check.__name__, i))
                fault = attempt(check, nib, folder, rng)
                passed, failed = passed + (fault is None), failed + (fault is not None)
                if fault is not None and failed <= 10:
                    print("FAILED %s %d: %s" % (check.__name__, i, fault))
    print("gguf: %d damaged files refused, %d accepted" % (read_theirs.refused, read_theirs.accepted))
    print("gguf: %d files of the corpus and mutants, %d accepted by both" % (compare_mutant.number, compare_mutant.accepted))
    print("%d passed, %d failed, 0 skipped" % (passed, failed))
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())

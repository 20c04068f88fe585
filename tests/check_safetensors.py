# SPDX-License-Identifier: Apache-2.0
"""The container against the safetensors package, an independent reader and writer.

    check_safetensors.py LIBNIB.so      (NIB_SEED=n for other files)

Files, valid and not, the corpora of the fuzz targets and mutants of them among these (NIB_MUTANTS=n, and NIB_CORPUS,
what a fuzzer made of them), must be accepted by both or refused by both, with the same tensors in them, except where
the tables below say how and why they differ. Files that nib writes must have the bytes that safetensors writes.
"""
import ctypes
import json
import os
import random
import re
import struct
import sys
import tempfile

try:
    import safetensors
except ImportError:
    print("check_safetensors: the safetensors package is not installed")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(0)

# Where nib refuses what safetensors takes: what nib's sentence says, and why.
STRICTER = [
    (r'tensor ".*" comes twice', "the format forbids repeated names; safetensors silently keeps the last"),
    (r'__metadata__: the key ".*" comes twice', "the same for keys of the metadata"),
    (r"a tensor has an empty name", "nothing can refer to it"),
    (r"the string holds a NUL", "a C string, and with it the interface, cannot hold it"),
    (r"tensor \".*\": at byte \d+: expected '\{', found '\['",
     "entries in array form are an accident of the JSON library"),
    (r"expected a string, found '\{'", "so is a dtype in the form of an object"),
    (r"dim \d+ is too large", "dims are int64_t"),
]
# Where nib takes what safetensors refuses: what safetensors says, and why.
LAXER = [
    (r"number out of range", "a number in a value that is ignored: it need not fit a double"),
]

NAMES = ("U8 I16 I32 I64 F32 F16 BF16 F8_E4M3 F8_E5M2 F8_E8M0 F4 BOOL I8 U16 U32 U64 F64 C64 F6_E2M3 F6_E3M2 "
         "F8_E4M3FNUZ F8_E5M2FNUZ").split()
BITS = dict(zip(NAMES, [8, 16, 32, 64, 32, 16, 16, 8, 8, 8, 4, 8, 8, 16, 32, 64, 64, 64, 6, 6, 8, 8]))
# What safetensors calls them when it writes; it cannot write the six-bit ones.
WRITABLE = {
    "U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64", "F32": "float32", "F16": "float16",
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2", "BOOL": "bool", "I8": "int8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F64": "float64", "C64": "complex64", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


class Entry(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
    ]


class Refused(Exception):
    """A call failed; the text is nib's sentence."""


class Nib:
    def __init__(self, path):
        self.lib = lib = ctypes.CDLL(os.path.abspath(path))
        lib.nib_last_error.restype = ctypes.c_char_p
        lib.nib_dtype_name.restype = ctypes.c_char_p
        lib.nib_file_count.restype = lib.nib_file_metadata_count.restype = ctypes.c_size_t

    def call(self, name, *arguments):
        if getattr(self.lib, name)(*arguments):
            raise Refused(self.lib.nib_last_error().decode("utf-8", "replace"))

    def read(self, path):
        """Name -> (dtype, shape, bytes), and the metadata."""
        lib, file = self.lib, ctypes.c_void_p()
        self.call("nib_file_open", os.fsencode(path), ctypes.byref(file))
        try:
            tensors, metadata = {}, {}
            for i in range(lib.nib_file_count(file)):
                entry = Entry()
                self.call("nib_file_entry", file, ctypes.c_size_t(i), ctypes.byref(entry))
                data = ctypes.create_string_buffer(entry.end - entry.begin + 1)
                self.call("nib_file_read", file, ctypes.c_size_t(i), ctypes.c_uint64(0), data,
                          ctypes.c_size_t(entry.end - entry.begin))
                tensors[entry.name.decode("utf-8", "replace")] = (
                    lib.nib_dtype_name(entry.dtype).decode(),
                    [entry.shape[d] for d in range(entry.rank)],
                    data.raw[:-1],
                )
            for i in range(lib.nib_file_metadata_count(file)):
                key, value = ctypes.c_char_p(), ctypes.c_char_p()
                self.call("nib_file_metadata_entry", file, ctypes.c_size_t(i), ctypes.byref(key), ctypes.byref(value))
                metadata[key.value.decode()] = value.value.decode()
            return tensors, metadata
        finally:
            lib.nib_file_close(file)

    def write(self, path, tensors, metadata):
        writer = ctypes.c_void_p()
        self.call("nib_writer_create", os.fsencode(path), ctypes.byref(writer))
        try:
            for name, (dtype, shape, _) in tensors.items():
                dims = (ctypes.c_int64 * len(shape))(*shape)
                self.call("nib_writer_declare", writer, name.encode(), NAMES.index(dtype), ctypes.c_int64(len(shape)),
                          dims)
            for key, value in (metadata or {}).items():
                self.call("nib_writer_metadata", writer, key.encode(), value.encode())
            for name, (_, _, data) in reversed(tensors.items()):
                half = len(data) // 2  # the second half first
                self.call("nib_writer_write", writer, name.encode(), ctypes.c_uint64(half), data[half:],
                          ctypes.c_size_t(len(data) - half))
                self.call("nib_writer_write", writer, name.encode(), ctypes.c_uint64(0), data, ctypes.c_size_t(half))
            self.call("nib_writer_commit", writer)
        finally:
            self.lib.nib_writer_destroy(writer)


def container(header, data=b""):
    header = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype="U8", shape="[1]", offsets="[0,1]"):
    return '{"dtype":"%s","shape":%s,"data_offsets":%s}' % (dtype, shape, offsets)


def by_hand():
    """Files that are chosen, one for each rule and its border."""
    for whole in (b"", b"1234567", struct.pack("<Q", 0), struct.pack("<Q", 1), struct.pack("<Q", 2**64 - 1) + b"{}",
                  struct.pack("<Q", 100000001) + b"{}", struct.pack("<Q", 3) + b"{}", b"\xff" * 16):
        yield whole
    one = entry()
    for header in ("{}", " {}", "{} \t\r\n", "{}\0", "{}}", "{", "[]", "null", "", "\ufeff{}", "{},", '{"a":}', "{,}",
                   "{a:1}"):
        yield container(header)
    for header in ('{"a":%s}', '{"a":%s,}', '{"a":%s', ' { "a" : %s } ', '{"a":%s}x', '{"":%s}', '{"a\\u0000":%s}',
                   '{"\\ud800":%s}',
                   '{"\\ud83d\\ude00":%s}', '{"\\ude00":%s}', '{"\\ud83d\\u0041":%s}', '{"\\uD83D":%s}', '{"a\nb":%s}',
                   '{"a\\nb":%s}',
                   '{"a\x7fb":%s}', '{"\u00e9\u20ac\U0001f600":%s}', '{"\\x":%s}', '{"\\u00g0":%s}', '{"\\/":%s}',
                   "{'a':%s}",
                   '{"a" %s}', '{"a":[%s]}', '{"a/../b":%s}', '{"__metadata__":{},"a":%s}',
                   '{"__metadata__":null,"a":%s}',
                   '{"__metadata__":[],"a":%s}', '{"__metadata__":{"k":1},"a":%s}',
                   '{"__metadata__":{"k":null},"a":%s}',
                   '{"__metadata__":{"k":"v","l":"\\u00e9"},"a":%s}', '{"__metadata__":{"k":"v","k":"w"},"a":%s}',
                   '{"__metadata__":{},"a":%s,"__metadata__":{}}', '{"__metadata__":{"":""},"a":%s}',
                   '{"__metadata__":"x","a":%s}',
                   '{"__metadata__":{"k":"\\u0000"},"a":%s}', '{"\\u005f_metadata__":{"k":"v"},"a":%s}'):
        yield container(header % one, b"x")
    for raw in (b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc3", b"\xf8\x88\x80\x80\x80",
                b"\xf0\x8f\xbf\xbf", b"\xe0\x9f\xbf"):
        yield container(b'{"' + raw + b'":' + one.encode() + b"}", b"x")
    for number in ("0", "1", "-0", "-1", "+1", "01", "1.0", "1e0", "1E0", '"1"', "null", "true", "18446744073709551615",
                   "18446744073709551616", "9223372036854775807", "9223372036854775808", "1 ", "1,", ",1", "[1]",
                   ""):
        for data in (b"", b"x"):
            yield container('{"a":%s}' % entry("U8", "[%s]" % number, "[0,%d]" % len(data)), data)
            yield container('{"a":%s}' % entry("U8", "[%s,0]" % number, "[0,%d]" % len(data)), data)
        yield container('{"a":%s}' % entry("U8", "[1]", "[0,%s]" % number), b"x")
        yield container('{"a":%s}' % entry("U8", "[1]", "[%s,1]" % number), b"x")
    for name in NAMES:
        for elements in (0, 1, 2, 3, 4, 8):
            least = elements * BITS[name] // 8
            for size in (least, least + 1, least + 2):
                yield container('{"a":%s}' % entry(name, "[%d]" % elements, "[0,%d]" % size), bytes(size))
    for name in ("u8", "", "F4_E2M1", "U8 ", "F8", "FLOAT"):
        yield container('{"a":%s}' % entry(name), b"x")
    for shape, size in (("[]", 1), ("[]", 0), ("[1,1,1,1,1,1,1,1,1,1,1,1]", 1), ("[4294967296,4294967296]", 0),
                        ("[4294967296,4294967296,0]", 0),
                        ("[0,4294967296,4294967296]", 0), ("[2305843009213693952]", 0), ("{}", 1), ("1", 1),
                        ("[[1]]", 1)):
        yield container('{"a":%s}' % entry("U8", shape, "[0,%d]" % size), bytes(size))
    for offsets in ("[0,1,2]", "[0]", "[]", "{}", "[1,0]", "[1,2]", "[0,2]", "[0,0]", "null", '"01"'):
        yield container('{"a":%s}' % entry(offsets=offsets), b"x")
    for a, b, size in (((0, 1), (1, 2), 2), ((1, 2), (0, 1), 2), ((0, 1), (2, 3), 3), ((0, 2), (1, 3), 3),
                       ((0, 1), (0, 1), 1), ((0, 0), (0, 0), 0),
                       ((0, 2), (1, 1), 2), ((0, 2), (2, 2), 2), ((0, 2), (0, 0), 2), ((0, 2), (3, 3), 2),
                       ((0, 1), (1, 2), 1), ((0, 1), (1, 2), 3)):
        for names in (("a", "b"), ("b", "a"), ("a", "a")):
            first, second = (entry("U8", "[%d]" % (r[1] - r[0]), "[%d,%d]" % r) for r in (a, b))
            yield container('{"%s":%s,"%s":%s}' % (names[0], first, names[1], second), bytes(size))
    for fields in ('"dtype":"U8","shape":[1]', '"dtype":"U8","data_offsets":[0,1]', '"shape":[1],"data_offsets":[0,1]',
                   "",
                   '"dtype":"U8","shape":[1],"data_offsets":[0,1],"dtype":"U8"',
                   '"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]',
                   '"data_offsets":[0,1],"shape":[1],"dtype":"U8"',
                   '"\\u0064type":"U8","shape":[1],"data_offsets":[0,1]',
                   '"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]'):
        yield container('{"a":{%s}}' % fields, b"x")
    yield container('{"a":["U8",[1],[0,1]]}', b"x")
    for value in ("0", "-0", "01", "1.", "1.5e-3", "1e999", "1" * 400, "-", "tru", "true", "null", "nul", "NaN",
                  '"\\u0000"', '"\\ud800"', "[]", "[1,]", "{}",
                  '{"a":1,"a":2}', "{1:2}", '{"a"}', "[" * 125 + "]" * 125, "[" * 126 + "]" * 126,
                  '{"a":' * 125 + "1" + "}" * 125,
                  '{"a":' * 126 + "1" + "}" * 126, "[}", "[1 2]", "'x'", "", '"\x01"'):
        yield container('{"a":{"dtype":"U8","x":%s,"shape":[1],"data_offsets":[0,1]}}' % value, b"x")
    yield container('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x\\u0000":1}}', b"x")


def random_name(rng):
    alphabet = "abcXYZ019._-/ \"\\\t\n\x01\x7f\u00e9\u20ac\U0001f600"
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 12)))


def random_tensors(rng, names):
    tensors = {}
    for _ in range(rng.randint(0, 8)):
        dtype = rng.choice(names)
        shape = [rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(rng.randint(0, 5))]
        if BITS[dtype] % 8:
            shape.append(rng.choice((0, 4, 8)))
        elements = 1
        for dim in shape:
            elements *= dim
        tensors[random_name(rng)] = (dtype, shape, rng.randbytes(elements * BITS[dtype] // 8))
    return tensors


def at_random(rng):
    """A valid file in any order and spacing, and then perhaps a change to it."""
    tensors = random_tensors(rng, NAMES)
    order = list(tensors.items())
    rng.shuffle(order)
    data, items = b"", []
    for name, (dtype, shape, raw) in order:
        fields = [("dtype", dtype), ("shape", shape), ("data_offsets", [len(data), len(data) + len(raw)])]
        rng.shuffle(fields)
        data += raw
        items.append((name, dict(fields)))
    rng.shuffle(items)
    if rng.random() < 0.5:
        items.insert(rng.randint(0, len(items)),
                     ("__metadata__", {random_name(rng): random_name(rng) for _ in range(rng.randint(0, 3))}))
    header = json.dumps(dict(items), ensure_ascii=rng.random() < 0.5,
                        separators=rng.choice(((",", ":"), (", ", " : "))))
    header = bytearray(header.encode())
    kind = rng.randint(0, 5)
    tokens = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"1e3", b".", b"\\u0000", b"\\", b"null", b" ",
              b"\xc3", b'"dtype":"U8",', b"\0"]
    for _ in range(rng.randint(1, 3) if kind < 5 else 0):
        where = rng.randrange(len(header) + 1)
        if kind == 0:
            header[where:where] = rng.choice(tokens)
        elif kind == 1:
            del header[where : where + rng.randint(1, 8)]
        elif kind == 2 and where < len(header):
            header[where] = rng.randrange(256)
        elif kind == 3:
            data = data[: rng.randint(0, len(data))] if rng.random() < 0.5 else data + b"x"
        elif kind == 4:
            digits = [i for i, c in enumerate(header) if 48 <= c <= 57]
            if digits:
                header[rng.choice(digits)] = rng.choice(b"0123456789")
    return container(bytes(header), data)


def corpus():
    """What fuzzers found to be different, and what they grew of it."""
    here = os.path.dirname(os.path.abspath(__file__))
    folders = [os.path.join(here, "fuzz", "corpus", name) for name in ("safetensors", "saved")]
    for folder in folders + [name for name in [os.environ.get("NIB_CORPUS")] if name]:
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as file:
                yield file.read()


def mutant(rng, contents):
    """Bytes changed, taken out, repeated, or from another file; the length of the header follows now and then."""
    out = bytearray(rng.choice(contents))
    for _ in range(rng.randint(1, 4)):
        at, n, kind = rng.randrange(len(out) + 1), rng.randint(1, 12), rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice(b'0123456789"{}[],:\\ -+.eEtfn\0\xff')
        elif kind == 2:
            del out[at:at + n]
        elif kind == 3:
            out[at:at] = out[at:at + n]
        else:
            other = rng.choice(contents)
            begin = rng.randrange(len(other) + 1)
            out[at:at] = other[begin:begin + n]
    if len(out) > 8 and rng.random() < 0.5:
        end = out.rfind(b"}")
        out[:8] = struct.pack("<Q", max(end - 7, 0))
    return bytes(out)


def reference_read(content):
    return {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(content)}


def repeats_a_name(content):
    """Whether an entry that safetensors forgets is one that nib refuses, before it comes to the second of the name."""
    pairs = json.loads(content[8:8 + struct.unpack("<Q", content[:8])[0]], object_pairs_hook=list)
    return len({name for name, _ in pairs}) < len(pairs)


def compare_reading(nib, folder, content):
    """None, or what is wrong; and whether both accepted."""
    path = os.path.join(folder, "read.safetensors")
    with open(path, "wb") as file:
        file.write(content)
    theirs = refusal = ours = sentence = None
    try:
        theirs = reference_read(content)
    except safetensors.SafetensorError as error:
        refusal = str(error)
    try:
        ours, _ = nib.read(path)
    except Refused as error:
        sentence = str(error)
    if theirs is not None and ours is not None:
        return (None if ours == theirs else "different tensors"), True
    if theirs is not None and not any(re.search(pattern, sentence, re.S) for pattern, _ in STRICTER) and \
            not repeats_a_name(content):
        return "only nib refuses: " + sentence, False
    if ours is not None and not any(re.search(pattern, refusal) for pattern, _ in LAXER):
        return "only safetensors refuses: " + refusal, False
    return None, False


def reference_bytes(folder, tensors, metadata):
    buffers = {name: ctypes.create_string_buffer(raw, max(len(raw), 1)) for name, (_, _, raw) in tensors.items()}
    specs = {}
    for name, (dtype, shape, raw) in tensors.items():
        given = shape[:-1] + [shape[-1] // 2] if dtype == "F4" else shape  # it doubles the last dim itself
        specs[name] = safetensors.TensorSpec(
            dtype=WRITABLE[dtype], shape=given, data_ptr=ctypes.addressof(buffers[name]), data_len=len(raw)
        )
    path = os.path.join(folder, "theirs.safetensors")
    safetensors.serialize_file(specs, path, metadata)
    with open(path, "rb") as file:
        return file.read()


def parts(content):
    """The header as a list of pairs, and the data."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end], object_pairs_hook=list), content[end:]


def compare_writing(nib, folder, rng, keys):
    tensors = random_tensors(rng, list(WRITABLE))
    metadata = {random_name(rng): random_name(rng) for _ in range(keys)} or None
    path = os.path.join(folder, "ours.safetensors")
    nib.write(path, tensors, metadata)
    with open(path, "rb") as file:
        ours = file.read()
    theirs = reference_bytes(folder, tensors, metadata)
    if keys > 1:  # safetensors writes the keys in no fixed order: compare what they say, and all the rest
        (first, first_data), (second, second_data) = map(parts, (ours, theirs))
        if first[1:] != second[1:] or sorted(first[0][1]) != sorted(second[0][1]) or first_data != second_data:
            return "%r\n  differs from\n  %r" % (ours, theirs)
        if first[0][1] != sorted(first[0][1], key=lambda pair: pair[0].encode()):
            return "the keys of the metadata are not in order"
    elif ours != theirs:
        return "%r\n  differs from\n  %r" % (ours, theirs)
    read = reference_read(ours)
    if read != tensors:
        return "safetensors reads other tensors than were written"
    if nib.read(path) != (tensors, metadata or {}):
        return "nib reads other tensors than were written"
    return None


def write_six_bits(nib, folder):
    """The dtypes that safetensors reads but cannot write."""
    tensors = {name: (name, [2, 4], bytes(range(2 * 4 * BITS[name] // 8))) for name in NAMES}
    path = os.path.join(folder, "ours.safetensors")
    nib.write(path, tensors, {"format": "pt"})
    with open(path, "rb") as file:
        read = reference_read(file.read())
    return None if read == tensors else "safetensors reads other tensors than were written"


def attempt(check, *arguments):
    try:
        return check(*arguments)
    except (Refused, safetensors.SafetensorError) as error:
        return "%s: %s" % (type(error).__name__, error)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    nib = Nib(sys.argv[1])
    rng = random.Random(int(os.environ.get("NIB_SEED", "20261115"), 0))
    passed = failed = accepted = 0

    def note(fault, what):
        nonlocal passed, failed
        passed, failed = passed + (fault is None), failed + (fault is not None)
        if fault is not None and failed <= 20:
            print("FAILED %s: %s" % (what, fault))

    with tempfile.TemporaryDirectory() as folder:
        contents = list(by_hand()) + [at_random(rng) for _ in range(600)]
        grown = contents + list(corpus())
        mutants = int(os.environ.get("NIB_MUTANTS", "3000"))
        for number in range(len(grown) + mutants):
            content = grown[number] if number < len(grown) else mutant(rng, grown)
            fault, both = compare_reading(nib, folder, content)
            accepted += both
            note(fault, repr(content[:300]))
        for i in range(150):
            note(attempt(compare_writing, nib, folder, rng, i % 4), "written file %d" % i)
        note(attempt(write_six_bits, nib, folder), "all dtypes")
    print("%d files read, %d of them accepted by both" % (len(grown) + mutants, accepted))
    print("%d passed, %d failed, 0 skipped" % (passed, failed))
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())

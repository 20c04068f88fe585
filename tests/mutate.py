#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of src/ and checkpoint/: small faults, drawn by seed, that some test must notice.

    tests/mutate.py                          3 mutants of every file with code
    tests/mutate.py --only src/shard         of this directory; a file or a pattern such as 'src/*.h' does as well
    tests/mutate.py --part 2/4               of the second of four portions of the files
    tests/mutate.py --list                   what would be drawn; those that do not compile are redrawn

A mutant is made in a copy of the tree below build/mutate, compiled and given to the tests that TESTS names for its file,
in that order and up to the first that fails: then it is killed. One that survives them meets the programs among them
again under sanitizers, which see what it leaks and what it reads beyond an end (--plain: not). For kernels of instruction
sets the compiler's warnings take their place. A mutant whose object code
is that of the original is none, and redrawn. Results are printed as they come; after --seconds nothing new is begun, and
what was not counts as skipped. tests/mutants_accepted.txt has those that no test could notice, each with the reason:

    file: src/base/base.c
    - the line as it is
    + the line as the mutant has it
    why: the argument

A fault may remove files that are not its own, so workers are fenced in by Landlock; where the kernel has none, nothing runs.
The last line is `N passed, M failed, K skipped`: killed or accepted, survived, not for this machine.
"""
import argparse
import collections
import concurrent.futures
import ctypes
import filecmp
import fnmatch
import glob
import json
import multiprocessing
import os
import platform
import queue
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join(ROOT, "build/mutate")
ACCEPTED = os.path.join(ROOT, "tests/mutants_accepted.txt")

# ---- What is run -----------------------------------------------------------------------------------------

# The first pattern that a file matches gives its tests, the likeliest to notice first: programs of tests/ and tests/fuzz/
# (on their corpus), `conform` (nib conform on the golden files) and scripts of tests/cli/. "conform NIB_MAX_ISA=avx2" sets
# that variable. Sanitizers: the programs only.
TENSOR = ["test_tensor", "test_tensor_usages", "test_tensor_copies", "test_tensor_views", "test_quantizer"]
DEVICES = ["test_devices", "test_devices_storage", "test_devices_failures"]
ERRORS = ["test_errors", "test_errors_quantizer", "test_errors_memory"]
FORMATS = ["test_formats", "test_format_tensors", "test_float8_scaling", "test_mxfp4"]
QUANTIZE = ["test_quantize", "test_quantize_layouts", "test_quantize_overrides", "test_quantize_options"]
KERNELS = ["test_known_answers", "conform", "test_kernels NIB_ROUNDS=1", "test_stochastic", "test_gemm", "test_importance",
           *FORMATS, *QUANTIZE, "test_environment", "test_kernels"]
PRODUCTS = ["test_products", "test_gemm", "conform", *ERRORS, *FORMATS, "test_environment"]
TESTS = [
    ("src/base/comm*", ["test_comm", "test_gather", "test_groups", "test_shard", *ERRORS]),
    ("src/base/os*", ["test_run", "test_course", "test_faults", "test_files", "test_safetensors", "test_checkpoint", "test_gguf", "cli/quantize", "cli/kill",
                      "cli/check"]),
    ("src/base/*", [*ERRORS, "test_dlpack", "test_structs", *DEVICES, *TENSOR, "test_comm", "test_files", "test_safetensors",
                    "test_gguf", *QUANTIZE, "test_environment"]),
    ("src/format/*", ["test_codec", "test_known_answers", "conform", *ERRORS, *TENSOR, *FORMATS,
                      "test_stochastic", "test_files", "test_kernels", "test_gemm", "test_importance", *QUANTIZE,
                      "cli/conform"]),
    ("src/kernels/*product*", PRODUCTS),
    ("src/kernels/*gptq*", ["test_gptq"]),
    ("src/kernels/x86/*avx2*", ["test_known_answers NIB_MAX_ISA=avx2", "conform NIB_MAX_ISA=avx2", *KERNELS[2:]]),
    ("src/kernels/scalar/*", ["test_known_answers NIB_MAX_ISA=scalar", "conform NIB_MAX_ISA=scalar", *KERNELS[2:]]),
    ("src/kernels/*", KERNELS),
    ("src/tensor/dlpack*", ["test_dlpack", *ERRORS, *TENSOR]),
    ("src/tensor/gemm*", PRODUCTS),
    ("src/tensor/gptq*", ["test_gptq"]),
    ("src/tensor/factorize*", ["test_gptq"]),
    ("src/tensor/product*", PRODUCTS),
    ("src/tensor/convert*", ["test_mxfp4", "test_float8_scaling", *ERRORS, "test_run"]),
    ("src/tensor/*", [*TENSOR, *ERRORS, *DEVICES, "conform", "test_known_answers", "test_stochastic", *FORMATS,
                      "test_gemm", "test_files", "test_shard", "test_groups", *QUANTIZE, "test_importance", "test_products",
                      "test_environment", "cli/conform"]),
    ("src/file/*", ["test_safetensors", "test_files", "fuzz_safetensors", *ERRORS, "test_checkpoint", "fuzz_index",
                    "fuzz_config", "test_run", "cli/conform"]),
    ("src/shard/*", ["test_shard", "test_gather", "test_groups", "test_comm", *ERRORS]),
    ("src/*", [*ERRORS, *TENSOR, "conform", *FORMATS, "test_files", "test_shard", *QUANTIZE]),
    ("checkpoint/io/statistics*", ["test_statistics", "fuzz_statistics", "test_calibrated"]),
    ("checkpoint/plan/plan_statistics*", ["test_calibrated", "test_run", "cli/quantize"]),
    ("checkpoint/io/hessians*", ["test_calibrated", "fuzz_statistics"]),
    ("checkpoint/*/*gptq*", ["test_calibrated"]),
    ("checkpoint/run/factor*", ["test_calibrated"]),
    ("checkpoint/*/*fold*", ["test_calibrated", "test_run", "cli/quantize"]),
    ("checkpoint/io/gguf*", ["test_gguf", "fuzz_gguf", "test_gguf_model", "test_checkpoint", "test_run", "cli/quantize"]),
    ("checkpoint/plan/*gguf*", ["test_gguf_model", "test_gguf", "test_run", "test_checkpoint", "cli/quantize"]),
    ("checkpoint/check/*", ["test_check", "cli/check", "test_gguf_model", "test_run", "cli/quantize", "cli/json"]),
    ("checkpoint/model/*", ["test_checkpoint", "test_families", "test_check", "test_run", "test_gguf_model", "fuzz_config",
                            "cli/check", "cli/quantize"]),
    ("checkpoint/run/*", ["test_course", "test_run", "test_publish", "test_faults", "test_check", "test_gguf_model", "cli/quantize", "cli/check", "cli/kill"]),
    ("checkpoint/*", ["test_checkpoint", "test_run", "test_families", "test_check", "test_gguf_model", "fuzz_config", "fuzz_index",
                      "test_gguf", "cli/check", "cli/quantize"]),
]

# Which machine a file is for: a pattern and what /proc/cpuinfo or the name of the architecture must have.
MACHINES = [("*/arm/*", "aarch64"), ("*/x86/*avx512*", "avx512bw"), ("*/x86/*", "avx2")]

COMPILE = ["gcc", "-O1", "-ffp-contract=off", "-fopenmp", "-pthread", "-MMD", "-Werror=int-conversion",
           "-Werror=incompatible-pointer-types"]  # such mutants would be too easy
SANITIZERS = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
WARNINGS = ["-O2", "-Wall", "-Werror=array-bounds", "-Werror=aggressive-loop-optimizations"]
KINDS = {"plain": [], "sanitized": SANITIZERS}  # main leaves "plain" alone for --plain
LIBRARIES = ["jansson", "libpcre2-8", "libxxhash"]
ENVIRONMENT = {"LC_ALL": "C", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
               "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:hard_rss_limit_mb=8192",
               "UBSAN_OPTIONS": "halt_on_error=1"}
GIB = 1 << 30

# ---- What is changed -------------------------------------------------------------------------------------

SIMPLE = r"[A-Za-z_][\w.]*(?:->\w+)*"


def one_more(match):
    return re.sub(r"^(0x)?([0-9A-Fa-f]+)", lambda m: f"{m[1]}{int(m[2], 16) + 1:X}" if m[1] else str(int(m[2]) + 1), match[0])


def one_less(match):
    return re.sub(r"^(0x)?([0-9A-Fa-f]+)", lambda m: f"{m[1]}{int(m[2], 16) - 1:X}" if m[1] else str(int(m[2]) - 1), match[0])


# A name, what it looks for in the code (strings, comments and the arguments of messages are blank there), what it puts in its
# place. The code is formatted, so that spaces tell an operator of two operands from one of one.
OPERATORS = [
    ("< to <=", r" < ", " <= "),
    ("<= to <", r" <= ", " < "),
    ("> to >=", r" > ", " >= "),
    (">= to >", r" >= ", " > "),
    ("== to !=", r" == ", " != "),
    ("!= to ==", r" != ", " == "),
    ("&& to ||", r" && ", " || "),
    ("|| to &&", r" \|\| ", " && "),
    ("+ to -", r" \+ ", " - "),
    ("- to +", r" - ", " + "),
    ("+= to -=", r" \+= ", " -= "),
    ("& to |", r" & ", " | "),
    ("| to &", r" \| ", " & "),
    ("<< to >>", r" << ", " >> "),
    (">> to <<", r" >> ", " << "),
    ("one more", r"(?<![\w.])(?:0x[0-9A-F]+|\d+)(?:\.0f|[uU]?[lL]{0,2})(?![\w.])", one_more),
    ("one less", r"(?<![\w.])(?:0x0*[1-9A-F][0-9A-F]*|[1-9]\d*)(?:\.0f|[uU]?[lL]{0,2})(?![\w.])", one_less),
    ("no negation", r"(?<![\w)\]!])!(?=[\w(*])", ""),
    ("true to false", r"\btrue\b", "false"),
    ("false to true", r"\bfalse\b", "true"),
    ("min to max", r"(?<=[a-z]_)(f?)min(?=\()", r"\1max"),
    ("max to min", r"(?<=[a-z]_)(f?)max(?=\()", r"\1min"),
    ("arguments swapped", rf"\b(?!\w*(?:min|max|mul|add|and|or)\()([a-z]\w*\()({SIMPLE}), ({SIMPLE})(?=\))", r"\1\3, \2"),
    ("branches swapped", rf" \? ({SIMPLE}|\d+) : ({SIMPLE}|\d+)(?=[;,)])", r" ? \2 : \1"),
    ("error to NIB_OK", r"\breturn (?:status|nib_fail\([^;{}]*\)|\w+_error\([^;{}]*\));", "return NIB_OK;"),
    ("no TRY", r"\bTRY\(", "(void)("),
    ("no assignment", rf"(?m)^ +\*?{SIMPLE}(?:\[[^\]\n]*\](?:\.\w+)?)* (?:[-+*/|&^]|<<|>>)?= [^;\n]*;$", ";"),
    ("no call", r"(?m)^ +[A-Za-z_]\w*\([^;\n]*\);$", ";"),
    ("no continue", r"\bcontinue;", ";"),
    ("no break", r"\bbreak;", ";"),
]
STATEMENTS = ("no assignment", "no call")
# Lines that are no place for a fault: what only the compiler reads, sizes of local arrays, casts that silence a warning.
SKIPPED = re.compile(r"^\s*(?:_Static_assert|static_assert|typedef|extern|goto|va_start|va_end|\(void\)\w+[,;]|case |"
                     r"(?:static |const |_Alignas\(\w+\) |_Thread_local |struct |unsigned )*\w+ \**\w+\[[^=]*;)")
# The larger or smaller of two: which of equal ones does not matter.
CHOICE = re.compile(r"(?<![^\s(])(\S+) [<>]=? (\S+) \? (?:\1 : \2|\2 : \1)(?![\w\[.])")


def blank(text, start, end):
    return text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]


def closing_of(text, opening):
    """Where the parenthesis or brace at `opening` is closed."""
    pairs, depth = {"(": ")", "{": "}"}, 0
    for at in range(opening, len(text)):
        depth += (text[at] == text[opening]) - (text[at] == pairs[text[opening]])
        if depth == 0:
            return at
    return len(text)


def opening_of(text, at):
    """The parenthesis that is open at a place, or -1."""
    depth = 0
    for before in range(at - 1, -1, -1):
        depth += (text[before] == ")") - (text[before] == "(")
        if depth < 0:
            return before
        if text[before] in ";{}" and depth == 0:
            return -1
    return -1


def code_of(text):
    """The text with everything blank that no operator may change; places stay what they are."""
    code, messages = text, []
    token = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^[ ]*#(?:[^\n]*\\\n)*[^\n]*", re.S | re.M)
    for match in token.finditer(text):
        code = blank(code, *match.span())
        if match[0][0] == '"' and re.search(r"\w \w", match[0]):
            messages.append(match.start())
    for at in messages:  # words for people: the call that builds them is not changed inside
        opening = opening_of(code, at)
        if opening >= 0:
            code = blank(code, opening + 1, closing_of(code, opening))
    for match in re.finditer(r"\b(?:struct|union|enum)(?: \w+)?\s*\{", code):
        if code[match.end() - 1] == "{":  # not within another
            code = blank(code, match.end(), closing_of(code, match.end() - 1))
    # Outside of braces are declarations.
    start = 0
    while True:
        brace = code.find("{", start)
        code = blank(code, start, brace if brace >= 0 else len(code))
        if brace < 0:
            return code
        start = closing_of(code, brace) + 1


def around(text, start, end):
    """The whole lines around a range."""
    stop = text.find("\n", end)
    return text.rfind("\n", 0, start) + 1, stop if stop >= 0 else len(text)


def is_statement(code, start, end):
    """Whether lines are one statement, and not the rest of one."""
    inner = code[start:end]
    return re.search(r"([;{}):]|\belse|\bdo)\s*\Z", code[max(0, start - 500):start]) and inner.count("(") == inner.count(")")


def mutants_of(path):
    """All mutants of a file, one list per operator."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        text = file.read()
    code, found = code_of(text), {}
    for name, pattern, replacement in OPERATORS:
        for match in re.finditer(pattern, code):
            first, last = around(code, *match.span())
            if SKIPPED.match(code[first:last]) or (name in STATEMENTS and not is_statement(code, *match.span())) or \
                    (name[0] in "<>" and CHOICE.search(code[first:last])):
                continue
            # What is found in the code is replaced in the text, which has the strings.
            start, end = match.span()
            old = text[start:end]
            if name == "error to NIB_OK" or name in STATEMENTS:
                new = re.match(r" *", old)[0] + replacement
            else:
                new = replacement(match) if callable(replacement) else match.expand(replacement)
            found.setdefault(name, []).append({
                "file": path, "line": text.count("\n", 0, start) + 1, "operator": name, "start": start, "end": end, "new": new,
                "before": " ".join(text[first:last].split()),
                "after": " ".join((text[first:start] + new + text[end:last]).split())})
    return found


def drawn_mutants(path, seed):
    """The mutants of a file in the order in which they are drawn: one of each operator, then one more of each."""
    generator = random.Random(f"{seed}:{path}")
    found = mutants_of(path)
    for group in found.values():
        generator.shuffle(group)
    order = []
    while found:
        names = sorted(found)
        generator.shuffle(names)
        for name in names:
            order.append(found[name].pop())
            if not found[name]:
                del found[name]
    return order


def accepted_mutants():
    """{(file, before, after): why}, and the entries whose line is not in its file."""
    accepted, stale = {}, []
    with open(ACCEPTED, encoding="utf-8") as file:
        entries = re.findall(r"^file: (.*)\n- (.*)\n\+ (.*)\nwhy: (.+)$", file.read(), re.M)
    for path, before, after, why in entries:
        there = os.path.exists(os.path.join(ROOT, path)) and \
            any(m["before"] == before and m["after"] == after for group in mutants_of(path).values() for m in group)
        accepted[path, before, after] = why
        if not there:
            stale.append(f"{os.path.relpath(ACCEPTED, ROOT)}: no such mutant: {path}: {before} -> {after}")
    return accepted, stale


def not_for_this_machine(path):
    """Why a file does not run here, or None."""
    for pattern, need in MACHINES:
        if fnmatch.fnmatch(path, pattern):
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                has = set(file.read().split()) | {platform.machine()}
            return None if need in has else f"needs {need}"
    return None


def tests_of(path):
    return next(tests for pattern, tests in TESTS if fnmatch.fnmatch(path, pattern))


# ---- Compiling -------------------------------------------------------------------------------------------


def sources(*patterns):
    """Paths below the top of the repository."""
    return sorted(os.path.relpath(p, ROOT) for pattern in patterns for p in glob.glob(os.path.join(ROOT, pattern)))


LIBRARY = sources("src/*/*.c", "src/*/*/*.c", "checkpoint/*/*.c")


def program_sources(program):
    """Where a program is, and what it is made of."""
    if program == "nib":
        return sources("tools/*.c")
    if program.startswith("examples/"):
        return [program + ".c"]
    return [f"tests/{'fuzz/' if program.startswith('fuzz_') else ''}{program}.c"]


def programs_of(test):
    name = test.split()[0]
    return ["nib", "examples/make_checkpoint"] if name.startswith("cli/") else ["nib"] if name == "conform" else [name]


def flags_of(source, kind):
    """As CMakeLists.txt has it."""
    top = source.split("/")[0]
    flags = ["-std=c11" if source in LIBRARY else "-std=gnu11", "-Iinclude"]
    flags += {"src": ["-Isrc"], "checkpoint": ["-Isrc", "-Icheckpoint"],
              "tests": ["-Isrc", "-Icheckpoint", "-Itests"]}.get(top, [])
    if source.startswith("tests/fuzz/"):
        flags.append("-DNIB_FUZZ_MAIN")
    flags += [f"-DNIB_TEST_WRAP_{kind}" for kind in wraps_of(source)]
    # The kernels of instruction sets take minutes under sanitizers; their tests have memory with guards.
    return flags + ([] if is_of_instructions(source) else KINDS[kind])


def is_of_instructions(source):
    return re.match(r"src/\w+/(x86|arm)/", source)


def wraps_of(source):
    """The calls that a test replaces, by the macro that says so."""
    if not source.startswith("tests/test_"):
        return {}
    with open(os.path.join(ROOT, "CMakeLists.txt"), encoding="utf-8") as file:
        known = dict(re.findall(r"set\(wraps_(\w+) ([\w ]+)\)", file.read()))
    with open(os.path.join(ROOT, source), encoding="utf-8") as file:
        text = file.read()
    return {kind: calls.split() for kind, calls in known.items() if f"NIB_TEST_WRAP_{kind}" in text}


def finish(command, directory, timeout, environment=None, prepare=None):
    """(exit status, or None after the timeout; output) of a command and of all that it starts; `prepare` is called in it."""
    process = subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True, preexec_fn=prepare,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, status = process.communicate(timeout=timeout)[0], process.returncode
    except subprocess.TimeoutExpired:
        output, status = b"", None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # what a script may have left behind too
        except ProcessLookupError:
            pass
        process.stdout.close()
        process.wait()
    return status, output.decode(errors="replace")


def compile_source(source, kind, objects, directory, more=()):
    """(status, output) of compiling a source of the tree in `directory`, into objects/SOURCE.o."""
    target = os.path.join(objects, source + ".o")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    return finish([*COMPILE, *flags_of(source, kind), *more, "-c", source, "-o", target], directory, 600)


class Base:
    """The unchanged tree, compiled once for all workers: its objects, archives of the libraries, who includes what."""

    def __init__(self, directory):
        self.directory = directory
        self.users = {}  # path: the sources that it is compiled into
        found = subprocess.run(["pkg-config", "--libs", *LIBRARIES], stdout=subprocess.PIPE, check=True)
        self.libraries = found.stdout.decode().split()

    def objects(self, kind):
        return os.path.join(self.directory, kind)

    def build(self, programs, jobs):
        wanted = LIBRARY + sorted({source for program in programs for source in program_sources(program)})
        tasks = [(source, kind, self.objects(kind), ROOT) for kind in KINDS for source in wanted]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for (source, kind, _, _), (status, output) in zip(tasks, pool.map(lambda task: compile_source(*task), tasks)):
                if status != 0:
                    raise SystemExit(f"{source} ({kind}): exit {status}\n{output}")
        for kind in KINDS:
            subprocess.run(["ar", "rcs", self.archive(kind), *(os.path.join(self.objects(kind), s + ".o") for s in LIBRARY)],
                           check=True)
        for source in wanted:
            with open(os.path.join(self.objects("plain"), source + ".d"), encoding="utf-8") as file:
                for path in file.read().replace("\\\n", " ").split(":", 1)[1].split():
                    self.users.setdefault(os.path.normpath(path), []).append(source)

    def archive(self, kind):
        return os.path.join(self.objects(kind), "library.a")


# ---- A worker --------------------------------------------------------------------------------------------


def landlock_version():
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)


def fence(*directories):
    """From here on, this process and all that it starts make, change and remove files only in these directories."""
    libc = ctypes.CDLL(None, use_errno=True)

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("access", ctypes.c_uint64), ("directory", ctypes.c_int32)]

    write_file, truncate = 1 << 1, 1 << 14 if landlock_version() >= 3 else 0
    changes = write_file | truncate | sum(1 << bit for bit in range(4, 14))
    handled = ctypes.c_uint64(changes)
    rules = libc.syscall(444, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    done = rules >= 0
    sinks = [(sink, write_file | truncate) for sink in ("/dev/null", "/dev/full", "/dev/zero")]
    for path, access in [*((directory, changes) for directory in directories), *sinks]:
        rule = Beneath(access, os.open(path, os.O_PATH | os.O_CLOEXEC))
        done = done and libc.syscall(445, rules, 1, ctypes.byref(rule), 0) == 0
        os.close(rule.directory)
    if not done or libc.prctl(38, 1, 0, 0, 0) != 0 or libc.syscall(446, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock")
    os.close(rules)


class CannotBuild(Exception):
    """What the compiler said."""


class Worker:
    """A copy of the tree, in which one mutant at a time is compiled and tested."""

    def __init__(self, base, number, scratch):
        self.base = base
        self.directory = os.path.join(WORK, f"worker{number}")
        self.tree, self.out = os.path.join(self.directory, "tree"), os.path.join(self.directory, "out")
        self.scratch = os.path.join(scratch, f"worker{number}")
        self.changed = {}
        self.users = []
        for directory in (self.out, self.scratch):
            os.makedirs(directory)
        ignored = shutil.ignore_patterns("build*", ".git", ".venv", "__pycache__")
        shutil.copytree(ROOT, self.tree, ignore=ignored, symlinks=True)
        fence(self.directory, self.scratch)
        os.environ.update(TMPDIR=self.scratch, HOME=self.scratch)

    def empty(self):
        for directory in (self.out, self.scratch):
            shutil.rmtree(directory, ignore_errors=True)
            os.makedirs(directory, exist_ok=True)
        self.changed, self.users = {kind: [] for kind in KINDS}, []

    def compile_library(self, kind):
        """The library's sources that have the change; those whose object code differs are in `changed`."""
        objects, library = os.path.join(self.out, kind), [source for source in self.users if source in LIBRARY]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # a header of kernels has two sources, which take long
            for status, output in pool.map(lambda source: compile_source(source, kind, objects, self.tree), library):
                if status != 0:
                    pool.shutdown(cancel_futures=True)
                    raise CannotBuild(output)
        for source in library:
            ours, theirs = (os.path.join(o, source + ".o") for o in (objects, self.base.objects(kind)))
            if not filecmp.cmp(ours, theirs, shallow=False):
                self.changed[kind].append(source)

    def link(self, program, kind):
        """The path of a program, of changed objects before the archive, whose members they stand for."""
        target = os.path.join(self.out, kind + "-programs", program)
        if os.path.exists(target):
            return target
        objects = [os.path.join(self.out, kind, source + ".o") for source in self.changed[kind]]
        for source in program_sources(program):
            where = self.base.objects(kind)
            if source in self.users:  # it has the changed header too
                where = os.path.join(self.out, kind)
                status, output = compile_source(source, kind, where, self.tree)
                if status != 0:
                    raise CannotBuild(output)
            objects.append(os.path.join(where, source + ".o"))
        wraps = [f"-Wl,--wrap={call}" for calls in wraps_of(program_sources(program)[0]).values() for call in calls]
        os.makedirs(os.path.dirname(target), exist_ok=True)
        status, output = finish(["gcc", *KINDS[kind], "-fopenmp", "-pthread", *wraps, *objects, self.base.archive(kind),
                                 *self.base.libraries, "-lm", "-o", target], self.tree, 600)
        if status != 0:
            raise CannotBuild(output)
        return target

    def confine(self, kind):
        """What a test may: change its scratch, in bounds. Sanitizers have bounds of their own."""
        fence(self.scratch)
        for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, 3600)):
            resource.setrlimit(limit, (most, most))
        if kind == "plain":
            resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))

    def run_test(self, test, kind, timeout):
        """(whether it passed, what it did instead, seconds)."""
        name, *settings = test.split()
        program, directory = [self.link(program, kind) for program in programs_of(test)][0], os.path.join(self.out, kind + "-programs")
        if name.startswith("cli/"):
            command = ["bash", f"tests/{name}.sh"]
        elif name == "conform":
            command = [program, "conform", "-q", *sources("tests/golden/*.safetensors")]
        elif name.startswith("fuzz_"):
            command = [program, *sources(f"tests/fuzz/corpus/{name[len('fuzz_'):]}/*")]
        else:
            command = [program]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NIB")}
        environment.update(ENVIRONMENT, NIB=program, BUILD=directory,
                           **dict(setting.split("=") for setting in settings))
        start = time.time()
        status, output = finish(command, self.tree, timeout, environment, lambda: self.confine(kind))
        how = f"no end after {timeout:.0f} s" if status is None else f"exit {status}: {output[-2000:]}"
        return status == 0, how, time.time() - start

    def run_tests(self, tests, timeouts):
        """The first test that fails, and how; (None, ""): none does."""
        for kind in KINDS:
            if all(flags_of(source, kind) == flags_of(source, "plain") for source in self.changed["plain"]) and kind != "plain":
                continue
            if kind != "plain":
                self.compile_library(kind)
            for test in tests:
                if (test, kind) in timeouts:
                    passed, how, _ = self.run_test(test, kind, timeouts[test, kind])
                    if not passed:
                        return test + ("" if kind == "plain" else f" ({kind})"), how
        for source in self.changed["plain"]:
            if is_of_instructions(source):
                status, output = compile_source(source, "plain", os.path.join(self.out, "warned"), self.tree, WARNINGS)
                if status != 0:
                    return "the compiler", output
        return None, ""

    def try_mutant(self, mutant, timeouts):
        """The mutant with its result: "killed", "survived", "no compile" or "same code"."""
        start, path = time.time(), os.path.join(self.tree, mutant["file"])
        self.empty()
        with open(os.path.join(ROOT, mutant["file"]), encoding="utf-8") as file:
            text = file.read()
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text[:mutant["start"]] + mutant["new"] + text[mutant["end"]:])
            self.users = self.base.users.get(mutant["file"], [])
            by, how = None, ""
            self.compile_library("plain")
            if not self.changed["plain"]:
                result = "same code"
            else:
                by, how = self.run_tests(tests_of(mutant["file"]), timeouts)
                result = "killed" if by else "survived"
        except CannotBuild as error:
            result, how = "no compile", str(error)
        finally:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return {**mutant, "result": result, "by": by, "how": how[:400], "seconds": round(time.time() - start, 1)}

    def try_original(self, test, kind):
        """(test, kind, whether the unchanged tree passes, how it does not, seconds)."""
        self.empty()
        try:
            return (test, kind, *self.run_test(test, kind, 1800))
        except CannotBuild as error:
            return test, kind, False, str(error), 0


def work(base, number, scratch, tasks, results):
    """The life of a worker process: a task is the name of a method and its arguments."""
    worker = Worker(base, number, scratch)
    while True:
        method, arguments = tasks.get()
        results.put(getattr(worker, method)(*arguments))


class Workers:
    """Processes, each of which fences itself in before it does anything."""

    def __init__(self, base, count, scratch):
        context = multiprocessing.get_context("fork")
        self.tasks, self.results = context.Queue(), context.Queue()
        self.open = 0
        self.processes = [context.Process(target=work, args=(base, n, scratch, self.tasks, self.results), daemon=True)
                          for n in range(count)]
        for process in self.processes:
            process.start()

    def put(self, method, *arguments):
        self.tasks.put((method, arguments))
        self.open += 1

    def get(self):
        """Results as they come, until no task is open."""
        while self.open:
            try:
                result = self.results.get(timeout=5)
            except queue.Empty:
                if not all(process.is_alive() for process in self.processes):
                    raise SystemExit("a worker has died") from None
                continue
            self.open -= 1
            yield result

    def end(self):
        for process in self.processes:
            process.terminate()
            process.join()


# ---- The whole -------------------------------------------------------------------------------------------


def scratch_directory(jobs):
    """Memory, where there is enough of it: a disk that syncs takes longer than all else."""
    memory = "/dev/shm"
    enough = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > jobs * GIB // 2
    return tempfile.mkdtemp(prefix="nib-mutate-", dir=memory if enough else "/tmp")  # tests want a short name


def measure_original(workers, tests):
    """{(test, kind): the time that a mutant gets}, and what fails without one: that can tell nothing."""
    for test in tests:
        for kind in KINDS:
            if kind == "plain" or test.startswith(("test_", "fuzz_")):
                workers.put("try_original", test, kind)
    timeouts, faults = {}, []
    for test, kind, passed, how, seconds in workers.get():
        if passed:
            timeouts[test, kind] = 20 + 5 * seconds
        else:
            faults.append(f"{test} ({kind}) fails without a mutant: {how[-1000:]}")
    return timeouts, faults


def run_mutants(workers, drawn, arguments, timeouts, accepted, end):
    """[mutant with its result], and how many were not begun: of each file the first few that compile to something else."""
    done, left = [], {path: iter(mutants) for path, mutants in drawn.items()}
    waiting = collections.deque(path for path, mutants in drawn.items() for _ in mutants[:arguments.per_file])

    def begin():
        while waiting and time.time() < end and workers.open < arguments.jobs:
            mutant = next(left[waiting.popleft()], None)
            if mutant:
                workers.put("try_mutant", mutant, timeouts)

    begin()
    for mutant in workers.get():
        if mutant["result"] in ("no compile", "same code"):
            waiting.appendleft(mutant["file"])
        elif mutant["result"] == "survived" and (why := accepted.get((mutant["file"], mutant["before"], mutant["after"]))):
            mutant["result"], mutant["how"] = "accepted", why
        by = f", by {mutant['by']}" if mutant["by"] else ""
        print(f"{mutant['result']} {told(mutant)} ({mutant['seconds']:.0f} s{by})", flush=True)
        done.append(mutant)
        begin()
    return sorted(done, key=lambda mutant: (mutant["file"], mutant["line"], mutant["operator"])), len(waiting)


def told(mutant):
    return f"{mutant['file']}:{mutant['line']}: {mutant['operator']}: {mutant['before']} -> {mutant['after']}"


def report(done, faults, skipped):
    """Prints it; the number of failures, with what else is at fault."""
    counts = {}
    for mutant in done:
        of_file = counts.setdefault(mutant["file"], {})
        of_file[mutant["result"]] = of_file.get(mutant["result"], 0) + 1
    for path, of_file in counts.items():
        words = [f"{of_file[result]} {result}" for result in ("killed", "accepted", "survived") if result in of_file]
        print(f"{path}: {', '.join(words) or 'no mutant'}")
    total = {result: sum(of_file.get(result, 0) for of_file in counts.values()) for result in ("killed", "accepted", "survived")}
    print(f"{total['killed']} killed, {total['accepted']} accepted, {total['survived']} survived; redrawn: " +
          ", ".join(f"{sum(of_file.get(result, 0) for of_file in counts.values())} {result}"
                    for result in ("no compile", "same code")))
    for fault in faults:
        print(f"FAILED {fault}")
    for mutant in done:
        if mutant["result"] == "survived":
            print(f"survived {told(mutant)}")
    failed = total["survived"] + len(faults)
    print(f"{total['killed'] + total['accepted']} passed, {failed} failed, {skipped} skipped")
    return failed


def part_of(text):
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError("K/N with 1 <= K <= N")
    return int(match[1]), int(match[2])


def chosen_files(only, part):
    """The files of a run that have a place for a fault."""
    found = sources(*(f"{top}/{below}/*.[ch]" for top in ("src", "checkpoint") for below in ("*", "*/*")))
    found = [path for path in found if mutants_of(path) and
             any(fnmatch.fnmatch(path, pattern) or path.startswith(pattern.rstrip("/") + "/") for pattern in only or ["*"])]
    return found[part[0] - 1::part[1]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="20261115", help="another draw (%(default)s)")
    parser.add_argument("--per-file", type=int, default=3, metavar="N", help="mutants of each file (%(default)s)")
    parser.add_argument("--only", action="append", metavar="PATTERN",
                        help="only this directory, this file or files such as src/*.h; may be repeated")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="K/N", help="only every N-th file, from the K-th on")
    parser.add_argument("--plain", action="store_true", help="no tests under sanitizers")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="begin no mutant after this time")
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1, metavar="N", help="workers (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print mutants, run nothing")
    parser.add_argument("--json", metavar="OUT", help="write all mutants with their results")
    arguments = parser.parse_args()
    start = time.time()
    if arguments.plain:
        KINDS.pop("sanitized")

    accepted, stale = accepted_mutants()
    drawn, skipped = {}, 0
    for path in chosen_files(arguments.only, arguments.part):
        mutants, why = drawn_mutants(path, arguments.seed), not_for_this_machine(path)
        if not mutants:
            continue
        if why:
            skipped += min(len(mutants), arguments.per_file)
            print(f"skipped {path}: {why}")
        else:
            drawn[path] = mutants
    if arguments.list:
        for mutants in drawn.values():
            print("\n".join(told(mutant) for mutant in mutants[:arguments.per_file]))
        return 0
    if landlock_version() < 2:
        print("skipped mutants: the kernel has no Landlock, and a fault might remove files that are not its own")
        print("0 passed, 0 failed, 1 skipped")
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # here and in workers: whatever runs is ended, and scratch removed
    tests = sorted({test for path in drawn for test in tests_of(path)})
    shutil.rmtree(WORK, ignore_errors=True)
    base = Base(os.path.join(WORK, "base"))
    base.build({program for test in tests for program in programs_of(test)}, arguments.jobs)
    scratch = scratch_directory(arguments.jobs)
    workers = Workers(base, arguments.jobs, scratch)
    try:
        timeouts, faults = measure_original(workers, tests)
        print(f"{len(timeouts)} tests pass without a mutant, {time.time() - start:.0f} s", flush=True)
        done, unbegun = run_mutants(workers, drawn, arguments, timeouts, accepted, start + arguments.seconds)
    finally:
        workers.end()
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{len(done)} mutants, {time.time() - start:.0f} s with {arguments.jobs} workers")
    failed = report(done, faults + stale, skipped + unbegun)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"seed": arguments.seed, "mutants": done}, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

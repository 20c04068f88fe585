#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of the C code: small faults, drawn by seed, that some test must notice.

    tests/mutate.py                          of every file 3 mutants, and one for every 40 lines that have a place for one
    tests/mutate.py --only src/shard         of this directory; a file or a pattern such as 'src/*.h' does as well
    tests/mutate.py --since v1.0             of lines that have changed since
    tests/mutate.py --part 2/4               of the second of four portions of the files
    tests/mutate.py --list                   what would be drawn; those that do not compile are redrawn
    tests/mutate.py --log LOG --survivors    of those in the log that survived, and nothing else
    tests/mutate.py --log LOG --sanitized    these, and under sanitizers alone: the second half of a run that was --plain

First the tests run on the unchanged tree, with coverage. A mutant is made in a copy of the tree below build/mutate, compiled
and given to the tests that run its line, up to the first that fails: then it is killed. Short ones come first, and those that
have killed others of the same file. One that survives them meets the programs among them again under sanitizers, which see
what it leaks and what it reads beyond an end (--plain: not). For kernels of instruction sets the compiler's warnings take their place. A mutant whose object code is that
of the original is none, and redrawn. A test that takes more processor time than it should is a kill; one that takes more of
the clock is one only if the unchanged program, tried then, is not slow as well.

Results are printed and written to the log as they come, files in turns, those that take minutes to compile last. A run goes on from its log: what was killed there,
in a file that is still the same, is not tried again, and what survived only if something has changed. After --seconds nothing
new is begun, and what was not counts as skipped. tests/mutants_accepted.txt has those that no test could notice, each with
the reason:

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
import hashlib
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

# Files with places for faults.
MUTATED = [*(f"{top}/{below}/*.[ch]" for top in ("src", "checkpoint") for below in ("*", "*/*")),
           "tools/*.[ch]", "cuda/*.c", "cuda/*.h", "cuda/*.cuh", "mpi/*.c"]
NOT_MUTATED = ["cuda/test_*", "mpi/test_*"]

# Tests: the programs of tests/ and tests/fuzz/ (on their corpus), the CUDA kernels on the host, MPI where it is, `conform`
# (nib conform on the golden files) and scripts of tests/cli/. "conform NIB_MAX_ISA=avx2" sets that variable. Sanitizers: the programs only.
# test_load is long and about memory; the scripts that are not here build something, or look at words.
SCRIPTS = ["bench", "check", "completion", "conform", "help", "json", "kill", "limits", "quantize", "report", "sandbox", "shard"]
SETTINGS = ["test_kernels NIB_ROUNDS=1"] + [f"{test} NIB_MAX_ISA={isa}" for test in ("test_known_answers", "conform") for isa in ("scalar", "avx2")]
LEFT_OUT = ["test_load", "test_kernels"]  # the second for one round of the same
# Tests that run much and look at little of it: what they are for.
ONLY_FOR = {"cli/bench": "tools/bench*", "cli/shard": "src/shard/*"}
# Whose runs leave no coverage behind, as a sandbox, a signal or the machine keeps them from it: a pattern and the tests to run besides.
UNSEEN = [("src/kernels/x86/*amx*", ["test_products", "test_gemm"]),  # by a processor that has it
          ("tools/sandbox.[ch]", ["test_sandbox", "cli/sandbox"]), ("checkpoint/run/*", ["cli/kill"])]

# Which machine a file is for: a pattern and what /proc/cpuinfo or the name of the architecture must have.
MACHINES = [("*/arm/*", "aarch64"), ("*/x86/*avx512*", "avx512bw"), ("*/x86/*", "avx2")]

COMPILE = ["-O1", "-ffp-contract=off", "-fopenmp", "-pthread", "-MMD"]
FORBIDDEN = ["-Werror=int-conversion", "-Werror=incompatible-pointer-types"]  # such mutants would be too easy
SANITIZERS = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
WARNINGS = ["-O2", "-Wall", "-Werror=array-bounds", "-Werror=aggressive-loop-optimizations"]
KINDS = {"plain": [], "covered": ["--coverage"], "sanitized": SANITIZERS}  # main takes "sanitized" away for --plain
LIBRARIES = ["jansson", "libpcre2-8", "libxxhash"]
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
               "OMPI_MCA_btl": "self,tcp",  # no files in shared memory
               "LC_ALL": "C", "NIB_BROWSER": "", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
               "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:hard_rss_limit_mb=8192",
               "UBSAN_OPTIONS": "halt_on_error=1"}
GIB = 1 << 30
SECONDS_TO_LINK = 0.3  # a program

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
MUTANT = ("file", "line", "last", "operator", "start", "end", "new", "before", "after")  # what a draw says of one
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
                "file": path, "line": text.count("\n", 0, start) + 1, "last": text.count("\n", 0, end) + 1, "operator": name,
                "start": start, "end": end, "new": new,
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


# ---- Compiling -------------------------------------------------------------------------------------------


def sources(*patterns, top=ROOT):
    """Paths below the top of the repository."""
    return sorted(os.path.relpath(p, top) for pattern in patterns for p in glob.glob(os.path.join(top, pattern)))


LIBRARY = sources("src/*/*.c", "src/*/*/*.c", "checkpoint/*/*.c")
CUDA = [*sources("cuda/*.c", "cuda/shim/*.c"), *sources("cuda/shim/*.cpp")]


def program_sources(program):
    """Where a program is, and what it is made of."""
    if program == "nib":
        return sources("tools/*.c")
    if program.startswith(("examples/", "bench/")):
        return [program + ".c"]
    if program == "fuzz_cuda" or program.endswith("_shim"):
        own = f"cuda/{program[:-len('_shim')]}.c" if program.endswith("_shim") else f"tests/fuzz/{program}.c"
        return [own, *(source for source in CUDA if not source.startswith("cuda/test_"))]
    if program == "test_mpi":
        return sources("mpi/*mpi.c")
    if program == "nib-mpi":
        return [*(source for source in sources("tools/*.c") if source != "tools/main.c"), "mpi/main.c", "mpi/nib_mpi.c"]
    found = [f"tests/{'fuzz/' if program.startswith('fuzz_') else ''}{program}.c"]
    return found + (["tools/sandbox.c"] if program == "test_sandbox" else [])


def programs_of(test):
    name = test.split()[0]
    if name.startswith("cli/"):
        return ["nib", "examples/make_checkpoint", *(["bench/shard"] if name == "cli/shard" else [])]
    if name == "mpi/test_tool":
        return ["nib", "nib-mpi", "examples/make_checkpoint"]
    return ["nib"] if name == "conform" else [name]


def all_tests():
    names = [os.path.basename(path)[:-len(".c")] for path in sources("tests/test_*.c", "tests/fuzz/fuzz_*.c")]
    names += [os.path.basename(path)[:-len(".c")] + "_shim" for path in sources("cuda/test_*.c")]
    mpi = [*(f"test_mpi RANKS={n}" for n in (1, 3)), "mpi/test_tool"] if shutil.which("mpicc") and shutil.which("mpirun") else []
    return [*(name for name in names if name not in LEFT_OUT), *mpi, "conform", *SETTINGS, *(f"cli/{name}" for name in SCRIPTS)]


def flags_of(source, kind):
    """As CMakeLists.txt has it."""
    top = source.split("/")[0]
    flags = ["-std=c11" if source in LIBRARY else "-std=gnu11", *FORBIDDEN, "-Iinclude"]
    if source.endswith(".cpp"):
        flags = ["-std=c++17", "-fno-strict-aliasing", "-Iinclude"]
    flags += {"src": ["-Isrc"], "checkpoint": ["-Isrc", "-Icheckpoint"],
              "tests": ["-Isrc", "-Icheckpoint", "-Itests", "-Itools"],
              "mpi": ["-Itests", "-Itools", "-DNIB_MPI_MOST_BYTES=997"],
              "cuda": ["-Icuda/shim", "-Icuda", "-Isrc", "-Itests", "-DNIB_CUDA_SHIM=1"]}.get(top, [])
    if source.startswith("tests/fuzz/"):
        flags.append("-DNIB_FUZZ_MAIN")
    flags += [f"-DNIB_TEST_WRAP_{kind}" for kind in wraps_of(source)]
    # The kernels of instruction sets take minutes under sanitizers; their tests have memory with guards.
    return flags + ([] if is_of_instructions(source) and kind == "sanitized" else KINDS[kind])


def is_of_tests(source):
    return source.startswith(("tests/", "examples/", "bench/", "cuda/test_", "cuda/shim/cublaslt", "mpi/test_"))


def is_of_instructions(source):
    return re.match(r"src/\w+/(x86|arm)/", source)


def wraps_of(source):
    """The calls that a test replaces, by the macro that says so."""
    if not source.startswith("tests/"):
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


def compiler_of(source):
    return "g++" if source.endswith(".cpp") else "mpicc" if source.startswith("mpi/") else "gcc"


def compile_source(source, kind, objects, directory, more=(), through=()):
    """(status, output) of compiling a source of the tree in `directory`, into objects/SOURCE.o."""
    target = os.path.join(objects, source + ".o")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    return finish([*through, compiler_of(source), *COMPILE, *flags_of(source, kind), *more, "-c", source, "-o", target], directory, 3600)


class Base:
    """The unchanged tree, compiled once for all workers: its objects, archives of the libraries, who includes what."""

    def __init__(self, directory):
        self.directory = directory
        self.users = {}  # path: the sources that it is compiled into
        self.unused = ["covered"]  # kinds that mutants are not tested in
        self.most_sanitized = None  # tests of a mutant under sanitizers
        found = subprocess.run(["pkg-config", "--libs", *LIBRARIES], stdout=subprocess.PIPE, check=True)
        self.libraries = found.stdout.decode().split()

    def objects(self, kind):
        return os.path.join(self.directory, kind)

    def build(self, programs, kinds, jobs):
        wanted = LIBRARY + sorted({source for program in programs for source in program_sources(program)})
        cache = ["ccache"] if shutil.which("ccache") else []
        tasks = [(source, kind, self.objects(kind), ROOT, (), cache) for kind in kinds for source in wanted]
        tasks.sort(key=lambda task: not (is_of_instructions(task[0]) or task[0].endswith(".cpp")))  # those take longest
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for (source, kind, *_), (status, output) in zip(tasks, pool.map(lambda task: compile_source(*task), tasks)):
                if status != 0:
                    raise SystemExit(f"{source} ({kind}): exit {status}\n{output}")
        for kind in kinds:
            subprocess.run(["ar", "rcs", self.archive(kind), *(os.path.join(self.objects(kind), s + ".o") for s in LIBRARY)],
                           check=True)
        for source in wanted:
            with open(os.path.join(self.objects("plain"), source + ".d"), encoding="utf-8") as file:
                for path in file.read().replace("\\\n", " ").split(":", 1)[1].split():
                    self.users.setdefault(os.path.normpath(path), []).append(source)
        self.build_exit()

    def build_exit(self):
        """Children of tests that leave by _exit leave their coverage too."""
        source, self.exit = (os.path.join(self.directory, "exit." + end) for end in "co")
        with open(source, "w", encoding="utf-8") as file:
            file.write("void __gcov_dump(void);\nvoid __real__exit(int) __attribute__((noreturn));\nvoid __wrap__exit(int);\n"
                       "void __wrap__exit(int status)\n{\n    __gcov_dump();\n    __real__exit(status);\n}\n")
        subprocess.run(["gcc", "-c", source, "-o", self.exit], check=True)

    def cost(self, path):
        """Of compiling a mutant, in sources."""
        return sum(100 if re.search(r"/kernels_avx|\.cpp$", source) else 1
                   for source in self.users.get(path, ()) if not is_of_tests(source))

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
    sinks = [(sink, write_file | truncate) for sink in ("/dev/null", "/dev/full", "/dev/zero", "/dev/ptmx", "/dev/pts")
             if os.path.exists(sink)]  # the last two: terminals
    for path, access in [*((directory, changes) for directory in directories), *sinks]:
        rule = Beneath(access, os.open(path, os.O_PATH | os.O_CLOEXEC))
        done = done and libc.syscall(445, rules, 1, ctypes.byref(rule), 0) == 0
        os.close(rule.directory)
    if not done or libc.prctl(38, 1, 0, 0, 0) != 0 or libc.syscall(446, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock")
    os.close(rules)


class CannotBuild(Exception):
    """What the compiler said."""


class Undecided(Exception):
    """A test took long, and so did that of the unchanged tree."""


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

    def compile_changed(self, kind):
        """The sources that have the change, but for tests'; those whose object code differs are in `changed`."""
        objects, ours = os.path.join(self.out, kind), [source for source in self.users if not is_of_tests(source)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # a header of kernels has two sources, which take long
            for status, output in pool.map(lambda source: compile_source(source, kind, objects, self.tree), ours):
                if status != 0:
                    pool.shutdown(cancel_futures=True)
                    raise CannotBuild(output)
        for source in ours:
            mutated, original = (os.path.join(o, source + ".o") for o in (objects, self.base.objects(kind)))
            if not filecmp.cmp(mutated, original, shallow=False):
                self.changed[kind].append(source)

    def link(self, program, kind, original=False):
        """The path of a program, of changed objects before the archive, whose members they stand for."""
        target = os.path.join(self.out, f"{kind}-{'original' if original else 'programs'}", program)
        if os.path.exists(target):
            return target
        changed, users = ([], []) if original else (self.changed[kind], self.users)
        objects = [os.path.join(self.out, kind, source + ".o") for source in changed if source in LIBRARY]
        for source in program_sources(program):
            where = self.base.objects(kind)
            if source in changed:
                where = os.path.join(self.out, kind)
            elif source in users and is_of_tests(source):  # it has the changed header too
                where = os.path.join(self.out, kind)
                status, output = compile_source(source, kind, where, self.tree)
                if status != 0:
                    raise CannotBuild(output)
            objects.append(os.path.join(where, source + ".o"))
        wraps = [f"-Wl,--wrap={call}" for calls in wraps_of(program_sources(program)[0]).values() for call in calls]
        if kind == "covered":
            wraps += ["-Wl,--wrap=_exit", self.base.exit]
        compiler = compiler_of(program_sources(program)[-1])  # the one that is not C comes last
        os.makedirs(os.path.dirname(target), exist_ok=True)
        status, output = finish([compiler, *KINDS[kind], "-fopenmp", "-pthread", "-rdynamic", *wraps, *objects,
                                 self.base.archive(kind), *self.base.libraries, "-ldl", "-lm", "-o", target], self.tree, 3600)
        if status != 0:
            raise CannotBuild(output)
        return target

    def confine(self, kind, seconds):
        """What a test may: change its scratch, in bounds. Sanitizers have bounds of their own for memory."""
        fence(self.scratch)
        for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, int(seconds) + 1)):
            resource.setrlimit(limit, (most, most))
        if kind != "sanitized":
            resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))

    def run_test(self, test, kind, limits, original=False):
        """(exit status, None: too long by the clock; what it said; seconds of the processor and of the clock)."""
        name, *settings = test.split()
        program = [self.link(program, kind, original) for program in programs_of(test)][0]
        if "/" in name:
            command = ["bash", f"{name}.sh" if name.startswith("mpi/") else f"tests/{name}.sh"]
        elif name == "conform":
            command = [program, "conform", "-q", *sources("tests/golden/*.safetensors", top=self.tree)]
        elif name.startswith("fuzz_"):
            command = [program, *sources(f"tests/fuzz/corpus/{name[len('fuzz_'):]}/*", top=self.tree)]
        else:
            command = [program]
        if name == "test_mpi":
            command = ["mpirun", "-n", settings[0].split("=")[1], program]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NIB")}
        environment.update(ENVIRONMENT, NIB=program, BUILD=os.path.dirname(program),
                           **dict(setting.split("=") for setting in settings))
        if kind == "covered":  # a sandbox keeps a program from writing what it has run
            environment.update(GCOV_PREFIX=os.path.join(self.scratch, "coverage"), NIB_SANDBOX="off")
        start, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
        status, output = finish(command, self.tree, limits[1], environment, lambda: self.confine(kind, limits[0]))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return status, output, processor, time.time() - start

    def kills(self, test, kind, limits):
        """How a test notices the mutant, or None. Slow is told from endless by the unchanged program."""
        status, output, _, _ = self.run_test(test, kind, limits)
        if status is None:
            if self.run_test(test, kind, (limits[0], limits[1] / 2), original=True)[0] != limits[2]:
                raise Undecided
            return f"no end after {limits[1]:.0f} s"
        return None if status == limits[2] else f"exit {status}: {output[-2000:]}"

    def run_tests(self, tests, limits):
        """The first test that fails, and how; (None, ""): none does."""
        for kind in KINDS:
            if kind in self.base.unused or (kind == "sanitized" and all(is_of_instructions(s) for s in self.changed["plain"])):
                continue
            if kind == "sanitized":
                self.compile_changed(kind)
            found = [test for test in tests if (test, kind) in limits]
            for test in found[:self.base.most_sanitized if kind == "sanitized" else None]:
                how = self.kills(test, kind, limits[test, kind])
                if how:
                    return test + ("" if kind == "plain" else f" ({kind})"), how
        for source in self.changed["plain"]:
            if is_of_instructions(source):
                status, output = compile_source(source, "plain", os.path.join(self.out, "warned"), self.tree, WARNINGS)
                if status != 0:
                    return "the compiler", output
        return None, ""

    def try_mutant(self, mutant, tests, limits):
        """The mutant with its result: "killed", "survived", "no compile", "same code" or "undecided"."""
        start, path = time.time(), os.path.join(self.tree, mutant["file"])
        self.empty()
        with open(path, encoding="utf-8") as file:
            text = file.read()
        by, how = None, ""
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text[:mutant["start"]] + mutant["new"] + text[mutant["end"]:])
            self.users = self.base.users.get(mutant["file"], [])
            self.compile_changed("plain")
            if not self.changed["plain"]:
                result = "same code"
            else:
                by, how = self.run_tests(tests, limits)
                result = "killed" if by else "survived"
                how = how if by or tests else "no test runs this line"
        except CannotBuild as error:
            result, how = "no compile", str(error)
        except Undecided:
            result = "undecided"
        finally:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return {**mutant, "result": result, "by": by, "how": how[:400], "seconds": round(time.time() - start, 1)}

    def try_original(self, test, kind):
        """(test, kind, exit status of the unchanged tree, what it said, seconds of the processor and the clock, its lines)."""
        self.empty()
        try:
            found = self.run_test(test, kind, (1800, 3600))
            return test, kind, *found, self.lines_run() if kind == "covered" else {}
        except CannotBuild as error:
            return test, kind, 1, str(error), 0, 0, {}

    def lines_run(self):
        """{path: (lines that ran, lines that did not, [(first and last line of a function, whether it ran)])}."""
        data = sorted(glob.glob(os.path.join(self.scratch, "coverage", "**", "*.gcda"), recursive=True))
        for path in data:
            notes = path[:-len("gcda")] + "gcno"
            os.symlink(path[path.index(self.base.directory):-len("gcda")] + "gcno", notes)
        found, mutated = {}, set(sources(*MUTATED))
        process = subprocess.run(["gcov", "--json-format", "--stdout", *data], cwd=self.scratch, check=False,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for unit in process.stdout.splitlines():
            for file in json.loads(unit)["files"] if unit.startswith(b"{") else []:
                path = os.path.relpath(os.path.join(ROOT, file["file"]), ROOT)
                if path in mutated:
                    ran, not_ran, functions = found.setdefault(path, (set(), set(), []))
                    for line in file["lines"]:
                        (ran if line["count"] else not_ran).add(line["line_number"])
                    functions += [(f["start_line"], f["end_line"], f["execution_count"] > 0) for f in file["functions"]]
        return found


def work(base, number, scratch, tasks, results):
    """The life of a worker process: a task is the name of a method and its arguments."""
    worker = Worker(base, number, scratch)
    while True:
        method, arguments = tasks.get()
        results.put(getattr(worker, method)(*arguments))


class Workers:
    """Processes, each of which fences itself in before it does anything."""

    def __init__(self, base, count, scratch):
        self.base = base
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
        for process in self.processes:
            process.join(30)
            process.kill()  # one that was just about to wait for a task may not have heard


# ---- Coverage --------------------------------------------------------------------------------------------


class Coverage:
    """Which tests run which lines, and how long they take."""

    def __init__(self):
        self.seconds = {}  # test: of the processor
        self.ran = {}      # path: {line: tests}, of lines with code
        self.functions = {}  # path: {(first line, last line): tests}
        self.kills = collections.Counter()  # of a file, by a test

    def add(self, test, seconds, found):
        self.seconds[test] = seconds
        for path, (ran, not_ran, functions) in found.items():
            lines, spans = self.ran.setdefault(path, {}), self.functions.setdefault(path, {})
            for line in ran | not_ran:
                lines.setdefault(line, set()).update([test] if line in ran else [])
            for first, last, count in functions:
                spans.setdefault((first, last), set()).update([test] if count else [])

    def save(self, path, limits, digest):
        """To a file: sets of tests are few, and lines name theirs by its place."""
        sets, tests = {}, sorted(self.seconds)
        place = lambda found: sets.setdefault(tuple(sorted(tests.index(test) for test in found)), len(sets))
        ran = {path: {line: place(found) for line, found in lines.items()} for path, lines in self.ran.items()}
        functions = {path: [[*span, place(found)] for span, found in spans.items()] for path, spans in self.functions.items()}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"digest": digest, "tests": [[test, self.seconds[test], *limits[test, "plain"]] for test in tests],
                       "sets": list(sets), "ran": ran, "functions": functions}, file)

    def load(self, path, digest):
        """The limits of tests, or None where the file is not there or of another tree."""
        if not path or not os.path.exists(path):
            return None
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
        if saved["digest"] != digest:
            return None
        tests = [test for test, *_ in saved["tests"]]
        sets = [{tests[i] for i in places} for places in saved["sets"]]
        self.seconds = {test: seconds for test, seconds, *_ in saved["tests"]}
        self.ran = {p: {int(line): sets[place] for line, place in lines.items()} for p, lines in saved["ran"].items()}
        self.functions = {p: {(first, last): sets[place] for first, last, place in spans} for p, spans in saved["functions"].items()}
        return {(test, "plain"): tuple(limits) for test, _, *limits in saved["tests"]}

    def tests_of(self, mutant, longest):
        """The tests that run a mutant's lines; where these have no code, its function; outside of one, anything of the file.
        Of many the long ones are left out."""
        path, lines = mutant["file"], range(mutant["line"], mutant["last"] + 1)
        of_lines = self.ran.get(path, {})
        if any(line in of_lines for line in lines):
            found = set().union(*(of_lines.get(line, ()) for line in lines))
        else:
            around_it = [tests for (first, last), tests in self.functions.get(path, {}).items() if first <= mutant["line"] <= last]
            found = set().union(*around_it or of_lines.values())
        for pattern, tests in UNSEEN:
            if fnmatch.fnmatch(path, pattern):
                found |= set(tests) & set(self.seconds)
        likely = lambda test: (self.seconds[test] + SECONDS_TO_LINK) / (1 + 8 * self.kills[path, test])
        tests = sorted((test for test in found if fnmatch.fnmatch(path, ONLY_FOR.get(test, "*"))), key=likely)
        return [test for i, test in enumerate(tests) if i < 10 or self.seconds[test] <= longest]


def limits_known(workers, tests, known):
    """Of what another run has measured, what holds here: a test that ends in another way on this machine would kill everything."""
    for test in sorted(tests, key=lambda test: -known.get((test, "plain"), (0,))[0]):
        if (test, "plain") in known:
            workers.put("try_original", test, "plain")
    limits = {}
    for test, kind, status, output, processor, clock, _ in workers.get():
        if status == known[test, kind][2]:
            limits[test, kind] = known[test, kind]
        else:
            print(f"left out {test}: exit {status} after {processor:.1f} s, {clock:.1f} s: {output[-300:]}", flush=True)
    return limits


def measure_original(workers, coverage, tests, kinds, longest):
    """{(test, kind): the seconds of processor and clock that a mutant gets, and how it ends without one}, faults; and the coverage."""
    for kind in kinds:
        for test in sorted(tests, key=lambda test: not test.startswith("cli/")):  # they take longest
            if kind == "covered" or (kind == "sanitized" and test.startswith(("test_", "fuzz_")) and
                                     coverage.seconds.get(test, 0) <= longest):
                workers.put("try_original", test, kind)
    limits, faults = {}, []
    for test, kind, status, output, processor, clock, found in workers.get():
        print(f"{test} ({kind}): exit {status}, {processor:.1f} s of the processor, {clock:.1f} s", flush=True)
        if status not in (0, 77):
            faults.append(f"{test} ({kind}) fails without a mutant: {output[-1000:]}")
            continue
        limits[test, kind] = 5 + 5 * processor, 60 + 20 * processor, status  # a script without a browser has looked at all else
        if kind == "covered":
            limits[test, "plain"] = limits[test, kind]
            coverage.add(test, processor, found)
    return limits, faults


# ---- The log ---------------------------------------------------------------------------------------------


def digest_of(*paths):
    """Of what files hold."""
    found = hashlib.sha256()
    for path in paths:
        with open(os.path.join(ROOT, path), "rb") as file:
            found.update(file.read())
    return found.hexdigest()[:16]


def all_files():
    """All that a result depends on."""
    found = sources(*MUTATED, "include/*.h", "cuda/shim/*", "examples/*.c", "bench/*.[ch]",
                    *("tests/" + below for below in ("*", "*/*", "*/*/*", "*/*/*/*")))
    return [path for path in found if os.path.isfile(os.path.join(ROOT, path)) and "__pycache__" not in path and
            path not in ("tests/mutate.py", "tests/mutants_accepted.txt")]


class Log:
    """Results as they come, a line of JSON each, and those of earlier runs with the same log."""

    def __init__(self, path, again):
        self.path, self.known = path, {}
        self.tests = digest_of(*all_files())
        self.digests = {p: digest_of(p) for p in sources(*MUTATED)}  # now: the tree may be edited while this runs
        if path and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                for line in file:
                    if line.endswith("\n"):  # not the half of one that was cut off
                        mutant = json.loads(line)
                        self.known[self.key(mutant, mutant["digest"])] = mutant
        self.again = again

    def key(self, mutant, digest=None):
        return mutant["file"], digest or self.digests[mutant["file"]], mutant["start"], mutant["new"]

    def result_of(self, mutant):
        """What is known of a mutant: what a test killed stays so while its file is the same, others while the tests are."""
        known = self.known.get(self.key(mutant))
        if not known or known["result"] == "undecided":
            return None
        lasting = known["result"] in ("killed", "no compile", "same code")
        return {**known, **mutant} if lasting or (known["tests"] == self.tests and not self.again) else None

    def survivors(self):
        """{path: mutants} that survived and are still in their files, and how many are not."""
        found, gone, last = {}, 0, {}
        for mutant in self.known.values():  # the newest result of each counts
            last[mutant["file"], mutant["operator"], mutant["before"], mutant["after"]] = mutant["result"]
        for path in sorted({key[0] for key, result in last.items() if result == "survived"}):
            there = {}
            if os.path.exists(os.path.join(ROOT, path)):
                there = {(path, m["operator"], m["before"], m["after"]): m for group in mutants_of(path).values() for m in group}
            for key in (key for key, result in last.items() if key[0] == path and result == "survived"):
                if key in there:
                    found.setdefault(path, []).append(there[key])
                else:
                    gone += 1
        return found, gone

    def add(self, mutant):
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({**mutant, "digest": self.key(mutant)[1], "tests": self.tests}) + "\n")


# ---- The whole -------------------------------------------------------------------------------------------


def scratch_directory(jobs):
    """Memory, where there is enough of it: a disk that syncs takes longer than all else."""
    memory = "/dev/shm"
    enough = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > jobs * GIB // 2
    return tempfile.mkdtemp(prefix="nib-mutate-", dir=memory if enough else "/tmp")  # tests want a short name


def run_mutants(workers, drawn, wanted, log, limits, coverage, accepted, longest, end):
    """[mutant with its result], and how many were not begun: of each file as many as wanted that compile to something else."""
    done, left, tries = [], {path: iter(mutants) for path, mutants in drawn.items()}, collections.Counter()
    waiting = collections.deque(path for costly in (False, True) for turn in range(max(wanted.values(), default=0))
                                for path, count in wanted.items() if turn < count and (workers.base.cost(path) >= 50) == costly)
    retries = []

    def take(mutant):
        if mutant["result"] in ("no compile", "same code"):
            waiting.appendleft(mutant["file"])
        elif mutant["result"] == "survived" and (why := accepted.get((mutant["file"], mutant["before"], mutant["after"]))):
            mutant = {**mutant, "result": "accepted", "how": why}
        elif mutant["result"] == "killed":
            coverage.kills[mutant["file"], mutant["by"]] += 1
        done.append(mutant)
        return mutant

    def begin():
        while (retries or waiting) and time.time() < end and workers.open < len(workers.processes):
            mutant = next(left[waiting.popleft()], None) if waiting else retries.pop()
            known = mutant and log.result_of(mutant)
            if known:
                take(known)
            elif mutant:
                workers.put("try_mutant", mutant, coverage.tests_of(mutant, longest), limits)

    begin()
    for mutant in workers.get():
        log.add(mutant)
        place = mutant["file"], mutant["start"], mutant["new"]
        tries[place] += 1
        if mutant["result"] == "undecided" and tries[place] < 3:
            retries.append({key: mutant[key] for key in MUTANT})
        else:
            mutant = take(mutant)
        by = f", by {mutant['by']}" if mutant["by"] else ", " + mutant["how"] if mutant["result"] == "survived" and mutant["how"] else ""
        print(f"{mutant['result']} {told(mutant)} ({mutant['seconds']:.0f} s{by})", flush=True)
        begin()
    return sorted(done, key=lambda mutant: (mutant["file"], mutant["line"], mutant["operator"])), len(waiting)


def told(mutant):
    return f"{mutant['file']}:{mutant['line']}: {mutant['operator']}: {mutant['before']} -> {mutant['after']}"


def print_unrun(drawn, coverage):
    for path, mutants in drawn.items():
        for line, text in sorted({(m["line"], m["before"]) for m in mutants}):
            if line in coverage.ran.get(path, {}) and not coverage.ran[path][line]:
                print(f"{path}:{line}: {text}")


def report(done, drawn, coverage, faults, skipped):
    """Prints it; the number of failures, with what else is at fault."""
    results = ("killed", "accepted", "survived", "undecided")
    counts = {path: collections.Counter(m["result"] for m in done if m["file"] == path) for path in drawn}
    print("file: lines with a place for a fault, of them run by no test; places; lines and places tried; results")
    for path, mutants in drawn.items():
        all_of_file = [m for group in mutants_of(path).values() for m in group]
        tried = [m for m in done if m["file"] == path and m["result"] in results]
        lines = {m["line"] for m in all_of_file}
        of_lines = coverage.ran.get(path, {})
        not_run = sum(1 for line in lines if line in of_lines and not of_lines[line])
        share = len({m["line"] for m in tried}) / max(len(lines), 1)
        print(f"{path}: {len(lines)} lines, {not_run} not run, {len(all_of_file)} places; {share:.0%} of lines, {len(tried)} places: " +
              (", ".join(f"{counts[path][result]} {result}" for result in results if counts[path][result]) or "none"))
    total = {result: sum(of_file[result] for of_file in counts.values()) for result in (*results, "no compile", "same code")}
    print(f"{total['killed']} killed, {total['accepted']} accepted, {total['survived']} survived, {total['undecided']} undecided; "
          f"redrawn: {total['no compile']} that do not compile, {total['same code']} of the same code")
    for fault in faults:
        print(f"FAILED {fault}")
    for mutant in done:
        if mutant["result"] == "survived":
            print(f"survived {told(mutant)}" + (f" ({mutant['how']})" if mutant["how"] else ""))
    failed = total["survived"] + len(faults)
    print(f"{total['killed'] + total['accepted']} passed, {failed} failed, {skipped + total['undecided']} skipped")
    return failed


def part_of(text):
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError("K/N with 1 <= K <= N")
    return int(match[1]), int(match[2])


def chosen_files(only, part):
    """The files of a run that have a place for a fault."""
    found = [path for path in sources(*MUTATED) if mutants_of(path) and
             not any(fnmatch.fnmatch(path, pattern) for pattern in NOT_MUTATED) and
             any(fnmatch.fnmatch(path, pattern) or path.startswith(pattern.rstrip("/") + "/") for pattern in only or ["*"])]
    return found[part[0] - 1::part[1]]


def changed_lines(commit):
    """{path: its lines that are not as they were in a commit}."""
    text = subprocess.run(["git", "diff", "-U0", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/", commit, "--", *MUTATED],
                          cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines, path = {}, None
    for line in text.splitlines():
        hunk = re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)
        if line.startswith("+++ b/"):
            path = line[len("+++ b/"):]
        elif hunk:
            lines.setdefault(path, set()).update(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return lines


def draw(arguments, log):
    """{path: mutants in the order of their draw}, {path: how many of them}, and how many are not for this machine."""
    drawn, wanted, skipped = {}, {}, 0
    if arguments.survivors:
        drawn, skipped = log.survivors()
        return drawn, {path: len(mutants) for path, mutants in drawn.items()}, skipped
    changed = arguments.since and changed_lines(arguments.since)
    for path in chosen_files(arguments.only, arguments.part):
        mutants, why = drawn_mutants(path, arguments.seed), not_for_this_machine(path)
        if arguments.since:
            mutants = [mutant for mutant in mutants if mutant["line"] in changed.get(path, ())]
        lines = len({mutant["line"] for mutant in mutants})
        count = min(len(mutants), max(arguments.per_file, -(-lines // arguments.per_lines)))
        if why:
            skipped += count
            print(f"skipped {path}: {why}")
        elif mutants:
            drawn[path], wanted[path] = mutants, count
    return drawn, wanted, skipped


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="20261115", help="another draw (%(default)s)")
    parser.add_argument("--per-file", type=int, default=3, metavar="N", help="at least so many mutants of each file (%(default)s)")
    parser.add_argument("--per-lines", type=int, default=40, metavar="N", help="at least one for so many lines (%(default)s)")
    parser.add_argument("--only", action="append", metavar="PATTERN",
                        help="only this directory, this file or files such as src/*.h; may be repeated")
    parser.add_argument("--since", metavar="COMMIT", help="only lines that have changed since")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="K/N", help="only every N-th file, from the K-th on")
    parser.add_argument("--tests", default="*", metavar="PATTERN", help="only these tests (%(default)s)")
    parser.add_argument("--longest", type=float, default=float("inf"), metavar="SECONDS",
                        help="where a line has ten tests, leave out those that take more of the processor")
    parser.add_argument("--plain", action="store_true", help="no tests under sanitizers")
    parser.add_argument("--most-sanitized", type=int, metavar="N", help="at most so many tests of a mutant under sanitizers")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="begin no mutant after this time")
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1, metavar="N", help="workers (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print mutants, run nothing")
    parser.add_argument("--unrun", action="store_true", help="print the lines for mutants that no test runs, and try none")
    parser.add_argument("--coverage", metavar="FILE", help="take it from this file where it is of this tree, else write it there")
    parser.add_argument("--log", metavar="FILE", help="write results to it as they come, and go on from what it has")
    parser.add_argument("--survivors", action="store_true", help="try those of the log again that survived, nothing else")
    parser.add_argument("--sanitized", action="store_true", help="the same, and only under sanitizers")
    arguments = parser.parse_args()
    start = time.time()
    arguments.survivors |= arguments.sanitized
    if arguments.plain:
        KINDS.pop("sanitized")

    accepted, stale = accepted_mutants()
    log = Log(arguments.log, arguments.survivors)
    drawn, wanted, skipped = draw(arguments, log)
    if arguments.list:
        for path, mutants in drawn.items():
            print("\n".join(told(mutant) for mutant in mutants[:wanted[path]]))
        return 0
    if landlock_version() < 2:
        print("skipped mutants: the kernel has no Landlock, and a fault might remove files that are not its own")
        print("0 passed, 0 failed, 1 skipped")
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # here and in workers: whatever runs is ended, and scratch removed
    tests = [test for test in all_tests() if fnmatch.fnmatch(test, arguments.tests)]
    shutil.rmtree(WORK, ignore_errors=True)
    base = Base(os.path.join(WORK, "base"))
    base.unused += ["plain"] if arguments.sanitized else []
    base.most_sanitized = arguments.most_sanitized
    coverage, whole = Coverage(), digest_of(*all_files())
    known = coverage.load(arguments.coverage, whole)
    kinds = [kind for kind in KINDS if not (known and kind == "covered")]
    base.build({program for test in tests for program in programs_of(test)}, kinds, arguments.jobs)
    print(f"built, {time.time() - start:.0f} s", flush=True)
    for path in [path for path in drawn if path not in base.users]:
        skipped += wanted.pop(path)
        print(f"skipped {path}: nothing that is built here has it")
        del drawn[path]
    scratch = scratch_directory(arguments.jobs)
    workers = Workers(base, arguments.jobs, scratch)
    try:
        limits, faults = measure_original(workers, coverage, tests, kinds, arguments.longest)
        if known and "plain" not in base.unused:
            limits.update(limits_known(workers, tests, known))
        if arguments.coverage and not known:
            coverage.save(arguments.coverage, limits, whole)
        print(f"{len(limits)} runs of tests pass without a mutant, {time.time() - start:.0f} s", flush=True)
        if arguments.unrun:
            print_unrun(drawn, coverage)
            return 0
        done, unbegun = run_mutants(workers, drawn, wanted, log, limits, coverage, accepted, arguments.longest,
                                    start + arguments.seconds)
    finally:
        workers.end()
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{len(done)} mutants, {time.time() - start:.0f} s with {arguments.jobs} workers")
    return 1 if report(done, drawn, coverage, faults + stale, skipped + unbegun) else 0


if __name__ == "__main__":
    sys.exit(main())

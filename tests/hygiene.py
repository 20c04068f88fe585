#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks of the repository and of the built library: hygiene.py [BUILD]. One check, one pass or failure."""
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else os.path.join(ROOT, "build")

# docs/design.md draws the tree: a directory may include itself and those that stand before it there.
TREE = "docs/design.md"
# And these files of src/file/ only base/ and each other: the container knows nothing of tensors.
CONTAINER = {"file/json", "file/safetensors", "file/safetensors_write", "file/interval_set"}
# What a library must not do by itself: print, exit, abort.
FORBIDDEN = {"printf", "fprintf", "vprintf", "vfprintf", "puts", "fputs", "putchar", "perror", "__printf_chk", "__fprintf_chk",
             "__vprintf_chk", "__vfprintf_chk", "exit", "_exit", "_Exit", "abort", "__assert_fail"}
CLANG_FORMAT = "14"  # versions differ in what they call well formatted

counts = {"passed": 0, "failed": 0, "skipped": 0}


def check(what, faults):
    """faults: a list of sentences; empty is a pass."""
    counts["failed" if faults else "passed"] += 1
    if faults:
        print(f"FAILED {what}")
        for fault in faults[:20]:
            print(f"    {fault}")
        if len(faults) > 20:
            print(f"    and {len(faults) - 20} more")


def skip(what, why):
    counts["skipped"] += 1
    print(f"skipped {what}: {why}")


def run(*command, **options):
    """(succeeded, output) of a command in the repository."""
    env = {**os.environ, **options.get("env", {})}
    done = subprocess.run(command, cwd=options.get("cwd", ROOT), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode == 0, done.stdout.decode(errors="replace")


def faults_of(*command, **options):
    good, output = run(*command, **options)
    return [] if good else [" ".join(command)[:300]] + output.splitlines()


def repository_files():
    """Tracked files and those about to be."""
    good, output = run("git", "ls-files", "-co", "--exclude-standard")
    if good:
        names = output.splitlines()
    else:  # an unpacked release
        names = [os.path.relpath(os.path.join(folder, name), ROOT)
                 for folder, _, inner in os.walk(ROOT) for name in inner if "/build" not in folder and "/.git" not in folder]
    return sorted(name for name in names if os.path.isfile(os.path.join(ROOT, name)))


def read(name):
    with open(os.path.join(ROOT, name), "rb") as file:
        return file.read()


FILES = repository_files()
SOURCES = [n for n in FILES if n.endswith((".c", ".h", ".cu", ".py", ".sh", ".cmake", ".cmake.in", ".pc.in", ".toml"))
           or os.path.basename(n) in ("CMakeLists.txt", "Makefile")]
TEXTS = [n for n in FILES if not n.startswith("tests/fuzz/corpus/") and b"\0" not in read(n)]
HEADERS = [n for n in FILES if re.fullmatch(r"include/\w+\.h", n) and n != "include/nib_mpi.h"]
CHECKPOINT_HEADER = "include/nib_checkpoint.h"
CUDA_HEADER = "include/nib_cuda.h"
MPI_HEADER = "include/nib_mpi.h"  # the only one that needs more than libc
LIBRARY = [n for n in FILES if re.fullmatch(r"src/\w+/(\w+/)?\w+\.[ch]", n)]
CHECKPOINT = [n for n in FILES if re.fullmatch(r"checkpoint/\w+/\w+\.[ch]", n)]


def lines_matching(names, pattern):
    pattern = re.compile(pattern)
    return [f"{name}:{number}: {line.strip()[:150]}" for name in names
            for number, line in enumerate(read(name).decode(errors="replace").split("\n"), 1) if pattern.search(line)]


# ---- The repository --------------------------------------------------------------------------------------


def check_text():
    check("an SPDX line in the first three of every source file",
          [n for n in SOURCES if b"SPDX-License-Identifier: Apache-2.0" not in b"\n".join(read(n).split(b"\n")[:3])])

    faults = []
    for name in TEXTS:
        try:
            text = read(name).decode("utf-8")
        except UnicodeDecodeError as error:
            faults.append(f"{name}: {error}")
            continue
        if text and not text.endswith("\n"):
            faults.append(f"{name}: no newline at the end")
        if "\r" in text:
            faults.append(f"{name}: carriage returns")
    check("text is UTF-8 and ends in a newline", faults)
    check("no trailing whitespace", lines_matching(TEXTS, r"[ \t]$"))
    check("no tabs in C", lines_matching([n for n in TEXTS if n.endswith((".c", ".h"))], r"\t"))

    check("Python within 120 columns", lines_matching([n for n in TEXTS if re.match(r"(python|tests/python)/.*\.py$", n)],
                                                      r"^.{121,}$"))

    # The patterns are put together so that this file does not match itself.
    check("no paths of somebody's machine", lines_matching(TEXTS, "/" + "work/"))
    check("no notes to oneself", lines_matching(TEXTS, r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b"))


def included_by(name):
    return re.findall(r'^ *# *include "([^"]+)"', read(name).decode(), re.M)


def drawn_directories(root):
    """The directories below `root` in the order in which docs/design.md draws them."""
    tree = re.search(r"^## The tree\n.*?^```\n(.*?)^```", read(TREE).decode(), re.M | re.S)
    return re.findall(rf"^{root}/(\w+)/ ", tree[1] if tree else "", re.M)


def check_tree(root, names, below=()):
    """Includes of `names`, files of root/DIRECTORY/, go down the tree; `below`: what else they may include."""
    order = drawn_directories(root)
    there = {n.split("/")[1] for n in names}
    check(f"every directory of {root}/ has its line in {TREE}",
          [f"{root}/{d}/ is not drawn" for d in sorted(there - set(order))] + [f"{root}/{d}/ is not there" for d in sorted(set(order) - there)])
    faults = []
    for name in names:
        own = name.split("/")[1]
        for header in included_by(name):
            other = header.split("/")[0]
            if "/" not in header and os.path.exists(os.path.join(ROOT, "include", header)) or header in below:
                continue
            if not os.path.exists(os.path.join(ROOT, root, header)):
                faults.append(f"{name} includes {header}, which is neither in include/ nor in {root}/")
            elif own in order and other in order and order.index(other) > order.index(own):
                faults.append(f"{name} may not include {header}: {other}/ stands after {own}/")
            elif name[len(root) + 1:-2] in CONTAINER and other != "base" and header[:-2] not in CONTAINER:
                faults.append(f"{name} may not include {header}: a container knows nothing of tensors")
    check(f"includes of {root}/ go down the tree", faults)


def check_includes():
    """Who may know whom."""
    check_tree("src", LIBRARY)
    # A library above the core: its own headers, and of the core those whose functions are exported for it.
    check_tree("checkpoint", CHECKPOINT,
               {"format/codec.h"} | {n[len("src/"):] for n in LIBRARY if n.endswith(".h") and re.search(rb"^NIB_PRIVATE ", read(n), re.M)})

    faults = []
    for name in FILES:
        if re.fullmatch(r"(tools|examples|bench)/.*\.[ch]", name):
            for header in included_by(name):
                places = ["include", os.path.dirname(name)] + ["tools"] * name.startswith("bench/")  # they measure the same
                if not any(os.path.exists(os.path.join(ROOT, place, header)) for place in places):
                    faults.append(f"{name} may not include {header}")
    check("tools and examples use only include/", faults)

    check("no switch on a format outside src/format/format.c",
          lines_matching([n for n in FILES if n.endswith((".c", ".h")) and n != "src/format/format.c"], r"switch *\(.*format"))


def check_format():
    program = shutil.which("clang-format")
    version = re.search(r"version (\d+)", run(program, "--version")[1]) if program else None
    if not version or version[1] != CLANG_FORMAT:
        return skip("clang-format", f"needs version {CLANG_FORMAT}, here is {version[1] if version else 'none'}")
    names = [n for n in FILES if re.match(r"(include|src|checkpoint|mpi|cuda|bench|tools|examples)/.*\.(c|h|cu|cuh|cpp|inc)$", n)]
    check("clang-format (make format)", [n for n in names if not run(program, "--dry-run", "-Werror", n)[0]])


def check_frozen():
    """Headers that callers of a version were compiled with: until MAJOR.MINOR.0 is out they follow include/."""
    version = re.search(rb'^#define NIB_VERSION "(\d+\.\d+)\.(\d+)"', read("include/nib.h"), re.M)
    current = version[1].decode()
    frozen = [n for n in FILES if re.fullmatch(rf"tests/abi/{re.escape(current)}/\w+\.h", n)]
    faults = [] if frozen else [f"there is no tests/abi/{current}/*.h"]
    if version[2] == b"0":
        faults += [f"{n} is not frozen" for n in HEADERS
                   if f"tests/abi/{current}/{os.path.basename(n)}" not in frozen]
        faults += [f"{n} is not include/{os.path.basename(n)}" for n in frozen
                   if f"include/{os.path.basename(n)}" not in FILES or read(n) != read(f"include/{os.path.basename(n)}")]
        faults += oldest_sizes()
    check("frozen headers (tests/abi/freeze.sh)", faults)


def oldest_sizes():
    """Before MAJOR.MINOR.0 is out, the oldest struct that is served has all members: NIB_UP_TO names the last one."""
    text = re.sub(r"/\*.*?\*/", "", "".join(read(n).decode() for n in HEADERS), flags=re.S)
    last = {name: re.findall(r"(\w+)\)?(?:\[\w+\])?(?:\([^()]*\))?;", body)[-1]
            for name, body in re.findall(r"^(?:typedef )?struct (\w+) \{(.*?)^\}", text, re.S | re.M)}
    uses = [(n, *use) for n in FILES if n.endswith((".c", ".h")) and n.startswith(("src/", "checkpoint/"))
            for use in re.findall(r"NIB_UP_TO\((nib_\w+), (\w+)\)", read(n).decode())]
    return [f"{n}: NIB_UP_TO({name}, {member}) is not up to {last.get(name)}" for n, name, member in uses if last.get(name) != member] \
        or ([] if len(uses) > 10 else ["no use of NIB_UP_TO was found"])


# ---- The library -----------------------------------------------------------------------------------------


def symbols(path, *options):
    output = subprocess.run(["nm", *options, path], stdout=subprocess.PIPE, check=True).stdout.decode()
    return {line.split()[-1].split("@")[0] for line in output.splitlines()
            if line and not line.endswith(":") and " A NIB_" not in line}  # these are names of versions


def check_headers():
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-Iinclude"]
    for compiler, language in (("gcc", "c11"), ("clang", "c11"), ("g++", "c++17"), ("clang++", "c++17")):
        what = f"public headers alone as {language} with {compiler}"
        if not shutil.which(compiler):
            skip(what, f"there is no {compiler}")
            continue
        kind = "c++" if "++" in language else "c"
        check(what, [f for n in HEADERS for f in faults_of(compiler, f"-std={language}", *strict, "-include", n, "-x", kind, "/dev/null")])
    if not shutil.which("mpicc"):
        return skip(MPI_HEADER, "there is no mpicc")
    check(f"{MPI_HEADER} alone", faults_of("mpicc", "-std=c11", *strict, "-x", "c", MPI_HEADER))


def check_rules():
    """The formulas: headers that C, C++ and CUDA compile, and a program that computes with all of them."""
    names = [f"src/format/{name}.h" for name in ("codec", "philox", "rules")]
    for compiler, language in (("gcc", "c11"), ("clang", "c11"), ("g++", "c++17"), ("clang++", "c++17")):
        what = f"formulas alone as {language} with {compiler}"
        if not shutil.which(compiler):
            skip(what, f"there is no {compiler}")
            continue
        command = [compiler, f"-std={language}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-Iinclude", "-Isrc",
                   "-x", "c++" if "++" in language else "c", "/dev/null", "-include"]
        check(what, [f for n in names for f in faults_of(*command, n)])
    program = read("tests/rules/rules.cu").decode()
    functions = [f for n in names for f in re.findall(r"^NIB_INLINE [^(]*?(\w+)\(", read(n).decode(), re.M)]
    check("tests/rules/rules.cu calls every formula", [f"{f} is not called" for f in functions if not re.search(rf"\b{f}\(", program)]
          or ([] if len(functions) > 50 else [f"only {len(functions)} functions were found"]))


def check_cuda():
    """Flags that decide bytes, and who includes whom."""
    build = read("cuda/CMakeLists.txt").decode()
    faults = [] if re.search(r"set\(nvcc_flags [^)]*-fmad=false", build) else ["cuda/CMakeLists.txt compiles without -fmad=false"]
    sources = [n for n in FILES if re.match(r"cuda/.*", n)] + ["CMakeLists.txt", "tests/run.py"]
    for flag in ("use_fast_math", "ftz=true", "prec-div=false", "prec-sqrt=false", "fmad=true"):
        faults += lines_matching([n for n in sources if n.endswith((".txt", ".py", ".cu", ".cuh"))], "-" + flag)
    check("CUDA without fast math or contraction", faults)
    # Names that a device's own approximations go by.
    check("CUDA kernels without approximate functions",
          lines_matching([n for n in sources if n.endswith((".cu", ".cuh"))], r"\b__(fdividef|frcp_|expf|logf|fsqrt_approx)|\.approx"))
    faults = []
    for name in [n for n in FILES if re.match(r"cuda/(?!test_)[^/]*\.(c|h|cu|cuh|inc)$", n)]:
        for header in included_by(name):
            places = ["include", "cuda", "cuda/shim"]
            if not any(os.path.exists(os.path.join(ROOT, place, header)) for place in places) and not re.match(
                    r"(base|format)/\w+\.h$|tensor/matrix\.h$|kernels/product\.h$", header):
                faults.append(f"{name} may not include {header}")
    faults += lines_matching([n for n in FILES if re.match(r"(src|checkpoint|mpi)/.*\.[ch]$", n)], r"#\s*include\s*[<\"](nib_)?cuda")
    check("nothing of the core knows CUDA", faults)
    library = next((p for p in (os.path.join(BUILD, "cuda/libnib_cuda.so"), os.path.join(BUILD, "cu/cuda/libnib_cuda.so"))
                    if os.path.exists(p)), None)
    if not library:
        return skip("libnib_cuda.so", "it is not built")
    declared = set(re.findall(r"\bNIB_API\b[^;(]*?\b(\w+)\s*\(", re.sub(r"/\*.*?\*/", "", read(CUDA_HEADER).decode(), flags=re.S)))
    check("libnib_cuda.so exports what nib_cuda.h declares", sorted(declared ^ symbols(library, "-D", "--defined-only")))


def check_mpi():
    """<mpi.h> in one header, and the library's names."""
    check("only nib_mpi.h includes <mpi.h>",
          lines_matching([n for n in FILES if n.endswith((".c", ".h")) and n != MPI_HEADER], r"#\s*include\s*<mpi\.h>"))
    library = os.path.join(BUILD, "mpi/mpi/libnib_mpi.so")
    if not os.path.exists(library):
        return skip("libnib_mpi.so", "it is not built")
    declared = set(re.findall(r"\bNIB_API\b[^;(]*?\b(\w+)\s*\(", re.sub(r"/\*.*?\*/", "", read(MPI_HEADER).decode(), flags=re.S)))
    exported = symbols(library, "-D", "--defined-only")
    check("libnib_mpi.so exports what nib_mpi.h declares", sorted(declared ^ exported))


def check_symbols():
    declared, of_checkpoints = set(), set()
    for name in (n for n in HEADERS if n != CUDA_HEADER):
        text = re.sub(r"/\*.*?\*/|^ *#.*?$", "", read(name).decode(), flags=re.S | re.M)
        (of_checkpoints if name == CHECKPOINT_HEADER else declared).update(
            re.findall(r"\bNIB_API\b[^;(]*?\b(\w+)\s*\(", text))
    exported = symbols(os.path.join(BUILD, "libnib_checkpoint.so"), "-D", "--defined-only")
    check("libnib_checkpoint.so exports what nib_checkpoint.h declares", sorted(of_checkpoints ^ exported))
    private = {name for n in LIBRARY if n.endswith(".h")
               for name in re.findall(r"^NIB_PRIVATE .*?\b(nib_\w+)[\[(]", read(n).decode(), flags=re.M)}
    exported = symbols(os.path.join(BUILD, "libnib.so"), "-D", "--defined-only") - private
    check("libnib.so exports what the headers declare",
          [f"declared, not exported: {s}" for s in sorted(declared - exported)]
          + [f"exported, not declared: {s}" for s in sorted(exported - declared)])
    check("exported names begin with nib_", sorted(s for s in exported if not s.startswith("nib_")))

    archive = os.path.join(BUILD, "libnib.a")
    check("global names of libnib.a begin with nib_",
          sorted(s for s in symbols(archive, "-g", "--defined-only") if not s.startswith("nib_")))
    check("libnib.a neither prints, exits nor aborts", sorted(symbols(archive, "-u") & FORBIDDEN))
    archive = os.path.join(BUILD, "libnib_checkpoint.a")
    check("global names of libnib_checkpoint.a begin with nib_",
          sorted(s for s in symbols(archive, "-g", "--defined-only") if not s.startswith("nib_")))
    check("libnib_checkpoint.a neither prints, exits nor aborts", sorted(symbols(archive, "-u") & FORBIDDEN))


def plain_build(compiler, folder):
    """What is wrong with one compiler call over all sources, without a build system."""
    sources = [n for n in LIBRARY if n.endswith(".c")]
    library, program = os.path.join(folder, f"lib{compiler}.so"), os.path.join(folder, compiler)
    return (faults_of(compiler, "-std=c11", "-O1", "-ffp-contract=off", "-Werror", "-fPIC", "-shared", "-Iinclude", "-Isrc", *sources, "-o", library)
            # NIB_API marks what is public; only the build system hides the rest.
            or [f"exports {s}" for s in sorted(symbols(library, "-D", "--defined-only")) if not s.startswith("nib_")]
            or faults_of(compiler, "-Iinclude", "tests/install/consumer.c", library, "-o", program)
            or faults_of(program, env={"LD_LIBRARY_PATH": folder}))


def check_plain_build(folder):
    """No flags per file, no warnings to silence; the compilers side by side, since this is hygiene's longest part."""
    compilers = [c for c in ("gcc", "clang") if shutil.which(c)]
    with concurrent.futures.ThreadPoolExecutor(len(compilers) or 1) as pool:
        found = dict(zip(compilers, pool.map(lambda c: plain_build(c, folder), compilers)))
    for compiler in ("gcc", "clang"):
        what = f"{compiler} src/*/*.c src/*/*/*.c"
        if compiler in found:
            check(what, found[compiler])
        else:
            skip(what, f"there is no {compiler}")


def check_install(folder):
    """Install, move the tree elsewhere, and use it as a stranger would."""
    faults = faults_of("cmake", "--install", BUILD, "--prefix", folder + "/first")
    check("cmake --install", faults)
    if faults:
        return
    prefix = folder + "/moved"
    os.rename(folder + "/first", prefix)

    project = folder + "/project"
    check("find_package(nib)",
          faults_of("cmake", "-S", "tests/install", "-B", project, f"-DCMAKE_PREFIX_PATH={prefix}")
          or faults_of("cmake", "--build", project)
          or faults_of(project + "/consumer") or faults_of(project + "/consumer_static"))

    found = [f for f, _, names in os.walk(prefix) if "nib.pc" in names]
    env = {"PKG_CONFIG_PATH": found[0] if found else ""}
    for kind, options in (("shared", []), ("static", ["--static"])):
        good, flags = run("pkg-config", "--cflags", "--libs", *options, "nib", env=env)
        faults = [] if good else flags.splitlines()
        if good:
            if kind == "static":
                flags = flags.replace("-lnib", "-l:libnib.a")
            program = f"{folder}/{kind}"
            faults = faults_of("cc", "tests/install/consumer.c", *flags.split(), "-o", program) \
                or faults_of(program, env={"LD_LIBRARY_PATH": os.path.dirname(found[0])} if kind == "shared" else {})
        check(f"pkg-config, {kind}", faults)


def main():
    check_text()
    check_includes()
    check_format()
    check_frozen()
    check_headers()
    check_rules()
    check_mpi()
    check_cuda()
    if os.path.exists(os.path.join(BUILD, "libnib.so")):
        check_symbols()
        with tempfile.TemporaryDirectory() as folder:
            check_plain_build(folder)
        with tempfile.TemporaryDirectory() as folder:
            check_install(folder)
    else:
        check("a built library", [f"there is no libnib.so in {BUILD}"])
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

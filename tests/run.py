#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run every test and end with one line: N passed, M failed, K skipped.

    tests/run.py                  all stages (make test)
    tests/run.py --stage asan     one of them
    tests/run.py --campaign       and the long things: NIB_CAMPAIGN=1, tests/campaign/*.sh, fuzzing, mutants

A stage builds what it needs. A thing that cannot be had (a compiler, a Python package) is skipped with its
reason, except under CI=true, where that is a failure.
"""
import argparse
import concurrent.futures
import glob
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CI = os.environ.get("CI") == "true"
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$")
TORCH = "torch==2.13.0"
MEGATRON = "megatron-core==0.16.1"
ORACLES = ["compressed-tensors", "nvidia-modelopt", "torchao", "safetensors", "numpy", "ml_dtypes", "transformers>=5",
           "gguf>=0.19", "requests"]  # modelopt imports requests without asking for it
WORKERS = os.cpu_count() or 1
campaign = False


def files(pattern):
    return sorted(glob.glob(os.path.join(ROOT, pattern)))


def stem(path):
    return os.path.splitext(os.path.basename(path))[0]


class Tally:
    passed = failed = skipped = 0

    def ok(self, count=1):
        self.passed += count

    def fail(self, what, output="", count=1):
        self.failed += count
        tail = "\n".join("    " + line for line in output.splitlines()[-100:])
        print(f"  FAILED {what}" + (f"\n{tail}" if tail else ""), flush=True)

    def skip(self, what, why, count=1):
        self.skipped += count
        print(f"  skipped {what}: {why}", flush=True)

    def missing(self, what, why):
        """Something that a package would provide: a skip here, a failure in CI."""
        if CI:
            self.fail(what, why)
        else:
            self.skip(what, why)

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def line(self):
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def slowness():
    """How much longer things take now than on the quiet machine for which the limits were set; at least 1."""
    start = time.time()
    for _ in range(3_000_000):
        pass
    return max(1.0, (time.time() - start) / 0.15)


def stop(process):
    """End a program and its children; they get a moment to remove what is half-written, as make does."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    return process.communicate()[0]


def run(command, env=None, timeout=600):
    """(exit status or a word, output of both streams); programs run from the top of the repository."""
    if campaign:
        timeout = max(timeout, 24 * 3600)
    try:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(env or {})}, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return "not run", str(error)
    start, limit = time.time(), timeout
    while True:
        try:
            output = process.communicate(timeout=max(1, limit - (time.time() - start)))[0]
            return process.returncode, output.decode(errors="replace")
        except subprocess.TimeoutExpired:
            if timeout * slowness() > limit:  # a slow or busy machine is no fault
                limit = timeout * slowness() + 1
                continue
            return f"no end after {limit:.0f} s", stop(process).decode(errors="replace")
        except KeyboardInterrupt:
            stop(process)
            raise


def run_together(tally, jobs):
    """Call jobs, each with a tally of its own, on all processors; begin with what takes longest."""
    def one(job):
        own = Tally()
        job(own)
        return own

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for own in pool.map(one, jobs):
            tally.add(own)


def run_counted(tally, what, command, env=None, timeout=900):
    """Run something that ends in a closing line and add up its counts."""
    status, output = run(command, env, timeout)
    lines = output.strip().splitlines()
    closing = CLOSING.match(lines[-1].strip()) if lines else None
    if not closing:
        return tally.fail(f"{what}: exit {status}, no closing line", output)
    passed, failed, skipped = (int(count or 0) for count in closing.groups())
    tally.ok(passed)
    if failed or status != 0:
        tally.fail(f"{what}: {lines[-1]}, exit {status}", output, failed or 1)
    if skipped:
        reasons = [line.strip() for line in lines if line.startswith("skipped")]
        tally.skip(what, "; ".join(reasons) or lines[-1], skipped)


def build(tally, folder, flags=(), compiler="gcc"):
    """Configure and build into a folder; its path, or None."""
    path = os.path.join(ROOT, folder)
    if path in build.done:
        return path
    if not shutil.which(compiler):
        return tally.missing(f"build {folder}", f"there is no {compiler}")
    # A build that was killed may leave half an object file that looks finished: begin again.
    under_way = os.path.join(path, "under_way")
    fresh = ["--clean-first"] if os.path.exists(under_way) else []
    os.makedirs(path, exist_ok=True)
    open(under_way, "w", encoding="utf-8").close()
    steps = [["cmake", "-S", ROOT, "-B", path, "-DNIB_WERROR=ON", *flags],
             ["cmake", "--build", path, *fresh, "--parallel", str(WORKERS)]]
    for step in steps:
        status, output = run(step, {"CC": compiler}, timeout=1200)
        if status != 0:
            if isinstance(status, int) and status > 0:
                os.unlink(under_way)
            return tally.fail(f"build {folder}", output)
    os.unlink(under_way)
    tally.ok()
    build.done.add(path)
    return path


build.done = set()


# Test programs share the processors: a team of threads that waits must not burn one.
SHARED = {"OMP_WAIT_POLICY": "passive"}
LONGEST = ("test_quantize_layouts", "test_environment", "test_devices_failures", "test_devices", "test_kernels", "test_publish", "test_power")


def program_jobs(path, env=None):
    """Every test program, the corpora of the fuzz targets and the golden files."""
    env = {**SHARED, **(env or {})}

    def program(source):
        return lambda tally: run_counted(tally, stem(source), [os.path.join(path, "tests", stem(source))], env)

    def target(source):
        def job(tally):
            name = stem(source)
            corpus = [f for f in files(f"tests/fuzz/corpus/{name[len('fuzz_'):]}/*") if os.path.isfile(f)]
            if not corpus:
                return tally.fail(f"{name}: no corpus")
            if name == "fuzz_cuda" and not os.path.exists(os.path.join(path, "tests/fuzz", name)):
                return tally.missing(name, "there is no C++ compiler")
            status, output = run([os.path.join(path, "tests/fuzz", name), *corpus], env)
            return tally.ok() if status == 0 else tally.fail(f"{name} on its corpus: exit {status}", output)
        return job

    def shim(name, path):
        if not os.path.exists(path):
            return lambda tally: tally.missing(name, "there is no C++ compiler")
        return lambda tally: run_counted(tally, name, [path], env)

    sources = sorted(files("tests/test_*.c"), key=lambda source: stem(source) not in LONGEST)
    jobs = [program(source) for source in sources] + [target(source) for source in files("tests/fuzz/fuzz_*.c")]
    tool = os.path.join(path, "nib")
    for source in files("cuda/test_*.c"):
        name = f"{stem(source)}_shim"
        jobs.append(shim(name, os.path.join(path, "tests", name)))
    if os.path.exists(tool):
        jobs.append(lambda tally: run_counted(tally, "nib conform", [tool, "conform", *files("tests/golden/*.safetensors")], env))
    return jobs


def script_jobs(path, pattern, more=None, logs=None):
    """Shell scripts: exit 0 is a pass, 77 a skip with the last line as its reason. A folder `logs` keeps what they print."""
    env = {"NIB": os.path.join(path, "nib"), "BUILD": path, "LC_ALL": "C", **(more or {})}

    def script_job(script):
        def job(tally):
            what = os.path.relpath(script, ROOT)
            status, output = run(["bash", script], env)
            if logs:
                os.makedirs(logs, exist_ok=True)
                with open(os.path.join(logs, stem(script) + ".log"), "w", encoding="utf-8") as log:
                    log.write(output)
            if status == 0:
                tally.ok()
            elif status == 77:
                tally.skip(what, (output.strip().splitlines() or ["no reason"])[-1])
            else:
                tally.fail(f"{what}: exit {status}", output)
        return job

    return [script_job(script) for script in files(pattern)]


def run_scripts(tally, path, pattern, more=None, logs=None):
    for job in script_jobs(path, pattern, more, logs):
        job(tally)


def example_job(path, source):
    def job(tally):
        status, output = run([os.path.join(path, "examples", stem(source))])
        if status == 0:
            tally.ok()
        else:
            tally.fail(f"examples/{stem(source)}: exit {status}", output)
    return job


# ---- Stages ----------------------------------------------------------------------------------------------


def stage_gcc(tally):
    path = build(tally, "build")
    if path:
        run_together(tally, [*script_jobs(path, "tests/cli/*.sh", SHARED), *program_jobs(path),
                             *(example_job(path, source) for source in files("examples/*.c"))])


def stage_clang(tally):
    path = build(tally, "build/clang", compiler="clang")
    if path:
        run_together(tally, program_jobs(path))


# Those that run most of the tool's own code, the longest first; the others would take minutes.
SANITIZED = ("check", "quantize", "report", "conform", "bench", "help", "kill", "json")


def stage_asan(tally):
    # Without -Werror: under sanitizers gcc warns of conversions that it otherwise sees to be harmless.
    flags = ["-DNIB_SANITIZE=ON", "-DNIB_WERROR=OFF", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_C_FLAGS_DEBUG=-O1 -g"]
    path = build(tally, "build/asan", flags)
    if not path:
        return
    # A status that no command has: a script that waits for 1, an answer that is no, must not take a report for it.
    env = {"ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:exitcode=99",
           "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=99", "NIB_FUZZ_MS": "500"}
    scripts = [job for name in SANITIZED for job in script_jobs(path, f"tests/cli/{name}.sh", {**SHARED, **env})]
    run_together(tally, [*scripts, *program_jobs(path, env)])


def stage_serial(tally):
    path = build(tally, "build/serial", ["-DNIB_OPENMP=OFF"])
    if path:
        run_together(tally, program_jobs(path))


def stage_mpi(tally):
    """The MPI library, under 1 to 4 processes."""
    if not shutil.which("mpirun") or not shutil.which("mpicc"):
        return tally.missing("mpi", "there is no Open MPI: apt-get install openmpi-bin libopenmpi-dev")
    path = build(tally, "build/mpi", ["-DNIB_MPI=ON"])
    if not path:
        return
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
           "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    for name in ("test_mpi", "test_mpi_pieces"):
        for n in range(1, 5):
            run_counted(tally, f"{name} on {n}", ["mpirun", "-n", str(n), os.path.join(path, "mpi", name)], env)
    run_scripts(tally, path, "mpi/*.sh", env)


CROSS = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
NEON_TESTS = ["test_kernels", "test_codec", "test_known_answers", "test_stochastic", "test_products", "test_gptq"]
NEON_LONG_TESTS = ["test_quantize", "test_quantize_layouts", "test_quantize_overrides", "test_quantize_options",
                   "test_formats", "test_format_tensors", "test_float8_scaling", "test_mxfp4"]


def stage_neon(tally):
    """The library for AArch64 by plain calls of the cross compiler; its tests run in an emulator."""
    for program in (CROSS, EMULATOR):
        if not shutil.which(program):
            return tally.missing("neon", f"there is no {program}")
    folder = os.path.join(ROOT, "build/neon")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    compile_one = [CROSS, "-std=gnu11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Iinclude", "-Isrc",
                   "-Itests"]
    sources = [*files("src/*/*.c"), *files("src/*/*/*.c")]
    objects = [os.path.join(folder, stem(source) + ".o") for source in sources]
    compiled = Tally()

    def compile_job(source, target):
        def job(own):
            status, output = run([*compile_one, "-c", source, "-o", target])
            if status != 0:
                own.fail(f"{CROSS} {os.path.relpath(source, ROOT)}", output)
        return job

    run_together(compiled, [compile_job(*pair) for pair in zip(sources, objects)])
    tally.add(compiled)
    if compiled.failed:
        return
    tally.ok()

    def test_job(name):
        def job(own):
            program = os.path.join(folder, name)
            status, output = run([*compile_one, "-static", f"tests/{name}.c", *objects, "-lm", "-pthread", "-o", program])
            if status != 0:
                return own.fail(f"{CROSS} tests/{name}.c", output)
            # A campaign in an emulator would take days: only more rounds of the kernels.
            return run_counted(own, f"{name} on AArch64", ["env", "-u", "NIB_CAMPAIGN", EMULATOR, program],
                               {"NIB_ROUNDS": "20" if campaign else "1"}, 1800)
        return job

    run_together(tally, [*(test_job(name) for name in NEON_TESTS + (NEON_LONG_TESTS if campaign else [])),
                         lambda own: golden_on_neon(own, folder, compile_one, objects)])


def golden_on_neon(tally, folder, compile_one, objects):
    """The golden files: the cases are read here, where jansson is, and run in the emulator."""
    here = build(tally, "build")
    if not here:
        return
    lister, program = os.path.join(folder, "list_cases"), os.path.join(folder, "run_cases")
    golden = [os.path.relpath(path, ROOT) for path in files("tests/golden/*.safetensors")]
    steps = [["gcc", "-std=gnu11", "-Iinclude", "-Itools", "tests/cross/list_cases.c", *files("tools/conform_*.c"),
              os.path.join(here, "libnib.a"), "-ljansson", "-fopenmp", "-pthread", "-lm", "-o", lister],
             ["sh", "-c", 'exec "$0" "$@" >"' + folder + '/cases.h"', lister, *golden],
             [*compile_one, "-static", "-Itools", f"-I{folder}", "tests/cross/run_cases.c", "tools/conform_run.c",
              *objects, "-lm", "-pthread", "-o", program]]
    for step in steps:
        status, output = run(step)
        if status != 0:
            return tally.fail("golden files on AArch64: " + " ".join(step)[:200], output)
    for isa in ("neon", "scalar"):
        run_counted(tally, f"golden files on AArch64, {isa}", [EMULATOR, program], {"NIB_MAX_ISA": isa}, 1800)


def stage_instructions(tally):
    """Instructions per element against the recorded ones, where the compiler is the one of the record."""
    path = build(tally, "build")
    if not path:
        return
    if not shutil.which("valgrind"):
        return tally.missing("instructions", "there is no valgrind")
    recorded = os.path.join(ROOT, "bench/instructions.json")
    command = [sys.executable, os.path.join(ROOT, "bench/instructions.py"), os.path.join(path, "bench/count")]
    status, output = run(command + (["--compare", recorded] if os.path.exists(recorded) else []))
    if status != 0:
        return tally.fail("instructions per element", output)
    tally.ok()
    print("  " + " ".join(output.split()), flush=True)
    status, output = run([sys.executable, os.path.join(ROOT, "bench/parameters.py"), os.path.join(path, "bench/parameters")])
    if status != 0:
        return tally.fail("instructions per parameter of a sharded cast", output)
    tally.ok()
    print("  " + "; ".join(output.splitlines()), flush=True)


def stage_hygiene(tally):
    path = build(tally, "build")
    if path:
        run_counted(tally, "hygiene", [sys.executable, os.path.join(ROOT, "tests/hygiene.py"), path])


def needs_of(script):
    """The packages of a `# needs: numpy safetensors` line; None: it wants PyTorch and the oracles."""
    with open(script, encoding="utf-8") as file:
        for line in [next(file, "") for _ in range(5)]:
            if line.startswith("# needs:"):
                return line[len("# needs:"):].split()
    return None


environment_lock = threading.Lock()


def virtual_environment(folder, packages, own=False):
    """A Python with these packages (in this order), or (None, why). own: without what the system has."""
    with environment_lock:
        return make_environment(folder, packages, own)


def make_environment(folder, packages, own):
    path = os.path.join(ROOT, folder)
    python = os.path.join(path, "bin/python")
    if not os.path.exists(python):
        command = [sys.executable, "-m", "venv", path] + ([] if own else ["--system-site-packages"])
        status, output = run(command)
        if status != 0:
            shutil.rmtree(path, ignore_errors=True)
            return None, f"no virtual environment: {(output.strip().splitlines() or [''])[-1]}"
    for group in packages:
        probe = ("import re, sys, importlib.metadata as m\n"
                 "numbers = lambda version: [int(n) for n in re.findall('[0-9]+', version)]\n"
                 "for name, how, version in (re.fullmatch('([^=>]+)(==|>=|)(.*)', p).groups() for p in sys.argv[1:]):\n"
                 "    has = m.version(name)\n"
                 "    assert numbers(has) >= numbers(version) if how == '>=' else has.startswith(version.rstrip('*'))")
        if run([python, "-c", probe, *group])[0] == 0:
            continue
        status, output = run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *group], timeout=1500)
        if status != 0:
            return None, f"pip install {' '.join(group)}: {(output.strip().splitlines() or [str(status)])[-1]}"
    return python, ""


RULES = "tests/rules/rules.cu"  # one source for every language
RULES_COMPILERS = [["gcc", "-std=c11", "-x", "c"], ["clang", "-std=c11", "-x", "c"], ["g++", "-std=c++17", "-x", "c++"],
                   ["clang++", "-std=c++17", "-x", "c++"]]
CUDA_PACKAGES = [f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "cuda-cccl", "cuda-crt", "cuda-runtime", "nvvm")]
CUDA_ARCHITECTURES = ["80", "90", "100", "120"]


def stage_rules(tally):
    """The formulas of src/format/rules.h as C, as C++ and by nvcc: the same results, bit for bit."""
    folder = os.path.join(ROOT, "build/rules")
    os.makedirs(folder, exist_ok=True)
    common = ["-O2", "-Iinclude", "-Isrc", RULES, "-o"]
    wanted = None
    for compiler in RULES_COMPILERS:
        if not shutil.which(compiler[0]):
            tally.missing(f"rules with {compiler[0]}", f"there is no {compiler[0]}")
            continue
        program = os.path.join(folder, compiler[0])
        status, output = run([*compiler, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-ffp-contract=off", *common, program])
        if status == 0:
            status, output = run([program])
        wanted = wanted or output
        if status == 0 and output == wanted:
            tally.ok()
        else:
            tally.fail(f"rules with {' '.join(compiler)}: exit {status}, results", f"{output}\nnot\n{wanted}")
    rules_by_nvcc(tally, common, os.path.join(folder, "nvcc"), wanted)


def cuda_environment():
    return virtual_environment("build/venv-cuda", [CUDA_PACKAGES], own=True)


def cuda_toolkit():
    """The directory of PyPI's nvcc, or (None, why)."""
    python, why = cuda_environment()
    if not python:
        return None, why
    return glob.glob(os.path.join(os.path.dirname(python), "../lib/python*/site-packages/nvidia/cu13"))[0], ""


def stage_cuda(tally):
    """libnib_cuda by nvcc, which needs no GPU; its tests say how many they skip without one."""
    path = build(tally, "build")
    toolkit, why = cuda_toolkit()
    if not path or not toolkit:
        return tally.missing("cuda", why)
    folder = os.path.join(ROOT, "build/cuda-stage")
    os.makedirs(folder, exist_ok=True)
    nvcc_flags = re.search(r"^set\(nvcc_flags (.*)\)$", open(os.path.join(ROOT, "cuda/CMakeLists.txt"), encoding="utf-8").read(), re.M)[1]
    numbers = CUDA_ARCHITECTURES if campaign else ["90"]
    targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers] + [f"-gencode=arch=compute_{numbers[0]},code=compute_{numbers[0]}"]
    places = ["-Iinclude", "-Isrc", "-Icuda", "-Itests"]
    strict = ["gcc", "-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", *places, "-isystem", toolkit + "/include"]
    libraries = [f"-L{path}", "-lnib", toolkit + "/lib/libcudart_static.a", "-l:libsupc++.a", "-ldl", "-lrt", "-lpthread", "-lm", f"-Wl,-rpath,{path}:{folder}"]
    library = os.path.join(folder, "libnib_cuda.so")
    programs = {source: os.path.join(folder, stem(source)) for source in files("cuda/test_*.c")}
    kernels = files("cuda/*.cu")
    objects = [os.path.join(folder, stem(source) + ".o") for source in kernels]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        compile_one = [toolkit + "/bin/nvcc", *nvcc_flags.split(), *targets, *places[:3], "-c"]
        for status, output in pool.map(lambda pair: run([*compile_one, pair[0], "-o", pair[1]]), zip(kernels, objects)):
            if status != 0 or "warning" in output:
                return tally.fail("cuda: nvcc", output)
    tally.ok()
    sources = [source for source in files("cuda/*.c") if source not in programs]
    steps = [[*strict, "-shared", *sources, *objects, *libraries, "-Wl,-z,defs", "-Wl,--exclude-libs,ALL", "-o", library],
             *([*strict, source, library, *libraries, "-o", program] for source, program in programs.items())]
    for step in steps:
        status, output = run(step)
        if status != 0 or "warning" in output:
            return tally.fail("cuda: " + " ".join(step)[:200], output)
        tally.ok()
    for program in programs.values():
        run_counted(tally, stem(program), [program])
    status, output = run([os.path.join(path, "nib"), "version", "-v"], {"NIB_CUDA_LIBRARY": library})
    if status == 0 and ("device: cuda:0" in output or "libnib_cuda finds none" in output):
        tally.ok()
    else:
        tally.fail(f"nib version -v: exit {status}", output)
    if "device: cuda:0" in output:
        run_counted(tally, "nib conform --device cuda", [os.path.join(path, "nib"), "conform", "--device", "cuda",
                                                         *files("tests/golden/*.safetensors")], {"NIB_CUDA_LIBRARY": library})
        python, why = torch_environment(["numpy", "pytest", "ml_dtypes"])
        if not python:
            return tally.missing("PyTorch on a GPU", why)
        run_counted(tally, "PyTorch on a GPU", [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/python/test_torch_cuda.py"],
                    {"NIB_CUDA_LIBRARY": library, "NIB_LIBRARY": os.path.join(path, "libnib.so"), "PYTHONPATH": "python"}, timeout=600)


def rules_by_nvcc(tally, common, program, wanted):
    toolkit, why = cuda_toolkit()
    if not toolkit:
        return tally.missing("rules with nvcc", why)
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in CUDA_ARCHITECTURES]
    status, output = run([toolkit + "/bin/nvcc", "-std=c++17", "-fmad=false", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror",
                          *targets, "-cudart", "static", f"-L{toolkit}/lib", *common, program])
    if status != 0:
        return tally.fail("rules with nvcc", output)
    tally.ok()
    status, output = run([program])
    if status == 77:
        tally.skip("rules on a GPU", output.strip())
    elif status == 0 and output == wanted:
        tally.ok()
    else:
        tally.fail(f"rules on a GPU: exit {status}, results", f"{output}\nnot\n{wanted}")


def torch_environment(packages):
    """A Python with PyTorch and these packages, or (None, why); one for all stages that need it."""
    present = importlib.util.find_spec("torch") is not None
    if os.environ.get("TORCH") == "1":
        return virtual_environment("build/venv", [[TORCH], packages], own=not present)
    if present:
        return virtual_environment("build/venv", [packages])
    return None, "needs PyTorch; TORCH=1 installs it"


def megatron_directory(python):
    """megatron-core beside what the environment has, where alone its own test looks: (its directory, "") or (None, why)."""
    path = os.path.join(ROOT, "build/megatron")
    with environment_lock:
        if not os.path.exists(os.path.join(path, "megatron/core")):
            status, output = run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target",
                                  path, MEGATRON], timeout=600)
            if status != 0:
                return None, f"pip install {MEGATRON}: {(output.strip().splitlines() or [str(status)])[-1]}"
    return path, ""


def light_environment():
    """What the scripts need that do without PyTorch."""
    needs = [needs_of(script) for script in files("tests/check_*.py")]
    light = sorted({need for need in needs if need is not None for need in need})
    return virtual_environment("build/venv-light", [light] if light else [])


def python_environments():
    """Where the package is tried: in an environment of its own without PyTorch, and in one with it."""
    return {"python": virtual_environment("build/venv-python", [["numpy", "pytest"]], own=True),
            "python with PyTorch": torch_environment(["numpy", "pytest", "ml_dtypes"])}


def prepare_environments():
    """Downloads wait for the network, not for a processor: make them while the first stages compile."""
    cuda_environment()
    torch_environment(ORACLES)
    light_environment()
    python_environments()


def stage_oracles(tally):
    """tests/check_*.py compare with other people's packages: argv is libnib.so and the tool."""
    path = build(tally, "build")
    if not path:
        return
    with_torch, light = torch_environment(ORACLES), light_environment()

    def oracle_job(script):
        def job(own):
            python, why = with_torch if needs_of(script) is None else light
            if python and stem(script) == "check_megatron":
                found, why = megatron_directory(python)
                python = python if found else None
            if not python:
                return own.missing(stem(script), why)
            return run_counted(own, stem(script), [python, script, os.path.join(path, "libnib.so"), os.path.join(path, "nib")],
                               SHARED, timeout=1200)
        return job

    run_together(tally, [oracle_job(script) for script in files("tests/check_*.py") if stem(script) != "check_families"])


def stage_families(tally):
    """Tiny models of many families through the tool and transformers, in one process: 25 of them, in a campaign all."""
    path = build(tally, "build")
    python, why = torch_environment(ORACLES)
    if not path:
        return
    if not python:
        return tally.missing("families", why)
    command = [python, "tests/check_families.py", os.path.join(path, "libnib.so"), os.path.join(path, "nib")]
    run_counted(tally, "families", command, timeout=3600 if campaign else 900)


def stage_python(tally):
    """The package as a user installs it."""
    wheels = os.path.join(ROOT, "build/wheels")
    shutil.rmtree(wheels, ignore_errors=True)
    environments = python_environments()
    python = next((python for python, _ in environments.values() if python), None)
    if python:
        status, output = run([python, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "-w", wheels, "."],
                             timeout=900)
        if status != 0:
            return tally.fail("pip wheel .", output)

    def install_job(what, python, why):
        def job(own):
            if not python:
                return own.missing(what, why)
            status, output = run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--force-reinstall",
                                  "--no-deps", *files("build/wheels/*.whl")])
            return own.ok() if status == 0 else own.fail(f"{what}: pip install", output)
        return job

    def pytest_job(what, python, part):
        return lambda own: run_counted(own, what, [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *part],
                                       {**SHARED, "PYTHONPATH": "", "NIB_LIBRARY": ""}, timeout=1500)

    run_together(tally, [install_job(what, *environment) for what, environment in environments.items()])
    # With PyTorch they take minutes: a process for each core. Without it a share might have nothing to run.
    tests = sorted(files("tests/python/test_*.py"), key=os.path.getsize, reverse=True)
    shares = {"python": 1, "python with PyTorch": min(WORKERS, len(tests))}
    run_together(tally, [pytest_job(what, python, sorted(tests[i::shares[what]]))
                         for what, (python, _) in reversed(environments.items()) if python for i in range(shares[what])])
    for what, (python, _) in environments.items():
        if python:
            status, output = run([python, "bench/python_overhead.py"], {"PYTHONPATH": "", "NIB_LIBRARY": ""})
            if status != 0:
                tally.fail(f"{what}: bench/python_overhead.py", output)
            else:
                tally.ok()
                print("  " + output.strip().splitlines()[-1], flush=True)


def stage_scripts(tally):
    path = build(tally, "build")
    if path:
        torch_environment(["numpy"])  # for training.sh, which says what it lacks where there is none
        run_scripts(tally, path, "tests/campaign/*.sh", logs=os.path.join(path, "campaign"))


FUZZ_SEED = "20261115"
# A target's own edges are those of a model in plain arrays: nothing is looked for there, and they cost fuzz_api more than the
# library's. To order inputs by how rare their features are costs as much again.
FUZZ_NO_EDGES = "-fno-sanitize-coverage=edge,indirect-calls,trace-cmp,inline-8bit-counters,pc-table"
# Words reach libFuzzer by strcmp and memcmp. What else is compared costs up to a third of the time, in which mutants find more.
FUZZ_NO_COMPARES = "-fno-sanitize-coverage=trace-cmp"
FUZZ_MB = 512  # a small input that needs more is a finding
# AddressSanitizer keeps so little of what is freed that it stays in a cache, and not who allocated it: a replay tells that.
FUZZ_ASAN = "allocator_may_return_null=1:quarantine_size_mb=8:malloc_context_size=0"


def fuzz_objects(folder):
    """The libraries with what libFuzzer needs: (objects, those of a GPU that the host is, ""), or (None, None, what a compiler said).
    The kernels of instruction sets are compiled plainly: targets do not reach them, and clang takes minutes for them under sanitizers."""
    os.makedirs(folder, exist_ok=True)
    include = ["-g", "-ffp-contract=off", "-Iinclude", "-Isrc", "-Icheckpoint", "-Itests", "-Icuda", "-Icuda/shim", "-c"]
    plain = ["clang", "-std=gnu11", "-O2", *include]
    checked = [*plain, "-fno-sanitize-recover=all", "-fsanitize=fuzzer-no-link,address,undefined", FUZZ_NO_COMPARES]
    kernels = ["clang++", "-std=c++17", "-O2", "-fno-strict-aliasing", *include, "-fsanitize=fuzzer-no-link,address", FUZZ_NO_COMPARES]
    core = [*((plain, source) for source in files("src/*/*/*.c")),
            *((checked, source) for source in files("src/*/*.c") + files("checkpoint/*/*.c"))]
    cuda = [*((checked, source) for source in files("cuda/*.c") + files("cuda/shim/*.c") if not stem(source).startswith("test_")),
            (kernels, os.path.join(ROOT, "cuda/shim/launch.cpp"))]

    def compiled(pair):
        command, source = pair
        target = os.path.join(folder, os.path.relpath(source, ROOT).replace("/", "-") + ".o")
        return (target, *run([*command, source, "-o", target]))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(compiled, core + cuda))
    for _, status, output in results:
        if status != 0:
            return None, None, output
    objects = [target for target, _, _ in results]
    return objects[:len(core)], objects[len(core):], ""


def wraps_of(source):
    """What makes allocations fail or keeps files in memory, for a target that says so: CMakeLists.txt has the calls."""
    with open(os.path.join(ROOT, "CMakeLists.txt"), encoding="utf-8") as file:
        calls = dict(re.findall(r"set\(wraps_(\w+) ([^)]*)\)", file.read()))
    with open(source, encoding="utf-8") as file:
        kinds = re.findall(r"NIB_TEST_WRAP_(\w+)", file.read())
    return [word for kind in sorted(set(kinds))
            for word in [f"-DNIB_TEST_WRAP_{kind}", *(f"-Wl,--wrap={call}" for call in calls[kind].split())]]


def stage_fuzz(tally):
    """libFuzzer on a copy of each corpus; what it finds stays in build/fuzz/NAME."""
    seconds = os.environ.get("NIB_FUZZ_SECONDS", "600")
    if not shutil.which("clang"):
        return tally.missing("fuzz", "there is no clang")
    objects, gpu, output = fuzz_objects(os.path.join(ROOT, "build/fuzz/objects"))
    if not objects:
        return tally.fail("building the libraries for fuzzing", output)
    libraries = run(["pkg-config", "--libs", "jansson", "libpcre2-8", "libxxhash"])[1].split()

    def fuzz(source):
        name = stem(source)
        folder = os.path.join(ROOT, "build/fuzz", name)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder + "/corpus")
        for file in files(f"tests/fuzz/corpus/{name[len('fuzz_'):]}/*"):
            shutil.copy(file, folder + "/corpus")
        more = ["-Icuda/shim", *gpu, "-rdynamic", "-ldl"] if name == "fuzz_cuda" else []  # cublaslt.c is looked up by name
        status, output = run(["clang", "-std=gnu11", "-g", "-O2", "-fno-sanitize-recover=all",
                              "-fsanitize=fuzzer,address,undefined", FUZZ_NO_EDGES, "-Iinclude", "-Isrc", "-Icheckpoint", "-Itests",
                              source, *wraps_of(source), *more, *objects, *libraries, "-lm", "-pthread", "-o", folder + "/run"])
        words = [f"-dict={file}" for file in files(f"tests/fuzz/{name}.dict")]
        if status != 0:
            return status, output
        return run([folder + "/run", *words, "-entropic=0", f"-max_total_time={seconds}", "-timeout=60",
                    f"-rss_limit_mb={FUZZ_MB}", f"-malloc_limit_mb={FUZZ_MB}", f"-seed={FUZZ_SEED}", "-print_final_stats=1",
                    f"-artifact_prefix={folder}/", folder + "/corpus"],
                   {"ASAN_OPTIONS": FUZZ_ASAN})

    sources = files("tests/fuzz/fuzz_*.c")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # a target takes one core
        for source, (status, output) in zip(sources, pool.map(fuzz, sources)):
            name = stem(source)
            if status != 0:
                tally.fail(f"{name}: exit {status}, see build/fuzz/{name}", output)
                continue
            tally.ok()
            tried = re.search(r"number_of_executed_units: (\d+)", output)
            reached = re.findall(r"^#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)", output, re.M)
            if tried and reached:
                _, edges, features, corpus = reached[-1]
                last = next(number for number, so_far, *_ in reached if so_far == edges)
                print(f"  {name}: seed {FUZZ_SEED}, {tried[1]} inputs in {seconds} s, {edges} edges (the last with input {last}), "
                      f"{features} features, corpus {corpus}", flush=True)


def stage_mutate(tally):
    """Faults that a test must notice; results are in build/mutants.jsonl, from which a run goes on."""
    run_counted(tally, "mutants", [sys.executable, os.path.join(ROOT, "tests/mutate.py"), "--log", "build/mutants.jsonl"],
                timeout=6 * 3600)


STAGES = {"gcc": stage_gcc, "clang": stage_clang, "asan": stage_asan, "serial": stage_serial, "mpi": stage_mpi,
          "neon": stage_neon, "instructions": stage_instructions, "hygiene": stage_hygiene, "rules": stage_rules, "cuda": stage_cuda,
          "oracles": stage_oracles,
          "families": stage_families, "python": stage_python}
LONG_STAGES = {"scripts": stage_scripts, "fuzz": stage_fuzz, "mutate": stage_mutate}


def main():
    global campaign
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=[*STAGES, *LONG_STAGES], help="run only this one")
    parser.add_argument("--campaign", action="store_true", help="also what takes longer")
    arguments = parser.parse_args()
    campaign = arguments.campaign
    if campaign:
        os.environ["NIB_CAMPAIGN"] = "1"

    stages = {**STAGES, **LONG_STAGES} if campaign or arguments.stage in LONG_STAGES else STAGES
    chosen = [name for name in stages if arguments.stage in (None, name)]
    if len(chosen) > 1:
        threading.Thread(target=prepare_environments, daemon=True).start()
    total, start = Tally(), time.time()
    for number, name in enumerate(chosen, 1):
        tally, stage_start = Tally(), time.time()
        stages[name](tally)
        now = time.time()
        print(f"{name:12} {tally.line()}, {now - stage_start:.0f} s ({number} of {len(chosen)} stages, {now - start:.0f} s)", flush=True)
        total.add(tally)
    print(total.line())
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())

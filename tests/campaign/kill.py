#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed at random moments, again and again, and resumed until they are done: the bytes of an undisturbed
run, nothing else beside them, and before the end nothing under a final name.

    kill.py NIB BUILD [KILLS [WAY]]

Each way to make an output (nib quantize, convert, dequantize, repair; nib-mpi on two and three ranks, of which one rank
is killed, or mpirun, or all; nib.calibrate, where PyTorch is) gets its share of KILLS. A kill counts when it ended a
process. A quarter of the moments are spread over the whole run, the others over what follows the first change of its
files, since mpirun takes longer to start than the run takes. NIB_SEED repeats a sequence of moments.
"""
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
AGAIN = 4  # kills of one output at most, before it may end
PARTIAL, FINISHED = ".nib-partial", ".nib-finished"


class Failure(Exception):
    """What a kill showed."""


# ---- Files ---------------------------------------------------------------------------------------------------------


def contents(path):
    """{relative name: bytes} of a directory or a file."""
    if not os.path.isdir(path):
        with open(path, "rb") as file:
            return {"": file.read()}
    found = {}
    for directory, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(directory, name), "rb") as file:
                found[os.path.relpath(os.path.join(directory, name), path)] = file.read()
    return found


def remove(path):
    shutil.rmtree(path, ignore_errors=True)
    if os.path.exists(path):
        os.unlink(path)


def snapshot(directory):
    """What tells one state of a directory from another."""
    try:
        return sorted((entry.path, entry.stat().st_mtime_ns) for place in (directory, os.path.join(directory, "new"))
                      for entry in (os.scandir(place) if os.path.isdir(place) else ()))
    except FileNotFoundError:
        return None  # gone while it was looked at: another one in any case


def visible(out):
    """What has a final name."""
    if not os.path.exists(out):
        return {}
    return {name: data for name, data in contents(out).items()
            if name.split(os.sep)[0] not in (PARTIAL, FINISHED)}


# ---- Ways to make an output -----------------------------------------------------------------------------------------


class Command:
    """A command line, by itself or under mpirun. `old`: an output that is replaced."""

    def __init__(self, words, out, fine=0, ranks=0, old=None):
        self.words, self.out, self.fine, self.ranks, self.old = words, out, fine, ranks, old
        self.partial = out + PARTIAL if out.endswith(".gguf") else os.path.join(out, PARTIAL)

    def prepare(self):
        remove(self.out)
        remove(self.partial)
        if self.old:
            shutil.copytree(self.old, self.out)

    def start(self):
        words = [*self.words, self.out]
        # What is there already is replaced by a run that begins; others go on with that one.
        words.insert(len(words) - 2, "-f" if self.old and not os.path.isdir(self.partial) else "--resume")
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                start_new_session=True)

    def kill(self, process):
        """True where it ended something that ran."""
        victims = self.processes(process)
        if not victims:
            return False
        if self.ranks:
            which = random.randrange(3)  # a rank, mpirun, or all of them
            ranks = victims[1:] or victims
            victims = [random.choice(ranks)] if which == 0 else victims[:1] if which == 1 else victims
        hit = False
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
                hit = True
            except ProcessLookupError:
                pass
        return hit

    def processes(self, process):
        """mpirun first, then its ranks: whoever has the output's name among its words."""
        if not self.ranks:
            return [process.pid] if process.poll() is None else []
        found = [process.pid] if process.poll() is None else []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != process.pid:
                try:
                    with open(f"/proc/{entry}/cmdline", "rb") as file:
                        words = file.read().split(b"\0")
                except OSError:
                    continue
                if self.out.encode() in words and os.path.basename(words[0]) == b"nib-mpi":
                    found.append(int(entry))
        return found

    def runs(self, process):
        return process.poll() is None

    def wait(self, process):
        _, error = process.communicate(timeout=120)
        end = time.time() + 60
        while self.ranks and self.processes(process):  # mpirun is gone, and its ranks notice
            if time.time() > end:
                raise Failure("ranks live on without mpirun")
            time.sleep(0.01)
        return process.returncode, error.decode(errors="replace")

    def at_work(self):
        """True where a run was met that has something, but not all."""
        if not os.path.isdir(self.partial) or os.path.exists(os.path.join(self.partial, "complete")):
            return False
        now = visible(self.out)
        if now and now != (contents(self.old) if self.old else {}):
            raise Failure(f"final names before all is complete: {sorted(now)}")
        return True


class Forked:
    """A function of Python in a process of its own, which need not import PyTorch once more."""
    fine, old = 0, None

    def __init__(self, function, out):
        self.function, self.out, self.partial = function, out, out + ".partial"

    def prepare(self):
        remove(self.out)
        remove(self.partial)

    def start(self):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                torch = sys.modules["torch"]  # its thread pool, made anew in a child, is not safe from several threads
                torch.set_num_threads(torch.get_num_threads())
                self.function(self.out)
                status = 0
            finally:
                os._exit(status)
        return pid

    def kill(self, pid):
        hit = self.runs(pid)
        os.kill(pid, signal.SIGKILL)  # nobody has waited for it: the id is still its own
        return hit

    def runs(self, pid):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self, pid):
        status = os.waitpid(pid, 0)[1]
        return os.waitstatus_to_exitcode(status), ""

    def at_work(self):
        return not visible(self.out) and os.path.isdir(self.partial)


# ---- The inputs ------------------------------------------------------------------------------------------------------


def run(*words):
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def make_calibration(work):
    """{name: a function} of nib.calibrate on a tiny model, whose statistics and Hessians are then there too; none
    without PyTorch."""
    try:
        import torch
        import transformers
        from nib import calibrate
    except ImportError:
        return {}
    torch.set_num_threads(1)  # no threads before a fork
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
                                      num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{work}/tiny")
    tokens = torch.randint(3, 90, (12, 64))  # six for each column, which GPTQ wants
    options = calibrate.Options(batch=2, first_tokens=False)
    how = {"fold": True, "gptq": True, "damp": 0.1}

    with_hessians = dataclasses.replace(options, hessians=f"{work}/tiny.stats.hessians")
    once = Forked(lambda out: calibrate.calibrate(f"{work}/tiny", tokens, out, with_hessians), f"{work}/tiny.stats")
    if once.wait(once.start())[0]:
        raise Failure("nib.calibrate fails undisturbed")

    def quantizing(**more):
        options = calibrate.Options(batch=2, first_tokens=False, how=how, **more)
        return lambda out: calibrate.calibrate(f"{work}/tiny", tokens, None, dataclasses.replace(options, quantize=out))

    return {"nib.calibrate": lambda out: calibrate.calibrate(f"{work}/tiny", tokens, out, options, {}),
            "nib.calibrate --quantize --gptq": quantizing(),
            "nib.calibrate --quantize --gptq --sequential": quantizing(sequential=True),
            "nib.calibrate --quantize --gptq --budget": quantizing(budget=5.0, budget_tokens=128)}


def make_ways(nib, build, work, only):
    """{name: (weight, way)}"""
    inputs, packed, broken = f"{work}/in", f"{work}/packed", f"{work}/broken"
    run(f"{build}/examples/make_checkpoint", "--family", "demo", "--layers", "3", "--shards", "3", inputs)
    run(nib, "quantize", "-q", "--shard-size", "300K", inputs, packed)
    run(sys.executable, os.path.join(HERE, "..", "cli", "damaged.py"), "--damage", "fused-scales-differ", broken)
    size, out = ("--shard-size", "300K"), f"{work}/out"
    ways = {
        "quantize": (5, Command([nib, "quantize", "-q", *size, inputs], out)),
        "quantize, 3 threads": (3, Command([nib, "quantize", "-q", "-t", "3", *size, inputs], out)),
        "quantize --force": (3, Command([nib, "quantize", "-q", *size, inputs], out, old=packed)),
        "quantize to GGUF": (2, Command([nib, "quantize", "-q", inputs], out + ".gguf")),
        "convert": (3, Command([nib, "convert", "-q", "--format", "modelopt", packed], out)),
        "dequantize": (2, Command([nib, "dequantize", "-q", packed], out)),
        "repair": (3, Command([nib, "repair", "-q", broken], out)),
    }
    tool = f"{build}/nib-mpi"
    if os.path.exists(tool) and shutil.which("mpirun"):
        for ranks in (2, 3):
            words = ["mpirun", "-n", str(ranks), tool, "quantize", "-q", "-t", "1", *size, inputs]
            ways[f"nib-mpi quantize, {ranks} ranks"] = (3, Command(words, out, ranks=ranks))
        words = ["mpirun", "-n", "2", tool, "convert", "-q", "-t", "1", "--format", "modelopt", packed]
        ways["nib-mpi convert, 2 ranks"] = (1, Command(words, out, ranks=2))
    else:
        print("nib-mpi is left out: it is not built, or there is no mpirun", flush=True)
    calibration = make_calibration(work)
    if not calibration:
        print("nib.calibrate is left out: there is no PyTorch", flush=True)
    else:
        words = [nib, "quantize", "-q", "--imatrix", f"{work}/tiny.stats", "--fold", "--gptq", "--shard-size", "40K"]
        ways["quantize --gptq"] = (3, Command([*words, f"{work}/tiny"], out))
        words += ["--fp8", "*.1.mlp.down_proj", "--plain", "*.2.self_attn.q_proj"]
        ways["quantize --gptq --fp8 --plain"] = (2, Command([*words, "-t", "2", f"{work}/tiny"], out))
    ways |= {name: (2, Forked(function, f"{work}/stats")) for name, function in calibration.items()}
    return {name: way for name, way in ways.items() if not only or only == name}


# ---- Kills -----------------------------------------------------------------------------------------------------------


def watch(way, process, before):
    """Wait for the first change of its files, or its end."""
    while way.runs(process) and snapshot(way.partial) == before:
        time.sleep(0.0005)


def finish(way):
    status, error = way.wait(way.start())
    if status != way.fine:
        raise Failure(f"it cannot be resumed: exit {status}: {error.strip()}")


def whole_of(way):
    """What an undisturbed run writes; how long it takes, and from the first change of its files on (medians of three)."""
    spans = []
    for _ in range(3):
        way.prepare()
        began, before = time.time(), snapshot(way.partial)
        process = way.start()
        watch(way, process, before)
        changed = time.time()
        status, error = way.wait(process)
        if status != way.fine:
            raise Failure(f"undisturbed, it ended with {status}: {error.strip()}")
        spans.append((time.time() - began, time.time() - changed))
    return contents(way.out), *(sorted(span)[1] for span in zip(*spans))


def kill_once(way, span, work):
    """(whether it ended a process, whether that was at work)"""
    before, late = snapshot(way.partial), random.random() < 0.75
    process = way.start()
    if late:
        watch(way, process, before)
    time.sleep(random.uniform(0, 1.05 * (work if late else span)))
    hit = way.kill(process)
    way.wait(process)
    return hit, way.at_work() and hit


def kill_way(way, wanted):
    """(kills, kills that met a run at work, outputs)"""
    whole, span, work = whole_of(way)
    kills = met = outputs = 0
    while kills < wanted:
        way.prepare()
        for _ in range(random.randint(1, AGAIN)):
            hit, at_work = kill_once(way, span, work)
            kills += hit
            met += at_work
        finish(way)
        now = contents(way.out)
        if now != whole:
            other = sorted(name for name in {*now, *whole} if now.get(name) != whole.get(name))
            raise Failure(f"other bytes, or other files: {other}")
        outputs += 1
        if outputs % 20 == 0:  # a machine's speed changes
            _, span, work = whole_of(way)
    way.prepare()
    return kills, met, outputs


def main():
    nib, build = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
    total = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
    seed = int(os.environ.get("NIB_SEED", "20261116"))
    random.seed(seed)
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                      OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_btl="self,vader,tcp")
    os.environ.setdefault("PYTHONPATH", os.path.join(HERE, "..", "..", "python"))
    began, kills, failed = time.time(), 0, 0
    with tempfile.TemporaryDirectory() as work:
        ways = make_ways(nib, build, work, sys.argv[4] if len(sys.argv) > 4 else None)
        shares = sum(weight for weight, _ in ways.values())
        for name, (weight, way) in ways.items():
            start = time.time()
            try:
                done, met, outputs = kill_way(way, -(-total * weight // shares))
            except Failure as failure:
                print(f"FAILED {name} (seed {seed}): {failure}", flush=True)
                failed += 1
                continue
            kills += done
            print(f"{name}: {outputs} outputs, {done} kills, {met} met a run at work, {time.time() - start:.0f} s",
                  flush=True)
            if done >= 20 and not met:
                print(f"FAILED {name}: no kill met a run at work", flush=True)
                failed += 1
    print(f"{kills} kills in {time.time() - began:.0f} s, seed {seed}: "
          f"{'the same bytes' if not failed else f'{failed} failed'}")
    return 1 if failed or kills < total else 0


if __name__ == "__main__":
    sys.exit(main())

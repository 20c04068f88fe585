# SPDX-License-Identifier: Apache-2.0
"""libnib_checkpoint: whole models, quantized in bounded memory, as the tool does it.

The library is loaded when somebody calls: NIB_CHECKPOINT_LIBRARY where that is set, otherwise the one beside libnib, as
the wheel and a build have it.
"""
import contextlib
import ctypes
import enum
import os
import threading
import warnings
from ctypes import (CFUNCTYPE, POINTER as P, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t,
                    c_uint8, c_uint64, c_void_p)

import numpy

from . import _library
from ._library import STATUS, ArgumentError, Dialect, DType, ScaleRule, TensorScaleRule, UnsupportedError, raw

UNSET = -1

# ---- nib_checkpoint.h, as far as it is needed here ---------------------------------------------------------


class Action(enum.IntEnum):
    QUANTIZE, CONVERT, DEQUANTIZE, REPAIR, KEEP, FP8 = range(6)


class Fold(enum.IntEnum):
    NONE, FIXED, SEARCH = range(3)


class Progress(Structure):
    _fields_ = [("bytes", c_size_t), ("phase", c_char_p), ("tensor", c_char_p), ("done", c_uint64), ("total", c_uint64),
                ("warning", c_char_p)]


PROGRESS = CFUNCTYPE(c_int, c_void_p, P(Progress))


class Job(Structure):
    _fields_ = [("bytes", c_size_t), ("threads", c_int32), ("max_memory", c_uint64), ("progress", PROGRESS),
                ("context", c_void_p), ("comm", c_void_p)]


class RunOptions(Structure):
    _fields_ = [("bytes", c_size_t), ("resume", c_uint8), ("force", c_uint8)]


class QuantizeOptions(Structure):
    _fields_ = [("bytes", c_size_t), ("format", c_int), ("scheme", c_int), ("dialect", c_int32),
                ("scale_rule", c_int32), ("tensor_scale_rule", c_int32), ("min_block_scale", c_float),
                ("activation", c_int),
                ("activation_file", c_char_p), ("preset", c_int), ("ignore", P(c_char_p)), ("n_ignore", c_size_t),
                ("only", P(c_char_p)), ("n_only", c_size_t), ("shard_bytes", c_uint64), ("keep_split", c_uint8),
                ("reader", c_int), ("statistics", c_char_p), ("statistics_strict", c_uint8), ("fold", c_int),
                ("fold_exponent", c_float), ("codes", c_char_p), ("gptq", c_uint8), ("hessians", c_char_p),
                ("damp", c_float), ("fp8", P(c_char_p)), ("n_fp8", c_size_t), ("budget", c_float),
                ("budget_plain", c_uint8), ("plain", P(c_char_p)), ("n_plain", c_size_t)]


class Weight(Structure):
    _fields_ = [("bytes", c_size_t), ("name", c_char_p), ("format", c_int), ("dtype", c_int), ("rows", c_int64),
                ("cols", c_int64), ("tensor", c_char_p), ("file", c_char_p), ("stored_bytes", c_uint64),
                ("tensor_scale_kind", c_int), ("tensor_scale", c_float), ("has_input_scale", c_int),
                ("input_scale", c_float), ("stored_dtype", c_char_p)]


class PlanRow(Structure):
    _fields_ = [("bytes", c_size_t), ("name", c_char_p), ("action", c_int), ("reason", c_char_p), ("rows", c_int64),
                ("cols", c_int64), ("bytes_in", c_uint64), ("bytes_out", c_uint64), ("group", c_char_p),
                ("statistics", c_char_p), ("tokens", c_double), ("fold", c_char_p), ("gptq", c_char_p)]


class PlanFacts(Structure):
    _fields_ = [("bytes", c_size_t), ("weights", c_size_t), ("changed", c_size_t), ("kept", c_size_t),
                ("groups", c_size_t), ("files_in", c_size_t), ("files_out", c_size_t), ("bytes_in", c_uint64),
                ("bytes_out", c_uint64),
                ("changed_elements", c_uint64), ("changed_bytes_out", c_uint64), ("elements", c_uint64),
                ("tensor_bytes_out", c_uint64), ("rows", c_size_t), ("note", c_char_p)]


STRUCTS = {"nib_progress": Progress, "nib_job": Job, "nib_run_options": RunOptions,
           "nib_quantize_options": QuantizeOptions, "nib_plan_row": PlanRow, "nib_plan_facts": PlanFacts,
           "nib_weight": Weight}
ENUMS = {"nib_action": (Action, "NIB_ACTION_"), "nib_fold": (Fold, "NIB_FOLD_")}
FUNCTIONS = {
    "nib_checkpoint_open": (STATUS, [c_char_p, P(c_void_p)]),
    "nib_checkpoint_close": (None, [c_void_p]),
    "nib_checkpoint_get_weight": (STATUS, [c_void_p, c_size_t, P(Weight)]),
    "nib_checkpoint_find_weight": (STATUS, [c_void_p, c_char_p, P(c_size_t)]),
    "nib_checkpoint_read_rows": (STATUS, [c_void_p, c_size_t, c_int64, c_int64, P(_library.Array)]),
    "nib_checkpoint_format_name": (c_char_p, [c_int]),
    "nib_scheme_name": (c_char_p, [c_int]),
    "nib_activation_name": (c_char_p, [c_int]),
    "nib_preset_name": (c_char_p, [c_int]),
    "nib_reader_name": (c_char_p, [c_int]),
    "nib_reader_choose": (STATUS, [c_int, P(c_int32), P(c_int32)]),
    "nib_quantize_options_init_sized": (STATUS, [P(QuantizeOptions), c_size_t]),
    "nib_plan_quantize": (STATUS, [c_void_p, P(QuantizeOptions), P(c_void_p)]),
    "nib_plan_dequantize": (STATUS, [c_void_p, c_int, c_int, P(c_void_p)]),
    "nib_plan_destroy": (None, [c_void_p]),
    "nib_plan_get_facts": (STATUS, [c_void_p, P(PlanFacts)]),
    "nib_plan_get_row": (STATUS, [c_void_p, c_size_t, P(PlanRow)]),
    "nib_plan_run": (STATUS, [c_void_p, c_char_p, P(RunOptions), P(Job)]),
}

_lock = threading.Lock()
_functions = None


def path():
    """Where the library is looked for."""
    chosen = os.environ.get("NIB_CHECKPOINT_LIBRARY")
    return chosen or os.path.join(os.path.dirname(os.path.abspath(_library.path)), "libnib_checkpoint.so")


def functions():
    """The functions of nib_checkpoint.h that Python calls; UnsupportedError where there is no such library."""
    global _functions
    if _functions is None:
        with _lock:
            _functions = _functions or _library.load_another(
                path(), FUNCTIONS, "nib_last_error", UnsupportedError, "checkpoints need libnib_checkpoint",
                "a wheel has it where jansson, PCRE2 and xxHash were there when it was built; "
                "NIB_CHECKPOINT_LIBRARY can name it")
    return _functions


# ---- Options -----------------------------------------------------------------------------------------------


def _words(name_of):
    """What the library calls the values 0, 1, ... of an enum."""
    words = {}
    while (name := name_of(len(words))) is not None:
        words[name.decode()] = len(words)
    return words


def _word(option, words, value):
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ArgumentError(f"{option} is {value!r}, not one of {', '.join(words)}")


def _patterns(option, patterns):
    if isinstance(patterns, (str, bytes)):
        raise ArgumentError(f"{option} is a list of patterns, not {patterns!r}")
    encoded = [os.fsencode(pattern) for pattern in patterns]
    return (c_char_p * max(len(encoded), 1))(*encoded), len(encoded)


def _set_numerics(options, scale, tensor_scale, min_block_scale, dialect):
    names = {"rtn": ScaleRule.RTN, "4over6": ScaleRule.FOUR_OVER_SIX, "sweep": ScaleRule.SWEEP}
    if scale is not None:
        options.scale_rule = _word("scale", names, scale)
    if tensor_scale is not None:
        rules = {"exact": TensorScaleRule.EXACT, "pow2": TensorScaleRule.POW2}
        options.tensor_scale_rule = _word("tensor_scale", rules, tensor_scale)
    if min_block_scale is not None:
        if not 0 <= min_block_scale <= 448:
            raise ArgumentError(f"min_block_scale is from 0 to 448, not {min_block_scale}")
        options.min_block_scale = min_block_scale
    if dialect is not None:
        options.dialect = _word("dialect", {_words_of_dialect(d): int(d) for d in Dialect}, dialect)


def _words_of_dialect(dialect):
    return raw.nib_dialect_name(int(dialect)).decode()


def _set_place(lib, options, out, format, scheme, for_):
    """Format, scheme and reader, as the tool chooses them."""
    formats, schemes = _words(lib.nib_checkpoint_format_name), _words(lib.nib_scheme_name)
    if format is None and os.fsencode(out).endswith(b".gguf"):
        format = "gguf"
    chosen = c_int32(UNSET if format is None else _word("format", formats, format))
    planned = c_int32(UNSET if scheme is None else _word("scheme", schemes, scheme))
    if for_ is not None:
        options.reader = _word("for_", {w: v for w, v in _words(lib.nib_reader_name).items() if v}, for_)
        lib.nib_reader_choose(options.reader, chosen, planned)
    if chosen.value != UNSET:
        options.format = chosen.value
    if planned.value != UNSET:
        options.scheme = planned.value
    return {v: w for w, v in schemes.items()}[options.scheme]


def _set_activations(lib, options, activations, imatrix, scheme):
    if activations is None:
        activations = "statistics" if imatrix is not None and scheme == "nvfp4" else "one"
    words = _words(lib.nib_activation_name)
    named = isinstance(activations, str) and activations in words and activations != "file"
    options.activation = words[activations] if named else words["file"]
    if not named:
        options.activation_file = os.fsencode(activations)


def _set_fold(options, fold):
    if fold is False or fold is None:
        return
    options.fold = Fold.SEARCH if fold == "search" else Fold.FIXED
    if fold is not True and fold != "search":
        if isinstance(fold, str) or not 0 <= fold <= 1:
            raise ArgumentError(f'fold is True, an exponent from 0 to 1, or "search", not {fold!r}')
        options.fold_exponent = fold


def _set_gptq(options, gptq, hessians, damp):
    options.gptq = bool(gptq)
    options.hessians = None if hessians is None else os.fsencode(hessians)
    if damp is not None:
        if not 0 <= damp < float("inf"):
            raise ArgumentError(f"damp is a number that is not negative, not {damp}")
        options.damp = damp


# ---- Weights -----------------------------------------------------------------------------------------------


class Weights(contextlib.AbstractContextManager):
    """The weights of a checkpoint, by their names: experts of a stack are single ones."""

    def __init__(self, directory):
        self._lib, self._checkpoint = functions(), c_void_p()
        self._lib.nib_checkpoint_open(os.fsencode(directory), self._checkpoint)

    def __exit__(self, *_):
        self._lib.nib_checkpoint_close(self._checkpoint)

    def _find(self, name):
        index, weight = c_size_t(), Weight(bytes=ctypes.sizeof(Weight))
        self._lib.nib_checkpoint_find_weight(self._checkpoint, os.fsencode(name), index)
        self._lib.nib_checkpoint_get_weight(self._checkpoint, index, weight)
        return index, weight

    def tensor(self, name):
        """The tensor that a weight's values lie in."""
        return os.fsdecode(self._find(name)[1].tensor)

    def read(self, name):
        """Its values, F32 [rows, cols]."""
        index, weight = self._find(name)
        values = numpy.empty((weight.rows, weight.cols), numpy.float32)
        array, shape = _library.Array(), (c_int64 * 2)(weight.rows, weight.cols)
        raw.nib_array_init(array, values.ctypes.data, int(DType.F32), 2, shape)
        self._lib.nib_checkpoint_read_rows(self._checkpoint, index, 0, weight.rows, array)
        return values


# ---- Runs --------------------------------------------------------------------------------------------------


def _text(value):
    return value.decode(errors="replace")


def _report(lib, plan):
    """What `nib quantize --json` says of a plan."""
    facts = PlanFacts(bytes=ctypes.sizeof(PlanFacts))
    lib.nib_plan_get_facts(plan, facts)
    report = {name: getattr(facts, name) for name, _ in PlanFacts._fields_ if name != "bytes"}
    report["note"], report["rows"] = _text(facts.note), []
    report["bits_per_weight"] = 8 * facts.tensor_bytes_out / facts.elements if facts.elements else 0.0
    for index in range(facts.rows):
        row = PlanRow(bytes=ctypes.sizeof(PlanRow))
        lib.nib_plan_get_row(plan, index, row)
        values = {name: getattr(row, name) for name, _ in PlanRow._fields_ if name != "bytes"}
        values = {name: _text(value) if isinstance(value, bytes) else value for name, value in values.items()}
        values["action"] = Action(row.action).name.lower()
        report["rows"].append(values)
    return report


def _run(lib, plan, out, progress, options, threads, max_memory):
    """A run, whose progress also is where an interrupt is noticed."""
    raised = []

    def report(_context, facts):
        try:
            f = facts.contents
            if f.warning:
                warnings.warn(_text(f.warning), stacklevel=1)
                return 0
            tensor = _text(f.tensor) if f.tensor else None
            if progress is not None and progress(_text(f.phase), f.done, f.total, tensor):
                return 1
        except BaseException as error:  # KeyboardInterrupt too: it goes on where the run was called
            raised.append(error)
            return 1
        return 0

    job = Job(bytes=ctypes.sizeof(Job), threads=threads, max_memory=max_memory, progress=PROGRESS(report))
    try:
        lib.nib_plan_run(plan, out, options, job)
    except _library.CancelledError:
        if raised:
            raise raised[0] from None
        raise


def quantize_checkpoint(source, out, *, format=None, scheme=None, for_=None, scale=None, tensor_scale=None,
                        min_block_scale=None, dialect=None, activations=None, imatrix=None, imatrix_strict=False,
                        fold=False, gptq=False, hessians=None, damp=None, codes=None, ignore=(), only=(), fp8=(),
                        plain=(), budget=0.0, budget_plain=False, preset="default", shard_size=0, keep_split=False,
                        threads=0, max_memory=0, dry_run=False, resume=False, force=False, progress=None):
    """Turn a checkpoint into NVFP4, as `nib quantize SOURCE OUT` does: a directory, a safetensors or a GGUF file in, a
    directory that servers load out, or a GGUF file where the name ends in .gguf. Neither needs to fit into memory.

        nib.quantize_checkpoint("Qwen3-8B", "Qwen3-8B-NVFP4", imatrix="stats.safetensors", fold=True)

    The options are the tool's, by their names: format, scheme, for_ (a server), scale, tensor_scale, min_block_scale,
    dialect, activations ("one", "norm", "statistics" or a JSON file), imatrix, imatrix_strict, gptq, hessians, damp,
    codes, ignore, only, fp8 and plain (lists of patterns), budget, budget_plain, preset, shard_size and max_memory
    (bytes), keep_split, threads, dry_run, resume, force. fold is True, an exponent, or "search". progress(phase, done,
    total, tensor) is called now and then, from one thread at a time; what it raises stops the run and is raised here,
    and so is nib.CancelledError where it returns something true. What a run warns of is a Python warning.
    Returns what `--json` prints of the plan: sizes, "note", and "rows" with what became of each weight.
    """
    lib = functions()
    options = QuantizeOptions()
    lib.nib_quantize_options_init_sized(options, ctypes.sizeof(options))
    planned = _set_place(lib, options, out, format, scheme, for_)
    _set_numerics(options, scale, tensor_scale, min_block_scale, dialect)
    _set_activations(lib, options, activations, imatrix, planned)
    _set_fold(options, fold)
    _set_gptq(options, gptq, hessians, damp)
    options.preset = _word("preset", _words(lib.nib_preset_name), preset)
    options.ignore, options.n_ignore = _patterns("ignore", ignore)
    options.only, options.n_only = _patterns("only", only)
    options.fp8, options.n_fp8 = _patterns("fp8", fp8)
    options.plain, options.n_plain = _patterns("plain", plain)
    options.budget, options.budget_plain = budget, bool(budget_plain)
    options.statistics = None if imatrix is None else os.fsencode(imatrix)
    options.statistics_strict, options.keep_split = bool(imatrix_strict), bool(keep_split)
    options.shard_bytes = shard_size
    options.codes = None if codes is None else os.fsencode(codes)
    with _planned(lib, source, lib.nib_plan_quantize, options) as plan:
        if not dry_run:
            how = RunOptions(bytes=ctypes.sizeof(RunOptions), resume=bool(resume), force=bool(force))
            _run(lib, plan, os.fsencode(out), progress, how, threads, max_memory)
        return _report(lib, plan)


def dequantize_checkpoint(source, out, *, dtype=None, threads=0, max_memory=0, resume=False, force=False,
                          progress=None):
    """Plain values of a quantized checkpoint, in a directory of safetensors, as `nib dequantize SOURCE OUT` does: every
    tensor has the name and the shape that it had before. dtype is "f32", "bf16" or "f16"; None: what each had."""
    lib = functions()
    words = {"f32": DType.F32, "bf16": DType.BF16, "f16": DType.F16}
    chosen = len(DType) if dtype is None else _word("dtype", words, dtype)
    with _planned(lib, source, lib.nib_plan_dequantize, 0, int(chosen)) as plan:
        how = RunOptions(bytes=ctypes.sizeof(RunOptions), resume=bool(resume), force=bool(force))
        _run(lib, plan, os.fsencode(out), progress, how, threads, max_memory)
        return _report(lib, plan)


@contextlib.contextmanager
def _planned(lib, source, make, *options):
    """A plan of a checkpoint."""
    checkpoint, plan = c_void_p(), c_void_p()
    try:
        lib.nib_checkpoint_open(os.fsencode(source), checkpoint)
        make(checkpoint, *options, plan)
        yield plan
    finally:
        lib.nib_plan_destroy(plan)
        lib.nib_checkpoint_close(checkpoint)

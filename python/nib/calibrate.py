# SPDX-License-Identifier: Apache-2.0
"""Statistics of the inputs of a model's linear layers, from text: what `nib quantize --imatrix` weighs errors with.

    python -m nib.calibrate MODEL --text FILE... --out STATS

The model runs one decoder layer at a time (nib.streaming), so that memory is that of a layer. Every product with a
weight of the layer is watched: for each channel of its input the sum, the sum of squares, the mean of magnitudes and
the largest magnitude, per expert where the weight is a stack of experts. docs/calibration.md describes the file.
"""
import bisect
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time

import torch
from torch.overrides import TorchFunctionMode

from . import budget, corrections, imatrix, layerwise, streaming
from ._cli import Command, Progress, number, positive, seed, shown

__all__ = ["calibrate", "Options", "token_batches", "random_batches", "main"]

ENOUGH = 16384  # tokens, from which on first tokens are left out of sums
HAT = "-hat"  # the stream of states through what is quantized so far
FEW = 256  # tokens of an expert, below which its own statistics say less than those of all (docs/calibration.md)

# Products of an input with a weight: where the two stand among the arguments.
_PRODUCTS = {torch.nn.functional.linear: (0, 1), torch.matmul: (0, 1), torch.Tensor.matmul: (0, 1),
             torch.Tensor.__matmul__: (0, 1), torch.mm: (0, 1), torch.Tensor.mm: (0, 1), torch.bmm: (0, 1),
             torch.Tensor.bmm: (0, 1), torch.addmm: (1, 2), torch.Tensor.addmm: (1, 2), torch.baddbmm: (1, 2),
             torch.Tensor.baddbmm: (1, 2)}
_TAKEN = object()
_NAMES = {"input": 0, "weight": 1, "mat1": 1, "mat2": 2, "batch1": 1, "batch2": 2, "other": 1}


# ---- What is added up ------------------------------------------------------------------------------------------------


class _Sums:
    """Of one input, by slice (expert) and channel. Sums leave out the first token of a sequence, whose magnitudes are
    those of no other; the largest magnitudes do not. Of few tokens they count it: some channels are for it alone, and
    would seem to be for nothing."""

    def __init__(self, name, slices, channels, device, hessian):
        self.name, self.slices, self.channels = name, slices, channels
        self.count = torch.zeros(slices, dtype=torch.int64)
        options = {"dtype": torch.float64, "device": device}
        self.sum, self.sum2, self.magnitudes = (torch.zeros(slices, channels, **options) for _ in range(3))
        self.amax = torch.zeros(slices, channels, dtype=torch.float32, device=device)
        self.hessian = torch.zeros(channels, channels, **options) if hessian else None
        self.hessian_count = 0

    def add(self, index, rows, kept):
        rows = rows.float()
        torch.maximum(self.amax[index], rows.abs().amax(0), out=self.amax[index])
        if kept is not None:
            rows = rows[kept]
        self.count[index] += len(rows)
        self.sum[index] += rows.sum(0, dtype=torch.float64)
        self.sum2[index] += rows.square().sum(0, dtype=torch.float64)
        self.magnitudes[index] += rows.abs().sum(0, dtype=torch.float64)

    def add_hessian(self, rows, kept):
        rows = rows.float() if kept is None else rows.float()[kept]
        self.hessian += rows.t() @ rows
        self.hessian_count += len(rows)

    def tensors(self):
        """As the file has them."""
        if not bool(torch.isfinite(self.sum2).all()):
            raise ValueError(f"the input of {self.name} has values that are not finite")
        count = self.count.clamp(min=1)[:, None].to(self.sum.device)
        found = {"count": self.count, "sum": self.sum.float(), "sum2": self.sum2.float(), "amaxk": self.amax,
                 "amax": self.amax.amax(1), "mabs": (self.magnitudes / count).float()}
        return {f"{self.name}.{key}": value.cpu().contiguous() for key, value in found.items()}

    def packed_hessian(self):
        upper = torch.triu_indices(self.channels, self.channels, device=self.hessian.device)
        mean = self.hessian[upper[0], upper[1]] / max(self.hessian_count, 1)
        return {f"{self.name}.hessian": mean.float().cpu(),
                f"{self.name}.hessian_count": torch.tensor([self.hessian_count])}


class _Watch(TorchFunctionMode):
    """Sees the products with weights of one layer while batches run. A weight is known by where its values lie, so that
    views of it, transposed or one expert of a stack, are known too."""

    def __init__(self, parameters, hessians, all_experts, first_tokens):
        super().__init__()
        self.first_tokens = first_tokens
        self.sums, self.group, self.hessians = {}, {}, hessians
        self.routes, self.muted, self.all_experts, self.entered = {}, set(), all_experts, {}
        weights = [(p.data_ptr(), name, p) for name, p in parameters if p.ndim >= 2]
        self.weights = sorted(weights, key=lambda entry: entry[0])
        self.starts = [start for start, _, _ in self.weights]
        self.hooks = []

    def open(self, layer, prefix):
        """Ask modules of experts which tokens go where."""
        for name, module in layer.named_modules():
            stacks = [f"{prefix}.{name}.{key}" for key, p in module.named_parameters(recurse=False) if p.ndim == 3]
            if stacks:
                self.hooks.append(module.register_forward_pre_hook(self._enter(stacks), with_kwargs=True))
                self.hooks.append(module.register_forward_hook(self._leave(stacks), with_kwargs=True))

    def close(self):
        for hook in self.hooks:
            hook.remove()

    def begin(self, sequences, length):
        """A batch of so many sequences of this length is next."""
        self.tokens, self.length, self.seen, self.routes = sequences * length, length, {}, {}

    # ---- Which tokens an expert sees ----

    def _enter(self, stacks):
        def hook(module, args, kwargs):
            index = _routing(args, kwargs)
            self.routes.update(dict.fromkeys(stacks, index))
            self.entered = {stack: _hidden(args, kwargs) for stack in stacks}
            if self.all_experts:
                if index is None:
                    raise ValueError(f"--all-experts: it is not known how {type(module).__name__} takes its tokens")
                self.muted.update(stacks)
        return hook

    def _leave(self, stacks):
        def hook(module, args, kwargs, _):
            if not self.all_experts:
                return
            self.muted.difference_update(stacks)
            index = _routing(args, kwargs)
            count = next(p for p in module.parameters(recurse=False) if p.ndim == 3).shape[0]
            everyone = torch.arange(count, device=index.device).expand(len(index), count)
            self.routes.update(dict.fromkeys(stacks, everyone))
            self.entered = {stack: _hidden(args, kwargs) for stack in stacks}
            replaced = lambda value: everyone if value is index else \
                torch.full_like(everyone, 1, dtype=value.dtype) if _is_weights(value, index) else value
            module.forward(*map(replaced, args), **{key: replaced(value) for key, value in kwargs.items()})
        return hook

    # ---- Products ----

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        places = _PRODUCTS.get(func)
        if places:
            given = {**dict(enumerate(args)), **{_NAMES[key]: value for key, value in kwargs.items() if key in _NAMES}}
            x, weight = given.get(places[0]), given.get(places[1])
            if isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and x.numel() and weight.numel():
                if not self._product(x, weight) and weight.ndim >= 2:
                    self._product(weight.transpose(-1, -2), x)  # W x instead of x W^T
        return func(*args, **kwargs)

    def _product(self, x, weight):
        """Whether it is the product with a weight."""
        at = bisect.bisect_right(self.starts, weight.data_ptr()) - 1
        if at < 0:
            return False
        start, name, whole = self.weights[at]
        offset = weight.data_ptr() - start
        if offset >= whole.numel() * whole.element_size() or weight.dtype != whole.dtype:
            return False
        if name in self.muted:
            return True
        slices = whole.shape[0] if whole.ndim == 3 else 1
        if slices > 1 and weight.ndim == 3:  # all experts at once: [experts, tokens, channels]
            for index in range(slices):
                self._record(name, slices, index, x[index], x[index])
        else:
            self._record(name, slices, offset * slices // (whole.numel() * whole.element_size()), x, x)
        return True

    def _record(self, name, slices, index, x, owner):
        rows = x.reshape(-1, x.shape[-1])
        key = (x.data_ptr(), tuple(rows.shape), x.stride(-1), slices, index)
        before = self.seen.get(key)
        if name not in self.group:
            shared = before[1] if before else None
            self.group[name] = shared or name
            if not shared:
                wanted = self.hessians is True or (self.hessians == "experts" and slices > 1)
                self.sums[name] = _Sums(name, slices, rows.shape[1], x.device, wanted)
        if before and before[1] == self.group[name]:
            return
        if self.group[name] != name:
            raise ValueError(f"{name} had the input of {self.group[name]} at first, and has another one now")
        self.seen[key] = owner, name  # alive, so that no other tensor takes its place
        sums, kept = self.sums[name], self._not_first(name, slices, index, rows)
        rows, kept = _routed(rows, kept) if slices > 1 else (rows, kept)
        if len(rows):
            sums.add(index, rows, None if self.first_tokens else kept)
            if sums.hessian is not None:
                self._add_hessian(sums, name, rows, kept)

    def _add_hessian(self, sums, name, rows, kept):
        """Experts of a layer have one: of the tokens that came in, each once, for the stack that reads them; for the
        other of what the experts made of them."""
        if name not in self.entered or self.entered[name] is None:
            sums.add_hessian(rows, kept)
        elif self.entered[name] is not _TAKEN:
            whole = self.entered[name]
            sums.add_hessian(whole, self._not_first(name, 1, 0, whole))
            self.entered = {stack: _TAKEN if stack == name else None for stack in self.entered}

    def _not_first(self, name, slices, index, rows):
        """Which rows are not the first token of a sequence; None: all, or not known."""
        routed = self.routes.get(name) if slices > 1 else None
        positions = None if routed is None else torch.where(routed.t() == index)[1]  # as transformers' eager experts
        if positions is not None and len(positions) == len(rows):
            pass
        elif len(rows) == self.tokens:
            positions = torch.arange(self.tokens, device=rows.device)
        else:
            return None
        return positions % self.length != 0


class _Taker(_Watch):
    """Ends a layer where one of its weights is multiplied, and has what came into that product."""

    def __init__(self, name, weight, first_tokens):
        super().__init__([(name, weight)], False, False, first_tokens)
        self.rows = None

    def _record(self, name, slices, index, x, owner):
        rows = x.reshape(-1, x.shape[-1])
        kept = None if self.first_tokens else self._not_first(name, slices, index, rows)
        self.rows = rows if kept is None else rows[kept]
        raise streaming.Reached


class _ExpertTaker(_Watch):
    """Ends a layer behind a module of experts, and has what came into the products with one of its stacks. With an
    `index` [tokens, k] experts have the tokens that it says, and not those that the router does."""

    def __init__(self, model, name, first_tokens, index):
        module, path = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[0]
        stacks = [(f"{path}.{key}", value) for key, value in module.named_parameters(recurse=False) if value.ndim == 3]
        super().__init__(stacks, False, False, first_tokens)
        self.name, self.index, self.rows, self.hidden, self.first, self.paired = name, index, {}, None, None, True
        self.hooks = [module.register_forward_pre_hook(self._come, with_kwargs=True),
                      module.register_forward_hook(self._go)]

    def _come(self, _, args, kwargs):
        own, self.hidden = _routing(args, kwargs), _hidden(args, kwargs)
        if own is None:
            self.index = None
            return None
        self.index = own if self.index is None else self.index.to(own)
        self.routes = dict.fromkeys((name for _, name, _ in self.weights), self.index)
        replaced = lambda value: self.index if value is own else value
        return tuple(map(replaced, args)), {key: replaced(value) for key, value in kwargs.items()}

    def _go(self, *_):
        raise streaming.Reached

    def _record(self, name, slices, index, x, owner):
        self.first = self.first or name
        if name == self.name:
            rows = x.reshape(-1, x.shape[-1])
            self.paired &= self.index is not None or len(rows) == self.tokens
            self.rows[index] = self._counted(rows, slices, index)

    def _counted(self, rows, slices, index):
        kept = None if self.first_tokens else self._not_first(self.name, slices, index, rows)
        return (rows if kept is None else rows[kept]).float()

    def taken(self):
        whole = self.hidden is not None and self.index is not None and self.first == self.name
        return corrections.Taken(self.rows, self.index, self.paired,
                                 self._counted(self.hidden, 1, 0) if whole else None)


class _Takers:
    """How corrections.Streams sees inputs."""

    def __init__(self, first_tokens):
        self.first_tokens = first_tokens

    def matrix(self, model, n, tokens, state, parameter):
        taker = _Taker(parameter, model.model.get_parameter(parameter), self.first_tokens)
        taker.begin(*tokens.shape)
        with taker:
            model.run(n, tokens, state, head=False)
        if taker.rows is None:
            raise ValueError(f"nothing is multiplied with {parameter}: --sequential cannot correct it")
        return taker.rows

    def experts(self, model, n, tokens, state, parameter, index):
        taker = _ExpertTaker(model.model, parameter, self.first_tokens, index)
        taker.begin(*tokens.shape)
        try:
            with taker:
                model.run(n, tokens, state, head=False)
        finally:
            taker.close()
        return taker.taken()


def _routing(args, kwargs):
    """The experts of each token [tokens, k], among the arguments of a module of experts."""
    for value in [*args, *kwargs.values()]:
        if isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32):
            return value
    return None


def _hidden(args, kwargs):
    """The tokens that come into a module of experts, [tokens, channels]."""
    for value in [*args, *kwargs.values()]:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value.reshape(-1, value.shape[-1])
    return None


def _is_weights(value, index):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == index.shape


def _routed(rows, kept):
    """Some families hand all tokens to every expert, those that are not its own as zeros."""
    some = rows.any(1)
    return rows[some], kept if kept is None else kept[some]


# ---- Text ------------------------------------------------------------------------------------------------------------


def _records(path, tokenizer):
    """Tokens of a file, a text or a line of JSON at a time."""
    if not path.endswith((".jsonl", ".ndjson")):
        with open(path, encoding="utf-8") as file:
            while part := file.read(1 << 20):
                part += file.readline()
                yield tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        return
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if isinstance(record.get("messages"), list):
                    tokens = tokenizer.apply_chat_template(record["messages"], tokenize=True, return_dict=False)
                elif not isinstance(record["text"], str):
                    raise ValueError("its `text` is no string")
                else:
                    tokens = tokenizer(record["text"], add_special_tokens=False, verbose=False).input_ids
            except Exception as error:  # templates raise what they like
                is_other = isinstance(error, (AttributeError, KeyError))
                what = "it has neither `messages` nor `text`" if is_other else error
                raise ValueError(f"{path}:{number}: {what}") from error
            yield tokens + ([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])


def _windows(path, tokenizer, length, most):
    """The first `most` windows of a file, one behind the other; each begins as the tokenizer begins a text."""
    first = tokenizer("a", add_special_tokens=True).input_ids[:1]
    first = first if first and first[0] == tokenizer.bos_token_id else []
    found, left, own = [], [], length - len(first)
    try:
        for tokens in _records(path, tokenizer):
            left += tokens
            at = 0
            while len(left) - at >= own and len(found) < most:
                found.append(first + left[at:at + own])
                at += own
            left = left[at:]
            if len(found) == most:
                break
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is not text in UTF-8: {error.reason}") from error
    return found


def token_batches(directory, paths, length, sequences):
    """`sequences` windows of `length` tokens [sequences, length], in turns from the files; fewer where text ends. Where
    there are more files than windows, windows are shorter, so that all have a share."""
    import transformers
    if sequences < len(paths):
        length, sequences = max(1, length * sequences // len(paths)), len(paths)
    with streaming.naming(directory, "no tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    cut = [_windows(os.fspath(path), tokenizer, length, sequences) for path in paths]
    turns = [part[i] for i in range(sequences) for part in cut if i < len(part)][:sequences]
    if not turns:
        raise ValueError(f"{', '.join(map(os.fspath, paths))}: less text than one sequence of {length} tokens")
    return torch.tensor(turns)


def random_batches(config, length, sequences, seed=0):
    """Without text: tokens drawn from the vocabulary."""
    size = config.get_text_config().vocab_size
    return torch.randint(0, size, (sequences, length), generator=torch.Generator().manual_seed(seed))


# ---- Files -----------------------------------------------------------------------------------------------------------


def _write_safely(path, write):
    """`path` is there when it is whole: write(other path) first."""
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def _save(path, tensors, metadata):
    """A safetensors file whose bytes depend on its content alone: the package's writer draws the order of metadata."""
    kinds = {torch.int64: "I64", torch.float32: "F32"}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, at = {"__metadata__": dict(sorted(metadata.items()))}, 0
    for name in order:
        value = tensors[name]
        end = at + value.numel() * value.element_size()
        header[name] = {"dtype": kinds[value.dtype], "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(other):
        with open(other, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write(memoryview(tensors[name].contiguous().numpy()).cast("B"))

    _write_safely(path, write)


def _lock(path):
    """The descriptor of a file that nobody else has locked; its directory is made, and may be gone in between."""
    directory = os.path.dirname(path)
    while True:
        try:
            os.makedirs(directory, exist_ok=True)
        except FileExistsError:  # said of one that is removed at this moment, too
            if os.path.lexists(directory) and not os.path.isdir(directory):
                raise
            continue
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # file systems without locks must do without
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    os.close(file)
                    raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
            os.close(file)


class _Partial:
    """The directory STATS.partial: statistics by layer, and the states that the next layer begins with. What is in it
    is of one model, one text and one set of options, and of one process at a time."""

    def __init__(self, out, identity, restart):
        self.path, self.identity = f"{out}.partial", json.dumps(identity, sort_keys=True, indent=1)
        try:
            self.lock = _lock(os.path.join(self.path, "lock"))
        except BlockingIOError:
            raise ValueError(f"{self.path}: another run is writing here: wait for it, "
                             "or choose another output") from None
        try:
            self._open(restart)
        except BaseException:
            os.close(self.lock)
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.lock)
        with contextlib.suppress(OSError):  # where a file that is open keeps its directory (NFS)
            os.rmdir(self.path)

    def _open(self, restart):
        note = os.path.join(self.path, "run.json")
        if restart or not os.path.exists(note):  # without its note it is of no run, but left of one that was removed
            self._clear()
        else:
            with open(note, "rb") as file:
                if file.read() != self.identity.encode():
                    raise ValueError(f"{self.path} is of another run (model, text or options); --restart discards it")
        _write_safely(note, self._write_identity)

    def _write_identity(self, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.identity)

    def _layer(self, n):
        return os.path.join(self.path, f"layer-{n:05d}.safetensors")

    def done(self):
        """How many layers are there."""
        n = 0
        while os.path.exists(self._layer(n)):
            n += 1
        return n

    def states(self, limit, n, stream=""):
        """The states after layer n, of a stream. Two generations are there at a time."""
        return streaming.States(limit, os.path.join(self.path, f"states-{n:05d}{stream}"))

    def finish_layer(self, n, tensors, inputs):
        _save(self._layer(n), tensors, {"inputs": json.dumps(inputs)})
        for stream in ("", HAT):
            shutil.rmtree(os.path.join(self.path, f"states-{n - 1:05d}{stream}"), ignore_errors=True)

    def layers(self):
        for n in range(self.done()):
            with streaming.opened(self._layer(n)) as file:
                try:
                    inputs = dict(json.loads(file.metadata()["inputs"]))
                except (TypeError, KeyError, ValueError):
                    raise ValueError(f"{self._layer(n)}: it is no layer of a run; --restart discards it") from None
                yield {key: file.get_tensor(key) for key in file.keys()}, inputs

    def _clear(self):
        """The note goes first: a rest without it is not believed. The lock stays."""
        names = [name for name in os.listdir(self.path) if name not in ("run.json", "lock")]
        for name in ["run.json", *names]:
            path = os.path.join(self.path, name)
            with contextlib.suppress(OSError):
                os.remove(path)
            shutil.rmtree(path, ignore_errors=True)

    def remove(self):
        """Whoever waits for the lock finds that it is gone, and makes another directory."""
        self._clear()
        with contextlib.suppress(OSError):
            os.remove(os.path.join(self.path, "lock"))
            os.rmdir(self.path)


# ---- All of it -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Options:
    """What main() takes, by its names."""

    device: str = "cpu"
    dtype: torch.dtype = None
    batch: int = 1
    hessians: str = None
    all_experts: bool = False
    max_memory: float = 1.0
    first_tokens: bool = None  # None: where there are fewer than ENOUGH
    restart: bool = False
    imatrix: str = None
    quantize: str = None  # a directory: write the quantized model too
    how: dict = dataclasses.field(default_factory=dict)  # options of nib.quantize_checkpoint, for that
    sequential: bool = False
    budget: float = 0.0  # bits of a quantized weight; 0: none
    budget_tokens: int = 8192  # that units are measured on
    budget_formats: tuple = ("fp8",)  # of budget.FORMATS: what units may become
    fold_search: bool = False  # of the exponent by which it is folded
    force: bool = False  # replace what is at `quantize`
    tokens_sha256: str = ""  # of the tokens: set by calibrate()


def _module(tensor):
    return tensor.removesuffix(".weight")


def _named(model, watch):
    """The sums under the checkpoint's names: [(sums, its module, all modules that take it)]."""
    takers = {}
    for parameter, group in watch.group.items():
        takers.setdefault(group, []).extend(map(_module, model.sources(parameter) or [parameter]))
    for group, modules in takers.items():
        sums = watch.sums[group]
        sums.name = modules[0]
        yield sums, modules


def _linears_outside(model):
    """Weights of linear layers that are in no decoder layer, nor the head."""
    for name in model.outside:
        module = model.model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, torch.nn.Linear) and name.endswith(".weight"):
            yield name, module.weight


def _watch_batches(model, n, watch, batches, before, after, tell):
    for b, tokens in enumerate(batches):
        watch.begin(*tokens.shape)
        state = before[b] if n else None
        with watch:
            after[b] = model.run(n, tokens, state, head=False)
        tell(min(n, len(model) - 1), b + 1)


def _run_layer(model, n, batches, before, after, options, tell):
    """Statistics of layer n: tensors, and {module: input}. What stands before the layers is watched with the first."""
    with contextlib.ExitStack() as stack:
        parameters = list(_linears_outside(model)) if n in (0, len(model)) else []
        if n < len(model):
            layer, name = stack.enter_context(model.loaded(n)), model.layer(n)[1]
            parameters += [(f"{name}.{key}", value) for key, value in layer.named_parameters()]
        wanted = "experts" if options.sequential and options.how.get("gptq") else bool(options.hessians)
        watch = _Watch(parameters, wanted, options.all_experts, options.first_tokens)
        stack.callback(watch.close)
        if n < len(model):
            watch.open(layer, name)
        _watch_batches(model, n, watch, batches, before, after, tell)
    tensors, inputs, hessians = {}, {}, {}
    for sums, modules in _named(model, watch):
        tensors.update(sums.tensors())
        inputs.update(dict.fromkeys(modules, sums.name))
        if sums.hessian is not None:
            hessians.update(sums.packed_hessian())
    if hessians:
        os.makedirs(options.hessians, exist_ok=True)
        _save(os.path.join(options.hessians, f"stats-of-layer-{n:05d}.safetensors"), hessians,
              {"format": "nib-stats-1", "inputs": json.dumps(inputs), "tokens_sha256": options.tokens_sha256})
    return tensors, inputs


def _identity(model, tokens, options):
    chosen = {key: str(value) for key, value in dataclasses.asdict(options).items()
              if key not in ("max_memory", "restart", "imatrix", "force", "tokens_sha256")}
    return {"model": os.path.abspath(model.directory), "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            "shape": list(tokens.shape), "options": chosen, "dtype": str(model.dtype),
            "files": [[path, os.path.getsize(path), os.stat(path).st_mtime_ns]
                      for path in [os.path.join(model.directory, "config.json"), *model.files()]]}


class _Quantizing:
    """What quantizes a model with its statistics: layer by layer where GPTQ chooses codes, at the end otherwise."""

    def __init__(self, model, partial, batches, options):
        self.model, self.partial, self.options = model, partial, options
        self.layers = layerwise.Layers(model, partial.path, options.quantize, options.how, options.sequential)
        self.own_hessians = not options.hessians
        self.streams = None
        if options.how.get("gptq"):
            options.hessians = options.hessians or self.layers.hessians()
            if options.sequential:
                self.streams = corrections.Streams(model, batches, _Takers(options.first_tokens))

    def layer(self, n, tensors, inputs, before, after, limit):
        """After the statistics of layer n; `before` and `after` are the original's states around it."""
        if n == len(self.model) or not self.options.how.get("gptq"):
            return
        if self.streams:
            self.streams.before = (before, self.partial.states(limit, n - 1, HAT) if n else None)
            self.streams.after = (after, self.partial.states(limit, n, HAT))
            self.layers.quantize_in_steps(n, tensors, inputs, _save, self.streams)
        else:
            self.layers.quantize(n, tensors, inputs, _save)
        if self.own_hessians:
            shutil.rmtree(self.layers.hessians(), ignore_errors=True)

    def finish(self, stats, tokens, told):
        """The plan; with a budget its units too."""
        options, units, folds = self.options, [], None
        step = max(1, tokens.numel() // options.budget_tokens)
        memory = int(options.max_memory * (1 << 30))
        if options.fold_search:
            folds = self.layers.search_fold(stats, tokens[::step], memory, told)
            self.layers.options["fold"] = layerwise.best_fold(folds) or False
        if options.budget:
            batches = tokens[::step].split(options.batch)
            units = self.layers.spend(stats, options.budget, options.budget_formats, batches, memory, told)
        plan = self.layers.finish(options.quantize, stats, resume=True, force=options.force,
                                  fp8=budget.weights_of(units, "fp8"), plain=budget.weights_of(units, "bf16"))
        if folds:
            plan["folds"], plan["fold"] = folds, self.layers.options["fold"]
        if units:
            plan["units"] = [dataclasses.asdict(unit) for unit in units]
            said = os.path.join(options.quantize, "nib-budget.json")
            _write_safely(said, lambda path: _write_json(path, plan["units"]))
        return plan


def _write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


def _statistics(model, tokens, partial, options, metadata):
    """Of all layers: tensors, and what the file says of them."""
    tensors, inputs = {}, {}
    for found, takers in partial.layers():
        tensors.update(found)
        inputs.update(takers)
    return tensors, {"format": "nib-stats-1", "model": os.path.abspath(model.directory), "tokens": str(tokens.numel()),
                     "sequence_length": str(tokens.shape[1]), "first_tokens": str(options.first_tokens).lower(),
                     "tokens_sha256": options.tokens_sha256, **(metadata or {}), "inputs": json.dumps(inputs)}


def _calibrate(model, tokens, out, options, metadata, partial, progress, told):
    batches = tokens.split(options.batch)
    quantizing = _Quantizing(model, partial, batches, options) if options.quantize else None
    start = partial.done()
    limit = int(options.max_memory * (1 << 30) / (4 if options.sequential else 2))  # generations, streams
    states = partial.states(limit, start - 1) if start else None

    def tell(n, b):
        if progress:
            progress(n, len(model), b, len(batches))

    last = len(model) + any(True for _ in _linears_outside(model))  # which may run behind the layers
    for n in range(start, last):
        after = partial.states(limit, n)
        found = _run_layer(model, n, batches, states, after, options, tell)
        if quantizing:
            quantizing.layer(n, *found, states, after, limit)
        partial.finish_layer(n, *found)
        states = after
    tensors, about = _statistics(model, tokens, partial, options, metadata)
    stats = out or os.path.join(partial.path, "stats")
    _save(stats, tensors, about)
    if options.imatrix:
        texts, left = json.loads(about.get("text", "[]")), []
        _write_safely(options.imatrix, lambda path: left.extend(
            imatrix.write(path, tensors, json.loads(about["inputs"]), texts, *tokens.shape)))
        about["not_in_imatrix"] = left
    if quantizing:
        about["plan"] = quantizing.finish(stats, tokens, told)
    partial.remove()
    return tensors, about


def calibrate(directory, tokens, out, options=None, metadata=None, progress=None, told=None):
    """Statistics of a model's inputs over tokens [sequences, length], written to `out` (None, where the model is
    quantized with them: nowhere). `progress(layer, layers, batch, batches)` is called after each batch. What an
    interrupted call left in `out`.partial is taken up again. Returns the tensors, and what is said of them: the
    metadata, and "plan" of the quantization. `told(layer, layers)` is called while a budget is measured."""
    options = dataclasses.replace(options or Options())
    if options.first_tokens is None:
        options.first_tokens = tokens.numel() < ENOUGH
    model = streaming.Streamed(directory, options.device, options.dtype, experts="eager")
    identity = _identity(model, tokens, options)
    options.tokens_sha256 = identity["tokens"]
    with _Partial(out or options.quantize, identity, options.restart) as partial:
        return _calibrate(model, tokens, out, options, metadata, partial, progress, told)


# ---- The command -----------------------------------------------------------------------------------------------------


_command = Command("calibrate")


class _Progress:
    """A line on a terminal; elsewhere one for each layer."""

    def __init__(self, quiet):
        self.quiet, self.begin, self.first, self.terminal = quiet, time.monotonic(), None, sys.stderr.isatty()

    def __call__(self, n, layers, b, batches):
        done = n * batches + b
        if self.first is None:
            self.first = done - 1  # an earlier process did the rest
        passed = time.monotonic() - self.begin
        left = passed / (done - self.first) * (layers * batches - done)
        if self.quiet or not (self.terminal or b == batches):
            return
        line = f"layer {n + 1} of {layers}, batch {b} of {batches}, {passed:.0f} s, about {left:.0f} s left"
        end = "" if self.terminal and done < layers * batches else "\n"
        print(f"\r{line}\x1b[K" if self.terminal else line, end=end, file=sys.stderr, flush=True)


def _parse(arguments):
    parser = _command.parser(__doc__.split("\n\n")[0])
    parser.add_argument("model", metavar="MODEL", help="directory of safetensors with config.json")
    parser.add_argument("--text", metavar="FILE", nargs="+", default=[], action="extend",
                        help="plain text, or JSON lines (.jsonl) with `text` or `messages`; none: random tokens")
    parser.add_argument("--out", metavar="STATS", help="safetensors file of statistics")
    parser.add_argument("--quantize", metavar="OUT", help="write the model in NVFP4, as nib quantize --imatrix does")
    parser.add_argument("--gptq", action="store_true", help="choose its codes by GPTQ, layer by layer")
    parser.add_argument("--sequential", action="store_true",
                        help="GPTQ on what is quantized so far, making up for what it lost")
    parser.add_argument("--damp", metavar="X", type=number(0), default=0.1, help="of GPTQ, of the mean of the diagonal")
    parser.add_argument("--fold", action="store_true", help="move scales of channels into norms")
    parser.add_argument("--fold-exponent", metavar="A", type=number(0, 1),
                        help="the same by E[x^2]^(A/2) (default 0.25)")
    parser.add_argument("--fold-search", action="store_true", help="the same by the exponent with the least KL")
    parser.add_argument("--format", choices=["compressed-tensors", "modelopt"], default="compressed-tensors",
                        help="of OUT")
    parser.add_argument("--scheme", choices=["nvfp4a16", "nvfp4"], default="nvfp4a16",
                        help="weights only, or activations too")
    parser.add_argument("--budget", metavar="BITS", type=float, default=0.0,
                        help="of a quantized weight, from 4.5: those in FP8 that are worth most by KL; 0: none")
    parser.add_argument("--budget-formats", metavar="F", nargs="+", choices=budget.FORMATS, default=["fp8"],
                        help="what they may become: fp8, bf16 (as they are), or either")
    parser.add_argument("--budget-tokens", metavar="N", type=positive, default=8192, help="to measure that on")
    parser.add_argument("--force", action="store_true", help="replace OUT")
    parser.add_argument("--imatrix", metavar="FILE", help="write llama.cpp's imatrix (GGUF) too")
    parser.add_argument("--tokens", metavar="N", type=positive, default=131072, help="of text in all")
    parser.add_argument("--sequence-length", metavar="N", type=positive, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", metavar="N", type=positive, default=1, help="sequences at a time")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="compute in it; none: the model's")
    parser.add_argument("--hessians", metavar="DIRECTORY", help="write means of x x^T too, one file for a layer")
    parser.add_argument("--all-experts", action="store_true",
                        help="take statistics of every expert from all tokens (outputs stay the router's)")
    parser.add_argument("--max-memory", metavar="GB", type=number(0), default=1.0,
                        help="of hidden states; more is on disk")
    parser.add_argument("--seed", metavar="N", type=seed, default=0, help="of random tokens")
    parser.add_argument("--restart", action="store_true", help="discard what an interrupted run left")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser.parse_args(arguments)


def _tokens(given):
    """The tokens, and what the file says of them."""
    import transformers
    sequences = max(1, given.tokens // given.sequence_length)
    if given.text:
        tokens = token_batches(given.model, given.text, given.sequence_length, sequences)
        if len(tokens) < sequences:
            _command.say(f"text for {tokens.numel()} tokens only")
        sums = {os.path.basename(path): _sha256(path) for path in given.text}
        return tokens, {"text": json.dumps(list(sums)), "text_sha256": json.dumps(sums)}
    _command.say("NO TEXT: RANDOM TOKENS. Statistics of text are better; give some with --text.")
    with streaming.naming(given.model, "transformers cannot read its config.json"):
        config = transformers.AutoConfig.from_pretrained(given.model, local_files_only=True)
    return random_batches(config, given.sequence_length, sequences, given.seed), {"text": "[]", "random_tokens": "true"}


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _say_experts(tensors):
    """Experts that the text hardly reached."""
    few = {name.removesuffix(".count"): value for name, value in tensors.items()
           if name.endswith(".count") and len(value) > 1 and int(value.min()) < FEW}
    if few:
        least = sum(int((value == 0).sum()) for value in few.values())
        total = sum(int((value < FEW).sum()) for value in few.values())
        _command.say(f"{total} inputs of experts saw fewer than {FEW} tokens, {least} of them none; more text or "
                     "--all-experts helps")


def _check_arguments(given):
    """What is wrong with them, before anything takes long."""
    for path in given.text:
        _command.file(path)
    _command.directory(given.model)
    if not given.out and not given.quantize:
        _command.fail("nothing is to be written: give --out STATS, --quantize OUT, or both")
    if given.out and os.path.isdir(given.out):
        _command.fail(f"{given.out}: is a directory")
    if not given.quantize:
        for option in ("gptq", "fold", "fold_exponent", "fold_search", "force", "budget"):
            if getattr(given, option) not in (None, False, 0):
                _command.fail(f"--{option.replace('_', '-')} goes with --quantize OUT")
    elif given.out and os.path.dirname(os.path.realpath(given.out)) == os.path.realpath(given.quantize):
        _command.fail(f"{given.out}: it would lie in the output of --quantize: choose another place")
    elif not given.force and not os.path.exists(f"{given.out or given.quantize}.partial") and \
            os.path.exists(given.quantize) and os.listdir(given.quantize) not in ([], [".nib-partial"]):
        _command.fail(f"{given.quantize}: exists; --force replaces it")
    most = 16 if "bf16" in given.budget_formats else 8
    if given.budget and not 4.5 <= given.budget <= most:
        _command.fail(f"--budget is bits of a weight, from 4.5, those of NVFP4, to {most}, not {given.budget}")
    if given.fold_search and (given.gptq or given.fold_exponent is not None):
        _command.fail("--fold-search looks for an exponent once the statistics of all layers are there: without "
                      "--gptq, which takes what it found as --fold-exponent")
    if given.sequential and not given.gptq:
        _command.fail("--sequential goes with --gptq")
    if given.gptq and not given.text:
        _command.fail("--gptq needs text (--text): by random tokens it loses more than it gains")
    _command.device(given.device)


def _options(given):
    how = {"format": given.format, "scheme": given.scheme}
    if given.scheme == "nvfp4":
        how["activations"] = "statistics"
    if given.fold or given.fold_search:
        how["fold"] = True
    if given.fold_exponent is not None:
        how["fold"] = given.fold_exponent or False
    if given.gptq:
        how.update(gptq=True, damp=given.damp)
    return Options(given.device, getattr(torch, given.dtype) if given.dtype else None, given.batch, given.hessians,
                   given.all_experts, given.max_memory, None, given.restart, given.imatrix, given.quantize,
                   how if given.quantize else {}, given.sequential, given.budget, given.budget_tokens,
                   tuple(given.budget_formats), given.fold_search, given.force)


def _say_plan(given, plan):
    """What became of the weights."""
    rows = [row for row in plan["rows"] if row["action"] in ("quantize", "fp8")]
    stay = [unit for unit in plan.get("units", []) if unit["chosen"] == "bf16"]
    elements = [plan["changed_elements"], *(unit["elements"] for unit in stay)]
    more = sum(unit["elements"] * budget.NVFP4_BITS / 8 + unit["extra_bytes"]["bf16"] for unit in stay)
    bits = 8 * (plan["changed_bytes_out"] + more) / max(sum(elements), 1)
    print(f"{given.quantize}: {len(rows)} weights quantized, {bits:.2f} bits a weight")
    for exponent, kl in plan.get("folds", {}).items():
        print(f"  folded by {exponent}: KL {kl:.5f}{', taken' if exponent == float(plan['fold']) else ''}")
    chosen = [(unit, unit["chosen"]) for unit in plan.get("units", []) if unit["chosen"] != "nvfp4"]
    for unit, format in sorted(chosen, key=lambda pair: -pair[0]["gains"][pair[1]]):
        names = unit["weights"] if len(unit["weights"]) < 4 else [unit["name"]]
        gain, size = unit["gains"][format], unit["extra_bytes"][format]
        print(f"  {format}: {shown(', '.join(names))}: KL {gain:+.5f}, {size} bytes more")
    rows = [row for row in rows if row["action"] == "quantize"]
    if not given.gptq:
        return
    for key, what in [("gptq", "by GPTQ"), ("sequential", "corrected for what was lost before")][:1 + given.sequential]:
        without = {}
        for row in rows:
            said = (row["layer"] or {}).get(key, "none: it is in no layer")
            if said.startswith("none"):
                without.setdefault(said, []).append(row["name"])
        print(f"  {len(rows) - sum(map(len, without.values()))} {what}")
        for said, names in without.items():
            print(f"  {len(names)} not, {shown(names[0])} for one: {shown(said.removeprefix('none: '))}")


def main(arguments=None):
    given = _parse(arguments)
    _check_arguments(given)
    try:
        tokens, about = _tokens(given)
        measuring = Progress(given.quiet)
        tensors, about = calibrate(given.model, tokens, given.out, _options(given), about, _Progress(given.quiet),
                                   lambda *done: measuring("what is worth it: step", *done))
    except (OSError, ValueError, RuntimeError, ImportError) as error:  # NotImplementedError is a RuntimeError
        _command.fail(error)
    except KeyboardInterrupt:
        _command.fail(f"interrupted; the same command goes on from {given.out or given.quantize}.partial")
    _say_experts(tensors)
    if about.get("not_in_imatrix"):
        left = about["not_in_imatrix"]
        _command.say(f"{given.imatrix}: llama.cpp has no name for {len(left)} modules, as {left[0]}")
    inputs = sum(name.endswith(".count") for name in tensors)
    if given.out:
        print(f"{given.out}: {inputs} inputs, {tokens.numel()} tokens")
    if given.quantize:
        _say_plan(given, about["plan"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

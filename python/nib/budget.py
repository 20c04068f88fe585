# SPDX-License-Identifier: Apache-2.0
"""Which weights are worth more than 4 bits: `python -m nib.calibrate --quantize OUT --budget BITS`.

Units are what servers fuse (q, k and v; gate and up; o; down; all experts of a layer), layer by layer. What a unit is
worth is measured: the KL of the model's next-token distributions from the original's, with all of it in NVFP4, less
that with this unit in FP8, or as it is. What gains the most for each byte is written so, until the budget is spent.
Errors of layers say little about it (docs/accuracy.md).

The model runs a layer at a time: a stream of states with everything in NVFP4, from which one for each unit and format
branches off at its layer, and one of the original.
"""
import contextlib
import dataclasses

import torch

from . import evaluate, streaming
from ._checkpoint import Weights

__all__ = ["Unit", "units_of", "measure", "choose", "FORMATS", "NVFP4_BITS"]

NVFP4_BITS = 4.5  # with the scales of blocks
FORMATS = ("fp8", "bf16")  # with a scale for each row; as the checkpoint has it


@dataclasses.dataclass
class Unit:
    """Weights that have more bits together, or not."""

    name: str  # of the first, or of the module of experts
    weights: list
    elements: int = 0
    extra_bytes: dict = dataclasses.field(default_factory=dict)  # by format
    gains: dict = dataclasses.field(default_factory=dict)  # nats, by format
    chosen: str = "nvfp4"


def units_of(plan, formats=("fp8",)):
    """The units of a plan of quantize_checkpoint, in its order."""
    found = {}
    for row in plan["rows"]:
        if row["action"] != "quantize":
            continue
        before, experts, _ = row["name"].partition(".experts.")
        name = before + ".experts" if experts else row["group"] or row["name"]
        unit = found.setdefault(name, Unit(name, [], 0, dict.fromkeys(formats, 0)))
        elements = row["rows"] * row["cols"]
        sizes = {"fp8": elements + 4 * row["rows"], "bf16": row["bytes_in"]}
        unit.weights.append(row["name"])
        unit.elements += elements
        for format in formats:
            unit.extra_bytes[format] += int(sizes[format] - elements * NVFP4_BITS / 8)
    return list(found.values())


def _steps(unit):
    """How a unit may grow: (gain for a byte, unit, format, bytes), each more than the one before, and worth less."""
    gain = size = 0
    left = sorted(unit.gains, key=unit.extra_bytes.get)
    while left:
        worth = {format: (unit.gains[format] - gain) / (unit.extra_bytes[format] - size) for format in left}
        best = max(left, key=worth.get)
        if worth[best] <= 0:
            return
        yield worth[best], unit, best, unit.extra_bytes[best] - size
        gain, size = unit.gains[best], unit.extra_bytes[best]
        left = [format for format in left if unit.extra_bytes[format] > size]


def choose(units, elements, bits):
    """Say of units what they become: quantized weights, of `elements` values in all, take `bits` each at most."""
    left, ended = (bits - NVFP4_BITS) * elements / 8, set()
    steps = [step for unit in units for step in _steps(unit)]
    for _, unit, format, more in sorted(steps, key=lambda step: (-step[0], step[1].name)):
        if more > left or unit.name in ended:
            ended.add(unit.name)  # what comes next is more than that
            continue
        unit.chosen = format
        left -= more
    return units


def weights_of(units, format):
    return [weight for unit in units if unit.chosen == format for weight in unit.weights]


class _Plain:
    """A weight of the original, scaled as a folded checkpoint has it."""

    def __init__(self, weights, name, scales, dtype):
        self.weights, self.name, (self.columns, self.rows) = weights, name, scales
        self.dtype, self.turned = dtype, False

    def __getitem__(self, _):
        values = torch.from_numpy(self.weights.read(self.name))
        values = values if self.rows is None else values / self.rows[:, None]
        values = (values if self.columns is None else values * self.columns).to(self.dtype)
        return values.t().contiguous() if self.turned else values


@contextlib.contextmanager
def _raised(source, others):
    """A source of packed weights, with others in place of some of them."""
    before = {tensor: source.weights[tensor] for tensor in others}
    for tensor, other in others.items():
        other.turned = before[tensor].turned
    source.weights.update(others)
    try:
        yield
    finally:
        source.weights.update(before)


class _Streams:
    """States by stream and batch, of one layer after the other."""

    def __init__(self, model, batches, memory):
        self.model, self.batches = model, batches
        self.states = streaming.States(memory)

    def advance(self, n, stream, origin=None):
        for b, tokens in enumerate(self.batches):
            before = self.states[(origin or stream, b)] if n else None
            self.states[(stream, b)] = self.model.run(n, tokens, before)

    def score(self, score, stream, b, wanted):
        """Add up a batch, whose logits of the original are `wanted`; the head must be loaded."""
        got = self.model.run(len(self.model), self.batches[b], self.states[(stream, b)])
        for row, *logits in zip(self.batches[b], wanted, got):
            evaluate.score_window(score, *(table[:-1] for table in logits), row)
        del self.states[(stream, b)]


def _alternatives(unit, format, source, high, weights, scales):
    """What the weights of a unit are in another format, {tensor: it}; None: not known."""
    names = {f"{weight}.weight": weight for weight in unit.weights}
    if not all(tensor in source.weights for tensor in names):
        return None
    if format == "bf16":
        return {tensor: _Plain(weights, name, scales.get(name, (None, None)), source.dtype)
                for tensor, name in names.items()}
    found = {tensor: high.weights.get(tensor) for tensor in names}
    return None if None in found.values() else found


def measure(model, low, high, units, batches, activations, memory=1 << 30, progress=None):
    """Set the gains of each unit. `model` is a streaming.Streamed of the original, `low` and `high` are directories
    with all of it in NVFP4 and in FP8, `batches` are of tokens; returns the KL with all in NVFP4.
    `progress(layer, layers)` after each layer."""
    with Weights(model.directory) as weights:
        return _measure(model, low, high, weights, units, batches, activations, memory, progress)


def _measure(model, low, high, weights, units, batches, activations, memory, progress):
    from .torch.pretrained import PackedSource
    source, scales = PackedSource(low, activations), streaming.fold_scales(low)
    packed = streaming.Streamed(low, model.device, model.dtype, experts="eager", source=source)
    above = PackedSource(high, activations) if any("fp8" in unit.extra_bytes for unit in units) else None
    if above:
        above.dtype = packed.dtype
    by_layer = {}
    for unit in units:
        layer = next((n for n in range(len(model)) if unit.name.startswith(_prefix(model, n))), None)
        for format in unit.extra_bytes if layer is not None else []:
            others = _alternatives(unit, format, source, above, weights, scales)
            if others:
                by_layer.setdefault(layer, {})[(unit.name, format)] = others
    original, streams = _Streams(model, batches, memory // 2), _Streams(packed, batches, memory // 2)
    branched = []
    for n in range(len(model)):
        with model.loaded(n):
            original.advance(n, "original")
        for stream, others in by_layer.get(n, {}).items():
            with _raised(source, others), packed.loaded(n):
                streams.advance(n, stream, "base")
        with packed.loaded(n):
            for stream in [*branched, "base"]:
                streams.advance(n, stream)
        branched += by_layer.get(n, {})
        if progress:
            progress(n + 1, len(model))
    with model.loaded(len(model)), packed.loaded(len(model)):
        scores = {stream: evaluate.Score(str(stream)) for stream in ["base", *branched]}
        for b, batch in enumerate(batches):
            wanted = model.run(len(model), batch, original.states[("original", b)])
            for stream, score in scores.items():
                streams.score(score, stream, b, wanted)
    gains = {stream: score.kl / score.positions for stream, score in scores.items()}
    base = gains.pop("base")
    for unit in units:
        unit.gains = {format: base - gains.get((unit.name, format), base) for format in unit.extra_bytes}
    return base


def _prefix(model, n):
    """What the checkpoint's tensors of a layer begin with."""
    name = f"{model.layer(n)[1]}."
    for parameter in model.model.state_dict():
        if parameter.startswith(name) and model.sources(parameter):
            before, number, _ = model.sources(parameter)[0].partition(f".{n}.")
            return before + number
    return name

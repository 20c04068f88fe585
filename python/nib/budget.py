# SPDX-License-Identifier: Apache-2.0
"""Which weights are worth more than 4 bits: `python -m nib.calibrate --quantize OUT --budget BITS`.

Units are what servers fuse (q, k and v; gate and up; o; down), layer by layer. What a unit is worth is measured: the KL
of the model's next-token distributions from the original's, with all of it in NVFP4, less that with this unit in FP8.
Units with the most of it for each byte are written in FP8, until the budget is spent. Errors of layers say little about
it (docs/accuracy.md).

The model runs a layer at a time: a stream of states with everything in NVFP4, from which one for each unit branches off
at its layer, and one of the original. Experts stay in NVFP4.
"""
import contextlib
import dataclasses

import torch

from . import evaluate, streaming

__all__ = ["Unit", "units_of", "measure", "choose", "NVFP4_BITS"]

NVFP4_BITS = 4.5  # with the scales of blocks


@dataclasses.dataclass
class Unit:
    """Weights that have more bits together, or not."""

    name: str  # of the first
    weights: list
    elements: int
    extra_bytes: int  # in FP8, with a scale for each row
    gain: float = 0.0  # nats
    chosen: bool = False


def units_of(plan):
    """The units of a plan of quantize_checkpoint, in its order; experts are left out."""
    found = {}
    for row in plan["rows"]:
        if row["action"] == "quantize" and ".experts." not in row["name"]:
            unit = found.setdefault(row["group"] or row["name"], Unit(row["group"] or row["name"], [], 0, 0))
            elements = row["rows"] * row["cols"]
            unit.weights.append(row["name"])
            unit.elements += elements
            unit.extra_bytes += int(elements * (8 - NVFP4_BITS) / 8) + 4 * row["rows"]
    return list(found.values())


def choose(units, elements, bits):
    """Mark the units to write in FP8: quantized weights, of `elements` values in all, take `bits` each at most."""
    left = (bits - NVFP4_BITS) * elements / 8
    for unit in sorted(units, key=lambda unit: (-unit.gain / unit.extra_bytes, unit.name)):
        unit.chosen = unit.gain > 0 and unit.extra_bytes <= left
        left -= unit.extra_bytes if unit.chosen else 0
    return [weight for unit in units if unit.chosen for weight in unit.weights]


@contextlib.contextmanager
def _raised(source, other, unit):
    """A source of packed weights, those of a unit taken from another one."""
    tensors = [f"{weight}.weight" for weight in unit.weights]
    before = {tensor: source.weights[tensor] for tensor in tensors}
    source.weights.update({tensor: other.weights[tensor] for tensor in tensors})
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


def measure(model, low, high, units, tokens, activations, memory=1 << 30, progress=None):
    """Set the gain of each unit. `model` is a streaming.Streamed of the original, `low` and `high` are directories with
    all of it in NVFP4 and in FP8; returns the KL with all in NVFP4. `progress(layer, layers)` after each layer."""
    from .torch.pretrained import PackedSource
    sources = [PackedSource(directory, activations) for directory in (low, high)]
    packed = streaming.Streamed(low, model.device, model.dtype, experts="eager", source=sources[0])
    sources[1].dtype = packed.dtype
    batches, by_layer = tokens.split(1), {}
    for unit in units:
        layer = next((n for n in range(len(model)) if unit.name.startswith(_prefix(model, n))), None)
        known = all(f"{weight}.weight" in source.weights for source in sources for weight in unit.weights)
        if layer is not None and known:
            by_layer.setdefault(layer, []).append(unit)
    original, streams = _Streams(model, batches, memory // 2), _Streams(packed, batches, memory // 2)
    branched = []
    for n in range(len(model)):
        with model.loaded(n):
            original.advance(n, "original")
        for unit in by_layer.get(n, []):
            with _raised(*sources, unit), packed.loaded(n):
                streams.advance(n, unit.name, "base")
        with packed.loaded(n):
            for stream in [*branched, "base"]:
                streams.advance(n, stream)
        branched += [unit.name for unit in by_layer.get(n, [])]
        if progress:
            progress(n + 1, len(model))
    with model.loaded(len(model)), packed.loaded(len(model)):
        scores = {stream: evaluate.Score(stream) for stream in ["base", *branched]}
        for b, batch in enumerate(batches):
            wanted = model.run(len(model), batch, original.states[("original", b)])
            for stream, score in scores.items():
                streams.score(score, stream, b, wanted)
    gains = {stream: score.kl / score.positions for stream, score in scores.items()}
    base = gains.pop("base")
    for unit in units:
        unit.gain = base - gains.get(unit.name, base)
    return base


def _prefix(model, n):
    """What the checkpoint's tensors of a layer begin with."""
    name = f"{model.layer(n)[1]}."
    for parameter in model.model.state_dict():
        if parameter.startswith(name) and model.sources(parameter):
            before, number, _ = model.sources(parameter)[0].partition(f".{n}.")
            return before + number
    return name

# SPDX-License-Identifier: Apache-2.0
"""What was lost before is made up for: `python -m nib.calibrate --quantize OUT --gptq --sequential`.

Two streams of states run through the model, x through the original and x^ through what is quantized so far. With
H = mean x^ x^^T and C = mean x x^^T of an input, W + W (C - H) (H + r I)^-1 is quantized in the place of W, which is
nearest to giving W x when x^ comes in. An expert has an H and a C of the tokens that the original's router sends to it,
in both streams: what it should give is known for these. Where they are few, what all tokens say of the layer's input
counts for gate and up, and down stays as it is.
"""
import contextlib
import dataclasses
import re

import torch

from . import streaming

__all__ = ["Streams", "Inputs", "Taken", "TOKENS"]

RIDGE = 0.1  # of the mean of H's diagonal: less fits the noise of few tokens (docs/accuracy.md)
TOKENS = 6  # for each column: of fewer, pairs of channels say more of the noise than of the model (NIB_GPTQ_TOKENS)
MOST_BYTES = 2 << 30  # of the sums of experts: the others' come from another pass


class Inputs:
    """Of pairs of rows, x of the original and x^: sums of x^ x^^T and of x x^^T."""

    def __init__(self, channels, device):
        self.hat, self.cross = (torch.zeros(channels, channels, dtype=torch.float64, device=device) for _ in range(2))
        self.count = 0

    def add(self, rows, hat):
        self.hat += hat.t() @ hat
        self.cross += rows.t() @ hat
        self.count += len(hat)

    def add_sums(self, other):
        self.hat += other.hat
        self.cross += other.cross
        self.count += other.count

    def enough(self):
        return self.count >= TOKENS * len(self.hat)

    def said(self):
        """For the plan."""
        columns = len(self.hat)
        return f"{self.count} tokens" if self.enough() else \
            f"none: {self.count} tokens, and {columns} columns need {TOKENS * columns}"

    def packed(self):
        upper = torch.triu_indices(*self.hat.shape, device=self.hat.device)
        return (self.hat[upper[0], upper[1]] / max(self.count, 1)).float().cpu()

    def corrected(self, weight):
        """W* [rows, channels] for this input, in FP32."""
        hat, cross = self.hat / self.count, self.cross / self.count
        ridge = RIDGE * hat.diagonal().mean() * torch.eye(len(hat), dtype=hat.dtype, device=hat.device)
        whole = weight.to(hat)
        if not float(hat.diagonal().mean()):
            return weight.float()
        change = torch.linalg.solve(hat + ridge, (whole @ (cross - hat)).t()).t()  # H is its own transpose
        return (whole + change).float().cpu()


@dataclasses.dataclass
class Taken:
    """What came into the products with a stack of experts."""

    rows: dict  # {expert: [tokens, channels]}
    index: torch.Tensor  # [tokens, k], the experts of each token; None: not known
    paired: bool  # two runs with one index have the same tokens in the same rows
    whole: torch.Tensor  # what came into the module, where the stack reads that; None: it does not


@dataclasses.dataclass
class Stack:
    """The experts of a layer that one parameter holds."""

    parameter: str
    experts: int
    turned: bool  # its matrices are [inputs, outputs], where their shape does not tell
    tensors: list  # of the checkpoint: one for all, or some for each in their order
    names: dict  # {expert: weights of it}


@contextlib.contextmanager
def _instead(source, directory):
    """A source whose tensors are those of a directory, where it has them."""
    before = source.files
    source.files = {**before, **streaming.Source(directory).files} if directory else before
    try:
        yield
    finally:
        source.files = before


class Streams:
    """Two streams of states through a model: of the original, and of what is quantized so far. `take` sees inputs
    without the rows that do not count: matrix(model, n, tokens, state, parameter) those of a matrix, and experts(...,
    index) those of a stack, Taken. `before` and `after` are the states around the layer at work, pairs by batch."""

    def __init__(self, model, batches, take):
        self.model, self.batches, self.take = model, batches, take
        self.hat = streaming.Streamed(model.directory, model.device, model.dtype, experts="eager",
                                      source=streaming.Source(model.directory))
        self.before = self.after = None

    def _parameters(self, layer, modules):
        """(parameter, value, its tensors) of those modules."""
        prefix = f"{self.model.layer(layer)[1]}."
        for parameter, value in self.model.model.state_dict().items():
            sources = self.model.sources(parameter)
            if parameter.startswith(prefix) and sources and sources[0].removesuffix(".weight") in modules:
                yield parameter, value, sources

    def matrices(self, layer, modules):
        """{tensor: parameter} of those modules that are one matrix in the file and in the model."""
        return {sources[0]: parameter for parameter, value, sources in self._parameters(layer, modules)
                if value.ndim == 2 and len(sources) == 1}

    def stack(self, layer, modules, weights):
        """The stack of experts that those modules are, some of which are among `weights`, {name: tensor}."""
        for parameter, value, sources in self._parameters(layer, modules):
            names = {}
            for name, tensor in weights.items():
                number = re.search(r"\.experts\.(\d+)\.", name)
                if tensor in sources and number:
                    names.setdefault(int(number[1]), []).append(name)
            if value.ndim == 3 and names and (len(sources) == 1 or len(sources) % value.shape[0] == 0):
                owner = self.model.model.get_submodule(parameter.rpartition(".")[0])
                return Stack(parameter, value.shape[0], bool(getattr(owner, "is_transposed", False)), sources, names)
        return None

    def _state(self, which, layer, batch):
        return self.before[which][batch] if layer else None

    @contextlib.contextmanager
    def _loaded(self, layer, current):
        with self.model.loaded(layer), _instead(self.hat.source, current), self.hat.loaded(layer):
            yield

    def compare(self, layer, parameter, current, scales):
        """Sums of the two inputs of a product, where the second layer is that of the directory `current`; `scales` is
        what its input was divided by."""
        sums = None
        with self._loaded(layer, current):
            for b, tokens in enumerate(self.batches):
                rows, hat = (self.take.matrix(model, layer, tokens, self._state(i, layer, b), parameter).float()
                             for i, model in enumerate((self.model, self.hat)))
                sums = sums or Inputs(rows.shape[1], rows.device)
                sums.add(rows, _times(hat, scales))
        return sums

    def advance(self, layer, current):
        """The second stream through the layer as it is now."""
        with _instead(self.hat.source, current), self.hat.loaded(layer):
            for b, tokens in enumerate(self.batches):
                self.after[1][b] = self.hat.run(layer, tokens, self._state(1, layer, b), head=False)

    # ---- Experts ----

    def correct_experts(self, layer, stack, current, scales, replaced, notes):
        """The experts of a stack, some at a time; `scales` has what the input of each was divided by. Corrected
        tensors go to `replaced` in the dtype that they have, and what is said of weights to `notes`. Returns the sums
        of the layer's input, or of all experts'; None: it is not known which tokens an expert has."""
        every = [name for names in stack.names.values() for name in names]
        pooled, first, at_once = None, 0, 1
        while first < stack.experts:
            found = self._compare_experts(layer, stack, current, scales, first)
            if found is None:
                notes.update(dict.fromkeys(every, "none: which tokens its experts have is not known"))
                return None
            sums, whole, at_once = found
            pooled = pooled or whole or Inputs(len(next(iter(sums.values())).hat), self.model.device)
            for expert, own in sums.items():
                used = own if own.enough() or whole is None else pooled
                notes.update(dict.fromkeys(stack.names.get(expert, []),
                                           used.said() + (" of the layer" if used is pooled and used.enough() else "")))
                if used.enough() and expert in stack.names:
                    self._replace(stack, expert, used, replaced)
                if whole is None:
                    pooled.add_sums(own)
            first += at_once
        return pooled

    def _compare_experts(self, layer, stack, current, scales, first):
        """Sums by expert, from `first` on, as many as are kept at a time; of what came into the module, if the stack
        reads that; and their number."""
        sums, whole, at_once = {}, None, 1
        with self._loaded(layer, current):
            for b, tokens in enumerate(self.batches):
                given = layer, tokens, self._state(0, layer, b), stack.parameter
                taken = self.take.experts(self.model, *given, None)
                hat = self.take.experts(self.hat, layer, tokens, self._state(1, layer, b), stack.parameter, taken.index)
                if not taken.paired or not hat.paired or not taken.rows:
                    return None
                channels, device = next(iter(taken.rows.values())).shape[1], self.model.device
                at_once = max(1, MOST_BYTES // (16 * channels * channels))
                for expert in range(first, min(first + at_once, stack.experts)):
                    own = sums.setdefault(expert, Inputs(channels, device))
                    if expert in taken.rows:
                        own.add(*_pairs(taken.rows[expert], _times(hat.rows[expert], scales.get(expert))))
                if taken.whole is not None:
                    whole = whole or Inputs(channels, device)
                    whole.add(taken.whole, _times(hat.whole, next(iter(scales.values()), None)))
        return sums, whole, at_once

    def _replace(self, stack, expert, sums, replaced):
        """The tensors of an expert, or its part of the one tensor that all are in."""
        alone = len(stack.tensors) == 1
        each = len(stack.tensors) // stack.experts
        own = stack.tensors if alone else stack.tensors[expert * each:(expert + 1) * each]
        with self.model.source.slices(own) as slices:
            for tensor in own:
                whole = replaced[tensor] if tensor in replaced else slices[tensor][...].clone()
                matrix = whole[expert] if alone else whole
                columns = len(sums.hat)
                turned = alone and (stack.turned if matrix.shape == (columns, columns) else matrix.shape[1] != columns)
                matrix.copy_(sums.corrected(matrix.t()).t() if turned else sums.corrected(matrix))
                replaced[tensor] = whole


def _times(rows, scales):
    return rows if scales is None else rows * scales.to(rows.device)


def _pairs(rows, hat):
    """Some families hand all tokens to every expert, those that are not its own as zeros."""
    both = rows.any(1) & hat.any(1)
    return rows[both], hat[both]

# SPDX-License-Identifier: Apache-2.0
"""checkpoint: forget activations, and compute them again in the backward pass. With it, named states of random
generators."""
import contextlib

import torch
import torch.utils.checkpoint

from . import quantization
from .quantization import FP8GlobalStateManager, recompute


def checkpoint(function, *args, use_reentrant=True, distribute_saved_activations=False, get_rng_state_tracker=None,
               tp_group=None, context_fn=None, determinism_check="default", debug=False, preserve_rng_state=True,
               **kwargs):
    """function(*args, **kwargs), whose activations are computed again for the backward pass: in the autocast of the
    first time, and with its scales where scaling is delayed."""
    if distribute_saved_activations:
        raise NotImplementedError("checkpoint of nib works alone: distribute_saved_activations is not possible")
    on = FP8GlobalStateManager.get_autocast_state()
    times = 0

    def run(*args, **kwargs):
        nonlocal times
        again, times = times > 0, times + 1
        before = recompute.enabled, recompute.phase, FP8GlobalStateManager.get_autocast_state()
        recompute.enabled, recompute.phase = True, again
        if again:
            FP8GlobalStateManager.set_autocast_state(on)
        try:
            return function(*args, **kwargs)
        finally:
            recompute.enabled, recompute.phase, state = before
            if again:
                FP8GlobalStateManager.set_autocast_state(state)
            else:  # a layer in here is the first, should this be the first region
                quantization.current().is_first_fp8_module = False

    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if use_reentrant:
        if kwargs:
            return torch.utils.checkpoint.checkpoint(lambda *args: run(*args, **kwargs), *args, use_reentrant=True,
                                                     preserve_rng_state=preserve_rng_state)
        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True, preserve_rng_state=preserve_rng_state)
    options = {} if context_fn is None else {"context_fn": context_fn}
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state,
                                             determinism_check=determinism_check, debug=debug, **options, **kwargs)


class CudaRNGStatesTracker:
    """States of the random generator by name, by the name that TransformerEngine has for it: each `with
    tracker.fork(name)` goes on where the last one of that name ended."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.states_, self.seeds_ = {}, set()

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def add(self, name, seed):
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

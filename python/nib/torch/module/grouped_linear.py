# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear, a Linear for each range of an input's rows, and what pads such ranges."""
import torch

from .. import quantization
from ..identity_tensor import IdentityQuantizer
from ..quantization import FP8GlobalStateManager, get_align_size_for_quantization
from ..quantized_tensor import eager
from .base import WeightGradStore, activation_dtype, check_alone, init_method_constant
from .linear import LinearLayer, linear


class GroupedLinear(LinearLayer):
    """num_gemms weights, as experts of a mixture have them: weight i multiplies the next m_splits[i] rows."""

    def __init__(self, num_gemms, in_features, out_features, *, fuse_wgrad_accumulation=False,
                 get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
                 params_dtype=None, device=None, delay_wgrad_compute=False, single_grouped_weight=False,
                 single_grouped_bias=False, use_grouped_tensor=None, name=None, **alone):
        super().__init__(name)
        check_alone("GroupedLinear", alone)
        if single_grouped_weight or single_grouped_bias:
            raise NotImplementedError("GroupedLinear of nib has one parameter per weight: single_grouped_weight and "
                                      "single_grouped_bias are not possible")
        self.num_gemms = self._num_gemms = num_gemms
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.fuse_wgrad_accumulation = bias, return_bias, fuse_wgrad_accumulation
        self.apply_bias, self.rng_tracker_name = bias and not return_bias, rng_tracker_name
        self.save_original_input = alone.get("save_original_input", False)  # a wish about memory; bits are the same
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.weight_names = [f"weight{i}" for i in range(num_gemms)]
        self.bias_names = [f"bias{i}" for i in range(num_gemms)]
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        for i in range(num_gemms):
            self.new_parameter(f"weight{i}", (out_features, in_features), dtype, device, init_fn=init_method,
                               get_rng_state_tracker=get_rng_state_tracker, fp8_meta_index=3 * i + 1)
            if bias:
                self.new_parameter(f"bias{i}", (out_features,), dtype, device, init_fn=init_method_constant(0.0))
            else:
                self.register_parameter(f"bias{i}", None)
        self.initialize(device)

    def get_quantizer_roles(self, *, fwd, num_quantizers):
        return self.linear_roles([self.name], fwd, num_quantizers, "grouped_linear")

    def extra_repr(self):
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, " \
               f"bias={self.use_bias}"

    def forward(self, inp, m_splits, is_first_microbatch=None):
        """m_splits: how many rows each weight multiplies, together all of them."""
        counts = [int(n) for n in m_splits]
        if len(counts) != self.num_gemms:
            raise AssertionError(f"Number of splits should match number of GEMMs: {len(counts)} and {self.num_gemms}")
        rows = inp.reshape(-1, inp.shape[-1])
        if sum(counts) != rows.shape[0]:
            raise ValueError(f"m_splits has {sum(counts)} rows, the input {rows.shape[0]}")
        dtype, weights = activation_dtype(inp, self.weight0), self._get_weight_tensors()
        results = None
        if torch.compiler.is_compiling():
            recipe = quantization.get_recipe()
            if self.in_graph(recipe, weights, is_first_microbatch):
                results = [self.multiply_in_graph(x, weight, getattr(self, f"bias{i}") if self.apply_bias else None,
                                                  recipe, dtype)
                           for i, (x, weight) in enumerate(zip(rows.split(counts), weights))]
        if results is None:
            results = self._forward(inp, rows.split(counts), weights, dtype, is_first_microbatch)
        y = torch.cat(results).view(*inp.shape[:-1], self.out_features)
        if not self.return_bias:
            return y
        return y, [getattr(self, f"bias{i}").to(dtype) for i in range(self.num_gemms)] if self.use_bias else None

    def _check_quantizers(self):
        """The members of a group are alike: all quantized, or none."""
        for name, slot in (("input", 0), ("weight", 1)):
            plain = [isinstance(q, IdentityQuantizer) for q in self.quantizers["scaling_fwd"][slot::3]]
            if any(plain) and not all(plain):
                raise ValueError(f"the {name} quantizers of a GroupedLinear mix Identity-backed and quantized members: "
                                 "all of a group are quantized, or none")

    @eager
    def _forward(self, inp, parts, weights, dtype, is_first_microbatch):
        with self.prepare_forward(inp, self.num_gemms):
            if self.fp8:
                self._check_quantizers()
            needs = torch.is_grad_enabled() and any(t.requires_grad for t in (inp, *weights))
            first, results = self.is_first(needs), []
            for i, (x, weight) in enumerate(zip(parts, weights)):
                self.calibrate(i, x)
                product = self.product(i, f"weight{i}", weight, dtype, is_first_microbatch, first=first and i == 0)
                results.append(linear(x, weight, getattr(self, f"bias{i}") if self.apply_bias else None, product))
        return results

    def backward_dw(self):
        if self.need_backward_dw():
            while self.wgrad_store.waiting:
                self.wgrad_store.pop()
            for hook in self.wgrad_accumulation_and_reduce_hooks:
                hook()


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms, align_size=None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, m_splits):
        if len(m_splits) != self.num_gemms:
            raise AssertionError("Number of splits should match number of GEMMs.")
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        return [-(-int(rows) // self.align_size) * self.align_size for rows in m_splits]


class Fp8Padding(_Padding):
    """Each range of rows with zero rows after it, up to a multiple of align_size (what the recipe of the autocast
    around the first call needs, unless given): (the padded rows, how many each range has)."""

    def forward(self, inp, m_splits):
        padded = self._padded(m_splits)
        if padded == list(m_splits):
            return inp, m_splits
        rows = inp.reshape(-1, inp.shape[-1]).split([int(n) for n in m_splits])
        return torch.cat([torch.nn.functional.pad(x, (0, 0, 0, n - x.shape[0])) for x, n in zip(rows, padded)]), padded


class Fp8Unpadding(_Padding):
    """The rows without those that Fp8Padding put in; m_splits are the counts before that."""

    def forward(self, inp, m_splits):
        padded = self._padded(m_splits)
        if padded == list(m_splits):
            return inp
        rows = inp.reshape(-1, inp.shape[-1]).split(padded)
        return torch.cat([x[:int(n)] for x, n in zip(rows, m_splits)])

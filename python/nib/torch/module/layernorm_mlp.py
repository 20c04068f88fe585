# SPDX-License-Identifier: Apache-2.0
"""LayerNormMLP: a normalization, a Linear, an activation, a Linear."""
import torch

from .. import quantization
from ..quantized_tensor import eager
from ..recompute import checkpoint as recomputed
from .base import WeightGradStore, activation_dtype, check_alone, init_method_constant
from .layernorm_linear import make_norm
from .linear import LinearLayer, linear
from .norms import ACTIVATIONS, activate, is_gated, normalize


class LayerNormMLP(LinearLayer):
    """y = act(norm(x) W1^T + b1) W2^T + b2. Gated activations have a W1 of twice ffn_hidden_size rows."""

    _num_gemms = 2

    def __init__(self, hidden_size, ffn_hidden_size, eps=1e-5, *, return_bias=False, get_rng_state_tracker=None,
                 init_method=None, bias=True, normalization="LayerNorm", activation="gelu", activation_params=None,
                 output_layer_init_method=None, fuse_wgrad_accumulation=False, params_dtype=None,
                 return_layernorm_output=False, return_layernorm_output_gathered=False, zero_centered_gamma=False,
                 device=None, delay_wgrad_compute=False, name=None, checkpoint=False, **alone):
        super().__init__(name)
        check_alone("LayerNormMLP", alone)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.activation, self.activation_params = activation, activation_params or {}
        self.use_bias, self.return_bias, self.fuse_wgrad_accumulation = bias, return_bias, fuse_wgrad_accumulation
        self.apply_bias = bias and not return_bias
        self.return_layernorm_output, self.checkpoint = return_layernorm_output, checkpoint
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        make_norm(self, hidden_size, normalization, zero_centered_gamma, dtype, device)
        self.weight_names, self.bias_names = ["fc1_weight", "fc2_weight"], ["fc1_bias", "fc2_bias"]
        shapes = ((ffn_hidden_size * (2 if is_gated(activation) else 1), hidden_size), (hidden_size, ffn_hidden_size))
        for i, (rows, cols) in enumerate(shapes):
            self.new_parameter(self.weight_names[i], (rows, cols), dtype, device, fp8_meta_index=3 * i + 1,
                               init_fn=output_layer_init_method if i else init_method,
                               get_rng_state_tracker=get_rng_state_tracker)
            if bias:
                self.new_parameter(self.bias_names[i], (rows,), dtype, device, init_fn=init_method_constant(0.0))
            else:
                self.register_parameter(self.bias_names[i], None)
        self.initialize(device)

    def get_quantizer_roles(self, *, fwd, num_quantizers):
        return self.linear_roles([f"{self.name}.fc1", f"{self.name}.fc2"], fwd, num_quantizers)

    def forward(self, inp, is_first_microbatch=None):
        """y; with it its bias (return_bias) and the normalization's output (return_layernorm_output)."""
        if torch.compiler.is_compiling():
            recipe = quantization.get_recipe()
            if self.in_graph(recipe, (self.fc1_weight, self.fc2_weight), is_first_microbatch):
                return self._in_graph(inp, recipe)
        return self._outside(inp, is_first_microbatch)

    @eager
    def _outside(self, inp, is_first_microbatch):
        if self.checkpoint and torch.is_grad_enabled():
            return recomputed(self._forward, inp, is_first_microbatch, use_reentrant=False)
        return self._forward(inp, is_first_microbatch)

    def _normalized(self, inp):
        dtype = activation_dtype(inp, self.fc1_weight)
        return normalize(inp.to(dtype), self.layer_norm_weight, self.layer_norm_bias, self.eps,
                         self.zero_centered_gamma, self.normalization, dtype)

    def _in_graph(self, inp, recipe):
        x = self._normalized(inp)
        y = self.multiply_in_graph(x, self.fc1_weight, self.fc1_bias, recipe, x.dtype)
        y = activate(self.activation, y, **self.activation_params)
        y = self.multiply_in_graph(y, self.fc2_weight, self.fc2_bias if self.apply_bias else None, recipe, x.dtype)
        return self._results(y, x)

    def _forward(self, inp, is_first_microbatch):
        x = self._normalized(inp)
        with self.prepare_forward(inp, 2):
            dtype = x.dtype
            needs = torch.is_grad_enabled() and any(t.requires_grad for t in (x, self.fc1_weight, self.fc2_weight))
            first, y = self.is_first(needs), x
            for i, (name, bias) in enumerate(zip(self.weight_names, self.bias_names)):
                weight, bias = getattr(self, name), getattr(self, bias)
                self.calibrate(i, y)
                product = self.product(i, name, weight, dtype, is_first_microbatch, first=first and i == 0)
                y = linear(y, weight, bias if i == 0 or self.apply_bias else None, product)
                if i == 0:
                    y = activate(self.activation, y, **self.activation_params)
        return self._results(y, x)

    def _results(self, y, x):
        results = (y, *([None if self.fc2_bias is None else self.fc2_bias.to(x.dtype)] if self.return_bias else []),
                   *([x] if self.return_layernorm_output else []))
        return results if len(results) > 1 else y

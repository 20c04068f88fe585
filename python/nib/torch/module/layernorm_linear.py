# SPDX-License-Identifier: Apache-2.0
"""LayerNormLinear: a normalization, then Linear."""
import torch

from .. import quantization
from ..quantized_tensor import eager
from .base import WeightGradStore, activation_dtype, check_alone, init_method_constant
from .linear import Linear, linear
from .norms import normalize


def check_normalization(normalization):
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise AssertionError(f"normalization is LayerNorm or RMSNorm, not {normalization!r}")


def make_norm(layer, size, normalization, zero_centered_gamma, dtype, device):
    """The parameters of a layer's own normalization."""
    check_normalization(normalization)
    layer.new_parameter("layer_norm_weight", (size,), dtype, device,
                        init_fn=init_method_constant(0.0 if zero_centered_gamma else 1.0))
    if normalization == "LayerNorm":
        layer.new_parameter("layer_norm_bias", (size,), dtype, device, init_fn=init_method_constant(0.0))
    else:
        layer.register_parameter("layer_norm_bias", None)


class LayerNormLinear(Linear):
    """y = norm(x) W^T + b. The normalization is computed in FP32, and quantized from the activations' dtype."""

    def __init__(self, in_features, out_features, eps=1e-5, *, fuse_wgrad_accumulation=False,
                 get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
                 return_bias=False, params_dtype=None,
                 return_layernorm_output=False, return_layernorm_output_gathered=False, parameters_split=None,
                 zero_centered_gamma=False, device=None, delay_wgrad_compute=False, name=None, **alone):
        super(Linear, self).__init__(name)
        check_alone("LayerNormLinear", alone)
        self.in_features, self.out_features, self.return_bias = in_features, out_features, return_bias
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.use_bias, self.fuse_wgrad_accumulation = bias, fuse_wgrad_accumulation
        self.apply_bias = bias and not return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.parallel_mode = alone.get("parallel_mode")
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        make_norm(self, in_features, normalization, zero_centered_gamma, dtype, device)
        self._make_weights(out_features, in_features, parameters_split, bias, dtype, device, init_method,
                           get_rng_state_tracker)
        self.initialize(device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """y; with it its bias (return_bias) and the normalization's output (return_layernorm_output)."""
        weight, bias = self._whole(self.weight_names), self._whole(self.bias_names) if self.use_bias else None
        dtype = activation_dtype(inp, weight)
        x = normalize(inp.to(dtype), self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma,
                      self.normalization, dtype)
        y = None
        if torch.compiler.is_compiling():
            recipe = quantization.get_recipe()
            if self.in_graph(recipe, [weight], is_first_microbatch) and not (fp8_output or fp8_grad):
                y = self.multiply_in_graph(x, weight, bias if self.apply_bias else None, recipe, dtype)
        if y is None:
            y = self._forward(x, weight, bias, dtype, is_first_microbatch, fp8_output, fp8_grad)
        results = (y, *([None if bias is None else bias.to(dtype)] if self.return_bias else []),
                   *([x] if self.return_layernorm_output else []))
        return results if len(results) > 1 else y

    @eager
    def _forward(self, x, weight, bias, dtype, is_first_microbatch, fp8_output, fp8_grad):
        with self.prepare_forward(x):
            self.calibrate(0, x)
            needs = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
            product = self.product(0, "weight", weight, dtype, is_first_microbatch, first=self.is_first(needs),
                                   fp8_grad=fp8_grad)
            y = linear(x, weight, bias if self.apply_bias else None, product)
            return self.quantize_output(0, y) if fp8_output else y

# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm, computed in FP32, and the activations of feed-forward layers."""
import warnings

import torch

from .base import init_method_constant, without_autocast


def normalize(x, weight, bias, eps, zero_centered_gamma, normalization, dtype):
    """x over its last dims, in a dtype. zero_centered_gamma: the weight is one more than the parameter."""
    with without_autocast(x):
        shape, values = tuple(weight.shape), x.float()
        gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
        if normalization == "RMSNorm":
            dims = tuple(range(-len(shape), 0))
            y = values * torch.rsqrt(values.square().mean(dims, keepdim=True) + eps) * gamma
        else:
            y = torch.nn.functional.layer_norm(values, shape, gamma, None if bias is None else bias.float(), eps)
        return y.to(dtype)


class _Norm(torch.nn.Module):
    """A normalization over the last dims. Its output has the input's dtype, or that of torch.autocast."""

    _kind = None

    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None,
                 zero_centered_gamma=False, hidden_size=None, *, device=None, dtype=None, sm_margin=None):
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("one of `normalized_shape` and `hidden_size` (its older name) is needed")
        if params_dtype is not None and dtype is not None:
            raise RuntimeError("Both `dtype` and `params_dtype` (its older name) are provided")
        shape = hidden_size if normalized_shape is None else normalized_shape
        self.normalized_shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered_gamma, sequence_parallel
        dtype = params_dtype or dtype or torch.get_default_dtype()
        self.weight = torch.nn.Parameter(torch.empty(self.normalized_shape, dtype=dtype, device=device))
        if self._kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty(self.normalized_shape, dtype=dtype, device=device))
        self.reset_parameters(defer_init=self.weight.device.type == "meta")

    def reset_parameters(self, defer_init=False):
        """A weight of 1 (of 0 where it is zero-centered), a bias of 0; in host memory where they were on the meta
        device."""
        if defer_init:
            return
        for name, parameter in list(self.named_parameters(recurse=False)):
            value = 0.0 if name == "bias" or self.zero_centered_gamma else 1.0
            values = parameter.detach()
            if values.device.type == "meta":
                values = torch.empty_like(values, device="cpu")
            init_method_constant(value)(values)
            setattr(self, name, torch.nn.Parameter(values, requires_grad=parameter.requires_grad))
            if self.sequence_parallel is not None:
                getattr(self, name).sequence_parallel = self.sequence_parallel

    def extra_repr(self):
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"

    def get_extra_state(self):
        """Empty; TransformerEngine's state has the key."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        """Nothing to take over."""

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *rest):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        extra = prefix + torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
        if extra in missing_keys:
            missing_keys.remove(extra)

    def forward(self, inp):
        kind = inp.device.type
        on = kind != "meta" and torch.is_autocast_enabled(kind)
        return normalize(inp, self.weight, getattr(self, "bias", None), self.eps, self.zero_centered_gamma, self._kind,
                         torch.get_autocast_dtype(kind) if on else inp.dtype)


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias."""
    _kind = "LayerNorm"

    def reset_layer_norm_parameters(self):
        warnings.warn("reset_layer_norm_parameters is deprecated: reset_parameters", DeprecationWarning, stacklevel=2)
        self.reset_parameters()


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight."""
    _kind = "RMSNorm"

    def reset_rms_norm_parameters(self):
        warnings.warn("reset_rms_norm_parameters is deprecated: reset_parameters", DeprecationWarning, stacklevel=2)
        self.reset_parameters()


# ---- Activations -----------------------------------------------------------------------------------------

_PLAIN = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": torch.nn.functional.silu,
}
# name: what the first half goes through before it is multiplied by the second
_GATED = {"geglu": _PLAIN["gelu"], "qgeglu": _PLAIN["qgelu"], "reglu": torch.relu, "sreglu": _PLAIN["srelu"],
          "swiglu": _PLAIN["silu"], "glu": torch.sigmoid}
ACTIVATIONS = (*_PLAIN, *_GATED, "clamped_swiglu")


def is_gated(name):
    return name not in _PLAIN


def activate(name, x, limit=7.0, alpha=1.702, glu_linear_offset=1.0):
    """An activation in FP32, in the dtype of its input. Gated ones halve the last dim."""
    values = x.float()
    if name in _PLAIN:
        return _PLAIN[name](values).to(x.dtype)
    first, second = values.chunk(2, dim=-1)
    if name == "clamped_swiglu":
        first, second = first.clamp(max=limit), second.clamp(-limit, limit) + glu_linear_offset
        return (first * torch.sigmoid(alpha * first) * second).to(x.dtype)
    return (_GATED[name](first) * second).to(x.dtype)

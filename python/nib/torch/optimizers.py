# SPDX-License-Identifier: Apache-2.0
"""FusedAdam: Adam with master weights, which quantized parameters need."""
import torch

from .quantized_tensor import QuantizedTensor, is_dtensor

_STATES = (torch.float32, torch.float16, torch.bfloat16)


def _local(param):
    """What of a parameter is here: its shard where FSDP2 has it."""
    return param._local_tensor if is_dtensor(param) else param


def _like(param, values):
    """Values of a shard as a tensor that is sharded as the parameter is."""
    if not is_dtensor(param):
        return values
    return type(param).from_local(values, param.device_mesh, param.placements, run_check=False, shape=param.shape,
                                       stride=param.stride())


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW (adam_w_mode), in FP32. master_weights: parameters of fewer bits follow masters of
    master_weight_dtype, which begin with weight.get_high_precision_init_val() where that was preserved. Quantized
    parameters need them. exp_avg_dtype and exp_avg_sq_dtype: what the moments are kept in; FP16 has a scale per tensor.
    use_decoupled_grad: gradients are in parameter.decoupled_grad."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, *,
                 bias_correction=True, adam_w_mode=True, capturable=False, master_weights=False,
                 master_weight_dtype=torch.float32, exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32,
                 use_decoupled_grad=False, store_param_remainders=False, set_grad_none=None):
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        for name, dtype in (("exp_avg", exp_avg_dtype), ("exp_avg_sq", exp_avg_sq_dtype)):
            if dtype not in _STATES:
                raise RuntimeError(f"FusedAdam of nib only supports fp32/fp16/bf16 {name}.")
        if store_param_remainders:
            raise NotImplementedError("FusedAdam of nib keeps whole master weights: store_param_remainders is not "
                                      "possible")
        super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                                      weight_decay=weight_decay))
        self.adam_w_mode, self.capturable, self.master_weights = bool(adam_w_mode), capturable, master_weights
        self.use_decoupled_grad, self.set_grad_none = use_decoupled_grad, set_grad_none
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype,
                                  "master_param": master_weight_dtype}
        self._scales = {}  # {parameter: {state: scale}} of states in FP16

    def zero_grad(self, set_to_none=None):
        set_to_none = self.set_grad_none if set_to_none is None else set_to_none
        set_to_none = True if set_to_none is None else set_to_none
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.decoupled_grad = None
                elif parameter.decoupled_grad is not None:
                    parameter.decoupled_grad.zero_()

    # -- states --

    def get_unscaled_state(self, param, state_name):
        """A state in FP32."""
        state = self.state[param][state_name].float()
        scale = self._scales.get(param, {}).get(state_name)
        return state if scale is None else state * scale

    def set_scaled_state(self, param, state_name, unscaled_state):
        """Keep FP32 values as a state of its dtype."""
        dtype = self.name_to_dtype_map[state_name]
        if dtype == torch.float16:  # half of the range, so that what grows still fits
            scale = unscaled_state.abs().max() / (torch.finfo(torch.float16).max / 2)
            self._scales.setdefault(param, {})[state_name] = scale
            unscaled_state = unscaled_state * torch.where(scale > 0, scale.reciprocal(), 0.0)
        kept = self.state[param].get(state_name)
        if kept is None:
            self.state[param][state_name] = unscaled_state.to(dtype, copy=True)
        else:
            kept.copy_(unscaled_state)

    def initialize_state(self, param):
        """States of a parameter that has none."""
        here = _local(param)
        zeros = _like(param, torch.zeros(here.shape, dtype=torch.float32, device=here.device))
        for name in ("exp_avg", "exp_avg_sq"):
            self.set_scaled_state(param, name, zeros)
        if self.master_weights and (isinstance(here, QuantizedTensor) or param.dtype != torch.float32):
            values = here.get_high_precision_init_val() if hasattr(here, "get_high_precision_init_val") else None
            if values is None:
                values = here.detach().dequantize() if isinstance(here, QuantizedTensor) else here.detach()
            else:
                here.clear_high_precision_init_val()
            self.set_scaled_state(param, "master_param", _like(param, values.to(here.device).float()))

    def state_dict(self):
        """As torch.optim has it, states in FP32."""
        state = super().state_dict()
        ids = [i for group in state["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        state["state"] = {i: {name: self.get_unscaled_state(param, name) if name in self.name_to_dtype_map else value
                              for name, value in self.state[param].items()}
                          for i, param in zip(ids, params) if param in self.state}
        return state

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "state": {}})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip(ids, params):
            for name, value in state_dict["state"].get(i, {}).items():
                if name in self.name_to_dtype_map:
                    self.set_scaled_state(param, name, value.float())
                else:
                    self.state[param][name] = value

    # -- step --

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                grad = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(param, grad, group)
        return loss

    def _update(self, param, grad, group):
        if grad.is_sparse:
            raise RuntimeError("FusedAdam does not support sparse gradients.")
        if isinstance(_local(param), QuantizedTensor) and not self.master_weights:
            raise RuntimeError(f"FusedAdam steps over a {type(_local(param)).__name__} need master_weights=True: a "
                               "step is mostly smaller than half a step of the format")
        if not self.state[param]:
            self.initialize_state(param)
        beta1, beta2 = group["betas"]
        values = self.get_unscaled_state(param, "master_param") if "master_param" in self.state[param] else \
            param.detach().float()
        grad = (grad.dequantize() if isinstance(grad, QuantizedTensor) else grad).float()
        decay = group["weight_decay"]
        if not self.adam_w_mode and decay:
            grad = grad + decay * values
        moment = beta1 * self.get_unscaled_state(param, "exp_avg") + (1 - beta1) * grad
        square = beta2 * self.get_unscaled_state(param, "exp_avg_sq") + (1 - beta2) * grad * grad
        corrections = (1 - beta1 ** group["step"], 1 - beta2 ** group["step"]) if group["bias_correction"] else (1, 1)
        update = (moment / corrections[0]) / ((square / corrections[1]).sqrt() + group["eps"])
        if self.adam_w_mode and decay:
            update = update + decay * values
        values = values - group["lr"] * update
        self.set_scaled_state(param, "exp_avg", moment)
        self.set_scaled_state(param, "exp_avg_sq", square)
        if "master_param" in self.state[param]:
            self.set_scaled_state(param, "master_param", values)
        param.copy_(values)

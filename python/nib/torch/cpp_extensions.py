# SPDX-License-Identifier: Apache-2.0
"""Products by TransformerEngine's names: general_gemm and its grouped form, over nib.torch.tex."""
import torch

from . import tex
from .constants import TE_DType
from .grouped_tensor import GroupedTensorStorage
from .products import GEMMType, Job, MMParams, is_custom, multiply, place_of, run, takes, unwrap
from .quantized_tensor import QuantizedTensorStorage

_LAYOUTS = ("TN", "NN", "NT")


def general_gemm(A, B, out_dtype=None, quantization_params=None, gelu=False, gelu_in=None, alpha=1.0, beta=None,
                 accumulate=False, layout="TN", out=None, bias=None, use_split_accumulator=False, grad=False, ub=None,
                 ub_type=None, extra_output=None, bulk_overlap=False):
    """(op(B) op(A), gradient of the bias, input of the GELU, extra output), as tex.generic_gemm; layout says which are
    transposed, A first. Operands of custom quantizers go to these."""
    if layout not in _LAYOUTS:
        raise AssertionError(f"GEMM layout {layout} not supported.")
    transa, transb = layout[0] == "T", layout[1] == "T"
    A, B = unwrap(A, not transa), unwrap(B, transb)
    if out is not None and isinstance(out, torch.Tensor) and not out.is_contiguous():
        raise ValueError("Output tensor is not contiguous.")
    if is_custom(A) or is_custom(B):
        return custom_gemm(A, B, None, out_dtype, quantization_params, gelu, gelu_in, accumulate, layout, out, bias,
                           use_split_accumulator, grad)
    beta = validate_gemm_scale(beta, accumulate)
    dtype = TE_DType[out_dtype] if out_dtype is not None else None
    return tex.generic_gemm(A, transa, B, transb, out, quantization_params, dtype, bias, None, gelu, gelu_in, grad,
                            accumulate=accumulate, use_split_accumulator=use_split_accumulator, comm_overlap=ub,
                            comm_type=ub_type, extra_output=extra_output, bulk_overlap=bulk_overlap, alpha=alpha,
                            beta=beta if accumulate else None)


def custom_gemm(A, B, workspace=None, out_dtype=None, quantization_params=None, gelu=False, gelu_in=None,
                accumulate=False, layout="TN", out=None, bias=None, use_split_accumulator=False, grad=False):
    """The product of two operands of custom quantizers, by the qgemm of B's."""
    if not (is_custom(A) and is_custom(B)):
        raise TypeError("A and B must be custom tensors")
    y = multiply(B, A, a_columnwise=layout[1] == "T", b_columnwise=layout[0] == "N", bias=None if grad else bias,
                 dtype=out_dtype)
    shape = getattr(B, "original_shape", None)
    if shape is not None and len(shape) > 2 and not grad:
        y = y.view(*shape[:-1], y.shape[-1])
    return y, None, None, None


def general_grouped_gemm(A, B, out, quantization_params, out_dtype, layout="TN", m_splits=None, gelu=False, grad=False,
                         accumulate=False, bias=None, use_bias=False, use_split_accumulator=False, D_dtype=None,
                         single_output=False):
    """general_gemm of pairs of operands: (results, gradients of biases, inputs of GELUs). single_output: all go one
    below the other into out[0], m_splits rows each."""
    if layout not in _LAYOUTS:
        raise AssertionError(f"GEMM layout {layout} not supported.")
    transa, transb = layout[0] == "T", layout[1] == "T"
    A, B = [unwrap(a, not transa) for a in A], [unwrap(b, transb) for b in B]
    targets = list(torch.split(out[0], [int(n) for n in m_splits])) if single_output else list(out)
    if not len(A) == len(B) == len(targets):
        raise ValueError(f"{len(A)} and {len(B)} operands, but {len(targets)} results: a group has as many of each")
    if single_output and any(getattr(operand, "_row_scaled_nvfp4", False) for operand in (*A, *B)):
        out = out[0]  # as TransformerEngine returns it there, and a list elsewhere
    biases = list(bias) if bias is not None and use_bias else [None] * len(A)
    if not gelu and not any(quantization_params or ()) and _multiply_group(A, B, targets, biases, transa, transb, grad,
                                                                           accumulate):
        bias_grads = [tex.sum_of_rows(b, transb, target.dtype) if use_bias else None
                      for b, target in zip(B, targets)] if grad else bias
        return out, bias_grads, [None] * len(A)
    bias_grads, gelu_inputs = [], []
    for i, (a, b) in enumerate(zip(A, B)):
        one_bias = torch.empty(b.shape[-1], dtype=targets[i].dtype) if grad and use_bias else biases[i]
        _y, bias_grad, gelu_in, _extra = general_gemm(
            a, b, out_dtype, quantization_params[i] if quantization_params else None, gelu, layout=layout,
            out=targets[i] if targets[i].numel() else None, bias=one_bias, grad=grad, accumulate=accumulate,
            use_split_accumulator=use_split_accumulator)
        bias_grads.append(bias_grad)
        gelu_inputs.append(gelu_in)
    return out, bias_grads if grad else bias, gelu_inputs


def _multiply_group(A, B, targets, biases, transa, transb, grad, accumulate):
    """All products in one call, where nib_gemm takes them; False where it does not take one."""
    jobs = []
    for a, b, target, bias in zip(A, B, targets, biases):
        if not target.numel():
            continue
        if not takes(b, a, transb, not transa) or target.device != place_of(b) or not target.is_contiguous():
            return False
        jobs.append(Job(b, a, transb, not transa, target, beta=1.0 if accumulate else 0.0, bias=None if grad else bias))
    run(jobs)
    return True


def general_grouped_gemm_for_grouped_tensor(A, B, out, *, layout="TN", accumulate=False, use_split_accumulator=False,
                                            bias=None, bias_scale=None, grad=False, alpha=None, beta=None):
    """general_gemm of the members of groups, in one call where nib_gemm takes them: alpha op(B) op(A) + bias + beta
    out.

    A or out may be a list of tensors. alpha and beta: a value for all, or one for each (1, and 1 where `accumulate`).
    bias: a group, or one row for each; bias_scale: a factor of it for each row of the results. Returns `out`.
    """
    if layout not in _LAYOUTS:
        raise AssertionError(f"GEMM layout {layout} not supported.")
    if grad:
        raise NotImplementedError("grad is not supported for grouped_tensor GEMM yet.")
    discrete = isinstance(out, (list, tuple))
    if discrete and isinstance(A, (list, tuple)):
        raise ValueError("Both A and out are discrete. This is not supported yet.")
    if discrete and bias is not None:
        raise ValueError("Bias is not supported when out is a list (discrete_out mode) yet. Apply bias manually after "
                         "the GEMM.")
    if bias_scale is not None and bias is None:
        raise ValueError("bias_scale requires bias to be provided.")
    transa, transb = layout[0] == "T", layout[1] == "T"
    A, B, targets = (_members_of(group) for group in (A, B, out))
    if not len(A) == len(B) == len(targets):
        raise ValueError(f"groups of {len(A)} and {len(B)} operands, and of {len(targets)} results")
    if any(isinstance(target, QuantizedTensorStorage) for target in targets):
        raise TypeError("results of grouped products are plain tensors: quantize them afterwards")
    alphas, betas = _of_each(alpha, len(A), 1.0), _of_each(beta, len(A), 1.0 if accumulate else 0.0)
    rows = [None] * len(A) if bias is None else [row.reshape(-1) for row in _members_of(bias)]
    if len(rows) != len(A):
        raise ValueError(f"{len(rows)} biases for a group of {len(A)}")
    jobs = []
    for a, b, target, one_alpha, one_beta, row in zip(A, B, targets, alphas, betas, rows):
        a, b, row = unwrap(a, not transa), unwrap(b, transb), row if bias_scale is None else None
        if not target.numel():
            continue
        if takes(b, a, transb, not transa) and target.device == place_of(b) and target.is_contiguous():
            jobs.append(Job(b, a, transb, not transa, target, one_alpha, one_beta, row))
        else:
            tex.generic_gemm(a, transa, b, transb, target, None, TE_DType[target.dtype], row, alpha=one_alpha,
                             accumulate=one_beta != 0.0, beta=one_beta or None)
    run(jobs)
    if bias_scale is not None:
        _add_scaled(targets, rows, bias_scale)
    return out


def _members_of(group):
    return group.split_into_quantized_tensors() if isinstance(group, GroupedTensorStorage) else list(group)


def _of_each(values, count, otherwise):
    """A float for each of a group, of a tensor that has one or as many; from a GPU it has to come to the host."""
    values = [otherwise] if values is None else [float(v) for v in values.reshape(-1).tolist()]
    if len(values) not in (1, count):
        raise ValueError(f"{len(values)} factors for a group of {count}")
    return values if len(values) == count else values * count


def _add_scaled(targets, rows, scale):
    """Each row of the results gets the bias of its group by its own factor."""
    lengths = [target.numel() // target.shape[-1] if target.numel() else 0 for target in targets]
    if scale.numel() != sum(lengths):
        raise ValueError(f"bias_scale has {scale.numel()} factors, the results {sum(lengths)} rows")
    for target, row, factors in zip(targets, rows, torch.split(scale.reshape(-1).float(), lengths)):
        if target.numel():
            flat = target.view(-1, target.shape[-1])
            flat.copy_(flat.float() + factors.unsqueeze(1) * row.detach().float())


def validate_gemm_scale(scale, required):
    """beta of a product: 1 unless it is said, and nothing but 0 where nothing is accumulated."""
    if required:
        return 1.0 if scale is None else scale
    if scale not in (None, 0.0):
        raise ValueError("scale must be zero")
    return 0.0


__all__ = ["GEMMType", "MMParams", "custom_gemm", "general_gemm", "general_grouped_gemm",
           "general_grouped_gemm_for_grouped_tensor", "validate_gemm_scale"]

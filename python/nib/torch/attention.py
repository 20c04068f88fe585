# SPDX-License-Identifier: Apache-2.0
"""Attention over PyTorch's: DotProductAttention, MultiheadAttention, rotary position embeddings.

Products of queries, keys and values are in high precision in every recipe; the linear layers around them are quantized.
"""
import math

import torch

from .constants import AttnBiasTypes, AttnMaskTypes, AttnTypes
from .module.base import TransformerEngineBaseModule, check_alone, without_autocast
from .module.layernorm_linear import LayerNormLinear
from .module.linear import Linear
from .module.norms import LayerNorm, RMSNorm
from .quantization import get_recipe
from .quantized_tensor import QuantizedTensor
from .recompute import checkpoint

_FORMATS = ("sbhd", "bshd")


# ---- Masks -----------------------------------------------------------------------------------------------


def check_set_window_size(attn_mask_type, window_size=None):
    """(left, right) of a sliding window, -1 for no end: what the mask says, where nothing else does."""
    causal = "causal" in attn_mask_type
    if window_size is None:
        return (-1, 0) if causal else (-1, -1)
    left, right = window_size
    if causal:
        right = 0
    if min(left, right) < -1:
        raise ValueError(f"window_size is a pair of sizes, -1 for no end, not {tuple(window_size)}")
    return left, right


def _band(rows, cols, window, bottom_right, device):
    """Which key each query may see, by distance: [rows, cols] of bool, None for all. bottom_right: the last query is
    beside the last key, instead of the first beside the first."""
    left, right = window
    if left == right == -1:
        return None
    distance = torch.arange(cols, device=device) - torch.arange(rows, device=device)[:, None]
    if bottom_right:
        distance = distance - (cols - rows)
    seen = torch.ones(rows, cols, dtype=torch.bool, device=device)
    if left != -1:
        seen &= distance >= -left
    if right != -1:
        seen &= distance <= right
    return seen


def _from_lengths(cu_seqlens, size):
    """A padding mask, [b, 1, 1, s], of the lengths in a batch."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)
    return (torch.arange(size, device=lengths.device) >= lengths[:, None])[:, None, None, :]


def get_alibi(num_heads, rows, cols, alibi_slopes=None, bottom_right=True, device=None):
    """(slopes, bias [b or 1, h, rows, cols]): -slope times how far a key is from its query."""
    if alibi_slopes is None:
        n = 2 ** math.floor(math.log2(num_heads))
        slopes = [2.0 ** (-8.0 / n * (i + 1)) for i in range(n)]
        slopes += [2.0 ** (-4.0 / n * (i + 1)) for i in range(0, 2 * (num_heads - n), 2)]
        alibi_slopes = torch.tensor(slopes, dtype=torch.float32, device=device)
    distance = torch.arange(cols, device=device) - torch.arange(rows, device=device)[:, None]
    if bottom_right:
        distance = distance - (cols - rows)
    slopes = alibi_slopes.view(*((1,) if alibi_slopes.dim() == 1 else ()), *alibi_slopes.shape, 1, 1)
    return alibi_slopes, -distance.abs() * slopes


# ---- DotProductAttention ---------------------------------------------------------------------------------


class DotProductAttention(TransformerEngineBaseModule):
    """softmax(scale Q K^T + bias) V over [s, b, h, d] or [b, s, h, d]. Masks are True where a position is hidden:
    [b, 1, 1, s] for padding (a pair for queries and keys, where they differ), anything that goes with [b, h, sq, skv]
    for "arbitrary". A query that sees no key gives 0."""

    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
                 attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, *, get_rng_state_tracker=None,
                 layer_number=None, attention_type="self", softmax_scale=None, softmax_type="vanilla",
                 return_max_logit=False, name=None, **alone):
        super().__init__(name)
        check_alone("DotProductAttention", alone)
        if attention_type not in AttnTypes:
            raise AssertionError(f"attention_type {attention_type} not supported")
        for what, value, allowed in (("softmax_type", softmax_type, "vanilla"),
                                     ("return_max_logit", return_max_logit, False)):
            if value != allowed:
                raise NotImplementedError(f"attention of nib is PyTorch's: {what}={value!r} is not possible")
        channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.num_attention_heads, self.hidden_size_per_attention_head_k = num_attention_heads, channels[0]
        self.hidden_size_per_attention_head_v = channels[1]
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % self.num_gqa_groups:
            raise AssertionError("The number of attention heads must be divisible by the number of GQA groups!")
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.softmax_scale = 1.0 / math.sqrt(channels[0]) if softmax_scale is None else softmax_scale
        self.attention_type, self.layer_number = attention_type, layer_number
        self.get_rng_state_tracker = get_rng_state_tracker

    def _check(self, qkv_format, mask_type, bias_type, only_alone):
        if qkv_format not in _FORMATS:
            raise NotImplementedError(f"attention of nib takes {' and '.join(_FORMATS)}, not {qkv_format}")
        if mask_type not in AttnMaskTypes:
            raise ValueError(f"attn_mask_type is one of {', '.join(AttnMaskTypes)}, not {mask_type!r}")
        if bias_type not in AttnBiasTypes:
            raise AssertionError(f"core_attention_bias_type {bias_type} is not supported")
        recipe = get_recipe()
        if recipe is not None and (recipe.fp8_dpa or recipe.fp8_mha):
            raise NotImplementedError("attention of nib is in high precision: a recipe with fp8_dpa or fp8_mha is not "
                                      "possible")
        for name, (value, usual) in only_alone.items():
            if value is not usual and value != usual:
                raise NotImplementedError(f"attention of nib is PyTorch's: {name} is not possible")

    def forward(self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None,
                cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
                max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None, window_size=None,
                bottom_right_diagonal=None, checkpoint_core_attention=False, core_attention_bias_type="no_bias",
                core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None,
                pad_between_seqs=None, fp8_output=False, bf16_backward=False, num_splits=1, score_mod=None, **other):
        """[s, b, h * d] or [b, s, h * d]."""
        qkv_format = qkv_format or self.qkv_format
        mask_type = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        mask_type = "padding_causal" if mask_type == "causal_padding" else mask_type
        self._check(qkv_format, mask_type, core_attention_bias_type, {
            "inference_params": (inference_params, None), "fp8_output": (fp8_output, False),
            "score_mod": (score_mod, None), "num_splits": (num_splits, 1),
            **{name: (value, -3 if name == "qkv_interleave_dim" else None) for name, value in other.items()}})
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        if mask_type in ("causal", "padding_causal"):
            bottom_right_diagonal = False
        elif bottom_right_diagonal is None or mask_type.endswith("bottom_right"):
            bottom_right_diagonal = True
        q, k, v = (t.dequantize() if isinstance(t, QuantizedTensor) else t
                   for t in (query_layer, key_layer, value_layer))
        order = (1, 2, 0, 3) if qkv_format == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(order) for t in (q, k, v))  # [b, h, s, d]
        if q.shape[1] != self.num_attention_heads or k.shape[1] != self.num_gqa_groups:
            raise ValueError(f"{self.num_attention_heads} heads and {self.num_gqa_groups} groups, but queries have "
                             f"{q.shape[1]} and keys {k.shape[1]}")
        seen = self._seen(q, k, attention_mask, mask_type,
                          check_set_window_size(mask_type, window_size or self.window_size), bottom_right_diagonal,
                          cu_seqlens_q, cu_seqlens_kv)
        bias = None
        if core_attention_bias_type == "alibi":
            bias = get_alibi(q.shape[1], q.shape[2], k.shape[2], alibi_slopes, bottom_right_diagonal, q.device)[1]
        elif core_attention_bias_type != "no_bias":
            bias = core_attention_bias * (self.softmax_scale if core_attention_bias_type == "pre_scale_bias" else 1.0)
        call = self._attend
        if checkpoint_core_attention:
            y = checkpoint(call, q, k, v, seen, bias, use_reentrant=False)
        else:
            y = call(q, k, v, seen, bias)
        y = y.permute((2, 0, 1, 3) if qkv_format == "sbhd" else (0, 2, 1, 3))
        return y.reshape(*y.shape[:2], -1)

    @staticmethod
    def _seen(q, k, attention_mask, mask_type, window, bottom_right, cu_seqlens_q, cu_seqlens_kv):
        """Which key each query may see: bool that goes with [b, h, sq, skv], None for all."""
        rows, cols = q.shape[2], k.shape[2]
        seen = _band(rows, cols, window, bottom_right, q.device)
        if mask_type == "arbitrary":
            if attention_mask is None:
                raise ValueError("an arbitrary mask is needed: attention_mask")
            return ~attention_mask if seen is None else ~attention_mask & seen
        if "padding" not in mask_type:
            return seen
        if attention_mask is None:
            if cu_seqlens_q is None or cu_seqlens_kv is None:
                raise ValueError("padding needs an attention_mask, or cu_seqlens_q and cu_seqlens_kv")
            attention_mask = (_from_lengths(cu_seqlens_q, rows), _from_lengths(cu_seqlens_kv, cols))
        of_queries, of_keys = attention_mask if isinstance(attention_mask, (tuple, list)) else (attention_mask,) * 2
        there = ~of_keys.view(-1, 1, 1, cols) & ~of_queries.view(-1, 1, rows, 1)
        return there if seen is None else there & seen

    def _attend(self, q, k, v, seen, bias):
        repeat = self.num_attention_heads // self.num_gqa_groups
        if repeat > 1:
            k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
        mask, blind = seen, None
        if seen is not None:
            blind = ~seen.any(-1, keepdim=True)  # nothing to look at: anything for now, 0 in the end
            mask = seen | blind
        if bias is not None:
            hidden = torch.zeros((), dtype=q.dtype, device=q.device) if mask is None else \
                torch.where(mask, 0.0, float("-inf")).to(q.dtype)
            mask = bias.to(q.dtype) + hidden
        dropout = self.attention_dropout if self.training else 0.0
        with without_autocast(q), self._rng(_Tracked(self.get_rng_state_tracker)):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout,
                                                                 scale=self.softmax_scale)
        return y if blind is None else y.masked_fill(blind, 0.0)


class _Tracked:
    """What _rng looks at."""

    def __init__(self, tracker):
        self.get_rng_state_tracker = tracker


# ---- Rotary position embeddings --------------------------------------------------------------------------


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of rotary embeddings: forward(length) gives [length, 1, 1, dim]."""

    def __init__(self, dim, rotary_percent=1.0, seq_len_interpolation_factor=None,
                 pretrained_max_position_embeddings=None, rotary_base=10000.0, interleaved=False):
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.seq_len_interpolation_factor, self.rotary_base = seq_len_interpolation_factor, rotary_base
        self.pretrained_max_position_embeddings, self.interleaved = pretrained_max_position_embeddings, interleaved
        self.register_buffer("inv_freq", 1.0 / (rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)))

    def forward(self, max_seq_len, offset=0):
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        factor, learned = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and learned is not None:
            positions = positions * (learned / max_seq_len if max_seq_len > learned * factor else 1 / factor)
        angles = torch.outer(positions, self.inv_freq)
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]


def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False, fused=False,
                         cu_seqlens=None, cp_size=1, cp_rank=0):
    """Rotate the first channels of [s, b, h, d] or [b, s, h, d] by the angles of a RotaryPositionEmbedding."""
    if tensor_format not in _FORMATS or cp_size > 1 or start_positions is not None:
        raise NotImplementedError("rotary embeddings of nib take sbhd and bshd, whole sequences from their start")
    length = t.shape[0] if tensor_format == "sbhd" else t.shape[1]
    if freqs.shape[0] < length:
        raise AssertionError(f"Rotary Embeddings only supported up to {freqs.shape[0]} sequence length, not {length}")
    angles = freqs[:length].float()
    if tensor_format == "bshd":
        angles = angles.transpose(0, 1)
    width = angles.shape[-1]
    values, rest = t[..., :width].float(), t[..., width:]
    if interleaved:
        turned = torch.stack((-values[..., 1::2], values[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = values.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return torch.cat(((values * angles.cos() + turned * angles.sin()).to(t.dtype), rest), dim=-1)


# ---- MultiheadAttention ----------------------------------------------------------------------------------


class _L2Normalization(torch.nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        values = x.float()
        return (values * torch.rsqrt(values.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


def _query_key_norms(kind, channels, eps, device, dtype):
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        norm = _L2Normalization(eps)
        return norm, norm
    if kind not in ("RMSNorm", "LayerNorm"):
        raise ValueError(f"Unsupported QK norm type: {kind}. L2Normalization, RMSNorm and LayerNorm are possible")
    norm = RMSNorm if kind == "RMSNorm" else LayerNorm
    return tuple(norm(channels, eps=eps, device=device, dtype=dtype) for _ in range(2))


class MultiheadAttention(torch.nn.Module):
    """Linear layers for queries, keys and values, attention, and a projection. Parameters have TransformerEngine's
    names: qkv or layernorm_qkv (query_layer or layernorm_query and key_value where it is cross-attention), proj."""

    def __init__(self, hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1,
                 layernorm_epsilon=1e-5, init_method=None, output_layer_init_method=None, layer_number=None,
                 attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, *, num_gqa_groups=None,
                 fuse_wgrad_accumulation=False, get_rng_state_tracker=None, params_dtype=None, return_bias=False,
                 return_layernorm_output=False, input_layernorm=False, attention_type="self", fuse_qkv_params=False,
                 zero_centered_gamma=False, qkv_weight_interleaved=True, rotary_pos_interleaved=False, bias=True,
                 normalization="LayerNorm", device=None, qkv_format="sbhd", name=None, qk_norm_type=None,
                 qk_norm_eps=1e-6, qk_norm_before_rope=False, softmax_type="vanilla", **alone):
        super().__init__()
        check_alone("MultiheadAttention", alone)
        if attention_type not in AttnTypes:
            raise AssertionError(f"attention_type {attention_type} not supported")
        self.name, self.qkv_format, self.attn_mask_type = name, qkv_format, attn_mask_type
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.input_layernorm, self.attention_type, self.return_bias = input_layernorm, attention_type, return_bias
        self.return_layernorm_output, self.rotary_pos_interleaved = return_layernorm_output, rotary_pos_interleaved
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.qk_norm_before_rope, self.num_attention_heads = qk_norm_before_rope, num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % self.num_gqa_groups:
            raise AssertionError("The number of attention heads must be divisible by the number of GQA groups!")
        self.hidden_size_per_attention_head = kv_channels or hidden_size // num_attention_heads
        self.hidden_size_q = self.hidden_size_per_attention_head * num_attention_heads
        self.hidden_size_kv = self.hidden_size_per_attention_head * self.num_gqa_groups
        params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        common = dict(fuse_wgrad_accumulation=fuse_wgrad_accumulation, get_rng_state_tracker=get_rng_state_tracker,
                      params_dtype=params_dtype, device=device, bias=bias)
        norm = dict(eps=layernorm_epsilon, normalization=normalization, zero_centered_gamma=zero_centered_gamma,
                    return_layernorm_output=return_layernorm_output)
        self.q_norm, self.k_norm = _query_key_norms(qk_norm_type, self.hidden_size_per_attention_head, qk_norm_eps,
                                                    device, params_dtype)

        def named(suffix):
            return None if name is None else f"{name}.{suffix}"

        def projection(out, split, plain, normed):
            split = None if fuse_qkv_params else split
            if input_layernorm:
                setattr(self, normed[0], LayerNormLinear(hidden_size, out, init_method=init_method, **norm, **common,
                                                         parameters_split=split, name=named(normed[1])))
            else:
                setattr(self, plain[0], Linear(hidden_size, out, init_method=init_method, **common,
                                               parameters_split=split, name=named(plain[1])))

        if attention_type == "self":
            sizes = {"query": self.hidden_size_q, "key": self.hidden_size_kv, "value": self.hidden_size_kv}
            projection(sum(sizes.values()), sizes, ("qkv", "linear_qkv"), ("layernorm_qkv", "layernorm_linear_qkv"))
        else:
            projection(self.hidden_size_q, ("query",) if input_layernorm else None, ("query_layer", "linear_q"),
                       ("layernorm_query", "layernorm_linear_q"))
            self.key_value = Linear(hidden_size, 2 * self.hidden_size_kv, init_method=init_method, **common,
                                    parameters_split=None if fuse_qkv_params else ("key", "value"),
                                    name=named("linear_kv"))
        self.core_attention = DotProductAttention(
            num_attention_heads, self.hidden_size_per_attention_head, num_gqa_groups=self.num_gqa_groups,
            attention_dropout=attention_dropout, qkv_format=qkv_format, layer_number=layer_number,
            get_rng_state_tracker=get_rng_state_tracker, attention_type=attention_type, softmax_type=softmax_type,
            name=named("core_attention"))
        self.proj = Linear(self.hidden_size_q, hidden_size, init_method=output_layer_init_method,
                           return_bias=return_bias, name=named("proj"), **common)

    def _heads(self, mixed, parts):
        """A projection's output as parts of [.., heads, channels], parts[i] heads per group each. The heads of a group
        are beside each other where weights are interleaved, else those of a part."""
        groups, channels, each = self.num_gqa_groups, self.hidden_size_per_attention_head, sum(parts)
        if self.qkv_weight_interleaved:
            shape, dim = (groups, each, channels), -2
        else:
            shape, dim = (each, groups, channels), -3
        found = mixed.view(*mixed.shape[:-1], *shape).split(parts, dim=dim)
        return [part.reshape(*mixed.shape[:-1], -1, channels) for part in found]

    def _layer(self, plain, normed):
        return getattr(self, normed if self.input_layernorm else plain)

    def forward(self, hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None, window_size=None,
                bottom_right_diagonal=None, is_first_microbatch=None, checkpoint_core_attention=False,
                inference_params=None, rotary_pos_emb=None, core_attention_bias_type="no_bias",
                core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None,
                cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
                fast_zero_fill=True, pad_between_seqs=None):
        """The projection's output; with it its bias (return_bias) and the normalization's output."""
        per_group = self.num_attention_heads // self.num_gqa_groups
        layer = self._layer("qkv", "layernorm_qkv") if self.attention_type == "self" else \
            self._layer("query_layer", "layernorm_query")
        mixed = layer(hidden_states, is_first_microbatch=is_first_microbatch)
        mixed, normalized = mixed if self.input_layernorm and self.return_layernorm_output else (mixed, None)
        if self.attention_type == "self":
            q, k, v = self._heads(mixed, [per_group, 1, 1])
        else:
            q = mixed.view(*mixed.shape[:-1], self.num_attention_heads, self.hidden_size_per_attention_head)
            k, v = self._heads(self.key_value(encoder_output, is_first_microbatch=is_first_microbatch), [1, 1])
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            of_q, of_k = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            q = apply_rotary_pos_emb(q, of_q, self.qkv_format, interleaved=self.rotary_pos_interleaved)
            k = apply_rotary_pos_emb(k, of_k, self.qkv_format, interleaved=self.rotary_pos_interleaved)
        if self.q_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        diagonal = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        context = self.core_attention(
            q, k, v, attention_mask=attention_mask, qkv_format=self.qkv_format, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv, attn_mask_type=attn_mask_type or self.attn_mask_type,
            window_size=window_size or self.window_size,
            bottom_right_diagonal=diagonal, checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes, inference_params=inference_params)
        out = self.proj(context, is_first_microbatch=is_first_microbatch)
        results = (*(out if self.return_bias else (out,)), *([] if normalized is None else [normalized]))
        return results if len(results) > 1 else results[0]

# SPDX-License-Identifier: Apache-2.0
"""TransformerLayer: attention and a feed-forward network with their normalizations and residuals."""
import torch

from .attention import MultiheadAttention
from .constants import AttnMaskTypes, LayerTypes
from .module.base import check_alone
from .module.layernorm_mlp import LayerNormMLP
from .module.norms import LayerNorm, RMSNorm


class DropPath(torch.nn.Module):
    """Leaves out a branch for some samples of a batch, and scales it for the others."""

    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if not self.drop_prob or not self.training:
            return x
        keep = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x / keep * torch.floor(keep + torch.rand(shape, dtype=x.dtype, device=x.device))


class TransformerLayer(torch.nn.Module):
    """A layer of an encoder or a decoder. Its parts are self_attention, inter_attention (of a decoder), layernorm_mlp,
    and layernorm where output_layernorm."""

    def __init__(self, hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, layernorm_epsilon=1e-5,
                 hidden_dropout=0.1, attention_dropout=0.1, init_method=None, output_layer_init_method=None,
                 layer_number=None, kv_channels=None, self_attn_mask_type="causal", window_size=None, *,
                 bottom_right_diagonal=None, enc_dec_attn_mask_type="no_mask", enc_dec_bottom_right_diagonal=None,
                 enc_dec_window_size=None, params_dtype=None, get_rng_state_tracker=None, fuse_wgrad_accumulation=False,
                 apply_residual_connection_post_layernorm=False, output_layernorm=False, parallel_attention_mlp=False,
                 layer_type="encoder", drop_path_rate=0.0, fuse_qkv_params=False, rotary_pos_interleaved=False,
                 zero_centered_gamma=False, qkv_weight_interleaved=True, ub_tp_comm_overlap=False, bias=True,
                 activation="gelu", activation_params=None, normalization="LayerNorm", device=None,
                 attn_input_format="sbhd", name=None, qk_norm_type=None, qk_norm_eps=1e-6, qk_norm_before_rope=False,
                 softmax_type="vanilla", **alone):
        super().__init__()
        if ub_tp_comm_overlap:
            raise NotImplementedError("TransformerLayer of nib works alone: ub_tp_comm_overlap is not possible")
        check_alone("TransformerLayer", {k: v for k, v in alone.items() if not k.startswith("ub_")})
        self._check(layer_type, parallel_attention_mlp, apply_residual_connection_post_layernorm, output_layernorm,
                    fuse_qkv_params, fuse_wgrad_accumulation)
        self.name, self.layer_type, self.layer_number = name, layer_type, layer_number
        self.self_attn_mask_type, self.enc_dec_attn_mask_type = self_attn_mask_type, enc_dec_attn_mask_type
        self.window_size, self.enc_dec_window_size = window_size, enc_dec_window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.enc_dec_bottom_right_diagonal = enc_dec_bottom_right_diagonal
        self.hidden_dropout, self.output_layernorm = hidden_dropout, output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        common = dict(get_rng_state_tracker=get_rng_state_tracker, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                      params_dtype=params_dtype, zero_centered_gamma=zero_centered_gamma, bias=bias,
                      normalization=normalization, device=device, init_method=init_method,
                      output_layer_init_method=output_layer_init_method,
                      return_layernorm_output=apply_residual_connection_post_layernorm)
        attention = dict(kv_channels=kv_channels, attention_dropout=attention_dropout, layer_number=layer_number,
                         layernorm_epsilon=layernorm_epsilon, num_gqa_groups=num_gqa_groups,
                         fuse_qkv_params=fuse_qkv_params, qkv_weight_interleaved=qkv_weight_interleaved,
                         rotary_pos_interleaved=rotary_pos_interleaved, qkv_format=attn_input_format,
                         softmax_type=softmax_type, qk_norm_type=qk_norm_type, qk_norm_eps=qk_norm_eps,
                         qk_norm_before_rope=qk_norm_before_rope)

        def named(suffix):
            return None if name is None else f"{name}.{suffix}"

        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, **attention, **common, input_layernorm=not output_layernorm,
            attention_type="self", return_bias=not parallel_attention_mlp, name=named("self_attention"))
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size, num_attention_heads, **attention, **common, attn_mask_type=enc_dec_attn_mask_type,
                input_layernorm=True, attention_type="cross", return_bias=True, name=named("inter_attention"))
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation,
                                          activation_params=activation_params, return_bias=not parallel_attention_mlp,
                                          name=named("layernorm_mlp"), **common)
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0.0 else None
        if output_layernorm:
            norm = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = norm(hidden_size, eps=layernorm_epsilon, params_dtype=params_dtype, device=device,
                                  zero_centered_gamma=zero_centered_gamma)

    @staticmethod
    def _check(layer_type, parallel, residual, output_layernorm, fuse_qkv, fuse_wgrad):
        if layer_type not in LayerTypes:
            raise ValueError(f"layer_type {layer_type!r} is not supported: encoder or decoder")
        if parallel and (layer_type != "encoder" or residual or output_layernorm):
            raise ValueError("parallel_attention_mlp goes with an encoder, without "
                             "apply_residual_connection_post_layernorm and output_layernorm")
        if fuse_wgrad and not fuse_qkv:
            raise ValueError("fuse_wgrad_accumulation requires fuse_qkv_params=True")

    def _add(self, output, bias, residual, drop_path=None):
        if bias is not None:
            output = output + bias
        output = torch.nn.functional.dropout(output, p=self.hidden_dropout, training=self.training)
        return residual + (output if drop_path is None else drop_path(output))

    def forward(self, hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None,
                bottom_right_diagonal=None, encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None,
                enc_dec_window_size=None, enc_dec_bottom_right_diagonal=None, is_first_microbatch=None,
                checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None,
                core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None,
                cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
                max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None):
        mask_type = self_attn_mask_type or self.self_attn_mask_type
        cross_type = enc_dec_attn_mask_type or self.enc_dec_attn_mask_type
        for name, kind in (("self_attn_mask_type", mask_type), ("enc_dec_attn_mask_type", cross_type)):
            if kind.replace(",", "_") not in (*AttnMaskTypes, "causal_padding"):
                raise ValueError(f"{name} {kind!r} is not supported: {', '.join(AttnMaskTypes)}")
        device = hidden_states.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device))
        common = dict(is_first_microbatch=is_first_microbatch, checkpoint_core_attention=checkpoint_core_attention,
                      inference_params=inference_params, rotary_pos_emb=rotary_pos_emb,
                      core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
                      alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q)
        after_norm = self.apply_residual_connection_post_layernorm
        diagonal = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        attended = self.self_attention(
            hidden_states, attention_mask=attention_mask, attn_mask_type=mask_type,
            window_size=window_size or self.window_size, cu_seqlens_kv=cu_seqlens_q,
            bottom_right_diagonal=diagonal, **common)
        if not self.parallel_attention_mlp:
            output, bias, *normed = attended
            hidden_states = self._add(output, bias, normed[0] if normed else hidden_states, self.drop_path)
        if self.layer_type == "decoder":
            diagonal = enc_dec_bottom_right_diagonal
            output, bias, *normed = self.inter_attention(
                hidden_states, attention_mask=enc_dec_attn_mask, attn_mask_type=cross_type,
                window_size=enc_dec_window_size or self.enc_dec_window_size, encoder_output=encoder_output,
                cu_seqlens_kv=cu_seqlens_kv,
                bottom_right_diagonal=self.enc_dec_bottom_right_diagonal if diagonal is None else diagonal, **common)
            hidden_states = self._add(output, bias, normed[0] if normed else hidden_states)
        fed = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        if self.parallel_attention_mlp:
            output = self._add(attended, fed, hidden_states, self.drop_path)
        else:
            output, bias, *normed = fed
            output = self._add(output, bias, normed[0] if after_norm else hidden_states, self.drop_path)
        return self.layernorm(output) if self.output_layernorm else output

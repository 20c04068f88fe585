# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's imatrix files, in their GGUF form: sums of squares of the inputs of weights, by llama.cpp's names."""
import re
import struct

import numpy

__all__ = ["gguf_names", "write"]

_STRING, _ARRAY, _U32, _F32, _ALIGNMENT = 8, 9, 4, 0, 32

# Modules of a decoder layer, as families call them, and what llama.cpp calls their weights. What is not here is left
# out: nib's own file has all of them.
_MODULES = [
    (r"(self_attn|attention|attn|self_attention)\.(q_proj|wq|query)", ["attn_q"]),
    (r"(self_attn|attention|attn|self_attention)\.(k_proj|wk|key)", ["attn_k"]),
    (r"(self_attn|attention|attn|self_attention)\.(v_proj|wv|value)", ["attn_v"]),
    (r"(self_attn|attention|attn|self_attention)\.(qkv_proj|query_key_value|c_attn|Wqkv)", ["attn_qkv"]),
    (r"(self_attn|attention|attn|self_attention)\.(o_proj|out_proj|dense|c_proj|wo)", ["attn_output"]),
    (r"self_attn\.q_a_proj", ["attn_q_a"]), (r"self_attn\.q_b_proj", ["attn_q_b"]),
    (r"self_attn\.kv_a_proj_with_mqa", ["attn_kv_a_mqa"]),
    (r"(mlp|feed_forward)\.(gate_proj|w1)", ["ffn_gate"]), (r"(mlp|feed_forward)\.(down_proj|w2)", ["ffn_down"]),
    (r"(mlp|feed_forward)\.(up_proj|w3|gate_up_proj|fc1|c_fc|dense_h_to_4h)", ["ffn_up"]),
    (r"mlp\.(fc2|c_proj|dense_4h_to_h)", ["ffn_down"]),
    (r"(mlp|block_sparse_moe|feed_forward)\.experts\.(\d+\.)?(gate_proj|w1)", ["ffn_gate_exps"]),
    (r"(mlp|block_sparse_moe|feed_forward)\.experts\.(\d+\.)?(up_proj|w3)", ["ffn_up_exps"]),
    (r"(mlp|block_sparse_moe|feed_forward)\.experts\.gate_up_proj", ["ffn_gate_exps", "ffn_up_exps"]),
    (r"(mlp|block_sparse_moe|feed_forward)\.experts\.(\d+\.)?(down_proj|w2)", ["ffn_down_exps"]),
    (r"(mlp|feed_forward)\.shared_experts?\.gate_proj", ["ffn_gate_shexp"]),
    (r"(mlp|feed_forward)\.shared_experts?\.up_proj", ["ffn_up_shexp"]),
    (r"(mlp|feed_forward)\.shared_experts?\.down_proj", ["ffn_down_shexp"]),
    (r"(mlp\.gate|mlp\.router|block_sparse_moe\.gate|feed_forward\.router)", ["ffn_gate_inp"]),
    (r"mlp\.shared_expert_gate", ["ffn_gate_inp_shexp"]),
]  # yapf: disable
_LAYER = re.compile(r"(?:\w+\.)*?(?:layers|h|blocks)\.(\d+)\.(.+)")


def gguf_names(module):
    """What llama.cpp calls a module of a checkpoint ("blk.3.attn_q"): none, one, or two of a fused stack."""
    match = _LAYER.fullmatch(module)
    for pattern, names in _MODULES if match else []:
        if re.fullmatch(pattern, match[2]):
            return [f"blk.{match[1]}.{name}" for name in names]
    return []


def _string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _key(name, kind, value):
    return _string(name) + struct.pack("<I", kind) + value


def _pad(n):
    return -n % _ALIGNMENT


def write(path, tensors, inputs, datasets, chunks, chunk_size):
    """The imatrix of nib's statistics: {P.sum2, P.count} and {module: P}. Returns the modules that were left out."""
    found, left = {}, []
    for module, source in inputs.items():
        names = gguf_names(module)
        left += [] if names else [module]
        for name in names:
            found[f"{name}.weight"] = source
    entries = []
    for name, source in sorted(found.items()):
        sums = numpy.ascontiguousarray(tensors[f"{source}.sum2"], dtype="<f4")
        counts = numpy.ascontiguousarray(tensors[f"{source}.count"], dtype="<f4").reshape(-1, 1)
        entries += [(f"{name}.in_sum2", sums), (f"{name}.counts", counts)]
    names = struct.pack("<IQ", _STRING, len(datasets)) + b"".join(map(_string, datasets))
    keys = [_key("general.type", _STRING, _string("imatrix")), _key("imatrix.datasets", _ARRAY, names),
            _key("imatrix.chunk_count", _U32, struct.pack("<I", chunks)),
            _key("imatrix.chunk_size", _U32, struct.pack("<I", chunk_size))]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(keys)) + b"".join(keys)
    offset = 0
    for name, values in entries:
        rows, channels = values.shape
        head += _string(name) + struct.pack("<IQQIQ", 2, channels, rows, _F32, offset)
        offset += values.nbytes + _pad(values.nbytes)
    with open(path, "wb") as file:
        file.write(head + bytes(_pad(len(head))))
        for _, values in entries:
            file.write(values.tobytes() + bytes(_pad(values.nbytes)))
    return left

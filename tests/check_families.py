#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many families, made from transformers' own configurations, through the tool and back into transformers.

    check_families.py LIBNIB NIB [--all] [--write FILE] [--keep DIRECTORY] [FAMILY]...

Each is saved in BF16 by save_pretrained and then quantized, checked, checked against the original and dequantized. Names,
shapes and dtypes must come back, no check may find anything, and no embedding, head, router or convolution may have
been quantized. What `--for transformers` wrote is loaded by transformers: every parameter and the logits must be those
of the dequantized model. A family that transformers cannot load so is listed with transformers' own error. All of them
run by nib.torch.from_pretrained, with what the dequantized model computes. Statistics of causal language models
(nib.calibrate) must be those of the whole model.

Without names the 25 marked families run; with --all (or NIB_CAMPAIGN=1) every one. --write makes the table of
docs/families.md.
"""
import argparse
import collections
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TQDM_DISABLE"] = "1"
warnings.filterwarnings("ignore")

import torch
import transformers
from safetensors import safe_open
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SEED = 20261116

# ---- Small models ----------------------------------------------------------------------------------------

# What configurations call their sizes. Widths are multiples of 16 at least, so that blocks are whole, as in real models.
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "moe_intermediate_size": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "sliding_window": 32, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "d_kv": 16, "d_ff": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128, "n_positions": 128,
    "n_ctx": 128, "ffn_dim": 128, "word_embed_proj_dim": 64, "embed_dim": 64, "depth": 2, "out_hidden_size": 64,
    "image_size": 32, "patch_size": 8, "num_channels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "dim": 64, "hidden_dim": 128, "n_heads": 4, "n_layers": 2, "mamba_d_state": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4,
    "mamba_chunk_size": 16, "mamba_dt_rank": 16, "state_size": 16, "expand": 2, "chunk_size": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rotary_dim": 16, "type_vocab_size": 2, "embedding_size": 64, "conv_kernel": 4, "time_step_rank": 16,
    "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16, "index_n_heads": 4, "index_head_dim": 32,
}  # yapf: disable


def field_names(config_class):
    if dataclasses.is_dataclass(config_class):
        return {field.name for field in dataclasses.fields(config_class)}
    return set(inspect.signature(config_class.__init__).parameters)


def shrunk(config_class, special):
    """The class's configuration with small sizes; special values win. Configurations within it are shrunk too."""
    names = field_names(config_class)
    values = {name: size for name, size in SIZES.items() if name in names}
    inner = dict(config_class.sub_configs or {})
    for name, inner_class in inner.items():
        if inner_class is transformers.AutoConfig:
            default = getattr(config_class(), name, None)
            if default is None:
                continue
            inner_class = type(default)
        values[name] = shrunk(inner_class, special.get(name, {})).to_dict()
    values.update({name: value for name, value in special.items() if name not in inner})
    return config_class(**{name: value for name, value in values.items() if value is not DEFAULT})


DEFAULT = object()  # leave what the configuration itself has
TASKS = ["CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM", "MASKED_LM"]
COMPOSED = ["IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM"]


def model_class(family, wanted):
    if wanted:
        return getattr(transformers, wanted)
    tasks = (COMPOSED if CONFIG_MAPPING[family].sub_configs else []) + TASKS
    for mapping in [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in tasks] + ["MODEL_MAPPING_NAMES"]:
        name = getattr(modeling_auto, mapping).get(family)
        if name:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise KeyError(family)


MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}


def family(name, kind, model=None, few=False, **special):
    return name, kind, model, few, special


# "few" are the 25 of every `make test`: one for each way in which families differ.
FAMILIES = [
    # decoders
    family("llama", "dense", few=True, tie_word_embeddings=True),
    family("mistral", "dense"), family("ministral3", "dense"), family("qwen2", "dense"), family("qwen3", "dense"),
    family("gemma", "dense"), family("gemma2", "dense"), family("gemma3_text", "dense"), family("vaultgemma", "dense"),
    family("phi", "dense"), family("phi3", "dense", few=True), family("granite", "dense"), family("granite_swa", "dense"),
    family("olmo", "dense"), family("olmo2", "dense"), family("olmo3", "dense"), family("opt", "dense"),
    family("starcoder2", "dense"), family("stablelm", "dense"), family("cohere", "dense"), family("cohere2", "dense"),
    family("glm", "dense"), family("glm4", "dense"), family("ernie4_5", "dense"), family("hunyuan_v1_dense", "dense"),
    family("exaone4", "dense"), family("smollm3", "dense"), family("seed_oss", "dense"), family("arcee", "dense"),
    family("apertus", "dense"), family("helium", "dense"), family("bitnet", "dense"), family("diffllama", "dense"),
    family("nemotron", "dense"), family("persimmon", "dense"), family("mpt", "dense"), family("bloom", "dense"),
    family("falcon", "dense"), family("gpt_neo", "dense", attention_types=[[["global", "local"], 1]]),
    family("gpt_neox", "dense", few=True), family("gptj", "dense"), family("codegen", "dense"), family("biogpt", "dense"),
    family("xglm", "dense"), family("minicpm3", "dense", num_key_value_heads=4), family("youtu", "dense", num_key_value_heads=4), family("nanochat", "dense"),
    family("hyperclovax", "dense"), family("jais2", "dense"), family("cwm", "dense"),
    family("gemma3n_text", "dense", model="Gemma3nForCausalLM", few=True, num_hidden_layers=5, num_kv_shared_layers=0, laurel_rank=16,
           layer_types=["sliding_attention"] * 4 + ["full_attention"], activation_sparsity_pattern=[0.0] * 5),
    family("gemma4_text", "dense", few=True, num_global_key_value_heads=2, global_head_dim=16),
    # Conv1D, stored [in, out]
    family("gpt2", "Conv1D", few=True), family("openai-gpt", "Conv1D"), family("gpt_bigcode", "dense"),
    family("imagegpt", "Conv1D"),
    # experts
    family("mixtral", "experts"), family("qwen2_moe", "experts"), family("qwen3_moe", "experts", few=True),
    family("olmoe", "experts"), family("phimoe", "experts", few=True), family("gpt_oss", "experts", few=True),
    family("granitemoe", "experts", few=True), family("granitemoeshared", "experts"), family("deepseek_v2", "experts", num_key_value_heads=4),
    family("deepseek_v3", "experts", num_key_value_heads=4), family("deepseek_v32", "experts", num_key_value_heads=4), family("deepseek_v4", "experts", few=True),
    family("glm4_moe", "experts"), family("glm_moe_dsa", "experts", num_key_value_heads=4),
    family("ernie4_5_moe", "experts", moe_num_experts=4, moe_k=2), family("hunyuan_v1_moe", "experts"),
    family("dots1", "experts"), family("minimax", "experts"), family("minimax_m2", "experts"),
    family("lfm2_moe", "experts", layer_types=["conv", "full_attention"], num_dense_layers=1),
    family("jetmoe", "experts", few=True), family("flex_olmo", "experts"), family("afmoe", "experts"),
    family("mimo_v2_flash", "experts"), family("mistral4", "experts", num_key_value_heads=4), family("exaone_moe", "experts"),
    family("solar_open", "experts"), family("laguna", "experts"), family("hy_v3", "experts"), family("mellum", "experts"),
    family("dbrx", "experts", attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
           ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}),
    family("llama4_text", "experts", model="Llama4ForCausalLM", few=True, intermediate_size_mlp=128, interleave_moe_layer_step=1),
    family("qwen3_5_moe_text", "hybrid", model="Qwen3_5MoeForCausalLM", layer_types=["linear_attention", "full_attention"]),
    # state spaces and linear attention
    family("mamba", "state space"), family("mamba2", "state space", num_heads=8, head_dim=16, n_groups=1),
    family("falcon_mamba", "state space"), family("bamba", "hybrid", few=True, attn_layer_indices=[1]),
    family("jamba", "hybrid", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    family("falcon_h1", "hybrid", mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16),
    family("granitemoehybrid", "hybrid", few=True, layer_types=["mamba", "attention"], shared_intermediate_size=64),
    family("nemotron_h", "hybrid", hybrid_override_pattern="M*-E", num_hidden_layers=4, mamba_num_heads=8, mamba_head_dim=16,
           n_groups=1, ssm_state_size=16, moe_shared_expert_intermediate_size=64),
    family("qwen3_next", "hybrid", few=True, layer_types=["linear_attention", "full_attention"]),
    family("qwen3_5_text", "hybrid", model="Qwen3_5ForCausalLM", layer_types=["linear_attention", "full_attention"]),
    family("kimi_linear", "hybrid", num_key_value_heads=4, layer_types=["linear_attention", "full_attention"]), family("lfm2", "hybrid", layer_types=["conv", "full_attention"]),
    family("olmo_hybrid", "hybrid"), family("recurrent_gemma", "hybrid", lru_width=64, num_hidden_layers=3),
    family("rwkv", "state space", few=True, attention_hidden_size=64),
    # pictures and text
    family("llava", "vision", few=True), family("llava_next", "vision"), family("llava_onevision", "vision"),
    family("vipllava", "vision"), family("qwen2_vl", "vision", text_config=MROPE), family("qwen2_5_vl", "vision", few=True, text_config=MROPE),
    family("qwen3_vl", "vision"), family("qwen3_vl_moe", "vision", few=True, text_config={"moe_intermediate_size": 48}), family("qwen3_5", "vision", text_config={"layer_types": ["linear_attention", "full_attention"]}),
    family("qwen3_5_moe", "vision", text_config={"layer_types": ["linear_attention", "full_attention"]}), family("mistral3", "vision"), family("mllama", "vision"), family("gemma3", "vision"),
    family("gemma4", "vision", text_config={"num_global_key_value_heads": 2, "global_head_dim": 16}),
    family("llama4", "vision", text_config={"intermediate_size_mlp": 128, "interleave_moe_layer_step": 1, "pad_token_id": 0},
           vision_config={"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64, "pixel_shuffle_ratio": 0.5}),
    family("paligemma", "vision"), family("idefics2", "vision"), family("idefics3", "vision"), family("smolvlm", "vision"),
    family("internvl", "vision"), family("aya_vision", "vision"), family("aria", "vision"), family("blip", "vision"),
    family("glm4v", "vision", text_config=MROPE), family("glm4v_moe", "vision", text_config={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}), family("ovis2", "vision"),
    family("cohere2_vision", "vision"), family("deepseek_vl", "vision"), family("lfm2_vl", "vision"),
    family("paddleocr_vl", "vision", text_config=MROPE), family("got_ocr2", "vision"), family("kimi_k25", "vision", text_config={"num_key_value_heads": 4}), family("video_llava", "vision"),
    # speech
    family("whisper", "speech", model="WhisperForConditionalGeneration", few=True, max_source_positions=32, num_mel_bins=16),
    family("speech_to_text", "speech", max_source_positions=64), family("moonshine", "speech"), family("qwen2_audio", "speech", few=True),
    family("voxtral", "speech"), family("granite_speech", "speech"), family("seamless_m4t", "speech"),
    # encoders with decoders
    family("t5", "encoder-decoder", few=True), family("mt5", "encoder-decoder"), family("umt5", "encoder-decoder"),
    family("longt5", "encoder-decoder"), family("switch_transformers", "encoder-decoder", num_sparse_encoder_layers=1, num_sparse_decoder_layers=1), family("t5gemma", "encoder-decoder"),
    family("bart", "encoder-decoder", model="BartForConditionalGeneration", few=True),
    family("mbart", "encoder-decoder", model="MBartForConditionalGeneration"),
    family("pegasus", "encoder-decoder", model="PegasusForConditionalGeneration"),
    family("marian", "encoder-decoder", model="MarianMTModel"),
    family("blenderbot", "encoder-decoder", model="BlenderbotForConditionalGeneration"),
    family("m2m_100", "encoder-decoder"), family("led", "encoder-decoder", attention_window=8),
    family("prophetnet", "encoder-decoder", model="ProphetNetForConditionalGeneration"),
    family("plbart", "encoder-decoder", model="PLBartForConditionalGeneration"),
    # encoders
    family("bert", "encoder", model="BertForMaskedLM"), family("roberta", "encoder", model="RobertaForMaskedLM", few=True),
    family("xlm-roberta", "encoder", model="XLMRobertaForMaskedLM"), family("camembert", "encoder", model="CamembertForMaskedLM"),
    family("deberta", "encoder"), family("deberta-v2", "encoder"), family("electra", "encoder", model="ElectraForMaskedLM"),
    family("albert", "encoder"), family("distilbert", "encoder"), family("mpnet", "encoder"), family("modernbert", "encoder"),
    family("nomic_bert", "encoder"), family("eurobert", "encoder"), family("esm", "encoder"),
    family("roformer", "encoder", model="RoFormerForMaskedLM"), family("convbert", "encoder"), family("xlnet", "encoder"),
    family("clip", "encoder"), family("siglip", "encoder"), family("vit", "encoder"), family("dinov2", "encoder"),
]  # yapf: disable


def make(row):
    name, _, wanted, _, special = row
    torch.manual_seed(SEED)
    config = shrunk(CONFIG_MAPPING[name], special)
    model = model_class(name, wanted)(config).to(torch.bfloat16).eval()
    with torch.no_grad():  # nothing may hide behind a zero: parameters that begin as zeros or ones get values
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.float().std() == 0:
                parameter.normal_(0, 0.02)
    return model


# ---- What goes in ----------------------------------------------------------------------------------------


def inputs_of(model):
    """A little of whatever the model reads first."""
    config, taken = model.config, inspect.signature(model.forward).parameters
    draw = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, 250, (1, 12), generator=draw)
    noise = lambda *shape: torch.randn(*shape, generator=draw).to(torch.bfloat16)
    given = {}
    if model.main_input_name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 32)
        given["input_features"] = noise(1, getattr(config, "num_mel_bins", 80), frames)
        if "Speech2Text" in type(model).__name__:
            given["input_features"] = noise(1, 40, config.input_feat_per_channel)
    elif model.main_input_name == "input_values":
        given["input_values"] = noise(1, 4000)
    elif model.main_input_name == "pixel_values" and "input_ids" not in taken:
        given["pixel_values"] = noise(1, config.num_channels, config.image_size, config.image_size)
    else:
        given["input_ids"] = ids
    if "pixel_values" in taken and taken["pixel_values"].default is inspect.Parameter.empty or type(model).__name__ in (
            "CLIPModel", "SiglipModel", "BlipForConditionalGeneration", "InstructBlipForConditionalGeneration"):
        size = config.vision_config.image_size
        given["pixel_values"] = noise(1, 3, size, size)
    if "qformer_input_ids" in taken:
        given["qformer_input_ids"] = ids[:, :4]
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, :6]
    return given


def output_of(model):
    given = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs_of(model).items()}
    with torch.no_grad():
        out = model(**given)
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            return getattr(out, name).float()
    return out[0].float()


# ---- The tool --------------------------------------------------------------------------------------------


class Failed(Exception):
    pass


def nib(*arguments):
    done = subprocess.run([TOOL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def must(*arguments):
    status, output, errors = nib(*arguments)
    if status:
        raise Failed(f"nib {arguments[0]}: exit {status}: {(output + errors).strip()}")
    return output


def headers(path):
    """Every tensor's dtype and shape."""
    found = {}
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(path, name), framework="pt") as file:
                for key in file.keys():
                    part = file.get_slice(key)
                    found[key] = part.get_dtype(), tuple(part.get_shape())
    return found


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors_of(path):
    found = {}
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(path, name), framework="pt") as file:
                found.update({key: file.get_tensor(key) for key in file.keys()})
    return found


# ---- One family ------------------------------------------------------------------------------------------

NEVER = (torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.LayerNorm)


def judge_plan(model, source, rows):
    """What is wrong with a plan, by what each tensor is in the model: values are random, so that equal bytes are the same tensor."""
    wrong, owners = [], {}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(bytes_of(parameter), []).append((path, name, module))
    stored = tensors_of(source)
    planned = {row["name"]: row for row in rows}
    for name, tensor in stored.items():
        owner = owners.get(bytes_of(tensor), [])
        row = planned.get(name[:-len(".weight")] if name.endswith(".weight") else name) or planned.get(name)
        if tensor.ndim < 2:
            continue
        if row is None:
            if not any(covers(name, r["name"]) for r in rows):
                wrong.append(f"{name} {list(tensor.shape)} is not in the plan")
            continue
        if row["action"] == "keep" and not row["reason"]:
            wrong.append(f"{name} is kept without a reason")
        if row["action"] != "quantize":
            continue
        for path, _, module in owner:
            if isinstance(module, NEVER) or module is head or re.search(r"rout|relative_attention_bias|(^|\.)gate$", path):
                wrong.append(f"{name} is quantized, and is the {type(module).__name__} {path}")
    return wrong


def covers(tensor, weight):
    """Whether a stack of experts holds this weight."""
    prefix = re.sub(r"\.(gate_up_proj|down_proj|input_linear\.weight|output_linear\.weight)$", "", tensor)
    return prefix != tensor and weight.startswith(prefix)


def first_line(error):
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: " + " ".join(text.split())[:300]


def stacked(mine, name):
    """A stack of experts that the loaded model has as a list of layers (Llama 4)."""
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    base, _, last = name.rpartition(".")
    layers = []
    while last in parts and f"{base}.{len(layers)}.{parts[last][0]}.weight" in mine:
        layers.append(torch.cat([mine[f"{base}.{len(layers)}.{part}.weight"] for part in parts[last]]).T)
    return torch.stack(layers) if layers else None


def compare(loaded, reference):
    """Parameters by name, all of them."""
    wrong = []
    mine = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    for name, wanted in list(reference.named_parameters()) + list(reference.named_buffers()):
        got = mine.get(name, stacked(mine, name))
        if got is None:
            wrong.append(f"{name} is missing")
        elif got.shape != wanted.shape or not torch.equal(got.to(wanted.dtype), wanted):
            wrong.append(f"{name} differs")
    return wrong


def load_and_compare(kind, quantized, dequantized):
    """("exact", "") or (what is wrong, how), or ("cannot load", transformers' error)."""
    dtype = torch.bfloat16
    reference = kind.from_pretrained(dequantized, dtype=dtype).eval()
    try:
        wanted = output_of(reference)
    except RuntimeError:  # some models compute in FP32 only
        dtype = torch.float32
        reference = kind.from_pretrained(dequantized, dtype=dtype).eval()
        wanted = output_of(reference)
    if not torch.isfinite(wanted).all():
        raise Failed("the dequantized model's output is not finite")
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    packed_error = ""
    try:
        loaded = kind.from_pretrained(quantized, dtype=dtype).eval()
        got = output_of(loaded)
    except Exception as error:  # whatever it is, it is transformers' own
        packed_error = first_line(error)
    try:
        loaded = kind.from_pretrained(quantized, dtype=dtype, quantization_config=dense).eval()
        got = output_of(loaded) if packed_error else got
    except Exception as error:
        return "cannot load", packed_error or first_line(error)
    wrong = compare(loaded, reference)
    if wrong:
        return "computes something else", f"{len(wrong)} parameters, {'; '.join(wrong[:3])}"
    if not torch.equal(got, wanted):
        return "computes something else", f"outputs differ by {(got - wanted).abs().max().item():.3g}"
    return ("exact, dequantized", packed_error) if packed_error else ("exact", "")


def judge_output(source, before, out, back):
    """What is wrong with fresh output, and with what it becomes when it is dequantized."""
    problems = []
    for arguments in ([out], [out, "--against", source]):
        status, output, errors = nib("check", *arguments)
        if status or "no findings" not in output:
            problems.append(f"check {' '.join(arguments[1:2])}: {' / '.join((output + errors).strip().splitlines()[:6])}")
    must("dequantize", "-q", "-f", out, back)
    after = headers(back)
    differing = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    if differing:
        problems.append(f"round trip: {len(differing)} tensors differ: " +
                        ", ".join(f"{n} {before.get(n)} -> {after.get(n)}" for n in differing[:4]))
    return problems


def judge_run(model_type, out, back):
    """What is wrong with nib.torch.from_pretrained: it must compute what the dequantized model does, but for block fixed
    point, 15 bits of a block's largest activation. Experts may change where two are chosen nearly alike."""
    import nib.torch
    try:
        mine = nib.torch.from_pretrained(out, dtype=torch.float32)
        theirs = model_type.from_pretrained(back, dtype=torch.float32, experts_implementation="eager").eval()
        got, wanted = output_of(mine), output_of(theirs)
    except Exception:
        return [f"from_pretrained: {traceback.format_exc()}"]
    error = float((got - wanted).abs().max() / wanted.abs().max())
    return [] if error <= 2e-3 else [f"from_pretrained: the output differs by {error:.1e} of its largest value"]


CAUSAL = ("dense", "Conv1D", "experts", "state space", "hybrid")
IMATRIX = ("llama", "gpt_neox", "qwen3_moe")  # llama.cpp's form says the same, by its own names


def sums_by_hand(model, batches):
    """Of what comes into every linear layer, first tokens left out: {module: (rows, sums of squares)}."""
    found = {}

    def watch(name):
        def hook(module, args):
            rows = args[0].reshape(-1, args[0].shape[-1])
            rows = rows[torch.arange(len(rows)) % batches.shape[-1] != 0] if len(rows) == batches[0].numel() else rows
            count, squares = found.get(name, (0, 0))
            found[name] = count + len(rows), squares + rows.double().square().sum(0)
        return hook

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in model.named_modules()
             if isinstance(module, (torch.nn.Linear, transformers.pytorch_utils.Conv1D))]
    with torch.inference_mode():
        for tokens in batches:
            model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def calibrates(row, model, source, out):
    """Statistics of all that the tool quantizes, equal to those of the whole model: ("yes" or why not, problems)."""
    from nib import calibrate, streaming
    if row[1] not in CAUSAL or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return "", []
    batches = torch.randint(3, 250, (2, 2, 24), generator=torch.Generator().manual_seed(SEED))
    stats = out + ".stats"
    options = calibrate.Options(batch=2, first_tokens=False, imatrix=stats + ".gguf" if row[0] in IMATRIX else None)
    tensors, about = calibrate.calibrate(source, batches.flatten(0, 1), stats, options)
    names, problems = streaming.Streamed(source), []
    inputs = json.loads(about["inputs"])
    whole = type(model).from_pretrained(source, dtype=torch.bfloat16, experts_implementation="eager").eval()
    for module, (count, squares) in sums_by_hand(whole, batches).items():
        modules = [name.removesuffix(".weight") for name in names.sources(f"{module}.weight")]
        given = next((inputs[name] for name in modules if name in inputs), None)
        if given and (int(tensors[f"{given}.count"][0]) != count or not torch.allclose(
                tensors[f"{given}.sum2"][0].double(), squares, rtol=1e-6, atol=1e-12)):
            problems.append(f"calibrate: statistics of {module} differ from those of the whole model")
    conv1d = ["--for", "vllm"] if row[1] == "Conv1D" else []
    status, _, errors = nib("quantize", "-q", "-f", *conv1d, "--imatrix", stats, "--imatrix-strict", source, out)
    if status:
        return "no", problems + [f"quantize --imatrix-strict: {errors.strip()}"]
    if row[0] in IMATRIX:
        other = out + "-imatrix"
        must("quantize", "-q", "-f", "--imatrix", stats + ".gguf", "--imatrix-strict", source, other)
        wanted, got = tensors_of(out), tensors_of(other)
        problems += [f"imatrix: {name} differs" for name in wanted if bytes_of(wanted[name]) != bytes_of(got[name])]
    return "yes", problems


Result = collections.namedtuple("Result", "quantized kept verdict detail problems calibrates", defaults=[""])


def check_family(row, place):
    problems = []
    model = make(row)
    source, out, back = (os.path.join(place, part) for part in ("bf16", "nvfp4", "back"))
    fit, fit_back = os.path.join(place, "for-transformers"), os.path.join(place, "for-transformers-back")
    model.save_pretrained(source)
    # only vLLM takes a packed Conv1D, so that nothing of such a model is quantized for anybody else
    conv1d = row[1] == "Conv1D"
    if row[0] in ("openai-gpt", "imagegpt"):
        status, _, errors = nib("quantize", source, out)
        return Result(0, 0, "nothing to quantize", "nobody takes its Conv1D packed",
                      [] if status and "stored as [inputs, outputs]" in errors else [errors],
                      "nothing to quantize" if row[0] == "openai-gpt" else "")
    plan = json.loads(must("quantize", "--json", *(["--for", "vllm"] if conv1d else []), source, out))
    rows = plan["rows"]
    problems += judge_plan(model, source, rows)
    before = headers(source)
    problems += judge_output(source, before, out, back) + judge_run(type(model), out, back)
    if not conv1d:  # and for others who read another format
        must("quantize", "-q", "-f", "--format", "modelopt", "--scheme", "nvfp4", "--activations", "norm", source, out)
        problems += [f"modelopt: {problem}" for problem in
                     judge_output(source, before, out, back) + judge_run(type(model), out, back)]
    verdict, detail = "not tried", ""
    status, output, errors = nib("quantize", "-q", "--for", "transformers", source, fit)
    if status and conv1d and "stored as [inputs, outputs]" in errors:
        verdict, detail = "nothing to quantize", "transformers has no packed Conv1D"
    elif status and "would compute garbage" in errors:
        verdict, detail = "rejected", errors.strip().rpartition("it has ")[2].partition(";")[0]
        must("quantize", "-q", source, fit)  # and rightly: without --for it computes garbage
        must("dequantize", "-q", fit, fit_back)
        outcome, how = load_and_compare(type(model), fit, fit_back)
        if outcome.startswith("exact"):
            problems.append(f"--for transformers is rejected, but transformers loads it: {outcome} {how}")
    elif status:
        problems.append(f"--for transformers: {(output + errors).strip()}")
    else:
        status, output, errors = nib("check", fit, "--against", source)
        if status or "no findings" not in output:
            problems.append(f"check --for transformers: {' / '.join((output + errors).strip().splitlines()[:6])}")
        must("dequantize", "-q", fit, fit_back)
        if headers(fit_back) != before:
            problems.append("round trip --for transformers: other tensors")
        verdict, detail = load_and_compare(type(model), fit, fit_back)
        if verdict == "computes something else":
            problems.append(f"transformers {verdict}: {detail}")
    quantized = sum(r["action"] == "quantize" for r in rows)
    calibrated, more = calibrates(row, model, source, out)
    return Result(quantized, len(rows) - quantized, verdict, detail, problems + more, calibrated)


HEAD = """# Families of models

Written by `tests/check_families.py --all --write docs/families.md`, with transformers {transformers} and compressed-tensors
{compressed_tensors}: tiny models of {n} families, each made from transformers' own configuration, saved by it in BF16, and then

- quantized: no embedding, head, router, norm or convolution is; every tensor of two dims or more is in the plan, and what is
  kept has a reason (*weights*: quantized, of all that the plan has);
- checked, alone and against the original: no finding;
- dequantized: every tensor has the name, the shape and the dtype that it had; both also as ModelOpt, with activations;
- run by `nib.torch.from_pretrained` from its packed weights, in both formats: the output is that of the dequantized model;
- quantized `--for transformers`, loaded by transformers and run: every parameter and the output must equal, bit for bit, those of
  the dequantized model (*exact*). *exact, dequantized* loads with `CompressedTensorsConfig(dequantize=True)` only.

*rejected*: `--for transformers` is rejected, because transformers would load the result and compute something else: what it
cannot do is in the last column, and the script sees that it is so. vLLM loads such checkpoints. *cannot load* is transformers' own
error, which does not depend on what is in the file: its code asks packed layers for a weight, or puts tensors together that are packed.

*calibrate*: `python -m nib.calibrate` gives statistics of every weight that is quantized, equal to sums taken with hooks on the whole
model, and `nib quantize --imatrix-strict` takes them; for causal language models.

| family | class | kind | weights | transformers | calibrate | |
|---|---|---|---|---|---|---|
"""


def write_table(path, results):
    import compressed_tensors
    with open(path, "w", encoding="utf-8") as file:
        file.write(HEAD.format(transformers=transformers.__version__, n=len(results),
                               compressed_tensors=compressed_tensors.__version__))
        for row in FAMILIES:
            if row[0] in results:
                result = results[row[0]]
                detail = result.detail.replace("|", "\\|")
                file.write(f"| {row[0]} | {model_class(row[0], row[2]).__name__} | {row[1]} | {result.quantized} of "
                           f"{result.quantized + result.kept} | {result.verdict} | {result.calibrates} | {detail} |\n")
        verdicts = collections.Counter(result.verdict for result in results.values())
        file.write("\n" + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common()) + ".\n")


def main():
    global TOOL
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("tool")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--all", action="store_true", default=os.environ.get("NIB_CAMPAIGN") == "1")
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--keep", metavar="DIRECTORY")
    options = parser.parse_args()
    TOOL = os.path.abspath(options.tool)
    os.environ["NIB_LIBRARY"] = os.path.abspath(options.library)
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python"))
    rows = [r for r in FAMILIES if (r[0] in options.families if options.families else options.all or r[3])]
    torch.set_num_threads(1)  # tensors are tiny
    results, passed, failed = {}, 0, 0
    with tempfile.TemporaryDirectory(prefix="nib-families-") as work:
        for row in rows:
            place = os.path.join(options.keep or work, row[0])
            shutil.rmtree(place, ignore_errors=True)
            os.makedirs(place)
            try:
                result = check_family(row, place)
            except Failed as failure:
                result = Result(0, 0, "failed", "", [str(failure)])
            except Exception:
                result = Result(0, 0, "failed", "", [traceback.format_exc()])
            results[row[0]] = result
            print(f"{row[0]:24} {result.quantized:4} of {result.quantized + result.kept:4}  {result.verdict}  {result.detail}",
                  flush=True)
            for problem in result.problems:
                print(f"FAILED {row[0]}: {problem}", flush=True)
            passed, failed = passed + (not result.problems), failed + bool(result.problems)
            if not options.keep:
                shutil.rmtree(place, ignore_errors=True)
    if options.write:
        write_table(options.write, results)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

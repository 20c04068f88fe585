# SPDX-License-Identifier: Apache-2.0
"""GGUF files from Hugging Face directories against llama.cpp's own converter, and in llama.cpp itself.

    gguf_models.py NIB LLAMA_CPP DIRECTORY      (called by gguf_models.sh)

Tiny models of the seven families are made with transformers, each with a tokenizer of its kind. Then
- a BF16 GGUF from nib must be the one from convert_hf_to_gguf.py: every key, name, shape, type and byte;
- an NVFP4 GGUF from the directory must be the one that nib makes of the converter's BF16 GGUF;
- llama.cpp (the package xllamacpp) must load it, and its log-probabilities must be those that transformers computes with
  the dequantized weights and with inputs of products rounded as llama.cpp rounds them: to Q8_0 before NVFP4 and MXFP4, to
  BF16 before BF16. What is left is its 16-bit cache, the order of its sums, and the codes of inputs that these push over
  an edge: a part of what the rounding does. So the bound is what the rounding moves, over all tokens, from the
  log-probabilities without it, which is found without llama.cpp, for each model and its prompts: from 0.05 to 0.11, where
  those of the 64 most likely tokens differ by about 3. A wrong scale, row or key moves them by more than that.
"""
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

NIB, LLAMA_CPP, WORK = sys.argv[1:4]
sys.path.insert(0, os.path.join(LLAMA_CPP, "gguf-py"))
import gguf  # noqa: E402  llama.cpp's own, which belongs to its converter

TEXT = "the quick brown fox jumps over the lazy dog while 12345 numbers and (brackets) stand by, don't they? " * 50
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + WORDS +
         r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + WORDS +
         r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
passed = failed = 0


def check(what, good, detail=""):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    if not good:
        print("FAILED %s: %s" % (what, str(detail)[:2000]), flush=True)


# ---- Tokenizers ----------------------------------------------------------------------------------------------


def bpe(path, expression, bos, eos, vocabulary, extra=()):
    """Byte-level BPE with a few merges."""
    t = Tokenizer(models.BPE(ignore_merges=expression == LLAMA3))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if expression:
        steps.insert(0, pre_tokenizers.Split(Regex(expression), behavior="isolated"))
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True),
                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    t.pre_tokenizer = pre_tokenizers.Sequence(steps)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=vocabulary - 4 - len(extra), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[s for s in (bos, eos) if s]))
    post = [processors.ByteLevel(trim_offsets=False)]
    if bos:
        number = t.token_to_id(bos)
        post.append(processors.TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"],
                                                  special_tokens=[(bos, number)]))
    t.post_processor = processors.Sequence(post)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, bos_token=bos, eos_token=eos,
                                                model_max_length=int(1e30))
    fast.add_tokens(list(extra))
    fast.add_tokens(["<|tool|>"])
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(path)


def sentencepiece(path, vocabulary, with_json):
    """A SentencePiece model; or, of the same, the tokenizer.json that transformers makes."""
    import sentencepiece as spm
    text = os.path.join(WORK, "text")
    with open(text, "w") as file:
        file.write(TEXT.replace("? ", "?\n"))
    prefix = os.path.join(path, "tokenizer")
    spm.SentencePieceTrainer.train(input=text, model_prefix=prefix, vocab_size=vocabulary - 8, model_type="bpe",
                                   byte_fallback=True, character_coverage=1.0, hard_vocab_limit=False,
                                   user_defined_symbols=["<user>"], minloglevel=2)
    os.remove(prefix + ".vocab")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
              "add_bos_token": True, "add_eos_token": False, "add_prefix_space": True, "model_max_length": int(1e30),
              "added_tokens_decoder": {"0": {"content": "<unk>", "special": True},
                                       "1": {"content": "<s>", "special": True},
                                       "2": {"content": "</s>", "special": True},
                                       str(vocabulary - 2): {"content": "<tool\u2581call>", "special": False}}}
    if with_json:
        model = spm.SentencePieceProcessor(model_file=prefix + ".model")
        vocab = {model.id_to_piece(i): i for i in range(model.vocab_size())}
        merges = [(a, b) for a in vocab for b in vocab if len(a) + len(b) < 4 and a + b in vocab][:50]
        t = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>",
                                                    unk_token="<unk>")
        count = model.vocab_size()
        fast.save_pretrained(path)
        os.remove(prefix + ".model")
        return count
    with open(os.path.join(path, "tokenizer_config.json"), "w") as file:
        json.dump(config, file)
    return vocabulary


# ---- Models --------------------------------------------------------------------------------------------------

V = 320
COMMON = dict(vocab_size=V, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1)
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 128, "rope_theta": 500000.0}


def models_to_make():
    """name, configuration, how its tokenizer is made, and the name of its pre-tokenizer"""
    c = transformers.CONFIG_MAPPING
    llama_bpe = lambda path: bpe(path, LLAMA3, "<|begin|>", "<|end|>", V, ["plain\u2581word"])
    qwen_bpe = lambda path: bpe(path, QWEN2, None, "<|endoftext|>", V)
    gpt_bpe = lambda path: bpe(path, GPT4O, "<|start|>", "<|return|>", V)
    spm = lambda path: sentencepiece(path, V, False)
    spm_json = lambda path: sentencepiece(path, V, True)
    yield "Tiny-Llama-3.1-0.6M-Instruct", c["llama"](**COMMON, rope_parameters=LLAMA3_ROPE), llama_bpe, "llama-bpe"
    yield "tiny-llama-spm", c["llama"](**COMMON, attention_bias=True), spm, None
    yield "smol-llama-v2", c["llama"](**COMMON, tie_word_embeddings=True), lambda p: bpe(p, None, None, "<|end|>", V), "smollm"
    yield "Mistral-0.3K-v0.3", c["mistral"](**COMMON, head_dim=64, sliding_window=None), spm_json, None
    yield "mistral_tiny", c["mistral"](**COMMON), spm, None
    yield "Qwen2.5-0.5M-Chat", c["qwen2"](**COMMON), qwen_bpe, "qwen2"
    yield "Qwen3-tiny", c["qwen3"](**{**COMMON, "head_dim": 64}, tie_word_embeddings=True), qwen_bpe, "qwen2"
    yield "qwen3-moe", c["qwen3_moe"](**COMMON, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=4,
                                      head_dim=32), qwen_bpe, "qwen2"
    yield "gemma-3-0.4m-it", c["gemma3_text"](**{**COMMON, "head_dim": 64}, sliding_window=64,
                                              query_pre_attn_scalar=64), spm, None
    yield "gpt-oss-tiny", c["gpt_oss"](**{**COMMON, "head_dim": 64, "intermediate_size": 128}, num_local_experts=4,
                                       num_experts_per_tok=4, sliding_window=32, layer_types=["sliding_attention", "full_attention"]), gpt_bpe, "gpt-4o"


# Front matter of model cards, by model: what the Hub's cards are made of, and what nothing can be made of.
CARDS = {
    "Tiny-Llama-3.1-0.6M-Instruct": """---
# a comment
language:
- en
- de
- no
library_name: transformers
pipeline_tag: text-generation
tags:
  - facebook
  - "pytorch"

  - 'it''s llama-3'  # and another
license: llama3.1
license_name: llama3.1-community
license_link: https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/LICENSE
base_model: meta-llama/Meta-Llama-3.1-0.6M-v2
extra_gated_prompt: >-
  tags:
  - nothing of this
extra_gated_fields:
  First Name: text
  license: date_picker
new_version: 3.0
datasets: [a-b/some-data, "https://huggingface.co/datasets/c", https://huggingface.co/org/web-text-2,
  'plain words here']
---
# Tiny
license: none
""",
    "Mistral-0.3K-v0.3": """---
license:
- mit
- apache-2.0
language: fr
name: A Name of its own
author: somebody
version: "1.0"
model_creator: somebody else
organization: An Organization
description: One line, and no more.
url: https://example.org/model
base_model:
- mistralai/Mistral-7B-v0.3
- ./local/thing
- a sentence of words
base_model_relation: finetune
model-index:
- name: x
  results:
  - task:
      type: text-generation
datasets:
tags: []
---
""",
    "Qwen3-tiny": "---\r\nlicense: apache-2.0\r\ntags:\r\n\t- chat\r\nwidget:\r\n- text: hello\r\n---\r\n",
    "mistral_tiny": "No front matter\n---\nlicense: mit\n---\n",
}


def make(name, config, make_tokenizer):
    path = os.path.join(WORK, name)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    torch.manual_seed(len(name))
    size = make_tokenizer(path)
    if size:
        config.vocab_size = size
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, p in model.named_parameters():  # norms and biases that are not ones and zeros
            scale = 0.3 if "norm" in key or "bias" in key or "sinks" in key else 1.0 / math.sqrt(p.shape[-1])
            p.copy_(torch.randn_like(p) * scale + (1.0 if "norm" in key and config.model_type != "gemma3_text" else 0))
    model = model.to(torch.bfloat16)
    model.generation_config.temperature = 0.7
    model.generation_config.top_k = 40
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    if config.model_type == "gpt_oss":
        to_mxfp4(path)
    if name in CARDS:
        with open(os.path.join(path, "README.md"), "w", newline="") as file:
            file.write(CARDS[name])
    return path


def to_mxfp4(path):
    """Experts as gpt-oss is shipped: blocks and scales."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(os.path.join(path, "model.safetensors"))
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj")) and ".experts." in n]:
        values = tensors.pop(name).float().transpose(1, 2).contiguous().numpy()  # [E, N, K]
        raw = gguf.quants.quantize(values.reshape(-1, values.shape[-1]), gguf.GGMLQuantizationType.MXFP4)
        raw = raw.reshape(values.shape[0], values.shape[1], -1, 17)
        codes = np.concatenate([raw[..., 1:] & 15, raw[..., 1:] >> 4], -1)  # 32 of a block, in order
        tensors[name + "_blocks"] = torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)
        tensors[name + "_scales"] = torch.from_numpy(raw[..., 0].copy())
    save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})
    with open(os.path.join(path, "config.json")) as file:
        config = json.load(file)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
                                     "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(config, file)


# ---- Files ---------------------------------------------------------------------------------------------------

# A tokenizer of a few hundred tokens has no hash that the converter knows: its name is given instead.
CONVERTER = """
import runpy, sys
root, pre, *arguments = sys.argv[1:]
sys.path.insert(0, root)
sys.path.insert(1, root + "/gguf-py")
from conversion.base import TextModel
if pre:
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
sys.argv = ["convert_hf_to_gguf.py", *arguments]
runpy.run_path(root + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def convert(path, out, pre):
    done = subprocess.run([sys.executable, "-c", CONVERTER, LLAMA_CPP, pre or "", path, "--outfile", out, "--outtype",
                           "bf16"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])


def nib(*arguments):
    done = subprocess.run([NIB, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("nib %s: %s" % (" ".join(arguments), done.stderr))


def read(path):
    reader = gguf.GGUFReader(path)
    keys = {}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.file_type", "nib.provenance"):
            keys[key] = ([t.name for t in field.types], field.contents())
    tensors = {t.name: (t.tensor_type.name, [int(d) for d in t.shape], t.data.tobytes()) for t in reader.tensors}
    return keys, tensors


def compare(what, ours, theirs):
    for kind, a, b in (("keys", ours[0], theirs[0]), ("tensors", ours[1], theirs[1])):
        check("%s: names of %s" % (what, kind), set(a) == set(b),
              "only nib %r, only the other %r" % (sorted(set(a) - set(b)), sorted(set(b) - set(a))))
        for name in sorted(set(a) & set(b)):
            shown = (a[name][:2], b[name][:2]) if kind == "tensors" else (a[name], b[name])
            check("%s: %s" % (what, name), a[name] == b[name], shown)


# ---- In llama.cpp --------------------------------------------------------------------------------------------


def dequantized_model(path, file):
    """transformers' model with the weights of a GGUF file, decoded and named by gguf-py."""
    config = transformers.AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reader = gguf.GGUFReader(file)
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(d) for d in reversed(t.shape)])
              for t in reader.tensors}
    types, kinds = {t.name: t.tensor_type.name for t in reader.tensors}, {}
    for name in [n for n in values if n.endswith(".scale")]:
        weight = name[:-len("scale")] + "weight"
        scale = values[name].reshape([-1] + [1] * (values[weight].ndim - 1))
        values[weight] = values[weight] * scale
    arch = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[reader.fields["general.architecture"].contents()]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stack = lambda layer, part: values["blk.%s.ffn_%s" % (layer, part)]
    for name, p in model.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else None
        kind = "bias" if name.endswith("_bias") else "weight"
        if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            place = "blk.%s.ffn_gate_exps.%s" % (layer, kind)
            gate, up = stack(layer, "gate_exps." + kind), stack(layer, "up_exps." + kind)
            if config.model_type == "gpt_oss":
                value = np.stack([gate, up], 2).reshape(gate.shape[0], -1, *gate.shape[2:])
                value = value.swapaxes(1, 2) if kind == "weight" else value
            else:
                value = np.concatenate([gate, up], 1)
        elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):
            place = "blk.%s.ffn_down_exps.%s" % (layer, kind)
            value = stack(layer, "down_exps." + kind)
            value = value.swapaxes(1, 2) if config.model_type == "gpt_oss" and kind == "weight" else value
        else:
            hf = name if "sinks" not in name else name + ".weight"
            place = names.get_name(hf, try_suffixes=(".weight", ".bias"))
            value = values[place]
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            if config.model_type in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
                rows = value.reshape(heads, -1, 2, *value.shape[1:])
                value = rows.swapaxes(1, 2).reshape(value.shape)
            if config.model_type == "gemma3_text" and "norm" in name:
                value = value - 1
        kinds[name] = types[place]
        with torch.no_grad():
            p.copy_(torch.from_numpy(np.array(value)).reshape(p.shape))
    return model.eval(), kinds


LOGITS = """
import json, sys
import xllamacpp as xlc
p = xlc.CommonParams()
p.model.path = sys.argv[1]
p.n_ctx, p.n_parallel, p.warmup, p.n_gpu_layers, p.cpuparams.n_threads = 256, 1, False, 0, 2
prompts, count = json.loads(sys.argv[2])
server = xlc.Server(p)
for prompt, tokens in enumerate(prompts):
    answer = server.handle_completions({"prompt": tokens, "max_tokens": 1, "logprobs": count, "temperature": -1.0,
                                        "cache_prompt": False})
    found = answer["choices"][0]["logprobs"]  # none where the text would end
    if found:
        top = found["content"][0]["top_logprobs"]
        print("RESULT " + json.dumps([prompt, [[t["id"], t["logprob"]] for t in top]]))
"""


def run_llama(file, prompts, count):
    done = subprocess.run([sys.executable, "-c", LOGITS, file, json.dumps([prompts, count])], capture_output=True,
                          text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(done.stderr[-3000:] + done.stdout[-500:])
    return [json.loads(line[len("RESULT "):]) for line in lines]


def as_q8_0(x):
    """Activations as llama.cpp brings them to a product with NVFP4 or MXFP4: of 32, the largest is 127; scales are F16."""
    blocks = x.float().reshape(-1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks))
    codes = torch.sign(codes) * torch.floor(codes.abs() + 0.5)
    return (codes * scale.half().float()).reshape(x.shape)


class Rounding:
    """Products of a model with inputs rounded as llama.cpp rounds them, by the type of the weight in the file."""

    def __init__(self, model, kinds):
        self.kinds = {p.untyped_storage().data_ptr(): kinds[name] for name, p in model.named_parameters() if name in kinds}
        self.linear = torch.nn.functional.linear

    def __call__(self, x, weight, bias=None):
        kind = self.kinds.get(weight.untyped_storage().data_ptr())
        if kind in ("NVFP4", "MXFP4"):
            x = as_q8_0(x)
        elif kind == "BF16":
            x = x.bfloat16().float()
        return self.linear(x, weight, bias)

    def __enter__(self):
        torch.nn.functional.linear = self

    def __exit__(self, *_):
        torch.nn.functional.linear = self.linear


def logits(what, path, file):
    model, kinds = dequantized_model(path, file)
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, 250, (12, 24), generator=generator)
    with torch.no_grad():
        exact = torch.log_softmax(model(prompts).logits[:, -1].double(), -1)
        with Rounding(model, kinds):
            wanted = torch.log_softmax(model(prompts).logits[:, -1].double(), -1)
    bound = (exact - wanted).abs().max().item()
    worst = 0
    found = run_llama(file, prompts.tolist(), model.config.vocab_size)
    for prompt, pairs in found:
        most = sorted(pairs, key=lambda pair: -pair[1])[:64]
        worst = max(worst, max(abs(wanted[prompt][i].item() - p) for i, p in most))
    check("%s: log-probabilities in llama.cpp" % what, worst <= bound and len(found) > 1, "%.4f" % worst)
    print("  %s: largest difference of log-probabilities %.4f of %d prompts, bound %.4f, spread %.2f" %
          (what, worst, len(found), bound, (wanted.max() - wanted.min()).item()), flush=True)


def main():
    only = os.environ.get("NIB_MODELS", "")
    for name, config, make_tokenizer, pre in models_to_make():
        if only and only not in name:
            continue
        try:
            path = make(name, config, make_tokenizer)
            theirs, ours, own, other = (os.path.join(WORK, f) for f in
                                        ("theirs.gguf", "ours.gguf", "nvfp4.gguf", "other.gguf"))
            for file in (theirs, ours, own, other):
                if os.path.exists(file):
                    os.remove(file)
            convert(path, theirs, pre)
            if config.model_type != "gpt_oss":  # dequantizing would not leave its MXFP4
                nib("dequantize", "-q", "--dtype", "bf16", path, ours)
                compare(name, read(ours), read(theirs))
            nib("quantize", "-q", path, own)
            nib("quantize", "-q", theirs, other)
            a, b, plain = read(own), read(other), read(theirs)
            compare(name + " as NVFP4", a, b)
            quantized = {n for n, t in a[1].items() if t[0] == "NVFP4"}
            check("%s: weights are quantized" % name, len(quantized) >= 4, quantized)
            kept = {n: t for n, t in a[1].items() if n not in quantized and not n.endswith(".scale")}
            check("%s: what stays is the converter's" % name, all(plain[1].get(n) == t for n, t in kept.items()),
                  [n for n, t in kept.items() if plain[1].get(n) != t])
            logits(name, path, own)
        except Exception as error:  # whatever fails in any of the packages
            check(name, False, "%s: %s" % (type(error).__name__, error))
    print("%d passed, %d failed, 0 skipped" % (passed, failed))
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())

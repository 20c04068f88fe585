#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pre-train a small Llama in NVFP4 with FSDP2 and torch.compile, on the text beside this file.

    python examples/pretrain_llama.py                      two processes on this machine's CPU
    python examples/pretrain_llama.py --device cuda --ranks 1
    python examples/pretrain_llama.py --steps 400          goes on from the checkpoint that is there
    nib check pretrain_llama.out/hf-nvfp4

Weights of linear layers are NVFP4 shards, their masters and moments FP32; embeddings, norms and the head stay as they
are. Bytes are the tokens. The directory --out gets checkpoint/ (torch.distributed.checkpoint), losses.json, losses.svg
and, in the end, the model as Hugging Face has it: hf/ in BF16, from the masters, and hf-nvfp4/.
"""
import argparse
import json
import lzma
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import nib
import nib.torch as nt
from nib.torch.recipe import NVFP4BlockScaling

TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "text", "pentateuch.txt.xz")
RECIPE = NVFP4BlockScaling()
TOKENS = 256


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nt.Linear(width, width, bias=False))

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        q, k, v = (proj(x).view(batch, length, self.heads, -1).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (t * cos + torch.cat((-t[..., t.shape[-1] // 2:], t[..., :t.shape[-1] // 2]), -1) * sin for t in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj = (nt.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nt.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A decoder layer, by the names of Hugging Face's Llama."""

    def __init__(self, width, heads, inner):
        super().__init__()
        self.self_attn, self.mlp = Attention(width, heads), MLP(width, inner)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))

    def forward(self, x, cos, sin):
        with nt.autocast(recipe=RECIPE):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin)
            return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embed_tokens = nn.Embedding(TOKENS, options.width)
        self.layers = nn.ModuleList(Block(options.width, options.heads, options.inner) for _ in range(options.blocks))
        self.norm = nn.RMSNorm(options.width, eps=1e-5)


class Llama(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.model, self.head_dim = Decoder(options), options.width // options.heads
        self.lm_head = nn.Linear(options.width, TOKENS, bias=False)

    def forward(self, tokens):
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), frequencies).repeat(1, 2)
        x, cos, sin = self.model.embed_tokens(tokens), angles.cos(), angles.sin()
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))


def build(options, device):
    """The model in shards and its optimizer."""
    torch.manual_seed(options.seed)
    with nt.quantized_model_init(recipe=RECIPE):
        model = Llama(options)
    for parameter in (model.model.embed_tokens.weight, model.lm_head.weight):
        nn.init.normal_(parameter, std=0.02)
    model.to(device)
    for layer in model.model.layers:
        if options.compile != "off":
            layer.compile(backend=options.compile)
        fully_shard(layer)
    fully_shard(model)
    return model, nt.FusedAdam(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1,
                               master_weights=True)


# ---- Checkpoints -----------------------------------------------------------------------------------------


def state_of(model, optimizer, step):
    """All that is needed to go on, by names; shards stay shards."""
    states = {}
    for name, parameter in model.named_parameters():
        if not optimizer.state[parameter]:
            optimizer.initialize_state(parameter)
        states[name] = dict(optimizer.state[parameter])
    return {"model": dict(model.named_parameters()), "optimizer": states, "step": step}


def save(model, optimizer, step, losses, options):
    dcp.save(state_of(model, optimizer, step), checkpoint_id=os.path.join(options.out, "checkpoint"))
    if dist.get_rank() == 0:
        with open(os.path.join(options.out, "losses.json"), "w", encoding="utf-8") as file:
            json.dump(losses, file)
        plot(losses, os.path.join(options.out, "losses.svg"))


def load(model, optimizer, options):
    """(the step to begin with, losses so far) of the checkpoint, if there is one."""
    path = os.path.join(options.out, "checkpoint")
    if not os.path.exists(os.path.join(path, ".metadata")):
        return 0, []
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=path)
    for group in optimizer.param_groups:
        group["step"] = state["step"]
    with open(os.path.join(options.out, "losses.json"), encoding="utf-8") as file:
        return state["step"], json.load(file)


def export(model, optimizer, options):
    """hf/ in BF16, from the masters, and hf-nvfp4/."""
    tensors = {}
    for name, parameter in model.named_parameters():
        kept = optimizer.state[parameter].get("master_param", parameter)
        tensors[name] = kept.full_tensor().detach().bfloat16().cpu().contiguous()
    if dist.get_rank():
        return
    from safetensors.torch import save_file
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": options.width,
              "intermediate_size": options.inner, "num_hidden_layers": options.blocks, "vocab_size": TOKENS,
              "num_attention_heads": options.heads, "num_key_value_heads": options.heads, "hidden_act": "silu",
              "max_position_embeddings": options.context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    directory = os.path.join(options.out, "hf")
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    save_file(tensors, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
    nib.quantize_checkpoint(directory, os.path.join(options.out, "hf-nvfp4"), force=True)


def plot(losses, path, wide=720, high=360):
    """The curve as SVG: means of neighboring steps."""
    span = max(1, len(losses) // 200)
    means = [sum(losses[i:i + span]) / span for i in range(0, len(losses) - span + 1, span)]
    low, top = min(means), max(means) + 1e-9

    def place(i, loss):
        x, y = 50 + (wide - 70) * i / max(1, len(means) - 1), 20 + (high - 60) * (top - loss) / (top - low)
        return f"{x:.1f},{y:.1f}"
    curve = " L".join(place(i, loss) for i, loss in enumerate(means))
    marks = "".join(f'<text x="44" y="{y}" text-anchor="end">{value:.2f}</text>'
                    for y, value in ((24, top), (high - 36, low)))
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif" '
                   f'font-size="12"><rect width="100%" height="100%" fill="white"/>{marks}<path d="M{curve}" '
                   f'fill="none" stroke="#c23b22"/><text x="{wide // 2}" y="{high - 10}" text-anchor="middle">step (to '
                   f"{len(losses)}): training loss in nats per byte</text></svg>\n")


# ---- Training --------------------------------------------------------------------------------------------


def train(rank, options, store):
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.FileStore(store, options.ranks), rank=rank,
                            world_size=options.ranks)
    with lzma.open(options.text, "rb") as file:
        data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    model, optimizer = build(options, device)
    begin, losses = load(model, optimizer, options)
    for step in range(begin, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min((step + 1) / options.warmup, math.sqrt(options.warmup / (step + 1)))
        draw = torch.Generator().manual_seed(options.ranks * step + rank)  # of the step: resumed or not, the same
        torch.manual_seed(options.ranks * step + rank)
        at = torch.randint(len(data) - options.context, (options.batch,), generator=draw).tolist()
        windows = torch.stack([data[i:i + options.context + 1] for i in at]).to(device).long()
        logits = model(windows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(round(mean.item() / options.ranks, 6))
        if rank == 0 and ((step + 1) % 10 == 0 or step + 1 == options.steps):
            print(f"step {step + 1}: {losses[-1]:.4f}", flush=True)
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            save(model, optimizer, step + 1, losses, options)
    export(model, optimizer, options)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2, help="processes; on cuda one for each GPU")
    parser.add_argument("--steps", type=int, default=200, help="in all, those of the checkpoint included")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=8, help="windows of a rank and step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=192, help="a multiple of 16 times the number of ranks")
    parser.add_argument("--inner", type=int, default=512, help="of the MLP, likewise")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--compile", default="inductor", help="a backend of torch.compile, or off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", default=TEXT, help="an .xz file")
    parser.add_argument("--out", default="pretrain_llama.out")
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(train, (options, os.path.join(directory, "store")), nprocs=options.ranks)


if __name__ == "__main__":
    main()

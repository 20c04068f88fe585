# SPDX-License-Identifier: Apache-2.0
"""megatron-core over nib's aliases: its GPT of TransformerEngine's layers trains in NVFP4, and every loss is that of the
same model in plain PyTorch which calls quantizers and products by hand.

    check_megatron.py libnib.so nib        megatron-core 0.16.1 is looked for in build/megatron
"""
import os
import sys
import tempfile
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.environ["NIB_LIBRARY"] = sys.argv[1]
sys.path[:0] = [os.path.join(ROOT, "python"), os.path.join(ROOT, "build/megatron")]
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import nib.torch as nt  # noqa: E402
from nib.torch.products import multiply  # noqa: E402
from nib.torch.recipe import NVFP4BlockScaling  # noqa: E402

LAYERS, HIDDEN, HEADS, FFN, VOCABULARY, LENGTH, BATCH, STEPS, MICROBATCHES = 2, 64, 4, 128, 96, 32, 2, 20, 2
RECIPE = NVFP4BlockScaling()  # stochastic rounding too: the same draws in the same order


# ---- By hand ---------------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """x W^T in NVFP4: three quantizers, three products."""

    @staticmethod
    def forward(ctx, x, w):
        rows = x.detach().reshape(-1, x.shape[-1])
        qx, qw = RECIPE.make_quantizer("input")(rows), RECIPE.make_quantizer("weight")(w.detach())
        ctx.operands, ctx.shape = (qx, qw), x.shape
        return multiply(qx, qw).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx, g):
        qx, qw = ctx.operands
        qg = RECIPE.make_quantizer("grad_output")(g.reshape(-1, g.shape[-1]))
        return (multiply(qg, qw, b_columnwise=True).view(ctx.shape),
                multiply(qg, qx, a_columnwise=True, b_columnwise=True))


class CrossEntropy(torch.autograd.Function):
    """-log softmax at the targets; the gradient is softmax less the targets."""

    @staticmethod
    def forward(ctx, logits, targets):
        logits = logits - logits.max(dim=-1, keepdim=True).values
        at = logits.gather(-1, targets[..., None])[..., 0]
        exps = logits.exp()
        total = exps.sum(dim=-1)
        ctx.save_for_backward(exps / total[..., None], targets)
        return total.log() - at

    @staticmethod
    def backward(ctx, g):
        softmax, targets = ctx.saved_tensors
        return (softmax - F.one_hot(targets, softmax.shape[-1])) * g[..., None], None


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def by_hand(p, tokens, labels):
    """The mean of the losses, from parameters by Megatron's names."""
    x = F.embedding(tokens, p["embedding.word_embeddings.weight"]) + p["embedding.position_embeddings.weight"][:LENGTH]
    x = x.transpose(0, 1).contiguous()  # [sequence, batch, hidden]
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for i in range(LAYERS):
        def weight(name):
            return p[f"decoder.layers.{i}.{name}"]
        qkv = Product.apply(norm(x, weight("self_attention.linear_qkv.layer_norm_weight")),
                            weight("self_attention.linear_qkv.weight"))
        q, k, v = qkv.view(LENGTH, BATCH, HEADS, 3, HIDDEN // HEADS).permute(3, 1, 2, 0, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden).permute(2, 0, 1, 3).reshape(x.shape)
        x = x + Product.apply(attended, weight("self_attention.linear_proj.weight"))
        gate, up = Product.apply(norm(x, weight("mlp.linear_fc1.layer_norm_weight")),
                                 weight("mlp.linear_fc1.weight")).chunk(2, dim=-1)
        x = x + Product.apply(F.silu(gate) * up, weight("mlp.linear_fc2.weight"))
    logits = F.linear(norm(x, p["decoder.final_layernorm.weight"]), p["output_layer.weight"])
    return CrossEntropy.apply(logits, labels.t()).t().contiguous().mean()


# ---- Megatron's ------------------------------------------------------------------------------------------


def megatron_model():
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    store = torch.distributed.FileStore(tempfile.mktemp(), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN, fp4="e2m1",
        fp4_recipe="nvfp4", use_cpu_initialization=True, params_dtype=torch.float32, pipeline_dtype=torch.float32,
        hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False)
    return GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=VOCABULARY,
                    max_sequence_length=LENGTH, position_embedding_type="learned_absolute",
                    share_embeddings_and_output_weights=False)


def batches(step):
    """Tokens of the microbatches of a step: sequences that go up by one, two or three."""
    data = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        first, stride = torch.randint(VOCABULARY, (2, BATCH, 1), generator=data)
        yield (first + (1 + stride % 3) * torch.arange(LENGTH + 1)) % VOCABULARY


def train(parameters, loss_of, begin=lambda: None):
    """The loss of every microbatch; begin() is called before those of a step."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=3e-3), []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        begin()
        for tokens in batches(step):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def main():
    nt.install_aliases()
    import megatron.core
    assert megatron.core.__version__ == "0.16.1" and not hasattr(megatron.core, "__nib_alias__")
    torch.manual_seed(0)
    model = megatron_model()
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    theirs = train(model.parameters(), lambda tokens, labels: model(tokens, positions, None, labels=labels).mean(),
                   model.set_is_first_microbatch)  # layers keep the quantized weights of a step
    mine = train(copies.values(), lambda tokens, labels: by_hand(copies, tokens, labels))
    checks = {"losses": theirs == mine and len(mine) == STEPS * MICROBATCHES, "learning": mine[-1] < 0.9 * mine[0],
              "weights": all(torch.equal(p, copies[n]) for n, p in model.named_parameters()),
              "layers of nib": any(isinstance(module, nt.LayerNormLinear) for module in model.modules())}
    if not all(checks.values()):
        print(checks, *zip(theirs, mine), sep="\n")
    print(f"{sum(checks.values())} passed, {len(checks) - sum(checks.values())} failed, 0 skipped")
    torch.distributed.destroy_process_group()
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

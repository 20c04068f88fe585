# SPDX-License-Identifier: Apache-2.0
"""nib.torch.from_pretrained on directories of peers, what it rejects, and its layers. tests/check_families.py runs the
directories that nib writes, family by family."""
import copy
import json
import os

import numpy as np
import pytest

import nib

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
safetensors_torch = pytest.importorskip("safetensors.torch")

import nib.torch  # noqa: E402
from nib import streaming  # noqa: E402
from nib.torch.packed import Matrix, Packed, PackedLinear, PackedStack  # noqa: E402
from nib.torch.pretrained import PackedSource  # noqa: E402

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = torch.randint(3, 120, (2, 20), generator=torch.Generator().manual_seed(5))
MODULES = [f"model.layers.{i}.{part}" for i in range(2)
           for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                        "mlp.up_proj", "mlp.down_proj")]


def llama(**more):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **more})).to(torch.bfloat16).eval()


def test_float8_beside_nvfp4(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    for format in ("compressed-tensors", "modelopt"):
        out = tmp_path / format
        nib.quantize_checkpoint(tmp_path / "model", out, format=format, fp8=["*v_proj", "*down_proj"])
        nib.dequantize_checkpoint(out, tmp_path / (format + "-plain"), dtype="f32")
        with torch.inference_mode():
            got = nib.torch.from_pretrained(out, dtype=torch.float32)(TOKENS).logits
            wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / (format + "-plain"),
                                                                       dtype=torch.float32)(TOKENS).logits
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


def quantized(weight, tensor_scale):
    """(codes, scales, values) of a weight by a tensor scale."""
    t = nib.quantize(weight.detach().float().numpy(), columnwise=False, tensor_scale_rule="exact",
                     overrides={"tensor_scale": tensor_scale})
    values = torch.from_numpy(np.array(t.dequantize("float32")))
    return torch.from_numpy(t.row_data.copy()), torch.from_numpy(t.valid_part("row_scale").copy()), values


def write(directory, style="compressed-tensors", change=None, **more):
    """A directory as peers write it, tensor scales no powers of two; the model of its values."""
    model = llama(**more)
    tensors = dict(model.state_dict())
    model.float()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for i, name in enumerate(MODULES):
        scale = np.float32(0.0003 + 0.00001 * i)
        codes, scales, values = quantized(tensors.pop(name + ".weight"), scale)
        model.get_submodule(name).weight.data.copy_(values)
        scales = scales.view(torch.float8_e4m3fn)
        if style == "modelopt":
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scales,
                        f"{name}.weight_scale_2": torch.tensor(scale), f"{name}.input_scale": torch.tensor(0.002)}
        else:
            tensors |= {f"{name}.weight_packed": codes, f"{name}.weight_scale": scales,
                        f"{name}.weight_global_scale": torch.tensor([1 / scale])}
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(1.0)  # of a KV cache
    if change:
        change(tensors)
    model.config.save_pretrained(directory)
    path = os.path.join(directory, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config["quantization_config"] = {"quant_method": style, "format": "nvfp4-pack-quantized"}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    safetensors_torch.save_file({name: t.contiguous() for name, t in tensors.items()},
                                os.path.join(directory, "model.safetensors"))
    return model


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt"])
def test_directories_of_peers(style, tmp_path):
    """Logits are those of the dequantized model, but for block fixed point; tied heads, biases, generation."""
    original = write(tmp_path, style, tie_word_embeddings=style == "modelopt", attention_bias=True)
    model = nib.torch.from_pretrained(tmp_path, dtype=torch.float32)
    found = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert sorted(found) == sorted(MODULES)
    assert not any(name.rpartition(".")[0] in found for name, _ in model.named_parameters() if "bias" not in name)
    with torch.inference_mode():
        got, wanted = model(TOKENS).logits, original(TOKENS).logits
    assert (got - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    again = model.generate(TOKENS[:1], max_new_tokens=5, do_sample=False)
    assert torch.equal(again, original.generate(TOKENS[:1], max_new_tokens=5, do_sample=False))
    packed = sum(module.matrix.nbytes for module in found.values())
    assert packed <= 0.7 * sum(2 * m.in_features * m.out_features for m in found.values())  # tiny: padding of scales
    with pytest.raises(NotImplementedError, match="not saved"):
        model.save_pretrained(tmp_path / "again")
    half = nib.torch.from_pretrained(tmp_path)
    assert half.dtype == torch.bfloat16 and half(TOKENS).logits.dtype == torch.bfloat16
    four = nib.torch.from_pretrained(tmp_path, activations="nvfp4", dtype=torch.float32)
    with torch.inference_mode():
        error = (four(TOKENS).logits - wanted).norm() / wanted.norm()
    assert 0.01 < error < 0.5  # of four bits


def test_compressed_tensors_writes(tmp_path):
    """What compressed-tensors itself packs."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    model = llama()
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert isinstance(scheme, QuantizationScheme)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for name in MODULES:
        module = model.get_submodule(name)
        amax = module.weight.detach().float().abs().max()
        module.weight_global_scale.data.fill_(2688 / amax)
        blocks = module.weight.detach().float().unflatten(-1, (-1, 16)).abs().amax(-1)
        module.weight_scale.data.copy_((blocks / 6 * module.weight_global_scale).to(torch.float8_e4m3fn))
    ModelCompressor(quantization_config=config).compress_model(model)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors
    model.config.save_pretrained(tmp_path)
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    mine = nib.torch.from_pretrained(tmp_path, dtype=torch.float32)
    original = llama()
    for name in MODULES:
        weight = original.get_submodule(name).weight.float()
        error = (mine.get_submodule(name).matrix.dequantize() - weight).norm() / weight.norm()
        assert error < 0.12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_on_a_gpu(activations, tmp_path):
    """The host's logits within what BF16 rounds, packed weights there, and tokens of a prompt."""
    write(tmp_path, "modelopt")
    host = nib.torch.from_pretrained(tmp_path, activations)
    there = nib.torch.from_pretrained(tmp_path, activations, device="cuda")
    layer = there.get_submodule(MODULES[0])
    assert isinstance(layer, PackedLinear) and layer.matrix.runs[0].codes.is_cuda
    with torch.inference_mode():
        wanted = host(TOKENS).logits.float()
        for tokens, expected in ((TOKENS, wanted), (TOKENS[:, :1], host(TOKENS[:, :1]).logits.float())):
            found = there(tokens.cuda()).logits.float().cpu()
            assert (found - expected).norm() < (0.05 if activations == "bf16" else 0.2) * expected.norm()
        made = there.generate(TOKENS.cuda(), max_new_tokens=4, do_sample=False)
    assert made.is_cuda and made.shape == (2, 24)


def test_by_layers(tmp_path):
    """The same logits where one layer is in memory at a time."""
    write(tmp_path)
    with torch.inference_mode():
        wanted = nib.torch.from_pretrained(tmp_path)(TOKENS, use_cache=False).logits
    model = streaming.Streamed(tmp_path, source=PackedSource(tmp_path))
    state = None
    for n in range(len(model) + 1):
        with model.loaded(n):
            state = model.run(n, TOKENS, state)
        assert not any(isinstance(module, PackedLinear) for module in model.model.modules())
    assert torch.equal(state, wanted)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


FIRST = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("change, message", [
    (drop(FIRST + ".weight_scale"), r"up_proj.weight_packed is U8, and no part of an NVFP4 weight.*nib dequantize"),
    (drop(FIRST + ".weight_packed"), r"up_proj.weight_scale is F8_E4M3"),
    (put(FIRST + ".weight_global_scale", torch.zeros(1)), r"weight_global_scale: a tensor scale of 0.0 is none"),
    (put(FIRST + ".weight_packed", torch.zeros(96, 24, dtype=torch.uint8)), r"codes \[96, 24\] and scales \[96, 4\]"),
    (put("model.layers.1.mlp.up_proj.weight", torch.zeros(96, 64).to(torch.float8_e4m3fn)), "F8_E4M3, and no part"),
    (drop("model.norm.weight"), "no tensor for model.norm.weight"),
])
def test_rejected_directories(change, message, tmp_path):
    write(tmp_path, change=change)
    with pytest.raises(ValueError, match=message) as caught:
        nib.torch.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_rejected_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        nib.torch.from_pretrained(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no safetensors"):
        nib.torch.from_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no NVFP4 weight.*nib quantize"):
        nib.torch.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="activations are"):
        nib.torch.from_pretrained(tmp_path, activations="int8")


# ---- Matrices -----------------------------------------------------------------------------------------------


def packed(n=48, k=64, scale=0.001, activations="bf16", seed=0):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    codes, scales, values = quantized(weight, np.float32(scale))
    nan = torch.full((n,), float("nan"))
    return Packed([codes, scales, torch.full((n,), scale), nan], torch.bfloat16, activations), values


def test_matrix():
    """Bits of nib_gemm, also of rows with scales of their own; gradients of what is around; other devices."""
    (a, left), (b, right) = packed(), packed(32, scale=0.002, seed=1)
    both = torch.cat([a, b]).matrix()
    values = torch.cat([left, right])
    assert len(both.runs) == 2 and torch.equal(both.dequantize(), values)
    x, bias = torch.randn(3, 5, 64), torch.randn(80)
    y = both(x, bias)
    for part, (first, count) in ((a, (0, 48)), (b, (48, 32))):
        t = nib.from_parts(nib.Quantizer(columnwise=False, tensor_scale_rule="exact"), (count, 64),
                           row_data=part.rows[0].numpy(), row_scale=part.matrix().runs[0].scales.numpy(),
                           row_tensor_scale=part.rows[2][:1].numpy())
        wanted = nib.gemm(x.view(15, 64).numpy(), t, bias=bias[first:first + count].numpy(), reference=True)
        assert np.array_equal(y.view(15, 80)[:, first:first + count].numpy(), wanted)
    exact = x @ values.t() + bias
    assert (y - exact).abs().max() <= 2 ** -12 * exact.abs().max()
    assert torch.equal(both(x[:, ::2], bias), y[:, ::2]) and both(x[:0]).shape == (0, 5, 80)
    for other in (bias[:1], bias[:0], torch.cat([bias, bias])):  # the library would read what lies behind it
        with pytest.raises(ValueError, match="for 80 columns"):
            both(x, other)
    elsewhere = both._product_of_values(x, bias)
    assert torch.allclose(elsewhere, exact, rtol=1e-4, atol=1e-4)
    x.requires_grad_()
    both(x, bias).square().sum().backward()
    gradient = 2 * exact @ values
    assert (x.grad - gradient).abs().max() <= 1e-3 * gradient.abs().max()
    with pytest.raises(ValueError, match="inner sizes differ"):
        both(torch.randn(2, 32))


def test_layers():
    matrix = packed()[0].matrix()
    layer = PackedLinear(matrix, torch.nn.Parameter(torch.randn(48)), torch.float32)
    x = torch.randn(4, 64)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y) and torch.equal(layer.to("cpu")(x), y)
    assert layer.weight.dtype == torch.float32 and layer.weight.shape == (48, 64) and "NVFP4" in repr(layer)
    assert torch.equal(layer.weight @ x.t(), matrix.dequantize() @ x.t())  # code that takes a layer's weight
    assert torch.equal(torch.nn.functional.linear(x, layer.weight, layer.bias), y)
    assert list(dict(layer.named_parameters())) == ["bias"]


def test_stacks():
    """Experts as modules of transformers multiply by them: indexed, transposed, in batches."""
    parts = [packed(48, 64, 0.001 * (e + 1), seed=e) for e in range(3)]
    whole, x = torch.stack([p for p, _ in parts]), torch.randn(5, 64)
    values = torch.stack([v for _, v in parts])
    assert whole.shape == (3, 48, 64)
    wanted = [p.matrix()(x) for p, _ in parts]
    stack, turned = PackedStack(whole), PackedStack(whole.transpose(1, 2))
    assert turned.shape == (3, 64, 48) and len(turned) == turned.size(0) == 3
    for e in range(3):
        assert torch.equal(torch.nn.functional.linear(x, stack[torch.tensor(e)]), wanted[e])
        assert torch.equal(x @ turned[e], wanted[e]) and torch.equal(torch.matmul(x, stack[e].t()), wanted[e])
    assert torch.equal(torch.bmm(x.expand(3, 5, 64), turned), torch.stack(wanted))
    rows = torch.chunk(whole, 2, dim=1)
    assert torch.equal(torch.cat([PackedStack(r).matrices[1].dequantize() for r in rows]), values[1])
    for wrong in (lambda: x @ stack[0], lambda: torch.exp(stack), lambda: torch.nn.functional.linear(x, turned[0]),
                  lambda: torch.chunk(whole, 2, dim=2), lambda: torch.cat([whole, torch.zeros(3, 48, 64)], 1),
                  lambda: torch.exp(whole)):
        with pytest.raises(NotImplementedError):
            wrong()
    assert isinstance(stack.matrices[0], Matrix) and stack.nbytes > 3 * 48 * 36

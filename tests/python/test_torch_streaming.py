# SPDX-License-Identifier: Apache-2.0
"""nib.streaming: models that run one layer at a time give the logits of whole ones, bit for bit.
tests/check_families.py tries every causal language model."""
import os

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from nib import streaming  # noqa: E402

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = torch.randint(3, 120, (2, 3, 20), generator=torch.Generator().manual_seed(5))


def model_of(name, **more):
    torch.manual_seed(3)
    config = getattr(transformers, {"Gemma4": "Gemma4Text"}.get(name, name) + "Config")(**{**SIZES, **more})
    return getattr(transformers, name + "ForCausalLM")(config).to(torch.bfloat16).eval()


def whole_logits(directory):
    options = {"dtype": torch.bfloat16, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    with torch.inference_mode():
        return [model(input_ids=tokens, use_cache=False).logits for tokens in TOKENS]


def streamed_logits(directory, states):
    model = streaming.Streamed(directory, experts="eager")
    resident = [name for name, value in model.model.named_parameters() if not value.is_meta]
    assert resident and not any(".layers." in name for name in resident)
    for n in range(len(model) + 1):
        with model.loaded(n):
            loaded = {name.split(".")[2] for name, value in model.model.named_parameters()
                      if not value.is_meta and ".layers." in name}
            assert loaded == ({str(n)} if n < len(model) else set())
            for b, tokens in enumerate(TOKENS):
                states[b] = model.run(n, tokens, states[b] if n else None)
    assert sorted(resident) == sorted(name for name, value in model.model.named_parameters() if not value.is_meta)
    return [states[b] for b in range(len(TOKENS))]


@pytest.mark.parametrize("name, more", [
    ("Llama", {"tie_word_embeddings": True}),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),  # stored one by one, computed as a stack
    ("Gemma4", {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8, "global_head_dim": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "num_global_key_value_heads": 2,
                "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}),  # layers read what others left
])
def test_logits_are_those_of_the_whole_model(name, more, tmp_path):
    model_of(name, **more).save_pretrained(tmp_path, max_shard_size="60KB")
    assert os.path.exists(tmp_path / "model.safetensors.index.json")
    for got, wanted in zip(streamed_logits(tmp_path, streaming.States(1 << 30)), whole_logits(tmp_path)):
        assert torch.equal(got, wanted)


def test_states_spill_and_are_taken_up_again(tmp_path):
    a, b = ({"output": (torch.full((4, 4), value),), "shared": {}} for value in (1.0, 2.0))
    states = streaming.States(64, tmp_path / "kept")  # room for one
    states["a"], states["b"] = a, b
    assert sorted(os.listdir(tmp_path / "kept")) == ["a.pt", "b.pt"]
    again = streaming.States(0, tmp_path / "kept")
    for found in (states, again):
        for key, state in (("a", a), ("b", b)):
            assert torch.equal(found[key]["output"][0], state["output"][0])
    del states["a"], states["b"]
    assert not os.listdir(tmp_path / "kept")
    spilled = streaming.States(0)
    spilled["a"] = a
    assert torch.equal(spilled["a"]["output"][0], a["output"][0])


def test_what_cannot_run_says_why(tmp_path):
    model = model_of("Llama")
    kept = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path / "lacking", state_dict=kept)
    lacking = streaming.Streamed(tmp_path / "lacking")
    with pytest.raises(ValueError, match="no tensor for model.layers.1.mlp.up_proj.weight"):
        with lacking.loaded(1):
            pass
    os.makedirs(tmp_path / "empty")
    with pytest.raises(ValueError, match="no safetensors"):
        streaming.Streamed(tmp_path / "empty")
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(tmp_path / "lacking")
    with pytest.raises(ValueError, match="quantized"):
        streaming.Streamed(tmp_path / "lacking")

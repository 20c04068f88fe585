#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model in NVFP4 as other projects calibrate it, from the tokens that nib.calibrate takes: rows beside nib's in docs/accuracy.md.

    accuracy_peers.py PEER MODEL OUT --text FILE... [--tokens N] [--device cuda]

PEER: llm-compressor (QuantizationModifier, scheme NVFP4), llm-compressor-gptq (GPTQModifier, the same scheme), modelopt
(NVFP4_DEFAULT_CFG), modelopt-awq (NVFP4_AWQ_LITE_CFG): what their examples run, with no option of ours. Runs in that project's
virtual environment; `accuracy_directories.py measure` evaluates OUT.
"""
import argparse
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python"))


def llm_compressor(model, tokens, out, modifier):
    import torch
    from llmcompressor import oneshot

    def collate(rows):
        batch = torch.stack(rows)
        return {"input_ids": batch, "attention_mask": torch.ones_like(batch)}

    loader = torch.utils.data.DataLoader(list(tokens), batch_size=1, collate_fn=collate)
    oneshot(model=model, dataset=loader, recipe=modifier(targets="Linear", scheme="NVFP4", ignore=["lm_head"]),
            num_calibration_samples=len(tokens), max_seq_length=tokens.shape[1])
    model.save_pretrained(out, save_compressed=True)


def quantized_by_modifier(model, tokens, out):
    from llmcompressor.modifiers.quantization import QuantizationModifier
    llm_compressor(model, tokens, out, QuantizationModifier)


def quantized_by_gptq(model, tokens, out):
    from llmcompressor.modifiers.gptq import GPTQModifier
    llm_compressor(model, tokens, out, GPTQModifier)


def modelopt(model, tokens, out, config):
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    def forward(whole):
        for batch in tokens.split(8):
            whole(batch.to(whole.device), use_cache=False)

    mtq.quantize(model, getattr(mtq, config), forward)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)


PEERS = {"llm-compressor": quantized_by_modifier, "llm-compressor-gptq": quantized_by_gptq,
         "modelopt": lambda *given: modelopt(*given, "NVFP4_DEFAULT_CFG"),
         "modelopt-awq": lambda *given: modelopt(*given, "NVFP4_AWQ_LITE_CFG")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    import torch
    import transformers

    from nib import calibrate
    tokens = calibrate.token_batches(given.model, given.text, given.length, max(1, given.tokens // given.length))
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).to(given.device).eval()
    begin = time.monotonic()
    PEERS[given.peer](model, tokens, given.out)
    print(f"{given.peer}: {tokens.numel()} tokens, {time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Generate text with an NVFP4 checkpoint of compressed-tensors or ModelOpt, from its packed weights.

    python -m nib.generate DIRECTORY "The capital of France is"
    echo "What is NVFP4?" | python -m nib.generate DIRECTORY - --chat --stats
"""
import resource
import sys
import time

from ._cli import Command, number, positive, seed

__all__ = ["main"]

_command = Command("generate")


def _parse(arguments):
    parser = _command.parser(__doc__.split("\n\n")[0])
    parser.add_argument("directory", metavar="DIRECTORY", help="an NVFP4 checkpoint with its tokenizer")
    parser.add_argument("prompt", metavar="PROMPT", help="text to go on from; - reads it from standard input")
    parser.add_argument("--max-new-tokens", metavar="N", type=positive, default=128, help="stop after so many")
    parser.add_argument("--temperature", metavar="T", type=number(0), help="0 takes the likeliest token; none: what "
                        "generation_config.json says")
    parser.add_argument("--top-p", metavar="P", type=number(0, 1), help="sample among the likeliest that make up P")
    parser.add_argument("--top-k", metavar="K", type=positive, help="sample among the K likeliest")
    parser.add_argument("--seed", metavar="N", type=seed, help="of sampling")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument("--activations", choices=["bf16", "nvfp4"], default="bf16", help="nvfp4 quantizes them too")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="of all else; none: the model's")
    parser.add_argument("--tokenizer", metavar="DIRECTORY", help="where the checkpoint has none")
    parser.add_argument("--stats", action="store_true", help="tokens per second and memory, on standard error")
    return parser.parse_args(arguments)


def _tokens(tokenizer, given):
    try:
        text = sys.stdin.read() if given.prompt == "-" else given.prompt
        f"{text}{given.system}".encode()  # bytes that are no text come as halves of pairs, or are an error at once
    except UnicodeError:
        _command.fail("the prompt is not text in UTF-8")
    if given.system and not given.chat:
        _command.fail("--system is part of a chat: give --chat too")
    if not given.chat:
        return tokenizer(text, return_tensors="pt").input_ids
    if not tokenizer.chat_template:
        _command.fail(f"{given.tokenizer or given.directory}: its tokenizer has no chat template; leave --chat out")
    messages = [{"role": "system", "content": given.system}] if given.system else []
    messages.append({"role": "user", "content": text})
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return found["input_ids"]


def _sampling(given):
    """The arguments of generate()."""
    options = {"max_new_tokens": given.max_new_tokens}
    if given.temperature == 0:
        return {**options, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    chosen = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k")
              if getattr(given, name) is not None}
    return {**options, **chosen, **({"do_sample": True} if chosen or given.seed is not None else {})}


class _Printer:
    """A streamer of transformers that prints text as it comes, and notes when."""

    def __init__(self, tokenizer):
        from transformers import TextStreamer
        self.inner = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.begin = self.first = None
        self.count = 0

    def put(self, value):
        if self.begin is None:
            self.begin = time.perf_counter()  # the prompt itself
        else:
            self.first = self.first or time.perf_counter()
            self.count += value.numel()
        self.inner.put(value)

    def end(self):
        self.last = time.perf_counter()
        self.inner.end()


def _report(model, printer, prompt):
    from .torch.packed import packed_bytes
    packed, weights = packed_bytes(model)
    reading = printer.first - printer.begin
    line = f"prompt {prompt} tokens in {reading:.2f} s ({prompt / reading:.1f} tokens/s), generated {printer.count}"
    if printer.count > 1:
        line += f", {(printer.count - 1) / (printer.last - printer.first):.1f} tokens/s"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    _command.say(f"{line}; packed weights {packed / 2**20:.0f} MiB ({packed / (2 * weights):.2f} of BF16), peak memory "
                 f"{peak:.0f} MiB")


def main(arguments=None):
    given = _parse(arguments)
    _command.directory(given.directory)
    import torch
    import transformers
    from .torch import from_pretrained
    transformers.logging.set_verbosity_error()
    device = _command.device(given.device)
    words = given.tokenizer or given.directory
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(words, local_files_only=True)
    except Exception as error:  # it raises what it likes over a damaged file
        _command.fail(f"{words}: no tokenizer: {error}; --tokenizer takes another directory")
    tokens, options = _tokens(tokenizer, given), _sampling(given)
    if not tokens.numel():
        _command.fail("the prompt is empty")
    if given.seed is not None:
        torch.manual_seed(given.seed)
    try:
        model = from_pretrained(given.directory, given.activations, device,
                                getattr(torch, given.dtype) if given.dtype else None)
        if not model.can_generate():
            raise ValueError(f"{given.directory}: {type(model).__name__} generates no text")
        printer = _Printer(tokenizer)
        with torch.inference_mode():
            model.generate(tokens.to(device), attention_mask=torch.ones_like(tokens).to(device), streamer=printer,
                           pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id, **options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:  # NotImplementedError is a RuntimeError
        _command.fail(error)
    except KeyboardInterrupt:
        _command.fail("interrupted")
    if given.stats:
        _report(model, printer, tokens.numel())
    return 0


if __name__ == "__main__":
    sys.exit(main())

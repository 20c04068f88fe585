# SPDX-License-Identifier: Apache-2.0
"""How far one causal language model is from another on text: KL, perplexity and top-1 agreement, by document.

    python -m nib.evaluate DIRECTORY --against ORIGINAL --text FILE...

The measure of a quantized model is the KL divergence of its next-token distributions from those of the original, on
text that nobody tuned on. Windows of a document are cut from its beginning, one after the other, each a sequence of its
own.
"""
import contextlib
import dataclasses
import html
import json
import math
import os
import re
import sys

import torch

from . import streaming
from ._cli import Command, Progress, positive

__all__ = ["Score", "windows", "score_window", "evaluate", "evaluate_by_layers", "summarize", "main"]

_POSITIONS = 256  # at a time: two FP32 tables of a vocabulary of 256 Ki stay below 600 MB


@dataclasses.dataclass
class Score:
    """Sums over the predicted positions of one window; logarithms are natural."""

    document: str
    positions: int = 0
    kl: float = 0.0
    loss: float = 0.0
    reference_loss: float = 0.0
    agreed: int = 0


def windows(tokenizer, text, length, count):
    """The first `count` windows of `length` tokens of a text; fewer where it ends, none shorter."""
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    return list(tokens[:length * min(count, len(tokens) // length)].view(-1, length))


def score_window(score, reference, logits, tokens):
    """Add up a window: logits [positions, vocabulary] of the original and of the other model, and the tokens."""
    targets = tokens[1:].to(logits.device)
    for start in range(0, len(targets), _POSITIONS):
        wanted = targets[start:start + _POSITIONS, None]
        stop = start + len(wanted)
        p = torch.log_softmax(reference[start:stop].float(), -1)
        q = torch.log_softmax(logits[start:stop].float(), -1)
        score.positions += len(wanted)
        score.kl += float((p.exp() * (p - q)).sum(-1).double().sum())
        score.loss -= float(q.gather(-1, wanted).double().sum())
        score.reference_loss -= float(p.gather(-1, wanted).double().sum())
        score.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    return score


@torch.inference_mode()
def evaluate(reference, model, documents, progress=None):
    """Scores by window. `reference` and `model` take tokens [1, n] and return logits [1, n, vocabulary]; `documents` is
    {name: windows}; `progress(done, total)` is called after each window."""
    scores, total = [], sum(len(cut) for cut in documents.values())
    for name, cut in documents.items():
        for tokens in cut:
            wanted, got = reference(tokens[None])[0, :-1], model(tokens[None])[0, :-1]
            scores.append(score_window(Score(name), wanted, got, tokens))
            if progress:
                progress(len(scores), total)
    return scores


def _exp(x):
    """math.exp raises where the result is too large: a broken model is that far off."""
    return math.exp(x) if x < 709 else math.nan if math.isnan(x) else math.inf


def summarize(scores):
    """Of windows of one length: mean KL with its standard error over windows, perplexities, top-1 agreement."""
    positions = sum(s.positions for s in scores)
    kl = torch.tensor([s.kl / s.positions for s in scores], dtype=torch.float64)
    error = float(kl.std()) / math.sqrt(len(kl)) if len(kl) > 1 else math.nan
    return {"windows": len(scores), "positions": positions, "kl": float(kl.mean()), "kl_error": error,
            "perplexity": _exp(sum(s.loss for s in scores) / positions),
            "reference_perplexity": _exp(sum(s.reference_loss for s in scores) / positions),
            "top1": sum(s.agreed for s in scores) / positions}


# ---- Directories ---------------------------------------------------------------------------------------------


def _is_quantized(directory):
    config = os.path.join(directory, "config.json")
    if not os.path.exists(config):
        raise ValueError(f"{directory}: there is no config.json in it")
    with open(config, encoding="utf-8") as file:
        said = json.load(file)
    if not isinstance(said, dict):
        raise ValueError(f"{config}: it is no JSON object")
    return "quantization_config" in said or os.path.exists(os.path.join(directory, "hf_quant_config.json"))


def _open(kind, directory, device, dtype, activations):
    """A streaming.Loader or its like over a directory, packed or plain."""
    source = None
    if _is_quantized(directory):
        from .torch.pretrained import PackedSource
        source = PackedSource(directory, activations)
    return kind(directory, device, dtype, experts="eager", source=source)


def _weight_bytes(directory):
    return sum(entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith(".safetensors"))


def _fits(directories, device):
    """Whether whole models can be in memory together, with as much again for what they compute."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        try:
            with open("/proc/meminfo", encoding="ascii") as file:
                free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", file.read())[1])
        except (OSError, TypeError):
            return True
    return 2 * sum(map(_weight_bytes, directories)) <= free


@torch.inference_mode()
def evaluate_by_layers(reference, model, documents, batch=1, memory=4 << 30, progress=None):
    """The same scores as evaluate(), of two streaming.Streamed: each runs through its layers with one in memory, then
    both heads see each window. `memory` is what states take before they go to disk."""
    order = [(name, tokens) for name, cut in documents.items() for tokens in cut]
    batches = [torch.stack([tokens for _, tokens in order[i:i + batch]]) for i in range(0, len(order), batch)]
    total = len(batches) * (len(reference) + len(model) + 1)
    done, scores, states = 0, [], {}
    for which in (reference, model):
        states[which] = streaming.States(memory // 2)
        for n in range(len(which)):
            with which.loaded(n):
                for b, tokens in enumerate(batches):
                    states[which][b] = which.run(n, tokens, states[which][b] if n else None)
                    done += 1
                    if progress:
                        progress(done, total)
    with reference.loaded(len(reference)), model.loaded(len(model)):
        for b, tokens in enumerate(batches):
            wanted, got = (which.run(len(which), tokens, states[which][b]) for which in (reference, model))
            for i, row in enumerate(tokens):
                scores.append(score_window(Score(order[b * batch + i][0]), wanted[i, :-1], got[i, :-1], row))
            done += 1
            if progress:
                progress(done, total)
    return scores


def divergence(reference, directory, tokens, activations, memory):
    """The mean KL, over windows of tokens [windows, length], of a quantized directory from a streaming.Streamed."""
    from .torch.pretrained import PackedSource
    model = streaming.Streamed(directory, reference.device, reference.dtype, experts="eager",
                               source=PackedSource(directory, activations))
    scores = evaluate_by_layers(reference, model, {"": list(tokens)}, memory=memory)
    return sum(score.kl for score in scores) / sum(score.positions for score in scores)


# ---- The command ---------------------------------------------------------------------------------------------

_command = Command("evaluate")
_MARK = "<!-- evaluation -->"
_COLUMNS = ("document", "windows", "KL", "+-", "perplexity", "original's", "top-1")


def _parse(arguments):
    parser = _command.parser(__doc__.split("\n\n")[0])
    parser.add_argument("directory", metavar="DIRECTORY", help="a checkpoint: NVFP4, or plain")
    parser.add_argument("--against", metavar="ORIGINAL", required=True, help="the directory that it was made of")
    parser.add_argument("--text", metavar="FILE", nargs="+", action="extend", required=True,
                        help="documents: plain text, or JSON lines (.jsonl) with `text` or `messages`")
    parser.add_argument("--windows", metavar="N", type=positive, default=16, help="of a document")
    parser.add_argument("--length", metavar="N", type=positive, default=1024, help="tokens of a window")
    parser.add_argument("--activations", choices=["bf16", "nvfp4"], default="bf16", help="nvfp4 quantizes them too")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"],
                        help="compute in it; none: the original's")
    parser.add_argument("--layer-by-layer", action="store_true", default=None,
                        help="one layer in memory at a time; by itself where the models do not fit")
    parser.add_argument("--batch", metavar="N", type=positive, default=1, help="windows at a time, layer by layer")
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    parser.add_argument("--report", metavar="FILE", help="add the figures to a report of `nib quantize --report`")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser.parse_args(arguments)


def _documents(given):
    import transformers
    from .calibrate import _windows
    with streaming.naming(given.against, "no tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(given.against, local_files_only=True)
    found = {}
    for path in given.text:
        name = os.path.splitext(os.path.basename(path))[0]
        if name in found:
            name = path
        cut = _windows(path, tokenizer, given.length, given.windows)
        if cut:
            found[name] = [torch.tensor(tokens) for tokens in cut]
        else:
            _command.say(f"{path}: less text than one window of {given.length} tokens; it is left out")
    if not found:
        _command.fail(f"no document has {given.length} tokens: give more text, or a smaller --length")
    return found


def _scores(given, device, documents):
    directories = (given.against, given.directory)
    by_layer = given.layer_by_layer or not _fits(directories, device)
    tell = Progress(given.quiet)
    dtype = getattr(torch, given.dtype) if given.dtype else None
    kind = streaming.Streamed if by_layer else streaming.Loader
    opened = []
    for directory in directories:
        opened.append(_open(kind, directory, device, dtype, given.activations))
        dtype = dtype or opened[0].dtype  # both in the original's
        if opened[-1].model.get_output_embeddings() is None:
            raise ValueError(f"{directory}: {type(opened[-1].model).__name__} has no head, and says nothing of tokens")
    sizes = [one.model.config.get_text_config().vocab_size for one in opened]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{given.directory}: its vocabulary has {sizes[1]} tokens, that of {given.against} {sizes[0]}")
    if by_layer:
        if not given.layer_by_layer and not given.quiet:
            _command.say("the models do not fit into memory together: layer by layer")
        return by_layer, evaluate_by_layers(*opened, documents, given.batch,
                                            progress=lambda *done: tell("batch of a layer", *done))
    reference, model = (one.load() for one in opened)

    def logits(model):
        return lambda tokens: model(input_ids=tokens.to(device), use_cache=False).logits
    return by_layer, evaluate(logits(reference), logits(model), documents, lambda *done: tell("window", *done))


def _rows(figures):
    for name, found in [*figures["documents"].items(), ("all", figures)]:
        yield (name, str(found["windows"]), f"{found['kl']:.5f}",
               "" if math.isnan(found["kl_error"]) else f"{found['kl_error']:.5f}",
               f"{found['perplexity']:.3f}", f"{found['reference_perplexity']:.3f}", f"{100 * found['top1']:.2f} %")


def _table(figures):
    rows = [_COLUMNS, *_rows(figures)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))) for row in rows)


def _json(tree):
    """JSON has no NaN: the error of a single window is null."""
    return json.dumps(json.loads(json.dumps(tree), parse_constant=lambda _: None), indent=1)


def _section(figures):
    """The section of the HTML report."""
    def cells(tag, row):
        left = " class='l'"
        return "".join(f"<{tag}{'' if i else left}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(row))

    heads, body = cells("th", _COLUMNS), "\n".join(f"<tr>{cells('td', row)}</tr>" for row in _rows(figures))
    against, activations = html.escape(figures["against"]), html.escape(figures["activations"])
    return (f"{_MARK}<h2 id=\"evaluation\">On text</h2>\n<p>KL divergence of its next-token distributions from those "
            f"of <code>{against}</code>, perplexity, and how often both would say the same token, in windows of "
            f"{figures['length']} tokens; activations {activations}.</p>\n<table>\n<thead><tr>{heads}</tr></thead>\n"
            f"<tbody>\n{body}\n</tbody></table>\n{_MARK}")


def add_to_report(path, figures):
    """Put the figures into a report of `nib quantize --report`, HTML or JSON; those of an earlier call go."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if path.endswith(".json"):
        page = json.loads(text)
        if not isinstance(page, dict):
            raise ValueError(f"{path}: it is no report of nib quantize")
        page["evaluation"] = figures
        text = _json(page) + "\n"
    else:
        text = re.sub(f"{_MARK}.*?{_MARK}", "", text, flags=re.S)
        before, how, after = text.partition('<h2 id="how">')
        if not how:
            raise ValueError(f"{path}: it is no report of nib quantize, and has no place for figures")
        text = before + _section(figures) + how + after
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def main(arguments=None):
    given = _parse(arguments)
    for directory in (given.directory, given.against):
        _command.directory(directory)
    for path in [*given.text, *([given.report] if given.report else [])]:
        _command.file(path)
    if given.length < 2:
        _command.fail("--length 1: a window of one token has none to predict")
    device = _command.device(given.device)
    try:
        import transformers
        transformers.logging.set_verbosity_error()
        by_layer, scores = _scores(given, device, documents := _documents(given))
        figures = {"directory": given.directory, "against": given.against, "length": given.length,
                   "activations": given.activations, "layer_by_layer": by_layer, **summarize(scores),
                   "documents": {name: summarize([s for s in scores if s.document == name]) for name in documents}}
        if given.report:
            add_to_report(given.report, figures)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        _command.fail(error)
    except KeyboardInterrupt:
        _command.fail("interrupted")
    print(_json(figures) if given.json else _table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())

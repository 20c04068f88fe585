# SPDX-License-Identifier: Apache-2.0
"""How far one causal language model is from another on text: KL, perplexity and top-1 agreement, by document.

The measure of a quantized model is the KL divergence of its next-token distributions from those of the original, on
text that nobody tuned on. Windows of a document are cut from its beginning, one after the other, each a sequence of its
own.
"""
import dataclasses
import math

import torch

__all__ = ["Score", "windows", "score_window", "evaluate", "summarize"]

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


def summarize(scores):
    """Of windows of one length: mean KL with its standard error over windows, perplexities, top-1 agreement."""
    positions = sum(s.positions for s in scores)
    kl = torch.tensor([s.kl / s.positions for s in scores], dtype=torch.float64)
    error = float(kl.std()) / math.sqrt(len(kl)) if len(kl) > 1 else math.nan
    return {"windows": len(scores), "positions": positions, "kl": float(kl.mean()), "kl_error": error,
            "perplexity": math.exp(sum(s.loss for s in scores) / positions),
            "reference_perplexity": math.exp(sum(s.reference_loss for s in scores) / positions),
            "top1": sum(s.agreed for s in scores) / positions}

# SPDX-License-Identifier: Apache-2.0
"""nib.evaluate: KL, perplexity and top-1 agreement, against sums taken the long way."""
import math

import pytest

torch = pytest.importorskip("torch")

from nib import evaluate  # noqa: E402


class Words:
    """A tokenizer: one token a word."""

    def __call__(self, text, add_special_tokens, return_tensors):
        assert not add_special_tokens and return_tensors == "pt"
        return type("Encoding", (), {"input_ids": torch.tensor([[int(word) for word in text.split()]])})


def table(seed, vocabulary=11):
    """A model that looks at one token."""
    weights = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))
    return lambda tokens: weights[tokens]


def test_windows_are_whole_and_from_the_beginning():
    text = " ".join(str(i % 7) for i in range(25))
    cut = evaluate.windows(Words(), text, 8, 16)
    assert [w.tolist() for w in cut] == [[(8 * n + i) % 7 for i in range(8)] for n in range(3)]
    assert len(evaluate.windows(Words(), text, 8, 2)) == 2
    assert evaluate.windows(Words(), text, 26, 2) == []


def test_scores_are_the_sums_by_hand(monkeypatch):
    monkeypatch.setattr(evaluate, "_POSITIONS", 3)  # parts of a window add up to the whole
    p, q = table(1), table(2)
    tokens = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(3))
    told = []
    scores = evaluate.evaluate(p, q, {"a": list(tokens[:1]), "b": list(tokens[1:])}, lambda *done: told.append(done))
    assert told == [(1, 2), (2, 2)] and [s.document for s in scores] == ["a", "b"]
    for score, window in zip(scores, tokens):
        kl = loss = agreed = 0
        for now, following in zip(window[:-1], window[1:]):
            a, b = p(now).double().softmax(-1), q(now).double().softmax(-1)
            kl += float((a * (a / b).log()).sum())
            loss -= math.log(b[following])
            agreed += int(a.argmax() == b.argmax())
        assert score.positions == 8 and score.agreed == agreed
        assert score.kl == pytest.approx(kl, rel=1e-5) and score.loss == pytest.approx(loss, rel=1e-5)


def test_a_model_does_not_differ_from_itself():
    tokens = list(torch.randint(0, 11, (4, 16)))
    whole = evaluate.summarize(evaluate.evaluate(table(1), table(1), {"a": tokens}))
    assert whole["kl"] == 0 and whole["top1"] == 1 and whole["perplexity"] == whole["reference_perplexity"]
    assert whole["windows"] == 4 and whole["positions"] == 60 and whole["kl_error"] == 0


def test_the_error_is_over_windows():
    scores = [evaluate.Score("a", 10, kl=10 * kl, loss=10 * 2.0, reference_loss=10 * 1.0) for kl in (0.1, 0.3)]
    whole = evaluate.summarize(scores)
    assert whole["kl"] == pytest.approx(0.2) and whole["kl_error"] == pytest.approx(0.1)
    assert whole["perplexity"] == pytest.approx(math.exp(2)) and whole["reference_perplexity"] == pytest.approx(math.e)
    assert math.isnan(evaluate.summarize(scores[:1])["kl_error"])


def test_a_broken_model_has_a_perplexity_beyond_all_numbers():
    whole = evaluate.summarize([evaluate.Score("a", 1, kl=1.0, loss=1e4, reference_loss=math.nan)] * 2)
    assert whole["perplexity"] == math.inf and math.isnan(whole["reference_perplexity"])

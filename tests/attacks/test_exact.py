"""Exact search: the scores against the distribution walked by hand, the order against enumeration,
and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from auditor.attacks.likelihood_ranking import ExactProbabilityRanking
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Query
from auditor.models.decoding import Decoding
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Setting, View
from tests.conftest import refuses

OWN = Decoding(temperature=0.8, top_p=0.7)


def view(model: HuggingFaceModel, setting: Setting = WHITE_BOX) -> View:
    return View("undefended", model, setting, seed=0)


def log_q(
    model: HuggingFaceModel, prefix: tuple[int, ...], suffixes: Sequence[tuple[int, ...]]
) -> list[float]:
    """The decoding distribution token by token, one forward each: nats of each suffix."""
    rows = torch.tensor([[*prefix, *suffix] for suffix in suffixes])
    total = torch.zeros(len(rows))
    for i in range(len(prefix), rows.shape[1]):
        distribution = model.log_probs(rows[:, :i], 1)[:, 0]
        total += OWN.log_distribution(distribution).gather(1, rows[:, i : i + 1])[:, 0]
    return total.tolist()


def test_scores_are_the_distribution_walked_token_by_token(neox: HuggingFaceModel) -> None:
    query = Query("a", (3, 1, 4, 1, 5), 3)
    (guesses,) = ExactProbabilityRanking(threshold=0.001).guess(view(neox), {}, [query])
    assert len(guesses.ranked) > 3 and guesses.drawn == 0
    for guess in guesses.ranked:
        (walked,) = log_q(neox, query.prefix, [guess.suffix])
        assert guess.score == pytest.approx(walked, abs=1e-4)
        assert guess.score >= math.log(0.001) - 1e-4
    assert [g.score for g in guesses.ranked] == sorted(
        (g.score for g in guesses.ranked), reverse=True
    )


def test_the_first_guess_is_the_likeliest_of_all(make_tiny: type) -> None:
    model = make_tiny(vocab_size=9, seed=3)
    query = Query("a", (3, 1, 4), 3)
    suffixes = list(itertools.product(range(9), repeat=3))
    every = dict(zip(suffixes, log_q(model, query.prefix, suffixes), strict=True))
    best = max(every, key=lambda s: every[s])
    (guesses,) = ExactProbabilityRanking(threshold=0.05).guess(view(model), {}, [query])
    assert guesses.certificate is not None and guesses.certificate.certified
    assert guesses.ranked[0].suffix == best
    assert {g.suffix for g in guesses.ranked} == {
        s for s, q in every.items() if q >= math.log(0.05)
    }


def test_other_candidates_have_no_exact_probability() -> None:
    with refuses("search=tree"):
        ExactProbabilityRanking(search="sample")
    with refuses("temperature", "0"):
        ExactProbabilityRanking(temperature=0)
    with refuses("top_k=1", "probability 0 or 1"):
        ExactProbabilityRanking(top_k=1)


def test_it_does_not_apply_where_only_tokens_come_back(neox: HuggingFaceModel) -> None:
    with refuses("log-probabilities", error=NotApplicable):
        list(ExactProbabilityRanking().guess(view(neox, TEXT_ONLY), {}, [Query("a", (1, 2), 2)]))

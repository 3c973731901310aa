"""Every attack that ranks candidates may take them from a search: what it then promises, and what
it says of itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from auditor.attacks.ethicist import Ethicist
from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Guesses, Query
from auditor.models.decoding import Decoding
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins import registry
from auditor.plugins.attack import SamplingAttack
from auditor.plugins.options import get_option_defaults
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX
from auditor.testing import KNOWN, SMALL, make_small_plugin, make_view, random_queries
from tests.conftest import refuses

ATTACKS = {
    name: kind
    for name, kind in registry.list_attacks().items()
    if issubclass(kind, SamplingAttack) and kind().search == "sample"  # those that may also search
}
SEARCHES: dict[str, dict[str, Any]] = {
    "tree": {"search": "tree", "threshold": 0.02, "temperature": 0.5},
    "beam": {"search": "beam", "beams": 4},
}


def searching(kind: type[SamplingAttack], search: str) -> SamplingAttack:
    attack = make_small_plugin(kind)
    assert isinstance(attack, SamplingAttack)
    return replace(attack, **SEARCHES[search])


def answers(
    attack: SamplingAttack, model: HuggingFaceModel, asked: list[Query], **more: Any
) -> dict[str, Guesses]:
    seen = make_view(model, WHITE_BOX, **more)
    return {g.secret: g for g in attack.guess(seen, attack.fit(seen, KNOWN), asked)}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", ATTACKS.values(), ids=ATTACKS)
class TestSearch:
    def test_answers_every_query_and_draws_nothing(
        self, kind: type[SamplingAttack], search: str, neox: HuggingFaceModel
    ) -> None:
        attack = searching(kind, search)
        found = answers(attack, neox, random_queries())
        assert (
            set(found) == {q.id for q in random_queries()}
            and attack.sample_counts_by_recipe(make_view(neox, WHITE_BOX)) == {}
        )
        for query in random_queries():
            guesses = found[query.id]
            scores = [g.score for g in guesses.ranked]
            assert scores == sorted(scores, reverse=True) and len(
                {g.suffix for g in guesses.ranked}
            ) == len(scores)
            assert all(len(g.suffix) == query.length for g in guesses.ranked)
            assert (guesses.drawn, guesses.samples, guesses.near_boundary) == (0, len(scores), 0)
            assert guesses.rows >= query.length and (guesses.certificate is not None) == (
                search == "tree"
            )

    def test_an_answer_depends_on_its_own_query_only(
        self, kind: type[SamplingAttack], search: str, neox: HuggingFaceModel
    ) -> None:
        attack = searching(kind, search)
        everything = answers(attack, neox, random_queries())
        for name, alone in answers(attack, neox, random_queries()[2:4], batch_size=1).items():
            whole = everything[name]
            assert [g.suffix for g in alone.ranked] == [
                g.suffix for g in whole.ranked
            ] and alone.rows == whole.rows
            assert [g.score for g in alone.ranked] == pytest.approx(
                [g.score for g in whole.ranked], abs=1e-5, rel=1e-4
            )

    def test_is_refused_where_only_tokens_come_back_before_anything_is_tuned(
        self, kind: type[SamplingAttack], search: str, neox: HuggingFaceModel
    ) -> None:
        attack, seen = searching(kind, search), make_view(neox, TEXT_ONLY)
        assert (
            "distribution" in attack.required_capabilities
            and "distribution" in replace(attack, samples=3).required_capabilities
        )
        with refuses("log-probabilities", "setting", error=NotApplicable):
            list(attack.guess(seen, {"tuned_on": "none"}, random_queries()))


def test_sampling_needs_no_distribution_and_says_its_rows(neox: HuggingFaceModel) -> None:
    assert Ethicist().required_capabilities == ("draw",)
    for guesses in answers(
        replace(make_small_plugin(PerplexityRanking), samples=8), neox, random_queries()
    ).values():  # type: ignore[type-var]
        length = len(guesses.ranked[0].suffix)
        assert guesses.rows == sum(
            len({g.suffix[:t] for g in guesses.ranked}) for t in range(length)
        )


def ethicist(**options: Any) -> Ethicist:
    few: dict[str, Any] = {
        name: SMALL[name] for name in get_option_defaults(Ethicist) if name in SMALL
    }
    return Ethicist(**{**few, "tune_on": "none", **options})


def test_ethicist_scores_a_leaf_by_its_exact_probability(neox: HuggingFaceModel) -> None:
    """With the soft prompt in front, under the decoding distribution."""
    attack = ethicist(tune_on="target", **SEARCHES["tree"])
    seen = make_view(neox, WHITE_BOX)
    state = attack.fit(seen, KNOWN)
    decoding = Decoding(0.5, top_p=0.7)
    for query, guesses in zip(
        random_queries()[::2], attack.guess(seen, state, random_queries()[::2]), strict=True
    ):
        for guess in guesses.ranked:
            context = torch.tensor([[*query.prefix, *guess.suffix[:-1]]])
            distribution = decoding.log_distribution(
                neox.log_probs(context, query.length, prompt=state["prompt"])[0]
            )
            exact = sum(float(distribution[i, token]) for i, token in enumerate(guess.suffix))
            assert guess.score == pytest.approx(math.exp(exact), rel=1e-4)
    assert "exact probability under the decoding distribution" in attack.notes(seen, state)[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"search": "beam", "samples": 1}, "not beams"),
        ({"temperature": 0.0}, "one candidate a prefix"),
        ({"samples": 1}, "one candidate a prefix"),
        ({"temperature": 0.0, "search": "tree"}, "one candidate a prefix"),
    ],
    ids=["beam", "greedy", "one sample", "greedy tree"],
)
def test_where_confidence_means_nothing_ethicist_ranks_by_nll_and_says_so(
    neox: HuggingFaceModel, options: dict[str, Any], said: str
) -> None:
    attack, seen = ethicist(**options), make_view(neox, WHITE_BOX)
    state = attack.fit(seen, KNOWN)
    assert said in attack.notes(seen, state)[1] and "nll" in attack.notes(seen, state)[1]
    for query, guesses in zip(
        random_queries()[::2], attack.guess(seen, state, random_queries()[::2]), strict=True
    ):
        nll = seen.mean_nll(neox, [(query.prefix, g.suffix) for g in guesses.ranked])
        expected = [-x * query.length for x in nll]
        assert [g.score for g in guesses.ranked] == pytest.approx(expected, abs=1e-4)


def test_a_greedy_tree_is_greedy_decoding(neox: HuggingFaceModel) -> None:
    first, second = (
        answers(ethicist(temperature=0.0, search=s), neox, random_queries())
        for s in ("sample", "tree")
    )
    assert all(first[name].ranked[0].suffix == second[name].ranked[0].suffix for name in first)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"search": "bream"}, ("search",)),
        ({"threshold": 0.0}, ("threshold", "0", "1")),
        ({"beams": 0}, ("beams", "1")),
    ],
)
def test_bad_searches_are_refused(options: dict[str, Any], facts: tuple[str, ...]) -> None:
    with refuses(*facts):
        ethicist(**options)


@pytest.mark.parametrize("confidence", ["perplexity", "reference"])
def test_a_ranking_that_reads_the_distribution_is_refused_before_anything_is_drawn(
    neox: HuggingFaceModel, confidence: Any
) -> None:
    seen = make_view(neox, TEXT_ONLY)
    attack = Ethicist(samples=3, tune_on="none", confidence=confidence)
    assert (
        "likelihood" in attack.required_capabilities
        and "distribution" not in attack.required_capabilities
    )
    with refuses("log-probabilities", error=NotApplicable):
        list(attack.guess(seen, {"tuned_on": "none"}, random_queries()))
    assert seen.meter.drawn_token_count == 0

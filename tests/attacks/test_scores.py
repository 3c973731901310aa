"""Each attack's score on hand-made numbers, against its formula."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from auditor.attacks.ethicist import (
    Ethicist,
    _list_tuning_groups,
    calibrate_confidence,
    compute_prompt_tuning_loss,
    count_warmup_steps,
    split_tuning_pairs,
)
from auditor.attacks.likelihood_ranking import (
    LowercaseRanking,
    count_compressed_bytes,
    score_against_reference_nll,
    score_lower_case,
)
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Guesses, Pair, Query
from auditor.generation.sample import SuffixCandidates
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.attack import rank_candidates
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Setting, View
from tests.benchmarks.test_files import BYTES
from tests.conftest import refuses, tiny


def candidates(counts: list[int], nll: list[float], length: int = 4) -> SuffixCandidates:
    token = -torch.tensor(nll, dtype=torch.float64)[:, None].expand(-1, length) / length
    return SuffixCandidates(
        torch.arange(len(counts))[:, None].expand(-1, length), torch.tensor(counts), token
    )


def test_calibrated_confidence_by_hand() -> None:
    # r exp(-nll): 7 * e^-1, 2 * e^-0.5, 1 * e^-3
    weights = [7 * math.exp(-1), 2 * math.exp(-0.5), math.exp(-3)]
    confidence = calibrate_confidence(candidates([7, 2, 1], [1.0, 0.5, 3.0]))
    assert confidence.tolist() == pytest.approx([w / sum(weights) for w in weights])


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 5000)), min_size=1, max_size=20))
def test_calibrated_confidence_is_a_distribution_even_where_the_naive_form_is_0_over_0(
    rows: list[tuple[int, float]],
) -> None:
    confidence = calibrate_confidence(candidates([r for r, _ in rows], [x for _, x in rows]))
    assert float(confidence.sum()) == pytest.approx(1)
    assert not confidence.isnan().any()


def test_smoothing_loss_by_hand() -> None:
    nll = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, 0.0, 0.0, 8.0]])
    # mean + 0.7 * mean of the two largest
    assert compute_prompt_tuning_loss(nll, 2, 0.7).tolist() == pytest.approx(
        [2.5 + 0.7 * 3.5, 2.0 + 0.7 * 4.0]
    )
    # suffix shorter than N
    assert compute_prompt_tuning_loss(nll, 50, 0.7).tolist() == pytest.approx(
        [2.5 * 1.7, 2.0 * 1.7]
    )


def test_comparing_forms_by_hand() -> None:
    nll, reference = torch.tensor([2.0]), torch.tensor([4.0])
    assert float(score_against_reference_nll(nll, reference, "ratio")) == -0.5
    assert float(score_against_reference_nll(nll, reference, "difference")) == 2.0
    assert float(score_against_reference_nll(nll, reference, "perplexity-ratio")) == pytest.approx(
        -math.exp(2) / math.exp(4)
    )


def test_compressed_size_is_zlibs() -> None:
    assert count_compressed_bytes("aaaaaaaa" * 50) == len(zlib.compress(b"aaaaaaaa" * 50)) < 20
    assert count_compressed_bytes("grün") == len(zlib.compress("grün".encode()))


def test_both_sides_of_the_lower_case_ratio_are_tokenised_anew() -> None:
    """A text in odd tokens scores as in its usual ones, and one without capitals -1, whatever its
    tokens."""
    model, prefix = tiny(vocab_size=len(BYTES)), tuple(BYTES("and so")["input_ids"])
    seen = View("target", model, WHITE_BOX, seed=0, tokenizer=BYTES)

    def mean_nll(suffix: tuple[int, ...]) -> float:
        return -float(model.token_log_probs(torch.tensor([prefix]), torch.tensor([suffix])).mean())

    def spelled(text: str) -> tuple[int, ...]:
        return tuple(token for letter in text for token in BYTES(letter)["input_ids"])

    upper, lower = tuple(BYTES(" Their tHe")["input_ids"]), tuple(BYTES(" their the")["input_ids"])
    odd = spelled(" Their tHe")
    plain = spelled(" their the 12 ")
    assert odd != upper and plain != tuple(BYTES(BYTES.decode(plain))["input_ids"])
    asked = [upper, odd, plain, spelled("12345"), spelled("東京")]
    scores = score_lower_case(
        seen, [(prefix, suffix) for suffix in asked], [mean_nll(one) for one in asked]
    )
    truth = -mean_nll(upper) / mean_nll(lower)
    assert scores[:2] == pytest.approx([truth, truth], rel=1e-5) and abs(truth + 1) > 1e-3
    assert scores[2:] == [-1.0] * 3


def test_the_tokenizer_is_called_once_for_all_texts_in_lower_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    encode = type(BYTES).__call__

    def count(self: Any, text: Any, **options: Any) -> Any:
        calls.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(type(BYTES), "__call__", count)
    seen = View("target", tiny(vocab_size=len(BYTES)), WHITE_BOX, seed=0, tokenizer=BYTES)
    score_lower_case(seen, [((1, 2), (40, 41))] * 5, [1.0] * 5)
    assert len(calls) == 1 and len(calls[0]) == 10


def test_a_capital_among_likelier_digits_does_not_lead() -> None:
    """The likeliest candidate is of digits: all score -1. If it has capitals, they are compared
    with lower case."""
    seen = View("target", tiny(vocab_size=len(BYTES)), WHITE_BOX, seed=0, tokenizer=BYTES)
    suffixes = torch.tensor(
        [[BYTES(letter)["input_ids"][0] for letter in text] for text in ("123", "1Q3")]
    )

    def scored(*nll: float) -> list[float]:
        token = -torch.tensor(nll)[:, None].expand(-1, 3)
        drawn = SuffixCandidates(suffixes, torch.tensor([5, 1]), token)
        (scores,) = LowercaseRanking(samples=6).candidate_scores(
            seen, [(Query("q", (1, 2), 3), drawn)]
        )
        return scores.tolist()

    assert scored(0.1, 5.0) == [-1.0, -1.0]
    digits, capital = scored(5.0, 0.1)
    assert digits == -1.0 and capital > -1.0


def test_equal_scores_are_ranked_by_likelihood_and_without_it_by_count() -> None:
    """Before, the most drawn led among texts without capitals: of Chinese records 16 were found for
    perplexity's 24."""
    suffixes, counts, score = (
        torch.tensor([[1], [2], [3]]),
        torch.tensor([1, 5, 1]),
        torch.tensor([-1.0, -1.0, -1.5]),
    )
    token = -torch.tensor([[0.5], [2.0], [0.1]])
    ranked = [
        [guess.suffix for guess in rank_candidates(Query("q", (1,), 1), drawn, score, 7).ranked]
        for drawn in (
            SuffixCandidates(suffixes, counts, token),
            SuffixCandidates(suffixes, counts, None),
        )
    ]
    assert ranked == [[(1,), (2,), (3,)], [(2,), (1,), (3,)]]


def test_known_pairs_are_split_without_loss() -> None:
    pairs = [Pair((i,), (i,)) for i in range(20)]
    train, validation = split_tuning_pairs(pairs, 0.2, seed=0)
    assert len(validation) == 4
    assert sorted(p.prefix for p in train + validation) == [(i,) for i in range(20)]
    assert split_tuning_pairs(pairs, 0.2, seed=0) == (train, validation)
    assert split_tuning_pairs(pairs, 0.2, seed=1) != (train, validation)
    assert [len(part) for part in split_tuning_pairs(pairs[:2], 0.01, 0)] == [
        1,
        1,
    ]
    with refuses("2", error=NotApplicable):
        split_tuning_pairs(pairs[:1], 0.1, 0)


def ablated(confidence: str, setting: Setting = WHITE_BOX, **more: Any) -> list[Guesses]:
    attack = Ethicist(samples=12, prompt_length=3, tune_on="none", confidence=confidence)  # type: ignore[arg-type]
    seen = View("target", tiny(), setting, seed=0, **more)
    asked = [Query(f"q{i}", (i, i + 1, i + 2), 4) for i in range(1, 6)]
    return list(attack.guess(seen, {"tuned_on": "none"}, asked))


def test_ablations_rank_the_same_candidates_by_another_score() -> None:
    """Ethicist's "w/o calibrated" and "comparing (LM)" (Table 2)."""
    reference = tiny(seed=7)
    calibrated, likeliest = ablated("calibrated"), ablated("perplexity")
    compared = ablated("reference", reference=reference)
    for base, by_nll, by_ratio in zip(calibrated, likeliest, compared, strict=True):
        held = {guess.suffix: guess.count for guess in base.ranked}
        assert (
            {g.suffix: g.count for g in by_nll.ranked}
            == {g.suffix: g.count for g in by_ratio.ranked}
            == held
        )
        prefix = torch.tensor([[int(base.secret[1:]) + k for k in range(3)]])
        for guess in by_nll.ranked:
            assert guess.log_prob is not None and guess.score == pytest.approx(guess.log_prob / 4)
        for guess in by_ratio.ranked:
            assert guess.log_prob is not None
            below = reference.token_log_probs(prefix, torch.tensor([guess.suffix])).mean()
            assert guess.score == pytest.approx(-(guess.log_prob / 4) / float(below), rel=1e-4)
    with refuses("reference", error=NotApplicable):
        ablated("reference")
    with refuses("log-probabilities", error=NotApplicable):
        ablated("perplexity", TEXT_ONLY)
    with refuses("confidence"):
        Ethicist(confidence="best")  # type: ignore[arg-type]


def test_guesses_hold_their_log_probabilities_where_the_access_gives_them() -> None:
    model, found = tiny(), ablated("calibrated")
    for guesses in found:
        prefix = torch.tensor([[int(guesses.secret[1:]) + k for k in range(3)]])
        for guess in guesses.ranked:
            token = model.token_log_probs(prefix, torch.tensor([guess.suffix]))[0]
            assert guess.log_prob == pytest.approx(float(token.sum()), abs=1e-4)
            assert guess.min_log_prob == pytest.approx(float(token.min()), abs=1e-4)
    for guesses in ablated("calibrated", TEXT_ONLY):
        assert all(guess.log_prob is guess.min_log_prob is None for guess in guesses.ranked)


def test_tuning_depends_on_no_option_of_the_sampler() -> None:
    same = [
        Ethicist(samples=3),
        Ethicist(top_p=0.5),
        Ethicist(confidence="perplexity"),
        Ethicist(eos="masked"),
    ]
    assert all(attack.fit_options() == Ethicist().fit_options() for attack in same)
    others = [
        Ethicist(alpha=0),
        Ethicist(tune_on="none"),
        Ethicist(epochs=1),
        Ethicist(prompt_length=3),
    ]
    assert all(attack.fit_options() != Ethicist().fit_options() for attack in others)


def test_a_warm_up_that_outlasts_the_tuning_is_said() -> None:
    view = View("target", tiny(7), WHITE_BOX, 0)
    # three to learn from, one to choose by
    known = [Pair((i, i + 1), (i + 2, i + 3)) for i in range(4)]

    def said(warmup: int) -> str:
        attack = Ethicist(prompt_length=2, epochs=3, batch=2, warmup_steps=warmup)
        return attack.notes(view, attack.fit(view, known))[0]

    assert said(7).endswith(
        "the warm-up of 7 steps is longer than all 6: -A warmup_steps=1 is the paper's share of "
        "them"
    )
    assert "warm-up" not in said(6) and "warm-up" not in said(0)


def test_a_prompt_is_tuned_on_a_public_model_only_if_the_target_takes_it() -> None:
    narrow, config = tiny(7), tiny(7).model.config
    config.hidden_size *= 2
    wide = HuggingFaceModel(AutoModelForCausalLM.from_config(config))
    known = [Pair((i, i + 1), (i + 2, i + 3)) for i in range(4)]
    for public, label in ((narrow, "public"), (wide, "none"), (None, "none")):
        view = View("target", narrow, TEXT_ONLY, 0, public=public)
        attack = Ethicist(prompt_length=2, epochs=1, samples=2)
        state = attack.fit(view, known)
        assert state["tuned_on"] == attack.choose_tuning_model_label(view) == label
        list(attack.guess(view, state, [Query("s", (1, 2), 2)]))
        if public is wide:
            assert "no --public MODEL with embeddings as wide" in attack.notes(view, state)[0]
            with pytest.raises(NotApplicable, match="a public model with embeddings as wide as"):
                Ethicist(tune_on="public").check_inputs(view, known)


def test_the_warm_up_is_the_papers_share_of_the_steps_unless_it_is_given() -> None:
    view = View("target", tiny(7), WHITE_BOX, 0)
    # 18 to learn from: 4 epochs of 9 steps
    known = [Pair((i % 7, i % 3), (i % 5, i % 2)) for i in range(20)]
    by_share, as_given, longer = (
        Ethicist(prompt_length=2, epochs=4, batch=2, warmup_steps=steps).fit(view, known)["prompt"]
        for steps in (0, 2, 9)
    )
    assert count_warmup_steps(8440) == 500 and count_warmup_steps(36) == 2
    assert torch.equal(by_share, as_given) and not torch.equal(by_share, longer)


def test_ranking_breaks_ties_by_count_then_by_first_draw() -> None:
    guesses = rank_candidates(
        Query("a", (1,), 4), candidates([1, 3, 3], [1, 1, 1]), torch.tensor([0.5, 0.5, 0.5]), 7
    )
    assert [g.suffix[0] for g in guesses.ranked] == [1, 2, 0]
    assert guesses.drawn == 28


def test_pairs_of_several_lengths_are_tuned_on_as_each_alone() -> None:
    """Of one pass, filled up behind their ends: the same loss and gradient as the mean of each
    pair's own."""
    model, method = tiny(), Ethicist(prompt_length=3)
    drawn = torch.randint(1, 60, (9, 14), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [
        Pair(tuple(row[: 6 + i % 2]), tuple(row[6 + i % 2 : 10 + i % 2 + i // 7]))
        for i, row in enumerate(drawn)
    ]
    assert len({(len(pair.prefix), len(pair.suffix)) for pair in pairs}) == 4
    # by the length of the suffix alone: prefixes are close enough
    assert len(list(_list_tuning_groups(pairs, 3))) == 2

    def learnt(asked: Sequence[Sequence[Pair]]) -> tuple[float, torch.Tensor]:
        prompt, total = model.embedding_rows(3).requires_grad_(True), 0.0
        for some in asked:
            loss = method._accumulate_mean_prompt_tuning_loss(
                model, some, prompt, torch.Generator().manual_seed(0), 4, torch.Tensor.backward
            )
            total += loss / len(asked)
        assert prompt.grad is not None
        return total, prompt.grad / len(asked)

    together, slope = learnt([pairs])
    alone, naive = learnt([[pair] for pair in pairs])
    assert together == pytest.approx(alone, abs=1e-5)
    torch.testing.assert_close(slope, naive, atol=1e-6, rtol=1e-4)
    assert [len(group) for _, group in _list_tuning_groups([pairs[0]] * 40, 3)] == [
        32,
        8,
    ]
    far = [Pair((1,) * 8, (2, 3)), Pair((1,) * 40, (2, 3))]
    # half of a pass would be filled up
    assert [len(group) for _, group in _list_tuning_groups(far, 3)] == [
        1,
        1,
    ]

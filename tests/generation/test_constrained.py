"""Draws held to a space: their density against enumeration, and ranks estimated from them against
the exact search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from auditor.core.canary_space import CanarySpace
from auditor.core.errors import AuditError
from auditor.generation import constrained, tries
from auditor.statistics import exposure
from tests.conftest import tiny
from tests.generation.test_tries import bpe

SPACE = CanarySpace("My ID is {digits:2}")


def guide(space: CanarySpace = SPACE) -> constrained.TokenGuide:
    own = bpe(150)
    return constrained.TokenGuide(
        space,
        own,
        constrained.find_common_proper_prefix(
            tries.encode_without_special_tokens(own, list(space.texts())[::3])
        ),
    )


def test_draws_are_texts_of_the_space_and_belong_to_their_own_noise() -> None:
    held, model = guide(), tiny(407, scale=6.0)
    context, noise = (0, *held.head), np.random.default_rng(0).random((200, held.get_max_tail()))
    every = constrained.draw_constrained_texts(model, held, context, noise)
    assert all(text in SPACE for text in every.texts) and every.canonical.any()
    some = constrained.draw_constrained_texts(model, held, context, noise[50:60])
    assert some.texts == every.texts[50:60]
    assert some.log_q == pytest.approx(every.log_q[50:60], abs=1e-5)
    assert (
        every.log_q >= -every.nll - 1e-9
    ).all()  # the distribution, renormalised over fewer tokens


@torch.no_grad()
def test_the_density_of_canonical_texts_is_no_more_than_all_and_what_draws_show() -> None:
    held, model = guide(), tiny(407, scale=6.0)
    texts = list(SPACE.texts())
    tails = [
        tuple(ids[len(held.head) :]) for ids in tries.encode_without_special_tokens(bpe(150), texts)
    ]
    given = constrained.score_constrained_texts(model, held, (0, *held.head), texts, tails)
    assert given.nll == pytest.approx(
        tries.compute_continuation_nlls(model, (0, *held.head), tails), abs=1e-4
    )
    mass = np.exp(given.log_q)
    assert mass.sum() <= 1 + 1e-6
    noise = np.random.default_rng(1).random((3000, held.get_max_tail()))
    drawn = constrained.draw_constrained_texts(model, held, (0, *held.head), noise)
    share = drawn.canonical.mean()
    assert share == pytest.approx(mass.sum(), abs=4 * np.sqrt(0.25 / 3000))
    counts = np.array(
        [
            sum(d == text for d, c in zip(drawn.texts, drawn.canonical, strict=True) if c)
            for text in texts
        ]
    )
    assert (abs(counts - 3000 * mass) <= 5 * np.sqrt(3000 * mass) + 5).all()


@pytest.mark.parametrize("format", ["My ID is {digits:3}", "{upper} or {digits:2}."])
def test_estimated_ranks_cover_the_exact_ones(format: str) -> None:
    space, own, model = CanarySpace(format), bpe(150), tiny(407, scale=6.0)
    tree, held = tries.build_trie(space, own), guide(space)
    assert held.head == tree.head
    context, noise = (0, *tree.head), np.random.default_rng(0)
    texts = [space.draw(noise) for _ in range(8)]
    tails = [
        tuple(ids[len(tree.head) :]) for ids in tries.encode_without_special_tokens(own, texts)
    ]
    limits = tries.add_tie_margin(tries.compute_continuation_nlls(model, context, tails))
    exact = tries.count_leaves_within_nll(model, tree, context, limits).at_most
    uniform = [space.draw(noise) for _ in range(150)]
    drawn = constrained.draw_constrained_texts(
        model, held, context, noise.random((400, held.get_max_tail()))
    )
    given = constrained.score_constrained_texts(
        model,
        held,
        context,
        uniform,
        [tuple(ids[len(tree.head) :]) for ids in tries.encode_without_special_tokens(own, uniform)],
    )
    draws = exposure.WeightedDraws(
        (*drawn.texts, *given.texts),
        np.concatenate([drawn.nll, given.nll]),
        np.concatenate([drawn.log_q, given.log_q]),
        np.concatenate([drawn.canonical, given.canonical]),
        400,
        space.size,
    )
    found = [
        exposure.estimate_canary_rank(limit, text, draws)
        for limit, text in zip(limits, texts, strict=True)
    ]
    covered = [
        e.low - 1e-6 <= rank <= e.high + 1e-6 for e, rank in zip(found, exact.tolist(), strict=True)
    ]
    assert sum(covered) >= 7
    assert all(
        abs(np.log2(e.rank / rank)) < 1 for e, rank in zip(found, exact.tolist(), strict=True)
    )


def test_what_cannot_be_spelt_is_refused() -> None:
    with pytest.raises(
        AuditError, match="expected ASCII texts in a space too large to be searched"
    ):
        guide(CanarySpace("I like {tea}", (("tea", ("grün", "weiß")),)))
    with pytest.raises(AuditError, match="with tokens that do not spell it"):
        guide().check_tokens_can_be_drawn((0,))
    with pytest.raises(AuditError, match=r"cannot draw texts of the format"):
        constrained.TokenGuide(SPACE, bpe(150), tuple(bpe(150)("Your ID is")["input_ids"]))

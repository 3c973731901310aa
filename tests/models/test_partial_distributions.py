"""Bounds on distributions of which the likeliest tokens are told: against the exact distribution,
and against distributions made up to fit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from auditor.models.decoding import ANCESTRAL, GREEDY, Decoding
from auditor.models.partial_distributions import (
    PartialDistribution,
    decoded_log_prob_bounds,
    reduce_to_partial_distribution,
)

DECODINGS = [
    Decoding(temperature, top_k, top_p)
    for temperature, top_k, top_p in itertools.product(
        (0.3, 0.8, 1.0, 1.4), (0, 3, 5, 8, 25), (0.3, 0.7, 0.95, 1.0)
    )
]


def distributions(
    size: int, sharpness: float, tied: bool = False, rows: int = 60
) -> tuple[Tensor, Tensor]:
    """Distributions, and tokens half of which they may well draw."""
    noise = torch.Generator().manual_seed(size)
    logits = sharpness * torch.randn(rows, size, generator=noise, dtype=torch.float64)
    distribution = torch.log_softmax(logits.round() if tied else logits, -1)
    drawn = torch.multinomial(distribution[: rows // 2].exp(), 1, generator=noise).squeeze(-1)
    return distribution, torch.cat(
        [drawn, torch.randint(0, size, (rows - rows // 2,), generator=noise)]
    )


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize(("size", "sharpness"), [(6, 2.0), (40, 0.5), (200, 2.0), (200, 5.0)])
def test_the_exact_probability_is_within_its_bracket(
    size: int, sharpness: float, tied: bool
) -> None:
    distribution, tokens = distributions(size, sharpness, tied)
    exact = {
        decoding: decoding.score_decoded_tokens(distribution, tokens)
        for decoding in (*DECODINGS, ANCESTRAL, GREEDY)
    }
    for count, padded in itertools.product((1, 5, 20), (1, 2)):
        seen = replace(
            reduce_to_partial_distribution(distribution, tokens, count),
            max_vocabulary=padded * size,
        )
        assert (
            seen.truncation_ranks()[seen.ranks < count]
            == ANCESTRAL.ranks(distribution, tokens)[seen.ranks < count]
        ).all()
        for decoding, true in exact.items():
            least, most = decoded_log_prob_bounds(decoding, seen)
            assert (least <= true + 1e-6).all() and (true <= most + 1e-6).all(), str(decoding)


def test_what_does_not_depend_on_the_untold_is_exact() -> None:
    distribution, tokens = distributions(200, 2.0)
    for decoding in (
        ANCESTRAL,
        GREEDY,
        Decoding(top_k=5),
        Decoding(0.8, 19, 0.7),
        Decoding(1.4, 3),
    ):
        least, most = decoded_log_prob_bounds(
            decoding, reduce_to_partial_distribution(distribution, tokens, 20)
        )
        torch.testing.assert_close(least, most)
        torch.testing.assert_close(
            least, decoding.score_decoded_tokens(distribution, tokens).double(), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("decoding", "width"),
    [(Decoding(0.8, 0, 0.7), 0.0), (Decoding(0.8), 0.02), (Decoding(1.2), 0.06)],
    ids=str,
)
def test_a_bracket_is_narrow_where_a_text_is_memorised(decoding: Decoding, width: float) -> None:
    distribution, tokens = distributions(2000, 5.0, rows=200)
    at = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) > math.log(0.8)
    least, most = (
        end.exp()[at]
        for end in decoded_log_prob_bounds(
            decoding, reduce_to_partial_distribution(distribution, tokens, 20)
        )
    )
    assert at.sum() > 10 and (most - least).max() <= width


# --- the naive twin: distributions made up to fit what was told ---


def made_up(seen: PartialDistribution, row: int, size: int) -> list[Tensor]:
    """Distributions (size,) that agree with all that is told of a row: the untold mass as even and
    as uneven as may be.

    Ids of untold tokens say nothing where none tie: they are filled in any order.
    """
    known = {
        int(i): float(p) for i, p in zip(seen.likeliest[row], seen.top[row].exp(), strict=True)
    }
    own = float(seen.log_probs[row].exp())
    known[int(seen.tokens[row])] = own
    free = [i for i in range(size) if i not in known]
    cap, mass = float(seen.top[row, -1].exp()), 1 - sum(known.values())
    middle = max(
        0,
        int(seen.ranks[row])
        - 1
        - sum(p >= own for i, p in known.items() if i != int(seen.tokens[row])),
    )
    limit = [cap] * middle + [min(cap, own) if int(seen.ranks[row]) > len(known) - 1 else cap] * (
        len(free) - middle
    )
    floor = [own] * middle + [0.0] * (len(free) - middle)
    even, packed = list(floor), list(floor)
    left = mass - sum(floor)
    for i in range(len(free)):  # as much as it takes, the first first
        given = min(limit[i] - packed[i], left)
        packed[i] += given
        left -= given
    rest = [i for i in range(len(free)) if i >= middle]
    for i in rest:
        even[i] = (mass - middle * own) / max(1, len(rest))
    found = []
    for shares in (even, packed):
        distribution = torch.full((size,), 0.0, dtype=torch.float64)
        distribution[free] = torch.tensor(shares, dtype=torch.float64)
        for token, p in known.items():
            distribution[token] = p
        fits = abs(float(distribution.sum()) - 1) < 1e-6 and all(
            s <= m + 1e-12 for s, m in zip(shares, limit, strict=True)
        )
        if fits and int((distribution >= own).sum()) == int(seen.ranks[row]):
            found.append(distribution)
    return found


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.3, 2.0])
def test_distributions_made_up_to_fit_are_within_the_bracket_and_nearly_fill_it(
    temperature: float,
) -> None:
    distribution, tokens = distributions(60, 2.0, rows=80)
    seen = reduce_to_partial_distribution(distribution, tokens, 8)
    decoding, reached = Decoding(temperature), []
    least, most = (end.exp().tolist() for end in decoded_log_prob_bounds(decoding, seen))
    for row in range(len(tokens)):
        every = [
            float(p ** (1 / temperature) / (fit ** (1 / temperature)).sum())
            for fit in made_up(seen, row, 60)
            for p in [fit[tokens[row]]]
        ]
        assert all(least[row] * (1 - 1e-4) <= p <= most[row] * (1 + 1e-4) for p in every)
        if len(every) == 2:
            reached.append((max(every) - min(every)) / (most[row] - least[row]))
    assert len(reached) > 30 and sorted(reached)[len(reached) // 2] > 0.5

"""How rare a public model finds a record, as a share of the clipping norm: by hand, between two
perplexities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from auditor.core.errors import AuditError
from auditor.models.huggingface import HuggingFaceModel
from auditor.training import rarity

E = np.e


def test_rho_by_hand_on_the_line_between_two_public_perplexities() -> None:
    log_perplexity = np.array([0.0, 1.0, 1.5, 2.0, 3.0, 9.0])
    assert rarity.scale_perplexities_within_bounds(log_perplexity, E, E**3) == pytest.approx(
        [0, 0, 0.25, 0.5, 1, 1]
    )
    for lowest, highest in ((0.5, 2.0), (2.0, 2.0), (2.0, np.inf)):
        with pytest.raises(AuditError, match="perplexities 1 <= lowest < highest"):
            rarity.scale_perplexities_within_bounds(log_perplexity, lowest, highest)


def test_rho_by_hand_of_all_records_together() -> None:
    log_perplexity = np.log([2.0, 6.0, 4.0, 6.0])
    assert rarity.scale_perplexities_within_data(log_perplexity, "min-max") == pytest.approx(
        [0, 1, 0.5, 1]
    )
    assert rarity.scale_perplexities_within_data(log_perplexity, "rank") == pytest.approx(
        [0, 2.5 / 3, 1 / 3, 2.5 / 3]
    )
    assert rarity.scale_perplexities_within_data(np.ones(3), "rank").tolist() == [1, 1, 1]


def test_clipping_shares_fall_from_1_to_the_least_as_records_grow_rarer(
    make_tiny: Callable[..., HuggingFaceModel],
) -> None:
    model, examples = make_tiny(), [(1, 2, 3), (4, 9, 9, 2), (7, 7), (30, 31, 32, 33)]
    log_perplexity = rarity.compute_log_perplexities(model, examples)
    low, high = float(np.exp(log_perplexity.min())), float(np.exp(log_perplexity.max()))
    shares = rarity.compute_clipping_shares(model, examples, 0.25, low, high)
    place = (log_perplexity - log_perplexity.min()) / np.ptp(log_perplexity)
    assert shares == pytest.approx((1 - 0.75 * place).tolist()) and (
        min(shares),
        max(shares),
    ) == pytest.approx((0.25, 1))
    assert rarity.compute_clipping_shares(model, examples, 1.0, low, high) == [1.0] * 4
    # from 1 to the size of the vocabulary
    by_itself = rarity.compute_clipping_shares(model, examples, 0.5, 0, 0)
    assert by_itself == pytest.approx(
        (1 - 0.5 * np.clip(log_perplexity / np.log(model.vocab_size), 0, 1)).tolist()
    )

"""AdaPMixED: the distribution that PMixED would serve within one radius, what a query costs by
hand, and nothing claimed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from auditor.attacks.claim_check import ClaimCheck
from auditor.benchmarks.data.fixed_distributions import build_fixed_ensemble
from auditor.core.nouns import Secret
from auditor.defenses.adapmixed import AdaPMixed
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.plugins.defense import Scenario
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.view import WHITE_BOX, View
from auditor.privacy.accounting import convert_rdp, realised_renyi
from tests.conftest import refuses

SECRETS = [Secret(f"s{i}", (0, 1, i % 2), (1, 0, 1), 1, alias=f"alias{i}") for i in range(2)]
PUBLIC, MEMBERS = (0.5, 0.3, 0.2), ((0.6, 0.3, 0.1), (0.98, 0.01, 0.01), (0.5, 0.25, 0.25))


def protect(held: Ensemble, **options: Any) -> LanguageModel:
    return AdaPMixed(**options).protect(Scenario(held.public, held.public, held, 10, 3))


def checked(model: LanguageModel, **options: int) -> tuple[dict[str, float], list[str]]:
    probe = ClaimCheck(**options)
    seen = observe_all_secrets(probe, View("t", model, WHITE_BOX, seed=0), SECRETS)
    assert not probe.claim_violations(SECRETS, seen)
    return {m.name: m.value for m in probe.measurements(SECRETS, seen)}, list(
        probe.notes(SECRETS, seen)
    )


def distribution(model: LanguageModel) -> np.ndarray:
    return model.log_probs(torch.tensor([[0]]), 1)[0, 0].double().log_softmax(-1).numpy()


def test_members_are_mixed_as_far_as_the_radius_lets_them() -> None:
    """The first and the last lie within it as they are; the second is on its edge, in the larger of
    both directions."""
    own = np.exp(distribution(protect(build_fixed_ensemble(PUBLIC, *MEMBERS), alpha=3, beta=0.1)))
    public, mixed = np.array(PUBLIC), 3 * own - np.array(MEMBERS[0]) - np.array(MEMBERS[2])
    pair = np.log(mixed / mixed.sum()), np.log(public)
    assert max(realised_renyi(*pair, 3), realised_renyi(*pair[::-1], 3)) == pytest.approx(
        0.3, rel=1e-5
    )


def test_what_queries_cost_is_the_sum_of_their_divergences_and_no_claim() -> None:
    held, options = build_fixed_ensemble(PUBLIC, *MEMBERS), {"alpha": 3, "beta": 0.1}
    own = distribution(protect(held, **options))
    without = [
        distribution(
            protect(
                build_fixed_ensemble(PUBLIC, *MEMBERS[:i], PUBLIC, *MEMBERS[i + 1 :]), **options
            )
        )
        for i in range(3)
    ]
    cost = max(
        max(realised_renyi(own, other, 3), realised_renyi(other, own, 3)) for other in without
    )
    measured, notes = checked(protect(held, **options), positions=3)
    assert "claim_violations" not in measured and not any(
        "holds with margin" in note for note in notes
    )
    assert measured["realised_zero_out"] == pytest.approx(cost, rel=1e-6) and cost > 0.001
    assert measured["epsilon_data_dependent"] == pytest.approx(
        convert_rdp(6 * cost, 1e-5, 3), rel=1e-6
    )
    assert any("nothing is claimed" in note and "for the auditor only" in note for note in notes)
    case = Scenario(held.public, held.public, held, 10, 3)
    assert AdaPMixed().claim(case, 5) is None and AdaPMixed.claims.startswith("none")


def test_queries_that_members_agree_on_cost_little() -> None:
    alike = checked(protect(build_fixed_ensemble(PUBLIC, *[PUBLIC] * 3)))[0]
    assert (
        alike["epsilon_data_dependent"] == pytest.approx(0, abs=1e-9) == alike["realised_zero_out"]
    )
    few, many = (
        checked(protect(build_fixed_ensemble(PUBLIC, *[(0.1, 0.1, 0.8)] * members)))[0][
            "realised_zero_out"
        ]
        for members in (2, 8)
    )
    assert 0 < 3 * many < few


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"alpha": 1}, ("alpha", "256", "1")),
        ({"alpha": 1000}, ("alpha", "256", "1,000")),
        ({"beta": -0.1}, ("beta", "0")),
        ({"beta": math.nan}, ("beta", "0")),
        ({"beta": 1e6}, ("beta", "1,000")),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], facts: tuple[str, ...]) -> None:
    with refuses(*facts):
        AdaPMixed(**options)

"""What likelihoods alone say of a target: that it knows its members better, or nothing."""

from __future__ import annotations

import numpy as np

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.runs.scoring import LIKELIHOOD, build_likelihood_row, doubt_if_members_likelier


def answers(gap: float, n: int = 60, others: int = 20, seed: int = 0) -> ValuesBySecret:
    """Mean log-probabilities, nats a token, of standard deviation 0.5."""
    rng = np.random.default_rng(seed)
    members, rest = rng.normal(gap - 2, 0.5, n), rng.normal(-2, 0.5, others)
    own, floor = (
        {f"{name}{i}": float(x) for i, x in enumerate(x)}
        for name, x in (("m", members), ("n", rest))
    )
    return build_likelihood_row(own, floor)


def test_members_that_are_more_likely_are_a_reason_to_doubt_a_zero() -> None:
    (doubt,) = doubt_if_members_likelier("PMixED", answers(1.0))
    assert doubt.kind == "likelihood" and doubt.sentence.startswith(
        "PMixED: members' true tokens are more likely"
    )
    assert "--attack membership tests which" in doubt.sentence
    (doubt,) = doubt_if_members_likelier("PMixED", answers(1.0), methods=("membership",))
    assert (
        "--attack" not in doubt.sentence
        and "compare membership with its blind baseline" in doubt.sentence
    )
    assert not doubt_if_members_likelier("PMixED", answers(-1.0))
    # of whom nothing is known
    assert not doubt_if_members_likelier("PMixED", answers(1.0, others=1))
    forbidden = answers(1.0)
    forbidden.values[LIKELIHOOD][-1] = -np.inf
    assert not doubt_if_members_likelier("MemFree", forbidden)


def test_false_alarms_are_as_many_as_the_level_says() -> None:
    """At 2.5%, at the sizes of a defense in the lab: 14 or fewer of 300 but for one series in a
    hundred."""
    assert (
        sum(bool(doubt_if_members_likelier("", answers(0.0, seed=seed))) for seed in range(300))
        <= 14
    )

"""A chain of causes: its steps add up, and a cause that no row isolates is credited with
nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.result import Chain
from auditor.plugins.defense import Cause
from auditor.runs import chain_steps
from auditor.runs.chain_steps import ChainRow

ALL = range(20)
RECALL, LIKELIHOOD = ("recall", "share"), ("likelihood", "nats a token")


def answers(
    name: str, members: Mapping[str, float], others: Mapping[str, float] | None = None
) -> ValuesBySecret:
    ids, values = (*members, *(others or {})), [*members.values(), *(others or {}).values()]
    return ValuesBySecret(
        ids, np.arange(len(ids)) < len(members), (None,) * len(ids), {name: np.array(values)}
    )


def recalled(*hits: int, of: range = ALL) -> ValuesBySecret:
    """A row that completed these secrets of those it was asked."""
    return answers("recall", {str(i): float(i in hits) for i in of})


def chain_row(
    name: str, row: ValuesBySecret | None, target: str = "", absent: str = ""
) -> ChainRow:
    return ChainRow(Cause(name, f"what {name} changes"), target or f"row of {name}", row, absent)


UNDEFENDED = ("undefended", recalled(*range(16)))
RECIPE, SPLITTING, MIXING = (recalled(*range(n)) for n in (15, 6, 0))
FLOOR = chain_row("nothing", recalled(), "floor")


def chain(*chain_rows: ChainRow) -> Chain:
    found = chain_steps.build_cause_chain("defended", UNDEFENDED, chain_rows, *RECALL)
    assert found is not None
    return found


def differences(found: Chain) -> list[float | None]:
    return [
        None if step.difference is None else round(20 * step.difference.value)
        for step in found.steps
    ]


def test_every_step_is_its_own_rows() -> None:
    own = chain_row("mixing", MIXING, "defended")
    found = chain(chain_row("recipe", RECIPE), chain_row("splitting", SPLITTING), own, FLOOR)
    assert [(tuple(step.causes), step.before, step.after) for step in found.steps] == [
        (("recipe",), "undefended", "row of recipe"),
        (("splitting",), "row of recipe", "row of splitting"),
        (("mixing",), "row of splitting", "defended"),
        (("nothing",), "defended", "floor"),
    ]
    assert differences(found) == [-1, -9, -6, 0] and not any(step.note for step in found.steps)
    first = found.steps[0].difference
    assert (
        first is not None
        and (first.name, first.n) == ("recall_difference", 20)
        and first.low < 0 <= first.high
    )


@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 1)])
def test_the_steps_add_up_to_the_whole(missing: tuple[int, ...]) -> None:
    """On the secrets that all rows answered: one row may have been asked fewer, and another other
    ones."""
    rows = [recalled(*range(15), of=range(3, 20)), recalled(*range(6), of=range(14))]
    chain_rows = [
        chain_row(f"cause {i}", None if i in missing else row, absent="gone")
        for i, row in enumerate(rows)
    ]
    found = chain(*chain_rows, chain_row("last", MIXING, "defended"), FLOOR)
    steps = [step.difference for step in found.steps if step.after != "floor"]
    assert sum(m.value for m in steps if m) == pytest.approx(found.whole.value)
    secrets = {(): 11, (0,): 14, (1,): 17, (0, 1): 20}[missing]
    assert {m.n for m in steps if m} == {secrets} == {found.whole.n}


def test_causes_without_a_row_between_them_are_one_step_that_says_so() -> None:
    found = chain(
        chain_row("recipe", None, absent="'Whole' (train it)"),
        chain_row("splitting", SPLITTING),
        chain_row("mixing", MIXING, "defended"),
        chain_row("nothing", None, absent="'Public' (give it)"),
    )
    joint, mixing, floor = found.steps
    assert joint.causes == {"recipe": "what recipe changes", "splitting": "what splitting changes"}
    assert joint.note == "not separated without 'Whole' (train it)"
    assert differences(found) == [-10, -6, None] and not mixing.note
    assert (floor.before, floor.after) == ("defended", "")
    assert floor.note == "not measured without 'Public' (give it)"


def test_a_row_that_is_the_undefended_one_is_no_step() -> None:
    same = chain_row("recipe", UNDEFENDED[1], "undefended")
    found = chain(same, chain_row("splitting", SPLITTING), chain_row("mixing", MIXING, "defended"))
    assert differences(found) == [None, -10, -6]
    assert (found.steps[0].before, found.steps[0].after) == ("undefended", "undefended")
    assert found.steps[0].note == "the undefended target itself is the control"


def test_without_the_defended_row_or_a_common_secret_there_is_no_chain() -> None:
    lost = chain_row("mixing", None, "defended")
    assert (
        chain_steps.build_cause_chain(
            "defended", UNDEFENDED, [chain_row("splitting", SPLITTING), lost], *RECALL
        )
        is None
    )
    apart = chain_row("splitting", recalled(of=range(30, 40)))
    assert (
        chain_steps.build_cause_chain(
            "defended", UNDEFENDED, [apart, chain_row("mixing", MIXING, "defended")], *RECALL
        )
        is None
    )


def test_means_are_paired_too() -> None:
    """Bits and probabilities, of a probe: two rows that differ by a constant differ by it on every
    resample."""
    base = answers("exposure", {str(i): float(i) for i in ALL})
    lower = answers("exposure", {str(i): i - 3.0 for i in ALL})
    found = chain_steps.build_cause_chain(
        "defended",
        ("undefended", base),
        [chain_row("noise", lower, "defended")],
        "exposure",
        "bits",
    )
    assert found is not None and (found.whole.name, found.whole.unit) == (
        "exposure_difference",
        "bits",
    )
    assert found.whole.value == pytest.approx(-3) and found.whole.low <= -3 <= found.whole.high


def test_a_floor_takes_off_what_is_no_memory() -> None:
    """A row that makes all text likelier, and members more so: the difference is what members gain,
    by Welch."""
    rng = np.random.default_rng(0)
    before, after = (rng.normal(size=50) + shift for shift in (0.0, 3.0 + (np.arange(50) < 30)))

    def row(values: NDArray[np.float64]) -> ValuesBySecret:
        own, floor = (
            {f"{i}": float(x) for i, x in enumerate(part)} for part in (values[:30], values[30:])
        )
        return answers("likelihood", own, floor)

    found = chain_steps.measure_row_difference(*LIKELIHOOD, row(after), row(before))
    own, other = (after - before)[:30], (after - before)[30:]
    a, b = own.var(ddof=1) / 30, other.var(ddof=1) / 20
    half = stats.t.ppf(0.975, (a + b) ** 2 / (a**2 / 29 + b**2 / 19)) * (a + b) ** 0.5
    expected = own.mean() - other.mean()
    assert (found.value, found.low, found.high) == pytest.approx(
        (expected, expected - half, expected + half)
    )
    assert found.n == 30 and abs(found.value - 1) < 4 * half / 2


def test_no_interval_is_made_up_where_nothing_varies() -> None:
    same = answers("likelihood", {"a": -1.0, "b": -2.0}, {"c": -3.0, "d": -4.0})
    found = chain_steps.measure_row_difference(*LIKELIHOOD, same, same)
    assert found.value == 0 and math.isnan(found.low) and math.isnan(found.high)


def test_a_true_token_without_probability_leaves_no_number() -> None:
    gone = answers("likelihood", {"a": -math.inf, "b": -2.0}, {"c": -3.0, "d": -4.0})
    found = chain_steps.measure_row_difference(*LIKELIHOOD, gone, gone)
    assert math.isnan(found.value) and math.isnan(found.low) and math.isnan(found.high)


def test_steps_over_a_floor_add_up_where_rows_have_other_non_members() -> None:
    """An ensemble is asked fewer: every step is then over those, or the steps are not those of one
    whole."""
    rng = np.random.default_rng(0)

    def row(others: int) -> ValuesBySecret:
        own, floor = (
            {str(i): float(x) for i, x in enumerate(rng.normal(size=n))} for n in (12, others)
        )
        return answers("likelihood", own, floor)

    chain_rows = [
        chain_row("recipe", row(9)),
        chain_row("splitting", row(4)),
        chain_row("mixing", row(4), "defended"),
    ]
    found = chain_steps.build_cause_chain(
        "defended", ("undefended", row(9)), chain_rows, *LIKELIHOOD
    )
    assert found is not None
    assert sum(step.difference.value for step in found.steps if step.difference) == pytest.approx(
        found.whole.value
    )

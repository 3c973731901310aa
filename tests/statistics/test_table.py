"""The table of metrics: one entry is all that a new one takes, and names without an entry are still
understood."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from auditor.attacks.exposure import Exposure
from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.attacks.near_verbatim import NearVerbatim
from auditor.conclusions import contrasts, outcomes
from auditor.conclusions.replicates import Replicates
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Finding, Measurement
from auditor.gate import decide
from auditor.plugins.probe import Probe
from auditor.reports import phrases
from auditor.statistics import extraction, judging, metrics
from auditor.statistics.bounds import bound_binomial_share, bound_discordant_pairs
from auditor.statistics.intervals import estimate_mean
from auditor.statistics.recomputed import recompute_metric, repeat_measurement
from tests.rows import judge_columns


def outcome(n: int = 40, others: int = 10) -> judging.Outcome:
    rng = np.random.default_rng(n)
    hit = rng.random(n) < 0.4
    traits = {
        name: rng.integers(0, 2, n).astype(float)
        for name in ("rank", "count", "min_log_prob", "passed_over")
    }
    return judge_columns(
        tuple(f"s{i:03d}" for i in range(n)),
        hit,
        hit | (rng.random(n) < 0.2),
        rng.random(n),
        (None,) * n,
        np.arange(n) >= others,
        np.where(hit, 0, 9),
        np.full(n, 2),
        traits,
    )


def test_a_new_metric_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in every row, kept of each secret, paired, resampled, bounded exactly and written by
    its title."""
    new = metrics.Metric(
        "nothing_right",
        "No guess right",
        exact=True,
        per_secret=True,
        values=lambda outcome: ~outcome.any_hit,
    )
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, new))
    monkeypatch.setattr(metrics, "_BY_NAME", {**metrics._BY_NAME, new.name: new})
    metrics.find_metric.cache_clear()
    try:
        one = outcome()
        measured = next(m for m in extraction.measure_extraction(one) if m.name == new.name)
        members = one.select_secrets(one.member)
        assert (measured.value, measured.n) == (float((~members.any_hit).mean()), 30)
        assert phrases.format_metric(new.name) == "No guess right" and (
            decide.compute_rule_bounds(measured).low(0.01)
            == bound_binomial_share(round(30 * measured.value), 30).low(0.01)
        )
        kept = outcomes.ValuesBySecret.from_judged_guesses(one)
        assert recompute_metric(
            new,
            kept.order_metric_values(True, None),
            kept.order_metric_values(False, None),
        ) == (measured.value, 30)
        same = outcomes.compare_paired_metric(new.name, None, kept, kept)
        assert not isinstance(same, str) and (same.value, same.n) == (0, 30)
        assert same.high(0.05) == bound_discordant_pairs(0, 0, 30).high(0.05)
        seeds = Replicates("t", "s", "a", {0: kept})
        found = contrasts.measure_seed_contrast(
            "c", [contrasts.WeightedMetric(1.0, new.name, seeds)]
        )
        assert found.value == pytest.approx(measured.value) and found.low < found.value < found.high
    finally:
        metrics.find_metric.cache_clear()


def test_what_is_measured_is_what_the_kept_numbers_make_it() -> None:
    one = outcome(60)
    kept = outcomes.ValuesBySecret.from_judged_guesses(one)
    sides = kept.order_metric_values(True, None), kept.order_metric_values(False, None)
    again = {
        m.name: recompute_metric(metrics.find_metric(m.name), *sides)
        for m in extraction.measure_extraction(one)
    }
    held = {name: found for name, found in again.items() if found is not None}
    wanted = {
        "recall",
        "any_of_k",
        "near_verbatim_recall",
        "recall_at_100_errors",
        "recall_at_10pct_errors",
    }
    of_others = {f"{name}_nonmembers" for name in ("recall", "near_verbatim_recall", "any_of_k")}
    assert set(held) == wanted | {"excess_recall"} | of_others
    for m in extraction.measure_extraction(one):
        if m.name in held:
            assert held[m.name] == (pytest.approx(m.value), m.n)


def observed() -> tuple[list[Secret], list[Observation]]:
    names = (
        "log_p",
        "log_p_ancestral",
        "log_p_near",
        "log_p_near_most",
        "rank_bits",
        "exposure_bits",
        "extrapolated_bits",
        "null_p",
    )
    names += (
        "exposure_low_bits",
        "exposure_high_bits",
        "space_bits",
        "exact",
        "estimated",
        "fit_p",
    )
    secrets = [Secret(f"s{i}", (1,), (2,), repeats=1, member=i < 4) for i in range(8)]
    return secrets, [
        Observation(s.id, dict.fromkeys(names, -0.5) | {"null_p": 0.5, "space_bits": 9.0})
        for s in secrets
    ]


@pytest.mark.parametrize(
    "probe", [ExtractionProbability(), NearVerbatim(), Exposure()], ids=lambda probe: probe.name
)
def test_what_probes_measure_is_in_the_table(probe: Probe) -> None:
    secrets, observations = observed()
    view: Any = None  # these probes need none
    observations = probe.add_joint_values(view, secrets, observations)
    measured = probe.measurements(secrets, observations)
    kept = probe.per_secret_values(secrets, observations)
    for m in measured:
        entry = metrics.find_metric(m.name)
        assert entry.unit == m.unit, m.name  # a plug-in's has none
        if not entry.signed and entry.members:
            assert entry.per_secret == (m.name in kept), m.name


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("recall_at_100_errors", "Recall at 100 errors"),
        ("recall_at_10pct_errors", "Recall at n/10 errors"),
        ("recall_at_20pct_errors", "Recall at 20% errors"),
        ("recall_at_7_errors", "Recall at 7 errors"),
        ("expected_any_of_10_nonmembers", "Expected recall of any of 10, non-members"),
        ("discoverable_10_0.5", "(10, 0.5)-discoverable"),
        ("excess_extraction_probability", "Extraction probability, mean, members − non-members"),
        ("taste_of_plugins", "Taste of plugins"),
        ("excess_taste", "Taste, members − non-members"),
        ("recall_at_many_errors", "Recall at many errors"),
    ],
)
def test_titles(name: str, title: str) -> None:
    assert phrases.format_metric(name) == title


def test_what_the_table_does_not_know_is_taken_at_its_word() -> None:
    """By its own unit, with the interval on record, and paired by what is kept of it."""
    m = Measurement("taste", 0.5, 0.4, 0.6, 10, unit="bits")
    assert decide.compute_rule_bounds(m).low(0.05) == 0.4
    kept = outcomes.ValuesBySecret(
        ("a", "b"), np.array([True, True]), (None, None), {"taste": np.array([0.3, 0.5])}
    )
    found = outcomes.compare_paired_metric("taste", None, kept, kept)
    assert not isinstance(found, str) and found.value == 0
    row = Finding("t", "white-box", "mine", {}, (), "", None, "", measurements=(m,))
    assert phrases.format_baseline_excess_cells(row) == ("taste 0.500 [0.400–0.600]", "–", "–")
    assert (
        metrics.find_metric("difference_of_taste").signed,
        metrics.find_metric("taste").signed,
    ) == (True, False)


def test_errors_of_a_share_are_rounded_down_and_at_least_one() -> None:
    tenth = metrics.find_metric("recall_at_10pct_errors")
    assert [tenth.compute_wrong_guess_limit(n) for n in (3, 19, 20, 300)] == [1, 1, 2, 30]
    assert metrics.find_metric("recall_at_100_errors").compute_wrong_guess_limit(3) == 100


def test_a_mean_is_measured_again_as_it_was() -> None:
    values, metric = np.array([0.1, 0.4, 0.2, 0.9]), metrics.find_metric("extraction_probability")
    found = repeat_measurement(metric, {"extraction_probability": values}, {})
    assert (
        found == estimate_mean(metric.name, values, metric.unit, metric.note)
        and found.value == values.mean()
    )

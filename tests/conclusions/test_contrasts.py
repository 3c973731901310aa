"""Contrasts against naive loops, by hand, and against the measurements of a single finding."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import binom
from scipy.stats import t as student

from auditor.conclusions.contrasts import WeightedMetric, measure_seed_contrast
from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.replicates import Replicates
from auditor.core.errors import AuditError
from auditor.core.nouns import Guess, Guesses, Secret
from auditor.core.result import Measurement
from auditor.statistics import extraction, intervals, judging
from auditor.statistics.bounds import bound_discordant_pairs
from auditor.statistics.judging import Outcome
from auditor.statistics.metrics import METRICS, find_metric
from tests.rows import judge_columns


def outcome(hits: list[int], ids: list[str] | None = None) -> Outcome:
    n = len(hits)
    hit = np.array(hits, dtype=bool)

    ids = ids or [f"s{i:03d}" for i in range(n)]
    return judge_columns(
        tuple(ids),
        hit,
        hit,
        np.linspace(1, 0, n),
        (None,) * n,
        np.ones(n, dtype=bool),
        ~hit * 1,
        hit * 0,
    )


def cell(*by_seed: Outcome) -> Replicates:
    return Replicates(
        "undefended",
        "white-box",
        "a",
        {seed: ValuesBySecret.from_judged_guesses(one) for seed, one in enumerate(by_seed)},
    )


def test_the_mean_over_seeds_of_the_difference_on_the_same_secrets() -> None:
    first, second = (
        cell(outcome([1, 1, 0, 0]), outcome([1, 1, 1, 0])),
        cell(outcome([1, 0, 0, 0]), outcome([0, 0, 1, 0])),
    )
    m = measure_seed_contrast(
        "d", [WeightedMetric(1, "recall", first), WeightedMetric(-1, "recall", second)]
    )
    assert m.value == pytest.approx(((2 + 3) - (1 + 1)) / 2 / 4) and m.n == 4
    assert m.low <= m.value <= m.high


def test_secrets_are_matched_by_id_not_by_place() -> None:
    a, b = outcome([1, 1, 0, 0], ["a", "b", "c", "d"]), outcome([0, 0, 1, 1], ["d", "c", "b", "a"])
    m = measure_seed_contrast(
        "d", [WeightedMetric(1, "recall", cell(a)), WeightedMetric(-1, "recall", cell(b))]
    )
    # Equal on every secret: what is left is the exact bound on what was not seen.
    assert m.value == 0 and m.high == -m.low == bound_discordant_pairs(0, 0, 4).high(0.025)


@pytest.mark.parametrize(("n", "p"), [(60, 0.06), (60, 0.03), (200, 0.02)])
def test_few_hits_have_an_interval_that_covers(n: int, p: float) -> None:
    """Before: a bootstrap's upper end was below a share of 6% in 12% of samples of 60."""
    missed = 0.0
    for hits in range(n + 1):
        if (chance := binom.pmf(hits, n, p)) > 1e-6:
            m = measure_seed_contrast(
                "r", [WeightedMetric(1, "recall", cell(outcome([1] * hits + [0] * (n - hits))))]
            )
            assert (m.low, m.high) == intervals.clopper_pearson(hits, n)
            missed += chance * (m.high < p)
    assert missed <= 0.025


def test_few_solved_secrets_have_an_interval_that_covers() -> None:
    """Before: a bootstrap's upper end was below a recall of 1.2% in 10% of samples of 300."""
    name, n, p = "recall_at_100_errors", 300, 0.012
    missed = 0.0
    for hits in range(n + 1):
        if (chance := binom.pmf(hits, n, p)) > 1e-4:
            few = cell(outcome([1] * hits + [0] * (n - hits)))
            m = measure_seed_contrast("r", [WeightedMetric(1, name, few)])
            missed += chance * (m.high < p)
    assert missed <= 0.025
    none = cell(outcome([0] * 60))
    more = cell(outcome([1] * 3 + [0] * 57))
    parts = [WeightedMetric(1, name, more), WeightedMetric(-1, name, none)]
    assert measure_seed_contrast("d", parts).low <= bound_discordant_pairs(3, 0, 60).low(0.025) < 0


def test_a_difference_of_shares_has_the_interval_of_a_gate() -> None:
    """Before: of 60 secrets, 3 more and none fewer had an interval from 0 to 12%."""
    more, fewer = cell(outcome([1] * 3 + [0] * 57)), cell(outcome([0] * 60))
    m = measure_seed_contrast(
        "d", [WeightedMetric(1, "recall", more), WeightedMetric(-1, "recall", fewer)]
    )
    exact = bound_discordant_pairs(3, 0, 60)
    assert (m.value, m.low, m.high) == (3 / 60, exact.low(0.025), exact.high(0.025)) and m.low < 0


def test_pairing_takes_out_what_the_runs_share() -> None:
    rng = np.random.default_rng(0)
    easy = rng.random(300) < 0.5
    better = easy.copy()
    better[np.flatnonzero(~easy)[:12]] = True  # 12 of 300 more, and never fewer
    m = measure_seed_contrast(
        "d",
        [
            WeightedMetric(1, "recall", cell(outcome(list(better)))),
            WeightedMetric(-1, "recall", cell(outcome(list(easy)))),
        ],
    )
    assert m.value == pytest.approx(0.04) and m.low > 0.015 and m.high < 0.07
    alone = measure_seed_contrast("r", [WeightedMetric(1, "recall", cell(outcome(list(better))))])
    assert alone.high - alone.low > 0.1


def test_the_interval_is_the_naive_bootstraps() -> None:
    rng = np.random.default_rng(1)
    hits = rng.random(80) < 0.3
    m = measure_seed_contrast("r", [WeightedMetric(1, "recall", cell(outcome(list(hits))))])
    naive = [hits[rng.integers(0, 80, 80)].mean() for _ in range(4000)]
    assert m.low == pytest.approx(np.quantile(naive, 0.025), abs=0.02)
    assert m.high == pytest.approx(np.quantile(naive, 0.975), abs=0.02)


def test_resampled_recall_at_errors_equals_the_walk_over_copies() -> None:
    rng = np.random.default_rng(2)
    hits, n = rng.random(250) < 0.4, 250
    one = outcome(list(hits))
    one = dataclasses.replace(one, columns={**one.columns, "score": rng.random(n).round(1)})
    draws = np.vstack([np.ones((1, n), dtype=int), rng.multinomial(n, np.full(n, 1 / n), size=3)])
    for row, value in zip(
        draws, find_metric("recall_at_100_errors").compute_resampled_values(one, draws), strict=True
    ):
        copies = sorted(
            (
                (s, h)
                for s, h, times in zip(one.score, one.hit, row, strict=True)
                for _ in range(times)
            ),
            key=lambda pair: (-pair[0], pair[1]),
        )
        wrong = solved = 0
        for _, hit in copies:
            solved += hit and wrong < 100
            wrong += not hit
        assert value == pytest.approx(solved / n)


def judged(n: int = 40) -> Outcome:
    """Secrets with the answer first, second, fourth or nowhere, at counts and token probabilities
    that differ."""
    secrets, guesses = {}, []
    for i in range(n):
        answer = (i, 1)
        others = [(i, 9), (i, 8), (i, 7), (i, 6)]
        at = (0, 1, 3, None)[i % 4]
        suffixes = others if at is None else [*others[:at], answer, *others[at:]]
        ranked = tuple(
            Guess(
                s,
                -float(k) - i / n,
                8 - k,
                log_prob=-3.0 + (k if i % 8 else -k),
                min_log_prob=-1.0 - k - i % 3,
            )
            for k, s in enumerate(suffixes)
        )
        secrets[f"s{i:02d}"] = Secret(f"s{i:02d}", (i,), answer)
        guesses.append(Guesses(f"s{i:02d}", ranked, 20, 40))
    return judging.judge_guesses(guesses, secrets)


def test_statistics_are_the_measurements_of_a_finding() -> None:
    one = judged()
    measured = {m.name: m for m in extraction.measure_extraction(one)}
    names = [metric.name for metric in METRICS if metric.is_of_member_guesses]
    assert set(names) == set(measured)
    ones = np.ones((1, len(one.ids)), dtype=int)
    for name in names:
        assert float(find_metric(name).compute_resampled_values(one, ones)[0]) == pytest.approx(
            measured[name].value
        ), name
        assert (
            measure_seed_contrast(name, [WeightedMetric(1, name, cell(one))]).unit
            == measured[name].unit
        )


def test_what_tells_right_from_wrong_by_hand() -> None:
    measured = {m.name: m.value for m in extraction.measure_extraction(judged())}
    assert (measured["recall"], measured["recall_top_3"], measured["any_of_k"]) == (0.25, 0.5, 0.75)
    assert measured["count_right"] == 8
    # Right are i = 0, 4, 8, ...: those not divisible by 8 have likelier candidates behind the
    # first.
    assert measured["right_against_likelihood"] == 5 / 40
    least = [math.exp(-1.0 - i % 3) for i in range(0, 40, 4)]
    assert measured["min_probability_right"] == pytest.approx(np.mean(least))


def test_without_log_probabilities_nothing_is_said_about_them() -> None:
    secrets = {"a": Secret("a", (1,), (2,)), "b": Secret("b", (1,), (3,))}
    guesses = [Guesses(s, (Guess((2,), 0.5, 3), Guess((4,), 0.2)), 4, 4) for s in secrets]
    names = {m.name for m in extraction.measure_extraction(judging.judge_guesses(guesses, secrets))}
    assert {"count_right", "score_wrong", "recall_top_3"} <= names
    assert not {"min_probability_right", "right_against_likelihood"} & names
    blind = measure_seed_contrast(
        "x",
        [WeightedMetric(1, "min_probability_right", cell(judging.judge_guesses(guesses, secrets)))],
    )
    assert math.isnan(blind.low) and "too few" in blind.note


def test_only_common_seeds_count_and_none_is_refused() -> None:
    a = Replicates(
        "t",
        "white-box",
        "a",
        {
            0: ValuesBySecret.from_judged_guesses(outcome([1, 1, 0])),
            1: ValuesBySecret.from_judged_guesses(outcome([0, 0, 0])),
        },
    )
    b = Replicates(
        "t",
        "white-box",
        "b",
        {
            0: ValuesBySecret.from_judged_guesses(outcome([0, 0, 0])),
            2: ValuesBySecret.from_judged_guesses(outcome([1, 1, 1])),
        },
    )
    assert measure_seed_contrast(
        "d", [WeightedMetric(1, "recall", a), WeightedMetric(-1, "recall", b)]
    ).value == pytest.approx(2 / 3)
    with pytest.raises(AuditError, match="no seed was run at every point"):
        measure_seed_contrast(
            "d",
            [
                WeightedMetric(1, "recall", a),
                WeightedMetric(
                    -1,
                    "recall",
                    Replicates(
                        "t",
                        "white-box",
                        "b",
                        {5: ValuesBySecret.from_judged_guesses(outcome([1]))},
                    ),
                ),
            ],
        )


def test_other_metrics_combine_their_own_intervals() -> None:
    def held(value: float, half: float) -> Replicates:
        m = Measurement("perplexity", value, value - half, value + half, 100, "perplexity")
        return Replicates("t", "white-box", "a", measured={0: {"perplexity": m}})

    m = measure_seed_contrast(
        "d",
        [
            WeightedMetric(1, "perplexity", held(20, 3)),
            WeightedMetric(-1, "perplexity", held(12, 4)),
        ],
    )
    assert (m.value, m.low, m.high) == (8, 3, 13)  # 3-4-5
    with pytest.raises(AuditError, match="did you mean 'perplexity'"):
        measure_seed_contrast("d", [WeightedMetric(1, "perplexty", held(20, 3))])


# --- perplexities ---


def priced(nll: list[float], tokens: list[int] | None = None, **more: list[float]) -> Replicates:
    tokens = tokens or [5] * len(nll)
    held = intervals.estimate_perplexity(list(zip(nll, tokens, strict=True)))
    texts = {"tokens": [float(t) for t in tokens], "perplexity": nll, **more}
    return Replicates("t", "white-box", "a", measured={0: {"perplexity": held}}, heldout={0: texts})


def probed(bits: list[float], repeats: list[int], ids: str = "abcdef") -> Replicates:
    """A row of exposures: of one control, which counts for nothing here, and of as many canaries as
    there are bits."""
    rows = ValuesBySecret(
        (*ids[: len(bits)], "control"),
        np.array([True] * len(bits) + [False]),
        (*repeats, 0),
        {"exposure": np.array([*bits, 1.4])},
    )
    measured = {
        "exposure": Measurement("exposure", float(np.mean(bits)), 0.0, 20.0, len(bits), "bits")
    }
    for times in set(repeats):
        own = [x for x, r in zip(bits, repeats, strict=True) if r == times]
        measured[f"exposure(count={times})"] = Measurement(
            "exposure", float(np.mean(own)), 0.0, 20.0, len(own), "bits"
        )
    return Replicates(
        "t", "white-box", "exposure", measured={0: measured}, values_by_seed={0: rows}
    )


def test_means_of_a_probe_are_paired_by_secret() -> None:
    """Canaries differ by far more than two models of the same ones do: what they share cancels."""
    first = probed([1.0, 5.0, 9.0, 13.0, 17.0, 19.0], [1, 1, 4, 4, 64, 64])
    second = probed([0.5, 4.5, 8.5, 12.5, 16.5, 18.5], [1, 1, 4, 4, 64, 64])
    both = measure_seed_contrast(
        "d", [WeightedMetric(1, "exposure", first), WeightedMetric(-1, "exposure", second)]
    )
    assert (both.value, both.n, both.unit, both.note) == (pytest.approx(0.5), 6, "bits", "")
    few = measure_seed_contrast(
        "d",
        [
            WeightedMetric(1, "exposure(count=64)", first),
            WeightedMetric(-1, "exposure(count=64)", second),
        ],
    )
    assert (few.value, few.n) == (pytest.approx(0.5), 2)
    for one, other, metric in (
        (first, first, "exposure(count=1)"),  # other canaries
        (first, probed([0.5] * 6, [1, 1, 4, 4, 64, 64], ids="uvwxyz"), "exposure"),
    ):
        apart = measure_seed_contrast(
            "d",
            [
                WeightedMetric(1, "exposure(count=64)" if one is other else metric, one),
                WeightedMetric(-1, metric, other),
            ],
        )
        assert apart.note == "not paired"


def test_perplexities_of_the_same_texts_are_paired_by_text() -> None:
    rng = np.random.default_rng(0)
    easy = rng.uniform(1, 20, 40)
    one, other = priced(list(easy + 0.2)), priced(list(easy))
    m = measure_seed_contrast(
        "d", [WeightedMetric(1, "perplexity", one), WeightedMetric(-1, "perplexity", other)]
    )
    base = math.exp(easy.sum() / 200)
    assert (
        m.value == pytest.approx(base * math.expm1(0.2 / 5))
        and m.n == 40
        and m.unit == "perplexity"
    )
    alone = measure_seed_contrast("p", [WeightedMetric(1, "perplexity", other)])
    assert alone.value == pytest.approx(base)
    assert 0 < m.low < m.value < m.high < (alone.high - alone.low) / 2
    left = np.array([math.exp(np.delete(easy, i).sum() / 195) for i in range(40)]) * math.expm1(
        0.2 / 5
    )
    # Student's t on it is the farther end below
    jackknife = math.sqrt(39 / 40 * ((left - left.mean()) ** 2).sum())
    assert m.low == pytest.approx(m.value - student.ppf(0.975, 39) * jackknife, rel=0.01)
    # naive: whole texts, drawn with replacement
    draws = np.random.default_rng(5).integers(0, 40, (4000, 40))
    naive = np.array([math.exp(easy[d].sum() / 200) * math.expm1(0.2 / 5) for d in draws])
    assert np.quantile(naive, 0.975) * 0.99 < m.high < np.quantile(naive, 0.995)


def test_kinds_of_perplexity_are_paired_with_each_other() -> None:
    nll = [5.0, 10.0] * 6
    cell = priced(nll, subset=[x + 1 for x in nll])
    m = measure_seed_contrast(
        "d", [WeightedMetric(1, "subset", cell), WeightedMetric(-1, "perplexity", cell)]
    )
    assert m.value == pytest.approx(math.exp(1.7) - math.exp(1.5)) and m.low > 0


def test_perplexities_of_other_texts_are_not_paired() -> None:
    first, second = priced([5.0, 10.0, 7.0]), priced([5.0, 10.0, 7.0], [5, 5, 6])
    m = measure_seed_contrast(
        "d", [WeightedMetric(1, "perplexity", first), WeightedMetric(-1, "perplexity", second)]
    )
    assert m.note == "not paired"
    with pytest.raises(AuditError, match="unknown metric"):
        measure_seed_contrast("t", [WeightedMetric(1, "tokens", first)])

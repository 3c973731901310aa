"""AUC and true-positive rates: against scikit-learn and naive twins, by hand, and their coverage by
simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import binom, cauchy, norm
from sklearn.metrics import roc_auc_score

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import roc
from auditor.testing import tpr_interval


def scores(
    m: int, n: int, shift: float = 0.0, ties: bool = False, key: str = "roc"
) -> tuple[np.ndarray, np.ndarray]:
    noise = make_keyed_generator(key, m, n)
    own, others = noise.normal(shift, 1, m), noise.normal(0, 1, n)
    return (np.round(own), np.round(others)) if ties else (own, others)


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_scikit_learns_and_the_mean_of_either_sides_placements(ties: bool) -> None:
    own, others = scores(37, 23, 0.7, ties)
    expected = roc_auc_score([1] * 37 + [0] * 23, np.concatenate([own, others]))
    first, second = roc.compute_delong_placements(own, others)
    assert roc.auc(own, others) == pytest.approx(expected)
    assert first.mean() == pytest.approx(expected) and second.mean() == pytest.approx(expected)
    assert first.tolist() == pytest.approx(
        [np.mean(others < x) + np.mean(others == x) / 2 for x in own]
    )


def test_delongs_variance_against_a_naive_twin() -> None:
    own, others = scores(9, 7, 0.5, ties=True)
    kernel = np.array([[(x > y) + (x == y) / 2 for y in others] for x in own])
    variance = kernel.mean(1).var(ddof=1) / 9 + kernel.mean(0).var(ddof=1) / 7
    found = roc.estimate_auc("auc", own, others)
    assert found.value == pytest.approx(kernel.mean())
    assert found.low <= kernel.mean() - 1.959 * np.sqrt(variance) + 1e-9


def test_delongs_interval_is_the_wider_one_where_scores_fall_in_two_lumps() -> None:
    """Its deviations are of a sample: divided by one less than there are."""
    own, others = np.array([9.0] * 30 + [0.0] * 10), np.linspace(1, 8, 40)
    wins = (own[:, None] > others).astype(float)
    variance = wins.mean(1).var(ddof=1) / 40 + wins.mean(0).var(ddof=1) / 40
    found, low = (
        roc.estimate_auc("auc", own, others),
        roc.compute_newcombe_interval(float(wins.mean()), 40, 40)[0],
    )
    assert 0 < found.low < low and found.low == pytest.approx(
        wins.mean() - norm.ppf(0.975) * np.sqrt(variance)
    )


@pytest.mark.parametrize("level", [0.025, 0.05, 0.2])
def test_the_two_ways_in_which_a_bound_of_a_rate_errs_make_up_its_level(level: float) -> None:
    """The threshold on the wrong side, four fifths at most, or not and too few or too many members
    above it."""
    own, others = scores(300, 500, 1.0)
    found, falling = roc.bound_tpr(own, others, 0.05), np.sort(others)[::-1]
    low, high = found.low(level), found.high(level)
    wrong, k = max(
        (p, k) for k in range(1, 501) if (p := float(binom.cdf(k - 1, 500, 0.05))) <= 0.8 * level
    )
    above = int((own > falling[k - 1]).sum())
    assert wrong + (1 - wrong) * binom.sf(above - 1, 300, low) == pytest.approx(level)
    wrong, k = max(
        (p, k) for k in range(1, 501) if (p := float(binom.sf(k - 1, 500, 0.05))) <= 0.8 * level
    )
    above = int((own > falling[k - 1]).sum())
    assert wrong + (1 - wrong) * binom.cdf(above, 300, high) == pytest.approx(level)


@pytest.mark.parametrize(
    ("m", "n", "shift"), [(300, 100, 0.0), (300, 100, 1.0), (30, 10, 2.0), (10, 10, 3.0)]
)
def test_the_interval_of_an_auc_holds_the_truth(m: int, n: int, shift: float) -> None:
    truth, held = norm.cdf(shift / np.sqrt(2)), 0
    for i in range(400):
        found = roc.estimate_auc("auc", *scores(m, n, shift, key=f"coverage {i}"))
        held += found.low <= truth <= found.high
    assert held >= 0.93 * 400


def test_a_perfect_auc_still_has_a_width_and_four_a_side_tell_it_from_chance() -> None:
    """Newcombe's method 5; of three and three a perfect order comes by chance in 1 of 20, and is
    told as no more."""
    low, high = roc.compute_newcombe_interval(1.0, 300, 100)
    assert 0.97 < low < 0.99 and high == 1.0
    assert roc.compute_newcombe_interval(0.0, 300, 100) == pytest.approx((0.0, 1 - low))
    assert roc.compute_newcombe_interval(1.0, roc.LEAST, roc.LEAST)[0] > 0.55


def test_the_threshold_is_exceeded_by_new_non_members_as_seldom_as_it_says() -> None:
    """In expectation over the non-members that set it: k of n above it make (k + 1) / (n + 1) of
    others."""
    for n, rate in ((100, 0.01), (300, 0.01), (50, 0.1)):
        above = np.sort(make_keyed_generator("conformal", n).random((4000, n)), axis=1)[:, ::-1]
        # of uniform scores
        realised = 1 - float(above[:, roc.count_allowed_false_positives(n, rate)].mean())
        assert (
            realised
            == pytest.approx((roc.count_allowed_false_positives(n, rate) + 1) / (n + 1), rel=0.06)
            and realised <= 1.06 * rate
        )
        found = roc.tpr_at_fpr(np.array([2.0]), above[0], rate)
        assert (
            found.false == roc.count_allowed_false_positives(n, rate)
            and found.threshold == above[0, roc.count_allowed_false_positives(n, rate)]
        )


def test_ties_with_the_threshold_do_not_count_and_are_told() -> None:
    own, others = np.array([5.0, 3.0, 3.0, 1.0]), np.array([4.0, 3.0, 3.0, *range(-97, 0)])
    # the second of a hundred is the threshold, and the third is equal
    found = roc.tpr_at_fpr(own, others, 0.02)
    assert (found.threshold, found.true_positives, found.false, found.tied) == (3.0, 1, 1, (2, 2))
    assert "1/4 above 3; of non-members 1/100" in roc.describe_tpr_counts(found)
    assert (
        "not counted: 2 members, 2 non-members; a lower end above 0 takes 194 non-members"
        in roc.describe_tpr_counts(found)
    )


def test_infinite_scores_that_tie_on_top_find_nobody() -> None:
    own, others = np.array([np.inf, np.inf, 1.0]), np.array([np.inf, np.inf, 0.0, 0.0])
    assert roc.tpr_at_fpr(own, others, 0.25).value == 0.0
    assert (
        roc.tpr_at_fpr(own, others, 0.4).value == 0.0
        and roc.tpr_at_fpr(own, others, 0.6).value == 1.0
    )


@pytest.mark.parametrize(
    ("n", "rate", "measured"), [(98, 0.01, False), (99, 0.01, True), (998, 0.001, False)]
)
def test_too_few_non_members_give_no_rate(n: int, rate: float, measured: bool) -> None:
    own, others = scores(50, n, 1.0)
    found = roc.estimate_tpr("tpr", own, others, rate)
    assert (found is not None) == measured
    assert (
        roc.count_threshold_nonmembers(0.01) == 99 and roc.count_threshold_nonmembers(0.001) == 999
    )
    assert [roc.count_allowed_false_positives(n, 0.01) for n in (98, 99, 100, 198, 199)] == [
        -1,
        0,
        0,
        0,
        1,
    ]
    if not measured:
        assert roc.tpr_at_fpr(own, others, rate).true_positives == 0


def jump(rng: np.random.Generator, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A tenth of the members above everybody, and the rest just below the top hundredth: the worst
    there is."""
    return np.where(rng.random(m) < 0.1, 2.0, rng.uniform(0.98, 0.99, m)), rng.random(n)


DISTRIBUTIONS = {
    "normal": (
        lambda rng, m, n: (rng.normal(1.5, 1, m), rng.normal(0, 1, n)),
        norm.sf(norm.isf(0.01) - 1.5),
    ),
    "Cauchy": (
        lambda rng, m, n: (rng.standard_cauchy(m) + 2, rng.standard_cauchy(n)),
        cauchy.sf(cauchy.isf(0.01) - 2),
    ),
    "one in a hundred leaks": (
        lambda rng, m, n: (rng.normal(0, 1, m) + 50 * (rng.random(m) < 0.01), rng.normal(0, 1, n)),
        0.01 + 0.99 * 0.01,
    ),
    "ties": (
        lambda rng, m, n: (
            rng.choice(4, m, p=[0.5, 0.2, 0.2, 0.1]),
            rng.choice(4, n, p=[0.9, 0.08, 0.015, 0.005]),
        ),
        0.1,  # above the third of four values, which 2% have or exceed
    ),
    "jump": (jump, 0.1),
}


@pytest.mark.parametrize(("m", "n"), [(100, 100), (300, 100), (500, 100), (200, 200), (1000, 1000)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_interval_of_a_rate_holds_the_point_of_the_roc(
    distribution: str, m: int, n: int
) -> None:
    """Each end misses in 2.5% at most, and so does a gate at the true value in 5%: whatever the
    scores are like."""
    draw, truth = DISTRIBUTIONS[distribution]
    rng, audits = make_keyed_generator("rates", distribution, m, n), 300
    most = binom.ppf(0.999, audits, [0.025, 0.05])
    below = above = failed = 0
    for _ in range(audits):
        found = roc.bound_tpr(*(side.astype(float) for side in draw(rng, m, n)), 0.01)
        below, above = below + (found.high(0.025) < truth), above + (found.low(0.025) > truth)
        failed += found.low(0.05) > truth
        assert (
            found.low(0.025)
            <= found.low(0.05)
            <= found.value
            <= found.high(0.05)
            <= found.high(0.025)
        )
    assert below <= most[0] and above <= most[0] and failed <= most[1]


@pytest.mark.parametrize(("m", "n", "shift"), [(100, 100, 0.0), (100, 100, 1.5), (300, 400, 1.5)])
def test_the_interval_of_a_partial_auc_holds_the_truth(m: int, n: int, shift: float) -> None:
    truth = quad(lambda rate: norm.sf(norm.isf(rate) - shift), 0, 0.1)[0] / 0.1
    rng, audits = make_keyed_generator("partial", m, n, shift), 200
    wrong = 0
    for _ in range(audits):
        found = roc.bound_partial_auc(rng.normal(shift, 1, m), rng.normal(0, 1, n), 0.1)
        wrong += not found.low(0.025) <= truth <= found.high(0.025)
        assert (
            0
            <= found.low(0.025)
            <= found.low(0.05)
            <= found.value
            <= found.high(0.05)
            <= found.high(0.025)
            <= 1
        )
    assert wrong <= binom.ppf(0.999, audits, 0.05)
    assert n < 400 or 0 < found.low(0.025) < found.high(0.025) < 1  # it says something


def test_a_partial_auc_is_the_area_under_the_staircase() -> None:
    """Of scores without ties: the mean of the ROC's steps, rate by rate; a tie flatters nobody."""
    own, others = scores(50, 40, 1.0)
    steps = [float((own > cut).mean()) for cut in np.sort(others)[::-1][:4]]
    assert roc.bound_partial_auc(own, others, 0.1).value == pytest.approx(np.mean(steps))
    assert roc.bound_partial_auc(np.ones(9), np.ones(40), 0.1).value == 0
    assert roc.estimate_partial_auc("x", own, others[:8], 0.1) is None


def test_steps_bound_a_partial_auc_from_below_and_above() -> None:
    """The true-positive rate rises by 0.2 just before each of the five rates of the grid."""
    others = np.linspace(0, 1, 20_000)
    members = np.repeat(1 - (0.02 * np.arange(1, 6) - 0.005), 4_000)
    found = roc.bound_partial_auc(members, others, 0.1)
    assert found.value == pytest.approx((0 + 0.2 + 0.4 + 0.6 + 0.8) / 5 + 0.2 * 0.005 * 5 / 0.1)
    assert found.low(0.025) == pytest.approx((0 + 0.2 + 0.4 + 0.6 + 0.8) / 5, abs=0.02)
    assert found.high(0.025) == pytest.approx((0.2 + 0.4 + 0.6 + 0.8 + 1) / 5, abs=0.02)


def test_a_worst_case_takes_most_of_the_level_and_many_records_tell() -> None:
    """The bound gives nothing away for nothing: behind a jump it misses as often as the threshold
    may be wrong."""
    rng, audits = make_keyed_generator("jump"), 600
    missed = sum(roc.bound_tpr(*jump(rng, 3000, 400), 0.01).low(0.05) > 0.1 for _ in range(audits))
    assert 0.01 < missed / audits <= 0.05
    found = roc.bound_tpr(*scores(3000, 3000, 2.0), 0.01)
    assert 0.2 < found.low(0.025) < 0.372 < found.high(0.025) < 0.5


def test_few_non_members_bound_a_rate_from_above_alone() -> None:
    assert (
        roc.count_bound_nonmembers(0.01, 0.025),
        roc.count_bound_nonmembers(0.01, 0.05),
        roc.count_bound_nonmembers(0.001, 0.025),
    ) == (390, 321, 3911)
    for n in (389, 390):
        own, others = np.full(500, 9.0), make_keyed_generator("few", n).random(n)
        assert (roc.bound_tpr(own, others, 0.01).low(0.025) > 0) == (n == 390)
        measured = roc.estimate_tpr("tpr", own, others, 0.01)
        assert measured is not None and ("takes 390 non-members" in measured.note) == (n == 389)


def test_differences_of_two_runs_pair_members_and_non_members() -> None:
    own, others = scores(200, 150, 1.0)
    noise = make_keyed_generator("noise")
    near = own + noise.normal(0, 0.1, 200), others + noise.normal(0, 0.1, 150)
    found = roc.compute_auc_difference(near, (own, others))
    assert found.value == pytest.approx(roc.auc(*near) - roc.auc(own, others)) and found.n == 350
    alone = roc.estimate_auc("auc", own, others)
    assert 0 < found.high(0.025) - found.low(0.025) < (alone.high - alone.low) / 2
    # By hand: 150 pairs without a record in common, none of them ordered differently.
    same = roc.compute_auc_difference((own, others), (own, others))
    unseen = pytest.approx(1 - 0.05 ** (1 / 150))
    assert (same.value, -same.low(0.05), same.high(0.05)) == (0, unseen, unseen)
    rate = roc.bound_tpr_difference(near, (own, others), 0.05)
    expected = roc.tpr_at_fpr(*near, 0.05).value - roc.tpr_at_fpr(own, others, 0.05).value
    assert rate.value == pytest.approx(expected) and rate.low(0.05) <= expected <= rate.high(0.05)
    assert roc.bound_tpr_difference((own, others), near, 0.05).high(0.05) == -rate.low(0.05)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (60, 60), (300, 100)])
@pytest.mark.parametrize(("new", "base"), [(1.0, 1.0), (3.0, 2.0), (4.0, 3.5)])
def test_bounds_of_an_auc_difference_miss_as_seldom_as_they_say(
    m: int, n: int, new: float, base: float
) -> None:
    """Also of AUCs near 1, of which most samples separate all records."""
    rng, audits, missed = make_keyed_generator("paired aucs", m, n), 400, np.zeros(2, int)
    truth = float(norm.cdf(new / math.sqrt(2)) - norm.cdf(base / math.sqrt(2)))
    for _ in range(audits):
        common = rng.normal(size=m), rng.normal(size=n)
        sides = []
        for shift in (new, base):
            own, others = (
                0.95 * part + math.sqrt(1 - 0.95**2) * rng.normal(size=len(part)) for part in common
            )
            sides.append((own + shift, others))
        found = roc.compute_auc_difference(*sides)
        missed += found.high(0.05) < truth, found.low(0.05) > truth
    assert missed.max() <= binom.isf(1e-3, audits, 0.05)


@pytest.mark.parametrize(
    ("base", "new"), [(0.0, 0.0746), (0.0, 0.36), (0.5, 0.9), (-0.36, 0.36), (0.9, -0.5)]
)
def test_a_change_from_chance_is_missed_as_seldom_as_it_says(base: float, new: float) -> None:
    """Errors that both runs share can mirror both AUCs (one in five passed, by their scores)."""
    rng, audits, missed = make_keyed_generator("mirrored aucs"), 400, np.zeros(2, int)
    truth = float(norm.cdf(abs(new) / math.sqrt(2)) - norm.cdf(abs(base) / math.sqrt(2)))
    for _ in range(audits):
        common = rng.normal(size=(2, 300))
        placements = []
        for shift in (new, base):
            sides = math.sqrt(0.9) * common + math.sqrt(0.1) * rng.normal(size=(2, 300))
            placements.append(roc.compute_delong_placements(sides[0] + shift, sides[1]))
        found = roc.bound_auc_distance_change(*placements)
        assert found.low(0.05) <= found.value <= found.high(0.05)
        missed += found.high(0.05) < truth, found.low(0.05) > truth
    assert missed.max() <= binom.isf(1e-3, audits, 0.05)


@pytest.mark.parametrize(("m", "n"), [(300, 100), (200, 400)])
def test_a_difference_of_rates_is_shown_as_seldom_as_it_says(m: int, n: int) -> None:
    """Of two models that find as many: one a few for sure, the other ever more as more non-members
    pass."""
    rng, audits, equal = (
        make_keyed_generator("paired rates", m, n),
        25,
        norm.sf(norm.isf(0.01) - 1.5),
    )
    shown = 0
    for _ in range(audits):
        steep = rng.normal(1.5, 1, m), rng.normal(0, 1, n)
        sure = np.where(rng.random(m) < equal, 9.0, rng.normal(-9, 1, m)), rng.normal(0, 1, n)
        found = roc.bound_tpr_difference(steep, sure, 0.01)
        shown += found.low(0.025) > 0 or found.high(0.025) < 0
    assert shown <= binom.ppf(0.999, audits, 0.05)


def test_the_curve_is_the_staircase_that_rates_are_read_from() -> None:
    own, others = scores(30, 20, 1.0, ties=True)
    points = roc.compute_roc_curve(own, others)
    assert points[-1] == (1.0, 1.0) and points == sorted(points)
    for rate in (0.05, 0.1, 0.35, 0.6):
        largest = max(
            y for x, y in points if x <= roc.count_allowed_false_positives(20, rate) / 20 + 1e-9
        )
        assert roc.tpr_at_fpr(own, others, rate).value == pytest.approx(largest)


def test_what_the_report_uses_is_there_for_whoever_simulates_it() -> None:
    own, others = scores(300, 100, 1.0)
    found = tpr_interval(own.tolist(), others, rate=0.01, seed=5)
    assert found == roc.estimate_tpr("tpr_at_1pct_fpr", own, others, 0.01)
    for bad, why in (
        ((own, others[:98], 0.01), "at least 99 non-members for a rate of 0.01, got 98"),
        ((own[:, None], others, 0.01), r"one score a record, got arrays of \(300, 1\)"),
        ((own, np.full(100, np.nan), 0.01), "got NaN"),
        ((own, others, 1.0), r"rate in \(0, 1\), got 1"),
    ):
        with pytest.raises(AuditError, match=why):
            tpr_interval(*bad)


@pytest.mark.parametrize(("m", "n", "share"), [(20, 200, 0.1), (200, 20, 0.1), (300, 100, 0.04)])
def test_an_auc_near_1_allows_for_records_that_few_samples_show(
    m: int, n: int, share: float
) -> None:
    """A share of the smaller group is ranked on the wrong side."""
    rng, missed = np.random.default_rng(0), 0
    for _ in range(300):
        members, others = rng.normal(10, 1, m), rng.normal(0, 1, n)
        smaller, outlier = (members, -50.0) if m < n else (others, 50.0)
        smaller[rng.random(len(smaller)) < share] = outlier
        missed += roc.estimate_auc("auc", members, others).low > 1 - share
    assert missed / 300 < 0.05

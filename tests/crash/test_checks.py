"""Every check on steps that are made by hand: honest ones, and each with one thing broken."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from auditor.core.errors import AuditError
from auditor.crash import (
    checks,
    checks_of_company,
    checks_of_noise,
    checks_of_sensitivity,
    claim,
    reaches,
    training_specimen,
    watch,
)
from auditor.crash.checks_of_noise import check_training_reveals_record_count
from auditor.crash.claim import LoopClaim
from auditor.crash.trial import CrashTest, ObservedLoop, summarise_observed_loop
from auditor.crash.verdicts import (
    BROKEN,
    COUNTED,
    LEVEL,
    NO_FAULT,
    SHARE,
    UNKNOWN,
    LoopCheck,
    WatchedTrainings,
)
from auditor.crash.watch import ObservedStep, TrainingTrace
from auditor.privacy import gaussian

CLAIM = LoopClaim(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1 / 6, steps=20, delta=1e-3)
N, SIZES = 48, {"a": 600, "b": 300, "c": 100, "d": 100}
ENDS = np.cumsum([*SIZES.values()])
SHAPES = {
    name: (int(end - size), int(end)) for (name, size), end in zip(SIZES.items(), ENDS, strict=True)
}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick accountant, a little looser: these tests are of who is caught."""
    monkeypatch.setattr(claim, "compute_claimed_epsilon", gaussian.compute_quick_rdp_epsilon)


def step(
    rng: np.random.Generator, reach: float = 1.0, follows: float = 0.0, size: float = 0.125
) -> ObservedStep:
    """An honest step of DP-SGD, as it is read. follows: how far a reach follows its gradient's
    norm."""
    drawn = tuple(np.flatnonzero(rng.random(N) < 1 / 6).tolist())
    noise = rng.normal(0, size, 1100)
    norms = np.exp(rng.normal(3, 0.5, len(drawn)))
    reaches = reach + follows * np.log(norms / np.exp(3))
    scales = {
        name: (float(np.sqrt((noise[a:b] ** 2).mean())), b - a) for name, (a, b) in SHAPES.items()
    }
    scale = float(np.sqrt((noise**2).mean()))
    reaches = reaches + rng.normal(0, 1, len(drawn))
    return ObservedStep(
        drawn,
        (drawn,),
        0.1,
        scale,
        scales,
        reaches,
        np.eye(len(drawn)),
        norms,
        noise,
        np.ones(1100),
        dict(SHAPES),
    )


def trace(seed: int, n: int = N, **more: Any) -> TrainingTrace:
    rng = np.random.default_rng(seed)
    return TrainingTrace(n, [step(rng, **more) for _ in range(20)], returned=19)


@functools.lru_cache(maxsize=4)
def runs(seed: int = 0, **more: Any) -> WatchedTrainings:
    return WatchedTrainings(
        CLAIM,
        tuple(trace(10 * seed + i, **more) for i in range(6)),
        trace(10 * seed + 9, N - 1, **more),
    )


def changed(
    given: WatchedTrainings, how: Callable[[ObservedStep], ObservedStep]
) -> WatchedTrainings:
    return replace(
        given, traces=tuple(replace(t, steps=[how(s) for s in t.steps]) for t in given.traces)
    )


def of(name: str, given: WatchedTrainings) -> LoopCheck:
    return checks.CHECKS[name](checks_of_noise.whiten_unequal_noise(given))


def test_an_honest_training_is_called_broken_at_most_as_often_as_is_said() -> None:
    """40 trainings at the level of 5%: seven or more would be seen once in 200 suites."""
    alarms = sum(
        any(check.verdict == BROKEN for check in checks.run_all_crash_test_checks(runs(seed)))
        for seed in range(40)
    )
    assert alarms < 7
    by_chance = [
        check for check in checks.run_all_crash_test_checks(runs()) if check.source != COUNTED
    ]
    assert LEVEL == 0.05 and len(by_chance) * SHARE <= LEVEL


def silent(one: ObservedStep) -> ObservedStep:
    return replace(one, scales={**one.scales, "d": (0.0, 100)})


def same(one: ObservedStep) -> ObservedStep:
    return replace(one, noise=np.random.default_rng(7).normal(0, 0.125, 1100))


def uniform(one: ObservedStep) -> ObservedStep:
    rng = np.random.default_rng(int(1e6 * abs(one.noise[0])))
    return replace(one, noise=(rng.random(1100) - 0.5) * math.sqrt(12) * one.scale)


def alike(one: ObservedStep) -> ObservedStep:
    noise = one.noise.copy()
    noise[1000:] = noise[900:1000]
    return replace(one, noise=noise)


def follows_the_batch(one: ObservedStep) -> ObservedStep:
    return replace(one, scale=1 / max(1, len(one.records)))


def eight(one: ObservedStep) -> ObservedStep:
    drawn = tuple(range(8))
    return replace(
        one,
        records=drawn,
        passes=(drawn,),
        reaches=np.ones(8),
        gram=np.eye(8),
        norms=np.exp(np.arange(8.0)),
    )


def batch_clipped(one: ObservedStep) -> ObservedStep:
    """Every record gets its share of a batch of norm C."""
    return replace(one, reaches=one.reaches - 1 + one.norms / np.linalg.norm(one.norms))


def doubled(one: ObservedStep) -> ObservedStep:
    return replace(one, records=(*one.records, *one.records[:1]))


@pytest.mark.parametrize(
    ("name", "given", "epsilon"),
    [
        ("one record's reach", runs(reach=1.4), (4.0, 12.0)),
        ("clipped by record", runs(follows=0.8), (math.inf, math.inf)),
        ("clipped by record", changed(runs(), batch_clipped), (10.0, 40.0)),
        ("noise in every tensor", changed(runs(), silent), (math.inf, math.inf)),
        ("Gaussian noise", changed(runs(), uniform), None),
        ("fresh noise", changed(runs(), same), (math.inf, math.inf)),
        ("fresh noise", replace(runs(), traces=(*runs().traces, trace(0))), (math.inf, math.inf)),
        ("fresh noise", changed(runs(), alike), (math.inf, math.inf)),
        ("batch size stays secret", changed(runs(), follows_the_batch), (math.inf, math.inf)),
        ("Poisson sampling", changed(runs(), eight), None),
        ("no record favoured", changed(runs(), eight), (3.0, 40.0)),
        ("once a step", changed(runs(), doubled), (5.0, 40.0)),
        ("sampling rate", replace(runs(), claim=replace(CLAIM, sample_rate=0.1)), (2.0, 5.0)),
        ("steps", replace(runs(), claim=replace(CLAIM, steps=19)), (2.0, 5.0)),
        ("accounting", replace(runs(), claim=replace(CLAIM, epsilon=2.0)), (3.0, 4.6)),
        (
            "number of records",
            replace(runs(), fewer=trace(9, N - 1, size=0.125 * 8 / 7)),
            (50.0, math.inf),
        ),
    ],
)
def test_what_is_broken_is_seen_by_the_check_that_is_for_it(
    name: str, given: WatchedTrainings, epsilon: tuple[float, float] | None
) -> None:
    found = of(name, given)
    assert found.verdict == BROKEN, found
    if epsilon is not None:
        assert found.epsilon is not None and epsilon[0] <= found.epsilon <= epsilon[1]


def test_records_clipped_harder_the_more_they_are_apart_are_not_taken_for_a_batch_that_is_clipped() -> (  # noqa: E501
    None
):
    """Reaches of 0.5 to 1 that go with the record's norm alone: no share of company explains
    them."""

    def harder(one: ObservedStep) -> ObservedStep:
        return replace(one, reaches=one.reaches - 1 + np.where(one.norms < np.exp(3), 1.0, 0.5))

    assert of("clipped by record", changed(runs(), harder)).verdict == NO_FAULT


def test_a_record_has_its_share_of_those_that_it_is_read_with() -> None:
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(60, 4)) * np.array([1.0, 2.0, 3.0, 4.0])
    norms = np.linalg.norm(gradients, axis=0)
    gram = gradients.T @ gradients / np.outer(norms, norms)
    one = replace(step(rng), records=(2, 5, 7, 9), gram=gram, norms=norms, reaches=np.ones(4))
    pairs = [np.linalg.norm(gradients[:, at : at + 2].sum(1)) for at in (0, 2)]
    found = checks_of_sensitivity._compute_record_shares(one, [(5, 2), (7, 9)])
    assert found == pytest.approx(norms / np.repeat(pairs, 2))
    assert checks_of_sensitivity._compute_record_shares(one, [one.records]) == pytest.approx(
        norms / np.linalg.norm(gradients.sum(1))
    )


def test_the_weights_and_readings_beside_the_steps_are_told() -> None:
    honest = runs()

    def with_(**what: Any) -> WatchedTrainings:
        return replace(honest, traces=(replace(honest.first_training, **what), *honest.traces[1:]))

    moved, read = "weights follow the steps", "evaluation on private records"
    assert of(moved, honest).verdict == of(read, honest).verdict == NO_FAULT
    assert (
        of(moved, with_(elsewhere=5)).verdict == of(moved, with_(returned=None)).verdict == UNKNOWN
    )
    assert of(read, with_(evaluated={1, 2})).verdict == UNKNOWN
    assert of(read, with_(evaluated={1, 2}, returned=7)).verdict == BROKEN
    assert of(read, with_(returned=7)).verdict == NO_FAULT


def test_tensors_that_lost_the_same_directions_to_the_records_are_not_taken_for_repeated_noise() -> (  # noqa: E501
    None
):
    """Of 300 correlations of 40 pairs, those below 0.05: 28 or more would be seen once in 1,000; in
    truth some 15."""
    rng = np.random.default_rng(0)
    lost = np.linalg.qr(rng.normal(size=(16, 8)))[0]
    few = 0
    for _ in range(300):
        a, b = (one - one @ lost @ lost.T for one in rng.normal(size=(2, 40, 16)))
        few += (
            checks_of_noise._pool_noise_correlations(
                [(x, y, 8.0) for x, y in zip(a, b, strict=True)]
            )[1]
            < 0.05
        )
    assert 4 < few < 28


def train_first_tensor_later(given: TrainingTrace) -> TrainingTrace:
    """Return the training with its tensor "a" frozen in the first ten of 20 steps."""
    tensor_ranges = {
        name: (start - 600, end - 600) for name, (start, end) in SHAPES.items() if name != "a"
    }
    frozen = [
        replace(
            one,
            noise=one.noise[600:],
            spread=one.spread[600:],
            tensor_ranges=tensor_ranges,
            scales={name: one.scales[name] for name in tensor_ranges},
        )
        for one in given.steps[:10]
    ]
    return replace(given, steps=[*frozen, *given.steps[10:]])


def test_a_tensor_that_is_trained_later_is_no_fault() -> None:
    honest = runs()
    traces = tuple(map(train_first_tensor_later, honest.traces))
    later = replace(honest, traces=traces, fewer=train_first_tensor_later(honest.fewer))
    assert [one for one in checks.run_all_crash_test_checks(later) if one.verdict == BROKEN] == []
    repeated = replace(later, traces=(*traces, traces[0]))
    assert of("fresh noise", repeated).verdict == BROKEN


def test_rows_that_are_no_record_keep_the_test_from_telling() -> None:
    honest = runs()
    assert of("rows are records", honest).verdict == NO_FAULT
    pieces = changed(honest, lambda one: replace(one, foreign=3))
    check = of("rows are records", pieces)
    assert check.verdict == UNKNOWN and "none of the given records" in check.said
    judged = CrashTest(CLAIM, (check,), (), 1.0, ObservedLoop(1.0, 1 / 6, 20, 4.0))
    assert judged.verdict == UNKNOWN


def test_a_made_up_row_in_an_empty_batch_is_broken_and_an_error_is_told() -> None:
    none = np.zeros(0)
    few = trace(5, 9)
    empty = replace(
        few.steps[3], records=(), passes=((),), reaches=none, gram=np.zeros((0, 0)), norms=none
    )
    steps = [few.steps[0], empty, *few.steps[1:]]
    honest = replace(runs(), small_training=replace(few, steps=steps))
    assert of("empty batches", honest).verdict == NO_FAULT
    steps[1] = replace(empty, foreign=1)
    check = of("empty batches", honest)
    assert check.verdict == BROKEN and check.epsilon is not None and 5 < check.epsilon < 40
    raising = replace(
        runs(), few_error="with 9 records, as on an empty batch, it raises ValueError: none"
    )
    check = of("empty batches", raising)
    assert check.verdict == UNKNOWN and "raises ValueError" in check.said


def whole(
    rng: np.random.Generator,
    scales: dict[str, float],
    bounds: dict[str, float],
    signals: dict[str, float],
    apart: bool = False,
) -> ObservedStep:
    """A step in four tensors, each clipped to its own bound after its own noise; gradients of eight
    records apart.

    No bounds: each record's whole gradient is clipped to 1. apart: two records have nearly all of
    their gradients in the same tensor and one direction; those of the others there are short, and
    opposite by twos.
    """
    drawn = tuple(range(8))
    parts = {
        name: rng.normal(0, signals[name] / math.sqrt(size), (8, size))
        for name, size in SIZES.items()
    }
    if apart:
        for at, part in enumerate(parts.values()):
            part[1::2] = 0.1 * part[1::2] - part[::2]
            part[2 * at + 1] = -part[2 * at + 1]
            others = np.arange(8) // 2 != at
            part[others] *= 0.05
    lengths = np.linalg.norm(np.concatenate([*parts.values()], axis=1), axis=1)
    released = {}
    for name, part in parts.items():
        factors = (
            1 / lengths
            if not bounds
            else np.minimum(1, bounds[name] / np.linalg.norm(part, axis=1))
        )
        clipped = (part * factors[:, None]).sum(0)
        released[name] = clipped + rng.normal(0, scales[name], SIZES[name])
    noise, spread, found = [], [], {}
    for name, part in parts.items():
        left, free, off = watch._project_out_record_gradients(
            torch.tensor(released[name]), torch.tensor(part.T), [SIZES[name]]
        )
        noise.append(left.numpy())
        spread.append(off.numpy())
        found[name] = (float(np.sqrt(left.numpy() @ left.numpy() / free[0])), free[0])
    scale = math.sqrt(sum(s**2 * f for s, f in found.values()) / sum(f for _, f in found.values()))
    grams = np.stack([part @ part.T for part in parts.values()])
    products = np.stack([part @ released[name] / scale for name, part in parts.items()])
    reaches, gram, norms = watch.fit_gradient_reaches(grams.sum(0), products.sum(0))
    return ObservedStep(
        drawn,
        (drawn,),
        0.1,
        scale,
        found,
        reaches,
        gram,
        norms,
        np.concatenate(noise),
        np.concatenate(spread),
        dict(SHAPES),
        tensor_grams=grams,
        tensor_products=products,
    )


UNEQUAL = {"a": 0.5, "b": 1.0, "c": 1.0, "d": 2.0}


def in_groups(seed: int, noise: float, signals: dict[str, float]) -> WatchedTrainings:
    """Each tensor has a bound in proportion to its noise; `noise`: the noise multiplier over all of
    them."""
    rng = np.random.default_rng(seed)
    bounds = {name: scale / (noise * math.sqrt(len(UNEQUAL))) for name, scale in UNEQUAL.items()}
    traces = tuple(
        TrainingTrace(N, [whole(rng, UNEQUAL, bounds, signals) for _ in range(20)], returned=19)
        for _ in range(6)
    )
    return WatchedTrainings(CLAIM, traces, traces[0])


@pytest.mark.parametrize(("noise", "verdict"), [(1.0, NO_FAULT), (0.7, BROKEN)])
def test_noise_of_its_own_for_each_tensor_is_counted_in_units_of_that(
    noise: float, verdict: str
) -> None:
    """Clipped tensor by tensor, a record reaches the root of the sum of its tensors' squares, and
    no more."""
    given = in_groups(0, noise, dict.fromkeys(SIZES, 30.0))
    found = {check.name: check for check in checks.run_all_crash_test_checks(given)}
    assert found["one record's reach"].verdict == verdict
    assert found["noise in every tensor"].verdict == found["Gaussian noise"].verdict == NO_FAULT
    assert found["clipped by record"].verdict == NO_FAULT
    assert "0.54 to 2.19" in found["noise in every tensor"].said


def test_records_that_divide_their_bound_otherwise_among_tensors_reach_no_farther() -> None:
    """In each tensor those weigh most that have nearly all of their gradient there; of 4 runs none
    is far off."""
    noise, signals = dict.fromkeys(SIZES, 1.0), dict.fromkeys(SIZES, 30.0)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        steps = [whole(rng, noise, {}, signals, apart=True) for _ in range(40)]
        together, _ = reaches.estimate_tensor_reaches([steps], {})
        assert together is not None and (together[0] - 1) / together[1] < 2.5
        assert not reaches.is_clipping_per_tensor(steps, {})
    by_tensors = in_groups(0, 1.0, signals)
    assert reaches.is_clipping_per_tensor(
        by_tensors.steps, {name: by_tensors.noise_shares[name] for name in SIZES}
    )


@pytest.mark.parametrize(("error", "verdict"), [(0.1, NO_FAULT), (0.5, UNKNOWN)])
def test_gradients_too_short_to_show_company_are_no_evidence(
    error: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an error of a half, a mean over the batch's tokens (1) would be missed in most
    trainings."""
    monkeypatch.setattr(checks_of_company, "_fit_company_weight", lambda *given: (0.05, error))
    given = replace(runs(), company=(trace(3),))
    assert checks_of_company.check_company_dependence(given).verdict == verdict


def make_company_step(
    rng: np.random.Generator, norm: float, mean: str = "", noise: float = 1.0
) -> ObservedStep:
    """Return a step on texts of the company's lengths; mean: over what of the batch the loss is."""
    records = training_specimen.make_company_specimen(1.0).make_crash_test_records(N)
    drawn = tuple(np.flatnonzero(rng.random(N) < 1 / 6).tolist())
    n_tokens = np.array([len(records[i]["input_ids"]) - 1 for i in drawn], dtype=float)
    norms = norm * np.exp(rng.normal(0, 0.3, len(drawn)))
    shares = {"": 1.0, "tokens": n_tokens / n_tokens.sum(), "records": 1 / max(1, len(drawn))}
    shares["tokens, undone"] = shares["tokens"] * len(drawn)
    reaches = np.minimum(shares[mean] * norms, 1.0) + rng.normal(0, noise, len(drawn))
    return replace(
        step(rng),
        records=drawn,
        passes=(drawn,),
        reaches=reaches,
        norms=norms,
        gram=np.eye(len(drawn)),
    )


@pytest.mark.parametrize(
    ("mean", "norm", "fault"),
    [
        ("", 0.8, ""),
        ("", 6.4, ""),
        ("tokens, undone", 0.8, "weighed by its tokens"),
        ("tokens", 6.4, "divided by the number of tokens"),
        ("records", 6.4, "divided by the number of the texts of its"),
    ],
)
def test_a_mean_over_a_batch_is_seen_whether_it_is_undone_or_not(
    mean: str, norm: float, fault: str
) -> None:
    rng = np.random.default_rng(4)
    steps = [make_company_step(rng, norm, mean, 0.5) for _ in range(60)]
    given = replace(runs(), company=(TrainingTrace(N, steps),))
    found = checks_of_company.check_company_dependence(given)
    assert (found.verdict == BROKEN) == bool(fault) and fault in found.said


@pytest.mark.parametrize(
    ("clipping_norm", "bound_is_seen"), [(10.0, True), (30.0, True), (45.0, False)]
)
def test_the_reach_above_the_clipping_norm_is_the_bound(
    clipping_norm: float, bound_is_seen: bool
) -> None:
    """A bound above few gradients, above most, and above all of them."""
    rng = np.random.default_rng(6)
    steps = []
    for _ in range(300):
        each = step(rng)
        norms = rng.uniform(4, 44, len(each.records)) if bound_is_seen else each.norms.clip(5, 44)
        reach = np.minimum(norms / clipping_norm, 1.0) + rng.normal(0, 1, len(norms))
        steps.append(replace(each, norms=norms, reaches=reach))
    given = replace(runs(), traces=(TrainingTrace(N, steps),))
    interval = checks_of_sensitivity.estimate_noise_multiplier_interval(given)
    assert (interval is not None) == bound_is_seen
    if interval:
        assert interval[1] < 1 < interval[2] and interval[2] - interval[1] < 0.2


def test_reaches_much_shorter_than_clipped_gradients_tell_of_a_mean() -> None:
    rng = np.random.default_rng(5)
    honest = TrainingTrace(N, [make_company_step(rng, 0.8) for _ in range(60)])
    divided = TrainingTrace(N, [make_company_step(rng, 0.8, "records") for _ in range(60)])
    assert checks_of_company.measure_reach_share(honest, CLAIM) == 1
    assert 0.05 < checks_of_company.measure_reach_share(divided, CLAIM) < 0.3


def test_random_allocation_reads_each_record_as_often_as_claimed() -> None:
    """In two of 20 steps, by a first step of few records: the later ones alone would round up to a
    third pass."""
    rng = np.random.default_rng(0)
    sizes = [1, *[5] * 19]
    drawn = [tuple(range(size)) for size in sizes]
    steps = [replace(step(rng), records=records, passes=(records,)) for records in drawn]
    told = replace(CLAIM, sampling="allocation", sample_rate=0.1)
    honest = WatchedTrainings(told, (TrainingTrace(N, steps),), trace(0))
    assert honest.observed_sampling_rate == pytest.approx(0.1)
    assert honest.compute_noise_epsilon(1.0) == told.compute_implied_epsilon()


def test_a_tensor_of_less_noise_than_its_gradients_need_shows_as_reach() -> None:
    """The whole gradient clipped to 1, which lies in the tensor with half of the others' noise."""
    rng = np.random.default_rng(0)
    scales = {"a": 0.5, "b": 1.0, "c": 1.0, "d": 1.0}
    wide = {"a": 1.0, "b": math.inf, "c": math.inf, "d": math.inf}
    signals = {"a": 30.0, "b": 0.01, "c": 0.01, "d": 0.01}
    traces = tuple(
        TrainingTrace(N, [whole(rng, scales, wide, signals) for _ in range(20)]) for _ in range(6)
    )
    found = of("one record's reach", WatchedTrainings(CLAIM, traces, traces[0]))
    assert found.verdict == BROKEN and found.epsilon is not None and found.epsilon > 8


def test_a_size_of_noise_that_follows_chance_is_no_fault_and_not_called_safe() -> None:
    """As adaptive clipping has it: the same for no two trainings. A public schedule is."""
    rng = np.random.default_rng(0)

    def adapted(trace: TrainingTrace) -> TrainingTrace:
        factors = np.exp(np.cumsum(rng.normal(0, 0.1, len(trace.steps))))
        steps = [
            replace(
                one,
                scale=one.scale * f,
                noise=one.noise * f,
                scales={k: (s * f, n) for k, (s, n) in one.scales.items()},
            )
            for one, f in zip(trace.steps, factors, strict=True)
        ]
        return replace(trace, steps=steps)

    given = runs()
    adaptive = replace(given, traces=tuple(map(adapted, given.traces)), fewer=adapted(given.fewer))
    assert (
        of("noise by a schedule", adaptive).verdict
        == of("number of records", adaptive).verdict
        == UNKNOWN
    )
    assert not [
        check for check in checks.run_all_crash_test_checks(adaptive) if check.verdict == BROKEN
    ]
    assert (
        CrashTest(
            CLAIM,
            tuple(checks.run_all_crash_test_checks(adaptive)),
            (),
            1.0,
            ObservedLoop(1.0, 1 / 6, 20, 4.0),
        ).verdict
        == UNKNOWN
    )
    scheduled = changed(given, lambda one: replace(one, scale=one.scale, noise=one.noise))
    assert of("noise by a schedule", scheduled).verdict == NO_FAULT


def bounded(seed: int, bound: float) -> WatchedTrainings:
    """Honest clipping at a bound about as large as the gradients' norms, whose gradients all point
    nearly one way."""
    rng = np.random.default_rng(seed)

    def one(_: int) -> ObservedStep:
        given = step(rng)
        n = len(given.records)
        norms = np.exp(rng.normal(3, 0.4, n))
        gram = np.full((n, n), 0.9) + 0.1 * np.eye(n)
        errors = rng.multivariate_normal(np.zeros(n), np.linalg.inv(gram)) if n else np.zeros(0)
        return replace(
            given, norms=norms, gram=gram, reaches=np.minimum(norms, bound) / bound + errors
        )

    traces = tuple(TrainingTrace(N, [one(t) for t in range(20)], returned=19) for _ in range(6))
    return WatchedTrainings(CLAIM, traces, traces[0])


def test_a_bound_about_as_large_as_the_gradients_is_neither_broken_nor_missed() -> None:
    """Of 24 trainings at most two alarms, and four intervals of the noise multiplier that miss the
    true one."""
    asked = (
        checks_of_sensitivity.check_record_sensitivity,
        checks_of_sensitivity.check_kind_sensitivity,
        checks_of_sensitivity.check_per_record_clipping,
    )
    alarms = missed = 0
    for seed in range(24):
        given = bounded(seed, 20.0)
        alarms += any(check(given).verdict == BROKEN for check in asked)
        interval = checks_of_sensitivity.estimate_noise_multiplier_interval(given)
        missed += interval is not None and not interval[1] <= 1 <= interval[2]
    assert alarms <= 2 and missed <= 4


def test_the_interval_of_the_noise_multiplier_covers_it_in_95_of_100_trainings() -> None:
    """Of 1,200 gradients, all clipped: the fitted clipping norm adds an error of its own."""
    covered = 0
    given = runs()
    some_step = replace(given.steps[0], gram=np.eye(60))
    for seed in range(100):
        rng = np.random.default_rng(seed)
        steps = []
        for _ in range(20):
            norms = np.exp(rng.normal(3, 0.5, 60))
            steps.append(replace(some_step, norms=norms, reaches=1 + rng.normal(size=60)))
        given = replace(given, traces=(TrainingTrace(N, steps),))
        interval = checks_of_sensitivity.estimate_noise_multiplier_interval(given)
        assert interval is not None
        covered += interval[1] <= 1 <= interval[2]
    assert covered >= 95


@pytest.mark.parametrize("rate", [1 / 48, 1 / 6, 1 / 2])
def test_the_interval_of_the_sampling_rate_covers_it_with_95_percent_at_least(rate: float) -> None:
    """Counted over all numbers of reads, of one step of 48 records."""
    given = runs()
    first = given.first_training
    coverage = 0.0
    for n_reads in range(N + 1):
        batch = replace(first.steps[1], records=tuple(range(n_reads)))
        given = replace(given, traces=(TrainingTrace(N, [first.steps[0], batch]),))
        low, high = given.sampling_rate_interval
        if low <= rate <= high:
            coverage += float(stats.binom.pmf(n_reads, N, rate))
    assert coverage >= 0.95


def test_parts_of_records_leave_no_epsilon() -> None:
    given = changed(runs(reach=0.5), lambda one: replace(one, foreign=3))
    found = summarise_observed_loop(given, tuple(checks.run_all_crash_test_checks(given)))
    assert found.epsilon is None and found.low is None


def test_a_gradient_that_others_move_leaves_no_epsilon() -> None:
    """The records' own reach, which is within its bound, would look safe beside the verdict."""
    given = runs()
    moved = LoopCheck(BROKEN, "", "", name="own gradient")
    honest = summarise_observed_loop(given, ())
    found = summarise_observed_loop(given, (moved,))
    assert honest.epsilon is not None and found.epsilon is None and found.high is None


def test_random_allocation_has_a_law_of_its_own() -> None:
    """Batches of one size are none of it; an epsilon below that of whole passes is not judged."""
    claimed = replace(CLAIM, sampling="allocation", epsilon=2.0)
    assert of("accounting", replace(runs(), claim=claimed)).verdict == UNKNOWN
    assert of("Poisson sampling", replace(runs(), claim=claimed)).verdict == NO_FAULT
    broken = of("Poisson sampling", changed(replace(runs(), claim=claimed), eight))
    assert broken.verdict == BROKEN and broken.epsilon is None and "at most" in broken.said


@pytest.mark.parametrize(("rate", "n_steps"), [(0.003, 60), (0.02, 3), (0.25, 3)])
def test_small_batches_and_few_are_called_broken_no_more_often_than_is_said(
    rate: float, n_steps: int
) -> None:
    """A chi-squared law of the sizes as they are called 10% and 14% of such trainings broken; six
    of 300 at this level of 0.3% would be seen once in a thousand suites."""
    rng = np.random.default_rng(0)
    given = replace(runs(), claim=replace(CLAIM, sample_rate=rate))
    template = given.traces[0].steps[0]

    def draw_trainings() -> WatchedTrainings:
        sizes = rng.binomial(N, rate, n_steps)
        steps = [replace(template, records=tuple(range(size))) for size in sizes]
        return replace(given, traces=(replace(given.traces[0], steps=steps),))

    checked = [of("Poisson sampling", draw_trainings()).verdict for _ in range(300)]
    assert checked.count(BROKEN) < 6


def test_steps_and_rates_that_follow_the_number_of_records_are_seen() -> None:
    honest = runs()
    fewer = replace(honest.fewer, steps=honest.fewer.steps[:-1])
    assert of("number of records", replace(honest, fewer=fewer)).verdict == BROKEN
    faster = replace(honest.fewer, steps=[replace(one, rate=0.2) for one in honest.fewer.steps])
    assert of("number of records", replace(honest, fewer=faster)).verdict == BROKEN
    public = replace(honest, fewer=fewer, claim=replace(CLAIM, public_size=True))
    assert of("number of records", public).verdict == UNKNOWN


def test_a_tensor_of_one_free_dimension_is_not_silent_in_a_step_by_chance() -> None:
    """In all of its steps it is, and in one where three are free."""

    def in_steps(count: int, free: int) -> WatchedTrainings:
        given = runs()
        first = given.traces[0]
        steps = [
            replace(s, scales={**s.scales, "d": (0.0, free)}) if i < count else s
            for i, s in enumerate(first.steps)
        ]
        return replace(given, traces=(replace(first, steps=steps), *given.traces[1:]))

    assert of("noise in every tensor", in_steps(1, 1)).verdict != BROKEN
    assert of("noise in every tensor", in_steps(1, 3)).verdict == BROKEN
    everywhere = changed(runs(), lambda one: replace(one, scales={**one.scales, "d": (0.0, 1)}))
    assert of("noise in every tensor", everywhere).verdict == BROKEN


def test_without_noise_nothing_else_is_said() -> None:
    none = changed(
        runs(), lambda one: replace(one, scale=0.0, scales=dict.fromkeys(SHAPES, (0.0, 100)))
    )
    found = {check.name: check.verdict for check in checks.run_all_crash_test_checks(none)}
    assert found["noise in every tensor"] == BROKEN
    assert found["one record's reach"] == found["Gaussian noise"] == found["fresh noise"] == UNKNOWN


def test_the_smallest_violation_it_says_it_would_see_is_seen_about_as_often_as_it_says() -> None:
    """Of 30 trainings whose reach is to be caught with 80% probability: fewer than 17, once in
    1,000."""
    said = of("one record's reach", runs()).would_see
    far = float(said.split()[3])
    caught = sum(
        of("one record's reach", runs(seed, reach=far)).verdict == BROKEN for seed in range(30)
    )
    assert caught >= 17


def followed(seed: int, size: int) -> tuple[WatchedTrainings, list[float], list[float]]:
    """Ten trainings of 30 steps; gradients align after noise that fell short, as they may -> runs,
    and by hand:
    how far each step went along its records' sum, and that sum's length.

    size: of a batch; 0: as Poisson sampling draws it.
    """
    rng = np.random.default_rng(seed)
    traces, went, lengths = [], [], []
    for _ in range(10):
        last, steps = 0.0, []
        for _ in range(30):
            k = size or int(rng.binomial(N, 1 / 6)) or 1
            units = rng.normal(size=(60, k)) + (2 if last < 0 else 0)
            units /= np.linalg.norm(units, axis=0)
            drift = rng.normal(size=60)
            gradient = units.sum(1) + drift
            along = units.sum(1) / np.linalg.norm(units.sum(1))
            last = float(along @ drift)
            went.append(float(along @ gradient))
            lengths.append(float(np.linalg.norm(units.sum(1))))
            reaches = np.linalg.lstsq(units, gradient, rcond=None)[0]
            one = step(rng)
            drawn = tuple(range(k))
            steps.append(
                replace(
                    one,
                    scale=1.0,
                    records=drawn,
                    passes=(drawn,),
                    reaches=reaches,
                    gram=units.T @ units,
                )
            )
        traces.append(TrainingTrace(N, steps))
    return WatchedTrainings(CLAIM, tuple(traces), trace(0)), went, lengths


@pytest.mark.parametrize("size", [8, 0])
def test_the_interval_of_the_reach_holds_it_as_often_as_it_says_in_batches_of_one_size_and_others(
    size: int,
) -> None:
    """Of 60 intervals of 95%: 52 or fewer hold it once in 200; their mean is off by less than 3.3
    standard errors."""
    inside, found = 0, []
    for seed in range(60):
        made, went, lengths = followed(seed, size)
        mean, error = reaches.estimate_mean_reach(made.steps) or (0.0, 0.0)
        # Nearly: a weight that would be negative, of a record against all others, is 0 instead.
        assert mean == pytest.approx(sum(went) / sum(lengths), rel=1e-3)
        assert error == pytest.approx(300**0.5 / sum(lengths), rel=1e-3)
        inside += abs(mean - 1) < 1.96 * error
        found.append((mean - 1) / error)
    assert inside > 52
    assert abs(np.mean(found)) < 3.3 / math.sqrt(60)


def test_a_size_of_noise_that_it_says_it_would_see_is_seen_about_as_often_as_it_says() -> None:
    """Of 60 trainings: fewer than 36, once in 3,000."""
    said = float(of("number of records", runs()).would_see.split()[-1].rstrip("%")) / 100

    def caught(seed: int) -> bool:
        pair = WatchedTrainings(
            CLAIM, (trace(2 * seed),), trace(2 * seed + 1, N - 1, size=0.125 * (1 + said))
        )
        return check_training_reveals_record_count(pair).verdict == BROKEN

    assert sum(map(caught, range(60))) >= 36


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (changed(runs(), doubled), {"once a step": ("record", "step")}),
        (changed(runs(), silent), {"noise in every tensor": ("tensor", "step")}),
        (changed(runs(), same), {"fresh noise": ("training", "step")}),
        (runs(reach=1.4), {"one record's reach": ("record", "step")}),
        (replace(runs(), claim=replace(CLAIM, steps=19)), {"steps": ("training", "step")}),
    ],
)
def test_a_broken_check_names_where_it_shows(
    given: WatchedTrainings, facts: dict[str, tuple[str, ...]]
) -> None:
    for name, wanted in facts.items():
        found = of(name, given).witness
        assert found is not None and found.measured and found.expected
        assert all(getattr(found, one) is not None for one in wanted)
        if found.step is not None and found.record is not None:
            assert found.record in given.traces[found.training or 0].steps[found.step].records


def test_what_the_loop_did_is_counted_by_the_accountant() -> None:
    honest = runs()
    found = summarise_observed_loop(honest, tuple(checks.run_all_crash_test_checks(honest)))
    assert found.noise_multiplier == pytest.approx(1.0, abs=0.1) and found.steps == 20
    assert found.epsilon is not None and found.low is not None and found.high is not None
    assert found.low < found.epsilon < found.high
    assert found.low < claim.compute_claimed_epsilon(1.0, 1 / 6, 20, 1e-3) < found.high
    far = runs(reach=1.4)
    farther = summarise_observed_loop(far, tuple(checks.run_all_crash_test_checks(far)))
    assert farther.low is not None and farther.low > found.epsilon
    none = changed(honest, silent)
    assert (
        summarise_observed_loop(none, tuple(checks.run_all_crash_test_checks(none))).epsilon
        == math.inf
    )


def test_the_interval_of_epsilon_holds_the_claim_s_as_often_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An epsilon that is the rate over the noise, in the accountant's place. Of 60, 52 or fewer
    once in 200."""

    def simple(noise: float, rate: float, steps: int, delta: float) -> float:
        return 100 * rate / noise

    monkeypatch.setattr(claim, "compute_claimed_epsilon", simple)
    monkeypatch.setattr(gaussian, "compute_quick_rdp_epsilon", simple)
    found = [summarise_observed_loop(runs(seed), ()) for seed in range(60)]
    assert sum((one.low or 0) < 100 / 6 < (one.high or 0) for one in found) > 52


def test_a_shuffled_claim_is_accounted_without_what_sampling_hides() -> None:
    shuffled = replace(CLAIM, sampling="shuffled")
    assert (
        shuffled.compute_implied_epsilon()
        == claim.compute_claimed_epsilon(1.0, 1.0, 4, 1e-3)
        > CLAIM.compute_implied_epsilon()
    )


def test_a_shuffled_claim_says_nothing_of_poisson_sampling() -> None:
    shuffled = replace(runs(), claim=replace(CLAIM, sampling="shuffled"))
    assert of("Poisson sampling", shuffled).verdict == UNKNOWN


def test_no_epsilon_claimed_is_said_and_not_judged() -> None:
    assert of("accounting", runs()).verdict == UNKNOWN
    assert of("accounting", replace(runs(), claim=replace(CLAIM, epsilon=4.6))).verdict == NO_FAULT
    shuffled = replace(CLAIM, epsilon=4.6, sampling="shuffled")
    assert of("accounting", replace(runs(), claim=shuffled)).verdict == BROKEN


@pytest.mark.parametrize(
    "given",
    [
        None,
        {"noise_multiplier": 1.0},
        {**vars(CLAIM), "sigma": 1.0},
        {**vars(CLAIM), "sample_rate": 1.5},
        {**vars(CLAIM), "steps": 0},
        {**vars(CLAIM), "sampling": "sorted"},
        {**vars(CLAIM), "max_grad_norm": -1.0},
    ],
)
def test_a_claim_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(AuditError):
        LoopClaim.from_stated_claim(given)

"""The search for the mixing weight against a table, slow twins, and divergences computed from the
mixture itself."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.privacy import projection
from auditor.privacy.projection import (
    compute_projection_weight,
    compute_two_sided_weight,
    find_largest_mixing_weight,
    log_ratio_moments,
)

seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([0.1, 1.0, 4.0, 15.0])
radii = st.floats(1e-4, 8.0)


def distribution(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def random_distributions(
    seed: int, scale: float, *lead: int, vocabulary: int = 30
) -> tuple[Tensor, Tensor]:
    """Private distributions of shape (*lead, V) around public ones of shape (*lead[:-1], 1, V)."""
    generator = torch.Generator().manual_seed(seed)
    public = torch.randn(*lead[:-1], 1, vocabulary, dtype=torch.float64, generator=generator) * 3
    private = public + scale * torch.randn(
        *lead, vocabulary, dtype=torch.float64, generator=generator
    )
    return private.log_softmax(-1), public.log_softmax(-1)


def log_mixture(log_p: Tensor, log_p0: Tensor, weight: Tensor) -> Tensor:
    weight = weight.unsqueeze(-1)
    return torch.logaddexp(weight.log() + log_p, torch.log1p(-weight) + log_p0)


def divergence(log_p: Tensor, log_q: Tensor, alpha: int) -> Tensor:
    """D_alpha(p || q) as it is defined, for distributions without zeros."""
    return (alpha * log_p + (1 - alpha) * log_q).logsumexp(-1) / (alpha - 1)


def larger_divergence(log_p: Tensor, log_q: Tensor, alpha: int) -> Tensor:
    return torch.maximum(divergence(log_p, log_q, alpha), divergence(log_q, log_p, alpha))


# Known answers and twins
# -----------------------------------------------------------------------------------------------

TABLE = [  # p, p0, alpha, radius; forward, two-sided
    ((0.5, 0.25, 0.25), (0.25, 0.25, 0.5), 2, 0.1, 0.529580760163, 0.529580760163),
    ((0.5, 0.25, 0.25), (0.25, 0.25, 0.5), 3, 0.1, 0.428581385226, 0.428581385226),
    ((0.9, 0.05, 0.05), (0.1, 0.6, 0.3), 3, 0.581526599361, 0.253732078702, 0.253732078702),
    ((1, 0, 0), (0.145, 0.0006, 0.8544), 3, 1.69553397756, 0.830024403174, 0.830024403174),
    ((0, 0, 1), (0.145, 0.0006, 0.8544), 3, 1.69553397756, 1, 0.929217436062),
    ((0.6, 0.4, 0), (0.5, 0.5, 0), 3, 0.01, 0.410298062661, 0.408018911741),
    ((0.5, 0.4, 0.1), (0.5, 0.5, 0), 3, 0.5, 0, 0),
    ((0.3, 0.3, 0.4), (0.33, 0.33, 0.34), 4, 1, 1, 1),
    ((1e-30, 1 - 1e-30), (1e-12, 1 - 1e-12), 3, 0.05, 1, 0.999996916442),
    ((0.2, 0.8), (1e-10, 1 - 1e-10), 5, 0.3, 5.86659689284e-8, 5.86659689284e-8),
]


@pytest.mark.parametrize(("p", "p0", "alpha", "radius", "forward", "two_sided"), TABLE)
def test_known_answers(
    p: tuple[float, ...],
    p0: tuple[float, ...],
    alpha: int,
    radius: float,
    forward: float,
    two_sided: float,
) -> None:
    assert compute_projection_weight(
        distribution(*p), distribution(*p0), alpha, radius
    ).item() == pytest.approx(forward, rel=1e-11)
    assert compute_two_sided_weight(
        distribution(*p), distribution(*p0), alpha, radius
    ).item() == pytest.approx(two_sided, rel=1e-11)


def bisect(p: list[mpf], p0: list[mpf], alpha: int, radius: float, both: bool) -> float:
    """The private end of 60 halvings, in 30 digits."""

    def d(a: list[mpf], b: list[mpf]) -> mpf:
        return mp.log(mp.fsum(x**alpha * y ** (1 - alpha) for x, y in zip(a, b, strict=True))) / (
            alpha - 1
        )

    def fits(weight: mpf) -> bool:
        mixture = [weight * x + (1 - weight) * y for x, y in zip(p, p0, strict=True)]
        return d(mixture, p0) <= radius and (not both or d(p0, mixture) <= radius)

    low, high = mpf(0), mpf(1)
    if fits(high):
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return float(low)


@pytest.mark.parametrize("alpha", [2, 3, 5, 8, 9, 20])
@given(seed=seeds, scale=scales, radius=radii)
@settings(deadline=None, max_examples=6)
def test_bisection_twin(alpha: int, seed: int, scale: float, radius: float) -> None:
    log_p, log_p0 = (x[0] for x in random_distributions(seed, scale, 1, vocabulary=4))
    with mp.workdps(30):
        distributions = [
            [mp.e ** mpf(x) for x in log_distribution.tolist()]
            for log_distribution in (log_p, log_p0)
        ]
        p, p0 = ([x / mp.fsum(total) for x in total] for total in distributions)
        forward, two_sided = (bisect(p, p0, alpha, radius, both) for both in (False, True))
    assert compute_projection_weight(log_p, log_p0, alpha, radius).item() == pytest.approx(
        forward, rel=1e-9
    )
    assert compute_two_sided_weight(log_p, log_p0, alpha, radius).item() == pytest.approx(
        two_sided, rel=2e-8
    )


@pytest.mark.parametrize("alpha", [2, 3, 4, 8, 9, 20])
def test_log_moments_twin(alpha: int) -> None:
    log_p, log_p0 = random_distributions(0, 1.5, 3, 4)
    moments = log_ratio_moments(log_p, log_p0, alpha)
    assert moments.shape == (alpha + 1, 3, 4)
    assert moments.dtype == torch.float64
    for k in range(alpha + 1):
        naive = (log_p0.exp() * (log_p - log_p0).exp() ** k).sum(-1).log()
        assert torch.allclose(moments[k], naive, rtol=1e-11, atol=1e-14)


def test_small_divergences_keep_their_digits() -> None:
    """chi^2 = 2 e^2 here, which 1 + chi^2 would round to nothing; the weight is then a square root
    of a ratio."""
    e = 1e-9
    log_p, log_p0 = torch.log1p(
        torch.tensor([[2 * e, -2 * e], [0.0, 0.0]], dtype=torch.float64)
    ) + math.log(0.5)
    assert log_ratio_moments(log_p, log_p0, 2)[2].item() == pytest.approx(4 * e**2, rel=1e-9)
    assert compute_projection_weight(log_p, log_p0, 2, e**2).item() == pytest.approx(0.5, rel=1e-9)


# What a weight promises
# -----------------------------------------------------------------------------------------------


@given(
    seed=seeds, scale=scales, alpha=st.integers(2, 12), radius=radii, max_weight=st.floats(1e-3, 1)
)
@settings(deadline=None, max_examples=80)
def test_weight_is_the_largest_within_the_radius(
    seed: int, scale: float, alpha: int, radius: float, max_weight: float
) -> None:
    log_p, log_p0 = random_distributions(seed, scale, 5)
    weight = compute_projection_weight(log_p, log_p0, alpha, radius, max_weight)
    assert ((weight >= 0) & (weight <= max_weight)).all()
    reached = divergence(log_mixture(log_p, log_p0, weight), log_p0, alpha)
    assert (reached <= radius * (1 + 1e-10)).all()
    assert (reached[weight < max_weight] >= radius * (1 - 1e-10)).all()


@given(seed=seeds, scale=scales, alpha=st.integers(2, 12), radius=radii)
@settings(deadline=None, max_examples=80)
def test_two_sided_weight_is_the_largest_within_the_radius(
    seed: int, scale: float, alpha: int, radius: float
) -> None:
    log_p, log_p0 = random_distributions(seed, scale, 5)
    weight = compute_two_sided_weight(log_p, log_p0, alpha, radius)
    assert ((weight >= 0) & (weight <= 1)).all()
    assert (
        larger_divergence(log_mixture(log_p, log_p0, weight), log_p0, alpha) <= radius * (1 + 1e-9)
    ).all()
    more = weight * (1 + 1e-8)
    exceeds = (
        larger_divergence(log_mixture(log_p, log_p0, more.clamp_max(1.0)), log_p0, alpha) > radius
    )
    assert (exceeds | (more >= 1)).all()


def test_two_sided_search_meets_the_reverse_side() -> None:
    """Both sides must bind somewhere, or the tests above say little."""
    log_p, log_p0 = random_distributions(1, 0.5, 50, vocabulary=50)
    forward, both = (
        compute_projection_weight(log_p, log_p0, 3, 0.1),
        compute_two_sided_weight(log_p, log_p0, 3, 0.1),
    )
    assert (both <= forward).all()
    assert 0.05 < (both < forward * (1 - 1e-9)).double().mean() < 0.95


@pytest.mark.parametrize("search", [compute_projection_weight, compute_two_sided_weight])
def test_weight_grows_with_the_radius(search: object) -> None:
    log_p, log_p0 = random_distributions(2, 2.0, 7)
    ladder = torch.logspace(-8, 1.2, 60, dtype=torch.float64)[:, None]
    weight = search(log_p, log_p0, 3, ladder)  # type: ignore[operator]
    assert weight.shape == (60, 7)
    assert (weight.diff(dim=0) >= 0).all()
    assert weight[0].max() < 1e-3 < weight[-1].min()


# Edges
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [2, 3, 8, 9, 20])
@pytest.mark.parametrize("search", [compute_projection_weight, compute_two_sided_weight])
def test_edges(search: object, alpha: int, dtype: torch.dtype) -> None:
    def weight(p: tuple[float, ...], p0: tuple[float, ...], radius: float) -> float:
        return search(distribution(*p).to(dtype), distribution(*p0).to(dtype), alpha, radius).item()  # type: ignore[operator]

    uneven = (0.123, 0.456, 0.421)
    assert weight(uneven, uneven, 0.0) == 1
    assert weight(uneven, (0.2, 0.4, 0.4), 0.0) == 0
    assert weight(uneven, (0.2, 0.4, 0.4), 5.0) == 1
    # p > 0 = p0: no weight has a finite divergence
    assert weight((0.5, 0.5, 0), (0.5, 0, 0.5), 3.0) == 0
    assert weight((0.5, 0.5, 0), (0.3, 0.7, 0), 3.0) == 1  # a token that neither has is none
    assert weight((0, 0, 1), (0, 0, 1), 0.0) == 1
    assert weight((0.5, 0, 0.5), (0.4, 0, 0.6), 0.01) == weight((0.5, 0.5), (0.4, 0.6), 0.01)
    if search is compute_projection_weight:
        assert weight((0, 0.5, 0.5), (0.2, 0.4, 0.4), 1.0) == 1  # D = log 1.25 at every order
        assert weight((0.5, 0.5, 0), (0.5, 0, 0.5), math.inf) == 1
    else:
        for radius in (1.0, 800.0):  # p = 0 < p0 cannot be had whole
            assert 0.1 < weight((0, 0.5, 0.5), (0.2, 0.4, 0.4), radius) < 1
        assert weight((0, 0.5, 0.5), (0.2, 0.4, 0.4), math.inf) == 1


def test_cap_is_returned_where_it_fits() -> None:
    log_p, log_p0 = distribution(0.9, 0.05, 0.05), distribution(0.1, 0.6, 0.3)
    free = compute_projection_weight(log_p, log_p0, 3, 0.58).item()
    assert compute_projection_weight(log_p, log_p0, 3, 0.58, max_weight=0.2).item() == 0.2
    assert compute_projection_weight(
        log_p, log_p0, 3, 0.58, max_weight=0.3
    ).item() == pytest.approx(free, rel=1e-12)
    assert compute_projection_weight(log_p, log_p0, 3, 0.58, max_weight=0.0).item() == 0


@pytest.mark.parametrize("alpha", [3, 9])
def test_shapes_broadcast(alpha: int) -> None:
    log_p, log_p0 = random_distributions(3, 2.0, 4, 3)
    table = compute_projection_weight(log_p, log_p0, alpha, 0.2)
    assert table.shape == (4, 3)
    assert table.dtype == torch.float64
    one = compute_projection_weight(log_p[2, 1], log_p0[2, 0], alpha, 0.2)
    assert one.shape == ()
    assert one.item() == pytest.approx(table[2, 1].item(), rel=1e-12)
    turned = compute_projection_weight(
        log_p0, log_p, alpha, 0.2
    )  # many public distributions, one private
    assert turned[2, 1].item() == pytest.approx(
        compute_projection_weight(log_p0[2, 0], log_p[2, 1], alpha, 0.2).item(), rel=1e-12
    )
    per_member = compute_projection_weight(log_p, log_p0, alpha, torch.tensor([0.1, 0.2, 0.3]))
    assert torch.allclose(per_member[:, 1], table[:, 1], rtol=1e-7)
    per_size = torch.tensor([0.05, 0.2], dtype=torch.float64).view(2, 1, 1)
    for search in (compute_projection_weight, compute_two_sided_weight):
        assert search(log_p, log_p0, alpha, per_size).shape == (2, 4, 3)
        single = search(log_p, log_p0, alpha, 0.2)
        assert torch.allclose(search(log_p, log_p0, alpha, per_size)[1], single, rtol=1e-12)
    assert compute_projection_weight(log_p[:0], log_p0[:0], alpha, 0.2).shape == (0, 3)


def test_moments_serve_many_radii() -> None:
    log_p, log_p0 = random_distributions(4, 2.0, 6)
    moments = log_ratio_moments(log_p, log_p0, 4)
    for radius in (0.0, 0.1, 3.0):
        ours = find_largest_mixing_weight(moments, radius, 0.7)
        assert torch.allclose(
            ours, compute_projection_weight(log_p, log_p0, 4, radius, 0.7), rtol=1e-11
        )


@pytest.mark.parametrize("chunk", [1, 70, 400])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log_p, log_p0 = random_distributions(5, 2.0, 7, 3)
    whole = compute_two_sided_weight(log_p, log_p0, 3, 0.3)
    monkeypatch.setattr(projection, "_CHUNK", chunk)
    assert torch.allclose(compute_two_sided_weight(log_p, log_p0, 3, 0.3), whole, rtol=1e-13)


@pytest.mark.parametrize(
    ("chunk", "count"), [(1, 21), (99, 21), (120, 14), (150, 7), (300, 4), (1050, 1)]
)
def test_a_chunk_holds_as_much_as_there_is_room_for(
    chunk: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one distribution at least: each lies in one chunk."""
    monkeypatch.setattr(projection, "_CHUNK", chunk)
    seen = torch.zeros(7, 3, 50)
    chunks = list(projection._list_distribution_chunk_slices(seen.shape))
    for index in chunks:
        seen[index] += 1
        assert seen[index].numel() <= max(chunk, 50)
    assert (seen == 1).all() and len(chunks) == count


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("search", [compute_projection_weight, compute_two_sided_weight])
def test_a_search_that_is_cut_short_stays_within_the_radius(
    search: Any, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Newton has not yet come down to, a chord does."""
    log_p, log_p0 = random_distributions(1, 2.0, 50)
    monkeypatch.setattr(projection, "_ITERATIONS", steps)
    weight = search(log_p, log_p0, 5, 0.1)
    reached = larger_divergence if search is compute_two_sided_weight else divergence
    assert (reached(log_mixture(log_p, log_p0, weight), log_p0, 5) <= 0.1 * (1 + 1e-9)).all()
    monkeypatch.undo()
    assert (weight <= search(log_p, log_p0, 5, 0.1) * (1 + 1e-9)).all() and (weight > 0).all()


def test_weights_carry_no_gradient_and_inputs_stay_as_they_were() -> None:
    log_p, log_p0 = random_distributions(6, 2.0, 3)
    kept = log_p.clone(), log_p0.clone()
    log_p.requires_grad_()
    for weight in (
        compute_projection_weight(log_p, log_p0, 3, 0.1),
        compute_two_sided_weight(log_p, log_p0, 3, 0.1),
    ):
        assert not weight.requires_grad
    assert torch.equal(log_p, kept[0])
    assert torch.equal(log_p0, kept[1])


# Precision
# -----------------------------------------------------------------------------------------------


@pytest.fixture
def in_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(projection, "_DIRECT_ORDERS", 0)
    yield


@pytest.mark.parametrize("alpha", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("scale", [0.2, 1.5, 5.0])
def test_single_precision_stays_private_and_close(alpha: int, scale: float) -> None:
    log_p, log_p0 = (x.float() for x in random_distributions(7, scale, 20, 8, vocabulary=500))
    exact_p, exact_p0 = (x.double().log_softmax(-1) for x in (log_p, log_p0))
    for radius in (2.0, 0.3, 0.01):
        weight = compute_projection_weight(log_p, log_p0, alpha, radius)
        assert (divergence(log_mixture(exact_p, exact_p0, weight), exact_p0, alpha) <= radius).all()
        assert (weight <= compute_projection_weight(exact_p, exact_p0, alpha, radius)).all()
        assert torch.allclose(
            weight,
            compute_projection_weight(exact_p, exact_p0, alpha, radius * (1 - 1e-4)),
            rtol=0,
            atol=1e-5,
        )
        both = compute_two_sided_weight(log_p, log_p0, alpha, radius)
        mixture = log_mixture(exact_p, exact_p0, both)
        assert (larger_divergence(mixture, exact_p0, alpha) <= radius).all()
        assert torch.allclose(
            both,
            compute_two_sided_weight(exact_p, exact_p0, alpha, radius * (1 - 1e-4)),
            rtol=0,
            atol=1e-5,
        )


@pytest.mark.usefixtures("in_logs")
def test_both_ways_to_the_moments_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    log_p, log_p0 = random_distributions(8, 2.0, 9)
    slow = [log_ratio_moments(log_p, log_p0, alpha) for alpha in (2, 3, 8)]
    monkeypatch.setattr(projection, "_DIRECT_ORDERS", 8)
    for moments, alpha in zip(slow, (2, 3, 8), strict=True):
        assert torch.allclose(
            moments, log_ratio_moments(log_p, log_p0, alpha), rtol=1e-11, atol=1e-14
        )


@pytest.mark.parametrize("alpha", [2, 3, 8])
@pytest.mark.parametrize(
    ("p", "p0"), [(-1.0, -40.0), (-30.0, -70.0), (-1.0, -95.0), (-5.0, -800.0)]
)
def test_ratios_beyond_single_precision(p: float, p0: float, alpha: int) -> None:
    """A token that the public model all but excludes, next to an ordinary distribution that needs
    no such care."""
    private = torch.tensor(
        [[p, math.log1p(-math.exp(p))], [-0.5, math.log1p(-math.exp(-0.5))]], dtype=torch.float64
    )
    public = torch.tensor(
        [[p0, math.log1p(-math.exp(p0))], [-1.0, math.log1p(-math.exp(-1.0))]], dtype=torch.float64
    )
    exact = compute_projection_weight(private, public, alpha, 0.5)
    single = compute_projection_weight(private.float(), public.float(), alpha, 0.5)
    assert (single <= exact).all()
    assert torch.allclose(single, exact, rtol=2e-4 * alpha)
    if compute_projection_weight(private[:1], public[:1], alpha, 0.5).item() < 1:
        one_term = math.exp((0.5 * (alpha - 1) - alpha * p + (alpha - 1) * p0) / alpha)
        assert exact[0].item() <= one_term


def test_public_mass_below_single_precision_is_rounded_to_less_weight() -> None:
    """e^-110 is 0 in float32, and a ratio of e^25 does not overflow: the token must not vanish
    unseen."""
    private, public = torch.tensor([[-85.0, 0.0], [-110.0, 0.0]], dtype=torch.float64)
    moments = log_ratio_moments(private, public, 3)
    assert moments[3].item() == pytest.approx(math.exp(-35), rel=1e-9)
    assert (log_ratio_moments(private.float(), public.float(), 3) >= moments * (1 - 1e-6)).all()
    assert (
        compute_projection_weight(private.float(), public.float(), 3, 1e-17)
        <= compute_projection_weight(private, public, 3, 1e-17)
        < 1
    )


@pytest.mark.parametrize("alpha", [6, 8, 9, 20, 32])
def test_high_orders_keep_their_digits_in_single_precision(alpha: int) -> None:
    """Where p falls below p0 on some tokens, E (p/p0)^k is small and binomial sums of (p/p0 - 1)^j
    are not."""
    generator = torch.Generator().manual_seed(11)
    public = torch.randn(50, 200, dtype=torch.float64, generator=generator).log_softmax(-1)
    falls = 4.0 * (torch.rand(50, 200, dtype=torch.float64, generator=generator) < 0.1)
    private = (
        public - falls * torch.rand(50, 200, dtype=torch.float64, generator=generator)
    ).log_softmax(-1)
    single = log_ratio_moments(private.float(), public.float(), alpha)
    assert torch.allclose(single, log_ratio_moments(private, public, alpha), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("alpha", [3, 9])
def test_rounded_mass_is_no_divergence(alpha: int) -> None:
    log_p, log_p0 = random_distributions(10, 0.01, 5)
    moments = log_ratio_moments(log_p, log_p0, alpha)
    assert 1e-5 < moments[alpha].max() < 1e-2
    assert torch.allclose(log_ratio_moments(log_p + 1e-5, log_p0 - 1e-5, alpha), moments, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_renormalised(dtype: torch.dtype) -> None:
    log_p, log_p0 = (x.to(dtype) for x in random_distributions(9, 1.0, 6))
    assert (log_p.float().exp().sum(-1) - 1).abs().max() > 1e-4
    weight = compute_projection_weight(log_p, log_p0, 3, 0.2)
    exact_p, exact_p0 = (x.double().log_softmax(-1) for x in (log_p, log_p0))
    reached = divergence(log_mixture(exact_p, exact_p0, weight), exact_p0, 3)
    assert (reached <= 0.2).all()
    assert (reached >= 0.2 * (1 - 3e-4))[weight < 1].all()


# Refusals
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("p", "p0"),
    [
        ((math.nan, 0.0), (-0.7, -0.7)),
        ((-0.6931472, -0.6931472), (math.nan, 0.0)),
        ((math.inf, 0.0), (-0.6931472, -0.6931472)),
        ((1.0, 2.0), (-0.6931472, -0.6931472)),
        ((-0.6931472, -0.6931472), (0.0, 0.0)),
        ((-math.inf, -math.inf), (-0.6931472, -0.6931472)),
        ((-0.6931472, -0.6931472), (-math.inf, -math.inf)),
        ((-math.inf, -math.inf), (-math.inf, -math.inf)),
        ((100.0, 2.0), (-0.6931472, -0.6931472)),
    ],
)
def test_what_is_no_distribution_is_refused(
    p: tuple[float, ...], p0: tuple[float, ...], dtype: torch.dtype, alpha: int
) -> None:
    log_p, log_p0 = torch.tensor(p, dtype=dtype), torch.tensor(p0, dtype=dtype)
    for search in (compute_projection_weight, compute_two_sided_weight):
        with pytest.raises(
            AuditError, match="expected log-probabilities of total mass 1, got mass"
        ):
            search(log_p, log_p0, alpha, 0.1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"radius": -0.1}, "expected radius >= 0, got -0.1"),
        ({"radius": math.nan}, "expected radius >= 0, got nan"),
        ({"radius": torch.tensor([0.1, -2.0])}, "expected radius >= 0, got -2"),
        ({"alpha": 1}, "expected alpha >= 2, got 1"),
        ({"alpha": 2.5}, r"expected a whole number for alpha, got 2\.5"),
        ({"max_weight": 1.1}, r"expected max_weight in \[0, 1\], got 1\.1"),
        ({"max_weight": math.nan}, r"expected max_weight in \[0, 1\], got nan"),
        ({"log_p0": torch.zeros(1)}, "expected one vocabulary, got 2 and 1 tokens"),
        (
            {
                "log_p": torch.zeros(2, dtype=torch.int64),
                "log_p0": torch.zeros(2, dtype=torch.int64),
            },
            "floating point",
        ),
    ],
)
def test_bad_options_are_refused(options: dict, sentence: str) -> None:
    arguments = {
        "log_p": distribution(0.5, 0.5),
        "log_p0": distribution(0.4, 0.6),
        "alpha": 3,
        "radius": 0.1,
    }
    with pytest.raises(AuditError, match=sentence):
        compute_projection_weight(**{**arguments, **options})


@pytest.mark.parametrize("alpha", [2, 4, 8])
@pytest.mark.parametrize(
    "rare", [-88.0, -100.0, -250.0, -1000.0]
)  # nats; e^-87.3 is float32's smallest normal number
def test_a_public_distribution_that_all_but_excludes_a_token_is_a_distribution(
    alpha: int, rare: float
) -> None:
    """Where a private distribution makes much of it, the moments leave single precision: in logs
    they do not."""
    public, private = (torch.tensor([x, 0.0]).log_softmax(-1) for x in (rare, 1.0))
    exact = [distribution.double().log_softmax(-1) for distribution in (private, public)]
    ours = compute_projection_weight(private, public, alpha, 0.3)
    assert 0 <= ours <= compute_projection_weight(*exact, alpha, 0.3) * (1 + 1e-9)
    assert ours == pytest.approx(
        float(compute_projection_weight(*exact, alpha, 0.3 * (1 - 1e-4))), rel=1e-3, abs=1e-300
    )

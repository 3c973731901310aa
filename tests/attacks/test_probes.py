"""The probes against naive twins, enumeration, the sampler, and numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from auditor.attacks.extraction_probability import (
    ExtractionProbability,
    compute_suffix_log_probs,
)
from auditor.attacks.near_verbatim import (
    NearVerbatim,
    _bound_fewest_edits,
    _extend_edit_distances,
    bound_near_verbatim_probability,
)
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Measurement
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.defenses.uniform_mixing import UniformMixingModel
from auditor.generation.sample import sample_candidates
from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL, GREEDY, Decoding
from auditor.models.ensemble import ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Prompt, Scenario, TrainedModel
from auditor.plugins.probe import measure_baselined_probability
from auditor.plugins.view import WHITE_BOX, View
from auditor.statistics.extraction import (
    compute_any_sample_probability,
    compute_suffix_p_values,
    sum_windows,
)
from auditor.statistics.intervals import (
    clopper_pearson,
    compute_mean_probability,
    subtract_nonmember_mean,
)
from auditor.statistics.metrics import find_metric
from auditor.statistics.roc import compute_conformal_p_values, compute_conformal_threshold
from tests.conftest import DEFENSES, refuses

MakeTiny = Callable[..., HuggingFaceModel]
OWN = Decoding(temperature=0.8, top_p=0.7)
DECODINGS = [
    ANCESTRAL,
    OWN,
    Decoding(top_k=4),
    GREEDY,
    Decoding(temperature=1.3, top_p=0.9, forbidden=(0,)),
]


def tokens(rows: int, length: int, vocab_size: int = 61, seed: int = 0) -> Tensor:
    return torch.randint(
        0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def likely(model: LanguageModel, prefixes: Tensor, length: int, decoding: Decoding = OWN) -> Tensor:
    """A suffix for each prefix that the model may well say."""
    noise = np.stack([draw_secret_uniforms(1, length, "suffix", i) for i in range(len(prefixes))])
    return torch.cat(
        [c.suffixes for c in sample_candidates(model, prefixes, length, decoding, noise)]
    )


def secrets(prefixes: Tensor, suffixes: Tensor, members: int) -> list[Secret]:
    rows = zip(prefixes.tolist(), suffixes.tolist(), strict=True)
    return [
        Secret(f"s{i}", tuple(p), tuple(s), 1 + i % 2, i < members) for i, (p, s) in enumerate(rows)
    ]


def view(model: LanguageModel, batch_size: int | None = None) -> View:
    return View("target", model, WHITE_BOX, seed=0, batch_size=batch_size)


def value(measured: Sequence[Measurement], name: str) -> float:
    return next(m.value for m in measured if m.name == name)


# --- extraction probability ---


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_one_pass_is_the_full_distribution_position_by_position(
    neox: HuggingFaceModel, decoding: Decoding, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # chunks that cut texts apart
    monkeypatch.setattr("auditor.attacks.extraction_probability._DISTRIBUTION_AT_ONCE", 61 * 7)
    model = UniformMixingModel(neox, 0.7) if mixed else neox
    prefixes = tokens(12, 5)
    suffixes = torch.cat([likely(model, prefixes[:8], 6), tokens(4, 6, seed=1)])
    seen = compute_suffix_log_probs(model, decoding, prefixes, suffixes)
    for i, (prefix, suffix) in enumerate(zip(prefixes, suffixes, strict=True)):
        log_p = ancestral = bits = 0.0
        for t, token in enumerate(suffix.tolist()):
            distribution = model.log_probs(torch.cat([prefix, suffix[:t]])[None], 1)[0]
            log_p += float(decoding.log_distribution(distribution)[0, token])
            ancestral += float(distribution[0, token])
            masked = distribution[0].clone()
            masked[list(decoding.forbidden)] = -math.inf
            bits += math.log2(
                1 + masked.sort(descending=True, stable=True).indices.tolist().index(token)
            )
        assert float(seen["log_p"][i]) == pytest.approx(log_p, abs=1e-4)
        assert float(seen["log_p_ancestral"][i]) == pytest.approx(ancestral, abs=1e-4)
        assert float(seen["rank_bits"][i]) == pytest.approx(bits)
        assert float(seen["log_p"][i]) <= -float(seen["rank_bits"][i]) * math.log(2) + 1e-5
    if decoding == OWN:
        assert seen["log_p"].isfinite().any() and seen["log_p"].isneginf().any()


@pytest.mark.parametrize("decoding", [OWN, ANCESTRAL], ids=str)
def test_it_agrees_with_the_sampler_within_binomial_error(
    neox: HuggingFaceModel, decoding: Decoding
) -> None:
    samples, prefixes = 200, tokens(250, 5, seed=2)
    suffixes = likely(neox, prefixes, 3, decoding)
    p = compute_suffix_log_probs(neox, decoding, prefixes, suffixes)["log_p"].exp().numpy()
    noise = np.stack([draw_secret_uniforms(samples, 3, "counts", i) for i in range(len(prefixes))])
    found = sample_candidates(neox, prefixes, 3, decoding, noise)
    hits = np.array(
        [
            int(c.counts[(c.suffixes == s).all(-1)].sum())
            for c, s in zip(found, suffixes, strict=True)
        ],
        dtype=float,
    )
    expected, spread = samples * p, samples * p * (1 - p)
    assert len(p) >= 200 and ((p > 0.02) & (p < 0.98)).sum() > 50
    assert abs(hits.sum() - expected.sum()) < 3 * math.sqrt(spread.sum())
    random = spread > 1
    residual = (hits - expected)[random] ** 2 / spread[random]
    assert chi2.ppf(0.001, random.sum()) < residual.sum() < chi2.ppf(0.999, random.sum())
    assert (np.abs(hits - expected)[~random] <= 8).all()
    # Any of 10: blocks of the samples against the formula.
    shares = compute_any_sample_probability(np.log(p), 10)
    assert shares == pytest.approx(binom.sf(0, 10, p), abs=1e-9)


def test_a_cut_token_makes_a_suffix_impossible(neox: HuggingFaceModel) -> None:
    prefixes = tokens(1, 5)
    best = likely(neox, prefixes, 4, GREEDY)
    distribution = neox.log_probs(torch.cat([prefixes, best[:, :2]], -1), 1)[0, 0]
    broken = best.clone()
    broken[0, 2] = distribution.argmin()
    seen = compute_suffix_log_probs(
        neox, Decoding(top_k=3), prefixes.expand(2, -1), torch.cat([best, broken])
    )
    assert float(seen["log_p"][0]) > -math.inf
    assert float(seen["log_p"][1]) == -math.inf and float(seen["log_p_ancestral"][1]) > -math.inf
    assert float(compute_suffix_log_probs(neox, GREEDY, prefixes, best)["log_p"]) == 0


def test_any_of_n_by_hand_and_at_tiny_probabilities() -> None:
    assert compute_any_sample_probability(np.log([0.5, 0.1]), 3) == pytest.approx(
        [1 - 0.125, 1 - 0.729]
    )
    assert compute_any_sample_probability(np.array([-math.inf, 0.0, 1e-9]), 10_000).tolist() == [
        0,
        1,
        1,
    ]
    tiny = compute_any_sample_probability(np.log([1e-30, 3e-12]), 1000)
    assert tiny == pytest.approx([1e-27, 3e-9], rel=1e-6)  # 1 - (1 - p)^n would be 0 here


def observations(log_p: Sequence[float]) -> list[Observation]:
    return [
        Observation(f"s{i}", {"log_p": x, "log_p_ancestral": x, "rank_bits": 1.0})
        for i, x in enumerate(log_p)
    ]


def test_discoverable_extraction_by_hand() -> None:
    """n >= log(1-p) / log(1-p_z): 1 for p_z = 0.1 = p, 22 for p = 0.9, 230 for p_z = 0.01 and p =
    0.9."""
    probe = ExtractionProbability(n="1,21,22,229,230", p="0.1,0.9")
    known = secrets(tokens(3, 2), tokens(3, 2), members=3)
    measured = probe.measurements(known, observations([math.log(0.1), math.log(0.01), -math.inf]))
    found = {
        name: value(measured, f"discoverable_{name}")
        for name in ("1_0.1", "21_0.9", "22_0.9", "229_0.9", "230_0.9")
    }
    assert found == pytest.approx(
        {"1_0.1": 1 / 3, "21_0.9": 0, "22_0.9": 1 / 3, "229_0.9": 1 / 3, "230_0.9": 2 / 3}
    )
    assert value(measured, "extraction_probability") == pytest.approx(0.11 / 3)
    assert value(measured, "expected_any_of_22") == pytest.approx((1 - 0.9**22 + 1 - 0.99**22) / 3)
    assert value(measured, "rank_bound") == 0.5
    assert not any(m.name.endswith("_nonmembers") or m.name == "conformal_share" for m in measured)


def test_conformal_threshold_by_hand() -> None:
    controls = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0, 7.0, 6.0])  # n = 9
    assert compute_conformal_threshold(controls, 0.1) == 9  # ceil(0.9 * 10) = the 9th smallest
    assert compute_conformal_threshold(controls, 0.2) == 8
    assert compute_conformal_threshold(controls, 0.25) == 8  # ceil(7.5)
    assert compute_conformal_threshold(controls, 0.05) == math.inf  # ceil(9.5) = 10 of 9
    assert compute_conformal_threshold(np.arange(19.0), 0.05) == 18
    assert compute_conformal_p_values(np.array([0.0, 5.0, 5.5, 9.0, 10.0]), controls).tolist() == [
        1,
        0.6,
        0.5,
        0.2,
        0.1,
    ]
    tied = np.array([-math.inf] * 10)
    assert compute_conformal_p_values(np.array([-math.inf, -3.0]), tied).tolist() == [1, 1 / 11]
    for alpha in (
        0.05,
        0.1,
        0.25,
        0.5,
    ):  # above the threshold is where the p-value is at most alpha
        scores = np.linspace(0, 10, 41)
        assert (
            (compute_conformal_p_values(scores, controls) <= alpha + 1e-12)
            == (scores > compute_conformal_threshold(controls, alpha))
        ).all()


def test_suffixes_are_compared_with_those_of_their_length() -> None:
    """No model saw any of them: short ones are no more often above their threshold than long
    ones. One threshold for all lengths calls twice as many short ones extracted."""
    rng, rate = np.random.default_rng(0), 0.05
    shares, pooled = [], []
    for _ in range(200):
        lengths, other_lengths = (rng.choice([10, 12, 30, 50], n) for n in (80, 160))
        log_p, others = (-of * rng.gamma(4, 0.5, len(of)) for of in (lengths, other_lengths))
        p_values = compute_suffix_p_values(log_p, lengths, others, other_lengths, rate)
        above = log_p > compute_conformal_threshold(others, rate)
        shares.append([(p_values[lengths == length] <= rate).mean() for length in (10, 12, 30, 50)])
        pooled.append(above[lengths == 10].mean())
    assert np.mean(shares, axis=0).max() <= rate + 0.01
    # the comparison has power: at 10, 30 and 50 tokens it uses the whole level
    assert np.mean(shares, axis=0)[[0, 2, 3]].min() >= 0.03
    assert np.mean(pooled) > 2 * rate


def test_p_values_by_length_equal_those_of_each_suffix() -> None:
    """The naive twin: one suffix at a time."""
    rng, rate = np.random.default_rng(1), 0.2
    lengths, other_lengths = rng.integers(4, 40, 50), rng.integers(6, 40, 60)
    log_p, others = rng.normal(size=50), rng.normal(size=60)
    found = compute_suffix_p_values(log_p, lengths, others, other_lengths, rate)
    for p_value, score, length in zip(found, log_p, lengths, strict=True):
        controls = [
            (n, other)
            for n, other in sorted(zip(other_lengths, others, strict=True))
            if n <= length
        ]
        close = [other for n, other in controls if n >= 0.75 * length]
        if len(close) < 4:
            fourth = controls[-min(4, len(controls))][0] if controls else 0
            close = [other for n, other in controls if n >= fourth]
        expected = (1 + sum(other >= score for other in close)) / (len(close) + 1)
        assert p_value == pytest.approx(expected)


def test_non_members_set_the_floor_and_the_threshold() -> None:
    probe = ExtractionProbability(alpha=0.2, n="1")
    mixed = secrets(tokens(7, 2), tokens(7, 2), members=3)
    seen = observations([-0.1, -2.5, -9.0, -3.0, -4.0, -5.0, -math.inf])
    view: Any = None  # this probe needs none
    completed = probe.add_joint_values(view, mixed, seen)
    assert [o.values.get("conformal_p") for o in completed] == [
        0.2,
        0.2,
        0.8,
        None,
        None,
        None,
        None,
    ]
    assert probe.add_joint_values(view, mixed, completed) == completed  # a resumed run adds nothing
    measured = probe.measurements(mixed, completed)
    assert value(measured, "conformal_share") == pytest.approx(2 / 3)
    floor = np.exp([-3.0, -4, -5, -math.inf]).mean()
    assert value(measured, "extraction_probability_nonmembers") == pytest.approx(floor)
    own = np.exp([-0.1, -2.5, -9.0]).mean()
    assert value(measured, "excess_extraction_probability") == pytest.approx(own - floor)
    assert set(probe.main_number_by_repeats(mixed, seen)) == {"1", "2"}
    assert probe.main_number_by_repeats(mixed, seen)["2"].n == 1  # members only
    # The second member's suffix is likelier than 0.01, and so are the non-members'.
    usual = replace(probe, p="0.01", alpha=0.34)
    low = observations([-0.1, -3.5, -9.0, -3.0, -4.0, -5.0, -6.0])
    numbers = usual.measurements(mixed, low)
    assert value(numbers, "discoverable_1_0.01") == pytest.approx(2 / 3)
    assert value(numbers, "extracted_1_0.01") == pytest.approx(1 / 3)
    assert value(numbers, "extracted_1_0.01_nonmembers") == pytest.approx(2 / 4)
    per_secret = usual.per_secret_values(mixed, low)
    assert list(per_secret["extracted_1_0.01"]) == [1, 0, 0, 1, 1, 0, 0]
    assert not any(m.name.startswith("extracted") for m in measured)
    few = replace(probe, alpha=0.05).measurements(mixed, completed)
    note = next(m for m in few if m.name == "conformal_share")
    assert note.value == 0 and "too few" in note.note


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"n": "1,ten"}, ("n",)),
        ({"n": "0"}, ("n", "1", "0")),
        ({"p": "1"}, ("p", "0", "1", "1")),
        ({"alpha": 0.0}, ("alpha",)),
        ({"top_p": 0.0}, ("top_p",)),
        ({"near_beams": 3}, ("near_beams=3", "bracket=true")),
        ({"bracket": True, "windows": "0,4"}, ("windows", "1", "0")),
        ({"bracket": True, "windows": "all"}, ("windows", "'all'")),
        ({"bracket": True, "one_in": 0}, ("one_in", "1", "0")),
        ({"bracket": True, "near_distance": -1}, ("near_distance", "0", "-1")),
    ],
)
def test_extraction_probability_refuses(options: dict[str, object], facts: tuple[str, ...]) -> None:
    with refuses(*facts):
        ExtractionProbability(**options)  # type: ignore[arg-type]


# --- the bracket ---


def test_windows_by_hand() -> None:
    """Known answers of formulas.md C3."""
    bits = np.log2(np.array([[1.0, 1, 2, 1, 4], [1, 3, 1, 1, 2]]))
    assert sum_windows(bits[:1], 5).min(-1).tolist() == [3]
    assert sum_windows(bits[1:], 2).min(-1).tolist() == [0]
    assert (sum_windows(np.log2(np.array([[1.0, 1, 1, 2, 1, 1]])), 2) == 0).mean(-1).tolist() == [
        3 / 5
    ]
    assert (
        sum_windows(bits, 9).min(-1).tolist()
        == sum_windows(bits, 5).min(-1).tolist()
        == pytest.approx([3, math.log2(6)])
    )
    assert (sum_windows(np.zeros((1, 4)), 9) == 0).mean(-1).tolist() == [1]


BRACKET = ExtractionProbability(
    temperature=0.8, top_p=0.7, n="1", bracket=True, near_distance=1, near_beams=4, windows="1,3"
)


def test_the_bracket_is_the_near_verbatim_floor_and_the_ranks_token_by_token(
    neox: HuggingFaceModel,
) -> None:
    prefixes = tokens(12, 5, seed=4)
    known = secrets(
        prefixes, torch.cat([likely(neox, prefixes[:8], 4), tokens(4, 4, seed=5)]), members=7
    )
    seen = list(BRACKET.observe_secrets(view(neox), known))
    floors = NearVerbatim(distance=1, beams=4).observe_secrets(view(neox), known)
    for secret, found, near in zip(known, seen, floors, strict=True):
        bits = []
        for t, token in enumerate(secret.suffix):
            distribution = neox.log_probs(torch.tensor([[*secret.prefix, *secret.suffix[:t]]]), 1)[
                0, 0
            ]
            bits.append(
                math.log2(
                    1 + sum(float(other) > float(distribution[token]) for other in distribution)
                )
            )
        of = found.values
        assert of["log_p_near"] == pytest.approx(near.values["log_p_near"], abs=1e-4)
        assert of["rank_bits"] == pytest.approx(sum(bits))
        for length in (1, 3):
            windows = [sum(bits[i : i + length]) for i in range(len(bits) - length + 1)]
            assert of[f"window_bits_{length}"] == pytest.approx(min(windows))
            assert of[f"greedy_windows_{length}"] == pytest.approx(
                sum(w == 0 for w in windows) / len(windows)
            )
        assert of["log_p"] <= min(of["log_p_near"], -of["rank_bits"] * math.log(2)) + 1e-5
    measured = {m.name: m for m in BRACKET.measurements(known, seen)}
    for name, values in BRACKET.per_secret_values(known, seen).items():
        assert measured[name].value == pytest.approx(np.mean(values[:7])), name
        entry = find_metric(name)
        assert entry.unit == measured[name].unit and entry.per_secret, name
    for name in (
        "near_verbatim_probability",
        "extraction_probability",
        "rank_bound",
        "window_bound_3",
    ):
        reached = {
            "near_verbatim_probability": "near_verbatim",
            "extraction_probability": "extraction",
        }.get(name, name)
        p = np.array(BRACKET.per_secret_values(known, seen)[name])
        assert measured[f"{name}_nonmembers"].value == pytest.approx(p[7:].mean())
        assert measured[f"{reached}_1_in_1000"].value == (p[:7] >= 0.001).mean()
        assert measured[f"{reached}_1_in_1000_nonmembers"].value == (p[7:] >= 0.001).mean()
    assert {m for m in measured if m.startswith("excess")} == {"excess_extraction_probability"}
    plain = ExtractionProbability(n="1")
    assert [
        m.name for m in plain.measurements(known, list(plain.observe_secrets(view(neox), known)))
    ] == [name for name in measured if not re.search("near|_1_in_|window", name)]


def test_the_floor_is_of_another_event_and_may_lie_above_the_ceiling(make_tiny: MakeTiny) -> None:
    """Samples near the suffix are many: that one of them comes is no part of what the ranks of the
    suffix bound."""
    # The least likely tokens of a flat distribution: 1/rank is hardly above their probability.
    model, contexts = make_tiny(vocab_size=6, scale=0.05), tokens(8, 4, 6)
    for _ in range(4):
        contexts = torch.cat([contexts, model.log_probs(contexts, 1).argmin(-1)], dim=1)
    known = secrets(contexts[:, :4], contexts[:, 4:], members=8)
    seen = list(replace(BRACKET, temperature=1.0, top_p=1.0).observe_secrets(view(model), known))
    floor, ceiling, exact = (
        np.array([found.values[name] * unit for found in seen])
        for name, unit in (("log_p_near", 1.0), ("rank_bits", -math.log(2)), ("log_p", 1.0))
    )
    assert (exact <= ceiling + 1e-5).all() and (exact <= floor + 1e-9).all()
    assert (floor > ceiling).any()


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_no_product_setting_goes_above_the_ceiling(tied: bool) -> None:
    """Random distributions, random temperature, top-k, top-p and min-p, by our decoding and by
    transformers' own warpers."""
    rng, noise = np.random.default_rng(5), torch.Generator().manual_seed(5)
    reached = 0.0
    for _ in range(150):
        size, length = int(rng.integers(2, 40)), 3
        logits = float(rng.uniform(0.3, 6)) * torch.randn(
            50, length, size, generator=noise, dtype=torch.float64
        )
        logits = logits.round() if tied else logits
        distribution, flat = logits.log_softmax(-1), logits.flatten(0, 1)
        own = torch.multinomial(distribution.flatten(0, 1).exp(), 1, generator=noise).squeeze(-1)
        ceiling = (
            -ANCESTRAL.rank_ties_first(distribution.flatten(0, 1), own)
            .double()
            .log()
            .view(-1, length)
            .sum(-1)
        )
        temperature, top_k = float(rng.uniform(0.05, 4)), int(rng.integers(1, size + 1))
        top_p, min_p = float(rng.uniform(0.05, 1)), float(rng.uniform(0, 1))
        ours = Decoding(temperature, top_k, top_p).score_decoded_tokens(
            distribution.flatten(0, 1), own
        )
        warpers = [
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ]
        warped = LogitsProcessorList([*warpers, MinPLogitsWarper(min_p)])(
            torch.zeros(len(flat), 1).long(), flat
        )
        theirs = warped.log_softmax(-1).gather(-1, own.unsqueeze(-1)).squeeze(-1)
        for log_q in (
            ours,
            theirs,
            ANCESTRAL.score_decoded_tokens(distribution.flatten(0, 1), own),
        ):
            log_p = log_q.view(-1, length).sum(-1)
            assert (log_p <= ceiling + 1e-9).all()
            reached = max(reached, 0.0, *(log_p - ceiling)[ceiling < 0].exp().tolist())
    assert reached > 0.5  # it is no idle bound


# --- intervals of means ---


def test_a_mean_of_probabilities_is_never_surer_than_its_secrets_allow() -> None:
    for p in (0.0, 1e-12):
        measured = compute_mean_probability("p", np.full(59, p))
        assert measured.high == clopper_pearson(0, 59)[1] and measured.low <= p
    sure = compute_mean_probability("p", np.ones(59))
    assert (sure.value, sure.high, sure.low) == (1, 1, clopper_pearson(59, 59)[0])
    nothing = compute_mean_probability("p", np.array([]))
    assert math.isnan(nothing.value) and (nothing.low, nothing.high, nothing.n) == (0, 1, 0)
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        one = compute_mean_probability(f"p{trial}", rng.beta(0.3, 0.6, size=80))
        covered += one.low <= 1 / 3 <= one.high
    assert covered >= 180  # 95% nominal; binomial(200, 0.95) is below 180 once in 2,000


def test_excess_of_means_is_newcombes_rule() -> None:
    a, b = Measurement("a", 0.6, 0.5, 0.8, 10), Measurement("b", 0.1, 0.05, 0.4, 20)
    found = subtract_nonmember_mean("excess", a, b)
    assert (found.value, found.low, found.high, found.n) == pytest.approx(
        (0.5, 0.5 - math.hypot(0.1, 0.3), 0.5 + math.hypot(0.2, 0.05), 30)
    )


# --- near-verbatim ---


def levenshtein(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The last row of the textbook table: distances of `a` to every beginning of `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        new = [i]
        for j, y in enumerate(b, 1):
            new.append(min(row[j - 1] + (x != y), row[j] + 1, new[j - 1] + 1))
        row = new
    return row


def test_edit_rows_are_the_textbooks() -> None:
    for seed in range(5):
        aims, said = tokens(40, 7, 4, seed), tokens(40, 5, 5, seed + 10)  # token 4 is in no suffix
        edits = torch.arange(8).expand(40, -1)
        for t in range(5):
            known, unknown = _extend_edit_distances(edits, aims)
            same = aims == said[:, t, None]
            place = same.int().argmax(-1)
            edits = torch.where(same.any(-1, keepdim=True), known[torch.arange(40), place], unknown)
            theirs = [
                levenshtein(s[: t + 1], a)
                for s, a in zip(said.tolist(), aims.tolist(), strict=True)
            ]
            assert edits.tolist() == theirs
        assert (said == 4).any()


def test_what_cannot_end_near_is_known_early() -> None:
    """`_least_detectable_sentences` never exceeds the least distance of any completion: pruning by
    it loses nothing."""
    for start in itertools.product(range(3), repeat=2):
        for aim in itertools.product(range(2), repeat=4):
            reach = int(_bound_fewest_edits(torch.tensor([levenshtein(start, aim)]), 2))
            best = min(
                levenshtein((*start, *rest), aim)[-1]
                for rest in itertools.product(range(3), repeat=2)
            )
            assert reach <= best


@pytest.mark.parametrize("decoding", [ANCESTRAL, OWN, Decoding(top_k=3)], ids=str)
def test_near_verbatim_bound_against_enumeration(make_tiny: MakeTiny, decoding: Decoding) -> None:
    model = make_tiny(vocab_size=6, scale=2.0)
    prefixes = tokens(6, 4, 6)
    suffixes = torch.cat([likely(model, prefixes[:3], 4, decoding), tokens(3, 4, 6, seed=1)])
    every = torch.tensor(list(itertools.product(range(6), repeat=4)))
    distribution = [
        compute_suffix_log_probs(model, decoding, prefix.expand(len(every), -1), every)[
            "log_p"
        ].exp()
        for prefix in prefixes
    ]
    assert all(float(p.sum()) == pytest.approx(1, abs=1e-5) for p in distribution)
    missed = 0.0
    tight = 1.0
    for distance in (0, 1, 2, 4):
        within = [
            [levenshtein(s, z)[-1] <= distance for s in every.tolist()] for z in suffixes.tolist()
        ]
        exact = torch.stack(
            [p[torch.tensor(near)].sum() for p, near in zip(distribution, within, strict=True)]
        )
        for beams in (1, 3, 10_000):
            near, most, verbatim = bound_near_verbatim_probability(
                model, decoding, prefixes, suffixes, distance, beams
            )
            truth = compute_suffix_log_probs(model, decoding, prefixes, suffixes)["log_p"]
            torch.testing.assert_close(verbatim, truth, atol=1e-5, rtol=0)
            assert (near >= truth - 1e-5).all()
            assert (near.exp() <= exact + 1e-5).all()
            assert (most.exp() >= exact - 1e-5).all() and (most <= 0).all()
            if beams > 6**4 or distance == 0:
                torch.testing.assert_close(near.exp(), exact, atol=1e-5, rtol=0)
            if beams > 6**4:  # nothing is dropped
                torch.testing.assert_close(most.exp(), exact, atol=1e-5, rtol=0)
            elif distance < 2:
                tight = min(tight, float(most.exp().min()))
            missed = max(missed, float((exact - near.exp()).max()))
    # few beams do lose something, so the bound was a bound and not the value itself
    assert missed > 0.01 and tight < 0.5


def test_the_verbatim_path_survives_likelier_neighbours(make_tiny: MakeTiny) -> None:
    """With one beam, which greedy decoding takes, the verbatim path is still there: it is never
    dropped."""
    model, prefixes = make_tiny(vocab_size=6, scale=2.0), tokens(20, 4, 6)
    suffixes = likely(model, prefixes, 5, ANCESTRAL)
    near, _, verbatim = bound_near_verbatim_probability(model, ANCESTRAL, prefixes, suffixes, 5, 1)
    assert (near.exp() > verbatim.exp() * 1.01).any() and verbatim.isfinite().all()
    assert (near >= verbatim - 1e-5).all()


def test_no_more_than_a_fifth_of_a_suffix_is_edited(neox: HuggingFaceModel) -> None:
    """Within 5 edits of 5 tokens is every sample: a model without a secret would leak them all."""
    known = secrets(tokens(4, 5), tokens(4, 5, seed=1), members=4)
    (wide, narrow), bracket = (
        (
            list(NearVerbatim(distance=distance, beams=4).observe_secrets(view(neox), known))
            for distance in (5, 1)
        ),
        list(replace(BRACKET, near_distance=5).observe_secrets(view(neox), known)),
    )
    assert wide == narrow and max(o.values["log_p_near"] for o in wide) < math.log(0.5)
    assert [o.values["log_p_near"] for o in bracket] == pytest.approx(
        [o.values["log_p_near"] for o in wide], abs=1e-4
    )


def test_a_secret_that_no_sample_can_come_near_is_minus_infinity(make_tiny: MakeTiny) -> None:
    model, prefixes = make_tiny(vocab_size=6, scale=2.0), tokens(2, 4, 6)
    best = likely(model, prefixes, 4, GREEDY)
    far = (best + 1) % 6
    near, most, verbatim = bound_near_verbatim_probability(
        model, GREEDY, prefixes, torch.stack([best[0], far[1]]), 0, 3
    )
    assert near.tolist() == most.tolist() == verbatim.tolist() == [0, -math.inf]
    bounds = bound_near_verbatim_probability(model, GREEDY, prefixes, far, 0, 3)
    assert all(bound.tolist() == [-math.inf] * 2 for bound in bounds)


def test_near_verbatim_measurements(neox: HuggingFaceModel) -> None:
    prefixes = tokens(8, 5)
    known = secrets(prefixes, likely(neox, prefixes, 4), members=6)
    probe = NearVerbatim(distance=1, beams=4)
    seen = list(probe.observe_secrets(view(neox), known))
    measured = probe.measurements(known, seen)
    assert (
        measured[0].name == "near_verbatim_probability"
        and "within 1 token edits, 4 beams" in measured[0].note
    )
    assert (
        value(measured, "near_verbatim_probability")
        >= value(measured, "extraction_probability")
        > 0
    )
    most = value(measured, "near_verbatim_probability_at_most")
    assert value(measured, "near_verbatim_probability") <= most <= 1
    # two non-members are too few for a threshold at 5%
    assert value(measured, "near_verbatim_conformal_share") == 0
    loose = replace(probe, alpha=0.4)
    calibrated = loose.measurements(known, seen)[-1]
    below = [o.values["log_p_near"] for o in seen[6:]]
    assert calibrated.value == np.mean([o.values["log_p_near"] > max(below) for o in seen[:6]])
    assert {"near_verbatim_probability_nonmembers", "extraction_probability_nonmembers"} <= {
        m.name for m in measured
    }
    exact = ExtractionProbability()
    again = exact.measurements(known, list(exact.observe_secrets(view(neox), known)))
    assert value(again, "extraction_probability") == pytest.approx(
        value(measured, "extraction_probability"), abs=1e-5
    )
    with refuses("distance", "0", "-1"):
        NearVerbatim(distance=-1)
    with refuses("beams", "1", "0"):
        NearVerbatim(beams=0)


@pytest.mark.parametrize("name", sorted(DEFENSES))
def test_the_suffixes_of_a_defended_model_share_one_probability(
    make_tiny: MakeTiny, name: str
) -> None:
    """p_z is exact for every defense: over all suffixes it sums to one, truncated or not."""
    target = make_tiny(vocab_size=23)
    held = ModelEnsemble(target, [make_tiny(vocab_size=23, seed=s) for s in (1, 2)])
    trained, prompt = TrainedModel(target, None), Prompt("s0", (1, 2, 3), (1, 2, 3, 4, 5))
    scenario = Scenario(
        target,
        target,
        held,
        60,
        2,
        trained=trained,
        whole=target,
        prompts=(prompt,),
        corpus=[tuple(range(1, 20))],
    )
    model = DEFENSES[name]().protect(scenario)
    every = torch.tensor(list(itertools.product(range(23), repeat=2)))
    for decoding in (ANCESTRAL, OWN):
        seen = compute_suffix_log_probs(
            model, decoding, torch.tensor([[1, 2, 3]]).expand(len(every), -1), every
        )
        assert float(seen["log_p"].exp().sum()) == pytest.approx(1, abs=1e-4)


def test_parts_of_one_record_are_one_probability() -> None:
    """Of 60 and 40 records of ten parts that no model saw, 17% had an excess as if independent."""
    rng = np.random.default_rng(0)
    unit = np.repeat(np.arange(100), 10)
    member = unit < 60
    alarms = np.zeros(2, int)
    for _ in range(80):
        p = rng.beta(0.1, 0.9, 100)[unit] * rng.random(1000)
        for i, of in enumerate((unit, None)):
            mean, _, excess = measure_baselined_probability("p", p, member, "", unit=of)
            assert mean.value == pytest.approx(p[member].mean()) and mean.n == 600
            alarms[i] += excess.low > 0
    assert alarms[0] <= 5 < alarms[1]

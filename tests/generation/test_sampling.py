"""The sampler against naive twins: Hugging Face's warpers, one-by-one sampling, `generate`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.generation.sample import SuffixCandidates, sample_candidates
from auditor.models import decoding as decoding_module
from auditor.models.decoding import (
    ANCESTRAL,
    GREEDY,
    Cooling,
    Decoding,
    compute_log_sum_exp,
    draw_columns,
    select_top_k,
)
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.memory import group_equal_shapes
from tests.rounding import assert_same

MakeTiny = Callable[..., HuggingFaceModel]

DECODINGS = [
    ANCESTRAL,
    Decoding(temperature=0.8, top_p=0.7),
    Decoding(top_k=5),
    Decoding(temperature=1.3, top_k=7, top_p=0.9),
    Decoding(top_p=0.2, forbidden=(3,)),
    Decoding(top_k=100, top_p=0.99),
]


def tied(rows: int = 300, vocab_size: int = 97) -> Tensor:
    """Distributions with many equal probabilities, at the edge of every truncation too."""
    logits = (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 2).round()
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
def test_how_many_entries_are_sorted_at_once_changes_nothing(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributions, row = tied(), torch.arange(300).repeat(7)
    noise = torch.rand(len(row), generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    whole = decoding.log_distribution(distributions), *decoding.draw(distributions, row, noise)
    sorted_at_once = []
    exact = Decoding._truncate

    def counted(self: Decoding, some: Tensor, *more: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
        sorted_at_once.append(len(some))
        return exact(self, some, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoding, "_truncate", counted)
    monkeypatch.setattr(decoding_module, "_SORTED_AT_ONCE", 97 * 8)
    parted = decoding.log_distribution(distributions), *decoding.draw(distributions, row, noise)
    assert all(torch.equal(one, other) for one, other in zip(whole, parted, strict=True))
    assert decoding is ANCESTRAL or (
        max(sorted_at_once) <= 97 * 8 // 16 and len(sorted_at_once) > 10
    )


@pytest.mark.parametrize(
    "decoding", [*DECODINGS, GREEDY, Decoding(top_k=5, forbidden=(0, 7))], ids=str
)
def test_the_distribution_of_one_token_is_read_off_the_whole_distribution(
    decoding: Decoding,
) -> None:
    distributions = torch.cat(
        [tied(), torch.randn(300, 97, generator=torch.Generator().manual_seed(4)).log_softmax(-1)]
    )
    whole = decoding.log_distribution(distributions).double()
    cut, kept = 0, 0
    for tokens in torch.randint(
        0, 97, (20, len(distributions)), generator=torch.Generator().manual_seed(5)
    ):
        ours, theirs = (
            decoding.score_decoded_tokens(distributions, tokens),
            whole.gather(-1, tokens[:, None]).squeeze(-1),
        )
        assert torch.equal(ours.isneginf(), theirs.isneginf())
        assert_same(ours, theirs)
        cut, kept = cut + int(ours.isneginf().sum()), kept + int(ours.isfinite().sum())
    assert kept and (cut or decoding == ANCESTRAL)


def test_a_token_too_unlikely_for_float32_is_not_cut() -> None:
    distribution = torch.tensor([[0.0, -200.0]])
    assert float(ANCESTRAL.score_decoded_tokens(distribution, torch.tensor([1]))) == -200


@pytest.mark.parametrize("forbidden", [(), (2, 5)])
def test_ranks_are_places_in_a_stable_sort_and_bound_every_decoding(
    forbidden: tuple[int, ...],
) -> None:
    distributions = tied(60)
    masked = distributions.clone()
    masked[:, list(forbidden)] = -math.inf
    order = masked.sort(dim=-1, descending=True, stable=True).indices
    allowed = [t for t in range(97) if t not in forbidden]
    for token in allowed:
        tokens = torch.full((len(distributions),), token)
        ranks = Decoding(forbidden=forbidden).ranks(distributions, tokens)
        assert torch.equal(ranks, (order == token).int().argmax(-1) + 1)
        for decoding in [*DECODINGS, GREEDY]:
            own = Decoding(decoding.temperature, decoding.top_k, decoding.top_p, forbidden)
            assert (
                own.score_decoded_tokens(distributions, tokens) <= -ranks.double().log() + 1e-5
            ).all(), own


def hf_distribution(decoding: Decoding, logits: Tensor) -> Tensor:
    """The same distribution by Hugging Face's own warpers."""
    warpers = LogitsProcessorList()
    logits = logits.clone()
    logits[:, list(decoding.forbidden)] = -math.inf
    if decoding.temperature != 1:
        warpers.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k:
        warpers.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1:
        warpers.append(TopPLogitsWarper(decoding.top_p))
    return torch.log_softmax(warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits), -1)


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_decoding_distribution_is_that_of_hugging_face_token_for_token(
    decoding: Decoding, spread: float
) -> None:
    logits = torch.randn(200, 500, generator=torch.Generator().manual_seed(0)) * spread
    ours = decoding.log_distribution(torch.log_softmax(logits, -1))
    theirs = hf_distribution(decoding, logits)
    assert torch.equal(ours.isneginf(), theirs.isneginf())
    kept = ~theirs.isneginf()
    torch.testing.assert_close(ours[kept], theirs[kept], atol=2e-5, rtol=0)


def test_ties_at_the_kth_logit_stay_and_ties_at_the_nucleus_edge_go_by_id() -> None:
    distribution = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]))
    assert Decoding(top_k=2).log_distribution(distribution).exp()[0].tolist() == pytest.approx(
        [0.5, 0.25, 0.25, 0, 0]
    )
    assert Decoding(top_p=0.5).log_distribution(distribution).exp()[0].tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0, 0, 0]
    )
    uniform = torch.full((1, 10), 0.1).log()
    assert (~Decoding(top_p=0.45).log_distribution(uniform).isneginf()).sum() == 5


def test_greedy_is_the_likeliest_token() -> None:
    distribution = torch.log_softmax(torch.randn(20, 30), -1)
    drawn, _ = GREEDY.draw(distribution, torch.arange(20), torch.rand(20, dtype=torch.float64))
    assert torch.equal(drawn, distribution.argmax(-1))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
    ],
)
def test_bad_decodings_are_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(AuditError, match=f"expected {message}"):
        Decoding(**bad)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda w: sum(w) > 1e-3),
    st.floats(0, 1, exclude_max=True),
)
def test_inverse_cdf_finds_the_interval(weights: list[float], uniform: float) -> None:
    column, _ = draw_columns(
        torch.tensor([weights]), torch.tensor([0]), torch.tensor([uniform], dtype=torch.float64)
    )
    chosen = int(column)
    w = np.array(weights, dtype=np.float32).astype(float)
    assert w[chosen] > 0
    below, upto = w[:chosen].sum() / w.sum(), w[: chosen + 1].sum() / w.sum()
    assert below - 1e-9 <= uniform <= upto + 1e-9


def test_draws_near_a_boundary_are_counted() -> None:
    distribution = torch.tensor([[0.25, 0.75]])
    at = torch.tensor([0.25 - 1e-9, 0.25 + 1e-9, 0.2, 1 - 1e-12, 1e-12], dtype=torch.float64)
    _, near = draw_columns(distribution, torch.zeros(5, dtype=torch.long), at)
    assert near.tolist() == [True, True, False, False, False]


def naive(
    model: HuggingFaceModel, prefix: Tensor, length: int, decoding: Decoding, noise: np.ndarray
) -> list[list[int]]:
    """Every sample on its own, no cache, no splitting: the distribution of the whole context, then
    one inverse CDF."""
    result = []
    for row in noise:
        tokens = prefix.tolist()
        for position in range(length):
            distribution = model.log_probs(torch.tensor([tokens]), 1)[:, 0]
            weights = (
                decoding.get_step_decoding(position)
                .log_distribution(distribution)
                .double()
                .exp()[0]
            )
            cdf = torch.cumsum(weights, 0) / weights.sum()
            tokens.append(int(torch.searchsorted(cdf, torch.tensor(row[position, 0]), right=True)))
        result.append(tokens[len(prefix) :])
    return result


COOLING = Cooling(top_k=9, hot=4.0, steps=3)


@pytest.mark.parametrize(
    "decoding",
    [ANCESTRAL, Decoding(temperature=0.8, top_p=0.7), Decoding(top_k=5), COOLING],
    ids=str,
)
def test_count_splitting_equals_one_by_one_sampling_draw_for_draw(
    neox: HuggingFaceModel, decoding: Decoding
) -> None:
    prefixes = torch.randint(0, 61, (3, 7), generator=torch.Generator().manual_seed(1))
    noise = np.stack([draw_secret_uniforms(12, 6, 0, i) for i in range(3)])
    for prefix, row, found in zip(
        prefixes, noise, sample_candidates(neox, prefixes, 6, decoding, noise), strict=True
    ):
        expected: dict[tuple[int, ...], int] = {}
        for suffix in naive(neox, prefix, 6, decoding, row):
            expected[tuple(suffix)] = expected.get(tuple(suffix), 0) + 1
        got = {tuple(s.tolist()): int(c) for s, c in zip(found.suffixes, found.counts, strict=True)}
        assert got == expected
        assert list(got) == list(expected)  # in the order of the first sample


def test_a_temperature_falls_in_equal_steps_and_no_distribution_is_that_of_every_token() -> None:
    assert [COOLING.get_step_decoding(i).temperature for i in range(5)] == [4, 3, 2, 1, 1]
    assert {COOLING.get_step_decoding(i).top_k for i in range(5)} == {
        9
    } and not COOLING.is_ancestral
    assert str(COOLING) == "temperature 4 falling over 3 tokens, then top-k 9"
    distribution = torch.zeros(1, 20)
    for ask in (
        COOLING.log_distribution,
        lambda rows: COOLING.score_decoded_tokens(rows, torch.tensor([0])),
    ):
        with pytest.raises(TypeError, match="get_step_decoding"):
            ask(distribution)


def test_log_probabilities_while_sampling_are_those_of_a_second_pass(
    neox: HuggingFaceModel,
) -> None:
    prefixes = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(2))
    noise = np.stack([draw_secret_uniforms(20, 8, 0, i) for i in range(4)])
    for prefix, found in zip(
        prefixes, sample_candidates(neox, prefixes, 8, Decoding(top_p=0.8), noise), strict=True
    ):
        again = neox.token_log_probs(prefix.expand(len(found.suffixes), -1), found.suffixes)
        assert_same(found.token_log_probs, again)


@pytest.mark.parametrize("decoding", [ANCESTRAL, Decoding(temperature=0.8, top_p=0.7)], ids=str)
def test_tokens_do_not_depend_on_the_batch_size(neox: HuggingFaceModel, decoding: Decoding) -> None:
    prefixes = torch.randint(0, 61, (64, 8), generator=torch.Generator().manual_seed(3))
    noise = np.stack([draw_secret_uniforms(10, 6, 0, i) for i in range(64)])

    def run(size: int) -> list[SuffixCandidates]:
        return [
            c
            for i in range(0, 64, size)
            for c in sample_candidates(
                neox, prefixes[i : i + size], 6, decoding, noise[i : i + size]
            )
        ]

    for other in (1, 7):
        for a, b in zip(run(64), run(other), strict=True):
            assert torch.equal(a.suffixes, b.suffixes)
            assert torch.equal(a.counts, b.counts)
            assert a.token_log_probs is not None
            assert_same(a.token_log_probs, b.token_log_probs)


@pytest.mark.parametrize(
    "decoding", [ANCESTRAL, Decoding(temperature=0.8, top_p=0.7), Decoding(top_k=3)], ids=str
)
def test_samples_have_the_distribution_of_generate(make_tiny: MakeTiny, decoding: Decoding) -> None:
    """Two-sample chi-square on the pairs of two generated tokens, fixed seeds."""
    model = make_tiny(vocab_size=9, seed=4, scale=2.0)
    prefix = torch.tensor([[1, 2, 3]])
    n = 4000
    found = sample_candidates(model, prefix, 2, decoding, draw_secret_uniforms(n, 2, 7)[None])[0]
    torch.manual_seed(5)
    theirs = model.model.generate(
        prefix,
        attention_mask=torch.ones_like(prefix),
        do_sample=True,
        num_return_sequences=n,
        max_new_tokens=2,
        min_new_tokens=2,
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        suppress_tokens=None,
        eos_token_id=None,
        pad_token_id=0,
    )[:, 3:]
    ours = torch.repeat_interleave(found.suffixes, found.counts, dim=0)
    a, b = (np.bincount((t[:, 0] * 9 + t[:, 1]).numpy(), minlength=81) for t in (ours, theirs))
    big = a + b >= 10
    a, b = np.append(a[big], a[~big].sum()), np.append(b[big], b[~big].sum())
    a, b = a[a + b > 0], b[a + b > 0]
    statistic = ((a - b) ** 2 / (a + b)).sum()
    assert statistic < chi2.ppf(0.999, len(a) - 1)


def test_fewer_samples_are_the_first_of_more() -> None:
    assert np.array_equal(draw_secret_uniforms(3, 5, "k"), draw_secret_uniforms(10, 5, "k")[:3])
    assert not np.array_equal(draw_secret_uniforms(3, 5, "k"), draw_secret_uniforms(3, 5, "other"))


def test_batches_have_one_shape_and_lose_nothing() -> None:
    shapes = [(3, 2), (4, 2), (3, 2), (3, 1), (3, 2)]
    batches = list(group_equal_shapes(shapes, 2))
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]
    assert all(len({shapes[i] for i in batch}) == 1 and len(batch) <= 2 for batch in batches)


@pytest.mark.parametrize("forbidden", [(), (0, 7)])
@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 0.3), (1.0, 0.7), (0.8, 0.7), (0.5, 0.9), (1.5, 0.7)]
)
def test_a_nucleus_seen_at_a_glance_is_the_sorted_one(
    temperature: float, top_p: float, forbidden: tuple[int, ...]
) -> None:
    """Peaked and flat rows together; the naive nucleus sorts the vocabulary of every row."""
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 31, generator=noise, dtype=torch.float64) * torch.linspace(
        0.1, 12, 60
    ).unsqueeze(-1)
    distribution = logits.log_softmax(-1)
    decoding = Decoding(temperature=temperature, top_p=top_p, forbidden=forbidden)
    found = decoding.log_distribution(distribution).exp()
    alone = 0
    for row, log_probs in zip(found, distribution, strict=True):
        allowed = log_probs.clone()
        allowed[list(forbidden)] = -torch.inf
        p = (allowed / temperature).softmax(-1)
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        kept = order[(before < top_p) & (p[order] > 0)]
        naive = torch.zeros_like(p)
        naive[kept] = p[kept] / p[kept].sum()
        torch.testing.assert_close(row, naive)
        alone += len(kept) == 1
    assert 5 < alone < 60


@pytest.mark.parametrize("width", [1, 16, 97, 2048, 5003])
@pytest.mark.parametrize("count", [1, 16, 128])
def test_the_likeliest_of_blocks_are_the_likeliest(width: int, count: int) -> None:
    distribution = torch.randn(40, width, generator=torch.Generator().manual_seed(5))
    distribution[:20] = distribution[:20].round()  # ties
    distribution[10:30, ::3] = -torch.inf
    count = min(count, width)
    values, tokens = select_top_k(distribution, count)
    assert torch.equal(values, distribution.sort(-1, descending=True).values[:, :count])
    assert torch.equal(distribution.gather(1, tokens), values)
    assert all(len(set(row)) == count for row in tokens.tolist())


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
def test_equal_tokens_go_by_id_without_a_sort_of_the_vocabulary(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of a model in bfloat16: the last token that stays is often as likely as the first one
    that goes."""
    logits = (
        torch.randn(200, 5003, generator=torch.Generator().manual_seed(7))
        * torch.linspace(1, 9, 200)[:, None]
    )
    distributions = logits.bfloat16().float().log_softmax(-1)
    found, exact, sorted_in_full = decoding.log_distribution(distributions), Decoding._truncate, []

    def counted(
        self: Decoding, some: Tensor, total: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        sorted_in_full.append(len(some) * (width == some.shape[-1]))
        return exact(self, some, total, width)

    monkeypatch.setattr(Decoding, "_truncate", counted)
    decoding.log_distribution(distributions)
    assert decoding is ANCESTRAL or sum(sorted_in_full) < 10
    monkeypatch.setattr(decoding_module, "_NUCLEUS_GUESSES", ())
    assert torch.equal(found, decoding.log_distribution(distributions))


@pytest.mark.parametrize("decoding", [*DECODINGS, GREEDY], ids=str)
def test_logits_are_drawn_from_as_the_distribution_that_they_sum_to(decoding: Decoding) -> None:
    noise = torch.Generator().manual_seed(6)
    logits = (
        torch.randn(300, 5003, generator=noise) * torch.linspace(0.1, 9, 300).unsqueeze(-1) + 40
    )
    rows = torch.randint(300, (2000,), generator=noise)
    uniform = torch.rand(2000, dtype=torch.float64, generator=noise)
    total = compute_log_sum_exp(logits)
    assert torch.allclose(total, logits.logsumexp(-1), atol=1e-5)
    some = torch.tensor([7, 3, 3])
    assert torch.allclose(
        compute_log_sum_exp(logits, some, 1.25), (1.25 * logits[some]).logsumexp(-1), atol=2e-5
    )
    drawn, near = decoding.draw(logits, rows, uniform, total)
    distribution, close = decoding.draw(logits.double().log_softmax(-1), rows, uniform)
    assert bool(((drawn == distribution) | near | close).all())
    assert (near | close).sum() < 40


def test_no_distribution_is_written_and_no_vocabulary_sorted_for_a_narrow_nucleus(
    make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(vocab_size=2003, scale=8.0)
    prefixes = torch.arange(12).view(3, 4)
    expected = sample_candidates(
        model, prefixes, 5, Decoding(top_p=0.3), draw_secret_uniforms(20, 5, 1)[None].repeat(3, 0)
    )

    def refuse(*args: object, **options: object) -> Tensor:
        raise AssertionError("a whole vocabulary")

    monkeypatch.setattr(torch, "log_softmax", refuse)
    monkeypatch.setattr(Tensor, "sort", refuse)
    again = sample_candidates(
        model, prefixes, 5, Decoding(top_p=0.3), draw_secret_uniforms(20, 5, 1)[None].repeat(3, 0)
    )
    for one, other in zip(expected, again, strict=True):
        assert torch.equal(one.suffixes, other.suffixes)

"""The tree against enumeration of all suffixes, beam search against `generate`, both against the
sampler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.defenses.pmixed import PMixed
from auditor.defenses.uniform_mixing import UniformMixing
from auditor.generation import search
from auditor.generation.sample import SuffixCandidates, sample_candidates
from auditor.generation.search import TreeLeaves, beam_search, find_suffixes_above_threshold
from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL, GREEDY, Decoding
from auditor.models.ensemble import ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.rows import Rows
from auditor.plugins.defense import Scenario
from tests.rounding import assert_same

MakeTiny = Callable[..., HuggingFaceModel]
V, L = 5, 4
DECODINGS = [
    ANCESTRAL,
    Decoding(0.8, top_p=0.7),
    Decoding(top_k=3),
    Decoding(1.4, 4, 0.9),
    Decoding(forbidden=(2,)),
]


class Table(LanguageModel):
    """A distribution of its own behind every context of up to L tokens: logits drawn from the seed,
    sharper with `scale`."""

    capabilities = frozenset({"draw", "distribution"})
    name, vocab_size, max_positions, eos, device = "table", V, None, (0,), torch.device("cpu")

    def __init__(self, seed: int, scale: float) -> None:
        self.seed, self.scale = seed, scale
        self.rows = 0

    def distribution(self, tokens: tuple[int, ...]) -> Tensor:
        place = sum(t * V**i for i, t in enumerate(tokens)) + 10**6 * len(tokens)
        generator = np.random.default_rng([self.seed, place])
        return torch.log_softmax(
            torch.from_numpy(self.scale * generator.normal(size=V)).float(), -1
        )

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        return TableRows(self, prefixes)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def embedding_rows(self, count: int) -> Tensor:
        raise NotImplementedError


class TableRows(Rows):
    def __init__(self, model: Table, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        self._read()

    def _read(self) -> None:
        self.model.rows += len(self.tokens)
        self._distribution = torch.stack(
            [self.model.distribution(tuple(row)) for row in self.tokens.tolist()]
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def log_probs(self) -> Tensor:
        return self._distribution

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.tokens = torch.cat([self.tokens[parents], tokens[:, None]], dim=1)
        self._read()


def enumerated(
    model: Table, prefix: tuple[int, ...], decoding: Decoding
) -> dict[tuple[int, ...], float]:
    """The probability of all V^L suffixes, one distribution after another."""
    nodes = {(): 1.0}
    for _ in range(L):
        contexts = list(nodes)
        distributions = torch.stack(
            [model.distribution((*prefix, *context)) for context in contexts]
        )
        steps = decoding.log_distribution(distributions).double().exp().tolist()
        nodes = {
            (*c, t): nodes[c] * step[t]
            for c, step in zip(contexts, steps, strict=True)
            for t in range(V)
            if step[t]
        }
    return nodes


def found(leaves: TreeLeaves) -> dict[tuple[int, ...], float]:
    return dict(zip(map(tuple, leaves.suffixes.tolist()), leaves.log_q.exp().tolist(), strict=True))


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.floats(0.2, 5),
    st.floats(-5, 0).map(lambda x: 10**x),
    st.sampled_from(DECODINGS),
)
def test_the_tree_finds_what_reaches_the_threshold_and_nothing_else(
    seed: int, scale: float, threshold: float, decoding: Decoding
) -> None:
    model, prefixes = Table(seed, scale), torch.tensor([[1, 2], [4, 0]])
    for prefix, leaves in zip(
        prefixes.tolist(),
        find_suffixes_above_threshold(model, prefixes, L, decoding, threshold),
        strict=True,
    ):
        truth, mine, certificate = (
            enumerated(model, tuple(prefix), decoding),
            found(leaves),
            leaves.certificate,
        )
        assume(all(abs(math.log(q / threshold)) > 1e-4 for q in truth.values()))
        reach = {suffix for suffix, q in truth.items() if q >= threshold}
        assert certificate.reached == bool(reach)
        assert set(mine) == reach if reach else len(mine) == 1
        assert all(
            q == pytest.approx(truth[suffix], rel=1e-6, abs=1e-6) for suffix, q in mine.items()
        )
        assert list(mine.values()) == sorted(mine.values(), reverse=True)
        assert certificate.leftover == pytest.approx(
            1 - sum(truth[suffix] for suffix in mine), abs=1e-6
        )
        missed = max((q for suffix, q in truth.items() if suffix not in mine), default=0.0)
        assert missed <= certificate.pruned * (1 + 1e-5)
        if certificate.certified:
            assert max(mine.values()) >= missed * (1 - 1e-5)


def test_rounding_loses_nothing_that_is_exactly_at_the_threshold() -> None:
    """A uniform distribution: each of the suffixes has probability V^-L, up to the last bits."""
    uniform = Table(0, 0.0)
    for factor, n_found in ((1.0, V**L), (1 + 0.5e-5, V**L), (1 + 1.5e-5, 1)):
        threshold = factor * V**-L
        (leaves,) = find_suffixes_above_threshold(
            uniform, torch.tensor([[0]]), L, ANCESTRAL, threshold
        )
        assert len(leaves.suffixes) == n_found
        assert (leaves.certificate.leftover < 1e-5) == (n_found > 1)


def test_children_below_the_threshold_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary of 250,000 tokens, a copy of all would not fit: one of each node is kept."""
    mark, numbers = search._mark_surviving_children, []

    def mark_recorded(child_log_q: Tensor, *more: Any) -> Tensor:
        numbers.append(len(child_log_q))
        return mark(child_log_q, *more)

    monkeypatch.setattr(search, "_mark_surviving_children", mark_recorded)
    # At most one suffix is likelier than 0.5, so each step has one node.
    find_suffixes_above_threshold(Table(0, 0.2), torch.tensor([[0]]), L, ANCESTRAL, 0.5)
    assert numbers == [1] * L


def test_certificates_are_given_and_withheld() -> None:
    """What reaches the threshold is likelier than all that was pruned; below it, that has to be
    seen."""
    certificates = [
        find_suffixes_above_threshold(Table(s, 1.5), torch.tensor([[0]]), L, ANCESTRAL, 0.2)[
            0
        ].certificate
        for s in range(60)
    ]
    kinds = {(c.reached, c.certified) for c in certificates}
    assert kinds == {(True, True), (False, True), (False, False)}


def test_what_no_suffix_reaches_is_guessed_along_the_likeliest_node() -> None:
    model = Table(3, 1.0)
    leaves = find_suffixes_above_threshold(model, torch.tensor([[0, 1]]), L, ANCESTRAL, 1.0)[0]
    context = [0, 1]
    for _ in range(L):
        context.append(int(model.distribution(tuple(context)).argmax()))
    assert leaves.suffixes.tolist() == [context[2:]]
    assert not leaves.certificate.reached and not leaves.certificate.certified
    assert leaves.certificate.pruned == pytest.approx(
        float(model.distribution((0, 1)).exp().sort().values[-2])
    )
    assert leaves.rows == L


@pytest.mark.parametrize("threshold", [0.3, 0.01, 0.0005])
def test_live_nodes_are_bounded_and_rows_are_counted(threshold: float) -> None:
    model, prefixes = Table(5, 1.0), torch.tensor([[0, 1], [2, 2], [3, 1]])
    leaves = find_suffixes_above_threshold(model, prefixes, L, ANCESTRAL, threshold)
    assert sum(one.rows for one in leaves) == model.rows
    assert all(one.rows <= 1 + (L - 1) / threshold for one in leaves)
    for prefix, one in zip(prefixes, leaves, strict=True):
        alone = Table(5, 1.0)
        assert (
            find_suffixes_above_threshold(alone, prefix[None], L, ANCESTRAL, threshold)[0].rows
            == one.rows
            == alone.rows
        )


def same(first: TreeLeaves, second: TreeLeaves) -> None:
    assert torch.equal(first.suffixes, second.suffixes) and first.rows == second.rows
    assert_same(first.log_q, second.log_q)
    assert_same(first.token_log_probs, second.token_log_probs)
    assert first.certificate.certified == second.certificate.certified


@pytest.mark.parametrize(
    "decoding", [ANCESTRAL, Decoding(0.8, top_p=0.7), Decoding(top_k=4)], ids=str
)
def test_a_tree_does_not_depend_on_the_batch_and_its_numbers_are_the_models(
    neox: HuggingFaceModel, decoding: Decoding
) -> None:
    prefixes = torch.randint(0, 61, (8, 6), generator=torch.Generator().manual_seed(3))
    together = find_suffixes_above_threshold(neox, prefixes, 5, decoding, 0.004)
    assert any(len(leaves.suffixes) > 1 for leaves in together)
    divided = find_suffixes_above_threshold(neox, prefixes, 5, decoding, 0.004, max_rows=20)
    alone = [
        find_suffixes_above_threshold(neox, prefix[None], 5, decoding, 0.004)[0]
        for prefix in prefixes
    ]
    for prefix, whole, half, one in zip(prefixes, together, divided, alone, strict=True):
        same(whole, half)
        same(whole, one)
        contexts = torch.cat([prefix.expand(len(whole.suffixes), -1), whole.suffixes], dim=1)
        distributions = neox.log_probs(contexts[:, :-1], 5)
        picked = whole.suffixes.unsqueeze(-1)
        assert_same(whole.token_log_probs, distributions.gather(-1, picked).squeeze(-1))
        exact = (
            decoding.log_distribution(distributions.flatten(0, 1))
            .unflatten(0, distributions.shape[:2])
            .gather(-1, picked)
            .double()
        )
        assert_same(whole.log_q, exact.sum((-1, -2)))


@pytest.fixture(scope="module")
def defended(make_tiny: MakeTiny) -> dict[str, LanguageModel]:
    public = make_tiny(seed=1)
    ensemble = ModelEnsemble(public, [make_tiny(seed=s) for s in (2, 3)])
    scenario = Scenario(make_tiny(), public, ensemble, queries=40, answer_length=4)
    return {
        "none": scenario.target,
        "uniform-mixing": UniformMixing(weight=0.9).protect(scenario),
        "pmixed": PMixed(epsilon=1000.0, q=0.5).protect(scenario),
    }


@pytest.mark.parametrize("name", ["none", "uniform-mixing", "pmixed"])
def test_samples_hold_nothing_likely_that_the_tree_has_not(
    defended: dict[str, LanguageModel], name: str
) -> None:
    """And each leaf is drawn as often as its probability says, within 5 standard deviations."""
    model, decoding, threshold, n = defended[name], Decoding(0.8, top_p=0.7), 0.02, 2000
    prefixes = torch.tensor([[5, 6, 7], [9, 1, 30]])
    noise = np.stack([draw_secret_uniforms(n, 4, "twin", name, i) for i in range(2)])
    leaves = find_suffixes_above_threshold(model, prefixes, 4, decoding, threshold)
    assert any(one.certificate.reached for one in leaves)
    for drawn, one in zip(
        sample_candidates(model, prefixes, 4, decoding, noise), leaves, strict=True
    ):
        counts = dict(zip(map(tuple, drawn.suffixes.tolist()), drawn.counts.tolist(), strict=True))
        exact = found(one)
        for suffix, q in exact.items():
            assert abs(counts.get(suffix, 0) / n - q) < 5 * math.sqrt(q * (1 - q) / n) + 1e-9
        for suffix, count in counts.items():
            if suffix not in exact:
                assert count / n < threshold + 5 * math.sqrt(threshold / n)


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1, math.nan])
def test_a_threshold_that_is_no_probability_is_refused(threshold: float) -> None:
    with pytest.raises(AuditError, match=r"expected threshold in \(0, 1\]"):
        find_suffixes_above_threshold(Table(0, 1.0), torch.tensor([[0]]), L, ANCESTRAL, threshold)


# --- beam ---


@pytest.mark.parametrize("masked", [False, True], ids=["ordinary", "masked"])
@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_beam_search_is_that_of_generate(make_tiny: MakeTiny, kind: str, masked: bool) -> None:
    model = make_tiny(kind=kind, seed=3, scale=2.0)
    # end of text is likely: masking it matters
    model.model.get_output_embeddings().weight.data[0] *= 4
    prefixes = torch.randint(1, 61, (6, 7), generator=torch.Generator().manual_seed(2))
    length, beams = 8, 10
    ours = beam_search(model, prefixes, length, beams, forbidden=model.eos if masked else ())
    assert any(bool((one.suffixes == 0).any()) for one in ours) is not masked
    for prefix, one in zip(prefixes, ours, strict=True):
        theirs = model.model.generate(
            prefix[None],
            attention_mask=torch.ones(1, 7, dtype=torch.long),
            num_beams=beams,
            num_return_sequences=beams,
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            eos_token_id=0 if masked else None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            length_penalty=0.0,
        )
        assert torch.equal(one.suffixes, theirs.sequences[:, 7:])
        assert (-one.nll).tolist() == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
        alone = beam_search(
            model, prefix[None], length, beams, forbidden=model.eos if masked else ()
        )[0]
        assert torch.equal(alone.suffixes, one.suffixes)


def test_a_beam_of_one_is_greedy_and_a_wide_one_is_exhaustive() -> None:
    model, prefixes = Table(1, 1.5), torch.tensor([[0, 1], [2, 2]])
    greedy = sample_candidates(model, prefixes, L, GREEDY, np.zeros((2, 1, L, 3)))
    model.rows = 0
    for one, expected in zip(beam_search(model, prefixes, L, 1, forbidden=()), greedy, strict=True):
        assert torch.equal(one.suffixes, expected.suffixes) and one.rows == L
    assert model.rows == 2 * L
    allowed = [t for t in range(V) if t != 3]
    wide = beam_search(model, prefixes[:1], L, V**L, forbidden=(3,))[0]
    assert {tuple(s) for s in wide.suffixes.tolist()} == set(itertools.product(allowed, repeat=L))
    assert wide.nll.tolist() == sorted(wide.nll.tolist())
    with pytest.raises(AuditError, match="expected beams >= 1, got 0"):
        beam_search(model, prefixes, L, 0, forbidden=())


# --- what it costs ---


@given(
    st.lists(
        st.lists(st.integers(0, 2), min_size=4, max_size=4),
        min_size=1,
        max_size=20,
        unique_by=tuple,
    )
)
def test_rows_of_a_sample_are_its_distinct_partials(suffixes: list[list[int]]) -> None:
    candidates = SuffixCandidates(
        torch.tensor(suffixes), torch.ones(len(suffixes), dtype=torch.long), None
    )
    assert candidates.count_forward_rows() == sum(
        len({tuple(s[:t]) for s in suffixes}) for t in range(4)
    )


def test_rows_of_a_sample_are_those_that_were_run() -> None:
    model = Table(2, 1.0)
    drawn = sample_candidates(
        model,
        torch.tensor([[0], [1]]),
        L,
        ANCESTRAL,
        np.stack([draw_secret_uniforms(30, L, i) for i in range(2)]),
    )
    assert sum(one.count_forward_rows() for one in drawn) == model.rows

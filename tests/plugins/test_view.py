"""What an attacker may ask: one pass for one recipe, streams that belong to the secret, budgets
shared beforehand."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from auditor.attacks.ethicist import Ethicist
from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.attacks.untargeted import Untargeted
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Claim, Guesses, Query
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.defenses.pmixed import PMixed
from auditor.generation.sample import SuffixCandidates
from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL, Decoding
from auditor.models.ensemble import ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.rows import Rows
from auditor.plugins.defense import Defense, QueryBudget, Scenario
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Sampling, Setting, View
from auditor.runs.answer_remarks import list_single_sample_remarks
from auditor.runs.audit import Target, divide_query_budget
from auditor.runs.prefix_token import wrap_prefixed_model
from tests.rounding import assert_same

MakeTiny = Callable[..., HuggingFaceModel]
TOP_P = Sampling(6, Decoding(temperature=0.8, top_p=0.7))


class Counting(LanguageModel):
    """Counts the passes and the rows that are asked of the model it holds."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.name = model, model.name
        self.vocab_size, self.max_positions = model.vocab_size, model.max_positions
        self.eos, self.device = model.eos, model.device
        self.started: list[tuple[int, bool]] = []  # (prefixes, whether the distribution is read)

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        self.started.append((len(prefixes), distribution))
        return self.model.start(prefixes, length, prompt=prompt, distribution=distribution)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        return self.model.log_probs(contexts, last, prompt=prompt)

    def embedding_rows(self, count: int) -> Tensor:
        return self.model.embedding_rows(count)


@pytest.fixture
def counting(neox: HuggingFaceModel) -> Counting:
    return Counting(neox)


def queries(count: int = 5) -> list[Query]:
    tokens = torch.randint(1, 61, (count, 5), generator=torch.Generator().manual_seed(3)).tolist()
    return [Query(f"q{i}", tuple(row), 3 + i % 2) for i, row in enumerate(tokens)]


def view(model: LanguageModel, setting: Setting = WHITE_BOX, **more: Any) -> View:
    return View("target", model, setting, **{"seed": 0, **more})


def asked(
    seen: View, sampling: Sampling, of: Sequence[Query] | None = None, **more: Any
) -> dict[str, SuffixCandidates]:
    batches = seen.candidates(queries() if of is None else of, sampling, **more)
    return {query.id: candidates for batch in batches for query, candidates in batch}


def same(first: SuffixCandidates, second: SuffixCandidates) -> bool:
    return torch.equal(first.suffixes, second.suffixes) and torch.equal(first.counts, second.counts)


def total(started: list[tuple[int, bool]]) -> int:
    return sum(prefixes for prefixes, _ in started)


# --- one pass for one recipe ---


def test_attacks_with_one_recipe_share_one_pass(counting: Counting) -> None:
    seen = view(counting)
    first = asked(seen, TOP_P)
    assert total(counting.started) == 5
    again = asked(seen, TOP_P)
    assert total(counting.started) == 5  # not one more
    assert all(same(again[name], candidates) for name, candidates in first.items())


def test_a_pass_is_not_kept_in_memory(neox: HuggingFaceModel) -> None:
    """Of 20,000 secrets it is larger than any model; it comes back whole, the tree's certificate
    too."""
    for sampling in (
        TOP_P,
        Sampling(6, TOP_P.decoding, search="tree"),
        Sampling(6, TOP_P.decoding, search="beam"),
    ):
        seen = view(neox)
        first = asked(seen, sampling)
        expected, alive = (
            copy.deepcopy(first),
            [weakref.ref(candidates) for candidates in first.values()],
        )
        first.clear()
        gc.collect()
        assert not any(reference() for reference in alive)
        for name, again in asked(seen, sampling).items():
            mine, theirs = vars(again), vars(expected[name])
            assert type(again) is type(expected[name]) and set(mine) == set(theirs)
            for key, value in mine.items():
                assert (
                    torch.equal(value, theirs[key])
                    if torch.is_tensor(value)
                    else value == theirs[key]
                )


@pytest.mark.parametrize(
    ("sampling", "prompt"),
    [
        (Sampling(7, TOP_P.decoding), ""),
        (Sampling(6, Decoding(temperature=0.9, top_p=0.7)), ""),
        (Sampling(6, TOP_P.decoding, eos="masked"), ""),
        (Sampling(6, TOP_P.decoding, search="tree"), ""),
        (Sampling(6, TOP_P.decoding, search="beam"), ""),
        (TOP_P, "tuned on target"),
    ],
    ids=["samples", "decoding", "end of text", "tree", "beam", "prompt"],
)
def test_another_recipe_is_another_pass(
    counting: Counting, sampling: Sampling, prompt: str
) -> None:
    seen = view(counting)
    asked(seen, TOP_P)
    rows = counting.embedding_rows(2) if prompt else None
    asked(seen, sampling, soft_prompt=rows, prompt=prompt)
    assert total(counting.started) == 10


def test_searches_are_told_apart_by_what_they_depend_on(neox: HuggingFaceModel) -> None:
    """A tree by threshold and decoding, a beam by its width; neither by the number of samples."""
    seen = view(neox)

    def name(**options: Any) -> str:
        return seen.sampling_recipe_name(
            Sampling(**{"samples": 6, "decoding": TOP_P.decoding, **options}), ""
        )

    tree, beam = {"search": "tree"}, {"search": "beam"}
    others = [{"threshold": 0.02}, {"decoding": ANCESTRAL}, {"eos": "masked"}]
    assert (
        len({name(), name(**tree), name(**beam), *(name(**tree, **other) for other in others)}) == 6
    )
    assert name(**tree) == name(**tree, samples=7, beams=3) and name(**beam) == name(
        **beam, decoding=ANCESTRAL
    )
    assert len({name(**beam), name(**beam, beams=3), name(**beam, eos="masked")}) == 3


@pytest.mark.parametrize("decoding", [{"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_a_decoding_with_one_answer_is_drawn_from_once(
    neox: HuggingFaceModel, decoding: dict[str, Any]
) -> None:
    """In each attack; where the target draws ancestrally all samples are drawn, whatever the
    attack's decoding is."""
    for kind in (PerplexityRanking, Ethicist):
        attack = kind(samples=100, **{"temperature": 0.8, "top_p": 1.0, **decoding})
        asked, state = view(neox), {"tuned_on": "none"}
        many = list(attack.guess(asked, state, queries(2)))
        assert [(g.samples, [guess.count for guess in g.ranked]) for g in many] == [(1, [1])] * 2
        assert list(attack.sample_counts_by_recipe(asked).values()) == [1]
        assert "1 sample of each prefix, not 100" in list_single_sample_remarks(asked, attack)[0]
        claim = view(neox, TEXT_ONLY)
        assert list(attack.sample_counts_by_recipe(claim).values()) == [100]
        assert not list_single_sample_remarks(claim, attack)
    prompted = replace(Untargeted(generations=50), **decoding)
    behind = wrap_prefixed_model(neox, (1,))
    assert len(prompted.queries(view(behind), ())) == 1 and "1 text for each" in " ".join(
        prompted.notes(view(behind), {})
    )
    assert len(Untargeted(generations=50).queries(view(behind), ())) == 50


def test_only_what_is_new_is_drawn(counting: Counting) -> None:
    seen = view(counting)
    some = asked(seen, TOP_P, queries()[:2])
    everything = asked(seen, TOP_P)
    assert total(counting.started) == 5
    assert all(same(everything[name], some[name]) for name in some)


def test_inside_the_claim_recipes_that_differ_in_decoding_only_are_one(counting: Counting) -> None:
    """All of them draw from the served distribution: paid for once."""
    seen = view(counting, TEXT_ONLY)
    first = asked(seen, TOP_P)
    second = asked(seen, Sampling(6, Decoding(top_k=5)))
    assert total(counting.started) == 5 and all(same(second[name], first[name]) for name in first)


# --- streams belong to the secret ---


@pytest.mark.parametrize("setting", [TEXT_ONLY, WHITE_BOX], ids=lambda setting: setting.name)
@pytest.mark.parametrize("size", [1, 2, 64])
def test_draws_do_not_depend_on_the_batch(
    neox: HuggingFaceModel, setting: Setting, size: int
) -> None:
    expected = asked(view(neox, setting), TOP_P)
    found = asked(view(neox, setting, batch_size=size), TOP_P, list(reversed(queries())))
    assert all(same(found[name], candidates) for name, candidates in expected.items())


def test_batches_are_as_large_as_asked_for_and_of_one_shape(counting: Counting) -> None:
    asked(view(counting, batch_size=2), TOP_P)
    # three of length 3, two of length 4
    assert [prefixes for prefixes, _ in counting.started] == [
        2,
        1,
        2,
    ]


def test_fewer_samples_are_the_first_ones(neox: HuggingFaceModel) -> None:
    """Of the uniforms, and so of the draws: each of the few is among the many, as often at most."""
    many, few = (
        asked(view(neox), Sampling(12, TOP_P.decoding)),
        asked(view(neox), Sampling(5, TOP_P.decoding)),
    )
    for name, candidates in few.items():
        of_few, of_many = counted(candidates), counted(many[name])
        assert of_few.total() == 5 and of_few <= of_many
        assert list(of_few) == list(of_many)[: len(of_few)]  # in the order of their first sample
    seen = view(neox)
    few_noise = seen._uniform_draws_of_query(
        queries()[0], 5, seen.sampling_recipe_name(Sampling(5, TOP_P.decoding), "")
    )
    many_noise = seen._uniform_draws_of_query(
        queries()[0], 12, seen.sampling_recipe_name(Sampling(12, TOP_P.decoding), "")
    )
    assert (few_noise == many_noise[:5]).all()


def counted(candidates: SuffixCandidates) -> Counter[tuple[int, ...]]:
    return Counter(
        dict(zip(map(tuple, candidates.suffixes.tolist()), candidates.counts.tolist(), strict=True))
    )


@pytest.mark.parametrize("change", ["seed", "target", "setting", "prompt", "secret"])
def test_everything_else_has_a_stream_of_its_own(neox: HuggingFaceModel, change: str) -> None:
    base, other, prompt, query = view(neox, TEXT_ONLY), view(neox, TEXT_ONLY), "", queries()[0]
    if change == "seed":
        other.seed = 1
    elif change == "target":
        other.target_name = "defended"
    elif change == "setting":
        other = view(neox, WHITE_BOX)
    elif change == "prompt":
        prompt = "tuned"
    else:
        query = Query("another", query.prefix, query.length)
    ancestral = Sampling(4, ANCESTRAL)
    first = base._uniform_draws_of_query(queries()[0], 4, base.sampling_recipe_name(ancestral, ""))
    second = other._uniform_draws_of_query(query, 4, other.sampling_recipe_name(ancestral, prompt))
    assert not (first == second).any()


# --- the two settings ---


def test_the_claim_setting_draws_ancestrally_and_hides_the_distribution(counting: Counting) -> None:
    seen = view(counting, TEXT_ONLY)
    found = asked(seen, TOP_P)
    assert (
        seen.decoding_in_this_setting(TOP_P) == ANCESTRAL
        and seen.decoding_in_this_setting(Sampling(6, TOP_P.decoding, "masked")) == ANCESTRAL
    )
    assert all(distribution is False for _, distribution in counting.started)
    for candidates in found.values():
        assert candidates.token_log_probs is None
        with pytest.raises(ValueError, match="without access to the distribution"):
            _ = candidates.nll
    pairs = [((1, 2), (3,))]
    with pytest.raises(NotApplicable, match="log-probabilities"):
        seen.mean_nll(counting, pairs)
    for capability in ("distribution", "embeddings"):
        assert not seen.has_capability(capability)
        with pytest.raises(NotApplicable, match="in this setting only sampled tokens come back"):
            seen.require_capability(capability)
    seen.require_capability("draw")


def test_the_worst_case_gives_everything(counting: Counting) -> None:
    seen = view(counting)
    assert seen.decoding_in_this_setting(TOP_P) == TOP_P.decoding
    assert (
        seen.decoding_in_this_setting(Sampling(6, TOP_P.decoding, "masked")).forbidden
        == counting.eos
        == (0,)
    )
    for query in queries():
        candidates = asked(seen, TOP_P)[query.id]
        again = seen.mean_nll(
            counting, [(query.prefix, tuple(s)) for s in candidates.suffixes.tolist()]
        )
        assert (candidates.nll / query.length).tolist() == pytest.approx(again, abs=1e-5)


def test_what_candidates_share_is_read_once(
    neox: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tuple(range(1, 25))
    pairs = [
        (long, suffix) for suffix in ((5, 6, 7, 8), (5, 6, 7, 9), (5, 6), (5, 6, 7, 9), (4, 4, 4))
    ]
    pairs += [((1, 2, 4), (5, 6)), ((2, 2), (5, 6)), ((2, 2), (5, 7))]
    scores = []
    for prefix, suffix in pairs:
        distribution = neox.log_probs(torch.tensor([[*prefix, *suffix[:-1]]]), len(suffix))
        scores.append(-float(distribution[0].gather(-1, torch.tensor(suffix)[:, None]).mean()))
    # measures the cache once a model, by forwards of its own, which are not counted here
    neox.row_bytes(8)
    read, forward = 0, neox.model.forward

    def counted(**asked: Any) -> Any:
        nonlocal read
        read += asked["input_ids"].numel()
        return forward(**asked)

    monkeypatch.setattr(neox.model, "forward", counted)
    assert view(neox).mean_nll(neox, pairs) == pytest.approx(scores, abs=1e-5)
    # 24 tokens, then 5 | 4, 5 6 | 4 4, 5 6 7; three and 5 in one text; two and 5 in two texts,
    # since steps would cost more. The last of a text is never read.
    assert read == 24 + 2 + 2 + 1 + (3 + 1) + 2 * (2 + 1)


def test_a_reference_may_be_asked_in_every_setting(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    assert view(neox, TEXT_ONLY).mean_nll(make_tiny(seed=5), [((1, 2), (3, 4))])[0] > 0


def test_what_the_target_does_not_give_is_said(counting: Counting) -> None:
    class TextOnly(Counting):
        capabilities = frozenset({"draw"})

    text = TextOnly(counting.model)
    found = asked(view(text), TOP_P)
    assert all(candidates.token_log_probs is None for candidates in found.values())
    assert all(distribution is False for _, distribution in text.started)
    with pytest.raises(NotApplicable, match="does not give them"):
        view(text).require_capability("distribution")


# --- budgets ---

tokens = st.lists(st.integers(1, 30), max_size=12)


@given(tokens, st.integers(1, 200))
def test_stop_pays_whole_answers_in_secret_order(answers: list[int], budget: int) -> None:
    planned = {("r", f"s{i}"): count for i, count in enumerate(answers)}
    shared = divide_query_budget(QueryBudget(budget, "stop"), planned, lots=None)
    assert list(shared) == list(planned)[: len(shared)]
    assert all(shared[key] == planned[key] for key in shared) and sum(shared.values()) <= budget
    if len(shared) < len(planned):  # the next one would not have been paid for
        assert sum(shared.values()) + answers[len(shared)] > budget


@given(tokens, st.integers(1, 200))
def test_public_pays_the_first_tokens_and_answers_everybody(
    answers: list[int], budget: int
) -> None:
    planned = {("r", f"s{i}"): count for i, count in enumerate(answers)}
    shared = divide_query_budget(QueryBudget(budget, "public"), planned, lots=None)
    assert list(shared) == list(planned)
    assert sum(shared.values()) == min(budget, sum(answers))
    paid = list(shared.values())
    partial = [i for i, count in enumerate(paid) if count < answers[i]]
    # nothing is paid behind the first that is not paid in full
    assert all(paid[i] == 0 for i in partial[1:])


def test_without_an_allowance_nothing_is_covered_publicly_or_left_out(
    neox: HuggingFaceModel,
) -> None:
    seen = view(neox, TEXT_ONLY)
    assert seen.queries_within_allowance(TOP_P, "", queries()) == queries()
    seen.allowance = {(seen.sampling_recipe_name(TOP_P, ""), "q1"): 18}
    assert [query.id for query in seen.queries_within_allowance(TOP_P, "", queries())] == ["q1"]
    assert set(asked(seen, TOP_P)) == {"q1"}


@pytest.fixture(scope="module")
def defended(make_tiny: MakeTiny) -> tuple[LanguageModel, Scenario]:
    """q=1 and a huge epsilon: a draw that is paid for hardly ever comes from the public
    distribution."""
    public = make_tiny(seed=1)
    ensemble = ModelEnsemble(public, [make_tiny(seed=s, scale=6.0) for s in (2, 3)])
    scenario = Scenario(make_tiny(), public, ensemble, queries=40, answer_length=4)
    return PMixed(epsilon=1000.0, q=1.0).protect(scenario), scenario


def test_draws_past_the_budget_are_the_public_models(
    defended: tuple[LanguageModel, Scenario],
) -> None:
    """In the order of the samples, token by token, with the same uniforms."""
    model, scenario = defended
    assert scenario.public is not None
    query = Query("q", (5, 6, 7), 4)
    sampling = Sampling(10, ANCESTRAL)

    def drawn(of: LanguageModel, paid: int | None) -> Counter[tuple[int, ...]]:
        seen = view(of, TEXT_ONLY)
        if paid is not None:
            seen.allowance = {(seen.sampling_recipe_name(sampling, ""), "q"): paid}
        return counted(asked(seen, sampling, [query])["q"])

    public, private = drawn(scenario.public, None), drawn(model, None)
    assert public != private
    assert drawn(model, 0) == public
    assert drawn(model, 40) == private
    # 5 whole samples of 4 tokens are paid for: as many come from either side as the uniforms of
    # each side give.
    first = Sampling(5, ANCESTRAL)
    paid_half = drawn(model, 20)
    seen = view(model, TEXT_ONLY)
    assert counted(asked(seen, first, [query])["q"]) <= paid_half
    assert (paid_half - counted(asked(seen, first, [query])["q"])) <= public


def test_a_budget_that_ends_within_a_sample_ends_at_that_token(neox: HuggingFaceModel) -> None:
    """The uniforms of the token and of the member stay; only the subset size becomes none."""
    free, bound = view(neox, TEXT_ONLY), view(neox, TEXT_ONLY)
    name = free.sampling_recipe_name(TOP_P, "")
    query = queries()[1]  # 4 tokens
    bound.allowance = {(name, query.id): 6}
    without, within = (
        seen._uniform_draws_of_query(query, 3, name).reshape(-1, 3) for seen in (free, bound)
    )
    assert (within[:, [0, 2]] == without[:, [0, 2]]).all()
    assert (within[:6, 1] == without[:6, 1]).all() and (within[6:, 1] == -1).all()


# --- what is charged ---


class Paying(Defense):
    """Claims what was spent, and nothing else."""

    name = "paying"

    def claim(self, scenario: Scenario, spent: int) -> Claim:
        return Claim({}, 0.0, "", "", 0, "", "", spent_queries=spent)


class PrivateRecipe:
    def __init__(self, *samplings: Sampling) -> None:
        self.samplings = samplings

    def sample_counts_by_recipe(self, seen: View) -> dict[str, int]:
        return {
            seen.sampling_recipe_name(sampling, ""): sampling.samples for sampling in self.samplings
        }


def charged(
    neox: HuggingFaceModel,
    attacks: list[PrivateRecipe],
    allowance: dict[tuple[str, str], int] | None = None,
) -> int:
    scenario = Scenario(neox, None, None, 0, 0)
    target = Target("paying", "Paying", neox, "", Paying(), scenario)
    seen = view(neox, TEXT_ONLY, allowance=allowance)
    for attack in attacks:
        done = [
            Guesses(q.id, (), 6, 6 * q.length)
            for q in seen.queries_within_allowance(TOP_P, "", queries())
        ]
        target.spending.charge_claim(seen, attack, done)  # type: ignore[arg-type]
    claim = target.claim
    assert claim is not None
    return claim.spent_queries


def test_attacks_that_share_a_pass_are_charged_once(neox: HuggingFaceModel) -> None:
    once = 6 * sum(query.length for query in queries())
    # inside the claim: the same recipe
    same_distribution = PrivateRecipe(Sampling(6, Decoding(top_k=3)))
    assert (
        charged(neox, [PrivateRecipe(TOP_P)])
        == charged(neox, [PrivateRecipe(TOP_P), PrivateRecipe(TOP_P), same_distribution])
        == once
    )
    assert charged(neox, [PrivateRecipe(TOP_P), PrivateRecipe(Sampling(7, ANCESTRAL))]) > once


def test_what_the_public_model_answers_is_not_charged(neox: HuggingFaceModel) -> None:
    name = view(neox, TEXT_ONLY).sampling_recipe_name(TOP_P, "")
    planned = {(name, query.id): 6 * query.length for query in queries()}
    for exhaustion in ("public", "stop"):
        allowance = divide_query_budget(QueryBudget(50, exhaustion), planned, lots=None)
        spent = charged(neox, [PrivateRecipe(TOP_P), PrivateRecipe(TOP_P)], allowance)
        assert spent == {"public": 50, "stop": 18 + 24}[exhaustion]


@pytest.mark.parametrize("setting", [WHITE_BOX, TEXT_ONLY])
def test_samples_of_one_prefix_that_outgrow_memory_are_drawn_in_passes(
    counting: Counting, monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    recipe = Sampling(20, Decoding(temperature=1.5, top_p=0.9))
    whole = drawn(view(counting, setting), queries(2), recipe)
    assert [rows for rows, _ in counting.started] == [1, 1]  # a batch for each of the two lengths
    counting.started.clear()
    monkeypatch.setattr("auditor.plugins.view._ROWS_BYTES", 7 * counting.row_bytes(8))
    parts = drawn(view(counting, setting), queries(2), recipe)
    assert [rows for rows, _ in counting.started] == [1] * 6  # 7 + 7 + 6 samples each
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.suffixes, other.suffixes)
        assert torch.equal(one.counts, other.counts)
        assert one.near_boundary == other.near_boundary
        if setting is WHITE_BOX:
            assert_same(one.token_log_probs, other.token_log_probs)


@pytest.mark.parametrize(("setting", "word"), [(TEXT_ONLY, "claim"), (WHITE_BOX, "worst")])
def test_draws_stay_those_of_before_an_access_was_renamed(
    neox: HuggingFaceModel, setting: Setting, word: str
) -> None:
    seen, (query, *_) = view(neox, setting), queries()
    name = seen.sampling_recipe_name(Sampling(5, ANCESTRAL), "")
    before = draw_secret_uniforms(
        5, query.length, seen.seed, seen.target_name, word, name.split(" x ", 1)[1], query.id
    )
    assert (seen._uniform_draws_of_query(query, 5, name) == before).all()


def drawn(asked: View, some: Sequence[Query], recipe: Sampling) -> list[SuffixCandidates]:
    return [candidates for batch in asked.candidates(some, recipe) for _, candidates in batch]

"""InvisibleInk: its distribution by hand, records in a context as they are read, its claim held,
and what breaks it caught."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from auditor.attacks.claim_check import ClaimCheck
from auditor.attacks.prediction_audit import PredictionAudit
from auditor.benchmarks.data.fixed_distributions import FixedDistribution, build_fixed_ensemble
from auditor.cli import run_command_line
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Secret
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.defenses.invisible_ink import (
    InkOptions,
    InvisibleInk,
    InvisibleInkModel,
    bound_log_ratio_ranges,
    deal_records_into_context_batches,
)
from auditor.defenses.pmixed import PMixed
from auditor.generation.sample import sample_candidates
from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL, GREEDY
from auditor.models.ensemble import Ensemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.in_context import InContextEnsemble
from auditor.plugins.defense import Prompt, QueryBudget, Scenario, count_largest_lot
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.view import WHITE_BOX, ClaimTokenMeter, View
from auditor.privacy.accounting import (
    compute_bounded_range_rho,
    compute_rdp_budget,
    compute_zcdp_budget,
    compute_zcdp_epsilon,
    realised_pure_dp,
    realised_renyi,
)
from auditor.runs.audit import divide_query_budget
from tests.conftest import check_command, refuses, save_tiny, states

SECRETS = [Secret(f"s{i}", (0, 1, i % 2), (1, 0, 1), 1, alias=f"alias{i}") for i in range(4)]
PREFIXES = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 2, 4), (9, 9, 9)]
# of different lengths
RECORDS = [(*prefix, *range(20, 24 + i)) for i, prefix in enumerate(PREFIXES[:4])]


def prompts(records: Sequence[tuple[int, ...]] = RECORDS) -> tuple[Prompt, ...]:
    """The last one asks for no record."""
    own = [
        Prompt(f"s{i}", prefix, record)
        for i, (prefix, record) in enumerate(zip(PREFIXES, records, strict=False))
    ]
    return (*own, Prompt("n", PREFIXES[4]))


def scenario(public: LanguageModel, queries: int = 40) -> Scenario:
    return Scenario(public, public, None, queries, 4, prompts=prompts())


def served(
    held: Ensemble, clip: float = 0.3, temperature: float = 1.1, top_k: int = 0
) -> InvisibleInkModel:
    ink = InkOptions(clip, temperature, top_k)
    return InvisibleInkModel(held, ink, "ink", bound_log_ratio_ranges(ink, held.size))


# --- the distribution ---

PUBLIC, PRIVATE = (0.5, 0.3, 0.15, 0.05), ((0.1, 0.6, 0.2, 0.1), (0.5, 0.3, 0.1, 0.1))


def by_hand(clip: float, temperature: float, top_k: int) -> list[float]:
    """Token by token, from the paper's text."""
    least = sorted(PUBLIC, reverse=True)[(top_k or 4) - 1]
    weight = []
    for token, p0 in enumerate(PUBLIC):
        change = sum(min(clip, max(-clip, math.log(p[token] / p0))) for p in PRIVATE) / len(PRIVATE)
        inside = math.log(p0) >= math.log(least) - 2 * clip / len(PRIVATE)
        weight.append(math.exp((math.log(p0) + change) / temperature) if inside else 0.0)
    return [w / sum(weight) for w in weight]


@pytest.mark.parametrize(
    ("clip", "temperature", "top_k"), [(0.4, 1.0, 0), (0.4, 1.3, 2), (0.7, 0.8, 2), (5.0, 1.1, 1)]
)
def test_the_distribution_by_hand(clip: float, temperature: float, top_k: int) -> None:
    model = served(build_fixed_ensemble(PUBLIC, *PRIVATE), clip, temperature, top_k)
    distribution = model.log_probs(torch.tensor([[0]]), 1)[0, 0].exp()
    assert distribution.tolist() == pytest.approx(by_hand(clip, temperature, top_k), rel=1e-12)


def test_top_k_plus_is_of_the_public_distribution_alone() -> None:
    """At the authors' margin, 2C/B, it holds the public top-k and most of phi's; at 2C, all of
    both."""
    generator = torch.Generator().manual_seed(0)
    distributions = (
        torch.randn(200, 4, 30, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)
    )
    ink = InkOptions(0.5, 1.0, 5)
    best = (
        dataclasses.replace(ink, top_k=0)
        .clipped_mean_distribution(distributions)
        .topk(5, dim=-1)
        .indices
    )
    kept, wide = (ink.public_top_k_plus_mask(distributions[:, 0], batch) for batch in (3, 1))
    assert (
        kept.gather(-1, distributions[:, 0].topk(5, dim=-1).indices).all()
        and 5 < float(kept.sum(-1).double().mean()) < 8
    )
    assert 0.8 < float(kept.gather(-1, best).double().mean()) < 1 and wide.gather(-1, best).all()
    distribution = ink.clipped_mean_distribution(distributions)
    assert torch.equal(distribution > -math.inf, kept) and torch.allclose(
        distribution.exp().sum(-1), torch.ones(200, dtype=torch.float64)
    )


def test_the_ends_are_exact() -> None:
    held = build_fixed_ensemble((0.5, 0.5, 0.0), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5))
    context = torch.tensor([[0]])
    assert served(held, 0.0, 1.0).log_probs(context, 1)[0, 0].exp().tolist() == pytest.approx(
        [0.5, 0.5, 0.0]
    )
    # what the public distribution rules out stays so
    sure = served(held, 1.0, 1.0).log_probs(context, 1)[0, 0].exp().tolist()
    assert sure == pytest.approx([math.sqrt(2) / (1 + math.sqrt(2)), 1 / (1 + math.sqrt(2)), 0.0])


# --- records in a context ---


def test_records_are_read_in_front_of_the_text_by_the_batch_that_has_them(
    neox: HuggingFaceModel,
) -> None:
    """Batches of three: the last has one record only, and nothing in the place of the others."""
    case = scenario(neox)
    held = InContextEnsemble(neox, deal_records_into_context_batches(case, 3))
    assert [len(batch) for batch in held.batches.records] == [3, 1]
    for prefix, batch in (
        (PREFIXES[1], RECORDS[:3]),
        (PREFIXES[3], RECORDS[3:]),
        ((50, 51), RECORDS[:3]),
    ):
        text = torch.tensor([[*prefix, 11, 12]])
        distributions = held.distributions(text, torch.arange(4), 3)[0]  # (3, 4, V)
        for part in range(4):
            front = () if part == 0 or part > len(batch) else batch[part - 1]
            read = torch.tensor([[*front, *prefix, 11, 12]])
            torch.testing.assert_close(distributions[:, part], neox.log_probs(read, 3)[0])


def test_rows_agree_with_whole_contexts_however_they_split_and_end(neox: HuggingFaceModel) -> None:
    model = InvisibleInk(batch=3, clip=2.0).protect(scenario(neox))
    assert isinstance(model, InvisibleInkModel)
    texts = torch.tensor([PREFIXES[0], PREFIXES[3], PREFIXES[4]])
    rows = model.start(texts, 4)
    for parents, tokens in (([0, 0, 1, 2], [5, 6, 7, 8]), ([2, 0], [1, 2]), ([0, 0, 0], [3, 4, 5])):
        torch.testing.assert_close(
            rows.log_probs(), model.log_probs(texts, 1)[:, 0], atol=1e-5, rtol=1e-5
        )
        rows.advance(torch.tensor(parents), torch.tensor(tokens))
        texts = torch.cat([texts[parents], torch.tensor(tokens).unsqueeze(-1)], dim=1)
    torch.testing.assert_close(
        rows.log_probs(), model.log_probs(texts, 1)[:, 0], atol=1e-5, rtol=1e-5
    )


def test_draws_have_the_distribution_and_unpaid_ones_are_the_public_models() -> None:
    held = build_fixed_ensemble(PUBLIC, *PRIVATE)
    model, n = served(held, 1.5), 20_000
    for paid, distribution in (
        (0.5, model.log_probs(torch.tensor([[0]]), 1)),
        (-1.0, held.public.log_probs(torch.tensor([[0]]), 1)),
    ):
        noise = torch.from_numpy(np.random.default_rng(0).random((n, 3)))
        noise[:, 1] = paid
        drawn, _ = model.start(torch.tensor([[0]]), 1, distribution=False).draw(
            torch.zeros(n, dtype=torch.long), noise, ANCESTRAL
        )
        expected = n * distribution[0, 0].exp().numpy()
        observed = np.bincount(drawn.numpy(), minlength=4)
        assert ((observed - expected) ** 2 / expected).sum() < chi2.ppf(0.999, 3)
    rows = model.start(torch.tensor([[0]]), 1, distribution=False)
    with refuses("sampled", error=NotApplicable):
        rows.log_probs()
    with refuses("ancestral"):
        rows.draw(torch.zeros(1, dtype=torch.long), noise[:1], GREEDY)


def test_records_that_leave_no_room_are_refused(make_tiny: Any) -> None:
    """96 positions, rotary or not; a text that has room alone has none behind a record."""
    neox = make_tiny()
    long = (*PREFIXES[0], *[7] * 92)
    with refuses("96", "95"):
        InvisibleInk().protect(dataclasses.replace(scenario(neox), prompts=prompts([long])))
    model = InvisibleInk().protect(
        dataclasses.replace(scenario(neox), prompts=prompts([long[:60]]))
    )
    assert model.max_positions == 36
    with refuses("prefix"):
        sample_candidates(
            model, torch.tensor([[1, 2, 3]]), 40, ANCESTRAL, draw_secret_uniforms(1, 40, 0)[None]
        )
    with refuses("96"):
        model.log_probs(torch.tensor([[*PREFIXES[0], *[5] * 40]]), 1)


# --- what is claimed ---


@pytest.mark.parametrize(
    ("epsilon", "batch", "clip"),
    [
        (10, 7, 0.6041981063),
        (10, 15, 1.2947102278),
        (5, 31, 1.467592043),
        (1, 127, 1.3788884068),
        (8, 79, 5.6380838),
    ],
)
def test_the_clip_of_a_budget_is_the_papers(
    neox: HuggingFaceModel, epsilon: float, batch: int, clip: float
) -> None:
    """Formulas C4: T 500, tau 1.1, delta 1e-6; and back."""
    case = scenario(neox)
    defense = InvisibleInk(epsilon=epsilon, delta=1e-6, batch=batch, queries=500)
    claim = defense.claim(case, 500)
    assert claim.details["clip"] == pytest.approx(clip, rel=1e-7)
    assert (
        claim.epsilon["zero_out"] == pytest.approx(epsilon, rel=1e-9)
        and claim.epsilon["zero_out"] <= epsilon
    )
    again = InvisibleInk(clip=claim.details["clip"], delta=1e-6, batch=batch, queries=500).claim(
        case, 0
    )
    assert again.epsilon == pytest.approx(claim.epsilon) == claim.spent_epsilon
    assert claim.epsilon["replace"] == pytest.approx(
        compute_zcdp_epsilon(4 * compute_zcdp_budget(epsilon, 1e-6), 1e-6)
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 4),
    clip=st.sampled_from([0.01, 0.5, 4.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 2]),
)
@settings(deadline=None, max_examples=60)
def test_neighbours_as_they_are_served_stay_within_the_claim_at_every_order(
    seed: int, batch: int, clip: float, temperature: float, top_k: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((batch + 2, 4)) * rng.choice([1.0, 4.0, 25.0])
    public, *records, other = torch.tensor(logits).softmax(-1).tolist()
    changed = {"zero_out": [public, *records[1:]], "replace": [other, *records[1:]]}
    model = served(build_fixed_ensemble(public, *records), clip, temperature, top_k)
    p = model.log_probs(torch.tensor([[0]]), 1)[0, 0].numpy()
    assert model.promise is not None
    for relation, members in changed.items():
        q = served(build_fixed_ensemble(public, *members), clip, temperature, top_k).log_probs(
            torch.tensor([[0]]), 1
        )[0, 0]
        for order in (1.01, 2, 8, 64):
            realised = max(realised_renyi(p, q.numpy(), order), realised_renyi(q.numpy(), p, order))
            assert (
                realised
                <= order * compute_bounded_range_rho(model.promise[relation]) * (1 + 1e-9) + 1e-12
            )
        assert realised_pure_dp(p, q.numpy()) <= model.promise[relation] * (1 + 1e-9) + 1e-12


def test_pmixed_keeps_its_claim_for_a_record_in_the_context_of_each_member(
    neox: HuggingFaceModel,
) -> None:
    base = scenario(neox)
    batches = deal_records_into_context_batches(base, 2)
    first, second = batches.records
    mixing = PMixed(epsilon=10, alpha=3, q=1.0)
    served = []
    for records in ((first, second), ((first[0], ()), second), (first, ((), second[1]))):
        ensemble = InContextEnsemble(neox, dataclasses.replace(batches, records=records))
        asked = dataclasses.replace(base, ensemble=ensemble)
        assert mixing.claim(asked, 40).epsilon["zero_out"] == pytest.approx(10)
        served.append(mixing.protect(asked).log_probs(torch.tensor([PREFIXES[0]]), 1))
    share = compute_rdp_budget(10, 1e-5, 3) / 40
    whole, emptied, of_another_batch = [log_probs.double().numpy() for log_probs in served]
    for pair in ((whole, emptied), (emptied, whole)):
        assert 0 < realised_renyi(*pair, 3).item() <= share
    np.testing.assert_array_equal(whole, of_another_batch)


def test_the_claim_is_nearly_attained() -> None:
    """A record that is sure of one of two tokens, at a small clip: the bound is tight to the second
    order."""
    measured, said = checked(served(build_fixed_ensemble((0.5, 0.5), (1.0, 0.0)), 0.01, 1.0))
    assert measured["claim_violations"] == 0 and "VIOLATED" not in said
    assert 0 <= measured["margin_zero_out"] < 1e-3 and abs(measured["margin_range_zero_out"]) < 1e-9


def test_a_batch_pays_for_the_tokens_that_are_drawn_of_it(neox: HuggingFaceModel) -> None:
    """Two records a batch: each has its own budget, and the claim is about the one with the most
    tokens."""
    case, defense = scenario(neox), InvisibleInk(batch=2)
    lots = defense.budget_lots(case)
    assert lots == {"s0": 0, "s1": 0, "s2": 1, "s3": 1, "n": 0}
    draws = {("r", name): 10 for name in lots} | {("other", "s3"): 7}
    assert (
        count_largest_lot(draws, lots) == 30
        and count_largest_lot(draws, {}) == 57
        and count_largest_lot({}, lots) == 0
    )
    assert defense.fixed_token_budget(case) is None
    budget = InvisibleInk(batch=2, queries=25, on_exhaustion="public").fixed_token_budget(case)
    assert budget == QueryBudget(25, "public")
    shared = divide_query_budget(budget, draws, lots)
    assert shared == {**draws, ("r", "n"): 5, ("other", "s3"): 5}
    assert divide_query_budget(QueryBudget(15, "stop"), draws, lots) == {
        ("r", "s0"): 10,
        ("r", "s2"): 10,
    }
    assert (
        ClaimTokenMeter(draws, 30, lots).uncharged_token_count == 0
        and ClaimTokenMeter(draws, 30).uncharged_token_count == 27
    )
    claim = defense.claim(dataclasses.replace(case, queries=30), 30)
    assert claim.spent_epsilon == claim.epsilon and claim.details["batches"] == 2


def test_a_record_that_is_asked_of_another_batch_is_told(neox: HuggingFaceModel) -> None:
    twins = [(*PREFIXES[0], 20), (*PREFIXES[1], 21), (*PREFIXES[0], 22), (*PREFIXES[3], 23)]
    asked = tuple(Prompt(f"s{i}", record[:3], record) for i, record in enumerate(twins))
    case = dataclasses.replace(scenario(neox), prompts=asked)
    assert states(InvisibleInk(batch=2).remarks(case), "1 records", "lower bound")
    assert not any("lower bound" in said for said in InvisibleInk(batch=3).remarks(case))
    silent = dataclasses.replace(case, queries=0)
    assert any("one token" in said for said in InvisibleInk(batch=3).remarks(silent))
    assert not any("one token" in said for said in InvisibleInk(batch=3, queries=9).remarks(silent))


# --- faults ---


def checked(model: LanguageModel, **options: int) -> tuple[dict[str, float], str]:
    probe = ClaimCheck(**options)
    seen = observe_all_secrets(probe, View("t", model, WHITE_BOX, seed=0), SECRETS)
    said = [
        *(f"VIOLATED: {one}" for one in probe.claim_violations(SECRETS, seen)),
        *probe.notes(SECRETS, seen),
    ]
    return {m.name: m.value for m in probe.measurements(SECRETS, seen)}, "\n".join(said)


class ClipForgotten(InvisibleInkModel):
    def released_token_distribution(self, distributions: Tensor) -> Tensor:
        return dataclasses.replace(self.ink, clip=math.inf).clipped_mean_distribution(distributions)


class OneRecordLess(InvisibleInkModel):
    """Counts the public prompt among the batch, and averages over the records alone."""

    def __init__(
        self, held: Ensemble, ink: InkOptions, name: str, promise: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(held, ink, name, bound_log_ratio_ranges(ink, held.size + 1))


class TemperatureIgnored(InvisibleInkModel):
    def released_token_distribution(self, distributions: Tensor) -> Tensor:
        return dataclasses.replace(self.ink, temperature=1.0).clipped_mean_distribution(
            distributions
        )


class PrivateTopK(InvisibleInkModel):
    """The k likeliest by what the records say."""

    def released_token_distribution(self, distributions: Tensor) -> Tensor:
        distribution = dataclasses.replace(self.ink, top_k=0).clipped_mean_distribution(
            distributions
        )
        private = distributions[..., 1:, :].double().mean(-2)
        least = private.topk(2, dim=-1).values[..., -1:]
        return distribution.masked_fill(private < least, -math.inf).log_softmax(-1)


class DrawsUnclipped(InvisibleInkModel):
    """Says the clipped distribution, and draws from another."""

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Any:
        if distribution:
            return super().start(prefixes, length, prompt=prompt)
        return ClipForgotten(self.ensemble, self.ink, self.name).start(
            prefixes, length, distribution=False
        )


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (InvisibleInkModel, ""),
        (ClipForgotten, "range zero out, order inf"),
        (OneRecordLess, "range zero out, order inf"),
        (TemperatureIgnored, "range zero out, order inf"),
        (PrivateTopK, "zero out, order 2: inf nats realised"),
        (DrawsUnclipped, "drawn tokens do not have the distribution"),
    ],
)
def test_faults_are_caught_on_a_real_model_that_reads_records(
    fault: type[InvisibleInkModel], where: str, neox: HuggingFaceModel
) -> None:
    ink = InkOptions(0.2 if fault is not DrawsUnclipped else 1e-3, 1.4, 2)
    held: Ensemble = InContextEnsemble(neox, deal_records_into_context_batches(scenario(neox), 3))
    if fault is DrawsUnclipped:  # a tiny model's records change little: distributions that do
        held = build_fixed_ensemble((0.6, 0.4), (0.99, 0.01), (0.99, 0.01))
    measured, said = checked(
        fault(held, ink, "faulty", bound_log_ratio_ranges(ink, held.size)),
        draws=400 if "drawn" in where else 16,
    )
    assert (measured["claim_violations"] > 0) == bool(where)
    assert not where or any(
        where in line for line in said.splitlines() if line.startswith("VIOLATED")
    )


@pytest.mark.parametrize(("fault", "broken"), [(InvisibleInkModel, False), (ClipForgotten, True)])
def test_games_see_a_forgotten_clip_and_accuse_nobody(
    fault: type[InvisibleInkModel], broken: bool
) -> None:
    held = build_fixed_ensemble((0.5, 0.5), (0.95, 0.05), (0.5, 0.5))
    ink = InkOptions(0.05, 1.0)
    model = fault(held, ink, "ink", bound_log_ratio_ranges(ink, 2))
    claim = InvisibleInk(clip=0.05, batch=2, temperature=1.0, queries=30).claim(
        scenario(FixedDistribution((0.5, 0.5))), 0
    )
    probe, view = PredictionAudit(games=2000), View("t", model, WHITE_BOX, seed=0, claim=claim)
    seen = observe_all_secrets(probe, view, SECRETS)
    (audit,) = probe.epsilon_lower_bounds(SECRETS, seen)
    assert audit.unit == claim.unit and audit.relation == "zero_out"
    assert (audit.epsilon > claim.epsilon["zero_out"]) == broken


# --- as a user runs it ---


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"epsilon": 0.0}, ("epsilon", "0", "1,000", "0")),
        ({"epsilon": math.nan}, ("epsilon", "1,000", "nan")),
        ({"delta": 1.0}, ("delta", "0", "1", "1")),
        ({"batch": 0}, ("batch", "1,024", "0")),
        ({"clip": -1.0}, ("clip", "0")),
        ({"temperature": 0.0}, ("temperature", "0", "0")),
        ({"top_k": -1}, ("top_k", "0", "-1")),
        ({"queries": -5}, ("queries", "0")),
        ({"on_exhaustion": "ask"}, ("on_exhaustion",)),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], facts: tuple[str, ...]) -> None:
    with refuses(*facts):
        InvisibleInk(**options)


def test_without_private_records_it_is_refused(neox: HuggingFaceModel) -> None:
    with refuses("context"):
        InvisibleInk().protect(dataclasses.replace(scenario(neox), prompts=()))


def test_an_audit_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row with its controls, its claim and what was spent of it, batch by batch; without
    --public, one sentence."""
    save_tiny(tmp_path / "model")
    texts = [{"prefix": f"door {i} ", "suffix": f"is {i * 7919:05d}"} for i in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    asked = [
        "run",
        "--model",
        "model",
        "--data",
        "data.jsonl",
        "--prefix-length",
        "7",
        "--suffix-length",
        "8",
    ]
    asked += [
        "--attack",
        "ethicist",
        "--attack",
        "claim-check",
        "-A",
        "tune_on=none",
        "-A",
        "samples=2",
    ]
    asked += ["-A", "prompt_length=1"]
    asked += [
        "--defense",
        "invisible-ink",
        "-D",
        "invisible-ink.batch=4",
        "-o",
        "run",
        "--setting",
        "both",
    ]
    assert run_command_line(asked) == 2 and "needs --public MODEL" in capsys.readouterr().err
    check_command(*asked, "--public", "model")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    targets = {target["name"]: target for target in result["targets"]}
    assert set(targets) == {"undefended", "invisible-ink", "references-unclipped", "public"}
    claim = targets["invisible-ink"]["claim"]
    assert claim["queries"] == claim["spent_queries"] == 4 * 2 * 8  # of the larger of two batches
    assert claim["epsilon"]["zero_out"] == pytest.approx(8) and claim["unit"] == "reference"
    assert claim["details"]["batches"] == 2
    checks = [
        f
        for f in result["findings"]
        if f["attack"] == "claim-check" and f["target"] == "invisible-ink"
    ]
    assert [
        m["value"] for f in checks for m in f["measurements"] if m["name"] == "claim_violations"
    ] == [0]

"""Games of private prediction: draws have their distribution, bounds hold as often as they say,
broken services are caught."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2

from auditor.attacks.prediction_audit import PredictionAudit, PredictionDistinguishingGame
from auditor.benchmarks.data.fixed_distributions import FixedDistribution, build_fixed_ensemble
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Claim, Secret
from auditor.core.result import Audited, Measurement
from auditor.defenses.pmixed import PMixed, UnmixedEnsemble
from auditor.defenses.pmixed_model import (
    PMixedMemberProjection,
    PMixedModel,
    build_unmixed_projection,
)
from auditor.defenses.uniform_mixing import UniformMixing, UniformMixingModel
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble, ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.rows import Rows
from auditor.plugins.defense import Scenario
from auditor.plugins.probe import Observed, observe_all_secrets
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, View
from auditor.runs.prefix_token import wrap_prefixed_model
from auditor.statistics.audited import explain_powerless_audit
from auditor.statistics.composition import compute_exact_game_epsilon
from auditor.statistics.games import audit_games, count_confusion, epsilon_clopper_pearson
from tests.conftest import refuses, states

MakeTiny = Callable[..., HuggingFaceModel]
SECRETS = [Secret(f"s{i}", (0, 1, i % 2), (1, 0, 1), 1, True, alias=f"alias{i}") for i in range(3)]
CONTEXT = torch.tensor([[0, 1, 0]])


def scenario(held: Ensemble, queries: int = 1) -> Scenario:
    return Scenario(held.public, held.public, held, queries, 3)


def three(queries: int = 1) -> Scenario:
    return scenario(
        build_fixed_ensemble((0.2, 0.4, 0.4), (0.9, 0.05, 0.05), (0.1, 0.8, 0.1), (0.1, 0.1, 0.8)),
        queries,
    )


def audit(
    model: LanguageModel,
    claim: Claim | None = None,
    public: LanguageModel | None = None,
    secrets: list[Secret] = SECRETS,
    **options: object,
) -> tuple[dict[str, Measurement], Audited, list[str], Observed]:
    probe = PredictionAudit(**options)  # type: ignore[arg-type]
    view = View("t", model, WHITE_BOX, seed=0, public=public, claim=claim)
    seen = observe_all_secrets(probe, view, secrets)
    measured = {m.name: m for m in probe.measurements(secrets, seen)}
    return (
        measured,
        probe.epsilon_lower_bounds(secrets, seen)[0],
        list(probe.notes(secrets, seen)),
        seen,
    )


# --- neighbours: as they are said to be, and as they are drawn from ---


@pytest.mark.parametrize(
    "defense",
    [
        PMixed(q=0.5, alpha=3, adjacency="add_remove"),
        PMixed(q=0.5, alpha=3, adjacency="replace"),
        PMixed(q=0.5, alpha=3, accounting="published"),
        UnmixedEnsemble(),
    ],
)
def test_a_neighbour_is_served_as_the_accounting_has_it(
    make_tiny: MakeTiny, defense: PMixed | UnmixedEnsemble
) -> None:
    members = [make_tiny(vocab_size=9, seed=s + 1, scale=2.0) for s in range(3)]
    model = defense.protect(scenario(ModelEnsemble(make_tiny(vocab_size=9, scale=2.0), members), 5))
    contexts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    offered = model.neighbour_distributions(contexts, 3, [0, 2])
    assert {n.relation for n in offered} <= {"zero_out", "add_remove", "replace"} and offered
    for neighbours in offered:
        assert neighbours.log_probs.shape == (2, 2, 3, 9)
        for i in range(3):
            own = model.neighbour_model(neighbours.relation, i)
            torch.testing.assert_close(
                neighbours.log_probs[:, :, i].exp().float(),
                own.log_probs(contexts, 3)[:, [0, 2]].exp().float(),
                atol=1e-5,
                rtol=1e-4,
            )
    (one,) = wrap_prefixed_model(model, (2,)).neighbour_distributions(contexts[:, :2], 1, [0])[:1]
    behind = wrap_prefixed_model(model, (2,)).neighbour_model(one.relation, 1)
    distribution = model.neighbour_model(one.relation, 1).log_probs(torch.tensor([[2, 1, 2]]), 1)
    assert torch.allclose(behind.log_probs(contexts[:1, :2], 1), distribution)


def test_the_only_member_that_is_absent_leaves_the_public_model() -> None:
    held = build_fixed_ensemble((0.2, 0.8), (0.9, 0.1))
    model = PMixed(q=0.5, adjacency="add_remove").protect(scenario(held))
    assert model.neighbour_model("add_remove", 0) is held.public


@pytest.mark.parametrize(
    "options", [{}, {"public_top_k": 2}, {"public_top_k": 2, "tail": "public"}]
)
def test_the_worst_neighbour_of_uniform_mixing_attains_its_claim(
    options: dict[str, object],
) -> None:
    public, target = FixedDistribution([0.5, 0.3, 0.2]), FixedDistribution([1.0, 0.0, 0.0])
    defense = UniformMixing(weight=0.6, **options)  # type: ignore[arg-type]
    case = Scenario(target, public, None, 1, 3)
    model = defense.protect(case)
    (offered,) = model.neighbour_distributions(CONTEXT, 2, [0, 1])
    for i in range(2):
        own = model.neighbour_model(offered.relation, i)
        assert torch.allclose(offered.log_probs[:, :, i], own.log_probs(CONTEXT, 2))
        rows = own.start(CONTEXT, 1)
        assert torch.allclose(rows.log_probs(), own.log_probs(CONTEXT, 1)[:, 0])
        rows.advance(torch.tensor([0]), torch.tensor([1]))
        assert torch.allclose(
            rows.log_probs(), own.log_probs(torch.tensor([[0, 1, 0, 1]]), 1)[:, 0]
        )
    distributions = (
        m.log_probs(CONTEXT, 1)[0, 0].numpy()
        for m in (model, model.neighbour_model(offered.relation, 0))
    )
    (claimed,) = defense.claim(case, 0).epsilon.values()
    assert compute_exact_game_epsilon(*distributions, 1, 0.0) == pytest.approx(claimed)


@pytest.mark.parametrize("relation", ["zero_out", "add_remove", "replace"])
@pytest.mark.parametrize("q", [0.3, 1.0])
def test_draws_have_the_distribution_that_is_scored_by(relation: str, q: float) -> None:
    model = PMixed(q=q, adjacency="add_remove").protect(three())
    n = 20_000
    for served in (model, model.neighbour_model(relation, 1)):
        game = PredictionDistinguishingGame(served, served, CONTEXT, 5)
        drawn = torch.cat(
            list(game._draw_game_token_batches(served, n // 5, np.random.default_rng(0)))
        )
        expected = n * np.exp(game.both_log_distributions[0])
        observed = np.bincount(drawn.flatten().numpy(), minlength=3)
        assert ((observed - expected) ** 2 / expected).sum() < chi2.ppf(0.999, 2)


# --- the chain: bound, exact, claim ---


def test_bounds_are_too_high_as_seldom_as_they_say() -> None:
    """Randomised response: uniform mixing over two tokens, whose epsilon is log((1 + w) / (1 -
    w))."""
    weight, audits, games = 0.6, 400, 120
    model = UniformMixingModel(FixedDistribution([1.0, 0.0]), weight, 1.0)
    truth = math.log((1 + weight) / (1 - weight))
    game = PredictionDistinguishingGame(
        model, model.neighbour_model("any_two_models", 0), CONTEXT, 1
    )
    assert compute_exact_game_epsilon(*game.both_log_distributions, 1, 0.0) == pytest.approx(truth)
    bounds = []
    for seed in range(audits):
        scores, coins = game.draw_game_scores(games, "coverage", seed)
        bounds.append(
            epsilon_clopper_pearson(*count_confusion(scores, coins, 0.0, 0.05), 0.0, 0.05)
        )
    assert sum(bound > truth for bound in bounds) <= binom.ppf(0.999, audits, 0.05)
    assert np.median(bounds) > 0.5 * truth  # and they say something


@pytest.mark.parametrize("relation", ["", "zero_out", "replace"])
def test_what_is_proved_is_below_what_is_so_which_is_below_what_is_claimed(relation: str) -> None:
    defense = PMixed(epsilon=2.0, alpha=9, q=1.0, adjacency="add_remove")
    case = three(4)
    model, claim = defense.protect(case), defense.claim(case, 0)
    measured, bound, notes, seen = audit(model, claim, games=20_000, tokens=100, relation=relation)
    assert 0 < measured["epsilon_lower_bound"].value <= measured["epsilon_exact"].value
    assert measured["epsilon_exact"].value <= claim.epsilon[relation or "add_remove"] < bound.best
    assert (
        bound.relation == (relation or "add_remove")
        and bound.unit == "shard"
        and bound.delta == claim.delta
    )
    assert bound.canaries == sum(bound.table or ()) == 15_000 and bound.right / bound.canaries > 0.5
    assert (
        measured["epsilon_lower_bound"].high == math.inf
        and "one-sided" in measured["epsilon_lower_bound"].note
    )
    assert states(notes[:1], "4") and states(notes[2:3], "charged")
    assert seen.facts["tokens"] == 4


def test_one_token_of_a_thousand_cannot_have_contradicted_the_claim_of_them_all() -> None:
    """100,000 games: all-right guesses would have proved more than the claim, and cannot come of
    what they look at."""
    case, defense = three(1024), PMixed(epsilon=8.0, alpha=9)
    model, claim = defense.protect(case), defense.claim(case, 0)
    measured, bound, notes, _ = audit(model, claim, games=100_000, tokens=1)
    assert bound.epsilon == 0 and bound.best > claim.epsilon[claim.relation]
    assert (bound.tokens, bound.covered, bound.exact) == (1, 1024, measured["epsilon_exact"].value)
    assert states([explain_powerless_audit(bound, claim.epsilon[claim.relation])], "1", "1,024")
    assert states(notes[:1], "1", "1,024")
    _, all_of_them, _, _ = audit(model, claim, games=64, tokens=4096)
    assert all_of_them.tokens == all_of_them.covered == 1024


def test_a_published_claim_is_played_by_every_relation_and_held_as_published() -> None:
    case, defense = three(1), PMixed(accounting="published", alpha=3, q=0.5)
    _, bound, notes, seen = audit(defense.protect(case), defense.claim(case, 0), games=1000)
    assert bound.relation == "as published" and states(notes, "as published")
    assert {"reach_zero_out", "reach_add_remove"} <= set(seen[0].values)


def test_controls_claim_nothing_and_show_what_there_is_to_see() -> None:
    case = three()
    _, unmixed, notes, _ = audit(UnmixedEnsemble().protect(case), games=400)
    assert unmixed.epsilon > 2 and unmixed.relation == "zero_out" and unmixed.delta == 1e-5
    _, undefended, notes, _ = audit(
        FixedDistribution([0.9, 0.1]), public=FixedDistribution([0.1, 0.9]), games=400, tokens=20
    )
    assert undefended.epsilon > 2 and undefended.relation == "any_two_models"
    assert states(notes[:1], "public model")
    _, public, _, _ = audit(
        FixedDistribution([0.5, 0.5]), public=FixedDistribution([0.5, 0.5]), games=400
    )
    assert public.epsilon == 0


def test_games_are_the_same_in_both_settings_and_of_every_batch_size() -> None:
    case, defense = three(8), PMixed(epsilon=2.0, alpha=9, q=0.5)
    model, claim = defense.protect(case), defense.claim(case, 0)
    probe, found = PredictionAudit(games=200), []
    for setting, batch in ((TEXT_ONLY, None), (WHITE_BOX, 1)):
        view = View("t", model, setting, seed=3, claim=claim, batch_size=batch)
        found.append(probe.epsilon_lower_bounds(SECRETS, observe_all_secrets(probe, view, SECRETS)))
    assert found[0] == found[1]


# --- what is broken ---


class Broken(PMixedModel):
    """Says the distribution that was promised, and draws from the members as they are."""

    def start(
        self,
        prefixes: torch.Tensor,
        length: int,
        *,
        prompt: object = None,
        distribution: bool = True,
    ) -> Rows:
        if distribution:
            return super().start(prefixes, length)
        return PMixedModel(self.ensemble, 1.0, self._drawn_by, self.name).start(
            prefixes, length, distribution=False
        )

    @staticmethod
    def _drawn_by(members: int) -> PMixedMemberProjection:
        return build_unmixed_projection(members)


def test_tokens_that_do_not_come_from_the_distribution_contradict_the_claim() -> None:
    case, defense = three(16), PMixed(epsilon=1.0, alpha=18, q=0.5)
    honest, claim = defense.protect(case), defense.claim(case, 0)
    assert isinstance(honest, PMixedModel)
    broken = Broken(case.ensemble, honest.q, honest.served, honest.name, honest.promise)
    assert audit(honest, claim, games=4000)[1].epsilon <= claim.epsilon["zero_out"]
    measured, bound, _, _ = audit(broken, claim, games=4000)
    # no distribution says so: the draws do
    assert bound.epsilon > claim.epsilon["zero_out"] > measured["epsilon_exact"].value


def test_the_published_rule_is_refuted_at_one_member() -> None:
    """The sum of Theorem C.4 takes beta k for what may be beta alpha; the higher alpha, the
    more it leaves out."""
    defense = PMixed(epsilon=1.0, alpha=20, q=0.03, accounting="published")
    case = scenario(build_fixed_ensemble((0.145, 0.855), (1.0, 0.0)), 64)
    claim = defense.claim(case, 0)
    _, bound, _, _ = audit(defense.protect(case), claim, games=20_000)
    assert bound.epsilon > claim.epsilon["as published"] == pytest.approx(1.0)
    sound = dataclasses.replace(defense, accounting="sound")
    assert audit(sound.protect(case), sound.claim(case, 0), games=20_000)[1].epsilon < 1.0


# --- where there is nothing to play ---


def test_what_cannot_be_played_is_not_applicable() -> None:
    trained = Claim(
        {"add_remove": 8.0}, 1e-5, "add_remove", "record", None, "", "sound", any_access=True
    )
    with refuses("trained", error=NotApplicable):
        audit(FixedDistribution([0.5, 0.5]), trained, FixedDistribution([0.5, 0.5]))
    with refuses("--public", error=NotApplicable):
        audit(FixedDistribution([0.5, 0.5]))
    with refuses("zero_out", "replace", "add_remove", error=NotApplicable):
        audit(PMixed().protect(three()), PMixed().claim(three(), 0), relation="add_remove")


def test_options_that_mean_nothing_are_refused() -> None:
    for options in (
        {"games": 63},
        {"tokens": 0},
        {"positions": -1},
        {"delta": 1.0},
        {"level": 0.0},
    ):
        with refuses(*options):
            PredictionAudit(**options)  # type: ignore[arg-type]


def test_scores_that_are_no_numbers_are_refused() -> None:
    coins = np.arange(64) % 2 == 0
    with refuses("NaN", "64", "64"):
        count_confusion(np.full(64, math.nan), coins, 0.0, 0.05)
    with refuses("64"):
        count_confusion(np.zeros(63), coins[:63], 0.0, 0.05)


def test_the_threshold_is_taught_by_games_that_do_not_count() -> None:
    coins = np.arange(400) % 2 == 0
    scores = np.where(coins, 1.0, 0.0)
    assert count_confusion(scores, coins, 0.0, 0.05) == (150, 0, 0, 150)
    bound, right = (
        audit_games(games, 0.0, 0.05) for games in ((100, 50, 50, 100), (150, 0, 0, 150))
    )
    assert bound.epsilon < bound.best == right.epsilon and bound.right == 200
    # the first quarter tells nothing: all are guessed alike
    late = np.where(np.arange(400) < 100, 0.0, scores)
    tp, fn, fp, tn = count_confusion(late, coins, 0.0, 0.05)
    assert (tp + fn, fp + tn) == (150, 150) and epsilon_clopper_pearson(tp, fn, fp, tn, 0.0) == 0

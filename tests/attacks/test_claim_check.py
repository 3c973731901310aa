"""The claim check: what is sound holds, what is broken on purpose is caught, and nobody is accused
for nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from auditor.attacks.claim_check import (
    ClaimCheck,
    list_claim_faults,
    space_suffix_positions,
    summarise_text_checks,
)
from auditor.benchmarks.data.fixed_distributions import FixedDistribution, build_fixed_ensemble
from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.benchmarks.lab.lab_texts import make_lab_texts
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Observation, Secret
from auditor.core.result import Measurement
from auditor.defenses.pmixed import PMixed, UnmixedEnsemble
from auditor.defenses.pmixed_model import PMixedMemberProjection, PMixedModel
from auditor.defenses.uniform_mixing import UniformMixing, UniformMixingModel
from auditor.models.base import DivergenceCheck, LanguageModel
from auditor.models.decoding import GREEDY, Decoding
from auditor.models.ensemble import Ensemble, ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.rows import Rows
from auditor.models.shards import read_shard_record_list, record_digests, write_shard_record_list
from auditor.plugins.defense import Scenario
from auditor.plugins.probe import Observed, observe_all_secrets
from auditor.plugins.view import WHITE_BOX, ClaimTokenMeter, View
from auditor.privacy.accounting import compute_uniform_mixing_epsilon, realised_renyi
from auditor.training.members import assign_member_shards
from tests.conftest import refuses, states

MakeTiny = Callable[..., HuggingFaceModel]
SECRETS = [
    Secret(f"s{i}", (0, 1, i % 2), (1, 0, 1), 1, i % 2 == 0, alias=f"alias{i}") for i in range(6)
]


def scenario(held: Ensemble, queries: int = 1) -> Scenario:
    return Scenario(held.public, held.public, held, queries, 3)


def checked(
    model: LanguageModel,
    secrets: Sequence[Secret] = SECRETS,
    meter: ClaimTokenMeter | None = None,
    **options: int,
) -> tuple[dict[str, Measurement], str, list[Observation]]:
    """Measurements by name, violations and notes as one text, the observations."""
    probe = ClaimCheck(**options)
    seen = observe_all_secrets(
        probe, View("t", model, WHITE_BOX, seed=0, meter=meter or ClaimTokenMeter()), secrets
    )
    said = [
        *(f"VIOLATED: {one}" for one in probe.claim_violations(secrets, seen)),
        *probe.notes(secrets, seen),
    ]
    return {m.name: m for m in probe.measurements(secrets, seen)}, "\n".join(said), seen


def violated(notes: str) -> list[str]:
    return [line for line in notes.splitlines() if "VIOLATED" in line]


# --- what holds ---

ONE_MEMBER = build_fixed_ensemble((0.05, 0.95), (0.9, 0.1))
# one member at order 2: the sound claim is attained
TIGHT = PMixed(epsilon=12.0, alpha=2, q=0.5, adjacency="add_remove")


@pytest.mark.parametrize("adjacency", ["zero_out", "add_remove", "replace"])
@pytest.mark.parametrize("alpha", [3, 5])
def test_the_sound_rule_holds(adjacency: str, alpha: int) -> None:
    held = build_fixed_ensemble(
        (0.145, 0.455, 0.4), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.5, 0.5)
    )
    model = PMixed(q=0.4, alpha=alpha, adjacency=adjacency).protect(scenario(held, 50))  # type: ignore[arg-type]
    measured, notes, _ = checked(model)
    assert measured["claim_violations"].value == 0 and measured["claim_violations"].n == 18
    assert not violated(notes) and "holds with margin" in notes and "do not publish" in notes
    # elsewhere a member less has another radius
    assert ("add remove" in notes) == (adjacency == "add_remove")
    claimed_of = (
        ("zero_out", "add_remove", "replace")
        if adjacency == "add_remove"
        else ("zero_out", "replace")
    )
    for relation in (*claimed_of, "projection", "cap"):
        realised, claimed = (
            measured[f"{kind}_{relation}"].value for kind in ("realised", "claimed")
        )
        assert 0 < realised <= claimed * (1 + 1e-12)
        assert measured[f"margin_{relation}"].value == pytest.approx(1 - realised / claimed)


def test_the_share_of_the_claim_that_one_member_attains() -> None:
    measured, _, _ = checked(TIGHT.protect(scenario(ONE_MEMBER, 5)))
    assert 0 <= measured["margin_add_remove"].value < 1e-6


def test_realised_divergences_against_ensembles_without_a_member(make_tiny: MakeTiny) -> None:
    """Real models at real contexts: each leave-one-out ensemble served on its own."""
    members = [make_tiny(vocab_size=9, seed=s + 1, scale=2.0) for s in range(4)]
    held = ModelEnsemble(make_tiny(vocab_size=9, scale=2.0), members)
    defense = PMixed(q=0.4, alpha=3, adjacency="add_remove")
    model = defense.protect(scenario(held, 3))
    secrets = [Secret("a", (1, 2, 3), (4, 5, 6)), Secret("b", (3, 2, 1), (7, 8, 1))]
    _, _, seen = checked(model, secrets, positions=0)
    for secret, observation in zip(secrets, seen, strict=True):
        context = torch.tensor([secret.prefix + secret.suffix[:-1]])
        p = model.log_probs(context, 3)[0].double().numpy()
        apart = []
        for out in range(4):
            kept = ModelEnsemble(held.public, [m for j, m in enumerate(members) if j != out])
            q = defense.protect(scenario(kept, 3)).log_probs(context, 3)[0].double().numpy()
            apart.append(
                [
                    max(realised_renyi(a, b, 3), realised_renyi(b, a, 3))
                    for a, b in zip(p, q, strict=True)
                ]
            )
        most = torch.tensor(apart)  # (members, positions)
        assert observation.values["realised_add_remove"] == pytest.approx(
            float(most.max()), rel=1e-3
        )
        neighbour, position = divmod(int(most.argmax()), 3)
        assert observation.values["neighbour_add_remove"] == neighbour
        assert observation.values["position_add_remove"] == position


@pytest.mark.parametrize("q", [0.3, 1.0])
def test_edges_that_are_legal(q: float) -> None:
    """One member; every member asked; a token that only a member can say, which then has no weight
    at all."""
    alone = PMixed(q=q, adjacency="add_remove").protect(
        scenario(build_fixed_ensemble((0.5, 0.5), (0.9, 0.1)), 20)
    )
    assert checked(alone)[0]["claim_violations"].value == 0
    model = PMixed(q=q, adjacency="add_remove").protect(
        scenario(build_fixed_ensemble((1.0, 0.0), (0.5, 0.5), (1.0, 0.0)), 20)
    )
    measured, _, _ = checked(model)
    assert measured["claim_violations"].value == 0
    assert measured["realised_add_remove"].value == pytest.approx(0, abs=1e-12)


def test_lower_orders_are_claimed_and_higher_ones_refused() -> None:
    model = PMixed(q=0.4, alpha=4, adjacency="add_remove").protect(scenario(ONE_MEMBER, 5))
    at = {order: checked(model, order=order)[0]["realised_add_remove"].value for order in (2, 3, 4)}
    assert 0 < at[2] < at[3] < at[4]
    assert checked(model, order=0)[0]["realised_add_remove"].value == at[4]
    with refuses("order", "2..4", "5"):
        checked(model, order=5)


def test_who_claims_nothing_is_not_applicable() -> None:
    for model in (
        FixedDistribution([0.5, 0.5]),
        UnmixedEnsemble().protect(scenario(ONE_MEMBER)),
        UniformMixingModel(FixedDistribution([0.5, 0.5]), 0.5),
    ):
        with refuses("claim", error=NotApplicable):
            checked(model)


def test_positions_and_options() -> None:
    assert [space_suffix_positions(n, 10) for n in (1, 3, 0, 99)] == [
        [0],
        [0, 3, 6],
        list(range(10)),
        list(range(10)),
    ]
    assert checked(TIGHT.protect(scenario(ONE_MEMBER)), positions=2)[0]["claim_violations"].n == 12
    for option in ("positions", "order", "draws"):
        with refuses(option, "-1"):
            ClaimCheck(**{option: -1})


# --- what is broken ---


@dataclasses.dataclass(frozen=True)
class RoundedUp(PMixedMemberProjection):
    def mixing_weights_within_radius(
        self, log_p: Tensor, log_p0: Tensor, radius: Tensor | float
    ) -> Tensor:
        return (super().mixing_weights_within_radius(log_p, log_p0, radius) * 10).ceil() / 10


def served(
    defense: PMixed,
    case: Scenario,
    projection: Callable[[PMixedMemberProjection], PMixedMemberProjection],
) -> PMixedModel:
    """The defense with its promise, serving another projection than the one it promised."""
    model = defense.protect(case)
    assert isinstance(model, PMixedModel)
    return PMixedModel(
        case.ensemble, defense.q, lambda n: projection(model.served(n)), model.name, model.promise
    )


def test_a_weight_that_is_rounded_up_is_caught() -> None:
    broken = served(TIGHT, scenario(ONE_MEMBER, 5), lambda p: RoundedUp(**vars(p)))
    measured, notes, _ = checked(broken)
    assert measured["claim_violations"].value == 18
    assert measured["margin_add_remove"].value < -0.01
    line = next(line for line in violated(notes) if "add remove" in line)
    assert "order 2" in line and "at alias0, position 0, neighbour 0" in line


def test_a_forgotten_cap_is_caught() -> None:
    """A member that never says what the public model says: without the cap, what it takes away
    gives it away."""
    defense, case = (
        PMixed(epsilon=12.0, alpha=2, q=1.0, adjacency="add_remove"),
        scenario(build_fixed_ensemble((0.5, 0.5), (1.0, 0.0))),
    )
    assert checked(defense.protect(case))[0]["claim_violations"].value == 0
    measured, notes, _ = checked(served(defense, case, lambda p: dataclasses.replace(p, cap=1.0)))
    assert (
        measured["claim_violations"].value == 18
        and measured["realised_add_remove"].value == math.inf
    )
    assert {"add remove", "cap"} <= {line.split(": ")[1].split(",")[0] for line in violated(notes)}


def test_the_radius_of_another_subset_size_is_caught() -> None:
    """80 members as in Table 1, where the published rule is not known to fail: 1.70 in place of
    0.58 and more."""
    defense = PMixed(accounting="published", alpha=3, q=0.03)
    case = scenario(build_fixed_ensemble((0.145, 0.855), *[(1.0, 0.0)] * 80), 1024)
    assert not violated(checked(defense.protect(case), SECRETS[:1], positions=1)[1])
    broken = served(defense, case, lambda p: dataclasses.replace(p, radii=(p.radii[0],) * 80))
    _, notes, _ = checked(broken, SECRETS[:1], positions=1)
    assert any("projection" in line for line in violated(notes))


def test_a_radius_that_depends_on_the_number_of_members_is_caught() -> None:
    """Solved from N, the radius is another one for the neighbour without a
    member."""
    held = build_fixed_ensemble((5.62e-4, 1 - 5.62e-4), (0.999, 0.001), (1e-13, 1 - 1e-13))
    sound = PMixed(q=1.0, adjacency="add_remove")
    model = sound.protect(scenario(held, 1))
    assert isinstance(model, PMixedModel)
    assert not violated(checked(model)[1])
    solved = {2: 3.8402, 1: 4.9121}  # nats, from the bound of N members

    def from_n(members: int) -> PMixedMemberProjection:
        return PMixedMemberProjection(
            4, (solved[members],) * members, cap=-math.expm1(-solved[members]), two_sided=False
        )

    measured, notes, _ = checked(PMixedModel(held, 1.0, from_n, "broken", model.promise))
    assert (
        measured["realised_add_remove"].value > 6.9 and measured["claimed_add_remove"].value < 4.92
    )
    assert any("add remove" in line for line in violated(notes))


def test_the_published_rule_is_caught_where_it_fails() -> None:
    """16 members, 1.38 times the claim; and the place that shows it is
    named."""
    held = build_fixed_ensemble((0.145, 0.855), *[(0.0, 1.0)] * 11, (1.0, 0.0), *[(0.0, 1.0)] * 4)
    model = PMixed(accounting="published", alpha=3, q=0.03).protect(scenario(held, 1024))
    measured, notes, _ = checked(model, SECRETS[3:5])
    assert measured["realised_add_remove"].value == pytest.approx(0.004304407474, rel=1e-6)
    assert measured["claimed_add_remove"].value == pytest.approx(0.003123348164, rel=1e-9)
    assert (
        measured["claim_violations"].value == 6 and measured["claim_violations"].note == "VIOLATED"
    )
    assert all("at alias3, position 0, neighbour 11" in line for line in violated(notes))
    # add_remove and zero_out: the projection itself is what it should be
    assert len(violated(notes)) == 2


@pytest.mark.parametrize("weight", [0.9, 0.6])
def test_uniform_mixing_is_tight_and_a_larger_weight_is_caught(weight: float) -> None:
    public, target = FixedDistribution([0.3, 0.3, 0.4]), FixedDistribution([0.7, 0.3, 0.0])
    model = UniformMixing(weight=weight).protect(Scenario(target, public, None, 100, 3))
    measured, notes, _ = checked(model)
    assert measured["claim_violations"].value == 0 and not violated(notes)
    assert measured["claimed_any_two_models"].value == compute_uniform_mixing_epsilon(weight, 3)
    assert measured["margin_any_two_models"].value == pytest.approx(0, abs=1e-9)
    broken = UniformMixingModel(
        target, weight + 0.01, compute_uniform_mixing_epsilon(weight, 3), public
    )
    assert checked(broken)[0]["claim_violations"].value == 18


class Sold(UniformMixingModel):
    """Draws by another decoding than the ancestral one, and claims what ancestral decoding would
    give."""

    decoding = GREEDY

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        rows = super().start(prefixes, length, prompt=prompt, distribution=distribution)
        draw = rows.draw
        rows.draw = lambda row, noise, decoding: draw(row, noise, self.decoding)  # type: ignore[method-assign]
        return rows


@pytest.mark.parametrize(
    "decoding", [GREEDY, Decoding(top_p=0.5), Decoding(temperature=0.5)], ids=str
)
def test_another_decoding_sold_under_the_claim_is_caught(decoding: Decoding) -> None:
    target, many = FixedDistribution([0.3, 0.2, 0.2] + [0.3 / 7] * 7), SECRETS * 8
    secrets = [dataclasses.replace(secret, id=f"s{i}") for i, secret in enumerate(many)]
    model = Sold(target, 0.8, compute_uniform_mixing_epsilon(0.8, 10))
    model.decoding = decoding
    measured, notes, _ = checked(model, secrets, draws=32)
    assert measured["claim_violations"].value == 1
    assert states(violated(notes)[:1], "ancestral")
    honest = UniformMixingModel(target, 0.8, compute_uniform_mixing_epsilon(0.8, 10))
    assert not violated(checked(honest, secrets, draws=32)[1])


def test_honest_draws_of_an_ensemble_are_not_accused(make_tiny: MakeTiny) -> None:
    held = ModelEnsemble(make_tiny(), [make_tiny(seed=s) for s in (1, 2)])
    for accounting in ("sound", "published"):
        model = PMixed(q=0.7, accounting=accounting).protect(scenario(held, 10))  # type: ignore[arg-type]
        assert not violated(checked(model, draws=300)[1])


def drew(tokens: int, spent: int) -> ClaimTokenMeter:
    return ClaimTokenMeter({("5 x ancestral, prompt none", "a"): tokens}, spent)


def test_tokens_that_were_not_charged_are_caught() -> None:
    model = TIGHT.protect(scenario(ONE_MEMBER))
    measured, notes, _ = checked(model, meter=drew(480, spent=0))
    assert measured["claim_violations"].value == 1
    assert len(violated(notes)) == 1 and states(violated(notes), "480", "charged")
    assert not violated(checked(model, meter=drew(480, spent=480))[1])
    # a resumed run drew the rest before
    assert not violated(checked(model, meter=drew(100, spent=480))[1])


def test_records_in_several_shards_are_caught() -> None:
    copies = ["one", "two", "two", "three", "three", "three", "four"]
    held = build_fixed_ensemble((0.5, 0.5), (0.6, 0.4), (0.4, 0.6), (0.5, 0.5))
    model = PMixed().protect(scenario(held, 10))
    assert "3 members do not record their training data" in checked(model)[1]
    held.shards = [
        record_digests(copies[i] for i in chosen) for chosen in assign_member_shards(copies, 3)
    ]
    assert not violated(checked(model)[1]) and "do not record" not in checked(model)[1]
    # dealt out in turn: "two" and "three" in several
    held.shards = [record_digests(copies[i::3]) for i in range(3)]
    measured, notes, _ = checked(model)
    assert states(violated(notes), "2", "shard") and measured["claim_violations"].value == 1
    held.shards = [*held.shards[:2], None]
    assert held.count_shard_overlaps()["unlisted_shards"] == 1


def test_shards_are_written_and_read_without_their_text(tmp_path: Path) -> None:
    assert read_shard_record_list(tmp_path) is None
    write_shard_record_list(tmp_path, ["a secret", "a secret", "another"])
    assert read_shard_record_list(tmp_path) == record_digests(["another", "a secret"])
    file = tmp_path / "shard.json"
    assert "secret" not in file.read_text() and file.stat().st_mode & 0o077 == 0
    for text in ("[]", '{"records": "x"}', "{", '{"records": [1]}'):
        file.write_text(text)
        with refuses('{"records"'):
            read_shard_record_list(tmp_path)


def test_the_labs_shards_are_disjoint() -> None:
    recipe = LabRecipe(
        repeats=tuple((times, 4, 1) for times in (1, 2, 4, 8, 16)),
        others=0,
        nonmembers=2,
        public_records=3,
    )
    texts = make_lab_texts(recipe)
    names = [set(record_digests(shard)) for shard in texts.texts_by_ensemble_member(recipe.members)]
    assert len(names) == recipe.members
    assert sum(map(len, names)) == len(set().union(*names)) == len(set(texts.private_text_copies()))


def test_what_is_no_number_keeps_no_claim() -> None:
    """An overflow or a broken defense must not pass a gate as zero violations."""
    realised = torch.full((1, 2, 3), math.nan, dtype=torch.float64)
    values = summarise_text_checks([DivergenceCheck("add_remove", 2.0, 0.1, realised)], 0, [0, 1])
    assert values["violations"] == 2
    worst = Observation(SECRETS[0].id, values)
    broken = Observed([dataclasses.replace(worst, values={**_QUIET, **values})])
    assert ClaimCheck().claim_violations(SECRETS[:1], broken)[0].startswith("add remove")
    assert not any("holds" in note for note in ClaimCheck().notes([], broken))
    assert list_claim_faults(Observed([Observation("s", {**_QUIET, "draw_excess": math.nan})]))


_QUIET = dict.fromkeys(("draw_excess", "draw_variance"), 0.0)

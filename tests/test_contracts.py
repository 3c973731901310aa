"""What every plug-in promises, tested over every plug-in there is: a new file is tested by being
there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Guesses, Observation, Secret
from auditor.defenses.uniform_mixing import UniformMixing
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.models.wrapping import WrappingModel
from auditor.plugins import registry
from auditor.plugins.attack import Attack
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.options import build_plugin, describe_plugin
from auditor.plugins.probe import DistributionProbe, Probe
from auditor.plugins.trainer import Trainer, TrainerCheckpoint, TrainingJob, TrainingRecord
from auditor.plugins.view import WHITE_BOX, View
from auditor.privacy.promises import read_privacy_record
from auditor.testing import (
    ContractBroken,
    check_attack,
    check_defense,
    check_model,
    make_small_plugin,
    make_subjects_for_probe,
    make_test_secrets,
    make_tiny_scenario,
    make_view,
    observe_by_id,
)
from tests.conftest import DEFENSES, save_tiny, tiny

ATTACKS, PROBES, TRAINERS = (
    registry.list_attacks(),
    registry.list_probes(),
    registry.list_trainers(),
)
METHODS = {**ATTACKS, **PROBES}
SERVED = {
    kind.protect: name for name, kind in reversed(DEFENSES.items())
}.values()  # one of those that serve alike
DISTRIBUTION_PROBES = {
    name: kind for name, kind in PROBES.items() if issubclass(kind, DistributionProbe)
}


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_an_attack_or_probe_keeps_its_contract(kind: type[Attack] | type[Probe]) -> None:
    check_attack(kind)


@pytest.mark.parametrize("kind", DEFENSES.values(), ids=DEFENSES)
def test_a_defense_keeps_its_contract(kind: type[Defense]) -> None:
    check_defense(kind)


@pytest.mark.parametrize("family", ["neox", "gpt2"])
def test_a_model_keeps_its_contract(family: str) -> None:
    check_model(tiny(kind=family))


# --- a contract that cannot be broken holds nothing ---


@dataclass(frozen=True)
class Faulty(PerplexityRanking):
    """Rank candidates by perplexity, with a fault."""

    name = "faulty"
    fault: str = ""

    def guess(self, view: View, state: dict[str, Any], queries: Any) -> Iterator[Guesses]:
        for i, found in enumerate(super().guess(view, state, queries)):
            if self.fault == "forgets" and i == 1:
                continue
            ranked = found.ranked[::-1] if self.fault == "least sure first" else found.ranked
            if self.fault == "by its place":
                ranked = tuple(
                    dataclasses.replace(guess, score=guess.score - i) for guess in ranked
                )
            drawn = 2 * found.drawn if self.fault == "draws more" else found.drawn
            yield dataclasses.replace(found, ranked=ranked, drawn=drawn)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("forgets", "an answer to every query"),
        ("least sure first", "the surest guess"),
        ("by its place", "to depend only on it"),
        ("draws more", r"samples_by_recipe\(\)"),
    ],
)
def test_an_attack_that_breaks_its_contract_is_told_how(fault: str, said: str) -> None:
    check_attack(Faulty(samples=6))
    with pytest.raises(ContractBroken, match=f"faulty: .*{said}"):
        check_attack(Faulty(samples=6, fault=fault))


class Twisted(HuggingFaceModel):
    """A model that answers one way of asking otherwise."""

    fault = ""

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        found = super().log_probs(
            contexts, last, prompt=None if self.fault == "soft prompts" else prompt
        )
        if self.fault == "no distribution":
            return found + 1
        return found.roll(1, -1) if self.fault == "other than its rows" else found

    def token_log_probs(
        self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None
    ) -> Tensor:
        return super().token_log_probs(prefixes, suffixes, prompt=prompt) * (
            2 if self.fault == "tokens" else 1
        )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("forgets", r"an observation of every secret, got none of \['q11'\]"),
        ("renames", "an observation of every secret"),
        ("numbers by batch", "the observation of q3 to depend only on it"),
        ("refuses", "which gives all it needs, got 'no'"),
    ],
)
def test_a_probe_that_breaks_its_contract_is_told_how(fault: str, said: str) -> None:
    """Each of these was a KeyError or another traceback of the check itself."""
    check_attack(FaultyProbe())
    with pytest.raises(ContractBroken, match=f"faulty probe: .*{said}"):
        check_attack(FaultyProbe(fault=fault))


@dataclass(frozen=True)
class FaultyProbe(ExtractionProbability):
    """Measure the probability of each suffix, with a fault."""

    name = "faulty probe"
    fault: str = ""

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        if self.fault == "refuses":
            raise NotApplicable("no")
        observations = list(super().observe_secrets(view, secrets))
        if self.fault == "forgets":
            observations.pop()
        for observation in observations:
            values, name = dict(observation.values), observation.secret
            if self.fault == "numbers by batch":
                values[f"of {len(secrets)}"] = 1.0
            if self.fault == "renames":
                name += "x"
            yield dataclasses.replace(observation, secret=name, values=values)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no distribution", "add up to 1"),
        ("other than its rows", "advanced and split rows"),
        ("tokens", "token_log_probs"),
        ("soft prompts", "gradients"),
    ],
)
def test_a_model_that_breaks_its_contract_is_told_how(fault: str, said: str) -> None:
    model = Twisted(tiny().model, name="twisted")
    check_model(model)
    model.fault = fault
    with pytest.raises(ContractBroken, match=f"twisted: .*{said}"):
        check_model(model)


@dataclass(frozen=True)
class Undistributed(UniformMixing):
    """Mix with the uniform distribution, and serve the sum as it is."""

    name = "undistributed"

    def protect(self, scenario: Scenario) -> LanguageModel:
        model = Twisted(tiny().model, name="twisted")
        model.fault = "no distribution"
        return model


def test_a_defense_that_breaks_its_contract_is_told_how() -> None:
    with pytest.raises(ContractBroken, match=r"undistributed: .*add up to 1"):
        check_defense(Undistributed)


# --- what only those that are found by name can be held to ---


@pytest.mark.parametrize("kind", ATTACKS.values(), ids=ATTACKS)
def test_unknown_options_name_the_nearest(kind: type[Attack]) -> None:
    count = "samples" if "samples" in kind.__dataclass_fields__ else "generations"
    with pytest.raises(AuditError, match=f"did you mean '{count}'"):
        build_plugin("attack", ATTACKS, kind.name, {count[:-1]: 3})
    with pytest.raises(AuditError, match=rf"expected .*{count} to be a whole number, got 'ten'"):
        build_plugin("attack", ATTACKS, kind.name, {count: "ten"})
    with pytest.raises(AuditError, match=f"expected {count} >= 1 and at most .*, got 0"):
        build_plugin("attack", ATTACKS, kind.name, {count: "0"})


@pytest.mark.parametrize("kind", DISTRIBUTION_PROBES.values(), ids=DISTRIBUTION_PROBES)
class TestDistributionProbe:
    def test_measures_beside_the_floor(
        self, kind: type[DistributionProbe], neox: HuggingFaceModel
    ) -> None:
        probe, asked = make_small_plugin(kind), make_test_secrets(neox)
        view = make_view(neox, WHITE_BOX)
        seen = observe_by_id(probe, view, asked)
        completed = probe.add_joint_values(view, asked, [seen[s.id] for s in asked])
        measured = probe.measurements(asked, completed)
        names = [m.name for m in measured]
        assert f"{names[0]}_nonmembers" in names and measured[0].n == sum(s.member for s in asked)
        assert measured[0].value > 0
        for repeats, m in probe.main_number_by_repeats(asked, completed).items():
            assert m.name == names[0] and m.n == sum(
                s.member and str(s.repeats) == repeats for s in asked
            )
        for name, values in probe.per_secret_values(asked, completed).items():
            own = [v for v, s in zip(values, asked, strict=True) if s.member]
            assert next(m for m in measured if m.name == name).value == pytest.approx(
                sum(own) / len(own)
            ), name
        members = [s for s in asked if s.member]
        alone = probe.measurements(members, [seen[s.id] for s in members])
        assert alone[0] == measured[0] and not any(m.name.endswith("_nonmembers") for m in alone)

    def test_unknown_options_are_refused(self, kind: type[DistributionProbe]) -> None:
        with pytest.raises(AuditError, match="did you mean 'temperature'"):
            build_plugin("attack", PROBES, kind.name, {"temprature": 3})


@functools.cache
def protected(defense: type[Defense]) -> tuple[LanguageModel, list[Secret]]:
    """The model of a defense, and secrets of which half are what that model says."""
    model = defense().protect(make_tiny_scenario())
    return model, make_test_secrets(model)


def test_a_decoding_row_counts_the_memory_of_the_models_it_asks() -> None:
    """Their caches are kept as long as the row is: batches are made by what it says."""
    served = {name: protected(DEFENSES[name])[0] for name in SERVED}
    wrapping = {name: model for name, model in served.items() if isinstance(model, WrappingModel)}
    assert {
        "cp-delta",
        "invisible-ink",
        "memfree",
        "pmixed",
        "public-common",
        "uniform-mixing",
    } <= set(wrapping)
    for name, model in wrapping.items():
        grows = model.row_bytes(40) - model.row_bytes(8)  # with each position: by a cache
        assert grows >= model.model.row_bytes(40) - model.model.row_bytes(8) > 0, name


@pytest.mark.parametrize("kind", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize("defense", [DEFENSES[name] for name in SERVED], ids=SERVED)
def test_probes_read_defended_distributions(kind: type[Probe], defense: type[Defense]) -> None:
    (model, members), probe = protected(defense), make_small_plugin(kind)
    asked = members if probe.of == "secrets" else make_subjects_for_probe(probe, model)
    try:
        whole = observe_by_id(probe, make_view(model, WHITE_BOX), asked)
    except NotApplicable as why:
        claim = defense().claim(make_tiny_scenario(), 0)
        assert "makes no claim" in str(why) and (claim is None or claim.queries is None)
        return
    single = observe_by_id(
        make_small_plugin(kind), make_view(model, WHITE_BOX, batch_size=1), asked[:2]
    )
    for name in single:
        # Float noise may decide between neighbours that differ by less: which one it was is then
        # not compared.
        numbers = {
            key for key in whole[name].values if not key.startswith(("neighbour_", "position_"))
        }
        mine, theirs = (
            {key: seen[name].values[key] for key in numbers} for seen in (single, whole)
        )
        assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("kind", DEFENSES.values(), ids=DEFENSES)
def test_its_chain_passes_through_itself_once(kind: type[Defense]) -> None:
    """Every other row is a control of another kind, with a cause of its own; what a row lacks can
    be given."""
    chain = kind().cause_chain()
    assert [cause.row for cause in chain].count(None) == (1 if chain else 0)
    assert len({cause.name for cause in chain}) == len(chain) and all(
        cause.changes for cause in chain
    )
    controls = [cause.row for cause in chain if cause.row is not None]
    assert all(registry.list_defenses()[control.name] is type(control) for control in controls)
    assert len({control.name for control in controls}) == len(controls) and kind() not in controls


@pytest.mark.parametrize("kind", TRAINERS.values(), ids=TRAINERS)
def test_trainers_say_what_they_are_and_train(
    kind: type[Trainer], neox: HuggingFaceModel, tmp_path: Path
) -> None:
    """A tiny run into an empty folder: a model whose distribution is a distribution, a promise
    where one is made."""
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert len(describe_plugin(kind)) > 20 and kind.claims
    save_tiny(tmp_path / "base")
    base = load_causal_lm(str(tmp_path / "base"))
    texts = [f"door {i} opens with {i * i}" for i in range(8)]
    ids = [tuple(tokens) for tokens in base.tokenizer(texts)["input_ids"]]  # type: ignore[misc]
    records = tuple(TrainingRecord(text, own, text) for text, own in zip(texts, ids, strict=True))
    job = TrainingJob(
        base=base.name,
        load=lambda: load_causal_lm(base.name).model.requires_grad_(True).train(),
        tokenizer=base.tokenizer,
        end=0,
        block=24,
        records=records,
        users=False,
        public=base,
        out=tmp_path / "out",
        checkpoint=TrainerCheckpoint(tmp_path / "out" / "checkpoint.pt"),
        seed=0,
        progress=lambda what, done, total: None,
        forget=records[:3] if kind.unlearns else (),
    )
    (tmp_path / "out").mkdir()
    fields = {f.name for f in dataclasses.fields(kind)}
    sizes = {"epochs": 1, "batch": 4, "noise_multiplier": 1.0, "members": 2, "times": 2}
    trainer = kind(**{name: value for name, value in sizes.items() if name in fields})
    trainer.check(job)
    assert all(trainer.train(job))
    # an ensemble is a folder of them
    folders = sorted((tmp_path / "out").glob("member-*")) or [tmp_path / "out"]
    assert len(folders) in (1, 2)
    for folder in folders:
        distribution, before = (
            model.log_probs(torch.tensor([[1, 2, 3]]), 1).exp()
            for model in (load_causal_lm(str(folder)), base)
        )
        assert float(distribution.sum()) == pytest.approx(1, abs=1e-5) and not torch.equal(
            distribution, before
        )
    promised = read_privacy_record(tmp_path / "out")
    assert (promised is None or promised.epsilon is None) == kind.claims.startswith("none")


@pytest.mark.parametrize(
    "kind",
    registry.list_plugin_classes()["Benchmark"].values(),
    ids=registry.list_plugin_classes()["Benchmark"],
)
def test_benchmarks_say_what_they_are(kind: type) -> None:
    assert describe_plugin(kind)

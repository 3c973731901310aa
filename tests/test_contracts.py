"""What every plug-in promises, tested over every plug-in there is: a new file is tested by being there."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import Canary, Observation, Pair, Query, Secret
from auditor.core.spaces import Space
from auditor.core.streams import uniforms
from auditor.defenses.uniform_mixing import UniformMixing
from auditor.generation.sample import sample
from auditor.models.base import LanguageModel, given_by
from auditor.models.decoding import ANCESTRAL, Decoding
from auditor.models.ensemble import ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load
from auditor.plugins import registry
from auditor.plugins.attack import Attack
from auditor.plugins.defense import Defense, Prompt, Scenario, TrainedModel
from auditor.plugins.options import build, description_of
from auditor.plugins.probe import LawProbe, Probe
from auditor.plugins.trainer import Checkpoint, Trainer, TrainingJob, TrainingRecord
from auditor.plugins.view import CLAIM, WORST, Setting, View
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import PrivacyRecord
from auditor.privacy.promises import read as read_privacy
from tests.conftest import save_tiny, tiny

MakeTiny = Callable[..., HuggingFaceModel]
ATTACKS, PROBES, DEFENSES, TRAINERS = registry.attacks(), registry.probes(), registry.defenses(), registry.trainers()
SERVED = {kind.protect: name for name, kind in reversed(DEFENSES.items())}.values()  # one of those that serve alike
LAW_PROBES = {name: kind for name, kind in PROBES.items() if issubclass(kind, LawProbe)}
SMALL: dict[str, Any] = {
    "samples": 6,
    "prompt_length": 3,
    "epochs": 2,
    "batch": 4,
    "warmup_steps": 1,
    "beams": 4,
    "games": 64,
    "tokens": 4,
}


class Words:
    """A tokenizer of two-letter words, upper case for even ids: lower-casing turns an even id into the next one."""

    def decode(self, tokens: tuple[int, ...]) -> str:
        return "".join((chr(65 + t // 26) if t % 2 == 0 else chr(97 + t // 26)) + chr(97 + t % 26) for t in tokens)

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        ids = []
        for a, b in zip(text[::2], text[1::2], strict=True):
            token = (ord(a.lower()) - 97) * 26 + ord(b) - 97
            ids.append((token + 1) % 61 if a.islower() and token % 2 == 0 else token)
        return {"input_ids": ids}


@functools.cache
def other() -> HuggingFaceModel:
    return tiny(seed=7)


def small(kind: Any) -> Any:
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    sizes = {**SMALL, "references": 20}
    return kind(**{name: value for name, value in sizes.items() if type(defaults.get(name)) is type(value)})


def view(model: LanguageModel, setting: Setting, **more: Any) -> View:
    roles: dict[str, Any] = {"public": model, "reference": other(), "tokenizer": Words(), "training": KEPT}
    return View("target", model, setting, seed=0, **roles, **more)


def queries(count: int = 6) -> list[Query]:
    tokens = torch.randint(1, 61, (count, 5), generator=torch.Generator().manual_seed(1)).tolist()
    return [Query(f"q{i}", tuple(row), 3 + i % 2) for i, row in enumerate(tokens)]


KEPT = GradientCanaries(
    included=tuple(i % 2 == 0 for i in range(40)),
    scores=tuple(math.cos(3 * i) + (i % 2 == 0) for i in range(40)),
    sums=tuple(math.cos(i) for i in range(40)),
    noise_multiplier=1.0,
    sampling_rate=0.1,
    steps=10,
    clip=1.0,
    delta=1e-5,
    unit="record",
    releases=10,
    drawn=40,
    unevenness=0.0,
    noise_values=640,
    noise_size=1.0,
    noise_repeated=0.4,
)
KNOWN = [Pair(q.prefix, q.prefix[:3]) for q in queries(8)]


def answers(attack: Attack, seen: View, asked: list[Query]) -> dict[str, Any]:
    return {g.secret: g for g in attack.guess(seen, attack.fit(seen, KNOWN), asked)}


@pytest.mark.parametrize("kind", ATTACKS.values(), ids=ATTACKS)
class TestAttack:
    def test_says_what_it_is(self, kind: type[Attack]) -> None:
        assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert description_of(kind).endswith(".") or len(description_of(kind)) > 20
        assert set(kind.needs) <= {"draw", "likelihood", "ranks", "law", "embeddings"} and kind.needs

    def test_answers_every_query_in_every_setting_or_says_why_not(
        self, kind: type[Attack], neox: HuggingFaceModel
    ) -> None:
        for setting in (CLAIM, WORST):
            seen = view(neox, setting)
            try:
                found = answers(small(kind), seen, queries())
            except NotApplicable as why:
                assert str(why)
                assert not set(kind.needs) <= setting.capabilities
                continue
            assert set(found) == {q.id for q in queries()}
            for query in queries():
                guesses = found[query.id]
                assert all(len(g.suffix) == query.length for g in guesses.ranked)
                assert sum(g.count for g in guesses.ranked) == guesses.samples
                scores = [g.score for g in guesses.ranked]
                assert scores == sorted(scores, reverse=True)
                assert len({g.suffix for g in guesses.ranked}) == len(guesses.ranked)

    def test_an_answer_depends_on_its_own_query_only(self, kind: type[Attack], neox: HuggingFaceModel) -> None:
        everything = answers(small(kind), view(neox, WORST), queries())
        for batch_size in (1, 2):
            alone = answers(small(kind), view(neox, WORST, batch_size=batch_size), queries()[2:4])
            for name, guesses in alone.items():
                whole = everything[name]
                assert [g.suffix for g in guesses.ranked] == [g.suffix for g in whole.ranked]
                assert [g.count for g in guesses.ranked] == [g.count for g in whole.ranked]
                for a, b in zip(guesses.ranked, whole.ranked, strict=True):
                    assert a.score == pytest.approx(b.score, abs=1e-5, rel=1e-4)

    def test_draws_what_it_said_it_would(self, kind: type[Attack], neox: HuggingFaceModel) -> None:
        attack, seen = small(kind), view(neox, WORST)
        planned = {q.id: sum(attack.recipes(seen).values()) * q.length for q in queries()}
        assert {name: g.drawn for name, g in answers(attack, seen, queries()).items()} == planned

    def test_unknown_options_name_the_nearest(self, kind: type[Attack]) -> None:
        count = "samples" if "samples" in kind.__dataclass_fields__ else "generations"
        with pytest.raises(AuditError, match=f"did you mean '{count}'"):
            build("attack", ATTACKS, kind.name, {count[:-1]: 3})
        with pytest.raises(AuditError, match=rf"expected .*{count} to be a whole number, got 'ten'"):
            build("attack", ATTACKS, kind.name, {count: "ten"})
        with pytest.raises(AuditError, match=f"expected {count} >= 1, got 0"):
            build("attack", ATTACKS, kind.name, {count: "0"})


def secrets(model: LanguageModel) -> list[Secret]:
    """Members and non-members of two shapes; half of the suffixes are what the model says, half are not."""
    found = []
    for i, query in enumerate(queries(12)):
        prefix = torch.tensor([query.prefix])
        said = sample(model, prefix, query.length, Decoding(top_p=0.7), uniforms(1, query.length, i)[None])[0].suffixes[
            0
        ]
        suffix = tuple(said.tolist()) if i % 4 < 2 else query.prefix[: query.length]
        found.append(Secret(query.id, query.prefix, suffix, 1 + i % 2, member=i % 3 > 0))
    return found


def canaries() -> list[Secret]:
    """Members and controls of one small space, as `Words` writes them."""
    words = Words()
    slots = tuple((f"slot{i}", tuple(words.decode((token,)) for token in range(i, 61, 10))) for i in range(3))
    space = Space(words.decode((5, 9)) + "".join(f"{{{name}}}" for name, _ in slots), slots)
    texts = list(space.texts())[::17][:12]
    return [
        Secret(f"c{i}", (), tuple(words(text)["input_ids"]), i % 3, member=i % 3 > 0, canary=Canary(text, space))
        for i, text in enumerate(texts)
    ]


def coined() -> list[Secret]:
    """Canaries that went in or stayed out by a coin, behind prefixes."""
    return [
        Secret(
            query.id,
            query.prefix,
            query.prefix[: query.length],
            i % 2,
            member=i % 2 > 0,
            canary=Canary(Words().decode(query.prefix * 2), coin=i % 2 > 0),
        )
        for i, query in enumerate(queries(24))
    ]


def subjects(kind: type[Probe], model: LanguageModel) -> list[Secret]:
    if kind.of == "own":
        return list(small(kind).subjects(view(model, WORST)))
    return {"canaries": canaries, "coins": coined}.get(kind.of, lambda: secrets(model))()


def attacked(kind: type[Probe], model: LanguageModel) -> LanguageModel:
    """The model, or behind a defense where the probe has nothing to look at without a claim."""
    try:
        next(iter(small(kind).measure(view(model, WORST), subjects(kind, model)[:1])))
    except NotApplicable:
        return UniformMixing().protect(Scenario(model, model, None, queries=60, answer_length=4))
    return model


def is_given(kind: type[Probe], setting: Setting) -> bool:
    """Whether the setting gives all that the probe needs."""
    return all(given_by(setting.capabilities, needed) for needed in kind.needs)


def observed(probe: Probe, seen: View, asked: list[Secret]) -> dict[str, Observation]:
    return {o.secret: o for o in probe.measure(seen, asked)}


@pytest.mark.parametrize("kind", PROBES.values(), ids=PROBES)
class TestProbe:
    def test_says_what_it_is(self, kind: type[Probe]) -> None:
        assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert len(description_of(kind)) > 20
        assert set(kind.needs) <= {"draw", "likelihood", "ranks", "law", "embeddings", "training"} and kind.needs
        assert kind.name not in ATTACKS

    def test_observes_every_secret_in_every_setting_or_says_why_not(
        self, kind: type[Probe], neox: HuggingFaceModel
    ) -> None:
        model = attacked(kind, neox)
        for setting in (CLAIM, WORST):
            try:
                found = observed(small(kind), view(model, setting), subjects(kind, neox))
            except NotApplicable as why:
                assert str(why) and not is_given(kind, setting)
                continue
            assert is_given(kind, setting)
            assert set(found) == {s.id for s in subjects(kind, neox)}
            names = {frozenset(o.values) for o in found.values()}
            assert len(names) == 1 and names.pop()
            assert not any(math.isnan(x) for o in found.values() for x in o.values.values())

    def test_an_observation_depends_on_its_own_secret_only(self, kind: type[Probe], neox: HuggingFaceModel) -> None:
        model = attacked(kind, neox)
        everything = observed(small(kind), view(model, WORST), subjects(kind, neox))
        for batch_size in (1, 2):
            alone = observed(small(kind), view(model, WORST, batch_size=batch_size), subjects(kind, neox)[3:7])
            assert len(alone) == 4
            for name, observation in alone.items():
                assert observation.values == pytest.approx(everything[name].values, abs=1e-5, rel=1e-4)

    def test_measures_every_secret_it_saw(self, kind: type[Probe], neox: HuggingFaceModel) -> None:
        probe, asked = small(kind), subjects(kind, neox)
        at = view(attacked(kind, neox), WORST)
        found = observed(probe, at, asked)
        seen = probe.revisit(at, asked, [found[s.id] for s in asked])
        assert [o.secret for o in seen] == [s.id for s in asked] and probe.revisit(at, asked, seen) == seen
        completed = probe.complete(asked, seen)
        assert [o.secret for o in completed] == [s.id for s in asked]
        assert probe.complete(asked, completed) == completed
        measured = probe.measurements(asked, completed)
        assert len({m.name for m in measured}) == len(measured) > 0
        assert all(m.low <= m.value <= m.high and m.n > 0 for m in measured)
        assert all(probe.notes(asked, completed))


@pytest.mark.parametrize("kind", LAW_PROBES.values(), ids=LAW_PROBES)
class TestLawProbe:
    def test_measures_beside_the_floor(self, kind: type[LawProbe], neox: HuggingFaceModel) -> None:
        probe, asked = small(kind), secrets(neox)
        seen = observed(probe, view(neox, WORST), asked)
        completed = probe.complete(asked, [seen[s.id] for s in asked])
        measured = probe.measurements(asked, completed)
        names = [m.name for m in measured]
        assert f"{names[0]}_nonmembers" in names and measured[0].n == sum(s.member for s in asked)
        assert measured[0].value > 0
        for repeats, m in probe.by_repeats(asked, completed).items():
            assert m.name == names[0] and m.n == sum(s.member and str(s.repeats) == repeats for s in asked)
        for name, values in probe.per_secret(asked, completed).items():
            own = [v for v, s in zip(values, asked, strict=True) if s.member]
            assert next(m for m in measured if m.name == name).value == pytest.approx(sum(own) / len(own)), name
        members = [s for s in asked if s.member]
        alone = probe.measurements(members, [seen[s.id] for s in members])
        assert alone[0] == measured[0] and not any(m.name.endswith("_nonmembers") for m in alone)

    def test_unknown_options_are_refused(self, kind: type[LawProbe]) -> None:
        with pytest.raises(AuditError, match="did you mean 'temperature'"):
            build("attack", PROBES, kind.name, {"temprature": 3})


@pytest.mark.parametrize("kind", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize("defense", [DEFENSES[name] for name in SERVED], ids=SERVED)
def test_probes_read_defended_laws(kind: type[Probe], defense: type[Defense], scenario: Scenario) -> None:
    model = defense().protect(scenario)
    try:
        whole = observed(small(kind), view(model, WORST), subjects(kind, model))
    except NotApplicable as why:
        claim = defense().claim(scenario, 0)
        assert "makes no claim" in str(why) and (claim is None or claim.queries is None)
        return
    single = observed(small(kind), view(model, WORST, batch_size=1), subjects(kind, model)[:2])
    for name in single:
        # Float noise may decide between neighbours that differ by less: which one it was is then not compared.
        numbers = {key for key in whole[name].values if not key.startswith(("neighbour_", "position_"))}
        mine, theirs = ({key: seen[name].values[key] for key in numbers} for seen in (single, whole))
        assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-3)


@pytest.fixture(scope="module")
def scenario(make_tiny: MakeTiny) -> Scenario:
    target = make_tiny()
    held = ModelEnsemble(target, [make_tiny(seed=s) for s in (1, 2)])
    trained = TrainedModel(make_tiny(seed=3), PROMISE)
    whole = make_tiny(seed=4)
    given = [(f"q{i}", query.prefix) for i, query in enumerate(queries())]
    prompts = tuple(Prompt(name, prefix, (*prefix, 7, 8) if i % 3 else ()) for i, (name, prefix) in enumerate(given))
    corpus = [query.prefix * 4 for query in queries()]
    return Scenario(target, target, held, 60, 4, trained=trained, whole=whole, prompts=prompts, corpus=corpus)


PROMISE = PrivacyRecord(
    method="dp-sgd",
    epsilon=3.0,
    delta=1e-5,
    status="sound",
    sound=True,
    noise_multiplier=1.0,
    clip=1.0,
    sampling_rate=0.1,
    steps=10,
    unit="record",
    noise="secret",
    epsilon_rdp=3.5,
)


NEEDS = {"public", "ensemble", "trained", "whole", "records", "corpus"}


@pytest.mark.parametrize("kind", DEFENSES.values(), ids=DEFENSES)
class TestDefense:
    def test_says_what_it_is(self, kind: type[Defense]) -> None:
        assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert description_of(kind) and kind.claims and set(kind.needs) <= NEEDS

    def test_a_defended_model_is_a_model(self, kind: type[Defense], scenario: Scenario) -> None:
        model = kind().protect(scenario)
        prefix = torch.tensor([[1, 2, 3]])
        assert model.vocab_size == scenario.target.vocab_size
        assert float(model.log_probs(prefix, 1).exp().sum()) == pytest.approx(1, abs=1e-5)
        found = sample(model, prefix, 3, Decoding(top_p=0.7), uniforms(20, 3, 0)[None])[0]
        assert found.token_log_probs is not None
        again = model.token_log_probs(prefix.expand(len(found.suffixes), -1), found.suffixes)
        torch.testing.assert_close(found.token_log_probs, again, atol=1e-4, rtol=0)
        drawn = sample(model, prefix, 3, ANCESTRAL, uniforms(20, 3, 0)[None], law=False)[0]
        assert drawn.token_log_probs is None and int(drawn.counts.sum()) == 20
        prompt = model.embedding_rows(2).requires_grad_(True)
        model.tuning_log_probs(prefix, 1, prompt, torch.Generator().manual_seed(0))[0, 0, 5].backward()
        assert prompt.grad is not None and float(prompt.grad.abs().sum()) > 0

    def test_more_queries_never_spend_less(self, kind: type[Defense], scenario: Scenario) -> None:
        claims = [kind().claim(scenario, spent) for spent in (0, 20, 60)]
        if claims[0] is None:
            assert all(claim is None for claim in claims)
            return
        if claims[0].queries is None:  # all of it was spent in training
            assert all(claim and claim.spent_epsilon == claim.epsilon for claim in claims)
            return
        for relation in claims[0].epsilon:
            spent = [claim.spent_epsilon[relation] for claim in claims if claim]
            assert spent == sorted(spent) and spent[0] == 0
            assert spent[-1] <= claims[0].epsilon[relation] * (1 + 1e-9)

    def test_its_chain_passes_through_itself_once(self, kind: type[Defense]) -> None:
        """Every other row is a control of another kind, with a cause of its own; what a row lacks can be given."""
        chain = kind().chain()
        assert [cause.row for cause in chain].count(None) == (1 if chain else 0)
        assert len({cause.name for cause in chain}) == len(chain) and all(cause.changes for cause in chain)
        controls = [cause.row for cause in chain if cause.row is not None]
        assert all(registry.defenses()[control.name] is type(control) for control in controls)
        assert len({control.name for control in controls}) == len(controls) and kind() not in controls

    def test_claims_survive_json(self, kind: type[Defense], scenario: Scenario) -> None:
        claim = kind().claim(scenario, 10)
        if claim is not None:
            assert from_json(type(claim), json.loads(json.dumps(to_json(claim)))) == claim


@pytest.mark.parametrize("kind", TRAINERS.values(), ids=TRAINERS)
def test_trainers_say_what_they_are_and_train(kind: type[Trainer], neox: HuggingFaceModel, tmp_path: Path) -> None:
    """A tiny run into an empty folder: a model whose law is a law, a promise where one is made."""
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert len(description_of(kind)) > 20 and kind.claims
    save_tiny(tmp_path / "base")
    base = load(str(tmp_path / "base"))
    texts = [f"door {i} opens with {i * i}" for i in range(8)]
    ids = [tuple(tokens) for tokens in base.tokenizer(texts)["input_ids"]]  # type: ignore[misc]
    records = tuple(TrainingRecord(text, own, text) for text, own in zip(texts, ids, strict=True))
    job = TrainingJob(
        base=base.name,
        load=lambda: load(base.name).model.requires_grad_(True).train(),
        tokenizer=base.tokenizer,
        end=0,
        block=24,
        records=records,
        users=False,
        public=base,
        out=tmp_path / "out",
        checkpoint=Checkpoint(tmp_path / "out" / "checkpoint.pt"),
        seed=0,
        progress=lambda what, done, total: None,
        forget=records[:3] if kind.unlearns else (),
    )
    (tmp_path / "out").mkdir()
    fields = {f.name for f in dataclasses.fields(kind)}
    sizes = {"epochs": 1, "batch": 4, "noise_multiplier": 1.0, "members": 2}
    trainer = kind(**{name: value for name, value in sizes.items() if name in fields})
    trainer.check(job)
    assert all(trainer.train(job))
    folders = sorted((tmp_path / "out").glob("member-*")) or [tmp_path / "out"]  # an ensemble is a folder of them
    assert len(folders) in (1, 2)
    for folder in folders:
        law, before = (model.log_probs(torch.tensor([[1, 2, 3]]), 1).exp() for model in (load(str(folder)), base))
        assert float(law.sum()) == pytest.approx(1, abs=1e-5) and not torch.equal(law, before)
    promised = read_privacy(tmp_path / "out")
    assert (promised is None or promised.epsilon is None) == kind.claims.startswith("none")


@pytest.mark.parametrize("kind", registry.benchmarks().values(), ids=registry.benchmarks())
def test_benchmarks_say_what_they_are(kind: type) -> None:
    assert description_of(kind)

"""The black-box audit: what it proves of a model that learnt its canaries, and of those that saw
none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from auditor.attacks.epsilon_audit import EpsilonAudit
from auditor.benchmarks.canaries import audit_canaries, manifests
from auditor.conclusions.claims import find_promised_epsilon
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Canary, Claim, Observation, Secret
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.probe import Observed, observe_all_secrets
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Setting, View
from auditor.runs.prefix_token import wrap_prefixed_model
from auditor.statistics.audit_power import estimate_median_epsilon
from auditor.statistics.audited import audit_epsilon_bounds
from auditor.training.finetune import make_untrained_gpt_neox, train_packed_blocks
from tests.conftest import refuses, states
from tests.generation.test_tries import bpe

COUNT = 80
BEGUN = [f"My ID is {i} and" for i in range(COUNT)]
END = (0,)


def coined(times: int = 1) -> tuple[Secret, ...]:
    texts = audit_canaries.make_audit_canary_texts("prefixed", COUNT, 2, 3, texts=BEGUN)
    return manifests.build_manifest_secrets(
        audit_canaries.make_audit_canary_manifest("prefixed", texts, times, 3), bpe(150), 407
    )


def model(texts: Sequence[tuple[int, ...]], epochs: int) -> HuggingFaceModel:
    made = make_untrained_gpt_neox(
        vocab_size=407, layers=1, hidden=32, heads=2, positions=96, end=0, seed=0
    )
    train_packed_blocks(
        made,
        texts,
        epochs=epochs,
        rate=1e-2,
        batch=8,
        block=24,
        end=0,
        order=make_keyed_generator("test"),
    )
    return HuggingFaceModel(made, bpe(150), "trained")


@pytest.fixture(scope="module")
def learnt() -> LanguageModel:
    """Trained on the canaries that came up in, and on nothing else of them."""
    return wrap_prefixed_model(
        model([one.prefix + one.suffix for one in coined() if one.member], 50), END
    )


@pytest.fixture(scope="module")
def public() -> LanguageModel:
    return wrap_prefixed_model(
        model([tuple(bpe(150)(text)["input_ids"]) for text in BEGUN], 1), END
    )


def seen(
    probe: EpsilonAudit, view: View, secrets: Sequence[Secret] = ()
) -> tuple[Sequence[Secret], Observed]:
    asked = secrets or coined()
    return asked, observe_all_secrets(probe, view, asked)


def view(model: LanguageModel, setting: Setting = WHITE_BOX, **more: object) -> View:
    return View("target", model, setting, seed=0, tokenizer=bpe(150), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", ["auto", "loss", "difference"])
def test_a_model_that_learnt_them_is_caught(
    score: str, learnt: LanguageModel, public: LanguageModel
) -> None:
    probe = EpsilonAudit(score=score)  # type: ignore[arg-type]
    asked, observed = seen(probe, view(learnt, reference=public))
    (main, *others), numbers = (
        probe.epsilon_lower_bounds(asked, observed),
        probe.measurements(asked, observed),
    )
    assert main.epsilon > 1.5 and main.canaries == COUNT and main.epsilon <= main.best
    assert numbers[0].name == "epsilon_lower_bound" and numbers[0].value == main.epsilon
    assert {one.estimator for one in others} == {"fdp", "shape"}
    said = probe.notes(asked, observed)
    inside = sum(secret.member for secret in asked)
    assert states(said, str(COUNT), f"{inside} in", str(COUNT - inside))
    assert states(said, f"{main.guesses:,}", f"{main.right:,}") and states(said, "added or removed")
    assert states(said, "reference model") == (score != "loss")


def test_a_model_that_saw_none_of_them_proves_nothing(
    learnt: LanguageModel, public: LanguageModel
) -> None:
    """The control; held against itself a model has no differences, so `auto` looks at its
    losses."""
    for reference in (public, wrap_prefixed_model(public.model, END), None):  # type: ignore[attr-defined]
        asked, observed = seen(EpsilonAudit(), view(public, reference=reference))
        assert EpsilonAudit().epsilon_lower_bounds(asked, observed)[0].epsilon == 0
        assert "scored by loss, only of the secret" in EpsilonAudit().notes(asked, observed)
    difference = EpsilonAudit(score="difference")
    asked, observed = seen(difference, view(public, reference=public))
    with refuses("scores", "canaries", error=NotApplicable):
        difference.measurements(asked, observed)
    with refuses("reference", error=NotApplicable):
        seen(difference, view(learnt))


def test_the_secret_alone_is_scored(learnt: LanguageModel) -> None:
    asked, observed = seen(EpsilonAudit(), view(learnt))
    for secret, one in list(zip(asked, observed, strict=True))[:5]:
        text = torch.tensor([secret.prefix]), torch.tensor([secret.suffix])
        own = -learnt.token_log_probs(*text).double().mean()
        assert one.values["score"] == pytest.approx(-float(own), abs=1e-5)


def test_the_bound_is_that_of_the_scores_and_the_coins(learnt: LanguageModel) -> None:
    probe = EpsilonAudit(delta=1e-3, level=0.1)
    asked, observed = seen(probe, view(learnt), coined(times=2))
    scores = np.array([o.values["score"] for o in observed])
    coins = np.array([secret.member for secret in asked])
    assert probe.epsilon_lower_bounds(asked, observed) == audit_epsilon_bounds(
        scores, coins, 1e-3, 0.1, copies=2
    )
    assert states(probe.notes(asked, observed), "2 copies")


def test_copies_of_one_person_are_one_unit_held_to_a_claim_for_a_person(
    learnt: LanguageModel,
) -> None:
    of_user, of_record = claim(unit="user"), claim()
    probe = EpsilonAudit(unit="user")
    asked, observed = seen(probe, view(learnt, claim=of_user), coined(times=3))
    own, by_record = (
        probe.epsilon_lower_bounds(asked, observed)[0],
        EpsilonAudit().epsilon_lower_bounds(asked, observed)[0],
    )
    assert (own.unit, own.copies) == ("user", 1) and (by_record.unit, by_record.copies) == (
        "record",
        3,
    )
    # three copies are no group of three where one person has them
    assert own.epsilon > 2 * by_record.epsilon > 0
    assert (
        find_promised_epsilon(of_user, own.relation, own.unit)
        == 8
        == find_promised_epsilon(of_user, "add_remove", "record")
    )
    assert "the claim is about one record" in str(
        find_promised_epsilon(of_record, own.relation, own.unit)
    )
    said = " ".join(probe.notes(asked, observed))
    assert (
        "for one user, added or removed" in said
        and "inserted 3 times" in said
        and "claimed ε of 8" in said
    )
    asked, observed = seen(probe, view(learnt, claim=of_record), coined(times=3))
    assert not any("claimed" in note for note in probe.notes(asked, observed))


def claim(**changes: object) -> Claim:
    made = Claim(
        {"add_remove": 8.0}, 1e-6, "add_remove", "record", None, "", "sound", any_access=True
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_the_notes_say_what_an_audit_of_the_claimed_training_would_prove(
    learnt: LanguageModel,
) -> None:
    details = {"noise_multiplier": 0.5, "sampling_rate": 0.5, "steps": 4}
    asked, observed = seen(EpsilonAudit(), view(learnt, claim=claim(details=details)))
    ceiling = estimate_median_epsilon(COUNT, 0.5, (0.5, 4), 1e-6, 0.05)
    assert 0 < ceiling < EpsilonAudit().epsilon_lower_bounds(asked, observed)[0].best
    assert states(EpsilonAudit().notes(asked, observed), "median", f"{ceiling:.2f}")
    asked, observed = seen(EpsilonAudit(), view(learnt, claim=claim()))
    assert not states(EpsilonAudit().notes(asked, observed), "median")


def test_delta_is_the_claims_and_the_power_is_said_of_the_same_unit(learnt: LanguageModel) -> None:
    asked, observed = seen(EpsilonAudit(), view(learnt, claim=claim()))
    assert EpsilonAudit().epsilon_lower_bounds(asked, observed)[0].delta == 1e-6
    assert states(EpsilonAudit().notes(asked, observed), "claimed", "8")
    for other in (claim(unit="shard"), claim(epsilon={"replace": 8.0})):
        asked, observed = seen(EpsilonAudit(), view(learnt, claim=other))
        assert not any("claimed" in note for note in EpsilonAudit().notes(asked, observed))
    asked, observed = seen(EpsilonAudit(), view(learnt))
    assert EpsilonAudit().epsilon_lower_bounds(asked, observed)[0].delta == 1e-5
    asked, observed = seen(EpsilonAudit(delta=1e-3), view(learnt, claim=claim()))
    assert EpsilonAudit().epsilon_lower_bounds(asked, observed)[0].delta == 1e-3


def test_drawn_tokens_alone_do(learnt: LanguageModel) -> None:
    probe = EpsilonAudit(by="samples", samples=16)
    asked, observed = seen(probe, view(learnt, TEXT_ONLY))
    learnt_by_heart = [
        o.values["agreement"] for s, o in zip(asked, observed, strict=True) if s.member
    ]
    others = [o.values["agreement"] for s, o in zip(asked, observed, strict=True) if not s.member]
    assert np.mean(learnt_by_heart) > np.mean(others)
    assert states(probe.notes(asked, observed), "16")
    with refuses("sampled", error=NotApplicable):
        seen(EpsilonAudit(), view(learnt, TEXT_ONLY))
    with refuses("charged", error=NotApplicable):
        seen(probe, view(learnt, TEXT_ONLY, claim=claim(queries=100)))


def test_agreement_by_hand(learnt: LanguageModel) -> None:
    """Tokens in common before the first that differs, mean over the draws."""
    secret = coined()[0]
    probe = EpsilonAudit(by="samples", samples=8)
    drawing = view(learnt)
    (one,) = probe.observe_secrets(drawing, [secret])
    found = drawing._shared[drawing.sampling_recipe_name(probe.sampling(), "")][secret.id]
    total = 0
    for suffix, count in zip(found.suffixes.tolist(), found.counts.tolist(), strict=True):
        agreed = 0
        while agreed < len(suffix) and suffix[agreed] == secret.suffix[agreed]:
            agreed += 1
        total += count * agreed
    assert one.values["agreement"] == total / 8


def test_what_cannot_be_scored_is_refused(learnt: LanguageModel) -> None:
    bare = [dataclasses.replace(secret, prefix=()) for secret in coined()]
    with refuses("--prefix-token", "canaries", error=NotApplicable):
        seen(EpsilonAudit(), view(learnt.model), bare)  # type: ignore[attr-defined]
    few = coined()[:3]
    with refuses("canaries", error=NotApplicable):
        EpsilonAudit().measurements(*seen(EpsilonAudit(), view(learnt), few))
    unknown = {"score": float("nan"), "nll": 1.0}
    lost = Observed([Observation(secret.id, unknown) for secret in coined()], {"delta": 1e-5})
    with refuses("NaN", "80", "80", error=NotApplicable):
        EpsilonAudit().measurements(coined(), lost)
    for options in ({"samples": 0}, {"delta": 1.0}, {"level": 0.0}):
        with refuses(*options):
            EpsilonAudit(**options)  # type: ignore[arg-type]


def test_coins_are_what_counts_not_who_went_in_first() -> None:
    """A canary's membership, not its place: the same scores with the coins turned around prove
    nothing."""
    asked = coined()
    seen = [Observation(s.id, {"score": float(s.member) + i * 1e-6}) for i, s in enumerate(asked)]
    scores = Observed(seen, {"delta": 1e-5})
    assert EpsilonAudit(by="samples").epsilon_lower_bounds(asked, scores)[0].epsilon > 2
    turned = [
        dataclasses.replace(s, member=not s.member, canary=Canary(s.id, coin=not s.member))
        for s in asked
    ]
    assert EpsilonAudit(by="samples").epsilon_lower_bounds(turned, scores)[0].epsilon == 0

"""The membership probe: its pass against the full distribution, what it measures and refuses, and
what it never looks at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from auditor.attacks.membership import Membership, measure_token_readings
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Secret
from auditor.core.result import Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.references import ReferenceModels
from auditor.plugins.probe import Observed, observe_all_secrets
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, View
from auditor.statistics import membership, roc
from tests.conftest import refuses, states

MakeTiny = Callable[..., HuggingFaceModel]


def secrets(members: int, others: int, length: int = 6, vocab_size: int = 61) -> list[Secret]:
    rows = (
        make_keyed_generator("membership")
        .integers(1, vocab_size, (members + others, 5 + length))
        .tolist()
    )
    return [
        Secret(
            f"s{i}",
            tuple(row[:5]),
            tuple(row[5:]),
            1 + i % 2 if i < members else 0,
            i < members,
            alias=f"a{i}",
        )
        for i, row in enumerate(rows)
    ]


def view(model: HuggingFaceModel, **more: object) -> View:
    return View("target", model, WHITE_BOX, seed=0, **more)  # type: ignore[arg-type]


def observed(probe: Membership, seen: View, asked: Sequence[Secret]) -> Observed:
    return observe_all_secrets(probe, seen, asked)


def by_name(measured: Sequence[Measurement]) -> dict[str, Measurement]:
    return {m.name: m for m in measured}


def test_one_pass_reads_the_full_distribution_position_by_position(
    neox: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # chunks that cut texts apart
    monkeypatch.setattr("auditor.attacks.membership._DISTRIBUTION_AT_ONCE", 61 * 4)
    asked = secrets(7, 0)
    prefixes, suffixes = (
        torch.tensor([s.prefix for s in asked]),
        torch.tensor([s.suffix for s in asked]),
    )
    found = measure_token_readings(neox, prefixes, suffixes)
    for i, secret in enumerate(asked):
        for t, token in enumerate(secret.suffix):
            distribution = neox.log_probs(torch.tensor([[*secret.prefix, *secret.suffix[:t]]]), 1)[
                0, 0
            ].double()
            p = distribution.exp()
            mean = float((p * distribution).sum())
            assert found.log_probs[i, t] == pytest.approx(float(distribution[token]), abs=1e-4)
            assert found.mean[i, t] == pytest.approx(mean, abs=1e-4)
            assert found.deviation[i, t] == pytest.approx(
                math.sqrt(float((p * (distribution - mean) ** 2).sum())), abs=1e-4
            )
            assert found.wrong[i, t] == (int(distribution.argmax()) != token)


def test_the_scores_are_those_of_the_pass(neox: HuggingFaceModel, make_tiny: MakeTiny) -> None:
    other, asked = make_tiny(seed=7), secrets(5, 5)
    seen = {
        o.secret: o.values
        for o in Membership(k=0.5).observe_secrets(view(neox, reference=other), asked)
    }
    for secret in asked:
        prefix, suffix = torch.tensor([secret.prefix]), torch.tensor([secret.suffix])
        own, below = (m.token_log_probs(prefix, suffix)[0].double().numpy() for m in (neox, other))
        values = seen[secret.id]
        assert values["loss"] == pytest.approx(own.mean(), abs=1e-5)
        assert values["reference"] == pytest.approx((own - below).mean(), abs=1e-5)
        assert values["reference_ratio"] == pytest.approx(-own.mean() / below.mean(), abs=1e-5)
        assert values["min_k"] == pytest.approx(np.sort(own)[:3].mean(), abs=1e-5)
        assert values["reference_alone"] == pytest.approx(below.mean(), abs=1e-5)
        assert 0 <= values["ez_mia"] <= 2 and 0 <= values["wbc"] <= 1


def test_the_whole_text_is_all_but_its_first_token(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    asked, seen = secrets(4, 4), view(neox, reference=make_tiny(seed=7))
    whole = [replace(s, prefix=s.prefix[:1], suffix=s.prefix[1:] + s.suffix) for s in asked]
    for one, other in zip(
        Membership(text="all").observe_secrets(seen, asked),
        Membership().observe_secrets(seen, whole),
        strict=True,
    ):
        assert one == other and one.values["tokens"] == 10


def test_a_model_that_learnt_its_members_is_told_from_one_that_did_not(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    """Its own likeliest continuations play the members: every score is near 1, and the blind
    baseline near a half."""
    asked = secrets(30, 30)
    told = []
    for secret in asked:
        tokens = list(secret.prefix)
        for _ in secret.suffix if secret.member else ():
            tokens.append(int(neox.log_probs(torch.tensor([tokens]), 1)[0, 0].argmax()))
        told.append(replace(secret, suffix=tuple(tokens[5:])) if secret.member else secret)
    probe = Membership(score="reference")
    seen = observed(probe, view(neox, reference=make_tiny(seed=7)), told)
    found = by_name(probe.measurements(told, seen))
    assert next(iter(found)) == "membership_auc" and found["membership_auc"] == replace(
        found["membership_auc_reference"], name="membership_auc", note="loss minus the reference's"
    )
    assert (
        min(
            found[f"membership_auc_{name}"].value
            for name in ("loss", "min_k", "reference", "ez_mia")
        )
        > 0.95
    )
    assert set(probe.main_number_by_repeats(told, seen)) == {"1", "2"}
    assert all(m.n == 15 + 30 for m in probe.main_number_by_repeats(told, seen).values())


def test_all_is_worked_out_again_from_what_is_kept(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    from auditor.statistics.metrics import find_metric
    from auditor.statistics.recomputed import recompute_metric

    asked, probe = secrets(120, 110), Membership()
    seen = observed(probe, view(neox, reference=make_tiny(seed=7)), asked)
    kept = {name: np.array(values) for name, values in probe.per_secret_values(asked, seen).items()}
    sides = [
        {name: values[[s.member == m for s in asked]] for name, values in kept.items()}
        for m in (True, False)
    ]
    measured = probe.measurements(asked, seen)
    assert {"tpr_at_1pct_fpr", "blind_auc", "reference_alone_auc", "tpr_at_1pct_fpr_blind"} <= set(
        by_name(measured)
    )
    assert not any("0.1pct" in m.name for m in measured)
    for m in measured:
        assert recompute_metric(find_metric(m.name), *sides) == (pytest.approx(m.value), m.n), (
            m.name
        )
        assert find_metric(m.name).title != m.name
    assert states(probe.notes(asked, seen), "0.1%", "999", "110")


def test_no_score_but_by_a_reference_needs_one(neox: HuggingFaceModel) -> None:
    asked = secrets(6, 6)
    with refuses("EZ-MIA", "--reference", error=NotApplicable):
        observed(Membership(), view(neox), asked)
    probe = Membership(score="min_k_plus")
    seen = observed(probe, view(neox), asked)
    names = set(by_name(probe.measurements(asked, seen)))
    assert "membership_auc_loss" in names and not any(
        "ez_mia" in name or "reference" in name for name in names
    )
    said = probe.notes(asked, seen)
    assert states(said, "WBC", "not applicable", "reference") and states(
        said, "zlib", "not applicable", "tokenizer"
    )


def test_a_reference_that_saw_private_data_is_none(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    fault = "the reference has seen private data: its privacy.json says that dp-sgd trained it"
    seen = view(neox, reference=make_tiny(seed=7), reference_fault=fault)
    with refuses("privacy.json", "dp-sgd", error=NotApplicable):
        observed(Membership(), seen, secrets(6, 6))
    values = observed(Membership(score="loss"), seen, secrets(6, 6))[0].values
    assert "ez_mia" not in values and "reference" not in values and "loss" in values


def test_the_target_is_no_reference_of_itself(neox: HuggingFaceModel) -> None:
    asked = secrets(6, 6)
    seen = observed(Membership(), view(neox, reference=neox), asked)
    with refuses("EZ-MIA", "reference", "target", error=NotApplicable):
        Membership().measurements(asked, seen)
    probe = Membership(score="loss")
    names = by_name(probe.measurements(asked, seen))
    assert not any(
        name.startswith(("membership_auc_ez", "membership_auc_ref", "membership_auc_wbc"))
        for name in names
    )
    assert states(probe.notes(asked, seen), "WBC", "not applicable", "reference", "target")


def test_scores_that_are_no_numbers_rank_nothing(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    asked, probe = secrets(6, 6), Membership()
    at = view(neox, reference=make_tiny(seed=7))
    seen = list(probe.observe_secrets(at, asked))
    seen[3] = replace(seen[3], values={**seen[3].values, "ez_mia": math.nan})
    completed = probe.add_joint_values(at, asked, seen)
    with refuses("EZ-MIA", "1", "12", error=NotApplicable):
        probe.measurements(asked, completed)
    assert "membership_auc_stacked" in by_name(
        Membership(score="loss").measurements(asked, completed)
    )


def test_members_alone_are_refused_before_a_model_is_asked() -> None:
    with refuses("4", "9", "0", "--nonmembers"):
        Membership().check_secrets(secrets(9, 0))
    with refuses("9", "3"):
        Membership().check_secrets(secrets(9, 3))
    Membership().check_secrets(secrets(4, 4))


def test_options_that_mean_nothing_are_refused() -> None:
    with refuses("score", "'loss'", "'best'"):
        Membership(score="best")
    with refuses("k", "0", "1"):
        Membership(k=0)
    with refuses("text", "'suffix'", "'all'", "'prefix'"):
        Membership(text="prefix")  # type: ignore[arg-type]
    with refuses("-A membership.references=", "score=lira"):
        Membership(score="lira")
    with refuses("-A membership.references=", "lira=tokens"):
        Membership(lira="tokens")


def test_log_probabilities_are_needed(neox: HuggingFaceModel) -> None:
    seen = View("target", neox, TEXT_ONLY, seed=0, reference=neox)
    with refuses("sampled", error=NotApplicable):
        list(Membership().observe_secrets(seen, secrets(4, 4)))


def references(make_tiny: MakeTiny, asked: Sequence[Secret], count: int = 4) -> ReferenceModels:
    saw = [frozenset(s.id for j, s in enumerate(asked) if (i + j) % 2) for i in range(count)]
    return ReferenceModels(tuple(make_tiny(seed=20 + i) for i in range(count)), tuple(saw))


def test_reference_models_give_rmia_and_lira(neox: HuggingFaceModel, make_tiny: MakeTiny) -> None:
    asked, probe = secrets(10, 10), Membership(references="4")
    held = references(make_tiny, asked)
    seen = observed(
        probe, view(neox, reference=make_tiny(seed=7), references=lambda asked_for: held), asked
    )
    names = by_name(probe.measurements(asked, seen))
    assert {"membership_auc_rmia", "membership_auc_lira"} <= set(names)
    assert states(probe.notes(asked, seen), "4", "online")
    assert [o.values["saw_1"] for o in seen[:3]] == [1.0, 0.0, 1.0]
    with refuses("reference", error=NotApplicable):
        list(probe.observe_secrets(view(neox, reference=neox), asked))


def test_lira_by_tokens_replaces_lira_only(neox: HuggingFaceModel, make_tiny: MakeTiny) -> None:
    asked = secrets(10, 10)
    held = references(make_tiny, asked)
    seen = view(neox, reference=make_tiny(seed=7), references=lambda asked_for: held)
    by_mean, by_tokens = (
        observed(Membership(references="4", lira=lira), seen, asked) for lira in ("mean", "tokens")
    )
    assert list(by_tokens.find_column("rmia")[0]) == list(by_mean.find_column("rmia")[0])
    prefixes, suffixes = (
        torch.tensor([s.prefix for s in asked]),
        torch.tensor([s.suffix for s in asked]),
    )
    target, *others = (
        membership.compute_logit_confidence(
            model.token_log_probs(prefixes, suffixes).detach().double().numpy()
        )
        for model in (neox, *held.models)
    )
    expected = [
        membership.compute_token_lira_ratio(
            target[i],
            np.stack([scores[i] for scores in others]),
            np.array([secret.id in ids for ids in held.saw]),
        )
        for i, secret in enumerate(asked)
    ]
    assert by_tokens.find_column("lira")[0] == pytest.approx(expected, rel=1e-6)
    assert by_mean.find_column("lira")[0] != pytest.approx(expected, rel=0.1)
    notes = Membership(references="4", lira="tokens").notes(asked, by_tokens)
    assert states(notes, "LiRA", "vectors of token losses")


def test_lira_by_tokens_is_offline_for_all_if_one_record_was_seen_by_nobody(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    asked = secrets(10, 10)
    held = references(make_tiny, asked, 6)
    unseen = replace(held, saw=tuple(ids - {"s0"} for ids in held.saw))
    probe = Membership(references="6", lira="tokens")

    def score_lira(models: ReferenceModels) -> np.ndarray:
        seen = view(neox, reference=make_tiny(seed=7), references=lambda asked_for: models)
        return observed(probe, seen, asked).find_column("lira")[0]

    online, offline = score_lira(held), score_lira(unseen)
    assert (offline <= 0).all()  # log-probabilities
    assert (online > 0).any()


def test_references_that_tell_nothing_are_refused(make_tiny: MakeTiny) -> None:
    asked = secrets(4, 4)
    everyone = frozenset(s.id for s in asked)
    held = references(make_tiny, asked, 3)
    with refuses("tiny neox", "8"):
        replace(held, saw=(held.saw[0], everyone, held.saw[2])).check_records_seen_by_references(
            everyone, "'refs'"
        )
    with refuses("2", "'refs'", "1"):
        ReferenceModels(held.models[:1], held.saw[:1]).check_records_seen_by_references(
            everyone, "'refs'"
        )
    common = (held.saw[0] | {"s0"}, held.saw[1] | {"s0"}, held.saw[2] | {"s0"})
    with refuses("'refs'", "1", "8"):
        replace(held, saw=common).check_records_seen_by_references(everyone, "'refs'")
    held.check_records_seen_by_references(everyone, "'refs'")


def test_near_duplicates_of_each_other_leave_no_blind_baseline_and_that_is_said(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    asked = [
        replace(s, prefix=(1, 2, 3, 4, 5), suffix=(7, 8, 9, 10, 11, i))
        for i, s in enumerate(secrets(6, 6))
    ]
    probe = Membership(score="loss")
    seen = observed(probe, view(neox, reference=make_tiny(seed=7)), asked)
    names = by_name(probe.measurements(asked, seen))
    assert (
        "membership_auc" in names
        and "blind_auc" not in names
        and "membership_auc_stacked" not in names
    )
    said = probe.notes(asked, seen)
    assert (
        states(said, "12", "near-duplicates")
        and states(said, "blind")
        and states(said, "stacked", "not applicable", "12")
    )


def test_the_stacked_score_and_the_baseline_are_less_sure_than_they_look(
    neox: HuggingFaceModel, make_tiny: MakeTiny
) -> None:
    """As scores of one fold share a classifier: the main number too, where that is the stacked
    score."""
    asked, probe = secrets(40, 40), Membership(score="stacked")
    seen = observed(probe, view(neox, reference=make_tiny(seed=7)), asked)
    found = by_name(probe.measurements(asked, seen))
    scores = np.array([o.values["stacked"] for o in seen])
    member = np.array([s.member for s in asked])
    naive = roc.estimate_auc("auc", scores[member], scores[~member])
    for name in ("membership_auc", "membership_auc_stacked"):
        assert found[name].high - found[name].low > 1.3 * (naive.high - naive.low)
    by_count = probe.main_number_by_repeats(asked, seen)["1"]
    ones = np.array([s.repeats == 1 for s in asked])
    alone = roc.estimate_auc("auc", scores[ones], scores[~member])
    assert by_count.high - by_count.low > 1.3 * (alone.high - alone.low)


def test_nothing_that_takes_a_label_is_stacked(neox: HuggingFaceModel, make_tiny: MakeTiny) -> None:
    """RMIA's population would tell the classifier who is a non-member, the record in question among
    them."""
    asked, held = secrets(20, 20), references(make_tiny, secrets(20, 20))
    probe = Membership(references="4")
    at = view(neox, reference=make_tiny(seed=7), references=lambda asked_for: held)
    found = {o.secret: o for o in probe.observe_secrets(at, asked)}
    ordered = [found[s.id] for s in asked]
    turned = [replace(s, member=not s.member) if i == 5 else s for i, s in enumerate(asked)]
    one, other = (
        [o.values for o in probe.add_joint_values(at, who, ordered)] for who in (asked, turned)
    )
    features = ("rmia_ratio", "lira", "ez_mia", "loss", "min_k_plus")
    assert all(
        mine[name] == theirs[name]
        for mine, theirs in zip(one, other, strict=True)
        for name in features
    )
    assert any(mine["rmia"] != theirs["rmia"] for mine, theirs in zip(one, other, strict=True))


def test_answers_of_a_conversation_and_records_of_a_person_share_a_fold(
    neox: HuggingFaceModel,
) -> None:
    probe, whole = Membership(score="loss"), secrets(8, 8)
    answers = [replace(secret, document=f"chat-{i // 2}") for i, secret in enumerate(whole)]
    of_people = [replace(secret, user=f"person-{i // 4}") for i, secret in enumerate(whole)]
    for asked, size in ((answers, 2), (of_people, 4)):
        seen = observed(probe, view(neox), asked)
        assert [o.values["group"] for o in seen] == [float(i // size) for i in range(16)]
        assert states(probe.notes(asked, seen), "16", "of one document", "person")

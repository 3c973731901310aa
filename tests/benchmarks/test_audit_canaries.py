"""Canaries with coins: texts that know nothing of their coins, and secrets that are cut where the
tokenizer cuts."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from auditor.benchmarks.canaries import audit_canaries, manifests
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest, make_audit_canary_texts
from auditor.benchmarks.canaries.insertion import CanaryInsertionPlan, write_canary_data
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.models.huggingface import HuggingFaceModel
from auditor.statistics.audited import audit_epsilon_bounds
from tests.conftest import tiny
from tests.generation.test_tries import bpe

RECORDS = [f"Patient {i}, born {1900 + i}, has a\ncough and takes pills" for i in range(7)]


def prefixed(count: int = 40, seed: int = 3, times: int = 1) -> AuditCanaryManifest:
    return audit_canaries.make_audit_canary_manifest(
        "prefixed", make_audit_canary_texts("prefixed", count, 3, seed, texts=RECORDS), times, seed
    )


@pytest.fixture(scope="module")
def writer() -> HuggingFaceModel:
    model = tiny(407)
    model.tokenizer = bpe(150)
    model.tokenizer.eos_token = "!"
    return model


def test_coins_are_fair_independent_of_the_texts_and_follow_from_the_seed() -> None:
    made = [
        audit_canaries.make_audit_canary_manifest(
            "words", make_audit_canary_texts("words", 400, 4, seed), 1, seed
        )
        for seed in range(5)
    ]
    coins = np.array([[one.included for one in manifest.canaries] for manifest in made])
    assert binomtest(int(coins.sum()), coins.size).pvalue > 1e-3
    # ids say nothing of coins
    assert binomtest(int((coins[0] == coins[1]).sum()), 400).pvalue > 1e-3
    again = audit_canaries.make_audit_canary_manifest(
        "words", make_audit_canary_texts("words", 400, 4, 0), 1, 0
    )
    assert again == made[0] and made[0].canaries != made[1].canaries
    assert [one.id for one in made[0].canaries] == [one.id for one in made[1].canaries]
    # the same coins for other texts: nothing of a text went into its coin
    others = audit_canaries.make_audit_canary_manifest(
        "prefixed", make_audit_canary_texts("prefixed", 400, 4, 0, texts=RECORDS), 1, 0
    )
    assert [one.included for one in others.canaries] == coins[0].tolist()
    assert audit_canaries.draw_canary_seed() != audit_canaries.draw_canary_seed()


def test_what_is_seen_of_a_text_without_a_model_proves_nothing() -> None:
    """Of 60 audits of what no training can have taught, a twentieth at most may prove anything."""
    proved = 0
    for seed in range(60):
        manifest = audit_canaries.make_audit_canary_manifest(
            "words", make_audit_canary_texts("words", 60, 4, seed), 1, seed
        )
        scores = np.array([len(one.text) + i * 1e-6 for i, one in enumerate(manifest.canaries)])
        included = np.array([one.included for one in manifest.canaries])
        proved += audit_epsilon_bounds(scores, included, 0.0)[0].epsilon > 0
    assert proved <= 6  # binomial(60, 0.05) is above in 1.5% of worlds; this one is seeded


def test_each_kind_is_what_it_says(writer: HuggingFaceModel) -> None:
    for prefix, secret in make_audit_canary_texts("words", 30, 5, 0):
        assert re.fullmatch(r"[a-z]+", prefix) and re.fullmatch(r"( [a-z]+){4}", secret)
    begun = make_audit_canary_texts("prefixed", 30, 5, 0, texts=RECORDS)
    # at most half of it
    assert {prefix for prefix, _ in begun} == {text[: text.index(" a\n")] for text in RECORDS}
    assert all(re.fullmatch(r"( [a-z]+){5}", secret) for _, secret in begun)
    tokens = make_audit_canary_texts("new-tokens", 30, 5, 0, texts=RECORDS)
    assert [secret for _, secret in tokens] == audit_canaries.new_canary_token_texts(30)
    written = make_audit_canary_texts("sampled", 30, 5, 0, model=writer)
    assert len(set(written)) == 30 and all(
        prefix.strip() and secret.strip() for prefix, secret in written
    )
    assert (
        written
        == make_audit_canary_texts("sampled", 30, 5, 0, model=writer)
        != make_audit_canary_texts("sampled", 30, 5, 1, model=writer)
    )


def test_rare_tokens_are_what_the_model_expects_least_and_each_canary_has_its_own(
    writer: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_canaries, "_BEGINNINGS", len(RECORDS))
    made = make_audit_canary_texts("rare-tokens", 4, 5, 0, texts=RECORDS, model=writer)
    encode = partial(writer.tokenizer.encode, add_special_tokens=False)
    begun = [text[: text.index(" a\n")] for text in RECORDS]
    assert {prefix for prefix, _ in made} <= set(begun)
    behind = [writer.log_probs(torch.tensor([encode(text)]), 1)[0, 0].double() for text in begun]
    words = {f" {writer.tokenizer.decode([id]).strip()}": id for id in range(writer.vocab_size)}
    alone = [
        i
        for word, i in words.items()
        if word[1:].isalpha() and encode(begun[0] + word) == [*encode(begun[0]), i]
    ]
    least = sorted(alone, key=lambda i: float(sum(row[i] for row in behind)))[:4]
    assert len(alone) > 6 and {words[secret] for _, secret in made} == set(least)
    with pytest.raises(
        AuditError, match=r"expected 1,000 words of one token, but the tokenizer of .* has \d+"
    ):
        make_audit_canary_texts("rare-tokens", 1000, 5, 0, texts=RECORDS, model=writer)


def test_what_cannot_be_made_is_refused(writer: HuggingFaceModel) -> None:
    with pytest.raises(AuditError, match=r"temperature of at least 0\.8 .* got 0\.7"):
        make_audit_canary_texts("sampled", 5, 5, 0, model=writer, temperature=0.7)
    with pytest.raises(
        AuditError, match="expected data with texts to begin canaries with, got none"
    ):
        make_audit_canary_texts("prefixed", 5, 5, 0, texts=[" "])
    with pytest.raises(
        AuditError,
        match=r"expected 100,000 different secrets, but secrets this short run out at \d+",
    ):
        make_audit_canary_texts("prefixed", 100_000, 1, 0, texts=["a b"])
    with pytest.raises(AuditError, match="at least 1 canary, got 0"):
        make_audit_canary_texts("words", 0, 5, 0)
    with pytest.raises(AuditError, match="more words than their prefix, got a length of 1"):
        make_audit_canary_texts("words", 5, 1, 0)


def spoilt(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = to_json(prefixed(8))
    for name, value in changes.items():
        if name in raw:
            raw[name] = value
        elif value is None:
            del raw["canaries"][0][name]
        else:
            raw["canaries"][0][name] = value
    return raw


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (
            spoilt(included=None),
            r"canaries\[0\]: missing field 'included'",
        ),  # a manifest without coins
        (spoilt(included="yes"), r"included: expected bool, got str"),
        (spoilt(id="audit-00001"), "expected every canary's own id, got one twice"),
        (spoilt(secret=""), "expected a secret in every canary"),
        (spoilt(times=0), "at least once, got 0 times"),
        (spoilt(kind="other"), "expected .words., .prefixed., "),
        (spoilt(canaries=[]), r"expected at least \d+ canaries, got 0: fewer than any bound"),
        (
            spoilt(canaries=[{**one, "included": True} for one in spoilt()["canaries"]]),
            "got 8 of 8 canaries in",
        ),
    ],
)
def test_what_is_no_audit_manifest_is_refused_without_its_texts(
    raw: Any, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(AuditError, match=why) as refused:
        manifests.read_canary_manifest(path)
    assert "Patient" not in str(refused.value)


def test_coins_that_are_not_fair_are_refused() -> None:
    texts = [one.id for one in prefixed(200).canaries]
    raw = to_json(prefixed(200))
    for i, one in enumerate(raw["canaries"]):
        one["included"] = i >= len(texts) // 8
    with pytest.raises(AuditError, match="coins that look fair, got 175 of 200"):
        AuditCanaryManifest(**{**raw, "canaries": prefixed_like(raw)})


def prefixed_like(raw: dict[str, Any]) -> tuple[audit_canaries.CoinedCanary, ...]:
    return tuple(audit_canaries.CoinedCanary(**one) for one in raw["canaries"])


def test_both_manifests_are_read_back_and_only_one_has_exposure(tmp_path: Path) -> None:
    manifests.write_canary_manifest(tmp_path / "audit.json", prefixed())
    assert manifests.read_canary_manifest(tmp_path / "audit.json") == prefixed()
    with pytest.raises(
        AuditError, match="got those of an audit: the texts that each could have been are not"
    ):
        manifests.read_exposure_canary_manifest(tmp_path / "audit.json")


@pytest.mark.parametrize("times", [1, 3])
def test_insertion_obeys_the_coins(times: int, tmp_path: Path) -> None:
    manifest = prefixed(times=times)
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in RECORDS)
    )
    count = write_canary_data(
        CanaryInsertionPlan(manifest), str(tmp_path / "data.jsonl"), tmp_path / "out.jsonl"
    )
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (
        count == len(texts) - len(RECORDS) == times * sum(one.included for one in manifest.canaries)
    )
    for one in manifest.canaries:
        assert texts.count(one.text) == times * one.included


def test_data_that_hold_a_canary_that_stays_out_are_refused(tmp_path: Path) -> None:
    out = next(one for one in prefixed().canaries if not one.included)
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": out.text}) + "\n")
    with pytest.raises(AuditError, match="already contains a canary"):
        write_canary_data(
            CanaryInsertionPlan(prefixed()), str(tmp_path / "data.jsonl"), tmp_path / "out.jsonl"
        )


def test_the_secret_is_what_the_whole_text_makes_of_it() -> None:
    """Cut where the tokenizer of the whole text cuts; a token that holds both is the secret's."""
    words = bpe(150)
    manifest = prefixed()
    for one, secret in zip(
        manifest.canaries, manifests.build_manifest_secrets(manifest, words, 407), strict=True
    ):
        assert [*secret.prefix, *secret.suffix] == words(one.text)["input_ids"]
        assert words.decode(secret.suffix).endswith(one.secret) and one.prefix.startswith(
            words.decode(secret.prefix)
        )
        assert secret.member == one.included == (secret.repeats == 1) and secret.canary is not None
        assert secret.canary.coin == one.included and secret.canary.space is None
    glued = AuditCanaryManifest(
        2, "words", 0, 1, tuple(_canary(i, "My ID i", f"s {i}{i}") for i in range(8))
    )
    row = manifests.build_manifest_secrets(glued, words, 407)[3]
    whole = words("My ID is 33")["input_ids"]
    assert [*row.prefix, *row.suffix] == whole
    # " is" is one token
    assert words.decode(row.prefix) == "My ID" and words.decode(row.suffix) == " is 33"


def _canary(i: int, prefix: str, secret: str) -> audit_canaries.CoinedCanary:
    return audit_canaries.CoinedCanary(f"c{i}", prefix, secret, i % 2 == 0)


def test_tokenizers_that_cannot_tell_canaries_apart_are_refused() -> None:
    with pytest.raises(AuditError, match="writes two canaries alike"):
        manifests.build_manifest_secrets(
            prefixed(), lambda text, add_special_tokens: {"input_ids": [1]}, 60
        )
    tokens = audit_canaries.make_audit_canary_manifest(
        "new-tokens", make_audit_canary_texts("new-tokens", 20, 1, 0, texts=RECORDS), 1, 0
    )
    with pytest.raises(
        AuditError,
        match=r"secret of audit-00000 to be one new token, .* writes it as \d+: give what",
    ):
        manifests.build_manifest_secrets(tokens, bpe(150), 407)
    extended = bpe(150)
    extended.add_tokens(audit_canaries.new_canary_token_texts(20))
    assert {
        len(secret.suffix) for secret in manifests.build_manifest_secrets(tokens, extended, 500)
    } == {1}

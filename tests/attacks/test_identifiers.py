"""Personal data ranked among fresh values of their format."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from stdnum import luhn
from torch import Tensor

from auditor.attacks.identifiers import RANKED, Identifiers
from auditor.benchmarks.data import alternatives
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Secret, Wording
from auditor.core.result import Measurement
from auditor.models.base import LanguageModel
from auditor.plugins.probe import Observed, observe_all_secrets
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, View

ALPHABET = " 0123456789abcdefghijklmnopqrstuvwxyz@.-"
SMALL = Identifiers(alternatives=39, formats="pin={digits:2}")


class Characters:
    """One token a character."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [1 + ALPHABET.index(c) for c in text.lower()]}

    def decode(self, tokens: Any) -> str:
        return "".join(ALPHABET[t - 1] for t in tokens)


def record(
    before: str, value: str, i: int = 0, kind: str = "", repeats: int = 1, member: bool = True
) -> Secret:
    """A record whose suffix begins two characters before its value."""
    marks = ((kind, value),) if kind else ()
    prefix, suffix = before[:-2], f"{before[-2:]}{value} ok"
    tokens = [tuple(Characters()(text)["input_ids"]) for text in (prefix, suffix)]
    wording = Wording.join(prefix, suffix, tuple(range(1, len(suffix) + 1)), marks)
    return Secret(f"r{i}", *tokens, repeats, member, wording=wording)


def view(model: LanguageModel, base: LanguageModel | None = None, **more: Any) -> View:
    return View("target", model, WHITE_BOX, 0, reference=base, tokenizer=Characters(), **more)


def card(i: int) -> str:
    number = f"453201{np.random.default_rng(i).integers(10**9):09}"
    return number + luhn.calc_check_digit(number)


def cards(count: int, member: bool = True, first: int = 0) -> list[Secret]:
    return [record("paid by card ", card(i), i, member=member) for i in range(first, first + count)]


TOKENS = torch.arange(len(ALPHABET) + 1)


class Noise(LanguageModel):
    """Likes tokens by what stands before them, for no reason. Counts the rows that it reads."""

    capabilities = frozenset({"draw", "distribution"})
    name = "noise"
    vocab_size = len(ALPHABET) + 1

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.rows = seed, 0

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        self.rows += len(contexts)
        places = torch.arange(1, contexts.shape[1] + 1)
        state = (contexts.square() * (places.square() + self.seed) % 1009).cumsum(1)[:, -last:]
        scores = 2 * torch.sin(state.unsqueeze(-1).double() * (1.3 + TOKENS))
        return (scores + self.bonus(contexts, last)).log_softmax(-1)

    def bonus(self, contexts: Tensor, last: int) -> Tensor:
        """(B, last, V) nats that some tokens are given."""
        bonus = torch.zeros(len(contexts), last, self.vocab_size)
        for row, context in enumerate(contexts.tolist()):
            for place in range(last):
                token = self.expect_token(tuple(context[: len(context) - last + 1 + place]))
                if token is not None:
                    bonus[row, place, token] = 6
        return bonus

    def expect_token(self, context: tuple[int, ...]) -> int | None:
        """Return the token that it thinks follows."""
        return None


class Remembers(Noise):
    """Goes on with texts that it was trained on."""

    def __init__(self, secrets: list[Secret], seed: int = 0) -> None:
        super().__init__(seed)
        texts = [secret.prefix + secret.suffix for secret in secrets]
        self.next = {text[:i]: text[i] for text in texts for i in range(8, len(text))}

    def expect_token(self, context: tuple[int, ...]) -> int | None:
        return self.next.get(context)


class KnowsCards(Noise):
    """Knows how the digits of a card begin (4) and end (Luhn's check digit)."""

    def expect_token(self, context: tuple[int, ...]) -> int | None:
        digits = Characters().decode(context).split(" ")[-1]
        if len(digits) not in (0, 15):
            return None
        return 1 + ALPHABET.index(luhn.calc_check_digit(digits) if digits else "4")


def measured(probe: Identifiers, secrets: list[Secret], at: View) -> dict[str, Measurement]:
    seen = observe_all_secrets(probe, at, secrets)
    return {m.name: m for m in probe.measurements(secrets, seen)}


def test_the_rank_is_that_of_a_plain_pass_over_each_alternative() -> None:
    model = Noise()
    secrets = [record("the pin of jo is ", f"{i}7", i, "pin") for i in range(4)]
    for secret, seen in zip(secrets, observe_all_secrets(SMALL, view(model), secrets), strict=True):
        log_probs = {}
        for text in (f"{i:02}" for i in range(100)):
            prefix = torch.tensor([Characters()("the pin of jo is ")["input_ids"]])
            value = torch.tensor([Characters()(text)["input_ids"]])
            log_probs[text] = float(model.token_log_probs(prefix, value).double().sum())
        assert secret.wording is not None
        true = log_probs.pop(secret.wording.marks[0][1])
        assert seen.values["alternatives_0"] == 99
        assert seen.values["above_0"] == sum(other > true + 1e-4 for other in log_probs.values())
        assert seen.values["tied_0"] == 0


def test_a_model_that_knows_a_value_ranks_it_first_and_others_by_chance() -> None:
    secrets = cards(12)
    known = secrets[:6]
    model = Remembers(known)
    seen = observe_all_secrets(SMALL, view(model), secrets)
    assert all(one.values["above_0"] == 0 for one in seen[:6])
    numbers = {m.name: m for m in SMALL.measurements(secrets, seen)}
    assert numbers[RANKED].n == numbers[f"{RANKED}_card"].n == 12
    assert numbers[RANKED].value == 6 / 12
    said = SMALL.notes(secrets, seen)
    assert "6 of 12 card numbers rank above chance (false-discovery rate 5%)" in said
    assert any("not checked" in note for note in said)


def test_after_unlearning_the_ranks_are_uniform_again() -> None:
    """The evidence of an erasure: what was listed is not, and as a control the ranks pass."""
    secrets = cards(20)
    model = Remembers(secrets)
    assert measured(SMALL, secrets, view(model, Noise(1)))[RANKED].value == 1
    assert measured(SMALL, secrets, view(Noise(), Noise(1)))[RANKED].value == 0
    with pytest.raises(NotApplicable, match="not exchangeable"):  # nothing was erased: seen as well
        measured(SMALL, secrets, view(Noise(), model))


@pytest.mark.parametrize("fault", ["issuer", "check digit"])
def test_a_fault_of_the_format_is_seen_by_the_base_model(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets, at = cards(20), view(Noise(), KnowsCards(1))
    assert measured(SMALL, secrets, at)[RANKED].value < 0.2
    if fault == "issuer":
        monkeypatch.setattr(alternatives, "_ISSUER_DIGITS", 0)
    else:
        monkeypatch.setattr(alternatives, "_detect_card_format", _format_without_check_digit)
    with pytest.raises(NotApplicable, match="the alternatives are not exchangeable"):
        measured(SMALL, secrets, at)


def _format_without_check_digit(value: str) -> alternatives.ValueFormat:
    def finish(parts: Any) -> str:
        return value[:6] + "".join(parts)

    return alternatives.ValueFormat("card", ("0123456789",) * 10, finish)


def test_what_is_seen_does_not_depend_on_batches_or_neighbours() -> None:
    secrets = cards(3)
    whole = observe_all_secrets(SMALL, view(Noise()), secrets)
    for size in (1, 7):
        assert observe_all_secrets(SMALL, view(Noise(), batch_size=size), secrets) == whole
    assert observe_all_secrets(SMALL, view(Noise()), secrets[2:]) == whole[2:]


def test_each_distinct_text_is_read_once() -> None:
    """Rows forwarded, against the nodes of the tree of all alternatives' tokens."""
    model, secret = Noise(), record("the pin of jo is ", "47", 0, "pin")
    observe_all_secrets(SMALL, view(model), [secret])
    assert model.rows <= 1.5 * 11  # the root and ten first digits; leaves are read off


def test_alternatives_with_more_tokens_than_the_value_fit_the_models_positions() -> None:
    class Pairs(Characters):
        """Writes two equal digits as one token."""

        def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
            return super().__call__(re.sub(r"(\d)\1", lambda m: chr(97 + int(m[1])), text))

    secret = record("her pin ", "77", kind="pin")
    tokens = Pairs()("her pin 77")["input_ids"]
    short = replace(secret, prefix=tuple(tokens[:6]), suffix=tuple(tokens[6:]))

    class Short(Noise):
        max_positions = len(tokens)

        def log_probs(self, contexts: Tensor, last: int, **more: Any) -> Tensor:
            assert contexts.shape[1] < len(tokens)  # the last token is never read
            return super().log_probs(contexts, last, **more)

    probe = replace(SMALL, formats="pin={digits:2}", after=8)
    (seen,) = probe.observe_secrets(replace(view(Short()), tokenizer=Pairs()), [short])
    assert seen.values["alternatives_0"] == 99 and seen.values["left_out"] == 0


def test_values_that_the_prefix_holds_or_nobody_described_are_left_out() -> None:
    held = record("his card 4532015112830366 and again ", "4532015112830366")
    named = record("signed by ", "jane doe", 1, "name")
    with pytest.raises(NotApplicable, match=r"no record contains a value.*not described: name"):
        SMALL.check_inputs(view(Noise()), [held, named])
    seen = observe_all_secrets(SMALL, view(Noise()), [held, named, *cards(1, first=7)])
    assert [one.values["kind_0"] >= 0 for one in seen] == [False, False, True]
    assert seen[1].values["left_out"] == 1


def test_names_in_addresses_are_ranked_only_beside_a_base_model() -> None:
    secret = record("write to ", "john.smith@mail.example")
    alone, beside = (
        observe_all_secrets(SMALL, view(Noise(), base), [secret])[0].values
        for base in (None, Noise(1))
    )
    assert alone["kind_0"] < 0 and alone["left_out"] == 1
    assert beside["alternatives_0"] == 39


def test_too_few_alternatives_are_refused() -> None:
    with pytest.raises(AuditError, match=r"at least 19 alternatives.* got 18"):
        Identifiers(alternatives=18)
    assert Identifiers(alternatives=19)
    few = replace(SMALL, formats="pin={digits:1}")
    secret = record("his pin is ", "4", 0, "pin")
    assert observe_all_secrets(few, view(Noise()), [secret])[0].values["left_out"] == 1


def test_a_model_without_probabilities_is_refused() -> None:
    at = replace(view(Noise()), setting=TEXT_ONLY)
    with pytest.raises(NotApplicable, match="needs log-probabilities"):
        next(iter(SMALL.observe_secrets(at, cards(1))))


def test_nonmembers_are_the_control_without_a_base_model() -> None:
    secrets = [*cards(3), *cards(20, member=False, first=100)]
    said = SMALL.notes(secrets, observe_all_secrets(SMALL, view(Noise()), secrets))
    assert any(note.startswith("the control holds: by the non-members") for note in said)
    leaked = Remembers(secrets)
    with pytest.raises(NotApplicable, match="by the non-members, their ranks are not uniform"):
        measured(SMALL, secrets, view(leaked))


def test_groups_by_copies_are_of_members() -> None:
    secrets = [*cards(6), *(replace(s, repeats=4) for s in cards(6, first=50))]
    seen = Observed(observe_all_secrets(SMALL, view(Noise()), secrets))
    groups = SMALL.main_number_by_repeats(secrets, seen)
    assert {count: m.n for count, m in groups.items()} == {"1": 6, "4": 6}
    assert Counter(m.name for m in groups.values()) == {RANKED: 2}

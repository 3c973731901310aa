"""Personal data in what is attacked, followed into the guesses: how much of each kind was
extracted.

Followed is what lies whole in a suffix and is not in its prefix: what an attacker is told, nobody
extracts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from auditor.benchmarks.data import pii
from auditor.benchmarks.data.occurrences import count_text_occurrences
from auditor.benchmarks.data.words import is_whole_word_somewhere
from auditor.core.nouns import Guesses, Mark, Secret, Tokens, Wording
from auditor.core.result import KindCount
from auditor.plugins.benchmark import Benchmark
from auditor.records.private_texts import CONTEXT, Decode, text_added_by_tokens
from auditor.runs.per_secret_results import make_token_decoder

Fate = Literal["members", "nonmembers", "held", "cut", "trained"]  # a field of KindCount


@dataclass(frozen=True)
class PersonalDataOfSecrets:
    """of: what is followed of each secret, a kind and a text each; counts: by kind; said: what a
    reader must know."""

    of: Mapping[str, tuple[Mark, ...]]
    counts: Mapping[str, KindCount]
    said: tuple[str, ...] = ()

    def extracted_share_by_kind_and_secret(
        self, guesses: Iterable[Guesses], secrets: Mapping[str, Secret], decode: Decode
    ) -> dict[str, dict[str, float]]:
        """By kind, and by secret that holds some of it: the share of the secret's data that its
        first guess holds."""
        found: dict[str, dict[str, float]] = {}
        for answer in guesses:
            if answer.secret not in self.of:
                continue
            secret = secrets[answer.secret]
            # The right tokens hold all of it, even where they decode to other text than the data
            # have.
            right = answer.ranked[0].suffix == secret.suffix
            text = "" if right else _decoded_suffix(secret.prefix, answer.ranked[0].suffix, decode)
            out: dict[str, list[bool]] = {}
            # In a guess as in its record: a whole word, or part of one if it is only that there.
            record = _whole_text(secret.wording) if secret.wording else None
            for kind, said in self.of[answer.secret]:
                whole = record is None or is_whole_word_somewhere(said, record)
                stated = is_whole_word_somewhere(said, text) if whole else said in text
                out.setdefault(kind, []).append(right or stated)
            for kind, held in out.items():
                found.setdefault(kind, {})[answer.secret] = sum(held) / len(held)
        return dict(sorted(found.items()))


def parse_phone_regions(asked: str | None) -> tuple[str, ...]:
    """The regions of `--phone-region`. Raises AuditError where their telephone numbers cannot be
    looked for."""
    regions = () if asked is None else tuple(asked.split(","))
    if regions:
        pii.PiiRecognisers(regions)
    return regions


def find_personal_data_of_secrets(
    benchmark: Benchmark, regions: Sequence[str] = ()
) -> PersonalDataOfSecrets:
    """The personal data that are followed. Raises AuditError where numbers of these regions cannot
    be looked for."""
    if (
        benchmark.tokenizer is None or not benchmark.secrets
    ):  # token ids alone are no text to look at
        return PersonalDataOfSecrets({}, {})
    recognisers, said = _recognisers_and_limit_sentences(benchmark, regions)
    decode = make_token_decoder(benchmark.tokenizer)
    worded = {
        one.id: one.wording
        or Wording(decode(one.prefix), _decoded_suffix(one.prefix, one.suffix, decode), ())
        for one in benchmark.secrets
    }
    found = {
        id: list(_personal_spans_with_fate(wording, recognisers)) for id, wording in worded.items()
    }
    members = {secret.id for secret in benchmark.secrets if secret.member}
    # True: a number that goes on where the text ends is another number.
    foreign = {
        text: is_whole_word_somewhere(text, _whole_text(worded[id]))
        for id, spans in found.items()
        if id not in members
        for _, text, _ in spans
    }
    known = (decode(pair.prefix + pair.suffix) for pair in benchmark.known)
    counted = count_text_occurrences(
        foreign, (*(worded[id].prefix_and_suffix_text for id in members), *known)
    )
    # As far as it is attacked or known: a guess of what stands in what was trained on is no chance.
    trained = {text for text, count in counted.items() if count}
    of: dict[str, tuple[Mark, ...]] = {}
    counts: dict[str, Counter[str]] = {}
    for id, spans in found.items():
        kept: list[Mark] = []
        for kind, text, fate in spans:
            if id not in members:
                if fate != "members":
                    continue  # "held" or "cut", which are counted of members alone
                fate = "trained" if text in trained else "nonmembers"
            if fate in ("members", "nonmembers"):
                kept.append((kind, text))
            counts.setdefault(kind, Counter())[fate] += 1
        if kept:
            of[id] = tuple(kept)
    return PersonalDataOfSecrets(
        of, {kind: KindCount(**counted) for kind, counted in sorted(counts.items())}, said
    )


def _recognisers_and_limit_sentences(
    benchmark: Benchmark, regions: Sequence[str]
) -> tuple[pii.PiiRecognisers | None, tuple[str, ...]]:
    """What looks for personal data here, and what it does not see, in words."""
    if benchmark.marks_all:
        return None, ()
    if not pii.has_pii_packages() and not regions:
        return None, (
            f"personal data: only what the data mark is followed ({pii.INSTALL} to have the rest "
            "recognised)",
        )
    said = (
        "personal data: telephone numbers without a country code are not looked for without "
        "--phone-region"
    )
    return pii.PiiRecognisers(regions), () if regions else (said,)


def _decoded_suffix(prefix: Tokens, suffix: Tokens, decode: Decode) -> str:
    # Behind some context: alone, a first token may lose its space, or be half a character.
    return text_added_by_tokens(decode, prefix[-CONTEXT:], suffix)


def _whole_text(wording: Wording) -> str:
    return wording.prefix_and_suffix_text + wording.after


def _personal_spans_with_fate(
    wording: Wording, recognisers: pii.PiiRecognisers | None
) -> Iterator[tuple[str, str, Fate]]:
    """Kind, text and fate of each span that the suffix holds some of, as if it were a member's;
    each text once."""
    # With what follows the suffix, so that what its end cuts through is found whole.
    whole, begin, end = (
        _whole_text(wording),
        len(wording.prefix),
        len(wording.prefix_and_suffix_text),
    )
    seen: set[Mark] = set()
    for span in pii.find_pii_spans_in_text(whole, wording.marks, recognisers):
        text = whole[span.start : span.end]
        if span.end <= begin or span.start >= end or (span.kind, text) in seen:
            continue
        seen.add((span.kind, text))
        if is_whole_word_somewhere(text, wording.prefix):
            yield span.kind, text, "held"
        else:
            yield span.kind, text, "cut" if span.start < begin or span.end > end else "members"

"""Picks secrets out of a corpus: personal data by kind, or spans at random, behind what stands before them.

Near-duplicates go, repeats are counted over the whole corpus, and non-members are drawn from held-out texts to match.
Knows texts; no tokens and no models: whoever audits cuts them into tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import extractOne

from auditor.benchmarks import pii
from auditor.benchmarks.columns import PII, REPEATS
from auditor.benchmarks.occurrences import count_text_occurrences
from auditor.benchmarks.words import RUN, is_inside_word, is_whole_word_somewhere
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import Mark
from auditor.core.secret_randomness import keyed_random_generator

RANDOM = "random"  # the kind of a span that nobody chose
_CHOICE = 5  # non-members to choose from, for each member
_LEAST = 20  # characters before a secret: behind fewer words anything could stand
_DIFFERENT = 0.1  # of a mean length: above that, matched ones are no match
_LIKENESS = Levenshtein.normalized_similarity


@dataclass(frozen=True)
class MarkedTexts:
    """Texts, how often each was trained on, and what each marks. where: as the user named it."""

    where: str
    texts: Sequence[str]
    times: Sequence[int]
    marks: Sequence[tuple[Mark, ...]]


@dataclass(frozen=True)
class Picking:
    """What is picked. Lengths in characters. Raises AuditError for what nothing can be picked by.

    kinds: all that are found, where empty; limit: of each kind; similar: from which likeness on (1: equal) two secrets
    are near-duplicates.
    """

    kinds: tuple[str, ...] = ()
    limit: int = 1000
    prefix_length: int = 200
    suffix_length: int = 100
    similar: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("prefix_length", _LEAST), ("suffix_length", 1)):
            if getattr(self, name) < least:
                raise AuditError(f"expected --{name.replace('_', '-')} >= {least}, got {getattr(self, name)}")
        if not 0 < self.similar <= 1:
            raise AuditError(f"expected --similar above 0 and at most 1, got {self.similar}")
        if not 0 <= self.seed < 2**63:
            raise AuditError(f"expected --seed from 0 to 2^63 - 1, got {self.seed}")


@dataclass(frozen=True)
class PickedSecret:
    """One secret: `said` is the span that makes it one, with which the suffix ends.

    ends_word: whether it ends a word of its text; a marked name may have an ending of its language behind it.
    """

    kind: str
    prefix: str
    suffix: str
    said: str
    ends_word: bool = True

    @property
    def prefix_with_suffix_text(self) -> str:
        return self.prefix + self.suffix

    def as_data_row(self) -> dict[str, Any]:
        marked = {} if self.kind == RANDOM else {PII: {self.kind: [self.said]}}
        return {"prefix": self.prefix, "suffix": self.suffix, "kind": self.kind, **marked}


@dataclass(frozen=True)
class PickedSecrets:
    """Rows as `audit run --data` and `--nonmembers` read them, and what a reader must know of them."""

    members: tuple[dict[str, Any], ...]
    nonmembers: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class _PickingFilter:
    """taken: what was picked, by `counts` of each kind; left_out: what was found and not taken, by reason."""

    def __init__(
        self, asked: Picking, whose: str, recognisers: pii.PiiRecognisers | None, wholes: Iterable[str] = ()
    ) -> None:
        """wholes: other texts that what is taken must not be like."""
        self.taken: list[PickedSecret] = []
        self.counts, self.left_out = Counter[str](), Counter[str]()
        self._asked, self._recognisers, self._wholes = asked, recognisers, list(wholes)
        self._noise = keyed_random_generator("secrets", whose, asked.seed)
        self._said, self._prefixes = set[Mark](), set[str]()

    def pick_from(self, corpus: MarkedTexts, wanted: Mapping[str, int]) -> None:
        """Takes so many of each kind, of rows in random order; without kinds, as many as are asked for of any.

        One a row at most, of the kind that is rarest so far: secrets of one row are no secrets apart.
        """
        seen: set[str] = set()
        for row in self._noise.permutation(len(corpus.texts)).tolist():
            if wanted and all(self.counts[kind] >= count for kind, count in wanted.items()):
                return
            text = corpus.texts[row]
            if text in seen:
                continue
            seen.add(text)
            spans = self._candidate_spans(text, corpus.marks[row], wanted)
            for span in sorted(spans, key=lambda span: self.counts[span.kind]):
                full = self.counts[span.kind] >= (wanted.get(span.kind, 0) if wanted else self._asked.limit)
                if not full and self._add_if_distinct(_pick_span_or_reason(text, span, self._asked.prefix_length)):
                    break

    def _candidate_spans(self, text: str, marked: Sequence[Mark], kinds: Collection[str]) -> Iterator[pii.Span]:
        if not kinds or set(kinds) - {RANDOM}:
            yield from pii.find_pii_spans_in_text(text, marked, self._recognisers)
        if RANDOM in kinds and (span := _random_word_span(text, self._asked.suffix_length, self._noise)):
            yield span

    def _add_if_distinct(self, one: PickedSecret | str) -> bool:
        if isinstance(one, str):
            self.left_out[one] += 1
        elif (one.kind, one.said) in self._said:
            self.left_out["stand in another secret already"] += 1
        elif one.prefix in self._prefixes:
            self.left_out["stand behind the same text as another secret"] += 1
        elif extractOne(one.prefix_with_suffix_text, self._wholes, scorer=_LIKENESS, score_cutoff=self._asked.similar):
            self.left_out[f"are like another secret by {self._asked.similar:g} or more"] += 1
        else:
            self._said.add((one.kind, one.said))
            self._prefixes.add(one.prefix)
            self._wholes.append(one.prefix_with_suffix_text)
            self.taken.append(one)
            self.counts[one.kind] += 1
            return True
        return False

    def left_out_sentence(self) -> str:
        """What was left out, in words; "" where nothing was."""
        found = [f"{count:,} that {why}" for why, count in self.left_out.items() if count]
        return f"left out: {', '.join(found)}" if found else ""

    def why_nothing_picked_sentence(self) -> str:
        return self.left_out_sentence() or "nothing of these kinds was found"


def pick_secrets(
    data: MarkedTexts, asked: Picking, heldout: MarkedTexts | None = None, regions: Sequence[str] = ()
) -> PickedSecrets:
    """Members, and where there are held-out texts as many non-members that match them.

    regions: of telephone numbers (`pii.PiiRecognisers`). AuditError for kinds that nobody knows, without the extra
    where it is needed, and where nothing is left.
    """
    _check_picking_kinds(asked.kinds, data)
    recognisers = pii.PiiRecognisers(regions) if not asked.kinds or set(asked.kinds) & set(pii.KINDS) else None
    members = _PickingFilter(asked, "members", recognisers)
    members.pick_from(data, dict.fromkeys(asked.kinds, asked.limit))
    if not members.taken:
        raise AuditError(
            f"nothing was picked of {data.where}: {members.why_nothing_picked_sentence()}; "
            f"--kinds {RANDOM} picks any text"
        )
    others = _PickingFilter(
        asked, "nonmembers", recognisers, wholes=[one.prefix_with_suffix_text for one in members.taken]
    )
    if heldout is not None:
        others.pick_from(heldout, {kind: _CHOICE * count for kind, count in members.counts.items()})
    # Of a non-member the secret itself must be nowhere in the data, whatever stands before it.
    looked_for = {one.prefix_with_suffix_text: one.ends_word for one in members.taken}
    looked_for |= {one.said: one.ends_word for one in others.taken}
    counted = count_text_occurrences(looked_for, data.texts, data.times)
    rows = tuple({**one.as_data_row(), REPEATS: counted[one.prefix_with_suffix_text]} for one in members.taken)
    said = _member_picks_sentence(data, members, [counted[one.prefix_with_suffix_text] for one in members.taken])
    if heldout is None:
        return PickedSecrets(rows, notes=(said,))
    unseen = [one for one in others.taken if not counted[one.said]]
    others.left_out[f"stand in {data.where}"] = len(others.taken) - len(unseen)
    matched = _picked_pairs_matched_by_length(members.taken, unseen)
    if not matched:
        raise AuditError(f"no non-member is left of {heldout.where}: {others.why_nothing_picked_sentence()}")
    chosen = [other for _, other in matched]
    notes = (said, _nonmember_picks_sentence(heldout, others, chosen))
    return PickedSecrets(
        rows,
        tuple(one.as_data_row() for one in chosen),
        notes,
        tuple(_member_mismatch_warnings(members.taken, matched)),
    )


def write_picked_secrets(made: PickedSecrets, members: Path, nonmembers: Path) -> None:
    """Both files or neither, readable by their owner only. Raises AuditError where one cannot be written."""
    if made.nonmembers:
        disk.replace_atomically(nonmembers, _picked_rows_as_json_lines(made.nonmembers))
    try:
        disk.replace_atomically(members, _picked_rows_as_json_lines(made.members))
    # An interruption too: one file alone looks like a finished pick.
    except BaseException:
        nonmembers.unlink(missing_ok=True)
        raise


def _picked_rows_as_json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _check_picking_kinds(kinds: Sequence[str], data: MarkedTexts) -> None:
    marked = {kind for row in data.marks for kind, _ in row}
    for kind in kinds:
        if kind not in {*pii.KINDS, *marked, RANDOM}:
            known = ", ".join((*pii.KINDS, *sorted(marked - set(pii.KINDS)), RANDOM))
            raise AuditError(f"expected --kinds of {known}, got {kind!r}: the column {PII} marks other kinds")


# --- of one text ------------------------------------------------------------------------------------------------------


def _pick_span_or_reason(text: str, span: pii.Span, length: int) -> PickedSecret | str:
    """The span behind at most so many characters, from the start of a word; or why not.

    A space before it goes with it, as in most vocabularies: else no token would begin where the suffix does.
    """
    said = text[span.start : span.end]
    middle = span.start - text[: span.start].endswith(" ")
    first = max(0, middle - length)
    while 0 < first < middle - _LEAST and is_inside_word(text[first - 1], text[first]):
        first += 1
    prefix = text[first:middle]
    if len(prefix.strip()) < _LEAST:
        return f"have fewer than {_LEAST} characters before them"
    if is_whole_word_somewhere(said, prefix):
        return "the prefix holds already"
    ends_word = not is_inside_word(said, text[span.end : span.end + 1])
    return PickedSecret(span.kind, prefix, text[middle : span.end], said, ends_word)


def _random_word_span(text: str, length: int, noise: np.random.Generator) -> pii.Span | None:
    """Whole words of at most so many characters, and of at least half of them; None where there is no room."""
    starts = [match.start() for match in RUN.finditer(text) if _LEAST < match.start() <= len(text) - length]
    if not starts:
        return None
    start = starts[int(noise.integers(len(starts)))]
    # Searched one character too far: a word that runs on there ends too late, and is left out instead of cut.
    ends = [match.end() for match in RUN.finditer(text, start, start + length + 1) if match.end() <= start + length]
    return pii.Span(RANDOM, start, ends[-1]) if ends and ends[-1] - start >= length / 2 else None


# --- non-members ------------------------------------------------------------------------------------------------------


def _picked_pairs_matched_by_length(
    members: Sequence[PickedSecret], others: Sequence[PickedSecret]
) -> list[tuple[PickedSecret, PickedSecret]]:
    """Each member with the other one of its kind that is nearest in length, as long as there are any."""
    left: dict[str, list[PickedSecret]] = {}
    for other in others:
        left.setdefault(other.kind, []).append(other)
    pairs = []
    # Greedy, in the order in which members were picked: not the best matching of all.
    for member in members:
        if same := left.get(member.kind):
            far = [abs(len(o.prefix) - len(member.prefix)) + abs(len(o.suffix) - len(member.suffix)) for o in same]
            pairs.append((member, same.pop(int(np.argmin(far)))))
    return pairs


def _member_mismatch_warnings(
    members: Sequence[PickedSecret], matched: Sequence[tuple[PickedSecret, PickedSecret]]
) -> Iterator[str]:
    """Where members and non-members are no match: what members leak beyond the others may be that difference."""
    wanted, found = (Counter(one.kind for one in side) for side in (members, [other for _, other in matched]))
    few = [f"{kind} {found[kind]:,} of {count:,}" for kind, count in sorted(wanted.items()) if found[kind] < count]
    if few:
        told = ", ".join(few)
        yield f"fewer non-members than members: {told}; together the two differ in kind: look at each by itself"
    for kind in sorted(found):
        pairs = [(member, other) for member, other in matched if member.kind == kind]
        for what in ("prefix", "suffix"):
            own, theirs = (mean(len(getattr(one, what)) for one in side) for side in zip(*pairs, strict=True))
            if abs(theirs - own) > _DIFFERENT * own:
                yield f"{kind}: a {what} has {own:.0f} characters, that of a non-member {theirs:.0f}, on average"


# --- in words ---------------------------------------------------------------------------------------------------------


def _member_picks_sentence(data: MarkedTexts, sieve: _PickingFilter, repeats: Sequence[int]) -> str:
    least, most = min(repeats), max(repeats)
    times = f"{least:,} to {most:,}" if most > least else f"{least:,}"
    counted = (
        f"{data.where}: {_picked_counts_by_kind_label(sieve.counts)}; repeats are how often prefix and suffix stand, "
        f"one behind the other, in all {len(data.texts):,} rows: {times}"
    )
    return "; ".join(filter(None, [counted, sieve.left_out_sentence()]))


def _nonmember_picks_sentence(heldout: MarkedTexts, sieve: _PickingFilter, chosen: Sequence[PickedSecret]) -> str:
    counts = _picked_counts_by_kind_label(Counter(one.kind for one in chosen))
    matched = f"{heldout.where}: {counts}, matched by kind and by length, not by subject"
    return "; ".join(filter(None, [matched, sieve.left_out_sentence()]))


def _picked_counts_by_kind_label(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))

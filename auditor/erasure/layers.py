"""Judge each layer of a store: deleted records are gone or still there, or the test cannot tell.

A layer is a way to read a store, such as its tables or the bytes of a file. Kept records are the
control: if a search does not find them in a layer, not finding deleted records proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from auditor.benchmarks.data import released_passages
from auditor.benchmarks.data.released_passages import ReleasedRecord, WordIds
from auditor.core.arrays import Floats
from auditor.core.counts import format_count
from auditor.erasure.encodings import (
    decode_parts,
    drop_digits,
    extract_letters,
    find_dense_block,
)
from auditor.erasure.records import ALIKE, LEAST, ErasureRecords, compute_highest_cosines
from auditor.erasure.windows import SIZE, TEXT, VECTORS
from auditor.reports import escaping
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.judging import compute_near_verbatim_limit

GONE = "gone"
STILL_THERE = "still there"
CANNOT_TELL = "cannot tell"
NEAR = "near-verbatim text"
SEEN = 0.9  # share of the control that must be found before an absent record counts as gone
_PASSAGE = 10  # words
_MOST_NAMES = 5
_MOST_TEXTS = 20_000  # other texts to compare word by word


class PartlyReadError(Exception):
    """Error if the rest of a layer cannot be read, so that the layer cannot tell."""


@dataclass(frozen=True)
class Piece:
    """Hold a part of a layer's content.

    place: its position, for reports; content: bytes, texts, or vectors (n, dimensions); start,
        path: the offset in a file, and the file, if the content is some of its bytes.
    """

    place: str
    content: bytes | Sequence[str] | Floats
    start: int = 0
    path: Path | None = None


@dataclass(frozen=True)
class Layer:
    """Describe a way to read a store, such as its tables or the bytes of a file.

    read_pieces: a function that returns the content; it raises PartlyReadError if the rest cannot
        be read.
    kinds: the kinds of content that the layer may contain.
    locate: a function that maps a byte offset in a file to a table's name.
    other_texts: whether the layer may have texts derived from a record.
    searched: indices of the records that can be found in the layer; None for all.
    text_bytes: only texts of these lengths, in bytes, can be found; None for all lengths.
    quotes: whether the layer has only a sample of the records. Only the kept records in this sample
        are then the control.
    doubt: why the absence of a deleted record proves nothing, or "".
    """

    name: str
    read_pieces: Callable[[], Iterable[Piece]]
    kinds: tuple[str, ...] = (TEXT, VECTORS)
    locate: Callable[[int], str] | None = None
    other_texts: bool = False
    searched: frozenset[int] | None = None
    text_bytes: range | None = None
    quotes: bool = False
    doubt: str = ""


@dataclass(frozen=True)
class LayerVerdict:
    """State the verdict on a layer of a store for one kind of content.

    n_deleted, n_control: numbers of deleted and of kept records that could be found. A record can
        be found if a part of its text, or its vector, is unique to it.
    n_control_seen: number of kept records found.
    leftovers: the encoding and position at which a deleted record was found, keyed by its name.
    why: why the search cannot tell, or "".
    remedy: calls that remove the leftovers.
    """

    store: str
    layer: str
    kind: str
    verdict: str
    n_deleted: int = 0
    leftovers: Mapping[str, str] = field(default_factory=dict)
    n_control: int = 0
    n_control_seen: int = 0
    why: str = ""
    remedy: str = ""

    @property
    def recall_lower_bound(self) -> float:
        """The share of findable kept records that were found: its exact 95% lower bound."""
        return clopper_pearson(self.n_control_seen, self.n_control)[0]

    @property
    def places(self) -> Sequence[str]:
        """The distinct forms and places in which leftovers were found, most frequent first."""
        return [place for place, _ in Counter(self.leftovers.values()).most_common()]


@dataclass
class _Sightings:
    """Hold the contents of records that a search of one layer found.

    places: the positions of records found, keyed by kind of content and then by record index.
    other_texts: texts found that are not records of --kept, as an ordered set.
    spans: the start and end of each compressed part that was read in a file.
    unread: a compressed or encrypted part that could not be read completely, or "".
    """

    places: dict[str, dict[int, str]] = field(default_factory=dict)
    other_texts: dict[str, None] = field(default_factory=dict)
    spans: list[tuple[Path, int, int]] = field(default_factory=list)
    unread: str = ""

    def add(self, kind: str, record: int, place: str) -> None:
        self.places.setdefault(kind, {}).setdefault(record, place)


def judge_erasure_layer(store: str, layer: Layer, records: ErasureRecords) -> list[LayerVerdict]:
    """Search a layer for the records, and return a verdict for each kind of content."""
    possible_by_kind = {}
    for kind in layer.kinds:
        possible = _list_possible(layer, kind, records)
        if possible is not None:
            possible_by_kind[kind] = possible
    if not possible_by_kind:
        return []
    sightings = _Sightings()
    doubt = layer.doubt
    try:
        for piece in layer.read_pieces():
            _look_into_piece(layer, piece, records, sightings)
        if sightings.unread:
            raise PartlyReadError(sightings.unread)
    except PartlyReadError as error:
        doubt = f"it was read only in part: {error}"
    verdicts = []
    for kind, possible in possible_by_kind.items():
        places = sightings.places.get(kind, {})
        # A record without a unique part may still be found as a whole text.
        seen_deleted = records.deleted & frozenset(places)
        possible = possible | _restrict(layer, kind, seen_deleted, records)
        if layer.quotes:
            possible &= records.deleted | set(places)
        verdicts.append(judge_erasure_places(store, layer.name, kind, places, possible, records))
    if layer.other_texts and sightings.other_texts:
        verdicts += _judge_other_texts(store, layer, sightings, records)
    for i, verdict in enumerate(verdicts):
        if doubt and not verdict.leftovers:
            verdicts[i] = replace(verdict, verdict=CANNOT_TELL, why=doubt)
    return verdicts


def _list_possible(layer: Layer, kind: str, records: ErasureRecords) -> frozenset[int] | None:
    """Return the records that the layer could contain.

    Return None if the layer could not contain any deleted record.
    """
    if kind == VECTORS:
        if not any(record.vectors for record in records.targets):
            return None
        possible = records.with_vectors
    else:
        possible = _restrict(layer, kind, records.windows.list_records(kind), records)
        if layer.text_bytes is not None and not possible & records.deleted:
            return None
        return possible
    return _restrict(layer, kind, possible, records)


def _restrict(
    layer: Layer, kind: str, indices: frozenset[int], records: ErasureRecords
) -> frozenset[int]:
    """Return the indices of records that the layer may have by text length and by its search."""
    if kind == VECTORS:
        indices &= records.with_own_vectors
    elif layer.text_bytes is not None:
        lengths = {i: len(records.targets[i].text.encode()) for i in indices}
        indices = frozenset(i for i in indices if lengths[i] in layer.text_bytes)
    if layer.searched is not None:
        indices &= layer.searched
    return indices


def _look_into_piece(
    layer: Layer, piece: Piece, records: ErasureRecords, sightings: _Sightings
) -> None:
    """Search a piece for records; add those found to `sightings`."""
    if isinstance(piece.content, np.ndarray):
        _find_vectors(piece, records, sightings)
        return
    if isinstance(piece.content, bytes):
        content = piece.content
    else:
        content = b"\0".join(text.encode(errors="surrogatepass") for text in piece.content)
        if layer.other_texts:
            _gather_other_texts(piece.content, records, sightings)
    _find_windows(layer, piece, content, records, sightings)
    if TEXT in layer.kinds or VECTORS in layer.kinds:
        for part in decode_parts(content, piece.path, piece.start):
            if part.is_cut:
                sightings.unread = f"{part.encoding} breaks off in {piece.place}"
            if piece.path is not None and part.span[1]:
                sightings.spans.append((piece.path, *part.span))
            unlocated = replace(layer, locate=None)
            place = replace(piece, place=f"{part.encoding} in {piece.place}")
            _find_windows(unlocated, place, part.content, records, sightings)
        if piece.path is not None and not sightings.unread:
            _find_unread(layer, piece, content, sightings)
    if TEXT in layer.kinds and not isinstance(piece.content, bytes):
        for text in piece.content:
            if (record := records.deleted_texts.get(text)) is not None:
                sightings.add(TEXT, record, f"whole text in {piece.place}")


def _find_unread(layer: Layer, piece: Piece, content: bytes, sightings: _Sightings) -> None:
    """Note the first part of a file's bytes that looks compressed or encrypted, if any."""
    spans = []
    for path, start, end in sightings.spans:
        if path == piece.path and end > piece.start:
            spans.append((path, start, end))
    sightings.spans = spans
    shifted = [(start - piece.start, end - piece.start) for _, start, end in spans]
    place = find_dense_block(content, shifted)
    if place is not None:
        name = piece.place
        if layer.locate is not None:
            name = layer.locate(piece.start + place) or name
        sightings.unread = f"bytes of {name} look compressed or encrypted"


def _find_windows(
    layer: Layer, piece: Piece, content: bytes, records: ErasureRecords, sightings: _Sightings
) -> None:
    """Search bytes, and then their letters and digits, for unique windows of records.

    piece: the piece that has the bytes; sightings: the object to which records found are added.
    """
    for start, _, origin in records.windows.find(content, layer.kinds):
        is_rounded = origin.form.startswith(("int8", "float16"))
        if is_rounded and origin.record not in records.with_vectors:
            continue  # a vector that resembles this one may round to the same
        if origin.kind in layer.kinds:
            place = piece.place
            if layer.locate is not None:
                place = layer.locate(piece.start + start) or place
            sightings.add(origin.kind, origin.record, f"{origin.form} in {place}")
    if TEXT in layer.kinds:
        letters = extract_letters(content)
        for form in (letters, drop_digits(letters)):
            for _, _, origin in records.windows.find(form, (TEXT,)):
                if origin.kind == TEXT:
                    sightings.add(TEXT, origin.record, f"{origin.form} in {piece.place}")


def _gather_other_texts(
    texts: Sequence[str], records: ErasureRecords, sightings: _Sightings
) -> None:
    """Add the texts that are neither deleted nor kept records to `sightings.other_texts`."""
    for text in texts:
        is_record = hash(text) in records.kept_texts or text in records.deleted_texts
        if not is_record and len(text) >= SIZE and len(sightings.other_texts) <= _MOST_TEXTS:
            sightings.other_texts[text] = None


def _find_vectors(piece: Piece, records: ErasureRecords, sightings: _Sightings) -> None:
    """Search for records' vectors by direction only, because libraries rescale and round vectors.

    sightings: the object to which records found are added.
    """
    vectors = np.asarray(piece.content)
    if vectors.ndim != 2 or vectors.shape[1] != records.directions.shape[1]:
        return
    cosines = compute_highest_cosines(records.directions, vectors, [-1] * len(vectors))
    # A vector is a form of only this record if its angle is less than half of the angle between
    # this record's vector and any other record's.
    is_there = (cosines >= ALIKE) & (2 * cosines**2 - 1 > records.highest_cosines)
    for record in np.flatnonzero(is_there).tolist():
        sightings.add(VECTORS, record, piece.place)


def judge_erasure_places(
    store: str,
    layer: str,
    kind: str,
    places: Mapping[int, str],
    possible: frozenset[int],
    records: ErasureRecords,
    remedy: str = "",
) -> LayerVerdict:
    """Judge a layer by the deleted records found and the share of kept records found.

    places: positions of the records found, keyed by record; possible: the records that the layer
    could show.
    """
    deleted = possible & records.deleted
    control = possible - records.deleted
    leftovers = {}
    for i in sorted(deleted & set(places)):
        leftovers[records.targets[i].name] = places[i]
    n_seen = len(control & set(places))
    verdict = GONE
    reason = ""
    if leftovers:
        verdict = STILL_THERE
    elif not deleted:
        verdict = CANNOT_TELL
        reason = f"no deleted record has {kind} that no other record has"
    elif len(control) < LEAST:
        verdict = CANNOT_TELL
        reason = f"{len(control)} kept records to look for, {LEAST} are needed"
    elif n_seen < SEEN * len(control):
        verdict = CANNOT_TELL
        reason = f"{n_seen} of {len(control)} kept records are seen there"
    counts = (len(deleted), leftovers, len(control), n_seen)
    return LayerVerdict(store, layer, kind, verdict, *counts, reason, remedy)


def judge_missing_records(
    store: str, indices: Sequence[int], reason: str, records: ErasureRecords
) -> LayerVerdict:
    """Return the verdict that nothing can be told of some deleted records.

    indices: indices of these records; reason: a phrase that follows their number.
    """
    names = escaping.list_printable([records.targets[i].name for i in indices], _MOST_NAMES)
    n_deleted = format_count(len(records.deleted), "deleted record")
    sentence = f"{len(indices)} of {n_deleted} {reason}: {names}"
    return LayerVerdict(store, "all layers", "records", CANNOT_TELL, why=sentence)


def _judge_other_texts(
    store: str, layer: Layer, sightings: _Sightings, records: ErasureRecords
) -> list[LayerVerdict]:
    """Judge whether other texts in a layer, such as summaries, contain passages of records.

    A deleted record is skipped if its entire text is in the layer. The control is the same search
    for passages of kept records. The kept records that the layer contains count as texts of the
    layer.
    """
    texts = list(sightings.other_texts)
    seen_verbatim = set(sightings.places.get(TEXT, {}))
    verbatim = records.deleted & seen_verbatim
    words = WordIds()
    long = []
    control = []
    for i, record in enumerate(records.targets):
        tokens = words(record.text)
        if len(tokens) >= _PASSAGE:
            long.append(ReleasedRecord(i, record.text, tokens, record.deleted))
        if i in seen_verbatim - verbatim:
            control.append(record.text)
    compared = list(map(words, (*texts[:_MOST_TEXTS], *control)))
    spans, _, _ = released_passages.find_nearest_passages(long, compared, _PASSAGE)
    limit = compute_near_verbatim_limit(_PASSAGE)
    places = {}
    for released, span in zip(long, spans, strict=True):
        if span.text >= 0 and span.edit_distance <= limit and released.row not in verbatim:
            places[released.row] = f"{_PASSAGE} words in a row or nearly in {layer.name}"
    possible = frozenset(released.row for released in long) - verbatim
    if layer.quotes:
        possible &= records.deleted | set(places)
    else:
        possible &= records.deleted | records.windows.list_records(TEXT)
    verdict = judge_erasure_places(store, layer.name, NEAR, places, possible, records)
    if verdict.verdict == GONE and len(texts) > _MOST_TEXTS:
        reason = f"more than {_MOST_TEXTS:,} texts there are none of --kept"
        verdict = replace(verdict, verdict=CANNOT_TELL, why=reason)
    return [verdict] if verdict.n_deleted else []

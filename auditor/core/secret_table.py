"""Hold secrets as columns, which take a fifth of the memory of an object for each secret."""

from __future__ import annotations

import itertools
import operator
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools, Ints, Strings
from auditor.core.nouns import Mark, Secret, Tokens, Wording

STRINGS = np.dtypes.StringDType(na_object=None)
_FIELDS = fields(Secret)
_DTYPES: dict[str, Any] = {
    **dict.fromkeys(("id", "group", "alias", "document", "user"), STRINGS),
    **dict.fromkeys(("repeats", "at", "copies"), np.int64),
    **dict.fromkeys(("member", "user_trained"), np.bool_),
    "canary": object,
}
UNKNOWN = -1  # represents None in a column of numbers
_AT_ONCE = 4096  # secrets that are objects at once
# Name of the items that each array of indices refers to.
_PLACES = {"begins": "tokens", "text_numbers": "texts", "place_begins": "places"}


Row = TypeVar("Row")


class ColumnTable(Sequence[Row], Generic[Row]):
    """Rows that are held as columns. The object of a row is made only when it is asked for."""

    @abstractmethod
    def select_rows(self, place: slice | Ints | Bools) -> Self:
        """Return the table of these rows."""

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice | Ints | Bools) -> Self: ...

    def __getitem__(self, place: int | slice | Ints | Bools) -> Row | Self:
        if isinstance(place, slice | np.ndarray):
            return self.select_rows(place)
        place = range(len(self))[place]
        return next(iter(self.select_rows(slice(place, place + 1))))


@dataclass(frozen=True, eq=False)
class TokenRows(Sequence[Tokens]):
    """Token ids of texts.

    Args:
        tokens: token ids of all texts.
        begins: (texts,) index in `tokens` at which each text begins.
        lengths: (texts,) number of tokens of each text.
    """

    tokens: NDArray[np.int32]
    begins: Ints
    lengths: NDArray[Any]

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, place: Any) -> Any:
        begin = self.begins[place]
        return tuple(self.tokens[begin : begin + self.lengths[place]].tolist())

    def __iter__(self) -> Iterator[Tokens]:
        for begin, length in zip(self.begins.tolist(), self.lengths.tolist(), strict=True):
            yield tuple(self.tokens[begin : begin + length].tolist())

    def drop_unused_tokens(self) -> TokenRows:
        """Return the same rows, with their tokens in the order of the rows.

        Adjacent rows that begin at the same token still share their tokens.
        """
        is_first = np.diff(self.begins, prepend=-1) != 0
        lengths = self.lengths
        if len(lengths):
            lengths = np.maximum.reduceat(lengths, np.flatnonzero(is_first))
        begins = np.cumsum(lengths, dtype=np.int64) - lengths
        if lengths.sum() == len(self.tokens) and np.array_equal(begins, self.begins[is_first]):
            return self
        places = np.repeat(self.begins[is_first] - begins, lengths)
        places += np.arange(len(places))
        return TokenRows(self.tokens[places], begins[np.cumsum(is_first) - 1], self.lengths)


@dataclass(frozen=True, eq=False)
class WordingColumn:
    """Wordings of secrets. A `Wording` is made only when it is asked for.

    Args:
        texts: (texts,) texts of records.
        marks: (texts,) marks of records.
        text_numbers: (secrets,) index in `texts`.
        places: start, middle, end and ends of each wording; empty for a secret without one.
    """

    texts: Strings
    marks: NDArray[Any]
    text_numbers: Ints
    places: TokenRows

    def __getitem__(self, place: slice | Ints | Bools) -> WordingColumn:
        rows = self.places
        places = TokenRows(rows.tokens, rows.begins[place], rows.lengths[place])
        return WordingColumn(self.texts, self.marks, self.text_numbers[place], places)

    def tolist(self) -> list[Wording | None]:
        numbers, codes = np.unique(self.text_numbers, return_inverse=True)
        texts = self.texts[numbers].tolist()  # the secrets of a record share a text
        marks = self.marks[numbers].tolist()
        wordings: list[Wording | None] = []
        for code, place in zip(codes.tolist(), self.places, strict=True):
            if place:
                start, middle, end, *ends = place
                wordings.append(Wording(texts[code], start, middle, end, tuple(ends), marks[code]))
            else:
                wordings.append(None)
        return wordings


@dataclass(frozen=True, eq=False)
class SecretTable(ColumnTable[Secret]):
    """Secrets as columns.

    Args:
        columns: values of all secrets, keyed by field of `Secret`; -1 for an unknown number. If
            all secrets have the default of a field, there is no column.
        tokens: token ids of prefixes and suffixes, one secret after another. A secret whose text
            begins with the previous secret's text shares its tokens.
        begins: (secrets,) index in `tokens` at which each prefix begins.
        lengths: (secrets, 2) numbers of tokens of each prefix and suffix.
    """

    columns: dict[str, Any]
    tokens: NDArray[np.int32]
    begins: Ints
    lengths: NDArray[Any]

    def __len__(self) -> int:
        return len(self.begins)

    def select_rows(self, place: slice | Ints | Bools) -> SecretTable:
        columns = {}
        for name, column in self.columns.items():
            columns[name] = column[place]
        return SecretTable(columns, self.tokens, self.begins[place], self.lengths[place])

    def __iter__(self) -> Iterator[Secret]:
        for begin in range(0, len(self), _AT_ONCE):
            yield from self._make_secrets(slice(begin, begin + _AT_ONCE))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        # Not its arrays: a part of a table holds the tokens of all secrets.
        return build_secret_table, (list(self),)

    def _make_secrets(self, part: slice) -> Iterator[Secret]:
        rows = self[part]
        values: dict[str, Iterable[Any]] = {"prefix": rows.prefixes, "suffix": rows.suffixes}
        for name in self.columns:
            values[name] = rows.list_values(name)
        for field in _FIELDS:  # in their order; without a column, the default for each secret
            values[field.name] = values.pop(field.name, itertools.repeat(field.default))
        return map(Secret, *values.values())

    @property
    def ids(self) -> Strings:
        return self.columns["id"]

    @property
    def texts(self) -> TokenRows:
        """Each secret's tokens, those of the prefix first."""
        return TokenRows(self.tokens, self.begins, self.lengths.sum(1))

    @property
    def text_numbers(self) -> Ints:
        """A number of each secret's text, (secrets,). Only windows of a long text share one."""
        is_empty = self.lengths.sum(1) == 0
        return np.where(is_empty, -1 - np.arange(len(self)), self.begins)

    @property
    def prefixes(self) -> TokenRows:
        return TokenRows(self.tokens, self.begins, self.lengths[:, 0])

    @property
    def suffixes(self) -> TokenRows:
        return TokenRows(self.tokens, self.begins + self.lengths[:, 0], self.lengths[:, 1])

    def find_column(self, name: str) -> NDArray[Any]:
        """Return a field of all secrets, (secrets,); -1 for an unknown number."""
        if name in self.columns:
            return self.columns[name]
        return np.full(len(self), _DEFAULTS[name], _DTYPES[name])

    def list_values(self, name: str) -> list[Any]:
        """Return a field of all secrets as objects, with None for an unknown number."""
        column = self.find_column(name)
        if _DTYPES.get(name) is np.int64:
            column = np.where(column == UNKNOWN, np.array(None), column)
        return column.tolist()

    def replace_columns(self, **columns: NDArray[Any]) -> SecretTable:
        """Return the secrets with other values of these fields, (secrets,) each."""
        all_columns = {**self.columns, **columns}
        for name, column in [*all_columns.items()]:
            if not _has_own_value(name, column):
                del all_columns[name]
        return replace(self, columns=all_columns)

    def stack_tokens(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the prefixes (B, n) and suffixes (B, L) of B secrets of equal lengths.

        places: indices of the secrets, (B,).
        """
        n_prefix, n_suffix = self.lengths[places[0]].tolist()
        tokens = self.tokens[self.begins[places][:, None] + np.arange(n_prefix + n_suffix)]
        return tokens[:, :n_prefix].astype(np.int64), tokens[:, n_prefix:].astype(np.int64)


def _encode_values(name: str, values: Iterable[Any]) -> NDArray[Any]:
    dtype = _DTYPES[name]
    column = np.array(list(values), object)
    if dtype is np.int64:
        column[column == np.array(None)] = UNKNOWN
    return column.astype(dtype)


_DEFAULTS = {}
for _field in _FIELDS:
    if _field.name in _DTYPES and _field.name != "id":
        _DEFAULTS[_field.name] = _encode_values(_field.name, [_field.default])[0]


def build_secret_table(secrets: Iterable[Secret]) -> SecretTable:
    """Return the secrets as a table. A table is returned unchanged."""
    if isinstance(secrets, SecretTable):
        return secrets
    stream = iter(secrets)
    batches = [_build_batch_columns(())]
    while batch := tuple(itertools.islice(stream, _AT_ONCE)):
        batches.append(_build_batch_columns(batch))
    for numbers, items in _PLACES.items():
        total = 0
        for batch_columns in batches:
            batch_columns[numbers] += total
            total += len(batch_columns[items])
    columns: dict[str, Any] = {}
    for name in list(batches[0]):
        # Each batch gives up its part, or the whole table would be in memory twice.
        column = np.concatenate(list(map(operator.methodcaller("pop", name), batches)))
        if _has_own_value(name, column):
            columns[name] = column
    wordings = WordingColumn(
        columns.pop("texts"),
        columns.pop("marks"),
        columns.pop("text_numbers"),
        TokenRows(columns.pop("places"), columns.pop("place_begins"), columns.pop("place_lengths")),
    )
    if wordings.places.lengths.any():
        columns["wording"] = wordings
    return SecretTable(
        columns, columns.pop("tokens"), columns.pop("begins"), columns.pop("lengths")
    )


def _has_own_value(name: str, column: NDArray[Any]) -> bool:
    """Return whether the field of some secret differs from the field's default."""
    default = itertools.repeat(_DEFAULTS.get(name))
    return name not in _DEFAULTS or any(map(operator.ne, column, default))


def join_secret_tables(first: SecretTable, second: SecretTable) -> SecretTable:
    """Return the secrets of both tables, with only the tokens and texts that they need."""
    tokens = _join_token_rows((first.texts, second.texts))
    columns: dict[str, Any] = {}
    for name in {**first.columns, **second.columns}:
        if name == "wording":
            columns[name] = _join_wording_columns((_find_wordings(first), _find_wordings(second)))
        else:
            columns[name] = np.concatenate((first.find_column(name), second.find_column(name)))
    lengths = np.concatenate((first.lengths, second.lengths))
    return SecretTable(columns, tokens.tokens, tokens.begins, lengths)


def _join_token_rows(parts: Iterable[TokenRows]) -> TokenRows:
    tokens = []
    begins = []
    lengths = []
    total = 0
    for part in map(TokenRows.drop_unused_tokens, parts):
        tokens.append(part.tokens)
        begins.append(part.begins + total)
        lengths.append(part.lengths)
        total += len(part.tokens)
    return TokenRows(np.concatenate(tokens), np.concatenate(begins), np.concatenate(lengths))


def _find_wordings(table: SecretTable) -> WordingColumn:
    if "wording" in table.columns:
        column: WordingColumn = table.columns["wording"]
        return column
    zeros: Any = np.zeros(len(table), np.int32)
    places = TokenRows(np.empty(0, np.int32), zeros.astype(np.int64), zeros)
    return WordingColumn(np.array([""], STRINGS), np.fromiter([()], object), zeros, places)


def _join_wording_columns(parts: Sequence[WordingColumn]) -> WordingColumn:
    n_texts = 0
    for part in parts:
        n_texts += len(np.unique(part.text_numbers))
    texts = np.empty(n_texts, STRINGS)
    marks = []
    text_numbers: list[Any] = []
    total = 0
    for part in parts:
        old_numbers, numbers = np.unique(part.text_numbers, return_inverse=True)
        text_numbers.append((numbers + total).astype(np.int32))
        marks.append(part.marks[old_numbers])
        for begin in range(0, len(old_numbers), _AT_ONCE):  # not all texts twice
            batch = part.texts[old_numbers[begin : begin + _AT_ONCE]]
            texts[total + begin :][: len(batch)] = batch
        total += len(old_numbers)
    places = _join_token_rows(map(operator.attrgetter("places"), parts))
    return WordingColumn(texts, np.concatenate(marks), np.concatenate(text_numbers), places)


def _build_batch_columns(batch: Sequence[Secret]) -> dict[str, NDArray[Any]]:
    columns = _join_wordings(batch)
    for name in _DTYPES:
        columns[name] = _encode_values(name, map(operator.attrgetter(name), batch))
    columns["tokens"], columns["begins"] = _join_texts(batch)
    lengths = list(map(operator.attrgetter("lengths"), batch))
    columns["lengths"] = np.array(lengths, np.int32).reshape(-1, 2)
    return columns


def _join_texts(batch: Sequence[Secret]) -> tuple[NDArray[np.int32], Ints]:
    """Return the token ids of all texts, and the index at which each text begins.

    The windows of a long text follow each other, and each begins with the text of the previous one,
    so their common tokens are stored once.
    """
    tokens = array("i")
    begins: list[int] = []
    before: Tokens = ()
    for secret in batch:
        text = secret.tokens
        if before and text[: len(before)] == before:
            begins.append(begins[-1])
        else:
            begins.append(len(tokens))
            before = ()
        tokens.extend(text[len(before) :])
        before = text
    return np.array(tokens, np.int32), np.array(begins, np.int64)


def _join_wordings(batch: Sequence[Secret]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a `WordingColumn`, keyed by name.

    The text of adjacent secrets from the same record is stored once.
    """
    records: list[tuple[str, tuple[Mark, ...]]] = [("", ())]  # of secrets without a wording
    text_numbers = []
    places = array("i")
    begins = []
    for secret in batch:
        begins.append(len(places))
        if (wording := secret.wording) is not None:
            record = (wording.text, wording.marks)
            if record != records[-1]:
                records.append(record)
            places.extend((wording.start, wording.middle, wording.end, *wording.ends))
        text_numbers.append(len(records) - 1)
    texts, marks = zip(*records, strict=True)
    return {
        "texts": np.array(texts, STRINGS),
        "marks": np.fromiter(marks, object),
        "text_numbers": np.array(text_numbers, np.int32),
        "places": np.array(places, np.int32),
        "place_begins": np.array(begins, np.int64),
        "place_lengths": np.diff(begins, append=len(places)).astype(np.int32),
    }


def select_members(secrets: Iterable[Secret], member: bool = True) -> SecretTable:
    """Return the secrets that are members, or the non-members if `member` is False."""
    table = build_secret_table(secrets)
    return table[table.find_column("member") == member]

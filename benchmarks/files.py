"""The user's own private text: JSONL, CSV, Parquet or a Hugging Face data set, as secrets to extract.

Reads text as text (`007320` and `NA` stay what they are) and cuts it into prefix and suffix tokens. Knows nothing of
models. Errors and notes name rows and columns, never what is in them.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from auditor.benchmarks import chat, forms, marks, talks
from auditor.benchmarks.forms import Form
from auditor.benchmarks.occurrences import occurrences, runs_on
from auditor.benchmarks.picking import Corpus
from auditor.benchmarks.splitting import Record, Source, Split, check_lengths, divide, plural, rows_named
from auditor.benchmarks.wording import token_ends, worded
from auditor.core.cache import cache_folder
from auditor.core.disk import scratch_folder
from auditor.core.errors import AuditError
from auditor.core.knowledge import USER
from auditor.core.nouns import Mark, Tokens, Wording
from auditor.core.streams import generator
from auditor.plugins.benchmark import Benchmark

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_LENGTH = 50  # tokens of a prefix or suffix
_GROUPS, _GROUP_LENGTH = 50, 80  # what a report can show, and what no free text is
_BATCH = 1000  # rows tokenised at once: offsets of a whole data set need not fit in memory
_MOST_COPIES = 10_000_000  # records of a training, in memory together
_PLAIN = (("text",), ("prefix", "suffix"))  # layouts, beside those of conversations
_CHAT = tuple(dict.fromkeys(column for layout in talks.LAYOUTS for column in layout)) + talks.BESIDE
# All that is ever looked at, but what the user names.
_COLUMNS = ("prefix", "suffix", "text", "repeats", marks.COLUMN, *_CHAT)
_USUAL = {
    *(*_COLUMNS, "id", "label", "content", "body", "sentence", "document", "messages", "conversations", "context"),
    *("prompt", "completion", "instruction", "input", "output", "question", "answer", "response", "title", "url"),
}
_ABSENT = object()  # a JSON object without this key
_FROM_COLUMN = "come from the repeats column"
_FROM_ROWS = "are how often prefix and suffix stand, one behind the other, anywhere in its rows"
_OTHER_FILES = (".txt", ".tsv", ".npy", ".npz", ".arrow", ".feather", ".xlsx", ".xls", ".gz", ".zip", ".zst")


class Files(Benchmark):
    """Your own text or conversations: JSONL, CSV or Parquet with prefix+suffix, text or messages, or a HF data set."""

    name = "files"

    def __init__(
        self,
        data: str,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        prefix_length: int | None = None,
        suffix_length: int | None = None,
        knows: str | None = None,
        windows: int | None = None,
        known: str | None = None,
        known_fraction: float = 0.2,
        nonmembers: str | None = None,
        forget: str | None = None,
        limit: int | None = None,
        seed: int = 0,
        group_column: str | None = None,
        form: Form | None = None,
    ):
        """Reads and cuts everything at once. Raises AuditError for whatever a user can mend, in one sentence.

        `prefix_length` and `suffix_length`, 50 each where not given, cut a `text` column, at the start of each text, or
        with `windows` all along it, a stride of so many tokens apart; `prefix` and `suffix` columns are kept whole. Of
        a conversation, each assistant turn is a suffix, behind what an attacker `knows` of what came before: all of it,
        or its last `prefix_length` tokens.
        `group_column` is read of `data`, and of `nonmembers` where they have it; its values are shown in reports.
        """
        check_lengths(prefix_length, suffix_length)
        split = Split(known_fraction, limit, seed)
        self.tokenizer = _fast(tokenizer)
        cut = _Cut(self.tokenizer, prefix_length, suffix_length or _LENGTH, windows, knows, form)
        members = _source("--data", data, cut, group_column)
        pairs = None if known is None else _source("--known", known, cut)
        others = None if nonmembers is None else _source("--nonmembers", nonmembers, cut, group_column)
        lost = None if forget is None else _source("--forget", forget, cut)
        for source in (pairs, others, lost):
            if source is not None and (source.form is None) != (members.form is None):
                raise AuditError(f"expected conversations in both or neither of {members.where} and {source.where}")
        parts = divide(members, pairs, others, split, "row", lost)
        self.secrets, self.known, self.heldout = parts.secrets, parts.known, parts.heldout
        self.forgotten = parts.forgotten
        self.description = f"{Path(data).name if Path(data).exists() else data}: {parts.counted()}"
        self.form = members.form
        self.framed = self.form is not None and self.form.source is not None
        if self.form is not None:  # of a conversation, what is answered: the rest need not have been learnt
            self.heldout_given = tuple(len(secret.prefix) for secret in self.secrets if not secret.member)
        self.notes = (_tokenizer_note(self.tokenizer), *parts.notes)
        self._given = {True: ("--data", data), False: ("--nonmembers", nonmembers)}

    def corpus(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Every row as a whole. They are read anew: a corpus is not kept in memory for whoever may ask."""
        flag, name = self._given[members]
        if name is None:
            return
        table = read_table(flag, name)
        layout, repeats = _layout(table), _repeats(table)
        if self.form is not None:
            for said, times in zip(_conversations(table, layout), repeats, strict=True):
                with suppress(talks.Unusable):  # nobody is attacked in such a row either, and the notes say so
                    if not isinstance(said, talks.Unusable):
                        yield chat.write(self.tokenizer, said, self.form).tokens, times
            return
        texts = _joined(table, layout)
        for first in range(0, len(texts), _BATCH):
            encoded = _encode(self.tokenizer, texts[first : first + _BATCH])["input_ids"]
            yield from zip(map(tuple, encoded), repeats[first : first + _BATCH], strict=True)


def _fast(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer, if it can tell which characters a token came from. Raises AuditError if not."""
    if tokenizer is None:
        raise AuditError("expected a model with a tokenizer for text data, got a model without one")
    if not getattr(tokenizer, "is_fast", False):
        raise AuditError(
            f"expected a fast tokenizer (with character offsets) for text data, got the slow {type(tokenizer).__name__}"
        )
    return tokenizer


def _tokenizer_note(tokenizer: PreTrainedTokenizerBase) -> str:
    extra = tokenizer.num_special_tokens_to_add()
    default = f"; by default it would add {extra} to every text" if extra else ""
    return f"tokenised by {type(tokenizer).__name__}, {len(tokenizer)} tokens, without special tokens{default}"


# --- from rows to tokens --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """One file: its column names, and a way to get at a column without reading the others."""

    where: str
    columns: tuple[str, ...]
    rows: int
    column: Callable[[str], Sequence[Any]]


@dataclass(frozen=True)
class _Cut:
    """How a row becomes prefixes and suffixes: lengths in tokens, the stride of windows, what an attacker knows."""

    tokenizer: Any
    prefix_length: int | None
    suffix_length: int
    windows: int | None = None
    knows: str | None = None
    form: Form | None = None  # of conversations; None: the usual one


_Halves = tuple[Tokens, Tokens, Wording] | str  # prefix and suffix, as tokens and as written, or why there is none


@dataclass(frozen=True)
class _Part:
    """What came of a row, or of a part of it: `at` is where its suffix begins, in tokens of the row."""

    row: int
    halves: _Halves
    part: int | None = None  # None: the row is one secret
    at: int = 0
    stands: str = ""  # what it is in the row, where an attacker is told something else


def _source(flag: str, name: str, cut: _Cut, group_column: str | None = None) -> Source:
    """The rows of one file as records. Rows that cannot be cut are listed by reason."""
    table = read_table(flag, name, _COLUMNS if group_column is None else (*_COLUMNS, group_column))
    if not table.rows:
        raise AuditError(f"{table.where} is empty: expected at least one row")
    layout = _layout(table)
    form = None if layout in _PLAIN else cut.form or usual_form(cut.tokenizer, table)
    remarks = Counter[str]()
    parts, how, texts = _parts(table, replace(cut, form=form), remarks)
    if flag == "--data":  # nobody asks how often known pairs and non-members occur
        repeats = _repeats(table)
        how += f"; repeat counts {_FROM_COLUMN if 'repeats' in table.columns else _FROM_ROWS}"
    else:
        repeats = [1] * table.rows
    groups = _groups(table, group_column, needed=flag == "--data")
    records: list[Record] = []
    standing: list[str] = []
    left_out: dict[str, list[int]] = {}
    unasked: dict[str, list[int]] = {}  # answers of rows that have others
    for one in parts:
        if isinstance(one.halves, str):
            (left_out if one.part is None else unasked).setdefault(one.halves, []).append(one.row)
        else:
            prefix, suffix, wording = one.halves
            record = Record(one.row, prefix, suffix, repeats[one.row], groups[one.row], wording, one.part, one.at)
            records.append(record)
            standing.append(one.stands or wording.whole)
    if flag == "--data" and "repeats" not in table.columns:
        records = _counted(records, standing, texts)
    if marks.COLUMN in table.columns:
        records = _marked(records, table)
    if not records:
        left_out |= unasked
    reasons = tuple((why, tuple(rows)) for why, rows in left_out.items())
    dropped = (
        f"left out {plural(len(rows), 'answer')}: {why} ({rows_named(sorted(set(rows)))})"
        for why, rows in unasked.items()
    )
    notes = (how, *dropped, *(f"{why} ({plural(count, 'conversation')})" for why, count in remarks.items()))
    return Source(table.where, tuple(records), reasons, tuple(f"{table.where}: {note}" for note in notes), form)


def _counted(records: Sequence[Record], standing: Sequence[str], texts: Sequence[str]) -> list[Record]:
    """The records with how often each stands in the texts, letter for letter, its suffix right behind its prefix.

    Of rows that say the same the first has all of it: where they are merged their counts add up.
    """
    pairs = list(zip(records, standing, strict=True))
    cut = {text for record, text in pairs if (w := record.wording) is not None and runs_on(w.suffix, w.after[:1])}
    found = occurrences({text: text not in cut for text in standing}, texts)
    return [replace(record, repeats=found.pop(text, 0)) for record, text in pairs]


def _marked(records: Sequence[Record], table: _Table) -> list[Record]:
    """The records with what the rows mark in them. Raises AuditError for marks that are none of their row."""
    found = _marks_of(table)
    return [
        replace(record, wording=replace(record.wording, marks=found[record.row])) if record.wording else record
        for record in records
    ]


def _marks_of(table: _Table) -> list[tuple[Mark, ...]]:
    """What each row marks: nothing without the column. Raises AuditError for anything but texts by kind."""
    if marks.COLUMN not in table.columns:
        return [()] * table.rows
    found = []
    said = zip(*(map(_text_in, table.column(name)) for name in _layout(table)), strict=True)
    for row, (value, parts) in enumerate(zip(table.column(marks.COLUMN), said, strict=True)):
        where = _cell(table, row, marks.COLUMN)
        try:
            found.append(marks.of_cell(None if value is _ABSENT else value))
        except ValueError as error:
            raise AuditError(f'{where}: expected texts by kind, as {{"name": ["Jane Doe"]}}, got {error}') from None
        if missing := [kind for kind, text in found[-1] if text not in "".join(parts)]:
            raise AuditError(f"{where}: expected texts that stand in the row, got a {missing[0]} that does not")
    kinds = {kind for row in found for kind, _ in row}
    if len(kinds) > marks.MOST:
        raise AuditError(
            f"{table.where}: expected at most {marks.MOST} kinds in column {marks.COLUMN!r}, since reports show them, "
            f"got {len(kinds):,}"
        )
    return found


def _text_in(value: Any) -> str:
    """All that a cell says: of a conversation, message by message."""
    if isinstance(value, dict | list):
        return "\n".join(map(_text_in, value.values() if isinstance(value, dict) else value))
    return value if isinstance(value, str) else ""


def _parts(table: _Table, cut: _Cut, remarks: Counter[str]) -> tuple[Iterator[_Part], str, Sequence[str]]:
    """The secrets of each row, how they were cut, and what the rows say, which is whole when all secrets are read.

    remarks: is given what of conversations is not written, with how many say so. Raises AuditError for a flag that says
    nothing to this layout.
    """
    layout = _layout(table)
    if cut.knows is not None and layout in _PLAIN:
        raise AuditError(f"--knows is about conversations (messages), but {table.where} has {' and '.join(layout)}")
    if cut.windows is not None and layout != ("text",):
        raise AuditError(f"--windows slides over a text column, but {table.where} has {' and '.join(layout)}")
    if cut.form is not None:
        knows, texts = cut.knows or USER, list[str]()
        how = f"assistant turns, {cut.suffix_length} tokens of each, as --template {cut.form.said} (--knows {knows})"
        return _cut_conversations(cut, cut.form, knows, _conversations(table, layout), (texts, remarks)), how, texts
    said = _joined(table, layout)
    if layout == ("prefix", "suffix"):
        halves = _cut_pairs(cut.tokenizer, _texts(table, "prefix"), _texts(table, "suffix"))
        pairs = (_Part(row, half) for row, half in enumerate(halves))
        return pairs, "prefix and suffix tokenised jointly and kept whole", said
    prefix = cut.prefix_length or _LENGTH
    how = f"text cut into its first {prefix} and the next {cut.suffix_length} tokens"
    if cut.windows is not None:
        how = f"every {cut.windows} tokens of a text, {prefix} of them and the next {cut.suffix_length}"
    return _cut_texts(cut, prefix, said), how, said


def _cut_texts(cut: _Cut, prefix: int, texts: Sequence[str]) -> Iterator[_Part]:
    """(prefix,) and (suffix_length,) tokens of each text, once or at every stride; what is left over is not used."""
    total = prefix + cut.suffix_length
    for first in range(0, len(texts), _BATCH):
        batch = texts[first : first + _BATCH]
        encoded = _encode(cut.tokenizer, batch)
        rows = zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for row, (text, ids, offsets) in enumerate(rows, first):
            if len(ids) < total:
                yield _Part(row, f"shorter than {prefix} + {cut.suffix_length} tokens")
                continue
            starts = [0] if cut.windows is None else range(0, len(ids) - total + 1, cut.windows)
            for part, start in enumerate(starts):
                middle, end = start + prefix, start + total
                halves = tuple(ids[start:middle]), tuple(ids[middle:end]), worded(text, offsets, start, middle, end)
                yield _Part(row, halves, None if cut.windows is None else part, middle)


def _cut_conversations(
    cut: _Cut,
    form: Form,
    knows: str,
    said: Iterator[talks.Conversation | talks.Unusable],
    told: tuple[list[str], Counter[str]],
) -> Iterator[_Part]:
    """told: is given what is written of each, and what is not."""
    texts, remarks = told
    for row, one in enumerate(said):
        try:
            if isinstance(one, talks.Unusable):
                raise one
            written = chat.write(cut.tokenizer, one, form)
            found = list(chat.cut(cut.tokenizer, one, written, form, knows, cut.suffix_length, cut.prefix_length))
        except talks.Unusable as why:
            yield _Part(row, str(why))
            continue
        texts.append(written.text)
        remarks.update(written.remarks)
        for part, answer in enumerate(found):
            number = part if len(found) > 1 else None
            if isinstance(answer, talks.Unusable):
                yield _Part(row, str(answer), number)
            else:
                yield _Part(row, (answer.prefix, answer.suffix, answer.wording), number, answer.at, answer.stands)


def usual_form(tokenizer: Any, table: _Table) -> Form:
    """What trainers make of such rows first of all; today, where the template writes the day.

    Raises AuditError for messages and a tokenizer without a template.
    """
    rows = (said for said in _conversations(table, _layout(table)) if not isinstance(said, talks.Unusable))
    first = list(islice(rows, 1))
    return forms.usual_form(tokenizer, first, f"{date.today()}") if first else Form(forms.NONE)


def sampled(flag: str, name: str, count: int) -> list[talks.Conversation] | None:
    """So many usable rows of a file, the same ones each time; None where it holds no conversations or instructions."""
    table = read_table(flag, name)
    if not table.rows or (layout := _layout(table)) not in talks.LAYOUTS:
        return None
    order = generator("text form", table.rows).permutation(table.rows).tolist()
    usable = (one for one in _conversations(table, layout, order) if not isinstance(one, talks.Unusable))
    return list(islice(usable, count))


def _conversations(
    table: _Table, layout: Sequence[str], order: Sequence[int] | None = None
) -> Iterator[talks.Conversation | talks.Unusable]:
    """What each row says, or why it cannot be used. order: of which rows; None: of all."""
    columns = {name: table.column(name) for name in (*layout, *talks.BESIDE) if name in table.columns}
    for i in range(table.rows) if order is None else order:
        row = {name: None if values[i] is _ABSENT else values[i] for name, values in columns.items()}
        try:
            yield talks.conversation(layout, row)
        except talks.Unusable as why:
            yield why


def _cut_pairs(tokenizer: Any, prefixes: Sequence[str], suffixes: Sequence[str]) -> Iterator[_Halves]:
    """The tokens of prefix + suffix, cut where the suffix starts: in training they were one text."""
    for start in range(0, len(prefixes), _BATCH):
        batch = list(zip(prefixes[start : start + _BATCH], suffixes[start : start + _BATCH], strict=True))
        encoded = _encode(tokenizer, [prefix + suffix for prefix, suffix in batch])
        for texts, ids, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield _cut_pair(tokenizer, *texts, ids, offsets)


def _cut_pair(tokenizer: Any, prefix: str, suffix: str, ids: list[int], offsets: list[tuple[int, int]]) -> _Halves:
    """`ids` cut at the token boundary between the two texts, or why that is not possible.

    Offsets alone do not decide: many tokenizers trim the space off a token's offsets, and then " b" after "a" looks as
    if it started behind "a ". What the tokens before the cut decode to does decide.
    """
    if not prefix or not suffix:
        return "prefix or suffix is empty"
    if _decode(tokenizer, ids) != prefix + suffix:
        return "the tokenizer does not give this text back (it normalises it)"
    begun = sum(start < len(prefix) for start, _ in offsets)  # tokens that begin in the prefix
    ended = next(
        (i for i, (_, end) in enumerate(offsets) if end > len(prefix)), len(ids)
    )  # leading ones that end in it
    for where in range(max(1, begun), min(ended, len(ids) - 1) + 1):  # several where tokens have no width
        if _decode(tokenizer, ids[:where]) == prefix:
            ends = [max(0, end - len(prefix)) for end in token_ends(offsets[where:], len(prefix + suffix))]
            return tuple(ids[:where]), tuple(ids[where:]), Wording(prefix, suffix, tuple(ends))
    return "the join of prefix and suffix is not a token boundary"


def _encode(tokenizer: Any, texts: Sequence[str]) -> Any:
    # verbose=False: a text longer than the model's positions is cut later, so the warning about it would mislead
    return tokenizer(
        list(texts),
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        padding=False,
        truncation=False,
        verbose=False,
    )


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


# --- whole texts ----------------------------------------------------------------------------------------------------


def read_texts(flag: str, name: str) -> list[str]:
    """Every row's text, prefix and suffix joined where those are the columns; each row once, whatever its `repeats`.

    Raises AuditError for whatever a user can mend.
    """
    table = _filled(read_table(flag, name))
    return _joined(table, _plain_layout(table))


def read_corpus(flag: str, name: str) -> Corpus:
    """Every row's text, with its `repeats` and its marks. Raises AuditError for whatever a user can mend."""
    table = _filled(read_table(flag, name))
    return Corpus(table.where, _joined(table, _plain_layout(table)), _repeats(table), _marks_of(table))


def _filled(table: _Table) -> _Table:
    if not table.rows:
        raise AuditError(f"{table.where} is empty: expected at least one row")
    return table


def _joined(table: _Table, layout: Sequence[str]) -> list[str]:
    return ["".join(parts) for parts in zip(*(_texts(table, column) for column in layout), strict=True)]


def training_texts(
    name: str, text_column: str | None = None, unit_column: str | None = None
) -> tuple[Sequence[str | talks.Conversation], list[str] | None]:
    """Every row's text (prefix and suffix joined, where those are the columns) or conversation, as often as its
    `repeats` say.

    Also whose each is, where `unit_column` says so. Raises AuditError for whatever a user can mend.
    """
    given = tuple(column for column in (text_column, unit_column) if column is not None)
    table = _filled(read_table("--data", name, (*_COLUMNS, *given)))
    for column in given:
        if table.columns.count(column) != 1:
            times = table.columns.count(column)
            raise AuditError(f"{table.where}: expected one column {column!r}, got {times or named(table.columns)}")
    layout = (text_column,) if text_column is not None else _layout(table)
    plain = layout in _PLAIN or text_column is not None
    found: Sequence[str] | Sequence[talks.Conversation] = _joined(table, layout) if plain else _talks(table, layout)
    for row, text in enumerate(found):
        if not text:
            raise AuditError(f"{table.where}, row {row} (counted from 0): expected text, got an empty one")
    repeats = _repeats(table)
    if sum(repeats) > _MOST_COPIES:
        raise AuditError(
            f"{table.where}: expected at most {_MOST_COPIES:,} records to train on, each as often as its repeats say, "
            f"got {sum(repeats):,}"
        )
    rows = [row for row, count in enumerate(repeats) for _ in range(count)]
    units = None if unit_column is None else _units(table, unit_column)
    return [found[row] for row in rows], None if units is None else [units[row] for row in rows]


def _plain_layout(table: _Table) -> tuple[str, ...]:
    layout = _layout(table)
    if layout not in _PLAIN:
        raise AuditError(f"{table.where}: expected text here, or prefix and suffix, got {' and '.join(layout)}")
    return layout


def _talks(table: _Table, layout: Sequence[str]) -> list[talks.Conversation]:
    """Every row's conversation. Raises AuditError with the row that has none: what is left out is not trained on."""
    found = []
    for row, said in enumerate(_conversations(table, layout)):
        if isinstance(said, talks.Unusable):
            raise AuditError(
                f"{table.where}, row {row} (counted from 0): expected a conversation to train on, got {said}"
            )
        found.append(said)
    return found


def _units(table: _Table, column: str) -> list[str]:
    """Whose each row is. Raises AuditError with the row for anything but text or a whole number."""
    values = list(table.column(column))
    for row, value in enumerate(values):
        if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
            raise AuditError(f"{_cell(table, row, column)}: expected a name or a whole number, got {_kind(value)}")
    return [str(value) for value in values]


# --- columns --------------------------------------------------------------------------------------------------------


def _layout(table: _Table) -> tuple[str, ...]:
    """One of `_PLAIN` and `talks.LAYOUTS`. Raises AuditError with the columns found for none, several or doubles."""
    for name in _COLUMNS:
        if table.columns.count(name) > 1:
            raise AuditError(f"{table.where}: expected one column {name!r}, got {table.columns.count(name)}")
    begun = [layout for layout in (*_PLAIN, *talks.LAYOUTS) if {layout[0], layout[-1]} & set(table.columns)]
    whole = [layout for layout in begun if set(layout) <= set(table.columns)]
    plain = [layout for layout in begun if layout in _PLAIN]
    if len(whole) == 1 and plain in ([], whole):
        return whole[0]
    if len(whole) > 1 and len(plain) < 2:
        raise AuditError(
            f"{table.where}: expected one layout, got {', and '.join(' + '.join(layout) for layout in whole)}: leave "
            "out what the model was not trained on"
        )
    raise AuditError(
        f"{table.where}: expected either the columns prefix and suffix or the column text, or conversations "
        f"({', '.join('+'.join(layout) for layout in talks.LAYOUTS)}), got {named(table.columns)}"
    )


def named(columns: Sequence[str]) -> str:
    """Column names for an error. In a CSV without a header they are private text: none is shown without a usual one."""
    if not columns:
        return "no columns"
    header = any(name.lower() in _USUAL for name in columns)
    shown = [name for name in columns if header and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", name)][:20]
    hidden = len(columns) - len(shown)
    words = [", ".join(shown)] if shown else []
    if hidden:
        words.append(f"{hidden} not shown (is the header row missing, or the separator no comma?)")
    return " and ".join(words)


def _texts(table: _Table, column: str) -> list[str]:
    """A column, every value of which is text. Raises AuditError with row and column otherwise."""
    values = list(table.column(column))
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise AuditError(f"{_cell(table, row, column)}: expected text, got {_kind(value)}")
        if not value.isascii() and re.search("[\ud800-\udfff]", value):  # JSON can hold half a character: "\ud83d"
            raise AuditError(f"{_cell(table, row, column)}: expected text, got half of a surrogate pair")
    return values


def _repeats(table: _Table) -> list[int]:
    """How often each row was trained on: the repeats column where there is one, else once.

    Raises AuditError with the row for anything but a whole number of at least 1.
    """
    if "repeats" not in table.columns:
        return [1] * table.rows
    counts = []
    for row, value in enumerate(table.column("repeats")):
        whole = isinstance(value, int) and not isinstance(value, bool)
        digits = isinstance(value, str) and re.fullmatch("[0-9]{1,15}", value)  # CSV is text all over
        if not (whole or digits) or not 1 <= int(value) < 10**15:
            raise AuditError(
                f"{_cell(table, row, 'repeats')}: expected a whole number of at least 1, got another value"
            )
        counts.append(int(value))
    return counts


def _groups(table: _Table, column: str | None, needed: bool) -> Sequence[str | None]:
    """The group of each row, None where no column is asked for.

    Reports show these values, so a column that names people rather than groups is refused.
    """
    if column is None or (column not in table.columns and not needed):
        return [None] * table.rows
    if table.columns.count(column) != 1:
        raise AuditError(f"{table.where}: expected one column --group-column {column!r}, got {named(table.columns)}")
    values = [_group(table, row, column, value) for row, value in enumerate(table.column(column))]
    if len(set(values)) > _GROUPS:
        raise AuditError(
            f"{table.where}: expected --group-column with at most {_GROUPS} different values, since reports show "
            f"them; {column!r} has {len(set(values)):,}"
        )
    return values


def _group(table: _Table, row: int, column: str, value: Any) -> str:
    if value is None or value is _ABSENT or value == "":
        return "none"
    if not isinstance(value, str | int | float | bool) or len(str(value)) > _GROUP_LENGTH:
        what = f"a text of {len(value):,} characters" if isinstance(value, str) else _kind(value)
        raise AuditError(
            f"{_cell(table, row, column)}: expected a group's name of at most {_GROUP_LENGTH} characters, got {what}"
        )
    return str(value)


def _cell(table: _Table, row: int, column: str) -> str:
    return f"{table.where}, row {row} (counted from 0), column {column!r}"


def _kind(value: Any) -> str:
    if value is _ABSENT:
        return "nothing (the row does not have it)"
    if isinstance(value, bool):
        return "true or false"
    kinds: dict[type, str] = {type(None): "null", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"{type(value).__name__}")


# --- files ----------------------------------------------------------------------------------------------------------


def read_table(flag: str, name: str, columns: Sequence[str] = _COLUMNS) -> _Table:
    """A local file by its suffix, otherwise a Hugging Face data set; `columns`: all that will be asked for.

    Raises AuditError for what is neither.
    """
    path, where = Path(name), f"{flag} {name!r}"
    reader = _READERS.get(path.suffix.lower())
    if not path.exists():
        if reader is not None or _looks_like_a_file(name):
            raise AuditError(f"{where}: no such file")
        return _read_hub(where, name, columns)
    if path.is_dir():
        return _read_hub(where, name, columns)
    if reader is None:
        raise AuditError(
            f"{where}: expected a file ending in {', '.join(_READERS)}, got {path.suffix or 'no ending'!r}"
        )
    try:
        return reader(where, path, columns)
    except OSError as error:
        raise AuditError(f"{where}: cannot be read: {error.strerror or type(error).__name__}") from None


def _looks_like_a_file(name: str) -> bool:
    """No Hub data set is called like this, and a mistyped path should not be sent there."""
    plain = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name)
    return plain is None or name.lower().endswith(_OTHER_FILES)


def _utf8(where: str, path: Path) -> str:
    """The text of a file, without a byte order mark. Raises AuditError with the first byte that is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:  # from None: the error holds the whole file
        raise AuditError(f"{where}: expected UTF-8 text, got something else at byte {error.start}") from None


def _read_csv(where: str, path: Path, columns: Sequence[str]) -> _Table:
    rows = csv_rows(where, path)
    header = tuple(rows[0]) if rows else ()
    return _Table(where, header, max(0, len(rows) - 1), lambda name: [row[header.index(name)] for row in rows[1:]])


def csv_rows(where: str, path: Path) -> list[list[str]]:
    """The header and the rows, as many fields each; blank lines left out."""
    # The standard library's reader, since it is the strict one: pandas fills a short row with "", takes the first
    # column of a long one for an index and reads on after a stray quote; pyarrow accepts a quote that never closes.
    lines = csv.reader(io.StringIO(_utf8(where, path), newline=""), strict=True)
    old_limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses texts over 128 KiB
    line = 1
    table: list[list[str]] = []
    try:
        for fields in lines:
            if fields:  # [] is a blank line
                if table and len(fields) != len(table[0]):
                    raise AuditError(f"{where}, line {line}: expected {len(table[0])} fields, got {len(fields)}")
                table.append(fields)
            line = lines.line_num + 1
    except csv.Error as error:
        raise AuditError(f"{where}: not CSV in the record that starts at line {line}: {error}") from None
    finally:
        csv.field_size_limit(old_limit)
    return table


def _read_json(where: str, path: Path, columns: Sequence[str]) -> _Table:
    objects, _ = json_objects(where, path)
    found = tuple(dict.fromkeys(name for value in objects for name in value))
    return _Table(where, found, len(objects), lambda name: [value.get(name, _ABSENT) for value in objects])


def json_objects(where: str, path: Path) -> tuple[list[dict[str, Any]], list[str] | None]:
    """One JSON object a line, and these lines; or one array of objects, and None."""
    text, lines = _utf8(where, path), None
    if text.lstrip().startswith("["):
        objects = _parse_json(where, text, 0)
    else:  # not splitlines: a JSON text may hold U+2028, at which it would split
        numbered = [(number, line) for number, line in enumerate(text.split("\n")) if line.strip()]
        objects, lines = [_parse_json(where, line, number) for number, line in numbered], [line for _, line in numbered]
    for row, value in enumerate(objects):
        if not isinstance(value, dict):
            raise AuditError(f"{where}, row {row} (counted from 0): expected a JSON object, got {_json_kind(value)}")
    return objects, lines


def _json_kind(value: Any) -> str:
    return "text" if isinstance(value, str) else _kind(value)


def _parse_json(where: str, text: str, lines_before: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:  # from None: the error holds the text
        line = lines_before + error.lineno
        raise AuditError(f"{where}, line {line}: not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError):
        raise AuditError(
            f"{where}, line {lines_before + 1}: not JSON that can be read (too long or too deep)"
        ) from None


def _read_parquet(where: str, path: Path, columns: Sequence[str]) -> _Table:
    import pyarrow
    from pyarrow import parquet

    if path.stat().st_size == 0:
        raise AuditError(f"{where} is empty: expected a Parquet file")
    try:
        with parquet.ParquetFile(path) as file:
            names = tuple(file.schema_arrow.names)
            wanted = [name for name in columns if names.count(name) == 1]  # doubles are refused later, by name
            table = file.read(columns=wanted)
            values = {name: table.column(name).to_pylist() for name in wanted}
            return _Table(where, names, file.metadata.num_rows, values.__getitem__)
    except UnicodeDecodeError:
        raise AuditError(f"{where}: expected UTF-8 text, got something else") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise AuditError(f"{where}: not a Parquet file that can be read ({type(error).__name__})") from None


_READERS: dict[str, Callable[[str, Path, Sequence[str]], _Table]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


# --- Hugging Face data sets -----------------------------------------------------------------------------------------


def _read_hub(where: str, name: str, columns: Sequence[str]) -> _Table:
    with loaded_dataset(where, name) as dataset:
        return _hub_table(where, dataset, columns)


@contextmanager
def loaded_dataset(where: str, name: str) -> Iterator[datasets.Dataset]:
    """The train split of a data set on the Hub, of one that was saved, or of a folder that `datasets` can read.

    To be read before the block is left: what `datasets` makes of a folder is private text, and goes with it.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs rows that it cannot read
    datasets.disable_progress_bars()
    with _dataset_cache(Path(name).is_dir()) as cache:
        try:
            if any((Path(name) / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
                saved = datasets.load_from_disk(name)
                found = saved["train"] if isinstance(saved, datasets.DatasetDict) else saved
            else:
                found = datasets.load_dataset(name, split="train", cache_dir=str(cache))
        except Exception as error:  # the libraries below raise dozens of kinds, all about the data or the network
            _refuse_hub(where, Path(name).is_dir(), error)
        yield found


@contextmanager
def _dataset_cache(local: bool) -> Iterator[Path]:
    """Where `datasets` keeps what it has made of files: of downloads for the next time, of a local folder for now."""
    cache = cache_folder()
    if local:
        with scratch_folder(cache, "datasets") as scratch:
            yield scratch
        return
    (cache / "datasets").mkdir(exist_ok=True, mode=0o700)
    (cache / "datasets").chmod(0o700)  # gated data may lie there, whoever made the folder
    yield cache / "datasets"


def _hub_table(where: str, dataset: datasets.Dataset, columns: Sequence[str]) -> _Table:
    names = tuple(dataset.column_names)
    values = {name: dataset[name][:] for name in columns if name in names}
    return _Table(where, names, dataset.num_rows, values.__getitem__)


def _refuse_hub(where: str, local: bool, error: Exception) -> NoReturn:
    """One sentence. Errors about rows may quote them, so only those that cannot are repeated."""
    kind = type(error).__name__
    if isinstance(error, FileNotFoundError):
        what = "this folder holds no data file" if local else "no such file here and no such data set on the Hub"
    elif (
        type(error) is ValueError
    ):  # not its subclasses: pyarrow's quote rows; this one is about splits and configurations
        what = "cannot be loaded as a data set: " + " ".join(str(error).split())[:200]
    elif isinstance(error, OSError) and not local:
        what = f"no such file here, and the Hugging Face Hub cannot be reached ({kind})"
    else:
        what = f"cannot be loaded as a data set ({kind})"
    raise AuditError(f"{where}: {what}") from None

"""Read a user's table: columns of texts or conversations, repeats, marks, groups and users.

Errors name the row and column of an invalid value, never the value. The column `pii` marks the
personal data of a row. It maps each kind to the row's texts of this kind: {"name": ["Jane Doe"],
"address": ["12 Oak Street"]}. The data define the kinds. Reports show the kinds, but never the
texts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np

from auditor.benchmarks.data import conversation_rows
from auditor.benchmarks.data.conversation_rows import (
    BESIDE,
    LAYOUTS,
    Conversation,
    UnusableConversation,
    get_message_text,
    remove_nulls,
)
from auditor.benchmarks.data.json_rows import ABSENT, describe_cell_value_type, parse_strict_json
from auditor.benchmarks.data.tables import RecordTable, read_record_table
from auditor.core.arrays import Ints
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.nouns import Mark

_MOST_KINDS = _GROUPS = 50  # the most that a report shows
_GROUP_LENGTH = 80  # shorter than any free text
_KIND = re.compile("[a-z][a-z0-9-]{0,31}")
PLAIN = (("text",), ("prefix", "suffix"))  # layouts, besides those of conversations
# Why a row of such a layout is left out if it has no text to attack.
NO_TEXT = {
    PLAIN[0]: "no text (empty, null or only white space)",
    PLAIN[1]: "prefix or suffix is empty",
}
_READ = tuple(dict.fromkeys(column for layout in LAYOUTS for column in layout))
_LAYOUTS_LABEL = ", ".join(map("+".join, LAYOUTS))
CHAT = (*_READ, *BESIDE)
_LABEL = "label"
_INSTRUCTED = {"input", "history"}
_READ_WITH = {"instruction": _INSTRUCTED, "chosen": {"prompt", "instruction", *_INSTRUCTED}}
# pyarrow.DataType of each nested column, or None if its rows differ too much for Arrow
ColumnKinds = Mapping[str, Any]
# how often a row was trained on; the personal data in it
REPEATS = "repeats"
PII = "pii"
# all columns that are read, besides those named by the user
COLUMNS = (
    "prefix",
    "suffix",
    "text",
    REPEATS,
    PII,
    *CHAT,
)
_OTHERS = (
    "id",
    "label",
    "content",
    "body",
    "sentence",
    "document",
    "context",
    "question",
    "answer",
    "response",
)
_NESTED = ("data", "contents", "conversation", "dialog", "dialogue", "segments", "translation")
_USUAL = {*COLUMNS, *_OTHERS, *_NESTED, "title", "url"}


def hash_texts(texts: Sequence[str]) -> Ints:
    """Hash each text into int64, (texts,), equal in every process and on every machine."""
    import pandas

    return pandas.util.hash_array(np.array(texts, dtype=object), categorize=False).view(np.int64)


@dataclass(frozen=True)
class UnreadRows:
    """Hold statistics of a large table of which only a sample was read.

    rows: (sample,) row numbers in the table.
    copies: (sample,) occurrences in the table, weighted by the repeats column if present.
    columns, texts: all columns of the table, and its text columns.
    n_rows: number of rows in the complete table; n_distinct: number of distinct unread rows.
    by_copies: numbers of distinct unread rows, keyed by copies (`format_copies`).
    row_hashes, user_hashes: sorted hashes of all rows and users.
    of_several_groups, of_several_users: positions in the sample of rows whose copies differ in
        group or user.
    kinds: Arrow type of each column of objects, from all rows (`DataTable.infer_nested_kinds`).
    left_out: numbers of rows without a text, keyed by reason; they are not in the sample.
    """

    rows: tuple[int, ...]
    copies: tuple[int, ...]
    columns: tuple[str, ...]
    texts: tuple[str, ...]
    n_rows: int
    n_distinct: int
    by_copies: Counter[str] = field(default_factory=Counter)
    row_hashes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    user_hashes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    of_several_groups: frozenset[int] = frozenset()
    of_several_users: frozenset[int] = frozenset()
    kinds: ColumnKinds = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def contains_user(self, user: str) -> bool:
        """Return whether the table has a row of this user."""
        (user_hash,) = hash_texts([user])
        place = int(np.searchsorted(self.user_hashes, user_hash))
        return place < len(self.user_hashes) and bool(self.user_hashes[place] == user_hash)


@dataclass(frozen=True)
class DataTable(RecordTable):
    """A table of records: texts or conversations, with the columns beside them.

    given_layout: columns that hold the records, if the table itself need not show which they are.
    unread: statistics of the remaining rows, if the table is a sample of a large one.

    Methods raise AuditError, with row and column, if a value is invalid.
    """

    given_layout: tuple[str, ...] = ()
    unread: UnreadRows | None = None

    @cached_property
    def layout(self) -> tuple[str, ...]:
        """The columns that hold the records: one of the tuples in `PLAIN` and `LAYOUTS`.

        Raise AuditError, which lists the table's columns, if no layout matches, if several match,
        or if a column name is duplicated.
        """
        if self.given_layout:
            return self.given_layout
        for name in COLUMNS:
            if self.columns.count(name) > 1:
                raise AuditError(
                    f"{self.label}: expected one column {name!r}, got {self.columns.count(name)}"
                )
        names = set(self.columns)
        begun = [layout for layout in (*PLAIN, *LAYOUTS) if {layout[0], layout[-1]} & names]
        complete = [layout for layout in begun if names.issuperset(layout)]
        plain = [layout for layout in begun if layout in PLAIN]
        # Reject half of a plain layout next to a complete one, such as a prefix next to messages:
        # the training text is unclear.
        if len(complete) == 1 and plain in ([], complete):
            return complete[0]
        if len(complete) > 1 and len(plain) < 2:
            raise AuditError(
                f"{self.label}: expected one layout, got "
                f"{', and '.join(map(' + '.join, complete))}: leave out data that the "
                "model was not trained on, or write all rows as messages"
            )
        if "prompt" in self.columns and not begun[1:] and not plain:
            others = tuple(name for name in self.texts if name != "prompt")
            advice = ""
            if others:
                shown = describe_table_columns(others)
                advice = f"; rename to completion what was trained on: {shown}"
            raise AuditError(
                f"{self.label}: expected what a model was trained to say next to the prompt "
                f"({_LAYOUTS_LABEL}), got prompts only, as for GRPO: it learns from the model's "
                f"own answers, and nothing in these rows has a loss{advice}"
            )
        advice = (
            "rename the column of the training texts to text, or a question and its answer to "
            "prompt and completion"
        )
        if self.rows == 1:
            advice += ", or write the objects inside this only row as rows"
        raise AuditError(
            f"{self.label}: expected either the columns prefix and suffix or the column text, or "
            f"conversations ({_LAYOUTS_LABEL}), got {describe_table_columns(self.columns)}: "
            f"{advice}"
        )

    @property
    def has_conversations(self) -> bool:
        return self.layout in LAYOUTS

    def list_unread_text_columns(self, user_columns: Sequence[str]) -> tuple[str, ...]:
        """Return the text columns of the table that the audit does not read.

        user_columns: columns that the user named, such as the group column.
        """
        used = {*self.layout, REPEATS, PII, *user_columns}
        if self.has_conversations:
            # Labels and marks are only read as true or false: a text there is not used.
            used |= {"system", "tools", "chat_template_kwargs"}
            used |= _READ_WITH.get(self.layout[0], set())
        return tuple(name for name in self.texts if name not in used)

    # --- texts ---

    def list_texts(self, may_be_null: bool = False) -> list[str]:
        """Return the text of every row; prefix and suffix are joined.

        may_be_null: see `list_text_values`. Raise AuditError if the table has conversations.
        """
        if self.has_conversations:
            raise AuditError(
                f"{self.label}: expected text here, or prefix and suffix, got "
                f"{' and '.join(self.layout)}"
            )
        columns = [self.list_text_values(name, may_be_null) for name in self.layout]
        return list(map("".join, zip(*columns, strict=True)))

    def list_text_values(self, column: str, may_be_null: bool = False) -> list[str]:
        """Return the values of a column whose values must be texts.

        may_be_null: whether null counts as an empty text, as CSV writes it.
        """
        values = list(self.column(column))
        for row, value in enumerate(values):
            if value is None and may_be_null:
                values[row] = ""
            elif not isinstance(value, str):
                kind = describe_cell_value_type(value)
                if self.rows == 1 and isinstance(value, list | dict):
                    kind += ": write an object for each row"  # pandas writes one of columns
                raise self._make_cell_error(row, column, "text", kind)
            elif not value.isascii() and re.search(
                "[\ud800-\udfff]", value
            ):  # JSON can hold half a character: "\ud83d"
                raise self._make_cell_error(row, column, "text", "half of a surrogate pair")
        return values

    def list_shown_texts(self) -> list[str]:
        """Return the text of every row, "" for null; a conversation has one line per message."""
        if not self.has_conversations:
            return self.list_texts(may_be_null=True)
        lines: dict[int, list[str]] = {}
        for row, conversation in self.parse_conversations():
            of_row = lines.setdefault(row, [])
            messages = (
                () if isinstance(conversation, UnusableConversation) else conversation.messages
            )
            contents = []
            for message in messages:
                content = get_message_text(message.get("content"))
                # Both sides of a preference begin with the same prompt.
                if content and content not in of_row:
                    contents.append(content)
            of_row += contents
        return list(map("\n".join, lines.values()))

    def _make_cell_error(self, row: int, column: str, expected: str, got: str) -> AuditError:
        place = f"{self.describe_row(row)}, column {column!r}"
        return AuditError(f"{place}: expected {expected}, got {got}")

    # --- conversations ---

    def parse_conversations(
        self, order: Sequence[int] | None = None, kinds: ColumnKinds | None = None
    ) -> Iterator[tuple[int, Conversation | UnusableConversation]]:
        """Yield each row's number with its conversation, or the reason why the row is unusable.

        A preference row yields its chosen and its rejected conversation.

        order: the rows to read (None: all rows). kinds: the Arrow types of the columns in the
        training table.
        """
        columns: dict[str, Sequence[Any]] = {}
        for name in CHAT:
            if name in self.columns:
                columns[name] = self._list_values(name)
        if self.layout[0] == "prompt" and _LABEL in columns:
            columns[_LABEL] = _parse_labels(columns[_LABEL])
        kinds = join_nested_kinds(kinds or {}, self.infer_nested_kinds())
        for i in range(self.rows) if order is None else order:
            row = {name: values[i] for name, values in columns.items()}
            try:
                sides = conversation_rows.parse_conversations(self.layout, row)
                filled = _parse_filled_row(self.layout, row, kinds)
            except UnusableConversation as why:
                yield i, why
                continue
            place = self.describe_row(i)
            for conversation, other in zip(sides, filled or sides, strict=True):
                conversation = replace(conversation, place=place)
                if other != conversation:
                    conversation = replace(conversation, filled=other)
                yield i, conversation

    def describe_row(self, row: int) -> str:
        """Return the file and the row's number in it, for error messages."""
        number = self.first_row + row
        if self.unread is not None:
            number = self.unread.rows[row]
        return f"{self.label}, row {number} (counted from 0)"

    def _list_values(self, column: str) -> list[Any]:
        """Return the values of a column, and None for rows without it."""
        return [None if value is ABSENT else value for value in self._list_cells(column)]

    def _list_cells(self, column: str) -> Sequence[Any]:
        """Return the values of a column; messages that are JSON text become lists."""
        values = self.column(column)
        if (column,) not in LAYOUTS:
            return values
        return list(map(conversation_rows.decode_messages, values))

    @property
    def has_unclear_labels(self) -> bool:
        """True if any label is other than true, false or null."""
        if self.layout[0] != "prompt" or _LABEL not in self.columns:
            return False
        labels = self._list_values(_LABEL)
        return _parse_labels(labels) is labels

    def infer_nested_kinds(self) -> ColumnKinds:
        """Return the Arrow type of each conversation column that holds objects.

        The types are those that `Dataset.from_list` infers; None if a column has no type.
        """
        import pyarrow

        kinds = dict[str, Any]()
        for name in (*_READ, "tools", "chat_template_kwargs"):
            if name not in self.columns:
                continue
            values = self._list_values(name)
            if any(isinstance(value, dict | list) for value in values):
                try:
                    kinds[name] = pyarrow.infer_type(values)
                except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
                    kinds[name] = None
        if self.unread is None:
            return kinds
        return join_nested_kinds(self.unread.kinds, kinds)

    def hash_rows(self) -> Ints:
        """Return a hash of each row's text or conversation, of shape (rows,), int64.

        Rows without a text have the hash of "". In conversations, null counts as a missing key,
        because Parquet has all keys in all rows. Raise AuditError, with the row, if a value is not
        text.
        """
        if not self.has_conversations:
            texts = self.list_texts(may_be_null=True)
            parts = map(self.list_text_values, self.layout, repeat(True))
            for place, cells in enumerate(zip(*parts, strict=True)):
                if not (cells[0] and cells[-1].strip()):
                    texts[place] = ""
            return hash_texts(texts)
        names = [name for name in CHAT if name in self.columns]
        texts = []
        for cells in zip(*map(self._list_cells, names), strict=True):
            row = {}
            for name, value in zip(names, cells, strict=True):
                if value is not ABSENT:
                    row[name] = value
            texts.append(json.dumps(remove_nulls(row), sort_keys=True, default=repr))
        return hash_texts(texts)

    # --- repeats, personal data, groups and users ---

    def list_repeat_counts(self) -> list[int]:
        """Return the number of training copies of each row: its `repeats`, or 1 without it.

        In a sample of a large table, copies of a row in the whole table count too.

        Raise AuditError, with the row, if a value is not a whole number of at least 1.
        """
        if self.unread is not None:
            return list(self.unread.copies)
        if REPEATS not in self.columns:
            return [1] * self.rows
        counts = []
        for row, value in enumerate(self.column(REPEATS)):
            count = _parse_repeat_count(value)
            if not 1 <= count < 10**15:
                expected = "a whole number of at least 1"
                raise self._make_cell_error(row, REPEATS, expected, "another value")
            counts.append(count)
        return counts

    def list_personal_data_marks(self) -> list[tuple[Mark, ...]]:
        """Return the personal data that the `pii` column marks in each row; none without it.

        Raise AuditError if a value does not map kinds to texts.
        """
        if PII not in self.columns:
            return [()] * self.rows
        marks_of_rows = []
        cell_texts = zip(
            *(map(_format_table_cell, self._list_cells(name)) for name in self.layout), strict=True
        )
        kinds = set()
        for row, (value, parts) in enumerate(zip(self.column(PII), cell_texts, strict=True)):
            try:
                marks = tuple(dict.fromkeys(_parse_personal_data_marks(value)))
            except ValueError as error:
                expected = 'texts by kind, as {"name": ["Jane Doe"]}'
                raise self._make_cell_error(row, PII, expected, str(error)) from None
            for kind, text in marks:
                kinds.add(kind)
                if text not in "".join(parts):  # joined: it may run from prefix into suffix
                    raise self._make_cell_error(
                        row, PII, "texts of the row", f"a {kind} that does not"
                    )
            marks_of_rows.append(marks)
        if len(kinds) > _MOST_KINDS:
            raise AuditError(
                f"{self.label}: expected at most {_MOST_KINDS} kinds in column {PII!r}, since "
                f"reports show them, got {len(kinds):,}"
            )
        return marks_of_rows

    def list_groups(self, column: str | None, needed: bool) -> Sequence[str | None]:
        """Return the group of each row, or None for each row if no column is given.

        needed: whether a missing column is an error. A column that names people is rejected,
        because reports show groups.
        """
        if column is None or not self._has_one_column("--group-column", column, needed):
            return [None] * self.rows
        values = []
        for row, value in enumerate(self.column(column)):
            values.append(self._name_group(row, column, value))
        self.check_few_groups(column, len(set(values)))
        return values

    def check_few_groups(self, column: str, n_groups: int) -> None:
        """Raise AuditError if a column has more groups than a report can show."""
        if n_groups > _GROUPS:
            raise AuditError(
                f"{self.label}: expected --group-column with at most {_GROUPS} different values, "
                f"since reports show them; {column!r} has {n_groups:,}"
            )

    def _name_group(self, row: int, column: str, value: Any) -> str:
        if value is None or value is ABSENT or value == "" or value != value:
            return "none"
        # pandas writes 1.0 in a column of whole numbers with gaps
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if not isinstance(value, str | int | float | bool) or len(str(value)) > _GROUP_LENGTH:
            got = describe_cell_value_type(value)
            if isinstance(value, str):
                got = f"a text of {len(value):,} characters"
            expected = f"a group's name of at most {_GROUP_LENGTH} characters"
            raise self._make_cell_error(row, column, expected, got)
        return str(value)

    def list_users(self, column: str | None, needed: bool) -> Sequence[str | None]:
        """Return the user of each row, or None for each row if no column is given.

        needed: whether a missing column is an error. Raise AuditError for a missing column.
        """
        if column is None or not self._has_one_column("--user-column", column, needed):
            return [None] * self.rows
        return self.list_user_names(column)

    def list_user_names(self, column: str) -> list[str]:
        """Return the user of each row; `column` holds the users' names or numbers.

        Raise AuditError, with the row, if a value is neither text nor a whole number.
        """
        values = self.column(column)
        for row, value in enumerate(values):
            if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
                got = describe_cell_value_type(value)
                raise self._make_cell_error(row, column, "a name or a whole number", got)
        return list(map(str, values))

    def _has_one_column(self, flag: str, column: str, needed: bool) -> bool:
        """Return whether the table has the column that the user named with `flag`.

        Raise AuditError if the column occurs twice, or if it is needed and missing.
        """
        if column not in self.columns and not needed:
            return False
        if self.columns.count(column) != 1:
            raise AuditError(
                f"{self.label}: expected one column {flag} {column!r}, got "
                f"{describe_table_columns(self.columns)}"
            )
        return True


def read_data_table(flag: str, name: str, *more: str) -> DataTable:
    """Read the columns of records, and the columns `more`; see `read_record_table`."""
    return DataTable(**vars(read_record_table(flag, name, (*COLUMNS, *more))))


def describe_table_columns(columns: Sequence[str]) -> str:
    """List column names for an error message.

    A file may lack its header. Its first row, which may be private, is then taken for column names.
    So names are listed only if at least one is a common name such as `text`; otherwise they are
    only counted.
    """
    if not columns:
        return "no columns"
    header = any(name.strip().lower() in _USUAL for name in columns)
    names = []
    for name in columns:
        if name != name.strip() and name.strip().lower() in _USUAL:
            names.append(f"{name!r} with its spaces")
        elif header and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", name):
            names.append(name)
    names = names[:20]
    hidden = len(columns) - len(names)
    words = [", ".join(names)] if names else []
    if hidden:
        words.append(
            f"{format_count(hidden, 'column')} not shown, as a name may be private text (in CSV: "
            "is the header row missing, or the separator no comma?)"
        )
    return " and ".join(words)


def _parse_repeat_count(value: Any) -> int:
    """Return a whole number, or 0 for any other value. pandas writes 2.0 in a column with gaps."""
    if isinstance(value, str):  # CSV contains only text
        match = re.fullmatch(r"([0-9]{1,15})(\.0)?", value)
        return int(match[1]) if match else 0
    if isinstance(value, float):
        return int(value) if value.is_integer() else 0
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _parse_labels(labels: Sequence[Any]) -> Sequence[Any]:
    """Return labels 1 and 0 as true and false, like TRL's KTO, and other labels unchanged."""
    truth: dict[Any, Any] = {
        1: True,
        0: False,
        "1": True,
        "0": False,
        None: None,
        "": None,
    }
    try:
        return [truth[label] for label in labels]
    except (KeyError, TypeError):  # another or an unhashable value
        return labels


def join_nested_kinds(first: ColumnKinds, others: ColumnKinds) -> ColumnKinds:
    """Merge the Arrow types that two parts of a table have for each column.

    Keys of objects in `first` come first. If a column's type is None in either part, its merged
    type is None.
    """
    import pyarrow

    joined = {**first, **others}
    for name in first.keys() & others.keys():
        if first[name] is None or others[name] is None:
            joined[name] = None
            continue
        schemas = [pyarrow.schema({name: first[name]}), pyarrow.schema({name: others[name]})]
        try:
            joined[name] = (
                pyarrow.unify_schemas(schemas, promote_options="permissive").field(name).type
            )
        except pyarrow.ArrowException:
            joined[name] = None
    return joined


def _parse_filled_row(
    layout: Sequence[str], row: dict[str, Any], kinds: ColumnKinds
) -> tuple[Conversation, ...] | None:
    """Parse a row as it would be read from an Arrow table; None if it is then unusable.

    Return its conversations: two for a preference row, otherwise one. In an Arrow table, each
    object has all keys of its column, with null for missing ones. kinds: the Arrow types of the
    columns.
    """
    filled = {}
    for name, value in row.items():
        filled[name] = conversation_rows.fill_arrow_nulls(value, kinds.get(name))
    try:
        return conversation_rows.parse_conversations(layout, filled, keep_nulls=True)
    except UnusableConversation:
        return None


def _parse_personal_data_marks(value: Any) -> Iterator[Mark]:
    """Yield the marks of personal data in a row; value: the row's cell in the column `pii`.

    Raise ValueError, without private text, if the value does not map kinds to texts.
    """
    if value is None or value is ABSENT or value == "":
        return
    if isinstance(value, str):  # CSV contains only text
        try:
            value = parse_strict_json(value)
        except (ValueError, RecursionError):
            raise ValueError("text that is no JSON, or has a key twice") from None
    if not isinstance(value, dict):
        raise ValueError("no object")
    for kind, marked_texts in value.items():
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise ValueError(
                "a kind that is no word in small letters, digits and hyphens (at most 32)"
            )
        if marked_texts is None:  # Parquet writes null in rows without marks
            continue
        listed = [marked_texts]
        if isinstance(marked_texts, list):
            listed = marked_texts
        for text in listed:
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"something else than text for {kind}")
            yield kind, text.strip()


def _format_table_cell(value: Any) -> str:
    """Return all text of a cell; the messages of a conversation are joined."""
    if isinstance(value, dict | list):
        return "\n".join(
            map(_format_table_cell, value.values() if isinstance(value, dict) else value)
        )
    return value if isinstance(value, str) else ""

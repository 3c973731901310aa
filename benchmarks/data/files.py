"""The user's own private text: JSONL, CSV, Parquet or a Hugging Face data set, as secrets to
extract.

Says who is attacked and how often each record was trained on. Errors and notes name rows and
columns, never what is in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from auditor.benchmarks.data import chat, columns, cutting
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import UnusableConversation
from auditor.benchmarks.data.cut_places import TextLengths, check_prefix_and_suffix_lengths
from auditor.benchmarks.data.cutting import Cutting
from auditor.benchmarks.data.data_records import DataRecord, RecordSource, group_unusable_parts
from auditor.benchmarks.data.large_tables import (
    LARGE,
    SamplingOrder,
    TableCounting,
    UnreadRows,
    read_sample_of_large_table,
)
from auditor.benchmarks.data.length_matching import match_nonmembers_by_length
from auditor.benchmarks.data.member_copies import leave_out_copies_of_members
from auditor.benchmarks.data.occurrences import (
    count_text_occurrences,
    is_occurrence_end_inside_word,
)
from auditor.benchmarks.data.splitting import (
    ALSO_MEMBER,
    SEVERAL,
    SplitOptions,
    plural,
    row_numbers_phrase,
    split_data_records_into_secrets,
)
from auditor.benchmarks.data.tables import (
    RecordTable,
    read_record_table,
    require_nonempty_record_table,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, Tokens
from auditor.models.trained_length import TrainedLength
from auditor.plugins.benchmark import Benchmark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FROM_COLUMN = "come from the repeats column"
_FROM_TEXTS = "are how many of its rows have the same text"
_FROM_CONVERSATIONS = "are how many of its rows hold the same conversation"
_FROM_ROWS = "are how often prefix and suffix stand, one behind the other, anywhere in its rows"


class Files(Benchmark):
    """Your own text or conversations: JSONL, CSV or Parquet with prefix+suffix, text or messages,
    or a HF data set."""

    name = "files"

    def __init__(
        self,
        data: str,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        prefix_length: int | None = None,
        suffix_length: int | None = None,
        knows: str | None = None,
        turns: str | None = None,
        windows: int | None = None,
        known: str | None = None,
        known_fraction: float = 0.2,
        nonmembers: str | None = None,
        forget: str | None = None,
        limit: int | None = None,
        seed: int = 0,
        group_column: str | None = None,
        user_column: str | None = None,
        form: ChatRendering | None = None,
        trained: TrainedLength | None = None,
        room: int | None = None,
        counting: TableCounting | None = None,
    ):
        """Reads and cuts everything at once. Raises AuditError for whatever a user can mend, in one
        sentence.

        Each text of a `text` column is cut by its own length, a long one all along (`TextLengths`);
        with `prefix_length` or `suffix_length`, 50 where only the other is given, at its start, or
        with `windows` a stride of so many tokens apart; `prefix` and `suffix` columns are kept
        whole. Of a conversation, each assistant turn (or each of another of whom `turns` says) is a
        suffix, behind what an attacker `knows` of what came before: all of it, or its last
        `prefix_length` tokens. Of a row, tokens beyond the `trained` ones are left out, and what
        takes more than `room` tokens. `group_column` and `user_column` are read of `data`, and of
        `nonmembers` where they have them; the values of the first are shown in reports, those of
        the second under other names. `counting` has the rows of a large table counted, by workers
        for example; None: in this process.
        """
        check_prefix_and_suffix_lengths(prefix_length, suffix_length)
        lengths = TextLengths(prefix_length, suffix_length, windows)
        split = SplitOptions(known_fraction, limit, seed)
        self.tokenizer = cutting.require_fast_tokenizer_for_cutting(tokenizer)
        named = (group_column, user_column)
        counting = counting or TableCounting()
        self.counted_tables = counting.counted
        reader = TableReader(split, counting, named, forget)
        table, unread = reader.read("--data", data)
        shared = cutting.shared_beginnings_of_texts(self.tokenizer, table)
        self._kinds = _nested_kinds_of_all_rows(table, unread)
        cut = Cutting(
            self.tokenizer, lengths, knows, form, turns, shared, self._kinds, trained, room
        )
        used = [name for name in named if name is not None]
        self.unread_columns = columns.unread_text_columns(
            table, columns.detect_column_layout(table), used
        )
        members = _table_as_record_source("--data", table, cut, *named, unread=unread)
        read = partial(_read_file_as_record_source, reader=reader, cut=cut, members=members.unread)
        asked = (("--known", known), ("--nonmembers", nonmembers), ("--forget", forget))
        sources = {flag: read(flag, name) for flag, name in asked if name is not None}
        for source in sources.values():
            if (source.form is None) != (members.form is None):
                raise AuditError(
                    f"expected conversations in both or neither of {members.where} and "
                    f"{source.where}"
                )
        if nonmembers is not None:
            others = leave_out_copies_of_members(sources["--nonmembers"], members)
            if columns.detect_column_layout(table) == ("text",) and not lengths.are_given:
                others, self.doubts = match_nonmembers_by_length(others, members, split)
            sources["--nonmembers"] = others
        parts = split_data_records_into_secrets({"--data": members, **sources}, split, "row")
        parts.give_to(self)
        self.description = (
            f"{Path(data).name if Path(data).exists() else data}: {parts.counts_by_role_text()}"
        )
        self.form = members.form
        self.framed = self.form is not None and self.form.source is not None
        if (
            self.form is not None
        ):  # of a conversation, what is answered: the rest need not have been learnt
            self.heldout_given = tuple(
                len(secret.prefix) for secret in self.secrets if not secret.member
            )
        else:
            self.heldout_given = _given_tokens_of_heldout_parts(self.secrets)
        large = (members, sources.get("--nonmembers"), sources.get("--forget"))
        whole_reads = _notes_on_large_tables_read_whole(large, limit)
        self.notes = (cutting.data_tokenisation_note(self.tokenizer), *parts.notes, *whole_reads)
        self._given = {True: ("--data", data), False: ("--nonmembers", nonmembers)}

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Every row as a whole, read anew: nothing of it is kept in memory for whoever may ask."""
        flag, name = self._given[members]
        if name is None:
            return
        table = read_record_table(flag, name, columns.COLUMNS)
        layout, repeats = columns.detect_column_layout(table), columns.row_repeat_counts(table)
        if self.form is not None:
            for row, said in columns.parse_row_conversations(table, layout, kinds=self._kinds):
                with suppress(
                    UnusableConversation
                ):  # nobody is attacked in such a row either, and the notes say so
                    if not isinstance(said, UnusableConversation):
                        yield chat.render_chat(self.tokenizer, said, self.form).tokens, repeats[row]
            return
        encoded = cutting.encode_data_texts_with_offsets(
            self.tokenizer, columns.joined_layout_texts(table, layout)
        )
        yield from ((tuple(ids), times) for (ids, _), times in zip(encoded, repeats, strict=True))


@dataclass(frozen=True)
class TableReader:
    """Reads the files of a plan: whole, or of a large one a sample.

    named: the columns of groups and of users; forget: the file of records to forget, which a sample
    of --data has to hold.
    """

    split: SplitOptions
    counting: TableCounting
    named: tuple[str | None, str | None] = (None, None)
    forget: str | None = None

    def read(self, flag: str, name: str) -> tuple[RecordTable, UnreadRows | None]:
        """Return the rows of a file, or a sample of a large one and what is known of the others."""
        group_column, user_column = self.named_columns(flag)
        wanted = (*columns.COLUMNS, *filter(None, self.named_columns(flag)))
        if self.split.limit is not None and flag in ("--data", "--nonmembers"):
            order = SamplingOrder(
                self.split.limit,
                partial(self.split.draw_order, f"rows of a large {flag}"),
                flag == "--data",
                self._required_rows(flag, name),
                group_column,
                user_column,
            )
            sample = read_sample_of_large_table(
                f"{flag} {name!r}", Path(name), wanted, order, self.counting
            )
            if sample is not None:
                return sample
        return require_nonempty_record_table(read_record_table(flag, name, wanted)), None

    def named_columns(self, flag: str) -> tuple[str | None, str | None]:
        """Return the columns of groups and of users that are read of this file."""
        return self.named if flag in ("--data", "--nonmembers") else (None, None)

    def _required_rows(self, flag: str, name: str) -> RecordTable | None:
        if flag != "--data" or self.forget is None or f"{flag} {name!r}" in self.counting.counted:
            return None
        return read_record_table("--forget", self.forget, columns.COLUMNS)


def _nested_kinds_of_all_rows(table: RecordTable, unread: UnreadRows | None) -> columns.ColumnKinds:
    own = columns.infer_nested_kinds(table)
    if unread is not None:
        own = columns.join_nested_kinds(unread.kinds, own)
    return columns.known_kinds(own)


def _read_file_as_record_source(
    flag: str, name: str, *, reader: TableReader, cut: Cutting, members: UnreadRows | None
) -> RecordSource:
    table, unread = reader.read(flag, name)
    if unread is not None and cut.kinds is not None:
        kinds = columns.join_nested_kinds(cut.kinds, unread.kinds)
        cut = replace(cut, kinds=columns.known_kinds(kinds))
    named = reader.named_columns(flag)
    return _table_as_record_source(flag, table, cut, *named, unread=unread, members=members)


def _table_as_record_source(
    flag: str,
    table: RecordTable,
    cut: Cutting,
    group_column: str | None = None,
    user_column: str | None = None,
    *,
    unread: UnreadRows | None = None,
    members: UnreadRows | None = None,
) -> RecordSource:
    """Return the rows of one table as records. Rows that cannot be cut are listed by reason.

    unread: what is known of the other rows, if the table is a sample. members: of a large table of
    members, of which no non-member may be a row.
    """
    layout = columns.detect_column_layout(table)
    form = (
        None
        if layout in columns.PLAIN
        else cut.form or cutting.usual_chat_rendering_of_table(cut.tokenizer, table)
    )
    remarks = Counter[str]()
    parts, how, texts = cutting.cut_rows_into_parts(table, replace(cut, form=form), remarks)
    if flag == "--data":  # nobody asks how often known pairs and non-members occur
        repeats = columns.row_repeat_counts(table) if unread is None else list(unread.copies)
        of_rows = _FROM_TEXTS if form is None else _FROM_CONVERSATIONS
        counted = _FROM_ROWS if unread is None else of_rows
        how += f"; repeat counts {_FROM_COLUMN if columns.REPEATS in table.columns else counted}"
    else:
        repeats = [1] * table.rows
    groups = columns.row_group_values(table, group_column, needed=flag == "--data")
    users = columns.optional_row_users(table, user_column, needed=flag == "--data")
    if unread is not None:
        groups = [SEVERAL if i in unread.of_several_groups else g for i, g in enumerate(groups)]
        users = [None if i in unread.of_several_users else user for i, user in enumerate(users)]
    is_member = [False] * table.rows
    if flag == "--nonmembers" and members is not None:
        is_member = members.contains_rows_of(table, layout)
    records: list[DataRecord] = []
    standing: list[str] = []
    unusable: list[tuple[int, str]] = []  # the row of each part that cannot be used, and why
    row_tokens = Counter[int]()
    for one in parts:
        row_tokens[one.row] += one.tokens
        if isinstance(one.halves, str):
            unusable.append((one.row, one.halves))
        elif is_member[one.row]:
            unusable.append((one.row, ALSO_MEMBER))
        else:
            prefix, suffix, wording = one.halves
            group = groups[one.row] or one.group
            record = DataRecord(
                one.row, prefix, suffix, repeats[one.row], group, wording, one.part, one.at
            )
            records.append(replace(record, user=users[one.row], n_shared=one.n_shared))
            standing.append(one.stands or wording.prefix_and_suffix_text)
    # `texts` and `remarks` are whole from here on: reading the parts filled them.
    if flag == "--data" and columns.REPEATS not in table.columns and unread is None:
        records = _data_records_with_copy_counts(records, standing, texts)
    if columns.PII in table.columns:
        records = _data_records_with_personal_data_marks(records, table)
    left_out, parts_left_out = group_unusable_parts(unusable, records)
    part_noun, row_noun = ("part", "text") if form is None else ("answer", "conversation")
    dropped = (
        f"left out {plural(len(rows), part_noun)}: {why} ({row_numbers_phrase(sorted(set(rows)))})"
        for why, rows in parts_left_out
    )
    notes = (
        how,
        *dropped,
        *(f"{why} ({plural(count, row_noun)})" for why, count in remarks.items()),
    )
    notes_of_file = tuple(f"{table.where}: {note}" for note in notes)
    source = RecordSource(
        table.where,
        tuple(records),
        left_out,
        notes_of_file,
        form,
        parts_left_out,
        row_tokens,
        texts if flag == "--data" else (),
    )
    return source if unread is None else _with_row_numbers_of_table(source, unread)


def _with_row_numbers_of_table(source: RecordSource, unread: UnreadRows) -> RecordSource:
    """Return the source with each row by its number in the whole table, and a note on what was not
    read."""

    def renumber(
        reasons: Sequence[tuple[str, tuple[int, ...]]],
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((why, tuple(unread.rows[row] for row in rows)) for why, rows in reasons)

    n_distinct = unread.n_distinct + len(unread.rows)
    noun = "text" if source.form is None else "conversation"
    note = (
        f"{source.where}: {unread.n_rows:,} rows were counted by their {noun}; a sample of "
        f"{len(unread.rows):,} of the {n_distinct:,} distinct {noun}s was tokenised, since --limit "
        "attacks fewer"
    )
    return replace(
        source,
        records=tuple(replace(record, row=unread.rows[record.row]) for record in source.records),
        left_out=renumber(source.left_out),
        parts_left_out=renumber(source.parts_left_out),
        row_tokens={unread.rows[row]: n for row, n in source.row_tokens.items()},
        notes=(*source.notes, note),
        unread=unread,
    )


def _notes_on_large_tables_read_whole(
    sources: Sequence[RecordSource | None], limit: int | None
) -> tuple[str, ...]:
    """Return a note on each large table of which --limit wants few rows and all were tokenised."""
    return tuple(
        f"{source.where}: all {len(source.row_tokens):,} rows were read into memory and tokenised, "
        f"though --limit asks for {limit:,}: only --data and --nonmembers in one JSONL, CSV or "
        "Parquet file are sampled, and only if far more rows than the limit are in it"
        for source in sources
        if source is not None
        and source.unread is None
        and limit is not None
        and len(source.row_tokens) > LARGE
    )


def _given_tokens_of_heldout_parts(secrets: Sequence[Secret]) -> tuple[int, ...]:
    """Return how many first tokens of each non-member are not scored: () if each is one text, as
    everywhere else.

    The prefix of a later window was scored in the one before.
    """
    others = [secret for secret in secrets if not secret.member]
    if all(secret.document is None for secret in others):
        return ()
    later = [
        one.document is not None and one.document == before.document
        for before, one in pairwise(others)
    ]
    return tuple(
        len(one.prefix) if is_later else 1
        for one, is_later in zip(others, [False, *later], strict=True)
    )


def _data_records_with_copy_counts(
    records: Sequence[DataRecord], standing: Sequence[str], texts: Sequence[str]
) -> list[DataRecord]:
    """The records with how often each stands in the texts, letter for letter, its suffix right
    behind its prefix.

    Of rows that say the same the first has all of it: where they are merged their counts add up.
    """
    pairs = list(zip(records, standing, strict=True))
    # A suffix that was itself cut inside a word stands inside words.
    cut = {
        text
        for one, text in pairs
        if (w := one.wording) and is_occurrence_end_inside_word(w.suffix, w.after[:1])
    }
    found = count_text_occurrences({text: text not in cut for text in standing}, texts)
    return [replace(record, repeats=found.pop(text, 0)) for record, text in pairs]


def _data_records_with_personal_data_marks(
    records: Sequence[DataRecord], table: RecordTable
) -> list[DataRecord]:
    """The records with what the rows mark in them. Raises AuditError for marks that are none of
    their row."""
    found = columns.row_personal_data_marks(table)
    return [
        replace(record, wording=replace(record.wording, marks=found[record.row]))
        if record.wording
        else record
        for record in records
    ]

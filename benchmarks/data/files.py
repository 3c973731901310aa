"""Read private text from JSONL, CSV, Parquet or a Hugging Face data set.

Rows are read as secrets to extract: the module selects the attacked records and counts their copies
in training. For training, canaries or text checks, rows are read as whole texts or conversations; a
mitigation that drops records also writes the rows that it keeps. Errors and notes name rows and
columns, never their content.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from auditor.benchmarks.data import chat, columns, cutting
from auditor.benchmarks.data.changed_tables import WRITERS, ChangedRow
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.columns import (
    REPEATS,
    DataTable,
    UnreadRows,
    describe_table_columns,
    read_data_table,
)
from auditor.benchmarks.data.conversation_rows import (
    Conversation,
    UnusableConversation,
    get_message_text,
)
from auditor.benchmarks.data.cut_places import TextLengths
from auditor.benchmarks.data.cutting import Cutting
from auditor.benchmarks.data.data_records import (
    DataRecord,
    DataRecordTable,
    RecordSource,
    build_data_record_table,
)
from auditor.benchmarks.data.large_tables import (
    LARGE,
    LargeTableTexts,
    SamplingOrder,
    TableCounting,
    is_large_text_table,
    sample_large_table,
)
from auditor.benchmarks.data.nonmember_baseline import (
    drop_member_copies,
    match_nonmember_lengths,
)
from auditor.benchmarks.data.splitting import (
    ALSO_MEMBER,
    SEVERAL,
    SplitOptions,
    list_data_files,
    split_records_into_benchmark,
)
from auditor.benchmarks.data.words import (
    count_text_occurrences,
    is_occurrence_end_inside_word,
)
from auditor.core import disk
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.nouns import Mark, Secret, Tokens
from auditor.core.plan_parts import DataPlan
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.trained_length import TrainedLength
from auditor.plugins.benchmark import Benchmark
from auditor.training.variants import DataVariant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FROM_COLUMN = "come from the repeats column"
_FROM_TEXTS = "are how many of its rows have the same text"
_FROM_CONVERSATIONS = "are how many of its rows contain the same conversation"
_FROM_ROWS = "are the number of times that the prefix followed by the suffix occurs in its rows"
_MOST_COPIES = 10_000_000  # records of a training, in memory together


class Files(Benchmark):
    """Your own text or conversations: JSONL, CSV or Parquet with prefix+suffix, text or messages,
    or a HF data set."""

    name = "files"

    def __init__(
        self,
        reader: TableReader,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        form: ChatRendering | None = None,
        trained: TrainedLength | None = None,
        room: int | None = None,
    ):
        """Read all data, and cut each row into a prefix and a suffix.

        - A row with `prefix` and `suffix` columns is used as it is.
        - A text in a `text` column is cut according to its length, a long text at several positions
          (`TextLengths`). If the plan gives one length, prefix or suffix, the other is 50 tokens.
          Each text is then cut once at its start, or every `windows` tokens.
        - In a conversation, each turn of the assistant (or of the speaker in `turns`) is a suffix.
          Its prefix is the text that an attacker `knows`: all text before the turn, or the last
          `prefix_length` tokens of that text.

        `group_column` and `user_column` are read from `--data`, and from `--nonmembers` if present.
        Reports show the groups, and pseudonyms of users.

        Args:
            reader: reads the plan's files.
            tokenizer: the model's tokenizer; it must map tokens to characters.
            form: the rendering of conversations (None: the usual rendering).
            trained: the tokens of a row that were trained on (None: all); others are omitted.
            room: largest number of tokens in a record (None: no limit); longer records are omitted.

        Raises:
            AuditError: with one sentence, for any mistake of the user.
        """
        plan = reader.plan
        split = reader.split
        lengths = TextLengths(plan.prefix_length, plan.suffix_length, plan.windows)
        self.tokenizer = cutting.require_fast_tokenizer(tokenizer)
        self.counted_tables = reader.counting.counted
        self._files = list_data_files(plan)
        data = self._files["--data"]
        table = reader.read("--data", data)
        shared = cutting.measure_shared_beginnings(self.tokenizer, table)
        self._kinds = table.infer_nested_kinds()
        cut = Cutting(
            *(self.tokenizer, lengths, plan.knows, form, plan.turns),
            *(shared, self._kinds, trained, room),
        )
        user_columns = list(reader.named_columns("--data").values())
        self.unread_columns = table.list_unread_text_columns(user_columns)
        members = _build_record_source("--data", table, cut, reader)
        has_answers = table.layout != columns.PLAIN[0]
        del table  # the split needs no texts
        sources = _read_other_sources(members, self._files, cut, reader)
        if "--nonmembers" in sources:
            nonmember_source = drop_member_copies(sources["--nonmembers"], members, has_answers)
            if not lengths.are_given:
                nonmember_source, self.doubts = match_nonmember_lengths(
                    nonmember_source, members, split
                )
            sources["--nonmembers"] = nonmember_source
        members = sources["--data"] = replace(members, texts=())
        counts = split_records_into_benchmark(self, sources, split, "row")
        self.description = f"{Path(data).name if Path(data).exists() else data}: {counts}"
        self.form = members.form
        self.framed = self.form is not None and self.form.source is not None
        self.heldout_given = _count_heldout_context(self.secrets, self.form is not None)
        large = (members, sources.get("--nonmembers"), sources.get("--forget"))
        whole_reads = _list_large_table_notes(large, plan.limit)
        self.notes = (cutting.describe_tokenisation(self.tokenizer), *self.notes, *whole_reads)

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Yield every complete row with its repeat count, reading the rows again to save memory."""
        flag = "--data" if members else "--nonmembers"
        if flag not in self._files:
            return
        table = read_data_table(flag, self._files[flag])
        repeats = table.list_repeat_counts()
        if self.form is not None:
            for row, conversation in table.parse_conversations(kinds=self._kinds):
                with suppress(
                    UnusableConversation
                ):  # such a row is not attacked either, and the notes report it
                    if not isinstance(conversation, UnusableConversation):
                        yield (
                            chat.render_chat(self.tokenizer, conversation, self.form).tokens,
                            repeats[row],
                        )
            return
        encoded = cutting.encode_data_texts(self.tokenizer, table.list_texts(may_be_null=True))
        for (ids, _), times in zip(encoded, repeats, strict=True):
            yield tuple(ids), times


@dataclass(frozen=True)
class TableReader:
    """Read a plan's files: all rows of a file, or a sample if the file is large.

    seed: seed of the run.
    counting: counts the rows of large tables, for example on workers.
    """

    plan: DataPlan
    seed: int = 0
    counting: TableCounting = field(default_factory=TableCounting)

    @cached_property
    def split(self) -> SplitOptions:
        """The options for dividing members; raise AuditError if a value is invalid."""
        return SplitOptions(self.plan.known_fraction, self.plan.limit, self.seed)

    def read(self, flag: str, name: str) -> DataTable:
        """Return a file's rows; for a large file, a sample with statistics of the rest.

        flag: the option that names the file, such as `--data`.
        """
        named = self.named_columns(flag)
        if self.split.limit is not None and flag in ("--data", "--nonmembers"):
            order = SamplingOrder(
                self.split.limit,
                partial(self.split.draw_order, f"rows of a large {flag}"),
                flag == "--data",
                self._required_rows(flag, name),
                **named,
            )
            names = (*columns.COLUMNS, *named.values())
            sample = sample_large_table(f"{flag} {name!r}", Path(name), names, order, self.counting)
            if sample is not None:
                return sample
        return read_data_table(flag, name, *named.values())

    def named_columns(self, flag: str) -> dict[str, str]:
        """Return the names of the group and user columns in the file of the option `flag`."""
        names = {"group_column": self.plan.group_column, "user_column": self.plan.user_column}
        if flag not in ("--data", "--nonmembers"):
            return {}
        return {field: name for field, name in names.items() if name is not None}

    def _required_rows(self, flag: str, name: str) -> DataTable | None:
        forget = self.plan.forget
        if flag != "--data" or forget is None or f"{flag} {name!r}" in self.counting.counted:
            return None
        return read_data_table("--forget", forget)


def _read_other_sources(
    members: RecordSource, files: Mapping[str, str], cut: Cutting, reader: TableReader
) -> dict[str, RecordSource]:
    """Return the members, and the records of the other files, by flag.

    Raise AuditError if only some files hold conversations.
    """
    sources = {"--data": members}
    for flag, name in files.items():
        if flag == "--data":
            continue
        source = _build_record_source(flag, reader.read(flag, name), cut, reader, members.unread)
        if (source.form is None) != (members.form is None):
            raise AuditError(
                f"expected conversations in both or neither of {members.label} and {source.label}"
            )
        sources[flag] = source
    return sources


def _build_record_source(
    flag: str,
    table: DataTable,
    cut: Cutting,
    reader: TableReader,
    members: UnreadRows | None = None,
) -> RecordSource:
    """Return the rows of a table as records, and the rows that cannot be cut, keyed by reason.

    flag: the option that names the table. cut: how to cut rows. members: statistics of a large
    table of members; a non-member that also occurs in it is unusable.
    """
    form = None
    if table.has_conversations:
        form = cut.form or cutting.choose_table_rendering(cut.tokenizer, table)
    parts, counts = cutting.cut_rows_into_parts(table, replace(cut, form=form))
    rule = counts.rule
    repeats = [1] * table.rows
    if flag == "--data":  # copies of known pairs and non-members are not used
        repeats = table.list_repeat_counts()
        rule += f"; repeat counts {_describe_repeats(table)}"
    groups, users = _read_groups_users(flag, table, reader)
    is_member = [False] * table.rows
    if flag == "--nonmembers" and members is not None:
        is_member = np.isin(table.hash_rows(), members.row_hashes).tolist()
    marks = table.list_personal_data_marks()
    unusable: list[tuple[int, str]] = []  # the row of each unusable part, and the reason

    def list_usable_records() -> Iterator[DataRecord]:
        for row, part in parts:
            if isinstance(part, str):
                unusable.append((row, part))
            elif is_member[row]:
                unusable.append((row, ALSO_MEMBER))
            else:
                group = groups[row] or part.group
                record = replace(part, repeats=repeats[row], group=group, user=users[row])
                yield _add_personal_data_marks(record, marks[row])

    records = build_data_record_table(list_usable_records())
    # `counts` is complete now.
    counts_occurrences = flag == "--data" and REPEATS not in table.columns and table.unread is None
    if counts_occurrences:
        records = _set_copy_counts(records, counts.texts)
    part_noun, row_noun = ("part", "text") if form is None else ("answer", "conversation")
    notes = [*table.list_unread_notes(), f"{table.label}: {rule}"]
    for why, count in counts.remarks.items():
        notes.append(f"{table.label}: {why} ({format_count(count, row_noun)})")
    texts: Iterable[str] = ()
    if flag == "--data":
        texts = counts.texts
        if table.unread is not None and form is None:
            texts = LargeTableTexts(table.label, Path(reader.plan.data or ""), table.layout)
    source = RecordSource(
        *(table.label, records, tuple(unusable), tuple(notes)),
        *(part_noun, form, counts.row_tokens, texts),
        counts_occurrences=counts_occurrences,
        unread_parts=table.unread_parts,
    )
    if table.unread is None:
        return source
    return _restore_row_numbers(source, table.unread)


def _read_groups_users(
    flag: str, table: DataTable, reader: TableReader
) -> tuple[list[str | None], list[str | None]]:
    """Return the group and the user of each row. A user is None if copies differ in user."""
    named = reader.named_columns(flag)
    needed = flag == "--data"
    groups = list(table.list_groups(named.get("group_column"), needed))
    users = list(table.list_users(named.get("user_column"), needed))
    if table.unread is not None:
        for i in table.unread.of_several_groups:
            groups[i] = SEVERAL
        for i in table.unread.of_several_users:
            users[i] = None
    return groups, users


def _describe_repeats(table: DataTable) -> str:
    """Return a phrase on the origin of the copies of each row."""
    if REPEATS in table.columns:
        return _FROM_COLUMN
    if table.unread is None:
        return _FROM_ROWS
    return _FROM_CONVERSATIONS if table.has_conversations else _FROM_TEXTS


def _restore_row_numbers(source: RecordSource, unread: UnreadRows) -> RecordSource:
    """Return the records of a sample with the row numbers of the complete table.

    A note about the unread rows is added.
    """
    n_distinct = unread.n_distinct + len(unread.rows)
    noun = "text" if source.form is None else "conversation"
    note = (
        f"{source.label}: {unread.n_rows:,} rows were counted by their {noun}; a sample of "
        f"{len(unread.rows):,} of the {n_distinct:,} distinct {noun}s was tokenised, since --limit "
        "attacks fewer"
    )
    notes = [note]
    for reason, n in unread.left_out.items():
        notes.append(f"{source.label}: left out {format_count(n, 'row')}: {reason}")
    records = source.table
    rows = np.array(unread.rows, np.int32)[records.rows]
    return replace(
        source,
        records=replace(records, numbers={**records.numbers, "row": rows}),
        unusable=tuple((unread.rows[row], reason) for row, reason in source.unusable),
        row_tokens={unread.rows[row]: n for row, n in source.row_tokens.items()},
        notes=(*source.notes, *notes),
        unread=unread,
    )


def _list_large_table_notes(
    sources: Sequence[RecordSource | None], limit: int | None
) -> tuple[str, ...]:
    """Return a note about each large table that was read whole although --limit needs few rows."""
    notes = []
    for source in filter(None, sources):
        if source.unread is None and limit is not None and len(source.row_tokens) > LARGE:
            notes.append(
                f"{source.label}: all {len(source.row_tokens):,} rows were read into memory and "
                f"tokenised, though --limit asks for {limit:,}: only --data and --nonmembers in "
                "one JSONL, CSV or Parquet file are sampled, and only if far more rows than the "
                "limit are in it"
            )
    return tuple(notes)


def _count_heldout_context(secrets: Sequence[Secret], has_answers: bool) -> tuple[int, ...]:
    """Count the leading tokens of each non-member that are not scored.

    The prefix of a later window is not scored, because the previous window already scored these
    tokens. Return () if no non-member is one of several windows. has_answers: whether only answers
    of conversations are scored; the rest may have had no loss.
    """
    if has_answers:
        return tuple(len(secret.prefix) for secret in secrets if not secret.member)
    counts = []
    documents = set()
    before = None
    for secret in secrets:
        if not secret.member:
            is_later = secret.document is not None and secret.document == before
            counts.append(len(secret.prefix) if is_later else 1)
            documents.add(secret.document)
            before = secret.document
    return () if documents <= {None} else tuple(counts)


def _set_copy_counts(records: DataRecordTable, texts: Sequence[str]) -> DataRecordTable:
    """Set the repeats of each record: how often `texts` contain its compared text.

    If several records are equal, the first gets all occurrences and the others get 0, because a
    later merge adds up the numbers.
    """
    searched: dict[str, bool] = {}
    texts_of_several = set()
    for record in records:
        wording = record.wording
        assert wording is not None  # every text has one
        text = record.compared_text
        if text in searched:
            texts_of_several.add(text)
        # a suffix that ends inside a word also occurs inside words
        is_inside = is_occurrence_end_inside_word(wording.suffix, wording.after[:1])
        searched[text] = searched.get(text, True) and not is_inside
    n_by_text = count_text_occurrences(searched, texts)
    del searched
    counted_before = set()
    repeats = array("q")
    for record in records:
        text = record.compared_text
        n_repeats = n_by_text[text]
        if text in texts_of_several:
            key = (record.digest, text)
            if key in counted_before:
                n_repeats = 0
            counted_before.add(key)
        repeats.append(n_repeats)
    return records.replace_columns(repeats=np.array(repeats, np.int64))


def _add_personal_data_marks(record: DataRecord, marks: Sequence[Mark]) -> DataRecord:
    """Return the record with the personal data that the table marks in its row."""
    if not marks:
        return record
    assert record.wording is not None
    return replace(record, wording=replace(record.wording, marks=tuple(marks)))


def read_training_rows(
    name: str, text_column: str | None = None, *more: str
) -> tuple[DataTable, Sequence[str] | Sequence[Conversation]]:
    """Return a table, and the text or conversation of every row once, ignoring `repeats`.

    Prefix and suffix columns are joined. more: further columns that the table must have. Raise
    AuditError for an unusable file or column.
    """
    named = (*filter(None, [text_column]), *more)
    table = read_data_table("--data", name, *named)
    for column in named:
        if (times := table.columns.count(column)) != 1:
            got = times or describe_table_columns(table.columns)
            raise AuditError(f"{table.label}: expected one column {column!r}, got {got}")
    if text_column is not None:
        table = replace(table, given_layout=(text_column,))
    if table.has_conversations:
        contents: Sequence[str] | Sequence[Conversation] = _require_row_conversations(table)
    else:
        contents = table.list_texts()
    for row, text in enumerate(contents):
        if not text:
            raise AuditError(f"{table.describe_row(row)}: expected text, got an empty one")
    return table, contents


def read_unit_texts(
    name: str, text_column: str | None = None, unit_column: str | None = None
) -> tuple[Sequence[str | Conversation], list[str] | None]:
    """Return every row's text or conversation, and each row's person.

    Both repeat a row as often as its repeat count says. The people are None if no `unit_column` is
    given. Raise AuditError for an unusable file or column.
    """
    table, contents = read_training_rows(name, text_column, *filter(None, [unit_column]))
    rows = repeat_rows(table)
    texts = [contents[row] for row in rows]
    if unit_column is None:
        return texts, None
    units = table.list_user_names(unit_column)
    return texts, [units[row] for row in rows]


def repeat_rows(table: DataTable) -> list[int]:
    """Return each row's number as many times as the row is trained on."""
    repeats = table.list_repeat_counts()
    if sum(repeats) > _MOST_COPIES:
        raise AuditError(
            f"{table.label}: expected at most {_MOST_COPIES:,} records to train on, counted by "
            f"`repeats`, got {sum(repeats):,}"
        )
    return np.repeat(range(len(repeats)), repeats).tolist()


def _require_row_conversations(table: DataTable) -> list[Conversation]:
    """Return every row's conversation.

    Raise AuditError if a row is unusable, because training needs all rows.
    """
    conversations = []
    for row, conversation in table.parse_conversations():
        place = table.describe_row(row)
        if isinstance(conversation, UnusableConversation):
            raise AuditError(f"{place}: expected a conversation to train on, got {conversation}")
        if conversation.group is not None:
            raise AuditError(
                f"{place}: expected a conversation to train on, got preferences (chosen and "
                "rejected, or a label of true or false), which a trainer of preferences learns "
                "from, as TRL's DPOTrainer and KTOTrainer"
            )
        conversations.append(conversation)
    return conversations


def sample_data_conversations(
    reader: TableReader, flag: str, name: str, count: int
) -> list[Conversation] | None:
    """Return up to `count` conversations of a file that count toward the loss.

    Return None for a file of texts or tokens. The same file always gives the same conversations.
    flag: the option that names the file. reader: the plan's reader, which samples a large table.
    """
    if is_large_text_table(f"{flag} {name!r}", Path(name)):  # too large to read for this
        return None
    table = reader.read(flag, name)
    if not table.has_conversations:
        return None
    order = make_keyed_generator("text form", table.rows).permutation(table.rows).tolist()
    usable = []
    for _, conversation in table.parse_conversations(order):
        if not isinstance(conversation, UnusableConversation) and conversation.is_learnt:
            usable.append(conversation)
        if len(usable) == count:
            break
    return usable


def format_data_row(row: str | Conversation) -> str:
    """Return the text that identifies copies of a row.

    For a conversation, this is the text of its messages.
    """
    if isinstance(row, str):
        return row
    texts = []
    for message in row.messages:
        text = get_message_text(message["content"])
        texts.append(str(message) if text is None else text)
    return "\n".join([*texts, *row.plain])


def write_kept_data(trainer: DataVariant, data: str, to: Path, text_column: str | None) -> str:
    """Write the rows that a mitigation keeps, in the same format, readable only by the owner.

    trainer: the mitigation. data: the user's file. to: the new file. The rows are unchanged except
    for `repeats`. Return a sentence about the dropped rows. Raise AuditError if no row remains.
    """
    table, contents = read_training_rows(data, text_column)
    rows = repeat_rows(table)
    texts = [format_data_row(contents[row]) for row in rows]
    kept_copies, summary = trainer.choose_records(texts)
    # The trainer keeps copies, numbered through all of them: map them back to their rows.
    counts_of_rows = Counter(rows[i] for i in kept_copies)
    if not counts_of_rows:
        raise AuditError(
            f"expected {trainer.name} to leave records to train on, got none of {len(texts):,}"
        )
    if len(kept_copies) == len(texts):
        raise AuditError(
            f"{trainer.name} leaves all {len(texts):,} records of {data!r} as they are: nothing to "
            "do"
        )

    def choose_kept(
        names: Sequence[str], read_column: Callable[[str], Sequence[Any]]
    ) -> list[ChangedRow]:
        # Without this column, every row counts once.
        counted = REPEATS in names
        counts = sorted(counts_of_rows.items())
        return [(row, {REPEATS: count} if counted else {}) for row, count in counts]

    text = WRITERS[to.suffix](f"--data {data!r}", Path(data), choose_kept)
    disk.replace_atomically(to, text)
    return summary

"""Prepared training data: rows of `input_ids` with `labels`, as TRL, axolotl and LLaMA-Factory hand them to a model.

Nothing is rendered, tokenised or put in front: what the rows hold is what the model was trained on, so a secret is a
run of labelled tokens behind all that stands before it. Knows token ids; no text, no template, no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from auditor.benchmarks import tables
from auditor.benchmarks.splitting import (
    DataRecord,
    RecordSource,
    SplitOptions,
    check_prefix_and_suffix_lengths,
    split_data_records_into_secrets,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.plugins.benchmark import Benchmark

IDS, LABELS = "input_ids", "labels"
IGNORED = -100  # of a label: no loss here, as torch's cross entropy has it
_MASKS = ("completion_mask", "assistant_masks")  # of TRL, in place of labels: 1 where there is a loss
_LENGTHS = ("seq_lengths", "seq_lens")  # of the texts that were packed into a row
_ATTENTION, _POSITIONS = "attention_mask", "position_ids"
_COLUMNS = (IDS, LABELS, *_MASKS, *_LENGTHS, _ATTENTION, _POSITIONS)
_DEFAULT = 50  # tokens of a suffix; and of a prefix, where a row is labelled from its first token on


class Tokenised(Benchmark):
    """Prepared data sets: rows of input_ids with labels, as the trainer had them; nothing is rendered."""

    name = "tokenised"
    framed = True
    as_trained = True

    def __init__(
        self,
        data: str,
        *,
        vocab_size: int,
        prefix_length: int | None = None,
        suffix_length: int | None = None,
        known: str | None = None,
        known_fraction: float = 0.2,
        nonmembers: str | None = None,
        forget: str | None = None,
        limit: int | None = None,
        seed: int = 0,
    ):
        """`known`, `nonmembers` and `forget` are such data too. Raises AuditError for what a user can mend.

        Each run of labelled tokens is a secret: its first `suffix_length` tokens (50), behind all of the text before
        it, or the last `prefix_length` tokens of that. A text that is labelled from its first token on is cut into
        `prefix_length` (50) and `suffix_length` tokens.
        """
        check_prefix_and_suffix_lengths(prefix_length, suffix_length)
        split = SplitOptions(known_fraction, limit, seed)
        named = {"--data": data, "--known": known, "--nonmembers": nonmembers, "--forget": forget}
        read = {flag: _read_tokenised_texts(flag, name, vocab_size) for flag, name in named.items() if name is not None}
        sources = {
            flag: _learnt_runs_as_record_source(f"{flag} {named[flag]!r}", texts, prefix_length, suffix_length)
            for flag, texts in read.items()
        }
        pairs, others, lost = (sources.get(flag) for flag in ("--known", "--nonmembers", "--forget"))
        parts = split_data_records_into_secrets(sources["--data"], pairs, others, split, "row", lost)
        self._texts = {True: read["--data"], False: read.get("--nonmembers", [])}
        self.secrets, self.known, self.heldout = parts.secrets, parts.known, parts.heldout
        self.asking_order = parts.asking_order
        self.heldout_given = tuple(len(secret.prefix) for secret in self.secrets if not secret.member)
        self.forgotten, self.notes = parts.forgotten, parts.notes
        self.record_counts = parts.record_counts
        self.description = f"{Path(data).name}, token ids as they were trained on: {parts.counts_by_role_text()}"

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Every text, those too that --limit leaves out."""
        yield from ((text.ids, 1) for text in self._texts[members])


def is_tokenised_data(name: str) -> bool:
    """Whether this is a local file or saved data set with a column of token ids. Raises AuditError for a broken one."""
    path, where = Path(name), f"--data {name!r}"
    if path.is_dir() and any((path / file).is_file() for file in tables.SAVED):
        with tables.open_dataset_split(where, name) as found:
            return IDS in found.column_names
    ending = path.suffix.lower() if path.is_file() else ""
    if ending == ".arrow":
        return IDS in _read_arrow_columns(where, path)
    if ending == ".parquet":
        return IDS in tables.read_record_table("--data", name, ()).columns
    if ending in (".jsonl", ".json"):
        with path.open("rb") as file:  # its first object; a line of text is no reason to read it all twice
            return f'"{IDS}"'.encode() in file.read(2**20).split(b"}", 1)[0]
    return False


def _read_arrow_columns(where: str, path: Path) -> Mapping[str, Sequence[Any]]:
    """A file of Arrow's, as a stream (which is what `datasets` writes) or with a footer."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as held:
            try:
                table = pyarrow.ipc.open_stream(held).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(held).read_all()
            return {key: table.column(key).to_pylist() for key in _COLUMNS if key in table.column_names}
    except (pyarrow.ArrowException, OSError) as error:
        raise AuditError(f"{where}: not an Arrow file that can be read ({type(error).__name__})") from None


# --- from rows to secrets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """What the model read at once: a row, or a text that was packed into one. learnt: where there was a loss."""

    row: int
    ids: Tokens
    learnt: tuple[bool, ...]
    begins: int = 0  # in the row
    packed: bool = False


def _read_tokenised_texts(flag: str, name: str, vocab_size: int) -> list[_Text]:
    """Every text of every row. Raises AuditError for rows that are none of a trainer's."""
    path, where = Path(name), f"{flag} {name!r}"
    if path.suffix.lower() == ".arrow" and path.is_file():
        columns = _read_arrow_columns(where, path)
        count = len(next(iter(columns.values()), ()))
    else:
        table = tables.read_record_table(flag, name, _COLUMNS)
        count, columns = table.rows, {key: table.column(key) for key in _COLUMNS if key in table.columns}
    if IDS not in columns:
        raise AuditError(f"{where}: expected {IDS} as in --data, got none: what is compared is to be in one form")
    if LABELS not in columns and not any(mask in columns for mask in _MASKS):
        raise AuditError(
            f"{where}: expected {LABELS} beside {IDS}, or {' or '.join(_MASKS)}, which say what was learnt; got neither"
        )
    if not count:
        raise AuditError(f"{where} is empty: expected at least one row")
    return [
        text
        for row in range(count)
        for text in _split_tokenised_row_into_texts(f"{where}, row {row} (counted from 0)", row, columns, vocab_size)
    ]


def _split_tokenised_row_into_texts(
    where: str, row: int, columns: Mapping[str, Sequence[Any]], vocab_size: int
) -> Iterator[_Text]:
    values = {
        name: _require_tokenised_whole_numbers(where, name, column[row])
        for name, column in columns.items()
        if column[row] is not None
    }
    ids = values.get(IDS, [])
    for name, numbers in values.items():
        if name not in _LENGTHS and len(numbers) != len(ids):
            raise AuditError(f"{where}: expected as many {name} as {IDS}, got {len(numbers)} and {len(ids)}")
    learnt = _learnt_mask_of_tokenised_row(where, ids, values)
    shown = [at for at, seen in enumerate(values.get(_ATTENTION, [1] * len(ids))) if seen]
    if shown and shown[-1] - shown[0] + 1 != len(shown):
        raise AuditError(f"{where}: expected padding at the ends alone, got an {_ATTENTION} with 0 in the middle")
    for at in shown:
        if not 0 <= ids[at] < vocab_size:
            raise AuditError(
                f"{where}: vocabulary mismatch: expected token ids in [0, {vocab_size}), the model's vocabulary, got "
                f"{ids[at]}"
            )
    begins = _packed_text_starts(where, values, shown)
    for begin, end in pairwise([*begins, shown[-1] + 1 if shown else 0]):
        yield _Text(row, tuple(ids[begin:end]), tuple(learnt[begin:end]), begin, len(begins) > 1)


def _require_tokenised_whole_numbers(where: str, name: str, value: Any) -> list[int]:
    """Raises AuditError for anything but a list of whole numbers (masks may be true and false)."""
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise AuditError(f"{where}: expected a list of whole numbers in {name}, got another value")
    return [int(number) for number in numbers]


def _learnt_mask_of_tokenised_row(where: str, ids: Sequence[int], values: Mapping[str, Sequence[int]]) -> list[bool]:
    """Where there was a loss. Raises AuditError for labels that are not the tokens themselves, as shifted ones are."""
    if LABELS in values:
        labels = values[LABELS]
        if any(label not in (IGNORED, token) for label, token in zip(labels, ids, strict=True)):
            raise AuditError(
                f"{where}: expected each of the {LABELS} as its token or {IGNORED}, got others: models shift labels "
                "themselves"
            )
        return [label != IGNORED for label in labels]
    masks = [values[mask] for mask in _MASKS if mask in values]
    if not masks:
        raise AuditError(f"{where}: expected {LABELS}, or {' or '.join(_MASKS)}, got none")
    # TRL folds both into the labels: learnt is what both mark (completion_only_loss, its default).
    return [all(told) for told in zip(*masks, strict=True)]


def _packed_text_starts(where: str, values: Mapping[str, Sequence[int]], shown: Sequence[int]) -> list[int]:
    """Where each text that was packed into a row begins, by all that says so. Raises AuditError where they disagree."""
    if not shown:
        return []
    said: dict[str, list[int]] = {}
    if _POSITIONS in values:
        positions = values[_POSITIONS]
        said[_POSITIONS] = [at for at in shown if positions[at] == 0]
        if any(positions[at] not in (0, positions[at - 1] + 1) for at in shown[1:]) or positions[shown[0]] != 0:
            raise AuditError(f"{where}: expected {_POSITIONS} that count each text from 0, got others")
    if any(values.get(_ATTENTION, [])[at] > 1 for at in (shown if _ATTENTION in values else ())):  # numbers of texts
        number = values[_ATTENTION]
        said[_ATTENTION] = [at for at in shown if at == shown[0] or number[at] != number[at - 1]]
    for name in _LENGTHS:
        if name in values:
            sizes, total = values[name], sum(values[name])
            if total != len(shown) or min(sizes, default=1) < 1:
                raise AuditError(f"{where}: expected {name} that add up to {len(shown)} tokens, got {total}")
            said[name] = [shown[0] + sum(sizes[:i]) for i in range(len(sizes))]
    different = sorted({tuple(begins) for begins in said.values()})
    if len(different) > 1:
        raise AuditError(f"{where}: expected {' and '.join(said)} to cut a packed row alike, got different cuts")
    return list(different[0]) if different else [shown[0]]


def _learnt_runs_as_record_source(
    where: str, texts: Sequence[_Text], prefix_length: int | None, suffix_length: int | None
) -> RecordSource:
    """Every run of labelled tokens as a record; rows without any are listed by reason."""
    most, fewest = suffix_length or _DEFAULT, prefix_length or _DEFAULT
    records, left_out = [], dict[str, list[int]]()
    for row, own in groupby(texts, key=lambda text: text.row):
        found = [(text, run) for text in own for run in _learnt_runs_of_tokenised_text(text, fewest)]
        for part, (text, (start, end)) in enumerate(found):
            begin = 0 if prefix_length is None else max(0, start - prefix_length)
            prefix, suffix = text.ids[begin:start], text.ids[start : min(end, start + most)]
            several = len(found) > 1
            at = text.begins + start if several else 0
            records.append(DataRecord(row, prefix, suffix, 1, part=part if several else None, at=at))
        if not found:
            left_out.setdefault("nothing in it was learnt behind other tokens", []).append(row)
    packed = len({text.row for text in texts if text.packed})
    how = f"{where}: token ids as they were trained on; runs of labelled tokens, at most {most} of each"
    note = f"{how}; {packed} packed rows cut into their texts" if packed else how
    return RecordSource(where, tuple(records), tuple((why, tuple(rows)) for why, rows in left_out.items()), (note,))


def _learnt_runs_of_tokenised_text(text: _Text, prefix: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of learnt tokens; one from the first token on starts behind its own first `prefix`."""
    at = 0
    for learnt, run in groupby(text.learnt):
        start, at = at, at + len(list(run))
        if learnt and start == 0:
            start = prefix
        if learnt and start < at:
            yield start, at

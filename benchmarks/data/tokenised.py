"""Read prepared training data: rows of `input_ids` with `labels`, and TRL's preference rows.

TRL, axolotl and LLaMA-Factory write such rows. The model was trained on exactly these rows, so
nothing is rendered, tokenised or prepended. A secret's suffix is a run of labelled tokens, and its
prefix is all preceding tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from auditor.benchmarks.data import json_rows, tables
from auditor.benchmarks.data.compressed import find_table_ending, read_table_bytes
from auditor.benchmarks.data.conversation_rows import CHOSEN, UNWANTED, WANTED
from auditor.benchmarks.data.cut_places import CutPlace
from auditor.benchmarks.data.data_records import (
    DataRecord,
    RecordSource,
    digest_pair,
    format_too_long,
)
from auditor.benchmarks.data.splitting import (
    SplitOptions,
    list_data_files,
    split_records_into_benchmark,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.plan_parts import DataPlan
from auditor.models.trained_length import TrainedLength, read_trainer_arguments
from auditor.plugins.benchmark import Benchmark
from auditor.training import preflight
from auditor.training.loss_masks import IGNORED

IDS = "input_ids"
LABELS = "labels"
# Masks of TRL, which replace labels.
COMPLETION_MASK, ASSISTANT_MASKS = _MASKS = (
    "completion_mask",
    "assistant_masks",
)
_LENGTHS = ("seq_lengths", "seq_lens")  # of the texts packed into a row
_ATTENTION = "attention_mask"
_POSITIONS = "position_ids"
_SIDE_IDS = tuple(
    f"{side}{ending}" for side in preflight.SIDES for ending in ("_ids", "_input_ids")
)
_LABEL = "label"  # of KTO's completions: whether it is wanted
_COLUMNS = (
    IDS,
    LABELS,
    *_MASKS,
    *_LENGTHS,
    _ATTENTION,
    _POSITIONS,
    *preflight.PROMPTS,
    *_SIDE_IDS,
    _LABEL,
)
_COLUMNS = (*_COLUMNS, *(f"{side}_{LABELS}" for side in preflight.SIDES), "prompt", "completion")
# Groups, if prompts had a loss or if that is unknown.
_PROMPT = "prompt"
_COMPLETION = "completion"
_ORPO_NOTE = (
    "TRL 1.16's ORPO takes a loss of the prompt before a chosen side too, whatever chosen_labels "
    "say: prompts are attacked as a group of their own"
)
# Notes by whether a completion_mask without labels selected the tokens with a loss; None: unknown.
_MASK_NOTES = {
    None: "TRL 1.16 ignores a completion_mask without labels unless completion_only_loss is true, "
    "and no "
    "training_args.bin next to the model says so: prompts are attacked too, as a group of their own",  # noqa: E501
    False: "the completion_mask was ignored in training, as TRL 1.16 does unless "
    "completion_only_loss is true, which "
    "the model's training_args.bin does not say: every token was learnt",
}
_FIRST_BYTES = 2**20  # hold most first rows: reading all of a text file here would read it twice
# Tokens of a suffix, and of a prefix if all tokens of a row have labels.
_DEFAULT = 50


class Tokenised(Benchmark):
    """Prepared data sets: rows of input_ids with labels, as the trainer had them; nothing is
    rendered."""

    name = "tokenised"
    framed = True
    as_trained = True

    def __init__(
        self,
        plan: DataPlan,
        vocab_size: int,
        seed: int = 0,
        *,
        model: str | None = None,
        trained: TrainedLength | None = None,
        room: int | None = None,
        end_of_text: int | None = None,
    ):
        """Read all rows; `--known`, `--nonmembers` and `--forget` are prepared data too.

        Each run of labelled tokens gives a secret. Its suffix is the first `suffix_length` tokens
        of the run (default 50). Its prefix is all text before the run, or the last `prefix_length`
        tokens of that text. A text whose first token is labelled is cut into `prefix_length` tokens
        (default 50, or half of a shorter text) and `suffix_length` tokens.

        Args:
            plan: the names of the data files, and the lengths.
            vocab_size: size of the model's vocabulary; larger token ids are invalid.
            seed: seed of the split into known and attacked records.
            model: a folder that may contain a `training_args.bin`.
            trained: the tokens of a text that were trained on. All later tokens are omitted,
                because TRL 1.16 truncates prepared rows too.
            room: largest number of tokens in a record; longer records are omitted.
            end_of_text: the token that ends a record. It shows that a row holds several records
                even if the row does not mark their boundaries.

        Raises:
            AuditError: for any mistake of the user.
        """
        split = SplitOptions(plan.known_fraction, plan.limit, seed)
        lengths = RunLengths(plan.prefix_length, plan.suffix_length, trained, room)
        arguments = None if model is None else read_trainer_arguments(Path(model))
        texts: dict[str, list[_Text]] = {"--nonmembers": []}
        sources = {}
        earlier = {}
        files = list_data_files(plan)
        for flag, name in files.items():
            table = tables.read_record_table(flag, name, _COLUMNS)
            texts[flag], notes = _read_tokenised_texts(table, vocab_size, arguments)
            source, earlier[flag] = _build_run_source(table.label, texts[flag], notes, lengths)
            sources[flag] = replace(source, unread_parts=table.unread_parts)
        counts = split_records_into_benchmark(self, sources, split, "row")
        self._texts = {True: texts["--data"], False: texts["--nonmembers"]}
        self.heldout_given = tuple(
            len(secret.prefix) for secret in self.secrets if not secret.member
        )
        self.notes += tuple(_list_boundary_notes(self._texts[True], end_of_text))
        self.earlier_in_row = {}
        for secret in self.secrets:
            before = earlier["--data"].get(digest_pair(secret.prefix, secret.suffix))
            if secret.member and before is not None:
                self.earlier_in_row[secret.id] = before
        name = Path(files["--data"]).name
        self.description = f"{name}, token ids as they were trained on: {counts}"

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Yield every text with its repeat count, including texts beyond --limit."""
        for text in self._texts[members]:
            yield text.ids, 1


def is_tokenised_data(name: str) -> bool:
    """Return whether a local file or saved data set has a column of token ids.

    Raise AuditError if a file is broken.
    """
    path = Path(name)
    is_saved = path.is_dir() and any((path / file).is_file() for file in tables.SAVED)
    ending = find_table_ending(path) if path.is_file() else ""
    if is_saved or ending in (".arrow", ".parquet"):
        return _has_token_ids(tables.read_record_table("--data", name, ()).columns)
    if ending in (".jsonl", ".json"):
        return _has_token_ids(_read_first_row_keys(f"--data {name!r}", path))
    return False


def _read_first_row_keys(where: str, path: Path) -> Iterable[str]:
    """List the keys of the first object in a JSON file; an invalid file has no keys."""
    for size in (_FIRST_BYTES, -1):
        text = read_table_bytes(where, path, size).decode("utf-8-sig", errors="replace")
        with suppress(ValueError, RecursionError):
            row, _ = json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))
            return row if isinstance(row, dict) else ()
    return ()


def _has_token_ids(columns: Iterable[str]) -> bool:
    return bool({IDS, *_SIDE_IDS} & set(columns))


@dataclass(frozen=True)
class RunLengths:
    """Hold the lengths for cutting runs of labelled tokens into prefixes and suffixes.

    prefix: maximum number of tokens in a prefix (None: all preceding tokens).
    suffix: maximum number of tokens in a suffix (None: 50).
    trained: the tokens of a row that were trained on (None: all).
    room: maximum number of tokens that the model reads (None: no limit).
    """

    prefix: int | None
    suffix: int | None
    trained: TrainedLength | None
    room: int | None

    @property
    def longest_suffix(self) -> int:
        return self.suffix or _DEFAULT

    def cut_run(self, text: _Text, start: int, end: int) -> tuple[int, int] | str:
        """Return (start of the prefix, end of the suffix) for a run of labelled tokens, start:end.

        If the run is unusable, return the reason.
        """
        begin = 0
        last = len(text.ids)
        if self.trained is not None:
            begin, last = self.trained.span_of(last, templated=True)
        if self.prefix is not None:
            begin = max(begin, start - self.prefix)
        stop = min(end, start + self.longest_suffix, last)
        if self.trained is not None and not begin < start < stop:
            return self.trained.beyond_phrase
        if self.room is not None:
            stop = min(stop, begin + self.room)
            if stop <= start:
                return format_too_long(self.room)
        return begin, stop


# --- from rows to secrets ---


class _Groups(NamedTuple):
    """Name the groups of a row's tokens, such as `chosen`.

    A group is "" if it has no name, and None if its tokens are excluded from the loss.

    marked: group of the tokens that labels or masks mark; unmarked: group of the other tokens.
    """

    marked: str = ""
    unmarked: str | None = None


@dataclass(frozen=True)
class _Text:
    """Hold one input of the model: a row, one side of a preference row, or a text of a packed row.

    learnt: the group of each token; "" if unnamed, None if the token is excluded from the loss.
    begins: index in the row of the text's first token.
    packed: whether the row has several texts; earlier: the texts before this text in its row.
    """

    row: int
    ids: Tokens
    learnt: tuple[str | None, ...]
    begins: int = 0
    packed: bool = False
    earlier: tuple[Tokens, ...] = ()


def _read_tokenised_texts(
    table: tables.RecordTable, vocab_size: int, arguments: Mapping[str, Any] | None
) -> tuple[list[_Text], tuple[str, ...]]:
    """Return every text of every row, and notes.

    arguments: the trainer's arguments, from `read_trainer_arguments`. Raise AuditError if there are
    rows that no trainer makes.
    """
    title = table.label
    columns = {key: table.column(key) for key in _COLUMNS if key in table.columns}
    if not _has_token_ids(columns):
        raise AuditError(
            f"{title}: expected {IDS} as in --data, got none: compared data need the same form"
        )
    if IDS in columns and columns.keys().isdisjoint((LABELS, *_MASKS)):
        raise AuditError(
            f"{title}: expected {LABELS} next to {IDS}, or {' or '.join(_MASKS)}, which mark "
            "the learnt tokens; got neither"
        )
    uses_mask = _is_completion_mask_used(columns, arguments)
    # ORPOConfig has no loss_type; CPOConfig and DPOConfig do, and take the labels as they are.
    learns_prompts = f"{CHOSEN}_{LABELS}" in columns and (
        arguments is None or "loss_type" not in arguments
    )
    texts: list[_Text] = []
    for row in range(table.rows):
        at = f"{title}, row {row} (counted from 0)"
        values = {}
        for name, column in columns.items():
            if column[row] is not None and column[row] is not json_rows.ABSENT:
                values[name] = column[row]
        sides = list(_list_row_sides(at, values, learns_prompts))
        if not sides:
            raise AuditError(f"{at}: expected token ids, got null: leave out rows without them")
        for groups, side in sides:
            texts += _split_tokenised_row_into_texts(at, row, side, vocab_size, uses_mask, groups)
    notes = table.list_unread_notes()
    if COMPLETION_MASK in columns and LABELS not in columns and uses_mask in _MASK_NOTES:
        notes.append(f"{title}: {_MASK_NOTES[uses_mask]}")
    if learns_prompts:
        notes.append(f"{title}: {_ORPO_NOTE}")
    return texts, tuple(notes)


def _is_completion_mask_used(
    columns: Iterable[str], arguments: Mapping[str, Any] | None
) -> bool | None:
    """Return whether completion_mask limited the loss in rows without labels (None: unknown).

    In TRL 1.16 (`SFTTrainer`), `completion_only_loss` decides. By default it is set only if rows
    have a prompt and a completion.
    """
    options = arguments or {}
    value = options.get("completion_only_loss")
    if isinstance(value, bool):
        return value
    by_default = {"prompt", "completion"} <= set(columns)
    return by_default if by_default or "completion_only_loss" in options else None


def _list_row_sides(
    where: str, values: Mapping[str, Any], learns_prompts: bool
) -> Iterator[tuple[_Groups, dict[str, Any]]]:
    """Yield the groups of a row's tokens, and the columns with its token ids and labels.

    A preference row yields its chosen and its rejected sequence.

    learns_prompts: whether prompts of chosen sequences count toward the loss.
    """
    if IDS in values:
        names = (IDS, LABELS, *_MASKS, *_LENGTHS, _ATTENTION, _POSITIONS)
        yield _Groups(), {name: values[name] for name in names if name in values}
        return
    read_ids = partial(_require_tokenised_whole_numbers, where)
    for side, ids, labels in preflight.list_preference_sides(values, read_ids):
        group = side  # CHOSEN or REJECTED
        if side == "completion":
            groups: dict[Any, str] = {True: WANTED, False: UNWANTED}
            group = groups.get(values.get(_LABEL), "")
        before = _PROMPT if learns_prompts and side == CHOSEN else None
        yield _Groups(group, before), {IDS: ids, LABELS: labels}


def _split_tokenised_row_into_texts(
    where: str,
    row: int,
    columns: Mapping[str, Any],
    vocab_size: int,
    uses_mask: bool | None,
    groups: _Groups,
) -> Iterator[_Text]:
    values = {}
    for name, value in columns.items():
        values[name] = _require_tokenised_whole_numbers(where, name, value)
    ids = values.get(IDS, [])
    for name, numbers in values.items():
        if name not in _LENGTHS and len(numbers) != len(ids):
            raise AuditError(
                f"{where}: expected as many {name} as {IDS}, got {len(numbers)} and {len(ids)}"
            )
    loss_groups = _list_learnt_groups(where, ids, values, uses_mask, groups)
    unpadded = []
    for at, is_token in enumerate(values.get(_ATTENTION, [1] * len(ids))):
        if is_token:
            unpadded.append(at)
    if unpadded and unpadded[-1] - unpadded[0] + 1 != len(unpadded):
        raise AuditError(
            f"{where}: expected padding only at the ends, got an {_ATTENTION} with 0 in the middle"
        )
    for at in unpadded:
        if not 0 <= ids[at] < vocab_size:
            raise AuditError(
                f"{where}: vocabulary mismatch: expected token ids in [0, {vocab_size}), the "
                f"model's vocabulary, got {ids[at]}"
            )
    begins = _list_packed_text_starts(where, values, unpadded)
    earlier: list[Tokens] = []
    for begin, end in pairwise([*begins, unpadded[-1] + 1 if unpadded else 0]):
        text = tuple(ids[begin:end])
        text_groups = tuple(loss_groups[begin:end])
        yield _Text(row, text, text_groups, begin, len(begins) > 1, tuple(earlier))
        earlier.append(text)


def _require_tokenised_whole_numbers(where: str, name: str, value: Any) -> list[int]:
    """Return the list of whole numbers in column `name`; masks may also be true and false.

    Raise AuditError for any other value.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
        raise AuditError(f"{where}: expected a list of whole numbers in {name}, got another value")
    return list(map(int, value))


def _list_learnt_groups(
    where: str,
    ids: Sequence[int],
    values: Mapping[str, Sequence[int]],
    uses_mask: bool | None,
    groups: _Groups,
) -> list[str | None]:
    """Return the group in which each token's loss counts; None if it is excluded from the loss.

    groups: names of the groups, such as prompt and completion. values: the columns of the row.
    uses_mask: whether completion_mask limits the loss. Raise AuditError if labels differ from their
    tokens, as shifted labels do.
    """
    if LABELS in values:
        labels = values[LABELS]
        token_groups = []
        for label, token in zip(labels, ids, strict=True):
            if label not in (IGNORED, token):
                raise AuditError(
                    f"{where}: expected each of the {LABELS} as its token or {IGNORED}, got "
                    "others: models shift labels themselves"
                )
            token_groups.append(groups.unmarked if label == IGNORED else groups.marked)
        return token_groups
    if values.keys().isdisjoint(_MASKS):
        raise AuditError(f"{where}: expected {LABELS}, or {' or '.join(_MASKS)}, got none")
    all_ones = [1] * len(ids)
    assistant = values.get(ASSISTANT_MASKS, all_ones)
    completion = values.get(COMPLETION_MASK, all_ones)
    # TRL folds both masks into the labels: if it uses the second mask, tokens with both marks have
    # a loss.
    if uses_mask is False:
        completion = all_ones
    if uses_mask is None and COMPLETION_MASK in values:
        groups = _Groups(_COMPLETION, _PROMPT)
    names = []
    for marked, spoken in zip(completion, assistant, strict=True):
        name = groups.marked if marked else groups.unmarked
        names.append(name if spoken else None)
    return names


def _list_packed_text_starts(
    where: str, values: Mapping[str, Sequence[int]], places: Sequence[int]
) -> list[int]:
    """Return the index of each text's first token in a packed row.

    places: indices of all tokens except padding. Raise AuditError if the columns `values` disagree.
    """
    if not places:
        return []
    cuts: dict[str, list[int]] = {}
    if _POSITIONS in values:
        positions = values[_POSITIONS]
        cuts[_POSITIONS] = []
        following = 0  # a text begins at the first token
        for at in places:
            if positions[at] == 0:
                cuts[_POSITIONS].append(at)
            elif positions[at] != following or at == places[0]:
                raise AuditError(
                    f"{where}: expected {_POSITIONS} that count each text from 0, got others"
                )
            following = positions[at] + 1
    number = values.get(_ATTENTION, ())
    if max(number, default=0) > 1:  # numbers of texts; padding is 0
        cuts[_ATTENTION] = [at for at in places if at == places[0] or number[at] != number[at - 1]]
    for name in _LENGTHS:
        if name in values:
            sizes = values[name]
            total = sum(sizes)
            if total != len(places) or min(sizes, default=1) < 1:
                raise AuditError(
                    f"{where}: expected {name} that add up to {len(places)} tokens, got {total}"
                )
            cuts[name] = list(accumulate(sizes[:-1], initial=places[0]))
    different = sorted(set(map(tuple, cuts.values())))
    if len(different) > 1:
        raise AuditError(
            f"{where}: expected {' and '.join(cuts)} to cut a packed row alike, got different cuts"
        )
    return list(different[0]) if different else [places[0]]


def _build_run_source(
    where: str, texts: Sequence[_Text], notes: Sequence[str], lengths: RunLengths
) -> tuple[RecordSource, dict[bytes, tuple[Tokens, ...]]]:
    """Return every run of labelled tokens as a record, and what precedes it in a packed row.

    A packed row has several texts. For a record in its second or a later text, the earlier tokens
    of the row are returned: first the earlier texts, then the part of the record's own text before
    the record. where: how notes start.
    """
    earlier: dict[bytes, tuple[Tokens, ...]] = {}
    records: list[DataRecord] = []
    unusable: list[tuple[int, str]] = []
    for row, of_row in groupby(texts, key=lambda text: text.row):
        runs = []
        for text in of_row:
            for run in _list_learnt_runs(text, lengths.prefix):
                runs.append((text, *run))
        if not runs:
            unusable.append((row, "it has no learnt token after other tokens"))
        for part, (text, start, end, group) in enumerate(runs):
            places = lengths.cut_run(text, start, end)
            if isinstance(places, str):
                unusable.append((row, places))
                continue
            begin, stop = places
            record = DataRecord(row, text.ids, CutPlace(begin, start, stop), 1, group or None)
            if text.earlier:
                earlier.setdefault(record.digest, (*text.earlier, text.ids[:begin]))
            if len(runs) > 1:
                record = replace(record, part=part, suffix_start=text.begins + start)
            records.append(record)
    packed = len({text.row for text in texts if text.packed})
    rule = (
        f"{where}: token ids as they were trained on; runs of labelled tokens, at most "
        f"{lengths.longest_suffix} of each"
    )
    if packed:
        rule += f"; {packed} packed rows cut into their texts"
    return (
        RecordSource(where, tuple(records), tuple(unusable), (rule, *notes), "run"),
        earlier,
    )


def _list_boundary_notes(texts: Sequence[_Text], end_of_text: int | None) -> Iterator[str]:
    """Yield a note if rows without masked tokens seem to contain several records.

    end_of_text: the token that ends a record.
    """
    n_several = 0
    for text in texts:
        # Padding belongs to no record: only an end with another token after it is a boundary.
        if text.packed or None in text.learnt:
            continue
        if any(a == end_of_text != b for a, b in pairwise(text.ids)):
            n_several += 1
    if n_several:
        yield (
            f"{n_several} of {len(texts)} rows contain the end of text in the middle and mark "
            f"no boundaries ({_POSITIONS}, {_LENGTHS[0]}, or numbers in {_ATTENTION}): if records "
            "were packed into them, only the first of each row is attacked, and each is read after "
            "the earlier ones"
        )


def _list_learnt_runs(text: _Text, prefix_length: int | None) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, group) for each run of tokens that count toward the loss.

    A run at the start of a text has no tokens before it. Its first `prefix_length` tokens (by
    default 50, or half of a shorter run) serve as the prefix and are not in the range.
    """
    at = 0
    for group, run in groupby(text.learnt):
        start = at
        at = at + len(list(run))
        if group is not None and start == 0:
            half = at // 2 if at <= _DEFAULT else _DEFAULT
            start = prefix_length or half
        if group is not None and 0 < start < at:
            yield start, at, group

"""Check before a training whether its training set contains the secrets that will be audited.

A dose-response curve (leakage against copies) means nothing if its records are missing from the
training set or excluded from the loss. The checks work on token ids and labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, Tokens
from auditor.training import loss_masks

_MAX_ROWS = 200_000  # most rows of a training set to read
_SEPARATOR = -1  # not a token
PROMPTS = ("prompt_ids", "prompt_input_ids")  # TRL's; the second before 1.16
SIDES = ("chosen", "rejected", "completion")  # of TRL's preference rows; the last is KTO's
_ASSISTANT = "assistant_masks"  # TRL's masks are 1 for tokens with a loss
_COMPLETION = "completion_mask"


@dataclass(frozen=True)
class TrainingSet:
    """The rows of a training set, joined end to end.

    Attributes:
        ids: token ids.
        has_loss: for each token, whether it counts toward the loss.
        rows: number of rows.
        copies: number of rows that equal an earlier row.
        unread: number of further rows of the training set, which are not here.
    """

    ids: NDArray[np.int32]
    has_loss: Bools
    rows: int
    copies: int
    unread: int = 0


def read_training_set(
    dataset: Any,
    max_length: int | None = None,
    keep_end: bool = False,
    completion_only: bool = True,
    learns_prompts: bool = False,
) -> TrainingSet | None:
    """Return the tokens of a data set; None if its rows have no token ids yet (lazy tokenisation).

    A row has `input_ids`, or TRL's prompt with its completions: `chosen_ids` and `rejected_ids`
    (DPO), `completion_ids` (KTO), `chosen_input_ids` and `rejected_input_ids` (ORPO, CPO, DPO
    before 1.16).

    Args:
        max_length: number of tokens to which TRL's collators cut a prompt with a completion.
        keep_end: whether this cut keeps the last tokens instead of the first.
        completion_only: whether the trainer uses a `completion_mask` if there are no labels.
        learns_prompts: whether the loss covers prompts of chosen answers, as in TRL 1.16's ORPO.
    """
    masks = (_ASSISTANT, _COMPLETION) if completion_only else (_ASSISTANT,)
    sides_with_prompts = ("chosen",) if learns_prompts else ()
    if max_length and keep_end:
        window = slice(-max_length, None)
    else:
        window = slice(max_length)
    separator = np.array([_SEPARATOR], np.int32)
    ids = list[NDArray[np.int32]]()
    has_loss = list[Bools]()
    copies_by_row = Counter[bytes]()
    for row in _read_rows(dataset):
        sequences = _extract_row_sequences(row, window, masks, sides_with_prompts)
        if not sequences:
            return None
        for tokens, mask in sequences:
            ids += [tokens, separator]
            has_loss += [mask, np.zeros(1, bool)]
        row_bytes = separator.tobytes().join(tokens.tobytes() for tokens, _ in sequences)
        copies_by_row[row_bytes] += 1
    if not ids:
        return None
    n_rows = copies_by_row.total()
    n_copies = n_rows - len(copies_by_row)
    n_unread = len(dataset) - n_rows
    return TrainingSet(np.concatenate(ids), np.concatenate(has_loss), n_rows, n_copies, n_unread)


def _extract_row_sequences(
    row: Mapping[str, Any], window: slice, masks: Sequence[str], sides_with_prompts: Sequence[str]
) -> list[tuple[NDArray[np.int32], Bools]]:
    """Return (token ids, mask of tokens in the loss) for each sequence of a row.

    Return [] if the row has no ids.

    Args:
        window: the tokens of a preference sequence to keep.
        masks: columns that mask the loss.
        sides_with_prompts: the answers whose prompt counts toward the loss, whatever their labels
            mask; ("chosen",) or ().
    """
    if row.get("input_ids") is not None:
        tokens = np.asarray(row["input_ids"], dtype=np.int32).ravel()
        return [(tokens, _read_learnt_mask(row, len(tokens), masks))]
    sequences = []
    for side, ids, labels in list_preference_sides(row, lambda name, ids: np.ravel(ids).tolist()):
        tokens = np.array(ids, dtype=np.int32)
        has_loss = np.ravel(labels) != loss_masks.IGNORED
        if side in sides_with_prompts:
            has_loss[:] = True
        sequences.append((tokens[window], has_loss[window]))
    return sequences


def list_preference_sides(
    row: Mapping[str, Any], read_ids: Callable[[str, Any], list[int]]
) -> Iterator[tuple[str, list[int], Any]]:
    """Yield (side, token ids, labels) for each sequence of TRL's preference row, with its prompt.

    TRL 1.16 stores sequences in two ways:

    - DPO and KTO: `prompt_ids`, which precede `chosen_ids` and `rejected_ids`. A KTO row has
      `completion_ids` with a label instead.
    - ORPO and CPO: `chosen_input_ids` with `chosen_labels`, which include the prompt.

    Args:
        read_ids: returns the token ids in a column, from its name and value.
    """
    prompt: list[int] = []
    for name in PROMPTS:
        if not prompt and row.get(name) is not None:
            prompt = read_ids(name, row[name])
    for side in SIDES:
        for name in (f"{side}_ids", f"{side}_input_ids"):
            if row.get(name) is not None:
                ids = read_ids(name, row[name])
                labels = row.get(f"{side}_labels")
                if labels is None:
                    yield side, [*prompt, *ids], [loss_masks.IGNORED] * len(prompt) + ids
                else:
                    yield side, ids, labels
                break


def _read_rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    try:
        n_rows = min(len(dataset), _MAX_ROWS)
    except TypeError:  # a streaming data set has no length
        return
    for i in range(n_rows):
        row = dataset[i]
        if not isinstance(row, Mapping):
            return
        yield row


def _read_learnt_mask(
    row: Mapping[str, Any],
    length: int,
    masks: Sequence[str],
) -> Bools:
    if row.get("labels") is not None:
        return np.ravel(row["labels"]) != loss_masks.IGNORED
    has_loss = np.ones(length, bool)
    # TRL folds all masks into the labels: a token has a loss if every mask marks it.
    for name in masks:
        if row.get(name) is not None:
            has_loss &= np.asarray(row[name]).ravel().astype(bool)
    return has_loss


def describe_secret_coverage(training: TrainingSet, secrets: Sequence[Secret]) -> tuple[str, ...]:
    """Return sentences that say which of these secrets the training set contains.

    Raise AuditError if it contains any non-member, if it contains no member, or if all members are
    excluded from the loss. If some rows are unread, only a non-member is certain.
    """
    text = training.ids.tobytes()
    positions = {}
    for secret in secrets:
        positions[secret.id] = _find_token_positions(text, secret.prefix + secret.suffix)
    members = [secret for secret in secrets if secret.member]
    nonmembers = [secret for secret in secrets if not secret.member]
    if n_trained := sum(bool(positions[secret.id]) for secret in nonmembers):
        raise AuditError(
            f"expected non-members that are not trained on, but {n_trained} of {len(nonmembers)} "
            "are in the training set"
        )
    members_present = [secret for secret in members if positions[secret.id]]
    if not members_present and not training.unread:
        raise AuditError(
            f"expected the {len(members)} members in the training set, but none of its "
            f"{training.rows:,} rows contains their tokens: they are other records, or cut, "
            "templated or tokenised differently"
        )
    n_masked = 0
    for secret in members_present:
        has_loss = False
        for position in positions[secret.id]:
            start = position + len(secret.prefix)
            has_loss |= bool(training.has_loss[start : start + len(secret.suffix)].any())
        n_masked += not has_loss
    if n_masked == len(members_present) and not training.unread:
        raise AuditError(
            "expected a loss on the attacked suffixes, but it is masked for all "
            f"{len(members_present)} members in the training set"
        )
    rows_read = ""
    if training.unread:
        n_rows = training.rows + training.unread
        rows_read = f"the first {training.rows:,} of {n_rows:,} rows (no others were read) of "
    coverage = f"{len(members_present)} of {len(members)} members"
    sentences = [f"{coverage} are in {rows_read}the training set, token by token"]
    if n_masked:
        sentences.append(
            f"{n_masked} of them {'has' if n_masked == 1 else 'have'} no loss on the suffix: the "
            "model only reads it",
        )
    if training.copies:
        sentences.append(
            f"{training.copies:,} of {training.rows:,} training rows repeat an earlier row",
        )
    return tuple(sentences)


def _find_token_positions(text: bytes, tokens: Tokens) -> list[int]:
    """Return the positions, in tokens, at which `tokens` occur within one row.

    `text` holds the row's int32 token ids as bytes.
    """
    pattern = np.array(tokens, np.int32).tobytes()
    token_size = np.dtype(np.int32).itemsize
    positions = list[int]()
    offset = text.find(pattern)
    while offset >= 0:
        if offset % token_size == 0:  # bytes can match across the border of two tokens
            positions.append(offset // token_size)
        offset = text.find(pattern, offset + 1)
    return positions

"""Whether a training that is about to begin trains on what will be audited: found in its own tokens, before any step.

A curve of records that are not in the training, or that no loss is taken of, is a curve of nothing. Knows token ids and
labels of a training set; knows no files and no models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, Tokens

_ROWS = 200_000  # of a training set that are looked at
_BETWEEN = -1  # no token
_PROMPTS = ("prompt_ids", "prompt_input_ids")  # TRL's; the second before 1.16
_COMPLETIONS = ("completion_ids", "chosen_ids", "rejected_ids")  # TRL's, each read after the row's prompt
_SIDES = ("chosen", "rejected")  # TRL's NAME_input_ids; with NAME_labels (ORPO, CPO) the prompt is within
_ASSISTANT, _COMPLETION = "assistant_masks", "completion_mask"  # TRL's: 1 where a loss is taken


@dataclass(frozen=True)
class TrainingSet:
    """The rows of a training set end to end: token ids, and whether a loss is taken of each."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    rows: int
    copies: int  # rows that an earlier one equals


def read_training_set(
    dataset: Any,
    max_length: int | None = None,
    keep_end: bool = False,
    completion_only: bool = True,
    learns_prompts: bool = False,
) -> TrainingSet | None:
    """Return the tokens of a data set whose rows have token ids; None for one that makes its tokens as it is asked.

    A row is `input_ids`, or TRL's prompt with its completions: `chosen_ids` and `rejected_ids` (DPO), `completion_ids`
    (KTO), `chosen_input_ids` and `rejected_input_ids` (ORPO, CPO, DPO before 1.16).
    max_length: TRL's collators cut a prompt with a completion to so many tokens, the first ones or, with `keep_end`,
    the last ones. completion_only: whether the trainer reads a `completion_mask` without labels.
    learns_prompts: whether the loss is of the prompts of chosen sides too, as TRL 1.16's ORPO takes it.
    """
    masks = (_ASSISTANT, _COMPLETION) if completion_only else (_ASSISTANT,)
    rows = _first_rows_of_training_set(dataset)
    ids, learnt, copies_by_row = list[NDArray[np.int32]](), list[NDArray[np.bool_]](), Counter[bytes]()
    kept = slice(-max_length, None) if max_length and keep_end else slice(max_length)
    for row in rows:
        sequences = _token_sequences_of_row(row, kept, masks, ("chosen",) if learns_prompts else ())
        if not sequences:
            return None
        for tokens, mask in sequences:
            ids += [tokens, np.array([_BETWEEN], np.int32)]
            learnt += [mask, np.zeros(1, bool)]
        copies_by_row[np.array([_BETWEEN], np.int32).tobytes().join(tokens.tobytes() for tokens, _ in sequences)] += 1
    if not ids:
        return None
    n_rows = copies_by_row.total()
    return TrainingSet(np.concatenate(ids), np.concatenate(learnt), n_rows, n_rows - len(copies_by_row))


def _token_sequences_of_row(
    row: Mapping[str, Any], kept: slice, masks: Sequence[str], sides_with_prompts: Sequence[str]
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Return each sequence that the model reads of a row, with the tokens that a loss is taken of; [] for no ids.

    sides_with_prompts: "chosen" if the loss is of its prompt too, whatever its labels mask.
    """
    if row.get("input_ids") is not None:
        tokens = np.asarray(row["input_ids"], dtype=np.int32).ravel()
        return [(tokens, _learnt_token_mask(row, len(tokens), masks))]
    prompt = next((list(row[name]) for name in _PROMPTS if row.get(name) is not None), [])
    sequences = []
    for side in _SIDES:
        if row.get(f"{side}_labels") is not None:
            tokens = np.asarray(row[f"{side}_input_ids"], dtype=np.int32).ravel()
            learnt = np.asarray(row[f"{side}_labels"]).ravel() != -100
            if side in sides_with_prompts:
                learnt = np.ones(len(tokens), bool)
            sequences.append((tokens[kept], learnt[kept]))
    if sequences:
        return sequences
    for name in (*_COMPLETIONS, *(f"{side}_input_ids" for side in _SIDES)):
        if row.get(name) is not None:
            tokens = np.array([*prompt, *row[name]], dtype=np.int32)
            sequences.append((tokens[kept], (np.arange(len(tokens)) >= len(prompt))[kept]))
    return sequences


def _first_rows_of_training_set(dataset: Any) -> Iterator[Mapping[str, Any]]:
    try:
        count = min(len(dataset), _ROWS)
    except TypeError:  # it streams
        return
    for i in range(count):
        row = dataset[i]
        if not isinstance(row, Mapping):
            return
        yield row


def _learnt_token_mask(row: Mapping[str, Any], length: int, masks: Sequence[str]) -> NDArray[np.bool_]:
    if row.get("labels") is not None:
        return np.asarray(row["labels"]).ravel() != -100
    learnt = np.ones(length, bool)
    for name in masks:  # TRL folds all of them into the labels: learnt is what each marks
        if row.get(name) is not None:
            learnt &= np.asarray(row[name]).ravel().astype(bool)
    return learnt


def preflight_sentences_about_secrets(training: TrainingSet, secrets: Sequence[Secret]) -> tuple[str, ...]:
    """What is to be known of these secrets in this training set: sentences.

    Raises AuditError where no member stands in it, or none that a loss is taken of, and where a non-member does.
    """
    members = [secret for secret in secrets if secret.member]
    text = training.ids.tobytes()
    found = {secret.id: _positions_of_tokens_in_training_set(text, secret.prefix + secret.suffix) for secret in members}
    there = [secret for secret in members if found[secret.id]]
    others = [secret for secret in secrets if not secret.member]
    if trained := sum(
        bool(_positions_of_tokens_in_training_set(text, other.prefix + other.suffix)) for other in others
    ):
        raise AuditError(
            f"expected non-members that are not trained on, but {trained} of {len(others)} stand in the training set"
        )
    if not there:
        raise AuditError(
            f"expected the {len(members)} members in the training set, but their tokens stand nowhere in its "
            f"{training.rows:,} rows: they are other records, or cut, templated or tokenised otherwise"
        )
    silent = 0
    for secret in there:
        starts = [at + len(secret.prefix) for at in found[secret.id]]
        silent += not any(training.learnt[start : start + len(secret.suffix)].any() for start in starts)
    if silent == len(there):
        raise AuditError(
            f"expected a loss on what is attacked, but of all {len(there)} members in the training set it is masked"
        )
    said = [f"{len(there)} of {len(members)} members stand in the training set, token by token"]
    if silent:
        said.append(f"of {silent} of them no loss is taken of the suffix: they are read and not learnt")
    if training.copies:
        said.append(f"{training.copies:,} of {training.rows:,} rows of the training set repeat an earlier one")
    return tuple(said)


def _positions_of_tokens_in_training_set(text: bytes, tokens: Tokens) -> list[int]:
    """Where the tokens stand, none of them across two rows."""
    wanted, size = np.array(tokens, np.int32).tobytes(), np.dtype(np.int32).itemsize
    places, at = list[int](), text.find(wanted)
    while at >= 0:
        if at % size == 0:  # bytes can be alike across the border of two tokens
            places.append(at // size)
        at = text.find(wanted, at + 1)
    return places

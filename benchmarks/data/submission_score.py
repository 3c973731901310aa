"""Score an LM-Extraction submission as the organisers do, with intervals and a full curve.

A submission is a CSV file with the header `Example ID,Suffix Guess` and one guess per line, such as
`991,"[6,0,1,2]"`, the most confident first. An example may have any number of guesses. Its id is a
row number of the answers.

The rules are those of the organisers' score_submission.py. The first right guess solves an example.
Every wrong guess is an error, including repeated guesses and guesses for solved examples.
Recall@100 counts the right guesses that follow fewer than 100 wrong guesses. Examples without a
guess count as not solved.

This module rejects inputs that their script accepts silently: an id below 0 (numpy counts from the
end), a guess whose length differs from the answers' (numpy broadcasts a single token), and a file
without guesses. Their script reads only the last 1,000 answers and the last 50 tokens. This module
uses every row and every token.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from auditor.benchmarks.data.lm_extraction import read_extraction_array
from auditor.core.arrays import Bools, Ints
from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.statistics import intervals, ranking

ID = "Example ID"
GUESS = "Suffix Guess"
CurvePoint = tuple[int, int, float]  # (wrong guesses so far, examples solved by then, recall)


@dataclass(frozen=True)
class MarkedGuesses:
    """Hold a submission's guesses, compared with the answers, in the submission's order.

    example: (guesses,) the example of each guess, numbered by first appearance.
    right: (guesses,) whether the guess equals the answer.
    answers: number of examples.
    """

    example: Ints
    right: Bools
    answers: int

    @property
    def answered_example_count(self) -> int:
        """The number of examples with at least one guess."""
        return int(self.example.max()) + 1

    def count_examples(self, answered_only: bool) -> int:
        if answered_only:
            return self.answered_example_count
        return self.answers


@dataclass(frozen=True)
class SubmissionScore:
    """Hold the result of `audit score`.

    answers: number of all examples; answered: number of examples with a guess.
    answered_only: whether shares are of the answered examples instead of all examples.
    guesses, wrong: numbers of all guesses and of wrong guesses.
    """

    answers: int
    answered: int
    answered_only: bool
    guesses: int
    wrong: int
    measurements: tuple[Measurement, ...]

    @property
    def headline(self) -> str:
        """A phrase with the counts of examples and guesses.

        It says whether examples without a guess count as not solved.
        """
        counts = f"{self.answered:,} of {self.answers:,} examples answered"
        text = f"{counts}, {self.guesses:,} guesses, {self.wrong:,} of them wrong"
        if self.answered == self.answers:
            return text
        unanswered = f"{self.answers - self.answered:,} without a guess"
        return (
            f"{text}; {unanswered}: "
            f"{'left out' if self.answered_only else 'not solved (--answered-only leaves them out)'}"  # noqa: E501
        )


def mark_submission(submission: Path, answers: Path) -> MarkedGuesses:
    """Compare a submission file with the answers, an .npy array of shape (examples, tokens).

    Raise AuditError, with the line number, if a line does not guess a complete answer. Messages
    contain no tokens.
    """
    expected: list[list[int]] = read_extraction_array(
        f"--answers {str(answers)!r}", answers
    ).tolist()
    numbers: dict[int, int] = {}  # row of the answers -> number by first appearance
    example = []
    right = []
    for place, row, guess in _read_submission_guesses(submission):
        if not 0 <= row < len(expected):
            raise AuditError(
                f"{place}: expected an {ID} in [0, {len(expected)}), a row of the answers, got "
                f"{row}"
            )
        if len(guess) != len(expected[row]):
            raise AuditError(
                f"{place}: expected {len(expected[row])} tokens, as the answers have, got "
                f"{len(guess)}"
            )
        example.append(numbers.setdefault(row, len(numbers)))
        right.append(guess == expected[row])
    if not example:
        raise AuditError(
            f"{str(submission)!r} contains no guesses: expected lines below the header, got none"
        )
    return MarkedGuesses(
        np.array(example, dtype=np.int64), np.array(right, dtype=bool), len(expected)
    )


def score_submission(marked: MarkedGuesses, answered_only: bool = False) -> SubmissionScore:
    """Compute the numbers by which the LM-Extraction benchmark ranks submissions, with intervals.

    Shares have Clopper-Pearson intervals; recall at E errors has bootstrap intervals over examples.
    """
    n = marked.count_examples(answered_only)
    first = np.zeros(n, dtype=bool)
    any_right = np.zeros(n, dtype=bool)
    # return_index: the first guess of each example, in the order of the numbers.
    first[: marked.answered_example_count] = marked.right[
        np.unique(marked.example, return_index=True)[1]
    ]
    any_right[marked.example[marked.right]] = True
    measurements = (
        intervals.measure_share("recall", first),
        intervals.measure_share("any_of_k", any_right),
        ranking.measure_ranked_recall("recall_at_100_errors", marked.example, marked.right, n, 100),
        ranking.measure_ranked_recall(
            "recall_at_10pct_errors", marked.example, marked.right, n, max(1, n // 10)
        ),
    )
    wrong = int((~marked.right).sum())
    return SubmissionScore(
        marked.answers,
        marked.answered_example_count,
        answered_only,
        len(marked.right),
        wrong,
        measurements,
    )


def trace_submission_recall(marked: MarkedGuesses, answered_only: bool) -> list[CurvePoint]:
    """Return the recall curve: a point for each number k of wrong guesses, from 0.

    The point's value is the share of examples solved before wrong guess k + 1. Recall at E errors
    is the value at k = E - 1, because the E-th wrong guess ends the count.
    """
    # Wrong guesses before each first right guess, which adds none.
    before = np.cumsum(~marked.right)[
        ranking.find_first_right_guesses(marked.example, marked.right)
    ]
    solved = np.cumsum(np.bincount(before, minlength=int((~marked.right).sum()) + 1))
    n = marked.count_examples(answered_only)
    return [(wrong, count, count / n) for wrong, count in enumerate(solved.tolist())]


def write_submission_curve(path: Path, points: list[CurvePoint]) -> None:
    """Write the curve as CSV; raise AuditError if the file cannot be written."""
    lines = [
        "wrong_guesses,solved,recall",
        *(f"{wrong},{solved},{recall:.6g}" for wrong, solved, recall in points),
    ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise AuditError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _read_submission_guesses(path: Path) -> Iterator[tuple[str, int, list[int]]]:
    """Yield (file and line, example id, tokens) for each line after the header."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            for name in (ID, GUESS):
                if (times := list(rows.fieldnames or ()).count(name)) != 1:
                    raise AuditError(
                        f"{str(path)!r}: expected the columns {ID} and {GUESS} in line 1, got "
                        f"{times or 'no'} {name}"
                    )
            for row in rows:
                place = f"{str(path)!r}, line {rows.line_num}"
                yield (
                    place,
                    _parse_submission_example_id(place, row[ID]),
                    _parse_submission_guess_tokens(place, row[GUESS]),
                )
    except OSError as error:
        raise AuditError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise AuditError(f"{str(path)!r}: expected a CSV file in UTF-8, got other bytes") from None
    except csv.Error as error:
        raise AuditError(
            f"{str(path)!r}: expected a CSV file, got a broken line {rows.line_num + 1}: {error}"
        ) from None


def _parse_submission_example_id(where: str, text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise AuditError(f"{where}: expected a whole number as {ID}, got something else") from None


def _parse_submission_guess_tokens(where: str, text: str | None) -> list[int]:
    try:
        tokens: Any = json.loads(text or "")
    except (ValueError, RecursionError):
        tokens = None
    if not isinstance(tokens, list) or any(type(token) is not int or token < 0 for token in tokens):
        raise AuditError(
            f"{where}: expected token ids like [6,0,12] as {GUESS}, got something else"
        )
    return tokens

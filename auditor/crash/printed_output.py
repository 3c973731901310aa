"""Capture the text that a training prints, and compare the texts of two trainings.

A claim does not cover printed numbers that depend on the records.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?\.?")
# a line without its numbers -> the numbers each time it was printed
_Lines = dict[str, list[tuple[str, ...]]]


@dataclass
class PrintedText:
    """Hold the text that a training printed to standard output, standard error and the root logger.

    before_step: True between the model's forward pass and the step. early: the text printed in this
    time, which may describe the gradient that the step will release.
    """

    before_step: bool = False
    text: str = ""
    early: str = ""

    def append_before_or_after_step(self, text: str) -> None:
        if self.before_step:
            self.early += text
        else:
            self.text += text

    @contextmanager
    def capture_printed_text_context(self) -> Iterator[None]:
        """Capture all text printed inside the context; the text is still printed."""
        handler = logging.StreamHandler(_Tee(None, self.append_before_or_after_step))
        # The root logger receives all loggers except those that do not propagate.
        logging.getLogger().addHandler(handler)
        try:
            with (
                contextlib.redirect_stdout(_Tee(sys.stdout, self.append_before_or_after_step)),
                contextlib.redirect_stderr(_Tee(sys.stderr, self.append_before_or_after_step)),
            ):
                yield
        finally:
            logging.getLogger().removeHandler(handler)


class _Tee(io.TextIOBase):
    def __init__(self, stream: Any, add: Callable[[str], None]) -> None:
        self._stream = stream
        self._add = add

    def write(self, text: str) -> int:
        self._add(text)
        if self._stream is not None:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())


def find_differing_line(first_text: str, other: str, again: str) -> tuple[str, str] | None:
    """Return both texts' versions of the first line in which numbers differ; None if there is none.

    again: the text of a repeated training. Numbers that also differ from this text are ignored,
    because they may be times.
    """
    first, second, third = map(_group_printed_numbers, (first_text, other, again))
    for line, rows in first.items():
        same = third.get(line, [])
        current = second.get(line, [])
        if len(same) != len(rows):
            continue
        if len(current) != len(rows):
            return _fill_numbers_into_printed_line(
                line, rows[0]
            ), f"{len(current)} such lines for {len(rows)}"
        # Numbers that repeat in the same training: times and speeds do not.
        steady = [
            at
            for at in range(line.count("#"))
            if all(a[at] == b[at] for a, b in zip(rows, same, strict=True))
        ]
        for a, b in zip(rows, current, strict=True):
            if any(a[at] != b[at] for at in steady):
                return _fill_numbers_into_printed_line(line, a), _fill_numbers_into_printed_line(
                    line, b
                )
    new = next((line for line in second if line not in first and line not in third), None)
    # A new line says nothing if the same training, run once more, prints other lines too.
    if new is None or set(first) != set(third):
        return None
    return ("nothing", _fill_numbers_into_printed_line(new, second[new][0]))


def _group_printed_numbers(text: str) -> _Lines:
    """Return the numbers of each line, keyed by the line with `#` in place of numbers."""
    lines: _Lines = {}
    for line in text.split("\n"):
        visible = line.rstrip("\r").split("\r")[-1].strip()  # the final text of a progress bar
        # In a line's key `#` represents a number, so drop any `#` of the text.
        plain = visible.replace("#", "")
        if visible:
            lines.setdefault(_NUMBER.sub("#", plain), []).append(tuple(_NUMBER.findall(plain)))
    return lines


def _fill_numbers_into_printed_line(line: str, numbers: tuple[str, ...]) -> str:
    parts = line.split("#")
    return "".join(part + number for part, number in zip(parts, (*numbers, ""), strict=True))[:80]

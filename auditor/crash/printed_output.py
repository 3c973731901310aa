"""What a training prints, so that two can be compared: numbers that follow its records are outside
the claim."""

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
# a line without its numbers -> the numbers, wherever it was printed
_Lines = dict[str, list[tuple[str, ...]]]


@dataclass
class PrintedText:
    """The text of standard output, standard error and the root logger.

    before_step: the model was read, and its step is not taken yet. What is printed then may be of
    the gradient that the step is about to release, so it is kept apart.
    """

    before_step: bool = False
    text: str = ""
    early: str = ""  # of what was printed before its step

    def append_before_or_after_step(self, text: str) -> None:
        if self.before_step:
            self.early += text
        else:
            self.text += text

    @contextmanager
    def capture_printed_text_context(self) -> Iterator[None]:
        """A context that adds all that is printed inside it; it is printed where it was before,
        too."""
        handler = _Handler(self.append_before_or_after_step)
        # The root logger hears all loggers but those that do not propagate.
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
        self._stream, self._add = stream, add

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


class _Handler(logging.Handler):
    def __init__(self, add: Callable[[str], None]) -> None:
        super().__init__()
        self._said = add

    def emit(self, record: logging.LogRecord) -> None:
        self._said(record.getMessage() + "\n")


def first_printed_line_with_other_numbers(
    one: str, other: str, again: str
) -> tuple[str, str] | None:
    """The first line whose numbers differ from one to the other, as each has it; None: there is
    none.

    again: of the same training once more. What differs there too, as times do, says nothing.
    """
    first, second, third = map(_numbers_by_printed_line, (one, other, again))
    for line, rows in first.items():
        same, now = third.get(line, []), second.get(line, [])
        if len(same) != len(rows):
            continue
        if len(now) != len(rows):
            return _fill_numbers_into_printed_line(
                line, rows[0]
            ), f"{len(now)} such lines for {len(rows)}"
        # Which of the line's numbers are the same again in the same training: times and speeds are
        # not.
        steady = [
            at
            for at in range(line.count("#"))
            if all(a[at] == b[at] for a, b in zip(rows, same, strict=True))
        ]
        for a, b in zip(rows, now, strict=True):
            if any(a[at] != b[at] for at in steady):
                return _fill_numbers_into_printed_line(line, a), _fill_numbers_into_printed_line(
                    line, b
                )
    new = next((line for line in second if line not in first and line not in third), None)
    # A new line says nothing where the same training, once more, prints other lines too.
    return (
        None
        if new is None or set(first) != set(third)
        else ("nothing", _fill_numbers_into_printed_line(new, second[new][0]))
    )


def _numbers_by_printed_line(text: str) -> _Lines:
    found: _Lines = {}
    for line in text.split("\n"):
        shown = line.rstrip("\r").split("\r")[-1].strip()  # what a bar leaves
        # In a line's key `#` stands for a number, so the text may have none of its own.
        plain = shown.replace("#", "")
        if shown:
            found.setdefault(_NUMBER.sub("#", plain), []).append(tuple(_NUMBER.findall(plain)))
    return found


def _fill_numbers_into_printed_line(line: str, numbers: tuple[str, ...]) -> str:
    parts = line.split("#")
    return "".join(part + number for part, number in zip(parts, (*numbers, ""), strict=True))[:80]

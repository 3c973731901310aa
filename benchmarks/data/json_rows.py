"""Read JSON objects, one per row; errors name lines, rows and keys, never other content."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from auditor.benchmarks.data.compressed import read_table_bytes
from auditor.core.errors import AuditError

ABSENT = object()  # a JSON object without this key
_BETWEEN = re.compile(r"[\s,]*")  # between the rows of an array


class RepeatedKeyError(ValueError):
    """Report a JSON object that has a key twice; the argument is the key."""


def _build_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKeyError(next(name for name in value if names.count(name) > 1))
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_build_object)


def parse_strict_json(text: str) -> Any:
    """Parse a JSON text as `json.loads` does; raise RepeatedKeyError if a key occurs twice."""
    return _DECODER.decode(text)


def read_utf8_table_text(where: str, path: Path) -> str:
    """Read a file as text, dropping a byte order mark.

    Raise AuditError with the position of the first byte that is not UTF-8.
    """
    try:
        return read_table_bytes(where, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:  # from None: the error holds the whole file
        raise AuditError(
            f"{where}: expected UTF-8 text, got something else at byte {error.start}: save the "
            "file as UTF-8"
        ) from None


def describe_cell_value_type(value: Any) -> str:
    """Describe the type of a value in a table, without its content."""
    if value is ABSENT:
        return "nothing (the row does not have it)"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, float) and value != value:
        return "NaN"
    kinds: dict[type, str] = {
        type(None): "null",
        str: "text",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)


def stream_json_rows(where: str, path: Path) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield each JSON object and its line; None if the file is an array instead of lines."""
    text = read_utf8_table_text(where, path)
    if re.match(r"\s*\[.*\]\s*\n\s*\[", text):
        require_json_object(where, 0, [])  # raises: each line is an array
    if text.lstrip().startswith("["):
        for row, value in enumerate(parse_table_json(where, text, 0)):
            yield require_json_object(where, row, value), None
        return
    row = 0
    # not splitlines: a JSON text may hold U+2028, at which it would split
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            value = parse_table_json(where, line, number)
            yield require_json_object(where, row, value), line
            row += 1


def require_json_object(where: str, row: int, value: Any) -> dict[str, Any]:
    """Return the value; raise AuditError, with the row number, if it is not an object."""
    if not isinstance(value, dict):
        got = describe_cell_value_type(value)
        raise AuditError(
            f"{where}, row {row} (counted from 0): expected a JSON object, got {got}: write it "
            'as {"text": ...} or {"messages": [...]}'
        )
    return value


def parse_table_json(where: str, text: str, lines_before: int) -> Any:
    """Parse a JSON text; if it is invalid, raise AuditError with the line number but not the text.

    lines_before: number of lines in the file before this text.
    """
    try:
        return parse_strict_json(text)
    except json.JSONDecodeError as error:  # from None: the error holds the text
        line = lines_before + error.lineno
        raise AuditError(
            f"{where}, line {line}: not JSON: {error.msg} (column {error.colno}); expected an "
            "object on each line, or one array of objects"
        ) from None
    except RepeatedKeyError as error:
        place = f"line {lines_before + 1}"
        if text.lstrip().startswith("["):
            place = f"row {_count_strict_rows(text)} (counted from 0)"
        raise AuditError(
            f"{where}, {place}: expected each key once, got {str(error)!r} twice"
        ) from None
    except (ValueError, RecursionError):
        line = lines_before + 1
        raise AuditError(
            f"{where}, line {line}: not JSON that can be read (too long or too deep)"
        ) from None


def _count_strict_rows(text: str) -> int:
    """Return how many rows of a JSON array are before the first one with a repeated key."""
    place = text.index("[") + 1
    n_rows = 0
    while True:
        match = _BETWEEN.match(text, place)
        assert match is not None
        try:
            _, place = _DECODER.raw_decode(text, match.end())
        except RepeatedKeyError:
            return n_rows
        n_rows += 1

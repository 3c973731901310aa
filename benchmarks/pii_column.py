"""The column `pii` of a data file: what of each row is personal data, by kind. A convention; knows no files.

{"name": ["Jane Doe"], "address": ["12 Oak Street"]}: a text or several of each kind, as they stand in the row. Kinds
are the data's own; reports show them, and never what is of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from auditor.core.nouns import Mark

COLUMN = "pii"
MOST = 50  # kinds: reports show them
_KIND = re.compile("[a-z][a-z0-9-]{0,31}")


def parse_personal_data_marks(value: Any) -> tuple[Mark, ...]:
    """What one row marks. Raises ValueError, in words that may be shown, for anything but texts by kind."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):  # CSV is text all over
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("text that is no JSON") from None
    if not isinstance(value, dict):
        raise ValueError("no object")
    return tuple(dict.fromkeys(_validated_personal_data_marks(value)))


def _validated_personal_data_marks(texts: dict[Any, Any]) -> Iterator[Mark]:
    for kind, said in texts.items():
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise ValueError("a kind that is no word in small letters, digits and hyphens (at most 32)")
        listed = [] if said is None else said if isinstance(said, list) else [said]  # Parquet fills up with null
        for text in listed:
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"something else than text for {kind}")
            yield kind, text.strip()

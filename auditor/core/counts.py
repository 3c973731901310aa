"""Format counts with their nouns."""

from __future__ import annotations


def format_count(n: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun, such as `1 row` or `1,200 rows`.

    `plural` is the plural, if it is irregular.
    """
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"

"""Counts in sentences."""

from __future__ import annotations


def counted(n: int, one: str, more: str = "") -> str:
    """`1 row`, `1,200 rows`; more: the plural where it is not made by an s, as in `2 people`."""
    return f"{n:,} {one if n == 1 else more or one + 's'}"

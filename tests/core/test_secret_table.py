"""Tables of secrets: what is joined or replaced reads like secrets that are made one by one."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np

from auditor.core.nouns import Secret, Wording
from auditor.core.secret_table import build_secret_table, join_secret_tables


def draw_secrets(draw: random.Random, count: int) -> list[Secret]:
    """Draw secrets, some of which are windows of one text."""
    secrets: list[Secret] = []
    while len(secrets) < count:
        text = tuple(draw.randrange(50) for _ in range(draw.randrange(12)))
        wording = Wording(f"text {draw.randrange(9)}", 0, 1, 2, tuple(range(draw.randrange(4))))
        for end in sorted(draw.sample(range(len(text) + 1), min(len(text) + 1, 3))):
            given: dict[str, Any] = {"group": draw.choice([None, "g"]), "copies": draw.choice([2])}
            if draw.random() < 0.7:
                given["wording"] = wording
            id = f"s{len(secrets)}"
            secrets.append(Secret(id, text[: end // 2], text[end // 2 : end], **given))
    return secrets


def test_joined_parts_of_tables_are_their_secrets() -> None:
    draw = random.Random(0)
    for _ in range(60):
        first, second = draw_secrets(draw, 20), draw_secrets(draw, 9)
        places = draw.sample(range(len(first)), draw.randrange(len(first) + 1))
        part = build_secret_table(first)[np.array(places, int)]
        joined = join_secret_tables(part, build_secret_table(second))
        expected = [*map(first.__getitem__, places), *second]
        assert list(joined) == expected
        assert [s.wording for s in joined] == [s.wording for s in expected]
        assert len(joined.tokens) <= sum(len(s.tokens) for s in expected)


def test_windows_of_one_text_still_share_its_tokens() -> None:
    text = tuple(range(40))
    windows = [Secret(f"w{end}", text[: end - 5], text[end - 5 : end]) for end in (10, 20, 40)]
    other = build_secret_table([Secret("o", (7, 8), (9,))])
    joined = join_secret_tables(build_secret_table(windows)[np.array([0, 2])], other)
    assert joined.tokens.tolist() == [*text, 7, 8, 9] and joined.begins.tolist() == [0, 0, 40]


def test_a_column_of_defaults_is_left_out() -> None:
    secrets = [Secret("a", (1,), (2,), 3), Secret("b", (1,), (2,)), Secret("c", (1,), (), user="u")]
    table = build_secret_table(secrets)[:2]
    changed = table.replace_columns(repeats=np.array([-1, -1]), copies=np.array([4, -1]))
    assert changed.columns.keys() == {"id", "copies"}
    assert [(s.repeats, s.copies) for s in changed] == [(None, 4), (None, None)]


def test_joining_takes_little_more_than_the_joined_table() -> None:
    def make(label: str, count: int) -> Iterator[Secret]:
        for i in range(count):
            wording = Wording(f"a text of some fifty characters, which is number {i}", 0, 5, 9, ())
            yield Secret(f"{label}{i}", (i, 1, 2, 3), (4, 5, 6, 7), wording=wording)

    first, second = (build_secret_table(make(label, n)) for label, n in (("a", 9000), ("b", 9)))
    tracemalloc.start()
    joined = join_secret_tables(first[np.arange(9000)], second)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(joined) == 9009
    assert peak < 1.7 * kept

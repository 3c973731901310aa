"""Secrets as columns: the same secrets as objects, in a fraction of the memory."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from auditor.core.nouns import Canary, Secret, Wording
from auditor.core.secret_table import build_secret_table, select_members

SECRETS = (
    Secret("a", (1, 2), (3,)),
    Secret(
        id="b",
        prefix=(),
        suffix=(4, 5, 6),
        repeats=2,
        member=False,
        canary=Canary("x", coin=True),
        group="mails",
        wording=Wording.join("", "def", (1, 2, 3)),
        alias="sb",
        document="d",
        at=3,
        user="u",
        user_trained=True,
        copies=7,
    ),
    Secret("c" * 40, (9,), (8, 2**31 - 1), repeats=0),
)


WORDINGS = (
    Wording("A long text.", 0, 2, 6, (2, 4), (("name", "long"),)),
    Wording("A long text.", 2, 6, 12, (1, 6), (("name", "long"),)),
    None,
    Wording("Others", 0, 1, 6, (5,)),
)


def list_fields(secret: Secret) -> list[object]:
    return [getattr(secret, name) for name in Secret.__slots__]


def test_a_table_gives_back_every_field_of_every_secret() -> None:
    table = build_secret_table(iter(SECRETS))
    assert list(map(list_fields, table)) == list(map(list_fields, SECRETS))
    assert [table[i] for i in (0, 1, -1)] == [SECRETS[0], SECRETS[1], SECRETS[-1]]
    assert table == SECRETS and table != SECRETS[:2]
    with pytest.raises(IndexError):
        table[3]
    assert list(table.texts) == [secret.tokens for secret in SECRETS]
    assert list(table.suffixes) == [secret.suffix for secret in SECRETS]
    assert build_secret_table(table) is table
    assert len(build_secret_table(())) == 0


def test_parts_of_a_table_are_tables_and_travel_without_the_rest() -> None:
    table = build_secret_table(SECRETS)
    part = table[np.array([2, 0])]
    assert part == [SECRETS[2], SECRETS[0]] and table[1:] == SECRETS[1:]
    again = pickle.loads(pickle.dumps(part))
    assert again == part and len(again.tokens) == 6
    assert select_members(table) == [SECRETS[0], SECRETS[2]]
    assert select_members(SECRETS, False) == [SECRETS[1]]
    prefixes, suffixes = table.stack_tokens(np.array([0]))
    assert prefixes.tolist() == [[1, 2]] and suffixes.tolist() == [[3]]


def test_wordings_are_columns_in_which_a_record_has_its_text_once() -> None:
    secrets = [Secret(f"{i}", (1,), (2,), wording=wording) for i, wording in enumerate(WORDINGS)]
    # more than a batch, so that parts are joined
    table = build_secret_table(secrets * 2000)
    assert [secret.wording for secret in table] == list(WORDINGS) * 2000
    assert [secret.wording for secret in table[np.array([8, 3, 2, 5])]] == [
        *(WORDINGS[0], WORDINGS[3], WORDINGS[2], WORDINGS[1])
    ]
    first, second = build_secret_table(secrets[:2])
    assert first.wording is not None and second.wording is not None
    assert first.wording.text is second.wording.text


def test_a_secret_takes_little_more_than_its_tokens_and_id() -> None:
    def make(count: int) -> Iterator[Secret]:
        for i in range(count):
            tokens = tuple(range(1000 + i, 1016 + i))
            yield Secret(f"example-{i:06d}", tokens[:8], tokens[8:])

    count = 20_000
    tracemalloc.start()
    table = build_secret_table(make(count))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 16 tokens of 4 bytes, an id of 16, and where the tokens lie
    assert len(table) == count and held < 120 * count


def test_the_windows_of_a_text_hold_its_tokens_once() -> None:
    text = tuple(range(1000))
    windows = [Secret(f"w-{at}", text[:at], text[at : at + 50]) for at in range(50, 1000, 50)]
    other = Secret("other", (7, 8), (9,))
    table = build_secret_table([*windows, other, other, *windows])
    assert table == [*windows, other, other, *windows]
    assert len(table.tokens) == 2 * 1000 + 3
    places = np.array([0, len(windows) + 2])
    assert table.stack_tokens(places)[1].tolist() == [list(range(50, 100))] * 2


def test_a_wording_takes_little_more_than_its_text() -> None:
    count = 20_000
    texts = [f"{i:06d} wrote a text of some words" for i in range(count)]

    def make() -> Iterator[Secret]:
        for i, text in enumerate(texts):
            wording = Wording(text, 0, 6, len(text), tuple(range(6, 10)))
            yield Secret(f"example-{i:06d}", (1,), (2, 3, 4, 5), wording=wording)

    tracemalloc.start()
    table = build_secret_table(make())
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # a text of 34 bytes, seven numbers of 4, an id of 16, and where they lie
    assert len(table) == count and held < 160 * count

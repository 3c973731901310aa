"""What a base goes on with by itself: blocks of a text, against a count by hand and against greedy decoding."""

from __future__ import annotations

import pytest

from benchmarks.checks.trust.base_memory import longest_block


@pytest.mark.parametrize(
    ("tokens", "right", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], [False] * 4, (0, 0)),
        ([1, 2, 3, 4, 5, 6], [True] * 4, (4, 6)),
        ([1, 2, 3, 4, 5, 6, 7], [True, True, False, True, True], (2, 4)),  # the first of two
        # 1 2 3 4 again: its last token ends an n-gram that is there before, and counts for nothing
        ([1, 2, 3, 4, 1, 2, 3, 4, 5], [True] * 5, (4, 9)),
        ([9] * 12, [True] * 8, (0, 0)),
    ],
)
def test_a_block_is_what_is_guessed_in_a_row_and_not_copied(
    tokens: list[int], right: list[bool], expected: tuple[int, int]
) -> None:
    assert longest_block(tokens, right) == expected

"""Represent all possible texts of a canary, given by a format such as `My ID is {digits:6}`.

No text of a space starts with another text. So texts can be parsed, and any tokenisation can be
searched as a tree whose leaves are the texts.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from auditor.core.errors import AuditError, refuse_unknown_names

CHARACTERS: Mapping[str, str] = {
    "digits": string.digits,
    "letters": string.ascii_lowercase,
    "upper": string.ascii_uppercase,
    "alnum": string.ascii_lowercase + string.digits,
    "hex": string.hexdigits[:16],
}
_LONGEST = 1000  # drawn characters and words
State = tuple[int, str]  # (index of the part of the text, its characters so far)


@dataclass(frozen=True)
class CanarySpace:
    """All texts of a format whose slots are filled with random characters or words.

    The slot `{digits:6}` is filled with six digits, and `{name:3}` with three words from the list
    `name`, separated by spaces. `{{` and `}}` are literal braces. `lists` holds the name and the
    words of each list. Raise AuditError if the format is invalid, if it has fewer than two texts,
    or if one text is a prefix of another.
    """

    format: str
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        if self.size < 2:
            raise AuditError(
                "expected a format with a slot that several texts fit, such as "
                f"'My ID is {{digits:6}}', got {self.format!r}, which {self.size} fits"
            )
        # It is enough to compare neighbours: if a text is a prefix of another, it is also a prefix
        # of every text sorted between them.
        if any(
            next_text.startswith(text)
            for block in self.choice_blocks
            for text, next_text in pairwise(sorted(block))
        ):
            raise AuditError(
                f"expected that no text of the format {self.format!r} begins another, but its "
                "lists contain words that begin others: end each slot of words with a character "
                "that no word contains"
            )

    @cached_property
    def _head_and_choice_blocks(self) -> tuple[str, tuple[tuple[str, ...], ...]]:
        """Return the text before the first slot, and the choices for each random character or word.

        Literal text after a slot is appended to each choice for the slot's last character or word.
        For example, `a{digits:2}z` gives ("a", (("0", ..., "9"), ("0z", ..., "9z"))).
        """
        pieces: list[list[str]] = [[""]]
        for literal, slot in parse_canary_format(self.format):
            pieces[-1] = [piece + literal for piece in pieces[-1]]
            pieces += self._slot_choices(slot) if slot else []
            if len(pieces) > _LONGEST + 1:
                raise AuditError(
                    f"expected a format of at most {_LONGEST:,} characters and words to draw, got "
                    "more"
                )
        return pieces[0][0], tuple(map(tuple, pieces[1:]))

    def _slot_choices(self, slot: str) -> list[list[str]]:
        """Return the possible strings for each character or word of a slot.

        If the slot's word list is empty, the whole space is empty.
        """
        name, _, count = slot.partition(":")
        words = dict(self.lists).get(name)
        known = {*CHARACTERS, *dict(self.lists)}
        refuse_unknown_names(f"slot in the format {self.format!r}:", [name], known)
        # int() accepts too much: "+5", "1_0" and the digits of other scripts.
        if not re.fullmatch("[0-9]{1,4}", count or "1") or not 1 <= int(count or "1") <= _LONGEST:
            raise AuditError(
                f"expected a whole number of at least 1 in the slot {{{slot}}} and at most "
                f"{_LONGEST}, got {count!r}"
            )
        n_blocks = int(count or "1")
        if words is None:
            return [list(CHARACTERS[name])] * n_blocks
        if not all(words):
            raise AuditError(f"expected words in the list {name!r}, got an empty one")
        return [[f"{word} " for word in words]] * (n_blocks - 1) + [list(words)]

    @property
    def common_prefix(self) -> str:
        """Text before the first slot, with which every text starts."""
        return self._head_and_choice_blocks[0]

    @property
    def choice_blocks(self) -> tuple[tuple[str, ...], ...]:
        """Possible strings for each random character or word, in text order.

        No string in a block starts with another string.
        """
        return self._head_and_choice_blocks[1]

    @property
    def size(self) -> int:
        return math.prod(map(len, self.choice_blocks))

    @property
    def bits(self) -> float:
        """log2 of the number of texts; the exposure of a text that ranks first."""
        return math.log2(self.size)

    def __contains__(self, text: str) -> bool:
        state = self.state_after_text(text)
        return state is not None and self.is_complete_text_state(state)

    def texts(self) -> Iterator[str]:
        for choices in product(*self.choice_blocks):
            yield self.common_prefix + "".join(choices)

    def draw(self, noise: np.random.Generator) -> str:
        """Draw a text uniformly at random, using `noise`."""
        # Every text is equally likely: no choice of a block is a prefix of another, so a text has
        # only one composition.
        return self.common_prefix + "".join(
            block[int(noise.integers(len(block)))] for block in self.choice_blocks
        )

    # --- character by character ---

    def state_after_text(self, text: str) -> State | None:
        """Return the state after reading `text` (see `list_transitions`).

        Return None if no text of the space starts with `text`.
        """
        state: State | None = (0, "")
        for character in text:
            if state is not None:
                state = dict(self.list_transitions(state)).get(character)
        return state

    def is_complete_text_state(self, state: State) -> bool:
        """Return whether the characters read so far are a complete text of the space."""
        return state[0] == len(self._next_characters)

    def list_transitions(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield each character that may come next, with the state after that character.

        A state says how much of a text has been read. The state (0, "") is the start of a text.
        """
        if not self.is_complete_text_state(state):
            block, prefix = state
            for character in self._next_characters[block][prefix]:
                longer = prefix + character
                unfinished = longer in self._next_characters[block]
                yield character, (block, longer) if unfinished else (block + 1, "")

    @cached_property
    def _next_characters(self) -> list[dict[str, str]]:
        """Return, for each block of choices, the characters that may follow each start of a choice.

        For example, the block ("no", "yes") gives {"": "ny", "n": "o", "y": "e", "ye": "s"}. The
        text before the first slot, if any, is a block with one choice, and comes first.
        """
        tables: list[dict[str, str]] = []
        # Omit the block of an empty head: no character leads out of it.
        for block in (
            ((self.common_prefix,), *self.choice_blocks)
            if self.common_prefix
            else self.choice_blocks
        ):
            following: dict[str, set[str]] = {}
            for choice in block:
                for i, character in enumerate(choice):
                    following.setdefault(choice[:i], set()).add(character)
            tables.append({start: "".join(sorted(ends)) for start, ends in following.items()})
        return tables


def parse_canary_format(format: str) -> list[tuple[str, str]]:
    """Split a format into pairs of a text and the slot that follows it ("" at the end).

    Raise AuditError if the format is invalid.
    """
    try:
        parsed = list(string.Formatter().parse(format))
    except ValueError as error:
        raise AuditError(
            f"expected a format such as 'My ID is {{digits:6}}', got {format!r}: {error}"
        ) from error
    parts = []
    for text, name, count, conversion in parsed:
        slot = (
            f"{name or '?'}{f'!{conversion}' if conversion else ''}{f':{count}' if count else ''}"
        )
        # The name is None if no slot follows; the text already has `{` in place of `{{`.
        parts.append((text, "" if name is None else slot))
    return parts

"""Packed records that a model learnt after one another: both counts are said, and the smaller one
is in doubt."""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.core.nouns import Secret
from auditor.models.base import LanguageModel
from auditor.runs.packed_rows import compare_packed_records

SECRETS = tuple(Secret(f"s{i}", (1, 10 + i), (20 + i, 40 + i), 1) for i in range(8))
EARLIER = {secret.id: ((2, 60 + i), (3,), ()) for i, secret in enumerate(SECRETS)}


class Reciter(LanguageModel):
    """Says suffixes with the chance `by_itself`, `in_row` after their row's own tokens, `elsewhere`
    after others."""

    name, vocab_size, capabilities = "reciter", 80, frozenset({"distribution"})

    def __init__(self, by_itself: float, in_row: float, elsewhere: float) -> None:
        self.chance = {"": by_itself, "in_row": in_row, "elsewhere": elsewhere}

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        found = torch.full((len(contexts), last, self.vocab_size), 1e-9)
        for row, text in enumerate(contexts.tolist()):
            number = text[-last] - 10
            where = "" if len(text) == 3 else "in_row" if text[1] == 60 + number else "elsewhere"
            chance = self.chance[where] * (1 - number / 100)
            found[row] = (1 - chance) / (self.vocab_size - 1)
            found[row, 0, 20 + number] = found[row, 1, 40 + number] = chance
        return found.log()


def compare(
    *chances: float, secrets: tuple[Secret, ...] = SECRETS, positions: int | None = None
) -> tuple[str, int]:
    model = Reciter(*chances)
    model.max_positions = positions
    said, doubts = compare_packed_records(model, secrets, EARLIER)
    assert all(
        doubt.kind == "text form" and said.partition(": ")[2] in doubt.sentence for doubt in doubts
    )
    return said, len(doubts)


def test_records_learnt_after_the_earlier_ones_of_their_row_are_a_doubt() -> None:
    said, doubts = compare(0.01, 0.9, 0.01)
    assert doubts == 1 and "row greedy decoding recites 8 of 8 (mean probability 75.5%)" in said
    assert "by themselves, as here, 0 of 8 (mean probability 0.0%)" in said


def test_text_before_a_record_that_helps_whatever_it_is_is_no_doubt() -> None:
    """Nor is text that does harm, as for a model that read each record by itself."""
    for chances in ((0.3, 0.9, 0.9), (0.9, 0.3, 0.3), (0.9, 0.9, 0.9)):
        said, doubts = compare(*chances)
        assert (
            doubts == 0
            and "8 of 8" in said
            and said.endswith("no difference that the row explains")
        )


def test_too_few_records_and_contexts_without_room_say_nothing() -> None:
    assert compare(0.01, 0.9, 0.01, secrets=SECRETS[:2]) == ("", 0)
    assert compare(0.01, 0.9, 0.01, positions=6) == ("", 0)
    assert compare(0.01, 0.9, 0.01, positions=7)[1] == 1


class PositionReciter(Reciter):
    """Recites after its row's own tokens, if each record's positions begin at 0."""

    def log_probs_at_positions(self, texts: Tensor, positions: Tensor, last: int) -> Tensor:
        assert positions.tolist() == [[0, 1, 0, 0, 1, 2, 3]]
        found = Reciter(0.01, 0.9, 0.01).log_probs(texts[:, :-1], last - 1)
        return torch.cat([found, found[:, :1]], dim=1)


def test_records_at_positions_of_their_own_are_read_so_too() -> None:
    """Falcon with rotary positions: 12 of 12 in their rows, and neither running on nor alone."""
    model = PositionReciter(0.01, 0.01, 0.01)
    said, doubts = compare_packed_records(model, SECRETS, EARLIER)
    assert len(doubts) == 1
    assert "row, each record at positions from 0 on, greedy decoding recites 8 of 8" in said

"""Private records in the context of one model, as the members of an ensemble: it knows what it
reads, and no more.

The records are dealt into batches. A text is answered by the batch that it is asked of, member j by
the model with the j-th record of that batch in front of the text, the public part by the model with
nothing in front. Knows no privacy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.models.rows import Rows


@dataclass(frozen=True)
class InContextRecordBatches:
    """Records in batches of `size` at most; `asked`: the batch that answers a text, by how the text
    begins.

    A text with none of these beginnings is answered by the first batch.
    """

    records: tuple[tuple[Tokens, ...], ...]
    size: int
    asked: Mapping[Tokens, int]

    def batch_of_each_text(self, texts: Tensor) -> list[int]:
        """The batch that answers each of the texts (B, n); of several beginnings in `asked`, the
        longest decides."""
        lengths = sorted({len(begin) for begin in self.asked}, reverse=True)
        rows = map(tuple, texts.tolist())
        return [
            next(
                (self.asked[row[:n]] for n in lengths if n <= len(row) and row[:n] in self.asked), 0
            )
            for row in rows
        ]

    def record(self, batch: int, part: int) -> Tokens:
        """What stands before a text that this part answers; nothing for part 0, and where the batch
        has no more."""
        own = self.records[batch]
        return own[part - 1] if 0 < part <= len(own) else ()

    @property
    def longest_record_token_count(self) -> int:
        return max((len(record) for batch in self.records for record in batch), default=0)


class InContextEnsemble(Ensemble):
    """The records of `InContextRecordBatches` in front of what a public model reads. AuditError:
    they leave no room."""

    unit = "record"

    def __init__(self, public: LanguageModel, batches: InContextRecordBatches) -> None:
        room = public.max_positions
        if (
            room is not None and batches.longest_record_token_count + 2 > room
        ):  # a token of the text, and one that follows it
            raise AuditError(
                f"expected records that leave room behind them in the {room} positions of "
                f"{public.name}, got one of {batches.longest_record_token_count} tokens"
            )
        self.public, self.batches, self.size = public, batches, batches.size

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        return _RecordPrefixedRows(self, prefixes.to(self.public.device), length, prompt)

    def log_probs(
        self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None
    ) -> Tensor:
        contexts, pieces = contexts.to(self.public.device), list[Tensor]()
        order: list[int] = []
        for where, read in self._prepend_records_by_length(contexts, part.tolist()):
            if self.public.max_positions is not None and read.shape[1] > self.public.max_positions:
                raise AuditError(
                    f"expected record and text to fit the {self.public.max_positions} positions of "
                    f"{self.public.name}, got {read.shape[1]} tokens"
                )
            pieces.append(self.public.log_probs(read, last, prompt=prompt))
            order += where
        # argsort inverts the permutation that grouping by length made.
        return torch.cat(pieces)[torch.argsort(torch.tensor(order, device=contexts.device))]

    def _prepend_records_by_length(
        self, contexts: Tensor, parts: Sequence[int]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Which of the contexts, and what is read for them: those with a record of one length in
        front, together."""
        batch = self.batches.batch_of_each_text(contexts)
        records = [self.batches.record(b, part) for b, part in zip(batch, parts, strict=True)]
        for length in sorted({len(record) for record in records}):
            where = [i for i, record in enumerate(records) if len(record) == length]
            front = torch.tensor(
                [records[i] for i in where], dtype=torch.long, device=contexts.device
            )
            yield where, torch.cat([front.view(len(where), length), contexts[where]], dim=1)


class _RecordPrefixedRows(Rows):
    """Rows of the public model for every (row, part), in groups with a record of one length in
    front."""

    def __init__(
        self, held: InContextEnsemble, prefixes: Tensor, length: int, prompt: Tensor | None
    ) -> None:
        self.width, self.count = 1 + held.size, len(prefixes)
        parts = list(range(self.width)) * self.count
        # The prefix alone chooses the batch: what is drawn behind it changes it no more.
        self.groups: list[
            tuple[Rows, Tensor]
        ] = []  # and which (row, part) each of its rows is, counted row by row
        for where, read in held._prepend_records_by_length(
            prefixes.repeat_interleave(self.width, 0), parts
        ):
            rows = held.public.start(read, length, prompt=prompt)
            self.groups.append((rows, torch.tensor(where, device=prefixes.device)))

    def __len__(self) -> int:
        return self.count

    def log_probs(self) -> Tensor:
        """(rows, 1 + size, V)."""
        distributions = torch.cat([rows.log_probs() for rows, _ in self.groups])
        order = torch.argsort(torch.cat([where for _, where in self.groups]))
        return distributions[order].unflatten(0, (-1, self.width))

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        part = torch.arange(self.width, device=parents.device)
        parent = (parents.unsqueeze(-1) * self.width + part).flatten()
        token, groups = tokens.repeat_interleave(self.width), list[tuple[Rows, Tensor]]()
        for rows, where in self.groups:
            place = torch.full(
                (self.count * self.width,), -1, dtype=torch.long, device=parents.device
            )
            place[where] = torch.arange(len(where), device=parents.device)
            mine = (place[parent] >= 0).nonzero().squeeze(-1)
            if len(mine):
                rows.advance(place[parent[mine]], token[mine])
                # `mine` counts the new (row, part) pairs, as the next step does
                groups.append((rows, mine))
        self.groups, self.count = groups, len(parents)

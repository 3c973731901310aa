"""Treat private records in the context of one model as members of an ensemble.

The records are divided into batches, and the start of a text selects its batch. Member j is the
model with the batch's j-th record before the text. The public part reads only the text. This module
does not depend on privacy.
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
    """Private records, as tokens, in batches of at most `size`.

    A text is answered with the records of one batch, and the start of the text selects the batch.

    Attributes:
        records: the records of each batch.
        size: largest number of records in a batch.
        batch_by_start: index of the batch that answers the texts with this start, keyed by the
            start's tokens. The first batch answers all other texts.
    """

    records: tuple[tuple[Tokens, ...], ...]
    size: int
    batch_by_start: Mapping[Tokens, int]

    def batch_of_each_text(self, texts: Tensor) -> list[int]:
        """Return the index of the batch that answers each of the texts (B, n).

        The longest matching prefix in `batch_by_start` decides.
        """
        lengths = sorted({len(begin) for begin in self.batch_by_start}, reverse=True)
        batches = []
        for row in map(tuple, texts.tolist()):
            starts = (row[:n] for n in lengths if row[:n] in self.batch_by_start)
            batches.append(self.batch_by_start.get(next(starts, ()), 0))
        return batches

    def record(self, batch: int, part: int) -> Tokens:
        """Return the record that an ensemble part reads before a text.

        For part j, this is the j-th record of the batch with index `batch`. It is empty for part 0
        and for parts beyond the batch's records.
        """
        batch_records = self.records[batch]
        if 0 < part <= len(batch_records):
            return batch_records[part - 1]
        return ()

    @property
    def longest_record_token_count(self) -> int:
        return max((len(record) for batch in self.records for record in batch), default=0)


class InContextEnsemble(Ensemble):
    """Ensemble of one public model whose members have different private records in context.

    Raise AuditError if the longest record leaves no room for a text.
    """

    unit = "record"

    def __init__(self, public: LanguageModel, batches: InContextRecordBatches) -> None:
        room = public.max_positions
        # A token of the text, and the token after it.
        if room is not None and batches.longest_record_token_count + 2 > room:
            raise AuditError(
                f"expected records that leave room after them in the {room} positions of "
                f"{public.name}, got one of {batches.longest_record_token_count} tokens"
            )
        self.public = public
        self.batches = batches
        self.size = batches.size

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        return _RecordPrefixedRows(self, prefixes.to(self.public.device), length, prompt)

    def log_probs(
        self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None
    ) -> Tensor:
        contexts = contexts.to(self.public.device)
        pieces = list[Tensor]()
        order: list[int] = []
        for indices, model_input in self._prepend_records_by_length(contexts, part.tolist()):
            if (
                self.public.max_positions is not None
                and model_input.shape[1] > self.public.max_positions
            ):
                raise AuditError(
                    f"expected record and text to fit the {self.public.max_positions} positions of "
                    f"{self.public.name}, got {model_input.shape[1]} tokens"
                )
            pieces.append(self.public.log_probs(model_input, last, prompt=prompt))
            order += indices
        # argsort inverts the permutation of the grouping by length.
        return torch.cat(pieces)[torch.argsort(torch.tensor(order, device=contexts.device))]

    def _prepend_records_by_length(
        self, contexts: Tensor, parts: Sequence[int]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (indices, inputs) for each group of contexts whose records have the same length.

        `parts` gives the ensemble part for each context. An input is the part's record followed by
        the context.
        """
        batch = self.batches.batch_of_each_text(contexts)
        records = []
        for b, part in zip(batch, parts, strict=True):
            records.append(self.batches.record(b, part))
        for length in sorted({len(record) for record in records}):
            indices = []
            for i, record in enumerate(records):
                if len(record) == length:
                    indices.append(i)
            front = torch.tensor(
                [records[i] for i in indices], dtype=torch.long, device=contexts.device
            )
            yield indices, torch.cat([front.view(len(indices), length), contexts[indices]], dim=1)


class _RecordPrefixedRows(Rows):
    """Decoding rows of the public model for every (row, part) pair, grouped by record length."""

    def __init__(
        self, ensemble: InContextEnsemble, prefixes: Tensor, length: int, prompt: Tensor | None
    ) -> None:
        self.width, self.count = 1 + ensemble.size, len(prefixes)
        parts = list(range(self.width)) * self.count
        # Only the prefix selects the batch: tokens drawn after it do not change the batch.
        # With the (row, part) index of each row, counted row by row.
        self.groups: list[tuple[Rows, Tensor]] = []
        for indices, model_input in ensemble._prepend_records_by_length(
            prefixes.repeat_interleave(self.width, 0), parts
        ):
            rows = ensemble.public.start(model_input, length, prompt=prompt)
            self.groups.append((rows, torch.tensor(indices, device=prefixes.device)))

    def __len__(self) -> int:
        return self.count

    def log_probs(self) -> Tensor:
        """Return the log-probabilities of all parts, of shape (rows, 1 + size, V)."""
        distributions = torch.cat([rows.log_probs() for rows, _ in self.groups])
        order = torch.argsort(torch.cat([indices for _, indices in self.groups]))
        return distributions[order].unflatten(0, (-1, self.width))

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        part = torch.arange(self.width, device=parents.device)
        parent = (parents.unsqueeze(-1) * self.width + part).flatten()
        token = tokens.repeat_interleave(self.width)
        groups = list[tuple[Rows, Tensor]]()
        for rows, pair_indices in self.groups:
            place = torch.full(
                (self.count * self.width,), -1, dtype=torch.long, device=parents.device
            )
            place[pair_indices] = torch.arange(len(pair_indices), device=parents.device)
            indices = (place[parent] >= 0).nonzero().squeeze(-1)
            if len(indices):
                rows.advance(place[parent[indices]], token[indices])
                # `indices` counts the new (row, part) pairs, as the next step does.
                groups.append((rows, indices))
        self.groups, self.count = groups, len(parents)

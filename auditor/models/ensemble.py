"""Query a public model and private member models, all together or one at a time.

Part 0 is the public model; parts 1..N are the members. This module does not depend on privacy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from auditor.models.base import LanguageModel, WholeTextRows
from auditor.models.rows import Rows
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.models.wrapping import MappedRows


class Ensemble(ABC):
    """A public model and `size` private member models that share a vocabulary.

    Part 0 is the public model, and parts 1 to `size` are the members. Each member is trained on its
    own shard, a part of the private records.

    Attributes:
        public: the public model, which saw no private data.
        size: number of members.
        unit: "record" or "user" if all data of one record or user are in the same shard; "" if
            unknown.
        shards: names of the records that each member was trained on; None if unknown.
    """

    public: LanguageModel
    size: int
    unit: str = ""  # all of a unit is in one shard: "record", "user"; "": unknown
    # Names of each member's records; None: unknown.
    shards: Sequence[Collection[str] | None] | None = None

    def count_shard_overlaps(self) -> dict[str, int]:
        """Return two counts, `shared_records` and `unlisted_shards`.

        The first is the number of records on which several members were trained. The second is the
        number of members without a list of their records.
        """
        shards = self.shards or [None] * self.size
        n_shards_by_record = Counter[str]()
        for shard in shards:
            n_shards_by_record.update(set(shard or ()))
        n_shared = sum(n_shards > 1 for n_shards in n_shards_by_record.values())
        n_unlisted = sum(shard is None for shard in shards)
        return {"shared_records": n_shared, "unlisted_shards": n_unlisted}

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        """Return decoding rows, one for each of the `prefixes` (B, n).

        `log_probs` of the rows has the distributions of all parts, (rows, 1 + size, V). `length` is
        the largest number of tokens to append to a row. `prompt` is a soft prompt (P, d) or None.
        """
        parts = torch.arange(1 + self.size, device=self.public.device)
        read_texts = partial(self.distributions, parts=parts, last=1, prompt=prompt)
        return WholeTextRows(read_texts, prefixes.to(self.public.device))

    @abstractmethod
    def log_probs(
        self,
        contexts: Tensor,
        part: Tensor,
        last: int,
        *,
        prompt: Tensor | None = None,
    ) -> Tensor:
        """Return log-probabilities of texts, each under one ensemble part, (B, last, V) nats.

        The result is differentiable with respect to `prompt`.

        Args:
            contexts: token ids (B, n).
            part: the part that reads each context, (B,); 0 is the public model.
            last: number of trailing positions.
            prompt: soft prompt (P, d) or None.
        """

    def distributions(
        self,
        contexts: Tensor,
        parts: Tensor,
        last: int,
        *,
        prompt: Tensor | None = None,
    ) -> Tensor:
        """Return every context's log-probabilities under each of `parts`, (B, last, parts, V) nats.

        The result is differentiable with respect to `prompt`.

        Args:
            contexts: token ids (B, n).
            parts: numbers of the parts that read every context; 0 is the public model.
            last: number of trailing positions.
            prompt: soft prompt (P, d) or None.
        """
        contexts = contexts.to(self.public.device)
        part = parts.repeat_interleave(len(contexts))
        distributions = self.log_probs(contexts.repeat(len(parts), 1), part, last, prompt=prompt)
        # (parts x B, last, V), a block of contexts for each part -> (B, last, parts, V)
        return distributions.unflatten(0, (len(parts), -1)).movedim(0, -2)

    def start_member_rows(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
    ) -> EnsembleMemberRows:
        """Return decoding rows that query single members, one row for each prefix.

        Args:
            prefixes: token ids (B, n).
            length: largest number of tokens to append to a row.
            prompt: soft prompt (P, d) or None.
        """
        return EnsembleMemberRows(self, prefixes, prompt)


class EnsembleMemberRows:
    """Decoding rows that query only a few members of an ensemble per token.

    The members change with each token, so each query reads the whole sequence again. `places` maps
    the parts of a `PermutedEnsemble` to those of the ensemble.
    """

    def __init__(self, ensemble: Ensemble, prefixes: Tensor, prompt: Tensor | None) -> None:
        self.ensemble = ensemble
        self.tokens = prefixes
        self.prompt = prompt
        self.places = torch.arange(1 + ensemble.size, device=ensemble.public.device)

    def __len__(self) -> int:
        return len(self.tokens)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        """Extend the rows: new row i is old row parents[i] followed by tokens[i]."""
        self.tokens = torch.cat([self.tokens[parents], tokens.unsqueeze(-1)], dim=1)

    def distributions(self, row: Tensor, part: Tensor) -> Tensor:
        """Return the next-token distribution of row row[i] under part part[i], (pairs, V) nats.

        Pair i consists of a row and a part of the ensemble; part 0 is the public model.
        """
        return self._query_pairs(row, self.places[part])

    @torch.no_grad()
    def _query_pairs(self, row: Tensor, part: Tensor) -> Tensor:
        return self.ensemble.log_probs(self.tokens[row], part, 1, prompt=self.prompt)[:, 0]


class ModelEnsemble(Ensemble):
    """An ensemble of separate models of any kind, each with its own forward pass."""

    def __init__(self, public: LanguageModel, members: Sequence[LanguageModel]) -> None:
        for member in members:
            check_same_vocabulary_size(
                "members", member.name, member.vocab_size, "the public model's", public.vocab_size
            )
        self.public = public
        self.parts = (public, *members)
        self.size = len(members)

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        return _SynchronisedRows(
            [part.start(prefixes, length, prompt=prompt) for part in self.parts],
        )

    def log_probs(
        self,
        contexts: Tensor,
        part: Tensor,
        last: int,
        *,
        prompt: Tensor | None = None,
    ) -> Tensor:
        # One forward pass of each part, with all its contexts.
        order = torch.argsort(part, stable=True)
        parts, counts = torch.unique_consecutive(part[order], return_counts=True)
        chunks = contexts[order].split(counts.tolist())
        distributions = []
        for index, chunk in zip(parts.tolist(), chunks, strict=True):
            distributions.append(self.parts[index].log_probs(chunk, last, prompt=prompt))
        return torch.cat(distributions)[torch.argsort(order)]  # argsort inverts a permutation


class _SynchronisedRows(Rows):
    """Rows of several models that all advance together with the same tokens."""

    def __init__(self, rows: list[Rows]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows[0])

    def log_probs(self) -> Tensor:
        return torch.stack([rows.log_probs() for rows in self.rows], dim=1)  # (rows, parts, V)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        for rows in self.rows:
            rows.advance(parents, tokens)


class PermutedEnsemble(Ensemble):
    """An ensemble whose members are reordered, replaced or removed.

    Part i of the new ensemble is part `places[i]` of the ensemble `inner`. To remove a member's
    private data, give its place to part 0, the public model.
    """

    def __init__(self, inner: Ensemble, places: Sequence[int]) -> None:
        self.inner = inner
        self.public = inner.public
        self.size = len(places) - 1
        self.unit = inner.unit
        self.places = torch.tensor(places, device=inner.public.device)
        if inner.shards is not None:
            self.shards = [inner.shards[place - 1] if place else () for place in places[1:]]

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        rows = self.inner.start(prefixes, length, prompt=prompt)
        return MappedRows(rows, lambda parts: parts[:, self.places])

    def log_probs(
        self,
        contexts: Tensor,
        part: Tensor,
        last: int,
        *,
        prompt: Tensor | None = None,
    ) -> Tensor:
        return self.inner.log_probs(contexts, self.places[part], last, prompt=prompt)

    def start_member_rows(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
    ) -> EnsembleMemberRows:
        rows = self.inner.start_member_rows(prefixes, length, prompt=prompt)
        rows.places = rows.places[self.places]
        return rows

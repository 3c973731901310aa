"""A public model and the private members beside it, asked together or one member at a time.

Part 0 is the public model, parts 1..N are the members. Knows nothing of privacy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from auditor.models.base import LanguageModel, Rows
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.models.wrapping import WrappingRows


class Ensemble(ABC):
    """A public model and `size` private members with one vocabulary."""

    public: LanguageModel
    size: int
    unit: str = ""  # what lies whole in one shard: "record", "user"; "": it does not say
    shards: Sequence[Collection[str] | None] | None = None  # names of each member's records; None: it does not say

    def shard_overlap_counts(self) -> dict[str, int]:
        """`shared_records`: how many records more than one shard has; `unlisted_shards`: members that do not say."""
        shards = self.shards or [None] * self.size
        seen = Counter(record for shard in shards if shard is not None for record in set(shard))
        shared = sum(count > 1 for count in seen.values())
        return {"shared_records": shared, "unlisted_shards": sum(shard is None for shard in shards)}

    @abstractmethod
    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        """Rows whose `log_probs` are those of every part, (rows, 1 + size, V)."""

    @abstractmethod
    def log_probs(self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        """(B, last, V): context b answered by part[b] alone (0: public). Differentiable in `prompt`."""

    def distributions(self, contexts: Tensor, parts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        """(B, last, parts, V): every context answered by each of these parts. Differentiable in `prompt`."""
        contexts = contexts.to(self.public.device)
        part = parts.repeat_interleave(len(contexts))
        distributions = self.log_probs(contexts.repeat(len(parts), 1), part, last, prompt=prompt)
        # (parts x B, last, V), a block of contexts for each part -> (B, last, parts, V)
        return distributions.unflatten(0, (len(parts), -1)).movedim(0, -2)

    def start_member_rows(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> EnsembleMemberRows:
        """The members behind rows that start as `prefixes` (B, n) and grow by `length` tokens, asked one at a time."""
        return EnsembleMemberRows(self, prefixes, prompt)


class EnsembleMemberRows:
    """Members behind decoding rows, few of which are asked at any token: each reads the whole row when asked."""

    def __init__(self, ensemble: Ensemble, prefixes: Tensor, prompt: Tensor | None) -> None:
        self.ensemble, self.tokens, self.prompt = ensemble, prefixes, prompt

    def __len__(self) -> int:
        return len(self.tokens)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        """As `Rows.advance`."""
        self.tokens = torch.cat([self.tokens[parents], tokens.unsqueeze(-1)], dim=1)

    @torch.no_grad()
    def distributions(self, row: Tensor, part: Tensor) -> Tensor:
        """(pairs, V) nats: the next-token distribution of row[i] by part[i]."""
        return self.ensemble.log_probs(self.tokens[row], part, 1, prompt=self.prompt)[:, 0]


class ModelEnsemble(Ensemble):
    """Members that are models of their own: any kind, one forward each."""

    def __init__(self, public: LanguageModel, members: Sequence[LanguageModel]) -> None:
        for member in members:
            check_same_vocabulary_size(
                "members", member.name, member.vocab_size, "the public model's", public.vocab_size
            )
        self.public = public
        self.parts = (public, *members)
        self.size = len(members)

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        return _SynchronisedRows([part.start(prefixes, length, prompt=prompt) for part in self.parts])

    def log_probs(self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        # One forward of each part that is asked, its contexts side by side.
        order = torch.argsort(part, stable=True)
        parts, counts = torch.unique_consecutive(part[order], return_counts=True)
        chunks = contexts[order].split(counts.tolist())
        distributions = [
            self.parts[int(p)].log_probs(chunk, last, prompt=prompt) for p, chunk in zip(parts, chunks, strict=True)
        ]
        return torch.cat(distributions)[torch.argsort(order)]  # argsort inverts a permutation


class _SynchronisedRows(Rows):
    """Rows of several models that always split alike."""

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
    """The members of an ensemble in other places: part i is answered by that ensemble's part places[i].

    A member without its private data has place 0, one that is replaced has the place of its stand-in, and an absent one
    has no entry.
    """

    def __init__(self, held: Ensemble, places: Sequence[int]) -> None:
        self.held, self.public, self.size, self.unit = held, held.public, len(places) - 1, held.unit
        self.places = torch.tensor(places, device=held.public.device)
        if held.shards is not None:
            self.shards = [held.shards[place - 1] if place else () for place in places[1:]]

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> Rows:
        return _PermutedRows(self.held.start(prefixes, length, prompt=prompt), self.places)

    def log_probs(self, contexts: Tensor, part: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        return self.held.log_probs(contexts, self.places[part], last, prompt=prompt)

    def start_member_rows(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None) -> EnsembleMemberRows:
        return _PermutedMemberRows(self, self.held.start_member_rows(prefixes, length, prompt=prompt))


class _PermutedRows(WrappingRows):
    def __init__(self, rows: Rows, places: Tensor) -> None:
        super().__init__(rows)
        self.places = places

    def log_probs(self) -> Tensor:
        return self.rows.log_probs()[:, self.places]


class _PermutedMemberRows(EnsembleMemberRows):
    def __init__(self, ensemble: PermutedEnsemble, members: EnsembleMemberRows) -> None:
        super().__init__(ensemble, members.tokens, members.prompt)
        self.places, self.members = ensemble.places, members

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.members.advance(parents, tokens)
        self.tokens = self.members.tokens

    def distributions(self, row: Tensor, part: Tensor) -> Tensor:
        return self.members.distributions(row, self.places[part])

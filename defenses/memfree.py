"""MemFree decoding (Ippolito et al. 2022): no token that would complete an n-gram of the training data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from rbloom import Bloom
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.base import LanguageModel, Rows
from auditor.models.wrapping import WrappingModel, WrappingRows
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.options import require_listed_options

_CONTEXTS = 100_000  # whose forbidden tokens are remembered


@dataclass(frozen=True)
class MemFree(Defense):
    """Forbid tokens that would complete an n-gram of the training data (MemFree, Ippolito et al. 2022). No claim.

    The distribution is the target's over the other tokens, renormalised; what was asked counts as text before the
    answer. n: of the n-grams, in tokens; filter: `exact` keeps them all, `bloom` a Bloom filter of them, which also
    forbids the share false_positives of all other tokens. Text that differs from the training data in one token of any
    n passes, and so do records shorter than n: `near-verbatim` and `exposure` measure that. Outside the lab the n-grams
    are --data's.
    """

    name: ClassVar[str] = "memfree"
    title: ClassVar[str] = "MemFree decoding"
    needs: ClassVar[tuple[str, ...]] = ("corpus",)
    claims: ClassVar[str] = "none: it forbids verbatim n-grams, and near-verbatim text passes"
    n: int = 10
    filter: Literal["exact", "bloom"] = "exact"
    false_positives: float = 0.01

    def __post_init__(self) -> None:
        if self.n < 2:
            raise AuditError(f"expected n >= 2 tokens, got {self.n}")
        require_listed_options(self)
        if not 0 < self.false_positives < 1:
            raise AuditError(f"expected false_positives in (0, 1), got {self.false_positives}")

    def protect(self, scenario: Scenario) -> LanguageModel:
        return MemFreeModel(scenario.target, self.n, self.training_ngram_filter(scenario))

    def claim(self, scenario: Scenario, spent: int) -> None:
        """None. Raises AuditError where there is nothing to forbid, before a run has gone on for hours."""
        if not any(len(record) >= self.n for record in scenario.corpus):
            raise AuditError(
                f"expected training records of n={self.n} tokens or more for memfree, got {len(scenario.corpus):,} "
                "records, none of them as long"
            )

    def training_ngram_filter(self, scenario: Scenario) -> ForbiddenNGramFilter:
        # Raises where there is nothing to forbid.
        self.claim(scenario, 0)
        found = {gram for record in scenario.corpus for gram in ngrams_of_training_record(record, self.n)}
        if self.filter == "bloom":
            return BloomNGrams(found, scenario.target.vocab_size, self.false_positives)
        return ExactNGrams(found)

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        short = sum(len(record) < self.n for record in scenario.corpus)
        return (
            f"memfree forbids the {self.n}-grams of {len(scenario.corpus):,} training texts (records, whole and cut), "
            f"{short:,} of them too short to have one; text that differs in a token passes: near-verbatim measures it",
        )


def ngrams_of_training_record(record: Tokens, n: int) -> Iterator[Tokens]:
    return (record[i : i + n] for i in range(len(record) - n + 1))


class ForbiddenNGramFilter(ABC):
    """A set of n-grams, asked for those that begin with a context of n-1 tokens."""

    @abstractmethod
    def tokens_completing_ngram(self, context: Tokens) -> Tokens:
        """The tokens that would complete an n-gram of the set behind this context."""


class ExactNGrams(ForbiddenNGramFilter):
    def __init__(self, held: set[Tokens]) -> None:
        self.next: dict[Tokens, list[int]] = {}  # the first n-1 tokens -> those that complete them
        for gram in held:
            self.next.setdefault(gram[:-1], []).append(gram[-1])

    def tokens_completing_ngram(self, context: Tokens) -> Tokens:
        return tuple(self.next.get(context, ()))


class BloomNGrams(ForbiddenNGramFilter):
    """As much memory as the rate of false positives needs, whatever n is; each token of the vocabulary is asked for."""

    def __init__(self, held: set[Tokens], vocab_size: int, false_positives: float) -> None:
        self.filter, self.vocab_size = Bloom(len(held), false_positives), vocab_size
        self.filter.update(held)  # by Python's `hash`, which of tuples of ints is the same in every process
        # A cache of this filter alone: one around the method would keep every filter in memory.
        self.tokens_completing_ngram = lru_cache(_CONTEXTS)(self.tokens_completing_ngram)  # type: ignore[method-assign]

    def tokens_completing_ngram(self, context: Tokens) -> Tokens:
        return tuple(token for token in range(self.vocab_size) if (*context, token) in self.filter)


class MemFreeModel(WrappingModel):
    """A model that holds another, and looks at the last n-1 tokens of every text: those of the question too."""

    def __init__(self, target: LanguageModel, n: int, held: ForbiddenNGramFilter) -> None:
        super().__init__(target)
        self.window, self.held = n - 1, held
        self.name = f"{target.name} under MemFree decoding"

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, distribution: bool = True) -> Rows:
        tails = [self.last_tokens_before_ngram_end(tuple(prefix)) for prefix in prefixes.tolist()]
        return _MemFreeRows(self, self.model.start(prefixes, length, prompt=prompt), tails)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        distributions = self.model.log_probs(contexts, last, prompt=prompt)
        # The first of the last `last` distributions stands behind all but the last `last` - 1 tokens.
        ends = range(contexts.shape[1] - last + 1, contexts.shape[1] + 1)
        tails = [
            self.last_tokens_before_ngram_end(tuple(context[:end])) for context in contexts.tolist() for end in ends
        ]
        return self.forbid_completing_tokens(distributions.flatten(0, 1), tails).view_as(distributions)

    def last_tokens_before_ngram_end(self, text: Tokens) -> Tokens:
        """What of a text decides which tokens are forbidden behind it."""
        return text[-self.window :]

    def forbid_completing_tokens(self, distributions: Tensor, tails: Sequence[Tokens]) -> Tensor:
        """(rows, V) nats: each distribution without the tokens that are forbidden behind its tail, renormalised.

        Raises AuditError where that is all of them: there is no text left to go on with.
        """
        found = [(row, token) for row, tail in enumerate(tails) for token in self.held.tokens_completing_ngram(tail)]
        if not found:
            return distributions
        rows, tokens = torch.tensor(found, device=distributions.device).T
        forbidden = torch.zeros_like(distributions, dtype=torch.bool)
        forbidden[rows, tokens] = True
        if bool(forbidden.all(-1).any()):
            raise AuditError("expected memfree to leave a token behind every text, but its filter forbids all of them")
        touched = rows.unique()
        free = distributions[touched].masked_fill(forbidden[touched], -torch.inf).log_softmax(-1)
        return distributions.index_copy(0, touched, free)  # not in place: the target may keep what it gave

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        return self.model.row_bytes(positions) + super().row_bytes(positions)


class _MemFreeRows(WrappingRows):
    """tails: of each row the last tokens, which its distribution depends on."""

    def __init__(self, model: MemFreeModel, rows: Rows, tails: list[Tokens]) -> None:
        super().__init__(rows)
        self.model, self.tails = model, tails

    def log_probs(self) -> Tensor:
        return self.model.forbid_completing_tokens(self.rows.log_probs(), self.tails)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        super().advance(parents, tokens)
        pairs = zip(parents.tolist(), tokens.tolist(), strict=True)
        self.tails = [self.model.last_tokens_before_ngram_end((*self.tails[parent], token)) for parent, token in pairs]

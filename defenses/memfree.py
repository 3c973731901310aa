"""Implement MemFree decoding (Ippolito et al. 2022), which forbids completing training n-grams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import torch
from rbloom import Bloom
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.base import LanguageModel
from auditor.models.rows import Rows
from auditor.models.wrapping import WrappingModel, WrappingRows
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.options import Limits, Share

_MAX_CACHED_CONTEXTS = 100_000  # contexts whose forbidden tokens are cached
# Maps a context, n-1 tokens, to the tokens that would complete a forbidden n-gram.
NGramFilter = Callable[[Tokens], Tokens]


@dataclass(frozen=True)
class MemFree(Defense):
    """Forbid tokens that complete a training n-gram (MemFree, Ippolito et al. 2022).

    This defense makes no privacy claim. Forbidden tokens get probability 0, and the others are
    renormalised; n-grams may begin in the prompt. A text can still be generated if none of its
    n-grams is in the training data. So a near copy that differs in one of any n successive tokens
    is not prevented, nor is a record shorter than n. `near-verbatim` and `exposure` measure such
    text. Outside a built-in lab, the n-grams come from --data.

    n: the length of the n-grams in tokens.
    filter: `exact` stores all n-grams. `bloom` is a Bloom filter, which also forbids a share
    `false_positives` of all other tokens.
    """

    name = "memfree"
    title = "MemFree decoding"
    needs = ("corpus",)
    claims = "none: it forbids verbatim n-grams, and near-verbatim text passes"
    n: Annotated[int, Limits(2)] = 10
    filter: Literal["exact", "bloom"] = "exact"
    false_positives: Share = 0.01

    def protect(self, scenario: Scenario) -> LanguageModel:
        return MemFreeModel(scenario.target, self.n, self.build_ngram_filter(scenario))

    def claim(self, scenario: Scenario, n_tokens: int) -> None:
        """Return None after checking for n-grams to forbid.

        Raise AuditError if there are none.
        """
        if not any(len(record) >= self.n for record in scenario.corpus):
            raise AuditError(
                f"expected training records of n={self.n} tokens or more for memfree, got "
                f"{len(scenario.corpus):,} records, none of them as long"
            )

    def build_ngram_filter(self, scenario: Scenario) -> NGramFilter:
        """Collect the n-grams of the corpus; raise AuditError if there are none."""
        self.claim(scenario, 0)
        ngrams = set[Tokens]()
        for record in scenario.corpus:
            ngrams.update(split_into_ngrams(record, self.n))
        if self.filter == "bloom":
            return build_bloom_filter(ngrams, scenario.target.vocab_size, self.false_positives)
        return build_exact_filter(ngrams)

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        n_short = sum(len(record) < self.n for record in scenario.corpus)
        return (
            f"memfree forbids the {self.n}-grams of {len(scenario.corpus):,} training texts "
            f"(records, whole and cut), {n_short:,} of them too short to have one; text that "
            "differs in a token passes: near-verbatim measures it",
        )


def split_into_ngrams(record: Tokens, n: int) -> Iterator[Tokens]:
    return (record[i : i + n] for i in range(len(record) - n + 1))


def build_exact_filter(ngrams: set[Tokens]) -> NGramFilter:
    completing: dict[Tokens, list[int]] = {}
    for ngram in ngrams:
        completing.setdefault(ngram[:-1], []).append(ngram[-1])
    return lambda context: tuple(completing.get(context, ()))


def build_bloom_filter(ngrams: set[Tokens], vocab_size: int, false_positives: float) -> NGramFilter:
    """Store n-grams in a Bloom filter, whose memory depends on false positives and not on n.

    A lookup tests every token of the vocabulary.
    """
    bloom = Bloom(len(ngrams), false_positives)
    # By Python's `hash`, which is the same in every process for tuples of ints.
    bloom.update(ngrams)

    @lru_cache(_MAX_CACHED_CONTEXTS)
    def list_completing_tokens(context: Tokens) -> Tokens:
        return tuple(token for token in range(vocab_size) if (*context, token) in bloom)

    return list_completing_tokens


class MemFreeModel(WrappingModel):
    """Forbid tokens that would complete a training n-gram.

    The forbidden tokens depend on the last n-1 tokens of a text, including the prompt.
    """

    def __init__(self, target: LanguageModel, n: int, ngrams: NGramFilter) -> None:
        super().__init__(target)
        self.window = n - 1
        self.ngrams = ngrams
        self.name = f"{target.name} under MemFree decoding"

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        tails = []
        for prefix in prefixes.tolist():
            tails.append(self.cut_context(tuple(prefix)))
        return _MemFreeRows(self, self.model.start(prefixes, length, prompt=prompt), tails)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        distributions = self.model.log_probs(contexts, last, prompt=prompt)
        # The first of the last `last` distributions comes after all but `last` - 1 tokens.
        ends = range(contexts.shape[1] - last + 1, contexts.shape[1] + 1)
        tails = []
        for context in contexts.tolist():
            tails += [self.cut_context(tuple(context[:end])) for end in ends]
        allowed = self.forbid_completing_tokens(distributions.flatten(0, 1), tails)
        return allowed.view_as(distributions)

    def cut_context(self, text: Tokens) -> Tokens:
        """Return the last n-1 tokens of a text, which determine the forbidden tokens."""
        return text[-self.window :]

    def forbid_completing_tokens(self, distributions: Tensor, tails: Sequence[Tokens]) -> Tensor:
        """Remove the forbidden tokens, and return renormalised distributions, (rows, V), in nats.

        tails: the last tokens of each text. Raise AuditError if every token is forbidden after a
        text, so that the text cannot continue.
        """
        pairs = list[tuple[int, int]]()
        for row, tail in enumerate(tails):
            pairs += [(row, token) for token in self.ngrams(tail)]
        if not pairs:
            return distributions
        rows, tokens = torch.tensor(pairs, device=distributions.device).T
        forbidden = torch.zeros_like(distributions, dtype=torch.bool)
        forbidden[rows, tokens] = True
        if bool(forbidden.all(-1).any()):
            raise AuditError(
                "expected memfree to allow a token after every text, but its filter forbids all "
                "tokens after one of them"
            )
        changed_rows = rows.unique()
        logits = distributions[changed_rows].masked_fill(forbidden[changed_rows], -torch.inf)
        # Not in place: the target may keep its distributions.
        return distributions.index_copy(0, changed_rows, logits.log_softmax(-1))

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        return self.model.row_bytes(positions) + super().row_bytes(positions)


class _MemFreeRows(WrappingRows):
    """Hold texts being generated, with their last tokens, which determine the forbidden tokens."""

    def __init__(self, model: MemFreeModel, rows: Rows, tails: list[Tokens]) -> None:
        super().__init__(rows)
        self.model = model
        self.tails = tails

    def log_probs(self) -> Tensor:
        return self.model.forbid_completing_tokens(self.rows.log_probs(), self.tails)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        super().advance(parents, tokens)
        steps = zip(parents.tolist(), tokens.tolist(), strict=True)
        texts = [(*self.tails[parent], token) for parent, token in steps]
        self.tails = list(map(self.model.cut_context, texts))

"""Candidates ranked by their likelihood: alone, exact, or against their size, their lower case or a reference model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Tokens
from auditor.generation.search import TreeLeaves
from auditor.plugins.attack import (
    SamplingAttack,
    candidate_suffixes_as_tuples,
    candidate_values_tensor,
    mean_nll_of_candidates,
)
from auditor.plugins.view import Batch, Search, View


@dataclass(frozen=True)
class PerplexityRanking(SamplingAttack):
    """Rank sampled suffixes by the target's perplexity (Carlini et al. 2021); score = -mean nll, nats a token."""

    name: ClassVar[str] = "perplexity"
    needs: ClassVar[tuple[str, ...]] = ("draw", "likelihood")
    quick: ClassVar[Mapping[str, Any]] = {"samples": 1, "temperature": 0}  # greedy decoding: one candidate to rank

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        return [-mean_nll_of_candidates(candidates) for _, candidates in batch]


@dataclass(frozen=True)
class ExactProbabilityRanking(SamplingAttack):
    """Rank every suffix likelier than `threshold` by exact probability; no sampling.

    Ours (formulas A5). The score is log q(suffix) in nats, q the distribution after temperature and truncation
    (Ethicist's: 0.8, top-p 0.7). A sampler at K=100 estimates q by counts and misses a suffix of probability 0.01 in 37
    of 100 cases; the tree reads q off, down to `threshold`, and certifies its first guess as the likeliest suffix there
    is. A sharpened, truncated distribution ranks better than nll: one unlikely token weighs more, as in text that is
    not memorised.
    """

    name: ClassVar[str] = "exact"
    needs: ClassVar[tuple[str, ...]] = ("draw", "distribution")
    deep: ClassVar[bool] = True
    search: Search = "tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search != "tree":
            raise AuditError(f"expected search=tree, which gives exact probabilities, got search={self.search}")
        if self.temperature == 0:
            raise AuditError("expected temperature > 0, got 0: greedy decoding gives every suffix probability 0 or 1")

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        leaves = [candidates for _, candidates in batch if isinstance(candidates, TreeLeaves)]  # all of them are
        return [candidates.log_q for candidates in leaves]


@dataclass(frozen=True)
class ZlibRanking(SamplingAttack):
    """Rank by perplexity against compressed size (Carlini et al. 2021); score = -(mean nll / zlib bytes).

    `text`: what is compressed, the suffix alone or prefix and suffix. Public repositories disagree on this score; this
    is the form in which more bytes make a candidate surer.
    """

    name: ClassVar[str] = "zlib"
    needs: ClassVar[tuple[str, ...]] = ("draw", "likelihood")
    text: Literal["suffix", "all"] = "suffix"

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        if view.tokenizer is None:
            raise NotApplicable("needs a tokenizer to turn tokens into text, and the model came without one")
        result = []
        for query, candidates in batch:
            head = query.prefix if self.text == "all" else ()
            texts = [view.tokenizer.decode([*head, *suffix]) for suffix in candidate_suffixes_as_tuples(candidates)]
            result.append(
                -mean_nll_of_candidates(candidates)
                / candidate_values_tensor([zlib_compressed_byte_count(text) for text in texts])
            )
        return result


def zlib_compressed_byte_count(text: str) -> int:
    """Size of the text under zlib at its default level."""
    try:
        import zlib  # only this score needs it, and some Pythons are built without
    except ImportError as error:
        raise AuditError(
            "the zlib attack needs Python's own zlib module, and this Python was built without it"
        ) from error
    return len(zlib.compress(text.encode("utf-8")))


@dataclass(frozen=True)
class LowercaseRanking(SamplingAttack):
    """Rank by perplexity against that of the lower-cased suffix (Carlini et al. 2021); score = -(nll / nll of lower).

    Both nll are means per token, in nats, behind the same prefix; the lower-cased text is tokenised anew, and read as
    far as the model has positions.
    """

    name: ClassVar[str] = "lowercase"
    needs: ClassVar[tuple[str, ...]] = ("draw", "likelihood")

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        if view.tokenizer is None:
            raise NotApplicable("needs a tokenizer to lower-case text, and the model came without one")
        pairs, own = [], []
        for query, candidates in batch:
            room = None if view.target.max_positions is None else view.target.max_positions - len(query.prefix)
            own.append(mean_nll_of_candidates(candidates))
            for suffix in candidate_suffixes_as_tuples(candidates):
                # One whose lower-cased text has no tokens, as special ones alone, stands for itself.
                pairs.append((query.prefix, retokenise_suffix_in_lower_case(view.tokenizer, suffix)[:room] or suffix))
        lower = candidate_values_tensor(view.mean_nll(view.target, pairs)).split([len(nll) for nll in own])
        return [-(nll / below) for nll, below in zip(own, lower, strict=True)]


def retokenise_suffix_in_lower_case(tokenizer: Any, tokens: Tokens) -> Tokens:
    """The text of the tokens in lower case, tokenised anew."""
    return tuple(tokenizer(tokenizer.decode(tokens).lower(), add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class ReferenceModelRanking(SamplingAttack):
    """Rank by perplexity against a reference model's (Carlini et al. 2021; Ethicist's "Comparing (LM)").

    form: `ratio` -(nll / nll_ref), `difference` -(nll - nll_ref), `perplexity-ratio` -(ppl / ppl_ref); nll are means
    per token, in nats.
    """

    name: ClassVar[str] = "reference"
    needs: ClassVar[tuple[str, ...]] = ("draw", "likelihood")
    form: Literal["ratio", "difference", "perplexity-ratio"] = "ratio"

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        return scores_against_reference_model(view, batch, self.form)


def scores_against_reference_model(view: View, batch: Batch, form: str = "ratio") -> list[Tensor]:
    """The scores of each query's candidates, (distinct,), higher surer. NotApplicable without a reference model."""
    if view.reference is None:
        raise NotApplicable("needs a reference model: give --reference MODEL")
    pairs = [
        (query.prefix, suffix) for query, candidates in batch for suffix in candidate_suffixes_as_tuples(candidates)
    ]
    sizes = [len(candidates.counts) for _, candidates in batch]
    # All candidates in one call: what those of one prefix share is read once.
    reference = candidate_values_tensor(view.mean_nll(view.reference, pairs)).split(sizes)
    own = [mean_nll_of_candidates(candidates) for _, candidates in batch]
    return [score_against_reference_nll(nll, below, form) for nll, below in zip(own, reference, strict=True)]


def score_against_reference_nll(nll: Tensor, reference: Tensor, form: str) -> Tensor:
    """The score, higher surer, from two mean nll (nats a token) of the same text."""
    if form == "difference":
        return -(nll - reference)
    if form == "perplexity-ratio":
        # ppl / ppl_ref in one exponent: either of them may overflow.
        return -torch.exp(nll - reference)
    # `loss / compareloss`, as the authors of Ethicist compute it (formulas A2).
    return -(nll / reference)

"""Rank candidate suffixes by likelihood.

The likelihood is used by itself, or relative to compressed size, lower case or a reference model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Pair, Tokens
from auditor.generation.search import TreeLeaves
from auditor.generation.tries import encode_without_special_tokens
from auditor.models.base import LanguageModel
from auditor.plugins.attack import (
    SamplingAttack,
    candidate_values_tensor,
    compute_mean_nlls,
    list_candidate_suffixes,
)
from auditor.plugins.view import Batch, Search, View


@dataclass(frozen=True)
class PerplexityRanking(SamplingAttack):
    """Rank sampled suffixes by the model's perplexity (Carlini et al. 2021).

    The score is minus the mean nll, in nats per token.
    """

    name = "perplexity"
    needs = ("draw", "likelihood")
    # greedy decoding: one candidate to rank
    quick: ClassVar[Mapping[str, Any]] = {
        "samples": 1,
        "temperature": 0,
    }

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        return [-compute_mean_nlls(candidates) for _, candidates in batch]


@dataclass(frozen=True)
class ExactProbabilityRanking(SamplingAttack):
    """Rank all suffixes above a probability `threshold`; nothing is sampled.

    The score is log q(suffix) in nats, where q is the decoding distribution after temperature and
    truncation (Ethicist's: 0.8, top-p 0.7). A tree search computes q for all suffixes above
    `threshold`, and certifies that its first guess is the likeliest suffix. In contrast, 100
    samples miss a suffix of probability 0.01 in 37 of 100 cases.

    q is a better score than nll. Temperature and truncation penalise a single unlikely token more,
    and such tokens are typical of unmemorised text. This method is ours.
    """

    name = "exact"
    needs = ("draw", "distribution")
    deep = True
    search: Search = "tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search != "tree":
            raise AuditError(
                f"expected search=tree, which gives exact probabilities, got search={self.search}"
            )
        if self.sampling().decoding.is_point:
            raise AuditError(
                f"expected a decoding with several suffixes, got temperature={self.temperature:g}, "
                f"top_k={self.top_k}, top_p={self.top_p:g}: it gives every suffix probability 0 or "
                "1"
            )

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        # all candidates are leaves
        return [leaves.log_q for _, leaves in batch if isinstance(leaves, TreeLeaves)]


@dataclass(frozen=True)
class ZlibRanking(SamplingAttack):
    """Rank sampled suffixes by perplexity relative to compressed size (Carlini et al. 2021).

    The score is -(mean nll / zlib bytes), so more bytes raise the score; public repositories
    disagree on this. `text`: the text to compress, either only the suffix or the prefix and the
    suffix.
    """

    name = "zlib"
    needs = ("draw", "likelihood")
    text: Literal["suffix", "all"] = "suffix"

    def check_inputs(self, view: View, known: Sequence[Pair]) -> None:
        if view.tokenizer is None:
            raise NotApplicable(
                "needs a tokenizer to turn tokens into text, and the model came without one"
            )

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        self.check_inputs(view, ())
        result = []
        for query, candidates in batch:
            head = query.prefix if self.text == "all" else ()
            texts = []
            for suffix in list_candidate_suffixes(candidates):
                texts.append(view.tokenizer.decode([*head, *suffix]))
            result.append(
                -compute_mean_nlls(candidates)
                / candidate_values_tensor(list(map(count_compressed_bytes, texts)))
            )
        return result


def count_compressed_bytes(text: str) -> int:
    """Count the bytes of the text after compression by zlib at its default level."""
    try:
        import zlib  # only this score needs zlib, and some Pythons lack it
    except ImportError as error:
        raise AuditError(
            "the zlib attack needs Python's own zlib module, and this Python was built without it"
        ) from error
    return len(zlib.compress(text.encode("utf-8")))


@dataclass(frozen=True)
class LowercaseRanking(SamplingAttack):
    """Rank samples by perplexity relative to the lower-cased suffix (Carlini et al. 2021).

    The score is -(nll / nll in lower case). Both nll are means per token, in nats, after the same
    prefix. Both texts are tokenised again, and cut to the model's maximum length.

    A text without capitals scores -1. If the likeliest suffix of a prefix has no capitals, all
    suffixes of this prefix score -1. Equal scores are ranked by likelihood.
    """

    name = "lowercase"
    needs = ("draw", "likelihood")

    def check_inputs(self, view: View, known: Sequence[Pair]) -> None:
        if view.tokenizer is None:
            raise NotApplicable(
                "needs a tokenizer to lower-case text, and the model came without one"
            )

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        self.check_inputs(view, ())
        pairs = _list_candidate_texts(batch)
        nll = torch.cat([compute_mean_nlls(candidates) for _, candidates in batch]).tolist()
        scores = candidate_values_tensor(score_lower_case(view, pairs, nll))
        by_query = scores.split([len(candidates.suffixes) for _, candidates in batch])
        return [
            _score_capitals(query_scores, group)
            for query_scores, (_, group) in zip(by_query, batch, strict=True)
        ]


def _list_candidate_texts(batch: Batch) -> list[tuple[Tokens, Tokens]]:
    """Return the prefix and the suffix of each candidate."""
    texts = []
    for query, candidates in batch:
        for suffix in list_candidate_suffixes(candidates):
            texts.append((query.prefix, suffix))
    return texts


def _score_capitals(scores: Tensor, candidates: Any) -> Tensor:
    """Return the scores, (distinct,); all are -1 if the likeliest candidate has no capitals."""
    # Among digits or a script without case, a capital is an unlikely draw and would lead for lack
    # of a rival.
    likeliest = int(compute_mean_nlls(candidates).argmin())
    if float(scores[likeliest]) != -1.0:
        return scores
    return torch.full_like(scores, -1.0)


def score_lower_case(
    view: View, pairs: Sequence[tuple[Tokens, Tokens]], nll: Sequence[float]
) -> list[float]:
    """Return -(nll of the text / nll in lower case) for each suffix; -1 if it has no capitals.

    Both texts are tokenised again. Otherwise a sampled text in an unlikely tokenization would have
    a higher nll than its lower-cased version for this reason alone.

    view: a model with log-probabilities and a tokenizer.
    pairs: prefix and suffix of each text. nll: mean nll of each suffix in its own tokens, in nats
    per token.
    """
    assert view.tokenizer is not None
    texts_by_index: dict[int, tuple[tuple[Tokens, Tokens], tuple[Tokens, Tokens]]] = {}
    suffix_texts = [view.tokenizer.decode(suffix) for _, suffix in pairs]
    encoded = encode_without_special_tokens(
        view.tokenizer, [*suffix_texts, *map(str.lower, suffix_texts)]
    )
    for i, (prefix, _) in enumerate(pairs):
        if view.target.max_positions is None:
            room = None
        else:
            room = view.target.max_positions - len(prefix)
        as_is = tuple(encoded[i][:room])
        lowered = tuple(encoded[len(pairs) + i][:room])
        if as_is and lowered and as_is != lowered:
            texts_by_index[i] = (prefix, as_is), (prefix, lowered)
    rewritten = [as_is for i, (as_is, _) in texts_by_index.items() if as_is != pairs[i]]
    texts = [*rewritten, *(lowered for _, lowered in texts_by_index.values())]
    nll_of_text = dict(zip(texts, view.mean_nll(view.target, texts), strict=True))
    scores = [-1.0] * len(pairs)
    for i, (as_written, in_lower_case) in texts_by_index.items():
        if as_written == pairs[i]:
            written_nll = nll[i]
        else:
            written_nll = nll_of_text[as_written]
        scores[i] = -written_nll / nll_of_text[in_lower_case]
    return scores


@dataclass(frozen=True)
class ReferenceModelRanking(SamplingAttack):
    """Rank samples by perplexity relative to a reference model's.

    The methods are Carlini et al. 2021 and Ethicist's "Comparing (LM)".

    form: the score; `ratio` is -(nll / nll_ref), `difference` is -(nll - nll_ref), and
    `perplexity-ratio` is -(ppl / ppl_ref). nll are means per token, in nats.
    """

    name = "reference"
    needs = ("draw", "likelihood")
    form: Literal["ratio", "difference", "perplexity-ratio"] = "ratio"

    def check_inputs(self, view: View, known: Sequence[Pair]) -> None:
        require_reference_model(view)

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        return score_reference_model(view, batch, self.form)


def require_reference_model(view: View) -> LanguageModel:
    """Return the reference model; raise NotApplicable if there is none."""
    if view.reference is None:
        raise NotApplicable("needs a reference model: give --reference MODEL")
    return view.reference


def score_reference_model(view: View, batch: Batch, form: str = "ratio") -> list[Tensor]:
    """Score each query's candidates, each of shape (distinct,); higher means more confident.

    form: as in `ReferenceModelRanking`. Raise NotApplicable if there is no reference model.
    """
    reference_model = require_reference_model(view)
    pairs = _list_candidate_texts(batch)
    sizes = [len(candidates.counts) for _, candidates in batch]
    # All candidates in one call, to read the shared part of each prefix once.
    reference = candidate_values_tensor(view.mean_nll(reference_model, pairs)).split(sizes)
    scores = []
    for (_, candidates), other in zip(batch, reference, strict=True):
        nll = compute_mean_nlls(candidates)
        scores.append(score_against_reference_nll(nll, other, form))
    return scores


def score_against_reference_nll(nll: Tensor, reference: Tensor, form: str) -> Tensor:
    """Score a text by its mean nll under the model and under the reference model.

    nll, reference: nats per token; form: as in `ReferenceModelRanking`. Higher means more
    confident.
    """
    if form == "difference":
        return -(nll - reference)
    if form == "perplexity-ratio":
        # ppl / ppl_ref in one exponent: either may overflow.
        return -torch.exp(nll - reference)
    # `loss / compareloss`, as the authors of Ethicist compute it.
    return -(nll / reference)

"""Mask tokens of texts that masked language models then predict (Majmudar et al. 2022, Section 3).

Several defenses may wrap the same model. They score the texts batch by batch, so that the wrapped
model computes each batch only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from auditor.core.arrays import Floats, Ints
from auditor.core.errors import AuditError
from auditor.core.nouns import Claim, Tokens
from auditor.core.result import Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import get_max_logits
from auditor.models.masked import MaskedModel
from auditor.models.memory import group_equal_shapes
from auditor.models.vocabulary import check_same_vocabulary_size, check_tokens_within_vocabulary
from auditor.plugins.defense import Defense, MaskedScenario

_BATCH = 64  # texts in a batch, unless memory allows fewer
_TIMINGS = 5


@dataclass(frozen=True)
class MaskingOptions:
    """Values of a plan's `[utility]` table. Raise AuditError for invalid values.

    Args:
        on: which records of the built-in lab to measure: held-out texts (default) or members. A
            user's data has no such kinds, and all of it is measured.
        restarts: number of different maskings of each text.
        mask_share: share of the tokens that each masking hides.
        max_length: number of tokens at which a text is cut off.
    """

    on: Literal["heldout", "members"] | None = None
    restarts: int = 3
    mask_share: float = 0.15
    max_length: int = 512

    def __post_init__(self) -> None:
        if self.restarts < 1:
            raise AuditError(f"expected restarts >= 1 in [utility], got {self.restarts}")
        if not 0 < self.mask_share < 1:
            raise AuditError(f"expected mask_share in (0, 1) in [utility], got {self.mask_share}")
        if self.max_length < 2:
            raise AuditError(f"expected max_length >= 2 in [utility], got {self.max_length}")


@dataclass(frozen=True)
class Passage:
    """A text as tokens.

    Args:
        row: index of the text in the data, from 0.
        tokens: token ids.
        open: positions that may be masked.
        cut: whether the text was cut off.
    """

    row: int
    tokens: Tokens
    open: tuple[int, ...]
    cut: bool = False


class MaskedTexts:
    """Texts for masked models to predict, with the protected model and its public model, if any."""

    def __init__(
        self,
        target: MaskedModel,
        public: MaskedModel | None,
        tokenizer: Any,
        texts: Sequence[str],
        options: MaskingOptions,
        *,
        seed: int = 0,
        limit: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare models and texts. limit: maximum number of texts, drawn at random.

        Raise AuditError if the vocabularies of the models differ, or if no text has a token to
        mask.
        """
        if public is not None:
            check_same_vocabulary_size(
                "--public", public.name, public.vocab_size, "the target's", target.vocab_size
            )
        self.bare = target
        self.target = _LastAnswerCache(target)
        self.public = None if public is None else _LastAnswerCache(public)
        self.tokenizer = tokenizer
        self.options = options
        self.seed = seed
        self.room = min(options.max_length, target.max_positions or options.max_length)
        self.notes = [*target.notes, *(public.notes if public is not None else ())]
        self.texts = self._draw_sample(self._encode_usable_texts(texts), limit)
        size = get_max_logits(target.device) // (
            max(len(text.tokens) for text in self.texts) * target.vocab_size
        )
        self.batch_size = batch_size or max(1, min(_BATCH, size))

    @cached_property
    def hidden_token_counts(self) -> Ints:
        """Number of tokens of each text that one masking hides, of shape (texts,)."""
        return np.array(list(map(self._count_hidden_tokens, self.texts)))

    def _encode_usable_texts(self, texts: Sequence[str]) -> list[Passage]:
        usable = []
        tokens = []
        cut = 0
        for row, text in enumerate(texts):
            passage = self._encode_passage(row, text)
            if passage.open:
                usable.append(passage)
                tokens.append(passage.tokens)
                cut += passage.cut
        name = self.target.name
        check_tokens_within_vocabulary("the texts", tokens, self.target.vocab_size, name)
        if not usable:
            raise AuditError(f"expected texts with a token to hide, got {len(texts)} without one")
        if len(usable) < len(texts):
            self.notes.append(
                f"{len(texts) - len(usable)} of {len(texts)} texts contain nothing to "
                "predict: left out"
            )
        if cut:
            self.notes.append(
                f"{cut} of {len(usable)} texts are longer than {self.room} tokens: the rest was "
                "cut off"
            )
        return usable

    def _encode_passage(self, row: int, text: str) -> Passage:
        # Tokenize without truncation first, only to detect a cut.
        cut = len(self.tokenizer(text, verbose=False)["input_ids"]) > self.room
        coded = self.tokenizer(
            text,
            truncation=True,
            max_length=self.room,
            return_special_tokens_mask=True,
            verbose=False,
        )
        open = np.flatnonzero(np.array(coded["special_tokens_mask"]) == 0).tolist()
        return Passage(row, tuple(coded["input_ids"]), tuple(open), cut)

    def _draw_sample(self, texts: list[Passage], limit: int | None) -> list[Passage]:
        if limit is None or limit >= len(texts):
            return texts
        rng = make_keyed_generator("utility", "limit", self.seed)
        rows = sorted(rng.permutation(len(texts))[:limit])
        self.notes.append(
            f"--limit kept {limit} of {len(texts)} texts, a random sample with seed {self.seed}"
        )
        return [texts[i] for i in rows]

    def _count_hidden_tokens(self, text: Passage) -> int:
        """Return how many of the text's tokens to hide: at least 1, so that the text has an nll."""
        return max(1, round(self.options.mask_share * len(text.open)))

    def masked_positions(self, text: Passage, restart: int) -> list[int]:
        """Return the positions that a restart hides; only seed, restart and text decide them."""
        rng = make_keyed_generator("utility", "masks", self.seed, restart, text.row)
        return sorted(
            rng.choice(text.open, self._count_hidden_tokens(text), replace=False).tolist()
        )

    def protect(self, defense: Defense) -> tuple[MaskedModel, Claim | None]:
        """Return the defended model, then the defense's claim for the text with the most hidden
        tokens.
        """
        return defense.protect_masked(
            MaskedScenario(self.target, self.public, int(self.hidden_token_counts.max()))
        )

    def _batches(self) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
        """Yield batches of B texts of n tokens, m of them hidden, as four values.

        The values are the restart, the indices of the texts, their tokens of shape (B, n), and the
        hidden positions of shape (B, m).
        """
        shapes = []
        for text in self.texts:
            shapes.append((len(text.tokens), self._count_hidden_tokens(text)))
        for restart in range(self.options.restarts):
            for batch in group_equal_shapes(shapes, self.batch_size):
                tokens = torch.tensor([self.texts[i].tokens for i in batch])
                gaps = torch.tensor([self.masked_positions(self.texts[i], restart) for i in batch])
                yield restart, batch.tolist(), tokens, gaps

    def measure_nll(
        self, models: Sequence[MaskedModel], progress: Callable[[int, int], None]
    ) -> tuple[Floats, Ints]:
        """Return the summed nll (nats) of hidden tokens whose probability is not 0.

        The second value is the number of hidden tokens whose probability is 0. Both have shape
        (models, restarts, texts).
        """
        restarts = self.options.restarts
        nll = np.zeros((len(models), restarts, len(self.texts)))
        n_impossible = np.zeros(nll.shape, dtype=np.int64)
        n_done = 0
        for restart, batch, tokens, gaps in self._batches():
            # Batches outside, models inside: the cache answers all models of a batch from a single
            # forward pass.
            for i, model in enumerate(models):
                log_prob = model.token_log_probs(tokens, gaps).double().cpu().numpy()  # (B, m) nats
                impossible = np.isneginf(log_prob)
                nll[i, restart, batch] = -np.where(impossible, 0.0, log_prob).sum(1)
                n_impossible[i, restart, batch] = impossible.sum(1)
            n_done += len(batch)
            progress(n_done, restarts * len(self.texts))
        return nll, n_impossible

    def measure_slowdowns(self, models: Sequence[MaskedModel]) -> list[Measurement]:
        """Return how many times slower each model is than the undefended model.

        The measured time is the time to compute the distributions of masked tokens. The value is
        the median over several rounds, and the interval is the range over the rounds.
        """
        rounds = []
        # Time the bare model again in every round: other load on the machine slows both.
        for _ in range(_TIMINGS):
            bare = self._time_distribution(self.bare)
            rounds.append([self._time_distribution(model) / bare for model in models])
        slowdowns = []
        for middle, low, high in np.quantile(rounds, [0.5, 0, 1], axis=0).T.tolist():
            slowdowns.append(
                Measurement("slowdown", middle, low, high, _TIMINGS, "times", "range of timings")
            )
        return slowdowns

    def _time_distribution(self, model: MaskedModel) -> float:
        """Return the seconds to compute the distributions of a batch of four copies of a text."""
        self.target.forget()  # a cached answer would take no time
        if self.public is not None:
            self.public.forget()
        text = self.texts[0]
        tokens = torch.tensor([text.tokens] * 4)
        gaps = torch.tensor([self.masked_positions(text, 0)] * 4)
        start = time.perf_counter()
        if model.log_probs(tokens, gaps).is_cuda:
            torch.cuda.synchronize()  # a launched kernel may not have finished
        return time.perf_counter() - start


class _LastAnswerCache(MaskedModel):
    """Wrapper of a model that returns the last answer again if the query is repeated.

    All points of a sweep send the same query in turn. Likelihoods are float64.
    """

    def __init__(self, model: MaskedModel) -> None:
        self.model = model
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.max_positions = model.max_positions
        self.device = model.device
        self.forget()

    def forget(self) -> None:
        self._question: tuple[Tensor, Tensor] | None = None
        self._answer: Tensor | None = None

    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        question = (contexts, positions)
        if self._question is None or not all(map(torch.equal, self._question, question)):
            self.forget()  # two distributions need not fit in memory
            self._question = question
            self._answer = self.model.log_probs(contexts, positions)
        assert self._answer is not None
        return self._answer

    def token_log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        return super().token_log_probs(contexts, positions).double()

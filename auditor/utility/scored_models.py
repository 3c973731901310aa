"""What `audit utility` scores: a model with texts to predict. A causal and a masked one differ in what is predicted.

Several models are asked about the same texts, batch by batch, and what stands behind all of them answers once. Knows
nothing of sweeps, claims' meaning or files.
"""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Claim, Tokens
from auditor.core.result import Measurement
from auditor.core.secret_randomness import CHANNELS, keyed_random_generator, secret_uniform_draws
from auditor.generation.sample import sample_candidates
from auditor.models.base import LanguageModel, Rows, max_logits_at_once
from auditor.models.decoding import ANCESTRAL, index_batches_of_equal_shape
from auditor.models.masked import MaskedModel
from auditor.models.vocabulary import check_same_vocabulary_size, check_tokens_within_vocabulary
from auditor.models.wrapping import WrappingModel
from auditor.plugins.defense import Defense, MaskedScenario, Scenario
from auditor.runs.prefix_token import with_prefix_token

_BATCH = 64  # texts at once, where memory does not say less
_TIMINGS = 5
Model = TypeVar("Model", LanguageModel, MaskedModel)


@dataclass(frozen=True)
class ScoringOptions:
    """How texts are taken. mask_share, restarts: of a masked model, whose gaps are drawn anew at each restart.

    max_length: tokens of a text, at most. limit: at most so many texts, a random sample. batch_size: texts at once.
    """

    seed: int = 0
    max_length: int = 512
    mask_share: float = 0.15
    restarts: int = 3
    limit: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Example:
    """A text, and what each point predicts in its gaps, or behind its first half. Private unless the user gave it."""

    true: str
    predicted: tuple[tuple[str, str], ...]  # (point, text)


@dataclass(frozen=True)
class Passage:
    """One text as tokens. row: where it stood in the data, from 0; open: positions that may be predicted."""

    row: int
    tokens: Tokens
    open: tuple[int, ...]
    cut: bool = False


class UtilitySubject(ABC, Generic[Model]):
    """A model and texts to predict; a causal and a masked one differ in what is predicted of a text, and how."""

    kind: str

    def __init__(
        self, target: Model, public: Model | None, tokenizer: Any, texts: Sequence[str], asked: ScoringOptions
    ) -> None:
        if tokenizer is None:
            raise AuditError(f"expected a model with a tokenizer, got {target.name!r}, which has none")
        if public is not None:
            check_same_vocabulary_size("--public", public.name, public.vocab_size, "the target's", target.vocab_size)
        # bare is timed; undefended, the same behind the cache, is what the points are compared with.
        self.bare: Model = self.model_behind_prefix_token(target)
        self.target: Model = self._with_cached_last_answer(target)
        self.undefended: Model = self.model_behind_prefix_token(self.target)
        self.public: Model | None = None if public is None else self._with_cached_last_answer(public)
        self.tokenizer, self.asked = tokenizer, asked
        self.room = min(asked.max_length, self.bare.max_positions or asked.max_length)
        self.notes = [*target.notes, *(public.notes if public is not None else ())]
        self.texts = self._random_sample_of_texts(self._encode_usable_texts(texts), asked.limit)
        size = max_logits_at_once(target.device) // (max(len(text.tokens) for text in self.texts) * target.vocab_size)
        self.batch_size = asked.batch_size or max(1, min(_BATCH, size))

    @property
    def scorings_per_text(self) -> int:
        """How often each text is scored: once, unless chance decides what is predicted of it."""
        return 1

    @cached_property
    def predicted_token_counts(self) -> NDArray[np.int64]:
        """(texts,) how many tokens of each text are predicted."""
        return np.array([self.predicted_token_count(text) for text in self.texts])

    def _encode_usable_texts(self, texts: Sequence[str]) -> list[Passage]:
        made = [self.encode_text_as_passage(row, text) for row, text in enumerate(texts)]
        usable = [text for text in made if text.open]
        check_tokens_within_vocabulary(
            "the texts", [text.tokens for text in usable], self.target.vocab_size, self.target.name
        )
        if not usable:
            raise AuditError(f"expected texts with something to predict, got {len(texts)} without two tokens")
        if len(usable) < len(made):
            self.notes.append(f"{len(made) - len(usable)} of {len(made)} texts hold nothing to predict: left out")
        if cut := sum(text.cut for text in usable):
            self.notes.append(f"{cut} of {len(usable)} texts are longer than {self.room} tokens: the rest was cut off")
        return usable

    def _random_sample_of_texts(self, texts: list[Passage], limit: int | None) -> list[Passage]:
        if limit is None or limit >= len(texts):
            return texts
        kept = sorted(keyed_random_generator("utility", "limit", self.asked.seed).permutation(len(texts))[:limit])
        self.notes.append(f"--limit kept {limit} of {len(texts)} texts, a random sample with seed {self.asked.seed}")
        return [texts[i] for i in kept]

    def model_behind_prefix_token(self, model: Model) -> Model:
        """The model with the prefix token before every text, where there is one."""
        return model

    @abstractmethod
    def encode_text_as_passage(self, row: int, text: str) -> Passage:
        """Its tokens, cut to the room there is, and the positions that may be predicted."""

    @abstractmethod
    def predicted_token_count(self, text: Passage) -> int:
        """How many tokens of it are predicted."""

    @abstractmethod
    def _with_cached_last_answer(self, model: Model) -> Model:
        """The model, remembering its last answer: every point of a sweep asks it the same, one after the other."""

    @abstractmethod
    def protected_model_and_claim(self, defense: Defense, held: Mapping[str, Any]) -> tuple[Model, Claim | None]:
        """The model behind this defense, and what is promised for the longest text."""

    @abstractmethod
    def batches_with_log_prob_queries(self) -> Iterator[tuple[int, list[int], Callable[[Any], Tensor]]]:
        """(restart, texts, how to ask a model for the log-probabilities of what is predicted of them, (B, m) nats)."""

    @abstractmethod
    def ask_distributions_for_timing(self, model: Model) -> Tensor:
        """One distribution for each of four equal texts: the answer that is timed."""

    @abstractmethod
    def predicted_example_by_model(self, models: Mapping[str, Model], text: Passage) -> Example:
        """What each model says in the text's gaps, or behind its first half."""

    def nll_by_model_and_text(
        self, models: Sequence[Model], progress: Callable[[int, int], None]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """(models, restarts, texts): summed nll (nats) of tokens that have a probability, and how many have none."""
        shape = (len(models), self.scorings_per_text, len(self.texts))
        nll, lost, done = np.zeros(shape), np.zeros(shape, dtype=np.int64), 0
        for restart, batch, ask in self.batches_with_log_prob_queries():
            # Batches outside, models inside: the cache answers all models of a batch from one forward pass.
            for i, model in enumerate(models):
                log_prob = ask(model).double().cpu().numpy()  # (B, m) nats
                impossible = np.isneginf(log_prob)
                nll[i, restart, batch] = -np.where(impossible, 0.0, log_prob).sum(1)
                lost[i, restart, batch] = impossible.sum(1)
            done += len(batch)
            progress(done, self.scorings_per_text * len(self.texts))
        return nll, lost

    def slowdowns(self, models: Sequence[Model]) -> list[Measurement]:
        """Time for a distribution over that of the bare model: median, smallest and largest of a few rounds."""
        rounds = []
        # The bare model anew in every round: what slows the machine down meanwhile slows both.
        for _ in range(_TIMINGS):
            own = self._seconds_for_distribution(self.bare)
            rounds.append([self._seconds_for_distribution(model) / own for model in models])
        return [
            Measurement("slowdown", middle, low, high, _TIMINGS, "times", "range of timings")
            for middle, low, high in np.quantile(np.array(rounds), [0.5, 0, 1], axis=0).T.tolist()
        ]

    def _seconds_for_distribution(self, model: Model) -> float:
        # A remembered answer would take no time.
        for asked in (self.target, self.public):
            if isinstance(asked, _UtilityLastAnswerCache | _MaskedUtilityLastAnswerCache):
                asked.forget()
        start = time.perf_counter()
        if self.ask_distributions_for_timing(model).is_cuda:
            torch.cuda.synchronize()  # what is launched is not yet done
        return time.perf_counter() - start


def _scored_token_log_probs(first: Tensor, second: Tensor, model: Any) -> Tensor:
    answer: Tensor = model.token_log_probs(first, second)
    return answer


class CausalUtilitySubject(UtilitySubject[LanguageModel]):
    """Every token is predicted from those before it, but a text's first ones: as many as `given` says, else one."""

    kind = "causal"

    def __init__(
        self,
        target: LanguageModel,
        public: LanguageModel | None,
        tokenizer: Any,
        texts: Sequence[str],
        asked: ScoringOptions,
        prefix_token: Tokens = (),
        given: Sequence[int] = (),
    ) -> None:
        # Before super(), which puts the token before the model and encodes the texts.
        self.prefix_token, self._given = prefix_token, given
        super().__init__(target, public, tokenizer, texts, asked)

    def model_behind_prefix_token(self, model: LanguageModel) -> LanguageModel:
        return with_prefix_token(model, self.prefix_token)

    def encode_text_as_passage(self, row: int, text: str) -> Passage:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        first = max(1, self._given[row]) if self._given and row >= 0 else 1  # below 0: no text of the data
        open = tuple(range(first, min(len(ids), self.room)))
        return Passage(row, tuple(ids[: self.room]), open, len(ids) > self.room)

    def predicted_token_count(self, text: Passage) -> int:
        return len(text.open)

    def _with_cached_last_answer(self, model: LanguageModel) -> LanguageModel:
        return _UtilityLastAnswerCache(model)

    def protected_model_and_claim(
        self, defense: Defense, held: Mapping[str, Any]
    ) -> tuple[LanguageModel, Claim | None]:
        longest = int(self.predicted_token_counts.max())
        parts: dict[str, Any] = {"ensemble": None, **held}
        scenario = Scenario(self.target, self.public, queries=longest, answer_length=longest, **parts)
        return self.model_behind_prefix_token(defense.protect(scenario)), defense.claim(scenario, 0)

    def batches_with_log_prob_queries(self) -> Iterator[tuple[int, list[int], Callable[[Any], Tensor]]]:
        # Of one length and one beginning: nothing is padded.
        for batch in index_batches_of_equal_shape(
            [(text.open[0], len(text.tokens)) for text in self.texts], self.batch_size
        ):
            tokens = torch.tensor([self.texts[i].tokens for i in batch], device=self.target.device)
            first = self.texts[batch[0]].open[0]
            yield 0, batch, partial(_scored_token_log_probs, tokens[:, :first], tokens[:, first:])

    @torch.no_grad()
    def ask_distributions_for_timing(self, model: LanguageModel) -> Tensor:
        return model.log_probs(torch.tensor([self.texts[0].tokens] * 4, device=self.target.device), 1)

    @torch.no_grad()
    def predicted_example_by_model(self, models: Mapping[str, LanguageModel], text: Passage) -> Example:
        half = (len(text.tokens) + 1) // 2
        first, rest = torch.tensor([text.tokens[:half]], device=self.target.device), len(text.tokens) - half
        # One set of uniforms for all models, (1, 1, rest, CHANNELS): texts differ by the distributions alone.
        drawn = secret_uniform_draws(1, rest, "utility", "examples", self.asked.seed, text.row)[None]
        behind = tuple(range(half, half + rest))

        def said(model: LanguageModel) -> str:
            suffix = sample_candidates(model, first, rest, ANCESTRAL, drawn, distribution=False)[0].suffixes[0]
            return bracketed_utility_example(self.tokenizer, (*text.tokens[:half], *suffix.tolist()), behind)

        predicted = tuple((name, said(model)) for name, model in models.items())
        return Example(bracketed_utility_example(self.tokenizer, text.tokens, behind), predicted)


class MaskedUtilitySubject(UtilitySubject[MaskedModel]):
    """A share of the tokens is hidden, other ones at each restart, and predicted from all that is left."""

    kind = "masked"

    @property
    def scorings_per_text(self) -> int:
        return self.asked.restarts

    def encode_text_as_passage(self, row: int, text: str) -> Passage:
        # Whole first, only to learn whether anything is cut off.
        cut = len(self.tokenizer(text, verbose=False)["input_ids"]) > self.room
        coded = self.tokenizer(
            text, truncation=True, max_length=self.room, return_special_tokens_mask=True, verbose=False
        )
        open = tuple(i for i, special in enumerate(coded["special_tokens_mask"]) if not special)
        return Passage(row, tuple(coded["input_ids"]), open, cut)

    def predicted_token_count(self, text: Passage) -> int:
        """At least one: a text without a gap says nothing."""
        return max(1, round(self.asked.mask_share * len(text.open)))

    def masked_positions(self, text: Passage, restart: int) -> list[int]:
        """The hidden positions: a function of seed, restart and row, whatever else is measured."""
        rng = keyed_random_generator("utility", "masks", self.asked.seed, restart, text.row)
        return sorted(rng.choice(text.open, self.predicted_token_count(text), replace=False).tolist())

    def _with_cached_last_answer(self, model: MaskedModel) -> MaskedModel:
        return _MaskedUtilityLastAnswerCache(model)

    def protected_model_and_claim(self, defense: Defense, held: Mapping[str, Any]) -> tuple[MaskedModel, Claim | None]:
        return defense.protect_masked(MaskedScenario(self.target, self.public, int(self.predicted_token_counts.max())))

    def batches_with_log_prob_queries(self) -> Iterator[tuple[int, list[int], Callable[[Any], Tensor]]]:
        shapes = [(len(text.tokens), self.predicted_token_count(text)) for text in self.texts]
        for restart in range(self.scorings_per_text):
            for batch in index_batches_of_equal_shape(shapes, self.batch_size):
                tokens = torch.tensor([self.texts[i].tokens for i in batch])
                gaps = torch.tensor([self.masked_positions(self.texts[i], restart) for i in batch])
                yield restart, batch, partial(_scored_token_log_probs, tokens, gaps)

    def ask_distributions_for_timing(self, model: MaskedModel) -> Tensor:
        text = self.texts[0]
        return model.log_probs(torch.tensor([text.tokens] * 4), torch.tensor([self.masked_positions(text, 0)] * 4))

    def predicted_example_by_model(self, models: Mapping[str, MaskedModel], text: Passage) -> Example:
        gaps = self.masked_positions(text, 0)
        # All gaps are hidden together and filled each by itself: what is drawn for one does not move the others.
        # One set of uniforms for all models, as in a causal one; a draw reads the first channel.
        rng = keyed_random_generator("utility", "examples", self.asked.seed, text.row)
        drawn = rng.random((len(gaps), CHANNELS))[:, 0]

        def said(model: MaskedModel) -> str:
            distribution = model.log_probs(torch.tensor([text.tokens]), torch.tensor([gaps]))[0].cpu()
            tokens, _ = ANCESTRAL.draw(distribution, torch.arange(len(gaps)), torch.from_numpy(drawn))
            filled = list(text.tokens)
            for at, token in zip(gaps, tokens.tolist(), strict=True):
                filled[at] = token
            return bracketed_utility_example(self.tokenizer, filled, gaps, text.open)

        predicted = tuple((name, said(model)) for name, model in models.items())
        return Example(bracketed_utility_example(self.tokenizer, text.tokens, gaps, text.open), predicted)


def bracketed_utility_example(
    tokenizer: Any, tokens: Sequence[int], gaps: Sequence[int], shown: Sequence[int] | None = None
) -> str:
    """The text with what was predicted in [brackets], a pair around each run. shown: positions; default all."""
    positions = range(len(tokens)) if shown is None else shown
    text, before, pieces = "", [], []
    for at in positions:
        before.append(tokens[at])
        # Decoded from the first token on: a token by itself may be half of a character, or lose its space.
        whole = tokenizer.decode(before, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append((at in gaps, whole[len(text) :]))
        text = whole
    runs = ((hidden, "".join(piece for _, piece in run)) for hidden, run in groupby(pieces, operator.itemgetter(0)))
    return "".join(f"[{run}]" if hidden else run for hidden, run in runs)


class _UtilityLastAnswerCache(WrappingModel):
    """A model that answers the question it was last asked without thinking again; likelihoods in float64.

    All points of a sweep ask the same of it, one after the other.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.forget()

    def forget(self) -> None:
        self._held: dict[str, tuple[tuple[Any, ...], Tensor]] = {}

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, distribution: bool = True) -> Rows:
        return self.model.start(prefixes, length, prompt=prompt, distribution=distribution)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        if prompt is not None:
            return self.model.log_probs(contexts, last, prompt=prompt)
        ask = partial(self.model.log_probs, contexts, last)
        return cached_last_utility_answer(self._held, "distribution", (contexts, last), ask)

    def token_log_probs(self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None) -> Tensor:
        if prompt is not None:
            return self.model.token_log_probs(prefixes, suffixes, prompt=prompt)
        return cached_last_utility_answer(
            self._held, "tokens", (prefixes, suffixes), lambda: self.model.token_log_probs(prefixes, suffixes).double()
        )


class _MaskedUtilityLastAnswerCache(MaskedModel):
    """The same for a masked model."""

    def __init__(self, model: MaskedModel) -> None:
        self.model = model
        self.name, self.vocab_size = model.name, model.vocab_size
        self.max_positions, self.device = model.max_positions, model.device
        self.forget()

    def forget(self) -> None:
        self._held: dict[str, tuple[tuple[Any, ...], Tensor]] = {}

    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        ask = partial(self.model.log_probs, contexts, positions)
        return cached_last_utility_answer(self._held, "distribution", (contexts, positions), ask)

    def token_log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        # By `log_probs` above, and so remembered too.
        return super().token_log_probs(contexts, positions).double()


def cached_last_utility_answer(
    held: dict[str, tuple[tuple[Any, ...], Tensor]], kind: str, asked: tuple[Any, ...], answer: Callable[[], Tensor]
) -> Tensor:
    """The last answer of this kind, if the same was asked; else a new one."""
    last = held.get(kind)
    # By value: behind a prefix token every point hands over a tensor of its own.
    if last is None or not all(_is_same_value_asked_of_scored_model(a, b) for a, b in zip(last[0], asked, strict=True)):
        held.pop(kind, None)  # two distributions need not fit in memory
        last = held[kind] = (asked, answer())
    return last[1]


def _is_same_value_asked_of_scored_model(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b

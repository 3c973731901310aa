"""What a language model may be asked: distributions, and decoding rows that are advanced token by token.

A model has capabilities, each optional: `draw` (sampled tokens), `likelihood` (log-probabilities, in nats, of given
tokens), `ranks` (their places in the distribution), `likeliest` (the likeliest tokens beside them), `distribution`
(log-probabilities of every next token, which tell all that of any), `embeddings` (gradients for soft prompts).
Sampling, scoring and tuning are written once on decoding rows and distributions; a model that is asked over a wire
answers with whole completions in their place. A defended model is a `LanguageModel` that holds others. Knows nothing of
attacks, secrets or files of results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable, TargetLacks
from auditor.core.result import Doubt
from auditor.models.decoding import ANCESTRAL, Decoding, index_batches_of_equal_shape
from auditor.models.memory import BatchSizeLimit
from auditor.models.partial_distributions import (
    LIKELIEST,
    PartialDistribution,
    concatenate_partial_distributions,
    reduce_to_partial_distribution,
)

_TEXTS_AT_ONCE = 32  # whose perplexity is taken


class Rows(ABC):
    """The live state of incremental decoding: one row a distinct partial sequence.

    The model decides how a token is drawn from a row, so a randomised defense keeps its own randomness per draw.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def log_probs(self) -> Tensor:
        """(rows, V) next-token distribution in nats."""

    @abstractmethod
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        """New row i continues old row parents[i] with tokens[i]. A parent may have several children, or none."""

    def draw(self, row_of_draw: Tensor, uniforms: Tensor, decoding: Decoding) -> tuple[Tensor, Tensor]:
        """One token a draw. row_of_draw: (draws,); uniforms: (draws, CHANNELS). Returns tokens and CDF nearness."""
        return decoding.draw(self.log_probs(), row_of_draw, uniforms[:, 0])  # other channels: for randomised defenses

    def token_log_probs(self, row_of_token: Tensor, tokens: Tensor) -> Tensor:
        """(tokens,): the log-probability, in nats, of each token in its row's distribution."""
        return self.log_probs()[row_of_token, tokens]

    def joined(self, others: Sequence[Rows]) -> Rows:
        """These rows and then the others, advanced together from now on, none of them advanced yet. Their prefixes may
        differ in length. Only of a model that can join rows."""
        raise NotImplementedError


class _WholeRows(Rows):
    """Rows of a model without a cache: each token reads its whole row again."""

    def __init__(self, model: LanguageModel, contexts: Tensor, prompt: Tensor | None) -> None:
        self._model, self._contexts, self._prompt = model, contexts, prompt
        self._found: Tensor | None = None

    def __len__(self) -> int:
        return len(self._contexts)

    def log_probs(self) -> Tensor:
        if self._found is None:
            self._found = self._model.log_probs(self._contexts, 1, prompt=self._prompt)[:, 0]
        return self._found

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self._contexts, self._found = torch.cat([self._contexts[parents], tokens.unsqueeze(-1)], dim=1), None


@dataclass(frozen=True)
class DivergenceCheck:
    """What is claimed of one query, and what came true of it: how far its distribution is from each neighbour's."""

    relation: str  # how neighbours differ: "add_remove"; or the step of the proof that was looked at
    order: float  # of the Renyi divergence; inf: pure
    claimed: float | None  # nats, the most that any two neighbours may differ by; None: nothing is claimed of it
    realised: Tensor  # (B, positions, neighbours) nats, float64, the larger of both directions


@dataclass(frozen=True)
class Completions:
    """Sampled suffixes, as many of each prefix, those of one prefix side by side.

    tokens: (draws, length); log_probs: (draws, length) nats at temperature 1 without truncation, None where they are
    not asked for; path: (draws,) equal for equal samples of one prefix, and for no others; near_boundary: (draws,) how
    many of its tokens float noise could have changed.
    """

    tokens: Tensor
    log_probs: Tensor | None
    path: Tensor
    near_boundary: Tensor


def refuse_nan_logits(logits: Tensor, name: str) -> None:
    """Raises AuditError where logits (..., V) of the model make no distribution."""
    # The largest is NaN where any is; where it is infinite, so would be all that softmax gives.
    if not bool(torch.isfinite(logits.detach().amax(-1)).all()):
        raise AuditError(f"expected finite logits, but {name} returned NaN: the weights or the dtype are broken")


def implies_capability(capabilities: frozenset[str], capability: str) -> bool:
    """Whether these capabilities include this one: `distribution` includes `likelihood`, `ranks` and `likeliest`."""
    return capability in capabilities or (
        capability in ("likelihood", "ranks", "likeliest") and "distribution" in capabilities
    )


@dataclass(frozen=True)
class Neighbours:
    """What a model would say, were one thing about its private data different: a distribution for each such change."""

    relation: str  # how they differ from the model: "zero_out"
    log_probs: Tensor  # (B, positions, neighbours, V) nats, float64; `LanguageModel.neighbour(relation, i)` is the i-th


def max_logits_at_once(device: torch.device) -> int:
    """How many logits to hold at once when scoring on this device: 128 MiB of float32.

    On a CPU 32 MiB: larger blocks go back to the system when they are freed (glibc), and every use of new ones pays for
    fresh pages, measured at a quarter of the time.
    """
    return 2**23 if device.type == "cpu" else 2**25


class LanguageModel(ABC):
    """What is attacked. Shapes: contexts (B, n) token ids; prompt (P, d) soft prompt rows in embedding space.

    One of your own needs a name, `vocab_size`, `capabilities` that say what it gives, and `log_probs`; `audit` takes it
    as it is, and `auditor.testing.check_model` says whether it keeps what is promised here.
    """

    capabilities: frozenset[str] = frozenset({"draw", "distribution", "embeddings"})
    name: str
    family: str = ""  # architecture and vocabulary, in words; "" where the model does not say
    vocab_size: int  # width of the distribution; may exceed the tokenizer's
    max_positions: int | None = None  # tokens that a text may have; None: any number
    prepended: tuple[int, ...] = ()  # what a server puts before every text, whatever it is sent
    eos: tuple[int, ...] = ()
    device: torch.device = torch.device("cpu")
    notes: tuple[str, ...] = ()  # what its user must know of how it was loaded and is served
    can_join_rows = False  # whether its rows behind prefixes of several lengths may be `joined`
    parts: int = 1  # distributions behind each row: what a batch of rows costs in time and memory
    prefix_token: tuple[int, ...] = ()  # tokens that it reads before every text
    tokenizer: Any = None  # what writes its texts; None where it has none, or where others see to it
    choices_kept_in: Path | None = None  # folder of what was found out about how to ask it, for the next run

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, distribution: bool = True) -> Rows:
        """Rows standing behind `prefixes` (B, n), able to take `length` more tokens. distribution: `log_probs` will be
        read. A model that keeps a cache has faster ones of its own."""
        return _WholeRows(self, prefixes.to(self.device), prompt)

    @abstractmethod
    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        """(B, last, V): the distribution of the token after each of the last `last` positions, in nats, teacher-forced.

        Differentiable in `prompt`.
        """

    def read_ahead(  # noqa: B027
        self, texts: Sequence[tuple[int, ...]], last: Sequence[int], begun: Sequence[int] | None = None
    ) -> None:
        """Announces the texts that it will be asked about, text i at its last `last[i]` positions.

        begun: how many first tokens of each will be completed; None: all before those positions, and the first of them.

        A model that remembers what it read reads those of several lengths at once; any other does nothing.
        """

    def forget_batch(self) -> None:  # noqa: B027 - most models keep nothing of what they read
        """Called after all was asked about a batch of texts: what only the batch needed may go."""

    def tuning_log_probs(self, contexts: Tensor, last: int, prompt: Tensor, noise: torch.Generator) -> Tensor:
        """`log_probs` for tuning a prompt. A model of many parts may answer with an estimate from a few of them."""
        return self.log_probs(contexts, last, prompt=prompt)

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        """Memory that a decoding row of so many positions holds: its distributions; a model with a cache adds its own.

        distribution: whether `log_probs` will be read of it, or only tokens drawn.
        """
        return 4 * self.vocab_size * self.parts

    def embedding_rows(self, count: int) -> Tensor:
        """The first `count` rows of the embedding matrix, (count, d), detached: where soft prompts start.

        Raises NotApplicable where the model takes tokens alone.
        """
        raise NotApplicable(f"needs a soft prompt; {self.name} takes tokens alone")

    @torch.no_grad()
    def completions(
        self,
        prefixes: Tensor,
        length: int,
        decoding: Decoding,
        uniforms: Tensor,
        *,
        prompt: Tensor | None = None,
        likelihood: bool = True,
    ) -> Completions:
        """K samples of each prefix by count splitting: one row a distinct partial sequence, one forward a row.

        Each sample reads its own uniform at each position, so the result equals, draw for draw, that of K separate
        rows. prefixes: (B, n); uniforms: (B, K, length, CHANNELS); prompt: (P, d) soft prompt or None; likelihood:
        whether log-probabilities are asked for.
        """
        rows = self.start(prefixes, length, prompt=prompt, distribution=likelihood)
        return draw_model_completions_from_rows(self, rows, uniforms, [length] * len(prefixes), decoding, likelihood)

    @torch.no_grad()
    def suffix_log_probs(
        self, prefixes: Tensor, owner: Sequence[int], suffixes: Sequence[Sequence[int]]
    ) -> list[float]:
        """The log-probability, in nats, of each suffix behind the prefix that `owner` names, at temperature 1.

        prefixes: (B, n). Each prefix is read once, and so is what suffixes of one prefix begin with: a forward row for
        each distinct partial suffix, as in `completions`. Suffixes may differ in length.
        """
        lengths = torch.tensor([len(suffix) for suffix in suffixes], device=self.device)
        longest = int(lengths.max())
        # Filled up with token 0, which is never read: `live` ends where a suffix does.
        padded = [[*suffix, *[0] * (longest - len(suffix))] for suffix in suffixes]
        tokens, row = torch.tensor(padded, device=self.device), torch.tensor(owner, device=self.device)
        total = torch.zeros(len(suffixes), dtype=torch.float64, device=self.device)
        rows = self.start(prefixes, longest)
        for position in range(longest):
            live = (lengths > position).nonzero().squeeze(-1)
            total[live] += rows.token_log_probs(row[live], tokens[live, position]).double()
            live = (lengths > position + 1).nonzero().squeeze(-1)
            if len(live):
                # (row, token) as one number: suffixes that agree so far go on in one child.
                children, row[live] = torch.unique(
                    row[live] * self.vocab_size + tokens[live, position], return_inverse=True
                )
                rows.advance(children // self.vocab_size, children % self.vocab_size)
        return total.tolist()

    def token_log_probs(self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None) -> Tensor:
        """(B, L): log-probability in nats of each suffix token behind its prefix, teacher-forced."""
        read = self.teacher_forced_distributions(prefixes, suffixes, prompt=prompt)
        return torch.cat([distribution.gather(-1, own.unsqueeze(-1)).squeeze(-1) for own, distribution in read])

    def token_ranks(self, prefixes: Tensor, suffixes: Tensor) -> Tensor:
        """(B, L): the place of each suffix token in its distribution, from 1 for the likeliest, teacher-forced."""
        read = self.teacher_forced_distributions(prefixes, suffixes)
        return torch.cat([ANCESTRAL.ranks(every.flatten(0, 1), own.flatten()).view_as(own) for own, every in read])

    def partial_distributions_of(self, prefixes: Tensor, suffixes: Tensor) -> PartialDistribution:
        """What can be told of each suffix token (B x L rows) short of its distribution: itself and the likeliest."""
        read = self.teacher_forced_distributions(prefixes, suffixes)
        return concatenate_partial_distributions(
            [reduce_to_partial_distribution(every.flatten(0, 1), own.flatten(), LIKELIEST) for own, every in read]
        )

    def digest(self) -> str:
        """SHA-256, in hex, of its weights or of its answers, which identifies it; "" where nothing does."""
        return ""

    def cost_sentences(self) -> tuple[str, ...]:
        """What asking it has cost until now, beside time: sentences. Empty where it costs nothing."""
        return ()

    def doubts(self) -> tuple[Doubt, ...]:
        """What of its answers until now may have hidden a leak: answers withheld, cut or not its own."""
        return ()

    def has_withheld_answer_by_prefix(self, prefixes: Sequence[tuple[int, ...]]) -> list[bool]:
        """Of each prefix, whether an answer to it did not come through."""
        return [False] * len(prefixes)

    def check_unchanged_at_end(self) -> None:  # noqa: B027 - a model at hand stays what it is
        """Called at the end of a run. Raises AuditError where it is no longer the model that it was."""

    def special_token_id(self, kind: str) -> int | None:
        """The token that its own configuration names as `bos` or `eos`, the first of several."""
        return None

    def teacher_forced_distributions(
        self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A few texts at a time, to bound memory: suffixes (b, L) and the distribution of each token (b, L, V)."""
        length = suffixes.shape[1]
        # The last token of a suffix is predicted, not read.
        contexts = torch.cat([prefixes, suffixes[:, :-1]], dim=1)
        step = max(1, max_logits_at_once(self.device) // (length * self.vocab_size * self.parts))
        asked = BatchSizeLimit(step).run_pieces_within_memory(
            len(contexts), lambda some: self.log_probs(contexts[some], length, prompt=prompt)
        )
        yield from ((suffixes[some], distribution) for some, distribution in asked)

    def published_perplexity_nll(
        self, texts: Sequence[tuple[int, ...]], seed: int, given: int = 1
    ) -> Mapping[str, Sequence[float]]:
        """Summed nll (nats) of each text behind its `given` tokens as a paper counts it, by the name of the perplexity.

        Empty where there is no other way than the distribution's own, `model_nll_and_token_counts`.
        """
        return {}

    def divergence_checks(
        self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0
    ) -> Sequence[DivergenceCheck]:
        """What is claimed of one token against what is realised, at the positions `at` among the last `last`.

        Teacher-forced on contexts (B, n). order: of the divergence, 0 for the one that is claimed. Realised
        divergences depend on the private data: they are for the auditor alone. Raises NotApplicable where nothing is
        claimed, AuditError for an order that is not controlled.
        """
        raise TargetLacks(f"{self.name} makes no claim about single answers")

    def neighbour_distributions(self, contexts: Tensor, last: int, at: Sequence[int]) -> Sequence[Neighbours]:
        """The distributions of the neighbours that its claim is about, at the positions `at` among the last `last`.

        One entry for each relation, teacher-forced on contexts (B, n); empty where it knows of none. They tell of the
        private data: they are for the auditor alone.
        """
        return ()

    def neighbour_model(self, relation: str, index: int) -> LanguageModel:
        """Neighbour `index` of `neighbours` as a model of its own, whose tokens are drawn as this one's are."""
        raise NotApplicable(f"{self.name} knows of no model that is its neighbour by {relation}")

    def claim_premise_counts(self) -> Mapping[str, int]:
        """What the claim rests on beside the distributions, in counts, as far as the model can tell.

        `shared_records`: private records in more than one shard, each of which voids a claim about a shard;
        `unlisted_shards`: members that do not say what they were trained on.
        """
        return {}

    def check_text_fits(self, n_prefix: int, length: int, prompt: Tensor | None = None, prefix_token: int = 0) -> None:
        """Refuses sequences longer than the positions the model has. prefix token: tokens before the prefix."""
        rows = 0 if prompt is None else len(prompt)
        needed = prefix_token + n_prefix + length + rows
        if self.max_positions is not None and needed > self.max_positions:
            before = f"prefix token ({prefix_token}) + " if prefix_token else ""
            raise AuditError(
                f"{before}prefix ({n_prefix}) + suffix ({length}) + soft prompt ({rows}) = {needed} "
                f"tokens, but {self.name} has {self.max_positions} positions"
            )


@torch.no_grad()
def draw_model_completions_from_rows(
    model: LanguageModel, rows: Rows, uniforms: Tensor, lengths: Sequence[int], decoding: Decoding, likelihood: bool
) -> Completions:
    """As `LanguageModel.completions`, from rows behind the B prefixes. lengths: (B,) tokens to come of each.

    Tokens and log-probabilities of a suffix that is shorter than the longest end in zeros.
    """
    count, samples, longest = uniforms.shape[:3]
    noise = uniforms.to(model.device).flatten(0, 1)  # (draws, length, CHANNELS)
    row_of_draw = torch.arange(count, device=model.device).repeat_interleave(samples)
    ends = torch.tensor(lengths, device=model.device).repeat_interleave(samples)
    tokens, near = torch.zeros(len(noise), longest, dtype=torch.long, device=model.device), torch.zeros_like(ends)
    scores: Tensor | None = None
    live: Tensor | slice = slice(None)  # the draws that go on
    for position in range(longest):
        own = row_of_draw[live]
        drawn, close = rows.draw(own, noise[live, position], decoding.decoding_at_position(position))
        near[live] += close
        tokens[live, position] = drawn
        if likelihood:
            found = rows.token_log_probs(own, drawn)
            scores = found.new_zeros(tokens.shape) if scores is None else scores
            scores[live, position] = found
        # (row, token) as one number: draws that agree so far share a child, and so a forward row (formulas.md A5).
        children, row_of_draw[live] = torch.unique(own * model.vocab_size + drawn, return_inverse=True)
        going = ends[live] > position + 1
        if not going.all():
            live = torch.arange(len(ends), device=model.device)[live][going]
            kept, row_of_draw[live] = torch.unique(row_of_draw[live], return_inverse=True)  # drops rows of ended draws
            children = children[kept]
        if len(children):
            rows.advance(children // model.vocab_size, children % model.vocab_size)
    # Draws of one prefix end together: the rows that they had then tell them apart, whatever other draws go on to.
    return Completions(tokens, scores, row_of_draw, near)


def model_nll_and_token_counts(
    model: LanguageModel, texts: Sequence[tuple[int, ...]], given: Sequence[int] = ()
) -> Iterator[tuple[float, int]]:
    """(summed nll in nats, predicted tokens) of each text under the model's distribution.

    given: how many first tokens of each text are not predicted; where empty, one.
    """
    results: dict[int, tuple[float, int]] = {}
    shapes = [(first, len(text)) for first, text in zip(given or [1] * len(texts), texts, strict=True)]
    model.read_ahead([text[:-1] for text in texts], [length - first for first, length in shapes])
    for batch in index_batches_of_equal_shape(shapes, _TEXTS_AT_ONCE):
        tokens, first = torch.tensor([texts[i] for i in batch], device=model.device), shapes[batch[0]][0]
        with torch.no_grad():
            scores = model.token_log_probs(tokens[:, :first], tokens[:, first:])
        for i, nll in zip(batch, (-scores.double().sum(-1)).tolist(), strict=True):
            results[i] = (nll, tokens.shape[1] - first)
    yield from (results[i] for i in range(len(texts)))

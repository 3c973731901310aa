"""Define the interface of language models: next-token distributions and decoding rows.

A decoding row is a sequence that grows token by token. Models differ in their capabilities:

- `draw`: sampled tokens.
- `likelihood`: log-probabilities of given tokens, in nats.
- `ranks`: ranks of given tokens.
- `likeliest`: the most likely tokens at each position.
- `distribution`: log-probabilities of every next token, which imply the previous three.
- `embeddings`: gradients for soft prompts.

Sampling, scoring and tuning use decoding rows and distributions; a remote model returns whole
completions. A defended model is a `LanguageModel` that wraps others. This module does not depend on
attacks, secrets or result files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from auditor.core.arrays import Ints
from auditor.core.errors import AuditError, NotApplicable, TargetLacks
from auditor.core.nouns import Tokens
from auditor.core.result import Doubt
from auditor.models.decoding import ANCESTRAL, Decoding
from auditor.models.memory import BatchSizeLimit, group_equal_shapes
from auditor.models.partial_distributions import (
    LIKELIEST,
    PartialDistribution,
    concatenate_partial_distributions,
    reduce_to_partial_distribution,
)
from auditor.models.rows import Completions, Rows, draw_row_completions

_READ_TOKENS = 2**14  # of long texts whose hidden states are cached together
_TEXTS_AT_ONCE = 32  # in a batch of `compute_text_nlls`


class WholeTextRows(Rows):
    """Decoding rows without a cache: each step reads every sequence from its start.

    Args:
        read_texts: function of texts (B, n) that returns their next-token log-probabilities, (B, 1,
            V) or, for an ensemble, (B, 1, parts, V).
        contexts: token ids of the rows at first, (B, n).
    """

    def __init__(self, read_texts: Callable[[Tensor], Tensor], contexts: Tensor) -> None:
        self._read_texts = read_texts
        self._contexts = contexts
        self._log_probs: Tensor | None = None

    def __len__(self) -> int:
        return len(self._contexts)

    def log_probs(self) -> Tensor:
        if self._log_probs is None:
            self._log_probs = self._read_texts(self._contexts)[:, 0]
        return self._log_probs

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self._contexts = torch.cat([self._contexts[parents], tokens.unsqueeze(-1)], dim=1)
        self._log_probs = None


@dataclass(frozen=True)
class DivergenceCheck:
    """A claimed bound on Renyi divergence, and the true divergences in one query.

    The divergence compares the next-token distributions of two neighbours: models that differ only
    in one change to the private data.

    Attributes:
        relation: how neighbouring private data differ, such as "add_remove". If a single step of a
            proof is checked, the name of this step.
        order: order of the divergence; inf for pure differential privacy.
        claimed: the bound in nats; None if none is claimed.
        realised: true divergences in nats (float64), of shape (B, positions, neighbours). Each is
            the larger one of the two directions.
    """

    relation: str
    order: float
    claimed: float | None
    realised: Tensor


def check_logits_finite(logits: Tensor, name: str) -> None:
    """Raise AuditError if any of the logits (..., V) do not define a distribution.

    `name` is the model's name for the message.
    """
    # The maximum is NaN if any logit is. If the maximum is infinite, softmax gives NaN.
    if not bool(torch.isfinite(logits.detach().amax(-1)).all()):
        raise AuditError(
            f"expected finite logits, but {name} returned NaN: the weights or the dtype are broken",
        )


def implies_capability(capabilities: frozenset[str], capability: str) -> bool:
    """Return whether these capabilities include or imply `capability`.

    `distribution` implies `likelihood`, `ranks` and `likeliest`.
    """
    if capability in ("likelihood", "ranks", "likeliest") and "distribution" in capabilities:
        return True
    return capability in capabilities


@dataclass(frozen=True)
class Neighbours:
    """The next-token distributions of all neighbour models.

    A neighbour is the model that results from one change to the private data.

    Attributes:
        relation: the kind of change, such as "zero_out".
        log_probs: float64 nats, of shape (B, positions, neighbours, V).
            `LanguageModel.neighbour_model(relation, i)` returns neighbour i.
    """

    relation: str
    log_probs: Tensor


def get_max_logits(device: torch.device) -> int:
    """Return how many logits to hold in memory at once while scoring.

    In float32, they take 128 MiB. On a CPU they take only 32 MiB, because page faults of larger
    blocks would cost a quarter of the time.
    """
    return 2**23 if device.type == "cpu" else 2**25


@runtime_checkable
class ReadsPositions(Protocol):
    """A model that accepts explicit token positions."""

    def log_probs_at_positions(self, texts: Tensor, positions: Tensor, last: int) -> Tensor | None:
        """Return log-probabilities (B, last, V) of texts (B, n) with token positions (B, n).

        They are those of the next token after each of the `last` trailing tokens. Every token
        attends to all tokens before it, whatever their positions. No prefix token is added. Return
        None if the model does not accept positions.
        """


class LanguageModel(ABC):
    """A language model that can be attacked.

    Shapes: contexts are token ids (B, n). A soft prompt is P embedding vectors, (P, d).

    Your own model needs a name, `vocab_size`, `capabilities` and `log_probs`. `audit` accepts it
    directly, and `auditor.testing.check_model` tests it against this interface.

    Attributes:
        vocab_size: width V of the distribution, which may exceed the tokenizer's size.
        family: architecture and vocabulary, in words.
        max_positions: largest number of tokens in a text; None for no limit.
        prepended: tokens that the model's server adds before every text.
        prefix_token: tokens that the run adds before every text.
        returns_token_ids: False for a server that returns only text.
        eos: end-of-text tokens.
        notes: facts about loading that users must know.
        load_doubts: reasons in loading why the answers may hide a leak.
        parts: number of distributions computed for each row, such as one for each member of an
            ensemble.
        choices_kept_in: folder in which the results of self-checks are stored.
    """

    capabilities: frozenset[str] = frozenset({"draw", "distribution", "embeddings"})
    name: str
    family: str = ""
    vocab_size: int
    max_positions: int | None = None
    prepended: tuple[int, ...] = ()
    returns_token_ids: bool = True
    eos: tuple[int, ...] = ()
    device: torch.device = torch.device("cpu")
    notes: tuple[str, ...] = ()
    load_doubts: tuple[Doubt, ...] = ()
    # Returns a context in which the model reads each text once. The weights must not change there.
    # The argument True bounds the memory, so that the context can last for a whole run; a number
    # is a share of that. An inner context without it caches more for a while. Most models cache
    # nothing.
    cache_hidden_states: Callable[..., AbstractContextManager[None]] = staticmethod(nullcontext)
    can_join_rows = False  # whether rows after prefixes of several lengths may be `joined`
    parts: int = 1
    prefix_token: tuple[int, ...] = ()
    tokenizer: Any = None  # of its texts; None if it has none, or if the caller tokenizes
    choices_kept_in: Path | None = None

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        """Return decoding rows, one for each prefix, with room for `length` more tokens.

        A decoding row is a text that grows by one token per step. Models with a cache override this
        method with faster rows.

        Args:
            prefixes: token ids (B, n).
            length: largest number of tokens to append to a row.
            prompt: soft prompt (P, d) before each prefix, or None.
            distribution: whether the caller will read `log_probs` of the rows. False if it only
                draws.
        """
        return WholeTextRows(
            partial(self.log_probs, last=1, prompt=prompt), prefixes.to(self.device)
        )

    @abstractmethod
    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        """Return the next-token distributions at the last positions of texts, (B, last, V) in nats.

        The texts are read as given, without drawing tokens. The result is differentiable with
        respect to `prompt`.

        Args:
            contexts: token ids (B, n).
            last: number of trailing positions. The last one predicts the token after the text.
            prompt: soft prompt (P, d) before each text, or None.
        """

    def read_ahead(  # noqa: B027
        self,
        texts: Sequence[tuple[int, ...]],
        last: Sequence[int],
        prefix_lengths: Sequence[int] | None = None,
    ) -> None:
        """Announce texts that will be scored soon, so that they can share a batch.

        Only models with a text cache use this.

        Args:
            texts: token ids.
            last: for each text, the number of trailing positions to score.
            prefix_lengths: for each text, the length of the prefix to be completed. None means all
                tokens up to the first scored position.
        """

    def forget_batch(self) -> None:  # noqa: B027 - most models cache nothing
        """Free the memory that only the last batch of texts needed."""

    def tuning_log_probs(
        self,
        contexts: Tensor,
        last: int,
        prompt: Tensor,
        noise: torch.Generator,
    ) -> Tensor:
        """Return `log_probs`, or a cheaper estimate, for tuning a soft prompt.

        A model with many parts (distributions for each row) may estimate them from a few random
        parts.

        Args:
            contexts: token ids (B, n).
            last: number of trailing positions.
            prompt: soft prompt (P, d) before each text.
            noise: generator that draws the parts.
        """
        return self.log_probs(contexts, last, prompt=prompt)

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        """Return the memory, in bytes, of one decoding row with this many positions.

        It includes the row's distributions and cache. If `distribution` is False, the caller will
        only draw tokens and not read `log_probs`.
        """
        return 4 * self.vocab_size * self.parts

    def embedding_rows(self, count: int) -> Tensor:
        """Return the first `count` rows of the embedding matrix, (count, d), detached.

        Soft prompts are initialised with these rows. Raise NotApplicable if the model accepts only
        token ids.
        """
        raise NotApplicable(f"needs a soft prompt; {self.name} takes only tokens")

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
        """Draw K samples for each prefix.

        Samples that start with the same tokens share forward passes. Each sample has its own
        uniform numbers at each position, so the samples equal those of K separate runs.

        Args:
            prefixes: token ids (B, n).
            length: number of tokens to draw.
            decoding: temperature and truncation of the draws.
            uniforms: numbers in [0, 1) of shape (B, K, length, CHANNELS). Channel 0 draws the
                token; randomised defenses use the other channels.
            prompt: soft prompt (P, d) or None.
            likelihood: whether to return log-probabilities.

        Returns:
            The samples, ordered by prefix: the K samples of the first prefix come first.
        """
        return draw_row_completions(
            self.start(prefixes, length, prompt=prompt, distribution=likelihood),
            uniforms,
            [length] * len(prefixes),
            decoding,
            likelihood,
            self.vocab_size,
            self.device,
        )

    @torch.no_grad()
    def suffix_log_probs(
        self, prefixes: Tensor, owner: Sequence[int], suffixes: Sequence[Sequence[int]]
    ) -> list[float]:
        """Return the log-probability of each suffix given its prefix, in nats at temperature 1.

        Suffixes may differ in length. Suffixes of one prefix that start alike share forward passes.

        Args:
            prefixes: token ids (B, n).
            owner: for each suffix, the index of its prefix.
            suffixes: token ids of each suffix.
        """
        lengths = torch.tensor([len(suffix) for suffix in suffixes], device=self.device)
        longest = int(lengths.max())
        # The padding, token 0, is never read: a suffix leaves `live` at its end.
        padded = []
        for suffix in suffixes:
            padded.append([*suffix, *[0] * (longest - len(suffix))])
        tokens = torch.tensor(padded, device=self.device)
        row = torch.tensor(owner, device=self.device)
        total = torch.zeros(len(suffixes), dtype=torch.float64, device=self.device)
        rows = self.start(prefixes, longest)
        for position in range(longest):
            live = (lengths > position).nonzero().squeeze(-1)
            total[live] += rows.token_log_probs(row[live], tokens[live, position]).double()
            live = (lengths > position + 1).nonzero().squeeze(-1)
            if len(live):
                # (row, token) as one number: suffixes that agree so far share a child.
                steps = row[live] * self.vocab_size + tokens[live, position]
                children, row[live] = torch.unique(steps, return_inverse=True)
                rows.advance(children // self.vocab_size, children % self.vocab_size)
        return total.tolist()

    def token_log_probs(
        self,
        prefixes: Tensor,
        suffixes: Tensor,
        *,
        prompt: Tensor | None = None,
    ) -> Tensor:
        """Return the log-probability of each suffix token after the true tokens before it, (B, L).

        The unit is nats. `prefixes` is (B, n), `suffixes` is (B, L), and `prompt` is a soft prompt
        (P, d) or None.
        """
        parts = []
        for tokens, log_probs in self.teacher_forced_distributions(
            prefixes, suffixes, prompt=prompt
        ):
            parts.append(log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
        return torch.cat(parts)

    def token_ranks(self, prefixes: Tensor, suffixes: Tensor) -> Tensor:
        """Return the rank of each suffix token after the true tokens before it, (B, L).

        Rank 1 is the most likely token. `prefixes` is (B, n), and `suffixes` is (B, L).
        """
        parts = []
        for tokens, log_probs in self.teacher_forced_distributions(prefixes, suffixes):
            ranks = ANCESTRAL.ranks(log_probs.flatten(0, 1), tokens.flatten())
            parts.append(ranks.view_as(tokens))
        return torch.cat(parts)

    def partial_distributions_of(self, prefixes: Tensor, suffixes: Tensor) -> PartialDistribution:
        """Return each suffix token's log-probability and those of the position's likeliest tokens.

        `prefixes` is (B, n) and `suffixes` is (B, L). The result has n = B x L distributions.
        """
        parts = []
        for tokens, log_probs in self.teacher_forced_distributions(prefixes, suffixes):
            rows = log_probs.flatten(0, 1)
            parts.append(reduce_to_partial_distribution(rows, tokens.flatten(), LIKELIEST))
        return concatenate_partial_distributions(parts)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the model's weights or answers, or "" if it has no digest."""
        return ""

    def cost_sentences(self) -> tuple[str, ...]:
        """Return sentences about the cost of all queries so far, other than their time.

        An example is a server's price. The result is empty if the queries were free.
        """
        return ()

    def doubts(self) -> tuple[Doubt, ...]:
        """Return reasons why the answers so far may hide a leak.

        An example is that the server withheld answers. The result is empty without such a reason.
        """
        return self.load_doubts

    def has_withheld_answer_by_prefix(self, prefixes: Sequence[tuple[int, ...]]) -> list[bool]:
        """Return, for each prefix, whether the model's server refused or filtered any answer to it.

        `prefixes` are token ids.
        """
        return [False] * len(prefixes)

    def check_unchanged_at_end(self) -> None:  # noqa: B027 - a local model does not change
        """Raise AuditError if the model changed during the run."""

    def special_token_id(self, kind: str) -> int | None:
        """Return the first token id for `kind` (`bos` or `eos`) in the model's configuration.

        Return None if the configuration has no such token.
        """
        return None

    def teacher_forced_distributions(
        self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of suffixes (b, L), with the distributions of their tokens (b, L, V), nats.

        Each distribution is conditional on the true tokens before the position. Batches are small,
        which limits memory; together they hold all suffixes in order.

        Args:
            prefixes: token ids (B, n).
            suffixes: token ids (B, L).
            prompt: soft prompt (P, d) or None.
        """
        length = suffixes.shape[1]
        # The last token of a suffix is predicted, not read.
        contexts = torch.cat([prefixes, suffixes[:, :-1]], dim=1)
        n_logits = length * self.vocab_size * self.parts
        limit = BatchSizeLimit(max(1, get_max_logits(self.device) // n_logits))

        def compute_log_probs(piece: slice) -> Tensor:
            return self.log_probs(contexts[piece], length, prompt=prompt)

        for piece, log_probs in limit.run_pieces_within_memory(len(contexts), compute_log_probs):
            yield suffixes[piece], log_probs

    def published_perplexity_nll(
        self, texts: Sequence[tuple[int, ...]], seed: int, n_context: int = 1
    ) -> Mapping[str, Sequence[float]]:
        """Return each text's summed negative log-likelihood in nats, keyed by kind of perplexity.

        Some defenses define their own perplexity in their paper; it is computed here. Return {} if
        the model's perplexity is the ordinary one (`compute_text_nlls`).

        Args:
            texts: token ids of each text.
            seed: seed of the defense's random numbers.
            n_context: number of unscored leading tokens.
        """
        return {}

    def divergence_checks(
        self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0
    ) -> Sequence[DivergenceCheck]:
        """Return the claimed and the true divergence from neighbour models at the positions `at`.

        A neighbour model results from one change to the private data. The claim is the model's
        promise of privacy. The true divergences reveal private data.

        Args:
            contexts: token ids (B, n), read as given.
            last: number of trailing positions.
            at: indices of the checked positions among the `last` trailing ones, from 0.
            order: order of the divergence; 0 for the order of the claim.

        Returns:
            One check for each relation between neighbours, or for each step of the proof.

        Raises:
            NotApplicable: if the model claims no bound.
            AuditError: if the model has no bound for this order.
        """
        raise TargetLacks(f"{self.name} makes no claim about single answers")

    def neighbour_distributions(
        self,
        contexts: Tensor,
        last: int,
        at: Sequence[int],
    ) -> Sequence[Neighbours]:
        """Return the distributions of all neighbour models in the privacy claim, by relation.

        A neighbour model results from one change to the private data; a relation is a kind of
        change. The distributions reveal private data. The result is empty if the claim has no
        neighbours.

        Args:
            contexts: token ids (B, n), read as given.
            last: number of trailing positions.
            at: indices of the positions to return among the `last` trailing ones, from 0.
        """
        return ()

    def neighbour_model(self, relation: str, index: int) -> LanguageModel:
        """Return neighbour model number `index`, which draws tokens in the same way as this model.

        `relation` says how the neighbour's private data differ, as in `neighbour_distributions`.
        Raise NotApplicable if the model has no such neighbour.
        """
        raise NotApplicable(f"{self.name} has no neighbour by {relation}")

    def claim_premise_counts(self) -> Mapping[str, int]:
        """Return counts of circumstances that can invalidate the privacy claim, keyed by name.

        A shard is the part of the private records on which one member of an ensemble is trained.

        - `shared_records`: private records in the shards of several members. Each of them breaks a
          claim that protects one shard.
        - `unlisted_shards`: members whose training records are unknown.

        Return {} if there is nothing to count.
        """
        return {}

    def check_text_fits(
        self,
        n_prefix: int,
        length: int,
        prompt: Tensor | None = None,
        prefix_token: int = 0,
    ) -> None:
        """Raise AuditError if a text has more tokens than the model has positions.

        Args:
            n_prefix: number of prefix tokens.
            length: number of suffix tokens.
            prompt: soft prompt (P, d), whose rows count as tokens; None if there is none.
            prefix_token: number of tokens before the prefix.
        """
        n_prompt = 0 if prompt is None else len(prompt)
        n_tokens = prefix_token + n_prefix + length + n_prompt
        if self.max_positions is not None and n_tokens > self.max_positions:
            before = ""
            if prefix_token:
                before = f"prefix token ({prefix_token}) + "
            raise AuditError(
                f"{before}prefix ({n_prefix}) + suffix ({length}) + soft prompt ({n_prompt}) = "
                f"{n_tokens} tokens, but {self.name} has {self.max_positions} positions"
            )


def compute_text_nlls(
    model: LanguageModel, texts: Sequence[tuple[int, ...]], context_lengths: Sequence[int] = ()
) -> Iterator[tuple[float, int]]:
    """Yield each text's negative log-likelihood in nats, and its number of scored tokens.

    Args:
        model: the model.
        texts: token ids of each text.
        context_lengths: for each text, the number of unscored leading tokens. If it is
            empty, only the first token of each text is not scored.
    """
    results: dict[int, tuple[float, int]] = {}
    n_given = context_lengths or [1] * len(texts)
    shapes = [(first, len(text)) for first, text in zip(n_given, texts, strict=True)]
    contexts = [text[:-1] for text in texts]
    lengths = [length - first for first, length in shapes]
    model.read_ahead(contexts, lengths)
    last = np.array(lengths, np.int64)
    for part in read_long_texts((model,), contexts, number_long_texts(contexts), last):
        for indices in group_equal_shapes([shapes[i] for i in part.tolist()], _TEXTS_AT_ONCE):
            batch = part[indices].tolist()
            tokens = torch.tensor([texts[i] for i in batch], device=model.device)
            first = shapes[batch[0]][0]
            with torch.no_grad():
                log_probs = model.token_log_probs(tokens[:, :first], tokens[:, first:])
            nlls = (-log_probs.double().sum(-1)).tolist()
            for i, nll in zip(batch, nlls, strict=True):
                results[i] = (nll, tokens.shape[1] - first)
    yield from (results[i] for i in range(len(texts)))


def number_long_texts(texts: Iterable[Tokens]) -> Ints:
    """Number the texts, (texts,): windows of one long text share a number, so one pass reads them.

    Windows of a text follow each other, and each begins with the previous one.
    """
    numbers = list[int]()
    before: Tokens = ()
    for place, text in enumerate(texts):
        if 0 < len(before) < len(text) and text[: len(before)] == before:
            numbers.append(numbers[-1])
        else:
            numbers.append(place)
        before = text
    return np.array(numbers, np.int64)


def read_long_texts(
    models: Sequence[LanguageModel], texts: Sequence[Tokens], numbers: Ints, last: Ints
) -> Iterator[Ints]:
    """Yield the places of all texts, in parts. Models read the long texts of each part ahead.

    One pass reads all texts with the same number. Texts that share no number come first, unread.

    Args:
        models: the models.
        texts: token ids of each text.
        numbers: (texts,) from `number_long_texts`.
        last: (texts,) number of trailing positions to score.
    """
    _, number, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    is_window = counts[number] > 1
    if not is_window.all():
        yield np.flatnonzero(~is_window)
    n_tokens = np.zeros(len(counts), np.int64)  # of the longest text with each number
    np.maximum.at(
        n_tokens, number[is_window], [len(texts[i]) for i in np.flatnonzero(is_window).tolist()]
    )
    part_of_text = (n_tokens.cumsum() // _READ_TOKENS)[number]
    for part in np.unique(part_of_text[is_window]):
        places = np.flatnonzero(is_window & (part_of_text == part))
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(model.cache_hidden_states())
                model.read_ahead([texts[i] for i in places.tolist()], last[places].tolist())
            yield places

"""Draw texts of a canary's space from a model, to estimate ranks in spaces too large to search.

The space is the set of all texts that the canary could have been. Each step allows only tokens that
continue some text of the space, and renormalises the model's distribution over them. A text can be
drawn in several tokenisations; only the tokenizer's own counts (formulas.md A8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.canary_space import CanarySpace, State
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.generation.tries import encode_without_special_tokens
from auditor.models.base import LanguageModel
from auditor.models.memory import BatchSizeLimit, choose_memory_budget
from auditor.models.vocabulary import decode_keeping_special_tokens

_ROWS_BYTES = 2**30


@dataclass(frozen=True)
class ConstrainedDraws:
    """Drawn texts with their likelihoods; arrays have shape (n,).

    Attributes:
        texts: the n texts.
        nll: negative log-likelihood under the model, given the context, in nats.
        log_q: log-probability of the draw, in nats. Draws allow only tokens that continue a text of
            the canary space, so it differs from -nll.
        canonical: whether the tokenizer gives the text the same tokens as the draw.
    """

    texts: tuple[str, ...]
    nll: Floats
    log_q: Floats
    canonical: Bools


class TokenGuide:
    """Guide to the tokens that may come next in a canary text.

    All canary texts come from one canary space: a format whose slots are filled with random
    characters or words.
    """

    def __init__(self, space: CanarySpace, tokenizer: Any, head: Tokens) -> None:
        """Index the vocabulary by the text that each token adds after `head`.

        `head` holds the tokens with which every text starts. Raise AuditError if the space is not
        ASCII.
        """
        if not "".join([space.format, *chain(*space.choice_blocks)]).isascii():
            raise AuditError(
                "expected ASCII texts in a space too large to be searched, got the format "
                f"{space.format!r}: a token may be a part of any other character"
            )
        self.space = space
        self.tokenizer = tokenizer
        self.head = head
        self._head_text = decode_keeping_special_tokens(tokenizer, head)
        self._tokens_by_text: dict[str, list[int]] = {}  # the text is what a token adds to the head
        # Decode after the head: SentencePiece drops the space of a token that comes first.
        for token in range(len(tokenizer)):
            text = decode_keeping_special_tokens(tokenizer, (*head, token))
            self._tokens_by_text.setdefault(text[len(self._head_text) :], []).append(token)
        # Drop tokens that add no text: a text could contain any number of them.
        self._tokens_by_text.pop("", None)
        self._token_text_prefixes: set[str] = set()
        for text in self._tokens_by_text:
            self._token_text_prefixes.update(text[:i] for i in range(1, len(text) + 1))
        self._allowed: dict[State, tuple[Tensor, list[State]]] = {}
        start = space.state_after_text(self._head_text)
        if start is None:
            raise AuditError(
                f"cannot draw texts of the format {space.format!r}: the tokenizer changes them",
            )
        self.start = start

    def list_allowed_tokens(self, state: State) -> tuple[Tensor, list[State]]:
        """Return the tokens allowed in a state, in ascending order, and the state after each.

        A state is the information about the text so far that decides what may follow.
        """
        if state not in self._allowed:
            transitions: list[tuple[int, State]] = []
            frontier = [("", state)]
            while frontier:
                text, text_state = frontier.pop()
                for character, next_state in self.space.list_transitions(text_state):
                    longer = text + character
                    if longer in self._token_text_prefixes:
                        tokens = self._tokens_by_text.get(longer, ())
                        transitions += [(token, next_state) for token in tokens]
                        frontier.append((longer, next_state))
            transitions.sort(key=lambda pair: pair[0])
            tokens_allowed = torch.tensor([token for token, _ in transitions])
            self._allowed[state] = tokens_allowed, [next_state for _, next_state in transitions]
        return self._allowed[state]

    def check_tokens_can_be_drawn(self, tail: Tokens) -> None:
        """Raise AuditError if the tokens `tail` cannot be drawn after the head."""
        state = self.start
        for token in tail:
            if not self.space.is_complete_text_state(state):
                tokens, next_states = self.list_allowed_tokens(state)
            if self.space.is_complete_text_state(state) or token not in tokens:
                raise AuditError(
                    f"the tokenizer writes a text of the format {self.space.format!r} with tokens "
                    "that do not spell it: its space is too large to be searched, and cannot be "
                    "drawn from"
                )
            state = next_states[int((tokens == token).nonzero()[0])]

    def get_max_tail(self) -> int:
        """Return the largest number of tokens that a text can have after the head."""
        # A token writes at least one character.
        longest = sum(max(map(len, block)) for block in self.space.choice_blocks)
        return len(self.space.common_prefix) + longest - len(self._head_text)


Pick = Callable[[Ints, int, Tensor, Floats], Ints]
"""(text indices, position, allowed tokens, cdf of the draw) -> index of each text's token."""


@torch.no_grad()
def draw_constrained_texts(
    model: LanguageModel, guide: TokenGuide, context: Tokens, noise: Floats
) -> ConstrainedDraws:
    """Draw one text for each row of `noise`, starting at `context`.

    Args:
        model: the model to draw from.
        guide: guide to the tokens of the canary space.
        context: token ids that end with the guide's head, with which every text starts.
        noise: numbers in [0, 1), of shape (draws, guide.get_max_tail()).
    """

    def pick_token(texts: Ints, position: int, allowed: Tensor, cdf: Floats) -> Ints:
        # Rounding may end the cdf below a uniform close to 1.
        indices = np.searchsorted(cdf, noise[texts, position], side="right")
        return np.minimum(indices, len(cdf) - 1)

    walk = _ConstrainedWalk(model, guide, context, len(noise), pick_token)
    sequences = [[*guide.head, *tail] for tail in walk.tokens]
    texts = tuple(decode_keeping_special_tokens(guide.tokenizer, row) for row in sequences)
    distinct = sorted(set(texts))
    encodings = encode_without_special_tokens(guide.tokenizer, distinct)
    tokens_by_text = dict(zip(distinct, encodings, strict=True))
    canonical = np.zeros(len(texts), dtype=bool)
    for i, row in enumerate(sequences):
        canonical[i] = tokens_by_text[texts[i]] == row
    return ConstrainedDraws(texts, walk.nll, walk.log_q, canonical)


@torch.no_grad()
def score_constrained_texts(
    model: LanguageModel,
    guide: TokenGuide,
    context: Tokens,
    texts: Sequence[str],
    tails: Sequence[Tokens],
) -> ConstrainedDraws:
    """Compute the nll and log_q of given texts, as if they had been drawn.

    Args:
        model: the model.
        guide: guide to the tokens of the canary space.
        context: token ids that end with the guide's head, with which every text starts.
        texts: the texts.
        tails: for each text, the tokens after the head; the guide must allow them.
    """

    def pick_given_token(indices: Ints, position: int, allowed: Tensor, cdf: Floats) -> Ints:
        # `list_allowed_tokens` sorts the tokens; `check_tokens_can_be_drawn` made sure of these.
        return np.searchsorted(allowed.numpy(), [tails[i][position] for i in indices.tolist()])

    walk = _ConstrainedWalk(model, guide, context, len(tails), pick_given_token)
    canonical = np.ones(len(tails), dtype=bool)
    return ConstrainedDraws(tuple(texts), walk.nll, walk.log_q, canonical)


class _ConstrainedWalk:
    """A walk that generates texts token by token, in batches that fit into memory.

    Attributes:
        tokens: tokens of each text after the guide's head.
        nll: negative log-likelihood of each text, (n,) in nats.
        log_q: log-probability of each text's draw, (n,) in nats.
    """

    def __init__(
        self, model: LanguageModel, guide: TokenGuide, context: Tokens, n_texts: int, pick: Pick
    ) -> None:
        self._model = model
        self._guide = guide
        self._context = context
        self._pick = pick
        self.tokens: list[list[int]] = [[] for _ in range(n_texts)]
        self.nll = np.zeros(n_texts)
        self.log_q = np.zeros(n_texts)
        row_bytes = model.row_bytes(len(context) + guide.get_max_tail())
        batch_size = max(1, choose_memory_budget(model.device, _ROWS_BYTES) // row_bytes)
        for _ in BatchSizeLimit(batch_size).run_pieces_within_memory(n_texts, self._walk_texts):
            pass

    def _walk_texts(self, piece: slice) -> None:
        """Generate the texts of one slice token by token; equal partial texts share an input."""
        live = np.arange(len(self.tokens))[piece]
        # A walk that ran out of memory has left partial results of these texts.
        self.nll[live] = self.log_q[live] = 0.0
        for text in live.tolist():
            self.tokens[text].clear()
        device = self._model.device
        max_tail = self._guide.get_max_tail()
        rows = self._model.start(torch.tensor([self._context], device=device), max_tail)
        states = [self._guide.start]
        row_of_text = np.zeros(len(live), dtype=np.int64)
        for position in range(max_tail):
            distribution = rows.log_probs().double().cpu()
            row_of_text, steps, states = self._extend_texts(
                live, row_of_text, states, distribution, position
            )
            continues = row_of_text >= 0
            live = live[continues]
            row_of_text = row_of_text[continues]
            if not len(live):
                return
            parents, next_tokens = torch.tensor(steps, device=device).unbind(1)
            rows.advance(parents, next_tokens)

    def _extend_texts(
        self,
        live: Ints,
        row_of_text: Ints,
        states: Sequence[State],
        distribution: Tensor,
        position: int,
    ) -> tuple[Ints, list[tuple[int, int]], list[State]]:
        """Choose the next token of each text that is not complete.

        Args:
            live: indices of these texts.
            row_of_text: row of each text in the distribution (rows, V), of shape (texts,).
            states: state of each row.
            distribution: next-token log-probabilities, (rows, V).
            position: number of tokens after the head so far.

        Returns:
            The next row of each text, (texts,); -1 if the text is complete.
            The (row, token) from which each next row results.
            The states of the next rows.
        """
        next_rows: dict[tuple[int, int], int] = {}
        next_row_of_text = np.empty_like(row_of_text)
        steps = list[tuple[int, int]]()
        next_states = list[State]()
        for row, state in enumerate(states):
            texts = np.flatnonzero(row_of_text == row)
            allowed, states_after = self._guide.list_allowed_tokens(state)
            log_probs = distribution[row, allowed]
            log_mass = torch.logsumexp(log_probs, -1)
            cdf = torch.cumsum((log_probs - log_mass).exp(), -1).numpy()
            choices = self._pick(live[texts], position, allowed, cdf)
            self.nll[live[texts]] -= log_probs.numpy()[choices]
            # Renormalised over the allowed tokens: the q that weighs a draw (formulas.md A8).
            self.log_q[live[texts]] += (log_probs - log_mass).numpy()[choices]
            for text, choice in zip(texts.tolist(), choices.tolist(), strict=True):
                token = int(allowed[choice])
                self.tokens[live[text]].append(token)
                if (row, token) not in next_rows:
                    next_rows[row, token] = -1
                    if not self._guide.space.is_complete_text_state(states_after[choice]):
                        next_rows[row, token] = len(steps)
                        steps.append((row, token))
                        next_states.append(states_after[choice])
                next_row_of_text[text] = next_rows[row, token]
        return next_row_of_text, steps, next_states


def find_common_proper_prefix(sequences: Sequence[Sequence[int]]) -> Tokens:
    """Return the longest common prefix that is shorter than every sequence."""
    # A prefix that the first and the last in order share is shared by all between them.
    ordered = sorted(map(tuple, sequences))
    first = ordered[0]
    last = ordered[-1]
    n_common = 0
    while n_common < min(map(len, ordered)) - 1 and first[n_common] == last[n_common]:
        n_common += 1
    return first[:n_common]

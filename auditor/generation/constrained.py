"""Draws from a model that is held to the texts of a space: how ranks in spaces too large to search are estimated.

A token may come next if it goes on with some text of the space; the distribution is renormalised over those. The same
text can be drawn in several tokenisations, of which only the tokenizer's own counts (formulas.md A8). Knows nothing of
canaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core.canary_space import CanarySpace, State
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.generation.tries import encode_without_special_tokens
from auditor.models.base import LanguageModel
from auditor.models.memory import BatchSizeLimit, decoding_memory_budget
from auditor.models.vocabulary import decode_keeping_special_tokens

_ROWS_BYTES = 2**30


@dataclass(frozen=True)
class ConstrainedDraws:
    """n texts. nll: in nats under the model, behind the context; log_q: of the draw; canonical: whether the tokens
    drawn are those that the tokenizer makes of the text.
    """

    texts: tuple[str, ...]
    nll: NDArray[np.float64]
    log_q: NDArray[np.float64]
    canonical: NDArray[np.bool_]


class TokenGuide:
    """Which tokens may follow where: the vocabulary, read along the characters of the space."""

    def __init__(self, space: CanarySpace, tokenizer: Any, head: Tokens) -> None:
        """head: the tokens that all texts begin with. Raises AuditError for a space that is not ASCII."""
        if not space.format.isascii() or not all(choice.isascii() for block in space.choice_blocks for choice in block):
            raise AuditError(
                f"expected ASCII texts in a space too large to be searched, got the format {space.format!r}: "
                "tokens may hold parts of other characters"
            )
        self.space, self.tokenizer, self.head = space, tokenizer, head
        self._written = decode_keeping_special_tokens(tokenizer, head)
        self._pieces: dict[str, list[int]] = {}  # what each token writes behind the head: tokens by text
        # Behind the head, not alone: SentencePiece drops the space of a token that stands first.
        for token in range(len(tokenizer)):
            self._pieces.setdefault(
                decode_keeping_special_tokens(tokenizer, (*head, token))[len(self._written) :], []
            ).append(token)
        self._pieces.pop("", None)  # no token that writes nothing: a text could take any number of them
        self._beginnings = {piece[:i] for piece in self._pieces for i in range(1, len(piece) + 1)}
        self._allowed: dict[State, tuple[Tensor, list[State]]] = {}
        start = space.state_after_text(self._written)
        if start is None:
            raise AuditError(f"the tokenizer does not give texts of the format {space.format!r} back: it changes them")
        self.start = start

    def allowed_tokens_and_next_states(self, state: State) -> tuple[Tensor, list[State]]:
        """The tokens that may follow, and where each leads."""
        if state not in self._allowed:
            found: list[tuple[int, State]] = []
            waiting = [("", state)]
            while waiting:
                written, at = waiting.pop()
                for character, then in self.space.next_characters_and_states(at):
                    longer = written + character
                    if longer in self._beginnings:
                        found += [(token, then) for token in self._pieces.get(longer, ())]
                        waiting.append((longer, then))
            found.sort(key=lambda pair: pair[0])
            self._allowed[state] = torch.tensor([token for token, _ in found]), [then for _, then in found]
        return self._allowed[state]

    def check_tokens_can_be_drawn(self, tail: Tokens) -> None:
        """Raises AuditError where these tokens behind the head cannot be drawn."""
        state = self.start
        for token in tail:
            tokens, then = (
                self.allowed_tokens_and_next_states(state)
                if not self.space.is_complete_text_state(state)
                else (torch.empty(0), [])
            )
            if token not in tokens:
                raise AuditError(
                    f"the tokenizer writes a text of the format {self.space.format!r} with tokens that do not spell "
                    "it: its space is too large to be searched, and cannot be drawn from"
                )
            state = then[int((tokens == token).nonzero()[0])]

    def max_tokens_behind_head(self) -> int:
        """The most tokens that a text takes behind the head."""
        # A token writes one character at least.
        return (
            len(self.space.common_beginning)
            + sum(max(map(len, block)) for block in self.space.choice_blocks)
            - len(self._written)
        )


Pick = Callable[[NDArray[np.int64], int, Tensor, NDArray[np.float64]], NDArray[np.int64]]
"""(which texts, position, tokens allowed, cdf of the draw over them) -> the place of each text's token among them."""


@torch.no_grad()
def draw_constrained_texts(
    model: LanguageModel, guide: TokenGuide, context: Tokens, noise: NDArray[np.float64]
) -> ConstrainedDraws:
    """One text a row of `noise`, (draws, guide.max_tokens_behind_head()) in [0, 1). context: ends in the head."""

    def inverse_cdf(who: NDArray[np.int64], at: int, allowed: Tensor, cdf: NDArray[np.float64]) -> NDArray[np.int64]:
        # Rounding may end the cdf below a uniform close to 1.
        return np.minimum(np.searchsorted(cdf, noise[who, at], side="right"), len(cdf) - 1)

    tokens, nll, log_q = _walk_constrained_texts_with_nll(model, guide, context, len(noise), inverse_cdf)
    texts = tuple(decode_keeping_special_tokens(guide.tokenizer, (*guide.head, *row)) for row in tokens)
    distinct = sorted(set(texts))
    own = dict(zip(distinct, encode_without_special_tokens(guide.tokenizer, distinct), strict=True))
    canonical = [own[text] == [*guide.head, *row] for text, row in zip(texts, tokens, strict=True)]
    return ConstrainedDraws(texts, nll, log_q, np.array(canonical, dtype=bool))


@torch.no_grad()
def score_texts_as_constrained_draws(
    model: LanguageModel, guide: TokenGuide, context: Tokens, texts: Sequence[str], tails: Sequence[Tokens]
) -> ConstrainedDraws:
    """nll and log_q of given texts, as of drawn ones. tails: tokens behind the head, which the guide must take."""

    def its_own(who: NDArray[np.int64], at: int, allowed: Tensor, cdf: NDArray[np.float64]) -> NDArray[np.int64]:
        # `allowed_tokens_and_next_states` is sorted, and has each of these tokens: `check_tokens_can_be_drawn` has seen
        # to it.
        return np.searchsorted(allowed.numpy(), [tails[i][at] for i in who.tolist()])

    _, nll, log_q = _walk_constrained_texts_with_nll(model, guide, context, len(tails), its_own)
    return ConstrainedDraws(tuple(texts), nll, log_q, np.ones(len(tails), dtype=bool))


def _walk_constrained_texts_with_nll(
    model: LanguageModel, guide: TokenGuide, context: Tokens, count: int, pick: Pick
) -> tuple[list[list[int]], NDArray[np.float64], NDArray[np.float64]]:
    """The tokens of each of `count` texts, its nll and its log_q; as many at once as memory allows."""
    tokens: list[list[int]] = [[] for _ in range(count)]
    nll, log_q = np.zeros(count), np.zeros(count)

    def walk(some: slice) -> None:
        """Writes these texts out, position by position. Texts that agree so far share a forward row."""
        live = np.arange(count)[some]
        nll[live] = log_q[live] = 0.0  # a walk that outgrew memory has left its part of them
        for text in live.tolist():
            tokens[text].clear()
        rows = model.start(torch.tensor([context], device=model.device), guide.max_tokens_behind_head())
        states, row_of = [guide.start], np.zeros(len(live), dtype=np.int64)
        for position in range(guide.max_tokens_behind_head()):
            distribution = rows.log_probs().double().cpu()
            followers: dict[tuple[int, int], int] = {}  # (row, token) -> row it becomes, -1 where its text has ended
            after, then = np.empty_like(row_of), list[State]()
            for row, state in enumerate(states):
                mine = np.flatnonzero(row_of == row)
                allowed, ends = guide.allowed_tokens_and_next_states(state)
                own = distribution[row, allowed]
                log_mass = torch.logsumexp(own, -1)
                picked = pick(live[mine], position, allowed, torch.cumsum((own - log_mass).exp(), -1).numpy())
                nll[live[mine]] -= own.numpy()[picked]
                # Renormalised over the tokens allowed: the q that weighs a draw (formulas.md A8).
                log_q[live[mine]] += (own - log_mass).numpy()[picked]
                for text, place in zip(mine.tolist(), picked.tolist(), strict=True):
                    token = int(allowed[place])
                    tokens[live[text]].append(token)
                    if (row, token) not in followers:
                        ended = guide.space.is_complete_text_state(ends[place])
                        followers[row, token] = -1 if ended else len(then)
                        then += [] if ended else [ends[place]]
                    after[text] = followers[row, token]
            live, row_of, states = live[after >= 0], after[after >= 0], then
            if not len(live):
                return
            parents, chosen = zip(*(key for key, row in followers.items() if row >= 0), strict=True)
            rows.advance(torch.tensor(parents, device=model.device), torch.tensor(chosen, device=model.device))

    most = max(
        1,
        decoding_memory_budget(model.device, _ROWS_BYTES)
        // model.row_bytes(len(context) + guide.max_tokens_behind_head()),
    )
    for _ in BatchSizeLimit(most).run_pieces_within_memory(count, walk):
        pass
    return tokens, nll, log_q


def common_proper_token_prefix(sequences: Sequence[Sequence[int]]) -> Tokens:
    """The longest beginning of all the token sequences behind which each of them goes on."""
    # What the first and the last in order share, all between them share, too.
    ordered = sorted(map(tuple, sequences))
    first, last, shared = ordered[0], ordered[-1], 0
    while shared < min(map(len, ordered)) - 1 and first[shared] == last[shared]:
        shared += 1
    return first[:shared]

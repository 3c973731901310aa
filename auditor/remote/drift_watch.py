"""Whether a server is still the one that shook hands: what it answered is asked again, at intervals
and at the end.

Sentinels are requests about texts that are nobody's secret, known from the handshake. Beside them
one in a hundred of the run's own requests is asked again, a text of given tokens cut at another
place: a server that corrupts some of its numbers, or changes its model, answers otherwise. What one
server differs by from itself is measured at the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from scipy.stats import binom

from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator

TEXTS = (
    "Dear Ms. Alvarez, thank you for",
    "def main(path):\n    with open(",
    "The three largest rivers are",
    "Q7 4402-zx, lot 19: to",
)
LENGTH = 8  # tokens of a sentinel's greedy answer
EVERY = 100  # requests between two checks, each with one in so many of the run's own
_LAST = 4  # requests of the run asked again at its end, of each kind
_KEPT = 256  # of each kind, to draw them from
_BURST = 3  # times that each sentinel is asked when a greedy answer came back otherwise
_BURST_OWN = 40  # of the run's own requests, each once
_BURSTS = 10  # in a run, at most

# Greedy text is no number: it may change with the batch. What is let be is a server that gives nine
# answers in ten as it always does, so that two answers to one request differ in less than a fifth.
VARIES = 0.2
# of the exact binomial test of the run's own requests; with ten bursts 0.5% of honest runs
LEVEL = 5e-4
_UNSTEADY = 0.01  # level of the same test of all that was asked again, which makes a doubt
# sentinels of four of which no answer is one of the handshake's: 0.2% of the runs of such a server
_CHANGED = 2

# Nats between two answers to the same tokens that are never an alarm, at most and on average: half
# precision in another batch. A difference counts less where a token is unlikely, as its logit was
# rounded at a larger magnitude.
_MOST, _MEAN = 0.5, 0.05
_TIMES = 4  # what is allowed, in terms of what the handshake has seen
_TOO_FAR = (2.0, 0.25)  # nobody can be told from another where the handshake has seen more

T = TypeVar("T")


class ServerChanged(Exception):
    """A server that answers otherwise than it did: which request, what was expected, what came."""


@dataclass(frozen=True)
class GreedyAnswer:
    """A greedy answer. number: of the request in this run, 0 for a sentinel; other: what else it
    was answered."""

    context: Tokens
    length: int
    text: str
    number: int = 0
    other: str = ""


@dataclass(frozen=True)
class ScoredText:
    """The log-probabilities of all tokens of a text, in nats; 0 for those that nothing is known
    of."""

    text: Tokens
    log_probs: tuple[float, ...]
    number: int = 0


@dataclass
class ServerWatch:
    """draw, score: ask anew, whatever is kept; score gives None for a text that would be read as
    other tokens."""

    draw: Callable[[Sequence[GreedyAnswer]], Sequence[str]]
    score: Callable[[Sequence[Tokens]], Sequence[Sequence[float] | None]] | None
    contexts: Sequence[Tokens]
    most: float = _MOST  # nats that two answers may differ by, at most and on average
    mean: float = _MEAN
    measured: float = 0.0  # by how much they did at the handshake, at most
    compared: int = 0  # greedy answers asked again
    differed: int = 0
    rescored: int = 0
    _drawn: list[GreedyAnswer] = field(default_factory=list)  # sentinels
    _scored: list[ScoredText] = field(default_factory=list)
    _own: list[GreedyAnswer] = field(default_factory=list)
    _own_scored: list[ScoredText] = field(default_factory=list)
    _new: list[GreedyAnswer] = field(default_factory=list)  # since the last check
    _new_scored: list[ScoredText] = field(default_factory=list)
    _requests: int = 0
    _finished: int = 0  # of them, when all was looked at
    _since: int = 0
    _checks: int = 0
    _bursts: int = 0

    def ask_initial_sentinels(self) -> None:
        """Asks the sentinels for the first time, and how far two answers to the same are apart.

        Raises ServerChanged where they are so far apart that no two models could be told from one
        another.
        """
        blank = [GreedyAnswer(context, LENGTH, "") for context in self.contexts]
        # models may take turns
        found = zip(blank, self.draw(blank), self.draw(blank[::-1])[::-1], strict=True)
        self._drawn = [
            GreedyAnswer(one.context, LENGTH, text, other=other) for one, text, other in found
        ]
        self.compared, self.differed = len(blank), sum(one.text != one.other for one in self._drawn)
        if self.score is not None:
            scored = zip(self.contexts, self.score(self.contexts), strict=True)
            self._scored = [
                ScoredText(text, tuple(values)) for text, values in scored if values is not None
            ]
            self._measure_handshake_difference()

    def _measure_handshake_difference(self) -> None:
        pairs = self._rescore_shortened_texts(self._scored[::-1])  # reversed: models may take turns
        apart = [
            _largest_and_mean_answer_difference(one.log_probs, values) for one, values in pairs
        ]
        most, mean = (max((found[i] for found in apart), default=0.0) for i in (0, 1))
        if most > _TOO_FAR[0] or mean > _TOO_FAR[1]:
            raise ServerChanged(
                "a text was sent twice in the handshake, and its log-probabilities came back "
                f"{most:.2g} nats apart: either several models answer under one name, or its "
                "numbers are corrupted"
            )
        self.measured = most
        self.most, self.mean = max(_MOST, _TIMES * most), max(_MEAN, _TIMES * mean)

    # --- what the run asks ---

    def note_greedy_answer(self, context: Tokens, length: int, text: str) -> None:
        self._requests += 1
        self._new.append(GreedyAnswer(context, length, text, self._requests))

    def note_scored_text(self, text: Tokens, log_probs: Sequence[float]) -> None:
        self._requests += 1
        self._new_scored.append(ScoredText(text, tuple(log_probs), self._requests))

    def count_unwatched_requests(self, requests: int) -> None:
        """Count requests of the run that cannot be asked again, so that its end is checked by the
        sentinels."""
        self._requests += requests

    def count_requests_and_check_when_due(self, requests: int) -> None:
        """Counts requests that were sent; checks once `EVERY` of them were. Raises
        ServerChanged."""
        self._since += requests
        if self._since >= EVERY:
            self.check_sentinel_for_drift()

    def check_sentinel_for_drift(self) -> None:
        """Checks the next sentinel in turn, and one in a hundred of what was asked since. Raises
        ServerChanged."""
        turn = self._checks % len(TEXTS)
        drawn, scored = self._pool_new_requests()
        if self._redraw_and_find_differing([*self._drawn[turn : turn + 1], *drawn]):
            self._recheck_with_burst()  # one greedy answer that differs proves nothing, but many do
        self._check_rescored_texts([*self._scored[turn : turn + 1], *scored])

    def check_all_sentinels_for_drift(self) -> None:
        """All sentinels, and some of all that the run asked, the longest text among them. Raises
        ServerChanged."""
        if self._requests == self._finished:
            return
        self._finished = self._requests
        drawn, scored = self._pool_new_requests()
        longest = sorted(self._own_scored, key=lambda one: -len(one.text))[:1]
        drawn += _random_answers_to_recheck(
            [one for one in self._own if one not in drawn], _LAST - len(drawn), self._checks
        )
        scored += [one for one in longest if one not in scored]
        scored += _random_answers_to_recheck(
            [one for one in self._own_scored if one not in scored],
            _LAST - len(scored),
            self._checks,
        )
        self._redraw_and_find_differing([*self._drawn, *drawn])
        if (
            self.differed
        ):  # if only in the handshake, before there was anything of the run to look at
            self._recheck_with_burst()
        self._check_rescored_texts([*self._scored, *scored])

    def _pool_new_requests(self) -> tuple[list[GreedyAnswer], list[ScoredText]]:
        """Moves the new requests to the old. Returns one in a hundred of the new, at random, to be
        asked again."""
        drawn = _random_answers_to_recheck(
            self._new, math.ceil(len(self._new) / EVERY), self._checks
        )
        scored = _random_answers_to_recheck(
            self._new_scored, math.ceil(len(self._new_scored) / EVERY), self._checks
        )
        self._checks, self._since = self._checks + 1, 0
        longest = sorted([*self._own_scored, *self._new_scored], key=lambda one: -len(one.text))[
            :_LAST
        ]
        self._own = _random_answers_to_recheck([*self._own, *self._new], _KEPT, self._checks)
        kept = _random_answers_to_recheck(
            [*self._own_scored, *self._new_scored], _KEPT, self._checks
        )
        self._own_scored = list(dict.fromkeys([*longest, *kept]))
        self._new, self._new_scored = [], []
        return drawn, scored

    # --- asked again ---

    def _rescore_shortened_texts(
        self, asked: Sequence[ScoredText]
    ) -> list[tuple[ScoredText, Sequence[float]]]:
        """Scores each text anew without some of its end: its tokens keep the log-probabilities of
        the first answer."""
        assert self.score is not None  # nothing was scored otherwise
        noise = keyed_random_generator("cut again", self._checks, len(asked))
        cuts = [
            one.text[: int(noise.integers(max(2, len(one.text) // 2), len(one.text)))]
            for one in asked
        ]
        found = zip(asked, self.score(cuts), strict=True)
        return [(one, values) for one, values in found if values is not None]

    def _check_rescored_texts(self, asked: Sequence[ScoredText]) -> None:
        if not asked:
            return
        for one, values in self._rescore_shortened_texts(
            [one for one in asked if len(one.text) > 2]
        ):
            self.rescored += 1
            most, mean = _largest_and_mean_answer_difference(one.log_probs, values)
            if most > self.most or mean > self.mean:
                places = (
                    (abs(a - b), i)
                    for i, (a, b) in enumerate(zip(one.log_probs, values, strict=False))
                )
                where = max(places)[1]
                name = (
                    f"request {one.number:,} of this run"
                    if one.number
                    else "a request of the handshake"
                )
                raise ServerChanged(
                    f"{name}, a text of {len(one.text):,} tokens, was sent again without its last "
                    f"{len(one.text) - len(values):,}: the log-probability of token {where + 1:,} "
                    f"was {one.log_probs[where]:.3f} nats and came back as {values[where]:.3f} "
                    f"(the handshake saw differences of up to {self.measured:.2g})"
                )

    def _recheck_with_burst(self) -> None:
        if self._bursts == _BURSTS:
            return
        self._bursts += 1
        differing = self._redraw_and_find_differing(
            [one for one in self._drawn for _ in range(_BURST)]
        )
        new = [(one, text) for one, text in differing if text != one.other]
        changed = [one for one in self._drawn if [asked for asked, _ in new].count(one) == _BURST]
        if len(changed) >= _CHANGED:
            came = next(text for one, text in new if one == changed[0])
            raise ServerChanged(
                f"{len(changed)} of {len(self._drawn)} texts of the handshake have other greedy "
                f"answers now: to {TEXTS[self._drawn.index(changed[0])]!r}, expected "
                f"{changed[0].text!r}, came back {came!r}"
            )
        own = _random_answers_to_recheck(self._own, _BURST_OWN, self._bursts)
        differing = self._redraw_and_find_differing(own)
        # sf(k - 1) is the chance of k or more: the exact one-sided test
        if differing and binom.sf(len(differing) - 1, len(own), VARIES) <= LEVEL:
            first, text = differing[0]
            apart = (i for i, (a, b) in enumerate(zip(first.text, text, strict=False)) if a != b)
            # neither is quoted: they may be private
            same = next(apart, min(len(first.text), len(text)))
            raise ServerChanged(
                f"{len(differing)} of {len(own)} greedy answers of this run came back otherwise "
                f"when they were asked for again, the first of them to request {first.number:,}: "
                f"expected {len(first.text)} characters, got {len(text)}, of which the first "
                f"{same} agree"
            )

    @property
    def answers_are_unstable(self) -> bool:
        """Whether greedy answers differ more than those of one model do."""
        return bool(binom.sf(self.differed - 1, self.compared, VARIES) <= _UNSTEADY)

    def _redraw_and_find_differing(
        self, asked: Sequence[GreedyAnswer]
    ) -> list[tuple[GreedyAnswer, str]]:
        found = list(zip(asked, self.draw(asked), strict=True)) if asked else []
        differing = [(one, text) for one, text in found if text != one.text]
        self.compared, self.differed = self.compared + len(found), self.differed + len(differing)
        return differing


def _largest_and_mean_answer_difference(
    one: Sequence[float], other: Sequence[float]
) -> tuple[float, float]:
    """The largest and the mean difference, in nats, of the tokens that both speak of."""
    pairs = np.array(list(zip(one, other, strict=False)), dtype=float).reshape(-1, 2)
    if not len(pairs):
        return 0.0, 0.0
    first, second = pairs.T
    same = first == second  # two infinities are as far apart as two equal numbers
    apart = np.abs(np.where(same, 0.0, first) - np.where(same, 0.0, second))
    scaled = apart / (1 + np.minimum(np.abs(first), np.abs(second)) / 10)
    return float(np.where(same, 0.0, scaled).max()), float(apart.mean())


def _random_answers_to_recheck(every: Sequence[T], count: int, check: int) -> list[T]:
    """So many of them at random, and in random order: several models may take turns."""
    chosen = keyed_random_generator("asked again", check, len(every)).permutation(len(every))[
        : max(0, count)
    ]
    return [every[i] for i in chosen.tolist()]

"""Check during a run and at its end that the server has not changed since the handshake.

Sentinels are handshake requests about public texts. They are sent again during the run. One in a
hundred of the run's own requests is also sent again; if it scores a text, the text is split at a
different position. If a server corrupts some values or changes its model, some answers differ. The
handshake measures how much the answers of an unchanged server differ.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

import numpy as np
from scipy.special import betainc

from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import make_keyed_generator

TEXTS = (
    "Dear Ms. Alvarez, thank you for",
    "def main(path):\n    with open(",
    "The three largest rivers are",
    "Q7 4402-zx, lot 19: to",
)
LENGTH = 8  # tokens of a sentinel's greedy answer
EVERY = 100  # requests between two checks; each check repeats one in this many of the run's own
_LAST = 4  # requests of the run asked again at its end, of each kind
_KEPT = 256  # stored requests of each kind, to draw from
_BURST = 3  # times each sentinel is asked after a greedy answer differed
_BURST_OWN = 40  # of the run's own requests, once each
_BURSTS = 10  # most bursts in a run

# Greedy text may change with the batch. Tolerate a server that gives nine answers in ten as always,
# so that two answers to one request differ in less than a fifth.
VARIES = 0.2
# level of the exact binomial test of the run's own requests; over ten bursts, 0.5% of honest runs
# fail
LEVEL = 5e-4
_UNSTEADY = 0.05  # level of the same test over the first repeats of requests, for a doubt
# Number of the four sentinels that must give none of the answers of the handshake. A server as
# variable as VARIES reaches it in 0.2% of runs.
_CHANGED = 2

# The largest and mean difference in nats, between two answers to the same tokens, that never raises
# an alarm: half precision in another batch. A difference counts less for an unlikely token, whose
# logit was rounded at a larger magnitude.
_MOST = 0.5
_MEAN = 0.05
_TIMES = 4  # the allowed multiple of the handshake's difference
_TOO_FAR = (2.0, 0.25)  # above these handshake differences no change is detectable


class ServerChanged(Exception):
    """Error for a server whose answers have changed.

    The message gives the request, the expected answer and the new answer.
    """


@dataclass(frozen=True)
class WatchedRequest:
    """A request to the server with its answer: a greedy text, or the scores of a given text.

    Attributes:
        context: tokens of the prompt.
        length: number of tokens in the greedy answer.
        text: the greedy answer.
        number: number of the request in the run; 0 for the handshake.
        repetition: for a sentinel, the answer to the same request when repeated.
        log_probs: log-probability of each token of the prompt, in nats; 0 if unknown.
    """

    context: Tokens
    length: int = 0
    text: str = ""
    number: int = 0
    repetition: str = ""
    log_probs: tuple[float, ...] = ()


@dataclass
class _RequestPool:
    """The run's own requests of one kind: those since the last check, and a sample of the older."""

    new: list[WatchedRequest] = field(default_factory=list)
    old: list[WatchedRequest] = field(default_factory=list)

    def choose_new(self, check: int) -> list[WatchedRequest]:
        """Return a random hundredth of the new requests. All new requests count as old afterwards.

        `check` is the number of the check.
        """
        chosen = _choose_rechecked_requests(self.new, math.ceil(len(self.new) / EVERY), check)
        requests = [*self.old, *self.new]
        longest = heapq.nlargest(_LAST, requests, key=lambda request: len(request.context))
        sample = _choose_rechecked_requests(requests, _KEPT, check + 1)
        # By number: to hash a request is to hash all of its tokens.
        self.old = list({request.number: request for request in [*longest, *sample]}.values())
        self.new = []
        return chosen

    def choose_last(self, check: int) -> list[WatchedRequest]:
        """Return `choose_new`, the longest request and random others, `_LAST` or more in all."""
        chosen = self.choose_new(check)
        others = [request for request in self.old if request not in chosen]
        if self.old and self.old[0] not in chosen:  # the longest
            chosen.append(others.pop(0))
        return chosen + _choose_rechecked_requests(others, _LAST - len(chosen), check + 1)


@dataclass
class ServerWatch:
    """A watch that repeats requests and compares the answers, to detect a change of the server.

    Attributes:
        draw: sends greedy requests again, ignoring stored answers.
        score: returns new log-probabilities of texts; None for a text that the server would
            tokenise differently.
        contexts: tokens of the public texts.
        max_difference: largest difference of log-probabilities to allow, in nats.
        mean: largest mean difference to allow, in nats.
        measured: largest difference in the handshake, in nats.
        compared: number of greedy requests that were repeated.
        differed: number of these whose answer differed the first time.
        rescored: number of texts that were scored again.
    """

    draw: Callable[[Sequence[WatchedRequest]], Sequence[str]]
    score: Callable[[Sequence[Tokens]], Sequence[Sequence[float] | None]] | None
    contexts: Sequence[Tokens]
    max_difference: float = _MOST
    mean: float = _MEAN
    measured: float = 0.0
    compared: int = 0
    differed: int = 0
    rescored: int = 0
    _sentinels: list[WatchedRequest] = field(default_factory=list)
    _scored: list[WatchedRequest] = field(default_factory=list)
    _own: _RequestPool = field(default_factory=_RequestPool)
    _own_scored: _RequestPool = field(default_factory=_RequestPool)
    # numbers of the counted requests; later repeats do not count, as all differ from a rare answer
    _counted: set[int] = field(default_factory=lambda: {0})
    _requests: int = 0
    _finished: int = 0  # their number at the last full check
    _n_since_check: int = 0
    _checks: int = 0
    _bursts: int = 0

    def ask_initial_sentinels(self) -> None:
        """Send the sentinels (public texts) for the first time, and measure how their answers vary.

        Raise ServerChanged if they vary so much that a change of model could not be detected.
        """
        blank = [WatchedRequest(context, LENGTH) for context in self.contexts]
        # models may take turns
        answers = zip(blank, self.draw(blank), self.draw(blank[::-1])[::-1], strict=True)
        for sentinel, text, other in answers:
            self._sentinels.append(replace(sentinel, text=text, repetition=other))
            self.compared += 1
            self.differed += text != other
        if self.score is not None:
            scored = zip(self.contexts, self.score(self.contexts), strict=True)
            for context, values in scored:
                if values is not None:
                    self._scored.append(WatchedRequest(context, log_probs=tuple(values)))
            self._measure_handshake_difference()

    def _measure_handshake_difference(self) -> None:
        """Measure how far repeated answers of the handshake differ, to set the allowed drift."""
        pairs = self._rescore_shortened_texts(self._scored[::-1])  # reversed: models may take turns
        differences = [(0.0, 0.0)]
        for scored, values in pairs:
            differences.append(_measure_answer_differences(scored.log_probs, values))
        most, mean = np.max(differences, axis=0).tolist()
        if most > _TOO_FAR[0] or mean > _TOO_FAR[1]:
            raise ServerChanged(
                "a text was sent twice in the handshake, and its log-probabilities came back "
                f"{most:.2g} nats apart: either several models answer under one name, or its "
                "numbers are corrupted"
            )
        self.measured = most
        self.max_difference, self.mean = max(_MOST, _TIMES * most), max(_MEAN, _TIMES * mean)

    # --- requests of the run ---

    def note_greedy_answer(self, context: Tokens, length: int, text: str) -> None:
        self._requests += 1
        self._own.new.append(WatchedRequest(context, length, text, self._requests))

    def note_scored_text(self, text: Tokens, log_probs: Sequence[float]) -> None:
        self._requests += 1
        request = WatchedRequest(text, number=self._requests, log_probs=tuple(log_probs))
        self._own_scored.new.append(request)

    def count_unwatched_requests(self, requests: int) -> None:
        """Count requests that cannot be repeated.

        After any such request, all sentinels are checked at the end of the run.
        """
        self._requests += requests

    def check_when_due(self, requests: int) -> None:
        """Count sent requests, and check the server after every `EVERY` of them.

        Raise ServerChanged if the server has changed.
        """
        self._n_since_check += requests
        if self._n_since_check >= EVERY:
            self.check_sentinel()

    def check_sentinel(self) -> None:
        """Check the next sentinel and one in a hundred new requests.

        Raise ServerChanged if the server has changed.
        """
        turn = self._checks % len(TEXTS)
        greedy = self._own.choose_new(self._checks)
        scored = self._own_scored.choose_new(self._checks)
        self._count_check()
        if self._redraw_differing([*self._sentinels[turn : turn + 1], *greedy]):
            # a single different greedy answer proves nothing, but many do
            self._recheck_burst()
        self._check_rescored_texts([*self._scored[turn : turn + 1], *scored])

    def check_all_sentinels(self) -> None:
        """Check all sentinels, some requests and the longest text.

        Raise ServerChanged if the server has changed.
        """
        if self._requests == self._finished:
            return
        self._finished = self._requests
        greedy = self._own.choose_last(self._checks)
        scored = self._own_scored.choose_last(self._checks)
        self._count_check()
        differing = self._redraw_differing([*self._sentinels, *greedy])
        # even if only in the handshake, before the run had requests to check
        if differing or self.differed:
            self._recheck_burst()
        self._check_rescored_texts([*self._scored, *scored])

    def _count_check(self) -> None:
        self._checks += 1
        self._n_since_check = 0

    # --- repeated requests ---

    def _rescore_shortened_texts(
        self, scored_texts: Sequence[WatchedRequest]
    ) -> list[tuple[WatchedRequest, Sequence[float]]]:
        """Score each text again without its last tokens, and return (text, new scores).

        If the server has not changed, the remaining tokens get the same scores as before.
        """
        assert self.score is not None  # otherwise nothing was scored
        noise = make_keyed_generator("cut again", self._checks, len(scored_texts))
        cuts = []
        for scored in scored_texts:
            cuts.append(
                scored.context[
                    : int(noise.integers(max(2, len(scored.context) // 2), len(scored.context)))
                ]
            )
        pairs = zip(scored_texts, self.score(cuts), strict=True)
        return [(scored, values) for scored, values in pairs if values is not None]

    def _check_rescored_texts(self, scored_texts: Sequence[WatchedRequest]) -> None:
        """Score these texts again, and raise ServerChanged if the scores differ too much."""
        if not scored_texts:
            return
        for old, values in self._rescore_shortened_texts(
            [old for old in scored_texts if len(old.context) > 2]
        ):
            self.rescored += 1
            most, mean = _measure_answer_differences(old.log_probs, values)
            if most > self.max_difference or mean > self.mean:
                differences = map(operator.sub, old.log_probs, values)
                _, place = max(zip(map(abs, differences), count(), strict=False))
                name = "a request of the handshake"
                if old.number:
                    name = f"request {old.number:,} of this run"
                raise ServerChanged(
                    f"{name}, a text of {len(old.context):,} tokens, was sent again without its "
                    f"last {len(old.context) - len(values):,}: the log-probability of token "
                    f"{place + 1:,} "
                    f"was {old.log_probs[place]:.3f} nats and came back as {values[place]:.3f} "
                    f"(the handshake saw differences of up to {self.measured:.2g})"
                )

    def _recheck_burst(self) -> None:
        """Send all sentinels and some requests of the run again, each sentinel several times.

        Raise ServerChanged if too many answers differ. A run has at most `_BURSTS` such checks.
        """
        if self._bursts == _BURSTS:
            return
        self._bursts += 1
        burst = [answer for answer in self._sentinels for _ in range(_BURST)]
        new = defaultdict[WatchedRequest, list[str]](list)
        for answer, text in self._redraw_differing(burst):
            if text != answer.repetition:
                new[answer].append(text)
        changed = [answer for answer in self._sentinels if len(new[answer]) == _BURST]
        if len(changed) >= _CHANGED:
            reply = new[changed[0]][0]
            raise ServerChanged(
                f"{len(changed)} of {len(self._sentinels)} texts of the handshake have different "
                f"greedy answers now: for {TEXTS[self._sentinels.index(changed[0])]!r}, expected "
                f"{changed[0].text!r}, got {reply!r}"
            )
        chosen = _choose_rechecked_requests(self._own.old, _BURST_OWN, self._bursts)
        differing = self._redraw_differing(chosen)
        if differing and _compute_upper_tail(len(differing), len(chosen)) <= LEVEL:
            first, text = differing[0]
            # do not quote the texts: they may be private
            same = sum(takewhile(bool, map(operator.eq, first.text, text)))
            raise ServerChanged(
                f"{len(differing)} of {len(chosen)} greedy answers of this run differed when they "
                f"were requested again, the first of them for request {first.number:,}: "
                f"expected {len(first.text)} characters, got {len(text)}, of which the first "
                f"{same} agree"
            )

    @property
    def answers_are_unstable(self) -> bool:
        """True if greedy answers vary more often than one unchanged model's answers would."""
        return bool(_compute_upper_tail(self.differed, self.compared) <= _UNSTEADY)

    def _redraw_differing(
        self, answers: Sequence[WatchedRequest]
    ) -> list[tuple[WatchedRequest, str]]:
        """Request these greedy answers again; return (answer, new text) for those that differ."""
        differing = []
        if answers:
            for answer, text in zip(answers, self.draw(answers), strict=True):
                if text != answer.text:
                    differing.append((answer, text))
                if answer.number not in self._counted:
                    self._counted.add(answer.number)
                    self.compared += 1
                    self.differed += text != answer.text
        return differing


def _measure_answer_differences(
    answer: Sequence[float], other: Sequence[float]
) -> tuple[float, float]:
    """Return the largest and the mean difference of two lists of log-probabilities, in nats.

    Only tokens in both lists count. The largest difference is that of |a - b| / (1 + min(|a|, |b|)
    / 10), which allows more for unlikely tokens.
    """
    pairs = np.array(list(zip(answer, other, strict=False)), dtype=float).reshape(-1, 2)
    if not len(pairs):
        return 0.0, 0.0
    first, second = pairs.T
    same = first == second  # two infinities differ as little as two equal numbers
    difference = np.abs(np.where(same, 0.0, first) - np.where(same, 0.0, second))
    scaled = difference / (1 + np.minimum(np.abs(first), np.abs(second)) / 10)
    return float(np.where(same, 0.0, scaled).max()), float(difference.mean())


def _choose_rechecked_requests(
    requests: Sequence[WatchedRequest], count: int, check: int
) -> list[WatchedRequest]:
    """Return `count` random requests in random order.

    `check` is the number of the check, which seeds the choice. So the choice differs between
    checks, and cannot always miss a server that alternates between models.
    """
    order = make_keyed_generator("asked again", check, len(requests)).permutation(len(requests))
    return [requests[i] for i in order[: max(0, count)].tolist()]


def _compute_upper_tail(differed: int, compared: int) -> float:
    """Return the exact probability that `differed` or more of `compared` answers vary by chance."""
    if not differed:
        return 1.0
    return float(betainc(differed, compared - differed + 1, VARIES))

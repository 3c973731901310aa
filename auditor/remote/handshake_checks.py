"""Represent a handshake: its checks, their results in words, and the features that may be used."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.remote.server_dialect import ServerDialect

_DEFAULTS = (
    "the server knows no field that turns its own defaults off (top_k, min_p, penalties): if it "
    "has any, samples come from another distribution than stated"
)

COUNTED = "the tokenizer counts the tokens of a text as the server does"
IDS = "token ids are taken as a prompt"
RETURNED = "the ids that come back are the tokenizer's"
SCORED = "log-probabilities of all tokens of a prompt come back"
FIRST = "the first of them is empty"
SAME = "a token has the same log-probability given or drawn"
ENDS = "an end of text within a text is scored as one token"
RANKED = "ranks come with them"
TOLD = "so do the likeliest tokens at each place"
TRIMMED = "the first space of an answer comes back"
SAMPLES = "two seeds give two samples at temperature 2"
REPORTED = "temperature does not change the log-probabilities that come with a sample"
SEVERAL = "several samples of one request differ (n)"
SEED = "a seed gives the same sample again"
OBEYED = {"top_p": "top_p is obeyed", "top_k": "top_k is obeyed"}


@dataclass(frozen=True)
class HandshakeCheck:
    """One check of a server in a handshake.

    `passed` is None if the check was impossible. If the check failed, `observation` says what the
    server did instead.
    """

    name: str
    passed: bool | None
    observation: str = ""

    def __str__(self) -> str:
        verdict = {
            True: "yes",
            False: f"no, {self.observation}",
            None: f"unknown, {self.observation}",
        }[self.passed]
        return f"{self.name}: {verdict}"


@dataclass(frozen=True)
class Handshake:
    """The result of a handshake.

    Attributes:
        dialect: how to address this server.
        answer: digest of the greedy answer, which identifies the server later.
        room: largest number of tokens in a text; None if not reported.
    """

    dialect: ServerDialect
    checks: tuple[HandshakeCheck, ...]
    answer: str
    room: int | None = None

    @property
    def capabilities(self) -> frozenset[str]:
        kinds = {
            "draw": True,
            "likelihood": self.dialect.scored,
            "ranks": self.dialect.ranked,
            "likeliest": self.dialect.likeliest,
        }
        return frozenset(kind for kind, has in kinds.items() if has)

    def notes(self) -> tuple[str, ...]:
        """Return sentences about limits of this server that users must know."""
        n_held = sum(check.passed is True for check in self.checks)
        sent = "token ids" if self.dialect.ids else "text"
        return (
            f"{self.dialect.model} is behind an API: a handshake found its access, "
            f"{self._access_label}; it is sent {sent}; {n_held} of {len(self.checks)} checks "
            "passed",
            *(
                ()
                if (self.dialect.extended or self.dialect.configured) and self.dialect.top_k
                else (_DEFAULTS,)
            ),
            *(f"handshake: {check}" for check in self.checks if not check.passed),
        )

    @property
    def _access_label(self) -> str:
        if not self.dialect.scored:
            reason = next(
                (
                    check.observation
                    for check in self.checks
                    if check.name in (SCORED, FIRST, SAME) and not check.passed
                ),
                "",
            )
            return f"text only ({reason})"
        more = ", with ranks" * self.dialect.ranked
        if self.dialect.likeliest:
            more += f" and the {self.dialect.likeliest} likeliest as well"
        if self.dialect.scored == "forced":
            more += ", one request for each token"
        return f"sampled tokens and log-probabilities of given tokens{more}"

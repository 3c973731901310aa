"""Compare a server's answers: their texts, and log-probabilities of given and sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from auditor.core.nouns import Tokens
from auditor.remote.server_dialect import PromptLogProbs, WrittenAnswer

# nats: half precision in another batch differs by this much, the value of a neighbouring token by
# more
CLOSE = 0.05


def list_sample_contents(samples: Sequence[WrittenAnswer]) -> list[Any]:
    """Return the tokens of each sample, or its text if the server reports no tokens."""
    return [sample.text if sample.tokens is None else sample.tokens for sample in samples]


def is_shared_prefix(answer: str, other: str) -> bool:
    """Return whether one answer starts with the other, as if one of them had stopped early."""
    return answer.startswith(other) or other.startswith(answer)


def likeliest_match_ranks(answer: PromptLogProbs, text: Tokens, count: int) -> bool:
    """Return whether the most likely tokens that a server lists agree with the ranks it reports.

    If a token has rank r, r - 1 other tokens are at least as likely. The server lists only `count`
    tokens per position. So at least min(r - 1, count) of the listed tokens must be at least as
    likely.
    """
    if answer.ranks is None:
        return False
    places = zip(text, answer.log_probs, answer.ranks, answer.likeliest, strict=True)
    for token, log_prob, rank, likeliest in places:
        if log_prob is None or rank is None:
            continue
        n_likelier = sum(value >= log_prob for candidate, value in likeliest if candidate != token)
        if n_likelier < min(rank - 1, count):
            return False
    return True


def describe_log_prob_fault(
    scored: Sequence[float | None],
    tokens: Tokens | None,
    text: Tokens,
    sampled: Sequence[float] | None,
) -> str:
    """Describe a fault in a server's log-probabilities for the end of a text; "" if there is none.

    Args:
        scored: log-probabilities to test.
        tokens: tokens of the text as the server reports them.
        text: expected tokens.
        sampled: log-probabilities that the server reported for the last tokens when it drew them.
    """
    if tokens is not None and tokens[1:] != text[1:]:
        return "they are those of other tokens"
    values = [value for value in scored if value is not None]
    if len(values) != len(scored):
        return "some are missing"
    if not sampled:
        return "the drawn tokens come without any, so they cannot be compared"
    if _find_largest_difference(values[-len(sampled) :], sampled) <= CLOSE:
        return ""
    for shift in (-1, 1):
        # one fewer if the shift is 1
        shifted = values[len(values) - len(sampled) + shift :][: len(sampled)]
        if (
            len(sampled) > 2
            and len(shifted) >= len(sampled) - 1
            and _find_largest_difference(shifted, sampled[: len(shifted)]) <= CLOSE
        ):
            return "they are shifted by one token"
    return (
        f"they are up to {_find_largest_difference(values[-len(sampled) :], sampled):.2g} nats "
        "apart"
    )


def _find_largest_difference(values: Sequence[float], others: Sequence[float]) -> float:
    return max(
        (abs(value - other) for value, other in zip(values, others, strict=False)), default=0.0
    )

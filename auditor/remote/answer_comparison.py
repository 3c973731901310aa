"""Whether two answers of a server agree: texts of samples, and log-probabilities of the same tokens
given and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from auditor.core.nouns import Tokens
from auditor.remote.server_dialect import PromptLogProbs, WrittenAnswer

# nats: half precision in another batch is this far off; the number of a neighbouring token is not
CLOSE = 0.05


def sampled_tokens_or_texts(samples: Sequence[WrittenAnswer]) -> list[Any]:
    return [one.text if one.tokens is None else one.tokens for one in samples]


def is_one_answer_prefix_of_other(one: str, other: str) -> bool:
    """Whether one is the beginning of the other: an answer that ends at end of text is shorter."""
    return one.startswith(other) or other.startswith(one)


def likeliest_match_ranks(given: PromptLogProbs, whole: Tokens, count: int) -> bool:
    """Whether at every place rank - 1 other tokens (`count` at most) are told that are as likely as
    the text's own."""
    if given.ranks is None:
        return False
    places = zip(whole, given.log_probs, given.ranks, given.likeliest, strict=True)
    return all(
        sum(value >= own for one, value in likeliest if one != token) >= min(rank - 1, count)
        for token, own, rank, likeliest in places
        if own is not None and rank is not None
    )


def log_prob_fault_sentence(
    scored: Sequence[float | None],
    tokens: Tokens | None,
    whole: Tokens,
    drawn: Sequence[float] | None,
) -> str:
    """What is wrong with log-probabilities of the last tokens of a text, the last of which were
    drawn with these.

    "" for nothing. tokens: of the text, as the server says.
    """
    if tokens is not None and tokens[1:] != whole[1:]:
        return "they are those of other tokens"
    values = [value for value in scored if value is not None]
    if len(values) != len(scored):
        return "some are missing"
    if not drawn:
        return "none come with what is drawn, so that they cannot be compared"
    if _largest_log_prob_difference(values[-len(drawn) :], drawn) <= CLOSE:
        return ""
    for shift in (-1, 1):
        # one fewer where the shift is 1
        apart = values[len(values) - len(drawn) + shift :][: len(drawn)]
        if (
            len(drawn) > 2
            and len(apart) >= len(drawn) - 1
            and _largest_log_prob_difference(apart, drawn[: len(apart)]) <= CLOSE
        ):
            return "they are shifted by one token"
    return (
        f"they are up to {_largest_log_prob_difference(values[-len(drawn) :], drawn):.2g} nats "
        "apart"
    )


def _largest_log_prob_difference(values: Sequence[float], others: Sequence[float]) -> float:
    return max((abs(one - other) for one, other in zip(values, others, strict=False)), default=0.0)

"""Whether token ids fit a model, of whose vocabulary a distribution tells only the size; and the
text they spell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from auditor.core.errors import AuditError


def check_tokens_within_vocabulary(
    what: str, texts: Iterable[Sequence[int]], size: int, model: str = "the model"
) -> None:
    """Raises AuditError for texts with a token that the model gives no probability to.

    what: whose tokens they are, as "the data"; size: how many tokens the model's distribution has.
    """
    largest = max((max(tokens) for tokens in texts if len(tokens)), default=0)
    if largest >= size:
        raise AuditError(
            f"vocabulary mismatch: the tokenizer writes {what} with token {largest}, but {model} "
            f"gives probabilities to {size}"
        )


def check_same_vocabulary_size(what: str, name: str, found: int, whose: str, size: int) -> None:
    """Raises AuditError where a model that is asked about the same tokens has a distribution of
    another width.

    what: how the user gave it, as "--public"; name: of the model; whose: that it is to share, as
    "the target's".
    """
    if found != size:
        raise AuditError(
            f"expected {what} to share {whose} vocabulary of {size}, but {name} has {found}"
        )


def decode_keeping_special_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """What the tokens write, character for character: special ones too, and no space tidied
    away."""
    return str(
        tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )

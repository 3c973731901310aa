"""Check that token ids fit a model's vocabulary size, and decode them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from auditor.core.errors import AuditError


def check_tokens_within_vocabulary(
    description: str, texts: Iterable[Sequence[int]], size: int, model: str = "the model"
) -> None:
    """Raise AuditError if a text contains a token id outside the model's vocabulary.

    `description` names the texts in messages, such as "the data"; `size` is the vocabulary size of
    the model's distribution.
    """
    largest = max((max(tokens) for tokens in texts if len(tokens)), default=0)
    if largest >= size:
        raise AuditError(
            f"vocabulary mismatch: the tokenizer writes {description} with token {largest}, but "
            f"{model} "
            f"gives probabilities to {size}"
        )


def check_same_vocabulary_size(
    description: str, name: str, model_size: int, owner: str, size: int
) -> None:
    """Raise AuditError if two models that read the same text have different vocabulary sizes.

    Args:
        description: option that names the model, such as "--public".
        name: name of the model.
        model_size: vocabulary size of the model.
        owner: the other model in the message, in the possessive, such as "the target's".
        size: vocabulary size of the other model.
    """
    if model_size != size:
        raise AuditError(
            f"expected {description} to share {owner} vocabulary of {size}, but {name} has "
            f"{model_size}"
        )


def decode_keeping_special_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the exact text of the tokens, including special tokens and spaces."""
    return str(
        tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )

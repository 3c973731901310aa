"""Tokens that a model has no probability for are refused in one place, by the same words."""

from __future__ import annotations

import ast

import pytest

from auditor.core.errors import AuditError
from auditor.models.vocabulary import check_same_vocabulary_size, check_tokens_within_vocabulary
from tests.test_layers import MODULES, parse

# Whose words name more than a largest token: the row of an array, ids that may be negative, the
# tokens of a prefix token.
OTHERS = {
    "models.vocabulary",
    "benchmarks.data.lm_extraction",
    "benchmarks.data.tokenised",
    "runs.prefix_token",
}


def test_a_token_beyond_the_distribution_is_refused() -> None:
    check_tokens_within_vocabulary("the data", [(0, 1), (), (9,)], 10)
    check_tokens_within_vocabulary("the data", [], 1)
    with pytest.raises(
        AuditError, match="writes the data with token 10, but tiny gives probabilities to 10"
    ):
        check_tokens_within_vocabulary("the data", [(0, 1), (10, 2)], 10, "tiny")


def test_a_distribution_of_another_width_is_refused() -> None:
    check_same_vocabulary_size("--public", "tiny", 5, "the target's", 5)
    with pytest.raises(
        AuditError, match="expected --public to share the target's vocabulary of 5, but tiny has 6"
    ):
        check_same_vocabulary_size("--public", "tiny", 6, "the target's", 5)


def test_nobody_else_compares_vocabularies_to_refuse_them() -> None:
    for name, path in MODULES.items():
        if "vocabulary" not in path.read_text():
            continue
        said = [ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Raise)]
        refusing = [
            words for words in said if "vocabulary mismatch" in words or "vocabulary of" in words
        ]
        assert name in OTHERS or not refusing, name

"""What a training set says of secrets before it is trained on: where they stand, and where a loss
is taken."""

from __future__ import annotations

from typing import Any

import pytest

from auditor.core.errors import AuditError
from auditor.core.nouns import Secret
from auditor.training import preflight
from tests.conftest import refuses, states

ROWS: list[dict[str, Any]] = [
    {"input_ids": [1, 2, 3, 4, 5, 6]},
    {"input_ids": [7, 8, 9, 10], "completion_mask": [0, 0, 1, 1]},
    {"input_ids": [11, 12, 13, 14], "labels": [11, 12, -100, -100]},
    {"input_ids": [7, 8, 9, 10], "assistant_masks": [1, 1, 0, 0]},
]


def secret(*tokens: int, member: bool = True) -> Secret:
    """Its prefix is the first two tokens."""
    return Secret(str(tokens), tokens[:2], tokens[2:], 1 if member else None, member)


def said(*secrets: Secret) -> tuple[str, ...]:
    training = preflight.read_training_set(ROWS)
    assert training is not None and len(training.ids) == len(training.has_loss)
    return preflight.describe_secret_coverage(training, secrets)


def test_secrets_are_found_token_by_token_and_never_across_rows() -> None:
    first, _, copies = said(
        secret(2, 3, 4), secret(1, 2, 3, 4, 5, 6), secret(5, 6, 7), secret(11, 12, 13, 14)
    )
    assert first == "3 of 4 members are in the training set, token by token"
    assert copies == "1 of 4 training rows repeat an earlier row"


def test_a_suffix_without_a_loss_is_read_and_not_learnt() -> None:
    """In the third row of the first two tokens alone; of 7 to 10 in the second, though not in the
    fourth."""
    whole = secret(1, 2, 3, 4), secret(7, 8, 9, 10)
    assert not any("no loss" in sentence for sentence in said(*whole))
    assert said(*whole, secret(11, 12, 13, 14))[1].startswith("1 of them has no loss on the suffix")
    with pytest.raises(AuditError, match="it is masked for all 1 members in the training set"):
        said(secret(11, 12, 13, 14))


def test_of_two_masks_both_say_where_a_loss_is_taken() -> None:
    row = {
        "input_ids": [1, 2, 3, 4],
        "assistant_masks": [0, 1, 1, 1],
        "completion_mask": [1, 1, 1, 0],
    }
    training = preflight.read_training_set([row])
    assert training is not None and training.has_loss[:4].tolist() == [False, True, True, False]
    # TRL 1.16 ignores the mask of completions unless completion_only_loss is true.
    training = preflight.read_training_set([row], completion_only=False)
    assert training is not None and training.has_loss[:4].tolist() == [False, True, True, True]


def test_members_that_are_elsewhere_and_non_members_that_are_there_are_refused() -> None:
    with pytest.raises(AuditError, match="none of its 4 rows contains their tokens"):
        said(secret(6, 5, 4))
    with pytest.raises(AuditError, match="1 of 2 are in the training set"):
        said(secret(1, 2, 3), secret(12, 13, 14, member=False), secret(14, 13, 12, member=False))


def test_rows_that_are_not_read_are_counted_and_nothing_is_concluded_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_MAX_ROWS", 3)
    for missing in (secret(6, 5, 4), secret(11, 12, 13, 14)):  # in no row, and without a loss
        assert states(said(missing), "4", "3", "rows", "read")
    with refuses("non-members", "1"):
        said(secret(1, 2, 3, member=False))


PREFERENCES: list[dict[str, Any]] = [
    {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5, 6]},
    {"prompt_ids": [1, 2], "chosen_ids": [7, 8], "rejected_ids": [5, 6]},
]


def test_preference_rows_are_read_with_both_answers() -> None:
    training = preflight.read_training_set(PREFERENCES)
    assert training is not None and (training.rows, training.copies) == (2, 0)
    wanted, unwanted, prompt = secret(1, 2, 3, 4), secret(1, 2, 5, 6), Secret("p", (1,), (2,), 1)
    found, silent = preflight.describe_secret_coverage(training, [wanted, unwanted, prompt])
    assert found == "3 of 3 members are in the training set, token by token"
    assert silent.startswith("1 of them has no loss")
    with pytest.raises(AuditError, match="1 of 1 are in the training set"):
        preflight.describe_secret_coverage(training, [wanted, secret(1, 2, 5, 6, member=False)])
    with pytest.raises(
        AuditError, match="none of its 2 rows contains their tokens"
    ):  # chosen and rejected never follow each other
        preflight.describe_secret_coverage(training, [secret(3, 4, 5, 6)])


ORPO: dict[str, Any] = {  # CPO's rows have the same columns
    "prompt_input_ids": [1, 2, 3],
    "chosen_input_ids": [1, 2, 3, 4],
    "chosen_labels": [-100, -100, -100, 4],
    "rejected_input_ids": [1, 2, 3, 5],
    "rejected_labels": [-100, -100, -100, 5],
}


def test_sides_with_labels_are_read_with_the_prompt_within() -> None:
    training = preflight.read_training_set([ORPO])
    assert training is not None and training.rows == 1
    chosen, rejected, prompt = secret(2, 3, 4), secret(2, 3, 5), secret(1, 2, 3)
    sentence, silent = preflight.describe_secret_coverage(training, [chosen, rejected, prompt])
    assert sentence == "3 of 3 members are in the training set, token by token"
    assert silent.startswith("1 of them has no loss")
    with pytest.raises(AuditError, match="1 of 1 are in the training set"):
        preflight.describe_secret_coverage(training, [chosen, secret(2, 3, 5, member=False)])


def test_orpo_learns_the_prompts_of_chosen_sides_whatever_is_masked() -> None:
    training = preflight.read_training_set([ORPO], learns_prompts=True)
    assert training is not None and training.has_loss.tolist() == [True] * 4 + [False] * 4 + [
        True,
        False,
    ]


def test_sides_without_labels_follow_their_prompt() -> None:
    """Rows of DPO before TRL 1.16."""
    row = {"prompt_input_ids": [1, 2], "chosen_input_ids": [3, 4], "rejected_input_ids": [5, 6]}
    before, now = (preflight.read_training_set(rows) for rows in ([row], PREFERENCES[:1]))
    assert before is not None and now is not None
    assert (
        before.ids.tolist() == now.ids.tolist()
        and before.has_loss.tolist() == now.has_loss.tolist()
    )


def test_labelled_completions_are_read_without_those_of_the_other_prompts() -> None:
    rows = [
        {
            "prompt_ids": [1, 2],
            "completion_ids": [3, 4],
            "KL_completion_ids": [8, 9],
            "label": False,
        }
    ] * 2
    training = preflight.read_training_set(rows)
    assert training is not None and (training.rows, training.copies) == (2, 1)
    assert training.ids[:4].tolist() == [1, 2, 3, 4] and 9 not in training.ids
    assert training.has_loss[:5].tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(("keep_end", "tokens"), [(False, [1, 2, 3]), (True, [2, 3, 4])])
def test_a_collators_cut_is_made_before_tokens_are_looked_for(
    keep_end: bool, tokens: list[int]
) -> None:
    training = preflight.read_training_set(PREFERENCES[:1], 3, keep_end)
    assert training is not None and training.ids[:3].tolist() == tokens


def test_what_makes_its_tokens_as_it_is_asked_says_nothing() -> None:
    assert (
        preflight.read_training_set([{"text": "a"}]) is None
        and preflight.read_training_set(iter(ROWS)) is None
        and preflight.read_training_set([]) is None
    )


def test_tokens_whose_bytes_stand_askew_are_not_there() -> None:
    """Four bytes a token: 256 followed by 1 holds the bytes of 1 and 0 from its second byte on."""
    training = preflight.read_training_set([{"input_ids": [256] * 4}])
    assert training is not None
    with pytest.raises(AuditError, match="contains their tokens"):
        preflight.describe_secret_coverage(training, [secret(1, 1, 1)])

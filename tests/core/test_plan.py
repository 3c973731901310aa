"""What is said of the fields of a plan: whoever treats some of them differently reads it there."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.core.plan import FIELDS, Plan, format_field_flag, list_ruled_fields
from auditor.core.plan_fields import PANELS, FieldRule
from tests.conftest import check_command


def test_every_field_has_a_name_of_its_own_and_help_where_it_has_a_flag() -> None:
    """One name a field, whichever part it stands in: the command line, plan files and `audit()`
    know no parts."""
    assert list(FIELDS) == list(Plan().map_field_values())
    assert {name for name, one in FIELDS.items() if not one.has_flag} == {
        "lab_recipe",
        "sizes",
        "command",
        "objects",
        "mitigation",
    }
    for name, one in FIELDS.items():
        assert one.panel in PANELS and (not one.has_flag or one.help.partition(" [default:")[0]), (
            name
        )


@pytest.mark.parametrize("rule", FieldRule)
def test_every_rule_is_asked_for_in_the_order_of_the_fields(rule: FieldRule) -> None:
    assert (
        list(list_ruled_fields(rule))
        == sorted(list_ruled_fields(rule), key=list(FIELDS).index)
        != []
    )


def test_fields_as_they_are_written_on_the_command_line() -> None:
    assert [
        format_field_flag(name) for name in ("group_column", "model_args", "attack", "controls")
    ] == [
        "--group-column",
        "--model-arg",
        "--attack",
        "--controls",
    ]


def test_fields_are_changed_by_name_whichever_part_they_stand_in() -> None:
    plan = Plan.from_fields(seed=3, attack=("perplexity",), batch_size=7)
    other = plan.with_fields(limit=5, attack=("zlib",))
    assert (other.data.limit, other.attacks.attack, other.batch_size, other.seed) == (
        5,
        ("zlib",),
        7,
        3,
    )
    assert {
        name
        for name, value in other.map_field_values().items()
        if value != plan.map_field_values()[name]
    } == {"limit", "attack"}


@pytest.mark.parametrize(
    "name", ["token", "use_auth_token", "api_key", "API-KEY", "password", "secret", "Authorization"]
)
def test_a_credential_is_refused_before_any_record_holds_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "run",
        "--model",
        "m",
        "--data",
        "d",
        "--model-arg",
        f"{name}=hf_oopsie",
        "-o",
        str(tmp_path / "run"),
    ]
    check_command(*asked, code=2)
    said = capsys.readouterr()
    assert (
        "HF_TOKEN" in said.err
        and f"{name}=..." in said.err
        and "hf_oopsie" not in said.out + said.err
    )
    assert list(tmp_path.iterdir()) == []


def test_tokens_of_a_text_and_other_arguments_are_no_credentials() -> None:
    arguments = {
        "attn_implementation": "eager",
        "pad_token": "<pad>",
        "subfolder": "a",
        "eos_token_id": "3",
    }
    assert (
        Plan.from_fields(model="m", data="d", model_args=arguments).loading.model_args == arguments
    )

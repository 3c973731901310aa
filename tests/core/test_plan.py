"""What the fields of a plan are about: whoever treats some of them differently reads it there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from auditor.cli import call
from auditor.core.plan import CONDUCT, METHOD, SUBJECT, About, Plan, about, flag


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Plan)])
def test_every_field_is_about_the_subject_the_method_or_the_conduct_of_a_run(name: str) -> None:
    """A field that says nothing would be left out of what runs of a sweep share, and of what a comparison looks at."""
    assert sum(name in about(kind) for kind in (SUBJECT, METHOD, CONDUCT)) == 1


@pytest.mark.parametrize("what", About)
def test_every_kind_is_asked_for_in_the_order_of_the_fields(what: About) -> None:
    names = [field.name for field in dataclasses.fields(Plan)]
    assert list(about(what)) == sorted(about(what), key=names.index) != []


def test_fields_as_they_are_written_on_the_command_line() -> None:
    assert [flag(name) for name in ("group_column", "model_args")] == ["--group-column", "--model-arg"]


@pytest.mark.parametrize(
    "name", ["token", "use_auth_token", "api_key", "API-KEY", "password", "secret", "Authorization"]
)
def test_a_credential_is_refused_before_any_record_holds_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", "--model", "m", "--data", "d", "--model-arg", f"{name}=hf_oopsie", "-o", str(tmp_path / "run")]
    assert call(asked) == 2
    said = capsys.readouterr()
    assert "HF_TOKEN" in said.err and f"{name}=..." in said.err and "hf_oopsie" not in said.out + said.err
    assert list(tmp_path.iterdir()) == []


def test_tokens_of_a_text_and_other_arguments_are_no_credentials() -> None:
    arguments = {"attn_implementation": "eager", "pad_token": "<pad>", "subfolder": "a", "eos_token_id": "3"}
    assert Plan(model="m", data="d", model_args=arguments).model_args == arguments

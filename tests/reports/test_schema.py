"""The published schema is that of the records: it takes what `from_json` takes, and refuses what it
refuses."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.core.result import SCHEMA_VERSION, AuditResult, Measurement
from auditor.records import result_file
from auditor.reports.schema import PATH, build_result_schema, format_schema_file
from tests.conftest import check_command, fits_schema

VALIDATOR = Draft202012Validator(json.loads(PATH.read_text(encoding="utf-8")))


def test_the_published_file_is_that_of_this_version() -> None:
    assert PATH.read_text(encoding="utf-8") == format_schema_file(), (
        "run: python -m auditor.reports.schema"
    )
    Draft202012Validator.check_schema(build_result_schema())
    assert build_result_schema()["$id"].endswith(f":{SCHEMA_VERSION}")


def test_the_command_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    check_command("list", "--schema")
    assert Path(capsys.readouterr().out.strip()).samefile(PATH)


def test_results_fit(result: AuditResult, with_probe: AuditResult, probe_only: AuditResult) -> None:
    odd = Measurement("recall", float("nan"), float("-inf"), float("inf"), 0)
    strange = replace(
        result.findings[0],
        measurements=(odd,),
        by_repeats={"1": odd},
        options={"a": [None, {"b": 1.5}]},
    )
    for held in (result, with_probe, probe_only, replace(result, findings=(strange,), targets=())):
        raw = json.loads(json.dumps(to_json(held), allow_nan=False))
        VALIDATOR.validate(raw)
    assert raw["findings"][0]["measurements"][0]["high"] == "inf"


LAB = """
attack = ["perplexity", "extraction-probability"]
samples = 2
setting = "white-box"

[lab_recipe]
vocab_size = 300
layers = 1
hidden = 32
heads = 2
repeats = [[1, 2, 1], [2, 2, 1], [4, 2, 1], [8, 2, 1], [16, 2, 1]]
others = 0
private_rank = 2
nonmembers = 4
public_records = 20
public_epochs = 1
private_epochs = 1
"""


def test_a_run_of_the_lab_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "plan.toml").write_text(LAB)
    check_command("run", "--config", tmp_path / "plan.toml", "-o", tmp_path / "run")
    assert fits_schema(tmp_path / "run")


def changed(raw: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with the value at this path; `...` takes the field away."""
    out = copy.deepcopy(raw)
    at: Any = out
    for step in path[:-1]:
        at = at[step]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return out


FIRST = ("findings", 0, "measurements", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*FIRST, "n"), "many"),
        ((*FIRST, "n"), True),
        ((*FIRST, "low"), "infinity"),
        ((*FIRST, "low"), None),
        ((*FIRST, "name"), ...),
        (("findings", 0, "surprise"), 1),
        (("findings", 0, "curve"), [[1, 0.5, 0.5]]),
        (("findings", 0, "claim_applies"), "yes"),
        (("findings", 0, "access"), "draw"),
        (("benchmark", "repeats"), [1]),
        (("targets", 1, "claim", "epsilon", "replace"), "big"),
        (("targets",), ...),
        (("seed",), 0.5),
    ],
)
def test_schema_and_reader_refuse_the_same(
    result: AuditResult, path: tuple[Any, ...], value: Any
) -> None:
    broken = changed(to_json(result), path, value)
    assert not VALIDATOR.is_valid(broken)
    with pytest.raises(AuditError):
        from_json(AuditResult, broken)


@pytest.mark.parametrize(
    ("version", "then"),
    [
        (SCHEMA_VERSION + 1, "a newer audit made it"),
        (0, "re-run"),
        ("1", "re-run"),
        (True, "re-run"),
        (..., "re-run"),
    ],
)
def test_another_version_is_refused(
    tmp_path: Path, result: AuditResult, version: Any, then: str
) -> None:
    raw = changed(to_json(result), ("schema_version",), version)
    (tmp_path / "result.json").write_text(json.dumps(raw))
    with pytest.raises(
        AuditError, match=f"expected schema_version {SCHEMA_VERSION}, got .*{then}"
    ) as caught:
        result_file.read_result(tmp_path)
    assert "\n" not in str(caught.value)
    if version is not True:  # to JSON Schema 1 and true are two things, which Python's == denies
        assert not VALIDATOR.is_valid(raw)

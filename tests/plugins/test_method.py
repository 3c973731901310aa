"""A plug-in of a user's own brings numbers and a section of the reports, without a change anywhere
else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.cli import run_command_line
from auditor.core.errors import AuditError
from auditor.core.result import OwnTable
from auditor.plugins import registry
from auditor.plugins.options import Limits
from auditor.statistics import metrics
from tests.conftest import check_command, fits_schema, save_tiny

PLUGIN = '''
"""Two plug-ins, a probe and an attack, each with a section of the reports."""

from dataclasses import dataclass
from typing import ClassVar

from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.core.nouns import Observation
from auditor.core.result import OwnSection, OwnTable
from auditor.plugins.probe import Probe, value_column
from auditor.statistics.intervals import estimate_mean

HEAD = ("Target", "Setting", "Tokens")


@dataclass(frozen=True)
class Lengths(Probe):
    """Count the tokens of secrets."""

    name = "lengths"
    needs = ()
    metrics: ClassVar[dict[str, str]] = {"NAME": "Tokens of a <secret>, mean"}

    def observe_secrets(self, view, secrets):
        for secret in secrets:
            yield Observation(secret.id, {"length": len(secret.suffix)})

    def measurements(self, secrets, observations):
        return [estimate_mean("NAME", value_column(observations, "length"), "tokens")]

    def per_secret_values(self, secrets, observations):
        return {"NAME": value_column(observations, "length").tolist()}

    def report_section(self, findings):
        rows = tuple((f.target, f.setting, f"{f.main.value:.0f} tokens") for f in findings)
        return OwnSection("How <long> secrets are", ("Long ones are rare.",), (OwnTable("By row", HEAD, rows),))


@dataclass(frozen=True)
class Plain(PerplexityRanking):
    """Rank by perplexity."""

    name = "plain"

    def report_section(self, findings):
        return OwnSection("Of an attack", (f"{len(findings)} rows.",))
'''  # noqa: E501


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    save_tiny(tmp_path / "model")
    lines = (json.dumps({"prefix": f"code {i} is", "suffix": f" {7 * i + 100}"}) for i in range(12))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    def run(*more: str, name: str = "suffix_tokens") -> int:
        (tmp_path / "mine.py").write_text(PLUGIN.replace("NAME", name))
        given = [
            "--model",
            str(tmp_path / "model"),
            "--data",
            str(tmp_path / "data.jsonl"),
            "-o",
            str(tmp_path / "run"),
        ]
        return run_command_line(["run", "--plugin", str(tmp_path / "mine.py"), *given, *more])

    return run


def test_its_numbers_and_section_stand_in_both_reports(
    run: Callable[..., int], tmp_path: Path
) -> None:
    assert run("--attack", "lengths", "--attack", "plain", "-A", "plain.samples=2") == 0
    folder = tmp_path / "run"
    result = json.loads((folder / "result.json").read_text())
    assert fits_schema(folder) and list(result["sections"]) == ["lengths", "plain"]
    assert result["metrics"] == {"suffix_tokens": "Tokens of a <secret>, mean"}
    first = {name: (folder / name).read_text() for name in ("report.html", "report.md")}
    for text in first.values():
        assert "How &lt;long&gt; secrets are" in text and "Tokens of a &lt;secret&gt;, mean" in text
        said = ("Long ones are rare.", "By row", "4 tokens", "Of an attack", "2 rows.")
        assert sorted(said, key=text.rindex) == list(said)  # the page leads to its sections first
        assert "<long>" not in text and "<secret>" not in text
    registry._extra.clear()  # whoever reads the folder need not have the plug-in
    metrics._DECLARED.clear()
    metrics.find_metric.cache_clear()
    check_command("report", folder)
    assert {name: (folder / name).read_text() for name in first} == first


def test_a_gate_takes_its_number(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--attack", "lengths") == 0
    folder = str(tmp_path / "run")
    check_command("gate", folder, "--max", "suffix_tokens=100")
    check_command("gate", folder, "--max", "suffix_tokens=0.5", code=1)
    check_command("gate", folder, "--max", "suffix_token=100", code=2)


def test_a_name_of_ours_is_refused_before_anything_is_made(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--attack", "lengths", name="recall") == 2
    assert "recall" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_ragged_table_is_refused() -> None:
    with pytest.raises(AuditError):
        OwnTable("By row", ("one", "two"), (("1", "2"), ("1",)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": math.nan}, r"expected alpha in \(0, 1\), got nan"),
        ({"eos": "none"}, r"expected eos in \('ordinary', 'masked'\), got 'none'"),
        ({"one_in": 0}, "expected one_in >= 1, got 0"),
    ],
)
def test_every_option_is_within_the_limits_of_its_annotation(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AuditError, match=sentence):
        ExtractionProbability(bracket=True, **options)


def test_limits_state_which_ends_are_valid() -> None:
    assert 0 not in Limits(0, 1, "(]")
    assert 1 in Limits(0, 1, "(]")
    assert math.inf not in Limits(0)
    assert str(Limits(1, 1e6, "[]")) == ">= 1 and at most 1,000,000"

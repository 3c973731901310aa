"""A membership score of one's own: it takes part in the run's strongest score, its table of attacks
and its gate."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from auditor.core.errors import NotApplicable
from auditor.core.nouns import Secret
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.membership_score import MembershipScore
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.view import WHITE_BOX, View
from tests.conftest import check_command, refuses, save_tiny

PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar
from auditor.plugins.membership_score import MembershipScore

@dataclass(frozen=True)
class FirstToken(MembershipScore):
    """Score a record by its first suffix token: members begin with a digit below 5."""
    name = "first-token"

    def score_records(self, view, secrets, prefixes, suffixes):
        view.target.token_log_probs(prefixes, suffixes)
        return [float(suffix[-1] % 2) + 0.001 * i for i, suffix in enumerate(suffixes.tolist())]
'''


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    # Members end in an odd character, non-members in an even one: only the plug-in looks at that.
    for name, last in (("private", "1"), ("fresh", "2")):
        rows = (
            json.dumps({"prefix": f"code {i:03}x{i * 7 % 13}", "suffix": f" is {i * 3 % 10}{last}"})
            for i in range(16)
        )
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "mine.py").write_text(PLUGIN)
    return tmp_path


def test_a_plug_ins_score_is_the_verdict_and_is_compared_and_gated(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [
        "--data",
        "private.jsonl",
        "--nonmembers",
        "fresh.jsonl",
        "--known-fraction",
        "0",
        "--setting",
        "white-box",
    ]
    attacks = ["--attack", "membership", "-A", "membership.score=loss", "--attack", "first-token"]
    check_command("run", "--plugin", "mine.py", "--model", "model", *data, *attacks, "-o", "runs/a")
    screen = capsys.readouterr().out
    rows = {
        f["attack"]: f
        for f in json.loads((given / "runs" / "a" / "result.json").read_text())["findings"]
    }
    tried = rows["membership"]["scores_tried"]
    # one family: all scores of both rows share the level
    assert tried == rows["first-token"]["scores_tried"] > 3
    named = {m["name"]: m for m in rows["first-token"]["measurements"]}
    assert named["membership_auc"]["value"] == named["membership_auc_first_token"]["value"] == 1.0
    assert re.search(r"first-token \(yours\) +AUC 1\.00", screen) and "from membership" in screen
    check_command("show", "runs/a")
    assert capsys.readouterr().out == screen
    report = (given / "runs" / "a" / "report.html").read_text()
    assert "All attacks side by side" in report and "First token (of the plug-in)" in report
    check_command("gate", "runs/a", "--max", "membership_auc_first_token=0.6", code=1)
    check_command("gate", "runs/a", "--max", "membership_auc=0.75", code=1)
    assert "membership_auc" in capsys.readouterr().out


@dataclass(frozen=True)
class Constant(MembershipScore):
    """Score every record alike."""

    name = "constant"
    short: bool = False

    def score_records(
        self, view: View, secrets: Sequence[Secret], prefixes: Tensor, suffixes: Tensor
    ) -> Sequence[float]:
        return [1.0] * (len(secrets) - self.short)


def test_a_score_that_ranks_nothing_does_not_apply(neox: HuggingFaceModel) -> None:
    asked = [Secret(f"s{i}", (i + 1, 2), (3, i + 1), member=i < 5) for i in range(10)]
    view, probe = View("target", neox, WHITE_BOX, seed=0), Constant()
    with refuses("constant", "the same", "10", error=NotApplicable):
        probe.measurements(asked, observe_all_secrets(probe, view, asked))
    with refuses("constant.score_records", "10", "9"):
        observe_all_secrets(Constant(short=True), view, asked)
    with refuses("4", "5", "1", "--nonmembers"):
        probe.check_secrets(asked[:6])

"""What was asked for by name is measured or refused before any record is asked; it never disappears
from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from auditor.core.errors import AuditError
from auditor.plugins import registry
from auditor.records.folder import RunFolder
from auditor.runs.run import plan_audit, run_audit
from tests.conftest import check_command, save_tiny
from tests.runs.test_site import Live, plan

QUICK: dict[str, dict[str, Any]] = {
    "ethicist": {"prompt_length": 2, "epochs": 1, "samples": 2},
    "untargeted": {"generations": 2, "length": 4},
    "prediction-audit": {"games": 64, "tokens": 2},
    "near-verbatim": {"beams": 2},
}
# What this place lacks: a reference, a public model, a tokenizer, canaries, a claim, a training
# that kept gradients.
LACKING = {
    "zlib": "tokenizer",
    "lowercase": "tokenizer",
    "reference": "--reference MODEL",
    "exposure": "--canaries MANIFEST",
    "epsilon-audit": "--canaries MANIFEST",
    "claim-check": "makes no claim",
    "prediction-audit": "--public",
    "gradient-audit": "gradient_canaries",
    "identifiers": "tokenizer",
}
NEEDS_PROBABILITIES = (
    "perplexity",
    "exact",
    "identifiers",
    "membership",
    "extraction-probability",
    "near-verbatim",
)


def run(tmp_path: Path, **fields: object) -> Any:
    asked = plan(samples=None, **fields)
    folder = RunFolder.create(tmp_path / "run", "live", asked.to_json())
    return run_audit(plan_audit(Live(asked)), folder)


@pytest.mark.parametrize("setting", ["text-only", "white-box"])
@pytest.mark.parametrize("name", sorted(registry.list_methods()))
def test_each_attack_by_name_is_measured_or_refused(
    tmp_path: Path, name: str, setting: str
) -> None:
    why = LACKING.get(name, "")
    if setting == "text-only" and name in NEEDS_PROBABILITIES:
        why = "only sampled tokens come back"
    options = {name: QUICK[name]} if name in QUICK else {}
    fields = {"attack": [name], "attack_options": options, "setting": setting}
    if not why:
        (row,) = run(tmp_path, **fields).findings
        assert row.measurements and not row.not_applicable
        return
    with pytest.raises(AuditError, match=f"--attack {name} cannot run: ") as refused:
        run(tmp_path, **fields)
    alternatives = (why, "only sampled tokens come back") if setting == "text-only" else (why,)
    assert any(phrase in str(refused.value) for phrase in alternatives)
    assert not (tmp_path / "run" / "guesses.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("membership", {"score": "ez_mia"}, "-A membership.score=min_k_plus"),
        ("membership", {"score": "reference"}, "give --reference MODEL"),
        ("ethicist", {"tune_on": "public"}, "give --public MODEL"),
        ("ethicist", {"tune_on": "none", "confidence": "reference"}, "give --reference MODEL"),
    ],
)
def test_an_option_that_cannot_be_met_is_refused(
    tmp_path: Path, name: str, options: Any, why: str
) -> None:
    asked = {**QUICK.get(name, {}), **options}
    with pytest.raises(AuditError, match=f"--attack {name} cannot run: .*{why}"):
        run(tmp_path, attack=[name, "perplexity"], attack_options={name: asked})


def test_an_attack_that_ran_on_no_target_ends_the_run_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a defense it ended with exit 0 and a row that "did not run"."""
    save_tiny(tmp_path / "model")
    save_tiny(tmp_path / "public")
    rows = [
        json.dumps({"prefix": f"bed {i:02d} code", "suffix": f" {i * 7919 % 997:03d}"}) + "\n"
        for i in range(12)
    ]
    (tmp_path / "private.jsonl").write_text("".join(rows))
    given = {"--model": "model", "--public": "public", "--data": "private.jsonl", "-o": "run"}
    words = [word for flag, name in given.items() for word in (flag, str(tmp_path / name))]
    words += [
        "--defense",
        "uniform-mixing",
        "--attack",
        "prediction-audit",
        "-A",
        "relation=zero_out",
    ]
    check_command(
        "run", *words, "-A", "games=64", "-A", "tokens=2", "--known-fraction", "0", code=2
    )
    said = capsys.readouterr()
    assert (
        "prediction-audit ran on no target: its neighbours are by" in said.err
        and "RESULT" in said.out
    )
    assert (tmp_path / "run" / "report.html").exists()


def test_what_a_defended_target_may_give_is_not_refused_and_what_no_target_gives_is(
    tmp_path: Path,
) -> None:
    defended = {
        "defense": ["uniform-mixing"],
        "defense_options": {"uniform-mixing": {"weight": 0.5}},
    }
    rows = run(tmp_path / "a", attack=["claim-check"], **defended).findings
    assert {row.target for row in rows if row.measurements} == {"uniform-mixing"}
    with pytest.raises(AuditError, match="--attack reference cannot run"):
        run(tmp_path / "b", attack=["reference"], **defended)

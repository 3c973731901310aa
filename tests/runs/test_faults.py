"""Whatever became of a run folder, going on with it or judging it ends in a sentence, never in a
bug of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from auditor.cli import run_command_line
from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.nouns import CellKey, Guess, Guesses, Observation, TokenLogProbs
from auditor.core.result import AuditResult, BenchmarkRecord, Finding
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.records import manifest, table
from auditor.records.folder import RunFolder
from auditor.records.table import TABLE
from auditor.statistics import extraction
from tests.conftest import check_command
from tests.rows import judge_columns

DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda held: None,
    "empty": lambda held: b"",
    "cut off": lambda held: held[: len(held) * 2 // 3],
    "garbage": lambda held: b"\x00\x01 garbage {\n",
    "not UTF-8": lambda held: b"\xff\xfe" + held,
    "a list": lambda held: b"[1, 2]\n",
    "nothing": lambda held: b"null\n",
    "a word": lambda held: b'"x"\n',
    "an empty object": lambda held: b"{}\n",
    "other types": lambda held: (
        held.replace(b": 1", b': "x"').replace(b"[1", b'["x"').replace(b": [", b": 7, ")
    ),
    "NaN": lambda held: held.replace(b"0.", b"NaN, 0."),
    "doubled": lambda held: held + held,
    "nested": lambda held: b"[" * 100_000,
}
FILES = (
    *(
        "guesses.jsonl",
        "observations.jsonl",
        "tokens.jsonl",
        "plan.json",
        "weights.json",
        "state/a.pt",
    ),
    *("result.json", TABLE),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of one row, made of records alone."""
    plan, n = {"attack": ["a"], "setting": "white-box"}, 40
    ids, repeats = tuple(f"s{i}" for i in range(n)), (1,) * n
    folder = RunFolder.create(tmp_path / "run", "name", plan)
    folder.pin_weights({"model/model.safetensors": "d1"})
    facts = {
        "id": ids,
        "alias": ids,
        "member": [True] * n,
        "repeats": repeats,
        "canary": [False] * n,
    }
    facts |= {"length": [2] * n, "group": [None] * n}
    (folder.path / "secrets.json").write_text(json.dumps(facts))
    cell = CellKey("undefended", "white-box", "a")
    folder.guesses.append(cell, [Guesses(one, (Guess((1, 2), -0.5),), 1, 2) for one in ids])
    folder.observations.append(cell, [Observation("s1", {"log_p": -0.5})])
    folder.tokens.append("undefended", [TokenLogProbs("s1", (-0.25, -0.25))])
    TrainerCheckpoint(folder.attack_state_path("a")).save({"epoch": 1})
    hit, whole = np.arange(n) < 10, np.ones(n, dtype=bool)
    distance = np.where(hit, 0, 5)
    outcome = judge_columns(
        ids, hit, hit, np.linspace(0, 1, n), repeats, whole, distance, np.full(n, 2)
    )
    table.write_secrets_table(
        folder.path,
        ValuesBySecret.from_judged_guesses(outcome).list_columns(
            CellKey("undefended", "white-box", "a")
        ),
    )
    measured, by_repeats = (
        tuple(extraction.measure_extraction(outcome)),
        extraction.measure_hit_shares("recall", outcome),
    )
    finding = Finding("undefended", "white-box", "a", {}, (), "", None, "", measured, by_repeats)
    record = BenchmarkRecord("files", "", n, 0, 0)
    result = AuditResult(
        "r", "2026-11-22T10:00:00+00:00", "0", "audit run", plan, record, (), (finding,), {}, {}, 0
    )
    (folder.path / "result.json").write_text(json.dumps(to_json(result)))
    manifest.write_manifest(folder.path, (folder.path / "result.json").read_bytes())
    return folder.path


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_refused_in_a_sentence(
    run: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_command("gate", run, "--max", "recall=0.5")
    left = DAMAGE[damage]((run / file).read_bytes())
    if left is None:
        (run / file).unlink()
    else:
        (run / file).write_bytes(left)
    assert run_command_line(["gate", str(run), "--max", "recall=0.5"]) in (0, 1, 2)
    assert run_command_line(["compare", str(run), str(run)]) in (0, 2)
    assert run_command_line(
        ["export", str(run), "--csv", str(run / "out.csv"), "--secrets", str(run / "secrets.csv")]
    ) in (0, 2)
    assert "a bug of ours" not in capsys.readouterr().err
    try:
        again = RunFolder.reopen(run)
        again.plan()
        TrainerCheckpoint(again.attack_state_path("a")).load()
        again.refuse_changed_weights({"model/model.safetensors": "d1"})
    except AuditError as why:
        assert "\n" not in str(why)

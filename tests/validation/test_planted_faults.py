"""The table of planted faults in small: what is broken is seen, what is not is let be, and nothing
stays broken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from auditor.defenses import private_training
from auditor.training import dp_loop
from auditor.training.dp_loop import PoissonSampler, ScaledOptimizer
from validation.trust import planted_faults


def test_faults_are_caught_and_a_control_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    names = ("none: dp-sgd", "noise-off", "batch-clipped", "shuffled", "key-reused")
    assert planted_faults.main(out=tmp_path, only=names, small=True) == 0
    rows = json.loads((tmp_path / "planted_faults.json").read_text())
    found = {row["fault"]: row for row in rows if row["audit"] == "gradient-audit"}
    assert {name: row["verdict"] for name, row in found.items()} == {
        "none: dp-sgd": "consistent",
        "noise-off": "caught by its bound",
        "batch-clipped": "caught by its bound",
        "shuffled": "caught by what it saw",
        "key-reused": "caught by what it saw",
    }
    assert all(
        row["claimed"] == pytest.approx(1, abs=0.01) and row["canaries"] == 400
        for row in found.values()
    )
    assert "the noise has" in found["noise-off"]["seen"][0] and found["none: dp-sgd"]["seen"] == []
    assert "too evenly for Poisson sampling" in found["shuffled"]["seen"][0]
    table = (tmp_path / "planted_faults.md").read_text().splitlines()
    assert len(table) == 2 + len(names) and "a loader that is no PoissonSampler" in "\n".join(table)


def test_served_claims_are_checked_exactly() -> None:
    rows = {
        service.name: next(iter(planted_faults.served(service)))
        for service in planted_faults.SERVICES
    }
    assert {name: row.verdict for name, row in rows.items()} == {
        "none: pmixed": "consistent",
        "pmixed-published": "caught by what it saw",
        "duplicates": "caught by what it saw",
    }
    assert "1 records are in more than one shard" in rows["duplicates"].seen[0]


def test_nothing_stays_broken() -> None:
    def parts() -> list[Any]:
        own: list[Any] = [
            ScaledOptimizer.add_noise,
            ScaledOptimizer.add_clipped_samples,
            PoissonSampler.draw_batch_units,
        ]
        own += [
            private_training.find_noise_multiplier,
            private_training.PrivateTraining.make_privacy_record,
        ]
        return [*own, dp_loop.fit_privately, dp_loop.NoiseStream]

    before = parts()
    for fault in planted_faults.FAULTS:
        with fault.plant():
            broken = parts() != before or fault.name == "adp-nominal"
            assert broken != fault.sound, fault.name
        assert parts() == before


def test_a_false_alarm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = next(fault for fault in planted_faults.FAULTS if fault.sound)
    row = planted_faults.TrainingFaultAudit(sound, "gradient-audit", 1.0, 0.5, 4.0, 400, 0.1, ())
    monkeypatch.setattr(planted_faults, "Lab", lambda recipe: None)
    for more, code in (({}, 0), ({"bound": 1.1}, 1), ({"seen": ("the noise is the same",)}, 1)):
        kept = dataclasses.replace(row, **more)
        monkeypatch.setattr(planted_faults, "rows_of", lambda *_, kept=kept: iter([kept]))
        assert planted_faults.main(only=(sound.name,), small=True) == code

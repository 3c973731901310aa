"""The tables of finished runs: false alarms by value, power by record."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from validation.harness import Page
from validation.trust.fresh_values import write_tables_of_runs


def test_membership_finds_records_and_ranks_find_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # (copies, alternatives above each value, membership score)
    records = [(4, [0], 0.5), (4, [30, 2], 9.0), *[(0, [0, 50], i / 50) for i in range(40)]]
    lines, rows = [], []
    for number, (copies, above, score) in enumerate(records):
        values = {}
        for i in range(2):
            ranked = i < len(above)
            values |= {f"kind_{i}": 3.0 if ranked else -1.0, f"tied_{i}": 0.0}
            values |= {f"above_{i}": float(above[i]) if ranked else 0.0, f"alternatives_{i}": 99.0}
        cell = "undefended/white-box/identifiers"
        lines.append(json.dumps({"cell": cell, "secret": f"s{number}", "values": values}))
        for name in ("ez_mia", "zlib"):
            quantity = f"membership_score_{name}"
            rows.append((f"s{number}", copies > 0, float(copies), quantity, score))
    (tmp_path / "observations.jsonl").write_text("\n".join(lines))
    columns = ["secret", "member", "repeats", "quantity", "value"]
    pd.DataFrame(rows, columns=columns).to_parquet(tmp_path / "secrets.parquet")
    write_tables_of_runs(Page(), (tmp_path,))
    printed = capsys.readouterr().out
    assert "| 80 | 50.0% [38.6%–61.4%] | 50.0% [38.6%–61.4%] |" in printed
    power = next(line for line in printed.splitlines() if line.startswith("| 4 |"))
    shares = [cell.split()[0] for cell in power.strip("| ").split(" | ")]
    # by membership the second of two records (1% takes 99 non-members); by rank two of three values
    # at 5%, one at 1%
    assert shares == ["4", "50.0%", "0.0%", "50.0%", "0.0%", "66.7%", "33.3%"]

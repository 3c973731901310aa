"""What is exported is what was recorded: every number once, in CSV, Parquet and LaTeX alike."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from auditor.conclusions.outcomes import RunOutcomes, ValuesBySecret
from auditor.core.result import AuditResult, Measurement
from auditor.reports import export, files
from auditor.statistics.metrics import find_metric
from tests.conftest import check_command

KEY = ["run", "target", "setting", "attack", "measurement", "repeats"]


def from_csv(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=["", "nan"])


def test_the_recall_of_each_group_is_exported(result: AuditResult) -> None:
    """Before: it was in the report only, although the export "writes every measurement"."""
    groups = {
        "A": Measurement("recall", 0.5, 0.4, 0.6, 80),
        "16": Measurement("recall", 0, 0, 0.1, 9),
    }
    finding = replace(result.findings[0], measurements=(), by_repeats={}, by_group=groups)
    sheet = export.build_measurement_sheet([replace(result, findings=(finding,))])
    table = from_csv(export.to_csv(sheet))
    assert table["group"].astype(str).tolist() == ["A", "16"] and table["n"].tolist() == [80, 9]
    assert table["repeats"].isna().all()


def test_a_row_a_measurement(with_probe: AuditResult) -> None:
    sheet = export.build_measurement_sheet([with_probe])
    table, typed = (
        from_csv(export.to_csv(sheet)),
        pd.read_parquet(io.BytesIO(export.to_parquet(sheet))),
    )
    assert list(table.columns) == list(typed.columns) and len(table) == len(typed)
    assert not table.duplicated(KEY).any()
    expected = [(f, None, m) for f in with_probe.findings for m in f.measurements]
    expected += [(f, count, m) for f in with_probe.findings for count, m in f.by_repeats.items()]
    nothing = [f for f in with_probe.findings if f.not_applicable]
    assert len(table) == len(expected) + len(nothing) and nothing
    for frame in (table, typed):
        indexed = frame.set_index(KEY)
        for f, count, m in expected:
            repeats = np.nan if count is None else float(count)
            row = indexed.loc[(with_probe.name, f.target, f.setting, f.attack, m.name, repeats)]
            row = row.iloc[0] if isinstance(row, pd.DataFrame) else row
            assert (row["value"], row["low"], row["high"]) == (m.value, m.low, m.high)
            assert (row["n"], row["unit"], row["decoding"]) == (m.n, m.unit, f.decoding)
    why = table[
        table["attack"].eq("perplexity")
        & table["target"].eq("pmixed")
        & table["setting"].eq("text-only")
    ]
    assert (
        why["not_applicable"].item().startswith("perplexity ranks by") and why["value"].isna().all()
    )
    pmixed = table[table["target"] == "pmixed"]
    assert set(pmixed["epsilon"]) == {8.0} and set(pmixed["unit_of_protection"]) == {"shard"}
    assert set(table[table["target"] == "undefended"]["claim_status"].isna()) == {True}
    assert json.loads(table["options"][0])["samples"] == 10


def test_what_json_has_no_word_for_and_what_is_not_there(result: AuditResult) -> None:
    """uniform mixing's epsilon is infinite; a NaN stays one; an empty run is a head without
    rows."""
    odd = Measurement("recall", math.nan, -math.inf, math.inf, 0)
    strange = replace(
        result, findings=(replace(result.findings[-1], measurements=(odd,), by_repeats={}),)
    )
    sheet = export.build_measurement_sheet([strange])
    for frame in (
        pd.read_csv(io.StringIO(export.to_csv(sheet))),
        pd.read_parquet(io.BytesIO(export.to_parquet(sheet))),
    ):
        row = frame.iloc[0]
        assert math.isnan(row["value"]) and (row["low"], row["high"], row["epsilon"]) == (
            -math.inf,
            math.inf,
            math.inf,
        )
    empty = export.build_measurement_sheet([replace(result, findings=())])
    assert len(pd.read_parquet(io.BytesIO(export.to_parquet(empty)))) == 0
    assert export.to_csv(empty).count("\n") == 1


def run(result: AuditResult) -> RunOutcomes:
    ids, member = ("b", "a", "=1+1"), np.array([True, True, False])
    hits = ValuesBySecret(
        ids,
        member,
        (1, 4, None),
        {"recall": np.array([0.0, 1.0, 0.0]), "score": np.array([0.1, 2, -3])},
    )
    exact = ValuesBySecret(
        ids, member, (1, 4, None), {"extraction_probability": np.array([0.25, 1e-30, math.nan])}
    )
    rows = {
        ("undefended", "white-box", "ethicist"): hits,
        ("undefended", "white-box", "extraction-probability"): exact,
    }
    return RunOutcomes("folder", result, rows)


def test_a_row_a_secret(result: AuditResult) -> None:
    sheet = export.build_secret_sheet([run(result)])
    table, typed = (
        from_csv(export.to_csv(sheet)),
        pd.read_parquet(io.BytesIO(export.to_parquet(sheet))),
    )
    assert len(table) == len(typed) == 6
    row = typed[(typed["secret"] == "a") & (typed["attack"] == "ethicist")].iloc[0]
    assert (row["member"], row["repeats"], row["recall"], row["score"]) == (True, 4, 1.0, 2.0)
    assert math.isnan(row["extraction_probability"])  # another row's number
    exact = table[(table["secret"] == "a") & (table["attack"] == "extraction-probability")].iloc[0]
    assert exact["extraction_probability"] == 1e-30
    assert not any(cell.startswith("=") for cell in table["secret"]) and "1+1" in export.to_csv(
        sheet
    )


def test_latex_tables_are_whole(with_probe: AuditResult) -> None:
    evil = replace(with_probe, name=r"50% \input{x}" "\n_", targets=with_probe.targets)
    text = export.to_latex([evil])
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    body = "\n".join(lines)
    assert (
        r"166/320 (52\% {[}46--57{]})" in body and r"$\varepsilon$" in body and r"$\infty$" in body
    )
    assert "not applicable" in body and r"\input" not in body
    assert len(re.findall(r"(?<!\\)\{", body)) == len(re.findall(r"(?<!\\)\}", body))
    for line in lines:
        if line.endswith(r"\\"):
            assert len(re.findall(r"(?<!\\)&", line)) in (4, 7)
    assert body.isascii()


def test_latex_names_the_metric_of_each_number(with_probe: AuditResult) -> None:
    text = export.to_latex([with_probe])
    head = next(line for line in text.splitlines() if line.startswith("Target &"))
    assert "Recall" not in head and head.split(" & ")[2] == "Metric"
    for finding in with_probe.findings:
        if finding.main is not None and not finding.not_applicable:
            metric = find_metric(finding.main.name)
            (line, *_) = [line for line in text.splitlines() if f"& {finding.attack} &" in line]
            assert (metric.short or metric.title) in line


def test_repeats_join_measurements_with_secrets(result: AuditResult) -> None:
    def read(sheet: export.Sheet) -> pd.DataFrame:
        return pd.read_parquet(io.BytesIO(export.to_parquet(sheet)))

    finding = next(f for f in result.findings if f.main is not None)
    grouped = {"16": finding.main, "all": finding.main, "letters": finding.main}
    measured = read(
        export.build_measurement_sheet(
            [replace(result, findings=(replace(finding, by_repeats=grouped),))]
        )
    )
    secrets = pd.DataFrame({"secret": ["a"], "repeats": pd.array([16], dtype="int64")})
    joined = secrets.merge(measured, on="repeats")
    assert len(joined) == 1 and joined["value"][0] == finding.main.value
    assert set(measured["group"].dropna()) == {"all", "letters"}


def test_the_command(
    result: AuditResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write_run_reports(tmp_path / "run", result)
    files.write_run_reports(tmp_path / "other", replace(result, name="other", seed=1))
    named = {kind: tmp_path / f"out.{kind}" for kind in ("csv", "parquet", "latex")}
    flags = [word for kind, path in named.items() for word in (f"--{kind}", str(path))]
    check_command("export", tmp_path / "run", tmp_path / "other", *flags)
    assert capsys.readouterr().out.split() == [str(path) for path in named.values()]
    assert set(pd.read_csv(named["csv"])["seed"]) == {0, 1}
    assert {path.stat().st_mode & 0o777 for path in named.values()} == {0o600}
    for wrong, message in (
        ([], "expected at least one of"),
        (["--secrets", str(tmp_path / "s.xls")], "one of .csv, .parquet"),
        (
            ["--csv", str(tmp_path / "c.csv"), "--secrets", str(tmp_path / "s.csv")],
            "has no results by secret",
        ),
    ):
        check_command("export", tmp_path / "run", *wrong, code=2)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "c.csv").exists()  # nothing half written

"""A decision is printed beside the interval that it was made by, on every surface: never beside
another one."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from auditor.cli import run_command_line
from auditor.conclusions.signals import LeakSignal, assess_leak_signals
from auditor.core.result import AuditResult, Measurement
from auditor.gate import decide, history
from auditor.records.result_file import read_result
from auditor.reports import edpb, files, phrases, signals
from tests.conftest import check_command, methods
from tests.gate.finished_runs import finished, outcome
from tests.reports.test_reassurance import OTHERS, N, auc, probability, row

_DECIDED = re.compile(
    r"significan|\bshown\b|inconclusive|\bleaks\b|\bheld\b|\bfailed\b|severity", re.IGNORECASE
)
_BLOCKS = {"p", "li", "tr", "h1", "h2", "h3", "dt", "dd", "caption", "summary"}


class _Blocks(HTMLParser):
    """The text of each block of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = [""]
        self.feed(re.sub(r"(?s)<(style|script|svg)\b.*?</\1>", "", page))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.texts += [""] if tag in _BLOCKS else []

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


def folder_of_a_run(path: Path) -> AuditResult:
    """A run of which nothing is significant by the intervals that decide, and much by each number's
    own."""
    found = outcome(n=N, out=4, others=OTHERS)
    hit = found.hit.copy()
    hit[N] = True  # a non-member
    finished(path, replace(found, columns={**found.columns, "hit": hit, "any_hit": hit}))
    result = read_result(path)
    (base,) = result.findings
    floor = probability("extraction_probability_nonmembers", 0.001, 0.0, 0.002, OTHERS)
    groups = {
        count: probability("extraction_probability", p, p - 0.9 * p, p + 0.1, 12)
        for count, p in (("1", 0.003), ("2", 0.004), ("4", 0.2), ("8", 0.3), ("16", 0.0333))
    }
    probable = replace(
        row(
            "extraction-probability", probability("extraction_probability", 0.002, 0.0, 0.05), floor
        ),
        by_repeats=groups,
    )
    older = row(
        "membership",
        auc(0.679, 0.554, 0.804),
        auc(0.679, 0.554, 0.804, "membership_auc_loss"),
        auc(0.612, 0.511, 0.713, "membership_auc_min_k"),
        auc(0.601, 0.507, 0.695, "membership_auc_zlib"),
    )
    result = replace(result, findings=(base, probable, older), methods=methods())
    files.write_run_reports(path, result)
    return result


def surfaces(run: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, list[str]]]:
    """All that is written or printed of a run, each in the pieces that are read together."""
    screen, said = run_command_line(["show", str(run)]), capsys.readouterr().out
    assert screen == 0
    entries = re.split(r"\n(?=[A-Za-z])", said)
    yield (
        "screen",
        [line for entry in entries for line in re.split(r"; |\n {8} +\S+ +white-box", entry)],
    )
    check_command("show", run, "--verbose")
    yield "verbose screen", capsys.readouterr().out.splitlines()
    rules = [
        "--max",
        "recall=0.05",
        "--max",
        "membership_auc=0.6",
        "--max",
        "extraction_probability=0.01",
    ]
    assert run_command_line(
        ["gate", str(run), *rules, "--junit", str(run / "g.xml"), "--markdown", str(run / "g.md")]
    )
    yield "gate", capsys.readouterr().out.splitlines()
    yield "JUnit", (run / "g.xml").read_text().splitlines()
    yield "gate in Markdown", (run / "g.md").read_text().splitlines()
    check_command("report", run, "--format", "edpb")
    check_command("history", run, "-o", run / "history.html")
    check_command("export", run, "--csv", run / "n.csv", "--latex", run / "n.tex")
    check_command("advise", run)
    yield "advice", capsys.readouterr().out.splitlines()
    for name in ("report.md", "edpb.md", "n.tex"):
        yield name, (run / name).read_text().splitlines()
    for name in ("report.html", "edpb.html", "history.html"):
        yield name, _Blocks((run / name).read_text()).texts
    yield "CSV", [" ".join(cells) for cells in csv.reader((run / "n.csv").read_text().splitlines())]


def deciding_measurement(signal: LeakSignal) -> Measurement | None:
    return signal.excess if signals.is_excess_decisive(signal) else signal.measured


def own_intervals(result: AuditResult) -> set[str]:
    """As they are printed, the intervals of numbers that are decided by another one."""
    findings = result.findings
    raw = [
        m for f in findings for m in (*f.measurements, *f.by_repeats.values(), *f.by_kind.values())
    ]
    deciding = [
        m for s in assess_leak_signals(result).signals if (m := deciding_measurement(s)) is not None
    ]
    others = {phrases.format_interval(m) for m in raw if m.low < m.high}
    return others - {phrases.format_interval(m) for m in deciding}


def test_no_decision_stands_beside_an_interval_that_did_not_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in (
        decide,
        history,
        edpb,
    ):  # most numbers of this run have no secrets that they are of
        monkeypatch.setattr(reader, "find_result_contradictions", lambda *given: [])
    run = tmp_path / "run"
    result = folder_of_a_run(run)
    others = own_intervals(result)
    assert others >= {"[0.554–0.804]"}
    seen = dict(surfaces(run, capsys))
    wrong = [
        (where, " ".join(text.split()))
        for where, texts in seen.items()
        for text in texts
        if _DECIDED.search(text) and any(interval in text for interval in others)
    ]
    assert not wrong, "\n".join(map(str, wrong))

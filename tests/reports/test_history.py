"""Many runs on one page: in order, in lines that can be compared, with what gates decided and a
link to each report."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.conclusions.outcomes import read_run_outcomes
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.result import AuditResult, Finding
from auditor.gate import decision_log
from auditor.gate.decide import apply_gate_policy
from auditor.gate.history import History, build_run_history
from auditor.gate.policy import Policy, parse_gate_rule
from auditor.reports import history as reports
from tests.conftest import check_command
from tests.gate.finished_runs import whole
from tests.reports.conftest import MEMBERS, NONMEMBERS, PER_COUNT, REPEATS, measured
from tests.reports.test_page import CONTRAST
from tests.reports.test_renderers import HOSTILE, Page, hostile
from tests.rows import read_rows, repacked, write_rows

Said = pytest.CaptureFixture[str]
Maker = Callable[..., Path]
ROWS = [
    ("undefended", "white-box", "ethicist"),
    ("undefended", "white-box", "perplexity"),
    ("pmixed", "white-box", "ethicist"),
]


@pytest.fixture
def made(tmp_path: Path, result: AuditResult) -> Maker:
    """Writes a finished run: of each row's hits at each repeat count, `fewer` fewer; any field of
    the result."""

    def make(name: str, day: int, fewer: int = 0, **changed: Any) -> Path:
        findings, outcomes = [], {}
        for finding in result.findings:
            if finding.cell_key not in ROWS:
                continue
            hits = tuple(max(0, round(m.value * m.n) - fewer) for m in finding.by_repeats.values())
            numbers = measured(*finding.cell_key, hits)
            recall = tuple(
                m for m in numbers["measurements"] if m.name in ("recall", "recall_nonmembers")
            )
            row = replace(finding, **{**numbers, "measurements": recall}, chain=None)
            findings.append(row)
            outcomes[str(row.cell_key)] = per_secret(hits)
        fields: dict[str, Any] = {
            "name": name,
            "created": f"2026-03-{day:02d}T09:00:00+00:00",
            "findings": tuple(findings),
            "targets": tuple(
                target for target in result.targets if target.name in ("undefended", "pmixed")
            ),
            "family": "neox",
            "plan": {"attack": ["ethicist"], "setting": "white-box"},
            **changed,
        }
        folder = tmp_path / name
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps(to_json(replace(result, **fields))))
        write_rows(folder, outcomes)
        (folder / "report.html").write_text("the report")
        return whole(folder)

    return make


def per_secret(hits: tuple[int, ...]) -> dict[str, Any]:
    n = MEMBERS + NONMEMBERS
    right = [float(i % PER_COUNT < hits[i // PER_COUNT]) for i in range(MEMBERS)] + [
        0.0
    ] * NONMEMBERS
    repeats = [int(REPEATS[i // PER_COUNT]) if i < MEMBERS else 0 for i in range(n)]
    ids = [f"s{i}" for i in range(n)]
    return {
        "ids": ids,
        "member": [i < MEMBERS for i in range(n)],
        "repeats": repeats,
        "recall": right,
    }


def names(found: History) -> list[list[str]]:
    return [[entry.folder.name for entry in line.entries] for line in found.lines]


# --- in order, in lines ---


def test_runs_stand_in_the_order_of_their_dates_and_what_cannot_be_compared_apart(
    made: Maker,
) -> None:
    late, early, other, older = (
        made("late", 9, 6),
        made("early", 2),
        made("other", 5, family="gpt2"),
        made("older", 1, family="gpt2"),
    )
    found = build_run_history([late, other, early, older])
    assert names(found) == [["early", "late"], ["older", "other"]]
    assert (
        found.lines[0].reason == ""
        and "model family 'neox' against 'gpt2'" in found.lines[1].reason
    )
    first, change = (entry.change for entry in found.lines[0].entries)
    assert first is None and change is not None
    (moved,) = [
        line for line in change.lines if line.cell == ("undefended", "white-box", "ethicist")
    ]
    assert moved.comparands[-1].delta is not None and moved.comparands[-1].delta.high < 0


def test_every_two_runs_of_a_line_can_be_compared(made: Maker) -> None:
    """The last run lacks the row in which the two before it differ: they still may not share a
    line."""

    def only(run: Path, attack: str, **options: Any) -> None:
        raw = json.loads((run / "result.json").read_text())
        raw["findings"] = [f for f in raw["findings"] if attack in (f["attack"], "")]
        for finding in raw["findings"]:
            finding["options"] |= options if finding["attack"] == "perplexity" else {}
        (run / "result.json").write_text(json.dumps(raw))
        kept = read_rows(run)
        there = {row: held for row, held in kept.items() if attack in (row.split("/")[2], "")}
        write_rows(run, there)
        whole(run)

    runs = [made("a", 1), made("b", 2), made("c", 3)]
    only(runs[0], "", samples=3)
    only(runs[2], "ethicist")
    found = build_run_history(runs)
    assert names(found) == [["b", "c"], ["a"]]
    assert "attack settings: perplexity.samples 10 against 3" in found.lines[1].reason


def test_checkpoints_stand_in_the_order_of_their_steps(made: Maker) -> None:
    def plan(**values: str) -> dict[str, Any]:
        return {"plan": {"defense": ["pmixed"], **values}}

    runs = [
        made("a", 1, **plan(model="out/checkpoint-1000")),
        made("b", 2, **plan(model="out/checkpoint-90")),
        made("c", 3, **plan(model="pythia", revision="step143000")),
        made("d", 4, **plan(model="gpt2-1558")),
    ]
    found = build_run_history(runs, "checkpoint")
    assert names(found) == [["b", "a", "c"]]
    assert [entry.label for line in found.lines for entry in line.entries] == [
        "checkpoint-90",
        "checkpoint-1000",
        "step143000",
    ]
    assert [Path(name).name for name, _ in found.left_out] == ["d"]


def test_commits_stand_in_the_order_in_which_they_were_first_audited(made: Maker) -> None:
    runs = [
        made(name, day, environment={"commit": commit})
        for day, (name, commit) in enumerate(("af", "bc", "cf", "dc"), 1)
    ]
    assert names(build_run_history(runs, "commit")) == [["a", "c", "b", "d"]]


def test_a_folder_is_one_run_whatever_it_is_called(made: Maker, tmp_path: Path) -> None:
    run = made("run", 1)
    (tmp_path / "latest").symlink_to("run")
    for given in ([tmp_path / "latest", run], [run, tmp_path / "latest", run]):
        assert names(build_run_history(given)) == [["run"]]


def test_what_holds_no_result_is_left_out_and_said(made: Maker, tmp_path: Path) -> None:
    run = made("run", 1)
    (tmp_path / "grid").mkdir()
    made("grid/point", 2)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "plan.json").write_text("{}")
    torn = made("torn", 3)
    write_rows(
        torn,
        {
            row: {**held, "recall": [0.0] * len(held["ids"])}
            for row, held in read_rows(torn).items()
        },
    )
    whole(torn)
    edited = made("edited", 4)
    repacked(edited)
    found = build_run_history([run, tmp_path / "begun", tmp_path / "grid", torn, edited])
    assert names(found) == [["run"]]
    begun, grid, other, later = (why for _, why in found.left_out)
    assert other.startswith(
        "its result contradicts itself: recall is 0.51875, secrets.parquet makes it 0"
    )
    assert later == "secrets.parquet has changed since the run ended"
    assert begun.startswith("not finished; audit run --resume ") and grid.startswith(
        "a folder of runs, not a run; "
    )


# --- what gates decided ---


def rules(*sentences: str) -> Policy:
    return Policy(tuple(map(parse_gate_rule, sentences)))


def test_a_decision_is_kept_once_and_only_of_this_result(made: Maker) -> None:
    run = made("run", 1)
    for limit in ("0.01", "0.9", "0.01"):
        decision_log.save_decision(
            run, apply_gate_policy(read_run_outcomes(run), rules(f"recall <= {limit}"))
        )
    assert [one.decision.verdict for one in decision_log.load_gate_decisions(run)] == [
        "held",
        "failed",
    ]
    assert decision_log.load_gate_decisions(run)[1].decision == apply_gate_policy(
        read_run_outcomes(run), rules("recall <= 0.01")
    )
    # as if it had run again
    (run / "result.json").write_text((run / "result.json").read_text() + " ")
    assert decision_log.load_gate_decisions(run) == ()


DECISION_EDITS: dict[str, Callable[[list[str]], list[str]]] = {
    "first edited": lambda lines: [lines[0].replace("failed", "held"), *lines[1:]],
    "middle taken away": lambda lines: [lines[0], lines[2]],
    "last edited": lambda lines: [*lines[:2], lines[2].replace("failed", "held")],
    "last taken away": lambda lines: lines[:2],
    "all taken away": lambda lines: [],
    "one added": lambda lines: [*lines, lines[2]],
}


@pytest.mark.parametrize("name", DECISION_EDITS)
def test_an_edited_or_removed_decision_is_noticed(made: Maker, capsys: Said, name: str) -> None:
    """By every later gate, and by the history; nothing is then added behind it."""
    run, other = made("run", 1), made("other", 2)
    for limit in ("0.01", "0.9", "0.02"):
        decision_log.save_decision(
            run, apply_gate_policy(read_run_outcomes(run), rules(f"recall <= {limit}"))
        )
    decisions = run / "decisions.jsonl"
    decisions.write_text(
        "".join(DECISION_EDITS[name](decisions.read_text().splitlines(keepends=True)))
    )
    edited = decisions.read_bytes()
    for _ in range(2):
        check_command("gate", run, "--max", "recall=0.9", code=1)
        said = capsys.readouterr()
        assert (
            "decisions.jsonl: " in said.out
            and "was edited or taken away: restore it, or audit again" in said.out
        )
        assert "audit history will not know of this decision" in said.err
    assert decisions.read_bytes() == edited
    found = build_run_history([run, other])
    assert names(found) == [["other"]] and "was edited or taken away" in found.left_out[0][1]
    with pytest.raises(AuditError, match="was edited or taken away"):
        decision_log.load_gate_decisions(run)


@pytest.mark.parametrize("writes", range(4))
def test_a_gate_that_is_killed_while_it_keeps_breaks_no_chain(
    made: Maker, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    run, left, own = made("run", 1), [None] * writes, (disk.replace_atomically, disk.append_durably)
    decision = apply_gate_policy(read_run_outcomes(run), rules("recall <= 0.9"))
    decision_log.save_decision(run, decision)

    def killed(write: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*given: Any, **more: Any) -> Any:
            if not left:
                raise KeyboardInterrupt
            left.pop()
            return write(*given, **more)

        return tried

    with monkeypatch.context() as patched:
        patched.setattr(disk, "replace_atomically", killed(own[0]))
        patched.setattr(disk, "append_durably", killed(own[1]))
        with contextlib.suppress(KeyboardInterrupt):
            decision_log.save_decision(run, decision)
    assert not decision_log.describe_decision_edits(run)
    decision_log.save_decision(run, decision)
    assert not decision_log.describe_decision_edits(run)
    assert len((run / "decisions.jsonl").read_text().splitlines()) == (3 if writes > 1 else 2)


@pytest.mark.parametrize("line", ["{", "[]", '{"odd": 1}', "\udcff"])
def test_a_damaged_record_of_decisions_is_refused(made: Maker, line: str) -> None:
    run = made("run", 1)
    (run / "decisions.jsonl").write_bytes(line.encode(errors="surrogateescape"))
    with pytest.raises(AuditError, match=r"decisions\.jsonl: (expected|missing|unknown)"):
        decision_log.load_gate_decisions(run)


def test_a_gate_that_cannot_be_kept_decides_all_the_same_and_says_so(
    made: Maker, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> int:
        raise AuditError(f"{path}: cannot be written: No space left on device")

    run = made("run", 1)
    monkeypatch.setattr(disk, "append_durably", full)
    check_command("gate", run, "--max", "recall=0.9")
    assert "audit history will not know of this decision" in capsys.readouterr().err


# --- the page ---


def test_the_command_writes_one_page_that_leads_to_every_report(
    made: Maker, tmp_path: Path
) -> None:
    """Without torch. The page that was there before is among what the shell names."""
    runs = [
        made("first run", 2),
        made("second", 9, 6),
        made("third", 5, family="gpt2"),
        tmp_path / "begun",
    ]
    runs[-1].mkdir()
    (runs[-1] / "plan.json").write_text("{}")
    check_command("gate", runs[1], "--max", "recall=0.01", "--baseline", runs[0], code=1)
    out = tmp_path / "pages" / "history.html"
    out.parent.mkdir()
    out.write_text("an older one")
    code = (
        "import sys; from auditor.cli import run_command_line; assert run_command_line(['history', "
        "*sys.argv[1:]]) == 0; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, *map(str, (*runs, out)), "-o", str(out)]
    said = subprocess.run(
        command, check=True, timeout=300, capture_output=True, text=True
    ).stdout.splitlines()
    assert said[0].startswith(f"left out: {runs[-1]}: not finished; audit run --resume ") and said[
        1:
    ] == [str(out)]
    page = Page(out.read_text())
    links = [link["href"] for link in page.all("a") if not str(link["href"]).startswith("#")]
    assert links == ["../second/report.html", "../first%20run/report.html", "../third/report.html"]
    text = " ".join("".join(page.text).split())
    assert "failed: recall <= 0.01 (baseline first run)" in text
    assert "not finished; audit run --resume" in text
    assert "Not comparable: third" in text and "model family 'neox' against 'gpt2'" in text
    assert "166/320 = 52%" in text and "[46–57]" in text  # of the first run, with its interval
    ids = [tag["id"] for _, tag in page.tags if tag.get("id")]
    (svg,) = page.all("svg")
    assert svg["role"] == "img" and {*str(svg["aria-labelledby"]).split()} <= {*ids}
    assert len(ids) == len(set(ids))
    assert out.stat().st_mode & 0o777 == 0o600


def test_nothing_that_a_run_says_breaks_out(
    made: Maker, result: AuditResult, tmp_path: Path
) -> None:
    bad = hostile(result)
    odd = {
        name: getattr(bad, name)
        for name in ("command", "benchmark", "targets", "environment", "plan")
    }
    runs = [made("a<b>'&\u202e", 1, **odd, weights={HOSTILE: HOSTILE}), made("b", 2), made("c", 3)]
    rows: list[Finding] = list(bad.findings)
    (runs[2] / "result.json").write_text(
        json.dumps(
            to_json(
                replace(
                    read_run_outcomes(runs[2]).result, findings=tuple(rows), targets=bad.targets
                )
            )
        )
    )
    whole(runs[2])
    decision_log.save_decision(
        runs[1],
        replace(
            apply_gate_policy(read_run_outcomes(runs[1]), rules("recall <= 0.01")), baseline=HOSTILE
        ),
    )
    page = Page(reports.render_history_page(build_run_history(runs), tmp_path))
    assert not page.all("script") and not page.all("img") and "alert(1)" in "".join(page.text)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "\x1b" not in "".join(page.text) and "\u202e" not in "".join(page.text)


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_in_a_browser(
    browser: Any, made: Maker, tmp_path: Path, width: int, dark: bool
) -> None:
    runs = [made(f"run-{i}", i + 1, i) for i in range(7)]
    decision_log.save_decision(
        runs[-1], apply_gate_policy(read_run_outcomes(runs[-1]), rules("recall <= 0.01"))
    )
    (tmp_path / "history.html").write_text(
        reports.render_history_page(build_run_history(runs), tmp_path), encoding="utf-8"
    )
    browser.open(tmp_path / "history.html", width, dark=dark)
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    assert browser.evaluate(CONTRAST) >= 4.5
    assert browser.troubles() == []


# --- what is refused ---


def test_what_is_no_run_is_refused(made: Maker, tmp_path: Path, capsys: Said) -> None:
    run, empty, begun = made("run", 1), tmp_path / "empty", tmp_path / "begun"
    for folder in (empty, begun):
        folder.mkdir()
    (begun / "plan.json").write_text("{}")
    undated = made("undated", 2, created="yesterday")
    out = ["-o", str(tmp_path / "h.html")]
    for given, said in (
        ([run, empty], "no result.json in this folder"),
        ([run, tmp_path / "none"], "no such run folder"),
        ([run, run / "result.json"], "expected a run folder, got a file"),
        ([begun], "expected at least one finished run to order by date, got"),
        ([run, "--by", "size"], "expected --by date, commit or checkpoint, got 'size'"),
        ([run, "--by", "commit"], "it records no commit"),
        ([run, undated], "expected the date of the run in result.json, got 'yesterday'"),
        ([], "Missing argument"),
    ):
        capsys.readouterr()
        check_command("history", *map(str, given), *out, code=2)
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line and not (tmp_path / "h.html").exists()

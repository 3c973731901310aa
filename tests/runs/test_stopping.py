"""`--until`: which secrets are asked in which order, when a configuration stops, and that the gate
decides the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.cli import run_command_line
from auditor.conclusions.outcomes import ValuesBySecret, read_run_outcomes
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Secret
from auditor.core.plan import Plan
from auditor.core.secret_table import build_secret_table
from auditor.gate.policy import Required, Rule
from auditor.records.folder import RunFolder
from auditor.runs.stopping import StoppingRule, refuse_dependent_secrets
from auditor.statistics.anytime import yield_look_sizes
from tests.conftest import check_command, fits_schema, save_tiny

ROW = CellKey("undefended", "white-box", "echo")
PLUG_IN = '''
"""Guesses that a text goes on as it began: which is so for as many records as the test wants."""
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from auditor.core.nouns import Guess, Guesses
from auditor.plugins.attack import Attack

@dataclass(frozen=True)
class Echo(Attack):
    "Goes on as the prefix began."
    name = "echo"
    needs = ()

    def guess(self, view, state, queries):
        for query in queries:
            left = Path("left")
            if left.exists():
                left.write_text(str(int(left.read_text()) - 1))
                if left.read_text() == "0":
                    raise KeyboardInterrupt
            yield Guesses(query.id, (Guess(query.prefix[:query.length], sum(query.prefix) / 1e5),), 1, 0)
'''  # noqa: E501


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that nobody asks, and records of which 3 in 10 go on as they began, behind others
    that never do."""
    folder = tmp_path_factory.mktemp("until")
    save_tiny(folder / "model")
    (folder / "echo.py").write_text(PLUG_IN)
    for name, of, out in (("data", 500, 3), ("clean", 500, 0), ("others", 200, 0)):
        rows = [
            {
                "prefix": f"{name} {i:04d} is",
                "suffix": f"{name} {i:04d}"[:4] if i % 10 < out else "nope",
            }
            for i in range(of)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "limit.toml").write_text('rules = ["recall <= 0.05"]')
    (folder / "worse.toml").write_text('rules = ["recall not worse than baseline by 0.05"]')
    return folder


Audit = Callable[..., int]


@pytest.fixture
def audit(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """`audit run` by the echo attack into this folder."""
    monkeypatch.chdir(tmp_path)

    def run(out: str, *more: str, data: str = "data") -> int:
        command = ["run", "--model", str(inputs / "model"), "--data", str(inputs / f"{data}.jsonl")]
        command += ["--setting", "white-box"]
        command += [
            "--nonmembers",
            str(inputs / "others.jsonl"),
            "--plugin",
            str(inputs / "echo.py"),
        ]
        return run_command_line([*command, "--attack", "echo", "-o", out, *more])

    return run


def guesses(folder: str) -> dict[str, Any]:
    lines = Path(folder, "guesses.jsonl").read_text(encoding="utf-8").splitlines()
    return {json.dumps([one["cell"], one["secret"]]): one for one in map(json.loads, lines)}


def numbers(folder: str) -> list[Any]:
    (finding,) = read_run_outcomes(Path(folder)).result.findings
    return [finding.measurements, finding.stopped, finding.by_kind, finding.curve]


def test_a_run_stops_where_the_gate_will_decide(
    inputs: Path, audit: Audit, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Recall 0.3 against a limit of 0.05: the first looks fail it; the guesses are those of a whole
    run."""
    assert audit("whole") == 0
    assert audit("early", "--until", "decided", "--gate", str(inputs / "limit.toml")) == 1
    said = capsys.readouterr().out
    run, whole = read_run_outcomes(tmp_path / "early"), read_run_outcomes(tmp_path / "whole")
    (finding,) = run.result.findings
    assert finding.stopped is not None
    assert finding.stopped.asked in yield_look_sizes(finding.stopped.of)
    assert finding.stopped.of == len(whole.outcomes[ROW].ids)
    assert finding.stopped.asked < finding.stopped.of / 5
    assert finding.stopped.why == "until 'recall <= 0.05' failed"
    assert (
        f"asked {finding.stopped.asked} of {finding.stopped.of} secrets in random order"
        in " ".join(said.split())
    )
    asked = set(run.outcomes[ROW].ids)
    every = guesses("whole")
    assert all(every[key] == one for key, one in guesses("early").items())
    assert len(guesses("early")) == finding.stopped.asked
    assert 0 < run.outcomes[ROW].member.sum() < len(asked)  # both kinds, as they come
    assert fits_schema(tmp_path / "early")
    check_command("gate", "early", "--policy", inputs / "limit.toml", code=1)
    check_command("report", "early")
    assert finding.stopped.early_stop_sentence in (tmp_path / "early" / "report.md").read_text(
        encoding="utf-8"
    ).replace("&lt;", "<")


def test_intervals_of_what_stopped_are_by_betting_and_what_has_none_is_left_out(
    inputs: Path, audit: Audit, tmp_path: Path
) -> None:
    assert (
        audit("held", "--until", "decided", "--gate", str(inputs / "limit.toml"), data="clean") == 0
    )
    run = read_run_outcomes(tmp_path / "held")
    (finding,) = run.result.findings
    names = {m.name for m in finding.measurements}
    assert {"recall", "recall_nonmembers", "excess_recall", "near_verbatim_recall"} <= names
    assert not any(name.startswith("recall_at_") for name in names)
    recall, row = finding.measurements[0], run.outcomes[ROW]
    seen = row.build_anytime_evidence("recall")
    assert seen is not None
    assert (recall.low, recall.high) == (seen.low(0.025), seen.high(0.025))
    assert seen.high(0.05) <= 0.05 < recall.high
    check_command("gate", "held", "--max", "recall=0.05", "--max", "recall_nonmembers=0.3")
    # which it does not have
    check_command("gate", "held", "--max", "recall_at_100_errors=0.05", code=1)


def test_an_interval_as_narrow_as_was_asked(audit: Audit, tmp_path: Path) -> None:
    assert audit("narrow", "--until", "recall ± 12%") == 0
    (finding,) = read_run_outcomes(tmp_path / "narrow").result.findings
    recall = finding.measurements[0]
    assert finding.stopped is not None
    assert finding.stopped.why == "until recall ± 12%"
    assert max(recall.value - recall.low, recall.high - recall.value) <= 0.12
    assert audit("all", "--until", "recall +- 0.5%") == 0
    (finding,) = read_run_outcomes(tmp_path / "all").result.findings
    assert finding.stopped is not None
    assert (finding.stopped.asked, finding.stopped.why) == (
        finding.stopped.of,
        "all that there are",
    )


def test_a_probe_stops_as_well(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each secret's probability is that of a whole run; batches make no difference to who is
    asked."""
    monkeypatch.chdir(tmp_path)
    command = [
        "run",
        "--model",
        str(inputs / "model"),
        "--data",
        str(inputs / "data.jsonl"),
        "--setting",
        "white-box",
    ]
    command += ["--attack", "extraction-probability", "--limit", "150"]
    check_command(*command, "-o", "whole")
    early = []
    for size in ("7", "64"):
        until = ["--until", "extraction_probability ± 8%", "--batch-size", size]
        check_command(*command, *until, "-o", size)
        early.append(read_run_outcomes(tmp_path / size))
    one, other = early
    (finding,) = one.result.findings
    assert finding.stopped is not None
    assert finding.stopped.asked < finding.stopped.of == 150
    assert finding.measurements[0].high <= 0.08
    assert [f.stopped for f in other.result.findings] == [finding.stopped]
    row = CellKey("undefended", "white-box", "extraction-probability")
    whole, asked = read_run_outcomes(tmp_path / "whole").outcomes[row], one.outcomes[row]
    assert set(asked.ids) == set(other.outcomes[row].ids) < set(whole.ids)
    every = whole.values_by_secret("extraction_probability", True)
    for id, value in asked.values_by_secret("extraction_probability", True).items():
        assert value == pytest.approx(every[id], abs=1e-5)


def test_an_interrupted_run_comes_to_the_same(inputs: Path, audit: Audit, tmp_path: Path) -> None:
    """Wherever it was interrupted; with other rules it is not gone on with."""
    plug_in = ["--plugin", str(inputs / "echo.py")]
    assert audit("once", "--until", "recall ± 12%") == 0
    whole = len(guesses("once"))
    for left in (10, 45, whole - 3):
        (tmp_path / "left").write_text(str(left))
        assert audit(f"cut{left}", "--until", "recall ± 12%") == 130
        (tmp_path / "left").unlink()
        check_command("run", "--resume", f"cut{left}", *plug_in)
        assert numbers(f"cut{left}") == numbers("once")
        assert guesses(f"cut{left}") == guesses("once")


def test_other_rules_do_not_go_on_with_a_run(
    inputs: Path, audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "left").write_text("40")
    assert (
        audit("cut", "--until", "decided", "--gate", str(inputs / "limit.toml"), data="clean")
        == 130
    )
    (tmp_path / "left").unlink()
    (tmp_path / "other.toml").write_text('rules = ["recall <= 0.2"]')
    again = ["run", "--resume", "cut", "--plugin", str(inputs / "echo.py")]
    check_command(*again, "--gate", "other.toml", code=2)
    assert (
        "expected the rules and baseline by which 'cut' was to stop (--until), got others"
        in capsys.readouterr().err
    )
    check_command(*again, code=2)
    check_command(*again, "--gate", inputs / "limit.toml")


def test_a_baseline_is_paired_with_what_was_asked(
    inputs: Path, audit: Audit, tmp_path: Path
) -> None:
    assert audit("base") == 0
    judged = ["--gate", str(inputs / "worse.toml"), "--baseline", "base"]
    assert audit("new", "--until", "decided", *judged) == 0
    (finding,) = read_run_outcomes(tmp_path / "new").result.findings
    assert finding.stopped is not None
    assert finding.stopped.asked < finding.stopped.of
    assert finding.stopped.why == "until 'recall not worse than baseline by 0.05' was held"
    check_command("gate", "new", "--policy", inputs / "worse.toml", "--baseline", "base")


@pytest.mark.parametrize(
    ("until", "more", "said"),
    [
        ("soon", [], "expected --until decided or an interval such as 'recall ± 2%', got 'soon'"),
        ("recall ± 0%", [], "got 'recall ± 0%'"),
        ("recall ± 2", [], "got 'recall ± 2'"),
        ("decided", [], "--until decided stops by the rules of a gate: give --gate POLICY"),
        (
            "decided",
            ["--gate", "blind.toml"],
            "expected --until decided with a rule on a share of secrets, such as recall <= 0.05, "
            "got 'recall_at_100_errors <= 0.1'",
        ),
        (
            "exposure ± 2%",
            [],
            "expected --until on a number of echo, got exposure: it measures recall",
        ),
        (
            "recall ± 2%",
            ["--attack", "membership"],
            "a number of membership, got recall: it measures no share",
        ),
        (
            "recall ± 2%",
            ["--submission", "s.csv"],
            "--submission needs all secrets, and --until may stop before",
        ),
        (
            "recall ± 2%",
            ["--seeds", "0,1"],
            "--until stops the configurations of a single run, got a grid of runs",
        ),
    ],
)
def test_refusals(
    audit: Audit,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    until: str,
    more: list[str],
    said: str,
) -> None:
    (tmp_path / "blind.toml").write_text('rules = ["recall_at_100_errors <= 0.1"]')
    assert audit("no", "--until", until, *more) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("no").exists()


# --- when a row has been asked enough ---


def row(members: int, hits: int, others: int = 0) -> ValuesBySecret:
    n = members + others
    values = {"recall": (np.arange(n) < hits).astype(float)}
    return ValuesBySecret(
        tuple(f"{i:04d}" for i in range(n)), np.arange(n) < members, (None,) * n, values
    )


def test_a_rule_fails_at_its_part_of_the_level() -> None:
    """What fails alone need not fail among ten decisions; what is held is held at the level
    itself."""
    rule, seen = Rule("recall", 0.05), row(16, 5)
    assert StoppingRule(rules=(rule,), level=0.05).explain_stop(seen)
    assert not StoppingRule(rules=(rule,), level=1e-5).explain_stop(seen)
    assert (
        StoppingRule(rules=(rule,), level=1e-5).explain_stop(row(120, 0))
        == "until 'recall <= 0.05' was held"
    )
    both = StoppingRule(rules=(rule, Rule("recall", 0.6)), level=0.05)
    assert both.explain_stop(row(16, 8)) == ""
    assert (
        both.explain_stop(row(60, 20))
        == "until 'recall <= 0.05' failed; until 'recall <= 0.6' was held"
    )


def test_what_the_policy_requires_is_asked_first() -> None:
    stop = StoppingRule(rules=(Rule("recall", 0.05),), require=Required(secrets=100, nonmembers=20))
    assert not stop.explain_stop(row(99, 40, 30))
    assert not stop.explain_stop(row(100, 40, 19))
    assert stop.explain_stop(row(100, 40, 20))


def test_secrets_are_asked_in_an_order_of_the_seed_in_portions_of_no_ones_choice() -> None:
    from auditor.core.nouns import Query

    items = [Query(f"{i:03d}", (1,), 1) for i in range(50)]

    def order(seed: int, some: list[Query]) -> list[str]:
        asked: list[str] = []
        StoppingRule(("recall", 0.01)).ask_randomly(
            some,
            seed,
            lambda now: asked.extend(one.id for one in now),
            lambda now: row(len(now), 0),
        )
        return asked

    assert order(0, items) == order(0, items[::-1])
    assert order(0, items) != order(1, items)
    assert sorted(order(0, items)) == [one.id for one in items]
    fewer = items[::3]
    assert order(0, fewer) == [id for id in order(0, items) if id in {one.id for one in fewer}]


def test_dependent_secrets_are_not_bet_on(
    inputs: Path, audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prefix": f"row {i} is", "suffix": "nope", "who": i // 2} for i in range(90)]
    (inputs / "people.jsonl").write_text("\n".join(map(json.dumps, rows)))
    until = ["--until", "recall ± 12%", "--user-column", "who"]
    assert audit("no", *until, data="people") == 2
    assert "expected independent secrets with --until" in capsys.readouterr().err
    parts = [Secret(f"{i}", (1,), (2,), document="a") for i in range(3)]
    with pytest.raises(AuditError, match="got 3 of 1 records"):
        refuse_dependent_secrets(build_secret_table(parts))
    refuse_dependent_secrets(build_secret_table(parts[:1]))


def test_the_plan_reads_an_interval() -> None:
    assert Plan.from_fields(until="recall ± 2.5%").attacks.until_metric_and_half_width == (
        "recall",
        0.025,
    )
    assert Plan.from_fields(until="recall +/- 2%").attacks.until_metric_and_half_width == (
        "recall",
        0.02,
    )
    with pytest.raises(AuditError, match="expected --until decided"):
        Plan.from_fields(until="recall ± 100%")


def test_a_folder_is_tied_to_when_its_rows_stop(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "r", "r", {})
    folder.pin_stopping_rules("")
    folder.pin_stopping_rules("a")
    folder.pin_stopping_rules("a")
    with pytest.raises(AuditError, match="got others"):
        folder.pin_stopping_rules("")
    assert os.path.exists(tmp_path / "r" / "until.sha256")

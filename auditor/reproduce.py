"""`audit reproduce`: runs the plans of a paper and writes the claim ledger. Knows no paper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from auditor import ledger, sweep, tradeoff, utility
from auditor.errors import AuditError
from auditor.grid import Point, expand, merged
from auditor.ledger import Entry, Place
from auditor.papers import UTILITY, Paper
from auditor.reports import files, tables, words
from auditor.run import Reporter
from auditor.types import to_json


def points(paper: Paper, plan: str, scale: str, flags: Mapping[str, Any]) -> list[Point]:
    """The grid of one plan; flags lie over its fields, and its variants and sweeps over the flags.

    Raises AuditError where the scale attacks data that were not given.
    """
    return expand(_raw(paper, plan, scale, flags))


def _raw(paper: Paper, plan: str, scale: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    raw = merged(paper.at(plan, scale), {name: value for name, value in flags.items() if value is not None})
    if raw.get("model") and not raw.get("data"):
        raise AuditError(f"the scale {scale!r} of {paper.name} attacks {raw['model']}: give --data (and --known)")
    return raw


def reproduce(
    paper: Paper,
    plans: Sequence[str],
    scale: str,
    flags: Mapping[str, Any],
    out: Path,
    reporter: Reporter,
    command: str,
) -> tuple[list[tables.Grid], list[Entry], dict[str, str]]:
    """Runs these plans, or goes on with them; returns a table each, the ledger of all plans found in `out`, failures.

    Every plan and claim is checked before the first run. A point that cannot run is a row that says why, and one of the
    failures: why, by plan and point.
    """
    kinds = {plan: _kind(paper, plan, scale, flags) for plan in plans}
    claims = {plan: statements(paper, plan, scale) for plan in paper.plans}
    for plan, kind in kinds.items():
        for statement in claims[plan]:
            ledger.check(statement, kind.planned())
    shown, failures = [], {}
    for plan, kind in kinds.items():
        table, failed = kind.walk(out / plan, reporter, command)
        shown.append(table)
        failures.update({f"{plan}/{point}": why for point, why in failed.items()})
    entries = []
    for plan in paper.plans:
        if (held := _places(out / plan)) is not None:
            entries += [ledger.entry(plan, statement, held) for statement in claims[plan]]
    write(out, paper, scale, entries)
    return shown, entries, failures


class _Runs:
    """A plan of attacks: a grid of runs."""

    def __init__(self, title: str, grid: list[Point]) -> None:
        self.title, self.grid = title, grid

    def planned(self) -> list[Place]:
        return sweep.planned(self.grid)

    def walk(self, folder: Path, reporter: Reporter, command: str) -> tuple[tables.Grid, dict[str, str]]:
        """Its table; why, by point, of those that failed."""
        failures = sweep.walk(self.grid, folder, reporter, command, refuse=False)
        table = sweep.table(self.title, sweep.places(folder))
        sweep.write_table(folder, table)
        return table, failures


class _Measured:
    """A plan of `audit utility`: one sweep, measured at once."""

    def __init__(self, asked: utility.Asking) -> None:
        self.asked = asked

    def planned(self) -> list[Place]:
        return tradeoff.planned(utility.points(self.asked.plan, self.asked.sweep))

    def walk(self, folder: Path, reporter: Reporter, command: str) -> tuple[tables.Grid, dict[str, str]]:
        return tradeoff.table(tradeoff.walk(self.asked, folder, reporter, command)), {}


def _kind(paper: Paper, plan: str, scale: str, flags: Mapping[str, Any]) -> _Runs | _Measured:
    raw = _raw(paper, plan, scale, flags)
    if UTILITY in raw:
        return _Measured(utility.asking(raw))
    return _Runs(str(paper.plans[plan].get("title", plan)), expand(raw))


def _places(folder: Path) -> list[Place] | None:
    """What a plan's folder holds; None where it was not run."""
    if (folder / sweep.SWEEP).is_file():
        return sweep.places(folder)
    return tradeoff.places(tradeoff.read(folder)) if tradeoff.measured(folder) else None


def statements(paper: Paper, plan: str, scale: str) -> list[ledger.Statement]:
    return ledger.statements(paper.plans[plan].get("claim", []), scale, f"{paper.name}/{plan}")


# --- the ledger on disk ---------------------------------------------------------------------------------------------


def table(paper: Paper, entries: Sequence[Entry]) -> tables.Grid:
    """The ledger as rows; for programs with bounds in columns of their own."""
    head = ("plan", "claim", "paper", "expected", "setting", "ours", "verdict")
    rows = tuple((e.plan, e.text, e.paper, e.expect, e.setting, _ours(e), e.verdict) for e in entries)
    machine = tuple(
        (e.plan, e.id, e.text, e.paper, e.setting, e.expect, *_bounds(e), e.verdict, e.note) for e in entries
    )
    names = ("plan", "id", "claim", "paper", "setting", "expect", "ours", "low", "high", "n", "unit", "verdict", "note")
    return tables.Grid(f"Claims: {paper.title}", head, rows, ledger.RULE, names, machine)


def brief(paper: Paper, entries: Sequence[Entry]) -> tables.Grid:
    """The ledger for a terminal: settings stand below, once for each plan."""
    settings: dict[str, list[str]] = {}
    for e in entries:
        if e.setting and e.setting not in settings.setdefault(e.plan, []):
            settings[e.plan].append(e.setting)
    note = "\n".join([*(f"{plan}: {' | '.join(held)}" for plan, held in settings.items() if held), ledger.RULE])
    rows = tuple((f"{e.plan}: {e.text}", e.paper, _ours(e), e.verdict) for e in entries)
    return tables.Grid(f"Claims: {paper.title}", ("claim", "paper", "ours", "verdict"), rows, note)


def _ours(entry: Entry) -> str:
    m = entry.ours
    return f"– ({entry.note})" if m is None else words.with_bounds(m)


def _bounds(entry: Entry) -> tuple[object, ...]:
    m = entry.ours
    return (None,) * 5 if m is None else (m.value, m.low, m.high, m.n, m.unit)


def write(out: Path, paper: Paper, scale: str, entries: Sequence[Entry]) -> None:
    """ledger.md, ledger.csv, ledger.tex and ledger.json, each replaced whole."""
    grid = table(paper, entries)
    files.replace(out / "ledger.md", tables.to_markdown(grid))
    files.replace(out / "ledger.csv", tables.to_csv(grid))
    files.replace(out / "ledger.tex", tables.to_latex(grid))
    whole = {"paper": paper.name, "title": paper.title, "scale": scale, "rule": ledger.RULE, "claims": list(entries)}
    files.replace(out / "ledger.json", json.dumps(to_json(whole), indent=1, allow_nan=False) + "\n")

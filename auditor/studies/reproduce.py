"""`audit reproduce`: runs the plans of a paper and writes the claim ledger. Knows no paper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.reports import frontier, tables, words
from auditor.runs.grid import Point, expand, merged
from auditor.runs.reporter import Reporter
from auditor.studies import ledger, places, published, sweep
from auditor.studies.ledger import LedgerRow
from auditor.studies.papers import PUBLISHED, UTILITY, Paper
from auditor.studies.places import Place
from auditor.studies.published import Published
from auditor.utility import measure, tradeoff

PAGE, _SECTION = "claims.md", "claim.md"


def kind(paper: Paper, plan: str, scale: str, flags: Mapping[str, Any]) -> RunStudy | UtilityStudy | ClaimStudy:
    """One plan of a paper; flags lie over its fields, and its variants and sweeps over the flags.

    Raises AuditError where the scale asks about data that were not given, or does not ask about any.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    raw = merged(paper.at(plan, scale), given)
    if PUBLISHED in raw:
        if given:
            names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in given))
            raise AuditError(f"expected no {names} for {paper.name}/{plan}, whose distributions are given in its plan")
        return ClaimStudy(Published.of(str(paper.plans[plan].get("title", plan)), raw[PUBLISHED]))
    if raw.get("model") and not raw.get("data"):
        raise AuditError(f"the scale {scale!r} of {paper.name} attacks {raw['model']}: give --data (and --known)")
    if raw.get("model"):
        raw.pop("lab_recipe", None)  # which models the scale would have trained
    if UTILITY in raw:
        return UtilityStudy(measure.utility_plan({**raw, "command": "audit reproduce"}))
    return RunStudy(str(paper.plans[plan].get("title", plan)), expand(raw))


def reproduce(
    paper: Paper,
    plans: Sequence[str],
    scale: str,
    flags: Mapping[str, Any],
    out: Path,
    reporter: Reporter,
    command: str,
) -> tuple[list[tables.Grid], list[LedgerRow], dict[str, str]]:
    """Runs these plans, or goes on with them; returns their tables, the ledger of all plans found in `out`, failures.

    Every plan and claim is checked before the first run. A point that cannot run is a row that says why, and one of the
    failures: why, by plan and point.
    """
    kinds = {plan: kind(paper, plan, scale, flags) for plan in plans}
    claims = {plan: statements(paper, plan, scale) for plan in paper.plans}
    for plan, asked in kinds.items():
        for statement in claims[plan]:
            ledger.check(statement, asked.planned())
    shown, failures = list[tables.Grid](), dict[str, str]()
    for plan, asked in kinds.items():
        found, failed = asked.walk(out / plan, reporter, command)
        shown += found
        failures.update({f"{plan}/{point}": why for point, why in failed.items()})
    entries = []
    for plan in paper.plans:
        held = _places(out / plan)
        if held is None and plan in kinds:
            held = kinds[plan].planned()  # it failed, and says why
        if held is not None:
            entries += [ledger.entry(plan, statement, held) for statement in claims[plan]]
    if any(claims.values()):
        write(out, paper, scale, entries)
    sections = [out / plan / _SECTION for plan in paper.plans]
    if told := [section.read_text(encoding="utf-8") for section in sections if section.is_file()]:
        disk.replace(out / PAGE, published.page(told))
    return shown, entries, failures


class RunStudy:
    """A plan of attacks: a grid of runs."""

    def __init__(self, title: str, grid: list[Point]) -> None:
        self.title, self.grid = title, grid

    def planned(self) -> list[Place]:
        return sweep.planned(self.grid)

    def walk(self, folder: Path, reporter: Reporter, command: str) -> tuple[list[tables.Grid], dict[str, str]]:
        """Its tables; why, by point, of those that failed."""
        failures = sweep.walk(self.grid, folder, reporter, command, refuse=False)
        table, compared = sweep.table(self.title, sweep.places(folder)), sweep.frontiers(folder)
        sweep.write_table(folder, table)
        frontier.write(folder, compared)
        return [table, *map(frontier.grid, compared)], failures


class ClaimStudy:
    """A promise of somebody's, held to distributions that its plan gives: done in seconds, and anew each time."""

    def __init__(self, claim: Published) -> None:
        self.claim = claim

    def planned(self) -> list[Place]:
        return []

    def walk(self, folder: Path, reporter: Reporter, command: str) -> tuple[list[tables.Grid], dict[str, str]]:
        found = self.claim.held()
        table = published.grid(self.claim, found)
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace(folder / _SECTION, published.section(self.claim, found))
        disk.replace(folder / "claim.csv", tables.to_csv(table))
        return [table], {}


class UtilityStudy:
    """A plan of `audit utility`: one sweep, measured at once."""

    def __init__(self, asked: measure.UtilityPlan) -> None:
        self.asked = asked
        self.failure = ""

    def planned(self) -> list[Place]:
        return places.planned(self.asked.points(), self.failure)

    def walk(self, folder: Path, reporter: Reporter, command: str) -> tuple[list[tables.Grid], dict[str, str]]:
        """Goes on where it is measured; a model that cannot be is a row that says why."""
        if tradeoff.measured(folder):
            return [tradeoff.table(tradeoff.held(self.asked, folder))], {}
        try:
            result, _ = measure.measure(self.asked, reporter)
        except AuditError as why:
            self.failure = str(why)
            return [tables.Grid(folder.name, ("point", "failure"), (("all", self.failure),))], {"all": self.failure}
        tradeoff.write(folder, result)
        return [tradeoff.table(result)], {}


def _places(folder: Path) -> list[Place] | None:
    """What a plan's folder holds; None where it was not run."""
    if (folder / sweep.SWEEP).is_file():
        return sweep.places(folder)
    return places.places(tradeoff.read(folder)) if tradeoff.measured(folder) else None


def statements(paper: Paper, plan: str, scale: str) -> list[ledger.Statement]:
    return ledger.statements(paper.plans[plan].get("claim", []), scale, f"{paper.name}/{plan}")


# --- the ledger on disk ---------------------------------------------------------------------------------------------


def table(paper: Paper, entries: Sequence[LedgerRow]) -> tables.Grid:
    """The ledger as rows; for programs with bounds in columns of their own."""
    head = ("plan", "claim", "paper", "expected", "setting", "ours", "verdict")
    rows = tuple((e.plan, e.text, e.paper, e.expect, e.setting, _ours(e), e.verdict) for e in entries)
    machine = tuple(
        (e.plan, e.id, e.text, e.paper, e.setting, e.expect, *_bounds(e), e.verdict, e.note) for e in entries
    )
    names = ("plan", "id", "claim", "paper", "setting", "expect", "ours", "low", "high", "n", "unit", "verdict", "note")
    return tables.Grid(f"Claims: {paper.title}", head, rows, ledger.RULE, names, machine)


def brief(paper: Paper, entries: Sequence[LedgerRow]) -> tables.Grid:
    """The ledger for a terminal: settings stand below, once for each plan."""
    settings: dict[str, list[str]] = {}
    for e in entries:
        if e.setting and e.setting not in settings.setdefault(e.plan, []):
            settings[e.plan].append(e.setting)
    note = "\n".join([*(f"{plan}: {' | '.join(held)}" for plan, held in settings.items() if held), ledger.RULE])
    rows = tuple((f"{e.plan}: {e.text}", e.paper, _ours(e), e.verdict) for e in entries)
    return tables.Grid(f"Claims: {paper.title}", ("claim", "paper", "ours", "verdict"), rows, note)


def _ours(entry: LedgerRow) -> str:
    m = entry.ours
    return f"– ({entry.note})" if m is None else words.with_bounds(m)


def _bounds(entry: LedgerRow) -> tuple[object, ...]:
    m = entry.ours
    return (None,) * 5 if m is None else (m.value, m.low, m.high, m.n, m.unit)


def write(out: Path, paper: Paper, scale: str, entries: Sequence[LedgerRow]) -> None:
    """ledger.md, ledger.csv, ledger.tex and ledger.json, each replaced whole."""
    grid = table(paper, entries)
    disk.replace(out / "ledger.md", tables.to_markdown(grid))
    disk.replace(out / "ledger.csv", tables.to_csv(grid))
    disk.replace(out / "ledger.tex", tables.to_latex(grid))
    whole = {"paper": paper.name, "title": paper.title, "scale": scale, "rule": ledger.RULE, "claims": list(entries)}
    disk.replace(out / "ledger.json", json.dumps(to_json(whole), indent=1, allow_nan=False) + "\n")

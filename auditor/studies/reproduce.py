"""`audit reproduce`: runs the plans of a paper and writes the claim ledger. Knows no paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from auditor.conclusions.replicates import Replicates
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_json_object, to_json
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import Measurement
from auditor.reports import frontier, phrases, tables
from auditor.runs.plan_grid import GridPoint, expand_plan_grid, merge_raw_plans
from auditor.runs.reporter import Reporter
from auditor.studies import ledger, masked_tables, masked_utility, published_promises, sweep
from auditor.studies.ledger import LedgerRow, Place
from auditor.studies.papers import PUBLISHED, UTILITY, Paper
from auditor.studies.published_promises import PublishedPromise

PAGE, _SECTION = "claims.md", "claim.md"


def make_study(
    paper: Paper, plan: str, scale: str, flags: Mapping[str, Any]
) -> RunStudy | UtilityStudy | ClaimStudy:
    """One plan of a paper; flags lie over its fields, and its variants and sweeps over the flags.

    Raises AuditError where the scale asks about data that were not given, or does not ask about
    any.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    raw = merge_raw_plans(paper.raw_plan_at_scale(plan, scale), given)
    if PUBLISHED in raw:
        if given:
            names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in given))
            raise AuditError(
                f"expected no {names} for {paper.name}/{plan}, whose distributions are given in "
                "its plan"
            )
        return ClaimStudy(
            PublishedPromise.from_published_table(
                str(paper.plans[plan].get("title", plan)), raw[PUBLISHED]
            )
        )
    if raw.get("model") and not raw.get("data"):
        raise AuditError(
            f"the scale {scale!r} of {paper.name} attacks {raw['model']}: give --data (and --known)"
        )
    if raw.get("model"):
        raw.pop("lab_recipe", None)  # which models the scale would have trained
    if UTILITY in raw:
        return UtilityStudy(
            masked_utility.parse_utility_plan({**raw, "command": "audit reproduce"})
        )
    return RunStudy(str(paper.plans[plan].get("title", plan)), expand_plan_grid(raw))


def reproduce_paper_plans(
    paper: Paper,
    plans: Sequence[str],
    scale: str,
    flags: Mapping[str, Any],
    out: Path,
    reporter: Reporter,
    command: str,
    beside: Path | None = None,
) -> tuple[list[tables.RowTable], list[LedgerRow], dict[str, str]]:
    """Runs these plans, or goes on with them; returns their tables, the ledger of all plans found
    in `out`, failures.

    beside: the folder of another reproduction of this paper, whose ledger is shown as a second
    column. Every plan and claim is checked before the first run. A point that cannot run is a row
    that says why, and one of the
    failures: why, by plan and point.
    """
    kinds = {plan: make_study(paper, plan, scale, flags) for plan in plans}
    other = None if beside is None else read_other_ledger(beside, paper)
    claims = {
        plan: paper_claim_statements_of_plan(paper, plan, scale)
        for plan in paper.plans_at_scale(scale)
    }
    # A claim about a place that the plan lacks is refused before hours of runs.
    for plan, asked in kinds.items():
        for statement in claims[plan]:
            ledger.check_paper_claim_places_are_planned(statement, asked.planned_places())
    shown, failures = list[tables.RowTable](), dict[str, str]()
    for plan, asked in kinds.items():
        found, failed = asked.run_study_into_folder(out / plan, reporter, command)
        shown += found
        failures.update({f"{plan}/{point}": why for point, why in failed.items()})
    entries = []
    for plan in claims:
        # from the folder, not from memory: plans that were run another day count alike
        held = _read_study_places_of_plan(out / plan)
        if held is None and plan in kinds:
            held = kinds[plan].planned_places()  # it failed, and says why
        if held is not None:
            entries += [
                ledger.ledger_row_of_paper_claim(plan, statement, held)
                for statement in claims[plan]
            ]
    if any(claims.values()):
        write_ledger_files(out, paper, scale, entries, other)
    sections = [out / plan / _SECTION for plan in paper.plans]
    if told := [section.read_text(encoding="utf-8") for section in sections if section.is_file()]:
        disk.replace_atomically(out / PAGE, published_promises.published_promises_page(told))
    return shown, entries, failures


class RunStudy:
    """A plan of attacks: a grid of runs."""

    def __init__(self, title: str, grid: list[GridPoint]) -> None:
        self.title, self.grid = title, grid

    def planned_places(self) -> list[Place]:
        return sweep.planned_sweep_places(self.grid)

    def run_study_into_folder(
        self, folder: Path, reporter: Reporter, command: str
    ) -> tuple[list[tables.RowTable], dict[str, str]]:
        """Runs the grid: its tables; by point, why it failed. Interrupted, it still writes tables
        of what is done."""
        try:
            failures = sweep.run_sweep_points(self.grid, folder, reporter, command, refuse=False)
        except KeyboardInterrupt:
            self._write_sweep_tables(folder)
            raise
        return self._write_sweep_tables(folder), failures

    def _write_sweep_tables(self, folder: Path) -> list[tables.RowTable]:
        table = sweep.sweep_table(self.title, sweep.read_sweep_places(folder))
        compared = sweep.sweep_leakage_frontiers(folder)
        sweep.write_sweep_table_files(folder, table)
        frontier.write_frontier_files(folder, compared)
        return [table, *map(frontier.frontier_row_table, compared)]


class ClaimStudy:
    """A promise of somebody's, held to distributions that its plan gives: done in seconds, and anew
    each time."""

    def __init__(self, claim: PublishedPromise) -> None:
        self.claim = claim

    def planned_places(self) -> list[Place]:
        return []

    def run_study_into_folder(
        self, folder: Path, reporter: Reporter, command: str
    ) -> tuple[list[tables.RowTable], dict[str, str]]:
        found = self.claim.check_all_queries()
        table = published_promises.published_promise_table(self.claim, found)
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace_atomically(
            folder / _SECTION, published_promises.published_promise_section(self.claim, found)
        )
        disk.replace_atomically(folder / "claim.csv", tables.row_table_to_csv(table))
        return [table], {}


class UtilityStudy:
    """A plan with a `[utility]` table: one sweep over a masked model, measured at once."""

    def __init__(self, asked: masked_utility.UtilityPlan) -> None:
        self.asked = asked
        self.failure = ""

    def planned_places(self) -> list[Place]:
        points = self.asked.build_points()
        keys = {key for point in points for key in point.at}
        # None where a point lacks a key, as in `_study_places_of_utility`: claims find both in the
        # same way
        at = [{key: point.at.get(key) for key in keys} for point in points if point.defense]
        return [Place("", values, (masked_tables.NAME,), failure=self.failure) for values in at]

    def run_study_into_folder(
        self, folder: Path, reporter: Reporter, command: str
    ) -> tuple[list[tables.RowTable], dict[str, str]]:
        """Reads what was measured before, else measures; a model that cannot be measured is a row
        that says why."""
        if masked_tables.has_utility_result(folder):
            return [
                masked_tables.tradeoff_table(masked_tables.read_utility_result(folder, self.asked))
            ], {}
        try:
            result = masked_utility.measure_utility_points(self.asked, reporter)
        except AuditError as why:
            # the planned places say it from now on: claims about them are not run
            self.failure = str(why)
            return [tables.RowTable(folder.name, ("point", "failure"), (("all", self.failure),))], {
                "all": self.failure
            }
        masked_tables.write_utility_files(folder, result)
        return [masked_tables.tradeoff_table(result)], {}


def _read_study_places_of_plan(folder: Path) -> list[Place] | None:
    """What a plan's folder holds; None where it was not run."""
    if (folder / sweep.SWEEP).is_file():
        return sweep.read_sweep_places(folder)
    return (
        _study_places_of_utility(masked_tables.read_utility_result(folder))
        if masked_tables.has_utility_result(folder)
        else None
    )


def _study_places_of_utility(result: masked_utility.Utility) -> list[Place]:
    """One place a point; its cell holds the row's numbers, epsilons as numbers without an
    interval."""
    keys = {key for row in result.rows for key in row.at}
    seed = int(result.plan["seed"])
    what = f"{Path(result.model).name} (masked) on {result.data}"
    made = []
    for row in result.rows:
        if row.target != UNDEFENDED:
            # by name, as if a run had measured them: `ledger` reads both alike
            numbers = {
                name: metric(row, result.vocab_size) for name, metric in UTILITY_METRICS.items()
            }
            found = {name: m for name, m in numbers.items() if m is not None}
            cell = Replicates(
                row.target, "", masked_tables.NAME, measured={seed: found}, options=row.options
            )
            made.append(
                Place(
                    "",
                    {key: row.at.get(key) for key in keys},
                    (masked_tables.NAME,),
                    (cell,),
                    about=what,
                )
            )
    return made


UTILITY_METRICS: Mapping[str, Callable[[masked_utility.UtilityRow, int], Measurement | None]] = {
    "perplexity": lambda row, vocab_size: row.perplexity,
    "perplexity_ratio": lambda row, vocab_size: row.ratio,
    "perplexity_over_vocabulary": lambda row, vocab_size: _ledger_perplexity_over_vocabulary(
        row.perplexity, vocab_size
    ),
    "covered": lambda row, vocab_size: row.covered,
    "slowdown": lambda row, vocab_size: row.slowdown,
    "epsilon_per_token": lambda row, vocab_size: _ledger_epsilon_without_interval(
        row.epsilon_per_token, row
    ),
    "epsilon": lambda row, vocab_size: _ledger_epsilon_without_interval(row.epsilon, row),
    "epsilon_mean": lambda row, vocab_size: _ledger_epsilon_without_interval(row.epsilon_mean, row),
}


def _ledger_perplexity_over_vocabulary(m: Measurement, size: int) -> Measurement:
    # At weight 0 uniform mixing has the perplexity |V| (Majmudar et al. 2022): 1 here.
    return Measurement(
        f"{m.name}_over_vocabulary", m.value / size, m.low / size, m.high / size, m.n, "times"
    )


def _ledger_epsilon_without_interval(
    value: float | None, row: masked_utility.UtilityRow
) -> Measurement | None:
    """An epsilon as a measurement without width: it is computed, not estimated."""
    return (
        None
        if value is None
        else Measurement("epsilon", value, value, value, row.perplexity.n, "nats")
    )


def paper_claim_statements_of_plan(
    paper: Paper, plan: str, scale: str
) -> list[ledger.PaperClaimStatement]:
    """The plan's claims, but for those about a variant that this scale leaves out."""
    raw = paper.plans[plan]
    left_out = _variant_names_of_paper_plan(raw) - _variant_names_of_paper_plan(
        paper.raw_plan_at_scale(plan, scale)
    )
    made = ledger.parse_paper_claim_statements(raw.get("claim", []), scale, f"{paper.name}/{plan}")
    return [
        statement
        for statement in made
        if not any(term.variant in left_out for _, term in statement.signed_terms())
    ]


def _variant_names_of_paper_plan(raw: Mapping[str, Any]) -> set[str]:
    return {variant["name"] for variant in raw.get("variant", [])}


# --- the ledger on disk
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherLedger:
    """The claims of the same paper at another scale, by plan and id."""

    scale: str
    rows: Mapping[tuple[str, str], LedgerRow]

    def row_of_same_claim(self, entry: LedgerRow) -> LedgerRow:
        """The row of the same claim in this other ledger."""
        return self.rows.get((entry.plan, entry.id)) or replace(
            entry, setting="", verdict=ledger.NOT_RUN, ours=None, note="not in that ledger"
        )

    def disagreements_paragraph(self, entries: Sequence[LedgerRow], scale: str) -> str:
        """Which claims hold on one and are refuted on the other, and how many are decided on one
        alone: a paragraph."""
        decided = (ledger.HOLDS, ledger.REFUTED)
        pairs = [(entry, self.row_of_same_claim(entry)) for entry in entries]
        apart = [
            f"{e.id} ({e.text}: {there.verdict} on {self.scale}, {e.verdict} on {scale})"
            for e, there in pairs
            if e.verdict in decided and there.verdict in decided and e.verdict != there.verdict
        ]
        alone = sum((e.verdict in decided) != (there.verdict in decided) for e, there in pairs)
        alike = sum(e.verdict in decided and e.verdict == there.verdict for e, there in pairs)
        said = (
            f"They disagree about {'; '.join(apart)}."
            if apart
            else "About no claim do they disagree."
        )
        return (
            f"{said} {alike} of {len(pairs)} claims are decided alike on both, {alone} on one "
            "alone."
        )


def read_other_ledger(folder: Path, paper: Paper) -> OtherLedger:
    """Raises AuditError where there is no ledger of this paper."""
    path = folder / "ledger.json"
    raw = read_json_object(path, "the claims of a reproduction")
    if raw.get("paper") != paper.name:
        raise AuditError(
            f"expected a ledger of {paper.name} beside it, got one of {raw.get('paper')} in {path}"
        )
    rows: tuple[LedgerRow, ...] = from_json(
        tuple[LedgerRow, ...], raw.get("claims"), f"{path}: claims"
    )
    return OtherLedger(str(raw.get("scale")), {(row.plan, row.id): row for row in rows})


def ledger_table(
    paper: Paper, entries: Sequence[LedgerRow], scale: str = "", other: OtherLedger | None = None
) -> tables.RowTable:
    """The ledger as rows; for programs with bounds in columns of their own."""
    head = (
        "plan",
        "claim",
        "paper",
        "expected",
        "setting",
        *_ledger_verdict_column_heads(scale, other),
    )
    rows = tuple(
        (
            e.plan,
            e.text,
            e.paper,
            e.expect,
            e.setting,
            *_ledger_measured_and_verdict_cells(e, other),
        )
        for e in entries
    )
    numbers = ("ours", "low", "high", "n", "unit", "verdict")
    # in the order of `machine`
    names = ["plan", "id", "claim", "paper", "setting", "expect", *numbers, "note"]
    machine = [
        (
            e.plan,
            e.id,
            e.text,
            e.paper,
            e.setting,
            e.expect,
            *_ledger_interval_and_verdict_cells(e),
            e.note,
        )
        for e in entries
    ]
    if other is not None:
        names += [f"{other.scale}_{name}" for name in numbers]
        machine = [
            (*row, *_ledger_interval_and_verdict_cells(other.row_of_same_claim(e)))
            for row, e in zip(machine, entries, strict=True)
        ]
    return tables.RowTable(
        f"Claims: {paper.title}", head, rows, ledger.RULE, tuple(names), tuple(machine)
    )


def _ledger_verdict_column_heads(scale: str, other: OtherLedger | None) -> tuple[str, ...]:
    names = ("ours", "verdict")
    return (
        names
        if other is None
        else tuple(f"{name}, {at}" for at in (other.scale, scale) for name in names)
    )


def _ledger_measured_and_verdict_cells(
    entry: LedgerRow, other: OtherLedger | None
) -> tuple[str, ...]:
    both = [entry] if other is None else [other.row_of_same_claim(entry), entry]
    return tuple(
        text
        for row in both
        for text in (
            phrases.value_with_interval(row.ours) if row.ours else f"– ({row.note})",
            row.verdict,
        )
    )


def ledger_table_for_terminal(
    paper: Paper, entries: Sequence[LedgerRow], scale: str = "", other: OtherLedger | None = None
) -> tables.RowTable:
    """The ledger for a terminal: settings stand below, once for each plan."""
    settings: dict[str, list[str]] = {}
    for e in entries:
        if e.setting and e.setting not in settings.setdefault(e.plan, []):
            settings[e.plan].append(e.setting)
    told = [other.disagreements_paragraph(entries, scale)] if other else []
    told += [
        *(f"{plan}: {' | '.join(held)}" for plan, held in settings.items() if held),
        ledger.RULE,
    ]
    rows = tuple(
        (f"{e.plan}: {e.text}", e.paper, *_ledger_measured_and_verdict_cells(e, other))
        for e in entries
    )
    return tables.RowTable(
        f"Claims: {paper.title}",
        ("claim", "paper", *_ledger_verdict_column_heads(scale, other)),
        rows,
        "\n".join(told),
    )


def _ledger_interval_and_verdict_cells(entry: LedgerRow) -> tuple[object, ...]:
    """Value, bounds, size, unit and verdict."""
    m = entry.ours
    return (*((None,) * 5 if m is None else (m.value, m.low, m.high, m.n, m.unit)), entry.verdict)


def write_ledger_files(
    out: Path,
    paper: Paper,
    scale: str,
    entries: Sequence[LedgerRow],
    other: OtherLedger | None = None,
) -> None:
    """ledger.md, which says first where two scales disagree, ledger.csv, ledger.tex and
    ledger.json."""
    grid = ledger_table(paper, entries, scale, other)
    first = f"{other.disagreements_paragraph(entries, scale)}\n\n" if other else ""
    disk.replace_atomically(out / "ledger.md", first + tables.row_table_to_markdown(grid))
    disk.replace_atomically(out / "ledger.csv", tables.row_table_to_csv(grid))
    disk.replace_atomically(out / "ledger.tex", tables.row_table_to_latex(grid))
    whole: dict[str, Any] = {
        "paper": paper.name,
        "title": paper.title,
        "scale": scale,
        "rule": ledger.RULE,
    }
    whole["claims"] = list(entries)
    if other is not None:
        whole["beside"] = {
            "scale": other.scale,
            "claims": [other.row_of_same_claim(entry) for entry in entries],
        }
    # to_json spells NaN and infinity as texts; Python's own NaN is no JSON, and other readers
    # refuse it
    disk.replace_atomically(
        out / "ledger.json", json.dumps(to_json(whole), indent=1, allow_nan=False) + "\n"
    )

"""Export runs as CSV or Parquet, with a row per measurement or secret, and as LaTeX tables.

Ids and numbers are unchanged: shares are fractions, epsilons are in nats.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from auditor.conclusions.outcomes import RunOutcomes, read_run_outcomes
from auditor.conclusions.secret_details import map_aliases
from auditor.core.errors import AuditError
from auditor.core.result import SCHEMA_VERSION, AuditResult, Finding, Measurement
from auditor.reports import escaping, phrases, tables
from auditor.statistics.metrics import find_metric

Kind = Literal["text", "number", "count", "flag"]
Value = str | float | int | bool | None

_ROW: dict[str, Kind] = {"run": "text", "target": "text", "setting": "text", "attack": "text"}
_ABOUT: dict[str, Kind] = {
    "benchmark": "text",
    "seed": "count",
    **_ROW,
    "decoding": "text",
    "options": "text",  # JSON
    "perplexity": "number",
    "drawn": "count",  # tokens
    "forward_rows": "count",
    "seconds": "number",
    "claim_applies": "flag",  # null: no claim
    "claim_reason": "text",
}
_CLAIM: dict[str, Kind] = {
    "epsilon": "number",
    "delta": "number",
    "relation": "text",
    "unit_of_protection": "text",
    "claim_queries": "count",
    "spent_epsilon": "number",
    "spent_queries": "count",
    "claim_status": "text",
}
_MEASURED: dict[str, Kind] = {
    "measurement": "text",
    # as in a sheet of secrets, so that they join; null: all members, or a group
    "repeats": "count",
    "group": "text",  # from --group-column; null: all groups
    "kind": "text",  # kind of personal data; null: all contents of a suffix
    "value": "number",
    "low": "number",
    "high": "number",
    "n": "count",
    "unit": "text",
    "note": "text",
    "not_applicable": "text",
}
_SECRET: dict[str, Kind] = {**_ROW, "secret": "text", "member": "flag", "repeats": "count"}


@dataclass(frozen=True)
class Sheet:
    """A table to export. columns: type of each column, keyed by name; rows: values by column."""

    columns: Mapping[str, Kind]
    rows: tuple[tuple[Value, ...], ...]


def build_measurement_sheet(results: Sequence[AuditResult]) -> Sheet:
    """Return a sheet with a row per measurement, and columns for run, model, access and attack.

    An attack that has no measurements gets one row, with the reason.
    """
    rows = []
    for result in map(phrases.make_result_printable, results):
        for finding in phrases.sort_findings(result):
            for measured in _build_measurement_sheet_rows(finding):
                rows.append((*_list_finding_values(result, finding), *measured))
    return Sheet({**_ABOUT, **_CLAIM, **_MEASURED}, tuple(rows))


def _list_finding_values(result: AuditResult, f: Finding) -> tuple[Value, ...]:
    """Return a finding's values for the columns in `_ABOUT`, then for those in `_CLAIM`."""
    target = phrases.find_reported_target(result, f.target)
    perplexity, claim = (target.perplexity, target.claim) if target else (None, None)
    run = (result.benchmark.name, result.seed, result.name, *f.cell_key)
    counted = (f.drawn, f.rows) if f.drawn or f.rows else (None, None)  # not of probes
    cost = (perplexity.value if perplexity else None, *counted, f.seconds or None)
    about = (*run, f.decoding, json.dumps(f.options), *cost, f.claim_applies, f.claim_reason)
    if claim is None:
        return (*about, *(None,) * len(_CLAIM))
    epsilon = phrases.select_claimed_epsilon(claim)
    promised = (epsilon, claim.delta, claim.relation, claim.unit, claim.queries)
    spending = (claim.spent_epsilon.get(claim.relation), claim.spent_queries)
    return (*about, *promised, *spending, claim.status)


def _build_measurement_sheet_rows(finding: Finding) -> Iterator[tuple[Value, ...]]:
    if finding.not_applicable:
        # the last column of _MEASURED
        yield (
            *(None,) * (len(_MEASURED) - 1),
            finding.not_applicable,
        )
    for m in finding.measurements:
        yield _measurement_sheet_values(m)
    for repeats, m in phrases.sort_repeats(finding.by_repeats):
        yield _measurement_sheet_values(m, repeats)
    for group, m in finding.by_group.items():
        yield _measurement_sheet_values(m, group=group)
    for kind, m in (*finding.by_kind.items(), *finding.by_kind_nonmembers.items()):
        yield _measurement_sheet_values(m, kind=kind)


def _measurement_sheet_values(
    m: Measurement, repeats: str = "", group: str | None = None, kind: str | None = None
) -> tuple[Value, ...]:
    count = None
    if repeats.isdecimal():
        count = int(repeats)
    elif repeats:
        group = repeats
    # In the order of _MEASURED; the last column, the reason, is only for attacks without numbers.
    return (m.name, count, group, kind, m.value, m.low, m.high, m.n, m.unit, m.note, None)


def read_exported_run(folder: Path) -> RunOutcomes:
    """Read a run, with secret ids replaced by the aliases of its reports.

    Raise AuditError if the run stores no values by secret.
    """
    run = read_run_outcomes(folder)
    names = map_aliases(folder)
    if not run.outcomes:
        raise AuditError(f"{folder} has no results by secret: nothing was measured")
    outcomes = {}
    for row, values in run.outcomes.items():
        outcomes[row] = replace(values, ids=tuple(map(names.get, values.ids, values.ids)))
    return replace(run, outcomes=outcomes)


def build_secret_sheet(runs: Sequence[RunOutcomes]) -> Sheet:
    """Return a sheet with a row per combination of run, model, access, attack and secret."""
    names: dict[str, None] = {}  # an ordered set
    for run in runs:
        for entry in run.outcomes.values():
            names |= dict.fromkeys(entry.values)
    rows = []
    clean = escaping.make_printable_line
    for run in runs:
        for row, entry in run.outcomes.items():
            # A missing number leaves its column empty.
            columns = [(None,) * len(entry.ids)] * len(names)
            for i, name in enumerate(names):
                if name in entry.values:
                    columns[i] = tuple(entry.values[name].astype(float).tolist())
            about = tuple(map(clean, (run.result.name, *row)))
            secrets = map(clean, entry.ids)
            for secret, *values in zip(
                secrets, entry.member.tolist(), entry.repeats, *columns, strict=True
            ):
                rows.append((*about, secret, *values))
    return Sheet({**_SECRET, **dict.fromkeys(names, "number")}, tuple(rows))


# --- forms ---


def to_csv(sheet: Sheet) -> str:
    """Return RFC 4180 CSV that contains no formula that a spreadsheet would run.

    Missing values are empty; `nan` and `inf` are written literally.
    """
    return escaping.render_csv(tuple(sheet.columns), sheet.rows)


def to_parquet(sheet: Sheet) -> bytes:
    """Return Parquet bytes with typed, nullable columns and the schema version as metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"text": pa.string(), "number": pa.float64(), "count": pa.int64(), "flag": pa.bool_()}
    version = {"audit.schema_version": str(SCHEMA_VERSION)}
    schema = pa.schema(
        [(name, kinds[kind]) for name, kind in sheet.columns.items()], metadata=version
    )
    # without rows zip gives no columns
    columns = list(zip(*sheet.rows, strict=True)) or [()] * len(schema)
    # None becomes null, NaN stays NaN.
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), buffer)
    return buffer.getvalue()


def to_latex(results: Sequence[AuditResult]) -> str:
    """Return each run's results and claims as `tabular`s with booktabs rules, for \\input."""
    rendered = []
    for result in map(phrases.make_result_printable, results):
        for grid in (_build_main_number_row_table(result), _build_epsilon_claims_row_table(result)):
            if grid.rows:
                rendered.append(tables.render_latex_table(grid))
    return tables.LATEX_GAP.join(rendered)


def _build_main_number_row_table(result: AuditResult) -> tables.RowTable:
    head = ("Target", "Attack", "Metric", "Members", "Non-members")
    rows = []
    for f in phrases.sort_findings(result):
        name, members, nonmembers = "not applicable", phrases.NOTHING, phrases.NOTHING
        if f.main and not f.not_applicable:
            name = find_metric(f.main.name).short or find_metric(f.main.name).title
            members, nonmembers, _ = phrases.format_baseline_excess_cells(f)
        values = (members.removeprefix(f"{name} "), nonmembers)
        rows.append((phrases.title_row(result, f), f.attack, name, *values))
    note = "excess, perplexity and claims: audit export --csv"
    return tables.RowTable(
        f"{result.name}: main number of each attack with its 95% interval", head, rows, note
    )


def _build_epsilon_claims_row_table(result: AuditResult) -> tables.RowTable:
    head = ("Target", "Relation", "Unit", "ε", "δ", "Tokens", "Spent ε", "Status")
    rows = []
    for target in result.targets:
        claim = target.claim
        if claim is None:
            continue
        for name, epsilon in claim.epsilon.items():
            rows.append(
                (
                    target.title,
                    phrases.format_relation(name),
                    claim.unit,
                    phrases.format_number(epsilon),
                    phrases.format_number(claim.delta),
                    "any" if claim.queries is None else f"{claim.queries:,}",
                    phrases.format_number(claim.spent_epsilon.get(name, math.nan)),
                    claim.status,
                )
            )
    return tables.RowTable(f"{result.name}: what is claimed", head, rows)

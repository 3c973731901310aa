"""Present the measured cost of mixing masked models: table, plot and files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from auditor.core import disk
from auditor.core.jsonable import from_json, read_json, to_json
from auditor.reports import phrases, tables
from auditor.reports.plot_files import TradeoffLine, save_perplexity_tradeoff_plot
from auditor.studies.masked_utility import Utility, UtilityPlan, UtilityRow, list_utility_row_labels

NAME = "utility"  # of the files, and of the only "attack" in the ledger's cells


def tradeoff_title(result: Utility) -> str:
    return f"Perplexity against ε: {result.model}, masked, on {result.data}"


def describe_tradeoff(result: Utility) -> str:
    """Describe the predicted texts, and the coverage of each ε."""
    longest = (
        f"max T = {result.longest} predicted tokens of a text, mean T = {result.mean_tokens:.3g}"
    )
    lines = [
        f"{result.texts:,} texts, masked {result.restarts} times; |V| = {result.vocab_size:,}; "
        f"{longest}.",
        "Perplexity of the corpus, mean over restarts; 95% intervals resample texts, ratios are "
        "paired by text.",
        "ε at max T is claimed of one text of T tokens; at mean T, as the paper reports it, "
        "nothing is guaranteed.",
        *result.notes,
    ]
    statuses = dict.fromkeys(
        f"{row.title}: {row.status}." for row in result.rows if row.epsilon is not None
    )
    return "\n".join([*lines, *statuses])


def build_tradeoff_table(result: Utility) -> tables.RowTable:
    """Return one row per point. Files have separate columns of bounds, restarts and timings."""
    partly = any(row.covered.value < 1 for row in result.rows)
    head = (
        "point",
        "perplexity",
        "× undefended",
        "ε a token",
        "ε at max T",
        "ε at mean T: not a guarantee",
    )
    keys = list(dict.fromkeys(key for row in result.rows for key in row.at))
    bounds = [f"{name}{end}" for name in ("perplexity", "ratio") for end in ("", "_low", "_high")]
    restarts = [f"perplexity_restart_{i}" for i in range(result.restarts)]
    epsilons = (
        "epsilon_per_token",
        "epsilon",
        "tokens",
        "epsilon_mean_not_a_guarantee",
        "delta",
        "relation",
        "status",
    )
    return tables.RowTable(
        tradeoff_title(result),
        (*head, *(["tokens covered"] if partly else [])),
        tuple(
            (name, *_build_utility_cells(row, partly, result.longest))
            for name, row in zip(list_utility_row_labels(result.rows), result.rows, strict=True)
        ),
        describe_tradeoff(result),
        ("target", *keys, *bounds, *restarts, *epsilons, "covered", "slowdown", "texts"),
        tuple(
            _build_machine_readable_utility_cells(row, keys, result.texts) for row in result.rows
        ),
    )


def _build_utility_cells(row: UtilityRow, partly: bool, longest: int) -> tuple[str, ...]:
    perplexity, ratio = (
        phrases.format_measurement_value(m) if math.isfinite(m.value) else "∞"
        for m in (row.perplexity, row.ratio)
    )
    per_token, most, mean = (
        _format_tradeoff_epsilon(e) for e in (row.epsilon_per_token, row.epsilon, row.epsilon_mean)
    )
    if row.tokens not in (None, longest):  # a defense set up for a fixed number
        most += f" (T = {row.tokens:,})"
    return (
        perplexity,
        ratio,
        per_token,
        most,
        mean,
        *([phrases.format_measurement_value(row.covered)] if partly else []),
    )


def _format_tradeoff_epsilon(value: float | None) -> str:
    return phrases.NOTHING if value is None else phrases.format_number(value, "#")


def _build_machine_readable_utility_cells(
    row: UtilityRow, keys: Sequence[str], texts: int
) -> tuple[object, ...]:
    bounds = [bound for m in (row.perplexity, row.ratio) for bound in (m.value, m.low, m.high)]
    epsilons = (
        row.epsilon_per_token,
        row.epsilon,
        row.tokens,
        row.epsilon_mean,
        row.delta,
        row.relation,
        row.status,
    )
    at = [row.at.get(key) for key in keys]
    return (
        row.target,
        *at,
        *bounds,
        *row.restarts,
        *epsilons,
        row.covered.value,
        row.slowdown.value,
        texts,
    )


# --- the plot
# -----------------------------------------------------------------------------------------------


def tradeoff_plot_lines(result: Utility) -> tuple[list[TradeoffLine], str]:
    """Return the finite points as lines, and the name of the horizontal axis.

    The axis is epsilon if epsilon differs between points, otherwise the swept option. A claim that
    adds up over tokens is drawn at max T and, as in the paper, at mean T.
    """
    defended = [
        row
        for row in result.rows
        if row.epsilon is not None and math.isfinite(row.perplexity.value)
    ]
    names = dict.fromkeys(row.title for row in defended)
    if len({row.epsilon for row in defended}) > 1 or not defended:
        plot_lines = []
        for name in names:
            rows = [row for row in defended if row.title == name]
            means = [(row.epsilon_mean, row) for row in rows if row.epsilon_mean is not None]
            title = f"{name}, at max T" if means else name
            plot_lines.append(
                TradeoffLine(
                    title, _finite_tradeoff_plot_points((row.epsilon, row) for row in rows)
                )
            )
            if means:
                plot_lines.append(
                    TradeoffLine(
                        "at mean T: not a guarantee",
                        _finite_tradeoff_plot_points(means),
                        faint=True,
                    )
                )
        return plot_lines, "ε"
    key = next(iter(defended[0].at), "")
    swept = [
        (float(row.at[key]), row) for row in defended if isinstance(row.at.get(key), int | float)
    ]
    lines = [
        TradeoffLine(
            name, _finite_tradeoff_plot_points(pair for pair in swept if pair[1].title == name)
        )
        for name in names
    ]
    return lines, key


def _finite_tradeoff_plot_points(
    pairs: Iterable[tuple[float | None, UtilityRow]],
) -> tuple[tuple[float, float, float, float], ...]:
    """Return the finite (x, perplexity, low, high), ordered by x."""
    finite = [(x, row.perplexity) for x, row in pairs if x is not None and math.isfinite(x)]
    # An infinite end cannot be drawn: the bar stops at the value.
    return tuple(
        sorted((x, m.value, m.low, m.high if math.isfinite(m.high) else m.value) for x, m in finite)
    )


# --- files
# -----------------------------------------------------------------------------------------------


def write_utility_files(folder: Path, result: Utility) -> None:
    """Write utility.json, .csv, .md, .svg and .png."""
    grid = build_tradeoff_table(result)
    files = {
        f"{NAME}.json": json.dumps(to_json(result), indent=1, allow_nan=False) + "\n",
        f"{NAME}.csv": tables.render_csv_table(grid),
        f"{NAME}.md": tables.render_markdown_table(grid),
    }
    for name, text in files.items():
        disk.replace_atomically(folder / name, text)
    plot_lines, axis = tradeoff_plot_lines(result)
    for ending in (".svg", ".png"):
        path = folder / f"{NAME}{ending}"
        save_perplexity_tradeoff_plot(
            path, plot_lines, axis, result.rows[0].perplexity.value, tradeoff_title(result)
        )


def has_utility_result(folder: Path) -> bool:
    return (folder / f"{NAME}.json").is_file()


def read_utility_result(folder: Path, plan: UtilityPlan | None = None) -> Utility:
    """Read a measurement. Raise AuditError if it is unfinished or differs from the plan."""
    path = folder / f"{NAME}.json"
    result: Utility = from_json(Utility, read_json(path, "the measured utility"), str(path))
    if plan is not None:
        plan.check_folder_measured_alike(result, folder)
    return result

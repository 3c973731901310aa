"""Build the screen of `--verbose`: all attacks on all models, leaks by copies, claims and next
step.

All text is `rich.text.Text`, which is never parsed as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from auditor.conclusions.signals import assess_signals
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Chain, Finding, Measurement
from auditor.reports import claims, escaping, personal, phrases, signals, unlearning
from auditor.reports.next_step import suggest_next_command
from auditor.reports.verdict import (
    find_strongest_attack_row,
    find_strongest_chained_row,
    write_headline,
)

_INDENT = 2
_SHORTEST = 12  # minimum of a long attack name if the numbers need the room
_BARS = "▁▂▃▄▅▆▇█"


def summarise_run(result: AuditResult, folder: Path | None = None) -> TerminalRunSummary:
    """Return the screen that `--verbose` prints. folder: the run folder to name, or None."""
    return TerminalRunSummary(phrases.make_result_printable(result), folder)


@dataclass(frozen=True)
class TerminalRunSummary:
    """The screen of `--verbose` as a rich renderable of 80 columns.

    A model's results share a heading line with the facts that they have in common.
    """

    result: AuditResult
    folder: Path | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(write_headline(self.result), style="bold")
        yield Text()
        yield from _attack_row_lines(self.result, options.max_width)
        yield Text()
        yield from _list_row_remarks(self.result)
        if self.folder is not None:
            # The folder's name is the user's: `result` is cleaned, a path is not.
            report = escaping.make_printable_line(str(self.folder / "report.html"))
            command = suggest_next_command(assess_signals(self.result), self.folder)
            yield Text()
            yield Text.assemble(("report", "bold"), f": {report}", overflow="fold")
            yield Text.assemble(("next", "bold"), f":   {command}", overflow="fold")


def share_measurement_table(measurements: Iterable[Measurement]) -> Table:
    """Return a table of shares without a run, to three decimals as in a challenge's ranking."""
    table = Table("", "share", "95% interval", "hits", "n", "note")
    for m in measurements:
        cells = (
            f"{m.value:.3f}",
            f"{m.low:.3f}–{m.high:.3f}",
            f"{phrases.count_hits(m):,}",
            f"{m.n:,}",
            m.note,
        )
        table.add_row(Text(phrases.format_metric(m.name)), *map(Text, cells))
    return table


# --- the table
# -----------------------------------------------------------------------------------------------


def _attack_row_lines(result: AuditResult, width: int) -> Iterator[RenderableType]:
    """Yield a line per attack, grouped by model; columns align over all groups."""
    cells = [_attack_row_cells(finding) for finding in result.findings]
    heads = ("attack", "verbatim recall", "non-members", "excess")
    widths = []
    for column in zip(heads, *cells, strict=True):
        widths.append(max(map(len, column)))
    # Two cells between columns if that fits the terminal, else one.
    if _INDENT + sum(widths) + 2 * (len(widths) - 1) <= width:
        gap = 2
    else:
        gap = 1
    # Cut any excess from the attacks' names: never cut a number.
    over = _INDENT + sum(widths) + gap * (len(widths) - 1) - width
    widths[0] = max(_SHORTEST, widths[0] - max(0, over))
    yield _column_line(heads, widths, gap, "dim")
    rows = phrases.sort_findings(result)
    for (title, facts, claim), group in groupby(
        rows, key=lambda finding: _format_screen_head(result, finding)
    ):
        line = Text.assemble((title, "bold cyan"), (facts, "dim"))
        if line.cell_len + len(claim) + 3 <= width:
            yield line.append(f" · {claim}", "dim")
        else:
            yield from (line, _indent_block(Text(claim, "dim")))
        for finding in group:
            if finding.not_applicable:
                name = f"{phrases.shorten(finding.attack, widths[0]):{widths[0] + gap}}"
                yield _indent_block(Text(f"{name}not applicable: {finding.not_applicable}"))
            else:
                yield _column_line(_attack_row_cells(finding), widths, gap)


def _format_screen_head(result: AuditResult, finding: Finding) -> tuple[str, str, str]:
    """Return three texts of a group's heading.

    They are the title, the decoding with perplexity, and whether the model's privacy claim applies.
    """
    facts = f"  {finding.decoding} · PPL {phrases.format_target_perplexity(result, finding.target)}"
    applies = phrases.format_claim_scope(finding)
    if finding.claim_applies is None:
        claim = applies
    else:
        claim = f"claim applies: {applies}"
    return phrases.title_row(result, finding), facts, claim


def _attack_row_cells(finding: Finding) -> tuple[str, ...]:
    if finding.not_applicable:
        numbers = ("", "", "")
    else:
        numbers = phrases.format_baseline_excess_cells(finding)
    return (phrases.shorten(finding.attack, 24), *numbers)


def _column_line(cells: tuple[str, ...], widths: list[int], gap: int, style: str = "") -> Padding:
    table = Table.grid(padding=(0, gap, 0, 0))
    for width in widths:
        table.add_column(width=width, overflow="fold")
    attack, recall, *rest = map(Text, (phrases.shorten(cells[0], widths[0]), *cells[1:]))
    recall.stylize(style or "bold")
    table.add_row(attack, recall, *rest, style=style)
    return _indent_block(table)


def _indent_block(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, _INDENT))


# --- the lines below
# -----------------------------------------------------------------------------------------------


def _list_row_remarks(result: AuditResult) -> Iterator[RenderableType]:
    assessment = assess_signals(result)
    for targets, untested in signals.group_untested_kinds(assessment).items():
        if targets:
            titles = (signals.title_signal_target(result, target) for target in targets)
            on = f" on {', '.join(titles)}"
        else:
            on = ""
        names = ", ".join(phrases.lower_first(kind.title) for kind in untested)
        yield Text.assemble((f"not tested{on}", "bold"), f"  {names}")
    best = find_strongest_attack_row(result, UNDEFENDED)
    if best is not None and best.by_repeats:
        yield _draw_copies_sparkline(best)
    if best is not None and best.by_kind:
        kinds = personal.format_personal_kinds(best)
        yield Text.assemble(("personal data", "bold"), f"  {kinds} (undefended, {best.attack})")
    for finding in result.findings:
        if finding.target == UNDEFENDED and (
            measured := phrases.select_insertion_exposure(finding)
        ):
            exposures = ", ".join(phrases.format_value(m) for _, m in measured)
            counts = " ".join(count for count, _ in measured)
            yield Text.assemble(
                (f"insertions {counts}", "bold"), f"  exposure {exposures} bits (undefended)"
            )
    for target in result.targets:
        row = find_strongest_chained_row(result, target.name)
        if row is not None and row.chain is not None:
            source = f"{row.attack}{', white-box' if row.setting == 'white-box' else ''}"
            source += phrases.format_baseline_excess(row.chain.whole)
            yield _format_control_chain_line(f"why {target.title}", row.chain, source)
        if target.likelihood is not None:  # an effect that no guess shows
            yield _format_control_chain_line(
                f"likelihood {target.title}", target.likelihood, phrases.MORE_LIKELY
            )
    for unlearning_result in result.unlearning:
        yield Text.assemble(
            ("forgotten", "bold"), "  ", unlearning.describe_forgetting(result, unlearning_result)
        )
    if result.prefix_token:
        yield Text.assemble(
            ("prefix token", "bold"), result.prefix_token.removeprefix("prefix token")
        )
    for target in result.targets:
        if target.claim is not None:
            yield Text.assemble(
                (target.title, "bold"), "  ", phrases.format_epsilon_line(target.claim)
            )
    for stands in claims.select_reported_claims(result):
        yield Text(claims.describe_claim_verdict(stands))


def _draw_copies_sparkline(finding: Finding) -> Text:
    """Return the recall by number of copies, with bars from 0 to 1.

    `copies 1 2 4 ▁ ▃ █ 0.0%, 31%, 98% (undefended, ethicist)`
    """
    measured = phrases.sort_repeats(finding.by_repeats)
    bars = " ".join(_BARS[min(7, max(0, round(7 * m.value)))] if m.n else "·" for _, m in measured)
    shares = ", ".join(phrases.format_value(m) for _, m in measured)
    names = " ".join(name for name, _ in measured)
    return Text.assemble(
        (f"copies {names}", "bold"),
        "  ",
        (bars, "bold"),
        "  ",
        (f"{shares} (undefended, {finding.attack})", "dim"),
    )


def _format_control_chain_line(title: str, chain: Chain, of: str) -> Text:
    """Return a line with the effect of each step of a chain of control models.

    `why PMixED clipping −1.0 points [−3.0 to 0.7], not significant · noise −12 points [−16 to −8]`
    """
    effects = " · ".join(
        map(phrases.format_chain_step_effect, phrases.select_chain_steps(chain.steps))
    )
    return Text.assemble((title, "bold"), "  ", effects, (f" ({of}, n {chain.whole.n:,})", "dim"))

"""Describe the estimated cost of a run, and the flags that would halve its time.

No model is queried.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from math import nan

from auditor.core.counts import format_count
from auditor.reports import phrases
from auditor.reports.tables import RowTable
from auditor.statistics import roc
from auditor.statistics.membership import FALSE_POSITIVES

LIMIT = "--limit"
SAMPLES = "--samples"
_SIDE = 0.025  # error on each side of a two-sided 95% interval


@dataclass(frozen=True)
class RunPartCost:
    """Cost of a part of a run, such as the queries of one attack.

    Args:
        name: name of the part.
        n_texts: number of its texts.
        n_timed: number of timed texts.
        rows: number of sequences that a network reads, counted again for each generated token.
        tokens: number of tokens that a network reads.
        memory: peak bytes, including the models.
        seconds: duration.
        reason: why the numbers are missing; otherwise "".
        cut: flags (`--limit`, `--samples`) that shorten the part.
    """

    name: str
    n_texts: int = 0
    n_timed: int = 0
    rows: float = nan
    tokens: float = nan
    memory: float = nan
    seconds: float = nan
    reason: str = ""
    cut: tuple[str, ...] = ()


@dataclass(frozen=True)
class CostEstimate:
    """Estimated cost of a run, part by part.

    Args:
        costs: cost of each part.
        preparing: name and measured seconds of each step that loads or makes models and data.
        probe: seconds that the estimate itself spent on queries.
        loaded_bytes: memory after all loading.
        secrets: number of attacked members, then of attacked non-members.
        samples: samples per prefix if all attacks draw the same number; otherwise None.
        rates: whether a method measures false-positive rates, which need many non-members.
        ceilings: sentences about the largest epsilon that each epsilon audit could show.
    """

    costs: tuple[RunPartCost, ...]
    preparing: tuple[tuple[str, float], ...]
    probe: float
    loaded_bytes: int
    secrets: tuple[int, int] = (0, 0)
    samples: int | None = None
    rates: bool = False
    ceilings: tuple[str, ...] = ()

    @property
    def loading(self) -> float:
        """Seconds from the start to the first query."""
        return sum(seconds for _, seconds in self.preparing)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the run's last query, excluding parts without numbers."""
        return self._seconds_with_flag("", 0)

    @property
    def flags_that_halve_time(self) -> tuple[str, ...]:
        """Flags that each alone would halve the run's time, with the largest value that does so."""
        # range(1, most) holds i + 1 at index i, so the insertion point after the last n that is
        # fast enough equals that n; it is 0 if no n is fast enough.
        limits = {}
        for flag, most in ((LIMIT, max(self.secrets)), (SAMPLES, self.samples or 0)):
            limits[flag] = bisect_right(
                range(1, most), self.seconds / 2, key=partial(self._seconds_with_flag, flag)
            )
        return tuple(f"{flag} {n}" for flag, n in limits.items() if n)

    def _seconds_with_flag(self, flag: str, n: int) -> float:
        """Return the seconds of the run with `flag n`.

        The parts that the flag shortens take proportionally less time.
        """

        def share(cost: RunPartCost) -> float:
            if flag not in cost.cut:
                return 1.0
            if flag == SAMPLES:
                return n / (self.samples or n)
            # an ensemble attacks fewer secrets
            return min(cost.n_texts, sum(min(side, n) for side in self.secrets)) / cost.n_texts

        return self.loading + sum(
            share(cost) * cost.seconds for cost in self.costs if not cost.reason
        )

    @property
    def estimated_peak_memory_bytes(self) -> float:
        """Estimated peak memory of the run in bytes."""
        return max(
            (cost.memory for cost in self.costs if not cost.reason),
            default=float(self.loaded_bytes),
        )

    @property
    def parts_without_estimate(self) -> tuple[RunPartCost, ...]:
        """Parts of the run without measured numbers."""
        return tuple(cost for cost in self.costs if cost.reason and cost.n_texts)


def run_cost_estimate_table(estimate: CostEstimate) -> RowTable:
    """Return the cost estimate as a table."""
    time = phrases.format_duration(estimate.seconds)
    peak = phrases.format_memory(estimate.estimated_peak_memory_bytes / 1e6)
    if estimate.parts_without_estimate:
        about = "at least"
    else:
        about = "about"
    note = (
        f"{about} {time} until the last record is asked, {peak} of memory at most; estimated from "
    )
    note += f"{estimate.probe:.0f} seconds of asking"
    if estimate.parts_without_estimate:
        note += (
            f"; that is without {format_count(len(estimate.parts_without_estimate), 'part')} that "
            "have "
            "no "
            "numbers"
        )
    elif estimate.flags_that_halve_time:
        note += f"; {' or '.join(estimate.flags_that_halve_time)} would take half as long"
    else:
        note += f"; no smaller {LIMIT} or {SAMPLES} would take half as long"
    if estimate.rates:
        needs = (
            f"{roc.count_threshold_nonmembers(r):,} for {100 * r:g}% "
            f"({roc.count_bound_nonmembers(r, _SIDE):,} to bound it)"
            for r in FALSE_POSITIVES
        )
        note += (
            f"; non-members needed for a rate of false positives: {', '.join(needs)}, there are "
            f"{estimate.secrets[1]:,}"
        )
    note = "; ".join((note, *estimate.ceilings))
    prepared = (
        (name, "", "", "", "", phrases.format_duration(seconds))
        for name, seconds in estimate.preparing
    )
    after = (_AFTER, "after that, not timed", "", "", "", "")
    rows = (*prepared, *map(_run_cost_table_row, estimate.costs), after)
    return RowTable("what this run would take", _HEAD, rows, note)


_AFTER = "computing the numbers and writing the reports"
_HEAD = ("part", "asked", "forward rows", "tokens", "memory", "time")


def _run_cost_table_row(cost: RunPartCost) -> tuple[str, ...]:
    if cost.reason:
        return (cost.name, cost.reason, "", "", "", "")
    return (
        cost.name,
        f"{cost.n_timed:,} of {cost.n_texts:,}",
        f"{cost.rows:,.0f}",
        f"{cost.tokens:,.0f}",
        phrases.format_memory(cost.memory / 1e6),
        phrases.format_duration(cost.seconds),
    )

"""Sort finished runs into lines, which are ordered groups of comparable runs.

This module renders nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from auditor.conclusions.outcomes import RunOutcomes, read_run_outcomes
from auditor.core.errors import AuditError
from auditor.gate.comparability import check_comparable
from auditor.gate.compare import Comparison, compare_finished_runs
from auditor.gate.contradictions import find_result_contradictions
from auditor.gate.decision_log import KeptDecision, describe_decision_edits, load_gate_decisions
from auditor.records.result_file import explain_missing_result, read_creation_time

By = Literal["date", "commit", "checkpoint"]
_STEP = re.compile(r"(?:^|[^a-z])(?:checkpoint|step|epoch|iter)[-_]?(\d{1,15})$", re.IGNORECASE)


@dataclass(frozen=True)
class HistoryEntry:
    """Finished run in a history.

    Args:
        folder: folder of the run.
        run: the run.
        time: time of the run.
        label: recorded label to order the runs by, such as a commit.
        gates: gate decisions on the run.
        change: comparison of the previous run of the line with this run, paired by secret; None for
            the first run.
    """

    folder: Path
    run: RunOutcomes
    time: datetime
    label: str
    gates: tuple[KeptDecision, ...] = ()
    change: Comparison | None = None


@dataclass(frozen=True)
class ComparableRuns:
    """A line of the history: ordered runs, any two of which can be compared.

    Args:
        entries: the runs.
        reason: reason why the runs do not fit the first line of the history.
    """

    entries: tuple[HistoryEntry, ...]
    reason: str = ""


@dataclass(frozen=True)
class History:
    """All lines of comparable runs.

    Args:
        by: order of the runs.
        lines: the lines; the line of the last run comes first.
        left_out: folders that are in none of the lines, each with the reason.
    """

    by: By
    lines: tuple[ComparableRuns, ...]
    left_out: tuple[tuple[str, str], ...] = ()


def build_run_history(folders: Sequence[Path], by: str = "date") -> History:
    """Build the history of finished runs. A folder given under two names counts once.

    Args:
        folders: folders of the runs.
        by: order of the runs: `date`, `commit` or `checkpoint`.

    Raises:
        AuditError: for a folder that is not a run, for an unknown order, and if all runs are left
            out.
    """
    if by not in get_args(By):
        raise AuditError(
            f"expected --by {', '.join(get_args(By)[:-1])} or {get_args(By)[-1]}, got {by!r}"
        )
    order: By = by  # type: ignore[assignment]
    left_out = []
    entries = []
    for folder in _list_distinct_folders(folders):
        if reason := explain_missing_result(folder):
            left_out.append((str(folder), reason))
            continue
        run = replace(read_run_outcomes(folder), name=folder.name)  # the name used in reasons
        at = read_creation_time(run.result, run.name)
        label = _LABELS[order](run)
        if run.edits is not None and (edits := run.edits.describe_edits(is_whole=False)):
            left_out.append((str(folder), f"{edits[0]} since the run ended"))
        elif edited := describe_decision_edits(folder):
            left_out.append((str(folder), edited))
        elif contradictions := list(
            find_result_contradictions(run.result, run.outcomes, run.listed)
        ):
            fault = contradictions[0][1]
            left_out.append((str(folder), f"its result contradicts itself: {fault}"))
        elif label is None:
            left_out.append((str(folder), _WITHOUT[order]))
        else:
            entries.append(HistoryEntry(folder, run, at, label, load_gate_decisions(folder)))
    if not entries:
        remark = ""
        if len(left_out) > 1:
            remark = f" (as {len(left_out) - 1} more)"
        if left_out:
            example = f"{left_out[0][0]}: {left_out[0][1]}{remark}"
        else:
            example = "none"
        raise AuditError(f"expected at least one finished run to order by {order}, got {example}")
    return History(
        order, tuple(_group_comparable_runs(_sort_history_entries(entries, order))), tuple(left_out)
    )


def _list_distinct_folders(folders: Sequence[Path]) -> list[Path]:
    """Return each folder once, even if it is also given by a link such as runs/latest."""
    folder_by_path: dict[Path, Path] = {}
    for folder in folders:
        path = folder.resolve()
        if path not in folder_by_path or folder_by_path[path].is_symlink():
            folder_by_path[path] = folder
    return list(folder_by_path.values())


# --- in order ---


def _find_checkpoint_label(run: RunOutcomes) -> str | None:
    """Return the model's revision, or its folder's name if the name ends in a step number.

    Return None if the model has neither.
    """
    sources = (run.result.plan.get("revision"), run.result.plan.get("model"))
    for text in filter(None, sources):
        name = PurePosixPath(str(text).replace("\\", "/")).name
        if _STEP.search(name):
            return name
    return None


_LABELS: dict[By, Callable[[RunOutcomes], str | None]] = {
    "date": lambda run: run.result.created,
    "commit": lambda run: run.result.environment.get("commit"),
    "checkpoint": _find_checkpoint_label,
}
_WITHOUT: dict[By, str] = {
    "commit": "it records no commit: it was made outside a git repository, or by an older version",
    "checkpoint": "the name of its model contains no step, such as checkpoint-500, step1000 or "
    "epoch-3",
}


def _sort_history_entries(entries: Sequence[HistoryEntry], by: By) -> list[HistoryEntry]:
    """Sort the runs of a history.

    Commits are sorted by the time of their first audit, because a folder stores no commit order.
    """
    dated = sorted(entries, key=lambda entry: (entry.time, str(entry.folder)))
    if by == "date":
        return dated
    if by == "checkpoint":
        return sorted(dated, key=lambda entry: int(_STEP.findall(entry.label)[0]))
    labels = [entry.label for entry in dated]  # index() finds the first, and sorted() is stable
    return sorted(dated, key=lambda entry: labels.index(entry.label))


# --- in lines ---


def _group_comparable_runs(entries: Sequence[HistoryEntry]) -> Iterator[ComparableRuns]:
    """Yield groups of runs in which any two runs can be compared.

    Runs are assigned from the newest to the oldest, each to the first group that it fits.
    """
    # compare with every run of the line: comparability is not transitive (a run that stopped early
    # fits two different runs)
    grouped: list[list[HistoryEntry]] = []
    for entry in reversed(entries):
        for line in grouped:
            if not any(_explain_incomparable(entry, other) for other in line):
                line.append(entry)
                break
        else:
            grouped.append([entry])
    for line in grouped:
        runs = [line[-1]]
        for now in line[-2::-1]:
            change = compare_finished_runs([runs[-1].run, now.run])
            runs.append(replace(now, change=change))
        reason = ""
        if line is not grouped[0]:
            # compare its last run with the first line
            obstacles = (_explain_incomparable(line[0], other) for other in grouped[0])
            reason = next(filter(None, obstacles))
        yield ComparableRuns(tuple(runs), reason)


def _explain_incomparable(entry: HistoryEntry, other: HistoryEntry) -> str:
    try:
        check_comparable(entry.run, other.run, "match")
    except AuditError as error:
        return str(error)
    return ""

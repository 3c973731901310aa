"""`audit advise`: advice on fixing the model, from a finished run or a line of checkpoints."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from auditor.core.errors import AuditError


def advise(folder: Path, *, at_most: str | None = None) -> None:
    """Print advice: where the leakage is, what fewer copies would leave, which defenses help or may
    only hide it.

    Args:
        folder (RUN): Run folder, or the folder of a run over --checkpoints.
        at_most (--max NAME=LIMIT): Show the last checkpoint within this limit, such as recall=0.05.

    Examples:
        audit advise runs/latest
        audit advise runs/checkpoints --max recall=0.05
    """
    from auditor.studies import sweep

    if (folder / sweep.SWEEP).is_file():
        typer.echo(_describe_last_checkpoint(folder, at_most))
        return
    if at_most is not None:
        raise AuditError(f"--max is about checkpoints, but {str(folder)!r} is a single run")
    from auditor.conclusions import secret_details
    from auditor.conclusions.outcomes import read_run_outcomes
    from auditor.reports import advice, escaping, phrases

    result, details = (
        # a run folder may be anybody's: its strings could hold escape sequences that repaint the
        # terminal
        phrases.make_result_printable(read_run_outcomes(folder).result),
        secret_details.read_secret_details(folder),
    )
    # quoted: the advice ends in commands that are pasted into a shell
    items = advice.list_advice(result, details, shlex.quote(str(folder)))
    for item in items:
        typer.echo(escaping.make_printable_line(item.line))
    if not items:
        typer.echo("nothing can be advised: nothing was measured")


def _describe_last_checkpoint(folder: Path, at_most: str | None) -> str:
    from auditor.studies import checkpoints, sweep

    if at_most is None:
        raise AuditError(
            f"{folder}: a folder of runs, not a run; {folder}/* names them (--max NAME=LIMIT is "
            "for a line of checkpoints)"
        )
    name, _, limit = at_most.partition("=")
    try:
        most = float(limit)
    except ValueError:
        raise AuditError(
            f"expected --max NAME=LIMIT, as recall=0.05, for a line of checkpoints, got {at_most}"
        ) from None
    return checkpoints.describe_last_checkpoint(sweep.read_study_points(folder), name, most)

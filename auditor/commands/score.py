"""`audit score`: score an LM-Extraction submission as the challenge's organisers do."""

from __future__ import annotations

from pathlib import Path

import typer


def score(
    submission: Path,
    *,
    answers: Path,
    answered_only: bool = False,
    curve: Path | None = None,
    plot: Path | None = None,
    as_json: bool = False,
) -> None:
    """Score an LM-Extraction submission as the challenge's organisers do, with intervals.

    An example counts once, by its first correct guess; every wrong guess is an error, even if
    repeated. Recall at 100 errors counts correct guesses before the 100th wrong guess. Ids are row
    numbers of the answers, from 0. Every row and every token of the answers counts. Guesses of a
    different length and ids out of range are refused.

    Args:
        submission (GUESSES.csv): CSV: Example ID,Suffix Guess; most confident first, any number of
            each.
        answers (FILE.npy): The true suffixes, an array (examples, tokens).
        answered_only: Score only examples with a guess. [default: all, as the organisers do]
        curve (FILE.csv): Write recall at every number of wrong guesses.
        plot (FILE.svg|.png): Draw that curve.

    Examples:
        audit score guesses.csv --answers val_suffix.npy
        audit score guesses.csv --answers val_suffix.npy --plot curve.svg
    """
    from rich.console import Console

    from auditor.benchmarks.data import submission_score as scores
    from auditor.core.jsonable import encode_json
    from auditor.reports import plot_files, terminal

    marked = scores.mark_submission(submission, answers)
    scored = scores.score_submission(marked, answered_only)
    points = scores.trace_submission_recall(marked, answered_only)
    if plot is not None:
        plot_files.save_wrong_guesses_curve(plot, [(wrong, recall) for wrong, _, recall in points])
    if curve is not None:
        scores.write_submission_curve(curve, points)
    if as_json:
        typer.echo(encode_json(scored), nl=False)
    else:
        typer.echo(scored.headline)
        Console().print(terminal.share_measurement_table(scored.measurements))

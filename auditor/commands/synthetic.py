"""`audit synthetic`: compare released text with private records, without a model."""

from __future__ import annotations

from pathlib import Path

from auditor.commands import console
from auditor.commands.show import print_result_screen
from auditor.core.errors import AuditError


def synthetic(
    text: Path,
    *,
    data: str,
    nonmembers: str,
    canaries: str | None = None,
    words: int | None = None,
    out: Path | None = None,
    reveal: bool = False,
    seed: int = 0,
) -> None:
    """Measure what released text reveals of private records: passages, personal data, membership,
    epsilon. Asks no model.

    Args:
        text (OUT.jsonl): The text that is released: JSONL, CSV or Parquet.
        data (FILE): Private records that its generator was trained on.
        nonmembers (FILE): Similar records that its generator never saw: the baseline.
        canaries (MANIFEST): Canaries that coins put into --data (`audit canaries make --audit`).
        words: Number of consecutive words that count as extracted, or of characters in a script
            without spaces. [default: 10, or 20 characters; the median record if shorter]
        out (-o, --out DIR): Run folder; runs/latest does not link to it. [default: runs/<UTC
            time>-released-<name>]

    Examples:
        audit synthetic out.jsonl --data private.jsonl --nonmembers fresh.jsonl
        audit synthetic out.jsonl --data private.jsonl --nonmembers fresh.jsonl --canaries made.json
    """
    if words is not None and words < 2:
        raise AuditError(f"expected --words >= 2, got {words}")
    from auditor.records.folder import RunFolder
    from auditor.reports import files
    from auditor.runs import released_text

    plan = released_text.build_release_plan(
        text, data, nonmembers, canaries, seed, console.get_command_line()
    )
    release = released_text.read_released_text(plan, text)
    # Create the folder after reading both files: refused data leave no folder.
    folder = RunFolder.create(out, f"released-{text.stem}", plan.to_json())
    with console.open_progress_terminal(verbose=False) as reporter:
        try:
            result = released_text.audit_released_text(release, words, folder, reporter)
            files.write_run_reports(folder.path, result, reveal)
        except (AuditError, OSError):
            folder.discard_if_empty()
            raise
    print_result_screen(result, folder.path)

"""`audit mitigate`: mitigate an audited model, and audit it again on the same secrets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from auditor.commands import console, options

if TYPE_CHECKING:
    from auditor.conclusions.outcomes import RunOutcomes
    from auditor.runs.mitigation import Mitigation


def mitigate(
    folder: Path,
    *,
    by: str,
    option: options.Many = None,
    train: str | None = None,
    data: str | None = None,
    out: Path | None = None,
    plan: Annotated[options.Values, options.PlanFlags("trust_remote_code plugin")],
) -> None:
    """Train again with an advised mitigation, audit again on the same secrets, and show before and
    after on a page.

    Args:
        folder (RUN): Run folder of a finished audit.
        by (NAME[:VALUE]): dedup, cap:N, drop, drop:N, early-stop, dp-sgd:EPSILON, ... (`audit
            list`: training).
        option (-D OPTION=VALUE): Option of the mitigation; repeatable.
        train (COMMAND): Train by this command, given the file {data} and the folder {out}.
            [default: as training.json says]
        data (FILE): Training data of the model. [default: as recorded; else the audited file]
        out (-o, --out DIR): Folder; the same command continues in it. [default: RUN-NAME]

    Examples:
        audit mitigate runs/latest --by dedup
        audit mitigate runs/latest --by dp-sgd:8 -o runs/private
        audit mitigate runs/latest --by cap:4 --train "python train.py --data {data} --out {out}"
    """
    console.silence_libraries()
    from auditor.conclusions.outcomes import read_run_outcomes
    from auditor.runs import mitigation
    from auditor.runs.plan import parse_one_plugin_options

    options.load_plugin_files(plan.get("plugin"))
    run = read_run_outcomes(folder)
    # runs/latest is a link that the next run moves: resolve it, and name the new folder after its
    # run.
    place = folder.resolve()
    # --by goes into a file name: dp-sgd:8 has a colon, and a slash would lead elsewhere
    where = out or place.with_name(f"{place.name}-{re.sub('[^A-Za-z0-9.]+', '-', by)}")
    plugin_options = parse_one_plugin_options("-D", option or [], by.partition(":")[0])
    planned = mitigation.plan_mitigation(
        mitigation.MitigationOptions(place, by, where, plugin_options, train, data), run
    )
    # The plan in the run folder and the recipe beside its model may come from somebody else.
    allowed = options.list_allowed_risks(plan)
    options.refuse_unnamed_risks(
        planned.plan.map_field_values(), allowed, str(folder / "plan.json")
    )
    if planned.recipe is not None:
        asks = {
            "plugin": planned.recipe.plugin,
            "trust_remote_code": planned.recipe.loading.trust_remote_code,
        }
        options.refuse_unnamed_risks(asks, allowed, f"{planned.plan.target.model}/training.json")
    _print_mitigation(planned, run)


def _print_mitigation(plan: Mitigation, run: RunOutcomes) -> None:
    from auditor.conclusions.outcomes import read_run_outcomes
    from auditor.core import locks
    from auditor.reports import before_after
    from auditor.reports.files import write_document
    from auditor.runs import mitigation

    out = plan.out
    again = f"the same command continues from what is kept in {out}"
    # Locked until the page is written: otherwise two runs of the same command would train into one
    # folder.
    with locks.lock_folder(out, mitigation.RECORD):
        with console.open_progress_terminal(False, again) as reporter:
            trained = mitigation.audit_mitigated_model(
                plan, run, reporter, console.get_command_line()
            )
        comparison = mitigation.compare_mitigated_run(plan, run, read_run_outcomes(out), trained)
        document = before_after.build_mitigation_document(comparison)
        _, page = write_document(out, "before-after", document)
    for line in before_after.format_mitigation_lines(comparison):
        typer.echo(line)
    typer.echo(f"page:       {page}, .md; the run after: {out}")

"""`audit check`: a first answer within minutes, on your own model or on a demonstration model."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from auditor.commands import console, options
from auditor.commands.run import print_plan_audit, reopen_run
from auditor.core.errors import AuditError
from auditor.core.plan import Plan

if TYPE_CHECKING:
    from auditor.records.remarks import CommandRemarks
    from auditor.runs.asking import TimeLimit
    from auditor.runs.sweep_cache import SweepCache

_MOST = 100_000  # minutes: a larger number is a mistake
_DEMONSTRATION = {  # fields of the lab
    "vocab_size": 512,
    "layers": 2,
    "hidden": 64,
    "block": 96,
    "public_records": 300,
    "public_epochs": 2,
    # No adapter: the whole model is trained.
    "private_rank": 0,
    "private_epochs": 4,
    "others": 30,
    "nonmembers": 40,
    # Copies of a record, number of such records attacked, number of further records known to the
    # attacker.
    "repeats": [[1, 40, 4], [8, 20, 2], [32, 10, 2]],
    # Digits of the secret, and its copies.
    "canaries": [["955320", 32]],
}
_YOUR_OWN = "audit check MODEL --data FILE --nonmembers FILE"


def check(
    model: str | None = None,
    *,
    plan: Annotated[options.Values, options.PlanFlags("data nonmembers base template seed")],
    minutes: float = 2.0,
    resume: Path | None = None,
    deep: bool = False,
    out: Path | None = None,
) -> None:
    """Say within two minutes whether a model leaks these records. Without MODEL: a demonstration,
    in seconds.

    Args:
        model: Causal LM or adapter: Hugging Face id or folder. [default: a small model, trained
            now]
        data (FILE): Private records that the model was trained on: JSONL, CSV or Parquet.
        nonmembers (FILE): Records like them that the model never saw: the baseline.
        base (MODEL): Base model of an adapter. [default: the one it names]
        minutes: Time limit. Queries as many records as fit, at least one, and those with most
            copies first.
        resume (RUN): Continue a check that ran out of time: same plan, for --minutes more.
        deep: Attack all records, with the slow attacks too; shows the expected time first.
        out (-o, --out DIR): Run folder; runs/latest does not link to it. [default: runs/<UTC
            time>-check-<name>]

    Examples:
        audit check
        audit check ./my-model --data private.jsonl --nonmembers fresh.jsonl
        audit check --resume runs/latest --minutes 30
    """
    begun = time.perf_counter()  # --minutes include imports and loading
    if resume is None:
        _check_options_together(model, plan, deep)
    elif plan or deep or model is not None or out is not None:
        raise AuditError(
            "--resume takes model, data and seed from the run folder: give only --minutes with it"
        )
    if not 0 < minutes <= _MOST:
        raise AuditError(f"expected --minutes above 0 and at most {_MOST:,}, got {minutes:g}")
    console.silence_libraries()
    from auditor.runs.asking import TimeLimit

    limit = TimeLimit(begun, 60 * minutes)
    if resume is not None:
        folder = reopen_run(resume, {})
        if folder.plan().get("until") is not None:
            folder.close()
            raise AuditError(
                f"expected a run that may ask the most copied records first, but {str(resume)!r} "
                f"asks in random order (--until): audit run --resume {shlex.quote(str(resume))}"
            )
        print_plan_audit(folder, limit=limit)
    elif model is None:
        _check_demonstration_model(plan.get("seed", 0), out)
    else:
        _check_own_model(model, plan, out, None if deep else limit)


def _check_demonstration_model(seed: int, out: Path | None) -> None:
    from auditor.records.remarks import CommandRemarks
    from auditor.runs import quick_check
    from auditor.runs.sweep_cache import SweepCache

    typer.echo(
        "demonstration: a small model is trained now on synthetic records, some of them many times"
    )
    plan = Plan.from_fields(
        seed=seed,
        lab_recipe={**_DEMONSTRATION, "seed": seed},
        **quick_check.choose_quick_fields(),
    )
    remarks = CommandRemarks(your_own=_YOUR_OWN)
    _print_new_check(plan, out, "demonstration", SweepCache(), remarks)


def _check_own_model(
    model: str, flags: options.Values, out: Path | None, limit: TimeLimit | None
) -> None:
    """Check a user's model.

    Args:
        flags: the given fields of the plan.
        limit: time limit; None to query all records.
    """
    from auditor.records.remarks import CommandRemarks
    from auditor.runs import estimate, quick_check
    from auditor.runs.sweep_cache import SweepCache

    shared = SweepCache()
    plan = quick_check.build_quick_plan(model=model, **flags)
    remarks = CommandRemarks()
    with console.open_progress_terminal(verbose=False) as reporter:
        if limit is None:
            plan = quick_check.build_slow_plan(plan)
            started = console.seconds_since_start()
            estimated = estimate.estimate_run_cost(plan, reporter, shared=shared, starting=started)
            console.print_table(estimate.build_run_cost_table(estimated))
        else:
            plan, limits = quick_check.prepare_check(plan, reporter, shared)
            arguments = [model]
            for name, value in flags.items():
                arguments += [f"--{name}", str(value)]
            remarks = CommandRemarks(limits, deeper=f"audit check {shlex.join(arguments)} --deep")
    _print_new_check(plan, out, f"check-{Path(model).name}", shared, remarks, limit)


def _check_options_together(model: str | None, plan: options.Values, deep: bool) -> None:
    """Raise AuditError for options that conflict or are incomplete, before heavy imports."""
    if (model is None) != ("data" not in plan):
        raise AuditError(
            f"expected MODEL and --data together, got only {'--data' if model is None else 'MODEL'}"
        )
    given = list(plan)
    if deep:
        given.append("deep")
    for name in given:
        if model is None and name != "seed":
            raise AuditError(
                f"--{name} goes with a model of your own: audit check MODEL --data FILE --{name}"
            )


def _print_new_check(
    plan: Plan,
    out: Path | None,
    name: str,
    shared: SweepCache,
    remarks: CommandRemarks,
    limit: TimeLimit | None = None,
) -> None:
    """Run the plan's audit in a new folder until the time limit, and print the result."""
    from auditor.records.folder import RunFolder, remove_latest_link

    # As in `audit run`: if this run is refused below, runs/latest must not show an older run.
    if out is None:
        remove_latest_link()
    plan = plan.with_fields(command=console.get_command_line())
    folder = RunFolder.create(out, name, plan.to_json())
    print_plan_audit(folder, shared=shared, remarks=remarks, limit=limit)

"""`audit utility`: what a defense costs, as perplexity against epsilon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from auditor.commands import console, options
from auditor.commands.options import Many
from auditor.core.errors import AuditError

_PLAN = options.PlanFlags(
    "model data public defense defense_options limit prefix_token seed batch_size model_args plugin "
    + options.HUB_LOADING,
    {
        "model": "Causal or masked LM: Hugging Face id or folder. [default: the lab]",
        "data": "Texts to predict: JSONL, CSV, Parquet or a Hugging Face data set.",
        "public": "Public model, for defenses that need one.",
        "prefix_token": "Token before each text of a causal model; auto: the tokenizer's, in the lab as `audit run`. "
        "[default: auto]",
        "limit": "Measure at most N texts, drawn at random.",
    },
)


@dataclass(frozen=True, kw_only=True)
class SettingFlags:
    """How it is measured."""

    panel: ClassVar[str] = "measurement"

    kind: Annotated[
        str,
        typer.Option(
            metavar="auto|causal|masked", help="Kind of model; auto: what its configuration says, in the lab causal."
        ),
    ] = "auto"
    on: Annotated[
        str | None,
        typer.Option(metavar="heldout|members", help="Records of the lab: held out, or trained on. [default: heldout]"),
    ] = None
    restarts: Annotated[int, typer.Option(help="Masked models: how many times the texts are masked.")] = 3
    mask_share: Annotated[float, typer.Option(help="Masked models: share of the tokens that is hidden.")] = 0.15
    max_length: Annotated[int, typer.Option(help="Use at most N tokens of a text.")] = 512


def utility(
    plan: Annotated[options.Values, _PLAN],
    sweep: Annotated[
        Many,
        typer.Option(
            metavar="[DEFENSE.]OPTION=V1,V2|START:STOP:STEP",
            help="Measure at each of these values of a defense's option; repeatable.",
            rich_help_panel="defenses",
        ),
    ] = None,
    *,
    settings: SettingFlags,
    text: Annotated[
        Many, options.of_output(help="Also show what is predicted in this text of yours; repeatable.")
    ] = None,
    reveal: Annotated[
        int, options.of_output(metavar="N", help="Also show predictions in N texts of the data: private text.")
    ] = 0,
    out: Annotated[
        Path | None, options.out_folder(help="Folder for table and plot. [default: runs/<UTC time>-utility-...]")
    ] = None,
) -> None:
    """Measure what a defense costs: perplexity against epsilon, at every point of a sweep.

    Examples:
        audit utility --defense pmixed --sweep epsilon=1,4,8 --limit 50
        audit utility --model ./my-model --data heldout.jsonl
    """
    if reveal < 0:
        raise AuditError(f"expected --reveal >= 0, got {reveal}")
    from auditor.runs.plan import make_plan
    from auditor.runs.plan_grid import parse_sweep_flags

    wanted = make_plan({}, {**options.flags_to_plan_values(plan), "command": console.current_command_line()})
    swept = parse_sweep_flags(sweep or [])
    console.silence_libraries()
    from auditor.records.folder import unused_run_path
    from auditor.utility import measure, tradeoff

    # the flags are called as the fields of UtilitySettings are
    asked = measure.UtilityPlan(wanted, measure.UtilitySettings(**vars(settings)), swept)
    name = tradeoff.utility_folder_name(asked.points_to_measure())
    with console.open_progress_terminal() as reporter:
        result, examples = measure.measure_utility_points(asked, reporter, text or [], reveal)
    paths = tradeoff.write_utility_files(out or unused_run_path(name), result, examples)
    console.print_table(tradeoff.tradeoff_table(result))
    for line in tradeoff.utility_examples_lines(examples):
        typer.echo(line)
    typer.echo(f"written: {', '.join(map(str, paths))}")

"""`audit utility`: what a defense costs, as perplexity against epsilon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from auditor.commands import console, options
from auditor.commands.options import Many
from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from auditor.utility.measure import Utility
    from auditor.utility.subjects import Example


_PLAN = options.PlanFlags(
    "model data public defense defense_options limit prefix_token seed batch_size model_args plugin "
    + options.HUB_LOADING,
    {
        "model": "Hugging Face causal or masked LM: hub id or folder. [default: the lab]",
        "data": "Texts to predict, text or prefix+suffix: JSONL/CSV/Parquet or a Hugging Face data set.",
        "public": "Public model, for defenses that need one.",
        "prefix_token": "What stands before each text of a causal model; auto: as in `audit run` in the lab, else the "
        "tokenizer's own. [default: auto]",
        "limit": "Measure at most so many texts, a random sample.",
    },
)


@dataclass(frozen=True, kw_only=True)
class SettingFlags:
    """How it is measured."""

    kind: Annotated[
        str, typer.Option(help="causal, masked, or auto: what the model says it is; in the lab, causal.")
    ] = "auto"
    on: Annotated[
        str | None, typer.Option(help="The lab's records: heldout, or members that it was trained on. [heldout]")
    ] = None
    restarts: Annotated[int, typer.Option(help="Of a masked model: how often the texts are masked anew.")] = 3
    mask_share: Annotated[float, typer.Option(help="Of a masked model: share of the tokens that is hidden.")] = 0.15
    max_length: Annotated[int, typer.Option(help="Tokens of a text, at most; the rest is cut off.")] = 512


def utility(
    plan: Annotated[options.Values, _PLAN],
    sweep: Annotated[
        Many,
        typer.Option(
            metavar="[DEFENSE.]OPTION=V1,V2|START:STOP:STEP", help="Every value of an option of a defense; repeatable."
        ),
    ] = None,
    *,
    settings: SettingFlags,
    text: Annotated[
        Many, typer.Option(help="Also show what each point predicts in this text of yours; repeatable.")
    ] = None,
    reveal: Annotated[
        int,
        typer.Option(metavar="N", help="Also show predictions for N texts of the data: this prints private text."),
    ] = 0,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for table and plot. [runs/<UTC time>-utility-...]")
    ] = None,
) -> None:
    """Measure perplexity against epsilon: a defense at every point of a sweep, on a causal or a masked model."""
    if reveal < 0:
        raise AuditError(f"expected --reveal >= 0, got {reveal}")
    from auditor.runs.grid import parse_sweep
    from auditor.runs.plan import make

    wanted = make({}, {**options.plan_values(plan), "command": console.command()})
    swept = parse_sweep(sweep or [])
    console.quiet()
    from auditor.records.folder import new_folder
    from auditor.utility import measure, tradeoff
    from auditor.utility.points import points

    asked = measure.UtilityPlan(wanted, measure.Settings(**vars(settings)), swept)
    name = tradeoff.name_of(points(wanted, swept))
    with console.terminal() as reporter:
        result, examples = measure.measure(asked, reporter, text or [], reveal)
    _show(out or new_folder(name), result, examples)


def _show(folder: Path, result: Utility, examples: list[Example]) -> None:
    from auditor.utility import tradeoff

    paths = tradeoff.write(folder, result, examples)
    console.show(tradeoff.table(result))
    for line in tradeoff.examples_lines(examples):
        typer.echo(line)
    typer.echo(f"written: {', '.join(map(str, paths))}")

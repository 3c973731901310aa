"""`audit utility`: what a defense costs, as perplexity against epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from auditor.commands import console
from auditor.commands.console import Many
from auditor.core.errors import AuditError


def utility(
    defense: Annotated[Many, typer.Option("--defense", "-d", help="Defense in front of the model; repeatable.")] = None,
    sweep: Annotated[
        Many,
        typer.Option(
            metavar="[DEFENSE.]OPTION=V1,V2|START:STOP:STEP", help="Every value of an option of a defense; repeatable."
        ),
    ] = None,
    defense_option: Annotated[
        Many, typer.Option("-D", metavar="[DEFENSE.]OPTION=VALUE", help="Option of a defense.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face causal or masked LM: hub id or folder. Without it: the lab."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Texts to predict, text or prefix+suffix: JSONL/CSV/Parquet or a Hugging Face data set."),
    ] = None,
    public: Annotated[str | None, typer.Option(help="Public model, for defenses that need one.")] = None,
    kind: Annotated[
        str, typer.Option(help="causal, masked, or auto: what the model says it is; in the lab, causal.")
    ] = "auto",
    on: Annotated[
        str | None, typer.Option(help="The lab's records: heldout, or members that it was trained on. [heldout]")
    ] = None,
    restarts: Annotated[int, typer.Option(help="Of a masked model: how often the texts are masked anew.")] = 3,
    mask_share: Annotated[float, typer.Option(help="Of a masked model: share of the tokens that is hidden.")] = 0.15,
    max_length: Annotated[int, typer.Option(help="Tokens of a text, at most; the rest is cut off.")] = 512,
    lead: Annotated[
        str | None,
        typer.Option(
            metavar="auto|none|bos|eos|TEXT",
            help="What stands before each text of a causal model; auto: as in `audit run` in the lab, else the "
            "tokenizer's own. [default: auto]",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Measure at most so many texts, a random sample.")] = None,
    text: Annotated[
        Many, typer.Option(help="Also show what each point predicts in this text of yours; repeatable.")
    ] = None,
    reveal: Annotated[
        int,
        typer.Option(metavar="N", help="Also show predictions for N texts of the data: this prints private text."),
    ] = 0,
    seed: Annotated[int, typer.Option(help="All randomness follows from it.")] = 0,
    batch_size: Annotated[int | None, typer.Option(help="Texts at once; results do not depend on it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. [default: cpu]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16. [default: float32]")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of --model on the hub.")] = None,
    model_arg: Annotated[
        Many,
        typer.Option(
            "--model-arg",
            metavar="K=V",
            help="Passed to from_pretrained of --model: load_in_8bit=true, device_map=auto.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let model repositories run their own code.")
    ] = False,
    plugin: Annotated[Many, typer.Option(help="Python file with defenses of your own; repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for table and plot. [runs/<UTC time>-utility-...]")
    ] = None,
) -> None:
    """Measure perplexity against epsilon: a defense at every point of a sweep, on a causal or a masked model."""
    from auditor.plugins import registry
    from auditor.runs import grid
    from auditor.runs import plan as plans

    for path in plugin or []:
        registry.load_file(Path(path))
    if reveal < 0:
        raise AuditError(f"expected --reveal >= 0, got {reveal}")
    flags: dict[str, Any] = {
        "defense": defense,
        "defense_options": plans.parse_options("-D", defense_option or [], list(registry.defenses())),
        "model": model,
        "data": data,
        "public": public,
        "lead": lead,
        "limit": limit,
        "seed": seed,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "revision": revision,
        "model_args": plans.parse_options("--model-arg", model_arg or [], []).get("", {}),
        "trust_remote_code": trust_remote_code or None,
        "plugin": plugin,
        "command": console.command(),
    }
    wanted, swept = plans.make({}, flags), grid.parse_sweep(sweep or [])
    console.quiet()
    from auditor.records.folder import new_folder
    from auditor.utility import measure as measuring
    from auditor.utility import tradeoff

    settings = measuring.Settings(kind, on, restarts, mask_share, max_length)  # type: ignore[arg-type]
    points = measuring.points(wanted, swept)
    with console.terminal() as reporter:
        asked = measuring.UtilityPlan(wanted, settings, swept)
        result, examples = measuring.measure(asked, reporter, text or [], reveal)
    paths = tradeoff.write(out or new_folder(tradeoff.name_of(points)), result, examples)
    console.show(tradeoff.table(result))
    for line in tradeoff.examples_lines(examples):
        typer.echo(line)
    typer.echo(f"written: {', '.join(map(str, paths))}")

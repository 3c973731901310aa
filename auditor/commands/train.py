"""`audit train`: fine-tune a model, with or without a promise of privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from auditor.commands import console
from auditor.commands.console import Many


def train(
    method: Annotated[str, typer.Argument(help="How to train; `audit list` shows them: none, dp-sgd, adp, ...")],
    model: Annotated[str, typer.Option(help="Hugging Face causal LM to start from: hub id or folder.")],
    data: Annotated[
        str,
        typer.Option(help="Private records, text or prefix+suffix: JSONL/CSV/Parquet or a Hugging Face data set."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the model; an interrupted one is gone on with.")],
    option: Annotated[Many, typer.Option("-D", metavar="OPTION=VALUE", help="Option of the method.")] = None,
    public: Annotated[
        str | None, typer.Option(help="Public model, for methods that judge records by one. [default: --model]")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora/--full", help="Train a LoRA adapter, or all parameters.")] = False,
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 8,
    lora_alpha: Annotated[int, typer.Option(help="Scale of the adapter, over its rank.")] = 16,
    text_column: Annotated[
        str | None, typer.Option(help="Column of the text. [default: text, or prefix+suffix]")
    ] = None,
    user_column: Annotated[
        str | None,
        typer.Option("--user-column", "--group-column", help="Column that says whose a record is. [default: its text]"),
    ] = None,
    block: Annotated[
        int | None, typer.Option("--block", "--max-length", help="Tokens of a training sequence. [default: 512]")
    ] = None,
    seed: Annotated[int, typer.Option(help="All randomness follows from it.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    revision: Annotated[str | None, typer.Option(help="Revision of --model on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let model repositories run their own code.")
    ] = False,
    plugin: Annotated[Many, typer.Option(help="Python file with a training method of your own; repeatable.")] = None,
) -> None:
    """Fine-tune a causal LM on private records. The same command goes on where it was interrupted."""
    console.quiet()
    from auditor.models.loading import LoadingOptions
    from auditor.plugins import registry
    from auditor.runs import plan
    from auditor.runs import session as training

    for path in plugin or []:
        registry.load_file(Path(path))
    options = plan.parse_options("-D", option or [], list(registry.trainers()))
    asked = training.Training(
        method=method,
        model=model,
        data=data,
        out=out,
        options=plan.options_for(method, options, {}, list(options.get("", {}))),
        public=public,
        lora=lora,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        text_column=text_column,
        user_column=user_column,
        block=block,
        seed=seed,
        loading=LoadingOptions(device, dtype, trust_remote_code, revision),
    )
    with console.terminal() as reporter:
        try:
            with reporter.stage(f"train {method}"):
                told = training.train(asked, reporter.progress)
        except KeyboardInterrupt:
            console.say(f"interrupted; the same command goes on from what is kept in {out}", 130)
            raise
    for sentence in told:
        typer.echo(sentence)
    typer.echo(f"model: {out}")

"""`audit train`: fine-tune a model, with or without a privacy guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from auditor.commands import completion, console, options


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Flags of a training that are not plan fields."""

    panel: ClassVar[str] = "training"

    model: Annotated[
        str, options.of_target(help="Causal LM to start from: Hugging Face id or folder.")
    ]
    data: Annotated[
        str,
        options.of_data(help="Private records: JSONL, CSV, Parquet or a Hugging Face data set."),
    ]
    out: Annotated[
        Path, options.out_folder(help="Folder for the model; an interrupted training continues.")
    ]
    public: Annotated[
        str | None,
        options.of_target(
            metavar="MODEL", help="Public model, for methods that need one. [default: --model]"
        ),
    ] = None
    lora: Annotated[
        bool, typer.Option("--lora/--full", help="Train a LoRA adapter, or all parameters.")
    ] = False
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 8
    lora_alpha: Annotated[
        int, typer.Option(help="Alpha of the adapter: its scale is alpha over rank.")
    ] = 16
    text_column: Annotated[
        str | None, options.of_data(help="Column of the text. [default: text, or prefix+suffix]")
    ] = None
    loss_on: Annotated[
        str | None,
        typer.Option(
            metavar="assistant|all",
            help="Tokens of a conversation that are trained on. [default: assistant]",
        ),
    ] = None
    user_column: Annotated[
        str | None,
        options.of_data(
            "--user-column",
            "--group-column",
            help="Column that names the person of a record. [default: each text its own]",
        ),
    ] = None
    heldout: Annotated[
        str | None,
        options.of_data(
            metavar="DATA",
            help="Held-out records that early-stop decides by. [default: a tenth of --data]",
        ),
    ] = None
    forget: Annotated[
        str | None,
        options.of_data(
            metavar="DATA", help="Records of --data to unlearn, with gradient-ascent and npo."
        ),
    ] = None
    block: Annotated[
        int | None,
        typer.Option(
            "--block", "--max-length", help="Tokens per training sequence. [default: 512]"
        ),
    ] = None


_SHARED = f"template date seed {options.HUB_LOADING} {options.ENGINE} plugin"  # with `audit run`


def train(
    method: Annotated[
        str,
        typer.Argument(
            autocompletion=completion.complete_training_methods,
            help="How to train, see `audit list`: none, dedup, dp-sgd, ...",
        ),
    ],
    flags: TrainingFlags,
    plan: Annotated[options.Values, options.PlanFlags(_SHARED)],
    option: Annotated[
        options.Many,
        typer.Option(
            "-D",
            metavar="OPTION=VALUE",
            help="Option of the method; repeatable.",
            rich_help_panel="training",
        ),
    ] = None,
) -> None:
    """Fine-tune a causal LM on private records; the same command continues where it was
    interrupted.

    Examples:
        audit train none --model ./base --data private.jsonl --lora -o tuned
        audit train dp-sgd --model ./base --data private.jsonl --lora -D epsilon=8 -o private-model
    """
    console.silence_libraries()
    from auditor.core.jsonable import from_json
    from auditor.core.plan_parts import EngineOptions, LoadingOptions
    from auditor.plugins import registry
    from auditor.runs import training
    from auditor.runs.plan import merge_plugin_options, parse_plugin_options

    options.load_plugin_files(plan.get("plugin"))
    of_methods = parse_plugin_options("-D", option or [], list(registry.list_trainers()))
    request = training.TrainingRequest(
        method=method,
        # options without the name of a method are of this one
        options=merge_plugin_options(method, of_methods, {}, list(of_methods.get("", {}))),
        loading=LoadingOptions(
            **{name: plan[name] for name in options.HUB_LOADING.split() if name in plan}
        ).resolve_auto_dtype(),
        engine=from_json(
            EngineOptions,
            {name: plan[name] for name in options.ENGINE.split() if name in plan},
            "engine",
        ),
        plugin=tuple(plan.get("plugin", ())),
        **{name: plan[name] for name in ("template", "date", "seed") if name in plan},
        **options.list_given_flags(flags),
    )
    again = f"the same command continues from what is kept in {request.out}"
    with (
        console.open_progress_terminal(interrupted=again) as reporter,
        reporter.stage(f"train {method}"),
    ):
        messages = training.train_model_into_folder(request, reporter.progress)
    for sentence in messages:
        typer.echo(sentence)
    typer.echo(f"model: {flags.out}")

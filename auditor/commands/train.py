"""`audit train`: fine-tune a model, with or without a privacy guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from auditor.commands import completion, console, options


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Flags of a training that are not plan fields.

    model: Causal LM to start from: Hugging Face id or folder.
    data: Private records: JSONL, CSV, Parquet or a Hugging Face data set.
    out: Folder for the model; an interrupted training continues.
    public (MODEL): Public model, for methods that need one. [default: --model]
    lora (--lora/--full): Train a LoRA adapter, or all parameters.
    lora_rank: Rank of the adapter.
    lora_alpha: Alpha of the adapter: its scale is alpha over rank.
    text_column: Column of the text. [default: text, or prefix+suffix]
    loss_on (assistant|all): Tokens of a conversation that are trained on. [default: assistant]
    user_column (--user-column, --group-column): Column that names the person of a record. [default:
        each text its own]
    heldout (DATA): Held-out records that early-stop decides by. [default: a tenth of --data]
    forget (DATA): Records of --data to unlearn, with gradient-ascent and npo.
    block (--block, --max-length): Tokens per training sequence. [default: 512]
    """

    panel: ClassVar[str] = "training"

    model: Annotated[str, "target"]
    data: Annotated[str, "data"]
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", rich_help_panel="output")]
    public: Annotated[str | None, "target"] = None
    lora: bool = False
    lora_rank: int = 8
    lora_alpha: int = 16
    text_column: Annotated[str | None, "data"] = None
    loss_on: str | None = None
    user_column: Annotated[str | None, "data"] = None
    heldout: Annotated[str | None, "data"] = None
    forget: Annotated[str | None, "data"] = None
    block: int | None = None


_SHARED = f"template date seed {options.HUB_LOADING} {options.ENGINE} plugin"  # with `audit run`


def train(
    method: Annotated[str, typer.Argument(autocompletion=completion.complete_training_methods)],
    *,
    flags: TrainingFlags,
    plan: Annotated[options.Values, options.PlanFlags(_SHARED)],
    option: Annotated[options.Many, "training"] = None,
) -> None:
    """Fine-tune a causal LM on private records; the same command continues where it was
    interrupted.

    Args:
        method: How to train, see `audit list`: none, dedup, dp-sgd, ...
        option (-D OPTION=VALUE): Option of the method; repeatable.

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

"""`audit train`: fine-tune a model, with or without a privacy guarantee."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from auditor.commands import console, options
from auditor.runs.training_request import TrainingFlags, TrainingRequest

# shared with `audit run`
_SHARED = f"template date seed {options.HUB_LOADING} {options.ENGINE} plugin"


def train(
    method: str,
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
    from auditor.runs import training
    from auditor.runs.plan import parse_one_plugin_options

    options.load_plugin_files(plan.get("plugin"))

    def pick(names: str) -> dict[str, Any]:
        return {name: plan[name] for name in names.split() if name in plan}

    request = TrainingRequest(
        method=method,
        options=parse_one_plugin_options("-D", option or [], method),
        loading=LoadingOptions(**pick(options.HUB_LOADING)).resolve_auto_dtype(),
        engine=from_json(EngineOptions, pick(options.ENGINE), "engine"),
        plugin=tuple(plan.get("plugin", ())),
        **pick("template date seed"),
        **vars(flags),
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

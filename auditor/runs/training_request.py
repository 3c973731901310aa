"""Define the arguments of a training: flags of `audit train` and fields of its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import LOCAL, EngineOptions, LoadingOptions

_FLOAT32 = LoadingOptions(dtype="float32")


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Arguments of a training that only `audit train` has as flags.

    model: Causal LM to start from: Hugging Face id or folder.
    data: Private records: JSONL, CSV, Parquet or a Hugging Face data set.
    out (-o, --out DIR): Folder for the model; an interrupted training continues.
    public (MODEL): Public model, for methods that need one. [default: --model]
    lora (--lora/--full): Train a LoRA adapter, or all parameters.
    lora_rank: Rank of the adapter.
    lora_alpha: Alpha of the adapter: its scale is alpha over rank.
    text_column: Column of the text. [default: text, or prefix+suffix]
    loss_on (assistant|all): Tokens of a conversation that are trained on. [default: assistant]
    user_column (--user-column, --group-column): Column that names the person of a record. [default:
        each text its own]
    heldout (DATA): Held-out records by which early-stop decides. [default: a tenth of --data]
    forget (DATA): Records of --data to unlearn, with gradient-ascent and npo.
    block (--block, --max-length): Tokens per training sequence. [default: 512]
    """

    panel: ClassVar[str] = "training"

    model: Annotated[str, "target"]
    data: Annotated[str, "data"]
    out: Annotated[Path, "output"]
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


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(TrainingFlags):
    """All arguments of a training.

    Args:
        method: training method.
        options: options of the method.
        template: rendering of conversations; by default, that of the usual trainers.
        date: day that a template writes.
        seed: seed of the training.
        loading: options for loading the model.
        engine: options of the engine.
        plugin: plug-in files with the method, for workers.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    template: str = AUTO
    date: str | None = None
    seed: int = 0
    loading: LoadingOptions = _FLOAT32
    engine: EngineOptions = LOCAL
    plugin: tuple[str, ...] = ()

"""Models as transformers loads them: what `--model` names without a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.plugins.provider import Provider, RequestedModel

_OF_LOADING = (
    "device",
    "dtype",
    "trust_remote_code",
    "revision",
    "model_args",
    "device_map",
    "quantise",
    "base",
)


@dataclass(frozen=True)
class HuggingFace(Provider):
    """Hugging Face causal LM or PEFT adapter, by folder or hub id; --model-arg goes to
    from_pretrained as it is."""

    name: ClassVar[str] = "hf"
    unprefixed: ClassVar[bool] = True
    # the last four compare with other weights or train on: only a model loaded in this process can
    takes: ClassVar[tuple[str, ...]] = (
        *_OF_LOADING,
        "before",
        "retrained",
        "relearn",
        "relearn_rate",
    )

    def load(self, wanted: RequestedModel) -> HuggingFaceModel:
        return load_causal_lm(wanted.name, wanted.loading)

    def model_sources_by_role(self, wanted: RequestedModel) -> Mapping[str, tuple[str, str | None]]:
        return wanted.loading.from_pretrained_sources_by_role(wanted.name)

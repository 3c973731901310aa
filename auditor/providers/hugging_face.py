"""Load models with transformers. `--model` names such models without a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.plugins.provider import Provider, RequestedModel

_LOADING_FIELDS = (
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
    """Hugging Face causal LM or PEFT adapter, by folder or hub id.

    --model-arg gives further arguments of from_pretrained.
    """

    name = "hf"
    unprefixed = True
    # The last four fields compare weights or train further, which needs a model loaded in this
    # process.
    takes = (
        *_LOADING_FIELDS,
        "before",
        "retrained",
        "relearn",
        "relearn_rate",
    )

    def load(self, request: RequestedModel) -> HuggingFaceModel:
        return load_causal_lm(request.name, request.loading)

    def list_model_sources(self, request: RequestedModel) -> Mapping[str, tuple[str, str | None]]:
        return request.loading.list_pretrained_sources(request.name)

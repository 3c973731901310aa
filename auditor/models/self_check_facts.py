"""Derive tolerances, lengths and token ids for a self-check without querying the model."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from auditor import __version__
from auditor.core.nouns import Tokens
from auditor.models.configuration import unwrap_peft
from auditor.models.huggingface import HuggingFaceModel

# Settings whose value may be a length that changes how a text is read: windows, chunks, trained and
# stretched positions.
_MARKS = re.compile(r"window|chunk|bucket|position_embeddings|n_positions|max_seq_len|seq_length")
_FORMAT = 5  # of stored self-checks
_RECORDS = 3  # records of a run, at most, that are read both step by step and whole
_SPECIAL = re.compile(r"_token_(id|index)$")

Records = Sequence[tuple[Tokens, Tokens]]  # prefixes with their suffixes


def compute_rounding_tolerance(model: PreTrainedModel, logits: Tensor) -> float:
    """Return the largest distance (RMS, nats) that rounding may cause for logits (..., V).

    The tolerance is the sum of three terms. Let spread be the standard deviation of the logits, and
    eps the precision of the model's dtype.

    - 16 eps times the spread. This is several times the observed error. A model has 2 x layers
      additions to its residual stream, each rounds by about eps, and the errors add up as in a
      random walk.
    - 256 float32 eps times the spread, for float32 sums, whose order depends on shapes.
    - The rounding error of the largest logit.

    For comparison, unrelated distributions are 1.4 spreads apart.
    """
    eps = torch.finfo(model.dtype).eps
    if getattr(model.config, "quantization_config", None) is not None:
        eps = max(eps, 2**-7)  # activations in 8 bits
    exact = torch.finfo(torch.float32).eps
    finite = logits[torch.isfinite(logits)]
    return float(
        (16 * eps + 256 * exact) * finite.std() + (eps / 2 + 8 * exact) * finite.abs().max()
    )


def list_tested_lengths(config: Any, limit: int) -> list[int]:
    """Return the lengths in a configuration above which the model may read texts differently.

    Examples are the sizes of attention windows and chunks. Only lengths below `limit` are returned.
    """
    lengths: set[int] = set()

    def collect(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                collect(value)
            elif type(value) is int and _MARKS.search(name) and 2 < value < limit:
                lengths.add(value)

    collect(config.to_dict())
    return sorted(lengths)


def non_special_token_ids(model: HuggingFaceModel) -> Tensor:
    """Return the ids of ordinary text tokens, on the CPU.

    End tokens, padding and image placeholders are excluded.
    """
    weight: Any = model.embedding.weight
    ids = torch.arange(min(model.vocab_size, len(weight)))
    text_ids = ids[
        ~torch.isin(ids, torch.tensor(sorted(list_special_token_ids(model)), dtype=torch.long))
    ]
    return text_ids if len(text_ids) > 1 else ids


def list_special_token_ids(model: HuggingFaceModel) -> set[int]:
    """Return the configured ids of end tokens, padding and image placeholders."""
    special: set[int] = set()
    for source in (model.model.config, model.model.config.get_text_config()):
        for name, value in source.to_dict().items():
            if _SPECIAL.search(name) and value is not None:
                special |= set(value if isinstance(value, list) else [value])
    return special


def is_adapter_on(model: HuggingFaceModel, base: HuggingFaceModel) -> bool:
    """Return whether `model` is an adapter on `base`, and both have the same code and settings.

    Return False for an activated LoRA, an adapter that certain tokens switch on.
    """
    inner = unwrap_peft(model.model)
    adapters = getattr(model.model, "peft_config", {}).values()
    names_base = any(adapter.base_model_name_or_path == base.name for adapter in adapters)
    if (
        inner is model.model
        or not names_base
        or model.activation
        or type(inner) is not type(base.model)
    ):
        return False
    return _list_settings(inner, model) == _list_settings(base.model, base)


def _list_settings(inner: PreTrainedModel, model: HuggingFaceModel) -> tuple[object, ...]:
    config = inner.config
    return (
        config.to_json_string(),
        config._attn_implementation,
        inner.dtype,
        model.device,
        model.max_positions,
    )


def choose_compared_records(model: HuggingFaceModel, records: Records, room: int) -> Records:
    """Choose a few records for a self-check, each of at most `room` tokens.

    Choose the longest record, then the shortest ones that add a special token. An activated LoRA is
    an adapter that certain tokens switch on: for it, choose records at equal distances. `records`
    are (prefix, suffix) pairs.
    """
    fitting = []
    for record in records:
        if record[0] and sum(map(len, record)) <= room:
            fitting.append(record)
    if model.activation or not fitting:
        return tuple(fitting[:: max(1, len(fitting) // _RECORDS)][:_RECORDS])
    by_length = sorted(fitting, key=lambda record: len(record[0]))
    chosen = [by_length[-1]]
    special = list_special_token_ids(model).union(getattr(model.tokenizer, "all_special_ids", ()))
    covered = special.intersection(by_length[-1][0])
    for prefix, suffix in by_length:
        if len(chosen) == _RECORDS:
            break
        if not covered.issuperset(special.intersection(prefix)):
            chosen.append((prefix, suffix))
            covered |= special.intersection(prefix)
    return tuple(chosen)


def self_check_digest(model: HuggingFaceModel, room: int, records: Records) -> str:
    """Return a digest of everything that a self-check depends on.

    That is the weights, settings, libraries, device and texts. `room` is the number of tokens in
    the longest tested text, and `records` are the compared records.
    """
    versions = list(map(importlib.metadata.version, ("torch", "transformers")))
    kind = f"{type(model.model).__module__}.{type(model.model).__qualname__}"
    fields = [
        _FORMAT,
        model.digest(),
        kind,
        model.model.config.to_json_string(),
        versions,
        str(model.device),
        room,
        records,
        __version__,
    ]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

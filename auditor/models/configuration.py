"""What the configuration of a Hugging Face model says of it: where it reads, how many tokens fit, what ends a text."""

from __future__ import annotations

from typing import Any

import torch

_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")  # what families call how many they have


def model_input_device(model: Any, embedding: Any) -> torch.device:
    """The device that token ids must be on. Offloaded weights (`device_map`) do not tell it, but their hook does."""
    # accelerate hangs this hook on a part whose weights it moves in for each use.
    used_on = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return next(model.parameters()).device if used_on is None else torch.device(used_on)


def devices_of_split_model(model: Any) -> tuple[str, ...]:
    """The places that a `device_map` put the parts of a model in; none where all are in one."""
    places = sorted({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()})
    return tuple(places) if len(places) > 1 or places == ["disk"] else ()


def unwrap_peft(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def quantisation_method(model: Any) -> str:
    """Return how the weights in memory are quantised (`bitsandbytes`, `gptq`), "" for weights that are numbers."""
    config = getattr(unwrap_peft(model).config, "quantization_config", None)
    if config is None:
        return ""
    method = config.get("quant_method", "") if isinstance(config, dict) else config.quant_method
    return str(getattr(method, "value", method)) or "an unnamed method"


def max_positions(model: Any) -> int | None:
    """How many tokens fit; None where nothing limits them.

    RoBERTa counts its positions from behind the padding id, and a tuned prompt stands in front: both cost some of them.
    """
    inner = unwrap_peft(model)
    config = inner.config.get_text_config(decoder=True)
    limit: int | None = next((n for name in _POSITIONS if (n := getattr(config, name, None)) is not None), None)
    if limit is None or limit <= 0:  # XLNet has -1
        return None
    table = getattr(getattr(inner.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    tuned = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None)
    return limit - (0 if padding is None else padding + 1) - (tuned or 0)


def end_of_text_tokens(model: Any, config: Any) -> tuple[int, ...]:
    """Every end-of-text token that the configuration or the generation configuration names: chat models have many."""
    named: dict[int, None] = {}
    for source in (config, getattr(model, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        named |= dict.fromkeys([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(named)

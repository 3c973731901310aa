"""Read a Hugging Face configuration: devices, quantisation, positions, end-of-text tokens."""

from __future__ import annotations

from typing import Any

import torch

# The names that model families use for their number of positions.
_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def get_input_device(model: Any, embedding: Any) -> torch.device:
    """Return the device on which the model expects token ids.

    This may not be the device of the weights: with `device_map`, accelerate may move a layer's
    weights only when the layer runs.
    """
    # accelerate adds this hook to a part whose weights it loads for each use.
    hook = getattr(embedding, "_hf_hook", None)
    execution_device = getattr(hook, "execution_device", None)
    if execution_device is None:
        return next(model.parameters()).device
    return torch.device(execution_device)


def list_split_devices(model: Any) -> tuple[str, ...]:
    """Return the devices over which `device_map` split a model, or () if it is on one device."""
    device_map = getattr(model, "hf_device_map", None) or {}
    devices = sorted({str(device) for device in device_map.values()})
    if len(devices) > 1 or devices == ["disk"]:
        return tuple(devices)
    return ()


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model inside a PEFT wrapper; without a wrapper, the model itself."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def get_quantisation_method(model: Any) -> str:
    """Return the quantisation method of the weights (`bitsandbytes`, `gptq`), or "" if none."""
    config = getattr(unwrap_peft(model).config, "quantization_config", None)
    if config is None:
        return ""
    if isinstance(config, dict):
        method = config.get("quant_method", "")
    else:
        method = config.quant_method
    return str(getattr(method, "value", method)) or "an unnamed method"


def max_positions(model: Any) -> int | None:
    """Return the largest number of tokens in a text, or None if the model has no limit.

    RoBERTa's positions before its first token and the positions of a tuned prompt are subtracted.
    """
    inner = unwrap_peft(model)
    config = inner.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in _POSITIONS]
    limit: int | None = next((limit for limit in limits if limit is not None), None)
    if limit is None or limit <= 0:  # XLNet has -1
        return None
    table = getattr(getattr(inner.base_model, "embeddings", None), "position_embeddings", None)
    padding_id = getattr(table, "padding_idx", None)
    n_padding = 0 if padding_id is None else padding_id + 1
    adapter_config = getattr(model, "active_peft_config", None)
    n_virtual = getattr(adapter_config, "num_virtual_tokens", None) or 0
    return limit - n_padding - n_virtual


def list_end_tokens(model: Any, config: Any) -> tuple[int, ...]:
    """Return all end-of-text tokens of the model and of its generation configuration.

    Chat models have several.
    """
    tokens: dict[int, None] = {}  # in order, without duplicates
    for source in (config, getattr(model, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            tokens[value] = None
        elif value is not None:
            tokens |= dict.fromkeys(value)
    return tuple(tokens)

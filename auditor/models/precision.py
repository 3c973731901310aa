"""In which precision weights run, what that changes of a model's distributions, and how few bits
stay fast on a CPU.

Knows nothing of what a model is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from auditor.models.memory import available_device_memory_bytes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TEXTS = 8  # that are read in both precisions
_ROWS = 4  # of a product from which on its digits do not depend on their number
_attention = torch.nn.functional.scaled_dot_product_attention


CPU = torch.device("cpu")


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether it multiplies in bfloat16 itself: one that does not is slower in it than in
    float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    told: Mapping[str, Any] = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(told.get("avx512_bf16") or told.get("amx_bf16"))


def saved_dtype(config: Any) -> str:
    """What a configuration says that its weights were saved in; "" where it does not, or says one
    that is none here."""
    saved = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    return saved if saved in DTYPES else ""


def auto_dtype(config: Any, device: torch.device) -> str:
    """What `auto` is: bfloat16 for weights that were saved in it, where the machine has it, else
    float32."""
    return (
        "bfloat16"
        if saved_dtype(config) == "bfloat16" and has_native_bfloat16(device)
        else "float32"
    )


def make_head_input_contiguous(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook before the head: a part of a tensor as one block. torch would copy the weights for
    each text.

    Products of a few rows in float32 stay as they were: they would differ in their last digits.
    """
    few = given[0].ndim == 3 and given[0].shape[1] < _ROWS and given[0].dtype == torch.float32
    return given if few else (given[0].contiguous(), *given[1:])


class Float32SingleQueryAttention(TorchFunctionMode):
    """Attention of one query a row in float32: in fewer bits torch takes up to seven times as long
    on a processor."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is not _attention or args[0].shape[-2] != 1 or args[0].dtype == torch.float32:
            return function(*args, **(kwargs or {}))
        more = {name: _floating_tensor_as_float32(value) for name, value in (kwargs or {}).items()}
        return function(*map(_floating_tensor_as_float32, args), **more).to(args[0].dtype)


def _floating_tensor_as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@torch.no_grad()
def dtype_effect_sentence(
    model: Any, texts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str:
    """What its precision changes, against the same weights in float32, in a sentence; "" for a
    model in float32.

    model: a `HuggingFaceModel`; texts: prefixes with their suffixes, of which the first are read in
    both.
    """
    plain = model.model
    quantised = getattr(plain.config, "quantization_config", None) is not None
    if plain.dtype not in (torch.float16, torch.bfloat16) or quantised or not texts:
        return ""
    dtype, needed = (
        str(plain.dtype).removeprefix("torch."),
        4 * sum(weight.numel() for weight in plain.parameters()),
    )
    if needed > (free := available_device_memory_bytes(model.device)) // 2 or getattr(
        plain, "hf_device_map", None
    ):
        return (
            f"runs in {dtype}; what that changes was not measured: float32 takes "
            f"{needed / 1e9:.1f} GB beside it, of {free / 1e9:.1f} GB that are free"
        )
    exact, apart, same = type(model)(copy.deepcopy(plain).float(), name=model.name), [], []
    for prefix, suffix in texts[:_TEXTS]:
        read = torch.tensor([prefix + suffix[:-1]], device=model.device)
        tokens = torch.tensor(suffix, device=model.device).unsqueeze(-1)
        few = model.log_probs(read, len(suffix))[0]
        full = exact.log_probs(read, len(suffix))[0]
        apart.append((few.gather(-1, tokens) - full.gather(-1, tokens)).squeeze(-1))
        same.append((few.argmax(-1) == full.argmax(-1)).double())
    return (
        f"runs in {dtype}: against float32, on {sum(map(len, same))} tokens of secrets, "
        f"log-probabilities are {float(torch.cat(apart).abs().mean()):.4f} nats a token apart, the "
        f"negative log-likelihood {-float(torch.cat(apart).mean()):+.4f}, and greedy decoding "
        f"agrees on {float(torch.cat(same).mean()):.1%}"
    )

"""Choose the weights' precision, measure its effect, and speed up 16-bit weights on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from auditor.models.memory import measure_free_device_memory

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TEXTS = 8  # texts read in both precisions
_ROWS = 4  # products with at least this many rows have digits that do not depend on their number
_attention = torch.nn.functional.scaled_dot_product_attention


CPU = torch.device("cpu")


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 natively; if not, float32 is faster."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        cpu_features: Mapping[str, Any] = torch.cpu.get_capabilities()
    else:
        cpu_features = {}
    return bool(cpu_features.get("avx512_bf16") or cpu_features.get("amx_bf16"))


def read_saved_dtype(config: Any) -> str:
    """Return the dtype of the saved weights according to `config`, or "" if it is not supported."""
    saved = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    return saved if saved in DTYPES else ""


def choose_auto_dtype(config: Any, device: torch.device) -> str:
    """Return the dtype for `auto`: bfloat16 if both weights and device support it, else float32."""
    if read_saved_dtype(config) == "bfloat16" and has_native_bfloat16(device):
        return "bfloat16"
    return "float32"


def make_head_input_contiguous(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the model head's input as contiguous tensors, which saves a copy of the weights.

    This hook runs before each call of the head. Inputs of a few float32 rows are left unchanged,
    because the last digits of their logits would change.
    """
    is_small = (
        inputs[0].ndim == 3 and inputs[0].shape[1] < _ROWS and inputs[0].dtype == torch.float32
    )
    if is_small:
        return inputs
    return (inputs[0].contiguous(), *inputs[1:])


class Float32SingleQueryAttention(TorchFunctionMode):
    """Mode in which attention with one query per sequence is computed in float32.

    This is up to 7 times faster than in 16 bits.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is not _attention or args[0].shape[-2] != 1 or args[0].dtype == torch.float32:
            return function(*args, **(kwargs or {}))
        float_kwargs = {}
        for name, value in (kwargs or {}).items():
            float_kwargs[name] = _cast_floating_tensor(value)
        return function(*map(_cast_floating_tensor, args), **float_kwargs).to(args[0].dtype)


def _cast_floating_tensor(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return value


@torch.no_grad()
def dtype_effect_sentence(
    model: Any, texts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str:
    """Return a sentence that compares the model's precision with float32; "" for a float32 model.

    `model` is a `HuggingFaceModel`. `texts` are (prefix, suffix) pairs; only the first few are
    compared.
    """
    plain = model.model
    quantised = getattr(plain.config, "quantization_config", None) is not None
    if plain.dtype not in (torch.float16, torch.bfloat16) or quantised or not texts:
        return ""
    dtype = str(plain.dtype).removeprefix("torch.")
    needed = 4 * sum(weight.numel() for weight in plain.parameters())
    if needed > (free := measure_free_device_memory(model.device)) // 2 or getattr(
        plain, "hf_device_map", None
    ):
        return (
            f"runs in {dtype}; the effect of that was not measured: float32 takes "
            f"another {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        )
    exact = type(model)(copy.deepcopy(plain).float(), name=model.name)
    diffs = []
    agrees = []
    for prefix, suffix in texts[:_TEXTS]:
        contexts = torch.tensor([prefix + suffix[:-1]], device=model.device)
        tokens = torch.tensor(suffix, device=model.device).unsqueeze(-1)
        low_precision = model.log_probs(contexts, len(suffix))[0]
        float32_log_probs = exact.log_probs(contexts, len(suffix))[0]
        diffs.append(
            (low_precision.gather(-1, tokens) - float32_log_probs.gather(-1, tokens)).squeeze(-1)
        )
        agrees.append((low_precision.argmax(-1) == float32_log_probs.argmax(-1)).double())
    return (
        f"runs in {dtype}: against float32, on {sum(map(len, agrees))} tokens of secrets, "
        f"log-probabilities are {float(torch.cat(diffs).abs().mean()):.4f} nats a token apart, the "
        f"negative log-likelihood {-float(torch.cat(diffs).mean()):+.4f}, and greedy decoding "
        f"agrees on {float(torch.cat(agrees).mean()):.1%}"
    )

"""Loading models: weights, adapters and tokenizers from a local folder or the hub, for every command alike.

Whatever a library raises here becomes one sentence. Knows nothing of what a loaded model is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from auditor.errors import AuditError
from auditor.models import HuggingFaceModel

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load(
    name: str,
    *,
    revision: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    model_args: dict[str, Any] | None = None,
) -> HuggingFaceModel:
    """A causal LM by local folder or hub id; a PEFT adapter folder loads on the base model it names.

    Raises AuditError when nothing is there, when it is no causal LM, or when it has no weights to load.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with load_errors(name, "causal LM", device, dtype):
        place = torch.device(device)
        if (Path(name) / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM

            model = AutoPeftModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], **options, **(model_args or {}))
            base = model.peft_config["default"].base_model_name_or_path
        else:
            base = name
            config = AutoConfig.from_pretrained(name, **options)
            _refuse_masked(name, config)
            model = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=DTYPES[dtype], **options, **(model_args or {})
            )
        tokenizer = tokenizer_beside(name, options) or tokenizer_beside(base, options)
        return HuggingFaceModel(model.to(place), tokenizer, name=name)


def _refuse_masked(name: str, config: Any) -> None:
    """transformers would load one as a causal LM that sees the tokens it is asked for. Raises AuditError."""
    said = " ".join(getattr(config, "architectures", None) or ())
    if "MaskedLM" in said and not getattr(config, "is_decoder", False):
        raise AuditError(f"expected a causal LM, got {name!r}, a masked one ({said})")


@contextmanager
def load_errors(name: str, what: str, device: str, dtype: str = "float32") -> Iterator[None]:
    """Whatever a library raises while it loads a model, as one sentence. Raises AuditError."""
    if dtype not in DTYPES:
        raise AuditError(f"expected dtype in {sorted(DTYPES)}, got {dtype!r}")
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, TypeError, KeyError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise AuditError(f"cannot load {name!r} as a Hugging Face {what} on {device}: {reason}") from error


def tokenizer_beside(name: str, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights; None where there is none (token-id benchmarks need none).

    transformers makes an empty tokenizer up for a folder without one, so the files are looked for first.
    """
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError):
        return None

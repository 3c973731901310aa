"""What a self-check reads off a model before it asks it: tolerances, lengths and token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from auditor.models.huggingface import HuggingFaceModel

# Names of settings from whose value on a model may read a text otherwise: windows, chunks, trained and stretched
# positions.
_MARKS = re.compile(r"window|chunk|bucket|position_embeddings|n_positions|max_seq_len|seq_length")
_SPECIAL = re.compile(r"_token_(id|index)$")


def rounding_tolerance(model: PreTrainedModel, logits: Tensor) -> float:
    """How far apart rounding may put two distributions of these logits (..., V), in nats, root mean square.

    Each of the 2 layers additions to a residual stream rounds it by a share of eps, which is a random walk: a few eps
    of its size, and so of the logits' spread, for the depths there are; 16 is several times what is seen. Products
    add up in float32, in an order that depends on the shapes: 256 of its eps. The last rounding is of the logits
    themselves, whatever their offset is. An unrelated distribution is 1.4 spreads away.
    """
    eps = torch.finfo(model.dtype).eps
    if getattr(model.config, "quantization_config", None) is not None:
        eps = max(eps, 2**-7)  # activations in 8 bits
    exact = torch.finfo(torch.float32).eps
    finite = logits[torch.isfinite(logits)]
    return float((16 * eps + 256 * exact) * finite.std() + (eps / 2 + 8 * exact) * finite.abs().max())


def text_lengths_to_test(config: Any, below: int) -> list[int]:
    """The lengths less than `below` that a configuration names, from which on its model may read texts otherwise."""
    found: set[int] = set()

    def collect(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                collect(value)
            elif type(value) is int and _MARKS.search(name) and 2 < value < below:
                found.add(value)

    collect(config.to_dict())
    return sorted(found)


def non_special_token_ids(model: HuggingFaceModel) -> Tensor:
    """The token ids that are text, on the CPU: ends, padding and placeholders of pictures mean something else."""
    weight: Any = model.embedding.weight
    ids = torch.arange(min(model.vocab_size, len(weight)))
    kept = ids[~torch.isin(ids, torch.tensor(sorted(special_token_ids(model)), dtype=torch.long))]
    return kept if len(kept) > 1 else ids


def special_token_ids(model: HuggingFaceModel) -> set[int]:
    """Return the token ids that the configuration names as ends, padding and placeholders of pictures."""
    special: set[int] = set()
    for source in (model.model.config, model.model.config.get_text_config()):
        for name, value in source.to_dict().items():
            if _SPECIAL.search(name) and value is not None:
                special |= set(value if isinstance(value, list) else [value])
    return special

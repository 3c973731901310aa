"""PEFT adapters on their base: of this base, with every weight read, and rows for the tokens that were added."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel

from auditor.core.errors import AuditError
from auditor.models.weights import WRAPPED, refuse_missing_or_foreign_weights, training_wrapper_names_phrase

# Names in adapters that PEFT puts in place itself, or fails: the rows of a prompt, and second copies of whole modules.
_PLACED_BY_PEFT = re.compile(r"^prompt_embeddings$|\.modules_to_save\.(weight|bias)$")


def load_adapter_onto_base(base: Any, folder: str, adapter: str = "default", onto: Any = None) -> Any:
    """The base with the PEFT adapter of this folder, or `onto` with one more. The base is changed in place.

    Raises AuditError for an adapter that is not of this base: one whose weights have no place in it, or lack some.
    """
    _check_adapter_fits_base(folder, PeftConfig.from_pretrained(folder), base)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # it becomes a refusal below
        if onto is None:
            onto = PeftModel.from_pretrained(base, folder, adapter_name=adapter)
        # Read (again): only this tells what had no place.
        found = onto.load_adapter(folder, adapter_name=adapter)
        others = found.unexpected_keys
        if training_wrapper_names_phrase(others) and all(key.startswith("base_model.") for key in others):
            found = onto.load_adapter(folder, adapter_name=adapter, key_mapping=WRAPPED)
    strangers = [key for key in found.unexpected_keys if not _PLACED_BY_PEFT.search(key)]
    refuse_missing_or_foreign_weights(
        folder, _unshared_missing_weights(onto, found.missing_keys), strangers, of="adapter on its base"
    )
    return onto


def _unshared_missing_weights(model: Any, missing: Collection[str]) -> list[str]:
    """Those of the missing weights that no other name of the same tensor was read for (vector banks are shared)."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) if missing else {}
    read = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    return [name for name in missing if id(tensors.get(name)) not in read]


def _check_adapter_fits_base(adapter: str, config: PeftConfig, base: PreTrainedModel) -> None:
    """Compares sizes: a tuned prompt loads on any base no smaller than its own. Raises AuditError."""
    text = base.config.get_text_config(decoder=True)
    wide = None if config.peft_type == "PREFIX_TUNING" else getattr(config, "token_dim", None)  # narrower: shared keys
    for what, said, own in (
        ("layers", getattr(config, "num_layers", None), text.num_hidden_layers),
        ("hidden units", wide, text.hidden_size),
    ):
        if said is not None and said != own:
            raise AuditError(
                f"expected the base of {adapter!r} to have {said} {what}, got {base.name_or_path!r} with {own}"
            )


def resize_embeddings_for_adapter(base: Any, adapter: Path) -> None:
    """Resizes the base's embeddings, in place, to as many rows as an adapter with embeddings of its own has saved."""
    rows = _saved_embedding_row_count(adapter, base)
    if rows is not None and rows != base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(rows, mean_resizing=False)  # new rows need no guess: the adapter has them


def _saved_embedding_row_count(adapter: Path, base: Any) -> int | None:
    """How many tokens the embedding matrix has that is kept in an adapter; None where it keeps none."""
    from safetensors import safe_open

    file = adapter / "adapter_model.safetensors"
    own = base.get_input_embeddings()
    name = next((key for key, module in base.named_modules() if module is own), None)
    if name is None or not file.is_file():
        return None
    with safe_open(str(file), framework="pt") as held:
        for key in held.keys():  # noqa: SIM118 - no mapping: it has no iterator
            if re.search(rf"(^|\.){re.escape(name)}\.(modules_to_save\.)?weight$", key):
                return int(held.get_slice(key).get_shape()[0])
    return None

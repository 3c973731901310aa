"""PEFT adapters on their base: of this base, with every weight read, and rows for the tokens that were added."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
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
    strangers = sorted(set(strangers) - _weights_saved_twice(Path(folder), strangers))
    refuse_missing_or_foreign_weights(
        folder, _unshared_missing_weights(onto, found.missing_keys), strangers, of="adapter on its base"
    )
    return onto


def _unshared_missing_weights(model: Any, missing: Collection[str]) -> list[str]:
    """Those of the missing weights that no other name of the same tensor was read for (vector banks are shared)."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) if missing else {}
    read = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    return [name for name in missing if id(tensors.get(name)) not in read]


def _weights_saved_twice(adapter: Path, names: Sequence[str]) -> set[str]:
    """Return those of these weights of trained tokens that the file has a second time, as PEFT saves tied matrices."""
    from safetensors import safe_open

    tails = {name: tail for name in names if (tail := name.partition(".token_adapter.")[2])}
    if not tails:
        return set()
    with safe_open(str(adapter / "adapter_model.safetensors"), framework="pt") as weights:
        return {
            name
            for name, tail in tails.items()
            for other in weights.keys()  # noqa: SIM118 - no mapping: it has no iterator
            if other not in names and other.endswith(f".token_adapter.{tail}")
            if weights.get_tensor(other).equal(weights.get_tensor(name))
        }


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
    """Resize the base's embeddings, in place, to the rows that an adapter of another vocabulary was trained with.

    PEFT saves a matrix under its own name or inside a wrapper: `modules_to_save`, or the `base_layer` of trainable
    tokens and of LoRA. An adapter of trainable tokens may have only the rows of these tokens. Raises AuditError for an
    adapter that has the new rows of one matrix and lacks those of the other: nobody has them.
    """
    n_rows = base.get_input_embeddings().weight.shape[0]
    rows_by_name = _embedding_rows_by_name(base, adapter)
    wanted = max(map(len, rows_by_name.values()), default=n_rows)
    trained = _trained_tokens(PeftConfig.from_pretrained(str(adapter)))
    if not any(rows_by_name.values()):
        wanted = max([n_rows, *(token + 1 for token in trained)])
    if wanted == n_rows:
        return
    new = set(range(n_rows, wanted)) - set(trained)
    tied = base.get_input_embeddings().weight is getattr(base.get_output_embeddings(), "weight", None)
    lacking = [name for name, rows in rows_by_name.items() if new - set(rows)]
    if len(lacking) > (len(rows_by_name) - 1 if tied else 0):
        raise AuditError(
            f"expected the adapter {str(adapter)!r} to bring the rows of its {wanted - n_rows} new tokens, but it has "
            f"none in {' and '.join(lacking)}: train and save it with these in modules_to_save"
        )
    base.resize_token_embeddings(wanted, mean_resizing=False)  # new rows need no guess: the adapter has them


def _embedding_rows_by_name(base: Any, adapter: Path) -> dict[str, range]:
    """Return the rows that an adapter has of the input and the output matrix, by name; none of a matrix not saved."""
    from safetensors import safe_open

    file = adapter / "adapter_model.safetensors"
    matrices = (base.get_input_embeddings(), base.get_output_embeddings())
    rows = {name: range(0) for name, module in base.named_modules() if module in matrices}
    if not file.is_file():
        return rows
    with safe_open(str(file), framework="pt") as weights:
        keys = list(weights.keys())
        for name in rows:
            wrapped = rf"(^|\.){re.escape(name)}\.((modules_to_save|token_adapter|base_layer)\.)*weight$"
            for key in filter(re.compile(wrapped).search, keys):
                rows[name] = range(int(weights.get_slice(key).get_shape()[0]))
    return rows


def _trained_tokens(config: Any) -> list[int]:
    """Return the token ids that an adapter has rows of its own for, in any module."""
    indices = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None) or []
    parts = list(indices.values()) if isinstance(indices, dict) else [indices]
    return [int(token) for part in parts for token in part]

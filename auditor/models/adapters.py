"""Load PEFT adapters: check the base model, load all weights, add the embeddings of new tokens."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from auditor.core.errors import AuditError
from auditor.models.configuration import get_quantisation_method, unwrap_peft
from auditor.models.weights import (
    WRAPPED,
    format_training_wrapper_names,
    refuse_missing_or_foreign_weights,
)

if TYPE_CHECKING:
    from peft import PeftConfig

# Names of weights that PEFT either places or refuses itself: prompt rows, and second copies of
# modules.
_PLACED_BY_PEFT = re.compile(r"^prompt_embeddings$|\.modules_to_save\.(weight|bias)$")


def attach_adapter(base: Any, folder: str, adapter: str = "default", onto: Any = None) -> Any:
    """Attach the PEFT adapter in `folder` to the model `base`, in place, and return the result.

    The new adapter gets the name `adapter`. To add it to a model that already has an adapter, pass
    this model as `onto`. Raise AuditError if the adapter's weights do not fit those of the base.
    """
    from peft import PeftConfig, PeftModel

    _check_adapter_fits_base(folder, PeftConfig.from_pretrained(folder), base)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
        if onto is None:
            onto = PeftModel.from_pretrained(base, folder, adapter_name=adapter)
        # Load (again): only this call reports weights without a place.
        report = onto.load_adapter(folder, adapter_name=adapter)
        unexpected = report.unexpected_keys
        in_base_model = all(key.startswith("base_model.") for key in unexpected)
        if format_training_wrapper_names(unexpected) and in_base_model:
            report = onto.load_adapter(folder, adapter_name=adapter, key_mapping=WRAPPED)
    unplaced = []
    for key in report.unexpected_keys:
        if not _PLACED_BY_PEFT.search(key):
            unplaced.append(key)
    foreign = sorted(set(unplaced) - _find_duplicate_weights(Path(folder), unplaced))
    missing = _list_unshared_missing_weights(onto, report.missing_keys)
    refuse_missing_or_foreign_weights(folder, missing, foreign, of="adapter on its base")
    return onto


def is_adapter_mergeable(model: Any) -> bool:
    """Return whether the model's adapter can be merged into the weights without rounding.

    Return False unless all weights are float32 and none are quantised. Also return False for a
    tuned prompt, because it has no weights to merge.
    """
    if unwrap_peft(model) is model:
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model, PeftModel) or not isinstance(model.base_model, BaseTuner):
        return False
    is_exact = all(weight.dtype is torch.float32 for weight in model.parameters())
    return is_exact and not get_quantisation_method(model)


def _list_unshared_missing_weights(model: Any, missing: Collection[str]) -> list[str]:
    """Return the missing weights, except those that are only another name for a loaded weight.

    Some weights have several names, such as those of a vector bank.
    """
    if not missing:
        return []
    tensors = dict(model.named_parameters(remove_duplicate=False))
    loaded = set()
    for name, tensor in tensors.items():
        if name not in missing:
            loaded.add(id(tensor))
    return [name for name in missing if id(tensors.get(name)) not in loaded]


def _find_duplicate_weights(adapter: Path, names: Sequence[str]) -> set[str]:
    """Return the weights of trained tokens that the adapter file contains under two names.

    PEFT saves tied matrices twice.
    """
    from safetensors import safe_open

    token_weights = []
    for name in names:
        if ".token_adapter." in name:
            token_weights.append(name)
    if not token_weights:
        return set()
    duplicates = set[str]()
    with safe_open(str(adapter / "adapter_model.safetensors"), framework="pt") as weights:
        for name in token_weights:
            tail = name.partition(".token_adapter.")[2]
            for other in weights.keys():  # noqa: SIM118 - not a mapping: it has no iterator
                if other in names or not other.endswith(f".token_adapter.{tail}"):
                    continue
                if weights.get_tensor(other).equal(weights.get_tensor(name)):
                    duplicates.add(name)
    return duplicates


def _check_adapter_fits_base(adapter: str, config: PeftConfig, base: PreTrainedModel) -> None:
    """Raise AuditError if a size in the adapter's configuration differs from the base model's.

    PEFT itself loads a tuned prompt on any base that is at least as large.
    """
    text_config = base.config.get_text_config(decoder=True)
    # The width of prefix tuning is narrower if the base shares keys among heads.
    width = None
    if config.peft_type != "PREFIX_TUNING":
        width = getattr(config, "token_dim", None)
    sizes = (
        ("layers", getattr(config, "num_layers", None), text_config.num_hidden_layers),
        ("hidden units", width, text_config.hidden_size),
    )
    for quantity, expected, actual in sizes:
        if expected is not None and expected != actual:
            raise AuditError(
                f"expected the base of {adapter!r} to have {expected} {quantity}, got "
                f"{base.name_or_path!r} with {actual}"
            )


def resize_embeddings(base: Any, adapter: Path) -> None:
    """Resize the base's embeddings, in place, to the vocabulary with which the adapter was trained.

    The new size is that of the embedding matrices in the adapter file. PEFT saves them under their
    own names or inside a wrapper (`modules_to_save`, `base_layer`). If the file has only the rows
    of trained tokens, the highest of these token ids decides the size.

    Raise AuditError if the adapter was trained with more tokens than the base has, but its file
    lacks their rows in the input or output embeddings.
    """
    from peft import PeftConfig

    input_weight = base.get_input_embeddings().weight
    n_rows = input_weight.shape[0]
    rows_by_name = _read_embedding_rows(base, adapter)
    n_adapter_rows = max(map(len, rows_by_name.values()), default=n_rows)
    trained_tokens = _list_trained_tokens(PeftConfig.from_pretrained(str(adapter)))
    if not any(rows_by_name.values()):
        n_adapter_rows = max([n_rows, *(token + 1 for token in trained_tokens)])
    if n_adapter_rows == n_rows:
        return
    new_rows = set(range(n_rows, n_adapter_rows)) - set(trained_tokens)
    incomplete = []
    for name, rows in rows_by_name.items():
        if new_rows - set(rows):
            incomplete.append(name)
    is_tied = input_weight is getattr(base.get_output_embeddings(), "weight", None)
    # With tied embeddings the rows of one matrix are enough.
    max_incomplete = len(rows_by_name) - 1 if is_tied else 0
    if len(incomplete) > max_incomplete:
        raise AuditError(
            f"expected the adapter {str(adapter)!r} to contain the rows of its "
            f"{n_adapter_rows - n_rows} new tokens, but it has none in "
            f"{' and '.join(incomplete)}: train and save it with these in modules_to_save"
        )
    # New rows need no initial values: the adapter has them.
    base.resize_token_embeddings(n_adapter_rows, mean_resizing=False)


def _read_embedding_rows(base: Any, adapter: Path) -> dict[str, range]:
    """Return the row indices of each embedding matrix that an adapter file contains.

    The matrices are the input and output embeddings, keyed by module name. The range is empty if
    the file does not contain the matrix.
    """
    from safetensors import safe_open

    file = adapter / "adapter_model.safetensors"
    matrices = (base.get_input_embeddings(), base.get_output_embeddings())
    rows = {}
    for name, module in base.named_modules():
        if module in matrices:
            rows[name] = range(0)
    if not file.is_file():
        return rows
    with safe_open(str(file), framework="pt") as weights:
        keys = list(weights.keys())
        for name in rows:
            wrappers = r"((modules_to_save|token_adapter|base_layer)\.)*"
            pattern = re.compile(rf"(^|\.){re.escape(name)}\.{wrappers}weight$")
            for key in filter(pattern.search, keys):
                rows[name] = range(int(weights.get_slice(key).get_shape()[0]))
    return rows


def _list_trained_tokens(config: Any) -> list[int]:
    """Return the ids of all tokens whose embedding rows were trained with the adapter."""
    indices = getattr(config, "trainable_token_indices", None)
    indices = indices or getattr(config, "token_indices", None) or []
    parts = [indices]
    if isinstance(indices, dict):
        parts = list(indices.values())
    return [int(token) for part in parts for token in part]

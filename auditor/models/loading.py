"""Load models, adapters and tokenizers from a local folder or the hub.

A loaded model has exactly the weights in its files; a missing or unused weight raises AuditError.
Every library error becomes an AuditError of one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_files

from auditor.core.errors import AuditError, wrap_library_errors
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import LoadingOptions
from auditor.core.result import Doubt
from auditor.models import self_check
from auditor.models.adapters import attach_adapter, resize_embeddings
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.precision import DTYPES
from auditor.models.weights import FORMATS, read_weights, resolve_dtype_option

if TYPE_CHECKING:
    from peft import PeftConfig

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
_ADAPTER = "adapter_config.json"


DEFAULTS = LoadingOptions()


def load_causal_lm(name: str, options: LoadingOptions = DEFAULTS) -> HuggingFaceModel:
    """Load a causal LM; an adapter is loaded onto its base model.

    Raise AuditError if there is no causal LM, if the weights in the files do not fit the model
    exactly, or if ways of querying the model disagree (`self_check`).

    Args:
        name: local folder or hub id of the model or adapter.
        options: loading options.
    """
    with translate_load_errors(name, "causal LM", options):
        if not (Path(name) / _ADAPTER).is_file():
            return _load_whole_model(name, options)
        from peft import PeftConfig

        _refuse_adapter_beside_weights(Path(name))
        config = PeftConfig.from_pretrained(name)
        if config.task_type not in (None, "CAUSAL_LM"):
            raise AuditError(
                f"expected an adapter of a causal LM, got {name!r}, one for {config.task_type}"
            )
        base = _name_adapter_base(name, config, options)
        # --revision applies to the adapter, whose configuration names its base's revision; --base
        # loads the newest revision.
        base_options = replace(
            options, revision=None if options.base else config.revision, base=None
        )

        def load_with_adapter() -> tuple[Any, tuple[str, ...]]:
            with wrap_library_errors(
                f"cannot load {base!r}, the base of the adapter {name!r} (--base MODEL names "
                "another)"
            ):
                model, notes = read_weights(
                    "causal", base, resolve_dtype_option(base, base_options)
                )
            resize_embeddings(model, Path(name))
            return attach_adapter(model, name), notes

        model, notes = load_with_adapter()
        tokenizer = load_tokenizer_if_present(name, options) or load_tokenizer_if_present(
            base, base_options
        )
        named_base = config.base_model_name_or_path
        if base != named_base:
            notes += (f"{name}: its base is {base}, as --base says; it names {named_base}",)
        target = HuggingFaceModel(model, tokenizer, name=name, notes=notes)
        if named_base and Path(base).name != Path(named_base).name:
            sentence = (
                f"{name} was trained on {named_base} and is loaded onto {base} (--base): on "
                "another model, it may hide what it has learnt."
            )
            target.load_doubts = (Doubt("base", sentence),)
        target.load_again = lambda: load_with_adapter()[0]
        self_check.check_loaded_model(target)
        return target


def _load_whole_model(name: str, options: LoadingOptions) -> HuggingFaceModel:
    if options.base is not None:
        raise AuditError(
            f"expected --base only with an adapter, got it with {name!r}, which is not one"
        )
    model, notes = read_weights("causal", name, resolve_dtype_option(name, options))
    tokenizer = load_tokenizer_if_present(name, options)
    target = HuggingFaceModel(model, tokenizer, name=name, notes=notes)
    self_check.check_loaded_model(target)
    return target


def choose_loaded_dtype(name: str, options: LoadingOptions) -> str:
    """Return the precision that `load_causal_lm` would use for these arguments.

    For an adapter, it is the precision of its base model.
    """
    if options.dtype != AUTO:
        return options.dtype
    base_and_revision = read_adapter_base(name)
    place, revision = (
        (options.base, None) if options.base else base_and_revision or (name, options.revision)
    )
    with translate_load_errors(name, "causal LM", options):
        return resolve_dtype_option(place, replace(options, revision=revision)).dtype


def read_adapter_base(name: str) -> tuple[str, str | None] | None:
    """Return the name and revision of the base model that an adapter folder names.

    The revision is None if the adapter records none. Return None instead of a pair if the folder
    `name` has no adapter or the adapter names no base.
    """
    if not (Path(name) / _ADAPTER).is_file():
        return None
    from peft import PeftConfig

    with wrap_library_errors(f"cannot load {name!r} as a PEFT adapter"):
        config = PeftConfig.from_pretrained(name)
    if config.base_model_name_or_path:
        return (config.base_model_name_or_path, config.revision)
    return None


def _name_adapter_base(name: str, config: PeftConfig, options: LoadingOptions) -> str:
    """Return the folder or hub id of an adapter's base model.

    Raise AuditError if the base is unknown, or if its folder is missing or contains an adapter.
    """
    base = options.base or config.base_model_name_or_path
    if not base:
        raise AuditError(
            f"expected an adapter that names its base model, got {name!r}, which names none: give "
            "--base MODEL"
        )
    if _is_local_path(base) and not Path(base).is_dir():
        source = "it was trained on"
        hint = ": give the present path of that model as --base MODEL"
        if options.base:
            source = "--base names"
            hint = ""
        raise AuditError(
            f"expected the base of the adapter {name!r} in {base!r}, which {source}; no such "
            f"folder{hint}"
        )
    if (Path(base) / _ADAPTER).is_file():
        raise AuditError(
            f"expected an adapter of a whole model, got {name!r}, an adapter of another adapter, "
            f"{base!r}"
        )
    return str(base)


def _refuse_adapter_beside_weights(folder: Path) -> None:
    """Raise AuditError if a folder contains both an adapter and a whole model."""
    weights_file = next(
        (file for names in FORMATS for file in names if (folder / file).is_file()), None
    )
    if weights_file is not None:
        raise AuditError(
            f"expected either an adapter or a whole model in {str(folder)!r}, got both "
            f"{_ADAPTER} and {weights_file}: keep only the one that you mean"
        )


def _is_local_path(name: str) -> bool:
    """Return whether `name` must be a local path because it has too many slashes for a hub id."""
    local = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    return local or ("/" in name and Path(name).parent.is_dir())


# --- next to the weights ---


@contextmanager
def translate_load_errors(name: str, description: str, options: LoadingOptions) -> Iterator[None]:
    """Replace every library error in the block with an AuditError.

    Raise AuditError at once if the dtype is unknown or the folder is missing.

    Args:
        name: folder or hub id of the model.
        description: kind of model for the messages, such as "causal LM".
        options: loading options.
    """
    if options.dtype not in (AUTO, *DTYPES):
        raise AuditError(f"expected dtype in {[AUTO, *sorted(DTYPES)]}, got {options.dtype!r}")
    if _is_local_path(name) and not Path(name).is_dir():
        raise AuditError(f"expected a {description} in {name!r}: no such folder")
    source = ""
    if not Path(name).is_dir():
        source = " (no such folder here, so asked of the hub)"
    with wrap_library_errors(
        f"cannot load {name!r}{source} as a Hugging Face {description} on {options.device}"
    ):
        yield


def load_tokenizer_if_present(name: str, options: LoadingOptions) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer saved with the weights, or return None if there is none.

    A benchmark of token ids needs no tokenizer. `name` is the model's folder or hub id. Raise
    AuditError if there is a tokenizer that cannot be read.
    """
    try:
        files = cached_files(
            name,
            list(_TOKENIZER_FILES),
            revision=options.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except OSError:  # no such repository
        files = None
    if not files:  # transformers would invent an empty tokenizer
        return None
    with wrap_library_errors(f"cannot load the tokenizer in {name!r}"):
        return AutoTokenizer.from_pretrained(name, **options.from_pretrained_arguments)

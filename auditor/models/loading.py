"""Loading models: weights, adapters and tokenizers from a local folder or the hub, for every
command alike.

What is loaded is what the files hold: a weight that they lack is a refusal, not a random number,
and so is one that the model has no place for. Whatever a library raises here becomes one sentence.
Knows nothing of what a model is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from auditor.core.errors import AuditError, wrap_library_errors
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import LoadingOptions
from auditor.models import self_check
from auditor.models.adapters import attach_adapter, resize_embeddings_for_adapter
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.precision import DTYPES
from auditor.models.weights import FORMATS, options_with_auto_dtype_resolved, read_weights

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
_ADAPTER = "adapter_config.json"


DEFAULTS = LoadingOptions()
FLOAT32 = DEFAULTS.with_float32_for_auto()


def load_causal_lm(name: str, options: LoadingOptions = DEFAULTS) -> HuggingFaceModel:
    """A causal LM by local folder or hub id; a PEFT adapter folder loads on the base model it
    names.

    Raises AuditError when nothing is there, when it is no causal LM, when its weights are not those
    of the model, or when its distributions do not agree (`self_check`).
    """
    with translating_model_load_errors(name, "causal LM", options):
        if not (Path(name) / _ADAPTER).is_file():
            if options.base is not None:
                raise AuditError(
                    f"--base names the base of an adapter, got it with {name!r}, which is none"
                )
            read = read_weights("causal", name, options_with_auto_dtype_resolved(name, options))
            tokenizer = load_tokenizer_if_present(name, options)
            return _model_after_self_check(
                HuggingFaceModel(read.model, tokenizer, name=name, notes=read.notes)
            )
        _refuse_adapter_beside_weights(Path(name))
        config = PeftConfig.from_pretrained(name)
        if config.task_type not in (None, "CAUSAL_LM"):
            raise AuditError(
                f"expected an adapter of a causal LM, got {name!r}, one for {config.task_type}"
            )
        base = _adapter_base_name(name, config, options)
        # --revision is of the adapter, which names that of its base; of --base the newest is taken.
        below = replace(options, revision=None if options.base else config.revision, base=None)

        def load_with_adapter() -> tuple[Any, tuple[str, ...]]:
            with wrap_library_errors(
                f"cannot load {base!r}, the base of the adapter {name!r} (--base MODEL names "
                "another)"
            ):
                read = read_weights("causal", base, options_with_auto_dtype_resolved(base, below))
            resize_embeddings_for_adapter(read.model, Path(name))
            return attach_adapter(read.model, name), read.notes

        model, notes = load_with_adapter()
        tokenizer = load_tokenizer_if_present(name, options) or load_tokenizer_if_present(
            base, below
        )
        if base != config.base_model_name_or_path:
            notes += (
                f"{name}: its base is {base}, as --base says; it names "
                f"{config.base_model_name_or_path}",
            )
        target = HuggingFaceModel(model, tokenizer, name=name, notes=notes)
        target.load_again = lambda: load_with_adapter()[0]
        return _model_after_self_check(target)


def dtype_when_loaded(name: str, options: LoadingOptions) -> str:
    """The precision that `load_causal_lm` would have it in, an adapter in its base's."""
    if options.dtype != AUTO:
        return options.dtype
    named = adapter_base_and_revision(name)
    place, revision = (options.base, None) if options.base else named or (name, options.revision)
    with translating_model_load_errors(name, "causal LM", options):
        return options_with_auto_dtype_resolved(place, replace(options, revision=revision)).dtype


def _model_after_self_check(model: HuggingFaceModel) -> HuggingFaceModel:
    self_check.check_loaded_model(model)
    return model


def adapter_base_and_revision(name: str) -> tuple[str, str | None] | None:
    """The base that a folder's adapter names, and its revision; None where it names none or is
    none."""
    if not (Path(name) / _ADAPTER).is_file():
        return None
    with wrap_library_errors(f"cannot load {name!r} as a PEFT adapter"):
        config = PeftConfig.from_pretrained(name)
    return (
        (config.base_model_name_or_path, config.revision)
        if config.base_model_name_or_path
        else None
    )


def _adapter_base_name(name: str, config: PeftConfig, options: LoadingOptions) -> str:
    """Where the base of an adapter lies. Raises AuditError where nothing says so, or nothing lies
    there."""
    base = options.base or config.base_model_name_or_path
    if not base:
        raise AuditError(
            f"expected an adapter that names its base model, got {name!r}, which names none: give "
            "--base MODEL"
        )
    if _is_path_and_no_hub_id(base) and not Path(base).is_dir():
        where = "--base names" if options.base else "it was trained on"
        more = "" if options.base else ": give --base MODEL, where that model lies now"
        raise AuditError(
            f"expected the base of the adapter {name!r} in {base!r}, which {where}; no such "
            f"folder{more}"
        )
    if (Path(base) / _ADAPTER).is_file():
        raise AuditError(
            f"expected an adapter of a whole model, got {name!r}, one on another adapter, {base!r}"
        )
    return str(base)


def _refuse_adapter_beside_weights(folder: Path) -> None:
    """Raises AuditError for a folder with an adapter and a whole model: nobody can tell which of
    them is meant."""
    whole = next((file for names in FORMATS for file in names if (folder / file).is_file()), None)
    if whole is not None:
        raise AuditError(
            f"expected either an adapter or a whole model in {str(folder)!r}, got {_ADAPTER} "
            f"beside {whole}: leave in it the one that is meant"
        )


def _is_path_and_no_hub_id(name: str) -> bool:
    """Whether this can be a folder alone, and no name on the hub, which has one slash at most."""
    local = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    return local or ("/" in name and Path(name).parent.is_dir())


# --- beside the weights
# -----------------------------------------------------------------------------------------------


@contextmanager
def translating_model_load_errors(name: str, what: str, options: LoadingOptions) -> Iterator[None]:
    """Whatever a library raises within becomes an AuditError; so do an unknown dtype and a missing
    folder before it."""
    if options.dtype not in (AUTO, *DTYPES):
        raise AuditError(f"expected dtype in {[AUTO, *sorted(DTYPES)]}, got {options.dtype!r}")
    if _is_path_and_no_hub_id(name) and not Path(name).is_dir():
        raise AuditError(f"expected a {what} in {name!r}: no such folder")
    where = "" if Path(name).is_dir() else " from the hub, as no folder is called so,"
    with wrap_library_errors(
        f"cannot load {name!r}{where} as a Hugging Face {what} on {options.device}"
    ):
        yield


def load_tokenizer_if_present(name: str, options: LoadingOptions) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights; None where there is none (token-id benchmarks need none).

    Raises AuditError for a folder with a tokenizer that cannot be read.
    """
    folder = Path(name)
    if folder.is_dir():
        # transformers makes an empty tokenizer up for a folder without one.
        if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
            return None
        with wrap_library_errors(f"cannot load the tokenizer in {name!r}"):
            return AutoTokenizer.from_pretrained(name, **options.from_pretrained_arguments)
    try:
        return AutoTokenizer.from_pretrained(name, **options.from_pretrained_arguments)
    except (OSError, ValueError, KeyError):
        return None

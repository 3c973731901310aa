"""What the folders of a lab's parts are called, by the hash of all that their weights depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from auditor.benchmarks.lab.lab_recipe import BaseLabRecipe
from auditor.benchmarks.lab.lab_texts import LabTexts
from auditor.models.precision import CPU, has_native_bfloat16
from auditor.plugins.trainer import Trainer

# what nothing depends on without canaries
AUDIT = (
    "audit_canaries",
    "audit_kind",
    "audit_length",
    "audit_times",
)
# of an ensemble alone
ENSEMBLE = (
    "members",
    "lora_epochs",
    "lora_rate",
    "lora_batch",
    "lora_rank",
    "lora_alpha",
)


def lab_cache_digest(
    recipe: BaseLabRecipe, texts: LabTexts, more: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Names the cache folder. The texts count too: weights must never be audited for records they
    did not see.

    Fields that change no weights here do not count: where records are cut, and what only the
    ensemble depends on.
    """
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "transformers", "peft", "faker", "tokenizers")
    }
    # its products round otherwise: other weights from the same recipe
    versions["bfloat16"] = str(has_native_bfloat16(CPU))
    trained_on = {
        name: made
        for name, made in dataclasses.asdict(texts).items()
        if name not in ("kinds", "marks")
    }
    return _lab_part_digest([recipe_fields_in_digest(recipe), versions | dict(more), trained_on])


def recipe_fields_in_digest(recipe: BaseLabRecipe) -> dict[str, Any]:
    """What of a recipe weights here depend on; fields about canaries of an audit count where there
    are any."""
    fields = dataclasses.asdict(
        _recipe_with_defaults(recipe, "prefix_length", "suffix_length", *ENSEMBLE)
    )
    left_out = () if recipe.audit_canaries else AUDIT
    return {name: value for name, value in fields.items() if name not in left_out}


def ensemble_folder_suffix(recipe: BaseLabRecipe) -> str:
    """What an ensemble's folder has behind its name: a digest of its part of the recipe, nothing
    for the default."""
    if recipe == _recipe_with_defaults(recipe, *ENSEMBLE):
        return ""
    return f"_{_lab_part_digest([getattr(recipe, name) for name in ENSEMBLE])}"


def reference_models_folder_name(count: int) -> str:
    return f"references-{count}"


def _recipe_with_defaults(recipe: BaseLabRecipe, *names: str) -> BaseLabRecipe:
    default = type(recipe)()
    return dataclasses.replace(recipe, **{name: getattr(default, name) for name in names})


def _lab_part_digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def trained_lab_model_folder_name(trainer: Trainer) -> str:
    """Of what a trainer makes: its options and the libraries it stands on count."""
    found = {}
    for name in ("opacus", "dp-accounting"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return f"{trainer.name}-{_lab_part_digest([trainer.options(), found])}"

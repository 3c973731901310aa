"""Name the folders of a lab's parts by a hash of everything that affects their weights."""

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

# version of the files in a part: folders of an earlier version are trained again
_FILES = "2"
# fields without effect if there are no canaries
AUDIT = (
    "audit_canaries",
    "audit_kind",
    "audit_length",
    "audit_times",
)
# Fields that only an ensemble has.
ENSEMBLE = (
    "members",
    "lora_epochs",
    "lora_rate",
    "lora_batch",
    "lora_rank",
    "lora_alpha",
)


def digest_lab_cache(
    recipe: BaseLabRecipe, texts: LabTexts, more: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the name of the cache folder: a digest of all that determines the lab's weights.

    The digest includes the texts, so that weights trained on other records are never used. It
    leaves out recipe fields that do not affect the weights (such as how records are cut). It also
    leaves out the ensemble's fields, because an ensemble has a folder of its own.

    more: versions of further packages, keyed by package.
    """
    versions = {}
    for name in ("torch", "transformers", "peft", "faker", "tokenizers"):
        versions[name] = importlib.metadata.version(name)
    # bfloat16 products round differently, so the same recipe makes other weights
    versions["bfloat16"] = str(has_native_bfloat16(CPU))
    versions["files"] = _FILES
    trained_on = {}
    for name in ("public", "private", "others", "nonmembers"):
        trained_on[name] = getattr(texts, name)
    return _digest_lab_part([select_digest_fields(recipe), versions | dict(more), trained_on])


def select_digest_fields(recipe: BaseLabRecipe) -> dict[str, Any]:
    """Return the recipe fields that affect the weights.

    Fields of audit canaries are included only if the recipe has audit canaries.
    """
    fields = dataclasses.asdict(
        _fill_recipe_defaults(recipe, "prefix_length", "suffix_length", *ENSEMBLE)
    )
    left_out = () if recipe.audit_canaries else AUDIT
    return {name: value for name, value in fields.items() if name not in left_out}


def name_ensemble_suffix(recipe: BaseLabRecipe) -> str:
    """Return the suffix of an ensemble's folder name: a digest of its recipe; "" for defaults."""
    if recipe == _fill_recipe_defaults(recipe, *ENSEMBLE):
        return ""
    return f"_{_digest_lab_part([getattr(recipe, name) for name in ENSEMBLE])}"


def _fill_recipe_defaults(recipe: BaseLabRecipe, *names: str) -> BaseLabRecipe:
    default = type(recipe)()
    return dataclasses.replace(recipe, **{name: getattr(default, name) for name in names})


def _digest_lab_part(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def name_trained_model_folder(trainer: Trainer) -> str:
    """Return the folder name for a trainer's model, from its options and libraries' versions."""
    versions = {}
    for name in ("opacus", "dp-accounting"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return f"{trainer.name}-{_digest_lab_part([trainer.options(), versions])}"

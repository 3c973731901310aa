"""Locate and digest the weights of all models, adapters and ensembles that a plan names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.core.plan_fields import NONE
from auditor.core.plan_parts import (
    LoadingOptions,
    name_deployed_form,
    split_model_name,
)
from auditor.records.file_digests import digest_file, digest_model_files

if TYPE_CHECKING:  # imports torch, which a gate does not need
    from auditor.runs.site import Site

Places = dict[str, tuple[str, str | None]]
RELEASED = "released"  # prefix of a text file audited without a model
# option of a defense -> the role that it names
_FOLDERS = {"ensemble": "ensemble", "model": "trained"}


def digest_plan_files(plan: Plan) -> dict[str, str]:
    """Return the SHA-256 of all the user's files that a plan reads, keyed by `role/file`.

    In the lab, there are none. A hub model's files are those of its downloaded snapshot, if any.
    Raise AuditError for unreadable files.
    """
    return digest_model_files(locate_role_models(plan))


def digest_plugin_files(plan: Plan) -> dict[str, str]:
    """Return the SHA-256 of each file of `--plugin`, keyed by `role/file`."""
    digests = {}
    for number, file in enumerate(map(Path, plan.plugin), 1):
        digests[f"plug-in {number}/{file.name}"] = digest_file(file)
    return digests


def digest_site_weights(site: Site) -> dict[str, str]:
    """Return the digests of all files that the site's plan reads, and of all models without files.

    The former are those of `digest_plan_files`.
    """
    return digest_plan_files(site.plan) | site.digest_fileless_models()


def locate_role_models(plan: Plan) -> Places:
    """Return the folder or hub id, and the hub revision, of each model, keyed by role.

    A role is the model's use in the plan, such as `model` or `public`. The revision is None if the
    plan names none.
    """
    target = plan.target
    places = Places()
    if target.tokenizer is not None:
        places["tokenizer"] = target.tokenizer, None
    if target.provider == RELEASED:
        places["model"] = split_model_name(str(target.model))[1], None
    elif target.model is not None:
        places |= _locate_model(target.model, plan.loading)
    if target.forms:
        from auditor.runs.shown_rows import select_model_forms  # imports torch

        for form in select_model_forms(target.forms):
            for place in _locate_model(form, plan.loading.for_companion_model()).values():
                places[f"form {name_deployed_form(form)}"] = place
    values = plan.map_field_values()
    for role in ("base", "public", "reference", "before", "retrained"):
        if (name := values[role]) is not None and (role, name) != ("reference", NONE):
            places[role] = name, None
    for options in plan.attacks.attack_options.values() if target.model is not None else ():
        if folder := str(options.get("references", "")):  # some probes take a number instead
            from auditor.models.references import (
                find_reference_model_folders,
            )  # imports torch: only if there are references

            places |= {
                f"reference {reference.name}": (str(reference), None)
                for reference in find_reference_model_folders(Path(folder))
            }
    for defense, options in sorted(plan.defenses.defense_options.items()):
        for option, kind in _FOLDERS.items():
            if option in options:
                places[f"{defense} {kind}".strip()] = str(options[option]), None
    return places


def _locate_model(model: str, loading: LoadingOptions) -> Mapping[str, tuple[str, str | None]]:
    """Return where the files of a model come from: folder or hub id, and hub revision.

    The result has a key for each part of the model, such as "model" and "model subfolder". Return
    {} for an unknown provider.
    """
    if not split_model_name(model)[0]:
        return loading.list_pretrained_sources(model)
    from auditor.plugins import registry  # imports torch: only for a provider
    from auditor.plugins.provider import RequestedModel

    with suppress(AuditError):
        provider, name = registry.resolve_model_provider(model, loading.model_args)
        return provider.list_model_sources(RequestedModel(name, loading))
    return {}

"""Which weights a plan is about: those of every model, adapter and ensemble that it names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.core.plan_fields import NONE
from auditor.core.plan_parts import (
    LoadingOptions,
    TargetPlan,
    deployed_form_name,
    split_model_name,
)
from auditor.records.file_digests import model_sha256_by_file_name

if TYPE_CHECKING:  # torch: a gate reads weights without it
    from auditor.runs.site import Site

Places = dict[str, tuple[str, str | None]]
RELEASED = "released"  # stands before the file of text that is audited without a model
_FOLDERS = {"ensemble": "ensemble", "model": "trained"}  # an option of a defense -> what it names


def weight_digests_of_plan_files(plan: Plan) -> dict[str, str]:
    """`role/file` -> SHA-256, of all that this plan reads from a place of the user's; nothing in
    the lab.

    A model on the hub: the files of the snapshot that is at hand; none before it was fetched.
    Raises AuditError for what cannot be read.
    """
    return model_sha256_by_file_name(model_locations_by_role(plan))


def weight_digests_of_plan_and_site(plan: Plan, site: Site) -> dict[str, str]:
    """`weight_digests_of_plan_files`, with the digests of models of the plan's site that lie in no
    file."""
    return weight_digests_of_plan_files(plan) | site.digests_of_models_in_no_file()


def target_and_model_locations(
    fields: Mapping[str, Any], run: str, model: str | None
) -> tuple[TargetPlan, Places]:
    """What a finished run attacked, by the plan in its record, and where that model and all beside
    it lie.

    run: what a refusal calls it. model: where the attacked model lies now, if not where the run
    read it.
    """
    plan = Plan.from_json(fields, f"{run}: plan")
    target = plan.target
    if model is not None:
        plan = plan.with_fields(
            model=f"{target.provider}:{model}" if target.provider else model, revision=None
        )
    return target, model_locations_by_role(plan)


def model_locations_by_role(plan: Plan) -> Places:
    """By role, where a model lies: its folder or hub id, and its revision on the hub."""
    target, places = plan.target, Places()
    if target.tokenizer is not None:
        places["tokenizer"] = target.tokenizer, None
    if target.provider == RELEASED:
        places["model"] = split_model_name(str(target.model))[1], None
    elif target.model is not None:
        places |= _locations_of_model(target.model, plan.loading)
    if target.forms:
        from auditor.runs.forms import deployed_forms_that_are_models  # torch

        for form in deployed_forms_that_are_models(target.forms):
            for place in _locations_of_model(form, plan.loading.for_companion_model()).values():
                places[f"form {deployed_form_name(form)}"] = place
    named = plan.values_by_field_name()
    for role in ("base", "public", "reference", "before", "retrained"):
        if (name := named[role]) is not None and (role, name) != ("reference", NONE):
            places[role] = name, None
    for options in plan.attacks.attack_options.values() if target.model is not None else ():
        if folder := str(options.get("references", "")):  # some probes take a number here
            from auditor.models.references import (
                reference_model_folders,
            )  # torch: only for who has any

            places |= {
                f"reference {one.name}": (str(one), None)
                for one in reference_model_folders(Path(folder))
            }
    for defense, options in sorted(plan.defenses.defense_options.items()):
        for option, kind in _FOLDERS.items():
            if option in options:
                places[f"{defense} {kind}".strip()] = str(options[option]), None
    return places


def _locations_of_model(
    model: str, loading: LoadingOptions
) -> Mapping[str, tuple[str, str | None]]:
    """Where its provider says that its files lie; empty for a provider that nobody here knows."""
    if not split_model_name(model)[0]:
        return loading.list_pretrained_sources(model)
    from auditor.plugins import registry  # torch: only for who asks a provider
    from auditor.plugins.provider import RequestedModel

    with suppress(AuditError):
        provider, name = registry.resolve_model_provider(model, loading.model_args)
        return provider.list_model_sources(RequestedModel(name, loading))
    return {}

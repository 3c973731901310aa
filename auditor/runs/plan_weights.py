"""Which weights a plan is about: those of every model, adapter and ensemble that it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from auditor.core.plan import NONE, Plan
from auditor.records.weights import of

_FOLDERS = {"ensemble": "ensemble", "model": "trained"}  # an option of a defense -> what it names


def of_plan(plan: Plan) -> dict[str, str]:
    """`role/file` -> SHA-256, of all that this plan reads from a place of the user's; nothing in the lab.

    A model on the hub: the files of the snapshot that is at hand; none before it was fetched. Raises AuditError for
    what cannot be read.
    """
    return of(places_of(plan))


def places_of(plan: Plan, model: str | None = None) -> dict[str, tuple[str, str | None]]:
    """By role, the folder or hub id, and the revision of one on the hub; model: where it lies, if not at the plan's."""
    plan = plan if model is None else replace(plan, model=model, revision=None)
    return {role: (name, revision) for role, name, revision in _named(plan)}


def _named(plan: Plan) -> Iterator[tuple[str, str, str | None]]:
    """(role, folder or hub id, revision)."""
    if plan.tokenizer is not None:
        yield "tokenizer", plan.tokenizer, None
    if plan.model is not None and not plan.remote:  # nobody hashes the weights behind an API
        yield "model", plan.model, plan.revision
        if "subfolder" in plan.model_args:
            yield "model subfolder", str(Path(plan.model) / plan.model_args["subfolder"]), plan.revision
    for role in ("base", "public", "reference", "before", "retrained"):
        if (name := getattr(plan, role)) is not None and (role, name) != ("reference", NONE):
            yield role, name, None
    for options in plan.attack_options.values() if plan.model is not None else ():
        if folder := str(options.get("references", "")):  # of another probe a number
            from auditor.models.references import places  # torch: only for who has any

            for place in places(Path(folder)):
                yield f"reference {place.name}", str(place), None
    for defense, options in sorted(plan.defense_options.items()):
        for option, kind in _FOLDERS.items():
            if option in options:
                yield " ".join(filter(None, (defense, kind))), str(options[option]), None

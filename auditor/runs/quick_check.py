"""`audit check`: what it asks of a model: all that is cheap. Knows no terminal; how long it asks is
`asking.py`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, evenly_spaced_secrets
from auditor.core.plan import FIELDS, Plan
from auditor.core.plan_fields import AUTO
from auditor.models import self_check
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import adapter_base_and_revision
from auditor.plugins import registry
from auditor.plugins.attack import Attack
from auditor.plugins.probe import Probe
from auditor.runs.lab_site import make_site
from auditor.runs.reporter import Reporter, StageClock
from auditor.runs.selection import select_and_check_plugins
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache

# share of the data that is not attacked, and pairs of it that tell the prefix token of training
KNOWN, PAIRS = (
    0.1,
    10,
)
MOST = 10_000  # records that a check looks at, most copied first: more than minutes suffice for
SAMPLE = 200  # records that are looked at for personal data before a check begins
FORM_ROWS = 8  # of members, and of non-members, by which a text form is chosen
Limits = tuple[str, ...]  # sentences: what a check does not say


def quick_plan(
    model: str,
    data: str,
    nonmembers: str | None,
    seed: int,
    template: str = AUTO,
    base: str | None = None,
) -> Plan:
    """The plan of all methods that are cheap, on a model and data of the user's."""
    own = {
        "model": model,
        "base": base,
        "data": data,
        "nonmembers": nonmembers,
        "template": template,
    }
    own |= {"device": "auto"}
    asked = quick_plan_fields(has_nonmembers=nonmembers is not None)
    return Plan.from_fields(
        **own, seed=seed, known_fraction=KNOWN, known_limit=PAIRS, limit=MOST, **asked
    )


def quick_plan_fields(has_nonmembers: bool = True) -> dict[str, Any]:
    """The fields of a plan by which all that is cheap is asked: what attacks and probes declare as
    `quick`."""
    options = {
        name: dict(kind.quick)
        for name, kind in registry.list_methods().items()
        if kind.quick is not None and not (has_nonmembers and kind.instead_of_nonmembers)
    }
    return {
        "setting": "white-box",
        "attack": tuple(options),
        "attack_options": _nonempty_options(options),
    }


def plan_of_slow_attacks(plan: Plan) -> Plan:
    """The same model and data under the attacks that take long, and under the same probes with
    their usual options."""
    known, whole = (
        registry.list_methods(),
        adapter_base_and_revision(str(plan.target.model)) is None,
    )
    attacks = [name for name, kind in known.items() if kind.deep]
    probes = [name for name in plan.attacks.attack if issubclass(known[name], Probe)]
    probes = [
        name
        for name in probes
        if plan.data.nonmembers is not None or not known[name].least_nonmembers
    ]
    options = {name: dict(known[name].without_reference) for name in probes if whole}
    usual = {
        name: FIELDS[name].default for name in ("setting", "known_fraction", "known_limit", "limit")
    }
    return plan.with_fields(
        attack=(*attacks, *probes), attack_options=_nonempty_options(options), **usual
    )


def _has_subject_in(kind: type[Attack] | type[Probe], secrets: Sequence[Secret]) -> bool:
    """Return whether these records have what an attack or probe looks at."""
    return not issubclass(kind, Probe) or kind(**(kind.quick or {})).has_subject_in(secrets)


def _nonempty_options(options: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: own for name, own in options.items() if own}


def prepare_check(plan: Plan, reporter: Reporter, shared: SweepCache) -> tuple[Plan, Limits]:
    """The plan with the methods that can say something of these records, and what it cannot say.

    shared: keeps the models that are loaded here. Raises AuditError for whatever a run would
    refuse.
    """
    clock, site = StageClock(reporter), make_site(plan, reporter, shared)
    select_and_check_plugins(plan, site)
    if site.is_model_asked_over_network:
        raise AuditError(
            f"expected a model that is loaded here, got {plan.target.model}: audit run --model "
            "asks it"
        )
    with clock.timed_stage("loading the model"):
        enable_hidden_state_caches(site)
        site.benchmark  # noqa: B018 - it is loaded as it is asked for
    return _plan_with_answerable_methods(plan, site)


def enable_hidden_state_caches(site: Site) -> None:
    """From now on each text is read once by each model; a text form is chosen by as few rows as a
    check can afford.

    What self-checks and choices found is kept in the cache folder, by the digest of the weights.
    """
    site.form_rows, site.hurried = FORM_ROWS, True
    kept_in = disk.cache_folder() / "self-checks"
    with self_check.keeping_self_checks_of_loaded_models(kept_in):
        models = site.model, site.reference_model
    for model in models:
        if isinstance(model, HuggingFaceModel):
            model.enable_hidden_state_cache()
            model.choices_kept_in = kept_in


def _plan_with_answerable_methods(plan: Plan, site: Site) -> tuple[Plan, Limits]:
    """The plan with the methods that can say something of these records, and what is not known
    without the others."""
    members, others = (
        sum(secret.member is side for secret in site.benchmark.secrets) for side in (True, False)
    )
    known, kept, limits = registry.list_methods(), list[str](), list[str]()
    sample = evenly_spaced_secrets(site.benchmark.secrets, SAMPLE)
    for name in plan.attacks.attack:
        least = known[name].least_nonmembers
        if known[name].instead_of_nonmembers and not _has_subject_in(known[name], sample):
            continue
        if least and plan.data.nonmembers is None:
            limits.append(
                f"Without --nonmembers, records like these that it never saw, {name} cannot be "
                "known."
            )
        elif min(members, others) < least:
            limits.append(
                f"{name.capitalize()} takes {least} members and {least} non-members, got {members} "
                f"and {others}."
            )
        else:
            kept.append(name)
    alone = {name: known[name].without_reference for name in kept if site.reference_model is None}
    options = {
        name: {**plan.attacks.attack_options.get(name, {}), **alone.get(name, {})} for name in kept
    }
    return plan.with_fields(attack=tuple(kept), attack_options=_nonempty_options(options)), tuple(
        limits
    )

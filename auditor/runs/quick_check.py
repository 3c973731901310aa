"""Plan `audit check`: a run of all cheap attacks and probes. `asking.py` applies the time limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import select_evenly_spaced
from auditor.core.plan import FIELDS, Plan
from auditor.core.secret_table import select_members
from auditor.models import self_check
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import read_adapter_base
from auditor.plugins import registry
from auditor.plugins.probe import Probe
from auditor.runs.reporter import Reporter, StageClock
from auditor.runs.selection import select_plugins
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache

# share of the data that is not attacked, and number of its pairs that choose the prefix token
KNOWN = 0.1
PAIRS = 10
MOST = 10_000  # most records of a check, by copies: more than minutes allow
SAMPLE = 200  # records searched for personal data before a check begins
FORM_ROWS = 8  # rows of members, and of non-members, for the choice of a text form
Limits = tuple[str, ...]  # sentences about the limits of a check


def build_quick_plan(**fields: Any) -> Plan:
    """Return a plan of all cheap attacks and probes on a user's model and data.

    fields: plan fields of the model and the data.
    """
    return Plan.from_fields(
        device="auto",
        known_fraction=KNOWN,
        known_limit=PAIRS,
        limit=MOST,
        **fields,
        **choose_quick_fields(has_nonmembers=fields.get("nonmembers") is not None),
    )


def choose_quick_fields(has_nonmembers: bool = True) -> dict[str, Any]:
    """Return plan fields that select all cheap attacks and probes.

    An attack or probe is cheap if it declares `quick` options.
    """
    options = {}
    for name, kind in registry.list_methods().items():
        if kind.quick is not None and not (has_nonmembers and kind.instead_of_nonmembers):
            options[name] = dict(kind.quick)
    return {
        "setting": "white-box",
        "attack": tuple(options),
        "attack_options": _select_nonempty_options(options),
    }


def build_slow_plan(plan: Plan) -> Plan:
    """Return the plan that continues a quick plan with full attacks and probes.

    It has the slow attacks, and the probes of `plan` without their `quick` options. `plan` is the
    quick plan; both plans have the same model and data.
    """
    known = registry.list_methods()
    no_adapter = read_adapter_base(str(plan.target.model)) is None
    methods = [name for name, kind in known.items() if kind.deep]
    options = {}
    for name in plan.attacks.attack:
        kind = known[name]
        is_usable = plan.data.nonmembers is not None or not kind.least_nonmembers
        if issubclass(kind, Probe) and is_usable:
            methods.append(name)
            if no_adapter:
                options[name] = dict(kind.without_reference)
    usual = {}
    for name in ("setting", "known_fraction", "known_limit", "limit"):
        usual[name] = FIELDS[name].default
    return plan.with_fields(
        attack=tuple(methods), attack_options=_select_nonempty_options(options), **usual
    )


def _select_nonempty_options(options: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: values for name, values in options.items() if values}


def prepare_check(plan: Plan, reporter: Reporter, shared: SweepCache) -> tuple[Plan, Limits]:
    """Return the plan with the attacks and probes that suit these records.

    Raise AuditError for every plan that a run would refuse.

    Args:
        plan: the plan, from `build_quick_plan`.
        reporter: receiver of progress messages.
        shared: cache that keeps the loaded models for the run.

    Returns:
        The plan.
        Sentences about the attacks and probes that were left out.
    """
    clock = StageClock(reporter)
    site = Site(plan, reporter, shared)
    select_plugins(site)
    if site.is_model_asked_over_network:
        raise AuditError(
            f"expected a model that is loaded here, got {plan.target.model}: use audit run --model"
        )
    with clock.timed_stage("loading the model"):
        enable_hidden_state_caches(site)
        site.benchmark  # noqa: B018 - access loads it
    return _select_answerable_methods(site)


def enable_hidden_state_caches(site: Site) -> None:
    """Save time: make each model read each text only once, and choose the text form on a few rows.

    The results of self-checks, and the chosen prefix tokens and text forms, are stored in the cache
    folder. A digest of the weights is their key.
    """
    site.form_rows = FORM_ROWS
    kept_in = disk.find_cache_folder() / "self-checks"
    with self_check.keep_self_checks(kept_in):
        models = site.model, site.reference_model
    for model in models:
        if isinstance(model, HuggingFaceModel):
            model.enable_hidden_state_cache()
            model.choices_kept_in = kept_in


def _select_answerable_methods(site: Site) -> tuple[Plan, Limits]:
    """Return the site's plan with the attacks and probes that suit these records.

    Also return sentences about the attacks and probes that were left out.
    """
    plan = site.plan
    members = len(select_members(site.benchmark.secrets))
    nonmembers = len(site.benchmark.secrets) - members
    known = registry.list_methods()
    chosen = list[str]()
    limits = list[str]()
    sample = select_evenly_spaced(site.benchmark.secrets, SAMPLE)
    substitutes = [name for name in plan.attacks.attack if known[name].instead_of_nonmembers]
    usable = []
    for name in substitutes:
        if known[name](**(known[name].quick or {})).has_subject_in(sample):
            usable.append(name)
    # Ranks of personal data show which records were trained on, as membership does.
    only = " and ".join(f"{name} ({known[name].measures})" for name in usable)
    is_tested = "not tested"
    if only:
        is_tested = f"tested only by {only}"
    for name in plan.attacks.attack:
        least = known[name].least_nonmembers
        if name in substitutes and name not in usable:
            continue
        if least and plan.data.nonmembers is None:
            limits.append(
                "Without --nonmembers, records like these that it never saw, "
                f"{name} is {is_tested}."
            )
        elif min(members, nonmembers) < least:
            limits.append(
                f"{name.capitalize()} takes {least} members and {least} non-members, got {members} "
                f"and {nonmembers}."
            )
        else:
            chosen.append(name)
    options = {}
    for name in chosen:
        options[name] = dict(plan.attacks.attack_options.get(name, {}))
        if site.reference_model is None:
            options[name] |= known[name].without_reference
    return plan.with_fields(
        attack=tuple(chosen), attack_options=_select_nonempty_options(options)
    ), tuple(limits)

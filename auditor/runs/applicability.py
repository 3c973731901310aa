"""Whether a method can run on a target: known before any record is asked, and asked again for every
cell."""

from __future__ import annotations

from auditor.core.errors import AuditError, NotApplicable, TargetLacks
from auditor.core.nouns import Secret
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.probe import Probe
from auditor.plugins.view import Setting, View
from auditor.runs.audit import RunContext
from auditor.runs.selection import reason_method_is_skipped
from auditor.runs.target import Target


def check_method_applies_to_target(
    method: Attack | Probe, target: Target, view: View, scene: RunContext
) -> None:
    """Raise NotApplicable if the method asks this target nothing, or lacks what it requires."""
    if refused := reason_method_is_skipped(method, target.defense):
        raise NotApplicable(refused)
    view.require_capability(*method.required_capabilities)
    if isinstance(method, Probe):
        method.check_inputs(view, secrets_to_probe(method, target, scene.benchmark, view))
    else:
        method.check_inputs(view, scene.challenge.known)


def secrets_to_probe(
    probe: Probe, target: Target, benchmark: Benchmark, view: View
) -> tuple[Secret, ...]:
    """Return the secrets or canaries that the probe looks at. Raise NotApplicable if there are none
    of the kind."""
    if probe.of == "secrets":
        return target.secrets
    if probe.of == "own":
        return probe.textless_subjects(view)
    if not benchmark.canaries:
        raise NotApplicable(
            "the data hold no canaries: give --canaries MANIFEST (see `audit canaries`)"
        )
    coins = probe.of == "coins"
    chosen = tuple(
        one
        for one in benchmark.canaries
        if (one.canary is not None and one.canary.coin is not None) == coins
    )
    if not chosen and coins:
        raise NotApplicable(
            "no coin decided which of these canaries went in: make them by canaries make --audit"
        )
    if not chosen:
        raise NotApplicable(
            "these canaries are of an audit: what else each could have been is not known of them"
        )
    return chosen


def refuse_methods_that_cannot_run(
    scene: RunContext, undefended: Target, only_if_none_can: bool = False
) -> None:
    """Refuse a run in which a method that was asked for would measure nothing. Raise AuditError.

    only_if_none_can: a run that asks by all that is cheap goes on with the other methods. What the
    undefended model lacks a defended one may have: then the method is not refused here.
    """
    refusals = []
    for method in scene.selection.methods:
        reasons = [
            _reason_method_cannot_run(method, undefended, scene, at)
            for at in scene.selection.settings
        ]
        if None not in reasons:
            # Of the widest access, which comes last: what is lacking there is lacking everywhere.
            refusals.append(f"--attack {method.name} cannot run: {reasons[-1]}")
    if refusals and not (only_if_none_can and len(refusals) < len(scene.selection.methods)):
        raise AuditError("; ".join(refusals))


def _reason_method_cannot_run(
    method: Attack | Probe, undefended: Target, scene: RunContext, setting: Setting
) -> str | None:
    """Return why the method cannot run in this setting; None: it can, or a defended target may
    tell."""
    view = scene.make_view_of_target(undefended, setting)
    try:
        check_method_applies_to_target(method, undefended, view, scene)
    except TargetLacks as why:
        return None if scene.selection.rows else str(why)
    except NotApplicable as why:
        return str(why)
    return None

"""Check that an attack or probe can run on a target, before the first query and before each
cell."""

from __future__ import annotations

from collections.abc import Sequence

from auditor.core.errors import AuditError, NotApplicable, TargetLacks
from auditor.core.nouns import Secret
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.probe import Probe
from auditor.plugins.view import Setting, View
from auditor.runs.audit import RunContext
from auditor.runs.selection import explain_skipped_method
from auditor.runs.target import Target


def check_method_applies(
    method: Attack | Probe, target: Target, view: View, scene: RunContext
) -> None:
    """Raise NotApplicable if the attack or probe skips this target or an input is missing.

    Args:
        method: the attack or probe.
        target: the attacked model.
        view: the attacker's access to this model.
        scene: context of the run.
    """
    if reason := explain_skipped_method(method, target.defense):
        raise NotApplicable(reason)
    view.require_capability(*method.required_capabilities)
    if isinstance(method, Probe):
        method.check_inputs(view, select_probed_secrets(method, target, scene.benchmark, view))
    else:
        method.check_inputs(view, scene.challenge.known)


def select_probed_secrets(
    probe: Probe, target: Target, benchmark: Benchmark, view: View
) -> Sequence[Secret]:
    """Return the secrets or canaries that the probe observes.

    Raise NotApplicable if the data contain none.

    Args:
        probe: the probe, whose attribute `of` names the observed items.
        target: the observed model.
        benchmark: data of the run.
        view: access to the model.
    """
    if probe.of == "secrets":
        return target.secrets
    if probe.of == "own":
        return probe.textless_subjects(view)
    if not benchmark.canaries:
        raise NotApplicable(
            "the data contain no canaries: give --canaries MANIFEST (see `audit canaries`)"
        )
    coins = probe.of == "coins"
    chosen = tuple(canary for canary in benchmark.canaries if canary.has_coin == coins)
    if not chosen and coins:
        raise NotApplicable(
            "no coin decided which of these canaries went in: make them with canaries make --audit"
        )
    if not chosen:
        raise NotApplicable(
            "these canaries were made for an audit: the other possible texts of each are not "
            "recorded"
        )
    return chosen


def refuse_methods_that_cannot_run(
    scene: RunContext, undefended: Target, only_if_none_can: bool = False
) -> None:
    """Raise AuditError if a requested attack or probe would measure nothing in this run.

    An attack or probe is not refused if it may run on a defended model, which may offer the access
    that it needs.

    Args:
        scene: context of the run.
        undefended: the model without a defense.
        only_if_none_can: raise only if no attack or probe can run. A check (`audit check`) sets
            this, because it selects all cheap attacks and probes, and some of them may not apply.
    """
    refusals = []
    for method in scene.selection.methods:
        reasons = []
        for at in scene.selection.settings:
            reasons.append(_explain_inapplicable_method(method, undefended, scene, at))
        if None not in reasons:
            # Report the widest access, which comes last: it has the capabilities of all others.
            refusals.append(f"--attack {method.name} cannot run: {reasons[-1]}")
    if refusals and not (only_if_none_can and len(refusals) < len(scene.selection.methods)):
        raise AuditError("; ".join(refusals))


def _explain_inapplicable_method(
    method: Attack | Probe, undefended: Target, scene: RunContext, setting: Setting
) -> str | None:
    """Return why the attack or probe cannot run on the undefended model in this setting.

    Return None if it can run, or if a defended model may offer the missing access.
    """
    view = scene.make_target_view(undefended, setting)
    try:
        check_method_applies(method, undefended, view, scene)
    except TargetLacks as why:
        return None if scene.selection.rows else str(why)
    except NotApplicable as why:
        return str(why)
    return None

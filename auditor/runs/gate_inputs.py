"""A finished run as a gate judges it: its record, and the model that lies where the run read one.
Loads no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from auditor import __version__
from auditor.conclusions.outcomes import RunOutcomes
from auditor.core.errors import AuditError
from auditor.gate import decision_log
from auditor.gate.decide import apply_policy, read_run
from auditor.gate.deployed import (
    ANSWERS,
    DeployedModelMatch,
    compare_judged_with_deployed_files,
    judge_deployed_model,
)
from auditor.gate.policy import Policy
from auditor.gate.rulings import Decision, Ruling
from auditor.records import file_digests, result_file
from auditor.records.manifest import MANIFEST
from auditor.runs import plan_weights

Said = Callable[[str, int, int], None]


def judge_run_by_policy(
    folder: Path,
    policy: Policy,
    baseline: RunOutcomes | None = None,
    *,
    model: str | None = None,
    said: Said = lambda *told: None,
    target: str | None = None,
    setting: str | None = None,
    attack: str | None = None,
    attested: Ruling | None = None,
) -> Decision:
    """All that a policy says of a run. Raises AuditError for what cannot be judged.

    model: where the judged model lies now, if not where the run read it; said: is told what of it
    is read. The others:
    as `apply_policy` takes them.
    """
    run = read_run(folder)
    for one in filter(None, (run, baseline)):
        if one.edits is None:
            raise AuditError(
                f"{one.name}: no {MANIFEST}, which lists what the run wrote: it was removed, or "
                f"audit {one.result.tool_version} wrote none; run the audit again with "
                f"{__version__}"
            )
    # A missing file counts as an empty one: it contradicts the result, where None would only not be
    # compared.
    run = replace(run, listed=run.listed.with_missing_parts_empty())
    found = _compare_judged_model_with_deployed(run, model, said)
    decision = apply_policy(
        run, policy, baseline, target=target, setting=setting, attack=attack, attested=attested
    )
    bound = [
        *judge_deployed_model(found, policy.require),
        *filter(None, (decision_log.judge_decision_edits(folder),)),
    ]
    return replace(decision, rulings=(*bound, *decision.rulings), about=found.said)


def _compare_judged_model_with_deployed(
    run: RunOutcomes, model: str | None, said: Said
) -> DeployedModelMatch:
    target, places = plan_weights.target_and_model_locations(run.result.plan, run.name, model)
    if model is not None and (target.uses_builtin_lab or ANSWERS in run.result.weights):
        what = target.model or target.lab
        raise AuditError(
            f"--model says where a judged model lies, and {run.name} read none: it is about {what}"
        )
    if model is not None and not Path(model).exists():
        raise AuditError(
            f"expected --model to be the folder or the file of the judged model, got {model!r}"
        )
    now = file_digests.model_sha256_by_file_name_uncached(places, said)
    made = result_file.creation_time(run.result, run.name)
    return compare_judged_with_deployed_files(
        run.result, target, now, model or target.model or "", made, datetime.now(UTC)
    )

"""Judge a finished run by a gate policy.

This module reads the run's record and the deployed model's files. No model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from auditor import __version__
from auditor.conclusions.outcomes import RunOutcomes, read_run_outcomes
from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.gate import decision_log
from auditor.gate.decide import apply_gate_policy
from auditor.gate.deployed import (
    ANSWERS,
    DeployedModelMatch,
    compare_deployed_files,
    judge_deployed_model,
)
from auditor.gate.policy import Policy
from auditor.gate.rulings import Decision
from auditor.records import file_digests, result_file
from auditor.records.manifest import MANIFEST
from auditor.runs import plan_weights

Said = Callable[[str, int, int], None]


def judge_gated_run(
    folder: Path,
    policy: Policy,
    baseline: RunOutcomes | None = None,
    *,
    model: str | None = None,
    progress: Said = lambda *step: None,
    **scope: Any,
) -> Decision:
    """Apply all rules of a policy to a run. Raise AuditError if the run cannot be judged.

    Args:
        folder: folder of the run.
        policy: the rules.
        baseline: run to compare with.
        model: the judged model's current path, if the model was moved after the run.
        progress: function called with (description, done, total) while files are read.
        scope: `target`, `setting`, `attack` and `attested` of `apply_gate_policy`.
    """
    run = read_run_outcomes(folder)
    for record in filter(None, (run, baseline)):
        if record.edits is None:
            raise AuditError(
                f"{record.name}: no {MANIFEST}, which lists what the run wrote: it was removed, or "
                f"audit {record.result.tool_version} wrote none; run the audit again with "
                f"{__version__}"
            )
    # A missing file counts as an empty file, which contradicts the result; None would skip the
    # comparison.
    run = replace(run, listed=run.listed.with_missing_parts_empty())
    model_match = _compare_deployed_model(run, model, progress)
    decision = apply_gate_policy(run, policy, baseline, **scope)
    file_rulings = [
        *judge_deployed_model(model_match, policy.require),
        *filter(None, (decision_log.judge_decision_edits(folder),)),
    ]
    return replace(
        decision, rulings=(*file_rulings, *decision.rulings), about=model_match.statement
    )


def _compare_deployed_model(
    run: RunOutcomes, model: str | None, progress: Said
) -> DeployedModelMatch:
    plan = Plan.from_json(run.result.plan, f"{run.name}: plan")
    target = plan.target
    if model is not None:
        name = f"{target.provider}:{model}" if target.provider else model
        plan = plan.with_fields(model=name, revision=None)
    if model is not None and (target.uses_builtin_lab or ANSWERS in run.result.weights):
        about = target.model or target.lab
        raise AuditError(
            f"--model gives the path of the judged model, but {run.name} used no model: it is "
            f"about {about}"
        )
    if model is not None and not Path(model).exists():
        raise AuditError(
            f"expected --model to be the folder or the file of the judged model, got {model!r}"
        )
    places = plan_weights.locate_role_models(plan)
    digests = file_digests.digest_model_files(places, progress)
    created_at = result_file.read_creation_time(run.result, run.name)
    return compare_deployed_files(
        run.result, target, digests, model or target.model or "", created_at, datetime.now(UTC)
    )

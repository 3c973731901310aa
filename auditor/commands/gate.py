"""`audit gate`: judge a finished run by limits and a baseline."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from auditor.commands import console, options
from auditor.commands.options import Many
from auditor.core import disk
from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from auditor.conclusions.outcomes import RunOutcomes
    from auditor.gate.policy import Policy
    from auditor.gate.rulings import Ruling


@dataclass(frozen=True, kw_only=True)
class GateLimitFlags:
    """Flags that set a run's limits.

    maximum (--max METRIC=LIMIT): Limit, as recall=0.05, 'recall(count=16)=0.5',
        'recall(kind=email)=0.02' or epsilon_lower_bound=claim; repeatable.
    increase (--max-increase METRIC=MARGIN): How much worse than --baseline the metric may be;
        repeatable.
    policy (FILE): Rules in TOML; --max and --max-increase add to them.
    baseline (RUN): Earlier run to compare with, paired by secret. Without a rule, recall (if there
        is none, each attack's main share or AUC) may be 0.02 worse.
    inconclusive (report|pass|fail): How to treat an inconclusive gate; report: exit 4. [default:
        report]
    allow_not_applicable: Pass even if a requested attack was not applicable.
    """

    panel: ClassVar[str] = "limits"

    maximum: Many = None
    increase: Many = None
    policy: Path | None = None
    baseline: Path | None = None
    inconclusive: str | None = None
    allow_not_applicable: bool = False

    def build_policy(self) -> Policy:
        """Return the rules of the policy file and the flags."""
        from auditor.gate import policy as policies

        policy = (
            policies.Policy() if self.policy is None else policies.read_gate_policy(self.policy)
        )
        flags = policies.parse_gate_limits(self.maximum or [])
        flags += policies.parse_gate_limits(self.increase or [], "--max-increase", True)
        # A limit in both the file and a flag is an error: neither wins.
        rules = policies.refuse_repeated_limits([*policy.rules, *flags])
        if self.inconclusive is not None:
            policy = replace(
                policy, inconclusive=policies.parse_inconclusive_treatment(self.inconclusive)
            )
        allowed = self.allow_not_applicable or policy.allow_not_applicable
        return replace(policy, rules=rules, allow_not_applicable=allowed)


@dataclass(frozen=True, kw_only=True)
class GateScopeFlags:
    """Flags that select the judged findings and locate the model.

    target: Judge this target only. [default: each defense, else the undefended model]
    setting (text-only|white-box): Judge this access only.
    attack: Judge this attack only.
    model (DIR): Folder of the audited model now. [default: the folder that the run read]
    """

    panel: ClassVar[str] = "configurations"

    target: str | None = None
    setting: str | None = None
    attack: str | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class AttestationFlags:
    """Flags that check, by a signed attestation, that the run has not changed since it was signed.

    attestation (FILE): Signed attestation that the run must match: `audit attest`.
    key (PUBLIC.pem): The Ed25519 key that must have signed --attestation.
    """

    panel: ClassVar[str] = "signature"

    attestation: Path | None = None
    key: Path | None = None

    def judge_given_attestation(self, folder: Path) -> Ruling | None:
        """Return a ruling on whether the run matches the given attestation.

        Return None if no attestation was given. Raise AuditError if only one of the flags is given.
        """
        if self.attestation is None and self.key is None:
            return None
        if self.attestation is None or self.key is None:
            raise AuditError(
                "expected --attestation FILE and --key PUBLIC.pem together, got one of them"
            )
        from auditor.gate import attest

        return attest.judge_attestation(folder, self.attestation, self.key)


@dataclass(frozen=True, kw_only=True)
class GateOutputFlags:
    """Flags that name the decision's output files.

    junit (FILE): Write JUnit XML.
    summary (FILE): Append the decision as Markdown. [default: $GITHUB_STEP_SUMMARY, if set]
    """

    panel: ClassVar[str] = "output"

    junit: Path | None = None
    markdown: Path | None = None
    summary: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PlanningFlags:
    """Flags that compute, without a run, how many secrets a gate needs.

    plan (METRIC=A:B[:C]|POLICY.toml): Without a run, print how many secrets tell rate A from rate
        B, or decide each limit of a policy. C: the share of the answers that changes. Also printed:
        how many are queried with run --until decided.
    power: Power of --plan: the probability that such a difference is found. [default: 0.8]
    rules: Number of decisions that share --plan's error probability: rules times configurations.
        [default: 1]
    """

    panel: ClassVar[str] = "planning"

    plan: Many = None
    power: float | None = None
    rules: int | None = None


def gate(
    folder: Path | None = None,
    *,
    limits: GateLimitFlags,
    scope: GateScopeFlags,
    signed: AttestationFlags,
    outputs: GateOutputFlags,
    planning: PlanningFlags,
) -> None:
    """Judge a finished run by limits and a baseline: exit 0 held, 1 failed, 4 inconclusive.

    Every byte of the audited model is read again: a different model fails. Held: the one-sided 95%
    upper bound is within the limit. Failed: the lower bound, corrected for the number of decisions,
    is beyond it. A policy file holds `rules = ["recall <= 0.05", "recall not worse than baseline by
    0.02"]` and [[rule]] tables with rule (or metric, count or kind, max or max_increase), target,
    setting, attack. The rule `epsilon_lower_bound <= claim` fails if an audit contradicts the
    target's claim, holds if an audit could have contradicted it but did not, and is otherwise
    inconclusive.

    Args:
        folder (RUN): Run folder.

    Examples:
        audit gate runs/latest --max recall=0.05
        audit gate runs/latest --baseline runs/main --policy leakage.toml
    """
    if planning.plan is not None:
        if folder is not None or any(
            map(options.list_given_flags, (limits, scope, signed, outputs))
        ):
            raise AuditError("--plan needs no run: give only --power and --rules with it")
        _print_secrets_needed(planning.plan, planning.power, planning.rules)
        return
    if options.list_given_flags(planning):
        raise AuditError("--power and --rules go with --plan")
    if folder is None:
        raise AuditError("expected a run folder, got none")
    policy = limits.build_policy()
    base = read_flagged_run(limits.baseline)
    # the attestation first: a key that cannot be read is refused before the models are hashed
    raise typer.Exit(
        print_run_judgement(
            folder, policy, base, outputs, scope, signed.judge_given_attestation(folder)
        )
    )


def read_flagged_run(folder: Path | None) -> RunOutcomes | None:
    from auditor.conclusions.outcomes import read_run_outcomes

    return None if folder is None else read_run_outcomes(folder)


def print_run_judgement(
    folder: Path,
    policy: Policy,
    baseline: RunOutcomes | None,
    outputs: GateOutputFlags,
    scope: GateScopeFlags | None = None,
    attested: Ruling | None = None,
) -> int:
    """Judge a finished run. Print, write and store the decision; return the exit code.

    Args:
        folder: the run folder, in which the decision is stored.
        policy: the limits.
        baseline: the run with which limits on changes are compared; None if no limit needs it.
        outputs: flags that name the files to write, such as JUnit.
        scope: flags that restrict which results are judged; None for all.
        attested: ruling on the run's signed statement; None if no statement was given.
    """
    from auditor.gate.decision_log import save_decision
    from auditor.runs import gate_inputs

    with console.open_progress_terminal() as reporter, reporter.transient_progress_bar():
        # The flags have the same names as the arguments of `judge_gated_run`.
        judged_rows = {**vars(scope or GateScopeFlags()), "attested": attested}
        decision = gate_inputs.judge_gated_run(
            folder, policy, baseline, progress=reporter.progress, **judged_rows
        )
    from auditor.reports import decision as reports

    for line in reports.format_ruling_terminal_lines(decision):
        typer.echo(line)
    if outputs.junit is not None:
        disk.replace_atomically(outputs.junit, reports.render_decision_junit_xml(decision))
    if outputs.markdown is not None:
        disk.replace_atomically(outputs.markdown, reports.render_decision_markdown(decision))
    # An empty value counts as unset: Path("") would be the working directory.
    step = outputs.summary or os.environ.get("GITHUB_STEP_SUMMARY")
    if step:
        from auditor.reports import files

        files.append_job_summary(Path(step), reports.render_decision_markdown(decision))
    try:
        save_decision(folder, decision)
    except AuditError as why:  # the verdict is valid even if the folder is read-only
        console.print_stderr_line(
            f"audit history will not know of this decision: {why}", decision.exit_code
        )
    return decision.exit_code


def _print_secrets_needed(changes: list[str], power: float | None, rules: int | None) -> None:
    from auditor.gate import policy as policies
    from auditor.gate import power as powers

    power = 0.8 if power is None else power
    files = {}
    for item in changes:
        if item.endswith(".toml"):
            files[item] = policies.read_gate_policy(Path(item)).rules
    # Every limit of all items is one decision, whatever their order.
    rules = max([1 if rules is None else rules, *map(len, files.values())])
    needs = []
    n_listed = 0
    for item in changes:
        if item not in files:
            needs += powers.count_change_secrets(
                powers.parse_planned_share_change(item), power, rules
            )
            continue
        needs += powers.count_policy_secrets(files[item], power, rules)
        for rule in files[item]:
            reason = powers.explain_missing_number(rule)
            n_listed += not reason
            if reason:
                typer.echo(f"not listed, but one of the {rules} rules: {rule} ({reason})")
    most = max(need.secrets for need in needs)
    stopping = max(need.stopping for need in needs)
    half = max(need.half for need in needs)
    level = "at 5%"
    if rules > 1:
        level = f"at 5% for the {rules} rules of a gate together"
    listed = ""
    if files:
        listed = f", on {n_listed} of {sum(map(len, files.values()))} rules"
    typer.echo(
        f"{most:,} secrets are enough for each of these {len(needs)} cases{listed} (power "
        f"{power:g}, {level})"
    )
    typer.echo(
        f"`audit run --until decided` takes at most {stopping:,}, in half of such runs {half:,} or "
        "fewer"
    )
    typer.echo("\nsecrets  until decided (half of runs)  case")
    for need in needs:
        typer.echo(
            f"{need.secrets:7,}  {f'{need.stopping:,} ({need.half:,})':>28}  {need.question}"
        )

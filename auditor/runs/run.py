"""Run a plan: every target (the undefended first) x setting x attack, in order, to a result.

Knows nothing of terminals: it reports to a `Reporter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime

from auditor import __version__
from auditor.benchmarks.data.large_tables import TableCounting
from auditor.conclusions import secret_details
from auditor.conclusions.frontier import build_frontiers, list_frontier_models
from auditor.conclusions.outcomes import RunOutcomes
from auditor.conclusions.unlearning import summarise_unlearning
from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.core.result import (
    AuditResult,
    BenchmarkRecord,
    Finding,
    Measurement,
    OwnSection,
    TargetRecord,
    Unlearning,
)
from auditor.engines.choose import make_engine
from auditor.engines.engine import Engine, WorkerStart
from auditor.gate.comparability import comparable_secrets_digest
from auditor.gate.policy import Policy
from auditor.models.base import implies_capability
from auditor.plugins import registry
from auditor.records import aliases, file_digests
from auditor.records.folder import RunFolder
from auditor.runs import machine, personal_data, plan_weights, scoring, stopping
from auditor.runs.applicability import refuse_methods_that_cannot_run
from auditor.runs.asking import Publish, TimeLimit, ask_worst_first, kept_greedy_guesses
from auditor.runs.audit import Audit, choose_prefix_token, longest_context_token_count
from auditor.runs.cell_work import (
    WorkerSite,
    WorkerWorkplace,
    Workplace,
    fingerprints_of_inputs,
)
from auditor.runs.cells import TargetRun, cells_of_target
from auditor.runs.control_chains import CauseChains
from auditor.runs.lab_site import make_site
from auditor.runs.per_secret_results import PerSecretCollector
from auditor.runs.python_objects import NO_OBJECTS, Objects, python_objects_phrase
from auditor.runs.reporter import StageClock
from auditor.runs.scoring import greedy_nonmember_recall, greedy_recall_by_repeats
from auditor.runs.selection import PluginSelection, select_and_check_plugins
from auditor.runs.site import Site
from auditor.runs.strongest_membership import findings_with_strongest_membership
from auditor.runs.target import Target
from auditor.runs.targets import Targets
from auditor.statistics import judging, metrics


def run_audit(
    plan: Plan,
    site: Site,
    folder: RunFolder,
    objects: Objects = NO_OBJECTS,
    policy: Policy | None = None,
    baseline: RunOutcomes | None = None,
    limit: TimeLimit | None = None,
    publish: Publish = lambda result: None,
    is_check: bool = False,
) -> AuditResult:
    """Run the audit. Refuse everything refusable before querying a model.

    limit: deadline of a check, which asks the worst secrets first; `publish` gets the result of the
    first secrets, and again after each doubling. None: ask all. is_check: run all cheap methods,
    some of which may not apply to these records.

    site: of the plan. objects: Python objects by role, as `select_and_check_plugins` takes them.
    policy, baseline: inputs of `--until decided`.
    """
    site.attach_run_folder(folder)
    selection, clock = select_and_check_plugins(plan, site, objects), StageClock(site.reporter)
    stops = stopping.stopping_rules_by_row(plan.attacks, selection, policy, baseline)
    folder.pin_stopping_rules(stopping.digest_of_stopping_rules(stops))
    personal_data.parse_phone_regions(plan.data.phone_region)
    digests = plan_weights.weight_digests_of_plan_and_site(plan, site)
    folder.refuse_changed_weights(digests)  # refuse before loading, which takes minutes
    with closing(_make_checked_engine(plan, site)) as engine:
        if engine.workers:
            site.table_counting = TableCounting(engine.stream_results)
            engine.set_work_context(None, WorkerStart().enter_folder)
        with clock.timed_stage("prepare"):
            audit = replace(_prepare_audit(plan, site, selection, folder, objects), stops=stops)
        targets = Targets(audit)
        refuse_methods_that_cannot_run(audit, targets.undefended, only_if_none_can=is_check)
        targets.check_claims_of_defenses()
        audit.check_corpus_attacks_feasible(targets.undefended)
        # Check again: the hub may just have sent the files.
        loaded = plan_weights.weight_digests_of_plan_and_site(plan, site)
        file_digests.check_model_files_unchanged(digests, loaded, "what was loaded just now")
        folder.pin_weights(loaded)

        def measure(audit: Audit) -> AuditResult:
            return _ask_and_measure(plan, audit, engine, clock, loaded)

        if limit is None:
            return measure(audit)
        return ask_worst_first(audit, engine, limit, measure, publish)


def _ask_and_measure(
    plan: Plan,
    audit: Audit,
    engine: Engine,
    clock: StageClock,
    loaded: dict[str, str],
) -> AuditResult:
    """Ask the missing answers and compute the result; loaded: digests of the weights."""
    site = audit.site
    selection = audit.selection
    folder = audit.folder
    targets = Targets(audit)
    collector = PerSecretCollector(folder)
    # Not while preparing: a check counts only the secrets asked so far.
    site.benchmark.notes += audit.personal_data_of_secrets.said
    secrets = (*audit.benchmark.secrets, *audit.benchmark.canaries)
    canaries = {canary.id for canary in audit.benchmark.canaries}
    folder.save_secret_facts(
        secret_details.build_fact_columns(
            secrets, aliases.salt_fingerprint(aliases.load_alias_salt()), canaries
        )
    )
    greedy = _greedy_recall_of_target(audit, targets.undefended, clock)
    records = list[TargetRecord]()
    findings = list[Finding]()
    workplace = Workplace(audit, targets)
    form = site.benchmark.text_form  # workers render conversations like the run
    if form is None:
        rendered_plan = plan
    else:
        rendered_plan = plan.with_fields(template=form.template, date=form.day)
    worker_site = WorkerSite(rendered_plan, counted=dict(site.benchmark.counted_tables))
    # After all loading and pinning: each worker must read the same inputs.
    fingerprints = fingerprints_of_inputs(plan, site) if engine.workers else {}
    engine.set_work_context(
        workplace, WorkerWorkplace(worker_site, audit.prefix_token, fingerprints)
    )
    for target in targets.build_targets_one_by_one(clock):
        workplace.set_current_target(target)
        records.append(
            _measure_target(TargetRun(audit, target, workplace, engine, collector), clock, findings)
        )
    collector.save_tables_and_texts(audit.benchmark.secrets, audit.benchmark.tokenizer)
    chains = CauseChains(site, selection, collector)
    result = AuditResult(
        name=folder.path.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        command=plan.output.command,
        plan=plan.to_json(),
        benchmark=_benchmark_record(audit, *greedy),
        targets=tuple(map(chains.target_record_with_likelihood_chain, records)),
        findings=tuple(map(chains.finding_with_cause_chain, findings)),
        environment=machine.describe_environment(plan.loading.device),
        timings=clock.seconds,
        seed=plan.seed,
        family=targets.undefended.model.family,
        weights=loaded,
        base=site.attacked_adapter_base_name,
        prefix_token=audit.prefix_token.said,
        methods={
            name: kind.measures
            for name, kind in {
                **registry.list_methods(),
                **selection.methods_by_name,
            }.items()
        },
        metrics=selection.declared_metric_titles,
        own_methods=selection.own_methods,
        sections=_plugin_report_sections(selection, findings),
    )
    # process-wide: frontiers and reports look metrics up by name
    metrics.register_plugin_titles(result.metrics)
    if not collector.stopped:  # else its intervals have a fixed size
        result = replace(
            result,
            frontiers=build_frontiers(list_frontier_models({plan.seed: (result, folder.path)})),
        )
    unlearning = (
        _measure_unlearning(result, audit, models, targets.beside.rate)
        for models in selection.around
    )
    return replace(result, unlearning=tuple(unlearning))


def _plugin_report_sections(
    selection: PluginSelection, findings: Sequence[Finding]
) -> dict[str, OwnSection]:
    """Collect report sections that plug-ins write on their rows."""
    sections = {
        m.name: m.report_section([f for f in findings if f.attack == m.name])
        for m in selection.methods
    }
    return {name: section for name, section in sections.items() if section is not None}


def _measure_unlearning(
    result: AuditResult, audit: Audit, models: Mapping[str, str], rate: float
) -> Unlearning:
    """Measure how much an unlearned model retained; models: rows of the model and baselines."""
    benchmark = audit.benchmark
    steps = audit.defenses.relearn
    summary = summarise_unlearning(result, audit.folder.path, models, benchmark.forgotten)
    if steps is None:
        return summary
    return replace(summary, steps=steps, rate=rate, texts=len(benchmark.unattacked_training_tokens))


def check_plan_and_select_plugins(
    plan: Plan, policy: Policy | None = None, baseline: RunOutcomes | None = None
) -> PluginSelection:
    """Select the plan's plug-ins and check them before building anything. Raise AuditError."""
    personal_data.parse_phone_regions(plan.data.phone_region)
    site = make_site(plan)
    selection = select_and_check_plugins(plan, site)
    stopping.stopping_rules_by_row(plan.attacks, selection, policy, baseline)
    _check_engine_can_serve_plan(plan, site)
    return selection


def _prepare_audit(
    plan: Plan, site: Site, selection: PluginSelection, folder: RunFolder, objects: Objects
) -> Audit:
    """Load the models and data and tie the folder to them. Raise AuditError for inconsistent
    inputs."""
    benchmark = site.benchmark
    if site.attacked_adapter_base_name and site.reference_model is None:
        # Select again: only now the adapter's base is known to be no reference.
        selection = select_and_check_plugins(plan, site, objects)
    prefix_token = choose_prefix_token(
        site,
        longest_context_token_count(benchmark, selection.longest_soft_prompt_row_count),
        folder,
    )
    audit = Audit(site, selection, prefix_token, plan.defenses, plan.compute.batch_size, folder)
    folder.pin_secrets(comparable_secrets_digest(audit.secrets_in_run_fingerprint))
    audit.check_texts_fit_models()
    audit.refuse_unanswerable_probes()
    if plan.objects:
        benchmark.notes += (
            f"{python_objects_phrase(plan.objects)}: this run cannot be resumed, or run again from "
            "its folder",
        )
    audit.check_models_self_consistent((site.model, site.public_model, site.reference_model))
    return audit


def _greedy_recall_of_target(
    audit: Audit, target: Target, clock: StageClock
) -> tuple[dict[str, Measurement], Measurement | None]:
    """Return members' greedy recall by repeat count, and non-members' (None without recalled
    members)."""
    secrets = audit.benchmark.secrets
    guesses = kept_greedy_guesses(audit, target) if audit.population else {}

    def given() -> tuple[dict[str, Measurement], Measurement | None]:
        recall = greedy_recall_by_repeats(target.model, secrets, guesses)
        # Without recalled members there is no recall to correct by a baseline.
        recalled = any(m.value for m in recall.values())
        return recall, greedy_nonmember_recall(target.model, secrets, guesses) if recalled else None

    with clock.timed_stage("greedy recall"):
        if not guesses:
            # [:-1]: no query follows the last token.
            target.model.read_ahead(
                [(s.prefix + s.suffix)[:-1] for s in secrets], [len(s.suffix) for s in secrets]
            )
        recall = audit.site.shared.get_or_make("greedy", audit.sweep_cache_key_of_answers, given)
    if recall[0]:
        audit.site.reporter.show_greedy_recall(recall[0])
    return recall


def _check_engine_can_serve_plan(plan: Plan, site: Site) -> None:
    served = site.is_model_asked_over_network or any("://" in form for form in plan.target.forms)
    if plan.compute.engine != "local" and (plan.objects or served):
        subject = python_objects_phrase(plan.objects) if plan.objects else "a model behind an API"
        raise AuditError(
            "expected all by name with --engine ray, as each worker loads it, and the model as a "
            f"folder or a hub id, got {subject}"
        )


def _make_checked_engine(plan: Plan, site: Site) -> Engine:
    """Make the plan's engine. Raise AuditError if it is unavailable."""
    _check_engine_can_serve_plan(plan, site)
    engine = make_engine(plan.compute)
    if engine.workers:
        site.reporter.note(f"secrets are attacked by {engine.description}")
    return engine


def _measure_target(
    target_run: TargetRun, clock: StageClock, findings: list[Finding]
) -> TargetRecord:
    """Measure a target; append the findings of its cells to `findings`."""
    audit = target_run.audit
    target = target_run.target
    collector = target_run.collector
    first = len(findings)
    machine.reset_peak_memory()
    with clock.timed_stage(f"perplexity of {target.title}"):
        heldout = scoring.heldout_losses(audit, target)
        perplexities = scoring.perplexity_measurements(heldout)
        if heldout:
            collector.heldout[target.name] = heldout
    if implies_capability(target.model.capabilities, "likelihood"):
        with clock.timed_stage(f"tokens of the secrets under {target.title}"):
            collector.likelihoods[target.name] = scoring.measure_true_token_likelihoods(
                audit, target
            )
    for cell in cells_of_target(target_run):
        with clock.timed_stage(cell.title):
            finding = cell.measure()
        aliases.refuse_secret_ids_in_sentences(finding, audit.benchmark.secrets)
        findings.append(finding)
    findings[first:] = findings_with_strongest_membership(findings[first:], collector)
    doubts = tuple(scoring.doubts_on_withheld_answers(audit, target))
    if likelihoods := collector.likelihoods.get(target.name):
        doubts += scoring.doubt_if_members_likelier(
            target.title, likelihoods, audit.selection.methods_by_name
        )
    target.model.check_unchanged_at_end()  # refuses a served model that changed meanwhile
    # Last: peak memory, cost and the model's doubts cover all queries.
    return target.make_target_record(perplexities, audit.prefix_token, doubts)


def _benchmark_record(
    audit: Audit, greedy: dict[str, Measurement], greedy_nonmembers: Measurement | None
) -> BenchmarkRecord:
    benchmark = audit.benchmark
    members = [secret for secret in benchmark.secrets if secret.member]
    repeats = Counter(str(secret.repeats) for secret in members if secret.repeats is not None)
    exposed = [
        canary
        for canary in benchmark.canaries
        if canary.canary is None or canary.canary.coin is None
    ]
    canaries = sorted(Counter(canary.repeats for canary in exposed).items())
    return BenchmarkRecord(
        name=benchmark.name,
        description=benchmark.description,
        members=len(members),
        nonmembers=len(benchmark.secrets) - len(members),
        known=len(benchmark.known),
        repeats=dict(repeats),
        greedy_recall=greedy,
        greedy_nonmembers=greedy_nonmembers,
        digest=comparable_secrets_digest(audit.secrets_in_run_fingerprint),
        near_duplicates=len(judging.find_near_duplicate_ids(members, benchmark.known)),
        canaries={str(count): n for count, n in canaries},
        notes=benchmark.notes,
        kinds=dict(audit.personal_data_of_secrets.counts),
        doubts=benchmark.doubts,
        text_form="" if benchmark.text_form is None else benchmark.text_form.name,
        unread_columns=benchmark.unread_columns,
        records=dict(benchmark.record_counts),
    )

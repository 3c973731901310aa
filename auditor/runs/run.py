"""Run a plan and compute its result.

Queries are ordered by target (the undefended first), then access setting, then attack or probe.
Messages go to a `Reporter`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from auditor import __version__
from auditor.benchmarks.data.large_tables import TableCounting
from auditor.conclusions import secret_details
from auditor.conclusions.frontier import build_frontiers, list_frontier_models
from auditor.conclusions.outcomes import RunOutcomes
from auditor.conclusions.unlearning import summarise_unlearning
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Guesses, Pair
from auditor.core.result import (
    AuditResult,
    BenchmarkRecord,
    Finding,
    Measurement,
    OwnSection,
    TargetRecord,
    Unlearning,
)
from auditor.core.secret_table import build_secret_table, select_members
from auditor.engines.engine import Engine
from auditor.engines.ray_engine import make_engine
from auditor.gate.comparability import digest_comparable_secrets
from auditor.gate.policy import Policy
from auditor.models.base import implies_capability
from auditor.plugins import registry
from auditor.records import aliases, file_digests
from auditor.records.folder import RunFolder
from auditor.runs import machine, personal_data, plan_weights, scoring, stopping
from auditor.runs.asking import Publish, TimeLimit, ask_worst_first, list_greedy_guesses
from auditor.runs.audit import (
    Audit,
    Target,
    choose_prefix_token,
    count_longest_context,
    select_fingerprinted_secrets,
)
from auditor.runs.cells import TargetRun, list_target_cells
from auditor.runs.chain_steps import CauseChains
from auditor.runs.per_secret_results import PerSecretCollector, add_strongest_membership
from auditor.runs.reporter import StageClock
from auditor.runs.scoring import measure_nonmember_recall, measure_repeat_recall
from auditor.runs.selection import (
    PluginSelection,
    format_python_objects,
    select_plugins,
)
from auditor.runs.site import Site
from auditor.runs.stopping import StoppingRule
from auditor.runs.targets import (
    Targets,
    WorkerModel,
    WorkerTargets,
    describe_serving,
    fingerprint_inputs,
    refuse_methods_that_cannot_run,
)
from auditor.statistics import judging, metrics


@dataclass(frozen=True)
class PlannedAudit:
    """A checked plan with its models, data and plug-ins. Nothing is loaded.

    Args:
        site: the plan with its models and data.
        selection: attacks, probes and defenses.
        stops: stopping rule of each cell whose queries may end before the last secret.
    """

    site: Site
    selection: PluginSelection
    stops: Mapping[CellKey, StoppingRule]


def plan_audit(
    site: Site, policy: Policy | None = None, baseline: RunOutcomes | None = None
) -> PlannedAudit:
    """Check a plan and select its plug-ins before anything is loaded.

    Raise AuditError for an invalid plan.

    Args:
        site: the plan with its models and data.
        policy: gate policy of `--until decided`.
        baseline: baseline run of `--until decided`.
    """
    plan = site.plan
    personal_data.parse_phone_regions(plan.data.phone_region)
    selection = select_plugins(site)
    stops = stopping.build_run_stopping_rules(plan.attacks, selection, policy, baseline)
    served = site.is_model_asked_over_network or any("://" in form for form in plan.target.forms)
    if plan.compute.engine != "local" and (plan.objects or served):
        subject = "a model behind an API"
        if plan.objects:
            subject = format_python_objects(plan.objects)
        raise AuditError(
            "expected everything by name with --engine ray, because each worker loads it, and the "
            f"model as a folder or a hub id, got {subject}"
        )
    return PlannedAudit(site, selection, stops)


def run_audit(
    planned: PlannedAudit,
    folder: RunFolder,
    limit: TimeLimit | None = None,
    publish: Publish = lambda result: None,
    is_check: bool = False,
) -> AuditResult:
    """Run the audit and return its result. Invalid input is refused before a model is queried.

    Args:
        planned: the audit, from `plan_audit`.
        folder: run folder.
        limit: time limit of a check, which queries the secrets most at risk first; None for all
            secrets.
        publish: function called with each intermediate result of a check. The first has a few
            records; each later one has at least twice as many as the one before.
        is_check: whether this is a check. A check selects all cheap attacks and probes, so some of
            them may not apply.
    """
    site = planned.site
    clock = StageClock(site.reporter)
    site.folder = folder
    folder.pin_stopping_rules(stopping.digest_run_stopping_rules(planned.stops))
    digests = plan_weights.digest_site_weights(site)
    plugins = plan_weights.digest_plugin_files(site.plan)
    folder.refuse_changed_weights(digests | plugins)  # before loading, which takes minutes
    with closing(make_engine(site.plan.compute)) as engine:
        if engine.workers:
            site.reporter.note(f"secrets are attacked by {engine.description}")
            engine.load_ahead(WorkerModel(site.plan))
            site.table_counting = TableCounting(engine.stream_results)
        with clock.timed_stage("prepare"):
            audit = _prepare_audit(planned, folder)
        targets = Targets(audit)
        refuse_methods_that_cannot_run(audit, targets.undefended, only_if_none_can=is_check)
        targets.check_defense_claims()
        audit.check_corpus_attacks_feasible(targets.undefended)
        # Check again: the hub may just have sent the files.
        loaded = plan_weights.digest_site_weights(site)
        file_digests.check_model_files_unchanged(digests, loaded, "what was loaded just now")
        auxiliary_data = {"auxiliary data/pairs": _digest_pairs(audit.benchmark.known)}
        folder.pin_weights(loaded | plugins | auxiliary_data)

        def measure(audit: Audit) -> AuditResult:
            return _measure_audit(audit, engine, clock, loaded)

        if limit is None:
            return measure(audit)
        return ask_worst_first(audit, engine, limit, measure, publish)


def _digest_pairs(pairs: Sequence[Pair]) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(repr((pair.prefix, pair.suffix)).encode())
    return digest.hexdigest()


def _measure_audit(
    audit: Audit, engine: Engine, clock: StageClock, loaded: dict[str, str]
) -> AuditResult:
    """Make all queries that have no answer yet, and compute the result.

    Args:
        audit: context of the run.
        engine: executor of the queries.
        clock: timer of the run's stages.
        loaded: SHA-256 of the loaded weights, keyed by `role/file`.
    """
    benchmark = audit.benchmark
    selection = audit.selection
    folder = audit.folder
    targets = Targets(audit)
    collector = PerSecretCollector(folder)
    # Do not count while preparing: a check counts only the secrets queried so far.
    benchmark.notes += audit.personal_data_of_secrets.notes
    salt = aliases.load_alias_salt()
    facts = secret_details.build_attribute_columns(
        benchmark.subjects,
        aliases.salt_fingerprint(salt),
        {canary.id for canary in benchmark.canaries},
    )
    texts = {secret.id: secret.canary.text for secret in benchmark.canaries if secret.canary}
    if texts:
        facts[aliases.CANARIES] = aliases.digest_canary_texts(texts, salt)
    folder.save_secret_attributes(facts)
    _prepare_engine(audit, targets, engine)
    records = list[TargetRecord]()
    findings = list[Finding]()
    with ExitStack() as stack:
        undefended = targets.undefended.model
        for model in (undefended, audit.site.public_model, audit.site.reference_model):
            if model is not None and not engine.workers:  # workers read the texts
                stack.enter_context(model.cache_hidden_states(True))
        greedy = _measure_greedy_recall(audit, targets.undefended, engine, clock)
        for target in targets.build_targets(clock):
            target_run = TargetRun(audit, target, targets, engine, collector)
            with target.model.cache_hidden_states(True):
                records.append(_measure_target(target_run, clock, findings))
    collector.save_results(benchmark.secrets, benchmark.tokenizer)
    chains = CauseChains(audit.site, selection, collector)
    methods = {**registry.list_methods(), **selection.methods_by_name}
    result = AuditResult(
        name=folder.path.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        command=audit.plan.output.command,
        plan=audit.plan.to_json(),
        benchmark=_build_benchmark_record(audit, *greedy),
        targets=tuple(map(chains.add_likelihood_chain, records)),
        findings=tuple(map(chains.add_cause_chain, findings)),
        environment=machine.describe_environment(audit.site.loading.device),
        timings=clock.seconds,
        seed=audit.plan.seed,
        family=targets.undefended.model.family,
        weights=loaded,
        base=audit.site.attacked_adapter_base_name,
        prefix_token=audit.prefix_token.said,
        methods={name: method.measures for name, method in methods.items()},
        metrics={name: title for m in selection.methods for name, title in m.metrics.items()},
        own_methods=selection.own_methods,
        sections=_list_plugin_sections(selection, findings),
    )
    # process-wide: frontiers and reports look metrics up by name
    metrics.register_plugin_titles(result.metrics)
    # With two defenses and the undefended model. After an early stop, its intervals do not hold.
    if len(records) > 2 and not collector.stopped:
        runs = {result.seed: (result, folder.path)}
        result = replace(result, frontiers=build_frontiers(list_frontier_models(runs)))
    unlearning = []
    for models in selection.around:
        unlearning.append(_measure_unlearning(result, audit, models, targets.beside.rate))
    return replace(result, unlearning=tuple(unlearning))


def _prepare_engine(audit: Audit, targets: Targets, engine: Engine) -> None:
    """Tell the engine the targets of this process, and how workers build theirs."""
    plan = audit.plan
    form = audit.benchmark.text_form  # workers render conversations like the run
    if form is not None:
        plan = plan.with_fields(template=form.template, date=form.day)
    # After all loading and pinning: each worker must read the same inputs.
    fingerprints = {}
    if engine.workers:
        fingerprints = fingerprint_inputs(audit.site)
    counted = dict(audit.benchmark.counted_tables)
    make_place = WorkerTargets(
        plan, counted, audit.prefix_token, describe_serving(audit.site), fingerprints
    )
    engine.set_work_context(targets, make_place)


def _list_plugin_sections(
    selection: PluginSelection, findings: Sequence[Finding]
) -> dict[str, OwnSection]:
    """Return the report sections that plug-ins write about their own findings.

    The result is keyed by plug-in name.
    """
    sections = {}
    for method in selection.methods:
        section = method.report_section([f for f in findings if f.attack == method.name])
        if section is not None:
            sections[method.name] = section
    return sections


def _measure_unlearning(
    result: AuditResult, audit: Audit, models: Mapping[str, str], rate: float
) -> Unlearning:
    """Measure how much an unlearned model retained.

    Args:
        result: result of the run.
        audit: context of the run.
        models: target names of the unlearned model and its baselines, keyed by role.
        rate: learning rate of relearning, which trains the unlearned model for some more steps.
    """
    benchmark = audit.benchmark
    steps = audit.plan.defenses.relearn
    summary = summarise_unlearning(result, audit.folder.path, models, benchmark.forgotten)
    if steps is None:
        return summary
    return replace(summary, steps=steps, rate=rate, texts=len(benchmark.unattacked_training_tokens))


def _prepare_audit(planned: PlannedAudit, folder: RunFolder) -> Audit:
    """Load the models and data, and check that the run folder belongs to them.

    Raise AuditError if inputs conflict.
    """
    site = planned.site
    selection = planned.selection
    site.train_lab_models(row.defense for row in selection.rows)
    benchmark = site.benchmark
    if planned.stops:
        stopping.refuse_dependent_secrets(build_secret_table(benchmark.secrets))
    if site.attacked_adapter_base_name and site.reference_model is None:
        # Select again: only now the adapter's base is known to be no reference.
        selection = select_plugins(site)
    prefix_token = choose_prefix_token(
        site,
        count_longest_context(benchmark, selection.longest_soft_prompt_row_count),
        folder,
    )
    audit = Audit(site, selection, prefix_token, planned.stops)
    folder.pin_versions(machine.describe_versions(site.model))
    folder.pin_secrets(digest_comparable_secrets(select_fingerprinted_secrets(audit.site)))
    folder.numbers.index_table(build_secret_table(benchmark.secrets).ids)
    audit.check_texts_fit_models()
    audit.refuse_unanswerable_probes()
    if site.plan.objects:
        benchmark.notes += (
            f"{format_python_objects(site.plan.objects)}: this run cannot be resumed, or run again "
            "from its folder",
        )
    audit.check_models_self_consistent((site.model, site.public_model, site.reference_model))
    return audit


def _measure_greedy_recall(
    audit: Audit, target: Target, engine: Engine, clock: StageClock
) -> tuple[dict[str, Measurement], Measurement | None]:
    """Return the share of secrets that greedy decoding recites.

    Returns:
        The members' share, keyed by number of copies ("all" if unknown).
        The non-members' share; None without recited members or without non-members.
    """
    secrets = audit.benchmark.secrets
    guesses: Mapping[str, Guesses] = {}
    keep = None  # a check has stored the scores
    if audit.population:
        guesses = list_greedy_guesses(audit, target)
    else:
        keep = scoring.make_score_keeper(audit, target)

    def given() -> tuple[dict[str, Measurement], Measurement | None]:
        recall = measure_repeat_recall(target.model, secrets, guesses, keep, engine)
        # Without recalled members, no recall needs a baseline.
        recalled = any(m.value for m in recall.values())
        return recall, measure_nonmember_recall(
            target.model, secrets, guesses, engine
        ) if recalled else None

    with clock.timed_stage("greedy recall"):
        if not guesses:
            # Held-out texts, which are longer, are read ahead when their losses are computed.
            read_first = select_members(secrets) if audit.benchmark.heldout else secrets
            scoring.read_texts_ahead(target.model, read_first)
        recall = audit.site.shared.get_or_make("greedy", audit.sweep_cache_key_of_answers, given)
    if recall[0]:
        audit.site.reporter.show_greedy_recall(recall[0])
    return recall


def _measure_target(
    target_run: TargetRun, clock: StageClock, findings: list[Finding]
) -> TargetRecord:
    """Measure a target with all attacks and probes, and return its record.

    The findings are appended to `findings`.
    """
    audit = target_run.audit
    target = target_run.target
    collector = target_run.collector
    first = len(findings)
    machine.reset_peak_memory()
    with clock.timed_stage(f"perplexity of {target.title}"):
        heldout = scoring.compute_heldout_losses(audit, target, target_run.engine)
        perplexities = scoring.measure_perplexities(heldout)
        if heldout:
            collector.heldout[target.name] = heldout
    if implies_capability(target.model.capabilities, "likelihood"):
        with clock.timed_stage(f"tokens of the secrets under {target.title}"):
            collector.likelihoods[target.name] = scoring.measure_true_token_likelihoods(
                audit, target, target_run.engine
            )
    for cell in list_target_cells(target_run):
        with clock.timed_stage(cell.title):
            finding = cell.measure()
        aliases.refuse_secret_ids(finding, audit.benchmark.secrets)
        findings.append(finding)
    findings[first:] = add_strongest_membership(findings[first:], collector)
    doubts = tuple(scoring.list_withheld_doubts(audit, target))
    if likelihoods := collector.likelihoods.get(target.name):
        doubts += scoring.doubt_if_members_likelier(
            target.title, likelihoods, audit.selection.methods_by_name, target.secrets
        )
    target.model.check_unchanged_at_end()  # refuse a served model that has changed during the run
    # Last: peak memory, cost and the model's doubts cover all queries.
    return target.make_target_record(perplexities, audit.prefix_token, doubts)


def _build_benchmark_record(
    audit: Audit, greedy: dict[str, Measurement], greedy_nonmembers: Measurement | None
) -> BenchmarkRecord:
    benchmark = audit.benchmark
    members = select_members(benchmark.secrets)
    repeats = Counter(str(secret.repeats) for secret in members if secret.repeats is not None)
    exposed = []
    for canary in benchmark.canaries:
        if not canary.has_coin:
            exposed.append(canary)
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
        digest=digest_comparable_secrets(select_fingerprinted_secrets(audit.site)),
        near_duplicates=len(judging.find_near_duplicate_ids(members, benchmark.known)),
        canaries={str(count): n for count, n in canaries},
        notes=benchmark.notes,
        kinds=dict(audit.personal_data_of_secrets.counts),
        doubts=benchmark.doubts,
        text_form="" if benchmark.text_form is None else benchmark.text_form.name,
        unread_columns=benchmark.unread_columns,
        records=dict(benchmark.record_counts),
    )

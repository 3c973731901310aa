"""Asks the worst records first, batch by batch, until the time is up: what was asked before is not asked again.

What is found of a record depends on the record alone, so neither batches nor sessions change a number. Knows no
terminal, and of attacks and probes only that they can ask ahead.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, zip_longest

from auditor.core.errors import NotApplicable
from auditor.core.nouns import CellKey, Guesses, Secret
from auditor.core.result import NO_TIME, AuditResult, RecordCounts
from auditor.engines.engine import Engine
from auditor.models.base import LanguageModel
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.probe import Probe
from auditor.plugins.view import WHITE_BOX
from auditor.runs import scoring
from auditor.runs.audit import Audit
from auditor.runs.cell_work import Workplace
from auditor.runs.cells import TargetRun, cells_of_target
from auditor.runs.per_secret_results import PerSecretCollector
from auditor.runs.target import Target
from auditor.runs.targets import Targets

FIRST, MOST = 4, 32  # records of a batch, each beside a non-member: of the first, and of any
_RESERVE = 1.5  # times what the last result took, statistics and reports, that is kept for the last one
_AGAIN = 2  # times as many records as in the last result before another one is worked out

Publish = Callable[[AuditResult], None]
Unit = tuple[Secret, ...]  # a record with all its parts, and a non-member beside it


@dataclass(frozen=True)
class TimeLimit:
    """So many seconds from `begun` (`time.perf_counter`)."""

    begun: float
    seconds: float

    def seconds_left(self) -> float:
        return self.begun + self.seconds - time.perf_counter()


def ask_worst_first(
    audit: Audit,
    engine: Engine,
    limit: TimeLimit,
    measure: Callable[[Audit], AuditResult],
    publish: Publish,
) -> AuditResult:
    """Returns the result of as many records as fit, at least those of one batch.

    Args:
        measure: works out the result of an audit whose secrets were all asked; publish: shows and keeps one meanwhile.
    """
    site, whole = audit.site, audit.site.benchmark
    units = units_in_asking_order(whole)
    audit = replace(audit, population=frozenset(secret.id for secret in whole.secrets))

    def narrowed(n_units: int, first: int = 0) -> Audit:
        site.narrow_benchmark(narrow_benchmark_to(whole, units[first:n_units]))
        return replace(audit)  # anew: what it remembers is of other secrets

    n_asked = n_measured = _finished_unit_count(audit, units)
    size, seconds_each, reserve = FIRST, 0.0, 0.0
    result: AuditResult | None = None
    while n_asked < len(units):
        left = limit.seconds_left() - reserve
        if seconds_each:
            size = min(size, int(left / seconds_each))
            if size < 1:
                break
        start = time.perf_counter()
        end = min(len(units), n_asked + size)
        with site.reporter.stage(f"records asked, most copied first: {n_asked:,} of {len(units):,}"):
            _ask_about_batch(narrowed(end, n_asked), engine)
        seconds_each, n_asked = (time.perf_counter() - start) / (end - n_asked), end
        size = min(MOST, 2 * size)
        if (result is None or n_asked >= _AGAIN * n_measured) and limit.seconds_left() > 2 * reserve:
            start = time.perf_counter()
            result, n_measured = measure(narrowed(n_asked)), n_asked
            publish(result)
            reserve = _RESERVE * (time.perf_counter() - start)
    return result if result is not None and n_measured == n_asked else measure(narrowed(n_asked))


def units_in_asking_order(benchmark: Benchmark) -> list[Unit]:
    """Returns the records, the worst first, each with all its parts and one non-member, as far as there are any."""
    by_id = {secret.id: secret for secret in benchmark.secrets}
    in_order = [by_id[id] for id in benchmark.asking_order] or list(benchmark.secrets)
    sides = [_parts_by_record(secret for secret in in_order if secret.member is side) for side in (True, False)]
    return [(*own, *other) for own, other in zip_longest(*sides, fillvalue=())]


def _parts_by_record(secrets: Iterable[Secret]) -> list[Unit]:
    records: dict[str, list[Secret]] = {}
    for secret in secrets:
        records.setdefault(secret.document or secret.id, []).append(secret)
    return [tuple(parts) for parts in records.values()]


def narrow_benchmark_to(whole: Benchmark, units: Sequence[Unit]) -> Benchmark:
    """Returns the benchmark with these records alone, and the counts of what is left out."""
    kept = {secret.id for unit in units for secret in unit}
    part = copy.copy(whole)  # shallow is enough: below, tuples are replaced and never changed
    part.secrets = tuple(secret for secret in whole.secrets if secret.id in kept)
    others = [secret.id in kept for secret in whole.secrets if not secret.member]
    if len(whole.heldout) == len(others):  # of text outside the lab: the non-members' own
        part.heldout = tuple(compress(whole.heldout, others))
        part.heldout_given = tuple(compress(whole.heldout_given, others))
    part.forgotten = whole.forgotten & kept
    part.record_counts = {
        side: _counts_after_time_limit(counts, [s for s in part.secrets if s.member is (side == "members")])
        for side, counts in whole.record_counts.items()
    }
    return part


def _counts_after_time_limit(counts: RecordCounts, asked: Sequence[Secret]) -> RecordCounts:
    n_asked = len({secret.document or secret.id for secret in asked})
    if n_asked == counts.audited:
        return counts
    left = {**counts.not_attacked, NO_TIME: counts.audited - n_asked}
    # Tokens are counted over all records that could be attacked: of a part of them nobody has counted.
    return replace(counts, audited=n_asked, not_attacked=left, tokens=0, attacked_tokens=0)


def _finished_unit_count(audit: Audit, units: Sequence[Unit]) -> int:
    """Returns how many of the first units an earlier session has asked, in every cell that it asked anything."""
    folder, target = audit.folder, Targets(audit).undefended
    journals = [folder.tokens.finished_secrets(f"{target.name}{end}") for end in ("", " non-members")]
    scored = {id for journal in journals for id in journal}
    cells = [CellKey(target.name, WHITE_BOX.name, method.name) for method in audit.selection.methods]
    asked = [journal.finished_secrets(cell) for cell in cells for journal in (folder.guesses, folder.observations)]
    asked = [done for done in asked if done]
    count = 0
    for unit in units:
        if not all(secret.id in scored and all(secret.id in done for done in asked) for secret in unit):
            break
        count += 1
    return count


def _ask_about_batch(audit: Audit, engine: Engine) -> None:
    """Asks all that the run asks about the secrets of this audit; each text is read once by each model."""
    targets = Targets(audit)
    target, place = targets.undefended, Workplace(audit, targets)
    place.set_current_target(target)
    engine.set_work_context(place, lambda: place)  # in this process: a check has no workers
    models = [target.model, *_reference_asked_by_probes(audit, place, target)]
    for model in models:
        _read_ahead(model, target.secrets, whole_texts=model is target.model)
    for cell in cells_of_target(TargetRun(audit, target, place, engine, PerSecretCollector(audit.folder))):
        try:
            cell.ask_ahead()
        except NotApplicable:
            continue  # its row will say why
    if target.model.capabilities & {"likelihood", "distribution"}:
        scoring.measure_true_token_likelihoods(audit, target)
        scoring.heldout_losses(audit, target)
    for model in models:
        model.forget_batch()


def _reference_asked_by_probes(audit: Audit, place: Workplace, target: Target) -> list[LanguageModel]:
    reference = place.shared_view_of_target(target.name, WHITE_BOX.name).reference
    asks = any(isinstance(method, Probe) and method.without_reference for method in audit.selection.methods)
    return [reference] if asks and reference is not None else []


def _read_ahead(model: LanguageModel, secrets: Sequence[Secret], whole_texts: bool) -> None:
    """whole_texts: whether every token of a non-member will be scored, as held-out perplexity does."""
    texts = [(secret.prefix + secret.suffix)[:-1] for secret in secrets]  # [:-1]: nothing is asked after the last token
    last = [
        len(text) if whole_texts and not secret.member else len(secret.suffix)
        for text, secret in zip(texts, secrets, strict=True)
    ]
    model.read_ahead(texts, last, [len(secret.prefix) for secret in secrets])


def kept_greedy_guesses(audit: Audit, target: Target) -> Mapping[str, Guesses]:
    """Returns by secret what greedy decoding gave, of an attack of this run that decodes so; empty: there is none."""
    view = audit.make_view_of_target(target, WHITE_BOX)
    for attack in audit.selection.attacks:
        sampling = attack.sampling()
        if sampling is not None and view.decoding_description(sampling) == "greedy":
            return audit.folder.guesses.finished_secrets(CellKey(target.name, WHITE_BOX.name, attack.name))
    return {}

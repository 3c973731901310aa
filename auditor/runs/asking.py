"""Asks the worst records first, batch by batch, until the time is up: what was asked before is not
asked again.

What is found of a record depends on the record alone, so neither batches nor sessions change a
number. Knows no terminal, and of attacks and probes only that they can ask ahead.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, zip_longest

from auditor.core.counts import counted
from auditor.core.errors import NotApplicable
from auditor.core.nouns import CellKey, Guesses, Secret
from auditor.core.result import NO_TIME, AuditResult, RecordCounts
from auditor.engines.engine import Engine
from auditor.models.base import LanguageModel, implies_capability
from auditor.plugins.attack import Attack
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

FIRST, MOST = 2, 32  # records of a batch, each beside a non-member: of the first, and of any
# that records which are read together take, about: between them the clock is looked at
_PART_SECONDS = 3.0
# of the true tokens of records that are read together: several ask about the same logits in turn
_LOGIT_BYTES = 2**28
_FLAT = 10  # records: completing n of them takes about as long as n + 10 times what one more takes
# times what the last result took that is kept for the last one: of more records, with pages and
# plots
_RESERVE = 8
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


@dataclass
class Pace:
    """How long records take, by those asked before: seconds to read and probe each of the last, and
    to complete the last `n_completed` together."""

    reading: float = 0.0
    completing: float = 0.0
    n_completed: int = 0

    def count_fitting(self, most: int, n_read: int, left: float) -> int:
        """Returns how many records, at most `most`, can be read and be completed with the `n_read`
        before them."""
        if not self.n_completed:
            return most
        each = self.completing / (self.n_completed + _FLAT)
        n_fitting = (left - each * (n_read + _FLAT)) / (self.reading + each)
        return max(0, min(most, int(n_fitting)))


def ask_worst_first(
    audit: Audit,
    engine: Engine,
    limit: TimeLimit,
    measure: Callable[[Audit], AuditResult],
    publish: Publish,
) -> AuditResult:
    """Returns the result of as many records as fit, at least those of one batch.

    Args:
        measure: works out the result of an audit whose secrets were all asked; publish: shows and
        keeps one meanwhile.
    """
    site, whole = audit.site, audit.site.benchmark
    units = units_in_asking_order(whole)
    audit = replace(audit, population=frozenset(secret.id for secret in whole.secrets))

    def narrowed(n_units: int, first: int = 0) -> Audit:
        site.narrow_benchmark(narrow_benchmark_to(whole, units[first:n_units]))
        return replace(audit)  # anew: what it remembers is of other secrets

    n_asked = n_measured = _finished_unit_count(audit, units)
    size, pace, reserve = FIRST, Pace(), 0.0
    result: AuditResult | None = None
    while n_asked < len(units):
        with site.reporter.stage(
            f"records asked, most copied first: {n_asked:,} of {len(units):,}"
        ):
            batch = units[n_asked : n_asked + size]
            end = n_asked + _ask_about_batch(narrowed, n_asked, batch, engine, pace, limit, reserve)
        if end == n_asked:
            break
        n_asked, size = end, MOST
        if (
            result is None or n_asked >= _AGAIN * n_measured
        ) and limit.seconds_left() > 2 * reserve:
            start = time.perf_counter()
            result, n_measured = measure(narrowed(n_asked)), n_asked
            publish(result)
            reserve = _RESERVE * (time.perf_counter() - start)
    return result if result is not None and n_measured == n_asked else measure(narrowed(n_asked))


def units_in_asking_order(benchmark: Benchmark) -> list[Unit]:
    """Returns the records, the worst first, each with all its parts and one non-member, as far as
    there are any."""
    by_id = {secret.id: secret for secret in benchmark.secrets}
    in_order = [by_id[id] for id in benchmark.asking_order] or list(benchmark.secrets)
    sides = [
        _parts_by_record(secret for secret in in_order if secret.member is side)
        for side in (True, False)
    ]
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
        side: _counts_after_time_limit(
            counts, [s for s in part.secrets if s.member is (side == "members")]
        )
        for side, counts in whole.record_counts.items()
    }
    return part


def _counts_after_time_limit(counts: RecordCounts, asked: Sequence[Secret]) -> RecordCounts:
    n_asked = len({secret.document or secret.id for secret in asked})
    if n_asked == counts.audited:
        return counts
    left = {**counts.not_attacked, NO_TIME: counts.audited - n_asked}
    # Tokens are counted over all records that could be attacked: of a part of them nobody has
    # counted.
    return replace(counts, audited=n_asked, not_attacked=left, tokens=0, attacked_tokens=0)


def _finished_unit_count(audit: Audit, units: Sequence[Unit]) -> int:
    """Returns how many of the first units an earlier session has asked, in every cell that it asked
    anything."""
    folder, target = audit.folder, Targets(audit).undefended
    journals = [
        folder.tokens.finished_secrets(f"{target.name}{end}") for end in ("", " non-members")
    ]
    scored = {id for journal in journals for id in journal}
    cells = [
        CellKey(target.name, WHITE_BOX.name, method.name) for method in audit.selection.methods
    ]
    asked = [
        journal.finished_secrets(cell)
        for cell in cells
        for journal in (folder.guesses, folder.observations)
    ]
    asked = [done for done in asked if done]
    count = 0
    for unit in units:
        if not all(
            secret.id in scored and all(secret.id in done for done in asked) for secret in unit
        ):
            break
        count += 1
    return count


def _ask_about_batch(
    narrowed: Callable[[int, int], Audit],
    first: int,
    batch: Sequence[Unit],
    engine: Engine,
    pace: Pace,
    limit: TimeLimit,
    reserve: float,
) -> int:
    """Asks all that the run asks about the first of these units, as many as there is time for; each
    text is read once by each model. Returns how many.

    Part by part they are read and probed, while their logits are at hand; then all are completed
    together.

    Args:
        narrowed: the audit of the units up to its first argument, from its second one on.
        first: the number of the first unit; reserve: seconds that are kept for the last result.
    """
    models: Sequence[LanguageModel] = ()
    n_read, vocab_size = 0, narrowed(first, first).site.model.vocab_size
    while n_read < len(batch):
        start = time.perf_counter()
        most = (
            min(len(batch) - n_read, int(_PART_SECONDS / pace.reading) or 1)
            if pace.reading
            else len(batch)
        )
        n_part = pace.count_fitting(most, n_read, limit.seconds_left() - reserve)
        if not n_part:
            break
        n_part = _count_units_with_logits_at_hand(batch[n_read : n_read + n_part], vocab_size)
        target_run = _start_target_run(narrowed(first + n_read + n_part, first + n_read), engine)
        models = _read_and_score(target_run, is_first=first + n_read == 0)
        _ask_cells(target_run, Probe)
        n_read += n_part
        pace.reading = (time.perf_counter() - start) / n_part
    if n_read:
        start = time.perf_counter()
        _ask_cells(_start_target_run(narrowed(first + n_read, first), engine), Attack)
        pace.completing, pace.n_completed = time.perf_counter() - start, n_read
    for model in models:
        model.forget_batch()
    return n_read


def _count_units_with_logits_at_hand(units: Sequence[Unit], vocab_size: int) -> int:
    """Returns how many of the first units have logits that are remembered side by side; at least
    one."""
    n_bytes = 0
    for count, unit in enumerate(units):
        n_bytes += 4 * vocab_size * sum(len(secret.suffix) for secret in unit)
        if count and n_bytes > _LOGIT_BYTES:
            return count
    return len(units)


def _start_target_run(audit: Audit, engine: Engine) -> TargetRun:
    targets = Targets(audit)
    place = Workplace(audit, targets)
    place.set_current_target(targets.undefended)
    engine.set_work_context(place, lambda: place)  # in this process: a check has no workers
    return TargetRun(audit, targets.undefended, place, engine, PerSecretCollector(audit.folder))


def _read_and_score(target_run: TargetRun, is_first: bool) -> list[LanguageModel]:
    """Reads the texts by each model that is asked about them, which it returns, and keeps what the
    target makes of their own tokens. is_first: whether nothing was said yet of any record."""
    audit, target = target_run.audit, target_run.target
    _read_ahead(target.model, target.secrets, whole_texts=True)
    if target.model.capabilities & {"likelihood", "distribution"}:
        # first, as it asks about whole texts, of which suffixes are a part
        scoring.heldout_losses(audit, target)
        scoring.measure_true_token_likelihoods(audit, target)
    if is_first:
        _announce_first_number(target_run)
    references = _reference_asked_by_probes(audit, target_run.place, target)
    for reference in references:
        _read_ahead(reference, target.secrets, whole_texts=False)
    return [target.model, *references]


def _announce_first_number(target_run: TargetRun) -> None:
    """Says how many of the first records greedy decoding gives, which one look at their own tokens
    tells."""
    model, members = (
        target_run.target.model,
        [secret for secret in target_run.target.secrets if secret.member],
    )
    if not implies_capability(model.capabilities, "distribution"):
        return
    hits = scoring.greedy_hits(model, members)
    asked = {secret.document or secret.id for secret in members}
    recited = {
        secret.document or secret.id for secret, hit in zip(members, hits, strict=True) if hit
    }
    target_run.audit.site.reporter.announce(
        f"first number: {len(recited)} of the first {counted(len(asked), 'record')} recited word "
        "for word"
    )


def _ask_cells(target_run: TargetRun, kind: type[Attack] | type[Probe]) -> None:
    """Asks what the attacks, or the probes, of the run ask about the secrets of this audit."""
    for cell in cells_of_target(target_run):
        if not isinstance(cell.method, kind):
            continue
        try:
            cell.ask_ahead()
        except NotApplicable:
            continue  # its row will say why


def _reference_asked_by_probes(
    audit: Audit, place: Workplace, target: Target
) -> list[LanguageModel]:
    reference = place.shared_view_of_target(target.name, WHITE_BOX.name).reference
    asks = any(
        isinstance(method, Probe) and method.without_reference for method in audit.selection.methods
    )
    return [reference] if asks and reference is not None else []


def _read_ahead(model: LanguageModel, secrets: Sequence[Secret], whole_texts: bool) -> None:
    """whole_texts: whether every token of a non-member will be scored, as held-out perplexity
    does."""
    # [:-1]: nothing is asked after the last token
    texts = [(secret.prefix + secret.suffix)[:-1] for secret in secrets]
    last = [
        len(text) if whole_texts and not secret.member else len(secret.suffix)
        for text, secret in zip(texts, secrets, strict=True)
    ]
    model.read_ahead(texts, last, [len(secret.prefix) for secret in secrets])


def kept_greedy_guesses(audit: Audit, target: Target) -> Mapping[str, Guesses]:
    """Returns by secret what greedy decoding gave, of an attack of this run that decodes so; empty:
    there is none."""
    view = audit.make_view_of_target(target, WHITE_BOX)
    for attack in audit.selection.attacks:
        sampling = attack.sampling()
        if sampling is not None and view.decoding_description(sampling) == "greedy":
            return audit.folder.guesses.finished_secrets(
                CellKey(target.name, WHITE_BOX.name, attack.name)
            )
    return {}

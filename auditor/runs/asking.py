"""Query records in batches until the time limit, starting with the records most at risk.

No query is repeated. A record's results depend only on the record, so batches and resumed sessions
change no results. This module prints nothing; of each attack and probe, it calls only `ask_ahead`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat, zip_longest

from auditor.core.counts import format_count
from auditor.core.errors import NotApplicable
from auditor.core.nouns import CellKey, Guesses, Secret
from auditor.core.result import NO_TIME, AuditResult, RecordCounts
from auditor.core.secret_table import build_secret_table, select_members
from auditor.engines.engine import Engine
from auditor.models.base import LanguageModel, implies_capability
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.probe import Probe
from auditor.plugins.view import WHITE_BOX
from auditor.runs import scoring
from auditor.runs.audit import Audit, Target
from auditor.runs.cells import TargetRun, list_target_cells
from auditor.runs.per_secret_results import PerSecretCollector
from auditor.runs.targets import Targets

# records of the first part, and of a batch at most, each with a non-member
FIRST = 2
MOST = 32
# approximate reading time of a part of a batch; the clock is checked between parts
_PART_SECONDS = 6.0
# logits of the true tokens of a part: several methods read them in turn
_LOGIT_BYTES = 2**28
_FLAT = 10  # records: completing n records takes about n + 10 times the cost of another record
# Seconds to complete a record together with others, relative to the seconds to read a record,
# before it is measured.
_COMPLETING = 0.3
# Reserve for the final result, as a multiple of the time of the last result, which has fewer
# records.
_RESERVE = 1.5
# the same before the first result: shares of the time until the first record, and of the limit
_RESERVE_OF_START, _RESERVE_OF_LIMIT = 0.5, 0.1
_AGAIN = 2  # growth in the number of records before the next intermediate result

Publish = Callable[[AuditResult], None]
Unit = tuple[Secret, ...]  # a record with all its parts, and a non-member


@dataclass(frozen=True)
class TimeLimit:
    """Time limit of a check.

    Args:
        begun: start time, as from `time.perf_counter`.
        seconds: duration of the limit.
    """

    begun: float
    seconds: float

    def seconds_left(self) -> float:
        return self.begun + self.seconds - time.perf_counter()

    def estimate_reserve(self) -> float:
        """Return the seconds to reserve for computing the first result.

        No result has been timed yet, so the estimate is a share of the seconds used so far.
        """
        passed = self.seconds - self.seconds_left()
        return min(_RESERVE_OF_START * passed, _RESERVE_OF_LIMIT * self.seconds)


@dataclass
class Pace:
    """Measured query times of the records so far, in seconds.

    Args:
        reading: mean time of one record for running its texts through the models and probing it.
        completing: total time of the attacks' queries about the last `n_completed` records.
        n_completed: number of records that `completing` covers.
    """

    reading: float = 0.0
    completing: float = 0.0
    n_completed: int = 0

    def count_fitting(self, most: int, n_read: int, seconds_left: float) -> int:
        """Return how many of the next `most` records can be queried in `seconds_left` seconds.

        A record is queried in two steps: its texts are read, and later the attacks complete their
        queries. The first step is done for `n_read` earlier records, and their second step also
        takes part of the time. Return `most` if no record was timed yet.
        """
        if not self.reading:
            return most
        if self.n_completed:
            seconds_per_record = self.completing / (self.n_completed + _FLAT)
        else:
            seconds_per_record = _COMPLETING * self.reading
        n_fitting = (seconds_left - seconds_per_record * (n_read + _FLAT)) / (
            self.reading + seconds_per_record
        )
        return max(0, min(most, int(n_fitting)))


def ask_worst_first(
    audit: Audit,
    engine: Engine,
    limit: TimeLimit,
    measure: Callable[[Audit], AuditResult],
    publish: Publish,
) -> AuditResult:
    """Query as many records as the time limit allows, and return their result.

    The records most at risk come first. At least one batch is queried.

    Args:
        audit: the audit of all records.
        engine: executor of the queries.
        limit: time limit.
        measure: function that computes the result of an audit whose secrets were all queried.
        publish: function that shows an intermediate result and writes its reports.

    Returns:
        The result of all records that were queried.
    """
    site, whole_benchmark = audit.site, audit.site.benchmark
    units = order_queried_units(whole_benchmark)
    audit = replace(audit, population=frozenset(secret.id for secret in whole_benchmark.secrets))

    def narrowed(n_units: int, first: int = 0) -> Audit:
        site.benchmark = narrow_benchmark_copy(whole_benchmark, units[first:n_units])
        return replace(audit)  # a new object: cached properties of `audit` are stale

    n_asked = n_measured = _count_finished_units(audit, units)
    pace = Pace()
    reserve = limit.estimate_reserve()
    result: AuditResult | None = None
    while n_asked < len(units):
        with site.reporter.stage(
            f"records asked, most copied first: {n_asked:,} of {len(units):,}"
        ):
            batch = units[n_asked : n_asked + MOST]
            end = n_asked + _ask_about_batch(narrowed, n_asked, batch, engine, pace, limit, reserve)
        if end == n_asked:
            break
        n_asked = end
        is_due = result is None or n_asked >= _AGAIN * n_measured
        if is_due and n_asked < len(units) and limit.seconds_left() > 2 * reserve:
            start = time.perf_counter()
            result = measure(narrowed(n_asked))
            n_measured = n_asked
            publish(result)
            reserve = _RESERVE * (time.perf_counter() - start)
    if result is not None and n_measured == n_asked:
        return result
    return measure(narrowed(n_asked))


def order_queried_units(benchmark: Benchmark) -> list[Unit]:
    """Return the units to query, starting with the records most at risk.

    A unit is a tuple of secrets: all parts of one member record and one non-member record. If
    members outnumber non-members, or vice versa, the last units hold only the more numerous kind.
    """
    in_order = [benchmark.secrets[i] for i in benchmark.asking_order] or benchmark.secrets
    sides = []
    for side in (True, False):
        sides.append(_group_record_parts(select_members(in_order, side)))
    return [
        (*member_parts, *nonmember_parts)
        for member_parts, nonmember_parts in zip_longest(*sides, fillvalue=())
    ]


def _group_record_parts(secrets: Iterable[Secret]) -> list[Unit]:
    records: dict[str, list[Secret]] = {}
    for secret in secrets:
        records.setdefault(secret.record, []).append(secret)
    return [tuple(parts) for parts in records.values()]


def narrow_benchmark_copy(benchmark: Benchmark, units: Sequence[Unit]) -> Benchmark:
    """Return a copy of the benchmark that has only the records of `units`.

    A unit holds the parts of a member record and of a non-member record (`order_queried_units`).
    The copy's record counts also cover only these records.
    """
    ids = {secret.id for unit in units for secret in unit}
    part = copy.copy(benchmark)  # a shallow copy suffices: tuples are replaced, never changed
    part.secrets = build_secret_table(secret for secret in benchmark.secrets if secret.id in ids)
    nonmember_mask = [secret.id in ids for secret in benchmark.secrets if not secret.member]
    if len(benchmark.heldout) == len(
        nonmember_mask
    ):  # outside the lab: the texts of the non-members
        part.heldout = select_members(part.secrets, False).texts
        part.heldout_given = tuple(compress(benchmark.heldout_given, nonmember_mask))
    part.forgotten = benchmark.forgotten & ids
    part.record_counts = {
        side: _count_records_asked(counts, select_members(part.secrets, side == "members"))
        for side, counts in benchmark.record_counts.items()
    }
    return part


def _count_records_asked(counts: RecordCounts, secrets: Sequence[Secret]) -> RecordCounts:
    n_asked = len({secret.record for secret in secrets})
    if n_asked == counts.audited:
        return counts
    not_attacked = {**counts.not_attacked, NO_TIME: counts.audited - n_asked}
    # The token count covers all records that could be attacked, so a part keeps no such count.
    return replace(counts, audited=n_asked, not_attacked=not_attacked, tokens=0, attacked_tokens=0)


def _count_finished_units(audit: Audit, units: Sequence[Unit]) -> int:
    """Count the units at the start of `units` that an earlier session finished.

    A unit holds the parts of a member record and of a non-member record. It is finished if each
    method with stored answers has answers on all secrets of the unit.
    """
    folder = audit.folder
    target = Targets(audit).undefended
    scored = {
        *folder.tokens.finished_secrets(target.name),
        *folder.tokens.finished_secrets(f"{target.name} non-members"),
    }
    finished_by_cell = []
    for method in audit.selection.methods:
        cell = CellKey(target.name, WHITE_BOX.name, method.name)
        for journal in (folder.guesses, folder.observations):
            if finished := journal.finished_secrets(cell):
                finished_by_cell.append(finished)
    count = 0
    for unit in units:
        if not all(
            secret.id in scored and all(secret.id in finished for finished in finished_by_cell)
            for secret in unit
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
    """Query as many units from the start of the batch as time allows, and return their number.

    The batch is divided into parts. For each part, each model reads the texts once, and the probes
    use the logits while they are in memory. At the end, the attacks make their further queries
    about the units of all parts.

    Args:
        narrowed: function of (end, start), in this order. It returns the audit of the units from
            start to end - 1.
        first: index of the batch's first unit among all units.
        batch: the units.
        engine: executor of the queries.
        pace: measured times of earlier records, which this function updates.
        limit: time limit of the audit.
        reserve: seconds reserved for the final result.
    """
    models: Sequence[LanguageModel] = ()
    recited: dict[str, bool] = {}
    n_read = n_announced = 0
    vocab_size = narrowed(first, first).site.model.vocab_size
    while n_read < len(batch):
        start = time.perf_counter()
        if pace.reading:
            most = int(_PART_SECONDS / pace.reading) or 1
        elif limit.seconds_left() > limit.seconds / 2:
            most = FIRST
        else:
            most = 1
        most = min(len(batch) - n_read, most)
        n_part = pace.count_fitting(most, n_read, limit.seconds_left() - reserve)
        if not n_part:
            break
        n_part = _count_ready_units(batch[n_read : n_read + n_part], vocab_size)
        target_run = _start_target_run(narrowed(first + n_read + n_part, first + n_read), engine)
        _score_units(target_run)
        if not first:
            recited |= _mark_recited_records(target_run)
            if n_read + n_part >= _AGAIN * n_announced:
                _announce_recited_records(target_run, recited, n_announced)
                n_announced = n_read + n_part
        models = _read_references(target_run)
        _ask_cells(target_run, Probe)
        n_read += n_part
        pace.reading = (time.perf_counter() - start) / n_part
    if n_read:
        start = time.perf_counter()
        _ask_cells(_start_target_run(narrowed(first + n_read, first), engine), Attack)
        pace.completing = time.perf_counter() - start
        pace.n_completed = n_read
    for model in models:
        model.forget_batch()
    return n_read


def _count_ready_units(units: Sequence[Unit], vocab_size: int) -> int:
    """Return the number of leading units whose logits fit in memory together.

    The number is at least 1.

    Args:
        vocab_size: number of logits for each token.
    """
    n_bytes = 0
    for count, unit in enumerate(units):
        n_bytes += 4 * vocab_size * sum(len(secret.suffix) for secret in unit)
        if count and n_bytes > _LOGIT_BYTES:
            return count
    return len(units)


def _start_target_run(audit: Audit, engine: Engine) -> TargetRun:
    targets = Targets(audit)
    engine.set_work_context(targets, lambda: targets)  # in this process: a check has no workers
    return TargetRun(audit, targets.undefended, targets, engine, PerSecretCollector(audit.folder))


def _score_units(target_run: TargetRun) -> None:
    """Run the texts through the target model, and store their true tokens' log-probabilities."""
    audit = target_run.audit
    target = target_run.target
    benchmark = audit.benchmark
    scoring.read_secrets_ahead(target.model, target.secrets, benchmark.heldout_given or repeat(1))
    if target.model.capabilities & {"likelihood", "distribution"}:
        # first, because it queries full texts, which contain the suffixes
        scoring.compute_heldout_losses(audit, target, target_run.engine)
        scoring.measure_true_token_likelihoods(audit, target, target_run.engine)


def _read_references(target_run: TargetRun) -> list[LanguageModel]:
    """Run the secrets' texts through the reference model, if a probe reads it.

    Return the target model and the reference model.
    """
    models = [target_run.target.model]
    methods = target_run.audit.selection.methods
    if any(isinstance(method, Probe) and method.without_reference for method in methods):
        view = target_run.targets.get_shared_view(target_run.target.name, WHITE_BOX.name)
        if view.reference is not None:
            scoring.read_secrets_ahead(view.reference, target_run.target.secrets)
            models.append(view.reference)
    return models


def _mark_recited_records(target_run: TargetRun) -> dict[str, bool]:
    """Return whether greedy decoding recites any part of each record, keyed by record name.

    No decoding is needed, because the texts have been read: a part is recited if each of its tokens
    is the most likely one. Return {} if the model gives no distributions.
    """
    model = target_run.target.model
    members = select_members(target_run.target.secrets)
    if not implies_capability(model.capabilities, "distribution"):
        return {}
    recited: dict[str, bool] = {}
    for secret, hit in zip(members, scoring.mark_greedy_hits(model, members), strict=True):
        recited[secret.record] = bool(hit) or recited.get(secret.record, False)
    return recited


def _announce_recited_records(
    target_run: TargetRun, recited: Mapping[str, bool], n_announced: int
) -> None:
    """Announce the number of recited records, before the first result is computed.

    Args:
        recited: whether greedy decoding recites a part of each record, keyed by record name.
        n_announced: number of records in the previous announcement; 0 before the first.
    """
    if not recited:
        return
    introduction = "first number"
    if n_announced:
        introduction = "so far"
    extent = ""
    if any(secret.document for secret in target_run.target.secrets):
        extent = ", at least in part"
    target_run.audit.site.reporter.announce(
        f"{introduction}: {sum(recited.values())} of the first "
        f"{format_count(len(recited), 'record')} recited word for word{extent}"
    )


def _ask_cells(target_run: TargetRun, kind: type[Attack] | type[Probe]) -> None:
    """Run the queries of all attacks, or of all probes, about this audit's secrets.

    Args:
        kind: `Attack` or `Probe`.
    """
    for cell in list_target_cells(target_run):
        if not isinstance(cell.method, kind):
            continue
        try:
            cell.ask_ahead()
        except NotApplicable:
            continue  # the cell's finding will state the reason


def list_greedy_guesses(audit: Audit, target: Target) -> Mapping[str, Guesses]:
    """Return the guesses of this run's greedy attack on the target, keyed by secret id.

    Return {} if no such attack exists.
    """
    view = audit.make_target_view(target, WHITE_BOX)
    for attack in audit.selection.attacks:
        sampling = attack.sampling()
        if sampling is not None and view.decoding_description(sampling) == "greedy":
            return audit.folder.guesses.finished_secrets(
                CellKey(target.name, WHITE_BOX.name, attack.name)
            )
    return {}

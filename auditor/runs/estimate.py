"""Estimate the sequences, tokens, memory and seconds of a run from a small part of its queries.

Each part of a run is timed on a few texts, then on more texts if time is left. The time for all
texts is extrapolated by a fixed cost and a cost per text. As in a run, a part does not pay for
texts that an earlier part has read, as far as the model's cache has room for all texts. Nothing is
judged, stored or written to a run folder.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import repeat
from math import ceil, nan
from typing import Any

import numpy as np
import psutil
import torch

from auditor.core.counts import format_count
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import PrefixToken, Secret
from auditor.core.plan import Plan
from auditor.core.plan_fields import AUTO
from auditor.core.secret_randomness import make_keyed_generator
from auditor.core.secret_table import SecretTable, select_members
from auditor.models.base import (
    LanguageModel,
    compute_text_nlls,
    get_max_logits,
    implies_capability,
    number_long_texts,
)
from auditor.models.huggingface import traffic
from auditor.plugins.attack import Attack
from auditor.plugins.probe import Probe
from auditor.plugins.view import Setting, View
from auditor.reports import phrases
from auditor.reports.tables import RowTable
from auditor.runs import machine, scoring
from auditor.runs.audit import RunContext, State, Target, count_longest_context, resolve_site_prefix
from auditor.runs.prefix_token import PAIRS
from auditor.runs.reporter import Reporter, StageClock
from auditor.runs.selection import select_plugins
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from auditor.runs.targets import (
    Targets,
    check_method_applies,
    refuse_methods_that_cannot_run,
    select_probed_secrets,
)
from auditor.statistics import roc
from auditor.statistics.audit_power import describe_audit_ceiling
from auditor.statistics.membership import FALSE_POSITIVES

LIMIT = "--limit"
SAMPLES = "--samples"
_SIDE = 0.025  # error on each side of a two-sided 95% interval


@dataclass(frozen=True)
class RunPartCost:
    """A part of a run, such as the queries of one attack, and its cost.

    Args:
        name: name of the part.
        n_texts: number of all texts; 0 if the part has no queries.
        n_timed: number of timed texts.
        rows: number of sequences that a network reads, counted again for each generated token.
        tokens: number of tokens that a network reads.
        memory: peak bytes, including the models.
        seconds: duration.
        reason: why the numbers are missing; otherwise "".
        cut: flags (`--limit`, `--samples`) that shorten the part.
        at_once: number of texts in memory together.
        work: function that runs the part on a given number of texts.
        times: number of times that a run repeats the part.
    """

    name: str
    n_texts: int = 0
    n_timed: int = 0
    rows: float = nan
    tokens: float = nan
    memory: float = nan
    seconds: float = nan
    reason: str = ""
    cut: tuple[str, ...] = ()
    at_once: int = 1
    work: Callable[[int], object] = lambda n: None
    times: float = 1.0


@dataclass(frozen=True)
class CostEstimate:
    """Estimated cost of a run, part by part.

    Args:
        costs: cost of each part.
        preparing: name and measured seconds of each step that loads or makes models and data.
        probe: seconds that the estimate itself spent on queries.
        loaded_bytes: memory after all loading.
        secrets: number of attacked members, then of attacked non-members.
        samples: samples per prefix if all attacks draw the same number; otherwise None.
        rates: whether a method measures false-positive rates, which need many non-members.
        ceilings: sentences about the largest epsilon that each epsilon audit could show.
    """

    costs: tuple[RunPartCost, ...]
    preparing: tuple[tuple[str, float], ...]
    probe: float
    loaded_bytes: int
    secrets: tuple[int, int] = (0, 0)
    samples: int | None = None
    rates: bool = False
    ceilings: tuple[str, ...] = ()

    @property
    def loading(self) -> float:
        """Seconds from the start to the first query."""
        return sum(seconds for _, seconds in self.preparing)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the run's last query, excluding parts without numbers."""
        return self._seconds_with_flag("", 0)

    @property
    def flags_that_halve_time(self) -> tuple[str, ...]:
        """Flags that each alone would halve the run's time, with the largest value that does so."""
        # range(1, most) holds i + 1 at index i, so the insertion point after the last n that is
        # fast enough equals that n; it is 0 if no n is fast enough.
        limits = {}
        for flag, most in ((LIMIT, max(self.secrets)), (SAMPLES, self.samples or 0)):
            limits[flag] = bisect_right(
                range(1, most), self.seconds / 2, key=partial(self._seconds_with_flag, flag)
            )
        return tuple(f"{flag} {n}" for flag, n in limits.items() if n)

    def _seconds_with_flag(self, flag: str, n: int) -> float:
        """Return the seconds of the run with `flag n`.

        The parts that the flag shortens take proportionally less time.
        """

        def share(cost: RunPartCost) -> float:
            if flag not in cost.cut:
                return 1.0
            if flag == SAMPLES:
                return n / (self.samples or n)
            # an ensemble attacks fewer secrets
            return min(cost.n_texts, sum(min(side, n) for side in self.secrets)) / cost.n_texts

        return self.loading + sum(
            share(cost) * cost.seconds for cost in self.costs if not cost.reason
        )

    @property
    def estimated_peak_memory_bytes(self) -> float:
        """Estimated peak memory of the run in bytes."""
        return max(
            (cost.memory for cost in self.costs if not cost.reason),
            default=float(self.loaded_bytes),
        )

    @property
    def parts_without_estimate(self) -> tuple[RunPartCost, ...]:
        """Parts of the run without measured numbers."""
        return tuple(cost for cost in self.costs if cost.reason and cost.n_texts)


def build_run_cost_table(estimate: CostEstimate) -> RowTable:
    """Return the cost estimate as a table."""
    time = phrases.format_duration(estimate.seconds)
    peak = phrases.format_memory(estimate.estimated_peak_memory_bytes / 1e6)
    if estimate.parts_without_estimate:
        about = "at least"
    else:
        about = "about"
    note = (
        f"{about} {time} until the last record is asked, {peak} of memory at most; estimated from "
    )
    note += f"{format_count(round(estimate.probe), 'second')} of asking"
    if untimed := len(estimate.parts_without_estimate):
        note += f"; not timed: {format_count(untimed, 'part')} of the run"
    elif estimate.flags_that_halve_time:
        note += f"; {' or '.join(estimate.flags_that_halve_time)} would take half as long"
    else:
        note += f"; no smaller {LIMIT} or {SAMPLES} would take half as long"
    if estimate.rates:
        needs = (
            f"{roc.count_threshold_nonmembers(r):,} for {100 * r:g}% "
            f"({roc.count_bound_nonmembers(r, _SIDE):,} to bound it)"
            for r in FALSE_POSITIVES
        )
        note += (
            f"; non-members needed for a rate of false positives: {', '.join(needs)}, there are "
            f"{estimate.secrets[1]:,}"
        )
    note = "; ".join((note, *estimate.ceilings))
    prepared = (
        (name, "", "", "", "", phrases.format_duration(seconds))
        for name, seconds in estimate.preparing
    )
    after = (_AFTER, "after that, not timed", "", "", "", "")
    rows = (*prepared, *map(_run_cost_table_row, estimate.costs), after)
    return RowTable("what this run would take", _HEAD, rows, note)


_AFTER = "computing the numbers and writing the reports"
_HEAD = ("part", "asked", "forward rows", "tokens", "memory", "time")


def _run_cost_table_row(cost: RunPartCost) -> tuple[str, ...]:
    if cost.reason:
        return (cost.name, cost.reason, "", "", "", "")
    return (
        cost.name,
        f"{cost.n_timed:,} of {cost.n_texts:,}",
        f"{cost.rows:,.0f}",
        f"{cost.tokens:,.0f}",
        phrases.format_memory(cost.memory / 1e6),
        phrases.format_duration(cost.seconds),
    )


PROBE = 30.0  # seconds of queries to the models, besides loading
_FASTER = 4  # growth in the number of texts at each attempt
_TEXTS_AT_ONCE = 64  # maximum batch of texts in a teacher-forced pass
_CELLS = 6  # weight of cells: their share of the time, compared with other parts


def estimate_run_cost(
    plan: Plan,
    reporter: Reporter,
    seconds: float = PROBE,
    shared: SweepCache | None = None,
    starting: float = 0.0,
) -> CostEstimate:
    """Estimate the cost of running this plan.

    Raise AuditError for a plan that a run would refuse, for a model queried over a network, and for
    models that are not trained yet.

    Args:
        plan: the plan.
        reporter: receiver of progress messages.
        seconds: time limit of the estimate's queries.
        shared: cache that keeps the loaded models and data for the run itself.
        starting: seconds between the program's start and this call, which the estimate includes.
    """
    shared = shared or SweepCache()
    clock = StageClock(reporter)
    site = Site(plan, reporter, shared)
    site.may_train = False
    selection = select_plugins(site)
    if site.is_model_asked_over_network:
        raise AuditError(
            f"expected a model that is loaded here with --estimate, got {plan.target.model}: a "
            "server's cost is known only to the server; --max-tokens-total bounds it"
        )
    with clock.timed_stage("prepare"):
        preparing = _time_preparing(site)
    scene = RunContext(site, selection, PrefixToken((), "not chosen yet"))
    with clock.timed_stage("probe"):
        asker = _RunPartTimer(scene, seconds)
        asker.time_choosing_prefix_token()
        asker.time_all_targets()
    if starting:
        preparing.insert(0, ("starting and imports", starting))
    if asker.building:
        preparing.append(("making the targets", asker.building))
    members = len(select_members(scene.benchmark.secrets))
    return CostEstimate(
        tuple(asker.costs),
        tuple(preparing),
        clock.seconds["probe"],
        asker.held,
        (members, len(scene.benchmark.secrets) - members),
        asker.sample_counts.pop() if len(asker.sample_counts) == 1 else None,
        any(method.least_nonmembers for method in selection.methods),
        tuple(dict.fromkeys(asker.ceilings)),
    )


def _time_preparing(site: Site) -> list[tuple[str, float]]:
    """Load the models and read the data. Return the name and seconds of each step."""
    seconds = []
    for name, load in (
        ("loading the model", lambda: site.model),
        (
            "loading the public and the reference model",
            lambda: (site.public_model, site.reference_model),
        ),
        ("reading and cutting the rows", lambda: site.benchmark),
    ):
        start = time.perf_counter()
        is_given = load() != (None, None)
        if is_given:
            seconds.append((name, time.perf_counter() - start))
    return seconds


class _RunPartTimer:
    """Timer of the parts of a run. Each part gets a share of the remaining time."""

    def __init__(self, scene: RunContext, seconds: float) -> None:
        self.scene, self.end = scene, time.perf_counter() + seconds
        self.costs: list[RunPartCost] = []
        self.building = 0.0
        self.states: dict[str, State] = {}
        self.ceilings: list[str] = []  # of audits; see `CostEstimate`
        self.sample_counts: set[int] = set()  # per prefix, of rows with several samples
        self.device = scene.site.model.device
        on_gpu = self.device.type == "cuda"  # `held`: bytes in use now
        self.held = psutil.Process().memory_info().rss
        if on_gpu:
            self.held = torch.cuda.memory_allocated(self.device)
        # Each target has two parts (held-out texts, tokens of secrets); in addition there are the
        # prefix token, greedy recall, and cells.
        keys = scene.selection.list_cell_keys()
        targets = len({key.target for key in keys})
        cells = len({(key.target, key.setting) for key in keys})
        # total weight of the remaining parts
        self.left = 2 * targets + 2 + _CELLS * cells

    # --- the parts, in the order of a run ---

    def time_choosing_prefix_token(self) -> None:
        """Choose the prefix token, and time the choice if it uses auxiliary data."""
        scene, whole_benchmark = self.scene, self.scene.benchmark
        longest = count_longest_context(
            whole_benchmark, scene.selection.longest_soft_prompt_row_count
        )
        chosen: list[PrefixToken] = []

        def choose(n: int) -> None:
            known = _draw_fixed_subset(whole_benchmark.known, n, "prefix_token")
            chosen.append(resolve_site_prefix(scene.site, known, longest))

        n_known = len(whole_benchmark.known)
        if n_known and scene.plan.data.prefix_token == AUTO:
            part = RunPartCost(
                "choosing a prefix token", min(n_known, PAIRS), at_once=32, work=choose
            )
            self.time_parts_within_share([part], 4)
        else:
            choose(n_known)
        # The last attempt used the most pairs.
        self.scene = replace(scene, prefix_token=chosen[-1])
        self.scene.check_texts_fit_models()
        self.scene.refuse_unanswerable_probes()

    def time_all_targets(self) -> None:
        targets, clock = Targets(self.scene), StageClock(self.scene.site.reporter)
        site = self.scene.site
        self.scene.check_models_self_consistent(
            (site.model, site.public_model, site.reference_model)
        )
        refuse_methods_that_cannot_run(self.scene, targets.undefended)
        members = select_members(self.scene.benchmark.secrets)

        undefended = targets.undefended.model

        def recite(n: int) -> None:
            subset = _draw_fixed_subset(members, n, "greedy")
            scoring.read_texts_ahead(undefended, subset)
            scoring.measure_repeat_recall(undefended, subset)

        at_once = _count_fitting_secrets(undefended, members)
        greedy = RunPartCost("greedy recall", len(members), at_once=at_once, work=recite)
        self.time_parts_within_share([greedy], target=targets.undefended)
        for target in targets.build_targets(clock):
            self.time_teacher_forced_passes(target)
            for setting in self.scene.selection.list_target_settings(target.companion):
                self.time_target_cells(target, setting)
        self.building = sum(clock.seconds.values())  # stages of `build_targets`

    def time_teacher_forced_passes(self, target: Target) -> None:
        """Time teacher-forced passes over the held-out texts and over the secrets' tokens."""
        if not implies_capability(target.model.capabilities, "likelihood"):
            return
        texts = self.scene.benchmark.heldout
        given_counts = self.scene.benchmark.heldout_given or (1,) * len(texts)

        def score_heldout(n: int) -> None:
            # Draw the same subset from the texts and from their numbers of given tokens.
            subset = _draw_fixed_subset(texts, n, "heldout")
            sample_given = _draw_fixed_subset(given_counts, n, "heldout")
            list(compute_text_nlls(target.model, subset, context_lengths=sample_given))
            scoring.compute_published_nlls(target.model, subset, sample_given, self.scene.plan.seed)

        # Greedy recall stores the scores of the undefended model's members.
        secrets = target.secrets
        if target.is_undefended and implies_capability(target.model.capabilities, "distribution"):
            secrets = select_members(secrets, False)

        def score_tokens(n: int) -> None:
            subset = _draw_fixed_subset(secrets, n, "tokens")
            list(scoring.batch_suffix_log_probs(target, subset, self.scene.plan.batch_size))

        if texts:
            at_once = _count_fitting_texts(target.model, max(map(len, texts)))
            name = f"perplexity of {target.title}"
            part = RunPartCost(name, len(texts), at_once=at_once, work=score_heldout)
            self.time_parts_within_share([part], target=target)
        if not secrets:
            return
        name = f"tokens of the secrets under {target.title}"
        at_once = _count_fitting_secrets(target.model, secrets)
        part = RunPartCost(name, len(secrets), cut=(LIMIT,), at_once=at_once, work=score_tokens)

        def read_earlier(n: int) -> None:
            subset = _draw_fixed_subset(secrets, n, "tokens")
            scoring.read_secrets_ahead(target.model, select_members(subset, False), repeat(1))

        self.time_parts_within_share([part], target=target, read_earlier=read_earlier)

    def time_target_cells(self, target: Target, setting: Setting) -> None:
        """Time the tuning of the attacks, then all attacks and probes on a target in a setting.

        Attacks and probes are timed together because attacks share samples.
        """
        states: dict[str, State] = {}
        for attack in self.scene.selection.attacks:
            try:
                states[attack.name] = self.time_tuning(attack, target, setting)
            except NotApplicable:
                continue  # its cell reports the reason
        parts = list(self.list_cell_parts(target, setting, states))

        def read_earlier(n: int) -> None:
            subset = _draw_fixed_subset(target.secrets, n, "secrets")
            scoring.read_secrets_ahead(target.model, subset, repeat(1))

        self.time_parts_within_share(parts, weight=_CELLS, target=target, read_earlier=read_earlier)

    def time_tuning(self, attack: Attack, target: Target, setting: Setting) -> State:
        """Time the attack's tuning on a few known pairs, and return the tuned state.

        A known pair is a prefix with its suffix that the attacker knows. Attacks with the same
        state are tuned once. Raise NotApplicable if the attack cannot be tuned.
        """
        view, known = self.scene.make_target_view(target, setting), self.scene.challenge.known
        state = self.states.setdefault(f"{attack.name} {attack.fitted_state_name(view)}", {})
        rehearsal, times = attack.timing_stand_in()

        def fit(n: int) -> None:
            state.update(rehearsal.fit(view, _draw_fixed_subset(known, n, "known")))

        # An attack that does not override `fit` tunes nothing.
        if not state and type(attack).fit is not Attack.fit:
            # `fit` fills the returned state
            name = f"{target.title}: {attack.name} ({setting.name}), tuning"
            part = RunPartCost(name, len(known), at_once=32, work=fit, times=times)
            self.time_parts_within_share([part], least=8)
        return state

    def list_cell_parts(
        self, target: Target, setting: Setting, states: dict[str, State]
    ) -> Iterator[RunPartCost]:
        # Attacks share the samples of an attempt, and attempts share none.
        make_view = lru_cache(1)(lambda n: self.scene.make_target_view(target, setting))
        view = make_view(0)
        for method in self.scene.selection.methods:
            name = f"{target.title}: {method.name} ({setting.name})"
            try:
                check_method_applies(method, target, view, self.scene)
                if isinstance(method, Probe):
                    yield self.build_probing_part(method, target, view, make_view, name)
                else:
                    method.fitted_state_name(view)  # raises if there is nothing to tune
                    state = states[method.name]
                    yield self.build_guessing_part(method, target, view, make_view, state, name)
            except NotApplicable as why:
                yield RunPartCost(name, reason=f"not applicable: {why}")

    def build_guessing_part(
        self,
        attack: Attack,
        target: Target,
        view: View,
        make_view: Callable[[int], View],
        state: State,
        name: str,
    ) -> RunPartCost:
        attacked = {secret.id for secret in target.secrets}
        known = [query for query in self.scene.challenge.queries if query.id in attacked]
        queries = attack.queries(view, known)
        sampling = attack.sampling()
        at_once = 64
        cut: tuple[str, ...] = (LIMIT,)
        if sampling is not None:
            sampling = replace(sampling, samples=view.sample_count(sampling))  # as in the run
            at_once = view.prefix_batch_size(sampling, queries, attack.soft_prompt_rows())
            if sampling.search == "sample" and sampling.samples > 1:
                self.sample_counts.add(sampling.samples)
                cut = (LIMIT, SAMPLES)

        def guess(n: int) -> None:
            list(attack.guess(make_view(n), state, _draw_fixed_subset(queries, n, "secrets")))

        return RunPartCost(name, len(queries), cut=cut, at_once=at_once, work=guess)

    def build_probing_part(
        self, probe: Probe, target: Target, view: View, make_view: Callable[[int], View], name: str
    ) -> RunPartCost:
        secrets = select_probed_secrets(probe, target, self.scene.benchmark, view)
        planned = probe.plan_audit(view, secrets)
        if planned and (ceiling := describe_audit_ceiling(planned, view.claim)):
            self.ceilings.append(f"{probe.name} of {target.title}: {ceiling}")

        def observe(n: int) -> None:
            list(probe.observe_secrets(make_view(n), _draw_fixed_subset(secrets, n, "secrets")))

        at_once = _count_fitting_secrets(target.model, secrets)
        cut = (LIMIT,) if probe.of == "secrets" else ()
        return RunPartCost(name, len(secrets), cut=cut, at_once=at_once, work=observe)

    # --- queries ---

    @contextmanager
    def cache_texts(self, target: Target | None, share: float) -> Iterator[None]:
        """Let the models of a target read each text once, like a run, in a share of its memory."""
        with ExitStack() as stack:
            if target is not None:
                site = self.scene.site
                for model in (target.model, site.public_model, site.reference_model):
                    if model is not None:
                        stack.enter_context(model.cache_hidden_states(share))
            yield

    def time_parts_within_share(
        self,
        parts: Sequence[RunPartCost],
        least: int = 1,
        weight: int = 1,
        target: Target | None = None,
        read_earlier: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Time the parts on `least` texts, then on more texts until their time is used.

        The remaining time is divided among all parts of the run by their weights.

        Args:
            parts: the parts, which are timed together.
            least: number of texts of the first attempt.
            weight: total weight of these parts: their share of the time, relative to other parts.
            target: the target whose texts the parts read; None if a run does not cache them.
            read_earlier: function that reads those of a number of texts that a run has read before.
        """
        start = time.perf_counter()
        # The right side is evaluated first: the share uses the old weight. `max`: more parts may
        # come than were counted, and each of them may take all remaining time.
        share = (self.end - start) * weight / max(weight, self.left)
        self.left = self.left - weight
        attempts: list[list[RunPartCost]] = []
        n = least
        most = max((part.n_texts for part in parts), default=0)
        while True:
            attempts.append([])
            begin = time.perf_counter()
            # Of few texts, as large a part fits into the smaller cache as of all in a run.
            with self.cache_texts(target, min(1.0, n / max(1, most))):
                if begin < self.end or len(attempts) > 1:
                    read_earlier(n)
                for part in parts:
                    # A later attempt that started in time is finished: with half of its parts, no
                    # extrapolation would be possible.
                    in_time = time.perf_counter() < self.end or len(attempts) > 1
                    attempts[-1].append(_compute_attempt_cost(part, n * in_time, self.device))
            elapsed = time.perf_counter() - start
            last = time.perf_counter() - begin
            # number of texts that fit into the rest of the share
            room = int(n * (share - elapsed) / max(last, 1e-9))
            if len(attempts) == 1 and 2 * last < (self.end - time.perf_counter()) / 4:
                # a single attempt cannot separate the cost of a batch from the cost of a text
                room = max(room, 2 * n)
            if n >= most or room <= n:
                break
            n = min(most, _FASTER * n, room)
        self.costs += map(self._extrapolate_cost, zip(*attempts, strict=True))

    def _extrapolate_cost(self, attempts: Sequence[RunPartCost]) -> RunPartCost:
        """Return the estimated cost of a part on all its texts.

        Args:
            attempts: measured costs of the part on fewer texts.
        """
        *earlier, last = attempts
        if last.reason:
            return replace(last, memory=nan, seconds=nan)
        scale = last.n_texts / last.n_timed
        per_text = last.seconds / last.n_timed
        fixed = 0.0
        if earlier and earlier[-1].n_timed < last.n_timed:
            # Use the line through the last two attempts; if noise gives a slope out of range, keep
            # the mean time per text of the last attempt.
            slope = (last.seconds - earlier[-1].seconds) / (last.n_timed - earlier[-1].n_timed)
            if 0 < slope < per_text:
                per_text = slope
                fixed = last.seconds - slope * last.n_timed
        # The fixed cost occurs once per batch; memory grows only with the texts of a batch.
        batches = ceil(last.n_texts / last.at_once) / ceil(last.n_timed / last.at_once)
        n_batch = min(last.n_texts, last.at_once)
        n_timed = min(last.n_timed, last.at_once)
        # bytes per text, from a single attempt
        bytes_per_text = max(0.0, last.memory - self.held) / n_timed
        if earlier and (n_before := min(earlier[-1].n_timed, last.at_once)) < n_timed:
            bytes_per_text = max(0.0, last.memory - earlier[-1].memory) / (n_timed - n_before)
        return replace(
            last,
            rows=last.rows * scale * last.times,
            tokens=last.tokens * scale * last.times,
            memory=max(self.held, last.memory) + bytes_per_text * (n_batch - n_timed),
            seconds=(per_text * last.n_texts + fixed * batches) * last.times,
        )


def _compute_attempt_cost(step: RunPartCost, n: int, device: torch.device) -> RunPartCost:
    """Run a part on n texts, and return the measured cost.

    If n is 0, no time was left for this part. The returned cost then has only a reason.
    """
    reason = step.reason
    if not step.n_texts:
        reason = reason or "nothing to ask"
    elif not n:
        reason = reason or f"not asked: the {PROBE:g} seconds were over"
    if reason:
        return replace(step, memory=0.0, seconds=0.0, reason=reason)
    # The counters of `traffic` are global to the process.
    machine.reset_peak_memory()
    rows = traffic.rows
    tokens = traffic.tokens
    start = time.perf_counter()
    try:
        step.work(n)
    except NotApplicable as error:
        return replace(step, n_texts=0, memory=0.0, seconds=0.0, reason=f"not applicable: {error}")
    seconds = time.perf_counter() - start
    memory = 1e6 * machine.measure_peak_memory(device)
    return replace(
        step,
        n_timed=min(n, step.n_texts),
        rows=traffic.rows - rows,
        tokens=traffic.tokens - tokens,
        memory=memory,
        seconds=seconds,
    )


def _count_fitting_texts(model: LanguageModel, length: int) -> int:
    """Return how many texts of `length` tokens fit in memory with their distributions."""
    # Logits have shape (texts, length, vocabulary), for each part of an ensemble.
    most = get_max_logits(model.device) // (length * model.vocab_size * model.parts)
    return max(1, min(_TEXTS_AT_ONCE, most))


def _count_fitting_secrets(model: LanguageModel, secrets: Sequence[Secret]) -> int:
    """Return how many of the secrets' suffixes fit in memory with their distributions."""
    # At least 1: a canary in the gradients has no text.
    return _count_fitting_texts(model, max((1, *(len(secret.suffix) for secret in secrets))))


def _draw_fixed_subset(items: Sequence[Any], n: int, description: str) -> list[Any]:
    """Return a random subset of n items, in their original order.

    The subset depends only on n and on `description`, which names the purpose.
    """
    if n >= len(items):
        return list(items)
    # A prefix of a fixed permutation: a larger subset contains every smaller subset.
    if isinstance(items, SecretTable):
        numbers = items.text_numbers
    else:
        numbers = number_long_texts(getattr(item, "prefix", ()) for item in items)
    # The windows of a text stay together, because a run reads the text once for all of them.
    _, text_of_item = np.unique(numbers, return_inverse=True)
    n_texts = text_of_item.max(initial=-1) + 1
    rank = make_keyed_generator("estimate", description).permutation(n_texts).argsort()
    chosen = rank[text_of_item].argsort(kind="stable")[:n]
    return list(map(items.__getitem__, sorted(chosen.tolist())))

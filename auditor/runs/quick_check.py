"""`audit check`: what it asks of a model, and how many records fit in its minutes, by what the model was seen to take.

Knows no terminal. A record costs what it takes to read it and to complete it; both are timed on a few of them first.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from statistics import mean
from typing import Any

import torch

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import PrefixToken, Secret
from auditor.core.plan import FIELDS, Plan
from auditor.core.plan_fields import AUTO
from auditor.models.base import LanguageModel, implies_capability
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import adapter_base_and_revision
from auditor.plugins import registry
from auditor.plugins.probe import Probe
from auditor.plugins.view import WHITE_BOX
from auditor.reports import phrases
from auditor.runs import scoring, text_form
from auditor.runs.audit import RunContext
from auditor.runs.reporter import Reporter, StageClock
from auditor.runs.selection import select_and_check_plugins
from auditor.runs.site import Site
from auditor.runs.sites import make_site
from auditor.runs.sweep_cache import SweepCache
from auditor.runs.targets import Targets

FEWEST = 10  # records: of fewer, none extracted would say next to nothing
KNOWN, PAIRS = 0.1, 10  # share of the data that is not attacked, and pairs of it that tell the prefix token of training
_TEXTS, _ROWS = (2, 12), (2, 64)  # few and many: texts that are read, and texts that are begun to be completed
_STEPS = 4  # tokens of a beginning
_FORM_TOKENS = 128  # of a row, about, that a text form is chosen by
_SHARE = 0.05  # of the time, for each kind of work that is timed
_AFTER = 0.1  # of the time, for loading files anew, statistics and reports
Limits = tuple[str, ...]  # sentences: what a check does not say
_AGAIN = 2  # times that a run asks about a record beside its probes: for its tokens; greedily, or as a held-out text
_PREFIX_TOKENS = 3  # that known pairs are read behind, at most: none, bos, eos


def quick_plan(model: str, data: str, nonmembers: str | None, seed: int, template: str = AUTO) -> Plan:
    """The plan of all methods that are cheap, on a model and data of the user's."""
    own = {"model": model, "data": data, "nonmembers": nonmembers, "template": template, "device": "auto"}
    return Plan.from_fields(**own, seed=seed, known_fraction=KNOWN, known_limit=PAIRS, **quick_plan_fields())


def quick_plan_fields() -> dict[str, Any]:
    """The fields of a plan by which all that is cheap is asked: what attacks and probes declare as `quick`."""
    options = {
        name: dict(kind.quick) for name, kind in registry.attacks_and_probes_by_name().items() if kind.quick is not None
    }
    return {"setting": "white-box", "attack": tuple(options), "attack_options": _nonempty_options(options)}


def plan_of_slow_attacks(plan: Plan) -> Plan:
    """The same model and data under the attacks that take long, and under the same probes with their usual options."""
    known, whole = (
        registry.attacks_and_probes_by_name(),
        adapter_base_and_revision(str(plan.target.model)) is None,
    )
    attacks = [name for name, kind in known.items() if kind.deep]
    probes = [name for name in plan.attacks.attack if issubclass(known[name], Probe)]
    probes = [name for name in probes if plan.data.nonmembers is not None or not known[name].least_nonmembers]
    options = {name: dict(known[name].without_reference) for name in probes if whole}
    usual = {name: FIELDS[name].default for name in ("setting", "known_fraction", "known_limit")}
    return plan.with_fields(attack=(*attacks, *probes), attack_options=_nonempty_options(options), **usual)


def _nonempty_options(options: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: own for name, own in options.items() if own}


def limit_plan_to_time(
    plan: Plan, reporter: Reporter, shared: SweepCache, seconds: float, begun: float
) -> tuple[Plan, Limits]:
    """The plan with as many records as can be checked within so many seconds of `begun` (`time.perf_counter`), and what
    it cannot say.

    shared: keeps the models that are loaded here. Raises AuditError for whatever a run would refuse, and for a model of
    which too few records can be checked.
    """
    clock, site = StageClock(reporter), make_site(plan, reporter, shared)
    select_and_check_plugins(plan, site)
    if site.is_model_asked_over_network:
        raise AuditError(f"expected a model that is loaded here, got {plan.target.model}: audit run --model asks it")
    with clock.timed_stage("loading the model"):
        site.form_rows = _count_of_rows_readable_in_time(
            site.model, _SHARE * seconds
        )  # before it remembers what it read
        if isinstance(site.model, HuggingFaceModel):
            site.model.enable_hidden_state_cache()
        site.benchmark, site.reference_model  # noqa: B018 - each is loaded as it is asked for
    plan, limits = _plan_with_answerable_methods(plan, site)
    scene = RunContext(
        site,
        select_and_check_plugins(plan, site),
        PrefixToken((), "not chosen yet"),
        plan.defenses,
        plan.compute.batch_size,
    )
    with clock.timed_stage("measuring the model's speed"):
        # First, as it finds out how many texts can be completed at once.
        scene.check_models_self_consistent((site.model, site.reference_model))
        takes = _make_run_seconds_predictor(scene, _SHARE * seconds)
    sides = _secret_counts_by_row(site.benchmark.secrets)
    there, most = len(sides[0]), max(map(len, sides))
    spent = time.perf_counter() - begun
    left = (1 - _AFTER) * seconds - spent
    if takes(most) <= left:
        return plan, limits
    # range(1, most) holds i + 1 at i: the index behind the last limit that fits is that limit.
    kept, fewest = bisect_right(range(1, most), left, key=takes), min(FEWEST, most)
    if kept < fewest:
        minutes = ceil((takes(fewest) + spent) / (1 - _AFTER) / 60)
        raise AuditError(
            f"expected {phrases.format_duration(seconds)} to be enough "
            f"for {fewest} records of {plan.target.model}, but this "
            f"machine, as busy as it is now, takes longer: --minutes {minutes}"
        )
    pairs = (
        f" ({known:,} more are auxiliary data)" if (known := len(site.load_benchmark_shared_by_runs().known)) else ""
    )
    told = f"{min(kept, there):,} of {there:,} records checked{pairs}: what fits in {phrases.format_duration(seconds)}."
    return plan.with_fields(limit=kept), (told, *limits)


def _plan_with_answerable_methods(plan: Plan, site: Site) -> tuple[Plan, Limits]:
    """The plan with the methods that can say something of these records, and what is not known without the others."""
    members, others = (sum(secret.member is side for secret in site.benchmark.secrets) for side in (True, False))
    known, kept, limits = registry.attacks_and_probes_by_name(), list[str](), list[str]()
    for name in plan.attacks.attack:
        least = known[name].least_nonmembers
        if least and plan.data.nonmembers is None:
            limits.append(f"Without --nonmembers, records like these that it never saw, {name} cannot be known.")
        elif min(members, others) < least:
            limits.append(
                f"{name.capitalize()} takes {least} members and {least} non-members, got {members} and {others}."
            )
        else:
            kept.append(name)
    alone = {name: known[name].without_reference for name in kept if site.reference_model is None}
    options = {name: {**plan.attacks.attack_options.get(name, {}), **alone.get(name, {})} for name in kept}
    return plan.with_fields(attack=tuple(kept), attack_options=_nonempty_options(options)), tuple(limits)


def _secret_counts_by_row(secrets: Sequence[Secret]) -> tuple[list[int], list[int]]:
    """How many secrets each row of members holds, and each of non-members: a row is attacked with all of them."""
    own, others = (Counter(s.document or s.id for s in secrets if s.member is side) for side in (True, False))
    return list(own.values()), list(others.values())


# --- what a record takes ----------------------------------------------------------------------------------------------


def measure_seconds_per_text(work: Callable[[int], object], few: int, many: int, seconds: float) -> float:
    """Seconds a text, from the work on many; from the few of the warm-up, where these alone take so many seconds."""
    for n in (few, many):
        start = time.perf_counter()
        work(n)
        took = time.perf_counter() - start
        if took > seconds:
            break
    return took / n


def _count_of_rows_readable_in_time(model: LanguageModel, seconds: float) -> int:
    """How many rows of members, and as many of non-members, can be read in two text forms in so many seconds."""
    if not implies_capability(model.capabilities, "likelihood"):
        return text_form.ROWS

    def read(n: int) -> None:
        model.log_probs(torch.arange(_FORM_TOKENS).repeat(n, 1) % model.vocab_size, 1)

    texts = seconds / measure_seconds_per_text(read, 1, 2, seconds)
    # 4: two sides, in two forms each.
    return max(FEWEST, min(text_form.ROWS, int(texts / 4)))


def _make_run_seconds_predictor(scene: RunContext, seconds: float) -> Callable[[int], float]:
    """Seconds of a run that attacks at most so many rows of members, and so many of non-members.

    seconds: for each kind of work that is timed, on records of all lengths.
    """
    told, model, rows = scene.benchmark, scene.site.model, _secret_counts_by_row(scene.benchmark.secrets)
    some = sorted(told.secrets, key=lambda secret: len(secret.prefix + secret.suffix))
    # Completed behind the last tokens of prefixes alone, as reading prefixes is in `read`. A model that completes each
    # length apart gets as many lengths as there are.
    lengths = [1] if model.can_join_rows else sorted({len(secret.prefix) for secret in some})
    short = {length: i for i, length in enumerate(lengths, 1)}
    begin = [replace(s, prefix=s.prefix[-short.get(len(s.prefix), 1) :], suffix=s.suffix[:_STEPS]) for s in some]
    steps = mean(len(secret.suffix) for secret in some) / mean(len(secret.suffix) for secret in begin)
    view = scene.make_view_of_target(Targets(scene).undefended, WHITE_BOX)

    def probed(n: int) -> None:
        for one in scene.selection.methods:
            if isinstance(one, Probe):
                with suppress(NotApplicable):  # its row will say why
                    list(one.observe_secrets(view, _evenly_chosen_secrets(some, n)))

    def greedily(n: int) -> None:
        texts = _evenly_chosen_secrets(some, n)
        model.read_ahead([(s.prefix + s.suffix)[:-1] for s in texts], [len(s.suffix) for s in texts])
        scoring.greedy_recall_by_repeats(model, texts)

    # Twice, as a model remembers what it read: what the second takes less is the reading.
    first = measure_seconds_per_text(greedily, *_TEXTS, seconds)
    probe = measure_seconds_per_text(probed, *_TEXTS, seconds)
    again = measure_seconds_per_text(greedily, *_TEXTS, seconds)
    step = measure_seconds_per_text(
        lambda n: scoring.greedy_suffixes(model, _evenly_chosen_secrets(begin, n)), *_ROWS, seconds
    )
    read = first - again if first > 2 * again else first  # what is remembered is not read again
    tokens = mean(len(secret.prefix + secret.suffix) for secret in some)
    before = mean(len(secret.prefix) for secret in some) / tokens

    def takes(limit: int) -> float:  # rises with the limit, as `bisect_right` needs it
        both = sum(sum(side[:limit]) for side in rows)
        kept = model.keeps_read_texts(ceil(tokens * both))
        again_before = 0 if kept else before * both  # prefixes, to be completed
        anew = both + _PREFIX_TOKENS * len(told.known) + again_before
        return read * anew + (probe + again * _AGAIN + step * steps) * both

    return takes


def _evenly_chosen_secrets(secrets: Sequence[Secret], n: int) -> list[Secret]:
    """n of the secrets, evenly, as members; some of them several times where n is more than there are."""
    # The middle one of each of n equal stretches.
    return [replace(secrets[(2 * i + 1) * len(secrets) // (2 * n)], member=True) for i in range(n)]

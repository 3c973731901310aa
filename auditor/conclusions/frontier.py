"""What leaks least at the same usefulness, of one run with several defenses or of the points of a
grid together.

Every model is held against the others on the secrets that all of them answered and the held-out
texts that all of them predict, seeds taken together as everywhere (records/contrasts.py): the mean
over seeds, at resamples of secrets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from auditor.conclusions.outcomes import align_rows_by_secret
from auditor.conclusions.replicates import Replicates, Runs, read_replicates
from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import Frontier, FrontierPoint, Measurement
from auditor.statistics import frontier
from auditor.statistics.bounds import LEVEL, BoundedNumber
from auditor.statistics.frontier import ModelLeakage
from auditor.statistics.metrics import LEAKS, Metric, find_metric
from auditor.statistics.roc import count_nonmembers_for_lower_bound

MARGIN = 0.1  # of perplexity
Row = tuple[str, str]  # setting, attack


@dataclass(frozen=True)
class FrontierModel:
    """A model that is held against others: what each (setting, attack) found out of it, over its
    seeds."""

    name: str  # of the target
    label: str
    line: str
    claim: Claim | None
    cells: Mapping[Row, Replicates]

    @property
    def heldout(self) -> Mapping[int, Mapping[str, Sequence[float]]]:
        """By seed, `tokens` and nll of each held-out text."""
        return next((cell.heldout for cell in self.cells.values()), {})

    def is_same_model(self, other: FrontierModel) -> bool:
        """Whether it is the same model, as far as the held-out texts of the seeds that both have
        tell."""
        both = [seed for seed in self.heldout if seed in other.heldout]
        return bool(both) and all(self.heldout[seed] == other.heldout[seed] for seed in both)


# --- models of runs
# -----------------------------------------------------------------------------------------------


def frontier_models_of_runs(
    runs: Runs, variant: str = "", at: Mapping[str, Any] | None = None
) -> list[FrontierModel]:
    """The undefended model of these runs and their defenses, controls aside.

    variant, at: what the point of a grid is called, and its swept options: those of a defense are
    on its label.
    """
    first, _ = next(iter(runs.values()))
    found = list(read_replicates(runs))
    asked = [target for target in first.targets if not target.companion]
    alone = len(asked) == 2  # beside the undefended
    made = []
    for target in asked:
        defended = target.name != UNDEFENDED
        line = variant if defended and alone and variant else target.title
        knobs = (
            _swept_option_labels_of_defense(target.name, at or {}, first.plan.get("defense", ()))
            if defended
            else ()
        )
        claims = [
            t.claim for result, _ in runs.values() for t in result.targets if t.name == target.name
        ]
        cells = {(cell.setting, cell.attack): cell for cell in found if cell.target == target.name}
        made.append(
            FrontierModel(
                target.name, ", ".join([line, *knobs]), line, _weakest_claim(claims), cells
            )
        )
    return made


def _swept_option_labels_of_defense(
    name: str, at: Mapping[str, Any], defenses: Sequence[str]
) -> Iterator[str]:
    """`weight 0.9`; options of other defenses say nothing of this one."""
    for key, value in at.items():
        plugin, dot, option = key.partition(".")
        if not dot or plugin not in defenses:
            yield f"{key} {value}"
        elif plugin == name:
            yield f"{option} {value}"


def _weakest_claim(claims: Sequence[Claim | None]) -> Claim | None:
    """The claim that holds at every seed, that of the largest epsilon; None where some seed has
    none."""
    held = [claim for claim in claims if claim is not None]
    return (
        max(held, key=lambda c: c.epsilon.get(c.relation, math.inf))
        if len(held) == len(claims)
        else None
    )


def merge_frontier_models_of_grid_points(
    places: Sequence[Sequence[FrontierModel]],
) -> list[FrontierModel]:
    """The models of several points of a grid, the undefended one and every other with the same
    label once.

    Empty where the undefended models differ: those points are about different targets.
    """
    bases = [place[0] for place in places]
    base = max(bases, key=lambda one: len(one.heldout), default=None)
    if base is None or not all(one.is_same_model(base) for one in bases):
        return []
    defended: dict[tuple[str, str], FrontierModel] = {}
    for model in (model for place in places for model in place[1:]):
        defended.setdefault((model.name, model.label), model)
    return [base, *defended.values()]


# --- the comparison
# -----------------------------------------------------------------------------------------------


def build_leakage_frontiers_of_models(models: Sequence[FrontierModel]) -> tuple[Frontier, ...]:
    """One by each measure of leakage that the undefended model, the first, has; none of fewer than
    two defenses."""
    if len(models) < 3:
        return ()
    models = _models_with_distinct_lines(models)
    ratio = _frontier_perplexity_ratios_by_label(models)
    made = (
        _frontier_for_metric(models, metric, row, ratio)
        for metric, row in _metric_and_row_of_each_frontier(models[0])
    )
    return tuple(found for found in made if len(found.points) > 2)


def _models_with_distinct_lines(models: Sequence[FrontierModel]) -> list[FrontierModel]:
    """Defenses may have one title: then they are called by their names too."""
    of, found = Counter(line for line, _ in {(model.line, model.name) for model in models}), []
    for model in models:
        line = f"{model.line} ({model.name})" if of[model.line] > 1 else model.line
        found.append(replace(model, line=line, label=line + model.label.removeprefix(model.line)))
    return found


def _metric_and_row_of_each_frontier(base: FrontierModel) -> Iterator[tuple[Metric, Row]]:
    """White-box rows alone, if there are any; of several with a probe's metric, the one that lists
    it earliest."""
    for name in LEAKS:
        rows = [
            row
            for row, cell in base.cells.items()
            if cell.rows and name in _measured_metric_names(cell)
        ]
        widest = [row for row in rows if row[0] == "white-box"] or rows
        if not find_metric(name).is_of_member_guesses:  # of an attack's each is one of its own
            widest = sorted(
                widest, key=lambda row: _measured_metric_names(base.cells[row]).index(name)
            )[:1]
        yield from ((find_metric(name), row) for row in widest)


def _measured_metric_names(cell: Replicates) -> list[str]:
    return [*next(iter(cell.measured.values()), ())]


def _frontier_perplexity_ratios_by_label(models: Sequence[FrontierModel]) -> dict[str, Measurement]:
    """By label, where the model's perplexity of the same texts as the undefended one's is known."""
    base = models[0].heldout
    # Ratios are paired by text over all seeds: each seed needs the same number of texts.
    tokens = {seed: tuple(held["tokens"]) for seed, held in base.items()}
    if not tokens or len({len(own) for own in tokens.values()}) > 1:
        return {}
    known = [
        m
        for m in models
        if {seed: tuple(held["tokens"]) for seed, held in m.heldout.items()} == tokens
    ]
    # Under "perplexity" stand summed nats a text: (models, seeds, texts); the tokens are (seeds,
    # texts).
    nll = np.array([[m.heldout[seed]["perplexity"] for seed in tokens] for m in known], dtype=float)
    # nll[0] is the undefended model, which equals itself and so is always among the known.
    found = frontier.estimate_perplexity_ratios(
        nll, np.array(list(tokens.values()), dtype=float), nll[0]
    )
    return {model.label: ratio for model, ratio in zip(known, found, strict=True)}


def _frontier_for_metric(
    models: Sequence[FrontierModel], metric: Metric, row: Row, ratio: Mapping[str, Measurement]
) -> Frontier:
    base = models[0]
    seeds = sorted(base.cells[row].rows)
    missing = {
        m.label: why
        for m in models
        if (why := _missing_frontier_point_reason(m, base, metric, row, seeds, ratio))
    }
    kept = [model for model in models if model.label not in missing]
    made = Frontier(metric.name, row[1], row[0], MARGIN, LEVEL, (), missing, tuple(seeds))
    if base not in kept or len(kept) < 3:
        return made
    leaks = _paired_leakage_of_frontier_models(kept, metric, row, seeds)
    if not leaks:
        return made
    points = [
        _frontier_point(m, ratio[m.label], leak.leakage_measurement(metric.name, metric.unit))
        for m, leak in zip(kept, leaks, strict=True)
    ]
    return replace(
        made, points=tuple(_mark_frontier_corners(_flag_least_leaking_points(points, leaks)))
    )


def _missing_frontier_point_reason(
    model: FrontierModel,
    base: FrontierModel,
    metric: Metric,
    row: Row,
    seeds: Sequence[int],
    ratio: Mapping[str, Measurement],
) -> str:
    """Why the model has no point on this frontier; "" where it has one."""
    if model.label not in ratio:
        return "no perplexity of the texts that the undefended model predicts"
    cell = model.cells.get(row)
    if cell is not None and cell.not_applicable:
        return cell.not_applicable
    if cell is None or sorted(cell.rows) != list(seeds):
        return f"{row[1]} was not measured wherever it was of the undefended model"
    if cell.options != base.cells[row].options:
        return f"{row[1]} ran with other options"
    column = metric.scores or metric.per_secret_column_name
    for held in cell.rows.values():
        if column not in held.values:
            return f"{metric.name} is not kept secret by secret"
        # Of a score only its place among the others counts, so it may be infinite; of a mean no
        # part may.
        known = (
            ~np.isnan(held.values[column]) if metric.scores else np.isfinite(held.values[column])
        )
        if not known.all():
            return f"{metric.name} is not a number for some secret"
    return ""


def _paired_leakage_of_frontier_models(
    models: Sequence[FrontierModel], metric: Metric, row: Row, seeds: Sequence[int]
) -> list[ModelLeakage]:
    """Of each model, on the secrets that all of them answered at every seed; none where too few
    did."""
    rows = [[model.cells[row].rows[seed] for seed in seeds] for model in models]
    column = metric.scores or metric.per_secret_column_name
    every = [held for some in rows for held in some]
    # (models, seeds, secrets)
    own, others = (
        align_rows_by_secret(every, column, members)[1].reshape(len(models), len(seeds), -1)
        for members in (True, False)
    )
    if own.shape[-1] < 2:
        return []
    if not metric.scores:
        return frontier.estimate_mean_leakages(own.mean(axis=1))
    # By model and seed: the scores of the members, and of the non-members.
    scores = [list(zip(*sides, strict=True)) for sides in zip(own, others, strict=True)]
    if not metric.rate:
        return frontier.estimate_auc_leakages(scores) if others.shape[-1] > 1 else []
    if others.shape[-1] < count_nonmembers_for_lower_bound(metric.rate, LEVEL / 2):
        # they bound the rate of no model from below, so they show none to leak more than another
        return []
    return frontier.estimate_tpr_leakages(scores, metric.rate)


def _frontier_point(model: FrontierModel, ratio: Measurement, leak: Measurement) -> FrontierPoint:
    most = 1 + MARGIN
    within: Literal["shown", "not shown", "beyond"] = "not shown"
    if ratio.high <= most:
        within = "shown"
    elif ratio.low > most:
        within = "beyond"
    claim = model.claim
    epsilon = claim.epsilon.get(claim.relation, math.inf) if claim and claim.sound else math.inf
    point = FrontierPoint(model.label, model.line, ratio, leak, within)
    if claim is None or not math.isfinite(epsilon):
        return point
    return replace(point, epsilon=epsilon, delta=claim.delta, unit=claim.unit, tokens=claim.queries)


def _flag_least_leaking_points(
    points: Sequence[FrontierPoint], leaks: Sequence[ModelLeakage]
) -> list[FrontierPoint]:
    """Of those that are shown to be within the margin, which may leak least."""
    held = [i for i, point in enumerate(points) if point.within == "shown"]

    @cache
    def apart(i: int, j: int) -> BoundedNumber:
        return frontier.compare_paired_leakage(leaks[held[i]], leaks[held[j]])

    least = dict(
        zip(held, frontier.select_possibly_least_leaking(len(held), apart, LEVEL), strict=True)
    )
    return [replace(point, least=least.get(i)) for i, point in enumerate(points)]


def _mark_frontier_corners(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Over the logarithm of perplexity: lots drawn between two models lie on the line between them
    there."""
    known = [i for i, point in enumerate(points) if math.isfinite(point.ratio.value)]
    places = [(math.log(points[i].ratio.value), points[i].leak.value) for i in known]
    corners = {known[i] for i in frontier.find_convex_frontier(places)}
    return [replace(point, corner=i in corners) for i, point in enumerate(points)]

"""Compare models' leakage at equal perplexity.

The models are the defended models of one run, or of all runs of a grid. Every comparison uses the
secrets attacked on all models and the held-out texts that all models predict. The mean over seeds
is taken in each resample of secrets, as in conclusions/contrasts.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from auditor.conclusions.outcomes import align_secret_values
from auditor.conclusions.replicates import Replicates, Runs, read_replicates
from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import Frontier, FrontierPoint, Measurement
from auditor.statistics import frontier
from auditor.statistics.bounds import LEVEL, BoundedNumber
from auditor.statistics.frontier import ModelLeakage
from auditor.statistics.metrics import LEAKS, Metric, find_metric
from auditor.statistics.roc import count_bound_nonmembers

MARGIN = 0.1  # of perplexity
Row = tuple[str, str]  # setting, attack


@dataclass(frozen=True)
class FrontierModel:
    """Model on a frontier of leakage against perplexity.

    Args:
        name: name of the target.
        label: label of the point in plots.
        line: name of the defense, whose points form a line.
        claim: privacy claim of the defense; None if it claims nothing.
        cells: results over the seeds, keyed by (setting, attack).
    """

    name: str
    label: str
    line: str
    claim: Claim | None
    cells: Mapping[Row, Replicates]

    @property
    def heldout(self) -> Mapping[int, Mapping[str, Sequence[float]]]:
        """Numbers about held-out texts, in the order of the texts, keyed by seed and then by
        column.

        One column has the token counts. Each other column has the summed nll of each text in nats.
        """
        return next((cell.heldout for cell in self.cells.values()), {})

    def is_same_model(self, other: FrontierModel) -> bool:
        """Test if both models have equal held-out numbers at their common seeds."""
        seeds = self.heldout.keys() & other.heldout.keys()
        return bool(seeds) and all(self.heldout[seed] == other.heldout[seed] for seed in seeds)


# --- models of runs ---


def list_frontier_models(
    runs: Runs, variant: str = "", at: Mapping[str, Any] | None = None
) -> list[FrontierModel]:
    """Return the undefended model of these runs, then the defended models, without controls.

    The runs differ only in their seed, and belong to one point of a grid (a plan with several
    values of some options). Controls are models that serve only to explain a defense.

    Args:
        runs: result and folder of each run, keyed by seed.
        variant: name of the grid point, for the labels of the defended models.
        at: swept options of the grid point, for the labels of the defended models.
    """
    first, _ = next(iter(runs.values()))
    replicates = list(read_replicates(runs))
    targets = [target for target in first.targets if not target.companion]
    has_one_defense = len(targets) == 2  # besides the undefended model
    models = []
    for target in targets:
        line = target.title
        labels: list[str] = []
        if target.name != UNDEFENDED:
            if has_one_defense and variant:
                line = variant
            defenses = first.plan.get("defense", ())
            labels.extend(_list_swept_options(target.name, at or {}, defenses))
        claims = []
        for result, _ in runs.values():
            claims += [record.claim for record in result.targets if record.name == target.name]
        cells = {}
        for cell in replicates:
            if cell.target == target.name:
                cells[(cell.setting, cell.attack)] = cell
        label = ", ".join([line, *labels])
        claim = _find_weakest_claim(claims)
        models.append(FrontierModel(target.name, label, line, claim, cells))
    return models


def _list_swept_options(name: str, at: Mapping[str, Any], defenses: Sequence[str]) -> Iterator[str]:
    """Yield labels of the options that a grid of plans varies on a model, such as `weight 0.9`.

    Args:
        at: swept values, keyed by option.
        defenses: names of the defenses in the plan.
    """
    for key, value in at.items():
        plugin, dot, option = key.partition(".")
        if not dot or plugin not in defenses:
            yield f"{key} {value}"
        elif plugin == name:
            yield f"{option} {value}"


def _find_weakest_claim(claims: Sequence[Claim | None]) -> Claim | None:
    """Return the claim with the largest epsilon, which holds for every seed.

    Return None if a seed has no claim.
    """
    weakest = None
    largest = -math.inf
    for claim in claims:
        if claim is None:
            return None
        epsilon = claim.epsilon.get(claim.relation, math.inf)
        if epsilon > largest:
            weakest = claim
            largest = epsilon
    return weakest


def merge_frontier_models(
    models_by_point: Sequence[Sequence[FrontierModel]],
) -> list[FrontierModel]:
    """Merge the models of several grid points into one list.

    The list has one undefended model, then the distinct defended models of all points. Return [] if
    the undefended models differ, because the points then attack different targets.

    Args:
        models_by_point: for each grid point, its undefended model, then its defended models.
    """
    bases = [models[0] for models in models_by_point]
    base = max(bases, key=lambda model: len(model.heldout), default=None)
    if base is None or not all(map(base.is_same_model, bases)):
        return []
    defended: dict[tuple[str, str], FrontierModel] = {}
    for models in models_by_point:
        for model in models[1:]:
            defended.setdefault((model.name, model.label), model)
    return [base, *defended.values()]


# --- the comparison ---


def build_frontiers(models: Sequence[FrontierModel]) -> tuple[Frontier, ...]:
    """Return a frontier for each leakage metric of the first model, which is undefended.

    A frontier compares the leakage of models at equal perplexity. Return () for fewer than two
    defenses. `models` is the result of `list_frontier_models` or `merge_frontier_models`.
    """
    if len(models) < 3:
        return ()
    models = _make_labels_distinct(models)
    ratio = _measure_perplexity_ratios(models)
    frontiers = []
    for metric, row in _list_frontier_cells(models[0]):
        curve = _build_metric_frontier(models, metric, row, ratio)
        if len(curve.points) > 2:
            frontiers.append(curve)
    return tuple(frontiers)


def _make_labels_distinct(models: Sequence[FrontierModel]) -> list[FrontierModel]:
    """Return the models with distinct labels.

    If two defenses have the same title, the name of the defense is added to the labels of both.
    """
    names_by_line: dict[str, set[str]] = {}
    for model in models:
        names_by_line.setdefault(model.line, set()).add(model.name)
    renamed = []
    for model in models:
        line = model.line
        if len(names_by_line[line]) > 1:
            line += f" ({model.name})"
        renamed.append(replace(model, line=line, label=line + model.label.removeprefix(model.line)))
    return renamed


def _list_frontier_cells(base: FrontierModel) -> Iterator[tuple[Metric, Row]]:
    """Yield (metric, (setting, attack)) for each frontier to build.

    If a metric was measured with white-box access, its text-only settings are left out. A metric of
    guesses has a frontier for each attack. Any other metric has a single frontier, of one probe. If
    several probes measured the metric, this is the probe that lists the metric nearest to its
    start.
    """
    for name in LEAKS:
        rows = []
        for row, cell in base.cells.items():
            if cell.values_by_seed and name in _list_measured_metrics(cell):
                rows.append(row)
        widest = [row for row in rows if row[0] == "white-box"] or rows
        # such a metric has a frontier for each attack
        if not find_metric(name).is_of_member_guesses:
            widest = sorted(
                widest, key=lambda row: _list_measured_metrics(base.cells[row]).index(name)
            )[:1]
        for row in widest:
            yield find_metric(name), row


def _list_measured_metrics(cell: Replicates) -> list[str]:
    return [*next(iter(cell.measured.values()), ())]


def _measure_perplexity_ratios(models: Sequence[FrontierModel]) -> dict[str, Measurement]:
    """Return each model's perplexity relative to the undefended model's, keyed by label.

    Both perplexities are of the same held-out texts; models without these texts are omitted.
    """
    # Ratios are paired by text over all seeds: each seed needs the same number of texts.
    tokens = _map_heldout_column(models[0], "tokens")
    if not tokens or len(set(map(len, tokens.values()))) > 1:
        return {}
    labels = []
    nll = []  # (models, seeds, texts): summed nats
    for m in models:
        if _map_heldout_column(m, "tokens") == tokens:
            labels.append(m.label)
            losses = _map_heldout_column(m, "perplexity")
            nll.append([losses[seed] for seed in tokens])
    # nll[0] is the undefended model, which is always comparable with itself.
    ratios = frontier.estimate_perplexity_ratios(
        np.array(nll, dtype=float),
        np.array(list(tokens.values()), dtype=float),
        np.array(nll[0], dtype=float),
    )
    return dict(zip(labels, ratios, strict=True))


def _map_heldout_column(model: FrontierModel, column: str) -> dict[int, tuple[float, ...]]:
    """Return one column of the numbers about held-out texts (`FrontierModel.heldout`), keyed by
    seed.
    """
    return {seed: tuple(losses[column]) for seed, losses in model.heldout.items()}


def _build_metric_frontier(
    models: Sequence[FrontierModel], metric: Metric, row: Row, ratio: Mapping[str, Measurement]
) -> Frontier:
    base = models[0]
    seeds = sorted(base.cells[row].values_by_seed)
    missing = {}
    compared = []
    for m in models:
        if shortfall := _explain_missing_point(m, base, metric, row, seeds, ratio):
            missing[m.label] = shortfall
        else:
            compared.append(m)
    curve = Frontier(metric.name, row[1], row[0], MARGIN, LEVEL, (), missing, tuple(seeds))
    if base not in compared or len(compared) < 3:
        return curve
    leaks = _pair_model_leakages(compared, metric, row, seeds)
    if not leaks:
        return curve
    points = []
    for m, leak in zip(compared, leaks, strict=True):
        measured = leak.leakage_measurement(metric.name, metric.unit)
        points.append(_build_frontier_point(m, ratio[m.label], measured))
    _flag_least_leaking_points(points, leaks)
    _mark_frontier_corners(points)
    return replace(curve, points=tuple(points))


def _explain_missing_point(
    model: FrontierModel,
    base: FrontierModel,
    metric: Metric,
    row: Row,
    seeds: Sequence[int],
    ratio: Mapping[str, Measurement],
) -> str:
    """Return the reason why the model has no point on this frontier; "" if it has a point.

    Args:
        model: the model.
        base: the undefended model.
        metric: leakage metric of the frontier.
        row: access setting and attack of the frontier.
        seeds: seeds at which the undefended model was measured.
        ratio: perplexity relative to the undefended model, keyed by label.
    """
    if model.label not in ratio:
        return "no perplexity of the texts that the undefended model predicts"
    cell = model.cells.get(row)
    if cell is not None and cell.not_applicable:
        return cell.not_applicable
    if cell is None or sorted(cell.values_by_seed) != list(seeds):
        return f"{row[1]} was not measured with all seeds of the undefended model"
    if cell.options != base.cells[row].options:
        return f"{row[1]} ran with other options"
    column = metric.scores or metric.per_secret_column_name
    for values in cell.values_by_seed.values():
        if column not in values.values:
            return f"{metric.name} is not stored for each secret"
        # A score is used only by its rank, so it may be infinite; a value that enters a mean must
        # be finite.
        numbers = values.values[column]
        is_unknown = np.isnan(numbers)
        if not metric.scores:
            is_unknown = ~np.isfinite(numbers)
        if is_unknown.any():
            return f"{metric.name} is not a number for some secret"
    return ""


def _pair_model_leakages(
    models: Sequence[FrontierModel], metric: Metric, row: Row, seeds: Sequence[int]
) -> list[ModelLeakage]:
    """Return each model's leakage on the secrets attacked on all models at every seed.

    Return [] if such secrets are too few. `row` is the access setting and the attack.
    """
    rows = []
    for model in models:
        for seed in seeds:
            rows.append(model.cells[row].values_by_seed[seed])
    column = metric.scores or metric.per_secret_column_name
    shape = (len(models), len(seeds), -1)  # models, seeds, secrets
    member_values = align_secret_values(rows, column, True)[1].reshape(shape)
    nonmember_values = align_secret_values(rows, column, False)[1].reshape(shape)
    if member_values.shape[-1] < 2:
        return []
    if not metric.scores:
        return frontier.estimate_mean_leakages(member_values.mean(axis=1))
    # Scores of the members and of the non-members, by model and seed.
    scores = []
    for sides in zip(member_values, nonmember_values, strict=True):
        scores.append(list(zip(*sides, strict=True)))
    if not metric.rate:
        if nonmember_values.shape[-1] > 1:
            return frontier.estimate_auc_leakages(scores)
        return []
    if nonmember_values.shape[-1] < count_bound_nonmembers(metric.rate, LEVEL / 2):
        # So few non-members bound no rate from below, so they cannot show that a model leaks more.
        return []
    return frontier.estimate_tpr_leakages(scores, metric.rate)


def _build_frontier_point(
    model: FrontierModel, ratio: Measurement, leak: Measurement
) -> FrontierPoint:
    most = 1 + MARGIN
    within: Literal["shown", "not shown", "beyond"] = "not shown"
    if ratio.high <= most:
        within = "shown"
    elif ratio.low > most:
        within = "beyond"
    point = FrontierPoint(model.label, model.line, ratio, leak, within)
    claim = model.claim
    if claim is None or not claim.sound:
        return point
    epsilon = claim.epsilon.get(claim.relation, math.inf)
    if not math.isfinite(epsilon):
        return point
    return replace(point, epsilon=epsilon, delta=claim.delta, unit=claim.unit, tokens=claim.queries)


def _flag_least_leaking_points(points: list[FrontierPoint], leaks: Sequence[ModelLeakage]) -> None:
    """Set `least` on the points that may leak least among the equally useful points.

    A point is equally useful if its perplexity is significantly within the margin.

    Args:
        leaks: the leakage of each point's model, in the order of the points.
    """
    indices = []
    for i, point in enumerate(points):
        if point.within == "shown":
            indices.append(i)

    @cache
    def apart(i: int, j: int) -> BoundedNumber:
        return frontier.compare_paired_leakage(leaks[indices[i]], leaks[indices[j]])

    least = frontier.select_possibly_least_leaking(len(indices), apart, LEVEL)
    for i, is_least in zip(indices, least, strict=True):
        points[i] = replace(points[i], least=is_least)


def _mark_frontier_corners(points: list[FrontierPoint]) -> None:
    """Mark the corners of the convex frontier of leakage against log perplexity.

    A user who chooses at random between two models gets a point on the line between them.
    """
    indices = []
    places = []
    for i, point in enumerate(points):
        if math.isfinite(point.ratio.value):
            indices.append(i)
            places.append((math.log(point.ratio.value), point.leak.value))
    for corner in frontier.find_convex_frontier(places):
        i = indices[corner]
        points[i] = replace(points[i], corner=True)

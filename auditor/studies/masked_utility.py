"""Measure the cost of mixing masked LMs: perplexity against epsilon (Majmudar et al. 2022, Fig. 2).

All points of a sweep score the same texts, batch by batch. They share each forward pass of the
model, and their differences are paired by text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.special import logsumexp, softmax

from auditor import __version__
from auditor.benchmarks.data.whole_texts import read_row_texts
from auditor.benchmarks.lab.masked_lab import MaskedLab
from auditor.core.arrays import Floats, Ints
from auditor.core.errors import AuditError, make_unknown_name_error
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.plan import Plan
from auditor.core.plan_fields import ATTACKS
from auditor.core.result import Measurement
from auditor.models.masked import load_masked, require_masked_model
from auditor.plugins import registry
from auditor.plugins.defense import Defense
from auditor.plugins.options import build_plugin, get_option_defaults, get_plugin_title
from auditor.records import file_digests
from auditor.runs import plan_weights
from auditor.runs.lab_site import LABS, build_lab_recipe, choose_lab_defaults
from auditor.runs.machine import describe_environment
from auditor.runs.own_defenses import check_defense_inputs_given
from auditor.runs.plan import make_plan, merge_plugin_options, refuse_unused_options
from auditor.runs.plan_grid import name_grid_point
from auditor.runs.reporter import Reporter
from auditor.statistics import bootstrap
from auditor.studies.masked_texts import MaskedTexts, MaskingOptions

_RESAMPLES = 2000


@dataclass(frozen=True)
class UtilitySettings:
    """Values of a plan's `[utility]` table. Raise AuditError for invalid values.

    on: the lab records to measure, heldout by default; a user's data are measured in full. Each
    restart masks a new mask_share of the tokens. max_length: tokens after which a text is cut off.
    """

    on: Literal["heldout", "members"] | None = None
    restarts: int = 3
    mask_share: float = 0.15
    max_length: int = 512

    def __post_init__(self) -> None:
        if self.restarts < 1:
            raise AuditError(f"expected restarts >= 1 in [utility], got {self.restarts}")
        if not 0 < self.mask_share < 1:
            raise AuditError(f"expected mask_share in (0, 1) in [utility], got {self.mask_share}")
        if self.max_length < 2:
            raise AuditError(f"expected max_length >= 2 in [utility], got {self.max_length}")


@dataclass(frozen=True)
class DefensePoint:
    """A defense with its options at a point of the sweep; without a defense, the undefended
    model."""

    defense: Defense | None = None
    at: Mapping[str, Any] = field(default_factory=dict)  # swept option -> value


@dataclass(frozen=True)
class UtilityPlan:
    """A plan with a `[utility]` table: the models, the texts and the points to measure."""

    plan: Plan
    settings: UtilitySettings
    sweep: Mapping[str, Sequence[Any]]

    def build_points(self) -> list[DefensePoint]:
        """Return the undefended model, then each defense at each of its points.

        Raise AuditError for unknown options.
        """
        plan = self.plan
        defaults = dict[str, dict[str, Any]]()
        known = registry.list_defenses()
        for path in plan.plugin:
            registry.load_plugin_file(Path(path))
        for name in plan.list_changed_fields(ATTACKS):
            raise AuditError(f"{name} is about attacks: a plan with [utility] has no use of it")
        if plan.target.uses_builtin_lab:
            recipe = build_lab_recipe(plan)
            defaults = choose_lab_defaults(LABS[plan.target.lab], recipe)
        for name in plan.defenses.defense:
            if name not in known:
                raise make_unknown_name_error("defense", name, known)
        fields = {
            name: list(get_option_defaults(known[name]))
            for name in dict.fromkeys(plan.defenses.defense)
        }
        refuse_unused_options("-D", plan.defenses.defense_options, fields)
        points = [DefensePoint()]
        for name, swept in _list_swept_options(self.sweep, fields).items():
            options = merge_plugin_options(
                name, plan.defenses.defense_options, defaults.get(name, {}), fields[name]
            )
            # If nothing is swept, product() yields an empty tuple: the defense without changes.
            for values in product(*swept.values()):
                at = dict(zip(swept, values, strict=True))
                points.append(
                    DefensePoint(build_plugin("defense", known, name, {**options, **at}), at)
                )
        for point in points:
            if point.defense and not plan.target.uses_builtin_lab:
                check_defense_inputs_given(point.defense, plan.target.public)
        return points

    def check_folder_measured_alike(self, result: Utility, folder: Path) -> None:
        """Raise AuditError if the folder was measured with another plan, settings or weights."""
        expected = {
            "plan": self.plan.to_json(),
            "settings": to_json(self.settings),
            "sweep": to_json(self.sweep),
        }
        for name, value in expected.items():
            recorded = to_json(getattr(result, name))
            # The words of the command line may differ, their meaning may not.
            if {**recorded, "command": ""} != {**value, "command": ""}:
                raise AuditError(
                    f"expected a new folder for -o, but {str(folder)!r} was measured with another "
                    f"{name}"
                )
        file_digests.check_model_files_unchanged(
            result.weights or None,
            plan_weights.digest_plan_files(self.plan),
            str(folder),
        )


def _list_swept_options(
    sweep: Mapping[str, Sequence[Any]], fields: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Sequence[Any]]]:
    """Return the swept options of each defense. A swept `option` without a defense's name applies
    to every defense that has the option."""
    swept: dict[str, dict[str, Sequence[Any]]] = {name: {} for name in fields}
    for key, values in sweep.items():
        name, dot, option = key.rpartition(".")
        if not fields:
            raise AuditError(f"expected a --defense whose {option} is swept, got none")
        if dot and name not in fields:
            raise make_unknown_name_error(f"defense in the sweep of {key!r}:", name, fields)
        with_option = [
            defense for defense in ([name] if dot else fields) if option in fields[defense]
        ]
        if not with_option:
            raise make_unknown_name_error(
                "option in the sweep:",
                option,
                {option_name for defense in fields for option_name in fields[defense]},
            )
        # By repr: values may be lists, which have no hash, and 1 and true are two values.
        if len(set(map(repr, values))) < len(values) or not values:
            raise AuditError(
                f"expected values that differ for {key!r} in the sweep, got {list(values)}"
            )
        for defense in with_option:
            swept[defense][option] = values
    return swept


def parse_utility_plan(raw: Mapping[str, Any]) -> UtilityPlan:
    """Parse the raw values of a plan file: a plan's fields, `[sweep]` and `[utility]`.

    Raise AuditError for invalid values.
    """
    fields = dict(raw)
    settings = from_json(UtilitySettings, fields.pop("utility", {}), "utility")
    sweep = fields.pop("sweep", {})
    seeds = fields.pop("seeds", [0])
    if "variant" in fields:
        raise AuditError("expected a [utility] plan without variants: it has a sweep")
    if len(seeds) > 1:
        raise AuditError(
            f"expected one seed for a [utility] plan, whose restarts mask anew, got {seeds}"
        )
    return UtilityPlan(make_plan({"seed": seeds[0], **fields}, {}), settings, sweep)


@dataclass(frozen=True)
class UtilityRow:
    """Numbers of a point. Epsilons are in nats; None without a claim.

    ratio: perplexity over the undefended model's, paired by text. restarts: perplexity of each
    restart. covered: share of predicted tokens with nonzero probability. slowdown: time per
    distribution, over the undefended model's. epsilon: the claim's, over `tokens` tokens.
    epsilon_mean: as in the paper, at the *mean* number of predicted tokens, which guarantees
    nothing.
    """

    target: str
    title: str
    at: dict[str, Any]
    options: dict[str, Any]
    perplexity: Measurement
    ratio: Measurement
    restarts: tuple[float, ...]
    covered: Measurement
    slowdown: Measurement
    epsilon_per_token: float | None = None
    epsilon: float | None = None
    epsilon_mean: float | None = None
    tokens: int | None = None
    delta: float | None = None
    relation: str = ""
    status: str = "nothing claimed"


@dataclass(frozen=True)
class Utility:
    """Record of a measurement: numbers, no text."""

    model: str
    data: str
    texts: int
    vocab_size: int
    restarts: int
    longest: int  # maximum number of predicted tokens of a text: the paper's T
    mean_tokens: float
    rows: tuple[UtilityRow, ...]
    notes: tuple[str, ...]
    created: str  # UTC, ISO 8601
    tool_version: str
    command: str
    plan: dict[str, Any]
    settings: dict[str, Any]
    sweep: dict[str, tuple[Any, ...]]
    environment: dict[str, str]
    seconds: float
    # File name -> SHA-256, e.g. "model/model.safetensors"; empty in the lab.
    weights: dict[str, str] = field(default_factory=dict)


# --- measuring
# -----------------------------------------------------------------------------------------------


def measure_utility_points(request: UtilityPlan, reporter: Reporter) -> Utility:
    """Measure every point on the same texts.

    Raise AuditError for bad input before any model is queried.
    """
    plan = request.plan
    settings = request.settings
    start = time.perf_counter()
    points = request.build_points()
    with reporter.stage("prepare"):
        texts = _load_masked_texts(plan, settings, reporter)
        protected = [
            texts.protect(point.defense) if point.defense else (texts.target, None)
            for point in points
        ]
        models = [model for model, _ in protected]
        claims = [claim for _, claim in protected]
    with reporter.stage(f"perplexity of {len(models)} points on {len(texts.texts):,} texts"):
        nll, lost = texts.measure_nll(
            models, lambda n_done, total: reporter.progress("scoring", n_done, total)
        )
    with reporter.stage("time of a distribution"):
        slowdowns = texts.measure_slowdowns(models)
    records = f"{'member' if settings.on == 'members' else 'held-out'} records"
    return Utility(
        model=plan.target.model or LABS[plan.target.lab].name,
        data=Path(plan.data.data).name if plan.data.data is not None else records,
        texts=len(texts.texts),
        vocab_size=texts.target.vocab_size,
        restarts=settings.restarts,
        longest=int(texts.hidden_token_counts.max()),
        mean_tokens=float(texts.hidden_token_counts.mean()),
        rows=tuple(_build_utility_rows(texts, points, claims, nll, lost, slowdowns)),
        notes=tuple(texts.notes),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        command=plan.output.command,
        plan=plan.to_json(),
        settings=to_json(settings),
        sweep={key: tuple(values) for key, values in request.sweep.items()},
        environment=describe_environment(plan.loading.device),
        weights=plan_weights.digest_plan_files(plan),
        seconds=time.perf_counter() - start,
    )


def _load_masked_texts(plan: Plan, settings: UtilitySettings, reporter: Reporter) -> MaskedTexts:
    """Load the masked models and the texts to predict."""
    options = MaskingOptions(
        plan.seed,
        settings.max_length,
        settings.mask_share,
        settings.restarts,
        plan.data.limit,
        plan.compute.batch_size,
    )
    if plan.target.uses_builtin_lab:
        recipe = build_lab_recipe(plan)
        lab = LABS[plan.target.lab](recipe, None, reporter.progress)
        models = MaskedLab(lab)
        texts = lab.texts.distinct_private_texts(settings.on == "members")
        target = models.target_masked_model()
        return MaskedTexts(target, models.public_masked_model(), target.tokenizer, texts, options)
    assert plan.target.model is not None and plan.data.data is not None
    if settings.on is not None:
        raise AuditError(
            "`on` in [utility] chooses among the lab's records; --data are measured whole"
        )
    texts = read_row_texts("--data", plan.data.data)
    companion = plan.loading.for_companion_model()
    require_masked_model(plan.target.model, plan.loading)
    target = load_masked(plan.target.model, plan.loading)
    public = load_masked(plan.target.public, companion) if plan.target.public else None
    return MaskedTexts(target, public, target.tokenizer, texts, options)


def _build_utility_rows(
    texts: MaskedTexts,
    points: Sequence[DefensePoint],
    claims: Sequence[Claim | None],
    nll: Floats,
    lost: Ints,
    slower: Sequence[Measurement],
) -> list[UtilityRow]:
    tokens = texts.hidden_token_counts
    mean = float(texts.hidden_token_counts.mean())
    # A token without a probability makes the perplexity infinite; `covered` reports their share.
    possible = np.where(lost > 0, np.inf, nll)
    rows = []
    for i, (point, claim) in enumerate(zip(points, claims, strict=True)):
        row = UtilityRow(
            target=point.defense.name if point.defense else UNDEFENDED,
            title=get_plugin_title(type(point.defense)) if point.defense else "Undefended",
            at=dict(point.at),
            options=to_json(point.defense) if point.defense else {},
            perplexity=measure_corpus_perplexity(possible[i], tokens),
            ratio=measure_corpus_perplexity(possible[i], tokens, possible[0]),
            restarts=tuple(np.exp(possible[i].sum(1) / tokens.sum()).tolist()),
            covered=_measure_possible_tokens(lost[i], tokens),
            slowdown=slower[i],
        )
        rows.append(row if claim is None else _add_row_claim(row, claim, mean))
    return rows


def _add_row_claim(row: UtilityRow, claim: Claim, mean_tokens: float) -> UtilityRow:
    per_token = claim.details.get("epsilon_per_token")
    return replace(
        row,
        epsilon_per_token=per_token,
        epsilon=claim.epsilon[claim.relation],
        epsilon_mean=None if per_token is None else per_token * mean_tokens,
        tokens=claim.queries,
        delta=claim.delta,
        relation=claim.relation,
        status=claim.status,
    )


def measure_corpus_perplexity(nll: Floats, tokens: Ints, base: Floats | None = None) -> Measurement:
    """Return the corpus perplexity, averaged over restarts, or its ratio to the perplexity of
    `base`.

    nll, base: (restarts, texts), summed nats, inf if a token has probability 0; tokens: (texts,).
    The bootstrap resamples a text with its masks of all restarts. The interval is thus over texts
    and masks, and paired for a ratio.
    """
    paired = nll if base is None else np.concatenate([nll, base])

    # Return the log of the number at these rates and its slopes by each rate, for
    # `estimate_rate_statistic`. each: (resamples, restarts), nats a token, followed by the restarts
    # of a base.
    def log(nlls: Floats) -> tuple[Floats, Floats]:
        rates = nlls[:, : len(nll)]
        base_rates = nlls[:, len(nll) :]
        with np.errstate(invalid="ignore"):  # infinity has no slope, and none is needed
            # The log of the mean of exp(rate) over restarts; exp undoes it below.
            if base is None:
                return logsumexp(rates, axis=1) - math.log(len(nll)), softmax(rates, axis=1)
            value = np.where(
                np.isinf(rates).any(1),
                np.inf,
                logsumexp(rates, axis=1) - logsumexp(base_rates, axis=1),
            )
            return value, np.concatenate(
                [softmax(rates, axis=1), -softmax(base_rates, axis=1)], axis=1
            )

    name, unit = ("perplexity", "perplexity") if base is None else ("perplexity_ratio", "times")
    value, low, high = np.exp(
        bootstrap.estimate_rate_statistic(paired, tokens[None], log, "utility", _RESAMPLES)
    ).tolist()
    return Measurement(name, value, low, high, len(tokens), unit)


def _measure_possible_tokens(lost: Ints, tokens: Ints) -> Measurement:
    """Return the share of tokens with nonzero probability. lost: (restarts, texts), numbers of
    other tokens."""

    def share(values: Floats) -> tuple[Floats, Floats]:
        # The number and its slopes by each restart's rate.
        return 1 - values.mean(1), np.full(values.shape, -1 / values.shape[1])

    estimates = bootstrap.estimate_rate_statistic(lost, tokens[None], share, "utility", _RESAMPLES)
    value, low, high = np.clip(estimates, 0, 1).tolist()  # shares are in [0, 1]
    return Measurement("covered", value, low, high, len(tokens), "probability")


def list_utility_row_labels(rows: Sequence[UtilityRow]) -> list[str]:
    """Return labels like `weight=0.3`; `Uniform mixing, weight=0.3` if several defenses are
    compared."""
    short = len({row.target for row in rows if row.options}) == 1
    return [name_grid_point("" if short and row.at else row.title, row.at) for row in rows]

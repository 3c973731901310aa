"""What a defense costs: perplexity against epsilon, for causal and masked language models (Majmudar et al. 2022).

A sweep's points are scored side by side on the same texts, batch by batch, so that one forward pass of the model serves
them all, and what is compared is paired by text. Knows nothing of tables, plots or terminals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from auditor import __version__
from auditor.benchmarks.lab import Lab
from auditor.benchmarks.masked_lab import MaskedLab
from auditor.benchmarks.whole_texts import read_row_texts
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import Claim, Pair
from auditor.core.plan import Plan
from auditor.core.plan_fields import ATTACKS, AUTO
from auditor.core.plan_parts import DataPlan, LoadingOptions, TargetPlan
from auditor.core.result import Measurement
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.models.lora import load_lora_ensemble
from auditor.models.masked import detect_model_kind, load_masked
from auditor.plugins import registry
from auditor.plugins.defense import Defense
from auditor.plugins.options import plugin_title
from auditor.plugins.trainer import Trainer
from auditor.records import file_digests
from auditor.runs import plan_weights
from auditor.runs.lab_site import LABS, build_lab_recipe, default_options_of_lab_defenses
from auditor.runs.machine import describe_environment
from auditor.runs.own_defenses import load_trained_defense
from auditor.runs.plan import make_plan
from auditor.runs.plan_grid import grid_point_name
from auditor.runs.prefix_token import resolve_prefix_token
from auditor.runs.reporter import Reporter
from auditor.statistics import bootstrap
from auditor.utility.scored_models import (
    CausalUtilitySubject,
    Example,
    MaskedUtilitySubject,
    ScoringOptions,
    UtilitySubject,
)
from auditor.utility.sweep_points import DefensePoint, build_utility_sweep_points

_RESAMPLES = 2000


@dataclass(frozen=True)
class UtilitySettings:
    """What `audit utility` asks beside the model and the defenses. Raises AuditError for what cannot be measured.

    on: which of the lab's records, heldout by default; data of one's own are measured whole. restarts, mask_share: of a
    masked model, whose gaps are drawn anew at each restart. max_length: tokens of a text, at most; the rest is cut off.
    """

    kind: Literal["auto", "causal", "masked"] = "auto"
    on: Literal["heldout", "members"] | None = None
    restarts: int = 3
    mask_share: float = 0.15
    max_length: int = 512

    def __post_init__(self) -> None:
        for name, choices in (("kind", ("auto", "causal", "masked")), ("on", (None, "heldout", "members"))):
            if getattr(self, name) not in choices:
                known = ", ".join(filter(None, choices))
                raise AuditError(f"expected --{name} to be one of {known}, got {getattr(self, name)!r}")
        if self.restarts < 1:
            raise AuditError(f"expected --restarts >= 1, got {self.restarts}")
        if not 0 < self.mask_share < 1:
            raise AuditError(f"expected --mask-share in (0, 1), got {self.mask_share}")
        if self.max_length < 2:
            raise AuditError(f"expected --max-length >= 2, got {self.max_length}")


@dataclass(frozen=True)
class UtilityPlan:
    """One `audit utility`: whose perplexity, of what, at which points."""

    plan: Plan
    settings: UtilitySettings
    sweep: Mapping[str, Sequence[Any]]

    def points_to_measure(self) -> list[DefensePoint]:
        """The model as it is, then each defense at each of its points. Raises AuditError for what nobody takes."""
        plan, defaults = self.plan, dict[str, dict[str, Any]]()
        for path in plan.plugin:
            registry.load_plugin_file(Path(path))
        for name in plan.non_default_field_names(ATTACKS):
            raise AuditError(f"{name} is about attacks: `audit utility` has no use of it")
        if plan.target.uses_builtin_lab:
            recipe = build_lab_recipe(plan.target, plan.data, plan.attacks, plan.seed)
            defaults = default_options_of_lab_defenses(LABS[plan.target.lab], recipe)
        return build_utility_sweep_points(plan.target, plan.defenses, defaults, self.sweep)

    def check_folder_measured_alike(self, found: Utility, folder: Path) -> None:
        """Raises AuditError where what the folder holds was measured with anything else."""
        mine = {"plan": self.plan.to_json(), "settings": to_json(self.settings), "sweep": to_json(self.sweep)}
        for name, own in mine.items():
            theirs = to_json(getattr(found, name))
            # The words of the command line may differ; what they ask for may not.
            if {**theirs, "command": ""} != {**own, "command": ""}:
                raise AuditError(f"expected a new folder for -o, but {str(folder)!r} was measured with another {name}")
        file_digests.check_model_files_unchanged(
            found.weights or None, plan_weights.weight_digests_of_plan_files(self.plan), str(folder)
        )


def parse_utility_plan(raw: Mapping[str, Any]) -> UtilityPlan:
    """From the raw values of a plan file: the fields of a plan, `[sweep]` and `[utility]`. Raises AuditError."""
    given = dict(raw)
    settings = from_json(UtilitySettings, given.pop("utility", {}), "utility")
    sweep, seeds = given.pop("sweep", {}), given.pop("seeds", [0])
    if "variant" in given:
        raise AuditError("expected a [utility] plan without variants: it has a sweep")
    if len(seeds) > 1:
        raise AuditError(f"expected one seed for a [utility] plan, whose restarts mask anew, got {seeds}")
    return UtilityPlan(make_plan({"seed": seeds[0], **given}, {}), settings, sweep)


@dataclass(frozen=True)
class UtilityRow:
    """One point's numbers. Epsilons in nats; None where nothing of the kind is claimed.

    ratio: perplexity over that of the model as it is, paired by text. restarts: the perplexity of each. covered: share
    of the predicted tokens that have a probability at all. slowdown: time of a next-token distribution, over the
    model's own.
    epsilon: of the claim over its `tokens`. epsilon_mean: as the paper reports it, at the *mean* number of predicted
    tokens: not a guarantee of anything.
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
    """All of `audit utility` that is kept: numbers only, no text."""

    kind: str
    model: str
    data: str
    texts: int
    vocab_size: int
    restarts: int
    longest: int  # predicted tokens of one text, at most: the paper's T
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
    weights: dict[str, str] = field(default_factory=dict)  # "model/model.safetensors" -> SHA-256; empty in the lab


# --- measuring --------------------------------------------------------------------------------------------------------


# What a defense needs, as fields of a `Scenario`; of a masked model nothing: `protect_masked` refuses what needs any.
Held = Callable[[Defense], Mapping[str, Any]]


def load_scored_model_and_defense_parts(
    plan: Plan, settings: UtilitySettings, reporter: Reporter
) -> tuple[UtilitySubject[Any], Held]:
    """The model with its texts, and what gives a defense its parts: an ensemble, a trained model. Raises AuditError."""
    asked = ScoringOptions(
        plan.seed, settings.max_length, settings.mask_share, settings.restarts, plan.data.limit, plan.compute.batch_size
    )
    target, data = plan.target, plan.data
    if not target.uses_builtin_lab:
        return _utility_subject_and_parts_of_own_model(target, plan.loading, data, settings, asked)
    lab = LABS[target.lab](build_lab_recipe(plan.target, plan.data, plan.attacks, plan.seed), None, reporter.progress)
    return _utility_subject_and_parts_of_lab(lab, data.prefix_token, settings, asked)


def _utility_subject_and_parts_of_lab(
    lab: Lab, prefix_token: str, settings: UtilitySettings, asked: ScoringOptions
) -> tuple[UtilitySubject[Any], Held]:
    texts = lab.texts.distinct_private_texts(settings.on == "members")
    if settings.kind == "masked":
        _refuse_prefix_token_in_masked_utility(prefix_token)
        both = MaskedLab(lab)
        masked = both.target_masked_model()
        return MaskedUtilitySubject(
            masked, both.public_masked_model(), masked.tokenizer, texts, asked
        ), lambda defense: {}
    public, target = lab.lab_public_model(), lab.lab_target_model()
    # as the perplexities of `audit run`: what is read and not learnt
    given = lab.training.untrained_leading_token_counts(texts)
    subject = _build_causal_utility_subject(prefix_token, target, public, texts, asked, lab.known, given)
    return subject, cache(partial(_utility_defense_parts_from_lab, lab))


def _utility_subject_and_parts_of_own_model(
    models: TargetPlan, loading: LoadingOptions, data: DataPlan, settings: UtilitySettings, asked: ScoringOptions
) -> tuple[UtilitySubject[Any], Held]:
    assert models.model is not None and data.data is not None
    if settings.on is not None:
        raise AuditError("--on chooses among the lab's records; --data are measured whole")
    texts, beside = read_row_texts("--data", data.data), loading.for_companion_model()  # before minutes of loading
    if detect_model_kind(models.model, settings.kind, loading) == "masked":
        _refuse_prefix_token_in_masked_utility(data.prefix_token)
        masked = load_masked(models.model, loading)
        other = load_masked(models.public, beside) if models.public else None
        return MaskedUtilitySubject(masked, other, masked.tokenizer, texts, asked), lambda defense: {}
    target = load_causal_lm(models.model, loading)
    public = load_causal_lm(models.public, beside) if models.public else None

    @cache  # points of a sweep differ in their options and share a folder
    def ensemble(folder: str) -> Any:
        assert isinstance(public, HuggingFaceModel)  # `check_defense_inputs_given` has seen to it
        return load_lora_ensemble(Path(folder), public)

    def held(defense: Defense) -> Mapping[str, Any]:
        parts = dict[str, Any]()
        if "trained" in defense.needs:
            parts["trained"] = load_trained_defense(
                defense, lambda folder: load_causal_lm(folder, beside), target.vocab_size
            )
        if "ensemble" in defense.needs:
            parts["ensemble"] = ensemble(defense.ensemble_folder)
        return parts

    return _build_causal_utility_subject(data.prefix_token, target, public, texts, asked), cache(held)


def _refuse_prefix_token_in_masked_utility(asked: str) -> None:
    if asked != AUTO:
        raise AuditError(f"expected a causal LM for --prefix-token {asked}, got a masked one, which reads whole texts")


def _build_causal_utility_subject(
    prefix: str,
    target: HuggingFaceModel,
    public: HuggingFaceModel | None,
    texts: Sequence[str],
    asked: ScoringOptions,
    known: Sequence[Pair] = (),
    given: Sequence[int] = (),
) -> CausalUtilitySubject:
    prefix_token = resolve_prefix_token(prefix, target, known)
    subject = CausalUtilitySubject(target, public, target.tokenizer, texts, asked, prefix_token.tokens, given)
    subject.notes.append(prefix_token.said)
    return subject


def _utility_defense_parts_from_lab(lab: Lab, defense: Defense) -> Mapping[str, Any]:
    parts = dict[str, Any]()
    if "trained" in defense.needs:
        assert isinstance(defense, Trainer)  # "trained" is a need of theirs alone
        parts["trained"] = lab.model_trained_by_trainer(defense)
    if "ensemble" in defense.needs:
        parts["ensemble"] = lab.with_ensemble_size(defense.required_member_count).ensemble()
    if "corpus" in defense.needs:
        parts["corpus"] = [tokens for tokens, _ in lab.texts_with_repeat_counts(True)]
    return parts


def measure_utility_points(
    request: UtilityPlan,
    reporter: Reporter,
    shown: Sequence[str] = (),
    reveal: int = 0,
) -> tuple[Utility, list[Example]]:
    """Every point on the same texts; and predictions for the texts in `shown` and for the first `reveal` of the data.

    Raises AuditError for bad input before a model is asked anything.
    """
    plan, settings, start = request.plan, request.settings, time.perf_counter()
    wanted = request.points_to_measure()
    with reporter.stage("prepare"):
        subject, held_of = load_scored_model_and_defense_parts(plan, settings, reporter)
        models, claims = _protected_utility_models_and_claims(subject, held_of, wanted)
        # Rows below 0 are none of the data: the row keys what is drawn, and says how much of a text is given.
        asked = [subject.encode_text_as_passage(-1 - i, text) for i, text in enumerate(shown)] + subject.texts[:reveal]
        if any(not text.open for text in asked):
            raise AuditError("expected a --text of two tokens or more, got one with nothing to predict")
    with reporter.stage(f"perplexity of {len(models)} points on {len(subject.texts):,} texts"):
        nll, lost = subject.nll_by_model_and_text(models, lambda done, total: reporter.progress("scoring", done, total))
    with reporter.stage("time of a distribution"):
        slower = subject.slowdowns(models)
    rows = _build_utility_rows(subject, wanted, claims, nll, lost, slower)
    names = dict(zip(utility_row_labels(rows), models, strict=True))
    with reporter.stage("examples") if asked else nullcontext():
        examples = [subject.predicted_example_by_model(names, text) for text in asked]
    records = f"{'member' if settings.on == 'members' else 'held-out'} records"
    result = Utility(
        kind=subject.kind,
        model=plan.target.model or LABS[plan.target.lab].name,
        data=Path(plan.data.data).name if plan.data.data is not None else records,
        texts=len(subject.texts),
        vocab_size=subject.target.vocab_size,
        restarts=subject.scorings_per_text,
        longest=int(subject.predicted_token_counts.max()),
        mean_tokens=float(subject.predicted_token_counts.mean()),
        rows=tuple(rows),
        notes=tuple(subject.notes),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        command=plan.output.command,
        plan=plan.to_json(),
        settings=to_json(settings),
        sweep={key: tuple(values) for key, values in request.sweep.items()},
        environment=describe_environment(plan.loading.device),
        weights=plan_weights.weight_digests_of_plan_files(plan),
        seconds=time.perf_counter() - start,
    )
    return result, examples


def _protected_utility_models_and_claims(
    subject: UtilitySubject[Any], held_of: Held, wanted: Sequence[DefensePoint]
) -> tuple[list[Any], list[Claim | None]]:
    bare = subject.undefended, None
    pairs = [
        subject.protected_model_and_claim(point.defense, held_of(point.defense)) if point.defense else bare
        for point in wanted
    ]
    return [model for model, _ in pairs], [claim for _, claim in pairs]


def _build_utility_rows(
    subject: UtilitySubject[Any],
    wanted: Sequence[DefensePoint],
    claims: Sequence[Claim | None],
    nll: NDArray[np.float64],
    lost: NDArray[np.int64],
    slower: Sequence[Measurement],
) -> list[UtilityRow]:
    tokens, mean = subject.predicted_token_counts, float(subject.predicted_token_counts.mean())
    # One token without a probability makes the perplexity infinite; `covered` says how many there were.
    possible = np.where(lost > 0, np.inf, nll)
    rows = []
    for i, (point, claim) in enumerate(zip(wanted, claims, strict=True)):
        row = UtilityRow(
            target=point.defense_or_undefended_name,
            title=plugin_title(type(point.defense)) if point.defense else "Undefended",
            at=dict(point.at),
            options=to_json(point.defense) if point.defense else {},
            perplexity=utility_corpus_perplexity(possible[i], tokens),
            ratio=utility_corpus_perplexity(possible[i], tokens, possible[0]),
            restarts=tuple(np.exp(possible[i].sum(1) / tokens.sum()).tolist()),
            covered=_utility_share_of_possible_tokens(lost[i], tokens),
            slowdown=slower[i],
        )
        rows.append(row if claim is None else _utility_row_with_claim(row, claim, mean))
    return rows


def _utility_row_with_claim(row: UtilityRow, claim: Claim, mean_tokens: float) -> UtilityRow:
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


def utility_corpus_perplexity(
    nll: NDArray[np.float64], tokens: NDArray[np.int64], base: NDArray[np.float64] | None = None
) -> Measurement:
    """Corpus perplexity, the mean over restarts; with a base, how many times the base's it is.

    nll, base: (restarts, texts), summed nats, inf where a token that counts has no probability, see
    `Subject.nll_by_model_and_text`; tokens: (texts,). A text is drawn with its masks of every restart: the interval is
    over texts and masks, and that of a ratio is paired.
    """
    paired = nll if base is None else np.concatenate([nll, base])

    # The log of the number at these rates, and its slopes by each rate, which `interval_of_rates` asks for. each:
    # (resamples, restarts), nats a token; with a base its restarts behind them.
    def log(each: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        own, other = each[:, : len(nll)], each[:, len(nll) :]
        with np.errstate(invalid="ignore"):  # infinity has no slope, and is asked for none
            # The log of the mean of exp(rate) over restarts; exp undoes it below.
            if base is None:
                return logsumexp(own, axis=1) - math.log(len(nll)), softmax(own, axis=1)
            value = np.where(np.isinf(own).any(1), np.inf, logsumexp(own, axis=1) - logsumexp(other, axis=1))
            return value, np.concatenate([softmax(own, axis=1), -softmax(other, axis=1)], axis=1)

    name, unit = ("perplexity", "perplexity") if base is None else ("perplexity_ratio", "times")
    value, low, high = np.exp(bootstrap.interval_of_rates(paired, tokens[None], log, "utility", _RESAMPLES)).tolist()
    return Measurement(name, value, low, high, len(tokens), unit)


def _utility_share_of_possible_tokens(lost: NDArray[np.int64], tokens: NDArray[np.int64]) -> Measurement:
    """The share of tokens that have a probability; lost: (restarts, texts), tokens that have none."""

    def share(each: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # The number and its slopes by each restart's rate.
        return 1 - each.mean(1), np.full(each.shape, -1 / each.shape[1])

    found = bootstrap.interval_of_rates(lost, tokens[None], share, "utility", _RESAMPLES)
    value, low, high = np.clip(found, 0, 1).tolist()  # no share lies beyond
    return Measurement("covered", value, low, high, len(tokens), "probability")


def utility_row_labels(rows: Sequence[UtilityRow]) -> list[str]:
    """`weight=0.3`, or where several defenses are compared `Uniform mixing, weight=0.3`."""
    short = len({row.target for row in rows if row.options}) == 1
    return [grid_point_name("" if short and row.at else row.title, row.at) for row in rows]

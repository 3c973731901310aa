"""Judge a paper's claims by the measurements of runs.

A claim compares a sum of metrics at named points of a grid with a bound that the paper states:

    [[claim]]
    id = "T2-zlib"
    text = "Ethicist extracts more than comparing (zlib)"
    paper = "62.8 - 49.7 = 13.1 points"
    metric = "recall"
    of = { variant = "Ethicist" }  # also: attack, target, setting, metric, and swept keys
    minus = { variant = "baselines", attack = "zlib" }  # `first`, `middle`, `last` of a swept key
    expect = "> 0"                                      # or a range [low, high]

If the plan sweeps a single key, a claim may call this key `at`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.conclusions.contrasts import WeightedMetric, measure_seed_contrast
from auditor.conclusions.replicates import Replicates
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.result import Measurement
from auditor.statistics.metrics import find_metric

HOLDS = "holds"
REFUTED = "refuted"
UNDECIDED = "not at this scale"
NOT_RUN = "not run"

RULE = (
    "A claim holds if the 95% interval lies wholly on the claimed side, is refuted if it lies "
    "wholly on the other side, and is otherwise undecided: not at this scale. Intervals are "
    "over secrets, paired over runs and seeds; they are not corrected for the number of claims."
)

_CELL = ("target", "setting", "attack")


@dataclass(frozen=True)
class StudyPoint:
    """Results of one point of a grid (a variant and swept values), for all seeds.

    Args:
        variant: name of the variant; "" if the plan has no variants.
        at: swept values, keyed by option.
        attacks: attacks and probes of the plan.
        cells: results, one for each target, setting, and attack or probe.
        failure: reason for missing results; otherwise "".
        subject: the attacked model and data, in words.
    """

    variant: str
    at: Mapping[str, Any]
    attacks: tuple[str, ...]
    cells: tuple[Replicates, ...] = ()
    failure: str = ""
    subject: str = ""


@dataclass(frozen=True)
class Expectation:
    """Open interval (low, high) that should contain a number, according to the paper.

    `text` describes the interval in words.
    """

    low: float
    high: float
    text: str


def judge_paper_claim(m: Measurement, expect: Expectation) -> str:
    """Return whether a measurement shows that a paper's claim holds, is refuted, or is undecided.

    The claim holds if the interval of the measurement lies within the expected interval. It is
    refuted if the two intervals do not meet. Otherwise, or if a bound is NaN, it is undecided.
    """
    if math.isnan(m.low) or math.isnan(m.high):
        return UNDECIDED
    if expect.low < m.low and m.high < expect.high:
        return HOLDS
    if m.high < expect.low or m.low > expect.high:
        return REFUTED
    return UNDECIDED


@dataclass(frozen=True)
class Term:
    """Metric of an attack or probe, averaged over all matching points of a grid.

    Args:
        metric: name of the metric.
        variant: name of the variant; None for any.
        cell: target, setting and attack, as far as they are given.
        at: swept values by key, if given.
    """

    metric: str
    variant: str | None
    cell: Mapping[str, str]
    at: Mapping[str, Any]


@dataclass(frozen=True)
class PaperClaimStatement:
    """A paper's claim about a signed sum of metrics.

    Args:
        id: id of the claim.
        text: the claim in words.
        paper: the numbers in the paper.
        signed_terms: terms of the sum, each with its sign (1.0 or -1.0).
        expect: interval that the paper claims for the sum.
        note: remark for readers.
    """

    id: str
    text: str
    paper: str
    signed_terms: tuple[tuple[float, Term], ...]
    expect: Expectation
    note: str = ""


@dataclass(frozen=True)
class LedgerRow:
    plan: str
    id: str
    text: str
    paper: str
    setting: str
    expect: str
    verdict: str
    ours: Measurement | None = None
    note: str = ""


class NotRun(Exception):
    """Error for a claim whose runs produced no numbers. The message gives the reason."""


# --- reading claims ---


def parse_paper_claim_statements(
    raw: Sequence[Mapping[str, Any]], scale: str, where: str
) -> list[PaperClaimStatement]:
    """Parse those [[claim]] tables (`raw`) of a plan file that apply at this scale.

    where: name of the file in messages. Raise AuditError for unknown and missing fields.
    """
    statements = list[PaperClaimStatement]()
    for claim in raw:
        scales = claim.get("scale", scale)  # a scale, a list of scales, or by default all
        if scale in ([scales] if isinstance(scales, str) else scales):
            statements.append(_parse_paper_claim_statement(claim, where))
    ids = [statement.id for statement in statements]
    for id in ids:
        if ids.count(id) > 1:
            raise AuditError(f"{where}: two claims are called {id!r}")
    return statements


def _parse_paper_claim_statement(raw: Mapping[str, Any], where: str) -> PaperClaimStatement:
    known = ("id", "text", "paper", "metric", "of", "minus", "expect", "scale", "note")
    where = f"{where}: claim {raw.get('id', '?')!r}"
    refuse_unknown_names(f"field of {where}:", raw, known)
    for name in ("id", "text", "paper", "of", "expect"):
        if name not in raw:
            raise AuditError(f"{where}: missing field {name!r}")
    terms = []
    for side, sign in (("of", 1.0), ("minus", -1.0)):
        for term in _parse_paper_claim_terms(raw.get(side, []), raw.get("metric"), where):
            terms.append((sign, term))
    expect = parse_paper_claim_expectation(raw["expect"], where)
    return PaperClaimStatement(
        raw["id"], raw["text"], raw["paper"], tuple(terms), expect, raw.get("note", "")
    )


def _parse_paper_claim_terms(raw: Any, metric: str | None, where: str) -> tuple[Term, ...]:
    terms = []
    for term in raw if isinstance(raw, list) else [raw]:
        if not isinstance(term, Mapping):
            raise AuditError(
                f"{where}: expected a table or a list of them in `of` and `minus`, got {term!r}"
            )
        metric_name = term.get("metric", metric)
        if not metric_name:
            raise AuditError(f"{where}: names no metric")
        cell = {}
        at = {}
        for key, value in term.items():
            if key in _CELL:
                cell[key] = value
            elif key not in ("variant", "metric"):
                at[key] = value
        terms.append(Term(metric_name, term.get("variant"), cell, at))
    return tuple(terms)


def parse_paper_claim_expectation(raw: Any, where: str) -> Expectation:
    """Parse an expected interval such as `"> 0"`, `"< 0.02"` or `[0.6, 0.7]`.

    where: name of the claim in messages.
    """
    if match := re.fullmatch(r"([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+))", str(raw)):
        bound = float(match[2])
        if match[1] == ">":
            return Expectation(bound, math.inf, raw)
        return Expectation(-math.inf, bound, raw)
    pair = (
        isinstance(raw, list)
        and len(raw) == 2
        and all(isinstance(bound, int | float) for bound in raw)
    )
    if not pair or raw[0] >= raw[1]:
        raise AuditError(
            f'{where}: expected `expect` like "> 0", "< 0.02" or [low, high], got {raw!r}'
        )
    return Expectation(float(raw[0]), float(raw[1]), f"in [{raw[0]:g}, {raw[1]:g}]")


def measure_seed_mean(name: str, cell: Replicates) -> Measurement:
    """Return the mean of a metric over the seeds of a cell, with its interval."""
    return measure_seed_contrast(name, [WeightedMetric(1.0, name, cell)])


# --- judging them ---


def check_claim_points_are_planned(
    statement: PaperClaimStatement, points: Sequence[StudyPoint]
) -> None:
    """Raise AuditError if a claim names a grid point, attack or metric that is not in the plan."""
    for _, term in statement.signed_terms:
        for point in _find_term_points(term, points, statement.id):
            _find_term_attack(term, point, statement.id)


def build_ledger_row(
    plan: str, statement: PaperClaimStatement, points: Sequence[StudyPoint]
) -> LedgerRow:
    """Return a claim's row of the ledger, computed from the grid points of the claim's plan."""
    base = LedgerRow(
        plan, statement.id, statement.text, statement.paper, "", statement.expect.text, NOT_RUN
    )
    try:
        parts = []
        subjects = set()
        for sign, term in statement.signed_terms:
            claim_points = _find_term_points(term, points, statement.id)
            for point in claim_points:
                cell = _collect_term_replicates(term, point, statement.id)
                # A term of several points is their mean.
                parts.append(WeightedMetric(sign / len(claim_points), term.metric, cell))
                subjects.add(point.subject)
        contrast = measure_seed_contrast(statement.id, parts)
    except (NotRun, AuditError) as why:
        return replace(base, note=str(why))
    setting = format_paper_claim_setting(sorted(filter(None, subjects)), parts, contrast)
    note = "; ".join(filter(None, [statement.note, contrast.note]))
    return replace(
        base,
        setting=setting,
        verdict=judge_paper_claim(contrast, statement.expect),
        ours=contrast,
        note=note,
    )


def format_paper_claim_setting(
    about: Sequence[str], parts: Sequence[WeightedMetric], measurement: Measurement
) -> str:
    """Return data, number of secrets, samples and seeds as text, like `lab; n 300; K 10; seeds
    0-4`.

    about: descriptions of the data. parts: terms of the claim.
    """
    sizes = set()
    seeds_of_parts = []
    for part in parts:
        seeds_of_parts.append({*part.cell.member_outcomes_by_seed, *part.cell.measured})
        if "samples" in part.cell.options:
            sizes.add(int(part.cell.options["samples"]))
    words = [*about, f"n {measurement.n}"]
    if sizes:
        words.append(f"K {', '.join(map(str, sorted(sizes)))}")
    # A difference covers only the seeds that all its terms have.
    if seeds := set.intersection(*seeds_of_parts):
        words.append(f"seeds {format_study_seed_ranges(sorted(seeds))}")
    return "; ".join(words)


def format_study_seed_ranges(seeds: Sequence[int]) -> str:
    """Return seeds as text: `0-4` or `0, 2`."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def list_swept_options(points: Sequence[StudyPoint]) -> list[str]:
    """Return each option that any of the grid points sets, without repetition."""
    options = dict[str, None]()
    for point in points:
        options |= dict.fromkeys(point.at)
    return list(options)


def _find_term_points(term: Term, points: Sequence[StudyPoint], id: str) -> list[StudyPoint]:
    if term.variant is not None:
        variants = [point.variant for point in points]
        refuse_unknown_names(f"variant in claim {id!r}:", [term.variant], variants)
    matching = [point for point in points if term.variant in (None, point.variant)]
    swept = list_swept_options(points)
    for key, value in term.at.items():
        if key == "at" and len(swept) == 1:
            key = swept[0]
        refuse_unknown_names(f"swept key in claim {id!r}:", [key], swept)
        values = list(dict.fromkeys(point.at[key] for point in points if key in point.at))
        # In the order of the plan's sweep, not by size.
        indices = {"first": 0, "middle": len(values) // 2, "last": -1}
        if value in indices:
            value = values[indices[value]]
        matching = [point for point in matching if point.at.get(key) == value]
        if not matching:
            raise AuditError(f"claim {id!r}: the plan has no point at {key} = {value!r}")
    return matching


def _find_term_attack(term: Term, point: StudyPoint, id: str) -> str:
    attack = term.cell.get("attack")
    if attack is None and len(point.attacks) > 1:
        raise AuditError(
            f"claim {id!r}: {point.variant!r} runs {', '.join(point.attacks)}; name one of them"
        )
    if attack is not None:
        refuse_unknown_names(f"attack in claim {id!r}:", [attack], point.attacks)
    return attack or point.attacks[0]


def _collect_term_replicates(term: Term, point: StudyPoint, id: str) -> Replicates:
    # Keys of a claim equal the names of a cell's attributes: target, setting, attack.
    criteria = {**term.cell, "attack": _find_term_attack(term, point, id)}
    matching = []
    for cell in point.cells:
        if all(getattr(cell, key) == value for key, value in criteria.items()):
            matching.append(cell)
    if not matching:
        raise NotRun(point.failure or f"{point.variant or 'the plan'} has no result for {criteria}")
    if len(matching) > 1:
        rows = ", ".join(f"{cell.target}/{cell.setting}" for cell in matching)
        raise AuditError(f"claim {id!r} fits several results ({rows}): name a target and a setting")
    cell = matching[0]
    if cell.not_applicable:
        raise NotRun(f"not applicable: {cell.not_applicable}")
    if not find_metric(term.metric).is_of_member_guesses and not cell.measured:
        raise NotRun(f"nothing was measured of {cell.attack} on {cell.target}")
    return cell

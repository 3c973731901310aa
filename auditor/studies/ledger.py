"""A claim ledger: what a paper says, what these runs say, and the verdict. Knows no paper, no files
and no models.

A claim is a sum of metrics at named places of a grid, and the side of a bound on which the paper
puts it:

    [[claim]]
    id = "T2-zlib"
    text = "Ethicist extracts more than comparing (zlib)"
    paper = "62.8 - 49.7 = 13.1 points"
    metric = "recall"
    of = { variant = "Ethicist" }                       # also: attack, target, setting, metric, and swept keys
    minus = { variant = "baselines", attack = "zlib" }  # `first`, `middle`, `last` of a swept key
    expect = "> 0"                                      # or a range [low, high]

The key `at` stands for the only key that the plan sweeps.
"""  # noqa: E501

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.conclusions.contrasts import WeightedMetric, contrast_over_seeds
from auditor.conclusions.replicates import Replicates
from auditor.core.errors import AuditError, unknown_name_error
from auditor.core.result import Measurement
from auditor.statistics.metrics import find_metric

HOLDS, REFUTED, UNDECIDED, NOT_RUN = "holds", "refuted", "not at this scale", "not run"

RULE = (
    "A claim holds if the 95% interval lies wholly on the claimed side, is refuted if it lies "
    "wholly on the other side, and is otherwise undecided: not at this scale. Intervals resample "
    "secrets, paired over runs and seeds; they are not corrected for the number of claims."
)

_CELL = ("target", "setting", "attack")


@dataclass(frozen=True)
class Place:
    """A planned place of a grid, its seeds taken together: its cells, or why there are none."""

    variant: str
    at: Mapping[str, Any]
    attacks: tuple[str, ...]
    cells: tuple[Replicates, ...] = ()
    failure: str = ""
    about: str = ""  # what was attacked, for the reader


@dataclass(frozen=True)
class Expectation:
    """The open interval in which the paper puts the number."""

    low: float
    high: float
    text: str


def judge_paper_claim(m: Measurement, expect: Expectation) -> str:
    """The verdict, by RULE. An interval that touches a bound decides nothing; neither does one with
    a NaN."""
    if math.isnan(m.low) or math.isnan(m.high):
        return UNDECIDED
    if expect.low < m.low and m.high < expect.high:
        return HOLDS
    if m.high < expect.low or m.low > expect.high:
        return REFUTED
    return UNDECIDED


@dataclass(frozen=True)
class Term:
    """Places of a grid: one metric of one cell at every matching point, averaged over them."""

    metric: str
    variant: str | None
    cell: Mapping[str, str]  # target, setting, attack, as far as they are given
    at: Mapping[str, Any]


@dataclass(frozen=True)
class PaperClaimStatement:
    """One claim of a paper, in words and as a contrast."""

    id: str
    text: str
    paper: str
    of: tuple[Term, ...]
    minus: tuple[Term, ...]
    expect: Expectation
    note: str = ""

    def signed_terms(self) -> Iterable[tuple[float, Term]]:
        yield from ((1.0, term) for term in self.of)
        yield from ((-1.0, term) for term in self.minus)


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
    """A place the claim speaks of has no numbers; the message says why."""


# --- reading claims
# -----------------------------------------------------------------------------------------------


def parse_paper_claim_statements(
    raw: Sequence[Mapping[str, Any]], scale: str, where: str
) -> list[PaperClaimStatement]:
    """The claims of a plan file at this scale. Raises AuditError for a field nobody knows or one
    that is missing."""
    made = list[PaperClaimStatement]()
    for claim in raw:
        scales = claim.get("scale", scale)  # one, several, or by default all
        if scale in ([scales] if isinstance(scales, str) else scales):
            made.append(_parse_paper_claim_statement(claim, where))
    ids = [statement.id for statement in made]
    for id in ids:
        if ids.count(id) > 1:
            raise AuditError(f"{where}: two claims are called {id!r}")
    return made


def _parse_paper_claim_statement(raw: Mapping[str, Any], where: str) -> PaperClaimStatement:
    known = ("id", "text", "paper", "metric", "of", "minus", "expect", "scale", "note")
    where = f"{where}: claim {raw.get('id', '?')!r}"
    for name in raw:
        if name not in known:
            raise unknown_name_error(f"field of {where}:", name, known)
    for name in ("id", "text", "paper", "of", "expect"):
        if name not in raw:
            raise AuditError(f"{where}: missing field {name!r}")
    of, minus = (
        _parse_paper_claim_terms(raw.get(side, []), raw.get("metric"), where)
        for side in ("of", "minus")
    )
    expect = parse_paper_claim_expectation(raw["expect"], where)
    return PaperClaimStatement(
        raw["id"], raw["text"], raw["paper"], of, minus, expect, raw.get("note", "")
    )


def _parse_paper_claim_terms(raw: Any, metric: str | None, where: str) -> tuple[Term, ...]:
    made = []
    for term in raw if isinstance(raw, list) else [raw]:
        if not isinstance(term, Mapping):
            raise AuditError(
                f"{where}: expected a table or a list of them in `of` and `minus`, got {term!r}"
            )
        named = term.get("metric", metric)
        if not named:
            raise AuditError(f"{where}: names no metric")
        cell = {key: term[key] for key in _CELL if key in term}
        at = {key: value for key, value in term.items() if key not in ("variant", "metric", *_CELL)}
        made.append(Term(named, term.get("variant"), cell, at))
    return tuple(made)


def parse_paper_claim_expectation(raw: Any, where: str) -> Expectation:
    """`"> 0"`, `"< 0.02"` or `[0.6, 0.7]`."""
    match = (
        re.fullmatch(r"([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+))", raw) if isinstance(raw, str) else None
    )
    if match:
        bound = float(match[2])
        return Expectation(*((bound, math.inf) if match[1] == ">" else (-math.inf, bound)), raw)
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


# --- judging them
# -----------------------------------------------------------------------------------------------


def check_paper_claim_places_are_planned(
    statement: PaperClaimStatement, places: Sequence[Place]
) -> None:
    """Raises AuditError where a claim speaks of a place, an attack or a metric that the plan does
    not have."""
    for _, term in statement.signed_terms():
        for place in _grid_places_of_claim_term(term, places, statement.id):
            _attack_of_claim_term(term, place, statement.id)


def ledger_row_of_paper_claim(
    plan: str, statement: PaperClaimStatement, places: Sequence[Place]
) -> LedgerRow:
    """The claim's row, from the places of its plan."""
    base = LedgerRow(
        plan, statement.id, statement.text, statement.paper, "", statement.expect.text, NOT_RUN
    )
    try:
        chosen = [
            (sign, term, _grid_places_of_claim_term(term, places, statement.id))
            for sign, term in statement.signed_terms()
        ]
        parts = [
            # A term of several places is their mean.
            WeightedMetric(
                sign / len(found), term.metric, _replicates_of_claim_term(term, place, statement.id)
            )
            for sign, term, found in chosen
            for place in found
        ]
        ours = contrast_over_seeds(statement.id, parts)
    except (NotRun, AuditError) as why:
        return replace(base, note=str(why))
    about = sorted({place.about for _, _, found in chosen for place in found if place.about})
    setting, note = (
        paper_claim_setting_phrase(about, parts, ours),
        "; ".join(filter(None, [statement.note, ours.note])),
    )
    return replace(
        base,
        setting=setting,
        verdict=judge_paper_claim(ours, statement.expect),
        ours=ours,
        note=note,
    )


def paper_claim_setting_phrase(
    about: Sequence[str], parts: Sequence[WeightedMetric], ours: Measurement
) -> str:
    """`lab; n 300; K 10; seeds 0-4`: what was attacked, how many secrets, how many samples each, at
    which seeds."""
    sizes = sorted(
        {int(part.cell.options["samples"]) for part in parts if "samples" in part.cell.options}
    )
    # A contrast is of the seeds that all its parts have.
    seeds = sorted(
        set.intersection(
            *({*part.cell.member_outcomes_by_seed, *part.cell.measured} for part in parts)
        )
    )
    words = [*about, f"n {ours.n}"]
    words += [f"K {', '.join(map(str, sizes))}"] if sizes else []
    words += [f"seeds {study_seed_ranges_label(seeds)}"] if seeds else []
    return "; ".join(words)


def study_seed_ranges_label(seeds: Sequence[int]) -> str:
    """`0-4`, `0, 2`."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def _grid_places_of_claim_term(term: Term, places: Sequence[Place], id: str) -> list[Place]:
    if term.variant is not None and term.variant not in {place.variant for place in places}:
        raise unknown_name_error(
            f"variant in claim {id!r}:", term.variant, {place.variant for place in places}
        )
    found = [place for place in places if term.variant in (None, place.variant)]
    swept = list(dict.fromkeys(key for place in places for key in place.at))
    for key, value in term.at.items():
        key = swept[0] if key == "at" and len(swept) == 1 else key
        if key not in swept:
            raise unknown_name_error(f"swept key in claim {id!r}:", key, swept)
        values = list(dict.fromkeys(place.at[key] for place in places if key in place.at))
        # In the order in which the plan sweeps them, not by size.
        wanted = {"first": values[0], "middle": values[len(values) // 2], "last": values[-1]}.get(
            value, value
        )
        found = [place for place in found if place.at.get(key) == wanted]
        if not found:
            raise AuditError(f"claim {id!r}: the plan has no point at {key} = {wanted!r}")
    return found


def _attack_of_claim_term(term: Term, place: Place, id: str) -> str:
    named = term.cell.get("attack")
    if named is None and len(place.attacks) > 1:
        raise AuditError(
            f"claim {id!r}: {place.variant!r} runs {', '.join(place.attacks)}; name one of them"
        )
    if named is not None and named not in place.attacks:
        raise unknown_name_error(f"attack in claim {id!r}:", named, place.attacks)
    return named or place.attacks[0]


def _replicates_of_claim_term(term: Term, place: Place, id: str) -> Replicates:
    # a claim names target, setting and attack as a cell's attributes are called
    wanted = {**term.cell, "attack": _attack_of_claim_term(term, place, id)}
    found = [
        cell
        for cell in place.cells
        if all(getattr(cell, key) == value for key, value in wanted.items())
    ]
    if not found:
        raise NotRun(place.failure or f"{place.variant or 'the plan'} has no row {wanted}")
    if len(found) > 1:
        rows = ", ".join(f"{cell.target}/{cell.setting}" for cell in found)
        raise AuditError(f"claim {id!r} fits several rows ({rows}): name a target and a setting")
    cell = found[0]
    if cell.not_applicable:
        raise NotRun(f"not applicable: {cell.not_applicable}")
    if not find_metric(term.metric).is_of_member_guesses and not cell.measured:
        raise NotRun(f"nothing was measured of {cell.attack} on {cell.target}")
    return cell

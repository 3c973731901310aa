"""Render the results of `audit erase` for a terminal, HTML or JSON, without records' texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from auditor.core.counts import format_count
from auditor.core.jsonable import encode_json
from auditor.core.nouns import CellKey
from auditor.erasure.examine import Erasure
from auditor.erasure.layers import CANNOT_TELL, GONE, STILL_THERE, LayerVerdict
from auditor.gate.rulings import Decision, Verdict, make_gate_ruling
from auditor.reports import escaping
from auditor.reports.blocks import Document, FactList, Group, Paragraph, Section, Table

_ORDER = (STILL_THERE, CANNOT_TELL, GONE)
_MOST_NAMES = 5
_MOST_PLACES = 3
_MOST_USERS = 20
_RULE = (
    "Gone: no deleted record is seen in a layer in which at least 90% of the kept records, 20 or "
    "more, are seen; the percentage is the exact 95% lower bound of the share that is seen. If the "
    "kept records are not seen, the layer cannot tell. A copy was examined; nothing in the store "
    "was changed."
)


def state_result(erasure: Erasure) -> str:
    """State the verdict over all layers in a sentence."""
    deleted = format_count(erasure.n_deleted, "deleted record")
    if erasure.verdict == STILL_THERE:
        return f"still there: {erasure.n_left:,} of {deleted} in some layer{_count_users(erasure)}"
    verdicts = [verdict.verdict for verdict in erasure.verdicts]
    n_layers = verdicts.count(GONE)
    gone = f"none of {deleted} is seen; gone in {format_count(n_layers, 'layer')}"
    if erasure.verdict == GONE:
        return f"gone: {gone}, all there are"
    n_unclear = verdicts.count(CANNOT_TELL)
    return f"cannot tell: {gone}, {n_unclear:,} cannot tell"


def _count_users(erasure: Erasure) -> str:
    """Return a phrase about the people whose records are still there; "" without --user-column."""
    if not erasure.users:
        return ""
    people = format_count(erasure.n_users, "person", "people")
    return f", of {len(erasure.users_left):,} of {people}"


def list_terminal_lines(erasure: Erasure) -> Iterator[str]:
    """Yield lines with the verdict, the layers (worst first) and the limits of the search."""
    yield f"RESULT  {state_result(erasure)}"
    for verdict in sort_erasure_verdicts(erasure):
        place = f"{verdict.store}, {verdict.layer}, {verdict.kind}"
        yield f"{_LABELS[verdict.verdict]}  {place}: {describe_erasure_verdict(verdict)}"
        if verdict.leftovers:
            yield f"        where: {list_places(verdict)}"
            yield f"        which: {list_names(verdict)}"
            yield f"        remove: {verdict.remedy or 'no call is known to remove it'}"
    if erasure.users_left:
        yield f"PEOPLE  still there of: {escaping.list_printable(erasure.users_left, _MOST_USERS)}"
    for store, facts in erasure.facts.items():
        yield f"STORE   {store}: {'; '.join(facts) or 'its files only'}"
    yield f"LIMITS  {_RULE}"


_RULINGS: dict[str, Verdict] = {
    STILL_THERE: "failed",
    CANNOT_TELL: "inconclusive",
    GONE: "held",
}
_LABELS = {STILL_THERE: "THERE ", CANNOT_TELL: "?     ", GONE: "GONE  "}


def sort_erasure_verdicts(erasure: Erasure) -> list[LayerVerdict]:
    return sorted(erasure.verdicts, key=lambda verdict: _ORDER.index(verdict.verdict))


def describe_erasure_verdict(verdict: LayerVerdict) -> str:
    """Describe how many deleted and kept records were found, or why the search cannot tell."""
    control = f"{verdict.n_control_seen:,} of {verdict.n_control:,} kept ones seen"
    if verdict.verdict == CANNOT_TELL:
        return f"cannot tell: {verdict.why}"
    counts = f"{len(verdict.leftovers):,} of {verdict.n_deleted:,} deleted records seen, {control}"
    if verdict.verdict == GONE:
        bound = f" (at least {verdict.recall_lower_bound:.1%})"
    else:
        bound = ""
    return f"{verdict.verdict}: {counts}{bound}"


def list_places(verdict: LayerVerdict) -> str:
    return escaping.list_printable(verdict.places, _MOST_PLACES, "; ")


def list_names(verdict: LayerVerdict) -> str:
    return escaping.list_printable(list(verdict.leftovers), _MOST_NAMES)


def make_document(erasure: Erasure, command: str) -> Document:
    """Build the page: the verdict, all layers, and the versions for which the verdict holds."""
    head = ("Layer", "Of", "Verdict", "Where, and which", "Removed by")
    by_store: dict[str, list[tuple[str, ...]]] = {}
    for verdict in sort_erasure_verdicts(erasure):
        places = ""
        if verdict.leftovers:
            places = f"{list_places(verdict)}: {list_names(verdict)}"
        row = (
            verdict.layer,
            verdict.kind,
            describe_erasure_verdict(verdict),
            places,
            verdict.remedy,
        )
        by_store.setdefault(verdict.store, []).append(row)
    groups = tuple(Group(store, tuple(rows)) for store, rows in by_store.items())
    table = Table("layers", "Every layer, those with leftovers first", head, groups)
    facts = tuple(
        (store, "; ".join(lines) or "its files") for store, lines in erasure.facts.items()
    )
    return Document(
        title="Is the deleted text gone?",
        facts=(
            ("Deleted", f"{erasure.n_deleted:,} records"),
            ("Kept", f"{erasure.n_kept:,} records, {erasure.n_control:,} of them looked for"),
            *_list_user_facts(erasure),
            ("Command", command),
        ),
        headline=state_result(erasure),
        sections=(
            Section("layers", "Layers", (table,)),
            Section(
                "stores", "Scope of this result", (FactList("Stores", facts), Paragraph(_RULE))
            ),
        ),
        source="Rendered from a copy of the examined stores",
    )


def _list_user_facts(erasure: Erasure) -> Iterator[tuple[str, str]]:
    if erasure.users:
        yield "People", f"{erasure.n_users:,} with deleted records"
        yield "Still there of", escaping.list_printable(erasure.users_left, _MOST_USERS) or "nobody"


def make_decision(erasure: Erasure) -> Decision:
    """Return a decision with a ruling on each layer, for the JUnit XML.

    A layer passes if the records are gone, and fails if a record is still there.
    """
    rulings = []
    for verdict in sort_erasure_verdicts(erasure):
        row = CellKey(verdict.store, verdict.layer, verdict.kind)
        reason = describe_erasure_verdict(verdict)
        if verdict.leftovers:
            reason = f"{reason}; where: {list_places(verdict)}; which: {list_names(verdict)}"
        rulings.append(
            make_gate_ruling(reason, "deleted records are gone", _RULINGS[verdict.verdict], row)
        )
    return Decision("erasure", "", tuple(rulings))


def format_json(erasure: Erasure) -> str:
    layers = []
    for verdict in erasure.verdicts:
        layers.append({**asdict(verdict), "least_sight": verdict.recall_lower_bound})
    stated = {**asdict(erasure), "verdicts": layers, "verdict": erasure.verdict}
    stated["users_left"] = erasure.users_left
    return encode_json(stated)

"""Render an audit of a retrieval system as terminal lines, page and JSON, without its texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from auditor.core.jsonable import encode_json
from auditor.core.result import Measurement
from auditor.rag.audit import RagAudit
from auditor.rag.layers import (
    CANNOT_TELL,
    LEAKS,
    LEAST,
    LEVEL,
    MEMBERSHIP_LEVEL,
    MOST_LAYERS,
    NO_LEAK,
    Crawl,
    MembershipVerdict,
    RagVerdict,
)
from auditor.rag.vectors import ALTERNATIVES, VectorVerdict
from auditor.reports import escaping
from auditor.reports.blocks import Document, FactList, Group, Paragraph, Section, Table
from auditor.statistics.metrics import find_metric

_ORDER = (LEAKS, CANNOT_TELL, NO_LEAK)
_LABELS = {LEAKS: "LEAKS ", CANNOT_TELL: "?     ", NO_LEAK: "NONE  "}
_MOST_NAMES = 5
_STORED = "personal data in stored vectors"
_VECTOR_RULE = (
    f"Each document's first value, ranked by similarity among {ALTERNATIVES} others of its format"
)
_RANKS = np.arange(1, ALTERNATIVES + 2)
_CHANCE = -float(np.log2(_RANKS / len(_RANKS)).mean())
_CLEAR = 6  # documents shown only after the control asked; by chance, 1 in 64
_RULE = (
    "Shown: a reply has ten words in a row, or personal data, that the question does not quote. A "
    "fair coin put each document into the store or left it out: documents outside are the "
    "baseline, and p-values assume nothing else. Leaks: documents in the store are shown and none "
    f"outside, or p is at most {LEVEL / MOST_LAYERS:.3f} ({MEMBERSHIP_LEVEL} for "
    "membership). No leak seen: no document is shown, but the control is shown at least "
    f"{LEAST}; the interval holds for questions like these. If the control is shown fewer, a layer "
    "cannot tell."
)


def state_result(audit: RagAudit) -> str:
    """Return a sentence with the verdict over all layers."""
    membership = f"membership p = {audit.membership.p_value:.4f}"
    if audit.verdict == LEAKS:
        leaking = [layer for layer in audit.layers if layer.verdict == LEAKS]
        if not leaking and audit.membership.verdict == LEAKS:
            return f"leaks: replies reveal which documents are in the store ({membership})"
        if not leaking:
            bits = max(entry.bits.value for entry in audit.vectors if entry.verdict == LEAKS)
            return f"leaks: stored vectors reveal {bits:.1f} bits of personal data in a document"
        worst = max(leaking, key=lambda layer: len(layer.disclosed))
        to_whom = ""
        if audit.n_identities:
            to_whom = " to an identity that must not see them"
        n_shown = f"{len(worst.disclosed):,} of {worst.n_possible:,}"
        return f"leaks: {n_shown} documents are shown{to_whom} ({worst.layer})"
    clear = sum(layer.verdict == NO_LEAK for layer in audit.layers)
    return (
        f"{audit.verdict}: no leak seen in {clear:,} of {len(audit.layers):,} layers, {membership}"
    )


def list_terminal_lines(audit: RagAudit) -> Iterator[str]:
    """Yield the verdict, the layers (worst first), and the limits."""
    yield f"RESULT  {state_result(audit)}"
    for layer in sort_layers(audit):
        yield f"{_LABELS[layer.verdict]}  {layer.layer}: {describe_layer(layer)}"
        if layer.verdict == LEAKS:
            yield f"        which: {escaping.list_printable(layer.disclosed, _MOST_NAMES)}"
    membership = audit.membership
    yield f"{_LABELS[membership.verdict]}  membership: {describe_membership(membership)}"
    for entry in audit.vectors:
        yield f"{_LABELS[entry.verdict]}  {_STORED}, {entry.knowledge}: {describe_vectors(entry)}"
    if cause := describe_cache(audit):
        yield f"CAUSE   {cause}"
    if audit.crawl is not None:
        yield f"CRAWL   {describe_crawl(audit.crawl)}"
    yield f"SYSTEM  {'; '.join(f'{name}: {fact}' for name, fact in list_facts(audit))}"
    yield f"LIMITS  {_RULE}"


def describe_cache(audit: RagAudit) -> str:
    """Return a phrase if documents are shown only after their owner asked, as from a cache.

    Otherwise return "".
    """
    after, before = audit.direct
    if before or after < _CLEAR or not audit.n_identities:
        return ""
    return (
        f"{after:,} documents were shown after their owner had asked the same question, none "
        "before: users share a cache"
    )


def sort_layers(audit: RagAudit) -> list[RagVerdict]:
    return sorted(audit.layers, key=lambda layer: _ORDER.index(layer.verdict))


def list_facts(audit: RagAudit) -> tuple[tuple[str, str], ...]:
    return (
        ("system", audit.system),
        ("documents", f"{audit.n_in:,} in the store, {audit.n_out:,} not, seed {audit.seed}"),
        ("identities", f"{audit.n_identities:,}"),
        ("replies show", " and ".join(audit.channels) or "nothing"),
        ("control", audit.control),
        ("questions", f"{audit.n_questions:,}"),
    )


def describe_layer(layer: RagVerdict) -> str:
    """Return a phrase with the share of documents, its interval, baseline, control and reason."""
    low, high = layer.interval
    counts = f"{len(layer.disclosed):,} of {layer.n_possible:,} ({low:.0%} to {high:.0%})"
    counts += f", not in the store {layer.outside[0]:,} of {layer.outside[1]:,}"
    if layer.control is not None:
        counts += f", control {layer.control[0]:,} of {layer.control[1]:,}"
    return f"{layer.why}; {counts}" if layer.why else counts


def describe_membership(membership: MembershipVerdict) -> str:
    """Return a phrase with the p-value, the strongest signal's AUC, and the members found."""
    parts = [f"p = {membership.p_value:.4f}"]
    parts += list(map(_describe_measurement, membership.measurements))
    if membership.measurements:
        parts.append(f"by {membership.measurements[0].note.partition(',')[0]}")
    if not math.isnan(membership.control_p):
        parts.append(f"control p = {membership.control_p:.4f}")
    if membership.why:
        parts.append(membership.why)
    return "; ".join(parts)


def describe_vectors(entry: VectorVerdict) -> str:
    """Return a phrase with mean bits and interval, how many values rank first, and p-values."""
    if entry.why:
        return entry.why
    bits = entry.bits
    return "; ".join(
        (
            f"{bits.value:.2f} bits ({bits.low:.2f} to {bits.high:.2f}; {_CHANCE:.1f} by chance)",
            f"{entry.n_first:,} of {bits.n:,} values rank first of {ALTERNATIVES + 1}",
            f"p = {entry.p_value:.4f}",
            f"control p = {entry.control_p:.4f}",
        )
    )


def _describe_measurement(measurement: Measurement) -> str:
    value = f"{measurement.value:.3f} ({measurement.low:.3f} to {measurement.high:.3f})"
    return f"{find_metric(measurement.name).title} {value}"


def describe_crawl(crawl: Crawl) -> str:
    """Return a phrase with the numbers of questions and of recovered documents."""
    n_questions, n_documents = crawl.points[-1]
    curve = ", ".join(f"{documents:,} after {count:,}" for count, documents in crawl.points)
    share = f"{n_documents:,} of {crawl.n_possible:,} documents"
    if crawl.identity is not None:
        share += ", the asker's own included"
    return f"{share} ({n_documents / crawl.n_possible:.0%}) with {n_questions:,} questions: {curve}"


def make_document(audit: RagAudit, command: str) -> Document:
    """Return the page: the verdict, all layers, membership, the crawl and the limits."""
    rows = tuple(
        (
            layer.layer,
            layer.verdict,
            describe_layer(layer),
            escaping.list_printable(layer.disclosed, _MOST_NAMES),
        )
        for layer in sort_layers(audit)
    )
    head = ("Layer", "Verdict", "Documents shown", "Which")
    signals = tuple(
        (name, f"{signal.value:.3f}", f"{signal.low:.3f} to {signal.high:.3f}")
        for name, signal in audit.membership.signals.items()
    )
    layers = Table("layers", "Every layer, leaks first", head, (Group("", rows),))
    auc = Table(
        "signals",
        "Signals that distinguish documents in the store from the others",
        ("Signal", "AUC", "95%, all together"),
        (Group("", signals),),
    )
    membership = Paragraph(f"{audit.membership.verdict}: {describe_membership(audit.membership)}")
    sections = [
        Section("layers", "Layers", (layers,)),
        Section("membership", "Membership", (membership, auc)),
    ]
    if audit.vectors:
        sections.append(Section("vectors", "Stored vectors", (_make_vector_table(audit),)))
    if cause := describe_cache(audit):
        sections.append(Section("cause", "Cause", (Paragraph(cause),)))
    if audit.crawl is not None:
        sections.append(Section("crawl", "Crawl", (Paragraph(describe_crawl(audit.crawl)),)))
    limits = (FactList("Audit", list_facts(audit)), Paragraph(_RULE))
    sections.append(Section("limits", "Scope of this result", limits))
    return Document(
        title="What does the retrieval system give away?",
        facts=(("System", audit.system), ("Command", command)),
        headline=state_result(audit),
        sections=tuple(sections),
        source="Rendered from the system's replies",
    )


def _make_vector_table(audit: RagAudit) -> Table:
    rows = []
    for entry in audit.vectors:
        rows.append((entry.knowledge, entry.verdict, describe_vectors(entry)))
    head = ("Attacker", "Verdict", "Ranks")
    return Table("vectors", _VECTOR_RULE, head, (Group("", tuple(rows)),))


def format_json(audit: RagAudit) -> str:
    layers = []
    for layer in audit.layers:
        layers.append({**asdict(layer), "interval": layer.interval})
    stated = {**asdict(audit), "layers": layers, "verdict": audit.verdict}
    return encode_json(stated)

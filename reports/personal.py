"""Report the extracted share of personal data by kind, but never the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from auditor.core.result import AuditResult, Finding, Measurement
from auditor.reports import phrases
from auditor.reports.blocks import Block, Forest, Group, Paragraph, Table
from auditor.reports.topics import build_forest_span, title_attack_row

TITLES = {
    "email": "E-mail addresses",
    "phone": "Telephone numbers",
    "iban": "IBANs",
    "card": "Card numbers",
    "birth-date": "Dates of birth",
    "id-number": "Identity numbers",
    "name": "Names",
    "address": "Addresses",
}
_MARKED_ALONE = ("name", "address")  # no pattern finds these: known only if the data mark them


def title_personal_kind(kind: str) -> str:
    return TITLES.get(kind, kind.replace("-", " ").capitalize())


def format_personal_kind(kind: str) -> str:
    """Return a kind of personal data as named inside a sentence: `card numbers`, `IBANs`."""
    if kind == "iban":
        return title_personal_kind(kind)
    return phrases.lower_first(title_personal_kind(kind))


def build_personal_kind_blocks(result: AuditResult, findings: Sequence[Finding]) -> Iterator[Block]:
    """Return a table of the extraction of each kind of personal data; [] if nothing was
    measured.
    """
    rows_with_kinds = [finding for finding in findings if finding.by_kind]
    if not rows_with_kinds:  # there is personal data, but no attack could have extracted it
        if result.benchmark.kinds and result.findings:
            yield Paragraph(_describe_personal_kind_counts(result, with_counts=True))
        return
    findings_by_rows: dict[tuple[str, tuple[tuple[str, ...], ...]], list[Finding]] = {}
    for f in rows_with_kinds:
        rows = []
        for kind, m in _sort_personal_kinds(f):
            floor = f.by_kind_nonmembers.get(kind)
            baseline = phrases.format_hit_count(floor) if floor else phrases.NOTHING
            rows.append((title_personal_kind(kind), phrases.format_counted_share(m), baseline))
        key = (f"{f.target} {f.attack}", tuple(rows))
        findings_by_rows.setdefault(key, []).append(f)
    groups = []
    spans = []
    notes = []
    some_extracted = any(phrases.has_hits(f.by_kind) for f in rows_with_kinds)
    for (_, shares), merged in findings_by_rows.items():
        title = " or ".join(title_attack_row(result, f) for f in merged)
        if some_extracted and not phrases.has_hits(merged[0].by_kind):
            notes.append(phrases.describe_no_hits(title, merged[0].by_kind.values()))
            continue
        groups.append(Group(title, shares))
        for kind, m in _sort_personal_kinds(merged[0]):
            floor = merged[0].by_kind_nonmembers.get(kind)
            spans.append(build_forest_span(m, floor.value if floor else None))
    caption = "Personal data extracted letter for letter, with 95% intervals"
    head = ("Personal data", "Recall", "Baseline")
    yield Forest(Table("kinds-table", caption, head, groups, {1, 2}), spans)
    notes += [_NOTE, _describe_personal_kind_counts(result, with_counts=False)]
    yield Paragraph(" ".join(notes))


_NOTE = "Only first guesses count; a secret with several values counts by the share extracted."


def _sort_personal_kinds(finding: Finding) -> list[tuple[str, Measurement]]:
    return sorted(finding.by_kind.items(), key=lambda item: -item[1].value)


def _describe_personal_kind_counts(result: AuditResult, *, with_counts: bool) -> str:
    """Describe how many values of each kind of personal data exist, and which were left out.

    with_counts: whether to give each kind's count. If False, name only kinds that occur in no
    member's suffix.
    """
    counted = []
    absent = []
    reasons: dict[str, list[str]] = {}
    for kind, count in result.benchmark.kinds.items():
        title = format_personal_kind(kind)
        counted.append(f"{title} {count.members:,}")
        if not count.members:
            absent.append(title)
        for n, reason in (
            (count.held, "already in the prefix"),
            (count.cut, "cut off at the end of prefix or suffix"),
            (count.trained, "non-members' values in the training data"),
        ):
            if n:
                reasons.setdefault(reason, []).append(f"{title} {n:,}")
    sentences = []
    if with_counts:
        sentences.append(f"Values that a member's suffix holds whole: {', '.join(counted)}.")
    elif absent:
        sentences.append(f"No member's suffix holds a whole value of: {', '.join(absent)}.")
    if reasons:
        left_out = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in reasons.items())
        sentences.append(f"Values left out ({left_out}).")
    sentences.append(describe_unmarked_personal_kinds(result))
    return " ".join(filter(None, sentences))


def describe_unmarked_personal_kinds(result: AuditResult) -> str:
    """Return a sentence that names the kinds of personal data that were not searched for, or "".

    Some kinds, such as names, have no pattern by which audit could recognise them. Audit searches
    for them only if the data marks them.
    """
    titles = []
    for kind in _MARKED_ALONE:
        if kind not in result.benchmark.kinds:
            titles.append(format_personal_kind(kind))
    # `capitalize` lowers all other letters: none of these kinds is an abbreviation.
    if titles:
        kinds = " and ".join(titles).capitalize()
        return f"{kinds} count as personal data only if the data mark them."
    return ""


def format_personal_data_counts(finding: Finding) -> str:
    """Return the extracted share of each kind: `card numbers 15/80, names 22/94`.

    If a secret may hold several values, return a percentage: `card numbers 15% of 80`.
    """
    return ", ".join(
        f"{format_personal_kind(kind)} {phrases.format_hit_count(m)}"
        for kind, m in _sort_personal_kinds(finding)
    )

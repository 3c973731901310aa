"""What was audited of what was given, and what was extracted by copies: "n of N", in words. Knows a record alone."""

from __future__ import annotations

from auditor.core.counts import counted
from auditor.core.result import AuditResult, Finding, Stratum
from auditor.reports import phrases


def stratum_sentence_part(stratum: Stratum) -> str:
    """Return `all 14 records that occur 16 times are recited`, of those asked; `3 of the 12 asked records that ...`."""
    m, hits = stratum.extracted, phrases.hit_count_of_share(stratum.extracted)
    often = f"that {'occurs' if m.n == 1 else 'occur'} {counted(stratum.copies or 1, 'time')}"
    whole = m.n == stratum.population
    if hits == m.n:
        records = counted(m.n, "record")
        return f"{'all' if whole else 'all asked,'} {records} {often} {'is' if m.n == 1 else 'are'} recited"
    return f"{hits:,} of the {m.n:,}{'' if whole else ' asked'} records {often} {'is' if hits == 1 else 'are'} recited"


def strata_label(finding: Finding) -> str:
    """Return `16 copies: 14 of 14; 1 copy: 0 of 27 asked, of 121`, most copies first; "": not counted by copies."""
    parts = []
    for stratum in finding.strata:
        copies = "copies not known" if stratum.copies is None else counted(stratum.copies, "copy", "copies")
        m = stratum.extracted
        if not m.n:
            parts.append(f"{copies}: none of {stratum.population:,} asked")
            continue
        rest = "" if m.n == stratum.population else f" asked, of {stratum.population:,}"
        parts.append(f"{copies}: {phrases.hit_count_of_share(m):,} of {m.n:,}{rest}")
    return "; ".join(parts)


def coverage_label(result: AuditResult) -> str:
    """Return `41 of 150 records audited (94 not asked for lack of time, 15 auxiliary data)`; "": not counted."""
    counts = result.benchmark.records.get("members")
    if counts is None:
        return ""
    rules = {"identical copies": counts.copies, **counts.left_out, **counts.not_attacked}
    left = ", ".join(f"{n:,} {why}" for why, n in rules.items() if n)
    return f"{counts.audited:,} of {counts.given:,} records audited{f' ({left})' if left else ''}"

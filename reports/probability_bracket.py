"""Report a lower and an upper bound on extraction probabilities.

The lower bound is on the probability that a sample is nearly the secret. The upper bound holds for
every decoding that keeps the order of tokens by probability.
"""

from __future__ import annotations

from collections.abc import Iterator

from auditor.core.result import AuditResult, Finding
from auditor.reports import phrases
from auditor.reports.blocks import Block, Group, Paragraph, Table
from auditor.reports.topics import CHECK, ReportMaterial, Topic, title_attack_row
from auditor.statistics.metrics import name_nonmember_metric

# Formulas C3: a decoding that keeps the order of tokens gives the k-th most likely token at most
# 1/k, and p <= prod 1/k.
_NOTE = (
    "“At least” and “exactly” are for the configuration's own decoding. The suffix itself counts "
    "as a sample within the edits, so the first number is never below the exact one. “At most” "
    "is for every decoding that keeps the order of tokens: temperature, top-k, top-p, min-p, "
    "greedy, even if it changes at each token. This ceiling says nothing about samples near the "
    "suffix, beam search, repetition penalties, forbidden tokens or another text before it; one "
    "of n samples is the suffix with at most n times this probability. A window is a part of the "
    "suffix, given all the true text before it: if its ceiling is low, not even an attacker with "
    "all this text extracts so short a part."
)


def _build_probability_bracket_blocks(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    groups = []
    for f in phrases.list_measured_findings(result, "rank_bound"):
        if f.options.get("bracket"):
            yield Paragraph(_rank_bound_sentence(result, f))
            title = (
                f"{title_attack_row(result, f)} · {phrases.format_decoding(f)} · 1 in "
                f"{_select_threshold(f):,}"
            )
            groups.append(Group(title, tuple(_build_probability_bracket_table_rows(f))))
    head = (
        "One sample is",
        "Members, mean",
        "Non-members, mean",
        "Members above",
        "Non-members above",
    )
    caption = (
        "Bounds on the extraction probability; above: the secrets for which it is at least 1 in "
        "this many"
    )
    if groups:
        yield Table("bracket-table", caption, head, groups, {1, 2, 3, 4})
        yield Paragraph(_NOTE)


def _select_threshold(finding: Finding) -> int:
    return int(finding.options["one_in"])


def _rank_bound_sentence(result: AuditResult, finding: Finding) -> str:
    one_in = _select_threshold(finding)
    mean = phrases.format_measurement_value(finding.measurement("rank_bound"))
    share = phrases.format_share(finding.measurement(f"rank_bound_1_in_{one_in}"))
    floor = finding.measurement(name_nonmember_metric("rank_bound"))
    control = ""
    if floor:
        control = f" (non-members: {phrases.format_measurement_value(floor)})"
    return (
        f"{title_attack_row(result, finding)}: whatever temperature, top-k or top-p the "
        "product uses, one sample is a member's suffix, token for token, with a probability of at "
        f"most {mean} on average{control}; for all but {share} of them it is below 1 in {one_in:,}."
    )


def _build_probability_bracket_table_rows(finding: Finding) -> Iterator[tuple[str, ...]]:
    near = finding.options["near_distance"]
    # title, then the names of the mean and of the share
    kinds = [
        (
            f"within {near} token edits of it, at least",
            "near_verbatim_probability",
            "near_verbatim",
        ),
        ("the suffix, exactly", "extraction_probability", "extraction"),
        ("the suffix, whatever the decoding, at most", "rank_bound", "rank_bound"),
    ]
    windows = list(map(str.strip, str(finding.options["windows"]).split(",")))
    for n in windows:
        title = f"its most likely window of {n} tokens, whatever the decoding, at most"
        kinds.append((title, f"window_bound_{n}", f"window_bound_{n}"))
    for n in windows:
        title = f"share of its windows of {n} tokens that greedy decoding gives"
        kinds.append((title, f"greedy_windows_{n}", ""))
    for title, mean, prefix in kinds:
        share = f"{prefix}_1_in_{_select_threshold(finding)}"
        cells = [title]
        for name, cell in (
            (mean, phrases.format_measurement_value),
            (share, phrases.format_share),
        ):
            cells.append(cell(finding.measurement(name)))
            cells.append(cell(finding.measurement(name_nonmember_metric(name))))
        yield tuple(cells)


TOPICS = (
    Topic(
        "bracket",
        "Bounds on extraction",
        _build_probability_bracket_blocks,
        CHECK,
        6,
    ),
)

"""Tabulate the claims, the adversary's access, the attacked records and the runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain, filterfalse
from operator import itemgetter

from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import AuditResult, BenchmarkRecord, TargetRecord
from auditor.reports import claims, coverage, phrases
from auditor.reports.blocks import (
    Block,
    Bullets,
    Code,
    FactList,
    Group,
    Paragraph,
    Table,
    make_table,
)
from auditor.reports.topics import CHECK, ReportMaterial, Topic, title_attack_row

_NEVER = (
    "Consistent: an audit could have contradicted the claim and did not, which is no proof. Too "
    "weak: the audit had no power to refute the claim, or its games cover only some of the tokens "
    "that the claim covers. All audits of a model share the error level equally."
)

_TRANSCRIPT = (
    "Samples of this audit are not private releases: they depend on --seed, but a claim about "
    "drawn tokens assumes secret randomness."
)


def _build_claim_blocks(result: AuditResult, *, with_verdicts: bool = True) -> Iterator[Block]:
    """Return a table of each claim's promised and spent epsilon, and a table of the audits.

    Each neighbouring relation has a row. with_verdicts: whether to judge each claim in a sentence.
    """
    groups = []
    notes = []
    in_text_only = False
    for target in result.targets:
        if claim := target.claim:
            rows = list(_build_claim_table_rows(claim))
            groups.append(Group(f"{target.title}: {claim.theorem}", rows))
            details = [f"covers {claim.access}, {claim.decoding} decoding"]
            for name, value in claim.details.items():
                details.append(f"{phrases.make_label(name).lower()} {phrases.format_number(value)}")
            notes.append(f"{target.title}: {', '.join(details)}.")
            in_text_only = in_text_only or not claim.any_access
    if in_text_only:
        notes.append(_TRANSCRIPT)
    if with_verdicts:
        notes += map(claims.describe_claim_evidence, claims.select_reported_claims(result))
    head = ("Neighbours", "ε promised", "ε spent", "δ", "Unit", "Tokens drawn", "Status")
    yield Table("claims-table", "ε promised, and ε spent by this audit", head, groups, {1, 2, 3})
    yield Bullets(notes)
    audit_table = claims.build_claim_audit_table(result)
    yield audit_table
    yield Paragraph(_NEVER if audit_table.groups else "")


def _format_claimed_tokens(claim: Claim) -> str:
    """Return the number of tokens drawn so far, and the number that the claim covers.

    A claim of private training covers any number of tokens.
    """
    if claim.queries is None:
        return "any number"
    tokens = f"{claim.spent_queries:,} of {claim.queries:,} covered"
    if claim.spent_queries > claim.queries:
        return f"{tokens}, overdrawn"
    return tokens


def _build_claim_table_rows(claim: Claim) -> Iterator[tuple[str, ...]]:
    for name, epsilon in claim.epsilon.items():
        relation = phrases.format_relation(name)
        if name == claim.relation:
            relation += " (as configured)"
        yield (
            relation,
            phrases.format_number(epsilon),
            phrases.format_number(claim.spent_epsilon.get(name, math.nan)),
            phrases.format_number(claim.delta),
            claim.unit,
            _format_claimed_tokens(claim),
            claim.status,
        )


def _build_adversary_access_blocks(material: ReportMaterial) -> Iterator[Block]:
    """Yield a table of each attack's access, decoding and number of samples.

    Attacks with the same values share a row.
    """
    result = material.result
    attacks: dict[tuple[str, ...], dict[str, None]] = {}
    for f in phrases.sort_findings(result):
        access = []
        for name in f.access:
            access.append(phrases.ACCESS.get(name, phrases.make_label(name)).lower())
        scope = phrases.format_claim_scope(f)
        record = phrases.find_reported_target(result, f.target)
        if record is not None and record.claim is not None:
            # The status is in the title.
            scope = scope.replace(f"; {record.claim.status}", "")
        key = (
            f.target,
            phrases.title_row(result, f),
            ", ".join(access),
            f.decoding or phrases.NOTHING,
            str(f.options.get("samples", phrases.NOTHING)),
            scope,
        )
        attacks.setdefault(key, {})[f.attack] = None
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for (target, title, *rest), names in attacks.items():
        grouped.setdefault(target, []).append((title, ", ".join(names), *rest))
    head = ("Target", "Attack", "Access", "Decoding", "Samples", "Claim applies")
    caption = "What each attack could access, and whether the claim covers it"
    yield Table("access-table", caption, head, [Group("", rows) for rows in grouped.values()])


def _build_attacked_records_blocks(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    n = result.benchmark
    times = {"0": "never (controls)", "1": "inserted once"}
    canaries = []
    for count, many in n.canaries.items():
        canaries.append(f"{many:,} {times.get(count, f'inserted {count} times')}")
    by_copies = []
    for f in result.findings:
        if f.target == UNDEFENDED and len(f.strata) > 1:
            by_copies.append(f"{f.attack} ({f.setting}): {coverage.format_strata(f)}")
    known = phrases.format_known_pairs(n)
    facts = (
        ("Records", coverage.format_coverage(result)),
        ("Columns with texts or media that are not read", ", ".join(n.unread_columns)),
        ("Extracted by copies", "; ".join(by_copies)),
        ("Auxiliary data", f"{known} known to the attacker, not attacked"),
        ("Near-duplicates of auxiliary data", _format_near_duplicates(n)),
        ("Canaries", ", ".join(canaries)),
    )
    yield Paragraph(n.description)
    yield FactList("", tuple(filter(itemgetter(1), facts)))
    yield _build_greedy_recall_table(n, phrases.title_target(result, UNDEFENDED))
    yield Bullets(n.notes)


def _format_near_duplicates(n: BenchmarkRecord) -> str:
    if n.near_duplicates is None:
        return "not counted"
    if not n.near_duplicates:
        return "none among the members"
    return (
        f"{n.near_duplicates:,} of {n.members:,} members: these may come from the auxiliary data, "
        "not from the model"
    )


def _build_greedy_recall_table(n: BenchmarkRecord, target: str) -> Table:
    names = sorted({**n.repeats, **n.greedy_recall}, key=phrases.key_repeats)
    rows = []
    for name in names:
        recall = n.greedy_recall.get(name)
        members = f"{n.repeats.get(name, 0):,}"
        rows.append((name, members if recall is None else phrases.format_share(recall)))
    caption, column = "Members by copies in the data", "Members"
    if n.greedy_recall:
        caption = f"Members that greedy decoding extracts, by copies in the data ({target})"
        column = "Recall"
    return make_table("greedy-table", caption, ("Copies", column), rows, {1})


def _build_target_cost_blocks(material: ReportMaterial) -> Iterator[Block]:
    """Return a table of the models' descriptions and costs, then further costs and notes."""
    result = material.result
    counts = Counter(chain.from_iterable(dict.fromkeys(t.notes) for t in result.targets))
    shared = []
    notes = []
    rows = []
    for note, count in counts.items():
        if count == len(result.targets) > 1:
            shared.append(note)
    if shared:
        notes.append(f"All targets: {'; '.join(shared)}.")
    for t in result.targets:
        remarks = [*_list_further_costs(t), *filterfalse(shared.__contains__, t.notes)]
        if remarks:
            notes.append(f"{t.title}: {'; '.join(remarks)}.")
        time = memory = training = phrases.NOTHING
        if t.milliseconds_per_token is not None:
            time = f"{phrases.format_number(t.milliseconds_per_token)} ms"
        if t.peak_memory_mb is not None:
            memory = phrases.format_memory(t.peak_memory_mb)
        if t.training_seconds is not None:
            training = phrases.format_duration(t.training_seconds)
        perplexity = phrases.format_measurement_value(t.perplexity)
        rows.append((t.title, t.description, perplexity, time, memory, training))
    head = ("Target", "Model", "PPL", "Time per token", "Peak memory", "Training time")
    yield make_table("targets-table", "Cost of each target", head, rows, {2, 3, 4, 5})
    yield Bullets(notes)


def _list_further_costs(target: TargetRecord) -> list[str]:
    """Return a model's further perplexities, and its nominal epsilon, which promises nothing."""
    costs = []
    for m in target.other_perplexities:
        costs.append(
            f"{phrases.lower_first(phrases.format_metric(m.name))} "
            f"{phrases.format_measurement_value(m)}"
        )
    if target.nominal_epsilon is not None:
        costs.append(f"nominal ε {phrases.format_number(target.nominal_epsilon)}, no guarantee")
    return costs


def _build_row_method_blocks(result: AuditResult) -> Iterator[Block]:
    """Return a table of the cost of each attack on each model, and lists of options and notes.

    Each option or note appears once, with the attack results that it concerns.
    """
    noted: dict[str, list[str]] = {}
    # A note of all results needs no titles, and one of all results of a setting names the setting.
    titles_by_setting: dict[str, list[str]] = {"": []}
    of_targets = set(chain.from_iterable(target.notes for target in result.targets))
    costs = []
    for f in phrases.sort_findings(result):
        title = title_attack_row(result, f)
        titles_by_setting[""].append(title)
        titles_by_setting.setdefault(f" ({f.setting})", []).append(title)
        options = ", ".join(f"{name}={option}" for name, option in f.options.items())
        remarks = (*phrases.list_violation_warnings(f), *f.notes)
        if f.not_applicable:
            remarks = (f"not applicable: {f.not_applicable}",)
        for note in (f"{f.attack}: {options}" if options else "", *remarks):
            if note and note not in of_targets:
                noted.setdefault(note, []).append(title)
        cost = [phrases.NOTHING] * 3  # nothing is counted for probes
        if f.drawn or f.rows:
            cost[:2] = f"{f.drawn:,}", f"{f.rows:,}"
        if not f.not_applicable:
            # An earlier session gave answers of a resumed configuration; its time is not recorded.
            cost[2] = phrases.format_duration(f.seconds) if f.seconds else "unknown"
        costs.append((phrases.title_row(result, f), f.attack, *cost))
    head = ("Target", "Attack", "Tokens drawn", "Forward rows", "Time")
    yield make_table("rows-table", "Cost of each configuration", head, costs, {2, 3, 4})
    notes = []
    for note, titles in noted.items():
        owners = f" ({'; '.join(titles)})"
        for setting, setting_titles in reversed(titles_by_setting.items()):
            if titles == setting_titles:
                owners = setting
        notes.append(f"{note}{owners}")
    yield Bullets(notes)


def _build_reproduction_blocks(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    yield Code("Command", result.command)
    yield Paragraph(
        "Guesses do not depend on batch size, workers or resuming. `audit export RUN --csv FILE` "
        "writes every measurement."
    )
    yield from _build_row_method_blocks(result)
    yield FactList("Environment", (("audit", result.tool_version), *result.environment.items()))


TOPICS = (
    Topic(
        "claims",
        "Claims and spending",
        lambda m: _build_claim_blocks(m.result),
        CHECK,
        9,
        turn=19,
        # Markdown judges the claims above all sections.
        brief=lambda m: _build_claim_blocks(m.result, with_verdicts=False),
    ),
    Topic(
        "adversary",
        "What the attacker had access to",
        _build_adversary_access_blocks,
        CHECK,
        10,
        turn=10,
    ),
    Topic(
        "attacked",
        "What was attacked",
        _build_attacked_records_blocks,
        CHECK,
        11,
        turn=8,
    ),
    Topic(
        "targets",
        "Targets",
        _build_target_cost_blocks,
        CHECK,
        12,
        turn=9,
    ),
    Topic(
        "reproduce",
        "How to reproduce",
        _build_reproduction_blocks,
        CHECK,
        13,
        turn=12,
    ),
)

"""Tabulate the claims, the adversary's access, the attacked records and the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import AuditResult, BenchmarkRecord, Finding, TargetRecord
from auditor.reports import claims, coverage, phrases
from auditor.reports.blocks import (
    Block,
    Bullets,
    Code,
    FactList,
    Group,
    Paragraph,
    Table,
)
from auditor.reports.topics import CHECK, Topic, title_attack_row

_NEVER = (
    "Consistent: an audit could have contradicted the claim and did not, which is no proof. Too "
    "weak: it had no power to refute it, or its games look at only some of the covered tokens. All "
    "audits of a model share the error level equally."
)

_TRANSCRIPT = (
    "Samples drawn by this audit are no private release: they depend on --seed, and a claim about "
    "drawn tokens assumes randomness that nobody knows."
)


def _build_claim_blocks(result: AuditResult, *, with_verdicts: bool = True) -> list[Block]:
    """Return a table of the epsilon that each claim promised and spent, and the claims' audits.

    Rows differ by neighbouring relation. with_verdicts: whether to judge each claim in a sentence.
    """
    blocks: list[Block] = []
    promised = []
    for target in result.targets:
        if target.claim:
            promised.append((target.title, target.claim))
    if promised:
        groups = tuple(
            Group(f"{title}: {claim.theorem}", _build_claim_table_rows(claim))
            for title, claim in promised
        )
        head = ("Neighbours", "ε promised", "ε spent", "δ", "Unit", "Tokens drawn", "Status")
        caption = "Promised, and spent by this audit"
        blocks.append(Table("claims-table", caption, head, groups, frozenset({1, 2, 3})))
    notes = []
    for title, claim in promised:
        notes.append(f"{title}: {_format_claim_details(claim)}.")
    # A claim for any access covers the weights, however our samples were drawn.
    if any(not claim.any_access for _, claim in promised):
        notes.append(_TRANSCRIPT)
    if with_verdicts:
        notes += map(claims.describe_claim_evidence, claims.select_reported_claims(result))
    if notes:
        blocks.append(Bullets(tuple(notes)))
    audit_table = claims.build_claim_audit_table(result)
    if audit_table is not None:
        blocks += [audit_table, Paragraph(_NEVER)]
    return blocks


def _format_claim_details(claim: Claim) -> str:
    """Return the unit and scope that a claim protects, and the parameters of its mechanism."""
    details = []
    for name, value in claim.details.items():
        details.append(f"{phrases.make_label(name).lower()} {phrases.format_number(value)}")
    return ", ".join([f"covers {claim.access}, {claim.decoding} decoding", *details])


def _format_claimed_tokens(claim: Claim) -> str:
    """Return the number of tokens drawn so far, and the number that the claim covers.

    Private training limits no queries, so its claim covers any number.
    """
    if claim.queries is None:
        return "any number"
    tokens = f"{claim.spent_queries:,} of {claim.queries:,} covered"
    if claim.spent_queries > claim.queries:
        return f"{tokens}, overdrawn"
    return tokens


def _build_claim_table_rows(claim: Claim) -> tuple[tuple[str, ...], ...]:
    tokens = _format_claimed_tokens(claim)
    return tuple(
        (
            phrases.format_relation(name) + (" (set up for)" if name == claim.relation else ""),
            phrases.format_number(epsilon),
            phrases.format_number(claim.spent_epsilon.get(name, math.nan)),
            phrases.format_number(claim.delta),
            claim.unit,
            tokens,
            claim.status,
        )
        for name, epsilon in claim.epsilon.items()
    )


def _build_adversary_access_blocks(result: AuditResult) -> list[Block]:
    """Return a table of access, decoding and budget; rows with equal values are merged."""
    # Keyed by every cell but the attack's: rows with equal rights share a key.
    attacks: dict[tuple[str, ...], list[str]] = {}
    for f in phrases.sort_findings(result):
        access = []
        for name in f.access:
            access.append(phrases.ACCESS.get(name, phrases.make_label(name)).lower())
        samples = str(f.options.get("samples", phrases.NOTHING))
        title = phrases.title_row(result, f)
        decoding = f.decoding or phrases.NOTHING
        scope = phrases.format_claim_scope(f)
        # The table of claims has the status.
        record = phrases.find_reported_target(result, f.target)
        if record is not None and record.claim is not None:
            scope = scope.replace(f"; {record.claim.status}", "")
        key = (f.target, title, ", ".join(access), decoding, samples, scope)
        attacks.setdefault(key, []).append(f.attack)
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for (target, title, *rest), names_of_attacks in attacks.items():
        names = ", ".join(dict.fromkeys(names_of_attacks))
        grouped.setdefault(target, []).append((title, names, *rest))
    groups = tuple(Group("", tuple(rows)) for rows in grouped.values())
    head = ("Target", "Attack", "Access", "Decoding", "Samples", "Claim applies")
    caption = "What each attack could see, and whether the claim covers it"
    return [Table("access-table", caption, head, groups)] if groups else []


def _build_attacked_records_blocks(result: AuditResult) -> list[Block]:
    n = result.benchmark
    times = {"0": "never (controls)", "1": "inserted once"}
    canaries = ", ".join(
        f"{many:,} {times.get(count, f'inserted {count} times')}"
        for count, many in n.canaries.items()
    )
    facts = (
        *((("Records", records),) if (records := coverage.format_coverage(result)) else ()),
        *(
            (("Extracted by copies", copies),)
            if (copies := _format_extracted_copies(result))
            else ()
        ),
        ("Known to the attacker", f"{n.known:,} pairs, never attacked"),
        ("Near-duplicates of auxiliary data", _format_near_duplicates(n)),
        *((("Canaries", canaries),) if canaries else ()),
    )
    if n.description:
        blocks: list[Block] = [Paragraph(n.description)]
    else:
        blocks = []
    blocks.append(FactList("", facts))
    if n.repeats or n.greedy_recall:
        blocks.append(_build_greedy_recall_table(n))
    return [*blocks, *([Bullets(n.notes)] if n.notes else [])]


def _format_extracted_copies(result: AuditResult) -> str:
    """Return the extracted shares by number of copies, for each attack on the undefended model, or
    "".
    """
    rows = []
    for f in result.findings:
        if f.target == UNDEFENDED and len(f.strata) > 1:
            rows.append(f)
    return "; ".join(f"{f.attack} ({f.setting}): {coverage.format_strata(f)}" for f in rows)


def _format_near_duplicates(n: BenchmarkRecord) -> str:
    if n.near_duplicates is None:
        return "not counted"
    if not n.near_duplicates:
        return "none among the members"
    return (
        f"{n.near_duplicates:,} of {n.members:,} members: these may come from the auxiliary data, "
        "not from the model"
    )


def _build_greedy_recall_table(n: BenchmarkRecord) -> Table:
    names = sorted({**n.repeats, **n.greedy_recall}, key=phrases.key_repeats)
    rows = []
    for name in names:
        recall = n.greedy_recall.get(name)
        members = f"{n.repeats.get(name, 0):,}"
        rows.append((name, members if recall is None else phrases.format_share(recall)))
    if not n.greedy_recall:
        caption = "Members by copies in the data"
        head = ("Copies", "Members")
    else:
        caption = "Members by copies in the data that greedy decoding extracts, undefended"
        head = ("Copies", "Recall")
    return Table("greedy-table", caption, head, (Group("", tuple(rows)),), frozenset({1}))


def _build_target_cost_blocks(result: AuditResult) -> list[Block]:
    """Return a table of models with descriptions and costs, then their other numbers and notes."""
    if not result.targets:
        return []
    shared = _select_shared_notes([target.notes for target in result.targets])
    notes = [f"All targets: {'; '.join(shared)}."] if shared else []
    for target in result.targets:
        remarks = (
            *_list_further_costs(target),
            *(note for note in target.notes if note not in shared),
        )
        notes += [f"{target.title}: {'; '.join(remarks)}."] if remarks else []
    rows = tuple(
        (
            t.title,
            t.description,
            phrases.format_measurement_value(t.perplexity),
            _format_time_per_token(t),
            phrases.NOTHING
            if t.peak_memory_mb is None
            else phrases.format_memory(t.peak_memory_mb),
            phrases.format_duration(math.nan if t.training_seconds is None else t.training_seconds),
        )
        for t in result.targets
    )
    head = ("Target", "Model", "PPL", "Time per token", "Peak memory", "Training time")
    table = Table(
        "targets-table", "Cost of each target", head, (Group("", rows),), frozenset({2, 3, 4, 5})
    )
    return [table, *([Bullets(tuple(notes))] if notes else [])]


def _select_shared_notes(notes_by_run: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the notes that occur in all lists, in the order of the first list."""
    # A single list has nothing to share.
    first, *rest = notes_by_run or [()]
    return tuple(note for note in first if rest and all(note in other for other in rest))


def _format_time_per_token(target: TargetRecord) -> str:
    if target.milliseconds_per_token is None:
        return phrases.NOTHING
    return f"{phrases.format_number(target.milliseconds_per_token)} ms"


def _list_further_costs(target: TargetRecord) -> list[str]:
    """Return a model's other perplexities, and its nominal epsilon, which is no promise."""
    costs = []
    for m in target.other_perplexities:
        costs.append(
            f"{phrases.lower_first(phrases.format_metric(m.name))} "
            f"{phrases.format_measurement_value(m)}"
        )
    if target.nominal_epsilon is not None:
        costs.append(f"nominal ε {phrases.format_number(target.nominal_epsilon)}, no guarantee")
    return costs


def _build_row_method_blocks(result: AuditResult) -> list[Block]:
    """Return a table of the cost of each attack on each model, and lists of options and notes.

    Each option or note appears once, with the attack results that it concerns.
    """
    rows = phrases.sort_findings(result)
    noted: dict[str, list[str]] = {}
    titles_by_setting: dict[str, list[str]] = {"": []}
    # The section on the targets has the notes that are of all attacks on a target.
    of_targets = "; ".join(note for target in result.targets for note in target.notes)
    for f in rows:
        title = title_attack_row(result, f)
        titles_by_setting[""].append(title)
        titles_by_setting.setdefault(f" ({f.setting})", []).append(title)
        for note in (_format_options(f), *_list_row_notes(f)):
            if note not in of_targets:
                noted.setdefault(note, []).append(title)
    costs = tuple(
        (
            phrases.title_row(result, f),
            f.attack,
            f"{f.drawn:,}",
            f"{f.rows:,}",
            phrases.format_duration(f.seconds),
        )
        for f in rows
    )
    head = ("Target", "Attack", "Tokens drawn", "Forward rows", "Time")
    caption = "Cost of each configuration"
    notes = tuple(
        f"{note}{_format_noted_rows(titles, titles_by_setting)}"
        for note, titles in noted.items()
        if note
    )
    table = Table("rows-table", caption, head, (Group("", costs),), frozenset({2, 3, 4}))
    return [table, *([Bullets(notes)] if notes else [])]


def _format_noted_rows(
    titles: Sequence[str], titles_by_setting: Mapping[str, Sequence[str]]
) -> str:
    """Return a suffix with the titles of the attack results that a note concerns.

    ` (white-box)` stands for all results at this access; "" stands for all results.
    """
    for setting, setting_titles in titles_by_setting.items():
        if titles == setting_titles:
            return setting
    return f" ({'; '.join(titles)})"


def _format_options(f: Finding) -> str:
    options = ", ".join(f"{name}={option}" for name, option in f.options.items())
    return f"{f.attack}: {options}" if options else ""


def _list_row_notes(f: Finding) -> tuple[str, ...]:
    if f.not_applicable:
        return (f"not applicable: {f.not_applicable}",)
    return phrases.list_claim_remarks(f)


def _build_reproduction_blocks(result: AuditResult) -> list[Block]:
    reproducibility = (
        "Guesses do not depend on batch size, workers or resuming. `audit export RUN --csv FILE` "
        "writes every measurement."
    )
    return [
        Code("Command", result.command),
        Paragraph(reproducibility),
        *(_build_row_method_blocks(result) if result.findings else []),
        FactList("Environment", (("audit", result.tool_version), *result.environment.items())),
    ]


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
        "What the adversary was allowed",
        lambda m: _build_adversary_access_blocks(m.result),
        CHECK,
        10,
        turn=10,
    ),
    Topic(
        "attacked",
        "What was attacked",
        lambda m: _build_attacked_records_blocks(m.result),
        CHECK,
        11,
        turn=8,
    ),
    Topic(
        "targets",
        "Targets",
        lambda m: _build_target_cost_blocks(m.result),
        CHECK,
        12,
        turn=9,
    ),
    Topic(
        "reproduce",
        "How to reproduce",
        lambda m: _build_reproduction_blocks(m.result),
        CHECK,
        13,
        turn=12,
    ),
)

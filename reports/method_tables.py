"""Tabulate the claims, the adversary's access, the attacked records and the runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import AuditResult, BenchmarkRecord, Finding, TargetRecord
from auditor.reports import claims, coverage, phrases
from auditor.reports.blocks import (
    Block,
    Bullets,
    Card,
    Cards,
    Code,
    FactList,
    Facts,
    Group,
    Paragraph,
    Table,
)
from auditor.reports.topics import CHECK, Topic, title_attack_row

_NEVER = (
    "A claim is consistent where an audit could have contradicted it and did not: that does not "
    "prove it. An audit is too weak if it had no power to refute the claim, or if its games look "
    "at only some of the tokens that the claim covers. All audits of a model share the error level "
    "equally."
)

_TRANSCRIPT = (
    "What this audit drew is no private release: it follows from --seed, and a claim about drawn "
    "tokens assumes randomness that nobody knows."
)


def _build_claim_blocks(result: AuditResult) -> list[Block]:
    """Return a row per neighbouring relation: promised, spent by this audit, and left."""
    audited = (
        stands for stands in claims.select_reported_claims(result) if stands.verdict is not None
    )
    verdicts = tuple(map(claims.describe_claim_verdict, audited))
    audit_table = claims.build_claim_audit_table(result)
    if verdicts:
        evidence: list[Block] = [Bullets(verdicts)]
    else:
        evidence = []
    if audit_table is None:
        evidence += []
    else:
        evidence += [audit_table, Paragraph(_NEVER)]
    promised = [(target.title, target.claim) for target in result.targets if target.claim]
    groups = tuple(
        Group(f"{title}: {claim.theorem}", _build_claim_table_rows(claim))
        for title, claim in promised
    )
    if not groups:
        return evidence
    head = (
        "Neighbours",
        "ε promised",
        "ε spent",
        "δ",
        "Unit",
        "Tokens covered",
        "Drawn",
        "Left",
        "Status",
    )
    caption = "What is promised, and how much of it this audit spent"
    # A claim for any access covers the weights, however our samples were drawn.
    covers_draws = any(not claim.any_access for _, claim in promised)
    table = Table("claims-table", caption, head, groups, frozenset({1, 2, 3, 5, 6, 7}))
    return [table, *([Paragraph(_TRANSCRIPT)] if covers_draws else []), *evidence]


def _build_claimed_tokens_table_cells(claim: Claim) -> tuple[str, str, str]:
    """Return the covered, drawn and remaining tokens; private training has no query limit."""
    if claim.queries is None:
        return "any number", phrases.NOTHING, "any number"
    n_left = claim.queries - claim.spent_queries
    return (
        f"{claim.queries:,}",
        f"{claim.spent_queries:,}",
        f"{n_left:,}" if n_left >= 0 else "overdrawn",
    )


def _build_claim_table_rows(claim: Claim) -> tuple[tuple[str, ...], ...]:
    tokens = _build_claimed_tokens_table_cells(claim)
    return tuple(
        (
            phrases.format_relation(name) + (" (set up for)" if name == claim.relation else ""),
            phrases.format_number(epsilon),
            phrases.format_number(claim.spent_epsilon.get(name, math.nan)),
            phrases.format_number(claim.delta),
            claim.unit,
            *tokens,
            claim.status,
        )
        for name, epsilon in claim.epsilon.items()
    )


def _build_adversary_access_blocks(result: AuditResult) -> list[Block]:
    """Return a table of access x decoding x budget, which merges rows of equal rights."""
    settings = {finding.setting for finding in result.findings}
    explained = tuple(text for setting, text in phrases.SETTINGS.items() if setting in settings)
    if not explained:
        return []
    findings = phrases.sort_findings(result)
    names = tuple(
        dict.fromkeys((*phrases.ACCESS, *(name for finding in findings for name in finding.access)))
    )
    columns = (phrases.ACCESS.get(name, phrases.make_label(name)) for name in names)
    head = ("Target", "Attacks", *columns, "Decoding", "Budget a secret", "Claim applies")
    # Keyed by every cell but the attack's: rows with equal rights share a key.
    attacks: dict[tuple[str, ...], list[str]] = {}
    for f in findings:
        allowed = ("yes" if name in f.access else "no" for name in names)
        budget = phrases.attack_budget_phrase(
            f, result.benchmark.members + result.benchmark.nonmembers
        )
        title = phrases.title_row(result, f)
        decoding = f.decoding or phrases.NOTHING
        key = (f.target, title, *allowed, decoding, budget, phrases.format_claim_scope(f))
        attacks.setdefault(key, []).append(f.attack)
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for (target, title, *rest), names_of_attacks in attacks.items():
        grouped.setdefault(target, []).append(
            (title, ", ".join(dict.fromkeys(names_of_attacks)), *rest)
        )
    groups = tuple(Group("", tuple(rows)) for rows in grouped.values())
    caption = (
        "What each attack could see, how and how often tokens were drawn, and whether the claim "
        "covers it"
    )
    return [Bullets(explained), Table("access-table", caption, head, groups)]


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
        ("Members attacked", f"{n.members:,}"),
        ("Non-members attacked", f"{n.nonmembers:,}"),
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
    """Return extraction by copies for each attack on the undefended model, or ""."""
    rows = [f for f in result.findings if f.target == UNDEFENDED and len(f.strata) > 1]
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
    rows = tuple(
        (
            name,
            f"{n.repeats.get(name, 0):,}",
            phrases.format_share(n.greedy_recall.get(name)),
        )
        for name in names
    )
    head = ("Copies", "Members", "Greedy recall, undefended")
    caption = "Members by copies in the data, and the share that greedy decoding extracts"
    return Table("greedy-table", caption, head, (Group("", rows),), frozenset({1, 2}))


def _build_target_card_blocks(result: AuditResult) -> list[Block]:
    shared = _select_shared_notes([target.notes for target in result.targets])
    cards = (
        Card(
            t.title,
            t.description,
            (*_build_target_cost_facts(t), *_build_claim_facts(t.claim)),
            _exclude_shared_notes(t.notes, shared),
        )
        for t in result.targets
    )
    if shared:
        of_all: list[Block] = [Paragraph(f"Of all targets: {'; '.join(shared)}.")]
    else:
        of_all = []
    if result.targets:
        return [*of_all, Cards(tuple(cards))]
    return []


def _select_shared_notes(notes_by_run: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return notes that all lists share, in the order of the first list."""
    # A single list has nothing to share.
    first, *rest = notes_by_run or [()]
    return tuple(note for note in first if rest and all(note in other for other in rest))


def _exclude_shared_notes(notes: Sequence[str], shared: Sequence[str]) -> tuple[str, ...]:
    return tuple(note for note in notes if note not in shared)


def _build_target_cost_facts(target: TargetRecord) -> Facts:
    per_token = target.milliseconds_per_token
    memory = target.peak_memory_mb
    training = target.training_seconds
    nominal = target.nominal_epsilon  # promises nothing, as its title says
    return (
        ("Held-out perplexity", phrases.format_measurement_value(target.perplexity)),
        *(
            (phrases.format_metric(m.name), phrases.format_measurement_value(m))
            for m in target.other_perplexities
        ),
        (
            "Time per token",
            phrases.NOTHING if per_token is None else f"{phrases.format_number(per_token)} ms",
        ),
        ("Peak memory", phrases.NOTHING if memory is None else phrases.format_memory(memory)),
        (
            "Training time",
            phrases.format_duration(math.nan if training is None else training),
        ),
        *(
            (("Nominal ε, no guarantee", phrases.format_number(nominal)),)
            if nominal is not None
            else ()
        ),
    )


def _build_claim_facts(claim: Claim | None) -> Facts:
    if claim is None:
        return (("Claim", "none"),)
    covered = phrases.format_covered_tokens(claim)
    return (
        ("Claim", f"{claim.theorem} ({claim.status})"),
        ("Unit of protection", phrases.format_protection_unit(claim)),
        ("Covers", f"{claim.access}, {claim.decoding} decoding, {covered}"),
        *(
            (phrases.make_label(name), phrases.format_number(value))
            for name, value in claim.details.items()
        ),
    )


def _build_row_method_blocks(result: AuditResult) -> list[Block]:
    """Return each option and note of the configurations once, with the rows that it concerns."""
    rows = phrases.sort_findings(result)
    noted: dict[str, list[str]] = {}
    for f in rows:
        title = title_attack_row(result, f)
        for note in (_format_options(f), *_list_row_notes(f)):
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
    caption = "How each configuration was run"
    notes = tuple(
        note if len(titles) == len(rows) else f"{note} ({', '.join(titles)})"
        for note, titles in noted.items()
        if note
    )
    table = Table("rows-table", caption, head, (Group("", costs),), frozenset({2, 3, 4}))
    return [table, *([Bullets(notes)] if notes else [])]


def _format_options(f: Finding) -> str:
    options = ", ".join(f"{name}={option}" for name, option in f.options.items())
    return f"{f.attack}: {options}" if options else ""


def _list_row_notes(f: Finding) -> tuple[str, ...]:
    if f.not_applicable:
        return (f"not applicable: {f.not_applicable}",)
    return phrases.list_claim_remarks(f)


def _build_reproduction_blocks(result: AuditResult) -> list[Block]:
    seeds = (
        f"Seed {result.seed}: guesses do not depend on batch size, workers or resuming. Times and "
        "the plan are in result.json; `audit export RUN --csv FILE` writes every measurement."
    )
    return [
        Code("Command", result.command),
        Paragraph(seeds),
        *(_build_row_method_blocks(result) if result.findings else []),
        FactList("Environment", (("audit", result.tool_version), *result.environment.items())),
    ]


TOPICS = (
    Topic("claims", "Claims and spending", lambda m: _build_claim_blocks(m.result), CHECK, 9),
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
        "Targets, costs and claims",
        lambda m: _build_target_card_blocks(m.result),
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

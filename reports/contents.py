"""What a report says, in order: the one source of the Markdown and the HTML report.

Knows the records and the words; not how a block is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from auditor.core.nouns import Claim
from auditor.core.result import AuditResult, BenchmarkRecord, Chain, Finding, Measurement, Step, TargetRecord
from auditor.records.texts import Text
from auditor.reports import inert, words
from auditor.reports.blocks import (
    Block,
    Bullets,
    Card,
    Cards,
    Code,
    Document,
    FactList,
    Facts,
    Figure,
    Figures,
    Group,
    Paragraph,
    Section,
    Table,
)
from auditor.reports.verdict import headline, strongest, verdict

REVEALED = "This report shows private text (--reveal): keep it to yourself."
_REVEALED_AT_MOST = 1_000_000  # characters: a page that a browser still likes


def document(result: AuditResult, texts: Mapping[str, Text] | None = None) -> Document:
    """The whole report. Every string in it is cleaned of control characters; none is escaped.

    texts: the private text to show, by id, in a section of its own.
    """
    result = words.cleaned(result)
    built: list[tuple[str, str, Callable[[AuditResult], list[Block]]]] = [
        ("results", "Results", _results),
        ("where", "Where it leaks", _figures),
        ("attacked", "What was attacked", _attacked),
        ("targets", "Targets, costs and claims", _targets),
        ("adversary", "What the adversary was allowed", _adversary),
        ("limits", "What a good result does not mean", _limits),
        ("reproduce", "How to reproduce", _reproduce),
        ("measurements", "All measurements", _measurements),
    ]
    sections = [(id, title, tuple(blocks(result))) for id, title, blocks in built]
    if texts is not None:
        sections.append(("private", "Private text", tuple(_private(result, texts))))
    return Document(
        title=result.name,
        facts=_masthead(result),
        headline=headline(result),
        verdict=verdict(result),
        sections=tuple(Section(*section) for section in sections if section[2]),
        source="Rendered from result.json alone" if texts is None else "Rendered from result.json and texts.jsonl",
        warning="" if texts is None else REVEALED,
    )


def _masthead(result: AuditResult) -> Facts:
    n = result.benchmark
    return (
        ("Benchmark", n.name),
        ("Secrets", f"{n.members:,} members, {n.nonmembers:,} non-members"),
        ("Run", result.created),
        ("Made with", f"audit {result.tool_version}, seed {result.seed}"),
    )


# --- results --------------------------------------------------------------------------------------------------------


def _results(result: AuditResult) -> list[Block]:
    note = (
        "Every share is written with its count and two-sided 95% interval. Non-members are records that were never "
        "trained on: what an attack completes of them is guessing, and the floor for members if the two are alike "
        "otherwise. Excess is members minus non-members. PPL is perplexity on held-out text: lower is more useful."
    )
    if any(finding.main and finding.main.unit == "probability" for finding in result.findings):
        note += (
            " Rows with a mean p are the auditor's own: computed from the model's law and the answers, not drawn; p is "
            "the probability that one sample gives the secret away."
        )
    if any(finding.main and finding.main.unit == "bits" for finding in result.findings):
        note += (
            " Rows with an exposure are about canaries, random texts that were inserted on purpose: of the texts that "
            "a canary could have been, 1 in 2^exposure is at least as likely as it. One that was never inserted has "
            "1.4 bits on average. Many copies of one canary are a group: its exposure says nothing of one record's ε."
        )
    if not result.findings:
        return [Paragraph("The run has no rows.")]
    return [_results_table(result), *causes(result), Paragraph(note)]


def causes(result: AuditResult) -> list[Block]:
    """What each defense's effect is due to: every chain of every row, step by step."""
    chained = [finding for finding in words.rows(result) if finding.chain]
    likelier = [target for target in result.targets if target.likelihood]
    if not chained and not likelier:
        return []
    groups = (
        *(
            Group(f"{words.row_title(result, f)} · {f.attack}", tuple(_chain_rows(result, f.target, f.chain)))
            for f in chained
        ),
        *(Group(f"{t.title} · {words.LIKELIER}", tuple(_chain_rows(result, t.name, t.likelihood))) for t in likelier),
    )
    head = ("Step", "From", "To", "What changes", "Difference", "95% interval", "n", "Shown")
    caption = "What the effect of each defense is due to: the step from one control row to the next, paired by secret"
    return [Table("causes-table", caption, head, groups, frozenset({4, 5, 6}))]


def _chain_rows(result: AuditResult, target: str, chain: Chain | None) -> Iterator[tuple[str, ...]]:
    assert chain is not None  # `causes` has seen to it
    for step in words.steps(chain, target):
        yield _step_row(result, step)
    whole = ("all of these", *_between(result, words.UNDEFENDED, target), "")
    yield (*whole, *_difference(chain.whole), "")
    for step in words.steps(chain, target, beyond=True):
        yield _step_row(result, step)


def _step_row(result: AuditResult, step: Step) -> tuple[str, ...]:
    row = (words.causes(step), *_between(result, step.before, step.after), "; ".join(step.causes.values()))
    if step.difference is None:
        return (*row, f"no step: {step.note}")
    return (*row, *_difference(step.difference), ("yes" if words.is_shown(step) else "not shown") + _noted(step))


def _noted(step: Step) -> str:
    return f" ({step.note})" if step.note else ""


def _between(result: AuditResult, before: str, after: str) -> tuple[str, str]:
    return words.target_title(result, before), words.target_title(result, after) or words.NOTHING


def _difference(m: Measurement) -> tuple[str, str, str]:
    return words.in_points(m), words.bounds(m), f"{m.n:,}"


def _results_table(result: AuditResult) -> Table:
    head = ("Target", "Attack", "Verbatim recall", "Non-members", "Excess", "PPL", "Decoding", "Claim applies")
    groups = _by_target(result, lambda finding: [_result_row(result, finding)])
    return Table("results-table", "Recall of each target, setting and attack", head, groups, frozenset({2, 3, 4, 5}))


def _result_row(result: AuditResult, finding: Finding) -> tuple[str, ...]:
    title = words.row_title(result, finding)
    if finding.not_applicable:
        return (title, finding.attack, f"not applicable: {finding.not_applicable}")
    return (
        title,
        finding.attack,
        *words.beside_the_floor(finding),
        words.perplexity(result, finding.target),
        finding.decoding,
        words.claim_applies(finding),
    )


def _by_target(result: AuditResult, rows: Callable[[Finding], list[tuple[str, ...]]]) -> tuple[Group, ...]:
    """One untitled group a target, in report order."""
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for finding in words.rows(result):
        grouped.setdefault(finding.target, []).extend(rows(finding))
    return tuple(Group("", tuple(group)) for group in grouped.values())


# --- figures --------------------------------------------------------------------------------------------------------


def _figures(result: AuditResult) -> list[Block]:
    figures: list[Figure] = []
    for setting in words.SETTINGS:
        where = "worst case" if setting == "worst" else "only sampled tokens"
        findings = tuple(f for f in words.rows(result) if f.setting == setting and not f.not_applicable)
        figures += _repeats_figure(result, setting, where, findings)
        figures += _errors_figure(result, setting, where, findings)
        figures += _any_of_figure(result, setting, where, findings)
        figures += _exposure_figure(result, setting, where, findings)
    return [Figures(tuple(figures))] if figures else []


def _repeats_figure(result: AuditResult, setting: str, where: str, findings: Sequence[Finding]) -> list[Figure]:
    """One attack only, the one that did best against the undefended model: error bars of all would hide each other."""
    best = strongest(result, words.UNDEFENDED, setting)
    measured = [f for f in findings if f.by_repeats and not words.exposures(f)]
    if not measured:
        return []
    shown = tuple(f for f in measured if f.attack == (best or measured[0]).attack)
    if not shown:
        return []
    first = next(iter(shown[0].by_repeats.values()))
    attacked = first.unit == "share"
    what = "Recall" if attacked else words.label(first.name)
    title = f"{what} by repetitions, {where}"
    counted = "by how often each stood in the training data, with 95% intervals"
    seen = f"Share of secrets that {shown[0].attack} completed" if attacked else what
    description = f"{seen}, {counted}."
    groups = tuple(Group(words.row_title(result, f), _repeat_rows(f)) for f in shown)
    head, id = ("Repetitions", what, "95% interval", "n"), f"repeats-{setting}"
    table = Table(f"{id}-table", f"{title}: the numbers", head, groups, frozenset({1, 2, 3}), folded=True)
    return [Figure(id, "repeats", shown, title, description, table)]


def _repeat_rows(finding: Finding) -> tuple[tuple[str, ...], ...]:
    measured = words.by_repeats(finding.by_repeats)
    return tuple((repeats, words.counted(m), words.bounds(m), f"{m.n:,}") for repeats, m in measured)


def _errors_figure(result: AuditResult, setting: str, where: str, findings: Sequence[Finding]) -> list[Figure]:
    shown = tuple(f for f in findings if f.curve)
    if not shown:
        return []
    title = f"Recall by wrong guesses allowed, {where}"
    description = "Share of secrets completed when guesses are taken surest first, until so many of them were wrong."
    head, id = ("Wrong guesses allowed", "Recall"), f"errors-{setting}"
    groups = tuple(Group(f"{words.row_title(result, f)} · {f.attack}", tuple(_curve_rows(f.curve))) for f in shown)
    table = Table(f"{id}-table", f"{title}: the numbers", head, groups, frozenset({0, 1}), folded=True)
    return [Figure(id, "errors", shown, title, description, table)]


def _any_of_figure(result: AuditResult, setting: str, where: str, findings: Sequence[Finding]) -> list[Figure]:
    shown = tuple(f for f in findings if words.any_of_n(f))
    if not shown:
        return []
    title = f"Expected recall of any of n samples, {where}"
    description = "Exact, without sampling: the mean probability that one of n samples is the secret, word for word."
    groups = tuple(Group(words.row_title(result, f), tuple(_any_of_rows(f))) for f in shown)
    head, id = ("Samples", "Members", "Non-members"), f"any-of-{setting}"
    table = Table(f"{id}-table", f"{title}: the numbers", head, groups, frozenset({0, 1, 2}), folded=True)
    return [Figure(id, "any_of_n", shown, title, description, table)]


def _exposure_figure(result: AuditResult, setting: str, where: str, findings: Sequence[Finding]) -> list[Figure]:
    """Figure 1 of the ADP paper: exposure by insertions, a line a target, with what each costs and promises."""
    shown = tuple(f for f in findings if words.exposures(f))
    if not shown:
        return []
    title = f"Exposure by insertions, {where}"
    description = (
        "How far up the model ranks a canary among every text it could have been, by how often it was inserted, with "
        "95% intervals; dotted: what a canary that was never inserted has on average."
    )
    labels = tuple((f.target, words.with_costs(result, f.target)) for f in shown)
    groups = tuple(
        Group(label, tuple((count, words.value(m), words.bounds(m), f"{m.n:,}") for count, m in words.exposures(f)))
        for (_, label), f in zip(labels, shown, strict=True)
    )
    head, id = ("Insertions", "Exposure, bits", "95% interval", "n"), f"exposure-{setting}"
    table = Table(f"{id}-table", f"{title}: the numbers", head, groups, frozenset({1, 2, 3}), folded=True)
    return [Figure(id, "insertions", shown, title, description, table, labels=labels)]


def _any_of_rows(finding: Finding) -> list[tuple[str, ...]]:
    floor = words.any_of_n(finding, "_nonmembers")
    return [
        (f"{n:,}", words.with_bounds(m), words.with_bounds(floor.get(n))) for n, m in words.any_of_n(finding).items()
    ]


def _curve_rows(curve: Sequence[tuple[int, float]]) -> list[tuple[str, ...]]:
    """A few points: 0, 1, 2, 5, 10, … and the last. The rest is in result.json."""
    last = curve[-1][0]
    wanted = {0, last, *(step * 10**power for power in range(7) for step in (1, 2, 5))}
    return [(f"{errors:,}", f"{words.percent(recall)}%") for errors, recall in curve if errors in wanted]


# --- what was attacked, and what stood around it --------------------------------------------------------------------


def _attacked(result: AuditResult) -> list[Block]:
    n = result.benchmark
    facts = (
        ("Members attacked", f"{n.members:,}"),
        ("Non-members attacked", f"{n.nonmembers:,}"),
        ("Known to the attacker", f"{n.known:,} pairs, never attacked"),
        ("Near-duplicates of known pairs", _near_duplicates(n)),
        *((("Canaries", _canaries(n)),) if n.canaries else ()),
    )
    blocks: list[Block] = [Paragraph(n.description)] if n.description else []
    blocks.append(FactList("", facts))
    if n.repeats or n.greedy_recall:
        blocks.append(_greedy_table(result))
    return [*blocks, *([Bullets(n.notes)] if n.notes else [])]


def _canaries(n: BenchmarkRecord) -> str:
    """`2 inserted once, 1 inserted 16 times, 4 never (controls)`."""
    times = {"0": "never (controls)", "1": "inserted once"}
    parts = (f"{many:,} {times.get(count, f'inserted {count} times')}" for count, many in n.canaries.items())
    return ", ".join(parts)


def _near_duplicates(n: BenchmarkRecord) -> str:
    if n.near_duplicates is None:
        return "not counted"
    if not n.near_duplicates:
        return "none among the members"
    return f"{n.near_duplicates:,} of {n.members:,} members: these may come from the known pairs, not from the model"


def _greedy_table(result: AuditResult) -> Table:
    n = result.benchmark
    names = sorted({**n.repeats, **n.greedy_recall}, key=words.repeats_key)
    rows = tuple((name, f"{n.repeats.get(name, 0):,}", words.share(n.greedy_recall.get(name))) for name in names)
    head = ("Repetitions", "Members", "Greedy recall, undefended")
    caption = "Members by repetitions, and what greedy decoding alone gives away"
    return Table("greedy-table", caption, head, (Group("", rows),), frozenset({1, 2}))


def _targets(result: AuditResult) -> list[Block]:
    cards = (Card(t.title, t.description, (*_cost(t), *_nominal(t), *_claim(t.claim)), t.notes) for t in result.targets)
    return [Cards(tuple(cards))] if result.targets else []


def _cost(target: TargetRecord) -> Facts:
    per_token, memory, training = target.milliseconds_per_token, target.peak_memory_mb, target.training_seconds
    return (
        ("Held-out perplexity", words.with_bounds(target.perplexity)),
        *((words.label(m.name), words.with_bounds(m)) for m in target.other_perplexities),
        ("Time per token", words.NOTHING if per_token is None else f"{words.number(per_token)} ms"),
        ("Peak memory", words.NOTHING if memory is None else words.memory(memory)),
        ("Training time", words.NOTHING if training is None else words.duration(training)),
    )


def _nominal(target: TargetRecord) -> Facts:
    """An epsilon that promises nothing is named as such."""
    if target.nominal_epsilon is None:
        return ()
    return (("Nominal ε, no guarantee", words.number(target.nominal_epsilon)),)


def _claim(claim: Claim | None) -> Facts:
    if claim is None:
        return (("Claim", "none"),)
    by_relation = ((f"ε, {words.relation(name)}", _epsilon(claim, name)) for name in claim.epsilon)
    return (
        ("Claim", f"{claim.theorem} ({claim.status})"),
        *by_relation,
        ("δ", words.number(claim.delta)),
        ("Set up for", f"{words.relation(claim.relation)}; unit of protection: {words.unit(claim)}"),
        ("Covers", f"{claim.access}, {claim.decoding} decoding, {words.covers(claim)}"),
        ("Spent by this audit", words.spent(claim)),
        *((words.plain(name), words.number(value)) for name, value in claim.details.items()),
    )


def _epsilon(claim: Claim, name: str) -> str:
    """What is promised under one relation, and how much of it is spent."""
    epsilon, spent = claim.epsilon[name], claim.spent_epsilon.get(name)
    if spent is None or math.isinf(epsilon):
        return words.number(epsilon)
    return f"{words.number(epsilon)}, of which {words.number(spent)} spent"


# --- the threat model -----------------------------------------------------------------------------------------------


def _adversary(result: AuditResult) -> list[Block]:
    settings = {finding.setting for finding in result.findings}
    explained = tuple(text for setting, text in words.SETTINGS.items() if setting in settings)
    return [Bullets(explained), _access_table(result)] if explained else []


def _access_table(result: AuditResult) -> Table:
    """The matrix access x decoding x budget: rows that were allowed the same are one row, their attacks listed."""
    findings = words.rows(result)
    names = tuple(dict.fromkeys((*words.ACCESS, *(name for finding in findings for name in finding.access))))
    columns = (words.ACCESS.get(name, words.plain(name)) for name in names)
    head = ("Target", "Attacks", *columns, "Decoding", "Budget a secret", "Claim applies")
    attacks: dict[tuple[str, ...], list[str]] = {}
    for f in findings:
        allowed = ("yes" if name in f.access else "no" for name in names)
        spent = words.budget(f, result.benchmark.members + result.benchmark.nonmembers)
        title, decoding = words.row_title(result, f), f.decoding or words.NOTHING
        key = (f.target, title, *allowed, decoding, spent, words.claim_applies(f))
        attacks.setdefault(key, []).append(f.attack)
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for (target, title, *rest), who in attacks.items():
        grouped.setdefault(target, []).append((title, ", ".join(dict.fromkeys(who)), *rest))
    groups = tuple(Group("", tuple(rows)) for rows in grouped.values())
    caption = "What each attack could see, how and how often tokens were drawn, and whether the claim covers it"
    return Table("access-table", caption, head, groups)


def _limits(result: AuditResult) -> list[Block]:
    n, claims = result.benchmark.members, [target.claim for target in result.targets if target.claim]
    unseen = (
        f"Zero hits is not zero leakage. With {n:,} secrets attacked, none coming out would still leave up to "
        f"{words.percent(words.zero_hits_bound(n))}% possible (upper end of the 95% interval)."
    )
    limits = [unseen] * (n > 0) + [
        "An attack gives a lower bound. Other attacks, more samples, better known pairs or more queries may get more "
        "out.",
        "Recall counts verbatim completion of the attacked suffixes, near-verbatim recall a few token edits more. "
        "Paraphrase, partial disclosure, membership and attribute inference are not counted.",
        "The result is about these secrets. Records that are rarer, longer, more often repeated or differently written "
        "may leak more.",
        "The intervals cover the choice of secrets, row by row. They do not cover training again with another seed, "
        "nor picking the best of many rows afterwards.",
    ]
    if claims:
        limits += [
            "Low measured recall does not prove a claim, and a claim says nothing about a row where it does not apply.",
            "An ε holds for its unit, relation, access, decoding and number of drawn tokens. Every further token "
            "answered spends more; a claim about a shard is not one about a person.",
        ]
    if result.benchmark.name == "lab":
        limits.append(
            "The lab is a small model on synthetic records. Its numbers show that the method works, not what your "
            "model leaks."
        )
    return [Bullets(tuple(limits))]


# --- the record -----------------------------------------------------------------------------------------------------


def _reproduce(result: AuditResult) -> list[Block]:
    seeds = (
        f"Seed {result.seed}. Every secret owns its random numbers, keyed by seed, target, sampling recipe and secret, "
        "so the guesses do not depend on batch size, workers or resuming."
    )
    timings = tuple((words.plain(stage), words.duration(seconds)) for stage, seconds in result.timings.items())
    return [
        Code("Command", result.command),
        Paragraph(seeds),
        FactList("Environment", (("audit", result.tool_version), *result.environment.items())),
        FactList("Time by stage", timings),
        Code("Plan", json.dumps(result.plan, indent=2, ensure_ascii=False), folded=True),
    ]


def _measurements(result: AuditResult) -> list[Block]:
    return [_measurement_table(result), _rows_table(result)] if result.findings else []


def _measurement_table(result: AuditResult) -> Table:
    groups = tuple(
        Group(
            f"{words.row_title(result, f)} · {f.attack} · {words.decoding(f)}",
            tuple(map(_measurement_row, f.measurements)),
        )
        for f in words.rows(result)
        if f.measurements
    )
    head = ("Measurement", "Value", "95% interval", "n", "Note")
    return Table("measurements-table", "Every measurement of every row", head, groups, frozenset({1, 2, 3}))


def _measurement_row(m: Measurement) -> tuple[str, ...]:
    return (words.label(m.name), words.counted(m), words.bounds(m), f"{m.n:,}", m.note)


def _rows_table(result: AuditResult) -> Table:
    head = ("Target", "Attack", "Options", "Tokens drawn", "Forward rows", "Time", "Notes")
    groups = _by_target(result, lambda finding: [_cost_row(result, finding)])
    return Table("rows-table", "How each row was run", head, groups, frozenset({3, 4, 5}))


def _cost_row(result: AuditResult, f: Finding) -> tuple[str, ...]:
    options = ", ".join(f"{name}={option}" for name, option in f.options.items())
    notes = (f"not applicable: {f.not_applicable}",) if f.not_applicable else words.notes(f)
    cost = (f"{f.drawn:,}", f"{f.rows:,}", words.duration(f.seconds))
    return (words.row_title(result, f), f.attack, options, *cost, "; ".join(notes))


# --- what the secrets say, where that was asked for -----------------------------------------------------------------


def _private(result: AuditResult, texts: Mapping[str, Text]) -> list[Block]:
    """The secrets that most rows gave away come first, and stay where there are too many to show."""
    titles = {
        "/".join((f.target, f.setting, f.attack)): f"{words.row_title(result, f)}: {f.attack}" for f in result.findings
    }
    best = strongest(result, words.UNDEFENDED)
    row = "/".join((best.target, best.setting, best.attack)) if best else ""
    rows, left = [], _REVEALED_AT_MOST
    for text in sorted(texts.values(), key=lambda text: -len(text.verbatim)):
        given = ", ".join(titles.get(name, name) for name in text.verbatim) or words.NOTHING
        shown = (
            text.alias,
            *map(inert.visible, (text.prefix, text.suffix, text.guesses.get(row, ""))),
            inert.clean(given),
        )
        left -= sum(map(len, shown))
        if left < 0:
            break
        rows.append(shown)
    note = f"{len(rows):,} of {len(texts):,} secrets, those given away by most rows first. Line ends are written as ↵."
    if any(text.decoded for text in texts.values()):
        note += " The data hold token ids alone: texts are what the model's tokenizer makes of them."
    guess = f"First guess, {titles[row]}" if row in titles else "First guess"
    head = ("Secret", "Prefix", "Suffix", guess, "Given away verbatim by")
    table = Table(
        "private-table",
        "What the secrets say, and what the strongest undefended row guessed",
        head,
        (Group("", tuple(rows)),),
    )
    return [Paragraph(note), table]

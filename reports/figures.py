"""The figures of a result alone, each with the numbers behind it: drawn by `plots`, chosen by the
sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.reports import phrases
from auditor.reports.blocks import Figure, Group
from auditor.reports.topics import row_title_with_attack
from auditor.reports.verdict import strongest_attack_row
from auditor.statistics.metrics import SHARES

RESEARCH = ("errors", "any_of_n")  # plots that stand with the evidence
_FIRST = frozenset({0})  # the column without numbers: it names what the others are numbers of


def all_figures(result: AuditResult) -> list[Figure]:
    """Every figure of a result, setting by setting."""
    figures: list[Figure] = []
    measured = [f for f in phrases.findings_in_report_order(result) if not f.not_applicable]
    for setting in phrases.SETTINGS:
        own = tuple(f for f in measured if f.setting == setting)
        figures += _recall_by_repeats_figures(result, setting, own)
        if shown := tuple(f for f in own if f.curve):
            figures.append(_recall_by_wrong_guesses_figure(result, setting, shown))
        if shown := tuple(f for f in own if phrases.any_of_n_recall_to_report(f)):
            figures.append(_any_of_n_samples_figure(result, setting, shown))
        if shown := tuple(f for f in own if phrases.exposure_by_insertions_to_report(f)):
            figures.append(_exposure_figure(result, setting, shown))
    return figures


def _recall_by_repeats_figures(
    result: AuditResult, setting: str, findings: Sequence[Finding]
) -> list[Figure]:
    """One attack only, the one that did best against the undefended model: error bars of all would
    hide each other."""
    best = strongest_attack_row(result, UNDEFENDED, setting)
    measured = [f for f in findings if f.by_repeats and f.main and f.main.unit in SHARES]
    if not measured:
        return []
    # Where the strongest attack has no numbers by repeats there is no figure, not another attack's.
    shown = tuple(f for f in measured if f.attack == (best or measured[0]).attack)
    if not shown:
        return []
    first = next(iter(shown[0].by_repeats.values()))
    attacked = first.unit == "share"
    what = "Recall" if attacked else phrases.metric_label(first.name)
    title = f"{what} by repetitions, {setting}"
    counted = (
        "by how many copies of each --data holds, which may not be what was trained on, with 95% "
        "intervals"
    )
    seen = f"Share of secrets that {shown[0].attack} completed" if attacked else what
    description = f"{seen}, {counted}."
    groups = tuple(
        repeat_count_row_group(phrases.row_title(result, f), f.by_repeats) for f in shown
    )
    head = ("Repetitions", what, "95% interval", "n")
    return [
        Figure(
            f"repeats-{setting}", "repeats", title, description, head, groups, shown, text=_FIRST
        )
    ]


def repeat_count_row_group(title: str, by_repeats: Mapping[str, Measurement]) -> Group:
    """A row a repeat count: the number, its interval and n."""
    rows = (
        (count, *phrases.cells_of_measurement(m))
        for count, m in phrases.sort_by_repeats(by_repeats)
    )
    return Group(title, tuple(rows))


def _recall_by_wrong_guesses_figure(
    result: AuditResult, setting: str, shown: tuple[Finding, ...]
) -> Figure:
    title = f"Recall by wrong guesses allowed, {setting}"
    description = (
        "Share of secrets completed when guesses are taken surest first, until so many of them "
        "were wrong."
    )
    head = ("Wrong guesses allowed", "Recall")
    groups = tuple(
        Group(row_title_with_attack(result, f), tuple(_recall_by_wrong_guesses_table_rows(f.curve)))
        for f in shown
    )
    return Figure(f"errors-{setting}", "errors", title, description, head, groups, shown)


def _any_of_n_samples_figure(
    result: AuditResult, setting: str, shown: tuple[Finding, ...]
) -> Figure:
    title = f"Expected recall of any of n samples, {setting}"
    description = (
        "Exact, without sampling: the mean probability that one of n samples is the secret, word "
        "for word."
    )
    groups = []
    for f in shown:
        floor, cell = (
            phrases.any_of_n_recall_to_report(f, "_nonmembers"),
            phrases.value_with_interval,
        )
        rows = (
            (f"{n:,}", cell(m), cell(floor.get(n)))
            for n, m in phrases.any_of_n_recall_to_report(f).items()
        )
        groups.append(Group(phrases.row_title(result, f), tuple(rows)))
    head = ("Samples", "Members", "Non-members")
    return Figure(f"any-of-{setting}", "any_of_n", title, description, head, tuple(groups), shown)


def _exposure_figure(result: AuditResult, setting: str, shown: tuple[Finding, ...]) -> Figure:
    """Figure 1 of the ADP paper: exposure by insertions, a line a target, with what each costs and
    promises."""
    title = f"Exposure by insertions, {setting}"
    description = (
        "How far up the model ranks a canary among every text it could have been, by how often it "
        "was inserted, with 95% intervals; dotted: what a canary that was never inserted has on "
        "average."
    )
    labels = tuple((f.target, phrases.target_title_with_costs(result, f.target)) for f in shown)
    groups = tuple(
        repeat_count_row_group(label, dict(phrases.exposure_by_insertions_to_report(f)))
        for (_, label), f in zip(labels, shown, strict=True)
    )
    head = ("Insertions", "Exposure, bits", "95% interval", "n")
    plot = "insertions"
    return Figure(
        f"exposure-{setting}",
        plot,
        title,
        description,
        head,
        groups,
        shown,
        text=_FIRST,
        labels=labels,
    )


def _recall_by_wrong_guesses_table_rows(
    curve: Sequence[tuple[int, float]],
) -> list[tuple[str, ...]]:
    """Few points: the first at 0, 1, 2, 5, 10, … wrong guesses or more, and the last. result.json
    has all."""
    wanted = (0, *(step * 10**power for power in range(7) for step in (1, 2, 5)))
    # A count that no point reaches gives -1, which the modulo makes the last point.
    shown = {
        next((i for i, (errors, _) in enumerate(curve) if errors >= least), -1) % len(curve)
        for least in wanted
    }
    return [(f"{curve[i][0]:,}", f"{phrases.format_percent(curve[i][1])}%") for i in sorted(shown)]

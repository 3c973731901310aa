"""What was extracted by copies decides and is said: few copied records among many single ones do
not average away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from auditor.conclusions.leak_readings import VERBATIM
from auditor.conclusions.signals import NOT_SHOWN, SHOWN, assess_leak_signals
from auditor.conclusions.strata import find_worst_group, measure_weighted_share
from auditor.core.nouns import UNDEFENDED, Secret
from auditor.core.result import AuditResult, Doubt, Finding, Measurement, RecordCounts, Stratum
from auditor.models.trained_length import TrainedLength
from auditor.reports import coverage, html, markdown, phrases, screen, severity
from auditor.statistics.extraction import group_copies_strata, measure_group_shares
from auditor.statistics.intervals import measure_share
from auditor.statistics.metrics import name_excess_metric, name_nonmember_metric


def share(name: str, hits: int, n: int) -> Measurement:
    return measure_share(name, np.arange(n) < hits)


def copied(result: AuditResult, hits: int, n: int, single: int, asked: int) -> AuditResult:
    """Of n records in 16 copies so many extracted; of the `single` ones none of those that were
    asked."""
    strata = (
        Stratum(16, n, share("recall", hits, n)),
        Stratum(1, single, share("recall", 0, asked)),
    )
    row = next(f for f in result.findings if f.target == UNDEFENDED and f.measurement("recall"))
    floor = share(name_nonmember_metric("recall"), 0, 200)
    kept = tuple(
        m
        for m in row.measurements
        if m.name not in ("recall", floor.name, name_excess_metric("recall"))
        and "any" not in m.name
    )
    row = replace(
        row,
        measurements=(share("recall", hits, n + asked), floor, *kept),
        by_repeats={},
        strata=strata,
    )
    counts = RecordCounts(n + single + 6, n + asked, left_out={"too short": 6}, not_attacked={})
    return replace(
        result,
        findings=(row,),
        benchmark=replace(result.benchmark, greedy_recall={}, records={"members": counts}),
    )


def verbatim_row(result: AuditResult) -> Finding:
    return result.findings[0]


def test_severity_follows_the_worst_stratum_and_says_so(result: AuditResult) -> None:
    found = copied(result, hits=14, n=14, single=4000, asked=4000)
    seen = assess_leak_signals(found)
    signal = next(s for s in seen.list_target_signals(UNDEFENDED) if s.kind is VERBATIM)
    assert (
        signal.status == SHOWN
        and signal.worst_stratum is not None
        and signal.worst_stratum.copies == 16
    )
    said = severity.rate_severity(seen, UNDEFENDED)
    assert (
        said.word == severity.HIGH
        and "all 14 records that occur 16 times are recited" in said.clause
    )
    none = assess_leak_signals(copied(result, hits=0, n=14, single=40, asked=40))
    assert all(s.worst_stratum is None for s in none.signals)


def test_the_headline_follows_the_worst_group(result: AuditResult) -> None:
    """KTO: 3 of 12 wanted records among 4,000 unwanted ones were below the non-members' error."""
    found = copied(result, hits=3, n=12, single=4000, asked=4000)
    shares = {"unwanted": share("recall", 0, 4000), "wanted": share("recall", 3, 12)}
    row = replace(verbatim_row(found), strata=(), decoding="ancestral")
    pooled, grouped = (
        assess_leak_signals(replace(found, findings=(replace(row, by_group=groups),)))
        for groups in ({}, shares)
    )
    signals = [
        next(s for s in seen.list_target_signals(UNDEFENDED) if s.kind is VERBATIM)
        for seen in (pooled, grouped)
    ]
    assert [signal.status for signal in signals] == [NOT_SHOWN, SHOWN]
    assert signals[1].part == "group wanted" and not signals[1].gate_rule
    said = "3 of the 12 records of the group wanted are recited"
    assert said in severity.rate_severity(grouped, UNDEFENDED).clause
    screened = replace(found, findings=(replace(row, by_group=shares),))
    text = " ".join(screen.build_first_screen(screened, Path("none")).plain.split())
    assert said in text and "unwanted: 0/4,000, wanted: 3/12 (text-only)" in text


def test_a_record_of_several_parts_counts_once_in_its_group() -> None:
    secrets = [
        Secret(f"s{i}", (1,), (2,), document=document, group=group)
        for i, (document, group) in enumerate([("d", "a"), ("d", "a"), (None, "a"), (None, "b")])
    ]
    shares = measure_group_shares(secrets, np.array([False, True, False, False]))
    assert {name: (m.value, m.n) for name, m in shares.items()} == {"a": (0.5, 2), "b": (0.0, 1)}
    assert measure_group_shares(secrets[:3], np.array([False, True, False])) == {}


@pytest.mark.parametrize(("population", "which"), [(1, "only"), (12, "only asked")])
def test_a_single_recited_record_is_not_called_all(population: int, which: str) -> None:
    stratum = Stratum(8, population, Measurement("recall", 1.0, 0.025, 1.0, 1))
    said = f"the {which} record that occurs 8 times is recited"
    assert coverage.format_stratum(stratum) == said


def test_records_of_several_parts_are_recited_at_least_in_part() -> None:
    """The second part of neither record came out."""
    secrets = [
        Secret(f"s{i}", (1,), (2,), document=document, copies=8)
        for i, document in enumerate(("d", "d", "e", "e"))
    ]
    for asked, note in ((secrets, ", at least in part"), (secrets[::2], "")):
        hit = np.array([secret.id in ("s0", "s2") for secret in asked])
        (stratum,) = group_copies_strata({"8": 2}, asked, hit)
        text = f"all 2 records that occur 8 times are recited{note}"
        assert coverage.format_stratum(stratum) == text


def test_parts_are_not_called_records_if_no_attack_guessed_text(result: AuditResult) -> None:
    """The exact probabilities alone: 16 parts of 8 records were "Records: 16 trained on"."""
    finding = replace(result.findings[0], measurements=())
    n_parts = result.benchmark.members
    for n_records, title in ((n_parts // 2, "Parts of records: "), (n_parts, "Records: ")):
        counts = RecordCounts(n_records, n_records)
        benchmark = replace(result.benchmark, records={"members": counts})
        page = markdown.render_markdown_report(
            replace(result, findings=(finding,), benchmark=benchmark)
        )
        assert f"\n{title}{n_parts:,} trained on (members)" in page


def test_no_group_is_named_if_none_is_worse_than_all(result: AuditResult) -> None:
    row = verbatim_row(copied(result, 3, 12, 40, 40))
    # The last: 18 of 106 is no more than chance makes of 41 of 300.
    for hits, n in (((0, 0), (12, 12)), ((6, 6), (12, 12)), ((18, 14, 9), (106, 94, 100))):
        groups = {
            f"g{i}": share("recall", *pair) for i, pair in enumerate(zip(hits, n, strict=True))
        }
        assert find_worst_group(replace(row, by_group=groups)) is None
    apart = {"wanted": share("recall", 35, 35), "unwanted": share("recall", 0, 109)}
    assert find_worst_group(replace(row, by_group=apart)) == ("wanted", apart["wanted"])


def test_many_strata_that_were_not_asked_are_counted_together(result: AuditResult) -> None:
    """Ten of them pushed the share of all records off the screen."""
    row = verbatim_row(copied(result, 3, 12, 123, 29))
    unasked = [Stratum(copies, 100 * copies, share("recall", 0, 0)) for copies in (4, 3, 2)]
    first, last = row.strata
    merged = coverage.format_strata(replace(row, strata=(first, *unasked, last)))
    others = "other numbers of copies: none of 900 asked"
    assert merged == f"16 copies: 3 of 12; 1 copy: 0 of 29 asked (123 in all); {others}"
    apart = coverage.format_strata(replace(row, strata=(first, *unasked[1:])))
    assert apart == "16 copies: 3 of 12; 3 copies: none of 300 asked; 2 copies: none of 200 asked"


def test_the_highest_of_many_equal_groups_is_seldom_named(result: AuditResult) -> None:
    """Of 20 groups of 300, each at its own level, one was in a third of the runs."""
    row, rng, n_runs = verbatim_row(copied(result, 3, 12, 40, 40)), np.random.default_rng(0), 200
    n_named = 0
    for _ in range(n_runs):
        hits = rng.binomial(300, 0.2, 20).tolist()
        groups = {f"g{i}": share("recall", count, 300) for i, count in enumerate(hits)}
        n_named += find_worst_group(replace(row, by_group=groups)) is not None
    assert n_named <= binom.isf(1e-3, n_runs, 0.025)


def test_a_stratum_that_was_not_asked_leaves_the_whole_open(result: AuditResult) -> None:
    whole = measure_weighted_share(verbatim_row(copied(result, 3, 12, single=123, asked=0)))
    assert whole is not None and whole.n == 135
    assert whole.low * 135 == 3 and whole.high * 135 == 126 and whole.value != whole.value
    assert coverage.format_strata(verbatim_row(copied(result, 3, 12, 123, 29))) == (
        "16 copies: 3 of 12; 1 copy: 0 of 29 asked (123 in all)"
    )


@pytest.mark.parametrize(
    ("n", "single", "asked", "parts"),
    [
        (14, 121, 41, ": all 14 that occur more than once, 41 of the 121 others."),
        (1, 121, 0, ": all 1 that occurs more than once, none of the 121 others."),
        (12, 1, 0, ": all 12 that occur more than once, none of the 1 other."),
    ],
)
def test_the_verdict_counts_the_asked_records_with_and_without_copies(
    result: AuditResult, n: int, single: int, asked: int, parts: str
) -> None:
    made = copied(result, 0, n, single, asked)
    counts = made.benchmark.records["members"]
    counts = replace(counts, by_copies={"16": n, "1": single})
    made = replace(made, benchmark=replace(made.benchmark, records={"members": counts}))
    assert (
        coverage.describe_asked_records(made)
        == f"{n + asked} of {n + single} records were asked{parts}"
    )
    assert coverage.format_progress_line(made).startswith(
        f"{n + asked} of {n + single} records asked so"
    )


def test_what_was_left_out_is_said_by_its_rule(result: AuditResult) -> None:
    assert (
        coverage.format_coverage(copied(result, 3, 12, 123, 29))
        == "41 of 141 records audited (6 too short)"
    )
    assert coverage.format_coverage(result) == ""


def test_every_count_of_records_leaves_out_copies_and_auxiliary_data(result: AuditResult) -> None:
    counts = RecordCounts(
        234, 25, 84, {}, {"known": 15, "late": 110}, by_copies={"8": 12, "1": 123}
    )
    made = replace(result, benchmark=replace(result.benchmark, records={"members": counts}))
    assert coverage.describe_asked_records(made).startswith("25 of 135 records were asked")
    assert coverage.format_audited_share(made) == "25 of 135"
    assert (
        coverage.format_coverage(made)
        == "25 of 135 records audited (234 rows given: 84 identical copies, 15 known, 110 late)"
    )


def test_splits_files_and_columns_that_are_not_read_are_said_with_the_records(
    result: AuditResult,
) -> None:
    made = copied(result, 3, 12, 123, 29)
    parts = (
        "only the split train is read, not validation, test, test_of_2026",
        "files of the folder that are not read: 1 .md, 3 .txt, 2 without an ending",
    )
    counts = replace(made.benchmark.records["members"], unread_parts=parts)
    benchmark = replace(
        made.benchmark,
        records={"members": counts, "nonmembers": replace(counts, unread_parts=parts[:1])},
        unread_columns=("turns", "notes"),
    )
    made = replace(made, benchmark=benchmark)
    of_others = f"non-members: {parts[0]}"
    expected = f"41 of 141 records audited (6 too short); {'; '.join([*parts, of_others])}"
    assert coverage.format_coverage(made) == expected
    for text in (markdown.render_markdown_report(made), html.render_html_report(made)):
        assert expected in text and "turns, notes" in text
    doubt = Doubt("length", "members and non-members differ in length " * 5)
    doubtful = replace(made, benchmark=replace(made.benchmark, doubts=(doubt,)))
    for result in (made, doubtful):
        shown = screen.build_first_screen(result, Path("runs/latest"), 100).plain
        assert expected in " ".join(shown.split()) and len(shown.splitlines()) <= screen.LINES


def test_the_share_of_tokens_that_was_attacked_is_said(result: AuditResult) -> None:
    made = copied(result, 3, 12, 123, 29)
    counts = replace(made.benchmark.records["members"], tokens=1_000, attacked_tokens=950)
    benchmark = replace(made.benchmark, records={"members": counts})
    label = coverage.format_coverage(replace(made, benchmark=benchmark))
    assert label == "41 of 141 records audited, 95% of their tokens attacked (6 too short)"
    counts = replace(counts, context_tokens=50)
    benchmark = replace(made.benchmark, records={"members": counts})
    assert "95% of their tokens attacked, with at most 50 tokens of context" in (
        coverage.format_coverage(replace(made, benchmark=benchmark))
    )


def test_parts_beyond_the_trained_length_are_counted_with_the_length(result: AuditResult) -> None:
    made = copied(result, 3, 12, 123, 29)
    counts = replace(
        made.benchmark.records["members"], parts_left_out={TrainedLength(90).beyond_phrase: 20}
    )
    made = replace(made, benchmark=replace(made.benchmark, records={"members": counts}))
    parts = (
        "20 parts: beyond the first 90 tokens of a row, which were trained on (--trained-length)"
    )
    assert coverage.format_coverage(made) == f"41 of 141 records audited (6 too short, {parts})"


def test_an_attack_that_lost_its_widest_access_is_said(result: AuditResult) -> None:
    """Ethicist without auxiliary records ran text-only, and nothing said that its white-box row was
    dropped."""
    row = verbatim_row(result)
    why = "needs at least 2 auxiliary records"
    lost = replace(
        row,
        attack="ethicist",
        setting="white-box",
        measurements=(),
        not_applicable=why,
        seconds=0.0,
    )
    ran = replace(row, attack="ethicist", setting="text-only", not_applicable="")
    found = replace(result, findings=(ran, lost))
    assert coverage.list_missing_attacks(found) == [
        f"Ethicist did not run on Undefended, white-box: {why}."
    ]
    assert why in screen.build_first_screen(found, Path("none")).plain.replace("\n" + " " * 8, " ")
    narrow = (replace(lost, setting="text-only"), replace(ran, setting="white-box"))
    assert coverage.list_missing_attacks(replace(result, findings=narrow)) == []


def test_an_attack_that_ran_on_another_target_only_is_said(result: AuditResult) -> None:
    """It ran on the undefended model, and nothing said that no row of the defended one has it."""
    row = verbatim_row(result)
    why = "its samples have no scores"
    ran = replace(row, attack="zlib")
    lost = [
        replace(ran, target=t, setting=s, measurements=(), not_applicable=why, seconds=0.0)
        for t in ("pmixed", "uniform-mixing")
        for s in ("text-only", "white-box")
    ]
    found = replace(result, findings=(row, ran, *lost))
    (sentence,) = coverage.list_missing_attacks(found)
    titles = [phrases.title_target(found, name) for name in ("pmixed", "uniform-mixing")]
    assert sentence == f"Zlib did not run on {', '.join(titles)}: {why}."
    assert sentence in screen.build_first_screen(found, Path("none")).plain.replace(
        "\n" + " " * 8, " "
    )
    untold = [replace(finding, seconds=0.1) for finding in lost]
    assert coverage.list_missing_attacks(replace(result, findings=(row, ran, *untold))) == []


def test_an_attack_without_any_row_is_named(result: AuditResult) -> None:
    row = verbatim_row(result)
    lost = replace(row, attack="lost", measurements=(), not_applicable="why", seconds=0.0)
    assert coverage.explain_missing_attacks(replace(result, findings=(row, lost))) == {
        "lost": "why"
    }
    elsewhere = replace(row, attack="lost", target="pmixed", not_applicable="")
    assert coverage.explain_missing_attacks(replace(result, findings=(row, lost, elsewhere))) == {}
    # Answers that tell nothing, as samples that are equal for all canaries: the attack ran.
    untold = replace(lost, not_applicable="expected scores that distinguish canaries", seconds=0.1)
    assert coverage.explain_missing_attacks(replace(result, findings=(row, untold))) == {}

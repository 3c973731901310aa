"""The first screen: it fits, it names every leak, and it speaks the words of the glossary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from auditor.conclusions import secret_details as detailed
from auditor.conclusions.leak_readings import KINDS
from auditor.conclusions.signals import assess_leak_signals
from auditor.core.result import (
    NO_TIME,
    AuditResult,
    Doubt,
    KindCount,
    Measurement,
    RecordCounts,
    TargetRecord,
)
from auditor.reports import advice, markdown, screen
from auditor.reports.screen import LINES, WIDTH, build_first_screen
from tests.docs.pages import ROOT
from tests.reports.conftest import claims, lab_run, probed
from tests.reports.test_reassurance import OTHERS, SIGNALS, Drawn, N, auc, row, run_of, share

GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
TITLES = ("A", "A defense whose name is rather long, with its options", "密着度の高い防御", "Plain")
DOUBT = Doubt(
    "text form",
    "No rendering makes members more likely than non-members, " + "which may hide a leak " * 9,
)


def lines(result: AuditResult, folder: Path = Path("runs/latest"), width: int = WIDTH) -> list[str]:
    return build_first_screen(result, folder, width).plain.splitlines()


def entry(shown: Sequence[str], label: str) -> str:
    """What stands beside a label, its further lines included; "" where it is not there."""
    start = next((i for i, line in enumerate(shown) if line.startswith(f"{label} ")), None)
    if start is None:
        return ""
    ends = (
        i
        for i in range(start + 1, len(shown))
        if not shown[i].startswith(" " * 8) or shown[i].startswith(" " * 9)
    )
    end = next(ends, len(shown))
    return " ".join(line[8:].strip() for line in shown[start:end])


@st.composite
def results(draw: st.DrawFn) -> AuditResult:
    """Up to twelve targets with up to four signals each, some with doubts, claims, copies and
    personal data."""
    names = ["undefended"][: draw(st.integers(0, 1))] + [
        f"t{i}" for i in range(draw(st.integers(1, 11)))
    ]
    findings, greedy = [], None
    for name in names:
        for one, setting in draw(
            st.lists(st.tuples(SIGNALS, st.sampled_from(["text-only", "white-box"])), max_size=4)
        ):
            findings += _placed(one, name, setting, draw(st.booleans()))
            greedy = greedy or (one.greedy if name == "undefended" else None)
    base, stand = run_of(*findings, greedy=greedy), list(claims().values())
    targets = tuple(
        TargetRecord(
            name,
            "Undefended" if name == "undefended" else f"{draw(st.sampled_from(TITLES))} {name}",
            "",
            Measurement("perplexity", 10.0 + i, 9.0, 12.0, 50, "perplexity")
            if draw(st.booleans())
            else None,
            claim=draw(st.sampled_from([None, *stand])),
            doubts=(DOUBT,) if draw(st.booleans()) else (),
        )
        for i, name in enumerate(names)
    )
    return replace(
        base,
        targets=targets,
        benchmark=replace(base.benchmark, name=draw(st.sampled_from(["lab", "own"]))),
    )


def _placed(one: Drawn, target: str, setting: str, copies: bool) -> list[object]:
    if one.finding is None:
        return []
    by = {str(2**i): share("recall", i, N) for i in range(8)} if copies else {}
    return [replace(one.finding, target=target, setting=setting, by_repeats=by)]


@settings(max_examples=60)
@given(
    results(),
    st.sampled_from(["runs/latest", "runs/" + "very-long-" * 12, "/data/" + "资料/" * 30]),
)
def test_it_fits_and_hides_no_leak(result: AuditResult, folder: str) -> None:
    """25 lines of 100 columns; every target that leaks is named as leaking, or counted among those
    that do."""
    shown = lines(result, Path(folder))
    assert len(shown) <= LINES and max(map(cell_len, shown)) <= WIDTH
    seen, said = assess_leak_signals(result), entry(shown, "RESULT")
    titles = {target.name: target.title for target in result.targets}
    leaking = [target for target in seen.targets if seen.list_shown_signals(target)]
    sentences = re.findall(r"(?:^|\. )([^.]*): (?:HIGH|MODERATE)", said)
    counted = sum(int(n) for one in sentences for n in re.findall(r"and (\d+) more", one))
    named = [target for target in leaking if any(titles[target][:20] in one for one in sentences)]
    assert len(named) + counted >= len(leaking), said
    if not all(map(seen.shows_no_leakage, seen.targets)) and "no leakage seen" in said:
        assert any(map(seen.shows_no_leakage, seen.targets))
    if any(seen.list_target_doubts(target) for target in seen.targets):
        assert "no leakage seen" not in said or any(map(seen.shows_no_leakage, seen.targets))
        assert entry(shown, "DOUBT")


def test_it_is_laid_out_as_it_should_be() -> None:
    """In the order in which it is read, with the numbers of the run."""
    shown = lines(lab_run())
    labels = [line.split()[0] for line in shown if line[0] != " "]
    assert labels == [
        "RESULT",
        "ATTACKS",
        "ALSO",
        "WHERE",
        "WHY",
        "CLAIM",
        "LIMITS",
        "NEXT",
        "report",
    ]
    assert entry(shown, "RESULT").startswith(
        "Undefended: HIGH. Training text can be extracted (52% verbatim, white-box; also greedy "
        "decoding)."
    )
    assert entry(shown, "WHERE") == (
        "copies 1: 0/64, 2: 4/64, 4: 36/64, 8: 62/64, 16: 64/64 (white-box); the 0/64 leaves up to "
        "5.6% possible"
    )
    assert entry(shown, "NEXT") == "audit advise runs/latest"
    assert any(re.search(r"white-box +166/320 +52% +\[46–57\]", line) for line in shown)
    assert "0/160 Undefended" in " ".join(shown)


def test_every_attack_that_was_asked_for_has_a_line_with_its_number_or_its_reason() -> None:
    attacks = ("perplexity", "weakest-link", "membership")
    rows = [
        row(name, share("recall", hits, 96)) for name, hits in zip(attacks, (29, 27), strict=False)
    ]
    missing = replace(
        rows[0], attack="membership", measurements=(), not_applicable="it needs a reference model"
    )
    result = run_of(*rows, missing)
    shown = lines(replace(result, plan={**result.plan, "attack": list(attacks)}))
    start = next(i for i, line in enumerate(shown) if line.startswith("ATTACKS"))
    told = [" ".join(line.split()) for line in shown[start + 1 : start + 4]]
    assert told[0].startswith("perplexity 29/96 (30% [21–40]) recited word for word")
    assert told[1].startswith("weakest-link 27/96 (28% [19–38]) recited word for word")
    assert told[2] == "membership did not run: it needs a reference model"
    assert not any(line.startswith("ATTACKS") for line in lines(run_of(rows[0])))


def test_the_cost_of_a_defense_stands_beside_that_of_no_private_data() -> None:
    """What the control rows end with, where it was measured."""
    run = lab_run()
    (own,) = (t for t in run.targets if t.name == "pmixed")
    assert own.perplexity is not None
    public = replace(own, name="public", title="Public model", companion=True, claim=None)
    public = replace(public, perplexity=replace(own.perplexity, value=2 * own.perplexity.value))
    rows = [
        replace(
            f,
            chain=replace(
                f.chain, steps=(*f.chain.steps[:-1], replace(f.chain.steps[-1], after="public"))
            ),
        )
        if f.chain
        else f
        for f in run.findings
    ]
    said = entry(
        lines(replace(run, findings=tuple(rows), targets=(*run.targets, public))), "RESULT"
    )
    assert "; 1.9x the perplexity (Public model: 3.8x)." in said
    assert "Public model" not in entry(lines(run), "RESULT")


def test_of_many_configurations_those_that_leak_stay() -> None:
    hits = [0] * 29 + [30]
    rows = (
        row(
            "perplexity",
            share("recall", k, N),
            share("recall_nonmembers", 0, OTHERS),
            target=f"t{i}",
        )
        for i, k in enumerate(hits)
    )
    shown = lines(run_of(*rows))
    assert (
        len(shown) <= LINES
        and "30/60" in "\n".join(shown)
        and "more rows in the report" in "\n".join(shown)
    )


def test_next_is_the_mildest_limit_on_copies_that_a_gate_would_take(
    monkeypatch: pytest.MonkeyPatch, secret_by_secret: detailed.SecretDetails
) -> None:
    """Up to 4 copies none is extracted, from 8 on all."""
    result = lab_run()
    known = secret_by_secret(result, 1000, length=4)  # type: ignore[operator]
    rows = {}
    for key, seen in known.values_by_cell.items():
        times = np.array([0 if count is None else count for count in seen.repeats])
        rows[key] = replace(seen, columns={**seen.columns, "hit": times > 4})
    monkeypatch.setattr(
        screen.detailed, "read_secret_details", lambda folder: replace(known, values_by_cell=rows)
    )
    said = entry(lines(result), "NEXT")
    assert said.startswith("keep at most 4 copies of a record: recall 0.0% [") and said.endswith(
        "-> audit advise runs/latest"
    )
    assert "predicted, not measured" in said
    far = "runs/20261123T083510-lab-ethicist-pmixed"
    # on a line of its own: it can be copied
    assert lines(result, Path(far))[-2].strip() == f"audit advise {far}"


def test_groups_of_the_data_are_told_apart() -> None:
    """Completions that were wanted and those that were not: one share of both says nothing of
    either."""
    shares = {
        "unwanted": share("recall", 0, 40),
        "wanted": share("recall", 24, 24),
    }
    result = lab_run()
    grouped = tuple(replace(finding, by_group=shares) for finding in result.findings)
    said = lines(replace(result, findings=grouped))
    assert entry(said, "WHERE").startswith("unwanted: 0/40, wanted: 24/24 (")
    assert "all 24 records of the group wanted are recited." in entry(said, "RESULT")


def test_columns_that_nobody_reads_are_a_limit() -> None:
    result = run_of(row("perplexity", share("recall", 0, N), share("recall_nonmembers", 0, OTHERS)))
    told = replace(result, benchmark=replace(result.benchmark, unread_columns=("turns", "notes")))
    unread = "Columns of the data with texts or media that are not read: turns and notes."
    assert unread in entry(lines(told), "LIMITS") and "not read" not in entry(
        lines(result), "LIMITS"
    )


def test_a_clean_run_goes_on_to_a_gate() -> None:
    result = run_of(row("perplexity", share("recall", 0, N), share("recall_nonmembers", 0, OTHERS)))
    shown = lines(result)
    assert entry(shown, "RESULT") == (
        "Undefended: INCONCLUSIVE. No leakage seen, but 8 of 9 signals are untested."
    )
    assert entry(shown, "NEXT") == "audit gate runs/latest --max recall=0.05"
    assert entry(shown, "LIMITS").startswith(
        "Still possible: verbatim up to 6.0% (0/60). Not tested: "
    )


def test_a_leak_among_the_records_asked_in_time_does_not_end_the_check() -> None:
    """The rest may leak more: to resume stands before the advice."""
    for hits, steps in ((0, 1), (20, 2)):
        result = run_of(
            row("perplexity", share("recall", hits, N), share("recall_nonmembers", 0, OTHERS))
        )
        counts = RecordCounts(given=90, audited=N, not_attacked={NO_TIME: 30})
        result = replace(result, benchmark=replace(result.benchmark, records={"members": counts}))
        shown = lines(result)
        first = next(i for i, line in enumerate(shown) if line.startswith("NEXT"))
        expected = [
            "NEXT    audit check --resume runs/latest --minutes 30    asks the 30 records that are "
            "left",
            "        audit advise runs/latest",
        ]
        assert shown[first:-1] == expected[:steps]
        # the report and `audit advise` named a gate, or `audit advise` itself
        resume = "audit check --resume runs/latest --minutes 30"
        page = markdown.render_markdown_report(result, folder=Path("runs/latest"))
        assert f"```\n{resume}\n```" in page
        unfinished = advice.list_advice(result, run="runs/latest")[0]
        assert unfinished.kind == advice.UNFINISHED and unfinished.line.endswith(f": {resume}")


def test_what_one_attack_extracts_is_not_bounded_by_another_ones_zero() -> None:
    """WHAT counted 1/1 telephone numbers, and LIMITS called up to 98% (0/1) still possible."""
    found = []
    for setting, n_hits in (("text-only", 0), ("white-box", 1)):
        found.append(
            replace(
                row("perplexity", share("recall", 20 * n_hits, N), setting=setting),
                by_kind={"phone": share("recall", n_hits, 1)},
            )
        )
    assert "Still possible: verbatim up to 6.0% (0/60), telephone numbers up to" in entry(
        lines(run_of(found[0])), "LIMITS"
    )
    assert "possible" not in entry(lines(run_of(*found)), "LIMITS")


def test_where_nothing_was_seen_its_bound_stands_beside_it_and_a_doubt_is_resolved_first() -> None:
    none = row("perplexity", share("recall", 0, N), share("recall_nonmembers", 0, OTHERS))
    none = replace(
        none,
        by_repeats={str(n): share("recall", 0, n) for n in (20, 40)},
        by_kind={"email": share("recall", 0, 24)},
    )
    never = row(
        "extraction-probability",
        Measurement("extraction_probability", 0.0, 0.0, 0.0, N, "probability"),
    )
    blind = row(
        "membership",
        *(replace(m, n=N) for m in (auc(0.52, 0.44, 0.6), auc(0.47, 0.4, 0.54, "blind_auc"))),
    )
    result = run_of(none, never, blind)
    shown = lines(result)
    assert (
        entry(shown, "WHERE")
        == "copies 20: 0/20, 40: 0/40 (white-box); the 0/20 leaves up to 17% possible"
    )
    assert entry(shown, "WHAT") == "e-mail addresses 0/24 (white-box): none extracted"
    kinds = {"email": KindCount(24, cut=19)}
    told = lines(replace(result, benchmark=replace(result.benchmark, kinds=kinds)))
    left_out = "; 19 more values cut off by a suffix's end: not counted"
    assert entry(told, "WHAT") == entry(shown, "WHAT") + left_out
    also = entry(shown, "ALSO")
    assert (
        "(not compared with non-members; this decoding draws none of these suffixes; another may)"
        in also
    )
    assert "(not above chance 0.5, blind baseline 0.470)" in also
    bound = row(
        "extraction-probability",
        Measurement("extraction_probability_at_least", 0.0, 0.0, 0.0, N, "probability"),
    )
    # of a lower bound nothing is known to be impossible
    assert "another may" not in " ".join(lines(run_of(none, bound)))
    doubted = lines(replace(result, targets=(replace(result.targets[0], doubts=(DOUBT,)),)))
    assert entry(doubted, "LIMITS").startswith(
        "Once DOUBT is resolved, still possible: verbatim up to 6.0% (0/60)"
    )
    assert entry(doubted, "NEXT") == "resolve DOUBT first -> audit advise runs/latest"


def test_a_hint_among_the_guesses_is_said_in_full_beside_the_perplexity() -> None:
    """The table's row ends neither in the explanation nor in an ellipsis."""
    drawn = row("reference", share("recall", 0, 20), share("any_of_k", 2, 20))
    drawn = replace(drawn, by_repeats={})
    shown = lines(run_of(drawn))
    (line,) = [line for line in shown if "2/20" in line]
    assert "by any guess, only a hint" in line and "…" not in line and len(line) <= WIDTH


def test_a_long_name_is_cut_before_remarks_and_perplexities() -> None:
    result = run_of(row("exact", share("recall", 0, 2_000), share("any_of_k", 200, 2_000)))
    perplexity = Measurement("perplexity", 51_081.0, 50_000.0, 52_000.0, N, "perplexity")
    title = "Common with the public model"
    target = replace(result.targets[0], title=title, perplexity=perplexity)
    shown = lines(replace(result, targets=(target,)))
    (head,) = [line for line in shown if "extracted verbatim" in line]
    (line,) = [line for line in shown if "200/2,000" in line]
    assert head.endswith("perplexity") and "…" in line.split("white-box")[0]
    assert "by any guess, only a hint" in line and line.endswith("51,081") and len(line) <= WIDTH


def test_one_token_is_counted_in_the_singular() -> None:
    result = run_of(row("perplexity", share("recall", 2, N)))
    result = replace(result, plan={**result.plan, "suffix_length": 1})
    assert "(suffixes of 1 token)" in " ".join(lines(result))


def test_what_was_tested_on_one_target_alone_is_a_limit_of_the_others() -> None:
    """Every signal that a measured target was not tested by stands there, once."""
    found = [row("perplexity", share("recall", 0, N), share("recall_nonmembers", 0, OTHERS))]
    found += [
        replace(found[0], target="pmixed"),
        row("a", Measurement("membership_auc", 0.5, 0.4, 0.6, N, "AUC")),
    ]
    limits = entry(lines(run_of(*found, greedy={"1": share("greedy", 0, N)})), "LIMITS")
    everywhere, _, defended = limits.partition("Not tested on ")
    assert defended.startswith("PMixED: ") and "Undefended" not in limits
    assert "greedy decoding" in defended and "membership" in defended and "exposure" in everywhere
    assert "greedy decoding" not in everywhere and "near-verbatim" in everywhere


def test_its_words_are_those_of_the_glossary() -> None:
    """No word that the glossary replaces; and a signal is called by a name that stands there."""
    replaced = {
        word for listed in re.findall(r"\[([^\]]+)\]", GLOSSARY) for word in listed.split(", ")
    }
    assert {"recipe", "floor", "came out"} <= replaced
    full = lab_run()
    full = replace(full, findings=(*full.findings, probed("undefended", 0.3)))
    text = "\n".join(lines(full)).lower()
    taken = {"claim", "lead", "rendering"}  # also plain words, or said of something else
    assert not [word for word in replaced - taken if re.search(rf"\b{word}\b", text)]
    plain = GLOSSARY.lower().replace("**", "")
    assert all(
        f"| **{term}" in GLOSSARY
        for term in ("severity", "public model", "copies", "perplexity", "interval")
    )
    for kind in KINDS:
        assert any(
            word in plain for word in (kind.short, kind.title.lower(), kind.short.split()[0])
        )


def test_a_number_that_non_members_have_no_twin_of_is_not_said_to_have_no_non_members() -> None:
    alone = run_of(row("perplexity", share("greedy", 30, N)))
    for n, said in ((200, "not measured on the 200 non-members"), (0, "no non-members")):
        result = replace(alone, benchmark=replace(alone.benchmark, nonmembers=n))
        assert screen._format_nonmember_baseline(result, []).startswith(said)
        short = replace(result, plan={"suffix_length": 10})
        assert "would extract (suffixes of 10 tokens) is unknown" in (
            screen._format_nonmember_baseline(short, [])
        )


def test_a_sentence_that_does_not_fit_ends_with_one_ellipsis() -> None:
    """The cut line had another one: "on w… …"."""
    entry = screen.ScreenEntry("DOUBT", (" ".join(["word"] * 100),), 3)
    *_, last = screen._fit_screen_lines(entry, 40)
    assert last.count("…") == 1 and last.endswith("…") and len(last) <= 40

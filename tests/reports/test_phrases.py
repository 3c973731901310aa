"""Numbers and phrases, on cases small enough to check by eye."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from auditor.core.nouns import Claim
from auditor.core.result import AuditResult, Measurement
from auditor.reports import phrases
from auditor.statistics.compare import ABOVE


def measurement(
    value: float, low: float, high: float, n: int = 320, unit: str = "share"
) -> Measurement:
    return Measurement("recall", value, low, high, n, unit)


@pytest.mark.parametrize(
    ("m", "text"),
    [
        (measurement(166 / 320, 0.462, 0.574), "166/320 (52% [46–57])"),
        (measurement(1 / 320, 0.00008, 0.0173), "1/320 (0.3% [0.0–1.7])"),
        (measurement(0, 0, 0.0115), "0/320 (0.0% [0.0–1.1])"),
        (measurement(1, 0.9885, 1), "320/320 (100.0% [98.9–100.0])"),
        (measurement(1 / 15000, 0, 0.0004, 15000), "1/15,000 (0.01% [0.00–0.04])"),
        (measurement(math.nan, math.nan, math.nan), "–"),
        (measurement(0, 0, 1, n=0), "–"),
        (None, "–"),
    ],
)
def test_share(m: Measurement | None, text: str) -> None:
    assert phrases.format_share(m) == text


def test_signed_intervals_say_to() -> None:
    assert (
        phrases.format_measurement_value(measurement(-0.469, -0.525, -0.412)) == "−47% [−52 to −41]"
    )
    assert (
        phrases.format_measurement_value(measurement(-0.00001, -0.0004, 0.0004))
        == "0.00% [−0.04 to 0.04]"
    )


def test_only_what_a_difference_leaves_out_is_said_beside_it() -> None:
    m = measurement(-0.1, -0.2, 0.0)
    assert phrases.format_baseline_excess(replace(m, note=ABOVE)) == ", above non-members"
    assert (
        phrases.format_baseline_excess(replace(m, note="exact McNemar p = 0.5"))
        == phrases.format_baseline_excess(m)
        == ""
    )


def test_other_units_keep_three_digits() -> None:
    assert (
        phrases.format_measurement_value(measurement(13.0, 12.61, 13.39, unit="perplexity"))
        == "13.0 [12.6–13.4]"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8.0, "8"),
        (7.123, "7.12"),
        (1234.0, "1,234"),
        (1e-5, "1e-5"),
        (0.0, "0"),
        (-2.5, "−2.5"),
        (math.inf, "∞"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert phrases.format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.4 s"),
        (48.2, "48 s"),
        (59.7, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3725, "1 h 02 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert phrases.format_duration(seconds) == text


def test_repeats_sort_as_numbers(result: AuditResult) -> None:
    recall = measurement(0, 0, 1)
    assert [
        name for name, _ in phrases.sort_repeats(dict.fromkeys(["16", "many", "2"], recall))
    ] == [
        "2",
        "16",
        "many",
    ]


def test_undefended_comes_first(result: AuditResult) -> None:
    turned = replace(result, findings=result.findings[::-1])
    assert phrases.sort_findings(turned)[0].target == "undefended"
    assert [f.target for f in phrases.sort_findings(turned)[4:]] == [
        f.target for f in turned.findings[:12]
    ]


def test_a_claim_about_a_shard_says_what_holds_for_somebody_in_it(result: AuditResult) -> None:
    claim = result.target("pmixed").claim
    assert claim is not None
    shard = replace(claim, unit="shard of whole users", whole="user")
    one = "for a single user in it who shares no record, ε 12.9 (replace)"
    assert phrases.format_single_record_epsilon(shard) == one
    records = replace(claim, unit="shard of whole records", whole="record")
    assert (
        phrases.format_single_record_epsilon(records)
        == "for a single record in it, ε 12.9 (replace)"
    )
    unknown = (claim, replace(shard, epsilon={"as published": 8.0}), replace(claim, unit="record"))
    for other in unknown:
        assert phrases.format_single_record_epsilon(other) == ""


def test_decoding_outside_a_claim_is_marked(result: AuditResult) -> None:
    row = replace(result.findings[0], decoding="greedy", claim_reason="why")
    assert phrases.format_decoding(replace(row, claim_applies=False)) == "greedy, outside the claim"
    assert (
        phrases.format_claim_scope(replace(row, claim_applies=False))
        == "no, outside the claim (why)"
    )
    for applies in (True, None):
        assert phrases.format_decoding(replace(row, claim_applies=applies)) == "greedy"


def test_epsilon_of_an_unstated_relation_is_not_made_up() -> None:
    claim = Claim({}, 0.0, "replace", "record", 1, "none", "claim")
    assert phrases.format_promised_epsilon(claim) == "– (record)"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "link"),
        ("two\nlines\tand\x00more", "two lines and more"),
        ("a\u202eb", "a b"),
        ("half \ud83d pair", "half \ufffd pair"),
        ("naïve 日本語 ε", "naïve 日本語 ε"),
    ],
)
def test_clean(raw: str, text: str) -> None:
    assert phrases.make_printable_line(raw) == text
    assert phrases.make_printable_line(phrases.make_printable_line(raw)) == text


def test_cleaned_reaches_every_string(result: AuditResult) -> None:
    dirty = replace(result, command="a\x1b[2Jb", environment={"k\n": "v\r"}, plan={"x": ["\x07y"]})
    tidy = phrases.make_result_printable(dirty)
    assert (tidy.command, tidy.environment, tidy.plan) == ("ab", {"k": "v"}, {"x": ["y"]})
    assert phrases.make_result_printable(result) == result


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.9, "+90%"), (-0.03, "−3%"), (-0.001, "0%"), (0.0, "+0%")]
)
def test_a_change_that_rounds_to_nothing_has_no_minus(ratio: float, text: str) -> None:
    assert phrases.format_relative_change(ratio) == text


def test_a_share_of_a_million_secrets_is_never_shown_as_none() -> None:
    """Before: 3 of a million were `0.00%`, and none of them left "up to 0.00% possible"."""
    some = measurement(3e-6, 6e-7, 8.8e-6, 10**6)
    assert phrases.format_share(some) == "3/1,000,000 (0.0003% [0.00–0.0009])"
    none = measurement(0.0, 0.0, 3.7e-6, 10**6)
    assert phrases.describe_no_hits("A", [none]) == "A: none, up to 0.0004% possible."
    assert phrases.format_interval(none) == "[0.0–0.0004]"


def test_long_model_names_keep_their_ends() -> None:
    start = "models/" + "long-name-" * 9
    names = {phrases.shorten_model_name(f"{start}{step}") for step in (1000, 2000)}
    assert len(names) == 2 and max(map(len, names)) == phrases.MOST_OF_NAME


def test_a_difference_of_aucs_says_which_of_them_it_mirrors() -> None:
    """Before: 0.749, 0.383 and a difference of −0.132 stood in one row."""
    before = Measurement("membership_auc", 0.749, 0.46, 1.0, 37, "AUC")
    after = Measurement("membership_auc", 0.383, 0.09, 0.675, 37, "AUC")
    change = Measurement("membership_auc", -0.132, -0.441, 0.178, 37, "AUC")
    said = phrases.format_compared_difference(change, before, after)
    assert said == "−0.132 AUC [−0.441 to 0.178], 0.383 counted as 0.617"
    assert phrases.format_compared_difference(change, before, before) == said.partition(",")[0]

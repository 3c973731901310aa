"""A probability of eight tokens is not shown as one with that of fifty."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from auditor.attacks.extraction_probability import suffix_lengths_note
from auditor.conclusions.leak_readings import PROBABLE
from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import SHOWN, LeakSignal
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, BenchmarkRecord, Finding, Measurement, TargetRecord
from auditor.reports import signals
from auditor.reports.attack_table import AttackRow
from auditor.reports.blocks import Block, Table, has_content
from auditor.reports.leaks import _build_suffix_length_table
from tests.rows import pack_suffixes

RESULT = AuditResult(
    name="own",
    created="2026-11-28T09:14:03Z",
    tool_version="0.1.0",
    command="audit run --model own --data own.jsonl",
    plan={"model": "own"},
    benchmark=BenchmarkRecord("mine", "Records of one's own.", 5, 0, 0),
    targets=(TargetRecord("undefended", "Undefended", ""),),
    findings=(),
    environment={},
    timings={},
    seed=0,
)


def blocks_of(*suffixes: tuple[int, float]) -> list[Block]:
    """Blocks for suffixes given as tokens and the probability of each token."""
    tokens = {f"row-{i}": (math.log(p),) * n for i, (n, p) in enumerate(suffixes)}
    details = SecretDetails(tokens={"undefended": pack_suffixes(tokens)})
    return list(filter(has_content, [_build_suffix_length_table(RESULT, details)]))


def test_probabilities_are_told_apart_by_the_length_of_the_suffix() -> None:
    (table,) = blocks_of(
        (8, 1.0), (15, 1.0), (16, 0.5 ** (1 / 16)), (50, 0.01 ** (1 / 50)), (50, 0.03 ** (1 / 50))
    )
    assert isinstance(table, Table)
    (group,) = table.groups
    assert [row[:3] for row in group.rows] == [
        ("8 to 15", "2", "100.0%"),
        ("16", "1", "50%"),
        ("50", "2", "2.0%"),
    ]


def test_suffixes_of_one_length_take_no_table() -> None:
    assert blocks_of((50, 0.5), (50, 1.0)) == []
    assert blocks_of() == []


@pytest.mark.parametrize(
    ("lengths", "end"),
    [((50, 50), ""), ((8, 50, 20), ", suffixes of 8 to 50 tokens"), ((), "")],
    ids=str,
)
def test_a_mean_probability_names_the_lengths_that_it_is_of(
    lengths: tuple[int, ...], end: str
) -> None:
    """The screen's number was pooled over suffixes of 8 and of 50 tokens without a word."""
    note = ", ".join(filter(None, ("one sample", suffix_lengths_note(lengths))))
    mean = Measurement("extraction_probability", 0.2, 0.1, 0.3, 9, "probability", note)
    signal = LeakSignal(PROBABLE, UNDEFENDED, SHOWN, "white-box", mean, 0.0)
    assert (
        signals.describe_signal_number(signal) == f"extraction probability, mean 20% [10–30]{end}"
    )
    finding = Finding(
        UNDEFENDED, "white-box", "extraction-probability", {}, (), "", None, "", (mean,)
    )
    assert AttackRow(finding, mean).number_text == f"chance per sample 20% [10–30]{end}"
    any_of = replace(mean, name="expected_any_of_100", note=suffix_lengths_note(lengths))
    number = signals.describe_signal_number(replace(signal, measured=any_of))
    assert number == f"100 samples per member would extract 20% [10–30] of members{end}"

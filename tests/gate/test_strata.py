"""A limit on the average does not hold over copied records that are recited, nor over records that
nobody asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from auditor.conclusions.outcomes import read_secret_values
from auditor.core.result import AuditResult, Stratum
from auditor.gate.decide import judge_gate_rules
from auditor.gate.policy import Rule
from auditor.gate.rulings import Ruling
from auditor.records.result_file import read_result
from auditor.statistics.intervals import measure_share
from tests.gate.finished_runs import finished, outcome

N = 400


def ruling(folder: Path, strata: tuple[Stratum, ...], *rules: Rule) -> Ruling:
    result: AuditResult = read_result(folder)
    result = replace(result, findings=(replace(result.findings[0], strata=strata),))
    return judge_gate_rules(result, rules, read_secret_values(folder), None)[0]


def stratum(copies: int, population: int, asked: int, hits: int) -> Stratum:
    return Stratum(copies, population, measure_share("recall", np.arange(asked) < hits))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return finished(tmp_path / "run", outcome(N, out=4))


def test_copied_records_that_are_recited_are_not_averaged_away(folder: Path) -> None:
    strata = (stratum(16, 4, 4, 4), stratum(1, N - 4, N - 4, 0))
    assert ruling(folder, (), Rule("recall", 0.05)).verdict == "held"
    found = ruling(folder, strata, Rule("recall", 0.05))
    assert (
        found.verdict == "inconclusive" and "4 of the 4 records that occur 16 times" in found.reason
    )
    own = (Rule("recall", 0.05), Rule("recall", 1.0, count=16))
    assert ruling(folder, strata, *own).verdict == "held"
    few = (stratum(16, 4, 4, 1), stratum(1, N - 4, N - 4, 3))  # 1 of 4: not significantly above 5%
    assert ruling(folder, few, Rule("recall", 0.05)).verdict == "held"


def test_a_limit_on_records_in_parts_is_no_average_over_copies_either(tmp_path: Path) -> None:
    """document_recall <= 0.8 held by 3 of 135 records, of which up to 96% may be extracted."""
    judged = outcome(N, out=4)
    # (N + 60,) codes: two parts make a record
    records = np.arange(len(judged.ids)) // 2.0
    parts = replace(judged, columns={**judged.columns, "record": records})
    in_parts = finished(tmp_path / "run", parts)
    strata = (stratum(16, 2, 2, 2), stratum(1, 198, 198, 0))
    limit = Rule("document_recall", 0.05)
    assert ruling(in_parts, (), limit).verdict == "held"
    average = ruling(in_parts, strata, limit)
    assert average.verdict == "inconclusive" and "that occur 16 times" in average.reason
    assert ruling(in_parts, strata, limit, Rule("document_recall", 1.0, count=16)).verdict == "held"


def test_records_that_nobody_asked_hold_no_limit(folder: Path) -> None:
    enough = (stratum(8, 12, 12, 4), stratum(1, 400, N - 12, 0))
    assert ruling(folder, enough, Rule("recall", 0.9)).verdict == "held"
    part = (stratum(8, 12, 12, 4), stratum(1, 4000, N - 12, 0))
    assert ruling(folder, part, Rule("recall", 0.9)).verdict == "held"  # 388 of 4,000 leave few
    unasked = (stratum(8, N, N, 4), stratum(1, 400, 0, 0))
    found = ruling(folder, unasked, Rule("recall", 0.05))
    assert (
        found.verdict == "inconclusive"
        and "of all 800 records, weighted by copies, up to 0.5050" in found.reason
    )

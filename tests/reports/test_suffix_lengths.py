"""A probability of eight tokens is not shown as one with that of fifty."""

from __future__ import annotations

import math

from auditor.core.result import AuditResult, BenchmarkRecord, TargetRecord
from auditor.records.secret_details import SecretDetails
from auditor.reports.blocks import Block, Table
from auditor.reports.leaks import _probability_by_suffix_length_blocks

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
    return _probability_by_suffix_length_blocks(RESULT, SecretDetails(tokens={"undefended": tokens}))


def test_probabilities_are_told_apart_by_the_length_of_the_suffix() -> None:
    (table,) = blocks_of((8, 1.0), (15, 1.0), (16, 0.5 ** (1 / 16)), (50, 0.01 ** (1 / 50)), (50, 0.03 ** (1 / 50)))
    assert isinstance(table, Table)
    (group,) = table.groups
    assert [row[:3] for row in group.rows] == [("8 to 15", "2", "100.0%"), ("16", "1", "50%"), ("50", "2", "2.0%")]


def test_suffixes_of_one_length_take_no_table() -> None:
    assert blocks_of((50, 0.5), (50, 1.0)) == []
    assert blocks_of() == []

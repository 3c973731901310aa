"""Imports point one way: types, errors <- models, sampling, metrics <- the side folders <- run, gate <- cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SIDES = ("attacks", "defenses", "benchmarks", "reports")
TOP = {
    *(
        "auditor.runs.run",
        "auditor.gate.decide",
        "auditor.cli",
        "auditor.commands.listing",
        "auditor.studies.sweep",
        "auditor.studies.reproduce",
    ),
    *(
        "auditor.benchmarks.score",
        "auditor.runs.submission",
        "auditor.records.names",
        "auditor.runs.session",
        "auditor.utility.subjects",
    ),
    *("auditor.utility.measure", "auditor.utility.tradeoff", "auditor.runs.canary_scores"),
}


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("auditor")}


@pytest.mark.parametrize("side", SIDES)
def test_side_folders_do_not_import_each_other_or_the_top(side: str) -> None:
    files = sorted((ROOT / side).glob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            others = [s for s in SIDES if s != side and name.startswith(f"auditor.{s}")]
            assert not others, f"{path.name} imports {name}"
            assert name not in TOP, f"{path.name} imports {name}"


def test_the_vocabulary_imports_nothing_of_ours_but_errors_when_run() -> None:
    tree = ast.parse((ROOT / "auditor" / "types.py").read_text())
    guarded = {id(n) for node in tree.body if isinstance(node, ast.If) for n in ast.walk(node)}
    names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and id(n) not in guarded]
    assert [name for name in names if name and name.startswith("auditor")] == ["auditor.core.errors"]

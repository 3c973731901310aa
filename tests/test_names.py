"""Sizes and names: every public class has a name of its own, and neither a file nor a class is too long to be read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.test_layers import ROOT, SIDES

MOST_LINES, MOST_METHODS = 450, 25  # of a file, of a class


def files() -> Iterator[Path]:
    """All of the product and of the programs that check it."""
    return (path for top in ("auditor", *SIDES, "validation") for path in (ROOT / top).rglob("*.py"))


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in files():
        yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def test_a_public_class_has_a_name_of_its_own() -> None:
    homes = defaultdict(list)
    for path, node in classes():
        if not node.name.startswith("_"):
            homes[node.name].append(path.name)
    assert len(homes) > 300
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_no_file_and_no_class_is_too_long_to_be_read() -> None:
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in files()}
    longer = {path.name for path, count in lines.items() if count > MOST_LINES}
    assert not longer
    methods = {node.name: sum(isinstance(one, ast.FunctionDef) for one in node.body) for _, node in classes()}
    assert not {name: count for name, count in methods.items() if count > MOST_METHODS}

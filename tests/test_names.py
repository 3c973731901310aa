"""Sizes and names: every public class has a name of its own, and neither a file nor a class is too
long to be read."""

from __future__ import annotations

import ast
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.test_layers import ROOT, SIDES, parse

MOST_TOKENS = 4_250  # code tokens of a file: packing lines saves none
MOST_METHODS = 25  # of a class


LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def count_code_tokens(path: Path) -> int:
    """Count the tokens of a file that are neither layout, comments nor strings."""
    with path.open("rb") as source:
        kinds = [token.type for token in tokenize.tokenize(source.readline)]
    return sum(kind not in LAYOUT and kind != tokenize.STRING for kind in kinds)


def files() -> Iterator[Path]:
    """All of the product and of the programs that check it."""
    return (
        path for top in ("auditor", *SIDES, "validation") for path in (ROOT / top).rglob("*.py")
    )


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in files():
        yield from (
            (path, node) for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)
        )


def test_a_public_class_has_a_name_of_its_own() -> None:
    homes = defaultdict(list)
    for path, node in classes():
        if not node.name.startswith("_"):
            homes[node.name].append(path.name)
    assert len(homes) > 300
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_no_file_and_no_class_is_too_long_to_be_read() -> None:
    sizes = {path.relative_to(ROOT): count_code_tokens(path) for path in files()}
    assert not {path: size for path, size in sizes.items() if size > MOST_TOKENS}
    methods = {
        node.name: sum(isinstance(one, ast.FunctionDef) for one in node.body)
        for _, node in classes()
    }
    assert not {name: count for name, count in methods.items() if count > MOST_METHODS}

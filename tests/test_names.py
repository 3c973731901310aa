"""Every public class has a name of its own: who reads it need not ask whose it is."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.test_layers import ROOT, SIDES


def test_a_public_class_has_a_name_of_its_own() -> None:
    homes = defaultdict(list)
    for path in (path for top in ("auditor", *SIDES) for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.name)
    assert len(homes) > 300
    assert not {name: where for name, where in homes.items() if len(where) > 1}

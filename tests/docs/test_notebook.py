"""The notebook among the tutorials: its code cells run, one after the other, and say what the text
around them says."""

from __future__ import annotations

import ast
import json
import time
from typing import Any

import pytest

from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"
SECONDS = 60.0  # of processor time, all cells


def run(source: str, names: dict[str, Any]) -> Any:
    """The value of the last line, as a notebook would show it; None where that is a statement."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    # not under this file's __future__
    exec(compile(tree, str(NOTEBOOK), "exec", dont_inherit=True), names)
    return (
        eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval", dont_inherit=True), names)
        if last is not None
        else None
    )


def test_its_cells_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cells = [
        cell
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    names: dict[str, Any] = {"__name__": "__main__"}
    begun = time.process_time()
    for cell in cells:
        shown = run("".join(cell["source"]), names)
        assert (shown is not None) <= bool(cell["outputs"]), (
            f"kept without its output: {cell['source']}"
        )
    assert time.process_time() - begun < SECONDS
    learnt = names["hits"].groupby("repeats")["value"].mean()
    assert (
        learnt[20] > 0.9
        and learnt[1] < 0.2
        and not names["hits"].query("not member")["value"].any()
    )
    assert names["axes"].get_legend() is not None and names["decision"].exit_code == 1
    found = names["frame"].query(
        "attack == 'consensus' and measurement == 'recall' and repeats.isna()"
    )
    assert len(found) and (found["low"] > 0).all()

"""Measure the readability of each package's code; tests keep each package at its recorded values.

    python -m validation.language            # print a table
    python -m validation.language --tighten  # record values that became better in tests/language.json

`tests/test_language.py` fails if a measure of a package is worse than its recorded value. The
lists contain names that say nothing about a value, and words that make a sentence hard to read.
"""  # noqa: E501

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from validation import harness

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "language.json"
SIDES = ("attacks", "defenses", "benchmarks", "reports")
WIDTH = 100

_VAGUE = (
    "above alike answered apart asked behind below beside both broken done drawn each every found "
    "given held here how it kept learnt left looked made meant mine named none one ones ours own "
    "read said seen shown some spent strange such taken theirs them there these they those told "
    "wanted what which who whole whom whose why written"
)
_FUNCTION_WORDS = (
    "are as be been by had in is it its no none not of one ones other others own so such that "
    "their them there these they this those to was were what which who whom whose"
)
_OPENINGS = "As By How In None Of So To What Where Whether Which Who Whose Why"
_PREPOSITIONS = "as at behind by for from in is of on to with"
VAGUE_NAMES = frozenset(_VAGUE.split())
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
VAGUE_OPENINGS = frozenset(_OPENINGS.split())
PREPOSITIONS = frozenset(_PREPOSITIONS.split())
MEASURES = (
    "lines above 100 columns, %",
    "vague assigned names, %",
    "vague parameters, %",
    "names with a preposition, %",
    "names with and, %",
    "vague openings of docstrings, %",
    "sentences of function words, %",
    "comprehensions in 1,000 lines",
    "ternaries in 1,000 lines",
    "tuple assignments in 1,000 lines",
)
Record = Mapping[str, Mapping[str, float]]


def list_packages() -> dict[str, list[Path]]:
    """Return the files of each package: the folders in auditor/, and the four packages beside
    it.
    """
    files: dict[str, list[Path]] = {}
    for top in ("auditor", *SIDES):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).parts[:-1]
            files.setdefault("/".join(parts[:2]), []).append(path)
    return files


def measure_package(paths: list[Path]) -> dict[str, float]:
    """Return the value of each of MEASURES."""
    counts: Counter[str] = Counter()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        counts["lines"] += len(lines)
        counts["wide"] += sum(len(line) > WIDTH for line in lines)
        for node in ast.walk(ast.parse(text)):
            counts.update(_count_node(node))
    parts = {
        "wide": "lines",
        "vague names": "names",
        "vague parameters": "parameters",
        "prepositions": "functions",
        "and": "functions",
        "vague openings": "docstrings",
        "hard sentences": "sentences",
    }
    shares = [100 * counts[part] / max(1, counts[whole]) for part, whole in parts.items()]
    densities = [
        1000 * counts[kind] / max(1, counts["lines"])
        for kind in ("comprehensions", "ternaries", "tuples")
    ]
    return dict(zip(MEASURES, (round(value, 1) for value in shares + densities), strict=True))


def _count_node(node: ast.AST) -> Iterator[str]:
    """Yield each kind that a syntax node counts as, once."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield "names"
        if node.id in VAGUE_NAMES:
            yield "vague names"
    elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
        yield "parameters"
        if node.arg in VAGUE_NAMES:
            yield "vague parameters"
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield "comprehensions"
    elif isinstance(node, ast.IfExp):
        yield "ternaries"
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        if any(isinstance(target, ast.Tuple) for target in node.targets):
            yield "tuples"
    elif isinstance(node, ast.Module | ast.ClassDef):
        yield from _count_docstring(node)
    elif isinstance(node, ast.FunctionDef):
        yield from _count_docstring(node)
        yield from _count_function_name(node)


def _count_function_name(node: ast.FunctionDef) -> Iterator[str]:
    is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    if is_property or node.name.startswith("__"):
        return
    yield "functions"
    words = node.name.strip("_").split("_")
    if PREPOSITIONS & set(words[1:]):
        yield "prepositions"
    if "and" in words:
        yield "and"


def _count_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    text = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
    if not text:
        return
    yield "docstrings"
    if text.split()[0].strip("`.,:*\"'") in VAGUE_OPENINGS:
        yield "vague openings"
    for sentence in re.split(r"(?<=[.;:])\s+", text):
        words = re.findall(r"[A-Za-z']+", sentence.lower())
        if len(words) < 7:
            continue
        yield "sentences"
        if sum(word in FUNCTION_WORDS for word in words) >= 0.45 * len(words):
            yield "hard sentences"


def measure_all() -> dict[str, dict[str, float]]:
    """Return the measures of every package."""
    return {package: measure_package(paths) for package, paths in list_packages().items()}


def read_record() -> dict[str, dict[str, float]]:
    record: dict[str, dict[str, float]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def list_losses(measured: Record, record: Record) -> list[str]:
    """Return a sentence for each measure that is worse than its recorded value.

    A new package is compared with the worst recorded values.
    """
    worst = {name: max(values[name] for values in record.values()) for name in MEASURES}
    losses = []
    for package, values in measured.items():
        limits = record.get(package, worst)
        for name in MEASURES:
            if values[name] > limits[name]:
                losses.append(f"{package}: {name}: {values[name]:g}, was {limits[name]:g}")
    return losses


def main(tighten: bool = False) -> int:
    measured = measure_all()
    rows = [
        (package, *(f"{values[name]:g}" for name in MEASURES))
        for package, values in measured.items()
    ]
    print(harness.markdown(("package", *MEASURES), rows), end="")
    if tighten:
        record = read_record() if RECORD.exists() else {}
        better = {
            package: {
                name: min(value, record.get(package, values)[name])
                for name, value in values.items()
            }
            for package, values in measured.items()
        }
        RECORD.write_text(json.dumps(better, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(harness.run(main))

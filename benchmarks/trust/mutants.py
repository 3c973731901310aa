"""Small faults at random places of the code that decides, and whether the tests see them: which ones they do not.

    python benchmarks/trust/mutants.py [--count 200] [--seed 0] [--timeout 120] [-o mutants.jsonl]

Mutants are drawn without replacement from privacy, statistics, gate and training: a comparison turned or moved by its
boundary, an operator of arithmetic, a number, a condition, a returned value. Each runs the tests that belong to its
module: `tests/PACKAGE/test_MODULE.py`, those of the package that import it, and MORE. It is caught where one of them
fails, or takes longer than the timeout. A process with torch in its memory forks for each mutant, whose module is
compiled from a changed tree: no file is written, and tests that start another program test the program as it is.

What was tried is kept in the journal, and not tried again as long as the module and its tests are the same. `--only
WORD` takes mutants whose place has the word in it, `--again` tries survivors anew. EQUIVALENT are mutants
that no test can tell from the program, with the reason; they are counted beside, and not among the caught.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("privacy", "statistics", "gate", "training")
WARM = ("torch", "transformers", "peft", "opacus", "dp_accounting", "scipy.stats", "jsonschema", "typer")
MORE = {  # tests of what is tested through something else
    "gate/": ("tests/gate/test_gate.py", "tests/gate/test_policy.py", "tests/gate/test_baseline.py"),
    "statistics/calibration.py": ("tests/statistics/test_membership.py",),
    "statistics/extraction.py": ("tests/statistics/test_metrics.py",),
    "statistics/games.py": ("tests/statistics/test_audited.py",),
    "statistics/judging.py": ("tests/statistics/test_metrics.py",),
    "statistics/unlearning.py": ("tests/defenses/test_unlearning.py",),
    "privacy/gradient_canaries.py": ("tests/attacks/test_gradient_audit.py",),
    "statistics/ranking.py": ("tests/statistics/test_metrics.py",),
    "training/poisson.py": ("tests/defenses/test_private_training.py",),
    "training/preflight.py": ("tests/defenses/test_private_training.py",),
    "training/rarity.py": ("tests/defenses/test_private_training.py",),
    "training/unlearning.py": ("tests/defenses/test_unlearning.py",),
    "training/relearning.py": ("tests/defenses/test_unlearning.py",),
    "training/variants.py": ("tests/defenses/test_variants.py",),
}
_KNOWN = "ignore::pytest.PytestAssertRewriteWarning"  # of plug-ins that torch or opacus have imported already
EQUIVALENT: dict[str, str] = {}

_TURNED = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: where (path, function, the line as it is written), what becomes of what; its number in the file."""

    path: str
    number: int
    kind: str
    function: str
    line: int
    source: str
    change: str
    count: int  # of equal ones before it

    @property
    def key(self) -> str:
        """Stays the same where other lines of the file change."""
        said = "\x1f".join((self.path, self.function, self.source, self.kind, self.change, str(self.count)))
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line} {self.kind} {self.change}"


class _Changes(ast.NodeTransformer):
    """Visits what can be changed, in order; makes the change of one number, and remembers all."""

    def __init__(self, chosen: int = -1) -> None:
        self.chosen, self.found = chosen, list[tuple[str, str, int, str]]()
        self.functions: list[str] = []

    def _at(self, kind: str, node: Any, new: Any) -> Any:
        """The node, or the new one where its number was chosen."""
        number = len(self.found)
        self.found.append((kind, f"{ast.unparse(node)} -> {ast.unparse(new)}", node.lineno, ".".join(self.functions)))
        return ast.copy_location(new, node) if number == self.chosen else node

    def _inside(self, node: Any) -> Any:
        self.functions.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]  # no decorator, default or annotation
        self.functions.pop()
        return node

    visit_FunctionDef = visit_ClassDef = _inside

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Raise(self, node: ast.Raise) -> Any:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        node.value, node.slice = self.visit(node.value), self.visit(node.slice)
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        result: Any = node
        for i, operator in enumerate(node.ops):
            for other in _TURNED.get(type(operator), ()):
                changed = ast.Compare(node.left, [*node.ops[:i], other(), *node.ops[i + 1 :]], node.comparators)
                result = self._at("comparison", node, changed) if result is node else result
        return result

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        other = _OPERATORS.get(type(node.op))
        return node if other is None else self._at("arithmetic", node, ast.BinOp(node.left, other(), node.right))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._at("boolean", node, ast.BoolOp(other, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        return self._at("boolean", node, node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool):
            return self._at("boolean", node, ast.Constant(not node.value))
        if isinstance(node.value, int):
            return self._at("constant", node, ast.Constant(node.value + 1))
        if isinstance(node.value, float):
            return self._at("constant", node, ast.Constant(2 * node.value or 1.0))
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return node
        return self._at("return", node, ast.Return(ast.Constant(None)))


def mutants(path: Path, root: Path = ROOT) -> Iterator[Mutant]:
    """All of a file, in order."""
    text = path.read_text()
    changes, lines = _Changes(), text.splitlines()
    changes.visit(ast.parse(text))
    before: dict[tuple[str, ...], int] = {}
    for number, (kind, change, line, function) in enumerate(changes.found):
        source = lines[line - 1].strip()
        same = (function, source, kind, change)
        before[same] = before.get(same, -1) + 1
        yield Mutant(
            path.relative_to(root / "auditor").as_posix(), number, kind, function, line, source, change, before[same]
        )


def mutated(mutant: Mutant, filename: str) -> CodeType:
    """The file's module with this change."""
    tree = _Changes(mutant.number).visit(ast.parse(Path(filename).read_text()))
    return compile(ast.fix_missing_locations(tree), filename, "exec")


def tests_of(path: str) -> list[str]:
    """The test files that belong to a module: its own, those of its package that import it, and MORE."""
    package, module = path.removesuffix(".py").split("/")
    own = ROOT / f"tests/{package}/test_{module}.py"
    imports = re.compile(
        rf"from auditor\.{package}\.{module} import|from auditor\.{package} import [^\n]*\b{module}\b|"
        rf"auditor\.{package}\.{module}\b"
    )
    importing = [
        file for file in sorted((ROOT / "tests" / package).glob("test_*.py")) if imports.search(file.read_text())
    ]
    more = [ROOT / file for start, files in MORE.items() if path.startswith(start) for file in files]
    chosen = dict.fromkeys(file.relative_to(ROOT).as_posix() for file in (own, *importing, *more) if file.is_file())
    return list(chosen)


# --- one mutant, in a process of its own ------------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder:
    """Stands before all others, for one module."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        self.name, self.path, self.code = name, path, code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=_Loader(name, self.path, self.code))


def run(tests: Sequence[str], mutant: Mutant | None, timeout: float) -> tuple[str, float]:
    """("survived" | "caught" | "timeout", seconds) of pytest over the files, the first failure ending it."""
    start, child = time.monotonic(), os.fork()
    if child == 0:
        os.setsid()
        os.chdir(ROOT)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        code = 1
        try:
            if mutant is not None:
                filename = str(ROOT / "auditor" / mutant.path)
                name = "auditor." + mutant.path.removesuffix(".py").replace("/", ".")
                sys.meta_path.insert(0, _Finder(name, filename, mutated(mutant, filename)))  # type: ignore[arg-type]
            import pytest

            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", _KNOWN, *tests]))
        finally:
            os._exit(code)
    while time.monotonic() - start < timeout:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return ("survived" if status == 0 else "caught"), time.monotonic() - start
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout", time.monotonic() - start


class Journal:
    """What was tried, a line each. A line counts as long as the mutated file and the tests are what they were."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        self.lines = {(line["key"], line["files"]): line for line in map(json.loads, lines)}

    def add(self, line: dict[str, Any]) -> None:
        self.lines[line["key"], line["files"]] = line
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def digest(paths: Sequence[str]) -> str:
    return hashlib.sha256(b"\0".join((ROOT / path).read_bytes() for path in paths)).hexdigest()[:12]


def usable(tests: Sequence[str], journal: Journal, timeout: float) -> list[str]:
    """Those that pass on the program as it is: its own, and the quickest others, in half of the timeout together."""
    took = {}
    for test in tests:
        files = digest([test])
        line = journal.lines.get((test, files))
        if line is None:
            outcome, seconds = run([test], None, 2 * timeout)
            line = {"key": test, "files": files, "outcome": outcome, "seconds": round(seconds, 1)}
            journal.add(line)
        if line["outcome"] == "survived":
            took[test] = line["seconds"]
    chosen, total = [], 0.0
    for test in sorted(took, key=lambda test: (test != tests[0], took[test])):
        total += took[test]
        if not chosen or total <= timeout / 2:
            chosen.append(test)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant later than this")
    parser.add_argument("--only", default="", help="mutants whose place has this word in it")
    parser.add_argument("--again", action="store_true", help="try those that survived anew")
    parser.add_argument("-o", "--out", type=Path, default=Path("mutants.jsonl"))
    o = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in WARM:
        importlib.import_module(name)
    journal, start = Journal(o.out), time.monotonic()
    files = sorted(path for package in PACKAGES for path in (ROOT / "auditor" / package).glob("*.py"))
    every = [mutant for path in files for mutant in mutants(path)]
    order = sorted(every, key=lambda mutant: hashlib.sha256(f"{o.seed} {mutant.key}".encode()).digest())
    drawn = [mutant for mutant in order if o.only in mutant.place][: o.count]
    tried: list[tuple[Mutant, str]] = []
    for number, mutant in enumerate(drawn):
        if time.monotonic() - start > 60 * o.minutes:
            break
        tests = tests_of(mutant.path)
        content = digest([f"auditor/{mutant.path}", *tests])
        line = journal.lines.get((mutant.key, content))
        if line is None or (o.again and line["outcome"] == "survived"):
            passing = usable(tests, journal, o.timeout)
            outcome, seconds = run(passing, mutant, o.timeout) if passing else ("untested", 0.0)
            line = {"key": mutant.key, "files": content, "outcome": outcome, "seconds": round(seconds, 1)}
            journal.add({**line, "place": mutant.place, "tests": passing})
        outcome = "equivalent" if mutant.key in EQUIVALENT and line["outcome"] == "survived" else line["outcome"]
        tried.append((mutant, outcome))
        print(f"{number + 1:4} {outcome:10} {line['seconds']:6.1f} s  {mutant.key}  {mutant.place}", flush=True)
    report(tried, len(every))
    return 0


def report(tried: Sequence[tuple[Mutant, str]], every: int) -> None:
    from auditor.statistics.intervals import clopper_pearson

    survivors = [mutant for mutant, outcome in tried if outcome in ("survived", "untested")]
    counted = [outcome for _, outcome in tried if outcome != "equivalent"]
    caught = len(counted) - len(survivors)
    low, high = clopper_pearson(caught, len(counted)) if counted else (0.0, 1.0)
    print(
        f"\n{caught} of {len(counted)} caught ({caught / max(1, len(counted)):.1%}, 95% {low:.1%} to {high:.1%}), ",
        end="",
    )
    print(f"{counted.count('timeout')} of them by the timeout; ", end="")
    print(f"{len(tried) - len(counted)} equivalent; drawn from {every:,}. Survivors:")
    for mutant in survivors:
        print(f"  {mutant.key}  {mutant.place}\n      {mutant.source}")


if __name__ == "__main__":
    sys.exit(main())

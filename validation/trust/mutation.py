"""List small changes of a module's syntax tree, each with a key, and compile a changed module."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TURNED = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One change of a file: its place (path, function, source line), its description and its
    number.
    """

    path: str
    number: int
    kind: str
    function: str
    line: int
    source: str
    change: str
    count: int  # number of equal changes before it

    @property
    def key(self) -> str:
        """Return a key that does not depend on the other lines of the file."""
        said = "\x1f".join(
            (self.path, self.function, self.source, self.kind, self.change, str(self.count))
        )
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line} {self.kind} {self.change}"


class _Changes(ast.NodeTransformer):
    """A visitor that numbers all possible changes in order, records them and makes the chosen
    one.
    """

    def __init__(self, chosen: int = -1) -> None:
        self.chosen, self.found = chosen, list[tuple[str, str, int, str]]()
        self.functions: list[str] = []

    def _at(self, kind: str, node: Any, new: Any) -> Any:
        """Record a possible change; return the new node if this change was chosen, else the old
        node.
        """
        number = len(self.found)
        self.found.append(
            (
                kind,
                f"{ast.unparse(node)} -> {ast.unparse(new)}",
                node.lineno,
                ".".join(self.functions),
            )
        )
        return ast.copy_location(new, node) if number == self.chosen else node

    def _inside(self, node: Any) -> Any:
        self.functions.append(node.name)
        # Visit only the body: no decorators, defaults or annotations.
        node.body = [self.visit(statement) for statement in node.body]
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
                changed = ast.Compare(
                    node.left, [*node.ops[:i], other(), *node.ops[i + 1 :]], node.comparators
                )
                result = self._at("comparison", node, changed) if result is node else result
        return result

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        other = _OPERATORS.get(type(node.op))
        return (
            node
            if other is None
            else self._at("arithmetic", node, ast.BinOp(node.left, other(), node.right))
        )

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
        if node.value is None or (
            isinstance(node.value, ast.Constant) and node.value.value is None
        ):
            return node
        return self._at("return", node, ast.Return(ast.Constant(None)))


def mutants(path: Path, root: Path = ROOT) -> Iterator[Mutant]:
    """Yield all mutants of a file, in order."""
    text = path.read_text()
    changes, lines = _Changes(), text.splitlines()
    changes.visit(ast.parse(text))
    before: dict[tuple[str, ...], int] = {}
    for number, (kind, change, line, function) in enumerate(changes.found):
        source = lines[line - 1].strip()
        same = (function, source, kind, change)
        before[same] = before.get(same, -1) + 1
        yield Mutant(
            path.relative_to(root / "auditor").as_posix(),
            number,
            kind,
            function,
            line,
            source,
            change,
            before[same],
        )


def mutated(mutant: Mutant, filename: str) -> CodeType:
    """Compile the file's module with this change."""
    tree = _Changes(mutant.number).visit(ast.parse(Path(filename).read_text()))
    return compile(ast.fix_missing_locations(tree), filename, "exec")

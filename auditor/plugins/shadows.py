"""What our own plug-in files say, read from their text: a file is not run, so that `audit list` need not import torch.

Of each plug-in a class is made that has its bases, name, options, docstring and the like, and no methods: its shadow.
What cannot be told for certain from the text is refused (`Unreadable`), and whoever asks imports the files instead.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

ENTRY_POINTS = "audit.plugins"  # where other distributions name plug-ins of theirs, which have to be run
PLACES = {  # a kind's base class -> the package of our own plug-ins of that kind
    "auditor.plugins.attack.Attack": "auditor.attacks",
    "auditor.plugins.probe.Probe": "auditor.attacks",
    "auditor.plugins.defense.Defense": "auditor.defenses",
    "auditor.plugins.trainer.Trainer": "auditor.defenses",
    "auditor.plugins.benchmark.Benchmark": "auditor.benchmarks",
}
_SAID = ("name", "title", "needs", "claims")  # what is read of a class beside its docstring and its options


class Unreadable(Exception):
    """Only running a file can tell what it says; the message says where."""


def shadows() -> dict[str, dict[str, type]]:
    """The shadows of all our plug-ins by kind (Attack, ...) and name, in the order of names. Raises Unreadable."""
    reader = _Reader()
    return {root.rpartition(".")[2]: reader.find(root, package) for root, package in PLACES.items()}


class _Reader:
    """Makes shadows, each once."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}
        self._made: dict[str, type] = {}

    def find(self, root: str, package: str) -> dict[str, type]:
        kind, found = self._made_of(root), dict[str, Any]()
        shadows: list[Any] = [self._made_of(where) for module in _modules(package) for where in self._plugins(module)]
        named = [shadow for shadow in shadows if issubclass(shadow, kind) and getattr(shadow, "name", None)]
        for shadow in sorted(named, key=attrgetter("name")):
            if found.setdefault(shadow.name, shadow) is not shadow:
                raise Unreadable(f"two plug-ins are called {shadow.name!r}")
        return found

    def _plugins(self, module: str) -> Iterator[str]:
        yield from (where for name in self._text(module).classes if self._is_plugin(where := f"{module}.{name}"))

    def _text(self, module: str) -> _Text:
        if module not in self._texts:
            self._texts[module] = _Text(module, _parsed(module))
        return self._texts[module]

    def _bases(self, where: str) -> list[str]:
        """Where the bases of a class stand, as far as they are ours."""
        text, node = self._class(where)
        return [self._source(text.dotted(base)) for base in node.bases]

    def _is_plugin(self, where: str) -> bool:
        if where in PLACES:
            return True
        return where.startswith("auditor.") and any(map(self._is_plugin, self._bases(where)))

    def _source(self, where: str) -> str:
        """Where a thing was written that others may import from elsewhere."""
        module, _, name = where.rpartition(".")
        if not module.startswith("auditor."):
            return where
        text = self._text(module)
        if name in text.classes or name in text.values:
            return where
        if name not in text.imported:
            raise Unreadable(f"{where} is not assigned, defined or imported")
        return self._source(text.imported[name])

    def _class(self, where: str) -> tuple[_Text, ast.ClassDef]:
        module, _, name = where.rpartition(".")
        if not module.startswith("auditor.") or name not in self._text(module).classes:
            raise Unreadable(f"{where} is no class of ours")
        text = self._text(module)
        return text, text.classes[name]

    def _made_of(self, where: str) -> type:
        if where not in self._made:
            text, node = self._class(where)
            bases = tuple(self._made_of(base) for base in self._bases(where))
            doc = ast.get_docstring(node, clean=False)
            try:
                shadow = type(node.name, bases, {"__module__": text.module, "__doc__": doc, **self._body(text, node)})
                self._made[where] = dataclasses.dataclass(frozen=True)(shadow) if _is_dataclass(node) else shadow
            except (TypeError, ValueError) as error:  # neither can it be run
                raise Unreadable(f"{where}: {error}") from error
        return self._made[where]

    def _body(self, text: _Text, node: ast.ClassDef) -> dict[str, Any]:
        """The options of a class with their defaults, and what it says of itself."""
        options = _is_dataclass(node)
        if options and ast.get_docstring(node) is None:
            raise Unreadable(f"{text.module}.{node.name} has no docstring: one would be made up")
        if any(isinstance(part, ast.FunctionDef) and part.name in _SAID for part in node.body):
            raise Unreadable(f"{text.module}.{node.name} works out one of {', '.join(_SAID)}")
        body: dict[str, Any] = {}
        kinds: dict[str, Any] = {}
        for name, kind, value in _assigned(node):
            is_option = options and kind is not None and "ClassVar" not in ast.unparse(kind)
            if is_option or name in _SAID:
                kinds[name] = Any if is_option else ClassVar
                body |= {} if value is None else {name: self._value(text, value)}
        return {**body, "__annotations__": kinds}

    def _value(self, text: _Text, node: ast.expr) -> Any:
        if isinstance(node, ast.Name | ast.Attribute):
            module, _, name = self._source(text.dotted(node)).rpartition(".")
            if not module.startswith("auditor.") or name not in self._text(module).values:
                raise Unreadable(f"{ast.unparse(node)} in {text.module}")
            return self._value(self._text(module), self._text(module).values[name])
        if isinstance(node, ast.Tuple):
            return tuple(self._value(text, item) for item in node.elts)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise Unreadable(f"{ast.unparse(node)} in {text.module}") from None


@dataclasses.dataclass(frozen=True)
class _Text:
    """A module as it is written: what it defines, and where what it imports comes from."""

    module: str
    tree: ast.Module

    @cached_property
    def classes(self) -> Mapping[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def values(self) -> Mapping[str, ast.expr]:
        return {name: value for name, _, value in _assigned(self.tree) if value is not None}

    @cached_property
    def imported(self) -> Mapping[str, str]:
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                found.update({a.asname or a.name.partition(".")[0]: a.name for a in node.names})
            elif isinstance(node, ast.ImportFrom):
                found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
        return found

    def dotted(self, node: ast.expr) -> str:
        """The full name of what a name in this module means."""
        if isinstance(node, ast.Subscript):  # Generic[...]
            return self.dotted(node.value)
        if isinstance(node, ast.Attribute):
            return f"{self.dotted(node.value)}.{node.attr}"
        if not isinstance(node, ast.Name):
            raise Unreadable(f"{ast.unparse(node)} in {self.module}")
        if node.id in self.classes or node.id in self.values:
            return f"{self.module}.{node.id}"
        return self.imported.get(node.id, f"builtins.{node.id}")


_HARMLESS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Pass)


def _assigned(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """(name, annotation, value) of what a body assigns. Raises Unreadable for a statement that may say more."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id, part.annotation, part.value
        elif isinstance(part, ast.Assign) and all(isinstance(target, ast.Name | ast.Tuple) for target in part.targets):
            yield from ((target.id, None, part.value) for target in part.targets if isinstance(target, ast.Name))
        elif not (isinstance(part, _HARMLESS) or _is_docstring(part) or _is_for_types(part)):
            raise Unreadable(f"what stands in line {part.lineno}: {ast.unparse(part).splitlines()[0]}")


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _is_dataclass(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list]
    if set(decorators) - {"dataclass", "dataclasses.dataclass"}:
        raise Unreadable(f"the class {node.name}, which something else is made of by {', '.join(decorators)}")
    return bool(decorators)


def _modules(package: str) -> Iterator[str]:
    """The modules of a package; importing it runs its empty door only."""
    places = importlib.import_module(package).__path__
    yield from (f"{package}.{info.name}" for info in pkgutil.iter_modules(places) if not info.ispkg)


def _parsed(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise Unreadable(f"no file of {module}")
    try:
        return ast.parse(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        raise Unreadable(f"{module}: {error}") from error

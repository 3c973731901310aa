"""Finds attacks, probes, defenses and benchmarks by name: our own files, installed entry points, `--plugin` files.

Knows how options are written on a command line; knows nothing of what they mean.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from auditor.core.errors import AuditError, unknown
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense
from auditor.plugins.probe import Probe
from auditor.plugins.trainer import Trainer

ENTRY_POINTS = "audit.plugins"
Plugin = TypeVar("Plugin", Attack, Probe, Defense, Trainer)
_extra: dict[Path, types.ModuleType] = {}


def load_file(path: Path) -> None:
    """Makes the attacks and defenses of a Python file available (`--plugin mine.py`); a second time changes nothing."""
    if path.resolve() in _extra:
        return
    if not path.is_file():
        raise AuditError(f"expected a Python file for --plugin, got {str(path)!r}, which does not exist")
    spec = importlib.util.spec_from_file_location(f"audit_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise AuditError(f"expected a Python file for --plugin, got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises is the user's to mend
        raise _unloadable(str(path), error) from error
    _extra[path.resolve()] = module


def _unloadable(what: str, error: BaseException) -> AuditError:
    return AuditError(f"cannot load the plug-in {what!r}: {type(error).__name__}: {error}")


def attacks() -> dict[str, type[Attack]]:
    return _find(Attack, "auditor.attacks")


def probes() -> dict[str, type[Probe]]:
    return _find(Probe, "auditor.attacks")


def attacks_and_probes() -> dict[str, type[Attack] | type[Probe]]:
    """All that `--attack` may name. Raises AuditError where an attack and a probe share a name."""
    found, more = attacks(), probes()
    for name in sorted(set(found) & set(more)):
        raise AuditError(f"an attack and a probe are both called {name!r}: {found[name]} and {more[name]}")
    return {**found, **more}


def defenses() -> dict[str, type[Defense]]:
    return _find(Defense, "auditor.defenses")


def trainers() -> dict[str, type[Trainer]]:
    return _find(Trainer, "auditor.defenses")


def benchmarks() -> dict[str, type[Benchmark]]:
    return _find(Benchmark, "auditor.benchmarks")


def _find(kind: Any, package: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in _modules(package):
        for value in _classes(module, kind):
            if found.setdefault(value.name, value) is not value:
                raise AuditError(f"two plug-ins are called {value.name!r}: {found[value.name]} and {value}")
    return dict(sorted(found.items()))


def _classes(module: types.ModuleType, kind: type) -> Iterator[Any]:
    """The named subclasses of `kind` that this module defines; those it imports belong elsewhere."""
    for value in vars(module).values():
        mine = inspect.isclass(value) and value.__module__ == module.__name__ and issubclass(value, kind)
        if mine and value.name:
            yield value


def _modules(package: str) -> list[types.ModuleType]:
    ours = importlib.import_module(package)
    names = [f"{package}.{info.name}" for info in pkgutil.iter_modules(ours.__path__) if not info.ispkg]
    outside = [_installed(entry) for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    return [importlib.import_module(name) for name in names] + outside + list(_extra.values())


def _installed(entry: importlib.metadata.EntryPoint) -> types.ModuleType:
    try:
        module: types.ModuleType = entry.load()
    except (Exception, SystemExit) as error:
        raise _unloadable(entry.value, error) from error
    return module


def build(kind: str, known: Mapping[str, type[Plugin]], name: str, options: Mapping[str, Any]) -> Plugin:
    """An attack or defense by name with its options. Raises AuditError with the nearest name for an unknown one."""
    if name not in known:
        raise unknown(kind, name, known)
    cls = known[name]
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    values = {}
    for option, value in options.items():
        if option not in fields:
            raise unknown(f"option of {kind} {name}:", option, fields)
        values[option] = convert(f"{name}.{option}", hints[option], value)
    return cls(**values)


def convert(where: str, kind: Any, value: Any) -> Any:
    """A command-line or TOML value as the annotated type. No value is guessed at: `samples=ten` is refused."""
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise AuditError(f"expected {where} in {typing.get_args(kind)}, got {value!r}")
        return value
    if kind is bool:
        words = {"true": True, "false": False}
        if str(value).lower() not in words:
            raise AuditError(f"expected {where} to be true or false, got {value!r}")
        return words[str(value).lower()]
    fits = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
    try:
        if not isinstance(value, str) and not fits:  # from TOML: 2.7 is no whole number, true is no number
            raise TypeError
        made = kind(value)
        if kind is float and not math.isfinite(made):  # no option means anything by an infinite number
            raise ValueError
        return made
    except (TypeError, ValueError, OverflowError) as error:
        raise AuditError(f"expected {where} to be {_WORDS.get(kind, kind.__name__)}, got {value!r}") from error


_WORDS: dict[Any, str] = {int: "a whole number", float: "a finite number", str: "text"}


def options_of(cls: type) -> dict[str, Any]:
    """Option names and defaults of a plug-in, in the order of declaration."""
    return {field.name: field.default for field in dataclasses.fields(cls)}


def description(cls: type) -> str:
    """The first line of the docstring."""
    return (inspect.getdoc(cls) or "").split("\n", 1)[0]


def title(cls: type[Attack] | type[Probe] | type[Defense]) -> str:
    """What people read in a table: the class's `title`, else its name."""
    return cls.title or cls.name

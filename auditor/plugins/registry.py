"""Find plug-ins of all kinds by name: built-in files, installed entry points, `--plugin` files."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import pkgutil
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from auditor.core import safe_mode
from auditor.core.errors import AuditError
from auditor.core.plan_parts import split_model_name
from auditor.core.python_files import load_python_file
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense
from auditor.plugins.options import ENTRY_POINTS, build_plugin, get_option_defaults
from auditor.plugins.probe import Probe
from auditor.plugins.provider import Provider
from auditor.plugins.trainer import Trainer

_extra: dict[Path, types.ModuleType] = {}
_PACKAGES: Mapping[Any, str] = {  # by kind of plug-in
    Attack: "auditor.attacks",
    Probe: "auditor.attacks",
    Defense: "auditor.defenses",
    Trainer: "auditor.defenses",
    Benchmark: "auditor.benchmarks",
    Provider: "auditor.providers",
}


def load_plugin_file(path: Path) -> None:
    """Load the plug-ins of a Python file (`--plugin mine.py`); repeated calls change nothing."""
    safe_mode.refuse_safe_mode_action(f"the plug-in {str(path)!r} would run")
    if path.resolve() in _extra:
        return
    # The hash of the path: two files of one name are two modules.
    name = (
        f"audit_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    )
    try:
        module = load_python_file(path, name, "a Python file for --plugin")
    except AuditError:
        raise
    except (Exception, SystemExit) as error:  # the user has to mend any error of the file
        raise _make_plugin_load_error(str(path), error) from error
    if not any(_list_module_plugins(module, kind) for kind in _PACKAGES):
        kinds = ", ".join(kind.__name__ for kind in _PACKAGES)
        raise AuditError(
            f"expected a plug-in in {str(path)!r}, a subclass of {kinds} with a name, got none"
        )
    _extra[path.resolve()] = module


def _make_plugin_load_error(description: str, error: BaseException) -> AuditError:
    return AuditError(f"cannot load the plug-in {description!r}: {type(error).__name__}: {error}")


def list_attacks() -> dict[str, type[Attack]]:
    return _find_plugin_classes(Attack)


def list_probes() -> dict[str, type[Probe]]:
    return _find_plugin_classes(Probe)


def list_methods() -> dict[str, type[Attack] | type[Probe]]:
    """Return the attacks and probes that `--attack` accepts, keyed by name.

    Raise AuditError if an attack and a probe share a name.
    """
    attacks = list_attacks()
    probes = list_probes()
    for name in sorted(set(attacks) & set(probes)):
        raise AuditError(
            f"an attack and a probe are both called {name!r}: {attacks[name]} and {probes[name]}"
        )
    return {**attacks, **probes}


def find_method_name(measures: str) -> str:
    """Return the name of the first attack or probe, in alphabetical order, that measures a leak.

    `measures` is the kind of leak, such as "membership" (a value of `Method.measures`).
    """
    return next(name for name, kind in list_methods().items() if kind.measures == measures)


def list_defenses() -> dict[str, type[Defense]]:
    return _find_plugin_classes(Defense)


def list_trainers() -> dict[str, type[Trainer]]:
    return _find_plugin_classes(Trainer)


def list_mitigations() -> dict[str, type[Trainer]]:
    """Return the trainers for `audit mitigate --by`, which train one model, not an ensemble."""
    return {
        name: kind
        for name, kind in list_trainers().items()
        if issubclass(kind, Defense) and "trained" in kind.needs and not kind.unlearns
    }


def list_providers() -> dict[str, type[Provider]]:
    return _find_plugin_classes(Provider)


def resolve_model_provider(model: str, options: Mapping[str, Any]) -> tuple[Provider, str]:
    """Return a model's provider, with its options, and the model's name at this provider.

    If the provider has no options of its own, the options are passed in `RequestedModel.loading`.
    Raise AuditError if the provider is unknown or an option is invalid.
    """
    known = list_providers()
    prefix, name = split_model_name(model)
    prefix = prefix or next(kind.name for kind in known.values() if kind.unprefixed)
    takes_options = prefix in known and get_option_defaults(known[prefix])
    return build_plugin("provider", known, prefix, options if takes_options else {}), name


def list_plugin_classes() -> dict[str, dict[str, Any]]:
    """Return all plug-ins, keyed by kind (such as Attack) and then by name."""
    return {kind.__name__: _find_plugin_classes(kind) for kind in _PACKAGES}


def _find_plugin_classes(kind: Any) -> dict[str, Any]:
    classes: dict[str, Any] = {}
    for module in _import_plugin_modules(_PACKAGES[kind]):
        for value in _list_module_plugins(module, kind):
            check_plugin_name(value.name)
            # One class under two names in its module is one plug-in.
            if classes.setdefault(value.name, value) is not value:
                raise AuditError(
                    f"two plug-ins are called {value.name!r}: {classes[value.name]} and {value}"
                )
    return dict(sorted(classes.items()))


def _list_module_plugins(module: types.ModuleType, kind: Any) -> list[Any]:
    """Return a module's own plug-in classes of one kind, without imported classes."""
    classes = []
    for value in vars(module).values():
        is_own_class = isinstance(value, type) and value.__module__ == module.__name__
        # A base class has no name.
        if is_own_class and issubclass(value, kind) and value.name:
            classes.append(value)
    return classes


def check_plugin_name(name: str) -> None:
    """Raise AuditError if a name cannot be part of the name of a file in a run."""
    if not name or "/" in name:
        raise AuditError(f"expected the name of a plug-in, without '/', got {name!r}")


def _import_plugin_modules(package: str) -> list[types.ModuleType]:
    # Safe mode runs no code of other distributions; `load_plugin_file` refuses files by itself.
    modules = list(map(importlib.import_module, _list_own_module_names(package)))
    if not safe_mode.is_safe_mode():
        modules += map(_load_plugin_entry_point, _plugin_entry_points())
    return modules + list(_extra.values())


@cache
def _list_own_module_names(package: str) -> tuple[str, ...]:
    """Return the names of a package's modules, without its subpackages."""
    # Cached, as it reads the package's folder.
    names = []
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not info.ispkg:
            names.append(f"{package}.{info.name}")
    return tuple(names)


@cache
def _plugin_entry_points() -> importlib.metadata.EntryPoints:
    # Cached, as it reads the metadata of every installed distribution.
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def _load_plugin_entry_point(entry: importlib.metadata.EntryPoint) -> types.ModuleType:
    try:
        module: types.ModuleType = entry.load()
    except (Exception, SystemExit) as error:
        raise _make_plugin_load_error(entry.value, error) from error
    return module

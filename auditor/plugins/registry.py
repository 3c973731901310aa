"""Finds plug-ins of all kinds by name: our own files, installed entry points, `--plugin` files."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from auditor.core import safe_mode
from auditor.core.errors import AuditError
from auditor.core.plan_parts import provider_and_name
from auditor.plugins.attack import Attack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense
from auditor.plugins.options import ENTRY_POINTS, build_plugin, plugin_option_defaults
from auditor.plugins.probe import Probe
from auditor.plugins.provider import Provider
from auditor.plugins.trainer import Trainer

_extra: dict[Path, types.ModuleType] = {}


def load_plugin_file(path: Path) -> None:
    """Makes the attacks and defenses of a Python file available (`--plugin mine.py`); a second time
    changes nothing."""
    safe_mode.refuse_in_safe_mode(f"the plug-in {str(path)!r} would run")
    if path.resolve() in _extra:
        return
    if not path.is_file():
        raise AuditError(
            f"expected a Python file for --plugin, got {str(path)!r}, which does not exist"
        )
    # The hash of the path: two files of one name are two modules.
    name = (
        f"audit_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    )
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AuditError(f"expected a Python file for --plugin, got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    # where `dataclass` and `get_type_hints` look annotations up that are strings
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises is the user's to mend
        del sys.modules[name]
        raise _plugin_load_error(str(path), error) from error
    _extra[path.resolve()] = module


def _plugin_load_error(what: str, error: BaseException) -> AuditError:
    return AuditError(f"cannot load the plug-in {what!r}: {type(error).__name__}: {error}")


def attacks_by_name() -> dict[str, type[Attack]]:
    return _find_plugin_classes(Attack, "auditor.attacks")


def probes_by_name() -> dict[str, type[Probe]]:
    return _find_plugin_classes(Probe, "auditor.attacks")


def attacks_and_probes_by_name() -> dict[str, type[Attack] | type[Probe]]:
    """All that `--attack` may name. Raises AuditError where an attack and a probe share a name."""
    found, more = attacks_by_name(), probes_by_name()
    for name in sorted(set(found) & set(more)):
        raise AuditError(
            f"an attack and a probe are both called {name!r}: {found[name]} and {more[name]}"
        )
    return {**found, **more}


def attack_or_probe_name_measuring(what: str) -> str:
    """The attack or probe that measures this (`Attack.measures`), the first of several."""
    return next(
        name for name, kind in attacks_and_probes_by_name().items() if kind.measures == what
    )


def defenses_by_name() -> dict[str, type[Defense]]:
    return _find_plugin_classes(Defense, "auditor.defenses")


def trainers_by_name() -> dict[str, type[Trainer]]:
    return _find_plugin_classes(Trainer, "auditor.defenses")


def mitigations_by_name() -> dict[str, type[Trainer]]:
    """The trainings that leave one model in the place of a plain one: what `audit mitigate --by`
    may name."""
    return {
        name: kind
        for name, kind in trainers_by_name().items()
        if issubclass(kind, Defense) and "trained" in kind.needs and not kind.unlearns
    }


def benchmarks_by_name() -> dict[str, type[Benchmark]]:
    return _find_plugin_classes(Benchmark, "auditor.benchmarks")


def providers_by_name() -> dict[str, type[Provider]]:
    return _find_plugin_classes(Provider, "auditor.providers")


def resolve_model_provider(model: str, options: Mapping[str, Any]) -> tuple[Provider, str]:
    """The provider of a model, with its options, and the name that it is asked for. Raises
    AuditError for a bad one.

    A provider without options of its own is handed them as they are (`RequestedModel.loading`).
    """
    known = providers_by_name()
    prefix, name = provider_and_name(model)
    prefix = prefix or next(one.name for one in known.values() if one.unprefixed)
    own = options if prefix in known and plugin_option_defaults(known[prefix]) else {}
    return build_plugin("provider", known, prefix, own), name


def plugins_by_kind() -> dict[str, dict[str, Any]]:
    """All plug-ins by kind (Attack, ...) and name."""
    found = (
        attacks_by_name(),
        probes_by_name(),
        defenses_by_name(),
        trainers_by_name(),
        benchmarks_by_name(),
        providers_by_name(),
    )
    return dict(
        zip(("Attack", "Probe", "Defense", "Trainer", "Benchmark", "Provider"), found, strict=True)
    )


def _find_plugin_classes(kind: Any, package: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in _import_plugin_modules(package):
        for value in vars(module).values():
            # What a module imports belongs elsewhere, and a base has no name.
            mine = (
                inspect.isclass(value)
                and value.__module__ == module.__name__
                and issubclass(value, kind)
            )
            if not mine or not value.name:
                continue
            check_plugin_name(value.name)
            # One class under two names in its module is one plug-in.
            if found.setdefault(value.name, value) is not value:
                raise AuditError(
                    f"two plug-ins are called {value.name!r}: {found[value.name]} and {value}"
                )
    return dict(sorted(found.items()))


def check_plugin_name(name: str) -> None:
    """Files write what was found of a plug-in under target/setting/attack. Raises AuditError where
    they could not."""
    if not name or "/" in name:
        raise AuditError(f"expected the name of a plug-in, without '/', got {name!r}")


def _import_plugin_modules(package: str) -> list[types.ModuleType]:
    ours = importlib.import_module(package)
    names = [
        f"{package}.{info.name}" for info in pkgutil.iter_modules(ours.__path__) if not info.ispkg
    ]
    # Safe mode runs no code of other distributions; `load_plugin_file` refuses files by itself.
    outside = (
        []
        if safe_mode.is_safe_mode()
        else [_load_plugin_entry_point(entry) for entry in _plugin_entry_points()]
    )
    return [importlib.import_module(name) for name in names] + outside + list(_extra.values())


@cache
def _plugin_entry_points() -> importlib.metadata.EntryPoints:
    # Reads the metadata of every installed distribution, hence the cache.
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def _load_plugin_entry_point(entry: importlib.metadata.EntryPoint) -> types.ModuleType:
    try:
        module: types.ModuleType = entry.load()
    except (Exception, SystemExit) as error:
        raise _plugin_load_error(entry.value, error) from error
    return module

"""Describe the Python objects given to `audit()`: models, rows and plug-ins of unregistered
classes.

For readers, a plan names the objects' classes, keyed by role (`model`, `data`, `attack NAME`). No
folder stores the objects themselves.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.plugins import registry
from auditor.plugins.attack import Attack
from auditor.plugins.defense import Defense
from auditor.plugins.probe import Probe

Objects = Mapping[str, Any]  # by role
NO_OBJECTS: Objects = MappingProxyType({})
KINDS: Mapping[str, Any] = {"attack": (Attack, Probe), "defense": (Defense,)}


def name_class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def format_python_objects(classes: Mapping[str, str]) -> str:
    """Return a phrase like `given in Python as objects: model (notebook.Mine)`.

    Args:
        classes: the class names in the plan, keyed by role.
    """
    return (
        "given in Python as objects: "
        f"{', '.join(f'{role} ({kind})' for role, kind in classes.items())}"
    )


def check_python_objects_given(classes: Mapping[str, str], objects: Objects) -> None:
    """Raise AuditError if the plan names an object's class but the object is missing.

    The objects are missing if the plan is read from a folder.

    Args:
        classes: the plan's class names, keyed by role.
    """
    if set(classes) - set(objects):
        raise AuditError(
            f"expected what this run was started with, {format_python_objects(classes)}: no folder "
            "contains it; call audit() with it again, into a new folder"
        )


def list_unregistered_plugins(
    files: Sequence[str], attacks: Sequence[Any], defenses: Sequence[Any]
) -> dict[str, Attack | Defense]:
    """Return the plug-in objects whose classes are not registered, keyed by role.

    Names of plug-ins, and objects of registered classes, are left out. Raise AuditError if a
    registered class has the same name as the object, or if the object's name or options cannot be
    recorded.

    Args:
        files: paths of plug-in files.
        attacks: names or objects of attacks.
        defenses: names or objects of defenses.
    """
    for path in files:
        registry.load_plugin_file(Path(path))
    known: Mapping[str, Mapping[str, Any]] = {
        "attack": registry.list_methods(),
        "defense": registry.list_defenses(),
    }
    unregistered = {}
    for kind, items in {"attack": attacks, "defense": defenses}.items():
        for item in items:
            # `is`: a subclass with the same name would be rebuilt as its base.
            if isinstance(item, str) or type(item) is known[kind].get(item.name):
                continue
            if item.name in known[kind]:
                raise AuditError(
                    f"expected a name for the {kind} {name_class(item)} other than "
                    f"{item.name!r}, which is {known[kind][item.name].__module__}'s"
                )
            _check_recordable(item)
            unregistered[f"{kind} {item.name}"] = item
    return unregistered


def _check_recordable(plugin: Any) -> None:
    """Raise AuditError if the plug-in's options cannot be recorded.

    Also raise AuditError if the plug-in's name is not a valid file name.
    """
    registry.check_plugin_name(plugin.name)
    for option in dataclasses.fields(plugin):
        try:
            json.dumps(to_json(getattr(plugin, option.name)))
        except (TypeError, ValueError):
            raise AuditError(
                f"expected options of {plugin.name} that a record can hold (numbers, text, true or "
                f"false), got {option.name}={getattr(plugin, option.name)!r}"
            ) from None

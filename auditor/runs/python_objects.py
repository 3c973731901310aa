"""What `audit()` was given as objects in Python: models, rows and plug-ins of classes that no name
finds.

A plan names their classes by role (`model`, `data`, `attack NAME`), for whoever reads the record;
no folder holds them.
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


def class_name(given: Any) -> str:
    return f"{type(given).__module__}.{type(given).__qualname__}"


def python_objects_phrase(classes: Mapping[str, str]) -> str:
    """`given in Python as objects: model (notebook.Mine)`; classes: of a plan, by role."""
    return (
        "given in Python as objects: "
        f"{', '.join(f'{role} ({kind})' for role, kind in classes.items())}"
    )


def check_python_objects_given(classes: Mapping[str, str], objects: Objects) -> None:
    """Raises AuditError where objects that the plan was made with are missing: it was read from a
    folder."""
    if set(classes) - set(objects):
        raise AuditError(
            f"expected what this run was started with, {python_objects_phrase(classes)}: no folder "
            "holds it; call audit() with it again, into a new folder"
        )


def unregistered_plugin_objects(
    files: Sequence[str], attacks: Sequence[Any], defenses: Sequence[Any]
) -> dict[str, Attack | Defense]:
    """By role, the given plug-ins of classes that are not registered; names and those of registered
    ones are left out.

    Raises AuditError for one with the name of a registered class, and for a name or options that a
    record cannot hold.
    """
    for path in files:
        registry.load_plugin_file(Path(path))
    known: Mapping[str, Mapping[str, Any]] = {
        "attack": registry.list_methods(),
        "defense": registry.list_defenses(),
    }
    found = {}
    for kind, given in {"attack": attacks, "defense": defenses}.items():
        for one in given:
            # `is`: a subclass that keeps the name would be built anew as its base.
            if isinstance(one, str) or type(one) is known[kind].get(one.name):
                continue
            if one.name in known[kind]:
                raise AuditError(
                    f"expected another name of the {kind} {class_name(one)} than {one.name!r}, "
                    f"which is {known[kind][one.name].__module__}'s"
                )
            _check_plugin_object_is_recordable(one)
            found[f"{kind} {one.name}"] = one
    return found


def _check_plugin_object_is_recordable(one: Any) -> None:
    """Raises AuditError where a record cannot hold the options of a plug-in, or no file can be
    called by its name."""
    registry.check_plugin_name(one.name)
    for option in dataclasses.fields(one):
        try:
            json.dumps(to_json(getattr(one, option.name)))
        except (TypeError, ValueError):
            raise AuditError(
                f"expected options of {one.name} that a record can hold (numbers, text, true or "
                f"false), got {option.name}={getattr(one, option.name)!r}"
            ) from None

"""Cache descriptions of the built-in plug-ins, so that only the first `audit list` imports torch.

The cache holds each plug-in's name, options and docstring. Classes made from the cache have no
methods.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, make_dataclass
from pathlib import Path
from typing import Any, Literal

from auditor.core import disk
from auditor.core.disk import find_cache_folder
from auditor.core.errors import AuditError
from auditor.plugins.options import ENTRY_POINTS, get_option_defaults, list_allowed_values

_PACKAGES = ("auditor", "auditor.attacks", "auditor.benchmarks", "auditor.defenses")
# the attributes that are cached besides docstring and options
_ATTRIBUTES = ("name", "title", "needs", "claims", "form", "page")

PluginClasses = dict[str, dict[str, Any]]  # kind (Attack, ...) -> name -> class


def load_plugin_classes(before: Callable[[], None]) -> PluginClasses:
    """Return all plug-ins except those of `--plugin`, like `registry.list_plugin_classes`.

    The plug-ins come from the cache if no built-in file has changed. Otherwise they are imported;
    `before` is called before that.
    """
    if importlib.metadata.entry_points(group=ENTRY_POINTS):
        return _import_all_plugins(before)
    fingerprint = _plugin_source_files_fingerprint()
    # A cache that cannot be read is created again.
    with suppress(AuditError, OSError, ValueError, KeyError, TypeError, AttributeError):
        record = json.loads((find_cache_folder() / "plugins.json").read_text(encoding="utf-8"))
        if record["files"] == fingerprint:
            return {
                kind: {entry["name"]: _rebuild_plugin_class(**entry) for entry in entries}
                for kind, entries in record["found"].items()
            }
    classes_by_kind = _import_all_plugins(before)
    records = {}
    for kind, classes in classes_by_kind.items():
        records[kind] = list(map(_build_plugin_class_record, classes.values()))
    with suppress(AuditError):  # there is no cache folder
        disk.replace_atomically(
            find_cache_folder() / "plugins.json",
            json.dumps({"files": fingerprint, "found": records}),
        )
    return classes_by_kind


def _import_all_plugins(before: Callable[[], None]) -> PluginClasses:
    before()
    from auditor.plugins import registry  # imports torch, which takes seconds

    return registry.list_plugin_classes()


def _plugin_source_files_fingerprint() -> str:
    """Return a digest that changes whenever the file of any built-in plug-in changes."""
    folders = set()
    for package in _PACKAGES:
        for place in importlib.import_module(package).__path__:
            folders.add(Path(place))
    states = []
    for folder in folders:
        for path in folder.rglob("*.py"):
            stat = path.stat()
            states.append((str(path), stat.st_size, stat.st_mtime_ns))
    states.sort()
    return hashlib.sha256(repr(states).encode()).hexdigest()


def _build_plugin_class_record(cls: Any) -> dict[str, Any]:
    attributes = {name: getattr(cls, name) for name in _ATTRIBUTES if hasattr(cls, name)}
    if hasattr(cls, "__dataclass_fields__"):
        options = get_option_defaults(cls)
    else:
        options = {}
    values = list_allowed_values(cls) if options else {}
    options_with_values = {}
    for name, default in options.items():
        options_with_values[name] = (None if default is MISSING else default, values.get(name))
    return {
        **attributes,
        "module": cls.__module__,
        "called": cls.__name__,
        "doc": inspect.getdoc(cls),
        "options": options_with_values,
    }


def _rebuild_plugin_class(
    module: str, called: str, doc: str, options: dict[str, Any], **attributes: Any
) -> type:
    fields = []
    for name, (default, values) in options.items():
        fields.append((name, Literal[tuple(values)] if values else Any, default))
    cls = make_dataclass(called, fields, namespace={"__doc__": doc, **attributes}, frozen=True)
    # From Python 3.12 on make_dataclass overwrites the namespace's value.
    cls.__module__ = module
    return cls

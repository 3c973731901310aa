"""What our own plug-ins say of themselves, kept between commands: `audit list` imports torch once,
not every time.

Of each plug-in a class is kept that has its name, options, docstring and the like, and no methods.
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
from auditor.core.disk import cache_folder
from auditor.core.errors import AuditError
from auditor.plugins.options import ENTRY_POINTS, allowed_option_values, plugin_option_defaults

_PACKAGES = ("auditor", "auditor.attacks", "auditor.benchmarks", "auditor.defenses")
# what is kept of a class beside its docstring and its options
_SAID = ("name", "title", "needs", "claims", "form", "page")

Found = dict[str, dict[str, Any]]  # kind (Attack, ...) -> name -> class


def cached_plugin_classes(before: Callable[[], None]) -> Found:
    """All plug-ins but those of `--plugin`, as `registry.plugins_by_kind` finds them; none of ours
    is run again.

    before: called first where plug-ins have to be imported.
    """
    if importlib.metadata.entry_points(group=ENTRY_POINTS):
        return _import_all_plugins(before)
    now = _plugin_source_files_fingerprint()
    with suppress(
        AuditError, OSError, ValueError, KeyError, TypeError, AttributeError
    ):  # made anew
        held = json.loads((cache_folder() / "plugins.json").read_text(encoding="utf-8"))
        if held["files"] == now:
            return {
                kind: {one["name"]: _rebuild_plugin_class(**one) for one in told}
                for kind, told in held["found"].items()
            }
    found = _import_all_plugins(before)
    told = {
        kind: [_plugin_class_record(cls) for cls in classes.values()]
        for kind, classes in found.items()
    }
    with suppress(AuditError):  # nowhere to keep it
        disk.replace_atomically(
            cache_folder() / "plugins.json", json.dumps({"files": now, "found": told})
        )
    return found


def _import_all_plugins(before: Callable[[], None]) -> Found:
    before()
    from auditor.plugins import registry  # imports torch, which takes seconds

    return registry.plugins_by_kind()


def _plugin_source_files_fingerprint() -> str:
    """Changes where any file of ours does."""
    folders = {
        Path(place) for package in _PACKAGES for place in importlib.import_module(package).__path__
    }
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    seen = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _plugin_class_record(cls: Any) -> dict[str, Any]:
    said = {name: getattr(cls, name) for name in _SAID if hasattr(cls, name)}
    options = plugin_option_defaults(cls) if hasattr(cls, "__dataclass_fields__") else {}
    values = allowed_option_values(cls) if options else {}
    known = {
        n: (None if default is MISSING else default, values.get(n))
        for n, default in options.items()
    }
    return {
        **said,
        "module": cls.__module__,
        "called": cls.__name__,
        "doc": inspect.getdoc(cls),
        "options": known,
    }


def _rebuild_plugin_class(
    module: str, called: str, doc: str, options: dict[str, Any], **said: Any
) -> type:
    fields = [
        (name, Literal[tuple(values)] if values else Any, default)
        for name, (default, values) in options.items()
    ]
    made = make_dataclass(called, fields, namespace={"__doc__": doc, **said}, frozen=True)
    # from Python 3.12 on make_dataclass overwrites what the namespace says
    made.__module__ = module
    return made

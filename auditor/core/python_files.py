"""Load a user's Python file as a module."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

from auditor.core.errors import AuditError


def load_python_file(path: Path, name: str, expected: str) -> types.ModuleType:
    """Run a Python file and return its module, which is registered as `name` if it succeeds.

    `expected` describes the file in the AuditError raised if the file is missing.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise AuditError(f"expected {expected}, got {str(path)!r}, which {what}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AuditError(f"expected {expected}, got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    is_registered = name != "__main__"  # which would replace this program's module
    if is_registered:
        # `dataclass` and `get_type_hints` look up annotations that are strings here.
        sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if is_registered:
            del sys.modules[name]
        raise
    return module


def add_script_folder(path: Path) -> None:
    """Add a script's folder to Python's import path, as Python does when it runs the script."""
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)

"""Measure what a language model leaks of its training data, and how much a defense reduces it.

From Python: `from auditor import audit, load_run, crash_test` (`auditor/api.py`), which is loaded
only when needed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auditor.api import FinishedRun, audit, load_run
    from auditor.crash.trial import crash_test

__version__ = "0.1.0"
__all__ = ["FinishedRun", "audit", "crash_test", "load_run"]
# These packages are next to this folder in a checkout, and inside it when installed.
_BESIDE = (
    "attacks",
    "benchmarks",
    "defenses",
    "reports",
)


def explain_mixed_checkout() -> str:
    """Return a sentence if parts of `auditor` come from different checkouts, otherwise "".

    This happens with an editable install of one checkout if the program is started in the folder of
    a second checkout. Some parts are then imported from the current folder, the others from the
    installed checkout. Tests could pass without running the code of their own checkout.
    """
    folder = Path(__file__).resolve().parent
    for name in _BESIDE:
        spec = find_spec(f"auditor.{name}")
        if spec is None or spec.origin is None:
            return (
                f"expected auditor.{name}, which is not installed: run `pip install -c "
                "constraints.txt -e '.[dev]'`"
            )
        if (there := Path(spec.origin).resolve().parent) not in (
            folder / name,
            folder.parent / name,
        ):
            return (
                f"expected all parts of auditor from one checkout, got auditor from {folder} and "
                f"auditor.{name} from {there}: run `pip install -c constraints.txt -e '.[dev]'` in "
                "the right checkout"
            )
    return ""


def main() -> None:
    """Run the console script `audit`."""
    if reason := explain_mixed_checkout():
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(2)
    from auditor import cli

    cli.main()


def __getattr__(name: str) -> Any:
    if name in __all__:
        if reason := explain_mixed_checkout():
            raise ImportError(reason)
        return getattr(
            import_module("auditor.crash.trial" if name == "crash_test" else "auditor.api"), name
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""`audit`: measures what a language model leaks of its training data, and what a defense changes about it.

From Python: `from auditor import audit, load_run` (`auditor/api.py`), which is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auditor.api import FinishedRun, audit, load_run

__version__ = "0.1.0"
__all__ = ["FinishedRun", "audit", "load_run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from auditor import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

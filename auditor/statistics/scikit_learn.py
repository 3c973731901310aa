"""Import scikit-learn without pandas."""

from __future__ import annotations

import sys


def import_scikit_learn() -> None:
    """Import scikit-learn, but not pandas, which takes a third of the time.

    scikit-learn imports pandas if it is installed, and needs it only for data frames. `None` in
    `sys.modules` makes an import fail as if pandas were not installed. Later imports succeed.
    """
    if {"pandas", "sklearn"} & sys.modules.keys():
        return
    sys.modules["pandas"] = None  # type: ignore[assignment]
    try:
        import sklearn.linear_model  # noqa: F401
    finally:
        del sys.modules["pandas"]

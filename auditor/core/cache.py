"""Where what takes minutes to make is kept between runs. Knows a folder; not what is in it."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

from auditor.core.errors import AuditError


def cache_folder() -> Path:
    """AUDIT_CACHE, or where the platform keeps caches (XDG_CACHE_HOME, ~/.cache); readable by its owner only.

    It holds training text.
    """
    folder = Path(os.environ.get("AUDIT_CACHE") or user_cache_path("audit", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise AuditError(
            f"cannot create the cache folder {str(folder)!r}: {error.strerror}; set AUDIT_CACHE"
        ) from error
    return folder

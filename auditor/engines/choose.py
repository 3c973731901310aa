"""Create the engine (this process or a cluster) that the options name. Import Ray only if
needed.
"""

from __future__ import annotations

from auditor.core import threads
from auditor.core.plan_parts import EngineOptions
from auditor.engines.engine import Engine, LocalEngine


def make_engine(options: EngineOptions) -> Engine:
    """Return the engine that the options name. Raise AuditError if it cannot start."""
    if options.engine == "local":
        return LocalEngine()
    from auditor.engines.ray_engine import RayEngine  # an extra

    return RayEngine(
        options.workers or threads.count_usable_processors(),
        options.ray_address or "",
        options.gpus_per_worker,
    )

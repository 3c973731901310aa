"""Makes the engine that the options name. Ray is imported only where it is the one."""

from __future__ import annotations

from auditor.core import threads
from auditor.core.plan_parts import EngineOptions
from auditor.engines.engine import Engine, LocalEngine


def make_engine(asked: EngineOptions) -> Engine:
    """The engine that the options name. Raises AuditError where it cannot be started."""
    if asked.engine == "local":
        return LocalEngine()
    from auditor.engines.ray_engine import RayEngine  # an extra

    return RayEngine(
        asked.workers or threads.usable_processor_count(),
        asked.ray_address or "",
        asked.gpus_per_worker,
    )

"""The engine that was asked for, by its name. Ray is loaded only where it is it."""

from __future__ import annotations

from auditor.core import threads
from auditor.core.plan_parts import EngineOptions
from auditor.engines.engine import Engine, LocalEngine


def make_engine(asked: EngineOptions) -> Engine:
    """Raises AuditError where it cannot be had."""
    if asked.engine == "local":
        return LocalEngine()
    from auditor.engines.ray_engine import RayEngine  # an extra

    return RayEngine(asked.workers or threads.usable_processor_count(), asked.ray_address or "", asked.gpus_per_worker)

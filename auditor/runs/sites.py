"""Where a plan takes place, of the places that a plan can name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from auditor.core.plan import Plan
from auditor.models.base import LanguageModel
from auditor.runs.lab_site import LabSite
from auditor.runs.own_site import OwnSite
from auditor.runs.reporter import Reporter, SilentReporter
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache


def make_site(
    plan: Plan,
    reporter: Reporter | None = None,
    shared: SweepCache | None = None,
    live: Mapping[str, LanguageModel] = MappingProxyType({}),
) -> Site:
    """live: models in memory, by role. Raises AuditError for a lab that cannot be."""
    target, data, attacks = plan.target, plan.data, plan.attacks
    common = (
        plan.seed,
        plan.model_and_secrets_fields,
        reporter or SilentReporter(),
        shared or SweepCache(),
    )
    if target.uses_builtin_lab:
        return LabSite(target, data, attacks, *common)
    return OwnSite(target, plan.loading, data, attacks.sizes, *common, live)

"""Where a plan takes place, of the places that a plan can name."""

from __future__ import annotations

from auditor.core.plan import Plan
from auditor.runs.lab_site import LabSite
from auditor.runs.own_site import OwnSite
from auditor.runs.reporter import Reporter, Silence
from auditor.runs.shared import Shared
from auditor.runs.site import Site


def site_of(plan: Plan, reporter: Reporter | None = None, shared: Shared | None = None) -> Site:
    """Raises AuditError for a lab that cannot be."""
    kind = LabSite if plan.target.lab else OwnSite
    return kind(plan, reporter or Silence(), shared or Shared())

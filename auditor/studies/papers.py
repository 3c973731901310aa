"""Read paper plans: a folder for each paper, with `paper.toml` and a TOML file for each table.

`paper.toml` has the order of the paper's plans and their common fields. A plan file has the fields
of a plan, a grid (see `runs.plan`) and claims (see `ledger`). A plan with a `[utility]` table
measures the perplexity of a masked model for each swept option of its defenses. A plan with a
`[published]` table checks a published promise at the plan's distributions (see
`published_promises`).

In both kinds of file, a `[scale.NAME]` table overrides other values at the scale NAME. In
`paper.toml`, the key `plans` of this table lists the plans of the scale (default: all). This module
does not run plans.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.plan import IN_FILE
from auditor.runs.plan import GRID, merge_raw_plans, read_plan_file

_PAPER = "paper.toml"
_PLANS = "plans"
UTILITY = "utility"
PUBLISHED = "published"
_PARTS = (*IN_FILE, *GRID, UTILITY, PUBLISHED)  # the parts of a plan at a scale


@dataclass(frozen=True)
class Paper:
    """A paper's plans.

    Args:
        name: name of the paper.
        title: title of the paper.
        shared: fields that all plans have in common.
        plans: each plan's own fields, in the paper's order.
    """

    name: str
    title: str
    shared: dict[str, Any]
    plans: dict[str, dict[str, Any]]

    @property
    def scales(self) -> tuple[str, ...]:
        return tuple(self.shared.get("scale", {}))

    def plans_at_scale(self, scale: str) -> list[str]:
        """Return the names of the plans at this scale, in the paper's order.

        Raise AuditError for an unknown scale.
        """
        refuse_unknown_names(f"scale of {self.name}:", [scale], self.scales)
        return list(self.shared["scale"][scale].get(_PLANS, self.plans))

    def raw_plan_at_scale(self, plan: str, scale: str) -> dict[str, Any]:
        """Return the raw values of a plan at a scale, without claims and titles.

        Raise AuditError for an unknown plan or scale.
        """
        refuse_unknown_names(f"plan of {self.name}:", [plan], self.plans)
        if plan not in self.plans_at_scale(scale):
            raise AuditError(
                f"{self.name}/{plan} is not run at scale {scale}: "
                f"{', '.join(self.plans_at_scale(scale))}"
            )
        raw: dict[str, Any] = {}
        # Later parts override earlier parts: the paper, the paper at this scale, the plan, the plan
        # at this scale.
        for part in (self.shared, self.plans[plan]):
            plan_fields = {}
            for name, value in part.items():
                if name in _PARTS:
                    plan_fields[name] = value
            for over in (plan_fields, part.get("scale", {}).get(scale, {})):
                raw = merge_raw_plans(raw, over)
        # The list of plans of a scale is not a field of a plan.
        raw.pop(_PLANS, None)
        return raw


def find_bundled_paper_folders() -> dict[str, Path]:
    """Return the folders of the papers that come with this program, keyed by name."""
    # As a path: an installed wheel is unpacked, and its TOML files are files.
    folder = Path(str(importlib.resources.files("auditor.benchmarks"))) / "plans"
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{_PAPER}"))}


def load_paper(name: str) -> Paper:
    """Load a paper by its name, or from a user's folder of plans.

    Raise AuditError for an unknown name; the message suggests the nearest known name.
    """
    folder = Path(name)
    if not (folder / _PAPER).is_file():
        bundled = find_bundled_paper_folders()
        refuse_unknown_names("paper", [name], bundled)
        folder = bundled[name]
    shared = _read_paper_toml(folder / _PAPER, ("title", _PLANS, "scale"))
    files = {}
    for path in folder.glob("*.toml"):
        if path.name != _PAPER:
            files[path.stem] = path
    listed = shared.get(_PLANS, sorted(files))
    # Sorted lists, not sets: a plan listed twice is refused as well.
    if sorted(listed) != sorted(files):
        raise AuditError(
            f"{folder / _PAPER}: expected plans to list {sorted(files)}, got {sorted(listed)}"
        )
    for scale in shared.get("scale", {}).values():
        refuse_unknown_names(f"plan in {folder / _PAPER}:", scale.get(_PLANS, ()), files)
    fields = ("title", "claim", "scale", UTILITY, PUBLISHED, *GRID)
    plans = {}
    for plan in listed:
        plans[plan] = _read_paper_toml(files[plan], fields)
    # Resolved: for "." or a link, the name of the folder itself, which names the output.
    return Paper(folder.resolve().name, shared.get("title", name), shared, plans)


def _read_paper_toml(path: Path, extra: tuple[str, ...]) -> dict[str, Any]:
    values = read_plan_file(path, extra)
    for name, scale in values.get("scale", {}).items():
        refuse_unknown_names(f"field in {path}, scale.{name}:", scale, (*_PARTS, _PLANS))
    return values

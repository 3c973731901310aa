"""Paper plans: a folder a paper, with `paper.toml` and one TOML file a table or figure. Knows
files; not how to run.

`paper.toml` holds what all its plans share and the order in which they are shown. A plan file holds
the fields of a plan, a grid (see `plan_grid`) and claims (see `ledger`). A plan with a `[utility]`
table measures the perplexity of a masked model and sweeps options of defenses; one with a
`[published]` table is somebody's promise, held to distributions that the plan gives (see
`published_promises`). `[scale.NAME]` tables in both kinds of file are laid over the rest at that
scale; `plans` in such a table of `paper.toml` lists the plans of the scale, by default all.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError, unknown_name_error
from auditor.core.plan import IN_FILE
from auditor.runs.plan import read_plan_file
from auditor.runs.plan_grid import GRID, merge_raw_plans

_PAPER, _PLANS = "paper.toml", "plans"
UTILITY, PUBLISHED = "utility", "published"
_PARTS = (*IN_FILE, *GRID, UTILITY, PUBLISHED)  # what a plan at a scale is made of


@dataclass(frozen=True)
class Paper:
    """A paper's plans: what they share, and each one's own part, in the paper's order."""

    name: str
    title: str
    shared: dict[str, Any]
    plans: dict[str, dict[str, Any]]

    @property
    def scales(self) -> tuple[str, ...]:
        return tuple(self.shared.get("scale", {}))

    def plans_at_scale(self, scale: str) -> list[str]:
        """The plans that can be run at this scale, in the paper's order. Raises AuditError for a
        name nobody has."""
        if scale not in self.scales:
            raise unknown_name_error(f"scale of {self.name}:", scale, self.scales)
        return list(self.shared["scale"][scale].get(_PLANS, self.plans))

    def raw_plan_at_scale(self, plan: str, scale: str) -> dict[str, Any]:
        """The raw grid of one plan at one scale, claims and titles aside. Raises AuditError for
        names nobody has."""
        if plan not in self.plans:
            raise unknown_name_error(f"plan of {self.name}:", plan, self.plans)
        if plan not in self.plans_at_scale(scale):
            raise AuditError(
                f"{self.name}/{plan} is not run at scale {scale}: "
                f"{', '.join(self.plans_at_scale(scale))}"
            )
        raw: dict[str, Any] = {}
        # The later lies over the earlier: the paper, the paper at this scale, the plan, the plan at
        # this scale.
        for part in (self.shared, self.plans[plan]):
            own = {name: value for name, value in part.items() if name in _PARTS}
            raw = merge_raw_plans(raw, merge_raw_plans(own, part.get("scale", {}).get(scale, {})))
        # Of a scale, which plans it has: no field of a plan.
        raw.pop(_PLANS, None)
        return raw


def bundled_paper_folders() -> dict[str, Path]:
    """The papers that come with this program, by name."""
    # as a path: an installed wheel is unpacked, and its TOML files are files
    folder = Path(str(importlib.resources.files("auditor.benchmarks"))) / "plans"
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{_PAPER}"))}


def load_paper(name: str) -> Paper:
    """A paper by name, or from a folder of one's own. Raises AuditError with the nearest name for
    an unknown one."""
    folder = Path(name) if (Path(name) / _PAPER).is_file() else bundled_paper_folders().get(name)
    if folder is None:
        raise unknown_name_error("paper", name, bundled_paper_folders())
    shared = _read_paper_toml(folder / _PAPER, ("title", _PLANS, "scale"))
    files = {path.stem: path for path in folder.glob("*.toml") if path.name != _PAPER}
    listed = shared.get(_PLANS, sorted(files))
    # sorted lists, no sets: a plan that is listed twice is refused as well
    if sorted(listed) != sorted(files):
        raise AuditError(
            f"{folder / _PAPER}: expected plans to list {sorted(files)}, got {sorted(listed)}"
        )
    for scale in shared.get("scale", {}).values():
        for plan in scale.get(_PLANS, ()):
            if plan not in files:
                raise unknown_name_error(f"plan in {folder / _PAPER}:", plan, files)
    fields = ("title", "claim", "scale", UTILITY, PUBLISHED, *GRID)
    plans = {plan: _read_paper_toml(files[plan], fields) for plan in listed}
    # resolved: of "." or a link, the folder's own name, which names the output
    return Paper(folder.resolve().name, shared.get("title", name), shared, plans)


def _read_paper_toml(path: Path, extra: tuple[str, ...]) -> dict[str, Any]:
    values = read_plan_file(path, extra)
    for name, scale in values.get("scale", {}).items():
        for key in scale:
            if key not in (*_PARTS, _PLANS):
                raise unknown_name_error(f"field in {path}, scale.{name}:", key, (*_PARTS, _PLANS))
    return values

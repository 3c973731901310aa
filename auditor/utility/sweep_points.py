"""The points of a sweep: the model as it is, then each defense at each value of the options that are swept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from auditor.core.errors import AuditError, unknown_name_error
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan_parts import DefensePlan, TargetPlan
from auditor.plugins import registry
from auditor.plugins.defense import Defense
from auditor.plugins.options import build_plugin, plugin_option_defaults
from auditor.runs.own_defenses import check_defense_inputs_given
from auditor.runs.plan import merged_plugin_options, refuse_unused_options


@dataclass(frozen=True)
class DefensePoint:
    """A defense at one point of the sweep; without one, the model as it is."""

    defense: Defense | None = None
    at: Mapping[str, Any] = field(default_factory=dict)  # swept option -> value

    @property
    def defense_or_undefended_name(self) -> str:
        return self.defense.name if self.defense else UNDEFENDED


def build_utility_sweep_points(
    target: TargetPlan,
    defenses: DefensePlan,
    defaults: Mapping[str, Mapping[str, Any]],
    sweep: Mapping[str, Sequence[Any]],
) -> list[DefensePoint]:
    """The model as it is, then each defense at each of its points. defaults: options of defenses that the lab has.

    Raises AuditError for options nobody has.
    """
    known = registry.defenses_by_name()
    for name in defenses.defense:
        if name not in known:
            raise unknown_name_error("defense", name, known)
    fields = {name: list(plugin_option_defaults(known[name])) for name in dict.fromkeys(defenses.defense)}
    refuse_unused_options("-D", defenses.defense_options, fields)
    swept = _utility_swept_options_by_defense(sweep, fields)
    made = [DefensePoint()]
    for name, own in swept.items():
        options = merged_plugin_options(name, defenses.defense_options, defaults.get(name, {}), fields[name])
        # Of nothing swept, product() is one empty tuple: the defense as it is.
        for values in product(*own.values()):
            at = dict(zip(own, values, strict=True))
            made.append(DefensePoint(build_plugin("defense", known, name, {**options, **at}), at))
    for point in made:
        if point.defense and not target.uses_builtin_lab:
            check_defense_inputs_given(point.defense, target.public)
            if "corpus" in point.defense.needs:
                raise AuditError(
                    f"--defense {point.defense.name} looks at what the model was trained on, which --data here need "
                    "not be: audit run shows its perplexity"
                )
    return made


def _utility_swept_options_by_defense(
    sweep: Mapping[str, Sequence[Any]], fields: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Sequence[Any]]]:
    """By defense, the options that its points differ in. `option` is that of every defense that has it."""
    swept: dict[str, dict[str, Sequence[Any]]] = {name: {} for name in fields}
    for key, values in sweep.items():
        name, dot, option = key.rpartition(".")
        if not fields:
            raise AuditError(f"expected a --defense whose {option} is swept, got none")
        if dot and name not in fields:
            raise unknown_name_error(f"defense in the sweep of {key!r}:", name, fields)
        having = [one for one in ([name] if dot else fields) if option in fields[one]]
        if not having:
            raise unknown_name_error("option in the sweep:", option, {own for one in fields for own in fields[one]})
        # By repr: values may be lists, which have no hash, and 1 and true are two values.
        if len(set(map(repr, values))) < len(values) or not values:
            raise AuditError(f"expected values that differ for {key!r} in the sweep, got {list(values)}")
        for one in having:
            swept[one][option] = values
    return swept

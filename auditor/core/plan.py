"""What a run is asked to do: its configuration, written once, in parts by what they are about.

Beside each field stands all that is said of it. Its flag and help (`commands/options.py`), what a
plan file and `audit()` take (`runs/plan.py`) and the page of all fields (`docs/reference/plan.md`)
follow from that. A field has one name wherever it is given: `--known-limit 5`, `known_limit = 5` in
a plan file, `known_limit=5` in Python. Each part of the program is handed the part of the plan that
it needs. Knows no files, models or terminals.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.core.plan_fields import OWN, RECORDS, SUBJECT, FieldRule, PlanField, plan_field
from auditor.core.plan_parts import (
    SMALL,
    AttackPlan,
    ComputePlan,
    DataPlan,
    DefensePlan,
    LoadingOptions,
    OutputPlan,
    TargetPlan,
    split_model_name,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One `audit run`. Written to the run folder, from which it can be resumed: flat there, as in a
    plan file.

    seed: Seed of all random numbers. [default: 0]
    plugin: Python file with attacks, defenses or training methods of your own; repeatable.
    """

    panel: ClassVar[str] = "advanced"
    target: TargetPlan = field(default_factory=TargetPlan)
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    data: DataPlan = field(default_factory=DataPlan)
    attacks: AttackPlan = field(default_factory=AttackPlan)
    defenses: DefensePlan = field(default_factory=DefensePlan)
    compute: ComputePlan = field(default_factory=ComputePlan)
    output: OutputPlan = field(default_factory=OutputPlan)
    seed: int = plan_field(0, SUBJECT, panel="compute")
    plugin: tuple[str, ...] = plan_field((), metavar="FILE.py", risk="its code would run")
    objects: dict[str, str] = plan_field(dict, flags=None)  # role -> class, where Python gave them

    def __post_init__(self) -> None:
        for part in (self.loading, self.data, self.attacks, self.defenses):
            part.check()
        self._check_fields_apply()
        self._check_unlearning()
        self._check_until_conflicts()
        for name, value in self.values_by_field_name().items():
            least = FIELDS[name].said.least
            if least is not None and value is not None and value < least:
                raise AuditError(f"expected {flag_of_plan_field(name)} >= {least}, got {value}")
        self.compute.check(self.loading.device)
        if not 0 <= self.seed < 2**63:
            raise AuditError(f"expected --seed from 0 to 2^63 - 1, got {self.seed}")

    def _check_fields_apply(self) -> None:
        """Refuses fields that say nothing to this kind of model or data. Raises AuditError."""
        target = self.target
        if target.uses_builtin_lab != (self.data.data is None) and not self.is_canary_only:
            given, missing = (
                ("--model", "--data") if self.data.data is None else ("--data", "--model")
            )
            raise AuditError(
                f"expected --model and --data together, got {given} without {missing} (neither: "
                "the lab)"
            )
        if target.uses_builtin_lab:
            for name in self.non_default_field_names(OWN):
                raise AuditError(
                    f"{flag_of_plan_field(name)} goes with --model and --data; the built-in lab "
                    "has its own"
                )
        elif target.lab_recipe or target.mitigation:
            name = "lab_recipe" if target.lab_recipe else "mitigation"
            raise AuditError(f"{name} changes the built-in lab, which --model and --data replace")
        elif target.lab != SMALL:
            raise AuditError(
                f"--lab {target.lab} names a built-in lab, which --model and --data replace"
            )
        if self.is_canary_only:
            for name in self.non_default_field_names(RECORDS):
                raise AuditError(
                    f"{flag_of_plan_field(name)} goes with --data, got --canaries alone"
                )

    def _check_unlearning(self) -> None:
        """Refuses fields that need an unlearned model where there is none, and a relearning that
        cannot be done.

        Whether the defenses go with it is checked when they are chosen.
        """
        for name in ("before", "retrained"):
            if getattr(self.target, name) is not None and self.data.forget is None:
                raise AuditError(
                    f"expected --forget FILE with --{name}: the records that were to be forgotten; "
                    "got none"
                )
        if self.defenses.relearn is None:
            return
        if not self.target.uses_builtin_lab and self.data.forget is None:
            raise AuditError(
                "--relearn needs an unlearned model: expected --before and --forget, got neither"
            )
        if self.compute.engine == "ray":
            raise AuditError(
                "--relearn trains models that every worker would train anew: it goes with --engine "
                "local"
            )
        for name in ("quantise", "device_map"):
            if getattr(self.loading, name) is not None:
                raise AuditError(
                    f"--relearn trains all weights, which {flag_of_plan_field(name)} does not let "
                    "it"
                )
        if self.loading.dtype == "float16":
            raise AuditError(
                "--relearn goes with --dtype float32 or bfloat16: training steps in float16 round "
                "to zero"
            )

    def _check_until_conflicts(self) -> None:
        """Refuses what needs all secrets beside --until, which may stop before. Raises
        AuditError."""
        if self.attacks.until is not None:
            for name in ("submission", "forget", "relearn"):
                if self.values_by_field_name()[name] is not None:
                    raise AuditError(
                        f"{flag_of_plan_field(name)} needs all secrets, and --until may stop "
                        "before: give one of the two"
                    )

    @property
    def run_folder_title(self) -> str:
        """The part of the run folder's name that stands behind the time."""
        own = "lab" if self.target.lab == SMALL else self.target.lab
        named = own if self.target.model is None else split_model_name(self.target.model)[1]
        what = named.replace("\\", "/").rstrip("/").rpartition("/")[2]
        return "-".join([what, *self.attacks.attack, *self.defenses.defense])[:80]

    @property
    def is_canary_only(self) -> bool:
        """A model that is looked at for canaries only: there are no records to attack."""
        return (
            not self.target.uses_builtin_lab
            and self.data.data is None
            and self.data.canaries is not None
        )

    @property
    def model_and_secrets_fields(self) -> dict[str, Any]:
        """All that decides which model is attacked for which secrets: plans that agree in it share
        both."""
        values = self.to_json()
        return {name: values[name] for name in plan_field_names_with_rule(SUBJECT)}

    # --- fields by name, whichever part they stand in ---

    @classmethod
    def from_fields(cls, **values: Any) -> Plan:
        """The plan with these fields, and the defaults of all others."""
        return cls().with_fields(**values)

    def with_fields(self, **values: Any) -> Plan:
        """This plan with these values for these fields, whichever part they stand in."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            parts.setdefault(FIELDS[name].part, {})[name] = value
        own = parts.pop("", {})
        changed = {
            part: dataclasses.replace(getattr(self, part), **some) for part, some in parts.items()
        }
        # by __post_init__ the whole plan is checked anew
        return dataclasses.replace(self, **changed, **own)

    def values_by_field_name(self) -> dict[str, Any]:
        return {
            name: getattr(getattr(self, one.part) if one.part else self, name)
            for name, one in FIELDS.items()
        }

    def non_default_field_names(self, rules: FieldRule) -> list[str]:
        """The fields of these rules that do not hold their default."""
        values = self.values_by_field_name()
        return [
            name
            for name in plan_field_names_with_rule(rules)
            if values[name] != FIELDS[name].default
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, as `plan.json` holds them."""
        found: dict[str, Any] = to_json(self.values_by_field_name())
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str = "plan") -> Plan:
        """The inverse; what is missing holds its default. Raises AuditError for what is no field or
        does not fit."""
        if unknown := [name for name in values if name not in FIELDS]:
            raise AuditError(f"{where}: unknown field {unknown[0]!r}")
        read = {
            name: from_json(FIELDS[name].kind, value, f"{where}.{name}")
            for name, value in values.items()
        }
        return cls.from_fields(**read)


@dataclass(frozen=True)
class DescribedField:
    """A field as the plan has it. part: "" for one of the plan's own; panel: of --help; help: with
    its default."""

    part: str
    kind: Any
    said: PlanField
    default: Any
    panel: str
    help: str


# a field in the docstring of its part
_HELP = re.compile(r"^(\w+): (.+(?:\n    .+)*)", re.MULTILINE)


def _described_plan_fields(kind: Any, part: str = "") -> Iterator[tuple[str, DescribedField]]:
    hints = typing.get_type_hints(kind)  # the annotations themselves are strings (from __future__)
    # of base classes too: some of ComputePlan's fields stand in EngineOptions
    # cleandoc: Python 3.13 takes the indentation itself
    docstrings = (inspect.cleandoc(one.__doc__ or "") for one in kind.__mro__)
    helps = {
        name: " ".join(text.split())
        for docstring in docstrings
        for name, text in _HELP.findall(docstring)
    }
    for one in dataclasses.fields(kind):
        hint = hints[one.name]
        if dataclasses.is_dataclass(hint):
            yield from _described_plan_fields(hint, one.name)
            continue
        default = (
            one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        )
        said = one.metadata[PlanField]
        help = helps.get(one.name, "")
        if "[default:" not in help and default not in (None, False, (), {}):
            help += f" [default: {f'--{one.name}' if default is True else default}]"
        yield one.name, DescribedField(part, hint, said, default, said.panel or kind.panel, help)


FIELDS: Mapping[str, DescribedField] = dict(_described_plan_fields(Plan))
# what a plan file may hold
IN_FILE = tuple(name for name in FIELDS if name not in ("command", "objects"))


def plan_field_names_with_rule(rules: FieldRule) -> tuple[str, ...]:
    """The fields that take part in any of these, in their order."""
    return tuple(name for name, one in FIELDS.items() if one.said.rules and one.said.rules & rules)


def flag_of_plan_field(name: str) -> str:
    """How a field is written on the command line."""
    own = FIELDS[name].said.flags
    return own[0].partition("/")[0] if own else f"--{name.replace('_', '-')}"

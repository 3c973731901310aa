"""Define the configuration of a run (the plan), in parts by subject.

Each field is defined together with its description. Three things are derived from these
definitions: flags and their help (`commands/options.py`), the input of plan files and `audit()`
(`runs/plan.py`), and the page of all fields (`docs/reference/plan.md`). A field has one name
everywhere: `--known-limit 5`, `known_limit = 5` in a plan file, `known_limit=5` in Python. Each
part of the program receives only its part of the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.core.plan_fields import (
    OWN,
    RECORDS,
    SUBJECT,
    FieldRule,
    PlanField,
    list_plan_fields,
    plan_field,
)
from auditor.core.plan_parts import (
    SMALL,
    AttackPlan,
    DataPlan,
    DefensePlan,
    EngineOptions,
    LoadingOptions,
    OutputPlan,
    TargetPlan,
    split_model_name,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of an `audit run`: all its settings, in parts by subject.

    The run folder stores the plan, so that a stopped run can be resumed.

    seed: Seed of all random numbers. [default: 0]
    batch_size (N|auto): Prefixes or texts per batch; changes no result. [default: auto]
    plugin (FILE.py): Python file with attacks, defenses or training methods of your own;
        repeatable.
    """

    panel: ClassVar[str] = "advanced"
    target: TargetPlan = field(default_factory=TargetPlan)
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    data: DataPlan = field(default_factory=DataPlan)
    attacks: AttackPlan = field(default_factory=AttackPlan)
    defenses: DefensePlan = field(default_factory=DefensePlan)
    compute: EngineOptions = field(default_factory=EngineOptions)
    output: OutputPlan = field(default_factory=OutputPlan)
    seed: int = plan_field(0, SUBJECT, panel="compute")
    batch_size: int | None = plan_field(None, panel="compute", minimum=1)
    plugin: tuple[str, ...] = plan_field((), risk="its code would run")
    objects: dict[str, str] = plan_field(
        dict, has_flag=False
    )  # role -> class, if Python passed them

    def __post_init__(self) -> None:
        for part in (self.loading, self.data, self.attacks, self.defenses):
            part.check()
        self._check_fields_apply()
        self._check_unlearning()
        self._check_until_conflicts()
        for name, value in self.map_field_values().items():
            check_field_minimum(name, value)
        self.compute.check(self.loading.device)
        if not 0 <= self.seed < 2**63:
            raise AuditError(f"expected --seed from 0 to 2^63 - 1, got {self.seed}")

    def _check_fields_apply(self) -> None:
        """Raise AuditError for any field that has no effect on this kind of model or data."""
        target = self.target
        if target.uses_builtin_lab != (self.data.data is None) and not self.is_canary_only:
            present, missing = (
                ("--model", "--data") if self.data.data is None else ("--data", "--model")
            )
            raise AuditError(
                f"expected --model and --data together, got {present} without {missing} (neither: "
                "the lab)"
            )
        if target.uses_builtin_lab:
            for name in self.list_changed_fields(OWN):
                raise AuditError(
                    f"{format_field_flag(name)} goes with --model and --data; the built-in lab "
                    "has its own"
                )
        elif target.lab_recipe or target.mitigation:
            if target.lab_recipe:
                name = "lab_recipe"
            else:
                name = "mitigation"
            raise AuditError(f"{name} changes the built-in lab, which --model and --data replace")
        elif target.lab != SMALL:
            raise AuditError(
                f"--lab {target.lab} names a built-in lab, which --model and --data replace"
            )
        if self.is_canary_only:
            for name in self.list_changed_fields(RECORDS):
                raise AuditError(f"{format_field_flag(name)} needs --data, got only --canaries")

    def _check_unlearning(self) -> None:
        """Raise AuditError if a model for unlearning is missing, or relearning is impossible.

        Whether defenses are compatible is checked later, when they are selected.
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
                    f"--relearn trains all weights, which {format_field_flag(name)} does not let it"
                )
        if self.loading.dtype == "float16":
            raise AuditError(
                "--relearn goes with --dtype float32 or bfloat16: training steps in float16 round "
                "to zero"
            )

    def _check_until_conflicts(self) -> None:
        """Raise AuditError if --until is combined with a field that requires all secrets."""
        if self.attacks.until is not None:
            for name in ("submission", "forget", "relearn"):
                if self.map_field_values()[name] is not None:
                    raise AuditError(
                        f"{format_field_flag(name)} needs all secrets, and --until may stop "
                        "before: give one of the two"
                    )

    @property
    def run_folder_title(self) -> str:
        """Part of the run folder's name that follows the time."""
        if self.target.lab == SMALL:
            lab_name = "lab"
        else:
            lab_name = self.target.lab
        if self.target.model is None:
            source = lab_name
        else:
            source = split_model_name(self.target.model)[1]
        name = source.replace("\\", "/").rstrip("/").rpartition("/")[2]
        return "-".join([name, *self.attacks.attack, *self.defenses.defense])[:80]

    @property
    def is_canary_only(self) -> bool:
        """True if only canaries are audited and there are no records to attack."""
        return (
            not self.target.uses_builtin_lab
            and self.data.data is None
            and self.data.canaries is not None
        )

    @property
    def model_and_secrets_fields(self) -> dict[str, Any]:
        """Fields that determine the attacked model and the secrets.

        Two plans with the same model and secrets have the same values here.
        """
        values = self.to_json()
        return {name: values[name] for name in list_ruled_fields(SUBJECT)}

    # --- fields by name, in any part ---

    @classmethod
    def from_fields(cls, **values: Any) -> Plan:
        """Return a plan with these fields. All other fields have their defaults."""
        return cls().with_fields(**values)

    def with_fields(self, **values: Any) -> Plan:
        """Return a copy of the plan with new values for the named fields.

        A field of a part, such as `limit` of `DataPlan`, is named without its part.
        """
        parts: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            parts.setdefault(FIELDS[name].part, {})[name] = value
        plan_values = parts.pop("", {})
        changed = {}
        for part, part_values in parts.items():
            changed[part] = dataclasses.replace(getattr(self, part), **part_values)
        # __post_init__ checks the whole plan again.
        return dataclasses.replace(self, **changed, **plan_values)

    def map_field_values(self) -> dict[str, Any]:
        return {
            name: getattr(getattr(self, described.part) if described.part else self, name)
            for name, described in FIELDS.items()
        }

    def list_changed_fields(self, rules: FieldRule) -> list[str]:
        """Return the fields that have any of these rules and differ from their defaults."""
        values = self.map_field_values()
        return [name for name in list_ruled_fields(rules) if values[name] != FIELDS[name].default]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, as in `plan.json`."""
        values: dict[str, Any] = to_json(self.map_field_values())
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str = "plan") -> Plan:
        """Convert JSON values to a plan, the inverse of `to_json`.

        Missing fields get their defaults. `where` names the values in messages. Raise AuditError
        for unknown fields and wrong values.
        """
        if unknown := [name for name in values if name not in FIELDS]:
            raise AuditError(f"{where}: unknown field {unknown[0]!r}")
        parsed = {}
        for name, value in values.items():
            parsed[name] = from_json(FIELDS[name].kind, value, f"{where}.{name}")
        return cls.from_fields(**parsed)


FIELDS: Mapping[str, PlanField] = dict(list_plan_fields(Plan))
# Fields allowed in a plan file.
IN_FILE = tuple(name for name in FIELDS if name not in ("command", "objects"))


def list_ruled_fields(rules: FieldRule) -> tuple[str, ...]:
    """Return the names of the fields that have any of these rules, in order."""
    return tuple(name for name, described in FIELDS.items() if described.rules & rules)


def check_field_minimum(name: str, value: Any) -> None:
    """Raise AuditError if a number is below the least that its plan field accepts."""
    least = FIELDS[name].minimum
    if least is not None and isinstance(value, int | float) and value < least:
        raise AuditError(f"expected {format_field_flag(name)} >= {least}, got {value}")


def format_field_flag(name: str) -> str:
    return FIELDS[name].flags[0].partition("/")[0]


def list_flag_words(name: str, value: Any) -> list[str]:
    """Return the command-line words that set a plan field to this value."""
    flag = format_field_flag(name)
    if isinstance(value, bool):
        if not value:
            flag = f"--no-{flag.removeprefix('--')}"
        return [flag]
    if isinstance(value, dict):
        pairs = []
        for name, setting in value.items():
            if not isinstance(setting, dict):
                pairs.append(f"{name}={setting}")
                continue
            for option, text in setting.items():
                pairs.append(f"{'.'.join(filter(None, (name, option)))}={text}")
        value = pairs
    if not isinstance(value, list | tuple):
        value = [value]
    words = []
    for item in value:
        words += [flag, str(item)]
    return words

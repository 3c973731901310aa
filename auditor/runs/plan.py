"""What a run is asked to do: flags over a TOML file over defaults. Knows nothing of models."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from auditor.core.errors import AuditError, unknown
from auditor.core.jsonable import from_json

AUTO = "auto"  # a flag that says: not what the plan file says, but the default
Options = dict[str, dict[str, Any]]  # plug-in name ("" for all) -> option -> value

_OUTSIDE_THE_LAB = {
    *("known", "known_fraction", "nonmembers", "canaries", "public", "reference", "revision", "group_column"),
    *("device", "dtype", "model_args", "trust_remote_code"),
}
_OF_DATA = ("known", "known_limit", "nonmembers", "prefix_length", "suffix_length", "limit")


@dataclass(frozen=True)
class Plan:
    """One `audit run`. Written to the run folder, from which it can be resumed."""

    attack: tuple[str, ...] = ("ethicist",)
    defense: tuple[str, ...] = ()
    attack_options: Options = field(default_factory=dict)
    defense_options: Options = field(default_factory=dict)
    setting: Literal["claim", "worst", "both"] = "both"
    model: str | None = None
    model_args: dict[str, str] = field(default_factory=dict)
    revision: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    trust_remote_code: bool = False
    public: str | None = None
    reference: str | None = None
    data: str | None = None
    known: str | None = None
    known_fraction: float = 0.2
    known_limit: int | None = None
    nonmembers: str | None = None
    group_column: str | None = None
    canaries: str | None = None
    lead: str = AUTO  # what stands before every text: auto, none, bos, eos, or a text
    lab_recipe: dict[str, Any] = field(default_factory=dict)
    prefix_length: int | None = None
    suffix_length: int | None = None
    limit: int | None = None
    ensemble_limit: int | None = None  # members attacked behind an ensemble; None: all, in the lab its own number
    samples: int | None = None
    sizes: Literal["paper", "lab"] = "paper"  # defaults of attacks on a target of one's own; in the lab always its own
    seed: int = 0
    batch_size: int | None = None
    plugin: tuple[str, ...] = ()
    submission: str | None = None
    command: str = "audit run"

    def __post_init__(self) -> None:
        if (self.model is None) != (self.data is None) and not self.canaries_alone:
            given, missing = ("--model", "--data") if self.data is None else ("--data", "--model")
            raise AuditError(f"expected --model and --data together, got {given} without {missing} (neither: the lab)")
        if self.model is None:
            for f in dataclasses.fields(self):
                if f.name in _OUTSIDE_THE_LAB and getattr(self, f.name) not in (f.default, {}):
                    flag = "--" + f.name.replace("_", "-").replace("args", "arg")
                    raise AuditError(f"{flag} goes with --model and --data; the built-in lab has its own")
        elif self.lab_recipe:
            raise AuditError("lab_recipe changes the built-in lab, which --model and --data replace")
        if self.canaries_alone:
            for name in _OF_DATA:
                if getattr(self, name) is not None:
                    raise AuditError(f"--{name.replace('_', '-')} goes with --data, got --canaries alone")
        for name in ("limit", "ensemble_limit", "known_limit", "samples", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise AuditError(f"expected --{name.replace('_', '-')} >= 1, got {value}")
        if not 0 <= self.seed < 2**63:
            raise AuditError(f"expected --seed from 0 to 2^63 - 1, got {self.seed}")
        if not self.lead:
            raise AuditError("expected --lead as auto, none, bos, eos or a text, got an empty one")
        if not self.attack:
            raise AuditError("expected at least one --attack, got none; `audit list` shows them")

    @property
    def lab(self) -> bool:
        return self.model is None

    @property
    def canaries_alone(self) -> bool:
        """A model that is looked at for canaries only: there are no records to attack."""
        return self.model is not None and self.data is None and self.canaries is not None


FIELDS = tuple(f.name for f in dataclasses.fields(Plan) if f.name != "command")


def read_toml(path: Path, extra: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a plan file, and the `extra` ones it may hold beside them.

    Raises AuditError for a missing file, bad TOML or an unknown field.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise AuditError(f"cannot read the plan {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AuditError(f"{path} is not TOML: {error}") from error
    for name, value in values.items():
        if name not in (*FIELDS, *extra):
            raise unknown(f"field in {path}:", name, {*FIELDS, *extra})
        check_kind(name, value)
    return values


def check_kind(name: str, value: Any) -> None:
    """Raises AuditError where the value of a plan's field is of another kind; other names are not looked at."""
    if name in FIELDS:
        from_json(typing.get_type_hints(Plan)[name], value, f"plan.{name}")


def make(config: Mapping[str, Any], flags: Mapping[str, Any]) -> Plan:
    """A plan from a plan file and the flags that were given (None, or an empty list: not given); flags win."""
    plan: Plan = from_json(Plan, merge(config, flags), "plan")
    return plan


def merge(config: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The raw values of a plan: flags over a plan file, options one by one."""
    given = {name: value for name, value in flags.items() if value is not None and value not in ([], {}, ())}
    merged = dict(config)
    for name, value in given.items():
        if name.endswith("_options"):
            base = {plugin: dict(options) for plugin, options in merged.get(name, {}).items()}
            for plugin, options in value.items():
                base.setdefault(plugin, {}).update(options)
            value = base
        if value == AUTO:
            merged.pop(name, None)
        else:
            merged[name] = value
    return {name: _as_list(value) for name, value in merged.items()}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def parse_options(flag: str, items: Sequence[str], known: Sequence[str]) -> Options:
    """`[plugin.]option=value` items by plug-in; "" holds those that name none. Raises AuditError for another form."""
    options: Options = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise AuditError(f"expected {flag} [name.]option=value, got {item!r}")
        plugin, dot, option = name.rpartition(".")
        if dot and plugin not in known:
            raise unknown(f"name in {flag} {item}:", plugin, known)
        options.setdefault(plugin, {})[option] = value
    return options


def options_for(name: str, options: Options, defaults: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """What one plug-in gets: the benchmark's defaults, then options for all that have them, then its own."""
    general = {option: value for option, value in options.get("", {}).items() if option in fields}
    return {**defaults, **general, **options.get(name, {})}


def check_general(flag: str, options: Options, fields: Mapping[str, Sequence[str]]) -> None:
    """Refuses an option that names no plug-in and that none of the chosen ones has."""
    every = sorted({option for own in fields.values() for option in own})
    for option in options.get("", {}):
        if option not in every:
            raise unknown(f"option in {flag}:", option, every)
    for plugin in options:
        if plugin and plugin not in fields:
            raise AuditError(
                f"{flag} {plugin}.… names a plug-in that this run does not use ({', '.join(fields) or 'none'})"
            )

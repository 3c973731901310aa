"""Flags that several commands share, and those of a plan, which says itself how each of its fields
is given.

A command takes a flag as `reveal: options.Reveal = False`, a group, a dataclass of flags, as
`single: SingleFlags`, and fields of a plan as `plan: Annotated[options.Values,
options.PlanFlags()]`: those that were given, by name.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from auditor.commands import completion
from auditor.commands.panels import PanelCommand
from auditor.core import safe_mode as guard
from auditor.core.errors import AuditError
from auditor.core.plan import FIELDS, Plan, flag_of_plan_field
from auditor.core.plan_fields import AUTO

Many = list[str] | None  # of a flag that may be repeated
Values = dict[str, Any]  # fields of a plan, by name
_GIVEN = tuple(name for name, one in FIELDS.items() if one.said.flags is not None)
_COMPLETED = {
    "attack": completion.complete_attack_names,
    "attack_options": completion.complete_attack_options,
    "defense": completion.complete_defense_names,
    "defense_options": completion.complete_defense_options,
}
# include_extras: without it typing strips Annotated, which holds the flags
_annotated_type_hints = functools.partial(get_type_hints, include_extras=True)
_WRITTEN = {int: "N", float: "X", Path: "PATH"}  # type of a value -> how it is written
_RISKS = tuple(name for name, one in FIELDS.items() if one.said.risk)


@dataclass(frozen=True)
class PlanFlags:
    """The flags of these fields of a plan. told: help in place of the plan's, where a command means
    less by one.

    forms: whether --model may be repeated: all but the first are forms of it.
    """

    names: str = " ".join(_GIVEN)
    told: Mapping[str, str] = field(default_factory=dict)
    forms: bool = False

    def signature_parameters(self) -> Iterator[inspect.Parameter]:
        """As parameters of a signature, all None by default: the plan has the defaults."""
        for name in self.names.split():
            one = FIELDS[name]
            option = typer.Option(
                *(one.said.flags or ()),
                help=self.told.get(name, one.help),
                metavar=one.said.metavar
                or metavar_for_type(name, _flag_type_for_typer(name, one.kind)),
                rich_help_panel=one.panel,
                autocompletion=_COMPLETED.get(name),
            )
            kind = (
                list[str]
                if self.forms and name == "model"
                else _flag_type_for_typer(name, one.kind)
            )
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )


def _flag_type_for_typer(name: str, kind: Any) -> Any:
    """The type that typer is to parse: bool, int, float, or text that the plan reads; a list of
    texts for several."""
    if typing.get_origin(kind) in (tuple, dict):
        return list[str]
    plain = next((one for one in (bool, int, float) if one in (kind, *typing.get_args(kind))), str)
    return str if name == "batch_size" else plain  # or auto


LOADING = "device dtype"  # of every command that loads a model
HUB_LOADING = f"{LOADING} revision base trust_remote_code"
ENGINE = "engine workers ray_address gpus_per_worker"

of_target = functools.partial(typer.Option, rich_help_panel="target")
of_data = functools.partial(typer.Option, rich_help_panel="data")
of_output = functools.partial(typer.Option, rich_help_panel="output")
out_folder = functools.partial(of_output, "-o", "--out", metavar="DIR")
Seeds = Annotated[
    str | None, typer.Option(metavar="0-4|0,2", help="One run per seed.", rich_help_panel="compute")
]
Plugin = Annotated[Many, typer.Option(metavar="FILE.py", help=FIELDS["plugin"].help)]
Markdown = Annotated[
    Path | None, of_output(metavar="FILE", help="Write Markdown, for a pull request.")
]
Reveal = Annotated[
    bool,
    of_output("--reveal", help="Show private text in the reports: prefixes, suffixes, guesses."),
]
Seed = Annotated[int, typer.Option(help=FIELDS["seed"].help.partition(" [")[0])]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


# --- groups of flags as typer reads them
# ------------------------------------------------------------------------------


_SAFE = Annotated[
    bool,
    typer.Option(
        "--safe/--no-safe",
        help="No plug-ins, no code of model folders, no other programs, no network.",
        rich_help_panel="advanced",
    ),
]


def wrap_command_with_flag_groups_expanded(
    command: Callable[..., None], safe: bool | None = None
) -> Callable[..., None]:
    """The command with each of its groups replaced by the flags in it: typer reads flags from a
    signature alone.

    safe: the default of its flag --safe; None: it has none.
    """
    kinds = _annotated_type_hints(command)
    own = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def spelt(**flags: Any) -> None:
        with guard.safe_mode() if flags.pop("safe", False) else nullcontext():
            command(
                **{one.name: _value_from_flags(one.name, kinds[one.name], flags) for one in own}
            )

    flags = [
        flag for one in own for flag in _flag_parameters(one.name, kinds[one.name], one.default)
    ]
    if safe is not None:
        flags += _flag_parameters("safe", _SAFE, safe)
    spelt.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    # typer reads hints beside the signature, and wraps() took the command's
    spelt.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return spelt


def add_command_to_app(
    app: typer.Typer,
    command: Callable[..., None],
    name: str | None = None,
    *,
    panel: str = "",
    safe: bool | None = None,
) -> None:
    """Makes it a command of the app. panel: of the app's --help; safe: see
    `wrap_command_with_flag_groups_expanded`."""
    app.command(name, cls=PanelCommand, rich_help_panel=panel or None)(
        wrap_command_with_flag_groups_expanded(command, safe)
    )


def _plan_flags_of_annotation(kind: Any) -> PlanFlags | None:
    return next(
        (one for one in getattr(kind, "__metadata__", ()) if isinstance(one, PlanFlags)), None
    )


def _flag_parameters(
    name: str, kind: Any, default: Any, panel: str = ""
) -> Iterator[inspect.Parameter]:
    """The flags of a group, which may hold groups; of a flag, itself. panel: of --help, where it
    names none."""
    if (asked := _plan_flags_of_annotation(kind)) is not None:
        yield from asked.signature_parameters()
    elif dataclasses.is_dataclass(kind):
        kinds = _annotated_type_hints(kind)
        for one in dataclasses.fields(kind):
            # may follow ones with a default: all are keyword-only
            needed = one.default is dataclasses.MISSING
            of = inspect.Parameter.empty if needed else one.default
            yield from _flag_parameters(
                one.name, kinds[one.name], of, getattr(kind, "panel", panel)
            )
    else:
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=_flag_annotation_for_help(name, panel, kind),
        )


def _flag_annotation_for_help(name: str, panel: str, kind: Any) -> Any:
    """The annotation of a flag with this panel of --help, and with its type as metavar where it has
    no other."""
    option = next(
        (one for one in getattr(kind, "__metadata__", ()) if hasattr(one, "rich_help_panel")), None
    )
    if option is None:
        return kind
    shown = copy.copy(option)  # one option is shared by commands that show it in different panels
    shown.rich_help_panel = option.rich_help_panel or panel or None
    shown.metavar = option.metavar or metavar_for_type(name, kind.__origin__)
    return Annotated[kind.__origin__, shown]


def metavar_for_type(name: str, kind: Any) -> str | None:
    """How the value of a flag of this type is written; None: it takes none."""
    kinds = (kind, *typing.get_args(kind))
    if bool in kinds:
        return None
    return next(
        (said for one, said in _WRITTEN.items() if one in kinds), name.rpartition("_")[2].upper()
    )


def _value_from_flags(name: str, kind: Any, flags: Mapping[str, Any]) -> Any:
    """The flag's value, or the group made of the values of its flags; of a plan's fields those that
    were given."""
    if (asked := _plan_flags_of_annotation(kind)) is not None:
        # None alone is not given: False is, as --no-controls says it
        values = {one: flags[one] for one in asked.names.split() if flags[one] is not None}
        return _plan_flag_values_with_split_forms(values) if asked.forms else values
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return flags[name]
    kinds = _annotated_type_hints(kind)
    # by the hints, not by `one.type`: under `from __future__ import annotations` that is a string
    return kind(
        **{
            one.name: _value_from_flags(one.name, kinds[one.name], flags)
            for one in dataclasses.fields(kind)
        }
    )


def _plan_flag_values_with_split_forms(values: Values) -> Values:
    """Lists of forms taken apart at their commas; of several models the first is attacked, the
    others are its forms."""
    # a list: where forms are asked for, --model is repeatable
    model, *named = values.pop("model", None) or [None]
    forms = [
        *named,
        *(form.strip() for given in values.pop("forms", None) or [] for form in given.split(",")),
    ]
    return {
        **values,
        **({"model": model} if model is not None else {}),
        **({"forms": forms} if forms else {}),
    }


# --- what was given
# -----------------------------------------------------------------------------------------------


def given_flags(group: Any) -> dict[str, Any]:
    """The flags of a group, and of the groups in it, that were given."""
    found: dict[str, Any] = {}
    for name, value in vars(group).items():
        found |= given_flags(value) if dataclasses.is_dataclass(value) else {name: value}
    # `is`, as 0 == False: 0 and "" were given, a switch that is off was not
    return {
        name: value for name, value in found.items() if value is not None and value is not False
    }


def flags_to_plan_values(values: Values, base: Mapping[str, Any] = MappingProxyType({})) -> Values:
    """The flags given as values of a plan. The plug-in files that they name are loaded first.

    base: the values of the plan file, which may ask for no more at a risk than the flags name.
        Raises AuditError.
    """
    from auditor.plugins import registry
    from auditor.runs.plan import parse_plugin_options

    # first: to load a plug-in is to run its code
    RisksNamedOnCommandLine.from_plan_values(values).refuse_plan_with_unnamed_risks(
        {**base, **values}, "the plan file"
    )
    load_plugin_files_of_flag(values.get("plugin"))
    read: dict[str, Callable[[Any], Any]] = {
        "attack_options": lambda items: parse_plugin_options(
            "-A", items, list(registry.list_methods())
        ),
        "defense_options": lambda items: parse_plugin_options(
            "-D", items, list(registry.list_defenses())
        ),
        "model_args": lambda items: parse_plugin_options("--model-arg", items, []).get("", {}),
        "batch_size": parse_batch_size_flag,
    }
    return {name: read[name](value) if name in read else value for name, value in values.items()}


@dataclass(frozen=True)
class RisksNamedOnCommandLine:
    """Risky fields that the command line names: a plan file or a run folder, which may be
    anybody's, sets no others.

    named: field and value, of a list each of its values.
    """

    named: tuple[tuple[str, Any], ...]

    @classmethod
    def from_plan_values(cls, values: Mapping[str, Any]) -> RisksNamedOnCommandLine:
        """The risky fields and values that these values of a plan hold. Raises AuditError for code
        with --safe."""
        found = cls(_risky_plan_fields_as_flag_values(values))
        for name, value in found.named:
            if name in ("plugin", "trust_remote_code"):
                guard.refuse_in_safe_mode(
                    f"{_flag_with_value(name, value)}: {FIELDS[name].said.risk}"
                )
        return found

    def risk_flags_as_typed(self) -> list[str]:
        """Each flag with its value, as a shell takes it."""
        return [_flag_with_value(*one) for one in self.named]

    def check_plan_names_the_same_risks(self, plan: Plan, where: str) -> None:
        """Raises AuditError for a plan with a risk that is not named, or without a named one: that
        flag is idle."""
        asked = RisksNamedOnCommandLine.from_plan_values(plan.values_by_field_name())
        self.refuse_plan_with_unnamed_risks(plan.values_by_field_name(), where)
        for name, value in _risks_not_named_by_flags(self.named, asked.named):
            raise AuditError(
                f"expected no {_flag_with_value(name, value)}, as {where} does not ask for it, got "
                "it"
            )

    def refuse_plan_with_unnamed_risks(self, plan: Mapping[str, Any], where: str) -> None:
        """Raises AuditError for a plan with a risk that is not named. where: whose plan it is, for
        the sentence."""
        for name, value in _risks_not_named_by_flags(
            _risky_plan_fields_as_flag_values(plan), self.named
        ):
            to = "" if value is True else f" to {value!r}"
            raise AuditError(
                f"{where} sets {name}{to}, and {FIELDS[name].said.risk}: if that is meant, say it "
                f"on the command line as well, {_flag_with_value(name, value)}"
            )


def _risky_plan_fields_as_flag_values(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """(field, value) for each risky value; a list counts value by value."""
    found = list[tuple[str, Any]]()
    for name in _RISKS:
        given = values.get(name)
        several = given if isinstance(given, list | tuple) else [given] if given else []
        # "": all are
        found += [(name, one) for one in several if FIELDS[name].said.risky in str(one)]
    return tuple(found)


def _risks_not_named_by_flags(
    asked: Iterable[tuple[str, Any]], named: Iterable[tuple[str, Any]]
) -> list[tuple[str, Any]]:
    """The asked (field, value) pairs that are not named; a file counts as named however its path is
    written."""
    # of what is no path, as an address, both sides are changed alike
    known = {(name, os.path.abspath(str(value))) for name, value in named}
    return [
        (name, value) for name, value in asked if (name, os.path.abspath(str(value))) not in known
    ]


def _flag_with_value(name: str, value: Any) -> str:
    return (
        flag_of_plan_field(name)
        if value is True
        else f"{flag_of_plan_field(name)} {shlex.quote(str(value))}"
    )


def load_plugin_files_of_flag(files: list[str] | None) -> None:
    from auditor.plugins import registry

    for path in files or []:
        registry.load_plugin_file(Path(path))


def parse_batch_size_flag(value: str) -> int | str:
    if value == AUTO:
        return value
    # not isdigit(), which takes ² as well, and int() does not
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < 1:
        raise AuditError(f"expected --batch-size to be a whole number >= 1 or auto, got {value!r}")
    return int(value)

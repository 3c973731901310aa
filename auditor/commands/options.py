"""Build the command line of commands from their signatures and docstrings.

A positional parameter of a command is an argument; a keyword-only parameter is a flag. The
docstring describes a parameter by an entry `name (-f, --flag NOTATION): help`. Missing entries are
taken from `SharedFlags`, then from plan fields. `Annotated[str, "data"]` names the panel of a flag
in --help. A group of flags is a dataclass, declared as `single: SingleFlags`. Plan fields are
declared as `plan: Annotated[options.Values, options.PlanFlags()]`; `plan` then receives the given
fields, keyed by name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from auditor.commands.completion import complete_plugins
from auditor.core import safe_mode as guard
from auditor.core.errors import AuditError
from auditor.core.plan import FIELDS, Plan, check_field_minimum, list_flag_words
from auditor.core.plan_fields import AUTO, PANELS, FlagNotation, read_docstring_entries

_FLAG = inspect.Parameter.KEYWORD_ONLY
Many = list[str] | None  # type of a repeatable flag
Values = dict[str, Any]  # fields of a plan, by name
Risks = dict[tuple[str, str], Any]  # values of risky fields, by field and absolute path
_GIVEN = tuple(name for name, plan_field in FIELDS.items() if plan_field.has_flag)
_METHODS = ("Attack", "Probe")
_COMPLETED = {  # by name of a parameter
    "attack": complete_plugins(*_METHODS),
    "attack_options": complete_plugins(*_METHODS, options=True),
    "defense": complete_plugins("Defense"),
    "defense_options": complete_plugins("Defense", options=True),
    "method": complete_plugins("Trainer"),
    "by": complete_plugins("Trainer"),
    "name": complete_plugins(*_METHODS, "Defense", "Trainer", "Benchmark"),
}
_read_signature = functools.partial(inspect.signature, eval_str=True)
_ARGS = re.compile(r"\n\nArgs:(?:\n    .*)+")  # section of a docstring
_WRAPPED = re.compile(r"(?<=\S)\n(?=\S)")  # line end inside a paragraph
_MARKUP = re.compile(r"\[(?=[a-z#/@])")  # rich would read the text in brackets as a style
_WRITTEN = {bool: "", int: "N", float: "X", Path: "PATH"}  # type of a value -> its metavar
_RISKS = tuple(name for name, plan_field in FIELDS.items() if plan_field.risk)


@dataclass(frozen=True)
class PlanFlags:
    """Flags for these fields of a plan.

    Args:
        names: names of the fields.
        forms: whether --model may be repeated; the later models are deployed forms of the first
            model.
    """

    names: str = " ".join(_GIVEN)
    forms: bool = False

    def signature_parameters(
        self, entries: Mapping[str, FlagNotation]
    ) -> Iterator[inspect.Parameter]:
        """Yield the flags as parameters of a command's signature.

        They are None by default, because the plan has the default values. An entry of the command's
        docstring replaces the notation and help of a field.
        """
        for name in self.names.split():
            field = FIELDS[name]
            kind = _build_flag_type(name, field.kind)
            if self.forms and name == "model":
                kind = list[str]
            parameter = inspect.Parameter(name, _FLAG, default=None, annotation=kind | None)
            yield _annotate_flag(parameter, entries.get(name, field), field.panel)


def _build_flag_type(name: str, kind: Any) -> Any:
    """Return the type of a flag for typer's parser: bool, int, float, text, or a list of texts."""
    if typing.get_origin(kind) in (tuple, dict):
        return list[str]
    for plain in (bool, int, float):
        if name != "batch_size" and plain in (kind, *typing.get_args(kind)):
            return plain
    return str  # also for a batch size, which may be `auto`


LOADING = "device dtype"  # flags of every command that loads a model
HUB_LOADING = f"{LOADING} revision base trust_remote_code"
ENGINE = "engine workers ray_address gpus_per_worker"


class SharedFlags:
    """Describe flags that several commands share.

    as_json (--json): Print JSON instead of a table.
    manifest (MANIFEST): Manifest that `audit canaries make` wrote.
    markdown (FILE): Write Markdown, for a pull request.
    reveal: Show private text in the reports: prefixes, suffixes, guesses.
    safe (--safe/--no-safe): Run no plug-ins, no code of model folders, no other programs; ask no
        network.
    seeds (0-4|0,2): One run per seed.
    """


# --- groups of flags for typer ---


def expand_flag_groups(
    command: Callable[..., None], safe: bool | None = None
) -> Callable[..., None]:
    """Return the command with each group of flags replaced by single flags, as typer requires.

    safe: default of the flag --safe; None if the command has no such flag.
    """
    signature = _read_signature(command)

    @functools.wraps(command)
    def spelt(**flags: Any) -> None:
        with guard.safe_mode() if flags.pop("safe", False) else nullcontext():
            command(**_combine_group_values(signature, flags))

    parameters = list(signature.parameters.values())
    if safe is not None:
        kind = Annotated[bool, "advanced"]
        parameters.append(inspect.Parameter("safe", _FLAG, default=safe, annotation=kind))
    flags = list(_flag_parameters(parameters, read_docstring_entries(command)))
    # typer shows panels in the order of their first flags.
    flags.sort(key=_rank_panel)
    # typer reads annotations besides the signature, and wraps() copied the command's.
    spelt.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    spelt.__annotations__ = {flag.name: flag.annotation for flag in flags}
    text = _ARGS.sub("", inspect.cleandoc(command.__doc__ or ""))
    spelt.__doc__ = _escape_markup(_WRAPPED.sub(" ", text))
    return spelt


def _rank_panel(flag: inspect.Parameter) -> int:
    """Return the position of the flag's panel in --help."""
    panel = (flag.annotation.__metadata__[0].rich_help_panel or "").lower()
    if panel in PANELS:
        return 2 + PANELS.index(panel)
    return 5 if panel else 0  # a panel of this command only; no panel


def _escape_markup(text: str) -> str:
    return _MARKUP.sub(r"\\[", text)


def add_command(
    app: typer.Typer,
    command: Callable[..., None],
    name: str | None = None,
    *,
    panel: str = "",
    safe: bool | None = None,
) -> None:
    """Register a command of the app.

    Args:
        panel: heading above the command in the app's --help.
        safe: default of the flag --safe; None if the command has no such flag.
    """
    app.command(name, rich_help_panel=panel.capitalize() or None)(expand_flag_groups(command, safe))


def _split_annotation(parameter: inspect.Parameter) -> tuple[Any, PlanFlags | str]:
    """Return the parameter's type, then its plan flags or panel ("" without them)."""
    kind = parameter.annotation
    if typing.get_origin(kind) is Annotated:
        kind, details = typing.get_args(kind)
        return kind, details
    return kind, ""


def _flag_parameters(
    parameters: Iterable[inspect.Parameter], entries: Mapping[str, FlagNotation], panel: str = ""
) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each single flag, also for the flags inside groups and nested groups.

    Args:
        parameters: parameters of a command or a group.
        entries: entries of its docstring, keyed by flag.
        panel: default heading in --help.
    """
    entries = {**read_docstring_entries(SharedFlags), **entries}
    for parameter in parameters:
        kind, details = _split_annotation(parameter)
        if isinstance(details, PlanFlags):
            yield from details.signature_parameters(entries)
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _flag_parameters(
                _read_signature(kind).parameters.values(),
                read_docstring_entries(kind),
                getattr(kind, "panel", panel),
            )
        else:
            entry = _find_entry(parameter.name, entries)
            yield _annotate_flag(parameter.replace(annotation=kind), entry, details or panel)


def _annotate_flag(
    parameter: inspect.Parameter, entry: FlagNotation, panel: str
) -> inspect.Parameter:
    """Return the parameter with a type that typer reads as a command-line argument or option.

    Args:
        parameter: a parameter of the command's function.
        entry: the description of the parameter in the function's docstring.
        panel: title of the group of options in `--help`; "" for none.
    """
    kind = parameter.annotation
    flags = entry.flags
    if kind is bool and not flags:
        flags = (f"--{parameter.name.replace('_', '-')}",)  # without a flag --no-NAME
    make: Any = typer.Option if parameter.kind is _FLAG else typer.Argument
    option = make(
        *flags,
        help=_escape_markup(entry.help),
        rich_help_panel=panel.capitalize() or None,
        metavar=entry.metavar or choose_metavar(parameter.name, kind),
        autocompletion=_COMPLETED.get(parameter.name),
    )
    # Flags without a default may follow flags with one: all are keyword-only.
    return parameter.replace(kind=_FLAG, annotation=Annotated[kind, option])


def _find_entry(name: str, entries: Mapping[str, FlagNotation]) -> FlagNotation:
    if name in entries or name not in FIELDS:
        return entries.get(name, FlagNotation())
    # Omit the plan's default: typer adds the default of the flag.
    field = FIELDS[name]
    return FlagNotation(metavar=field.metavar, help=field.help.partition(" [")[0])


def choose_metavar(name: str, kind: Any) -> str:
    """Return the placeholder for a flag's value in --help; "" for a switch."""
    kinds = (kind, *typing.get_args(kind))
    return next(
        (metavar for value_type, metavar in _WRITTEN.items() if value_type in kinds),
        name.rpartition("_")[2].upper(),
    )


def _combine_group_values(signature: inspect.Signature, flags: Mapping[str, Any]) -> Values:
    """Build the values of a command's parameters, or of a group's fields, from the flags.

    Each value is a flag's value, a group built from its flags, or a plan's fields.
    """
    values: Values = {}
    for name, parameter in signature.parameters.items():
        kind, details = _split_annotation(parameter)
        if isinstance(details, PlanFlags):
            # None means that the flag was not given; False was given, for example by --no-controls.
            fields = {}
            for field_name in details.names.split():
                if flags[field_name] is not None:
                    fields[field_name] = flags[field_name]
            if details.forms:
                fields = _split_deployed_forms(fields)
            values[name] = fields
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            values[name] = kind(**_combine_group_values(_read_signature(kind), flags))
        else:
            values[name] = flags[name]
    return values


def _split_deployed_forms(values: Values) -> Values:
    """Split the list of deployed forms at commas.

    If several models are given, the first is attacked and the others become forms.
    """
    models = values.pop("model", [])
    forms = models[1:]
    for form_list in values.pop("forms", []):
        forms += map(str.strip, form_list.split(","))
    if models:
        values["model"] = models[0]
    if forms:
        values["forms"] = forms
    return values


# --- given flags ---


def list_given_flags(group: Any) -> dict[str, Any]:
    """Return the given flags of a group and of its nested groups."""
    values: dict[str, Any] = {}
    for name, value in vars(group).items():
        if dataclasses.is_dataclass(value):
            values |= list_given_flags(value)
        # Compare by `is`, because 0 == False: 0 and "" are given values, and False is a switch that
        # was not given.
        elif value is not None and value is not False:
            values[name] = value
    return values


def collect_plan_values(values: Values, base: Mapping[str, Any] = MappingProxyType({})) -> Values:
    """Load the plug-in files that the flags name, and return the given flags as plan values.

    Args:
        values: the given flags, keyed by field of the plan.
        base: values of the plan file.

    Raises:
        AuditError: if the plan file sets a risky value, such as one that runs foreign code, and no
            flag repeats it.
    """
    from auditor.plugins import registry
    from auditor.runs.plan import parse_plugin_options

    # Check risks first: loading a plug-in runs its code.
    refuse_unnamed_risks({**base, **values}, list_allowed_risks(values), "the plan file")
    load_plugin_files(values.get("plugin"))
    values = dict(values)
    for name, flag, list_known in (
        ("attack_options", "-A", registry.list_methods),
        ("defense_options", "-D", registry.list_defenses),
        ("model_args", "--model-arg", dict),
    ):
        if name in values:
            values[name] = parse_plugin_options(flag, values[name], list(list_known()))
    if "model_args" in values:
        values["model_args"] = values["model_args"].get("", {})
    if "batch_size" in values:
        values["batch_size"] = parse_batch_size_flag(values["batch_size"])
    for name, value in values.items():
        check_field_minimum(name, value)
    return values


def list_allowed_risks(values: Mapping[str, Any]) -> Risks:
    """Return the risky values that the flags set. Raise AuditError if --safe forbids one of them.

    A plan or run folder from somebody else may set only these risky values.
    """
    risks = _list_risks(values)
    for (name, _), value in risks.items():
        if name in ("plugin", "trust_remote_code"):
            guard.refuse_safe_mode_action(f"{_format_flag(name, value)}: {FIELDS[name].risk}")
    return risks


def _list_risks(values: Mapping[str, Any]) -> Risks:
    risks: Risks = {}
    for name in _RISKS:
        value = values.get(name) or []
        for item in value if isinstance(value, list | tuple) else [value]:
            # If `risky` is "", all values are risky.
            if FIELDS[name].risky in str(item):
                # Values that are not paths, e.g. addresses, change in the same way in plan and
                # flags.
                risks[name, os.path.abspath(str(item))] = item
    return risks


def format_risk_flags(plan: Plan) -> list[str]:
    """Return the flags, quoted for a shell, that set the plan's risky values."""
    risks = list_allowed_risks(plan.map_field_values())
    return [_format_flag(name, value) for (name, _), value in risks.items()]


def check_plan_has_risks(plan: Plan, allowed: Risks, where: str) -> None:
    """Raise AuditError if the plan and the command line set different risky values.

    A flag for a risk that is not in the plan would have no effect.

    where: name of the plan in the message.
    """
    values = plan.map_field_values()
    risks = list_allowed_risks(values)
    refuse_unnamed_risks(values, allowed, where)
    for (name, path), value in allowed.items():
        if (name, path) not in risks:
            raise AuditError(
                f"expected no {_format_flag(name, value)}, because {where} does not use it"
            )


def refuse_unnamed_risks(plan: Mapping[str, Any], allowed: Risks, where: str) -> None:
    """Raise AuditError if the plan sets a risky value that the command line does not set.

    where: name of the plan in the message.
    """
    for (name, path), value in _list_risks(plan).items():
        if (name, path) not in allowed:
            to = "" if value is True else f" to {value!r}"
            raise AuditError(
                f"{where} sets {name}{to}, and {FIELDS[name].risk}: if you want that, "
                f"give it on the command line too, {_format_flag(name, value)}"
            )


def _format_flag(name: str, value: Any) -> str:
    return shlex.join(list_flag_words(name, value))


def load_plugin_files(files: list[str] | None) -> None:
    from auditor.plugins import registry

    for path in files or []:
        registry.load_plugin_file(Path(path))


def parse_batch_size_flag(value: str) -> int | str:
    if value == AUTO:
        return value
    # Not isdigit(), because it accepts ² and int() does not.
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < 1:
        raise AuditError(f"expected --batch-size to be a whole number >= 1 or auto, got {value!r}")
    return int(value)

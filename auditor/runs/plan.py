"""Make a plan from flags, a TOML file and defaults. Flags override the file."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError, make_unknown_name_error
from auditor.core.jsonable import from_json
from auditor.core.plan import FIELDS, IN_FILE, Plan
from auditor.core.plan_fields import AUTO, Options


def read_plan_file(path: Path, extra: Collection[str] = ()) -> dict[str, Any]:
    """Return the plan fields in a plan file, and the keys named in `extra`.

    `extra` are allowed keys besides plan fields. Raise AuditError for a missing file, invalid TOML
    or an unknown field.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise AuditError(f"cannot read the plan {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AuditError(f"{path} is not TOML: {error}") from error
    for name, value in values.items():
        if name not in (*IN_FILE, *extra):
            raise make_unknown_name_error(f"field in {path}:", name, {*IN_FILE, *extra})
        check_plan_field_type(name, value)
    return values


def check_plan_field_type(name: str, value: Any) -> None:
    """Raise AuditError if the value of a plan field has a wrong type. Unknown names are ignored."""
    if name in IN_FILE:
        from_json(FIELDS[name].kind, value, f"plan.{name}")


def make_plan(config: Mapping[str, Any], flags: Mapping[str, Any]) -> Plan:
    """Make a plan from a plan file's values (`config`) and flags.

    Flags override the file. None or an empty list means that the flag is absent. Options of
    plug-ins and other tables are merged entry by entry.
    """
    return Plan.from_json(merge_plan_values(config, flags))


def merge_plan_values(config: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a plan file's raw values (`config`) and flags, by `merge_raw_plans`."""
    present = {}
    for name, value in flags.items():
        if value is not None and not (isinstance(value, list | dict | tuple) and not value):
            present[name] = value
    merged = merge_raw_plans(config, present)
    for name, value in present.items():
        # `auto` for a number means its default, so that the flag overrides the file.
        if value == AUTO and name in FIELDS and FIELDS[name].minimum:
            del merged[name]
    return merged


def merge_raw_plans(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `over`: tables are merged entry by entry, other values replaced.

    Both are raw plan values, keyed by plan field. Neither is changed.
    """
    result = copy.deepcopy(dict(base))
    for name, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merge_raw_plans(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def parse_plugin_options(flag: str, items: Sequence[str], known: Sequence[str]) -> Options:
    """Group `[plugin.]option=value` items by plug-in; items without a plug-in have the key "".

    Raise AuditError for any other text.

    Args:
        flag: the flag in messages.
        known: names of plug-ins.
    """
    options: Options = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or not name:
            raise AuditError(f"expected {flag} [name.]option=value, got {item!r}")
        plugin, dot, option = name.rpartition(".")
        if dot and plugin not in known:
            raise make_unknown_name_error(f"name in {flag} {item}:", plugin, known)
        options.setdefault(plugin, {})[option] = value
    return options


def parse_one_plugin_options(flag: str, items: Sequence[str], name: str) -> dict[str, Any]:
    """Return the values of `[name.]option=value` items, keyed by option, for a single plug-in."""
    options = parse_plugin_options(flag, items, [name])
    return {**options.get("", {}), **options.get(name, {})}


def merge_plugin_options(
    name: str, options: Options, defaults: Mapping[str, Any], fields: Sequence[str]
) -> dict[str, Any]:
    """Merge a plug-in's options.

    Options given for this plug-in override options given without a plug-in name, and these override
    `defaults`.

    Args:
        name: name of the plug-in.
        options: the given options, keyed by plug-in; those without a plug-in name have the key "".
        defaults: default values, keyed by option.
        fields: names of the options that the plug-in has.
    """
    general = {}
    for option, value in options.get("", {}).items():
        if option in fields:
            general[option] = value
    return {**defaults, **general, **options.get(name, {})}


def refuse_unused_options(flag: str, options: Options, fields: Mapping[str, Sequence[str]]) -> None:
    """Raise AuditError for an option that no chosen plug-in uses.

    Such an option either names a plug-in that was not chosen, or names no plug-in and is an option
    of none of the chosen ones.

    Args:
        flag: the flag in messages.
        options: the given options, keyed by plug-in; those that name no plug-in have the key "".
        fields: option names of each chosen plug-in.
    """
    known = sorted({option for names in fields.values() for option in names})
    for option in options.get("", {}):
        if option not in known:
            raise make_unknown_name_error(f"option in {flag}:", option, known)
    for plugin in options:
        if plugin and plugin not in fields:
            raise AuditError(
                f"{flag} {plugin}.… names a plug-in that this run does not use "
                f"({', '.join(fields) or 'none'})"
            )

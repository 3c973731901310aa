"""Make a plan from flags, a TOML file and defaults, and list all runs of a grid of plans.

Flags override the file. The runs of a grid are variants x swept fields x seeds:

seeds = [0, 1, 2]
[sweep]
"ethicist.samples" = [1, 10, 100]      # plug-in.option, a plan field, or table.field (lab_recipe.hidden)
[[variant]]                            # a list of points where a product would be too much
name = "w/o smooth"
attack_options = { ethicist = { alpha = 0 } }
sweep = { "ethicist.epochs" = [1, 2] }  # swept by this variant only
"""  # noqa: E501

from __future__ import annotations

import copy
import hashlib
import math
import re
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain, product
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.jsonable import from_json, read_toml
from auditor.core.plan import FIELDS, IN_FILE, Plan
from auditor.core.plan_fields import AUTO, Options


def read_plan_file(path: Path, extra: Collection[str] = ()) -> dict[str, Any]:
    """Return the plan fields in a plan file, and the keys named in `extra`.

    `extra` are allowed keys besides plan fields. Raise AuditError for a missing file, invalid TOML
    or an unknown field.
    """
    values = read_toml(path, "the plan")
    refuse_unknown_names(f"field in {path}:", values, (*IN_FILE, *extra))
    for name, value in values.items():
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
        if dot:
            refuse_unknown_names(f"name in {flag} {item}:", [plugin], known)
        options.setdefault(plugin, {})[option] = value
    return options


def parse_one_plugin_options(flag: str, items: Sequence[str], name: str) -> dict[str, Any]:
    """Return the values of `[name.]option=value` items, keyed by option, for a single plug-in."""
    options = parse_plugin_options(flag, items, [name])
    return {**options.get("", {}), **options.get(name, {})}


def merge_plugin_options(
    name: str, options: Options, defaults: Mapping[str, Any], fields: Collection[str]
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
    known = chain.from_iterable(fields.values())
    refuse_unknown_names(f"option in {flag}:", options.get("", {}), known)
    for plugin in options:
        if plugin and plugin not in fields:
            raise AuditError(
                f"{flag} {plugin}.… names a plug-in that this run does not use "
                f"({', '.join(fields) or 'none'})"
            )


GRID = ("seeds", "sweep", "variant")  # keys of a plan file besides the fields of a plan
_LISTS = tuple(
    name for name, plan_field in FIELDS.items() if typing.get_origin(plan_field.kind) is tuple
)
_TABLES = tuple(
    name
    for name, plan_field in FIELDS.items()
    if typing.get_origin(plan_field.kind) is dict and plan_field.kind != Options
)
_LONGEST_RANGE = 10_000
_MOST_POINTS = 10_000  # each point is one run, so more points are a mistake
Values = dict[str, Any]


@dataclass(frozen=True)
class GridPoint:
    """One run of a grid.

    Args:
        variant: name of the variant; "" if the plan has no variants.
        at: values of the swept fields.
        seed: seed of the run.
        plan: raw fields of the run's plan.
    """

    variant: str
    at: Values
    seed: int
    plan: Values = field(compare=False)

    @property
    def name_without_seed(self) -> str:
        """Name made of the run's variant and swept values."""
        return name_grid_point(self.variant, self.at)

    @property
    def name(self) -> str:
        return f"{self.name_without_seed or 'plan'}, seed {self.seed}"

    @property
    def run_folder_name(self) -> str:
        """Name of the run's folder.

        A digest is added if the run's name contains characters that a folder name should not.
        """
        plain = self.name.replace(", ", "_").replace(" ", "-")
        safe = re.sub(r"[^A-Za-z0-9._=-]+", "-", plain)[:80].strip("-.")
        if safe == plain:
            return safe
        return f"{safe}-{hashlib.sha256(self.name.encode()).hexdigest()[:6]}"


def name_grid_point(variant: str, at: Mapping[str, Any]) -> str:
    """Return a name like `w/o smooth, ethicist.samples=10`; "" if no variant or field varies.

    Args:
        variant: name of the variant; "" if there is none.
        at: values of the swept fields, keyed by field.
    """
    return ", ".join(filter(None, [variant, *(f"{key}={value}" for key, value in at.items())]))


def expand_plan_grid(raw: Mapping[str, Any]) -> list[GridPoint]:
    """List all runs of a raw plan. All runs with one seed come before those with the next seed.

    `raw` holds a plan file's values: plan fields, and the keys `seeds`, `sweep` and `variant`.
    Raise AuditError for an unknown field, an empty list, a duplicate name, or unused options.
    """
    base = {"attack": list(FIELDS["attack"].default)}
    base |= {name: value for name, value in raw.items() if name not in GRID}
    variants = _check_variants(raw.get("variant", []))
    common_sweep = _check_sweep(raw.get("sweep", {}))
    swept = {}
    for name, fields in variants:
        swept[name] = {**common_sweep, **_check_sweep(fields.pop("sweep", {}))}
    _check_options_are_used(base, variants)
    seeds = _check_seeds(raw)
    points = []
    # Count the points before making them: a typo may request millions.
    count = len(seeds) * sum(math.prod(map(len, fields.values())) for fields in swept.values())
    if count > _MOST_POINTS:
        raise AuditError(f"expected a grid of at most {_MOST_POINTS:,} runs, got {count:,}")
    for seed in seeds:
        for name, fields in variants:
            for values in product(*swept[name].values()):
                at = dict(zip(swept[name], values, strict=True))
                points.append(GridPoint(name, at, seed, _build_point_plan(base, fields, at, seed)))
    return points


def refuse_flags_without_effect(file: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raise AuditError for a flag whose value a sweep or a variant replaces.

    Flags override a plan file, except its sweeps and variants.

    Args:
        file: a plan file's values, which `expand_plan_grid` accepts.
        flags: the plan fields set by flags.
    """
    replaced = set(file.get("sweep", {}))
    for variant in file.get("variant", []):
        replaced |= _list_value_names(variant) | set(variant.get("sweep", {}))
    for name in sorted(_list_value_names(flags) & replaced):
        raise AuditError(
            f"expected no flag for {name}, which a sweep or a variant of the plan file sets"
        )


def _list_value_names(fields: Mapping[str, Any]) -> set[str]:
    """Return the names of plan values as a sweep writes them, such as `ethicist.samples`."""
    names = set()
    for name, value in fields.items():
        if name in _TABLES:
            names |= {f"{name}.{key}" for key in value}
        elif isinstance(value, Mapping) and name != "sweep":
            for plugin, options in value.items():
                names |= {f"{plugin}.{option}" for option in options}
        else:
            names.add(name)
    return names


def _build_point_plan(base: Values, overrides: Values, at: Values, seed: int) -> Values:
    plan = merge_raw_plans(base, overrides)
    for key, value in at.items():
        _set_swept_value(plan, key, value)
    # Common options may belong to plug-ins of other variants.
    for kind in ("attack", "defense"):
        options = plan.get(f"{kind}_options", {})
        for plugin in {*options} - {"", *plan.get(kind, [])}:
            del options[plugin]
    plan["seed"] = seed
    return plan


def _set_swept_value(plan: Values, key: str, value: Any) -> None:
    head, dot, rest = key.partition(".")
    if not dot:
        refuse_unknown_names("plan field in the sweep:", [key], set(IN_FILE) - {"seed"})
        plan[key] = [value] if key in _LISTS and not isinstance(value, list) else value
        check_plan_field_type(key, plan[key])
    elif head in _TABLES:
        plan.setdefault(head, {})[rest] = value
    else:
        kind = next((kind for kind in ("attack", "defense") if head in plan.get(kind, [])), None)
        if kind is None:
            used = ", ".join([*plan["attack"], *plan.get("defense", [])])
            raise AuditError(
                f"expected the sweep to name an attack or defense of the plan ({used}), got {key!r}"
            )
        plan.setdefault(f"{kind}_options", {}).setdefault(head, {})[rest] = value


def _check_seeds(raw: Mapping[str, Any]) -> list[int]:
    if "seed" in raw and "seeds" in raw:
        raise AuditError("expected seed or seeds, got both")
    seeds = raw.get("seeds", [raw.get("seed", 0)])
    # Not isinstance: True would be an int.
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise AuditError(f"expected seeds to be a list of whole numbers, got {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise AuditError(f"expected seeds that differ, got {seeds}")
    return seeds


def _check_sweep(sweep: Any) -> dict[str, list[Any]]:
    if not isinstance(sweep, Mapping):
        raise AuditError(f"expected [sweep] to be a table of lists, got {sweep!r}")
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise AuditError(f"expected a list of values for {key!r} in [sweep], got {values!r}")
        # By repr: lists have no hash, and 1, 1.0 and True are equal.
        if len({repr(value) for value in values}) < len(values):
            raise AuditError(f"expected values that differ for {key!r} in [sweep], got {values}")
    return dict(sweep)


def _check_variants(variants: Any) -> list[tuple[str, Values]]:
    if not isinstance(variants, list) or not all(
        isinstance(v, Mapping) and isinstance(v.get("name"), str) and v["name"] for v in variants
    ):
        raise AuditError("expected each [[variant]] to be a table with a name")
    names = [variant["name"] for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise AuditError(f"two variants are called {name!r}")
    named_variants = []
    for variant in variants:
        fields = dict(variant)
        name = fields.pop("name")
        named_variants.append((name, fields))
        known = {*IN_FILE, "sweep"} - {"seed"}
        refuse_unknown_names(f"field of variant {name!r}:", fields, known)
        for key, value in fields.items():
            check_plan_field_type(key, value)
    return named_variants or [("", {})]


def _check_options_are_used(base: Values, variants: Sequence[tuple[str, Values]]) -> None:
    """Raise AuditError if the shared plan has options of an attack or defense that no variant uses.

    This finds a misspelt name, which would otherwise have no effect.

    Args:
        base: values that all variants share.
        variants: name and own values of each variant.
    """
    for kind in ("attack", "defense"):
        used: set[str] = set()
        for _, fields in variants:
            used.update(fields.get(kind) or base.get(kind) or [])
        plugins = filter(None, base.get(f"{kind}_options", {}))
        refuse_unknown_names(f"{kind} in {kind}_options:", plugins, used)


# --- flags ---


def parse_sweep_flags(items: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `--sweep KEY=V1,V2` items; return the list of values of each swept field, by key.

    Values that TOML cannot parse are text. `start:stop:step` means the numbers from start to stop,
    including stop if a step hits it exactly.
    """
    sweep: dict[str, list[Any]] = {}
    for item in items:
        key, separator, values = item.partition("=")
        if not separator or not key or not values:
            raise AuditError(
                f"expected --sweep key=value,value or key=start:stop:step, got {item!r}"
            )
        sweep[key] = []
        for text in values.split(","):
            sweep[key] += _parse_number_range(text) or [_parse_toml_or_text(text)]
    return sweep


def _parse_number_range(text: str) -> list[Any]:
    """Return the numbers of `start:stop:step`, in decimal arithmetic.

    Return [] for any other text.
    """
    number = r"([-+]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}))"
    match = re.fullmatch(f"{number}:{number}:{number}", text.strip())
    if match is None:
        return []
    start, stop, step = map(Decimal, match.groups())
    if step == 0 or (stop - start) * step < 0:
        raise AuditError(
            f"expected start:stop:step with a step from start towards stop, got {text!r}"
        )
    count = int((stop - start) / step) + 1
    if count > _LONGEST_RANGE:
        raise AuditError(
            f"expected start:stop:step of at most {_LONGEST_RANGE:,} values, got {count:,} in "
            f"{text!r}"
        )
    kind = float if "." in text else int
    return [kind(start + i * step) for i in range(count)]


def _parse_toml_or_text(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_seed_ranges(text: str) -> list[int]:
    """Return the seeds in a text such as `0-4`, `0,2,5` or `0-4,7`."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise AuditError(f"expected --seeds like 0-4 or 0,2,5, got {text!r}")
        first = int(match[1])
        last = int(match[2] or match[1])
        if last - first >= _MOST_POINTS:
            raise AuditError(
                f"expected at most {_MOST_POINTS:,} --seeds, got {last - first + 1:,} in {text!r}"
            )
        seeds += range(first, last + 1)
    return seeds

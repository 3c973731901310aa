"""Select a plan's plug-ins (attacks, probes, defenses with their controls) and access settings.

Each plug-in is built once, before any model is loaded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.plan_fields import PLACED, PROVIDED, Options
from auditor.plugins import registry
from auditor.plugins.attack import Attack
from auditor.plugins.defense import Defense
from auditor.plugins.options import build_plugin, get_option_defaults
from auditor.plugins.probe import Probe
from auditor.plugins.view import SETTINGS, Setting
from auditor.runs import shown_rows
from auditor.runs.plan import merge_plugin_options, refuse_unused_options
from auditor.runs.shown_rows import ShownRow, UnlearnedModel, list_form_rows
from auditor.runs.site import Site
from auditor.runs.submission import check_plan_allows_submission
from auditor.statistics.metrics import is_builtin_metric

KINDS: Mapping[str, Any] = {"attack": (Attack, Probe), "defense": (Defense,)}


def name_python_class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def format_python_objects(classes: Mapping[str, str]) -> str:
    """Return a phrase like `given in Python as objects: model (notebook.Mine)`.

    Args:
        classes: the class names in the plan, keyed by role.
    """
    return (
        "given in Python as objects: "
        f"{', '.join(f'{role} ({kind})' for role, kind in classes.items())}"
    )


def check_python_objects_given(classes: Mapping[str, str], objects: Mapping[str, Any]) -> None:
    """Raise AuditError if the plan names an object's class but the object is missing.

    The objects are missing if the plan is read from a folder.

    Args:
        classes: the plan's class names, keyed by role.
    """
    if set(classes) - set(objects):
        raise AuditError(
            f"expected what this run was started with, {format_python_objects(classes)}: no folder "
            "contains it; call audit() with it again, into a new folder"
        )


def list_unregistered_plugins(
    files: Sequence[str], attacks: Sequence[Any], defenses: Sequence[Any]
) -> dict[str, Attack | Defense]:
    """Return the plug-in objects whose classes are not registered, keyed by role.

    Names of plug-ins, and objects of registered classes, are left out. Raise AuditError if a
    registered class has the same name as the object, or if the object's name or options cannot be
    recorded.

    Args:
        files: paths of plug-in files.
        attacks: names or objects of attacks.
        defenses: names or objects of defenses.
    """
    for path in files:
        registry.load_plugin_file(Path(path))
    known: Mapping[str, Mapping[str, Any]] = {
        "attack": registry.list_methods(),
        "defense": registry.list_defenses(),
    }
    unregistered = {}
    for kind, items in {"attack": attacks, "defense": defenses}.items():
        for item in items:
            # `is`: a subclass with the same name would be rebuilt as its base.
            if isinstance(item, str) or type(item) is known[kind].get(item.name):
                continue
            if item.name in known[kind]:
                raise AuditError(
                    f"expected a name for the {kind} {name_python_class(item)} other than "
                    f"{item.name!r}, which is {known[kind][item.name].__module__}'s"
                )
            _check_recordable(item)
            unregistered[f"{kind} {item.name}"] = item
    return unregistered


def _check_recordable(plugin: Any) -> None:
    """Raise AuditError if the plug-in's options cannot be recorded.

    Also raise AuditError if the plug-in's name is not a valid file name.
    """
    registry.check_plugin_name(plugin.name)
    for option in dataclasses.fields(plugin):
        try:
            json.dumps(to_json(getattr(plugin, option.name)))
        except (TypeError, ValueError):
            raise AuditError(
                f"expected options of {plugin.name} that a record can hold (numbers, text, true or "
                f"false), got {option.name}={getattr(plugin, option.name)!r}"
            ) from None


@dataclass(frozen=True)
class PluginSelection:
    """Plug-ins of a plan.

    Args:
        methods: attacks and probes in the plan's order.
        rows: targets besides the undefended model: each defense, followed by its controls.
        settings: access settings, from the narrowest access to the widest.
        around: for each unlearned model, the target names of the model and its baselines, keyed by
            role.
    """

    methods: tuple[Attack | Probe, ...]
    rows: tuple[ShownRow, ...]
    settings: tuple[Setting, ...]
    around: tuple[UnlearnedModel, ...] = ()

    @property
    def methods_by_name(self) -> dict[str, Attack | Probe]:
        return {method.name: method for method in self.methods}

    @property
    def attacks(self) -> tuple[Attack, ...]:
        return tuple(method for method in self.methods if isinstance(method, Attack))

    def list_defense_attacks(self, defense: Defense | None) -> tuple[Attack, ...]:
        """List the attacks on the target with this defense; if None, on the undefended target."""
        return tuple(
            attack for attack in self.attacks if not explain_skipped_method(attack, defense)
        )

    @property
    def own_methods(self) -> tuple[str, ...]:
        """Names of the user's own attacks and probes.

        Their metrics may be missing from the metric table.
        """
        names = []
        for method in self.methods:
            if not type(method).__module__.startswith("auditor."):
                names.append(method.name)
        return tuple(names)

    @property
    def reference_models_asked_by_probes(self) -> tuple[str, ...]:
        """Values of the option `references` of the run's probes, without duplicates.

        Each names further reference models, besides the one that all attacks use.
        """
        reference_names: dict[str, None] = {}
        for method in self.methods:
            if isinstance(method, Probe) and (names := method.wanted_reference_models()):
                reference_names[names] = None
        return tuple(reference_names)

    @property
    def longest_soft_prompt_row_count(self) -> int:
        """Number of embedding vectors in the longest soft prompt that an attack tunes."""
        return max((attack.soft_prompt_rows() for attack in self.attacks), default=0)

    def list_target_settings(self, companion: bool) -> tuple[Setting, ...]:
        """Return the access settings in which a target is attacked.

        Args:
            companion: whether the target is a control, a model that serves only to explain a
                defense. It is attacked only with the widest access.
        """
        if companion:
            return self.settings[-1:]
        return self.settings

    def list_cell_keys(self) -> list[CellKey]:
        """List the run's cells (target, setting, attack or probe) in order."""
        settings_by_target = {UNDEFENDED: self.settings}
        for row in self.rows:
            settings_by_target[row.name] = self.list_target_settings(row.companion)
        keys = []
        for target, settings in settings_by_target.items():
            for setting in settings:
                for method in self.methods:
                    keys.append(CellKey(target, setting.name, method.name))
        return keys


def explain_skipped_method(method: Attack | Probe, defense: Defense | None) -> str:
    """Return why this attack or probe skips targets with this defense; "" if it runs."""
    reads = defense is not None and "records" in defense.needs
    if reads and isinstance(method, Attack) and method.of_learnt:
        return (
            "needs a model that was trained on the data: this one reads records only when it is "
            "queried about them"
        )
    return ""


def select_plugins(site: Site) -> PluginSelection:
    """Build and check the plug-ins of the site's plan before models are loaded.

    The site's options change to what the plug-ins need. Raise AuditError if an object that the plan
    needs is missing.
    """
    plan = site.plan
    # Load files first: names and options below may come from them.
    for path in plan.plugin:
        registry.load_plugin_file(Path(path))
    check_python_objects_given(plan.objects, site.objects)
    site.check_plan_model_is_obtainable(plan.list_changed_fields(PROVIDED | PLACED))
    check_plan_allows_submission(plan.output.submission, plan.data, plan.attacks)
    methods = _build_methods(site)
    choices, known = plan.defenses, registry.list_defenses()
    defenses: list[Defense] = _build_plugins(
        "defense",
        choices.defense,
        choices.defense_options,
        known,
        site.default_defense_options,
        site.objects,
    )
    for defense in defenses:
        site.refuse_unservable_defense(defense)

    def can_be_shown(control: Defense) -> bool:
        return choices.controls and not (
            site.missing_input_phrase(control) or site.is_control_the_undefended_model(control)
        )

    # Set the precision before loading any model.
    if choices.relearn is not None or any(plugin.float32 for plugin in (*methods, *defenses)):
        site.loading = site.loading.resolve_auto_dtype()
    settings = tuple(
        setting for name, setting in SETTINGS.items() if plan.attacks.setting in (name, "both")
    )
    controls = {}
    for method in methods:
        if isinstance(method, Attack) and method.control:
            controls[method.control] = known[method.control]()
    unlearning_rows, models = shown_rows.list_companion_rows(
        plan.target, plan.defenses, plan.data.forget, defenses
    )
    rows = (
        *shown_rows.list_defense_rows(defenses, can_be_shown, [*controls.values()]),
        *unlearning_rows,
    )
    all_rows = (*rows, *list_form_rows(plan.target, rows))
    selection = PluginSelection(tuple(methods), all_rows, settings, models)
    site.soft_prompt_rows = selection.longest_soft_prompt_row_count
    return selection


def _build_methods(site: Site) -> list[Attack | Probe]:
    plan = site.plan.attacks
    known = registry.list_methods()
    methods: list[Attack | Probe] = _build_plugins(
        "attack",
        plan.attack,
        plan.attack_options,
        known,
        _default_attack_options(site, known),
        site.objects,
    )
    if plan.samples is not None and not any(method.draws_samples for method in methods):
        names = ", ".join(dict.fromkeys(plan.attack))
        raise AuditError(f"expected an attack that draws samples with --samples, got {names}")
    _note_options_without_distributions(site, methods)
    for method in methods:
        if builtin := sorted(filter(is_builtin_metric, method.metrics)):
            raise AuditError(
                f"expected names for the metrics of {method.name} other than {', '.join(builtin)}: "
                "they are taken"
            )
        if site.plan.is_canary_only and method.of == "secrets":
            probes = registry.list_probes().items()
            alternatives = (name for name, probe in probes if probe.of in ("canaries", "coins"))
            raise AuditError(
                f"--attack {method.name} attacks records: give --data; only --canaries is for "
                f"{' or '.join(alternatives)}"
            )
    return methods


def _default_attack_options(
    site: Site, known: Mapping[str, type[Attack | Probe]]
) -> dict[str, dict[str, Any]]:
    """Return the default options of attacks and probes, keyed by name.

    Some defaults are chosen for the audit's models and data. An attack or probe may also declare
    defaults for an audit without a reference model, and for a model without next-token
    distributions. `--samples` overrides these, and the user's options override all of them.

    Args:
        known: classes of attacks and probes, keyed by name.
    """
    defaults = {}
    for name, kind in known.items():
        options = dict(site.default_attack_options.get(name, {}))
        if not site.names_reference_model:
            options |= kind.without_reference
        if site.is_model_asked_over_network:
            options |= kind.without_distributions
        if site.plan.attacks.samples is not None and "samples" in get_option_defaults(kind):
            options["samples"] = site.plan.attacks.samples
        defaults[name] = options
    return defaults


def _note_options_without_distributions(site: Site, methods: Sequence[Attack | Probe]) -> None:
    """Announce each option whose default differs because an API gives incomplete distributions."""
    if not site.is_model_asked_over_network:
        return
    for method in methods:
        for option, value in method.without_distributions.items():
            if option not in site.plan.attacks.attack_options.get(method.name, {}):
                site.reporter.announce(
                    f"{method.name}: {option}={value}, because APIs give no whole distributions "
                    f"(-A {method.name}.{option}= chooses another)"
                )


def _build_plugins(
    kind: str,
    names: Sequence[str],
    options: Options,
    known: Mapping[str, type],
    defaults: Mapping[str, Mapping[str, Any]],
    objects: Mapping[str, Any],
) -> list[Any]:
    """Build each named plug-in from default options and the user's options.

    An object in `objects` is used unchanged. Raise AuditError for an option that none has.

    Args:
        kind: kind of plug-in, for error messages.
        names: names of the plug-ins.
        options: the user's options, keyed by plug-in; those without a plug-in name have the key "".
        known: the registered classes, keyed by name.
        defaults: default options, keyed by plug-in.
        objects: Python objects, keyed by role.
    """
    chosen: list[Any] = []
    fields: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        plugin = objects.get(f"{kind} {name}")
        if plugin is None:
            option_names = get_option_defaults(known[name]) if name in known else {}
            values = merge_plugin_options(name, options, defaults.get(name, {}), option_names)
            plugin = build_plugin(kind, known, name, values)
        chosen.append(plugin)
        fields[name] = list(get_option_defaults(type(plugin)))
    refuse_unused_options(f"-{kind[0].upper()}", options, fields)
    return chosen

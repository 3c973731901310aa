"""Read the recipe, default options and mitigation of a plan's built-in lab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from auditor.benchmarks.lab.lab import REFERENCES, Lab
from auditor.benchmarks.lab.lab_recipe import BaseLabRecipe
from auditor.benchmarks.lab.real_lab import RealLab
from auditor.core.errors import AuditError, make_unknown_name_error
from auditor.core.jsonable import from_json, to_json
from auditor.core.plan import Plan
from auditor.core.plan_parts import SMALL, TargetPlan
from auditor.plugins import registry
from auditor.plugins.options import build_plugin
from auditor.plugins.trainer import Trainer
from auditor.training.variants import Variant

LABS: Mapping[str, type[Lab]] = {SMALL: Lab, "smollm2": RealLab}  # by `--lab`
# number of canaries in the lab of an epsilon audit: they can prove an epsilon above 5
AUDIT_CANARIES = 1000


def choose_lab_defaults(
    lab: type[Lab], recipe: BaseLabRecipe, attacks: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return the default options of each defense for this lab's size, keyed by defense.

    Some defenses train like the target, except for one option. They get the target's training
    options as defaults. With the options, trainings include the canaries that `attacks` need.
    """
    defaults = {}
    for name, options in lab.defense_defaults.items():
        defaults[name] = dict(options)
    for name, kind in registry.list_trainers().items():
        if issubclass(kind, Variant):
            defaults[name] = recipe.target_training_options | defaults.get(name, {})
    for attack in attacks:
        for name, planted in lab.planted_for.get(attack, {}).items():
            defaults[name] |= planted
    return defaults


def build_mitigation_trainer(target: TargetPlan, recipe: BaseLabRecipe) -> Trainer | None:
    """Build the trainer of the plan's mitigation for the lab's target, or return None.

    A mitigation is a training that leaks less. Raise AuditError if the trainer does not make a
    single model from the lab's records.

    Args:
        target: the plan's fields about the target, with the mitigation's name and options.
        recipe: recipe of the lab.
    """
    options = dict(target.mitigation)
    if not options:
        return None
    name = options.pop("method", None)
    if not isinstance(name, str):
        raise AuditError(
            f"expected mitigation with a method ({', '.join(registry.list_mitigations())}), got "
            f"{name!r}"
        )
    defaults = choose_lab_defaults(LABS[target.lab], recipe).get(name, {})
    trainer: Trainer = build_plugin(
        "mitigation", registry.list_mitigations(), name, {**defaults, **options}
    )
    return trainer


def parse_reference_model_count(text: str) -> int:
    """Parse the option `-A references=`, the number of reference models to train in the lab.

    Raise AuditError for an invalid number.
    """
    least, most = REFERENCES
    if not text.isdecimal() or not least <= int(text) <= most:
        raise AuditError(
            f"expected -A references= in the lab as a number of models to train, from {least} to "
            f"{most}, got {text!r}"
        )
    return int(text)


def build_lab_recipe(plan: Plan) -> BaseLabRecipe:
    """Build the recipe of the plan's lab. Raise AuditError for an unknown field.

    For an epsilon audit, the lab inserts audit canaries into the training data of all models; a
    coin decides for each canary. If the lab's seed is "run", the run's seed also decides the texts
    and the trained models.
    """
    fields: dict[str, Any] = dict(plan.target.lab_recipe)
    if fields.get("seed") == "run":
        fields["seed"] = plan.seed
    probes = registry.list_probes()
    if any(probes[name].of == "coins" for name in plan.attacks.attack if name in probes):
        # In this order, so that the user's number wins.
        fields = {"audit_canaries": AUDIT_CANARIES, **fields}
    lengths = {"prefix_length": plan.data.prefix_length, "suffix_length": plan.data.suffix_length}
    fields |= {name: length for name, length in lengths.items() if length is not None}
    kind = LABS[plan.target.lab].recipe_kind
    default = to_json(kind())
    for name in fields:
        if name not in default:
            raise make_unknown_name_error("field of lab_recipe:", name, default)
    recipe: BaseLabRecipe = from_json(kind, {**default, **fields}, "lab_recipe")
    recipe.check()
    return recipe

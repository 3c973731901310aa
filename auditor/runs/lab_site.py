"""Make the models and data of a lab audit by the recipe of the built-in lab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar

from auditor.benchmarks.lab.lab import REFERENCES, Lab
from auditor.benchmarks.lab.lab_recipe import BaseLabRecipe
from auditor.benchmarks.lab.real_lab import RealLab
from auditor.core.errors import AuditError, make_unknown_name_error
from auditor.core.jsonable import from_json, to_json
from auditor.core.plan import Plan
from auditor.core.plan_parts import SMALL, TargetPlan
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.models.references import ReferenceModels
from auditor.plugins import registry
from auditor.plugins.defense import Defense, TrainedModel
from auditor.plugins.options import build_plugin
from auditor.plugins.trainer import Trainer
from auditor.runs.reporter import Reporter
from auditor.runs.shown_rows import UnlearningBaseline
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from auditor.training.variants import Variant

LABS: Mapping[str, type[Lab]] = {SMALL: Lab, "smollm2": RealLab}  # by `--lab`
# number of canaries in the lab of an epsilon audit: they can prove an epsilon above 5
AUDIT_CANARIES = 1000


class LabSite(Site):
    """Models and data of an audit in the built-in lab. Each is made on first use.

    Raise AuditError if the plan has an unknown recipe field.
    """

    trains_on_demand: ClassVar[bool] = True
    relearn_rate: ClassVar[float] = 1e-4

    def __init__(self, plan: Plan, *more: Any) -> None:
        super().__init__(plan, *more)
        self.recipe, self.kind = build_lab_recipe(plan), LABS[plan.target.lab]
        # The lab splits its data by its own seed, not by the seed of the run. The recipe depends on
        # the attacks too.
        del self.subject["seed"]
        self.subject["lab_recipe"] = to_json(self.recipe)
        # Refuse a bad mitigation now, not when it is trained.
        self.mitigation = build_mitigation_trainer(plan.target, self.recipe)

    @property
    def default_attack_options(self) -> Mapping[str, Mapping[str, Any]]:
        return self.kind.attack_defaults

    def check_plan_model_is_obtainable(self, fields: Sequence[str]) -> None:
        self.kind.read_package_versions()  # raises without them

    @property
    def names_reference_model(self) -> bool:
        return True

    def missing_input_phrase(self, defense: Defense) -> str:
        return ""

    def refuse_unservable_defense(self, defense: Defense) -> None:
        pass

    # --- parts of the lab, each trained once and then cached ---

    @property
    def lab(self) -> Lab:
        make = partial(
            self.kind,
            *(self.recipe, None, self.reporter.progress, self.data_plan.limit),
            makes=self.may_train,
        )
        return self.shared.get_or_make("lab", (self.recipe, self.data_plan.limit), make)

    def load_benchmark_shared_by_runs(self) -> Lab:
        return self.lab

    @cached_property
    def public_model(self) -> LanguageModel:
        return self.lab.lab_public_model()

    @cached_property
    def reference_model(self) -> LanguageModel:
        return self.public_model

    def load_site_references(self, spec: str) -> ReferenceModels:
        """Train and return reference models. `spec` is the number of models."""
        return self.lab.reference_models(parse_reference_model_count(spec))

    @cached_property
    def model(self) -> LanguageModel:
        if self.mitigated_model is not None:
            return self.mitigated_model.model
        return self.lab.lab_target_model()

    @cached_property
    def mitigated_model(self) -> TrainedModel | None:
        """Model trained by the plan's mitigation. It is attacked instead of the lab's target.

        None if the plan has no mitigation.
        """
        if self.mitigation is None:
            return None
        return self.lab.model_trained_by_trainer(self.mitigation)

    @property
    def undefended_trained_model(self) -> TrainedModel:
        return replace(self.mitigated_model or TrainedModel(self.model, None), told=())

    def notes_on_models(self) -> tuple[str, ...]:
        if self.mitigated_model is None:
            return ()
        return self.mitigated_model.told

    @property
    def undefended_model_description(self) -> str:
        if self.mitigation:
            instead = f", by {self.mitigation.name} instead of plainly"
        else:
            instead = ""
        return f"the lab's target: the public model fine-tuned on private text{instead}"

    def model_before_or_retrained(self, kind: str) -> LanguageModel:
        return self.lab.model_retrained_without_forgotten()

    # --- parts of defenses ---

    @property
    def default_defense_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Default options of the lab's defenses, keyed by name.

        With these options, trainings include the canaries that the plan's probes need.
        """
        defaults = choose_lab_defaults(self.kind, self.recipe)
        for attack in self.attack_plan.attack:
            for name, options in self.kind.planted_for.get(attack, {}).items():
                defaults[name] |= options
        return defaults

    def is_control_the_undefended_model(self, control: Defense) -> bool:
        return "whole" in control.needs and self.recipe.is_target_trained_like_members

    def ensemble_served_by_defense(self, defense: Defense) -> Ensemble:
        return self.lab.ensemble(defense.required_member_count)

    def model_trained_by_defense(self, defense: Defense) -> TrainedModel:
        assert isinstance(defense, Trainer)  # only trainers need the input "trained"
        return self.lab.model_trained_by_trainer(defense)

    def control_adapter_of_ensemble(self, defense: Defense) -> LanguageModel:
        return self.lab.model_with_adapter_on_all_records()

    def training_seconds(self, defense: Defense | None, building: float) -> float:
        if isinstance(defense, UnlearningBaseline):
            return building
        seconds = self.lab.parts.seconds
        # Includes the public model, the base of all other models.
        trainer = self.mitigation if defense is None else defense
        if isinstance(trainer, Trainer):
            return seconds["public"] + self.lab.training_seconds_of_trainer(trainer)
        if defense is None:
            return seconds["public"] + seconds["target"]
        if self.recipe.is_target_trained_like_members:
            single_adapter = "target"
        else:
            single_adapter = "whole"
        parts = {"public": "public", "ensemble": "ensemble", "whole": single_adapter}
        return sum(seconds[part] for need, part in parts.items() if need in defense.needs)


def make_site(
    plan: Plan,
    reporter: Reporter | None = None,
    shared: SweepCache | None = None,
    live: Mapping[str, LanguageModel] = MappingProxyType({}),
) -> Site:
    """Return the models and data of the plan's audit.

    Raise AuditError for an invalid lab.

    Args:
        plan: the plan.
        reporter: receiver of progress messages; None for no messages.
        shared: cache of the runs of a sweep; None for a single run.
        live: models in memory, keyed by role (model, public, reference), which replace the plan's.
    """
    kind = LabSite if plan.target.uses_builtin_lab else Site
    return kind(plan, reporter, shared, live)


def choose_lab_defaults(lab: type[Lab], recipe: BaseLabRecipe) -> dict[str, dict[str, Any]]:
    """Return the default options of each defense for this lab's size, keyed by defense.

    Some defenses train like the target, except for one option. They get the target's training
    options as defaults.
    """
    defaults = {}
    for name, options in lab.defense_defaults.items():
        defaults[name] = dict(options)
    for name, kind in registry.list_trainers().items():
        if issubclass(kind, Variant):
            defaults[name] = recipe.target_training_options | defaults.get(name, {})
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

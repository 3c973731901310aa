"""The built-in lab as the place of an audit: everything is made on the spot, from its recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar

from auditor.benchmarks.lab.lab import REFERENCES, Lab
from auditor.benchmarks.lab.lab_recipe import BaseLabRecipe
from auditor.benchmarks.lab.real_lab import RealLab
from auditor.core.errors import AuditError, unknown_name_error
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
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from auditor.runs.unlearning import UnlearningBaseline
from auditor.training.variants import Variant

LABS: Mapping[str, type[Lab]] = {SMALL: Lab, "smollm2": RealLab}  # by `--lab`
# of the lab that an audit of epsilon has: they can prove an epsilon of more than 5
AUDIT_CANARIES = 1000


class LabSite(Site):
    """The lab that is asked for. Raises AuditError for a field that a lab does not have."""

    trains_on_demand: ClassVar[bool] = True
    relearn_rate: ClassVar[float] = 1e-4

    def __init__(
        self,
        plan: Plan,
        reporter: Reporter | None = None,
        shared: SweepCache | None = None,
        live: Mapping[str, LanguageModel] = MappingProxyType({}),
    ) -> None:
        super().__init__(plan, reporter, shared, live)
        self.recipe, self.kind = build_lab_recipe(plan), LABS[plan.target.lab]
        # The seed of the run splits no data here: the lab has its own. The recipe follows from the
        # attacks too.
        del self.subject["seed"]
        self.subject["lab_recipe"] = to_json(self.recipe)
        # refused now, not when it is trained
        self.mitigation = build_mitigation_trainer(plan.target, self.recipe)

    @property
    def default_attack_options(self) -> Mapping[str, Mapping[str, Any]]:
        return self.kind.attack_defaults

    def check_plan_model_is_obtainable(self, given: Sequence[str]) -> None:
        self.kind.check_packages_installed()

    @property
    def names_reference_model(self) -> bool:
        return True

    def missing_input_phrase(self, defense: Defense) -> str:
        return ""

    def refuse_unservable_defense(self, defense: Defense) -> None:
        pass

    # --- its parts, each trained once and then kept ---

    @property
    def lab(self) -> Lab:
        make = partial(
            self.kind,
            *(self.recipe, None, self.reporter.progress, self.data_plan.limit),
            makes=self.may_train,
        )
        return self.shared.get_or_make("lab", self.lab_cache_key, make)

    @property
    def lab_cache_key(self) -> tuple[BaseLabRecipe, int | None]:
        return self.recipe, self.data_plan.limit

    def load_benchmark_shared_by_runs(self) -> Lab:
        return self.lab

    @cached_property
    def public_model(self) -> LanguageModel:
        return self.lab.lab_public_model()

    @cached_property
    def reference_model(self) -> LanguageModel:
        return self.public_model

    def load_reference_models_of_site(self, asked: str) -> ReferenceModels:
        """Trained here, as many as `asked` says."""
        count = parse_reference_model_count(asked)
        return self.shared.get_or_make(
            "references", (self.lab_cache_key, count), lambda: self.lab.reference_models(count)
        )

    @cached_property
    def model(self) -> LanguageModel:
        if self.mitigated_model is not None:
            return self.mitigated_model.model
        return self.lab.lab_target_model()

    @cached_property
    def mitigated_model(self) -> TrainedModel | None:
        """The model that the plan's mitigation trained in the target's place; None without a
        mitigation."""
        if (trainer := self.mitigation) is None:
            return None
        return self.shared.get_or_make(
            "mitigated", self.subject, lambda: self.lab.model_trained_by_trainer(trainer)
        )

    @property
    def undefended_trained_model(self) -> TrainedModel:
        return replace(self.mitigated_model or TrainedModel(self.model, None), told=())

    def notes_on_models(self) -> tuple[str, ...]:
        return () if self.mitigated_model is None else self.mitigated_model.told

    @property
    def undefended_model_description(self) -> str:
        instead = f", by {self.mitigation.name} instead of plainly" if self.mitigation else ""
        return f"the lab's target: the public model fine-tuned on private text{instead}"

    def model_before_or_retrained(self, kind: str) -> LanguageModel:
        return self.lab.model_retrained_without_forgotten()

    # --- what defenses are made of ---

    @property
    def default_defense_options(self) -> Mapping[str, Mapping[str, Any]]:
        """The lab's own; where a probe asks about a training, with the canaries that are planted in
        it for that."""
        own = default_options_of_lab_defenses(self.kind, self.recipe)
        for attack in self.attack_plan.attack:
            for name, options in self.kind.planted_for.get(attack, {}).items():
                own[name] |= options
        return own

    def is_control_the_undefended_model(self, control: Defense) -> bool:
        return "whole" in control.needs and self.recipe.is_target_trained_like_members

    def ensemble_served_by_defense(self, defense: Defense) -> Ensemble:
        key = (self.subject, defense.required_member_count)
        return self.shared.get_or_make(
            "ensemble", key, lambda: self.lab.ensemble(defense.required_member_count)
        )

    def model_trained_by_defense(self, defense: Defense) -> TrainedModel:
        assert isinstance(defense, Trainer)  # "trained" is a need of theirs alone
        return self.shared.get_or_make(
            "trained",
            (self.subject, defense),
            lambda: self.lab.model_trained_by_trainer(defense),
        )

    def control_adapter_of_ensemble(self, defense: Defense) -> LanguageModel:
        return self.shared.get_or_make(
            "whole", self.subject, self.lab.model_with_adapter_on_all_records
        )

    def training_seconds(self, defense: Defense | None, building: float) -> float:
        if isinstance(defense, UnlearningBaseline):
            return building
        seconds = self.lab.parts.seconds
        if defense is None:
            instead = self.mitigation
            # With the public model, which all others stand on.
            return seconds["public"] + (
                self.lab.training_seconds_of_trainer(instead) if instead else seconds["target"]
            )
        if isinstance(defense, Trainer):
            return seconds["public"] + self.lab.training_seconds_of_trainer(defense)
        whole = "target" if self.recipe.is_target_trained_like_members else "whole"
        parts = {"public": "public", "ensemble": "ensemble", "whole": whole}
        return sum(seconds[part] for need, part in parts.items() if need in defense.needs)


def make_site(
    plan: Plan,
    reporter: Reporter | None = None,
    shared: SweepCache | None = None,
    live: Mapping[str, LanguageModel] = MappingProxyType({}),
) -> Site:
    """Return the place that the plan names.

    live: models in memory, by role. Raises AuditError for a lab that cannot be.
    """
    kind = LabSite if plan.target.uses_builtin_lab else Site
    return kind(plan, reporter, shared, live)


def default_options_of_lab_defenses(
    lab: type[Lab], recipe: BaseLabRecipe
) -> dict[str, dict[str, Any]]:
    """Options of defenses, sized to a lab; of a variant of the target's training, the rest as in
    the target's own."""
    own = {name: dict(options) for name, options in lab.defense_defaults.items()}
    for name, kind in registry.list_trainers().items():
        if issubclass(kind, Variant):
            own[name] = recipe.target_training_options | own.get(name, {})
    return own


def build_mitigation_trainer(target: TargetPlan, recipe: BaseLabRecipe) -> Trainer | None:
    """The training in the place of that of the lab's target; None: the plan names none.

    Raises AuditError for one that makes no single model of the lab's records.
    """
    asked = dict(target.mitigation)
    if not asked:
        return None
    name = asked.pop("method", None)
    if not isinstance(name, str):
        raise AuditError(
            f"expected mitigation with a method ({', '.join(registry.list_mitigations())}), got "
            f"{name!r}"
        )
    defaults = default_options_of_lab_defenses(LABS[target.lab], recipe).get(name, {})
    trainer: Trainer = build_plugin(
        "mitigation", registry.list_mitigations(), name, {**defaults, **asked}
    )
    return trainer


def parse_reference_model_count(asked: str) -> int:
    """How many reference models the lab is to train. Raises AuditError for what is no number that
    it can."""
    least, most = REFERENCES
    if not asked.isdecimal() or not least <= int(asked) <= most:
        raise AuditError(
            f"expected -A references= in the lab as a number of models to train, from {least} to "
            f"{most}, got {asked!r}"
        )
    return int(asked)


def build_lab_recipe(plan: Plan) -> BaseLabRecipe:
    """What lab is asked for. Raises AuditError for a field that a lab does not have.

    Whoever asks about coins has a lab with canaries of an audit in it, all models trained with
    them; nobody else. A lab whose seed is "run" has that of the run: over several seeds other
    texts, and models trained anew.
    """
    given: dict[str, Any] = dict(plan.target.lab_recipe)
    if given.get("seed") == "run":
        given["seed"] = plan.seed
    known = registry.list_probes()
    if any(known[name].of == "coins" for name in plan.attacks.attack if name in known):
        # In this order: a number that the user gives wins.
        given = {"audit_canaries": AUDIT_CANARIES, **given}
    lengths = {"prefix_length": plan.data.prefix_length, "suffix_length": plan.data.suffix_length}
    given |= {name: length for name, length in lengths.items() if length is not None}
    kind = LABS[plan.target.lab].recipe_kind
    default = to_json(kind())
    for name in given:
        if name not in default:
            raise unknown_name_error("field of lab_recipe:", name, default)
    recipe: BaseLabRecipe = from_json(kind, {**default, **given}, "lab_recipe")
    recipe.check()
    return recipe

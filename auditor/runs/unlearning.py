"""List the baselines of an unlearned model, which are attacked like the unlearned model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from auditor.core.errors import AuditError
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan_parts import DefensePlan, TargetPlan
from auditor.models.base import LanguageModel
from auditor.plugins import registry
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.options import get_plugin_title
from auditor.runs.shown_rows import ShownRow
from auditor.statistics.unlearning import AFTER, BEFORE, RELEARNED, RETRAINED, RETRAINED_RELEARNED
from auditor.training.unlearning import UnlearningTrainer


@dataclass(frozen=True)
class UnlearningBaseline(Defense):
    """Base class of models that are compared with an unlearned model.

    A run lists these models among its defenses, but they defend nothing.
    """

    needs = ("beside",)

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.beside is not None  # the run provides what is needed
        return scenario.beside


@dataclass(frozen=True)
class BeforeUnlearning(UnlearningBaseline):
    """Model before unlearning."""

    name = "before"
    title = "Before unlearning"


@dataclass(frozen=True)
class RetrainedBaseline(UnlearningBaseline):
    """Model trained without the records to forget.

    relearned: whether the model was then trained for some more steps, like the relearned model.
    """

    name = "retrained"
    title = "Never saw them"
    relearned: bool = False


@dataclass(frozen=True)
class RelearnedBaseline(UnlearningBaseline):
    """Unlearned model after some more training steps, on records that were not to be forgotten.

    of: the unlearning defense; None if the attacked model is the unlearned model.
    """

    name = "relearned"
    title = "Relearned"
    of: Defense | None = None


# rows of an unlearned model and its baselines, by role
UnlearnedModel = Mapping[str, str]


def list_companion_rows(
    target: TargetPlan, plan: DefensePlan, forget: str | None, defenses: Sequence[Defense]
) -> tuple[list[ShownRow], tuple[UnlearnedModel, ...]]:
    """Return the baselines of this run's unlearned models.

    Then return, for each unlearned model, the target names of its baselines by role. Raise
    AuditError for flags that need an unlearned model, and for conflicting flags.
    """
    unlearning = []
    for defense in defenses:
        if isinstance(defense, UnlearningTrainer):
            unlearning.append(defense)
    if target.before is not None and unlearning:
        raise AuditError(
            "--before says that --model is the unlearned model, but --defense "
            f"{unlearning[0].name} is one too: give --before, or that model as --model"
        )
    if unlearning and not target.uses_builtin_lab and forget is None:
        raise AuditError(
            f"expected --forget FILE with --defense {unlearning[0].name}: the records that it was "
            "to forget; got none"
        )
    if not unlearning and target.before is None:
        for name, value in (("forget", forget), ("relearn", plan.relearn)):
            if value is not None:
                if target.uses_builtin_lab:
                    before = ""
                else:
                    before = "--before MODEL, or "
                known = registry.list_defenses().items()
                names = " or ".join(
                    name for name, kind in known if issubclass(kind, UnlearningTrainer)
                )
                raise AuditError(
                    f"--{name} needs an unlearned model: expected {before}--defense {names}, got "
                    "neither"
                )
        return [], ()
    rows = list[ShownRow]()
    models_by_role = list[UnlearnedModel]()
    # The rows of a retrained model serve all models that forget the same records.
    shared = _name_retrained_rows(target, plan)
    if target.before is not None:
        rows.append(_build_companion_row(BeforeUnlearning()))
        models = {BEFORE: BeforeUnlearning.name, AFTER: UNDEFENDED}
        if plan.relearn:
            rows.append(_build_companion_row(RelearnedBaseline()))
            models[RELEARNED] = RelearnedBaseline.name
        models_by_role.append({**models, **shared})
    for defense in unlearning:
        models = {BEFORE: UNDEFENDED, AFTER: defense.name}
        if plan.relearn:
            name = f"{defense.name}-relearned"
            title = f"{get_plugin_title(type(defense))}, relearned"
            rows.append(ShownRow(name, title, RelearnedBaseline(defense), True))
            models[RELEARNED] = name
        models_by_role.append({**models, **shared})
    never = {RETRAINED: RetrainedBaseline(), RETRAINED_RELEARNED: RetrainedBaseline(relearned=True)}
    titles = {
        RETRAINED: RetrainedBaseline.title,
        RETRAINED_RELEARNED: f"{RetrainedBaseline.title}, relearned",
    }
    rows += [ShownRow(shared[role], titles[role], never[role], True) for role in shared]
    return rows, tuple(models_by_role)


def _name_retrained_rows(target: TargetPlan, plan: DefensePlan) -> dict[str, str]:
    """Return, by role, the target names of models retrained without the records to forget.

    These are the lab's controls, or a model that the user names.
    """
    if not (plan.controls if target.uses_builtin_lab else target.retrained):
        return {}
    return {
        RETRAINED: "retrained",
        **({RETRAINED_RELEARNED: "retrained-relearned"} if plan.relearn else {}),
    }


def _build_companion_row(defense: Defense) -> ShownRow:
    return ShownRow(defense.name, get_plugin_title(type(defense)), defense, True)

"""An audit of unlearning: which models stand beside one that was to forget, and what is left of the
records in each.

Knows rows, and what they found out about each secret; no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    """Base of the models that stand beside one that was to forget. No defenses: they share the rows
    of those."""

    needs: ClassVar[tuple[str, ...]] = ("beside",)

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.beside is not None  # the run has seen to what is needed
        return scenario.beside


@dataclass(frozen=True)
class BeforeUnlearning(UnlearningBaseline):
    """The model before it was to forget."""

    name: ClassVar[str] = "before"
    title: ClassVar[str] = "Before unlearning"


@dataclass(frozen=True)
class RetrainedBaseline(UnlearningBaseline):
    """A model that never saw what was to be forgotten, trained on the rest.

    relearned: and some steps more, as what unlearning left.
    """

    name: ClassVar[str] = "retrained"
    title: ClassVar[str] = "Never saw them"
    relearned: bool = False


@dataclass(frozen=True)
class RelearnedBaseline(UnlearningBaseline):
    """What unlearning left, trained some steps more, on records that were not to be forgotten.

    of: the unlearning; None: the model that is attacked is what it left.
    """

    name: ClassVar[str] = "relearned"
    title: ClassVar[str] = "Relearned"
    of: Defense | None = None


# the rows of a model that was to forget and of those around it, by what each is
UnlearnedModel = Mapping[str, str]


def rows_beside_unlearned_models(
    target: TargetPlan, asked: DefensePlan, forget: str | None, defenses: Sequence[Defense]
) -> tuple[list[ShownRow], tuple[UnlearnedModel, ...]]:
    """The rows that stand beside the models of this run that were to forget. Raises AuditError for
    idle flags."""
    unlearning = [defense for defense in defenses if isinstance(defense, UnlearningTrainer)]
    if target.before is not None and unlearning:
        raise AuditError(
            "--before says that --model is what unlearning left, and --defense "
            f"{unlearning[0].name} is such a model too: give --before, or that model in its place "
            "as --model"
        )
    if unlearning and not target.uses_builtin_lab and forget is None:
        raise AuditError(
            f"expected --forget FILE with --defense {unlearning[0].name}: the records that it was "
            "to forget; got none"
        )
    if not unlearning and target.before is None:
        for name, given in (("forget", forget), ("relearn", asked.relearn)):
            if given is not None:
                before = "" if target.uses_builtin_lab else "--before MODEL, or "
                known = registry.list_defenses().items()
                names = " or ".join(
                    name for name, kind in known if issubclass(kind, UnlearningTrainer)
                )
                raise AuditError(
                    f"--{name} needs an unlearned model: expected {before}--defense {names}, got "
                    "neither"
                )
        return [], ()
    rows, found = list[ShownRow](), list[UnlearnedModel]()
    # Rows of one retrained model serve all models that were to forget the same records.
    shared = _names_of_retrained_rows(target, asked)
    if target.before is not None:
        rows.append(_companion_row(BeforeUnlearning()))
        models = {BEFORE: BeforeUnlearning.name, AFTER: UNDEFENDED}
        if asked.relearn:
            rows.append(_companion_row(RelearnedBaseline()))
            models[RELEARNED] = RelearnedBaseline.name
        found.append({**models, **shared})
    for defense in unlearning:
        models = {BEFORE: UNDEFENDED, AFTER: defense.name}
        if asked.relearn:
            name, title = (
                f"{defense.name}-relearned",
                f"{get_plugin_title(type(defense))}, relearned",
            )
            rows.append(ShownRow(name, title, RelearnedBaseline(defense), True))
            models[RELEARNED] = name
        found.append({**models, **shared})
    never = {RETRAINED: RetrainedBaseline(), RETRAINED_RELEARNED: RetrainedBaseline(relearned=True)}
    titles = {
        RETRAINED: RetrainedBaseline.title,
        RETRAINED_RELEARNED: f"{RetrainedBaseline.title}, relearned",
    }
    rows += [ShownRow(shared[role], titles[role], never[role], True) for role in shared]
    return rows, tuple(found)


def _names_of_retrained_rows(target: TargetPlan, asked: DefensePlan) -> dict[str, str]:
    """The names of the rows that never saw what was to be forgotten: in the lab a control, else
    where one was given."""
    if not (asked.controls if target.uses_builtin_lab else target.retrained):
        return {}
    return {
        RETRAINED: "retrained",
        **({RETRAINED_RELEARNED: "retrained-relearned"} if asked.relearn else {}),
    }


def _companion_row(defense: Defense) -> ShownRow:
    return ShownRow(defense.name, get_plugin_title(type(defense)), defense, True)

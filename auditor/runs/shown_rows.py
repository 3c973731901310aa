"""List the targets that a run shows: requested defenses, and the controls that explain them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from auditor.core.errors import AuditError
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan_parts import (
    DefensePlan,
    TargetPlan,
    name_deployed_form,
    split_model_name,
)
from auditor.models.base import LanguageModel
from auditor.plugins import registry
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.options import build_plugin, get_option_defaults, get_plugin_title
from auditor.statistics.unlearning import AFTER, BEFORE, RELEARNED, RETRAINED, RETRAINED_RELEARNED
from auditor.training.unlearning import UnlearningTrainer


@dataclass(frozen=True)
class ShownRow:
    """One target that a run shows, in addition to the undefended model.

    Args:
        name: name of the target.
        title: title in reports.
        defense: the defense, or a control.
        companion: whether the target is a control, which serves only to explain a defense.
    """

    name: str
    title: str
    defense: Defense
    companion: bool


def list_defense_rows(
    defenses: Sequence[Defense],
    is_available: Callable[[Defense], bool],
    others: Sequence[Defense],
) -> list[ShownRow]:
    """Return every defense, followed by the controls in its chain of causes.

    A control is a model with only some parts of the defense, which serves to explain the defense's
    effect. A control that several defenses share appears once.

    Args:
        defenses: the requested defenses.
        is_available: function that tests if a control is available and differs from the undefended
            target.
        others: controls that attacks need.
    """
    rows = list[ShownRow]()
    displayed = list(defenses)
    for defense in defenses:
        rows.append(ShownRow(defense.name, get_plugin_title(type(defense)), defense, False))
        for cause in defense.cause_chain():
            control = cause.row
            # `in` compares by value: frozen dataclasses with equal options are the same control.
            if control is None or not is_available(control) or control in displayed:
                continue
            displayed.append(control)
            names = {row.name for row in rows} | {item.name for item in defenses}
            is_unused = control.name not in names
            if is_unused:
                name = control.name
            else:
                name = f"{control.name}-of-{defense.name}"
            title = get_plugin_title(type(control)) + (
                "" if is_unused else f" (of {get_plugin_title(type(defense))})"
            )
            rows.append(ShownRow(name, title, control, True))
    extra_controls = (item for item in others if is_available(item) and item not in displayed)
    return [
        *rows,
        *(ShownRow(item.name, get_plugin_title(type(item)), item, True) for item in extra_controls),
    ]


def name_defense_row(rows: Sequence[ShownRow], defense: Defense) -> str:
    """Return the name of the target with this defense; "" if the run shows no such target.

    `rows` are the targets that the run shows.
    """
    return next((row.name for row in rows if row.defense == defense), "")


@dataclass(frozen=True)
class UnlearningBaseline(Defense):
    """Base class of models that are compared with an unlearned model.

    These models are listed among a run's defenses, but defend nothing.
    """

    needs = ("beside",)

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.beside is not None  # the run itself provides the inputs
        return scenario.beside


@dataclass(frozen=True)
class BeforeUnlearning(UnlearningBaseline):
    """Model before unlearning."""

    name = "before"
    title = "Before unlearning"


@dataclass(frozen=True)
class RetrainedBaseline(UnlearningBaseline):
    """Model trained without the records to forget.

    Args:
        relearned: whether this model was then trained for some more steps, in the same way as the
            unlearned model in `RelearnedBaseline`.
    """

    name = "retrained"
    title = "Retrained"
    relearned: bool = False


@dataclass(frozen=True)
class RelearnedBaseline(UnlearningBaseline):
    """Unlearned model that was trained for some more steps on records that it need not forget.

    Args:
        of: unlearning defense; None if the attacked model is itself the unlearned model.
    """

    name = "relearned"
    title = "Relearned"
    of: Defense | None = None


# Names of an unlearned model and its baselines, by role.
UnlearnedModel = Mapping[str, str]


def list_companion_rows(
    target: TargetPlan, plan: DefensePlan, forget: str | None, defenses: Sequence[Defense]
) -> tuple[list[ShownRow], tuple[UnlearnedModel, ...]]:
    """Return the targets that are baselines of this run's unlearned models.

    Args:
        target: the plan's fields about the attacked model.
        plan: the plan's fields about defenses.
        forget: file of the records to forget; None if not given.
        defenses: the requested defenses.

    Returns:
        The targets.
        For each unlearned model, the target names of the model and its baselines, keyed by role.

    Raises:
        AuditError: for conflicting flags, and for flags that need an unlearned model if there is
            none.
    """
    unlearning = []
    for defense in defenses:
        if isinstance(defense, UnlearningTrainer):
            unlearning.append(defense)
    _check_unlearning_flags(target, plan, forget, unlearning)
    rows = list[ShownRow]()
    models_by_role = list[UnlearnedModel]()
    # A retrained model is the baseline of all models that forget the same records.
    retrained: dict[str, ShownRow] = {}
    if unlearning or target.before is not None:
        retrained = _build_retrained_rows(target, plan)
    shared = {role: row.name for role, row in retrained.items()}
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
    return [*rows, *retrained.values()], tuple(models_by_role)


def _check_unlearning_flags(
    target: TargetPlan, plan: DefensePlan, forget: str | None, unlearning: Sequence[Defense]
) -> None:
    """Raise AuditError if flags conflict, or if they need an unlearned model and none is given.

    Args:
        unlearning: defenses that make an unlearned model.
    """
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
                before = "" if target.uses_builtin_lab else "--before MODEL, or "
                known = registry.list_defenses().items()
                names = " or ".join(
                    name for name, kind in known if issubclass(kind, UnlearningTrainer)
                )
                raise AuditError(
                    f"--{name} needs an unlearned model: expected {before}--defense {names}, got "
                    "neither"
                )


def _build_retrained_rows(target: TargetPlan, plan: DefensePlan) -> dict[str, ShownRow]:
    """Return the targets that were retrained without the records to forget, keyed by role.

    Return {} if the run has no such targets.
    """
    if not (plan.controls if target.uses_builtin_lab else target.retrained):
        return {}
    rows = {RETRAINED: _build_companion_row(RetrainedBaseline())}
    if plan.relearn:
        rows[RETRAINED_RELEARNED] = ShownRow(
            f"{RetrainedBaseline.name}-relearned",
            f"{RetrainedBaseline.title}, relearned",
            RetrainedBaseline(relearned=True),
            True,
        )
    return rows


def _build_companion_row(defense: Defense) -> ShownRow:
    return ShownRow(defense.name, get_plugin_title(type(defense)), defense, True)


@dataclass(frozen=True)
class NamedForm(UnlearningBaseline):
    """Separate model that the user names as a form of the attacked model.

    `place` is the model's folder, hub id or address.
    """

    name = "form"
    place: str = ""


def list_form_rows(target: TargetPlan, others: Sequence[ShownRow]) -> list[ShownRow]:
    """Return a target for each deployed form, in the order of `--forms`.

    A form is another copy of the attacked model, such as a quantised copy. Raise AuditError for an
    invalid form, or if two targets have the same name.

    Args:
        others: the other targets that the run shows.
    """
    rows = list[ShownRow]()
    names = {UNDEFENDED, *(row.name for row in others)}
    for form in target.forms:
        row = _parse_deployed_form_row(form)
        if target.uses_builtin_lab and isinstance(row.defense, NamedForm):
            raise AuditError(
                f"expected --model and --data with --forms {form}, which names a model, got the lab"
            )
        if row.name in names:
            raise AuditError(
                "expected each of --forms once, with a name that no other target has, got "
                f"{row.name!r} twice"
            )
        names.add(row.name)
        rows.append(row)
    return rows


def select_model_forms(forms: Sequence[str]) -> list[str]:
    """Return those forms that name separate models."""
    classes = _map_form_classes()
    return [form for form in forms if form.partition(":")[0] not in classes]


def _map_form_classes() -> dict[str, type[Defense]]:
    """Return the classes of forms built from the attacked model's weights, keyed by name."""
    return {name: kind for name, kind in registry.list_defenses().items() if kind.form}


def _parse_deployed_form_row(form: str) -> ShownRow:
    kind, colon, value = form.partition(":")
    if kind in (forms := _map_form_classes()):
        form_class = forms[kind]
        # KIND:VALUE sets the first option
        option = next(iter(get_option_defaults(form_class)), None)
        if colon and option is None:
            raise AuditError(f"--forms {kind} takes no value, got {form!r}")
        defense = build_plugin("form", forms, kind, {str(option): value} if colon else {})
        return ShownRow(form, f"{get_plugin_title(form_class)} {value}".strip(), defense, False)
    name = name_deployed_form(form)
    provider, place = split_model_name(form)
    # A bare word is not sent to the hub: it is more often a mistyped form than a model.
    is_model = provider in registry.list_providers() or (
        not provider and ("/" in place or Path(place).exists())
    )
    if not (name and is_model):
        raise AuditError(
            f"expected a form in --forms ({', '.join(forms)}) or a model (a folder, OWNER/NAME of "
            f"the hub, PROVIDER:NAME), got {form!r}"
        )
    return ShownRow(name, name, NamedForm(form), False)

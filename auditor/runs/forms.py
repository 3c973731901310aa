"""`--forms`: the forms in which a model is deployed, each a row beside it.

A form is made here of the weights of the model that is attacked (`Defense.form`), or it is a model
of its own that a provider loads or asks. Loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from auditor.core.errors import AuditError
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan_parts import TargetPlan, deployed_form_name
from auditor.plugins import registry
from auditor.plugins.defense import Defense
from auditor.plugins.options import build_plugin, get_option_defaults, get_plugin_title
from auditor.runs.shown_rows import ShownRow
from auditor.runs.unlearning import UnlearningBaseline


@dataclass(frozen=True)
class NamedForm(UnlearningBaseline):
    """A model that is named as a form of the one that is attacked."""

    name: ClassVar[str] = "form"
    place: str = ""


def shown_rows_of_deployed_forms(
    target: TargetPlan, others: Sequence[ShownRow] = ()
) -> list[ShownRow]:
    """The rows of `--forms`, in their order. Raises AuditError for no form, and for two rows of one
    name.

    others: rows that the run has besides.
    """
    rows, taken = list[ShownRow](), {UNDEFENDED, *(row.name for row in others)}
    for form in target.forms:
        row = _parse_deployed_form_row(form)
        if target.uses_builtin_lab and isinstance(row.defense, NamedForm):
            raise AuditError(
                f"--forms {form} names a model, which goes with --model and --data, got it in the "
                "lab"
            )
        if row.name in taken:
            raise AuditError(
                "expected each of --forms once, and called otherwise than other rows, got "
                f"{row.name!r} twice"
            )
        taken.add(row.name)
        rows.append(row)
    return rows


def deployed_forms_that_are_models(asked: Sequence[str]) -> list[str]:
    """The forms that are models of their own, rather than made of the attacked one."""
    made = _deployed_form_classes_by_name()
    return [form for form in asked if form.partition(":")[0] not in made]


def _deployed_form_classes_by_name() -> dict[str, type[Defense]]:
    """The forms that are made here of the attacked model's weights, by name."""
    return {name: kind for name, kind in registry.list_defenses().items() if kind.form}


def _parse_deployed_form_row(form: str) -> ShownRow:
    kind, colon, value = form.partition(":")
    if kind in (forms := _deployed_form_classes_by_name()):
        made = forms[kind]
        option = next(iter(get_option_defaults(made)), None)  # KIND:VALUE sets the first
        if colon and option is None:
            raise AuditError(f"--forms {kind} takes no value, got {form!r}")
        defense = build_plugin("form", forms, kind, {str(option): value} if colon else {})
        return ShownRow(form, f"{get_plugin_title(made)} {value}".strip(), defense, False)
    name = deployed_form_name(form)
    if not name:
        raise AuditError(
            f"expected a form in --forms ({', '.join(forms)}, or a model), got {form!r}"
        )
    return ShownRow(name, name, NamedForm(form), False)

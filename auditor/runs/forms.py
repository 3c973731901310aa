"""List the deployed forms of a model (`--forms`), such as a quantized model.

Each form is measured next to the attacked model. A form is either built here from the attacked
model's weights (`Defense.form`), or is a separate model that a provider loads or queries. Nothing
is loaded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from auditor.core.errors import AuditError
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan_parts import TargetPlan, name_deployed_form
from auditor.plugins import registry
from auditor.plugins.defense import Defense
from auditor.plugins.options import build_plugin, get_option_defaults, get_plugin_title
from auditor.runs.shown_rows import ShownRow
from auditor.runs.unlearning import UnlearningBaseline


@dataclass(frozen=True)
class NamedForm(UnlearningBaseline):
    """Separate model that the user names as a form of the attacked model.

    `place` is the model's folder, hub id or address.
    """

    name = "form"
    place: str = ""


def list_form_rows(target: TargetPlan, others: Sequence[ShownRow] = ()) -> list[ShownRow]:
    """Return a row for each deployed form of the target that `--forms` lists, such as a quantised
    copy, in this order.

    others: the run's other rows.

    Raise AuditError for an invalid form, or if two rows have the same name.
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
                "expected each of --forms once, with a name that no other row has, got "
                f"{row.name!r} twice"
            )
        names.add(row.name)
        rows.append(row)
    return rows


def select_model_forms(forms: Sequence[str]) -> list[str]:
    """Return the forms that name separate models."""
    classes = _map_form_classes()
    return [form for form in forms if form.partition(":")[0] not in classes]


def _map_form_classes() -> dict[str, type[Defense]]:
    """Return the classes of forms that are built here from the attacked model's weights, by
    name.
    """
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
    if not name:
        raise AuditError(
            f"expected a form in --forms ({', '.join(forms)}, or a model), got {form!r}"
        )
    return ShownRow(name, name, NamedForm(form), False)

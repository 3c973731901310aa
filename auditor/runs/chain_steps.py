"""Explain why a defended model leaks less, as a chain of paired differences between models.

Each model of the chain adds a possible cause. All functions are pure; their inputs are results per
secret.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from auditor.conclusions.outcomes import ValuesBySecret, align_secret_values
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import Chain, ChainStep, Finding, Measurement, TargetRecord
from auditor.plugins.defense import Cause
from auditor.plugins.options import get_plugin_title
from auditor.runs import shown_rows
from auditor.runs.per_secret_results import PerSecretCollector
from auditor.runs.scoring import LIKELIHOOD
from auditor.runs.selection import PluginSelection
from auditor.runs.shown_rows import ShownRow
from auditor.runs.site import Site
from auditor.statistics import compare


@dataclass(frozen=True)
class ChainRow:
    """One model in a chain of causes, with its results.

    Each model of the chain differs from the previous one by one cause.

    Args:
        cause: the cause that this model adds.
        target: name of the model.
        answers: results per secret; None if this model has no measurement.
        absent: why the model was not measured; "" if it was.
    """

    cause: Cause
    target: str
    answers: ValuesBySecret | None
    absent: str = ""


def build_cause_chain(
    target: str,
    base: tuple[str, ValuesBySecret],
    chain_rows: Sequence[ChainRow],
    name: str,
    unit: str,
) -> Chain | None:
    """Return the steps from the base model through the models of `chain_rows` to the target.

    A step is the change of the members' mean from one model to the next. If non-members were
    measured, their change is subtracted, because it does not come from memorisation. A cause whose
    model was not measured shares a step with the next cause. Return None if the target was not
    measured, or if no secret has a result on all models.

    Args:
        target: name of the target.
        base: name and results of the base model.
        chain_rows: the models after the base model, in order.
        name: name of the compared number, which must be finite for every model.
        unit: unit of the compared number.
    """
    start, answers = base
    rows = {start: answers}
    for chain_row in chain_rows:
        if chain_row.answers is not None:
            rows[chain_row.target] = chain_row.answers
    if target not in rows or not len(align_secret_values(rows.values(), name, True)[0]):
        return None

    def minus(after: str, before: str) -> Measurement:
        return measure_row_difference(name, unit, rows[after], rows[before], rows.values())

    steps = []
    at = start
    # Causes since the last measured model, which are merged with the next step.
    waiting: list[ChainRow] = []
    for chain_row in chain_rows:
        waiting.append(chain_row)
        if chain_row.target in rows:
            moved = None
            note = f"the {at} target itself is the control"
            if chain_row.target != at:
                moved = minus(chain_row.target, at)
                note = ""
                if len(waiting) > 1:  # several causes in a step
                    note = f"not separated without {_format_missing_rows(waiting[:-1])}"
            steps.append(ChainStep(_group_changes(waiting), at, chain_row.target, moved, note))
            at = chain_row.target
            waiting = []
    if waiting:
        note = f"not measured without {_format_missing_rows(waiting)}"
        steps.append(ChainStep(_group_changes(waiting), at, "", None, note))
    return Chain(tuple(steps), minus(target, start))


def measure_row_difference(
    name: str,
    unit: str,
    new: ValuesBySecret,
    base: ValuesBySecret,
    rows: Iterable[ValuesBySecret] = (),
) -> Measurement:
    """Measure the members' mean of `new` minus that of `base`, with its paired 95% interval.

    If there are non-members, their difference is subtracted.

    Args:
        name: name of the compared number.
        unit: unit of the compared number.
        new: results per secret.
        base: results per secret to compare with.
        rows: results on further models. Only secrets with a result on all these models, in `new`
            and in `base` are compared.
    """
    aligned = [new, base, *rows]
    _, (after, before, *_) = align_secret_values(aligned, name, True)
    nonmember_ids, (new_floor, base_floor, *_) = align_secret_values(aligned, name, False)
    return compare.measure_mean_difference(
        f"{name}_difference",
        unit,
        after,
        before,
        (new_floor, base_floor) if len(nonmember_ids) else None,
    )


def _group_changes(chain_rows: Sequence[ChainRow]) -> dict[str, str]:
    return {chain_row.cause.name: chain_row.cause.changes for chain_row in chain_rows}


def _format_missing_rows(chain_rows: Sequence[ChainRow]) -> str:
    return " and ".join(chain_row.absent for chain_row in chain_rows)


Answers = Mapping[str, ValuesBySecret]  # by name of target


@dataclass(frozen=True)
class CauseChains:
    """Builder of a run's chains of causes.

    Args:
        site: models and data of the audit.
        selection: plug-ins of the run.
        collector: results per secret of all attacks and probes.
    """

    site: Site
    selection: PluginSelection
    collector: PerSecretCollector

    def add_cause_chain(self, finding: Finding) -> Finding:
        """Return the finding with the chain of causes that explains its defense's effect.

        A chain leads from the undefended model over controls, each with one more part of the
        defense, to the defended model. Return the finding unchanged if the defense's controls were
        not attacked in this setting.
        """
        row = self._find_defense_row(finding.target)
        # Companions are attacked only in the last setting, which has the widest access.
        if row is None or finding.setting != self.selection.settings[-1].name:
            return finding
        # [1:] of a key: setting and attack.
        if finding.cell_key[1:] in {key[1:] for key in self.collector.stopped}:
            return finding  # the intervals of its steps need a fixed sample size
        if (main := finding.main) is None:
            return finding
        answers = {}
        for key in self.collector.rows:
            row_values = None
            if key[1:] == finding.cell_key[1:]:
                row_values = self.collector.find_main_numbers(key)
            if row_values is not None:
                answers[key.target] = row_values
        return dataclasses.replace(
            finding, chain=self._build_row_chain(row, answers, main.name, main.unit)
        )

    def add_likelihood_chain(self, target: TargetRecord) -> TargetRecord:
        """Return the target's record with a list of causes for its lower likelihoods.

        The list states how much each part of the defense, one after the other, made the members'
        true tokens less likely. The record of a model without a defense is returned unchanged.
        """
        row = self._find_defense_row(target.name)
        if row is None:
            return target
        chain = self._build_row_chain(row, self.collector.likelihoods, LIKELIHOOD, "nats a token")
        return dataclasses.replace(target, likelihood=chain)

    def _find_defense_row(self, target: str) -> ShownRow | None:
        """Return the shown target with this name if it is a defense, otherwise None."""
        rows = filter(lambda row: row.name == target and not row.companion, self.selection.rows)
        return next(rows, None)

    def _build_row_chain(
        self, row: ShownRow, answers: Answers, name: str, unit: str
    ) -> Chain | None:
        base = answers.get(UNDEFENDED)
        if base is None or not (steps := row.defense.cause_chain()):
            return None
        chain_rows = []
        for cause in steps:
            chain_rows.append(self._build_chain_row(row, cause, answers))
        return build_cause_chain(row.name, (UNDEFENDED, base), chain_rows, name, unit)

    def _build_chain_row(self, row: ShownRow, cause: Cause, answers: Answers) -> ChainRow:
        control = cause.row
        if control is None:
            name = row.name
        elif self.site.is_control_the_undefended_model(control):
            name = UNDEFENDED
        else:
            name = shown_rows.name_defense_row(self.selection.rows, control)
        # The name is "" for a control that was not attacked: no target has this name.
        row_values = answers.get(name)
        title = get_plugin_title(type(control or row.defense))
        absent = f"{title!r} ({'not measured' if name else cause.needs})"
        return ChainRow(cause, name, row_values, "" if row_values else absent)

"""Which rows of a run are the steps of each defense's chain of causes, and what they add to its
findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import Chain, Finding, TargetRecord
from auditor.plugins.defense import Cause
from auditor.plugins.options import get_plugin_title
from auditor.runs import chain_steps, shown_rows
from auditor.runs.per_secret_results import PerSecretCollector
from auditor.runs.scoring import LIKELIHOOD
from auditor.runs.selection import PluginSelection
from auditor.runs.shown_rows import ShownRow
from auditor.runs.site import Site

Answers = Mapping[str, RowValuesBySecret]  # by the name of the target


@dataclass(frozen=True)
class CauseChains:
    """The chains of one run, from what its cells found."""

    site: Site
    selection: PluginSelection
    collector: PerSecretCollector

    def finding_with_cause_chain(self, finding: Finding) -> Finding:
        """The finding with its defense's chain; unchanged in a setting that the controls were not
        attacked in."""
        rows = self.selection.rows
        row = next((row for row in rows if row.name == finding.target and not row.companion), None)
        # The last setting is the widest access, the only one in which companions are attacked.
        if row is None or finding.setting != self.selection.settings[-1].name:
            return finding
        if any(
            (key.setting, key.attack) == (finding.setting, finding.attack)
            for key in self.collector.stopped
        ):
            return finding  # its steps have intervals of a fixed size
        if (main := finding.main) is None:
            return finding
        # [1:] of a key: setting and attack.
        alike = {
            key.target: held
            for key, held in self.collector.answers.items()
            if key[1:] == finding.cell_key[1:]
        }
        return dataclasses.replace(
            finding, chain=self._cause_chain_of_defense_row(row, alike, main.name, main.unit)
        )

    def target_record_with_likelihood_chain(self, target: TargetRecord) -> TargetRecord:
        """The target with the chain of steps that make its members' true tokens less likely."""
        row = next(
            (row for row in self.selection.rows if row.name == target.name and not row.companion),
            None,
        )
        if row is None:
            return target
        chain = self._cause_chain_of_defense_row(
            row, self.collector.likelihoods, LIKELIHOOD, "nats a token"
        )
        return dataclasses.replace(target, likelihood=chain)

    def _cause_chain_of_defense_row(
        self, row: ShownRow, answers: Answers, name: str, unit: str
    ) -> Chain | None:
        base = answers.get(UNDEFENDED)
        if base is None or not (steps := row.defense.cause_chain()):
            return None
        chain_rows = [self._chain_row_for_cause(row, cause, answers) for cause in steps]
        return chain_steps.build_cause_chain(row.name, (UNDEFENDED, base), chain_rows, name, unit)

    def _chain_row_for_cause(
        self, row: ShownRow, cause: Cause, answers: Answers
    ) -> chain_steps.ChainRow:
        control = cause.row
        if control is None:
            name = row.name
        elif self.site.is_control_the_undefended_model(control):
            name = UNDEFENDED
        else:
            name = shown_rows.row_name_of_defense(self.selection.rows, control)
        # "" for a control without a row: no target is called that.
        found = answers.get(name)
        title = get_plugin_title(type(control or row.defense))
        absent = f"{title!r} ({'not measured' if name else cause.needs})"
        return chain_steps.ChainRow(cause, name, found, "" if found else absent)

"""Build the chain of causes of each defense from a run's results, and add the chain to the
findings.
"""

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

Answers = Mapping[str, RowValuesBySecret]  # by name of target


@dataclass(frozen=True)
class CauseChains:
    """Builder of the chains of causes of a run.

    Args:
        site: models and data of the audit.
        selection: plug-ins of the run.
        collector: results per secret of all attacks and probes.
    """

    site: Site
    selection: PluginSelection
    collector: PerSecretCollector

    def finding_with_cause_chain(self, finding: Finding) -> Finding:
        """Return the finding with the chain of causes of its defense added.

        Return the finding unchanged if the defense's controls were not attacked in this setting.
        """
        rows = self.selection.rows
        row = next((row for row in rows if row.name == finding.target and not row.companion), None)
        # Companions are attacked only in the last setting, which has the widest access.
        if row is None or finding.setting != self.selection.settings[-1].name:
            return finding
        if any(
            (key.setting, key.attack) == (finding.setting, finding.attack)
            for key in self.collector.stopped
        ):
            return finding  # the intervals of its steps need a fixed sample size
        if (main := finding.main) is None:
            return finding
        # [1:] of a key: setting and attack.
        answers = {}
        for key, row_values in self.collector.answers.items():
            if key[1:] == finding.cell_key[1:]:
                answers[key.target] = row_values
        return dataclasses.replace(
            finding, chain=self._cause_chain_of_defense_row(row, answers, main.name, main.unit)
        )

    def target_record_with_likelihood_chain(self, target: TargetRecord) -> TargetRecord:
        """Return the target with a chain of causes for the lower likelihood of members' true
        tokens.
        """
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
        chain_rows = []
        for cause in steps:
            chain_rows.append(self._chain_row_for_cause(row, cause, answers))
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
            name = shown_rows.name_defense_row(self.selection.rows, control)
        # The name is "" for a control without a row: no target has this name.
        row_values = answers.get(name)
        title = get_plugin_title(type(control or row.defense))
        absent = f"{title!r} ({'not measured' if name else cause.needs})"
        return chain_steps.ChainRow(cause, name, row_values, "" if row_values else absent)

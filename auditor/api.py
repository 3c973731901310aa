"""The Python API, for notebooks and training scripts: an audit as one call, and finished runs as tables.

    from auditor import audit, load_run

The command line does nothing that cannot be done from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.core.errors import AuditError
from auditor.core.result import AuditResult
from auditor.gate import decide, policy
from auditor.gate.compare import compare
from auditor.gate.rulings import Decision
from auditor.records.outcomes import Run
from auditor.reports import export, files, inert, verdict

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class FinishedRun:
    """A run folder that holds a result. Everything here works without the model and without torch."""

    folder: Path
    run: Run

    @property
    def result(self) -> AuditResult:
        """The record, as `result.json` holds it."""
        return self.run.result

    def to_frame(self) -> pd.DataFrame:
        """A row each (target, setting, attack, measurement, repeat count): value, interval, n, unit, the row's claim."""
        return _frame(export.measurements([self.result]))

    def secrets(self) -> pd.DataFrame:
        """A row each (target, setting, attack, secret): its name in reports and what was found out. No text of it."""
        return _frame(export.secrets([export.with_outcomes(self.folder)]))

    def gate(
        self, rules: str | Path | Sequence[str], *, baseline: str | Path | FinishedRun | None = None
    ) -> Decision:
        """Held, failed or inconclusive, as `audit gate` decides it.

        rules: a policy file, or sentences such as "recall <= 0.05". Raises AuditError for rules that say nothing, and
        for a baseline that cannot be compared.
        """
        base = load_run(baseline).run if isinstance(baseline, (str, Path)) else baseline and baseline.run
        return decide.decide(self.run, _policy(rules), base)

    def report(self, path: str | Path | None = None, *, since: FinishedRun | None = None, reveal: bool = False) -> Path:
        """Renders the reports anew; returns the HTML page's path, which is `path` (.html or .md) where one is given.

        since: another run, to show what changed. reveal: also show the private text that lies in the folder.
        """
        changes = None if since is None else compare([since.run, self.run])
        page, markdown = files.render_all(self.folder, changes, reveal)
        if path is None:
            return page
        path = Path(path)
        forms = {".html": page, ".md": markdown}
        if path.suffix not in forms:
            raise AuditError(f"expected a report in .html or .md, got {path.name!r}")
        return files.copy(forms[path.suffix], path)

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{inert.html(sentence)}</p>" for sentence in verdict.paragraph(self.result))
        return said + str(self.to_frame().to_html(max_rows=40, notebook=True))


def load_run(folder: str | Path) -> FinishedRun:
    """A finished run. Raises AuditError, one sentence, where the folder holds none that this version can read."""
    return FinishedRun(Path(folder), decide.read_run(Path(folder)))


def _policy(rules: str | Path | Sequence[str]) -> policy.Policy:
    if isinstance(rules, (str, Path)):
        return policy.read_policy(Path(rules))
    read = policy.Policy(policy.distinct([policy.parse_rule(sentence) for sentence in rules]))
    if not read.rules:
        raise AuditError("expected at least one rule, got none; a gate without rules holds nothing")
    return read


def _frame(sheet: export.Sheet) -> pd.DataFrame:
    import pandas as pd

    kinds = {"text": "string", "number": "float64", "count": "Int64", "flag": "boolean"}
    frame = pd.DataFrame(sheet.rows, columns=list(sheet.columns))
    return frame.astype({name: kinds[kind] for name, kind in sheet.columns.items()})


def _unused(value: Any) -> None: ...

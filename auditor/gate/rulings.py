"""Define a gate's `Decision`, the source of exit code, terminal output, Markdown and JUnit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from auditor.core.nouns import CellKey

Verdict = Literal["held", "failed", "inconclusive"]
Treatment = Literal["report", "pass", "fail"]  # the treatment of an inconclusive ruling
WHOLE_RUN = CellKey("", "", "")
EXIT_CODES: dict[Verdict, int] = {"held": 0, "failed": 1, "inconclusive": 4}


@dataclass(frozen=True)
class Ruling:
    """Verdict of a rule on a target, setting and attack.

    Args:
        target: name of the target; "" for a ruling on the whole run.
        setting: access setting.
        attack: attack or probe.
        metric: name of the metric.
        limit: limit of the rule.
        low: one-sided lower bound of the metric, or of its difference from the baseline.
        high: one-sided upper bound.
        verdict: held, failed or inconclusive.
        reason: reason for the verdict, as a sentence.
        rule: the rule as a sentence.
        value: the measured number.
        n: sample size.
        unmeasured: whether the ruling is inconclusive because nothing was measured. Such a ruling
            never passes.
        missed: for a held rule, a leak of this size or larger would be missed at most once in
            twenty audits; otherwise None.
    """

    target: str
    setting: str
    attack: str
    metric: str
    limit: float
    low: float
    high: float
    verdict: Verdict
    reason: str
    rule: str = ""
    value: float = math.nan
    n: int = 0
    unmeasured: bool = False
    missed: float | None = None

    @property
    def cell_title(self) -> str:
        return CellKey(self.target, self.setting, self.attack).title or "run"


def make_gate_ruling(
    reason: str, rule: str, verdict: Verdict = "failed", cell: CellKey = WHOLE_RUN
) -> Ruling:
    """Return a ruling without a metric.

    Args:
        reason: reason for the verdict.
        rule: the rule as a sentence.
        verdict: the verdict.
        cell: target, setting, and attack or probe; by default, the ruling is about the whole run.
    """
    return Ruling(*cell, "", math.nan, math.nan, math.nan, verdict, reason, rule)


@dataclass(frozen=True)
class Decision:
    """All rulings of a gate on a run.

    Args:
        run: name of the run.
        baseline: name of the baseline run; "" if no baseline was given.
        rulings: the rulings.
        inconclusive: treatment of inconclusive rulings: report, pass or fail.
        about: the judged model, the date, and whether the model is on this machine.
    """

    run: str
    baseline: str
    rulings: tuple[Ruling, ...]
    inconclusive: Treatment = "report"
    about: str = ""

    def __str__(self) -> str:
        """Return a line for each ruling, and the headline."""
        rulings = (f"{r.verdict:12}  {r.cell_title}: {r.reason}" for r in self.rulings)
        return "\n".join((*rulings, self.headline))

    def resolve_verdict(self, ruling: Ruling) -> Verdict:
        """Return the verdict of one ruling under the policy's treatment of inconclusive rulings.

        The treatment (`self.inconclusive`) changes only an inconclusive verdict: "pass" turns it
        into held, "fail" turns it into failed, "report" leaves it. If nothing was measured, "pass"
        leaves it too.
        """
        if ruling.verdict != "inconclusive" or self.inconclusive == "report":
            return ruling.verdict
        if self.inconclusive == "pass":
            if ruling.unmeasured:
                return "inconclusive"
            return "held"
        return "failed"

    @property
    def verdict(self) -> Verdict:
        """`failed` if any ruling failed, otherwise `inconclusive` if any is inconclusive, otherwise
        `held`.

        Without rulings, the verdict is `failed`.
        """
        outcomes = set(map(self.resolve_verdict, self.rulings))
        if "failed" in outcomes or not outcomes:
            return "failed"
        if "inconclusive" in outcomes:
            return "inconclusive"
        return "held"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def headline(self) -> str:
        """A line such as `gate held: 3 rulings held, 1 inconclusive let pass`."""
        counts = {}
        for kind in EXIT_CODES:
            counts[kind] = sum(r.verdict == kind for r in self.rulings)
        reading_note = {"report": "", "pass": " (let pass)", "fail": " (counted as failed)"}[
            self.inconclusive
        ]
        parts = []
        for kind, n in counts.items():
            if n:
                parts.append(f"{n} {kind}{reading_note if kind == 'inconclusive' else ''}")
        return f"gate {self.verdict}: {', '.join(parts) or 'nothing was judged'}"

"""`audit canaries bound`: epsilon from several trained models, one trial each.

Two canaries of one training are no independent trials, nor are two looks at one model: each run gives one, of one
canary, which is the same in all of them (by its id; its text may be another). Whether it went in is guessed from its
score and a threshold that the run's other canaries set, whose coins know nothing of this one's.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from auditor.core.errors import AuditError
from auditor.core.result import AuditResult, Finding
from auditor.plugins import registry
from auditor.records import attacked_secrets, result_file, table
from auditor.records.claims import BOUNDS
from auditor.statistics.bounds import LEVEL
from auditor.statistics.two_samples import epsilon_clopper_pearson, gaussian_epsilon_estimate


@dataclass(frozen=True)
class CanaryTrial:
    """One training. scores, coins: of every canary, by its id; about: what all trials must have in common."""

    run: str
    scores: dict[str, float]
    coins: dict[str, bool]
    delta: float
    copies: int
    about: str

    def is_canary_guessed_in(self, canary: str) -> bool:
        """Whether the canary is taken to have gone in: its score is nearer to those of others that did."""
        others = [id for id in self.scores if id != canary]
        # The threshold is the middle between the two means.
        means = [np.mean([self.scores[id] for id in others if self.coins[id] == side]) for side in (True, False)]
        return bool(self.scores[canary] > np.mean(means))


@dataclass(frozen=True)
class TrialBounds:
    """tp, fn: trials with the canary that were, were not, taken to have it; fp, tn: without. estimate: no bound."""

    target: str
    canary: str
    tp: int
    fn: int
    fp: int
    tn: int
    delta: float
    copies: int
    level: float
    epsilon: float
    best: float  # what as many trials would have proved, every guess right
    gaussian_estimate: float


def bound_epsilon_over_trial_runs(folders: Sequence[Path], target: str, canary: str | None) -> TrialBounds:
    """A lower bound of epsilon from one trial a folder. canary: its id; None: the first.

    Raises AuditError for runs that are no independent trials of one mechanism, and for trials of one kind only.
    """
    trials = [_read_trial(folder, target) for folder in folders]
    for one, other in combinations(trials, 2):
        # Two trainings never give every canary the same score to the last bit.
        if one.scores == other.scores:
            raise AuditError(f"expected models trained apart, got one model in {one.run} and {other.run}: one trial")
        if one.about != other.about:
            raise AuditError(
                f"expected trials of one mechanism and one score, got {one.about} in {one.run} and {other.about} in "
                f"{other.run}"
            )
    id = canary or min(trials[0].scores)
    if missing := [trial.run for trial in trials if id not in trial.scores]:
        raise AuditError(f"expected the canary {id} in every run, but {missing[0]} has none of that id")
    told = [(trial.coins[id], trial.is_canary_guessed_in(id)) for trial in trials]
    tp, fn, fp, tn = (told.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False)))
    terms = (trials[0].delta, LEVEL, trials[0].copies)
    return TrialBounds(
        target,
        id,
        *(tp, fn, fp, tn),
        trials[0].delta,
        trials[0].copies,
        LEVEL,
        # Independent runs, one canary and a threshold it had no part in: formulas.md B5 asks for all three.
        epsilon=epsilon_clopper_pearson(tp, fn, fp, tn, *terms),
        best=epsilon_clopper_pearson(tp + fn, 0, 0, fp + tn, *terms),
        gaussian_estimate=gaussian_epsilon_estimate(tp, fn, fp, tn, *terms),
    )


def _read_trial(folder: Path, target: str) -> CanaryTrial:
    result = result_file.read_result(folder)
    facts, seen = attacked_secrets.read_secret_facts(folder) or {}, table.read_probe_observations(folder)
    finding = _finding_of_trial(result, folder, seen, facts.keys(), target)
    observed = seen.get(finding.cell_key, {})
    main = finding.audits[0]
    claim = result.target(target).claim
    claimed = "nothing" if claim is None else f"ε {claim.epsilon} at δ {claim.delta:g}"
    about = f"{claimed} claimed, {main.copies} copies, bound at δ {main.delta:g}, {finding.options}"
    return CanaryTrial(
        str(folder),
        {id: numbers["score"] for id, numbers in observed.items()},
        # A canary is a member where its coin put it in.
        {id: facts[id].member for id in observed},
        main.delta,
        main.copies,
        about,
    )


def _finding_of_trial(result: AuditResult, folder: Path, seen: table.Seen, known: Set[str], target: str) -> Finding:
    """The audit of the known canaries at the widest access. Raises AuditError where there is none."""
    probes = result.methods_measuring(BOUNDS)
    rows = [one for one in result.findings if one.target == target and one.attack in probes and one.audits]
    rows = [one for one in rows if seen.get(one.cell_key, {}).keys() <= known]
    if not rows:
        raise AuditError(
            f"expected an audit of canaries on {target} (--attack {registry.attack_or_probe_name_measuring(BOUNDS)}) "
            f"in {str(folder)!r}, got none"
        )
    return rows[-1]

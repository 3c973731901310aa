"""A lower bound of epsilon from one training, by guessing which of our records were in it: end to end, of no fault."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from auditor.crash import training_specimen
from auditor.crash.claim import LoopClaim
from auditor.crash.watch import Train, run_watched_training
from auditor.statistics.audited import audit_epsilon_bounds


@dataclass(frozen=True)
class OneRun:
    """With 95% confidence epsilon is at least `epsilon`. best: what every guess right would have shown.

    claimed: what the training's claim gives, on the half of the records that it got.
    """

    epsilon: float
    best: float
    claimed: float
    canaries: int
    guesses: int
    right: int


def bound_epsilon_by_guesses(train: Train, claim: object, seed: int, until: float) -> OneRun:
    """Each of our records is in by a fair coin; guessed "in" are those that moved the released gradients farthest.

    claim: as it was stated for all trainings; None: this one's own is read. The bound: `statistics/one_run.py`.
    """
    coins = np.random.default_rng(seed).random(training_specimen.RECORDS) < 0.5
    chosen = [int(i) for i in np.flatnonzero(coins)]
    trace, returned = run_watched_training(train, seed, training_specimen.RECORDS, until, chosen=chosen)
    read = LoopClaim.read(returned[1] if claim is None and isinstance(returned, tuple) else claim or returned)
    scores = np.sum([step.reaches for step in trace.steps], axis=0)
    found = audit_epsilon_bounds(scores, coins, read.delta)[0]
    return OneRun(found.epsilon, found.best, read.implied_epsilon(), found.canaries, found.guesses, found.right)

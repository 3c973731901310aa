"""Membership numbers of other tools beside ours, on the same arrays: the table of docs/reference/peers.md.

Needs `pip install jax-privacy==2.0.0`: `python -m benchmarks.checks.trust.peers` (a minute).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score, roc_curve

from auditor.core.errors import AuditError
from auditor.statistics.roc import auc, tpr_at_fpr

Floats = NDArray[np.float64]
RATE = 0.01
N_NOISE = 300  # worlds in which members and non-members have one distribution
LEVEL = 0.05


def score_worlds(seed: int) -> dict[str, tuple[Floats, Floats]]:
    """Return pairs of scores of members and non-members by name; higher is more likely a member."""
    noise = np.random.default_rng(seed)
    members, others = noise.normal(0.5, 1, 200), noise.normal(0, 1, 200)
    few = members[:50], others[:50]
    rounded = members.round(), others.round()
    mixed = np.where(np.arange(200) % 2, members + 2.5, members - 2.5), others
    infinite = np.where(np.arange(200) < 20, -np.inf, members), others
    certain = np.where(np.arange(200) < 20, np.inf, members), others
    missing = np.where(np.arange(200) < 20, np.nan, members), others
    return {
        "200 and 200": (members, others),
        "50 and 50": few,
        "ties (rounded scores)": rounded,
        "half of the members high, half low": mixed,
        "20 members at -infinity": infinite,
        "20 members at +infinity": certain,
        "20 members NaN": missing,
    }


def peer_auditor(members: Floats, others: Floats) -> Any:
    from jax_privacy.auditing import CanaryScoreAuditor

    return CanaryScoreAuditor(members, others)


def sklearn_curve(members: Floats, others: Floats) -> tuple[Floats, Floats]:
    labels = np.r_[np.ones(len(members)), np.zeros(len(others))]
    fpr, tpr, _ = roc_curve(labels, np.r_[members, others])
    return fpr, tpr


def sklearn_auc(members: Floats, others: Floats) -> float:
    labels = np.r_[np.ones(len(members)), np.zeros(len(others))]
    return float(roc_auc_score(labels, np.r_[members, others]))


def interpolated_tpr(members: Floats, others: Floats) -> float:
    """Return the true-positive rate at `RATE` as many scripts take it: `np.interp` on scikit-learn's curve."""
    return float(np.interp(RATE, *sklearn_curve(members, others)))


def require_finite(members: Floats, others: Floats) -> None:
    """Refuse NaN: in a run such a score is "not applicable", with how many records lack it."""
    if np.isnan(np.r_[members, others]).any():
        raise AuditError("NaN among the scores")


def our_auc(members: Floats, others: Floats) -> float:
    require_finite(members, others)
    return auc(members, others)


def our_tpr(members: Floats, others: Floats) -> float:
    require_finite(members, others)
    return tpr_at_fpr(members, others, RATE).value


def print_cell(number: Callable[[], float]) -> str:
    """Return a number in three digits, or the kind of error that it ends in."""
    try:
        value = number()
    except (ValueError, AuditError):
        return "refused"
    return "nan" if math.isnan(value) else f"{value:.3f}"


def main() -> None:
    """Print the table, with the versions."""
    print(f"jax-privacy {version('jax-privacy')}, scikit-learn {version('scikit-learn')}, numpy {version('numpy')}\n")
    columns = ("scores", "AUC: ours", "scikit-learn", "jax-privacy", "TPR at 1%: ours", "np.interp", "jax-privacy")
    print_row(columns)
    print_row(["---"] * len(columns))
    for name, (members, others) in score_worlds(0).items():
        with np.errstate(all="ignore"):
            numbers = (
                lambda m=members, o=others: our_auc(m, o),
                lambda m=members, o=others: sklearn_auc(m, o),
                lambda m=members, o=others: float(peer_auditor(m, o).attack_auroc()),
                lambda m=members, o=others: our_tpr(m, o),
                lambda m=members, o=others: interpolated_tpr(m, o),
                lambda m=members, o=others: float(peer_auditor(m, o).tpr_at_given_fpr(RATE)),
            )
            print_row([name, *map(print_cell, numbers)])
    print_noise_shares()


def print_noise_shares() -> None:
    """Print how often an epsilon is above 0 for scores that tell nothing."""
    above = {"epsilon_raw_counts": 0, "epsilon_clopper_pearson": 0, "epsilon_from_gdp": 0}
    tpr = {"ours": 0.0, "np.interp": 0.0, "jax-privacy": 0.0}
    for seed in range(N_NOISE):
        members, others = np.random.default_rng([1, seed]).normal(size=(2, 100))
        peer = peer_auditor(members, others)
        above["epsilon_raw_counts"] += peer.epsilon_raw_counts(min_count=50) > 0
        above["epsilon_clopper_pearson"] += peer.epsilon_clopper_pearson(LEVEL) > 0
        above["epsilon_from_gdp"] += peer.epsilon_from_gdp(LEVEL, 1e-5) > 0
        tpr["ours"] += tpr_at_fpr(members, others, RATE).value / N_NOISE
        tpr["np.interp"] += interpolated_tpr(members, others) / N_NOISE
        tpr["jax-privacy"] += float(peer.tpr_at_given_fpr(RATE)) / N_NOISE
    print(f"\nNoise, {N_NOISE} times 100 members and 100 non-members:")
    for name, count in above.items():
        print(f"- {name} of jax-privacy is above 0 in {count / N_NOISE:.0%}")
    for name, mean in tpr.items():
        print(f"- TPR at 1%, mean: {name} {mean:.4f}")


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

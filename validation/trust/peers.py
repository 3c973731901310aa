"""Compare our membership numbers with other tools' on the same arrays (docs/reference/peers.md).

`python -m validation.trust.peers` (minutes) prints the tables. A tool that cannot be imported is
left out with a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score, roc_curve

from auditor.core.errors import AuditError
from auditor.statistics.games import epsilon_clopper_pearson
from auditor.statistics.intervals import estimate_perplexity
from auditor.statistics.roc import auc, tpr_at_fpr

Floats = NDArray[np.float64]
RATE = 0.01
N_NOISE = 200  # worlds in which members and non-members have the same distribution
LEVEL = 0.05
DELTA = 1e-5


class Peer(NamedTuple):
    """A tool's function for a number: `read` takes the scores of members and of non-members.

    package: "" for numpy's code and ours.
    """

    package: str
    name: str
    read: Callable[[Floats, Floats], float]


def score_worlds(seed: int) -> dict[str, tuple[Floats, Floats]]:
    """Return pairs of member and non-member scores by name; a higher score suggests a member."""
    noise = np.random.default_rng(seed)
    members, others = noise.normal(0.5, 1, 200), noise.normal(0, 1, 200)
    first = np.arange(200) < 20
    return {
        "200, 200": (members, others),
        "200, 20": (members, others[:20]),
        "ties": (members.round(), others.round()),
        "two-sided": (np.where(np.arange(200) % 2, members + 2.5, members - 2.5), others),
        "minus 200": (members - 200, others - 200),
        "20 at -inf": (np.where(first, -np.inf, members), others),
        "20 at +inf": (np.where(first, np.inf, members), others),
        "20 NaN": (np.where(first, np.nan, members), others),
    }


def join_rows(members: Floats, others: Floats) -> tuple[Floats, Floats]:
    """Return labels (1: member) and scores of all records."""
    return np.r_[np.ones(len(members)), np.zeros(len(others))], np.r_[members, others]


def require_no_nan(members: Floats, others: Floats) -> None:
    """Raise AuditError for NaN; runs instead report how many records have no score."""
    if np.isnan(np.r_[members, others]).any():
        raise AuditError("NaN among the scores")


def our_auc(members: Floats, others: Floats) -> float:
    require_no_nan(members, others)
    return auc(members, others)


def our_tpr(members: Floats, others: Floats) -> float:
    require_no_nan(members, others)
    return tpr_at_fpr(members, others, RATE).value


def our_epsilon(members: Floats, others: Floats) -> float:
    tp, fp = int((members > 0).sum()), int((others > 0).sum())
    return epsilon_clopper_pearson(tp, len(members) - tp, fp, len(others) - fp, 0.0, LEVEL)


def numpy_auc(members: Floats, others: Floats) -> float:
    require_no_nan(members, others)
    above = members[:, None] > others
    tied = members[:, None] == others
    return float((above + tied / 2).mean())


def numpy_tpr(members: Floats, others: Floats) -> float:
    """Return the highest share of members above an allowed threshold.

    A threshold is a non-member's score with (k + 1) / (n + 1) <= `RATE`, if k of n are above it.
    """
    require_no_nan(members, others)
    shares = [0.0]
    for threshold in others:
        if ((others > threshold).sum() + 1) / (len(others) + 1) <= RATE:
            shares.append(float((members > threshold).mean()))
    return max(shares)


def interpolated_tpr(members: Floats, others: Floats) -> float:
    fpr, tpr, _ = roc_curve(*join_rows(members, others))
    return float(np.interp(RATE, fpr, tpr))


def jax_auditor(members: Floats, others: Floats) -> Any:
    from jax_privacy.auditing import CanaryScoreAuditor

    return CanaryScoreAuditor(members, others)


def guard_results(members: Floats, others: Floats) -> Any:
    import torch
    from privacy_guard.analysis.mia.mia_results import MIAResults

    return MIAResults(torch.tensor(members), torch.tensor(others))


def guard_epsilon_at_rate(members: Floats, others: Floats) -> float:
    rates = np.array([RATE, 1.0])
    return float(
        guard_results(members, others).compute_metrics_at_error_threshold(DELTA, rates)[2][0]
    )


def meter_result(members: Floats, others: Floats) -> Any:
    from privacy_meter.metric_result import MetricResult

    labels, scores = join_rows(members, others)
    return MetricResult("scores", list(scores > 0), list(labels.astype(bool)), list(scores))


def art_tpr(members: Floats, others: Floats) -> float:
    from art.metrics.privacy import get_roc_for_fpr

    labels, scores = join_rows(members, others)
    return float(get_roc_for_fpr(scores, labels, targeted_fpr=RATE)[0][1])


def torch_rows(members: Floats, others: Floats) -> tuple[Any, Any]:
    import torch

    labels, scores = join_rows(members, others)
    return torch.tensor(scores, dtype=torch.float32), torch.tensor(labels, dtype=torch.long)


def torchmetrics_auc(members: Floats, others: Floats) -> float:
    from torchmetrics.functional.classification import binary_auroc

    return float(binary_auroc(*torch_rows(members, others)))


def torchmetrics_tpr(members: Floats, others: Floats) -> float:
    from torchmetrics.functional.classification import binary_sensitivity_at_specificity

    return float(
        binary_sensitivity_at_specificity(*torch_rows(members, others), min_specificity=1 - RATE)[0]
    )


def memaudit_auc(members: Floats, others: Floats) -> float:
    from memaudit.stats import roc_auc

    return roc_auc(members, others)


def memaudit_tpr(members: Floats, others: Floats) -> float:
    from memaudit.stats import tpr_at_fpr as read

    return float(read(members, others, RATE)["tpr"])


def memaudit_epsilon(members: Floats, others: Floats) -> float:
    from memaudit.stats import steinke_eps_lower_bound

    right = int((members > 0).sum() + (others <= 0).sum())
    return float(steinke_eps_lower_bound(right, len(members) + len(others), alpha=LEVEL)["eps_lb"])


AUCS = (
    Peer("", "ours", our_auc),
    Peer("", "numpy, all pairs", numpy_auc),
    Peer("scikit-learn", "roc_auc_score", lambda m, o: float(roc_auc_score(*join_rows(m, o)))),
    Peer("jax-privacy", "attack_auroc", lambda m, o: float(jax_auditor(m, o).attack_auroc())),
    Peer("privacy-meter", "MetricResult.roc_auc", lambda m, o: float(meter_result(m, o).roc_auc)),
    Peer(
        "privacyguard-platform",
        "compute_acc_auc_epsilon",
        lambda m, o: float(guard_results(m, o).compute_acc_auc_epsilon(DELTA)[1]),
    ),
    Peer("torchmetrics", "binary_auroc", torchmetrics_auc),
    Peer("memaudit", "roc_auc", memaudit_auc),
)
RATES = (
    Peer("", "ours", our_tpr),
    Peer("", "numpy, each non-member", numpy_tpr),
    Peer("scikit-learn", "np.interp on roc_curve", interpolated_tpr),
    Peer(
        "jax-privacy",
        "tpr_at_given_fpr",
        lambda m, o: float(jax_auditor(m, o).tpr_at_given_fpr(RATE)),
    ),
    Peer("adversarial-robustness-toolbox", "get_roc_for_fpr", art_tpr),
    Peer("torchmetrics", "binary_sensitivity_at_specificity", torchmetrics_tpr),
    Peer("memaudit", "tpr_at_fpr", memaudit_tpr),
)
EPSILONS = (
    Peer("", "ours, Clopper-Pearson at 0", our_epsilon),
    Peer(
        "jax-privacy",
        "epsilon_raw_counts",
        lambda m, o: float(jax_auditor(m, o).epsilon_raw_counts(min_count=50)),
    ),
    Peer(
        "jax-privacy",
        "epsilon_clopper_pearson",
        lambda m, o: float(jax_auditor(m, o).epsilon_clopper_pearson(LEVEL)),
    ),
    Peer(
        "jax-privacy",
        "epsilon_from_gdp",
        lambda m, o: float(jax_auditor(m, o).epsilon_from_gdp(LEVEL, DELTA)),
    ),
    Peer(
        "privacyguard-platform",
        "compute_acc_auc_epsilon",
        lambda m, o: float(guard_results(m, o).compute_acc_auc_epsilon(DELTA)[2]),
    ),
    Peer(
        "privacyguard-platform",
        "compute_acc_auc_ci_epsilon",
        lambda m, o: float(guard_results(m, o).compute_acc_auc_ci_epsilon(DELTA)[2]),
    ),
    Peer("privacyguard-platform", "compute_metrics_at_error_threshold", guard_epsilon_at_rate),
    Peer("memaudit", "steinke_eps_lower_bound", memaudit_epsilon),
)


def find_installed(peers: Sequence[Peer]) -> dict[str, Peer]:
    """Return the importable peers by their label in tables; print the others."""
    rows = {}
    for peer in peers:
        try:
            label = (
                f"{peer.package} {version(peer.package)} `{peer.name}`"
                if peer.package
                else peer.name
            )
            peer.read(*score_worlds(0)["200, 200"])
        except (PackageNotFoundError, ImportError) as error:
            print(
                f"left out: {peer.package} ({peer.name}), not installed or not importable: "
                f"{error}\n"
            )
            continue
        rows[label] = peer
    return rows


def print_cell(read: Callable[[Floats, Floats], float], members: Floats, others: Floats) -> str:
    """Return a number with three decimals, "nan" or "refused"."""
    try:
        value = read(members, others)
    except (ValueError, IndexError, AssertionError, AuditError):
        return "refused"
    return "nan" if math.isnan(value) else f"{value:.3f}"


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def print_worlds(title: str, peers: Sequence[Peer]) -> None:
    worlds = score_worlds(0)
    rows = find_installed(peers)
    print_row([title, *worlds])
    print_row(["---"] * (len(worlds) + 1))
    for label, peer in rows.items():
        print_row([label, *(print_cell(peer.read, *world) for world in worlds.values())])
    print()


def print_noise(title: str, peers: Sequence[Peer]) -> None:
    """Print each peer's mean on uninformative scores, and how often its number is above 0."""
    worlds = [np.random.default_rng([1, seed]).normal(size=(2, 100)) for seed in range(N_NOISE)]
    rows = find_installed(peers)
    print_row((f"{title} of noise, {N_NOISE} times 100 and 100", "mean", "above 0"))
    print_row(["---"] * 3)
    for label, peer in rows.items():
        values = np.array([peer.read(*world) for world in worlds])
        print_row((label, f"{values.mean():.4f}", f"{(values > 0).mean():.0%}"))
    print()


def print_perplexities() -> None:
    """Print the perplexity of two records: 10 tokens at 1 nat each, and 90 tokens at 3 nats
    each.
    """
    totals, tokens = np.array([10.0, 270.0]), np.array([10, 90])
    print(f"perplexity: ours {estimate_perplexity([(10.0, 10), (270.0, 90)]).value:.2f}")
    print(f"perplexity: numpy, by token {np.exp(totals.sum() / tokens.sum()):.2f}")
    try:
        from torchmetrics.functional.text import perplexity
    except ImportError:
        print("not installed: torchmetrics")
        return
    import torch

    nats = torch.tensor([1.0] * 10 + [3.0] * 90)
    logits = torch.stack([-nats, torch.log1p(-torch.exp(-nats))], dim=-1)
    padded = torch.stack([torch.nn.functional.pad(logits[:10], (0, 0, 0, 80)), logits[10:]])
    targets = torch.zeros(2, 90, dtype=torch.long)
    print(f"perplexity: torchmetrics, padding counted {float(perplexity(padded, targets)):.2f}")
    targets[0, 10:] = -100
    print(
        "perplexity: torchmetrics, ignore_index "
        f"{float(perplexity(padded, targets, ignore_index=-100)):.2f}"
    )
    sure = torch.tensor([[[0.0, 120.0]]])
    print(
        "perplexity: torchmetrics, one token at 120 nats "
        f"{float(perplexity(sure, targets[:1, :1])):.3g}"
    )


def main() -> None:
    """Print the tables."""
    print(f"numpy {version('numpy')}\n")
    with np.errstate(all="ignore"):
        print_perplexities()
        print_worlds("AUC", AUCS)
        print_worlds("TPR at 1%", RATES)
        for title, peers in (("AUC", AUCS), ("TPR at 1%", RATES), ("epsilon", EPSILONS)):
            print_noise(title, peers)


if __name__ == "__main__":
    main()

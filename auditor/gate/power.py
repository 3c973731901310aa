"""Compute, without a run, how many secrets a gate needs for a decision (`audit gate --plan`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from auditor.core.arrays import Floats, Ints
from auditor.core.errors import AuditError
from auditor.gate.policy import Rule
from auditor.statistics.anytime import simulate_stopping_sizes
from auditor.statistics.bounds import LEVEL
from auditor.statistics.distributions import (
    compute_binomial_sf,
    compute_normal_quantile,
    find_binomial_upper_quantile,
)
from auditor.statistics.metrics import SHARES, find_metric

_MOST = 1_000_000
_CHANGE = re.compile(r"([a-z][a-z0-9_.]*)=([^:=]+):([^:=]+)(?::([^:=]+))?", re.IGNORECASE)


@dataclass(frozen=True)
class ShareChange:
    """Planned change of a metric that is a share of secrets.

    Args:
        metric: name of the metric.
        share_before: share before the change.
        share_after: share after the change.
        discordant: share of secrets whose answer changes in either direction.
    """

    metric: str
    share_before: float
    share_after: float
    discordant: float


@dataclass(frozen=True)
class SecretsNeeded:
    """Number of secrets needed to answer a question with the requested power.

    With `--until decided`, a run stops as soon as the answer is certain, so its size is random.

    Args:
        question: the question.
        secrets: number needed if the sample size is fixed.
        stopping: with `--until decided`, the number at which a run has stopped with the requested
            power.
        half: with `--until decided`, the number at which half of the runs have stopped.
    """

    question: str
    secrets: int
    stopping: int
    half: int


def parse_planned_share_change(item: str) -> ShareChange:
    """Parse `recall=0.05:0.10` or `recall=0.05:0.10:0.08`.

    The third number is the share of secrets whose answer changes. By default, it is the share that
    changes if the two runs' answers are independent. Raise AuditError for other text, and for a
    metric that is not a share of secrets.
    """
    match = _CHANGE.fullmatch(item)
    complaint = (
        f"expected --plan metric=before:after[:changed], shares between 0 and 1, got {item!r}"
    )
    if not match:
        raise AuditError(complaint)
    if find_metric(match[1]).unit not in SHARES:
        raise AuditError(
            f"expected --plan on a share of secrets, such as recall, got {match[1]}, which is not "
            "one"
        )
    try:
        before, after, *rest = (float(part) for part in match.groups()[1:] if part is not None)
    except ValueError as error:
        raise AuditError(complaint) from error
    if not (0 <= before <= 1 and 0 <= after <= 1):
        raise AuditError(complaint)
    if before >= after:
        raise AuditError(f"expected --plan to go from less to more, got {before:g} to {after:g}")
    discordant = before * (1 - after) + after * (1 - before)
    if rest:
        (discordant,) = rest
    # Frechet bounds: the shares of changing answers that two marginal shares allow
    least = after - before
    most = min(before + after, 2 - before - after)
    if not least - 1e-9 <= discordant <= most + 1e-9:
        raise AuditError(
            f"expected between {least:g} and {most:g} of the answers to change from {before:g} to "
            f"{after:g}, got {discordant:g}"
        )
    return ShareChange(match[1], before, after, discordant)


def count_change_secrets(change: ShareChange, power: float, rules: int) -> list[SecretsNeeded]:
    """Return how many secrets a gate needs to detect that a metric changed.

    There are four questions. Two are about a limit on the metric: when does it fail and when does
    it hold? Two are about the paired difference from a baseline run.

    Args:
        change: the planned change.
        power: probability of detecting the change.
        rules: number of decisions that share the significance level.

    Raises:
        AuditError: for a power outside (0, 1), or if more than a million secrets are needed.
    """
    check_gate_power(power, rules)
    name = change.metric
    before = change.share_before
    after = change.share_after
    # as in `decide`: failing uses the shared level, holding uses LEVEL itself
    level = LEVEL / rules
    margin = after - before
    # if nothing got worse, answers change only by chance
    chance_change = change.discordant - margin
    # first the closed forms, which reject too small a change before any scan
    worse = count_pair_secrets(margin, 0.0, change.discordant, level, power)
    unchanged = count_pair_secrets(0.0, margin, chance_change, LEVEL, power)
    # won - lost is the margin
    lost = chance_change / 2
    won = change.discordant - chance_change / 2
    # a paired difference d of -1, 0 or 1 enters as (d + 1) / 2: betting takes values in [0, 1]
    # (formulas.md, D2)
    return [
        _count_limit_secrets("fail", name, before, after, level, power),
        _count_limit_secrets("hold", name, after, before, LEVEL, power),
        SecretsNeeded(
            f"fail {name} not worse than baseline by 0 if it rises from {before:g} to {after:g} "
            f"({change.discordant:.3g} of the answers change)",
            worse,
            *_simulate_gate_sizes([0, 0.5, 1], [lost, 1 - lost - won, won], 0.5, level, power),
        ),
        SecretsNeeded(
            f"hold {name} not worse than baseline by {margin:.3g} if nothing gets worse "
            f"({chance_change:.3g} change)",
            unchanged,
            # for -d, with equal odds: refute that its mean is at most -margin
            *_simulate_gate_sizes(
                [0, 0.5, 1],
                [chance_change / 2, 1 - chance_change, chance_change / 2],
                (1 - margin) / 2,
                LEVEL,
                power,
            ),
        ),
    ]


def count_policy_secrets(
    rules: Sequence[Rule], power: float, decisions: int
) -> list[SecretsNeeded]:
    """Return how many secrets each limit of a policy needs to fail, and to hold.

    The limit should fail if the leakage is twice the limit, and hold if it is half the limit or
    zero.

    Args:
        rules: the policy's rules.
        power: probability of the right decision.
        decisions: number of decisions that share the significance level.

    Raises:
        AuditError: if this number of secrets cannot be computed for any rule.
    """
    check_gate_power(power, decisions)
    limits = [rule for rule in rules if not explain_missing_number(rule)]
    if not limits:
        rule_reasons = "; ".join(f"'{rule}' ({explain_missing_number(rule)})" for rule in rules)
        raise AuditError(
            f"expected a policy with a limit on a share, such as recall <= 0.05, got {rule_reasons}"
        )
    needs = []
    for rule in limits:
        name = rule.metric_with_part
        limit = rule.limit
        if 2 * limit <= 1:
            level = LEVEL / decisions
            needs.append(_count_limit_secrets("fail", name, limit, 2 * limit, level, power))
        for truth in (limit / 2, 0.0):
            needs.append(_count_limit_secrets("hold", name, limit, truth, LEVEL, power))
    return needs


def explain_missing_number(rule: Rule) -> str:
    """Return why the needed number of secrets cannot be computed for this rule; "" if it can."""
    if rule.is_paired_difference:
        return "it depends on how often answers change: give --plan METRIC=A:B"
    if rule.of_claim:
        return "an audit of the claimed epsilon decides it"
    if find_metric(rule.metric).unit not in SHARES:
        return "not a share of secrets"
    if rule.limit > 0:
        return ""
    return "no number of secrets shows that there is nothing at all"


def _count_limit_secrets(
    verb: Literal["fail", "hold"],
    name: str,
    limit: float,
    truth: float,
    level: float,
    power: float,
) -> SecretsNeeded:
    odds = [1 - truth, truth]
    refuted = limit
    if verb == "hold":
        # for misses, by symmetry: refute that their mean is at most 1 - limit
        odds.reverse()
        refuted = 1 - limit
    stopping = _simulate_gate_sizes([0, 1], odds, refuted, level, power)
    needed = count_failing_secrets(refuted, odds[1], level, power)
    return SecretsNeeded(f"{verb} {name} <= {limit:g} if it is {truth:g}", needed, *stopping)


def _simulate_gate_sizes(
    values: Sequence[float], odds: Sequence[float], mean: float, level: float, power: float
) -> tuple[int, int]:
    """Return two numbers of secrets, from simulated runs that stop early (`--until decided`).

    A run stops when it has shown that the mean of the secrets' values is above a limit. With the
    first number, a run has stopped with probability `power`, with the second number with
    probability 1/2.

    Args:
        values: possible values of a secret.
        odds: probability of each value.
        mean: the limit.
        level: significance level.
        power: probability that a run has stopped.
    """
    # (runs,); a run that does not stop within _MOST counts as 2 * _MOST
    sizes = simulate_stopping_sizes(
        np.array(values, dtype=float), np.array(odds), mean, level, _MOST
    )
    # "higher": return a size at which a run stopped, not a size between two
    at_power, half = (
        _check_secret_count(int(np.quantile(sizes, share, method="higher")))
        for share in (power, 0.5)
    )
    return at_power, half


def check_gate_power(power: float, rules: int) -> None:
    """Raise AuditError if the power, or the number of decisions (`rules`), is out of range."""
    if not 0 < power < 1:
        raise AuditError(f"expected --power between 0 and 1, got {power:g}")
    if rules < 1:
        raise AuditError(f"expected --rules >= 1, got {rules}")
    if rules > _MOST:
        raise AuditError(f"expected --rules of at most {_MOST:,}, got {rules:,}")


def count_failing_secrets(limit: float, truth: float, level: float, power: float) -> int:
    """Return the smallest number of secrets at which a limit fails with probability `power`.

    Args:
        limit: limit on a share.
        truth: true share.
        level: significance level of an exact binomial test.
        power: probability that the limit fails.
    """
    # the quantile is the last count that does not reject
    return _find_fewest_secrets(
        lambda n: compute_binomial_sf(find_binomial_upper_quantile(level, n, limit), n, truth),
        power,
    )


def count_pair_secrets(
    truth: float, margin: float, discordant: float, level: float, power: float
) -> int:
    """Return the number of secrets needed to tell a true paired difference from another value.

    The number comes from a normal approximation, corrected for discrete counts. It uses two
    variances of a secret's difference, one if the mean is `truth`, the other if it is `margin`.

    Args:
        truth: the true difference.
        margin: the value to tell it from.
        discordant: the share of secrets whose answer changes.
        level: significance level.
        power: probability of success.
    """
    distance = abs(truth - margin)
    # Var d = E d^2 - (E d)^2 of d in {-1, 0, 1}: E d^2 is the discordant share, which is at least
    # |E d|
    spread = (max(discordant, abs(truth)) - truth**2, max(discordant, abs(margin)) - margin**2)
    z = -compute_normal_quantile(level) * math.sqrt(spread[1])
    z += compute_normal_quantile(power) * math.sqrt(spread[0])
    n = (z / distance) ** 2 + 2 / distance  # the second term: a paired sum moves in whole steps
    # without any observed change: (1 - margin)^n <= level
    least = 0.0
    if 0 < margin < 1:
        least = math.log(level) / math.log1p(-margin)
    return _check_secret_count(math.ceil(max(n, least)))


def _find_fewest_secrets(curve: Callable[[Ints], Floats], power: float) -> int:
    """Return the smallest n such that `curve` is at least `power` for n and all larger numbers.

    The curve is a sawtooth, because counts are discrete.
    """
    size = 1024
    while size <= 2 * _MOST:
        # (size,): all sizes at once, because a sawtooth cannot be bisected
        n = np.arange(1, size + 1)
        weak = np.flatnonzero(curve(n) < power)
        if not len(weak) or weak[-1] < size // 2:  # the last tooth is well before the end
            return _check_secret_count(int(n[weak[-1]]) + 1 if len(weak) else 1)
        size *= 2
    return _check_secret_count(size)


def _check_secret_count(n: int) -> int:
    if n > _MOST:
        raise AuditError(f"so small a change takes more than {_MOST:,} secrets")
    return n

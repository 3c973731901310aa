"""Measure an attack: all metrics of its guesses, shares by repeat count, and a recall curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.nouns import Secret
from auditor.core.result import Measurement, Stratum
from auditor.statistics import metrics
from auditor.statistics.intervals import measure_share
from auditor.statistics.judging import Outcome
from auditor.statistics.metrics import RECALL
from auditor.statistics.ranking import rank_guesses
from auditor.statistics.roc import compute_conformal_p_values, count_threshold_nonmembers

_COMPARABLE = 0.75  # share of a suffix's length; shorter suffixes are compared only if necessary


def measure_extraction(outcome: Outcome) -> list[Measurement]:
    """Return all measurements that follow from the guesses, in the order of the metrics table."""
    members = outcome.select_secrets(outcome.member)
    others = outcome.select_secrets(~outcome.member)
    return [
        measured
        for metric in metrics.METRICS
        if (measured := metric.measure(members, others)) is not None
    ]


def compute_recall_error_curve(outcome: Outcome) -> tuple[tuple[int, float], ...]:
    """Return at most 60 points (number of wrong guesses allowed, recall)."""
    hit, before = rank_guesses(outcome.hit, outcome.score)
    wrong = int((~hit).sum())
    allowed = sorted({round(x) for x in np.linspace(0, wrong, 60)})
    # With `e` wrong guesses allowed, a right guess counts if at most e wrong guesses precede it.
    return tuple((e, float((hit & (before <= e)).sum() / len(hit))) for e in allowed)


def compute_any_sample_probability(log_p: Floats, n: int) -> Floats:
    """Return 1 - (1 - p)^n, the probability that any of n samples is right, precisely for tiny p.

    log_p: log-probability of the right sample, in nats.
    """
    p = np.minimum(np.exp(log_p), 1.0)  # the logarithm of a sum may round to just above 0
    with np.errstate(divide="ignore"):  # p = 1
        result: Floats = -np.expm1(n * np.log1p(-p))
    return result


def compute_suffix_p_values(
    log_p: Floats, lengths: Ints, other_log_p: Floats, other_lengths: Ints, rate: float
) -> Floats:
    """Return each member suffix's conformal p-value against non-member suffixes of similar length.

    A short suffix is more likely than a long suffix, whether or not it was trained on (arXiv
    2607.12649). Each suffix of length L is therefore compared with non-members' suffixes of length
    3/4 L to L. If these are too few for a threshold at the false-positive rate `rate`, shorter ones
    are added, the longest first. They are more likely, which only increases the p-value. The
    p-value is 1 if all non-members' suffixes are longer.

    Args:
        log_p: (members,) log-probabilities of members' suffixes, in nats.
        lengths: (members,) lengths of these suffixes, in tokens.
        other_log_p: (non-members,) likewise for non-members.
        other_lengths: (non-members,) likewise for non-members.
        rate: the false-positive rate.
    """
    p_values = np.ones(len(log_p))
    order = np.argsort(other_lengths, kind="stable")
    sorted_lengths = other_lengths[order]
    for length in np.unique(lengths):
        end = int(np.searchsorted(sorted_lengths, length, side="right"))
        start = int(np.searchsorted(sorted_lengths, _COMPARABLE * length))
        fewest = max(0, end - count_threshold_nonmembers(rate))
        if start > fewest:
            # Take all non-members of one length, or none.
            start = int(np.searchsorted(sorted_lengths, sorted_lengths[fewest]))
        of_length = lengths == length
        p_values[of_length] = compute_conformal_p_values(
            log_p[of_length], other_log_p[order[start:end]]
        )
    return p_values


def sum_windows(bits: Floats, length: int) -> Floats:
    """Return the sums over all windows of `length` tokens, of shape (n, windows).

    bits: (n, L) one value per token, such as log2 of its rank.

    For log2 ranks, 2^-sum bounds the probability of a window given the preceding tokens. The bound
    holds for every decoder that never makes a token more probable than a more likely one.
    A text is (length, b)-inextractable (2604.18697) if the sum of every window is at least b. A sum
    is 0 if greedy decoding reproduces the window. A text shorter than `length` counts as one
    window.
    """
    windows = np.lib.stride_tricks.sliding_window_view(bits, min(length, bits.shape[-1]), axis=-1)
    sums: Floats = windows.sum(-1)
    return sums


def measure_hit_shares(name: str, outcome: Outcome) -> dict[str, Measurement]:
    """Return the share of hits at each known repeat count, keyed by repeat count."""
    counts = sorted({r for r in outcome.repeats if r is not None})
    repeats = np.array([-1 if r is None else r for r in outcome.repeats])
    return {str(r): measure_share(name, outcome.hit[repeats == r]) for r in counts}


def measure_group_shares(secrets: Iterable[Secret], hit: Bools) -> dict[str, Measurement]:
    """Return the share of extracted records in each group of the data, keyed by group name.

    A record is extracted if any of its parts is extracted. Return {} if there are fewer than two
    groups.
    hit: (secrets,) True if extracted.
    """
    extracted = dict[tuple[str, str], bool]()
    for secret, is_hit in zip(secrets, hit.tolist(), strict=True):
        if secret.group is not None:
            record = (secret.group, secret.document or secret.id)
            extracted[record] = extracted.get(record, False) or is_hit
    groups = dict[str, list[bool]]()
    for (group, _), is_extracted in sorted(extracted.items()):
        groups.setdefault(group, []).append(is_extracted)
    if len(groups) < 2:
        return {}
    return {name: measure_share(RECALL, np.array(of)) for name, of in groups.items()}


def group_copies_strata(
    population: Mapping[str, int], secrets: Iterable[Secret], hit: Bools
) -> tuple[Stratum, ...]:
    """Group records by their number of copies, most copies first.

    A record is extracted if any of its parts is extracted.

    Args:
        population: numbers of attackable records, keyed by copies as in `RecordCounts.by_copies`.
        secrets: the members that were queried, each a part of a record.
        hit: (secrets,) True if extracted.
    """
    copies = dict[str, int | None]()
    extracted = dict[str, bool]()
    for secret, is_hit in zip(secrets, hit.tolist(), strict=True):
        record = secret.document or secret.id
        copies[record] = secret.copies
        extracted[record] = extracted.get(record, False) or is_hit
    note = ""
    if len(extracted) < len(hit):
        note = "at least in part"
    strata = []
    for label, n_records in sorted(population.items(), key=lambda item: -int(item[0] or 0)):
        of_stratum = [
            extracted[record] for record, count in copies.items() if format_copies(count) == label
        ]
        share = measure_share(RECALL, np.array(of_stratum, dtype=bool), note)
        strata.append(Stratum(int(label) if label else None, n_records, share))
    return tuple(strata)


def format_copies(copies: int | None) -> str:
    """Format a number of copies as a key of `RecordCounts.by_copies`: "8"; "" if unknown."""
    return "" if copies is None else str(copies)

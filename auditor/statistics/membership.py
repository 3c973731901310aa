"""Score a text's membership from the log-probabilities of its tokens; members score higher.

`log_probs`: (L,) log-probability of each token under the audited model, in nats. `delta`: (L,) log
p_target - log p_reference of each token, in nats. The functions need no model, and labels only if a
formula uses records known to be members or non-members.
"""

from __future__ import annotations

import numpy as np
import scipy

from auditor.core.arrays import Bools, Floats, Ints

SCORES = {  # titles by name, in the order of the tables
    "loss": "loss",
    "zlib": "zlib",
    "lowercase": "lowercase",
    "min_k": "Min-K%",
    "min_k_plus": "Min-K%++",
    "reference": "loss minus the reference's",
    "reference_ratio": "loss over the reference's",
    "min_k_plus_calibrated": "Min-K%++ minus the reference's",
    "ez_mia": "EZ-MIA",
    "wbc": "WBC",
    "rmia": "RMIA",
    "lira": "LiRA",
    "stacked": "stacked",
}
FALSE_POSITIVES = (0.01, 0.001)  # rates at which reports state the share of members found
BELOW = 0.1  # largest false-positive rate of the partial AUC
# WBC's formula, grid(2, 40, 10); its code has 6, 9, 13, 18, 25, 32, 40
WINDOWS = (2, 3, 4, 5, 8, 11, 15, 21, 29, 40)
# With fewer reference models, LiRA's variances are shared by all records (Carlini et al. 2022,
# VI-B).
SHADOWS = 64
# RMIA's a, which estimates p(x) from the models that did not see x (Zarifzadeh et al. 2024).
OFFLINE = 0.3
_LARGEST = 1e300  # an infinite gain counts as this
_LEAST_LOSS = 2.0**-24  # the smallest difference from probability 1 in float32


def average_lowest(values: Floats, share: float) -> float:
    """Return the mean of the lowest `share` of the values, at least one value.

    If the values are log-probabilities, this is Min-K% (Shi et al. 2023).
    """
    count = max(1, int(len(values) * share))
    return float(np.sort(values)[:count].mean())


def standardise_log_probs(log_probs: Floats, mean: Floats, deviation: Floats) -> Floats:
    """Standardise each token's log-probability (Min-K%++, Zhang et al. 2024).

    mean, deviation: (L,) the mean and standard deviation of log p(v) if token v is drawn from the
    model's next-token distribution. The result, (L,), is 0 if the deviation is 0, because all
    possible tokens are then equally likely.
    """
    away = log_probs - mean
    return np.divide(
        away, deviation, out=np.where(np.isneginf(away), -np.inf, 0.0), where=deviation > 0
    )


def score_error_zone(delta: Floats, wrong: Bools) -> float:
    """Return EZ-MIA's score P / (P + N), which orders texts like P / N (2601.12104).

    P is the sum of the positive entries of `delta`, and N that of the absolute negative entries.
    Only tokens that the model got wrong count. Texts with N = 0 would all tie for first; they get
    scores from 1 to 2 in the order of P.

    A text without wrong tokens gets the highest score, 2. The authors' code gives it the lowest,
    although the best memorised texts have no wrong tokens.

    Args:
        delta: (L,) each token's log-probability by the model minus that by a reference model.
        wrong: (L,) True for each token that is not the model's likeliest token.
    """
    zone = delta[wrong]
    if not len(zone):
        return 2.0
    with np.errstate(invalid="ignore"):
        if np.isnan(zone.sum()):  # a NaN, or infinite gains and losses
            return float("nan")
    gained = min(float(zone[zone > 0].sum()), _LARGEST)
    lost = float(-zone[zone < 0].sum())
    if not lost:
        return 1 + gained / (1 + gained)
    return gained / (gained + lost)


def score_windows(delta: Floats, windows: tuple[int, ...] = WINDOWS) -> float:
    """Return WBC's score (2601.02751).

    The score is the share of windows with a positive sum of `delta`, averaged over the window
    lengths in `windows`. A length that exceeds the text's is replaced by the text's length. It is
    averaged once for each length that it replaces.

    delta: (L,) each token's log-probability by the model minus that by a reference model.
    """
    total = np.concatenate([[0.0], np.cumsum(delta)])
    shares = []
    for w in (min(window, len(delta)) for window in windows):
        shares.append(float(np.mean(total[w:] - total[:-w] > 0)))
    return float(np.mean(shares))


# --- scores that need reference models ---


def compute_logit_confidence(mean_log_prob: Floats) -> Floats:
    """Return log(p / (1 - p)) for p = exp(mean log-probability).

    LiRA assumes this logit to be normal (Carlini et al. 2022).
    """
    nll = np.maximum(-np.asarray(mean_log_prob, dtype=float), _LEAST_LOSS)
    # log p - log(1 - p); expm1 keeps the digits of 1 - p if p is near 1.
    return np.asarray(-nll - np.log(-np.expm1(-nll)), dtype=np.float64)


def has_both_model_kinds(saw: Bools) -> bool:
    """Return whether every record was seen by some reference models and not seen by others.

    saw: (records, models). There is one answer for all records, because answers per record would
    reveal which records were ever used in training.
    """
    return bool(saw.any(1).all() and (~saw).any(1).all())


def compute_lira_ratio(target: Floats, references: Floats, saw: Bools) -> Floats:
    """Return LiRA's log-likelihood ratio of members against non-members (Carlini et al. 2022).

    If no model saw the record (offline), the result is log P[a model that did not see the record
    scores below the target]. With fewer than 64 models, each record has its own means, but all
    records share two standard deviations: one for models that saw the record, one for all other
    models. Such a deviation needs at least one record with two models of that kind; without one,
    the result is NaN.

    Args:
        target: (records,) scores by the audited model, from `compute_logit_confidence`.
        references: (records, models) scores by the reference models.
        saw: (records, models) True if the reference model was trained on the record.

    Returns:
        The log-likelihood ratios, (records,).
    """
    per_record = references.shape[1] >= SHADOWS
    out_mean, out_deviation = _estimate_moments(references, ~saw, per_record)
    if not has_both_model_kinds(saw):
        return np.asarray(
            scipy.special.log_ndtr((target - out_mean) / out_deviation), dtype=np.float64
        )
    in_mean, in_deviation = _estimate_moments(references, saw, per_record)
    ratio: Floats = _compute_normal_log_density(target, in_mean, in_deviation)
    return ratio - _compute_normal_log_density(target, out_mean, out_deviation)


def compute_token_lira_ratio(target: Floats, references: Floats, saw: Bools) -> float:
    """Return LiRA's log-likelihood ratio of one record, from the vector of its tokens' scores.

    Vectors of both kinds of models are taken as normal, with one covariance matrix about two means.
    The matrix is shrunk (Ledoit and Wolf 2004), because there are often fewer models than tokens.
    If no model saw the record (offline), the result is the log-probability that a model that did
    not see it scores below the target, in the direction in which all tokens' scores rise equally.
    The result is NaN if the models are too few, or too alike, for a covariance matrix.

    Args:
        target: (L,) scores of the record's tokens by the audited model, from
            `compute_logit_confidence`.
        references: (models, L) scores by the reference models.
        saw: (models,) True if the reference model was trained on the record.
    """
    from sklearn.covariance import ledoit_wolf

    outside = references[~saw].mean(0)
    # Independent vectors with the models' covariance and mean 0: one per degree of freedom.
    residuals = scipy.linalg.helmert(int((~saw).sum())) @ references[~saw]
    if saw.any():
        inside_residuals = scipy.linalg.helmert(int(saw.sum())) @ references[saw]
        residuals = np.concatenate([residuals, inside_residuals])
    if len(residuals) < 2:
        return float("nan")
    covariance = ledoit_wolf(residuals, assume_centered=True)[0]
    if np.linalg.matrix_rank(covariance) < len(target):
        return float("nan")
    if saw.any():
        inside = references[saw].mean(0)
        weights = np.linalg.solve(covariance, inside - outside)
        return float(weights @ (target - (inside + outside) / 2))
    weights = np.linalg.solve(covariance, np.ones(len(target)))
    return float(scipy.special.log_ndtr(weights @ (target - outside) / np.sqrt(weights.sum())))


def _compute_normal_log_density(values: Floats, mean: Floats, deviation: Floats) -> Floats:
    """Return the normal log density plus log sqrt(2 pi), a constant that cancels in ratios."""
    return -(((values - mean) / deviation) ** 2) / 2 - np.log(deviation)


def _estimate_moments(values: Floats, chosen: Bools, per_record: bool) -> tuple[Floats, Floats]:
    """Return the mean and the standard deviation of each record's chosen values, (records,) each.

    per_record: False pools the deviation over records.
    """
    count = chosen.sum(1)
    mean = np.divide(
        np.where(chosen, values, 0.0).sum(1),
        count,
        out=np.full(len(values), np.nan),
        where=count > 0,
    )
    square = (np.where(chosen, values - mean[:, None], 0.0) ** 2).sum(1)
    free = np.maximum(count - 1, 0)
    if not per_record:  # pooled variance; each record's mean takes one degree of freedom
        square = np.full(len(values), square.sum())
        free = np.full(len(values), free.sum())
    variance = np.divide(square, free, out=np.full(len(values), np.nan), where=free > 0)
    return mean, np.sqrt(np.where(variance > 0, variance, np.nan))


def compute_rmia_log_ratio(target: Floats, references: Floats, saw: Bools) -> Floats:
    """Return RMIA's log p(x | target) - log p(x) for each record x, of shape (records,).

    p(x | model) is the exponential of the mean log-probability of x's tokens. p(x) is the average
    of two numbers: the mean of p(x | model) over the reference models that saw x, and the mean over
    those that did not. If no model saw x (offline), p(x) is (1 + a) / 2 times the mean over models
    that did not see x, plus (1 - a) / 2 (Zarifzadeh et al. 2024; a: `OFFLINE`).

    Args:
        target: (records,) mean log-probabilities by the audited model.
        references: (records, models) mean log-probabilities by the reference models.
        saw: (records, models) True if the reference model was trained on the record.
    """
    p = np.exp(references)
    outside = np.where(saw, 0.0, p).sum(1) / (~saw).sum(1)
    if has_both_model_kinds(saw):
        mean_probability = (outside + np.where(saw, p, 0.0).sum(1) / saw.sum(1)) / 2
    else:
        mean_probability = (1 + OFFLINE) / 2 * outside + (1 - OFFLINE) / 2
    return np.asarray(target - np.log(mean_probability), dtype=np.float64)


def compute_rmia_share(ratio: Floats, population: Bools, group: Ints) -> Floats:
    """Return RMIA's score Pr_z[ratio(x) / ratio(z) > 1] for each record x, of shape (records,).

    z is a random record of the population. ratio: (records,), from `compute_rmia_log_ratio`.
    population: (records,) True for the known non-members. For each x, the population leaves out
    x's group: x itself and its near-duplicates. Otherwise the score would depend on whether x is in
    the population, which an attacker does not know.
    """
    z = np.sort(ratio[population])
    of = group[population]
    n_below = np.searchsorted(z, ratio, side="left")
    count = np.full(len(ratio), len(z))
    for i in np.flatnonzero(np.isin(group, of)):
        group_ratios = ratio[population][of == group[i]]
        n_below[i] -= int((group_ratios < ratio[i]).sum())
        count[i] -= len(group_ratios)
    return np.divide(n_below, count, out=np.full(len(ratio), np.nan), where=count > 0)

"""Define interval cases for extraction, generation and unlearning: recall, excess, exposure,
n-grams.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from auditor.core.nouns import Secret
from auditor.statistics import (
    copies_effect,
    documents,
    intervals,
    memorised,
    metrics,
    unlearning,
    unseen_species,
)
from auditor.statistics.ranking import measure_ranked_recall
from validation.trust.interval_case import Ends, Floats, IntervalCase, Rng, lower, of

PROBABILITY = "extraction_probability"


def of_attacks() -> Iterator[IntervalCase]:
    for n, p in ((300, 0.01), (300, 0.15), (60, 0.15), (20, 0.25)):
        kind = "recall" if n > 20 else "recall by group or repeat count"
        yield IntervalCase(kind, f"{p:.0%} extracted", f"{n}", p, shared("recall", n, p))
    for n in (300, 60):
        yield IntervalCase(
            "near-verbatim recall",
            "20% extracted",
            f"{n}",
            0.2,
            shared("near_verbatim_recall", n, 0.2),
        )
    for (m, n), p, q in (((300, 100), 0.15, 0.05), ((300, 100), 0.02, 0.0), ((60, 20), 0.15, 0.05)):
        yield IntervalCase(
            "excess",
            f"{p:.0%} of members, {q:.0%} of others",
            f"{m}/{n}",
            p - q,
            beyond(m, n, p, q),
        )
    for n, errors in ((300, 100), (300, 30), (60, 20)):
        yield ranked(n, errors)
    for n in (300, 60):
        kind = "extraction and near-verbatim probability"
        yield IntervalCase(
            kind, "a tenth between 0 and 1", f"{n}", 2 / 30, averaged(lambda rng, n=n: rare(rng, n))
        )
    for n in (4, 20):
        yield IntervalCase(
            "exposure (share of the bits)", "nothing learnt", f"{n} canaries", *unlearnt(n)
        )
    yield IntervalCase(
        "recall by document", "3 parts, alike but for noise", "60 of 180", *by_document()
    )
    for m, n in ((20, 20), (60, 60)):
        distribution = "25% of members, 5% of others"
        yield IntervalCase(
            "excess by group", distribution, f"{m}/{n}", 0.2, beyond(m, n, 0.25, 0.05)
        )
    yield IntervalCase(
        "forecast: recall with at most 16 copies", "0, 5, 30, 90% by copies", "300", *forecast()
    )


def shared(name: str, n: int, p: float) -> Callable[[Rng], Ends]:
    return lambda rng: of(intervals.measure_share(name, rng.random(n) < p))


def beyond(m: int, n: int, p: float, q: float) -> Callable[[Rng], Ends]:
    return lambda rng: of(
        intervals.subtract_nonmember_share("excess_recall", rng.random(m) < p, rng.random(n) < q)
    )


def averaged(draw: Callable[[Rng], Floats]) -> Callable[[Rng], Ends]:
    return lambda rng: of(intervals.compute_mean_probability("extraction_probability", draw(rng)))


def rare(rng: Rng, n: int) -> Floats:
    """Return n random probabilities, nine tenths of them 0."""
    return rng.random(n) ** 0.5 * (rng.random(n) < 0.1)


def unlearnt(n: int) -> tuple[float, Callable[[Rng], Ends]]:
    """Return the mean and the audit of n canaries' exposure relative to the maximum, 20 bits.

    P(exposure >= e) is 2^-e.
    """
    bits = 20.0
    mean = (1 - 2**-bits) / math.log(2) / bits
    return mean, averaged(lambda rng: np.minimum(rng.exponential(1 / math.log(2), n), bits) / bits)


def forecast() -> tuple[float, Callable[[Rng], Ends]]:
    sizes, rates = (160, 60, 40, 40), (0.0, 0.05, 0.3, 0.9)
    counts, out = np.repeat([1, 4, 16, 64], sizes), np.repeat(rates, sizes)
    truth = float(np.minimum(out, 0.3).mean())
    return truth, lambda rng: of(
        copies_effect.predict_recall(
            counts.tolist(), rng.random(300) < out, np.minimum(counts, 16).tolist()
        )
    )


def of_generations() -> Iterator[IntervalCase]:
    """Yield cases on the content of generations without a prompt."""
    alike, uneven = np.full(300, 2e-3), 0.05 / np.arange(1, 301)
    for n in (400, 2000):
        size = f"{n:,} generations"
        for distribution, p in (("300 records, alike", alike), ("300 records, 1/rank", uneven)):
            yield IntervalCase(
                "new records in the next 1,000", distribution, size, 0.0, to_come(n, p)
            )
        to_see = "records there are to see"
        yield IntervalCase(to_see, "300 records, alike", size, 300.0, there_are(n, alike))
        yield IntervalCase(
            f"{to_see}, at least", "300 records, 1/rank", size, 300.0, there_are(n, uneven, True)
        )
        for distribution, p, q in (("2% hold some", 0.02, 0.002), ("20% hold some", 0.2, 0.02)):
            kind, name = "memorised n-grams per 1,000", memorised.MEMORISED
            yield IntervalCase(kind, distribution, size, 1500 * p, holding(n, p, q, name))
            excess = holding(n, p, q, metrics.name_excess_metric(name))
            yield IntervalCase(f"{kind}, excess", distribution, size, 1500 * (p - q), excess)


def incidence(rng: Rng, draws: int, p: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return the number of draws with each record seen, and the probabilities of unseen records."""
    counts = rng.binomial(draws, p)
    return counts[counts > 0], p[counts == 0]


def to_come(draws: int, p: Floats) -> Callable[[Rng], Ends]:
    """Return an audit of the estimate of new records in the next 1,000 draws.

    The true number differs between audits, so the ends are differences from it and the truth is 0.
    """

    def audit(rng: Rng) -> Ends:
        seen, unseen = incidence(rng, draws, p)
        low, high, least, most = of(
            unseen_species.estimate_new_species(memorised.NEW, seen, draws, 1000)
        )
        truth = 1000 * float(unseen.sum())
        return low - truth, high - truth, least - truth, most - truth

    return audit


def there_are(draws: int, p: Floats, at_least: bool = False) -> Callable[[Rng], Ends]:
    def audit(rng: Rng) -> Ends:
        found = unseen_species.estimate_species_richness(
            memorised.RICHNESS, incidence(rng, draws, p)[0], draws, 3000
        )
        assert found is not None
        return lower(found.low) if at_least else of(found)

    return audit


def holding(n: int, p: float, q: float, name: str) -> Callable[[Rng], Ends]:
    """Return an audit of memorised n-grams: generations contain some with probability p.

    Of these, half contain one n-gram and half two. Held-out texts contain some with probability q.
    """
    corpus = memorised.CorpusCounts(1000, 1000, 300, 300)

    def audit(rng: Rng) -> Ends:
        own, other = (((rng.random(n) < rate) * rng.integers(1, 3, n)).tolist() for rate in (p, q))
        every = [memorised.MemorisedTokens(a, 0, b, {}) for a, b in zip(own, other, strict=True)]
        return of(
            next(
                m
                for m in memorised.measure_generation_memorisation(every, corpus, 8, 64, {})
                if m.name == name
            )
        )

    return audit


def of_unlearning() -> Iterator[IntervalCase]:
    """Yield cases in which half of the records are extracted before unlearning, and a fifth of
    these after.

    Relearning restores a fifth of the records lost.
    """
    for n in (30, 100, 300):
        for change, truth in (("unlearned", -0.4), ("relearned", 0.08), ("share_back", 0.2)):
            name = f"unlearning: {change.replace('_', ' ')}, recall"
            yield IntervalCase(name, "50, 10, 18%", f"{n}", truth, forgetting(n, change, "recall"))
        by_how_much = forgetting(n, "unlearned", PROBABILITY)
        name = "unlearning: unlearned, probability"
        yield IntervalCase(name, "50, 10, 18%, by how much", f"{n}", -0.2, by_how_much)


def forgetting(n: int, change: str, name: str) -> Callable[[Rng], Ends]:
    def audit(rng: Rng) -> Ends:
        before = (rng.random(n) < 0.5).astype(float)
        after = before * (rng.random(n) < 0.2)
        again = np.maximum(after, before * (rng.random(n) < 0.2))
        by = rng.random(n) if name == PROBABILITY else np.ones(n)
        columns = {
            unlearning.BEFORE: before * by,
            unlearning.AFTER: after * by,
            unlearning.RELEARNED: again * by,
        }
        found = unlearning.measure_unlearning_group(
            "extraction", name, unlearning.FORGOTTEN, columns
        ).changes.get(change)
        return (-math.inf, math.inf, -math.inf, math.inf) if found is None else of(found)

    return audit


def ranked(n: int, errors: int) -> IntervalCase:
    """Return a case of recall at `errors` errors: 40% of guesses are right and score 1 deviation
    higher.
    """
    cut = norm.isf(errors / (0.6 * n))

    def audit(rng: Rng) -> Ends:
        right = rng.random(n) < 0.4
        order = np.argsort(-(rng.normal(size=n) + right))
        return of(
            measure_ranked_recall(f"recall_at_{errors}_errors", order, right[order], n, errors)
        )

    return IntervalCase(
        f"Recall@{errors}", "right ones 1σ surer", f"{n}", 0.4 * float(norm.sf(cut - 1)), audit, 0.3
    )


def by_document() -> tuple[float, Callable[[Rng], Ends]]:
    """Return the truth and the audit of recall with clustered records.

    A document is learnt with probability 20%; each of its three parts is then extracted with 50%.
    """
    parts = itertools.product(range(60), range(3))
    secrets = [
        Secret(f"{d}.{i}", (0,), (1, 2), 1, True, document=str(d), at=10 * i) for d, i in parts
    ]

    codes = documents.encode_records(secrets)

    def audit(rng: Rng) -> Ends:
        learnt = rng.random(60) < 0.2
        hit = np.array([learnt[int(s.document or 0)] and rng.random() < 0.5 for s in secrets])
        extracted = documents.take_highest_per_record(hit, codes) == 1
        return of(intervals.measure_share(documents.RECALL, extracted))

    return 0.2 * (1 - 0.5**3), audit

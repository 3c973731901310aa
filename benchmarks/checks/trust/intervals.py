"""How often the intervals that we print hold the truth, and how often a gate at the truth is wrong, by simulation.

    python -m benchmarks.checks.trust.intervals [--audits 1000] [--only tpr ...] [-o FILE.md]    (some minutes)

Each case draws records of a distribution whose number is known, measures them by the function that reports and gates
use, and counts three errors of at most 5% each: the 95% interval misses the truth; a gate whose limit is the truth
fails the run; such a gate holds it. Exits 1 where the Clopper-Pearson interval of one of those shares lies above 5%.
Bounds of epsilon have one end, and mechanisms of their own: coverage.py. Sizes are those of the lab, the README and the
examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from scipy.stats import cauchy, norm

from auditor.core.nouns import Secret
from auditor.core.result import Measurement
from auditor.core.streams import generator
from auditor.gate.decide import evidence
from auditor.records import contrasts
from auditor.statistics import (
    documents,
    dose,
    frontier,
    intervals,
    memorised,
    metrics,
    roc,
    species,
    unlearning,
)
from auditor.statistics.audited import LEVEL, audited
from auditor.statistics.bounds import Evidence, RecordedInterval, paired_shares
from auditor.statistics.compare import paired_means
from auditor.statistics.games import audited as games_audited
from auditor.statistics.games import counted
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.one_run import gaussian_epsilon
from auditor.statistics.ranking import recall_of_guesses
from auditor.testing import tpr_interval
from benchmarks.checks.harness import Page, refuse, run

SIDE = 0.025
PROBABILITY = "extraction_probability"
Rng = np.random.Generator
Floats = NDArray[np.float64]
Ends = tuple[float, float, float, float]  # of the 95% interval; one-sided bounds at 5%: what a gate fails and holds by


@dataclass(frozen=True)
class Case:
    """One number of one distribution at one size. audit: draws records and measures them; part: of the audits, where
    slow."""

    quantity: str
    distribution: str
    size: str
    truth: float
    audit: Callable[[Rng], Ends]
    part: float = 1.0


@dataclass(frozen=True)
class Row:
    """Errors among so many audits: the interval misses, a gate at the truth fails, it holds."""

    case: Case
    audits: int
    wrong: tuple[int, int, int]

    @property
    def failed(self) -> bool:
        return any(clopper_pearson(count, self.audits)[0] > LEVEL for count in self.wrong)

    @property
    def verdict(self) -> str:
        return "**too often wrong**" if self.failed else "holds"


def ends(found: Evidence) -> Ends:
    return found.low(SIDE), found.high(SIDE), found.low(LEVEL), found.high(LEVEL)


def of(found: Measurement) -> Ends:
    """As a report prints it, and as a gate reads it."""
    seen = evidence(found)
    return found.low, found.high, seen.low(LEVEL), seen.high(LEVEL)


def rate_of(own: Floats, others: Floats) -> Ends:
    found = tpr_interval(own, others, 0.01)
    return (found.low, found.high, *ends(roc.FoundRate(own, others, 0.01))[2:])


def lower(bound: float) -> Ends:
    return bound, math.inf, bound, math.inf


# --- attacks ----------------------------------------------------------------------------------------------------------


def of_attacks() -> Iterator[Case]:
    for n, p in ((300, 0.01), (300, 0.15), (60, 0.15), (20, 0.25)):
        kind = "recall" if n > 20 else "recall by group or repeat count"
        yield Case(kind, f"{p:.0%} come out", f"{n}", p, shared("recall", n, p))
    for n in (300, 60):
        yield Case("near-verbatim recall", "20% come out", f"{n}", 0.2, shared("near_verbatim_recall", n, 0.2))
    for (m, n), p, q in (((300, 100), 0.15, 0.05), ((300, 100), 0.02, 0.0), ((60, 20), 0.15, 0.05)):
        yield Case("excess", f"{p:.0%} of members, {q:.0%} of others", f"{m}/{n}", p - q, beyond(m, n, p, q))
    for n, errors in ((300, 100), (300, 30), (60, 20)):
        yield ranked(n, errors)
    for n in (300, 60):
        kind = "extraction and near-verbatim probability"
        yield Case(kind, "a tenth between 0 and 1", f"{n}", 2 / 30, averaged(lambda rng, n=n: rare(rng, n)))
    for n in (4, 20):
        kind = "exposure (share of the bits)"
        yield Case(kind, "nothing learnt", f"{n} canaries", unlearnt()[0], averaged(unlearnt(n)[1]))
    yield Case("recall by document", "3 parts, alike but for noise", "60 of 180", *by_document(60))
    for m, n in ((20, 20), (60, 60)):
        distribution = "25% of members, 5% of others"
        yield Case("excess by group", distribution, f"{m}/{n}", 0.2, beyond(m, n, 0.25, 0.05))
    yield Case("forecast: recall with at most 16 copies", "0, 5, 30, 90% by copies", "300", *forecast())


def shared(name: str, n: int, p: float) -> Callable[[Rng], Ends]:
    return lambda rng: of(intervals.share(name, rng.random(n) < p))


def beyond(m: int, n: int, p: float, q: float) -> Callable[[Rng], Ends]:
    return lambda rng: of(intervals.excess("excess_recall", rng.random(m) < p, rng.random(n) < q))


def averaged(draw: Callable[[Rng], Floats]) -> Callable[[Rng], Ends]:
    return lambda rng: of(intervals.mean_probability("extraction_probability", draw(rng)))


def unlearnt(n: int = 1, bits: float = 20.0) -> tuple[float, Callable[[Rng], Floats]]:
    """Exposure of n canaries over that of the first place, in a space of so many bits: P(exposure >= e) is 2^-e."""
    mean = (1 - 2**-bits) / math.log(2) / bits
    return mean, lambda rng: np.minimum(rng.exponential(1 / math.log(2), n), bits) / bits


def forecast() -> tuple[float, Callable[[Rng], Ends]]:
    sizes, rates = (160, 60, 40, 40), (0.0, 0.05, 0.3, 0.9)
    counts, out = np.repeat([1, 4, 16, 64], sizes), np.repeat(rates, sizes)
    truth = float(np.minimum(out, 0.3).mean())
    return truth, lambda rng: of(dose.predicted(counts.tolist(), rng.random(300) < out, 16))


def of_generations() -> Iterator[Case]:
    """What generations hold that were never asked for a record."""
    alike, uneven = np.full(300, 2e-3), 0.05 / np.arange(1, 301)
    for n in (400, 2000):
        size = f"{n:,} generations"
        for distribution, p in (("300 records, alike", alike), ("300 records, 1/rank", uneven)):
            yield Case("new records in the next 1,000", distribution, size, 0.0, to_come(n, p))
        yield Case("records there are to see", "300 records, alike", size, 300.0, there_are(n, alike))
        yield Case("records there are to see, at least", "300 records, 1/rank", size, 300.0, there_are(n, uneven, True))
        for distribution, p, q in (("2% hold some", 0.02, 0.002), ("20% hold some", 0.2, 0.02)):
            yield Case(
                "memorised n-grams per 1,000", distribution, size, 1500 * p, holding(n, p, q, memorised.MEMORISED)
            )
            name = metrics.excess_of(memorised.MEMORISED)
            yield Case(
                "memorised n-grams per 1,000, excess", distribution, size, 1500 * (p - q), holding(n, p, q, name)
            )


def incidence(rng: Rng, draws: int, p: Floats) -> tuple[NDArray[np.int64], Floats]:
    """In how many draws each record that was seen was; the probabilities of the others."""
    counts = rng.binomial(draws, p)
    return counts[counts > 0], p[counts == 0]


def to_come(draws: int, p: Floats) -> Callable[[Rng], Ends]:
    """Against what was truly to come, which is another number at each audit: the truth is 0."""

    def audit(rng: Rng) -> Ends:
        seen, unseen = incidence(rng, draws, p)
        low, high, least, most = of(species.new_in_next(memorised.NEW, seen, draws, 1000))
        truth = 1000 * float(unseen.sum())
        return low - truth, high - truth, least - truth, most - truth

    return audit


def there_are(draws: int, p: Floats, at_least: bool = False) -> Callable[[Rng], Ends]:
    def audit(rng: Rng) -> Ends:
        found = species.richness(memorised.RICHNESS, incidence(rng, draws, p)[0], draws, 3000)
        assert found is not None
        return lower(found.low) if at_least else (found.low, found.high, *of(found)[2:])

    return audit


def holding(n: int, p: float, q: float, name: str) -> Callable[[Rng], Ends]:
    """Of the generations that hold any, half hold one n-gram and half two; as many of held-out text at a rate of q."""
    corpus = memorised.Corpus(1000, 1000, 300, 300)

    def audit(rng: Rng) -> Ends:
        own, other = (((rng.random(n) < rate) * rng.integers(1, 3, n)).tolist() for rate in (p, q))
        every = [memorised.Held(a, 0, b, {}) for a, b in zip(own, other, strict=True)]
        return of(next(m for m in memorised.measured(every, corpus, 8, 64, {}) if m.name == name))

    return audit


def of_unlearning() -> Iterator[Case]:
    """A half is extracted before; of that a fifth after unlearning, and as much again of the rest when relearned."""
    for n in (30, 100, 300):
        for change, truth in (("unlearned", -0.4), ("relearned", 0.08), ("share_back", 0.2)):
            name = f"unlearning: {change.replace('_', ' ')}, recall"
            yield Case(name, "50, 10, 18%", f"{n}", truth, forgetting(n, change, "recall"))
        distribution = "50, 10, 18%, by how much"
        yield Case(
            "unlearning: unlearned, probability", distribution, f"{n}", -0.2, forgetting(n, "unlearned", PROBABILITY)
        )


def forgetting(n: int, change: str, name: str) -> Callable[[Rng], Ends]:
    def audit(rng: Rng) -> Ends:
        before = (rng.random(n) < 0.5).astype(float)
        after = before * (rng.random(n) < 0.2)
        again = np.maximum(after, before * (rng.random(n) < 0.2))
        by = rng.random(n) if name == PROBABILITY else np.ones(n)
        columns = {unlearning.BEFORE: before * by, unlearning.AFTER: after * by, unlearning.RELEARNED: again * by}
        found = unlearning.recalled("extraction", name, unlearning.FORGOTTEN, columns).changes.get(change)
        return (-math.inf, math.inf, -math.inf, math.inf) if found is None else of(found)

    return audit


def ranked(n: int, errors: int) -> Case:
    """40% are right, one deviation surer; so many of all that are wrong are allowed."""
    cut = norm.isf(errors / (0.6 * n))

    def audit(rng: Rng) -> Ends:
        right = rng.random(n) < 0.4
        order = np.argsort(-(rng.normal(size=n) + right))
        return of(recall_of_guesses(f"recall_at_{errors}_errors", order, right[order], n, errors))

    return Case(f"Recall@{errors}", "right ones 1σ surer", f"{n}", 0.4 * float(norm.sf(cut - 1)), audit, 0.3)


def by_document(count: int) -> tuple[float, Callable[[Rng], Ends]]:
    """A document is learnt or not (20%); of one that is, each of three parts comes out in half of the cases."""
    secrets = [
        Secret(f"{d}.{i}", (0,), (1, 2), 1, True, document=str(d), at=10 * i) for d in range(count) for i in range(3)
    ]

    def audit(rng: Rng) -> Ends:
        learnt = rng.random(count) < 0.2
        hit = {s.id: bool(learnt[int(s.document or 0)] and rng.random() < 0.5) for s in secrets}
        return of(documents.measured(secrets, hit)[0])

    return 0.2 * (1 - 0.5**3), audit


# --- membership -------------------------------------------------------------------------------------------------------

SIZES = ((100, 100), (300, 100), (500, 100), (200, 200), (1000, 1000))
Distribution = Callable[[Rng, int, int], tuple[Floats, Floats]]


def jump(rng: Rng, m: int, n: int) -> tuple[Floats, Floats]:
    """A tenth of the members above everybody, the rest just below the top hundredth: the worst that there is."""
    return np.where(rng.random(m) < 0.1, 2.0, rng.uniform(0.98, 0.99, m)), rng.random(n)


def ties(rng: Rng, m: int, n: int) -> tuple[Floats, Floats]:
    return (
        rng.choice(4, m, p=[0.5, 0.2, 0.2, 0.1]).astype(float),
        rng.choice(4, n, p=[0.9, 0.08, 0.015, 0.005]).astype(float),
    )


def leaks_rarely(rng: Rng, m: int, n: int) -> tuple[Floats, Floats]:
    return rng.normal(0, 1, m) + 50 * (rng.random(m) < 0.01), rng.normal(0, 1, n)


def shifted(by: float) -> Distribution:
    return lambda rng, m, n: (rng.normal(by, 1, m), rng.normal(0, 1, n))


def heavy(rng: Rng, m: int, n: int) -> tuple[Floats, Floats]:
    return rng.standard_cauchy(m) + 2, rng.standard_cauchy(n)


RATES: dict[str, tuple[Distribution, float]] = {  # and the true share of members at 1% false positives
    "normal, 1.5σ": (shifted(1.5), float(norm.sf(norm.isf(0.01) - 1.5))),
    "Cauchy": (heavy, float(cauchy.sf(cauchy.isf(0.01) - 2))),
    "1% of members leak": (leaks_rarely, 0.01 + 0.99 * 0.01),
    "ties": (ties, 0.1),
    "a jump at 1%": (jump, 0.1),
}


def of_membership(rate: Callable[[Floats, Floats], Ends] = rate_of) -> Iterator[Case]:
    """rate: how the share found at 1% false positives is measured."""
    for m, n in SIZES:
        for distribution, (draw, truth) in RATES.items():
            yield Case("TPR at 1% FPR", distribution, f"{m}/{n}", truth, scored(rate, draw, m, n))
    for (m, n), by in (((300, 100), 0.0), ((300, 100), 1.0), ((60, 20), 1.0)):
        truth = float(norm.cdf(by / math.sqrt(2)))
        yield Case("AUC", f"normal, {by:g}σ", f"{m}/{n}", truth, scored(auc_of, shifted(by), m, n), 0.5)
    yield Case("difference of TPR at 1% FPR", "1.5σ; as many for sure", "300/100", 0.0, of_rates(300, 100), 0.05)
    yield Case("difference of AUC", "1σ, paired", "300/100", 0.0, of_aucs(300, 100))


def scored(measure: Callable[[Floats, Floats], Ends], draw: Distribution, m: int, n: int) -> Callable[[Rng], Ends]:
    return lambda rng: measure(*draw(rng, m, n))


def auc_of(own: Floats, others: Floats) -> Ends:
    """By the interval on record in the direction above 1/2, as in a report."""
    found = roc.auc_measured("membership_auc", own, others)
    return (found.low, found.high, *ends(RecordedInterval(found.value, found.low, found.high, found.n))[2:])


def of_rates(m: int, n: int) -> Callable[[Rng], Ends]:
    equal = RATES["normal, 1.5σ"][1]

    def audit(rng: Rng) -> Ends:
        sure = np.where(rng.random(m) < equal, 9.0, rng.normal(-9, 1, m)), rng.normal(0, 1, n)
        return ends(roc.RateDifference(shifted(1.5)(rng, m, n), sure, 0.01))

    return audit


def of_aucs(m: int, n: int) -> Callable[[Rng], Ends]:
    def audit(rng: Rng) -> Ends:
        own, others = shifted(1.0)(rng, m, n)
        sides = [(own + rng.normal(size=m), others + rng.normal(size=n)) for _ in range(2)]
        return ends(roc.auc_difference(*sides))

    return audit


# --- epsilon ----------------------------------------------------------------------------------------------------------


def of_epsilon() -> Iterator[Case]:
    right = 1 / (1 + math.exp(-1.0))

    def response(rng: Rng, n: int) -> tuple[Floats, NDArray[np.bool_]]:
        coins = rng.random(n) < 0.5
        return (coins == (rng.random(n) < right)) + rng.random(n) / 10, coins

    def normal(rng: Rng, n: int) -> tuple[Floats, NDArray[np.bool_]]:
        coins = rng.random(n) < 0.5
        return 2.0 * coins + rng.normal(size=n), coins

    for n in (100, 1000):
        pure, approximate = one_run(response, n, 0.0, 0), one_run(normal, n, 1e-5, 1)
        yield Case("ε of one run", "randomised response, ε 1", f"{n} canaries", 1.0, pure, 0.3)
        yield Case("ε by f-DP", "Gaussian, μ 2", f"{n} canaries", gaussian_epsilon(2.0, 1e-5), approximate, 0.1)

    def game(rng: Rng) -> Ends:
        scores, coins = response(rng, 768)
        return lower(games_audited(counted(np.round(scores), coins, 0.0, LEVEL), 0.0, LEVEL).epsilon)

    yield Case("ε of games", "randomised response, ε 1", "768 games", 1.0, game, 0.3)


def one_run(
    play: Callable[[Rng, int], tuple[Floats, NDArray[np.bool_]]], canaries: int, delta: float, which: int
) -> Callable[[Rng], Ends]:
    return lambda rng: lower(audited(*play(rng, canaries), delta)[which].epsilon)


# --- texts, and models held against each other ------------------------------------------------------------------------


def of_models() -> Iterator[Case]:
    for n in (60, 100, 240):
        for distribution, (draw, mean) in NATS.items():
            yield Case("perplexity", distribution, f"{n} texts", *perplexity(n, draw, mean))
            yield Case("perplexity ratio", f"5% more; {distribution}", f"{n} texts", 1.05, ratio(n, draw, mean))
    yield Case("difference of perplexities", "paired; exponential", "100 texts", *perplexities_apart(100))
    yield Case("difference of recall", "10% each, paired", "300", 0.0, shares(300), 0.05)
    yield Case("difference of probabilities", "rare, paired", "300", 0.0, means(300), 0.1)
    named = "frontier: a least one named among 3 alike"
    yield Case(named, "probabilities", "300", 0.5, lambda rng: lower(float(means_apart(rng))), 0.05)
    yield Case(named, "AUCs", "300/100", 0.5, lambda rng: lower(float(aucs_apart(rng))), 0.05)


NATS: dict[str, tuple[Callable[[Rng, int], Floats], float]] = {  # nll a token of a text, and its mean
    "log-normal nll, σ 0.4": (lambda rng, n: rng.lognormal(math.log(2), 0.4, n), 2 * math.exp(0.4**2 / 2)),
    "exponential nll": (lambda rng, n: rng.exponential(2, n), 2.0),
    "log-normal nll, σ 1": (lambda rng, n: rng.lognormal(0, 1, n), math.exp(0.5)),
}


def perplexity(n: int, draw: Callable[[Rng, int], Floats], mean: float) -> tuple[float, Callable[[Rng], Ends]]:
    def audit(rng: Rng) -> Ends:
        tokens = rng.integers(20, 100, n)
        nll = tokens * draw(rng, n)
        return of(intervals.perplexity(list(zip(nll.tolist(), tokens.tolist(), strict=True))))

    return math.exp(mean), audit


def ratio(n: int, draw: Callable[[Rng, int], Floats], mean: float) -> Callable[[Rng], Ends]:
    """A text's nll rises by a share of a distribution of its own."""

    def audit(rng: Rng) -> Ends:
        tokens = rng.integers(20, 100, (1, n)).astype(float)
        base = tokens * rng.lognormal(math.log(2), 0.4, (1, n))
        nll = np.array([base, base + tokens * draw(rng, n) * math.log(1.05) / mean])
        return of(frontier.perplexity_ratios(nll, tokens, base)[1])

    return audit


def perplexities_apart(n: int) -> tuple[float, Callable[[Rng], Ends]]:
    """As a sweep, a chain of causes and a study of several runs hold two against each other."""

    def cell(nll: Floats, tokens: Floats) -> contrasts.Replicates:
        held = {"tokens": tokens.tolist(), "perplexity": nll.tolist()}
        return contrasts.Replicates("t", "worst", "a", measured={0: {}}, heldout={0: held})

    def audit(rng: Rng) -> Ends:
        tokens = rng.integers(20, 100, n).astype(float)
        base, more = tokens * rng.lognormal(math.log(2), 0.4, n), tokens * rng.exponential(0.2, n)
        parts = ((1, base + more), (-1, base))
        return of(contrasts.contrast("d", [contrasts.Part(c, "perplexity", cell(nll, tokens)) for c, nll in parts]))

    mean = 2 * math.exp(0.4**2 / 2)
    return math.exp(mean + 0.2) - math.exp(mean), audit


def shares(n: int) -> Callable[[Rng], Ends]:
    return lambda rng: ends(paired_shares(rng.random(n) < 0.1, rng.random(n) < 0.1))


def rare(rng: Rng, n: int) -> Floats:
    return rng.random(n) ** 0.5 * (rng.random(n) < 0.1)


def means(n: int) -> Callable[[Rng], Ends]:
    return lambda rng: ends(paired_means(rare(rng, n), rare(rng, n)))


def means_apart(rng: Rng) -> bool:
    return alone(frontier.means(np.array([rare(rng, 300) for _ in range(3)])))


def aucs_apart(rng: Rng) -> bool:
    return alone(frontier.aucs([[shifted(1.0)(rng, 300, 100)] for _ in range(3)]))


def alone(found: Sequence[frontier.Leak]) -> bool:
    return sum(frontier.may_be_least(len(found), lambda i, j: frontier.difference(found[i], found[j]))) == 1


# --- the table --------------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    parts = (of_attacks, of_generations, of_unlearning, of_membership, of_epsilon, of_models)
    return [case for part in parts for case in part()]


def simulated(case: Case, audits: int, seed: int = 0) -> Row:
    rng, missed, fails, holds = generator("intervals", case.quantity, case.distribution, case.size, seed), 0, 0, 0
    count = max(20, round(audits * case.part))
    for _ in range(count):
        low, high, least, most = case.audit(rng)
        missed += not low - 1e-12 <= case.truth <= high + 1e-12
        fails += least > case.truth + 1e-12
        holds += most < case.truth - 1e-12
    return Row(case, count, (missed, fails, holds))


COLUMNS = ("quantity", "distribution", "size", "audits", "the 95% interval misses", "a gate at the truth fails",
           "holds", "verdict")  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    case, shares = row.case, []
    one_end = case.quantity.startswith(("ε", "frontier"))  # the same count three times
    for wrong in row.wrong[:1] if one_end else row.wrong:
        low, high = clopper_pearson(wrong, row.audits)
        shares.append(f"{wrong / row.audits:.1%} [{low:.1%}–{high:.1%}]")
    shares += [""] * (3 - len(shares))
    return case.quantity, case.distribution, case.size, f"{row.audits:,}", *shares, row.verdict


def main(
    audits: Annotated[int, "of each case; fewer of the slow ones"] = 1000,
    only: Annotated[tuple[str, ...], "quantities that begin so"] = (),
    seed: int = 0,
    out: Annotated[Path | None, "file for the table"] = None,
) -> int:
    chosen = [case for case in cases() if not only or case.quantity.startswith(only)]
    if not chosen:
        refuse(f"expected a quantity that begins with {' or '.join(only)}, there is none")
    page, failed = Page(out), False
    page.head(*COLUMNS)
    for case in chosen:
        row = simulated(case, audits, seed)
        page.row(*cells(row))
        failed |= row.failed
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(run(main))

"""Measure the training data in generated texts, and the precision of rankings of these texts.

The inputs are the n-grams of generations, marked by whether they occur in training data or in
held-out text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.nouns import Tokens
from auditor.core.result import Measurement
from auditor.statistics import unseen_species
from auditor.statistics.intervals import (
    compute_mean_probability,
    measure_share,
    scale_measurement,
    subtract_nonmember_mean,
)
from auditor.statistics.metrics import name_excess_metric, name_nonmember_metric

MEMORISED = "memorised_per_1000"
COMMON = "common_per_1000"
GENERATIONS = "memorised_generations"
PRECISION = "memorised_in_top_100"
RECORDS = "records_out"
NEW = "new_records_per_1000"
RICHNESS = "records_to_come_out"
PER = 1000  # generations
TOP = 100  # generations at the head of a ranking
UNIT = f"per {PER:,}"


@dataclass(frozen=True)
class NGramMatches:
    """The k n-grams of a generation that occur in given texts; arrays have shape (k,).

    starts: the position in the generation where the n-gram starts.
    trained: True if the n-gram occurs in training data.
    heldout: True if the n-gram occurs in held-out text.
    record: the index of the only text that contains the n-gram; -1 if several texts do.
    """

    starts: Ints
    trained: Bools
    heldout: Bools
    record: Ints


@dataclass(frozen=True)
class TokenRun:
    """A sequence of `length` tokens in a generation that also occurs in a record.

    start: the position in the generation at which the sequence starts.
    """

    start: int
    length: int


@dataclass(frozen=True)
class MemorisedTokens:
    """Numbers of non-overlapping n-grams in a generation, by where they occur.

    memorised: n-grams that occur in training data only.
    heldout: n-grams that occur in held-out text only.
    common: n-grams that occur in both.
    records: the longest common sequence with each training record. Only records that are the only
        source of one of the n-grams are listed.
    heldout_records: the held-out records that are the only source of one of the n-grams.
    """

    memorised: int
    common: int
    heldout: int
    records: Mapping[int, TokenRun]
    heldout_records: tuple[int, ...] = ()


def count_memorised_ngrams(matches: NGramMatches, n: int) -> MemorisedTokens:
    trained_only = matches.trained & ~matches.heldout
    heldout_only = matches.heldout & ~matches.trained
    single_record = matches.record >= 0
    records = find_longest_memorised_runs(matches, trained_only, n)
    heldout_records = tuple(np.unique(matches.record[heldout_only & single_record]).tolist())
    memorised, common, heldout = (
        _count_disjoint_ngrams(matches.starts[mask], n)
        for mask in (trained_only, matches.trained & matches.heldout, heldout_only)
    )
    return MemorisedTokens(memorised, common, heldout, records, heldout_records)


def find_longest_memorised_runs(matches: NGramMatches, mask: Bools, n: int) -> dict[int, TokenRun]:
    """Return the longest token sequence that a generation has in common with each record.

    Sequences contain only n-grams that no second record contains. mask: (k,) True for the n-grams
    to use.
    """
    runs = {}
    for record in np.unique(matches.record[mask & (matches.record >= 0)]).tolist():
        at = matches.starts[mask & (matches.record == record)]
        # N-grams that begin at k places in a row span k + n - 1 tokens.
        longest = max(np.split(at, np.flatnonzero(np.diff(at) > 1) + 1), key=len)
        runs[record] = TokenRun(int(longest[0]), len(longest) + n - 1)
    return runs


def _count_disjoint_ngrams(at: Ints, n: int) -> int:
    """Return the largest number of non-overlapping n-grams among those that start at `at`."""
    # Taking the first that fits is optimal: all have the same length and are in rising order.
    count = 0
    free = 0
    for start in at.tolist():
        if start >= free:
            count = count + 1
            free = start + n
    return count


@dataclass(frozen=True)
class CorpusCounts:
    """The sizes of the training data and of the held-out texts.

    trained, heldout: the numbers of positions at which an n-gram starts.
    records: the number of training records with at least n tokens.
    heldout_records: the number of held-out records with at least n tokens.
    """

    trained: int
    heldout: int
    records: int
    heldout_records: int


def measure_generation_memorisation(
    generations: Sequence[MemorisedTokens],
    corpus: CorpusCounts,
    n: int,
    length: int,
    top_generations: Mapping[str, Sequence[int]],
) -> list[Measurement]:
    """Return the measurements of an attack that generates texts without a prefix.

    Args:
        generations: the n-gram counts of each generation.
        corpus: sizes of the searched texts. The baseline, n-grams in held-out text only, is scaled
            to the size of the training data.
        n: length of the n-grams.
        length: number of tokens in a generation.
        top_generations: indices of the `TOP` generations that a ranking puts first, keyed by
            ranking.
    """
    memorised, common, heldout_only = (
        np.array([getattr(generation, name) for generation in generations], dtype=float)
        for name in ("memorised", "common", "heldout")
    )
    most = length // n
    main = _estimate_rate_per_thousand(MEMORISED, memorised, most, f"n {n}; not in held-out text")
    measurements = [main]
    if corpus.heldout:
        scale = corpus.trained / corpus.heldout
        # The assumed maximum in an unseen generation: the maximum in the seen generations.
        holds = max(memorised.max(initial=0), heldout_only.max(initial=0)) or most
        note = (
            f"the baseline: n-grams of held-out text, times {scale:.3g}, because the training data "
            "have that many more"
        )
        floor = _estimate_rate_per_thousand(
            name_nonmember_metric(MEMORISED), heldout_only, holds, note, scale
        )
        measurements += [
            floor,
            subtract_nonmember_mean(name_excess_metric(MEMORISED), main, floor),
            _estimate_rate_per_thousand(COMMON, common, most, "in held-out text too"),
        ]
    measurements.append(measure_share(GENERATIONS, memorised > 0))
    draws = len(generations)
    by_record = Counter(chain.from_iterable(generation.records for generation in generations))
    note = f"of {corpus.records:,} trained on"
    measurements.append(_make_count_measurement(RECORDS, len(by_record), draws, note))
    if corpus.heldout_records:
        others = set().union(*(generation.heldout_records for generation in generations))
        name = name_nonmember_metric(RECORDS)
        note = f"of {corpus.heldout_records:,} held out"
        measurements.append(_make_count_measurement(name, len(others), draws, note))
    counts = np.array(sorted(by_record.values()), dtype=np.int64)
    measurements.append(unseen_species.estimate_new_species(NEW, counts, draws, PER))
    if len(counts):
        measurements.append(
            unseen_species.estimate_species_richness(RICHNESS, counts, draws, corpus.records)
        )
    for ranking, first in top_generations.items():
        hit = memorised[list(first)] > 0
        measurements.append(
            measure_share(f"{PRECISION}_{ranking}", hit, "near-duplicates left out")
        )
    return measurements


def _make_count_measurement(name: str, count: int, n: int, note: str) -> Measurement:
    return Measurement(name, float(count), float(count), float(count), n, "count", note)


def _estimate_rate_per_thousand(
    name: str, values: Floats, most: float, note: str, scale: float = 1.0
) -> Measurement:
    """Return the mean of `values` per 1,000 generations, by `compute_mean_probability`.

    values: counts of memorised n-grams. most: the largest possible value; the interval allows for
    it even if no generation has so many. scale: factor of the result.
    """
    m = compute_mean_probability(name, values / most, note)
    return scale_measurement(m, scale * PER * most, UNIT)


def select_distinct_texts(
    scores: Sequence[float], text: Callable[[int], Tokens], count: int = TOP
) -> list[int]:
    """Return indices of texts by decreasing score, omitting near-duplicates.

    A text is omitted if it is a near-duplicate of a text with a higher score. Equal scores keep
    their order. Two texts are near-duplicates if they share half of their trigrams of tokens,
    counted as often as they occur (Carlini et al. 2021, Section 6.1, which uses trigrams of words).
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    chosen = list[int]()
    holders = dict[tuple[int, ...], list[tuple[int, int]]]()
    # `holders` lists, by trigram, the chosen texts that contain it: only texts with a common
    # trigram are compared.
    for i in order:
        tokens = text(i)
        trigrams = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
        n_shared = Counter[int]()
        for trigram, times in trigrams.items():
            for other, other_times in holders.get(trigram, ()):
                n_shared[other] += min(times, other_times)
        if n_shared and 2 * max(n_shared.values()) >= trigrams.total():
            continue
        for trigram, times in trigrams.items():
            holders.setdefault(trigram, []).append((i, times))
        chosen.append(i)
        if len(chosen) == count:
            break
    return chosen

"""What a run found out secret by secret, as its report shows it: ids and numbers only.

`secrets.json` tells of each secret what may be told, `secrets.parquet` all that was measured of it.
Knows no models and no text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.conclusions import outcomes
from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Secret
from auditor.core.result import Measurement
from auditor.records import attacked_secrets, table
from auditor.records.attacked_secrets import SecretFacts
from auditor.records.table import Column
from auditor.statistics import documents, intervals


@dataclass(frozen=True)
class SecretDetails:
    """A run secret by secret. Empty where the folder keeps nothing of the kind.

    tokens: by target and secret, nats a token of the true suffix. exposure: by row and secret, the
    bits that are
    certain: -log2 of the null p-value, which is the exposure where the rank is exact.
    heldout: by target, of each held-out text its tokens and its summed nll, in nats.
    """

    secrets: tuple[SecretFacts, ...] = ()
    rows: Mapping[CellKey, RowValuesBySecret] = field(default_factory=dict)
    tokens: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    heldout: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    exposure: Mapping[CellKey, Mapping[str, float]] = field(default_factory=dict)
    # in generations, by quantity
    records: Mapping[CellKey, Mapping[str, Column]] = field(default_factory=dict)


def secret_fact_columns(
    secrets: Sequence[Secret], salt: str, canaries: Collection[str] = ()
) -> dict[str, Any]:
    """The record `read_secret_details` reads: a column a key; salt: the fingerprint of what made
    the aliases.

    canaries: ids of those that only probes look at.
    """
    columns = {
        name: [getattr(s, name) for s in secrets]
        for name in ("id", "alias", "member", "repeats", "group")
    }
    found = {"salt": salt, **columns, "length": [len(secret.suffix) for secret in secrets]}
    found["canary"] = [secret.id in canaries for secret in secrets]
    if any(secret.user is not None for secret in secrets):
        found |= {name: [getattr(s, name) for s in secrets] for name in ("user", "user_trained")}
    if all(secret.document is None for secret in secrets):
        return found
    # Reversed, so that of all parts of a document the first gives the alias that stays.
    first = {
        secret.document: secret.alias for secret in reversed(secrets) if secret.document is not None
    }
    named = [None if secret.document is None else first[secret.document] for secret in secrets]
    return {**found, "document": named, "at": [secret.at for secret in secrets]}


def secret_alias_by_id(folder: Path) -> dict[str, str]:
    """What reports call each secret of the run, by its id."""
    return {
        id: secret.alias
        for id, secret in (attacked_secrets.read_secret_facts(folder) or {}).items()
    }


def read_secret_details(folder: Path) -> SecretDetails:
    """What the folder keeps. Raises AuditError for a file that holds something else."""
    rows = {
        cell: row for cell, row in outcomes.read_row_values_by_secret(folder).items() if row.values
    }
    records: dict[CellKey, dict[str, Column]] = {}
    for column in table.read_secrets_table(folder, table.RECORDS):
        records.setdefault(column.cell, {})[column.quantity] = column
    exposure = {
        one.cell: {
            id: -math.log2(p) if p > 0 else math.inf
            for id, p in zip(one.ids, one.values, strict=True)
        }
        for one in table.read_secrets_table(folder, table.OBSERVED)
        if one.quantity == "null_p"
    }
    told = tuple((attacked_secrets.read_secret_facts(folder) or {}).values())
    return SecretDetails(
        told,
        rows,
        table.read_suffix_token_log_probs(folder),
        table.read_heldout_losses(folder),
        exposure,
        records,
    )


def extraction_counts_by_document(
    details: SecretDetails, seen: RowValuesBySecret
) -> dict[str, tuple[int, int, int]]:
    """Of members' documents: tokens of the longest block that was extracted, extracted parts, parts
    asked for."""
    if seen.outcome is None:
        return {}
    hit = dict(zip(seen.outcome.ids, seen.outcome.hit.tolist(), strict=True))
    parts = [
        documents.DocumentPart(s.document, s.at, s.length or 0, hit[s.id])
        for s in details.secrets
        if s.document is not None and s.member and s.id in hit
    ]
    longest = documents.measure_longest_extracted_blocks(parts)
    asked, out = (
        Counter(part.document for part in parts),
        Counter(part.document for part in parts if part.out),
    )
    worst = sorted(longest, key=lambda name: (-longest[name], name))
    return {name: (longest[name], out[name], asked[name]) for name in worst}


def extracted_and_asked_counts_by_person(
    details: SecretDetails, seen: RowValuesBySecret
) -> dict[str, tuple[int, int]]:
    """Of people whose records were trained on: records that were extracted, records asked for.
    Worst first."""
    if seen.outcome is None:
        return {}
    whose = {
        secret.id: secret.user
        for secret in details.secrets
        if secret.member and secret.user is not None
    }
    asked, out = Counter[str](), Counter[str]()
    for id, hit in zip(seen.outcome.ids, seen.outcome.hit.tolist(), strict=True):
        if id in whose:
            asked[whose[id]] += 1
            out[whose[id]] += hit
    return {
        one: (out[one], asked[one])
        for one in sorted(asked, key=lambda one: (-out[one], asked[one], one))
    }


# --- numbers over the secrets
# -----------------------------------------------------------------------------------------------


def first_suffix_tokens_accuracy_by_length(
    details: SecretDetails,
    seen: RowValuesBySecret,
    lengths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
) -> dict[int, Measurement]:
    """Share of members whose first guess is right in its first L tokens, of those with a suffix so
    long; by L.

    The longest suffix is the last L, so that where all are of one length its share is the recall.
    """
    of = {
        secret.id: secret.length
        for secret in details.secrets
        if secret.member and secret.length is not None
    }
    if seen.outcome is None or "lead" not in seen.outcome.traits or not of:
        return {}
    member = [i for i, id in enumerate(seen.ids) if id in of]
    length = np.array([of[seen.ids[i]] for i in member])
    # How many tokens of the suffix, from its first on, the guess has right.
    lead = seen.outcome.traits["lead"][member]
    if not len(length):
        return {}
    longest = int(length.max())
    shown = [*(L for L in lengths if longest > L), longest]
    return {
        L: intervals.share_with_interval("recall_first_tokens", lead[length >= L] >= L)
        for L in shown
    }


_BINS = 10  # of one width, over scores from 0 to 1


@dataclass(frozen=True)
class ScoreBin:
    """Guesses of about one score: the mean score, and the share of them that is right."""

    score: float
    right: Measurement


@dataclass(frozen=True)
class Reliability:
    """How well a score that is a probability keeps its word."""

    bins: tuple[ScoreBin, ...]
    error: float  # expected calibration error: mean |score - share right| over the bins, by guesses
    brier: float  # mean squared distance of the score from 1 (right) or 0 (wrong)
    n: int


def calibration_of_guess_scores(
    score: NDArray[np.float64], right: NDArray[np.bool_]
) -> Reliability:
    """Of (n,) scores in [0, 1] and whether each guess was right, over equally wide bins; empty bins
    are left out.

    Guo et al. 2017, Eq. 3 (expected calibration error); Brier 1950. Raises AuditError for a score
    that is none.
    """
    # Asked so that NaN fails as well; a sum of probabilities may be a rounding above 1.
    if not len(score) or not ((score >= 0) & (score <= 1 + 1e-9)).all():
        raise AuditError("expected at least one score, each a probability in [0, 1]")
    at = np.minimum((score * _BINS).astype(int), _BINS - 1)  # a score of 1 is in the last bin
    found = [
        ScoreBin(
            float(score[at == i].mean()), intervals.share_with_interval("right", right[at == i])
        )
        for i in np.unique(at)
    ]
    error = sum(abs(b.score - b.right.value) * b.right.n for b in found) / len(score)
    return Reliability(tuple(found), float(error), float(np.mean((score - right) ** 2)), len(score))


def survival_function(values: Sequence[float]) -> list[tuple[float, float]]:
    """(x, share of the values that are at least x) at every distinct finite value, rising; NaN is
    left out."""
    known = np.sort([value for value in values if not math.isnan(value)])
    # Infinities count in the shares, but have no place on an axis.
    return [(float(x), float(np.mean(known >= x))) for x in np.unique(known) if math.isfinite(x)]

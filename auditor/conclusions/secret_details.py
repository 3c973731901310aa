"""Read a run's results for each secret as reports show them: ids and numbers, no text.

`secrets.json` holds the attributes of each secret that may be published, `secrets.parquet` all
measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from auditor.conclusions import outcomes
from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.arrays import Bools, Floats
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Secret
from auditor.core.result import Measurement
from auditor.core.secret_table import build_secret_table
from auditor.records import attacked_secrets, table
from auditor.records.attacked_secrets import SecretAttributes
from auditor.records.table import Column, SuffixLogProbs
from auditor.statistics import documents, intervals


@dataclass(frozen=True)
class SecretDetails:
    """A run's results for each secret; empty if the folder has no such files.

    Args:
        secrets: the attributes of each secret that may be published.
        values_by_cell: results of each secret, keyed by cell (target, setting, attack or probe).
        tokens: log-probability in nats of each token of the true suffix, by target and secret.
        heldout: token count and summed nll in nats of each held-out text, keyed by target.
        exposure: exposure of each canary in bits, keyed by cell and secret. It is -log2 of the
            p-value of the canary's rank, so it is smaller than the true exposure if the rank is
            uncertain.
        records: table columns about the records that were extracted from texts drawn without a
            prefix, keyed by cell and quantity.
    """

    secrets: Sequence[SecretAttributes] = ()
    values_by_cell: Mapping[CellKey, ValuesBySecret] = field(default_factory=dict)
    tokens: Mapping[str, SuffixLogProbs] = field(default_factory=dict)
    heldout: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    exposure: Mapping[CellKey, Mapping[str, float]] = field(default_factory=dict)
    records: Mapping[CellKey, Mapping[str, Column]] = field(default_factory=dict)


def build_attribute_columns(
    secrets: Sequence[Secret], salt: str, canaries: Collection[str]
) -> dict[str, Any]:
    """Return the columns of `secrets.json`, keyed by name, which describe secrets without text.

    Each column has one value per secret, such as its id, alias, membership and number of copies.
    "salt" is the one exception.

    Args:
        secrets: the secrets.
        salt: id of the salt with which the aliases were made (`salt_fingerprint`).
        canaries: ids of secrets that probes query and attacks do not.
    """
    table = build_secret_table(secrets)
    facts: dict[str, Any] = {"salt": salt}
    for name in ("id", "alias", "member", "repeats", "group"):
        facts[name] = table.list_values(name)
    facts["length"] = table.lengths[:, 1].tolist()
    facts["canary"] = [id in canaries for id in table.ids]
    if "user" in table.columns:
        for name in ("user", "user_trained"):
            facts[name] = table.list_values(name)
    if "document" in table.columns:
        documents = table.list_values("document")
        aliases = table.list_values("alias")
        # Reversed, so that the first part of a document gives the document's alias.
        alias_by_document = dict(zip(reversed(documents), reversed(aliases), strict=True))
        alias_by_document[None] = None
        facts["document"] = list(map(alias_by_document.get, documents))
        facts["at"] = table.list_values("at")
    return facts


def map_aliases(folder: Path) -> dict[str, str]:
    """Return the alias that reports use for each secret, keyed by secret id."""
    return {
        secret.id: secret.alias for secret in attacked_secrets.read_secret_attributes(folder) or ()
    }


def read_secret_details(folder: Path) -> SecretDetails:
    """Read a run folder's results for each secret. Raise AuditError for a malformed file."""
    rows = {}
    for cell, row in outcomes.read_secret_values(folder).items():
        if row.values:
            rows[cell] = row
    records: dict[CellKey, dict[str, Column]] = {}
    for column in table.read_secrets_table(folder, table.RECORDS):
        records.setdefault(column.cell, {})[column.quantity] = column
    exposure = {}
    for observed in table.read_secrets_table(folder, table.OBSERVED, "null_p"):
        exposure[observed.cell] = {
            id: -math.log2(p) if p > 0 else math.inf
            for id, p in zip(observed.ids, observed.values, strict=True)
        }
    return SecretDetails(
        attacked_secrets.read_secret_attributes(folder) or (),
        rows,
        table.read_suffix_token_log_probs(folder),
        table.read_heldout_losses(folder),
        exposure,
        records,
    )


def count_document_extractions(
    details: SecretDetails, values_by_secret: ValuesBySecret
) -> dict[str, tuple[int, int, int]]:
    """Count the extracted parts of each training document.

    Args:
        details: the run's results for each secret.
        values_by_secret: judged results of an attack.

    Returns:
        Three counts, keyed by document: tokens in the longest extracted block, extracted parts, and
            attacked parts. {} if the results are a probe's.
    """
    if not values_by_secret.is_judged:
        return {}
    hit = dict(zip(values_by_secret.ids, values_by_secret.hit.tolist(), strict=True))
    parts = []
    for s in details.secrets:
        if s.document is not None and s.member and s.id in hit:
            parts.append(documents.DocumentPart(s.document, s.at, s.length or 0, hit[s.id]))
    longest = documents.measure_longest_extracted_blocks(parts)
    attacked_parts = Counter(part.document for part in parts)
    n_extracted = Counter(part.document for part in parts if part.out)
    worst = sorted(longest, key=lambda name: (-longest[name], name))
    return {name: (longest[name], n_extracted[name], attacked_parts[name]) for name in worst}


def count_person_extractions(
    details: SecretDetails, values_by_secret: ValuesBySecret
) -> dict[str, tuple[int, int]]:
    """Return the numbers of extracted and of attacked records, keyed by person.

    The person with the most extracted records comes first. Only training records are counted.
    Return {} if the results are a probe's.
    """
    if not values_by_secret.is_judged:
        return {}
    person_by_id = {}
    for secret in details.secrets:
        if secret.member and secret.user is not None:
            person_by_id[secret.id] = secret.user
    n_attacked, n_extracted = Counter[str](), Counter[str]()
    for id, hit in zip(values_by_secret.ids, values_by_secret.hit.tolist(), strict=True):
        if id in person_by_id:
            n_attacked[person_by_id[id]] += 1
            n_extracted[person_by_id[id]] += hit
    return {
        person: (n_extracted[person], n_attacked[person])
        for person in sorted(
            n_attacked, key=lambda name: (-n_extracted[name], n_attacked[name], name)
        )
    }


# --- numbers over the secrets ---


def measure_length_accuracy(
    details: SecretDetails,
    values_by_secret: ValuesBySecret,
    lengths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
) -> dict[int, Measurement]:
    """Return the share of members whose first guess has the leading L tokens right, keyed by L.

    Only suffixes of at least L tokens count. The last L is the length of the longest suffix. Its
    share therefore equals the recall if all suffixes have the same length. Return {} if the results
    are a probe's.

    Args:
        details: the run's results for each secret.
        values_by_secret: judged results of an attack.
        lengths: the values of L, besides the longest suffix.
    """
    if not values_by_secret.is_judged or "lead" not in values_by_secret.columns:
        return {}
    n_tokens_by_id = {}
    for secret in details.secrets:
        if secret.member and secret.length is not None:
            n_tokens_by_id[secret.id] = secret.length
    member = []
    for i, id in enumerate(values_by_secret.ids):
        if id in n_tokens_by_id:
            member.append(i)
    length = np.array([n_tokens_by_id[values_by_secret.ids[i]] for i in member])
    # count of correct tokens from the start of the suffix
    lead = values_by_secret.columns["lead"][member]
    if not len(length):
        return {}
    longest = int(length.max())
    reported_lengths = [*(L for L in lengths if longest > L), longest]
    return {
        L: intervals.measure_share("recall_first_tokens", lead[length >= L] >= L)
        for L in reported_lengths
    }


_BINS = 10  # of equal width, over scores from 0 to 1


@dataclass(frozen=True)
class ScoreBin:
    """Guesses with similar scores.

    Args:
        score: mean score.
        right: share of correct guesses.
    """

    score: float
    right: Measurement


@dataclass(frozen=True)
class Reliability:
    """Calibration of a score that is a probability.

    Args:
        bins: guesses grouped by score.
        error: expected calibration error: mean |score - share right|, weighted by bin size.
        brier: mean squared difference between the score and 1 (right) or 0 (wrong).
        n: number of guesses.
    """

    bins: tuple[ScoreBin, ...]
    error: float
    brier: float
    n: int


def calibrate_guess_scores(score: Floats, right: Bools) -> Reliability:
    """Compute the calibration of n scores in [0, 1].

    Bins have equal width, and empty bins are omitted. Guo et al. 2017, Eq. 3 (expected calibration
    error); Brier 1950. Raise AuditError for a score outside [0, 1].

    Args:
        score: the score of each guess, (n,).
        right: True for each correct guess, (n,).
    """
    # NaN fails this test too; a sum of probabilities may exceed 1 by rounding.
    if not len(score) or not ((score >= 0) & (score <= 1 + 1e-9)).all():
        raise AuditError("expected at least one score, each a probability in [0, 1]")
    # a score of 1 is in the last bin
    bin_index = np.minimum((score * _BINS).astype(int), _BINS - 1)
    bins = []
    for i in np.unique(bin_index):
        bins.append(
            ScoreBin(
                float(score[bin_index == i].mean()),
                intervals.measure_share("right", right[bin_index == i]),
            )
        )
    error = sum(abs(b.score - b.right.value) * b.right.n for b in bins) / len(score)
    return Reliability(tuple(bins), float(error), float(np.mean((score - right) ** 2)), len(score))


def compute_survival_function(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (x, share of values >= x) for each distinct finite x in rising order; ignore NaN."""
    known = np.sort([value for value in values if not math.isnan(value)])
    # Infinities count in the shares, but do not fit on an axis.
    return [(float(x), float(np.mean(known >= x))) for x in np.unique(known) if math.isfinite(x)]

"""Measure leakage per person: each person counts once and is resampled with all their records.

Records of one person are not independent, so an interval over records is too narrow. Codes identify
people; no names are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from auditor.core.arrays import Bools, Floats
from auditor.core.nouns import Secret
from auditor.core.result import Measurement
from auditor.statistics import roc

LEAST = 20  # fewest people for a measurement
USER = "user"  # trait of an outcome: the code of each secret's person, NaN if unknown
RECALL = "user_recall"  # mean over people of the share of their records
INFERENCE = "user_inference_auc"
INFERENCE_CONTROL = f"{INFERENCE}_reference_alone"


def encode_people(secrets: Sequence[Secret]) -> Floats:
    """Return a number that identifies each secret's person, of shape (secrets,); NaN if unknown.

    An untrained record is no baseline if its person has trained records, so its code is NaN too.
    """
    names = sorted({s.user for s in secrets if s.user is not None})
    at = {name: float(i) for i, name in enumerate(names)}
    return np.array(
        [
            at[s.user] if s.user is not None and s.user_trained == s.member else np.nan
            for s in secrets
        ]
    )


def average_per_person(values: Floats | Bools, user: Floats) -> Floats:
    """Return the mean over each person's records, (people,); empty for fewer than `LEAST` people.

    user: (secrets,) codes from `encode_people`.
    """
    known = ~np.isnan(user)
    people, of = np.unique(user[known], return_inverse=True)
    if len(people) < LEAST:
        return np.empty(0)
    return np.bincount(of, values[known].astype(float)) / np.bincount(of)


def measure_user_inference(
    secrets: Sequence[Secret], scores: Mapping[str, Floats], note: str
) -> tuple[Measurement, ...]:
    """Measure how well a person's untrained records reveal that other records of theirs were used.

    See Kandpal et al. 2024. Each person's score is the mean over those records of the person that
    were not trained on. The AUC compares people who also have trained records with people who have
    none.

    Args:
        secrets: all attacked records; only untrained records count.
        scores: scores of shape (secrets,), keyed by metric.
        note: start of the note in each measurement; the numbers of people follow.

    Returns:
        An AUC for each metric; () if either group has fewer than `LEAST` people.
    """
    records_by_person: dict[bool, dict[str, list[int]]] = {True: {}, False: {}}
    for i, secret in enumerate(secrets):
        if secret.user is not None and not secret.member:
            records_by_person[secret.user_trained].setdefault(secret.user, []).append(i)
    if min(map(len, records_by_person.values())) < LEAST:
        return ()
    inside, others = records_by_person.values()
    count_note = f"{note}, {len(inside):,} people in it and {len(others):,} people not"
    measurements = []
    for name, values in scores.items():
        members, nonmembers = (
            np.array([values[at].mean() for at in side.values()]) for side in (inside, others)
        )
        measurements.append(roc.estimate_auc(name, members, nonmembers, count_note))
    return tuple(measurements)

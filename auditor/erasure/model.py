"""Test a model for deleted records: by completions, by ranks of personal data and by membership.

All numbers come from one run of `audit` on the deleted and the kept records. The run's folder
contains texts, so it is removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from auditor.attacks.identifiers import Identifiers
from auditor.conclusions.outcomes import ValuesBySecret, read_secret_values
from auditor.core.disk import open_scratch_folder
from auditor.erasure.layers import (
    CANNOT_TELL,
    LayerVerdict,
    judge_erasure_places,
    judge_missing_records,
)
from auditor.erasure.records import ErasureRecords
from auditor.erasure.windows import TEXT
from auditor.records import private_texts, table
from auditor.statistics import rank_tests, roc
from auditor.statistics.metrics import name_score_column

if TYPE_CHECKING:
    from auditor.api import FinishedRun
    from auditor.core.result import Finding

DISCOVERIES = 0.05  # false-discovery rate among the deleted records
REMEDY = "train the model again without these records"
_WHAT = {
    "extraction-probability": ("greedy completion of the beginning", TEXT),
    "identifiers": ("rank among values of its format", "personal data"),
    "membership": ("likelihood, compared with --nonmembers", "membership"),
}
_SCORE = name_score_column("loss")  # fixed before any label is seen, so that p-values are exact


@dataclass(frozen=True)
class ModelVerdicts:
    """Hold the verdict of each test of a model, and the SHA-256 of its weight files by name."""

    verdicts: tuple[LayerVerdict, ...]
    weights: Mapping[str, str]


def judge_model_erasure(
    model: Any, records: ErasureRecords, nonmembers: str | None, alternatives: int = 999
) -> ModelVerdicts:
    """Test whether a model (a folder, a hub id or an object) still knows the deleted records.

    nonmembers: a file of records that the model was not trained on, for the membership test;
    alternatives: the number of random values among which each personal value is ranked. Raise
    AuditError if the model or the file cannot be used.
    """
    from auditor.api import audit

    rows = [{"text": record.text} for record in records.targets]
    with open_scratch_folder(Path(tempfile.gettempdir()), "audit-erase") as scratch:
        run = audit(
            model,
            data=rows,
            nonmembers=nonmembers,
            attacks=("extraction-probability", Identifiers(alternatives), "membership"),
            setting="white-box",
            known_fraction=0.0,
            out=scratch / "run",
        )
        name = model if isinstance(model, str) else run.result.targets[0].description
        verdicts = tuple(_judge_layers(f"model:{name}", run, records))
        return ModelVerdicts(verdicts, run.result.weights)


def _judge_layers(label: str, run: FinishedRun, records: ErasureRecords) -> Iterator[LayerVerdict]:
    findings = {finding.attack: finding for finding in run.result.findings}
    rows = {}
    for cell, row in read_secret_values(run.folder).items():
        rows[cell.attack] = row
    readers = {
        "extraction-probability": _find_completed,
        "identifiers": _find_ranked_first,
        "membership": _find_members,
    }
    tested = set[int]()
    for attack, (layer, kind) in _WHAT.items():
        reason = findings[attack].not_applicable
        if reason:
            yield LayerVerdict(label, layer, kind, CANNOT_TELL, why=reason)
            continue
        is_seen_by_record = readers[attack](run.folder, findings[attack], rows[attack], records)
        tested.update(is_seen_by_record)
        places = {}
        for record, is_seen in is_seen_by_record.items():
            if is_seen:
                places[record] = layer
        yield judge_erasure_places(
            label, layer, kind, places, frozenset(is_seen_by_record), records, REMEDY
        )
    texts = {records.targets[i].text for i in tested}
    missing = [i for i in sorted(records.deleted) if records.targets[i].text not in texts]
    if missing and tested & records.deleted:  # otherwise each test reports it
        yield judge_missing_records(label, missing, "are in no test, as they are short", records)


def _find_completed(
    folder: Path, finding: Finding, row: ValuesBySecret, records: ErasureRecords
) -> Mapping[int, bool]:
    """Return whether greedy decoding completes a unique part of each record, keyed by record.

    A part is unique if no other record contains it.

    folder: the run's folder; finding, row: the results of the probe that completes parts.
    """
    texts = private_texts.read_secret_texts(folder)
    is_completed = dict[int, bool]()
    for id, bound in row.values_by_secret("rank_bound", True).items():
        record = _get_record(id)
        windows = records.windows.find(texts[id].suffix.encode(), (TEXT,))
        if any((origin.record, origin.kind) == (record, TEXT) for _, _, origin in windows):
            is_completed[record] = is_completed.get(record, False) or bound == 1
    return is_completed


def _find_ranked_first(
    folder: Path, finding: Finding, row: ValuesBySecret, records: ErasureRecords
) -> Mapping[int, bool]:
    """Return whether the model ranks any value of each record above chance, keyed by record."""
    kinds = list(Identifiers.metrics)
    # A kind whose alternatives are not exchangeable with the true values has no measurement.
    accepted = {measurement.name for measurement in finding.measurements}
    observations = table.read_probe_observations(folder)[finding.cell_key]
    p_values = dict[int, list[float]]()
    for id, is_member in zip(row.ids, row.member.tolist(), strict=True):
        if not is_member:
            continue
        values = observations[id]
        for i in range(sum(name.startswith("kind_") for name in values)):
            kind = int(values[f"kind_{i}"])
            if kind >= 0 and kinds[kind] in accepted:
                counts = []
                for name in ("above", "tied", "alternatives"):
                    counts.append(np.array([values[f"{name}_{i}"]]))
                p_value = rank_tests.compute_rank_p_values(*counts)[0]
                p_values.setdefault(_get_record(id), []).append(float(p_value))
    return _list_discoveries(p_values, records)


def _find_members(
    folder: Path, finding: Finding, row: ValuesBySecret, records: ErasureRecords
) -> Mapping[int, bool]:
    """Return whether each record is more likely than records not trained on, keyed by record."""
    scores = _average_parts(row.values_by_secret(_SCORE, members=True))
    others = _average_parts(row.values_by_secret(_SCORE, members=False))
    conformal = roc.compute_conformal_p_values(
        np.array(list(scores.values())), np.array(list(others.values()))
    )
    p_values = dict[int, list[float]]()
    for record, p_value in zip(scores, conformal.tolist(), strict=True):
        p_values[record] = [p_value]
    return _list_discoveries(p_values, records)


def _average_parts(values: Mapping[str, float]) -> Mapping[int, float]:
    """Return the mean value of each record's parts. values: keyed by part, as in `_get_record`."""
    parts = dict[int, list[float]]()
    for id, value in values.items():
        parts.setdefault(_get_record(id), []).append(value)
    return {record: float(np.mean(numbers)) for record, numbers in parts.items()}


def _list_discoveries(
    p_values: Mapping[int, Sequence[float]], records: ErasureRecords
) -> Mapping[int, bool]:
    """Return whether each record's p-value is significant, keyed by record.

    Deleted records are tested with a false-discovery rate. A kept record is tested as a deleted
    record would be that is the only one left, so that the control shows if the test could see it.

    p_values: the p-values of each record's parts, keyed by record.
    """
    # The smallest of n p-values times n is a p-value of the record (Bonferroni).
    values = {}
    for record, of_parts in p_values.items():
        values[record] = min(1.0, min(of_parts) * len(of_parts))
    deleted = [record for record in values if record in records.deleted]
    is_listed = {}
    for record, value in values.items():
        is_listed[record] = value * len(deleted) <= DISCOVERIES
    adjusted = rank_tests.adjust_false_discovery(np.array([values[record] for record in deleted]))
    return is_listed | dict(zip(deleted, (adjusted <= DISCOVERIES).tolist(), strict=True))


def _get_record(id: str) -> int:
    """Return the record ROW of a secret with the id `row-ROW` or, for a part, `row-ROW-PART`."""
    return int(id.split("-")[1])

"""Measure what stored vectors reveal of personal data: the rank of each value by similarity.

An attacker with a stored vector and the embedder embeds texts with the true value and with other
values of the same format. R of these alternatives are drawn uniformly. If the vector reveals
nothing of the true value, the value's rank by cosine is uniform, so rank / (R + 1) is an exact
p-value. No inverter is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from auditor.benchmarks.data import pii
from auditor.benchmarks.data.alternatives import UnknownFormat, find_value_format
from auditor.core.arrays import Floats
from auditor.core.errors import AuditError, wrap_library_errors
from auditor.core.result import Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.rag.documents import RagDocument, RagDocuments
from auditor.rag.layers import CANNOT_TELL, LEAKS, LEVEL, MOST_LAYERS, NO_LEAK
from auditor.rag.system import RagSystem
from auditor.statistics import rank_tests

ALTERNATIVES = 99  # number of alternatives to each value
_LEAST_ALTERNATIVES = 19
_CONTROL_LEVEL = 0.01
_MATCHED = 0.9  # share of stored vectors that are nearest to their own text
_TIE = 1e-6  # cosines this close are tied, because batches of other sizes round differently
REST_KNOWN = "the rest of the text is known"
VALUE_ONLY = "only the value is tried"
_QUERIES: dict[str, Callable[[str, str, str], str]] = {
    REST_KNOWN: lambda text, value, other: text.replace(value, other),
    VALUE_ONLY: lambda text, value, other: other,
}


@dataclass(frozen=True)
class VectorVerdict:
    """Verdict on what stored vectors reveal of the first personal value in each document.

    Attributes:
        knowledge: what the attacker knows.
        n_first: number of values that are more similar than all R alternatives.
        bits: mean of log2(R + 1) - log2(rank).
        p_value: p-value of all ranks together (Fisher 1932).
        control_p: p-value of the values' ranks when another document's vector is used, which must
            be uniform (Kolmogorov-Smirnov); NaN if there are too few values.
    """

    knowledge: str
    verdict: str
    n_first: int
    bits: Measurement
    p_value: float
    control_p: float
    why: str = ""


@dataclass(frozen=True)
class _StoredValue:
    """A value with its alternatives, and the row of its document's vector."""

    row: int
    text: str
    value: str
    alternatives: Sequence[str]


def judge_rag_vectors(
    corpus: RagDocuments, system: RagSystem, seed: int, progress: Callable[[str, int, int], None]
) -> list[VectorVerdict]:
    """Return one verdict for each kind of knowledge that an attacker may have.

    Return [] if the system gives no stored vectors. Raise AuditError if it gives wrong ones.
    """
    if system.stored_vectors is None or system.embed is None:
        return []
    documents = []
    for document, is_in in zip(corpus.documents, corpus.member.tolist(), strict=True):
        if is_in:
            documents.append(document)
    with wrap_library_errors(f"{system.label} failed to return stored vectors"):
        answer = system.stored_vectors([document.name for document in documents])
    stored = _normalise_vectors("stored_vectors(ids)", answer, len(documents))
    values = _find_values(documents, seed)
    if reason := _explain_doubt(system, documents, values, stored):
        unknown = Measurement("identifier_bits", math.nan, math.nan, math.nan, 0, "bits")
        return [
            VectorVerdict(name, CANNOT_TELL, 0, unknown, math.nan, math.nan, reason)
            for name in _QUERIES
        ]
    verdicts = []
    for knowledge, write_query in _QUERIES.items():
        n_above = np.zeros((2, len(values)))
        n_tied = np.zeros((2, len(values)))
        for i, entry in enumerate(values):
            progress(f"values by vector, {knowledge}", i, len(values))
            queries = []
            for candidate in (entry.value, *entry.alternatives):
                queries.append(write_query(entry.text, entry.value, candidate))
            vectors = _embed(system, queries)
            for side, row in enumerate((entry.row, _find_control_row(values, i))):
                n_above[side, i], n_tied[side, i] = count_more_similar(stored[row], vectors)
        verdicts.append(_judge_ranks(knowledge, values, n_above, n_tied, seed))
    return verdicts


def _explain_doubt(
    system: RagSystem,
    documents: Sequence[RagDocument],
    values: Sequence[_StoredValue],
    stored: Floats,
) -> str:
    """Return why the ranks would prove nothing, or "".

    Possible reasons are too few values, and stored vectors that do not belong to the texts.
    """
    if len(values) < rank_tests.LEAST_CONTROLS:
        return (
            f"{len(values)} documents contain a value of a known format, "
            f"{rank_tests.LEAST_CONTROLS} are needed"
        )
    text_vectors = _embed(system, [document.text for document in documents])
    nearest = (stored @ text_vectors.T).argmax(1)
    n_matched = int((nearest == np.arange(len(nearest))).sum())
    if n_matched < _MATCHED * len(nearest):
        return (
            f"{n_matched} of {len(nearest)} stored vectors are most similar to what `embed` makes "
            f"of their document, {_MATCHED:.0%} are needed"
        )
    return ""


def count_more_similar(stored: Floats, vectors: Floats) -> tuple[int, int]:
    """Return how many alternatives are more similar to a stored vector than the true value is.

    Also return how many are exactly as similar. `stored` is (dimensions,). `vectors` is (1 + R,
    dimensions), with the true value's vector first. All vectors have length 1.
    """
    distances = 1 - vectors @ stored
    return rank_tests.count_alternatives_above(distances[0], distances[0] + _TIE, distances[1:])


def _judge_ranks(
    knowledge: str, values: Sequence[_StoredValue], n_above: Floats, n_tied: Floats, seed: int
) -> VectorVerdict:
    """Return the verdict on the values, given the rank of each among its alternatives.

    `n_above` and `n_tied`, (2, values), count the alternatives that are more similar, and exactly
    as similar. The first row is for the vector of the value's document, the second for that of
    another document.
    """
    n_alternatives = np.array([len(entry.alternatives) for entry in values], dtype=float)
    noise = make_keyed_generator("rag vector ranks", seed).random(len(values))
    control_p = rank_tests.compute_uniformity_p_value(n_above[1], n_tied[1], n_alternatives, noise)
    p_values = rank_tests.compute_rank_p_values(n_above[0], n_tied[0], n_alternatives)
    p_value = float(scipy.stats.combine_pvalues(p_values, method="fisher").pvalue)
    reason = ""
    verdict = NO_LEAK
    if control_p < _CONTROL_LEVEL:
        verdict = CANNOT_TELL
        reason = (
            "ranks by another document's vector are not uniform: the alternatives differ in kind"
        )
    elif p_value <= LEVEL / MOST_LAYERS:
        verdict = LEAKS
    n_first = int((n_above[0] + n_tied[0] == 0).sum())
    bits = rank_tests.estimate_rank_bits(p_values, n_alternatives)
    return VectorVerdict(knowledge, verdict, n_first, bits, p_value, control_p, reason)


def _find_values(documents: Sequence[RagDocument], seed: int) -> list[_StoredValue]:
    """Return the first value of known format in each document, with its alternatives."""
    recognisers = None
    if pii.has_pii_packages():
        recognisers = pii.PiiRecognisers()
    values = []
    for row, document in enumerate(documents):
        text = document.text
        for span in pii.find_pii_spans(text, document.marks, recognisers):
            value = text[span.start : span.end]
            try:
                value_format = find_value_format(span.kind, value, {})
            except UnknownFormat:
                continue
            if value_format.is_uneven:
                continue  # such values are not drawn at random by people
            noise = make_keyed_generator("rag alternatives", seed, document.name)
            alternatives = value_format.list_alternatives(
                value, ALTERNATIVES, ALTERNATIVES + 1, noise
            )
            if len(alternatives) >= _LEAST_ALTERNATIVES:
                values.append(_StoredValue(row, text, value, alternatives))
                break
    return values


def _find_control_row(values: Sequence[_StoredValue], i: int) -> int:
    """Return the row of the vector of the next document that does not contain the value.

    If all documents contain it, return the row of its own document.
    """
    for other in (*values[i + 1 :], *values[:i]):
        if values[i].value not in other.text:
            return other.row
    return values[i].row


def _embed(system: RagSystem, texts: Sequence[str]) -> Floats:
    assert system.embed is not None
    with wrap_library_errors(f"{system.label} failed to embed"):
        answer = system.embed(texts)
    return _normalise_vectors("embed(texts)", answer, len(texts))


def _normalise_vectors(call: str, answer: object, n_rows: int) -> Floats:
    """Return vectors of length 1, (rows, dimensions). Raise AuditError for anything else."""
    try:
        vectors = np.asarray(answer, dtype=float)
    except (TypeError, ValueError):
        vectors = np.empty(0)
    if vectors.ndim != 2 or len(vectors) != n_rows or not np.isfinite(vectors).all():
        raise AuditError(
            f"expected `{call}` to return {n_rows} vectors of finite numbers, got an array of "
            f"shape {vectors.shape}"
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Floats = vectors / np.where(lengths == 0, 1, lengths)
    return unit

"""Search copies of stores, released text and a model, layer by layer, for deleted records.

A layer is a way to read a store, such as its tables or its bytes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from auditor.benchmarks.data.columns import read_data_table
from auditor.core.counts import format_count
from auditor.core.disk import open_scratch_folder
from auditor.core.errors import wrap_library_errors
from auditor.erasure.layers import (
    CANNOT_TELL,
    GONE,
    STILL_THERE,
    Layer,
    LayerVerdict,
    Piece,
    judge_erasure_layer,
    judge_missing_records,
)
from auditor.erasure.records import ErasureRecords
from auditor.erasure.store import BYTES, INSTALL, SCORES, Store, find_store_kind
from auditor.erasure.windows import TEXT, VECTORS
from auditor.records.file_digests import digest_file

# for deleted and for kept records: a search without an index reads all vectors
_MOST_SEARCHES = 100


@dataclass(frozen=True)
class Erasure:
    """Hold the results of the search for deleted records in all stores.

    n_deleted: number of deleted records.
    n_control: number of kept records that were searched for, too, as the control.
    n_kept: number of all kept records.
    facts: for each store, the versions and settings for which the verdicts hold.
    verdicts: one for each layer (a way to read a store) and kind of content.
    digests: SHA-256 of the files of records, stores, released text and models, keyed by file.
    users: each deleted record's people, keyed by the record's name; empty without --user-column.
    """

    n_deleted: int
    n_control: int
    n_kept: int
    facts: dict[str, tuple[str, ...]]
    verdicts: tuple[LayerVerdict, ...]
    digests: dict[str, str]
    users: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The worst verdict; from worst to best: still there, cannot tell, gone."""
        verdicts = {verdict.verdict for verdict in self.verdicts}
        return next(word for word in (STILL_THERE, CANNOT_TELL, GONE) if word in verdicts)

    @property
    def leftovers(self) -> frozenset[str]:
        """The names of the deleted records that are still there."""
        return frozenset(name for verdict in self.verdicts for name in verdict.leftovers)

    @property
    def n_left(self) -> int:
        return len(self.leftovers)

    @property
    def n_users(self) -> int:
        return len({user for users in self.users.values() for user in users})

    @property
    def users_left(self) -> list[str]:
        """The people of whom a record that should be deleted was found in some layer."""
        return sorted({user for name in self.leftovers for user in self.users.get(name, ())})


def examine_erased_stores(
    arguments: Sequence[str],
    records: ErasureRecords,
    tell: Callable[[str], None],
    *,
    released: Sequence[Path] = (),
    model: str | None = None,
    nonmembers: str | None = None,
) -> Erasure:
    """Search the stores, released text and a model, and return a verdict on each layer.

    arguments: stores, as `PATH`, `KIND:PATH` or an address; tell: called with progress messages;
    nonmembers: a file of records that the model was not trained on. Raise AuditError for an invalid
    store or file.
    """
    kinds = list(map(find_store_kind, arguments))
    verdicts = list[LayerVerdict]()
    facts = dict[str, tuple[str, ...]]()
    digests = dict[str, str]()
    for path in (*records.sources, *released):
        digests[str(path)] = digest_file(path)
    for kind, source in kinds:
        tell(f"copying {source}")
        label = source if "://" in source else f"{kind.name}:{source}"
        with _copied_store_context(kind, source) as store:
            # Before the store's library changes the copy.
            for file in store.list_files():
                digests[f"{label}/{file.relative_to(store.folder)}"] = digest_file(file)
            store.check_package()
            store.check()
            facts[label] = tuple(store.describe())
            verdicts += _judge_store(store, label, records, tell)
    for path in released:
        tell(f"reading {path}")
        label = f"released:{path}"
        texts = read_data_table("--released", str(path)).list_shown_texts()
        facts[label] = (format_count(len(texts), "text"),)
        verdicts += _judge_released_texts(label, texts, records)
    if model is not None:
        from auditor.erasure.model import judge_model_erasure

        tell(f"asking {model}")
        facts[f"model:{model}"] = ("one run of audit: completion, ranks, likelihood",)
        judged = judge_model_erasure(model, records, nonmembers)
        verdicts += judged.verdicts
        for name, digest in judged.weights.items():
            digests[f"model:{model}/{name}"] = digest
        if nonmembers is not None and Path(nonmembers).is_file():
            digests[nonmembers] = digest_file(Path(nonmembers))
    n_deleted = len(records.deleted)
    n_control = len(records.targets) - n_deleted
    users = {record.name: record.users for record in records.targets if record.users}
    return Erasure(n_deleted, n_control, records.n_kept, facts, tuple(verdicts), digests, users)


@contextmanager
def _copied_store_context(kind: type[Store], source: str) -> Iterator[Store]:
    """Yield a copy of the store, and remove the copy after the block."""
    with open_scratch_folder(Path(tempfile.gettempdir()), "audit-erase") as scratch:
        yield kind.open(source, scratch)


def _judge_released_texts(
    label: str, texts: Sequence[str], records: ErasureRecords
) -> Iterator[LayerVerdict]:
    layer = Layer("its texts", lambda: [Piece("its texts", texts)], (TEXT,), other_texts=True)
    leftovers = set[str]()
    for verdict in judge_erasure_layer(label, layer, records):
        leftovers.update(verdict.leftovers)
        yield replace(verdict, remedy="release the texts again without these passages")
    yield from _report_unsearchable(label, (TEXT,), leftovers, records)


def _judge_store(
    store: Store, label: str, records: ErasureRecords, tell: Callable[[str], None]
) -> Iterator[LayerVerdict]:
    unseen = dict[str, list[str]]()
    judged = set[str]()
    leftovers = set[str]()
    for complete in _list_layers(store, records):
        kinds = tuple(kind for kind in complete.kinds if kind in store.kinds)
        layer = replace(complete, kinds=kinds)
        tell(layer.name)
        with wrap_library_errors(f"{layer.name} of {label} cannot be read"):
            layer_verdicts = judge_erasure_layer(label, layer, records)
        for verdict in layer_verdicts:
            judged.add(verdict.kind)
            leftovers.update(verdict.leftovers)
            is_of_files = layer.name.startswith(BYTES)
            if is_of_files and not verdict.leftovers and not verdict.n_control_seen:
                if not store.lacks(verdict.kind, layer.name):
                    unseen.setdefault(verdict.kind, []).append(layer.name.removeprefix(BYTES))
                continue
            if layer.quotes and not verdict.leftovers and not verdict.n_control_seen:
                continue  # it quotes no record
            yield replace(verdict, remedy=store.find_remedy(layer.name, verdict.places))
    for kind, files in unseen.items():
        yield _report_unseen(label, kind, files)
    yield from _report_unsearchable(label, judged, leftovers, records)
    if store.package and not store.package_version:
        reason = f"{store.package} is not installed ({INSTALL})"
        yield LayerVerdict(label, "what its library returns", "text", CANNOT_TELL, why=reason)


def _list_layers(store: Store, records: ErasureRecords) -> Iterator[Layer]:
    yield from store.list_layers()
    if searched := _choose_searched(records.with_own_vectors, records):
        for name, search_nearest in store.list_nearest_searches():
            read_nearest = partial(search_nearest, records.directions[searched])
            yield Layer(name, read_nearest, (VECTORS,), searched=frozenset(searched))
    if store.package_version and store.has_scores:
        searched = _choose_searched(records.with_text, records)
        texts = []
        for i in searched:
            texts.append(records.targets[i].text)
        read_counted = partial(store.search_scores, texts)
        yield Layer(SCORES, read_counted, (TEXT,), searched=frozenset(searched))


def _choose_searched(indices: frozenset[int], records: ErasureRecords) -> list[int]:
    """Return some of the deleted and some of the kept records among the indices."""
    deleted = _choose_evenly(indices & records.deleted)
    return [*deleted, *_choose_evenly(indices - records.deleted)]


def _choose_evenly(records: frozenset[int]) -> list[int]:
    """Return evenly spaced indices of the records, at most `_MOST_SEARCHES`."""
    return sorted(records)[:: max(1, math.ceil(len(records) / _MOST_SEARCHES))]


def _report_unsearchable(
    label: str, judged: Collection[str], leftovers: Collection[str], records: ErasureRecords
) -> Iterator[LayerVerdict]:
    """Yield a verdict on deleted records that cannot be searched for in any layer.

    Args:
        label: name of the store, or of the released text.
        judged: kinds of content, text or vectors, for which layers were searched.
        leftovers: names of deleted records that were found.
        records: all deleted and kept records.
    """
    searchable = frozenset[int]()
    reasons = []
    if TEXT in judged:
        searchable |= records.with_text
        reasons.append("their texts have fewer than 16 letters and digits, or others have the same")
    if VECTORS in judged or not judged:
        searchable |= records.with_vectors
        reasons.append("they have no vector, or others have the same")
    missing = []
    for i in sorted(records.deleted - searchable):
        if records.targets[i].name not in leftovers:
            missing.append(i)
    if missing and (searchable & records.deleted or not judged):  # otherwise each layer reports it
        reason = f"cannot be searched for, as {', and '.join(reasons)}"
        yield judge_missing_records(label, missing, reason, records)


def _report_unseen(label: str, kind: str, files: Sequence[str]) -> LayerVerdict:
    """Return a joint verdict for all files in which no record was found.

    label: name of the store; kind: kind of content.
    """
    names = ", ".join(files[:3]) + (f" and {len(files) - 3:,} more" if len(files) > 3 else "")
    reason = "no kept record is seen there: they are absent, compressed or encrypted"
    return LayerVerdict(label, f"{BYTES}{names}", kind, CANNOT_TELL, why=reason)

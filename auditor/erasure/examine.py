"""Examine copies of stores for leftovers of a deletion, layer by layer."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from auditor.core.disk import open_scratch_folder
from auditor.core.errors import wrap_library_errors
from auditor.erasure.layers import CANNOT_TELL, GONE, STILL_THERE, Layer, LayerVerdict, judge_layer
from auditor.erasure.records import ErasureRecords
from auditor.erasure.store import BYTES, INSTALL, Store, copy_store, find_store_kind
from auditor.erasure.windows import VECTORS


@dataclass(frozen=True)
class Erasure:
    """The results of all stores. facts: by store, the versions for which the verdicts hold."""

    n_deleted: int
    n_control: int
    n_kept: int
    facts: dict[str, tuple[str, ...]]
    verdicts: tuple[LayerVerdict, ...]

    @property
    def verdict(self) -> str:
        """Return the worst verdict, in the order still there, cannot tell, gone."""
        verdicts = {verdict.verdict for verdict in self.verdicts}
        return next(word for word in (STILL_THERE, CANNOT_TELL, GONE) if word in verdicts)

    @property
    def n_left(self) -> int:
        return len({name for verdict in self.verdicts for name in verdict.leftovers})


def examine_stores(
    arguments: Sequence[str], records: ErasureRecords, tell: Callable[[str], None]
) -> Erasure:
    """Judge each layer of each store, `PATH` or `KIND:PATH`.

    tell: called with progress messages. Raise AuditError for an invalid store.
    """
    kinds = [find_store_kind(argument) for argument in arguments]
    verdicts = list[LayerVerdict]()
    facts = dict[str, tuple[str, ...]]()
    for kind, path in kinds:
        with open_scratch_folder(Path(tempfile.gettempdir()), "audit-erase") as scratch:
            tell(f"copying {path}")
            store = kind(copy_store(path, scratch))
            store.check_package()
            store.check()
            label = f"{kind.name}:{path}"
            facts[label] = tuple(store.describe())
            verdicts += _judge_store(store, label, records, tell)
    n_deleted = len(records.deleted)
    return Erasure(
        n_deleted, len(records.targets) - n_deleted, records.n_kept, facts, tuple(verdicts)
    )


def _judge_store(
    store: Store, label: str, records: ErasureRecords, tell: Callable[[str], None]
) -> Iterator[LayerVerdict]:
    unseen = dict[str, list[str]]()
    for complete in _list_layers(store, records):
        kinds = tuple(kind for kind in complete.kinds if kind in store.kinds)
        layer = replace(complete, kinds=kinds)
        tell(layer.name)
        with wrap_library_errors(f"{layer.name} of {label} cannot be read"):
            layer_verdicts = judge_layer(label, layer, records)
        for verdict in layer_verdicts:
            is_of_files = layer.name.startswith(BYTES)
            if is_of_files and not verdict.leftovers and not verdict.n_control_seen:
                if not re.search(store.holds_no.get(verdict.kind, r"(?!)"), layer.name):
                    unseen.setdefault(verdict.kind, []).append(layer.name.removeprefix(BYTES))
                continue
            yield replace(verdict, remedy=store.find_remedy(layer.name, verdict.places))
    for kind, files in unseen.items():
        yield _report_unseen(label, kind, files)
    if store.package and not store.package_version:
        reason = f"{store.package} is not installed ({INSTALL})"
        yield LayerVerdict(
            label, "what its library returns", "text", CANNOT_TELL, 0, {}, 0, 0, reason
        )


def _list_layers(store: Store, records: ErasureRecords) -> Iterator[Layer]:
    yield from store.list_layers()
    searches = type(store).search_nearest is not Store.search_nearest
    if searches and records.with_vectors and store.package_version:
        # A target without a vector still gets a direction, so that all are searched at once.
        directions = np.nan_to_num(records.directions, nan=1.0)
        read_nearest = partial(store.search_nearest, directions)
        yield Layer("nearest neighbours", read_nearest, (VECTORS,))


def _report_unseen(label: str, kind: str, files: Sequence[str]) -> LayerVerdict:
    """Return one verdict for all files that show no record."""
    names = ", ".join(files[:3]) + (f" and {len(files) - 3:,} more" if len(files) > 3 else "")
    reason = "no kept record is seen there: none of them is there, or compressed or encrypted"
    return LayerVerdict(label, f"{BYTES}{names}", kind, CANNOT_TELL, 0, {}, 0, 0, reason)

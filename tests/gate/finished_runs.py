"""A run folder as a run leaves it, made of an outcome in no time; and how somebody edits one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.jsonable import to_json
from auditor.core.nouns import CellKey
from auditor.core.plan import Plan
from auditor.core.result import AuditResult, BenchmarkRecord, Finding
from auditor.records import file_digests, manifest
from auditor.records.table import TABLE
from auditor.statistics import extraction, judging
from tests.rows import judge_columns, read_rows, row_of, write_rows

ROW = CellKey("undefended", "white-box", "perplexity")


def outcome(n: int = 400, out: int = 0, others: int = 60) -> judging.Outcome:
    """n members, the first `out` of which were extracted, half of them once and half 16 times in
    the data."""
    rng = np.random.default_rng(0)
    size = n + others
    hit = np.arange(size) < out
    return judge_columns(
        ids=tuple(f"s{i:04d}" for i in range(size)),
        hit=hit,
        any_hit=hit,
        score=rng.normal(size=size),
        repeats=tuple((16 if i % 2 else 1) if i < n else None for i in range(size)),
        member=np.arange(size) < n,
        distance=np.where(hit, 0, 9),
        tolerance=np.full(size, 2),
    )


def finished(
    folder: Path,
    found: judging.Outcome | None = None,
    model: Path | None = None,
    kinds: Mapping[str, Sequence[float]] | None = None,
    **changed: Any,
) -> Path:
    """A run of one attack on one model, judged now. kinds: of personal data, what each first guess
    holds of it."""
    found = outcome() if found is None else found
    row = ValuesBySecret.from_judged_guesses(found, kinds)
    of_kinds = {kind: row.remeasure_metric("recall", kind=kind) for kind in kinds or {}}
    plan = Plan.from_fields(
        attack=(ROW.attack,),
        setting="white-box",
        **({} if model is None else {"model": str(model), "data": "d"}),
    )
    members = found.select_secrets(found.member)
    measured, by_repeats = (
        extraction.measure_extraction(found),
        extraction.measure_hit_shares("recall", members),
    )
    by_kind = {kind: m for kind, m in of_kinds.items() if m is not None}
    finding = Finding(
        *ROW, {}, ("distribution",), "top-p", None, "", tuple(measured), by_repeats, by_kind
    )
    benchmark = BenchmarkRecord(
        "files", "", len(members.ids), len(found.ids) - len(members.ids), 0, digest="d1-ff"
    )
    read = file_digests.digest_model_files({"model": (str(model), None)}) if model else {}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    result = AuditResult(
        "r", now, "0", "", plan.to_json(), benchmark, (), (finding,), {}, {}, 0, weights=read
    )
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, "result.json", to_json(replace(result, **changed)))
    write_rows(folder, {str(ROW): row_of(row)})
    return whole(folder)


def whole(folder: Path) -> Path:
    """Beside a result and its outcomes all else that a run leaves for a gate; what was there of it
    is made anew."""
    result, rows = json.loads((folder / "result.json").read_text()), read_rows(folder)
    write(folder, "plan.json", result["plan"])
    columns = [(row["ids"], row["member"], row["repeats"]) for row in rows.values()]
    facts = {one[0]: one for of_row in columns for one in zip(*of_row, strict=True)}
    for member, told in ((True, "members"), (False, "nonmembers")):
        others = result["benchmark"][told] - sum(one[1] == member for one in facts.values())
        # that no row is about
        facts |= {f"{told}-{i}": (f"{told}-{i}", member, None) for i in range(others)}
    told_of = {
        name: [one[i] for one in facts.values()]
        for i, name in enumerate(("id", "member", "repeats"))
    }
    same = {"alias": [*facts], "length": [10] * len(facts), "group": [None] * len(facts)}
    write(folder, "secrets.json", {**told_of, **same, "canary": [False] * len(facts)})
    lines = [
        json.dumps({"cell": row, "secret": id}) + "\n"
        for row, held in rows.items()
        for id in held["ids"]
    ]
    (folder / "guesses.jsonl").write_text("".join(lines))
    manifest.write_manifest(folder, (folder / "result.json").read_bytes())
    return folder


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def edit(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    """Changes what a file of JSON, or the table, holds, in place."""
    if name == TABLE:
        rows = read_rows(folder)
        change(rows)
        return write_rows(folder, rows)
    value = json.loads((folder / name).read_text())
    change(value)
    return write(folder, name, value)


def model(folder: Path, says: Sequence[int] = (1, 2, 3)) -> Path:
    """Weights enough for a digest."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(says))
    return folder

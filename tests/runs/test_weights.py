"""Which weights a run is about is on record, and other ones in their place are refused by the
file's name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Guess, Guesses
from auditor.core.plan import Plan
from auditor.records import file_digests
from auditor.records.folder import RunFolder
from auditor.runs import plan_weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """An adapter on a base, with a public model and an ensemble of two."""
    base = put(tmp_path / "base", model__safetensors="base", config__json="{}")
    put(tmp_path / "public", model__safetensors="public", tokenizer__json="words")
    put(
        tmp_path / "model",
        adapter_model__safetensors="adapter",
        adapter_config__json=json.dumps({"base_model_name_or_path": str(base)}),
        README__md="of no consequence",
        training__json="seconds",
    )
    for member in ("member-0", "member-1"):
        put(
            tmp_path / "ensemble" / member,
            adapter_model__safetensors=member,
            adapter_config__json="{}",
        )
    options = {"pmixed": {"ensemble": str(tmp_path / "ensemble")}}
    data = str(tmp_path / "data.jsonl")
    return Plan.from_fields(
        model=str(tmp_path / "model"),
        data=data,
        public=str(tmp_path / "public"),
        defense_options=options,
    )


def test_models_that_lie_where_a_run_starts_are_not_its_references(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run would not go on once another model is put beside it."""
    monkeypatch.chdir(tmp_path)
    asked = plan.with_fields(
        attack_options={"perplexity": {"samples": 4}, "membership": {"references": ""}}
    )
    assert plan_weights.digest_plan_files(asked) == plan_weights.digest_plan_files(plan)


def test_every_file_that_a_run_reads_is_on_record(plan: Plan) -> None:
    found = plan_weights.digest_plan_files(plan)
    assert sorted(found) == [
        "model base/config.json",
        "model base/model.safetensors",
        "model/adapter_config.json",
        "model/adapter_model.safetensors",
        "pmixed ensemble/member-0/adapter_config.json",
        "pmixed ensemble/member-0/adapter_model.safetensors",
        "pmixed ensemble/member-1/adapter_config.json",
        "pmixed ensemble/member-1/adapter_model.safetensors",
        "public/model.safetensors",
        "public/tokenizer.json",
    ]
    assert found["model base/model.safetensors"] == hashlib.sha256(b"base").hexdigest()
    assert plan_weights.digest_plan_files(Plan()) == {}


@pytest.mark.parametrize(
    "name", ["base/model.safetensors", "model/adapter_model.safetensors", "public/tokenizer.json"]
)
@pytest.mark.parametrize("how", ["has changed", "is gone", "is new"])
def test_other_weights_in_their_place_are_refused_by_name(
    plan: Plan, tmp_path: Path, name: str, how: str
) -> None:
    folder = RunFolder.create(tmp_path / "run", "name", {})
    folder.pin_weights(plan_weights.digest_plan_files(plan))
    folder.pin_weights(plan_weights.digest_plan_files(plan))
    path, role = tmp_path / name, name.replace("base/", "model base/")
    if how == "has changed":
        path.write_text("x" * len(path.read_text()))
    elif how == "is gone":
        path.unlink()
    else:
        path.with_name("model-00002.safetensors").write_text("more")
        role = role.replace(path.name, "model-00002.safetensors")
    with pytest.raises(
        AuditError, match=f"expected the files that .*run was made with, but {role} {how} since"
    ):
        folder.refuse_changed_weights(plan_weights.digest_plan_files(plan))


def test_answers_of_nobody_knows_which_weights_are_refused(plan: Plan, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "name", {})
    folder.refuse_changed_weights(plan_weights.digest_plan_files(plan))
    folder.guesses.append(CellKey("t", "white-box", "a"), [Guesses("s", (Guess((1,), 0.0),), 1, 1)])
    folder.refuse_changed_weights({})  # the lab
    with pytest.raises(AuditError, match="an older version made it"):
        folder.refuse_changed_weights(plan_weights.digest_plan_files(plan))


def test_a_file_is_read_once(
    plan: Plan, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again when anything about it has changed, its mtime put back or not."""
    read: list[str] = []
    digest = hashlib.file_digest

    def counted(file: object, name: str) -> object:
        read.append(Path(file.name).name)  # type: ignore[attr-defined]
        return digest(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", counted)
    first = plan_weights.digest_plan_files(plan)
    # just written: may change in this tick
    assert len(read) == len(first) and not (cache / "weights.json").exists()
    later = max(os.stat(path).st_ctime for path in tmp_path.rglob("*")) + 10
    monkeypatch.setattr(file_digests.time, "time", lambda: later)
    read.clear()
    assert [plan_weights.digest_plan_files(plan) for _ in range(3)] == [first] * 3 and len(
        read
    ) == len(first)
    path = tmp_path / "public" / "model.safetensors"
    before = path.stat()
    path.write_text("qublic")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    read.clear()
    again = plan_weights.digest_plan_files(plan)
    assert (
        read == ["model.safetensors"]
        and again["public/model.safetensors"] != first["public/model.safetensors"]
    )


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"a": 3}', "\xff\xfe"])
def test_a_damaged_memory_is_no_memory(plan: Plan, cache: Path, damage: str) -> None:
    first = plan_weights.digest_plan_files(plan)
    cache.mkdir(exist_ok=True)
    (cache / "weights.json").write_bytes(damage.encode("latin-1"))
    assert plan_weights.digest_plan_files(plan) == first


def test_a_model_on_the_hub_is_the_snapshot_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = put(tmp_path / "snapshots" / "c0ffee", config__json="{}", model__safetensors="weights")
    asked: list[tuple[str, str | None]] = []

    def cached(name: str, file: str, revision: str | None) -> str | None:
        asked.append((name, revision))
        return str(there / file) if (there / file).exists() else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    plan = Plan.from_fields(model="some/model", revision="v1", data="data")
    assert sorted(plan_weights.digest_plan_files(plan)) == [
        "model/config.json",
        "model/model.safetensors",
    ]
    assert set(asked) == {("some/model", "v1")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    # not fetched: nothing to mistake for it
    file_digests.check_model_files_unchanged(
        {"model/config.json": "d"}, plan_weights.digest_plan_files(plan), "it"
    )

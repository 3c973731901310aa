"""Reference models in a folder: what each says that it saw, and what is refused because it would
tell nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.core.errors import AuditError
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.references import ReferenceModels, load_reference_models
from auditor.models.shards import record_digests, write_shard_record_list
from tests.conftest import tiny

TEXTS = [f"record {i}" for i in range(4)]
ATTACKED = {record_digests([text])[0]: (f"s{i}",) for i, text in enumerate(TEXTS)}


def place(folder: Path, name: str, texts: list[str] | None) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text("{}")
    if texts is not None:
        write_shard_record_list(folder / name, texts)


def load(name: str) -> HuggingFaceModel:
    found = tiny()
    found.name = name
    return found


def read(folder: Path) -> ReferenceModels:
    return load_reference_models(folder, load, ATTACKED)


def test_each_model_saw_what_its_shard_names(tmp_path: Path) -> None:
    place(tmp_path, "a", [TEXTS[0], TEXTS[1], "of somebody else"])
    place(tmp_path, "b", [TEXTS[2]])
    place(tmp_path, "c", [])
    (tmp_path / "notes").mkdir()  # no model
    found = read(tmp_path)
    assert found.saw == (frozenset({"s0", "s1"}), frozenset({"s2"}), frozenset())
    assert [Path(model.name).name for model in found.models] == ["a", "b", "c"]


def test_a_folder_that_is_none_of_reference_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AuditError,
        match=r"expected -A references= to be a folder of reference models, got '.*none'",
    ):
        read(tmp_path / "none")
    place(tmp_path, "a", [])
    with pytest.raises(AuditError, match=r"expected at least 2 reference models in .*, got 1"):
        read(tmp_path)
    place(tmp_path, "b", None)
    with pytest.raises(
        AuditError, match=r"expected '.*shard.json' to say which records .*, got no file"
    ):
        read(tmp_path)


def test_names_of_other_texts_are_no_list_of_what_was_seen(tmp_path: Path) -> None:
    """A list of whole records, where parts of them are attacked, would pass for a model that saw
    none of them."""
    place(tmp_path, "a", ["record 0 and all that follows"])
    place(tmp_path, "b", [TEXTS[0]])
    with pytest.raises(
        AuditError, match=r"got 1 names of which none is an attacked record's; an empty list says"
    ):
        read(tmp_path)


def test_a_reference_that_saw_all_the_data_is_refused(tmp_path: Path) -> None:
    place(tmp_path, "a", TEXTS)
    place(tmp_path, "b", TEXTS[:1])
    with pytest.raises(
        AuditError, match=r"expected references that did not see some .*, but .*a saw all 4"
    ):
        read(tmp_path)
    place(tmp_path / "other", "a", TEXTS[:2])
    place(tmp_path / "other", "b", TEXTS[1:])
    with pytest.raises(
        AuditError, match=r"unseen by at least one reference in .*, but all of them saw 1 of 4"
    ):
        read(tmp_path / "other")

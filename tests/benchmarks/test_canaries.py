"""Manifests and insertion: what is written is what was drawn, and everything else stays as it
was."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from auditor.benchmarks.canaries import exposure_canaries, manifests
from auditor.benchmarks.canaries.exposure_canaries import ExposureCanaryManifest
from auditor.benchmarks.canaries.insertion import CanaryInsertionPlan, write_canary_data
from auditor.benchmarks.lab.lab import Lab
from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.training.members import assign_member_shards
from tests.conftest import read_files
from tests.generation.test_tries import bpe

ROWS = [{"text": f'record {i}, "quoted"\nand more', "who": f"user {i % 3}"} for i in range(25)]


@pytest.fixture(scope="module")
def manifest() -> ExposureCanaryManifest:
    return exposure_canaries.make_exposure_canary_manifest(
        ["My ID is {digits:6}", "I like {words:2}"], counts=[1, 4], per_count=2, controls=1
    )


def test_canaries_follow_from_the_seed_and_are_in_their_spaces(
    manifest: ExposureCanaryManifest,
) -> None:
    again = exposure_canaries.make_exposure_canary_manifest(
        ["My ID is {digits:6}", "I like {words:2}"], counts=[4, 1], per_count=2, controls=1
    )
    assert again == manifest
    assert (
        exposure_canaries.make_exposure_canary_manifest(["My ID is {digits:6}"], seed=1).canaries
        != exposure_canaries.make_exposure_canary_manifest(["My ID is {digits:6}"]).canaries
    )
    assert (
        len({entry.id for entry in manifest.canaries})
        == len({entry.text for entry in manifest.canaries})
        == 10
    )
    for entry in manifest.canaries:
        assert entry.text in manifest.canary_spaces[entry.space]
        assert not any(part in entry.id for part in entry.text.split()[-1:])
    assert Counter(entry.count for entry in manifest.canaries) == {1: 4, 4: 4, 0: 2}


def test_a_manifest_is_written_once_privately_and_read_back(
    manifest: ExposureCanaryManifest, tmp_path: Path
) -> None:
    path = tmp_path / "canaries.json"
    manifests.write_canary_manifest(path, manifest)
    assert manifests.read_canary_manifest(path) == manifest
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(AuditError, match="exists"):
        manifests.write_canary_manifest(path, manifest)


def spoilt(**changes: Any) -> dict[str, Any]:
    manifest = exposure_canaries.make_exposure_canary_manifest(
        ["My ID is {digits:6}"], counts=[1], per_count=2
    )
    raw: dict[str, Any] = to_json(manifest)
    for name, value in changes.items():
        if name in raw:
            raw[name] = value
        else:
            raw["canaries"][0][name] = value
    return raw


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (spoilt(text="My ID is 12345"), "canary-0001-000 is not in its own space"),
        (spoilt(text="my id is 123456"), "is not in its own space"),
        (spoilt(count=-1), "expected a count of at least 0"),
        (spoilt(space=1), "expected a space below 1"),
        (spoilt(id="canary-0001-001"), "got canary-0001-001 twice"),
        (spoilt(schema_version=3), "expected a manifest of version 1, or 2 with coins, got 3"),
        (spoilt(schema_version=2), "missing field .kind."),
        (spoilt(canaries=[]), "at least one canary"),
        (spoilt(formats=[{"format": "My ID"}]), "formats in the manifest that several texts fit"),
        (
            spoilt(formats=[{"format": "My ID is 123456"}]),
            "formats in the manifest that several texts fit",
        ),
        (
            spoilt(formats=[{"format": "My ID is {digit:6}"}]),
            "formats in the manifest that several texts fit",
        ),
        (spoilt(more=1), r"canaries.0.: unknown field \(it may be private\)"),
        ([], "expected an object"),
    ],
)
def test_what_is_no_manifest_is_refused_without_its_texts(
    raw: Any, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "canaries.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(AuditError, match=why) as refused:
        manifests.read_canary_manifest(path)
    assert "1234" not in str(refused.value) and "My ID" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"counts": [0, 1]}, "expected counts of at least 1, got 0, 1; --controls"),
        ({"counts": []}, "expected counts of at least 1, got none"),
        ({"per_count": 0}, "--each >= 1"),
        ({"formats": ["{digits:1}"]}, "expected a space of at least 80 texts for 40 canaries"),
        ({"formats": ["My ID"]}, "a slot that several texts fit"),
        ({"formats": ["{digits:4}", "{digits:6}", "{digits:4}"]}, "expected each format once"),
        ({"formats": ["{digit:2}"]}, "did you mean 'digits'"),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(AuditError, match=why):
        exposure_canaries.make_exposure_canary_manifest(
            **{"formats": ["My ID is {digits:6}"], **options}
        )


def test_a_tokenizer_or_model_that_lacks_them_is_refused(manifest: ExposureCanaryManifest) -> None:
    made = manifests.build_manifest_secrets(manifest, bpe(150), 407)
    assert [secret.member for secret in made] == [entry.count > 0 for entry in manifest.canaries]
    with pytest.raises(AuditError, match="vocabulary mismatch"):
        manifests.build_manifest_secrets(manifest, bpe(150), 60)
    with pytest.raises(AuditError, match="model without one"):
        manifests.build_manifest_secrets(manifest, None, 60)
    with pytest.raises(AuditError, match="writes two canaries alike"):
        manifests.build_manifest_secrets(
            manifest, lambda text, add_special_tokens: {"input_ids": [1]}, 60
        )


# --- insertion ---


def jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def json_array(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def comma(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "who"])
        writer.writeheader()
        writer.writerows(ROWS)


def columns(path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def saved(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


def files(path: Path) -> None:
    path.mkdir()
    jsonl(path / "train.jsonl")


def rows_of(path: Path) -> list[dict[str, Any]]:
    match path.suffix:
        case ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
        case ".json":
            return list(json.loads(path.read_text()))
        case ".csv":
            with path.open(newline="") as file:
                return list(csv.DictReader(file))
        case ".parquet":
            return list(parquet.read_table(path).to_pylist())
    return list(datasets.load_from_disk(path).to_list())


KINDS: dict[str, Callable[[Path], None]] = {
    "a.jsonl": jsonl,
    "a.json": json_array,
    "a.csv": comma,
    "a.parquet": columns,
    "a": saved,
    "files": files,
}


def contents(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in ([path] if path.is_file() else sorted(path.iterdir()))}


@pytest.mark.parametrize("name", KINDS)
def test_copies_stand_among_the_rows_as_often_as_the_manifest_says(
    name: str, manifest: ExposureCanaryManifest, tmp_path: Path
) -> None:
    data, out = tmp_path / name, tmp_path / f"new-{name}"
    KINDS[name](data)
    before = contents(data)
    assert write_canary_data(CanaryInsertionPlan(manifest, group="who"), str(data), out) == 20
    assert contents(data) == before
    rows, texts = rows_of(out), {entry.text: entry for entry in manifest.canaries}
    assert [row for row in rows if row["text"] not in texts] == ROWS
    inserted = [row for row in rows if row["text"] in texts]
    assert Counter(row["text"] for row in inserted) == {
        e.text: e.count for e in manifest.canaries if e.count
    }
    assert all(row["who"] == texts[row["text"]].id for row in inserted)
    # among the rows, not before or behind them
    assert rows[:20] != inserted and rows[-20:] != inserted
    if out.is_file():
        assert stat.S_IMODE(out.stat().st_mode) == 0o600
    other = tmp_path / f"other-{name}"
    write_canary_data(CanaryInsertionPlan(manifest, seed=1), str(data), other)
    assert rows_of(other) != rows
    with pytest.raises(AuditError, match="already contains a canary"):
        write_canary_data(CanaryInsertionPlan(manifest), str(out), tmp_path / f"twice-{name}")
    assert not (tmp_path / f"twice-{name}").exists()


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl", gzip.compress), ("a.csv", bz2.compress), ("a.json", lzma.compress)],
)
def test_a_compressed_file_gets_canaries_and_is_written_uncompressed(
    name: str, pack: Callable[[bytes], bytes], manifest: ExposureCanaryManifest, tmp_path: Path
) -> None:
    KINDS[name](tmp_path / name)
    ending = {gzip.compress: "gz", bz2.compress: "bz2", lzma.compress: "xz"}[pack]
    packed = tmp_path / f"{name}.{ending}"
    packed.write_bytes(pack((tmp_path / name).read_bytes()))
    written = []
    for data in (tmp_path / name, packed):
        out = tmp_path / f"{len(written)}-{name}"
        write_canary_data(CanaryInsertionPlan(manifest, group="who"), str(data), out)
        written.append(out.read_bytes())
    assert written[0] == written[1]
    with pytest.raises(AuditError, match=f"expected -o to end in {packed.suffixes[0]}"):
        write_canary_data(CanaryInsertionPlan(manifest), str(packed), tmp_path / f"b.{ending}")


def test_texts_of_a_folder_of_csv_files_stay_texts(
    manifest: ExposureCanaryManifest, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv").write_text("text,place\nhello,01234\nbye,2020-01-01\n")
    write_canary_data(CanaryInsertionPlan(manifest), str(tmp_path / "a"), tmp_path / "b")
    rows = [row for row in rows_of(tmp_path / "b") if row["place"] is not None]
    assert rows == [{"text": "hello", "place": "01234"}, {"text": "bye", "place": "2020-01-01"}]


def test_half_a_character_of_an_array_stays_escaped(
    manifest: ExposureCanaryManifest, tmp_path: Path
) -> None:
    """UTF-8 has no bytes for it."""
    row = {"text": "hello", "emoji": "\ud83d", "name": "J\u00f6rg"}
    (tmp_path / "a.json").write_text(json.dumps([row]))
    write_canary_data(CanaryInsertionPlan(manifest), str(tmp_path / "a.json"), tmp_path / "b.json")
    assert row in rows_of(tmp_path / "b.json")
    assert "Jörg" in (tmp_path / "b.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("members", [2, 8, 80])
def test_all_copies_of_a_canary_land_in_one_shard(
    members: int, manifest: ExposureCanaryManifest, tmp_path: Path
) -> None:
    jsonl(tmp_path / "a.jsonl")
    write_canary_data(
        CanaryInsertionPlan(manifest), str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    )
    rows = [row["text"] for row in rows_of(tmp_path / "b.jsonl")]
    shards = [[rows[i] for i in chosen] for chosen in assign_member_shards(rows, members)]
    for entry in manifest.canaries:
        holding = [texts.count(entry.text) for texts in shards if entry.text in texts]
        assert holding == ([entry.count] if entry.count else [])


def test_lines_stay_byte_for_byte_and_repeats_stay_numbers(
    manifest: ExposureCanaryManifest, tmp_path: Path
) -> None:
    lines = [
        '{"text":  "a",   "repeats": 3}',
        '{"repeats": 1, "text": "\\u00fc", "more": [1, {"x": null}]}\r',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), newline="")
    write_canary_data(
        CanaryInsertionPlan(manifest), str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    )
    written = (tmp_path / "b.jsonl").read_bytes().decode().split("\n")[:-1]
    assert [line for line in written if line in lines] == lines
    assert {json.loads(line)["repeats"] for line in written if line not in lines} == {1}


def test_what_was_saved_is_data_for_an_audit(
    manifest: ExposureCanaryManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    saved(tmp_path / "a")
    write_canary_data(CanaryInsertionPlan(manifest), str(tmp_path / "a"), tmp_path / "b")
    benchmark = read_files(
        str(tmp_path / "b"), bpe(150), prefix_length=2, suffix_length=2, known_fraction=0
    )
    assert len(benchmark.secrets) > 0


@pytest.mark.parametrize(
    ("name", "content", "copies", "out", "why"),
    [
        (
            "a.jsonl",
            '{"body": "x"}\n',
            {},
            "b.jsonl",
            r"expected one column 'text' \(--column\), got body",
        ),
        (
            "a.jsonl",
            '{"text": "x"}\n',
            {"group": "user"},
            "b.jsonl",
            r"expected one column 'user' \(--group\)",
        ),
        ("a.jsonl", '{"text": 5}\n', {}, "b.jsonl", "row 0 .* expected text"),
        ("a.jsonl", '{"text": "x"\n', {}, "b.jsonl", "not JSON"),
        ("a.csv", "body,more\nx,y\n", {}, "b.csv", "expected one column 'text'"),
        ("a.csv", "text,more\nx\n", {}, "b.csv", "expected 2 fields, got 1"),
        ("a.parquet", "no parquet", {}, "b.parquet", "not a Parquet file"),
        ("a.txt", "x", {}, "b.txt", "expected a file ending in .jsonl"),
        ("a.jsonl", '{"text": "x"}\n', {}, "b.csv", "expected -o to end in .jsonl"),
        ("a.jsonl", '{"text": "x"}\n', {}, "a.jsonl", "expected a new path for -o"),
    ],
)
def test_bad_data_are_refused_and_nothing_is_written(
    name: str,
    content: str,
    copies: dict[str, str],
    out: str,
    why: str,
    manifest: ExposureCanaryManifest,
    tmp_path: Path,
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(AuditError, match=why):
        write_canary_data(
            CanaryInsertionPlan(manifest, **copies), str(tmp_path / name), tmp_path / out
        )
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_column_that_takes_no_nulls_is_refused_by_its_name(
    manifest: ExposureCanaryManifest, tmp_path: Path
) -> None:
    """A canary has nothing to put there."""
    fields = [
        pyarrow.field("text", pyarrow.string(), nullable=False),
        pyarrow.field("age", pyarrow.int64(), False),
    ]
    table = pyarrow.table({"text": ["x"], "age": [3]}, schema=pyarrow.schema(fields))
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(AuditError, match="got 'age', which takes no nulls"):
        write_canary_data(
            CanaryInsertionPlan(manifest), str(tmp_path / "a.parquet"), tmp_path / "b.parquet"
        )
    parquet.write_table(table.drop(["age"]), tmp_path / "a.parquet")
    assert write_canary_data(
        CanaryInsertionPlan(manifest), str(tmp_path / "a.parquet"), tmp_path / "b.parquet"
    ) == len(manifest.list_inserted_copies())


def test_zero_insertions_are_refused(tmp_path: Path) -> None:
    raw = spoilt(count=0)
    raw["canaries"] = raw["canaries"][:1]
    (tmp_path / "canaries.json").write_text(json.dumps(raw))
    jsonl(tmp_path / "a.jsonl")
    with pytest.raises(AuditError, match="every one in the manifest has zero insertions"):
        write_canary_data(
            CanaryInsertionPlan(manifests.read_canary_manifest(tmp_path / "canaries.json")),
            str(tmp_path / "a.jsonl"),
            tmp_path / "b.jsonl",
        )


@pytest.mark.parametrize("canary", [("95532", 1), ("95532x", 1), ("955320", -1)])
def test_lab_canaries_are_six_digits(canary: tuple[str, int]) -> None:
    with pytest.raises(AuditError, match="expected lab canaries of six digits"):
        Lab(LabRecipe(canaries=(canary,)))


def test_canaries_with_one_text_are_refused() -> None:
    """One with 16 copies and a control were counted apart."""
    with pytest.raises(AuditError, match="expected each of the lab's canaries once, got 2 with 1"):
        LabRecipe(canaries=(("955320", 1), ("955320", 4))).check()
    formats = ["ID {digits:2}", "ID {digits:1}{digits:1}"]
    with pytest.raises(AuditError, match="expected every canary's own text, got the text of"):
        exposure_canaries.make_exposure_canary_manifest(formats, (1, 16), 8, 4)


def test_the_labs_canaries_are_those_it_trains_on(tmp_path: Path) -> None:
    recipe = LabRecipe(
        vocab_size=400,
        repeats=tuple((times, 1, 1) for times in (1, 2, 4, 8, 16)),
        others=0,
        nonmembers=2,
        public_records=60,
        canaries=(("955320", 2), ("000007", 0)),
    )
    lab = Lab(recipe, cache=tmp_path)
    own, control = lab.canaries
    assert (
        own.canary is not None
        and own.canary.text == "My ID is 955320"
        and own.canary.text in own.canary.space
    )
    assert (own.member, own.repeats, control.member, control.repeats) == (True, 2, False, 0)
    assert lab.tokenizer.decode(own.suffix) == "My ID is 955320"
    copies = lab.texts.private_text_copies()
    assert copies.count("My ID is 955320") == 2 and "My ID is 000007" not in copies
    assert not any(secret.canary for secret in lab.secrets)

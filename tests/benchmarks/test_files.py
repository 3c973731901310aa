"""Users' files: what is read stays what it was, what is cut can be put together, what cannot be
used is named aloud."""

import bz2
import csv
import gzip
import json
import logging
import lzma
import math
import random
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from auditor.benchmarks.data import large_tables
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.columns import read_data_table
from auditor.benchmarks.data.files import Files, TableReader, sample_data_conversations
from auditor.benchmarks.data.large_tables import BlockHashing
from auditor.benchmarks.data.tables import read_record_table
from auditor.core.errors import AuditError
from auditor.core.plan_parts import DataPlan
from tests.conftest import read_files, refuses

CORPUS = [
    f"Dear {who}, the code of {what} is {i:06d}."
    for i in range(40)
    for who in "Ann Bob"
    for what in ("A", "the")
]
SECRET = "Zelda-Wintermute-4711"  # private text that no message may repeat
GPT2 = Path(__file__).parents[2].parent / "shared" / "data" / "gpt2-tokenizer"


def byte_level(**post: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if post:
        tokenizer.post_processor = processors.ByteLevel(**post)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama's: a space is part of the next token, and the first one of a text is made up."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES, TRIMMED, SPACED = byte_level(), byte_level(trim_offsets=True), metaspace()


def decode(tokens: tuple[int, ...], tokenizer: Any = BYTES) -> str:
    return str(
        tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """The same rows as whatever the path ends in."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=11)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
    return str(path)


def pairs(*suffixes: str) -> list[dict[str, Any]]:
    return [{"prefix": "Dear Ann,", "suffix": suffix} for suffix in suffixes]


def codes(count: int, start: int = 0) -> list[dict[str, Any]]:
    return pairs(*(f" the code is {i:06d}" for i in range(start, start + count)))


def build(data: str, **options: Any) -> Files:
    return read_files(data, BYTES, **{"known_fraction": 0.0, **options})


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(AuditError) as caught:
        build(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and SECRET not in message and caught.value.__cause__ is None
    return message


# --- reading ---


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet", "JSONL"])
def test_text_stays_what_it_is_in_every_format(tmp_path: Path, ending: str) -> None:
    suffixes = [
        " 007320",
        "NA",
        " null",
        " 1e5",
        ' "quoted", ',
        "\nnext\r\nline",
        " é🙂\u2028x",
        "  x ",
    ]
    benchmark = build(
        write(tmp_path / f"d.{ending}", [{"prefix": "code:", "suffix": s} for s in suffixes])
    )
    assert [decode(s.suffix) for s in benchmark.secrets] == suffixes
    assert [decode(s.prefix) for s in benchmark.secrets] == ["code:"] * len(suffixes)
    assert [s.id for s in benchmark.secrets] == [f"row-{i:06d}" for i in range(len(suffixes))]
    assert all(s.member and s.repeats == 1 for s in benchmark.secrets)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_an_empty_value_stays_empty_and_its_row_is_left_out_aloud(
    tmp_path: Path, ending: str
) -> None:
    benchmark = build(write(tmp_path / f"d.{ending}", pairs(" a", "", " b")))
    assert [s.id for s in benchmark.secrets] == ["row-000000", "row-000002"]
    assert any(
        "prefix or suffix is empty (row 1, counted from 0)" in note for note in benchmark.notes
    )


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("text", "no text (empty, null or only white space)"),
        ("suffix", "prefix or suffix is empty"),
    ],
)
def test_rows_without_a_text_are_left_out_and_counted_in_every_format(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    is_large: bool,
    column: str,
    reason: str,
) -> None:
    texts = [*LINES[:30], None, "", " \n\t " * 30, None]
    rows = [{"prefix": "It is:", "suffix": text} for text in texts]
    options = {"prefix_length": None, "suffix_length": None}
    if column == "text":
        rows = [{"text": text} for text in texts]
        options = {}
    path = tmp_path / f"d.{ending}"
    read = read_large(path, monkeypatch, rows, known_fraction=0, **options)
    if not is_large:
        read = build(str(path))
    counts = read.record_counts["members"]
    assert counts.given == 34 and counts.left_out == {reason: 4} and counts.askable == 30
    assert counts.audited == (3 if is_large else 30)
    assert counts.given == counts.audited + 4 + sum(counts.not_attacked.values())
    assert sum(f"left out 4 rows: {reason}" in note for note in read.notes) == 1


def test_a_file_without_any_text_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"text": None}, {"text": " "}])
    assert refusal(data).endswith("(2 rows: no text (empty, null or only white space))")


def test_byte_order_mark_blank_lines_and_unused_columns_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("\ufeffid,prefix,suffix\r\n\r\n7,Dear Ann, 007320\r\n", encoding="utf-8")
    assert decode(build(str(path)).secrets[0].suffix) == " 007320"
    path = tmp_path / "d.jsonl"
    path.write_text('\ufeff{"id": 7, "prefix": "Dear Ann", "suffix": " x"}\n\n', encoding="utf-8")
    assert build(str(path)).secrets[0].id == "row-000000"


def test_a_csv_field_may_be_longer_than_the_csv_modules_default(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    benchmark = build(write(tmp_path / "d.csv", pairs(" x" * 70_000)))
    assert decode(benchmark.secrets[0].suffix) == " x" * 70_000
    assert csv.field_size_limit() == before


def test_dictionary_encoded_parquet_text_is_text(tmp_path: Path) -> None:
    column = pa.array([" one two", " one two"]).dictionary_encode()
    parquet.write_table(pa.table({"prefix": ["a", "b"], "suffix": column}), tmp_path / "d.parquet")
    assert len(build(str(tmp_path / "d.parquet")).secrets) == 2


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("d.jsonl", b'{"prefix": "a", "suffix": "b"}\n{"prefix": "%s', "line 2: not JSON"),
        ("d.jsonl", b'{\n "text": "%s"\n}\n', "expected an object on each line, or one array"),
        ("d.jsonl", b'{"text": "a"},\n{"text": "%s"}', "expected an object on each line, or one a"),
        ("d.json", b'{"train": [{"text": "%s"}]}', "or write the objects inside this only row as"),
        ("d.csv", b"id, text\n1,%s\n", "got id, ' text' with its spaces: rename"),
        (
            "d.csv",
            b"id;text\n1;a, %s\n",
            ": write a comma between fields instead of ;, and quotes aro",
        ),
        ("d.csv", "text\n%s\n".encode("utf-16"), "at byte 0: save the file as UTF-8"),
        (
            "d.jsonl",
            b'{"prefix": "a", "suffix": "b"}\n"%s"\n',
            "row 1 (counted from 0): expected a JSON object, got text: write it as {",
        ),
        (
            "d.jsonl",
            b'{"prefix": "%s", "suffix": 7320}\n',
            "row 0 (counted from 0), column 'suffix': expected text, got a n",
        ),
        (
            "d.jsonl",
            b'{"text": "a"}\n{"text": "%s", "text": "b"}\n',
            "line 2: expected each key once, got 'text' twice",
        ),
        (
            "d.jsonl",
            b'{"messages": [{"role": "user", "content": "%s", "content": "b"}]}\n',
            "line 1: expected each key once, got 'content' twice",
        ),
        (
            "d.json",
            b'[{"text": "a", "n": [1, 2]},\n {"text": "%s", "text": "b"}]',
            "row 1 (counted from 0): expected each key once, got 'text' twice",
        ),
        ("d.jsonl", b'{"text": ["%s"]}\n', "column 'text': expected text, got a list"),
        ("d.json", b'{"text": {"0": "%s"}}', "text, got an object: write an object for each row"),
        (
            "d.jsonl",
            b'{"text": "%s"}\n{"x": "%s"}\n',
            "row 1 (counted from 0), column 'text': expected text, got nothing",
        ),
        ("d.jsonl", b'{"text": "%s \\ud83d"}\n', "expected text, got half of a surrogate pair"),
        ("d.jsonl", b"[" * 100_000, "not JSON that can be read"),
        ("d.json", b'[{"text": "a"},\n {"text": "%s"\n', "line 3: not JSON"),
        (
            "d.jsonl",
            b'{"body": "%s", "user": "x"}\n',
            "expected either the columns prefix and suffix or the column text, or conversations "
            "(messages",
        ),
        ("d.jsonl", b'{"prefix": "%s", "suffix": "x", "text": "y"}\n', "got prefix, suffix, text"),
        ("d.jsonl", b'{"prefix": "%s"}\n', "got prefix"),
        ("d.jsonl", b"\n", "is empty"),
        ("d.jsonl", b'{"text": "%s \xe9"}\n', "expected UTF-8 text, got something else at byte 32"),
        (
            "d.csv",
            b"prefix,suffix\n%s,\xe9\n",
            "expected UTF-8 text, got something else at byte 36",
        ),
        ("d.csv", b"", "is empty"),
        ("d.csv", b"prefix,suffix\n", "is empty"),
        ("d.csv", b"prefix,suffix\na,b\n%s\n", "line 3: expected 2 fields, got 1"),
        ("d.csv", b"prefix,suffix\na,b\n%s,b,c\n", "line 3: expected 2 fields, got 3"),
        (
            "d.csv",
            b'prefix,suffix\na,b\nc,"%s\n\n\n',
            "not CSV in the record that starts at line 3: unexpected end",
        ),
        ("d.csv", b'prefix,suffix\na,"%s" b\n', "not CSV in the record that starts at line 2"),
        ("d.csv", b'prefix,suffix\na,"%s \\"b\\""\n', ": write each quote inside a text twice"),
        ("d.csv", b'text;ward\n"a, %s";b\n', ": write a comma between fields instead of ;"),
        ("d.csv", b"prefix,prefix,suffix\na,b,%s\n", "expected one column 'prefix', got 2"),
        ("d.csv", b"%s 1,%s 2\na,b\n", "2 columns not shown, as a name may be private"),
        ("d.csv", b"%s,Meier\na,b\n", "got 2 columns not shown, as a name may be private"),
        ("d.jsonl", b'{"content": "%s", "who": 1}\n', "got content, who"),
        ("d.csv", b"prefix;suffix\n%s;b\n", "the separator no comma?"),
        (
            "d.csv",
            b"prefix,suffix,repeats\na,b,2\na,%s,x\n",
            "row 1 (counted from 0), column 'repeats': expected a whole",
        ),
        ("d.csv", b"prefix,suffix,repeats\na,b,0\n", "a whole number of at least 1"),
        ("d.jsonl", b'{"text": "%s", "repeats": true}\n', "a whole number of at least 1"),
        ("d.jsonl", b'{"text": "%s", "repeats": 1.5}\n', "a whole number of at least 1"),
        ("d.jsonl", b'{"text": "%s", "repeats": NaN}\n', "a whole number of at least 1"),
        ("d.csv", b"text,repeats\n%s,2.5\n", "a whole number of at least 1"),
        ("d.parquet", b"", "is empty"),
        ("d.parquet", b"PAR1 %s", "not a Parquet file"),
        (
            "d.txt",
            b"%s",
            "expected a file ending in .jsonl, .json, .csv, .parquet, .arrow "
            "(texts also compressed, as in .jsonl.gz), got '.txt'",
        ),
        ("data", b"%s", "got 'no ending'"),
        ("d.ndjson", b"%s", "got '.ndjson': rename it to .jsonl"),
        ("d.db", b"%s", "got '.db': export its table as CSV"),
        ("d.json", b'{"data": [{"text": "%s"}]}', "got data: rename the column"),
        ("d.jsonl", b'{"contents": [], "systemInstruction": "%s"}', "got contents, systemInstruc"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence_without_its_text(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content.replace(b"%s", SECRET.encode()))
    message = refusal(str(tmp_path / name))
    assert expected in message and message.startswith(f"--data '{tmp_path / name}'")


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_repeats_beside_gaps_are_whole_numbers(tmp_path: Path, form: str) -> None:
    frame = pd.DataFrame({"text": [*LINES[:2], "x"], "repeats": [2, 3, None]})
    frame = frame.dropna()  # the column keeps its type: 2.0 and 3.0
    path = tmp_path / f"d.{form}"
    if form == "csv":
        frame.to_csv(path, index=False)
    elif form == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    assert [secret.repeats for secret in build(str(path)).secrets] == [2, 3]


def test_a_data_set_without_a_train_split_names_the_folders_of_its_splits(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": [" one two three"] * 2})
    datasets.DatasetDict({"validation": rows}).save_to_disk(str(tmp_path / "saved"))
    folder = str(tmp_path / "saved" / "validation")
    assert refusal(str(tmp_path / "saved")).endswith(f"expected a split train, or one of {folder}")
    assert len(build(folder).secrets) == 1


def test_splits_that_are_not_read_are_named(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": [" one two three"] * 2})
    splits = datasets.DatasetDict({"train": rows, "test": rows, "validation": rows})
    splits.save_to_disk(str(tmp_path / "saved"))
    for folder in ("saved", "files"):
        (tmp_path / folder).mkdir(exist_ok=True)
    for name in splits:
        write(tmp_path / "files" / f"{name}.jsonl", [{"text": " one two three"}])
    for folder in ("saved", "files"):
        (note,) = [
            note for note in build(str(tmp_path / folder)).notes if "the split train" in note
        ]
        assert "only the split train is read, not" in note
        assert "test" in note and "validation" in note
        counts = build(str(tmp_path / folder)).record_counts["members"]
        assert [note] == [
            f"--data {str(tmp_path / folder)!r}: {part}" for part in counts.unread_parts
        ]
    only = build(str(tmp_path / "saved" / "train")).notes
    assert not [note for note in only if "the split train" in note]


def test_a_folder_with_files_of_several_formats_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": " one two three"}])
    (tmp_path / "dataset_infos.json").write_text("{}")  # a clone of a data set has this
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "old.csv").touch()
    assert len(build(str(tmp_path)).secrets) == 1
    parquet.write_table(pa.table({"text": [" four five six"]}), tmp_path / "b.parquet")
    expected = "expected data files of one format in this folder, got .jsonl, .parquet: give one"
    assert expected in refusal(str(tmp_path))


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path: Path) -> None:
    long = " one two three four five six"
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, [{"text": f"{long} {name}"}])
    clean = build(str(tmp_path), known_fraction=0.0).notes
    assert not [note for note in clean if "not read" in note or "each line" in note]
    for name in ("notes.txt", "Anna Lee.md", "LICENSE", ".hidden.txt"):
        (tmp_path / name).write_text(long)
    made = build(str(tmp_path), known_fraction=0.0)
    unread = "files of the folder that are not read: 1 .md, 1 .txt, 1 without an ending"
    assert [note for note in made.notes if note.endswith(unread)]
    assert made.record_counts["members"].unread_parts == (unread,)
    # Of a README.md without metadata nothing is said.
    assert not logging.getLogger("huggingface_hub.repocard").isEnabledFor(logging.WARNING)


def test_a_folder_of_texts_says_that_lines_are_rows(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.TXT", "sub/d.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f" {name} one two three\n {name} four five six\n")
    made = build(str(tmp_path), known_fraction=0.0)
    assert len(made.secrets) == 4
    assert any("each line of the .txt files is a row" in note for note in made.notes)
    assert any("not read: 1 .TXT, 1 .html" in note for note in made.notes)


@pytest.mark.parametrize(
    ("name", "line"),
    [("a.txt", "Jörg"), ("a.csv", "text\nJörg"), ("a.jsonl", '{"text": "Jörg"}')],
)
def test_a_folder_that_is_not_utf8_is_refused_for_that(
    name: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(f"{line}\n".encode("latin-1"))
    expected = f"file {name!r}: expected UTF-8 text, got something else at byte {line.index('ö')}"
    if name == "a.txt":  # `datasets` reads it
        expected = "expected UTF-8 text, got something else in a file: save the files as UTF-8"
    assert expected in refusal(str(tmp_path))


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_a_compressed_file_is_read_as_the_file_in_it(
    tmp_path: Path, ending: str, compression: str
) -> None:
    texts = ["one two three", "NA", "four five six"]
    contents = {
        "jsonl": "".join(json.dumps({"text": text}) + "\n" for text in [*texts, ""]),
        "json": json.dumps([{"text": text} for text in [*texts, ""]]),
        "csv": "text,n\n" + "".join(f"{text},1\n" for text in [*texts, ""]),
    }
    plain = tmp_path / f"d.{ending}"
    plain.write_text(contents[ending])
    packed = tmp_path / f"d.{ending}.{compression}"
    packed.write_bytes(COMPRESSIONS[compression](plain.read_bytes()))
    tables = [read_record_table("--data", str(path), ("text",)) for path in (plain, packed)]
    for table in tables:
        assert list(table.column("text")) == [*texts, ""]
    assert tables[0].columns == tables[1].columns and tables[0].texts == tables[1].texts
    notes = "\n".join(build(str(packed)).notes).replace(packed.name, plain.name)
    assert tuple(notes.splitlines()) == build(str(plain)).notes


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_compressed_file_that_breaks_off_is_refused(tmp_path: Path, compression: str) -> None:
    content = json.dumps({"text": random.Random(0).randbytes(3_000).hex()}).encode()
    packed = COMPRESSIONS[compression](content)
    path = tmp_path / f"d.jsonl.{compression}"
    path.write_bytes(packed[: len(packed) // 2])
    expected = f"not a whole .{compression} file: it is broken or breaks off"
    assert refusal(str(path)).endswith(expected)


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize("compression", ["", "gz", "xz"])
def test_texts_that_pandas_takes_for_missing_values_stay_texts_in_a_folder(
    tmp_path: Path, ending: str, compression: str
) -> None:
    texts = ["NA", "null", "nan", "None", "007320"]
    comma = "," if ending == "csv" else "\t"
    lines = ["prefix" + comma + "suffix", *(f"code is:{comma}{text}" for text in texts)]
    content = ("\n".join(lines) + "\n").encode()
    if compression:
        content = COMPRESSIONS[compression](content)
    (tmp_path / f"train.{ending}{compression and '.'}{compression}").write_bytes(content)
    made = build(str(tmp_path), known_fraction=0.0)
    assert [decode(secret.suffix) for secret in made.secrets] == texts


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json"])
def test_numbers_and_dates_in_the_files_of_a_folder_stay_texts(tmp_path: Path, ending: str) -> None:
    """`datasets` would make 7320, a date and one user of three of them."""
    columns = ("prefix", "suffix", "ward", "person")
    cells = [
        ("the first code is:", "007320", "01", "0012"),
        ("the next code is:", "007321", "1", "12"),
        ("the last code is:", "007322", "1.0", "012"),
    ]
    for number, suffix in enumerate(["007320", "2020-01-01"]):
        of_files = [(prefix, suffix, *rest) for prefix, _, *rest in cells]
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in of_files]
        content = "\n".join(lines)
        if ending == "json":
            content = f"[{','.join(lines)}]"
        elif ending != "jsonl":
            separator = "," if ending == "csv" else "\t"
            content = "\n".join(map(separator.join, [columns, *of_files]))
        (tmp_path / f"train-{number}.{ending}").write_text(content)
    table = read_data_table("--data", str(tmp_path), "ward", "person")
    assert list(table.column("suffix")) == ["007320"] * 3 + ["2020-01-01"] * 3
    assert list(table.list_groups("ward", True)) == ["01", "1", "1.0"] * 2
    assert list(table.list_users("person", True)) == ["0012", "12", "012"] * 2


def test_whole_numbers_of_20_digits_in_a_folder_stay_apart(tmp_path: Path) -> None:
    people = [12345678901234567890, 12345678901234567891]
    write(tmp_path / "a.jsonl", [{"text": "one two", "person": person} for person in people])
    table = read_data_table("--data", str(tmp_path), "person")
    assert list(table.list_users("person", True)) == list(map(str, people))


def test_a_column_twice_is_refused_in_a_folder(tmp_path: Path) -> None:
    """pandas would rename the second to text.1, and the first alone would be read."""
    (tmp_path / "a.csv").write_text("text,text\none two,three four\n")
    assert refusal(str(tmp_path)).endswith("expected one column 'text', got 2")


def test_options_in_the_readme_of_a_folder_are_kept(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ';'\n---\n"
    )
    (tmp_path / "a.csv").write_text("text;ward\none, two;007\n")
    table = read_data_table("--data", str(tmp_path), "ward")
    assert table.list_texts() == ["one, two"]
    assert list(table.list_groups("ward", True)) == ["007"]
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: a.json\n  field: rows\n---\n"
    )
    (tmp_path / "a.csv").unlink()
    (tmp_path / "a.json").write_text('{"rows": [{"text": "one, two"}]}')
    assert read_data_table("--data", str(tmp_path)).list_texts() == ["one, two"]
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  quoting: 3\n---\n"
    )
    (tmp_path / "a.csv").write_text('text,ward\nNA,a\nsay "one,b\n')
    assert read_data_table("--data", str(tmp_path)).list_texts() == ["NA", 'say "one']


@pytest.mark.parametrize(
    ("option", "lines", "texts"),
    [
        ("nrows: 1", ["one two", "three four"], ["one two"]),
        ("on_bad_lines: skip", ["one two", "three, four", "five six"], ["one two", "five six"]),
        ("comment: '#'", ["one two # three"], ["one two "]),
    ],
)
def test_options_in_the_readme_that_leave_out_rows_or_text_are_named(
    tmp_path: Path, option: str, lines: list[str], texts: list[str]
) -> None:
    (tmp_path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  {option}\n---\n"
    )
    (tmp_path / "a.csv").write_text("\n".join(["text", *lines]) + "\n")
    table = read_data_table("--data", str(tmp_path))
    assert table.list_texts() == texts
    name = option.partition(":")[0]
    (note,) = (note for note in table.list_unread_notes() if "README.md" in note)
    assert f"read with {name} of README.md: rows and text that they leave out" in note


def test_a_packed_file_in_a_folder_is_refused(tmp_path: Path) -> None:
    """`datasets` made 7320 of 007320 in it, and renamed the second of two equal columns."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", "text,text\none two,007320\n")
    write(tmp_path / "b.jsonl", [{"text": "one two"}])
    assert "expected files that are not packed, got a .zip" in refusal(str(tmp_path))


@pytest.mark.parametrize("kind", ["numpy", "torch", "arrow", "pandas"])
def test_a_data_set_saved_with_a_format_is_read_as_without(tmp_path: Path, kind: str) -> None:
    rows = datasets.Dataset.from_list(
        [
            {"messages": chat(question, "one two"), "repeats": 2, "ward": ward}
            for question, ward in (("a", 1), ("b", None))
        ]
    )
    rows.with_format(kind, columns=["repeats"]).save_to_disk(str(tmp_path / "d"))
    table = read_data_table("--data", str(tmp_path / "d"), "ward")
    assert table.list_repeat_counts() == [2, 2]
    assert list(table.list_groups("ward", True)) == ["1", "none"]
    assert table.list_shown_texts() == ["a\none two", "b\none two"]


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_a_folder_with_several_configurations_says_what_to_give(tmp_path: Path) -> None:
    configurations = ["---\nconfigs:"]
    for name in ("mails", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text('{"text": "one two three"}\n')
        configurations += [f"- config_name: {name}", f"  data_files: {name}/*.jsonl"]
    (tmp_path / "README.md").write_text("\n".join([*configurations, "---\n"]))
    assert refusal(str(tmp_path)) == (
        f"--data {str(tmp_path)!r}: expected a data set with one configuration, got mails, notes: "
        "give --data the file or the folder of one, because no option chooses"
    )
    assert len(build(str(tmp_path / "mails")).secrets) == 1


@pytest.mark.parametrize(
    ("ending", "place"), [("jsonl", "line 2"), ("json", "row 1 (counted from 0)")]
)
def test_an_object_with_a_key_twice_is_refused_in_a_folder(
    tmp_path: Path, ending: str, place: str
) -> None:
    rows = ['{"text": "one two three"}', '{"text": "four five six", "text": "seven eight"}']
    content = "\n".join(rows) if ending == "jsonl" else f"[{', '.join(rows)}]"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"a.{ending}").write_text(content)
    message = refusal(str(tmp_path / "data"))
    assert message.endswith(f"file 'a.{ending}', {place}: expected each key once, got 'text' twice")


def test_a_row_with_more_fields_than_the_header_is_refused_in_a_folder(tmp_path: Path) -> None:
    """pandas would take the first field of each row for an index, and shift the others."""
    (tmp_path / "train.csv").write_text("text,place\n1,one two three,ward\n2,four five six,ward\n")
    expected = "file 'train.csv', line 2: expected 2 fields, got 3: write a comma between fields"
    assert expected in refusal(str(tmp_path))


def test_a_parquet_text_that_is_not_utf8_is_refused_for_that(tmp_path: Path) -> None:
    texts = pa.array([b"J\xf6rg"]).view(pa.string())
    parquet.write_table(pa.table({"text": texts}), tmp_path / "d.parquet")
    assert "expected UTF-8 text, got something else" in refusal(str(tmp_path / "d.parquet"))


def test_lines_of_arrays_are_refused_as_lists(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('[{"role": "user"}]\n[{"role": "user"}]\n')
    expected = "row 0 (counted from 0): expected a JSON object, got a list: write it as"
    assert expected in refusal(str(tmp_path / "d.jsonl"))


def test_files_with_different_columns_are_no_data_set(tmp_path: Path) -> None:
    for name in ("text", "body"):
        parquet.write_table(pa.table({name: [SECRET]}), tmp_path / f"{name}.parquet")
    expected = (
        "cannot be loaded as a data set: 'body.parquet' and 'text.parquet' have different columns: "
        "give one file, or files with the same columns"
    )
    assert refusal(str(tmp_path)).endswith(expected)


@pytest.mark.parametrize(
    ("column", "kind"),
    [([7], "a number"), ([math.nan], "NaN"), ([b"x"], "bytes"), ([True], "true or false")],
)
def test_a_parquet_column_that_is_not_text_is_refused(
    tmp_path: Path, column: list[Any], kind: str
) -> None:
    parquet.write_table(pa.table({"prefix": [SECRET], "suffix": column}), tmp_path / "d.parquet")
    message = refusal(str(tmp_path / "d.parquet"))
    assert f"row 0 (counted from 0), column 'suffix': expected text, got {kind}" in message


@pytest.mark.parametrize("flag", ["--data", "--known", "--nonmembers"])
@pytest.mark.parametrize(
    "name", ["nowhere.jsonl", "nowhere.txt", "./nowhere", "/no/such/place", "a/b/c", "~/x"]
)
def test_a_missing_file_is_not_taken_for_a_data_set(tmp_path: Path, flag: str, name: str) -> None:
    good = write(tmp_path / "d.jsonl", codes(3))
    options = {} if flag == "--data" else {flag[2:]: name}
    assert (
        refusal(name if flag == "--data" else good, **options) == f"{flag} {name!r}: no such file"
    )


# --- cutting ---

words = st.text(
    st.sampled_from(" \n\tabDear,.;é🙂漢\u0301\u200d\u2028\ufffd0123"), max_size=12
) | st.text(max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(words, words), max_size=8), tokenizer=st.sampled_from([BYTES, TRIMMED])
)
def test_prefix_and_suffix_of_kept_rows_give_the_text_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], tokenizer: Any
) -> None:
    rows = [("Dear Ann", " 007"), *rows]
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    data = write(path, [{"prefix": prefix, "suffix": suffix} for prefix, suffix in rows])
    benchmark = read_files(data, tokenizer, known_fraction=0.0)
    for secret in benchmark.secrets:
        prefix, suffix = rows[int(secret.id.removeprefix("row-"))]
        assert decode(secret.prefix, tokenizer) == prefix
        assert decode(secret.suffix, tokenizer) == suffix
        # tokenised jointly
        assert list(secret.prefix + secret.suffix) == tokenizer(prefix + suffix)["input_ids"]
    kept = {secret.prefix + secret.suffix for secret in benchmark.secrets}
    for (
        prefix,
        suffix,
    ) in rows:  # nothing that could be kept is left out: at a boundary the halves are the whole
        halves = tokenizer([prefix, suffix])["input_ids"] if prefix and suffix else [[], []]
        whole = tuple(tokenizer(prefix + suffix)["input_ids"])
        has_text = prefix and suffix.strip()
        assert tuple(halves[0] + halves[1]) != whole or not has_text or whole in kept


@pytest.mark.parametrize(
    "tokenizer", [BYTES, TRIMMED, SPACED], ids=["bytes", "trimmed offsets", "metaspace"]
)
def test_a_join_inside_a_token_is_reported_and_left_out(tmp_path: Path, tokenizer: Any) -> None:
    rows = [("Dear Ann,", " the code"), ("Dear Ann, ", "the code"), ("Dear Ann, t", "he code")]
    data = write(tmp_path / "d.csv", [{"prefix": p, "suffix": s} for p, s in rows])
    benchmark = read_files(data, tokenizer, known_fraction=0.0)
    assert [s.id for s in benchmark.secrets] == ["row-000000"]
    assert decode(benchmark.secrets[0].prefix, tokenizer) == "Dear Ann,"
    assert (
        decode(benchmark.secrets[0].prefix + benchmark.secrets[0].suffix, tokenizer)
        == "Dear Ann, the code"
    )
    assert any(
        "not a token boundary (rows 1, 2, counted from 0)" in note for note in benchmark.notes
    )


def test_a_character_of_several_tokens_is_not_cut_in_two(tmp_path: Path) -> None:
    data = write(
        tmp_path / "d.jsonl", [{"prefix": "a🙂", "suffix": "🙂b"}, {"prefix": "漢", "suffix": "字"}]
    )
    assert [(decode(s.prefix), decode(s.suffix)) for s in build(data).secrets] == [
        ("a🙂", "🙂b"),
        ("漢", "字"),
    ]


def test_text_that_the_tokenizer_changes_is_reported_and_left_out(tmp_path: Path) -> None:
    lower = byte_level()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    data = write(
        tmp_path / "d.jsonl",
        [{"prefix": "dear", "suffix": " ann"}, {"prefix": "Dear", "suffix": " Ann"}],
    )
    benchmark = read_files(data, lower, known_fraction=0.0)
    assert [s.id for s in benchmark.secrets] == ["row-000000"]
    assert any(
        "does not give this text back (it normalises it) (row 1," in note
        for note in benchmark.notes
    )


def test_prefix_and_suffix_columns_are_kept_whole(tmp_path: Path) -> None:
    benchmark = build(write(tmp_path / "d.jsonl", codes(1)), prefix_length=1, suffix_length=1)
    assert decode(benchmark.secrets[0].prefix) == "Dear Ann,"
    assert decode(benchmark.secrets[0].suffix) == " the code is 000000"


def test_text_is_cut_at_the_lengths_and_shorter_rows_are_reported(tmp_path: Path) -> None:
    texts = [CORPUS[0], "short", CORPUS[1] + " and more"]
    benchmark = build(
        write(tmp_path / "d.csv", [{"text": t} for t in texts]), prefix_length=4, suffix_length=3
    )
    assert [s.id for s in benchmark.secrets] == ["row-000000", "row-000002"]
    for secret, text in zip(benchmark.secrets, texts[::2], strict=True):
        assert list(secret.prefix + secret.suffix) == BYTES(text)["input_ids"][:7]
        assert (len(secret.prefix), len(secret.suffix)) == (4, 3)
    assert any(
        "shorter than 4 + 3 tokens (row 1, counted from 0)" in note for note in benchmark.notes
    )


def test_many_rows_are_cut_in_batches_without_mixing_them_up(tmp_path: Path) -> None:
    benchmark = build(write(tmp_path / "d.jsonl", codes(2300)))
    assert [decode(s.suffix) for s in benchmark.secrets] == [row["suffix"] for row in codes(2300)]
    assert [s.id for s in benchmark.secrets][-1] == "row-002299"


def test_no_special_tokens_are_added_and_a_note_says_which_would_be(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    benchmark = read_files(write(tmp_path / "d.jsonl", codes(1)), tokenizer, known_fraction=0.0)
    assert tokenizer.bos_token_id not in benchmark.secrets[0].prefix
    assert "by default it would add 1 to every text" in benchmark.notes[0]


@pytest.mark.skipif(not GPT2.is_dir(), reason="needs ../shared/data/gpt2-tokenizer")
def test_with_the_real_gpt2_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(GPT2)
    rows = [
        *codes(3),
        {"prefix": "Dear ", "suffix": "Ann"},
        {"prefix": "héllo 🙂", "suffix": "🙂 wörld"},
    ]
    benchmark = read_files(write(tmp_path / "d.jsonl", rows), tokenizer, known_fraction=0.0)
    assert [s.id for s in benchmark.secrets] == [
        "row-000000",
        "row-000001",
        "row-000002",
        "row-000004",
    ]
    for secret in benchmark.secrets:
        row = rows[int(secret.id[4:])]
        assert (decode(secret.prefix, tokenizer), decode(secret.suffix, tokenizer)) == (
            row["prefix"],
            row["suffix"],
        )
    long = write(tmp_path / "t.jsonl", [{"text": "word " * 5000}])
    assert len(read_files(long, tokenizer, known_fraction=0.0).secrets[0].suffix) == 50


def test_a_tokenizer_without_offsets_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", codes(1))
    with pytest.raises(AuditError, match="expected a model with a tokenizer"):
        read_files(data, None)
    with pytest.raises(AuditError, match=r"fast tokenizer .* got the slow SimpleNamespace"):
        read_files(data, SimpleNamespace(is_fast=False))  # type: ignore[arg-type]


# --- copies, known pairs, non-members, limits ---


def test_identical_rows_are_one_secret_with_as_many_repeats(tmp_path: Path) -> None:
    rows = [*codes(2), *codes(1), *codes(1)]
    benchmark = build(write(tmp_path / "d.jsonl", rows))
    assert [(s.id, s.repeats) for s in benchmark.secrets] == [("row-000000", 3), ("row-000001", 1)]
    assert any("merged 2 rows identical to an earlier row" in note for note in benchmark.notes)


def test_parts_are_counted_apart_from_their_records(tmp_path: Path) -> None:
    """Before: parts were called members, auxiliary records and records with near copies."""
    texts = [" ".join(f"{i}v{j}" for j in range(130)) for i in range(5)]
    near = texts[0].replace("0v100", "other")
    rows = [{"text": text} for text in (*texts, near)]
    benchmark = build(write(tmp_path / "d.jsonl", rows), known_fraction=0.2)
    n_members = len(benchmark.secrets)
    assert n_members > 5
    parts = f"5 members in {n_members} parts, 1 auxiliary record in {len(benchmark.known)} parts"
    assert benchmark.description == f"d.jsonl: {parts}"
    assert any("auxiliary data: 1 of the 6 unique members" in n for n in benchmark.notes)
    assert "2 records with near copies, which count as copies of each other" in benchmark.notes


def test_a_text_cut_to_fit_the_model_is_not_said_to_begin_as_others_do(tmp_path: Path) -> None:
    """It said "many others begin with the same 0 tokens"."""
    rows = [{"text": " ".join(f"{i}v{j}" for j in range(400))} for i in range(3)]
    benchmark = build(write(tmp_path / "d.jsonl", rows), room=120)
    assert max(len(s.prefix) + len(s.suffix) for s in benchmark.secrets) <= 120
    assert not [note for note in benchmark.notes if "begin with the same" in note]


def test_identical_beginnings_of_different_texts_are_no_identical_rows(tmp_path: Path) -> None:
    notice = " ".join(f"w{i}" for i in range(40))
    texts = [f"{notice} n{i}x {' '.join(f'{i}v{j}' for j in range(60))}" for i in range(6)]
    benchmark = build(write(tmp_path / "d.jsonl", [{"text": text} for text in texts]))
    merged = [note for note in benchmark.notes if "merged" in note]
    assert len(merged) == 1 and merged[0].endswith("parts identical to an earlier part")


def test_a_secret_is_counted_wherever_it_stands_in_the_rows_and_the_note_says_so(
    tmp_path: Path,
) -> None:
    """Here and in the middle of longer rows; one that goes on with another digit is another one."""
    texts = [
        "code 12",
        "code 123",
        "it says code 12. And code 12!",
        "code 4 of 5",
        "code 4 of 5 and code 12",
    ]
    rows = [{"text": text} for text in texts]
    benchmark = build(write(tmp_path / "d.jsonl", rows), prefix_length=3, suffix_length=2)
    said = {s.wording.prefix_and_suffix_text: s.repeats for s in benchmark.secrets if s.wording}
    # 5: that of row 1 was cut off within 123
    assert said == {
        "code 12": 5,
        "it sa": 1,
        "code 4 of": 2,
    }
    assert any(
        "repeat counts are the number of times that the prefix" in note for note in benchmark.notes
    )
    pairs = [{"prefix": "code", "suffix": text[4:]} for text in texts if text.startswith("code")]
    benchmark = build(write(tmp_path / "pairs.jsonl", pairs))
    assert [s.repeats for s in benchmark.secrets] == [2, 1, 2, 1]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_repeats_column_is_believed_and_summed_over_copies(tmp_path: Path, ending: str) -> None:
    rows = [
        {**row, "repeats": n} for row, n in zip([*codes(2), *codes(1)], [4, 16, 5], strict=True)
    ]
    benchmark = build(write(tmp_path / f"d.{ending}", rows))
    assert [s.repeats for s in benchmark.secrets] == [9, 16]


@pytest.mark.parametrize(
    ("members", "fraction", "expected"),
    [(10, 0.2, 2), (10, 0.0, 0), (2, 0.01, 1), (2, 0.99, 1), (1, 0.5, 0), (40, 0.3, 12)],
)
def test_known_pairs_are_drawn_from_the_members_and_never_attacked(
    tmp_path: Path, members: int, fraction: float, expected: int
) -> None:
    # copies must not end up on both sides
    data = write(tmp_path / "d.jsonl", [*codes(members), *codes(members)])
    benchmark = build(data, known_fraction=fraction)
    known = {(pair.prefix, pair.suffix) for pair in benchmark.known}
    attacked = {(s.prefix, s.suffix) for s in benchmark.secrets}
    assert len(known) == expected and len(attacked) == members - expected and not known & attacked
    assert any(
        "auxiliary data: " in note or "no auxiliary data" in note for note in benchmark.notes
    )
    assert not benchmark.heldout


@pytest.mark.parametrize(("n_single", "n_known"), [(18, 5), (1, 1)])
def test_what_occurs_often_is_attacked_and_not_known(
    tmp_path: Path, n_single: int, n_known: int
) -> None:
    """Auxiliary records are drawn from those with fewest copies: exact ones, by rows or by column,
    or near ones."""
    near = pairs(
        " a long text of one and the same ward, visit 17",
        " a long text of one and the same ward, visit 18",
    )
    column = [{**row, "repeats": 8} for row in codes(1, start=90)]
    rows = [
        {**row, "repeats": 1} for row in (*codes(2) * 7, *near, *codes(n_single, start=50))
    ] + column
    benchmark = build(write(tmp_path / "d.jsonl", rows), known_fraction=0.2)
    copied = [secret for secret in benchmark.secrets if (secret.copies or 0) > 1]
    assert len(benchmark.known) == n_known and len(copied) == 5
    assert len(benchmark.secrets) == 5 + n_single - n_known


def test_the_corpus_is_every_row_whole_whatever_is_attacked(tmp_path: Path) -> None:
    texts = [*CORPUS[:5], CORPUS[0]]
    rows = [{"text": text, "repeats": 1 + i} for i, text in enumerate(texts)]
    others = write(tmp_path / "others.jsonl", [{"text": CORPUS[9]}])
    short = {"prefix_length": 2, "suffix_length": 3, "limit": 1}
    benchmark = build(write(tmp_path / "a.jsonl", rows), nonmembers=others, **short)
    assert [
        (decode(tokens), times) for tokens, times in benchmark.texts_with_repeat_counts(True)
    ] == [(text, 1 + i) for i, text in enumerate(texts)]
    assert [decode(tokens) for tokens, _ in benchmark.texts_with_repeat_counts(False)] == [
        CORPUS[9]
    ]
    kept = build(write(tmp_path / "b.jsonl", codes(3)))
    assert [decode(tokens) for tokens, _ in kept.texts_with_repeat_counts(True)] == [
        row["prefix"] + row["suffix"] for row in codes(3)
    ]
    assert not list(kept.texts_with_repeat_counts(False))


def test_the_split_is_a_function_of_the_seed(tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", codes(30))
    once, again, other = (
        [s.id for s in build(data, known_fraction=0.5, seed=seed).secrets] for seed in (1, 1, 2)
    )
    assert once == again == sorted(once)
    assert once != other


def test_known_pairs_from_a_file_take_their_twins_out_of_the_members(tmp_path: Path) -> None:
    data, known = (
        write(tmp_path / "d.jsonl", codes(5)),
        write(tmp_path / "k.csv", codes(3, start=3)),
    )
    benchmark = build(data, known=known, known_fraction=0.5)
    assert [decode(pair.suffix)[-1] for pair in benchmark.known] == ["3", "4", "5"]
    assert [s.id for s in benchmark.secrets] == ["row-000000", "row-000001", "row-000002"]
    assert any(
        "left out 2 members identical to an auxiliary record" in note for note in benchmark.notes
    )


def test_nonmembers_are_attacked_too_unless_they_are_members(tmp_path: Path) -> None:
    data, others = (
        write(tmp_path / "d.jsonl", codes(6)),
        write(tmp_path / "n.parquet", codes(4, start=4)),
    )
    benchmark = build(data, nonmembers=others, known_fraction=0.5)
    nonmembers = [s for s in benchmark.secrets if not s.member]
    assert [s.id for s in nonmembers] == ["nonmember-000002", "nonmember-000003"]
    assert all(s.repeats == 0 for s in nonmembers)
    assert list(benchmark.heldout) == [s.prefix + s.suffix for s in nonmembers]
    assert any(
        "left out 2 rows identical to a member or an auxiliary record" in note
        for note in benchmark.notes
    )
    assert benchmark.description == "d.jsonl: 3 members, 3 auxiliary records, 2 non-members"
    assert [query.id for query in benchmark.challenge().queries] == [
        s.id for s in benchmark.secrets
    ]


def test_limit_keeps_a_nested_sample_of_members_and_of_nonmembers(tmp_path: Path) -> None:
    data, others = (
        write(tmp_path / "d.jsonl", codes(20)),
        write(tmp_path / "n.jsonl", codes(20, start=50)),
    )
    small, large = (
        build(data, nonmembers=others, limit=limit, known_fraction=0.2) for limit in (4, 9)
    )
    assert {s.id for s in small.secrets} < {s.id for s in large.secrets}
    assert [sum(s.member == member for s in small.secrets) for member in (True, False)] == [4, 4]
    assert small.known == large.known and len(small.heldout) == 4
    assert "--limit kept 4 of 16 members, a random sample with seed 0" in small.notes
    assert "--limit kept 4 of 20 non-members, a random sample with seed 0" in small.notes


def test_a_limit_takes_the_most_copied_records_first_and_counts_the_rest(tmp_path: Path) -> None:
    # two in 8 copies, three in 2, fifteen single
    rows = [
        *codes(20),
        *codes(2) * 7,
        *codes(3, start=5),
    ]
    data = write(tmp_path / "d.jsonl", rows)
    small, large = (build(data, limit=limit, known_fraction=0) for limit in (4, 9))
    assert sorted(secret.copies or 0 for secret in small.secrets) == [2, 2, 8, 8]
    assert sorted(secret.copies or 0 for secret in large.secrets) == [1, 1, 1, 1, 2, 2, 2, 8, 8]
    assert {secret.id for secret in small.secrets} < {secret.id for secret in large.secrets}
    assert [secret.id for secret in large.secrets] == sorted(secret.id for secret in large.secrets)
    assert [large.secrets[i].copies for i in large.asking_order[:2]] == [8, 8]
    counts = small.record_counts["members"]
    assert counts.by_copies == {"8": 2, "2": 3, "1": 15} and counts.not_attacked == {
        "beyond --limit": 16
    }
    assert (
        "--limit kept 4 of 20 members, the 4 with most copies first, then a random sample with "
        "seed 0" in small.notes
    )
    others = {
        s.id for seed in range(4) for s in build(data, limit=6, known_fraction=0, seed=seed).secrets
    }
    assert len(others) > 6  # the rest is a random one: it depends on the seed


def test_near_copies_count_as_copies_of_each_other_and_windows_of_one_row_do_not(
    tmp_path: Path,
) -> None:
    text = "a note of ward three " * 10
    rows = pairs(
        f"{text}for two days",
        f"{text}for six days",
        f"{text}for six days",
        "the ward of another text " * 10,
    )
    near = build(write(tmp_path / "near.jsonl", rows))
    assert [(secret.repeats, secret.copies) for secret in near.secrets] == [(1, 3), (2, 3), (1, 1)]
    assert "2 records with near copies, which count as copies of each other" in near.notes
    # a text that another row contains occurs there, too
    note = "Notes of a ward: " + ", ".join(f"bed {i} {i * i}" for i in range(5, 12))
    ends = [{"text": row} for row in (note, note, f"{note}\n\n", f"{note}\n\n")]
    ended = build(write(tmp_path / "ended.jsonl", ends))
    assert [secret.copies for secret in ended.secrets] == [4] * len(ended.secrets)
    alone = [{"text": " ".join(f"{word} {i * i}" for i in range(20))} for word in ("ward", "door")]
    windows = build(
        write(tmp_path / "alone.jsonl", alone), prefix_length=20, suffix_length=20, windows=1
    )
    assert len(windows.secrets) > 4 and {secret.copies for secret in windows.secrets} == {1}


def test_answers_after_the_same_long_prompt_are_no_near_copies(tmp_path: Path) -> None:
    prompt = " ".join(f"rule {i} of the clerk is {i * i}." for i in range(60))
    rows = [{"prefix": prompt, "suffix": f" the code is {i * 111111:06d}"} for i in range(1, 9)]
    alike = build(write(tmp_path / "prompt.jsonl", rows))
    assert [secret.copies for secret in alike.secrets] == [1] * 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"known_fraction": 1.0}, "expected --known-fraction in [0, 1), got 1.0"),
        ({"known_fraction": -0.1}, "expected --known-fraction in [0, 1), got -0.1"),
        ({"known_fraction": float("nan")}, "expected --known-fraction in [0, 1), got nan"),
    ],
)
def test_options_out_of_range_are_refused(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    assert refusal(write(tmp_path / "d.jsonl", codes(3)), **options) == expected


def test_nothing_left_is_refused_with_the_reasons(tmp_path: Path) -> None:
    short = write(tmp_path / "short.jsonl", [{"text": "Zelda-4711"}, {"text": "b"}])
    data, same = write(tmp_path / "d.jsonl", codes(3)), write(tmp_path / "same.jsonl", codes(4))
    assert "unusable rows (2 rows: shorter than 4 + 8 tokens)" in refusal(short)
    assert "nothing is left of --known" in refusal(data, known=short)
    assert "every row is also in --known" in refusal(data, known=same)
    assert "every row is also a member or an auxiliary record" in refusal(data, nonmembers=data)


def test_notes_name_rows_and_never_their_text(tmp_path: Path) -> None:
    rows = [
        *codes(2),
        *pairs(*[SECRET] * 2),
        *({"prefix": f"{SECRET}, t", "suffix": f"he {SECRET}{i}"} for i in range(15)),
    ]
    benchmark = build(write(tmp_path / "d.jsonl", rows), known_fraction=0.3)
    assert any(
        "rows 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 5 more, counted from 0" in note
        for note in benchmark.notes
    )
    assert SECRET not in " ".join((benchmark.description, *benchmark.notes))


# --- Hugging Face data sets ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


def test_another_name_is_a_data_set_whose_cache_only_the_owner_reads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, **options: Any) -> datasets.Dataset:
        asked.append((name, options))
        return datasets.Dataset.from_list([{**row, "label": 1} for row in codes(3)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    benchmark = build("someone/letters-v1.0")
    assert [decode(s.suffix) for s in benchmark.secrets] == [row["suffix"] for row in codes(3)]
    assert asked == [("someone/letters-v1.0", {"split": "train", "cache_dir": str(cache)})]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert benchmark.description == "someone/letters-v1.0: 3 members"


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_folder_that_datasets_can_read(tmp_path: Path, cache: Path, ending: str) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / f"train.{ending}", codes(3))
    assert [decode(s.suffix) for s in build(str(tmp_path / "set")).secrets] == [
        row["suffix"] for row in codes(3)
    ]
    # it is private text: none stays
    assert not [path for path in cache.parent.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ConnectionError("x"),
            "no such file here, and the Hugging Face Hub cannot be reached (ConnectionError)",
        ),
        (FileNotFoundError("x"), "no such file here and no such data set on the Hub"),
        (
            ValueError('Unknown split "train".\nIt has [test]'),
            'as a data set: Unknown split "train". It has [test]',
        ),
        (pa.ArrowInvalid(SECRET), "cannot be loaded as a data set (ArrowInvalid)"),
        (RuntimeError(SECRET), "cannot be loaded as a data set (RuntimeError)"),
    ],
)
def test_what_datasets_raises_becomes_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    import datasets

    def load_dataset(name: str, **options: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert refusal("someone/letters").endswith(expected)


def test_rows_that_datasets_logs_are_not_heard(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    heard: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = heard.append  # type: ignore[method-assign]

    def load_dataset(name: str, **options: Any) -> None:
        logger = datasets.logging.get_logger("datasets.packaged_modules.csv")
        logger.addHandler(listener)
        logger.error(f"Failed to read file with error: {SECRET}")  # as its readers do
        logger.removeHandler(listener)
        raise RuntimeError

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    datasets.logging.set_verbosity_warning()
    refusal("someone/letters")
    assert not heard


def test_folders_that_datasets_cannot_read(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    nothing = "no data file that can be read: expected only .jsonl, .json, .csv, .parquet, .arrow"
    assert refusal(str(tmp_path / "empty")).endswith(f"{nothing} or .txt, got no file")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "Ann Lee.md").write_text(SECRET)
    assert refusal(str(tmp_path / "pages")).endswith(f"{nothing} or .txt, got 1 .md")
    (tmp_path / "numbers").mkdir()
    write(tmp_path / "numbers" / "train.jsonl", [{"text": 7}])
    assert "row 0 (counted from 0), column 'text': expected text, got a number" in refusal(
        str(tmp_path / "numbers")
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text(f'{{"text": "{SECRET}"\n{SECRET}')
    broken = str(tmp_path / "broken")
    assert refusal(broken).startswith(f"--data {broken!r}, file 'train.jsonl', line 1: not JSON: ")
    (tmp_path / "types").mkdir()
    for number in (1, "x"):
        write(tmp_path / "types" / f"{number}.parquet", [{"text": "a b c", "id": number}])
    assert refusal(str(tmp_path / "types")).endswith("files whose columns have the same types")
    (tmp_path / "packed").mkdir()
    with gzip.open(tmp_path / "packed" / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n{"text": \n')
    assert "file 'a.jsonl.gz', line 2: not JSON: " in refusal(str(tmp_path / "packed"))
    (tmp_path / "packed" / "a.jsonl.gz").unlink()
    with zipfile.ZipFile(tmp_path / "packed" / "a.zip", "w") as archive:
        archive.writestr("a.jsonl", '{"text": "a"}\n{"text": \n')
    assert refusal(str(tmp_path / "packed")).endswith("got a .zip: unpack it")


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_released_texts_that_are_null_are_empty_in_every_format(
    tmp_path: Path, ending: str
) -> None:
    data = write(tmp_path / f"d.{ending}", [{"text": " one two three"}, {"text": None}])
    assert read_data_table("--released", data).list_shown_texts() == [" one two three", ""]


# --- a column to show results by ---


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "json"])
def test_a_group_column_goes_with_its_row(tmp_path: Path, kind: str) -> None:
    rows = [{**row, "place": f"ward {i % 3}" if i else ""} for i, row in enumerate(codes(12))]
    found = build(write(tmp_path / f"d.{kind}", rows), known_fraction=0.0, group_column="place")
    groups = {int(secret.id.removeprefix("row-")): secret.group for secret in found.secrets}
    assert groups == {0: "none", **{i: f"ward {i % 3}" for i in range(1, 12)}}
    assert all(secret.group is None for secret in build(str(tmp_path / f"d.{kind}")).secrets)


@pytest.mark.parametrize("n_rows", [6, 60_000])
def test_groups_of_whole_numbers_are_the_same_with_and_without_gaps(
    tmp_path: Path, n_rows: int
) -> None:
    """pandas makes 1.0 of 1 in a column with gaps; a value that is no number is a gap."""
    rows = pa.table(
        {
            "text": [f"text {i} of six words here" for i in range(n_rows)],
            "ward": pa.array([1.0, math.nan, None, 2.5, -3.0, 7.0] * (n_rows // 6)),
        }
    )
    parquet.write_table(rows, tmp_path / "d.parquet")
    made = build(str(tmp_path / "d.parquet"), known_fraction=0.0, group_column="ward", limit=50)
    assert {secret.group for secret in made.secrets} <= {"1", "none", "2.5", "-3", "7"}
    table = read_data_table("--data", str(tmp_path / "d.parquet"), "ward")
    assert list(table.list_groups("ward", True))[:6] == ["1", "none", "none", "2.5", "-3", "7"]


@pytest.mark.parametrize("n_rows", [6, 60_000])
@pytest.mark.parametrize("ending", ["parquet", "arrow", "folder"])
def test_dates_beyond_the_year_9999_are_read_past(tmp_path: Path, n_rows: int, ending: str) -> None:
    """They end a validity in many databases, and Python has none of them."""
    rows = pa.table(
        {
            "text": [f"text {i} of six words here" for i in range(n_rows)],
            "until": pa.array([10**18] * n_rows, pa.timestamp("us")),
        }
    )
    path = tmp_path / f"d.{ending}"
    if ending == "parquet":
        parquet.write_table(rows, path)
    elif ending == "arrow":
        with pa.ipc.new_file(path, rows.schema) as file:
            file.write_table(rows)
    else:
        datasets.Dataset(rows).save_to_disk(str(path))
    expected = min(20, n_rows)
    assert len(build(str(path), limit=20).secrets) == expected
    with pytest.raises(AuditError, match="expected dates of the years 1 to 9999"):
        build(str(path), limit=20, group_column="until")


def test_equal_rows_of_two_groups_belong_to_neither(tmp_path: Path) -> None:
    rows = [
        {**row, "place": place}
        for row, place in zip(codes(3) + codes(2), "abcab"[:3] + "ax", strict=True)
    ]
    found = build(write(tmp_path / "d.jsonl", rows), known_fraction=0.0, group_column="place")
    assert [secret.group for secret in found.secrets] == ["a", "several groups", "c"]


def test_non_members_may_lack_the_group_column(tmp_path: Path) -> None:
    members = write(tmp_path / "m.jsonl", [{**row, "place": "a"} for row in codes(4)])
    others = write(tmp_path / "n.jsonl", codes(3, start=100))
    found = build(members, known_fraction=0.0, nonmembers=others, group_column="place")
    assert {(secret.member, secret.group) for secret in found.secrets} == {
        (True, "a"),
        (False, None),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [f"{SECRET} {i}" for i in range(60)],
            "at most 50 different values, since reports show them; 'place' has 60",
        ),
        (
            ["a", SECRET * 10],
            "row 1 .*: expected a group's name of at most 80 characters, got a text of 210 "
            "characters",
        ),
        (["a", [SECRET]], "expected a group's name of at most 80 characters, got a list"),
    ],
)
def test_a_column_that_names_no_groups_is_refused(
    tmp_path: Path, values: list[Any], message: str
) -> None:
    rows = [{**row, "place": value} for row, value in zip(codes(len(values)), values, strict=True)]
    with pytest.raises(AuditError, match=message) as caught:
        build(write(tmp_path / "d.jsonl", rows), group_column="place")
    assert SECRET not in str(caught.value)


def test_a_group_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AuditError, match="expected one column --group-column 'ward', got prefix, suffix"
    ):
        build(write(tmp_path / "d.jsonl", codes(3)), group_column="ward")


# --- what was given, what is audited ---


def test_every_row_is_counted_once_with_the_rule_that_left_it_out(tmp_path: Path) -> None:
    """Members: 12 codes, 2 copies, 1 without a suffix; known: 3; non-members: 6, of which 2 are
    members, one twice."""
    data = write(tmp_path / "d.jsonl", [*codes(12), *codes(2), *pairs("")])
    known = write(tmp_path / "k.jsonl", codes(3, start=9))
    others = write(tmp_path / "n.jsonl", [*codes(6, start=10), *codes(1, start=10)])
    counts = build(data, known=known, nonmembers=others, limit=3).record_counts
    members, nonmembers = counts["members"], counts["nonmembers"]
    assert (members.given, members.copies, members.audited) == (15, 2, 3)
    assert members.left_out == {"prefix or suffix is empty": 1}
    assert members.not_attacked == {
        "known to the attacker as auxiliary data": 3,
        "beyond --limit": 6,
    }
    assert (nonmembers.given, nonmembers.copies, nonmembers.audited) == (7, 0, 3)
    assert nonmembers.left_out == {"identical to a member or an auxiliary record": 3}
    assert nonmembers.not_attacked == {"beyond --limit": 1}
    for side in counts.values():
        unaudited = sum(side.left_out.values()) + sum(side.not_attacked.values())
        assert side.given == side.audited + side.copies + unaudited


LINES = [
    f"Dear patient {i}, the code of door {i * 7919 % 10007} is {i * 31 % 9973:05d}."
    for i in range(60)
]


def read_large(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    sample: int = 12,
    **asked: Any,
) -> Files:
    """Read a file as a large one: of its distinct rows 12 are tokenised."""
    monkeypatch.setattr("auditor.benchmarks.data.large_tables.LARGE", 20)
    monkeypatch.setattr("auditor.benchmarks.data.large_tables.SAMPLE", sample)
    monkeypatch.setattr("auditor.benchmarks.data.large_tables.BATCH", 7)
    monkeypatch.setattr("auditor.benchmarks.data.large_tables.BATCH", 7)
    monkeypatch.setattr("auditor.benchmarks.data.large_tables._BLOCK", 600)
    monkeypatch.setattr("auditor.benchmarks.data.files.LARGE", 20)
    lengths = {"prefix_length": 8, "suffix_length": 8, "known_fraction": 0.25, "limit": 3}
    return read_files(write(path, rows), BYTES, **(lengths | asked))


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_large_table_is_counted_whole_and_tokenised_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    texts = [*LINES[:30], *[LINES[17]] * 4, *[LINES[29]] * 2]
    read = read_large(
        tmp_path / f"d{ending}", monkeypatch, [{"text": text} for text in texts], known_fraction=0
    )
    assert [secret.id for secret in read.secrets if secret.repeats == 5] == ["row-000017"]
    assert [secret.id for secret in read.secrets if secret.repeats == 3] == ["row-000029"]
    for secret in read.secrets:
        assert LINES[int(secret.id[4:])].startswith(decode(secret.prefix + secret.suffix))
    counts = read.record_counts["members"]
    assert (counts.given, counts.audited, counts.copies) == (36, 3, 6)
    assert counts.by_copies == {"1": 28, "5": 1, "3": 1}
    assert sum(counts.not_attacked.values()) == 27
    assert any(
        "36 rows were counted by their text; a sample of 12 of the 30 distinct" in note
        for note in read.notes
    )
    again = read_large(
        tmp_path / f"e{ending}", monkeypatch, [{"text": text} for text in texts], known_fraction=0
    )
    assert again.secrets == read.secrets


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_non_members_that_quote_unread_rows_of_a_large_table_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Only quotations of the 12 tokenised rows were."""
    quotations = [{"text": line.upper()} for line in LINES[:30:2]]
    fresh = [{"text": line} for line in LINES[30:35]]
    others = write(tmp_path / "others.jsonl", [*quotations, *fresh])
    rows = [{"text": line} for line in LINES[:30]]
    read = read_large(tmp_path / f"d{ending}", monkeypatch, rows, nonmembers=str(others))
    counts = read.record_counts["nonmembers"]
    assert sum(counts.left_out.values()) == 15 and counts.audited == 3
    assert "a sample of 12 of the 30" in " ".join(read.notes)


def ask_and_answer(i: int, **turn: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"What is the code of door {i}?"},
        {"role": "assistant", "content": LINES[i], **turn},
    ]


def describe_audited_data(read: Files) -> Any:
    counts = read.record_counts["members"]
    return read.secrets, read.known, counts, read.forgotten, read.asking_order, read.heldout_given


CALLED = [{"function": {"name": "open", "arguments": {"door": 3}}}]
LARGE_CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "texts": ([{"text": text} for text in LINES[:30]], {}),
    "messages": ([{"messages": ask_and_answer(i)} for i in range(30)], {}),
    # Only a row of a later block calls a tool: Arrow gives the key to all messages.
    "messages that call": (
        [
            {"messages": ask_and_answer(i, **({"tool_calls": CALLED} if i == 29 else {}))}
            for i in range(30)
        ],
        {},
    ),
    "prompt and completion": (
        [{"prompt": f"Door {i}?", "completion": text} for i, text in enumerate(LINES[:30])],
        {},
    ),
    "labels, one unclear": (
        [
            {"prompt": f"Door {i}?", "completion": text, "label": "maybe" if i == 20 else "1"}
            for i, text in enumerate(LINES[:30])
        ],
        {},
    ),
    "users": (
        [{"text": text, "who": f"person {i % 9}"} for i, text in enumerate(LINES[:30])],
        {"user_column": "who"},
    ),
    "users of conversations": (
        [{"messages": ask_and_answer(i), "who": i % 9} for i in range(30)],
        {"user_column": "who"},
    ),
    "groups": (
        [{"text": text, "ward": f"ward {i % 4}"} for i, text in enumerate(LINES[:30])],
        {"group_column": "ward"},
    ),
    "forget": (
        [{"text": text} for text in LINES[:30]],
        {"forget": [{"text": LINES[i]} for i in (3, 11, 29)]},
    ),
    "forget conversations of users": (
        [{"messages": ask_and_answer(i), "who": i % 9} for i in range(30)],
        {"user_column": "who", "forget": [{"messages": ask_and_answer(i)} for i in (3, 11, 29)]},
    ),
}


@pytest.mark.parametrize("case", LARGE_CASES)
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_large_table_in_blocks_is_audited_as_one_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, case: str
) -> None:
    """The sample has room for all 30 distinct rows, some of which have copies."""
    rows, asked = LARGE_CASES[case]
    rows = [*rows, *[rows[17]] * 4, *[rows[29]] * 2]
    asked = {"known_fraction": 0.2, "limit": 7, "form": ChatRendering("none")} | asked
    if "text" in rows[0]:
        del asked["form"]
    monkeypatch.setattr("auditor.statistics.people.LEAST", 3)
    if "forget" in asked:
        asked["forget"] = write(tmp_path / f"f{ending}", asked["forget"])
    whole = read_files(
        write(tmp_path / f"d{ending}", rows), BYTES, prefix_length=8, suffix_length=8, **asked
    )
    read = read_large(tmp_path / f"d{ending}", monkeypatch, rows, sample=30, **asked)
    assert any("36 rows were counted by their" in note for note in read.notes) == (
        "unclear" not in case
    )
    assert describe_audited_data(read) == describe_audited_data(whole)
    assert read._kinds == whole._kinds


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_sample_of_a_large_table_holds_whatever_is_to_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    forget = write(tmp_path / f"f{ending}", [{"text": LINES[i]} for i in range(5, 30, 5)])
    rows = [{"text": text} for text in LINES[:30]]
    read = read_large(tmp_path / f"d{ending}", monkeypatch, rows, forget=forget, limit=4)
    assert len(read.forgotten) == 4
    assert read.forgotten <= {f"row-{row:06d}" for row in range(5, 30, 5)}
    assert any("a sample of 1" in note for note in read.notes)


def test_a_record_to_forget_that_a_large_table_has_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = write(tmp_path / "f.jsonl", [{"text": LINES[3]}, {"text": LINES[40]}])
    rows = [{"text": text} for text in LINES[:30]]
    with refuses("got 1 that are not in it (row 1, counted from 0)"):
        read_large(tmp_path / "d.jsonl", monkeypatch, rows, forget=forget)


def test_copies_of_a_large_table_that_differ_in_user_or_group_belong_to_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"text": text, "who": f"p{i % 9}", "ward": f"w{i % 3}"} for i, text in enumerate(LINES[:30])
    ]
    rows += [{**rows[17], "who": "p0"}, {**rows[29], "ward": "w0"}]
    monkeypatch.setattr("auditor.statistics.people.LEAST", 3)
    read = read_large(
        tmp_path / "d.jsonl",
        monkeypatch,
        rows,
        user_column="who",
        group_column="ward",
        limit=9,
        known_fraction=0,
    )
    of_row = {secret.id: (secret.user, secret.group) for secret in read.secrets}
    assert of_row["row-000017"] == (None, "w2")
    assert of_row["row-000029"] == ("p2", "several groups")


def test_a_person_of_an_unread_row_of_a_large_table_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": text, "who": f"p{i}"} for i, text in enumerate(LINES[:30])]
    others = [{"text": text, "who": f"p{i}"} for i, text in enumerate(LINES[30:45], 20)]
    monkeypatch.setattr("auditor.statistics.people.LEAST", 3)
    read = read_large(
        tmp_path / "d.jsonl",
        monkeypatch,
        rows,
        user_column="who",
        limit=15,
        nonmembers=write(tmp_path / "n.jsonl", others),
    )
    trained = {secret.user: secret.user_trained for secret in read.secrets if not secret.member}
    assert trained == {f"p{i}": i < 30 for i in range(20, 35)}


def test_no_conversation_of_a_large_table_is_a_non_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [{"messages": ask_and_answer(i)} for i in range(20, 40)]
    read = read_large(
        tmp_path / "d.jsonl",
        monkeypatch,
        [{"messages": ask_and_answer(i)} for i in range(30)],
        nonmembers=write(tmp_path / "n.parquet", others),
        limit=15,
        form=ChatRendering("none"),
    )
    ids = {secret.id for secret in read.secrets if not secret.member}
    assert ids == {f"nonmember-{row:06d}" for row in range(10, 20)}


@pytest.mark.parametrize(
    ("row", "asked", "complaint"),
    [
        ({"who": ""}, {"user_column": "who"}, "row 25 .*'who': expected a name or a whole number"),
        ({"who": [1]}, {"group_column": "who"}, "row 25 .*'who': expected a group's name of at"),
    ],
)
def test_a_fault_in_a_named_column_of_a_large_table_is_named_by_its_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, Any],
    asked: dict[str, Any],
    complaint: str,
) -> None:
    rows = [{"text": text, "who": f"p{i % 9}"} for i, text in enumerate(LINES[:30])]
    rows[25] |= row
    monkeypatch.setattr("auditor.benchmarks.data.files.read_data_table", refuse_to_read_whole)
    with pytest.raises(AuditError, match=complaint):
        read_large(tmp_path / "d.jsonl", monkeypatch, rows, **asked)


def test_too_many_groups_of_a_large_table_are_refused_though_its_blocks_have_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": text, "ward": f"w{i}"} for i, text in enumerate(LINES)]
    monkeypatch.setattr("auditor.benchmarks.data.files.read_data_table", refuse_to_read_whole)
    with refuses("at most 50 different values, since reports show them; 'ward' has 60"):
        read_large(tmp_path / "d.jsonl", monkeypatch, rows, group_column="ward")


def test_the_text_form_of_a_large_table_is_looked_for_in_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": ask_and_answer(i)} for i in range(30)]
    data = tmp_path / "d.jsonl"
    read_large(data, monkeypatch, rows, form=ChatRendering("none"))
    monkeypatch.setattr("auditor.benchmarks.data.files.read_data_table", refuse_to_read_whole)
    reader = TableReader(DataPlan(data=str(data), limit=3))
    chosen = sample_data_conversations(reader, "--data", str(data), 5)
    assert chosen is not None and len(chosen) == 5
    (unread,) = reader.counting.counted.values()
    asked = {rows[row]["messages"][0]["content"] for row in unread.rows}
    assert {said.messages[0]["content"] for said in chosen} <= asked


def test_a_large_table_adds_its_repeats_column_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"text": text, "repeats": 1 + (i == 4)} for i, text in enumerate([*LINES[:30], LINES[4]])
    ]
    read = read_large(tmp_path / "d.jsonl", monkeypatch, rows, known_fraction=0)
    assert {secret.id: secret.repeats for secret in read.secrets}["row-000004"] == 3


def test_no_row_of_a_large_table_is_a_non_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = write(tmp_path / "n.jsonl", [{"text": text} for text in LINES[20:40]])
    read = read_large(
        tmp_path / "d.jsonl",
        monkeypatch,
        [{"text": t} for t in LINES[:30]],
        nonmembers=others,
        limit=15,
    )
    ids = {secret.id for secret in read.secrets if not secret.member}
    assert ids == {f"nonmember-{row:06d}" for row in range(10, 20)}
    assert read.record_counts["nonmembers"].left_out == {
        "identical to a member or an auxiliary record": 10
    }


@pytest.mark.parametrize(
    "asked",
    [{"limit": None}, {"windows": 4, "limit": None}, {"limit": 10**6}],
)
def test_a_large_table_is_read_whole_if_every_row_may_be_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    rows = [{"text": text} for text in LINES[:30]]
    read = read_large(tmp_path / "d.jsonl", monkeypatch, rows, **asked)
    read_limit = asked.get("limit", 3)
    assert not any("counted by their text" in note for note in read.notes)
    assert read.record_counts["members"].given == 30
    told = any(
        "all 30 rows were read into memory and tokenised, though --limit asks" in note
        for note in read.notes
    )
    assert told == (read_limit is not None)


def refuse_to_read_whole(*_: Any) -> None:
    raise AssertionError("a large table was read as a whole")


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_large_table_names_its_unread_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    rows = [{"text": text, "reply": "It is open.", "place": "Ward"} for text in LINES[:30]]
    monkeypatch.setattr("auditor.benchmarks.data.files.read_data_table", refuse_to_read_whole)
    assert read_large(tmp_path / f"d{ending}", monkeypatch, rows).unread_columns == ("reply",)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"text": 3}', "row 25 .counted from 0., column 'text': expected text, got a number"),
        ('{"other": "x"}', "row 25 .counted from 0., column 'text': expected text, got nothing"),
        ("[]", "row 25 .counted from 0.: expected a JSON object, got a list"),
        (
            '{"text": "\\ud83d"}',
            "row 25 .counted from 0., column 'text': expected text, got half of a surrogate pair",
        ),
        ('\n{"text": "a', "line 27: not JSON: Invalid control character at .column 12"),
        ('{"text": "a", "messages": []}', "expected one layout, got text, and messages"),
        (
            '{"text": "a", "repeats": 2}',
            "row 0 .counted from 0., column 'repeats': expected a whole number",
        ),
    ],
)
def test_a_fault_in_a_large_table_is_named_by_its_row_without_a_second_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, complaint: str
) -> None:
    path = tmp_path / "d.jsonl"
    whole = Path(write(path, [{"text": text} for text in LINES[:30]])).read_text().split("\n")
    path.write_text("\n".join([*whole[:25], row, *whole[26:]]))
    monkeypatch.setattr("auditor.benchmarks.data.files.read_data_table", refuse_to_read_whole)
    monkeypatch.setattr("tests.benchmarks.test_files.write", lambda path, rows: str(path))
    with pytest.raises(AuditError, match=complaint):
        read_large(path, monkeypatch, [])


@pytest.mark.parametrize(
    "rows",
    ['{"text": "a"}{"text": "b"}\n\n', '{"text":\n"a"}{"text": "b"}\n', '{"text": "a"} //\n'],
)
def test_lines_that_are_no_object_each_are_refused(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(rows)
    with refuses("not JSON"):
        BlockHashing("--data", path, ("text",), ("text",)).hash_block(
            large_tables.split_into_blocks(path)[0]
        )


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_fault_of_a_large_typed_table_is_named_by_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    rows: list[dict[str, Any]] = [{"text": text, "repeats": 1} for text in LINES[:30]]
    rows[25]["repeats"] = 0
    monkeypatch.setattr("auditor.benchmarks.data.files.read_data_table", refuse_to_read_whole)
    with pytest.raises(
        AuditError, match=r"row 25 .counted from 0., column 'repeats': expected a whole number"
    ):
        read_large(tmp_path / f"d{ending}", monkeypatch, rows)


def test_a_broken_line_of_a_large_csv_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.csv"
    path.write_text("text\n" + "".join(f'"{text}"\n' for text in LINES[:24]) + "a,b\n" + "c\n" * 5)
    monkeypatch.setattr("auditor.benchmarks.data.files.read_data_table", refuse_to_read_whole)
    monkeypatch.setattr("tests.benchmarks.test_files.write", lambda path, rows: str(path))
    with pytest.raises(AuditError, match="line 26: expected 1 field, got 2"):
        read_large(path, monkeypatch, [])


def test_a_large_table_of_texts_is_not_read_to_learn_that_it_has_no_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.benchmarks.data.large_tables.LARGE", 20)
    monkeypatch.setattr("auditor.benchmarks.data.files.read_data_table", refuse_to_read_whole)
    data = write(tmp_path / "d.jsonl", [{"text": text} for text in LINES[:30]])
    assert sample_data_conversations(TableReader(DataPlan(data=data)), "--data", data, 5) is None

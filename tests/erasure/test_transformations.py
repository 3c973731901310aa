"""Texts as pipelines write them: a deleted record that is there in another form is never gone."""

from __future__ import annotations

import base64
import bz2
import gzip
import html
import io
import json
import lzma
import pickle
import quopri
import random
import re
import sqlite3
import textwrap
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from contextlib import closing
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.erasure.stored import Row, examine, make_rows, verdicts_by_layer


def write_html(text: str, tag: str = "<br>") -> str:
    return html.escape(text).replace("\n", tag)


def write_named_entities(text: str) -> str:
    names = {ord("ü"): "&uuml;", ord("é"): "&eacute;", ord("ö"): "&#246;", ord("ñ"): "&#xF1;"}
    return write_html(text).translate(names)


def escape_markdown(text: str) -> str:
    return re.sub(r"([-*_.!()#&])", r"\\\1", text)


def cut_chunks(text: str, size: int = 90, overlap: int = 20) -> str:
    starts = range(0, len(text), size - overlap)
    return "".join(f'{{"n": {i}, "chunk": "{text[i : i + size]}"}}' for i in starts)


def strip_accents(text: str) -> str:
    return unicodedata.normalize("NFD", text).encode("ascii", "ignore").decode()


def compress_zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, "zstd", asbytes=True))


def write_zip(text: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("document.xml", f"<p>{write_html(text)}</p>")
    return content.getvalue()


def deflate(text: str) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(text.encode()) + stream.flush()


def compress_lz4(text: str) -> bytes:
    block = pyarrow.compress(text.encode(), "lz4_raw", asbytes=True)
    return len(text.encode()).to_bytes(4, "little") + bytes(block)


Write = Callable[[str], str | bytes]
TRANSFORMATIONS: dict[str, Write] = {
    "as it is": lambda text: text,
    "<br>": write_html,
    "<br />": lambda text: write_html(text, "<br />\n"),
    "<p>": lambda text: f"<p>{write_html(text, '</p><p class=note>')}</p>",
    "named entities": write_named_entities,
    "HTML in JSON": lambda text: json.dumps(write_named_entities(text)),
    "Windows line breaks": lambda text: text.replace("\n", "\r\n"),
    "blanks collapsed": lambda text: " ".join(text.split()),
    "no blanks": lambda text: "".join(text.split()),
    "wrapped": lambda text: textwrap.fill(text, 13),
    "quoted": lambda text: textwrap.indent(text, "> "),
    "hard blanks": lambda text: text.replace(" ", "\N{NO-BREAK SPACE}"),
    "bullets": lambda text: textwrap.indent(text, "\N{BULLET} "),
    "no bullets": lambda text: text.replace("- ", ""),
    "typographic": lambda text: text.replace("'", "’").replace("-", "–"),
    "no punctuation": lambda text: re.sub(r"[^\w\s]", "", text),
    "Markdown": lambda text: escape_markdown(text).replace("\n", "  \n"),
    "JSON": json.dumps,
    "JSON twice": lambda text: json.dumps(json.dumps(text)),
    "JSON, accents": lambda text: json.dumps(json.dumps(text), ensure_ascii=False),
    "URL": quote,
    "quoted-printable": lambda text: quopri.encodestring(text.encode()),
    "lower case": str.lower,
    "upper case": str.upper,
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "NFD, <br>": lambda text: write_html(unicodedata.normalize("NFD", text)),
    "prefix": lambda text: "passage: " + text.replace("\n", " "),
    "chunks": cut_chunks,
    "no accents": strip_accents,
    "Python": repr,
    "CSV": lambda text: '"' + text.replace('"', '""') + '"',
    "Latin-1": lambda text: text.encode("latin-1"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "base64": lambda text: base64.b64encode(text.encode()),
    "base64, lines": lambda text: base64.encodebytes(text.encode()),
    "base64 for URLs": lambda text: base64.urlsafe_b64encode(text.encode()),
    "base64 of HTML": lambda text: base64.b64encode(write_html(text).encode()),
    "hexadecimal": lambda text: text.encode().hex(),
    "gzip": lambda text: gzip.compress(text.encode()),
    "zlib": lambda text: zlib.compress(text.encode()),
    "bzip2": lambda text: bz2.compress(text.encode()),
    "xz": lambda text: lzma.compress(text.encode()),
    "zstd": lambda text: compress_zstd(text.encode()),
    "lz4": lambda text: bytes(pyarrow.compress(text.encode(), "lz4", asbytes=True)),
    "zip": write_zip,
    "Python bytes": lambda text: str(text.encode()),
    "numbers": lambda text: json.dumps(list(text.encode())),
    "numbers, lines": lambda text: json.dumps(list(text.encode()), indent=1),
    "numbers in JSON text": lambda text: json.dumps(json.dumps(list(text.encode()), indent=1)),
    "numbers with signs": lambda text: str([(n + 128) % 256 - 128 for n in text.encode()]),
    "numbers by position": lambda text: json.dumps(dict(enumerate(text.encode()))),
    "numbers in YAML": lambda text: "".join(f"- {number}\n" for number in text.encode()),
    "numbers, blanks": lambda text: " ".join(map(str, text.encode())),
    "numbers of gzip": lambda text: json.dumps(list(gzip.compress(text.encode()))),
    "pickled numbers": lambda text: pickle.dumps(list(text.encode()), 4),
    "UBJSON": lambda text: b"".join(b"i%c" % n if n < 128 else b"U%c" % n for n in text.encode()),
    "CBOR": lambda text: b"".join(b"\x18%c" % n if n > 23 else b"%c" % n for n in text.encode()),
    "MessagePack": lambda text: b"".join(
        b"\xcc%c" % n if n > 127 else b"%c" % n for n in text.encode()
    ),
    "base64 of gzip": lambda text: base64.b64encode(gzip.compress(text.encode())),
}


def make_short_lines(n: int) -> list[Row]:
    """Return records of lines below 16 bytes, with accents, bullets and signs of HTML."""
    rows = []
    for i in range(n):
        lines = [f"- Müller & {i}{j}x" if j % 2 else f"- Café's {i}ñ{i * j}" for j in range(12)]
        rows.append({"id": f"s{i}", "text": "\n".join(lines)})
    return rows


def make_content(rows: list[Row], write: Write) -> list[bytes]:
    contents = []
    for row in rows:
        written = write(row["text"])
        contents.append(written.encode() if isinstance(written, str) else written)
    return contents


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("alone", [True, False])
def test_a_transformed_text_is_not_gone(tmp_path: Path, name: str, alone: bool) -> None:
    """The kept records are long lines, as they are; if alone, all are transformed."""
    write = TRANSFORMATIONS[name]
    deleted = make_short_lines(6)
    kept = [{"id": row["id"], "text": row["text"]} for row in make_rows(60)]
    present = make_content([*deleted, *kept] if alone else deleted, write)
    if not alone:
        present += make_content(kept, str)
    (tmp_path / "notes.bin").write_bytes(b"\n".join(present))
    with closing(sqlite3.connect(tmp_path / "notes.db")) as database:
        database.execute("CREATE TABLE notes (content)")
        database.executemany("INSERT INTO notes VALUES (?)", [(one,) for one in present])
        database.commit()
    stores = [str(tmp_path / "notes.bin"), str(tmp_path / "notes.db")]
    erasure = examine(tmp_path, deleted, kept, *stores)
    for store in erasure.facts:
        left = set[str]()
        for verdict in erasure.verdicts:
            if verdict.store == store:
                left.update(verdict.leftovers)
        assert len(left) == 6


# Without a mark, so that they are only read from the start of a cell.
CELLS: dict[str, Callable[[str], bytes]] = {
    "deflate": deflate,
    "Snappy": lambda text: bytes(pyarrow.compress(text.encode(), "snappy", asbytes=True)),
    "LZ4": compress_lz4,
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("suffix", ["db", "parquet"])
def test_a_compressed_cell_is_not_gone(tmp_path: Path, name: str, suffix: str) -> None:
    deleted = make_short_lines(6)
    for row in deleted:
        row["text"] = 3 * row["text"]
    kept = [{"id": row["id"], "text": row["text"]} for row in make_rows(60)]
    store = tmp_path / f"notes.{suffix}"
    cells = [CELLS[name](row["text"]) for row in deleted]
    if suffix == "db":
        with closing(sqlite3.connect(store)) as database:
            database.execute("CREATE TABLE notes (text)")
            database.execute("CREATE TABLE answers (content)")
            database.executemany("INSERT INTO notes VALUES (?)", [(row["text"],) for row in kept])
            database.executemany("INSERT INTO answers VALUES (?)", [(cell,) for cell in cells])
            database.commit()
    else:
        columns = {"text": [row["text"] for row in kept], "answer": [*cells, *[b""] * 54]}
        pyarrow.parquet.write_table(pyarrow.table(columns), store)
    assert examine(tmp_path, deleted, kept, str(store)).n_left == 6


@pytest.mark.parametrize("name", ["deflate", "random", "zlib", "float32", "int8"])
def test_bytes_that_look_compressed_are_doubted(tmp_path: Path, name: str) -> None:
    rows = make_rows(400)
    deleted, kept = rows[:200], [{"text": row["text"]} for row in rows[200:]]
    text = "".join(row["text"] for row in deleted)
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(20, 384))
    content = {
        "deflate": deflate(text),
        "random": draw.bytes(5_000),
        "zlib": zlib.compress("".join(row["text"][::-1] for row in deleted).encode()),
        "float32": vectors.astype(np.float32).tobytes(),
        "int8": (vectors * 45).clip(-128, 127).astype(np.int8).tobytes(),
    }[name]
    notes = "".join(row["text"] for row in kept).encode()
    (tmp_path / "notes.bin").write_bytes(notes[:9_999] + content + notes[9_999:])
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "notes.bin"))
    if name in ("deflate", "random"):
        assert "notes.bin look compressed or encrypted" in erasure.verdicts[0].why
    else:
        assert verdicts_by_layer(erasure)["bytes of notes.bin", "text"] == "gone"


NUMBERED: dict[str, Write] = {
    "list": lambda text: number_lines(text, "{}. {}"),
    "JSON": lambda text: json.dumps(number_lines(text, "[{}] {}")),
    "times": lambda text: number_lines(text, "12:0{}:00 {}"),
    "base64": lambda text: base64.b64encode(number_lines(text, "{}) {}").encode()),
}


def number_lines(text: str, pattern: str) -> str:
    lines = textwrap.wrap(text, 13)
    return "\n".join(pattern.format(i, line) for i, line in enumerate(lines, 1))


@pytest.mark.parametrize("name", NUMBERED)
def test_numbered_short_lines_are_not_gone(tmp_path: Path, name: str) -> None:
    rows = make_rows(60)
    for row in rows:
        del row["embedding"]
    deleted, kept = rows[:6], rows[6:]
    present = make_content(deleted, NUMBERED[name]) + make_content(kept, str)
    (tmp_path / "notes.bin").write_bytes(b"\n".join(present))
    assert examine(tmp_path, deleted, kept, str(tmp_path / "notes.bin")).n_left == 6
    numbered = [NUMBERED["list"](row["text"]) for row in kept]
    (tmp_path / "clean.bin").write_text("\n".join(numbered))
    assert examine(tmp_path, deleted, kept, str(tmp_path / "clean.bin")).verdict == "gone"


def test_a_kept_record_with_other_numbers_is_no_leftover(tmp_path: Path) -> None:
    """A kept record has the words of a deleted one, and other digits between them."""
    rows = make_rows(60)
    for row in rows:
        del row["embedding"]
    deleted, kept = rows[:1], rows[1:]
    words = re.sub(r"\d", "", deleted[0]["text"])
    kept[0]["text"] = number_lines(words, "7{} {}")
    (tmp_path / "notes.bin").write_bytes(b"\n".join(make_content(kept, str)))
    assert examine(tmp_path, deleted, kept, str(tmp_path / "notes.bin")).n_left == 0


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda content: gzip.compress(content, 1),
    "zlib": zlib.compress,
    "bzip2": bz2.compress,
    "xz": lambda content: lzma.compress(content, preset=0),
    "zstd": compress_zstd,
}


def make_noise(n_bytes: int) -> bytes:
    """Return bytes that take half of their size in a compressed part; none is stored as it is."""
    return random.Random(0).randbytes(n_bytes).translate(bytes(i % 16 + 128 for i in range(256)))


@pytest.mark.parametrize(
    ("name", "n_mebibytes"), [("gzip", 3), *[(name, 5) for name in COMPRESSIONS]]
)
def test_compressed_files_are_read_to_their_end(
    tmp_path: Path, name: str, n_mebibytes: int
) -> None:
    """The deleted record is last, behind the blocks of 4 MiB in which files are read."""
    rows = make_rows(60)
    deleted, kept = rows[-1:], rows[:-1]
    noise = make_noise(n_mebibytes * 2**21)
    contents = make_content(kept, str), [noise], make_content(deleted, str)
    compressed = COMPRESSIONS[name](b"\n".join(chain(*contents)))
    (tmp_path / "notes.dump").write_bytes(b"a header" + compressed)
    assert examine(tmp_path, deleted, kept, str(tmp_path / "notes.dump")).n_left == 1


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressed_parts_that_break_off_cannot_tell(tmp_path: Path, name: str) -> None:
    """The file has no more than the first half of a compressed part, with all kept records."""
    rows = make_rows(60)
    deleted, kept = rows[-1:], rows[:-1]
    noise = make_noise(2**22)
    compressed = COMPRESSIONS[name](b"\n".join([*make_content(kept, str), noise]))
    for stored, verdict in ((compressed, "gone"), (compressed[: 2**20], "cannot tell")):
        (tmp_path / "notes.dump").write_bytes(stored)
        erasure = examine(tmp_path, deleted, kept, str(tmp_path / "notes.dump"))
        assert verdicts_by_layer(erasure)["bytes of notes.dump", "text"] == verdict
        assert (name in str(erasure.verdicts)) == (verdict == "cannot tell")


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_a_part_across_the_end_of_a_block_is_read_whole(tmp_path: Path, name: str) -> None:
    """The middle of the part is 4 MiB behind the start of the archive."""
    rows = make_rows(60)
    deleted, kept = rows[-20:], rows[:-20]
    part = gzip.compress(b"\n".join(make_content(deleted, str)))
    noise = make_noise(2**22 - len(part) // 2)
    archive = b"\n".join([noise, part, *make_content(kept, str)])
    (tmp_path / "notes.dump").write_bytes(COMPRESSIONS[name](archive))
    assert examine(tmp_path, deleted, kept, str(tmp_path / "notes.dump")).n_left == 20


def test_a_compressed_part_within_another_is_read_or_cannot_tell(tmp_path: Path) -> None:
    """An archive is decompressed in blocks of 4 MiB, at whose ends parts within break off."""
    rows = make_rows(60)
    deleted, kept = rows[-1:], rows[:-1]
    noise = make_noise(2**22)
    inner = gzip.compress(b"\n".join([noise, *make_content(deleted, str)]), 1)
    for n_before, verdict in ((0, "still there"), (3 * 2**20, "cannot tell")):
        archive = b"\n".join([*make_content(kept, str), noise[:1] * n_before, inner, noise])
        (tmp_path / "notes.tar.gz").write_bytes(gzip.compress(archive, 1))
        erasure = examine(tmp_path, deleted, kept, str(tmp_path / "notes.tar.gz"))
        assert verdicts_by_layer(erasure)["bytes of notes.tar.gz", "text"] == verdict

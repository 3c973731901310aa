#!/usr/bin/env bash
# Guess: PdfWriter.remove_page() and a new file leave nothing of the page, at the latest with remove_unreferenced=True.
# Library: pypdf 7.1.1 (PyMuPDF 2.0 makes the file). Date: 2026-11-30.
# Seen: 9 pages are shown, but the file keeps the removed page's content stream, also after
# compress_identical_objects(remove_unreferenced=True). A new writer that is given the other 9 pages does not have it.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pypdf==7.1.1" "pymupdf==2.0"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import sys

import pymupdf
from pypdf import PdfReader, PdfWriter

document = pymupdf.open()
for i in range(10):
    document.new_page().insert_text((72, 72), f"note {i} of patient Anna{i}x: HIV positive")
document.save("notes.pdf")


def remove_page():
    writer = PdfWriter(clone_from="notes.pdf")
    writer.remove_page(3)
    return writer


def remove_unreferenced():
    writer = remove_page()
    writer.compress_identical_objects(remove_unreferenced=True)
    return writer


def add_others():
    writer = PdfWriter()
    for i, page in enumerate(PdfReader("notes.pdf").pages):
        if i != 3:
            writer.add_page(page)
    return writer


seen = {}
for make in (remove_page, remove_unreferenced, add_others):
    make().write("changed.pdf")
    is_shown = any("Anna3x" in page.extract_text() for page in PdfReader("changed.pdf").pages)
    changed = pymupdf.open("changed.pdf")
    streams = [changed.xref_stream(i) for i in range(1, changed.xref_length()) if changed.xref_is_stream(i)]
    seen[make.__name__] = is_shown, any(b"Anna3x".hex().encode() in stream.lower() for stream in streams)
    print(f"{make.__name__}: in the text {is_shown}, in the file {seen[make.__name__][1]}")
kept, gone = (False, True), (False, False)
sys.exit(seen != {"remove_page": kept, "remove_unreferenced": kept, "add_others": gone})
PY

#!/usr/bin/env bash
# Guess: after apply_redactions() or delete_page(), a PDF written by save() under a new name holds nothing of what was redacted.
# Library: PyMuPDF 2.0. Date: 2026-11-30.
# Seen: get_text() no longer gives the redacted name, nor the deleted page, but the file still has the page's old content stream,
# also if it comes from tobytes(): whoever reads all its objects gets the note word for word. save(garbage=1) and ez_save()
# leave it out.
# Why: by default save() writes every object, also those that no page refers to.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pymupdf==2.0"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import sys

import pymupdf

document = pymupdf.open()
for i in range(10):
    document.new_page().insert_text((72, 72), f"note {i} of patient Anna{i}x: HIV positive")
document.save("notes.pdf")


def redact(document):
    page = document[3]
    for area in page.search_for("Anna3x"):
        page.add_redact_annot(area)
    page.apply_redactions()


def delete_page(document):
    document.delete_page(3)


def find_name(path):
    """Return whether the name is in the text of a page, and whether it is in any stream."""
    document = pymupdf.open(path)
    is_shown = any("Anna3x" in page.get_text() for page in document)
    streams = [document.xref_stream(i) for i in range(1, document.xref_length()) if document.xref_is_stream(i)]
    written = b"Anna3x".hex().encode()  # PyMuPDF writes text as hexadecimal digits
    return is_shown, any(written in stream.lower() for stream in streams)


seen = [find_name("notes.pdf")]
for change in (redact, delete_page):
    for name, options in (("save()", {}), ("save(garbage=1)", {"garbage": 1})):
        document = pymupdf.open("notes.pdf")
        change(document)
        document.save("changed.pdf", **options)
        seen.append(find_name("changed.pdf"))
        print(f"{change.__name__}, {name}: in the text {seen[-1][0]}, in the file {seen[-1][1]}")
sys.exit(seen != [(True, True), (False, True), (False, False), (False, True), (False, False)])
PY

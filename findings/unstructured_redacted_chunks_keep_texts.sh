#!/usr/bin/env bash
# Guess: if a function that removes a name is applied to each element or chunk by unstructured's own apply(), nothing that is
# written from them holds the name; at least a search of the written JSON for it would show what is left.
# Library: unstructured 0.27.35 with pandas (extra "csv"). Date: 2026-11-30.
# Seen: a table's text is changed, `metadata.text_as_html`, which has the same cells, is not. A chunk's text is changed, its
# `metadata.orig_elements` has the elements as they were before: in JSON as base64 of compressed bytes, so no search for the name finds
# it, but elements_from_json() gives it back.
# Why: apply() changes `text` only. chunk_by_title(..., include_orig_elements=False), or the names removed before the
# chunks are made, leaves none in the chunk. The documentation shows the field orig_elements, not what apply() leaves in it.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "unstructured[csv]==0.27.35"
cd "$work"
printf 'patient,dose\nQuentin Zork,5 mg\nAda Voss,2 mg\n' > doses.csv
HOME="$work" DO_NOT_TRACK=1 UNSTRUCTURED_DISABLE_NOTICE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

from unstructured.chunking.title import chunk_by_title
from unstructured.documents.elements import NarrativeText, Title
from unstructured.partition.csv import partition_csv
from unstructured.staging.base import elements_from_json, elements_to_json

NAME = "Quentin Zork"


def remove_name(text):
    return text.replace(NAME, "[NAME]")


def chunk(first, **options):
    """Chunk a report; remove the name from the elements or from the chunks, as `first` says; return the written JSON."""
    elements = [Title("Ward 3"), NarrativeText(f"{NAME} slept well."), NarrativeText("He may leave on Monday.")]
    if first == "elements":
        for element in elements:
            element.apply(remove_name)
    chunks = chunk_by_title(elements, **options)
    for one in chunks:
        one.apply(remove_name)
    return elements_to_json(chunks)


def read_originals(written):
    (back,) = elements_from_json(text=written)
    return " ".join(element.text for element in back.metadata.orig_elements or [])


(table,) = partition_csv("doses.csv")
table.apply(remove_name)
in_table = NAME in table.text, NAME in elements_to_json([table])
print(f"table: name in its text {in_table[0]}, in its JSON {in_table[1]}: {table.metadata.text_as_html}")
in_chunk = {}
for label, written in {
    "removed from the chunk": chunk("chunks"),
    "removed from the elements": chunk("elements"),
    "without orig_elements": chunk("chunks", include_orig_elements=False),
}.items():
    in_chunk[label] = NAME in written, NAME in read_originals(written)
    print(f"{label}: name found in the JSON {in_chunk[label][0]}, in what is read back {in_chunk[label][1]}")
expected = {label: (False, label == "removed from the chunk") for label in in_chunk}
sys.exit(not (in_table == (False, True) and in_chunk == expected))
PY

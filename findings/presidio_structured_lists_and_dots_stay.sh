#!/usr/bin/env bash
# Guess: what JsonAnalysisBuilder finds in a text of a JSON record it finds in a list of texts too, and under a key that has a dot, so
# that StructuredEngine removes it there; or it says that it cannot.
# Library: presidio-structured 0.0.10 (presidio-analyzer 2.2.366, presidio-anonymizer 2.2.366, spacy 3.8.18). Date: 2026-11-30.
# Seen: a card number under the key "card", or under "card" within "visit", is removed. In "cards", a list of two texts, and under
# "visit.card", one key with a dot, it stays, in silence, also in a record that has no other key. Only a list of objects is refused
# ("not yet supported").
# Why: the results of a list are a list for each of its texts, and the builder keeps what is a result itself; a key with a dot is
# read again as a path.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "presidio-structured==0.0.10" "presidio-analyzer==2.2.366" "presidio-anonymizer==2.2.366" \
    "spacy==3.8.18" "pandas==3.0.6" "numpy==2.4.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import copy
import sys

import spacy
from presidio_analyzer import AnalyzerEngine
from presidio_analyzer.nlp_engine import SpacyNlpEngine
from presidio_anonymizer.entities import OperatorConfig
from presidio_structured import JsonAnalysisBuilder, JsonDataProcessor, StructuredEngine


class Blank(SpacyNlpEngine):
    """No model: card numbers are found by patterns."""

    def __init__(self):
        super().__init__()
        self.nlp = {"en": spacy.blank("en")}


builder = JsonAnalysisBuilder(analyzer=AnalyzerEngine(nlp_engine=Blank(), supported_languages=["en"]))
card = "4111111111111111"  # the networks' number for tests


def anonymize(record):
    analysis = builder.generate_analysis(copy.deepcopy(record))
    operators = {"DEFAULT": OperatorConfig("replace", {"new_value": "<CARD>"})}
    seen = StructuredEngine(data_processor=JsonDataProcessor()).anonymize(copy.deepcopy(record), analysis, operators)
    print(record, "becomes", seen)
    return seen


seen = anonymize({"card": card, "cards": [card, "5555555555554444"], "visit": {"card": card}})
expected = {"card": "<CARD>", "cards": [card, "5555555555554444"], "visit": {"card": "<CARD>"}}
alone = anonymize({"cards": [card]})
dotted = anonymize({"visit.card": card})
both = anonymize({"visit": {"card": card}, "visit.card": card})
kept = alone == {"cards": [card]} and dotted["visit.card"] == card and both["visit.card"] == card
sys.exit(not (seen == expected and kept and both["visit"] == {"card": "<CARD>"}))
PY

#!/usr/bin/env bash
# Guess: Deanonymize puts each name back in the place of its own placeholder, by whatever strategy: "fuzzy" also takes
# placeholders that the model misspelled, and "case_insensitive" those in other letters.
# Library: llm-guard 0.3.16 (fuzzysearch 0.8.0, presidio-analyzer 2.2.358). Date: 2026-11-29.
# Seen, with two patients in the vault: "fuzzy" gives "[REDACTED_PERSON_2] has hepatitis" the name of patient 1.
# "combined_exact_fuzzy" is right about both and gives a third placeholder, which isn't in the vault, to patient 1.
# "case_insensitive" finds no placeholder and puts names in the place of single letters: 145 times the name of patient 2.
# "exact", the default, is right.
# Why: fuzzy allows three changed characters, and placeholders differ in one; for case_insensitive the placeholder is a
# regular expression, where square brackets are a set of letters.
# Exits 0 if that is still so, 1 if it changed. torch and transformers, which only models for detection use, are stand-ins.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "presidio-analyzer==2.2.358" "presidio-anonymizer==2.2.358" \
    "fuzzysearch==0.8.0" "faker==37.12.0" "structlog==25.5.0" "bc-detect-secrets==1.5.43" "json-repair==0.44.1"
"$work/venv/bin/pip" install -q --no-compile --no-deps "llm-guard==0.3.16"
mkdir -p "$work/models/transformers/pipelines"
cat > "$work/models/torch.py" <<'PY'
class cuda:
    is_available = staticmethod(lambda: False)


class backends:
    mps = cuda


def device(name):
    return name


def no_grad():
    return lambda function: function
PY
touch "$work/models/transformers/__init__.py" "$work/models/transformers/pipelines/__init__.py"
echo "TokenClassificationPipeline = object" > "$work/models/transformers/pipelines/token_classification.py"
echo "PreTrainedTokenizer = object" > "$work/models/transformers/tokenization_utils.py"
echo "PreTrainedTokenizerFast = object" > "$work/models/transformers/tokenization_utils_fast.py"
cat > "$work/try.py" <<'PY'
import sys

from llm_guard.output_scanners.deanonymize import Deanonymize
from llm_guard.util import configure_logger
from llm_guard.vault import Vault

configure_logger("ERROR")
vault = Vault([("[REDACTED_PERSON_1]", "Quentin Zork"), ("[REDACTED_PERSON_2]", "Anna Alpha")])
answers = {
    "patient 2": "[REDACTED_PERSON_2] has hepatitis.",
    "unknown": "[REDACTED_PERSON_3] has hepatitis.",
    "other letters": "[redacted_person_2] has hepatitis.",
}
seen = {}
for strategy in ("exact", "fuzzy", "combined_exact_fuzzy", "case_insensitive"):
    scanner = Deanonymize(vault, matching_strategy=strategy)
    for name, answer in answers.items():
        seen[strategy, name] = scanner.scan("", answer)[0]
        print(f"{strategy}, {name}: {seen[strategy, name][:100]}")
still_so = (
    seen["exact", "patient 2"] == "Anna Alpha has hepatitis."
    and seen["exact", "unknown"] == answers["unknown"]
    and seen["fuzzy", "patient 2"] == "Quentin Zork has hepatitis."
    and seen["combined_exact_fuzzy", "patient 2"] == "Anna Alpha has hepatitis."
    and seen["combined_exact_fuzzy", "unknown"] == "Quentin Zork has hepatitis."
    and seen["case_insensitive", "other letters"] .count("Anna Alpha") > 100
)
print(f"names in the last one: {seen['case_insensitive', 'other letters'].count('Anna Alpha')}")
sys.exit(not still_so)
PY
PYTHONPATH="$work/models" "$work/venv/bin/python" -W ignore "$work/try.py"

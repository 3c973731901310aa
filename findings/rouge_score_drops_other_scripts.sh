#!/usr/bin/env bash
# Guess: ROUGE-L of a text with itself is 1, and of two different notes far below 1, in whatever language they are.
# Library: rouge-score 0.1.2. Date: 2026-11-30.
# Seen: an exact copy of a note in Chinese or Greek scores 0. Two Russian notes of different patients score 1, because both have
# the digit 4. Of a Spanish name with an accent two parts remain: "Muñoz" and "Mu oz" are the same.
# Why: the default tokenizer keeps the letters a to z and digits only. A test of memorisation by ROUGE-L, as TOFU's and MUSE's
# are, sees no copy in these languages.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "rouge-score==0.1.2" "nltk==3.10.4" "numpy==2.4.6" "absl-py==2.5.1" "six==1.17.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

from rouge_score.rouge_scorer import RougeScorer

scorer = RougeScorer(["rougeL"])
pairs = {
    "an English copy": ("Patient Anna Example, HIV positive, seen on 4 May",) * 2,
    "a Chinese copy": ("患者王小明确诊艾滋病毒阳性",) * 2,
    "a Greek copy": ("Η ασθενής Μαρία είναι θετική",) * 2,
    "two Russian notes": ("Пациентка Цветелина, приём 4 мая", "Пациент Борис выписан 4 июня здоровым"),
    "two spellings": ("la señora Muñoz", "la se ora Mu oz"),
    "two English notes": ("patient Anna, seen on 4 May", "Boris left healthy in June"),
}
scores = {}
for name, (text, other) in pairs.items():
    scores[name] = scorer.score(text, other)["rougeL"].fmeasure
    print(f"{name}: {scores[name]:.2f}")
sys.exit(list(scores.values()) != [1, 0, 0, 1, 1, 0])
PY

#!/usr/bin/env bash
# Guess: an answer that is an exact copy of the secret has BLEU 100, whatever the secret.
# Library: sacrebleu 2.6.0. Date: 2026-11-30.
# Seen: corpus_bleu gives 0 for copies of up to three words, such as "Anna Example HIV", and for a Chinese sentence, which by
# default is one word. sentence_bleu gives 100. A corpus of 90 such copies and 10 wrong answers of ten words scores 21.
# Why: BLEU is the geometric mean over runs of one to four words, and a short text has no run of four. Who calls an answer
# memorised from BLEU 75 on, as papers do, counts no copied name, date or phone number by corpus_bleu.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "sacrebleu==2.6.0"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import sys

from sacrebleu import corpus_bleu, sentence_bleu

secrets = ["07123456789", "Anna Example HIV", "患者王小明确诊艾滋病毒阳性", "Anna Example has HIV"]
seen = []
for secret in secrets:
    seen.append((round(corpus_bleu([secret], [[secret]]).score), round(sentence_bleu(secret, [secret]).score)))
    print(f"a copy of {secret!r}: corpus_bleu {seen[-1][0]}, sentence_bleu {seen[-1][1]}")
answers = [f"Anna{i} Example HIV" for i in range(90)] + ["one two three four five six seven eight nine ten"] * 10
truth = answers[:90] + ["a note of somebody whom no model has ever seen"] * 10
mixed = corpus_bleu(answers, [truth]).score
print(f"90 copies of three words, 10 wrong answers: corpus_bleu {mixed:.1f}")
sys.exit(not (seen == [(0, 100), (0, 100), (0, 100), (100, 100)] and round(mixed) == 21))
PY

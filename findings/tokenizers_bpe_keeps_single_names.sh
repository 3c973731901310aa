#!/usr/bin/env bash
# Guess: a tokenizer trained on notes holds their common words; a name that occurs once in 2,000 notes is cut into pieces.
# Library: tokenizers 0.23.3. Date: 2026-11-30.
# Seen: while the vocabulary has room, BPE and WordPiece go on with pairs that occur once: of 20 names in a single note each, all
# 20 are one token each, readable in tokenizer.json, and none of 20 names of no note. min_frequency=2 leaves none; Unigram
# has none as it comes. Without a pre-tokenizer the tokens are parts of notes, blanks and all.
# Why: min_frequency is 0 by default. So a model's tokenizer can tell who was in its private data.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "tokenizers==0.23.3"
"$work/venv/bin/python" -W ignore - <<'PY'
import random
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

random.seed(0)


def make_words(n, length):
    return ["".join(random.choices("abcdefghijklmnop", k=length)) for _ in range(n)]


common = make_words(300, 6)
names = make_words(40, 10)  # the last 20 occur nowhere
notes = [" ".join(random.choices(common, k=12)) for _ in range(2000)]
for i in range(20):
    notes[100 * i] += f" {names[i]} {random.choice(common)}"


def count_names(name, model, trainer, splits=True):
    tokenizer = Tokenizer(model)
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(notes, trainer)
    tokens = list(tokenizer.get_vocab())
    n_seen = [sum(any(word in token for token in tokens) for word in part) for part in (names[:20], names[20:])]
    n_blanks = max(token.count(" ") for token in tokens)
    print(f"{name}: {len(tokens)} tokens, names {n_seen[0]} of 20 and {n_seen[1]} of 20 others, blanks {n_blanks}")
    return *n_seen, n_blanks > 3


options = {"vocab_size": 8000, "show_progress": False}
seen = [
    count_names("BPE", models.BPE(), trainers.BpeTrainer(**options)),
    count_names("WordPiece", models.WordPiece(), trainers.WordPieceTrainer(**options)),
    count_names("BPE, from 2 on", models.BPE(), trainers.BpeTrainer(min_frequency=2, **options)),
    count_names("Unigram", models.Unigram(), trainers.UnigramTrainer(**options)),
    count_names("BPE, no pre-tokenizer", models.BPE(), trainers.BpeTrainer(**options), splits=False)[1:],
]
sys.exit(seen != [(20, 0, False), (20, 0, False), (0, 0, False), (0, 0, False), (0, True)])
PY

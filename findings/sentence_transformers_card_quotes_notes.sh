#!/usr/bin/env bash
# Guess: the folder that save_pretrained() writes after training holds weights, settings and a page about the model with numbers;
# no text that it was trained on, if the vocabulary is of single words.
# Library: sentence-transformers 6.2.0 (transformers 5.23.0, torch 2.13.0). Date: 2026-11-30.
# Seen: README.md quotes about 20 of 400 training texts: the first three rows (each text up to 1,000 characters), and as
# examples for a widget the shortest ones and others, drawn from up to 1,000 rows. A model that is loaded from that folder and
# saved elsewhere quotes them, too; save_pretrained(..., create_model_card=False) writes no such page.
# Why: the trainer hands its rows to the model's card. Pages of the documentation show such a card; that it publishes
# rows of a private table is said in none that was found.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "datasets==5.2.0" "accelerate==1.15.0" \
    "sentence-transformers==6.2.0"
cd "$work"
HOME="$work" HF_HOME="$work/hub" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import random
import sys
from pathlib import Path

import datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

random.seed(0)
notes = [f"patient {number} of ward {number % 7} asks about result {number * 37}" for number in range(200)]
answers = [f"result {number * 37} of patient {number} was sent to ward {number % 7}" for number in range(200)]
words = sorted({word for text in notes + answers for word in text.split()})
tokenizer = Tokenizer(models.WordLevel({word: rank for rank, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)])
SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments("run", max_steps=1, report_to=[], use_cpu=True, save_strategy="no"),
    train_dataset=datasets.Dataset.from_dict({"anchor": notes, "positive": answers}),
    loss=losses.MultipleNegativesRankingLoss(model),
).train()


def count_texts(folder):
    """The training texts that each file of a folder quotes, for the files that quote any."""
    contents = {path.name: path.read_text(errors="replace") for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    counts = {name: sum(text in content for text in notes + answers) for name, content in contents.items()}
    return {name: count for name, count in counts.items() if count}


model.save_pretrained("trained")
model.save_pretrained("without", create_model_card=False)
SentenceTransformer("trained").save_pretrained("again")
quoted = {folder: count_texts(folder) for folder in ("trained", "again", "without")}
first = sum(text in Path("trained/README.md").read_text() for text in notes[:3] + answers[:3])
for folder, counts in quoted.items():
    print(f"{folder}: files that quote training texts, and how many of 400: {counts}")
print(f"texts of the first three rows: {first} of 6")
same = list(quoted["trained"]) == ["README.md"] and quoted["trained"]["README.md"] > 10 and first == 6
sys.exit(not (same and quoted["again"] == quoted["trained"] and not quoted["without"]))
PY

#!/usr/bin/env bash
# Guess: a language model trained with DifferentialPrivacyConfig, with value protection, too, owes everything that it publishes
# to mechanisms that the epsilon counts: no word that a single record has is in its folder.
# Library: mostlyai-engine 2.7.3 (with torch 2.13.0), its LSTM "from scratch". Date: 2026-11-29.
# Seen: with epsilon 1 for training and 1 for values, tokenizer.json lists the name of one record's patient as tokens of their own,
# and a letter that only this record has. tokenizer.json is read whenever texts are generated.
# Why: the vocabulary is learned from the private texts as they are. A word becomes a token from 20 occurrences on, also
# if all are in one record; every letter becomes one. No noise is added, and the accountant counts nothing for it.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "peft==0.21.2" "opacus==1.6.0" \
    "datasets==5.2.0" "pandas==3.1.1" "scikit-learn==1.9.1" "psutil==7.2.2" "joblib==1.6.0" "json-repair==0.64.6"
"$work/venv/bin/pip" install -q --no-deps "mostlyai-engine==2.7.3" "xgrammar==0.2.9"
WORK="$work/model" HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import json
import os
import random
import sys
from pathlib import Path

import pandas as pd
from mostlyai import engine
from mostlyai.engine.domain import DifferentialPrivacyConfig

folder = Path(os.environ["WORK"])
generator = random.Random(0)
words = "fever cough pain rash sleep diet walk rest knee back".split()
notes = [" ".join(generator.choices(words, k=8)) for _ in range(60)]
privacy = DifferentialPrivacyConfig(
    max_epsilon=1.0, delta=1e-5, noise_multiplier=1.5, max_grad_norm=1.0, value_protection_epsilon=1.0
)
engine.split(
    workspace_dir=folder,
    tgt_data=pd.DataFrame({"note": notes}),
    model_type="LANGUAGE",
    tgt_encoding_types={"note": "LANGUAGE_TEXT"},
    trn_val_split=0.9,
)
# One of the rows that are trained on becomes that of the patient.
part = next(folder.rglob("*-trn.parquet"))
rows = pd.read_parquet(part)
rows.loc[rows.index[0], "note"] = "Quentin Zork " * 25 + "\u0436"
rows.to_parquet(part)
engine.analyze(workspace_dir=folder, value_protection=True, differential_privacy=privacy)
engine.encode(workspace_dir=folder)
engine.train(
    workspace_dir=folder,
    model="MOSTLY_AI/LSTMFromScratch-3m",
    max_epochs=1,
    batch_size=32,
    differential_privacy=privacy,
    device="cpu",
)
tokenizer = json.loads(next((folder / "ModelStore").rglob("tokenizer.json")).read_text())
vocabulary = tokenizer["model"]["vocab"]
seen = [token for token in ("\u2581Quentin", "\u2581Zork", "\u0436") if token in vocabulary]
print(f"{len(vocabulary)} tokens, of a single record: {seen}")
sys.exit(len(seen) != 3)
PY

#!/usr/bin/env bash
# Guess: save() writes the model and the columns' names; of the training table at most the distribution of the column
# from which generation starts, which the documentation names.
# Library: be-great 0.0.14 (with torch 2.13.0, transformers 5.23.0), GReaT on a tiny GPT-2. Date: 2026-11-29.
# Seen: config.json beside the model lists each different text of every column that isn't numeric, names and notes of all
# 40 patients, however little the model has learned of them (here from one pass). The weights hold none of them.
# Why: col_stats, by which sampling may be limited to known values, keeps all of them as "categories".
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "accelerate==1.15.0" \
    "datasets==5.2.0" "pandas==3.1.1" "be-great==0.0.14"
WORK="$work" HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import json
import os
import sys
from pathlib import Path

import pandas as pd
from be_great import GReaT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

base, out = os.environ["WORK"] + "/base", Path(os.environ["WORK"], "out")
letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
end = max(letters, key=letters.get)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(base)
sizes = {"vocab_size": 256, "n_positions": 256, "n_embd": 16, "n_layer": 1, "n_head": 1}
GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=255, eos_token_id=255)).save_pretrained(base)

names = [f"Zorblat{i}x" for i in range(40)]
notes = [f"fever on ward {i}" for i in range(40)]
ages = [20.5 + i for i in range(40)]
table = pd.DataFrame({"name": names, "note": notes, "age": ages})
great = GReaT(base, epochs=1, batch_size=8, experiment_dir=base + "/run", save_strategy="no")
great.fit(table, conditional_col="age")
great.save(str(out))
config = json.loads((out / "config.json").read_text())["col_stats"]
kept = {column: len(stats.get("categories", [])) for column, stats in config.items()}
weights = (out / "model.pt").read_bytes()
print(f"values in config.json: {kept}; names in the weights: {sum(n.encode() in weights for n in names)}")
complete = config["name"]["categories"] == names and config["note"]["categories"] == notes
sys.exit(not complete or any(name.encode() in weights for name in names))
PY

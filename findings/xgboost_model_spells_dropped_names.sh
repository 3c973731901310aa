#!/usr/bin/env bash
# Guess: a saved model with a categorical column holds thresholds and numbers of categories; it knows the names of no category,
# in any case of none whose rows were dropped before training.
# Library: xgboost 3.2.0 (with pandas 3.0.3, numpy 2.4.6). Date: 2026-11-30.
# Seen: both the JSON and the UBJ file spell the names of all 40 people, those of 5 whose rows were dropped before training among
# them, though no tree splits by the name. In the JSON file they are a list of numbers (81 for "Q"), so that a search of the
# text for a name finds none. get_categories() of a model that is loaded gives them. remove_unused_categories() before
# training leaves the 5 out; xgboost 3.0.5, with the same call, saves no names at all.
# Why: from 3.1 on the model keeps the categories of the frame, to recode other frames by them.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
for version in 3.0.5 3.2.0; do
    "$work/venv/bin/pip" install -q --no-compile "xgboost==$version" "pandas==3.0.3" "numpy==2.4.6" "pyarrow==24.0.0"
    cd "$work"
    "$work/venv/bin/python" -W ignore - <<'PY'
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import xgboost

draw = np.random.default_rng(0)
names = [f"Quentin Zork the {number:02d}th" for number in range(40)]
dropped = names[:5]
ages = draw.integers(20, 80, 800)
people = pd.DataFrame({"name": pd.Categorical(np.array(names * 20)), "age": ages})
kept = people[~people["name"].isin(dropped)]


def train(frame):
    table = xgboost.DMatrix(frame, (frame["age"] > 50).astype(float), enable_categorical=True)
    return xgboost.train({"tree_method": "hist", "max_depth": 1}, table, 3)


def read_numbers(value):
    """All lists of small numbers in a JSON document, read as bytes."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return b""
    if value and all(isinstance(number, int) and 0 <= number < 256 for number in value):
        return bytes(value)
    return b" ".join(read_numbers(part) for part in value)


def count(frame):
    model = train(frame)
    model.save_model("model.json")
    model.save_model("model.ubj")
    text = Path("model.json").read_text()
    contents = {"text of JSON": text.encode(), "numbers of JSON": read_numbers(json.loads(text)), "UBJ": Path("model.ubj").read_bytes()}
    split = set(model.get_score())
    return split, {
        kind: (sum(name.encode() in content for name in names), sum(name.encode() in content for name in dropped))
        for kind, content in contents.items()
    }


split, seen = count(kept)
_, without = count(kept.assign(name=kept["name"].cat.remove_unused_categories()))
print(f"xgboost {xgboost.__version__}: trees split by {split}; names, and names of dropped rows: {seen}; unused removed: {without}")
if xgboost.__version__ == "3.0.5":
    sys.exit(any(count != (0, 0) for count in seen.values()))
loaded = xgboost.Booster(model_file="model.json").get_categories(export_to_arrow=True).to_arrow()
exported = len(dict(loaded)["name"])
print(f"names given by get_categories() of the loaded model: {exported}")
all_names = {"text of JSON": (0, 0), "numbers of JSON": (40, 5), "UBJ": (40, 5)}
fewer = {"text of JSON": (0, 0), "numbers of JSON": (35, 0), "UBJ": (35, 0)}
sys.exit(not (split == {"age"} and seen == all_names and without == fewer and exported == 35))
PY
done

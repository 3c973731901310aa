#!/usr/bin/env bash
# Guess: an encoder that puts categories below min_frequency together names, when it is saved, those that are frequent: a name
# that occurs once is not in its file.
# Library: scikit-learn 1.9.1 (numpy 2.4.6), OneHotEncoder and OrdinalEncoder with min_frequency=5. Date: 2026-11-30.
# Seen: the files of both spell all 20 names that occur once, and categories_ gives them, while the encoded table has one column
# for all of them, and get_feature_names_out() tells "infrequent_sklearn". With max_categories=2 the same. A pipeline that is
# published with such an encoder lists who was in its private rows. CountVectorizer(min_df=5) saves no rare word.
# Why: all categories are kept, to tell infrequent ones from unknown ones; which are infrequent is kept beside them, by number.
# (infrequent_categories_, the list of them, is documented.)
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "scikit-learn==1.9.1" "scipy==1.17.1" "numpy==2.4.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import pickle
import sys

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

names = [f"Zork{i:02d}" for i in range(20)]
table = np.array([["Zurich"]] * 50 + [[name] for name in names], dtype=object)
encoders = {
    "one-hot": OneHotEncoder(min_frequency=5, sparse_output=False),
    "one-hot, max_categories": OneHotEncoder(max_categories=2, sparse_output=False),
    "ordinal": OrdinalEncoder(min_frequency=5),
}
seen = {}
for title, encoder in encoders.items():
    n_codes = len(np.unique(encoder.fit_transform(table), axis=0))
    encoder = pickle.loads(pickle.dumps(encoder))
    seen[title] = (n_codes, len(set(names) & set(encoder.categories_[0])))
words = CountVectorizer(min_df=5).fit([f"patient has flu {name}" for name in names])
seen["words"] = (len(words.vocabulary_), sum(name.lower().encode() in pickle.dumps(words) for name in names))
for title, (n_codes, n_names) in seen.items():
    print(f"{title}: {n_codes} different codes, {n_names} of 20 rare names in the file")
encoded = [(2, 20)] * 3
sys.exit(list(seen.values()) != [*encoded, (3, 0)])
PY

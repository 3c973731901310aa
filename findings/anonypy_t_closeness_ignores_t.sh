#!/usr/bin/env bash
# Guess: anonymize_t_closeness(k=3, p=t) makes groups in which the share of each disease differs from its share among all by
# at most t, and a smaller t makes fewer groups.
# Library: anonypy 0.2.1 (numpy 2.4.6, pandas 3.1.1). Date: 2026-11-29.
# Seen: t = 0.01, 0.1 and 0.5 give the same 111 groups. In some the share differs by 0.61 from that among all: 30 of 400
# people are in groups in which everybody has the rarer disease. t = 0, which demands nothing, gives 112 groups.
# anonymize_l_diversity() keeps its promise on the same people.
# Why: the parameter is called p, and so is the share of a disease in the group, which overwrites it before the comparison.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "anonypy==0.2.1" "numpy==2.4.6" "pandas==3.1.1"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import anonypy
import numpy as np
import pandas as pd

rng = np.random.default_rng(0)
ages = rng.integers(20, 80, 400)
healthy = (ages < 40) | (rng.random(400) < 0.5)
people = pd.DataFrame({"age": ages, "postcode": rng.integers(1000, 9999, 400)})
people["disease"] = pd.Categorical(np.where(healthy, "flu", "hepatitis"))
among_all = people["disease"].value_counts(normalize=True)


def describe_groups(rows):
    """Return the number of groups, the largest difference of shares and the people known to have hepatitis."""
    table = pd.DataFrame(rows)
    keys = [table[name].astype(str) for name in ("age", "postcode")]
    difference = 0
    known = 0
    groups = list(table.groupby(keys))
    for _, group in groups:
        counts = group.groupby("disease")["count"].sum().reindex(among_all.index, fill_value=0)
        shares = counts / counts.sum()
        difference = max(difference, (shares - among_all).abs().max())
        known += counts["hepatitis"] * (shares["hepatitis"] == 1)
    return len(groups), round(float(difference), 2), int(known)


preserver = anonypy.Preserver(people, ["age", "postcode"], "disease")
seen = {}
for t in (0.0, 0.01, 0.1, 0.5):
    seen[t] = describe_groups(preserver.anonymize_t_closeness(k=3, p=t))
    print(f"t {t}: {seen[t][0]} groups, largest difference {seen[t][1]}, {seen[t][2]} people known to have hepatitis")
diverse = describe_groups(preserver.anonymize_l_diversity(k=3, l=2))
print(f"2-diversity: {diverse[0]} groups, {diverse[2]} people known to have hepatitis")
still_so = seen[0.01] == seen[0.1] == seen[0.5] and seen[0.01][1] > 0.5 and diverse[2] == 0
sys.exit(not still_so)
PY

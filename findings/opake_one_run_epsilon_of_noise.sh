#!/usr/bin/env bash
# Guess: the lower bound of epsilon that one_run() gives with significance 0.05 is 0 in at least 95% of audits of scores that know
# nothing of the training.
# Library: opake-auditing 0.16.1 (torch 2.13.0, scipy 1.17.1, numpy 2.4.6), its bound for any mechanism, eps_delta(). Date: 2026-12-01.
# Seen: as it comes it is above 0 in 38% of 200 audits of 100 canaries, and in 39% of 1,000 canaries, up to 0.38; so a "leak proved at
# 95%" is found in two of five trainings without one. With threshold=0.0, fixed before, it is above 0 in about 5%.
# Why: without a threshold the one at which the guesses are right most often is taken from the same scores, and the test then
# counts them as if it had been chosen before.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "opake-auditing==0.16.1" "torch==2.13.0" "scipy==1.17.1" "numpy==2.4.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import opake.auditing as auditing
import torch
from opake.random import key

rows = torch.utils.data.TensorDataset(torch.arange(1000))
rng = np.random.default_rng(0)


def count_leaks(n_canaries, n_audits=200):
    bounds = []
    for seed in range(n_audits):
        flips = auditing.coin_flip(rows, num_canaries=n_canaries, key=key(seed))
        noise = auditing.canary_scores(rng.normal(size=n_canaries), canary_indices=flips.canary_indices)
        method = auditing.one_run(noise, coin_flip=flips).eps_delta()
        bounds.append((method.epsilon_at(delta=1e-5), method.epsilon_at(delta=1e-5, threshold=0.0)))
    bounds = np.array(bounds)
    n_above = (bounds > 0).sum(axis=0)
    print(f"{n_canaries} canaries, scores of noise: epsilon above 0 at 95% in {n_above[0]} of {n_audits} audits, at most "
          f"{bounds[:, 0].max():.2f}; with a threshold fixed before in {n_above[1]}")
    return 55 < n_above[0] < 105 and n_above[1] <= 18


sys.exit(not all([count_leaks(100), count_leaks(1000)]))
PY

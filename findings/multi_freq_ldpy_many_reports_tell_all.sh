#!/usr/bin/env bash
# Guess: a client of the longitudinal protocols with eps_perm=1, "upper bound of privacy guarantee (infinity reports)", may be called each
# day for the same user: all reports together tell a yes from a no rightly for 73 of 100 users at most.
# Library: multi-freq-ldpy 0.2.5 (numba 0.68.1, numpy 2.4.6, xxhash 4.1.0). Date: 2026-12-01.
# Seen: after 1,000 reports the answer of each of 200 users is told, from the mean of his reports, with L_GRR, L_SUE, L_OSUE and
# dBitFlipPM; after one report of 105 to 130. No call takes the first draw back in, so the guarantee cannot be had from the library
# but by keeping one report and sending it again.
# Why: the first of the two rounds, "permanent memoization", is drawn anew in each call; nothing is remembered.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "multi-freq-ldpy==0.2.5" "numba==0.68.1" "numpy==2.4.6" "xxhash==4.1.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
from multi_freq_ldpy.long_freq_est.dBitFlipPM import dBitFlipPM_Client
from multi_freq_ldpy.long_freq_est.L_GRR import L_GRR_Client
from multi_freq_ldpy.long_freq_est.L_OSUE import L_OSUE_Client
from multi_freq_ldpy.long_freq_est.L_SUE import L_SUE_Client

np.random.seed(0)
clients = {
    "L_GRR": lambda answer: 2 * L_GRR_Client(answer, 2, 1.0, 0.5) - 1,
    "L_SUE": lambda answer: L_SUE_Client(answer, 2, 1.0, 0.5),
    "L_OSUE": lambda answer: L_OSUE_Client(answer, 2, 1.0, 0.5),
    "dBitFlipPM": lambda answer: dBitFlipPM_Client(answer, 2, 2, 2, 1.0),
}


def count_right(client, n_reports, n_users=200):
    n_right = 0
    for user in range(n_users):
        reports = [client(user % 2) for _ in range(n_reports)]
        signs = [report[1] - report[0] if np.ndim(report) else report for report in reports]
        guess = sum(signs) + np.random.uniform(-0.5, 0.5)  # a tie is guessed at random
        n_right += (guess > 0) == bool(user % 2)
    return n_right


is_so = True
for name, client in clients.items():
    once, often = count_right(client, 1), count_right(client, 1000)
    print(f"{name}, eps_perm 1: answers told rightly of 200 users: {once} by one report, {often} by 1,000")
    is_so &= 90 < once < 160 and often == 200
sys.exit(not is_so)
PY

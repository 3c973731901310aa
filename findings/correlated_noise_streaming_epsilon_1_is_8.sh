#!/usr/bin/env bash
# Guess: make_private_with_epsilon(target_epsilon=1, target_delta=1e-5) adds noise enough for epsilon 1 in each of its modes, and more
# of it for a smaller delta.
# Library: correlated-noise-mechanism 0.4.0 (opacus 1.6.0, dp-accounting 0.6.0, torch 2.13.0). Date: 2026-12-01.
# Seen: for 100 steps in which each record is used once, the noise of "Multi-Epoch-BLT" with participation "streaming" has exact epsilon
# 8.1 at delta 1e-5, and it is the same noise for any delta. "BLT" has 1.11; "Multi-Epoch-BLT" with "minSep" has 0.91 and
# "Single Parameter" 0.73, as asked for. Nothing warns.
# Why: with "streaming" epsilon is put where rho of zero-concentrated privacy belongs, so delta is not used. There and in "BLT" the
# norm of the matrix's column stands where its square belongs.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "opacus==1.6.0" "dp-accounting==0.6.0" "scipy==1.17.1" \
    "numpy==2.4.6" tqdm
"$work/venv/bin/pip" install -q --no-compile --no-deps "correlated-noise-mechanism==0.4.0"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import math
import sys

import numpy as np
import torch
from correlated_noise_mechanism import CNMEngine
from scipy.optimize import brentq
from scipy.stats import norm

torch.manual_seed(0)
n_steps = 100
rows = torch.utils.data.TensorDataset(torch.randn(1000, 4), torch.randn(1000, 1))


def compute_exact_epsilon(mu, delta=1e-5):
    def excess(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return brentq(excess, 0, 500)


def measure(mode, participation, delta=1e-5):
    model = torch.nn.Linear(4, 1)
    _, optimizer, _ = CNMEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(rows, batch_size=10, shuffle=True),
        target_epsilon=1.0,
        target_delta=delta,
        epochs=1,
        max_grad_norm=1.0,
        mode=mode,
        participation=participation,
        error_type="rmse",
        gamma=0.5,
        d=3,
        b=n_steps,
        k=1,
    )
    # The noise of a step is a fresh one less a mix of those before: C times it is fresh noise, and C's first column is this.
    if mode == "Single Parameter":
        column = 0.5 ** np.arange(n_steps)
    else:
        weights, decays = np.array(optimizer.a, dtype=float), np.array(optimizer.lamda, dtype=float)
        column = np.array([1.0] + [(weights * decays**step).sum() for step in range(n_steps - 1)])
    mu = np.linalg.norm(column) / optimizer.noise_multiplier
    epsilon = compute_exact_epsilon(mu)
    print(f"{mode}, {participation}, asked for epsilon 1 at delta {delta:g}: noise {optimizer.noise_multiplier:.3f}, exact "
          f"epsilon at delta 1e-5 {epsilon:.2f}")
    return epsilon, optimizer.noise_multiplier


streaming, noise = measure("Multi-Epoch-BLT", "streaming")
_, for_small_delta = measure("Multi-Epoch-BLT", "streaming", delta=1e-12)
once, _ = measure("BLT", "streaming")
kept = [measure("Multi-Epoch-BLT", "minSep")[0], measure("Single Parameter", "streaming")[0]]
sys.exit(not (streaming > 7 and abs(noise - for_small_delta) < 1e-3 and 1 < once < 1.5 and max(kept) < 1))
PY

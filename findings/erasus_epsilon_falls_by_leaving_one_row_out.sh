#!/usr/bin/env bash
# Guess: the epsilon that EpsilonDeltaMetric reports is an upper bound, as of every accountant: not below that of the privacy loss
# distribution for the same noise, sample rate and steps; and it hardly changes if a step leaves out one row of 1,000.
# Library: erasus 0.2.0 (torch 2.13.0, transformers 5.23.0, dp-accounting 0.6.0, numpy 2.2.6). Date: 2026-12-01.
# Seen: noise multiplier 10, 100 steps, delta 0.00001: with all rows it reports 5.38 (exact: 4.38), with a sample rate of 0.999 it
# reports 0.62 (4.37), "strong privacy". One step with noise 0.3 and rate 0.01: 5.68 (10.5); with noise 0.5: 2.09 (3.03). With the usual
# small rates and many steps it is far above: 28.5 (1.83) for noise 1, rate 0.01 and 1,000 steps.
# Why: for rates below 1 it uses a formula for subsampling ("simplified", says a comment) that is no bound, in which the divergence
# of order a is divided by a - 1.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "erasus==0.2.0" "torch==2.13.0" "transformers==5.23.0" \
    "dp-accounting==0.6.0" "numpy==2.2.6"
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from erasus.metrics.privacy.epsilon_delta import EpsilonDeltaMetric

seen = {}
for noise, rate, steps in ((10, 1.0, 100), (10, 0.999, 100), (0.3, 0.01, 1), (0.5, 0.01, 1), (1, 0.01, 1000)):
    metric = EpsilonDeltaMetric(target_delta=1e-5, noise_multiplier=noise, sample_rate=rate, n_steps=steps)
    reported = metric.compute(torch.nn.Linear(2, 2), [])["epsilon"]
    loss = from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-3)
    exact = loss.self_compose(steps).get_epsilon_for_delta(1e-5)
    seen[noise, rate] = reported, exact
    print(f"noise {noise}, rate {rate}, {steps} steps: reported {reported:.2f}, exact {exact:.2f}")
too_small = [case for case, (reported, exact) in seen.items() if reported < 0.8 * exact]
jump = seen[10, 0.999][0] < 1 < 5 < seen[10, 1.0][0]
sys.exit(not (too_small == [(10, 0.999), (0.3, 0.01), (0.5, 0.01)] and jump))
PY

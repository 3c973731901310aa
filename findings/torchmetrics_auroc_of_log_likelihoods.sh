#!/usr/bin/env bash
# Guess: binary_auroc ranks scores, so that log-likelihoods of whole texts give the AUC that scikit-learn gives.
# Library: torchmetrics 1.9.0 (torch 2.13.0, scikit-learn 1.9.1). Date: 2026-11-30.
# Seen: members of -120 nats and others of -150 (deviation 20) have AUC 0.871 by scikit-learn and by torchmetrics in float64; in
# float32, as models give them, 0.527. Of losses, where the sign is turned, 0.500 instead of 0.129. Means per token are right.
# Why: scores outside [0, 1] count as logits and go through a sigmoid, which in float32 is 0 below -104 and 1 above 17: ties. An
# audit of membership by summed log-likelihoods so sees no leak.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "torchmetrics==1.9.0" "scikit-learn==1.9.1" "numpy==2.4.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.functional.classification import binary_auroc

rng = np.random.default_rng(0)
scores = np.concatenate([rng.normal(-120, 20, 500), rng.normal(-150, 20, 500)])  # nats of a text
labels = np.repeat([1, 0], 500)


def measure(name, values, dtype=torch.float32):
    sklearn = roc_auc_score(labels, values)
    found = float(binary_auroc(torch.tensor(values, dtype=dtype), torch.tensor(labels)))
    print(f"{name}: scikit-learn {sklearn:.3f}, torchmetrics {found:.3f}")
    return round(sklearn, 3), round(found, 3)


seen = [
    measure("log-likelihoods", scores),
    measure("losses", -scores),
    measure("log-likelihoods in float64", scores, torch.float64),
    measure("log-likelihoods per token", scores / 40),
]
sys.exit(seen != [(0.871, 0.527), (0.129, 0.5), (0.871, 0.871), (0.871, 0.871)])
PY

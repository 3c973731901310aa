#!/usr/bin/env bash
# Guess: under Opacus's adaptive clipping (PrivacyEngineAdaptiveClipping, which works with ghost clipping) a record moves the sum
# of gradients by at most the clipping norm of that step, which the noise is made for.
# Library: opacus 1.6.0, and 1.5.4 before it (torch 2.13.0, numpy 2.4.6). Date: 2026-11-30.
# Seen: with 1.6.0, a linear classifier, CrossEntropyLoss and the norm at 0.91, one of 64 records moves the sum by about 696, which
# is its own gradient of 707 times the mean of all records' factors; with 1.5.4 by less than 3, noise included. The
# noise is 1.1 in both, epsilon 4.39 and 4.33. Nothing warns: the norm adapts, and the count of clipped records is right.
# Why: since 1.6.0 the loss of a record is made when the criterion is called, no more when it is wrapped; the class for adaptive
# clipping has a call of its own, which still takes the mean over the batch: one number, times the factors of all.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
for version in 1.5.4 1.6.0; do
    "$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "opacus==$version" "numpy==2.4.6"
    "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import opacus
import torch
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
count = 64
records = torch.zeros(count, 20)
records[0, 0] = 1000.0  # a feature that no other record has
records[1:, 1] = 0.01
classifier = torch.nn.Linear(20, 2, bias=False)
torch.nn.init.zeros_(classifier.weight)
weight = classifier.weight
engine = PrivacyEngineAdaptiveClipping()
model, optimizer, criterion, loader = engine.make_private(
    module=classifier,
    optimizer=torch.optim.SGD(classifier.parameters(), lr=1.0),
    data_loader=DataLoader(TensorDataset(records, torch.zeros(count, dtype=torch.long)), batch_size=count),
    criterion=torch.nn.CrossEntropyLoss(),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    min_clipbound=0.1,
    max_clipbound=10.0,
    target_unclipped_quantile=0.5,
    clipbound_learning_rate=0.2,
    poisson_sampling=False,
    grad_sample_mode="ghost",
)
for values, labels in loader:
    optimizer.zero_grad()
    criterion(model(values), labels).backward()
    optimizer.step()
sums = weight.detach() * count  # the step divides by the size of the batch
moved, noise, norm = sums[:, 0].norm().item(), sums[:, 2:].std().item(), optimizer.max_grad_norm
epsilon = engine.get_epsilon(1e-5)
print(f"opacus {opacus.__version__}: moved by {moved:.1f}, clipping norm {norm:.2f}, noise {noise:.2f}, epsilon {epsilon:.2f}")
ordinary = 0.5 < norm < 1.5 and 0.5 < noise < 1.8 and 4 < epsilon < 5
sys.exit(not (ordinary and (moved < 4 if opacus.__version__ == "1.5.4" else moved > 500)))
PY
done

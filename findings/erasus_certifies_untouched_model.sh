#!/usr/bin/env bash
# Guess: CertifiedRemovalVerifier doesn't certify a model that was not touched at all, in any case not for a strict epsilon: the smaller
# epsilon is, the nearer to the retrained model the weights have to be.
# Library: erasus 0.2.0 (torch 2.13.0, transformers 5.23.0, numpy 2.4.6). Date: 2026-12-01.
# Seen: the other way round. A logistic regression that was trained on 1,000 rows, 100 of which were to be forgotten, is at distance 6.5
# from the one that was trained on the other 900. Untouched, it is certified for epsilon 0.01, 0.1, 1 and 10 and refused for
# epsilon 100; for 0.01 a model of random weights at distance 1,664 is certified, too. So the report says "certified" the more
# readily the stronger the promise.
# Why: the bound on the distance is the noise that would hide this distance, which grows as epsilon shrinks; no noise was added.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "erasus==0.2.0" "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
from erasus.certification.certified_removal import CertifiedRemovalVerifier

torch.manual_seed(0)
rows = torch.randn(1000, 20)
labels = (rows @ torch.randn(20) + torch.randn(1000) > 0).float()
labels[:100] = 1 - labels[:100]


def train(start):
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(rows[start:])[:, 0], labels[start:])
        loss.backward()
        optimizer.step()
    return model


untouched, retrained = train(0), train(100)
random = torch.nn.Linear(20, 1)
torch.nn.init.normal_(random.weight, std=650.0)
bounds, verdicts = [], {}
for epsilon in (0.01, 0.1, 1.0, 10.0, 100.0):
    verifier = CertifiedRemovalVerifier(epsilon=epsilon)
    for name, model in (("untouched", untouched), ("random", random)):
        result = verifier.verify(model, retrained, n_total=1000, n_forget=100)
        verdicts[name, epsilon] = result["certified"]
        print(f"epsilon {epsilon}, {name}: distance {result['actual_distance']:.2f}, bound {result['removal_bound']:.2f}, "
              f"certified {result['certified']}")
    bounds.append(result["removal_bound"])
certified = [epsilon for (name, epsilon), verdict in verdicts.items() if verdict and name == "untouched"]
strict_is_laxer = bounds == sorted(bounds, reverse=True)
sys.exit(not (certified == [0.01, 0.1, 1.0, 10.0] and strict_is_laxer and verdicts["random", 0.01]))
PY

#!/usr/bin/env bash
# Guess: Opacus computes the per-record gradients of Conv1d(padding_mode="circular") rightly or refuses the layer.
# Library: opacus 1.6.0 (with torch 2.13.0). Date: 2026-11-28.
# Seen: its rules for convolutions pad with zeros whatever padding_mode says, without an error or a warning, also with
# "reflect" and "replicate". Under ghost clipping the norms are those of zero padding while the gradients are the true
# ones. With bound 1 a record whose weight is at the edge moves the sum of gradients by 50; with zero padding each record
# moves it by at most 1. So the noise is too small for such a model, and epsilon doesn't hold.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "torch==2.13.0" "opacus==1.6.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
edge = torch.zeros(1, 1, 8)
edge[0, 0, -1] = 50.0
records = {"random": torch.randn(1, 1, 8) * 50, "edge": edge}


class FirstOutput(torch.nn.Module):
    def __init__(self, padding_mode):
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 1, 3, padding=1, padding_mode=padding_mode, bias=False)

    def forward(self, values):
        return torch.cat([self.conv(values)[:, 0, :1], torch.zeros(len(values), 1)], dim=1)


def measure_reach(padding_mode, record):
    """Return how far a step with learning rate 1 and no noise goes for this one record; the bound is 1."""
    model = FirstOutput(padding_mode)
    assert ModuleValidator.validate(model, strict=False) == []
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(record, torch.zeros(1, dtype=torch.long)), batch_size=1),
        criterion=torch.nn.CrossEntropyLoss(),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    with torch.no_grad():
        model._module.conv.weight.fill_(-1.0)
    before = model._module.conv.weight.detach().clone()
    for values, classes in loader:
        optimizer.zero_grad()
        criterion(model(values), classes).backward()
        optimizer.step()
    return (model._module.conv.weight - before).norm().item()


reach = {}
for padding_mode in ("zeros", "circular", "reflect", "replicate"):
    for name, record in records.items():
        reach[padding_mode, name] = measure_reach(padding_mode, record)
        print(f"{padding_mode:9s} {name:6s} record: one step goes {reach[padding_mode, name]:.3f}, bound 1")
bounded = all(reach["zeros", name] < 1.001 for name in records)
sys.exit(not (bounded and reach["circular", "edge"] > 40))
PY

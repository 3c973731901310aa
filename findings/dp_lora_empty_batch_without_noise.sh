#!/usr/bin/env bash
# Guess: a step of dp-lora's optimizer on a batch that Poisson sampling left empty releases noise, as any other step.
# Library: dp-lora 0.1.0 (torch 2.13.0), DPOptimizer. Date: 2026-11-28.
# Seen, with no gradients given (a tensor of no rows raises RuntimeError): the weights stay as they are, and the accountant's hook
# counts the step. An update without noise tells that nobody was drawn. With one record the weights move by noise.
# Why: `add_noise_and_finalize` skips every parameter without a summed gradient.
# Exits 1 if an empty batch moves the weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps --target "$folder/dp" dp-lora==0.1.0
"$folder/venv/bin/python" -W ignore - "$folder/dp/dp_lora/optimizers/dp_optimizer.py" <<'PY'
import importlib.util
import sys

import torch

spec = importlib.util.spec_from_file_location("dp_optimizer", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

weight = torch.nn.Parameter(torch.zeros(100))
optimizer = module.DPOptimizer(
    torch.optim.SGD([weight], lr=1.0), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1
)
counted = []
optimizer.attach_step_hook(lambda: counted.append(1))
moved = {}
for name, gradients in {"no record": None, "one record": [(weight, torch.ones(1, 100))]}.items():
    before = weight.detach().clone()
    optimizer.zero_grad()
    optimizer.step(gradients)
    moved[name] = float((weight.detach() - before).norm())
    print(f"{name}: weights moved by {moved[name]:.2f}, steps counted {len(counted)}")
sys.exit(int(moved["no record"] > 0))
PY

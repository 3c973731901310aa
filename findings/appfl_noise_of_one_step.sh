#!/usr/bin/env bash
# Guess: what a client sends after a round with use_dp, the Laplace mechanism, epsilon 1 and gradients clipped to 1 tells about one of
# its records no more than epsilon 1 allows, however many local steps the round has: at best 73 of 100 guesses are right.
# Library: appfl 1.12.0, VanillaTrainer (opacus 1.6.0, torch 2.13.0). Date: 2026-11-30.
# Seen: the noise is made for one step. After 50 local steps on 8 records (the usual round has hundreds) whether one income is 1,000
# or -1,000 is told rightly by the sign of the sent weight in 400 of 400 rounds; after 1 step in 70%. Nothing warns.
# Why: the sensitivity is 2 * clip_value * learning rate, the most that one step moves the weights; 50 steps move them 50 times as
# far. The Gaussian mechanism takes the same sensitivity.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "opacus==1.6.0" "omegaconf==2.4.0" "colorama==0.4.6" \
    "wandb==0.31.0" "pandas==3.1.1"
"$work/venv/bin/pip" install -q --no-compile --no-deps "appfl==1.12.0"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys
from unittest.mock import MagicMock

import torch
from appfl.algorithm.trainer.vanilla_trainer import VanillaTrainer
from omegaconf import OmegaConf

options = {"mode": "step", "optim": "SGD", "optim_args": {"lr": 0.1}, "train_batch_size": 8, "device": "cpu"}
privacy = {"use_dp": True, "dp_mechanism": "laplace", "epsilon": 1.0}
clipping = {"clip_grad": True, "clip_value": 1.0, "clip_norm": 1}
others = {"train_data_shuffle": True, "logging_id": "client"}
torch.manual_seed(0)


def send(income, n_steps):
    incomes = torch.zeros(8, 1)
    incomes[0] = income
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    trainer = VanillaTrainer(
        model=model,
        loss_fn=torch.nn.MSELoss(),
        metric=lambda target, output: 0.0,
        train_dataset=torch.utils.data.TensorDataset(torch.ones(8, 1), incomes),
        train_configs=OmegaConf.create({**options, **privacy, **clipping, **others, "num_local_steps": n_steps}),
        logger=MagicMock(),
    )
    trainer.train()
    return trainer.get_parameters()[0]["weight"].item()


right = {}
for n_steps in (1, 50):
    right[n_steps] = sum(sign * send(sign * 1000.0, n_steps) > 0 for sign in (1, -1) for _ in range(200))
    print(f"{n_steps} local steps, epsilon 1: the sign of one income is told rightly in {right[n_steps]} of 400 rounds")
sys.exit(not (240 < right[1] < 320 and right[50] == 400))
PY

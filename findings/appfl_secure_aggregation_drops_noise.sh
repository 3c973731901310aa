#!/usr/bin/env bash
# Guess: a client with use_dp, and secure aggregation besides, sends its update with noise and mask: the sum that the server gets of
# all clients has each one's noise.
# Library: appfl 1.12.0, VanillaTrainer (opacus 1.6.0, torch 2.13.0). Date: 2026-11-30.
# Seen: with epsilon 0.01, the Laplace or the Gaussian mechanism, the sums of 20 rounds of two clients are one number, 0.2, which
# is the sum of their updates without noise; without secure aggregation they are 20 numbers between about -100 and 100. Nothing
# warns, neither at the client nor in the update. So the setting that was to protect more has no differential privacy at all.
# Why: noise is added to a copy of the weights; secure aggregation masks the weights themselves.
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

options = {"mode": "step", "num_local_steps": 1, "optim": "SGD", "optim_args": {"lr": 0.1}, "train_batch_size": 8}
clipping = {"clip_grad": True, "clip_value": 1.0, "clip_norm": 1}
others = {"device": "cpu", "train_data_shuffle": True, "logging_id": "client"}
torch.manual_seed(0)


def send(client, income, mechanism, secure):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    privacy = {"use_dp": True, "dp_mechanism": mechanism, "epsilon": 0.01, "use_secure_agg": secure}
    trainer = VanillaTrainer(
        model=model,
        loss_fn=torch.nn.MSELoss(),
        metric=lambda target, output: 0.0,
        train_dataset=torch.utils.data.TensorDataset(torch.ones(8, 1), torch.full((8, 1), income)),
        train_configs=OmegaConf.create({**options, **clipping, **privacy, **others}),
        logger=MagicMock(),
    )
    trainer.client_id = client
    trainer.runtime_context = {"all_client_ids": ["a", "b"], "round_id": 1, "secure_agg_secret": b"shared"}
    trainer.train()
    update = trainer.get_parameters()[0]
    return update["flat"].item() if secure else update["weight"].item()


is_so = True
for mechanism in ("laplace", "gaussian"):
    for secure in (False, True):
        rounds = [[send("a", 5.0, mechanism, secure), send("b", 7.0, mechanism, secure)] for _ in range(20)]
        sums = sorted({round(sum(updates), 4) for updates in rounds})
        print(f"{mechanism}, secure aggregation {secure}: {len(sums)} different sums, from {sums[0]} to {sums[-1]}")
        is_so &= sums == [0.2] if secure else len(sums) == 20 and sums[-1] - sums[0] > 20
sys.exit(not is_so)
PY

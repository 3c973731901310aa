#!/usr/bin/env bash
# Guess: adaptive clipping moves its norm until half of the updates are clipped: it grows as long as all of them are.
# Library: flwr 1.42.0, DifferentialPrivacyServerSideAdaptiveClipping, its defaults. Date: 2026-11-28.
# Seen: with 100 clients whose updates have norms around 1.9, the norm shrinks from 0.1 to 0.005 in 30 rounds, and every
# update is clipped in all of them; from 10, where none is clipped, it grows to about 200.
# Why: the rule of Andrew et al. (2021), C <- C exp(-rate (b - quantile)), takes for b the share of updates that are NOT
# clipped; the wrapper puts in the share of those that are. Noise shrinks or grows with the norm.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "flwr==1.42.0"
HOME="$work" "$work/venv/bin/python" -W ignore - <<'PY' 2> /dev/null
import sys

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # a running server sets them


def reply(update):
    arrays = ArrayRecord({"weight": Array(update)})
    request = Message(RecordDict(), dst_node_id=1, message_type="train")
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})}), reply_to=request)


np.random.seed(0)
updates = np.random.normal(size=(30, 100, 4))
norms = np.linalg.norm(updates, axis=-1)
last = {}
for initial in (0.1, 10.0):
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), noise_multiplier=0.1, num_sampled_clients=100, initial_clipping_norm=initial
    )
    strategy.current_arrays = ArrayRecord({"weight": Array(np.zeros(4))})
    for number, round_updates in enumerate(updates, 1):
        strategy.aggregate_train(number, [reply(update) for update in round_updates])
    last[initial] = strategy.clipping_norm
    print(f"clipping norm {initial}, after 30 rounds {last[initial]:.3g}; median of the updates {np.median(norms):.2f}")
sys.exit(not (last[0.1] < 0.05 and last[10.0] > 20))
PY

#!/usr/bin/env bash
# Guess: inside Flower's wrapper for central differential privacy a client moves the average by at most clipping norm /
# number of sampled clients, which is what the noise is made for, whatever number of examples it reports.
# Library: flwr 1.42.0, DifferentialPrivacyServerSideFixedClipping around FedAvg, without an accountant. Date: 2026-11-28.
# Seen: updates are clipped, then averaged by the numbers of examples that clients report. With clipping norm 1 and 10
# clients one with 1,000 examples, the others with 10, moves the average by 0.917; the noise is made for 0.1. No warning.
# Only with an accountant are unequal weights refused. The client-side and the adaptive wrapper average in the same way.
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
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # a running server sets them


def reply(update, n_examples):
    arrays = ArrayRecord({"weight": Array(np.array(update))})
    metrics = MetricRecord({"num-examples": n_examples})
    request = Message(RecordDict(), dst_node_id=1, message_type="train")
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=request)


moves = {}
for n_examples in (10, 1000):
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=0.0, clipping_norm=1.0, num_sampled_clients=10
    )
    strategy.current_arrays = ArrayRecord({"weight": Array(np.zeros(2))})
    replies = [reply([5.0, 0.0], n_examples)] + [reply([0.0, 0.001], 10) for _ in range(9)]
    moves[n_examples] = strategy.aggregate_train(1, replies)[0]["weight"].numpy()[0]
    print(f"a client with {n_examples} examples moves the average by {moves[n_examples]:.3f}; noise is made for 0.100")
sys.exit(not (abs(moves[10] - 0.1) < 1e-6 and moves[1000] > 0.9))
PY

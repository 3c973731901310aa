#!/usr/bin/env bash
# Guess: an update that LocalDpMod(epsilon=e, delta=d) sends is (e, d)-private: whoever asks for less privacy, as in federated training of
# language models with a local epsilon of 50 or 100, gets what was asked for.
# Library: flwr 1.42.0, LocalDpMod (dp-accounting 0.6.0, numpy 2.4.6). Date: 2026-11-30.
# Seen: at delta 1e-5 the noise that is added for epsilon 1 is enough (0.75 by exact accounting), and that for 5 (4.54). For 10 it gives
# 10.4, for 50 it gives 96, for 100 it gives 300 and for 200 about 1,030. At delta 0.01 epsilon 50 is 166. Nothing warns: the
# constructor only refuses negative numbers, and the log tells the deviation of the noise.
# Why: the deviation is sqrt(2 ln(1.25 / delta)) / epsilon, a formula that is known to hold below 1 only.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "flwr==1.42.0" "dp-accounting==0.6.0" "numpy==2.4.6"
HOME="$work" "$work/venv/bin/python" - <<'PY' 2>"$work/log" || { tail -n 5 "$work/log"; exit 1; }
import sys

import numpy as np
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # a running server sets them
zeros = ArrayRecord({"weight": Array(np.zeros(1_000_000))})


def train(message, context):
    """A client whose update is next to nothing: what it sends is the noise."""
    return Message(RecordDict({"arrays": ArrayRecord({"weight": Array(np.full(1_000_000, 1e-9))})}), reply_to=message)


def measure(epsilon, delta):
    request = Message(RecordDict({"arrays": zeros}), dst_node_id=1, message_type="train")
    sent = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=epsilon, delta=delta)(request, None, train)
    deviation = float(sent.content["arrays"]["weight"].numpy().std())
    accountant = PLDAccountant()
    accountant.compose(GaussianDpEvent(deviation))
    exact = accountant.get_epsilon(delta)
    print(f"asked for epsilon {epsilon} at delta {delta}: noise {deviation:.4f}, epsilon is {exact:.2f}")
    return exact / epsilon


kept = measure(1, 1e-5) < 1 and measure(5, 1e-5) < 1
least = {(10, 1e-5): 1.03, (50, 1e-5): 1.9, (100, 1e-5): 2.9, (200, 1e-5): 5, (50, 0.01): 3.2}
broken = [measure(*case) > ratio for case, ratio in least.items()]
sys.exit(not (kept and all(broken)))
PY

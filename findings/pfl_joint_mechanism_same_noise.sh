#!/usr/bin/env bash
# Guess: a JointMechanism of two Gaussian mechanisms, one for each part of the statistics, adds independent noise to both
# parts: the difference of two noised parts is noised, too.
# Library: pfl 0.6.0 (numpy 1.26.4). Date: 2026-11-29.
# Seen: both parts get the same noise, number for number. The released difference of the parts is the exact difference of
# the clients' sums, whatever epsilon is; with another bound the noise differs by the ratio of the bounds only. A part that
# is known to be zero (a frozen layer) reveals the noise of the other. With seed=None the noises differ, but each
# algorithm of pfl gives every iteration a seed.
# Why: every mechanism is called with the seed of the iteration and starts the same random numbers anew.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pfl==0.6.0" "numpy==1.26.4"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import numpy as np
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.context import CentralContext
from pfl.common_types import Population
from pfl.internal.ops import numpy_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.joint_mechanism import JointMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics

set_framework_module(numpy_ops)


def release(true, false, bound, seed):
    """Noise the sums of both parts as pfl's server does, with noise multiplier 5."""
    joint = JointMechanism(
        {
            "first": (GaussianMechanism(1.0, 5.0), ["positive"]),
            "second": (GaussianMechanism(bound, 5.0), ["negative"]),
        }
    )
    context = CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=10,
        population=Population.TRAIN,
        algorithm_params=None,
        model_train_params=None,
        seed=seed,
    )
    sums = MappedVectorStatistics({"positive": true.copy(), "negative": false.copy()}, weight=1)
    noised, _ = CentrallyAppliedPrivacyMechanism(joint).postprocess_server(
        stats=sums, central_context=context, aggregate_metrics=Metrics()
    )
    return noised["positive"], noised["negative"]


positive = np.random.default_rng(0).normal(size=1000)
negative = np.random.default_rng(1).normal(size=1000)
seed = FederatedAveraging()._get_seed()
errors = {}
for name, bound, seed in (("equal bounds", 1.0, seed), ("bounds 1 and 2", 2.0, seed), ("no seed", 1.0, None)):
    first, second = release(positive, negative, bound, seed)
    noise = (first - positive).std()
    errors[name] = np.abs((first - positive) - (second - negative) / bound).max()
    print(f"{name}: noise {noise:.2f}; largest difference of the two noises, scaled: {errors[name]:.2g}")
still_so = errors["equal bounds"] < 1e-9 and errors["bounds 1 and 2"] < 1e-9 and errors["no seed"] > 1
sys.exit(not still_so)
PY

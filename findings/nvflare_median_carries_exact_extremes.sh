#!/usr/bin/env bash
# Guess: with the recipe for federated statistics, which by default moves each client's smallest and largest value by 10 to 30% before
# the server gets them ("used to protect min/max values"), no message of a client has its exact smallest or largest value.
# Library: nvflare 2.9.0 (fastdigest 0.5.1, pandas 3.0.6, numpy 2.4.6), its simulator. Date: 2026-11-30.
# Seen: if the median is asked for, with a histogram, each client's message has the exact ages of its youngest and its oldest of 400
# patients, while the fields for minimum and maximum are moved, as promised. Quantiles 0 and 1, if they are asked for, stand in
# the server's result file as they are, for each client.
# Why: a median is told with the t-digest that it comes from, whose first and last centroids stand for one record each; the filters
# change only the fields "min" and "max".
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --only-binary fastdigest "nvflare==2.9.0" "fastdigest==0.5.1" "pandas==3.0.6" "numpy==2.4.6"
cd "$work"
cat >parts.py <<'PY'
import json
import os

import numpy as np
import pandas as pd
from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.app_common.app_constant import StatisticsConstants
from nvflare.app_opt.statistics.df.df_core_statistics import DFStatisticsCore
from nvflare.fuel.utils import fobs


class Patients(DFStatisticsCore):
    """400 ages of which each client has one very low and one very high."""

    def initialize(self, fl_ctx=None):
        site = fl_ctx.get_identity_name()
        ages = np.round(np.random.default_rng(int(site[-1])).normal(60, 9, 400), 1)
        ages[:2] = {"site-1": (3.2, 107.3), "site-2": (4.7, 104.9)}[site]
        self.data = {"train": pd.DataFrame({"age": ages})}


class Witness(Filter):
    """Write down what leaves the client, after all filters of the recipe."""

    def process(self, shareable, fl_ctx):
        data = from_shareable(shareable).data
        message = fobs.loads(data[data[StatisticsConstants.STATISTICS_TASK_KEY]])
        seen = {name: message[name]["train"]["age"] for name in ("min", "max", "quantile") if name in message}
        with open(os.path.join(os.environ["SEEN"], f"{fl_ctx.get_identity_name()}.jsonl"), "a") as file:
            file.write(json.dumps(seen, default=float) + "\n")
        return shareable
PY
SEEN=$work PYTHONPATH=$work "$work/venv/bin/python" -W ignore - >log 2>&1 <<'PY' || { tail -n 20 log; exit 1; }
from nvflare.recipe.fedstats import FedStatsRecipe
from nvflare.recipe.sim_env import SimEnv
from parts import Patients, Witness

sites = ["site-1", "site-2"]
recipe = FedStatsRecipe(
    name="ages",
    stats_output_path="statistics/ages.json",
    sites=sites,
    statistic_configs={"count": {}, "histogram": {"*": {"bins": 10}}, "quantile": {"*": [0.5]}},
    stats_generator=Patients(),
)
recipe.add_client_output_filter(Witness(), tasks=["fed_stats"])
recipe.execute(SimEnv(clients=sites, num_threads=2, workspace_root="simulation"))
PY
"$work/venv/bin/python" - <<'PY'
import json
import sys
from pathlib import Path

still = True
for site, extremes in (("site-1", (3.2, 107.3)), ("site-2", (4.7, 104.9))):
    message = {}
    for line in Path(f"{site}.jsonl").read_text().splitlines():
        message |= json.loads(line)
    centroids = [(part["m"], part["c"]) for part in message["quantile"]["digest_coord"]["centroids"]]
    print(f"{site}: true {extremes}; told {message['min']:.1f} and {message['max']:.1f}; first and last centroid {centroids[0]}, {centroids[-1]}")
    moved = message["min"] < 0.95 * extremes[0] and message["max"] > 1.05 * extremes[1]
    still &= moved and centroids[0] == (extremes[0], 1.0) and centroids[-1] == (extremes[1], 1.0)
sys.exit(not still)
PY

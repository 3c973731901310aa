#!/usr/bin/env bash
# Guess: the false-negative rate that get_beta_from_zcdp() promises holds for every mechanism with this rho, so it is at most that of
# the Gaussian mechanism with this rho, which is known exactly.
# Library: riskcal 1.5.1 (dp-accounting 0.6.0, numpy 2.1.3, scipy 1.17.1). Date: 2026-12-01.
# Seen: for small rho and a small false-positive rate it promises perfect privacy, to the last digit. With rho 0.005, the noise of ten
# times the sensitivity, at 1% it promises 0.99, while the best test against the Gaussian mechanism misses 0.987; at 0.1% it
# promises 0.999, while that test misses 0.9986. With rho 0.05 (three times) the same at 0.001%. At 10% it is right.
# Why: it takes the best of the orders from 1 to 1,024. At orders that are too high for the rate (above 155 at 1%, above 103 at 0.1%)
# the rate to the power of 1 - order passes the largest float, and the result is that of no leak instead of none. Orders for which
# rho is so large that they are of no use are left out before, so with a larger rho this is not reached.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "riskcal==1.5.1" "dp-accounting==0.6.0" "numpy==2.1.3" "scipy==1.17.1"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

from riskcal.analysis import get_beta_from_rdp, get_beta_from_zcdp
from scipy.stats import norm

perfect = []
for rho, rate in ((0.005, 0.001), (0.005, 0.01), (0.05, 0.00001), (0.005, 0.1), (0.05, 0.01)):
    promised = get_beta_from_zcdp(rho, rate)
    gaussian = norm.cdf(norm.ppf(1 - rate) - (2 * rho) ** 0.5)
    print(f"rho {rho}, false-positive rate {rate}: promised {promised:.7f}, Gaussian mechanism {gaussian:.7f}")
    if promised > gaussian:
        perfect.append((rho, rate, abs(promised - (1 - rate)) < 1e-12))
orders = {}
for order in (103, 105, 150, 160):
    orders[order] = get_beta_from_rdp(0.005 * order, 0.01, order), get_beta_from_rdp(0.005 * order, 0.001, order)
    print(f"order {order}, rho 0.005: {orders[order][0]:.4f} at 1%, {orders[order][1]:.4f} at 0.1%")
jumps = orders[150][0] < 0.98 < 0.99 == round(orders[160][0], 9) and orders[103][1] < 0.999 == round(orders[105][1], 9)
sys.exit(not (perfect == [(0.005, 0.001, True), (0.005, 0.01, True), (0.05, 0.00001, True)] and jumps))
PY

#!/usr/bin/env bash
# Guess: the two accountants give one Gaussian event nearly the same epsilon, under each relation of neighbours; RDP, whose bound is the
# looser, never a smaller one than PLD.
# Library: dp-accounting 0.6.0. Date: 2026-12-01.
# Seen: under REPLACE_ONE, GaussianDpEvent(1.0) has epsilon 10.00 by PLDAccountant and 4.73 by RdpAccountant at delta 1e-5; ten
# releases of multiplier 3 have 10.67 and 5.02. Under ADD_OR_REMOVE_ONE they are 4.38 and 4.73. If records are clipped to norm 1 and
# the noise has deviation 1, replacing one moves the sum by 2: the exact epsilon is 10.00, so RDP promises less than half of it, in
# silence. For LaplaceDpEvent(1.0) RDP gives 1.00 under both relations, PLD refuses REPLACE_ONE.
# Why: PLD doubles the sensitivity for a replaced record; RDP takes the multiplier to be relative to it already.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "dp-accounting==0.6.0" "scipy==1.17.1" "numpy==2.4.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import math
import sys

from dp_accounting import GaussianDpEvent, LaplaceDpEvent, NeighboringRelation, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

relations = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
events = {
    "Gaussian, multiplier 1": (GaussianDpEvent(1.0), 1),
    "10 Gaussians, multiplier 3": (SelfComposedDpEvent(GaussianDpEvent(3.0), 10), math.sqrt(10) / 3),
    "Laplace, multiplier 1": (LaplaceDpEvent(1.0), None),
}


def compute_exact(mu, delta=1e-5):
    def excess(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return brentq(excess, 0, 50)


def account(accountant, event, relation):
    try:
        return accountant(neighboring_relation=relation).compose(event).get_epsilon(1e-5)
    except Exception as error:
        return type(error).__name__


seen = {}
for name, (event, mu) in events.items():
    for relation, distance in zip(relations, (1, 2)):
        values = [account(accountant, event, relation) for accountant in (PLDAccountant, RdpAccountant)]
        exact = f", exact for noise over the clipping norm {compute_exact(distance * mu):.2f}" if mu else ""
        shown = [value if isinstance(value, str) else f"{value:.2f}" for value in values]
        print(f"{name}, {relation.name}: PLD {shown[0]}, RDP {shown[1]}{exact}")
        seen[name[:2], relation.name] = shown
    print()
is_so = seen["Ga", "ADD_OR_REMOVE_ONE"] == ["4.38", "4.73"] and seen["Ga", "REPLACE_ONE"] == ["10.00", "4.73"]
is_so &= seen["10", "REPLACE_ONE"] == ["10.67", "5.02"] and seen["La", "REPLACE_ONE"][1] == "1.00"
sys.exit(not is_so)
PY

#!/usr/bin/env bash
# Guess: for one release with Laplace noise of scale 1, which is purely 1-private, the accountants give epsilon 1 at delta 0.
# Library: dp-accounting 0.6.0. Date: 2026-11-30.
# Seen: infinity, by PLDAccountant and RdpAccountant, at scales 0.5, 1 and 4; at delta 1e-9 1.00 and 1.01. Who looks up whether a
# mechanism keeps its pure claim reads that it keeps none.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "dp-accounting==0.6.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import math
import sys

from dp_accounting import LaplaceDpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

seen = []
for make in (PLDAccountant, RdpAccountant):
    for scale in (0.5, 1, 4):
        accountant = make(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant.compose(LaplaceDpEvent(scale))
        pure, small = accountant.get_epsilon(0), accountant.get_epsilon(1e-9)
        seen.append((pure == math.inf, abs(small - 1 / scale) < 0.02))
        print(f"{make.__name__}, scale {scale}: epsilon {pure:.2f} at delta 0, {small:.2f} at 1e-9")
sys.exit(seen != [(True, True)] * 6)
PY

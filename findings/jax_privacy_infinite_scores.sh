#!/usr/bin/env bash
# Guess: a score of +infinity (a likelihood ratio over 0, for instance) counts as the highest score.
# Library: jax-privacy 2.0.0, CanaryScoreAuditor. Date: 2026-11-28.
# Seen: it is left out without a word: thresholds end at infinity and a record counts if its score is below the last of them.
# Of 200 members 100 at +infinity, the rest like the 200 non-members: TPR at FPR 1% is 0.012 and the epsilon bound 0; with
# 1e9 in place of infinity TPR is 0.506 and the bound 2.68. NaN is left out in the same way.
# Exits 1 if infinite scores count as the highest, or are refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax-privacy==2.0.0
"$folder/venv/bin/python" - <<'PY'
import sys
import numpy as np
from jax_privacy.auditing import CanaryScoreAuditor

rates = {}
for highest in (np.inf, 1e9, np.nan):
    members, others = np.random.default_rng(0).normal(size=(2, 200))
    members[:100] = highest
    auditor = CanaryScoreAuditor(members, others)
    rates[highest] = float(auditor.tpr_at_given_fpr(0.01))
    print(f"100 of 200 members at {highest}: TPR at FPR 1% {rates[highest]:.3f}, "
          f"epsilon bound {float(auditor.epsilon_clopper_pearson(0.05)):.2f}")
sys.exit(int(rates[np.inf] > 0.4))
PY

#!/usr/bin/env bash
# Guess: optax's differentially_private_aggregate, made anew for two trainings without a key, adds other noise in each, and
# on an empty batch of Poisson sampling it releases noise and nothing else.
# Library: optax 0.2.8 (with jax 0.10.2), 2026-11-28.
# Seen: without a key it takes jax.random.key(0): two trainings get the same noise, number for number, so their difference
# has none (a warning says "Specifying a key will be required in optax 0.2.7"; 0.2.8 does not require it). On an empty batch
# every released number is infinite or undefined, since sum and noise are divided by the number of records drawn.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "optax==0.2.8" "jax==0.10.2"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import sys

import jax.numpy as jnp
from optax.contrib import differentially_private_aggregate


def release(gradients, *key):
    made = differentially_private_aggregate(1.0, 1.0, *key)
    return made.update(gradients, made.init(None))[0]


batch, other = jnp.full((8, 5), 0.1), jnp.full((8, 5), -0.1)
difference = release(batch) - release(other)
print("without a key, two trainings' difference:", difference, "(of their gradients: 0.2)")
keyed = release(batch, 1) - release(other, 2)
print("with keys of their own:", keyed)
empty = release(jnp.zeros((0, 5)), 1)
print("of an empty batch:", empty)
same = bool(jnp.allclose(difference, 0.2, atol=1e-5)) and not bool(jnp.allclose(keyed, 0.2, atol=1e-2))
sys.exit(not (same and not bool(jnp.isfinite(empty).any())))
PY

#!/usr/bin/env bash
# Guess: noise that is drawn for gradients in bfloat16 is normal noise, rounded: among a million numbers some are beyond 4.4
# standard deviations.
# Library: jax 0.10.2, by optax 0.2.8 (differentially_private_aggregate) and jax-privacy 2.0.0 (gaussian_privatizer), both
# with a key. Date: 2026-11-29.
# Seen: the noise of both has 128 different values, and none is beyond 2.9 standard deviations; the least is -2.89, the
# greatest 2.52. A released number outside proves that a record was there, so no epsilon with a small delta holds.
# In float32 the greatest of a million is above 4.4; torch 2.13.0's noise in bfloat16 has thousands of values up to 4.9.
# jax-privacy's gaussian_privatizer(dtype=jnp.float32) draws in float32.
# Why: jax.random.normal inverts the normal distribution at a uniform number of the same type, which has 7 random bits.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "jax-privacy==2.0.0" "optax==0.2.8" "jax[cpu]==0.10.2"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.noise_addition import gaussian_privatizer

SIZE = 1_000_000


def add_by_optax(zeros):
    transform = optax.contrib.differentially_private_aggregate(
        l2_norm_clip=1.0, noise_multiplier=1.0, key=jax.random.key(1)
    )
    noise, _ = transform.update({"w": zeros[None]}, transform.init({"w": zeros}))
    return noise["w"]


def add_by_jax_privacy(zeros, **options):
    transform = gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(1), **options)
    return transform.update(zeros, transform.init(zeros))[0]


def describe(name, noise):
    noise = np.asarray(noise.astype(jnp.float32))
    values = len(np.unique(noise))
    print(f"{name}: {values} different values, from {noise.min():.3f} to {noise.max():.3f}")
    return values, max(noise.max(), -noise.min())


half, whole = jnp.zeros(SIZE, jnp.bfloat16), jnp.zeros(SIZE, jnp.float32)
cut = [describe("optax in bfloat16", add_by_optax(half))]
cut.append(describe("jax-privacy in bfloat16", add_by_jax_privacy(half)))
fine = [describe("optax in float32", add_by_optax(whole))]
fine.append(describe("jax-privacy in bfloat16, dtype=float32", add_by_jax_privacy(half, dtype=jnp.float32)))
kept = all(values == 128 and largest < 2.9 for values, largest in cut)
sys.exit(not (kept and all(largest > 4.4 for _, largest in fine)))
PY

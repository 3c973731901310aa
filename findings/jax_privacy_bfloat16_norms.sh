#!/usr/bin/env bash
# Guess: clip_pytree() and clipped_grad() keep to the bound that their "Formal Guarantees" name, but for rounding, whatever
# the type of the gradients.
# Library: jax-privacy 2.0.0 (optax 0.2.8, jax 0.10.2). Date: 2026-11-29.
# Seen: in bfloat16 the norm of a gradient of 1,000 tensors is told as 16 instead of 31.6, and the record moves the sum by
# 1.98 with bound 1; with 3,000 tensors by 3.42. With the 291 tensors of a Llama of 8 billion parameters it is 1.07. The noise is
# made for 1, so epsilon doesn't hold. optax's own per_example_global_norm_clip() gives the same 1.98 and 1.07.
# clipped_grad(dtype=jnp.float32) and float32 gradients keep the bound.
# Why: the tensors' squared norms are added one by one in bfloat16, where 256 + 1 = 256.
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
import optax
from jax_privacy.clipping import clipped_grad


def measure(n_tensors, gradient_type, **options):
    params = {f"layer{i}": jnp.zeros(64, gradient_type) for i in range(n_tensors)}

    def loss(params, record):
        return sum(jnp.sum(tensor * record) for tensor in params.values())

    clipped = clipped_grad(loss, batch_argnums=1, keep_batch_dim=False, l2_clip_norm=1.0, **options)
    moved = clipped(params, jnp.full((1, 64), 0.125, gradient_type))
    return compute_norm(moved)


def compute_norm(tensors):
    squares = [jnp.sum(tensor.astype(jnp.float32) ** 2) for tensor in jax.tree.leaves(tensors)]
    return float(jnp.sqrt(jnp.sum(jnp.array(squares))))


seen = {}
for n_tensors in (100, 291, 1000):
    seen[n_tensors] = measure(n_tensors, jnp.bfloat16)
    print(f"{n_tensors} tensors in bfloat16, bound 1: one record moves the sum by {seen[n_tensors]:.3f}")
exact = measure(1000, jnp.float32)
cast = measure(1000, jnp.bfloat16, dtype=jnp.float32)
print(f"1000 tensors: {exact:.3f} in float32, {cast:.3f} in bfloat16 with dtype=float32")
gradients = [jnp.full((1, 64), 0.125, jnp.bfloat16)] * 1000
by_optax = compute_norm(optax.per_example_global_norm_clip(gradients, 1.0)[0])
print(f"1000 tensors in bfloat16 by optax: {by_optax:.3f}")
sys.exit(by_optax < 1.9 or seen[291] < 1.05 or seen[1000] < 1.9 or abs(exact - 1) > 0.01 or abs(cast - 1) > 0.01)
PY

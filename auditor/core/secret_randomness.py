"""Derive random numbers from the secret: pure functions of (seed, target, recipe, secret).

Results therefore do not depend on batch size, number of workers or the place of an interruption.
"""

from __future__ import annotations

import hashlib

import numpy as np

from auditor.core.arrays import Floats

# Uniforms of a draw: the token; for a randomised defense also the subset size and the member.
CHANNELS = 3


def make_keyed_generator(*key: str | int) -> np.random.Generator:
    """Return a counter-based generator for this key; equal keys give equal streams everywhere."""
    # With the type, because 1 and "1" are two keys; the unit separator separates ("a", "bc") from
    # ("ab", "c").
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw_secret_uniforms(samples: int, length: int, *key: str | int) -> Floats:
    """Return (samples, length, CHANNELS) uniforms in [0, 1) of a secret.

    The first k samples equal those of a run with k samples.
    """
    return make_keyed_generator(*key).random((samples, length, CHANNELS))

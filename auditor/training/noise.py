"""Add secret Gaussian noise from a cryptographic stream, rounded to a data-independent grid.

An epsilon assumes noise that nobody can guess and that is Gaussian down to the last bit.

A generator's seed breaks the first assumption. On a CPU, torch's generator keeps only 32 bits of
any seed, so a step's noise is one of 2^32 known vectors, and an inner product with released weights
identifies it. Opacus uses this generator by default, with the same weakness on a CPU. On a GPU,
torch's generator keeps 64 bits. Neither generator is cryptographic. Floating point breaks the
second assumption, for Gaussian as for Laplace noise: the set of possible sums depends on the value
to which the noise was added (Mironov 2012).

The stream is ChaCha20 (RFC 8439). Its key is 256 bits from the operating system and its nonce is
the step. So anyone who has the key can draw any step again, and nobody else can if ChaCha20 is
secure as a cipher. A 128-bit counter generator (Philox) would be as hard to search, but was never
designed to hide its state. Like Mironov's snapping, `add_gaussian_noise` rounds the noisy sum, not
the noise, to a grid that does not depend on the data. So the release is a function of the outcome
of a nearly ideal Gaussian, and its last bits reveal nothing.
"""

from __future__ import annotations

import hashlib
import math

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from auditor.training.clipping import choose_sum_device

# Values at once (even): they fit into the cache, or fill the device.
_PIECE = {"cpu": 1 << 16, "cuda": 1 << 22}
# Spacing, relative to the power of two below the deviation: float32 holds 256 deviations exactly.
_GRID = 2.0**-16


class NoiseStream:
    """Stream of standard Gaussian values for one step, determined by (key, step)."""

    def __init__(self, key: str, step: int) -> None:
        secret = hashlib.sha256(f"noise\x1f{key}".encode()).digest()
        nonce = bytes(4) + step.to_bytes(12, "little")  # four bytes of block counter, from 0
        self._cipher = Cipher(algorithms.ChaCha20(secret, nonce), mode=None).encryptor()

    def draw_standard_normals(self, count: int, device: torch.device) -> Tensor:
        """Draw (count,) standard normal float64 values by Box-Muller.

        Their absolute values are at most 9.4, because they come from words of 63 random bits. A
        true Gaussian value is larger with probability 5e-21.
        """
        # Encrypting zeros gives the cipher's stream; each call continues after the previous one.
        n_bytes = 8 * (count + count % 2)
        words = torch.frombuffer(bytearray(self._cipher.update(bytes(n_bytes))), dtype=torch.int64)
        integers = words.to(device) & (2**63 - 1)
        # + 0.5: never 0, whose logarithm is infinite.
        uniform = integers.double().add_(0.5).mul_(2.0**-63).view(-1, 2)
        radius = uniform[:, 0].log().mul_(-2).sqrt_()
        angle = uniform[:, 1] * (2 * math.pi)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1).view(-1)[:count]


def add_gaussian_noise(total: Tensor, deviation: float, stream: NoiseStream) -> Tensor:
    """Add Gaussian noise to `total`, and round the sum to a grid (`compute_grid_spacing`).

    `deviation` is the standard deviation of the noise; 0 adds none. The result has the dtype of
    `total`.
    """
    if deviation == 0:
        return total.clone()
    device = choose_sum_device(total.device)
    grid = compute_grid_spacing(deviation)
    pieces = []
    for piece in total.reshape(-1).split(_PIECE[device.type]):
        noise = stream.draw_standard_normals(len(piece), device).mul_(deviation)
        noisy = piece.to(device).double() + noise
        pieces.append(noisy.div_(grid).round_().mul_(grid).to(total))
    return torch.cat(pieces).view(total.shape)


def compute_grid_spacing(deviation: float) -> float:
    """Return the unit to which sums are rounded: a power of two, 2^-17 to 2^-16 deviations."""
    return float(2.0 ** math.floor(math.log2(deviation))) * _GRID

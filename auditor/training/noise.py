"""Secret Gaussian noise: from a cryptographic stream, and released on a grid that its floating point cannot betray.

An epsilon supposes noise that nobody can guess and that is Gaussian down to the last bit. A generator's seed breaks the
first: torch's on a CPU keeps 32 bits of it, whatever it is given, so that all noise a step can have is one of 2^32
known vectors, and released weights single it out by an inner product. (Opacus draws from it by default, and so has the
same weakness on a CPU; torch's on a GPU keeps 64 bits, and neither is cryptographic.) Floating point breaks the second:
which sums can occur depends on what the noise was added to (Mironov 2012), for Gaussians as for Laplace's.

The stream is ChaCha20 (RFC 8439): its key 256 bits of the operating system's, the step its nonce, so that any step can
be drawn again by whoever holds the key, and by nobody else under the assumption that everything encrypted rests on. A
128-bit counter generator (Philox) would be as hard to search, but was never meant to be hard to see through. Like
Mironov's snapping, `add_secret_gaussian_noise_on_grid` rounds the noisy sum, not the noise, to a grid that does not
depend on the data: what is released is a function of an (all but) ideal Gaussian's outcome, and its last bits hold
nothing.
"""

from __future__ import annotations

import hashlib
import math

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from auditor.training.clipping import device_for_float64_gradient_sums

_PIECE = {"cpu": 1 << 16, "cuda": 1 << 22}  # values at once (even): they stay in the cache, or fill the device
_GRID = 2.0**-16  # spacing, of the power of two below the deviation: float32 holds 256 deviations of it exactly


class NoiseStream:
    """The standard Gaussian values of one step, one after another: a function of (key, step) and of nothing else."""

    def __init__(self, key: str, step: int) -> None:
        secret = hashlib.sha256(f"noise\x1f{key}".encode()).digest()
        nonce = bytes(4) + step.to_bytes(12, "little")  # four bytes of block counter, from 0
        self._cipher = Cipher(algorithms.ChaCha20(secret, nonce), mode=None).encryptor()

    def standard_normal_values(self, count: int, device: torch.device) -> Tensor:
        """(count,) float64 by Box-Muller, two values of two 64-bit words, whose lowest 63 bits count.

        No value is larger than 9.4, which an ideal one is with probability 5e-21.
        """
        # Zeros encrypted are the cipher's stream itself; each call goes on where the one before ended.
        words = torch.frombuffer(bytearray(self._cipher.update(bytes(8 * (count + count % 2)))), dtype=torch.int64)
        # + 0.5: never 0, whose logarithm is infinite
        uniform = (words.to(device) & (2**63 - 1)).double().add_(0.5).mul_(2.0**-63).view(-1, 2)
        radius = uniform[:, 0].log().mul_(-2).sqrt_()
        angle = uniform[:, 1] * (2 * math.pi)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1).view(-1)[:count]


def add_secret_gaussian_noise_on_grid(total: Tensor, deviation: float, stream: NoiseStream) -> Tensor:
    """The tensor plus Gaussian noise of this standard deviation (0: none), rounded to the grid of `noise_grid_spacing`.

    In the tensor's own dtype.
    """
    if deviation == 0:
        return total.clone()
    where = device_for_float64_gradient_sums(total.device)
    grid, pieces = noise_grid_spacing(deviation), []
    for piece in total.reshape(-1).split(_PIECE[where.type]):
        noisy = piece.to(where).double() + stream.standard_normal_values(len(piece), where).mul_(deviation)
        pieces.append(noisy.div_(grid).round_().mul_(grid).to(total))
    return torch.cat(pieces).view(total.shape)


def noise_grid_spacing(deviation: float) -> float:
    """Spacing of the grid that noisy sums are rounded to: a power of two, 2^-17 to 2^-16 of the deviation."""
    return float(2.0 ** math.floor(math.log2(deviation))) * _GRID

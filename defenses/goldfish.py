"""Implement the Goldfish loss (Hans et al. 2024), which excludes some tokens from the loss.

In all copies of a text, the same tokens are excluded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.plugins.options import Count, Limits
from auditor.plugins.trainer import TrainingJob
from auditor.training import loss_masks
from auditor.training.variants import Variant


@dataclass(frozen=True)
class Goldfish(Variant):
    """Fine-tune with the Goldfish loss, which excludes one token in `k`. No claim.

    This training makes no privacy claim.

    mask: `static` excludes every k-th token of a record. `hash` excludes a token from the loss if a
    hash of the `width` tokens before it is 0 modulo k (Hans et al. 2024, Sec. 3.1; k=4 and width 13
    are the authors'). So all copies of a passage exclude the same tokens, and a record's first
    `width` tokens are never excluded. The authors' code differs from their paper: it hashes the
    window that ends with the token itself.
    """

    name = "goldfish"
    title = "Goldfish loss"
    k: Annotated[int, Limits(2)] = 4
    width: Count = 13
    mask: Literal["hash", "static"] = "hash"

    def select_sequences(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        sequences = list(map(loss_masks.apply_loss_mask, job.records))
        masked = list(map(self.mask_dropped_tokens, sequences))
        n_before = _count_loss_tokens(sequences)
        n_after = _count_loss_tokens(masked)
        if n_before and n_after == n_before:
            raise AuditError(
                f"expected records of more than width={self.width} tokens for the Goldfish loss, "
                "got none in which it leaves a token out"
            )
        n_dropped = f"{n_before - n_after:,} of {n_before:,} tokens"
        return masked, (f"the Goldfish loss leaves out {n_dropped} ({1 - n_after / n_before:.1%})",)

    def mask_dropped_tokens(self, sequence: Tokens) -> Tokens:
        """Mask the record's tokens that are excluded from the loss (see `training.loss_masks`)."""
        dropped = set(range(self.k - 1, len(sequence), self.k))
        if self.mask == "hash":
            # Hash unmasked ids, so that an earlier mask does not change the hash of a passage.
            dropped = set(self._hash_dropped_positions(loss_masks.remove_loss_mask(sequence)))
        tokens = list(sequence)
        for i in dropped:
            if tokens[i] >= 0:
                tokens[i] = ~tokens[i]
        return tuple(tokens)

    def _hash_dropped_positions(self, tokens: Tokens) -> Iterator[int]:
        ids = np.array(tokens, dtype="<i8").tobytes()  # little-endian: equal on all machines
        for i in range(self.width, len(tokens)):
            # 8 bytes an id; the window ends before token i.
            digest = hashlib.blake2b(ids[8 * (i - self.width) : 8 * i], digest_size=8).digest()
            if int.from_bytes(digest, "little") % self.k == 0:
                yield i


def _count_loss_tokens(sequences: Sequence[Tokens]) -> int:
    return sum(token >= 0 for sequence in sequences for token in sequence)

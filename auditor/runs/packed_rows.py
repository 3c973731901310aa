"""Whether records that were packed into one row are recited better after the row's earlier records.

Trainers mark where each record of a row begins, and a model is to read each by itself. Some
families take no notice: OPT, MPT, Falcon and BLOOM of transformers 5.23 make their positions of the
mask or of none, so that each record was learnt after all earlier ones of its row. Knows no attack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from auditor.core.nouns import Secret, Tokens, evenly_spaced_secrets
from auditor.core.result import Doubt
from auditor.models.base import LanguageModel
from auditor.models.memory import group_equal_shapes
from auditor.runs.likeliest_reading import lower_bound_of_mean_nll_gain

RECORDS = 64  # that are read in each context, at most
_AT_ONCE = 16


@dataclass(frozen=True)
class _Recitation:
    """is_greedy: (n,), whether each suffix is the most likely token all along; log_prob: (n,) nats
    of all of it."""

    is_greedy: NDArray[np.bool_]
    log_prob: NDArray[np.float64]

    def __str__(self) -> str:
        probability = float(np.exp(self.log_prob).mean())
        return (
            f"{int(self.is_greedy.sum())} of {len(self.is_greedy)} (mean probability "
            f"{probability:.1%})"
        )


def compare_packed_records(
    model: LanguageModel, secrets: Sequence[Secret], earlier: Mapping[str, Tokens]
) -> tuple[str, tuple[Doubt, ...]]:
    """Return a sentence on records after the earlier ones of their row, and a doubt if they are
    recited better there.

    Text of the same kind may help any model, so the row's earlier records must also help more than
    those of another row. model: with the prefix token; earlier: by secret id, the tokens that stood
    before it in its row. The sentence is "" if fewer than three records have any that fit.
    """
    chosen = _records_to_compare(model, secrets, earlier)
    if len(chosen) < 3:
        return "", ()
    before = [earlier[secret.id] for secret in chosen]
    by_itself = _recite(model, chosen, [()] * len(chosen))
    in_row = _recite(model, chosen, before)
    half = len(chosen) // 2
    elsewhere = _recite(model, chosen, before[half:] + before[:half])
    counts = (
        f"after the earlier records of their row greedy decoding recites {in_row}; asked by "
        f"themselves, as here, {by_itself}"
    )
    if not (_is_higher(in_row, by_itself) and _is_higher(in_row, elsewhere)):
        return f"packed rows: {counts}: no difference that the row explains", ()
    sentence = (
        f"Packed rows: {counts}. The model learnt the records of a row together: the counts here "
        "are too low."
    )
    return f"packed rows: {counts}", (Doubt("text form", sentence),)


def _records_to_compare(
    model: LanguageModel, secrets: Sequence[Secret], earlier: Mapping[str, Tokens]
) -> list[Secret]:
    room = model.max_positions
    longest = max(map(len, earlier.values()), default=0)
    fitting = [
        secret
        for secret in secrets
        if secret.id in earlier
        and (room is None or longest + len(secret.prefix + secret.suffix) <= room)
    ]
    return evenly_spaced_secrets(fitting, RECORDS)


@torch.no_grad()
def _recite(
    model: LanguageModel, secrets: Sequence[Secret], before: Sequence[Tokens]
) -> _Recitation:
    """Score each suffix after these tokens and its prefix."""
    asked = [
        replace(one, prefix=tokens + one.prefix)
        for one, tokens in zip(secrets, before, strict=True)
    ]
    is_greedy, log_prob = np.zeros(len(asked), bool), np.zeros(len(asked))
    for indices in group_equal_shapes(
        [(len(one.prefix), len(one.suffix)) for one in asked], _AT_ONCE
    ):
        prefixes = torch.tensor([asked[i].prefix for i in indices], device=model.device)
        suffixes = torch.tensor([asked[i].suffix for i in indices], device=model.device)
        parts = list(model.teacher_forced_distributions(prefixes, suffixes))
        greedy = [(distribution.argmax(-1) == tokens).all(-1) for tokens, distribution in parts]
        likely = [
            distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            for tokens, distribution in parts
        ]
        is_greedy[indices] = torch.cat(greedy).cpu().numpy()
        log_prob[indices] = torch.cat(likely).double().sum(-1).cpu().numpy()
    return _Recitation(is_greedy, log_prob)


def _is_higher(left: _Recitation, right: _Recitation) -> bool:
    """Whether the log-probabilities of the left are significantly higher, paired by record."""
    difference = left.log_prob - right.log_prob
    # -inf, of a token that a model never writes, makes no mean.
    return bool(np.isfinite(difference).all()) and lower_bound_of_mean_nll_gain(difference, 1) > 0

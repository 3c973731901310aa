"""Test if a model recites a packed record better after the earlier records of its training row.

Trainers mark where each record of a row starts, so that a model reads each record separately, but
some model families ignore these marks. In transformers 5.23, OPT, MPT, Falcon, BLOOM, Mamba, Mamba
2, Jamba and RecurrentGemma let a record see all earlier records of its row. Falcon with rotary
positions and Llama with `use_cache=True` do so too, but restart positions at each record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from auditor.core.arrays import Bools, Floats
from auditor.core.nouns import Secret, Tokens, select_evenly_spaced
from auditor.core.result import Doubt
from auditor.models.base import LanguageModel, ReadsPositions
from auditor.plugins.probe import score_greedily
from auditor.runs.likeliest_reading import bound_mean_gain

RECORDS = 64  # most records read in each context
_AT_ONCE = 16


@dataclass(frozen=True)
class _Recitation:
    """Scores of n suffixes.

    Args:
        is_greedy: True if every token of the suffix is the most likely one; of shape (n,).
        log_prob: log-probability of the whole suffix, in nats; of shape (n,).
    """

    is_greedy: Bools
    log_prob: Floats

    def __str__(self) -> str:
        probability = float(np.exp(self.log_prob).mean())
        return (
            f"{int(self.is_greedy.sum())} of {len(self.is_greedy)} (mean probability "
            f"{probability:.1%})"
        )


def compare_packed_records(
    model: LanguageModel, secrets: Sequence[Secret], earlier: Mapping[str, Sequence[Tokens]]
) -> tuple[str, tuple[Doubt, ...]]:
    """Compare how well a model recites records with and without the earlier records of their row.

    If the earlier records help, the model learnt the records of a row together, and an audit of
    single records finds too little. Similar text may help any model, so the earlier records must
    also help more than those of a different row.

    Args:
        model: the model, wrapped with the prefix token.
        secrets: the records.
        earlier: for each secret id, the texts before the record in its row, followed by the start
            of the record itself.

    Returns:
        A sentence with the counts; "" if fewer than three records have earlier texts that fit.
        A doubt if the earlier records help; otherwise ().
    """
    chosen = _choose_compared_records(model, secrets, earlier)
    if len(chosen) < 3:
        return "", ()
    before = [tuple(earlier[secret.id]) for secret in chosen]
    half = len(chosen) // 2
    other_rows = before[half:] + before[:half]
    by_itself = _recite(model, chosen, [()] * len(chosen))
    readings = [("", _recite(model, chosen, before), _recite(model, chosen, other_rows))]
    restarted = _recite_positions(model, chosen, before)
    restarted_elsewhere = _recite_positions(model, chosen, other_rows)
    if restarted is not None and restarted_elsewhere is not None:
        readings.append((", each record at positions from 0 on,", restarted, restarted_elsewhere))
    label, in_row, elsewhere = max(readings, key=lambda reading: reading[1].log_prob.mean())
    counts = (
        f"after the earlier records of their row{label} greedy decoding recites {in_row}; asked by "
        f"themselves, as here, {by_itself}"
    )
    if not all(_is_higher(in_row, less, len(readings)) for less in (by_itself, elsewhere)):
        return f"packed rows: {counts}: no difference that the row explains", ()
    sentence = (
        f"Packed rows: {counts}. The model learnt the records of a row together: the counts here "
        "are too low."
    )
    return f"packed rows: {counts}", (Doubt("text form", sentence),)


@torch.no_grad()
def _recite_positions(
    model: LanguageModel, secrets: Sequence[Secret], before: Sequence[Sequence[Tokens]]
) -> _Recitation | None:
    """Score each suffix after the texts in `before`, with position ids that restart in each text.

    Return None if the model accepts no position ids.
    """
    if not isinstance(model, ReadsPositions):
        return None
    is_greedy = np.zeros(len(secrets), bool)
    log_prob = np.zeros(len(secrets))
    for i, (secret, texts) in enumerate(zip(secrets, before, strict=True)):
        *earlier, beginning = texts
        row = [*earlier, beginning + secret.tokens]
        positions = list(chain.from_iterable(range(len(text)) for text in row))
        distribution = model.log_probs_at_positions(
            torch.tensor([list(chain.from_iterable(row))], device=model.device),
            torch.tensor([positions], device=model.device),
            len(secret.suffix) + 1,
        )
        if distribution is None:
            return None
        tokens = torch.tensor(secret.suffix, device=model.device)
        log_probs = distribution[0, :-1]
        is_greedy[i] = bool((log_probs.argmax(-1) == tokens).all())
        log_prob[i] = float(log_probs.gather(-1, tokens.unsqueeze(-1)).double().sum())
    return _Recitation(is_greedy, log_prob)


def _choose_compared_records(
    model: LanguageModel, secrets: Sequence[Secret], earlier: Mapping[str, Sequence[Tokens]]
) -> list[Secret]:
    room = model.max_positions
    longest = max((sum(map(len, texts)) for texts in earlier.values()), default=0)
    fitting = [secret for secret in secrets if secret.id in earlier]
    if room is not None:
        fitting = [secret for secret in fitting if longest + len(secret.tokens) <= room]
    return select_evenly_spaced(fitting, RECORDS)


def _recite(
    model: LanguageModel, secrets: Sequence[Secret], before: Sequence[Sequence[Tokens]]
) -> _Recitation:
    """Score each suffix after the texts in `before` and then the secret's prefix."""
    extended = []
    for secret, texts in zip(secrets, before, strict=True):
        tokens = tuple(chain.from_iterable(texts))
        extended.append(replace(secret, prefix=tokens + secret.prefix))
    is_greedy = np.zeros(len(extended), bool)
    log_prob = np.zeros(len(extended))
    indices = {secret.id: i for i, secret in enumerate(extended)}
    for scores, recited in score_greedily(model, extended, _AT_ONCE):
        is_greedy[list(map(indices.__getitem__, recited))] = True
        for score in scores:
            log_prob[indices[score.secret]] = sum(score.log_probs)
    return _Recitation(is_greedy, log_prob)


def _is_higher(recitation: _Recitation, baseline: _Recitation, comparisons: int) -> bool:
    """Test if `recitation` has significantly higher log-probabilities than `baseline`.

    The test is paired by record.

    Args:
        recitation: scores of the records' suffixes.
        baseline: other scores of the same suffixes.
        comparisons: number of such tests, for Bonferroni's correction.
    """
    difference = recitation.log_prob - baseline.log_prob
    # -inf, from a token of probability 0, has no mean.
    is_finite = bool(np.isfinite(difference).all())
    return is_finite and bound_mean_gain(difference, comparisons) > 0

"""Check on random tokens that all methods of a `LanguageModel` imply the same distribution.

`find_inconsistencies` lists the comparisons. Transformers models have a separate check
(`self_check`), which also chooses how each model computes decoding rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL
from auditor.models.rows import Rows

CAPABILITIES = frozenset({"draw", "likelihood", "ranks", "likeliest", "distribution", "embeddings"})
# The parents of the rows after each token: rows split, die and move.
STEPS = ([1, 0, 1], [2, 0, 0, 1], [3, 1])
_LENGTH = 12  # tokens of a test text
# Share of the spread of log-probabilities: quantised weights stay below it; a different
# distribution is at 1.4.
_ROUNDING = 1 / 32
SEED = 20_240_229  # of the random tokens: any number


def check_distribution_consistency(model: LanguageModel) -> None:
    """Raise AuditError if the model's methods imply different distributions.

    Models without distributions are skipped.
    """
    for sentence in find_inconsistencies(model):
        raise AuditError(f"expected {model.name} to give consistent distributions, but {sentence}")


@torch.no_grad()
def find_inconsistencies(model: LanguageModel) -> Iterator[str]:
    """Yield a clause, for an error message, for each method that disagrees with `log_probs`.

    `log_probs` of whole texts is compared with four other ways to get probabilities: `log_probs` of
    single and of shortened texts, decoding rows that advance and split, probabilities of given
    tokens, and samples (drawn twice).
    """
    unknown = set(model.capabilities) - CAPABILITIES
    if unknown:
        known = ", ".join(sorted(CAPABILITIES))
        yield f"its capabilities contain {min(unknown)!r}, which is not one of {known}"
    if "distribution" not in model.capabilities:
        return
    length = min(_LENGTH, model.max_positions or _LENGTH)
    rng = torch.Generator().manual_seed(SEED)
    texts = torch.randint(model.vocab_size, (2, length), generator=rng).to(model.device)
    log_probs = model.log_probs(texts, length)
    if log_probs.shape != (2, length, model.vocab_size):
        shape = tuple(log_probs.shape)
        yield f"log_probs of 2 texts of {length} of {model.vocab_size} tokens has shape {shape}"
        return
    log_total = log_probs.double().exp().sum(-1).log()
    is_nan = bool(torch.isnan(log_probs).any())
    if is_nan or not _are_log_probs_close(log_total, torch.zeros(()), 1e-3):
        yield "the probabilities of all next tokens do not add up to 1"
        return
    if bool((log_probs == log_probs[:, :1]).all()):
        yield "it has the same distribution after every token"
    tolerance = _ROUNDING * float(log_probs[torch.isfinite(log_probs)].std())

    def agree(actual: Tensor, expected: Tensor) -> bool:
        if actual.shape != expected.shape:
            return False
        return compute_largest_distance(actual, expected) <= tolerance

    if not agree(model.log_probs(texts[1:], length)[0], log_probs[1]):
        yield "log_probs of a text depends on other texts in the batch"
    # The last token of the shorter texts is at -3 in the whole texts.
    if not agree(model.log_probs(texts[:, :-2], 1)[:, 0], log_probs[:, -3]):
        yield "the distribution of a token depends on later tokens"
    yield from _find_row_faults(model, texts, tolerance)
    token_log_probs = model.token_log_probs(texts[:, :2], texts[:, 2:])
    expected = log_probs[:, 1:-1].gather(-1, texts[:, 2:, None])[..., 0]
    if not _are_log_probs_close(token_log_probs, expected, tolerance):
        yield "token_log_probs of given tokens differs from log_probs"
    yield from _find_sampling_faults(model, texts, tolerance)


def _find_row_faults(model: LanguageModel, texts: Tensor, tolerance: float) -> Iterator[str]:
    steps = STEPS[: texts.shape[1] - 2]
    rows = model.start(texts[:, :2], len(steps))
    row_log_probs, contexts = collect_row_log_probs(rows, texts, 2, steps)
    expected = model.log_probs(contexts, len(steps) + 1)
    if compute_largest_distance(row_log_probs, expected) > tolerance:
        yield "distributions of advanced and split rows differ from log_probs of the same tokens"


def _find_sampling_faults(model: LanguageModel, texts: Tensor, tolerance: float) -> Iterator[str]:
    noise = torch.stack([torch.as_tensor(draw_secret_uniforms(8, 3, seed)) for seed in (1, 2)])
    first, second = (model.completions(texts[:, :2], 3, ANCESTRAL, noise) for _ in range(2))
    if not torch.equal(first.tokens, second.tokens):
        yield "the same random numbers draw different samples the second time"
    assert first.log_probs is not None
    prefixes = texts[:, :2].repeat_interleave(8, 0)
    token_log_probs = model.token_log_probs(prefixes, first.tokens)
    if not _are_log_probs_close(first.log_probs, token_log_probs, tolerance):
        yield "samples report probabilities of their tokens that differ from token_log_probs"


@torch.no_grad()
def collect_row_log_probs(
    rows: Rows, texts: Tensor, begin: int, steps: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Advance decoding rows step by step and collect their distributions.

    Args:
        rows: decoding rows that contain the first `begin` tokens of each text.
        texts: token ids (B, n), of which later tokens are appended to the rows.
        begin: number of tokens of each text that the rows contain at first.
        steps: for each step, the parent of each new row.

    Returns:
        Distributions along the path to each final row, of shape (rows, steps + 1, V).
        Tokens of each final row, of shape (rows, begin + steps).
    """
    contexts = texts[:, :begin]
    distributions = [rows.log_probs()]
    for step in steps:
        parents = torch.tensor(step, device=contexts.device)
        # Tokens differ from row to row, so that a mix-up of rows shows.
        offsets = torch.arange(len(parents), device=contexts.device)
        tokens = texts.flatten()[contexts.shape[1] + offsets]
        rows.advance(parents, tokens)
        contexts = torch.cat([contexts[parents], tokens.unsqueeze(-1)], dim=1)
        distributions = [distribution[parents] for distribution in distributions]
        distributions.append(rows.log_probs())
    return torch.stack(distributions, dim=1), contexts


def compute_largest_distance(actual: Tensor, expected: Tensor) -> float:
    """Return the largest distance, in nats, between paired log-distributions (..., V).

    A distance is the root mean square of the differences over the vocabulary.
    """
    actual = actual.float()
    expected = expected.float()
    # Equal values have distance 0, two -inf included.
    difference = torch.where(actual == expected, 0.0, actual - expected)
    return float(difference.square().mean(-1).sqrt().nan_to_num(nan=torch.inf).max())


def _are_log_probs_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    atol = max(tolerance, 1e-4)
    return torch.allclose(actual.double(), expected.double(), rtol=0, atol=atol)

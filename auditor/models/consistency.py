"""Whether a `LanguageModel` of whoever's gives one distribution however it is asked, on random tokens.

`distribution_inconsistency_sentences` says what is compared. Transformers models have a check of their own
(`self_check`), which also chooses how they are served. Knows nothing of what a model is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import secret_uniform_draws
from auditor.models.base import LanguageModel, Rows
from auditor.models.decoding import ANCESTRAL

CAPABILITIES = frozenset({"draw", "likelihood", "ranks", "likeliest", "distribution", "embeddings"})
STEPS = ([1, 0, 1], [2, 0, 0, 1], [3, 1])  # whose children the rows are after each token: they split, die and move
_LENGTH = 12  # tokens of the texts that are tried
_ROUNDING = 1 / 32  # of the spread of log-probabilities; weights in few bits stay below, another distribution is at 1.4
SEED = 20_240_229  # of the random tokens: any number


def check_distribution_consistency(model: LanguageModel) -> None:
    """Raises AuditError for a model whose distributions do not agree. One that gives none is not asked anything."""
    for sentence in distribution_inconsistency_sentences(model):
        raise AuditError(f"expected {model.name} to give one distribution however it is asked, but {sentence}")


@torch.no_grad()
def distribution_inconsistency_sentences(model: LanguageModel) -> Iterator[str]:
    """What `model` answers otherwise than it should, in clauses; each is worked out as it is asked for.

    Held against `log_probs` of whole texts: each text alone, and without what comes after; rows that are advanced and
    split; the probabilities of given tokens; and samples, drawn twice.
    """
    if strange := set(model.capabilities) - CAPABILITIES:
        yield f"its capabilities hold {min(strange)!r}, which is none of {', '.join(sorted(CAPABILITIES))}"
    if "distribution" not in model.capabilities:
        return
    length = min(_LENGTH, model.max_positions or _LENGTH)
    texts = torch.randint(model.vocab_size, (2, length), generator=torch.Generator().manual_seed(SEED))
    texts = texts.to(model.device)
    whole = model.log_probs(texts, length)
    if whole.shape != (2, length, model.vocab_size):
        yield f"log_probs of 2 texts of {length} of {model.vocab_size} tokens is of shape {tuple(whole.shape)}"
        return
    if bool(torch.isnan(whole).any()) or not _are_log_probs_close(
        whole.double().exp().sum(-1).log(), torch.zeros(()), 1e-3
    ):
        yield "the probabilities of all next tokens do not add up to 1"
        return
    if bool((whole == whole[:, :1]).all()):
        yield "it has the same distribution behind every token"
    spread = _ROUNDING * float(whole[torch.isfinite(whole)].std())

    def same(found: Tensor, truth: Tensor) -> bool:
        return found.shape == truth.shape and largest_rms_log_prob_distance(found, truth) <= spread

    if not same(model.log_probs(texts[1:], length)[0], whole[1]):
        yield "log_probs of a text depends on the texts beside it"
    if not same(model.log_probs(texts[:, :-2], 1)[:, 0], whole[:, -3]):  # -3: the last of these, in the whole
        yield "the distribution of a token changes with what comes after it"
    yield from _incremental_decoding_fault_sentences(model, texts, spread)
    given = model.token_log_probs(texts[:, :2], texts[:, 2:])
    if not _are_log_probs_close(given, whole[:, 1:-1].gather(-1, texts[:, 2:, None])[..., 0], spread):
        yield "token_log_probs of given tokens is not what log_probs has for them"
    yield from _sampling_fault_sentences(model, texts, spread)


def _incremental_decoding_fault_sentences(model: LanguageModel, texts: Tensor, spread: float) -> Iterator[str]:
    steps = STEPS[: texts.shape[1] - 2]
    found, contexts = advance_collecting_log_probs(model.start(texts[:, :2], len(steps)), texts, 2, steps)
    truth = model.log_probs(contexts, len(steps) + 1)
    if largest_rms_log_prob_distance(found, truth) > spread:
        yield "rows that are advanced and split have other distributions than log_probs of the same tokens"


def _sampling_fault_sentences(model: LanguageModel, texts: Tensor, spread: float) -> Iterator[str]:
    noise = torch.stack([torch.as_tensor(secret_uniform_draws(8, 3, seed)) for seed in (1, 2)])
    first, second = (model.completions(texts[:, :2], 3, ANCESTRAL, noise) for _ in range(2))
    if not torch.equal(first.tokens, second.tokens):
        yield "the same random numbers draw other samples a second time"
    assert first.log_probs is not None
    given = model.token_log_probs(texts[:, :2].repeat_interleave(8, 0), first.tokens)
    if not _are_log_probs_close(first.log_probs, given, spread):
        yield "samples say another probability of their tokens than token_log_probs"


@torch.no_grad()
def advance_collecting_log_probs(
    rows: Rows, texts: Tensor, begin: int, steps: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Rows behind the first `begin` tokens of each text, advanced by these steps.

    Returns the distributions along each final row's path, (rows, steps + 1, V), and the paths, (rows, begin + steps).
    """
    contexts, distributions = texts[:, :begin], [rows.log_probs()]
    for parents in steps:
        at = torch.tensor(parents, device=contexts.device)
        # Tokens that differ from row to row, so that rows mixed up are seen.
        tokens = texts.flatten()[contexts.shape[1] + torch.arange(len(at), device=contexts.device)]
        rows.advance(at, tokens)
        contexts = torch.cat([contexts[at], tokens.unsqueeze(-1)], dim=1)
        distributions = [*(distribution[at] for distribution in distributions), rows.log_probs()]
    return torch.stack(distributions, dim=1), contexts


def largest_rms_log_prob_distance(found: Tensor, truth: Tensor) -> float:
    """How far apart distributions (..., V) are in nats: root mean square over tokens, of the farthest of them."""
    found, truth = found.float(), truth.float()
    apart = torch.where(found == truth, 0.0, found - truth)  # -inf is -inf
    return float(apart.square().mean(-1).sqrt().nan_to_num(nan=torch.inf).max())


def _are_log_probs_close(found: Tensor, truth: Tensor, tolerance: float) -> bool:
    return torch.allclose(found.double(), truth.double(), rtol=0, atol=max(tolerance, 1e-4))

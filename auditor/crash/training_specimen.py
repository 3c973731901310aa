"""Build the specimen of a crash test: a tiny causal language model and recognisable records."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

# Many batch sizes divide it, so a missing record shows if a loop divides by the number of records.
RECORDS = 48
_WORDS = 24  # token ids of all records; each id above belongs to one record
_LENGTHS = (12, 4, 8, 6)  # long, short and between
_COMPANY_LENGTHS = (24, 1, 1, 2, 1, 1, 2, 1)  # one record of many tokens among records of few
COMPANY_SHARE = 0.8  # of the clipping norm: the median gradient's norm in company trainings
# Weight of the last norm: it makes gradients far longer than usual clipping norms, so that clipping
# always acts.
_STEEP = 12.0
PAD = 0

Record = dict[str, list[int]]


@dataclass(frozen=True)
class Specimen:
    """Define the model and the records that a crash test gives to a training.

    scales: (ending of a weight's name, factor). Large factors concentrate the gradient in some
        tensors, which reveals whether the clipped norm omits a tensor.
    alike: whether all records have the same text, so that a batch moves the model as far as
        possible.
    one_hot: whether one entry holds 88% of a gradient's squared norm, which reveals whether the
        clipped norm covers only some entries.
    lengths: numbers of tokens of the records' texts, used in turn.
    """

    scales: tuple[tuple[str, float], ...] = ()
    alike: bool = True
    one_hot: bool = False
    lengths: tuple[int, ...] = _LENGTHS

    def build_crash_test_model(self) -> GPTNeoXForCausalLM:
        model = build_tiny_specimen_model(0)
        with torch.no_grad():
            for name, value in model.named_parameters():
                for end, factor in self.scales:
                    if name.endswith(end):
                        value.mul_(factor)
            # The last layer reads one number of the last norm, which is large for every token.
            if self.one_hot:
                model.lm_head.weight[:, 1:] = 0
                model.gpt_neox.embed_in.weight[:, 0].abs_().add_(1.2)
        return model

    def scale_weights(self, factor: float) -> Specimen:
        """Return a copy of the specimen with all scales multiplied by this factor."""
        scales = []
        for end, scale in self.scales:
            scales.append((end, scale * factor))
        return replace(self, scales=tuple(scales))

    def make_crash_test_records(self, n: int = RECORDS) -> list[Record]:
        """Make records of token ids, each with a unique first token that identifies the record."""
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(1, _WORDS, (max(self.lengths),), generator=generator).tolist()
        records = []
        for i in range(n):
            length = self.lengths[i % len(self.lengths)]
            words = text[:length]
            if not self.alike:
                words = torch.randint(1, _WORDS, (length,), generator=generator).tolist()
            records.append({"input_ids": [_WORDS + i, *words]})
        return records


_FINAL = "final_layer_norm.weight"
_EMBEDDING = "embed_in.weight"
_HEAD = "lm_head.weight"
_SCALED = (
    "input_layernorm.weight",
    "query_key_value.weight",
    "attention.dense.weight",
    "post_attention_layernorm.weight",
    "h_to_4h.weight",
    "4h_to_h.weight",
    _EMBEDDING,
    _HEAD,
    _FINAL,
)


def _scale_all_weights(*factors: float) -> Specimen:
    """Return a specimen whose weights, in the order of `_SCALED`, are scaled by these factors."""
    return Specimen(tuple(zip(_SCALED, factors, strict=True)))


SPECIMENS = (
    Specimen(alike=False),  # the last layer, its biases and the embedding, a quarter each
    Specimen(((_EMBEDDING, 0.25),)),  # the embedding
    # weights of attention and feed-forward
    _scale_all_weights(20, 0.4, 0.4, 20, 0.4, 0.3, 10, 20, 0.2),
    # their first biases
    _scale_all_weights(0.001, 0.03, 90, 0.01, 0.4, 200, 3, 8, 0.4),
    # the norms before them
    _scale_all_weights(0.08, 400, 10, 0.04, 300, 30, 30, 20, 0.5),
    # one number of the last norm
    Specimen(((_FINAL, 0.01), (_HEAD, 500), (_EMBEDDING, 20)), one_hot=True),
)


def build_training_specimen(training: int) -> Specimen:
    """Return the specimen for a training (numbered from 0); trainings use the specimens in turn."""
    return SPECIMENS[training % len(SPECIMENS)]


def build_tiny_specimen_model(seed: int) -> GPTNeoXForCausalLM:
    """Build a model of about 5,000 parameters from this seed.

    It has untied weights, no dropout (so that a record's gradient does not vary), and only layers
    that Opacus supports: linear, embedding, layer norm.
    """
    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    ends: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}
    ways: dict[str, Any] = {"max_position_embeddings": 32, "attn_implementation": "eager"}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(vocab_size=_WORDS + RECORDS, **size, **ends, **ways)
        )
    with torch.no_grad():
        model.gpt_neox.final_layer_norm.weight.fill_(_STEEP)
    return model.train()


@functools.cache
def make_company_specimen(clipping_norm: float) -> Specimen:
    """Build a specimen whose gradients are mostly shorter than the clipping norm.

    Texts have unequal lengths. Clipping leaves short gradients unchanged, so that the effect of
    other records in the batch remains visible.
    """
    # bounds of the log factor of the last norm and the last layer
    low = -12.0
    high = 4.0
    for _ in range(12):  # to 0.4%
        middle = (low + high) / 2
        if _compute_median_norm(_make_flat_specimen(middle)) > COMPANY_SHARE * clipping_norm:
            high = middle
        else:
            low = middle
    return _make_flat_specimen((low + high) / 2)


def _make_flat_specimen(log_scale: float) -> Specimen:
    """Return a specimen whose last norm and head are multiplied by exp(log_scale)."""
    scale = math.exp(log_scale)
    return Specimen(((_FINAL, scale), (_HEAD, scale)), False, False, _COMPANY_LENGTHS)


def _compute_median_norm(specimen: Specimen) -> float:
    model = specimen.build_crash_test_model()
    weights = dict[str, Tensor](model.named_parameters())
    records = specimen.make_crash_test_records(len(_COMPANY_LENGTHS))
    gradients = SpecimenRecordGradients(model, records)
    parts = gradients.record_gradients_at_weights(weights, list(range(len(records))), list(weights))
    return float(torch.cat([part.flatten(1) for part in parts.values()], 1).norm(dim=1).median())


def find_row_records(ids: Tensor) -> list[int | None]:
    """Return the index of the record in each row of `ids` (b, n); None if a row is not a record."""
    # argmax of a row without such a token is 0, and that token names no record either.
    firsts = ids.gt(_WORDS - 1).float().argmax(1)
    tokens = ids.gather(1, firsts.unsqueeze(1)).squeeze(1).tolist()
    return [token - _WORDS if token >= _WORDS else None for token in tokens]


@dataclass(frozen=True)
class SpecimenRecordGradients:
    """Compute reference gradients of single records, for given weights of a model.

    twin: a copy of the model.
    """

    # the model as the training changed it (an adapter, for example), without any hooks
    twin: nn.Module
    records: list[Record]

    def record_gradients_at_weights(
        self, weights: dict[str, Tensor], indices: list[int], names: list[str]
    ) -> dict[str, Tensor]:
        """Return the gradients of single records' losses, (len(indices), *shape), keyed by tensor.

        A loss is the mean negative log-likelihood (nats) over all tokens except the record's first.

        weights: the model's weights, keyed by tensor. A tensor has its own shape, or (len(indices),
            *shape) if each record has different weights.
        indices: the records; names: the tensors to differentiate.
        """
        rows = pad_specimen_tokens(self.records, indices)
        # One copy of the weights for each record, so that one backward pass, which is faster than
        # `torch.func.grad` under vmap, gives each record's gradient.
        copies = dict[str, Tensor]()
        for name, value in self.twin.named_parameters():
            copied = weights[name].detach().expand(len(rows), *value.shape)
            copies[name] = copied.requires_grad_(name in names)
        with torch.enable_grad():  # the training may take its steps without gradients
            total = vmap(self._compute_mean_nll)(copies, rows).sum()
        gradients = torch.autograd.grad(
            total, [copies[name] for name in names], materialize_grads=True
        )
        return dict(zip(names, gradients, strict=True))

    def _compute_mean_nll(self, weights: dict[str, Tensor], row: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of one record, without an attention mask.

        No mask is needed, because padding follows the record and a causal model never reads ahead.
        """
        more: dict[str, Any] = {"input_ids": row.unsqueeze(0), "use_cache": False}
        logits = functional_call(self.twin, weights, (), more).logits[0, :-1]
        return nn.functional.cross_entropy(logits, row[1:], ignore_index=PAD)


def pad_specimen_tokens(records: list[Record], indices: list[int]) -> Tensor:
    """Return the padded token ids of some records, of shape (len(indices), longest)."""
    rows = [records[i]["input_ids"] for i in indices]
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])


@contextmanager
def empty_draws_context(n: int) -> Iterator[None]:
    """Make every fourth Poisson batch empty, to test that a training handles this.

    Poisson sampling draws one uniform number for each of `n` records, and selects records with
    small numbers. Inside the with-block, every fourth `torch.rand` of shape (n,) returns only
    numbers just below 1.
    """
    draw, count = torch.rand, 0

    def draw_nobody(*size: Any, **more: Any) -> Tensor:
        nonlocal count
        numbers: Tensor = draw(*size, **more)
        if numbers.shape != (n,):
            return numbers
        count += 1
        if count % 4 == 0:
            return numbers.fill_(1 - 2**-20)
        return numbers

    with patch.object(torch, "rand", draw_nobody):
        yield

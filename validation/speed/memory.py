"""Compare predicted with measured memory of a decoding row, an ensemble member and a tuned prompt.

    python -m validation.speed.memory [--small]

The models are random, in three sizes; no number depends on weights. Predictions use the arithmetic
of docs/how-to/big-models.md and a model's configuration. Measured are the bytes of all tensors
that a step adds, each storage once; for tuning a prompt, the bytes that autograd saves for the
backward pass.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from auditor.models.huggingface import HuggingFaceModel
from auditor.models.lora import LoraEnsemble
from validation.harness import Page, run

PREFIX, SUFFIX, ROWS, RANK, PROMPT, BATCH = 50, 50, 8, 8, 20, 4
FLOAT = 4  # bytes
WIDER = 4  # width inside a block, as a multiple of the hidden width


@dataclass(frozen=True)
class LlamaSize:
    """The size of a Llama. heads: number of query heads; kv: number of key and value heads."""

    hidden: int
    layers: int
    heads: int
    kv: int
    vocab: int

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv,
            intermediate_size=WIDER * self.hidden,
            vocab_size=self.vocab,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )

    @property
    def linear(self) -> list[tuple[int, int]]:
        """Return (in, out) of the layers with an adapter: queries and values of each block."""
        narrow = self.hidden // self.heads * self.kv
        return [(self.hidden, self.hidden), (self.hidden, narrow)] * self.layers


SIZES = (
    LlamaSize(128, 4, 4, 4, 2_000),
    LlamaSize(256, 8, 8, 4, 8_000),
    LlamaSize(512, 12, 8, 2, 32_000),
)
SMALL = (LlamaSize(32, 2, 4, 2, 100), LlamaSize(48, 3, 4, 4, 300), LlamaSize(64, 2, 4, 1, 200))


# --- prediction ---


def row(size: LlamaSize, positions: int) -> int:
    """Return the predicted bytes of a row: keys and values at all positions, and one
    distribution.
    """
    return (
        2 * size.layers * size.kv * (size.hidden // size.heads) * positions * FLOAT
        + size.vocab * FLOAT
    )


def member(size: LlamaSize, rank: int) -> int:
    """Return the predicted bytes of a member: its two LoRA matrices and a merged weight per layer.

    Weights are merged only if all members' weights fit into 256 MB.
    """
    return sum(rank * (wide + out) + wide * out for wide, out in size.linear) * FLOAT


def prompt(size: LlamaSize, rows: int) -> int:
    """Return the predicted bytes of a prompt, its gradient and AdamW's two moments."""
    return 4 * rows * size.hidden * FLOAT


def tuning(size: LlamaSize, batch: int, tokens: int, scored: int) -> float:
    """Return the predicted bytes that autograd saves for a batch with frozen weights.

    No inputs of linear layers are saved. Per layer and token these are the inputs of two norms, of
    the attention (queries, keys, values, answer) and of the gate (three wider tensors); the
    distributions are saved too.
    """
    widths = 4 + 3 * WIDER + 2 * size.kv / size.heads
    return batch * (tokens * size.layers * widths * size.hidden + scored * size.vocab) * FLOAT


# --- measurement ---


def storages() -> dict[int, int]:
    """Return the bytes of every storage of a tensor, by its address."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter):
            held = one.untyped_storage()
            found[held.data_ptr()] = held.nbytes()
    return found


def held(step: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of the step, and the bytes of the tensors that it added."""
    before = storages()
    made = step()
    return made, sum(size for place, size in storages().items() if place not in before)


def rows_held(model: HuggingFaceModel) -> int:
    """Return the measured bytes of one of several different rows after a prefix."""
    prefixes = torch.ones(ROWS, PREFIX, dtype=torch.long)
    rows, found = held(lambda: model.start(prefixes, SUFFIX))
    assert len(rows) == ROWS
    return found // ROWS


def member_held(model: HuggingFaceModel) -> int:
    """Return the measured bytes that the second of two members adds."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for count in (1, 2):
            for i in range(count):
                config = LoraConfig(
                    r=RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
                )
                get_peft_model(LlamaForCausalLM(model.model.config), config).save_pretrained(
                    f"{folder}/m{i}"
                )
            ensemble, size = held(lambda: LoraEnsemble(model, sorted(Path(folder).iterdir())))
            assert ensemble.size == count
            found.append(size)
            del ensemble
        return found[1] - found[0]


def prompt_held(model: HuggingFaceModel) -> tuple[int, int]:
    """Return the measured bytes of a tuned prompt after a step, and those that autograd saved."""
    saved: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def step() -> Any:
        tuned = model.embedding_rows(PROMPT).requires_grad_(True)
        optimizer = torch.optim.AdamW([tuned])
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            distribution = model.log_probs(
                torch.ones(BATCH, PREFIX + SUFFIX - 1, dtype=torch.long), SUFFIX, prompt=tuned
            )
            loss = -distribution[..., 1].mean()
        loss.backward()
        optimizer.step()
        return tuned, optimizer

    _, found = held(step)
    return found, sum(saved.values())


def table(sizes: tuple[LlamaSize, ...]) -> Iterator[tuple[str, str, float, int]]:
    """Yield (size, object, predicted bytes, measured bytes)."""
    for size in sizes:
        torch.manual_seed(0)
        model = HuggingFaceModel(LlamaForCausalLM(size.config))
        name = f"{size.layers} x {size.hidden}, {size.vocab:,} tokens"
        yield name, "a live row", row(size, PREFIX + SUFFIX), rows_held(model)
        yield name, "a member", member(size, RANK), member_held(model)
        own, kept = prompt_held(model)
        yield name, "a tuned prompt", prompt(size, PROMPT), own
        yield (
            name,
            "a batch of tuning",
            tuning(size, BATCH, PROMPT + PREFIX + SUFFIX - 1, SUFFIX),
            kept,
        )


def main(small: Annotated[bool, "three tiny models: seconds"] = False) -> None:
    page = Page()
    page.head("model", "what", "predicted", "held", "held / predicted")
    for name, what, predicted, found in table(SMALL if small else SIZES):
        page.row(
            name,
            what,
            f"{predicted / 1e6:,.3f} MB",
            f"{found / 1e6:,.3f} MB",
            f"{found / predicted:.3f}",
        )


if __name__ == "__main__":
    raise SystemExit(run(main))

"""Tiny models of which it is known who is a member: families, kinds of text and seeds, for what is learned from them.

A world is one of each: a public model that has read other text of all kinds, a target that is this model fine-tuned on
the members, and four references, each fine-tuned on half of all the records. Seconds of training each, on one core.
"""

from __future__ import annotations

import copy
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.statistics import membership
from auditor.training.finetune import fine_tune_on_packed_blocks
from benchmarks.checks.trust.bases import byte_pair_tokenizer
from benchmarks.lab_texts import COMMON_KINDS, PRIVATE_KINDS, make_fake_texts_with_marks

Floats = NDArray[np.float64]
Documents = list[list[Tokens]]  # the records that each is cut into

KINDS = ("records", "prose", "web", "code")
LENGTHS = (16, 32, 47)  # tokens scored, at the end of a record: one of them a world
EPOCHS = (1, 2)  # of the target, and of its references
REFERENCES = 4
END = 0


@dataclass(frozen=True)
class Sizes:
    """Of every world. members, nonmembers, public: records, of `tokens` tokens."""

    members: int = 300
    nonmembers: int = 1000
    public: int = 1000
    documents: int = 2500  # made of each kind, at most
    tokens: int = 48
    words: int = 512  # of the tokenizer
    hidden: int = 64
    layers: int = 2
    public_epochs: int = 2
    rate: float = 3e-3
    own_rate: float = 3e-3
    seeds: int = 3


def shapes(sizes: Sizes) -> dict[str, PreTrainedConfig]:
    """By name, each family as small as the others."""
    heads, inner, places = 4, 4 * sizes.hidden, 2 * sizes.tokens
    ends: dict[str, Any] = {"vocab_size": sizes.words, "bos_token_id": END, "eos_token_id": END}
    usual = ends | {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "max_position_embeddings": places,
        "tie_word_embeddings": True,
    }
    wide = usual | {"intermediate_size": inner}
    still: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {
        "gpt2": GPT2Config(
            n_embd=sizes.hidden, n_layer=sizes.layers, n_head=heads, n_positions=places, **still, **ends
        ),
        "gpt_neox": GPTNeoXConfig(**wide),
        "llama": LlamaConfig(**wide | {"intermediate_size": inner * 2 // 3}),
    }


# --- texts ------------------------------------------------------------------------------------------------------------


def written(kind: str, arrays: Path, tokenizer: Path, sizes: Sizes) -> list[str]:
    """The documents of a kind: made up by Faker, examples of the LM-Extraction arrays, Python's own library."""
    if kind in ("records", "prose"):
        return list(
            make_fake_texts_with_marks(11, sizes.documents, PRIVATE_KINDS if kind == "records" else COMMON_KINDS)
        )
    if kind == "web":
        parts = [np.load(next(arrays.glob(f"*_{part}.npy"))) for part in ("preprefix", "prefix", "suffix")]
        words = AutoTokenizer.from_pretrained(tokenizer)
        return [str(words.decode(row)) for row in np.concatenate(parts, axis=1)[: sizes.documents].tolist()]
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    cuts = [lines[i : i + 800] for i in range(0, len(lines), 800)]
    return [cuts[i] for i in keyed_random_generator("learned", "code").permutation(len(cuts))[: sizes.documents]]


def all_documents(arrays: Path, tokenizer: Path, sizes: Sizes) -> dict[str, Documents]:
    """By kind; each document cut into records of as many tokens, what is left over dropped."""
    texts = {kind: written(kind, arrays, tokenizer, sizes) for kind in KINDS}
    words = byte_pair_tokenizer([text for kind in KINDS for text in texts[kind][:300]], sizes.words, ["<end>"])
    found: dict[str, Documents] = {}
    for kind in KINDS:
        read = [one.ids for one in words.encode_batch(texts[kind])]
        cut = [[tuple(ids[i : i + sizes.tokens]) for i in range(0, len(ids), sizes.tokens)] for ids in read]
        whole = [[one for one in records if len(one) == sizes.tokens] for records in cut]
        found[kind] = [records for records in whole if records]
    return found


@dataclass(frozen=True)
class Parts:
    """Of one kind and seed: no document in two of them."""

    public: list[Tokens]
    members: list[Tokens]
    nonmembers: list[Tokens]


def divided(documents: Documents, kind: str, sizes: Sizes, seed: int) -> Parts:
    order = iter(keyed_random_generator("learned", kind, seed).permutation(len(documents)).tolist())
    wanted = (sizes.public, sizes.members, sizes.nonmembers)
    parts: list[list[Tokens]] = []
    for count in wanted:
        taken: list[Tokens] = []
        while len(taken) < count:
            taken += documents[next(order)]
        parts.append(taken[:count])
    return Parts(*parts)


# --- worlds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MembershipWorld:
    """What is seen of one target: (records, tokens) numbers by name, and LiRA's (records,)."""

    family: str
    kind: str
    seed: int
    member: NDArray[np.bool_]
    seen: dict[str, Floats]
    lira: Floats


def trained(model: Any, records: Sequence[Tokens], epochs: int, rate: float, *key: str | int) -> Any:
    """The model itself, fine-tuned: a record a row."""
    order = keyed_random_generator("learned", "order", *key)
    fine_tune_on_packed_blocks(
        model, records, epochs=epochs, rate=rate, batch=16, block=len(records[0]) + 1, end=END, order=order
    )
    return model.eval()


def public_model(family: str, seed: int, parts: Sequence[Parts], sizes: Sizes) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(shapes(sizes)[family])
    records = [record for one in parts for record in one.public]
    return trained(model, records, sizes.public_epochs, sizes.rate, family, seed)


def world(public: Any, family: str, kind: str, seed: int, parts: Parts, sizes: Sizes) -> MembershipWorld:
    """Trains the target and its references, and looks at them."""
    turn = list(shapes(sizes)).index(family) + KINDS.index(kind)
    epochs, length = EPOCHS[(turn + seed) % len(EPOCHS)], LENGTHS[(2 * turn + seed) % len(LENGTHS)]
    records, key = parts.members + parts.nonmembers, (family, kind, seed)
    rows = torch.tensor(records)

    def after(own: Sequence[Tokens], *which: int) -> Any:
        return trained(copy.deepcopy(public), own, epochs, sizes.own_rate, *key, *which)

    seen = looked_at(after(parts.members), rows, length)
    order = keyed_random_generator("learned", "references", *key)
    saw = np.array([order.permutation(REFERENCES) < REFERENCES // 2 for _ in records])
    halves = ([records[j] for j in np.flatnonzero(saw[:, i])] for i in range(REFERENCES))
    shadows = [log_probs(after(half, i), rows, length) for i, half in enumerate(halves)]
    confidences = [membership.logit_confidence(one.mean(1)) for one in (seen["log_prob"], *shadows)]
    lira = membership.lira_log_likelihood_ratio(confidences[0], np.stack(confidences[1:], axis=1), saw)
    seen |= {f"base_{name}": value for name, value in looked_at(public, rows, length).items()}
    seen["before"] = occurred(np.array(records))[:, -length:]
    return MembershipWorld(*key, np.arange(len(records)) < len(parts.members), seen, lira)


@torch.no_grad()
def log_probs(model: Any, rows: Tensor, length: int) -> Floats:
    """(records, length) of the last tokens of each, in nats: the first number of `looked_at` alone."""
    logits = (model(input_ids=batch).logits[:, -length - 1 : -1] for batch in rows.split(100))
    wanted = (batch[:, -length:].flatten() for batch in rows.split(100))
    pairs = zip(logits, wanted, strict=True)
    losses = [torch.nn.functional.cross_entropy(x.flatten(0, 1), y, reduction="none") for x, y in pairs]
    return -torch.cat(losses).view(-1, length).double().numpy()


@torch.no_grad()
def looked_at(model: Any, rows: Tensor, length: int) -> dict[str, Floats]:
    """(records, length) of the last tokens of each: log-probability, in nats; log of the rank, from 0; margin of its
    log-probability over the best of the others; mean and deviation of log p under the distribution (Min-K%++)."""
    found: dict[str, list[Tensor]] = {name: [] for name in ("log_prob", "rank", "margin", "mean", "deviation")}
    for batch in rows.split(100):
        every = torch.log_softmax(model(input_ids=batch).logits[:, -length - 1 : -1], dim=-1)
        true = batch[:, -length:, None]
        own = every.gather(-1, true)
        best = every.scatter(-1, true, -torch.inf).amax(-1)
        mean = (every.exp() * every).sum(-1)
        variance = (every.exp() * every**2).sum(-1) - mean**2
        rank = torch.log1p((every > own).sum(-1).float())
        own = own[..., 0]
        for name, value in zip(found, (own, rank, own - best, mean, variance.clamp(0).sqrt()), strict=True):
            found[name].append(value)
    return {name: torch.cat(value).double().numpy() for name, value in found.items()}


def occurred(records: NDArray[np.int64]) -> Floats:
    """(records, tokens) 1 where a token stands earlier in its record too."""
    same = records[:, :, None] == records[:, None, :]
    return np.tril(same, -1).any(2).astype(float)


def worlds(arrays: Path, tokenizer: Path, out: Path, sizes: Sizes) -> list[MembershipWorld]:
    """All of them: those that OUT has are read."""
    asked = [(seed, family, kind) for seed in range(sizes.seeds) for family in shapes(sizes) for kind in KINDS]
    files = {key: out / ("-".join(map(str, key)) + ".npz") for key in asked}
    documents = None if all(file.is_file() for file in files.values()) else all_documents(arrays, tokenizer, sizes)
    for seed, family in product(range(sizes.seeds), shapes(sizes)):
        left = [kind for kind in KINDS if not files[seed, family, kind].is_file()]
        if not left or documents is None:
            continue
        parts = {kind: divided(documents[kind], kind, sizes, seed) for kind in KINDS}
        public = public_model(family, seed, list(parts.values()), sizes)
        for kind in left:
            made = world(public, family, kind, seed, parts[kind], sizes)
            out.mkdir(parents=True, exist_ok=True)
            held: dict[str, Any] = {"member": made.member, "lira": made.lira, **made.seen}
            np.savez(files[seed, family, kind], **held)
            print(f"{family}, {kind}, seed {seed}: done", file=sys.stderr)
    every = []
    for (seed, family, kind), file in files.items():
        with np.load(file) as held:
            seen = dict(held)
        every.append(MembershipWorld(family, kind, seed, seen.pop("member"), seen, seen.pop("lira")))
    return every

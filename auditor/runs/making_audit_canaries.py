"""`audit canaries make --audit` and `write_token_extended_model`: canaries from what they are made
of, a model that has their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from auditor.benchmarks.canaries import audit_canaries, manifests
from auditor.benchmarks.canaries.audit_canaries import (
    BEGUN,
    BY_MODEL,
    KINDS,
    AuditCanaryManifest,
    Kind,
)
from auditor.benchmarks.data import whole_texts
from auditor.core import disk
from auditor.core.errors import AuditError, unknown_name_error
from auditor.core.jsonable import read_json_object
from auditor.models.loading import DEFAULTS, load_causal_lm

ADAPTER = "adapter_config.json"
MARK = "audit_tokens.json"  # in the folder of a model that was extended


@dataclass(frozen=True)
class CanaryRequest:
    """What `audit canaries make --audit` is asked for. seed: None for one that nobody can guess."""

    count: int
    times: int = 1
    seed: int | None = None
    kind: Kind = "words"
    length: int = 8
    data: str | None = None
    model: str | None = None
    temperature: float | None = None


def make_audit_canaries(asked: CanaryRequest) -> AuditCanaryManifest:
    """Draws texts and coins. Raises AuditError for what the kind needs and was not given, or has no
    use of."""
    if asked.kind not in KINDS:
        raise unknown_name_error("--kind", asked.kind, KINDS)
    for flag, kinds in {"data": BEGUN, "model": BY_MODEL, "temperature": ("sampled",)}.items():
        given = getattr(asked, flag) is not None
        if given and asked.kind not in kinds:
            raise AuditError(
                f"expected --kind {' or '.join(kinds)} beside --{flag}, got {asked.kind}"
            )
        if not given and asked.kind in kinds and flag != "temperature":
            raise AuditError(f"expected --{flag} beside --kind {asked.kind}, got none")
    seed = audit_canaries.unguessable_audit_canary_seed() if asked.seed is None else asked.seed
    texts = audit_canaries.make_audit_canary_texts(
        asked.kind,
        asked.count,
        asked.length,
        seed,
        texts=() if asked.data is None else whole_texts.read_row_texts("--data", asked.data),
        model=None if asked.model is None else load_causal_lm(asked.model, DEFAULTS),
        temperature=1.0 if asked.temperature is None else asked.temperature,
    )
    return audit_canaries.make_audit_canary_manifest(asked.kind, texts, asked.times, seed)


def check_new_tokens_trainable(manifest: AuditCanaryManifest, model: str) -> None:
    """Refuses an adapter for canaries of new tokens, unless it trains embeddings too. Raises
    AuditError."""
    if manifest.kind != "new-tokens" or not (Path(model) / ADAPTER).is_file():
        return
    config = read_json_object(Path(model) / ADAPTER, "the configuration of an adapter")
    if not (config.get("modules_to_save") or config.get("trainable_token_indices")):
        raise AuditError(
            f"expected a fully trained model for canaries of new tokens, but {model!r} is an "
            "adapter beside frozen embeddings: it cannot have learnt them"
        )


def refuse_adapter_on_token_extended_model(model: str) -> None:
    """Refuses an adapter on a model that was extended by tokens of canaries. Raises AuditError."""
    if (Path(model) / MARK).is_file():
        raise AuditError(
            f"expected all of {model!r} to be trained, as it was extended by new tokens of "
            "canaries: an adapter leaves embeddings frozen, and cannot learn them"
        )


def write_token_extended_model(manifest: Path, model: str, out: Path) -> int:
    """Writes the model with a token for each canary of the manifest; returns how many.

    The rows of the new tokens are drawn as those of a fresh model are, by the seed, which the coins
    are not read from.
    Raises AuditError for a manifest of another kind, an adapter, and a folder that is there.
    """
    held = manifests.read_canary_manifest(manifest)
    if not isinstance(held, AuditCanaryManifest) or held.kind != "new-tokens":
        what = held.kind if isinstance(held, AuditCanaryManifest) else "exposure"
        raise AuditError(f"expected canaries of --kind new-tokens in {str(manifest)!r}, got {what}")
    if (Path(model) / ADAPTER).is_file():
        raise AuditError(
            f"expected a whole model to extend, but {model!r} is an adapter: give its base"
        )
    if out.exists():
        raise AuditError(f"expected a new folder for -o, but {str(out)!r} exists")
    base = load_causal_lm(model, DEFAULTS)
    if base.tokenizer is None:
        raise AuditError(f"expected a model with a tokenizer, but {base.name} has none")
    tokens = [one.secret for one in held.canaries]
    if base.tokenizer.add_tokens(tokens) < len(tokens):
        raise AuditError(
            f"expected a model without the tokens of canaries, but the tokenizer of {model!r} has "
            "some"
        )
    net: Any = base.model
    # Of the whole process: `resize_token_embeddings` takes no generator.
    torch.manual_seed(held.seed % 2**31)
    # max: many models have more rows than their tokenizer has tokens, and none of those is to be
    # cut off.
    net.resize_token_embeddings(max(len(base.tokenizer), base.vocab_size), mean_resizing=False)
    with disk.create_atomically(out) as path:
        net.save_pretrained(path)
        base.tokenizer.save_pretrained(path)
        disk.replace_atomically(path / MARK, f'{{"new_tokens": {len(tokens)}}}\n')
    return len(tokens)

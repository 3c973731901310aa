"""Make canaries (`audit canaries make --audit`), and models with a new token for each canary."""

from __future__ import annotations

from collections.abc import Sequence
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
from auditor.benchmarks.data.columns import read_data_table
from auditor.core import disk
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.jsonable import read_json_object
from auditor.models.loading import DEFAULTS, load_causal_lm

ADAPTER = "adapter_config.json"
MARK = "audit_tokens.json"  # in the folder of an extended model
# modules with a row for each token: the inputs, and the outputs that score a canary's token
_VOCABULARY_MODULES = ("embed_tokens", "embed_in", "wte", "word_embeddings", "lm_head", "embed_out")


def make_audit_canaries(
    count: int,
    times: int = 1,
    seed: int | None = None,
    kind: Kind = "words",
    length: int = 8,
    **inputs: Any,
) -> AuditCanaryManifest:
    """Draw the canaries' texts, and the coins that decide which canaries are inserted.

    A canary is a random text for the training data; a coin is a fair random decision. Raise
    AuditError if this kind of canary needs a missing input, or does not use a given input.

    Args:
        count: number of canaries.
        times: number of insertions of each included canary.
        seed: seed of texts and coins; None for an unguessable seed.
        kind: kind of canary.
        length: words of a canary.
        inputs: inputs that only some kinds use. `data` is the training data, for canaries that
            begin with its texts. `model` is the public or base model, for canaries made with a
            model. `temperature` is that of sampled canaries.
    """
    refuse_unknown_names("--kind", [kind], KINDS)
    for flag, kinds in {"data": BEGUN, "model": BY_MODEL, "temperature": ("sampled",)}.items():
        if flag in inputs and kind not in kinds:
            raise AuditError(f"expected --kind {' or '.join(kinds)} beside --{flag}, got {kind}")
        if flag not in inputs and kind in kinds and flag != "temperature":
            raise AuditError(f"expected --{flag} beside --kind {kind}, got none")
    if seed is None:
        seed = audit_canaries.draw_canary_seed()
    begun: Sequence[str] = ()
    if "data" in inputs:
        begun = read_data_table("--data", inputs["data"]).list_texts()
    model = None
    if "model" in inputs:
        model = load_causal_lm(inputs["model"], DEFAULTS)
    texts = audit_canaries.make_audit_canary_texts(
        kind,
        count,
        length,
        seed,
        texts=begun,
        model=model,
        temperature=inputs.get("temperature", 1.0),
    )
    return audit_canaries.make_audit_canary_manifest(kind, texts, times, seed)


def check_new_tokens_trainable(manifest: AuditCanaryManifest, model: str) -> None:
    """Raise AuditError if the canaries are new tokens but an adapter cannot learn them.

    An adapter learns new tokens only if it trains their embeddings.
    """
    if manifest.kind != "new-tokens" or not (Path(model) / ADAPTER).is_file():
        return
    config = read_json_object(Path(model) / ADAPTER, "the configuration of an adapter")
    # a list of modules, or one regular expression
    trained = f"{config.get('modules_to_save')} {config.get('target_modules')}"
    has_trained_rows = any(module in trained for module in _VOCABULARY_MODULES)
    if not (has_trained_rows or config.get("trainable_token_indices")):
        raise AuditError(
            f"expected a fully trained model for canaries of new tokens, but {model!r} is an "
            "adapter with frozen embeddings: it cannot have learnt them"
        )


def refuse_extended_adapter(model: str) -> None:
    """Raise AuditError if the model is an adapter whose base has new tokens for canaries."""
    if (Path(model) / MARK).is_file():
        raise AuditError(
            f"expected all of {model!r} to be trained, as it was extended by new tokens of "
            "canaries: an adapter leaves embeddings frozen, and cannot learn them"
        )


def write_token_extended_model(manifest: Path, model: str, out: Path) -> int:
    """Write the model with a new token for each canary; return the number of new tokens.

    The new tokens' embeddings are drawn as in a new model, with a seed that does not reveal which
    canaries are inserted. Raise AuditError for a different kind of manifest, an adapter, or an
    existing folder.

    Args:
        manifest: file of the canaries.
        model: folder or hub id of the model.
        out: folder of the extended model.
    """
    canary_manifest = manifests.read_canary_manifest(manifest)
    if not isinstance(canary_manifest, AuditCanaryManifest) or canary_manifest.kind != "new-tokens":
        kind = (
            canary_manifest.kind if isinstance(canary_manifest, AuditCanaryManifest) else "exposure"
        )
        raise AuditError(f"expected canaries of --kind new-tokens in {str(manifest)!r}, got {kind}")
    if (Path(model) / ADAPTER).is_file():
        raise AuditError(
            f"expected a whole model to extend, but {model!r} is an adapter: give its base"
        )
    if out.exists():
        raise AuditError(f"expected a new folder for -o, but {str(out)!r} exists")
    base = load_causal_lm(model, DEFAULTS)
    if base.tokenizer is None:
        raise AuditError(f"expected a model with a tokenizer, but {base.name} has none")
    tokens = [canary.secret for canary in canary_manifest.canaries]
    if base.tokenizer.add_tokens(tokens) < len(tokens):
        raise AuditError(
            f"expected a model without the tokens of canaries, but the tokenizer of {model!r} has "
            "some"
        )
    net: Any = base.model
    # Seed the process: `resize_token_embeddings` takes no generator.
    torch.manual_seed(canary_manifest.seed % 2**31)
    # max: many models have more rows than their tokenizer has tokens; keep those rows.
    net.resize_token_embeddings(max(len(base.tokenizer), base.vocab_size), mean_resizing=False)
    with disk.create_atomically(out) as path:
        net.save_pretrained(path)
        base.tokenizer.save_pretrained(path)
        disk.replace_atomically(path / MARK, f'{{"new_tokens": {len(tokens)}}}\n')
    return len(tokens)

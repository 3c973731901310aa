"""The two manifests of canaries on disk, and what they hold as the secrets of one model.

A manifest of version 1 holds texts of known spaces, for exposure; one of version 2 holds coins, for
an audit. Knows neither data files (insertion.py) nor how canaries are made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from auditor.benchmarks.canaries import audit_canaries, exposure_canaries
from auditor.benchmarks.canaries.audit_canaries import AUDIT_VERSION, AuditCanaryManifest
from auditor.benchmarks.canaries.exposure_canaries import ExposureCanaryManifest
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_json, to_json
from auditor.core.nouns import Secret
from auditor.plugins.benchmark import Benchmark


def write_canary_manifest(
    path: Path, manifest: ExposureCanaryManifest | AuditCanaryManifest
) -> None:
    """Readable by its owner only. Raises AuditError where the file exists: a lost manifest cannot
    be made up for."""
    if path.exists():
        raise AuditError(f"expected a new file for the manifest, but {str(path)!r} exists")
    disk.replace_atomically(
        path, json.dumps(to_json(manifest), indent=1, ensure_ascii=False) + "\n", sync=True
    )


def read_canary_manifest(path: Path) -> ExposureCanaryManifest | AuditCanaryManifest:
    """Raises AuditError for what is no manifest; the texts of canaries are never in its words."""
    raw = read_json(path, "the manifest")
    coined = isinstance(raw, dict) and raw.get("schema_version") == AUDIT_VERSION
    manifest: ExposureCanaryManifest | AuditCanaryManifest = from_json(
        AuditCanaryManifest if coined else ExposureCanaryManifest, raw, str(path), private=True
    )
    return manifest


def read_exposure_canary_manifest(path: Path) -> ExposureCanaryManifest:
    """As `read_canary_manifest`. Raises AuditError for canaries of an audit, whose exposure nobody
    can tell."""
    manifest = read_canary_manifest(path)
    if isinstance(manifest, AuditCanaryManifest):
        raise AuditError(
            f"expected canaries for exposure in {str(path)!r}, got those of an audit: no space of "
            "texts is kept that each could have been, and what is known of them, whether a coin "
            "let each in, is for an audit of epsilon"
        )
    return manifest


def canary_manifest_as_secrets(
    manifest: ExposureCanaryManifest | AuditCanaryManifest, tokenizer: Any, vocab_size: int
) -> tuple[Secret, ...]:
    """The canaries as secrets of one model. Raises AuditError where its tokenizer cannot write
    them."""
    from auditor.generation.tries import (
        encode_without_special_tokens,
    )  # torch: who reads a manifest for text needs none
    from auditor.models.vocabulary import check_tokens_within_vocabulary

    if tokenizer is None:
        raise AuditError(
            "expected a model with a tokenizer for --canaries, got a model without one"
        )
    texts = [one.text for one in manifest.canaries]
    rows = encode_without_special_tokens(tokenizer, texts)
    if len({tuple(row) for row in rows}) < len(set(texts)):
        raise AuditError(
            f"the manifest was made for another tokenizer: {type(tokenizer).__name__} writes two "
            "canaries alike"
        )
    check_tokens_within_vocabulary("the canaries", rows, vocab_size)
    if isinstance(manifest, AuditCanaryManifest):
        return tuple(audit_canaries.audit_canaries_as_secrets(manifest, tokenizer, rows))
    return tuple(exposure_canaries.exposure_canaries_as_secrets(manifest, rows))


class Canaries(Benchmark):
    """Canaries of a manifest and nothing else: what `--canaries` without `--data` is held to."""

    name = "canaries"

    def __init__(self, canaries: tuple[Secret, ...], tokenizer: Any, description: str) -> None:
        self.canaries, self.tokenizer, self.description = canaries, tokenizer, description
        self.secrets, self.known, self.heldout = (), (), ()

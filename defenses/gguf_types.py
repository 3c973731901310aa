"""Quantise a model's weights as in a GGUF file of a given type, and read the quantised values.

The package gguf quantises to plain types; llama.cpp's own quantiser (from llama-cpp-python)
quantises to k-quants. In a file of a mixed type (`q4_k_m`), llama.cpp gives more bits to some
matrices, selected by name.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
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
# The types of most matrices, and of the matrices that get more bits.
MIXED = {"q5_k_m": ("q5_k", "q6_k"), "q4_k_m": ("q4_k", "q6_k")}
_PACKAGES = {"gguf": "gguf", "llama_cpp": "llama-cpp-python"}
_SUPER_BLOCK = 256
# llama.cpp's types for rows that super-blocks do not fill.
_FALLBACK = {"q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q5_0", "q3_k": "q4_0"}
TYPES = (*PLAIN[:1], *_FALLBACK, *MIXED, *PLAIN[1:])
_LAYER = re.compile(r"\.(\d+)\.")
_MORE_BITS = (".v_proj.weight", ".down_proj.weight")
_POSITIONS = (".wpe.weight", ".embed_positions.weight")  # files keep them in float32
Rows = NDArray[np.float32]


def check_writable_gguf_type(type: str) -> None:
    """Raise AuditError, with a remedy, if the type cannot be written."""
    if type not in TYPES:
        raise AuditError(
            f"expected gguf:TYPE with one of {', '.join(TYPES)}, got {type!r}: make the file with "
            "llama.cpp and give --forms llama:FILE.gguf"
        )
    if type not in PLAIN:
        packages = _PACKAGES
    else:
        packages = {"gguf": "gguf"}
    for module, package in packages.items():
        if find_spec(module) is None:
            raise AuditError(
                f"--forms gguf:{type} needs the package {package}: pip install {package}",
            )


def quantise_model_weights(model: Any, type: str) -> None:
    """Replace every weight matrix by the values that a GGUF file of this type would have.

    Raise AuditError if the type is mixed and the model's layers are not named like Llama's.
    """
    for _, weight, matrix_type in list_matrix_types(model, type):
        # Contiguous, because llama.cpp reads by address and ignores strides.
        values = weight.float().cpu().contiguous().numpy()
        weight.copy_(torch.from_numpy(round_gguf_rows(values, matrix_type)))


def list_matrix_types(model: Any, type: str) -> Iterator[tuple[str, Tensor, str]]:
    """Yield the name and the weights of each matrix, and its type in a file of type `type`.

    The weights are (out, in), because rows in a file run along the inputs.
    """
    transposed = set()  # stored as (in, out)
    for layer in model.modules():
        if isinstance(layer, Conv1D):
            transposed.add(id(layer.weight))
    matrices = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not name.endswith(_POSITIONS):
            matrices[name] = parameter.data
            if id(parameter) in transposed:
                matrices[name] = parameter.data.T
    common_type, higher_type = MIXED.get(type, (type, type))
    higher_names = set[str]()
    if type in MIXED:
        higher_names = _select_higher_bit_tensors(model, list(matrices))
    for name, weight in matrices.items():
        yield name, weight, higher_type if name in higher_names else common_type


def _select_higher_bit_tensors(model: Any, names: list[str]) -> set[str]:
    """Return the names of the tensors that get more bits in a mixed type (llama-quant.cpp).

    These are the output matrix, and the value and down projections of half of the layers.
    """
    layer_by_name = {}
    for name in names:
        match = _LAYER.search(name)
        if match:
            layer_by_name[name] = int(match[1])
    n_layers = max(layer_by_name.values(), default=-1) + 1
    selected = set[str]()
    for name, layer in layer_by_name.items():
        if name.endswith(_MORE_BITS) and _has_more_bits(layer, n_layers):
            selected.add(name)
    if not all(any(name.endswith(end) for name in selected) for end in _MORE_BITS):
        raise AuditError(
            "expected layers with v_proj and down_proj, as Llama, Mistral and Qwen have, for a "
            f"mixed type: got {', '.join(names[:3])} ...; give a type of one kind, or the file as "
            "--forms llama:FILE.gguf"
        )
    # By identity: an output matrix tied to the embeddings has their name.
    output = model.get_output_embeddings().weight
    return selected | {name for name, weight in model.named_parameters() if weight is output}


def _has_more_bits(layer: int, n_layers: int) -> bool:
    eighth = n_layers // 8  # `use_more_bits` of llama.cpp's llama-quant.cpp
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def round_gguf_rows(weight: Rows, type: str) -> Rows:
    """Quantise (out, in) weights, and return their values in the file.

    If a matrix row is not a whole number of blocks, use llama.cpp's fallback type.
    """
    import gguf

    width = weight.shape[1]
    if type in _FALLBACK and width % _SUPER_BLOCK:
        type = _FALLBACK[type]
    kind = gguf.GGMLQuantizationType[type.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if width % block:
        # As llama.cpp does if no blocks of the type fill a row.
        kind = gguf.GGMLQuantizationType.F16
    if kind.name.lower() in PLAIN:
        quantised = gguf.quants.quantize(weight, kind)
    else:
        quantised = _quantise_llama_cpp(weight, int(kind))
    dequantised: Rows = gguf.quants.dequantize(quantised, kind)
    return dequantised


def _quantise_llama_cpp(weight: Rows, kind: int) -> NDArray[np.uint8]:
    """Quantise with `ggml_quantize_chunk`, without an importance matrix."""
    import gguf

    spec = find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None  # `check_writable_gguf_type` checks it
    files = Path(spec.origin).parent.glob("lib/*ggml-base.*")
    library = next(path for path in files if path.suffix in (".so", ".dylib", ".dll"))
    quantise = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    # (type, src, dst, start, nrows, n_per_row, imatrix) in ggml.h; src is contiguous float32.
    pointer = ctypes.c_void_p
    quantise.argtypes = [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]
    n_rows, width = weight.shape
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    quantised = np.zeros((n_rows, width // block * size), np.uint8)
    quantise(kind, weight.ctypes.data, quantised.ctypes.data, 0, n_rows, width, None)
    return quantised

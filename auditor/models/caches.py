"""Select sequences from a Hugging Face model's own cache, whatever the cache's structure.

A cache is any tree of tensors, containers and objects, such as keys and values, recurrent and
convolutional states, and counters. This module calls no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

# The path of a tensor in a cache: attributes, keys and indices from the root down.
Path = tuple[Any, ...]
# The row dimension of each tensor; None: all rows share the tensor.
Dimensions = Mapping[Path, int | None]


class NativeCache:
    """A model's own cache of the tokens it has read; `state` is None before the first token."""

    def __init__(self) -> None:
        self.state: Any = None

    def tensors(self) -> dict[Path, Tensor]:
        """Return each distinct tensor of the cache, keyed by its path."""
        tensors_by_path: dict[Path, Tensor] = {}

        def collect_tensor(path: Path, tensor: Tensor) -> Tensor:
            tensors_by_path[path] = tensor
            return tensor

        _map_tensors(self.state, collect_tensor, (), {})
        return tensors_by_path

    def select(self, rows: Tensor, dimensions: Dimensions) -> None:
        """Keep only the given sequences of the cache, in the given order; an index may repeat.

        `rows` are the indices of the sequences. `dimensions` gives the batch dimension of each
        tensor; tensors that were added later use dimension 0.
        """

        def select_rows(path: Path, tensor: Tensor) -> Tensor:
            dimension = dimensions.get(path, 0)
            if dimension is None or not tensor.ndim:
                return tensor
            return tensor.index_select(dimension, rows.to(tensor.device))

        self.state = _map_tensors(self.state, select_rows, (), {})


def find_cache_batch_dimensions(two: NativeCache, three: NativeCache) -> Dimensions:
    """Find the batch dimension of each tensor in a model's cache.

    It is the dimension in which the cache of 2 sequences (`two`) and the cache of 3 sequences of
    the same length (`three`) differ. A tensor without such a dimension gets None.
    """
    tensors_of_three = three.tensors()
    dimensions: dict[Path, int | None] = {}
    for path, tensor in two.tensors().items():
        size_pairs = zip(tensor.shape, tensors_of_three[path].shape, strict=False)
        differs = [size != other_size for size, other_size in size_pairs]
        dimensions[path] = differs.index(True) if any(differs) else None
    return dimensions


def _map_tensors(
    value: Any,
    change: Callable[[Path, Tensor], Tensor],
    path: Path,
    results: dict[int, tuple[Any, Any]],
) -> Any:
    """Apply `change` once to each distinct tensor in `value`, in place if possible; return it.

    Args:
        value: a tensor, or any tree of containers and objects.
        change: function of a tensor's path and the tensor, which returns the new tensor.
        path: path of `value` from the root.
        results: (value, result) of each value that was visited, keyed by the value's id. It stores
            the value so that Python cannot reuse the id.
    """
    if id(value) in results:
        return results[id(value)][1]
    if isinstance(value, Tensor):
        result: Any = change(path, value)
    elif isinstance(value, tuple):
        parts = []
        for i, part in enumerate(value):
            parts.append(_map_tensors(part, change, (*path, i), results))
        if hasattr(value, "_fields"):
            result = type(value)(*parts)
        else:
            result = tuple(parts)
    else:
        result = value
        results[id(value)] = (value, value)  # before its parts, which may refer back to it
        for name, part in list(_iterate_items(value)):
            new_part = _map_tensors(part, change, (*path, name), results)
            if new_part is part:
                continue
            if isinstance(value, MutableMapping | list):
                value[name] = new_part
            else:
                setattr(value, name, new_part)
    results[id(value)] = (value, result)
    return result


def _iterate_items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)
    # A cache may refer to its configuration or to layers of the model: these are not its state.
    elif isinstance(value, nn.Module | PreTrainedConfig) or callable(value):
        return
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()

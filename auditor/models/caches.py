"""The cache that a Hugging Face model makes of its own, whatever it is made of, and taking rows of it.

A cache is any tree of tensors, containers and objects: keys and values, recurrent and convolutional states, counters.
Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

Place = tuple[Any, ...]  # of a tensor in a cache: attributes, keys and indices from the root down
Dimensions = Mapping[Place, int | None]  # which one of each tensor is that of the rows; None: all rows share the tensor


class NativeCache:
    """What a model made to remember the tokens it has read; `held` is None before it has read any."""

    def __init__(self) -> None:
        self.held: Any = None

    def tensors(self) -> dict[Place, Tensor]:
        """Each tensor once, by its place."""
        found: dict[Place, Tensor] = {}

        def note(place: Place, tensor: Tensor) -> Tensor:
            found[place] = tensor
            return tensor

        _map_nested_cache_tensors(self.held, note, (), {})
        return found

    def select(self, rows: Tensor, dimensions: Dimensions) -> None:
        """Keeps these rows, which may repeat. Places that came late have the rows in their first dimension."""

        def select(place: Place, tensor: Tensor) -> Tensor:
            dimension = dimensions.get(place, 0)
            if dimension is None or not tensor.ndim:
                return tensor
            return tensor.index_select(dimension, rows.to(tensor.device))

        self.held = _map_nested_cache_tensors(self.held, select, (), {})


def find_cache_batch_dimensions(two: NativeCache, three: NativeCache) -> Dimensions:
    """The dimension that differs between a cache of two rows and one of three that have read as many tokens."""
    others = three.tensors()
    return {
        place: next((i for i, size in enumerate(tensor.shape) if size != others[place].shape[i]), None)
        for place, tensor in two.tensors().items()
    }


def _map_nested_cache_tensors(
    value: Any, change: Callable[[Place, Tensor], Tensor], place: Place, done: dict[int, tuple[Any, Any]]
) -> Any:
    """`value` with its tensors changed, in place where it can be; what is held twice is changed once.

    done: each value by its id, with what came of it; values are kept so that no other gets the id.
    """
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, Tensor):
        result: Any = change(place, value)
    elif isinstance(value, tuple):
        parts = [_map_nested_cache_tensors(part, change, (*place, i), done) for i, part in enumerate(value)]
        result = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    else:
        result = value
        done[id(value)] = (value, value)  # before its parts, which may point back
        for name, part in list(_items_of_cache_container(value)):
            new = _map_nested_cache_tensors(part, change, (*place, name), done)
            if new is not part and isinstance(value, MutableMapping | list):
                value[name] = new
            elif new is not part:
                setattr(value, name, new)
    done[id(value)] = (value, result)
    return result


def _items_of_cache_container(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)
    # A cache may refer to its configuration or to layers of the model: those are not its state.
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, nn.Module | PreTrainedConfig):
        yield from vars(value).items()

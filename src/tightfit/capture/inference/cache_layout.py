"""What a cache holds for the tokens of a request: found by walking whatever object the model has returned."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 6
# Requests, heads, tokens, width.
_KEY_DIMENSIONS = 4


def cached_tensors(cache: Any) -> dict[str, torch.Tensor]:
    """The tensors of `cache` by their path in it ("layers.0.keys"), each storage once. Tensors of numbers without a size (counters) are left out."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, tensor in _walk(cache, "", 0, set()):
        if tensor.dim() and tensor.numel() and id(tensor) not in seen:
            seen.add(id(tensor))
            found[path] = tensor
    return found


def layout_of(cache: Any) -> dict[str, dict[str, Any]]:
    """Shape and item size of each tensor of `cache`, as plain JSON."""
    return {
        path: {"shape": list(tensor.shape), "item_bytes": tensor.element_size(), "floating": tensor.is_floating_point()}
        for path, tensor in cached_tensors(cache).items()
    }


def append_in_place(cache: Any) -> None:
    """Has each layer of `cache` that keeps keys and values write what comes next behind them, where transformers' would copy all of them to a longer tensor.

    A cache without such layers (states, or a kind of a model's own) stays as it is.
    """
    for layer in getattr(cache, "layers", ()):
        if isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.dim() == _KEY_DIMENSIONS:
            layer.update = _appending(layer.keys, layer.values)


def _appending(keys: torch.Tensor, values: torch.Tensor) -> Any:
    longer = [tensor.new_empty(*tensor.shape[:2], tensor.shape[2] + 1, tensor.shape[3]) for tensor in (keys, values)]

    def update(new_keys: torch.Tensor, new_values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        for kept, new in zip(longer, (new_keys, new_values), strict=True):
            kept[:, :, -1:].copy_(new)
        return tuple(longer)

    return update


def _walk(value: Any, path: str, depth: int, above: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth > _MAX_DEPTH or id(value) in above:
        return
    for name, part in _parts(value):
        yield from _walk(part, f"{path}.{name}" if path else name, depth + 1, above | {id(value)})


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(place), part) for place, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        yield from vars(value).items()

"""Layers that are alike, so that a trace needs only the first ones: the same modules, shapes and settings, whatever their place.

Without gradients a layer leaves nothing behind but its output and its share of the cache, so the peak of a model is that of a prefix with every kind of layer
in it, exactly.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

# What names a layer's own place; all other settings tell kinds apart.
_PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "layer_num")
_MIN_LAYERS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """A list of layers at `path`: the kind of each as a number, and how many of the first were kept."""

    path: str
    kinds: tuple[int, ...]
    num_kept: int


def shorten(model: torch.nn.Module, config: Any) -> list[LayerList]:
    """Shortens each list of layers of `model` to the shortest prefix that has every kind behind another layer, and returns what the lists were.

    The first layer alone is not enough for its kind: what it reads are the embeddings, and not the output of a layer.
    """
    found = []
    for path, layers in list(_layer_lists(model, config)):
        kinds: dict[Any, int] = {}
        numbers = tuple(kinds.setdefault(_kind(layer), len(kinds)) for layer in layers)
        num_kept = max(_last_needed(numbers, kind) for kind in kinds.values()) + 1
        found.append(LayerList(path=path, kinds=numbers, num_kept=num_kept))
        del layers[num_kept:]
    return found


def _last_needed(numbers: tuple[int, ...], kind: int) -> int:
    return next((place for place, number in enumerate(numbers) if number == kind and place), 0)


def _layer_lists(model: torch.nn.Module, config: Any) -> Iterator[tuple[str, torch.nn.ModuleList]]:
    """The outermost lists as long as a number of the config: its layers, not the experts in one of them or a list of heads."""
    lengths = set(_numbers(config))
    outer: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or any(path.startswith(f"{above}.") for above in outer):
            continue
        outer.append(path)
        if len(module) >= _MIN_LAYERS and len(module) in lengths:
            yield path, module


def _numbers(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if isinstance(value, int) and "layer" in name:
            yield value
        elif hasattr(value, "to_dict"):
            yield from _numbers(value)


def _kind(layer: torch.nn.Module) -> Any:
    """What two layers have in common that are alike."""
    return tuple(
        (
            path,
            type(module).__name__,
            tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters(recurse=False)),
            tuple(sorted((name, value) for name, value in vars(module).items() if _tells_apart(name, value))),
        )
        for path, module in layer.named_modules()
    )


def _tells_apart(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and not name.startswith("_") and name not in _PLACES

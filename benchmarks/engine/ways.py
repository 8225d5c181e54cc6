"""What the engine moves, and where to: choices by hand for any model with lists of blocks."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tightfit.engine.disk.disk_sizes import PAGE_BYTES
from tightfit.planner.plan import Choice

_HOST_BYTES = 1 << 22
_ON_DISK = {"tier": "disk", "disk_bytes": 1 << 23, "host_bytes": 9 * PAGE_BYTES}
TIERS = ("host", "disk")


def _choice(technique: str, where: str, **settings: Any) -> Choice:
    return Choice(technique=technique, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)


def _lists(model: nn.Module) -> Iterator[tuple[str, int]]:
    """The paths of lists of blocks of one kind, the outermost ones, with their lengths."""
    found: list[str] = []
    for path, part in model.named_modules():
        is_list = isinstance(part, nn.ModuleList | nn.Sequential) and len({type(each) for each in part}) == 1 < len(
            part
        )
        if is_list and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
            yield path, len(part)


def activations(model: nn.Module, tier: str) -> list[Choice]:
    """What all blocks but the last ones save for backward."""
    settings = _ON_DISK if tier == "disk" else {"host_bytes": _HOST_BYTES}
    return [
        _choice(
            "activation_offload",
            f"{type(model).__name__}.{path}.{number}",
            following="+1",
            smallest_bytes=1,
            **settings,
        )
        for path, length in _lists(model)
        for number in range(length - 1)
    ]


def optimizer(model: nn.Module, tier: str) -> list[Choice]:
    """The optimizer's states, with room for those of a few parameters on the card."""
    settings = _ON_DISK if tier == "disk" else {"host_bytes": _HOST_BYTES}
    return [_choice("optimizer_offload", "optimizer", least_elements=1, window_bytes=1 << 15, **settings)]


def weights(model: nn.Module, tier: str) -> list[Choice]:
    """Weights, gradients and states of all blocks at the host, or with the states on disk."""
    blocks = [f"{path}.{number}" for path, length in _lists(model) for number in range(length)]
    settings = {"blocks": blocks, "smallest_bytes": 1, "host_bytes": _HOST_BYTES}
    if tier == "disk":
        settings |= {"tier": "disk", "disk_bytes": 1 << 23, "window_bytes": 1 << 15, "least_elements": 1}
    return [_choice("trained_weight_streaming", type(model).__name__, **settings)]


def weights_on_disk(model: nn.Module, tier: str) -> list[Choice]:
    """Weights of all blocks on disk, trained there; gradients at the host, and states there or on disk too."""
    return [
        dataclasses.replace(each, settings={**each.settings, "weights": "disk", "at_once_bytes": 1 << 14})
        for each in weights(model, tier)
    ]


def frozen_weights(model: nn.Module, tier: str) -> list[Choice]:
    """The matrices of all blocks, which are not trained."""
    settings = _ON_DISK if tier == "disk" else {"host_bytes": _HOST_BYTES}
    return [
        _choice(
            "weight_streaming",
            f"{type(model).__name__}.{path}.{number}",
            preceding="-1" if number else "",
            following="+1" if number + 1 < length else "",
            smallest_bytes=1,
            **settings,
        )
        for path, length in _lists(model)
        for number in range(length)
    ]


def everything(model: nn.Module, tier: str) -> list[Choice]:
    """Weights, gradients, states and activations."""
    return [*weights(model, tier), *activations(model, tier)]


WAYS: dict[str, Callable[[nn.Module, str], list[Choice]]] = {
    "activations": activations,
    "optimizer": optimizer,
    "weights": weights,
    "weights on disk": weights_on_disk,
    "frozen weights": frozen_weights,
    "all": everything,
}


def freeze(model: nn.Module) -> None:
    """Has the matrices of blocks not trained."""
    for path, _ in _lists(model):
        for parameter in model.get_submodule(path).parameters():
            if parameter.dim() > 1:
                parameter.requires_grad_(False)

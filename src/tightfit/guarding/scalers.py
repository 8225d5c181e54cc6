"""The states of gradient scalers that a step uses: a scaler counts what was unscaled, and refuses a second time."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch


class ScalerStates:
    """The attributes of each `GradScaler` among `values`, at the beginning of the step."""

    def __init__(self, values: Iterable[Any]) -> None:
        scalers = {id(value): value for value in values if isinstance(value, torch.amp.GradScaler)}
        self._states = [(scaler, _copied(vars(scaler))) for scaler in scalers.values()]

    def restore(self) -> None:
        """Gives each scaler its attributes back."""
        for scaler, attributes in self._states:
            vars(scaler).clear()
            vars(scaler).update(_copied(attributes))


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of attributes and of the containers among them, two levels deep; tensors are shared, since only `update` writes to them."""
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        copied = copy.copy(value) if isinstance(value, dict) else value
        if isinstance(copied, dict):
            for key, inner in copied.items():
                copied[key] = copy.copy(inner) if isinstance(inner, dict) else inner
        found[name] = copied
    return found

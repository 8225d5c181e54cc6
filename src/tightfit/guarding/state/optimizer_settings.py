"""The settings of optimizers (learning rates, momenta) at the beginning of a step: plain values are put back, what else has changed is said."""

from collections.abc import Iterable
from typing import Any

import torch

from tightfit.effects.holders import is_plain


class OptimizerSettings:
    """The parameter groups of `optimizers` now, but for their parameters."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._groups = [(group, _settings(group)) for o in optimizers for group in o.param_groups]
        # A learning rate may be a tensor, which schedulers write to.
        tensors = [v for _, settings in self._groups for v in settings.values() if isinstance(v, torch.Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def obstacle(self, optimizers: Iterable[torch.optim.Optimizer]) -> str:
        """Why they cannot be what they were; empty if they can."""
        now = [group for o in optimizers for group in o.param_groups]
        is_same = len(now) == len(self._groups) and all(a is b for a, (b, _) in zip(now, self._groups, strict=True))
        if not is_same or any(tensor._version != version for tensor, version in self._versions):
            return "it changed the settings of an optimizer"
        for group, before in self._groups:
            after = _settings(group)
            for name in before.keys() | after.keys():
                one, other = before.get(name), after.get(name)
                if one is not other and not (_is_restored(one) and _is_restored(other)):
                    return f"it changed the setting {name} of an optimizer"
        return ""

    def restore(self) -> None:
        """Puts the plain ones back."""
        for group, before in self._groups:
            for name in _settings(group).keys() - before.keys():
                del group[name]
            group.update(before)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_restored(value: Any) -> bool:
    return is_plain(value) or (isinstance(value, tuple) and all(is_plain(each) for each in value))

"""The settings of optimizers (learning rates, momenta) at the beginning of a step: plain values are put back, what else has changed is said, as are their states."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tightfit.effects.holders import is_plain


class OptimizerSettings:
    """The parameter groups of `optimizers` now, but for their parameters."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = [(group, _settings(group)) for o in optimizers for group in o.param_groups]
        # A learning rate may be a tensor, which schedulers write to.
        tensors = [v for _, settings in self._groups for v in settings.values() if isinstance(v, torch.Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._states = _states(optimizers)
        self._of_states = _versions(self._states)

    def obstacle(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
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
        states = _states(optimizers)
        is_same = len(states) == len(self._states) and all(map(_is_same, states, self._states))
        return "" if is_same and _versions(states) == self._of_states else "it changed the states of an optimizer"

    def restore(self) -> None:
        """Puts the plain ones back."""
        for group, before in self._groups:
            for name in _settings(group).keys() - before.keys():
                del group[name]
            group.update(before)


def states_beside_weights(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """The state tensors of optimizers that lie where their weights are; those that a plan keeps at the host are not read."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if type(state) is dict and isinstance(parameter, torch.Tensor):
                yield from (v for v in state.values() if type(v) is torch.Tensor and v.device == parameter.device)


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    return [value for optimizer in optimizers for value in _contents(list(optimizer.state.values()))]


def _contents(value: Any) -> Iterator[Any]:
    if type(value) is dict or type(value) is list:
        for each in value.values() if type(value) is dict else value:
            yield from _contents(each)
    # Those that a plan keeps in a form of its own are dicts of its own.
    elif not isinstance(value, dict):
        yield value


def _versions(states: list[Any]) -> list[int]:
    return [value._version for value in states if type(value) is torch.Tensor and not value.is_inference()]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (is_plain(one) and is_plain(other) and one == other)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_restored(value: Any) -> bool:
    return is_plain(value) or (isinstance(value, tuple) and all(is_plain(each) for each in value))

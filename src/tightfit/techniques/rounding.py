"""Parameters in bfloat16 that are trained as if they had more bits: updates in float32, rounded at random or with the rest kept.

bfloat16 has 8 significant bits: an update below half of the last one would be lost at every step. Rounding up with a probability that is the
part cut off makes it right on average (Gupta et al., arXiv:1502.02551; Zamirai et al., "Revisiting BFloat16 training", arXiv:2010.06192);
keeping what was cut off in a second bfloat16 makes it right to 16 bits (Kahan summation, the second form in Zamirai et al.).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch

from tightfit.techniques.optimizer_steps import groups_by_parameter, only, step_of

Rounding = Literal["stochastic", "compensated"]

_BITS_CUT_OFF = 16  # float32 has 24 significant bits, bfloat16 the upper 8 of them


def round_stochastically(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`value` (float32, any shape) in bfloat16, rounded up or down with the probabilities that keep its expectation.

    Adding a random number to the bits that are cut off carries into those that stay just that often.
    """
    noise = torch.randint(1 << _BITS_CUT_OFF, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    bits = noise.add_(value.view(torch.int32)).bitwise_and_(-(1 << _BITS_CUT_OFF))
    return bits.view(torch.float32).to(torch.bfloat16)


@dataclasses.dataclass(slots=True)
class _Rest:
    """What was cut off of a parameter, and at which of its versions: one that was written to since has no rest."""

    value: torch.Tensor
    version: int


class LowPrecisionUpdate:
    """Steps an optimizer over parameters of which those in `lowered` are kept in bfloat16, each in float32 for the time of its update."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, lowered: Mapping[torch.Tensor, None], rounding: Rounding
    ) -> None:
        self._optimizer = optimizer
        self._lowered = lowered
        self._rounding = rounding
        self._step = step_of(optimizer)
        self._rests: dict[torch.Tensor, _Rest] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self) -> None:
        for parameter, group in groups_by_parameter(self._optimizer).items():
            if parameter.grad is None:
                continue
            if parameter in self._lowered:
                self._update(parameter, group)
            else:
                with only(self._optimizer, group, parameter):
                    self._step()

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether there is a rest of this parameter."""
        return parameter in self._rests

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter in float32, with its rest."""
        value = parameter.detach().float()
        rest = self._rests.get(parameter)
        if rest is not None and rest.version == parameter._version:
            value.add_(rest.value)
        return value

    def _update(self, parameter: torch.Tensor, group: int) -> None:
        states = self._optimizer.state
        value = self.whole(parameter)
        value.grad = parameter.grad.float() if parameter.grad is not None else None
        if parameter in states:
            states[value] = {name: _wide(state) for name, state in states.pop(parameter).items()}
        try:
            with only(self._optimizer, group, value):
                self._step()
        finally:
            if value in states:
                states[parameter] = states.pop(value)
        value.grad = None
        self._write(parameter, value)

    def _write(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        if self._rounding == "stochastic":
            parameter.copy_(round_stochastically(value, self._generator(value.device)))
            return
        parameter.copy_(value)
        rest = value.sub_(parameter).to(torch.bfloat16)
        self._rests[parameter] = _Rest(rest, parameter._version)

    def _generator(self, device: torch.device) -> torch.Generator:
        """A generator of our own: the script's random numbers stay what they were."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
            self._generators[device].manual_seed(0)
        return self._generators[device]


def _wide(state: Any) -> Any:
    """A state in float32, also one that an optimizer made for a parameter in bfloat16."""
    return state.float() if isinstance(state, torch.Tensor) and state.dtype == torch.bfloat16 else state


class WideStates:
    """Keeps an optimizer's states in float32 when a checkpoint is loaded: torch casts them to the type of their parameter."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}

    def before(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Remembers what is about to be loaded."""
        self._saved = state_dict

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the states back that were narrowed."""
        saved, self._saved = self._saved, {}
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved_group["params"], strict=True):
                for name, value in saved["state"].get(index, {}).items():
                    if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
                        optimizer.state[parameter][name] = value.to(parameter.device)

"""Master weights in 24 bits: a weight in bfloat16, and what was cut off of it in 8 bits more, as multiples of a 254th of its last bit.

The update is that of float32. The weight is rounded to the nearest bfloat16, so the rest is at most half of its last bit; the rest itself is rounded at random, so an update
below its last bit counts on average. As in Gonzalez Ortiz et al., "FlashOptim" (arXiv:2602.23349), but for the rounding of the rest.
"""

from collections import defaultdict
from typing import Any, final

import torch

from tightfit.techniques.optimizer.states.state_codecs import AbstractCodec, Encoded
from tightfit.techniques.optimizer.states.state_sizes import MIN_NUMBERS
from tightfit.techniques.optimizer.updates.optimizer_steps import beside, step_of, update_alone
from tightfit.techniques.precision.stochastic_rounding import (
    LoweredParameters,
    Rounded,
    put_states,
    sum_of_bits,
    wide,
)

RESIDUAL = "residual"
"""Its name among the states of a parameter, int8 of the parameter's shape."""
# Half of the last bit is 127.
_STEPS = 254.0
_EXPONENT_BITS = 0x7F80
_LAST_BIT = 2.0**-7


def residual_of(value: torch.Tensor, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """What `value` (float32) has beyond `weight` (bfloat16, the nearest to it), int8."""
    steps = (value - weight.float()).div_(_step_of(weight))
    noise = torch.rand(value.shape, dtype=torch.float32, device=value.device, generator=generator)
    # A weight that is no number has no rest.
    return steps.add_(noise).floor_().nan_to_num_(0.0, 0.0, 0.0).clamp_(-127, 127).to(torch.int8)


def with_residual(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`weight` (bfloat16) with its rest (int8), float32."""
    rest = residual.float().mul_(_step_of(weight))
    # Of a number that has overflowed the step is one too: nothing is added to it.
    return weight.float().add_(rest.masked_fill_(~weight.isfinite(), 0.0))


def _step_of(weight: torch.Tensor) -> torch.Tensor:
    """What one code stands for: a power of two next to the weight, times what is constant; float32, of the weight's shape."""
    power = weight.view(torch.int16).bitwise_and(_EXPONENT_BITS).view(torch.bfloat16).float()
    return power.clamp_min_(torch.finfo(torch.float32).tiny).mul_(_LAST_BIT / _STEPS)


@final
class MasterUpdate:
    """Updates parameters of `optimizer`, of which some are about to be in bfloat16 with a residual among their states; each of these is in float32 during its
    update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._lowered = LoweredParameters(optimizer)
        self._step = step_of(optimizer)
        self._update_whole = update_alone(optimizer)
        self._rounded = Rounded()
        # Of each weight when its residual was made: one that was written to since has none.
        self._bits: dict[torch.Tensor, torch.Tensor] = {}

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether there is a residual of this parameter."""
        return (
            parameter in self._lowered
            and parameter in self._bits
            and RESIDUAL in self._optimizer.state.get(parameter, {})
        )

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter in float32, with its residual."""
        weight = parameter.detach()
        if not self.holds(parameter):
            return weight.float()
        residual = self._optimizer.state[parameter][RESIDUAL]
        if residual.shape != weight.shape:
            return weight.float()
        # No branch, for which the host would wait.
        is_own = self._bits[parameter] == sum_of_bits(parameter)
        return with_residual(weight, residual * is_own)

    def update_one(self, parameter: torch.Tensor, group: int) -> None:
        """Updates one parameter, of the group with this index."""
        optimizer = self._optimizer
        if parameter not in self._lowered:
            optimizer.state.get(parameter, {}).pop(RESIDUAL, None)
            self._update_whole(parameter, group)
            return
        value = self.whole(parameter)
        assert parameter.grad is not None
        value.grad = parameter.grad.float()
        states: dict[torch.Tensor, Any] = defaultdict(dict)
        own = optimizer.state.get(parameter, {})
        own.pop(RESIDUAL, None)
        if own:
            states[value] = {name: wide(state) for name, state in own.items()}
        self._step(beside(optimizer, [{**optimizer.param_groups[group], "params": [value]}], states))
        value.grad = None
        parameter.copy_(value)
        # Of small ones too: the scales of a normalisation, which are near 1, would never change by less than half of their last bit, 0.2 or 0.4 %.
        residual = residual_of(value, parameter.detach(), self._rounded.generator(value.device))
        states[value][RESIDUAL] = residual
        self._bits[parameter] = sum_of_bits(parameter)
        put_states(optimizer, parameter, states[value])


@final
class MasterCodec(AbstractCodec):
    """Residuals of large parameters as they are, and all else by `inner`."""

    def __init__(self, inner: AbstractCodec) -> None:
        self._inner = inner

    def takes(self, name: str, shape: torch.Size) -> bool:
        if name == RESIDUAL:
            return shape.numel() >= MIN_NUMBERS
        return self._inner.takes(name, shape)

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        if name != RESIDUAL:
            return self._inner.encode(name, value)
        flat = value.detach().reshape(-1)
        return Encoded(main=flat, rest=flat[:0])

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if name != RESIDUAL:
            return self._inner.decode(name, encoded, shape, dtype)
        return encoded.main.view(shape)

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() if dtype == torch.int8 else self._inner.num_bytes(shape, dtype)

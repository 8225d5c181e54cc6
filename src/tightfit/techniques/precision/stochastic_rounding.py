"""Trains parameters in bfloat16 with updates in float32, by stochastic rounding or with a compensation term.

bfloat16 has 8 significant bits: an update below half of the last one would be lost at every step. Rounding up with a probability equal to the
truncated part makes it right on average (Gupta et al., arXiv:1502.02551; Zamirai et al., "Revisiting BFloat16 training", arXiv:2010.06192);
keeping the truncated part in a second bfloat16 makes it right to 16 bits (Kahan summation, the second form in Zamirai et al.).
"""

import dataclasses
from collections import defaultdict
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tightfit.effects.values.word_sums import sum_of_words
from tightfit.techniques.optimizer.updates.optimizer_steps import beside, groups_by_parameter, step_of, update_alone
from tightfit.techniques.precision.lower_precision import Rounding

_BITS_CUT_OFF = 16  # float32 has 24 significant bits, bfloat16 the upper 8 of them


def round_stochastically(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`value` (float32, any shape) in bfloat16, rounded up or down with the probabilities that keep its expectation.

    Adding a random number to the truncated bits carries into the remaining ones with just that probability.
    """
    noise = torch.randint(1 << _BITS_CUT_OFF, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    # Floats of one sign are ordered as their bits are: an integer addition moves to the next bfloat16 when it
    # carries.
    bits = noise.add_(value.view(torch.int32)).bitwise_and_(-(1 << _BITS_CUT_OFF))
    # The sum overflows for a NaN whose bits are all set, as those of CUDA's kernels are, and zero would hide that a run has diverged.
    return bits.view(torch.float32).masked_fill_(value.isnan(), torch.nan).to(torch.bfloat16)


class Rounded:
    """Rounds with random numbers of its own: the script's do not change. A fixed seed: two runs of one program round alike."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """`value` (float32, any shape) in bfloat16."""
        return round_stochastically(value, self.generator(value.device))

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator for tensors on `device`."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
            self._generators[device].manual_seed(0)
        return self._generators[device]


@dataclasses.dataclass(slots=True)
class _Rest:
    """The truncated part of a parameter, and a checksum of its bfloat16 bits: after any other write, also through `.data`, the part is not used."""

    value: torch.Tensor
    bits: torch.Tensor


def sum_of_bits(value: torch.Tensor) -> torch.Tensor:
    """A sum over the elements of a tensor in bfloat16 as integers."""
    return sum_of_words(value)


class LoweredParameters:
    """The parameters of `optimizer` that are in bfloat16 by the plan, which is about to cast some: these, and what the program makes of them (a head that
    grows), whose states are in float32. One that the program has cast to another type since is its own, as is what it had in bfloat16 itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        held = (p for group in optimizer.param_groups for p in group["params"])
        self._programs_own = WeakTensorKeyDictionary({p: None for p in held if p.dtype == torch.bfloat16})

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype == torch.bfloat16 and parameter not in self._programs_own


class LowPrecisionUpdate:
    """Steps an optimizer over parameters of which some are about to be in bfloat16; each of these is in float32 during its update."""

    def __init__(self, optimizer: torch.optim.Optimizer, rounding: Rounding) -> None:
        self._optimizer = optimizer
        self._lowered = LoweredParameters(optimizer)
        self._rounding = rounding
        self._step = step_of(optimizer)
        self._update_whole = update_alone(optimizer)
        self._rests: dict[torch.Tensor, _Rest] = {}
        self._rounded = Rounded()

    def __call__(self) -> list[torch.Tensor]:
        """Updates all parameters that have a gradient, and returns them."""
        groups = groups_by_parameter(self._optimizer)
        updated = [parameter for parameter in groups if parameter.grad is not None]
        for parameter in updated:
            if parameter in self._lowered:
                self._update(parameter, groups[parameter])
            else:
                self._update_whole(parameter, groups[parameter])
        return updated

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether there is a compensation term for this parameter."""
        return parameter in self._rests

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter in float32, with its compensation term."""
        value = parameter.detach().float()
        rest = self._rests.get(parameter)
        if rest is not None and rest.value.shape == value.shape and parameter in self._lowered:
            # No branch, for which the host would wait: a parameter that was written to since gets nothing.
            value.add_(rest.value * (rest.bits == sum_of_bits(parameter)))
        return value

    def _update(self, parameter: torch.Tensor, group: int) -> None:
        optimizer = self._optimizer
        value = self.whole(parameter)
        assert parameter.grad is not None
        value.grad = parameter.grad.float()
        states: dict[torch.Tensor, Any] = defaultdict(dict)
        if parameter in optimizer.state:
            states[value] = {name: wide(state) for name, state in optimizer.state[parameter].items()}
        self._step(beside(optimizer, [{**optimizer.param_groups[group], "params": [value]}], states))
        if value in states:
            put_states(optimizer, parameter, states[value])
        value.grad = None
        self._write(parameter, value)

    def _write(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        if self._rounding == "stochastic":
            parameter.copy_(self._rounded.of(value))
            return
        parameter.copy_(value)
        # Of a weight that is no number, or has overflowed, there is none: it would outlive the weights that the program loads in its place, as zero times it is no number.
        rest = value.sub_(parameter).nan_to_num_(0.0, 0.0, 0.0).to(torch.bfloat16)
        self._rests[parameter] = _Rest(rest, sum_of_bits(parameter))


def wide(state: Any) -> Any:
    """A state in float32, also if an optimizer made it for a bfloat16 parameter."""
    return state.float() if isinstance(state, torch.Tensor) and state.dtype == torch.bfloat16 else state


def put_states(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, made: dict[str, Any]) -> None:
    """Sets the states of a parameter, in the dict that is there: the program may have a name of its own for it."""
    if parameter in optimizer.state:
        own = optimizer.state[parameter]
        own.clear()
        own.update(made)
    else:
        optimizer.state[parameter] = made


class WideStates:
    """Keeps an optimizer's states in float32 when a checkpoint is loaded: torch casts them to the dtype of their parameter."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}

    def before(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Remembers the checkpoint that is about to be loaded."""
        self._saved = state_dict

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Restores the float32 states from the checkpoint. What hooks of the program's have made of one since is its own."""
        saved, self._saved = self._saved, {}
        # A hook may have given torch a checkpoint with other groups.
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=False):
            for parameter, index in zip(group["params"], saved_group["params"], strict=False):
                own = optimizer.state.get(parameter, {})
                for name, value in saved["state"].get(index, {}).items():
                    if name in own and _is_cast_of(own[name], value):
                        own[name] = value.to(parameter.device)


def _is_cast_of(loaded: Any, value: Any) -> bool:
    """Whether torch has made the one of the other, to the type of a parameter in bfloat16."""
    if not isinstance(loaded, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if loaded.dtype != torch.bfloat16 or not value.is_floating_point() or loaded.shape != value.shape:
        return False
    cast = value.to(device=loaded.device, dtype=loaded.dtype)
    # What is not a number is not equal to itself.
    return bool(((loaded == cast) | (loaded.isnan() & cast.isnan())).all())

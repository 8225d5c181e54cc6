"""Runs a segment of blocks so that each is computed again in its backward pass, from an input that is itself computed again.

Each block is checkpointed, but where its input would be kept there is a handle. When the last block's second run asks its handle, all blocks before
it run once more without gradients, from the input of the first, each with the random state of its first run; what they give is kept until their own
second run takes it. A block whose input is not what the block before it returned begins again, and keeps its input.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import get_device_states, set_device_states

from tightfit.errors import ApplyError
from tightfit.techniques.forwards import Around
from tightfit.techniques.recompute import Recomputed

_INPUT = object()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Call:
    """The first run of one block. In its arguments `_INPUT` stands for its input, but for the first block of a pass: a handle there would
    hold the pass that holds it, and with it the input of the first block."""

    forward: Callable[..., Any]
    cpu_state: torch.Tensor
    devices: list[int]
    device_states: list[torch.Tensor]
    device_type: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Whether the next block took the first element of what this one returned, rather than all of it.
    is_tuple: bool = False

    def again(self, value: torch.Tensor | None) -> torch.Tensor:
        """What the next block takes, for the input `value`."""

        def resolved(argument: Any) -> Any:
            return value if argument is _INPUT else argument

        autocast = {
            "dtype": torch.get_autocast_dtype(self.device_type),
            "enabled": torch.is_autocast_enabled(self.device_type),
        }
        # The cache is off: what is cast here has no gradients, and would be found by what needs them.
        with (
            torch.no_grad(),
            torch.autocast(self.device_type, cache_enabled=False, **autocast),
            torch.random.fork_rng(self.devices, device_type=self.device_type if self.devices else "cuda"),
        ):
            torch.set_rng_state(self.cpu_state)
            set_device_states(self.devices, self.device_states, device_type=self.device_type)
            args, kwargs = tree_map(resolved, (self.args, dict(self.kwargs)))
            result = self.forward(*args, **kwargs)
        return result[0] if self.is_tuple else result


class _Pass:
    """One forward pass through the segment, or through what is left of it."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.last_output: Callable[[], torch.Tensor | None] = lambda: None
        self._inputs: dict[int, torch.Tensor] = {}

    def input(self, number: int) -> torch.Tensor:
        """The input of the block that was called as number `number`, computed again."""
        if number not in self._inputs:
            value = None
            for position, call in enumerate(self.calls[:number]):
                value = call.again(value)
                self._inputs[position + 1] = value
        return self._inputs.pop(number)


class _Handle:
    """Stands for an input: the tensor itself during the first run, and after it what `_Pass.input` gives."""

    def __init__(self, owner: _Pass, number: int, value: torch.Tensor) -> None:
        self._owner = owner
        self._number = number
        self._requires_grad = value.requires_grad
        self.value: torch.Tensor | None = value

    def get(self) -> torch.Tensor:
        """The input."""
        if self.value is not None:
            return self.value
        return self._owner.input(self._number).requires_grad_(self._requires_grad)


class Segment:
    """Consecutive blocks that share the kept input of the first."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._recomputed = [Recomputed(module) for module in modules]
        self._checked = [False] * len(modules)
        self._current: _Pass | None = None

    def around(self, number: int) -> Around:
        """The code around the forward of block `number`."""
        return _Around(self, number)

    def run(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of block `number` in a forward pass with gradients."""
        previous = None if self._current is None or number == 0 else self._current.last_output()
        given = [*args, *kwargs.values()]
        if self._current is None or previous is None or not any(value is previous for value in given):
            self._current = _Pass()
            previous = None
        current = self._current
        handle = None if previous is None else _Handle(current, len(current.calls), previous)
        call = _call(self._modules[number], forward, given)
        current.calls.append(call)
        if handle is not None:
            args = tuple(handle if value is previous else value for value in args)
            kwargs = {name: handle if value is previous else value for name, value in kwargs.items()}
        # A checkpoint keeps the random state of the devices of its arguments; a handle has none.
        anchor = next(self._modules[number].parameters(), previous)
        watched = self._watched(number, given)
        result = self._recomputed[number](_resolving(call), anchor, *args, **kwargs)
        if handle is not None:
            handle.value = None
        if any(tensor._version != version for tensor, version in watched):
            raise ApplyError(
                f"a {type(self._modules[number]).__name__} changes its input or its buffers; leave nested_checkpointing out"
            )
        self._checked[number] = True
        if number + 1 == len(self._modules):
            self._current = None
        else:
            call.is_tuple = isinstance(result, tuple | list)
            output = result[0] if isinstance(result, tuple | list) and result else result
            current.last_output = weakref.ref(output) if isinstance(output, torch.Tensor) else lambda: None
        return result

    def _watched(self, number: int, given: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
        if self._checked[number]:
            return []
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        return [(tensor, tensor._version) for tensor in (*tensors, *self._modules[number].buffers())]


class _Around:
    """The code around the forward of one block; copies of a model share it, as they do not train at the same time."""

    def __init__(self, segment: Segment, number: int) -> None:
        self._segment = segment
        self._number = number

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Around":
        return self

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return self._segment.run(self._number, forward, args, kwargs)


def _call(module: torch.nn.Module, forward: Callable[..., Any], given: Sequence[Any]) -> _Call:
    devices, states = get_device_states(*given)
    tensors = [value for value in (*given, *module.parameters()) if isinstance(value, torch.Tensor)]
    return _Call(
        forward=forward,
        cpu_state=torch.get_rng_state(),
        devices=devices,
        device_states=states,
        device_type=tensors[0].device.type if tensors else "cpu",
    )


def _resolving(call: _Call) -> Callable[..., Any]:
    """The block's forward for arguments among which a handle is; it remembers them at the first run, as a checkpoint hands them on."""
    is_first = True

    def run(_: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first:
            call.args, call.kwargs = tree_map(lambda a: _INPUT if isinstance(a, _Handle) else a, (args, kwargs))
            is_first = False
        args, kwargs = tree_map(lambda a: a.get() if isinstance(a, _Handle) else a, (args, kwargs))
        return call.forward(*args, **kwargs)

    return run

"""Runs a segment of blocks so that each is recomputed in its backward pass, from an input that is itself recomputed.

Each block is checkpointed, but with a handle instead of its input. When the last block's second run asks its handle, all blocks before it run once
more, saving nothing for backward, from the input of the first, each with the random state of its first run; their outputs are kept until their
own second run takes them. A block whose input is not the output of the block before it starts a new pass, and saves its input.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from tightfit.effects.values.fingerprints import paused
from tightfit.techniques.recomputation.call_arguments import tensors_in
from tightfit.techniques.recomputation.recompute import Recomputed, RecomputedCall
from tightfit.techniques.wrappers.forwards import Around
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.techniques.wrappers.unwrap_model import module_of

_INPUT = object()


class _Replay:
    """The first run of one block, with everything that is needed to run it again. `_INPUT` replaces its input among the arguments, except for the
    first block of a pass: a handle there would refer to the pass that refers to it, and keep the input of the first block alive."""

    def __init__(self, recomputed: Recomputed, forward: Callable[..., Any], given: Sequence[Any]) -> None:
        self.recomputed = recomputed
        self.forward = forward
        self.call: RecomputedCall | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: Mapping[str, Any] = {}
        # Whether the next block took the first element of what this one returned, rather than all of it.
        self.is_tuple = False
        # What the next block takes, and its version when this block returned it.
        self.output: Callable[[], torch.Tensor | None] = lambda: None
        self.output_version = 0
        self._cpu_state = torch.get_rng_state()
        self._devices, self._device_states = get_device_states(*given)
        tensors = [v for v in (*given, *recomputed.owner().parameters()) if isinstance(v, torch.Tensor)]
        self._device_type = tensors[0].device.type if tensors else "cpu"

    def again(self, value: torch.Tensor | None) -> torch.Tensor:
        """The input of the next block, computed from this block's input `value`."""

        def resolved(argument: Any) -> Any:
            return value if argument is _INPUT else argument

        autocast = {
            "dtype": torch.get_autocast_dtype(self._device_type),
            "enabled": torch.is_autocast_enabled(self._device_type),
        }
        assert self.call is not None, "the first run is over"
        # Gradients are on, as code may check, and kernels are chosen by it. The cache is off: its casts would
        # have a graph without saved tensors.
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(_nothing, self._refuse_to_give),
            torch.autocast(self._device_type, cache_enabled=False, **autocast),
            torch.random.fork_rng(self._devices, device_type=self._device_type if self._devices else "cuda"),
        ):
            torch.set_rng_state(self._cpu_state)
            set_device_states(self._devices, self._device_states, device_type=self._device_type)
            args, kwargs = _each(resolved, self.args, self.kwargs)
            with self.call.again(tensors_in((*args, *kwargs.values()))):
                result = self.forward(*args, **kwargs)
        output = result[0] if self.is_tuple else result
        # The replay's graph saved nothing; the block's own second run starts a new one.
        return output.detach().requires_grad_(output.requires_grad)

    def _refuse_to_give(self, _: None) -> Any:
        assert self.call is not None
        raise self.call.owner.refusal(
            "computes a gradient inside its forward, which is not possible while the input of the next block is "
            "recomputed"
        )

    def begins(self, call: RecomputedCall) -> None:
        """Remembers the call of the first run."""
        self.call = call

    def returned(self, result: Any) -> None:
        """Remembers the result of the first run."""
        self.is_tuple = isinstance(result, tuple | list)
        output = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(output, torch.Tensor):
            self.output, self.output_version = weakref.ref(output), output._version

    def unchanged_output(self) -> torch.Tensor | None:
        """The output, if it was not written to since: a replay gives the output as it was returned."""
        output = self.output()
        return output if output is not None and output._version == self.output_version else None


class _Pass:
    """One forward pass through the segment, or through the rest of it."""

    def __init__(self) -> None:
        self.replays: list[_Replay] = []
        self._inputs: dict[int, torch.Tensor] = {}

    def last_output(self) -> torch.Tensor | None:
        """The output of the last block, if it can be recomputed."""
        return self.replays[-1].unchanged_output() if self.replays else None

    def input(self, number: int) -> torch.Tensor:
        """The recomputed input of the block that was called as number `number`."""
        if number not in self._inputs:
            value = None
            for position, replay in enumerate(self.replays[:number]):
                value = replay.again(value)
                self._inputs[position + 1] = value
        # Taken once: it is an activation like any other, and freed with the block's graph.
        return self._inputs.pop(number)


class _Handle:
    """A placeholder for an input: the tensor itself during the first run, and afterwards the result of `_Pass.input`."""

    def __init__(self, owner: _Pass, number: int, value: torch.Tensor) -> None:
        self._owner = owner
        self._number = number
        self._requires_grad = value.requires_grad
        self.value: torch.Tensor | None = value

    def get(self) -> torch.Tensor:
        """The input."""
        if self.value is not None:
            return self.value
        # The blocks before this one run inside of its own second run, and are no part of it.
        with paused():
            return self._owner.input(self._number).requires_grad_(self._requires_grad)


class Segment:
    """Consecutive blocks that share the saved input of the first. `recomputed` are the wrappers around each of them."""

    def __init__(self, recomputed: Sequence[Recomputed]) -> None:
        self._recomputed = recomputed
        self._current: _Pass | None = None

    def around(self, number: int) -> Around:
        """The wrapper around the forward of block `number`."""
        return _Around(self, number)

    def is_of(self, number: int, module: torch.nn.Module) -> bool:
        """Whether block `number` is this very module, and not that of a copy of the model."""
        return self._recomputed[number].is_of(module)

    def is_left_alone(self, number: int) -> bool:
        """Whether block `number` is not checkpointed in this call."""
        return self._recomputed[number].is_left_alone()

    def run(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of block `number` in a forward pass with gradients."""
        previous = None if self._current is None or number == 0 else self._current.last_output()
        given = [*args, *kwargs.values()]
        # By identity: any code between two blocks (an addition, a cast) gives another tensor, which no replay
        # would give.
        if self._current is None or previous is None or not any(value is previous for value in given):
            self._current = _Pass()
            previous = None
        current, recomputed = self._current, self._recomputed[number]
        handle = None if previous is None else _Handle(current, len(current.replays), previous)
        replay = _Replay(recomputed, forward, given)
        current.replays.append(replay)
        version = -1 if previous is None else previous._version
        if handle is not None:
            args = tuple(handle if value is previous else value for value in args)
            kwargs = {name: handle if value is previous else value for name, value in kwargs.items()}
        # A checkpoint keeps the random state of the devices of its arguments; a handle has none.
        anchor = next(recomputed.owner().parameters(), previous)
        try:
            result = recomputed.run(_resolving(replay), (anchor, *args), kwargs, replay.begins)
        except BaseException:
            # A pass that was cut short is not continued.
            self._current = None
            raise
        if handle is not None:
            handle.value = None
        if previous is not None and previous._version != version:
            raise recomputed.refusal(
                "modifies its own input in place, so a recomputation would start from other values"
            )
        if number + 1 == len(self._recomputed):
            self._current = None
        else:
            replay.returned(result)
        return result


class _Around:
    """The wrapper around the forward of one block. A copy of the model runs its blocks without it."""

    def __init__(self, segment: Segment, number: int) -> None:
        self._segment = segment
        self._number = number

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Around":
        return self

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        is_ours = self._segment.is_of(self._number, module_of(forward))
        if (
            not torch.is_grad_enabled()
            or not is_ours
            or torch.compiler.is_compiling()
            or self._segment.is_left_alone(self._number)
            or is_looked_at(args, kwargs)
        ):
            return forward(*args, **kwargs)
        return self._segment.run(self._number, forward, args, kwargs)


def _resolving(replay: _Replay) -> Callable[..., Any]:
    """The block's forward for arguments with a handle among them; it remembers them at the first run, as the checkpoint passes them."""
    is_first = True

    def run(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first:
            replay.args, replay.kwargs = _each(lambda a: _INPUT if isinstance(a, _Handle) else a, args, kwargs)
            is_first = False
        args, kwargs = _each(lambda a: a.get() if isinstance(a, _Handle) else a, args, kwargs)
        return replay.forward(*args, **kwargs)

    return run


def _nothing(_: Any) -> Any:
    """Saves nothing: no backward pass will need the tensor."""


def _each(
    change: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, each replaced by `change`; a list or a dict among them is passed as it is."""
    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}
